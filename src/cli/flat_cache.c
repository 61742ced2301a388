/* flatkv bench flat without a model: fills a cache as large as the cache of a complete model. The K and V rows are random. Three
 * properties are checked.
 *
 * Memory: resident memory equals the plan after open and does not change until the cache is full (memory_line.h). The system's
 * high-water mark is checked as well, because it also covers the time between samples.
 *
 * Outputs: at 16 depths, the attention outputs of decode and prefill steps are compared with attention in double precision over
 * the unquantized rows. In addition, each decode step must read exactly the packed bytes of its tokens. All layers are written
 * in every step. Except for the timed decode steps, at most one layer attends per step, because attention in all layers would
 * take hours at full size.
 *
 * Capacity: for the same number of cached tokens, a decode step takes the same time in two caches, one of which has eight times
 * the capacity of the other. The timed steps of the two caches are interleaved.
 *
 * All buffers are allocated and written before the first sample, so any increase in memory comes from the cache.
 */
#include "flat_bench.h"

#include "../kit/numbers.h"
#include "memory_line.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    STEP_TOKENS = 512,
    POOL_TOKENS = 1024, /* number of random K and V rows in the pool; each step writes consecutive rows of the pool */
    N_DEPTHS = 16,      /* number of depths at which decode steps attend in all layers; at every second depth, a prefill step also
                           attends in one layer */
    DECODES = 3,        /* number of decode steps at each depth */
    TAIL = DECODES + 1, /* number of tokens at the end of the context that are reserved for decode steps */
    N_VERIFIED = 2,     /* number of heads verified at each depth */

    CAPACITY_LAYERS = 2,
    CAPACITY_TOKENS = 4096, /* number of cached tokens in each of the two caches that are compared */
    CAPACITY_FACTOR = 8,
    CAPACITY_ROUNDS = 3,
    CAPACITY_STEPS = 400, /* number of timed steps per cache in each round */
    CAPACITY_PAIRS = CAPACITY_ROUNDS * CAPACITY_STEPS,
    OPEN_SPAN = 4 /* pages in a span of a sealed layer, as defined in docs/page_format.md */
};

/* The operating system updates the high-water mark of resident memory in batches, so the mark lags by several dozen pages per
 * core. */
static const double HIGH_WATER_SLACK = 32.0 * 1024.0 * 1024.0;
static const double CAPACITY_SLACK = 1.03;

/* Inputs and outputs of the steps, with H query heads, G KV heads and head dimension D. */
typedef struct step_data {
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint64_t seed;
    float *k;        /* [POOL_TOKENS, G, D] */
    float *v;        /* [POOL_TOKENS, G, D] */
    float *q;        /* [STEP_TOKENS, H, D] */
    float *out;      /* [STEP_TOKENS, H, D] */
    uint32_t *first; /* [tokens] for each token, the position of the first token of the step that wrote it */
    double *scores;  /* [tokens] */
} step_data;

typedef struct depth_result {
    uint32_t tokens;
    double write_ms; /* time to write STEP_TOKENS tokens to all layers, in milliseconds */
    kit_spread decode_ms;
    double decode_gb_s;
    double prefill_ms; /* attention time of one prefill step in one layer; NAN if not measured at this depth */
} depth_result;

typedef struct cache_run {
    const flat_options *o;
    const codec_choice *codec;
    uint32_t n_tokens;
    step_data data;
    fkv_plan plan;
    fkv_cache *cache;
    fkv_seq seq;
    uint32_t length;
    uint32_t attending_layer; /* counter; the next steps attend in layer attending_layer % n_layers */
    double fill_seconds;
    double open_seconds;

    memory_line line;
    uint64_t before_bytes; /* anonymous memory before the cache was opened */
    double high_water;     /* high-water mark minus before_bytes; NAN if the system does not record it */
    double *steps_ms;      /* write times of the steps since the previous depth, in milliseconds */
    size_t n_steps;
    depth_result depths[N_DEPTHS + 1];
    size_t n_depths;
    bool read_once; /* true if every decode step read exactly the packed bytes of its tokens */
    double worst_error;
} cache_run;

