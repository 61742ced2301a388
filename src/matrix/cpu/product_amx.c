/* AMX matrix products of packed weight panels with blocks of 16 tokens, in bfloat16. Results are bit-identical to those of
 * product_vnni.h, which processes calls with few tokens.
 *
 * Values of codes and bytes of activations have at most 8 significant bits, so bfloat16 represents them exactly. The bytes are
 * multiplied by their power-of-two step in advance, which is exact because MIN_UNIT_MAGNITUDE excludes denormal products. The dot
 * product of a scale group with the low bytes is below 2^20 steps, and that with the high bytes below 2^20 times 256 steps, so
 * their float sums are exact in any order. If the dot product with both is below 2^24 steps, both are summed in one accumulator
 * tile. Otherwise, each byte has its own accumulator, and
 * adding the two sums rounds once, exactly as the conversion from integer to float in product_vnni.h does.
 *
 * Matrix A holds the high or the low activation bytes of one scale group (16 or 32 columns), matrix B the codes of the group.
 * Within a quad of four columns, the order is 0 2 1 3: a dword of codes has columns 0 and 2 in the low bytes of its words, and
 * columns 1 and 3 in the high bytes, so 16-bit permutes convert each pair without reordering it. If there are several blocks of
 * tokens, the codes of up to 16 panels of a column span are unpacked once for all blocks, and the activations of one block and
 * span stay in L1. Otherwise, codes are unpacked a few units before they are used. `out` holds the partial results.
 *
 * The speed is limited by tile stores and by the vector instructions that scale the sums. They do not overlap (bench/HISTORY.md).
 */
#include "../../base/simd/amx_tiles.h"
#include "fill_avx512.h"
#include "product_vnni.h"

enum {
    SPAN_UNITS = 10,               /* maximum number of units per span; the activations of one block in a full span take 20 KiB */
    SPAN_PANELS = FKV_TILE_PANELS, /* the unpacked codes of a full span take 160 KiB */
    UNPACK_AHEAD = 6,              /* number of units by which the unpack stage leads the add stage */
    PREPARED_TOKENS = 8,           /* number of tokens that are prepared together */
    MAX_SETS = 4,                  /* maximum number of accumulator sets; a set is one tile, or two if each byte has its own */
    RING_UNITS = 8,                /* number of units in the ring buffer of unpacked codes */
    CODE_ROWS = UNIT_NUMBERS / 2,
    MIN_TILE_TOKENS = 12 /* with fewer tokens, the vector kernels are faster */
};

/* A tile row: 32 bfloat16 values. The codes of a unit occupy CODE_ROWS tile rows, each with two columns of the 16 rows of a
 * panel. */
typedef uint16_t tile_row[FKV_TILE_BYTES / 2];

/* Rounded activations of 16 tokens in one unit. Each integer is split into two bytes, which are multiplied by step /
 * CODE_SUM_BOUND. */
typedef struct unit_activations {
    tile_row high[FKV_BLOCK_TOKENS]; /* high bytes times 256 */
    tile_row low[FKV_BLOCK_TOKENS];
} unit_activations;

/* Sums of each token's rounded activations over a unit, and over the first and the last 16 columns of the unit. 0 for unused
 * tokens of a block. */
typedef struct unit_x_sums {
    float of_unit[FKV_BLOCK_TOKENS];
    float of_half[2][FKV_BLOCK_TOKENS];
} unit_x_sums;

_Static_assert(sizeof(unit_activations) + sizeof(unit_x_sums) == FKV_BLOCK_TOKENS * FKV_PREPARED_BYTES,
               "FKV_PREPARED_BYTES must match the tile layout");

/* Prepared activations of one block of up to 16 tokens. */
typedef struct tile_block {
    unit_activations *units; /* [units] */
    unit_x_sums *x_sums;     /* [units] */
    uint32_t n_tokens;
} tile_block;

