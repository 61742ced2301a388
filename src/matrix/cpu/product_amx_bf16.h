/* AMX bfloat16 matrix products for panels with up to four bits per code. Results are bit-identical to those of product_vnni.h.
 *
 * bfloat16 represents codes below 16 and the two bytes of an activation exactly, even when multiplied by a power of two. The dot
 * product over a unit of 32 columns is at most 15 * 32 * (127 * 256 + 128) < 2^24 quantization steps, so every partial sum is an
 * exact float in any order. One accumulator tile therefore holds dot * step. With byte tiles (product_amx.c), two integer
 * accumulators must be combined, converted to float and multiplied by the step.
 *
 * Matrix A holds the high or the low activation bytes for one unit, prepared once for all panels. Matrix B holds the codes of the
 * unit. Both store every four columns in the order 0 2 1 3, so that unpacking yields pairs of codes in the halves of a dword. The
 * activations of a span (up to BF16_UNITS units) stay in L1 while all panels are processed. With a single block of tokens, codes
 * are unpacked a few units before they are used. Several blocks share panels that are unpacked in advance. `out` holds the
 * partial results. If the data is in cache, 16 tokens x 16 rows x 32 columns take 75 cycles, or 70 cycles per block with several
 * blocks.
 */
#ifndef FKV_PRODUCT_AMX_BF16_H
#define FKV_PRODUCT_AMX_BF16_H

#include "../../base/simd/amx_tiles.h"
#include "product_vnni.h"

enum {
    BF16_UNITS = 10,    /* maximum number of units (32 columns each) per span; the activations of a full span take 20 KiB */
    BF16_PANELS = 4,    /* number of panels that are unpacked once for all blocks of tokens; they take 40 KiB */
    BF16_IN_FLIGHT = 4, /* number of accumulator tiles; a tile is read three units after its products were started */
    BF16_AHEAD = 6,     /* a unit is unpacked this number of loop iterations before its dot products are added to the output */
    BF16_RING = 8,      /* number of units in the ring buffer of unpacked codes; a ring of twice the size is slower */
    BF16_PAIRS = UNIT_NUMBERS / 2,
    BF16_MIN_TOKENS = 12 /* minimum number of tokens; with fewer tokens, the vector kernels are faster */
};

/* Upper bound on the sum of the codes in one unit (32 columns) of a row, for codes of at most four bits. With the larger
 * CODE_SUM_BOUND, the steps of the smallest values would be denormal floats. */
static const float BF16_CODE_SUM_BOUND = 0x1p9f;

typedef uint16_t bf16_codes[BF16_PAIRS][2 * FKV_PANEL_ROWS];

/* Activations of 16 tokens in one unit (32 columns), as bfloat16 values in the layout of AMX tiles, multiplied by step /
 * BF16_CODE_SUM_BOUND. */
typedef struct bf16_unit {
    uint16_t high[FKV_BLOCK_TOKENS][UNIT_NUMBERS]; /* high bytes times 256 */
    uint16_t low[FKV_BLOCK_TOKENS][UNIT_NUMBERS];
} bf16_unit;

typedef struct bf16_floats {
    float of[FKV_BLOCK_TOKENS];
} bf16_floats;

_Static_assert(sizeof(bf16_unit) + sizeof(bf16_floats) == FKV_BLOCK_TOKENS * FKV_PREPARED_BYTES,
               "FKV_PREPARED_BYTES must match the tile layout");

/* Prepared activations of one block of up to 16 tokens. */
typedef struct bf16_block {
    bf16_unit *units;  /* [units] */
    bf16_floats *sums; /* [units] sum of the rounded activations of each token in the unit; 0 for unused tokens of the block */
    uint32_t n_tokens;
} bf16_block;

typedef struct bf16_sums {
    alignas(64) float dot[FKV_BLOCK_TOKENS][FKV_PANEL_ROWS]; /* dot products, multiplied by step / BF16_CODE_SUM_BOUND */
} bf16_sums;

/* Returns whether bfloat16 dot products are exact for a matrix kind. */
FKV_INLINE bool bf16_is_exact(fkv_panel_layout layout) {
    return layout.group == UNIT_NUMBERS && layout.bits <= 4 && !layout.table;
}

FKV_INLINE bf16_block bf16_block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    size_t block = token / FKV_BLOCK_TOKENS;
    bf16_unit *units = in->prepared;
    bf16_floats *sums = (bf16_floats *)(void *)(units + n_units * fkv_ceil_div(in->n_tokens, FKV_BLOCK_TOKENS));
    return (bf16_block){units + n_units * block, sums + n_units * block, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

/* ---- tokens ---- */

/* Converts 32 values to bfloat16, which is exact for these values, and reorders them: 0 2 1 3, 4 6 5 7, ... */
FKV_INLINE __m512i bf16_of(vf first, vf second) {
    const __m512i order = _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33, 31, 27, 29, 25, 23, 19,
                                           21, 17, 15, 11, 13, 9, 7, 3, 5, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), order, _mm512_castps_si512(second));
}

