/* Computes the product y = x * W^T of up to eight rows x and a matrix W of affine codes (MLX layout). Runs on CUDA and is
 * emulated on the host.
 *
 * A block computes 16 * AP_TILES outputs for all rows of x. Its warps process chunks of AP_CHUNK columns in round-robin order.
 * The sums of the warps are added at the end, in warp order. Within a chunk, tensor cores multiply codes (matrix a, 16 outputs)
 * by x (matrix b, 8 rows; missing rows repeat the last row). An 8-bit code is represented as the sum of two operands: its low
 * four bits, and 16 times its high four bits. For each scale group, y += scale * sum(code * x) + bias * sum(x), where sum(x) is
 * computed as a matrix product with ones.
 *
 * The result of a row does not depend on the other rows, because rows of x never exchange data and the kernel executes the same
 * instructions for any number of rows. float32 rows are split into three bfloat16 parts.
 *
 * Codes are loaded AP_STAGES chunks ahead, in pieces of 16 bytes per lane. All lanes of a matrix instruction must hold codes of
 * the same scale group, so lanes exchange words if four pieces contain several groups. The kernel is limited by memory
 * bandwidth.
 */
enum {
    AP_CHUNK = FKV_CHUNK,                                           /* columns per chunk */
    AP_WORDS = FKV_BITS * AP_CHUNK / 128,                           /* words of codes per lane, matrix row and chunk */
    AP_GROUPS = AP_CHUNK / FKV_GROUP,                               /* scale groups per chunk */
    AP_GROUP_WORDS = AP_WORDS / AP_GROUPS,                          /* words of codes per lane, matrix row and group */
    AP_PIECE_GROUPS = AP_GROUP_WORDS >= 4 ? 1 : 4 / AP_GROUP_WORDS, /* scale groups covered by the pieces of four lanes */
    AP_COLUMNS = 32 / FKV_BITS,                                     /* columns per word */
    AP_SCALE_BYTES = FKV_SCALE_TYPE == 0 ? 4 : 2,                   /* bytes per scale and per bias */
    AP_SCALE_WORDS = (AP_GROUPS * AP_SCALE_BYTES + 3) / 4,          /* words of scales per matrix row and chunk */
    AP_PARTS = FKV_ROW_TYPE == 0 ? 3 : 1,                           /* 16-bit parts per value of x */
    AP_X_BYTES = FKV_ROW_TYPE == 0 ? 4 : 2,                         /* bytes per value of x */
    AP_X_WORDS = AP_COLUMNS * AP_X_BYTES / 4,                       /* words of x per word of codes */
    AP_ROWS = 8,                                                    /* maximum number of rows of x */
    AP_TILES = FKV_TILES,
    AP_STAGES = FKV_STAGES,
    AP_WARPS = FKV_LAUNCH_THREADS / 32,
    AP_OUTPUTS = 16 * AP_TILES,
    AP_STRIDE = AP_OUTPUTS + 4, /* row stride of the totals in shared memory, in floats; the padding avoids bank conflicts */
    AP_SHARED = AP_WARPS * AP_ROWS * AP_STRIDE
};

/* Codes, scales and biases of a lane for one chunk. In tile t, index 0 is matrix row 16 * t + lane / 4, and index 1 is the matrix
 * row 8 rows later. */
struct ap_slot {
    fkv_u32 codes[AP_TILES][2][AP_WORDS];
    fkv_u32 scales[AP_TILES][2][AP_SCALE_WORDS];
    fkv_u32 biases[AP_TILES][2][AP_SCALE_WORDS];
};

struct ap_matrix {
    const fkv_u8 *codes[AP_TILES][2]; /* address of this lane's first piece */
    fkv_u32 scales[AP_TILES][2];      /* index of the first scale of the row */
    const fkv_u8 *all_scales;
    const fkv_u8 *all_biases;
};

