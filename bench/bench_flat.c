/* bench_flat: the process takes what the plan says when the cache opens, and not a byte more until it is full.
 *
 * The line: a cache of a whole model's shape is filled to its last token while the resident memory of the process is sampled
 * after every step. It fails where the memory after open is not the plan's, where any later sample is higher, where the end is
 * not where the start was, or where what comes out of attention is not what was put in.
 *
 * The capacity: two caches hold the same history, one has eight times the room; a decode step must take the same time in both.
 * One verdict over all rounds, each with caches opened afresh; nothing is tried again.
 *
 * Sees flatkv as any program does, through the public header. Every buffer of its own is taken and touched before the first
 * sample, so what is measured beyond that sample is the cache.
 */
#include "bench_util.h"

#include "../src/kit/plot.h"

#include <flatkv/flatkv.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char PROGRAM[] = "bench_flat";

enum {
    H = 32, /* query heads */
    G = 8,  /* KV heads */
    D = 128,
    STEP_TOKENS = 512,
    POOL_TOKENS = 1024, /* K and V rows to draw from */
    N_DEPTHS = 16,      /* where a decode step attends in every layer; at every second one a whole chunk attends in one */
    DECODES = 3,        /* such steps at each depth */
    TAIL = DECODES + 1, /* tokens left for decode steps at the very end */
    N_VERIFIED = 2,     /* heads held against plain attention at each depth */

    CAPACITY_LAYERS = 2,
    CAPACITY_TOKENS = 4096, /* used in both caches */
    CAPACITY_FACTOR = 8,
    CAPACITY_ROUNDS = 3,
    CAPACITY_STEPS = 400, /* timed in each cache and round */
    CAPACITY_PAIRS = CAPACITY_ROUNDS * CAPACITY_STEPS,
    OPEN_SPAN = 4 /* pages: docs/page_format.md */
};

/* After open, at the end and in between: the same, up to what a process may touch of its own (stdio, a deeper stack). */
static const double FLAT_SLACK = 1024.0 * 1024.0;
static const double PLAN_SLACK = 0.01;
/* The system's own high-water mark is kept by counters that lag by some dozens of pages for each core. */
static const double HIGH_WATER_SLACK = 32.0 * 1024.0 * 1024.0;
static const double CAPACITY_SLACK = 1.03;

enum { ATTEND_SAMPLED, ATTEND_FULL };

typedef struct options {
    uint32_t tokens;
    uint32_t layers;
    const char *codecs;
    fkv_codec_config k; /* as `codecs` names them */
    fkv_codec_config v;
    uint32_t threads;
    uint32_t seed;
    bool lazy;
    int attend; /* ATTEND_SAMPLED, ATTEND_FULL */
    bool skip_capacity;
    const char *svg;
    bool json;
} options;

/* Numbers of the process's own, taken before anything is measured. */
typedef struct feed {
    uint64_t seed;
    float *k;        /* [POOL_TOKENS, G, D] */
    float *v;        /* [POOL_TOKENS, G, D] */
    float *q;        /* [STEP_TOKENS, H, D] */
    float *out;      /* [STEP_TOKENS, H, D] */
    uint32_t *first; /* [tokens]: the first token of the step that wrote this one */
    double *scores;  /* [tokens] */
} feed;

typedef struct depth {
    uint32_t tokens;
    double write_ms; /* a step of STEP_TOKENS, all layers */
    kit_spread decode_ms;
    double decode_gb_s;
    double prefill_ms; /* one layer, a whole step of queries; NAN: not here */
} depth;

typedef struct run {
    const options *options;
    FILE *text;
    feed feed;
    fkv_plan plan;
    fkv_cache *cache;
    fkv_seq seq;
    uint32_t length;
    uint32_t turn;  /* of the layers that attend one at a time */
    double seconds; /* of the whole fill */
    double open_seconds;

    process_memory before;
    double *sample_tokens;
    double *sample_bytes; /* anonymous, beyond `before` */
    size_t n_samples;
    double *steps_ms; /* writes of the steps since the last depth */
    size_t n_steps;
    depth depths[N_DEPTHS + 1];
    size_t n_depths;
    double high_water; /* beyond `before` as well; NAN: the system does not keep one */
    bool read_once;    /* a decode step read exactly the packed bytes of its tokens: seen_bytes() */
    double worst_error;
} run;

