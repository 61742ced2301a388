/* Seals the pages that a step has filled: re-encodes the rows of their open blocks in the sealed layout. The results are
 * bit-identical to those of src/codec/seal.c, which explains the arithmetic. docs/page_format.md defines the layout. Functions in
 * namespace `opened` read the open block.
 *
 * Grid: (pages to seal, G, 2), where z selects K or V; each block has FKV_SEAL_THREADS threads. The block first computes the
 * parameters of each K channel or V row. Each thread then reads the values a second time and builds complete dwords of codes.
 */
/* Size of a block's shared memory, in floats. For K, it contains {bias, 1 / scale} of each channel, and the magnitude or the
 * outlier flag of each row. For V, it contains 128 / norm of each row. */
#define FKV_SEAL_SHARED (2 * FKV_D + FKV_PAGE_TOKENS)
#define FKV_SEAL_OUTLIER 1024.0f /* see FKV_SEALED_OUTLIER in src/codec/sealed.h */
#define FKV_SEAL_OUTLIER_RATIO 64.0f
#define FKV_SEAL_SMALLEST fkv_float_of(0x0d800000u) /* 2^-100 */

FKV_FN fkv_u32 fkv_seal_bits(float x) {
    fkv_u32 bits = fkv_page_bits(x);
    return fkv_abs(fkv_page_value(bits)) < FKV_SEAL_SMALLEST ? 0u : bits;
}

/* Returns the bit offset of the e-th code within its dword. */
FKV_FN fkv_u32 fkv_seal_shift(fkv_u32 e, fkv_u32 bits) { return 8 * (e % 4) + bits * (e / 4); }

/* Location of one dword of codes. `block` is the block of 16 tokens, and `lane` the index of the dword within its line of 16
 * dwords. Lane i stores the codes of token i (K), or of channels i, i + 16, ... (V). */
struct fkv_seal_dword {
    fkv_u32 block;
    fkv_u32 lane;
    fkv_u32 first; /* index of the first code of the dword among the codes of its lane */
    fkv_u32 bits;  /* bits per code in the plane that contains this dword */
    fkv_u32 from;  /* index of the lowest code bit that the plane stores */
};

FKV_FN fkv_seal_dword fkv_seal_dword_at(fkv_u32 i, fkv_u32 code_bits, fkv_u32 row_bytes) {
    fkv_u32 line = i / 16 % (row_bytes / 4);
    bool high = code_bits == 3 && line >= FKV_D / 16;
    fkv_seal_dword x;
    x.block = i / (row_bytes * 4);
    x.lane = i % 16;
    x.bits = high ? 1 : code_bits == 4 ? 4 : 2;
    x.from = high ? 2 : 0;
    x.first = (line - (high ? FKV_D / 16 : 0)) * (32 / x.bits);
    return x;
}

#if FKV_K_SEALED
FKV_FN float fkv_seal_key(FKV_DEVICE const fkv_u8 *open, fkv_u32 token, fkv_u32 d) {
    return fkv_storable(opened::fkv_k_at(open, token, d));
}

/* Rounds a scale to seven significant bits. */
FKV_FN fkv_u32 fkv_seal_scale(float x) {
    fkv_u32 bits = fkv_seal_bits(x);
    return FKV_PAGE_BF16 ? (bits + 1) & ~1u : (bits + 8) & ~15u;
}

/* Stores the minimum and maximum of each channel that this thread handles. If has_flags is true, rows with an outlier flag are
 * ignored. Returns true if the magnitude of any value exceeds FKV_SEAL_OUTLIER, so that its row may be an outlier. */
FKV_FN bool fkv_seal_ranges(fkv_u32 index, bool has_flags, FKV_SHARED const float *outlier, FKV_DEVICE const fkv_u8 *open,
                            FKV_SHARED float *lines) {
    bool large = false;
    for (fkv_u32 d = index; d < FKV_D; d += FKV_SEAL_THREADS) {
        float lo = fkv_float_of(0x7f800000u);
        float hi = -lo;
        FKV_UNROLL_8
        for (fkv_u32 t = 0; t < FKV_PAGE_TOKENS; t++) {
            if (has_flags && outlier[t] != 0.0f) continue;
            float x = fkv_seal_key(open, t, d);
            lo = x < lo ? x : lo;
            hi = x > hi ? x : hi;
        }
        lines[2 * d] = lo;
        lines[2 * d + 1] = hi;
        large = large || hi > FKV_SEAL_OUTLIER || lo < -FKV_SEAL_OUTLIER;
    }
    return large;
}