FKV_FN void ap_load_scales(fkv_u32 *to, const fkv_u8 *at) {
    if constexpr (AP_GROUPS * AP_SCALE_BYTES >= 16) {
        FKV_UNROLL
        for (int i = 0; i < AP_SCALE_WORDS; i += 4) {
            const fkv_words4 x = ((const fkv_words4 *)at)[i / 4];
            FKV_UNROLL
            for (int j = 0; j < 4; j++) to[i + j] = x.w[j];
        }
    } else if constexpr (AP_GROUPS * AP_SCALE_BYTES == 8) {
        const fkv_words2 x = *(const fkv_words2 *)at;
        to[0] = x.w[0];
        to[1] = x.w[1];
    } else if constexpr (AP_GROUPS * AP_SCALE_BYTES == 4) {
        to[0] = *(const fkv_u32 *)at;
    } else {
        to[0] = *(const fkv_u16 *)at;
    }
}

FKV_FN void ap_load(ap_slot &slot, const ap_matrix &m, fkv_u32 chunk) {
    FKV_UNROLL
    for (int i = 0; i < 2 * AP_TILES; i++) {
        FKV_UNROLL
        for (int p = 0; p < AP_WORDS / 4; p++) {
            const fkv_u8 *at = m.codes[i / 2][i % 2] + (fkv_u64)chunk * (AP_WORDS * 16) + p * 64;
            fkv_u32 *to = slot.codes[i / 2][i % 2] + 4 * p;
            const fkv_words4 x = fkv_stream16(at);
            FKV_UNROLL
            for (int j = 0; j < 4; j++) to[j] = x.w[j];
        }
    }
    FKV_UNROLL
    for (int i = 0; i < 2 * AP_TILES; i++) {
        const fkv_u64 at = (fkv_u64)(m.scales[i / 2][i % 2] + chunk * AP_GROUPS) * AP_SCALE_BYTES;
        ap_load_scales(slot.scales[i / 2][i % 2], m.all_scales + at);
        ap_load_scales(slot.biases[i / 2][i % 2], m.all_biases + at);
    }
}

/* Exchanges words within four lanes, so that word i of each lane belongs to scale group i / AP_GROUP_WORDS. w: the lane's piece
 * (four words). */
FKV_FN void ap_exchange(fkv_u32 *w, fkv_u32 c) {
    if constexpr (AP_PIECE_GROUPS > 1) {
        const bool high = (c & 2) != 0;
        const fkv_u32 a = fkv_shuffle_xor_bits(high ? w[0] : w[2], 2);
        const fkv_u32 b = fkv_shuffle_xor_bits(high ? w[1] : w[3], 2);
        w[0] = high ? a : w[0];
        w[1] = high ? b : w[1];
        w[2] = high ? w[2] : a;
        w[3] = high ? w[3] : b;
    }
    if constexpr (AP_PIECE_GROUPS > 2) {
        const bool odd = (c & 1) != 0;
        const fkv_u32 a = fkv_shuffle_xor_bits(odd ? w[0] : w[1], 1);
        const fkv_u32 b = fkv_shuffle_xor_bits(odd ? w[2] : w[3], 1);
        w[0] = odd ? a : w[0];
        w[1] = odd ? w[1] : a;
        w[2] = odd ? b : w[2];
        w[3] = odd ? w[3] : b;
    }
}

/* Returns the first column, within the chunk, of word i of lane c after the exchange. */
FKV_FN fkv_u32 ap_column(fkv_u32 i, fkv_u32 c) {
    fkv_u32 j = i % 4;
    fkv_u32 word = AP_PIECE_GROUPS == 1   ? 4 * c + j
                   : AP_PIECE_GROUPS == 2 ? j / 2 * 8 + c % 2 * 4 + c / 2 * 2 + j % 2
                                          : 4 * j + c;
    return (i / 4 * 16 + word) * AP_COLUMNS;
}

/* Loads the AP_COLUMNS values of x at `at`. */
template <bool Aligned> FKV_FN void ap_load_x(fkv_u32 *to, const fkv_u8 *at) {
    if constexpr (!Aligned) {
        FKV_UNROLL
        for (int i = 0; i < AP_X_WORDS; i++) {
            if constexpr (FKV_ROW_TYPE == 0)
                to[i] = ((const fkv_u32 *)at)[i];
            else
                to[i] = ((const fkv_u16 *)at)[2 * i] | (fkv_u32)((const fkv_u16 *)at)[2 * i + 1] << 16;
        }
    } else if constexpr (AP_X_WORDS == 2) {
        const fkv_words2 x = *(const fkv_words2 *)at;
        to[0] = x.w[0];
        to[1] = x.w[1];
    } else {
        FKV_UNROLL
        for (int i = 0; i < AP_X_WORDS; i += 4) {
            const fkv_words4 x = ((const fkv_words4 *)at)[i / 4];
            FKV_UNROLL
            for (int j = 0; j < 4; j++) to[i + j] = x.w[j];
        }
    }
}

