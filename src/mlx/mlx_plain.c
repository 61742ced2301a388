/* The plain way: rows into pages and queries over pages with MLX's own operations, on any stream.
 *
 * Write. A row is made storable, rotated and quantized as docs/page_format.md says. mlx.core.quantize gives these codes exactly
 * (rotated rows of 4 bits and fewer have a line of our own); on MLX's CPU the Hadamard transform does the format's additions in
 * the format's order, and a cumulative sum adds from first to last. Each part of the rows of one page is one slice update of the
 * pool.
 *
 * Attend. One sequence at a time, a block of its queries at a time, over tiles of TILE_TOKENS tokens: the packed pages of a tile
 * are gathered, scored by mlx.core.quantized_matmul, and folded into a running {out, max, denominator}. Each tile is ordered
 * after the one before it, so that one tile's intermediate results are all that lives, whatever MLX would like to do ahead of
 * time.
 *
 * Tiles are cut at fixed positions and sequences never share an operation: neither the rows beside a sequence in the step nor the
 * numbers of its pages change a bit of its answer.
 */
#include "mlx_state.h"

#include <float.h>
#include <math.h>

enum {
    TILE_TOKENS = 1024,       /* a multiple of every page size */
    MAX_TILE_SCORES = 1 << 21 /* queries of a block * H * TILE_TOKENS */
};

/* ---- rotation ---- */

/* x: [.., D] of any shape with D last. */
static mlx_array hadamard(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation) {
    if (g->failed) return x;
    const int n_blocks = (int)(mlx_array_size(x) / rotation->block);
    fkv_mlx_shape whole = {(int)mlx_array_ndim(x), {0}};
    FKV_ASSERT(whole.n <= FKV_MLX_MAX_DIMS);
    memcpy(whole.at, mlx_array_shape(x), (size_t)whole.n * sizeof whole.at[0]);
    mlx_array blocks = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n_blocks, (int)rotation->block));
    return fkv_mlx_reshape(g, fkv_mlx_hadamard(g, blocks, rotation->norm), whole);
}

mlx_array fkv_mlx_rotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs) {
    return hadamard(g, fkv_mlx_multiply(g, x, signs), rotation);
}

mlx_array fkv_mlx_unrotate(fkv_mlx_graph *g, mlx_array x, const fkv_rotation *rotation, mlx_array signs) {
    return fkv_mlx_multiply(g, hadamard(g, x, rotation), signs);
}

/* ---- write ---- */

/* NaN is stored as 0, what is beyond the limit as the limit. */
static mlx_array storable(fkv_mlx_state *mlx, mlx_array x) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_mlx_constants *c = &mlx->constants;
    mlx_array numbers = fkv_mlx_where(g, fkv_mlx_isnan(g, x), c->zero, x);
    return fkv_mlx_minimum(g, fkv_mlx_maximum(g, numbers, c->minus_limit), c->limit);
}

/* A line for each group: [rows, 1] each. */
typedef struct fitted_line {
    mlx_array scale;
    mlx_array bias;
} fitted_line;

static mlx_array number(fkv_mlx_graph *g, float value) { return fkv_mlx_adopt(g, mlx_array_new_float32(value)); }

/* x: [rows, group] -> where its numbers lie on the line, in codes. */
static mlx_array places_of(fkv_mlx_graph *g, mlx_array x, fitted_line line) {
    return fkv_mlx_divide(g, fkv_mlx_subtract(g, x, line.bias), line.scale);
}

static mlx_array nearest_codes(fkv_mlx_graph *g, mlx_array places, float bins) {
    return fkv_mlx_round(g, fkv_mlx_minimum(g, fkv_mlx_maximum(g, places, number(g, 0.0f)), number(g, bins)));
}

/* x: [rows, group] -> [rows, 1]: sums in the order of fkv_refit, lanes first, then from lane to lane. */
static mlx_array sum_in_lanes(fkv_mlx_graph *g, mlx_array x, int rows, int group) {
    const int n = group / FKV_CODEC_LANES;
    mlx_array lanes = fkv_mlx_cumsum(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, n, FKV_CODEC_LANES)), 1);
    lanes = fkv_mlx_slice(g, lanes, FKV_MLX_SHAPE(0, n - 1, 0), FKV_MLX_SHAPE(rows, n, FKV_CODEC_LANES));
    mlx_array sums = fkv_mlx_cumsum(g, fkv_mlx_reshape(g, lanes, FKV_MLX_SHAPE(rows, FKV_CODEC_LANES)), 1);
    return fkv_mlx_slice(g, sums, FKV_MLX_SHAPE(0, FKV_CODEC_LANES - 1), FKV_MLX_SHAPE(rows, FKV_CODEC_LANES));
}