FKV_INLINE tile_block tile_block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    size_t block = token / FKV_BLOCK_TOKENS;
    unit_activations *units = in->prepared;
    unit_x_sums *x_sums = (unit_x_sums *)(void *)(units + n_units * fkv_ceil_div(in->n_tokens, FKV_BLOCK_TOKENS));
    return (tile_block){units + n_units * block, x_sums + n_units * block, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

/* ---- tokens ---- */

/* Converts 32 activation bytes, multiplied by a power of two, to bfloat16, and reorders them: 0 2 1 3, 4 6 5 7, ... The upper
 * halves of the floats are the exact values. */
FKV_INLINE __m512i bf16_of(vf first, vf second) {
    const __m512i order = _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33, 31, 27, 29, 25, 23, 19,
                                           21, 17, 15, 11, 13, 9, 7, 3, 5, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), order, _mm512_castps_si512(second));
}

/* Rounds the activations of one unit for tokens [first, first + PREPARED_TOKENS) of a block, and splits them into bytes. x
 * points to the unit's activations of the block's first token. Writes zeros for unused tokens. */
FKV_INLINE void tile_prepare_unit(const fkv_activations *in, const tile_block *block, uint32_t first, uint32_t unit,
                                  const float *x) {
    unit_activations *activations = &block->units[unit];
    unit_x_sums *x_sums = &block->x_sums[unit];
    vf value[2][PREPARED_TOKENS];
    vf largest[PREPARED_TOKENS];
    vf step;
    vf inverse;
    alignas(64) float steps[VL];
    alignas(64) float inverses[VL];
    FKV_UNROLL
    for (uint32_t t = 0; t < PREPARED_TOKENS; t++) {
        const float *from = x + (first + t) * in->x_stride;
        const bool is_used = first + t < block->n_tokens;
        value[0][t] = is_used ? vf_load(from) : vf_set(0.0f);
        value[1][t] = is_used ? vf_load(from + VL) : vf_set(0.0f);
        largest[t] = larger_magnitude(value[0][t], value[1][t]);
    }
    steps_of_largest(fold_rows(FOLD_UINT_MAX, PREPARED_TOKENS, largest), &step, &inverse);
    vf_store(inverses, inverse);
    vf_store(steps, vf_mul(step, vf_set(1.0f / CODE_SUM_BOUND)));
    FKV_UNROLL
    for (uint32_t t = 0; t < PREPARED_TOKENS; t++) {
        const vf tile_step = vf_set(steps[t]);
        const vf high_step = vf_mul(tile_step, vf_set(0x1p8f));
        vf high[2];
        vf low[2];
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            value[i][t] = vf_round(vf_mul(value[i][t], vf_set(inverses[t])));
            high[i] = vf_mul(vf_round(vf_mul(value[i][t], vf_set(0x1p-8f))), high_step);
            low[i] = _mm512_fmsub_ps(value[i][t], tile_step, high[i]);
        }
        _mm512_store_si512(activations->high[first + t], bf16_of(high[0], high[1]));
        _mm512_store_si512(activations->low[first + t], bf16_of(low[0], low[1]));
    }
    const vf half = vf_mul(fold_rows(FOLD_SUM, PREPARED_TOKENS, value[0]), step);
    const vf other_half = vf_mul(fold_rows(FOLD_SUM, PREPARED_TOKENS, value[1]), step);
    _mm256_storeu_ps(x_sums->of_half[0] + first, _mm512_castps512_ps256(half));
    _mm256_storeu_ps(x_sums->of_half[1] + first, _mm512_castps512_ps256(other_half));
    _mm256_storeu_ps(x_sums->of_unit + first, _mm512_castps512_ps256(vf_add(half, other_half)));
}

static void tile_prepare(const fkv_activations *in, uint32_t token, uint32_t n_tokens, uint32_t column, uint32_t n_columns) {
    for (uint32_t t = token; t < token + n_tokens; t += FKV_BLOCK_TOKENS) {
        const tile_block block = tile_block_at(in, t);
        for (uint32_t first = 0; first < FKV_BLOCK_TOKENS; first += PREPARED_TOKENS)
            for (uint32_t c = column; c < column + n_columns; c += UNIT_NUMBERS)
                tile_prepare_unit(in, &block, first, c / UNIT_NUMBERS, in->x + t * in->x_stride + c);
    }
}

/* ---- codes ---- */

