/* The plain method: write and attend with MLX operations, on any stream.
 *
 * Write. Rows are clamped to the range that pages can store, rotated, and packed (mlx_codec.c) as specified in
 * docs/page_format.md. On the MLX CPU backend, the Hadamard transform performs the additions in the order that the format
 * specifies. In each page, the codes, scales and biases of the new K and V rows are written to the pool with one slice update
 * each. Full pages of a sealed layer are gathered from its open pool, sealed, and written to its own pool.
 *
 * Attend. The queries of each sequence are processed in blocks, over tiles of TILE_TOKENS tokens. The packed pages of a tile
 * are gathered, scored by the functions of their codec, and merged into a running {out, max, denominator}. Each tile depends on
 * the previous one, so that the intermediate results of only one tile exist at a time.
 *
 * In a latent layer, the K side of a page holds the latent channels, which serve as keys and as values. The V side holds the
 * RoPE channels, which serve only as keys.
 *
 * In a sealed layer, all queries of a block belong to the same page, so they all read the same pages in open form.
 *
 * Tile boundaries are fixed positions, and sequences never share an operation. Results therefore depend neither on other rows
 * of the step nor on the page numbers in the pool.
 */
#include "mlx_codec.h"

#include <math.h>

enum {
    TILE_TOKENS = 1024,       /* tokens per tile; a multiple of every page size */
    SEALED_TOKENS = 512,      /* tokens per tile of sealed pages, whose values are decoded to floats */
    SEAL_TOKENS = 256,        /* maximum number of tokens that are sealed in one batch */
    MAX_TILE_SCORES = 1 << 21 /* upper bound on (queries per block) * H * TILE_TOKENS */
};

/* Returns channels [from, to) of rows: [n, heads, ..] -> [n, heads, to - from]. */
static mlx_array channels_of(fkv_mlx_graph *g, mlx_array rows, uint32_t from, uint32_t to) {
    if (g->failed) return rows;
    const int *shape = mlx_array_shape(rows);
    return fkv_mlx_slice(g, rows, FKV_MLX_SHAPE(0, 0, (int)from), FKV_MLX_SHAPE(shape[0], shape[1], (int)to));
}

/* ---- rotation ---- */

/* Applies the Hadamard transform to each block of channels. x: any shape with D as the last axis. */
static mlx_array hadamard_arrays(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation) {
    if (g->failed) return x;
    const int n_blocks = (int)(mlx_array_size(x) / rotation->block);
    fkv_mlx_shape whole = {(int)mlx_array_ndim(x), {0}};
    FKV_ASSERT(whole.n <= FKV_MLX_MAX_DIMS);
    memcpy(whole.at, mlx_array_shape(x), (size_t)whole.n * sizeof whole.at[0]);
    mlx_array blocks = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n_blocks, (int)rotation->block));
    return fkv_mlx_reshape(g, fkv_mlx_hadamard(g, blocks, rotation->norm), whole);
}

mlx_array fkv_mlx_rotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs) {
    return hadamard_arrays(g, fkv_mlx_multiply(g, x, signs), rotation);
}

mlx_array fkv_mlx_unrotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs) {
    return fkv_mlx_multiply(g, hadamard_arrays(g, x, rotation), signs);
}

/* ---- write ---- */

/* Encodes rows of K or V, [T, G, D], into the parts of their codec. */
static void encode_side(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, fkv_side side, mlx_array rows,
                        mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_codec *codec = &layer->block->codec[side];
    const fkv_rotation *rotation = fkv_mlx_stored_rotation(layer, side);
    mlx_array x = fkv_mlx_storable(mlx, fkv_mlx_astype(g, rows, MLX_FLOAT32));
    if (rotation != NULL) x = fkv_mlx_storable(mlx, fkv_mlx_rotate(g, x, rotation, layer->signs[side]));
    fkv_mlx_codec_of(codec)->encode(mlx, codec, x, part);
}

