/* Decode over a run of sealed pages with several pages in flight. Included by kernels_amx.c. Each page goes through the
 * operations of decode_sealed_scores(), softmax and decode_book_values() in that order, so results are bit-identical to those of
 * separate calls.
 *
 * Most operations on a page have to wait for the previous operation, for example for the matrix unit, for a lane reduction, or
 * for stores that are read back as tiles. Therefore, each loop iteration (a turn) performs four independent steps on four
 * different pages:
 *
 *   queries   page t + 2: splits queries into digits, unpacks keys        vector units
 *   scores    page t + 1: multiplies queries by keys                      matrix unit, then vector units
 *   weights   page t: computes softmax, weight bytes and value levels     vector units
 *   values    page t - 1: multiplies weights by values                    matrix unit, then vector units
 *
 * Each quarter of a turn processes one block of 16 tokens and one query row. During a turn, page t + 4 is prefetched. Keys and
 * levels need buffers for one page only, because the matrix multiplications of a block start before the next page overwrites the
 * block's buffer. The bottlenecks are memory latency and the matrix unit. */
#ifndef FKV_SEALED_RUN_AMX_H
#define FKV_SEALED_RUN_AMX_H

#include "sealed_amx.h"

enum {
    RUN_FETCHES = 3 * TILE_BLOCKS /* number of times that a turn (loop iteration) issues prefetches */
};

/* Parameters of a turn (loop iteration). When they are compile-time constants, the compiler unrolls the inner loops. */
typedef struct run_shape {
    uint32_t n_rows;
    uint32_t n_units;
    uint32_t n_chunks;
    uint32_t block_bytes[FKV_N_SIDES]; /* size of the codes of 16 tokens, in bytes, for K and V */
    bool is_4_bit;                     /* true if both K and V use 4-bit codes; otherwise, the codecs specify the bit widths */
} run_shape;

/* Up to four query rows, multiplied by the scales of one page and split into base-256 digits (signed bytes). */
typedef struct run_queries {
    sealed_rows rows;
    decode_digits digits;
} run_queries;

/* State of a run of pages. Arrays of two elements hold the data of two consecutive pages, indexed by page % 2. */
typedef struct sealed_run {
    __m512i book;
    sealed_page page; /* scales and biases of the page that the step `queries` processes */
    vf bias[COLUMN_ROWS];
    run_queries queries[2];
    alignas(64) float scores[2][COLUMN_ROWS][FKV_TILE_TOKENS]; /* scores, then weights */
    sealed_norms norms;
    vf sum[COLUMN_ROWS]; /* per-lane sums of p (`sum`) and per-lane maxima of p * norm (`largest`), for the page of the step
                            `weights` */
    vf largest[COLUMN_ROWS];
    decode_sealed_values_job values[2];
    decode_sums sums;
    alignas(64) uint8_t keys[TILE_BLOCKS * sizeof(sealed_quads)]; /* see run_keys() */
    sealed_levels_tile levels;
} sealed_run;

/* State of one turn (loop iteration). Each turn executes four steps on different pages. The fields queries, scores, weights and
 * values point to the page block that the step of the same name processes, or are NULL if that step has no page in this turn. */
