/* bench_decode_mlx: times decode steps of a model with the shape of Llama-3-8B, random 4-bit weights and a full cache on MLX. The
 * host reads every token back before the next step, as a text generator does.
 *
 * For each codec, it reports tokens per second and MLX memory: the active memory after the cache was filled and after the last
 * step, and the additional peak memory during a step. The last row shows the same step with MLX's bf16 attention over constant
 * keys and values. Its speed is an upper bound for a bf16 cache built on MLX.
 */
#include "bench_util.h"

#include "../src/mlx/mlx_product.h"

#include <flatkv/mlx.h>

#include <math.h>
#include <stdlib.h>
#include <time.h>

static const char PROGRAM[] = "bench_decode_mlx";

enum { MAX_LAYERS = 64, MAX_STEPS = 1000, FILL_TOKENS = 512, GROUP = 64, WEIGHT_BITS = 4, EMBEDDINGS = 1024, SUBMIT_LAYERS = 4 };

typedef struct model_shape {
    uint32_t n_layers;
    int dim;
    int ffn;
    int q_heads;
    int kv_heads;
    int head_dim;
    int vocab;
} model_shape;

static const model_shape llama_8b = {32, 4096, 14336, 32, 8, 128, 128256};
static const model_shape tiny = {2, 256, 512, 4, 2, 64, 1024};

typedef struct layer_weights {
    fkv_mlx_affine qkv;
    fkv_mlx_affine o;
    fkv_mlx_affine gate_up;
    fkv_mlx_affine down;
} layer_weights;

typedef struct decode_result {
    const char *name;
    uint64_t cache_bytes; /* size of the cache in bytes: flatkv's plan, or MLX's keys and values */
    double tokens_per_second;
    double ms_p50;
    double ms_p90;
    uint64_t active_before;
    uint64_t active_after;
    uint64_t step_bytes;
    bool finite;
} decode_result;

typedef struct decode_bench {
    fkv_mlx_graph g;
    fkv_mlx_products products;
    fkv_mlx_config device;
    model_shape shape;
    uint32_t n_cached;
    uint32_t n_steps;
    bool json;
    bool mlx_products; /* products are computed by MLX's kernels */
    bool on_gpu;
    FILE *text;
    layer_weights layers[MAX_LAYERS];
    fkv_mlx_affine head;
    mlx_array norm;      /* norm weights, all equal to 1; shared by all layers */
    mlx_array embedding; /* bfloat16 [EMBEDDINGS, dim] */

    /* data of the current run */
    fkv_cache *cache; /* NULL if MLX's own attention is timed */
    fkv_step *step;
    mlx_array keys[MAX_LAYERS]; /* bfloat16 [1, G, S, D] */
    mlx_array values[MAX_LAYERS];
} decode_bench;

static void check(decode_bench *b, const char *what) {
    if (b->g.failed) kit_die(EXIT_FAILED, "%s: MLX error: %s", what, fkv_mlx_last_error());
}

static void must(fkv_status status) {
    if (status != FKV_OK) kit_die(EXIT_FAILED, "%s: %s", fkv_status_name(status), fkv_message());
}

static uint64_t memory(int (*which)(size_t *)) {
    size_t bytes = 0;
    if (which(&bytes) != 0) kit_die(EXIT_FAILED, "cannot read MLX memory use: %s", fkv_mlx_last_error());
    return bytes;
}

/* Returns the active memory after all steps. MLX frees the arrays of a step on another thread, which mlx_synchronize() does not
 * wait for on CUDA, so the lowest of several readings is returned. */
static uint64_t settled_memory(decode_bench *b) {
    enum { N_READINGS = 20 };
    const struct timespec pause = {.tv_nsec = 1000000};
    uint64_t lowest = UINT64_MAX;
    if (mlx_synchronize(b->g.stream) != 0) kit_die(EXIT_FAILED, "cannot synchronize: %s", fkv_mlx_last_error());
    for (int i = 0; i < N_READINGS; i++) {
        const uint64_t bytes = memory(mlx_get_active_memory);
        if (bytes < lowest) lowest = bytes;
        (void)nanosleep(&pause, NULL);
    }
    return lowest;
}

