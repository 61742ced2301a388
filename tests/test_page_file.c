/* Tests of saving and loading page files: restored contents, exact bytes, and the state after a failed save.
 * test_page_file_damage.c tests damaged files, and test_page_file_kill.c tests saves that are killed.
 */
#include "page_file_fixture.h"
#include "test.h"

#include "../src/store/page_file_format.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { FILE_CAPACITY = 8 << 20 };

static uint8_t file_a[FILE_CAPACITY];
static uint8_t file_b[FILE_CAPACITY];

static const file_fixture_spec SPECS[] = {
    /* default codec */
    {16, FILE_FIXTURE_PAGES, FKV_F16, FKV_ROTATE_NONE, 2, {{2, 64, 0, 0, {8, 64}, {4, 64}}, {2, 64, 0, 0, {8, 64}, {4, 64}}}},
    /* 16-bit rows in bfloat16, and a head dimension that is not a power of two */
    {16, FILE_FIXTURE_PAGES, FKV_BF16, FKV_ROTATE_NONE, 1, {{3, 80, 0, 0, {16, 64}, {16, 0}}}},
    /* low bit widths, rotated keys and values, and pages of 32 tokens */
    {32, FILE_FIXTURE_PAGES, FKV_BF16, FKV_ROTATE_KV, 2, {{1, 128, 0, 0, {4, 128}, {2, 128}}, {1, 128, 0, 0, {4, 32}, {2, 64}}}},
    /* three interleaved groups, two of them with windows */
    {16,
     FILE_FIXTURE_PAGES,
     FKV_F16,
     FKV_ROTATE_K,
     4,
     {{1, 32, 40, 20, {8, 32}, {4, 32}},
      {1, 32, 0, 0, {8, 32}, {4, 32}},
      {2, 32, 40, 20, {4, 32}, {4, 32}},
      {1, 64, 3, 0, {16, 0}, {16, 0}}}},
    /* a window of one token, which contains only the query itself, and a window with more sinks than tokens */
    {16, FILE_FIXTURE_PAGES, FKV_F16, FKV_ROTATE_NONE, 2, {{1, 32, 1, 0, {8, 32}, {8, 32}}, {1, 32, 17, 33, {8, 32}, {8, 32}}}},
    /* TurboQuant */
    {16,
     FILE_FIXTURE_PAGES,
     FKV_F16,
     FKV_ROTATE_KV,
     3,
     {{2, 64, 0, 0, {4, 0, FKV_CODEC_TURBO}, {4, 0, FKV_CODEC_TURBO}},
      {1, 96, 0, 0, {3, 0, FKV_CODEC_TURBO}, {2, 0, FKV_CODEC_TURBO}},
      {1, 64, 0, 0, {8, 64}, {4, 0, FKV_CODEC_TURBO}}}},
    /* more page data than fits in the I/O buffer */
    {64, FILE_FIXTURE_PAGES, FKV_F16, FKV_ROTATE_V, 2, {{3, 512, 0, 0, {16, 0}, {16, 0}}, {2, 512, 0, 0, {16, 0}, {8, 64}}}},
};
enum { SPEC_TURBO = 5 };
static const uint32_t LENGTHS[] = {0, 1, 15, 16, 17, 31, 32, 33, 64, 100, 130};

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

static bool exists(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0;
}

static bool same_files(const char *a, const char *b) {
    const size_t n = file_fixture_read_file(a, file_a, sizeof file_a);
    return file_fixture_read_file(b, file_b, sizeof file_b) == n && memcmp(file_a, file_b, n) == 0;
}

/* ---- round trips ---- */

