/* Decode through matrix units: one block walks one piece of the history of one KV head, for up to FKV_ITEM_ROWS rows (queries
 * times query heads), and leaves {sum of p v, max, sum of p} for the merge. CUDA, and the host, which plays the matrix units by
 * hand.
 *
 * FKV_STREAMS warps take the tiles of the piece in turn, each with a softmax of its own, folded in order at the end. Heads larger
 * than a slab (128 or 64 channels) have that many warps for each stream, one for each slab; they add their scores up through
 * shared memory, slab by slab. Nothing else is shared: packed bytes go from memory into registers and from there into the
 * products, and the bytes of the next tile are on their way while this one is computed.
 *
 * Scores. Codes are the B operand of an integer product as they lie in the page (8 tokens are its columns; 4- and 2-bit codes
 * become bytes by shifts and masks). Queries are A: each number is three bytes with sign, v = 65536 high + 256 low + rest, in
 * steps of the largest of its row, and each byte has a row of A. A permutation of channels is free in a product, so every thread
 * loads whole words: see fkv_channel_place(). score = (256 step) sum_g(scale (256 high + low)) + step sum_g(scale rest) +
 * sum_g(bias sum(q))
 *
 * Values. out^T = V^T P^T: 16 channels are the rows, 16 tokens the depth, rows of the item the columns. Codes become
 * halves, exactly, around their middle (code - 128, - 8, - 2); p * scale is rounded to a half, in units of 2^(e - 14) where 2^e
 * bounds the scales of that group so far, so that any scale of any page type has all its bits; the bias is added in float.
 *
 * Which rows and tokens sit where: thread l is r = l / 4, c = l % 4. In a tile of 8 NJ tokens a thread loads the keys of tokens
 * NJ r + b, and gets scores of tokens NJ (2 c + a) + b (a = 0, 1), whose values it also loads: as P^T its weights are the B
 * operand of the values just where they are. Its scores are of row r, or of rows r and r + 8. Four rows or fewer are there twice:
 * thread r and r + 4 both have row r % 4, one from high and low, the other from rest; they tell each other, and take the groups
 * of scales in turn, 2 o + r / 4, so that no column is idle.
 *
 * Same answer however it got there: a row's numbers never meet another row's, and FKV_ITEM_ROWS changes no operation on them.
 * Where a product is added to something, fkv_mul or fkv_fma say whether it is rounded in between: left to the compiler, it would
 * be in one text and not in the other.
 */
#if FKV_D % 128 == 0
#define FKV_SLAB 128
#else
#define FKV_SLAB 64
#endif
#define FKV_N_SLABS (FKV_D / FKV_SLAB)
#define FKV_STREAMS 4
#define FKV_DECODE_THREADS (32 * FKV_STREAMS * FKV_N_SLABS)

/* a thread's rows: r, or r and r + 8; four rows or fewer are there twice */
#define FKV_TWICE (FKV_ITEM_ROWS == 4)
#define FKV_NR (FKV_ITEM_ROWS == 16 ? 2 : 1)

/* tokens of a tile: what a thread holds of it are registers. The layer decides, not FKV_ITEM_ROWS: which tokens are folded
 * together is part of the answer's bits */
#if FKV_PAGE_TOKENS >= 32 && FKV_K_BITS + FKV_V_BITS <= 12 && FKV_R <= 4 && FKV_D <= 256
#define FKV_NJ 4
#else
#define FKV_NJ 2
#endif
#define FKV_TILE (8 * FKV_NJ)

/* K: a thread loads FKV_K_LOAD bytes of each unit of FKV_K_SPAN channels of a token's slab */
#define FKV_K_ROW (FKV_D * FKV_K_BITS / 8)
#if FKV_K_BITS == 16
#define FKV_K_LOAD 16
#define FKV_K_SPAN 32
#define FKV_K_GROUPS 1 /* of a slab */
#define FKV_K_STEP_CHANNELS 16
#define FKV_NA FKV_NR /* row tiles of queries */
#else
#if FKV_K_GROUP * FKV_K_BITS / 32 > 16
#define FKV_K_LOAD 16
#else
#define FKV_K_LOAD (FKV_K_GROUP * FKV_K_BITS / 32)
#endif
#define FKV_K_SPAN (FKV_K_LOAD * 32 / FKV_K_BITS)
#define FKV_K_GROUPS (FKV_SLAB / FKV_K_GROUP)
#define FKV_K_STEP_CHANNELS 32
#define FKV_NA (FKV_ITEM_ROWS == 4 ? 1 : FKV_ITEM_ROWS == 8 ? 2 : 3)
#endif
#define FKV_K_UNITS (FKV_SLAB / FKV_K_SPAN)
#define FKV_K_WORDS ((FKV_K_LOAD + 3) / 4)
#define FKV_K_STEPS (FKV_SLAB / FKV_K_STEP_CHANNELS)
#define FKV_K_UNIT_STEPS (FKV_K_SPAN / FKV_K_STEP_CHANNELS)
#define FKV_K_GROUP_UNITS (FKV_K_UNITS / FKV_K_GROUPS)

/* V: FKV_V_LOAD bytes of each unit of FKV_V_SPAN channels: those of one group, or all where each column has scales of its own */
#define FKV_V_ROW (FKV_D * FKV_V_BITS / 8)
#if FKV_V_BITS == 16
#define FKV_V_SPAN 64
#define FKV_V_GROUPS 1
#else
#define FKV_V_GROUPS (FKV_SLAB / FKV_V_GROUP)
#if FKV_TWICE && FKV_V_GROUPS == 2
#define FKV_V_SPAN FKV_SLAB
#else
#define FKV_V_SPAN FKV_V_GROUP
#endif
#endif
#define FKV_V_LOAD (FKV_V_SPAN * FKV_V_BITS / 64)
#define FKV_V_UNITS (FKV_SLAB / FKV_V_SPAN)
#define FKV_V_WORDS ((FKV_V_LOAD + 3) / 4)
#define FKV_V_QUADS (FKV_V_SPAN / 32) /* of a thread's channels of a unit */
#define FKV_V_TILES (FKV_SLAB / 16)   /* row tiles of a slab */

/* 16-bit bfloat16 values meet p as two bfloat16 numbers */
#define FKV_V_PLAIN_BF16 (FKV_V_BITS == 16 && FKV_PAGE_BF16)

/* groups of scales that a thread's weights have, for each of its rows */
#define FKV_VT (FKV_TWICE ? (FKV_V_GROUPS + 1) / 2 : FKV_V_GROUPS)

/* scales of a tile, as floats in shared memory: of each token {scale, ...} {bias, ...} of K, {scale, bias of the middle} of V;
 * every 2 NJ tokens, what one thread reads, are shifted by 16 bytes against the next */
#define FKV_K_SCALE_FLOATS (FKV_K_BITS == 16 ? 0 : 2 * FKV_K_GROUPS)
#define FKV_V_SCALE_FLOATS (FKV_V_BITS == 16 ? 0 : 2 * FKV_V_GROUPS)
#define FKV_SHARED_SCALES (FKV_TILE * (FKV_K_SCALE_FLOATS + FKV_V_SCALE_FLOATS) + 32)

