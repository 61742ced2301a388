/* Runs the GPU kernels, compiled for the host, and compares their results with the scalar reference, the codec and each other.
 * Covers the Hopper variants (with emulated tensor cores and warpgroups), the Metal variants (with emulated simdgroup matrices)
 * and the variants with plain loops.
 *
 * usage: parity_kernels decode|prefill [case | share/shares]
 */
#include "kernel_cases.h"

#include "../src/attn/attn_reference.h"
#include "../src/attn/gpu/kernel_source.h"
#include "../src/attn/gpu/step_table.h"
#include "../src/base/float16.h"
#include "../src/codec/sealed.h"
#include "sanitized.h"

#include <stdio.h>
#include <stdlib.h>

/* Tolerance for kernels that sum in float instead of double and, in some cases, round softmax weights and values to 16 bits. */
static const double KERNEL_TOLERANCE = 1e-3;

/* Entry functions of the cases. NULL if the case is not part of the build. */
#define FIRST_CASES(x) x(0) x(1) x(2)
#if ALL_KERNEL_CASES
#define EACH_CASE(x)                                                                                                             \
    FIRST_CASES(x)                                                                                                               \
    x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11) x(12) x(13) x(14) x(15) x(16) x(17) x(18) x(19) x(20) x(21) x(22) x(23) x(24) \
        x(25) x(26) x(27) x(28) x(29) x(30) x(31) x(32) x(33) x(34) x(35) x(36) x(37) x(38) x(39) x(40) x(41) x(42) x(43) x(44)  \
            x(45) x(46) x(47) x(48) x(49) x(50) x(51) x(52) x(53) x(54) x(55) x(56) x(57) x(58) x(59) x(60) x(61) x(62) x(63)    \
                x(64) x(65) x(66) x(67) x(68) x(69) x(70) x(71) x(72) x(73) x(74) x(75) x(76) x(77)
#else
#define EACH_CASE(x) FIRST_CASES(x) x(42)
#endif
#define ENTRY(i) kernel_entry kernel_case_##i;
EACH_CASE(ENTRY)
#define POINTER(i) [i] = kernel_case_##i,
static kernel_entry *const entries[N_KERNEL_CASES] = {EACH_CASE(POINTER)};
kernel_entry kernel_case_0_alone;
kernel_entry kernel_case_1_alone;
kernel_entry kernel_case_2_alone;
static kernel_entry *const entries_alone[N_KERNEL_CASES_ALONE] = {kernel_case_0_alone, kernel_case_1_alone, kernel_case_2_alone};
_Static_assert(KERNEL_SIMDGROUP_DECODE == (int)FKV_N_KERNELS, "additional kernels follow those of fkv_kernel");

/* A kernel variant: its number in the entry function, and the device whose grid and block sizes it uses. */
typedef struct variant {
    const char *name;
    int kernel;
    fkv_kernel_device shape;
} variant;

static const variant decode_variants[] = {{"decode as CUDA", FKV_KERNEL_DECODE, FKV_KERNEL_HOST},
                                          {"decode as Metal", KERNEL_SIMDGROUP_DECODE, FKV_KERNEL_METAL}};
static const variant prefill_variants[] = {{"prefill as a Hopper", FKV_KERNEL_PREFILL, FKV_KERNEL_HOST},
                                           {"prefill as Metal", KERNEL_SIMDGROUP_PREFILL, FKV_KERNEL_METAL},
                                           {"plain prefill", KERNEL_PLAIN_PREFILL, FKV_KERNEL_METAL}};

uint32_t kernel_softcap_bits; /* bit pattern of the current layer's soft cap, which the generated kernels read (see
                                 make_kernel_sources.c) */

static int n_passed;
static int n_failed;
static double worst_error;

static void report(bool good, uint32_t i, const char *name, const char *what, double value) {
    if (good)
        n_passed++;
    else
        n_failed++;
    if (!good) printf("FAILED case %u, %s: %s (%g)\n", i, name, what, value);
}

static void *allocate(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    return block;
}

static uint32_t *table_of(const fkv_attn_layer *layer, uint32_t tile_queries, const fkv_attn_row *rows, uint32_t n_rows) {
    fkv_step_plan cut = fkv_step_plan_of(layer, tile_queries);
    uint32_t n = fkv_step_table_words(&cut, rows, n_rows);
    uint32_t *words = allocate((n + 1) * sizeof *words);
    words[n] = 0xdecade;
    fkv_step_table_fill(&cut, rows, n_rows, words);
    if (words[n] != 0xdecade) abort();
    return words;
}

