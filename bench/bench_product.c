/* bench_product: times matrix products of weights with activations for each matrix kind, shape and number of tokens.
 *
 * Results are verified first: some outputs are compared with sums in double precision, and the outputs of each token of a batch
 * must be bit-identical to the outputs of the token computed alone. Each round then visits all kinds. Before every call, the read
 * bandwidth is measured (bench_roof.h). The measurement also evicts the weights from the CPU caches. The activations are then
 * loaded again. Decode-sized products are bound by the bandwidth at which weights are read, and prefill-sized products by
 * arithmetic throughput.
 */
#include "bench_roof.h"
#include "bench_util.h"

#include "../src/base/cpu.h"
#include "../src/base/memory.h"
#include "../src/matrix/matrix.h"

#include <math.h>
#include <stdlib.h>

static const char PROGRAM[] = "bench_product";
static const double PRODUCT_TOLERANCE = 2e-4; /* largest accepted relative error, as in the parity test */
static const uint64_t SEED = 20261115;

enum { MAX_LIST = BENCH_MAX_ROOFS, MAX_ROUNDS = 1000, N_CHECKED = 64 };

typedef struct kind {
    const char *name;
    fkv_matrix_kind kind;
    uint32_t bits;
    uint32_t group;
} kind;

static const kind kinds[] = {{"affine4", FKV_MATRIX_AFFINE4, 4, 32},     {"centered4", FKV_MATRIX_CENTERED4, 4, 32},
                             {"centered5", FKV_MATRIX_CENTERED5, 5, 32}, {"centered6", FKV_MATRIX_CENTERED6_16, 6, 16},
                             {"centered8", FKV_MATRIX_CENTERED8, 8, 32}, {"f16", FKV_MATRIX_F16, 16, 0},
                             {"bf16", FKV_MATRIX_BF16, 16, 0},           {"f32", FKV_MATRIX_F32, 32, 0},
                             {"affine5", FKV_MATRIX_AFFINE5, 5, 32},     {"table4", FKV_MATRIX_TABLE4, 4, 32}};

/* Codebook of the IQ4_NL format. */
static const int8_t TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

typedef struct shape {
    uint32_t n_rows;
    uint32_t n_cols;
} shape;

static const shape default_shapes[] = {
    {8960, 1536}, {1536, 8960}, {1536, 1536}}; /* up, down and query projections of Qwen2.5 1.5B */

typedef struct options {
    shape shapes[MAX_LIST];
    uint32_t n_shapes;
    uint32_t threads[MAX_LIST];
    uint32_t n_threads;
    uint32_t tokens[MAX_LIST];
    uint32_t n_tokens;
    bool kinds[N_KINDS];
    uint32_t n_rounds;
    bool quick;
    fkv_isa isa;
    bool json;
} options;

typedef struct result {
    shape shape;
    uint32_t kind;
    uint32_t n_tokens;
    uint32_t n_threads;
    uint32_t n_rounds;
    bool right;
    double error;
    kit_spread ms;
    uint64_t weight_bytes;
    double roof; /* bytes per second */
} result;

typedef struct bench {
    options o;
    FILE *text;
    fkv_workers *workers[MAX_LIST];
    bench_roof roof;
    fkv_matrix matrices[N_KINDS]; /* one matrix per kind; panels is NULL for kinds that are not measured */
    float *x;                     /* [T, C] */
    float *out;                   /* [T, R] */
    float *alone;                 /* [R] */
    void *input;
    double times[N_KINDS][MAX_ROUNDS];
    result *results;
    size_t n_results;
    size_t room_results;
} bench;

/* ---- options ---- */

static const char usage[] =
    "usage: bench_product [options]\n"
    "Times products of activations with packed weights, after comparing the results with double-precision sums.\n"
    "Exit status: 0 success, 1 wrong result, 2 invalid usage, 3 out of memory.\n";