/* shared memory, in words */
#define FKV_SHARED_QUERIES (FKV_N_SLABS * FKV_NA * FKV_K_STEPS * 128)
#define FKV_SHARED_SUMQ (FKV_ITEM_ROWS * (1 + FKV_N_SLABS * FKV_K_GROUPS))
#define FKV_SHARED_ALL_SCALES (FKV_STREAMS * FKV_N_SLABS * FKV_SHARED_SCALES)
#define FKV_SHARED_STATS (2 * FKV_STREAMS * FKV_ITEM_ROWS)
#define FKV_EXCHANGES (FKV_ITEM_ROWS == 16 ? 1 : 2) /* in turn; one needs a barrier more */
#define FKV_SHARED_EXCHANGE (FKV_N_SLABS > 1 ? FKV_EXCHANGES * FKV_STREAMS * FKV_N_SLABS * FKV_NR * 2 * FKV_NJ * 32 : 0)
#define FKV_SHARED_SUMS (FKV_ITEM_ROWS * FKV_D)
#define FKV_DECODE_SHARED                                                                                                        \
    (FKV_SHARED_QUERIES + FKV_SHARED_SUMQ + FKV_SHARED_ALL_SCALES + FKV_SHARED_STATS +                                           \
     (FKV_SHARED_EXCHANGE > FKV_SHARED_SUMS ? FKV_SHARED_EXCHANGE : FKV_SHARED_SUMS))

#define FKV_MINUS_INFINITY fkv_float_of(0xff800000u)

/* What a thread holds of a tile. */
struct fkv_tile_k {
    fkv_u32 codes[FKV_NJ][FKV_K_UNITS][FKV_K_WORDS];
};
struct fkv_tile_v {
    fkv_u32 codes[2][FKV_NJ][FKV_V_UNITS][FKV_V_WORDS];
};
/* Of token lane % FKV_TILE: scales and biases as they lie in the page. */
struct fkv_tile_scales {
    fkv_u32 k[2][(FKV_K_GROUPS + 1) / 2];
    fkv_u32 v[2][(FKV_V_GROUPS + 1) / 2];
};

/* A warp's share of the piece. */
struct fkv_decode_state {
    float max[FKV_NR];
    float total[FKV_NR];              /* of the thread's own tokens */
    fkv_u32 exponent[FKV_NR][FKV_VT]; /* of the largest scale seen, as a float has it */
    float bias[FKV_NR][FKV_VT];       /* of the thread's own tokens */
    float sums[FKV_V_TILES][FKV_NR][4];
};

/* n bytes, known when compiled. */
FKV_FN void fkv_stream(fkv_u32 *to, const fkv_u8 *at, int n) {
    if (n >= 16) {
        FKV_UNROLL
        for (int i = 0; i < n / 16; i++) {
            fkv_words4 x = fkv_stream16(at + 16 * i);
            FKV_UNROLL
            for (int k = 0; k < 4; k++) to[4 * i + k] = x.w[k];
        }
    } else if (n == 8) {
        fkv_words2 x = fkv_stream8(at);
        to[0] = x.w[0];
        to[1] = x.w[1];
    } else if (n == 4) {
        to[0] = fkv_stream4(at);
    } else if (n == 2) {
        to[0] = fkv_stream2(at);
    } else {
        to[0] = fkv_stream1(at);
    }
}

FKV_FN void fkv_load_k(fkv_tile_k *to, const fkv_u8 *block, fkv_u32 slot, fkv_u32 slab, fkv_u32 lane) {
    fkv_u32 token = slot + FKV_NJ * (lane / 4);
    const fkv_u8 *codes = block + FKV_K_CODES + token * FKV_K_ROW + slab * (FKV_SLAB * FKV_K_BITS / 8) + lane % 4 * FKV_K_LOAD;
    FKV_UNROLL
    for (int b = 0; b < FKV_NJ; b++) {
        FKV_UNROLL
        for (int u = 0; u < FKV_K_UNITS; u++) fkv_stream(to->codes[b][u], codes + b * FKV_K_ROW + u * 4 * FKV_K_LOAD, FKV_K_LOAD);
    }
}

FKV_FN void fkv_load_v(fkv_tile_v *to, const fkv_u8 *block, fkv_u32 slot, fkv_u32 slab, fkv_u32 lane) {
    fkv_u32 token = slot + 2 * FKV_NJ * (lane % 4);
    const fkv_u8 *codes = block + FKV_V_CODES + token * FKV_V_ROW + slab * (FKV_SLAB * FKV_V_BITS / 8) + lane / 4 * FKV_V_LOAD;
    FKV_UNROLL
    for (int a = 0; a < 2; a++) {
        FKV_UNROLL
        for (int b = 0; b < FKV_NJ; b++) {
            FKV_UNROLL
            for (int u = 0; u < FKV_V_UNITS; u++)
                fkv_stream(to->codes[a][b][u], codes + (a * FKV_NJ + b) * FKV_V_ROW + u * 8 * FKV_V_LOAD, FKV_V_LOAD);
        }
    }
}

FKV_FN void fkv_load_scales(fkv_tile_scales *to, const fkv_u8 *block, fkv_u32 slot, fkv_u32 slab, fkv_u32 lane) {
    fkv_u32 at = (slot + lane % FKV_TILE) * FKV_N_SLABS + slab;
#if FKV_K_BITS < 16
    fkv_stream(to->k[0], block + FKV_K_SCALES + at * (FKV_K_GROUPS * 2), FKV_K_GROUPS * 2);
    fkv_stream(to->k[1], block + FKV_K_BIASES + at * (FKV_K_GROUPS * 2), FKV_K_GROUPS * 2);
#endif
#if FKV_V_BITS < 16
    fkv_stream(to->v[0], block + FKV_V_SCALES + at * (FKV_V_GROUPS * 2), FKV_V_GROUPS * 2);
    fkv_stream(to->v[1], block + FKV_V_BIASES + at * (FKV_V_GROUPS * 2), FKV_V_GROUPS * 2);
#endif
    (void)at;
}

FKV_FN float fkv_scale_of(const fkv_u32 *words, int g) {
    return fkv_page_number(g % 2 == 0 ? words[g / 2] & 0xffffu : words[g / 2] >> 16);
}

/* Where the scales of the tile's token 2 NJ c + i lie, of a side with n floats for each token. */
FKV_FN fkv_u32 fkv_scales_at(fkv_u32 c, fkv_u32 i, fkv_u32 n) { return c * (2 * FKV_NJ * n + 4) + i * n; }

#define FKV_V_MIDDLE (FKV_V_BITS == 8 ? 128.0f : FKV_V_BITS == 4 ? 8.0f : 2.0f)

/* Scales of a tile as floats to the warp's shared memory, each token's by one thread. Tokens from n_live on are behind the last
 * query: whatever bytes are there, their values weigh 0. bits: the largest scale of V of each group in the tile, as bits without
 * sign. */
