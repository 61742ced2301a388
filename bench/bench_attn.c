/* bench_attn: times writes and attention for each codec and shape, without the pager and the cache.
 *
 * Every operation is verified before it is timed. A write must produce the same bytes as the codec's plain encoder. The output of
 * a decode query must agree with the scalar reference over the whole history. The output of every prefill query must be
 * bit-identical to the output of the same query computed alone, and the outputs of the first, middle and last query must agree
 * with the reference.
 *
 * Each round visits all codecs, so that noise affects all codecs equally. Before every call, the read bandwidth is measured by
 * streaming a buffer several times larger than the last-level cache. Streaming also evicts the packed history from the CPU
 * caches, as in a model with many layers. The new K, V and query rows of the call are then loaded again, because in a model they
 * would be in a CPU cache.
 *
 * Codecs and shapes are those of the parity test (tests/attn_cases.h).
 */
#include "bench_attn_mlx.h"
#include "bench_attn_options.h"
#include "bench_util.h"

#include "../src/attn/attn_reference.h"
#include "../src/base/memory.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static const char PROGRAM[] = "bench_attn";

/* Largest accepted relative error, as in the parity test. Kernels accumulate in float, the reference in double. */
static const double KERNEL_TOLERANCE = 1e-3;

static const uint64_t SEED = 20261115;

enum {
    PAGE_TOKENS = 64,
    WRITE_TOKENS = 512, /* number of rows per timed write, as in a prefill chunk */
    N_CHECKED = 3       /* number of prefill queries compared with the reference */
};

/* State of one measured codec for the current shape. */
typedef struct subject {
    uint32_t codec;
    attn_fixture world;         /* fixture with n_queries new tokens; the last token is the decode query */
    fkv_attn_layer write_layer; /* the same layer with separate pages, so that timed writes do not change the cached tokens */
    uint64_t slab_bytes;
    uint64_t write_slab_bytes;
    float *truth; /* [N_CHECKED, H, D] */
    double times[ATTN_MAX_ROUNDS];
} subject;

typedef struct result {
    attn_bench_case c;
    attn_op what;
    const char *codec;
    uint32_t n_threads;
    uint32_t n_tokens; /* number of rows written (write) or number of queries (attention) */
    uint32_t n_rounds;
    bool right;
    double error; /* largest relative L2 error of a head's output; 0 for writes, which must be exact */
    kit_spread ms;
    uint64_t packed_bytes; /* packed bytes that attention reads or a write stores */
    double roof;           /* bytes per second */
    double speedup; /* median over all rounds of (time of codec 16/16) / (time of this codec); NAN if 16/16 was not measured */
} result;

typedef struct bench {
    const attn_options *options;
    const fkv_cpu_kernels *kernels;
    fkv_workers *workers[BENCH_MAX_ROOFS];
    FILE *text;

    bench_roof roof;

    attn_bench_case c; /* the current shape */
    subject subjects[N_ATTN_CODECS];
    uint32_t n_subjects;
    uint32_t n_written; /* number of tokens per write */
    float *k;           /* [n_written, G, D] */
    float *v;
    float *out; /* [n_queries, H, D] */
    float *alone;
    void *scratch;

    result *results;
    size_t n_results;
    size_t room_results;
} bench;

/* ---- machine ---- */

static void *map(uint64_t bytes) {
    void *place = NULL;
    if (fkv_map_open(bytes, true, &place) != FKV_OK) kit_die(EXIT_NO_FIT, "%s", fkv_message());
    return place;
}

/* ---- cases of one shape ---- */

static size_t row_numbers(const bench *b) { return (size_t)b->c.shape.n_q_heads * b->c.shape.head_dim; }

/* Returns the index of the i-th prefill query that is compared with the reference. */
static uint32_t checked_query(const bench *b, uint32_t i) { return (b->options->n_queries - 1) * i / (N_CHECKED - 1); }

static fkv_attn_row row_of_query(const subject *s, uint32_t query) {
    fkv_attn_row row = s->world.rows[0];
    row.start += query;
    row.n_tokens = 1;
    return row;
}

static const float *query_rows(const bench *b, const subject *s, uint32_t query) {
    return (const float *)s->world.q + query * row_numbers(b);
}

