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
    CAPACITY_PAIRS = CAPACITY_ROUNDS * CAPACITY_STEPS
};

/* After open, at the end and in between: the same, up to what a process may touch of its own (stdio, a deeper stack). */
static const double FLAT_SLACK = 1024.0 * 1024.0;
static const double PLAN_SLACK = 0.01;
/* The system's own high-water mark is kept by counters that lag by some dozens of pages for each core. */
static const double HIGH_WATER_SLACK = 32.0 * 1024.0 * 1024.0;
static const double CAPACITY_SLACK = 1.03;

typedef struct options {
    uint32_t tokens;
    uint32_t layers;
    fkv_codec_config k;
    fkv_codec_config v;
    uint32_t threads;
    uint32_t seed;
    bool lazy;
    bool attend_full;
    bool skip_capacity;
    const char *svg;
    bench_json json;
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
    bool read_once;    /* a decode step read exactly the packed bytes of its tokens */
    double worst_error;
} run;

typedef struct capacity {
    bool done;
    double small_ms;
    double large_ms;
    double ratio; /* median of neighbours' ratios: two steps in a row see the same machine, two medians may not */
} capacity;

/* ---- options ---- */

static void print_help(void) {
    printf(
        "usage: bench_flat [options]\n"
        "Fills a cache of a whole model's shape (%d query heads, %d KV heads, head dimension %d) to its last token and shows\n"
        "that the process holds what the plan said, from open to the end. Then: decode time does not follow the capacity.\n\n"
        "  --tokens N       capacity (131072)\n"
        "  --layers N       (32)\n"
        "  --k-bits N       16, 8, 4 or 2 (8)          --k-group N   32, 64 or 128 (64)\n"
        "  --v-bits N       (4)                        --v-group N   (64)\n"
        "  --threads N      (one for each core)\n"
        "  --lazy           pages are committed when first touched: the line rises to the plan instead of standing on it\n"
        "  --attend HOW     sampled: every step of %d writes all layers; after each, one decode step attends in one layer; at\n"
        "                   %d depths decode steps attend in all layers, and at half of them a whole chunk of %d queries\n"
        "                   attends in one layer (the default, about two minutes on two cores)\n"
        "                   full: every step attends in every layer, as a model does (hours at full size)\n"
        "  --skip-capacity  leave out the two caches of different capacity\n"
        "  --svg FILE       the picture (flat.svg)\n"
        "  --json [FILE]    the numbers; without FILE to stdout, and the text to stderr\n"
        "  --seed N         of the rows (1)\n"
        "  --help\n\n"
        "exit status: 0 flat, 1 not flat or a result was wrong, 2 bad usage, 3 not enough memory\n",
        H, G, D, STEP_TOKENS, N_DEPTHS, STEP_TOKENS);
}

static bool parse_codec(options *o, bench_args *args) {
    if (bench_args_is(args, "--k-bits"))
        o->k.bits = bench_args_number(args, 2, 16);
    else if (bench_args_is(args, "--v-bits"))
        o->v.bits = bench_args_number(args, 2, 16);
    else if (bench_args_is(args, "--k-group"))
        o->k.group = bench_args_number(args, 32, 128);
    else if (bench_args_is(args, "--v-group"))
        o->v.group = bench_args_number(args, 32, 128);
    else
        return false;
    return true;
}

static void parse(options *o, int argc, char **argv) {
    bench_args args = {PROGRAM, argc, argv, 0};
    while (bench_args_next(&args)) {
        if (parse_codec(o, &args)) continue;
        if (bench_args_is(&args, "--help")) {
            print_help();
            exit(BENCH_GOOD);
        } else if (bench_args_is(&args, "--tokens"))
            o->tokens = bench_args_number(&args, 2 * STEP_TOKENS, 1u << 26);
        else if (bench_args_is(&args, "--layers"))
            o->layers = bench_args_number(&args, 1, FKV_MAX_LAYERS);
        else if (bench_args_is(&args, "--threads"))
            o->threads = bench_args_number(&args, 1, 256);
        else if (bench_args_is(&args, "--seed"))
            o->seed = bench_args_number(&args, 0, UINT32_MAX);
        else if (bench_args_is(&args, "--lazy"))
            o->lazy = true;
        else if (bench_args_is(&args, "--skip-capacity"))
            o->skip_capacity = true;
        else if (bench_args_is(&args, "--attend")) {
            const char *how = bench_args_value(&args);
            o->attend_full = strcmp(how, "full") == 0;
            if (!o->attend_full && strcmp(how, "sampled") != 0)
                bench_die(PROGRAM, BENCH_USAGE, "--attend: \"%s\" is not full or sampled", how);
        } else if (bench_args_is(&args, "--svg"))
            o->svg = bench_args_value(&args);
        else if (bench_args_is(&args, "--json")) {
            o->json.wanted = true;
            o->json.path = bench_args_optional(&args);
        } else
            bench_args_unknown(&args);
    }
}

static fkv_config make_config(const options *o, uint32_t n_layers, uint32_t tokens) {
    fkv_config c = fkv_config_default();
    c.n_layers = n_layers;
    c.layer.n_q_heads = H;
    c.layer.n_kv_heads = G;
    c.layer.head_dim = D;
    c.layer.k = o->k;
    c.layer.v = o->v;
    c.max_tokens = tokens;
    c.max_step_tokens = STEP_TOKENS;
    c.n_threads = o->threads;
    c.lazy = o->lazy;
    return c;
}