static void set_softcap(attn_fixture *w, float cap) {
    w->layer.softcap = cap;
    memcpy(&kernel_softcap_bits, &cap, sizeof cap);
}

static void spoil_token(const attn_fixture *w, uint32_t r, uint32_t token, bool k_too) {
    const fkv_block *block = &w->layer.block;
    uint32_t page = fkv_page_at(w->rows[r].view, token / block->page_tokens);
    kernel_spoil_row(block, w->layer.n_kv_heads, w->pages + (size_t)page * w->layer.n_kv_heads * block->bytes,
                     token % block->page_tokens, k_too);
    if (w->layer.sealed)
        kernel_spoil_row(&w->layer.open, w->layer.n_kv_heads, w->open + (size_t)page * w->layer.n_kv_heads * w->layer.open.bytes,
                         token % block->page_tokens, k_too);
}

/* Overwrites rows with NaN: K and V of a token before every window, V of a token that only the first query sees, and V of the
 * last token, which only the last query sees. Returns true if anything was overwritten. */
static bool spoil(const attn_fixture *w, uint32_t n_rows) {
    bool any = false;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint32_t start = w->rows[r].start;
        uint32_t n = w->rows[r].n_tokens;
        uint32_t window = w->layer.window;
        bool has_masked = window != 0 && start >= window + w->layer.n_sinks;
        if (has_masked) spoil_token(w, r, start - window, true);
        if (has_masked && n > 1) spoil_token(w, r, start + 1 - window, false);
        if (n > (has_masked ? 2u : 1u)) spoil_token(w, r, start + n - 1, false);
        any = any || has_masked || n > 1;
    }
    return any;
}

/* Outputs of the first n_rows sequences of a case, and the corresponding reference outputs. */
typedef struct answer {
    const attn_fixture *w;
    uint32_t i;       /* index of the case */
    size_t n;         /* number of output values */
    float *reference; /* reference outputs [T, H, D] */
    uint8_t *got;     /* kernel outputs [T, H, D] in the row type */
    uint8_t *also;    /* kernel outputs [T, H, D] of a second run */
} answer;

static answer answer_open(uint32_t i, const attn_fixture *w, uint32_t n_rows) {
    const attn_case *c = &w->c;
    size_t row = (size_t)c->shape.n_q_heads * c->shape.head_dim;
    answer a = {.w = w, .i = i};
    for (uint32_t r = 0; r < n_rows; r++) a.n += w->rows[r].n_tokens * row;
    const size_t n_q = a.n / c->shape.head_dim * fkv_attn_key_dim(&w->layer);
    float *q = allocate(n_q * sizeof *q);
    a.reference = allocate(a.n * sizeof *a.reference);
    a.got = allocate(w->n_new * row * fkv_type_bytes(c->row_type));
    a.also = allocate(w->n_new * row * fkv_type_bytes(c->row_type));
    fkv_rows_to_f32(c->row_type, w->q, q, n_q);
    fkv_attn_layer layer = w->layer;
    layer.row_type = FKV_F32;
    fkv_attn_reference(&layer, w->rows, n_rows, q, a.reference);
    free(q);
    return a;
}

static void answer_close(answer *a) {
    free(a->reference);
    free(a->got);
    free(a->also);
}

static void check_reference(const answer *a, const char *name) {
    const attn_case *c = &a->w->c;
    float *got = allocate(a->n * sizeof *got);
    fkv_rows_to_f32(c->row_type, a->got, got, a->n);
    double rounding = c->row_type == FKV_F32   ? 0
                      : c->row_type == FKV_F16 ? 0x1p-11
                                               : 0x1p-8; /* largest relative error of rounding to the row type */
    double worst = 0;
    size_t n_hidden = 0;
    for (size_t at = 0; at < a->n; at += c->shape.head_dim) {
        double error = relative_l2(got + at, a->reference + at, c->shape.head_dim);
        if (kernel_has_nan(a->reference + at, c->shape.head_dim)) /* where the reference is NaN, the output must be NaN */
            n_hidden += !kernel_has_nan(got + at, c->shape.head_dim);
        else if (!(error <= worst))
            worst = error;
    }
    report(worst <= KERNEL_TOLERANCE + rounding, a->i, name, "relative L2 error against the reference", worst);
    report(n_hidden == 0, a->i, name, "outputs that should be NaN are not", (double)n_hidden);
    printf("case %u, %s, cap %g: %.1e\n", a->i, name, (double)a->w->layer.softcap, worst);
    if (c->row_type == FKV_F32 && !(worst <= worst_error)) worst_error = worst;
    free(got);
}

enum { MAX_INPUTS = 8 };