/* A range of new tokens that are written to one page: tokens [first, first + n) of the step, starting at slot `slot`. */
typedef struct page_share {
    uint32_t first;
    uint32_t n;
    uint32_t page;
    uint32_t slot;
} page_share;

/* Writes one part (codes, scales or biases) of the new rows to the pool. numbers: [T, G, w]. */
static void put_part(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array numbers, uint32_t offset, uint32_t row_bytes,
                     const page_share *to) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    const int heads = (int)layer->attn->n_kv_heads;
    const int width = (int)(row_bytes / 2);
    const int n = (int)to->n;
    mlx_array update =
        fkv_mlx_slice(g, numbers, FKV_MLX_SHAPE((int)to->first, 0, 0), FKV_MLX_SHAPE((int)to->first + n, heads, width));
    update = fkv_mlx_transpose(g, update, FKV_MLX_SHAPE(1, 0, 2));
    update = fkv_mlx_reshape(g, update, FKV_MLX_SHAPE(1, heads, n * width));
    const int at = (int)(offset / 2) + (int)to->slot * width;
    mlx_array pool = fkv_mlx_slice_update(g, layer->pool, update, FKV_MLX_SHAPE((int)to->page, 0, at),
                                          FKV_MLX_SHAPE((int)to->page + 1, heads, at + n * width));
    fkv_mlx_keep(g, &layer->pool, pool);
    fkv_mlx_graph_release(g, mark);
}

static void write_side(fkv_mlx_state *mlx, fkv_mlx_layer *layer, fkv_side side, mlx_array rows) {
    const fkv_block *block = layer->block;
    const fkv_attn_row *row = fkv_mlx_rows(mlx, layer);
    mlx_array part[FKV_N_PARTS] = {{NULL}};
    encode_side(mlx, layer, side, rows, part);
    uint32_t first = 0;
    for (uint32_t r = 0; r < mlx->step.n_rows; r++, row++) {
        for (uint32_t i = 0; i < row->n_tokens;) {
            const uint32_t position = row->start + i;
            const uint32_t slot = position % block->page_tokens;
            const page_share to = {.first = first + i,
                                   .n = fkv_min_u32(block->page_tokens - slot, row->n_tokens - i),
                                   .page = fkv_page_at(row->view, position / block->page_tokens),
                                   .slot = slot};
            for (int p = 0; p < FKV_N_PARTS; p++) {
                const uint32_t row_bytes = block->codec[side].row_bytes[p];
                if (row_bytes != 0) put_part(mlx, layer, part[p], block->offset[side][p], row_bytes, &to);
            }
            i += to.n;
        }
        first += row->n_tokens;
    }
    fkv_mlx_graph_release(&mlx->graph, 0);
}

/* ---- gathering pages ---- */

/* Returns the pool indices of the logical pages [first, end) of a row. `table` is the page table of the row. */
static mlx_array page_numbers(fkv_mlx_graph *g, mlx_array table, fkv_page_view view, uint32_t first, uint32_t end) {
    mlx_array numbers = {NULL};
    while (first < end) {
        uint32_t at = first;
        uint32_t n = end - first;
        if (first >= view.n_fixed) {
            at = view.n_fixed + (first - view.n_fixed) % view.n_ring;
            n = fkv_min_u32(n, view.n_fixed + view.n_ring - at);
        } else {
            n = fkv_min_u32(n, view.n_fixed - first);
        }
        mlx_array some = fkv_mlx_slice(g, table, FKV_MLX_SHAPE((int)at), FKV_MLX_SHAPE((int)(at + n)));
        numbers = numbers.ctx == NULL ? some : fkv_mlx_concatenate_first(g, numbers, some);
        first += n;
    }
    return numbers;
}

static mlx_array table_of(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t r) {
    return mlx->tables[(size_t)layer->group * mlx->max_seqs + r];
}

/* Extracts one part (codes, scales or biases) from n gathered pages: [n, G, W] -> [n, G, bytes / 2], where W is the number of
 * words per page and head. */
