/* Tests a cache on MLX through its public headers: operations (forks, truncation, aborts, files) give the same results as on the
 * host, memory use is constant according to MLX's own counters, and errors return a status instead of ending the process. Runs on
 * MLX's CPU backend, or on a GPU with the fused kernels if FKV_TEST_MLX_GPU is set.
 *
 * Most tests drive a host cache and an MLX cache with the same rows and calls. The page files that the two save must then be
 * byte-identical.
 */
#include "attn_cases.h"
#include "channel_bits.h"
#include "relative_l2.h"
#include "sanitized.h"
#include "test.h"

#include "../src/mlx/mlx_graph.h"
#include "../src/mlx/mlx_include.h"

#include <flatkv/mlx.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { LAYERS = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, MAX_STEP = 128, MAX_TOKENS = 8192, WIDE_DIM = 512, WIDE_Q_HEADS = 8 };

static const double DEVICE_TOLERANCE = 1e-3; /* tolerance for float sums that MLX adds in a different order than the host */

/* Codecs of the layer sets, in order: affine and 16-bit; sealed; sealed with 4 bits, for which GPUs have additional kernels;
 * calibrated keys; TurboQuant. */
typedef enum { AFFINE, SEALED, SEALED_4, CALIBRATED, TURBO, N_LAYER_SETS } layer_set;

#define SEALED_SIDES(k_bits, v_bits) .k = {k_bits, 0, FKV_CODEC_SEALED}, .v = {v_bits, 0, FKV_CODEC_SEALED_V}
#define CALIBRATED_SIDES(layer, average)                                                                                         \
    .k = {average, 0, FKV_CODEC_CALIBRATED}, .v = {average, 0, FKV_CODEC_SEALED_V}, .channel_bits = channel_bits[layer]
#define TURBO_SIDES(k_bits, v_bits) .k = {k_bits, 0, FKV_CODEC_TURBO}, .v = {v_bits, 0, FKV_CODEC_TURBO}

/* bit widths of calibrated keys, for each channel of each KV head */
static uint8_t channel_bits[LAYERS][KV_HEADS * DIM];

static fkv_config config_of(layer_set set, uint32_t max_tokens, uint32_t max_seqs) {
    static const fkv_layer_config layers[N_LAYER_SETS][LAYERS] = {
        {{.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .k = {8, 64}, .v = {4, 64}},
         {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .window = 40, .n_sinks = 3, .k = {4, 32}, .v = {16, 0}}},
        {{.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, SEALED_SIDES(4, 3)},
         {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .window = 40, .n_sinks = 3, SEALED_SIDES(3, 4)}},
        {{.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, SEALED_SIDES(4, 4)},
         {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .window = 40, .n_sinks = 3, SEALED_SIDES(4, 4)}},
        {{.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, CALIBRATED_SIDES(0, 4)},
         {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .window = 40, .n_sinks = 3, CALIBRATED_SIDES(1, 3)}},
        {{.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, TURBO_SIDES(3, 4)},
         {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .window = 40, .n_sinks = 3, TURBO_SIDES(2, 2)}},
    };
    uint64_t random = 23;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t head = 0; head < KV_HEADS; head++)
            channel_bits_random(&random, DIM, layer == 0 ? 4 : 3, channel_bits[layer] + (size_t)head * DIM);
    fkv_config config = fkv_config_default();
    config.n_layers = LAYERS;
    config.layers = layers[set];
    config.rotate = set == SEALED_4 ? FKV_ROTATE_V : set == AFFINE ? FKV_ROTATE_K : FKV_ROTATE_KV;
    config.rotation_seed = 5;
    config.page_tokens = 16;
    config.max_tokens = max_tokens;
    config.max_seqs = max_seqs;
    config.max_step_tokens = MAX_STEP;
    config.n_threads = 1;
    return config;
}

static bool on_gpu(void) { return getenv("FKV_TEST_MLX_GPU") != NULL; }

static fkv_mlx_config device(void) {
    static mlx_stream stream; /* the stream is kept until the program ends */
    if (stream.ctx == NULL) stream = on_gpu() ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    return (fkv_mlx_config){.stream = stream, .way = FKV_MLX_AUTO};
}

static fkv_cache *open_mlx(const fkv_config *config) {
    const fkv_mlx_config mlx_config = device();
    fkv_cache *cache = NULL;
    ck_ok(fkv_mlx_cache_open(config, &mlx_config, &cache));
    return cache;
}

/* ---- host and MLX caches ---- */

typedef struct pair {
    fkv_cache *host;
    fkv_cache *mlx;
} pair;

typedef struct pair_seq {
    fkv_seq host;
    fkv_seq mlx;
    uint64_t seed; /* seed of the sequence's rows */
    uint32_t length;
} pair_seq;

static pair pair_open(const fkv_config *config) {
    pair p = {.mlx = open_mlx(config)};
    ck_ok(fkv_cache_open(config, &p.host));
    return p;
}

static void pair_close(pair *p) {
    ck_assert(fkv_cache_consistent(p->host));
    ck_assert(fkv_cache_consistent(p->mlx));
    fkv_cache_close(p->host);
    fkv_cache_close(p->mlx);
}

static pair_seq pair_seq_open(pair *p, uint64_t seed, uint32_t max_tokens) {
    const fkv_seq_config seq_config = {.max_tokens = max_tokens};
    pair_seq s = {.seed = seed};
    ck_ok(fkv_seq_open(p->host, &seq_config, &s.host, NULL));
    ck_ok(fkv_seq_open(p->mlx, &seq_config, &s.mlx, NULL));
    return s;
}

/* Generates a row of one token. side: 0 for K, 1 for V, 2 for Q */
static void row_of(uint64_t seed, uint32_t position, uint32_t layer, uint32_t side, uint32_t n, float *row) {
    uint64_t state = seed * 1000003u + (uint64_t)position * 31u + layer * 7u + side;
    for (uint32_t i = 0; i < n; i++) row[i] = attn_gaussian(&state);
}

static mlx_array array_of(const float *rows, uint32_t n, uint32_t heads) {
    return mlx_array_new_data(rows, (const int[]){(int)n, (int)heads, DIM}, 3, MLX_FLOAT32);
}

static float side_rows[3][MAX_STEP * Q_HEADS * DIM];
static float host_out[MAX_STEP * Q_HEADS * DIM];