/* Runs a kernel that reads or seals pages. If the keys are calibrated, the first input is the channel orders of the KV heads,
 * which precede the inputs in `in`. */
static void run(kernel_entry *entry, const fkv_attn_layer *layer, int kernel, const uint32_t grid[3], uint32_t n_threads,
                const void *const in[MAX_INPUTS], void *out) {
    const void *inputs[1 + MAX_INPUTS];
    if (!layer->calibrated) {
        entry(kernel, grid, n_threads, in, out);
        return;
    }
    uint32_t *orders = allocate((size_t)layer->n_kv_heads * fkv_kernel_order_words(layer) * sizeof *orders);
    fkv_kernel_orders(layer, orders);
    inputs[0] = orders;
    memcpy(inputs + 1, in, MAX_INPUTS * sizeof *in);
    entry(kernel, grid, n_threads, inputs, out);
    free(orders);
}

/* ---- write and decode ---- */

static void launch(kernel_entry *entry, const fkv_attn_layer *layer, fkv_kernel kernel, uint32_t x, uint32_t y, uint32_t z,
                   const void *const *in, void *out) {
    entry((int)kernel, (const uint32_t[]){x, y, z}, fkv_kernel_threads(FKV_KERNEL_HOST, kernel, layer), in, out);
}

/* Runs the decode kernels. queries: maximum number of queries per work item, for which the decode kernel of `entry` must have
 * been compiled. */
static void decode(kernel_entry *entry, variant v, uint32_t queries, const attn_fixture *w, const fkv_attn_row *rows,
                   uint32_t n_rows, const void *q, void *out) {
    const fkv_attn_layer *layer = &w->layer;
    uint32_t *table = table_of(layer, 64, rows, n_rows);
    uint64_t n = fkv_step_parts_floats(layer, table);
    float *parts = allocate(n * sizeof *parts);
    memset(parts, 0xff, n * sizeof *parts);
    uint32_t rows_of_item = layer->n_q_heads / layer->n_kv_heads * table[FKV_STEP_ITEM_QUERIES];
    uint32_t chunks = fkv_ceil_div(rows_of_item, fkv_decode_rows(v.shape, layer, queries));
    run(entry, layer, v.kernel, (const uint32_t[]){table[FKV_STEP_N_SPLITS] * chunks, layer->n_kv_heads, 1},
        fkv_kernel_threads(v.shape, FKV_KERNEL_DECODE, layer),
        layer->sealed ? (const void *const[MAX_INPUTS]){q, layer->pages, layer->open_pages, table}
                      : (const void *const[MAX_INPUTS]){q, layer->pages, table},
        parts);
    launch(entry, layer, FKV_KERNEL_MERGE, table[FKV_STEP_N_ITEMS], layer->n_q_heads, table[FKV_STEP_ITEM_QUERIES],
           (const void *const[]){parts, table, layer->sink_logits}, out);
    free(parts);
    free(table);
}

/* Checks that the kernel that merges its splits itself gives bit-identical outputs and resets its counters. expected: the outputs
 * of separate kernels for decode and merge. */
static void check_merge(uint32_t i, kernel_entry *entry, uint32_t queries, const attn_fixture *w, const fkv_attn_row *rows,
                        uint32_t n_rows, const void *q, const void *expected) {
    const fkv_attn_layer *layer = &w->layer;
    uint32_t *table = table_of(layer, 64, rows, n_rows);
    size_t bytes = (size_t)table[FKV_STEP_N_TOKENS] * layer->n_q_heads * layer->head_dim * fkv_type_bytes(w->c.row_type);
    uint32_t block_rows = fkv_decode_rows(FKV_KERNEL_HOST, layer, queries);
    uint32_t chunks = fkv_ceil_div(layer->n_q_heads / layer->n_kv_heads * table[FKV_STEP_ITEM_QUERIES], block_rows);
    uint32_t n_blocks = table[FKV_STEP_N_SPLITS] * chunks * layer->n_kv_heads;
    uint8_t *out = allocate(bytes);
    float *parts = allocate(fkv_step_parts_floats(layer, table) * sizeof *parts);
    uint32_t *counters = calloc(n_blocks, sizeof *counters);
    if (counters == NULL) abort();
    memset(out, 0xff, bytes);
    memset(parts, 0xff, fkv_step_parts_floats(layer, table) * sizeof *parts);
    run(entry, layer, FKV_KERNEL_DECODE_MERGE, (const uint32_t[]){table[FKV_STEP_N_SPLITS] * chunks, layer->n_kv_heads, 1},
        fkv_kernel_threads(FKV_KERNEL_HOST, FKV_KERNEL_DECODE_MERGE, layer),
        layer->sealed
            ? (const void *const[MAX_INPUTS]){q, layer->pages, layer->open_pages, table, layer->sink_logits, counters, parts}
            : (const void *const[MAX_INPUTS]){q, layer->pages, table, layer->sink_logits, counters, parts},
        out);
    report(memcmp(out, expected, bytes) == 0, i, "decode with merge", "outputs differ from those of the merge kernel", 0);
    uint32_t n_left = 0;
    for (uint32_t k = 0; k < n_blocks; k++) n_left += counters[k] != 0;
    report(n_left == 0, i, "decode with merge", "counters were not reset", n_left);
    free(counters);
    free(parts);
    free(out);
    free(table);
}