typedef struct capacity {
    bool done;
    double small_ms;
    double large_ms;
    double ratio; /* median of neighbours' ratios: two steps in a row see the same machine, two medians may not */
} capacity;

/* ---- options ---- */

static const char usage[] =
    "usage: bench_flat [options]\n"
    "Fills a cache of a whole model's shape (32 query heads, 8 KV heads, head dimension 128) to its last token and shows\n"
    "that the process holds what the plan said, from open to the end. Then: decode time does not follow the capacity.\n"
    "Exit status: 0 flat, 1 not flat or a result was wrong, 2 wrong usage, 3 not enough memory.\n";

static void parse(options *o, int argc, char **argv) {
    const kit_option own[] = {
        {"tokens", 0, OPTION_COUNT, &o->tokens, 1u << 26, "N", "capacity (default 131072)"},
        {"layers", 0, OPTION_COUNT, &o->layers, FKV_MAX_LAYERS, "N", "(default 32)"},
        {"codecs", 0, OPTION_TEXT, &o->codecs, 0, "NAME", "how pages are stored, as 8/4, sealed, tq4 or 4/4g32 (default 8/4)"},
        {"threads", 0, OPTION_COUNT, &o->threads, 256, "N", "(default: one for each core)"},
        {"lazy", 0, OPTION_FLAG, &o->lazy, 0, NULL,
         "take memory for pages when they are first written: it grows to the plan instead of starting there"},
        {"attend", 0, OPTION_CHOICE, &o->attend, 0, "sampled|full",
         "sampled: every step of 512 writes all layers; after each, one decode step attends in\n"
         "one layer; at 16 depths decode steps attend in all layers, and at half of them a chunk\n"
         "of 512 queries attends in one layer (about two minutes on two cores)\n"
         "full: every step attends in every layer, as a model does (hours at full size)"},
        {"skip-capacity", 0, OPTION_FLAG, &o->skip_capacity, 0, NULL, "leave out the two caches of different capacity"},
        {"svg", 0, OPTION_TEXT, &o->svg, 0, "FILE", "the picture (default flat.svg)"},
        {"seed", 0, OPTION_U32, &o->seed, UINT32_MAX, "N", "random seed of the rows (default 1)"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    if (fkv_codec_parse(o->codecs, &o->k, &o->v) != FKV_OK) kit_die(EXIT_USAGE, "--codecs: %s", fkv_message());
    if (o->tokens < 2 * STEP_TOKENS) kit_die(EXIT_USAGE, "--tokens %u: at least %d are needed", o->tokens, 2 * STEP_TOKENS);
}

/* The sides whose codecs are made for rotated rows. */
static fkv_rotate rotation_of(const options *o) {
    fkv_codec_info k = {0};
    fkv_codec_info v = {0};
    (void)fkv_codec_about(o->k, &k);
    (void)fkv_codec_about(o->v, &v);
    return (fkv_rotate)((k.needs_rotation ? FKV_ROTATE_K : 0u) | (v.needs_rotation ? FKV_ROTATE_V : 0u));
}

static fkv_config make_config(const options *o, uint32_t n_layers, uint32_t tokens) {
    fkv_config c = fkv_config_default();
    c.n_layers = n_layers;
    c.layer.n_q_heads = H;
    c.layer.n_kv_heads = G;
    c.layer.head_dim = D;
    c.layer.k = o->k;
    c.layer.v = o->v;
    c.rotate = rotation_of(o);
    c.max_tokens = tokens;
    c.max_step_tokens = STEP_TOKENS;
    c.n_threads = o->threads;
    c.lazy = o->lazy;
    return c;
}

/* Every call must succeed; one that does not ends the program with the library's words. */
static void must(fkv_status status) {
    if (status == FKV_OK) return;
    int code = EXIT_FAILED;
    if (status == FKV_NO_MEMORY) code = EXIT_NO_FIT;
    if (status == FKV_BAD_CONFIG) code = EXIT_USAGE;
    kit_die(code, "%s: %s", fkv_status_name(status), fkv_message());
}

/* ---- rows in ---- */

static void feed_open(feed *f, const options *o) {
    uint32_t tokens = o->tokens > CAPACITY_TOKENS ? o->tokens : CAPACITY_TOKENS;
    size_t n_kv = (size_t)POOL_TOKENS * G * D;
    size_t n_q = (size_t)STEP_TOKENS * H * D;
    uint64_t state = f->seed = o->seed;
    f->k = bench_take(n_kv * sizeof *f->k);
    f->v = bench_take(n_kv * sizeof *f->v);
    f->q = bench_take(n_q * sizeof *f->q);
    f->out = bench_take(n_q * sizeof *f->out);
    f->first = bench_take(tokens * sizeof *f->first);
    f->scores = bench_take(tokens * sizeof *f->scores);
    kit_gaussian(&state, n_kv, f->k);
    kit_gaussian(&state, n_kv, f->v);
    kit_gaussian(&state, n_q, f->q);
}

/* Where in the pool the rows of a step begin: drawn from its first token and the layer. */
static size_t pool_begin(const feed *f, uint32_t first, uint32_t layer) {
    uint64_t state = f->seed ^ (uint64_t)first << 20 ^ layer;
    return (size_t)(kit_random(&state) % (POOL_TOKENS - STEP_TOKENS + 1));
}

static const float *pool_row(const feed *f, const float *pool, uint32_t token, uint32_t layer, uint32_t head) {
    size_t row = pool_begin(f, f->first[token], layer) + (token - f->first[token]);
    return pool + (row * G + head) * D;
}

typedef struct step_times {
    double write_ms;
    double attend_ms;
} step_times;

/* One step of n tokens on one sequence: every layer is written, n_attends layers beginning with `from` attend. */
static step_times take_step(fkv_cache *cache, fkv_seq seq, feed *f, uint32_t start, uint32_t n, uint32_t n_layers, uint32_t from,
                            uint32_t n_attends) {
    step_times times = {0};
    fkv_row row = {seq, n};
    fkv_step *step = NULL;
    for (uint32_t i = 0; i < n; i++) f->first[start + i] = start;
    must(fkv_step_begin(cache, &row, 1, &step));
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        size_t begin = pool_begin(f, start, layer) * G * D;
        double before = kit_seconds();
        must(fkv_write(step, layer, f->k + begin, f->v + begin));
        double between = kit_seconds();
        times.write_ms += (between - before) * 1e3;
        if ((layer + n_layers - from) % n_layers >= n_attends) continue;
        must(fkv_attend(step, layer, f->q, f->out));
        times.attend_ms += (kit_seconds() - between) * 1e3;
    }
    must(fkv_step_commit(step));
    return times;
}

/* ---- what comes out ---- */

/* What a side stored in so many bits may add to the error of the output, relative to it: about the root mean square error of a
 * uniform code over the range of a group of 128 Gaussian numbers. */
static double bits_error(uint32_t bits) {
    return bits == 16 ? 1e-3 : bits == 8 ? 0.007 : bits == 4 ? 0.11 : bits == 3 ? 0.25 : 0.55;
}

/* Three times what both sides may add, and always less than an output of zeros would have. */
static double output_tolerance(const options *o) { return fmin(0.9, 3 * hypot(bits_error(o->k.bits), bits_error(o->v.bits))); }

/* Plain attention, in double and over the rows as they were before packing, of one head of row `row` of the step, whose token is
 * the last of n_tokens. Returns the relative L2 distance of what the cache gave; not a number counts as infinitely far. */
static double output_error(feed *f, uint32_t n_tokens, uint32_t layer, uint32_t row, uint32_t head) {
    const float *q = f->q + ((size_t)row * H + head) * D;
    const float *out = f->out + ((size_t)row * H + head) * D;
    uint32_t kv_head = head / (H / G);
    double max = -INFINITY;
    for (uint32_t t = 0; t < n_tokens; t++) {
        const float *k = pool_row(f, f->k, t, layer, kv_head);
        double sum = 0;
        for (int d = 0; d < D; d++) sum += (double)q[d] * (double)k[d];
        f->scores[t] = sum / sqrt(D);
        max = fmax(max, f->scores[t]);
    }
    double total = 0;
    double expected[D] = {0};
    for (uint32_t t = 0; t < n_tokens; t++) {
        const float *v = pool_row(f, f->v, t, layer, kv_head);
        double p = exp(f->scores[t] - max);
        total += p;
        for (int d = 0; d < D; d++) expected[d] += p * (double)v[d];
    }
    double error = 0;
    double size = 0;
    for (int d = 0; d < D; d++) {
        double difference = (double)out[d] - expected[d] / total;
        error += difference * difference;
        size += expected[d] / total * (expected[d] / total);
    }
    double relative = sqrt(error / size);
    return relative == relative ? relative : INFINITY;
}

/* ---- the line ---- */

static void sample(run *r) {
    process_memory now = bench_memory_now();
    r->sample_tokens[r->n_samples] = r->length;
    r->sample_bytes[r->n_samples++] = (double)now.anonymous_bytes - (double)r->before.anonymous_bytes;
}

static void progress(const run *r) {
    char bytes[BENCH_TEXT];
    if (!isatty(STDERR_FILENO)) return;
    (void)fprintf(stderr, "\r%9u of %u tokens, %s resident ", r->length, r->options->tokens,
                  bench_bytes(r->sample_bytes[r->n_samples - 1], bytes));
}

static step_times advance(run *r, uint32_t n, uint32_t from, uint32_t n_attends) {
    step_times times = take_step(r->cache, r->seq, &r->feed, r->length, n, r->options->layers, from, n_attends);
    r->length += n;
    sample(r);
    return times;
}

static void verify(run *r, uint32_t layer, uint32_t row) {
    for (uint32_t i = 0; i < N_VERIFIED; i++) {
        double error = output_error(&r->feed, r->length, layer, row, (H - 1) * i);
        r->worst_error = fmax(r->worst_error, error);
    }
}

static uint64_t packed_read(const run *r) {
    fkv_stats stats;
    must(fkv_cache_stats(r->cache, &stats));
    return stats.packed_bytes_read;
}

/* Bytes of the tokens that a decode step sees. Of a sealed layer the first page and the own span are in the open form, which has
 * a group of pages of its own, the last. */
static uint64_t seen_bytes(const run *r) {
    uint32_t page = fkv_config_default().page_tokens;
    if (r->options->k.kind != FKV_CODEC_SEALED) return r->plan.token_bytes * r->length;
    uint32_t own = (r->length - 1) % (OPEN_SPAN * page) + 1;
    uint32_t n_open = own == r->length ? own : page + own;
    uint64_t open_bytes = r->plan.group_page_bytes[r->plan.n_groups - 1] / page;
    return open_bytes * n_open + r->plan.token_bytes * (r->length - n_open);
}

/* Decode steps over all layers, timed, and the last layer's output checked. */
static void visit_depth(run *r, double prefill_ms) {
    depth *d = &r->depths[r->n_depths++];
    uint32_t n_layers = r->options->layers;
    double ms[DECODES];
    double rates[DECODES];
    for (int i = 0; i < DECODES; i++) {
        uint64_t before = packed_read(r);
        step_times times = advance(r, 1, 0, n_layers);
        uint64_t read = packed_read(r) - before;
        ms[i] = times.write_ms + times.attend_ms;
        rates[i] = (double)read / times.attend_ms * 1e-6;
        r->read_once = r->read_once && read == seen_bytes(r);
    }
    *d = (depth){.tokens = r->length, .prefill_ms = prefill_ms, .write_ms = kit_spread_of(r->steps_ms, r->n_steps).p50};
    d->decode_ms = kit_spread_of(ms, DECODES);
    d->decode_gb_s = kit_spread_of(rates, DECODES).p50;
    verify(r, n_layers - 1, 0);
    r->n_steps = 0;

    char bytes[BENCH_TEXT];
    if (isatty(STDERR_FILENO)) (void)fprintf(stderr, "\r%60s\r", "");
    (void)fprintf(r->text, "%10u %13s %12.1f %12.1f %10.2f", r->length, bench_bytes(r->sample_bytes[r->n_samples - 1], bytes),
                  d->write_ms, d->decode_ms.p50, d->decode_gb_s);
    if (isnan(prefill_ms))
        (void)fprintf(r->text, " %12s", "-");
    else
        (void)fprintf(r->text, " %12.0f", prefill_ms);
    (void)fputc('\n', r->text);
    (void)fflush(r->text);
}

/* Tokens of the next step: a whole one where there is room for it and the decode steps behind it. */
static uint32_t next_step(uint32_t room) { return room <= STEP_TOKENS ? room : room < 2 * STEP_TOKENS ? room / 2 : STEP_TOKENS; }

static void fill(run *r) {
    const options *o = r->options;
    uint32_t n_passed = 0; /* depths */
    double start = kit_seconds();
    while (r->length < o->tokens) {
        uint32_t room = o->tokens - TAIL - r->length;
        uint32_t n = next_step(room);
        bool last = n == room;
        bool at_depth = last || (uint64_t)(r->length + n) * N_DEPTHS >= (uint64_t)o->tokens * (n_passed + 1);
        bool chunk_attends = o->attend == ATTEND_FULL || last || (at_depth && r->n_depths % 2 == 1);
        uint32_t from = o->attend == ATTEND_FULL ? 0 : r->turn++ % o->layers;
        uint32_t n_attends = o->attend == ATTEND_FULL ? o->layers : 1;
        step_times times = advance(r, n, from, chunk_attends ? n_attends : 0);
        if (chunk_attends && at_depth) verify(r, (from + n_attends - 1) % o->layers, n - 1);
        r->steps_ms[r->n_steps++] = times.write_ms;
        (void)advance(r, 1, from, n_attends);
        progress(r);
        if (!at_depth) continue;
        visit_depth(r, chunk_attends ? times.attend_ms / n_attends : NAN);
        n_passed = (uint32_t)((uint64_t)r->length * N_DEPTHS / o->tokens);
    }
    r->seconds = kit_seconds() - start;
    uint64_t peak = process_memory_peak();
    process_memory now = bench_memory_now();
    r->high_water = peak > 0 ? (double)peak - (double)now.file_bytes - (double)r->before.anonymous_bytes : NAN;
}

/* ---- the verdict ---- */

typedef struct verdict {
    double open_bytes;
    double end_bytes;
    double peak_bytes;
    bool is_plan;     /* after open: within PLAN_SLACK of the plan */
    bool stays;       /* the end is where open was, and nothing in between was higher */
    bool within_plan; /* never above it */
    bool right;       /* outputs, and the packed bytes read for them */
    bool good;
} verdict;

static verdict judge(const run *r) {
    double plan = (double)r->plan.total_bytes;
    double plan_slack = fmax(PLAN_SLACK * plan, FLAT_SLACK);
    verdict v = {.open_bytes = r->sample_bytes[0], .end_bytes = r->sample_bytes[r->n_samples - 1]};
    for (size_t i = 0; i < r->n_samples; i++) v.peak_bytes = fmax(v.peak_bytes, r->sample_bytes[i]);
    bool no_spike = isnan(r->high_water) || r->high_water <= fmax(v.open_bytes, plan) + HIGH_WATER_SLACK;
    v.is_plan = fabs(v.open_bytes - plan) <= plan_slack;
    v.stays = fabs(v.end_bytes - v.open_bytes) <= FLAT_SLACK && v.peak_bytes <= v.open_bytes + FLAT_SLACK && no_spike;
    v.within_plan = v.peak_bytes <= plan + plan_slack && no_spike;
    v.right = r->read_once && r->worst_error <= output_tolerance(r->options);
    v.good = v.right && (r->options->lazy ? v.within_plan : v.is_plan && v.stays);
    return v;
}

static void print_verdict(const run *r, const verdict *v) {
    char a[BENCH_TEXT];
    char b[BENCH_TEXT];
    double plan = (double)r->plan.total_bytes;
    (void)fprintf(r->text, "\n%-22s %14s\n", "planned", bench_bytes(plan, a));
    (void)fprintf(r->text, "%-22s %14s  %+.3f %% of the plan%s\n", "resident after open", bench_bytes(v->open_bytes, a),
                  (v->open_bytes / plan - 1) * 100, v->is_plan || r->options->lazy ? "" : "  NOT THE PLAN");
    (void)fprintf(r->text, "%-22s %14s  %s from open\n", "resident at the end", bench_bytes(v->end_bytes, a),
                  bench_bytes(v->end_bytes - v->open_bytes, b));
    (void)fprintf(r->text, "%-22s %14s  the highest of %zu samples, %s above open\n", "peak", bench_bytes(v->peak_bytes, a),
                  r->n_samples, bench_bytes(v->peak_bytes - v->open_bytes, b));
    if (!isnan(r->high_water))
        (void)fprintf(r->text, "%-22s %14s  as the system kept it, between samples too\n", "high-water mark",
                      bench_bytes(r->high_water, a));
    (void)fprintf(r->text, "%-22s %14.1e  relative L2 to unquantized attention, allowed %.1e%s\n", "worst output error",
                  r->worst_error, output_tolerance(r->options), r->worst_error <= output_tolerance(r->options) ? "" : "  WRONG");
    (void)fprintf(r->text, "%-22s %14s  of %llu bytes a token and decode step\n", "packed bytes read",
                  r->read_once ? "each once" : "NOT ONCE", (unsigned long long)r->plan.token_bytes);
    (void)fprintf(r->text, "%-22s %12.1f s  and %.1f s to open\n", "time", r->seconds, r->open_seconds);
    if (r->options->lazy)
        (void)fprintf(r->text, "%s\n", v->within_plan ? "lazy: grew as it was filled, never above the plan" : "ABOVE THE PLAN");
    else
        (void)fprintf(r->text, "%s\n", v->is_plan && v->stays ? "FLAT" : "NOT FLAT");
}

/* ---- the picture ---- */

/* What a cache that grows with 16-bit rows needs at most, and with the scores of a chunk in full beside it. Both are computed
 * from the shape, not measured. */
static double growing_bytes(const options *o) { return (double)((uint64_t)o->tokens * o->layers * G * D * 2 * 2); }
static double scores_bytes(const options *o) { return (double)((uint64_t)o->tokens * H * STEP_TOKENS * 4); }

static void draw(const run *r) {
    double plan = (double)r->plan.total_bytes;
    double ends[2] = {0, r->options->tokens};
    double planned[2] = {plan, plan};
    double growing[2] = {0, growing_bytes(r->options)};
    double with_scores[2] = {0, growing[1] + scores_bytes(r->options)};
    char name[96];
    char subtitle[160];
    (void)snprintf(name, sizeof name, "the same + scores of a %d-token chunk, f32 (computed)", STEP_TOKENS);
    (void)snprintf(subtitle, sizeof subtitle,
                   "%u layer%s, %d query heads, %d KV heads, head dimension %d; %u tokens, %s; filled by steps of %d%s",
                   r->options->layers, r->options->layers == 1 ? "" : "s", H, G, D, r->options->tokens, r->options->codecs,
                   STEP_TOKENS, r->options->lazy ? "; lazy" : "");
    const plot_line lines[] = {
        {"planned, before anything is taken", ends, planned, 2, "#8ec5ff", 9, NULL, "#3f83c6", false, NULL},
        {"growing 16-bit cache (computed)", ends, growing, 2, "#c2410c", 2, "9 5", NULL, false, NULL},
        {"resident, measured after every step", r->sample_tokens, r->sample_bytes, r->n_samples, "#0b4fb3", 2.5, NULL, NULL,
         false, NULL},
        {name, ends, with_scores, 2, "#9d174d", 2, "2 4", NULL, false, NULL},
    };
    plot p = {.title = "Resident memory of the process against tokens held",
              .subtitle = subtitle,
              .footnote =
                  "Resident: anonymous memory beyond what the process held before the cache was opened. Computed lines are "
                  "drawn from the shape, not measured.",
              .x = PLOT_TOKENS,
              .y = PLOT_BYTES,
              .lines = lines,
              .n_lines = sizeof lines / sizeof lines[0]};
    p.x.label = "tokens in the cache";
    p.y.label = "memory of the cache";
    if (!plot_write_svg(&p, r->options->svg))
        kit_die(EXIT_FAILED, "cannot write the picture %s: %s", r->options->svg, strerror(errno));
    (void)fprintf(r->text, "picture: %s\n", r->options->svg);
}

/* ---- the capacity ---- */

typedef struct lane {
    fkv_cache *cache;
    fkv_seq seq;
    double ms[CAPACITY_PAIRS];
} lane;

static void lane_open(lane *l, const options *o, feed *f, uint32_t max_tokens) {
    fkv_config config = make_config(o, CAPACITY_LAYERS, max_tokens);
    fkv_seq_config seq = {.max_tokens = max_tokens};
    must(fkv_cache_open(&config, &l->cache));
    must(fkv_seq_open(l->cache, &seq, &l->seq, NULL));
    for (uint32_t at = 0; at < CAPACITY_TOKENS - 1;) {
        uint32_t room = CAPACITY_TOKENS - 1 - at;
        uint32_t n = room < STEP_TOKENS ? room : STEP_TOKENS;
        (void)take_step(l->cache, l->seq, f, at, n, CAPACITY_LAYERS, 0, 0);
        at += n;
    }
}

/* One decode step as the last token of CAPACITY_TOKENS, then as if it had not been. */
static double lane_decode(lane *l, feed *f) {
    double start = kit_seconds();
    (void)take_step(l->cache, l->seq, f, CAPACITY_TOKENS - 1, 1, CAPACITY_LAYERS, 0, CAPACITY_LAYERS);
    double ms = (kit_seconds() - start) * 1e3;
    must(fkv_seq_truncate(l->cache, l->seq, CAPACITY_TOKENS - 1));
    return ms;
}

static capacity compare_capacities(const options *o, feed *f) {
    static lane small;
    static lane large;
    static double ratios[CAPACITY_PAIRS];
    for (int round = 0; round < CAPACITY_ROUNDS; round++) {
        lane_open(&small, o, f, CAPACITY_TOKENS);
        lane_open(&large, o, f, CAPACITY_TOKENS * CAPACITY_FACTOR);
        for (int i = 0; i < CAPACITY_STEPS / 8; i++) { /* warm-up */
            (void)lane_decode(&small, f);
            (void)lane_decode(&large, f);
        }
        for (int i = round * CAPACITY_STEPS; i < (round + 1) * CAPACITY_STEPS; i++) { /* each is first in turn */
            if (i % 2 == 0) small.ms[i] = lane_decode(&small, f);
            large.ms[i] = lane_decode(&large, f);
            if (i % 2 == 1) small.ms[i] = lane_decode(&small, f);
            ratios[i] = large.ms[i] / small.ms[i];
        }
        fkv_cache_close(small.cache);
        fkv_cache_close(large.cache);
    }
    return (capacity){.done = true,
                      .small_ms = kit_spread_of(small.ms, CAPACITY_PAIRS).p50,
                      .large_ms = kit_spread_of(large.ms, CAPACITY_PAIRS).p50,
                      .ratio = kit_spread_of(ratios, CAPACITY_PAIRS).p50};
}

static void print_capacity(const run *r, const capacity *c) {
    (void)fprintf(
        r->text,
        "\ncapacity: a decode step over %d tokens in %d layers takes %.3f ms with room for %d, %.3f ms with room for %d\n"
        "          (medians of %d pairs, each cache first in turn); the median ratio in a pair is %.3f, at most %.2f allowed: %s\n",
        CAPACITY_TOKENS, CAPACITY_LAYERS, c->small_ms, CAPACITY_TOKENS, c->large_ms, CAPACITY_TOKENS * CAPACITY_FACTOR,
        CAPACITY_PAIRS, c->ratio, CAPACITY_SLACK, c->ratio <= CAPACITY_SLACK ? "good" : "FAILED");
}

/* ---- JSON ---- */

static void json_depths(const run *r, kit_json *json) {
    kit_json_array(json, "depths");
    for (size_t i = 0; i < r->n_depths; i++) {
        const depth *d = &r->depths[i];
        kit_json_object(json, NULL);
        kit_json_integer(json, "tokens", d->tokens);
        kit_json_real(json, "step_ms", d->write_ms);
        kit_json_real(json, "decode_ms", d->decode_ms.p50);
        kit_json_real(json, "decode_packed_gb_s", d->decode_gb_s);
        kit_json_real(json, "prefill_layer_ms", d->prefill_ms);
        kit_json_close(json);
    }
    kit_json_close(json);
    kit_json_array(json, "samples");
    for (size_t i = 0; i < r->n_samples; i++) {
        kit_json_array(json, NULL);
        kit_json_integer(json, NULL, (uint64_t)r->sample_tokens[i]);
        kit_json_integer(json, NULL, (uint64_t)fmax(0, r->sample_bytes[i]));
        kit_json_close(json);
    }
    kit_json_close(json);
}

static int write_json(const run *r, const verdict *v, const capacity *c) {
    const options *o = r->options;
    kit_json *json = kit_json_begin();
    kit_json_text(json, "bench", PROGRAM);
    kit_json_text(json, "version", fkv_version());
    kit_json_integer(json, "layers", o->layers);
    kit_json_integer(json, "q_heads", H);
    kit_json_integer(json, "kv_heads", G);
    kit_json_integer(json, "head_dim", D);
    kit_json_text(json, "codec", o->codecs);
    kit_json_integer(json, "k_bits", o->k.bits);
    kit_json_integer(json, "v_bits", o->v.bits);
    kit_json_integer(json, "threads", r->plan.n_threads);
    kit_json_integer(json, "seed", o->seed);
    kit_json_bool(json, "lazy", o->lazy);
    kit_json_text(json, "attend", o->attend == ATTEND_FULL ? "full" : "sampled");
    kit_json_integer(json, "tokens", r->length);
    kit_json_integer(json, "token_bytes", r->plan.token_bytes);
    kit_json_integer(json, "plan_bytes", r->plan.total_bytes);
    kit_json_integer(json, "open_bytes", (uint64_t)fmax(0, v->open_bytes));
    kit_json_integer(json, "peak_bytes", (uint64_t)fmax(0, v->peak_bytes));
    kit_json_integer(json, "end_bytes", (uint64_t)fmax(0, v->end_bytes));
    if (!isnan(r->high_water)) kit_json_integer(json, "high_water_bytes", (uint64_t)fmax(0, r->high_water));
    kit_json_bool(json, "flat", v->is_plan && v->stays);
    kit_json_bool(json, "within_plan", v->within_plan);
    kit_json_real(json, "output_error_l2", r->worst_error);
    kit_json_bool(json, "packed_bytes_read_once", r->read_once);
    kit_json_real(json, "open_s", r->open_seconds);
    kit_json_real(json, "fill_s", r->seconds);
    if (c->done) {
        kit_json_real(json, "capacity_ratio", c->ratio);
        kit_json_real(json, "capacity_small_ms", c->small_ms);
        kit_json_real(json, "capacity_large_ms", c->large_ms);
    }
    json_depths(r, json);
    return kit_json_print(json);
}

/* ---- main ---- */

static void open_cache(run *r) {
    const options *o = r->options;
    fkv_config config = make_config(o, o->layers, o->tokens);
    fkv_seq_config seq = {.max_tokens = o->tokens};
    must(fkv_plan_make(&config, &r->plan));
    size_t room = o->tokens / 64 + 256; /* samples: two for each step, some for each depth */
    feed_open(&r->feed, o);
    r->sample_tokens = bench_take(room * sizeof *r->sample_tokens);
    r->sample_bytes = bench_take(room * sizeof *r->sample_bytes);
    r->steps_ms = bench_take(room * sizeof *r->steps_ms);

    char bytes[BENCH_TEXT];
    (void)fprintf(r->text,
                  "flatkv %s: %u layer%s, %d query heads, %d KV heads, head dimension %d, %s, %u tokens, %u threads, seed %u\n"
                  "plan: %s\n\n",
                  fkv_version(), o->layers, o->layers == 1 ? "" : "s", H, G, D, o->codecs, o->tokens, r->plan.n_threads, o->seed,
                  bench_bytes((double)r->plan.total_bytes, bytes));
    (void)fprintf(r->text, "%10s %13s %12s %12s %10s %12s\n%10s %13s %12s %12s %10s %12s\n", "", "", "write 512", "decode",
                  "packed", "prefill 512", "tokens", "resident", "ms", "ms a token", "GB/s", "ms a layer");
    (void)fflush(r->text);
    r->read_once = true;
    (void)bench_memory_now(); /* whatever the first look takes */
    r->before = bench_memory_now();
    double start = kit_seconds();
    must(fkv_cache_open(&config, &r->cache));
    r->open_seconds = kit_seconds() - start;
    sample(r);
    must(fkv_seq_open(r->cache, &seq, &r->seq, NULL));
}

int main(int argc, char **argv) {
    static options o = {
        .tokens = 131072, .layers = 32, .codecs = "8/4", .k.group = 64, .v.group = 64, .seed = 1, .svg = "flat.svg"};
    static run r;
    kit_set_program(PROGRAM);
    parse(&o, argc, argv);
    bench_writable(o.svg);
    r.options = &o;
    r.text = o.json ? stderr : stdout;
    open_cache(&r);
    fill(&r);
    verdict v = judge(&r);
    fkv_cache_close(r.cache);
    print_verdict(&r, &v);
    draw(&r);
    capacity c = {0};
    if (!o.skip_capacity) {
        c = compare_capacities(&o, &r.feed);
        print_capacity(&r, &c);
    }
    if (o.json && write_json(&r, &v, &c) != EXIT_GOOD) return EXIT_FAILED;
    return v.good && (!c.done || c.ratio <= CAPACITY_SLACK) ? EXIT_GOOD : EXIT_FAILED;
}
