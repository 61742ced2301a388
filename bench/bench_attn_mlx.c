/* bench_attn --device mlx: times attention on the MLX backend and, in the same process, MLX's own attention.
 *
 * Results are verified first. The reference result is computed by MLX: it quantizes and dequantizes the same rows that flatkv
 * writes on the device, and computes attention in float32. A case whose result is outside the tolerance is not timed.
 *
 * Each case is timed in three ways. Chained: one evaluation contains many calls, each of which reads the result of the previous
 * call; the time of the evaluation is divided by the number of calls. No kernel runs before the graph of all calls is built. In
 * parts: the same chain, submitted with mlx_async_eval() after every PART_CALLS calls, so that the device computes while the host
 * builds the next calls. The model runner submits its calls in the same way. Single: each evaluation contains one call, so the
 * time includes the evaluation overhead of MLX. Two other implementations are timed in the same way: MLX's
 * scaled_dot_product_attention in bf16 and, except for latent layers, the quantized method of mlx-lm (quantized_matmul, softmax,
 * quantized_matmul). In a chain over a latent layer, both sides append the RoPE channels of the queries to each output. The
 * read bandwidth of the device is measured before the first and after the last case. Extra memory is MLX's peak memory during
 * single calls minus its active memory before them. Energy is that of the whole GPU while chains are evaluated without pause.
 */
#include "bench_attn_mlx.h"
#include "bench_energy.h"
#include "bench_mlx_roof.h"
#include "bench_util.h"

#include "../src/base/float16.h"
#include "../src/codec/rotation.h"
#include "../src/codec/sealed.h"
#include "../src/mlx/mlx_codec.h"
#include "../tests/channel_bits.h"

#include <flatkv/mlx.h>

#include <math.h>
#include <stdlib.h>

/* Tolerance that allows for a different order of float32 additions and for rounding the result to float16. */
static const double TOLERANCE = 2e-3;

enum { PAGE_TOKENS = 64, FILL_TOKENS = 512, PART_CALLS = 4, MAX_ROUNDS = 200, MAX_LENGTHS = 16, MAX_RESULTS = 256 };
static const double CHAIN_US = 5e4;
static const uint64_t CHAIN_BYTES = UINT64_C(16) << 30;

typedef struct mlx_case {
    const char *name;
    int q_heads;
    int kv_heads;
    int dim;
    int batch;
    int cached;  /* number of tokens per sequence, including the new tokens */
    int queries; /* number of new tokens per sequence */
    fkv_codec_config k;
    fkv_codec_config v;
    fkv_rotate rotate;
    int rope; /* number of RoPE channels of a latent layer, whose values are the first `dim` channels of its keys; otherwise 0 */
} mlx_case;

/* Returns the number of channels of a key and of a query. */
static int row_dim(const mlx_case *c) { return c->dim + c->rope; }

#define SEALED_K(n) {.bits = (n), .kind = FKV_CODEC_SEALED}
#define SEALED_V(n) {.bits = (n), .kind = FKV_CODEC_SEALED_V}
#define CALIBRATED(n) {.bits = (n), .kind = FKV_CODEC_CALIBRATED}
#define TURBO(n) {.bits = (n), .kind = FKV_CODEC_TURBO}

/* The cases of docs/results.md. */
static const mlx_case all_cases[] = {
    {"decode 8/4", 32, 8, 128, 1, 131072, 1, {8, 64}, {4, 64}},
    {"decode 4/4", 32, 8, 128, 1, 131072, 1, {4, 64}, {4, 64}},
    {"decode 16/16", 32, 8, 128, 1, 131072, 1, {16, 0}, {16, 0}},
    {"batch 8/4", 32, 8, 128, 8, 32768, 1, {8, 64}, {4, 64}},
    {"wide heads 8/4", 32, 2, 256, 1, 131072, 1, {8, 64}, {4, 64}},
    {"one wide head 8/4", 8, 1, 512, 1, 131072, 1, {8, 64}, {4, 64}},
    {"prefill 8/4", 32, 8, 128, 1, 131072, 512, {8, 64}, {4, 64}},
    {"decode 2/2", 32, 8, 128, 1, 131072, 1, {2, 64}, {2, 64}},
    {"decode 2/2 rotated", 32, 8, 128, 1, 131072, 1, {2, 64}, {2, 64}, FKV_ROTATE_KV},
    {"decode tq4", 32, 8, 128, 1, 131072, 1, TURBO(4), TURBO(4), FKV_ROTATE_KV},
    {"decode tq3", 32, 8, 128, 1, 131072, 1, TURBO(3), TURBO(3), FKV_ROTATE_KV},
    {"decode tq2", 32, 8, 128, 1, 131072, 1, TURBO(2), TURBO(2), FKV_ROTATE_KV},
    {"decode sealed", 32, 8, 128, 1, 131072, 1, SEALED_K(4), SEALED_V(4)},
    {"wide heads sealed", 32, 2, 256, 1, 131072, 1, SEALED_K(4), SEALED_V(4)},
    {"one wide head sealed", 8, 1, 512, 1, 131072, 1, SEALED_K(4), SEALED_V(4)},
    {"prefill sealed", 32, 8, 128, 1, 131072, 512, SEALED_K(4), SEALED_V(4)},
    {"decode s3", 32, 8, 128, 1, 131072, 1, SEALED_K(3), SEALED_V(3)},
    {"decode s2", 32, 8, 128, 1, 131072, 1, SEALED_K(2), SEALED_V(2)},
    {"prefill s3", 32, 8, 128, 1, 32768, 512, SEALED_K(3), SEALED_V(3)},
    {"prefill s2", 32, 8, 128, 1, 32768, 512, SEALED_K(2), SEALED_V(2)},
    {"decode calibrated", 32, 8, 128, 1, 131072, 1, CALIBRATED(4), SEALED_V(4)},
    {"prefill calibrated", 32, 8, 128, 1, 32768, 512, CALIBRATED(4), SEALED_V(4)},
    {"decode c3/s3", 32, 8, 128, 1, 131072, 1, CALIBRATED(3), SEALED_V(3)},
    {"prefill c3/s3", 32, 8, 128, 1, 32768, 512, CALIBRATED(3), SEALED_V(3)},
    {"prefill of wide heads sealed", 32, 2, 256, 1, 32768, 512, SEALED_K(4), SEALED_V(4)},
    {"prefill of wide heads 8/4", 32, 2, 256, 1, 32768, 512, {8, 64}, {4, 64}},
    {"prefill of wide heads calibrated", 32, 2, 256, 1, 32768, 512, CALIBRATED(4), SEALED_V(4)},
    {"decode latent 8", 16, 1, 512, 1, 131072, 1, {8, 64}, {0}, FKV_ROTATE_NONE, 64},
    {"prefill latent 8", 16, 1, 512, 1, 131072, 512, {8, 64}, {0}, FKV_ROTATE_NONE, 64},
};
enum { N_ALL_CASES = sizeof all_cases / sizeof all_cases[0] };