START_TEST(loaded_sequence_is_bit_identical_in_other_pages) {
    for (size_t s = 0; s < N_OF(SPECS); s++) {
        for (size_t i = 0; i < N_OF(LENGTHS); i++) {
            const uint32_t n_tokens = LENGTHS[i];
            const char *path = file_fixture_path("saved.fkv");
            file_fixture from;
            file_fixture to;
            file_fixture_open(&from, &SPECS[s], 0);
            file_fixture_open(&to, &SPECS[s], 0xee);
            const fkv_seq seq = file_fixture_fill(&from, 5, n_tokens, n_tokens + 1);
            ck_ok(file_fixture_save(&from, seq, 5, n_tokens, path));

            (void)file_fixture_fill(
                &to, 6, 20,
                40); /* another sequence occupies the first pages, so that the loaded sequence gets different page indices */
            const uint32_t free_before = file_fixture_free_pages(&to);
            fkv_seq loaded = 0;
            ck_ok(file_fixture_load(&to, n_tokens + 1, path, &loaded));
            ck_assert_msg(file_fixture_holds(&to, loaded, 5, n_tokens), "spec %zu, %u tokens", s, n_tokens);

            const char *again = file_fixture_path("again.fkv");
            ck_ok(file_fixture_save(&to, loaded, 5, n_tokens, again));
            ck_assert(same_files(path, again));
            ck_ok(fkv_pager_close(to.pager, loaded));
            ck_assert_uint_eq(file_fixture_free_pages(&to), free_before);
            file_fixture_close(&from);
            file_fixture_close(&to);
        }
    }
}
END_TEST

START_TEST(loaded_sequence_continues_with_identical_bytes) {
    for (size_t s = 0; s + 1 < N_OF(SPECS);
         s++) { /* the last configuration is skipped, because it has only enough pages for two sequences of this length */
        const char *path = file_fixture_path("half.fkv");
        const char *whole = file_fixture_path("whole.fkv");
        const char *resumed = file_fixture_path("resumed.fkv");
        file_fixture w;
        file_fixture_open(&w, &SPECS[s], 0x33);
        const fkv_seq seq = file_fixture_fill(&w, 9, 57, 110);
        ck_ok(file_fixture_save(&w, seq, 9, 57, path));
        file_fixture_append(&w, seq, 9, 53);
        ck_ok(file_fixture_save(&w, seq, 9, 110, whole));
        ck_ok(fkv_pager_close(w.pager, seq));
        fkv_seq loaded = 0;
        ck_ok(file_fixture_load(&w, 110, path, &loaded));
        file_fixture_append(&w, loaded, 9, 53);
        ck_ok(file_fixture_save(&w, loaded, 9, 110, resumed));
        ck_assert_msg(same_files(whole, resumed), "spec %zu", s);
        ck_assert_uint_gt(file_fixture_free_pages(&w), 0);
        file_fixture_close(&w);
    }
}
END_TEST

START_TEST(leading_tokens_of_a_longer_sequence_can_be_saved) {
    const char *part = file_fixture_path("part.fkv");
    const char *alone = file_fixture_path("alone.fkv");
    for (uint32_t n = 1; n <= 40; n += 13) {
        file_fixture w;
        file_fixture_open(&w, &SPECS[0], 0x77);
        const fkv_seq longer = file_fixture_fill(&w, 4, 61, 61);
        const fkv_seq shorter = file_fixture_fill(&w, 4, n, n);
        ck_ok(file_fixture_save(&w, longer, 4, n, part));
        ck_ok(file_fixture_save(&w, shorter, 4, n, alone));
        ck_assert(same_files(part, alone));
        file_fixture_close(&w);
    }
}
END_TEST

START_TEST(file_bytes_depend_only_on_the_sequence) {
    for (size_t s = 0; s < N_OF(SPECS); s++) {
        const char *clean = file_fixture_path("clean.fkv");
        const char *dirty = file_fixture_path("dirty.fkv");
        file_fixture a;
        file_fixture b;
        file_fixture_open(&a, &SPECS[s], 0);
        file_fixture_open(&b, &SPECS[s], 0xaa);
        ck_ok(file_fixture_save(&a, file_fixture_fill(&a, 3, 37, 37), 3, 37, clean));
        const fkv_seq other = file_fixture_fill(&b, 8, 50, 50); /* freed pages still contain the rows of the closed sequence */
        (void)file_fixture_fill(&b, 9, 5, 5);
        ck_ok(fkv_pager_close(b.pager, other));
        ck_ok(file_fixture_save(&b, file_fixture_fill(&b, 3, 37, 37), 3, 37, dirty));
        ck_assert_msg(same_files(clean, dirty), "spec %zu", s);
        file_fixture_close(&a);
        file_fixture_close(&b);
    }
}
END_TEST

