/* Decode over a run of sealed pages: several are under way at once. Included by kernels_amx.c. What is done to a page is what
 * few_sealed_scores(), softmax and few_book_values() do, in the same order: the bits are theirs.
 *
 * One step of a page waits for the one before most of the time: for sums, the matrix unit, lanes folded into one, bytes that are
 * stored and read as a tile. So in each turn four pages have a step each, none of which waits for another of the turn:
 *
 *   queries   of page t + 2 as digits, its keys as bytes     vectors
 *   scores    of page t + 1                                  the matrix unit, then vectors
 *   weights   of page t: softmax, bytes; its levels          vectors
 *   values    of page t - 1                                  the matrix unit, then vectors
 *
 * A turn has four quarters, as a tile has four blocks of tokens and up to four rows, and each quarter a share of every step. Page
 * t + 4 is prefetched meanwhile. Keys and levels have room for one page: the products of a block or unit are started before that
 * of the next page is laid out in its place.
 *
 * Ladder: decode of 16384 tokens, 32 q / 8 kv / 128, by turns; the time of what was before, softmax and values of a page beside
 * the scores of the next, to this.
 *
 *   step                                                              one thread, pages in L2   two threads, pages in memory
 *   four pages in a turn, each quarter with work of its own                        0.91x
 *   quarters alike; rows, head dimension and bits are constants                    1.15x
 *   the book and addresses are found once, not for each unit               1.21x, 1.23x          1.04x to 1.17x in nine runs
 *   the page after the next one is prefetched (the next one: 1.01x to 1.12x)                     1.04x to 1.15x in eight
 *   the TLB is filled four pages ahead of that, no longer one; to K8/V4 then  1.25x in the middle of eleven runs
 */
#ifndef FKV_SEALED_RUN_AMX_H
#define FKV_SEALED_RUN_AMX_H

#include "sealed_amx.h"

enum { RUN_FETCHES = 3 * TILE_BLOCKS /* of a turn: a page is prefetched in so many shares */ };

/* What the work of a turn is unrolled for, where it is a constant. */
typedef struct run_shape {
    uint32_t n_rows;
    uint32_t n_units;
    uint32_t n_chunks;
    uint32_t block_bytes[FKV_N_SIDES]; /* of 16 tokens */
    bool is_4_bit;                     /* both sides; else the codecs say it */
} run_shape;

/* Up to four rows of queries as digits of one page. */
typedef struct run_queries {
    sealed_rows rows;
    few_digits digits;
} run_queries;

/* Of two pages in turn: at [page % 2]. */
typedef struct sealed_run {
    __m512i book;     /* of the values */
    sealed_page page; /* of the queries at work */
    vf bias[COLUMN_ROWS];
    run_queries queries[2];
    alignas(64) float scores[2][COLUMN_ROWS][FKV_TILE_TOKENS]; /* and weights */
    sealed_norms norms;
    vf sum[COLUMN_ROWS]; /* of the weights at work, and the largest of them */
    vf largest[COLUMN_ROWS];
    few_sealed_values_job values[2];
    few_sums sums;
    alignas(64) uint8_t keys[TILE_BLOCKS * sizeof(sealed_quads)]; /* run_keys() */
    sealed_levels_tile levels;
} sealed_run;

/* One turn: the block of each step's page, NULL where it has none. */
typedef struct run_turn {
    uint32_t t; /* the weights' page, counted from the run's first */
    const uint8_t *queries;
    const uint8_t *scores;
    const uint8_t *weights;
    const uint8_t *values;
    const uint8_t *keys;   /* codes of the queries' page */
    const uint8_t *levels; /* codes of the weights' page */
    run_queries *asked;    /* what each step makes, or the one before it has made */
    run_queries *scored;
    float *to_weigh;
    float *to_score;
    few_sealed_values_job *weighed;
    few_sealed_values_job *valued;
    const uint8_t *fetch; /* what is left to prefetch, in steps */
    uint32_t n_fetch;
    uint32_t fetch_share;
} run_turn;

static bool amx_runs(const fkv_block *block, uint32_t n_rows) {
    const fkv_codec *k = &block->codec[FKV_SIDE_K];
    return n_rows <= COLUMN_ROWS && fkv_codec_is_sealed(k) && block->codec[FKV_SIDE_V].kind == FKV_CODEC_SEALED_V &&
           k->dim % 32 == 0;
}

FKV_INLINE void run_parts(const fkv_run *in, fkv_side side, const uint8_t *block, const uint8_t *part[FKV_N_PARTS]) {
    for (int p = 0; p < FKV_N_PARTS; p++) part[p] = block + in->block->offset[side][p];
}