static void layer_rows(pair_seq *const *seqs, const uint32_t *n_tokens, uint32_t n_seqs, uint32_t layer) {
    for (uint32_t side = 0; side < 3; side++) {
        const uint32_t n = (side == 2 ? Q_HEADS : KV_HEADS) * DIM;
        float *at = side_rows[side];
        for (uint32_t s = 0; s < n_seqs; s++)
            for (uint32_t i = 0; i < n_tokens[s]; i++, at += n) row_of(seqs[s]->seed, seqs[s]->length + i, layer, side, n, at);
    }
}

/* Runs one step on both caches over all layers and compares the outputs. */
static void pair_step(pair *p, pair_seq *const *seqs, const uint32_t *n_tokens, uint32_t n_seqs, bool commit) {
    fkv_row on_host[8];
    fkv_row on_mlx[8];
    uint32_t total = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        on_host[s] = (fkv_row){seqs[s]->host, n_tokens[s]};
        on_mlx[s] = (fkv_row){seqs[s]->mlx, n_tokens[s]};
        total += n_tokens[s];
    }
    fkv_step *host = NULL;
    fkv_step *mlx = NULL;
    ck_ok(fkv_step_begin(p->host, on_host, n_seqs, &host));
    ck_ok(fkv_step_begin(p->mlx, on_mlx, n_seqs, &mlx));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        layer_rows(seqs, n_tokens, n_seqs, layer);
        ck_ok(fkv_write(host, layer, side_rows[0], side_rows[1]));
        ck_ok(fkv_attend(host, layer, side_rows[2], host_out));
        mlx_array k = array_of(side_rows[0], total, KV_HEADS);
        mlx_array v = array_of(side_rows[1], total, KV_HEADS);
        mlx_array q = array_of(side_rows[2], total, Q_HEADS);
        ck_ok(fkv_mlx_write(mlx, layer, k, v));
        ck_ok(fkv_mlx_attend(mlx, layer, q, &q));
        ck_assert_int_eq(mlx_array_eval(q), 0);
        const float *out = mlx_array_data_float32(q);
        for (uint32_t row = 0; row < total * Q_HEADS; row++)
            ck_assert_double_le(relative_l2(out + (size_t)row * DIM, host_out + (size_t)row * DIM, DIM), DEVICE_TOLERANCE);
        (void)mlx_array_free(k);
        (void)mlx_array_free(v);
        (void)mlx_array_free(q);
    }
    ck_ok(commit ? fkv_step_commit(host) : fkv_step_abort(host));
    ck_ok(commit ? fkv_step_commit(mlx) : fkv_step_abort(mlx));
    for (uint32_t s = 0; commit && s < n_seqs; s++) seqs[s]->length += n_tokens[s];
}

static void pair_run(pair *p, pair_seq *seq, uint32_t n_tokens, uint32_t chunk) {
    while (n_tokens > 0) {
        const uint32_t n = fkv_min_u32(n_tokens, chunk);
        pair_step(p, (pair_seq *const[]){seq}, &n, 1, true);
        n_tokens -= n;
    }
}

static const char *path_of(const char *name) {
    static char paths[4][160];
    static int next;
    char *path = paths[next++ % 4];
    (void)snprintf(path, sizeof paths[0], "%s/flatkv-test-mlx-%d-%s", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (int)getpid(),
                   name);
    return path;
}

static const uint32_t no_tokens[MAX_TOKENS];

static void files_are_equal(const char *a, const char *b) {
    FILE *one = fopen(a, "rb");
    FILE *other = fopen(b, "rb");
    ck_assert(one != NULL && other != NULL);
    uint64_t at = 0;
    for (int x = 0, y = 0; x != EOF; at++) {
        x = fgetc(one);
        y = fgetc(other);
        ck_assert_msg(x == y, "the files differ at byte %llu", (unsigned long long)at);
    }
    (void)fclose(one);
    (void)fclose(other);
}

static void pair_same_pages(pair *p, const pair_seq *s) {
    const char *host = path_of("host.fkv");
    const char *mlx = path_of("mlx.fkv");
    ck_ok(fkv_seq_save(p->host, s->host, no_tokens, 0, host));
    ck_ok(fkv_seq_save(p->mlx, s->mlx, no_tokens, 0, mlx));
    files_are_equal(host, mlx);
    (void)unlink(host);
    (void)unlink(mlx);
}

/* ---- operations ---- */

enum { SET_STEP = TEST_SANITIZED ? 2 : 1 }; /* with a sanitizer, the tests use every second layer set */

START_TEST(chunks_batches_and_windows_match_the_host) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 1024, 4);
        pair p = pair_open(&config);
        pair_seq a = pair_seq_open(&p, 1, 300);
        pair_seq b = pair_seq_open(&p, 2, 300);
        pair_seq c = pair_seq_open(&p, 3, 300);
        pair_run(&p, &a, 150, 64);
        pair_run(&p, &b, 17, 17);
        for (uint32_t i = 0; i < (TEST_SANITIZED ? 12 : 30); i++)
            pair_step(&p, (pair_seq *const[]){&a, &b, &c}, (const uint32_t[]){1, 1 + i % 3, 1 + i % 5}, 3, true);
        pair_same_pages(&p, &a);
        pair_same_pages(&p, &b);
        pair_same_pages(&p, &c);
        pair_close(&p);
    }
}
END_TEST

START_TEST(fork_copies_the_page_it_writes) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 1024, 4);
        pair p = pair_open(&config);
        pair_seq parent = pair_seq_open(&p, 1, 200);
        pair_run(&p, &parent, 55, 55);
        pair_seq child = parent;
        ck_ok(fkv_seq_fork(p.host, parent.host, 200, &child.host));
        ck_ok(fkv_seq_fork(p.mlx, parent.mlx, 200, &child.mlx));
        child.seed = 9;
        fkv_stats before;
        fkv_stats after;
        ck_ok(fkv_cache_stats(p.mlx, &before));
        pair_step(&p, (pair_seq *const[]){&child, &parent}, (const uint32_t[]){3, 2}, 2, true);
        ck_ok(fkv_cache_stats(p.mlx, &after));
        ck_assert_uint_gt(after.page_copies, before.page_copies);
        pair_run(&p, &child, 30, 7);
        pair_run(&p, &parent, TEST_SANITIZED ? 10 : 30, 1);
        pair_same_pages(&p, &child);
        pair_same_pages(&p, &parent);
        pair_close(&p);
    }
}
END_TEST

