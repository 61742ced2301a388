/* Multiplies activations by up to four matrices: prepares the activations once and distributes the work over threads.
 *
 * A work item consists of a range of panels of one matrix and a range of tokens. The panels of a work item, or the
 * codes that the kernel unpacks from them, usually fit in the private cache of a core, so they stay cached while all tokens of
 * the item are processed. The division into items does not affect results (see product_kernels.h), so it may depend on the number
 * of threads.
 */
#include "matrix.h"

#include "cpu/product_kernels.h"

enum {
    ITEM_BYTES = 128 * 1024, /* target size of the weights of a work item, in bytes: half of a typical private cache, large enough
                                to amortize scheduling */
    BLOCK_PANELS = 8, /* with at least one full block of tokens, a work item may have this number of panels even if they exceed
                         ITEM_BYTES, so that several panels share the cached activations; FKV_TILE_PANELS with AMX tiles */
    ITEM_TOKENS = 16 * FKV_BLOCK_TOKENS,
    ITEMS_PER_THREAD =
        4, /* minimum number of work items per thread, if there are enough panels; balances the load of the threads */
    PREPARE_COLUMNS = 512, /* number of columns per preparation item; each item covers one block of tokens */
    CALLER_TOKENS = 2      /* up to this number of tokens, the calling thread prepares the activations alone, because waking other
                              threads takes longer */
};

/* Division of one matrix product into work items. A work item is a pair (panel range, token range). The token range varies
 * fastest: consecutive items cover all token ranges of one panel range. */
typedef struct cut {
    uint32_t first_item;
    uint32_t n_panels;
    uint32_t item_panels;
} cut;

typedef struct job {
    const fkv_product_kernels *kernels;
    const fkv_product *products;
    uint32_t n_products;
    fkv_activations in;
    uint32_t n_token_cuts;
    cut cuts[FKV_MAX_PRODUCTS];
} job;

uint64_t fkv_product_input_bytes(uint32_t n_tokens, uint32_t n_cols) { return fkv_activation_bytes(n_tokens, n_cols); }

/* Multiplies n_panels complete panels, stored at `first`, by tokens [token, token + n_tokens). */
static void run_whole_panels(const job *j, const fkv_product *p, const uint8_t *first, uint32_t n_panels, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_matrix *m = p->matrix;
    fkv_panels panels = {.kind = m->kind,
                         .n_cols = m->n_cols,
                         .n_panels = n_panels,
                         .panel_bytes = m->panel_bytes,
                         .table = m->table,
                         .first = first};
    j->kernels->product(&panels, &j->in, token, n_tokens, out, out_stride);
}

/* Multiplies the last panel, which has padding rows, by tokens [token, token + n_tokens). The results of padding rows are not
 * written to out. */
static void run_padded_panel(const job *j, const fkv_product *p, const uint8_t *panel, uint32_t token, uint32_t n_tokens,
                             float *out) {
    size_t n_rows = p->matrix->n_rows % FKV_PANEL_ROWS;
    for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
        float block[FKV_BLOCK_TOKENS][FKV_PANEL_ROWS];
        uint32_t n = fkv_min_u32(n_tokens - t, FKV_BLOCK_TOKENS);
        run_whole_panels(j, p, panel, 1, token + t, n, block[0], FKV_PANEL_ROWS);
        for (uint32_t i = 0; i < n; i++) memcpy(out + (size_t)(t + i) * p->out_stride, block[i], n_rows * sizeof **block);
    }
}

/* Multiplies panels [panel, end), which are stored at `first`, by tokens [token, token + n_tokens). */
static void run_panels(const job *j, const fkv_product *p, const uint8_t *first, uint32_t panel, uint32_t end, uint32_t token,
                       uint32_t n_tokens) {
    uint32_t whole = fkv_min_u32(end, p->matrix->n_rows / FKV_PANEL_ROWS);
    float *out = p->out + (size_t)token * p->out_stride + (size_t)panel * FKV_PANEL_ROWS;
    if (whole > panel) run_whole_panels(j, p, first, whole - panel, token, n_tokens, out, p->out_stride);
    if (end <= whole) return;
    size_t n_before = whole - panel;
    run_padded_panel(j, p, first + n_before * p->matrix->panel_bytes, token, n_tokens, out + n_before * FKV_PANEL_ROWS);
}

/* ---- panels built from mapped rows ---- */

static uint32_t panels_in_room(const fkv_matrix *m) {
    return m->panel_bytes >= ITEM_BYTES ? 1 : (uint32_t)(ITEM_BYTES / m->panel_bytes);
}

void fkv_panel_room_grow(fkv_panel_room *room, const fkv_matrix *matrix) {
    uint64_t scratch = fkv_align_up(matrix->rows.scratch_bytes, 64);
    uint64_t panels = panels_in_room(matrix) * matrix->panel_bytes;
    uint64_t largest = room->thread_bytes - room->scratch_bytes;
    if (scratch > room->scratch_bytes) room->scratch_bytes = scratch;
    room->thread_bytes = room->scratch_bytes + (panels > largest ? panels : largest);
}

