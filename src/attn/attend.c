/* The walk of queries over packed pages: which rows meet which page, in which order, under which mask. The arithmetic on a tile
 * is the kernels'. Owns nothing; all scratch is the caller's.
 *
 * Work is cut into items of (query tile, KV head): the tile holds `tile_queries` consecutive tokens of one sequence with all
 * query heads of the KV head, so that each packed byte is read once for all of them. When there are too few such items for the
 * threads, decode tiles are cut further, at the piece boundaries of fkv_attn_split_pages(), and the last item to end folds the
 * pieces.
 *
 * In a sealed layer a query tile lies within one page, so that all its queries see the same pages open. A walk then goes over two
 * forms of pages, each with kernels and prepared queries of its own. Calibrated keys lie in an order of channels that each head
 * has for itself; queries are put in that order once.
 *
 * Invariant (same answer however it got there): for each query, pieces are closed at the same pages and folded in the same order
 * whether one item walks them all or each piece is an item.
 */
#include "seen_values.h"

#include "../codec/channel_order.h"
#include "../codec/sealed.h"

#include "../base/carve.h"
#include "../base/float16.h"

#include <math.h>
#include <stdatomic.h>

enum {
    SMALLEST_SPLIT = 256,    /* tokens */
    SMALLEST_TILE_ROWS = 16, /* of a prefill; smaller tiles cost more than one more thread gains */
    ITEMS_PER_THREAD = 3,    /* fewer than this many items for each thread: smaller tiles, decode tiles cut at piece boundaries */
    SHORTEST_RUN = 4         /* pages that kernels take at once */
};

/* How a page can be seen. */
typedef enum form_kind { PACKED = 0, OPEN = 1, N_FORMS = 2 } form_kind;

typedef struct thread_scratch {
    float *q[N_FORMS];       /* [tile rows, D]: as keys lie in pages of this form */
    void *prepared[N_FORMS]; /* of q; OPEN: NULL unless the layer is sealed */
    float *scores;           /* [tile rows, FKV_TILE_TOKENS] */
    fkv_row_mask *masks;
    fkv_softmax piece; /* since the last boundary */
    fkv_softmax total; /* of the pieces before it */
} thread_scratch;

typedef struct scratch {
    uint32_t *first_tile; /* [rows]: tiles of the rows before */
    uint8_t *threads;     /* [n_threads, thread_bytes]: see scratch_of() */
    uint64_t thread_bytes;
    uint32_t *loaded;                 /* [n_threads]: the (tile, head) whose queries a thread has loaded; only it looks */
    _Atomic uint32_t *pieces_to_come; /* [split items]: of each (tile, head) */
    float *pieces;                    /* [split items * FKV_ATTN_MAX_SPLITS, piece_floats()]: see piece_at() */
} scratch;

/* Pages of one form: their blocks, where they are, what reads them. */
typedef struct page_form {
    const fkv_block *block;
    const uint8_t *pages;
    const fkv_codec_kernels *codecs[FKV_N_SIDES];
} page_form;

typedef struct job {
    const fkv_cpu_kernels *kernels;
    page_form forms[N_FORMS]; /* OPEN: of a sealed layer only */
    const fkv_attn_layer *layer;
    const fkv_attn_row *rows;
    uint32_t n_rows;
    const uint8_t *q;
    uint8_t *out;
    scratch scratch;
    uint32_t heads_per_kv; /* R */
    uint32_t tile_queries;
    uint32_t tile_tokens; /* of K and V in one kernel call */
    uint32_t tile_cut;    /* no query tile goes over a multiple of it */
    uint32_t max_splits;  /* items of one (tile, head); 1: not cut */
    _Atomic uint64_t bytes_read;
} job;

/* One query tile, found from its number. */
typedef struct query_tile {
    const fkv_attn_row *row;
    uint32_t first_token; /* of the step, over all rows */
    uint32_t position;    /* of its first query */
    uint32_t n_queries;
} query_tile;