START_TEST(truncated_and_aborted_tokens_leave_no_rows) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 1024, 2);
        pair p = pair_open(&config);
        pair_seq s = pair_seq_open(&p, 1, 300);
        pair_run(&p, &s, 39, 39);
        s.seed = 77; /* the next step writes rows of another seed and is aborted; no later step may read these rows */
        pair_step(&p, (pair_seq *const[]){&s}, (const uint32_t[]){20}, 1, false);
        ck_ok(fkv_seq_truncate(p.host, s.host, 21));
        ck_ok(fkv_seq_truncate(p.mlx, s.mlx, 21));
        s.length = 21;
        s.seed = 1;
        pair_run(&p, &s, 40, 11);
        pair_same_pages(&p, &s);
        pair_close(&p);
    }
}
END_TEST

/* Closes the only sequence of a full cache during its own step. Its pages are released before the output is evaluated, and the
 * next sequence reuses them. */
START_TEST(output_of_a_sequence_closed_in_its_step_matches_the_host) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 64, 1);
        pair p = pair_open(&config);
        pair_seq s = pair_seq_open(&p, 1, 64);
        pair_run(&p, &s, 50, 50);
        fkv_step *host = NULL;
        fkv_step *mlx = NULL;
        const uint32_t n = 9;
        ck_ok(fkv_step_begin(p.host, &(fkv_row){s.host, n}, 1, &host));
        ck_ok(fkv_step_begin(p.mlx, &(fkv_row){s.mlx, n}, 1, &mlx));
        static float expected[LAYERS][MAX_STEP * Q_HEADS * DIM];
        mlx_array answers[LAYERS];
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            layer_rows((pair_seq *const[]){&s}, &n, 1, layer);
            ck_ok(fkv_write(host, layer, side_rows[0], side_rows[1]));
            ck_ok(fkv_attend(host, layer, side_rows[2], expected[layer]));
            mlx_array k = array_of(side_rows[0], n, KV_HEADS);
            mlx_array v = array_of(side_rows[1], n, KV_HEADS);
            answers[layer] = array_of(side_rows[2], n, Q_HEADS);
            ck_ok(fkv_mlx_write(mlx, layer, k, v));
            if (layer == 0) ck_ok(fkv_seq_close(p.mlx, s.mlx));
            ck_ok(fkv_mlx_attend(mlx, layer, answers[layer], &answers[layer]));
            (void)mlx_array_free(k);
            (void)mlx_array_free(v);
        }
        ck_ok(fkv_seq_close(p.host, s.host));
        ck_ok(fkv_step_commit(host));
        ck_ok(fkv_step_commit(mlx));
        pair_seq next = pair_seq_open(&p, 2, 64);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            ck_assert_int_eq(mlx_array_eval(answers[layer]), 0);
            const float *out = mlx_array_data_float32(answers[layer]);
            for (size_t row = 0; row < (size_t)n * Q_HEADS; row++)
                ck_assert_double_le(relative_l2(out + row * DIM, expected[layer] + row * DIM, DIM), DEVICE_TOLERANCE);
            (void)mlx_array_free(answers[layer]);
        }
        pair_run(&p, &next, 64, 20);
        pair_same_pages(&p, &next);
        pair_close(&p);
    }
}
END_TEST

START_TEST(random_operations_leave_the_same_pages_as_on_the_host) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 700, 4);
        pair p = pair_open(&config);
        uint64_t state = 20261115;
        pair_seq seqs[3];
        for (uint32_t i = 0; i < 3; i++) seqs[i] = pair_seq_open(&p, 10 + i, 160);
        for (uint32_t round = 0; round < (TEST_SANITIZED ? 20 : 60); round++) {
            pair_seq *s = &seqs[attn_random(&state) % 3];
            const uint32_t n_left = 160 - s->length;
            const uint64_t what = attn_random(&state) % 8;
            /* truncation may fail, because window layers have dropped rows; both caches must return the same status */
            if (what == 0 && s->length > 5) {
                const uint32_t keep = s->length - 1 - (uint32_t)(attn_random(&state) % 5);
                const fkv_status status = fkv_seq_truncate(p.host, s->host, keep);
                ck_status(fkv_seq_truncate(p.mlx, s->mlx, keep), status);
                if (status == FKV_OK) s->length = keep;
            } else if (what == 1 && n_left > 0) {
                pair_step(&p, (pair_seq *const[]){s}, (const uint32_t[]){1 + (uint32_t)(attn_random(&state) % n_left) % 40}, 1,
                          false);
            } else if (n_left == 0) {
                ck_ok(fkv_seq_close(p.host, s->host));
                ck_ok(fkv_seq_close(p.mlx, s->mlx));
                *s = pair_seq_open(&p, 100 + round, 160);
            } else {
                pair_run(&p, s, 1 + (uint32_t)(attn_random(&state) % fkv_min_u32(n_left, 50)), 33);
            }
        }
        for (uint32_t i = 0; i < 3; i++)
            if (seqs[i].length > 0) pair_same_pages(&p, &seqs[i]);
        pair_close(&p);
    }
}
END_TEST

START_TEST(file_saved_on_one_device_loads_on_the_other) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 1024, 4);
        pair p = pair_open(&config);
        pair_seq s = pair_seq_open(&p, 1, 300);
        pair_run(&p, &s, 101, 50);
        const char *host = path_of("from-host.fkv");
        const char *mlx = path_of("from-mlx.fkv");
        ck_ok(fkv_seq_save(p.host, s.host, no_tokens, 0, host));
        ck_ok(fkv_seq_save(p.mlx, s.mlx, no_tokens, 0, mlx));
        const fkv_seq_config seq_config = {.max_tokens = 300};
        pair_seq crossed = {.seed = 1, .length = s.length};
        ck_ok(fkv_seq_load(p.host, &seq_config, mlx, &crossed.host));
        ck_ok(fkv_seq_load(p.mlx, &seq_config, host, &crossed.mlx));
        pair_run(&p, &crossed, 40, 9);
        pair_run(&p, &s, 40, 40);
        pair_same_pages(&p, &crossed);
        pair_same_pages(&p, &s);
        (void)unlink(host);
        (void)unlink(mlx);
        pair_close(&p);
    }
}
END_TEST

/* ---- bit-identical outputs ---- */

/* Runs a step that appends n tokens to `seq`, with the rows of seed 1 from position `start` on, and one token to `other_seq`
 * unless other_seq is 0. Then aborts the step. out receives the outputs of layer 0 for the last n_out tokens. */
