/* The product of packed panels with blocks of 16 tokens over AMX, with the bits of product_vnni.h: sums of integers are exact in
 * any order, and what happens to a sum afterwards is the same float operations in the same order.
 *
 * A = the high or the low bytes of 16 tokens x a unit of columns; B = the unit's quads, unpacked to bytes. The matrix unit makes
 * the sums of one unit while the vector unit turns those of another into floats; the outputs of 16 tokens x 16 rows stay in
 * registers. Groups smaller than a unit would leave half of every tile empty and are as quick on vectors.
 *
 * A span of columns of some panels is unpacked once for all tokens, and a block's bytes of that span stay in L1
 * while the panels pass over them. What has been summed before the span waits in out, as the same floats.
 *
 * Codes of 8 bits are tiles as they lie in the panel, so that one block of tokens is worth it: 16 tokens x 16 rows x 32 columns
 * in cache take 93 cycles of the clock, on vectors 142.
 */
#include "../../base/simd/amx_tiles.h"
#include "fill_avx512.h"
#include "product_amx_bf16.h"

enum {
    SPAN_UNITS = 16, /* 16 KiB of a block's bytes, 8 KiB of a panel's codes */
    SPAN_PANELS = 8
};

typedef uint8_t unit_codes[UNIT_QUADS][FKV_LINE_BYTES];

/* A span of one panel: a byte for each code, and where its scales are. */
typedef struct span {
    alignas(64) unit_codes unpacked[SPAN_UNITS];
    const unit_codes *codes; /* `unpacked`, or as they lie in the panel */
    size_t ahead;            /* from there to those of the next panel, to be prefetched; 0: none is */
    const uint8_t *halves;
} span;

/* The sums of one unit with the high bytes, and with the low ones. */
typedef struct unit_sums {
    alignas(64) int32_t high[FKV_TILE_HEIGHT][FKV_PANEL_ROWS];
    alignas(64) int32_t low[FKV_TILE_HEIGHT][FKV_PANEL_ROWS];
} unit_sums;

/* Units take turns with two sets of tiles. 0, 1 and 2, 3: sums of the high and the low bytes; 4, 5: those bytes; 6: codes. */
static void product_tiles_open(void) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 4; i++) fkv_tile_shape(&shapes, i, FKV_BLOCK_TOKENS, FKV_LINE_BYTES);
    for (int i = 4; i < 6; i++) fkv_tile_shape(&shapes, i, FKV_BLOCK_TOKENS, UNIT_NUMBERS);
    fkv_tile_shape(&shapes, 6, UNIT_QUADS, FKV_LINE_BYTES);
    fkv_tiles_open(&shapes);
}

FKV_INLINE void span_open(fkv_panel_layout layout, const fkv_panels *p, uint32_t panel, uint32_t unit, uint32_t n_units,
                          span *s) {
    const uint8_t *lines = p->first + panel * p->panel_bytes;
    s->halves = lines + fkv_panel_code_bytes(layout, p->n_cols) + unit * fkv_panel_group_bytes(layout);
    lines += (size_t)unit * layout.bits * FKV_LINE_BYTES;
    s->codes = layout.bits == 8 ? (const unit_codes *)(const void *)lines : s->unpacked;
    if (layout.bits == 8) return;
    __m512i table = load_table(layout, p->table);
    for (uint32_t u = 0; u < n_units; u++, lines += (size_t)layout.bits * FKV_LINE_BYTES) {
        __m512i quads[UNIT_QUADS];
        load_quads(layout, lines, table, quads);
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) _mm512_store_si512(s->unpacked[u][j], quads[j]);
    }
}

/* Tile numbers are part of the instruction, so that each set has its own lines. */
FKV_INLINE void start_sums(int set, const span *s, const unit_bytes *bytes, uint32_t u) {
    bytes += (size_t)u * FKV_BLOCK_TOKENS;
    if (s->ahead != 0) {
        const uint8_t *next = (const uint8_t *)s->codes + u * sizeof *s->codes + s->ahead;
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) FKV_PREFETCH(next + (size_t)j * FKV_LINE_BYTES);
    }
    _tile_loadd(6, s->codes[u], FKV_LINE_BYTES);
    _tile_loadd(4, bytes->high, sizeof *bytes);
    _tile_loadd(5, bytes->low, sizeof *bytes);
    if (set == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
    } else {
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbsud(2, 4, 6);
        _tile_dpbsud(3, 5, 6);
    }
}

FKV_INLINE void store_sums(int set, unit_sums *sums) {
    if (set == 0) {
        _tile_stored(0, sums->high, FKV_LINE_BYTES);
        _tile_stored(1, sums->low, FKV_LINE_BYTES);
    } else {
        _tile_stored(2, sums->high, FKV_LINE_BYTES);
        _tile_stored(3, sums->low, FKV_LINE_BYTES);
    }
    fkv_tiles_see_stores();
}