FKV_INLINE void run_fetch(run_turn *w) {
    uint32_t n = fkv_min_u32(w->n_fetch, w->fetch_share);
    w->n_fetch -= n;
    for (; n != 0; n--, w->fetch += FKV_FETCH_STEP) fkv_fetch_step(w->fetch);
}

/* ---- queries ---- */

/* Blocks lie close behind each other, whatever the head dimension: a kilobyte for each 64 numbers, so that a tile's do not meet
 * in the same lines of L1. */
FKV_INLINE sealed_quads *run_keys(run_shape shape, sealed_run *s, uint32_t block) {
    return (sealed_quads *)(void *)(s->keys + (size_t)block * shape.n_chunks * sizeof(sealed_quads) / MAX_CHUNKS);
}

/* Scales of the page and steps of the rows, before their digits. */
FKV_INLINE void run_open_queries(const fkv_run *in, sealed_run *s, const run_turn *w) {
    const uint8_t *part[FKV_N_PARTS];
    run_parts(in, FKV_SIDE_K, w->queries, part);
    sealed_page_open(&in->block->codec[FKV_SIDE_K], part, &s->page);
    sealed_rows_open(&s->page, in->prepared, in->n_rows, 0, &w->asked->rows);
}

FKV_INLINE void run_make_digits(run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t row) {
    few_digits *to = &w->asked->digits;
    s->bias[row] = sealed_digits(shape.n_units, &s->page, in->q + (size_t)row * shape.n_units * 16, w->asked->rows.inverse[row],
                                 to->at[0][row], sizeof to->at[0][0] * COLUMN_ROWS, sizeof to->at[0]);
}

FKV_INLINE void run_close_queries(run_shape shape, sealed_run *s, const run_turn *w) {
    vf bias[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) bias[r] = r < shape.n_rows ? s->bias[r] : vf_set(0.0f);
    _mm_storeu_ps(w->asked->rows.bias, _mm512_castps512_ps128(fold_rows(SUM, COLUMN_ROWS, bias)));
}

FKV_INLINE void run_lay_out_keys(run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t block) {
    const uint8_t *codes = w->keys + (size_t)block * shape.block_bytes[FKV_SIDE_K];
    if (shape.is_4_bit)
        sealed_quads_open(4, NULL, shape.n_units, codes, run_keys(shape, s, block));
    else
        sealed_quads_of(&in->block->codec[FKV_SIDE_K], &s->page, codes, run_keys(shape, s, block));
}

/* ---- scores ---- */

FKV_INLINE digit_rows run_digits(const run_queries *of) {
    return (digit_rows){of->digits.at[0][0], CHUNK_NUMBERS, COLUMN_ROWS * CHUNK_NUMBERS, sizeof of->digits.at[0]};
}

/* Rows that floats serve. */
static void run_scores_by_float(const fkv_run *in, const uint8_t *block, uint32_t rows, float *scores) {
    const uint8_t *part[FKV_N_PARTS];
    run_parts(in, FKV_SIDE_K, block, part);
    sealed_by_float(&in->block->codec[FKV_SIDE_K], part, FKV_TILE_TOKENS, in->q, 0, rows, scores);
}

/* ---- weights ---- */

/* A row of softmax: weights p * norm in place of scores. */
FKV_INLINE void run_softmax_row(const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t row) {
    vf base = vf_set(in->piece.max[row]);
    vf sum = vf_set(0.0f);
    __m512i most = _mm512_setzero_si512();
    float *scores = w->to_weigh + row * FKV_TILE_TOKENS;
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) {
        vf p = vf_exp(vf_sub(vf_load(scores + t), base));
        vf weight = vf_mul(p, vf_load(s->norms.at + t));
        vf_store(scores + t, weight);
        sum = vf_add(sum, p);
        most = _mm512_max_epu32(most, sizes_of(weight));
    }
    s->sum[row] = sum;
    s->largest[row] = _mm512_castsi512_ps(most);
}

/* Bytes of the weights, once all rows have theirs. */
FKV_INLINE void run_close_weights(run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w) {
    few_sealed_values_job *to = w->weighed;
    alignas(64) float inverse[BLOCK_ROWS];
    vf sum[COLUMN_ROWS];
    vf largest[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        sum[r] = r < shape.n_rows ? s->sum[r] : vf_set(0.0f);
        largest[r] = r < shape.n_rows ? s->largest[r] : vf_set(0.0f);
    }
    sealed_steps(COLUMN_ROWS, s->norms.unit, largest, inverse, to->step);
    softmax_add(COLUMN_ROWS, shape.n_rows, sum, in->piece);
    for (uint32_t r = 0; r < shape.n_rows; r++) {
        __m512i whole[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++)
            whole[b] = _mm512_cvtps_epi32(vf_mul(vf_load(w->to_weigh + r * FKV_TILE_TOKENS + b * VL), vf_set(inverse[r])));
        sealed_weight_bytes(whole, to->bytes[r], sizeof to->bytes / 2);
    }
}