static void step_bits(fkv_cache *cache, fkv_seq other_seq, fkv_seq seq, uint32_t start, uint32_t n, uint32_t n_out, float *out) {
    const fkv_row rows[2] = {{other_seq, 1}, {seq, n}};
    const uint32_t first = other_seq == 0 ? 1 : 0;
    pair_seq seqs[2] = {{.seed = 60}, {.seed = 1, .length = start}};
    const uint32_t total = n + 1 - first;
    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(cache, rows + first, 2 - first, &step));
    layer_rows((pair_seq *const[]){&seqs[first], &seqs[1]}, (const uint32_t[]){first == 0 ? 1 : n, n}, 2 - first, 0);
    mlx_array k = array_of(side_rows[0], total, KV_HEADS);
    mlx_array v = array_of(side_rows[1], total, KV_HEADS);
    mlx_array q = array_of(side_rows[2], total, Q_HEADS);
    ck_ok(fkv_mlx_write(step, 0, k, v));
    ck_ok(fkv_mlx_attend(step, 0, q, &q));
    ck_assert_int_eq(mlx_array_eval(q), 0);
    memcpy(out, mlx_array_data_float32(q) + (size_t)(total - n_out) * Q_HEADS * DIM, (size_t)n_out * Q_HEADS * DIM * sizeof *out);
    (void)mlx_array_free(k);
    (void)mlx_array_free(v);
    (void)mlx_array_free(q);
    ck_ok(fkv_step_abort(step));
}

START_TEST(batched_forked_and_reloaded_outputs_are_bit_identical) {
    const uint32_t length = TEST_SANITIZED ? 300 : on_gpu() ? 1100 : 600;
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        fkv_config config = config_of(set, 8192, 8);
        if (set >= SEALED_4) config.page_tokens = 64;
        pair p = pair_open(&config);
        pair_seq a = pair_seq_open(&p, 1, 1500);
        pair_seq b = pair_seq_open(&p, 2, 100);
        pair_run(&p, &a, length, MAX_STEP);
        pair_run(&p, &b, 33, 33);
        float alone[Q_HEADS * DIM];
        float other[Q_HEADS * DIM];
        step_bits(p.mlx, 0, a.mlx, length, 1, 1, alone);
        step_bits(p.mlx, b.mlx, a.mlx, length, 1, 1, other);
        ck_assert_mem_eq(alone, other, sizeof alone);
        fkv_seq child = 0;
        ck_ok(fkv_seq_fork(p.mlx, a.mlx, 1500, &child));
        step_bits(p.mlx, 0, child, length, 1, 1, other);
        ck_assert_mem_eq(alone, other, sizeof alone);
        const char *path = path_of("bits.fkv");
        ck_ok(fkv_seq_save(p.mlx, a.mlx, no_tokens, 0, path));
        fkv_seq reloaded = 0;
        ck_ok(fkv_seq_load(p.mlx, &(fkv_seq_config){.max_tokens = 1500}, path, &reloaded));
        (void)unlink(path);
        step_bits(p.mlx, 0, reloaded, length, 1, 1, other);
        ck_assert_mem_eq(alone, other, sizeof alone);
        pair_seq chunks = pair_seq_open(&p, 1, 1500);
        pair_run(&p, &chunks, length, 90);
        step_bits(p.mlx, 0, chunks.mlx, length, 1, 1, other);
        ck_assert_mem_eq(alone, other, sizeof alone);
        pair_close(&p);
    }
}
END_TEST

/* Returns the attention outputs of n tokens of sequence `seq`, as float32, with rows of the given type. The rows are
 * representable in bfloat16. */
static void wide_outputs(fkv_cache *cache, fkv_seq seq, uint32_t start, uint32_t n, mlx_dtype type, float *out) {
    const mlx_stream stream = device().stream;
    mlx_array rows[3] = {mlx_array_new(), mlx_array_new(), mlx_array_new()}; /* K, V and Q */
    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(cache, &(fkv_row){seq, n}, 1, &step));
    for (uint32_t side = 0; side < 3; side++) {
        const uint32_t heads = side == 2 ? WIDE_Q_HEADS : 1;
        float *numbers = malloc((size_t)n * heads * WIDE_DIM * sizeof *numbers);
        ck_assert_ptr_nonnull(numbers);
        for (uint32_t i = 0; i < n; i++) row_of(7, start + i, 0, side, heads * WIDE_DIM, numbers + (size_t)i * heads * WIDE_DIM);
        mlx_array given = mlx_array_new_data(numbers, (const int[]){(int)n, (int)heads, WIDE_DIM}, 3, MLX_FLOAT32);
        mlx_array rounded = mlx_array_new();
        ck_assert_int_eq(mlx_astype(&rounded, given, MLX_BFLOAT16, stream), 0);
        ck_assert_int_eq(mlx_astype(&rows[side], rounded, type, stream), 0);
        (void)mlx_array_free(given);
        (void)mlx_array_free(rounded);
        free(numbers);
    }
    ck_ok(fkv_mlx_write(step, 0, rows[0], rows[1]));
    ck_ok(fkv_mlx_attend(step, 0, rows[2], &rows[2]));
    mlx_array result = mlx_array_new();
    ck_assert_int_eq(mlx_astype(&result, rows[2], MLX_FLOAT32, stream), 0);
    ck_assert_int_eq(mlx_array_eval(result), 0);
    memcpy(out, mlx_array_data_float32(result), (size_t)n * WIDE_Q_HEADS * WIDE_DIM * sizeof *out);
    (void)mlx_array_free(result);
    for (int side = 0; side < 3; side++) (void)mlx_array_free(rows[side]);
    ck_ok(fkv_step_commit(step));
}

/* On CUDA, prefill of heads with 512 channels uses different kernels for rows of 16 and of 32 bits. The type of the rows may
 * differ from that of the configuration. */
START_TEST(rows_of_other_types_than_the_configured_one_are_accepted) {
    enum { FIRST = 256, SECOND = 60, N = SECOND * WIDE_Q_HEADS * WIDE_DIM };
    const fkv_layer_config layer = {.n_q_heads = WIDE_Q_HEADS, .n_kv_heads = 1, .head_dim = WIDE_DIM, SEALED_SIDES(4, 4)};
    fkv_config config = config_of(SEALED_4, 2048, 2);
    config.n_layers = 1;
    config.layers = &layer;
    config.page_tokens = 64;
    config.max_step_tokens = FIRST;
    float *out[2] = {malloc((size_t)FIRST * WIDE_Q_HEADS * WIDE_DIM * sizeof(float)),
                     malloc((size_t)FIRST * WIDE_Q_HEADS * WIDE_DIM * sizeof(float))};
    ck_assert(out[0] != NULL && out[1] != NULL);
    fkv_cache *cache = open_mlx(&config);
    for (int i = 0; i < 2; i++) {
        fkv_seq seq = 0;
        ck_ok(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = FIRST + SECOND}, &seq, NULL));
        wide_outputs(cache, seq, 0, FIRST, i == 0 ? MLX_FLOAT32 : MLX_BFLOAT16, out[i]);
        wide_outputs(cache, seq, FIRST, SECOND, i == 0 ? MLX_FLOAT32 : MLX_BFLOAT16, out[i]);
    }
    for (size_t i = 0; i < N; i++) ck_assert_float_eq_tol(out[0][i], out[1][i], 5e-3F);
    fkv_cache_close(cache);
    free(out[0]);
    free(out[1]);
}
END_TEST

