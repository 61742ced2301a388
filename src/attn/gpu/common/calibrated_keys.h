/* Shapes of K (chunks.h) for layers with calibrated keys (src/codec/channel_order.h). Sealed keys are read in the channel order
 * of the KV head (`order`, see fkv_kernel_orders()), because their digits are packed in this order. fkv_load_query() loads
 * queries in the same order.
 */
#if FKV_K_SEALED
/* Sealed pages. A code consists of one to three digits of 2 bits. Plane d stores digit d of all channels that have this digit. */
struct fkv_calibrated_k_shape {
    enum { TOKENS = 1, CHANNELS = 16 };
    struct chunk {
        fkv_u32 digits[3]; /* one word per plane; 0 for channels without this digit */
        fkv_values8 scales[2];
        fkv_values8 biases[2];
    };
    /* Returns the digits of 16 channels from position p on. `first` is the index of the plane's first digit, and n the number of
     * channels in the plane. Both are multiples of 4, so the 16 digits may begin in the middle of a dword. */
    FKV_FN fkv_u32 take_digits(FKV_DEVICE const fkv_u32 *lines, fkv_u32 first, fkv_u32 n, fkv_u32 p) {
        if (p >= n) return 0;
        fkv_u32 there = n - p < 16 ? n - p : 16;
        fkv_u32 at = (first + p) % 16;
        fkv_u32 low = (255u >> at / 2) * 0x01010101u; /* bits that the first of the two dwords supplies */
        FKV_DEVICE const fkv_u32 *line = lines + (first + p) / 16 * 16;
        fkv_u32 word = line[0] >> at / 2 & low;
        if (at + there > 16) word |= line[16] << (8 - at / 2) & ~low;
        return word & ((1u << there / 2) - 1u) * 0x01010101u;
    }
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 p FKV_ORDER) {
        chunk x = {};
        FKV_DEVICE const fkv_u32 *lines =
            (FKV_DEVICE const fkv_u32 *)(block + FKV_K_CODES + slot / 16 * 16 * FKV_K_ROW_BYTES) + slot % 16;
        x.digits[0] = lines[p];
        x.digits[1] = take_digits(lines, FKV_D, order[0], p);
        x.digits[2] = take_digits(lines, FKV_D + order[0], order[1], p);
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            x.scales[i] = fkv_take_values8(block + FKV_K_SCALES, p + 8 * (fkv_u32)i);
            x.biases[i] = fkv_take_values8(block + FKV_K_BIASES, p + 8 * (fkv_u32)i);
        }
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) {
        int shift = i % 4 * 8 + i / 4 * 2;
        fkv_u32 code = (x.digits[0] >> shift & 3u) | (x.digits[1] >> shift & 3u) << 2 | (x.digits[2] >> shift & 3u) << 4;
        return fkv_fma(fkv_value8(x.scales[i / 8], i % 8), (float)code, fkv_value8(x.biases[i / 8], i % 8));
    }
};
typedef fkv_calibrated_k_shape fkv_k_shape;
typedef fkv_calibrated_k_shape fkv_k_row_shape;
#else
typedef fkv_row_shape<FKV_K_BITS, FKV_K_GROUP, FKV_K_CODES, FKV_K_SCALES, FKV_K_BIASES> fkv_open_k_shape;

/* Open pages, for the plain loops, which do not reorder the channels of these pages. */
struct fkv_k_row_shape {
    enum { TOKENS = fkv_open_k_shape::TOKENS, CHANNELS = fkv_open_k_shape::CHANNELS };
    typedef fkv_open_k_shape::chunk chunk;
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 d FKV_ORDER) {
        return fkv_open_k_shape::take(block, slot, d);
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) { return fkv_open_k_shape::number(x, i); }
};

/* Open pages, for simdgroup_walk.h, which has no space for a second copy of the queries and therefore reads these pages in the
 * channel order of the sealed pages. A sequence has few open pages, so values are decoded one by one. */
struct fkv_k_shape {
    enum { TOKENS = 1, CHANNELS = 16 };
    struct chunk {
        float x[16];
    };
    FKV_FN chunk take(FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 p FKV_ORDER) {
        chunk x;
        FKV_UNROLL
        for (int i = 0; i < 16; i++) x.x[i] = fkv_k_at(block, slot, order[2 + p + (fkv_u32)i]);
        return x;
    }
    FKV_FN float number(FKV_LOCAL const chunk &x, int i) { return x.x[i]; }
};
#endif