/* ---- values ---- */

FKV_INLINE void run_unit_levels(int bits, run_shape shape, sealed_run *s, const uint8_t *codes, uint32_t unit) {
    FKV_UNROLL
    for (uint32_t b = 0; b < TILE_BLOCKS; b++)
        sealed_levels_put(bits, s->book, codes + (size_t)b * shape.block_bytes[FKV_SIDE_V], shape.n_units, unit, b, &s->levels);
}

static void run_unit_levels_of(uint32_t bits, run_shape shape, sealed_run *s, const uint8_t *codes, uint32_t unit) {
    if (bits == 4)
        run_unit_levels(4, shape, s, codes, unit);
    else if (bits == 3)
        run_unit_levels(3, shape, s, codes, unit);
    else
        run_unit_levels(2, shape, s, codes, unit);
}

/* A unit of values, beside the levels of the next page for its place; then the sums of the unit before are added. odd: a
 * constant. */
FKV_INLINE void run_unit(bool odd, run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t unit) {
    if (w->values != NULL) sealed_start_values(odd, &s->levels, unit);
    fkv_tiles_see_stores();
    if (w->weights != NULL) {
        if (shape.is_4_bit)
            run_unit_levels(4, shape, s, w->levels, unit);
        else
            run_unit_levels_of(in->block->codec[FKV_SIDE_V].bits, shape, s, w->levels, unit);
    }
    if (w->values == NULL) return;
    sealed_store_values(odd, w->valued);
    if (unit != 0) sealed_add_values(!odd, w->valued, unit - 1, shape.n_rows, (size_t)shape.n_units * 16, in->piece.out);
}

/* ---- turns ---- */

FKV_INLINE void run_quarter(run_shape shape, const fkv_run *in, sealed_run *s, run_turn *w, uint32_t quarter) {
    uint32_t n_pairs = shape.n_units / 2;
    if (w->scores != NULL) few_start(false, shape.n_chunks, run_digits(w->scored), run_keys(shape, s, quarter));
    fkv_tiles_see_stores();
    if (w->weights != NULL && quarter < shape.n_rows) run_softmax_row(in, s, w, quarter);
    run_fetch(w);
    for (uint32_t pair = n_pairs * quarter / TILE_BLOCKS; pair < n_pairs * (quarter + 1) / TILE_BLOCKS; pair++) {
        run_unit(false, shape, in, s, w, 2 * pair);
        run_unit(true, shape, in, s, w, 2 * pair + 1);
    }
    run_fetch(w);
    if (w->scores != NULL) _tile_stored(SEALED_EVEN, s->sums.at, 64);
    if (w->queries != NULL && quarter < shape.n_rows) run_make_digits(shape, in, s, w, quarter);
    run_fetch(w);
    if (w->queries != NULL) run_lay_out_keys(shape, in, s, w, quarter);
    fkv_tiles_see_stores();
    if (w->scores != NULL)
        few_score_rows(&s->sums, &w->scored->rows, 0, shape.n_rows, NULL, w->to_score + quarter * FKV_SEALED_TOKENS);
}

/* The piece that ends before this turn's weights is folded once its last values are added. */
typedef struct run_piece {
    bool ends;
    float max[COLUMN_ROWS];
    float sum[COLUMN_ROWS];
} run_piece;

FKV_INLINE void run_piece_end(const fkv_run *in, uint32_t page, run_piece *before) {
    before->ends = page != in->first && page % in->split_pages == 0;
    if (!before->ends) return;
    for (uint32_t r = 0; r < in->n_rows; r++) {
        before->max[r] = in->piece.max[r];
        before->sum[r] = in->piece.sum[r];
        in->piece.max[r] = -INFINITY;
        in->piece.sum[r] = 0.0f;
    }
}

static void run_piece_fold(const fkv_run *in, run_piece before) {
    uint32_t dim = in->block->codec[FKV_SIDE_V].dim;
    kernel_fold(in->total, (fkv_softmax){before.max, before.sum, in->piece.out}, in->n_rows, dim);
    memset(in->piece.out, 0, in->n_rows * dim * sizeof *in->piece.out);
}