typedef struct capacity_result {
    double small_ms;
    double large_ms;
    double ratio; /* median ratio of decode times (large cache / small cache) over pairs of consecutive steps */
} capacity_result;

/* If `status` is a failure, prints the library's message and exits the program. */
static void require_ok(fkv_status status) {
    if (status != FKV_OK) exit(cli_fail_status(status));
}

static fkv_config cache_config(const cache_run *r, uint32_t n_layers, uint32_t tokens) {
    fkv_config c = fkv_config_default();
    c.n_layers = n_layers;
    c.layer.n_q_heads = r->data.n_q_heads;
    c.layer.n_kv_heads = r->data.n_kv_heads;
    c.layer.head_dim = r->data.head_dim;
    c.layer.k = r->codec->k;
    c.layer.v = r->codec->v;
    c.rotate = r->codec->rotate;
    c.max_tokens = tokens;
    c.max_step_tokens = STEP_TOKENS;
    c.n_threads = r->o->model.n_threads;
    c.lazy = r->o->model.lazy;
    return c;
}

/* ---- input rows ---- */

static void step_data_open(step_data *d, uint32_t n_tokens, uint64_t seed) {
    uint32_t tokens = n_tokens > CAPACITY_TOKENS ? n_tokens : CAPACITY_TOKENS;
    size_t n_kv = (size_t)POOL_TOKENS * d->n_kv_heads * d->head_dim;
    size_t n_q = (size_t)STEP_TOKENS * d->n_q_heads * d->head_dim;
    uint64_t state = d->seed = seed;
    d->k = kit_alloc(n_kv * sizeof *d->k);
    d->v = kit_alloc(n_kv * sizeof *d->v);
    d->q = kit_alloc(n_q * sizeof *d->q);
    d->out = kit_alloc(n_q * sizeof *d->out);
    d->first = kit_alloc(tokens * sizeof *d->first);
    d->scores = kit_alloc(tokens * sizeof *d->scores);
    kit_gaussian(&state, n_kv, d->k);
    kit_gaussian(&state, n_kv, d->v);
    kit_gaussian(&state, n_q, d->q);
}

static void step_data_close(step_data *d) {
    free(d->k);
    free(d->v);
    free(d->q);
    free(d->out);
    free(d->first);
    free(d->scores);
}

/* Returns the index of the first pool row that a step writes to a layer. Depends only on the seed, the step's first token and the
 * layer. */
static size_t pool_begin(const step_data *d, uint32_t first, uint32_t layer) {
    uint64_t state = d->seed ^ (uint64_t)first << 20 ^ layer;
    return (size_t)(kit_random(&state) % (POOL_TOKENS - STEP_TOKENS + 1));
}

static const float *pool_row(const step_data *d, const float *pool, uint32_t token, uint32_t layer, uint32_t head) {
    size_t row = pool_begin(d, d->first[token], layer) + (token - d->first[token]);
    return pool + (row * d->n_kv_heads + head) * d->head_dim;
}

typedef struct step_times {
    double write_ms;
    double attend_ms;
} step_times;

/* Runs one step of n tokens. Writes rows to all layers and computes attention in n_attends layers, starting with layer `from`. */
static step_times run_cache_step(fkv_cache *cache, fkv_seq seq, step_data *d, uint32_t start, uint32_t n, uint32_t n_layers,
                                 uint32_t from, uint32_t n_attends) {
    step_times times = {0};
    fkv_row row = {seq, n};
    fkv_step *step = NULL;
    for (uint32_t i = 0; i < n; i++) d->first[start + i] = start;
    require_ok(fkv_step_begin(cache, &row, 1, &step));
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        size_t begin = pool_begin(d, start, layer) * d->n_kv_heads * d->head_dim;
        double before = kit_seconds();
        require_ok(fkv_write(step, layer, d->k + begin, d->v + begin));
        double between = kit_seconds();
        times.write_ms += (between - before) * 1e3;
        if ((layer + n_layers - from) % n_layers >= n_attends) continue;
        require_ok(fkv_attend(step, layer, d->q, d->out));
        times.attend_ms += (kit_seconds() - between) * 1e3;
    }
    require_ok(fkv_step_commit(step));
    return times;
}

/* ---- verification ---- */

