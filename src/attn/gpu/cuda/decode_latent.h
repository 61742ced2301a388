/* Tensor-core decode kernel for latent pages. Runs on CUDA and is emulated on the host. One thread block processes one split of
 * the history for LT_ROWS rows (queries x query heads). For each row, it stores {sum of p * v, maximum score, sum of p} for the
 * merge kernel, where p is a softmax weight and v a value.
 *
 * The latent channels are divided into slabs of 64 channels, one for each warp. A warp copies its slab of each tile (LT_TILE
 * tokens) to shared memory with cp.async, two tiles ahead. It reads the codes twice, once as keys and once as values. The RoPE
 * channels are divided into steps of 16 channels, which are assigned to the warps in round-robin order.
 *
 *   1. Each warp computes the scores of all rows and tokens over its channels and stores them in shared memory.
 *   2. After a barrier, the warps divide the rows among themselves. The scores of a row are added in slab order, and lane t
 *      computes the softmax weight of token t.
 *   3. After another barrier, each warp adds the weighted values of its slab.
 *
 * The middle code is subtracted from each code. The resulting integers are exact in float16 and bfloat16. Queries and weights are
 * split into two 16-bit terms. Weights are multiplied by the scales of the values before they are split. The results of a row do
 * not depend on the other rows, because the rows of a matrix product are independent.
 */
constexpr int LT_ROWS = FKV_ITEM_ROWS;
constexpr int LT_TILE = 32; /* one token per lane */
constexpr int LT_SLAB = 64;
constexpr int LT_WARPS = FKV_D / LT_SLAB;
constexpr int LT_STAGES = 3;
constexpr int LT_MIDDLE = FKV_K_BITS == 16 ? 0 : 1 << (FKV_K_BITS - 1);
constexpr int LT_GROUP =
    FKV_K_BITS != 16 && FKV_K_GROUP < LT_SLAB ? FKV_K_GROUP : LT_SLAB; /* number of channels of a slab that share a scale */
constexpr int LT_GROUPS = LT_SLAB / LT_GROUP;
constexpr int LT_STEPS = LT_SLAB / 16; /* number of matrix products per slab for eight tokens */
constexpr int LT_ROPE_ALL = FKV_ROPE / 16;
constexpr int LT_ROPE_STEPS = (LT_ROPE_ALL + LT_WARPS - 1) / LT_WARPS; /* maximum number of RoPE steps per warp */
constexpr bool LT_KEYS_BF16 = FKV_K_BITS == 16 && FKV_PAGE_BF16;       /* operand type of keys and queries */
constexpr bool LT_VALUES_BF16 = FKV_K_BITS != 16 || FKV_PAGE_BF16;     /* operand type of values and weights */
constexpr bool LT_ROPE_BF16 = FKV_PAGE_BF16;

static_assert(LT_ROWS == 16 && FKV_D % LT_SLAB == 0 && FKV_ROPE % 16 == 0 && !FKV_K_BOOK && FKV_V_BITS == 16);

/* ---- shared memory layout, in words ---- */

constexpr int LT_ROW_BYTES = LT_SLAB * FKV_K_BITS / 8; /* size of one token's codes in a slab */
constexpr int LT_CHUNKS = LT_ROW_BYTES / 16;
constexpr int LT_CODE_WORDS = LT_TILE * LT_ROW_BYTES / 4;
constexpr int LT_STAGE_WORDS = LT_CODE_WORDS + LT_ROPE_STEPS * LT_TILE * 8;
constexpr int LT_SCORE_STRIDE = 40;  /* floats per row of scores, padded to avoid bank conflicts */
constexpr int LT_WEIGHT_STRIDE = 36; /* floats per row of weights, padded to avoid bank conflicts */
constexpr int LT_SCORES_WORDS = LT_ROWS * LT_SCORE_STRIDE;
constexpr int LT_QUERY_WORDS = LT_ROWS * (FKV_D + FKV_ROPE);

constexpr int LT_AT_QUERIES = (LT_STAGES - 1) * LT_WARPS * LT_STAGE_WORDS; /* query rows, used only before the first tile */
constexpr int LT_AT_SCORES = LT_STAGES * LT_WARPS * LT_STAGE_WORDS;        /* [warps, rows, stride] */
constexpr int LT_AT_WEIGHTS = LT_AT_SCORES + LT_WARPS * LT_SCORES_WORDS > LT_AT_QUERIES + LT_QUERY_WORDS
                                  ? LT_AT_SCORES + LT_WARPS *LT_SCORES_WORDS
                                  : LT_AT_QUERIES + LT_QUERY_WORDS;
constexpr int LT_AT_SCALES =
    LT_AT_WEIGHTS + LT_ROWS * LT_WEIGHT_STRIDE; /* [warps, {scores, values}, groups, tokens, {scale, bias}] */
