/* Tests page files that are damaged, were written for another model or configuration, or are hostile: each must be rejected with
 * the expected status and must not affect live sequences.
 *
 * In addition to the golden files, tests every flipped bit of a file, every truncated length, and values that can occur only in a
 * hand-crafted header.
 */
#include "golden_cases.h"
#include "page_file_fixture.h"
#include "test.h"

#include "../src/base/float16.h"
#include "../src/store/page_file_format.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static uint8_t bytes[GOLDEN_BYTES];
static uint8_t other[GOLDEN_BYTES];

static const char *golden_path(const char *name) {
    static char path[FILE_FIXTURE_PATH];
    (void)snprintf(path, sizeof path, "%s/%s.fkv", FKV_GOLDEN_DIR, name);
    return path;
}

/* Checks the status that each reader returns for a damaged file, and that the fixture is unchanged. */
static void check_case(file_fixture *w, const golden_case *c, const char *path) {
    const uint32_t free_before = file_fixture_free_pages(w);
    fkv_file_info info;
    memset(&info, 0x55, sizeof info);
    const fkv_file_info untouched = info;
    fkv_seq seq = 99;
    uint32_t n_tokens = 99;
    const fkv_status look = c->noticed_by == GOLDEN_LOOK ? c->status : FKV_OK;
    const fkv_status verify = c->noticed_by <= GOLDEN_VERIFY ? c->status : FKV_OK;
    fkv_status got = fkv_file_inspect(path, false, &info);
    ck_assert_msg(got == look, "inspect %s: %s (%s)", c->name, fkv_status_name(got), fkv_message());
    if (look != FKV_OK) ck_assert_mem_eq(&info, &untouched, sizeof info);
    got = fkv_file_tokens(path, NULL, 0, &n_tokens);
    ck_assert_msg(got == look, "tokens of %s: %s (%s)", c->name, fkv_status_name(got), fkv_message());
    ck_assert((got == FKV_OK) == (n_tokens != 99));
    got = fkv_file_inspect(path, true, &info);
    ck_assert_msg(got == verify, "verify %s: %s (%s)", c->name, fkv_status_name(got), fkv_message());
    got = file_fixture_load(w, 32, path, &seq);
    ck_assert_msg(got == c->status, "load %s: %s (%s)", c->name, fkv_status_name(got), fkv_message());
    ck_assert_msg(strstr(fkv_message(), c->says) != NULL, "load %s: %s", c->name, fkv_message());
    ck_assert_uint_eq(seq, 99);
    ck_assert_uint_eq(file_fixture_free_pages(w), free_before);
}

START_TEST(every_kind_of_damage_returns_its_exact_status) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const char *path = file_fixture_path("damaged.fkv");
    for (size_t i = 0; i < N_GOLDEN_CASES; i++) {
        const golden_case *c = &GOLDEN_CASES[i];
        size_t n = file_fixture_read_file(golden_path("small"), bytes, sizeof bytes);
        n = golden_damage(c, bytes, n);
        file_fixture_write_file(path, bytes, n);
        check_case(&w, c, path);
    }
    fkv_seq seq = 0;
    ck_ok(file_fixture_load(&w, 32, golden_path("small"), &seq));
    ck_assert(file_fixture_holds(&w, seq, FILE_FIXTURE_GOLDEN_SEED, FILE_FIXTURE_SMALL_TOKENS));
    file_fixture_close(&w);
}
END_TEST

START_TEST(damaged_golden_files_are_rejected_with_their_exact_status) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    for (size_t i = 0; i < N_GOLDEN_CASES; i++) {
        const golden_case *c = &GOLDEN_CASES[i];
        if (!c->committed) continue;
        size_t n = file_fixture_read_file(golden_path("small"), bytes, sizeof bytes);
        n = golden_damage(c, bytes, n);
        ck_assert_uint_eq(file_fixture_read_file(golden_path(c->name), other, sizeof other), n);
        ck_assert_mem_eq(bytes, other, n);
        check_case(&w, c, golden_path(c->name));
    }
    file_fixture_close(&w);
}
END_TEST

