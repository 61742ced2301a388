/* Computes attention over packed pages. This file decides which pages each query row reads, in which order and with which mask,
 * and calls the kernels for one tile at a time. It allocates no memory; the caller provides all scratch memory.
 *
 * A work item is a (query tile, KV head) pair. A query tile consists of `tile_queries` consecutive tokens of one sequence and all
 * query heads that share the KV head, so that each packed byte is read once for the whole tile. If there are too few items to
 * keep all threads busy, decode tiles are split at the boundaries given by fkv_attn_split_pages(), and the last item to finish
 * combines the splits.
 *
 * In a sealed layer, a query tile never crosses a page boundary, so that all its queries read the same pages in open form. Open
 * pages and sealed pages are read by different kernels, for which the queries are prepared separately. If keys are calibrated,
 * the channels of each query are permuted once into the channel order of the head.
 *
 * In a latent layer, the RoPE channels of queries and keys are stored in separate arrays. For every tile, the dot products over
 * the RoPE channels are added to the dot products over the latent channels.
 *
 * Results are bit-identical whether one work item processes all splits of a query or each split is a separate work item, because
 * the splits end at the same pages and are combined in the same order.
 */
#include "visible_values.h"

#include "../codec/channel_order.h"
#include "../codec/sealed.h"

#include "../base/carve.h"
#include "../base/float16.h"

#include <math.h>
#include <stdatomic.h>

enum {
    SMALLEST_SPLIT = 256,    /* minimum number of tokens per split */
    SMALLEST_TILE_ROWS = 16, /* minimum rows per prefill tile; the overhead of smaller tiles outweighs the parallelism */
    ITEMS_PER_THREAD = 3,    /* target number of work items per thread; if there are fewer, tiles are made smaller or split */
    SHORTEST_RUN = 4         /* minimum number of pages per call of fkv_cpu_kernels.run() */
};

/* Storage forms of a page. PACKED: encoded with the layer's codec. OPEN: open form, which exists only in sealed layers. */
typedef enum form_kind { PACKED = 0, OPEN = 1, N_FORMS = 2 } form_kind;

typedef struct thread_scratch {
    float *q[N_FORMS];       /* [tile rows, D] queries for each page form (open, sealed), in the channel order of that form */
    void *prepared[N_FORMS]; /* queries after fkv_codec_kernels.prepare(); prepared[OPEN] is NULL unless the layer is sealed */
    float *q_rope; /* [tile rows, R] RoPE channels of the queries; NULL, like the next two fields, unless the layer is latent */
    void *prepared_rope;
    float *rope_scores; /* [tile rows, FKV_TILE_TOKENS] dot products over the RoPE channels */
    float *scores;      /* [tile rows, FKV_TILE_TOKENS] scores, later softmax weights */
    fkv_row_mask *masks;
    fkv_softmax split; /* softmax state of the current split */
    fkv_softmax total; /* softmax state of all earlier splits combined */
} thread_scratch;

typedef struct scratch {
    uint32_t *first_tile; /* [rows] number of query tiles in all preceding rows of the step */
    uint8_t *threads;     /* [n_threads, thread_bytes] scratch memory of each thread; see scratch_of() */
    uint64_t thread_bytes;
    uint32_t *loaded; /* [n_threads] index of the (tile, head) pair whose queries the thread has loaded; private to the thread */
    _Atomic uint32_t *splits_left; /* [split items] number of unfinished splits of each (tile, head) pair */
    float *splits;                 /* [split items * FKV_ATTN_MAX_SPLITS, split_floats()] softmax states; see split_state_at() */
} scratch;

/* Block layout, base address and kernels of the pages in one storage form (open or packed). */
typedef struct page_form {
    const fkv_block *block;
    const uint8_t *pages;
    const fkv_codec_kernels *codecs[FKV_N_SIDES];
} page_form;