/* Rounds two float32 values to bfloat16 and returns the pair. Then subtracts the rounded values from the arguments, which leaves
 * the rounding residues. */
FKV_FN fkv_u32 ap_split(float &a, float &b) {
    const fkv_u32 pair = fkv_pack_bf16(a, b);
    a = fkv_sub(a, fkv_float_of(pair << 16));
    b = fkv_sub(b, fkv_float_of(pair & 0xffff0000u));
    return pair;
}

/* Builds the b operands for one word of codes. The two columns of a pair are four columns (4-bit codes) or two columns (8-bit
 * codes) apart, as in the pairs of ap_codes(). */
FKV_FN void ap_operands(fkv_u32 (*b)[4], const fkv_u32 *x) {
    if constexpr (FKV_ROW_TYPE == 0) {
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            const int k = FKV_BITS == 4 ? i : i / 2;
            float low = fkv_float_of(x[k]);
            float high = fkv_float_of(x[k + AP_COLUMNS / 2]);
            FKV_UNROLL
            for (int part = 0; part < AP_PARTS; part++) b[part][i] = ap_split(low, high);
        }
    } else {
        FKV_UNROLL
        for (int i = 0; i < 4; i++) {
            const int k = FKV_BITS == 4 ? i : i / 2;
            b[0][i] = fkv_permute(x[k / 2], x[k / 2 + AP_COLUMNS / 4], k % 2 == 0 ? 0x5410u : 0x7632u);
        }
    }
}

/* Converts a word of codes to four pairs of 16-bit floats. Pair i consists of nibbles i and i + 4. In 8-bit codes, odd nibbles
 * are multiplied by 16. To convert a nibble, it is inserted into the low bits of 1024 (float16) or 128 (bfloat16), and the
 * constant is then subtracted. */
FKV_FN void ap_codes(fkv_u32 *a, fkv_u32 word) {
    FKV_UNROLL
    for (int i = 0; i < 4; i++) {
        const bool high = FKV_BITS == 8 && i % 2 == 1;
        if constexpr (FKV_ROW_TYPE == 1)
            a[i] = fkv_fma_f16x2(fkv_mask_or(word >> 4 * i, 0x000f000fu, 0x64006400u), high ? 0x4c004c00u : 0x3c003c00u,
                                 high ? 0xf400f400u : 0xe400e400u);
        else
            a[i] = fkv_fma_bf16x2(fkv_mask_or(word >> 4 * i, 0x000f000fu, 0x43004300u), high ? 0x41804180u : 0x3f803f80u,
                                  high ? 0xc500c500u : 0xc300c300u);
    }
}

FKV_FN void ap_mma(float *sums, fkv_u32 a0, fkv_u32 a1, fkv_u32 a2, fkv_u32 a3, fkv_u32 b0, fkv_u32 b1) {
    const fkv_u32 a[4] = {a0, a1, a2, a3};
    if constexpr (FKV_ROW_TYPE == 1)
        fkv_mma_f16(sums, a, b0, b1);
    else
        fkv_mma_bf16(sums, a, b0, b1);
}

/* Adds the products of one word of codes per matrix row to `sums`, and the sum of the values of x in the same columns to
 * `ones`. */
