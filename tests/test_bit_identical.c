/* Checks that the outputs of a token, in every layer, are bit-identical whenever the token and all tokens before it are the same.
 *
 * The reference run has one sequence, one token per step and one thread. Every other way to process the same tokens (chunks,
 * batches, threads, forks, shared prefixes, files, truncated and aborted steps, reused pages) is compared with the reference by
 * memcmp, for every shape in the table below and every instruction set of this machine.
 */
#include "cache_fixture.h"
#include "test.h"

#include "../src/codec/block.h"

#include <stdio.h>
#include <string.h>

enum { N_TOKENS = 290, STEP_TOKENS = 48, N_SEQS = 4, CAPACITY = 4 * 320 };

typedef struct shape {
    const char *name;
    fkv_layer_config layers[2];
    fkv_type row_type;
    fkv_type page_type;
    fkv_rotate rotate;
    uint32_t page_tokens;
    float outliers;
} shape;

#define SEALED(bits) {bits, 0, FKV_CODEC_SEALED}
#define SEALED_V(bits) {bits, 0, FKV_CODEC_SEALED_V}
#define CALIBRATED(bits) {bits, 0, FKV_CODEC_CALIBRATED}

/* Two assignments of bit widths to 16 channels, with averages of 4 and 3 bits per channel. */
#define SIXTEEN_4 6, 2, 4, 4, 2, 6, 2, 6, 4, 4, 6, 2, 4, 4, 4, 4
#define SIXTEEN_3 2, 2, 4, 2, 4, 2, 2, 4, 2, 4, 4, 2, 2, 4, 4, 4
static const uint8_t BITS_4[2 * 64] = {SIXTEEN_4, SIXTEEN_4, SIXTEEN_4, SIXTEEN_4, SIXTEEN_4, SIXTEEN_4, SIXTEEN_4, SIXTEEN_4};
static const uint8_t BITS_3[80] = {SIXTEEN_3, SIXTEEN_3, SIXTEEN_3, SIXTEEN_3, SIXTEEN_3};
#define TURBO(bits) {bits, 0, FKV_CODEC_TURBO}

static const float SINK_LOGITS[] = {1.5f, -2.0f, 6.0f, 0.25f};

/* Fields of a layer, in order: H, G, D, window, sinks, scale, softcap, k, v, learned sinks. The history is longer than the first
 * attention split, which has 256 tokens. */