/* Returns the expected relative output error caused by quantizing K or V. It is approximately the root mean square error of a
 * uniform quantizer over the range of 128 Gaussian samples. */
static double quantization_error(uint32_t bits) {
    return bits == 16 ? 1e-3 : bits == 8 ? 0.007 : bits == 4 ? 0.11 : bits == 3 ? 0.25 : 0.55;
}

/* Returns the error limit: three times the combined error of K and V, but at most 0.9, because an all-zero output has an error of
 * 1. */
static double output_tolerance(const codec_choice *codec) {
    return fmin(0.9, 3 * hypot(quantization_error(codec->k.bits), quantization_error(codec->v.bits)));
}

/* Computes attention in double precision over the unquantized rows for one head of query `row`, which belongs to the last of
 * n_tokens tokens. Returns the relative L2 distance between this result and the cache's output, or infinity if the output has
 * NaNs. */
static double output_error(step_data *d, uint32_t n_tokens, uint32_t layer, uint32_t row, uint32_t head) {
    uint32_t dim = d->head_dim;
    const float *q = d->q + ((size_t)row * d->n_q_heads + head) * dim;
    const float *out = d->out + ((size_t)row * d->n_q_heads + head) * dim;
    uint32_t kv_head = head / (d->n_q_heads / d->n_kv_heads);
    double max = -INFINITY;
    for (uint32_t t = 0; t < n_tokens; t++) {
        const float *k = pool_row(d, d->k, t, layer, kv_head);
        double sum = 0;
        for (uint32_t i = 0; i < dim; i++) sum += (double)q[i] * (double)k[i];
        d->scores[t] = sum / sqrt(dim);
        max = fmax(max, d->scores[t]);
    }
    double total = 0;
    double expected[FKV_MAX_HEAD_DIM] = {0};
    for (uint32_t t = 0; t < n_tokens; t++) {
        const float *v = pool_row(d, d->v, t, layer, kv_head);
        double p = exp(d->scores[t] - max);
        total += p;
        for (uint32_t i = 0; i < dim; i++) expected[i] += p * (double)v[i];
    }
    double error = 0;
    double size = 0;
    for (uint32_t i = 0; i < dim; i++) {
        double difference = (double)out[i] - expected[i] / total;
        error += difference * difference;
        size += expected[i] / total * (expected[i] / total);
    }
    double relative = sqrt(error / size);
    return relative == relative ? relative : INFINITY;
}

static void verify_outputs(cache_run *r, uint32_t layer, uint32_t row) {
    for (uint32_t i = 0; i < N_VERIFIED; i++) {
        double error = output_error(&r->data, r->length, layer, row, (r->data.n_q_heads - 1) * i);
        r->worst_error = fmax(r->worst_error, error);
    }
}

static uint64_t packed_bytes_read(const cache_run *r) {
    fkv_stats stats;
    require_ok(fkv_cache_stats(r->cache, &stats));
    return stats.packed_bytes_read;
}

/* Returns the number of packed bytes that a decode step must read. In a sealed layer, the first page and the pages in the span of
 * the current token are read in open form. The last group of the plan contains the open pages. */
static uint64_t visible_bytes(const cache_run *r) {
    uint32_t page = fkv_config_default().page_tokens;
    if (r->codec->k.kind != FKV_CODEC_SEALED) return r->plan.token_bytes * r->length;
    uint32_t own = (r->length - 1) % (OPEN_SPAN * page) + 1;
    uint32_t n_open = own == r->length ? own : page + own;
    uint64_t open_bytes = r->plan.group_page_bytes[r->plan.n_groups - 1] / page;
    return open_bytes * n_open + r->plan.token_bytes * (r->length - n_open);
}

/* ---- filling ---- */

static step_times advance(cache_run *r, uint32_t n, uint32_t from, uint32_t n_attends, progress_bar *progress) {
    step_times times = run_cache_step(r->cache, r->seq, &r->data, r->length, n, r->o->layers, from, n_attends);
    r->length += n;
    memory_line_add(&r->line, r->length);
    progress_add(progress, n);
    return times;
}