/* Recomputes the ranges of all channels, excluding the outlier rows. All threads of the block must call this function. */
FKV_FN void fkv_seal_outliers(fkv_u32 index, FKV_SHARED float *rows, FKV_DEVICE const fkv_u8 *open, FKV_SHARED float *lines) {
    bool outlier[(FKV_PAGE_TOKENS + FKV_SEAL_THREADS - 1) / FKV_SEAL_THREADS];
    for (fkv_u32 t = index; t < FKV_PAGE_TOKENS; t += FKV_SEAL_THREADS) {
        float largest = 0.0f;
        for (fkv_u32 d = 0; d < FKV_D; d++) {
            float x = fkv_abs(fkv_seal_key(open, t, d));
            largest = x > largest ? x : largest;
        }
        rows[t] = largest;
    }
    fkv_sync();
    for (fkv_u32 t = index; t < FKV_PAGE_TOKENS; t += FKV_SEAL_THREADS) {
        fkv_u32 smaller = 0;
        for (fkv_u32 s = 0; s < FKV_PAGE_TOKENS; s++) smaller += fkv_mul(rows[s], FKV_SEAL_OUTLIER_RATIO) < rows[t] ? 1u : 0u;
        outlier[t / FKV_SEAL_THREADS] = rows[t] > FKV_SEAL_OUTLIER && 2 * smaller >= FKV_PAGE_TOKENS;
    }
    fkv_sync();
    for (fkv_u32 t = index; t < FKV_PAGE_TOKENS; t += FKV_SEAL_THREADS) rows[t] = outlier[t / FKV_SEAL_THREADS] ? 1.0f : 0.0f;
    fkv_sync();
    fkv_seal_ranges(index, true, rows, open, lines);
#if FKV_CALIBRATED
    fkv_sync(); /* with a channel order, fkv_seal_keys() reads ranges that other threads have stored */
#endif
}

/* Returns the largest code of the channel at position p. */
FKV_FN float fkv_seal_bins(fkv_u32 p FKV_ORDER) {
#if FKV_CALIBRATED
    return (float)((4u << 2 * ((p < order[0] ? 1u : 0u) + (p < order[1] ? 1u : 0u))) - 1u);
#else
    return (float)((1 << FKV_K_BITS) - 1);
#endif
}

FKV_FN fkv_u32 fkv_seal_code(float x, FKV_SHARED const float *line, float bins) {
    return (fkv_u32)fkv_nearest_code(fkv_mul(fkv_sub(x, line[0]), line[1]), bins);
}

#if FKV_CALIBRATED
/* Builds the dwords of calibrated codes. A dword stores 16 digits of 2 bits. */
FKV_FN void fkv_seal_key_codes(fkv_u32 index, FKV_SHARED const float *lines, FKV_DEVICE const fkv_u8 *open,
                               FKV_DEVICE fkv_u32 *codes FKV_ORDER) {
    for (fkv_u32 i = index; i < FKV_PAGE_TOKENS * FKV_K_ROW_BYTES / 4; i += FKV_SEAL_THREADS) {
        fkv_seal_dword at = fkv_seal_dword_at(i, 2, FKV_K_ROW_BYTES);
        fkv_u32 word = 0;
        for (fkv_u32 e = 0; e < 16; e++) {
            fkv_u32 digit = at.first + e < FKV_D ? 0u : at.first + e < FKV_D + order[0] ? 1u : 2u;
            fkv_u32 p = at.first + e - (digit == 0 ? 0u : digit == 1 ? FKV_D : FKV_D + order[0]);
            if (digit == 2 && p >= order[1]) break; /* padding */
            fkv_u32 d = FKV_CHANNEL_AT(p);
            fkv_u32 code =
                fkv_seal_code(fkv_seal_key(open, at.block * 16 + at.lane, d), lines + 2 * d, fkv_seal_bins(p FKV_ORDER_GIVEN));
            word |= (code >> 2 * digit & 3u) << fkv_seal_shift(e, 2);
        }
        codes[i] = word;
    }
}
#else
FKV_FN void fkv_seal_key_codes(fkv_u32 index, FKV_SHARED const float *lines, FKV_DEVICE const fkv_u8 *open,
                               FKV_DEVICE fkv_u32 *codes) {
    for (fkv_u32 i = index; i < FKV_PAGE_TOKENS * FKV_K_ROW_BYTES / 4; i += FKV_SEAL_THREADS) {
        fkv_seal_dword at = fkv_seal_dword_at(i, FKV_K_BITS, FKV_K_ROW_BYTES);
        fkv_u32 word = 0;
        for (fkv_u32 e = 0; e < 32 / at.bits; e++) {
            fkv_u32 d = at.first + e;
            if (d >= FKV_D) break;
            fkv_u32 code = fkv_seal_code(fkv_seal_key(open, at.block * 16 + at.lane, d), lines + 2 * d, fkv_seal_bins(d));
            word |= (code >> at.from & ((1u << at.bits) - 1u)) << fkv_seal_shift(e, at.bits);
        }
        codes[i] = word;
    }
}
#endif

