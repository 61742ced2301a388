/* The product of panels of at most four bits with blocks of tokens over AMX's bfloat16 tiles, with the bits of product_vnni.h.
 *
 * Codes below 16 and the two bytes of an activation are whole numbers that bfloat16 has exactly, times a power of two as well; a
 * unit's sum of their products is below 15 * 32 * (127 * 256 + 128) < 2^24 steps, so that every partial sum is a float without
 * rounding, in any order. One tile then has dot * step, where two tiles of integers had to be joined, converted and multiplied.
 *
 * A = the high or the low bytes of the tokens x a unit of columns, prepared once for all panels; B = the unit's codes. Both have
 * the columns of a quad in the order 0 2 1 3, which is how pairs of codes lie in the halves of a dword. A span of the tokens'
 * columns stays in L1 while panels pass over it, and they do so without a pause: the tiles sum the next panel's first units while
 * vectors add the last ones of this. One block of tokens unpacks codes some units before a tile takes them, more blocks share
 * what was unpacked of some panels. What has been summed before the span waits in out, as the same floats.
 *
 * 16 tokens x 16 rows x 32 columns in cache take 75 cycles of the clock, of more blocks each 70. With the tokens' tiles made in
 * every item, a pause after every panel and the steps as factors of their own it was 100 to 130; with tiles of bytes 95 to 110.
 */
#ifndef FKV_PRODUCT_AMX_BF16_H
#define FKV_PRODUCT_AMX_BF16_H

#include "../../base/simd/amx_tiles.h"
#include "product_vnni.h"

enum {
    BF16_UNITS = 10,    /* of a span, at most: 20 KiB of tokens */
    BF16_PANELS = 4,    /* that several blocks share: 40 KiB */
    BF16_IN_FLIGHT = 4, /* tiles: a sum is ready three units after it was begun */
    BF16_AHEAD = 6,     /* units between unpacking and adding */
    BF16_RING = 8,      /* unpacked units that are kept; twice as many are slower */
    BF16_PAIRS = UNIT_NUMBERS / 2,
    BF16_LEAST = 12 /* fewer tokens are quicker on vectors */
};

/* As CODES, of at most four bits: the steps of the smallest numbers would not be floats otherwise. */
static const float BF16_CODES = 0x1p9f;

typedef uint16_t bf16_codes[BF16_PAIRS][2 * FKV_PANEL_ROWS];

/* A unit of a block of tokens as tiles take it. */
typedef struct bf16_unit {
    uint16_t high[FKV_BLOCK_TOKENS][UNIT_NUMBERS]; /* times 256 */
    uint16_t low[FKV_BLOCK_TOKENS][UNIT_NUMBERS];
} bf16_unit;

typedef struct bf16_floats {
    float of[FKV_BLOCK_TOKENS];
} bf16_floats;

_Static_assert(sizeof(bf16_unit) + sizeof(bf16_floats) == FKV_BLOCK_TOKENS * FKV_PREPARED_BYTES, "as it is counted");

/* One block of tokens. */
typedef struct bf16_block {
    bf16_unit *units;  /* [units] */
    bf16_floats *sums; /* [units] of the numbers; those of tokens that are not there are 0 */
    uint32_t n_tokens;
} bf16_block;

typedef struct bf16_sums {
    alignas(64) float dot[FKV_BLOCK_TOKENS][FKV_PANEL_ROWS]; /* times the step, / BF16_CODES */
} bf16_sums;

/* Whether sums of the kind are exact. */
FKV_INLINE bool bf16_has_kind(fkv_panel_layout layout) {
    return layout.group == UNIT_NUMBERS && layout.bits <= 4 && !layout.table;
}

FKV_INLINE bf16_block bf16_block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    size_t block = token / FKV_BLOCK_TOKENS;
    bf16_unit *units = in->prepared;
    bf16_floats *sums = (bf16_floats *)(void *)(units + n_units * fkv_ceil_div(in->n_tokens, FKV_BLOCK_TOKENS));
    return (bf16_block){units + n_units * block, sums + n_units * block, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

/* ---- the tokens ---- */

/* 32 numbers that bfloat16 has, as the upper words of dwords 0 2 1 3, 4 6 5 7, ... */
FKV_INLINE __m512i bf16_of(vf first, vf second) {
    const __m512i order = _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33, 31, 27, 29, 25, 23, 19,
                                           21, 17, 15, 11, 13, 9, 7, 3, 5, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), order, _mm512_castps_si512(second));
}