/* Times decode steps that attend in all layers, and verifies the attention output of the last layer. */
static void measure_depth(cache_run *r, double prefill_ms, progress_bar *progress) {
    depth_result *d = &r->depths[r->n_depths++];
    double ms[DECODES];
    double rates[DECODES];
    for (int i = 0; i < DECODES; i++) {
        uint64_t before = packed_bytes_read(r);
        step_times times = advance(r, 1, 0, r->o->layers, progress);
        uint64_t read = packed_bytes_read(r) - before;
        ms[i] = times.write_ms + times.attend_ms;
        rates[i] = (double)read / times.attend_ms * 1e-6;
        r->read_once = r->read_once && read == visible_bytes(r);
    }
    *d = (depth_result){.tokens = r->length, .prefill_ms = prefill_ms, .write_ms = kit_spread_of(r->steps_ms, r->n_steps).p50};
    d->decode_ms = kit_spread_of(ms, DECODES);
    d->decode_gb_s = kit_spread_of(rates, DECODES).p50;
    verify_outputs(r, r->o->layers - 1, 0);
    r->n_steps = 0;
}

/* Returns the number of tokens in the next step. Steps have STEP_TOKENS tokens as long as enough tokens for two such steps
 * remain. The remaining tokens are divided into one or two steps. */
static uint32_t next_step(uint32_t room) { return room <= STEP_TOKENS ? room : room < 2 * STEP_TOKENS ? room / 2 : STEP_TOKENS; }

static void fill_cache(cache_run *r) {
    uint32_t n_layers = r->o->layers;
    uint32_t n_passed = 0; /* depths */
    progress_bar progress = progress_begin("filling", 0, r->n_tokens);
    while (r->length < r->n_tokens) {
        uint32_t room = r->n_tokens - TAIL - r->length;
        uint32_t n = next_step(room);
        bool last = n == room;
        bool at_depth = last || (uint64_t)(r->length + n) * N_DEPTHS >= (uint64_t)r->n_tokens * (n_passed + 1);
        bool chunk_attends = last || (at_depth && r->n_depths % 2 == 1);
        uint32_t layer = r->attending_layer++ % n_layers;
        step_times times = advance(r, n, layer, chunk_attends ? 1 : 0, &progress);
        if (chunk_attends) verify_outputs(r, layer, n - 1);
        r->steps_ms[r->n_steps++] = times.write_ms;
        (void)advance(r, 1, layer, 1, &progress);
        if (!at_depth) continue;
        measure_depth(r, chunk_attends ? times.attend_ms : NAN, &progress);
        n_passed = (uint32_t)((uint64_t)r->length * N_DEPTHS / r->n_tokens);
    }
    r->fill_seconds = kit_seconds() - progress.start;
    progress_end(&progress);
    uint64_t peak = process_memory_peak();
    process_memory now = {0};
    bool known = process_memory_now(&now) && peak > 0;
    r->high_water = known ? (double)peak - (double)now.file_bytes - (double)r->before_bytes : NAN;
}

/* ---- capacity ---- */

typedef struct capacity_lane {
    fkv_cache *cache;
    fkv_seq seq;
    double ms[CAPACITY_PAIRS];
} capacity_lane;

static void lane_open(capacity_lane *l, cache_run *r, uint32_t max_tokens) {
    fkv_config config = cache_config(r, CAPACITY_LAYERS, max_tokens);
    fkv_seq_config seq = {.max_tokens = max_tokens};
    require_ok(fkv_cache_open(&config, &l->cache));
    require_ok(fkv_seq_open(l->cache, &seq, &l->seq, NULL));
    for (uint32_t at = 0; at < CAPACITY_TOKENS - 1;) {
        uint32_t room = CAPACITY_TOKENS - 1 - at;
        uint32_t n = room < STEP_TOKENS ? room : STEP_TOKENS;
        (void)run_cache_step(l->cache, l->seq, &r->data, at, n, CAPACITY_LAYERS, 0, 0);
        at += n;
    }
}

/* Times the decode step that appends token number CAPACITY_TOKENS, then truncates the sequence to remove that token. */
static double lane_decode(capacity_lane *l, step_data *d) {
    double start = kit_seconds();
    (void)run_cache_step(l->cache, l->seq, d, CAPACITY_TOKENS - 1, 1, CAPACITY_LAYERS, 0, CAPACITY_LAYERS);
    double ms = (kit_seconds() - start) * 1e3;
    require_ok(fkv_seq_truncate(l->cache, l->seq, CAPACITY_TOKENS - 1));
    return ms;
}

