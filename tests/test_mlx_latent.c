/* Tests latent layers of a cache on MLX: fkv_mlx_fetch() returns the latent channels and the RoPE channels that were written, and
 * page files are identical to those of a host cache. parity_mlx compares the attention of latent layers with the reference. Runs
 * on MLX's CPU backend, or on a GPU if FKV_TEST_MLX_GPU is set. */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/mlx.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 16, MAX_LEN = 64, N_SEQS = 2, MAX_KEY = 128, MAX_ROWS = N_SEQS * MAX_LEN };

/* The RoPE part of the second layer is as wide as its latent part, and the latent part of the third layer is not quantized. */
static const fkv_layer_config LAYERS[] = {
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 16, .scale = 0.1f, .k = {8, 32}},
    {.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 64, .rope_dim = 64, .scale = 0.1f, .k = {4, 32}},
    {.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 32, .rope_dim = 48, .scale = 0.1f, .k = {16, 0}}};
static const double LATENT_ERRORS[] = {0.01, 0.15, 1e-3}; /* quantization errors of the latent channels */
static const double ROPE_ERROR = 1e-3;                    /* RoPE channels are stored with 16 bits */
enum { N_LAYERS = N_OF(LAYERS) };

/* The same sequences in a host cache and in an MLX cache. */
typedef struct latent_caches {
    cache_fixture host;
    fkv_cache *mlx;
    fkv_seq host_seqs[N_SEQS], mlx_seqs[N_SEQS];
    uint32_t tokens[N_SEQS][MAX_LEN];
    uint32_t n[N_SEQS];
} latent_caches;

static fkv_mlx_config device(void) {
    static mlx_stream stream; /* the stream is kept until the program ends */
    if (stream.ctx == NULL)
        stream = getenv("FKV_TEST_MLX_GPU") != NULL ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    return (fkv_mlx_config){.stream = stream, .way = FKV_MLX_AUTO};
}

static void open_caches(latent_caches *c, uint32_t rotate) {
    fkv_config config = fkv_config_default();
    const fkv_mlx_config mlx_config = device();
    config.n_layers = N_LAYERS;
    config.layers = LAYERS;
    config.page_tokens = PAGE;
    config.max_tokens = N_SEQS * MAX_LEN;
    config.max_seqs = N_SEQS;
    config.max_step_tokens = MAX_ROWS;
    config.row_type = FKV_F32;
    config.rotate = rotate;
    config.n_threads = 1;
    *c = (latent_caches){.mlx = NULL};
    ck_ok(cache_fixture_open(&c->host, &config));
    ck_ok(fkv_mlx_cache_open(&config, &mlx_config, &c->mlx));
    for (uint32_t s = 0; s < N_SEQS; s++) {
        cache_tokens(s + 1, c->tokens[s], MAX_LEN);
        c->host_seqs[s] = cache_fixture_seq(&c->host, MAX_LEN);
        ck_ok(fkv_seq_open(c->mlx, &(fkv_seq_config){.max_tokens = MAX_LEN}, &c->mlx_seqs[s], NULL));
    }
}

static void close_caches(latent_caches *c) {
    ck_assert(fkv_cache_consistent(c->mlx));
    fkv_cache_close(c->mlx);
    cache_fixture_close(&c->host);
}

/* Compares channels [from, from + width) of a sequence's rows with fetched rows. */
static void check_channels(const latent_caches *c, uint32_t seq, uint32_t n_tokens, uint32_t layer, uint32_t from, uint32_t width,
                           mlx_array rows, double tolerance) {
    ck_assert_int_eq(mlx_array_eval(rows), 0);
    const int *shape = mlx_array_shape(rows);
    ck_assert(mlx_array_ndim(rows) == 3 && shape[0] == 1 && shape[1] == (int)n_tokens && shape[2] == (int)width);
    const float *fetched = mlx_array_data_float32(rows);
    for (uint32_t t = 0; t < n_tokens; t++) {
        float written[MAX_KEY];
        cache_fixture_row(&c->host, CACHE_K, c->tokens[seq][t], t, layer, 0, written);
        const double error = relative_l2(fetched + (size_t)t * width, written + from, width);
        ck_assert_msg(error <= tolerance, "layer %u, token %u: channels from %u on have a relative error of %g", layer, t, from,
                      error);
    }
}

