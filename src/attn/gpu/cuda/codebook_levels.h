/* Converts codebook codes (TurboQuant) to signed bytes with byte permutes. Each nibble of a permute's selector chooses one of
 * eight bytes, so codes are first expanded to nibbles. In a word of 2-bit or 3-bit codes, the even codes are expanded first, then
 * the odd codes after a shift. A permute inserts the high bits of 3-bit codes. 4-bit codes are nibbles already.
 *
 * For a selector nibble above 7, the result is the replicated sign bit of the byte that the lower three bits select. 4-bit codes
 * are therefore looked up in two tables of eight entries each. Let value(c) be the signed byte for code c. Entry c of the first
 * table is value(c) - value(c + 8) - 1, which is negative, so the first lookup gives -1 for codes above 7. Entry c of the second
 * table is value(c + 8) + 1, and the second lookup ignores bit 3 of the code. The sum of both lookups is the value of the
 * code.
 */
/* Packs four table entries into a word. */
FKV_FN fkv_u32 dc_table_word(int a, int b, int c, int d) {
    return ((fkv_u32)a & 255u) | ((fkv_u32)b & 255u) << 8 | ((fkv_u32)c & 255u) << 16 | (fkv_u32)d << 24;
}

/* Returns the lower or the upper 16 bits of a word, for use as a permute selector. */
FKV_FN fkv_u32 dc_half(fkv_u32 x, int upper) { return upper != 0 ? fkv_upper_half(x) : x; }

/* Expands the even codes (or the odd codes, if `odd` is nonzero) of 16 codes to nibbles. `low` holds the low two bits of each
 * code. `high` holds the high bits of 3-bit codes and is ignored for 2-bit codes. */
FKV_FN fkv_u32 dc_book_nibbles(fkv_u32 low, fkv_u32 high, int bits, int odd) {
    if (odd != 0) low = fkv_shifted_right<2>(low);
    if (bits == 2) return low & 0x33333333u;
    if (odd != 0) high = fkv_shifted_right<1>(high);
    /* moves bits 0 and 2 of each nibble of `high` to bits 2 and 6 of a byte */
    fkv_u32 spread = fkv_permute_or_sign(0x04000400u, 0x44404440u, high & 0x7777u);
    return fkv_mask_or(low, 0x33333333u, spread);
}

struct dc_k_book {
    static constexpr int bits = FKV_K_BITS;
    FKV_FN int level(int c) {
        const int values[] = {FKV_K_BOOK_VALUES};
        return values[c];
    }
};
struct dc_v_book {
    static constexpr int bits = FKV_V_BITS;
    FKV_FN int level(int c) {
        const int values[] = {FKV_V_BOOK_VALUES};
        return values[c];
    }
};

/* Returns entry c of a lookup table. 4-bit codes have two tables, which the comment at the top of this file defines: term 0
 * selects the first table, and term 1 selects the second. */
template <class BOOK> FKV_FN int dc_level(int c, int term) {
    if (BOOK::bits < 4) return BOOK::level(c);
    return term == 0 ? BOOK::level(c) - BOOK::level(c + 8) - 1 : BOOK::level(c + 8) + 1;
}

/* Looks up four nibbles of a word (the upper four if `upper` is 1, the lower four if it is 0) and returns the results as bytes.
 * The value of a 4-bit code is the sum of two terms; only the term with index `term` is returned. */
template <class BOOK> FKV_FN fkv_u32 dc_levels(fkv_u32 nibbles, int upper, int term) {
    fkv_u32 first =
        dc_table_word(dc_level<BOOK>(0, term), dc_level<BOOK>(1, term), dc_level<BOOK>(2, term), dc_level<BOOK>(3, term));
    fkv_u32 second =
        dc_table_word(dc_level<BOOK>(4, term), dc_level<BOOK>(5, term), dc_level<BOOK>(6, term), dc_level<BOOK>(7, term));
    fkv_u32 chosen = term == 0 ? nibbles : nibbles & 0x77777777u;
    return fkv_permute_or_sign(first, second, dc_half(chosen, upper));
}
