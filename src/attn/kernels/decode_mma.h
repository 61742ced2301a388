/* Decode through matrix units: one block walks one piece of the history of one KV head, for up to FKV_ITEM_ROWS rows (queries
 * times query heads), and leaves {sum of p v, max, sum of p} for the merge. CUDA, and the host, which plays the matrix units by
 * hand.
 *
 * FKV_STREAMS warps take the tiles of the piece in turn, each with a softmax of its own, folded in order at the end. Heads larger
 * than a slab (128 or 64 channels) have that many warps for each stream, one for each slab; they add their scores up through
 * shared memory, slab by slab. Nothing else is shared: packed bytes go from memory into registers and from there into the
 * products.
 *
 * Scores. Codes are the A operand of an integer product as they lie in the page (tokens are its 16 rows; 4- and 2-bit codes
 * become bytes by shifts and masks). Queries are B: each number is three bytes with sign, v = 65536 high + 256 low + rest, in
 * steps of the largest of its group. Columns 2c and 2c + 1 of B are high and low of row c; the rests of two times four rows share
 * columns. A permutation of channels is free in a product, so every thread loads whole words: see fkv_channel_place().
 *     score = scale * step * (65536 high + 256 low + rest) + bias * sum(q)                       for each group
 *
 * Values. out^T = V^T P^T: 16 channels are the rows, 16 tokens the depth, rows of the item the columns. Codes become
 * halves, exactly, around their middle (code - 128, - 8, - 2); p * scale is rounded to a half, in units of 2^(e - 14) where 2^e
 * bounds the scales seen so far, so that any scale of any page type has all its bits; the bias is added in float.
 * Four rows or fewer: the columns 2c and 2c + 1 are row c with the scales of two groups, and each channel keeps the one of its
 * own group. More: they are rows c and c + 4, and each group has a B of its own.
 *
 * Which tokens sit where: thread l is r = l / 4, c = l % 4. In a tile of 8 NJ tokens, row r of score block j is token NJ r + j,
 * so a thread's own scales lie together; after the transpose it meets the values of tokens NJ (2 c) + j and NJ (2 c + 1) + j.
 *
 * Same answer however it got there: a row's numbers never meet another row's, and FKV_ITEM_ROWS changes no operation on them.
 */
#if FKV_D % 128 == 0
#define FKV_SLAB 128
#else
#define FKV_SLAB 64
#endif
#define FKV_N_SLABS (FKV_D / FKV_SLAB)
#define FKV_STREAMS 4
#define FKV_DECODE_THREADS (32 * FKV_STREAMS * FKV_N_SLABS)
#define FKV_NT (FKV_ITEM_ROWS / 4)

/* tokens of a tile: what a thread holds of it are registers */
#ifdef FKV_TRY_NJ
#define FKV_NJ FKV_TRY_NJ
#elif FKV_PAGE_TOKENS >= 32 && FKV_SLAB * (FKV_K_BITS + FKV_V_BITS) <= 192 * 8
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
#define FKV_NQ FKV_NT /* column tiles */
#else
#if FKV_K_GROUP * FKV_K_BITS / 32 > 16
#define FKV_K_LOAD 16
#else
#define FKV_K_LOAD (FKV_K_GROUP * FKV_K_BITS / 32)
#endif
#define FKV_K_SPAN (FKV_K_LOAD * 32 / FKV_K_BITS)
#define FKV_K_GROUPS (FKV_SLAB / FKV_K_GROUP)
#define FKV_K_STEP_CHANNELS 32
#define FKV_NQ (FKV_NT + (FKV_NT + 1) / 2)
#endif
#define FKV_K_UNITS (FKV_SLAB / FKV_K_SPAN)
#define FKV_K_WORDS ((FKV_K_LOAD + 3) / 4)
#define FKV_K_STEPS (FKV_SLAB / FKV_K_STEP_CHANNELS)
#define FKV_K_UNIT_STEPS (FKV_K_SPAN / FKV_K_STEP_CHANNELS)
#define FKV_K_GROUP_UNITS (FKV_K_UNITS / FKV_K_GROUPS)

/* V: FKV_V_LOAD bytes of each unit of FKV_V_SPAN channels: those of one group */
#define FKV_V_ROW (FKV_D * FKV_V_BITS / 8)
#if FKV_V_BITS == 16
#define FKV_V_SPAN 64
#define FKV_V_GROUPS 1
#else
#define FKV_V_SPAN FKV_V_GROUP
#define FKV_V_GROUPS (FKV_SLAB / FKV_V_GROUP)
#endif
#define FKV_V_LOAD (FKV_V_SPAN * FKV_V_BITS / 64)
#define FKV_V_UNITS (FKV_SLAB / FKV_V_SPAN)
#define FKV_V_WORDS ((FKV_V_LOAD + 3) / 4)
#define FKV_V_QUADS (FKV_V_SPAN / 32) /* of a thread's channels of a unit */
#define FKV_V_TILES (FKV_SLAB / 16)   /* row tiles of a slab */

/* 16-bit bfloat16 values meet p as two bfloat16 numbers */
#define FKV_V_PLAIN_BF16 (FKV_V_BITS == 16 && FKV_PAGE_BF16)