static void find_truth(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const bench *b = context;
    const subject *s = &b->subjects[item / N_CHECKED];
    uint32_t query = checked_query(b, item % N_CHECKED);
    fkv_attn_row row = row_of_query(s, query);
    fkv_attn_reference(&s->world.layer, &row, 1, query_rows(b, s, query), s->truth + item % N_CHECKED * row_numbers(b));
}

/* Prepares the measurement of one codec. Returns false if the codec's group size does not divide the head dimension. */
static bool subject_open(bench *b, subject *s, uint32_t codec, fkv_workers *workers) {
    attn_case c = {.shape = b->c.shape, .codec = codec, .page_tokens = PAGE_TOKENS, .page_type = FKV_F16, .n_rows = 1};
    c.rows[0] = (attn_mix){b->c.n_cached - b->options->n_queries, b->options->n_queries};
    memset(s, 0, sizeof *s);
    s->codec = codec;
    if (!attn_fixture_open(&s->world, &c, b->kernels, workers, SEED)) return false;

    /* pages are mapped with huge pages, as in a cache */
    uint64_t page_bytes = (uint64_t)b->c.shape.n_kv_heads * s->world.layer.block.bytes;
    s->slab_bytes = fkv_ceil_div(b->c.n_cached, PAGE_TOKENS) * page_bytes;
    uint8_t *slab = map(s->slab_bytes);
    memcpy(slab, s->world.pages, s->slab_bytes);
    free(s->world.pages);
    s->world.pages = NULL;
    s->world.layer.pages = slab;
    s->write_layer = s->world.layer;
    s->write_slab_bytes = fkv_ceil_div(b->n_written, PAGE_TOKENS) * page_bytes;
    s->write_layer.pages = map(s->write_slab_bytes);
    s->truth = bench_take(N_CHECKED * row_numbers(b) * sizeof *s->truth);
    return true;
}

static void subject_close(subject *s) {
    fkv_map_close(s->world.layer.pages, s->slab_bytes);
    fkv_map_close(s->write_layer.pages, s->write_slab_bytes);
    attn_fixture_close(&s->world);
    free(s->truth);
}

static void shape_open(bench *b, attn_bench_case c) {
    const attn_options *o = b->options;
    fkv_workers *widest = b->workers[0];
    for (uint32_t t = 1; t < o->n_threads; t++)
        if (fkv_workers_count(b->workers[t]) > fkv_workers_count(widest)) widest = b->workers[t];
    b->c = c;
    b->n_written = fkv_min_u32(c.n_cached, WRITE_TOKENS);
    b->n_subjects = 0;
    for (uint32_t i = 0; i < N_ATTN_CODECS; i++)
        if (o->codecs[i]) b->n_subjects += subject_open(b, &b->subjects[b->n_subjects], i, widest);
    if (o->ops[OP_DECODE] || o->ops[OP_PREFILL]) fkv_workers_run(widest, find_truth, b, b->n_subjects * N_CHECKED);

    size_t n = (size_t)b->n_written * c.shape.n_kv_heads * c.shape.head_dim;
    uint64_t state = SEED;
    uint64_t scratch = 64;
    b->k = bench_take(n * sizeof *b->k);
    b->v = bench_take(n * sizeof *b->v);
    attn_random_rows(&state, FKV_F32, c.shape.head_dim, true, n, b->k);
    attn_random_rows(&state, FKV_F32, c.shape.head_dim, true, n, b->v);
    b->out = bench_take(o->n_queries * row_numbers(b) * sizeof *b->out);
    b->alone = bench_take(row_numbers(b) * sizeof *b->alone);
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        uint64_t bytes = fkv_attn_scratch_bytes(&b->subjects[i].world.layer, 1, fkv_workers_count(widest));
        if (bytes > scratch) scratch = bytes;
    }
    b->scratch = bench_take(scratch);
}

static void shape_close(bench *b) {
    for (uint32_t i = 0; i < b->n_subjects; i++) subject_close(&b->subjects[i]);
    free(b->k);
    free(b->v);
    free(b->out);
    free(b->alone);
    free(b->scratch);
}