static capacity_result compare_capacities(cache_run *r) {
    static capacity_lane small;
    static capacity_lane large;
    static double ratios[CAPACITY_PAIRS];
    for (int round = 0; round < CAPACITY_ROUNDS; round++) {
        lane_open(&small, r, CAPACITY_TOKENS);
        lane_open(&large, r, CAPACITY_TOKENS * CAPACITY_FACTOR);
        for (int i = 0; i < CAPACITY_STEPS / 8; i++) { /* warm-up */
            (void)lane_decode(&small, &r->data);
            (void)lane_decode(&large, &r->data);
        }
        for (int i = round * CAPACITY_STEPS; i < (round + 1) * CAPACITY_STEPS; i++) { /* the order of the two caches alternates */
            if (i % 2 == 0) small.ms[i] = lane_decode(&small, &r->data);
            large.ms[i] = lane_decode(&large, &r->data);
            if (i % 2 == 1) small.ms[i] = lane_decode(&small, &r->data);
            ratios[i] = large.ms[i] / small.ms[i];
        }
        fkv_cache_close(small.cache);
        fkv_cache_close(large.cache);
    }
    return (capacity_result){.small_ms = kit_spread_of(small.ms, CAPACITY_PAIRS).p50,
                             .large_ms = kit_spread_of(large.ms, CAPACITY_PAIRS).p50,
                             .ratio = kit_spread_of(ratios, CAPACITY_PAIRS).p50};
}

/* ---- report ---- */

/* Returns the planned size, in bytes, of all pages of a 16-bit cache with the same shape as the benchmark's cache. */
static double shape_pages_16bit(const void *user, uint32_t tokens) {
    const cache_run *r = user;
    fkv_plan plan;
    fkv_config wide = cache_config(r, r->o->layers, tokens);
    wide.layer.k = wide.layer.v = (fkv_codec_config){.bits = 16};
    wide.rotate = FKV_ROTATE_NONE;
    return tokens > 0 && fkv_plan_make(&wide, &plan) == FKV_OK ? (double)plan.slab_bytes : 0;
}

static bool has_no_spike(const cache_run *r, const memory_verdict *v) {
    return isnan(r->high_water) || r->high_water <= fmax(v->open_bytes, r->line.plan_bytes) + HIGH_WATER_SLACK;
}

static void print_depths(const cache_run *r) {
    printf("%10s %12s %12s %10s %12s\n%10s %12s %12s %10s %12s\n", "", "write 512", "decode", "packed", "prefill 512", "tokens",
           "ms", "ms/token", "GB/s", "ms/layer");
    for (size_t i = 0; i < r->n_depths; i++) {
        const depth_result *d = &r->depths[i];
        printf("%10u %12.1f %12.1f %10.2f", d->tokens, d->write_ms, d->decode_ms.p50, d->decode_gb_s);
        if (isnan(d->prefill_ms))
            printf(" %12s\n", "-");
        else
            printf(" %12.0f\n", d->prefill_ms);
    }
    putchar('\n');
}