typedef struct mlx_result {
    mlx_case c;
    const char *who;
    bool right;
    double error; /* NAN for MLX's own implementations, which are not verified */
    double us_chained;
    double us_in_parts; /* chained calls, submitted in parts */
    double us_single;
    double joules;    /* energy per call in a chain, or NAN if it was not measured */
    uint32_t n_chain; /* number of calls in a chain */
    uint64_t bytes;   /* bytes of keys and values that one call reads */
    uint64_t extra_bytes;
} mlx_result;

typedef struct mlx_bench {
    fkv_mlx_graph g;
    fkv_mlx_config device;
    bool is_gpu;
    uint32_t n_rounds; /* single calls */
    uint32_t n_chain;
    const char *only; /* if not NULL, only the cases whose names contain this text are run */
    bool peers;
    bool bf16_only;           /* true: of the two MLX implementations, only bf16 attention is measured */
    int lengths[MAX_LENGTHS]; /* if n_lengths > 0, these numbers of cached tokens replace those of the cases */
    int n_lengths;
    int batches[MAX_LENGTHS]; /* likewise for the numbers of sequences */
    int n_batches;
    uint32_t energy_seconds; /* time for which chains are repeated to measure their energy; 0: not measured */
    bench_energy energy;
    uint32_t divide; /* factor by which the number of cached tokens is divided; above 1 for --quick */
    bool json;
    FILE *text;
    double roof; /* bytes per second */
    mlx_result results[MAX_RESULTS];
    size_t n_results;

    /* data of the current case */
    mlx_case c;
    mlx_array k; /* float16 [B, G, S, D] */
    mlx_array v;
    mlx_array q; /* float16 [B, H, L, D] */
    fkv_cache *cache;
    fkv_seq *seqs;
    fkv_step *step;
    mlx_array peer[2][3]; /* K and V as read by MLX's own attention: codes (or unquantized rows), scales and biases */
    int peer_bits;
} mlx_bench;

static void check(mlx_bench *b, const char *what) {
    if (b->g.failed) kit_die(EXIT_FAILED, "%s: MLX error: %s", what, fkv_mlx_last_error());
}

static void must(fkv_status status) {
    if (status != FKV_OK) kit_die(EXIT_FAILED, "%s: %s", fkv_status_name(status), fkv_message());
}

static void let_go(mlx_array *a) {
    (void)mlx_array_free(*a);
    *a = (mlx_array){NULL};
}

/* Evaluates `a`, stores it in *kept, and releases all other arrays of the graph. */
static void settle(mlx_bench *b, mlx_array *kept, mlx_array a) {
    fkv_mlx_eval_one(&b->g, a);
    fkv_mlx_keep(&b->g, kept, a);
    fkv_mlx_graph_release(&b->g, 0);
    check(b, b->c.name);
}

static mlx_array random_rows(mlx_bench *b, int heads, int tokens) {
    const int shape[] = {b->c.batch, heads, tokens, row_dim(&b->c)};
    mlx_array out = {NULL};
    if (mlx_random_normal(&out, shape, 4, MLX_FLOAT16, 0.0f, 1.0f, (mlx_array){NULL}, b->g.stream) != 0) b->g.failed = true;
    return fkv_mlx_adopt(&b->g, out);
}

static size_t memory(int (*which)(size_t *)) {
    size_t bytes = 0;
    if (which(&bytes) != 0) kit_die(EXIT_FAILED, "cannot read MLX memory use: %s", fkv_mlx_last_error());
    return bytes;
}

static double measure_roof(mlx_bench *b) {
    const double roof = bench_mlx_roof(&b->g, b->is_gpu, b->divide > 1);
    check(b, "the read roof");
    return roof;
}

/* ---- flatkv cache ---- */

/* Returns channels [from, end) of an array with three or four axes. */
static mlx_array channels(mlx_bench *b, mlx_array a, int from, int end) {
    const int *shape = mlx_array_shape(a);
    if (mlx_array_ndim(a) == 3) return fkv_mlx_slice(&b->g, a, FKV_MLX_SHAPE(0, 0, from), FKV_MLX_SHAPE(shape[0], shape[1], end));
    return fkv_mlx_slice(&b->g, a, FKV_MLX_SHAPE(0, 0, 0, from), FKV_MLX_SHAPE(shape[0], shape[1], shape[2], end));
}

static mlx_array join_channels(mlx_bench *b, mlx_array x, mlx_array y) {
    mlx_array out = {NULL};
    mlx_vector_array both = mlx_vector_array_new_data((mlx_array[]){x, y}, 2);
    if (!b->g.failed && mlx_concatenate_axis(&out, both, -1, b->g.stream) != 0) b->g.failed = true;
    (void)mlx_vector_array_free(both);
    return fkv_mlx_adopt(&b->g, out);
}

/* Returns the input of the next call in a chain: the output of a call and, in a latent layer, the RoPE channels of its queries.
 */
static mlx_array next_queries(mlx_bench *b, mlx_array out, mlx_array q) {
    return b->c.rope == 0 ? out : join_channels(b, out, channels(b, q, b->c.dim, row_dim(&b->c)));
}

/* Returns tokens [from, from + n) of sequence s: [B, heads, S, D] -> [n, heads, D]. */
static mlx_array tokens_of(mlx_bench *b, mlx_array rows, int heads, int s, int from, int n) {
    fkv_mlx_graph *g = &b->g;
    const int dim = mlx_array_shape(rows)[3];
    mlx_array x = fkv_mlx_slice(g, rows, FKV_MLX_SHAPE(s, 0, from, 0), FKV_MLX_SHAPE(s + 1, heads, from + n, dim));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n, dim));
    return fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 0, 2));
}

/* Returns tokens [from, from + n) of all sequences, concatenated: [B * n, heads, D]. */
static mlx_array step_rows(mlx_bench *b, mlx_array rows, int heads, int from, int n) {
    fkv_mlx_graph *g = &b->g;
    const int dim = mlx_array_shape(rows)[3];
    mlx_array x = fkv_mlx_slice(g, rows, FKV_MLX_SHAPE(0, 0, from, 0), FKV_MLX_SHAPE(b->c.batch, heads, from + n, dim));
    x = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(0, 2, 1, 3));
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(b->c.batch * n, heads, dim));
}

/* Writes keys and values. A latent layer has no separate values. */
static void write_tokens(mlx_bench *b, fkv_step *step, mlx_array k, mlx_array v) {
    check(b, "rows of a step");
    must(fkv_mlx_write(step, 0, k, b->c.rope == 0 ? v : (mlx_array){NULL}));
    mlx_vector_array pending = mlx_vector_array_new();
    must(fkv_mlx_step_pending(step, pending));
    if (mlx_eval(pending) != 0) b->g.failed = true;
    (void)mlx_vector_array_free(pending);
    fkv_mlx_graph_release(&b->g, 0);
    check(b, "writing the history");
}