static mlx_array random_array(decode_bench *b, fkv_mlx_shape shape, float deviation) {
    mlx_array out = {NULL};
    if (b->g.failed) return out;
    int code = mlx_random_normal(&out, shape.at, (size_t)shape.n, MLX_BFLOAT16, 0.0f, deviation, (mlx_array){NULL}, b->g.stream);
    if (code != 0) b->g.failed = true;
    return fkv_mlx_adopt(&b->g, out);
}

static void settle(decode_bench *b, mlx_array *kept, mlx_array a) {
    fkv_mlx_eval_one(&b->g, a);
    fkv_mlx_keep(&b->g, kept, a);
    fkv_mlx_graph_release(&b->g, 0);
    check(b, "weights");
}

/* ---- weights ---- */

static void make_matrix(decode_bench *b, int rows, int columns, fkv_mlx_affine *out) {
    fkv_mlx_graph *g = &b->g;
    mlx_array x = random_array(b, FKV_MLX_SHAPE(rows, columns), 1.0f / sqrtf((float)columns));
    fkv_mlx_affine made = fkv_mlx_quantize(g, x, WEIGHT_BITS, GROUP);
    *out = (fkv_mlx_affine){.bits = WEIGHT_BITS, .group = GROUP};
    mlx_array *const parts[] = {&out->codes, &out->scales, &out->biases};
    const mlx_array from[] = {made.codes, made.scales, made.biases};
    for (int i = 0; i < 3; i++) {
        fkv_mlx_eval_one(g, from[i]);
        fkv_mlx_keep(g, parts[i], from[i]);
    }
    fkv_mlx_graph_release(g, 0);
    check(b, "weights");
}

static void make_weights(decode_bench *b) {
    const model_shape *s = &b->shape;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        make_matrix(b, (s->q_heads + 2 * s->kv_heads) * s->head_dim, s->dim, &b->layers[l].qkv);
        make_matrix(b, s->dim, s->q_heads * s->head_dim, &b->layers[l].o);
        make_matrix(b, 2 * s->ffn, s->dim, &b->layers[l].gate_up);
        make_matrix(b, s->dim, s->ffn, &b->layers[l].down);
    }
    make_matrix(b, s->vocab, s->dim, &b->head);
    settle(b, &b->embedding, random_array(b, FKV_MLX_SHAPE(EMBEDDINGS, s->dim), 1.0f));
    mlx_array ones = {NULL};
    if (mlx_ones(&ones, (const int[]){s->dim}, 1, MLX_BFLOAT16, b->g.stream) != 0) b->g.failed = true;
    settle(b, &b->norm, fkv_mlx_adopt(&b->g, ones));
    (void)mlx_clear_cache();
}

/* ---- decode step ---- */

static mlx_array normed(decode_bench *b, mlx_array x) {
    mlx_array out = {NULL};
    if (!b->g.failed && mlx_fast_rms_norm(&out, x, b->norm, 1e-5f, b->g.stream) != 0) b->g.failed = true;
    return fkv_mlx_adopt(&b->g, out);
}

static mlx_array sigmoid(decode_bench *b, mlx_array x) {
    mlx_array out = {NULL};
    if (!b->g.failed && mlx_sigmoid(&out, x, b->g.stream) != 0) b->g.failed = true;
    return fkv_mlx_adopt(&b->g, out);
}

/* Returns heads [first, first + n) of qkv, the concatenated q, k and v of a token: [1, n, D]. */
static mlx_array heads_of(decode_bench *b, mlx_array qkv, int first, int n) {
    const int dim = b->shape.head_dim;
    mlx_array x = fkv_mlx_slice(&b->g, qkv, FKV_MLX_SHAPE(0, first * dim), FKV_MLX_SHAPE(1, (first + n) * dim));
    return fkv_mlx_reshape(&b->g, x, FKV_MLX_SHAPE(1, n, dim));
}

