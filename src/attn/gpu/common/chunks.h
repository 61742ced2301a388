/* Numbers of packed pages, several at a time: loaded as words when they are taken, unpacked when each is asked for, so that loads
 * are on their way while what was taken before is used. Floats are those that src/codec has, bit for bit.
 *
 * A shape says how many tokens side by side a chunk has (TOKENS) and how many channels of each (CHANNELS): number i is channel
 * i % CHANNELS of token i / CHANNELS. It is what one load gives of how a side's codes lie:
 *
 *   rows       16 channels of a token, all of one group
 *   sealed K   eight channels of a token: a dword; and of its neighbour, for the same scales
 *   sealed V   eight tokens of a channel: a dword; and of its neighbour, for the same norms
 *
 * fkv_k_shape and fkv_v_shape have 16 numbers. The plain loops have fkv_k_row_shape, of one token, and fkv_v_column_shape, of one
 * channel. This stands twice in the text of a sealed layer, for each form of its pages.
 */

/* ---- rows ---- */

template <int BITS, int GROUP, int CODES, int SCALES, int BIASES> struct fkv_row_shape {
    enum { TOKENS = 1, CHANNELS = 16 };
    struct chunk {
        fkv_u32 w[BITS / 2];
        fkv_u32 scale;
        fkv_u32 bias;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x = {};
        FKV_DEVICE const fkv_u32 *from = (FKV_DEVICE const fkv_u32 *)(block + CODES + slot * (FKV_D * BITS / 8) + d * BITS / 8);
        FKV_UNROLL
        for (int i = 0; i < BITS / 2; i++) x.w[i] = from[i];
        if (BITS != 16) {
            fkv_u32 group = slot * (FKV_D / GROUP) + d / GROUP;
            x.scale = ((FKV_DEVICE const fkv_u16 *)(block + SCALES))[group];
            x.bias = ((FKV_DEVICE const fkv_u16 *)(block + BIASES))[group];
        }
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        fkv_u32 code = x.w[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1u);
        if (BITS == 16) return fkv_page_number(code);
        return fkv_fma(fkv_page_number(x.scale), (float)code, fkv_page_number(x.bias));
    }
};

/* The same of a book's codes. Of 3 bits: a word of the low plane, 16 bits of the high one. */
template <int BITS, bool IS_K, int CODES, int SCALES> struct fkv_book_shape {
    enum { TOKENS = 1, CHANNELS = 16 };
    struct chunk {
        fkv_u32 w[2];
        fkv_u32 scale;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x = {};
        FKV_DEVICE const fkv_u8 *row = block + CODES + slot * (FKV_D * BITS / 8);
        FKV_DEVICE const fkv_u32 *from = (FKV_DEVICE const fkv_u32 *)(row + d * (BITS == 4 ? 4 : 2) / 8);
        x.w[0] = from[0];
        if (BITS == 4) x.w[1] = from[1];
        if (BITS == 3) x.w[1] = *(FKV_DEVICE const fkv_u16 *)(row + FKV_D / 4 + d / 8);
        x.scale = ((FKV_DEVICE const fkv_u16 *)(block + SCALES))[slot];
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        fkv_u32 code = BITS == 4 ? x.w[i / 8] >> (i * 4 % 32) & 15u : x.w[0] >> (2 * i) & 3u;
        if (BITS == 3) code |= (x.w[1] >> i & 1u) << 2;
        return fkv_page_number(x.scale) * (IS_K ? fkv_k_book(code) : fkv_v_book(code));
    }
};

/* ---- sealed pages ---- */

/* Eight codes that share a dword: eight channels of a token of K, eight tokens of a channel of V. */
struct fkv_codes8 {
    fkv_u32 low;
    fkv_u32 high; /* of 3 bits */
};

/* codes: of a block of 16 tokens. unit: of 16 channels. upper: the upper eight of 16 channels of K, or of 16 tokens of V. */
template <int BITS>
FKV_FN fkv_codes8 fkv_take_codes8(FKV_DEVICE const fkv_u8 *codes, fkv_u32 unit, fkv_u32 upper, fkv_u32 dword) {
    FKV_DEVICE const fkv_u32 *lines = (FKV_DEVICE const fkv_u32 *)codes + dword;
    fkv_codes8 x;
    x.low = BITS == 4 ? lines[(2 * unit + upper) * 16] : lines[unit * 16] >> upper * 4;
    x.high = BITS == 3 ? lines[(FKV_D / 16 + unit / 2) * 16] >> (unit % 2 * 4 + upper * 2) : 0u;
    return x;
}