constexpr int LT_AT_FACTORS = LT_AT_SCALES + LT_WARPS * LT_GROUPS * LT_TILE * 4; /* [rows] factors for the scores */
constexpr int LT_AT_SHRINKS = LT_AT_FACTORS + LT_ROWS; /* [rows] factor by which earlier sums are rescaled */
#define FKV_DECODE_SHARED (LT_AT_SHRINKS + LT_ROWS)

/* ---- 16-bit operands ---- */

/* Two values, each split into two 16-bit terms. */
struct lt_terms {
    fkv_u32 high;
    fkv_u32 rest;
};

template <bool BF16> FKV_FN lt_terms lt_split(float a, float b) {
    lt_terms x;
    if (BF16) {
        x.high = fkv_pack_bf16(a, b);
        x.rest = fkv_pack_bf16(a - fkv_float_of(x.high << 16), b - fkv_float_of(x.high & 0xffff0000u));
    } else {
        x.high = fkv_pack_f16(a, b);
        x.rest = fkv_pack_f16(a - fkv_f16_to_f32(x.high & 0xffffu), b - fkv_f16_to_f32(x.high >> 16));
    }
    return x;
}

template <bool BF16> FKV_FN void lt_mma(float *c, const fkv_u32 *a, fkv_u32 b0, fkv_u32 b1) {
    if (BF16)
        fkv_mma_bf16(c, a, b0, b1);
    else
        fkv_mma_f16(c, a, b0, b1);
}

/* The left operand of a matrix product, split into two terms. */
struct lt_left {
    fkv_u32 high[4];
    fkv_u32 rest[4];
};

template <bool BF16> FKV_FN void lt_mma_terms(float *c, const lt_left &a, fkv_u32 b0, fkv_u32 b1) {
    lt_mma<BF16>(c, a.high, b0, b1);
    lt_mma<BF16>(c, a.rest, b0, b1);
}

/* Four codes of one token: channels 4 * quad to 4 * quad + 3 of the slab. Codes with 16 bits use both words. */
struct lt_quad {
    fkv_u32 w[2];
};

/* Returns the offset, in bytes, of byte `byte` of a token's row. Chunks of 16 bytes are permuted to avoid bank conflicts. */
FKV_FN fkv_u32 lt_row_at(fkv_u32 token, fkv_u32 byte) {
    fkv_u32 flip = LT_CHUNKS == 4 ? (token & 2u) * 16 : LT_CHUNKS == 8 ? (token & 3u) * 32 : 0;
    return token * LT_ROW_BYTES + (byte ^ flip);
}

FKV_FN lt_quad lt_quad_at(FKV_SHARED const fkv_u32 *codes, fkv_u32 token, fkv_u32 quad) {
    FKV_SHARED const fkv_u8 *at = (FKV_SHARED const fkv_u8 *)codes + lt_row_at(token, quad * (FKV_K_BITS / 2));
    lt_quad x;
    x.w[1] = 0;
    if (FKV_K_BITS == 2) {
        x.w[0] = *at;
    } else if (FKV_K_BITS == 4) {
        x.w[0] = *(FKV_SHARED const fkv_u16 *)at;
    } else if (FKV_K_BITS == 8) {
        x.w[0] = *(FKV_SHARED const fkv_u32 *)at;
    } else {
        fkv_words2 both = *(FKV_SHARED const fkv_words2 *)at;
        x.w[0] = both.w[0];
        x.w[1] = both.w[1];
    }
    return x;
}

/* Converts the codes in bits 0 to 7 and 16 to 23 of x to float16 values relative to the middle code. The value 1024 + code is the
 * float16 pattern 0x6400 + code. For 8-bit codes, x already has this form. */
FKV_FN fkv_u32 lt_f16_codes(fkv_u32 x) {
    const fkv_u32 mask = ((1u << (FKV_K_BITS & 15)) - 1u) * 0x10001u;
    const fkv_u32 one = 0x3c003c00u;
    if (FKV_K_BITS != 8) x = fkv_mask_or(x, mask, 0x64006400u);
    return fkv_fma_f16x2(x, one, 0xe400e400u + LT_MIDDLE * 0x10001u);
}

/* Converts codes to bfloat16 in the same way. The values 128 to 255 are the bfloat16 patterns 0x4300 to 0x437f, so the highest
 * bit of an 8-bit code selects the subtrahend: 128 (0x4300) or 256 (0x4380). */
FKV_FN fkv_u32 lt_bf16_codes(fkv_u32 x) {
    const fkv_u32 one = 0x3f803f80u;
    if (FKV_K_BITS == 8) return fkv_fma_bf16x2(fkv_mask_or(x, 0x007f007fu, 0x43004300u), one, (x & 0x00800080u) ^ 0xc380c380u);
    const fkv_u32 mask = ((1u << (FKV_K_BITS & 15)) - 1u) * 0x10001u;
    return fkv_fma_bf16x2(fkv_mask_or(x, mask, 0x43004300u), one, 0xc300c300u + LT_MIDDLE * 0x10001u);
}