/* Draws the bits of each key channel of a layer with calibrated keys. If the average is 4, a quarter of the channels have 6 bits
 * and another quarter have 2. If it is 3, an eighth have 6 bits and a quarter have 4. */
static void set_channel_bits(const mlx_case *c, uint8_t *bits) {
    uint64_t state = 1;
    const uint32_t more = (uint32_t)c->dim * (c->k.bits - 2) / 2;
    for (int g = 0; g < c->kv_heads; g++)
        channel_bits_with(&state, (uint32_t)c->dim, more, more / 4, bits + (size_t)g * (size_t)c->dim);
}

/* Opens a cache whose sequences hold all tokens except the new ones. Then begins a step and writes the new tokens. */
static void open_cache(mlx_bench *b) {
    const mlx_case *c = &b->c;
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer.n_q_heads = (uint32_t)c->q_heads;
    config.layer.n_kv_heads = (uint32_t)c->kv_heads;
    config.layer.head_dim = (uint32_t)c->dim;
    config.layer.rope_dim = (uint32_t)c->rope;
    config.layer.scale = c->rope == 0 ? 0.0f : 1.0f / sqrtf((float)row_dim(c)); /* latent layers have no default scale */
    config.layer.k = c->k;
    config.layer.v = c->v;
    uint8_t *bits = bench_take((size_t)c->kv_heads * (size_t)c->dim);
    if (c->k.kind == FKV_CODEC_CALIBRATED) {
        set_channel_bits(c, bits);
        config.layer.channel_bits = bits;
    }
    config.rotate = c->rotate;
    config.page_tokens = PAGE_TOKENS;
    config.max_seqs = (uint32_t)c->batch;
    config.max_tokens = (uint32_t)(c->batch * c->cached);
    config.max_step_tokens = (uint32_t)(c->batch * c->queries > FILL_TOKENS ? c->batch * c->queries : FILL_TOKENS);
    must(fkv_mlx_cache_open(&config, &b->device, &b->cache));
    free(bits);
    fkv_row *rows = bench_take((size_t)c->batch * sizeof *rows);
    b->seqs = bench_take((size_t)c->batch * sizeof *b->seqs);
    const int history = c->cached - c->queries;
    for (int s = 0; s < c->batch; s++) {
        const fkv_seq_config life = {.max_tokens = (uint32_t)c->cached};
        must(fkv_seq_open(b->cache, &life, &b->seqs[s], NULL));
        for (int at = 0; at < history; at += FILL_TOKENS) {
            const int n = history - at < FILL_TOKENS ? history - at : FILL_TOKENS;
            const fkv_row chunk = {b->seqs[s], (uint32_t)n};
            fkv_step *step = NULL;
            must(fkv_step_begin(b->cache, &chunk, 1, &step));
            write_tokens(b, step, tokens_of(b, b->k, c->kv_heads, s, at, n), tokens_of(b, b->v, c->kv_heads, s, at, n));
            must(fkv_step_commit(step));
        }
        rows[s] = (fkv_row){b->seqs[s], (uint32_t)c->queries};
    }
    must(fkv_step_begin(b->cache, rows, (uint32_t)c->batch, &b->step));
    write_tokens(b, b->step, step_rows(b, b->k, c->kv_heads, history, c->queries),
                 step_rows(b, b->v, c->kv_heads, history, c->queries));
    free(rows);
}

static void close_cache(mlx_bench *b) {
    fkv_cache_close(b->cache);
    free(b->seqs);
    b->cache = NULL;
}

/* Computes attention with flatkv. q: [T, H, row_dim()] */
static mlx_array attend_ours(mlx_bench *b, mlx_array q) {
    mlx_array out = mlx_array_new();
    must(fkv_mlx_attend(b->step, 0, q, &out));
    return next_queries(b, fkv_mlx_adopt(&b->g, out), q);
}

/* ---- MLX's own attention ---- */

static mlx_array sdpa(mlx_bench *b, mlx_array q, mlx_array k, mlx_array v) {
    mlx_array out = {NULL};
    if (b->g.failed) return out;
    const float scale = 1.0f / sqrtf((float)row_dim(&b->c));
    const char *mask = b->c.queries > 1 ? "causal" : "";
    int code = mlx_fast_scaled_dot_product_attention(&out, q, k, v, scale, mask, (mlx_array){NULL}, (mlx_array){NULL}, false,
                                                     b->g.stream);
    if (code != 0) b->g.failed = true;
    return fkv_mlx_adopt(&b->g, out);
}

static mlx_array attend_bf16(mlx_bench *b, mlx_array q) { return next_queries(b, sdpa(b, q, b->peer[0][0], b->peer[1][0]), q); }

/* Computes attention like quantized_scaled_dot_product_attention() of mlx-lm. q: [B, H, L, D] */
static mlx_array attend_quantized(mlx_bench *b, mlx_array q) {
    fkv_mlx_graph *g = &b->g;
    const mlx_case *c = &b->c;
    const int per_kv = c->q_heads / c->kv_heads;
    fkv_mlx_affine side[2];
    for (int s = 0; s < 2; s++) side[s] = (fkv_mlx_affine){b->peer[s][0], b->peer[s][1], b->peer[s][2], b->peer_bits, 64};
    mlx_array scale = fkv_mlx_adopt(g, mlx_array_new_float32(1.0f / sqrtf((float)c->dim)));
    mlx_array x = fkv_mlx_multiply(g, q, fkv_mlx_astype(g, scale, MLX_BFLOAT16));
    const int batch_heads = c->batch * c->kv_heads;
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(batch_heads, per_kv, c->queries, c->dim));
    mlx_array scores = fkv_mlx_quantized_matmul(g, x, &side[0], true);
    if (c->queries > 1) {
        mlx_array positions = fkv_mlx_arange(g, (uint32_t)(c->cached - c->queries), (uint32_t)c->cached);
        mlx_array seen = fkv_mlx_less_equal(g, fkv_mlx_arange(g, 0, (uint32_t)c->cached),
                                            fkv_mlx_reshape(g, positions, FKV_MLX_SHAPE(c->queries, 1)));
        mlx_array hidden = fkv_mlx_astype(g, fkv_mlx_adopt(g, mlx_array_new_float32(-3.3e38f)), MLX_BFLOAT16);
        scores = fkv_mlx_where(g, seen, scores, hidden);
    }
    mlx_array p = {NULL};
    if (!g->failed && mlx_softmax_axis(&p, scores, -1, true, g->stream) != 0) g->failed = true;
    p = fkv_mlx_adopt(g, p);
    return fkv_mlx_reshape(g, fkv_mlx_quantized_matmul(g, p, &side[1], false),
                           FKV_MLX_SHAPE(c->batch, c->q_heads, c->queries, c->dim));
}