/* Checks that the kernel stores the same bytes as the codec. */
static void check_write(uint32_t i, const attn_fixture *w, fkv_workers *workers) {
    kernel_entry *entry = entries[i];
    const fkv_attn_layer *layer = &w->layer;
    const uint32_t dim = fkv_attn_key_dim(layer);
    size_t n = (size_t)w->n_new * layer->n_kv_heads * dim;
    uint64_t state = 77;
    void *k = allocate(n * fkv_type_bytes(layer->row_type));
    void *v = allocate(n * fkv_type_bytes(layer->row_type));
    attn_random_rows(&state, layer->row_type, dim, w->c.outliers, n, k);
    attn_random_rows(&state, layer->row_type, dim, !w->c.outliers, n, v);
    uint32_t n_pages = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) n_pages += w->rows[r].view.n_fixed;
    size_t bytes = (size_t)n_pages * layer->n_kv_heads * layer->block.bytes;
    fkv_attn_layer by[2] = {*layer, *layer};
    for (int b = 0; b < 2; b++) {
        by[b].pages = allocate(bytes);
        memcpy(by[b].pages, layer->pages, bytes);
    }
    fkv_attn_write(fkv_cpu_kernels_for(FKV_ISA_SCALAR), &by[0], w->rows, w->c.n_rows, k, v, workers);
    uint32_t *table = table_of(layer, 64, w->rows, w->c.n_rows);
    uint32_t ticket[1] = {0};
    const void *values = layer->rope_dim != 0 ? k : v;
    launch(entry, layer, FKV_KERNEL_WRITE, w->n_new, layer->n_kv_heads, 2, (const void *const[]){k, values, by[1].pages, table},
           ticket);
    size_t differ = 0;
    for (size_t b = 0; b < bytes; b++) differ += by[0].pages[b] != by[1].pages[b];
    report(differ == 0, i, "write", "bytes differ from the codec's", (double)differ);
    report(memcmp(by[1].pages, layer->pages, bytes) != 0 && ticket[0] != 0, i, "write", "nothing was written", 0);

    const uint32_t pair[2] = {0, n_pages - 1};
    launch(entry, layer, FKV_KERNEL_COPY_PAGES, 1, layer->n_kv_heads, 1, (const void *const[]){pair, by[1].pages}, ticket);
    size_t page = (size_t)layer->n_kv_heads * layer->block.bytes;
    report(memcmp(by[1].pages, by[1].pages + (n_pages - 1) * page, page) == 0, i, "copy", "a page was not copied", 0);
    for (int b = 0; b < 2; b++) free(by[b].pages);
    free(table);
    free(k);
    free(v);
}

/* Makes a copy of the open pages in which every second page has one huge key of the first head. Seals the copy with the codec. */
static fkv_attn_layer seal_huge_keys(const attn_fixture *w, uint32_t n_pages) {
    fkv_attn_layer layer = w->layer;
    size_t open_bytes = (size_t)layer.n_kv_heads * layer.open.bytes;
    layer.open_pages = allocate(n_pages * open_bytes);
    layer.pages = allocate((size_t)n_pages * layer.n_kv_heads * layer.block.bytes);
    memcpy(layer.open_pages, w->layer.open_pages, n_pages * open_bytes);
    for (uint32_t page = 0; page < n_pages; page++) {
        float x[FKV_MAX_HEAD_DIM];
        uint8_t *part[FKV_N_PARTS];
        for (uint32_t d = 0; d < layer.head_dim; d++) x[d] = d % 3 == 0 ? -3e4f : 1e3f * (float)(d % 5);
        fkv_block_row(&layer.open, layer.open_pages + page * open_bytes, FKV_SIDE_K, 5, part);
        if (page % 2 == 0) fkv_codec_encode(&layer.open.codec[FKV_SIDE_K], x, part);
        for (uint32_t head = 0; head < layer.n_kv_heads; head++)
            fkv_seal_block(&layer.open, layer.open_pages + page * open_bytes + head * (size_t)layer.open.bytes,
                           fkv_attn_head_block(&layer, head),
                           layer.pages + ((size_t)page * layer.n_kv_heads + head) * layer.block.bytes);
    }
    return layer;
}