/* B operands of the values: how many for one score block, and column tiles of the sums */
#if FKV_NT == 1
#define FKV_NV 1
#define FKV_V_OPERANDS ((FKV_V_GROUPS + 1) / 2)
#else
#define FKV_NV (FKV_NT / 2)
#define FKV_V_OPERANDS (FKV_V_GROUPS * FKV_NV * (FKV_V_PLAIN_BF16 ? 2 : 1))
#endif

/* scales of a thread's own tokens: one stretch of memory where a slab is the whole head, a stretch for each token otherwise */
#if FKV_N_SLABS == 1
#define FKV_SCALE_WORDS(groups) (((groups) * FKV_NJ + 1) / 2)
#else
#define FKV_SCALE_WORDS(groups) (FKV_NJ * (((groups) + 1) / 2))
#endif
#define FKV_K_SCALE_WORDS FKV_SCALE_WORDS(FKV_K_GROUPS)
#define FKV_V_SCALE_WORDS FKV_SCALE_WORDS(FKV_V_GROUPS)

/* shared memory, in words */
#define FKV_SHARED_QUERIES (FKV_N_SLABS * FKV_NQ * FKV_K_STEPS * 64)
#define FKV_SHARED_STEPS (FKV_ITEM_ROWS * FKV_N_SLABS * FKV_K_GROUPS)
#define FKV_SHARED_EXCHANGE (FKV_N_SLABS > 1 ? 2 * FKV_STREAMS * FKV_N_SLABS * FKV_NT * FKV_NJ * 32 : 0)
#define FKV_SHARED_SUMS (FKV_ITEM_ROWS * FKV_D)
#define FKV_DECODE_SHARED                                                                                                        \
    (FKV_SHARED_QUERIES + 2 * FKV_SHARED_STEPS + 2 * FKV_STREAMS * FKV_ITEM_ROWS +                                               \
     (FKV_SHARED_EXCHANGE > FKV_SHARED_SUMS ? FKV_SHARED_EXCHANGE : FKV_SHARED_SUMS))

#define FKV_MINUS_INFINITY fkv_float_of(0xff800000u)
#define FKV_SINK_PAGES ((FKV_SINKS + FKV_PAGE_TOKENS - 1) / FKV_PAGE_TOKENS)

/* What a thread holds of a tile. */
struct fkv_tile_k {
    fkv_u32 codes[FKV_NJ][FKV_K_UNITS][FKV_K_WORDS];
    fkv_u32 scales[FKV_K_SCALE_WORDS];
    fkv_u32 biases[FKV_K_SCALE_WORDS];
};
struct fkv_tile_v {
    fkv_u32 codes[2][FKV_NJ][FKV_V_UNITS][FKV_V_WORDS];
    fkv_u32 scales[FKV_V_SCALE_WORDS];
    fkv_u32 biases[FKV_V_SCALE_WORDS];
};

/* A warp's share of the piece: FKV_NT rows of a thread, row 4 nt + c. */
struct fkv_decode_state {
    float max[FKV_NT];
    float total[FKV_NT];                                     /* of the thread's own tokens */
    fkv_u32 exponent[FKV_NT];                                /* of the largest scale seen, as a float has it */
    float bias[FKV_NT][FKV_V_BITS == 16 ? 1 : FKV_V_GROUPS]; /* of the thread's own tokens */
    float sums[FKV_V_TILES][FKV_NV][4];
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

/* Scales or biases of tokens [token, token + NJ), the groups of one slab. */
FKV_FN void fkv_stream_scales(fkv_u32 *to, const fkv_u8 *part, fkv_u32 token, fkv_u32 slab, int groups) {
#if FKV_N_SLABS == 1
    fkv_stream(to, part + token * (fkv_u32)groups * 2, groups * FKV_NJ * 2);
    (void)slab;
#else
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++)
        fkv_stream(to + j * ((groups + 1) / 2), part + ((token + (fkv_u32)j) * FKV_N_SLABS + slab) * (fkv_u32)groups * 2,
                   groups * 2);
#endif
}

FKV_FN float fkv_scale_at(const fkv_u32 *scales, int j, int g, int groups) {
#if FKV_N_SLABS == 1
    int half = j * groups + g;
#else
    int half = j * ((groups + 1) / 2 * 2) + g;
#endif
    return fkv_page_number(half % 2 == 0 ? scales[half / 2] & 0xffffu : scales[half / 2] >> 16);
}

FKV_FN void fkv_load_k(fkv_tile_k *to, const fkv_u8 *block, fkv_u32 slot, fkv_u32 slab, fkv_u32 lane) {
    fkv_u32 token = slot + FKV_NJ * (lane / 4);
    const fkv_u8 *codes = block + FKV_K_CODES + token * FKV_K_ROW + slab * (FKV_SLAB * FKV_K_BITS / 8) + lane % 4 * FKV_K_LOAD;
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++) {
        FKV_UNROLL
        for (int u = 0; u < FKV_K_UNITS; u++) fkv_stream(to->codes[j][u], codes + j * FKV_K_ROW + u * 4 * FKV_K_LOAD, FKV_K_LOAD);
    }
#if FKV_K_BITS < 16
    fkv_stream_scales(to->scales, block + FKV_K_SCALES, token, slab, FKV_K_GROUPS);
    fkv_stream_scales(to->biases, block + FKV_K_BIASES, token, slab, FKV_K_GROUPS);