/* Returns word `half` of the right operand of a score product: channels 2 * half and 2 * half + 1 of a quad. */
FKV_FN fkv_u32 lt_key_pair(const lt_quad &x, int half) {
    if (FKV_K_BITS == 16) return x.w[half];
    if (FKV_K_BITS == 8) return lt_f16_codes(fkv_permute(x.w[0], 0x64646464u, half == 0 ? 0x4140u : 0x4342u));
    fkv_u32 pairs = x.w[0] | x.w[0] << (16 - FKV_K_BITS);
    return lt_f16_codes(pairs >> (2 * half * FKV_K_BITS));
}

/* Replaces non-finite values with 0. The scores of the affected tokens are NaN, so all rows that attend to these tokens still
 * become NaN. */
FKV_FN fkv_u32 lt_finite(fkv_u32 x) {
    const fkv_u32 exponent = FKV_PAGE_BF16 ? 0x7f80u : 0x7c00u;
    fkv_u32 low = (x & exponent) == exponent ? 0u : x & 0xffffu;
    fkv_u32 high = (x >> 16 & exponent) == exponent ? 0u : x & 0xffff0000u;
    return low | high;
}

/* Returns channel j of the quads of two tokens as a word of the right operand of a value product. */
FKV_FN fkv_u32 lt_value_pair(const lt_quad &a, const lt_quad &b, int j) {
    if (FKV_K_BITS == 16) return lt_finite(fkv_permute(a.w[j / 2], b.w[j / 2], j % 2 == 0 ? 0x5410u : 0x7632u));
    if (FKV_K_BITS == 8) return lt_bf16_codes(fkv_permute(a.w[0], b.w[0], 0x0400u + 0x0101u * (fkv_u32)j));
    return lt_bf16_codes((a.w[0] | b.w[0] << 16) >> (j * FKV_K_BITS));
}

/* ---- tiles ---- */

/* Position of a thread, and the part of the split that it reads. Comments refer to lane l as thread (r, c), where r = l / 4 and
 * c = l % 4. */
struct lt_place {
    fkv_u32 lane;
    fkv_u32 warp;
    fkv_u32 r;
    fkv_u32 c;
    dc_split_pages walk;
    fkv_u32 n_tokens; /* number of tokens in the split */
    fkv_u32 n_tiles;
};

constexpr bool LT_ONE_PAGE = FKV_PAGE_TOKENS % LT_TILE == 0; /* whether each tile is contained in one page */

/* Returns the index, within the split, of token `token` of a tile. Tiles past the end of the split are replaced with the last
 * tile if each tile is contained in one page. Otherwise, tokens past the end of the split are replaced with the last token.
 * Tokens past the end are masked. */
FKV_FN fkv_u32 lt_token(const lt_place &at, fkv_u32 tile, fkv_u32 token) {
    if (LT_ONE_PAGE) return (tile < at.n_tiles ? tile : at.n_tiles - 1) * LT_TILE + token;
    fkv_u32 i = tile * LT_TILE + token;
    return i < at.n_tokens ? i : at.n_tokens - 1;
}

/* Returns the block that contains token `token` of a tile. page: pool page of the lane's token. */
FKV_FN const fkv_u8 *lt_block(const lt_place &at, fkv_u32 page, fkv_u32 token) {
    return dc_page_block(at.walk, LT_ONE_PAGE ? page : fkv_shuffle_bits(page, token));
}

/* Returns the page slot of token `token` of a tile. */
FKV_FN fkv_u32 lt_slot(const lt_place &at, fkv_u32 tile, fkv_u32 token) {
    if (LT_ONE_PAGE) return tile * LT_TILE % FKV_PAGE_TOKENS + token;
    return lt_token(at, tile, token) % FKV_PAGE_TOKENS;
}

/* Returns the pool page of the lane's token. */
FKV_FN fkv_u32 lt_page(const lt_place &at, fkv_u32 tile) {
    return dc_physical_page(at.walk, lt_token(at, tile, LT_ONE_PAGE ? 0 : at.lane) / FKV_PAGE_TOKENS);
}

FKV_FN FKV_SHARED fkv_u32 *lt_stage(const lt_place &at, FKV_SHARED fkv_u32 *shared, fkv_u32 tile) {
    return shared + (tile % LT_STAGES * LT_WARPS + at.warp) * LT_STAGE_WORDS;
}