static void open_peer(mlx_bench *b, int bits) {
    fkv_mlx_graph *g = &b->g;
    const mlx_case *c = &b->c;
    b->peer_bits = bits;
    for (int s = 0; s < 2; s++) {
        mlx_array rows = fkv_mlx_astype(g, s == 0 ? b->k : b->v, MLX_BFLOAT16);
        if (bits == 16) {
            settle(b, &b->peer[s][0], rows);
            continue;
        }
        rows = fkv_mlx_reshape(g, rows, FKV_MLX_SHAPE(c->batch * c->kv_heads, 1, c->cached, c->dim));
        fkv_mlx_affine made = fkv_mlx_quantize(g, rows, bits, 64);
        fkv_mlx_keep(g, &b->peer[s][1], made.scales);
        fkv_mlx_keep(g, &b->peer[s][2], made.biases);
        settle(b, &b->peer[s][0], made.codes);
        if (mlx_array_eval(b->peer[s][1]) != 0 || mlx_array_eval(b->peer[s][2]) != 0) b->g.failed = true;
        check(b, "a peer's cache");
    }
}

static void close_peer(mlx_bench *b) {
    for (int s = 0; s < 2; s++)
        for (int p = 0; p < 3; p++) let_go(&b->peer[s][p]);
    (void)mlx_clear_cache();
}

/* ---- reference ---- */

static bool is_sealed(fkv_codec_config codec) {
    return codec.kind == FKV_CODEC_SEALED || codec.kind == FKV_CODEC_SEALED_V || codec.kind == FKV_CODEC_CALIBRATED;
}

/* Slices tokens [from, end) and moves the token axis to the front: [B, G, L, D] -> [end - from, B, G, D]. */
static mlx_array tokens_first(mlx_bench *b, mlx_array a, int from, int end) {
    const mlx_case *c = &b->c;
    mlx_array some = fkv_mlx_slice(&b->g, a, FKV_MLX_SHAPE(0, 0, from, 0), FKV_MLX_SHAPE(c->batch, c->kv_heads, end, c->dim));
    return fkv_mlx_transpose(&b->g, some, FKV_MLX_SHAPE(2, 0, 1, 3));
}

/* Seals one page of calibrated keys and decodes it again. x: [PAGE_TOKENS, D] */
static void seal_calibrated(const fkv_codec *codec, float *x) {
    float bias[FKV_MAX_HEAD_DIM];
    float inverse[FKV_MAX_HEAD_DIM];
    uint8_t scales[2 * FKV_MAX_HEAD_DIM];
    uint8_t biases[2 * FKV_MAX_HEAD_DIM];
    for (uint32_t c = 0; c < codec->dim; c++) {
        bias[c] = inverse[c] = x[c]; /* minimum and maximum of the channel */
        for (uint32_t t = 1; t < PAGE_TOKENS; t++) {
            bias[c] = fminf(bias[c], x[t * codec->dim + c]);
            inverse[c] = fmaxf(inverse[c], x[t * codec->dim + c]);
        }
    }
    fkv_sealed_key_lines(codec, bias, inverse, scales, biases);
    for (uint32_t p = 0; p < codec->dim; p++) {
        const uint32_t c = fkv_sealed_channel(codec, p);
        const float scale = fkv_half_to_f32(codec->type, fkv_load_half(scales, p));
        for (float *at = x + c; at < x + PAGE_TOKENS * codec->dim; at += codec->dim)
            *at = bias[c] + scale * fminf(rintf((*at - bias[c]) * inverse[c]), fkv_sealed_bins(codec, p));
    }
}

/* Seals full pages of calibrated keys and decodes them again, on the host. x: [N, PAGE_TOKENS, D] */
static mlx_array calibrated_pages(mlx_bench *b, mlx_array x, int n, fkv_codec_config config) {
    const mlx_case *c = &b->c;
    fkv_codec codec;
    must(fkv_codec_make(config, (uint32_t)c->dim, FKV_F16, &codec));
    fkv_mlx_eval_one(&b->g, x);
    check(b, "evaluating the pages of calibrated keys");
    const size_t page = (size_t)PAGE_TOKENS * (size_t)c->dim;
    float *rows = bench_take((size_t)n * page * sizeof *rows);
    memcpy(rows, mlx_array_data_float32(x), (size_t)n * page * sizeof *rows);
    uint8_t *bits = bench_take((size_t)c->kv_heads * (size_t)c->dim);
    set_channel_bits(c, bits);
    const int pages = n / (c->batch * c->kv_heads);
    for (int i = 0; i < n; i++) {
        uint16_t channel[FKV_MAX_HEAD_DIM];
        fkv_channel_order order;
        fkv_channel_order_make(bits + (size_t)(i / pages % c->kv_heads) * (size_t)c->dim, (uint32_t)c->dim, channel, &order);
        codec.channels = &order;
        seal_calibrated(&codec, rows + (size_t)i * page);
    }
    mlx_array out = fkv_mlx_adopt(&b->g, mlx_array_new_data(rows, mlx_array_shape(x), 3, MLX_FLOAT32));
    free(bits);
    free(rows);
    return out;
}

/* Seals full pages of rows and decodes them again. x: [N, PAGE_TOKENS, D] */
static mlx_array sealed_pages(mlx_bench *b, mlx_array x, int n, fkv_codec_config config) {
    if (config.kind == FKV_CODEC_CALIBRATED) return calibrated_pages(b, x, n, config);
    static fkv_mlx_state state; /* holds a graph that is separate from b->g; each call releases the arrays of the previous call */
    fkv_codec codec;
    must(fkv_codec_make(config, (uint32_t)b->c.dim, FKV_F16, &codec));
    fkv_mlx_graph_release(&state.graph, 0);
    state.graph.stream = b->g.stream;
    state.constants.limit = fkv_mlx_number(&state.graph, fkv_codec_limit(FKV_F16));
    mlx_array part[FKV_N_PARTS] = {{NULL}};
    fkv_mlx_codec_of(&codec)->seal(&state, &codec, NULL, x, part);
    for (int p = 0; p < FKV_N_PARTS; p++) {
        const int numbers = (int)(fkv_codec_part_bytes(&codec, (fkv_part)p, PAGE_TOKENS) / 2);
        if (numbers > 0) part[p] = fkv_mlx_reshape(&state.graph, part[p], FKV_MLX_SHAPE(n, 1, numbers));
    }
    mlx_array rows = fkv_mlx_codec_of(&codec)->rows(&state.graph, &codec, NULL, part, PAGE_TOKENS);
    if (state.graph.failed) b->g.failed = true;
    return rows;
}

