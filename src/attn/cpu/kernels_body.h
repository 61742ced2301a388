/* Float kernels for all instruction sets. They use the vector primitives of the vec_*.h header that is included before this file:
 *
 *   vf, VL                         vector of VL floats
 *   UNIT_VECS                      vectors per unit of 16 values along the head dimension
 *   BLOCK_TOKENS, CHUNK_UNITS      tokens decoded at a time, and units decoded per token; their values fill half the registers
 *   PREFILL_ROWS                   number of rows whose accumulators (4 vectors each) fill the registers
 *   vf_decode, vf_load_f16/bf16    convert a unit of packed bytes to floats; vf_book converts with a codebook
 *   vf_if_below(x, limit, y, z)    y where x < limit, otherwise z (also for NaN)
 *   vf_zero_below(x, limit, y)     0 where x < limit, otherwise y
 *
 * Decode keeps a block of tokens in registers and applies it to every row of the tile, so that packed bytes are read once and
 * unpacked values are never stored. Prefill unpacks 16 tokens to floats in L1. For each (row, token) pair, the order of
 * operations does not depend on the number of rows or tokens, so results are bit-identical for any tiling. Decode of 16-bit rows
 * is limited by memory bandwidth, decode of other rows by unpacking, and prefill by FMA throughput.
 */
#include "../../base/float16.h"
#include "../../codec/affine.h"
#include "../../codec/turbo.h"
#include "kernels.h"

#include <math.h>

/* Storage forms of a row, passed to kernels as compile-time constants. A form is the bit width of affine codes, a 16-bit float
 * type, or FORM_BOOK plus the bit width of codebook codes. */
enum { FORM_2 = 2, FORM_4 = 4, FORM_8 = 8, FORM_F16 = 16, FORM_BF16 = 17, FORM_BOOK = 32 };

enum {
    PREFILL_MIN_ROWS = 4 * PREFILL_ROWS
}; /* minimum number of query rows for which unpacking 16 tokens into a small buffer is faster than unpacking them in registers */
enum { CHUNK_VECS = CHUNK_UNITS * UNIT_VECS, MAX_GROUPS_PER_ROW = FKV_MAX_HEAD_DIM / 32 };

typedef struct tile {
    const uint8_t *codes;
    fkv_fetch *next;
    uint32_t row_bytes;
    uint32_t n_groups;
    uint32_t group_shift;
    uint32_t n_units; /* D / 16 */
    alignas(64) float scales[FKV_TILE_TOKENS * MAX_GROUPS_PER_ROW];
    alignas(64) float biases[FKV_TILE_TOKENS * MAX_GROUPS_PER_ROW];
} tile;

/* Converts 16-bit scales or biases to floats, 16 at a time. */
FKV_INLINE void widen_halves_of(fkv_type type, const uint8_t *from, uint32_t n, float *to) {
    for (const float *end = to + n; to < end; to += 16, from += 32) {
        vf unit[UNIT_VECS];
        if (type == FKV_BF16)
            vf_load_bf16(from, unit);
        else
            vf_load_f16(from, unit);
        for (int v = 0; v < UNIT_VECS; v++) vf_store(to + v * VL, unit[v]);
    }
}

static void widen_halves(fkv_type type, const uint8_t *from, uint32_t n, float *to) {
    if (type == FKV_BF16)
        widen_halves_of(FKV_BF16, from, n, to);
    else
        widen_halves_of(FKV_F16, from, n, to);
}

/* Initializes all fields of a tile except its scales and biases. */
FKV_INLINE void tile_begin(tile *t, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next) {
    t->codes = part[FKV_PART_CODES];
    t->next = next;
    t->row_bytes = codec->row_bytes[FKV_PART_CODES];
    t->n_units = codec->dim / 16;
    t->n_groups = codec->dim / codec->group;
    t->group_shift = codec->group == 32 ? 5 : codec->group == 64 ? 6 : codec->group == 128 ? 7 : 31;
}

static void tile_open(tile *t, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                      uint32_t n_tokens) {
    tile_begin(t, codec, part, next);
    /* rounding n_tokens up does not exceed a full tile, because the number of tokens in a full tile is a multiple of 16 */
    uint32_t n = (uint32_t)fkv_align_up(n_tokens, 16) * t->n_groups;
    FKV_ASSERT(n > 0);
    widen_halves(codec->type, part[FKV_PART_SCALES], n, t->scales);
    if (codec->row_bytes[FKV_PART_BIASES] != 0) widen_halves(codec->type, part[FKV_PART_BIASES], n, t->biases);
}

/* Decodes one unit (16 values) of a row of codebook codes. */
FKV_INLINE void decode_codebook(int bits, const uint8_t *row, uint32_t n_units, uint32_t unit, vf_affine a, vf out[UNIT_VECS]) {
    const uint8_t *codes = row + (size_t)unit * (bits == 4 ? 8 : 4);
    const uint8_t *plane = row + fkv_turbo_plane(16 * n_units) + (size_t)unit * 2;
    vf_book(bits, fkv_turbo_books[bits].value, codes, plane, a, out);
}