#endif
}

FKV_FN void fkv_load_v(fkv_tile_v *to, const fkv_u8 *block, fkv_u32 slot, fkv_u32 slab, fkv_u32 lane) {
    fkv_u32 token = slot + 2 * FKV_NJ * (lane % 4);
    const fkv_u8 *codes = block + FKV_V_CODES + token * FKV_V_ROW + slab * (FKV_SLAB * FKV_V_BITS / 8) + lane / 4 * FKV_V_LOAD;
    FKV_UNROLL
    for (int a = 0; a < 2; a++) {
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) {
            FKV_UNROLL
            for (int u = 0; u < FKV_V_UNITS; u++)
                fkv_stream(to->codes[a][j][u], codes + (a * FKV_NJ + j) * FKV_V_ROW + u * 8 * FKV_V_LOAD, FKV_V_LOAD);
        }
    }
#if FKV_V_BITS < 16
    fkv_u32 own = slot + FKV_NJ * (lane / 4);
    fkv_stream_scales(to->scales, block + FKV_V_SCALES, own, slab, FKV_V_GROUPS);
    fkv_stream_scales(to->biases, block + FKV_V_BIASES, own, slab, FKV_V_GROUPS);
#endif
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

/* One number of row `row` into the B operands of its slab. x is in steps. */
FKV_FN void fkv_put_query(FKV_SHARED fkv_u32 *queries, fkv_u32 row, fkv_u32 channel, float x) {
    fkv_channel at = fkv_channel_place(channel % FKV_SLAB);
    FKV_SHARED fkv_u32 *operands = queries + channel / FKV_SLAB * (FKV_NQ * FKV_K_STEPS * 64);
    fkv_u32 tile = row / 4;
    fkv_u32 column = row % 4 * 2;
    fkv_u32 high = ((tile * FKV_K_STEPS + at.step) * 32 + column * 4 + at.thread) * 2 + at.word;
    fkv_u32 low = high + 8; /* the next column */
#if FKV_K_BITS == 16
    FKV_SHARED fkv_u16 *halves = (FKV_SHARED fkv_u16 *)operands;
    fkv_u32 bits = fkv_page_bits(x);
    halves[high * 2 + at.number] = (fkv_u16)bits;
    halves[low * 2 + at.number] = (fkv_u16)fkv_page_bits(x - fkv_page_number(bits));
#else
    FKV_SHARED fkv_u8 *bytes = (FKV_SHARED fkv_u8 *)operands;
    int v = (int)fkv_rint(x);
    int rest = ((v + 128) & 255) - 128;
    v = (v - rest) >> 8;
    int second = ((v + 128) & 255) - 128;
    v = (v - second) >> 8;
    bytes[high * 4 + at.number] = (fkv_u8)v;
    bytes[low * 4 + at.number] = (fkv_u8)second;
    fkv_u32 shared = (((FKV_NT + tile / 2) * FKV_K_STEPS + at.step) * 32 + (column + tile % 2) * 4 + at.thread) * 2 + at.word;
    bytes[shared * 4 + at.number] = (fkv_u8)rest;
#endif
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
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) x[i] = fkv_row_number(q, from + lane + 32 * (fkv_u32)i) * scale;
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
    for (int i = 0; i < FKV_LANE_CHANNELS; i++) x[i] *= fkv_rotation_norm();
#endif
    const int n = FKV_LANE_CHANNELS / (FKV_N_SLABS * FKV_K_GROUPS); /* numbers of a lane in one group */
    FKV_UNROLL
    for (int g = 0; g < FKV_N_SLABS * FKV_K_GROUPS; g++) {
        fkv_u32 largest = 0; /* as bits, so that what is not a number is the largest */
        float sum = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < n; i++) {
            largest = fkv_max_bits(largest, fkv_bits_of(x[g * n + i]) & 0x7fffffffu);
            sum += x[g * n + i];
        }
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) {
            largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
            sum += fkv_shuffle_xor(sum, h);
        }
        /* 16 bits: a power of two that brings the largest below 2^11; else the largest becomes 126 * 65536 */
        bool number = largest < 0x7f800000u;
        float most = fkv_float_of(largest);
#if FKV_K_BITS == 16
        fkv_u32 exponent = largest >> 23 > 20 ? (largest >> 23 < 250 ? largest >> 23 : 250) : 20;
        float step = fkv_float_of((exponent - 10) << 23);
#else
        float step = most > 1e-30f ? most * (1.0f / 8257536.0f) : 0.0f;
#endif
        float inverse = number && step > 0.0f ? 1.0f / step : 0.0f;
        FKV_UNROLL
        for (int i = 0; i < n; i++)
            fkv_put_query(queries, row, lane + 32 * (fkv_u32)(g * n + i), number ? x[g * n + i] * inverse : 0.0f);
        if (lane == 0) {
            steps[row * (FKV_N_SLABS * FKV_K_GROUPS) + (fkv_u32)g] = number ? step : fkv_float_of(0x7fc00000u);
            sums[row * (FKV_N_SLABS * FKV_K_GROUPS) + (fkv_u32)g] = sum;
        }
    }
}

/* ---- scores ---- */