/* Returns the rows that the last query of each sequence reads: the first page and the pages of the query's span in open form, and
 * all other pages in sealed form. `open` holds the 8-bit rows [B, G, L, D], where L is a multiple of the page size. */
static mlx_array as_sealed(mlx_bench *b, mlx_array open, fkv_codec_config config) {
    fkv_mlx_graph *g = &b->g;
    const mlx_case *c = &b->c;
    const int last = c->cached / PAGE_TOKENS - 1;
    const int own = (last - last % FKV_OPEN_SPAN) * PAGE_TOKENS;
    const int middle = own - PAGE_TOKENS;
    if (middle <= 0) return open;
    mlx_array x = fkv_mlx_slice(g, open, FKV_MLX_SHAPE(0, 0, PAGE_TOKENS, 0), FKV_MLX_SHAPE(c->batch, c->kv_heads, own, c->dim));
    const int n = c->batch * c->kv_heads * middle / PAGE_TOKENS;
    x = sealed_pages(b, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, PAGE_TOKENS, c->dim)), n, config);
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(c->batch, c->kv_heads, middle, c->dim));
    x = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(2, 0, 1, 3));
    x = fkv_mlx_concatenate_first(g, tokens_first(b, open, 0, PAGE_TOKENS), x);
    x = fkv_mlx_concatenate_first(g, x, tokens_first(b, open, own, c->cached));
    return fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 2, 0, 3));
}

/* Quantizes the rows with MLX, rounds scales and biases to float16 as pages do, and returns the dequantized rows in float32.
 * Runs on MLX's CPU backend, whose codes are identical to flatkv's; codes of MLX's CUDA backend occasionally differ by one. */
static mlx_array as_stored(mlx_bench *b, mlx_array rows, fkv_codec_config codec) {
    fkv_mlx_graph *g = &b->g;
    mlx_array x = fkv_mlx_astype(g, rows, MLX_FLOAT32);
    if (codec.bits == 16) return x;
    mlx_stream own = g->stream;
    g->stream = mlx_default_cpu_stream_new();
    fkv_mlx_affine made = fkv_mlx_quantize(g, x, (int)codec.bits, (int)codec.group);
    mlx_array scales = fkv_mlx_astype(g, fkv_mlx_astype(g, made.scales, MLX_FLOAT16), MLX_FLOAT32);
    mlx_array biases = fkv_mlx_astype(g, fkv_mlx_astype(g, made.biases, MLX_FLOAT16), MLX_FLOAT32);
    mlx_array out = {NULL};
    int code = g->failed ? 1
                         : mlx_dequantize(&out, made.codes, scales, biases, (mlx_optional_int){made.group, true},
                                          (mlx_optional_int){made.bits, true}, "affine", (mlx_array){NULL},
                                          (mlx_optional_dtype){.has_value = false}, g->stream);
    if (code != 0) g->failed = true;
    (void)mlx_stream_free(g->stream);
    g->stream = own;
    return fkv_mlx_adopt(g, out);
}

/* Returns the values that pages store for these rows, for codecs with rotation. The rows are rotated, encoded, decoded and
 * rotated back on the host. */
static mlx_array as_rotated(mlx_bench *b, mlx_array rows, fkv_codec_config config, fkv_side side) {
    fkv_mlx_graph *g = &b->g;
    const mlx_case *c = &b->c;
    fkv_codec codec;
    fkv_rotation rotation;
    must(fkv_codec_make(config, (uint32_t)c->dim, FKV_F16, &codec));
    fkv_codec_rotated(&codec);
    fkv_rotation_make(fkv_config_default().rotation_seed, side, (uint32_t)c->dim, &rotation);
    mlx_array given = {NULL};
    settle(b, &given, fkv_mlx_astype(g, rows, MLX_FLOAT32));
    const size_t n = mlx_array_size(given);
    float *x = bench_take(n * sizeof *x);
    memcpy(x, mlx_array_data_float32(given), n * sizeof *x);
    for (size_t at = 0; at < n; at += (size_t)c->dim) {
        uint8_t part[FKV_N_PARTS][2 * FKV_MAX_HEAD_DIM];
        fkv_rotation_apply(&rotation, x + at);
        fkv_codec_encode(&codec, x + at, (uint8_t *[]){part[0], part[1], part[2]});
        fkv_codec_decode(&codec, (const uint8_t *[]){part[0], part[1], part[2]}, x + at);
        fkv_rotation_undo(&rotation, x + at);
    }
    mlx_array out = fkv_mlx_adopt(g, mlx_array_new_data(x, mlx_array_shape(given), 4, MLX_FLOAT32));
    let_go(&given);
    free(x);
    return out;
}

/* Returns the K or V rows that the last query of each sequence reads, for any codec kind. */
static mlx_array as_met(mlx_bench *b, mlx_array rows, fkv_codec_config codec, fkv_side side) {
    const fkv_codec_config open = {.bits = 8, .group = 64};
    if (is_sealed(codec)) return as_sealed(b, as_stored(b, rows, open), codec);
    return b->c.rotate != FKV_ROTATE_NONE ? as_rotated(b, rows, codec, side) : as_stored(b, rows, codec);
}

/* Returns the relative L2 error of flatkv's output `ours`: [B * L, H, D], over the last query of every sequence. */
static double error_of(mlx_bench *b, mlx_array ours) {
    fkv_mlx_graph *g = &b->g;
    const mlx_case *c = &b->c;
    mlx_array k = {NULL};
    mlx_array v = {NULL};
    mlx_array mine = {NULL};
    mlx_array reference = {NULL};
    settle(b, &mine, fkv_mlx_astype(g, channels(b, ours, 0, c->dim), MLX_FLOAT32));
    settle(b, &v, as_met(b, b->v, c->rope == 0 ? c->v : c->k, FKV_SIDE_V));
    if (c->rope == 0)
        settle(b, &k, as_met(b, b->k, c->k, FKV_SIDE_K));
    else
        settle(b, &k, join_channels(b, v, fkv_mlx_astype(g, channels(b, b->k, c->dim, row_dim(c)), MLX_FLOAT32)));
    mlx_array q = fkv_mlx_slice(g, b->q, FKV_MLX_SHAPE(0, 0, c->queries - 1, 0),
                                FKV_MLX_SHAPE(c->batch, c->q_heads, c->queries, row_dim(c)));
    mlx_array out = {NULL};
    if (!g->failed &&
        mlx_fast_scaled_dot_product_attention(&out, fkv_mlx_astype(g, q, MLX_FLOAT32), k, v, 1.0f / sqrtf((float)row_dim(c)), "",
                                              (mlx_array){NULL}, (mlx_array){NULL}, false, g->stream) != 0)
        g->failed = true;
    settle(b, &reference, fkv_mlx_reshape(g, fkv_mlx_adopt(g, out), FKV_MLX_SHAPE(c->batch, c->q_heads * c->dim)));
    const float *truth = mlx_array_data_float32(reference);
    const float *got = mlx_array_data_float32(mine);
    double worst = 0;
    const size_t n = (size_t)c->q_heads * (size_t)c->dim;
    for (int s = 0; s < c->batch; s++) {
        const float *x = got + ((size_t)s * (size_t)c->queries + (size_t)c->queries - 1) * n;
        double off = 0;
        double all = 0;
        for (size_t i = 0; i < n; i++) {
            const double d = (double)x[i] - (double)truth[(size_t)s * n + i];
            off += d * d;
            all += (double)truth[(size_t)s * n + i] * (double)truth[(size_t)s * n + i];
        }
        const double error = sqrt(off / all);
        if (!(error <= worst)) worst = error;
    }
    let_go(&k);
    let_go(&v);
    let_go(&mine);
    let_go(&reference);
    (void)mlx_clear_cache();
    return worst;
}