static mlx_array page_part(fkv_mlx_graph *g, const fkv_mlx_layer *layer, mlx_array pages, uint32_t n_pages, fkv_side side,
                           fkv_part part) {
    const fkv_block *block = layer->block;
    const int at = (int)(block->offset[side][part] / 2);
    const int n = (int)(fkv_codec_part_bytes(&block->codec[side], part, block->page_tokens) / 2);
    return fkv_mlx_slice(g, pages, FKV_MLX_SHAPE(0, 0, at), FKV_MLX_SHAPE((int)n_pages, (int)layer->attn->n_kv_heads, at + n));
}

/* ---- sealing ---- */

/* Seals the keys or the values of n pages. x: float32 [n * G, T, D]. Returns the parts as arrays [n * G, bytes / 2]. */
static void seal_row_pages(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, fkv_side side, mlx_array x, int n_blocks,
                           mlx_array part[FKV_N_PARTS]) {
    const fkv_codec *codec = &layer->block->codec[side];
    const int page_tokens = (int)layer->block->page_tokens;
    const fkv_mlx_codec *of_kind = fkv_mlx_codec_of(codec);
    if (of_kind->seal != NULL) {
        of_kind->seal(mlx, codec, &layer->channels, x, part);
        return;
    }
    of_kind->encode(mlx, codec, x, part); /* codecs without seal() encode each row separately */
    for (int p = 0; p < FKV_N_PARTS; p++)
        if (codec->row_bytes[p] != 0)
            part[p] = fkv_mlx_reshape(&mlx->graph, part[p], FKV_MLX_SHAPE(n_blocks, page_tokens * (int)codec->row_bytes[p] / 2));
}

/* Seals the keys or the values of pages [first, end) of row r. */
static void seal_side(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t r, uint32_t first, uint32_t end, fkv_side side) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    const fkv_attn_row *row = fkv_mlx_rows(mlx, layer) + r;
    const uint32_t n = end - first;
    const int heads = (int)layer->attn->n_kv_heads;
    const int page_tokens = (int)layer->block->page_tokens;
    const int n_blocks = (int)n * heads;
    const fkv_codec *from = &layer->open->block->codec[side];
    const fkv_codec *to = &layer->block->codec[side];
    mlx_array pages = page_numbers(g, table_of(mlx, layer->open, r), row->open, first, end);
    mlx_array open = fkv_mlx_take_first(g, layer->open->pool, fkv_mlx_after(g, pages, layer->pool));
    mlx_array part[FKV_N_PARTS] = {{NULL}};
    for (int p = 0; p < FKV_N_PARTS; p++) {
        if (from->row_bytes[p] == 0) continue;
        part[p] = page_part(g, layer->open, open, n, side, (fkv_part)p);
        part[p] = fkv_mlx_reshape(g, part[p], FKV_MLX_SHAPE(n_blocks, page_tokens, (int)from->row_bytes[p] / 2));
    }
    mlx_array sealed[FKV_N_PARTS] = {{NULL}};
    seal_row_pages(mlx, layer, side, fkv_mlx_open_rows(mlx, from, part), n_blocks, sealed);
    for (int p = 0; p < FKV_N_PARTS; p++) {
        const int numbers = (int)(fkv_codec_part_bytes(to, (fkv_part)p, layer->block->page_tokens) / 2);
        const int at = (int)(layer->block->offset[side][p] / 2);
        for (uint32_t i = 0; i < n && numbers > 0; i++) {
            const uint32_t inner = fkv_mlx_graph_mark(g);
            const int page = (int)fkv_page_at(row->view, first + i);
            mlx_array update =
                fkv_mlx_slice(g, sealed[p], FKV_MLX_SHAPE((int)i * heads, 0), FKV_MLX_SHAPE((int)(i + 1) * heads, numbers));
            update = fkv_mlx_reshape(g, update, FKV_MLX_SHAPE(1, heads, numbers));
            fkv_mlx_keep(g, &layer->pool,
                         fkv_mlx_slice_update(g, layer->pool, update, FKV_MLX_SHAPE(page, 0, at),
                                              FKV_MLX_SHAPE(page + 1, heads, at + numbers)));
            fkv_mlx_graph_release(g, inner);
        }
    }
    fkv_mlx_graph_release(g, mark);
}