typedef struct job {
    const fkv_cpu_kernels *kernels;
    page_form forms[N_FORMS]; /* forms[OPEN] is used only in sealed layers */
    const fkv_attn_layer *layer;
    const fkv_attn_row *rows;
    uint32_t n_rows;
    const uint8_t *q;
    uint8_t *out;
    scratch scratch;
    uint32_t heads_per_kv; /* query heads per KV head */
    uint32_t tile_queries;
    uint32_t tile_tokens; /* number of tokens in a full tile, which one kernel call processes */
    uint32_t tile_cut;    /* no query tile extends across a position that is a multiple of tile_cut */
    uint32_t max_splits;  /* maximum number of work items per (tile, head) pair; greater than 1 only if decode tiles are split */
    _Atomic uint64_t bytes_read;
} job;

/* A query tile. tile_at() computes all fields from the tile's index. */
typedef struct query_tile {
    const fkv_attn_row *row;
    uint32_t first_token; /* index of the tile's first query among all tokens of the step */
    uint32_t position;    /* sequence position of the tile's first query */
    uint32_t n_queries;
} query_tile;

uint32_t fkv_attn_split_pages(uint32_t position, uint32_t page_tokens) {
    uint32_t n_pages = position / page_tokens + 1;
    uint32_t pages = page_tokens < SMALLEST_SPLIT ? SMALLEST_SPLIT / page_tokens : 1;
    while (pages * FKV_ATTN_MAX_SPLITS < n_pages) pages *= 2;
    return pages;
}

/* Returns the maximum number of queries per tile, which determines the size of the scratch memory. */
static uint32_t queries_per_tile(uint32_t heads_per_kv) { return fkv_max_u32(1, FKV_TILE_ROWS / heads_per_kv); }

static void carve_softmax(fkv_carve *carve, uint64_t rows, uint64_t dim, fkv_softmax *s) {
    s->max = FKV_CARVE(carve, rows, float);
    s->sum = FKV_CARVE(carve, rows, float);
    s->out = FKV_CARVE(carve, rows * dim, float);
}

/* Returns the number of floats needed to store the softmax state of one split, for all rows of one KV head. The outputs start at
 * a multiple of 16 floats. */
static uint64_t split_floats(uint64_t heads_per_kv, uint64_t dim) {
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
    t.q_rope = NULL;
    t.prepared_rope = NULL;
    t.rope_scores = NULL;
    if (layer->rope_dim != 0) {
        t.q_rope = FKV_CARVE(carve, tile_rows * layer->rope_dim, float);
        t.prepared_rope = fkv_carve_take(carve, 1, fkv_prepared_bytes(tile_rows, layer->rope_dim));
        t.rope_scores = FKV_CARVE(carve, tile_rows * FKV_TILE_TOKENS, float);
    }
    t.scores = FKV_CARVE(carve, tile_rows * FKV_TILE_TOKENS, float);
    t.masks = FKV_CARVE(carve, tile_rows, fkv_row_mask);
    carve_softmax(carve, tile_rows, dim, &t.split);
    carve_softmax(carve, tile_rows, dim, &t.total);
    return t;
}

/* Allocates all scratch arrays from `carve`. If `carve` has no base address, only counts the required bytes. */
static void carve_scratch(fkv_carve *carve, const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads, scratch *s) {
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
    s->splits_left = FKV_CARVE(carve, split_items, _Atomic uint32_t);
    s->splits = FKV_CARVE(carve, split_items * FKV_ATTN_MAX_SPLITS * split_floats(heads_per_kv, dim), float);
}

static thread_scratch scratch_of(const job *j, uint32_t thread) {
    const scratch *s = &j->scratch;
    fkv_carve carve = {.base = s->threads + thread * s->thread_bytes, .size = s->thread_bytes};
    uint64_t tile_rows = (uint64_t)queries_per_tile(j->heads_per_kv) * j->heads_per_kv;
    thread_scratch t = carve_thread(&carve, j->layer, tile_rows);
    FKV_ASSERT(carve.base != NULL && !carve.overflow); /* the arrays fit, because thread_bytes was computed with carve_thread() */
    return t;
}