uint32_t fkv_attn_split_pages(uint32_t position, uint32_t page_tokens) {
    uint32_t n_pages = position / page_tokens + 1;
    uint32_t pages = page_tokens < SMALLEST_SPLIT ? SMALLEST_SPLIT / page_tokens : 1;
    while (pages * FKV_ATTN_MAX_SPLITS < n_pages) pages *= 2;
    return pages;
}

/* The most: scratch is planned for it. */
static uint32_t queries_per_tile(uint32_t heads_per_kv) { return fkv_max_u32(1, FKV_TILE_ROWS / heads_per_kv); }

static void carve_softmax(fkv_carve *carve, uint64_t rows, uint64_t dim, fkv_softmax *s) {
    s->max = FKV_CARVE(carve, rows, float);
    s->sum = FKV_CARVE(carve, rows, float);
    s->out = FKV_CARVE(carve, rows * dim, float);
}

/* Of one piece of one KV head's rows; out starts on a multiple of 16 floats. */
static uint64_t piece_floats(uint64_t heads_per_kv, uint64_t dim) {
    return fkv_align_up(2 * heads_per_kv, 16) + heads_per_kv * dim;
}

static thread_scratch carve_thread(fkv_carve *carve, const fkv_attn_layer *layer, uint64_t tile_rows) {
    thread_scratch t;
    uint64_t dim = layer->head_dim;
    bool sealed = layer->sealed;
    t.q[OPEN] = FKV_CARVE(carve, tile_rows * dim, float);
    t.q[PACKED] = layer->calibrated ? FKV_CARVE(carve, tile_rows * dim, float) : t.q[OPEN];
    t.prepared[PACKED] = fkv_carve_take(carve, 1, fkv_prepared_bytes(tile_rows, dim));
    t.prepared[OPEN] = sealed ? fkv_carve_take(carve, 1, fkv_prepared_bytes(tile_rows, dim)) : NULL;
    t.scores = FKV_CARVE(carve, tile_rows * FKV_TILE_TOKENS, float);
    t.masks = FKV_CARVE(carve, tile_rows, fkv_row_mask);
    carve_softmax(carve, tile_rows, dim, &t.piece);
    carve_softmax(carve, tile_rows, dim, &t.total);
    return t;
}

/* One walk for plan and use: counts while the carve does. */
static void layout(fkv_carve *carve, const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads, scratch *s) {
    uint64_t dim = layer->head_dim;
    uint32_t heads_per_kv = layer->n_q_heads / layer->n_kv_heads;
    uint64_t tile_rows = (uint64_t)queries_per_tile(heads_per_kv) * heads_per_kv;
    uint64_t split_items = n_threads > 1 ? (uint64_t)n_threads * ITEMS_PER_THREAD : 0;

    s->first_tile = FKV_CARVE(carve, max_rows, uint32_t);
    fkv_carve one = {0};
    (void)carve_thread(&one, layer, tile_rows);
    s->thread_bytes = fkv_align_up(one.used, FKV_CARVE_ALIGN);
    s->threads = fkv_carve_take(carve, n_threads, s->thread_bytes);
    s->loaded = FKV_CARVE(carve, n_threads, uint32_t);
    s->pieces_to_come = FKV_CARVE(carve, split_items, _Atomic uint32_t);
    s->pieces = FKV_CARVE(carve, split_items * FKV_ATTN_MAX_SPLITS * piece_floats(heads_per_kv, dim), float);
}

static thread_scratch scratch_of(const job *j, uint32_t thread) {
    const scratch *s = &j->scratch;
    fkv_carve carve = {.base = s->threads + thread * s->thread_bytes, .size = s->thread_bytes};
    uint64_t tile_rows = (uint64_t)queries_per_tile(j->heads_per_kv) * j->heads_per_kv;
    thread_scratch t = carve_thread(&carve, j->layer, tile_rows);
    FKV_ASSERT(carve.base != NULL && !carve.overflow); /* as it was when the scratch was planned */
    return t;
}

