/* The product of panels of at most four bits with one block of tokens over AMX's bfloat16 tiles, with the bits of product_vnni.h.
 *
 * Codes below 16 and the two bytes of an activation are whole numbers that bfloat16 has exactly, the high byte times 256 too; a
 * unit's sum of their products is below 15 * 32 * (127 * 256 + 128) < 2^24, so that every partial sum is a float without
 * rounding, in any order. One tile then has what two tiles of integers had to be joined to and converted from.
 *
 * A = the high or the low bytes of the tokens x a unit of columns; B = the unit's codes. Both have the columns of a quad in the
 * order 0 2 1 3, which is how pairs of codes lie in the halves of a dword. A span of the tokens' columns stays in L1 while all
 * panels pass over it, and a panel's codes are unpacked some units before a tile takes them: vectors unpack and add while the
 * tiles sum. What has been summed before the span waits in out, as the same floats.
 */
#ifndef FKV_PRODUCT_AMX_BF16_H
#define FKV_PRODUCT_AMX_BF16_H

#include "../../base/simd/amx_tiles.h"
#include "product_vnni.h"

enum {
    BF16_UNITS = 16,    /* of a span, at most: 32 KiB of tokens */
    BF16_IN_FLIGHT = 4, /* tiles: a sum is ready three units after it was begun */
    BF16_AHEAD = 6,     /* units between unpacking and adding */
    BF16_RING = 8,      /* unpacked units that are kept */
    BF16_PAIRS = UNIT_NUMBERS / 2,
    BF16_LEAST = 12 /* fewer tokens are quicker on vectors */
};

typedef uint16_t bf16_codes[BF16_PAIRS][2 * FKV_PANEL_ROWS];

/* A span of the tokens; those that are not there are zero. */
typedef struct bf16_span {
    alignas(64) uint16_t high[BF16_UNITS][FKV_BLOCK_TOKENS][UNIT_NUMBERS]; /* times 256 */
    alignas(64) uint16_t low[BF16_UNITS][FKV_BLOCK_TOKENS][UNIT_NUMBERS];
    float step[BF16_UNITS][FKV_BLOCK_TOKENS];
    float sum[BF16_UNITS][FKV_BLOCK_TOKENS];
    uint32_t first; /* unit */
    uint32_t n_units;
    uint32_t n_tokens;
} bf16_span;

typedef struct bf16_sums {
    alignas(64) float dot[FKV_BLOCK_TOKENS][FKV_PANEL_ROWS];
} bf16_sums;

/* Whether sums of the kind are exact. */
FKV_INLINE bool bf16_has_kind(fkv_panel_layout layout) {
    return layout.group == UNIT_NUMBERS && layout.bits <= 4 && !layout.table;
}

/* 0 to 3: sums; 4, 5: high and low bytes; 6: codes. */
static void bf16_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, FKV_BLOCK_TOKENS, FKV_TILE_BYTES);
    fkv_tile_shape(&shapes, 6, BF16_PAIRS, FKV_TILE_BYTES);
    fkv_tiles_open(&shapes);
}