FKV_FN void fkv_seal_keys(fkv_u32 index, FKV_SHARED float *lines, FKV_DEVICE const fkv_u8 *open,
                          FKV_DEVICE fkv_u8 *block FKV_ORDER) {
    /* until rows are examined, rows[0] is a flag, which is 1 if there may be outlier rows */
    FKV_SHARED float *rows = lines + 2 * FKV_D;
    if (index == 0) rows[0] = 0.0f;
    fkv_sync();
    if (fkv_seal_ranges(index, false, rows, open, lines)) rows[0] = 1.0f;
    fkv_sync();
    bool large = rows[0] != 0.0f;
    fkv_sync();
    if (large) fkv_seal_outliers(index, rows, open, lines);
    for (fkv_u32 p = index; p < FKV_D; p += FKV_SEAL_THREADS) {
        fkv_u32 d = FKV_CHANNEL_AT(p);
        fkv_u32 scale = fkv_seal_scale(fkv_div(fkv_sub(lines[2 * d + 1], lines[2 * d]), fkv_seal_bins(p FKV_ORDER_GIVEN)));
        /* adding +0 turns -0 into +0; otherwise, the sign of a zero minimum would depend on the order of comparisons */
        fkv_u32 bias = fkv_page_bits(fkv_add(lines[2 * d], 0.0f));
        ((FKV_DEVICE fkv_u16 *)(block + FKV_K_SCALES))[p] = (fkv_u16)scale;
        ((FKV_DEVICE fkv_u16 *)(block + FKV_K_BIASES))[p] = (fkv_u16)bias;
        lines[2 * d] = fkv_page_value(bias);
        lines[2 * d + 1] = scale == 0 ? 0.0f : fkv_div(1.0f, fkv_page_value(scale));
    }
    fkv_sync();
    fkv_seal_key_codes(index, lines, open, (FKV_DEVICE fkv_u32 *)(block + FKV_K_CODES) FKV_ORDER_GIVEN);
}
#endif

FKV_FN float fkv_seal_value(FKV_DEVICE const fkv_u8 *open, fkv_u32 token, fkv_u32 d) {
    return fkv_storable(opened::fkv_v_at(open, token, d));
}

#if FKV_V_SEALED
FKV_FN float fkv_seal_inverse(float norm) { return norm < FKV_SEAL_SMALLEST ? 0.0f : fkv_div(128.0f, norm); }

FKV_FN fkv_u32 fkv_seal_size(float y, float inverse) {
    const float above[] = {FKV_V_ABOVE};
    float m = fkv_nearest_code(fkv_mul(fkv_abs(y), inverse), 127.0f);
    fkv_u32 size = 0;
    for (fkv_u32 i = 0; i + 1 < 1u << (FKV_V_BITS - 1); i++) size += m > above[i] ? 1u : 0u;
    return size;
}

/* Returns the norm of a row. Called by one warp. As in src/codec/seal.c, channel j is added to partial sum j % 16. Lane i holds
 * partial sum i and therefore also adds the channels of lane i + 16. */
FKV_FN float fkv_seal_norm(FKV_LOCAL const float *y, fkv_u32 lane) {
    float sum = 0.0f;
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) {
        float size = fkv_abs(y[i]);
        sum = fkv_add(fkv_add(sum, size), fkv_shuffle_xor(size, 16));
    }
    float norm = fkv_mul(fkv_div(fkv_sum_of_16(sum), (float)FKV_D), fkv_float_of(FKV_V_START_BITS));
    for (int refit = 0; refit < 2; refit++) {
        float inverse = fkv_seal_inverse(norm);
        float products = 0.0f;
        float squares = 0.0f; /* the squares of levels are integers, so their sum is exact */
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) {
            bool there = lane + 32 * (fkv_u32)i < FKV_D;
            float level = there ? fkv_v_level(fkv_seal_size(y[i], inverse)) : 0.0f;
            float product = fkv_mul(fkv_abs(y[i]), level);
            float square = fkv_mul(level, level);
            products = fkv_add(fkv_add(products, product), fkv_shuffle_xor(product, 16));
            squares = fkv_add(fkv_add(squares, square), fkv_shuffle_xor(square, 16));
        }
        norm = fkv_div(fkv_mul(128.0f, fkv_sum_of_16(products)), fkv_sum_of_16(squares));
    }
    return norm < FKV_STORABLE_LIMIT ? norm : FKV_STORABLE_LIMIT;
}