START_TEST(golden_files_match_what_save_writes_and_load_restores) {
    const struct {
        const char *name;
        const file_fixture_spec *spec;
        uint32_t n_tokens;
    } goods[] = {{"good", &FILE_FIXTURE_GOOD, FILE_FIXTURE_GOOD_TOKENS},
                 {"small", &FILE_FIXTURE_SMALL, FILE_FIXTURE_SMALL_TOKENS}};
    for (size_t i = 0; i < 2; i++) {
        const char *path = file_fixture_path("written.fkv");
        file_fixture w;
        file_fixture_open(&w, goods[i].spec, 0xd7);
        const fkv_seq seq = file_fixture_fill(&w, FILE_FIXTURE_GOLDEN_SEED, goods[i].n_tokens, goods[i].n_tokens);
        ck_ok(file_fixture_save(&w, seq, FILE_FIXTURE_GOLDEN_SEED, goods[i].n_tokens, path));
        const size_t n = file_fixture_read_file(path, bytes, sizeof bytes);
        ck_assert_uint_eq(file_fixture_read_file(golden_path(goods[i].name), other, sizeof other), n);
        ck_assert_mem_eq(bytes, other, n);
        fkv_seq loaded = 0;
        ck_ok(file_fixture_load(&w, goods[i].n_tokens, golden_path(goods[i].name), &loaded));
        ck_assert(file_fixture_holds(&w, loaded, FILE_FIXTURE_GOLDEN_SEED, goods[i].n_tokens));
        file_fixture_close(&w);
    }
}
END_TEST

static uint16_t half_at(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return half;
}

START_TEST(documented_offsets_locate_the_rows_of_a_golden_file) {
    /* reads small.fkv according to docs/page_format.md, with numeric offsets instead of the library's structs */
    (void)file_fixture_read_file(golden_path("small"), bytes, sizeof bytes);
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    for (uint32_t token = 0; token < FILE_FIXTURE_SMALL_TOKENS; token++) {
        const uint8_t *block = bytes + 4096;
        float k[32];
        float v[32];
        float row[32];
        for (uint32_t d = 0; d < 32; d++) {
            const float k_scale = fkv_f16_to_f32(half_at(block + 512 + 2 * token));
            const float k_bias = fkv_f16_to_f32(half_at(block + 576 + 2 * token));
            const float v_scale = fkv_f16_to_f32(half_at(block + 896 + 2 * token));
            const float v_bias = fkv_f16_to_f32(half_at(block + 960 + 2 * token));
            k[d] = k_scale * (float)block[32 * token + d] + k_bias;
            v[d] = v_scale * (float)(block[640 + 16 * token + d / 2] >> 4 * (d % 2) & 15) + v_bias;
        }
        fkv_rotation rotation;
        fkv_rotation_make(7, 0, 32, &rotation);
        fkv_rotation_undo(&rotation, k);
        /* Row values are between -4 and 4, except for two channels that are 20 times larger. Rotated K values are between -50 and
         * 50, so one 8-bit quantization step is at most 0.4. Undoing the rotation averages the errors of 32 channels. One 4-bit
         * quantization step of V is at most 11. */
        file_fixture_row(&w, FILE_FIXTURE_GOLDEN_SEED, 0, FKV_SIDE_K, 0, token, row);
        for (uint32_t d = 0; d < 32; d++) ck_assert(fabsf(k[d] - row[d]) <= 0.5f);
        file_fixture_row(&w, FILE_FIXTURE_GOLDEN_SEED, 0, FKV_SIDE_V, 0, token, row);
        for (uint32_t d = 0; d < 32; d++) ck_assert(fabsf(v[d] - row[d]) <= 11.0f);
    }
    file_fixture_close(&w);
}
END_TEST

START_TEST(worked_examples_of_the_format_document_are_correct) {
    /* the worked examples in sections 1.4 and 3.1 of docs/page_format.md */
    static const uint8_t codes[16] = {0xef, 0xde, 0xcd, 0xbc, 0xbb, 0xaa, 0x99, 0x88,
                                      0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00};
    fkv_codec codec;
    float x[32];
    for (int j = 0; j < 32; j++) x[j] = (float)(j - 8) / 4.0f;
    ck_ok(fkv_codec_make((fkv_codec_config){4, 32}, 32, FKV_F16, &codec));
    uint8_t *part[FKV_N_PARTS] = {bytes, bytes + 16, bytes + 18};
    fkv_codec_encode(&codec, x, part);
    ck_assert_mem_eq(bytes, codes, sizeof codes);
    ck_assert_uint_eq(half_at(bytes + 16), 0xb82f);
    ck_assert_uint_eq(half_at(bytes + 18), 0x45c0);

    fkv_rotation rotation;
    fkv_rotation_make(7, 0, 80, &rotation);
    ck_assert_uint_eq(rotation.block, 16);
    ck_assert_uint_eq(rotation.signs[0], 0x59320dd7);
    ck_assert_uint_eq(rotation.signs[1], 0x63cbe1e4);
    ck_assert_uint_eq(rotation.signs[2], 0x0000661c);
    fkv_rotation_make(7, 1, 80, &rotation);
    ck_assert_uint_eq(rotation.signs[0], 0x0ff8632f);
}
END_TEST