FKV_INLINE vf bf16_nearest(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* As prepare_units(), of the units from `units` on; t: the token's place in its block. */
static void bf16_prepare_units(const float *x, uint32_t n_units, bf16_unit *units, bf16_floats *sums_of, uint32_t t) {
    const unit_steps steps = steps_of(x, n_units);
    for (uint32_t u = 0; u < n_units; u += 2) {
        vf whole[4];
        float sums[4];
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t unit = fkv_min_u32(u + i / 2, n_units - 1);
            whole[i] = bf16_nearest(in_steps(x, &steps, unit, i % 2));
        }
        vf_sums(whole, sums); /* exact: below 2^24 */
        for (uint32_t unit = u; unit < fkv_min_u32(u + 2, n_units); unit++) {
            const vf *number = whole + (size_t)(unit - u) * 2;
            const float step = steps.step[unit];
            const vf tile_step = vf_set(step / BF16_CODES);
            vf high[2];
            vf low[2];
            for (uint32_t i = 0; i < 2; i++) {
                high[i] = vf_mul(bf16_nearest(vf_mul(number[i], vf_set(0x1p-8f))), vf_set(0x1p8f));
                low[i] = vf_mul(_mm512_sub_ps(number[i], high[i]), tile_step);
                high[i] = vf_mul(high[i], tile_step);
            }
            _mm512_store_si512(units[unit].high[t], bf16_of(high[0], high[1]));
            _mm512_store_si512(units[unit].low[t], bf16_of(low[0], low[1]));
            sums_of[unit].of[t] = sums[(unit - u) * 2] * step + sums[(unit - u) * 2 + 1] * step;
        }
    }
}

static void bf16_prepare_tokens(const fkv_activations *in, uint32_t token, uint32_t n_tokens) {
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    for (uint32_t t = token; t < token + n_tokens; t++) {
        bf16_block block = bf16_block_at(in, t - t % FKV_BLOCK_TOKENS);
        const float *x = in->x + t * in->x_stride;
        for (uint32_t u = 0; u < n_units; u += PREPARED_UNITS)
            bf16_prepare_units(x + (size_t)u * UNIT_NUMBERS, fkv_min_u32(n_units - u, PREPARED_UNITS), &block.units[u],
                               &block.sums[u], t % FKV_BLOCK_TOKENS);
        if (t + 1 < in->n_tokens) continue;
        for (uint32_t u = 0; u < n_units; u++)
            for (uint32_t i = block.n_tokens; i < FKV_BLOCK_TOKENS; i++) block.sums[u].of[i] = 0.0f;
    }
}

/* ---- tiles ---- */

/* 0 to 3: sums; 4, 5: high and low bytes; 6: codes. */
static void bf16_tiles_open(uint32_t n_tokens) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, n_tokens, FKV_TILE_BYTES);
    fkv_tile_shape(&shapes, 6, BF16_PAIRS, FKV_TILE_BYTES);
    fkv_tiles_open(&shapes);
}

