/* Calibrated keys in decode_sealed.h: functions that load the keys of a tile and convert their codes to matrix operands, instead
 * of those in sealed_page.h and narrow_page.h. The order of tokens is the same as in these files. Channels are in the channel
 * order of the KV head (src/codec/channel_order.h), for keys and for queries.
 *
 * A dword contains one 2-bit digit of each of 16 channels (four quads of four channels) of one token. Quad i occupies the bits 2
 * * i and 2 * i + 1 of each byte. Thread c (lane % 4) handles the quads 8 * u + 2 * c and 8 * u + 2 * c + 1 of unit u (32
 * channels). The first digits of these two quads are in the same dword, as are the second digits. The third digits may be in
 * different dwords.
 */
static_assert(DC_SLABS == 1, "calibrated keys require a single slab, because each warp reads the digits of all channels");

struct sd_tile_keys {
    FKV_SHARED const fkv_u32 *at;  /* address of the first digits of the thread's first token in the warp's buffer */
    fkv_u32 c;                     /* lane % 4 */
    fkv_u32 n4, n6;                /* number of channels with at least four bits, and with six bits */
    fkv_u32 codes[SD_UNITS][4][2]; /* codes of the two quads, one per byte, for the thread's four tokens of a part */
};

/* Sets the address of the keys of a tile, which are in `buffer`. */
FKV_FN void sd_open_keys(sd_tile_keys &keys, FKV_SHARED const fkv_u32 *buffer, fkv_u32 lane) {
    fkv_u32 r = lane / 4;
    keys.c = lane % 4;
    if (SD_NARROW)
        keys.at = buffer + (SD_PARTS == 1 ? r / 4 : r / 2) * SD_K_CODE_WORDS + r % 2 * 8 + (SD_PARTS == 1 ? r / 2 % 2 * 4 : 0);
    else
        keys.at = buffer + r / 4 * SD_CODE_WORDS + r % 4 * 4;
}

/* Adds digit d of a quad to its codes. line: the dwords that contain the digits, for four tokens; shift: position of the quad's
 * digits in each byte. */
FKV_FN void sd_add_digits(const fkv_words4 &line, fkv_u32 shift, int d, int quad, fkv_u32 (&codes)[4][2]) {
    FKV_UNROLL
    for (int k = 0; k < 4; k++) {
        fkv_u32 digits = (line.w[k] >> shift & 0x03030303u) << 2 * d;
        codes[k][quad] = d == 0 ? digits : codes[k][quad] | digits;
    }
}

/* Loads the keys of 32 tokens (part p) into registers. */
FKV_FN void sd_take_part(sd_tile_keys &keys, int p) {
    FKV_SHARED const fkv_u32 *at = keys.at + p * (SD_NARROW ? 4 : 2 * SD_CODE_WORDS);
    fkv_u32 shift = keys.c % 2 * 4;
    FKV_UNROLL
    for (int u = 0; u < SD_UNITS; u++) {
        fkv_u32 quad = 8 * (fkv_u32)u + 2 * keys.c;
        fkv_words4 line = fkv_shared16(at + quad / 4 * 16);
        sd_add_digits(line, shift, 0, 0, keys.codes[u]);
        sd_add_digits(line, shift + 2, 0, 1, keys.codes[u]);
        if (quad * 4 >= keys.n4) continue;
        line = fkv_shared16(at + (FKV_D / 16 + quad / 4) * 16);
        sd_add_digits(line, shift, 1, 0, keys.codes[u]);
        if (quad * 4 + 4 < keys.n4) sd_add_digits(line, shift + 2, 1, 1, keys.codes[u]);
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            if (quad * 4 + 4 * (fkv_u32)i >= keys.n6) break;
            fkv_u32 third_quad = (FKV_D + keys.n4) / 4 + quad + (fkv_u32)i;
            sd_add_digits(fkv_shared16(at + third_quad / 4 * 16), third_quad % 4 * 2, 2, i, keys.codes[u]);
        }
    }
}

FKV_FN fkv_u32 sd_key_bytes(const sd_tile_keys &keys, int, int u, int k, int half) { return keys.codes[u][k][half]; }
FKV_FN fkv_u32 sd_key_place(fkv_u32 lane) { return lane; }
