/* AMX matrix products of packed weight panels with blocks of 16 tokens, in bfloat16. Results are bit-identical to those of
 * product_vnni.h, which processes calls with few tokens.
 *
 * bfloat16 represents codes and the two bytes of an activation exactly, even when multiplied by a power of two. Partial dot
 * products over a scale group stay below 2^24 quantization steps, or 2^20 for one of the two bytes, so they are exact floats in
 * any order. If the dot product with both bytes stays below 2^24, one accumulator tile holds dot * step. Otherwise, each byte has
 * an accumulator, and the sum of both is rounded once, like the conversion of an exact integer.
 *
 * Matrix A holds the high or the low bytes of one unit (32 columns), prepared once for all panels. Matrix B holds codes. Both
 * store every four columns in the order 0 2 1 3, so that unpacking yields pairs of codes in the halves of a dword. The panels of
 * a span of columns are unpacked in advance and used by all blocks of tokens, while the activations of one block stay in L1. A
 * single block of tokens uses codes that are unpacked a few units in advance. `out` holds the partial results. Tile loads, tile
 * stores and the scaling of 16 x 16 sums per group share the issue slots of a core, and this limits the speed: the products alone
 * would take less than half of the time.
 */
#include "../../base/simd/amx_tiles.h"
#include "fill_avx512.h"
#include "product_vnni.h"

enum {
    SPAN_UNITS = 10,     /* maximum number of units per span; the activations of a full span take 20 KiB */
    SPAN_PANELS = 16,    /* number of panels that are unpacked once for all blocks of tokens; they take 160 KiB */
    UNPACK_AHEAD = 6,    /* number of units by which unpacking is ahead of adding */
    PREPARED_TOKENS = 8, /* number of tokens that are prepared together */
    MAX_SETS = 4,        /* maximum number of groups whose products are in accumulator tiles */
    RING_UNITS = 8,      /* number of units in the ring buffer of unpacked codes */
    CODE_ROWS = UNIT_NUMBERS / 2,
    MIN_TOKENS = 12 /* with fewer tokens, the vector kernels are faster */
};

/* 32 bfloat16 values. The codes of a unit occupy CODE_ROWS rows, each with two columns of the 16 rows of a panel. */
typedef uint16_t tile_row[FKV_TILE_BYTES / 2];

/* Activations of 16 tokens in one unit, multiplied by step / CODE_SUM_BOUND. */
typedef struct unit_tokens {
    tile_row high[FKV_BLOCK_TOKENS]; /* high bytes times 256 */
    tile_row low[FKV_BLOCK_TOKENS];
} unit_tokens;

/* Sums of the rounded activations of each token in one unit, and in its halves; 0 for unused tokens of a block. */
typedef struct unit_x_sums {
    float both[FKV_BLOCK_TOKENS];
    float half[2][FKV_BLOCK_TOKENS];
} unit_x_sums;

_Static_assert(sizeof(unit_tokens) + sizeof(unit_x_sums) == FKV_BLOCK_TOKENS * FKV_PREPARED_BYTES,
               "FKV_PREPARED_BYTES must match the tile layout");

/* Prepared activations of one block of up to 16 tokens. */
typedef struct tile_block {
    unit_tokens *units; /* [units] */
    unit_x_sums *sums;  /* [units] */
    uint32_t n_tokens;
} tile_block;

FKV_INLINE tile_block tile_block_at(const fkv_activations *in, uint32_t token) {
    size_t n_units = in->n_cols / UNIT_NUMBERS;
    size_t block = token / FKV_BLOCK_TOKENS;
    unit_tokens *units = in->prepared;
    unit_x_sums *sums = (unit_x_sums *)(void *)(units + n_units * fkv_ceil_div(in->n_tokens, FKV_BLOCK_TOKENS));
    return (tile_block){units + n_units * block, sums + n_units * block, fkv_min_u32(in->n_tokens - token, FKV_BLOCK_TOKENS)};
}

/* ---- tokens ---- */

/* Converts 32 values to bfloat16, which is exact for these values, and reorders them: 0 2 1 3, 4 6 5 7, ... */
FKV_INLINE __m512i bf16_of(vf first, vf second) {
    const __m512i order = _mm512_set_epi16(63, 59, 61, 57, 55, 51, 53, 49, 47, 43, 45, 41, 39, 35, 37, 33, 31, 27, 29, 25, 23, 19,
                                           21, 17, 15, 11, 13, 9, 7, 3, 5, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), order, _mm512_castps_si512(second));
}