/* Tables from codes to bfloat16 values. Codes of up to 6 bits use 16-bit entries. 8-bit codes use separate tables of low and high
 * bytes, because only permutes of bytes can select from 256 entries. */
typedef struct code_values {
    alignas(64) uint16_t words[64];
    alignas(64) uint8_t bytes[2][256]; /* low bytes, then high bytes */
} code_values;

static void set_code_values(fkv_panel_layout layout, const int8_t *table, code_values *values) {
    for (int code = 0; code < (layout.bits == 8 ? 256 : 64); code++) {
        float value = layout.table ? table[code % 16] : (float)(code - (layout.biased ? 0 : fkv_panel_center(layout)));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (layout.bits == 8) {
            values->bytes[0][code] = (uint8_t)(bits >> 16);
            values->bytes[1][code] = (uint8_t)(bits >> 24);
        } else {
            values->words[code] = (uint16_t)(bits >> 16);
        }
    }
}

/* Looks up each byte in a table of 256 bytes. */
FKV_INLINE __m512i look_up_bytes(const uint8_t *table, __m512i at) {
    __m512i below_128 = _mm512_permutex2var_epi8(_mm512_load_si512(table), at, _mm512_load_si512(table + 64));
    __m512i others = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), at, _mm512_load_si512(table + 192));
    return _mm512_mask_mov_epi8(below_128, _mm512_movepi8_mask(at), others);
}

/* Converts the codes of a quad to bfloat16: columns 0 and 2 to codes[0], columns 1 and 3 to codes[1]. */
FKV_INLINE void convert_quad(fkv_panel_layout layout, const code_values *values, __m512i quad, tile_row *codes) {
    __m512i even;
    __m512i odd;
    if (layout.bits == 8) {
        __m512i low = look_up_bytes(values->bytes[0], quad);
        __m512i high = look_up_bytes(values->bytes[1], quad);
        even = _mm512_mask_mov_epi8(low, 0xaaaaaaaaaaaaaaaa, _mm512_slli_epi16(high, 8));
        odd = _mm512_mask_mov_epi8(_mm512_srli_epi16(low, 8), 0xaaaaaaaaaaaaaaaa, high);
    } else {
        const __m512i first = _mm512_load_si512(values->words);
        const __m512i second = _mm512_load_si512(values->words + 32);
        __m512i upper = _mm512_srli_epi16(quad, 8);
        even = layout.bits <= 5 ? _mm512_permutexvar_epi16(quad, first) : _mm512_permutex2var_epi16(first, quad, second);
        odd = layout.bits <= 5 ? _mm512_permutexvar_epi16(upper, first) : _mm512_permutex2var_epi16(first, upper, second);
    }
    _mm512_store_si512(codes[0], even);
    _mm512_store_si512(codes[1], odd);
}

FKV_INLINE void unpack_unit(fkv_panel_layout layout, const uint8_t *lines, const code_values *values, tile_row *codes) {
    __m512i quads[UNIT_QUADS];
    layout.table = false; /* `values` already contains the values of the table */
    load_quads(layout, lines, _mm512_setzero_si512(), quads);
    FKV_UNROLL
    for (int j = 0; j < UNIT_QUADS; j++) convert_quad(layout, values, quads[j], codes + 2 * j);
    fkv_tiles_see_stores();
}

/* ---- tiles ---- */

/* Returns true if one accumulator can sum the dot product of a group with both activation bytes exactly. 127 * 256 + 128
 * bounds 256 * |high byte| + |low byte|, so that partial sums are exact, too. */
FKV_INLINE bool fits_one_accumulator(fkv_panel_layout layout) {
    const uint32_t largest_magnitude = layout.biased ? (1u << layout.bits) - 1 : (uint32_t)fkv_panel_center(layout);
    return largest_magnitude * layout.group * (127 * 256 + 128) < 1u << 24;
}

/* Configures the AMX tiles: 0 to 3 are accumulators, 4 and 5 hold the high and low activation bytes of a group, and 6 holds
 * codes. */