FKV_FN void fkv_share_scales(const fkv_tile_scales *from, fkv_u32 n_live, fkv_u32 lane, FKV_SHARED float *scales, fkv_u32 *bits) {
    fkv_u32 c = lane % FKV_TILE / (2 * FKV_NJ);
    fkv_u32 i = lane % (2 * FKV_NJ);
    fkv_sync_warp(); /* the last tile's were read */
#if FKV_K_BITS < 16
    if (lane < FKV_TILE) {
        FKV_SHARED float *k = scales + fkv_scales_at(c, i, FKV_K_SCALE_FLOATS);
        FKV_UNROLL
        for (int g = 0; g < FKV_K_GROUPS; g++) {
            k[g] = fkv_scale_of(from->k[0], g);
            k[FKV_K_GROUPS + g] = fkv_scale_of(from->k[1], g);
        }
    }
#endif
#if FKV_V_BITS < 16
    FKV_SHARED float *v = scales + FKV_TILE * FKV_K_SCALE_FLOATS + 16 + fkv_scales_at(c, i, FKV_V_SCALE_FLOATS);
    FKV_UNROLL
    for (int g = 0; g < FKV_V_GROUPS; g++) {
        float scale = lane % FKV_TILE < n_live ? fkv_scale_of(from->v[0], g) : 0.0f;
        float bias = lane % FKV_TILE < n_live ? fkv_scale_of(from->v[1], g) : 0.0f;
        if (lane < FKV_TILE) {
            v[2 * g] = scale;
            v[2 * g + 1] = fkv_fma(scale, FKV_V_MIDDLE, bias);
        }
        bits[g] = fkv_warp_max_bits(fkv_bits_of(scale) & 0x7fffffffu);
    }
#endif
    fkv_sync_warp();
    (void)from, (void)n_live, (void)scales, (void)bits, (void)c, (void)i;
}

/* ---- queries ---- */

/* Where channel d of a slab lies in the B operands: product step, thread of the column, half of its pair of words, number in the
 * word. The inverse of what fkv_load_k() and fkv_k_operand() do to the codes. */
struct fkv_channel {
    fkv_u32 step;
    fkv_u32 thread;
    fkv_u32 word;
    fkv_u32 number;
};
FKV_FN fkv_channel fkv_channel_place(fkv_u32 d) {
    fkv_u32 unit = d / FKV_K_SPAN;
    fkv_u32 x = d % (FKV_K_SPAN / 4);
    fkv_channel at;
    at.thread = d % FKV_K_SPAN / (FKV_K_SPAN / 4);
#if FKV_K_BITS == 16
    at.step = x / 4;
    at.word = x / 2 % 2;
    at.number = x % 2;
#elif FKV_K_BITS == 8
    at.step = x / 8;
    at.word = x / 4 % 2;
    at.number = x % 4;
#elif FKV_K_BITS == 4
    at.step = x / 8;
    at.word = x % 2;
    at.number = x % 8 / 2;
#elif FKV_K_LOAD >= 4
    at.step = x / 16 * 2 + x % 4 / 2;
    at.word = x % 2;
    at.number = x % 16 / 4;
#else
    at.step = 0;
    at.word = x % 4 / 2;
    at.number = x / 4 + x % 2 * 2;
#endif
    at.step += unit * FKV_K_UNIT_STEPS;
    return at;
}

/* The two words of a token for one product step. */
FKV_FN void fkv_k_operand(const fkv_u32 *unit, int step, fkv_u32 *low, fkv_u32 *high) {
#if FKV_K_BITS >= 8
    *low = unit[2 * step];
    *high = unit[2 * step + 1];
#elif FKV_K_BITS == 4
    *low = unit[step] & 0x0f0f0f0fu;
    *high = unit[step] >> 4 & 0x0f0f0f0fu;
#elif FKV_K_LOAD >= 4
    fkv_u32 x = unit[step / 2] >> 4 * (step % 2);
    *low = x & 0x03030303u;
    *high = x >> 2 & 0x03030303u;
#else
    fkv_u32 x = unit[0] | unit[0] << 14;
    *low = x & 0x03030303u;
    *high = x >> 4 & 0x03030303u;
    (void)step;
#endif
}

/* Row `part` (0: high, 1: low, 2: rest) of query row `row` among the rows of A: the tile, and the row in it. */
FKV_FN fkv_u32 fkv_operand_row(fkv_u32 row, fkv_u32 part) {
#if FKV_TWICE && FKV_K_BITS == 16
    return row + 4 * part;
#elif FKV_TWICE
    return part == 0 ? row : part == 1 ? row + 8 : row + 4;
#else
    return part < 2 ? row / 8 * 16 + row % 8 + 8 * part : FKV_NR * 16 + row;
#endif
}

/* One number of row `row` into the A operands of its slab. x is in steps. */
FKV_FN void fkv_put_query(FKV_SHARED fkv_u32 *queries, fkv_u32 row, fkv_u32 channel, float x) {
    fkv_channel at = fkv_channel_place(channel % FKV_SLAB);
    FKV_SHARED fkv_u32 *operands = queries + channel / FKV_SLAB * (FKV_NA * FKV_K_STEPS * 128);
#if FKV_K_BITS == 16
    fkv_u32 bits = fkv_page_bits(x);
    const fkv_u32 parts[2] = {bits, fkv_page_bits(x - fkv_page_number(bits))};
#else
    int v = (int)fkv_rint(x);
    int rest = ((v + 128) & 255) - 128;
    v = (v - rest) >> 8;
    int low = ((v + 128) & 255) - 128;
    const int parts[3] = {(v - low) >> 8, low, rest};
#endif
    FKV_UNROLL
    for (fkv_u32 part = 0; part < (FKV_K_BITS == 16 ? 2 : 3); part++) {
        fkv_u32 place = fkv_operand_row(row, part);
        fkv_u32 word = ((place / 16 * FKV_K_STEPS + at.step) * 32 + place % 8 * 4 + at.thread) * 4 + place % 16 / 8 + 2 * at.word;
#if FKV_K_BITS == 16
        ((FKV_SHARED fkv_u16 *)operands)[word * 2 + at.number] = (fkv_u16)parts[part];
#else
        ((FKV_SHARED fkv_u8 *)operands)[word * 4 + at.number] = (fkv_u8)parts[part];
#endif
    }
}

#define FKV_LANE_CHANNELS (FKV_D / 32)

/* Scaled for a softmax of powers of two, rotated as the keys are, and put into shared memory: one warp, one row. Channel d is
 * lane d % 32's number d / 32. */