/* Returns the number of parts (codes, scales or biases of K or V) in which two blocks differ. */
static size_t count_other_parts(const fkv_block *block, const uint8_t *one, const uint8_t *other) {
    size_t n = 0;
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int part = 0; part < FKV_N_PARTS; part++)
            n += memcmp(one + block->offset[side][part], other + block->offset[side][part],
                        fkv_codec_part_bytes(&block->codec[side], (fkv_part)part, block->page_tokens)) != 0;
    return n;
}

/* Checks that the kernel seals the pages that the step has filled, and that the sealed bytes equal those of the codec. */
static void check_seal(uint32_t i, const attn_fixture *w, bool huge) {
    uint32_t n_all = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) n_all += w->rows[r].view.n_fixed;
    const fkv_attn_layer changed = huge ? seal_huge_keys(w, n_all) : w->layer;
    const fkv_attn_layer *layer = &changed;
    size_t page_bytes = (size_t)layer->n_kv_heads * layer->block.bytes;
    fkv_attn_row rows[MAX_MIX];
    uint32_t n_pages = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        rows[r] = w->rows[r];
        rows[r].n_tokens += rows[r].start;
        rows[r].start = 0;
        n_pages += rows[r].view.n_fixed;
    }
    uint8_t *pages = allocate(n_pages * page_bytes);
    memset(pages, 0, n_pages * page_bytes);
    uint32_t *table = table_of(layer, 64, rows, w->c.n_rows);
    uint32_t ticket[1] = {0};
    run(entries[i], layer, FKV_KERNEL_SEAL, (const uint32_t[]){table[FKV_STEP_N_SEALS], layer->n_kv_heads, FKV_N_SIDES},
        fkv_kernel_threads(FKV_KERNEL_HOST, FKV_KERNEL_SEAL, layer),
        (const void *const[MAX_INPUTS]){layer->open_pages, pages, table}, ticket);
    size_t differ = 0;
    uint32_t n_sealed = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        for (uint32_t page = 1; page < rows[r].n_tokens / layer->block.page_tokens; page++, n_sealed++) {
            const size_t at = fkv_page_at(rows[r].view, page) * page_bytes;
            for (uint32_t head = 0; head < layer->n_kv_heads; head++)
                differ += count_other_parts(&layer->block, layer->pages + at + (size_t)head * layer->block.bytes,
                                            pages + at + (size_t)head * layer->block.bytes);
        }
    }
    report(differ == 0, i, "seal", "codes, scales or biases differ from the codec's", (double)differ);
    report(n_sealed == table[FKV_STEP_N_SEALS] && n_sealed > 0 && ticket[0] != 0, i, "seal", "pages were not sealed", n_sealed);
    free(table);
    table = table_of(layer, 64, w->rows, w->c.n_rows);
    uint32_t n_visible = 0;
    for (uint32_t p = 0; p < table[FKV_STEP_N_SPLITS]; p++)
        n_visible += table[table[FKV_STEP_SPLITS] + p * FKV_SPLIT_WORDS + FKV_SPLIT_OPEN] == 0;
    report(n_visible > 0, i, "seal", "no query reads a sealed page", n_visible);
    free(pages);
    free(table);
    if (!huge) return;
    free(changed.pages);
    free(changed.open_pages);
}

/* Checks that running each token alone gives bit-identical outputs. */
static void check_alone(const answer *a, variant v) {
    const attn_fixture *w = a->w;
    size_t row_bytes = (size_t)w->c.shape.n_q_heads * w->c.shape.head_dim * fkv_type_bytes(w->c.row_type);
    size_t q_bytes = row_bytes / w->c.shape.head_dim * fkv_attn_key_dim(&w->layer);
    bool own_entry = v.kernel == FKV_KERNEL_DECODE && a->i < N_KERNEL_CASES_ALONE;
    size_t at = 0;
    size_t q_at = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        for (uint32_t t = 0; t < w->rows[r].n_tokens; t++, at += row_bytes, q_at += q_bytes) {
            fkv_attn_row one = w->rows[r];
            one.start += t;
            one.n_tokens = 1;
            kernel_entry *entry = own_entry ? entries_alone[a->i] : entries[a->i];
            const uint32_t queries = own_entry ? 1 : kernel_case_queries(&w->c);
            const uint8_t *q = (const uint8_t *)w->q + q_at;
            decode(entry, v, queries, w, &one, 1, q, a->also + at);
            if (own_entry) check_merge(a->i, entry, queries, w, &one, 1, q, a->also + at);
        }
    }
    report(memcmp(a->also, a->got, at) == 0, a->i, v.name, "outputs are not bit-identical for single tokens", 0);
}