/* ahead: to the same span of the next panel, which comes from memory meanwhile. */
FKV_INLINE void bf16_unpack(fkv_panel_layout layout, const uint8_t *lines, size_t ahead, bf16_codes codes) {
    const __m512i bf16 = _mm512_set_epi16(/* 15 to 0, twice: an index has five bits */
                                          0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
                                          0x4080, 0x4040, 0x4000, 0x3f80, 0, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120,
                                          0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
    __m512i quads[UNIT_QUADS];
    FKV_UNROLL
    for (uint32_t line = 0; line < layout.bits; line++) FKV_PREFETCH(lines + (size_t)line * FKV_LINE_BYTES + ahead);
    load_quads(layout, lines, _mm512_setzero_si512(), quads);
    FKV_UNROLL
    for (int j = 0; j < UNIT_QUADS; j++) {
        _mm512_store_si512(codes[2 * j], _mm512_permutexvar_epi16(quads[j], bf16));
        _mm512_store_si512(codes[2 * j + 1], _mm512_permutexvar_epi16(_mm512_srli_epi16(quads[j], 8), bf16));
    }
    fkv_tiles_see_stores();
}

/* 32 signed bytes times a power of two. */
FKV_INLINE __m512i bf16_of_bytes(const int8_t *bytes, vf factor) {
    const __m512i order = _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33, 31, 27, 29, 25, 23, 19,
                                           21, 17, 15, 11, 13, 9, 7, 3, 5, 1); /* upper words of dwords 0 2 1 3, 4 6 5 7, ... */
    vf first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    vf second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes + 1)));
    return _mm512_permutex2var_epi16(_mm512_castps_si512(vf_mul(first, factor)), order,
                                     _mm512_castps_si512(vf_mul(second, factor)));
}

/* s->first and s->n_units are set. */
static void bf16_span_open(const token_block *block, bf16_span *s) {
    s->n_tokens = block->n_tokens;
    for (uint32_t u = 0; u < s->n_units; u++) {
        const unit_bytes *bytes = block->bytes + (size_t)(s->first + u) * block->n_tokens;
        const unit_facts *facts = block->facts + (size_t)(s->first + u) * block->n_tokens;
        for (uint32_t t = 0; t < block->n_tokens; t++) {
            _mm512_store_si512(s->high[u][t], bf16_of_bytes(bytes[t].high, vf_set(256.0f)));
            _mm512_store_si512(s->low[u][t], bf16_of_bytes(bytes[t].low, vf_set(1.0f)));
            s->step[u][t] = facts[t].step;
            s->sum[u][t] = facts[t].both;
        }
        for (uint32_t t = block->n_tokens; t < FKV_BLOCK_TOKENS; t++) {
            _mm512_store_si512(s->high[u][t], _mm512_setzero_si512());
            _mm512_store_si512(s->low[u][t], _mm512_setzero_si512());
            s->step[u][t] = s->sum[u][t] = 0.0f;
        }
    }
    fkv_tiles_see_stores();
}

#define BF16_START(tile)                                                                                                         \
    _tile_zero(tile);                                                                                                            \
    _tile_dpbf16ps(tile, 4, 6);                                                                                                  \
    _tile_dpbf16ps(tile, 5, 6)

/* Tile numbers are part of the instruction, so that each has its own lines. */
FKV_INLINE void bf16_start(int tile, bf16_codes codes, const bf16_span *s, uint32_t u) {
    _tile_loadd(6, codes, FKV_TILE_BYTES);
    _tile_loadd(4, s->high[u], FKV_TILE_BYTES);
    _tile_loadd(5, s->low[u], FKV_TILE_BYTES);
    if (tile == 0) {
        BF16_START(0);
    } else if (tile == 1) {
        BF16_START(1);
    } else if (tile == 2) {
        BF16_START(2);
    } else {
        BF16_START(3);
    }
}

FKV_INLINE void bf16_store(int tile, bf16_sums *sums) {
    if (tile == 0)
        _tile_stored(0, sums->dot, FKV_TILE_BYTES);
    else if (tile == 1)
        _tile_stored(1, sums->dot, FKV_TILE_BYTES);
    else if (tile == 2)
        _tile_stored(2, sums->dot, FKV_TILE_BYTES);
    else
        _tile_stored(3, sums->dot, FKV_TILE_BYTES);
    fkv_tiles_see_stores();
}