/* fkv_codec_refit(), for every group at once. x: [rows, group] */
static fitted_line refit(fkv_mlx_state *mlx, mlx_array x, fitted_line line, int rows, int group, float bins) {
    fkv_mlx_graph *g = &mlx->graph;
    const mlx_array limit = mlx->constants.limit;
    mlx_array place = places_of(g, x, line);
    mlx_array code = nearest_codes(g, place, bins);
    mlx_array n = number(g, (float)group);
    mlx_array c = sum_in_lanes(g, code, rows, group);
    mlx_array cc = sum_in_lanes(g, fkv_mlx_multiply(g, code, code), rows, group);
    mlx_array p = sum_in_lanes(g, place, rows, group);
    mlx_array cp = sum_in_lanes(g, fkv_mlx_multiply(g, code, place), rows, group);
    mlx_array determinant = fkv_mlx_subtract(g, fkv_mlx_multiply(g, n, cc), fkv_mlx_multiply(g, c, c));
    mlx_array slope = fkv_mlx_subtract(g, fkv_mlx_multiply(g, n, cp), fkv_mlx_multiply(g, c, p));
    slope = fkv_mlx_divide(g, slope, determinant);
    mlx_array start = fkv_mlx_divide(g, fkv_mlx_subtract(g, p, fkv_mlx_multiply(g, slope, c)), n);
    const fitted_line fitted = {.scale = fkv_mlx_multiply(g, line.scale, slope),
                                .bias = fkv_mlx_add(g, fkv_mlx_multiply(g, line.scale, start), line.bias)};
    mlx_array good = fkv_mlx_less(g, mlx->constants.zero, determinant);
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less(g, mlx->constants.zero, fitted.scale));
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less_equal(g, fitted.scale, limit));
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less_equal(g, fkv_mlx_abs(g, fitted.bias), limit));
    return (fitted_line){.scale = fkv_mlx_where(g, good, fitted.scale, line.scale),
                         .bias = fkv_mlx_where(g, good, fitted.bias, line.bias)};
}

/* codes: whole numbers as floats, [rows, group] -> words of 32 bits, the first code in the lowest. */
static mlx_array packed(fkv_mlx_graph *g, mlx_array codes, int rows, int group, int bits) {
    const int per_word = 32 / bits;
    uint32_t place[16];
    for (int i = 0; i < per_word; i++) place[i] = 1u << i * bits;
    mlx_array places = fkv_mlx_adopt(g, mlx_array_new_data(place, &per_word, 1, MLX_UINT32));
    mlx_array words = fkv_mlx_reshape(g, fkv_mlx_astype(g, codes, MLX_UINT32), FKV_MLX_SHAPE(rows, group / per_word, per_word));
    return fkv_mlx_sum_last(g, fkv_mlx_multiply(g, words, places));
}

/* What fkv_mlx_quantize() is for other rows: rotated ones of 4 bits and fewer have a fitted line, see src/codec/codec.h.
 * x: [T, G, D] */
static fkv_mlx_affine quantize_fitted(fkv_mlx_state *mlx, mlx_array x, const fkv_codec *codec) {
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_affine out = {.bits = (int)codec->bits, .group = (int)codec->group};
    if (g->failed) return out;
    const int *shape = mlx_array_shape(x);
    const int n_groups = shape[2] / out.group;
    const int rows = shape[0] * shape[1] * n_groups;
    const float bins = (float)((1u << codec->bits) - 1u);
    const fkv_mlx_shape of_lines = FKV_MLX_SHAPE(shape[0], shape[1], n_groups);
    const fkv_mlx_shape of_words = FKV_MLX_SHAPE(shape[0], shape[1], shape[2] * out.bits / 32);
    mlx_array groups = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, out.group));
    mlx_array lo = fkv_mlx_min_last(g, groups);
    mlx_array step = fkv_mlx_divide(g, fkv_mlx_subtract(g, fkv_mlx_max_last(g, groups), lo), number(g, bins));
    fitted_line line = {.scale = fkv_mlx_maximum(g, step, number(g, 1e-7f)), .bias = lo};
    for (int i = 0; i < FKV_REFITS; i++) line = refit(mlx, groups, line, rows, out.group, bins);
    mlx_array codes = nearest_codes(g, places_of(g, groups, line), bins);
    out.codes = fkv_mlx_reshape(g, packed(g, codes, rows, out.group, out.bits), of_words);
    out.scales = fkv_mlx_reshape(g, line.scale, of_lines);
    out.biases = fkv_mlx_reshape(g, line.bias, of_lines);
    return out;
}