/* score[nt][j] of a thread: row 4 nt + c, token NJ r + j; this slab's part of it. */
FKV_FN void fkv_tile_scores(const fkv_tile_k *k, FKV_SHARED const fkv_u32 *operands, const float (*step)[FKV_K_GROUPS],
                            const float (*sum)[FKV_K_GROUPS], fkv_u32 lane, float (*score)[FKV_NJ]) {
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) score[nt][j] = 0.0f;
    }
    FKV_UNROLL
    for (int g = 0; g < FKV_K_GROUPS; g++) {
#if FKV_K_BITS == 16
        float products[FKV_NJ / 2][FKV_NQ][4];
#else
        int products[FKV_NJ / 2][FKV_NQ][4];
#endif
        FKV_UNROLL
        for (int i = 0; i < FKV_NJ / 2 * FKV_NQ * 4; i++) products[i / (4 * FKV_NQ)][i / 4 % FKV_NQ][i % 4] = 0;
        FKV_UNROLL
        for (int s = 0; s < FKV_K_GROUP_UNITS * FKV_K_UNIT_STEPS; s++) {
            int unit = g * FKV_K_GROUP_UNITS + s / FKV_K_UNIT_STEPS;
            int step_of_slab = g * (FKV_K_STEPS / FKV_K_GROUPS) + s;
            fkv_u32 a[FKV_NJ / 2][4];
            FKV_UNROLL
            for (int i = 0; i < FKV_NJ / 2; i++) {
                fkv_k_operand(k->codes[2 * i][unit], s % FKV_K_UNIT_STEPS, &a[i][0], &a[i][2]);
                fkv_k_operand(k->codes[2 * i + 1][unit], s % FKV_K_UNIT_STEPS, &a[i][1], &a[i][3]);
            }
            FKV_UNROLL
            for (int n = 0; n < FKV_NQ; n++) {
                FKV_SHARED const fkv_words2 *pair =
                    (FKV_SHARED const fkv_words2 *)(operands + ((fkv_u32)(n * FKV_K_STEPS + step_of_slab) * 32 + lane) * 2);
                fkv_words2 b = *pair;
                FKV_UNROLL
                for (int i = 0; i < FKV_NJ / 2; i++) {
#if FKV_K_BITS < 16
                    fkv_mma_bytes(products[i][n], a[i], b.w[0], b.w[1]);
#elif FKV_PAGE_BF16
                    fkv_mma_bf16(products[i][n], a[i], b.w[0], b.w[1]);
#else
                    fkv_mma_f16(products[i][n], a[i], b.w[0], b.w[1]);
#endif
                }
            }
        }
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) {
#if FKV_K_BITS < 16
            float scale = fkv_scale_at(k->scales, j, g, FKV_K_GROUPS);
            float bias = fkv_scale_at(k->biases, j, g, FKV_K_GROUPS);
#endif
            FKV_UNROLL
            for (int nt = 0; nt < FKV_NT; nt++) {
#if FKV_K_BITS == 16
                score[nt][j] = (products[j / 2][nt][j % 2 * 2] + products[j / 2][nt][j % 2 * 2 + 1]) * step[nt][g];
#else
                int most = products[j / 2][nt][j % 2 * 2] * 256 + products[j / 2][nt][j % 2 * 2 + 1];
                int rest = products[j / 2][FKV_NT + nt / 2][j % 2 * 2 + nt % 2];
                float whole = fkv_fma((float)most, 256.0f, (float)rest);
                score[nt][j] = fkv_fma(whole * step[nt][g], scale, score[nt][j]);
                score[nt][j] = fkv_fma(sum[nt][g], bias, score[nt][j]);
#endif
            }
        }
    }
    (void)sum;
}