START_TEST(window_group_saves_only_pages_visible_to_the_next_query) {
    const char *path = file_fixture_path("window.fkv");
    fkv_file_info info;
    file_fixture w;
    file_fixture_open(&w, &SPECS[3], 0);
    ck_ok(file_fixture_save(&w, file_fixture_fill(&w, 2, 130, 130), 2, 130, path));
    ck_ok(fkv_file_inspect(path, true, &info));
    /* 130 tokens occupy pages 0 to 8. The group with window 40 and 20 sinks needs pages 0 and 1 (sinks) and pages 5 to 8, because
     * (131 - 40) / 16 = 5. The group with window 3 needs page 8 */
    ck_assert_uint_eq(info.n_pages, (2 + 4) + 9 + 1);
    file_fixture_close(&w);
}
END_TEST

START_TEST(inspect_and_tokens_return_what_was_saved) {
    const char *path = file_fixture_path("inspected.fkv");
    fkv_file_info info;
    uint32_t tokens[70] = {0};
    uint32_t n_tokens = 0;
    file_fixture w;
    file_fixture_open(&w, &SPECS[2], 0);
    ck_ok(file_fixture_save(&w, file_fixture_fill(&w, 11, 70, 70), 11, 70, path));
    for (int verify = 0; verify < 2; verify++) {
        memset(&info, 0xff, sizeof info);
        ck_ok(fkv_file_inspect(path, verify != 0, &info));
        ck_assert_uint_eq(info.version, 1);
        ck_assert_uint_eq(info.n_layers, 2);
        ck_assert_uint_eq(info.n_tokens, 70);
        ck_assert_uint_eq(info.page_tokens, 32);
        ck_assert_int_eq(info.page_type, FKV_BF16);
        ck_assert_int_eq(info.rotate, FKV_ROTATE_KV);
        ck_assert_uint_eq(info.rotation_seed, 7);
        ck_assert_uint_eq(info.n_pages, 3);
        ck_assert_uint_eq(info.file_bytes, file_fixture_read_file(path, file_a, sizeof file_a));
        ck_assert_uint_eq(info.first_layer.n_kv_heads, 1);
        ck_assert_uint_eq(info.first_layer.head_dim, 128);
        ck_assert_uint_eq(info.first_layer.k.bits, 4);
        ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_AFFINE);
        ck_assert_uint_eq(info.first_layer.v.group, 128);
        ck_assert_float_eq(info.first_layer.scale, 0.0f);
        ck_assert_mem_eq(info.weights_id, w.identity.weights_id, 32);
        ck_assert_str_eq(info.rope_id, "neox base=10000");
        ck_assert_str_eq(info.numerics, "cpu golden 1");
    }
    ck_ok(fkv_file_tokens(path, NULL, 0, &n_tokens));
    ck_assert_uint_eq(n_tokens, 70);
    ck_ok(fkv_file_tokens(path, tokens, 3, &n_tokens));
    ck_assert_uint_eq(tokens[2], file_fixture_token(11, 2));
    ck_assert_uint_eq(tokens[3], 0);
    ck_ok(fkv_file_tokens(path, tokens, 70, &n_tokens));
    for (uint32_t i = 0; i < 70; i++) ck_assert_uint_eq(tokens[i], file_fixture_token(11, i));
    file_fixture_close(&w);
}
END_TEST

