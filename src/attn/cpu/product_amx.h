/* The product of affine panels with blocks of tokens over AMX, with the bits of product_vnni.h: sums of integers are exact in any
 * order, and what happens to a sum afterwards is the same float operations in the same order.
 *
 * A = the high or the low bytes of up to 16 tokens x the columns of a group; B = the quads of a group, which lie in a panel as a
 * tile wants them (4-bit codes are unpacked first). The matrix unit makes the sums of one group while the vector unit turns
 * those of another into floats; the outputs of 16 tokens x 16 rows stay in registers.
 *
 * A span of columns is unpacked once for all tokens; what has been summed before it waits in out, as the same floats.
 */
enum {
    SPAN_UNITS = 16, /* 16 KiB of bytes of a block of tokens, 8 KiB of unpacked codes of a panel */
    SPAN_PANELS = 8
};

/* A span of a panel as the loops below read it: for each group its codes, a byte each, then scales and biases. */
typedef struct span {
    const uint8_t *codes;
    const uint8_t *halves;
    size_t code_stride; /* from group to group */
    size_t half_stride;
} span;

typedef struct span_codes {
    alignas(64) uint8_t unit[SPAN_UNITS][UNIT_QUADS][QUAD_BYTES];
} span_codes;

/* The sums of one group with the high bytes, and with the low ones. */
typedef struct group_sums {
    alignas(64) int32_t high[FKV_TILE_HEIGHT][FKV_PANEL_LANES];
    alignas(64) int32_t low[FKV_TILE_HEIGHT][FKV_PANEL_LANES];
} group_sums;

/* Groups take turns with two sets of tiles. 0, 1 and 2, 3: sums of the high and the low bytes; 4, 5: those bytes; 6: codes. */
static void product_tiles_open(uint32_t n_tokens, uint32_t group) {
    fkv_tile_shapes shapes = {0};
    for (int i = 0; i < 4; i++) fkv_tile_shape(&shapes, i, n_tokens, 64);
    for (int i = 4; i < 6; i++) fkv_tile_shape(&shapes, i, n_tokens, group);
    fkv_tile_shape(&shapes, 6, group / 4, 64);
    fkv_tiles_open(&shapes);
}

/* Four-bit codes to a byte each; others stay where they are. */
FKV_INLINE span span_open(int bits, int group, const uint8_t *panel, uint32_t unit, uint32_t end, span_codes *unpacked) {
    size_t code_bytes = (size_t)group * (size_t)bits / 8 * FKV_PANEL_LANES;
    size_t group_bytes = code_bytes + 2 * (size_t)HALVES_BYTES;
    const uint8_t *codes = panel + (size_t)unit * (UNIT_NUMBERS / (size_t)group) * group_bytes;
    if (bits == 8) return (span){codes, codes + code_bytes, group_bytes, group_bytes};
    for (uint32_t u = unit; u < end; u++) {
        const uint8_t *from = codes + (u - unit) * group_bytes;
        __m512i quads[UNIT_QUADS];
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS / 2; j++) quads[j] = _mm512_loadu_si512(from + (size_t)j * QUAD_BYTES);
        split_halves(UNIT_QUADS / 2, quads);
        FKV_UNROLL
        for (int j = 0; j < UNIT_QUADS; j++) _mm512_store_si512(unpacked->unit[u - unit][j], quads[j]);
    }
    return (span){unpacked->unit[0][0], codes + code_bytes, sizeof *unpacked->unit, group_bytes};
}

/* Tile numbers are part of the instruction, so that each set has its own lines. */
FKV_INLINE void start_sums(int set, const uint8_t *codes, const int8_t *high, const int8_t *low) {
    _tile_loadd(6, codes, QUAD_BYTES);
    _tile_loadd(4, high, sizeof(unit_bytes));
    _tile_loadd(5, low, sizeof(unit_bytes));
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

FKV_INLINE void store_sums(int set, group_sums *sums) {
    if (set == 0) {
        _tile_stored(0, sums->high, 64);
        _tile_stored(1, sums->low, 64);
    } else {
        _tile_stored(2, sums->high, 64);
        _tile_stored(3, sums->low, 64);
    }
    fkv_tiles_see_stores();
}

/* As int_product_group() ends. */
FKV_INLINE void add_group(int n_tokens, bool whole_unit, uint32_t half, const group_sums *sums, const uint8_t *halves,
                          const unit_facts *facts, vf *sum) {
    vf scale;
    vf bias;
    vf_load_f16(halves, &scale);
    vf_load_f16(halves + HALVES_BYTES, &bias);
    FKV_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        vf dot = _mm512_cvtepi32_ps(join(_mm512_load_si512(sums->high[t]), _mm512_load_si512(sums->low[t])));
        sum[t] = vf_fma(bias, vf_set(whole_unit ? facts[t].both : facts[t].sum[half]), sum[t]);
        sum[t] = vf_fma(dot, vf_mul(scale, vf_set(facts[t].step)), sum[t]);
    }
}