static void take_kinds(options *o, const char *list) {
    char word[KIT_WORD];
    memset(o->kinds, 0, sizeof o->kinds);
    while (kit_next_word(&list, word)) {
        uint32_t i = 0;
        while (i < N_KINDS && strcmp(kinds[i].name, word) != 0) i++;
        if (i == N_KINDS) kit_die(EXIT_USAGE, "--kind %s: unknown kind; see --help", word);
        o->kinds[i] = true;
    }
}

static void take_shapes(options *o, const kit_texts *texts) {
    static const uint32_t max[2] = {1u << 20, 1u << 20};
    if (texts->n > MAX_LIST) kit_die(EXIT_USAGE, "--shape: given more than %d times", MAX_LIST);
    for (uint32_t i = 0; i < texts->n; i++) {
        uint32_t parts[2];
        if (!kit_numbers(texts->texts[i], 'x', max, parts, 2) || parts[1] % 32 != 0)
            kit_die(EXIT_USAGE, "--shape %s: expected RxC with a multiple of 32 columns", texts->texts[i]);
        o->shapes[o->n_shapes++] = (shape){parts[0], parts[1]};
    }
}

static void complete(options *o) {
    if (o->isa == FKV_ISA_AUTO) o->isa = fkv_cpu_best_isa();
    if (!fkv_cpu_runs(o->isa)) kit_die(EXIT_USAGE, "this machine does not support %s; choose auto", fkv_isa_name(o->isa));
    if (o->n_rounds == 0) o->n_rounds = o->quick ? 3 : 15;
    if (o->n_shapes == 0) {
        o->n_shapes = sizeof default_shapes / sizeof default_shapes[0];
        memcpy(o->shapes, default_shapes, sizeof default_shapes);
    }
    for (uint32_t i = 0; o->quick && i < o->n_tokens; i++) o->tokens[i] = fkv_min_u32(o->tokens[i], 20);
    if (o->n_threads == 0) {
        o->threads[o->n_threads++] = 1;
        if (fkv_cpu_count() > 1) o->threads[o->n_threads++] = fkv_cpu_count();
    }
}