/* Decodes n_units units (16 values each) of each of n_tokens tokens, starting at (token, unit). Every group_units consecutive
 * units share a scale and a bias, and group_units divides n_units. All counts and the storage form are compile-time constants, so
 * that `out` stays in registers. */
FKV_INLINE void decode_block(int form, int group_units, int n_tokens, int n_units, const tile *t, uint32_t token, uint32_t unit,
                             vf out[BLOCK_TOKENS][CHUNK_VECS]) {
    FKV_UNROLL
    for (int i = 0; i < n_tokens; i++) {
        const uint8_t *row = t->codes + (size_t)(token + (uint32_t)i) * t->row_bytes;
        FKV_UNROLL
        for (int u = 0; u < n_units; u += group_units) {
            vf_affine affine;
            if (form < FORM_F16) {
                uint32_t g = (token + (uint32_t)i) * t->n_groups + ((unit + (uint32_t)u) * 16 >> t->group_shift);
                affine = vf_affine_make(form, t->scales[g], t->biases[g]);
            }
            if (form > FORM_BOOK)
                affine = vf_book_make(form - FORM_BOOK, fkv_turbo_books[form - FORM_BOOK].value, t->scales[token + (uint32_t)i]);
            FKV_UNROLL
            for (int w = u; w < u + group_units; w++) {
                if (form == FORM_F16)
                    vf_load_f16(row + (size_t)(unit + (uint32_t)w) * 32, &out[i][w * UNIT_VECS]);
                else if (form == FORM_BF16)
                    vf_load_bf16(row + (size_t)(unit + (uint32_t)w) * 32, &out[i][w * UNIT_VECS]);
                else if (form > FORM_BOOK)
                    decode_codebook(form - FORM_BOOK, row, t->n_units, unit + (uint32_t)w, affine, &out[i][w * UNIT_VECS]);
                else
                    vf_decode(form, row + (size_t)(unit + (uint32_t)w) * 2 * (size_t)form, affine, &out[i][w * UNIT_VECS]);
            }
        }
    }
}

/* ---- scores ---- */

/* Accumulates the dot products of BLOCK_TOKENS keys with all query rows, over one chunk of the head dimension. The lanes of an
 * accumulator are summed once, after the last chunk. */
FKV_INLINE void scores_chunk(int form, int group_units, int n_units, const tile *t, uint32_t token, uint32_t unit, const float *q,
                             uint32_t n_rows, vf (*lanes)[BLOCK_TOKENS], float *scores) {
    vf k[BLOCK_TOKENS][CHUNK_VECS];
    decode_block(form, group_units, BLOCK_TOKENS, n_units, t, token, unit, k);
    bool first = unit == 0;
    bool last = unit + (uint32_t)n_units == t->n_units;
    for (uint32_t r = 0; r < n_rows; r++) {
        const float *row = q + ((size_t)r * t->n_units + unit) * 16;
        vf sum[BLOCK_TOKENS];
        FKV_UNROLL
        for (int i = 0; i < BLOCK_TOKENS; i++) sum[i] = first ? vf_set(0.0f) : lanes[r][i];
        FKV_UNROLL
        for (int v = 0; v < n_units * UNIT_VECS; v++) {
            vf x = vf_load(row + v * VL);
            FKV_UNROLL
            for (int i = 0; i < BLOCK_TOKENS; i++) sum[i] = vf_fma(x, k[i][v], sum[i]);
        }
        if (last) {
            vf_sums(sum, scores + (size_t)r * FKV_TILE_TOKENS + token);
        } else {
            FKV_UNROLL
            for (int i = 0; i < BLOCK_TOKENS; i++) lanes[r][i] = sum[i];
        }
    }
}

FKV_INLINE void scores_form(int form, int group_units, const tile *t, uint32_t n_tokens, const float *q, uint32_t n_rows,
                            float *scores) {
    vf lanes[FKV_MAX_TILE_ROWS][BLOCK_TOKENS];
    for (uint32_t token = 0; token < n_tokens; token += BLOCK_TOKENS) {
        fkv_fetch_some(t->next, BLOCK_TOKENS);
        uint32_t unit = 0;
        for (; unit + CHUNK_UNITS <= t->n_units; unit += CHUNK_UNITS)
            scores_chunk(form, group_units, CHUNK_UNITS, t, token, unit, q, n_rows, lanes, scores);
        for (; unit < t->n_units; unit++) scores_chunk(form, 1, 1, t, token, unit, q, n_rows, lanes, scores);
    }
}

/* ---- values ---- */