/* ---- timing ---- */

typedef mlx_array (*attend_fn)(mlx_bench *b, mlx_array q);

/* Returns the number of calls in a chain: the requested number, or fewer if the chain would exceed the time limit CHAIN_US or the
 * memory limit CHAIN_BYTES. In a chain that takes CHAIN_US, the overhead of the evaluation is already negligible. The memory
 * limit is needed because MLX allocates all memory of an evaluation in advance, and the quantized attention of mlx-lm needs
 * gigabytes for a prefill chunk. */
static uint32_t chain_of(const mlx_bench *b, const mlx_result *r) {
    double n = fmin(b->n_chain, CHAIN_US / r->us_single);
    if (r->extra_bytes > 0) n = fmin(n, (double)CHAIN_BYTES / (double)r->extra_bytes);
    return n < 1 ? 1 : (uint32_t)n;
}

/* Starts the evaluation of x. The device then computes while the host builds the next calls. */
static void submit(mlx_bench *b, mlx_array x) {
    mlx_vector_array wanted = mlx_vector_array_new_value(x);
    if (mlx_async_eval(wanted) != 0) b->g.failed = true;
    (void)mlx_vector_array_free(wanted);
}

/* Evaluates a chain of r->n_chain calls and returns its time in seconds. If in_parts is true, each group of PART_CALLS calls is
 * submitted before the next group is built. */
static double run_chain(mlx_bench *b, attend_fn attend, mlx_array q, const mlx_result *r, bool in_parts) {
    const double start = kit_seconds();
    mlx_array x = q;
    for (uint32_t n = 0; n < r->n_chain; n++) {
        x = attend(b, x);
        if (in_parts && (n + 1) % PART_CALLS == 0) submit(b, x);
    }
    fkv_mlx_eval_one(&b->g, x);
    const double seconds = kit_seconds() - start;
    fkv_mlx_graph_release(&b->g, 0);
    check(b, r->who);
    return seconds;
}

/* Returns the energy per call in a chain, or NAN if it is not to be measured. */
static double joules_per_call(mlx_bench *b, attend_fn attend, mlx_array q, const mlx_result *r) {
    if (b->energy_seconds == 0) return NAN;
    uint64_t n_calls = 0;
    const double before = bench_energy_joules(&b->energy);
    for (const double start = kit_seconds(); kit_seconds() - start < b->energy_seconds; n_calls += r->n_chain)
        (void)run_chain(b, attend, q, r, false);
    return (bench_energy_joules(&b->energy) - before) / (double)n_calls;
}

/* Returns the median time per call of several chains, in microseconds. The first chain is a warm-up and is not counted. */
static double chained_us(mlx_bench *b, attend_fn attend, mlx_array q, const mlx_result *r, bool in_parts) {
    enum { N_CHAINS = 5 };
    double times[N_CHAINS];
    (void)run_chain(b, attend, q, r, in_parts);
    for (int i = 0; i < N_CHAINS; i++) times[i] = run_chain(b, attend, q, r, in_parts) / r->n_chain;
    return kit_spread_of(times, N_CHAINS).p50 * 1e6;
}

/* Measures the time per call of one attention function (chained, in parts and alone), its extra memory and its energy. q is the
 * evaluated input of the function. */
static void measure(mlx_bench *b, attend_fn attend, mlx_array q, mlx_result *r) {
    fkv_mlx_graph *g = &b->g;
    double times[MAX_ROUNDS];
    size_t before = 0;
    for (uint32_t i = 0; i < b->n_rounds + 1; i++) { /* the first call is a warm-up */
        if (i == 1) {
            (void)mlx_clear_cache();
            (void)mlx_reset_peak_memory();
            before = memory(mlx_get_active_memory);
        }
        const double start = kit_seconds();
        fkv_mlx_eval_one(g, attend(b, q));
        if (i > 0) times[i - 1] = kit_seconds() - start;
        fkv_mlx_graph_release(g, 0);
        check(b, r->who);
    }
    r->us_single = kit_spread_of(times, b->n_rounds).p50 * 1e6;
    const size_t peak = memory(mlx_get_peak_memory);
    r->extra_bytes = peak > before ? peak - before : 0;
    r->n_chain = chain_of(b, r);
    r->us_chained = chained_us(b, attend, q, r, false);
    r->us_in_parts = chained_us(b, attend, q, r, true);
    r->joules = joules_per_call(b, attend, q, r);
    (void)mlx_clear_cache();
}

static uint64_t side_numbers(const mlx_case *c) {
    return (uint64_t)c->batch * (uint64_t)c->kv_heads * (uint64_t)c->cached * (uint64_t)c->dim;
}

static uint64_t side_bytes(const mlx_case *c, uint32_t bits, uint32_t group) {
    const uint64_t numbers = side_numbers(c);
    return numbers * bits / 8 + (bits == 16 ? 0 : numbers / group * 4);
}

/* Returns the size, in bytes, of K or V in a case when stored with a flatkv codec. Sealed and calibrated K have a scale and a
 * bias per channel and page. Sealed V and TurboQuant have one 16-bit value per row. */
static uint64_t codec_bytes(const mlx_case *c, fkv_codec_config codec) {
    if (!is_sealed(codec) && codec.kind != FKV_CODEC_TURBO) return side_bytes(c, codec.bits, codec.group);
    const uint64_t numbers = side_numbers(c);
    const bool per_channel = codec.kind == FKV_CODEC_SEALED || codec.kind == FKV_CODEC_CALIBRATED;
    return numbers * codec.bits / 8 + (per_channel ? numbers / PAGE_TOKENS * 4 : numbers / (uint64_t)c->dim * 2);
}

/* Returns the size, in bytes, of the RoPE channels of a latent layer, which have 16 bits. */
static uint64_t rope_bytes(const mlx_case *c) { return side_numbers(c) / (uint64_t)c->dim * (uint64_t)c->rope * 2; }