START_TEST(turboquant_file_is_foreign_to_affine_codes_of_equal_bits) {
    const char *path = file_fixture_path("turbo.fkv");
    file_fixture_spec spec = SPECS[SPEC_TURBO];
    fkv_file_info info;
    file_fixture w;
    file_fixture_open(&w, &spec, 0);
    ck_ok(file_fixture_save(&w, file_fixture_fill(&w, 3, 40, 40), 3, 40, path));
    file_fixture_close(&w);
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_uint_eq(info.version, 1);
    ck_assert_uint_eq(info.first_layer.k.bits, 4);
    ck_assert_int_eq(info.first_layer.k.kind, FKV_CODEC_TURBO);
    ck_assert_int_eq(info.first_layer.v.kind, FKV_CODEC_TURBO);
    fkv_seq loaded = 0;
    spec.layers[0].k = (fkv_file_side){4, 64, FKV_CODEC_AFFINE};
    file_fixture_open(&w, &spec, 0);
    ck_status(file_fixture_load(&w, 40, path, &loaded), FKV_FILE_FOREIGN);
    file_fixture_close(&w);
}
END_TEST

START_TEST(index_larger_than_the_buffer_round_trips) {
    const file_fixture_spec spec = {16, 1100, FKV_F16, FKV_ROTATE_NONE, 1, {{1, 16, 0, 0, {16, 0}, {16, 0}}}};
    const char *path = file_fixture_path("long.fkv");
    fkv_file_info info;
    uint32_t n_tokens = 0;
    file_fixture w;
    file_fixture_open(&w, &spec, 0x11);
    const fkv_seq seq = file_fixture_fill(&w, 3, 16 * 1024 - 5, 16 * 1024);
    ck_ok(file_fixture_save(&w, seq, 3, 16 * 1024 - 5, path));
    ck_ok(fkv_pager_close(w.pager, seq));
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_uint_eq(info.n_pages, 1024);
    static uint32_t tokens[16 * 1024];
    ck_ok(fkv_file_tokens(path, tokens, 16 * 1024, &n_tokens));
    ck_assert_uint_eq(n_tokens, 16 * 1024 - 5);
    const fkv_seq_config config = {.max_tokens = 16 * 1024, .prompt = tokens, .n_prompt = n_tokens};
    fkv_seq loaded = 0;
    ck_ok(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, &loaded));
    ck_assert(file_fixture_holds(&w, loaded, 3, n_tokens));
    file_fixture_close(&w);
}
END_TEST

START_TEST(crc32c_and_sha256_match_the_standards) {
    uint8_t digest[FKV_SHA256_BYTES];
    static const uint8_t sha_abc[FKV_SHA256_BYTES] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
                                                      0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
                                                      0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};
    fkv_sha256 sha;
    ck_assert_uint_eq(fkv_crc32c(0, "123456789", 9), 0xe3069283u);
    ck_assert_uint_eq(fkv_crc32c(fkv_crc32c(0, "1234", 4), "56789", 5), 0xe3069283u);
    ck_assert_uint_eq(fkv_crc32c(0, "", 0), 0);
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, "a", 1);
    fkv_sha256_add(&sha, "bc", 2);
    ck_ok(fkv_sha256_close(&sha, digest));
    ck_assert_mem_eq(digest, sha_abc, sizeof digest);
    fkv_sha256 broken = {.ok = false};
    ck_status(fkv_sha256_close(&broken, digest), FKV_UNSUPPORTED);
}
END_TEST

/* ---- rejected loads ---- */