/* Seals the pages that the step has filled, in batches. Each batch depends on the previous one. */
static void seal_pages(fkv_mlx_state *mlx, fkv_mlx_layer *layer) {
    const uint32_t page_tokens = layer->block->page_tokens;
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) {
        const fkv_attn_row *row = fkv_mlx_rows(mlx, layer) + r;
        const uint32_t begin = fkv_attn_first_to_seal(row, page_tokens);
        const uint32_t end = begin + fkv_attn_n_to_seal(row, page_tokens);
        for (uint32_t first = begin; first < end; first += SEAL_TOKENS / page_tokens) {
            const uint32_t stop = fkv_min_u32(end, first + SEAL_TOKENS / page_tokens);
            seal_side(mlx, layer, r, first, stop, FKV_SIDE_K);
            seal_side(mlx, layer, r, first, stop, FKV_SIDE_V);
        }
    }
}

fkv_status fkv_mlx_plain_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v) {
    fkv_mlx_layer *to = layer->open != NULL ? layer->open : layer;
    const uint32_t dim = layer->attn->head_dim;
    /* write_side() releases all handles of the graph, so each side slices the rows itself */
    write_side(mlx, to, FKV_SIDE_K, fkv_mlx_is_latent(layer) ? channels_of(&mlx->graph, k, 0, dim) : k);
    write_side(mlx, to, FKV_SIDE_V, fkv_mlx_is_latent(layer) ? channels_of(&mlx->graph, k, dim, dim + layer->attn->rope_dim) : v);
    if (layer->open != NULL) seal_pages(mlx, layer);
    return fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_write");
}

/* ---- attend ---- */

/* Running softmax state of a block of queries, all from one sequence. The struct owns its MLX handles. */
typedef struct query_block {
    fkv_mlx_state *mlx;
    const fkv_mlx_layer *layer;
    uint32_t r;        /* the row */
    mlx_array q;       /* scaled and rotated queries: float32 [G, n * R, D], with R query heads per KV head */
    mlx_array q_rope;  /* float32 [1, n * R, rope_dim]: scaled RoPE channels of the queries in a latent layer */
    uint32_t position; /* position of the first query */
    uint32_t n;        /* queries */
    uint32_t n_tiles;  /* number of tiles merged so far */
    mlx_array out;     /* unnormalized output: float32 [G, n * R, D] */
    mlx_array max;     /* maximum score: float32 [G, n * R, 1] */
    mlx_array total;   /* softmax denominator: float32 [G, n * R, 1] */
    mlx_array *last;   /* result of the latest tile, on which the next tile depends */
} query_block;

/* Extracts the keys or the values of n_tokens tokens from gathered pages, starting at token `skip` of the first page. Each part
 * is [G, n_tokens, row_bytes / 2]; for sealed kinds, part 0 is the result of the codec's rows(). `pages` is [n, G, W], where W is
 * the number of words per page and head. */