/* Returns the softmax state of one split. `work` is the index of its (tile, head) pair. */
static fkv_softmax split_state_at(const job *j, uint32_t work, uint32_t split) {
    uint64_t floats = split_floats(j->heads_per_kv, j->layer->head_dim);
    float *at = j->scratch.splits + ((uint64_t)work * FKV_ATTN_MAX_SPLITS + split) * floats;
    return (fkv_softmax){at, at + j->heads_per_kv, at + floats - (uint64_t)j->heads_per_kv * j->layer->head_dim};
}

uint64_t fkv_attn_scratch_bytes(const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads) {
    fkv_carve carve = {0};
    scratch s;
    carve_scratch(&carve, layer, max_rows, n_threads, &s);
    return carve.used;
}

/* Returns the number of new tokens of a sequence before the next position that is a multiple of `cut`. */
static uint32_t head_tokens(const fkv_attn_row *row, uint32_t cut) { return fkv_min_u32(row->n_tokens, cut - row->start % cut); }

/* Returns the number of query tiles for the new tokens of one sequence. */
static uint32_t row_tiles(const fkv_attn_row *row, uint32_t tile_queries, uint32_t cut) {
    uint32_t head = head_tokens(row, cut);
    uint32_t rest = row->n_tokens - head;
    return fkv_ceil_div(head, tile_queries) + rest / cut * fkv_ceil_div(cut, tile_queries) +
           fkv_ceil_div(rest % cut, tile_queries);
}

/* Returns the index of a query tile's first token among the new tokens of its sequence. `tile` is the index of the tile within
 * the sequence. Sets *n_queries to the number of queries in the tile. */