/* Writes the new rows of one layer to the MLX cache and checks the rows of all sequences. n: number of new tokens */
static void write_and_fetch(const latent_caches *c, fkv_step *step, const uint32_t *n, uint32_t layer) {
    static float rows[MAX_ROWS * MAX_KEY];
    const fkv_layer_config *l = &LAYERS[layer];
    const uint32_t width = l->head_dim + l->rope_dim;
    uint32_t n_rows = 0;
    for (uint32_t s = 0; s < N_SEQS; s++)
        for (uint32_t t = c->n[s]; t < c->n[s] + n[s]; t++, n_rows++)
            cache_fixture_row(&c->host, CACHE_K, c->tokens[s][t], t, layer, 0, rows + (size_t)n_rows * width);
    mlx_array k = mlx_array_new_data(rows, (const int[]){(int)n_rows, 1, (int)width}, 3, MLX_FLOAT32);
    mlx_array rope = mlx_array_new();
    ck_ok(fkv_mlx_write(step, layer, k, (mlx_array){NULL}));
    for (uint32_t s = 0; s < N_SEQS; s++) {
        ck_ok(fkv_mlx_fetch(step, layer, s, &k, &rope));
        check_channels(c, s, c->n[s] + n[s], layer, 0, l->head_dim, k, LATENT_ERRORS[layer]);
        check_channels(c, s, c->n[s] + n[s], layer, l->head_dim, l->rope_dim, rope, ROPE_ERROR);
    }
    (void)mlx_array_free(k);
    (void)mlx_array_free(rope);
}

/* Appends n[s] tokens to sequence s in both caches. */
static void append(latent_caches *c, const uint32_t *n) {
    fkv_row rows[N_SEQS];
    fkv_step *step = NULL;
    for (uint32_t s = 0; s < N_SEQS; s++) rows[s] = (fkv_row){c->mlx_seqs[s], n[s]};
    ck_ok(fkv_step_begin(c->mlx, rows, N_SEQS, &step));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) write_and_fetch(c, step, n, layer);
    ck_ok(fkv_step_commit(step));
    for (uint32_t s = 0; s < N_SEQS; s++) {
        cache_fixture_run(&c->host, c->host_seqs[s], c->tokens[s], c->n[s], c->n[s] + n[s], MAX_LEN, NULL);
        c->n[s] += n[s];
    }
}

static size_t read_file(const char *path, uint8_t *out, size_t size) {
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    const size_t n = fread(out, 1, size, file);
    (void)fclose(file);
    return n;
}

static void check_files(const latent_caches *c, uint32_t seq) {
    static uint8_t host_bytes[65536];
    static uint8_t mlx_bytes[65536];
    char path[512];
    ck_ok(fkv_seq_save(c->host.cache, c->host_seqs[seq], c->tokens[seq], 0, cache_path(path, "latent_host.fkv")));
    const size_t n = read_file(path, host_bytes, sizeof host_bytes);
    ck_ok(fkv_seq_save(c->mlx, c->mlx_seqs[seq], c->tokens[seq], 0, cache_path(path, "latent_mlx.fkv")));
    ck_assert_uint_eq(read_file(path, mlx_bytes, sizeof mlx_bytes), n);
    ck_assert_uint_lt(n, sizeof host_bytes);
    ck_assert_mem_eq(mlx_bytes, host_bytes, n);
}

START_TEST(fetched_rows_are_the_written_rows) {
    static const uint32_t rotations[] = {0, FKV_ROTATE_K, FKV_ROTATE_KV};
    for (size_t i = 0; i < N_OF(rotations); i++) {
        latent_caches c;
        open_caches(&c, rotations[i]);
        append(&c, (const uint32_t[]){20, 5});
        append(&c, (const uint32_t[]){1, 13});
        for (uint32_t s = 0; s < N_SEQS; s++) check_files(&c, s);
        close_caches(&c);
    }
}
END_TEST

TEST_MAIN("mlx_latent", fetched_rows_are_the_written_rows)