static void parse(options *o, int argc, char **argv) {
    kit_texts shapes = {0};
    const char *names = "affine4,centered4,centered5,centered6,centered8,f16,bf16,f32";
    const char *tokens = "1,4,512";
    const char *threads = "";
    const char *isa = NULL;
    const kit_option own[] = {
        {"shape", 0, OPTION_TEXTS, &shapes, 0, "RxC",
         "rows (outputs) and columns (inputs, a multiple of 32); may be repeated\n(default 8960x1536, 1536x8960, 1536x1536)"},
        {"kind", 0, OPTION_TEXT, &names, 0, "LIST",
         "affine4, centered4, centered5, centered6, centered8, f16, bf16, f32, affine5, table4 (default all)"},
        {"tokens", 0, OPTION_TEXT, &tokens, 0, "LIST", "rows of activations (default 1,4,512)"},
        {"threads", 0, OPTION_TEXT, &threads, 0, "LIST", "thread counts (default 1 and the number of cores)"},
        {"isa", 0, OPTION_TEXT, &isa, 0, "NAME",
         "kernels: auto, scalar, neon, avx2, avx512, avx512vnni, amx (default FKV_ISA from the environment, or auto)"},
        {"rounds", 0, OPTION_COUNT, &o->n_rounds, MAX_ROUNDS, "N", "timed calls per case (default 15)"},
        {"quick", 0, OPTION_FLAG, &o->quick, 0, NULL,
         "3 rounds and at most 20 tokens, to test the program; times are not meaningful"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    take_shapes(o, &shapes);
    take_kinds(o, names);
    o->n_tokens = bench_numbers("--tokens", tokens, 1u << 16, o->tokens, MAX_LIST);
    o->n_threads = bench_numbers("--threads", threads, FKV_MAX_THREADS, o->threads, MAX_LIST);
    o->isa = bench_isa(isa);
    complete(o);
}

/* ---- matrices of one shape ---- */

/* Creates a matrix with random weights in a mapping with huge pages, like the weights of a model. Codes are uniformly random;
 * floats have magnitudes of 1/64 to 2/64 and random signs.
 */
static void matrix_open(fkv_matrix *m, const kind *k, shape s) {
    void *map = NULL;
    uint64_t state = SEED;
    if (fkv_matrix_make(k->kind, k->group, s.n_rows, s.n_cols, m) != FKV_OK ||
        fkv_map_open(fkv_matrix_bytes(m), true, &map) != FKV_OK)
        kit_die(EXIT_NO_FIT, "%s", fkv_message());
    m->panels = map;
    if (k->kind == FKV_MATRIX_TABLE4) m->table = TABLE;
    uint8_t *codes = bench_take(s.n_cols * sizeof(float));
    float *scales = bench_take(s.n_cols * sizeof(float));
    float *biases = bench_take(s.n_cols * sizeof(float));
    uint32_t top = k->group == 0 ? 1 : (1u << k->bits) - 1;
    for (uint32_t r = 0; r < s.n_rows; r++) {
        for (uint32_t c = 0; c < s.n_cols; c++) {
            uint64_t random = kit_random(&state);
            uint32_t single = 0x3c800000u | (uint32_t)(random & 0x807fffffu);
            uint16_t half = (uint16_t)(0x2400u | (random & 0x83ffu));
            uint16_t brain = (uint16_t)(0x3c80u | (random & 0x807fu));
            if (k->group != 0)
                codes[c] = (uint8_t)(random & top);
            else if (k->kind == FKV_MATRIX_F32)
                memcpy(codes + 4 * (size_t)c, &single, sizeof single);
            else
                memcpy(codes + 2 * (size_t)c, k->kind == FKV_MATRIX_F16 ? &half : &brain, sizeof half);
            scales[c] = 0.0625f / (float)top;
            biases[c] = -0.03125f;
        }
        if (k->group != 0)
            (void)fkv_matrix_set_codes(m, r, codes, scales, biases);
        else
            fkv_matrix_set_floats(m, r, codes);
    }
    free(codes);
    free(scales);
    free(biases);
}

static void call(bench *b, uint32_t k, const float *x, uint32_t n_tokens, float *out, fkv_workers *workers) {
    const fkv_matrix *m = &b->matrices[k];
    fkv_product p = {m, NULL, out, m->n_rows};
    fkv_product_run(workers, b->o.isa, &p, 1, x, n_tokens, m->n_cols, b->input);
}

/* Compares some outputs of the first and the last token with double-precision sums, and all outputs of the last token with the
 * outputs of the same token computed alone. */
static bool check(bench *b, uint32_t k, uint32_t n_tokens, fkv_workers *workers, double *error) {
    const fkv_matrix *m = &b->matrices[k];
    float *row = bench_take(m->n_cols * sizeof *row);
    double off = 0;
    double size = 0;
    call(b, k, b->x, n_tokens, b->out, workers);
    for (uint32_t i = 0; i < N_CHECKED; i++) {
        uint32_t r = (uint32_t)((uint64_t)i * (m->n_rows - 1) / (N_CHECKED - 1));
        size_t t = i % 2 == 0 ? 0 : n_tokens - 1;
        double truth = 0;
        fkv_matrix_get_row(m, r, row);
        for (uint32_t c = 0; c < m->n_cols; c++) truth += (double)row[c] * (double)b->x[t * m->n_cols + c];
        double got = (double)b->out[t * m->n_rows + r];
        off += (got - truth) * (got - truth);
        size += truth * truth;
    }
    free(row);
    *error = sqrt(off / size);
    call(b, k, b->x + (size_t)(n_tokens - 1) * m->n_cols, 1, b->alone, workers);
    return *error <= PRODUCT_TOLERANCE &&
           memcmp(b->alone, b->out + (size_t)(n_tokens - 1) * m->n_rows, m->n_rows * sizeof *b->alone) == 0;
}

/* ---- rounds and tables ---- */

static result *add_result(bench *b) {
    if (b->n_results == b->room_results) {
        b->room_results = b->room_results * 2 + 64;
        b->results = kit_realloc(b->results, b->room_results * sizeof *b->results);
    }
    return &b->results[b->n_results++];
}

static double bytes_a_second(const result *r) { return (double)r->weight_bytes / r->ms.p50 * 1e3; }

static double products_a_second(const result *r) {
    return (double)r->shape.n_rows * r->shape.n_cols * r->n_tokens / r->ms.p50 * 1e3;
}

static void print_result(const bench *b, const result *r) {
    (void)fprintf(b->text, "  %-11s %6u %7u", kinds[r->kind].name, r->n_tokens, r->n_threads);
    if (!r->right) {
        (void)fprintf(
            b->text,
            "  WRONG: relative L2 error %.1e (%.0e allowed), or not bit-identical to the result of the token alone; not timed\n",
            r->error, PRODUCT_TOLERANCE);
        return;
    }
    (void)fprintf(b->text, " %9.3f %9.3f %9.3f %8.2f %7.1f %% %9.1f %9.1e\n", r->ms.p50, r->ms.p10, r->ms.p90,
                  bytes_a_second(r) * 1e-9, bytes_a_second(r) / r->roof * 100, products_a_second(r) * 1e-9, r->error);
}

/* Measures all matrix kinds for one number of tokens and one number of threads. */
static void run_rounds(bench *b, shape s, uint32_t n_tokens, uint32_t t) {
    size_t first = b->n_results;
    size_t first_roof = b->roof.n_samples[t];
    for (uint32_t k = 0; k < N_KINDS; k++) {
        if (!b->o.kinds[k]) continue;
        result *r = add_result(b);
        *r = (result){s, k, n_tokens, b->o.threads[t], b->o.n_rounds, .weight_bytes = fkv_matrix_bytes(&b->matrices[k])};
        r->right = check(b, k, n_tokens, b->workers[t], &r->error);
    }
    for (uint32_t round = 0; round < b->o.n_rounds; round++) {
        for (size_t i = first; i < b->n_results; i++) {
            if (!b->results[i].right) continue;
            uint32_t k = b->results[i].kind;
            (void)bench_roof_stream(&b->roof, b->workers[t], t);
            bench_read(b->x, (size_t)n_tokens * s.n_cols * sizeof *b->x);
            bench_wake(b->workers[t]);
            double start = kit_seconds();
            call(b, k, b->x, n_tokens, b->out, b->workers[t]);
            b->times[k][round] = (kit_seconds() - start) * 1e3;
        }
    }
    for (size_t i = first; i < b->n_results; i++) {
        result *r = &b->results[i];
        r->roof = bench_roof_median(&b->roof, t, first_roof);
        if (r->right) r->ms = kit_spread_of(b->times[r->kind], b->o.n_rounds);
        print_result(b, r);
    }
    (void)fflush(b->text);
}

static void run_shape(bench *b, shape s) {
    uint32_t most = 1;
    uint64_t state = SEED;
    for (uint32_t i = 0; i < b->o.n_tokens; i++) most = fkv_max_u32(most, b->o.tokens[i]);
    b->x = bench_take((size_t)most * s.n_cols * sizeof *b->x);
    b->out = bench_take((size_t)most * s.n_rows * sizeof *b->out);
    b->alone = bench_take(s.n_rows * sizeof *b->alone);
    b->input = bench_take(fkv_product_input_bytes(most, s.n_cols));
    kit_gaussian(&state, (size_t)most * s.n_cols, b->x);
    for (uint32_t k = 0; k < N_KINDS; k++)
        if (b->o.kinds[k]) matrix_open(&b->matrices[k], &kinds[k], s);
    (void)fprintf(
        b->text,
        "\n%u rows, %u columns\n  %-11s %6s %7s %9s %9s %9s %8s %9s %9s %9s\n  %-11s %6s %7s %9s %9s %9s %8s %9s %9s %9s\n",
        s.n_rows, s.n_cols, "", "", "", "median", "p10", "p90", "weights", "of read", "", "error", "kind", "tokens", "threads",
        "ms", "ms", "ms", "GB/s", "roof", "GMAC/s", "rel. L2");
    for (uint32_t i = 0; i < b->o.n_tokens; i++)
        for (uint32_t t = 0; t < b->o.n_threads; t++) run_rounds(b, s, b->o.tokens[i], t);
    for (uint32_t k = 0; k < N_KINDS; k++)
        if (b->o.kinds[k]) fkv_map_close(b->matrices[k].panels, fkv_matrix_bytes(&b->matrices[k]));
    free(b->x);
    free(b->out);
    free(b->alone);
    free(b->input);
}

static int write_json(const bench *b) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "bench", PROGRAM);
    kit_json_text(json, "version", fkv_version());
    kit_json_text(json, "isa", fkv_isa_name(b->o.isa));
    kit_json_array(json, "results");
    for (size_t i = 0; i < b->n_results; i++) {
        const result *r = &b->results[i];
        kit_json_object(json, NULL);
        kit_json_text(json, "kind", kinds[r->kind].name);
        kit_json_integer(json, "rows", r->shape.n_rows);
        kit_json_integer(json, "cols", r->shape.n_cols);
        kit_json_integer(json, "tokens", r->n_tokens);
        kit_json_integer(json, "threads", r->n_threads);
        kit_json_integer(json, "rounds", r->n_rounds);
        kit_json_bool(json, "right", r->right);
        kit_json_real(json, "error_l2", r->error);
        kit_json_real(json, "ms_p50", r->right ? r->ms.p50 : NAN);
        kit_json_real(json, "ms_p10", r->right ? r->ms.p10 : NAN);
        kit_json_real(json, "ms_p90", r->right ? r->ms.p90 : NAN);
        kit_json_integer(json, "weight_bytes", r->weight_bytes);
        kit_json_real(json, "weight_gb_s", r->right ? bytes_a_second(r) * 1e-9 : NAN);
        kit_json_real(json, "read_roof_gb_s", r->roof * 1e-9);
        kit_json_real(json, "roof_share", r->right ? bytes_a_second(r) / r->roof : NAN);
        kit_json_real(json, "gmac_s", r->right ? products_a_second(r) * 1e-9 : NAN);
        kit_json_close(json);
    }
    return kit_json_print(json);
}

