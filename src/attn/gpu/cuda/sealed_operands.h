/* Matrix operands of sealed pages in decode_sealed.h. The source includes this file after sealed_page.h or narrow_page.h, which
 * define sd_key_bytes(), sd_selectors() and sd_look_up(), and the order of tokens and channels.
 */
/* Loads the key codes of 32 tokens (part p) into registers. If the part does not exist, nothing is loaded. */
FKV_FN void sd_take_keys(sd_tile &tile, int p) {
    if (p < SD_PARTS) sd_take_part(tile.keys, p);
}

/* Builds the A operand for the tokens i % 2 * 2 and i % 2 * 2 + 1 that the thread handles in part i / 2, and the 32 channels of
 * unit u. In sealed_page.h, thread row r (0 to 7) handles the tokens 4 * r to 4 * r + 3 of a part. */
FKV_FN void sd_key_operand(const sd_tile &tile, int i, int u, int, fkv_u32 (&a)[4]) {
    FKV_UNROLL
    for (int k = 0; k < 4; k++) a[k] = sd_key_bytes(tile.keys, i / 2, u, i % 2 * 2 + k % 2, k / 2);
}

/* Returns the score of the thread's i-th token. `both` is the dot product of the row's 16-bit integers with the token's codes,
 * combined from the dot products of the high and the low bytes. */
FKV_FN float sd_score_of(const sd_tile &, int, float both, sd_line line) { return fkv_fma(both, line.unit, line.bias); }

/* Builds the A operand for the channels i % 2 * 2 and i % 2 * 2 + 1 that the thread handles in unit i / 2, and the tokens of
 * part p. */
FKV_FN void sd_value_operand(const sd_tile &tile, int p, int i, int term, fkv_u32 (&a)[4]) {
    FKV_UNROLL
    for (int k = 0; k < 2; k++) {
        fkv_u32 x = sd_selectors(tile, p, i / 2, i % 2 * 2 + k, term);
        a[k] = sd_look_up(x, term);
        a[2 + k] = sd_look_up(fkv_upper_half(x), term);
    }
}

/* Returns the index, among the thread's accumulators, of the k-th channel that operand i covers for this thread. */
FKV_FN constexpr int sd_sum_place(int i, int k) { return 2 * i + k; }