START_TEST(load_that_does_not_fit_changes_nothing) {
    const char *path = file_fixture_path("fits.fkv");
    uint32_t tokens[40];
    file_fixture w;
    file_fixture_open(&w, &SPECS[3], 0);
    const fkv_seq seq = file_fixture_fill(&w, 5, 33, 40);
    ck_ok(file_fixture_save(&w, seq, 5, 33, path));
    const uint32_t free_before = file_fixture_free_pages(&w);
    fkv_seq loaded = 99;
    file_fixture_tokens(5, tokens, 40);

    ck_status(file_fixture_load(&w, 32, path, &loaded), FKV_SEQ_FULL);
    ck_status(file_fixture_load(&w, 10000, path, &loaded), FKV_POOL_FULL);
    fkv_seq_config config = {.max_tokens = 40, .prompt = tokens, .n_prompt = 32};
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, &loaded), FKV_BAD_ARGUMENT);
    config.n_prompt = 40;
    tokens[32]++;
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, &loaded), FKV_BAD_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "position 32"));
    config.prompt = NULL;
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, &loaded), FKV_BAD_ARGUMENT);
    config.prompt = tokens;
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, NULL, path, w.buffer, &loaded), FKV_BAD_ARGUMENT);
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, NULL, w.buffer, &loaded), FKV_BAD_ARGUMENT);
    ck_status(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, NULL), FKV_BAD_ARGUMENT);
    ck_assert_uint_eq(loaded, 99);
    ck_assert_uint_eq(file_fixture_free_pages(&w), free_before);

    tokens[32]--;
    ck_ok(fkv_page_file_load(&w.identity, &w.slab, w.pager, &config, path, w.buffer, &loaded));
    ck_assert(file_fixture_holds(&w, loaded, 5, 33));
    file_fixture_close(&w);
}
END_TEST

START_TEST(special_files_are_rejected_without_blocking) {
    fkv_file_info info;
    uint32_t n_tokens = 0;
    const char *pipe_path = file_fixture_path("pipe.fkv");
    ck_assert_int_eq(mkfifo(pipe_path, 0600), 0);
    ck_status(fkv_file_inspect(pipe_path, true, &info), FKV_FILE_FORMAT);
    ck_status(fkv_file_inspect(file_fixture_folder(), true, &info), FKV_FILE_FORMAT);
    ck_status(fkv_file_inspect("/dev/null", true, &info), FKV_FILE_FORMAT);
    ck_status(fkv_file_inspect("/dev/zero", false, &info), FKV_FILE_FORMAT);
    ck_status(fkv_file_inspect(file_fixture_path("nothing.fkv"), true, &info), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "No such file"));
    ck_status(fkv_file_inspect(NULL, true, &info), FKV_BAD_ARGUMENT);
    ck_status(fkv_file_inspect(pipe_path, true, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_file_tokens(NULL, NULL, 0, &n_tokens), FKV_BAD_ARGUMENT);
    ck_status(fkv_file_tokens(pipe_path, NULL, 1, &n_tokens), FKV_BAD_ARGUMENT);
    ck_status(fkv_file_tokens(pipe_path, NULL, 0, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_file_tokens(pipe_path, NULL, 0, &n_tokens), FKV_FILE_FORMAT);
}
END_TEST

START_TEST(file_that_changes_during_a_load_is_rejected_and_the_sequence_closed) {
    /* The slab of this fixture is a mapping of the file itself, so loading a page changes the data that is read next. */
    const file_fixture_spec spec = {16, FILE_FIXTURE_PAGES, FKV_F16, FKV_ROTATE_NONE, 1, {{1, 32, 0, 0, {8, 32}, {4, 32}}}};
    const char *path = file_fixture_path("changing.fkv");
    file_fixture w;
    file_fixture_open(&w, &spec, 0);
    const fkv_seq seq = file_fixture_fill(&w, 5, 250, 250);
    ck_ok(file_fixture_save(&w, seq, 5, 250, path));
    ck_ok(fkv_pager_close(w.pager, seq));
    const size_t file_bytes = file_fixture_read_file(path, file_a, sizeof file_a);
    ck_assert_uint_lt(file_bytes, w.slab.bytes);

    uint8_t *own = w.slab.base;
    uint8_t *map = mmap(NULL, w.slab.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert(map != MAP_FAILED);
    const int fd = open(path, O_RDWR);
    ck_assert_int_ge(fd, 0);
    ck_assert(mmap(map, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == map);
    w.slab.base = map;
    const uint32_t free_before = file_fixture_free_pages(&w);
    fkv_seq loaded = 99;
    ck_status(file_fixture_load(&w, 250, path, &loaded), FKV_FILE_DAMAGED);
    ck_assert_uint_eq(loaded, 99);
    ck_assert_uint_eq(file_fixture_free_pages(&w), free_before);
    w.slab.base = own;
    ck_assert_int_eq(munmap(map, w.slab.bytes), 0);
    ck_assert_int_eq(close(fd), 0);
    file_fixture_close(&w);
}
END_TEST

/* ---- failed saves ---- */

START_TEST(save_that_cannot_start_reports_the_reason) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    char long_name[400];
    static char long_folder[FILE_FIXTURE_PATH * 2];
    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    memset(long_folder, '/', sizeof long_folder - 2);
    long_folder[sizeof long_folder - 2] = 'f';
    ck_status(file_fixture_save(&w, seq, 1, 10, file_fixture_path("no-such-folder/x.fkv")), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "No such file"));
    ck_status(file_fixture_save(&w, seq, 1, 10, file_fixture_path(long_name)), FKV_IO);
    ck_status(file_fixture_save(&w, seq, 1, 10, long_folder), FKV_IO);
    ck_status(file_fixture_save(&w, seq, 1, 10, file_fixture_path("ends-with-slash/")), FKV_IO);
    ck_status(file_fixture_save(&w, seq, 1, 10, "/"), FKV_IO);
    ck_status(file_fixture_save(&w, seq, 1, 10, ""), FKV_BAD_ARGUMENT);
    ck_status(file_fixture_save(&w, seq, 1, 10, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_page_file_save(&w.identity, &w.slab, w.pager, 0, NULL, 10, "x.fkv", w.buffer), FKV_BAD_ARGUMENT);
    file_fixture_close(&w);
}
END_TEST

/* A save to the path `a` first writes to `a.part`, and would overwrite a page file that had been saved under the name `a.part`.
 */
START_TEST(names_ending_in_part_are_rejected) {
    static const char *const names[] = {
        "kept.fkv.part", ".part",
        "kept.fkv.PART"}; /* names in upper case are rejected too, because some file systems ignore case */
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    for (size_t i = 0; i < N_OF(names); i++) {
        const char *path = file_fixture_path(names[i]);
        ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_BAD_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "another name"));
        ck_assert_ptr_nonnull(strstr(fkv_message(), names[i]));
        ck_assert(!exists(path));
    }
    ck_ok(file_fixture_save(&w, seq, 1, 10, file_fixture_path("part")));
    ck_ok(file_fixture_save(&w, seq, 1, 10, file_fixture_path("a.part.fkv")));
    file_fixture_close(&w);
}
END_TEST