FKV_INLINE void values_chunk(int form, int group_units, int n_block, int n_units, const tile *t, uint32_t token, uint32_t unit,
                             const float *p, uint32_t n_rows, float *out) {
    vf value[BLOCK_TOKENS][CHUNK_VECS];
    decode_block(form, group_units, n_block, n_units, t, token, unit, value);
    for (uint32_t r = 0; r < n_rows; r++) {
        float *row = out + ((size_t)r * t->n_units + unit) * 16;
        vf sum[CHUNK_VECS];
        FKV_UNROLL
        for (int v = 0; v < n_units * UNIT_VECS; v++) sum[v] = vf_load(row + v * VL);
        FKV_UNROLL
        for (int i = 0; i < n_block; i++) {
            vf weight = vf_set(p[(size_t)r * FKV_TILE_TOKENS + token + (uint32_t)i]);
            FKV_UNROLL
            for (int v = 0; v < n_units * UNIT_VECS; v++) sum[v] = vf_fma(weight, value[i][v], sum[v]);
        }
        FKV_UNROLL
        for (int v = 0; v < n_units * UNIT_VECS; v++) vf_store(row + v * VL, sum[v]);
    }
}

FKV_INLINE void values_block(int form, int group_units, int n_block, const tile *t, uint32_t token, const float *p,
                             uint32_t n_rows, float *out) {
    uint32_t unit = 0;
    for (; unit + CHUNK_UNITS <= t->n_units; unit += CHUNK_UNITS)
        values_chunk(form, group_units, n_block, CHUNK_UNITS, t, token, unit, p, n_rows, out);
    for (; unit < t->n_units; unit++) values_chunk(form, 1, n_block, 1, t, token, unit, p, n_rows, out);
}

/* Slots beyond n_tokens are not read, because they may hold arbitrary bits, including NaN. */
FKV_INLINE void values_form(int form, int group_units, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows,
                            float *out) {
    uint32_t token = 0;
    for (; token + BLOCK_TOKENS <= n_tokens; token += BLOCK_TOKENS) {
        fkv_fetch_some(t->next, BLOCK_TOKENS);
        values_block(form, group_units, BLOCK_TOKENS, t, token, p, n_rows, out);
    }
    for (; token < n_tokens; token++) values_block(form, group_units, 1, t, token, p, n_rows, out);
}

/* ---- prefill ---- */

/* Prefill: tokens are decoded once to floats in L1, and the accumulators of a block of query rows stay in registers. For each
 * (row, token) pair, the order of operations is the same as in the decode loops of this file. */

enum { SLICE_TOKENS = 16, SLICE_STEP = 4 /* tokens (for scores) or vectors (for values) per iteration of the inner loop */ };
_Static_assert(SLICE_STEP % BLOCK_TOKENS == 0, "a step must cover whole blocks of BLOCK_TOKENS tokens");

typedef struct slice {
    alignas(64) float x[SLICE_TOKENS][FKV_MAX_HEAD_DIM + 16]; /* padding places consecutive rows in different L1 sets */
} slice;

FKV_INLINE void slice_tokens(int form, int group_units, int n_block, const tile *t, uint32_t token, slice *s, uint32_t at) {
    vf value[BLOCK_TOKENS][CHUNK_VECS];
    uint32_t unit = 0;
    for (; unit + CHUNK_UNITS <= t->n_units; unit += CHUNK_UNITS) {
        decode_block(form, group_units, n_block, CHUNK_UNITS, t, token, unit, value);
        FKV_UNROLL
        for (int i = 0; i < n_block; i++) {
            FKV_UNROLL
            for (int v = 0; v < CHUNK_VECS; v++) vf_store(&s->x[at + (uint32_t)i][unit * 16 + (uint32_t)(v * VL)], value[i][v]);
        }
    }
    for (; unit < t->n_units; unit++) {
        decode_block(form, 1, n_block, 1, t, token, unit, value);
        FKV_UNROLL
        for (int i = 0; i < n_block; i++) {
            FKV_UNROLL
            for (int v = 0; v < UNIT_VECS; v++) vf_store(&s->x[at + (uint32_t)i][unit * 16 + (uint32_t)(v * VL)], value[i][v]);
        }
    }
}

/* Decodes n <= SLICE_TOKENS tokens, starting at `token`. Does not read past these tokens. */
FKV_INLINE void slice_open(int form, int group_units, const tile *t, uint32_t token, uint32_t n, slice *s) {
    uint32_t at = 0;
    for (; at + BLOCK_TOKENS <= n; at += BLOCK_TOKENS) slice_tokens(form, group_units, BLOCK_TOKENS, t, token + at, s, at);
    for (; at < n; at++) slice_tokens(form, group_units, 1, t, token + at, s, at);
}

/* Computes the scores of SLICE_STEP decoded tokens for n_rows query rows. n_rows is a compile-time constant. */
FKV_INLINE void slice_scores(int n_rows, const slice *s, uint32_t at, const float *q, uint32_t dim, float *scores) {
    vf sum[PREFILL_ROWS][SLICE_STEP];
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int i = 0; i < SLICE_STEP; i++) sum[r][i] = vf_set(0.0f);
    }
    for (uint32_t d = 0; d < dim; d += VL) {
        vf k[SLICE_STEP];
        FKV_UNROLL
        for (uint32_t i = 0; i < SLICE_STEP; i++) k[i] = vf_load(&s->x[at + i][d]);
        FKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vf x = vf_load(q + (size_t)r * dim + d);
            FKV_UNROLL
            for (int i = 0; i < SLICE_STEP; i++) sum[r][i] = vf_fma(x, k[i], sum[r][i]);
        }
    }
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int i = 0; i < SLICE_STEP; i += BLOCK_TOKENS) vf_sums(&sum[r][i], scores + r * FKV_TILE_TOKENS + i);
    }
}