template <int BITS> FKV_FN fkv_u32 fkv_code8(fkv_codes8 x, int i) {
    if (BITS == 4) return x.low >> (i % 4 * 8 + i / 4 * 4) & 15u;
    fkv_u32 code = x.low >> (i % 4 * 8 + i / 4 * 2) & 3u;
    return BITS == 3 ? code | (x.high >> (i % 4 * 8 + i / 4) & 1u) << 2 : code;
}

/* Eight numbers of the page type. */
struct fkv_numbers8 {
    fkv_u32 w[4];
};

FKV_FN fkv_numbers8 fkv_take_numbers8(FKV_DEVICE const fkv_u8 *numbers, fkv_u32 first) {
    fkv_numbers8 x;
    FKV_UNROLL
    for (int i = 0; i < 4; i++) x.w[i] = ((FKV_DEVICE const fkv_u32 *)(numbers + first * 2))[i];
    return x;
}

FKV_FN float fkv_number8(FKV_LOCAL const fkv_numbers8 &x, int i) { return fkv_page_number(x.w[i / 2] >> (i % 2 * 16) & 0xffffu); }

#if FKV_K_SEALED
template <int N> struct fkv_sealed_k_shape {
    enum { TOKENS = N, CHANNELS = 8 };
    struct chunk {
        fkv_codes8 codes[N];
        fkv_numbers8 scales;
        fkv_numbers8 biases;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x;
        FKV_DEVICE const fkv_u8 *codes = block + FKV_K_CODES + slot / 16 * 16 * FKV_K_ROW_BYTES;
        FKV_UNROLL
        for (int n = 0; n < N; n++) x.codes[n] = fkv_take_codes8<FKV_K_BITS>(codes, d / 16, d % 16 / 8, slot % 16 + (fkv_u32)n);
        x.scales = fkv_take_numbers8(block + FKV_K_SCALES, d);
        x.biases = fkv_take_numbers8(block + FKV_K_BIASES, d);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        float code = (float)fkv_code8<FKV_K_BITS>(x.codes[i / 8], i % 8);
        return fkv_fma(fkv_number8(x.scales, i % 8), code, fkv_number8(x.biases, i % 8));
    }
};
typedef fkv_sealed_k_shape<2> fkv_k_shape;
typedef fkv_sealed_k_shape<1> fkv_k_row_shape;
#else
#if FKV_K_BOOK
typedef fkv_book_shape<FKV_K_BITS, true, FKV_K_CODES, FKV_K_SCALES> fkv_k_shape;
#else
typedef fkv_row_shape<FKV_K_BITS, FKV_K_GROUP, FKV_K_CODES, FKV_K_SCALES, FKV_K_BIASES> fkv_k_shape;
#endif
typedef fkv_k_shape fkv_k_row_shape;
#endif

#if FKV_V_SEALED
template <int N> struct fkv_sealed_v_shape {
    enum { TOKENS = 8, CHANNELS = N };
    struct chunk {
        fkv_codes8 codes[N];
        fkv_numbers8 norms;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x;
        FKV_DEVICE const fkv_u8 *codes = block + FKV_V_CODES + slot / 16 * 16 * FKV_V_ROW_BYTES;
        FKV_UNROLL
        for (int n = 0; n < N; n++) x.codes[n] = fkv_take_codes8<FKV_V_BITS>(codes, d / 16, slot % 16 / 8, d % 16 + (fkv_u32)n);
        x.norms = fkv_take_numbers8(block + FKV_V_SCALES, slot);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        fkv_u32 code = fkv_code8<FKV_V_BITS>(x.codes[i % N], i / N);
        fkv_u32 size = code & ((1u << (FKV_V_BITS - 1)) - 1u);
        fkv_u32 levels = FKV_V_BITS < 4 || size < 4 ? fkv_v_levels(0) : fkv_v_levels(4);
        float norm = fkv_abs(fkv_number8(x.norms, i / N)) * 0.0078125f;
        float number = norm * (float)(levels >> size % 4 * 8 & 255u);
        return fkv_float_of(fkv_bits_of(number) ^ code >> (FKV_V_BITS - 1) << 31);
    }
};
typedef fkv_sealed_v_shape<2> fkv_v_shape;
typedef fkv_sealed_v_shape<1> fkv_v_column_shape;
#else
#if FKV_V_BOOK
typedef fkv_book_shape<FKV_V_BITS, false, FKV_V_CODES, FKV_V_SCALES> fkv_v_shape;
#else
typedef fkv_row_shape<FKV_V_BITS, FKV_V_GROUP, FKV_V_CODES, FKV_V_SCALES, FKV_V_BIASES> fkv_v_shape;
#endif
struct fkv_v_column_shape {
    enum { TOKENS = 1, CHANNELS = 1 };
    struct chunk {
        float x;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x;
        x.x = fkv_v_at(block, slot, d);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int) { return x.x; }
};
#endif