/* cap * tanh(x), in powers of two; the score came divided by cap. */
FKV_FN float fkv_capped(float x) {
    float e = fkv_exp2(x * 2.88539008f); /* e^2x */
    return fkv_float_of(FKV_SOFTCAP_BITS) * 1.44269504f * (1.0f - 2.0f / (e + 1.0f));
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
        to[2 * i] = fkv_fma_f16x2((y & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe408e408u);     /* 1024 + code, - 1032 */
        to[2 * i + 1] = fkv_fma_f16x2((y & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u); /* / 16, - 72 */
    }
#else
    fkv_u32 x = fkv_permute(a[quad / 4], b[quad / 4], quad % 4 < 2 ? 0x5410u : 0x7632u) >> 8 * (quad % 2);
    to[0] = fkv_fma_f16x2((x & 0x00030003u) | 0x64006400u, 0x3c003c00u, 0xe402e402u); /* 1024 + code, - 1026 */
    to[1] = fkv_fma_f16x2((x & 0x000c000cu) | 0x64006400u, 0x34003400u, 0xdc08dc08u); /* / 4, - 258 */
    to[2] = fkv_fma_f16x2((x & 0x00300030u) | 0x64006400u, 0x2c002c00u, 0xd420d420u); /* / 16, - 66 */
    to[3] = fkv_fma_f16x2((x & 0x00c000c0u) | 0x64006400u, 0x24002400u, 0xcc80cc80u); /* / 64, - 18 */
#endif
}
#define FKV_V_MIDDLE (FKV_V_BITS == 8 ? 128.0f : FKV_V_BITS == 4 ? 8.0f : 2.0f)

FKV_FN void fkv_tile_values(const fkv_tile_v *v, const fkv_u32 (*weights)[FKV_NJ], float (*sums)[FKV_NV][4]) {
    FKV_UNROLL
    for (int depth = 0; depth < FKV_NJ / 2; depth++) {
        FKV_UNROLL
        for (int u = 0; u < FKV_V_UNITS; u++) {
            FKV_UNROLL
            for (int quad = 0; quad < FKV_V_QUADS; quad++) {
                fkv_u32 near[4];
                fkv_u32 far[4];
                fkv_v_quad(v->codes[0][2 * depth][u], v->codes[1][2 * depth][u], quad, near);
                fkv_v_quad(v->codes[0][2 * depth + 1][u], v->codes[1][2 * depth + 1][u], quad, far);
                FKV_UNROLL
                for (int t = 0; t < 2; t++) {
                    fkv_u32 a[4] = {near[2 * t], near[2 * t + 1], far[2 * t], far[2 * t + 1]};
                    int tile = (u * FKV_V_QUADS + quad) * 2 + t;
                    int group = FKV_V_BITS == 16 ? 0 : u;
                    FKV_UNROLL
                    for (int n = 0; n < FKV_NV; n++) {
#if FKV_NT == 1
                        const fkv_u32 *b = weights[group / 2];
#else
                        const fkv_u32 *b = weights[group * FKV_NV + n];
#endif
#if FKV_V_PLAIN_BF16
                        fkv_mma_bf16(sums[tile][n], a, b[2 * depth], b[2 * depth + 1]);
#if FKV_NT > 1
                        b = weights[FKV_NV + n];
                        fkv_mma_bf16(sums[tile][n], a, b[2 * depth], b[2 * depth + 1]);
#endif
#else
                        fkv_mma_f16(sums[tile][n], a, b[2 * depth], b[2 * depth + 1]);
#endif
                    }
                }
            }
        }
    }
}

/* p of a thread's tokens and rows, times the scales, as B operands. */
FKV_FN void fkv_tile_weights(const fkv_tile_v *v, const float (*p)[FKV_NJ], const fkv_u32 *exponent, const bool *dead,
                             fkv_u32 (*weights)[FKV_NJ]) {
    float unit[FKV_NT];
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) unit[nt] = fkv_float_of((268u - exponent[nt]) << 23);
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++) {
        float scale[FKV_V_GROUPS + 1];
        FKV_UNROLL
        for (int g = 0; g < FKV_V_GROUPS; g++)
            scale[g] = FKV_V_BITS == 16 ? 1.0f : dead[j] ? 0.0f : fkv_scale_at(v->scales, j, g, FKV_V_GROUPS);
        scale[FKV_V_GROUPS] = 0.0f;
        FKV_UNROLL
        for (int o = 0; o < FKV_V_OPERANDS; o++) {
            fkv_u32 pair;
#if FKV_V_PLAIN_BF16 && FKV_NT == 1
            float most = fkv_float_of(fkv_bf16_bits(p[0][j]) << 16);
            pair = fkv_pack_bf16(most, p[0][j] - most);
#elif FKV_V_PLAIN_BF16
            int n = o % FKV_NV;
            float x = p[2 * n][j];
            float y = p[2 * n + 1][j];
            float most_x = fkv_float_of(fkv_bf16_bits(x) << 16);
            float most_y = fkv_float_of(fkv_bf16_bits(y) << 16);
            pair = o < FKV_NV ? fkv_pack_bf16(most_x, most_y) : fkv_pack_bf16(x - most_x, y - most_y);
#elif FKV_NT == 1
            float x = p[0][j] * unit[0];
            pair = fkv_pack_f16(x * scale[2 * o], x * scale[2 * o + 1]);
#else
            int n = o % FKV_NV;
            pair = fkv_pack_f16(p[2 * n][j] * unit[2 * n] * scale[o / FKV_NV],
                                p[2 * n + 1][j] * unit[2 * n + 1] * scale[o / FKV_NV]);
#endif
            weights[o][j] = fkv_transpose_f16(pair);
        }
    }
    (void)unit;
}

/* ---- a tile ---- */

/* What the rows of a thread see, and where. */
struct fkv_sight {
    fkv_u32 position[FKV_NT]; /* of each row's query */
    fkv_u32 first;            /* of the item's queries */
    fkv_u32 last;
};

FKV_FN bool fkv_sees(fkv_u32 position, fkv_u32 token) {
#if FKV_WINDOW == 0
    return token <= position;
#else
    return token <= position && (token + 1 < FKV_SINKS + 1 || position - token < FKV_WINDOW);
#endif
}

/* Softmax of a tile, and p v added. token: position of the thread's first token, base: of the tile's. */
FKV_FN void fkv_tile_fold(fkv_tile_v *v, float (*score)[FKV_NJ], const fkv_sight *sight, fkv_u32 base, fkv_u32 lane,
                          fkv_decode_state *state) {
    bool dead[FKV_NJ]; /* behind the last query: whatever bytes are there */
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++) dead[j] = false;
    fkv_u32 token = base + FKV_NJ * (lane / 4);
    fkv_u32 end = base + FKV_TILE;
    bool whole = end <= sight->first + 1;