START_TEST(path_without_a_folder_is_in_the_working_directory) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    const int back = open(".", O_RDONLY);
    ck_assert_int_ge(back, 0);
    ck_assert_int_eq(chdir(file_fixture_folder()), 0);
    const fkv_status status = file_fixture_save(&w, seq, 1, 10, "here.fkv");
    ck_assert_int_eq(fchdir(back), 0);
    ck_assert_int_eq(close(back), 0);
    ck_ok(status);
    ck_assert(exists(file_fixture_path("here.fkv")));
    file_fixture_close(&w);
}
END_TEST

START_TEST(save_onto_a_folder_or_into_an_unwritable_one_leaves_nothing) {
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    const char *folder = file_fixture_path("folder.fkv");
    ck_assert_int_eq(mkdir(folder, 0700), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, folder), FKV_IO);
    ck_assert(!exists(file_fixture_path("folder.fkv.part")));

    /* root can write anywhere, so the test drops its privileges temporarily */
    const bool root = geteuid() == 0;
    ck_assert_int_eq(chmod(file_fixture_folder(), 0755), 0);
    ck_assert_int_eq(chmod(folder, 0555), 0);
    if (root) ck_assert_int_eq(seteuid(65534), 0);
    const fkv_status status = file_fixture_save(&w, seq, 1, 10, file_fixture_path("folder.fkv/x.fkv"));
    if (root) ck_assert_int_eq(seteuid(0), 0);
    ck_status(status, FKV_IO);
    ck_assert_int_eq(chmod(folder, 0700), 0);
    ck_assert(!exists(file_fixture_path("folder.fkv/x.fkv.part")));
    file_fixture_close(&w);
}
END_TEST