static mlx_array turned(decode_bench *b, mlx_array x, int n, uint32_t position) {
    fkv_mlx_graph *g = &b->g;
    mlx_array out = {NULL};
    mlx_array in = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(1, n, 1, b->shape.head_dim));
    if (!g->failed && mlx_fast_rope(&out, in, b->shape.head_dim, false, (mlx_optional_float){500000.0f, true}, 1.0f,
                                    (int)position, (mlx_array){NULL}, g->stream) != 0)
        g->failed = true;
    return fkv_mlx_reshape(g, fkv_mlx_adopt(g, out), FKV_MLX_SHAPE(1, n, b->shape.head_dim));
}

/* Computes the attention of one layer. q: [1, H, D] */
static mlx_array attend(decode_bench *b, uint32_t layer, mlx_array q, mlx_array k, mlx_array v) {
    fkv_mlx_graph *g = &b->g;
    const model_shape *s = &b->shape;
    mlx_array out = mlx_array_new();
    check(b, "a step");
    if (b->cache != NULL) {
        must(fkv_mlx_write(b->step, layer, k, v));
        must(fkv_mlx_attend(b->step, layer, q, &out));
        return fkv_mlx_adopt(g, out);
    }
    mlx_array rows = fkv_mlx_reshape(g, q, FKV_MLX_SHAPE(1, s->q_heads, 1, s->head_dim));
    if (mlx_fast_scaled_dot_product_attention(&out, rows, b->keys[layer], b->values[layer], 1.0f / sqrtf((float)s->head_dim), "",
                                              (mlx_array){NULL}, (mlx_array){NULL}, false, g->stream) != 0)
        g->failed = true;
    return fkv_mlx_adopt(g, out);
}

static mlx_array run_layer(decode_bench *b, uint32_t layer, mlx_array x, uint32_t position) {
    fkv_mlx_graph *g = &b->g;
    const model_shape *s = &b->shape;
    const layer_weights *w = &b->layers[layer];
    mlx_array qkv = fkv_mlx_product(&b->products, g, normed(b, x), &w->qkv);
    mlx_array q = turned(b, heads_of(b, qkv, 0, s->q_heads), s->q_heads, position);
    mlx_array k = turned(b, heads_of(b, qkv, s->q_heads, s->kv_heads), s->kv_heads, position);
    mlx_array v = heads_of(b, qkv, s->q_heads + s->kv_heads, s->kv_heads);
    mlx_array out = fkv_mlx_reshape(g, attend(b, layer, q, k, v), FKV_MLX_SHAPE(1, s->q_heads * s->head_dim));
    x = fkv_mlx_add(g, x, fkv_mlx_product(&b->products, g, out, &w->o));
    mlx_array both = fkv_mlx_product(&b->products, g, normed(b, x), &w->gate_up);
    mlx_array gate = fkv_mlx_slice(g, both, FKV_MLX_SHAPE(0, 0), FKV_MLX_SHAPE(1, s->ffn));
    mlx_array up = fkv_mlx_slice(g, both, FKV_MLX_SHAPE(0, s->ffn), FKV_MLX_SHAPE(1, 2 * s->ffn));
    mlx_array inner = fkv_mlx_multiply(g, fkv_mlx_multiply(g, gate, sigmoid(b, gate)), up);
    return fkv_mlx_add(g, x, fkv_mlx_product(&b->products, g, inner, &w->down));
}

/* Starts the evaluation of x. The GPU then computes while the host builds the rest of the graph. */
static void submit(decode_bench *b, mlx_array x) {
    mlx_vector_array wanted = mlx_vector_array_new_value(x);
    if (mlx_async_eval(wanted) != 0) b->g.failed = true;
    (void)mlx_vector_array_free(wanted);
}