/* Tests decode blocks of 4, 8 and 16 rows, and prefill tiles that begin at different positions. Runs only on a GPU, because on
 * the CPU the order of additions in MLX's matrix products may depend on the number of rows. */
START_TEST(outputs_with_other_queries_of_the_sequence_are_bit_identical) {
    enum { LENGTH = 1100, CHUNK = 40 };
    for (layer_set set = AFFINE; set < N_LAYER_SETS && on_gpu(); set++) {
        fkv_config config = config_of(set, 8192, 4);
        if (set >= SEALED_4) config.page_tokens = 64;
        pair p = pair_open(&config);
        static float whole[CHUNK * Q_HEADS * DIM];
        static float part[CHUNK * Q_HEADS * DIM];
        pair_seq s = pair_seq_open(&p, 1, 1500);
        pair_run(&p, &s, LENGTH - 7, MAX_STEP);
        step_bits(p.mlx, 0, s.mlx, s.length, 8, 8, whole);
        for (uint32_t n = 1; n < 8; n++) {
            step_bits(p.mlx, 0, s.mlx, s.length, 8 - n, 1, part);
            ck_assert_mem_eq(part, whole + (size_t)(7 - n) * Q_HEADS * DIM, Q_HEADS * DIM * sizeof *part);
        }
        step_bits(p.mlx, 0, s.mlx, s.length, CHUNK, CHUNK, whole);
        pair_run(&p, &s, 13, 13);
        step_bits(p.mlx, 0, s.mlx, s.length, CHUNK - 13, CHUNK - 13, part);
        ck_assert_mem_eq(part, whole + (size_t)13 * Q_HEADS * DIM, (CHUNK - 13) * Q_HEADS * DIM * sizeof *part);
        pair_close(&p);
    }
}
END_TEST

START_TEST(nan_query_gives_nan_and_does_not_affect_other_queries) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 256, 1);
        fkv_cache *cache = open_mlx(&config);
        const fkv_seq_config seq_config = {.max_tokens = 256};
        fkv_seq seq = 0;
        fkv_step *step = NULL;
        ck_ok(fkv_seq_open(cache, &seq_config, &seq, NULL));
        ck_ok(fkv_step_begin(cache, &(fkv_row){seq, 3}, 1, &step));
        pair_seq rows = {.seed = 4};
        layer_rows((pair_seq *const[]){&rows}, (const uint32_t[]){3}, 1, 0);
        for (uint32_t head = 0; head < Q_HEADS; head++) side_rows[2][(Q_HEADS + head) * DIM + 5] = NAN;
        mlx_array k = array_of(side_rows[0], 3, KV_HEADS);
        mlx_array v = array_of(side_rows[1], 3, KV_HEADS);
        mlx_array q = array_of(side_rows[2], 3, Q_HEADS);
        ck_ok(fkv_mlx_write(step, 0, k, v));
        ck_ok(fkv_mlx_attend(step, 0, q, &q));
        ck_assert_int_eq(mlx_array_eval(q), 0);
        const float *out = mlx_array_data_float32(q);
        for (uint32_t i = 0; i < 3 * Q_HEADS * DIM; i++) ck_assert_int_eq(isfinite(out[i]) != 0, i / (Q_HEADS * DIM) != 1);
        (void)mlx_array_free(k);
        (void)mlx_array_free(v);
        (void)mlx_array_free(q);
        fkv_cache_close(cache); /* closes the cache while a step is open */
    }
}
END_TEST

/* ---- fetched rows ---- */

/* Compares fetched rows of one head with the rows that were written. */
static void check_fetched(mlx_array rows, uint64_t seed, uint32_t n_tokens, uint32_t side, double tolerance) {
    ck_assert_int_eq(mlx_array_eval(rows), 0);
    const int *shape = mlx_array_shape(rows);
    ck_assert(mlx_array_ndim(rows) == 3 && shape[0] == KV_HEADS && shape[1] == (int)n_tokens && shape[2] == DIM);
    const float *found = mlx_array_data_float32(rows);
    float wanted[KV_HEADS * DIM];
    for (uint32_t t = 0; t < n_tokens; t++) {
        row_of(seed, t, 0, side, KV_HEADS * DIM, wanted);
        for (uint32_t head = 0; head < KV_HEADS; head++)
            ck_assert_double_le(relative_l2(found + ((size_t)head * n_tokens + t) * DIM, wanted + (size_t)head * DIM, DIM),
                                tolerance);
    }
}

START_TEST(fetched_rows_are_the_written_rows_of_each_sequence) {
    enum { LENGTH = 70 };
    static const double tolerance[N_LAYER_SETS][2] = {[AFFINE] = {0.01, 0.2}, [TURBO] = {0.4, 0.2}}; /* errors of the codecs */
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, 512, 2);
        pair p = pair_open(&config);
        pair_seq a = pair_seq_open(&p, 1, 200);
        pair_seq b = pair_seq_open(&p, 2, 200);
        pair_run(&p, &b, 17, 5);
        pair_run(&p, &a, LENGTH - 3, 32);
        fkv_step *step = NULL;
        const uint32_t n_tokens[] = {3, 2};
        ck_ok(fkv_step_begin(p.mlx, (const fkv_row[]){{a.mlx, 3}, {b.mlx, 2}}, 2, &step));
        layer_rows((pair_seq *const[]){&a, &b}, n_tokens, 2, 0);
        mlx_array k = array_of(side_rows[0], 5, KV_HEADS);
        mlx_array v = array_of(side_rows[1], 5, KV_HEADS);
        ck_assert_int_eq(fkv_mlx_fetch(step, 0, 0, &k, &v), FKV_BAD_STATE); /* not written yet */
        ck_ok(fkv_mlx_write(step, 0, k, v));
        ck_assert_int_eq(fkv_mlx_fetch(step, 0, 2, &k, &v), FKV_BAD_ARGUMENT);
        ck_assert_int_eq(fkv_mlx_fetch(step, 0, 0, &k, NULL), FKV_BAD_ARGUMENT);
        const bool is_sealed = set >= SEALED && set <= CALIBRATED;
        for (uint32_t row = 0; row < 2 && !is_sealed; row++) {
            const pair_seq *seq = row == 0 ? &a : &b;
            ck_ok(fkv_mlx_fetch(step, 0, row, &k, &v));
            check_fetched(k, seq->seed, seq->length + n_tokens[row], 0, tolerance[set][0]);
            check_fetched(v, seq->seed, seq->length + n_tokens[row], 1, tolerance[set][1]);
        }
        if (is_sealed) ck_assert_int_eq(fkv_mlx_fetch(step, 0, 0, &k, &v), FKV_UNSUPPORTED);
        (void)mlx_array_free(k);
        (void)mlx_array_free(v);
        k = array_of(side_rows[0], 5, KV_HEADS);
        v = array_of(side_rows[1], 5, KV_HEADS);
        ck_ok(fkv_mlx_write(step, 1, k, v));
        ck_assert_int_eq(fkv_mlx_fetch(step, 1, 0, &k, &v),
                         FKV_UNSUPPORTED); /* rows of a layer with a window cannot be fetched */
        (void)mlx_array_free(k);
        (void)mlx_array_free(v);
        ck_ok(fkv_step_abort(step));
        pair_run(&p, &a, 3, 3); /* later steps read the same pages */
        pair_same_pages(&p, &a);
        pair_close(&p);
    }
}
END_TEST