/* Piece `split` of one (tile, head): max, sum and out of its rows. */
static fkv_softmax piece_at(const job *j, uint32_t work, uint32_t split) {
    uint64_t floats = piece_floats(j->heads_per_kv, j->layer->head_dim);
    float *at = j->scratch.pieces + ((uint64_t)work * FKV_ATTN_MAX_SPLITS + split) * floats;
    return (fkv_softmax){at, at + j->heads_per_kv, at + floats - (uint64_t)j->heads_per_kv * j->layer->head_dim};
}

uint64_t fkv_attn_scratch_bytes(const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads) {
    fkv_carve carve = {0};
    scratch s;
    layout(&carve, layer, max_rows, n_threads, &s);
    return carve.used;
}

/* Tokens of a row before the first multiple of `cut`. */
static uint32_t head_tokens(const fkv_attn_row *row, uint32_t cut) { return fkv_min_u32(row->n_tokens, cut - row->start % cut); }

/* Query tiles of a row. */
static uint32_t row_tiles(const fkv_attn_row *row, uint32_t tile_queries, uint32_t cut) {
    uint32_t head = head_tokens(row, cut);
    uint32_t rest = row->n_tokens - head;
    return fkv_ceil_div(head, tile_queries) + rest / cut * fkv_ceil_div(cut, tile_queries) +
           fkv_ceil_div(rest % cut, tile_queries);
}

/* The first token of tile number `tile` of a row, and with *n_queries how many it has. */
static uint32_t tile_offset(const job *j, const fkv_attn_row *row, uint32_t tile, uint32_t *n_queries) {
    uint32_t head = head_tokens(row, j->tile_cut);
    uint32_t n_head = fkv_ceil_div(head, j->tile_queries);
    uint32_t from = 0; /* of the stretch between two cuts */
    uint32_t end = head;
    if (tile >= n_head) {
        uint32_t n_each = fkv_ceil_div(j->tile_cut, j->tile_queries);
        from = head + (tile - n_head) / n_each * j->tile_cut;
        end = fkv_min_u32(row->n_tokens, from + j->tile_cut);
        tile = (tile - n_head) % n_each;
    }
    uint32_t offset = from + tile * j->tile_queries;
    *n_queries = fkv_min_u32(j->tile_queries, end - offset);
    return offset;
}

static query_tile tile_at(const job *j, uint32_t tile) {
    uint32_t low = 0;
    uint32_t high = j->n_rows; /* the last row whose first tile is <= tile */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (j->scratch.first_tile[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    const fkv_attn_row *row = &j->rows[low];
    uint32_t n_queries = 0;
    uint32_t offset = tile_offset(j, row, tile - j->scratch.first_tile[low], &n_queries);
    return (query_tile){row, row->first - j->rows[0].first + offset, row->start + offset, n_queries};
}

static fkv_softmax rows_from(fkv_softmax s, uint32_t row, uint32_t dim) {
    return (fkv_softmax){s.max + row, s.sum + row, s.out + (size_t)row * dim};
}

static void clear_rows(fkv_softmax s, uint32_t n_rows, uint32_t dim) {
    for (uint32_t r = 0; r < n_rows; r++) s.max[r] = -INFINITY;
    memset(s.sum, 0, n_rows * sizeof *s.sum);
    memset(s.out, 0, (size_t)n_rows * dim * sizeof *s.out);
}

/* The block of a KV head in pages of a form. */
static const fkv_block *block_of(const job *j, form_kind form, uint32_t head) {
    return form == PACKED ? fkv_attn_head_block(j->layer, head) : j->forms[form].block;
}

static void order_queries(const fkv_channel_order *order, const float *q, uint32_t n_rows, uint32_t dim, float *to) {
    for (uint32_t r = 0; r < n_rows; r++, q += dim, to += dim)
        for (uint32_t p = 0; p < dim; p++) to[p] = q[order->channel[p]];
}

/* Queries to floats, scaled and rotated as the keys are, and prepared. */
static void load_queries(const job *j, query_tile tile, uint32_t head, const thread_scratch *s) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t n = j->heads_per_kv * layer->head_dim;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        size_t at = ((size_t)(tile.first_token + i) * layer->n_q_heads + (size_t)head * j->heads_per_kv) * layer->head_dim;
        float *to = s->q[OPEN] + (size_t)i * n;
        fkv_rows_to_f32(layer->row_type, j->q + at * fkv_type_bytes(layer->row_type), to, n);
        for (uint32_t d = 0; d < n; d++) to[d] *= layer->scale;
        if (layer->rotate_k != NULL)
            for (uint32_t h = 0; h < j->heads_per_kv; h++) fkv_rotation_apply(layer->rotate_k, to + (size_t)h * layer->head_dim);
    }
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    if (layer->calibrated)
        order_queries(block_of(j, PACKED, head)->codec[FKV_SIDE_K].channels, s->q[OPEN], n_rows, layer->head_dim, s->q[PACKED]);
    for (form_kind f = PACKED; f <= (layer->sealed ? OPEN : PACKED); f++)
        j->forms[f].codecs[FKV_SIDE_K]->prepare(&block_of(j, f, head)->codec[FKV_SIDE_K], s->q[f], n_rows, s->prepared[f]);
}