static void product_tiles_open(fkv_panel_layout layout, uint32_t n_tokens) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 4; i++) fkv_tile_shape(&shapes, i, n_tokens, FKV_TILE_BYTES);
    for (int i = 4; i < 6; i++) fkv_tile_shape(&shapes, i, n_tokens, layout.group * (uint32_t)sizeof(uint16_t));
    fkv_tile_shape(&shapes, 6, layout.group / 2, FKV_TILE_BYTES);
    fkv_tiles_open(&shapes);
}

/* Dot products of 16 tokens with 16 rows over one group, multiplied by step / CODE_SUM_BOUND. If each byte has its own
 * accumulator, dot[0] and dot[1] hold the products with the high and the low bytes. Otherwise, dot[0] holds the sum of both, and
 * dot[1] is unused. */
typedef struct group_sums {
    alignas(64) float dot[2][FKV_BLOCK_TOKENS][FKV_PANEL_ROWS];
} group_sums;

#define START_JOINT(tile)                                                                                                        \
    _tile_zero(tile);                                                                                                            \
    _tile_dpbf16ps(tile, 4, 6);                                                                                                  \
    _tile_dpbf16ps(tile, 5, 6)

#define START_SPLIT(high, low)                                                                                                   \
    _tile_zero(high);                                                                                                            \
    _tile_zero(low);                                                                                                             \
    _tile_dpbf16ps(high, 4, 6);                                                                                                  \
    _tile_dpbf16ps(low, 5, 6)

/* Starts the matrix products over one group. `column` is the first column of the group within its unit. Each set of accumulators
 * has its own branch, because AMX instructions take literal tile numbers. */
FKV_INLINE void start_group(fkv_panel_layout layout, uint32_t set, const tile_row *codes, const unit_activations *activations,
                            uint32_t column) {
    _tile_loadd(6, codes, FKV_TILE_BYTES);
    _tile_loadd(4, activations->high[0] + column, FKV_TILE_BYTES);
    _tile_loadd(5, activations->low[0] + column, FKV_TILE_BYTES);
    if (!fits_one_accumulator(layout)) {
        if (set == 0) {
            START_SPLIT(0, 1);
        } else {
            START_SPLIT(2, 3);
        }
    } else if (set == 0) {
        START_JOINT(0);
    } else if (set == 1) {
        START_JOINT(1);
    } else if (set == 2) {
        START_JOINT(2);
    } else {
        START_JOINT(3);
    }
}

#undef START_JOINT
#undef START_SPLIT

FKV_INLINE void store_group(fkv_panel_layout layout, uint32_t set, group_sums *sums) {
    if (!fits_one_accumulator(layout)) {
        if (set == 0) {
            _tile_stored(0, sums->dot[0], FKV_TILE_BYTES);
            _tile_stored(1, sums->dot[1], FKV_TILE_BYTES);
        } else {
            _tile_stored(2, sums->dot[0], FKV_TILE_BYTES);
            _tile_stored(3, sums->dot[1], FKV_TILE_BYTES);
        }
    } else if (set == 0) {
        _tile_stored(0, sums->dot[0], FKV_TILE_BYTES);
    } else if (set == 1) {
        _tile_stored(1, sums->dot[0], FKV_TILE_BYTES);
    } else if (set == 2) {
        _tile_stored(2, sums->dot[0], FKV_TILE_BYTES);
    } else {
        _tile_stored(3, sums->dot[0], FKV_TILE_BYTES);
    }
    fkv_tiles_see_stores();
}

/* ---- span pipeline ---- */

/* Input and output of one call of run_span(): a span of columns of consecutive panels, and one block of tokens. */
typedef struct span {
    const uint8_t *lines;  /* address of the span's codes in the first panel */
    const uint8_t *halves; /* address of the span's scales in the first panel */
    size_t panel_bytes;
    uint32_t n_panels;
    uint32_t n_units;         /* number of units in the span */
    const tile_row *unpacked; /* [n_panels, n_units, CODE_ROWS] unpacked codes; not used if the pipeline unpacks them */
    const unit_activations *activations; /* [n_units] */
    const unit_x_sums *x_sums;           /* [n_units] */
    uint32_t n_tokens;
    bool is_first; /* true if the span starts at the first column, so that `out` does not hold partial results yet */
    float *out;    /* output of the first panel */
    size_t out_stride;
} span;