/* Runs one decode step and returns the id of the next token to the host. */
static uint32_t run_step(decode_bench *b, uint32_t token, uint32_t position, bool *finite) {
    fkv_mlx_graph *g = &b->g;
    const int row = (int)(token % EMBEDDINGS);
    mlx_array x = fkv_mlx_slice(g, b->embedding, FKV_MLX_SHAPE(row, 0), FKV_MLX_SHAPE(row + 1, b->shape.dim));
    for (uint32_t l = 0; l < b->shape.n_layers; l++) {
        mlx_array kept = {NULL};
        const uint32_t mark = fkv_mlx_graph_mark(g);
        fkv_mlx_keep(g, &kept, run_layer(b, l, x, position));
        fkv_mlx_graph_release(g, mark);
        x = fkv_mlx_adopt(g, kept);
        if (b->on_gpu && l % SUBMIT_LAYERS == 0) submit(b, x);
    }
    mlx_array logits = fkv_mlx_product(&b->products, g, normed(b, x), &b->head);
    mlx_array best = {NULL};
    mlx_array most = fkv_mlx_astype(g, fkv_mlx_max_last(g, logits), MLX_FLOAT32);
    if (!g->failed && mlx_argmax_axis(&best, logits, -1, false, g->stream) != 0) g->failed = true;
    best = fkv_mlx_adopt(g, best);
    uint32_t next = 0;
    float value = NAN;
    fkv_mlx_eval_one(g, best);
    if (!g->failed && mlx_array_item_uint32(&next, best) != 0) g->failed = true;
    if (*finite) { /* the logits are checked in the first steps only, because the check needs a second evaluation */
        fkv_mlx_eval_one(g, most);
        if (!g->failed && mlx_array_item_float32(&value, most) != 0) g->failed = true;
        *finite = isfinite(value);
    }
    fkv_mlx_graph_release(g, 0);
    check(b, "a step");
    return next;
}

/* ---- runs ---- */

static void measure(decode_bench *b, fkv_seq seq, decode_result *r) {
    enum { WARM_STEPS = 5 };
    double times[MAX_STEPS];
    uint32_t token = 1;
    bool finite = true;
    for (uint32_t i = 0; i < WARM_STEPS + b->n_steps; i++) {
        bool unasked = false;
        if (i == WARM_STEPS) {
            r->finite = finite;
            r->active_before = settled_memory(b);
            (void)mlx_reset_peak_memory();
        }
        const double start = kit_seconds();
        if (b->cache != NULL) must(fkv_step_begin(b->cache, &(fkv_row){seq, 1}, 1, &b->step));
        token = run_step(b, token, b->n_cached + i, i < WARM_STEPS ? &finite : &unasked);
        if (b->cache != NULL) must(fkv_step_commit(b->step));
        if (i >= WARM_STEPS) times[i - WARM_STEPS] = kit_seconds() - start;
    }
    r->active_after = settled_memory(b);
    const uint64_t peak = memory(mlx_get_peak_memory);
    r->step_bytes = peak > r->active_before ? peak - r->active_before : 0;
    const kit_spread spread = kit_spread_of(times, b->n_steps);
    r->ms_p50 = spread.p50 * 1e3;
    r->ms_p90 = spread.p90 * 1e3;
    r->tokens_per_second = 1.0 / spread.p50;
}

/* Fills the cache with random rows. Every layer and chunk gets the same rows, because the time does not depend on the values. */
static void fill(decode_bench *b, fkv_seq seq) {
    const model_shape *s = &b->shape;
    mlx_array k = {NULL};
    mlx_array v = {NULL};
    settle(b, &k, random_array(b, FKV_MLX_SHAPE(FILL_TOKENS, s->kv_heads, s->head_dim), 1.0f));
    settle(b, &v, random_array(b, FKV_MLX_SHAPE(FILL_TOKENS, s->kv_heads, s->head_dim), 1.0f));
    for (uint32_t at = 0; at < b->n_cached; at += FILL_TOKENS) {
        must(fkv_step_begin(b->cache, &(fkv_row){seq, FILL_TOKENS}, 1, &b->step));
        for (uint32_t l = 0; l < s->n_layers; l++) must(fkv_mlx_write(b->step, l, k, v));
        mlx_vector_array pending = mlx_vector_array_new();
        must(fkv_mlx_step_pending(b->step, pending));
        if (mlx_eval(pending) != 0) b->g.failed = true;
        (void)mlx_vector_array_free(pending);
        check(b, "the history");
        must(fkv_step_commit(b->step));
    }
    (void)mlx_array_free(k);
    (void)mlx_array_free(v);
    (void)mlx_clear_cache();
}