/* Rounds the activations of one unit for tokens [first, first + PREPARED_TOKENS) of a block, and splits them into bytes. x: the
 * unit's activations of the block's first token. Unused tokens are 0. */
FKV_INLINE void tile_prepare_unit(const fkv_activations *in, const tile_block *block, uint32_t first, uint32_t unit,
                                  const float *x) {
    unit_tokens *tokens = &block->units[unit];
    unit_x_sums *sums = &block->sums[unit];
    vf number[2][PREPARED_TOKENS];
    vf largest[PREPARED_TOKENS];
    vf step;
    vf inverse;
    alignas(64) float steps[VL];
    alignas(64) float inverses[VL];
    FKV_UNROLL
    for (uint32_t t = 0; t < PREPARED_TOKENS; t++) {
        const float *from = x + (first + t) * in->x_stride;
        const bool is_used = first + t < block->n_tokens;
        number[0][t] = is_used ? vf_load(from) : vf_set(0.0f);
        number[1][t] = is_used ? vf_load(from + VL) : vf_set(0.0f);
        largest[t] = larger_magnitude(number[0][t], number[1][t]);
    }
    steps_of_largest(fold_rows(WHOLE_LARGER, PREPARED_TOKENS, largest), &step, &inverse);
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
            number[i][t] = vf_round(vf_mul(number[i][t], vf_set(inverses[t])));
            high[i] = vf_mul(vf_round(vf_mul(number[i][t], vf_set(0x1p-8f))), high_step);
            low[i] = _mm512_fmsub_ps(number[i][t], tile_step, high[i]);
        }
        _mm512_store_si512(tokens->high[first + t], bf16_of(high[0], high[1]));
        _mm512_store_si512(tokens->low[first + t], bf16_of(low[0], low[1]));
    }
    const vf half = vf_mul(fold_rows(SUM, PREPARED_TOKENS, number[0]), step);
    const vf other_half = vf_mul(fold_rows(SUM, PREPARED_TOKENS, number[1]), step);
    _mm256_storeu_ps(sums->half[0] + first, _mm512_castps512_ps256(half));
    _mm256_storeu_ps(sums->half[1] + first, _mm512_castps512_ps256(other_half));
    _mm256_storeu_ps(sums->both + first, _mm512_castps512_ps256(vf_add(half, other_half)));
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

/* The numbers that codes stand for, as bfloat16: whole for codes of up to 6 bits, in separate bytes for 8-bit codes. */
typedef struct code_numbers {
    alignas(64) uint16_t whole[64];
    alignas(64) uint8_t bytes[2][256]; /* low bytes, then high bytes */
} code_numbers;