/* Starts copying the warp's channels of a tile to shared memory. page: pool page of the lane's token. */
FKV_FN void lt_copy(const lt_place &at, FKV_SHARED fkv_u32 *shared, fkv_u32 tile, fkv_u32 page) {
    if (tile < at.n_tiles) {
        FKV_SHARED fkv_u32 *to = lt_stage(at, shared, tile);
        FKV_UNROLL
        for (fkv_u32 i = 0; i < LT_CHUNKS; i++) {
            fkv_u32 token = (i * 32 + at.lane) / LT_CHUNKS;
            fkv_u32 chunk = at.lane % LT_CHUNKS;
            const fkv_u8 *from = lt_block(at, page, token) + FKV_K_CODES + lt_slot(at, tile, token) * FKV_K_ROW_BYTES +
                                 at.warp * LT_ROW_BYTES + chunk * 16;
            fkv_async_copy16(to + lt_row_at(token, chunk * 16) / 4, from);
        }
        FKV_UNROLL
        for (fkv_u32 s = 0; s < LT_ROPE_STEPS; s++) {
            fkv_u32 step = at.warp + s * LT_WARPS;
            if (step >= LT_ROPE_ALL) continue;
            FKV_UNROLL
            for (fkv_u32 i = 0; i < 2; i++) {
                fkv_u32 token = i * 16 + at.lane / 2;
                const fkv_u8 *from = lt_block(at, page, token) + FKV_V_CODES + lt_slot(at, tile, token) * (FKV_ROPE * 2) +
                                     step * 32 + at.lane % 2 * 16;
                fkv_async_copy16(to + LT_CODE_WORDS + (s * LT_TILE + token) * 8 + at.lane % 2 * 4, from);
            }
        }
    }
    fkv_async_copy_commit();
}

/* Scales and biases of the lane's token for the groups of the warp's slab, as stored in the page. */
struct lt_lines {
    fkv_u32 scale[LT_GROUPS];
    fkv_u32 bias[LT_GROUPS];
};

FKV_FN lt_lines lt_take_lines(const lt_place &at, fkv_u32 tile, fkv_u32 page) {
    lt_lines x = {};
    if (FKV_K_BITS == 16 || tile >= at.n_tiles) return x;
    fkv_u32 row = lt_slot(at, tile, at.lane) * (FKV_D / FKV_K_GROUP);
    const fkv_u8 *block = dc_page_block(at.walk, page);
    FKV_UNROLL
    for (int g = 0; g < LT_GROUPS; g++) {
        fkv_u32 group = row + (at.warp * LT_SLAB + (fkv_u32)g * LT_GROUP) / FKV_K_GROUP;
        x.scale[g] = fkv_stream2(block + FKV_K_SCALES + group * 2);
        x.bias[g] = fkv_stream2(block + FKV_K_BIASES + group * 2);
    }
    return x;
}

constexpr int LT_LINES = LT_GROUPS * LT_TILE * 2; /* number of floats in the scales and biases of one slab */

/* Stores {scale, bias + scale * middle code} of the lane's token as floats, once for the scores and, LT_LINES floats later, once
 * for the values. In the copy for the values, non-finite numbers are replaced with 0, because masked tokens have weight 0, and 0
 * times NaN is NaN. The score of such a token is NaN, so rows that attend to it still become NaN. */
FKV_FN void lt_put_lines(const lt_place &at, FKV_SHARED float *scales, const lt_lines &x) {
    FKV_UNROLL
    for (int g = 0; g < LT_GROUPS; g++) {
        float scale = FKV_K_BITS == 16 ? 1.0f : fkv_page_value(x.scale[g]);
        float bias = FKV_K_BITS == 16 ? 0.0f : fkv_fma(scale, (float)LT_MIDDLE, fkv_page_value(x.bias[g]));
        FKV_SHARED float *to = scales + ((fkv_u32)g * LT_TILE + at.lane) * 2;
        to[0] = scale;
        to[1] = bias;
        to[LT_LINES] = fkv_is_finite(scale) && fkv_is_finite(bias) ? scale : 0.0f;
        to[LT_LINES + 1] = fkv_is_finite(bias) ? bias : 0.0f;
    }
    fkv_sync_warp();
}

/* ---- queries ---- */

/* Query operands of the warp's channels for rows r and r + 8, and the sums of these queries over each group, which are multiplied
 * by the biases. */
struct lt_queries {
    lt_left latent[LT_STEPS];
    lt_left rope[LT_ROPE_STEPS > 0 ? LT_ROPE_STEPS : 1];
    float sum[2][LT_GROUPS];
};

/* Loads the query rows into shared memory as floats, scaled for a base-2 softmax and rotated like the keys. Each row is
 * multiplied by a power of two, so that its largest value is between 2^14 and 2^15. The row's scores are multiplied by the
 * inverse of this power. Unused rows are 0. */