static void gathered_side(const query_block *b, const fkv_mlx_layer *form, mlx_array pages, uint32_t n_pages, fkv_side side,
                          uint32_t skip, uint32_t n_tokens, mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_codec *codec = &form->block->codec[side];
    const fkv_mlx_codec *of_kind = fkv_mlx_codec_of(codec);
    const int heads = (int)form->attn->n_kv_heads;
    const int n = (int)n_pages;
    const int page_tokens = (int)form->block->page_tokens;
    for (int p = 0; p < FKV_N_PARTS; p++) {
        const int width = (int)codec->row_bytes[p] / 2;
        if (fkv_codec_part_bytes(codec, (fkv_part)p, form->block->page_tokens) == 0) continue;
        part[p] = page_part(g, form, pages, n_pages, side, (fkv_part)p);
        if (of_kind->rows != NULL) continue;
        mlx_array x = fkv_mlx_reshape(g, part[p], FKV_MLX_SHAPE(n, heads, page_tokens, width));
        x = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 0, 2, 3));
        x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n * page_tokens, width));
        part[p] = fkv_mlx_slice(g, x, FKV_MLX_SHAPE(0, (int)skip, 0), FKV_MLX_SHAPE(heads, (int)(skip + n_tokens), width));
    }
    if (of_kind->rows == NULL) return;
    part[0] = of_kind->rows(g, codec, &form->channels, part, form->block->page_tokens);
    part[0] =
        fkv_mlx_slice(g, part[0], FKV_MLX_SHAPE(0, (int)skip, 0), FKV_MLX_SHAPE(heads, (int)(skip + n_tokens), (int)codec->dim));
}

static mlx_array int_of(fkv_mlx_graph *g, uint32_t value) { return fkv_mlx_adopt(g, mlx_array_new_int((int)value)); }

/* Applies the soft cap of the layer to scores [G, n * R, S]. A cap below 1e-30 is raised to 1e-30, because denormals may be
 * flushed to 0. The result does not change, because with either cap exp(score) rounds to 1 for all scores. */
static mlx_array capped(const query_block *b, mlx_array scores) {
    fkv_mlx_graph *g = &b->mlx->graph;
    if (!(b->layer->attn->softcap > 0)) return scores;
    mlx_array cap = fkv_mlx_adopt(g, mlx_array_new_float32(fmaxf(b->layer->attn->softcap, 1e-30f)));
    return fkv_mlx_multiply(g, fkv_mlx_tanh(g, fkv_mlx_divide(g, scores, cap)), cap);
}

/* Returns true if at least one of the tokens [begin, end) precedes the sliding window of at least one query of the block. */
static bool hides_earlier(const query_block *b, uint32_t begin, uint32_t end) {
    const fkv_attn_layer *attn = b->layer->attn;
    const uint32_t last = b->position + b->n - 1;
    return attn->window != 0 && last + 1 > attn->window && begin < last + 1 - attn->window && end > attn->n_sinks;
}

static bool hides(const query_block *b, uint32_t begin, uint32_t end) {
    return end > b->position + 1 || hides_earlier(b, begin, end);
}

/* Sets the scores of masked tokens to minus infinity. scores: [G, n * R, S], the scores of tokens [begin, end). */
static mlx_array masked(const query_block *b, mlx_array scores, uint32_t begin, uint32_t end) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    const uint32_t last = b->position + b->n - 1;
    mlx_array tokens = fkv_mlx_arange(g, begin, end);
    mlx_array positions = fkv_mlx_reshape(g, fkv_mlx_arange(g, b->position, last + 1), FKV_MLX_SHAPE((int)b->n, 1, 1));
    mlx_array seen = fkv_mlx_less_equal(g, tokens, positions);
    if (hides_earlier(b, begin, end)) {
        mlx_array inside = fkv_mlx_less(g, fkv_mlx_subtract(g, positions, tokens), int_of(g, attn->window));
        if (attn->n_sinks != 0) inside = fkv_mlx_logical_or(g, inside, fkv_mlx_less(g, tokens, int_of(g, attn->n_sinks)));
        seen = fkv_mlx_logical_and(g, seen, inside);
    }
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    const int n_tokens = (int)(end - begin);
    mlx_array apart = fkv_mlx_reshape(g, scores, FKV_MLX_SHAPE(heads, (int)b->n, per_kv, n_tokens));
    apart = fkv_mlx_where(g, seen, apart, b->mlx->constants.minus_infinity);
    return fkv_mlx_reshape(g, apart, FKV_MLX_SHAPE(heads, (int)b->n * per_kv, n_tokens));
}

/* Merges tokens [begin, end) of one tile into the running state of the block. `form` selects the pool (open or sealed pages)
 * from which the tile is read. */
