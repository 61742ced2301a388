/* Decode over sealed pages: softmax and values of a page beside the scores of the next. Included by kernels_amx.c. What is done
 * to each is what few_sealed_scores(), softmax and few_book_values() do, in the same order: the bits are theirs.
 *
 * One after the other they wait most of the time: for sums, the matrix unit, lanes folded into one, bytes that are stored and
 * read as a tile. So each has the other's work between its steps. While the matrix unit works on values, keys of the next page
 * are laid out; while it works on scores, values of the next page are, which the next call finds in the room that it is given.
 *
 * Ladder: decode of 16384 tokens, 32 q / 8 kv / 128, pages in memory, two threads, by turns on a machine that others use too,
 * pages flushed before each call; one thread gains 1.04x.
 *
 *   step                                                                                    before's time to this
 *   two pages at a time, all keys and values laid out before their products                          1.06x, 1.06x
 *   keys of a tile close together in L1; keys laid out with the products of values, and the other way 1.13x, 1.17x
 */
#ifndef FKV_SEALED_JOIN_AMX_H
#define FKV_SEALED_JOIN_AMX_H

#include "sealed_amx.h"

/* Shares of the page behind the next one that are prefetched: with each part of softmax, with the values', with the scores'. */
enum { JOIN_FETCH_SOFTMAX = 8, JOIN_FETCH_VALUES = 48, JOIN_FETCH_SCORES = 48 };

/* What a call leaves to the next, in fkv_join.room. Levels go as far as the head dimension does. */
typedef struct join_room {
    sealed_norms norms;
    sealed_levels_tile levels;
} join_room;
_Static_assert(offsetof(join_room, levels) == FKV_TILE_TOKENS * sizeof(float) + 64, "as fkv_join_bytes() counts it");

static bool amx_joins(const fkv_block *block, uint32_t n_rows) {
    const fkv_codec *k = &block->codec[FKV_SIDE_K];
    return n_rows <= COLUMN_ROWS && fkv_codec_is_sealed(k) && block->codec[FKV_SIDE_V].kind == FKV_CODEC_SEALED_V &&
           k->dim % 32 == 0;
}

/* The sums of a block of 16 tokens become scores. odd: a constant. */
FKV_INLINE void join_end_scores(bool odd, few_sealed_job *j, uint32_t block, uint32_t n_rows, float *scores) {
    if (odd)
        _tile_stored(SEALED_ODD, j->sums[1].at, 64);
    else
        _tile_stored(SEALED_EVEN, j->sums[0].at, 64);
    fkv_tiles_see_stores();
    few_score_rows(&j->sums[odd], &j->rows, 0, n_rows, NULL, scores + block * FKV_SEALED_TOKENS);
}

/* Softmax of the page, digits for the next; leaves weights as bytes. */
FKV_INLINE void join_softmax(const fkv_join *in, const sealed_norms *norms, few_sealed_job *j, few_sealed_values_job *v) {
    uint32_t n = in->n_rows;
    softmax_grow(COLUMN_ROWS, in->scores, n, in->block->codec[FKV_SIDE_V].dim, in->state);
    fkv_fetch_some(in->fetch, JOIN_FETCH_SOFTMAX);
    sealed_page_open(j->codec, j->part, &j->page);
    j->n_chunks = j->page.n_chunks;
    sealed_rows_open(&j->page, in->prepared, n, 0, &j->rows);
    fkv_fetch_some(in->fetch, JOIN_FETCH_SOFTMAX);
    softmax_weigh(COLUMN_ROWS, in->scores, n, in->state);
    fkv_fetch_some(in->fetch, JOIN_FETCH_SOFTMAX);
    few_stay_awake();
    few_digits_open(j, in->q, 0, n);
    sealed_weigh(COLUMN_ROWS, norms, in->scores, FKV_TILE_TOKENS, n, v->bytes[0], sizeof v->bytes / 2, v->step);
    few_stay_awake();
    fkv_tiles_see_stores();
}