FKV_FN void lt_load_rows(const fkv_split &split, const lt_place &at, const void *q, FKV_SHARED float *shared) {
    const float scale = fkv_float_of(FKV_SCALE_BITS) * 1.44269504f;
    for (fkv_u32 row = at.warp; row < LT_ROWS; row += LT_WARPS) {
        FKV_SHARED float *to = shared + LT_AT_QUERIES + row * (FKV_D + FKV_ROPE);
        float x[DC_LANE_CHANNELS] = {};
        float rope[(FKV_ROPE + 31) / 32] = {};
        fkv_u32 largest = 0;
        if (row < split.n_rows) {
            fkv_u32 of_item = split.first_row + row;
            fkv_u64 from =
                ((fkv_u64)(split.words[FKV_SPLIT_FIRST_TOKEN] + of_item / FKV_R) * FKV_H + of_item % FKV_R) * (FKV_D + FKV_ROPE);
            largest = dc_load_row(q, from, x, at.lane);
            FKV_UNROLL
            for (int i = 0; i < (FKV_ROPE + 31) / 32; i++) {
                fkv_u32 d = at.lane + 32 * (fkv_u32)i;
                rope[i] = d < FKV_ROPE ? fkv_mul(fkv_row_value(q, from + FKV_D + d), scale) : 0.0f;
                largest = fkv_max_bits(largest, fkv_bits_of(rope[i]) & 0x7fffffffu);
            }
            largest = fkv_warp_max_bits(largest);
        }
        fkv_u32 exponent = largest >> 23 < 15 ? 15 : largest >> 23;
        float unit = fkv_float_of((268 - exponent) << 23); /* 2^(14 - unbiased exponent) */
        FKV_UNROLL
        for (int i = 0; i < DC_LANE_CHANNELS; i++) to[at.lane + 32 * (fkv_u32)i] = fkv_mul(x[i], unit);
        FKV_UNROLL
        for (int i = 0; i < (FKV_ROPE + 31) / 32; i++)
            if (at.lane + 32 * (fkv_u32)i < FKV_ROPE) to[FKV_D + at.lane + 32 * (fkv_u32)i] = fkv_mul(rope[i], unit);
        if (at.lane == 0) shared[LT_AT_FACTORS + row] = fkv_float_of((exponent - 14) << 23);
    }
    fkv_sync();
}

/* Returns the first of the four adjacent channels of the slab that thread (r, c) handles in step `step` of a score product. The
 * channels of a step belong to one group. */
FKV_FN fkv_u32 lt_key_channel(fkv_u32 c, int step) {
    constexpr int steps = LT_GROUP / 16;
    return (fkv_u32)(step / steps * LT_GROUP + step % steps * 4) + c * (LT_GROUP / 4);
}

template <bool BF16> FKV_FN void lt_query_operand(FKV_SHARED const float *rows, fkv_u32 r, fkv_u32 channel, lt_left &to) {
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        FKV_SHARED const float *x = rows + (r + 8 * (fkv_u32)(i % 2)) * (FKV_D + FKV_ROPE) + channel + 2 * (i / 2);
        lt_terms terms = lt_split<BF16>(x[0], x[1]);
        to.high[i] = terms.high;
        to.rest[i] = terms.rest;
    }
}

FKV_FN void lt_take_queries(const lt_place &at, FKV_SHARED const float *shared, lt_queries &to) {
    FKV_SHARED const float *rows = shared + LT_AT_QUERIES;
    FKV_UNROLL
    for (int n = 0; n < 2; n++) {
        FKV_UNROLL
        for (int g = 0; g < LT_GROUPS; g++) {
            FKV_SHARED const float *x = rows + (at.r + 8 * (fkv_u32)n) * (FKV_D + FKV_ROPE) + at.warp * LT_SLAB + g * LT_GROUP;
            float sum = 0.0f;
            for (fkv_u32 d = at.c; d < LT_GROUP; d += 4) sum += x[d];
            sum += fkv_shuffle_xor(sum, 1);
            to.sum[n][g] = sum + fkv_shuffle_xor(sum, 2);
        }
    }
    FKV_UNROLL
    for (int s = 0; s < LT_STEPS; s++)
        lt_query_operand<LT_KEYS_BF16>(rows, at.r, at.warp * LT_SLAB + lt_key_channel(at.c, s), to.latent[s]);
    FKV_UNROLL
    for (int s = 0; s < LT_ROPE_STEPS; s++) {
        fkv_u32 step = at.warp + (fkv_u32)s * LT_WARPS;
        if (step < LT_ROPE_ALL) lt_query_operand<LT_ROPE_BF16>(rows, at.r, FKV_D + step * 16 + at.c * 4, to.rope[s]);
    }
    fkv_sync(); /* after this barrier, the memory of the queries may be reused */
}

/* ---- scores ---- */

/* Loads the codes of thread (r, c) for all steps of a score product with one token. */
FKV_FN void lt_take_keys(const lt_place &at, FKV_SHARED const fkv_u32 *codes, fkv_u32 token, lt_quad (&to)[LT_STEPS]) {
    if (FKV_K_BITS == 8 && LT_GROUP == 64) {
        fkv_words4 x = fkv_shared16(codes + lt_row_at(token, at.c * 16) / 4);
        FKV_UNROLL
        for (int s = 0; s < LT_STEPS; s++) to[s].w[0] = x.w[s];
    } else {
        FKV_UNROLL
        for (int s = 0; s < LT_STEPS; s++) to[s] = lt_quad_at(codes, token, lt_key_channel(at.c, s) / 4);
    }
}

