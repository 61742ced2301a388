/* Encodes one row into its slot of a block, with results bit-identical to those of src/codec. Each row is encoded by one warp,
 * and channel d is element d / 32 of lane d % 32, so no shared memory is needed. */
#define FKV_WRITE_VALUES ((FKV_D + 31) / 32)

#define FKV_STORABLE_LIMIT (FKV_PAGE_BF16 ? fkv_float_of(0x6f800000u) : 65504.0f)

FKV_FN float fkv_storable(float x) {
    float number = x == x ? x : 0.0f;
    float below = number > FKV_STORABLE_LIMIT ? FKV_STORABLE_LIMIT : number;
    return below < -FKV_STORABLE_LIMIT ? -FKV_STORABLE_LIMIT : below;
}

struct fkv_line {
    float scale;
    float bias;
};

/* Computes the scale and the bias from the range of a group, like fkv_codec_line(). */
FKV_FN fkv_line fkv_line_of(float lo, float hi, float bins, bool fitted) {
    fkv_line line;
    float step = fkv_div(fkv_sub(hi, lo), bins);
    step = step > 1e-7f ? step : 1e-7f;
    if (fitted) {
        line.scale = step;
        line.bias = lo;
        return line;
    }
    bool low = fkv_abs(lo) > fkv_abs(hi);
    float edge = low ? lo : hi;
    line.scale = low ? step : -step;
    line.bias = 0.0f;
    float q = fkv_rint(fkv_div(edge, line.scale));
    if (q != 0.0f) {
        line.scale = fkv_div(edge, q);
        line.bias = edge;
    }
    return line;
}

FKV_FN float fkv_nearest_code(float position, float bins) {
    position = position > 0.0f ? position : 0.0f;
    position = position < bins ? position : bins;
    return fkv_sub(fkv_add(position, 8388608.0f), 8388608.0f);
}

/* Returns the sum of x over lanes 0 to 15, added in lane order. */
FKV_FN float fkv_sum_of_16(float x) {
    float sum = fkv_shuffle(x, 0);
    FKV_UNROLL
    for (fkv_u32 i = 1; i < 16; i++) sum = fkv_add(sum, fkv_shuffle(x, i));
    return sum;
}

/* Returns the scale and bias that best fit a group's values (least squares), given the codes that `line`, the current scale and
 * bias, assigns to them. Returns `line` unchanged if the fitted line is not valid. The values are added in the same order as in
 * fkv_codec_refit(), so the results are identical: value j of the group is added to partial sum j % 16. Lane i < 16 holds partial
 * sum i and therefore also adds the values of lane i + 16. */
FKV_FN fkv_line fkv_refit(FKV_LOCAL const float *x, int n, fkv_line line, float bins) {
    float c = 0.0f;
    float cc = 0.0f;
    float p = 0.0f;
    float cp = 0.0f;
    FKV_UNROLL
    for (int i = 0; i < n; i++) {
        float position = fkv_div(fkv_sub(x[i], line.bias), line.scale);
        float code = fkv_nearest_code(position, bins);
        float product = fkv_mul(code, position);
        float other = fkv_shuffle_xor(code, 16);
        c = fkv_add(fkv_add(c, code), other);
        cc = fkv_add(fkv_add(cc, fkv_mul(code, code)), fkv_mul(other, other));
        p = fkv_add(fkv_add(p, position), fkv_shuffle_xor(position, 16));
        cp = fkv_add(fkv_add(cp, product), fkv_shuffle_xor(product, 16));
    }
    float numbers = (float)(32 * n);
    float sum_c = fkv_sum_of_16(c);
    float sum_p = fkv_sum_of_16(p);
    float determinant = fkv_sub(fkv_mul(numbers, fkv_sum_of_16(cc)), fkv_mul(sum_c, sum_c));
    float slope = fkv_div(fkv_sub(fkv_mul(numbers, fkv_sum_of_16(cp)), fkv_mul(sum_c, sum_p)), determinant);
    float start = fkv_div(fkv_sub(sum_p, fkv_mul(slope, sum_c)), numbers);
    fkv_line fitted;
    fitted.scale = fkv_mul(line.scale, slope);
    fitted.bias = fkv_add(fkv_mul(line.scale, start), line.bias);
    bool good = determinant > 0.0f && fitted.scale > 0.0f && fitted.scale <= FKV_STORABLE_LIMIT &&
                fkv_abs(fitted.bias) <= FKV_STORABLE_LIMIT;
    if (good) line = fitted;
    return line;
}