/* ---- memory use ---- */

/* MLX frees the memory of a step on another thread. Synchronizing the stream also waits for this thread, except on CUDA. */
static size_t active_memory(void) {
    size_t bytes = 0;
    ck_assert_int_eq(mlx_synchronize(device().stream), 0);
    ck_assert_int_eq(mlx_get_active_memory(&bytes), 0);
    return bytes;
}

static size_t peak_memory(void) {
    size_t bytes = 0;
    ck_assert_int_eq(mlx_get_peak_memory(&bytes), 0);
    return bytes;
}

START_TEST(pool_sizes_match_the_plan) {
    for (layer_set set = AFFINE; set < N_LAYER_SETS; set += SET_STEP) {
        const fkv_config config = config_of(set, MAX_TOKENS, 1);
        fkv_plan plan;
        ck_ok(fkv_mlx_plan_make(&config, NULL, &plan));
        const size_t before = active_memory();
        fkv_cache *cache = open_mlx(&config);
        const size_t pools = active_memory() - before;
        uint64_t pages = 0;
        for (uint32_t g = 0; g < plan.n_groups; g++) pages += plan.group_pages[g] * plan.group_page_bytes[g];
        ck_assert_uint_ge(pools, pages);
        /* besides the pages, 32 KiB are allowed for constants, whose size CUDA's allocator rounds up, and for MLX's own
         * allocations */
        ck_assert_uint_le(pools, plan.slab_bytes + 32768);
        fkv_stats stats;
        ck_ok(fkv_cache_stats(cache, &stats));
        ck_assert_uint_eq(stats.planned_bytes, plan.total_bytes);
        ck_assert_int_eq(strcmp(stats.isa, "mlx cpu") != 0, on_gpu());
        ck_assert_int_eq(fkv_mlx_cache_way(cache), on_gpu() ? FKV_MLX_FUSED : FKV_MLX_PLAIN);
        fkv_cache_close(cache);
        ck_assert_uint_eq(active_memory(), before);
    }
}
END_TEST

/* Checks that steps do not copy a pool. Each pool is larger than the limit on the memory of a step, so a copy would exceed the
 * limit. On CUDA, the thread that frees memory may lag by one step, so the lowest of several measurements is used. */
static void check_flat_memory(const fkv_layer_config *layer, uint32_t n_steps) {
    enum { FIRST = TEST_SANITIZED ? 300 : 1100, MOST_OF_A_CHUNK = 8 << 20, MOST_OF_A_STEP = 2 << 20, MOST_LAG = 1 << 20 };
    fkv_config config = config_of(AFFINE, 130000, 1);
    config.layers = NULL;
    config.layer = *layer;
    config.page_tokens = 64;
    fkv_plan plan;
    ck_ok(fkv_mlx_plan_make(&config, NULL, &plan));
    ck_assert_uint_gt(plan.slab_bytes / LAYERS, 2u * MOST_OF_A_CHUNK);
    fkv_cache *cache = open_mlx(&config);
    const fkv_seq_config seq_config = {.max_tokens = FIRST + n_steps};
    fkv_seq seq = 0;
    ck_ok(fkv_seq_open(cache, &seq_config, &seq, NULL));
    size_t flat = 0;
    ck_assert_int_eq(mlx_reset_peak_memory(), 0);
    for (uint32_t length = 0; length < FIRST + n_steps;) {
        const uint32_t n = length < FIRST ? fkv_min_u32(MAX_STEP, FIRST - length) : 1;
        fkv_step *step = NULL;
        ck_ok(fkv_step_begin(cache, &(fkv_row){seq, n}, 1, &step));
        pair_seq rows = {.seed = 3, .length = length};
        for (uint32_t l = 0; l < LAYERS; l++) {
            layer_rows((pair_seq *const[]){&rows}, &n, 1, l);
            mlx_array k = array_of(side_rows[0], n, KV_HEADS);
            mlx_array v = array_of(side_rows[1], n, KV_HEADS);
            mlx_array q = array_of(side_rows[2], n, Q_HEADS);
            ck_ok(fkv_mlx_write(step, l, k, v));
            ck_ok(fkv_mlx_attend(step, l, q, &q));
            ck_assert_int_eq(mlx_array_eval(q), 0);
            (void)mlx_array_free(k);
            (void)mlx_array_free(v);
            (void)mlx_array_free(q);
        }
        ck_ok(fkv_step_commit(step));
        length += n;
        const size_t active = active_memory();
        if (length == n || (on_gpu() && active < flat)) flat = active;
        ck_assert_uint_le(active - flat, on_gpu() ? MOST_LAG : 0);
        if (length != FIRST) continue;
        ck_assert_uint_lt(peak_memory() - flat, MOST_OF_A_CHUNK);
        ck_assert_int_eq(mlx_reset_peak_memory(), 0);
    }
    ck_assert_uint_lt(peak_memory() - flat, MOST_OF_A_STEP);
    fkv_cache_close(cache);
}

START_TEST(memory_counters_are_flat_over_hundreds_of_steps) {
    const fkv_layer_config affine = {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .k = {8, 64}, .v = {4, 64}};
    const fkv_layer_config sealed = {.n_q_heads = Q_HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, SEALED_SIDES(4, 4)};
    check_flat_memory(&affine, TEST_SANITIZED ? 80 : 500);
    check_flat_memory(&sealed, TEST_SANITIZED ? 80 : 260);
}
END_TEST