FKV_INLINE void load_outputs(const span *s, const float *out, vf *acc) {
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_BLOCK_TOKENS; t++)
        acc[t] = !s->is_first && t < s->n_tokens ? vf_load(out + t * s->out_stride) : vf_set(0.0f);
}

FKV_INLINE void store_outputs(const span *s, const vf *acc, float *out) {
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_BLOCK_TOKENS; t++)
        if (t < s->n_tokens) vf_store(out + t * s->out_stride, acc[t]);
}

/* Scales the dot products over one group and adds them to the outputs. */
FKV_INLINE void add_sums(fkv_panel_layout layout, const uint8_t *halves, const float *x_sums, const group_sums *sums, vf *acc) {
    vf scale;
    vf bias;
    load_affine(layout, halves, &scale, &bias);
    const vf larger = vf_mul(scale, vf_set(CODE_SUM_BOUND));
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        vf dot = vf_load(sums->dot[0][t]);
        if (!fits_one_accumulator(layout)) dot = vf_add(dot, vf_load(sums->dot[1][t]));
        acc[t] = add_group(layout, dot, larger, bias, x_sums[t], acc[t]);
    }
}

/* Position of one stage of the pipeline. The unpack stage processes units, and the other stages process groups. The compiler
 * removes pointers that a stage does not use. */
typedef struct stage {
    uint32_t n_done;   /* number of units or groups processed so far */
    uint32_t unit;     /* index of the unit within the span */
    const uint8_t *at; /* address of the unit's codes or scales in the panel */
    const unit_activations *activations;
    const unit_x_sums *x_sums;
} stage;

/* Advances to the next unit, or to the first unit of the next panel. `bytes` is the number of bytes per unit at
 * g->at, or 0 if the stage does not use g->at. */
FKV_INLINE void next_unit(const span *s, size_t bytes, stage *g) {
    g->at += bytes;
    g->activations++;
    g->x_sums++;
    if (++g->unit < s->n_units) return;
    g->unit = 0;
    g->at += s->panel_bytes - s->n_units * bytes;
    g->activations = s->activations;
    g->x_sums = s->x_sums;
}

/* Unpacks the next unit to the ring buffer, and prefetches the same unit of the next panel. Does nothing after the last unit.
 * ring: [RING_UNITS, CODE_ROWS] */
FKV_INLINE void unpack_next(fkv_panel_layout layout, const code_values *values, const span *s, tile_row *ring, stage *g) {
    if (g->n_done == s->n_units * s->n_panels) return;
    FKV_UNROLL
    for (uint32_t line = 0; line < layout.bits; line++) FKV_PREFETCH(g->at + (size_t)line * FKV_LINE_BYTES + s->panel_bytes);
    unpack_unit(layout, g->at, values, ring + g->n_done % RING_UNITS * CODE_ROWS);
    g->n_done++;
    next_unit(s, (size_t)layout.bits * FKV_LINE_BYTES, g);
}

/* Starts the products of one group. ring: codes unpacked by unpack_next(), or NULL if s->unpacked holds them. */
FKV_INLINE void start_next(fkv_panel_layout layout, uint32_t set, const span *s, const tile_row *ring, stage *g) {
    const uint32_t unit_groups = UNIT_NUMBERS / layout.group;
    const uint32_t group = set % unit_groups; /* in the unit; the number of sets is a multiple of unit_groups */
    const uint32_t row = g->n_done * (layout.group / 2);
    if (g->n_done == s->n_units * unit_groups * s->n_panels) return;
    start_group(layout, set, ring != NULL ? ring + row % (RING_UNITS * CODE_ROWS) : s->unpacked + row, g->activations,
                group * layout.group);
    g->n_done++;
    if (group + 1 == unit_groups) next_unit(s, 0, g);
}

/* Multiplies the span by the block of tokens. Iteration i starts the products of group i + n_sets, stores the accumulators of
 * group i + 1, and adds the sums of group i to the outputs. Iteration i - 1 has stored the sums of group i, so that loads do not
 * wait for stores. If `unpacks` is true, the pipeline also unpacks the codes. The layout and `unpacks` are compile-time
 * constants. */