/* What the weights of a row are divided by: their sum, and that of the head's learned sink. */
static float denominator(const fkv_attn_layer *layer, uint32_t q_head, float max, float sum) {
    return layer->sink_logits != NULL ? sum + expf(layer->sink_logits[q_head] - max) : sum;
}

static void store_outputs(const job *j, query_tile tile, uint32_t head, fkv_softmax total) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t dim = layer->head_dim;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        size_t at = ((size_t)(tile.first_token + i) * layer->n_q_heads + (size_t)head * j->heads_per_kv) * dim;
        for (uint32_t h = 0; h < j->heads_per_kv; h++) {
            uint32_t r = i * j->heads_per_kv + h;
            float *row = total.out + (size_t)r * dim;
            float factor = 1.0f / denominator(layer, head * j->heads_per_kv + h, total.max[r], total.sum[r]);
            for (uint32_t d = 0; d < dim; d++) row[d] *= factor;
            if (layer->rotate_v != NULL) fkv_rotation_undo(layer->rotate_v, row);
        }
        fkv_rows_from_f32(layer->row_type, total.out + (size_t)i * j->heads_per_kv * dim,
                          j->out + at * fkv_type_bytes(layer->row_type), (size_t)j->heads_per_kv * dim);
    }
}

static uint32_t tiles_of(const fkv_attn_row *rows, uint32_t n_rows, uint32_t tile_queries, uint32_t cut) {
    uint32_t n_tiles = 0;
    for (uint32_t r = 0; r < n_rows; r++) n_tiles += row_tiles(&rows[r], tile_queries, cut);
    return n_tiles;
}

/* Positions are below it: nothing is cut. */
static uint32_t tile_cut_of(const fkv_attn_layer *layer) { return layer->sealed ? layer->block.page_tokens : UINT32_C(1) << 31; }

/* Large tiles share the unpacking of a page among many rows; but every thread should get some. */
static uint32_t choose_tile_queries(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, uint32_t n_threads) {
    uint32_t heads_per_kv = layer->n_q_heads / layer->n_kv_heads;
    uint32_t queries = queries_per_tile(heads_per_kv);
    while (n_threads > 1 && queries / 2 * heads_per_kv >= SMALLEST_TILE_ROWS &&
           tiles_of(rows, n_rows, queries, tile_cut_of(layer)) * layer->n_kv_heads < n_threads * ITEMS_PER_THREAD)
        queries /= 2;
    return queries;
}

static uint32_t clamp_to(uint32_t position, uint32_t base, uint32_t width) {
    return position <= base ? 0 : fkv_min_u32(position - base, width);
}

static uint32_t window_begin(const fkv_attn_layer *layer, uint32_t position) {
    return layer->window != 0 && position + 1 > layer->window ? position + 1 - layer->window : 0;
}

/* Where a kernel tile lies: a block of the slab, of one form, and a slot in it. */
typedef struct place {
    const uint8_t *block;
    const fkv_block *layout;
    form_kind form;
    uint32_t slot;
} place;