static void fold_tile(query_block *b, const fkv_mlx_layer *form, uint32_t begin, uint32_t end) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    const uint32_t page_tokens = form->block->page_tokens;
    const uint32_t first_page = begin / page_tokens;
    const uint32_t end_page = fkv_ceil_div(end, page_tokens);
    const uint32_t n_pages = end_page - first_page;
    const uint32_t skip = begin - first_page * page_tokens;
    const fkv_attn_row *row = fkv_mlx_rows(b->mlx, form) + b->r;
    mlx_array numbers = page_numbers(g, table_of(b->mlx, form, b->r), row->view, first_page, end_page);
    if (b->last->ctx != NULL) numbers = fkv_mlx_after(g, numbers, *b->last);
    mlx_array pages = fkv_mlx_take_first(g, form->pool, numbers);
    const fkv_codec *codec = form->block->codec;
    const fkv_mlx_codec *k = fkv_mlx_codec_of(&codec[FKV_SIDE_K]);
    const fkv_mlx_codec *v = fkv_mlx_codec_of(&codec[FKV_SIDE_V]);
    mlx_array part[FKV_N_SIDES][FKV_N_PARTS] = {{{NULL}}};
    gathered_side(b, form, pages, n_pages, FKV_SIDE_K, skip, end - begin, part[FKV_SIDE_K]);
    gathered_side(b, form, pages, n_pages, FKV_SIDE_V, skip, end - begin, part[FKV_SIDE_V]);

    mlx_array scores = k->scores(g, &codec[FKV_SIDE_K], part[FKV_SIDE_K], b->q);
    if (fkv_mlx_is_latent(form)) {
        scores = fkv_mlx_add(g, scores, v->scores(g, &codec[FKV_SIDE_V], part[FKV_SIDE_V], b->q_rope));
        v = k; /* the latent channels are also the values */
    }
    const fkv_side values = fkv_mlx_is_latent(form) ? FKV_SIDE_K : FKV_SIDE_V;
    scores = capped(b, scores);
    if (hides(b, begin, end)) {
        /* A softmax weight of 0 times a non-finite value is NaN. Non-finite values are therefore replaced with 0, and the scores
         * of their tokens are set to NaN. masked() then overwrites the NaN scores of masked tokens. */
        mlx_array odd = v->take_odd(g, &codec[values], part[values]);
        scores = masked(b, fkv_mlx_add(g, scores, fkv_mlx_transpose(g, odd, FKV_MLX_SHAPE(0, 2, 1))), begin, end);
    }
    const bool is_first = b->n_tiles++ == 0;
    mlx_array max = fkv_mlx_maximum(g, fkv_mlx_max_last(g, scores), is_first ? b->mlx->constants.lowest : b->max);
    mlx_array p = fkv_mlx_exp(g, fkv_mlx_subtract(g, scores, max));
    mlx_array total = fkv_mlx_sum_last(g, p);
    mlx_array out = v->values(g, &codec[values], part[values], p);
    if (!is_first) {
        mlx_array shrunk = fkv_mlx_exp(g, fkv_mlx_subtract(g, b->max, max));
        total = fkv_mlx_add(g, fkv_mlx_multiply(g, b->total, shrunk), total);
        out = fkv_mlx_add(g, fkv_mlx_multiply(g, b->out, shrunk), out);
    }
    fkv_mlx_keep(g, &b->max, max);
    fkv_mlx_keep(g, &b->total, total);
    fkv_mlx_keep(g, &b->out, out);
    fkv_mlx_keep(g, b->last, out);
    fkv_mlx_graph_release(g, mark);
}

static void fold_range(query_block *b, const fkv_mlx_layer *form, uint32_t begin, uint32_t end) {
    while (begin < end) {
        const uint32_t tile = form == b->layer && form->open != NULL ? SEALED_TOKENS : TILE_TOKENS;
        const uint32_t stop = fkv_min_u32(end, (begin / tile + 1) * tile);
        fold_tile(b, form, begin, stop);
        begin = stop;
    }
}