START_TEST(every_flipped_bit_of_a_file_is_detected) {
    const char *path = file_fixture_path("flipped.fkv");
    const size_t n = file_fixture_read_file(golden_path("small"), bytes, sizeof bytes);
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const uint32_t free_before = file_fixture_free_pages(&w);
    file_fixture_write_file(path, bytes, n);
    const int fd = open(path, O_RDWR);
    ck_assert_int_ge(fd, 0);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        const uint8_t flipped = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
        fkv_seq seq = 0;
        ck_assert_int_eq(pwrite(fd, &flipped, 1, (off_t)(bit / 8)), 1);
        const fkv_status status = file_fixture_load(&w, 32, path, &seq);
        const fkv_status expected = bit < 8 * 8 ? FKV_FILE_FORMAT : bit < 12 * 8 ? FKV_FILE_VERSION : FKV_FILE_DAMAGED;
        ck_assert_msg(status == expected, "bit %zu of byte %zu: %s", bit % 8, bit / 8, fkv_status_name(status));
        ck_assert_int_eq(pwrite(fd, &bytes[bit / 8], 1, (off_t)(bit / 8)), 1);
    }
    ck_assert_uint_eq(file_fixture_free_pages(&w), free_before);
    fkv_seq seq = 0;
    ck_ok(file_fixture_load(&w, 32, path, &seq));
    ck_assert_int_eq(close(fd), 0);
    file_fixture_close(&w);
}
END_TEST

START_TEST(file_truncated_at_any_length_is_rejected) {
    const char *path = file_fixture_path("cut.fkv");
    const size_t n = file_fixture_read_file(golden_path("good"), bytes, sizeof bytes);
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_GOOD, 0);
    const uint32_t free_before = file_fixture_free_pages(&w);
    file_fixture_write_file(path, bytes, n);
    for (size_t length = n; length-- > 0;) {
        fkv_seq seq = 0;
        ck_assert_int_eq(truncate(path, (off_t)length), 0);
        ck_status(file_fixture_load(&w, 64, path, &seq), length < 8 ? FKV_FILE_FORMAT : FKV_FILE_DAMAGED);
    }
    ck_assert_uint_eq(file_fixture_free_pages(&w), free_before);
    file_fixture_close(&w);
}
END_TEST

START_TEST(bytes_in_unused_slots_do_not_reach_the_pages) {
    const char *path = file_fixture_path("smuggled.fkv");
    size_t n = file_fixture_read_file(golden_path("small"), bytes, sizeof bytes);
    memset(bytes + 4096 + 32 * FILE_FIXTURE_SMALL_TOKENS, 0x66, 32 * 6); /* overwrites the K codes of unused slots */
    memset(bytes + 4096 + 512 + 32, 0x66, 32); /* overwrites the padding between K scales and K biases */
    file_fixture_fix_crcs(bytes, n);
    file_fixture_fix_digest(bytes, n);
    file_fixture_write_file(path, bytes, n);
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0xee);
    fkv_seq seq = 0;
    ck_ok(file_fixture_load(&w, 32, path, &seq));
    ck_assert(file_fixture_holds(&w, seq, FILE_FIXTURE_GOLDEN_SEED, FILE_FIXTURE_SMALL_TOKENS));
    file_fixture_close(&w);
}
END_TEST

START_TEST(foreign_file_is_reported_by_its_first_differing_field) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_GOOD, 0);
    const fkv_file_layer mine = w.spec.layers[1];
    fkv_file_layer *layer = &w.spec.layers[1];
    fkv_seq seq = 0;
    const struct {
        uint32_t *field;
        uint32_t value;
        const char *says;
    } changes[] = {
        {&layer->head_dim, 64, "head_dim of layer 1 is 32 in the file but 64 in this cache"},
        {&layer->window, 9, "window of layer 1 is 8 in the file but 9 in this cache"},
        {&layer->n_sinks, 0, "n_sinks of layer 1 is 4 in the file but 0 in this cache"},
        {&layer->k.bits, 8, "k.bits of layer 1 is 16 in the file but 8 in this cache"},
        {&w.spec.layers[0].k.group, 64, "k.group of layer 0 is 32 in the file but 64 in this cache"},
        {&w.spec.layers[0].v.group, 128, "v.group of layer 0 is 32 in the file but 128 in this cache"},
        {&w.identity.n_layers, 2, "n_layers is 3 in the file but 2 in this cache"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        const uint32_t before = *changes[i].field;
        *changes[i].field = changes[i].value;
        ck_status(file_fixture_load(&w, 64, golden_path("good"), &seq), FKV_FILE_FOREIGN);
        ck_assert_msg(strstr(fkv_message(), changes[i].says) != NULL, "%s", fkv_message());
        *changes[i].field = before;
    }
    ck_assert_mem_eq(&mine, layer, sizeof mine);
    layer->k.group = 77; /* the group size is ignored, because the layer has 16-bit rows */
    ck_ok(file_fixture_load(&w, 64, golden_path("good"), &seq));
    file_fixture_close(&w);
}
END_TEST