/* One span for one block of tokens. */
FKV_INLINE void block_span(int group, const span *s, uint32_t unit, uint32_t end, const token_block *block, float *out,
                           size_t out_stride) {
    group_sums sums[2];
    vf sum[FKV_BLOCK_TOKENS];
    const uint32_t per_unit = UNIT_NUMBERS / (uint32_t)group;
    const uint32_t n_groups = (end - unit) * per_unit;
    const unit_bytes *bytes = block->bytes + (size_t)unit * FKV_BLOCK_TOKENS;
    const unit_facts *facts = block->facts + (size_t)unit * FKV_BLOCK_TOKENS;
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) sum[t] = unit == 0 ? vf_set(0.0f) : vf_load(out + (size_t)t * out_stride);

#define START(set, g)                                                                                                            \
    start_sums(set, s->codes + (g) * s->code_stride, bytes[(g) / per_unit * FKV_BLOCK_TOKENS].high + (g) % per_unit * 16,        \
               bytes[(g) / per_unit * FKV_BLOCK_TOKENS].low + (g) % per_unit * 16)
#define ADD(set, g)                                                                                                              \
    add_group(FKV_BLOCK_TOKENS, group == UNIT_NUMBERS, (g) % per_unit, &sums[set], s->halves + (g) * s->half_stride,             \
              facts + (size_t)((g) / per_unit) * FKV_BLOCK_TOKENS, sum)
    START(0, 0);
    for (uint32_t g = 0; g < n_groups; g += 2) {
        store_sums(0, &sums[0]);
        if (g + 1 < n_groups) START(1, g + 1);
        if (g > 0) ADD(1, g - 1);
        if (g + 1 == n_groups) break;
        store_sums(1, &sums[1]);
        if (g + 2 < n_groups) START(0, g + 2);
        ADD(0, g);
    }
    if (n_groups % 2 == 0)
        ADD(1, n_groups - 1);
    else
        ADD(0, n_groups - 1);
#undef START
#undef ADD
    FKV_UNROLL
    for (int t = 0; t < FKV_BLOCK_TOKENS; t++) vf_store(out + (size_t)t * out_stride, sum[t]);
}

/* Whole blocks of tokens. The bytes of a block for one span stay in the nearest cache while some panels pass over them. */
FKV_INLINE void amx_product_form(int bits, int group, const fkv_panels *p, const fkv_activations *in, uint32_t token,
                                 uint32_t n_tokens, float *out, size_t out_stride) {
    span_codes unpacked[SPAN_PANELS];
    span spans[SPAN_PANELS];
    uint32_t n_units = in->n_cols / UNIT_NUMBERS;
    product_tiles_open(FKV_BLOCK_TOKENS, (uint32_t)group);
    for (uint32_t panel = 0; panel < p->n_panels; panel += SPAN_PANELS) {
        uint32_t n_panels = fkv_min_u32(p->n_panels - panel, SPAN_PANELS);
        for (uint32_t unit = 0; unit < n_units; unit += SPAN_UNITS) {
            uint32_t end = fkv_min_u32(unit + SPAN_UNITS, n_units);
            for (uint32_t i = 0; i < n_panels; i++)
                spans[i] = span_open(bits, group, p->first + (panel + i) * p->panel_bytes, unit, end, &unpacked[i]);
            fkv_tiles_see_stores();
            for (uint32_t t = 0; t < n_tokens; t += FKV_BLOCK_TOKENS) {
                token_block block = block_at(in, token + t);
                float *to = out + t * out_stride + (size_t)panel * FKV_PANEL_LANES;
                for (uint32_t i = 0; i < n_panels; i++)
                    block_span(group, &spans[i], unit, end, &block, to + (size_t)i * FKV_PANEL_LANES, out_stride);
            }
        }
    }
    fkv_tiles_close();
}

static void amx_product(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                        size_t out_stride) {
    uint32_t n_whole = n_tokens - n_tokens % FKV_BLOCK_TOKENS;
    if (panels->group == 0) n_whole = 0;
    if (n_whole > 0) {
        if (panels->form == FKV_PANEL_AFFINE4)
            amx_product_form(4, 32, panels, in, token, n_whole, out, out_stride);
        else if (panels->group == 32)
            amx_product_form(8, 32, panels, in, token, n_whole, out, out_stride);
        else
            amx_product_form(8, 16, panels, in, token, n_whole, out, out_stride);
    }
    if (n_whole < n_tokens) int_product(panels, in, token + n_whole, n_tokens - n_whole, out + n_whole * out_stride, out_stride);
}