FKV_FN void fkv_prepare_row(const void *q, fkv_u64 from, fkv_u32 row, FKV_SHARED fkv_u32 *queries, FKV_SHARED float *steps,
                            FKV_SHARED float *sums, fkv_u32 lane) {
    float x[FKV_LANE_CHANNELS];
    const float cap = fkv_float_of(FKV_SOFTCAP_BITS);
    const float scale = fkv_float_of(FKV_SCALE_BITS) * (FKV_SOFTCAP_BITS != 0 ? 1.0f / cap : 1.44269504f);
    FKV_UNROLL
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) x[i] = fkv_mul(fkv_row_number(q, from + lane + 32 * (fkv_u32)i), scale);
#if FKV_ROTATE_K
    FKV_UNROLL
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) x[i] = fkv_float_of(fkv_bits_of(x[i]) ^ fkv_k_sign(lane + 32 * (fkv_u32)i));
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        FKV_UNROLL
        for (int i = 0; i < FKV_LANE_CHANNELS; i++) {
            float other = fkv_shuffle_xor(x[i], h);
            x[i] = (lane & h) == 0 ? x[i] + other : other - x[i];
        }
    }
    FKV_UNROLL
    for (int h = 1; h < FKV_ROTATION_BLOCK / 32; h *= 2) {
        FKV_UNROLL
        for (int i = 0; i < FKV_LANE_CHANNELS; i++) {
            if ((i & h) != 0) continue;
            float a = x[i];
            float b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    FKV_UNROLL
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) x[i] = fkv_mul(x[i], fkv_rotation_norm());
#endif
    fkv_u32 largest = 0; /* as bits, so that what is not a number is the largest */
    FKV_UNROLL
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) largest = fkv_max_bits(largest, fkv_bits_of(x[i]) & 0x7fffffffu);
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
    /* 16 bits: a power of two that brings the largest below 2^11; else the largest becomes 126 * 65536 */
    bool number = largest < 0x7f800000u;
#if FKV_K_BITS == 16
    fkv_u32 exponent = largest >> 23 > 20 ? (largest >> 23 < 250 ? largest >> 23 : 250) : 20;
    float step = fkv_float_of((exponent - 10) << 23);
#else
    float step = fkv_float_of(largest) > 1e-30f ? fkv_float_of(largest) * (1.0f / 8257536.0f) : 0.0f;
#endif
    float inverse = number && step > 0.0f ? 1.0f / step : 0.0f;
    FKV_UNROLL
    for (int i = 0; i < FKV_LANE_CHANNELS; i++)
        fkv_put_query(queries, row, lane + 32 * (fkv_u32)i, number ? x[i] * inverse : 0.0f);
    if (lane == 0) steps[row] = number ? step : fkv_float_of(0x7fc00000u);

    const int n = FKV_LANE_CHANNELS / (FKV_N_SLABS * FKV_K_GROUPS); /* numbers of a lane in one group */
    FKV_UNROLL
    for (int g = 0; g < FKV_N_SLABS * FKV_K_GROUPS; g++) {
        float sum = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < n; i++) sum += x[g * n + i];
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) sum += fkv_shuffle_xor(sum, h);
        if (lane == 0) sums[row * (FKV_N_SLABS * FKV_K_GROUPS) + (fkv_u32)g] = sum;
    }
}

/* ---- scores ---- */

/* score[n][a][b] of a thread: row r + 8 n, token NJ (2 c + a) + b; this slab's part of it. step: what a unit of the first and of
 * the second sum is worth; four rows or fewer have one sum each, and add it up with the other thread's. */
FKV_FN void fkv_tile_scores(const fkv_tile_k *k, FKV_SHARED const fkv_u32 *operands, FKV_SHARED const float *scales,
                            const float (*step)[2], const float (*sum)[FKV_K_GROUPS], fkv_u32 lane, float (*score)[2][FKV_NJ]) {
    float rests[FKV_NR][2][FKV_NJ];
    float biases[FKV_NR][2][FKV_NJ];
    FKV_UNROLL
    for (int i = 0; i < FKV_NR * 2 * FKV_NJ; i++) {
        score[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ] = 0.0f;
        rests[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ] = 0.0f;
        biases[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ] = 0.0f;
    }
    FKV_UNROLL
    for (int g = 0; g < FKV_K_GROUPS; g++) {
#if FKV_K_BITS == 16
        float products[FKV_NJ][FKV_NA][4];
#else
        int products[FKV_NJ][FKV_NA][4];
#endif
        FKV_UNROLL
        for (int i = 0; i < FKV_NJ * FKV_NA * 4; i++) products[i / (4 * FKV_NA)][i / 4 % FKV_NA][i % 4] = 0;
        FKV_UNROLL
        for (int s = 0; s < FKV_K_GROUP_UNITS * FKV_K_UNIT_STEPS; s++) {
            int unit = g * FKV_K_GROUP_UNITS + s / FKV_K_UNIT_STEPS;
            int step_of_slab = g * (FKV_K_STEPS / FKV_K_GROUPS) + s;
            FKV_UNROLL
            for (int n = 0; n < FKV_NA; n++) {
                fkv_words4 q = fkv_shared16(operands + ((fkv_u32)(n * FKV_K_STEPS + step_of_slab) * 32 + lane) * 4);
                FKV_UNROLL
                for (int b = 0; b < FKV_NJ; b++) {
                    fkv_u32 low;
                    fkv_u32 high;
                    fkv_k_operand(k->codes[b][unit], s % FKV_K_UNIT_STEPS, &low, &high);
#if FKV_K_BITS < 16
                    fkv_mma_bytes(products[b][n], q.w, low, high);
#elif FKV_PAGE_BF16
                    fkv_mma_bf16(products[b][n], q.w, low, high);
#else
                    fkv_mma_f16(products[b][n], q.w, low, high);
#endif
                }
            }
        }
        FKV_UNROLL
        for (int i = 0; i < 2 * FKV_NJ; i++) {
            int a = i / FKV_NJ;
            int b = i % FKV_NJ;
#if FKV_K_BITS < 16
            FKV_SHARED const float *of_token = scales + fkv_scales_at(lane % 4, (fkv_u32)i, FKV_K_SCALE_FLOATS);
            float scale = of_token[g];
            float bias = of_token[FKV_K_GROUPS + g];
            FKV_UNROLL
            for (int n = 0; n < FKV_NR; n++) {
                score[n][a][b] = fkv_fma(scale, (float)(products[b][n][a] * 256 + products[b][n][2 + a]), score[n][a][b]);
#if !FKV_TWICE
                rests[n][a][b] = fkv_fma(scale, (float)products[b][FKV_NR][2 * n + a], rests[n][a][b]);
#endif
                biases[n][a][b] = fkv_fma(bias, sum[n][g], biases[n][a][b]);
            }
#else
            FKV_UNROLL
            for (int n = 0; n < FKV_NR; n++) {
                score[n][a][b] = products[b][n][a];
                rests[n][a][b] = products[b][n][2 + a];
            }
#endif
        }
    }
    FKV_UNROLL
    for (int i = 0; i < FKV_NR * 2 * FKV_NJ; i++) {
        int n = i / (2 * FKV_NJ);
        int a = i / FKV_NJ % 2;
        int b = i % FKV_NJ;
        score[n][a][b] = fkv_fma(score[n][a][b], step[n][0], biases[n][a][b]);
#if FKV_TWICE
        score[n][a][b] += fkv_shuffle_xor(score[n][a][b], 16);
#else
        score[n][a][b] += fkv_mul(rests[n][a][b], step[n][1]);
#endif
    }
    (void)rests, (void)scales, (void)sum;
}