static void run_cache(decode_bench *b, fkv_codec_config k, fkv_codec_config v, decode_result *r) {
    const model_shape *s = &b->shape;
    fkv_config config = fkv_config_default();
    config.n_layers = s->n_layers;
    config.layer.n_q_heads = (uint32_t)s->q_heads;
    config.layer.n_kv_heads = (uint32_t)s->kv_heads;
    config.layer.head_dim = (uint32_t)s->head_dim;
    config.layer.k = k;
    config.layer.v = v;
    config.max_tokens = b->n_cached + b->n_steps + 64;
    config.max_step_tokens = FILL_TOKENS;
    config.rotate = v.kind == FKV_CODEC_SEALED_V ? FKV_ROTATE_KV : k.bits <= 4 ? FKV_ROTATE_K : FKV_ROTATE_NONE;
    fkv_plan plan;
    must(fkv_mlx_plan_make(&config, &b->device, &plan));
    must(fkv_mlx_cache_open(&config, &b->device, &b->cache));
    r->cache_bytes = plan.total_bytes;
    fkv_seq seq = 0;
    must(fkv_seq_open(b->cache, &(fkv_seq_config){.max_tokens = config.max_tokens}, &seq, NULL));
    fill(b, seq);
    measure(b, seq, r);
    fkv_cache_close(b->cache);
    b->cache = NULL;
    (void)mlx_clear_cache();
}

static void run_mlx(decode_bench *b, decode_result *r) {
    const model_shape *s = &b->shape;
    const fkv_mlx_shape shape = FKV_MLX_SHAPE(1, s->kv_heads, (int)b->n_cached, s->head_dim);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        settle(b, &b->keys[l], random_array(b, shape, 1.0f));
        settle(b, &b->values[l], random_array(b, shape, 1.0f));
        r->cache_bytes += mlx_array_nbytes(b->keys[l]) + mlx_array_nbytes(b->values[l]);
    }
    (void)mlx_clear_cache();
    measure(b, 0, r);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        (void)mlx_array_free(b->keys[l]);
        (void)mlx_array_free(b->values[l]);
    }
    (void)mlx_clear_cache();
}

/* ---- program ---- */

static int write_json(const decode_bench *b, const decode_result *results, size_t n_results) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "flatkv", fkv_version());
    kit_json_integer(json, "layers", b->shape.n_layers);
    kit_json_integer(json, "dim", (uint64_t)b->shape.dim);
    kit_json_integer(json, "cached", b->n_cached);
    kit_json_integer(json, "steps", b->n_steps);
    kit_json_integer(json, "weight_bits", WEIGHT_BITS);
    kit_json_text(json, "products", b->products.on_cuda ? "flatkv" : "mlx");
    kit_json_array(json, "results");
    for (size_t i = 0; i < n_results; i++) {
        const decode_result *r = &results[i];
        kit_json_object(json, NULL);
        kit_json_text(json, "who", r->name);
        kit_json_bool(json, "finite", r->finite);
        kit_json_real(json, "tokens_per_second", r->tokens_per_second);
        kit_json_real(json, "ms_p50", r->ms_p50);
        kit_json_real(json, "ms_p90", r->ms_p90);
        kit_json_integer(json, "cache_bytes", r->cache_bytes);
        kit_json_integer(json, "active_before", r->active_before);
        kit_json_integer(json, "active_after", r->active_after);
        kit_json_integer(json, "step_bytes", r->step_bytes);
        kit_json_close(json);
    }
    return kit_json_print(json);
}