/* The block of (page, head) that a query tile sees. */
static place block_at(const job *j, query_tile tile, uint32_t head, uint32_t page) {
    form_kind form = j->layer->sealed && fkv_attn_sees_open(tile.position / j->layer->block.page_tokens, page) ? OPEN : PACKED;
    size_t number = fkv_page_at(form == OPEN ? tile.row->open : tile.row->view, page);
    size_t at = (number * j->layer->n_kv_heads + head) * j->forms[form].block->bytes;
    return (place){j->forms[form].pages + at, block_of(j, form, head), form, 0};
}

/* What each row sees of the tokens [base, base + tile_tokens). */
static void set_masks(const job *j, query_tile tile, uint32_t base, fkv_row_mask *masks) {
    const fkv_attn_layer *layer = j->layer;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        uint32_t position = tile.position + i;
        fkv_row_mask mask = {.sinks = layer->window != 0 ? clamp_to(layer->n_sinks, base, j->tile_tokens) : 0,
                             .begin = clamp_to(window_begin(layer, position), base, j->tile_tokens),
                             .end = clamp_to(position + 1, base, j->tile_tokens)};
        for (uint32_t h = 0; h < j->heads_per_kv; h++) masks[i * j->heads_per_kv + h] = mask;
    }
}

/* One kernel tile on the way, and where the next is. */
typedef struct tile_step {
    place here;
    place next;
    uint32_t n_tokens;
} tile_step;

static void parts_of(place at, const uint8_t *part[FKV_N_SIDES][FKV_N_PARTS]) {
    const fkv_block *block = at.layout;
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++)
            part[side][p] = at.block + block->offset[side][p] + at.slot * (size_t)block->codec[side].row_bytes[p];
}

static void fetch_open(const job *j, place at, fkv_fetch *fetch) {
    const uint8_t *part[FKV_N_SIDES][FKV_N_PARTS];
    if (j->tile_tokens == at.layout->page_tokens) {
        fkv_fetch_add(fetch, at.block, at.layout->bytes);
        return;
    }
    parts_of(at, part);
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++)
            fkv_fetch_add(fetch, part[side][p], (uint64_t)j->tile_tokens * at.layout->codec[side].row_bytes[p]);
}

/* Softmax and values of a tile whose scores are made. */
FKV_INLINE void end_tile(const job *j, const thread_scratch *s, const tile_step *step, uint32_t n_rows,
                         const uint8_t *const part[FKV_N_PARTS], fkv_fetch *fetch) {
    const fkv_attn_layer *layer = j->layer;
    const fkv_block *block = step->here.layout;
    const fkv_codec_kernels *codec = j->forms[step->here.form].codecs[FKV_SIDE_V];
    j->kernels->softmax(s->scores, j->tile_tokens, s->masks, n_rows, layer->head_dim, layer->softcap, s->piece);
    if (!fkv_masks_hide(s->masks, n_rows, step->n_tokens)) {
        codec->values(&block->codec[FKV_SIDE_V], part, fetch, step->n_tokens, s->scores, n_rows, s->piece.out);
        return;
    }
    fkv_value_tile values = {.kernels = j->kernels,
                             .values = codec->values,
                             .block = block,
                             .n_tokens = step->n_tokens,
                             .masks = s->masks,
                             .n_rows = n_rows,
                             .heads = j->heads_per_kv,
                             .p = s->scores,
                             .out = s->piece.out};
    memcpy(values.part, part, sizeof values.part);
    fkv_attn_seen_values(&values, fetch);
}

/* One kernel tile against every row of the query tile, under s->masks, while the next is prefetched. */
FKV_INLINE void meet(const job *j, query_tile tile, const thread_scratch *s, const tile_step *step) {
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    form_kind form = step->here.form;
    const fkv_block *block = step->here.layout;
    const uint8_t *part[FKV_N_SIDES][FKV_N_PARTS];
    fkv_fetch fetch = {.n_ranges = 0};
    parts_of(step->here, part);
    fetch_open(j, step->next, &fetch);
    j->forms[form].codecs[FKV_SIDE_K]->scores(&block->codec[FKV_SIDE_K], part[FKV_SIDE_K], &fetch, step->n_tokens, s->q[form],
                                              s->prepared[form], n_rows, s->scores);
    end_tile(j, s, step, n_rows, part[FKV_SIDE_V], &fetch);
}