START_TEST(full_disk_at_any_offset_keeps_the_old_file_and_no_part) {
    const char *path = file_fixture_path("full.fkv");
    const char *copy = file_fixture_path("copy.fkv");
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_GOOD, 0);
    const fkv_seq old = file_fixture_fill(&w, 1, 20, 20);
    const fkv_seq new = file_fixture_fill(&w, 2, 50, 50);
    ck_ok(file_fixture_save(&w, old, 1, 20, path));
    ck_ok(file_fixture_save(&w, old, 1, 20, copy));
    ck_ok(file_fixture_save(&w, new, 2, 50, file_fixture_path("new.fkv")));
    const size_t file_bytes = file_fixture_read_file(file_fixture_path("new.fkv"), file_a, sizeof file_a);

    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const struct rlimit before = limit;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (size_t room = 0; room < file_bytes; room += 61) {
        limit.rlim_cur = room;
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const fkv_status status = file_fixture_save(&w, new, 2, 50, path);
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
        ck_status(status, FKV_IO);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "File too large"));
        ck_assert(same_files(path, copy));
        ck_assert(!exists(file_fixture_path("full.fkv.part")));
    }
    (void)signal(SIGXFSZ, handler);
    ck_ok(file_fixture_save(&w, new, 2, 50, path));
    ck_assert(same_files(path, file_fixture_path("new.fkv")));
    file_fixture_close(&w);
}
END_TEST

START_TEST(existing_part_file_is_replaced_or_rejected) {
    const char *path = file_fixture_path("place.fkv");
    const char *part = file_fixture_path("place.fkv.part");
    const char *victim = file_fixture_path("victim");
    static const uint8_t precious[] = "precious";
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    file_fixture_write_file(victim, precious, sizeof precious);

    ck_assert_int_eq(symlink("victim", part), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_IO);
    ck_assert_int_eq(unlink(part), 0);
    ck_assert_int_eq(link(victim, part), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "remove it"));
    ck_assert_int_eq(unlink(part), 0);
    ck_assert_int_eq(mkfifo(part, 0600), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "place.fkv.part is a pipe"));
    ck_assert_int_eq(unlink(part), 0);
    ck_assert_int_eq(mkdir(part, 0700), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_IO);
    ck_assert_int_eq(rmdir(part), 0);
    ck_assert(!exists(path));
    ck_assert_uint_eq(file_fixture_read_file(victim, file_a, sizeof file_a), sizeof precious);

    /* Simulates the part file of a save that was killed. The part file is longer than the new file, and all users can read and
     * write it. */
    memset(file_a, 0xcc, 100000);
    file_fixture_write_file(part, file_a, 100000);
    ck_assert_int_eq(chmod(part, 0666), 0);
    ck_ok(file_fixture_save(&w, seq, 1, 10, path));
    ck_assert(!exists(part));
    fkv_file_info info;
    struct stat mode;
    ck_ok(fkv_file_inspect(path, true, &info));
    ck_assert_int_eq(stat(path, &mode), 0);
    ck_assert_uint_eq(mode.st_mode & 0777, 0600);
    file_fixture_close(&w);
}
END_TEST

START_TEST(save_does_not_disturb_another_save_in_progress) {
    const char *path = file_fixture_path("busy.fkv");
    const char *part = file_fixture_path("busy.fkv.part");
    static const uint8_t theirs[] = "half of their file";
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    file_fixture_write_file(part, theirs, sizeof theirs);
    const int fd = open(part, O_RDWR);
    ck_assert_int_eq(flock(fd, LOCK_EX), 0);
    ck_status(file_fixture_save(&w, seq, 1, 10, path), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "in progress"));
    ck_assert_uint_eq(file_fixture_read_file(part, file_a, sizeof file_a), sizeof theirs);
    ck_assert_int_eq(close(fd), 0);
    ck_ok(file_fixture_save(&w, seq, 1, 10, path));
    ck_assert(!exists(part));
    file_fixture_close(&w);
}
END_TEST