/* ---- verification and timing ---- */

static fkv_attn_row write_row_of(const bench *b) {
    static uint32_t pages[WRITE_TOKENS / PAGE_TOKENS];
    for (uint32_t i = 0; i < WRITE_TOKENS / PAGE_TOKENS; i++) pages[i] = i;
    return (fkv_attn_row){{pages, fkv_ceil_div(b->n_written, PAGE_TOKENS), 1}, 0, b->n_written, 0};
}

/* Runs the operation once. Returns the number of packed bytes read or written. */
static uint64_t call(bench *b, const subject *s, attn_op what, fkv_workers *workers) {
    const fkv_attn_layer *layer = &s->world.layer;
    if (what == OP_PREFILL) return fkv_attn_attend(b->kernels, layer, s->world.rows, 1, s->world.q, b->out, b->scratch, workers);
    if (what == OP_DECODE) {
        uint32_t last = b->options->n_queries - 1;
        fkv_attn_row row = row_of_query(s, last);
        return fkv_attn_attend(b->kernels, layer, &row, 1, query_rows(b, s, last), b->out, b->scratch, workers);
    }
    fkv_attn_row row = write_row_of(b);
    fkv_attn_write(b->kernels, &s->write_layer, &row, 1, b->k, b->v, workers);
    return s->world.kv_bytes / b->c.n_cached * b->n_written;
}

/* Checks that every written row equals the output of the codec's plain encoder. */
static bool written_right(const bench *b, const subject *s) {
    const fkv_block *block = &s->write_layer.block;
    uint32_t n_heads = b->c.shape.n_kv_heads;
    for (size_t i = 0; i < (size_t)b->n_written * n_heads; i++) {
        uint32_t token = (uint32_t)(i / n_heads);
        uint8_t *bytes = s->write_layer.pages + (token / PAGE_TOKENS * n_heads + i % n_heads) * block->bytes;
        for (int side = 0; side < FKV_N_SIDES; side++) {
            uint8_t expected[FKV_N_PARTS][2 * FKV_MAX_HEAD_DIM];
            uint8_t *const to[FKV_N_PARTS] = {expected[0], expected[1], expected[2]};
            uint8_t *got[FKV_N_PARTS];
            fkv_codec_encode(&block->codec[side], (side == FKV_SIDE_K ? b->k : b->v) + i * b->c.shape.head_dim, to);
            fkv_block_row(block, bytes, (fkv_side)side, token % PAGE_TOKENS, got);
            for (int p = 0; p < FKV_N_PARTS; p++)
                if (memcmp(got[p], expected[p], block->codec[side].row_bytes[p]) != 0) return false;
        }
    }
    return true;
}

/* Returns the largest relative L2 error of any head's output for one query, compared with the reference output at index i. */
static double worst_error(const bench *b, const subject *s, uint32_t i, const float *out) {
    const float *truth = s->truth + i * row_numbers(b);
    double worst = 0;
    for (size_t at = 0; at < row_numbers(b); at += b->c.shape.head_dim)
        worst = fmax(worst, relative_l2(out + at, truth + at, b->c.shape.head_dim));
    return worst;
}

static bool check(bench *b, const subject *s, attn_op what, fkv_workers *workers, double *error) {
    *error = 0;
    if (what == OP_WRITE) memset(s->write_layer.pages, 0xff, s->write_slab_bytes);
    (void)call(b, s, what, workers);
    if (what == OP_WRITE) return written_right(b, s);
    if (what == OP_DECODE) {
        *error = worst_error(b, s, N_CHECKED - 1, b->out);
        return *error <= KERNEL_TOLERANCE;
    }
    for (uint32_t i = 0; i < N_CHECKED; i++)
        *error = fmax(*error, worst_error(b, s, i, b->out + checked_query(b, i) * row_numbers(b)));
    for (uint32_t query = 0; query < b->options->n_queries; query++) {
        fkv_attn_row row = row_of_query(s, query);
        (void)fkv_attn_attend(b->kernels, &s->world.layer, &row, 1, query_rows(b, s, query), b->alone, b->scratch, workers);
        if (memcmp(b->alone, b->out + query * row_numbers(b), row_numbers(b) * sizeof *b->alone) != 0) return false;
    }
    return *error <= KERNEL_TOLERANCE;
}