FKV_INLINE void run_one_turn(run_shape shape, const fkv_run *in, sealed_run *s, run_turn *w) {
    run_piece before = {.ends = false};
    float factor[BLOCK_ROWS];
    uint32_t grown = 0;
    fkv_tiles_see_stores();
    if (w->scores != NULL) few_hold(0, shape.n_chunks, run_digits(w->scored));
    if (w->values != NULL) _tile_loadd(WEIGHTS, w->valued->bytes, 64);
    if (w->queries != NULL) run_open_queries(in, s, w);
    if (w->weights != NULL) {
        const uint8_t *part[FKV_N_PARTS];
        run_parts(in, FKV_SIDE_V, w->weights, part);
        (void)norms_open(&in->block->codec[FKV_SIDE_V], part, FKV_TILE_TOKENS, SEALED_UNIT, &s->norms);
        run_piece_end(in, in->first + w->t, &before);
        grown = softmax_largest(COLUMN_ROWS, w->to_weigh, shape.n_rows, in->piece, factor);
    }
    for (uint32_t quarter = 0; quarter < TILE_BLOCKS; quarter++) run_quarter(shape, in, s, w, quarter);
    if (w->weights != NULL) run_close_weights(shape, in, s, w);
    if (w->queries != NULL) run_close_queries(shape, s, w);
    if (w->values != NULL)
        sealed_add_values(true, w->valued, shape.n_units - 1, shape.n_rows, (size_t)shape.n_units * 16, in->piece.out);
    if (before.ends) run_piece_fold(in, before);
    if (grown != 0) softmax_rescale(grown, factor, shape.n_units * 16, in->piece.out);
    if (w->scores != NULL && w->scored->rows.by_float != 0)
        run_scores_by_float(in, w->scores, w->scored->rows.by_float, w->to_score);
}

FKV_INLINE const uint8_t *run_block(const fkv_run *in, uint32_t t) {
    return in->first + t < in->end ? in->pages + fkv_page_at(in->view, in->first + t) * in->page_bytes : NULL;
}

/* What turn t prefetches: page t + 4, or what is behind the last. */
FKV_INLINE void run_fetch_open(const fkv_run *in, run_turn *w) {
    const uint8_t *later = run_block(in, w->t + 8);
    uint64_t bytes = in->first + w->t + 4 < in->end ? in->block->bytes : in->first + w->t + 4 == in->end ? in->after_bytes : 0;
    w->fetch = in->first + w->t + 4 < in->end ? run_block(in, w->t + 4) : in->after;
    w->n_fetch = (uint32_t)(bytes / FKV_FETCH_STEP + 1);
    w->fetch_share = w->n_fetch / RUN_FETCHES + 1;
    if (later != NULL) fkv_fetch_entries(later, in->block->bytes);
}

FKV_INLINE void run_turn_open(const fkv_run *in, sealed_run *s, uint32_t t, run_turn *w) {
    uint32_t at = t % 2;
    w->t = t;
    if (w->queries != NULL) w->keys = w->queries + in->block->offset[FKV_SIDE_K][FKV_PART_CODES];
    if (w->weights != NULL) w->levels = w->weights + in->block->offset[FKV_SIDE_V][FKV_PART_CODES];
    w->asked = &s->queries[at];
    w->scored = &s->queries[1 - at];
    w->to_weigh = s->scores[at][0];
    w->to_score = s->scores[1 - at][0];
    w->weighed = &s->values[at];
    w->valued = &s->values[1 - at];
    run_fetch_open(in, w);
}

FKV_INLINE void run_pages(run_shape shape, const fkv_run *in) {
    sealed_run s;
    uint32_t n = in->end - in->first;
    s.book = _mm512_broadcast_i32x4(level_book((int)in->block->codec[FKV_SIDE_V].bits));
    run_turn w = {.queries = run_block(in, 0)};
    for (uint64_t byte = 0; n > 1 && byte < in->block->bytes; byte += FKV_FETCH_STEP) fkv_fetch_step(run_block(in, 1) + byte);
    for (uint32_t turn = 0; turn < n + 3; turn++) {
        run_turn_open(in, &s, turn - 2, &w);
        run_one_turn(shape, in, &s, &w);
        w.values = w.weights;
        w.weights = w.scores;
        w.scores = w.queries;
        w.queries = run_block(in, turn + 1);
    }
}

static void amx_run(const fkv_run *in) {
    const fkv_codec *k = &in->block->codec[FKV_SIDE_K];
    const fkv_codec *v = &in->block->codec[FKV_SIDE_V];
    bool is_usual = in->n_rows == COLUMN_ROWS && k->dim == 128;
    uint32_t k_bytes = k->row_bytes[FKV_PART_CODES] * FKV_SEALED_TOKENS;
    uint32_t v_bytes = v->row_bytes[FKV_PART_CODES] * FKV_SEALED_TOKENS;
    if (is_usual && k->bits == 4 && v->bits == 4 && k->channels == NULL)
        run_pages((run_shape){COLUMN_ROWS, 8, 2, {1024, 1024}, true}, in);
    else if (is_usual)
        run_pages((run_shape){COLUMN_ROWS, 8, 2, {k_bytes, v_bytes}, false}, in);
    else
        run_pages((run_shape){in->n_rows, k->dim / 16, fkv_ceil_div(k->dim, CHUNK_NUMBERS), {k_bytes, v_bytes}, false}, in);
}

#endif