static uint32_t tile_offset(const job *j, const fkv_attn_row *row, uint32_t tile, uint32_t *n_queries) {
    uint32_t head = head_tokens(row, j->tile_cut);
    uint32_t n_head = fkv_ceil_div(head, j->tile_queries);
    /* first token of the tile's section; positions that are multiples of tile_cut divide a row into sections */
    uint32_t from = 0;
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
    uint32_t high = j->n_rows; /* binary search for the last row whose first tile is <= tile */
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

/* Returns the block layout of a KV head, for pages in the given storage form. */
static const fkv_block *form_block(const job *j, form_kind form, uint32_t head) {
    return form == PACKED ? fkv_attn_head_block(j->layer, head) : j->forms[form].block;
}

static void order_queries(const fkv_channel_order *order, const float *q, uint32_t n_rows, uint32_t dim, float *to) {
    for (uint32_t r = 0; r < n_rows; r++, q += dim, to += dim)
        for (uint32_t p = 0; p < dim; p++) to[p] = q[order->channel[p]];
}

/* Converts the queries of n_heads consecutive heads to float, without their RoPE channels. Heads are numbered consecutively over
 * all tokens of the step, and `first` is the number of the first head to convert. */
static void load_query_heads(const fkv_attn_layer *layer, const uint8_t *q, size_t first, uint32_t n_heads, float *to) {
    const size_t row_bytes = fkv_attn_key_dim(layer) * fkv_type_bytes(layer->row_type);
    if (layer->rope_dim == 0) {
        fkv_rows_to_f32(layer->row_type, q + first * row_bytes, to, (size_t)n_heads * layer->head_dim);
        return;
    }
    for (uint32_t h = 0; h < n_heads; h++)
        fkv_rows_to_f32(layer->row_type, q + (first + h) * row_bytes, to + (size_t)h * layer->head_dim, layer->head_dim);
}

/* In a latent layer, converts the RoPE channels of the queries to float, scales them, and prepares them for the kernels. */
static void load_rope_queries(const job *j, query_tile tile, const thread_scratch *s) {
    const fkv_attn_layer *layer = j->layer;
    const uint32_t dim = layer->rope_dim;
    const uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    const uint8_t *from =
        j->q + (size_t)tile.first_token * layer->n_q_heads * fkv_attn_key_dim(layer) * fkv_type_bytes(layer->row_type);
    for (uint32_t r = 0; r < n_rows; r++) {
        float *to = s->q_rope + (size_t)r * dim;
        size_t at = (size_t)r * fkv_attn_key_dim(layer) + layer->head_dim;
        fkv_rows_to_f32(layer->row_type, from + at * fkv_type_bytes(layer->row_type), to, dim);
        for (uint32_t d = 0; d < dim; d++) to[d] *= layer->scale;
    }
    j->forms[PACKED].codecs[FKV_SIDE_ROPE]->prepare(&layer->block.codec[FKV_SIDE_ROPE], s->q_rope, n_rows, s->prepared_rope);
}

/* Converts queries to float, scales them, rotates them like the keys, and prepares them for the kernels. */
static void load_queries(const job *j, query_tile tile, uint32_t head, const thread_scratch *s) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t n = j->heads_per_kv * layer->head_dim;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        size_t first = (size_t)(tile.first_token + i) * layer->n_q_heads + (size_t)head * j->heads_per_kv;
        float *to = s->q[OPEN] + (size_t)i * n;
        load_query_heads(layer, j->q, first, j->heads_per_kv, to);
        for (uint32_t d = 0; d < n; d++) to[d] *= layer->scale;
        if (layer->rotate_k != NULL)
            for (uint32_t h = 0; h < j->heads_per_kv; h++) fkv_rotation_apply(layer->rotate_k, to + (size_t)h * layer->head_dim);
    }
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    if (layer->calibrated)
        order_queries(form_block(j, PACKED, head)->codec[FKV_SIDE_K].channels, s->q[OPEN], n_rows, layer->head_dim, s->q[PACKED]);
    for (form_kind f = PACKED; f <= (layer->sealed ? OPEN : PACKED); f++)
        j->forms[f].codecs[FKV_SIDE_K]->prepare(&form_block(j, f, head)->codec[FKV_SIDE_K], s->q[f], n_rows, s->prepared[f]);
    if (layer->rope_dim != 0) load_rope_queries(j, tile, s);
}

/* Returns the softmax denominator of a query row: the sum of its weights, plus the weight of the head's learned sink, if any. */
static float softmax_denominator(const fkv_attn_layer *layer, uint32_t q_head, float max, float sum) {
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
            float factor = 1.0f / softmax_denominator(layer, head * j->heads_per_kv + h, total.max[r], total.sum[r]);
            for (uint32_t d = 0; d < dim; d++) row[d] *= factor;
            if (layer->rotate_v != NULL) fkv_rotation_undo(layer->rotate_v, row);
        }
        fkv_rows_from_f32(layer->row_type, total.out + (size_t)i * j->heads_per_kv * dim,
                          j->out + at * fkv_type_bytes(layer->row_type), (size_t)j->heads_per_kv * dim);
    }
}

static uint32_t count_query_tiles(const fkv_attn_row *rows, uint32_t n_rows, uint32_t tile_queries, uint32_t cut) {
    uint32_t n_tiles = 0;
    for (uint32_t r = 0; r < n_rows; r++) n_tiles += row_tiles(&rows[r], tile_queries, cut);
    return n_tiles;
}

/* Returns the distance between tile cuts, which are positions that no query tile extends across. In sealed layers, tiles are cut
 * at page boundaries. In other layers, the distance is 2^31, which exceeds every position, so tiles are never cut. */
static uint32_t tile_cut_of(const fkv_attn_layer *layer) { return layer->sealed ? layer->block.page_tokens : UINT32_C(1) << 31; }

/* Chooses the number of queries per tile. Larger tiles amortize the cost of unpacking a page over more rows, but there should be
 * enough tiles for all threads. */