FKV_INLINE void bf16_unpack(fkv_panel_layout layout, const uint8_t *lines, bf16_codes codes) {
    const __m512i bf16 = _mm512_set_epi16(/* 15 to 0, twice: an index has five bits */
                                          0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
                                          0x4080, 0x4040, 0x4000, 0x3f80, 0, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120,
                                          0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
    __m512i quads[UNIT_QUADS];
    load_quads(layout, lines, _mm512_setzero_si512(), quads);
    FKV_UNROLL
    for (int j = 0; j < UNIT_QUADS; j++) {
        _mm512_store_si512(codes[2 * j], _mm512_permutexvar_epi16(quads[j], bf16));
        _mm512_store_si512(codes[2 * j + 1], _mm512_permutexvar_epi16(_mm512_srli_epi16(quads[j], 8), bf16));
    }
    fkv_tiles_see_stores();
}

#define BF16_START(tile)                                                                                                         \
    _tile_zero(tile);                                                                                                            \
    _tile_dpbf16ps(tile, 4, 6);                                                                                                  \
    _tile_dpbf16ps(tile, 5, 6)

/* Tile numbers are part of the instruction, so that each has its own lines. */
FKV_INLINE void bf16_start(int tile, const uint16_t (*codes)[2 * FKV_PANEL_ROWS], const bf16_unit *unit) {
    _tile_loadd(6, codes, FKV_TILE_BYTES);
    _tile_loadd(4, unit->high, FKV_TILE_BYTES);
    _tile_loadd(5, unit->low, FKV_TILE_BYTES);
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

/* ---- a span of some panels for one block ---- */

typedef struct bf16_work {
    const uint8_t *lines;  /* of the first panel's span */
    const uint8_t *halves; /* its scales */
    size_t panel_bytes;
    uint32_t n_panels;
    uint32_t n_units;           /* of the span */
    const bf16_codes *unpacked; /* [n_panels, n_units], where blocks share them */
    const bf16_unit *tokens;    /* [n_units], as */
    const bf16_floats *sums;
    uint32_t n_tokens;
    bool is_first; /* span: nothing waits in out */
    float *out;    /* of the first panel */
    size_t out_stride;
} bf16_work;

/* Where one of the things that are done to every unit of every panel has got to. */
typedef struct bf16_stage {
    uint32_t turn;
    uint32_t unit;     /* of the span */
    const uint8_t *at; /* its lines, or scales */
} bf16_stage;

FKV_INLINE void bf16_next(const bf16_work *w, size_t bytes, bf16_stage *s) {
    s->turn++;
    s->at += bytes;
    if (++s->unit < w->n_units) return;
    s->unit = 0;
    s->at += w->panel_bytes - w->n_units * bytes;
}

FKV_INLINE void bf16_load_lanes(int n_lanes, const bf16_work *w, const float *out, vf *lanes) {
    FKV_UNROLL
    for (int t = 0; t < n_lanes; t++) {
        bool waits = !w->is_first && (uint32_t)t < w->n_tokens;
        lanes[t] = waits ? vf_load(out + (size_t)t * w->out_stride) : vf_set(0.0f);
    }
}

/* As int_product_group() ends. */
FKV_INLINE void bf16_add(int n_lanes, fkv_panel_layout layout, const bf16_work *w, const bf16_stage *s, const bf16_sums *sums,
                         vf *lanes) {
    vf scale;
    vf bias;
    load_affine(layout, s->at, &scale, &bias);
    const vf larger = vf_mul(scale, vf_set(BF16_CODES));
    FKV_PREFETCH(s->at + w->panel_bytes);
    FKV_UNROLL
    for (int t = 0; t < n_lanes; t++) {
        lanes[t] = vf_fma(bias, vf_set(w->sums[s->unit].of[t]), lanes[t]);
        lanes[t] = vf_fma(vf_load(sums->dot[t]), larger, lanes[t]);
    }
}

/* In its turn a unit is added, which was stored a turn ago and has arrived; the next one is stored, which was begun three turns
 * ago; the one whose tile is free begins, and one further on is unpacked. n_lanes, `fresh` (codes are unpacked on the way) and
 * the layout are constants. */
FKV_INLINE void bf16_run(int n_lanes, bool fresh, fkv_panel_layout layout, const bf16_work *w) {
    const uint32_t n_turns = w->n_units * w->n_panels;
    const size_t line_bytes = (size_t)layout.bits * FKV_LINE_BYTES;
    bf16_stage unpack = {.at = w->lines};
    bf16_stage start = {.at = w->lines};
    bf16_stage add = {.at = w->halves};
    alignas(64) bf16_codes ring[BF16_RING];
    bf16_sums sums[2];
    vf lanes[FKV_BLOCK_TOKENS];
    float *out = w->out;
    memset(sums, 0, sizeof sums);
    bf16_load_lanes(n_lanes, w, out, lanes);
#define BF16_UNPACK                                                                                                              \
    if (fresh && unpack.turn < n_turns) {                                                                                        \
        FKV_UNROLL                                                                                                               \
        for (uint32_t line = 0; line < layout.bits; line++)                                                                      \
            FKV_PREFETCH(unpack.at + (size_t)line * FKV_LINE_BYTES + w->panel_bytes);                                            \
        bf16_unpack(layout, unpack.at, ring[unpack.turn % BF16_RING]);                                                           \
        bf16_next(w, line_bytes, &unpack);                                                                                       \
    }
#define BF16_BEGIN(tile)                                                                                                         \
    if (start.turn < n_turns) {                                                                                                  \
        bf16_start(tile, fresh ? ring[start.turn % BF16_RING] : w->unpacked[start.turn], &w->tokens[start.unit]);                \
        bf16_next(w, line_bytes, &start);                                                                                        \
    }
    for (int i = 0; i < BF16_AHEAD; i++) BF16_UNPACK
    BF16_BEGIN(0) BF16_BEGIN(1) BF16_BEGIN(2) BF16_BEGIN(3) bf16_store(0, &sums[0]);
    while (add.turn < n_turns) {
        FKV_UNROLL
        for (int i = 0; i < BF16_IN_FLIGHT; i++) {
            if (add.turn >= n_turns) break;
            BF16_UNPACK
            BF16_BEGIN(i)
            if (add.turn + 1 < n_turns) bf16_store((i + 1) % BF16_IN_FLIGHT, &sums[(i + 1) % 2]);
            bf16_add(n_lanes, layout, w, &add, &sums[i % 2], lanes);
            bf16_next(w, fkv_panel_group_bytes(layout), &add);
            if (add.unit != 0) continue;
            FKV_UNROLL
            for (int t = 0; t < n_lanes; t++)
                if ((uint32_t)t < w->n_tokens) vf_store(out + (size_t)t * w->out_stride, lanes[t]);
            out += FKV_PANEL_ROWS;
            if (add.turn < n_turns) bf16_load_lanes(n_lanes, w, out, lanes);
        }
    }
#undef BF16_UNPACK
#undef BF16_BEGIN
}

FKV_INLINE void bf16_run_block(bool fresh, fkv_panel_layout layout, const bf16_work *w) {
    if (w->n_tokens <= 4)
        bf16_run(4, fresh, layout, w);
    else
        bf16_run(FKV_BLOCK_TOKENS, fresh, layout, w);
}

/* ---- the product ---- */

/* What does not depend on the tokens, of panels [panel, panel + n_panels). */
FKV_INLINE bf16_work bf16_work_of(fkv_panel_layout layout, const fkv_panels *p, uint32_t panel, uint32_t n_panels, uint32_t unit,
                                  uint32_t n_units) {
    const uint8_t *first = p->first + panel * p->panel_bytes;
    return (bf16_work){.lines = first + (size_t)unit * layout.bits * FKV_LINE_BYTES,
                       .halves = first + fkv_panel_code_bytes(layout, p->n_cols) + unit * fkv_panel_group_bytes(layout),
                       .panel_bytes = p->panel_bytes,
                       .n_panels = n_panels,
                       .n_units = n_units,
                       .is_first = unit == 0};
}

FKV_INLINE void bf16_set_tokens(const fkv_activations *in, uint32_t token, uint32_t unit, float *out, size_t out_stride,
                                bf16_work *w) {
    const bf16_block block = bf16_block_at(in, token);
    w->tokens = block.units + unit;
    w->sums = block.sums + unit;
    w->n_tokens = block.n_tokens;
    w->out = out;
    w->out_stride = out_stride;
}

/* Panels [panel, panel + n_panels) and whole blocks, or a last one, behind each other. */
FKV_INLINE void bf16_blocks(fkv_panel_layout layout, const fkv_panels *p, uint32_t panel, uint32_t n_panels, uint32_t unit,
                            uint32_t n_units, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                            size_t out_stride) {
    const size_t line_bytes = (size_t)layout.bits * FKV_LINE_BYTES;
    alignas(64) bf16_codes unpacked[BF16_PANELS * BF16_UNITS];
    bf16_work w = bf16_work_of(layout, p, panel, n_panels, unit, n_units);
    w.unpacked = unpacked;
    for (uint32_t i = 0; i < n_panels; i++)
        for (uint32_t u = 0; u < n_units; u++)
            bf16_unpack(layout, w.lines + i * p->panel_bytes + u * line_bytes, unpacked[i * n_units + u]);
    bf16_tiles_open(FKV_BLOCK_TOKENS);
    for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
        bf16_set_tokens(in, token + t, unit, out + t * out_stride + (size_t)panel * FKV_PANEL_ROWS, out_stride, &w);
        if (w.n_tokens < FKV_BLOCK_TOKENS) bf16_tiles_open(w.n_tokens);
        bf16_run_block(false, layout, &w);
    }
}

FKV_INLINE void bf16_product(fkv_panel_layout layout, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    const uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    const uint32_t n_units = fkv_ceil_div(all_units, fkv_ceil_div(all_units, BF16_UNITS)); /* spans of about the same size */
    const bool alone = n_tokens <= FKV_BLOCK_TOKENS;
    const uint32_t at_once = alone ? p->n_panels : BF16_PANELS;
    if (alone) bf16_tiles_open(n_tokens);
    for (uint32_t panel = 0; panel < p->n_panels; panel += at_once) {
        const uint32_t n_panels = fkv_min_u32(at_once, p->n_panels - panel);
        for (uint32_t unit = 0; unit < all_units; unit += n_units) {
            const uint32_t n = fkv_min_u32(n_units, all_units - unit);
            if (!alone) {
                bf16_blocks(layout, p, panel, n_panels, unit, n, in, token, n_tokens, out, out_stride);
                continue;
            }
            bf16_work w = bf16_work_of(layout, p, panel, n_panels, unit, n);
            bf16_set_tokens(in, token, unit, out, out_stride, &w);
            bf16_run_block(true, layout, &w);
        }
    }
    fkv_tiles_close();
}

#endif