/* ---- errors ---- */

START_TEST(calls_for_the_wrong_device_name_the_right_ones) {
    const fkv_config config = config_of(AFFINE, 256, 1);
    pair p = pair_open(&config);
    pair_seq s = pair_seq_open(&p, 1, 100);
    fkv_step *host = NULL;
    fkv_step *mlx = NULL;
    ck_ok(fkv_step_begin(p.host, &(fkv_row){s.host, 1}, 1, &host));
    ck_ok(fkv_step_begin(p.mlx, &(fkv_row){s.mlx, 1}, 1, &mlx));
    layer_rows((pair_seq *const[]){&s}, (const uint32_t[]){1}, 1, 0);
    mlx_array k = array_of(side_rows[0], 1, KV_HEADS);
    mlx_array q = array_of(side_rows[2], 1, Q_HEADS);
    ck_status(fkv_write(mlx, 0, side_rows[0], side_rows[1]), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "fkv_mlx_write"));
    ck_status(fkv_attend(mlx, 0, side_rows[2], host_out), FKV_UNSUPPORTED);
    mlx_vector_array kept = mlx_vector_array_new();
    enum { MAX_TABLES = 8 };
    uint32_t form[MAX_TABLES * FKV_MLX_FORM_WORDS];
    uint32_t n_tables = MAX_TABLES;
    /* fkv_mlx_step_state() supports only fused steps, because only their graphs are independent of sequence lengths. */
    bool fused = fkv_mlx_cache_way(p.mlx) == FKV_MLX_FUSED;
    mlx_vector_array empty = mlx_vector_array_new();
    ck_status(fkv_mlx_step_state(mlx, kept, form, &n_tables), fused ? FKV_OK : FKV_UNSUPPORTED);
    ck_status(fkv_mlx_step_put_state(mlx, empty, false), fused ? FKV_BAD_ARGUMENT : FKV_UNSUPPORTED);
    (void)mlx_vector_array_free(empty);
    ck_status(fkv_mlx_step_state(host, kept, form, &n_tables), FKV_UNSUPPORTED);
    (void)mlx_vector_array_free(kept);
    ck_status(fkv_mlx_write(host, 0, k, k), FKV_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "fkv_write()"));
    ck_status(fkv_mlx_attend(host, 0, q, &q), FKV_UNSUPPORTED);
    ck_assert_int_eq(fkv_mlx_cache_way(p.host), FKV_MLX_AUTO);
    (void)mlx_array_free(k);
    (void)mlx_array_free(q);
    pair_close(&p);
}
END_TEST