static void add_result(mlx_bench *b, const mlx_result *r) {
    if (b->n_results == MAX_RESULTS) kit_die(EXIT_FAILED, "more than %d results", MAX_RESULTS);
    b->results[b->n_results++] = *r;
    char extra[BENCH_TEXT];
    (void)fprintf(b->text, "%-18s %6d %-14s", r->c.name, r->c.cached, r->who);
    if (!r->right) {
        (void)fprintf(b->text, "  WRONG: relative L2 error %.1e\n", r->error);
        return;
    }
    (void)fprintf(b->text, " %10.1f us chained %10.1f us in parts %10.1f us single %6.1f %% of the roof, +%s", r->us_chained,
                  r->us_in_parts, r->us_single, 100 * (double)r->bytes / r->us_chained * 1e6 / b->roof,
                  bench_bytes((double)r->extra_bytes, extra));
    if (!isnan(r->joules)) (void)fprintf(b->text, ", %.3g mJ", r->joules * 1e3);
    if (!isnan(r->error)) (void)fprintf(b->text, ", error %.1e", r->error);
    (void)fputc('\n', b->text);
    (void)fflush(b->text);
}

static void run_peers(mlx_bench *b) {
    static const struct {
        const char *who;
        int bits;
    } peers[] = {{"MLX bf16", 16}, {"MLX q8", 8}, {"MLX q4", 4}};
    for (size_t i = 0; i < (b->bf16_only || b->c.rope != 0 ? 1 : sizeof peers / sizeof peers[0]); i++) {
        mlx_array q = {NULL};
        open_peer(b, peers[i].bits);
        settle(b, &q, fkv_mlx_astype(&b->g, b->q, MLX_BFLOAT16));
        mlx_result r = {.c = b->c, .who = peers[i].who, .right = true, .error = NAN};
        r.bytes = side_bytes(&b->c, (uint32_t)peers[i].bits, 64);
        r.bytes += b->c.rope == 0 ? r.bytes : rope_bytes(&b->c);
        measure(b, peers[i].bits == 16 ? attend_bf16 : attend_quantized, q, &r);
        add_result(b, &r);
        let_go(&q);
        close_peer(b);
    }
}

static bool same_rows(const mlx_case *a, const mlx_case *c) {
    return a->q_heads == c->q_heads && a->kv_heads == c->kv_heads && a->dim == c->dim && a->batch == c->batch &&
           a->cached == c->cached && a->queries == c->queries && a->rope == c->rope;
}

static void run_case(mlx_bench *b, const mlx_case *given, bool with_peers) {
    b->c = *given;
    const mlx_case *c = &b->c;
    settle(b, &b->k, random_rows(b, c->kv_heads, c->cached));
    settle(b, &b->v, c->rope == 0 ? random_rows(b, c->kv_heads, c->cached) : channels(b, b->k, 0, c->dim));
    settle(b, &b->q, random_rows(b, c->q_heads, c->queries));
    open_cache(b);
    mlx_array q = {NULL};
    mlx_array out = {NULL};
    settle(b, &q, step_rows(b, b->q, c->q_heads, 0, c->queries));
    settle(b, &out, attend_ours(b, q));
    mlx_result r = {.c = *c, .who = fkv_mlx_cache_way(b->cache) == FKV_MLX_FUSED ? "flatkv fused" : "flatkv plain"};
    r.bytes = codec_bytes(c, c->k) + (c->rope == 0 ? codec_bytes(c, c->v) : rope_bytes(c));
    r.error = error_of(b, out);
    r.right = r.error <= TOLERANCE;
    if (r.right) measure(b, attend_ours, q, &r);
    add_result(b, &r);
    let_go(&q);
    let_go(&out);
    close_cache(b);
    (void)mlx_clear_cache();
    if (with_peers) run_peers(b);
    let_go(&b->k);
    let_go(&b->v);
    let_go(&b->q);
    (void)mlx_clear_cache();
}

/* Runs a case. If numbers of cached tokens or of sequences were given on the command line, uses the given ones. */
static void run_size(mlx_bench *b, const mlx_case *given, int length, int batch, bool with_peers) {
    mlx_case c = *given;
    if (b->n_lengths > 0) c.cached = b->lengths[length];
    if (b->n_batches > 0) c.batch = b->batches[batch];
    if (b->divide > 1) {
        const int shorter = c.cached / (int)b->divide;
        c.cached = shorter > PAGE_TOKENS ? shorter : PAGE_TOKENS;
        c.queries = c.queries > 16 ? 16 : c.queries;
    }
    if (c.queries > c.cached) c.queries = c.cached;
    run_case(b, &c, with_peers);
}

/* ---- program ---- */

static int write_json(const mlx_bench *b, const char *device_name) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "flatkv", fkv_version());
    kit_json_text(json, "device", device_name);
    kit_json_integer(json, "single_calls", b->n_rounds);
    kit_json_real(json, "read_roof_gb_s", b->roof * 1e-9);
    kit_json_array(json, "results");
    for (size_t i = 0; i < b->n_results; i++) {
        const mlx_result *r = &b->results[i];
        const bool ours = !isnan(r->error);
        kit_json_object(json, NULL);
        kit_json_text(json, "case", r->c.name);
        kit_json_text(json, "who", r->who);
        kit_json_integer(json, "q_heads", (uint64_t)r->c.q_heads);
        kit_json_integer(json, "kv_heads", (uint64_t)r->c.kv_heads);
        kit_json_integer(json, "head_dim", (uint64_t)r->c.dim);
        kit_json_integer(json, "batch", (uint64_t)r->c.batch);
        kit_json_integer(json, "cached", (uint64_t)r->c.cached);
        kit_json_integer(json, "queries", (uint64_t)r->c.queries);
        if (ours) kit_json_integer(json, "k_bits", r->c.k.bits);
        if (ours && r->c.rope == 0) kit_json_integer(json, "v_bits", r->c.v.bits);
        if (r->c.rope != 0) kit_json_integer(json, "rope_dim", (uint64_t)r->c.rope);
        kit_json_bool(json, "right", r->right);
        kit_json_real(json, "error_l2", r->error);
        kit_json_integer(json, "chained_calls", r->n_chain);
        kit_json_real(json, "us_chained", r->right ? r->us_chained : NAN);
        kit_json_real(json, "us_in_parts", r->right ? r->us_in_parts : NAN);
        kit_json_real(json, "us_single", r->right ? r->us_single : NAN);
        kit_json_real(json, "joules", r->right ? r->joules : NAN);
        kit_json_integer(json, "bytes", r->bytes);
        kit_json_real(json, "gb_s", r->right ? (double)r->bytes / r->us_chained * 1e-3 : NAN);
        kit_json_real(json, "roof_share", r->right ? (double)r->bytes / r->us_chained * 1e6 / b->roof : NAN);
        kit_json_integer(json, "extra_bytes", r->extra_bytes);
        kit_json_close(json);
    }
    return kit_json_print(json);
}