/* rows: [T, G, D] -> the parts of one side, each [T, G, row_bytes / 2] of 16-bit numbers. */
static void encode(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, fkv_side side, mlx_array rows, mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_codec *codec = &layer->attn->block.codec[side];
    const fkv_rotation *rotation = side == FKV_SIDE_K ? layer->attn->rotate_k : layer->attn->rotate_v;
    const mlx_dtype page_type = fkv_mlx_page_dtype(layer->attn);
    mlx_array x = storable(mlx, fkv_mlx_astype(g, rows, MLX_FLOAT32));
    if (rotation != NULL) x = storable(mlx, fkv_mlx_rotate(g, x, rotation, layer->signs[side]));
    if (codec->kind == FKV_CODEC_HALF) {
        part[FKV_PART_CODES] = fkv_mlx_view(g, fkv_mlx_astype(g, x, page_type), MLX_UINT16);
        return;
    }
    fkv_mlx_affine made =
        codec->fitted ? quantize_fitted(mlx, x, codec) : fkv_mlx_quantize(g, x, (int)codec->bits, (int)codec->group);
    part[FKV_PART_CODES] = fkv_mlx_view(g, made.codes, MLX_UINT16);
    part[FKV_PART_SCALES] = fkv_mlx_view(g, fkv_mlx_astype(g, made.scales, page_type), MLX_UINT16);
    part[FKV_PART_BIASES] = fkv_mlx_view(g, fkv_mlx_astype(g, made.biases, page_type), MLX_UINT16);
}

/* Tokens [first, first + n) of the step into slots of one page. */
typedef struct page_share {
    uint32_t first;
    uint32_t n;
    uint32_t page;
    uint32_t slot;
} page_share;

/* numbers: [T, G, w]. */
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

static void put_side(fkv_mlx_state *mlx, fkv_mlx_layer *layer, fkv_side side, mlx_array rows) {
    const fkv_block *block = &layer->attn->block;
    const fkv_attn_row *row = fkv_mlx_rows(mlx, layer);
    mlx_array part[FKV_N_PARTS] = {{NULL}};
    encode(mlx, layer, side, rows, part);
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

fkv_status fkv_mlx_plain_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v) {
    put_side(mlx, layer, FKV_SIDE_K, k);
    put_side(mlx, layer, FKV_SIDE_V, v);
    return fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_write");
}

/* ---- attend ---- */

/* A block of queries of one sequence on its way over the tiles. The handles are the block's own. */
typedef struct query_block {
    fkv_mlx_state *mlx;
    const fkv_mlx_layer *layer;
    const fkv_attn_row *row;
    mlx_array table;   /* of the row */
    mlx_array q;       /* float32 [G, n * R, D], scaled and rotated; R query heads for each KV head */
    uint32_t position; /* of the first query */
    uint32_t n;        /* queries */
    uint32_t n_tiles;  /* folded so far */
    mlx_array out;     /* float32 [G, n * R, D] */
    mlx_array max;     /* float32 [G, n * R, 1] */
    mlx_array total;   /* float32 [G, n * R, 1] */
    mlx_array *last;   /* what the next tile waits for: the last result of the whole call */
} query_block;

/* The numbers of logical pages [first, end) of the block's row. */
static mlx_array page_numbers(const query_block *b, uint32_t first, uint32_t end) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_page_view view = b->row->view;
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
        mlx_array some = fkv_mlx_slice(g, b->table, FKV_MLX_SHAPE((int)at), FKV_MLX_SHAPE((int)(at + n)));
        numbers = numbers.ctx == NULL ? some : fkv_mlx_concatenate_first(g, numbers, some);
        first += n;
    }
    return b->last->ctx != NULL ? fkv_mlx_after(g, numbers, *b->last) : numbers;
}