FKV_INLINE void prefill_scores_form(int form, int group_units, const tile *t, uint32_t n_tokens, const float *q, uint32_t n_rows,
                                    float *scores, slice *s) {
    uint32_t dim = t->n_units * 16;
    for (uint32_t token = 0; token < n_tokens; token += SLICE_TOKENS) {
        fkv_fetch_some(t->next, SLICE_TOKENS);
        /* Slots beyond n_tokens can be read; their scores are ignored. */
        slice_open(form, group_units, t, token, SLICE_TOKENS, s);
        uint32_t r = 0;
        for (; r + PREFILL_ROWS <= n_rows; r += PREFILL_ROWS)
            for (uint32_t i = 0; i < SLICE_TOKENS; i += SLICE_STEP)
                slice_scores(PREFILL_ROWS, s, i, q + (size_t)r * dim, dim, scores + (size_t)r * FKV_TILE_TOKENS + token + i);
        for (; r < n_rows; r++)
            for (uint32_t i = 0; i < SLICE_TOKENS; i += SLICE_STEP)
                slice_scores(1, s, i, q + (size_t)r * dim, dim, scores + (size_t)r * FKV_TILE_TOKENS + token + i);
    }
}

/* Adds the weighted values of n decoded tokens to n_vecs vectors in each of n_rows output rows. n_vecs and n_rows are
 * compile-time constants. Rows of the softmax weights p are `stride` floats apart. */
FKV_INLINE void slice_values(int n_rows, int n_vecs, const slice *s, uint32_t n, uint32_t d, const float *p, size_t stride,
                             float *out, uint32_t dim) {
    vf sum[PREFILL_ROWS][SLICE_STEP];
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int v = 0; v < n_vecs; v++) sum[r][v] = vf_load(out + (size_t)r * dim + d + v * VL);
    }
    for (uint32_t i = 0; i < n; i++) {
        vf value[SLICE_STEP];
        FKV_UNROLL
        for (int v = 0; v < n_vecs; v++) value[v] = vf_load(&s->x[i][d + (uint32_t)(v * VL)]);
        FKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vf weight = vf_set(p[(size_t)r * stride + i]);
            FKV_UNROLL
            for (int v = 0; v < n_vecs; v++) sum[r][v] = vf_fma(weight, value[v], sum[r][v]);
        }
    }
    FKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        FKV_UNROLL
        for (int v = 0; v < n_vecs; v++) vf_store(out + (size_t)r * dim + d + v * VL, sum[r][v]);
    }
}

FKV_INLINE void slice_values_rows(int n_rows, const slice *s, uint32_t n, const float *p, size_t stride, float *out,
                                  uint32_t dim) {
    uint32_t d = 0;
    for (; d + SLICE_STEP * VL <= dim; d += SLICE_STEP * VL) slice_values(n_rows, SLICE_STEP, s, n, d, p, stride, out, dim);
    for (; d < dim; d += VL) slice_values(n_rows, 1, s, n, d, p, stride, out, dim);
}

FKV_INLINE void slice_values_all(const slice *s, uint32_t n, const float *p, size_t stride, uint32_t n_rows, float *out,
                                 uint32_t dim) {
    uint32_t r = 0;
    for (; r + PREFILL_ROWS <= n_rows; r += PREFILL_ROWS)
        slice_values_rows(PREFILL_ROWS, s, n, p + r * stride, stride, out + (size_t)r * dim, dim);
    for (; r + 2 <= n_rows; r += 2) slice_values_rows(2, s, n, p + r * stride, stride, out + (size_t)r * dim, dim);
    for (; r < n_rows; r++) slice_values_rows(1, s, n, p + r * stride, stride, out + (size_t)r * dim, dim);
}

FKV_INLINE void prefill_values_form(int form, int group_units, const tile *t, uint32_t n_tokens, const float *p, uint32_t n_rows,
                                    float *out, slice *s) {
    uint32_t dim = t->n_units * 16;
    for (uint32_t token = 0; token < n_tokens; token += SLICE_TOKENS) {
        uint32_t n = fkv_min_u32(SLICE_TOKENS, n_tokens - token);
        fkv_fetch_some(t->next, SLICE_TOKENS);
        slice_open(form, group_units, t, token, n, s);
        slice_values_all(s, n, p + token, FKV_TILE_TOKENS, n_rows, out, dim);
    }
}

/* ---- loops by storage form ---- */

/* Each storage form has its own compiled loop. A scale group of 32 values has 2 units of 16 values; a larger group covers a whole
 * chunk. */

enum { GROUP_32_UNITS = CHUNK_UNITS < 2 ? CHUNK_UNITS : 2 };