START_TEST(rotation_seed_is_ignored_without_rotation) {
    const char *path = file_fixture_path("unrotated.fkv");
    const char *same = file_fixture_path("unrotated2.fkv");
    file_fixture_spec spec = FILE_FIXTURE_SMALL;
    spec.rotate = FKV_ROTATE_NONE;
    file_fixture w;
    file_fixture_open(&w, &spec, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    ck_ok(file_fixture_save(&w, seq, 1, 10, path));
    w.identity.rotation_seed = 1234;
    ck_ok(file_fixture_save(&w, seq, 1, 10, same));
    const size_t n = file_fixture_read_file(path, bytes, sizeof bytes);
    ck_assert_uint_eq(file_fixture_read_file(same, other, sizeof other), n);
    ck_assert_mem_eq(bytes, other, n);
    fkv_seq loaded = 0;
    ck_ok(file_fixture_load(&w, 10, path, &loaded));
    file_fixture_close(&w);
}
END_TEST

START_TEST(plan_beyond_the_limits_of_the_format_is_rejected) {
    static fkv_file_layer layers[FKV_MAX_LAYERS];
    fkv_file_plan plan;
    fkv_file_header header = {.page_tokens = 16, .page_type = FKV_F16, .n_layers = 9, .n_tokens = 100};
    for (uint32_t l = 0; l < FKV_MAX_LAYERS; l++) layers[l] = (fkv_file_layer){1, 64, l + 1, 0, {8, 64}, {4, 64}};
    ck_status(fkv_file_plan_make(&header, layers, "nine groups", &plan), FKV_FILE_DAMAGED);
    header.n_layers = 8;
    ck_ok(fkv_file_plan_make(&header, layers, "eight groups", &plan));

    /* the largest 32-bit values, with which every product and sum must be checked for overflow */
    header = (fkv_file_header){.page_tokens = 256, .page_type = FKV_BF16, .n_layers = FKV_MAX_LAYERS, .n_tokens = UINT32_MAX};
    for (uint32_t l = 0; l < FKV_MAX_LAYERS; l++) layers[l] = (fkv_file_layer){UINT32_MAX, 512, 0, 0, {16, 0}, {16, 0}};
    ck_status(fkv_file_plan_make(&header, layers, "huge", &plan), FKV_FILE_DAMAGED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "exceed the maximum file size"));
    for (uint32_t l = 0; l < FKV_MAX_LAYERS; l++) layers[l].window = UINT32_MAX - l % 8, layers[l].n_sinks = UINT32_MAX;
    ck_status(fkv_file_plan_make(&header, layers, "huge windows", &plan), FKV_FILE_DAMAGED);
    header.n_tokens = 0; /* a file without tokens has no pages, so it is never too large */
    ck_ok(fkv_file_plan_make(&header, layers, "huge and empty", &plan));
    ck_assert_uint_eq(plan.n_pages, 0);
    ck_assert_uint_eq(plan.file_bytes, plan.data_offset);
    header = (fkv_file_header){.version = FKV_FILE_FORMAT_VERSION, .n_layers = 1, .n_tokens = 1};
    ck_assert(!fkv_file_plan_offsets(&header, UINT64_MAX / 24, &plan));
}
END_TEST

/* Returns the number of bytes of K or V in a block according to docs/page_format.md, computed independently of the codecs.
 * Returns 0 if the combination of bits, group size and dimension is invalid. */
static uint64_t documented_bytes(fkv_file_side side, uint32_t dim, uint32_t page_tokens) {
    const uint64_t codes = fkv_align_up((uint64_t)page_tokens * dim * side.bits / 8, 64);
    if (side.bits == 16) return side.group == 0 ? codes : 0;
    if (side.bits != 8 && side.bits != 4 && side.bits != 2) return 0;
    if ((side.group != 32 && side.group != 64 && side.group != 128) || dim % side.group != 0) return 0;
    return codes + 2 * fkv_align_up((uint64_t)page_tokens * (dim / side.group) * 2, 64);
}