static void set_code_numbers(fkv_panel_layout layout, const int8_t *table, code_numbers *numbers) {
    for (int code = 0; code < (layout.bits == 8 ? 256 : 64); code++) {
        float number = layout.table ? table[code % 16] : (float)(code - (layout.biased ? 0 : fkv_panel_center(layout)));
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        if (layout.bits == 8) {
            numbers->bytes[0][code] = (uint8_t)(bits >> 16);
            numbers->bytes[1][code] = (uint8_t)(bits >> 24);
        } else {
            numbers->whole[code] = (uint16_t)(bits >> 16);
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
FKV_INLINE void convert_quad(fkv_panel_layout layout, const code_numbers *numbers, __m512i quad, tile_row *codes) {
    __m512i even;
    __m512i odd;
    if (layout.bits == 8) {
        __m512i low = look_up_bytes(numbers->bytes[0], quad);
        __m512i high = look_up_bytes(numbers->bytes[1], quad);
        even = _mm512_mask_mov_epi8(low, 0xaaaaaaaaaaaaaaaa, _mm512_slli_epi16(high, 8));
        odd = _mm512_mask_mov_epi8(_mm512_srli_epi16(low, 8), 0xaaaaaaaaaaaaaaaa, high);
    } else {
        const __m512i first = _mm512_load_si512(numbers->whole);
        const __m512i second = _mm512_load_si512(numbers->whole + 32);
        __m512i upper = _mm512_srli_epi16(quad, 8);
        even = layout.bits <= 5 ? _mm512_permutexvar_epi16(quad, first) : _mm512_permutex2var_epi16(first, quad, second);
        odd = layout.bits <= 5 ? _mm512_permutexvar_epi16(upper, first) : _mm512_permutex2var_epi16(first, upper, second);
    }
    _mm512_store_si512(codes[0], even);
    _mm512_store_si512(codes[1], odd);
}

FKV_INLINE void unpack_unit(fkv_panel_layout layout, const uint8_t *lines, const code_numbers *numbers, tile_row *codes) {
    __m512i quads[UNIT_QUADS];
    layout.table = false; /* `numbers` contains the values of the table */
    load_quads(layout, lines, _mm512_setzero_si512(), quads);
    FKV_UNROLL
    for (int j = 0; j < UNIT_QUADS; j++) convert_quad(layout, numbers, quads[j], codes + 2 * j);
    fkv_tiles_see_stores();
}

/* ---- tiles ---- */

/* Returns whether one accumulator holds the exact dot product of a group with both activation bytes. */
FKV_INLINE bool is_joint(fkv_panel_layout layout) {
    const uint32_t largest_code = layout.biased ? (1u << layout.bits) - 1 : (uint32_t)fkv_panel_center(layout);
    return largest_code * layout.group * (127 * 256 + 128) < 1u << 24;
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

/* Dot products of 16 tokens with 16 rows over one group, multiplied by step / CODE_SUM_BOUND. If each byte has an accumulator,
 * dot[0] holds the products with the high bytes and dot[1] those with the low bytes. */
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
FKV_INLINE void start_group(fkv_panel_layout layout, uint32_t set, const tile_row *codes, const unit_tokens *tokens,
                            uint32_t column) {
    _tile_loadd(6, codes, FKV_TILE_BYTES);
    _tile_loadd(4, tokens->high[0] + column, FKV_TILE_BYTES);
    _tile_loadd(5, tokens->low[0] + column, FKV_TILE_BYTES);
    if (!is_joint(layout)) {
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

FKV_INLINE void store_group(fkv_panel_layout layout, uint32_t set, group_sums *sums) {
    if (!is_joint(layout)) {
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

/* A span of columns in some panels, and one block of tokens. */
typedef struct span {
    const uint8_t *lines;  /* address of the span's codes in the first panel */
    const uint8_t *halves; /* address of the span's scales in the first panel */
    size_t panel_bytes;
    uint32_t n_panels;
    uint32_t n_units;          /* number of units in the span */
    const tile_row *unpacked;  /* [n_panels, n_units, CODE_ROWS] unpacked codes; not used if the pipeline unpacks them */
    const unit_tokens *tokens; /* [n_units] */
    const unit_x_sums *sums;   /* [n_units] */
    uint32_t n_tokens;
    bool is_first; /* true for the first span, when out does not hold partial results yet */
    float *out;    /* output of the first panel */
    size_t out_stride;
} span;

FKV_INLINE void load_outputs(const span *s, const float *out, vf *lanes) {
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_BLOCK_TOKENS; t++)
        lanes[t] = !s->is_first && t < s->n_tokens ? vf_load(out + t * s->out_stride) : vf_set(0.0f);
}

FKV_INLINE void store_outputs(const span *s, const vf *lanes, float *out) {
    FKV_UNROLL
    for (uint32_t t = 0; t < FKV_BLOCK_TOKENS; t++)
        if (t < s->n_tokens) vf_store(out + t * s->out_stride, lanes[t]);
}

/* Scales the dot products over one group and adds them to the outputs. */
FKV_INLINE void add_sums(fkv_panel_layout layout, const uint8_t *halves, const float *x_sums, const group_sums *sums, vf *lanes) {
    vf scale;
    vf bias;
    load_affine(layout, halves, &scale, &bias);
    const vf larger = vf_mul(scale, vf_set(CODE_SUM_BOUND));
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        vf dot = vf_load(sums->dot[0][t]);
        if (!is_joint(layout)) dot = vf_add(dot, vf_load(sums->dot[1][t]));
        lanes[t] = add_group(layout, dot, larger, bias, x_sums[t], lanes[t]);
    }
}

/* Position of one stage of the pipeline. Each turn of the unpacking stage processes one unit, and each turn of the other stages
 * one group. The compiler removes pointers that a stage does not use. */
typedef struct stage {
    uint32_t turn;
    uint32_t unit;     /* index of the unit within the span */
    const uint8_t *at; /* address of the unit's codes or scales in the panel */
    const unit_tokens *tokens;
    const unit_x_sums *sums;
} stage;

/* Advances to the next unit, or to the first unit of the next panel. `bytes` is the distance between units in a panel. */
FKV_INLINE void next_unit(const span *s, size_t bytes, stage *g) {
    g->at += bytes;
    g->tokens++;
    g->sums++;
    if (++g->unit < s->n_units) return;
    g->unit = 0;
    g->at += s->panel_bytes - s->n_units * bytes;
    g->tokens = s->tokens;
    g->sums = s->sums;
}

/* Unpacks one unit. ring: [RING_UNITS, CODE_ROWS] */
FKV_INLINE void unpack_turn(fkv_panel_layout layout, const code_numbers *numbers, const span *s, tile_row *ring, stage *g) {
    if (g->turn == s->n_units * s->n_panels) return;
    FKV_UNROLL
    for (uint32_t line = 0; line < layout.bits; line++) FKV_PREFETCH(g->at + (size_t)line * FKV_LINE_BYTES + s->panel_bytes);
    unpack_unit(layout, g->at, numbers, ring + g->turn % RING_UNITS * CODE_ROWS);
    g->turn++;
    next_unit(s, (size_t)layout.bits * FKV_LINE_BYTES, g);
}

/* Starts the products of one group. ring: codes unpacked by unpack_turn(), or NULL if s->unpacked holds them. */
FKV_INLINE void start_turn(fkv_panel_layout layout, uint32_t set, const span *s, const tile_row *ring, stage *g) {
    const uint32_t unit_groups = UNIT_NUMBERS / layout.group;
    const uint32_t group = set % unit_groups; /* within the unit; the number of sets is a multiple of unit_groups */
    const uint32_t row = g->turn * (layout.group / 2);
    if (g->turn == s->n_units * unit_groups * s->n_panels) return;
    start_group(layout, set, ring != NULL ? ring + row % (RING_UNITS * CODE_ROWS) : s->unpacked + row, g->tokens,
                group * layout.group);
    g->turn++;
    if (group + 1 == unit_groups) next_unit(s, 0, g);
}

/* Multiplies the span by the block of tokens. In each turn, the pipeline starts the products of a later group, stores those of
 * the next group, and adds those of the current group, which the previous turn stored, to the outputs. The layout and `fresh` are
 * compile-time constants. If `fresh` is true, the pipeline also unpacks the codes. */
FKV_INLINE void run_span(fkv_panel_layout layout, bool fresh, const code_numbers *numbers, const span *s) {
    const uint32_t n_sets = is_joint(layout) ? MAX_SETS : MAX_SETS / 2;
    const uint32_t unit_groups = UNIT_NUMBERS / layout.group;
    const uint32_t n_turns = s->n_units * unit_groups * s->n_panels;
    const size_t group_bytes = fkv_panel_group_bytes(layout);
    alignas(64) tile_row ring_codes[RING_UNITS * CODE_ROWS];
    tile_row *const ring = fresh ? ring_codes : NULL;
    group_sums sums[2];
    vf lanes[FKV_BLOCK_TOKENS];
    stage unpack = {.at = s->lines, .tokens = s->tokens, .sums = s->sums};
    stage start = unpack;
    stage add = {.at = s->halves, .tokens = s->tokens, .sums = s->sums};
    float *out = s->out;
    memset(sums, 0, sizeof sums); /* tiles do not write the rows of unused tokens */
    load_outputs(s, out, lanes);
    for (int i = 0; fresh && i < UNPACK_AHEAD; i++) unpack_turn(layout, numbers, s, ring, &unpack);
    FKV_UNROLL
    for (uint32_t set = 0; set < n_sets; set++) start_turn(layout, set, s, ring, &start);
    store_group(layout, 0, &sums[0]);
    while (add.turn < n_turns) {
        FKV_UNROLL
        for (uint32_t set = 0; set < n_sets; set++) {
            const uint32_t group = set % unit_groups;
            if (add.turn == n_turns) break;
            if (fresh && group == 0) unpack_turn(layout, numbers, s, ring, &unpack);
            start_turn(layout, set, s, ring, &start);
            if (add.turn + 1 < n_turns) store_group(layout, (set + 1) % n_sets, &sums[(set + 1) % 2]);
            if (fresh) FKV_PREFETCH(add.at + s->panel_bytes);
            add_sums(layout, add.at + group * group_bytes, unit_groups == 1 ? add.sums->both : add.sums->half[group],
                     &sums[set % 2], lanes);
            add.turn++;
            if (group + 1 < unit_groups) continue;
            next_unit(s, unit_groups * group_bytes, &add);
            if (add.unit != 0) continue;
            store_outputs(s, lanes, out);
            out += FKV_PANEL_ROWS;
            if (add.turn < n_turns) load_outputs(s, out, lanes);
        }
    }
}

/* ---- product ---- */

/* Returns the span of up to n_panels panels and n_units units that starts at `panel` and `unit`. Sets all fields except those
 * that depend on the tokens. The span is empty if there is no such panel. */
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
    s->tokens = block.units + unit;
    s->sums = block.sums + unit;
    s->n_tokens = block.n_tokens;
    s->out = out;
    s->out_stride = out_stride;
}

/* Prefetches the codes of panels [panel, end) of a span into the private cache. */
FKV_INLINE void prefetch_panels(fkv_panel_layout layout, const span *s, uint32_t panel, uint32_t end) {
    const size_t bytes = (size_t)s->n_units * layout.bits * FKV_LINE_BYTES;
    for (; panel < end; panel++)
        for (size_t i = 0; i < bytes; i += FKV_LINE_BYTES) FKV_PREFETCH_FAR(s->lines + panel * s->panel_bytes + i);
}

/* Multiplies a span by all blocks of tokens, one block after another, and meanwhile prefetches the codes of the next span. out:
 * output of the span's first panel for `token`. */
FKV_INLINE void run_blocks(fkv_panel_layout layout, const code_numbers *numbers, span *s, const span *next, uint32_t unit,
                           const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out, size_t out_stride) {
    alignas(64) tile_row unpacked[SPAN_PANELS * SPAN_UNITS * CODE_ROWS];
    tile_row *codes = unpacked;
    for (uint32_t i = 0; i < s->n_panels; i++)
        for (uint32_t u = 0; u < s->n_units; u++, codes += CODE_ROWS)
            unpack_unit(layout, s->lines + i * s->panel_bytes + (size_t)u * layout.bits * FKV_LINE_BYTES, numbers, codes);
    s->unpacked = unpacked;
    product_tiles_open(layout, FKV_BLOCK_TOKENS);
    for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
        span_set_tokens(in, token + t, unit, out + t * out_stride, out_stride, s);
        if (s->n_tokens < FKV_BLOCK_TOKENS) product_tiles_open(layout, s->n_tokens);
        prefetch_panels(layout, next, next->n_panels * t / n_tokens, next->n_panels * (t + s->n_tokens) / n_tokens);
        run_span(layout, false, numbers, s);
    }
}

FKV_INLINE void tile_product(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                             uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    const bool alone = n_tokens <= FKV_BLOCK_TOKENS;
    const uint32_t n_panels = alone ? p->n_panels : SPAN_PANELS;
    const uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    const uint32_t n_units = even_span(all_units, SPAN_UNITS);
    code_numbers numbers;
    set_code_numbers(layout, p->table, &numbers);
    if (alone) product_tiles_open(layout, n_tokens);
    span s = span_of(layout, p, 0, n_panels, 0, n_units);
    for (uint32_t panel = 0, unit = 0; panel < p->n_panels;) {
        const uint32_t last_unit = unit;
        float *to = out + (size_t)panel * FKV_PANEL_ROWS;
        unit += n_units;
        if (unit >= all_units) {
            unit = 0;
            panel = fkv_min_u32(panel + n_panels, p->n_panels);
        }
        span next = span_of(layout, p, panel, n_panels, unit, n_units);
        if (alone) {
            span_set_tokens(in, token, last_unit, to, out_stride, &s);
            run_span(layout, true, &numbers, &s);
        } else {
            run_blocks(layout, &numbers, &s, &next, last_unit, in, token, n_tokens, to, out_stride);
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

const fkv_product_kernels fkv_product_amx = {MIN_TOKENS, amx_prepare, amx_product, fill_avx512_panel};