/* Returns the duration of one call, in seconds. Before the call, the history is evicted from the CPU caches, the new rows are
 * loaded into them, and the worker threads are woken.
 */
static double time_call(bench *b, const subject *s, attn_op what, uint32_t t) {
    (void)bench_roof_stream(&b->roof, b->workers[t], t);
    if (what == OP_WRITE) {
        size_t bytes = (size_t)b->n_written * b->c.shape.n_kv_heads * b->c.shape.head_dim * sizeof *b->k;
        bench_read(b->k, bytes);
        bench_read(b->v, bytes);
    } else {
        bench_read(s->world.q, b->options->n_queries * row_numbers(b) * sizeof(float));
    }
    bench_wake(b->workers[t]);
    double start = kit_seconds();
    (void)call(b, s, what, b->workers[t]);
    return kit_seconds() - start;
}

/* ---- rounds and tables ---- */

static result *add_result(bench *b) {
    if (b->n_results == b->room_results) {
        b->room_results = b->room_results * 2 + 64;
        b->results = kit_realloc(b->results, b->room_results * sizeof *b->results);
    }
    return &b->results[b->n_results++];
}

static void print_wrong(const bench *b, const result *r) {
    if (r->what == OP_WRITE)
        (void)fprintf(b->text, "  WRONG: pages differ from the output of the codec's encoder");
    else if (r->error <= KERNEL_TOLERANCE)
        (void)fprintf(b->text, "  WRONG: the result of a query is not bit-identical to that of the same query alone");
    else
        (void)fprintf(b->text, "  WRONG: relative L2 error %.1e from the reference (%.0e allowed)", r->error, KERNEL_TOLERANCE);
    (void)fprintf(b->text, "; wrong results are not timed\n");
}

static void print_result(const bench *b, const result *r) {
    (void)fprintf(b->text, "  %-8s %-13s %7u", attn_op_names[r->what], r->codec, r->n_threads);
    if (!r->right) {
        print_wrong(b, r);
        return;
    }
    double rate = (double)r->packed_bytes / r->ms.p50 * 1e3;
    (void)fprintf(b->text, " %10.3f %9.3f %9.3f %9.2f %8.2f", r->ms.p50, r->ms.p10, r->ms.p90, r->ms.p50 * 1e3 / r->n_tokens,
                  rate * 1e-9);
    if (r->what == OP_WRITE)
        (void)fprintf(b->text, " %8s", "-");
    else
        (void)fprintf(b->text, " %6.1f %%", rate / r->roof * 100);
    if (isnan(r->speedup))
        (void)fprintf(b->text, " %8s", "-");
    else
        (void)fprintf(b->text, " %7.2fx", r->speedup);
    if (r->what == OP_WRITE)
        (void)fprintf(b->text, " %9s\n", "same bits");
    else
        (void)fprintf(b->text, " %9.1e\n", r->error);
}

static void print_heading(const bench *b) {
    (void)fprintf(b->text,
                  "\n%u query heads, %u KV head%s, head dimension %u: %u tokens cached, %u written, %u queries in a prefill\n"
                  "  %-8s %-13s %7s %10s %9s %9s %9s %8s %8s %8s %9s\n"
                  "  %-8s %-13s %7s %10s %9s %9s %9s %8s %8s %8s %9s\n",
                  b->c.shape.n_q_heads, b->c.shape.n_kv_heads, b->c.shape.n_kv_heads == 1 ? "" : "s", b->c.shape.head_dim,
                  b->c.n_cached, b->n_written, b->options->n_queries, "", "K/V", "", "median", "p10", "p90", "each", "packed",
                  "of read", "speed", "error", "what", "bits", "threads", "ms", "ms", "ms", "us/token", "GB/s", "roof",
                  "to 16/16", "rel. L2");
}

