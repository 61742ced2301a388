/* flatkv bench attn: how long one layer's attention takes in the shape of a model, by depth and codec: a decode step, and a chunk
 * of prefill. Random rows, public header; bench_attn, which holds the kernels against the truth, is the deeper one.
 */
#include "../kit/numbers.h"
#include "bench_command.h"
#include "codec_list.h"

#include <math.h>
#include <stdlib.h>

static const char usage[] =
    "usage: flatkv bench attn [-m MODEL] [-c TOKENS] [options]\n"
    "One layer with the heads of the model, filled with random rows; medians of steps at depths up to -c.\n";

static const char default_codecs[] = "16/16,8/8,8/4,4/4,4/2";

enum { PREFILL = 64, ROUNDS = 9, PREFILL_ROUNDS = 3, LEAST_DEPTH = 1024 };

typedef struct attn_options {
    model_options model;
    const char *codecs;
} attn_options;

typedef struct attn_bench {
    const attn_options *o;
    const fkv_model_info *about;
    codec_list codecs;
    uint32_t n_tokens;
    float *k; /* [chunk, G, D] */
    float *v;
    float *q; /* [chunk, H, D] */
    float *out;
    json_t *results;
} attn_bench;

static fkv_status take_step(attn_bench *b, fkv_cache *cache, fkv_seq seq, uint32_t n, bool attend) {
    fkv_row row = {seq, n};
    fkv_step *step = NULL;
    fkv_status status = fkv_step_begin(cache, &row, 1, &step);
    if (status != FKV_OK) return status;
    status = fkv_write(step, 0, b->k, b->v);
    if (status == FKV_OK && attend) status = fkv_attend(step, 0, b->q, b->out);
    if (status == FKV_OK) return fkv_step_commit(step);
    (void)fkv_step_abort(step);
    return status;
}

/* The median of so many steps of n tokens at this depth, in milliseconds; the sequence is left at it. */
static fkv_status time_steps(attn_bench *b, fkv_cache *cache, fkv_seq seq, uint32_t depth, uint32_t n, uint32_t rounds,
                             double *ms) {
    double times[ROUNDS];
    for (uint32_t i = 0; i <= rounds; i++) { /* the first warms up */
        double start = kit_seconds();
        fkv_status status = take_step(b, cache, seq, n, true);
        if (i > 0) times[i - 1] = (kit_seconds() - start) * 1e3;
        if (status == FKV_OK) status = fkv_seq_truncate(cache, seq, depth);
        if (status != FKV_OK) return status;
    }
    *ms = kit_spread_of(times, rounds).p50;
    return FKV_OK;
}

static fkv_status visit(attn_bench *b, fkv_cache *cache, fkv_seq seq, uint32_t depth, const codec_choice *codec,
                        uint64_t token_bytes) {
    double decode = NAN;
    double prefill = NAN;
    fkv_status status = time_steps(b, cache, seq, depth, 1, ROUNDS, &decode);
    if (status == FKV_OK) status = time_steps(b, cache, seq, depth, PREFILL, PREFILL_ROUNDS, &prefill);
    if (status != FKV_OK) return status;
    double gb_s = (double)(token_bytes * depth) / decode * 1e-6;
    if (b->o->model.json) {
        json_t *one = json_object();
        codec_json(codec, one);
        cli_json_integer(one, "depth", depth);
        cli_json_real(one, "decode_ms", decode);
        cli_json_real(one, "decode_packed_gb_s", gb_s);
        cli_json_real(one, "prefill_ms", prefill);
        (void)json_array_append_new(b->results, one);
    } else {
        char name[32];
        printf("%-14s %10u %12.3f %12.2f %14.2f\n", codec_text(codec, name), depth, decode, gb_s, prefill);
        (void)fflush(stdout);
    }
    return FKV_OK;
}

static fkv_status fill_to(attn_bench *b, fkv_cache *cache, fkv_seq seq, uint32_t *length, uint32_t depth) {
    while (*length < depth) {
        uint32_t n = depth - *length < b->o->model.chunk ? depth - *length : b->o->model.chunk;
        fkv_status status = take_step(b, cache, seq, n, false);
        if (status != FKV_OK) return status;
        *length += n;
    }
    return FKV_OK;
}