/* Every call must succeed; one that does not ends the program with the library's words. */
static void must(fkv_status status) {
    if (status == FKV_OK) return;
    enum bench_exit code = BENCH_FAILED;
    if (status == FKV_NO_MEMORY) code = BENCH_NO_MEMORY;
    if (status == FKV_BAD_CONFIG) code = BENCH_USAGE;
    bench_die(PROGRAM, code, "%s: %s", fkv_status_name(status), fkv_message());
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
static double bits_error(uint32_t bits) { return bits == 16 ? 1e-3 : bits == 8 ? 0.007 : bits == 4 ? 0.11 : 0.55; }

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
        r->read_once = r->read_once && read == r->plan.token_bytes * r->length;
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
        bool chunk_attends = o->attend_full || last || (at_depth && r->n_depths % 2 == 1);
        uint32_t from = o->attend_full ? 0 : r->turn++ % o->layers;
        uint32_t n_attends = o->attend_full ? o->layers : 1;
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
                   "%u layer%s, %d query heads, %d KV heads, head dimension %d; %u tokens, K%u/V%u; filled by steps of %d%s",
                   r->options->layers, r->options->layers == 1 ? "" : "s", H, G, D, r->options->tokens, r->options->k.bits,
                   r->options->v.bits, STEP_TOKENS, r->options->lazy ? "; lazy" : "");
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
        bench_die(PROGRAM, BENCH_FAILED, "cannot write the picture %s: %s", r->options->svg, strerror(errno));
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

static void json_depths(const run *r, bench_json *json) {
    bench_json_array(json, "depths");
    for (size_t i = 0; i < r->n_depths; i++) {
        const depth *d = &r->depths[i];
        bench_json_object(json, NULL);
        bench_json_integer(json, "tokens", d->tokens);
        bench_json_number(json, "step_ms", d->write_ms);
        bench_json_number(json, "decode_ms", d->decode_ms.p50);
        bench_json_number(json, "decode_packed_gb_s", d->decode_gb_s);
        bench_json_number(json, "prefill_layer_ms", d->prefill_ms);
        bench_json_close(json);
    }
    bench_json_close(json);
    bench_json_array(json, "samples");
    for (size_t i = 0; i < r->n_samples; i++) {
        bench_json_array(json, NULL);
        bench_json_integer(json, NULL, (uint64_t)r->sample_tokens[i]);
        bench_json_integer(json, NULL, (uint64_t)fmax(0, r->sample_bytes[i]));
        bench_json_close(json);
    }
    bench_json_close(json);
}

static void write_json(const run *r, const verdict *v, const capacity *c, bench_json *json) {
    const options *o = r->options;
    bench_json_begin(json, PROGRAM);
    bench_json_string(json, "bench", PROGRAM);
    bench_json_string(json, "version", fkv_version());
    bench_json_integer(json, "layers", o->layers);
    bench_json_integer(json, "q_heads", H);
    bench_json_integer(json, "kv_heads", G);
    bench_json_integer(json, "head_dim", D);
    bench_json_integer(json, "k_bits", o->k.bits);
    bench_json_integer(json, "v_bits", o->v.bits);
    bench_json_integer(json, "threads", r->plan.n_threads);
    bench_json_integer(json, "seed", o->seed);
    bench_json_bool(json, "lazy", o->lazy);
    bench_json_string(json, "attend", o->attend_full ? "full" : "sampled");
    bench_json_integer(json, "tokens", r->length);
    bench_json_integer(json, "token_bytes", r->plan.token_bytes);
    bench_json_integer(json, "plan_bytes", r->plan.total_bytes);
    bench_json_integer(json, "open_bytes", (uint64_t)fmax(0, v->open_bytes));
    bench_json_integer(json, "peak_bytes", (uint64_t)fmax(0, v->peak_bytes));
    bench_json_integer(json, "end_bytes", (uint64_t)fmax(0, v->end_bytes));
    if (!isnan(r->high_water)) bench_json_integer(json, "high_water_bytes", (uint64_t)fmax(0, r->high_water));
    bench_json_bool(json, "flat", v->is_plan && v->stays);
    bench_json_bool(json, "within_plan", v->within_plan);
    bench_json_number(json, "output_error_l2", r->worst_error);
    bench_json_bool(json, "packed_bytes_read_once", r->read_once);
    bench_json_number(json, "open_s", r->open_seconds);
    bench_json_number(json, "fill_s", r->seconds);
    if (c->done) {
        bench_json_number(json, "capacity_ratio", c->ratio);
        bench_json_number(json, "capacity_small_ms", c->small_ms);
        bench_json_number(json, "capacity_large_ms", c->large_ms);
    }
    json_depths(r, json);
    bench_json_end(json, PROGRAM);
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
    (void)fprintf(
        r->text,
        "flatkv %s: %u layer%s, %d query heads, %d KV heads, head dimension %d, K%u/V%u, %u tokens, %u threads, seed %u\n"
        "plan: %s\n\n",
        fkv_version(), o->layers, o->layers == 1 ? "" : "s", H, G, D, o->k.bits, o->v.bits, o->tokens, r->plan.n_threads, o->seed,
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
    static options o = {.tokens = 131072, .layers = 32, .k = {8, 64}, .v = {4, 64}, .seed = 1, .svg = "flat.svg"};
    static run r;
    parse(&o, argc, argv);
    bench_writable(PROGRAM, o.svg);
    if (o.json.wanted) bench_writable(PROGRAM, o.json.path);
    r.options = &o;
    r.text = o.json.wanted && o.json.path == NULL ? stderr : stdout;
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
    if (o.json.wanted) write_json(&r, &v, &c, &o.json);
    return v.good && (!c.done || c.ratio <= CAPACITY_SLACK) ? BENCH_GOOD : BENCH_FAILED;
}