static void float_prepare(const fkv_codec *codec, const float *q, uint32_t n_rows,
                          void *prepared) { /* nothing to prepare, because float kernels read q directly */
    (void)codec, (void)q, (void)n_rows, (void)prepared;
}

/* The caller passes the buffer s for all storage forms, because one buffer per form would overflow the stack. */
FKV_INLINE void float_scores(int form, int group_units, const tile *t, slice *s, uint32_t n_tokens, const float *q,
                             uint32_t n_rows, float *scores) {
    if (n_rows < PREFILL_MIN_ROWS)
        scores_form(form, group_units, t, n_tokens, q, n_rows, scores);
    else
        prefill_scores_form(form, group_units, t, n_tokens, q, n_rows, scores, s);
}

FKV_INLINE void float_values(int form, int group_units, const tile *t, slice *s, uint32_t n_tokens, const float *p,
                             uint32_t n_rows, float *out) {
    if (n_rows < PREFILL_MIN_ROWS)
        values_form(form, group_units, t, n_tokens, p, n_rows, out);
    else
        prefill_values_form(form, group_units, t, n_tokens, p, n_rows, out, s);
}

static void half_scores(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                        const float *q, const void *prepared, uint32_t n_rows, float *scores) {
    (void)prepared;
    tile t;
    slice s;
    tile_begin(&t, codec, part, next);
    if (codec->type == FKV_BF16)
        float_scores(FORM_BF16, CHUNK_UNITS, &t, &s, n_tokens, q, n_rows, scores);
    else
        float_scores(FORM_F16, CHUNK_UNITS, &t, &s, n_tokens, q, n_rows, scores);
}

static void half_values(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                        const float *p, uint32_t n_rows, float *out) {
    tile t;
    slice s;
    tile_begin(&t, codec, part, next);
    if (codec->type == FKV_BF16)
        float_values(FORM_BF16, CHUNK_UNITS, &t, &s, n_tokens, p, n_rows, out);
    else
        float_values(FORM_F16, CHUNK_UNITS, &t, &s, n_tokens, p, n_rows, out);
}

FKV_INLINE void affine_scores(int form, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                              uint32_t n_tokens, const float *q, uint32_t n_rows, float *scores) {
    tile t;
    slice s;
    tile_open(&t, codec, part, next, n_tokens);
    if (codec->group == 32)
        float_scores(form, GROUP_32_UNITS, &t, &s, n_tokens, q, n_rows, scores);
    else
        float_scores(form, CHUNK_UNITS, &t, &s, n_tokens, q, n_rows, scores);
}

FKV_INLINE void affine_values(int form, const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,
                              uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {
    tile t;
    slice s;
    tile_open(&t, codec, part, next, n_tokens);
    if (codec->group == 32)
        float_values(form, GROUP_32_UNITS, &t, &s, n_tokens, p, n_rows, out);
    else
        float_values(form, CHUNK_UNITS, &t, &s, n_tokens, p, n_rows, out);
}

/* Defines the float kernels of one affine bit width, for instruction sets that have no integer kernels for this width. */
#define AFFINE_FLOATS(bits)                                                                                                      \
    static void affine_scores_##bits(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,            \
                                     uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {  \
        (void)prepared;                                                                                                          \
        affine_scores(FORM_##bits, codec, part, next, n_tokens, q, n_rows, scores);                                              \
    }                                                                                                                            \
    static void affine_values_##bits(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,            \
                                     uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {                           \
        affine_values(FORM_##bits, codec, part, next, n_tokens, p, n_rows, out);                                                 \
    }                                                                                                                            \
    _Static_assert(FORM_##bits == (bits), "")

AFFINE_FLOATS(2);

/* Defines the float kernels of one codebook bit width: one scale per row and no bias. */
#define TURBO_FLOATS(bits)                                                                                                       \
    static void turbo_scores_##bits(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,             \
                                    uint32_t n_tokens, const float *q, const void *prepared, uint32_t n_rows, float *scores) {   \
        (void)prepared;                                                                                                          \
        affine_scores(FORM_BOOK + (bits), codec, part, next, n_tokens, q, n_rows, scores);                                       \
    }                                                                                                                            \
    static void turbo_values_##bits(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next,             \
                                    uint32_t n_tokens, const float *p, uint32_t n_rows, float *out) {                            \
        affine_values(FORM_BOOK + (bits), codec, part, next, n_tokens, p, n_rows, out);                                          \
    }                                                                                                                            \
    _Static_assert((bits) <= 4, "")

/* ---- softmax ---- */

/* NaN must propagate and never become a plausible weight. On x86, min and max return the second operand if either operand is NaN.
 * A bound is therefore passed as the first operand if NaN must propagate, and as the second operand if the bound must replace
 * NaN. */

/* Sets *n to an integer and returns y such that exp(x) = y * 2^n. The relative error is at most 2e-7 + |x| * 2e-8. n is x * log2
 * e, rounded to an integer, and y is a minimax polynomial of 2^-r with r = n - x * log2 e and |r| <= 1/2. y is exactly 1 for x =
 * 0. */
FKV_INLINE vf exp_factor(vf x, vf *n) {
    const vf rounder = vf_set(12582912.0f); /* 1.5 * 2^23: adding this constant rounds a small value to an integer */
    *n = vf_sub(vf_fma(x, vf_set(1.44269504088896341f), rounder), rounder);
    vf r = vf_fma(x, vf_set(-1.44269504088896341f), *n);
    vf y = vf_set(-1.32647285e-3f);
    y = vf_fma(y, r, vf_set(9.67151299e-3f));
    y = vf_fma(y, r, vf_set(-5.55073358e-2f));
    y = vf_fma(y, r, vf_set(2.40222424e-1f));
    y = vf_fma(y, r, vf_set(-6.93147004e-1f));
    return vf_fma(y, r, vf_set(1.0f));
}

/* Computes exp(x) for x <= 88. The result is 0 for x < -87. */
FKV_INLINE vf vf_exp(vf x) {
    vf n;
    vf y = exp_factor(vf_max(vf_set(-87.0f), x), &n);
    return vf_zero_below(x, vf_set(-87.0f), vf_times_pow2(y, n));
}

static float exp_one(float x) {
    float lanes[VL];
    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

/* Computes cap * tanh(x / cap) for any positive cap, even a denormal. For |x / cap| < 5/8, the result is x times the Cephes
 * polynomial, so that a cap far above the score leaves the score unchanged. Otherwise, the result is cap * (1 - 2 / (exp(2 * x /
 * cap) + 1)), which would suffer from cancellation for small x. */
FKV_INLINE vf vf_softcap(vf x, float cap) {
    vf y = vf_div(x, vf_set(cap));
    vf z = vf_mul(y, y);
    vf small = vf_set(-5.70498872745e-3f);
    small = vf_fma(small, z, vf_set(2.06390887954e-2f));
    small = vf_fma(small, z, vf_set(-5.37397155531e-2f));
    small = vf_fma(small, z, vf_set(1.33314422036e-1f));
    small = vf_fma(small, z, vf_set(-3.33332819422e-1f));
    small = vf_fma(vf_mul(small, z), x, x);
    y = vf_min(vf_set(20.0f), vf_max(vf_set(-20.0f), y));
    vf tanh = vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), vf_add(vf_exp(vf_add(y, y)), vf_set(1.0f))));
    return vf_if_below(z, vf_set(0.390625f), small, vf_mul(tanh, vf_set(cap)));
}