/* As int_product_group() ends. */
FKV_INLINE void add_sums(fkv_panel_layout layout, const span *s, const unit_sums *sums, const unit_facts *facts, uint32_t u,
                         vf *out) {
    vf scale;
    vf bias;
    load_affine(layout, s->halves + u * fkv_panel_group_bytes(layout), &scale, &bias);
    facts += (size_t)u * FKV_BLOCK_TOKENS;
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        vf dot = _mm512_cvtepi32_ps(join(_mm512_load_si512(sums->high[t]), _mm512_load_si512(sums->low[t])));
        out[t] = vf_fma(bias, vf_set(facts[t].both), out[t]);
        out[t] = vf_fma(vf_mul(dot, vf_set(facts[t].step)), vf_mul(scale, vf_set(CODES)), out[t]);
    }
}

/* One span of one panel for one block of tokens. Sums are read a turn after they were stored, when they have arrived. */
FKV_INLINE void block_span(fkv_panel_layout layout, const span *s, uint32_t unit, uint32_t n_units, const token_block *block,
                           float *out, size_t out_stride) {
    const unit_bytes *bytes = block->bytes + (size_t)unit * FKV_BLOCK_TOKENS;
    const unit_facts *facts = block->facts + (size_t)unit * FKV_BLOCK_TOKENS;
    unit_sums sums[2];
    vf lanes[FKV_BLOCK_TOKENS];
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) lanes[t] = unit == 0 ? vf_set(0.0f) : vf_load(out + (size_t)t * out_stride);
    start_sums(0, s, bytes, 0);
    for (uint32_t u = 0; u < n_units; u += 2) {
        store_sums(0, &sums[0]);
        if (u + 1 < n_units) start_sums(1, s, bytes, u + 1);
        if (u > 0) add_sums(layout, s, &sums[1], facts, u - 1, lanes);
        if (u + 1 < n_units) store_sums(1, &sums[1]);
        if (u + 2 < n_units) start_sums(0, s, bytes, u + 2);
        add_sums(layout, s, &sums[0], facts, u, lanes);
    }
    if (n_units % 2 == 0) add_sums(layout, s, &sums[1], facts, n_units - 1, lanes);
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) vf_store(out + (size_t)t * out_stride, lanes[t]);
}

/* Whole blocks of tokens. */
FKV_INLINE void amx_product_kind(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                 uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    uint32_t span_units = fkv_ceil_div(all_units, fkv_ceil_div(all_units, SPAN_UNITS)); /* spans of about the same size */
    span spans[SPAN_PANELS];
    product_tiles_open();
    for (uint32_t panel = 0; panel < p->n_panels; panel += SPAN_PANELS) {
        uint32_t n_panels = fkv_min_u32(p->n_panels - panel, SPAN_PANELS);
        for (uint32_t unit = 0; unit < all_units; unit += span_units) {
            uint32_t n_units = fkv_min_u32(span_units, all_units - unit);
            for (uint32_t i = 0; i < n_panels; i++) {
                span_open(layout, p, panel + i, unit, n_units, &spans[i]);
                bool fetch = n_tokens == FKV_BLOCK_TOKENS && panel + i + 1 < p->n_panels;
                spans[i].ahead = fetch ? (size_t)p->panel_bytes : 0;
            }
            fkv_tiles_see_stores();
            for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
                token_block block = block_at(in, token + t);
                float *to = out + t * out_stride + (size_t)panel * FKV_PANEL_ROWS;
                for (uint32_t i = 0; i < n_panels; i++)
                    block_span(layout, &spans[i], unit, n_units, &block, to + (size_t)i * FKV_PANEL_ROWS, out_stride);
            }
        }
    }
    fkv_tiles_close();
}

/* Codes of 8 bits are bytes as they lie; two whole blocks and more share those that were unpacked. */
FKV_INLINE void amx_product_tokens(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                   uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    if (bf16_has_kind(layout) && in->as_tiles) {
        bf16_product(layout, p, in, token, n_tokens, out, out_stride);
        return;
    }
    uint32_t n_whole = n_tokens - n_tokens % FKV_BLOCK_TOKENS;
    if ((n_whole <= FKV_BLOCK_TOKENS && layout.bits != 8) || layout.group != UNIT_NUMBERS || bf16_has_kind(layout)) n_whole = 0;
    if (n_whole > 0) amx_product_kind(kind, p, in, token, n_whole, out, out_stride);
    if (n_whole < n_tokens) int_product(p, in, token + n_whole, n_tokens - n_whole, out + n_whole * out_stride, out_stride);
}

MATRIX_KINDS(KIND_FUNCTION, amx_product_tokens)

static void amx_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                        size_t out_stride) {
    EACH_MATRIX_KIND(amx_product_tokens)
}

static void amx_prepare_tokens(const fkv_activations *in, uint32_t token, uint32_t n_tokens) {
    (in->as_tiles ? bf16_prepare_tokens : int_prepare_tokens)(in, token, n_tokens);
}

static bool amx_wants_tiles(fkv_matrix_kind kind, uint32_t n_tokens) {
    return n_tokens >= BF16_LEAST && bf16_has_kind(fkv_panel_layout_of(kind));
}

const fkv_product_kernels fkv_product_amx = {amx_wants_tiles, amx_prepare_tokens, amx_product, fill_panel};