START_TEST(arrays_of_wrong_shape_type_or_state_are_rejected) {
    const fkv_config config = config_of(AFFINE, 256, 1);
    fkv_cache *cache = open_mlx(&config);
    const fkv_seq_config seq_config = {.max_tokens = 100};
    fkv_seq seq = 0;
    fkv_step *step = NULL;
    ck_ok(fkv_seq_open(cache, &seq_config, &seq, NULL));
    ck_ok(fkv_step_begin(cache, &(fkv_row){seq, 2}, 1, &step));
    mlx_array k = array_of(side_rows[0], 2, KV_HEADS);
    mlx_array q = array_of(side_rows[2], 2, Q_HEADS);
    mlx_array short_k = array_of(side_rows[0], 1, KV_HEADS);
    mlx_array flat_k = mlx_array_new_data(side_rows[0], (const int[]){2, KV_HEADS * DIM}, 2, MLX_FLOAT32);
    mlx_array whole_k = mlx_array_new_data(side_rows[0], (const int[]){2, KV_HEADS, DIM}, 3, MLX_INT32);
    ck_status(fkv_mlx_write(step, 0, short_k, k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_write(step, 0, k, flat_k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_write(step, 0, whole_k, k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_write(step, 0, (mlx_array){NULL}, k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_write(step, LAYERS, k, k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_write(NULL, 0, k, k), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_attend(step, 0, q, &q), FKV_BAD_STATE);
    ck_ok(fkv_mlx_write(step, 0, k, k));
    ck_status(fkv_mlx_write(step, 0, k, k), FKV_BAD_STATE);
    ck_status(fkv_mlx_attend(step, 0, k, &q), FKV_BAD_ARGUMENT);
    ck_status(fkv_mlx_attend(step, 0, q, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_step_commit(step), FKV_BAD_STATE);
    ck_ok(fkv_step_abort(step));
    mlx_array *const all[] = {&k, &q, &short_k, &flat_k, &whole_k};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) (void)mlx_array_free(*all[i]);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(errors_inside_mlx_return_a_status_with_the_mlx_message) {
    const fkv_config config = config_of(AFFINE, 256, 1);
    fkv_cache *cache = open_mlx(&config);
    fkv_mlx_graph graph = {.stream = device().stream};
    mlx_array x = fkv_mlx_adopt(&graph, array_of(side_rows[0], 2, KV_HEADS));
    ck_ok(fkv_mlx_graph_status(&graph, "a good build"));
    (void)fkv_mlx_add(&graph, x, fkv_mlx_reshape(&graph, x, FKV_MLX_SHAPE(7, 7)));
    ck_status(fkv_mlx_graph_status(&graph, "a bad build"), FKV_DEVICE);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "a bad build: MLX error: [reshape]"));
    ck_ok(fkv_mlx_graph_status(&graph, "the next build"));
    /* calls MLX directly, with an error; without an error handler, MLX would end the process */
    mlx_array out = mlx_array_new();
    ck_assert_int_ne(mlx_matmul(&out, x, x, device().stream), 0);
    ck_assert_ptr_nonnull(strstr(fkv_mlx_last_error(), "matmul"));
    (void)mlx_array_free(out);
    fkv_mlx_graph_release(&graph, 0);
    fkv_cache_close(cache);
}
END_TEST

START_TEST(plan_that_does_not_fit_and_unavailable_kernels_are_rejected) {
    fkv_config config = config_of(AFFINE, 256, 1);
    mlx_stream cpu = mlx_default_cpu_stream_new();
    const fkv_mlx_config fused = {.stream = cpu, .way = FKV_MLX_FUSED};
    fkv_cache *cache = NULL;
    const size_t before = active_memory();
    ck_status(fkv_mlx_cache_open(&config, &fused, &cache), FKV_UNSUPPORTED);
    (void)mlx_stream_free(cpu);
    config.memory_limit = 1000;
    const fkv_mlx_config mlx_config = device();
    ck_status(fkv_mlx_cache_open(&config, &mlx_config, &cache), FKV_NO_MEMORY);
    config.memory_limit = 0;
    config.max_tokens = 0;
    ck_status(fkv_mlx_cache_open(&config, &mlx_config, &cache), FKV_BAD_CONFIG);
    ck_status(fkv_mlx_cache_open(NULL, &mlx_config, &cache), FKV_BAD_ARGUMENT);
    ck_assert_ptr_null(cache);
    ck_assert_uint_eq(active_memory(), before);
}
END_TEST

enum { PRODUCT_COLUMNS = 768, PRODUCT_OUTPUTS = 136 };

/* Creates a random array [n_rows, PRODUCT_COLUMNS]. */
static mlx_array random_rows(fkv_mlx_graph *g, int n_rows, mlx_dtype type) {
    static float numbers[PRODUCT_OUTPUTS * PRODUCT_COLUMNS];
    uint64_t random = 11u + (uint64_t)n_rows;
    for (int i = 0; i < n_rows * PRODUCT_COLUMNS; i++) numbers[i] = attn_gaussian(&random);
    const int shape[] = {n_rows, PRODUCT_COLUMNS};
    mlx_array made = fkv_mlx_adopt(g, mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32));
    return fkv_mlx_astype(g, made, type);
}

static const float *floats_of(fkv_mlx_graph *g, mlx_array a) {
    mlx_array wide = fkv_mlx_astype(g, a, MLX_FLOAT32);
    fkv_mlx_eval_one(g, wide);
    ck_assert(!g->failed);
    return mlx_array_data_float32(wide);
}

static fkv_status product_of(fkv_mlx_graph *g, mlx_array x, const fkv_mlx_affine *w, mlx_array *out) {
    *out = mlx_array_new();
    const fkv_status status =
        fkv_mlx_quantized_product(x, w->codes, w->scales, w->biases, (uint32_t)w->group, (uint32_t)w->bits, g->stream, out);
    *out = fkv_mlx_adopt(g, *out);
    return status;
}

static void check_product(mlx_dtype type, int bits, int group) {
    fkv_mlx_graph g = {.stream = device().stream};
    bool has_metal = false;
    ck_assert_int_eq(mlx_metal_is_available(&has_metal), 0);
    const fkv_mlx_affine w = fkv_mlx_quantize(&g, random_rows(&g, PRODUCT_OUTPUTS, type), bits, group);
    mlx_array x = random_rows(&g, 8, type);
    mlx_array all;
    mlx_array one;
    ck_assert(!g.failed);
    const fkv_status status = product_of(&g, x, &w, &all);
    if (!on_gpu() || has_metal) {
        ck_status(status, FKV_UNSUPPORTED);
        fkv_mlx_graph_release(&g, 0);
        return;
    }
    ck_ok(status);
    ck_assert_int_eq(mlx_array_dtype(all), type);
    const float *found = floats_of(&g, all);
    const float *expected = floats_of(&g, fkv_mlx_quantized_matmul(&g, x, &w, true));
    ck_assert_double_le(relative_l2(found, expected, (size_t)8 * PRODUCT_OUTPUTS), type == MLX_BFLOAT16 ? 5e-3 : 1e-3);
    for (int row = 0; row < 8; row++) {
        ck_ok(product_of(&g, fkv_mlx_slice(&g, x, FKV_MLX_SHAPE(row, 0), FKV_MLX_SHAPE(row + 1, PRODUCT_COLUMNS)), &w, &one));
        ck_assert_mem_eq(floats_of(&g, one), found + (size_t)row * PRODUCT_OUTPUTS, PRODUCT_OUTPUTS * sizeof *found);
    }
    ck_status(product_of(&g, random_rows(&g, 9, type), &w, &one), FKV_UNSUPPORTED);
    fkv_mlx_graph_release(&g, 0);
}

/* There is a kernel on CUDA only. Each case compiles a kernel, which takes several seconds. parity_products covers all types,
 * bits and groups. */
START_TEST(products_match_mlx_and_do_not_depend_on_other_rows) {
    check_product(MLX_BFLOAT16, 4, 64);
    check_product(MLX_FLOAT16, 8, 32);
    check_product(MLX_FLOAT32, 4, 128);
}
END_TEST

/* On Linux, the source passed to the GPU compiler only includes a file with the kernel source. On other systems, the whole kernel
 * source is passed. */
START_TEST(kernel_source_is_passed_as_an_include_of_a_file) {
    char one[FKV_MLX_INCLUDE_CHARS];
    char again[FKV_MLX_INCLUDE_CHARS];
    char other[FKV_MLX_INCLUDE_CHARS];
    if (!fkv_mlx_include("int x;\n", 1, one)) {
        ck_assert(!FKV_OS_LINUX);
        return;
    }
    ck_assert(fkv_mlx_include("int x;\n", 1, again) && fkv_mlx_include("int y;\n", 2, other));
    ck_assert_str_eq(one, again);
    ck_assert_str_ne(one, other);
    char path[FKV_MLX_INCLUDE_CHARS];
    char text[16] = {0};
    ck_assert_int_eq(sscanf(other, "#include \"%39[^\"]\"\n", path), 1);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fread(text, 1, sizeof text, file), 7);
    ck_assert_str_eq(text, "int y;\n");
    (void)fclose(file);
}
END_TEST

TEST_MAIN("mlx", chunks_batches_and_windows_match_the_host, fork_copies_the_page_it_writes,
          truncated_and_aborted_tokens_leave_no_rows, output_of_a_sequence_closed_in_its_step_matches_the_host,
          random_operations_leave_the_same_pages_as_on_the_host, file_saved_on_one_device_loads_on_the_other,
          batched_forked_and_reloaded_outputs_are_bit_identical, outputs_with_other_queries_of_the_sequence_are_bit_identical,
          rows_of_other_types_than_the_configured_one_are_accepted, nan_query_gives_nan_and_does_not_affect_other_queries,
          fetched_rows_are_the_written_rows_of_each_sequence, pool_sizes_match_the_plan,
          memory_counters_are_flat_over_hundreds_of_steps, calls_for_the_wrong_device_name_the_right_ones,
          arrays_of_wrong_shape_type_or_state_are_rejected, errors_inside_mlx_return_a_status_with_the_mlx_message,
          plan_that_does_not_fit_and_unavailable_kernels_are_rejected, products_match_mlx_and_do_not_depend_on_other_rows,
          kernel_source_is_passed_as_an_include_of_a_file)