/* Merges tokens [begin, end) into the running state of the block, reading each page in the form (open or sealed) that is
 * visible to the block's queries. */
static void fold_seen(query_block *b, uint32_t begin, uint32_t end) {
    const fkv_mlx_layer *layer = b->layer;
    if (layer->open == NULL) {
        fold_range(b, layer, begin, end);
        return;
    }
    const uint32_t first = layer->block->page_tokens; /* tokens per page; the first page ends at this position */
    const uint32_t own = fkv_max_u32(first, fkv_attn_first_open(b->position / first) * first);
    fold_range(b, layer->open, begin, fkv_min_u32(end, first));
    fold_range(b, layer, fkv_max_u32(begin, first), fkv_min_u32(end, own));
    fold_range(b, layer->open, fkv_max_u32(begin, own), end);
}

/* Scales and, if `rotates` is true, rotates queries: [n, H, dim] of any type -> float32 [G, n * R, dim]. */
static mlx_array prepared(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, mlx_array q, int n, int dim, bool rotates) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_layer *attn = layer->attn;
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    mlx_array x = fkv_mlx_astype(g, q, MLX_FLOAT32);
    if (rotates && attn->rotate_k != NULL) x = fkv_mlx_rotate(g, x, attn->rotate_k, layer->signs[FKV_SIDE_K]);
    x = fkv_mlx_multiply(g, x, fkv_mlx_adopt(g, mlx_array_new_float32(attn->scale)));
    x = fkv_mlx_transpose(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, heads, per_kv, dim)), FKV_MLX_SHAPE(1, 0, 2, 3));
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n * per_kv, dim));
}

/* Returns the softmax denominators including learned sinks: [G, n * R, 1]. */
static mlx_array merged_denominator(const query_block *b) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    if (attn->sink_logits == NULL) return b->total;
    mlx_array logits = fkv_mlx_slice(g, b->layer->sink_logits, FKV_MLX_SHAPE(0), FKV_MLX_SHAPE((int)attn->n_q_heads));
    logits = fkv_mlx_reshape(g, logits, FKV_MLX_SHAPE(heads, 1, per_kv, 1));
    mlx_array max = fkv_mlx_reshape(g, b->max, FKV_MLX_SHAPE(heads, (int)b->n, per_kv, 1));
    mlx_array sinks = fkv_mlx_exp(g, fkv_mlx_subtract(g, logits, max));
    return fkv_mlx_add(g, b->total, fkv_mlx_reshape(g, sinks, FKV_MLX_SHAPE(heads, (int)b->n * per_kv, 1)));
}

/* Returns the attention output of the block, an array [n, H, D] with elements of `type`. */
static mlx_array block_result(const query_block *b, mlx_dtype type) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    const int dim = (int)attn->head_dim;
    mlx_array x = fkv_mlx_divide(g, b->out, merged_denominator(b));
    x = fkv_mlx_transpose(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, (int)b->n, per_kv, dim)), FKV_MLX_SHAPE(1, 0, 2, 3));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE((int)b->n, heads * per_kv, dim));
    if (attn->rotate_v != NULL) x = fkv_mlx_unrotate(g, x, attn->rotate_v, b->layer->signs[FKV_SIDE_V]);
    return fkv_mlx_astype(g, x, type);
}