static const shape SHAPES[] = {
    {"K8/V4",
     {{4, 2, 64, 0, 0, 0, 0, {8, 64}, {4, 64}}, {3, 1, 64, 0, 0, 0.2f, 0, {8, 32}, {4, 64}, SINK_LOGITS}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_NONE,
     16,
     20.0f},
    {"16/16",
     {{2, 2, 80, 0, 0, 0, 0, {16, 0}, {16, 0}}, {4, 1, 48, 0, 0, 0, 0, {16, 0}, {16, 0}}},
     FKV_F16,
     FKV_BF16,
     FKV_ROTATE_NONE,
     64,
     1.0f},
    {"4/4 rotated",
     {{3, 1, 96, 0, 0, 0, 30.0f, {4, 32}, {4, 32}}, {2, 2, 64, 0, 0, 0, 0, {4, 64}, {4, 64}}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     32,
     20.0f},
    {"full layer and a window with sinks",
     {{4, 2, 32, 0, 0, 0, 0, {8, 32}, {4, 32}}, {4, 1, 64, 40, 5, 0, 15.0f, {16, 0}, {16, 0}, SINK_LOGITS}},
     FKV_BF16,
     FKV_F16,
     FKV_ROTATE_K,
     16,
     1.0f},
    {"windows only",
     {{2, 1, 32, 24, 0, 0, 0, {8, 32}, {8, 32}}, {2, 2, 32, 70, 20, 0, 0, {8, 32}, {2, 32}}},
     FKV_F32,
     FKV_BF16,
     FKV_ROTATE_V,
     16,
     1.0f},
    {"TurboQuant",
     {{4, 2, 64, 0, 0, 0, 0, TURBO(4), TURBO(4)}, {3, 1, 96, 40, 5, 0, 20.0f, TURBO(3), TURBO(2), SINK_LOGITS}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f},
    {"TurboQuant V with 8-bit K and with sealed K",
     {{2, 1, 64, 0, 0, 0, 0, {8, 64}, TURBO(4)}, {2, 1, 128, 0, 0, 0, 0, SEALED(4), TURBO(3)}},
     FKV_F32,
     FKV_BF16,
     FKV_ROTATE_V,
     32,
     20.0f},
    {"sealed",
     {{4, 2, 64, 0, 0, 0, 0, SEALED(4), SEALED_V(4)}, {3, 1, 80, 0, 0, 0, 20.0f, SEALED(3), SEALED_V(2), SINK_LOGITS}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_KV,
     16,
     20.0f},
    {"sealed and affine layers, pages of 128",
     {{2, 1, 128, 0, 0, 0, 0, SEALED(4), {4, 64}}, {4, 2, 64, 0, 0, 0, 0, {8, 64}, {4, 64}}},
     FKV_BF16,
     FKV_BF16,
     FKV_ROTATE_V,
     128,
     1.0f},
    {"calibrated",
     {{4, 2, 64, 0, 0, 0, 0, CALIBRATED(4), SEALED_V(4), .channel_bits = BITS_4},
      {3, 1, 80, 70, 20, 0, 20.0f, CALIBRATED(3), SEALED_V(3), .channel_bits = BITS_3}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_V,
     16,
     20.0f},
    {"sealed windows",
     {{2, 1, 64, 70, 20, 0, 0, SEALED(4), SEALED_V(4)}, {2, 2, 32, 24, 0, 0, 0, SEALED(2), SEALED_V(3)}},
     FKV_F32,
     FKV_F16,
     FKV_ROTATE_V,
     16,
     1.0f},
};

static const struct {
    fkv_isa isa;
    const char *name;
} ISAS[] = {{FKV_ISA_SCALAR, "scalar"},           {FKV_ISA_NEON, "NEON"}, {FKV_ISA_AVX2, "AVX2"}, {FKV_ISA_AVX512, "AVX-512"},
            {FKV_ISA_AVX512VNNI, "AVX-512 VNNI"}, {FKV_ISA_AMX, "AMX"}};

typedef struct subject {
    const shape *shape;
    fkv_isa isa;
    char name[64];
    uint32_t tokens[N_TOKENS];
    uint32_t strange[N_TOKENS]; /* unrelated tokens, for sequences whose contents must not affect the sequence under test */
    size_t output_bytes;
    uint8_t *expected; /* outputs of the reference run */
    uint8_t *got;      /* buffer for the outputs to compare */
} subject;

static subject subjects[N_OF(SHAPES) * N_OF(ISAS)];
static size_t n_subjects;

static fkv_config config_of(const subject *s) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_OF(s->shape->layers);
    config.layers = s->shape->layers;
    config.row_type = s->shape->row_type;
    config.page_type = s->shape->page_type;
    config.rotate = s->shape->rotate;
    config.rotation_seed = 5;
    config.page_tokens = s->shape->page_tokens;
    config.max_tokens = CAPACITY;
    config.max_seqs = N_SEQS;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = 1;
    config.isa = s->isa;
    return config;
}

static void open_config(const subject *s, const fkv_config *config, cache_fixture *w) {
    ck_ok(cache_fixture_open(w, config));
    w->outliers = s->shape->outliers;
}

static void open_subject(const subject *s, cache_fixture *w) {
    fkv_config config = config_of(s);
    open_config(s, &config, w);
}

static void close_fixture(cache_fixture *w) {
    ck_assert(fkv_cache_consistent(w->cache));
    cache_fixture_close(w);
}

/* Returns the output buffer after overwriting the results of earlier runs. */
static uint8_t *fresh(const subject *s) { return memset(s->got, 0xee, N_TOKENS * s->output_bytes); }

static void check_same(const subject *s, const uint8_t *outputs, uint32_t from, uint32_t to, const char *how) {
    for (uint32_t t = from; t < to; t++)
        ck_assert_msg(memcmp(outputs + t * s->output_bytes, s->expected + t * s->output_bytes, s->output_bytes) == 0,
                      "%s: token %u differs %s", s->name, t, how);
}

static void free_subjects(void) {
    for (size_t i = 0; i < n_subjects; i++) {
        free(subjects[i].expected);
        free(subjects[i].got);
    }
}

static void find_subjects(void) {
    ck_assert_int_eq(atexit(free_subjects), 0);
    for (size_t i = 0; i < N_OF(ISAS); i++) {
        for (size_t k = 0; k < N_OF(SHAPES); k++) {
            if (TEST_SANITIZED && (i + k) % 3 != 0)
                continue; /* skips two thirds of the cases; every shape and every instruction set keeps several */
            subject *s = &subjects[n_subjects];
            *s = (subject){.shape = &SHAPES[k], .isa = ISAS[i].isa};
            (void)snprintf(s->name, sizeof s->name, "%s, %s", SHAPES[k].name, ISAS[i].name);
            cache_fixture w;
            fkv_config config = config_of(s);
            fkv_status status = cache_fixture_open(&w, &config);
            if (status == FKV_UNSUPPORTED) {
                printf("%s is skipped: %s\n", ISAS[i].name, fkv_message());
                break;
            }
            ck_ok(status);
            w.outliers = s->shape->outliers;
            cache_tokens(1 + k, s->tokens, N_TOKENS);
            cache_tokens(100 + k, s->strange, N_TOKENS);
            s->output_bytes = w.output_bytes;
            s->expected = malloc(N_TOKENS * w.output_bytes);
            s->got = malloc(N_TOKENS * w.output_bytes);
            ck_assert(s->expected != NULL && s->got != NULL);
            cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), s->tokens, 0, N_TOKENS, 1, s->expected);
            close_fixture(&w);
            n_subjects++;
        }
    }
    ck_assert_uint_gt(n_subjects, 0);
}

/* Under sanitizers, each test looks at a sixth of the subjects. */
static void each_subject(void (*look_at)(const subject *s)) {
    static size_t n_calls;
    n_calls++;
    if (n_subjects == 0) find_subjects();
    for (size_t i = 0; i < n_subjects; i++)
        if (!TEST_SANITIZED || (i + n_calls) % 6 == 0) look_at(&subjects[i]);
}

static bool has_windows(const subject *s) { return s->shape->layers[0].window != 0 || s->shape->layers[1].window != 0; }

static bool is_sealed(const subject *s) {
    return s->shape->layers[0].k.kind == FKV_CODEC_SEALED || s->shape->layers[1].k.kind == FKV_CODEC_SEALED;
}

/* ---- chunks, batches and threads ---- */

static void in_chunks(const subject *s) {
    static const uint32_t patterns[][4] = {{48, 48, 48, 48}, {16, 16, 16, 16}, {1, 31, 2, 13}};
    for (size_t p = 0; p < N_OF(patterns); p++) {
        cache_fixture w;
        open_subject(s, &w);
        fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
        uint8_t *got = fresh(s);
        for (uint32_t at = 0, i = 0; at < N_TOKENS; i++) {
            uint32_t n = patterns[p][i % 4] < N_TOKENS - at ? patterns[p][i % 4] : N_TOKENS - at;
            cache_fixture_run(&w, seq, s->tokens, at, at + n, n, got);
            at += n;
        }
        check_same(s, got, 0, N_TOKENS, "in chunks");
        close_fixture(&w);
    }
}

START_TEST(chunks_of_any_size_are_bit_identical) { each_subject(in_chunks); }
END_TEST

/* Three other sequences run in the same steps and are replaced by new sequences when they are full. Their lengths and chunk sizes
 * differ. The position of the sequence under test among the rows of a step varies. */
static void in_a_batch(const subject *s) {
    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    fkv_seq others[3];
    uint32_t lengths[3] = {0};
    for (uint32_t i = 0; i < 3; i++) others[i] = cache_fixture_seq(&w, 60 + 40 * i);
    for (uint32_t at = 0, step = 0; at < N_TOKENS; step++) {
        cache_chunk chunks[N_SEQS];
        uint32_t n_chunks = 0;
        uint32_t n = 1 + step * 5 % 11;
        if (n > N_TOKENS - at) n = N_TOKENS - at;
        for (uint32_t i = 0; i < N_SEQS; i++) {
            if (i == step % N_SEQS) chunks[n_chunks++] = (cache_chunk){seq, s->tokens, at, n, got};
            if (i == 3) continue;
            uint32_t most = 60 + 40 * i;
            uint32_t more = step % (i + 2) == 0 ? 1 + (step + i) % 9 : 1;
            if (lengths[i] + more > most) {
                ck_ok(fkv_seq_close(w.cache, others[i]));
                others[i] = cache_fixture_seq(&w, most);
                lengths[i] = 0;
            }
            chunks[n_chunks++] = (cache_chunk){others[i], s->strange, lengths[i], more, NULL};
            lengths[i] += more;
        }
        cache_fixture_step(&w, chunks, n_chunks, CACHE_COMMIT);
        at += n;
    }
    check_same(s, got, 0, N_TOKENS, "in a batch");
    close_fixture(&w);
}

START_TEST(batched_and_single_sequences_are_bit_identical) { each_subject(in_a_batch); }
END_TEST

static void on_threads(const subject *s) {
    static const struct {
        uint32_t n_threads;
        uint32_t chunk;
    } ways[] = {{2, 1}, {3, 1}, {3, 29}};
    for (size_t i = 0; i < N_OF(ways); i++) {
        cache_fixture w;
        fkv_config config = config_of(s);
        config.n_threads = ways[i].n_threads;
        open_config(s, &config, &w);
        uint8_t *got = fresh(s);
        cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), s->tokens, 0, N_TOKENS, ways[i].chunk, got);
        check_same(s, got, 0, N_TOKENS, ways[i].n_threads == 2 ? "on two threads" : "on three threads");
        close_fixture(&w);
    }
}

