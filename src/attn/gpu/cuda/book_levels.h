/* Codes of a book (TurboQuant) to what they stand for, bytes with sign, by byte permutes. A nibble of a permute chooses one of
 * eight bytes, so codes become nibbles:
 *
 *   2 bits  every other code of a word, the rest by a shift
 *   3 bits  the same, and a permute spreads the high bits over them
 *   4 bits  as they are. A nibble above 7 gives the sign of the byte that its lower bits choose, so two tables of eight together
 *           make sixteen: what codes below 8 are worth beside those above, and what those above are worth. They are added up
 */
/* Four bytes of a table. */
FKV_FN fkv_u32 dc_table_word(int a, int b, int c, int d) {
    return ((fkv_u32)a & 255u) | ((fkv_u32)b & 255u) << 8 | ((fkv_u32)c & 255u) << 16 | (fkv_u32)d << 24;
}

/* The lower half of a word, or the upper one, as a permute takes it. */
FKV_FN fkv_u32 dc_half(fkv_u32 x, int upper) { return upper != 0 ? fkv_upper_half(x) : x; }

/* 16 codes as nibbles: those in even places, or in odd ones. high: their high bits, where they have three. */
FKV_FN fkv_u32 dc_book_nibbles(fkv_u32 low, fkv_u32 high, int bits, int odd) {
    if (odd != 0) low = fkv_shifted_right<2>(low);
    if (bits == 2) return low & 0x33333333u;
    if (odd != 0) high = fkv_shifted_right<1>(high);
    fkv_u32 spread = fkv_permute_or_sign(0x04000400u, 0x44404440u, high & 0x7777u); /* bits 0 and 2 to 2 and 6 */
    return fkv_mask_or(low, 0x33333333u, spread);
}

/* The sides' books. */
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

/* Entry c of a table; of 4 bits that of codes below 8, whose bytes have a sign, or of those above. */
template <class BOOK> FKV_FN int dc_level(int c, int term) {
    if (BOOK::bits < 4) return BOOK::level(c);
    return term == 0 ? BOOK::level(c) - BOOK::level(c + 8) - 1 : BOOK::level(c + 8) + 1;
}

/* What four of eight nibbles stand for, the lower or the upper ones: all of it, or of 4 bits one of two terms. */
template <class BOOK> FKV_FN fkv_u32 dc_levels(fkv_u32 nibbles, int upper, int term) {
    fkv_u32 first =
        dc_table_word(dc_level<BOOK>(0, term), dc_level<BOOK>(1, term), dc_level<BOOK>(2, term), dc_level<BOOK>(3, term));
    fkv_u32 second =
        dc_table_word(dc_level<BOOK>(4, term), dc_level<BOOK>(5, term), dc_level<BOOK>(6, term), dc_level<BOOK>(7, term));
    fkv_u32 chosen = term == 0 ? nibbles : nibbles & 0x77777777u;
    return fkv_permute_or_sign(first, second, dc_half(chosen, upper));
}