/* Computes attention for queries [first, first + n) of q. */
static mlx_array attend_block(query_block *b, mlx_array q, uint32_t first) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    mlx_array mine = fkv_mlx_slice(g, q, FKV_MLX_SHAPE((int)first, 0, 0),
                                   FKV_MLX_SHAPE((int)(first + b->n), (int)attn->n_q_heads, (int)fkv_attn_key_dim(attn)));
    if (fkv_mlx_is_latent(b->layer)) {
        b->q_rope = prepared(b->mlx, b->layer, channels_of(g, mine, attn->head_dim, fkv_attn_key_dim(attn)), (int)b->n,
                             (int)attn->rope_dim, false);
        mine = channels_of(g, mine, 0, attn->head_dim);
    }
    b->q = prepared(b->mlx, b->layer, mine, (int)b->n, (int)attn->head_dim, true);
    const uint32_t end = b->position + b->n;
    const uint32_t begin = attn->window != 0 && b->position + 1 > attn->window ? b->position + 1 - attn->window : 0;
    fold_seen(b, 0, fkv_min_u32(attn->n_sinks, begin));
    fold_seen(b, begin, end);
    mlx_array done = g->failed ? (mlx_array){NULL} : block_result(b, mlx_array_dtype(q));
    (void)mlx_array_free(b->out);
    (void)mlx_array_free(b->max);
    (void)mlx_array_free(b->total);
    return done;
}

static uint32_t block_queries(uint32_t n_q_heads) { return fkv_max_u32(1, MAX_TILE_SCORES / (n_q_heads * TILE_TOKENS)); }

/* Computes attention for the queries of one row, block by block, and appends the outputs to *all, an array [.., H, D]. */
static void attend_row(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t r, mlx_array q, uint32_t first, mlx_array *all,
                       mlx_array *last) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_row *row = fkv_mlx_rows(mlx, layer) + r;
    const uint32_t most = block_queries(layer->attn->n_q_heads);
    const uint32_t page_tokens = layer->block->page_tokens;
    for (uint32_t i = 0; i < row->n_tokens;) {
        query_block b = {.mlx = mlx,
                         .layer = layer,
                         .r = r,
                         .position = row->start + i,
                         .n = fkv_min_u32(most, row->n_tokens - i),
                         .last = last};
        if (layer->open != NULL) b.n = fkv_min_u32(b.n, page_tokens - b.position % page_tokens);
        const uint32_t mark = fkv_mlx_graph_mark(g);
        mlx_array done = attend_block(&b, q, first + i);
        if (all->ctx != NULL) done = fkv_mlx_concatenate_first(g, *all, done);
        fkv_mlx_keep(g, all, done);
        fkv_mlx_keep(g, last, done);
        fkv_mlx_graph_release(g, mark);
        i += b.n;
    }
}

/* The bound is four times the total size, as floats, of the scores, keys and values of a tile and of the rows of a step. MLX
 * starts an operation before the previous operation has finished, so the inputs and outputs of two operations exist at the same
 * time. */
uint64_t fkv_mlx_plain_bytes(const fkv_layer_config *layer, uint32_t n_tokens) {
    const uint64_t dim = (uint64_t)layer->head_dim + layer->rope_dim;
    const uint64_t queries = fkv_min_u32(n_tokens, block_queries(layer->n_q_heads));
    const uint64_t scores = queries * layer->n_q_heads * TILE_TOKENS;
    const uint64_t tile = (uint64_t)TILE_TOKENS * layer->n_kv_heads * 2 * dim;
    const uint64_t rows = n_tokens * (layer->n_q_heads + 2 * (uint64_t)layer->n_kv_heads) * dim;
    return 4 * sizeof(float) * (scores + tile + rows);
}

fkv_status fkv_mlx_plain_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out) {
    const fkv_attn_row *rows = fkv_mlx_rows(mlx, layer);
    mlx_array all = {NULL};
    mlx_array last = {NULL};
    uint32_t first = 0;
    /* Pages are sealed before attention, including pages that no query reads yet. Otherwise the pending seal operation would
     * still refer to the open pool when the next step writes to it, and MLX would copy the pool. */
    if (layer->open != NULL) fkv_mlx_keep(&mlx->graph, &last, layer->pool);
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) {
        attend_row(mlx, layer, r, q, first, &all, &last);
        first += rows[r].n_tokens;
    }
    fkv_mlx_keep(&mlx->graph, out, all);
    (void)mlx_array_free(all);
    (void)mlx_array_free(last);
    return fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_attend");
}