/* Measures all codecs for one operation and one number of threads. */
static void run_rounds(bench *b, attn_op what, uint32_t t) {
    uint32_t asked = b->options->n_rounds;
    uint32_t n_rounds = what == OP_PREFILL ? fkv_max_u32(fkv_min_u32(asked, 3), asked / 3) : asked;
    size_t first = b->n_results;
    size_t first_roof = b->roof.n_samples[t];
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        subject *s = &b->subjects[i];
        result *r = add_result(b);
        *r = (result){b->c, what, attn_codecs[s->codec].name, b->options->threads[t], .n_rounds = n_rounds, .speedup = NAN};
        r->n_tokens = what == OP_WRITE ? b->n_written : what == OP_DECODE ? 1 : b->options->n_queries;
        r->right = check(b, s, what, b->workers[t], &r->error);
        if (r->right) r->packed_bytes = call(b, s, what, b->workers[t]); /* not timed; warms up caches and threads */
    }
    for (uint32_t round = 0; round < n_rounds; round++)
        for (uint32_t i = 0; i < b->n_subjects; i++)
            if (b->results[first + i].right) b->subjects[i].times[round] = time_call(b, &b->subjects[i], what, t) * 1e3;

    double roof = bench_roof_median(&b->roof, t, first_roof);
    bool has_reference = b->n_subjects > 0 && b->subjects[0].codec == 0 && b->results[first].right;
    double reference[ATTN_MAX_ROUNDS];
    if (has_reference) memcpy(reference, b->subjects[0].times, n_rounds * sizeof *reference);
    for (uint32_t i = 0; i < b->n_subjects; i++) {
        result *r = &b->results[first + i];
        double ratios[ATTN_MAX_ROUNDS];
        double *times = b->subjects[i].times;
        r->roof = roof;
        for (uint32_t round = 0; r->right && has_reference && round < n_rounds; round++)
            ratios[round] = reference[round] / times[round];
        if (r->right && has_reference) r->speedup = kit_spread_of(ratios, n_rounds).p50;
        if (r->right) r->ms = kit_spread_of(times, n_rounds);
        print_result(b, r);
    }
    (void)fflush(b->text);
}

static void result_json(const result *r, kit_json *json) {
    double rate = r->right ? (double)r->packed_bytes / r->ms.p50 * 1e3 : NAN;
    kit_json_object(json, NULL);
    kit_json_text(json, "op", attn_op_names[r->what]);
    kit_json_text(json, "codec", r->codec);
    kit_json_integer(json, "threads", r->n_threads);
    kit_json_integer(json, "q_heads", r->c.shape.n_q_heads);
    kit_json_integer(json, "kv_heads", r->c.shape.n_kv_heads);
    kit_json_integer(json, "head_dim", r->c.shape.head_dim);
    kit_json_integer(json, "cached", r->c.n_cached);
    kit_json_integer(json, "tokens", r->n_tokens);
    kit_json_integer(json, "rounds", r->n_rounds);
    kit_json_bool(json, "right", r->right);
    kit_json_real(json, "error_l2", r->error);
    kit_json_real(json, "ms_p50", r->right ? r->ms.p50 : NAN);
    kit_json_real(json, "ms_p10", r->right ? r->ms.p10 : NAN);
    kit_json_real(json, "ms_p90", r->right ? r->ms.p90 : NAN);
    kit_json_integer(json, "packed_bytes", r->packed_bytes);
    kit_json_real(json, "packed_gb_s", rate * 1e-9);
    kit_json_real(json, "read_roof_gb_s", r->roof * 1e-9);
    kit_json_real(json, "roof_share", r->what == OP_WRITE ? NAN : rate / r->roof);
    kit_json_real(json, "speed_to_16bit", r->speedup);
    kit_json_close(json);
}

static int write_json(bench *b) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "bench", PROGRAM);
    kit_json_text(json, "version", fkv_version());
    kit_json_text(json, "isa", fkv_cpu_kernels_name(b->kernels));
    kit_json_integer(json, "roof_buffer_bytes", b->roof.bytes);
    kit_json_array(json, "read_roof");
    for (uint32_t t = 0; t < b->options->n_threads; t++) {
        kit_json_object(json, NULL);
        kit_json_integer(json, "threads", b->options->threads[t]);
        kit_json_real(json, "gb_s", bench_roof_median(&b->roof, t, 0) * 1e-9);
        kit_json_close(json);
    }
    kit_json_close(json);
    kit_json_array(json, "results");
    for (size_t i = 0; i < b->n_results; i++) result_json(&b->results[i], json);
    return kit_json_print(json);
}