/* Computes the scores of eight tokens over the warp's channels. Thread (r, c) computes rows r (score[0], score[1]) and r + 8 for
 * tokens first + 2 * c and first + 2 * c + 1. */
FKV_FN void lt_score(const lt_place &at, const lt_queries &q, FKV_SHARED const fkv_u32 *codes, FKV_SHARED const float *scales,
                     fkv_u32 first, float (&score)[4]) {
    lt_quad keys[LT_STEPS];
    lt_take_keys(at, codes, first + at.r, keys);
    FKV_UNROLL
    for (int i = 0; i < 4; i++) score[i] = 0.0f;
    FKV_UNROLL
    for (int s = 0; s < LT_ROPE_STEPS; s++) {
        if (at.warp + (fkv_u32)s * LT_WARPS >= LT_ROPE_ALL) continue;
        fkv_words2 rope =
            *(FKV_SHARED const fkv_words2 *)(codes + LT_CODE_WORDS + ((fkv_u32)s * LT_TILE + first + at.r) * 8 + at.c * 2);
        lt_mma_terms<LT_ROPE_BF16>(score, q.rope[s], rope.w[0], rope.w[1]);
    }
    FKV_UNROLL
    for (int g = 0; g < LT_GROUPS; g++) {
        float dot[2][4] = {};
        FKV_UNROLL
        for (int s = g * (LT_STEPS / LT_GROUPS); s < (g + 1) * (LT_STEPS / LT_GROUPS); s++) {
            fkv_u32 b0 = lt_key_pair(keys[s], 0);
            fkv_u32 b1 = lt_key_pair(keys[s], 1);
            lt_mma<LT_KEYS_BF16>(dot[0], q.latent[s].high, b0, b1);
            lt_mma<LT_KEYS_BF16>(dot[1], q.latent[s].rest, b0, b1);
        }
        FKV_SHARED const float *lines = scales + ((fkv_u32)g * LT_TILE + first + 2 * at.c) * 2;
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            score[i] = fkv_fma(dot[0][i] + dot[1][i], lines[i % 2 * 2], score[i]);
            score[i] = fkv_fma(q.sum[i / 2][g], lines[i % 2 * 2 + 1], score[i]);
        }
    }
}

/* Computes the scores of a tile over the warp's channels and stores them for the other warps. */
FKV_FN void lt_put_scores(const lt_place &at, const lt_queries &q, FKV_SHARED const fkv_u32 *codes,
                          FKV_SHARED const float *scales, FKV_SHARED float *scores) {
    FKV_UNROLL
    for (fkv_u32 first = 0; first < LT_TILE; first += 8) {
        float score[4];
        lt_score(at, q, codes, scales, first, score);
        FKV_UNROLL
        for (int i = 0; i < 4; i++)
            scores[(at.warp * LT_ROWS + at.r + 8 * (fkv_u32)(i / 2)) * LT_SCORE_STRIDE + first + 2 * at.c + (fkv_u32)(i % 2)] =
                score[i];
    }
}

/* ---- softmax ---- */

constexpr int LT_OWN_ROWS = (LT_ROWS + LT_WARPS - 1) / LT_WARPS; /* maximum number of rows per warp */

/* Softmax state of the warp's rows. `total` is the sum of the weights of the lane's tokens. */
struct lt_softmax {
    fkv_u32 position[LT_OWN_ROWS];
    float max[LT_OWN_ROWS];
    float total[LT_OWN_ROWS];
};

FKV_FN void lt_softmax_begin(const fkv_split &split, const lt_place &at, lt_softmax &state) {
    FKV_UNROLL
    for (int n = 0; n < LT_OWN_ROWS; n++) {
        fkv_u32 row = at.warp + (fkv_u32)n * LT_WARPS;
        state.position[n] =
            split.words[FKV_SPLIT_POSITION] + (split.first_row + (row < split.n_rows ? row : 0)) / FKV_R; /* unused rows: any */
        state.max[n] = dc_minus_infinity();
        state.total[n] = 0.0f;
    }
}