int main(int argc, char **argv) {
    static bench b;
    kit_set_program(PROGRAM);
    parse(&b.o, argc, argv);
    b.text = b.o.json ? stderr : stdout;
    for (uint32_t t = 0; t < b.o.n_threads; t++) b.workers[t] = bench_workers_open(b.o.threads[t]);
    bench_roof_open(&b.roof, b.o.quick);
    (void)fprintf(
        b.text,
        "flatkv %s, %s kernels; medians of %u rounds; %llu MiB are streamed before each call to measure the read bandwidth (roof)\n",
        fkv_version(), fkv_isa_name(b.o.isa), b.o.n_rounds, (unsigned long long)(b.roof.bytes >> 20));
    for (uint32_t i = 0; i < b.o.n_shapes; i++) run_shape(&b, b.o.shapes[i]);

    (void)fprintf(b.text, "\nread roof:");
    for (uint32_t t = 0; t < b.o.n_threads; t++)
        (void)fprintf(b.text, "%s %u threads %.1f GB/s", t == 0 ? "" : ",", b.o.threads[t],
                      bench_roof_median(&b.roof, t, 0) * 1e-9);
    size_t n_wrong = 0;
    for (size_t i = 0; i < b.n_results; i++) n_wrong += !b.results[i].right;
    (void)fprintf(b.text, "\n%zu results, %zu wrong\n", b.n_results, n_wrong);
    if (b.o.json && write_json(&b) != EXIT_GOOD) return EXIT_FAILED;
    return n_wrong == 0 && b.n_results > 0 ? EXIT_GOOD : EXIT_FAILED;
}