/* cap * tanh(x), in powers of two; the score came divided by cap. */
FKV_FN float fkv_capped(float x) {
    float e = fkv_exp2(x * 2.88539008f); /* e^2x */
    return fkv_mul(fkv_float_of(FKV_SOFTCAP_BITS) * 1.44269504f, 1.0f - 2.0f / (e + 1.0f));
}

/* ---- values ---- */

/* Four channels of two tokens, a in the low halves: code - middle. From the same 4 (2, 1) bytes of both. */
FKV_FN void fkv_v_quad(const fkv_u32 *a, const fkv_u32 *b, int quad, fkv_u32 *to) {
#if FKV_V_BITS == 16
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        to[2 * i] = fkv_permute(a[2 * quad + i], b[2 * quad + i], 0x5410u);
        to[2 * i + 1] = fkv_permute(a[2 * quad + i], b[2 * quad + i], 0x7632u);
    }
#elif FKV_V_BITS == 8
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        fkv_u32 x = fkv_permute(a[quad], b[quad], i == 0 ? 0x5140u : 0x7362u);                     /* a b a b */
        to[2 * i] = fkv_fma_f16x2(fkv_permute(x, 0x64646464u, 0x4140u), 0x3c003c00u, 0xe480e480u); /* 1024 + code, - 1152 */
        to[2 * i + 1] = fkv_fma_f16x2(fkv_permute(x, 0x64646464u, 0x4342u), 0x3c003c00u, 0xe480e480u);
    }
#elif FKV_V_BITS == 4
    fkv_u32 x = fkv_permute(a[quad / 2], b[quad / 2], quad % 2 == 0 ? 0x5410u : 0x7632u);
    FKV_UNROLL
    for (int i = 0; i < 2; i++) {
        fkv_u32 y = x >> 8 * i;
        to[2 * i] = fkv_fma_f16x2(fkv_mask_or(y, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe408e408u); /* 1024 + code, - 1032 */
        to[2 * i + 1] = fkv_fma_f16x2(fkv_mask_or(y, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u); /* / 16, - 72 */
    }
#else
    fkv_u32 x = fkv_permute(a[quad / 4], b[quad / 4], quad % 4 < 2 ? 0x5410u : 0x7632u) >> 8 * (quad % 2);
    to[0] = fkv_fma_f16x2(fkv_mask_or(x, 0x00030003u, 0x64006400u), 0x3c003c00u, 0xe402e402u); /* 1024 + code, - 1026 */
    to[1] = fkv_fma_f16x2(fkv_mask_or(x, 0x000c000cu, 0x64006400u), 0x34003400u, 0xdc08dc08u); /* / 4, - 258 */
    to[2] = fkv_fma_f16x2(fkv_mask_or(x, 0x00300030u, 0x64006400u), 0x2c002c00u, 0xd420d420u); /* / 16, - 66 */
    to[3] = fkv_fma_f16x2(fkv_mask_or(x, 0x00c000c0u, 0x64006400u), 0x24002400u, 0xcc80cc80u); /* / 64, - 18 */
#endif
}
/* weights: [row, group, b], the B operands. */
FKV_FN void fkv_tile_values(const fkv_tile_v *v, const fkv_u32 (*weights)[FKV_VT][FKV_NJ], float (*sums)[FKV_NR][4]) {
    FKV_UNROLL
    for (int depth = 0; depth < FKV_NJ / 2; depth++) {
        FKV_UNROLL
        for (int u = 0; u < FKV_V_UNITS; u++) {
            int o = FKV_V_BITS == 16 || FKV_V_SPAN == FKV_SLAB ? 0 : FKV_TWICE ? u / 2 : u;
            FKV_UNROLL
            for (int quad = 0; quad < FKV_V_QUADS; quad++) {
                fkv_u32 near[4];
                fkv_u32 far[4];
                fkv_v_quad(v->codes[0][2 * depth][u], v->codes[1][2 * depth][u], quad, near);
                fkv_v_quad(v->codes[0][2 * depth + 1][u], v->codes[1][2 * depth + 1][u], quad, far);
                FKV_UNROLL
                for (int t = 0; t < 2; t++) {
                    const fkv_u32 a[4] = {near[2 * t], near[2 * t + 1], far[2 * t], far[2 * t + 1]};
                    int tile = (u * FKV_V_QUADS + quad) * 2 + t;
                    FKV_UNROLL
                    for (int n = 0; n < FKV_NR; n++) {
#if FKV_V_PLAIN_BF16
                        fkv_mma_bf16(sums[tile][n], a, weights[n][o][2 * depth], weights[n][o][2 * depth + 1]);
#else
                        fkv_mma_f16(sums[tile][n], a, weights[n][o][2 * depth], weights[n][o][2 * depth + 1]);
#endif
                    }
                }
            }
        }
    }
}

/* ---- a tile ---- */

/* What the rows of a thread see, and where. */
struct fkv_sight {
    fkv_u32 position[FKV_NR]; /* of each row's query */
    fkv_u32 first;            /* of the item's queries */
    fkv_u32 last;
};

/* The scale, and the bias of the middle, of a thread's token i for its group o. */
FKV_FN void fkv_v_scales(FKV_SHARED const float *scales, fkv_u32 lane, int i, int o, float *scale, float *middle) {
#if FKV_V_BITS == 16
    *scale = 1.0f;
    *middle = 0.0f;
    (void)scales, (void)lane, (void)i, (void)o;
#else
    FKV_SHARED const float *of_token =
        scales + FKV_TILE * FKV_K_SCALE_FLOATS + 16 + fkv_scales_at(lane % 4, (fkv_u32)i, FKV_V_SCALE_FLOATS);
#if FKV_TWICE && FKV_V_GROUPS > 1
    fkv_u32 group = 2 * (fkv_u32)o + lane / 16;
#else
    fkv_u32 group = (fkv_u32)o;
#endif
    *scale = of_token[2 * group];
    *middle = of_token[2 * group + 1];
#endif
}

/* The row's max or the exponent of a group grew: what was added up so far shrinks. */
FKV_FN void fkv_grow(fkv_decode_state *state, const float *largest, const fkv_u32 (*exponent)[FKV_VT], fkv_u32 lane) {
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        float shrink = state->max[n] == largest[n] ? 1.0f : fkv_exp2(state->max[n] - largest[n]);
        state->max[n] = largest[n];
        state->total[n] = fkv_mul(state->total[n], shrink);
        FKV_UNROLL
        for (int o = 0; o < FKV_VT; o++) {
            fkv_u32 steps = exponent[n][o] - state->exponent[n][o];
            float factor = shrink * fkv_float_of((steps < 127 ? 127 - steps : 0) << 23);
            state->exponent[n][o] = exponent[n][o];
            state->bias[n][o] *= shrink;
            /* the sums' columns 2 c and 2 c + 1 are threads r = 2 c and 2 c + 1 */
            float even = fkv_shuffle(factor, lane % 4 * 8);
            float odd = fkv_shuffle(factor, lane % 4 * 8 + 4);
            FKV_UNROLL
            for (int t = 0; t < FKV_V_TILES; t++) {
                int u = t / (2 * FKV_V_QUADS);
                if (o != (FKV_V_BITS == 16 || FKV_V_SPAN == FKV_SLAB ? 0 : FKV_TWICE ? u / 2 : u)) continue;
                state->sums[t][n][0] *= even;
                state->sums[t][n][1] *= odd;
                state->sums[t][n][2] *= even;
                state->sums[t][n][3] *= odd;
            }
        }
    }
}