FKV_INLINE void run_span(fkv_panel_layout layout, bool unpacks, const code_values *values, const span *s) {
    const uint32_t n_sets = fits_one_accumulator(layout) ? MAX_SETS : MAX_SETS / 2;
    const uint32_t unit_groups = UNIT_NUMBERS / layout.group;
    const uint32_t n_groups = s->n_units * unit_groups * s->n_panels;
    const size_t group_bytes = fkv_panel_group_bytes(layout);
    alignas(64) tile_row ring_codes[RING_UNITS * CODE_ROWS];
    tile_row *const ring = unpacks ? ring_codes : NULL;
    group_sums sums[2];
    vf acc[FKV_BLOCK_TOKENS];
    stage unpack = {.at = s->lines, .activations = s->activations, .x_sums = s->x_sums};
    stage start = {.at = s->lines, .activations = s->activations, .x_sums = s->x_sums};
    stage add = {.at = s->halves, .activations = s->activations, .x_sums = s->x_sums};
    float *out = s->out;
    memset(sums, 0, sizeof sums); /* tile stores skip the rows of unused tokens, which add_sums() reads */
    load_outputs(s, out, acc);
    for (int i = 0; unpacks && i < UNPACK_AHEAD; i++) unpack_next(layout, values, s, ring, &unpack);
    FKV_UNROLL
    for (uint32_t set = 0; set < n_sets; set++) start_next(layout, set, s, ring, &start);
    store_group(layout, 0, &sums[0]);
    while (add.n_done < n_groups) {
        FKV_UNROLL
        for (uint32_t set = 0; set < n_sets; set++) {
            const uint32_t group = set % unit_groups;
            if (add.n_done == n_groups) break;
            if (unpacks && group == 0) unpack_next(layout, values, s, ring, &unpack);
            start_next(layout, set, s, ring, &start);
            if (add.n_done + 1 < n_groups) store_group(layout, (set + 1) % n_sets, &sums[(set + 1) % 2]);
            if (unpacks) FKV_PREFETCH(add.at + s->panel_bytes);
            add_sums(layout, add.at + group * group_bytes, unit_groups == 1 ? add.x_sums->of_unit : add.x_sums->of_half[group],
                     &sums[set % 2], acc);
            add.n_done++;
            if (group + 1 < unit_groups) continue;
            next_unit(s, unit_groups * group_bytes, &add);
            if (add.unit != 0) continue;
            store_outputs(s, acc, out);
            out += FKV_PANEL_ROWS;
            if (add.n_done < n_groups) load_outputs(s, out, acc);
        }
    }
}

/* ---- product ---- */

/* Returns the number of units per span if n_units units are divided into as few spans as possible, with at most `most` units each
 * and nearly equal sizes. */
FKV_INLINE uint32_t even_span(uint32_t n_units, uint32_t most) { return fkv_ceil_div(n_units, fkv_ceil_div(n_units, most)); }

/* Returns the span of up to n_panels panels and n_units units that starts at `panel` and `unit`. The caller sets `unpacked`, and
 * span_set_tokens() sets the fields that depend on the tokens. If `panel` equals p->n_panels, the span is empty. */
FKV_INLINE span span_of(fkv_panel_layout layout, const fkv_panels *p, uint32_t panel, uint32_t n_panels, uint32_t unit,
                        uint32_t n_units) {
    const uint8_t *first = p->first + panel * p->panel_bytes;
    const size_t unit_halves = UNIT_NUMBERS / layout.group * fkv_panel_group_bytes(layout);
    return (span){.lines = first + (size_t)unit * layout.bits * FKV_LINE_BYTES,
                  .halves = first + fkv_panel_code_bytes(layout, p->n_cols) + unit * unit_halves,
                  .panel_bytes = p->panel_bytes,
                  .n_panels = fkv_min_u32(n_panels, p->n_panels - panel),
                  .n_units = fkv_min_u32(n_units, p->n_cols / UNIT_NUMBERS - unit),
                  .is_first = unit == 0};
}