static int run_codec(attn_bench *b, const codec_choice *codec) {
    fkv_config c = fkv_config_default();
    c.n_layers = 1;
    c.layer.n_q_heads = b->about->n_q_heads;
    c.layer.n_kv_heads = b->about->n_kv_heads;
    c.layer.head_dim = b->about->head_dim;
    c.layer.k = codec->k;
    c.layer.v = codec->v;
    c.rotate = codec->rotate;
    c.max_tokens = b->n_tokens + PREFILL;
    c.max_step_tokens = b->o->model.chunk > PREFILL ? b->o->model.chunk : PREFILL;
    c.n_threads = b->o->model.n_threads;
    c.lazy = b->o->model.lazy;
    c.memory_limit = b->o->model.memory;
    fkv_cache *cache = NULL;
    fkv_plan plan;
    fkv_seq_config whole = {.max_tokens = c.max_tokens};
    fkv_seq seq = 0;
    fkv_status status = fkv_plan_make(&c, &plan);
    if (status == FKV_OK) status = fkv_cache_open(&c, &cache);
    if (status == FKV_OK) status = fkv_seq_open(cache, &whole, &seq, NULL);
    uint32_t length = 0;
    for (uint32_t depth = b->n_tokens < LEAST_DEPTH ? b->n_tokens : LEAST_DEPTH; status == FKV_OK && !cli_interrupted();) {
        status = fill_to(b, cache, seq, &length, depth);
        if (status == FKV_OK) status = visit(b, cache, seq, depth, codec, plan.token_bytes);
        if (depth == b->n_tokens) break;
        depth = depth > b->n_tokens / 4 ? b->n_tokens : depth * 4;
    }
    fkv_cache_close(cache);
    if (status != FKV_OK) return cli_fail_status(status);
    return cli_interrupted() ? EXIT_INTERRUPTED : EXIT_GOOD;
}

static void take_rows(attn_bench *b) {
    size_t rows = b->o->model.chunk > PREFILL ? b->o->model.chunk : PREFILL;
    size_t n_kv = rows * b->about->n_kv_heads * b->about->head_dim;
    size_t n_q = rows * b->about->n_q_heads * b->about->head_dim;
    uint64_t random = b->o->model.seed;
    b->k = cli_take(n_kv * sizeof *b->k);
    b->v = cli_take(n_kv * sizeof *b->v);
    b->q = cli_take(n_q * sizeof *b->q);
    b->out = cli_take(n_q * sizeof *b->out);
    kit_gaussian(&random, n_kv, b->k);
    kit_gaussian(&random, n_kv, b->v);
    kit_gaussian(&random, n_q, b->q);
}

static int work(attn_bench *b) {
    int code = codec_list_parse(&b->o->model, b->o->codecs, &b->codecs);
    if (code != EXIT_GOOD) return code;
    b->n_tokens = b->o->model.context != 0 ? b->o->model.context : b->about->context;
    take_rows(b);
    b->results = json_array();
    if (!b->o->model.json)
        printf("%s: %u query heads, %u KV heads, head dimension %u, one layer\n\n%-14s %10s %12s %12s %14s\n", b->o->model.model,
               b->about->n_q_heads, b->about->n_kv_heads, b->about->head_dim, "cache", "depth", "decode ms", "packed GB/s",
               "prefill 64 ms");
    for (uint32_t i = 0; code == EXIT_GOOD && i < b->codecs.n; i++) code = run_codec(b, &b->codecs.codecs[i]);
    if (code != EXIT_GOOD || !b->o->model.json) return code;
    json_t *object = json_object();
    cli_json_text(object, "version", fkv_version());
    cli_json_text(object, "model", b->o->model.model);
    cli_json_integer(object, "n_q_heads", b->about->n_q_heads);
    cli_json_integer(object, "n_kv_heads", b->about->n_kv_heads);
    cli_json_integer(object, "head_dim", b->about->head_dim);
    cli_json_set(object, "results", json_incref(b->results));
    return cli_print_json(object);
}

int bench_attention(int argc, char **argv) {
    attn_options o = {.model = model_options_default(), .codecs = default_codecs};
    cli_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    const cli_option own[] = {
        {"codecs", 0, OPTION_TEXT, &o.codecs, 0, "LIST", "(16/16,8/8,8/4,4/4,4/2); instead of --k-bits and --v-bits"}, {0}};
    const cli_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!cli_options_parse(usage, tables, argc, argv, &code)) return code;
    if (o.model.device != FKV_BACKEND_CPU)
        return cli_fail(EXIT_USAGE, "bench attn times the CPU's attention: the bench_attn program has --device mlx");
    cli_catch_interrupts();
    fkv_model *model = NULL;
    code = model_options_load(&o.model, true, &model);
    if (code != EXIT_GOOD) return code;
    attn_bench b = {.o = &o, .about = fkv_model_about(model)};
    code = work(&b);
    free(b.k);
    free(b.v);
    free(b.q);
    free(b.out);
    json_decref(b.results);
    fkv_model_close(model);
    return code;
}