typedef struct run_turn {
    uint32_t t; /* index, within the run, of the page that the step `weights` processes */
    const uint8_t *queries;
    const uint8_t *scores;
    const uint8_t *weights;
    const uint8_t *values;
    const uint8_t *keys;   /* key codes of the page that the step `queries` processes */
    const uint8_t *levels; /* value codes of the page that the step `weights` processes */
    run_queries *asked; /* this field and the next five fields point to the buffers that the steps of this turn read or write */
    run_queries *scored;
    float *to_weigh;
    float *to_score;
    decode_sealed_values_job *weighed;
    decode_sealed_values_job *valued;
    const uint8_t *fetch; /* next address to prefetch; n_fetch is the number of remaining prefetch steps */
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

/* Returns the buffer for the unpacked keys of one block of 16 tokens. The buffers are packed densely, 1 KiB per 64 values of the
 * head dimension, so that the blocks of a tile do not compete for the same L1 sets. */
FKV_INLINE sealed_quads *run_keys(run_shape shape, sealed_run *s, uint32_t block) {
    return (sealed_quads *)(void *)(s->keys + (size_t)block * shape.n_chunks * sizeof(sealed_quads) / MAX_CHUNKS);
}

/* Loads the scales and biases of the page and computes the quantization step of each query row. */
FKV_INLINE void run_open_queries(const fkv_run *in, sealed_run *s, const run_turn *w) {
    const uint8_t *part[FKV_N_PARTS];
    run_parts(in, FKV_SIDE_K, w->queries, part);
    sealed_page_open(&in->block->codec[FKV_SIDE_K], part, &s->page);
    sealed_rows_open(&s->page, in->prepared, in->n_rows, 0, &w->asked->rows);
}

FKV_INLINE void run_make_digits(run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t row) {
    decode_digits *to = &w->asked->digits;
    s->bias[row] = sealed_digits(shape.n_units, &s->page, in->q + (size_t)row * shape.n_units * 16, w->asked->rows.inverse[row],
                                 to->at[0][row], sizeof to->at[0][0] * COLUMN_ROWS, sizeof to->at[0]);
}

FKV_INLINE void run_close_queries(run_shape shape, sealed_run *s, const run_turn *w) {
    vf bias[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) bias[r] = r < shape.n_rows ? s->bias[r] : vf_set(0.0f);
    _mm_storeu_ps(w->asked->rows.bias, _mm512_castps512_ps128(fold_rows(FOLD_SUM, COLUMN_ROWS, bias)));
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

/* Recomputes, with the float kernels, the scores of the query rows whose bits are set in `rows`. */
static void run_scores_by_float(const fkv_run *in, const uint8_t *block, uint32_t rows, float *scores) {
    const uint8_t *part[FKV_N_PARTS];
    run_parts(in, FKV_SIDE_K, block, part);
    sealed_by_float(&in->block->codec[FKV_SIDE_K], part, FKV_TILE_TOKENS, in->q, 0, rows, scores);
}

/* ---- weights ---- */

/* Computes the softmax weights p of one query row and replaces the scores with p * norm. */
FKV_INLINE void run_softmax_row(const fkv_run *in, sealed_run *s, const run_turn *w, uint32_t row) {
    vf base = vf_set(in->split.max[row]);
    vf sum = vf_set(0.0f);
    __m512i most = _mm512_setzero_si512();
    float *scores = w->to_weigh + row * FKV_TILE_TOKENS;
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_TILE_TOKENS; t += VL) {
        vf p = vf_exp(vf_sub(vf_load(scores + t), base));
        vf weight = vf_mul(p, vf_load(s->norms.at + t));
        vf_store(scores + t, weight);
        sum = vf_add(sum, p);
        most = _mm512_max_epu32(most, abs_bits_of(weight));
    }
    s->sum[row] = sum;
    s->largest[row] = _mm512_castsi512_ps(most);
}

/* Quantizes the weights p * norm to bytes, after run_softmax_row() has processed all rows. */
FKV_INLINE void run_close_weights(run_shape shape, const fkv_run *in, sealed_run *s, const run_turn *w) {
    decode_sealed_values_job *to = w->weighed;
    alignas(64) float inverse[BLOCK_ROWS];
    vf sum[COLUMN_ROWS];
    vf largest[COLUMN_ROWS];
    FKV_UNROLL
    for (uint32_t r = 0; r < COLUMN_ROWS; r++) {
        sum[r] = r < shape.n_rows ? s->sum[r] : vf_set(0.0f);
        largest[r] = r < shape.n_rows ? s->largest[r] : vf_set(0.0f);
    }
    sealed_steps(COLUMN_ROWS, s->norms.unit, largest, inverse, to->step);
    softmax_add(COLUMN_ROWS, shape.n_rows, sum, in->split);
    for (uint32_t r = 0; r < shape.n_rows; r++) {
        __m512i bits[4];
        FKV_UNROLL
        for (uint32_t b = 0; b < 4; b++)
            bits[b] = weight_bits(vf_load(w->to_weigh + r * FKV_TILE_TOKENS + b * VL), vf_set(inverse[r]));
        sealed_weight_bytes(bits, to->bytes[r], sizeof to->bytes / 2);
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

/* Starts to multiply the weights by the values of one unit (16 channels), stores the next page's levels for this unit, and adds
 * the weighted values of the previous unit to the output. `odd` (a compile-time constant) selects the accumulators. */
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
    if (unit != 0) sealed_add_values(!odd, w->valued, unit - 1, shape.n_rows, (size_t)shape.n_units * 16, in->split.out);
}

/* ---- turns ---- */

FKV_INLINE void run_quarter(run_shape shape, const fkv_run *in, sealed_run *s, run_turn *w, uint32_t quarter) {
    uint32_t n_pairs = shape.n_units / 2;
    if (w->scores != NULL) decode_start(false, shape.n_chunks, run_digits(w->scored), run_keys(shape, s, quarter));
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
        decode_score_rows(&s->sums, &w->scored->rows, 0, shape.n_rows, NULL, w->to_score + quarter * FKV_SEALED_TOKENS);
}

/* Softmax maxima and sums of a split that has just ended. In the same turn, the weights of the first page after the split are
 * computed. The split is merged into the total once the values of its last page have been added. */
typedef struct run_split {
    bool ends;
    float max[COLUMN_ROWS];
    float sum[COLUMN_ROWS];
} run_split;

FKV_INLINE void run_split_end(const fkv_run *in, uint32_t page, run_split *before) {
    before->ends = page != in->first && page % in->split_pages == 0;
    if (!before->ends) return;
    for (uint32_t r = 0; r < in->n_rows; r++) {
        before->max[r] = in->split.max[r];
        before->sum[r] = in->split.sum[r];
        in->split.max[r] = -INFINITY;
        in->split.sum[r] = 0.0f;
    }
}

static void run_split_fold(const fkv_run *in, run_split before) {
    uint32_t dim = in->block->codec[FKV_SIDE_V].dim;
    kernel_fold(in->total, (fkv_softmax){before.max, before.sum, in->split.out}, in->n_rows, dim);
    memset(in->split.out, 0, in->n_rows * dim * sizeof *in->split.out);
}

FKV_INLINE void run_one_turn(run_shape shape, const fkv_run *in, sealed_run *s, run_turn *w) {
    run_split before = {.ends = false};
    float factor[BLOCK_ROWS];
    uint32_t grown = 0;
    fkv_tiles_see_stores();
    if (w->scores != NULL) decode_hold(0, shape.n_chunks, run_digits(w->scored));
    if (w->values != NULL) _tile_loadd(WEIGHTS, w->valued->bytes, 64);
    if (w->queries != NULL) run_open_queries(in, s, w);
    if (w->weights != NULL) {
        const uint8_t *part[FKV_N_PARTS];
        run_parts(in, FKV_SIDE_V, w->weights, part);
        (void)norms_open(&in->block->codec[FKV_SIDE_V], part, FKV_TILE_TOKENS, SEALED_UNIT, &s->norms);
        run_split_end(in, in->first + w->t, &before);
        grown = softmax_largest(COLUMN_ROWS, w->to_weigh, shape.n_rows, in->split, factor);
    }
    for (uint32_t quarter = 0; quarter < TILE_BLOCKS; quarter++) run_quarter(shape, in, s, w, quarter);
    if (w->weights != NULL) run_close_weights(shape, in, s, w);
    if (w->queries != NULL) run_close_queries(shape, s, w);
    if (w->values != NULL)
        sealed_add_values(true, w->valued, shape.n_units - 1, shape.n_rows, (size_t)shape.n_units * 16, in->split.out);
    if (before.ends) run_split_fold(in, before);
    if (grown != 0) softmax_rescale(grown, factor, shape.n_units * 16, in->split.out);
    if (w->scores != NULL && w->scored->rows.by_float != 0)
        run_scores_by_float(in, w->scores, w->scored->rows.by_float, w->to_score);
}

FKV_INLINE const uint8_t *run_block(const fkv_run *in, uint32_t t) {
    return in->first + t < in->end ? in->pages + fkv_page_at(in->view, in->first + t) * in->page_bytes : NULL;
}

/* Selects the block that turn t prefetches: page t + 4 of the run, or the block after the run. */
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
