/* The GPU kernels' own text, compiled for the host with one thread for each thread of a block, against the scalar truth, the
 * codec and themselves. A number as argument runs one case only.
 */
#include "kernel_cases.h"

#include "../src/attn/kernels/kernel_text.h"
#include "../src/attn/kernels/step_table.h"
#include "../src/attn/truth.h"
#include "../src/codec/half.h"

#include <stdio.h>
#include <stdlib.h>

/* As parity_attn's: floats against doubles, and here also p rounded to a half. */
static const double KERNEL_TOLERANCE = 1e-3;

#define ENTRY(i) kernel_entry kernel_case_##i;
#define EACH_CASE(x)                                                                                                             \
    x(0) x(1) x(2) x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11) x(12) x(13) x(14) x(15) x(16) x(17) x(18) x(19) x(20) x(21)    \
        x(22) x(23)
EACH_CASE(ENTRY)
#define POINTER(i) kernel_case_##i,
static kernel_entry *const entries[] = {EACH_CASE(POINTER)};
kernel_entry kernel_case_0_alone;
kernel_entry kernel_case_1_alone;
kernel_entry kernel_case_2_alone;
static kernel_entry *const entries_alone[N_KERNEL_CASES_ALONE] = {kernel_case_0_alone, kernel_case_1_alone, kernel_case_2_alone};
_Static_assert(sizeof entries / sizeof entries[0] == N_KERNEL_CASES, "a case of kernel_cases has no entry here");

static int n_passed;
static int n_failed;
static double worst_error;

static void report(bool good, uint32_t i, const char *what, double value) {
    if (good)
        n_passed++;
    else
        n_failed++;
    if (!good) printf("FAILED case %u: %s (%g)\n", i, what, value);
}

static void *take(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    return block;
}

static void launch(kernel_entry *entry, const fkv_attn_layer *layer, fkv_kernel kernel, uint32_t x, uint32_t y, uint32_t z,
                   const void *const *in, void *out) {
    uint32_t threads = fkv_kernel_threads(FKV_KERNEL_HOST, kernel, layer);
    uint32_t team = threads / 4; /* decode: the warps of a stream */
    entry((int)kernel, (const uint32_t[]){x, y, z}, threads, team, in, out);
}

static uint32_t *table_of(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows) {
    fkv_step_cut cut = fkv_step_cut_of(layer, 64);
    uint32_t n = fkv_step_table_words(&cut, rows, n_rows);
    uint32_t *words = take((n + 1) * sizeof *words);
    words[n] = 0xdecade;
    fkv_step_table_fill(&cut, rows, n_rows, words);
    if (words[n] != 0xdecade) abort();
    return words;
}

/* queries: of an item, for which the entry's decode kernel was compiled. */
static void attend(kernel_entry *entry, uint32_t queries, const attn_world *w, const fkv_attn_row *rows, uint32_t n_rows,
                   const void *q, void *out) {
    const fkv_attn_layer *layer = &w->layer;
    uint32_t *table = table_of(layer, rows, n_rows);
    uint64_t n = fkv_step_parts_floats(layer, table);
    float *parts = take(n * sizeof *parts);
    memset(parts, 0xff, n * sizeof *parts);
    uint32_t rows_of_item = layer->n_q_heads / layer->n_kv_heads * table[FKV_STEP_ITEM_QUERIES];
    uint32_t chunk = fkv_decode_rows(FKV_KERNEL_HOST, layer, queries);
    launch(entry, layer, FKV_KERNEL_DECODE, table[FKV_STEP_N_PIECES] * fkv_ceil_div(rows_of_item, chunk), layer->n_kv_heads, 1,
           (const void *const[]){q, layer->pages, table}, parts);
    launch(entry, layer, FKV_KERNEL_MERGE, table[FKV_STEP_N_ITEMS], layer->n_q_heads, table[FKV_STEP_ITEM_QUERIES],
           (const void *const[]){parts, table}, out);
    free(parts);
    free(table);
}