static void close_pieces(const job *j, query_tile tile, const thread_scratch *s, uint32_t from_page, uint32_t to_page) {
    uint32_t dim = j->layer->head_dim;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        uint32_t pages = fkv_attn_split_pages(tile.position + i, j->layer->block.page_tokens);
        if (from_page / pages == to_page / pages) continue;
        fkv_softmax piece = rows_from(s->piece, i * j->heads_per_kv, dim);
        j->kernels->fold(rows_from(s->total, i * j->heads_per_kv, dim), piece, j->heads_per_kv, dim);
        clear_rows(piece, j->heads_per_kv, dim);
    }
}

static void enter(const job *j, query_tile tile, form_kind form) {
    j->kernels->enter(&j->forms[form].block->codec[FKV_SIDE_K], tile.n_queries * j->heads_per_kv);
}

/* Whether the kernels take runs of sealed pages that all queries of a tile see in full. */
static bool may_run(const job *j, query_tile tile) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t page_tokens = layer->block.page_tokens;
    return fkv_codec_is_sealed(&layer->block.codec[FKV_SIDE_K]) && layer->window == 0 && !(layer->softcap > 0.0f) &&
           page_tokens == FKV_TILE_TOKENS && j->kernels->runs != NULL &&
           j->kernels->runs(&layer->block, tile.n_queries * j->heads_per_kv) &&
           fkv_attn_split_pages(tile.position, page_tokens) ==
               fkv_attn_split_pages(tile.position + tile.n_queries - 1, page_tokens);
}

/* One behind the last page of the run that begins with `page`. */
static uint32_t run_end(const job *j, query_tile tile, uint32_t page, uint32_t end) {
    uint32_t page_tokens = j->layer->block.page_tokens;
    end = fkv_min_u32(end, (tile.position + 1) / page_tokens); /* full ones */
    if (!j->layer->sealed) return end;
    return page == 0 ? 0 : fkv_min_u32(end, fkv_attn_first_open(tile.position / page_tokens));
}

/* Pages [first, end) in one call. after: what comes behind them. */
static void take_run(const job *j, query_tile tile, uint32_t head, const thread_scratch *s, uint32_t first, uint32_t end,
                     place after) {
    const fkv_block *block = block_of(j, PACKED, head);
    uint64_t block_bytes = j->forms[PACKED].block->bytes;
    fkv_run in = {.block = block,
                  .pages = j->forms[PACKED].pages + head * block_bytes,
                  .page_bytes = j->layer->n_kv_heads * block_bytes,
                  .view = tile.row->view,
                  .first = first,
                  .end = end,
                  .split_pages = fkv_attn_split_pages(tile.position, block->page_tokens),
                  .after = after.block,
                  .after_bytes = after.layout->bytes,
                  .q = s->q[PACKED],
                  .prepared = s->prepared[PACKED],
                  .n_rows = tile.n_queries * j->heads_per_kv,
                  .piece = s->piece,
                  .total = s->total};
    j->kernels->run(&in);
}

/* All tokens of a page that some query sees. Returns the bytes read. were_whole: of the masks that are set. */
static uint64_t meet_page(const job *j, query_tile tile, const thread_scratch *s, uint32_t page, place here, place next,
                          bool *were_whole) {
    uint32_t page_tokens = j->layer->block.page_tokens;
    uint32_t seen_end = tile.position + tile.n_queries; /* one behind the last query */
    uint64_t bytes_read = 0;
    for (uint32_t slot = 0; slot < page_tokens; slot += j->tile_tokens) {
        uint32_t base = page * page_tokens + slot;
        if (base >= seen_end) break;
        tile_step step = {here, next, fkv_min_u32(j->tile_tokens, seen_end - base)};
        step.here.slot = slot;
        if (slot + j->tile_tokens < page_tokens) step.next = (place){here.block, here.layout, here.form, slot + j->tile_tokens};
        bool whole = j->layer->window == 0 && base + j->tile_tokens <= tile.position + 1; /* every row sees all of it */
        if (!whole || !*were_whole) set_masks(j, tile, base, s->masks);
        *were_whole = whole;
        meet(j, tile, s, &step);
        bytes_read += (uint64_t)step.n_tokens * j->forms[here.form].block->token_bytes;
    }
    return bytes_read;
}

