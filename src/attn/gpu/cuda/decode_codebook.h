/* Unpacks codebook codes (TurboQuant) for decode_mma.h. This file is used if only one of K and V has a codebook, if a head has
 * more than one slab of channels (decode_split.h), or if a KV head has more than four query heads.
 *
 * Key codes are converted to signed levels (codebook_levels.h). Value codes of 3 or 4 bits are first converted to unsigned bytes
 * (largest level - level), from which the levels are computed in fp16. The levels of 2-bit value codes are multiples of 11 and
 * are divided by 11. The quotients, +-3 and +-10, are exact in fp16, and the lower byte of their fp16 representation is 0.
 */
/* Converts the codebook codes of one token to B operand words for the matrix product with index `step`; see dc_key_operand(). */
FKV_FN void dc_book_operand(const fkv_u32 *unit, int step, fkv_u32 (&to)[dc_k::terms][2]) {
    if constexpr (dc_k::bits == 4) {
        FKV_UNROLL
        for (int i = 0; i < 4; i++) to[i / 2][i % 2] = dc_levels<dc_k_book>(unit[step], i % 2, i / 2);
    } else {
        fkv_u32 high = dc_half(unit[dc_k::high_word + step / 4], step / 2 % 2);
        FKV_UNROLL
        for (int odd = 0; odd < 2; odd++)
            to[0][odd] = dc_levels<dc_k_book>(dc_book_nibbles(unit[step / 2], high, dc_k::bits, odd), step % 2, 0);
    }
}

/* ---- values ---- */

/* Converts x to fp16 and returns the upper byte: the sign, the exponent and the first two fraction bits. x must not be 0. */
FKV_FN int dc_upper_byte(int x) {
    int size = x < 0 ? -x : x;
    int exponent = 0;
    while (size >> exponent > 1) exponent++;
    return (x < 0 ? 128 : 0) | (15 + exponent) << 2 | (size * 4 >> exponent) % 4;
}

/* Returns entry c of the lookup table for values. 4-bit codes have two tables; dc_value_upper_entry() returns the entries of the
 * second table. */
FKV_FN int dc_value_entry(int c) {
    if (dc_v::bits == 2) return dc_upper_byte(dc_v_book::level(c) / dc_v::unit);
    return dc_v::bits == 4 ? dc_v_book::level(c + 8) - dc_v_book::level(c) : dc_v_book::level(15) - dc_v_book::level(c);
}
FKV_FN int dc_value_upper_entry(int c) { return dc_v_book::level(15) - dc_v_book::level(c + 8); }

FKV_FN fkv_u32 dc_value_bytes(fkv_u32 nibbles) {
    fkv_u32 first = dc_table_word(dc_value_entry(0), dc_value_entry(1), dc_value_entry(2), dc_value_entry(3));
    fkv_u32 second = dc_table_word(dc_value_entry(4), dc_value_entry(5), dc_value_entry(6), dc_value_entry(7));
    fkv_u32 bytes = fkv_permute_or_sign(first, second, nibbles);
    if constexpr (dc_v::bits == 4) {
        first = dc_table_word(dc_value_upper_entry(0), dc_value_upper_entry(1), dc_value_upper_entry(2), dc_value_upper_entry(3));
        second =
            dc_table_word(dc_value_upper_entry(4), dc_value_upper_entry(5), dc_value_upper_entry(6), dc_value_upper_entry(7));
        bytes += fkv_permute_or_sign(first, second, nibbles & 0x7777u); /* no carry, because each sum fits in a byte */
    }
    return bytes;
}

/* Converts four bytes to fp16. `first` receives bytes 0 and 2 (two tokens of one channel), and `second` receives bytes 1 and 3
 * (two tokens of the next channel). */
FKV_FN void dc_value_halves(fkv_u32 bytes, fkv_u32 &first, fkv_u32 &second) {
    if constexpr (dc_v::bits == 2) {
        first = fkv_permute(bytes, 0u, 0x2404u);
        second = bytes & 0xff00ff00u;
    } else {
        fkv_u32 top = (0x6400u + (fkv_u32)dc_v_book::level(15)) * 0x10001u; /* 1024 + largest level */
        first = fkv_fma_f16x2(fkv_mask_or(bytes, 0x00ff00ffu, 0x64006400u), 0xbc00bc00u, top);
        second = fkv_fma_f16x2(fkv_permute(bytes, 0x64646464u, 0x4341u), 0xbc00bc00u, top);
    }
}

/* Implements dc_value_quad() of decode_values.h for codebook codes. */
FKV_FN void dc_book_quad(const fkv_u32 *a, const fkv_u32 *b, int quad, fkv_u32 *to) {
    if constexpr (dc_v::bits == 4) {
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            int byte = quad % 2 * 2 + i;
            dc_value_halves(dc_value_bytes(fkv_permute(a[quad / 2], b[quad / 2], (fkv_u32)((4 + byte) * 16 + byte))), to[2 * i],
                            to[2 * i + 1]);
        }
    } else {
        constexpr int high = dc_v::high_word;
        FKV_UNROLL
        for (int odd = 0; odd < 2; odd++) {
            fkv_u32 x = dc_book_nibbles(a[quad / 4], dc_half(a[high + quad / 8], quad / 4 % 2), dc_v::bits, odd);
            fkv_u32 y = dc_book_nibbles(b[quad / 4], dc_half(b[high + quad / 8], quad / 4 % 2), dc_v::bits, odd);
            dc_value_halves(dc_value_bytes(fkv_permute(x, y, (fkv_u32)((4 + quad % 4) * 16 + quad % 4))), to[odd], to[2 + odd]);
        }
    }
}