/* Computes the softmax weights of a tile for the warp's rows. */
FKV_FN void lt_put_weights(const lt_place &at, fkv_u32 tile, FKV_SHARED float *shared, lt_softmax &state) {
    fkv_u32 token = lt_token(at, tile, at.lane);
    fkv_u32 position = dc_logical_page(at.walk, token / FKV_PAGE_TOKENS) * FKV_PAGE_TOKENS + token % FKV_PAGE_TOKENS;
    bool there = tile * LT_TILE + at.lane < at.n_tokens;
    FKV_UNROLL
    for (int n = 0; n < LT_OWN_ROWS; n++) {
        fkv_u32 row = at.warp + (fkv_u32)n * LT_WARPS;
        if (row >= LT_ROWS) continue;
        FKV_SHARED const float *scores = shared + LT_AT_SCORES + row * LT_SCORE_STRIDE + at.lane;
        float x = scores[0];
        FKV_UNROLL
        for (int w = 1; w < LT_WARPS; w++) x += scores[w * LT_SCORES_WORDS];
        x = fkv_cap(fkv_mul(x, shared[LT_AT_FACTORS + row]));
        if (!there || !fkv_is_visible(state.position[n], position)) x = dc_minus_infinity();
        float max = fkv_max(state.max[n], x);
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) max = fkv_max(max, fkv_shuffle_xor(max, h));
        float shrink = state.max[n] == max ? 1.0f : fkv_exp2(state.max[n] - max);
        float weight = fkv_exp2(x - (max == dc_minus_infinity() ? 0.0f : max));
        state.max[n] = max;
        state.total[n] = fkv_fma(state.total[n], shrink, weight);
        shared[LT_AT_WEIGHTS + row * LT_WEIGHT_STRIDE + at.lane] = weight;
        if (at.lane == 0) shared[LT_AT_SHRINKS + row] = shrink;
    }
}

/* ---- values ---- */

/* Output sums of thread (r, c). sums[t][i] is row r + 8 * (i / 2) and channel t / 4 * 32 + (2 * c + i % 2) * 4 + t % 4 of the
 * slab. The biases of the values are accumulated separately: biases[n][g] is the sum of the bias terms of group g over the
 * thread's tokens, for row r + 8 * n. */
struct lt_sums {
    float sums[LT_SLAB / 8][4];
    float biases[2][LT_GROUPS];
};

/* Loads the weights of rows r and r + 8 for the tokens first + c + 4 * k. */
FKV_FN void lt_take_weights(const lt_place &at, FKV_SHARED const float *weights, fkv_u32 first, float (&p)[2][4]) {
    FKV_UNROLL
    for (int i = 0; i < 8; i++)
        p[i / 4][i % 4] = weights[(at.r + 8 * (fkv_u32)(i / 4)) * LT_WEIGHT_STRIDE + first + at.c + 4 * (fkv_u32)(i % 4)];
}

/* Multiplies weights by the scales of group g and converts them to a matrix operand. Also adds the products of weights and
 * biases. */
FKV_FN void lt_weight_operand(const lt_place &at, FKV_SHARED const float *scales, fkv_u32 first, int g, const float (&p)[2][4],
                              lt_left &to, lt_sums &state) {
    float x[2][4];
    FKV_UNROLL
    for (int k = 0; k < 4; k++) {
        fkv_words2 line =
            *(FKV_SHARED const fkv_words2 *)(scales + LT_LINES + ((fkv_u32)g * LT_TILE + first + at.c + 4 * (fkv_u32)k) * 2);
        FKV_UNROLL
        for (int n = 0; n < 2; n++) {
            x[n][k] = fkv_mul(p[n][k], fkv_float_of(line.w[0]));
            if (FKV_K_BITS != 16) state.biases[n][g] = fkv_fma(p[n][k], fkv_float_of(line.w[1]), state.biases[n][g]);
        }
    }
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        lt_terms terms = lt_split<LT_VALUES_BF16>(x[i % 2][i / 2 * 2], x[i % 2][i / 2 * 2 + 1]);
        to.high[i] = terms.high;
        to.rest[i] = terms.rest;
    }
}

/* Adds the weighted values of a tile to the output sums. */
FKV_FN void lt_add_values(const lt_place &at, FKV_SHARED const fkv_u32 *codes, FKV_SHARED const float *scales,
                          FKV_SHARED const float *shared, lt_sums &state) {
    const float shrink[2] = {shared[LT_AT_SHRINKS + at.r], shared[LT_AT_SHRINKS + at.r + 8]};
    if (fkv_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
        FKV_UNROLL
        for (int i = 0; i < LT_SLAB / 2; i++) state.sums[i / 4][i % 4] *= shrink[i % 4 / 2];
        FKV_UNROLL
        for (int i = 0; i < 2 * LT_GROUPS; i++) state.biases[i % 2][i / 2] *= shrink[i % 2];
    }
    FKV_UNROLL
    for (fkv_u32 first = 0; first < LT_TILE; first += 16) {
        float p[2][4];
        lt_left weights;
        lt_take_weights(at, shared + LT_AT_WEIGHTS, first, p);
        FKV_UNROLL
        for (int u = 0; u < 2; u++) { /* 32 channels each */
            if (u < LT_GROUPS) lt_weight_operand(at, scales, first, u, p, weights, state);
            lt_quad quads[4];
            FKV_UNROLL
            for (int k = 0; k < 4; k++) quads[k] = lt_quad_at(codes, first + at.c + 4 * (fkv_u32)k, (fkv_u32)u * 8 + at.r);
            FKV_UNROLL
            for (int j = 0; j < 4; j++)
                lt_mma_terms<LT_VALUES_BF16>(state.sums[u * 4 + j], weights, lt_value_pair(quads[0], quads[1], j),
                                             lt_value_pair(quads[2], quads[3], j));
        }
    }
}