/* Softmax of a tile, and p v added. base: position of the tile's first token. */
FKV_FN void fkv_tile_fold(fkv_tile_v *v, FKV_SHARED const float *scales, const fkv_u32 *tile_bits, float (*score)[2][FKV_NJ],
                          const fkv_sight *sight, fkv_u32 base, fkv_u32 lane, fkv_decode_state *state) {
    fkv_u32 token = base + 2 * FKV_NJ * (lane % 4); /* the thread's first */
    fkv_u32 end = base + FKV_TILE;
    bool whole = end <= sight->first + 1;
#if FKV_WINDOW != 0
    whole = whole && (end <= FKV_SINKS || sight->last - base < FKV_WINDOW);
#endif
#if FKV_SOFTCAP_BITS != 0
    FKV_UNROLL
    for (int i = 0; i < FKV_NR * 2 * FKV_NJ; i++)
        score[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ] = fkv_capped(score[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ]);
#endif
    if (!whole) {
        FKV_UNROLL
        for (int i = 0; i < 2 * FKV_NJ; i++) {
            FKV_UNROLL
            for (int n = 0; n < FKV_NR; n++)
                if (!fkv_sees(sight->position[n], token + (fkv_u32)i)) score[n][i / FKV_NJ][i % FKV_NJ] = FKV_MINUS_INFINITY;
#if FKV_V_BITS == 16
            FKV_UNROLL
            for (int w = 0; w < FKV_V_UNITS * FKV_V_WORDS; w++)
                if (token + (fkv_u32)i > sight->last) v->codes[i / FKV_NJ][i % FKV_NJ][w / FKV_V_WORDS][w % FKV_V_WORDS] = 0;
#endif
        }
    }

    float largest[FKV_NR];
    fkv_u32 exponent[FKV_NR][FKV_VT];
    bool grows = false;
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        largest[n] = state->max[n];
        FKV_UNROLL
        for (int i = 0; i < 2 * FKV_NJ; i++) largest[n] = fkv_max(largest[n], score[n][i / FKV_NJ][i % FKV_NJ]);
        grows = grows || largest[n] > state->max[n];
        FKV_UNROLL
        for (int o = 0; o < FKV_VT; o++) {
            exponent[n][o] = state->exponent[n][o];
#if FKV_V_BITS < 16
            fkv_u32 bits = 0;
            if (whole) {
#if FKV_TWICE && FKV_V_GROUPS > 1
                bits = lane < 16 ? tile_bits[2 * o] : tile_bits[2 * o + 1];
#else
                bits = tile_bits[o];
#endif
            } else {
                FKV_UNROLL
                for (int i = 0; i < 2 * FKV_NJ; i++) {
                    float scale;
                    float middle;
                    fkv_v_scales(scales, lane, i, o, &scale, &middle);
                    bool counts = fkv_sees(sight->position[n], token + (fkv_u32)i);
                    bits = fkv_max_bits(bits, counts ? fkv_bits_of(scale) & 0x7fffffffu : 0u);
                }
            }
            exponent[n][o] = fkv_max_bits(exponent[n][o], bits >> 23);
            grows = grows || exponent[n][o] > state->exponent[n][o];
#endif
        }
    }
    if (fkv_any(grows)) {
        FKV_UNROLL
        for (int n = 0; n < FKV_NR; n++) {
            FKV_UNROLL
            for (fkv_u32 h = 1; h < 4; h *= 2) {
                largest[n] = fkv_max(largest[n], fkv_shuffle_xor(largest[n], h));
                FKV_UNROLL
                for (int o = 0; o < FKV_VT; o++)
                    exponent[n][o] = fkv_max_bits(exponent[n][o], fkv_shuffle_xor_bits(exponent[n][o], h));
            }
        }
        fkv_grow(state, largest, exponent, lane);
    }

    fkv_u32 weights[FKV_NR][FKV_VT][FKV_NJ];
#if FKV_V_PLAIN_BF16
    fkv_u32 rests[FKV_NR][FKV_VT][FKV_NJ];
#endif
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        float max = state->max[n] == FKV_MINUS_INFINITY ? 0.0f : state->max[n];
        FKV_UNROLL
        for (int b = 0; b < FKV_NJ; b++) {
            float near = fkv_exp2(score[n][0][b] - max);
            float far = fkv_exp2(score[n][1][b] - max);
            state->total[n] += near;
            state->total[n] += far;
#if FKV_V_PLAIN_BF16
            float near_bf16 = fkv_float_of(fkv_bf16_bits(near) << 16);
            float far_bf16 = fkv_float_of(fkv_bf16_bits(far) << 16);
            weights[n][0][b] = fkv_pack_bf16(near_bf16, far_bf16);
            rests[n][0][b] = fkv_pack_bf16(near - near_bf16, far - far_bf16);
#else
            FKV_UNROLL
            for (int o = 0; o < FKV_VT; o++) {
                float unit = fkv_float_of((268u - state->exponent[n][o]) << 23);
                float near_scale;
                float near_middle;
                float far_scale;
                float far_middle;
                fkv_v_scales(scales, lane, b, o, &near_scale, &near_middle);
                fkv_v_scales(scales, lane, FKV_NJ + b, o, &far_scale, &far_middle);
                weights[n][o][b] = fkv_pack_f16(near * unit * near_scale, far * unit * far_scale);
                state->bias[n][o] = fkv_fma(near, near_middle, state->bias[n][o]);
                state->bias[n][o] = fkv_fma(far, far_middle, state->bias[n][o]);
            }
#endif
        }
    }
    fkv_tile_values(v, weights, state->sums);
#if FKV_V_PLAIN_BF16
    fkv_tile_values(v, rests, state->sums);
#endif
}

/* ---- a piece ---- */

struct fkv_walk {
    const fkv_u8 *blocks; /* of (page 0, this KV head) */
    const fkv_u32 *pages; /* the sequence's */
    fkv_u32 n_fixed;
    fkv_u32 n_ring;
    fkv_u32 skipped;
    fkv_u32 first_seen;
};

FKV_FN fkv_u32 fkv_tile_logical(const fkv_walk *walk, fkv_u32 tile) {
    fkv_u32 seen = walk->first_seen + tile * FKV_TILE / FKV_PAGE_TOKENS;
    return FKV_WINDOW == 0 || seen < FKV_SINK_PAGES ? seen : seen + walk->skipped;
}