FKV_FN void ap_multiply(float (*sums)[4], float *ones, const ap_slot &slot, int i, const fkv_u32 *x) {
    constexpr fkv_u32 one = FKV_ROW_TYPE == 1 ? 0x3c003c00u : 0x3f803f80u;
    /* 0 for 8-bit codes, because the second half of b repeats the first half */
    constexpr fkv_u32 again = FKV_BITS == 4 ? one : 0;
    fkv_u32 b[AP_PARTS][4];
    ap_operands(b, x);
    FKV_UNROLL
    for (int part = 0; part < AP_PARTS; part++) {
        ap_mma(ones, one, one, again, again, b[part][0], b[part][1]);
        ap_mma(ones, one, one, again, again, b[part][2], b[part][3]);
    }
    FKV_UNROLL
    for (int t = 0; t < AP_TILES; t++) {
        fkv_u32 up[4];
        fkv_u32 down[4];
        ap_codes(up, slot.codes[t][0][i]);
        ap_codes(down, slot.codes[t][1][i]);
        FKV_UNROLL
        for (int part = 0; part < AP_PARTS; part++) {
            ap_mma(sums[t], up[0], down[0], up[1], down[1], b[part][0], b[part][1]);
            ap_mma(sums[t], up[2], down[2], up[3], down[3], b[part][2], b[part][3]);
        }
    }
}