/* One part of n gathered pages -> [G, n_tokens, row_bytes / 2], tokens from `skip` on. pages: [n, G, W]. */
static mlx_array gathered_part(const query_block *b, mlx_array pages, uint32_t n_pages, fkv_side side, fkv_part part,
                               uint32_t skip, uint32_t n_tokens) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_block *block = &b->layer->attn->block;
    const int heads = (int)b->layer->attn->n_kv_heads;
    const int page_tokens = (int)block->page_tokens;
    const int width = (int)(block->codec[side].row_bytes[part] / 2);
    const int at = (int)(block->offset[side][part] / 2);
    const int n = (int)n_pages;
    mlx_array x = fkv_mlx_slice(g, pages, FKV_MLX_SHAPE(0, 0, at), FKV_MLX_SHAPE(n, heads, at + page_tokens * width));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, heads, page_tokens, width));
    x = fkv_mlx_reshape(g, fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 0, 2, 3)), FKV_MLX_SHAPE(heads, n * page_tokens, width));
    return fkv_mlx_slice(g, x, FKV_MLX_SHAPE(0, (int)skip, 0), FKV_MLX_SHAPE(heads, (int)(skip + n_tokens), width));
}

/* One side of a tile, ready for a product. */
typedef struct tile_side {
    bool is_affine;
    mlx_array rows; /* float32 [G, S, D] where not affine */
    fkv_mlx_affine affine;
} tile_side;

static tile_side gathered_side(const query_block *b, mlx_array pages, uint32_t n_pages, fkv_side side, uint32_t skip,
                               uint32_t n_tokens) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_codec *codec = &b->layer->attn->block.codec[side];
    const mlx_dtype type = fkv_mlx_page_dtype(b->layer->attn);
    mlx_array x = gathered_part(b, pages, n_pages, side, FKV_PART_CODES, skip, n_tokens);
    if (codec->kind == FKV_CODEC_HALF) return (tile_side){.rows = fkv_mlx_astype(g, fkv_mlx_view(g, x, type), MLX_FLOAT32)};
    mlx_array scales = gathered_part(b, pages, n_pages, side, FKV_PART_SCALES, skip, n_tokens);
    mlx_array biases = gathered_part(b, pages, n_pages, side, FKV_PART_BIASES, skip, n_tokens);
    return (tile_side){.is_affine = true,
                       .affine = {.codes = fkv_mlx_view(g, x, MLX_UINT32),
                                  .scales = fkv_mlx_astype(g, fkv_mlx_view(g, scales, type), MLX_FLOAT32),
                                  .biases = fkv_mlx_astype(g, fkv_mlx_view(g, biases, type), MLX_FLOAT32),
                                  .bits = (int)codec->bits,
                                  .group = (int)codec->group}};
}

static mlx_array scores_of(fkv_mlx_graph *g, mlx_array q, const tile_side *k) {
    if (k->is_affine) return fkv_mlx_quantized_matmul(g, q, &k->affine, true);
    return fkv_mlx_matmul(g, q, fkv_mlx_transpose(g, k->rows, FKV_MLX_SHAPE(0, 2, 1)));
}

static mlx_array values_of(fkv_mlx_graph *g, mlx_array p, const tile_side *v) {
    return v->is_affine ? fkv_mlx_quantized_matmul(g, p, &v->affine, false) : fkv_mlx_matmul(g, p, v->rows);
}

static mlx_array int_of(fkv_mlx_graph *g, uint32_t value) { return fkv_mlx_adopt(g, mlx_array_new_int((int)value)); }

/* scores: [G, n * R, S], capped where the layer says so. A cap below 1e-30 would be 0 where denormals are flushed; all weights
 * are 1 with either. */
static mlx_array capped(const query_block *b, mlx_array scores) {
    fkv_mlx_graph *g = &b->mlx->graph;
    if (!(b->layer->attn->softcap > 0)) return scores;
    mlx_array cap = number(g, fmaxf(b->layer->attn->softcap, 1e-30f));
    return fkv_mlx_multiply(g, fkv_mlx_tanh(g, fkv_mlx_divide(g, scores, cap)), cap);
}