FKV_FN fkv_u32 fkv_tile_page(const fkv_walk *walk, fkv_u32 tile) {
    fkv_u32 logical = fkv_tile_logical(walk, tile);
    fkv_u32 ring = walk->n_fixed + (FKV_WINDOW == 0 ? 0 : (logical - walk->n_fixed) % walk->n_ring);
    return walk->pages[logical < walk->n_fixed ? logical : ring];
}

/* Scores of all slabs added up, in the order of the slabs. */
FKV_FN void fkv_add_slabs(FKV_SHARED float *exchange, fkv_u32 stream, fkv_u32 slab, fkv_u32 lane, float (*score)[2][FKV_NJ]) {
    const int n_scores = FKV_NR * 2 * FKV_NJ;
    FKV_SHARED float *own = exchange + (stream * FKV_N_SLABS + slab) * (n_scores * 32) + lane;
    FKV_SHARED const float *all = exchange + stream * FKV_N_SLABS * (n_scores * 32) + lane;
    FKV_UNROLL
    for (int i = 0; i < n_scores; i++) own[i * 32] = score[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ];
    fkv_sync_team(1 + stream, 32 * FKV_N_SLABS);
    FKV_UNROLL
    for (int i = 0; i < n_scores; i++) {
        float sum = all[i * 32];
        FKV_UNROLL
        for (int s = 1; s < FKV_N_SLABS; s++) sum += all[(s * n_scores + i) * 32];
        score[i / (2 * FKV_NJ)][i / FKV_NJ % 2][i % FKV_NJ] = sum;
    }
    if (FKV_EXCHANGES == 1) fkv_sync_team(1 + stream, 32 * FKV_N_SLABS);
}

/* The streams' sums into one, from the first to the last; max and total of the piece stay in stats: [streams, rows, 2]. */
FKV_FN void fkv_fold_streams(fkv_decode_state *state, fkv_u32 stream, fkv_u32 slab, fkv_u32 lane, FKV_SHARED float *stats,
                             FKV_SHARED float *sums) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 4; h *= 2) {
            state->total[n] += fkv_shuffle_xor(state->total[n], h);
            FKV_UNROLL
            for (int o = 0; o < FKV_VT; o++) state->bias[n][o] += fkv_shuffle_xor(state->bias[n][o], h);
        }
        if (slab == 0 && c == 0 && r < FKV_ITEM_ROWS) {
            stats[(stream * FKV_ITEM_ROWS + r + 8 * (fkv_u32)n) * 2] = state->max[n];
            stats[(stream * FKV_ITEM_ROWS + r + 8 * (fkv_u32)n) * 2 + 1] = state->total[n];
        }
    }
    fkv_sync(); /* also: nobody exchanges scores any more */
    float factor[FKV_NR];
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        float max = FKV_MINUS_INFINITY;
        FKV_UNROLL
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++)
            max = fkv_max(max, stats[(s * FKV_ITEM_ROWS + (FKV_TWICE ? r % 4 : r + 8 * (fkv_u32)n)) * 2]);
        factor[n] = state->max[n] == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(state->max[n] - max);
    }
    FKV_UNROLL
    for (int t = 0; t < FKV_V_TILES; t++) { /* what the columns mean is known to threads r = 2 c and 2 c + 1 */
        int u = t / (2 * FKV_V_QUADS);
        int o = FKV_V_BITS == 16 || FKV_V_SPAN == FKV_SLAB ? 0 : FKV_TWICE ? u / 2 : u;
        FKV_UNROLL
        for (int n = 0; n < FKV_NR; n++) {
            float back = FKV_V_PLAIN_BF16 ? 1.0f : fkv_float_of((state->exponent[n][o] - 14) << 23);
            FKV_UNROLL
            for (fkv_u32 i = 0; i < 2; i++) {
                float column_back = fkv_shuffle(back, c * 8 + 4 * i);
                float column_bias = fkv_shuffle(state->bias[n][o], c * 8 + 4 * i);
                float column_factor = fkv_shuffle(factor[n], c * 8 + 4 * i);
                state->sums[t][n][i] = fkv_mul(fkv_fma(state->sums[t][n][i], column_back, column_bias), column_factor);
                state->sums[t][n][2 + i] = fkv_mul(fkv_fma(state->sums[t][n][2 + i], column_back, column_bias), column_factor);
            }
        }
    }
    FKV_UNROLL
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
        if (s == stream) {
            FKV_UNROLL
            for (int t = 0; t < FKV_V_TILES; t++) {
                fkv_u32 unit = (fkv_u32)t / (2 * FKV_V_QUADS);
                fkv_u32 of_slab = unit * FKV_V_SPAN + r * (FKV_V_SPAN / 8) + (fkv_u32)t % (2 * FKV_V_QUADS) * 2;
#if FKV_TWICE /* the columns of the group that this channel has */
                fkv_u32 half = FKV_V_BITS == 16 || FKV_V_GROUPS == 1 ? 0 : of_slab / FKV_V_GROUP % 2;
                if (c / 2 != half) continue;
#endif
                FKV_UNROLL
                for (int i = 0; i < FKV_NR * 4; i++) {
                    fkv_u32 row = 8 * ((fkv_u32)i / 4) + (FKV_TWICE ? c % 2 * 2 : c * 2) + (fkv_u32)i % 2;
                    FKV_SHARED float *to = sums + row * FKV_D + slab * FKV_SLAB + of_slab + (fkv_u32)i / 2 % 2;
                    float x = state->sums[t][i / 4][i % 4];
                    *to = s == 0 ? x : *to + x;
                }
            }
        }
        fkv_sync();
    }
}