static uint32_t choose_tile_queries(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, uint32_t n_threads) {
    uint32_t heads_per_kv = layer->n_q_heads / layer->n_kv_heads;
    uint32_t queries = queries_per_tile(heads_per_kv);
    while (n_threads > 1 && queries / 2 * heads_per_kv >= SMALLEST_TILE_ROWS &&
           count_query_tiles(rows, n_rows, queries, tile_cut_of(layer)) * layer->n_kv_heads < n_threads * ITEMS_PER_THREAD)
        queries /= 2;
    return queries;
}

static uint32_t clamp_to(uint32_t position, uint32_t base, uint32_t width) {
    return position <= base ? 0 : fkv_min_u32(position - base, width);
}

static uint32_t window_begin(const fkv_attn_layer *layer, uint32_t position) {
    return layer->window != 0 && position + 1 > layer->window ? position + 1 - layer->window : 0;
}

/* Location of a tile of tokens: the address, layout and storage form of the block that contains it, and the index of its first
 * token within the page. */
typedef struct place {
    const uint8_t *block;
    const fkv_block *layout;
    form_kind form;
    uint32_t slot;
} place;

/* Returns the location of one page's block for a KV head, in the storage form that the queries of the tile read. */
static place visible_block_at(const job *j, query_tile tile, uint32_t head, uint32_t page) {
    form_kind form = j->layer->sealed && fkv_attn_sees_open(tile.position / j->layer->block.page_tokens, page) ? OPEN : PACKED;
    size_t number = fkv_page_at(form == OPEN ? tile.row->open : tile.row->view, page);
    size_t at = (number * j->layer->n_kv_heads + head) * j->forms[form].block->bytes;
    return (place){j->forms[form].pages + at, form_block(j, form, head), form, 0};
}

/* Computes the mask of each query row for the tokens [base, base + tile_tokens). */
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