/* Encodes one group and returns its scale and bias. Each lane holds n values of the group. src/codec/affine.c explains each step.
 */
FKV_FN fkv_line fkv_code_group(FKV_LOCAL const float *x, FKV_LOCAL fkv_u32 *code, int n, int bits, bool fitted) {
    const float bins = (float)((1 << bits) - 1);
    float hi = x[0];
    float lo = x[0];
    FKV_UNROLL
    for (int i = 1; i < n; i++) {
        hi = x[i] > hi ? x[i] : hi;
        lo = x[i] < lo ? x[i] : lo;
    }
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        float other_hi = fkv_shuffle_xor(hi, h);
        float other_lo = fkv_shuffle_xor(lo, h);
        hi = other_hi > hi ? other_hi : hi;
        lo = other_lo < lo ? other_lo : lo;
    }
    fkv_line line = fkv_line_of(lo, hi, bins, fitted);
    for (int i = 0; fitted && i < 3; i++) line = fkv_refit(x, n, line, bins);
    FKV_UNROLL
    for (int i = 0; i < n; i++) code[i] = (fkv_u32)fkv_nearest_code(fkv_div(fkv_sub(x[i], line.bias), line.scale), bins);
    return line;
}

/* Encodes one row with a codebook; x holds this lane's values of the row. src/codec/turbo.c explains each step. All values must
 * be finite, with magnitudes of at most FKV_STORABLE_LIMIT. */
FKV_FN void fkv_write_book(FKV_LOCAL const float *x, bool is_k, fkv_u32 bits, FKV_DEVICE fkv_u8 *codes, FKV_DEVICE fkv_u8 *scales,
                           fkv_u32 lane) {
    float largest = 0.0f;
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) largest = fkv_abs(x[i]) > largest ? fkv_abs(x[i]) : largest;
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) {
        float other = fkv_shuffle_xor(largest, h);
        largest = other > largest ? other : largest;
    }
    float sum = 0.0f;
    /* value j is added to partial sum j % 16; lane i holds partial sum i and also adds the values of lane i + 16 */
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) {
        float share = fkv_div(x[i], largest > 0.0f ? largest : 1.0f);
        float square = fkv_mul(share, share);
        sum = fkv_add(fkv_add(sum, square), fkv_shuffle_xor(square, 16));
    }
    float root = fkv_sqrt(fkv_div(fkv_sum_of_16(sum), (float)FKV_D));
    float scale = fkv_mul(fkv_mul(largest, root), fkv_float_of(is_k ? FKV_K_BOOK_UNIT : FKV_V_BOOK_UNIT));
    if (lane == 0) ((FKV_DEVICE fkv_u16 *)scales)[0] = (fkv_u16)fkv_page_bits(scale);
    float divisor = scale > 1e-30f ? scale : 1e-30f;
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) {
        float place = fkv_div(x[i], divisor);
        fkv_u32 code = 0;
        for (fkv_u32 c = 0; c + 1 < 1u << bits; c++)
            code += place > 0.5f * (is_k ? fkv_k_book(c) + fkv_k_book(c + 1) : fkv_v_book(c) + fkv_v_book(c + 1)) ? 1u : 0u;
        fkv_u32 d = lane + 32 * (fkv_u32)i;
        fkv_u32 low = bits == 4 ? code : code & 3u; /* combines the codes of neighbouring lanes into one byte */
        if (bits == 4) {
            low |= fkv_shuffle_xor_bits(low, 1) << 4;
            if (d % 2 == 0) codes[d / 2] = (fkv_u8)low;
            continue;
        }
        low |= fkv_shuffle_xor_bits(low, 1) << 2;
        low |= fkv_shuffle_xor_bits(low, 2) << 4;
        if (d % 4 == 0) codes[d / 4] = (fkv_u8)low;
        if (bits == 2) continue;
        fkv_u32 high = code >> 2;
        high |= fkv_shuffle_xor_bits(high, 1) << 1;
        high |= fkv_shuffle_xor_bits(high, 2) << 2;
        high |= fkv_shuffle_xor_bits(high, 4) << 4;
        if (d % 8 == 0) codes[FKV_D / 4 + d / 8] = (fkv_u8)high;
    }
}