static void parse(decode_bench *b, int argc, char **argv) {
    static const char usage[] = "usage: bench_decode_mlx [options]\n"
                                "Times decode steps with the shape of Llama-3-8B and random 4-bit weights on MLX.\n"
                                "Exit status: 0 success, 1 not finite or not flat, 2 invalid usage.\n";
    bool quick = false;
    b->shape = llama_8b;
    b->n_cached = 131072;
    b->n_steps = 40;
    const kit_option own[] = {
        {"cached", 'c', OPTION_COUNT, &b->n_cached, 1u << 24, "N",
         "tokens in the cache, rounded down to a multiple of 512 (default 131072)"},
        {"steps", 0, OPTION_COUNT, &b->n_steps, MAX_STEPS, "N", "decode steps (default 40)"},
        {"quick", 0, OPTION_FLAG, &quick, 0, NULL, "tiny shape, to test the program; times are not meaningful"},
        {"mlx-products", 0, OPTION_FLAG, &b->mlx_products, 0, NULL, "multiply by weights with MLX's kernels, also on CUDA"},
        {"json", 0, OPTION_FLAG, &b->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    if (b->n_cached < FILL_TOKENS) kit_die(EXIT_USAGE, "--cached must be at least %d (got %u)", FILL_TOKENS, b->n_cached);
    b->n_cached -= b->n_cached % FILL_TOKENS;
    if (quick) {
        b->shape = tiny;
        b->n_cached = FILL_TOKENS;
        b->n_steps = 5;
    }
}

/* A decrease is accepted: MLX may still hold arrays of the warm-up steps in the first reading. */
static bool is_flat(const decode_result *r) { return r->active_after <= r->active_before + (64u << 10); }

static void print_result(const decode_bench *b, const decode_result *r) {
    char text[3][BENCH_TEXT];
    (void)fprintf(b->text, "%-14s %8.2f tokens/s  %8.3f ms  cache %s, active %s, a step +%s%s%s\n", r->name, r->tokens_per_second,
                  r->ms_p50, bench_bytes((double)r->cache_bytes, text[0]), bench_bytes((double)r->active_after, text[1]),
                  bench_bytes((double)r->step_bytes, text[2]), r->finite ? "" : "  NOT FINITE", is_flat(r) ? "" : "  NOT FLAT");
    (void)fflush(b->text);
}

int main(int argc, char **argv) {
    static decode_bench b;
    static const struct {
        const char *name;
        fkv_codec_config k;
        fkv_codec_config v;
    } codecs[] = {{"flatkv 16/16", {16, 0}, {16, 0}},
                  {"flatkv 8/4", {8, 64}, {4, 64}},
                  {"flatkv 4/4", {4, 64}, {4, 64}},
                  {"flatkv sealed", {.bits = 4, .kind = FKV_CODEC_SEALED}, {.bits = 4, .kind = FKV_CODEC_SEALED_V}}};
    enum { N_CODECS = sizeof codecs / sizeof codecs[0] };
    decode_result results[N_CODECS + 1] = {{0}};
    kit_set_program(PROGRAM);
    fkv_mlx_catch_errors();
    parse(&b, argc, argv);
    b.text = b.json ? stderr : stdout;
    mlx_device gpu = mlx_device_new_type(MLX_GPU, 0);
    bool has_gpu = false;
    (void)mlx_device_is_available(&has_gpu, gpu);
    (void)mlx_device_free(gpu);
    b.device.stream = has_gpu ? mlx_default_gpu_stream_new() : mlx_default_cpu_stream_new();
    b.g.stream = b.device.stream;
    b.on_gpu = has_gpu;
    b.products.checked = b.mlx_products; /* `on_cuda` remains false */
    (void)fprintf(b.text, "flatkv %s on mlx %s: %u layers of %d, %u tokens cached, %u steps\n", fkv_version(),
                  has_gpu ? "gpu" : "cpu", b.shape.n_layers, b.shape.dim, b.n_cached, b.n_steps);
    make_weights(&b);
    bool good = true;
    for (size_t i = 0; i < N_CODECS + 1; i++) {
        decode_result *r = &results[i];
        r->name = i < N_CODECS ? codecs[i].name : "MLX bf16";
        if (i < N_CODECS)
            run_cache(&b, codecs[i].k, codecs[i].v, r);
        else
            run_mlx(&b, r);
        print_result(&b, r);
        good = good && r->finite && (i == N_CODECS || is_flat(r));
    }
    if (b.json && write_json(&b, results, N_CODECS + 1) != EXIT_GOOD) return EXIT_FAILED;
    return good ? EXIT_GOOD : EXIT_FAILED;
}