/* Whether some query of the block does not see some of the tokens [begin, end). */
static bool hides_earlier(const query_block *b, uint32_t begin, uint32_t end) {
    const fkv_attn_layer *attn = b->layer->attn;
    const uint32_t last = b->position + b->n - 1;
    return attn->window != 0 && last + 1 > attn->window && begin < last + 1 - attn->window && end > attn->n_sinks;
}

static bool hides(const query_block *b, uint32_t begin, uint32_t end) {
    return end > b->position + 1 || hides_earlier(b, begin, end);
}

/* Of a tile that some query does not see in full. A weight of 0 does not hide a value that is not finite: it becomes 0 here, and
 * the scores of its token NaN, which masked() then takes from the queries that do not see it. */
static mlx_array odd_values_in_scores(const query_block *b, mlx_array scores, tile_side *v) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const mlx_array zero = b->mlx->constants.zero;
    mlx_array finite; /* [G, S, n]: a group, or a number */
    if (v->is_affine) {
        mlx_array bins = number(g, (float)((1 << v->affine.bits) - 1));
        mlx_array largest = fkv_mlx_multiply(g, fkv_mlx_abs(g, v->affine.scales), bins);
        largest = fkv_mlx_add(g, largest, fkv_mlx_abs(g, v->affine.biases));
        finite = fkv_mlx_less_equal(g, largest, number(g, FLT_MAX));
        v->affine.scales = fkv_mlx_where(g, finite, v->affine.scales, zero);
        v->affine.biases = fkv_mlx_where(g, finite, v->affine.biases, zero);
    } else {
        finite = fkv_mlx_less_equal(g, fkv_mlx_abs(g, v->rows), number(g, FLT_MAX));
        v->rows = fkv_mlx_where(g, finite, v->rows, zero);
    }
    mlx_array odd = fkv_mlx_sum_last(g, fkv_mlx_where(g, finite, zero, number(g, NAN)));
    return fkv_mlx_add(g, scores, fkv_mlx_transpose(g, odd, FKV_MLX_SHAPE(0, 2, 1)));
}

/* scores: [G, n * R, S] of tokens [begin, end) -> the same, minus infinity where a query does not see a token. */
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

/* Folds tokens [begin, end), which lie in one tile, into the block. */
static void fold_tile(query_block *b, uint32_t begin, uint32_t end) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    const uint32_t first_page = begin / attn->block.page_tokens;
    const uint32_t end_page = fkv_ceil_div(end, attn->block.page_tokens);
    const uint32_t n_pages = end_page - first_page;
    const uint32_t skip = begin - first_page * attn->block.page_tokens;
    mlx_array pages = fkv_mlx_take_first(g, b->layer->pool, page_numbers(b, first_page, end_page));
    const tile_side k = gathered_side(b, pages, n_pages, FKV_SIDE_K, skip, end - begin);
    tile_side v = gathered_side(b, pages, n_pages, FKV_SIDE_V, skip, end - begin);

    mlx_array scores = capped(b, scores_of(g, b->q, &k));
    if (hides(b, begin, end)) scores = masked(b, odd_values_in_scores(b, scores, &v), begin, end);
    const bool is_first = b->n_tiles++ == 0;
    mlx_array max = fkv_mlx_maximum(g, fkv_mlx_max_last(g, scores), is_first ? b->mlx->constants.lowest : b->max);
    mlx_array p = fkv_mlx_exp(g, fkv_mlx_subtract(g, scores, max));
    mlx_array total = fkv_mlx_sum_last(g, p);
    mlx_array out = values_of(g, p, &v);
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

static void fold_range(query_block *b, uint32_t begin, uint32_t end) {
    while (begin < end) {
        const uint32_t stop = fkv_min_u32(end, (begin / TILE_TOKENS + 1) * TILE_TOKENS);
        fold_tile(b, begin, stop);
        begin = stop;
    }
}