static void report_text(const cache_run *r, const memory_comparison *wide, const memory_verdict *v, const capacity_result *c) {
    char name[CODEC_NAME];
    char a[32];
    const step_data *d = &r->data;
    double tolerance = output_tolerance(r->codec);
    printf("%u layers, %u query heads, %u KV heads, head dimension %u, %s, %u tokens, %u threads\n\n", r->o->layers, d->n_q_heads,
           d->n_kv_heads, d->head_dim, codec_name(r->codec, name), r->n_tokens, r->plan.n_threads);
    print_depths(r);
    printf("%-26s %12.1e  relative L2 distance to unquantized attention, limit %.1e: %s\n", "largest output error",
           r->worst_error, tolerance, r->worst_error <= tolerance ? "good" : "WRONG");
    printf("%-26s %12s  %llu bytes per cached token in each decode step\n", "packed bytes read",
           r->read_once ? "once" : "NOT ONCE", (unsigned long long)r->plan.token_bytes);
    if (c != NULL)
        printf("%-26s %12.3f  decode step with %d cached tokens: %.3f ms at capacity %d, %.3f ms at %d; limit %.2f: %s\n",
               "capacity ratio", c->ratio, CAPACITY_TOKENS, c->small_ms, CAPACITY_TOKENS, c->large_ms,
               CAPACITY_TOKENS * CAPACITY_FACTOR, CAPACITY_SLACK, c->ratio <= CAPACITY_SLACK ? "good" : "FAILED");
    printf("%-26s %10.1f s  and %.1f s to open\n", "time", r->fill_seconds, r->open_seconds);
    if (!isnan(r->high_water))
        printf("%-26s %12s  recorded by the system%s\n", "high-water mark", kit_bytes((uint64_t)fmax(0, r->high_water), a),
               has_no_spike(r, v) ? "" : "  ABOVE THE PLAN");
    memory_verdict_print(&r->line, wide, v);
}

static void depths_json(const cache_run *r, kit_json *json) {
    kit_json_array(json, "depths");
    for (size_t i = 0; i < r->n_depths; i++) {
        const depth_result *d = &r->depths[i];
        kit_json_object(json, NULL);
        kit_json_integer(json, "tokens", d->tokens);
        kit_json_real(json, "step_ms", d->write_ms);
        kit_json_real(json, "decode_ms", d->decode_ms.p50);
        kit_json_real(json, "decode_packed_gb_s", d->decode_gb_s);
        kit_json_real(json, "prefill_layer_ms", d->prefill_ms);
        kit_json_close(json);
    }
    kit_json_close(json);
}

static int report_cache_json(const cache_run *r, const memory_verdict *v, const capacity_result *c) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "version", fkv_version());
    kit_json_integer(json, "layers", r->o->layers);
    kit_json_integer(json, "q_heads", r->data.n_q_heads);
    kit_json_integer(json, "kv_heads", r->data.n_kv_heads);
    kit_json_integer(json, "head_dim", r->data.head_dim);
    codec_json(r->codec, json);
    kit_json_integer(json, "threads", r->plan.n_threads);
    kit_json_integer(json, "seed", r->o->model.seed);
    kit_json_bool(json, "lazy", r->o->model.lazy);
    kit_json_integer(json, "tokens", r->length);
    kit_json_integer(json, "token_bytes", r->plan.token_bytes);
    memory_verdict_json(&r->line, v, json);
    if (!isnan(r->high_water)) kit_json_integer(json, "high_water_bytes", (uint64_t)fmax(0, r->high_water));
    kit_json_bool(json, "within_plan", v->is_plan && has_no_spike(r, v));
    kit_json_real(json, "output_error_l2", r->worst_error);
    kit_json_bool(json, "packed_bytes_read_once", r->read_once);
    kit_json_real(json, "open_s", r->open_seconds);
    kit_json_real(json, "fill_s", r->fill_seconds);
    if (c != NULL) {
        kit_json_real(json, "capacity_ratio", c->ratio);
        kit_json_real(json, "capacity_small_ms", c->small_ms);
        kit_json_real(json, "capacity_large_ms", c->large_ms);
    }
    depths_json(r, json);
    memory_line_samples_json(&r->line, json);
    return kit_json_print(json);
}

/* ---- command ---- */

static int read_cache_shape(cache_run *r) {
    static const uint32_t max[3] = {65535, 65535, FKV_MAX_HEAD_DIM};
    const model_options *m = &r->o->model;
    uint32_t heads[3];
    if (r->o->layers == 0 || r->o->heads == NULL) return kit_fail(EXIT_USAGE, "--layers and --heads must be given together");
    if (!kit_numbers(r->o->heads, '/', max, heads, 3) || heads[0] % heads[1] != 0)
        return kit_fail(
            EXIT_USAGE,
            "--heads %s: expected query heads, KV heads and head dimension, such as 32/8/128; the number of query heads "
            "must be a multiple of the number of KV heads",
            r->o->heads);
    if (m->device != FKV_BACKEND_CPU) return kit_fail(EXIT_USAGE, "--layers and --heads are supported only with --device cpu");
    if (r->codec->k.kind == FKV_CODEC_CALIBRATED)
        return kit_fail(EXIT_USAGE, "--codecs calibrated needs a model: use -m instead of --layers and --heads");
    if (m->max_kv != 0) return kit_fail(EXIT_USAGE, "--max-kv needs a model: use -m instead of --layers and --heads");
    r->n_tokens = m->context != 0 ? m->context : 131072;
    if (r->n_tokens < 2 * STEP_TOKENS)
        return kit_fail(EXIT_USAGE, "-c must be at least %d for bench flat without a model (got %u)", 2 * STEP_TOKENS,
                        r->n_tokens);
    r->data.n_q_heads = heads[0];
    r->data.n_kv_heads = heads[1];
    r->data.head_dim = heads[2];
    return EXIT_GOOD;
}