START_TEST(any_number_of_threads_is_bit_identical) { each_subject(on_threads); }
END_TEST

/* ---- forks ---- */

/* From position `at` on, the parent and one fork continue with the same tokens, and a second fork continues with other tokens.
 * The second fork is the first of the three to write to their shared page. */
static void forked_at(const subject *s, uint32_t at) {
    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    uint8_t *of_twin = malloc(N_TOKENS * s->output_bytes);
    ck_assert_ptr_nonnull(of_twin);
    fkv_seq parent = cache_fixture_seq(&w, N_TOKENS);
    fkv_seq twin = 0;
    fkv_seq stray = 0;
    cache_fixture_run(&w, parent, s->tokens, 0, at, STEP_TOKENS, got);
    ck_ok(fkv_seq_fork(w.cache, parent, N_TOKENS, &twin));
    ck_ok(fkv_seq_fork(w.cache, parent, at + 40, &stray));
    uint64_t copies = cache_fixture_stats(&w).page_copies;
    for (uint32_t t = at; t < N_TOKENS; t++) {
        cache_chunk chunks[] = {
            {stray, s->strange, t, 1, NULL}, {twin, s->tokens, t, 1, of_twin}, {parent, s->tokens, t, 1, got}};
        bool alone = t >= at + 40;
        cache_fixture_step(&w, chunks + alone, 3 - alone, CACHE_COMMIT);
        if (t == at + 50) ck_ok(fkv_seq_close(w.cache, stray));
    }
    check_same(s, got, 0, N_TOKENS, "in a parent after a fork");
    check_same(s, of_twin, at, N_TOKENS, "in a fork");
    bool copied = cache_fixture_stats(&w).page_copies > copies;
    ck_assert_msg(copied == (at % s->shape->page_tokens != 0), "%s: unexpected number of copies of a page that was %s", s->name,
                  copied ? "full" : "shared and partly filled");
    free(of_twin);
    close_fixture(&w);
}