/* Builds one panel from mapped rows. Returns whether all scales and biases of the panel are finite in f16. */
static bool fill_one_panel(const job *j, const fkv_matrix *m, uint32_t panel, uint8_t *out, void *scratch) {
    const fkv_matrix_rows *rows = &m->rows;
    uint32_t row = panel * FKV_PANEL_ROWS;
    uint32_t n_rows = fkv_min_u32(m->n_rows - row, FKV_PANEL_ROWS);
    if (n_rows == FKV_PANEL_ROWS && rows->form != FKV_ROWS_OTHER && j->kernels->fill != NULL) {
        fkv_filled filled = j->kernels->fill(rows->form, rows->data + row * rows->row_bytes, rows->row_bytes, m->n_cols, out);
        if (filled != FKV_FILL_UNKNOWN) return filled == FKV_FILLED;
    }
    fkv_matrix one = *m;
    one.n_rows = n_rows;
    one.panels = out;
    return rows->set(rows->source, row, n_rows, &one, scratch);
}

static void fill_and_run(const job *j, const fkv_product *p, uint32_t panel, uint32_t end, uint32_t token, uint32_t n_tokens,
                         uint32_t thread) {
    const fkv_matrix *m = p->matrix;
    fkv_panel_room *room = p->room;
    FKV_ASSERT(room != NULL && room->bytes != NULL);
    uint8_t *scratch = room->bytes + thread * room->thread_bytes;
    uint8_t *panels = scratch + room->scratch_bytes;
    uint32_t step = panels_in_room(m);
    for (uint32_t first = panel; first < end; first += step) {
        uint32_t n = fkv_min_u32(end - first, step);
        bool is_right = true;
        for (uint32_t i = 0; i < n; i++)
            is_right = fill_one_panel(j, m, first + i, panels + i * m->panel_bytes, scratch) && is_right;
        if (!is_right) atomic_store_explicit(&room->lost, true, memory_order_relaxed);
        run_panels(j, p, panels, first, first + n, token, n_tokens);
    }
}

/* ---- items ---- */

static void product_item(void *context, uint32_t item, uint32_t thread) {
    const job *j = context;
    uint32_t i = 0;
    while (i + 1 < j->n_products && item >= j->cuts[i + 1].first_item) i++;
    const fkv_product *p = &j->products[i];
    const cut *c = &j->cuts[i];
    item -= c->first_item;
    uint32_t token = item % j->n_token_cuts * ITEM_TOKENS;
    uint32_t n_tokens = fkv_min_u32(j->in.n_tokens - token, ITEM_TOKENS);
    uint32_t panel = item / j->n_token_cuts * c->item_panels;
    uint32_t end = fkv_min_u32(panel + c->item_panels, c->n_panels);
    const fkv_matrix *m = p->matrix;
    if (m->panels != NULL)
        run_panels(j, p, m->panels + panel * m->panel_bytes, panel, end, token, n_tokens);
    else
        fill_and_run(j, p, panel, end, token, n_tokens, thread);
    if (p->bias == NULL) return;
    uint32_t first_row = panel * FKV_PANEL_ROWS;
    uint32_t end_row = fkv_min_u32(end * FKV_PANEL_ROWS, m->n_rows);
    float *out = p->out + (size_t)token * p->out_stride;
    for (uint32_t t = 0; t < n_tokens; t++, out += p->out_stride)
        for (uint32_t r = first_row; r < end_row; r++) out[r] += p->bias[r];
}

static void prepare_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const job *j = context;
    const uint32_t n_column_cuts = fkv_ceil_div(j->in.n_cols, PREPARE_COLUMNS);
    const uint32_t token = item / n_column_cuts * FKV_BLOCK_TOKENS;
    const uint32_t column = item % n_column_cuts * PREPARE_COLUMNS;
    j->kernels->prepare(&j->in, token, fkv_min_u32(j->in.n_tokens - token, FKV_BLOCK_TOKENS), column,
                        fkv_min_u32(j->in.n_cols - column, PREPARE_COLUMNS));
}

static bool wants_tiles(const fkv_product_kernels *kernels, uint32_t n_tokens) {
    return kernels->min_tile_tokens != 0 && n_tokens >= kernels->min_tile_tokens;
}

static bool wants_preparation(const job *j) {
    if (j->kernels->prepare == NULL) return false;
    for (uint32_t i = 0; i < j->n_products; i++)
        if (j->products[i].matrix->group != 0) return true;
    return false;
}

/* Divides the products into work items and returns the number of items. */
static uint32_t cut_panels(job *j, uint32_t n_threads) {
    uint64_t n_panels = 0;
    for (uint32_t i = 0; i < j->n_products; i++) n_panels += fkv_ceil_div(j->products[i].matrix->n_rows, FKV_PANEL_ROWS);
    uint64_t fair = n_panels * j->n_token_cuts / ((uint64_t)n_threads * ITEMS_PER_THREAD);
    uint32_t n_items = 0;
    for (uint32_t i = 0; i < j->n_products; i++) {
        const fkv_matrix *m = j->products[i].matrix;
        uint64_t most = ITEM_BYTES / m->panel_bytes;
        const uint64_t sharing = j->in.as_tiles ? FKV_TILE_PANELS : BLOCK_PANELS;
        if (j->in.n_tokens >= FKV_BLOCK_TOKENS && most < sharing) most = sharing;
        uint64_t panels = most < fair ? most : fair;
        j->cuts[i] = (cut){n_items, fkv_ceil_div(m->n_rows, FKV_PANEL_ROWS), panels == 0 ? 1 : (uint32_t)panels};
        n_items += fkv_ceil_div(j->cuts[i].n_panels, j->cuts[i].item_panels) * j->n_token_cuts;
    }
    return n_items;
}