/* Locations of the tile of tokens that is processed now and of the next tile, which is prefetched. */
typedef struct tile_step {
    place here;
    place next;
    uint32_t n_tokens;
    bool whole; /* whether all rows see all tokens of a full tile */
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

/* Computes the softmax weights of a tile from its scores, and adds the weighted values to the outputs. */
FKV_INLINE void apply_values(const job *j, const thread_scratch *s, const tile_step *step, uint32_t n_rows,
                             const uint8_t *const part[FKV_N_PARTS], fkv_fetch *fetch) {
    const fkv_attn_layer *layer = j->layer;
    const fkv_block *block = step->here.layout;
    const fkv_side side = fkv_attn_value_side(layer);
    const fkv_codec_kernels *codec = j->forms[step->here.form].codecs[side];
    j->kernels->softmax(s->scores, j->tile_tokens, s->masks, n_rows, layer->head_dim, layer->softcap, s->split);
    if (!fkv_masks_hide(s->masks, n_rows, step->n_tokens)) {
        codec->values(&block->codec[side], part, fetch, step->n_tokens, s->scores, n_rows, s->split.out);
        return;
    }
    fkv_value_tile values = {.kernels = j->kernels,
                             .values = codec->values,
                             .k_codec = &block->codec[FKV_SIDE_K],
                             .codec = &block->codec[side],
                             .n_tokens = step->n_tokens,
                             .masks = s->masks,
                             .n_rows = n_rows,
                             .heads = j->heads_per_kv,
                             .p = s->scores,
                             .out = s->split.out};
    memcpy(values.part, part, sizeof values.part);
    fkv_attn_visible_values(&values, fetch);
}

/* In a latent layer, adds the dot products over the RoPE channels to the scores. Scores of tokens past n_tokens are undefined. */
static void add_rope_scores(const job *j, const thread_scratch *s, const tile_step *step, uint32_t n_rows,
                            const uint8_t *const part[FKV_N_PARTS]) {
    FKV_ASSERT(s->rope_scores != NULL);
    fkv_fetch none = {.n_ranges = 0};
    j->forms[PACKED].codecs[FKV_SIDE_ROPE]->scores(&step->here.layout->codec[FKV_SIDE_ROPE], part, &none, step->n_tokens,
                                                   s->q_rope, s->prepared_rope, n_rows, s->rope_scores);
    for (uint32_t r = 0; r < n_rows; r++) {
        float *to = s->scores + (size_t)r * FKV_TILE_TOKENS;
        const float *from = s->rope_scores + (size_t)r * FKV_TILE_TOKENS;
        for (uint32_t t = 0; t < FKV_TILE_TOKENS; t++) to[t] += from[t];
    }
}

/* Computes attention over one tile of tokens for all rows of the query tile, using the masks in s->masks. Also prefetches the
 * next tile of tokens. */
FKV_INLINE void attend_tile(const job *j, query_tile tile, const thread_scratch *s, const tile_step *step) {
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    form_kind form = step->here.form;
    const fkv_block *block = step->here.layout;
    const uint8_t *part[FKV_N_SIDES][FKV_N_PARTS];
    fkv_fetch fetch = {.n_ranges = 0};
    parts_of(step->here, part);
    fetch_open(j, step->next, &fetch);
    if (step->whole && j->tile_tokens == FKV_TILE_TOKENS && j->layer->rope_dim == 0 && !(j->layer->softcap > 0.0f) &&
        j->kernels->fuses != NULL && j->kernels->fuses(block, n_rows)) {
        fkv_tile_rows in = {
            .block = block, .next = &fetch, .q = s->q[form], .prepared = s->prepared[form], .n_rows = n_rows, .state = s->split};
        memcpy(in.part, part, sizeof in.part);
        j->kernels->tile(&in);
        return;
    }
    j->forms[form].codecs[FKV_SIDE_K]->scores(&block->codec[FKV_SIDE_K], part[FKV_SIDE_K], &fetch, step->n_tokens, s->q[form],
                                              s->prepared[form], n_rows, s->scores);
    if (j->layer->rope_dim != 0) add_rope_scores(j, s, step, n_rows, part[FKV_SIDE_ROPE]);
    apply_values(j, s, step, n_rows, part[fkv_attn_value_side(j->layer)], &fetch);
}

static void close_splits(const job *j, query_tile tile, const thread_scratch *s, uint32_t from_page, uint32_t to_page) {
    uint32_t dim = j->layer->head_dim;
    uint32_t page_tokens = j->layer->block.page_tokens;
    /* split sizes of later queries are multiples of the first query's split size, so if no split of the first query ends here, no
     * split of another query does */
    uint32_t fewest = fkv_attn_split_pages(tile.position, page_tokens);
    if (from_page / fewest == to_page / fewest) return;
    for (uint32_t i = 0; i < tile.n_queries; i++) {
        uint32_t pages = fkv_attn_split_pages(tile.position + i, page_tokens);
        if (from_page / pages == to_page / pages) continue;
        fkv_softmax split = rows_from(s->split, i * j->heads_per_kv, dim);
        j->kernels->fold(rows_from(s->total, i * j->heads_per_kv, dim), split, j->heads_per_kv, dim);
        clear_rows(split, j->heads_per_kv, dim);
    }
}

static void enter_kernels(const job *j, query_tile tile, form_kind form) {
    j->kernels->enter(&j->forms[form].block->codec[FKV_SIDE_K], tile.n_queries * j->heads_per_kv);
}

/* Returns whether fkv_cpu_kernels.run() can process the sealed pages that are fully visible to all queries of the tile. */
static bool may_run(const job *j, query_tile tile) {
    const fkv_attn_layer *layer = j->layer;
    uint32_t page_tokens = layer->block.page_tokens;
    return fkv_codec_is_sealed(&layer->block.codec[FKV_SIDE_K]) && layer->window == 0 && !(layer->softcap > 0.0f) &&
           page_tokens == FKV_TILE_TOKENS && j->kernels->runs != NULL &&
           j->kernels->runs(&layer->block, tile.n_queries * j->heads_per_kv) &&
           fkv_attn_split_pages(tile.position, page_tokens) ==
               fkv_attn_split_pages(tile.position + tile.n_queries - 1, page_tokens);
}

/* Returns the end (exclusive) of the longest run of fully visible sealed pages that starts at `page`. */
static uint32_t run_end(const job *j, query_tile tile, uint32_t page, uint32_t end) {
    uint32_t page_tokens = j->layer->block.page_tokens;
    end = fkv_min_u32(end, (tile.position + 1) / page_tokens); /* full pages only */
    if (!j->layer->sealed) return end;
    return page == 0 ? 0 : fkv_min_u32(end, fkv_attn_first_open(tile.position / page_tokens));
}

/* Processes pages [first, end) with one call of fkv_cpu_kernels.run(), which also prefetches the block `after`. */
static void attend_run(const job *j, query_tile tile, uint32_t head, const thread_scratch *s, uint32_t first, uint32_t end,
                       place after) {
    const fkv_block *block = form_block(j, PACKED, head);
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
                  .split = s->split,
                  .total = s->total};
    j->kernels->run(&in);
}