static int open_measured_cache(cache_run *r) {
    fkv_config config = cache_config(r, r->o->layers, r->n_tokens);
    fkv_seq_config seq = {.max_tokens = r->n_tokens};
    config.memory_limit = r->o->model.memory;
    require_ok(fkv_plan_make(&config, &r->plan));
    size_t n_samples = r->n_tokens / 64 + 256; /* capacity for two samples per step and several samples per depth */
    step_data_open(&r->data, r->n_tokens, r->o->model.seed);
    r->steps_ms = kit_alloc(n_samples * sizeof *r->steps_ms);
    r->read_once = true;
    int code = memory_line_begin(&r->line, FKV_BACKEND_CPU, n_samples);
    if (code != EXIT_GOOD) return code;
    process_memory before = {0};
    (void)process_memory_now(&before);
    r->before_bytes = before.anonymous_bytes;
    r->line.plan_bytes = r->line.held_bytes = (double)r->plan.total_bytes;
    double start = kit_seconds();
    require_ok(fkv_cache_open(&config, &r->cache));
    r->open_seconds = kit_seconds() - start;
    memory_line_add(&r->line, 0);
    require_ok(fkv_seq_open(r->cache, &seq, &r->seq, NULL));
    return EXIT_GOOD;
}

static int draw_cache_line(const cache_run *r, const memory_comparison *wide) {
    char subtitle[200];
    char name[CODEC_NAME];
    (void)snprintf(subtitle, sizeof subtitle,
                   "%u layers, %u query heads, %u KV heads, head dimension %u; %u tokens, %s; steps of %d%s", r->o->layers,
                   r->data.n_q_heads, r->data.n_kv_heads, r->data.head_dim, r->n_tokens, codec_name(r->codec, name), STEP_TOKENS,
                   r->o->model.lazy ? "; lazy" : "");
    return memory_line_draw(&r->line, wide, subtitle, r->o->svg);
}

int flat_cache_run(const flat_options *o) {
    static cache_run r;
    r = (cache_run){.o = o, .codec = &o->model.codecs.codecs[0]};
    int code = read_cache_shape(&r);
    if (code == EXIT_GOOD) code = open_measured_cache(&r);
    if (code != EXIT_GOOD) return code;
    fill_cache(&r);
    memory_verdict v = memory_line_judge(&r.line, o->model.lazy);
    fkv_cache_close(r.cache);
    capacity_result capacity = {.ratio = 0};
    if (!o->skip_capacity) capacity = compare_capacities(&r);
    const capacity_result *c = o->skip_capacity ? NULL : &capacity;
    const memory_comparison wide = {
        .pages_16bit = shape_pages_16bit, .user = &r, .n_q_heads = r.data.n_q_heads, .chunk = STEP_TOKENS};
    if (o->svg != NULL) code = draw_cache_line(&r, &wide);
    if (o->model.json && code == EXIT_GOOD) code = report_cache_json(&r, &v, c);
    if (!o->model.json) report_text(&r, &wide, &v, c);
    bool good = v.flat && has_no_spike(&r, &v) && r.read_once && r.worst_error <= output_tolerance(r.codec) &&
                capacity.ratio <= CAPACITY_SLACK;
    memory_line_free(&r.line);
    step_data_close(&r.data);
    free(r.steps_ms);
    return code == EXIT_GOOD && !good ? EXIT_FAILED : code;
}