FKV_INLINE void span_set_tokens(const fkv_activations *in, uint32_t token, uint32_t unit, float *out, size_t out_stride,
                                span *s) {
    const tile_block block = tile_block_at(in, token);
    s->activations = block.units + unit;
    s->x_sums = block.x_sums + unit;
    s->n_tokens = block.n_tokens;
    s->out = out;
    s->out_stride = out_stride;
}

/* Prefetches the codes of panels [panel, end) of a span into L2. */
FKV_INLINE void prefetch_panels(fkv_panel_layout layout, const span *s, uint32_t panel, uint32_t end) {
    const size_t bytes = (size_t)s->n_units * layout.bits * FKV_LINE_BYTES;
    for (; panel < end; panel++)
        for (size_t i = 0; i < bytes; i += FKV_LINE_BYTES) FKV_PREFETCH_FAR(s->lines + panel * s->panel_bytes + i);
}

/* Unpacks the codes of a span and multiplies them by each block of tokens. Before each block, prefetches a part of the codes of
 * the next span. out: output of the span's first panel for `token`. */
FKV_INLINE void run_blocks(fkv_panel_layout layout, const code_values *values, span *s, const span *next, uint32_t unit,
                           const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out, size_t out_stride) {
    alignas(64) tile_row unpacked[SPAN_PANELS * SPAN_UNITS * CODE_ROWS];
    tile_row *codes = unpacked;
    for (uint32_t i = 0; i < s->n_panels; i++)
        for (uint32_t u = 0; u < s->n_units; u++, codes += CODE_ROWS)
            unpack_unit(layout, s->lines + i * s->panel_bytes + (size_t)u * layout.bits * FKV_LINE_BYTES, values, codes);
    s->unpacked = unpacked;
    product_tiles_open(layout, FKV_BLOCK_TOKENS);
    for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
        span_set_tokens(in, token + t, unit, out + t * out_stride, out_stride, s);
        if (s->n_tokens < FKV_BLOCK_TOKENS) product_tiles_open(layout, s->n_tokens);
        prefetch_panels(layout, next, next->n_panels * t / n_tokens, next->n_panels * (t + s->n_tokens) / n_tokens);
        run_span(layout, false, values, s);
    }
}

FKV_INLINE void tile_product(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    const bool single_block = n_tokens <= FKV_BLOCK_TOKENS;
    const uint32_t n_panels = single_block ? p->n_panels : SPAN_PANELS;
    const uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    const uint32_t n_units = even_span(all_units, SPAN_UNITS);
    code_values values;
    set_code_values(layout, p->table, &values);
    if (single_block) product_tiles_open(layout, n_tokens);
    span s = span_of(layout, p, 0, n_panels, 0, n_units);
    for (uint32_t panel = 0, unit = 0; panel < p->n_panels;) {
        const uint32_t first_unit = unit;
        float *to = out + (size_t)panel * FKV_PANEL_ROWS;
        unit += n_units;
        if (unit >= all_units) {
            unit = 0;
            panel = fkv_min_u32(panel + n_panels, p->n_panels);
        }
        span next = span_of(layout, p, panel, n_panels, unit, n_units);
        if (single_block) {
            span_set_tokens(in, token, first_unit, to, out_stride, &s);
            run_span(layout, true, &values, &s);
        } else {
            run_blocks(layout, &values, &s, &next, first_unit, in, token, n_tokens, to, out_stride);
        }
        s = next;
    }
    fkv_tiles_close();
}

MATRIX_KINDS(KIND_FUNCTION, tile_product)

static void amx_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                        size_t out_stride) {
    if (!in->as_tiles) {
        int_product(panels, in, token, n_tokens, out, out_stride);
        return;
    }
    EACH_MATRIX_KIND(tile_product)
}

static void amx_prepare(const fkv_activations *in, uint32_t token, uint32_t n_tokens, uint32_t column, uint32_t n_columns) {
    (in->as_tiles ? tile_prepare : int_prepare)(in, token, n_tokens, column, n_columns);
}

const fkv_product_kernels fkv_product_amx = {MIN_TILE_TOKENS, amx_prepare, amx_product, fill_avx512_panel};