/* As int_product_group() ends. */
FKV_INLINE void bf16_add(fkv_panel_layout layout, const uint8_t *halves, size_t ahead, const bf16_span *s, const bf16_sums *sums,
                         uint32_t u, vf *lanes) {
    vf scale;
    vf bias;
    load_affine(layout, halves + u * fkv_panel_group_bytes(layout), &scale, &bias);
    FKV_PREFETCH(halves + u * fkv_panel_group_bytes(layout) + ahead);
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        lanes[t] = vf_fma(bias, vf_set(s->sum[u][t]), lanes[t]);
        lanes[t] = vf_fma(vf_load(sums->dot[t]), vf_mul(scale, vf_set(s->step[u][t])), lanes[t]);
    }
}

/* One span of one panel. In its turn a unit is added, which was stored a turn ago and has arrived; the next one is stored, which
 * was begun three turns ago; the one whose tile is free begins, and one further on is unpacked. */
FKV_INLINE void bf16_run_span(fkv_panel_layout layout, const uint8_t *panel, uint32_t n_cols, const bf16_span *s, float *out,
                              size_t out_stride) {
    const uint32_t n = s->n_units;
    const size_t line_bytes = (size_t)layout.bits * FKV_LINE_BYTES;
    const size_t panel_bytes = fkv_panel_bytes(layout, n_cols);
    const uint8_t *lines = panel + s->first * line_bytes;
    const uint8_t *halves = panel + fkv_panel_code_bytes(layout, n_cols) + s->first * fkv_panel_group_bytes(layout);
    alignas(64) bf16_codes ring[BF16_RING];
    bf16_sums sums[2];
    vf lanes[FKV_BLOCK_TOKENS];
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        bool there = s->first > 0 && (uint32_t)t < s->n_tokens;
        lanes[t] = there ? vf_load(out + (size_t)t * out_stride) : vf_set(0.0f);
    }
    for (uint32_t u = 0; u < fkv_min_u32(n, BF16_AHEAD); u++) bf16_unpack(layout, lines + u * line_bytes, panel_bytes, ring[u]);
    FKV_UNROLL
    for (int i = 0; i < BF16_IN_FLIGHT; i++)
        if ((uint32_t)i < n) bf16_start(i, ring[i], s, (uint32_t)i);
    bf16_store(0, &sums[0]);
    for (uint32_t from = 0; from < n; from += BF16_IN_FLIGHT) {
        FKV_UNROLL
        for (int i = 0; i < BF16_IN_FLIGHT; i++) {
            uint32_t u = from + (uint32_t)i;
            if (u >= n) break;
            if (u + BF16_AHEAD < n)
                bf16_unpack(layout, lines + (u + BF16_AHEAD) * line_bytes, panel_bytes, ring[(u + BF16_AHEAD) % BF16_RING]);
            if (u + BF16_IN_FLIGHT < n) bf16_start(i, ring[(u + BF16_IN_FLIGHT) % BF16_RING], s, u + BF16_IN_FLIGHT);
            if (u + 1 < n) bf16_store((i + 1) % BF16_IN_FLIGHT, &sums[(i + 1) % 2]);
            bf16_add(layout, halves, panel_bytes, s, &sums[i % 2], u, lanes);
        }
    }
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++)
        if ((uint32_t)t < s->n_tokens) vf_store(out + (size_t)t * out_stride, lanes[t]);
}

FKV_INLINE void bf16_product_block(fkv_panel_layout layout, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                   float *out, size_t out_stride) {
    const uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    const uint32_t n_units = fkv_ceil_div(all_units, fkv_ceil_div(all_units, BF16_UNITS)); /* spans of about the same size */
    const token_block block = block_at(in, token);
    bf16_span span;
    bf16_tiles_open();
    for (uint32_t unit = 0; unit < all_units; unit += n_units) {
        span.first = unit;
        span.n_units = fkv_min_u32(n_units, all_units - unit);
        bf16_span_open(&block, &span);
        for (uint32_t i = 0; i < p->n_panels; i++)
            bf16_run_span(layout, p->first + i * p->panel_bytes, p->n_cols, &span, out + (size_t)i * FKV_PANEL_ROWS, out_stride);
    }
    fkv_tiles_close();
}

#endif