void fkv_product_run(fkv_workers *workers, fkv_isa isa, const fkv_product *products, uint32_t n_products, const float *x,
                     uint32_t n_tokens, uint32_t x_stride, void *input) {
    FKV_ASSERT(isa != FKV_ISA_AUTO && n_products > 0 && n_products <= FKV_MAX_PRODUCTS);
    if (n_tokens == 0) return;
    const fkv_product_kernels *kernels = fkv_product_kernels_for(isa);
    FKV_ASSERT(kernels != NULL);
    for (uint32_t i = 1; i < n_products; i++) FKV_ASSERT(products[i].matrix->n_cols == products[0].matrix->n_cols);
    job j = {.kernels = kernels, .products = products, .n_products = n_products};
    j.in = (fkv_activations){.x = x,
                             .x_stride = x_stride,
                             .n_tokens = n_tokens,
                             .n_cols = products[0].matrix->n_cols,
                             .prepared = input,
                             .as_tiles = wants_tiles(kernels, n_tokens)};
    if (wants_preparation(&j)) {
        if (n_tokens <= CALLER_TOKENS)
            kernels->prepare(&j.in, 0, n_tokens, 0, j.in.n_cols);
        else
            fkv_workers_run(workers, prepare_item, &j,
                            fkv_ceil_div(n_tokens, FKV_BLOCK_TOKENS) * fkv_ceil_div(j.in.n_cols, PREPARE_COLUMNS));
    }
    j.n_token_cuts = fkv_ceil_div(n_tokens, ITEM_TOKENS);
    fkv_workers_run(workers, product_item, &j, cut_panels(&j, fkv_workers_count(workers)));
}

/* ---- heads ---- */

typedef struct heads_job {
    const fkv_product_kernels *kernels;
    const fkv_head_products *products;
    uint32_t n_tokens;
    uint32_t n_token_cuts;
    uint8_t *input;
    uint64_t head_bytes; /* bytes of prepared activations per head */
} heads_job;

/* Returns a job with the activations of one head, and sets *product to the matrix product of this head. */
static job head_job(const heads_job *j, uint32_t head, fkv_product *product) {
    const fkv_head_products *p = j->products;
    const fkv_matrix *m = &p->matrices[head];
    *product = (fkv_product){.matrix = m, .out = p->out + (size_t)head * p->head_stride, .out_stride = p->out_stride};
    job one = {.kernels = j->kernels};
    one.in = (fkv_activations){.x = p->x + (size_t)head * j->n_tokens * m->n_cols,
                               .x_stride = m->n_cols,
                               .n_tokens = j->n_tokens,
                               .n_cols = m->n_cols,
                               .prepared = j->input + head * j->head_bytes,
                               .as_tiles = wants_tiles(j->kernels, j->n_tokens)};
    return one;
}

static void prepare_head(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    fkv_product product;
    const job j = head_job(context, item, &product);
    if (product.matrix->group != 0) j.kernels->prepare(&j.in, 0, j.in.n_tokens, 0, j.in.n_cols);
}

/* Computes the matrix product of one head for one range of tokens. */
static void product_head(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const heads_job *all = context;
    fkv_product product;
    const job j = head_job(all, item / all->n_token_cuts, &product);
    const uint32_t token = item % all->n_token_cuts * ITEM_TOKENS;
    const fkv_matrix *m = product.matrix;
    run_panels(&j, &product, m->panels, 0, fkv_ceil_div(m->n_rows, FKV_PANEL_ROWS), token,
               fkv_min_u32(all->n_tokens - token, ITEM_TOKENS));
}

void fkv_product_run_heads(fkv_workers *workers, fkv_isa isa, const fkv_head_products *products, uint32_t n_tokens, void *input) {
    FKV_ASSERT(isa != FKV_ISA_AUTO && products->n_heads > 0);
    if (n_tokens == 0) return;
    heads_job j = {.kernels = fkv_product_kernels_for(isa),
                   .products = products,
                   .n_tokens = n_tokens,
                   .n_token_cuts = fkv_ceil_div(n_tokens, ITEM_TOKENS),
                   .input = input,
                   .head_bytes = fkv_product_input_bytes(n_tokens, products->matrices[0].n_cols)};
    FKV_ASSERT(j.kernels != NULL);
    if (j.kernels->prepare != NULL) fkv_workers_run(workers, prepare_head, &j, products->n_heads);
    fkv_workers_run(workers, product_head, &j, products->n_heads * j.n_token_cuts);
}