FKV_FN void fkv_seal_values(fkv_u32 index, FKV_SHARED float *inverses, FKV_DEVICE const fkv_u8 *open, FKV_DEVICE fkv_u8 *block) {
    for (fkv_u32 t = index / 32; t < FKV_PAGE_TOKENS; t += FKV_SEAL_THREADS / 32) {
        float y[FKV_WRITE_VALUES];
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) {
            fkv_u32 d = index % 32 + 32 * (fkv_u32)i;
            y[i] = d < FKV_D ? fkv_seal_value(open, t, d) : 0.0f;
        }
        fkv_u32 norm = fkv_seal_bits(fkv_seal_norm(y, index % 32));
        if (index % 32 == 0) {
            ((FKV_DEVICE fkv_u16 *)(block + FKV_V_SCALES))[t] = (fkv_u16)norm;
            inverses[t] = fkv_seal_inverse(fkv_page_value(norm));
        }
    }
    fkv_sync();
    FKV_DEVICE fkv_u32 *codes = (FKV_DEVICE fkv_u32 *)(block + FKV_V_CODES);
    for (fkv_u32 i = index; i < FKV_PAGE_TOKENS * FKV_V_ROW_BYTES / 4; i += FKV_SEAL_THREADS) {
        fkv_seal_dword at = fkv_seal_dword_at(i, FKV_V_BITS, FKV_V_ROW_BYTES);
        fkv_u32 word = 0;
        for (fkv_u32 e = 0; e < 32 / at.bits; e++) {
            fkv_u32 d = (at.first + e) / 16 * 16 + at.lane;
            fkv_u32 t = at.block * 16 + (at.first + e) % 16;
            if (d >= FKV_D) break;
            float y = fkv_seal_value(open, t, d);
            fkv_u32 code = fkv_seal_size(y, inverses[t]) | (y < 0.0f ? 1u << (FKV_V_BITS - 1) : 0u);
            word |= (code >> at.from & ((1u << at.bits) - 1u)) << fkv_seal_shift(e, at.bits);
        }
        codes[i] = word;
    }
}
#else
/* Seals V in layers whose V codec encodes single rows, by re-encoding each row with that codec. */
FKV_FN void fkv_seal_values(fkv_u32 index, FKV_SHARED float *, FKV_DEVICE const fkv_u8 *open, FKV_DEVICE fkv_u8 *block) {
    for (fkv_u32 t = index / 32; t < FKV_PAGE_TOKENS; t += FKV_SEAL_THREADS / 32) {
        float y[FKV_WRITE_VALUES];
        fkv_u32 signs[FKV_WRITE_VALUES];
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) {
            fkv_u32 d = index % 32 + 32 * (fkv_u32)i;
            y[i] = d < FKV_D ? fkv_seal_value(open, t, d) : 0.0f;
            signs[i] = 0;
        }
        fkv_write_row(y, signs, false, FKV_ROTATE_V != 0, FKV_V_BOOK ? 2 : 0, FKV_V_BITS, FKV_V_BOOK ? 32 : FKV_V_GROUP,
                      block + FKV_V_CODES + t * FKV_V_ROW_BYTES, block + FKV_V_SCALES + t * (FKV_D / FKV_V_GROUP * 2),
                      block + FKV_V_BIASES + t * (FKV_D / FKV_V_GROUP * 2), index % 32);
    }
}
#endif

/* Seals the pages listed in the step table. The kernel writes to the pool through a const pointer, because the framework passes
 * the pool as an input. The only purpose of the output `done` is to make the framework run later kernels after this one. */
FKV_FN void fkv_seal(fkv_place place, FKV_SHARED float *shared, FKV_DEVICE const void *open, FKV_DEVICE const void *pool,
                     FKV_DEVICE const fkv_u32 *table, FKV_DEVICE fkv_u32 *done FKV_ORDER) {
    FKV_DEVICE const fkv_u32 *seal = table + table[FKV_STEP_SEALS] + place.x * FKV_SEAL_WORDS;
    FKV_DEVICE const fkv_u8 *from =
        (FKV_DEVICE const fkv_u8 *)open + ((fkv_u64)seal[FKV_SEAL_FROM] * FKV_G + place.y) * FKV_OPEN_BLOCK_BYTES;
    FKV_DEVICE fkv_u8 *to = (FKV_DEVICE fkv_u8 *)pool + ((fkv_u64)seal[FKV_SEAL_TO] * FKV_G + place.y) * FKV_BLOCK_BYTES;
    if (place.z == 0)
        fkv_seal_keys(place.index, shared, from, to FKV_ORDER_GIVEN);
    else
        fkv_seal_values(place.index, shared, from, to);
    if (place.x == 0 && place.y == 0 && place.z == 0 && place.index == 0) done[0] = 1;
}