/* Checks all decode variants of a case. alone: if true, also checks that running each token alone gives bit-identical outputs. */
static void check_decode_variants(uint32_t i, const attn_fixture *w, bool alone) {
    answer a = answer_open(i, w, w->c.n_rows);
    for (size_t k = 0; k < sizeof decode_variants / sizeof decode_variants[0]; k++) {
        if (!kernel_case_has(i, decode_variants[k].kernel)) continue;
        memset(a.got, 0xff, a.n * fkv_type_bytes(w->c.row_type));
        decode(entries[i], decode_variants[k], kernel_case_queries(&w->c), w, w->rows, w->c.n_rows, w->q, a.got);
        check_reference(&a, decode_variants[k].name);
        if (alone && decode_variants[k].kernel == FKV_KERNEL_DECODE)
            check_merge(i, entries[i], kernel_case_queries(&w->c), w, w->rows, w->c.n_rows, w->q, a.got);
        if (alone && w->n_new > 1) check_alone(&a, decode_variants[k]);
    }
    answer_close(&a);
}

static void check_decode(uint32_t i, fkv_workers *workers) {
    const attn_case *c = &kernel_cases[i];
    attn_fixture w;
    if (!attn_fixture_open(&w, c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261115)) abort();
    set_softcap(&w, c->softcap);
    if (w.layer.sealed) {
        check_seal(i, &w, false);
        check_seal(i, &w, true);
    } else {
        check_write(i, &w, workers);
    }
    check_decode_variants(i, &w, true);
    for (int cap = 0; c->softcap > 0 && cap < N_KERNEL_SOFTCAPS; cap++) {
        set_softcap(&w, kernel_softcaps[cap]);
        check_decode_variants(i, &w, false);
    }
    set_softcap(&w, c->softcap);
    if (spoil(&w, c->n_rows)) check_decode_variants(i, &w, false);
    attn_fixture_close(&w);
}

/* ---- prefill ---- */

/* Runs the prefill kernel. decoded: outputs of the decode work items, which the kernel copies to `out`; NULL if the step has no
 * decode work items. */
static void prefill(uint32_t i, variant v, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q,
                    const void *decoded, void *out) {
    uint32_t tile_queries = fkv_prefill_queries(v.shape, layer);
    uint32_t *table = table_of(layer, tile_queries, rows, n_rows);
    uint32_t slices = fkv_ceil_div(tile_queries * (layer->n_q_heads / layer->n_kv_heads), fkv_prefill_rows(v.shape, layer));
    uint32_t grid[3] = {table[FKV_STEP_N_TILES] + (decoded != NULL), layer->n_kv_heads, slices};
    int kernel = decoded != NULL ? (int)FKV_KERNEL_COPY_DECODED : v.kernel;
    uint64_t ring_bytes = v.kernel == KERNEL_GROUP_PREFILL ? GROUP_RING_BYTES : fkv_prefill_ring_bytes(FKV_KERNEL_HOST, layer);
    uint32_t *ring = calloc(1, ring_bytes + 1);
    if (ring == NULL) abort();
    run(entries[i], layer, kernel, grid, fkv_kernel_threads(v.shape, FKV_KERNEL_PREFILL, layer),
        layer->sealed
            ? (const void *const[MAX_INPUTS]){q, layer->pages, layer->open_pages, ring, table, layer->sink_logits, decoded}
            : (const void *const[MAX_INPUTS]){q, layer->pages, table, layer->sink_logits, decoded},
        out);
    if (ring_bytes > 0) {
        bool waited = ring[FKV_PREFILL_BACKOFF_WORD] != 0;
        ring[FKV_PREFILL_BACKOFF_WORD] = 0;
        uint32_t n_left = 0;
        for (uint32_t k = 0; k < fkv_prefill_ring_words(FKV_KERNEL_HOST); k++) n_left += ring[k] != 0;
        report(n_left == 0, i, v.name, "the ring buffer was not restored", n_left);
        report(waited == (v.kernel == KERNEL_LONE_PREFILL), i, v.name, "waiting for partner blocks", waited);
        if (v.kernel == KERNEL_GROUP_PREFILL) {
            uint64_t k = fkv_prefill_ring_words(FKV_KERNEL_HOST);
            while (k < ring_bytes / sizeof *ring && ring[k] == 0) k++;
            report(k < ring_bytes / sizeof *ring, i, v.name, "no page was unpacked for other blocks", 0);
        }
    }
    free(ring);
    free(table);
}