#if FKV_WINDOW != 0
    whole = whole && (end <= FKV_SINKS || sight->last - base < FKV_WINDOW);
#endif

    fkv_u32 largest_scale[FKV_NJ];
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++) {
        largest_scale[j] = 0;
#if FKV_V_BITS < 16
        FKV_UNROLL
        for (int g = 0; g < FKV_V_GROUPS; g++)
            largest_scale[j] =
                fkv_max_bits(largest_scale[j], fkv_bits_of(fkv_scale_at(v->scales, j, g, FKV_V_GROUPS)) & 0x7fffffffu);
#endif
    }
    float largest[FKV_NT];
    fkv_u32 exponent[FKV_NT];
    bool grows = false;
    if (!whole) {
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) dead[j] = token + (fkv_u32)j > sight->last;
#if FKV_V_BITS == 16
        FKV_UNROLL
        for (int i = 0; i < 2 * FKV_NJ; i++) {
            bool behind = base + 2 * FKV_NJ * (lane % 4) + (fkv_u32)i > sight->last;
            FKV_UNROLL
            for (int w = 0; w < FKV_V_UNITS * FKV_V_WORDS; w++)
                v->codes[i / FKV_NJ][i % FKV_NJ][w / FKV_V_WORDS][w % FKV_V_WORDS] =
                    behind ? 0u : v->codes[i / FKV_NJ][i % FKV_NJ][w / FKV_V_WORDS][w % FKV_V_WORDS];
        }
#endif
    }
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        largest[nt] = state->max[nt];
        exponent[nt] = 0;
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) {
#if FKV_SOFTCAP_BITS != 0
            score[nt][j] = fkv_capped(score[nt][j]);
#endif
            bool seen = whole || fkv_sees(sight->position[nt], token + (fkv_u32)j);
            score[nt][j] = seen ? score[nt][j] : FKV_MINUS_INFINITY;
            largest[nt] = fkv_max(largest[nt], score[nt][j]);
            exponent[nt] = fkv_max_bits(exponent[nt], seen ? largest_scale[j] : 0u);
        }
        exponent[nt] = fkv_max_bits(exponent[nt] >> 23, state->exponent[nt]);
        grows = grows || largest[nt] > state->max[nt] || exponent[nt] > state->exponent[nt];
    }

    if (fkv_any(grows)) {
        FKV_UNROLL
        for (int nt = 0; nt < FKV_NT; nt++) {
            FKV_UNROLL
            for (fkv_u32 h = 4; h < 32; h *= 2) {
                largest[nt] = fkv_max(largest[nt], fkv_shuffle_xor(largest[nt], h));
                exponent[nt] = fkv_max_bits(exponent[nt], fkv_shuffle_xor_bits(exponent[nt], h));
            }
            float shrink = state->max[nt] == largest[nt] ? 1.0f : fkv_exp2(state->max[nt] - largest[nt]);
            fkv_u32 steps = exponent[nt] - state->exponent[nt];
            float factor = shrink * fkv_float_of((steps < 127 ? 127 - steps : 0) << 23);
            state->max[nt] = largest[nt];
            state->exponent[nt] = exponent[nt] < 255 ? exponent[nt] : 254;
            /* a scale that is no number: every answer of the row is none */
            state->total[nt] = exponent[nt] < 255 ? state->total[nt] * shrink : fkv_float_of(0x7fc00000u);
            FKV_UNROLL
            for (int g = 0; g < (FKV_V_BITS == 16 ? 1 : FKV_V_GROUPS); g++) state->bias[nt][g] *= shrink;
            FKV_UNROLL
            for (int t = 0; t < FKV_V_TILES; t++) {
#if FKV_NT == 1
                FKV_UNROLL
                for (int i = 0; i < 4; i++) state->sums[t][0][i] *= factor;
#else
                state->sums[t][nt / 2][nt % 2] *= factor;
                state->sums[t][nt / 2][nt % 2 + 2] *= factor;
#endif
            }
        }
    }

    float p[FKV_NT][FKV_NJ];
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        float max = state->max[nt] == FKV_MINUS_INFINITY ? 0.0f : state->max[nt];
        FKV_UNROLL
        for (int j = 0; j < FKV_NJ; j++) {
            p[nt][j] = fkv_exp2(score[nt][j] - max);
            state->total[nt] += p[nt][j];
        }
    }
#if FKV_V_BITS < 16
    FKV_UNROLL
    for (int j = 0; j < FKV_NJ; j++) {
        FKV_UNROLL
        for (int g = 0; g < FKV_V_GROUPS; g++) {
            float middle =
                fkv_fma(fkv_scale_at(v->scales, j, g, FKV_V_GROUPS), FKV_V_MIDDLE, fkv_scale_at(v->biases, j, g, FKV_V_GROUPS));
            middle = dead[j] ? 0.0f : middle;
            FKV_UNROLL
            for (int nt = 0; nt < FKV_NT; nt++) state->bias[nt][g] = fkv_fma(p[nt][j], middle, state->bias[nt][g]);
        }
    }