static void scale_row(float *row, uint32_t dim, float factor) {
    vf f = vf_set(factor);
    for (uint32_t d = 0; d < dim; d += VL) vf_store(row + d, vf_mul(vf_load(row + d), f));
}

/* Maximum amount by which a score may exceed fkv_softmax.max. The state is rescaled only if a score exceeds fkv_softmax.max by
 * more than this amount, so weights are at most exp(8). */
static const float MAX_SLACK = 8.0f;

static void kernel_softmax(float *scores, uint32_t width, const fkv_row_mask *masks, uint32_t n_rows, uint32_t dim, float softcap,
                           fkv_softmax state) {
    for (uint32_t r = 0; r < n_rows; r++) {
        float *s = scores + (size_t)r * FKV_TILE_TOKENS;
        fkv_row_mask mask = masks[r];
        if (mask.end == 0 || (mask.begin >= mask.end && mask.sinks == 0)) { /* no visible token */
            memset(s, 0, width * sizeof *s);
            continue;
        }
        if (softcap > 0.0f)
            for (uint32_t t = 0; t < width; t += VL) vf_store(s + t, vf_softcap(vf_load(s + t), softcap));
        for (uint32_t t = mask.sinks; t < mask.begin && t < width; t++) s[t] = -INFINITY;
        for (uint32_t t = mask.end; t < width; t++) s[t] = -INFINITY;

        vf max = vf_set(-INFINITY);
        for (uint32_t t = 0; t < width; t += VL) max = vf_max(vf_load(s + t), max);
        float now = vf_reduce_max(max);
        if (now > state.max[r] + MAX_SLACK) {
            float factor = exp_one(state.max[r] - now);
            state.sum[r] *= factor;
            scale_row(state.out + (size_t)r * dim, dim, factor);
            state.max[r] = now;
        }
        vf base = vf_set(state.max[r]);
        vf sum = vf_set(0.0f);
        for (uint32_t t = 0; t < width; t += VL) {
            vf p = vf_exp(vf_sub(vf_load(s + t), base));
            vf_store(s + t, p);
            sum = vf_add(sum, p);
        }
        state.sum[r] += vf_reduce_add(sum);
    }
}

static uint16_t kernel_largest(const uint8_t *halves, size_t n) {
    uint16_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, halves + 2 * i, sizeof half);
        half &= 0x7fff;
        largest = half > largest ? half : largest;
    }
    return largest;
}