/* Rows that the codec and the kernel store must be the same bytes. */
static void check_write(uint32_t i, const attn_world *w, fkv_workers *workers) {
    kernel_entry *entry = entries[i];
    const fkv_attn_layer *layer = &w->layer;
    size_t n = (size_t)w->n_new * layer->n_kv_heads * layer->head_dim;
    uint64_t state = 77;
    void *k = take(n * fkv_type_bytes(layer->row_type));
    void *v = take(n * fkv_type_bytes(layer->row_type));
    attn_random_rows(&state, layer->row_type, layer->head_dim, w->c.outliers, n, k);
    attn_random_rows(&state, layer->row_type, layer->head_dim, !w->c.outliers, n, v);
    uint32_t n_pages = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) n_pages += w->rows[r].view.n_fixed;
    size_t bytes = (size_t)n_pages * layer->n_kv_heads * layer->block.bytes;
    fkv_attn_layer by[2] = {*layer, *layer};
    for (int b = 0; b < 2; b++) {
        by[b].pages = take(bytes);
        memcpy(by[b].pages, layer->pages, bytes);
    }
    fkv_attn_write(fkv_cpu_kernels_for(FKV_ISA_SCALAR), &by[0], w->rows, w->c.n_rows, k, v, workers);
    uint32_t *table = table_of(layer, w->rows, w->c.n_rows);
    uint32_t ticket[1] = {0};
    launch(entry, layer, FKV_KERNEL_WRITE, w->n_new, layer->n_kv_heads, 2, (const void *const[]){k, v, by[1].pages, table},
           ticket);
    size_t differ = 0;
    for (size_t b = 0; b < bytes; b++) differ += by[0].pages[b] != by[1].pages[b];
    report(differ == 0, i, "bytes that are not the codec's", (double)differ);
    report(memcmp(by[1].pages, layer->pages, bytes) != 0 && ticket[0] != 0, i, "nothing was written", 0);

    const uint32_t pair[2] = {0, n_pages - 1};
    launch(entry, layer, FKV_KERNEL_COPY_PAGES, 1, layer->n_kv_heads, 1, (const void *const[]){pair, by[1].pages}, ticket);
    size_t page = (size_t)layer->n_kv_heads * layer->block.bytes;
    report(memcmp(by[1].pages, by[1].pages + (n_pages - 1) * page, page) == 0, i, "a page was not copied", 0);
    for (int b = 0; b < 2; b++) free(by[b].pages);
    free(table);
    free(k);
    free(v);
}

static void check_case(uint32_t i, fkv_workers *workers) {
    const attn_case *c = &kernel_cases[i];
    attn_world w;
    if (!attn_world_open(&w, c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261115)) abort();
    check_write(i, &w, workers);

    size_t row = (size_t)c->shape.n_q_heads * c->shape.head_dim;
    size_t n = w.n_new * row;
    attn_world w32 = w;
    w32.layer.row_type = FKV_F32;
    float *q32 = take(n * sizeof *q32);
    float *truth = take(n * sizeof *truth);
    float *got32 = take(n * sizeof *got32);
    uint8_t *got = take(n * fkv_type_bytes(c->row_type));
    uint8_t *alone = take(n * fkv_type_bytes(c->row_type));
    fkv_rows_to_f32(c->row_type, w.q, q32, n);
    fkv_attn_truth(&w32.layer, w.rows, c->n_rows, q32, truth);
    memset(got, 0xff, n * fkv_type_bytes(c->row_type));
    attend(entries[i], kernel_case_queries(c), &w, w.rows, c->n_rows, w.q, got);
    fkv_rows_to_f32(c->row_type, got, got32, n);
    /* what rounding to the row type alone may cost */
    double rounding = c->row_type == FKV_F32 ? 0 : c->row_type == FKV_F16 ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    for (size_t at = 0; at < n; at += c->shape.head_dim) {
        double error = relative_l2(got32 + at, truth + at, c->shape.head_dim);
        if (!(error <= worst)) worst = error;
    }
    report(worst <= KERNEL_TOLERANCE + rounding, i, "relative L2 error against the truth", worst);
    printf("case %u: %.1e\n", i, worst);
    if (c->row_type == FKV_F32 && !(worst <= worst_error)) worst_error = worst;

    size_t at = 0;
    size_t row_bytes = row * fkv_type_bytes(c->row_type);
    for (uint32_t r = 0; r < c->n_rows; r++) {
        for (uint32_t t = 0; t < w.rows[r].n_tokens; t++, at += row_bytes) {
            fkv_attn_row one = w.rows[r];
            one.start += t;
            one.n_tokens = 1;
            if (i < N_KERNEL_CASES_ALONE)
                attend(entries_alone[i], 1, &w, &one, 1, (const uint8_t *)w.q + at, alone + at);
            else
                attend(entries[i], kernel_case_queries(c), &w, &one, 1, (const uint8_t *)w.q + at, alone + at);
        }
    }
    report(memcmp(alone, got, w.n_new * row_bytes) == 0, i, "bits change when tokens go alone", 0);
    free(q32);
    free(truth);
    free(got32);
    free(got);
    free(alone);
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