#endif
    fkv_u32 weights[FKV_V_OPERANDS][FKV_NJ];
    fkv_tile_weights(v, p, state->exponent, dead, weights);
    fkv_tile_values(v, weights, state->sums);
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
FKV_FN void fkv_add_slabs(FKV_SHARED float *exchange, fkv_u32 stream, fkv_u32 slab, fkv_u32 lane, float (*score)[FKV_NJ]) {
    FKV_SHARED float *own = exchange + (stream * FKV_N_SLABS + slab) * (FKV_NT * FKV_NJ * 32) + lane;
    FKV_SHARED const float *all = exchange + stream * FKV_N_SLABS * (FKV_NT * FKV_NJ * 32) + lane;
    FKV_UNROLL
    for (int i = 0; i < FKV_NT * FKV_NJ; i++) own[i * 32] = score[i / FKV_NJ][i % FKV_NJ];
    fkv_sync_team(1 + stream, 32 * FKV_N_SLABS);
    FKV_UNROLL
    for (int i = 0; i < FKV_NT * FKV_NJ; i++) {
        float sum = all[i * 32];
        FKV_UNROLL
        for (int s = 1; s < FKV_N_SLABS; s++) sum += all[(s * FKV_NT * FKV_NJ + i) * 32];
        score[i / FKV_NJ][i % FKV_NJ] = sum;
    }
}

/* The streams' sums into one, from the first to the last; max and total of the piece stay in stats: [streams, rows, 2]. */
FKV_FN void fkv_fold_streams(fkv_decode_state *state, fkv_u32 stream, fkv_u32 slab, fkv_u32 lane, FKV_SHARED float *stats,
                             FKV_SHARED float *sums) {
    fkv_u32 r = lane / 4;
    fkv_u32 c = lane % 4;
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        FKV_UNROLL
        for (fkv_u32 h = 4; h < 32; h *= 2) {
            state->total[nt] += fkv_shuffle_xor(state->total[nt], h);
#if FKV_V_BITS < 16
            FKV_UNROLL
            for (int g = 0; g < FKV_V_GROUPS; g++) state->bias[nt][g] += fkv_shuffle_xor(state->bias[nt][g], h);
#endif
        }
        if (slab == 0 && r == 0) {
            stats[(stream * FKV_ITEM_ROWS + 4 * (fkv_u32)nt + c) * 2] = state->max[nt];
            stats[(stream * FKV_ITEM_ROWS + 4 * (fkv_u32)nt + c) * 2 + 1] = state->total[nt];
        }
    }
    fkv_sync(); /* also: nobody exchanges scores any more */
    float factor[FKV_NT];
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        float max = FKV_MINUS_INFINITY;
        FKV_UNROLL
        for (int s = 0; s < FKV_STREAMS; s++) max = fkv_max(max, stats[((fkv_u32)s * FKV_ITEM_ROWS + 4 * (fkv_u32)nt + c) * 2]);
        factor[nt] = state->max[nt] == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(state->max[nt] - max);
    }
    FKV_UNROLL
    for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
        if (s == stream) {
            FKV_UNROLL
            for (int t = 0; t < FKV_V_TILES; t++) {
                int unit = t / (2 * FKV_V_QUADS);
                fkv_u32 channel =
                    slab * FKV_SLAB + (fkv_u32)unit * FKV_V_SPAN + r * (FKV_V_SPAN / 8) + (fkv_u32)(t % (2 * FKV_V_QUADS)) * 2;
                FKV_UNROLL
                for (int nt = 0; nt < FKV_NT; nt++) {
                    FKV_SHARED float *to = sums + (4 * (fkv_u32)nt + c) * FKV_D + channel;
                    float back = FKV_V_PLAIN_BF16 ? 1.0f : fkv_float_of((state->exponent[nt] - 14) << 23);
                    FKV_UNROLL
                    for (int i = 0; i < 2; i++) {
                        const float *at = state->sums[t][nt / 2] + 2 * i;
#if FKV_NT == 1 && FKV_V_PLAIN_BF16
                        float x = at[0] + at[1];
#elif FKV_NT == 1
                        float x = at[FKV_V_BITS == 16 ? 0 : unit % 2];
#else
                        float x = at[nt % 2];
#endif
                        x = fkv_fma(x, back, state->bias[nt][FKV_V_BITS == 16 ? 0 : unit]) * factor[nt];
                        to[i] = s == 0 ? x : to[i] + x;
                    }
                }
            }
        }
        fkv_sync();
    }
}

/* q: [T, H, D]; parts: out [pieces, G, rows, D], then {max, total} [pieces, G, rows, 2], where rows = R * queries of an item. The
 * max is of scores in powers of two. Blocks: pieces * chunks of rows, G. */