FKV_INLINE void bf16_prepare_units(const fkv_activations *in, uint32_t token, uint32_t first, const float *x, uint32_t n_units) {
    const bf16_block block = bf16_block_at(in, token - token % FKV_BLOCK_TOKENS);
    const uint32_t t = token % FKV_BLOCK_TOKENS;
    bf16_unit *units = &block.units[first];
    const unit_steps steps = steps_of(x, n_units);
    for (uint32_t u = 0; u < n_units; u += 2) {
        const unit_pair pair = round_unit_pair(x, &steps, u, n_units);
        for (uint32_t unit = u; unit < fkv_min_u32(u + 2, n_units); unit++) {
            const uint32_t half = (unit - u) * 2; /* index in `pair` of the first half (16 values) of the unit */
            const float step = steps.step[unit];
            const vf tile_step = vf_set(step / BF16_CODE_SUM_BOUND);
            vf high[2];
            vf low[2];
            for (uint32_t i = 0; i < 2; i++) {
                vf number = pair.value[half + i];
                high[i] = vf_mul(vf_round(vf_mul(number, vf_set(0x1p-8f))), vf_set(0x1p8f));
                low[i] = vf_mul(vf_sub(number, high[i]), tile_step);
                high[i] = vf_mul(high[i], tile_step);
            }
            _mm512_store_si512(units[unit].high[t], bf16_of(high[0], high[1]));
            _mm512_store_si512(units[unit].low[t], bf16_of(low[0], low[1]));
            block.sums[first + unit].of[t] = pair.sum[half] * step + pair.sum[half + 1] * step;
        }
    }
}

/* Converts activations to tile layout. If the last block has fewer than FKV_BLOCK_TOKENS tokens, the sums of the unused tokens
 * are set to 0. */
static void bf16_prepare_tokens(const fkv_activations *in, uint32_t token, uint32_t n_tokens) {
    prepare_each_token(bf16_prepare_units, in, token, n_tokens);
    if (token + n_tokens < in->n_tokens) return;
    const uint32_t last = in->n_tokens - 1;
    const bf16_block block = bf16_block_at(in, last - last % FKV_BLOCK_TOKENS);
    for (uint32_t u = 0; u < in->n_cols / UNIT_NUMBERS; u++)
        for (uint32_t i = block.n_tokens; i < FKV_BLOCK_TOKENS; i++) block.sums[u].of[i] = 0.0f;
}

/* ---- tiles ---- */

/* Configures the AMX tiles. Tiles 0 to 3 are accumulators, tiles 4 and 5 hold high and low activation bytes, and tile 6 holds
 * codes. */
static void bf16_tiles_open(uint32_t n_tokens) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 6; i++) fkv_tile_shape(&shapes, i, n_tokens, FKV_TILE_BYTES);
    fkv_tile_shape(&shapes, 6, BF16_PAIRS, FKV_TILE_BYTES);
    fkv_tiles_open(&shapes);
}

FKV_INLINE void bf16_unpack(fkv_panel_layout layout, const uint8_t *lines, bf16_codes codes) {
    /* the integers 15 to 0 in bfloat16, stored twice, because a permutation index has five bits */
    const __m512i bf16 = _mm512_set_epi16(0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
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

/* Starts the matrix products over one unit (32 columns). Each accumulator tile has its own branch, because AMX instructions take
 * literal tile numbers. */
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

/* ---- span pipeline ---- */

typedef struct bf16_work {
    const uint8_t *lines;  /* address of the span's codes in the first panel */
    const uint8_t *halves; /* address of the span's scales in the first panel */
    size_t panel_bytes;
    uint32_t n_panels;
    uint32_t n_units;           /* number of units in the span */
    const bf16_codes *unpacked; /* [n_panels, n_units] unpacked codes; used only if several blocks of tokens share them */
    const bf16_unit *tokens;    /* [n_units] activations of one block of tokens */
    const bf16_floats *sums;
    uint32_t n_tokens;
    bool is_first; /* true for the first span, when out does not hold partial results yet */
    float *out;    /* output of the first panel */
    size_t out_stride;
} bf16_work;

/* Position of one pipeline stage. Each stage processes all units (32 columns each) of all panels, one unit per loop iteration. */
typedef struct bf16_stage {
    uint32_t turn;
    uint32_t unit;     /* index of the unit within the span */
    const uint8_t *at; /* address of the unit's codes or scales in the panel */
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

/* Scales the dot products over one unit (32 columns) and adds them to the outputs. */
FKV_INLINE void bf16_add(int n_lanes, fkv_panel_layout layout, const bf16_work *w, const bf16_stage *s, const bf16_sums *sums,
                         vf *lanes) {
    vf scale;
    vf bias;
    load_affine(layout, s->at, &scale, &bias);
    const vf larger = vf_mul(scale, vf_set(BF16_CODE_SUM_BOUND));
    FKV_PREFETCH(s->at + w->panel_bytes);
    FKV_UNROLL
    for (int t = 0; t < n_lanes; t++) {
        lanes[t] = add_group(vf_load(sums->dot[t]), larger, bias, w->sums[s->unit].of[t], lanes[t]);
    }
}

/* Runs the pipeline. Each loop iteration adds the dot products that were stored one iteration ago to the output, stores the dot
 * products that were started three iterations ago, starts the next unit in the free accumulator tile, and unpacks a later unit.
 * n_lanes, `fresh` and the layout are compile-time constants. `fresh` is true if the codes are unpacked in this loop. */
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

/* ---- product ---- */

/* Returns a bf16_work for a span of panels [panel, panel + n_panels). Sets all fields except those that depend on the tokens. */
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

/* Multiplies panels [panel, panel + n_panels) by all blocks of tokens, one block after another. */
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
    const uint32_t n_units = even_span(all_units, BF16_UNITS);
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