/* Values of the page while keys of the next are laid out. */
FKV_INLINE void join_values(const fkv_join *in, few_sealed_job *j, few_sealed_values_job *v) {
    uint32_t dim = in->block->codec[FKV_SIDE_V].dim;
    uint32_t n_units = dim / 16;
    uint32_t n_pairs = n_units / 2;
    uint32_t pair = 0;
    _tile_loadd(WEIGHTS, v->bytes, 64);
    sealed_start_values(false, v, 0);
    for (uint32_t block = 0; block < TILE_BLOCKS; block++) {
        few_keys_open(j, block);
        fkv_fetch_some(in->fetch, JOIN_FETCH_VALUES / TILE_BLOCKS);
        for (uint32_t end = n_pairs * (block + 1) / TILE_BLOCKS; pair < end; pair++) {
            sealed_end_values(false, v, 2 * pair, n_units, in->n_rows, dim, in->state.out);
            sealed_end_values(true, v, 2 * pair + 1, n_units, in->n_rows, dim, in->state.out);
        }
    }
    fkv_tiles_see_stores();
}

/* Scores of the next page while its values are laid out. */
FKV_INLINE void join_scores(const fkv_join *in, few_sealed_job *j, sealed_levels_tile *levels) {
    const fkv_codec *v_codec = &in->block->codec[FKV_SIDE_V];
    const uint8_t *const *part = in->next[FKV_SIDE_V];
    const digit_rows digits = {j->digits.at[0][0], CHUNK_NUMBERS, COLUMN_ROWS * CHUNK_NUMBERS, sizeof j->digits.at[0]};
    few_hold(0, j->n_chunks, digits);
    few_start(false, j->n_chunks, digits, few_keys(j, 0));
    for (uint32_t block = 0; block < TILE_BLOCKS; block += 2) {
        sealed_levels_of(v_codec, part, block * FKV_SEALED_TOKENS, levels);
        few_start(true, j->n_chunks, digits, few_keys(j, block + 1));
        fkv_fetch_some(in->fetch, JOIN_FETCH_SCORES / TILE_BLOCKS);
        join_end_scores(false, j, block, in->n_rows, in->scores);
        sealed_levels_of(v_codec, part, (block + 1) * FKV_SEALED_TOKENS, levels);
        if (block + 2 < TILE_BLOCKS) few_start(false, j->n_chunks, digits, few_keys(j, block + 2));
        fkv_fetch_some(in->fetch, JOIN_FETCH_SCORES / TILE_BLOCKS);
        join_end_scores(true, j, block + 1, in->n_rows, in->scores);
    }
}

static void amx_join(const fkv_join *in) {
    const fkv_codec *k_codec = &in->block->codec[FKV_SIDE_K];
    const fkv_codec *v_codec = &in->block->codec[FKV_SIDE_V];
    const uint8_t *const *k_part = in->next[FKV_SIDE_K];
    join_room *room = in->room;
    few_sealed_job j;
    few_sealed_values_job v;
    j.codec = k_codec;
    j.part = k_part;
    j.next = in->fetch;
    j.n_blocks = TILE_BLOCKS;
    j.norms = NULL;
    v.levels = &room->levels;
    few_stay_awake();
    if (!in->follows) book_values_open(v_codec, in->part[FKV_SIDE_V], FKV_TILE_TOKENS, &room->norms, &room->levels);
    join_softmax(in, &room->norms, &j, &v);
    join_values(in, &j, &v);
    (void)norms_open(v_codec, in->next[FKV_SIDE_V], FKV_TILE_TOKENS, SEALED_UNIT, &room->norms);
    join_scores(in, &j, &room->levels);
    few_stay_awake();
    if (j.rows.by_float != 0) sealed_by_float(k_codec, k_part, FKV_TILE_TOKENS, in->q, 0, j.rows.by_float, in->scores);
}

#endif