FKV_FN void fkv_attend_decode(fkv_place place, FKV_SHARED fkv_u32 *shared, const void *q, const void *pool, const fkv_u32 *table,
                              float *parts) {
    fkv_u32 lane = place.thread % 32;
    fkv_u32 warp = place.thread / 32;
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
    fkv_u32 page = 0;
    if (stream < n_tiles) {
        const fkv_u8 *block = walk.blocks + fkv_tile_page(&walk, stream) * stride;
        fkv_load_k(&k, block, stream * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        fkv_load_v(&v, block, stream * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        if (stream + FKV_STREAMS < n_tiles) page = fkv_tile_page(&walk, stream + FKV_STREAMS);
    }

    FKV_SHARED fkv_u32 *queries = shared;
    FKV_SHARED float *steps = (FKV_SHARED float *)(queries + FKV_SHARED_QUERIES);
    FKV_SHARED float *query_sums = steps + FKV_SHARED_STEPS;
    FKV_SHARED float *stats = query_sums + FKV_SHARED_STEPS;
    FKV_SHARED float *rest = stats + 2 * FKV_STREAMS * FKV_ITEM_ROWS; /* exchanged scores, then sums */
    for (fkv_u32 i = place.thread; i < FKV_SHARED_QUERIES + 2 * FKV_SHARED_STEPS; i += FKV_DECODE_THREADS) shared[i] = 0;
    fkv_sync();
    for (fkv_u32 row = warp; row < n_rows; row += FKV_DECODE_THREADS / 32) {
        fkv_u32 query = (first_row + row) / FKV_R;
        fkv_u32 head = place.y * FKV_R + (first_row + row) % FKV_R;
        fkv_u64 from = ((fkv_u64)(piece[FKV_PIECE_FIRST_TOKEN] + query) * FKV_H + head) * FKV_D;
        fkv_prepare_row(q, from, row, queries, steps, query_sums, lane);
    }
    fkv_sync();

    float step[FKV_NT][FKV_K_GROUPS];
    float query_sum[FKV_NT][FKV_K_GROUPS];
    fkv_sight sight;
    sight.first = piece[FKV_PIECE_POSITION];
    sight.last = sight.first + piece[FKV_PIECE_N_QUERIES] - 1;
    fkv_decode_state state;
    FKV_UNROLL
    for (int nt = 0; nt < FKV_NT; nt++) {
        fkv_u32 row = 4 * (fkv_u32)nt + lane % 4;
        FKV_UNROLL
        for (int g = 0; g < FKV_K_GROUPS; g++) {
            step[nt][g] = steps[(row * FKV_N_SLABS + slab) * FKV_K_GROUPS + (fkv_u32)g];
            query_sum[nt][g] = query_sums[(row * FKV_N_SLABS + slab) * FKV_K_GROUPS + (fkv_u32)g];
        }
        sight.position[nt] = sight.first + (first_row + (row < n_rows ? row : 0)) / FKV_R;
        state.max[nt] = FKV_MINUS_INFINITY;
        state.total[nt] = 0.0f;
        state.exponent[nt] = FKV_V_BITS == 16 ? 127 : 30;
        FKV_UNROLL
        for (int g = 0; g < (FKV_V_BITS == 16 ? 1 : FKV_V_GROUPS); g++) state.bias[nt][g] = 0.0f;
    }
    FKV_UNROLL
    for (int i = 0; i < FKV_V_TILES * FKV_NV * 4; i++) state.sums[i / (4 * FKV_NV)][i / 4 % FKV_NV][i % 4] = 0.0f;

    FKV_SHARED const fkv_u32 *operands = queries + slab * (FKV_NQ * FKV_K_STEPS * 64);
    fkv_u32 turn = 0;
    for (fkv_u32 tile = stream; tile < n_tiles; tile += FKV_STREAMS) {
        fkv_u32 next = tile + FKV_STREAMS;
        const fkv_u8 *block = walk.blocks + page * stride; /* of the next tile */
        float score[FKV_NT][FKV_NJ];
        fkv_tile_scores(&k, operands, step, query_sum, lane, score);
        if (next < n_tiles) {
            fkv_load_k(&k, block, next * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
            if (next + FKV_STREAMS < n_tiles) page = fkv_tile_page(&walk, next + FKV_STREAMS);
        }
#if FKV_N_SLABS > 1
        fkv_add_slabs(rest + turn % 2 * (FKV_SHARED_EXCHANGE / 2), stream, slab, lane, score);
#endif
        fkv_u32 base = fkv_tile_logical(&walk, tile) * FKV_PAGE_TOKENS + tile * FKV_TILE % FKV_PAGE_TOKENS;
        fkv_tile_fold(&v, score, &sight, base, lane, &state);
        if (next < n_tiles) fkv_load_v(&v, block, next * FKV_TILE % FKV_PAGE_TOKENS, slab, lane);
        turn++;
    }

    fkv_fold_streams(&state, stream, slab, lane, stats, rest);
    fkv_u64 first = ((fkv_u64)number * FKV_G + place.y) * all_rows + first_row;
    for (fkv_u32 i = place.thread; i < n_rows * FKV_D; i += FKV_DECODE_THREADS) parts[first * FKV_D + i] = rest[i];
    if (place.thread < n_rows) {
        float max = FKV_MINUS_INFINITY;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) max = fkv_max(max, stats[(s * FKV_ITEM_ROWS + place.thread) * 2]);
        float total = 0.0f;
        for (fkv_u32 s = 0; s < FKV_STREAMS; s++) {
            float own = stats[(s * FKV_ITEM_ROWS + place.thread) * 2];
            total = fkv_fma(own == FKV_MINUS_INFINITY ? 0.0f : fkv_exp2(own - max),
                            stats[(s * FKV_ITEM_ROWS + place.thread) * 2 + 1], total);
        }
        float *to = parts + (fkv_u64)table[FKV_STEP_N_PIECES] * FKV_G * all_rows * FKV_D + (first + place.thread) * 2;
        to[0] = max;
        to[1] = total;
    }
}
