/* Reads the values of a packed page in chunks. take() loads the packed words of a chunk, and number() unpacks a single value.
 * Loading and unpacking are separate, so that later chunks can be loaded while earlier values are used. The results are
 * bit-identical to those of src/codec.
 *
 * The shape of a chunk is the number of adjacent tokens that the chunk covers (TOKENS) and the number of channels per token
 * (CHANNELS). Value i is channel i % CHANNELS of token i / CHANNELS. The shape follows from the layout of the codes:
 *
 *   rows       16 channels of one token, all in one group
 *   sealed K   8 channels of a token (one dword) and the same channels of the next token, with the same scales
 *   sealed V   8 tokens of a channel (one dword) and the same tokens of the next channel, with the same norms
 *
 * For layers with calibrated keys, calibrated_keys.h defines the shapes of K.
 *
 * Chunks of fkv_k_shape and fkv_v_shape have 16 values. The plain loops use fkv_k_row_shape, whose chunks cover one token, and
 * fkv_v_column_shape, whose chunks cover one channel. The source of a sealed layer includes this file twice: once for open pages
 * and once for sealed pages.
 */

/* ---- rows ---- */

template <int BITS, int GROUP, int CODES, int SCALES, int BIASES> struct fkv_row_shape {
    enum { TOKENS = 1, CHANNELS = 16 };
    enum { CODE_BITS = BITS, GROUP_CHANNELS = GROUP, CODES_AT = CODES, SCALES_AT = SCALES, BIASES_AT = BIASES };
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
        if (BITS == 16) return fkv_page_value(code);
        return fkv_fma(fkv_page_value(x.scale), (float)code, fkv_page_value(x.bias));
    }
};

/* Chunks of codebook rows. A chunk of 3-bit codes consists of one word from the low plane and 16 bits from the high plane. */
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
        return fkv_page_value(x.scale) * (IS_K ? fkv_k_book(code) : fkv_v_book(code));
    }
};

/* ---- sealed pages ---- */

/* Eight codes of a sealed page, stored in one dword: 8 channels of one token (K), or 8 tokens of one channel (V). */
struct fkv_codes8 {
    fkv_u32 low;
    fkv_u32 high; /* high bits of 3-bit codes; 0 for other code widths */
};

/* Loads one dword of eight codes. `codes` points to the codes of 16 tokens, and `unit` is the index of a group of 16 channels.
 * `upper` is 1 for the upper 8 of the 16 channels (K) or of the 16 tokens (V), and 0 for the lower 8. */
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

/* Eight scales, biases or norms as stored in the page (float16 or bfloat16). */
struct fkv_values8 {
    fkv_u32 w[4];
};

FKV_FN fkv_values8 fkv_take_values8(FKV_DEVICE const fkv_u8 *numbers, fkv_u32 first) {
    fkv_values8 x;
    FKV_UNROLL
    for (int i = 0; i < 4; i++) x.w[i] = ((FKV_DEVICE const fkv_u32 *)(numbers + first * 2))[i];
    return x;
}

FKV_FN float fkv_value8(FKV_LOCAL const fkv_values8 &x, int i) { return fkv_page_value(x.w[i / 2] >> (i % 2 * 16) & 0xffffu); }

#if FKV_K_SEALED && !FKV_CALIBRATED
template <int N> struct fkv_sealed_k_shape {
    enum { TOKENS = N, CHANNELS = 8 };
    struct chunk {
        fkv_codes8 codes[N];
        fkv_values8 scales;
        fkv_values8 biases;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x;
        FKV_DEVICE const fkv_u8 *codes = block + FKV_K_CODES + slot / 16 * 16 * FKV_K_ROW_BYTES;
        FKV_UNROLL
        for (int n = 0; n < N; n++) x.codes[n] = fkv_take_codes8<FKV_K_BITS>(codes, d / 16, d % 16 / 8, slot % 16 + (fkv_u32)n);
        x.scales = fkv_take_values8(block + FKV_K_SCALES, d);
        x.biases = fkv_take_values8(block + FKV_K_BIASES, d);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        float code = (float)fkv_code8<FKV_K_BITS>(x.codes[i / 8], i % 8);
        return fkv_fma(fkv_value8(x.scales, i % 8), code, fkv_value8(x.biases, i % 8));
    }
};
typedef fkv_sealed_k_shape<2> fkv_k_shape;
typedef fkv_sealed_k_shape<1> fkv_k_row_shape;
#elif !FKV_CALIBRATED
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
        fkv_values8 norms;
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d) {
        chunk x;
        FKV_DEVICE const fkv_u8 *codes = block + FKV_V_CODES + slot / 16 * 16 * FKV_V_ROW_BYTES;
        FKV_UNROLL
        for (int n = 0; n < N; n++) x.codes[n] = fkv_take_codes8<FKV_V_BITS>(codes, d / 16, slot % 16 / 8, d % 16 + (fkv_u32)n);
        x.norms = fkv_take_values8(block + FKV_V_SCALES, slot);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        fkv_u32 code = fkv_code8<FKV_V_BITS>(x.codes[i % N], i / N);
        fkv_u32 size = code & ((1u << (FKV_V_BITS - 1)) - 1u);
        fkv_u32 levels = FKV_V_BITS < 4 || size < 4 ? fkv_v_levels(0) : fkv_v_levels(4);
        float norm = fkv_abs(fkv_value8(x.norms, i / N)) * 0.0078125f;
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