static void kernel_fold(fkv_softmax into, fkv_softmax split, uint32_t n_rows, uint32_t dim) {
    for (uint32_t r = 0; r < n_rows; r++) {
        if (split.max[r] == -INFINITY && split.sum[r] == 0.0f) continue; /* no visible token */
        float max = into.max[r] > split.max[r] ? into.max[r] : split.max[r];
        float a = exp_one(into.max[r] - max);
        float b = exp_one(split.max[r] - max);
        into.sum[r] = into.sum[r] * a + split.sum[r] * b;
        into.max[r] = max;
        float *to = into.out + (size_t)r * dim;
        const float *from = split.out + (size_t)r * dim;
        vf va = vf_set(a);
        vf vb = vf_set(b);
        for (uint32_t d = 0; d < dim; d += VL) vf_store(to + d, vf_fma(vf_load(from + d), vb, vf_mul(vf_load(to + d), va)));
    }
}

/* ---- encoding ---- */

FKV_INLINE uint64_t bytes8(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Packs n codes, given as one byte each, to `bits` bits each. Adjacent codes are merged pairwise until the bits of eight codes
 * are contiguous. */
static void pack_row_codes(uint32_t bits, const uint8_t *codes, uint32_t n, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, codes, n);
        return;
    }
    for (uint32_t i = 0; i < n; i += 8) {
        uint64_t x = bytes8(codes + i);
        uint32_t word;
        if (bits == 4) {
            x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
            x = (x | x >> 8) & 0x0000ffff0000ffffu;
            word = (uint32_t)(x | x >> 16);
            memcpy(out + i / 2, &word, 4);
        } else {
            x = (x | x >> 6) & 0x000f000f000f000fu;
            x = (x | x >> 12) & 0x000000ff000000ffu;
            word = (uint32_t)(x | x >> 24);
            memcpy(out + i / 4, &word, 2);
        }
    }
}

/* Quantizes 16 values to codes, which are returned as floats. `place` receives the positions (x - bias) / scale, which are the
 * codes before rounding and clamping. */
FKV_INLINE void code_unit(const float *x, fkv_affine line, float n_bins, vf place[UNIT_VECS], vf code[UNIT_VECS]) {
    for (int v = 0; v < UNIT_VECS; v++) {
        place[v] = vf_div(vf_sub(vf_load(x + v * VL), vf_set(line.bias)), vf_set(line.scale));
        code[v] = vf_min(vf_max(vf_round(place[v]), vf_set(0.0f)), vf_set(n_bins));
    }
}

static fkv_affine refit_line(const fkv_codec *codec, const float *x, fkv_affine line, float n_bins) {
    vf zero = vf_set(0.0f);
    vf c[UNIT_VECS];
    vf cc[UNIT_VECS];
    vf p[UNIT_VECS];
    vf cp[UNIT_VECS];
    for (int v = 0; v < UNIT_VECS; v++) c[v] = cc[v] = p[v] = cp[v] = zero;
    for (uint32_t d = 0; d < codec->group; d += FKV_CODEC_LANES) {
        vf place[UNIT_VECS];
        vf code[UNIT_VECS];
        code_unit(x + d, line, n_bins, place, code);
        for (int v = 0; v < UNIT_VECS; v++) {
            c[v] = vf_add(c[v], code[v]);
            cc[v] = vf_add(cc[v], vf_mul(code[v], code[v]));
            p[v] = vf_add(p[v], place[v]);
            cp[v] = vf_add(cp[v], vf_mul(code[v], place[v]));
        }
    }
    fkv_refit sums;
    for (int v = 0; v < UNIT_VECS; v++) {
        vf_store(sums.c + v * VL, c[v]);
        vf_store(sums.cc + v * VL, cc[v]);
        vf_store(sums.p + v * VL, p[v]);
        vf_store(sums.cp + v * VL, cp[v]);
    }
    return fkv_codec_refit(codec, line, &sums);
}

/* Vector version of the row encoder in src/codec/affine.c, 16 values at a time. */
static void affine_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    uint8_t codes[FKV_MAX_HEAD_DIM];
    vf limit = vf_set(fkv_codec_limit(codec->type));
    vf minus_limit = vf_sub(vf_set(0.0f), limit);
    float n_bins = (float)((1u << codec->bits) - 1);
    uint32_t g = 0;
    for (uint32_t start = 0; start < codec->dim; start += codec->group, g++) {
        vf low = vf_set(INFINITY);
        vf high = vf_set(-INFINITY);
        float clean[128];
        for (uint32_t d = 0; d < codec->group; d += VL) {
            vf value = vf_min(vf_max(vf_not_nan(vf_load(x + start + d)), minus_limit), limit);
            vf_store(clean + d, value);
            low = vf_min(low, value);
            high = vf_max(high, value);
        }
        fkv_affine line = fkv_codec_line(codec, vf_reduce_min(low), vf_reduce_max(high), n_bins);
        for (int i = 0; codec->fitted && i < FKV_REFITS; i++) line = refit_line(codec, clean, line, n_bins);
        for (uint32_t d = 0; d < codec->group; d += 16) {
            vf place[UNIT_VECS];
            vf code[UNIT_VECS];
            code_unit(clean + d, line, n_bins, place, code);
            vf_store_u8(code, codes + start + d);
        }
        uint16_t half = fkv_f32_to_half(codec->type, line.scale);
        memcpy(part[FKV_PART_SCALES] + 2 * (size_t)g, &half, 2);
        half = fkv_f32_to_half(codec->type, line.bias);
        memcpy(part[FKV_PART_BIASES] + 2 * (size_t)g, &half, 2);
    }
    pack_row_codes(codec->bits, codes, codec->dim, part[FKV_PART_CODES]);
}