static void forked(const subject *s) {
    forked_at(s, 128);
    forked_at(s, 133);
    forked_at(s, 250);
}

START_TEST(forks_within_and_at_the_end_of_a_page_are_bit_identical) { each_subject(forked); }
END_TEST

/* The parent and its fork append to a shared page at different slots in a step that is aborted. Afterwards, neither may read rows
 * that the other wrote. */
static void aborted_with_its_fork(const subject *s) {
    for (uint32_t parent_first = 0; parent_first < 2; parent_first++) {
        cache_fixture w;
        open_subject(s, &w);
        uint8_t *got = fresh(s);
        fkv_seq parent = cache_fixture_seq(&w, N_TOKENS);
        fkv_seq child = 0;
        cache_fixture_run(&w, parent, s->tokens, 0, 140, STEP_TOKENS, NULL);
        ck_ok(fkv_seq_fork(w.cache, parent, N_TOKENS, &child));
        ck_ok(fkv_seq_truncate(w.cache, child, 137));
        cache_chunk of_parent = {parent, s->strange, 140, 2, NULL};
        cache_chunk of_child = {child, s->strange, 137, 2, NULL};
        cache_fixture_step(&w, (cache_chunk[]){parent_first ? of_parent : of_child, parent_first ? of_child : of_parent}, 2,
                           CACHE_ABORT);
        cache_fixture_run(&w, parent, s->tokens, 140, 180, 1, got);
        check_same(s, got, 140, 180, "in a parent, after a step with its fork was aborted");
        cache_fixture_run(&w, child, s->tokens, 137, 180, 1, got);
        check_same(s, got, 137, 180, "in a fork, after a step with its parent was aborted");
        close_fixture(&w);
    }
}