/* Pages [first, end) of the history, those that no query of the tile sees left out. Closes pieces on the way; the last one stays
 * open in s->piece. Returns the bytes read. */
static uint64_t walk(const job *j, query_tile tile, uint32_t head, const thread_scratch *s, uint32_t first, uint32_t end) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t page_tokens = layer->block.page_tokens;
    uint32_t sink_pages = layer->window != 0 ? fkv_ceil_div(layer->n_sinks, page_tokens) : 0;
    uint32_t window_page = window_begin(layer, tile.position) / page_tokens;
    uint64_t bytes_read = 0;
    bool were_whole = false;
    uint32_t before = first;
    uint32_t page = first >= sink_pages ? fkv_max_u32(first, window_page) : first;
    if (page >= end) return 0;
    bool runs = may_run(j, tile);
    place here = block_at(j, tile, head, page);
    enter(j, tile, here.form);
    while (page < end) {
        uint32_t after = runs ? run_end(j, tile, page, end) : 0;
        bool is_run = after >= page + SHORTEST_RUN;
        if (!is_run) after = page + 1 >= sink_pages ? fkv_max_u32(page + 1, window_page) : page + 1;
        place next = after < end ? block_at(j, tile, head, after) : here;
        if (after + 1 < end) {
            place later = block_at(j, tile, head, after + 1);
            fkv_fetch_entries(later.block, later.layout->bytes);
        }
        close_pieces(j, tile, s, before, page);
        before = page;
        if (is_run) {
            take_run(j, tile, head, s, page, after, next);
            bytes_read += (uint64_t)(after - page) * page_tokens * j->forms[PACKED].block->token_bytes;
            before = after - 1;
        } else {
            bytes_read += meet_page(j, tile, s, page, here, next, &were_whole);
        }
        if (next.form != here.form) {
            j->kernels->leave();
            enter(j, tile, next.form);
        }
        page = after;
        here = next;
    }
    j->kernels->leave();
    return bytes_read;
}

static void count_bytes(job *j, uint64_t bytes) { atomic_fetch_add_explicit(&j->bytes_read, bytes, memory_order_relaxed); }

static void attend_whole(void *context, uint32_t item, uint32_t thread) {
    job *j = context;
    uint32_t head = item % j->layer->n_kv_heads;
    query_tile tile = tile_at(j, item / j->layer->n_kv_heads);
    const thread_scratch s = scratch_of(j, thread);
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    uint32_t dim = j->layer->head_dim;
    clear_rows(s.piece, n_rows, dim);
    clear_rows(s.total, n_rows, dim);
    load_queries(j, tile, head, &s);
    uint32_t end = (tile.position + tile.n_queries - 1) / j->layer->block.page_tokens + 1;
    count_bytes(j, walk(j, tile, head, &s, 0, end));
    j->kernels->fold(s.total, s.piece, n_rows, dim);
    store_outputs(j, tile, head, s.total);
}