/* ---- results ---- */

/* Stores the output sums of the warp's channels, and the softmax state of the warp's rows, for the merge kernel. */
FKV_FN void lt_store(const fkv_split &split, fkv_place place, const lt_place &at, lt_sums &state, lt_softmax &softmax,
                     const fkv_u32 *table, float *parts) {
    fkv_u64 first = ((fkv_u64)split.number * FKV_G + place.y) * split.all_rows + split.first_row;
    FKV_UNROLL
    for (int i = 0; i < 2 * LT_GROUPS; i++) {
        state.biases[i % 2][i / 2] += fkv_shuffle_xor(state.biases[i % 2][i / 2], 1);
        state.biases[i % 2][i / 2] += fkv_shuffle_xor(state.biases[i % 2][i / 2], 2);
    }
    FKV_UNROLL
    for (int i = 0; i < 8; i++) { /* 4 adjacent channels of one row */
        int u = i / 4;
        fkv_u32 row = at.r + 8 * (fkv_u32)(i % 4 / 2);
        fkv_u32 channel = at.warp * LT_SLAB + (fkv_u32)u * 32 + (2 * at.c + (fkv_u32)(i % 2)) * 4;
        fkv_words4 x;
        FKV_UNROLL
        for (int j = 0; j < 4; j++)
            x.w[j] = fkv_bits_of(state.sums[u * 4 + j][i % 4] + state.biases[i % 4 / 2][u < LT_GROUPS ? u : 0]);
        if (row < split.n_rows) *(fkv_words4 *)(parts + (first + row) * FKV_D + channel) = x;
    }
    FKV_UNROLL
    for (int n = 0; n < LT_OWN_ROWS; n++) {
        fkv_u32 row = at.warp + (fkv_u32)n * LT_WARPS;
        float total = softmax.total[n];
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) total += fkv_shuffle_xor(total, h);
        if (at.lane != 0 || row >= split.n_rows) continue;
        float *to = parts + fkv_stats_at(table, place.y * split.all_rows + split.first_row + row, split.number);
        to[0] = softmax.max[n];
        to[1] = total;
    }
}

/* Body of the decode kernel. q: [T, H, D + R]. The other parameters are as in decode_mma.h. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, FKV_DEVICE const void *q, FKV_DEVICE const void *pool,
                              FKV_DEVICE const fkv_u32 *table, FKV_DEVICE float *parts) {
    fkv_split split = fkv_split_at(place, table);
    if (split.n_rows == 0) return;
    FKV_SHARED float *floats = (FKV_SHARED float *)shared;
    lt_place at;
    at.lane = place.index % 32;
    at.warp = place.index / 32;
    at.r = at.lane / 4;
    at.c = at.lane % 4;
    at.walk = dc_split_pages_of(split, place.y, pool, table);
    at.n_tokens = split.words[FKV_SPLIT_N_TOKENS];
    at.n_tiles = (at.n_tokens + LT_TILE - 1) / LT_TILE;
    fkv_u32 page[2]; /* pool pages of the lane's tokens in the next tile and in the tile after it */
    page[0] = lt_page(at, 0);
    page[1] = lt_page(at, 1);
    lt_copy(at, shared, 0, page[0]);
    lt_copy(at, shared, 1, page[1]);
    lt_lines lines = lt_take_lines(at, 0, page[0]);
    page[0] = page[1];
    page[1] = lt_page(at, 2);

    lt_load_rows(split, at, q, floats);
    lt_queries queries;
    lt_take_queries(at, floats, queries);
    lt_softmax softmax;
    lt_softmax_begin(split, at, softmax);
    lt_sums state = {};
    FKV_SHARED float *scales = floats + LT_AT_SCALES + at.warp * (2 * LT_LINES);
    FKV_NO_UNROLL
    for (fkv_u32 tile = 0; tile < at.n_tiles; tile++) {
        FKV_SHARED const fkv_u32 *codes = lt_stage(at, shared, tile);
        fkv_async_copy_wait_but_last();
        lt_copy(at, shared, tile + 2, page[1]);
        lt_put_lines(at, scales, lines);
        lines = lt_take_lines(at, tile + 1, page[0]);
        page[0] = page[1];
        page[1] = lt_page(at, tile + 3);
        lt_put_scores(at, queries, codes, scales, floats + LT_AT_SCORES);
        fkv_sync();
        lt_put_weights(at, tile, floats, softmax);
        fkv_sync();
        lt_add_values(at, codes, scales, floats, state);
    }
    lt_store(split, place, at, state, softmax, table, parts);
}