/* Checks that a save to `path` is rejected with a message that contains `word`, that the file is unchanged, and that no part file
 * remains.
 */
static void check_not_replaced(const file_fixture *w, fkv_seq seq, const char *path, const char *word) {
    struct stat before;
    struct stat after;
    char part[600];
    ck_assert_int_eq(lstat(path, &before), 0);
    ck_status(file_fixture_save(w, seq, 1, 10, path), FKV_IO);
    ck_assert_msg(strstr(fkv_message(), word) != NULL, "%s: %s", word, fkv_message());
    ck_assert_int_eq(lstat(path, &after), 0);
    ck_assert(after.st_ino == before.st_ino && after.st_mode == before.st_mode);
    (void)snprintf(part, sizeof part, "%s.part", path);
    ck_assert(!exists(part));
    ck_assert_int_eq(unlink(path), 0);
}

static void make_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    ck_assert_uint_lt(strlen(path), sizeof address.sun_path);
    memcpy(address.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(close(fd), 0);
}

START_TEST(special_files_are_never_replaced) {
    const char *path = file_fixture_path("special.fkv");
    const char *target = file_fixture_path("target");
    static const uint8_t precious[] = "precious";
    file_fixture w;
    file_fixture_open(&w, &FILE_FIXTURE_SMALL, 0);
    const fkv_seq seq = file_fixture_fill(&w, 1, 10, 10);
    file_fixture_write_file(target, precious, sizeof precious);

    ck_assert_int_eq(symlink("target", path), 0);
    check_not_replaced(&w, seq, path, "special.fkv is a symbolic link");
    ck_assert_uint_eq(file_fixture_read_file(target, file_a, sizeof file_a), sizeof precious);
    ck_assert_int_eq(symlink("nowhere", path), 0);
    check_not_replaced(&w, seq, path, "a symbolic link");
    ck_assert(!exists(file_fixture_path("nowhere")));
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    check_not_replaced(&w, seq, path, "a pipe");
    make_socket(path);
    check_not_replaced(&w, seq, path, "a socket");
    struct stat null_device;
    ck_assert_int_eq(stat("/dev/null", &null_device), 0);
    if (mknod(path, S_IFCHR | 0600, null_device.st_rdev) ==
        0) /* creates a null device under another name, which requires root privileges */
        check_not_replaced(&w, seq, path, "a device");
    else
        printf("cannot create a device: %s\n", strerror(errno));

    ck_ok(file_fixture_save(&w, seq, 1, 10, path));
    ck_ok(file_fixture_save(&w, seq, 1, 10, path));
    file_fixture_close(&w);
}
END_TEST

START_TEST(temporary_folder_can_be_removed) { file_fixture_remove_folder(); }
END_TEST

TEST_MAIN("page_file", loaded_sequence_is_bit_identical_in_other_pages, loaded_sequence_continues_with_identical_bytes,
          leading_tokens_of_a_longer_sequence_can_be_saved, file_bytes_depend_only_on_the_sequence,
          window_group_saves_only_pages_visible_to_the_next_query, inspect_and_tokens_return_what_was_saved,
          turboquant_file_is_foreign_to_affine_codes_of_equal_bits, index_larger_than_the_buffer_round_trips,
          crc32c_and_sha256_match_the_standards, load_that_does_not_fit_changes_nothing,
          special_files_are_rejected_without_blocking, file_that_changes_during_a_load_is_rejected_and_the_sequence_closed,
          save_that_cannot_start_reports_the_reason, names_ending_in_part_are_rejected,
          path_without_a_folder_is_in_the_working_directory, save_onto_a_folder_or_into_an_unwritable_one_leaves_nothing,
          full_disk_at_any_offset_keeps_the_old_file_and_no_part, existing_part_file_is_replaced_or_rejected,
          save_does_not_disturb_another_save_in_progress, special_files_are_never_replaced, temporary_folder_can_be_removed)