static bool gpu_is_there(void) {
    mlx_device gpu = mlx_device_new_type(MLX_GPU, 0);
    bool there = false;
    (void)mlx_device_is_available(&there, gpu);
    (void)mlx_device_free(gpu);
    return there;
}

static const char *case_help(void) {
    static char text[1024];
    size_t n = (size_t)snprintf(text, sizeof text, "run only cases whose name contains TEXT:\n");
    for (int i = 0; i < N_ALL_CASES && n < sizeof text; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", i == 0 ? "" : i % 4 == 0 ? ",\n" : ", ", all_cases[i].name);
    return text;
}

/* Parses up to MAX_LENGTHS multiples of `unit`, separated by commas, and returns their number. */
static int parse_numbers(const char *option, const char *text, int unit, int largest, int *numbers) {
    int n_numbers = 0;
    for (const char *at = text; at != NULL && n_numbers < MAX_LENGTHS; at = strchr(at, ',')) {
        char *end = NULL;
        if (*at == ',') at++;
        const long n = strtol(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || n < unit || n > largest || n % unit != 0)
            kit_die(EXIT_USAGE, "%s must be multiples of %d up to %d, separated by commas (got \"%s\")", option, unit, largest,
                    text);
        numbers[n_numbers++] = (int)n;
    }
    return n_numbers;
}

static void parse(mlx_bench *b, int argc, char **argv) {
    static const char usage[] = "usage: bench_attn --device mlx [options]\n"
                                "Verifies and times attention on the MLX backend and MLX's own attention, chained and single.\n"
                                "Exit status: 0 success, 1 wrong result, 2 invalid usage.\n";
    bool no_peers = false;
    bool quick = false;
    const char *lengths = NULL;
    const char *batches = NULL;
    const char *nvml = BENCH_ENERGY_NVML;
    int device = 1;
    int stream = gpu_is_there() ? 1 : 0;
    int way = 0;
    b->n_rounds = 20;
    b->n_chain = 100;
    b->divide = 1;
    const kit_option own[] = {
        {"device", 0, OPTION_CHOICE, &device, 0, "cpu|mlx", "see bench_attn --help for the CPU options"},
        {"stream", 0, OPTION_CHOICE, &stream, 0, "cpu|gpu", "(default gpu if there is one)"},
        {"way", 0, OPTION_CHOICE, &way, 0, "auto|plain|fused", "(default auto)"},
        {"case", 0, OPTION_TEXT, &b->only, 0, "TEXT", case_help()},
        {"no-peers", 0, OPTION_FLAG, &no_peers, 0, NULL, "skip the timing of MLX's own attention"},
        {"bf16-only", 0, OPTION_FLAG, &b->bf16_only, 0, NULL, "skip the timing of MLX's quantized attention"},
        {"lengths", 0, OPTION_TEXT, &lengths, 0, "N,N", "cached tokens, instead of those of the cases"},
        {"batches", 0, OPTION_TEXT, &batches, 0, "N,N", "sequences, instead of those of the cases"},
        {"energy", 0, OPTION_COUNT, &b->energy_seconds, 60, "SECONDS", "measure the GPU's energy for SECONDS per result"},
        {"nvml", 0, OPTION_TEXT, &nvml, 0, "FILE", "library that reads energy counters (default " BENCH_ENERGY_NVML ")"},
        {"chain", 0, OPTION_COUNT, &b->n_chain, 10000, "N", "maximum calls per evaluation (default 100)"},
        {"rounds", 0, OPTION_COUNT, &b->n_rounds, MAX_ROUNDS, "N", "single calls (default 20)"},
        {"divide", 0, OPTION_COUNT, &b->divide, 1024, "N",
         "divide history lengths by N, to test the program; the times are then not meaningful"},
        {"quick", 0, OPTION_FLAG, &quick, 0, NULL, "same as --divide 1024 --chain 1 --rounds 1"},
        {"json", 0, OPTION_FLAG, &b->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    b->is_gpu = stream == 1;
    b->device.way = (fkv_mlx_way)way;
    b->peers = !no_peers;
    b->n_lengths = parse_numbers("--lengths", lengths, PAGE_TOKENS, 1 << 20, b->lengths);
    b->n_batches = parse_numbers("--batches", batches, 1, 1024, b->batches);
    if (b->energy_seconds > 0 && !bench_energy_open_gpu(&b->energy, nvml))
        kit_die(EXIT_USAGE, "--energy: %s reports no energy counter of a single GPU", nvml);
    if (quick) {
        b->divide = 1024;
        b->n_chain = b->n_rounds = 1;
    }
}

int bench_attn_mlx(int argc, char **argv) {
    static mlx_bench b;
    fkv_mlx_catch_errors();
    parse(&b, argc, argv);
    b.text = b.json ? stderr : stdout;
    b.device.stream = b.is_gpu ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    b.g.stream = b.device.stream;
    if (b.device.stream.ctx == NULL) kit_die(EXIT_USAGE, "cannot open the MLX stream: %s", fkv_mlx_last_error());
    b.roof = measure_roof(&b);
    const char *name = b.is_gpu ? "mlx gpu" : "mlx cpu";
    (void)fprintf(b.text, "flatkv %s on %s; read roof %.0f GB/s; up to %u chained calls, median of %u single calls\n",
                  fkv_version(), name, b.roof * 1e-9, b.n_chain, b.n_rounds);
    const mlx_case *before = NULL;
    for (int i = 0; i < N_ALL_CASES; i++) {
        if (b.only != NULL && strstr(all_cases[i].name, b.only) == NULL) continue;
        /* MLX's own attention does not depend on the flatkv codec, so it is measured once per shape */
        const bool with_peers = b.peers && (before == NULL || !same_rows(before, &all_cases[i]));
        before = &all_cases[i];
        for (int n = 0; n < (b.n_lengths > 0 ? b.n_lengths : 1); n++)
            for (int m = 0; m < (b.n_batches > 0 ? b.n_batches : 1); m++) run_size(&b, &all_cases[i], n, m, with_peers);
    }
    b.roof = fmax(b.roof, measure_roof(&b));
    size_t n_wrong = 0;
    for (size_t i = 0; i < b.n_results; i++) n_wrong += !b.results[i].right;
    (void)fprintf(b.text, "read roof, best: %.0f GB/s; %zu results, %zu wrong\n", b.roof * 1e-9, b.n_results, n_wrong);
    int written = b.json ? write_json(&b, name) : EXIT_GOOD;
    (void)mlx_stream_free(b.device.stream);
    return written == EXIT_GOOD && n_wrong == 0 && b.n_results > 0 ? EXIT_GOOD : EXIT_FAILED;
}