/* Checks that running the first sequence alone, in two chunks, gives bit-identical outputs. */
static void check_chunks(const answer *a, variant v) {
    const attn_fixture *w = a->w;
    size_t row_bytes = (size_t)w->c.shape.n_q_heads * w->c.shape.head_dim * fkv_type_bytes(w->c.row_type);
    const uint32_t lengths[2] = {FKV_ITEM_QUERIES + 2, w->rows[0].n_tokens - (FKV_ITEM_QUERIES + 2)};
    const size_t q_bytes = row_bytes / w->c.shape.head_dim * fkv_attn_key_dim(&w->layer);
    fkv_attn_row chunk = w->rows[0];
    size_t at = 0;
    size_t q_at = 0;
    for (int i = 0; i < 2; i++) {
        chunk.n_tokens = lengths[i];
        prefill(a->i, v, &w->layer, &chunk, 1, (const uint8_t *)w->q + q_at, NULL, a->also + at);
        chunk.start += lengths[i];
        at += lengths[i] * row_bytes;
        q_at += lengths[i] * q_bytes;
    }
    report(memcmp(a->also, a->got, at) == 0, a->i, v.name, "outputs are not bit-identical in chunks", 0);
}

/* Checks the prefill outputs of the first two sequences. Some prefill kernels also copy decode outputs. These kernels must copy
 * the outputs of the third sequence, for which the test passes arbitrary values. chunks: if true, also runs the first sequence in
 * two chunks. */
static void check_prefill_variants(uint32_t i, const attn_fixture *w, bool chunks) {
    answer a = answer_open(i, w, 2);
    size_t number = fkv_type_bytes(w->c.row_type);
    size_t carried = (size_t)w->c.rows[2].n_tokens * w->c.shape.n_q_heads * w->c.shape.head_dim;
    for (size_t k = 0; k < sizeof prefill_variants / sizeof prefill_variants[0]; k++) {
        variant v = prefill_variants[k];
        bool with_decode = v.kernel == FKV_KERNEL_PREFILL;
        if (!kernel_case_has(i, v.kernel)) continue;
        memset(a.got, 0xff, (a.n + carried) * number);
        prefill(i, v, &w->layer, w->rows, with_decode ? 3 : 2, w->q, with_decode ? w->q : NULL, a.got);
        check_reference(&a, v.name);
        if (chunks) check_chunks(&a, v);
        if (with_decode)
            report(memcmp(a.got + a.n * number, (const uint8_t *)w->q + a.n * number, carried * number) == 0, i, v.name,
                   "decode outputs were not copied", 0);
    }
    answer_close(&a);
}

/* Runs blocks that expect to share unpacked pages with a partner block that never runs. They must not wait for the partner
 * forever, and their outputs must be bit-identical to those of blocks compiled without partners. */
static void check_lone_prefill(uint32_t i, const attn_fixture *w) {
    const variant lone = {"prefill without partner blocks", KERNEL_LONE_PREFILL, FKV_KERNEL_HOST};
    answer a = answer_open(i, w, 2);
    prefill(i, prefill_variants[0], &w->layer, w->rows, 2, w->q, NULL, a.also);
    prefill(i, lone, &w->layer, w->rows, 2, w->q, NULL, a.got);
    report(memcmp(a.got, a.also, a.n * fkv_type_bytes(w->c.row_type)) == 0, i, lone.name, "outputs are not bit-identical", 0);
    answer_close(&a);
}

/* Runs the blocks of a group at the same time. They share the pages of a history that has more pages than the ring has slots.
 * Their queries are in up to three spans. In the third step, two groups share pages on the same ring. In the last step, the first
 * group cannot share pages because its queries start at position 0, and the second group cannot because it spans two sequences.
 * The third group shares pages on the ring of the first group. The outputs must be bit-identical to those of blocks that run one
 * after another. */
