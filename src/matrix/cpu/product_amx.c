/* AMX matrix products of packed weight panels with blocks of 16 tokens. Results are bit-identical to those of product_vnni.h:
 * integer sums are exact in any order, and the float operations that follow are performed in the same order.
 *
 * Columns are processed in units of 32. Matrix A holds the high or the low activation bytes of 16 tokens for one unit. Matrix B
 * holds the codes of the unit, one byte each. AMX multiplies one unit while vector instructions scale the dot products of
 * another. The outputs of 16 tokens x 16 rows stay in registers. Scale groups of 16 columns would leave half of every tile empty,
 * so matrices with such groups use the vector kernels.
 *
 * For several panels at a time, the codes of a span of several units are unpacked once and then used for all tokens. The
 * activation bytes of a block of tokens stay in L1 while these panels are processed. `out` holds the partial results. 8-bit codes
 * are loaded as tiles without unpacking, so AMX is faster than vectors even for a single block of tokens. If the data is in
 * cache, 16 tokens x 16 rows x 32 columns take 93 cycles with AMX and 142 cycles with vectors.
 */
#include "../../base/simd/amx_tiles.h"
#include "fill_avx512.h"
#include "product_amx_bf16.h"

enum {
    SPAN_UNITS = 16, /* number of units (32 columns each) per span; a span has 16 KiB of activations per block of tokens and 8 KiB
                        of codes per panel */
    SPAN_PANELS = 8
};

typedef uint8_t unit_codes[UNIT_QUADS][FKV_LINE_BYTES];

/* A span of columns in one panel: the codes (one byte each) and the address of the scales. */
typedef struct span {
    alignas(64) unit_codes unpacked[SPAN_UNITS];
    const unit_codes *codes; /* points to `unpacked` or to the codes in the panel */
    size_t ahead; /* offset, in bytes, of the codes to prefetch, which belong to the next panel; 0 disables prefetching */
    const uint8_t *halves;
} span;

/* Integer dot products over one unit (32 columns) of codes with the high and the low activation bytes, for 16 tokens and 16
 * rows. */
typedef struct unit_sums {
    alignas(64) int32_t high[FKV_TILE_HEIGHT][FKV_PANEL_ROWS];
    alignas(64) int32_t low[FKV_TILE_HEIGHT][FKV_PANEL_ROWS];
} unit_sums;

/* Configures the AMX tiles. Consecutive units of columns alternate between two pairs of accumulators: tiles 0 and 1, and tiles 2
 * and 3. The first tile of a pair accumulates products with high activation bytes, the second tile products with low activation
 * bytes. Tiles 4 and 5 hold the high and low bytes, and tile 6 holds the codes. */
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

/* Starts the matrix products over one unit (32 columns). Each pair of accumulator tiles has its own branch, because AMX
 * instructions take literal tile numbers. */
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

FKV_INLINE void store_unit_sums(int set, unit_sums *sums) {
    if (set == 0) {
        _tile_stored(0, sums->high, FKV_LINE_BYTES);
        _tile_stored(1, sums->low, FKV_LINE_BYTES);
    } else {
        _tile_stored(2, sums->high, FKV_LINE_BYTES);
        _tile_stored(3, sums->low, FKV_LINE_BYTES);
    }
    fkv_tiles_see_stores();
}

/* Scales the dot products over one unit (32 columns) and adds them to the outputs. */
FKV_INLINE void add_sums(fkv_panel_layout layout, const span *s, const unit_sums *sums, const unit_scaling *scaling, uint32_t u,
                         vf *out) {
    vf scale;
    vf bias;
    load_affine(layout, s->halves + u * fkv_panel_group_bytes(layout), &scale, &bias);
    scaling += (size_t)u * FKV_BLOCK_TOKENS;
    const vf larger = vf_mul(scale, vf_set(CODE_SUM_BOUND));
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) {
        vf dot = _mm512_cvtepi32_ps(join_bytes(_mm512_load_si512(sums->high[t]), _mm512_load_si512(sums->low[t])));
        out[t] = add_group(vf_mul(dot, vf_set(scaling[t].step)), larger, bias, scaling[t].both, out[t]);
    }
}

/* Multiplies a span of columns of one panel by one block of tokens. Each loop iteration reads the dot products that the previous
 * iteration stored, so that loads do not wait for stores. */
FKV_INLINE void block_span(fkv_panel_layout layout, const span *s, uint32_t unit, uint32_t n_units, const token_block *block,
                           float *out, size_t out_stride) {
    const unit_bytes *bytes = block->bytes + (size_t)unit * FKV_BLOCK_TOKENS;
    const unit_scaling *scaling = block->scaling + (size_t)unit * FKV_BLOCK_TOKENS;
    unit_sums sums[2];
    vf lanes[FKV_BLOCK_TOKENS];
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) lanes[t] = unit == 0 ? vf_set(0.0f) : vf_load(out + (size_t)t * out_stride);
    start_sums(0, s, bytes, 0);
    for (uint32_t u = 0; u < n_units; u += 2) {
        store_unit_sums(0, &sums[0]);
        if (u + 1 < n_units) start_sums(1, s, bytes, u + 1);
        if (u > 0) add_sums(layout, s, &sums[1], scaling, u - 1, lanes);
        if (u + 1 < n_units) store_unit_sums(1, &sums[1]);
        if (u + 2 < n_units) start_sums(0, s, bytes, u + 2);
        add_sums(layout, s, &sums[0], scaling, u, lanes);
    }
    if (n_units % 2 == 0) add_sums(layout, s, &sums[1], scaling, n_units - 1, lanes);
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) vf_store(out + (size_t)t * out_stride, lanes[t]);
}

/* Multiplies panels by full blocks of 16 tokens. */
FKV_INLINE void amx_product_kind(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                 uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    uint32_t all_units = in->n_cols / UNIT_NUMBERS;
    uint32_t span_units = even_span(all_units, SPAN_UNITS);
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
                token_block block = token_block_at(in, token + t);
                float *to = out + t * out_stride + (size_t)panel * FKV_PANEL_ROWS;
                for (uint32_t i = 0; i < n_panels; i++)
                    block_span(layout, &spans[i], unit, n_units, &block, to + (size_t)i * FKV_PANEL_ROWS, out_stride);
            }
        }
    }
    fkv_tiles_close();
}

/* Selects the kernel. Activations that were prepared as tiles use bfloat16 tiles. Byte tiles are used for full blocks of 16
 * tokens if three conditions hold: bfloat16 products would not be exact, scale groups have 32 columns, and there are at least two
 * full blocks or the codes have 8 bits. All other tokens use vector kernels. */
FKV_INLINE void amx_product_tokens(fkv_matrix_kind kind, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                   uint32_t n_tokens, float *out, size_t out_stride) {
    const fkv_panel_layout layout = fkv_panel_layout_of(kind);
    if (bf16_is_exact(layout) && in->as_tiles) {
        bf16_product(layout, p, in, token, n_tokens, out, out_stride);
        return;
    }
    uint32_t n_whole = n_tokens - n_tokens % FKV_BLOCK_TOKENS;
    if ((n_whole <= FKV_BLOCK_TOKENS && layout.bits != 8) || layout.group != UNIT_NUMBERS || bf16_is_exact(layout)) n_whole = 0;
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
    return n_tokens >= BF16_MIN_TOKENS && bf16_is_exact(fkv_panel_layout_of(kind));
}

const fkv_product_kernels fkv_product_amx = {amx_wants_tiles, amx_prepare_tokens, amx_product, fill_avx512_panel};