/* The piece `split` of one (tile, head) of a single query; the thread that ends last folds them all. */
static void attend_piece(void *context, uint32_t item, uint32_t thread) {
    job *j = context;
    uint32_t split = item % j->max_splits;
    uint32_t work = item / j->max_splits;
    uint32_t head = work % j->layer->n_kv_heads;
    query_tile tile = tile_at(j, work / j->layer->n_kv_heads);
    uint32_t dim = j->layer->head_dim;
    uint32_t n_pages = tile.position / j->layer->block.page_tokens + 1;
    uint32_t pages = fkv_attn_split_pages(tile.position, j->layer->block.page_tokens);
    uint32_t n_splits = fkv_ceil_div(n_pages, pages);
    if (split >= n_splits) return;

    thread_scratch s = scratch_of(j, thread);
    s.piece = piece_at(j, work, split);
    clear_rows(s.piece, j->heads_per_kv, dim);
    if (j->scratch.loaded[thread] != work) load_queries(j, tile, head, &s); /* pieces of one query mostly follow each other */
    j->scratch.loaded[thread] = work;
    count_bytes(j, walk(j, tile, head, &s, split * pages, fkv_min_u32((split + 1) * pages, n_pages)));

    if (atomic_fetch_sub_explicit(&j->scratch.pieces_to_come[work], 1, memory_order_acq_rel) != 1) return;
    clear_rows(s.total, j->heads_per_kv, dim);
    for (uint32_t i = 0; i < n_splits; i++) j->kernels->fold(s.total, piece_at(j, work, i), j->heads_per_kv, dim);
    store_outputs(j, tile, head, s.total);
}

/* Whether cutting decode tiles into pieces pays; prepares what pieces need if so. */
static bool cut_into_pieces(job *j, uint32_t n_tiles, uint32_t n_threads) {
    uint32_t n_work = n_tiles * j->layer->n_kv_heads;
    if (n_threads == 1 || n_work >= n_threads * ITEMS_PER_THREAD) return false;
    j->max_splits = 1;
    for (uint32_t thread = 0; thread < n_threads; thread++) j->scratch.loaded[thread] = UINT32_MAX;
    for (uint32_t tile = 0; tile < n_tiles; tile++) {
        query_tile t = tile_at(j, tile);
        if (t.n_queries != 1) return false;
        uint32_t page_tokens = j->layer->block.page_tokens;
        uint32_t n_splits = fkv_ceil_div(t.position / page_tokens + 1, fkv_attn_split_pages(t.position, page_tokens));
        for (uint32_t head = 0; head < j->layer->n_kv_heads; head++)
            atomic_init(&j->scratch.pieces_to_come[tile * j->layer->n_kv_heads + head], n_splits);
        j->max_splits = fkv_max_u32(j->max_splits, n_splits);
    }
    return j->max_splits > 1;
}

static page_form form_of(const fkv_cpu_kernels *kernels, const fkv_block *block, const uint8_t *pages) {
    page_form form = {.block = block, .pages = pages};
    for (int side = 0; side < FKV_N_SIDES; side++) form.codecs[side] = fkv_codec_kernels_of(kernels, &block->codec[side]);
    return form;
}

uint64_t fkv_attn_attend(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                         const void *q, void *out, void *memory, fkv_workers *workers) {
    uint32_t n_threads = fkv_workers_count(workers);
    uint32_t heads_per_kv = layer->n_q_heads / layer->n_kv_heads;
    job j = {.kernels = kernels,
             .layer = layer,
             .rows = rows,
             .n_rows = n_rows,
             .q = q,
             .out = out,
             .heads_per_kv = heads_per_kv,
             .tile_queries = choose_tile_queries(layer, rows, n_rows, n_threads),
             .tile_tokens = fkv_min_u32(layer->block.page_tokens, FKV_TILE_TOKENS),
             .tile_cut = tile_cut_of(layer)};
    j.forms[PACKED] = form_of(kernels, &layer->block, layer->pages);
    if (layer->sealed) j.forms[OPEN] = form_of(kernels, &layer->open, layer->open_pages);
    fkv_carve carve = {.base = memory, .size = UINT64_MAX};
    layout(&carve, layer, n_rows, n_threads, &j.scratch);

    uint32_t n_tiles = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        j.scratch.first_tile[r] = n_tiles;
        n_tiles += row_tiles(&rows[r], j.tile_queries, j.tile_cut);
    }

    if (cut_into_pieces(&j, n_tiles, n_threads))
        fkv_workers_run(workers, attend_piece, &j, n_tiles * layer->n_kv_heads * j.max_splits);
    else
        fkv_workers_run(workers, attend_whole, &j, n_tiles * layer->n_kv_heads);

    return atomic_load_explicit(&j.bytes_read, memory_order_relaxed);
}
