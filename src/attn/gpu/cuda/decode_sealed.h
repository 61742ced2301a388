/* Decode through matrix units: keys and values of sealed pages of 4 bits, in place of what decode_scores.h and decode_values.h
 * have for others; docs/page_format.md says where codes lie.
 *
 * K. score = sum over c of (q_c scale_c) code_tc, + sum over c of q_c bias_c. When a stream comes to a page it makes the operands
 * for it, each thread its own, in registers: q_c scale_c as two halves, under a power of two that keeps the largest in range. The
 * second sum is one number for each row and page. A dword of the page is 8 channels of one token; shifted and masked it is two
 * codes, each a half whose bits it is: 2^-24 times the code, exactly, which a power of two takes back.
 *
 * V. A dword is 8 tokens of one channel: those whose weights the thread has. Levels of sizes are looked up by byte permutes, and
 * a level with its sign is a half as it is, again in units of 2^-24. The norm of a token goes into its weight.
 */
#if FKV_K_SEALED
struct dc_operands {
    fkv_u32 a[dc_k::row_tiles][dc_k::steps][DC_TWICE ? 2 : 4];
};

FKV_FN fkv_words4 dc_operand(const dc_operands &operands, int tile, int step, fkv_u32) {
    const fkv_u32 *a = operands.a[tile][step];
    if constexpr (DC_TWICE)
        return {{a[0], 0u, a[1], 0u}};
    else
        return {{a[0], a[1], a[2], a[3]}};
}

FKV_FN dc_operands dc_first_operands(FKV_SHARED const fkv_u32 *, dc_place) {
    dc_operands operands = {};
    return operands;
}

/* 16 bytes of {scales, biases} of the slab's channels, by a thread each. */
FKV_FN void dc_load_lines(fkv_u32 (&to)[4], const fkv_u8 *block, dc_place at) {
    constexpr fkv_u32 lanes = DC_SLAB / 8;
    if (at.lane >= 2 * lanes) return;
    const fkv_u8 *part = block + (at.lane < lanes ? FKV_K_SCALES : FKV_K_BIASES);
    dc_stream(to, part + at.slab * (DC_SLAB * 2) + at.lane % lanes * 16, 16);
}

FKV_FN float dc_line_number(const fkv_words4 &x, int i) {
    return fkv_page_number(i % 2 == 0 ? x.w[i / 2] & 0xffffu : x.w[i / 2] >> 16);
}

/* Two numbers as halves, or what these lose. */
FKV_FN void dc_split(float x, float y, fkv_u32 &halves, fkv_u32 &rests) {
    halves = fkv_pack_f16(x, y);
    rests = fkv_pack_f16(x - fkv_f16_to_f32(halves & 0xffffu), y - fkv_f16_to_f32(halves >> 16));
}

/* The largest scale of the slab, without signs. lines: of the warp. */
FKV_FN float dc_largest_scale(FKV_SHARED const fkv_u32 *lines, fkv_u32 lane) {
    fkv_u32 largest = 0;
    FKV_UNROLL
    for (int u = 0; u < dc_k::units; u++) {
        fkv_words4 scales = fkv_shared16(lines + (4 * (fkv_u32)u + lane % 4) * 4);
        FKV_UNROLL
        for (int i = 0; i < 8; i++) largest = fkv_max_bits(largest, fkv_bits_of(dc_line_number(scales, i)) & 0x7fffffffu);
    }
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 4; h *= 2) largest = fkv_max_bits(largest, fkv_shuffle_xor_bits(largest, h));
    return fkv_float_of(largest);
}

/* Operands of one row, and with `sum` what the page's biases make of it. up: the power of two that they are under. */
FKV_FN void dc_page_row(FKV_SHARED const fkv_u32 *lines, FKV_SHARED const fkv_u32 *query, float up, fkv_u32 lane,
                        fkv_u32 (&to)[dc_k::steps][DC_TWICE ? 2 : 4], float &sum) {
    bool second = DC_TWICE && lane >= 16;
    FKV_UNROLL
    for (int u = 0; u < dc_k::units; u++) {
        fkv_u32 line = 4 * (fkv_u32)u + lane % 4; /* of 8 channels */
        fkv_words4 scales = fkv_shared16(lines + line * 4);
        fkv_words4 biases = fkv_shared16(lines + DC_SLAB / 2 + line * 4);
        const fkv_words4 q[2] = {fkv_shared16(query + line * 8), fkv_shared16(query + line * 8 + 4)};
        float x[8];
        FKV_UNROLL
        for (int i = 0; i < 8; i++) {
            float number = fkv_float_of(q[i / 4].w[i % 4]);
            x[i] = fkv_mul(fkv_mul(number, dc_line_number(scales, i)), up);
            sum = fkv_fma(number, dc_line_number(biases, i), sum);
        }
        FKV_UNROLL
        for (int i = 0; i < 4; i++) { /* channels {0, 2}, {4, 6} of the first product, {1, 3}, {5, 7} of the second */
            int first = i / 2 + i % 2 * 4;
            fkv_u32 halves;
            fkv_u32 rests;
            dc_split(x[first], x[first + 2], halves, rests);
            fkv_u32 *a = to[2 * u + i / 2];
            if constexpr (DC_TWICE) {
                a[i % 2] = second ? rests : halves;
            } else {
                a[2 * (i % 2)] = halves;
                a[2 * (i % 2) + 1] = rests;
            }
        }
    }
}

