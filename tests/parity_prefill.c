/* Prefill's own text, compiled for the host with one thread for each thread of a block, against the scalar truth and itself: as a
 * Hopper does it, its warpgroups played by hand, and in the plain loops. The layers are those of kernel_cases; the rows are
 * these. A number as argument runs one case only.
 */
#include "kernel_cases.h"

#include "../src/attn/kernels/kernel_text.h"
#include "../src/attn/kernels/step_table.h"
#include "../src/attn/truth.h"
#include "../src/codec/half.h"

#include <stdio.h>
#include <stdlib.h>

/* Floats against doubles, weights and values rounded to halves. */
static const double KERNEL_TOLERANCE = 1e-3;

#define ENTRY(i) kernel_entry kernel_case_##i;
#define EACH_CASE(x)                                                                                                             \
    x(0) x(1) x(2) x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11) x(12) x(13) x(14) x(15) x(16) x(17) x(18) x(19) x(20) x(21)    \
        x(22) x(23)
EACH_CASE(ENTRY)
#define POINTER(i) kernel_case_##i,
static kernel_entry *const entries[] = {EACH_CASE(POINTER)};
_Static_assert(sizeof entries / sizeof entries[0] == N_KERNEL_CASES, "a case of kernel_cases has no entry here");
_Static_assert(KERNEL_PLAIN_PREFILL == (int)FKV_N_KERNELS, "the plain loops' number");

static int n_passed;
static int n_failed;
static double worst_error;

static void report(bool good, uint32_t i, const char *way, const char *what, double value) {
    if (good)
        n_passed++;
    else
        n_failed++;
    if (!good) printf("FAILED case %u, %s: %s (%g)\n", i, way, what, value);
}

static void *take(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    return block;
}

/* One way to attend: the kernel's number as an entry knows it, and the device whose shape the launch has. */
typedef struct way {
    const char *name;
    int kernel;
    fkv_kernel_device shape;
} way;

static const way ways[] = {{"warpgroups", FKV_KERNEL_PREFILL, FKV_KERNEL_HOST},
                           {"plain", KERNEL_PLAIN_PREFILL, FKV_KERNEL_METAL}};

/* decoded: rows of decode items, carried over; NULL: there are none. */
static void attend(uint32_t i, way how, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q,
                   const void *decoded, void *out) {
    uint32_t tile_queries = fkv_prefill_queries(how.shape, layer);
    fkv_step_cut cut = fkv_step_cut_of(layer, tile_queries);
    uint32_t *table = take(fkv_step_table_words(&cut, rows, n_rows) * sizeof *table);
    fkv_step_table_fill(&cut, rows, n_rows, table);
    uint32_t slices = fkv_ceil_div(tile_queries * (layer->n_q_heads / layer->n_kv_heads), fkv_prefill_rows(how.shape, layer));
    uint32_t grid[3] = {table[FKV_STEP_N_TILES] + (decoded != NULL), layer->n_kv_heads, slices};
    int kernel = decoded != NULL ? FKV_KERNEL_PREFILL_BESIDE : how.kernel;
    entries[i](kernel, grid, fkv_kernel_threads(how.shape, FKV_KERNEL_PREFILL, layer), 256,
               (const void *const[]){q, layer->pages, table, decoded}, out);
    free(table);
}

/* The same bits when each row goes alone, in two chunks. */
static void check_chunks(uint32_t i, way how, const attn_world *w, uint32_t n_rows, const uint8_t *together) {
    size_t row_bytes = (size_t)w->c.shape.n_q_heads * w->c.shape.head_dim * fkv_type_bytes(w->c.row_type);
    uint8_t *alone = take(w->n_new * row_bytes);
    size_t at = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint32_t n = w->rows[r].n_tokens;
        for (uint32_t first = 0; first < n; first = first == 0 ? FKV_ITEM_QUERIES + 2 : n) {
            fkv_attn_row chunk = w->rows[r];
            chunk.start += first;
            chunk.n_tokens = first == 0 ? FKV_ITEM_QUERIES + 2 : n - first;
            attend(i, how, &w->layer, &chunk, 1, (const uint8_t *)w->q + at, NULL, alone + at);
            at += chunk.n_tokens * row_bytes;
        }
    }
    report(memcmp(alone, together, at) == 0, i, how.name, "bits change with the chunks", 0);
    free(alone);
}