START_TEST(outputs_after_an_abort_on_a_shared_page_are_bit_identical) { each_subject(aborted_with_its_fork); }
END_TEST

/* ---- shared and reloaded prefixes ---- */

static void with_shared_prefix(const subject *s) {
    cache_fixture w;
    open_subject(s, &w);
    fkv_seq first = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, first, s->tokens, 0, 192, 37, NULL);
    ck_ok(fkv_prefix_insert(w.cache, first, s->tokens, 192));
    cache_fixture_run(&w, first, s->tokens, 192, 200, 8, NULL);
    for (int round = 0; round < 2; round++) { /* in the first round, the sequence `first` is still open */
        fkv_seq seq = 0;
        uint32_t n_shared = 0;
        fkv_seq_config opened = {.max_tokens = N_TOKENS, .prompt = s->tokens, .n_prompt = N_TOKENS - 1};
        ck_ok(fkv_seq_open(w.cache, &opened, &seq, &n_shared));
        ck_assert_uint_eq(n_shared, 192 / s->shape->page_tokens * s->shape->page_tokens);
        uint8_t *got = fresh(s);
        cache_fixture_run(&w, seq, s->tokens, n_shared, N_TOKENS, 7, got);
        check_same(s, got, n_shared, N_TOKENS, round == 0 ? "on a shared prefix" : "on a cached prefix");
        ck_ok(fkv_seq_close(w.cache, round == 0 ? first : seq));
        if (round == 0) ck_ok(fkv_seq_close(w.cache, seq));
    }
    close_fixture(&w);
}

START_TEST(outputs_on_a_shared_prefix_are_bit_identical) { each_subject(with_shared_prefix); }
END_TEST