FKV_FN void dc_enter_page(const fkv_u32 (&given)[4], FKV_SHARED fkv_u32 *shared, dc_place at, dc_rows &rows,
                          dc_operands &operands) {
    FKV_SHARED fkv_u32 *lines = shared + DC_AT_SCALES + at.warp * DC_SCALES_WORDS + DC_AT_LINES;
    FKV_SHARED const float *largest = (FKV_SHARED const float *)shared + DC_AT_STEPS;
    fkv_sync_warp(); /* the last page's were read */
    FKV_UNROLL
    for (fkv_u32 i = 0; i < 4; i++)
        if (at.lane < DC_SLAB / 4) lines[at.lane * 4 + i] = given[i];
    fkv_sync_warp();
    float scale = dc_largest_scale(lines, at.lane);
    FKV_UNROLL
    for (int n = 0; n < DC_OWN_ROWS; n++) {
        fkv_u32 row = DC_TWICE ? at.lane / 4 % 4 : at.lane / 4 + 8 * (fkv_u32)n;
        fkv_u32 exponent = fkv_bits_of(fkv_mul(largest[row], scale)) >> 23 & 255u; /* products are below 2^(exponent - 126) */
        exponent = exponent < 20 ? 20 : exponent > 240 ? 240 : exponent;
        float sum = 0.0f;
        dc_page_row(lines, shared + row * FKV_D + at.slab * DC_SLAB, fkv_float_of((267 - exponent) << 23), at.lane, operands.a[n],
                    sum);
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 4; h *= 2) sum += fkv_shuffle_xor(sum, h);
        rows.query_sum[n][0] = DC_TWICE && at.lane >= 16 ? 0.0f : sum;
        rows.step[n][0] = rows.step[n][1] = fkv_float_of((exponent + 11) << 23);
    }
}

/* Tokens DC_RUN r + b of the tile: neighbours in a line. */
FKV_FN void dc_load_keys(dc_keys &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 token = slot + DC_RUN * (at.lane / 4);
    const fkv_u8 *codes =
        block + FKV_K_CODES + token / 16 * (16 * dc_k::row_bytes) + token % 16 * 4 + at.slab * (DC_SLAB * 8) + at.lane % 4 * 64;
    FKV_UNROLL
    for (int u = 0; u < dc_k::units; u++) {
        fkv_u32 x[DC_RUN];
        dc_stream(x, codes + u * 256, 4 * DC_RUN);
        FKV_UNROLL
        for (int b = 0; b < DC_RUN; b++) to.codes[b][u][0] = x[b];
    }
}

FKV_FN void dc_key_operand(const fkv_u32 *unit, int step, fkv_u32 &low, fkv_u32 &high) {
    fkv_u32 x = unit[0] >> 8 * step;
    low = x & 0x000f000fu;
    high = x >> 4 & 0x000f000fu;
}
#endif

#if FKV_V_SEALED
/* Own tokens of a thread: 8 or 4 neighbours, so all or half of the nibbles of a line's dwords. */
FKV_FN void dc_load_values(dc_values &to, const fkv_u8 *block, fkv_u32 slot, dc_place at) {
    fkv_u32 token = slot + DC_OWN_TOKENS * (at.lane % 4);
    fkv_u32 r = at.lane / 4;
    const fkv_u8 *codes = block + FKV_V_CODES + token / 16 * (16 * dc_v::row_bytes) + token % 16 / 8 * 64 +
                          at.slab * (DC_SLAB * 8) + r / 4 * 128 + r % 4 * 16;
    FKV_UNROLL
    for (int u = 0; u < dc_v::units; u++) dc_stream(to.codes[0][u], codes + u * 256, 16);
}

/* The levels of sizes 0 to 3, and 4 to 7. */
FKV_FN constexpr fkv_u32 dc_levels(int first) {
    const fkv_u32 levels[] = {FKV_V_LEVELS};
    return levels[first] | levels[first + 1] << 8 | levels[first + 2] << 16 | levels[first + 3] << 24;
}

/* A channel's values of tokens {b, DC_RUN + b} of a thread, as halves in units of 2^-24: the level and its sign. */
FKV_FN void dc_value_halves(fkv_u32 x, fkv_u32 lane, fkv_u32 (&to)[DC_RUN]) {
    if constexpr (DC_RUN == 4) { /* byte b: token b, then 4 + b */
        FKV_UNROLL
        for (int i = 0; i < 2; i++) {
            fkv_u32 codes = x >> 16 * i;
            fkv_u32 levels = fkv_permute(dc_levels(0), dc_levels(4), codes & 0x7777u);
            fkv_u32 signs = fkv_nibble_signs(codes);
            to[2 * i] = fkv_permute(levels, signs, 0x5140u);
            to[2 * i + 1] = fkv_permute(levels, signs, 0x7362u);
        }
    } else { /* byte b: token b, in the lower or the upper half */
        fkv_u32 nibbles = x >> lane % 2 * 4 & 0x0f0f0f0fu;
        nibbles |= nibbles >> 4;
        fkv_u32 codes = fkv_permute(nibbles, 0u, 0x4420u);
        fkv_u32 levels = fkv_permute(dc_levels(0), dc_levels(4), codes & 0x7777u);
        fkv_u32 signs = fkv_nibble_signs(codes);
        to[0] = fkv_permute(levels, signs, 0x6240u);
        to[1] = fkv_permute(levels, signs, 0x7351u);
    }
}
#endif