/* q: [T, H, D]; parts: out [pieces, G, rows, D], then {max, total} [G, rows, pieces, 2], where rows = R * queries of an item. The
 * max is of scores in powers of two. Blocks: pieces * chunks of rows, G. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts) {
    fkv_u32 lane = place.index % 32;
    fkv_u32 warp = place.index / 32;
    fkv_u32 slab = warp % FKV_N_SLABS;
    fkv_u32 stream = warp / FKV_N_SLABS;
    fkv_u32 all_rows = FKV_R * table[FKV_STEP_ITEM_QUERIES];
    fkv_u32 n_chunks = (all_rows + FKV_ITEM_ROWS - 1) / FKV_ITEM_ROWS;
    fkv_u32 number = place.x / n_chunks;
    fkv_u32 first_row = place.x % n_chunks * FKV_ITEM_ROWS;
    const fkv_u32 *piece = table + FKV_STEP_HEADER + number * FKV_PIECE_WORDS;
    fkv_u32 n_rows = FKV_R * piece[FKV_PIECE_N_QUERIES]; /* of the item */
    if (first_row >= n_rows) return;
    n_rows = n_rows - first_row < FKV_ITEM_ROWS ? n_rows - first_row : FKV_ITEM_ROWS;
    fkv_u32 n_tiles = (piece[FKV_PIECE_N_TOKENS] + FKV_TILE - 1) / FKV_TILE;
    fkv_walk walk;
    walk.blocks = (const fkv_u8 *)pool + (fkv_u64)place.y * FKV_BLOCK_BYTES;
    walk.pages = table + piece[FKV_PIECE_PAGES];
    walk.n_fixed = piece[FKV_PIECE_N_FIXED];
    walk.n_ring = piece[FKV_PIECE_N_RING];
    walk.skipped = piece[FKV_PIECE_SKIPPED];
    walk.first_seen = piece[FKV_PIECE_FIRST_SEEN];
    const fkv_u64 stride = (fkv_u64)FKV_G * FKV_BLOCK_BYTES;

    /* the first tile is on its way while the queries are prepared */
    fkv_tile_k k;
    fkv_tile_v v;
    fkv_tile_scales raw;
    fkv_u32 page = 0;
    if (stream < n_tiles) {
        const fkv_u8 *block = walk.blocks + fkv_tile_page(&walk, stream) * stride;
        fkv_load_k(&k, block, stream * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        fkv_load_scales(&raw, block, stream * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        fkv_load_v(&v, block, stream * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        if (stream + FKV_STREAMS < n_tiles) page = fkv_tile_page(&walk, stream + FKV_STREAMS);
    }

    FKV_SHARED fkv_u32 *queries = shared;
    FKV_SHARED float *steps = (FKV_SHARED float *)(queries + FKV_SHARED_QUERIES);
    FKV_SHARED float *query_sums = steps + FKV_ITEM_ROWS;
    FKV_SHARED float *scales = (FKV_SHARED float *)(queries + FKV_SHARED_QUERIES + FKV_SHARED_SUMQ) + warp * FKV_SHARED_SCALES;
    FKV_SHARED float *stats = (FKV_SHARED float *)(queries + FKV_SHARED_QUERIES + FKV_SHARED_SUMQ + FKV_SHARED_ALL_SCALES);
    FKV_SHARED float *rest = stats + FKV_SHARED_STATS; /* exchanged scores, then sums */
    for (fkv_u32 i = place.index; i < FKV_SHARED_QUERIES + FKV_SHARED_SUMQ; i += FKV_DECODE_THREADS) shared[i] = 0;
    fkv_sync();
    for (fkv_u32 row = warp; row < n_rows; row += FKV_DECODE_THREADS / 32) {
        fkv_u32 query = (first_row + row) / FKV_R;
        fkv_u32 head = place.y * FKV_R + (first_row + row) % FKV_R;
        fkv_u64 from = ((fkv_u64)(piece[FKV_PIECE_FIRST_TOKEN] + query) * FKV_H + head) * FKV_D;
        fkv_prepare_row(q, from, row, queries, steps, query_sums, lane);
    }
    fkv_sync();

    float step[FKV_NR][2];
    float query_sum[FKV_NR][FKV_K_GROUPS];
    fkv_sight sight;
    sight.first = piece[FKV_PIECE_POSITION];
    sight.last = sight.first + piece[FKV_PIECE_N_QUERIES] - 1;
    fkv_decode_state state;
    FKV_UNROLL
    for (int n = 0; n < FKV_NR; n++) {
        fkv_u32 row = FKV_TWICE ? lane / 4 % 4 : lane / 4 + 8 * (fkv_u32)n;
        bool second = FKV_TWICE && lane >= 16; /* has the sum of rests, times 256, and no bias */
#if FKV_K_BITS == 16
        step[n][0] = steps[row];
        step[n][1] = steps[row];
#else
        step[n][0] = second ? steps[row] * (1.0f / 256.0f) : steps[row] * 256.0f;
        step[n][1] = steps[row];
#endif
        FKV_UNROLL
        for (int g = 0; g < FKV_K_GROUPS; g++)
            query_sum[n][g] = second ? 0.0f : query_sums[(row * FKV_N_SLABS + slab) * FKV_K_GROUPS + (fkv_u32)g];
        sight.position[n] = sight.first + (first_row + (row < n_rows ? row : 0)) / FKV_R;
        state.max[n] = FKV_MINUS_INFINITY;
        state.total[n] = 0.0f;
        FKV_UNROLL
        for (int o = 0; o < FKV_VT; o++) {
            state.exponent[n][o] = FKV_V_BITS == 16 ? 127 : 30;
            state.bias[n][o] = 0.0f;
        }
    }
    FKV_UNROLL
    for (int i = 0; i < FKV_V_TILES * FKV_NR * 4; i++) state.sums[i / (4 * FKV_NR)][i / 4 % FKV_NR][i % 4] = 0.0f;

    FKV_SHARED const fkv_u32 *operands = queries + slab * (FKV_NA * FKV_K_STEPS * 128);
    fkv_u32 turn = 0;
    for (fkv_u32 tile = stream; tile < n_tiles; tile += FKV_STREAMS) {
        fkv_u32 next = tile + FKV_STREAMS;
        const fkv_u8 *block = walk.blocks + page * stride; /* of the next tile */
        fkv_u32 base = fkv_tile_logical(&walk, tile) * FKV_PAGE_TOKENS + tile * FKV_TILE % FKV_PAGE_TOKENS;
        fkv_u32 bits[FKV_V_GROUPS];
        fkv_share_scales(&raw, sight.last + 1 - base, lane, scales, bits);
        if (next < n_tiles) fkv_load_scales(&raw, block, next * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        float score[FKV_NR][2][FKV_NJ];
        fkv_tile_scores(&k, operands, scales, step, query_sum, lane, score);
        if (next < n_tiles) {
            fkv_load_k(&k, block, next * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
            if (next + FKV_STREAMS < n_tiles) page = fkv_tile_page(&walk, next + FKV_STREAMS);
        }
#if FKV_N_SLABS > 1
        fkv_add_slabs(rest + turn % FKV_EXCHANGES * (FKV_SHARED_EXCHANGE / FKV_EXCHANGES), stream, slab, lane, score);
#endif
        fkv_tile_fold(&v, scales, bits, score, &sight, base, lane, &state);
        if (next < n_tiles) fkv_load_v(&v, block, next * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        turn++;
    }
    /* a scale that is no number: no answer of the row is one */
    FKV_UNROLL
    for (int i = 0; i < FKV_NR * FKV_VT; i++)
        if (state.exponent[i / FKV_VT][i % FKV_VT] >= 255) state.total[i / FKV_VT] = fkv_float_of(0x7fc00000u);

    fkv_fold_streams(&state, stream, slab, lane, stats, rest);
    fkv_u64 first = ((fkv_u64)number * FKV_G + place.y) * all_rows + first_row;
    for (fkv_u32 i = place.index; i < n_rows * FKV_D; i += FKV_DECODE_THREADS) parts[first * FKV_D + i] = rest[i];
    if (place.index < n_rows) {
        float max = FKV_MINUS_INFINITY;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) max = fkv_max(max, stats[(s * FKV_ITEM_ROWS + place.index) * 2]);
        float total = 0.0f;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
            float own = stats[(s * FKV_ITEM_ROWS + place.index) * 2];
            total = fkv_fma(own == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(own - max),
                            stats[(s * FKV_ITEM_ROWS + place.index) * 2 + 1], total);
        }
        float *to = parts + fkv_stats_at(table, place.y * all_rows + first_row + place.index, number);
        to[0] = max;
        to[1] = total;
    }
}