/* q: [n, H, D] of any type -> float32 [G, n * R, D], scaled and rotated. */
static mlx_array prepared(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, mlx_array q, int n) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_layer *attn = layer->attn;
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    const int dim = (int)attn->head_dim;
    mlx_array x = fkv_mlx_astype(g, q, MLX_FLOAT32);
    if (attn->rotate_k != NULL) x = fkv_mlx_rotate(g, x, attn->rotate_k, layer->signs[FKV_SIDE_K]);
    x = fkv_mlx_multiply(g, x, fkv_mlx_adopt(g, mlx_array_new_float32(attn->scale)));
    x = fkv_mlx_transpose(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, heads, per_kv, dim)), FKV_MLX_SHAPE(1, 0, 2, 3));
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n * per_kv, dim));
}

/* The block's answer: [n, H, D] of `type`. */
static mlx_array answer(const query_block *b, mlx_dtype type) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    const int heads = (int)attn->n_kv_heads;
    const int per_kv = (int)(attn->n_q_heads / attn->n_kv_heads);
    const int dim = (int)attn->head_dim;
    mlx_array x = fkv_mlx_divide(g, b->out, b->total);
    x = fkv_mlx_transpose(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, (int)b->n, per_kv, dim)), FKV_MLX_SHAPE(1, 0, 2, 3));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE((int)b->n, heads * per_kv, dim));
    if (attn->rotate_v != NULL) x = fkv_mlx_unrotate(g, x, attn->rotate_v, b->layer->signs[FKV_SIDE_V]);
    return fkv_mlx_astype(g, x, type);
}

/* The answer to queries [first, first + n) of q. */
static mlx_array attend_block(query_block *b, mlx_array q, uint32_t first) {
    fkv_mlx_graph *g = &b->mlx->graph;
    const fkv_attn_layer *attn = b->layer->attn;
    mlx_array mine = fkv_mlx_slice(g, q, FKV_MLX_SHAPE((int)first, 0, 0),
                                   FKV_MLX_SHAPE((int)(first + b->n), (int)attn->n_q_heads, (int)attn->head_dim));
    b->q = prepared(b->mlx, b->layer, mine, (int)b->n);
    const uint32_t end = b->position + b->n;
    const uint32_t begin = attn->window != 0 && b->position + 1 > attn->window ? b->position + 1 - attn->window : 0;
    fold_range(b, 0, fkv_min_u32(attn->n_sinks, begin));
    fold_range(b, begin, end);
    mlx_array done = g->failed ? (mlx_array){NULL} : answer(b, mlx_array_dtype(q));
    (void)mlx_array_free(b->out);
    (void)mlx_array_free(b->max);
    (void)mlx_array_free(b->total);
    return done;
}

static uint32_t block_queries(uint32_t n_q_heads) { return fkv_max_u32(1, MAX_TILE_SCORES / (n_q_heads * TILE_TOKENS)); }

/* Queries of one row in blocks; *all is what there is so far, [.., H, D], and grows. */
static void attend_row(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t r, mlx_array q, uint32_t first, mlx_array *all,
                       mlx_array *last) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_row *row = fkv_mlx_rows(mlx, layer) + r;
    const uint32_t most = block_queries(layer->attn->n_q_heads);
    for (uint32_t i = 0; i < row->n_tokens;) {
        query_block b = {.mlx = mlx,
                         .layer = layer,
                         .row = row,
                         .table = mlx->tables[(size_t)layer->group * mlx->max_seqs + r],
                         .position = row->start + i,
                         .n = fkv_min_u32(most, row->n_tokens - i),
                         .last = last};
        const uint32_t mark = fkv_mlx_graph_mark(g);
        mlx_array done = attend_block(&b, q, first + i);
        if (all->ctx != NULL) done = fkv_mlx_concatenate_first(g, *all, done);
        fkv_mlx_keep(g, all, done);
        fkv_mlx_keep(g, last, done);
        fkv_mlx_graph_release(g, mark);
        i += b.n;
    }
}

/* Four forms of a tile's scores, of its keys and values, and of the step's rows: an operation's input and output, twice, because
 * MLX begins an operation before the one before it is done. */
uint64_t fkv_mlx_plain_bytes(const fkv_layer_config *layer, uint32_t n_tokens) {
    const uint64_t dim = layer->head_dim;
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
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) {
        attend_row(mlx, layer, r, q, first, &all, &last);
        first += rows[r].n_tokens;
    }
    fkv_mlx_keep(&mlx->graph, out, all);
    (void)mlx_array_free(all);
    (void)mlx_array_free(last);
    return fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_attend");
}