static void run_shape(bench *b, attn_bench_case c) {
    if (isatty(STDERR_FILENO)) (void)fprintf(stderr, "comparing results with the reference ...\r");
    shape_open(b, c);
    if (isatty(STDERR_FILENO)) (void)fprintf(stderr, "%30s\r", "");
    print_heading(b);
    for (uint32_t i = 0, next = 0; i < N_ATTN_CODECS; i++) {
        bool there = next < b->n_subjects && b->subjects[next].codec == i;
        if (b->options->codecs[i] && !there)
            (void)fprintf(b->text, "  %s skipped: its group size does not divide the head dimension %u\n", attn_codecs[i].name,
                          c.shape.head_dim);
        next += there;
    }
    bool between = false;
    for (attn_op what = 0; what < N_ATTN_OPS; what++) {
        if (!b->options->ops[what]) continue;
        if (between) (void)fputc('\n', b->text);
        for (uint32_t t = 0; t < b->options->n_threads; t++) run_rounds(b, what, t);
        between = true;
    }
    shape_close(b);
}

/* Returns true if the options select MLX, which bench_attn_mlx.c measures. */
static bool asks_for_mlx(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device=mlx") == 0) return true;
        if (i + 1 < argc && strcmp(argv[i], "--device") == 0 && strcmp(argv[i + 1], "mlx") == 0) return true;
    }
    return false;
}

static void print_roofs(const bench *b) {
    const attn_options *o = b->options;
    (void)fprintf(b->text, "\nread roof:");
    for (uint32_t t = 0; t < o->n_threads; t++) {
        if (b->roof.n_samples[t] == 0) continue;
        kit_spread roof = kit_spread_of(b->roof.samples[t], b->roof.n_samples[t]);
        (void)fprintf(b->text, "%s %u thread%s %.1f GB/s (p10 %.1f, p90 %.1f)", t == 0 ? "" : ",", o->threads[t],
                      o->threads[t] == 1 ? "" : "s", roof.p50 * 1e-9, roof.p10 * 1e-9, roof.p90 * 1e-9);
    }
}

int main(int argc, char **argv) {
    static attn_options o;
    static bench b;
    kit_set_program(PROGRAM);
    if (asks_for_mlx(argc, argv)) {
#ifdef FKV_BENCH_MLX
        return bench_attn_mlx(argc, argv);
#else
        kit_die(EXIT_USAGE, "this build does not include the MLX backend: run scripts/get-mlx and build with -DFKV_MLX=ON");
#endif
    }
    attn_options_parse(&o, argc, argv);
    b.options = &o;
    b.kernels = fkv_cpu_kernels_for(o.isa);
    b.text = o.json ? stderr : stdout;
    if (b.kernels == NULL) kit_die(EXIT_USAGE, "this machine or build has no %s kernels; choose auto", fkv_isa_name(o.isa));
    for (uint32_t t = 0; t < o.n_threads; t++) b.workers[t] = bench_workers_open(o.threads[t]);
    bench_roof_open(&b.roof, o.quick);
    (void)fprintf(
        b.text,
        "flatkv %s, %s kernels; medians of %u rounds; %llu MiB are streamed before each call to measure the read bandwidth (roof)\n",
        fkv_version(), fkv_cpu_kernels_name(b.kernels), o.n_rounds, (unsigned long long)(b.roof.bytes >> 20));
    for (uint32_t i = 0; i < o.n_cases; i++) run_shape(&b, o.cases[i]);
    print_roofs(&b);
    size_t n_wrong = 0;
    for (size_t i = 0; i < b.n_results; i++) n_wrong += !b.results[i].right;
    (void)fprintf(b.text, "\n%zu results, %zu wrong\n", b.n_results, n_wrong);
    if (o.json && write_json(&b) != EXIT_GOOD) return EXIT_FAILED;
    return n_wrong == 0 && b.n_results > 0 ? EXIT_GOOD : EXIT_FAILED;
}