/* Returns the scale (or bias) with index g. `words` holds the scales (or biases) of one matrix row. */
FKV_FN float ap_number(const fkv_u32 *words, int g) {
    if constexpr (FKV_SCALE_TYPE == 0) return fkv_float_of(words[g]);
    const fkv_u32 word = words[g / 2];
    if constexpr (FKV_SCALE_TYPE == 1) return fkv_f16_to_f32(g % 2 == 0 ? word & 0xffffu : word >> 16);
    return fkv_float_of(g % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

/* Adds the products of a scale group to the totals. x: values of the lane's row of x, for the words of the group */
FKV_FN void ap_process_group(float (*totals)[4], const ap_slot &slot, int g, const fkv_u32 (*x)[AP_X_WORDS]) {
    float sums[AP_TILES][4] = {};
    float ones[4] = {};
    FKV_UNROLL
    for (int i = 0; i < AP_GROUP_WORDS; i++) ap_multiply(sums, ones, slot, g * AP_GROUP_WORDS + i, x[i]);
    FKV_UNROLL
    for (int i = 0; i < 4 * AP_TILES; i++) {
        const int t = i / 4;
        const int h = i / 2 % 2;
        totals[t][i % 4] = fkv_fma(ap_number(slot.scales[t][h], g), sums[t][i % 4], totals[t][i % 4]);
        totals[t][i % 4] = fkv_fma(ap_number(slot.biases[t][h], g), ones[i % 2], totals[t][i % 4]);
    }
}

/* Adds the products of one chunk to the totals. row: the lane's row of x, of which 128 columns are loaded at a time */
template <bool Aligned> FKV_FN void ap_process(float (*totals)[4], ap_slot &slot, const fkv_u8 *row, fkv_u32 chunk, fkv_u32 c) {
    FKV_UNROLL
    for (int at = 0; at < AP_WORDS; at += FKV_BITS) {
        fkv_u32 x[FKV_BITS][AP_X_WORDS];
        FKV_UNROLL
        for (int i = 0; i < FKV_BITS; i++)
            ap_load_x<Aligned>(x[i], row + (fkv_u64)(chunk * AP_CHUNK + ap_column((fkv_u32)(at + i), c)) * AP_X_BYTES);
        FKV_UNROLL
        for (int i = 0; i < 2 * AP_TILES; i++) {
            FKV_UNROLL
            for (int j = 0; j < FKV_BITS; j += 4) ap_exchange(slot.codes[i / 2][i % 2] + at + j, c);
        }
        FKV_UNROLL
        for (int i = 0; i < FKV_BITS; i += AP_GROUP_WORDS) ap_process_group(totals, slot, (at + i) / AP_GROUP_WORDS, x + i);
    }
}

/* Adds the products of the warp's chunks to the totals. */
template <bool Aligned, int Stages>
FKV_FN void ap_walk(float (*totals)[4], const ap_matrix &m, const fkv_u8 *row, fkv_u32 n_chunks, fkv_u32 warp, fkv_u32 c) {
    ap_slot slots[Stages];
    FKV_UNROLL
    for (fkv_u32 s = 0; s < Stages; s++)
        if (warp + s * AP_WARPS < n_chunks) ap_load(slots[s], m, warp + s * AP_WARPS);
    FKV_NO_UNROLL
    for (fkv_u32 at = warp; at < n_chunks; at += Stages * AP_WARPS) {
        FKV_UNROLL
        for (fkv_u32 s = 0; s < Stages; s++) {
            const fkv_u32 chunk = at + s * AP_WARPS;
            if (chunk >= n_chunks) break;
            ap_process<Aligned>(totals, slots[s], row, chunk, c);
            if (chunk + Stages * AP_WARPS < n_chunks) ap_load(slots[s], m, chunk + Stages * AP_WARPS);
        }
    }
}

/* Adds the totals of the warps and stores the outputs. */
FKV_FN void ap_finish(float (*totals)[4], FKV_SHARED float *shared, fkv_u32 index, fkv_u32 first, fkv_u32 n_rows,
                      fkv_u32 n_outputs, void *out) {
    const fkv_u32 lane = index % 32;
    FKV_UNROLL
    for (int i = 0; i < 4 * AP_TILES; i++) {
        const fkv_u32 row = index / 32 * AP_ROWS + lane % 4 * 2 + i % 2;
        shared[row * AP_STRIDE + i / 4 * 16 + i / 2 % 2 * 8 + lane / 4] = totals[i / 4][i % 4];
    }
    fkv_sync();
    for (fkv_u32 i = index; i < n_rows * AP_OUTPUTS; i += 32 * AP_WARPS) {
        const fkv_u32 row = i / AP_OUTPUTS;
        const fkv_u32 output = first + i % AP_OUTPUTS;
        float sum = shared[row * AP_STRIDE + i % AP_OUTPUTS];
        FKV_UNROLL
        for (fkv_u32 w = 1; w < AP_WARPS; w++) sum = fkv_add(sum, shared[(w * AP_ROWS + row) * AP_STRIDE + i % AP_OUTPUTS]);
        if (output >= n_outputs) continue;
        const fkv_u64 at = (fkv_u64)row * n_outputs + output;
        if constexpr (FKV_ROW_TYPE == 0)
            ((float *)out)[at] = sum;
        else
            ((fkv_u16 *)out)[at] = (fkv_u16)(FKV_ROW_TYPE == 1 ? fkv_pack_f16(sum, 0.0f) : fkv_pack_bf16(sum, 0.0f));
    }
}

/* x: [n_rows, n_columns]; codes: [n_outputs, n_columns * FKV_BITS / 32] words; scales, biases: [n_outputs, n_columns /
 * FKV_GROUP]; out: [n_rows, n_outputs]. n_rows must be at most AP_ROWS, and n_columns must be a multiple of AP_CHUNK. */
FKV_FN void fkv_affine_product(fkv_place place, FKV_SHARED float *shared, const void *x, const void *codes, const void *scales,
                               const void *biases, fkv_u32 n_rows, fkv_u32 n_columns, fkv_u32 n_outputs, void *out) {
    const fkv_u32 lane = place.index % 32;
    const fkv_u32 warp = place.index / 32;
    const fkv_u32 c = lane % 4;
    const fkv_u32 first = place.x * AP_OUTPUTS;
    const fkv_u32 n_chunks = n_columns / AP_CHUNK;
    ap_matrix m;
    m.all_scales = (const fkv_u8 *)scales;
    m.all_biases = (const fkv_u8 *)biases;
    FKV_UNROLL
    for (int i = 0; i < 2 * AP_TILES; i++) {
        fkv_u32 row = first + (fkv_u32)i * 8 + lane / 4;
        row = row < n_outputs ? row : n_outputs - 1;
        m.codes[i / 2][i % 2] = (const fkv_u8 *)codes + (fkv_u64)row * n_chunks * (AP_WORDS * 16) + c * 16;
        m.scales[i / 2][i % 2] = row * n_chunks * AP_GROUPS;
    }
    /* the lanes of missing rows repeat the last row, and their results are not stored */
    const fkv_u32 row = lane / 4 < n_rows ? lane / 4 : n_rows - 1;
    const fkv_u8 *own = (const fkv_u8 *)x + (fkv_u64)row * n_columns * AP_X_BYTES;
    float totals[AP_TILES][4] = {};
    if (((fkv_u64)x & 15) == 0)
        ap_walk<true, AP_STAGES>(totals, m, own, n_chunks, warp, c);
    else
        ap_walk<false, 1>(totals, m, own, n_chunks, warp, c);
    ap_finish(totals, shared, place.index, first, n_rows, n_outputs, out);
}