/* Computes the scale of a row from the squares of x / largest, summed in 16 lanes. */
static float turbo_scale_from(const fkv_codec *codec, const float *x, float largest) {
    vf sums[UNIT_VECS];
    float lanes[FKV_TURBO_LANES];
    if (!(largest > 0.0f)) return 0.0f;
    for (int v = 0; v < UNIT_VECS; v++) sums[v] = vf_set(0.0f);
    for (uint32_t d = 0; d < codec->dim; d += FKV_TURBO_LANES) {
        for (int v = 0; v < UNIT_VECS; v++) {
            vf share = vf_div(vf_load(x + d + v * VL), vf_set(largest));
            sums[v] = vf_add(sums[v], vf_mul(share, share));
        }
    }
    for (int v = 0; v < UNIT_VECS; v++) vf_store(lanes + v * VL, sums[v]);
    return fkv_turbo_scale(codec, largest, lanes);
}

/* Vector version of the row encoder in src/codec/turbo.c, 16 values at a time. */
static void turbo_encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    const int8_t *value = fkv_turbo_books[codec->bits].value;
    vf limit = vf_set(fkv_codec_limit(codec->type));
    vf minus_limit = vf_sub(vf_set(0.0f), limit);
    vf high = vf_set(0.0f);
    float clean[FKV_MAX_HEAD_DIM];
    uint8_t codes[FKV_MAX_HEAD_DIM] = {0};
    for (uint32_t d = 0; d < codec->dim; d += VL) {
        vf number = vf_min(vf_max(vf_not_nan(vf_load(x + d)), minus_limit), limit);
        vf_store(clean + d, number);
        high = vf_max(high, vf_max(number, vf_sub(vf_set(0.0f), number)));
    }
    float scale = turbo_scale_from(codec, clean, vf_reduce_max(high));
    vf divisor = vf_set(fkv_turbo_divisor(scale));
    for (uint32_t d = 0; d < codec->dim; d += 16) {
        vf code[UNIT_VECS];
        for (int v = 0; v < UNIT_VECS; v++) {
            vf place = vf_div(vf_load(clean + d + v * VL), divisor);
            code[v] = vf_set(0.0f);
            for (uint32_t i = 0; i + 1 < 1u << codec->bits; i++) {
                vf middle = vf_set(0.5f * (float)(value[i] + value[i + 1]));
                code[v] = vf_add(code[v], vf_if_below(middle, place, vf_set(1.0f), vf_set(0.0f)));
            }
        }
        vf_store_u8(code, codes + d);
    }
    fkv_turbo_pack(codec, codes, part[FKV_PART_CODES]);
    uint16_t half = fkv_f32_to_half(codec->type, scale);
    memcpy(part[FKV_PART_SCALES], &half, 2);
}

/* Vector kernels need no set-up, so enter() and leave() are empty. */
FKV_INLINE void kernel_enter(const fkv_codec *k_codec, uint32_t n_rows) { (void)k_codec, (void)n_rows; }
FKV_INLINE void kernel_leave(void) {}

/* ---- codec table ---- */

#include "seal_body.h"
#include "sealed_body.h"

#define AFFINE_CODEC(bits) {FKV_CODEC_AFFINE, bits, float_prepare, affine_scores_##bits, affine_values_##bits, affine_encode}
#define TURBO_CODEC(bits) {FKV_CODEC_TURBO, bits, float_prepare, turbo_scores_##bits, turbo_values_##bits, turbo_encode}
#define TURBO_CODECS TURBO_CODEC(4), TURBO_CODEC(3), TURBO_CODEC(2)
#define HALF_CODEC {FKV_CODEC_HALF, 16, float_prepare, half_scores, half_values, fkv_codec_encode}

/* Defines the kernel table of an instruction set that uses the float kernels for every codec. */
#define FLOAT_KERNELS(isa)                                                                                                       \
    AFFINE_FLOATS(8);                                                                                                            \
    AFFINE_FLOATS(4);                                                                                                            \
    TURBO_FLOATS(4);                                                                                                             \
    TURBO_FLOATS(3);                                                                                                             \
    TURBO_FLOATS(2);                                                                                                             \
    static const fkv_codec_kernels codecs[] = {                                                                                  \
        AFFINE_CODEC(8), AFFINE_CODEC(4), AFFINE_CODEC(2), TURBO_CODECS, HALF_CODEC, SEALED_CODECS, {0}};                        \
    const struct fkv_cpu_kernels fkv_kernels_##isa = {#isa,           codecs,         kernel_enter, kernel_leave,                \
                                                      kernel_softmax, kernel_largest, kernel_fold,  kernel_seal}