static void reloaded(const subject *s) {
    char path[512];
    (void)cache_path(path, "prefix.fkv");
    cache_fixture w;
    open_subject(s, &w);
    fkv_seq saved = cache_fixture_seq(&w, N_TOKENS);
    cache_fixture_run(&w, saved, s->tokens, 0, 147, STEP_TOKENS, NULL);
    ck_ok(fkv_seq_save(w.cache, saved, s->tokens, 141, path));

    fkv_seq seq = 0;
    uint8_t *got = fresh(s);
    ck_ok(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    cache_fixture_run(&w, seq, s->tokens, 141, N_TOKENS, 9, got);
    check_same(s, got, 141, N_TOKENS, "loaded into the same cache");

    fkv_config config = config_of(s);
    config.max_tokens = 700;
    config.max_seqs = 2;
    config.max_step_tokens = 33;
    config.n_threads = 2;
    cache_fixture other;
    open_config(s, &config, &other);
    got = fresh(s);
    ck_ok(fkv_seq_load(other.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    cache_fixture_run(&other, seq, s->tokens, 141, N_TOKENS, 33, got);
    check_same(s, got, 141, N_TOKENS, "loaded into a cache of another size");
    close_fixture(&other);
    close_fixture(&w);
}

START_TEST(outputs_on_a_reloaded_prefix_are_bit_identical) { each_subject(reloaded); }
END_TEST

/* All instruction sets encode rows to identical bytes, so a sequence saved with one instruction set can be continued with
 * another. */
static void written_by_scalar(const subject *s) {
    char path[512];
    (void)cache_path(path, "scalar.fkv");
    fkv_config config = config_of(s);
    config.isa = FKV_ISA_SCALAR;
    cache_fixture writer;
    open_config(s, &config, &writer);
    fkv_seq seq = cache_fixture_seq(&writer, N_TOKENS);
    cache_fixture_run(&writer, seq, s->tokens, 0, 260, STEP_TOKENS, NULL);
    ck_ok(fkv_seq_save(writer.cache, seq, s->tokens, 0, path));
    close_fixture(&writer);

    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    ck_ok(fkv_seq_load(w.cache, &(fkv_seq_config){.max_tokens = N_TOKENS}, path, &seq));
    cache_fixture_run(&w, seq, s->tokens, 260, N_TOKENS, 1, got);
    check_same(s, got, 260, N_TOKENS, "on pages that scalar code wrote");
    close_fixture(&w);
}

START_TEST(outputs_on_pages_written_by_scalar_code_are_bit_identical) { each_subject(written_by_scalar); }
END_TEST

/* ---- truncated and aborted steps ---- */

static void truncated(const subject *s) {
    static const struct {
        uint32_t to;     /* length of the sequence after the expected tokens were appended */
        uint32_t detour; /* number of unrelated tokens appended afterwards */
        uint32_t back;   /* length after truncation */
    } ways[] = {{105, 5, 105}, {128, 4, 128}, {142, 6, 137}, {200, 80, 141}};
    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    uint32_t at = 0;
    for (size_t i = 0; i < N_OF(ways); i++) {
        /* skips this case, because the window layers have already released rows that the truncated sequence would need */
        if (ways[i].detour > 10 && has_windows(s)) continue;
        cache_fixture_run(&w, seq, s->tokens, at, ways[i].to, 11, got);
        cache_fixture_run(&w, seq, s->strange, ways[i].to, ways[i].to + ways[i].detour, STEP_TOKENS, NULL);
        at = ways[i].back;
        uint32_t span = FKV_OPEN_SPAN * s->shape->page_tokens;
        uint32_t length = ways[i].to + ways[i].detour;
        if (is_sealed(s) && at / span < (length - fkv_min_u32(length, s->shape->page_tokens)) /
                                            span) { /* the pages at this length are sealed, so the sequence can only be truncated
                                                       to the start of their span */
            ck_status(fkv_seq_truncate(w.cache, seq, at), FKV_GONE);
            at = at / span * span;
        }
        ck_ok(fkv_seq_truncate(w.cache, seq, at));
    }
    cache_fixture_run(&w, seq, s->tokens, at, N_TOKENS, 11, got);
    check_same(s, got, 0, N_TOKENS, "after truncating");
    close_fixture(&w);
}

START_TEST(outputs_after_truncate_and_rewrite_are_bit_identical) { each_subject(truncated); }
END_TEST

static void aborted(const subject *s) {
    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
    for (uint32_t at = 0, step = 0; at < N_TOKENS; step++) {
        uint32_t n = 1 + step * 3 % 10 < N_TOKENS - at ? 1 + step * 3 % 10 : N_TOKENS - at;
        uint32_t wrong = 1 + step * 13 % STEP_TOKENS < N_TOKENS - at ? 1 + step * 13 % STEP_TOKENS : N_TOKENS - at;
        if (step % 3 == 0) cache_fixture_step(&w, &(cache_chunk){seq, s->strange, at, wrong, NULL}, 1, CACHE_ABORT);
        cache_fixture_run(&w, seq, s->tokens, at, at + n, n, got);
        at += n;
    }
    check_same(s, got, 0, N_TOKENS, "after aborted steps");
    close_fixture(&w);
}

START_TEST(outputs_after_aborted_steps_are_bit_identical) { each_subject(aborted); }
END_TEST

/* Runs the sequence under test in reused pages. Before that, every page is filled with large unrelated values, and the prefix
 * tree must evict pages. */
static void in_used_pages(const subject *s) {
    cache_fixture w;
    fkv_config config = config_of(s);
    config.max_tokens = N_TOKENS + 30;
    config.max_seqs = 2;
    open_config(s, &config, &w);
    w.outliers = 2000.0f;
    for (uint64_t i = 0; i < 2; i++) {
        uint32_t strange[N_TOKENS];
        cache_tokens(200 + i, strange, N_TOKENS);
        fkv_seq seq = cache_fixture_seq(&w, N_TOKENS);
        cache_fixture_run(&w, seq, strange, 0, N_TOKENS, STEP_TOKENS, NULL);
        ck_ok(fkv_prefix_insert(w.cache, seq, strange, N_TOKENS));
        ck_ok(fkv_seq_close(w.cache, seq));
    }
    w.outliers = s->shape->outliers;
    uint8_t *got = fresh(s);
    cache_fixture_run(&w, cache_fixture_seq(&w, N_TOKENS), s->tokens, 0, N_TOKENS, 10, got);
    check_same(s, got, 0, N_TOKENS, "in pages used before");
    ck_assert_uint_gt(cache_fixture_stats(&w).evictions, 0);
    close_fixture(&w);
}

START_TEST(outputs_in_reused_pages_are_bit_identical) { each_subject(in_used_pages); }
END_TEST

/* ---- random operations ---- */

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

typedef struct random_seq {
    fkv_seq seq; /* 0 if closed */
    uint32_t length;
} random_seq;

/* Runs random operations on several sequences of different lengths, all of which are prefixes of the same tokens. */
static void run_random_seed(const subject *s, uint64_t seed) {
    enum { N_MOVES = 120 };
    char path[512];
    (void)cache_path(path, "run_random_seed.fkv");
    cache_fixture w;
    open_subject(s, &w);
    uint8_t *got = fresh(s);
    random_seq all[N_SEQS] = {0};
    bool saved = false;
    uint64_t state = seed;
    for (int move = 0; move < N_MOVES; move++) {
        random_seq *one = &all[next_random(&state) % N_SEQS];
        random_seq *other = &all[next_random(&state) % N_SEQS];
        uint64_t what = next_random(&state) % 16;
        if (one->seq == 0) {
            fkv_seq_config opened = {.max_tokens = N_TOKENS};
            if (what < 8) opened = (fkv_seq_config){.max_tokens = N_TOKENS, .prompt = s->tokens, .n_prompt = N_TOKENS - 1};
            if (what < 12 || !saved)
                ck_ok(fkv_seq_open(w.cache, &opened, &one->seq, &one->length));
            else
                ck_ok(fkv_seq_load(w.cache, &opened, path, &one->seq));
            one->length = cache_fixture_length(&w, one->seq);
        } else if (what == 0 || one->length == N_TOKENS) {
            ck_ok(fkv_seq_close(w.cache, one->seq));
            *one = (random_seq){0};
        } else if (what == 1 && other->seq == 0) {
            ck_ok(fkv_seq_fork(w.cache, one->seq, N_TOKENS, &other->seq));
            other->length = one->length;
        } else if (what == 2 && one->length > 0) {
            ck_ok(fkv_seq_save(w.cache, one->seq, s->tokens, 0, path));
            saved = true;
        } else if (what == 3 && one->length > 0) {
            uint32_t back = one->length - (uint32_t)(next_random(&state) % (one->length < 20 ? one->length : 20));
            fkv_status status = fkv_seq_truncate(w.cache, one->seq, back);
            ck_assert_msg(status == FKV_OK || status == FKV_GONE, "%s: %s", s->name, fkv_message());
            if (status == FKV_OK) one->length = back;
        } else if (what == 4) {
            ck_ok(fkv_prefix_insert(w.cache, one->seq, s->tokens, one->length));
        } else {
            cache_chunk chunks[N_SEQS];
            uint32_t n_chunks = 0;
            bool abort_it = what == 5;
            for (uint32_t i = 0; i < N_SEQS; i++) {
                uint32_t n = 1 + (uint32_t)(next_random(&state) % 2 * (next_random(&state) % (STEP_TOKENS / N_SEQS)));
                if (all[i].seq == 0 || all[i].length == N_TOKENS || next_random(&state) % 4 == 0) continue;
                if (n > N_TOKENS - all[i].length) n = N_TOKENS - all[i].length;
                chunks[n_chunks++] =
                    (cache_chunk){all[i].seq, abort_it ? s->strange : s->tokens, all[i].length, n, abort_it ? NULL : got};
                if (!abort_it) all[i].length += n;
            }
            if (n_chunks == 0) continue;
            cache_fixture_step(&w, chunks, n_chunks, abort_it ? CACHE_ABORT : CACHE_COMMIT);
            for (uint32_t c = 0; c < n_chunks && !abort_it; c++)
                check_same(s, got, chunks[c].first, chunks[c].first + chunks[c].n_tokens, "in a random run");
        }
        ck_assert(fkv_cache_consistent(w.cache));
    }
    close_fixture(&w);
}

static void run_random_operations(const subject *s) {
    enum { SEED = 20240901 };
    if (s == &subjects[0]) printf("random operations from seed %d\n", SEED);
    run_random_seed(s, SEED);
    if (!TEST_SANITIZED) run_random_seed(s, SEED + 1);
}

START_TEST(outputs_of_random_operations_are_bit_identical) { each_subject(run_random_operations); }
END_TEST

/* ---- long history ---- */

START_TEST(growing_splits_of_a_long_history_are_bit_identical) {
    enum { LONG = 8240, TAIL = 8150, CHUNK = 500 }; /* a tile of ten queries crosses token 8192, where the split length doubles */
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer =
        (fkv_layer_config){.n_q_heads = TEST_SANITIZED ? 1 : 3, .n_kv_heads = 1, .head_dim = 32, .k = {8, 32}, .v = {4, 32}};
    config.max_tokens = LONG;
    config.n_threads = 1;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint32_t *tokens = malloc(LONG * sizeof *tokens);
    uint8_t *expected = malloc(LONG * w.output_bytes);
    uint8_t *got = malloc(LONG * w.output_bytes);
    ck_assert(tokens != NULL && expected != NULL && got != NULL);
    cache_tokens(3, tokens, LONG);
    cache_fixture_run(&w, cache_fixture_seq(&w, LONG), tokens, 0, LONG, CHUNK, expected);
    cache_fixture_close(&w);

    config.n_threads = 3;
    ck_ok(cache_fixture_open(&w, &config));
    fkv_seq seq = cache_fixture_seq(&w, LONG);
    cache_fixture_run(&w, seq, tokens, 0, TAIL, 450, got);
    cache_fixture_run(&w, seq, tokens, TAIL, LONG, 1, got);
    ck_assert(memcmp(got, expected, LONG * w.output_bytes) == 0);
    cache_fixture_close(&w);
    free(tokens);
    free(expected);
    free(got);
}
END_TEST

TEST_MAIN("same answer", chunks_of_any_size_are_bit_identical, batched_and_single_sequences_are_bit_identical,
          any_number_of_threads_is_bit_identical, forks_within_and_at_the_end_of_a_page_are_bit_identical,
          outputs_after_an_abort_on_a_shared_page_are_bit_identical, outputs_on_a_shared_prefix_are_bit_identical,
          outputs_on_a_reloaded_prefix_are_bit_identical, outputs_on_pages_written_by_scalar_code_are_bit_identical,
          outputs_after_truncate_and_rewrite_are_bit_identical, outputs_after_aborted_steps_are_bit_identical,
          outputs_in_reused_pages_are_bit_identical, outputs_of_random_operations_are_bit_identical,
          growing_splits_of_a_long_history_are_bit_identical)