static void check_case(uint32_t i, fkv_workers *workers) {
    attn_case c = kernel_cases[i];
    c.n_rows = 3; /* the last is decode's */
    c.rows[0].n_tokens = 2 * FKV_ITEM_QUERIES + 3;
    uint32_t tile = 128 * c.shape.n_kv_heads / c.shape.n_q_heads;
    c.rows[1] = (attn_mix){0, tile <= 32 ? fkv_max_u32(tile + 2, c.rows[0].n_tokens)
                                         : c.rows[0].n_tokens}; /* of two tiles where few make one */
    c.rows[2] = (attn_mix){5, 2};
    attn_world w;
    if (!attn_world_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261115)) abort();

    size_t row = (size_t)c.shape.n_q_heads * c.shape.head_dim;
    size_t n = (w.n_new - c.rows[2].n_tokens) * row;
    size_t number = fkv_type_bytes(c.row_type);
    attn_world w32 = w;
    w32.layer.row_type = FKV_F32;
    float *q32 = take(n * sizeof *q32);
    float *truth = take(n * sizeof *truth);
    float *got32 = take(n * sizeof *got32);
    uint8_t *got = take(w.n_new * row * number);
    uint8_t *beside = take(w.n_new * row * number);
    fkv_rows_to_f32(c.row_type, w.q, q32, n);
    fkv_attn_truth(&w32.layer, w.rows, 2, q32, truth);
    double rounding = c.row_type == FKV_F32 ? 0 : c.row_type == FKV_F16 ? 0x1p-11 : 0x1p-8; /* what the row type alone may cost */
    for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
        memset(got, 0xff, w.n_new * row * number);
        attend(i, ways[k], &w.layer, w.rows, 2, w.q, NULL, got);
        fkv_rows_to_f32(c.row_type, got, got32, n);
        double worst = 0;
        for (size_t at = 0; at < n; at += c.shape.head_dim) {
            double error = relative_l2(got32 + at, truth + at, c.shape.head_dim);
            if (!(error <= worst)) worst = error;
        }
        report(worst <= KERNEL_TOLERANCE + rounding, i, ways[k].name, "relative L2 error against the truth", worst);
        printf("case %u, %s: %.1e\n", i, ways[k].name, worst);
        if (c.row_type == FKV_F32 && !(worst <= worst_error)) worst_error = worst;
        check_chunks(i, ways[k], &w, 2, got);
        if (ways[k].kernel != FKV_KERNEL_PREFILL) continue;
        memset(beside, 0xff, w.n_new * row * number);
        attend(i, ways[k], &w.layer, w.rows, 3, w.q, w.q, beside); /* any rows will do for those of decode */
        report(memcmp(beside, got, n * number) == 0, i, ways[k].name, "bits change beside decode items", 0);
        report(memcmp(beside + n * number, (const uint8_t *)w.q + n * number, (w.n_new * row - n) * number) == 0, i, ways[k].name,
               "decode's rows were not carried", 0);
    }
    free(q32);
    free(truth);
    free(got32);
    free(got);
    free(beside);
    attn_world_close(&w);
}

int main(int argc, char **argv) {
    void *place = take(fkv_workers_bytes(1));
    memset(place, 0, fkv_workers_bytes(1));
    fkv_workers *workers;
    if (fkv_workers_open(place, 1, &workers) != FKV_OK) return EXIT_FAILURE;
    for (uint32_t i = 0; i < N_KERNEL_CASES; i++)
        if (argc == 1 || (uint32_t)atoi(argv[1]) == i) check_case(i, workers);
    printf("largest relative L2 error %.1e\n%d passed, %d failed\n", worst_error, n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