/* Processes all tokens of a page that are visible to at least one query of the tile. Returns the number of bytes read. On entry
 * and on return, *were_whole is true if s->masks makes every token of a tile visible to every row. */
static uint64_t attend_page(const job *j, query_tile tile, const thread_scratch *s, uint32_t page, place here, place next,
                            bool *were_whole) {
    uint32_t page_tokens = j->layer->block.page_tokens;
    uint32_t visible_end = tile.position + tile.n_queries; /* position after the last visible token */
    uint64_t bytes_read = 0;
    for (uint32_t slot = 0; slot < page_tokens; slot += j->tile_tokens) {
        uint32_t base = page * page_tokens + slot;
        if (base >= visible_end) break;
        tile_step step = {.here = here, .next = next, .n_tokens = fkv_min_u32(j->tile_tokens, visible_end - base)};
        step.here.slot = slot;
        if (slot + j->tile_tokens < page_tokens) step.next = (place){here.block, here.layout, here.form, slot + j->tile_tokens};
        bool whole = j->layer->window == 0 &&
                     base + j->tile_tokens <= tile.position + 1; /* whether every row sees all tokens of the tile */
        if (!whole || !*were_whole) set_masks(j, tile, base, s->masks);
        *were_whole = whole;
        step.whole = whole;
        attend_tile(j, tile, s, &step);
        bytes_read += (uint64_t)step.n_tokens * j->forms[here.form].block->token_bytes;
    }
    return bytes_read;
}

/* Processes the pages in [first, end) that are visible to at least one query of the tile. Finishes every split that ends in this
 * range. If the last split continues past `end`, its state stays in s->split for a later call. Returns the number of bytes
 * read. */
static uint64_t walk_pages(const job *j, query_tile tile, uint32_t head, const thread_scratch *s, uint32_t first, uint32_t end) {
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
    place here = visible_block_at(j, tile, head, page);
    enter_kernels(j, tile, here.form);
    while (page < end) {
        uint32_t after = runs ? run_end(j, tile, page, end) : 0;
        bool is_run = after >= page + SHORTEST_RUN;
        if (!is_run) after = page + 1 >= sink_pages ? fkv_max_u32(page + 1, window_page) : page + 1;
        place next = after < end ? visible_block_at(j, tile, head, after) : here;
        if (after + 1 < end) {
            place later = visible_block_at(j, tile, head, after + 1);
            fkv_fetch_entries(later.block, later.layout->bytes);
        }
        close_splits(j, tile, s, before, page);
        before = page;
        if (is_run) {
            attend_run(j, tile, head, s, page, after, next);
            bytes_read += (uint64_t)(after - page) * page_tokens * j->forms[PACKED].block->token_bytes;
            before = after - 1;
        } else {
            bytes_read += attend_page(j, tile, s, page, here, next, &were_whole);
        }
        if (next.form != here.form) {
            j->kernels->leave();
            enter_kernels(j, tile, next.form);
        }
        page = after;
        here = next;
    }
    j->kernels->leave();
    return bytes_read;
}