static void check_group_prefill(uint32_t i, fkv_workers *workers) {
    const variant group = {"prefill in groups of blocks", KERNEL_GROUP_PREFILL, FKV_KERNEL_HOST};
    static const struct {
        uint32_t n_rows;
        attn_mix rows[2];
    } steps[] = {{1, {{842, 512}}}, {1, {{1024, 300}}}, {1, {{300, 1180}}}, {2, {{0, 600}, {300, 500}}}};
    const size_t n = i == GROUP_PREFILL_CASE ? sizeof steps / sizeof *steps : 1; /* emulation is slow */
    for (size_t r = 0; r < n; r++) {
        const uint32_t n_rows = steps[r].n_rows;
        attn_case c = kernel_cases[i];
        c.n_rows = n_rows;
        memcpy(c.rows, steps[r].rows, sizeof steps[r].rows);
        attn_fixture w;
        if (!attn_fixture_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261119)) abort();
        set_softcap(&w, c.softcap);
        answer a = answer_open(i, &w, n_rows);
        for (int spoiled = 0; spoiled < 2; spoiled++) {
            if (spoiled != 0 && !spoil(&w, n_rows)) break;
            prefill(i, prefill_variants[0], &w.layer, w.rows, n_rows, w.q, NULL, a.also);
            prefill(i, group, &w.layer, w.rows, n_rows, w.q, NULL, a.got);
            report(memcmp(a.got, a.also, a.n * fkv_type_bytes(c.row_type)) == 0, i, group.name, "outputs are not bit-identical",
                   (double)r);
        }
        answer_close(&a);
        attn_fixture_close(&w);
    }
}

static void check_prefill(uint32_t i, fkv_workers *workers) {
    attn_case c = kernel_cases[i];
    c.n_rows = 3;
    c.rows[0].n_tokens = 2 * FKV_ITEM_QUERIES + 3;
    if (i == FIRST_SEALED_CASE)
        c.rows[0].start = 1290; /* the history has more pages than the ring buffer in prefill_share.h has slots */
    /* emulated prefill of latent layers is slow */
    if (c.shape.rope_dim != 0) c.rows[0].start = fkv_min_u32(c.rows[0].start, 300);
    uint32_t tile = 128 * c.shape.n_kv_heads / c.shape.n_q_heads;
    c.rows[1] =
        (attn_mix){0, tile <= 32 ? fkv_max_u32(tile + 2, c.rows[0].n_tokens)
                                 : c.rows[0].n_tokens}; /* gives this sequence two tiles if a tile has at most 32 queries */
    c.rows[2] = (attn_mix){5, 2};
    attn_fixture w;
    if (!attn_fixture_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 20261115)) abort();
    set_softcap(&w, c.softcap);
    /* Emulation is slow, so only even cases test chunks, and only odd cases repeat the test with NaN rows (see spoil()). */
    check_prefill_variants(i, &w, i % 2 == 0);
    if (kernel_case_has(i, KERNEL_LONE_PREFILL)) check_lone_prefill(i, &w);
    /* with a sanitizer, the emulation does not run blocks at the same time */
    if (!TEST_SANITIZED && kernel_case_has(i, KERNEL_GROUP_PREFILL)) check_group_prefill(i, workers);
    const bool more_caps = c.softcap > 0 && c.shape.head_dim <= MAX_SOFTCAPS_DIM;
    for (int cap = 0; more_caps && cap < N_KERNEL_SOFTCAPS; cap++) {
        set_softcap(&w, kernel_softcaps[cap]);
        check_prefill_variants(i, &w, false);
    }
    set_softcap(&w, c.softcap);
    if (i % 2 != 0 && spoil(&w, 2)) check_prefill_variants(i, &w, false);
    attn_fixture_close(&w);
}

/* Returns true if case i is selected by `which`: either a case number, or "I/N", which selects every N-th case, starting with
 * case I. */
static bool is_selected(const char *which, uint32_t i) {
    char *end = NULL;
    uint32_t first = (uint32_t)strtoul(which, &end, 10);
    uint32_t shares = *end == '/' ? (uint32_t)strtoul(end + 1, NULL, 10) : 0;
    return shares > 0 ? i % shares == first : i == first;
}

int main(int argc, char **argv) {
    bool is_decode = argc > 1 && strcmp(argv[1], "decode") == 0;
    if (!is_decode && (argc < 2 || strcmp(argv[1], "prefill") != 0)) {
        fprintf(stderr, "usage: parity_kernels decode|prefill [case | share/shares]\n");
        return EXIT_FAILURE;
    }
    void *place = allocate(fkv_workers_bytes(1));
    memset(place, 0, fkv_workers_bytes(1));
    fkv_workers *workers;
    if (fkv_workers_open(place, 1, &workers) != FKV_OK) return EXIT_FAILURE;
    for (uint32_t i = 0; i < N_KERNEL_CASES; i++) {
        if (argc > 2 && !is_selected(argv[2], i)) continue;
        if (!kernel_case_has(i, is_decode ? (int)FKV_KERNEL_DECODE : (int)FKV_KERNEL_PREFILL)) continue;
        if (entries[i] == NULL)
            report(false, i, argv[1], "not in this build", 0);
        else
            (is_decode ? check_decode : check_prefill)(i, workers);
    }
    printf("largest relative L2 error %.1e\n%d passed, %d failed\n", worst_error, n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