/* Encodes one row into its slot; x holds this lane's values of the row. book: 0 for affine codes, 1 for the K codebook, 2 for the
 * V codebook. signs: bit 31 is set if the rotation negates the value. If `fitted` is true, the scales and biases of codes with 4
 * bits or fewer are refined by a least-squares fit. */
FKV_FN void fkv_write_row(FKV_LOCAL float *x, FKV_LOCAL const fkv_u32 *signs, bool rotate, bool fitted, int book, int bits,
                          int group, FKV_DEVICE fkv_u8 *codes, FKV_DEVICE fkv_u8 *scales, FKV_DEVICE fkv_u8 *biases,
                          fkv_u32 lane) {
    if (rotate) {
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) x[i] = fkv_float_of(fkv_bits_of(fkv_storable(x[i])) ^ signs[i]);
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32 && h < FKV_ROTATION_BLOCK; h *= 2) {
            FKV_UNROLL
            for (int i = 0; i < FKV_WRITE_VALUES; i++) {
                float other = fkv_shuffle_xor(x[i], h);
                x[i] = (lane & h) == 0 ? fkv_add(x[i], other) : fkv_sub(other, x[i]);
            }
        }
        FKV_UNROLL
        for (int h = 1; h < FKV_ROTATION_BLOCK / 32; h *= 2) {
            FKV_UNROLL
            for (int i = 0; i < FKV_WRITE_VALUES; i++) {
                if ((i & h) != 0) continue;
                float a = x[i];
                float b = x[i + h];
                x[i] = fkv_add(a, b);
                x[i + h] = fkv_sub(a, b);
            }
        }
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) x[i] = fkv_mul(x[i], fkv_rotation_norm());
    }
    FKV_UNROLL
    for (int i = 0; i < FKV_WRITE_VALUES; i++) x[i] = fkv_storable(x[i]);
    if (book != 0) {
        fkv_write_book(x, book == 1, (fkv_u32)bits, codes, scales, lane);
        return;
    }
    if (bits == 16) {
        FKV_UNROLL
        for (int i = 0; i < FKV_WRITE_VALUES; i++) {
            fkv_u32 d = lane + 32 * (fkv_u32)i;
            if (d < FKV_D) ((FKV_DEVICE fkv_u16 *)codes)[d] = (fkv_u16)fkv_page_bits(x[i]);
        }
        return;
    }
    const int n = group / 32;
    FKV_UNROLL
    for (int g = 0; g < FKV_D / group; g++) {
        fkv_u32 code[4];
        fkv_line line = fkv_code_group(x + g * n, code, n, bits, fitted && bits <= 4);
        if (lane == 0) {
            ((FKV_DEVICE fkv_u16 *)scales)[g] = (fkv_u16)fkv_page_bits(line.scale);
            ((FKV_DEVICE fkv_u16 *)biases)[g] = (fkv_u16)fkv_page_bits(line.bias);
        }
        FKV_UNROLL
        for (int i = 0; i < n; i++) { /* combines the codes of neighbouring lanes into one byte */
            fkv_u32 byte = code[i];
            if (bits == 4) byte |= fkv_shuffle_xor_bits(byte, 1) << 4;
            if (bits == 2) {
                byte |= fkv_shuffle_xor_bits(byte, 1) << 2;
                byte |= fkv_shuffle_xor_bits(byte, 2) << 4;
            }
            fkv_u32 d = lane + 32 * (fkv_u32)(g * n + i);
            fkv_u32 of_byte = 8 / (fkv_u32)bits;
            if (d % of_byte == 0) codes[d / of_byte] = (fkv_u8)byte;
        }
    }
}