static void count_bytes_read(job *j, uint64_t bytes) { atomic_fetch_add_explicit(&j->bytes_read, bytes, memory_order_relaxed); }

static void attend_whole(void *context, uint32_t item, uint32_t thread) {
    job *j = context;
    uint32_t head = item % j->layer->n_kv_heads;
    query_tile tile = tile_at(j, item / j->layer->n_kv_heads);
    const thread_scratch s = scratch_of(j, thread);
    uint32_t n_rows = tile.n_queries * j->heads_per_kv;
    uint32_t dim = j->layer->head_dim;
    clear_rows(s.split, n_rows, dim);
    clear_rows(s.total, n_rows, dim);
    load_queries(j, tile, head, &s);
    uint32_t end = (tile.position + tile.n_queries - 1) / j->layer->block.page_tokens + 1;
    count_bytes_read(j, walk_pages(j, tile, head, &s, 0, end));
    j->kernels->fold(s.total, s.split, n_rows, dim);
    store_outputs(j, tile, head, s.total);
}

/* Processes one split of the pages that a single decode query reads, for one KV head. The last thread to finish combines all
 * splits. */
static void attend_split(void *context, uint32_t item, uint32_t thread) {
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
    s.split = split_state_at(j, work, split);
    clear_rows(s.split, j->heads_per_kv, dim);
    if (j->scratch.loaded[thread] != work)
        load_queries(j, tile, head, &s); /* consecutive work items are usually splits of the same query */
    j->scratch.loaded[thread] = work;
    count_bytes_read(j, walk_pages(j, tile, head, &s, split * pages, fkv_min_u32((split + 1) * pages, n_pages)));

    if (atomic_fetch_sub_explicit(&j->scratch.splits_left[work], 1, memory_order_acq_rel) != 1) return;
    clear_rows(s.total, j->heads_per_kv, dim);
    for (uint32_t i = 0; i < n_splits; i++) j->kernels->fold(s.total, split_state_at(j, work, i), j->heads_per_kv, dim);
    store_outputs(j, tile, head, s.total);
}

/* Decides whether to split decode tiles and, if so, initializes the split counters. */
static bool cut_into_splits(job *j, uint32_t n_tiles, uint32_t n_threads) {
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
            atomic_init(&j->scratch.splits_left[tile * j->layer->n_kv_heads + head], n_splits);
        j->max_splits = fkv_max_u32(j->max_splits, n_splits);
    }
    return j->max_splits > 1;
}

static page_form make_page_form(const fkv_cpu_kernels *kernels, const fkv_block *block, const uint8_t *pages) {
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
    j.forms[PACKED] = make_page_form(kernels, &layer->block, layer->pages);
    if (layer->sealed) j.forms[OPEN] = make_page_form(kernels, &layer->open, layer->open_pages);
    fkv_carve carve = {.base = memory, .size = UINT64_MAX};
    carve_scratch(&carve, layer, n_rows, n_threads, &j.scratch);

    uint32_t n_tiles = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        j.scratch.first_tile[r] = n_tiles;
        n_tiles += row_tiles(&rows[r], j.tile_queries, j.tile_cut);
    }

    if (cut_into_splits(&j, n_tiles, n_threads))
        fkv_workers_run(workers, attend_split, &j, n_tiles * layer->n_kv_heads * j.max_splits);
    else
        fkv_workers_run(workers, attend_whole, &j, n_tiles * layer->n_kv_heads);

    return atomic_load_explicit(&j.bytes_read, memory_order_relaxed);
}