START_TEST(plan_page_sizes_match_the_format_document) {
    const fkv_file_side sides[] = {{16, 0}, {8, 32}, {8, 64},  {8, 128}, {4, 32}, {4, 64},  {4, 128}, {2, 32}, {2, 64}, {2, 128},
                                   {8, 0},  {4, 16}, {2, 256}, {1, 32},  {3, 32}, {32, 32}, {16, 64}, {0, 0},  {0, 64}, {8, 33}};
    const size_t n_sides = sizeof sides / sizeof sides[0];
    for (uint32_t dim = 0; dim <= FKV_MAX_HEAD_DIM + 16; dim += 8) {
        for (size_t i = 0; i < n_sides * n_sides; i++) {
            const uint32_t page_tokens = 16u << i % 5;
            const fkv_type type = i % 2 == 0 ? FKV_F16 : FKV_BF16;
            fkv_file_layer layer = {3, dim, 0, 0, sides[i % n_sides], sides[i / n_sides]};
            const fkv_file_header header = {
                .page_tokens = page_tokens, .page_type = (uint32_t)type, .n_layers = 1, .n_tokens = 1};
            fkv_file_plan plan;
            const fkv_status status = fkv_file_plan_make(&header, &layer, "codecs", &plan);
            const uint64_t k = documented_bytes(layer.k, dim, page_tokens);
            const uint64_t v = documented_bytes(layer.v, dim, page_tokens);
            const bool can_be = dim >= 16 && dim <= FKV_MAX_HEAD_DIM && dim % 16 == 0 && k > 0 && v > 0;
            ck_assert_msg((status == FKV_OK) == can_be, "dimension %u, case %zu: %s", dim, i, fkv_message());
            if (status == FKV_OK) ck_assert_uint_eq(plan.groups[0].page_bytes, 3 * (k + v));
        }
    }
}
END_TEST

START_TEST(plan_has_exactly_the_pages_visible_to_a_query) {
    /* by definition, a page is saved if a query at position n_tokens sees one of its tokens or is itself in the page */
    for (uint32_t window = 0; window <= 70; window += 7) {
        for (uint32_t n_sinks = 0; n_sinks <= (window == 0 ? 0u : 40u); n_sinks += 8) {
            fkv_file_layer layer = {1, 64, window, n_sinks, {8, 64}, {4, 64}};
            for (uint32_t n_tokens = 0; n_tokens <= 150; n_tokens++) {
                const fkv_file_header header = {.page_tokens = 16, .page_type = FKV_F16, .n_layers = 1, .n_tokens = n_tokens};
                fkv_file_plan plan;
                ck_ok(fkv_file_plan_make(&header, &layer, "pages", &plan));
                fkv_file_cursor cursor = {.offset = plan.data_offset};
                fkv_file_entry entry = {0};
                bool more = fkv_file_cursor_next(&plan, &cursor, &entry);
                for (uint32_t page = 0; page * 16 < n_tokens; page++) {
                    bool seen = false; /* true if a query at position n_tokens sees a token of the page; the token at position
                                          n_tokens counts */
                    for (uint32_t t = page * 16; t < page * 16 + 16 && t <= n_tokens; t++)
                        seen = seen || window == 0 || t + window > n_tokens || t / 16 * 16 < n_sinks;
                    ck_assert_msg(seen == (more && entry.logical == page), "window %u, sinks %u, tokens %u, page %u", window,
                                  n_sinks, n_tokens, page);
                    if (seen) more = fkv_file_cursor_next(&plan, &cursor, &entry);
                }
                ck_assert(!more);
                ck_assert_uint_eq(cursor.offset, plan.file_bytes);
            }
        }
    }
}
END_TEST

START_TEST(temporary_folder_can_be_removed) { file_fixture_remove_folder(); }
END_TEST

TEST_MAIN("page_file_damage", every_kind_of_damage_returns_its_exact_status,
          damaged_golden_files_are_rejected_with_their_exact_status, golden_files_match_what_save_writes_and_load_restores,
          documented_offsets_locate_the_rows_of_a_golden_file, every_flipped_bit_of_a_file_is_detected,
          file_truncated_at_any_length_is_rejected, bytes_in_unused_slots_do_not_reach_the_pages,
          foreign_file_is_reported_by_its_first_differing_field, rotation_seed_is_ignored_without_rotation,
          plan_beyond_the_limits_of_the_format_is_rejected, plan_page_sizes_match_the_format_document,
          worked_examples_of_the_format_document_are_correct, plan_has_exactly_the_pages_visible_to_a_query,
          temporary_folder_can_be_removed)
