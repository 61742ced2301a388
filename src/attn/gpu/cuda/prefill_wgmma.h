/* Prefill on warpgroups, last part and the whole. Attention of queries over packed pages: on warpgroups (sm_90a) and, played by
 * hand, on the host. Blocks: (tile of the step table, KV head, slice of FKV_PREFILL_ROWS rows: queries x heads). No score ever
 * leaves the block.
 *
 * Three warpgroups. The first unpacks (prefill_unpack.h); of sealed pages two do, or bring what other blocks unpacked
 * (prefill_sealed.h, prefill_share.h). The last two multiply and do the softmax, 64 rows each (heads beyond
 * 256: the same 64 rows, half of V's channels each). Products run beside their threads: while the weights of one tile of keys are
 * worked out, the values of the tile before are summed and the other warpgroup's scores are made. The two take turns at that; of
 * sealed pages they do not.
 *
 * Scores are exact up to float sums: codes of K are whole numbers, so halves without rounding; a product runs over the codes of
 * one group, and its scale and bias are applied to the float sum:  score = sum over groups of s . (q . codes) + b . sum(q).
 * Where there are one or two groups and q is one half a number, the biases are channels too (pf_put_biases()): that spares a
 * read of shared memory and half of the arithmetic for each sum, where all else waits for it.
 * Rounding K's values to halves instead would be faster, and off by 2e-2 where a few channels are 20 times larger, as real keys'
 * are. Queries are halves after a power of two is taken out of each row; where a row's numbers have more bits (float rows,
 * rotated rows) there are two halves of each, and two products.
 *
 * Channels lie in shared memory in the order that unpacking likes best (pf_side::channel()): q is stored in K's order, and out is
 * read in V's.
 *
 * Same answer however it got there: tiles of keys begin at multiples of PF_KEYS, and a tile that a row does not see adds zeroes.
 * Sums are scaled only where a row's largest score grew, which is rare behind the first tiles; each row decides for itself.
 * (Letting scores exceed an older maximum would spare some of that, and cost accuracy: the weight of the largest score is then
 * not 1, but a rounded half.)
 *
 * Ladder: 512 queries x 32 heads on 131072 tokens, 8 KV heads of 128, K8/V4, fp16 rows, H200.
 *   4180 us   pages read into registers a tile ahead, queries from shared memory: products 30 % of the time
 *   4018 us   warpgroups take turns
 *   3683 us   queries in registers: a third fewer bytes of shared memory for scores
 *   3120 us   pages by the copy engine, packed bytes read before the first store, scales before the sums are there
 *   2964 us   unpacking without spills and selects, page numbers asked for behind the fence
 *   2744 us   scales read ahead of the products, values issued behind the shuffles, one fence for each tile
 *   2700 us   biases as channels: half the scales; now all wait for unpacking
 *   2253 us   216 registers for multiplying, 72 for unpacking, biases read with the codes: nothing spilled
 *   2239 us   places of values as sums
 * Sealed pages of 4 bits, the same otherwise (the 8/4 text in the same hour: 2376 us):
 *   3769 us   one warpgroup unpacks keys and values: all wait for it
 *   3363 us   one for keys and one for values, scales shared out over the threads, no product with 2^15 for each value
 *   2632 us   a warp of keys has all tokens of its channels, and waits for no other; a logic operation and one fused multiply-add
 *             for two codes; places kept in registers
 *   2434 us   scales of seven bits: no product for what halves leave
 *   2828 us   pages unpacked once for 16 blocks (prefill_share.h), one thread that asks, brings and tells
 *   2143 us   a thread for each of the three
 *   2096 us   keys and values brought by two (2119 on another day)
 *   2038 us   no turns, and values issued right behind the scores
 *   2019 us   a loop of its own for shared pages, which needs no masks and no open pages: a fourth fewer instructions
 *   2012 us   norms in the weights: halves of seven bits as values
 *   1984 us   the offsets of four pages in one product: 64 keys for most tiles, where all had 72
 * It waits for power: with nobody unpacking it took 1862 of 2118, but then the numbers were zeroes; with real ones the device
 * lowers its clock from 1980 to 1750 MHz, at 700 W. And for instructions: with a loop for tiles with offsets and one for those
 * without, of 680 instructions in all, 2198 us, of 870 2400. Asking for all slots of a ring at once: no faster. Four stages: 1 %
 * faster, but with room for one packed page only, which blocks that unpack for themselves need. Two blocks in a cluster, with
 * pages brought once for both: 3725, since too few pairs of multiprocessors are free at a time.
 * Others, all with the same bits, by turns with this text in one process, four times each. After a pause, where this text took
 * 1991 to 2009: places of products in uniform registers, 374 instructions for 414, 1994 to 2014; offsets issued with the scores
 * and waited for with them 2012 to 2018; both 2006 to 2016. Without a pause, where it took 1979 to 2070, which hides differences
 * below 2 %: maxima of a row in two chains 1973 to 2058; turns from issue to issue 2006 to 2067; four stages with two packed
 * pages, the one that is unpacked for others in the room of PF_AT_LOW, 1975 to 2066. With these four stages blocks that unpack
 * for themselves took 2486 to 2506, with three 2399 to 2420.
 */
/* ---- queries and outputs ---- */

FKV_FN fkv_u64 pf_row_at(const pf_item &x, fkv_u32 row) {
    fkv_u32 r = x.first_row + row;
    return ((fkv_u64)(x.first_token + r / FKV_R) * FKV_H + x.head * FKV_R + r % FKV_R) * FKV_D;
}

FKV_FN float pf_warp_max(float x) {
    for (int m = 16; m > 0; m /= 2) {
        float y = fkv_shuffle_xor(x, m);
        x = y > x ? y : x;
    }
    return x;
}
FKV_FN float pf_warp_sum(float x) {
    for (int m = 16; m > 0; m /= 2) x += fkv_shuffle_xor(x, m);
    return x;
}

/* A rotation of a row in shared memory by one warp, as docs/page_format.md says it; undo: the signs come last. */
template <bool K> FKV_FN void pf_rotate(fkv_shared s, float *row, bool undo) {
    fkv_u32 lane = s.index % 32;
    for (fkv_u32 d = lane; d < FKV_D && !undo; d += 32)
        row[d] = fkv_float_of(fkv_bits_of(row[d]) ^ (K ? fkv_k_sign(d) : fkv_v_sign(d)));
    fkv_sync_warp();
    for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        for (fkv_u32 i = lane; i < FKV_D / 2; i += 32) {
            fkv_u32 d = i / h * 2 * h + i % h;
            float a = row[d], b = row[d + h];
            row[d] = a + b;
            row[d + h] = a - b;
        }
        fkv_sync_warp();
    }
    for (fkv_u32 d = lane; d < FKV_D; d += 32) {
        float y = row[d] * fkv_rotation_norm();
        row[d] = undo ? fkv_float_of(fkv_bits_of(y) ^ (K ? fkv_k_sign(d) : fkv_v_sign(d))) : y;
    }
    fkv_sync_warp();
}

/* Where the half at `place` of a row of queries lies. */
FKV_FN fkv_u16 *pf_query_at(fkv_shared s, fkv_u32 row, fkv_u32 place) {
    return (fkv_u16 *)(s.base + PF_AT_Q + place / 64 * (PF_ROWS * 128) + row * 128 + ((place % 64 / 8) ^ (row % 8)) * 16) +
           place % 8;
}

constexpr int PF_LANE_CHANNELS = (FKV_D + 31) / 32;

FKV_FN void pf_fetch_query(const pf_item &x, const void *q, fkv_u32 row, fkv_u32 lane, float *numbers) {
    if (row >= x.n_rows) return;
    FKV_UNROLL for (int i = 0; i < PF_LANE_CHANNELS; i++) {
        fkv_u32 d = lane + 32 * (fkv_u32)i;
        numbers[i] = d < FKV_D ? fkv_row_number(q, pf_row_at(x, row) + d) : 0.0f;
    }
}

/* Queries into shared memory as halves, by all warps, a row at a time; the next one is on its way. */
FKV_FN void pf_load_queries(fkv_shared s, const pf_item &x, const void *q) {
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    float *row = (float *)(s.base + PF_AT_K) + warp * FKV_D;
    float scale = fkv_float_of(FKV_SCALE_BITS);
    float sign = scale < 0 ? -1.0f : 1.0f;
    float numbers[PF_LANE_CHANNELS];
    pf_fetch_query(x, q, warp, lane, numbers);
    for (fkv_u32 r = warp; r < PF_ROWS; r += PF_THREADS / 32) {
        if (r >= x.n_rows) { /* whatever comes of these is not stored */
            for (fkv_u32 place = lane; place < FKV_D; place += 32)
                for (int part = 0; part < PF_PARTS; part++) pf_query_at(s, r, place)[part * (PF_Q_BYTES / 2)] = 0;
            continue;
        }
        FKV_UNROLL for (int i = 0; i < PF_LANE_CHANNELS; i++) if (lane + 32 * (fkv_u32)i < FKV_D) row[lane + 32 * (fkv_u32)i] =
            sign * numbers[i];
        pf_fetch_query(x, q, r + PF_THREADS / 32, lane, numbers);
        fkv_sync_warp();
        if (FKV_ROTATE_K) pf_rotate<true>(s, row, false);
        float largest = 0;
        for (fkv_u32 d = lane; d < FKV_D; d += 32) largest = fkv_max(largest, fkv_abs(row[d]));
        fkv_u32 exponent = fkv_bits_of(pf_warp_max(largest)) >> 23;
        if (exponent == 0 || exponent > 253) exponent = 127;
        float down = fkv_float_of((254 - exponent) << 23);
        for (fkv_u32 d = lane; d < FKV_D; d += 32) { /* what the halves will say: the sums are of that */
            float y = row[d] * down;
            float high = fkv_f16_to_f32(fkv_f32_to_f16(y));
            row[d] = PF_PARTS == 1 ? high : high + fkv_f16_to_f32(fkv_f32_to_f16(y - high));
        }
        fkv_sync_warp();
        for (fkv_u32 place = lane; place < FKV_D; place += 32) {
            float y = row[pf_k_channel(place)];
            fkv_u32 high = fkv_f32_to_f16(y);
            fkv_u16 *to = pf_query_at(s, r, place);
            to[0] = (fkv_u16)high;
            if (PF_PARTS == 2) to[PF_Q_BYTES / 2] = (fkv_u16)fkv_f32_to_f16(y - fkv_f16_to_f32(high));
        }
        for (fkv_u32 g = 0; g < PF_GROUPS && PF_SCALED; g++) {
            float sum = 0;
            for (fkv_u32 d = g * FKV_K_GROUP + lane; d < (g + 1) * FKV_K_GROUP; d += 32) sum += row[d];
            sum = pf_warp_sum(sum);
            if (lane == 0) ((float *)(s.base + PF_AT_SUMS))[g * PF_ROWS + r] = sum;
        }
        if (lane == 0) ((float *)(s.base + PF_AT_FACTORS))[r] = scale * sign * fkv_float_of(exponent << 23);
        fkv_sync_warp();
    }
}

/* Rows of out from shared memory, by all warps. */
FKV_FN void pf_store_outputs(fkv_shared s, const pf_item &x, void *out) {
    int warp = (int)s.index / 32, lane = (int)s.index % 32;
    for (int r = warp; (fkv_u32)r < x.n_rows; r += PF_THREADS / 32) {
        float *row = (float *)s.base + r * PF_OUT_STRIDE;
        if (FKV_ROTATE_V) pf_rotate<false>(s, row, true);
        fkv_u64 at = pf_row_at(x, (fkv_u32)r);
        bool odd = s.base[PF_AT_ODD + r] != 0;
        for (int d = lane; d < FKV_D; d += 32) fkv_put_row_number(out, at + (fkv_u64)d, odd ? fkv_float_of(0x7fc00000u) : row[d]);
    }
}

/* ---- products and softmax ---- */

/* The first row of a multiplying thread; its other one is 8 further. */
FKV_FN fkv_u32 pf_first_row(fkv_shared s) {
    fkv_u32 of_group = s.index % 128 / 32 * 16 + s.index % 32 / 4;
    return PF_HALVES ? of_group : (s.index / 128 - PF_FEEDERS) * 64 + of_group;
}

struct pf_row_state {
    float factor; /* from a score's sum to the exponent of 2 */
    float top;    /* largest, as a sum */
    float total;  /* of this thread's weights */
};

FKV_FN fkv_u32 pf_step_unit(int group, int step) { /* unit of the first of 16 channels */
#if !FKV_SEALED
    constexpr int pairs = pf_k::per_group / 2 > 0 ? pf_k::per_group / 2 : 1;
    if (pf_k::spread && PF_SCALED) return (fkv_u32)(step / pairs * pf_k::chunks + group * pf_k::per_group + step % pairs * 2);
#endif
    return (fkv_u32)((group * PF_GROUP_STEPS + step) * 2);
}

/* Of one thread of each warpgroup, in all what the block began with: 504 of three, 512 of four. */
constexpr int PF_REGS_MULTIPLY = FKV_SEALED ? 192 : 216;
constexpr int PF_REGS_UNPACK = FKV_SEALED ? 256 - PF_REGS_MULTIPLY : 504 - 2 * PF_REGS_MULTIPLY;

constexpr bool PF_TURNS = !FKV_SEALED; /* the warpgroups take them at their scores */
constexpr bool PF_SUMS_HELD = PF_SCALED && PF_GROUPS <= 2 && !PF_BIASED;

/* What a multiplying warpgroup keeps from tile to tile. */
struct pf_rows {
    int group;         /* of the two */
    fkv_u32 q_at;      /* places in units of 16 bytes */
    fkv_u32 v_at;      /* of stage 0 */
    fkv_u32 low, high; /* positions of the first and the last row */
    pf_row_state state[2];
    float sums[2][2];                        /* of q, by group */
    fkv_u32 sum_halves[PF_BIASED ? 4 : 1];   /* the same, as q of the biases */
    fkv_u32 held[PF_Q_HELD ? FKV_D / 4 : 1]; /* q */
    fkv_u32 p[PF_KEYS / 4];
    float o[PF_COLS / 2];
    float offset[2]; /* of the two rows, of one of four pages */
};

/* Scores of one group of channels of KEYS keys at k_at, in a tile of ROWS. ADD: to what acc has. */
template <int KEYS, int ROWS, bool ADD>
FKV_FN void pf_issue_products(fkv_shared s, int group, fkv_u32 k_at, const pf_rows &r, float *acc) {
    FKV_UNROLL for (int part = 0; part < PF_PARTS; part++) {
        FKV_UNROLL for (int step = 0; step < PF_GROUP_STEPS; step++) {
            fkv_u32 unit = pf_step_unit(group, step);
            fkv_u32 k = k_at + unit / 8 * (ROWS * 8) + unit % 8;
            if constexpr (PF_Q_HELD) {
                if (step == 0 && !ADD)
                    fkv_wg_scores_held<KEYS, false>(s, acc, r.held + unit * 2, k);
                else
                    fkv_wg_scores_held<KEYS, true>(s, acc, r.held + unit * 2, k);
            } else {
                fkv_u32 q = r.q_at + (fkv_u32)(part * (PF_Q_BYTES / 16)) + unit / 8 * (PF_ROWS * 8) + unit % 8;
                if (part + step == 0 && !ADD)
                    fkv_wg_scores<KEYS, false>(s, acc, q, k);
                else
                    fkv_wg_scores<KEYS, true>(s, acc, q, k);
            }
        }
    }
    fkv_wg_commit();
}

FKV_FN fkv_u32 pf_keys_at(fkv_shared s, int stage) {
    return s.unit + (fkv_u32)(PF_AT_K / 16) + (fkv_u32)stage * (PF_K_BYTES / 16);
}

/* Scores of one group; where biases are channels, those of all groups belong to the first. */
FKV_FN void pf_issue_group(fkv_shared s, int group, int stage, const pf_rows &r, float *acc) {
    if constexpr (PF_BIASED) {
        fkv_u32 biases_at = s.unit + (fkv_u32)(PF_AT_BIASES / 16) + (fkv_u32)stage * (PF_BIASES_BYTES / 16);
        if (group == 0) {
            fkv_wg_scores_held<PF_KEYS, false>(s, acc, r.sum_halves, biases_at);
            return pf_issue_products<PF_KEYS, PF_KEYS, true>(s, group, pf_keys_at(s, stage), r, acc);
        }
    }
    pf_issue_products<PF_KEYS, PF_KEYS, false>(s, group, pf_keys_at(s, stage), r, acc);
}

FKV_FN void pf_issue_values(fkv_shared s, fkv_u32 v_at, const fkv_u32 *p, float *o) {
    FKV_UNROLL for (int step = 0; step < PF_KEYS / 16; step++) {
        if constexpr (FKV_SEALED != 0) /* rows are channels, as those of keys are keys */
            fkv_wg_scores_held<PF_COLS, true>(s, o, p + 4 * step, v_at + (fkv_u32)step * 2);
        else
            fkv_wg_values<PF_KEYS, PF_COLS>(s, o, p + 4 * step, v_at + (fkv_u32)step * 128);
    }
    fkv_wg_commit();
}

/* Scales of the keys of this thread's sums: scale and bias of two keys each, of one group; where biases are channels, four
 * scales each, of all groups. */
constexpr int PF_SCALES_HELD = PF_BIASED ? PF_GROUPS * PF_KEYS / 16 : PF_KEYS / 8;
struct pf_scales {
    pf_floats4 of[PF_SCALES_HELD];
};
constexpr int PF_AHEAD = PF_BIASED && PF_SCALES_HELD > 5 ? 5 : PF_SCALES_HELD; /* read ahead of the products: more would spill */

FKV_FN const pf_floats4 *pf_scales_at(fkv_shared s, int group, int stage) {
    return (const pf_floats4 *)(s.base + PF_AT_SCALES + stage * PF_SCALES_BYTES) + group * (PF_KEYS / 2) + s.index % 4;
}

FKV_FN void pf_load_scales(fkv_shared s, int stage, int from, int to, pf_scales &scales) {
    FKV_UNROLL for (int j = from; j < to; j++) scales.of[j] = pf_scales_at(s, 0, stage)[4 * j];
}

/* x (+)= s . acc */
FKV_FN void pf_fold_scaled(int group, const pf_scales &scales, const float *acc, float *x) {
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
        pf_floats4 four = scales.of[group * (PF_KEYS / 16) + i / 8];
        float scale = i / 4 % 2 == 0 ? (i % 2 == 0 ? four.x : four.y) : (i % 2 == 0 ? four.z : four.w);
        x[i] = group == 0 ? scale * acc[i] : fkv_fma(scale, acc[i], x[i]);
    }
}

/* x (+)= s . acc + b . sum(q). Each scale makes room for the next group's. */
FKV_FN void pf_fold_group(fkv_shared s, int group, int stage, pf_scales &scales, float sum0, float sum1, const float *acc,
                          float *x) {
    FKV_UNROLL for (int j = 0; j < PF_KEYS / 8; j++) {
        pf_floats4 sb = scales.of[j];
        x[4 * j] = fkv_fma(sb.x, acc[4 * j], group == 0 ? sb.y * sum0 : fkv_fma(sb.y, sum0, x[4 * j]));
        x[4 * j + 1] = fkv_fma(sb.z, acc[4 * j + 1], group == 0 ? sb.w * sum0 : fkv_fma(sb.w, sum0, x[4 * j + 1]));
        x[4 * j + 2] = fkv_fma(sb.x, acc[4 * j + 2], group == 0 ? sb.y * sum1 : fkv_fma(sb.y, sum1, x[4 * j + 2]));
        x[4 * j + 3] = fkv_fma(sb.z, acc[4 * j + 3], group == 0 ? sb.w * sum1 : fkv_fma(sb.w, sum1, x[4 * j + 3]));
        if (group + 1 < PF_GROUPS) scales.of[j] = pf_scales_at(s, group + 1, stage)[4 * j];
    }
}

/* What turns a tile's sums into the rows' scores, which are unit . (x + offset): of sealed pages; else x itself. */
struct pf_tile_unit {
    float unit;
    float offset[2]; /* of the two rows */
};

FKV_FN pf_tile_unit pf_unit_of(fkv_shared s, float unit, const pf_rows &r, fkv_u32 of_four) {
    pf_tile_unit u = {unit, {0.0f, 0.0f}};
    if (FKV_SEALED)
        FKV_UNROLL for (int i = 0; i < 2; i++) u.offset[i] =
            fkv_shuffle(r.offset[i], s.index % 32 / 4 * 4 + of_four); /* a lane of four has one page's */
    return u;
}

/* x: sums of the keys of one tile. The rows' largest follow them; shrink: by how much their earlier sums must be scaled. */
FKV_FN void pf_follow_top(fkv_shared s, const pf_item &item, float *x, const pf_tile_unit &u, fkv_u32 first_key, bool masked,
                          pf_row_state *row, float *shrink) {
    const float none = fkv_float_of(0xff800000u);
    const bool offset = FKV_SEALED != 0 && FKV_SOFTCAP_BITS == 0; /* the largest sum is looked for before it is a score */
    if (FKV_SOFTCAP_BITS != 0) FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
            float sum = FKV_SEALED ? (x[i] + u.offset[i / 2 % 2]) * u.unit : x[i];
            x[i] = fkv_cap(sum * row[i / 2 % 2].factor);
        }
    if (masked) {
        fkv_u32 position[2] = {pf_position(item, pf_first_row(s)), pf_position(item, pf_first_row(s) + 8)};
        FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
            fkv_u32 token = first_key + (fkv_u32)(i / 4 * 8 + (int)s.index % 4 * 2 + i % 2);
            if (!fkv_sees(position[i / 2 % 2], token)) x[i] = none;
        }
    }
    float top[2] = {offset ? none : row[0].top, offset ? none : row[1].top};
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) top[i / 2 % 2] = fkv_max(top[i / 2 % 2], x[i]);
    if (offset) FKV_UNROLL for (int r = 0; r < 2; r++) top[r] = fkv_max(row[r].top, (top[r] + u.offset[r]) * u.unit);
    FKV_UNROLL for (int m = 1; m <= 2; m++) FKV_UNROLL for (int r = 0; r < 2; r++) top[r] =
        fkv_max(top[r], fkv_shuffle_xor(top[r], (fkv_u32)m));
    FKV_UNROLL for (int r = 0; r < 2; r++) {
        shrink[r] = fkv_exp2((row[r].top - top[r]) * (FKV_SOFTCAP_BITS != 0 ? 1.0f : row[r].factor));
        row[r].top = top[r];
    }
}

/* x: sums -> weights. */
FKV_FN void pf_weigh(float *x, const pf_tile_unit &u, pf_row_state *row, const float *shrink) {
    FKV_UNROLL for (int r = 0; r < 2; r++) {
        float factor = FKV_SOFTCAP_BITS != 0 ? 1.0f : row[r].factor;
        float base = -row[r].top * factor;
        if (FKV_SEALED && FKV_SOFTCAP_BITS == 0) {
            base = fkv_fma(u.offset[r], u.unit, -row[r].top) * factor;
            factor *= u.unit;
        }
        base += (float)PF_WEIGHT_EXPONENT;
        float total = 0;
        FKV_UNROLL for (int j = 0; j < PF_KEYS / 8; j++) {
            x[4 * j + 2 * r] = fkv_exp2(fkv_fma(x[4 * j + 2 * r], factor, base));
            x[4 * j + 2 * r + 1] = fkv_exp2(fkv_fma(x[4 * j + 2 * r + 1], factor, base));
            total += x[4 * j + 2 * r] + x[4 * j + 2 * r + 1];
        }
        row[r].total = fkv_fma(row[r].total, shrink[r], total);
    }
}

#if FKV_SEALED
/* Of one page of four for each lane of four. */
FKV_FN void pf_score_offsets(fkv_shared s, int stage, pf_rows &r) {
    float sums[4] = {0, 0, 0, 0};
    fkv_wg_begin();
    pf_issue_products<PF_MORE_KEYS, PF_K_ROWS, false>(s, 0, pf_keys_at(s, stage) + PF_KEYS * 8, r, sums);
    fkv_wg_wait<0>();
    fkv_wg_settle<4>(sums);
    FKV_UNROLL for (int i = 0; i < 2; i++) r.offset[i] = sums[2 * i] + sums[2 * i + 1];
}

/* x: sums of one tile's keys. Of an open page, what all its halves leave is a product more. Of a shared one, the values of the
 * tile before are on their way behind them. */
template <bool SHARED>
FKV_FN void pf_score(fkv_shared s, const pf_item &item, fkv_u32 key, int stage, fkv_u32 v_at, pf_rows &r, float *x) {
    fkv_wg_begin();
    pf_issue_products<PF_KEYS, PF_K_ROWS, false>(s, 0, pf_keys_at(s, stage), r, x);
    if (SHARED) pf_issue_values(s, v_at, r.p, r.o);
    fkv_wg_wait<SHARED ? 1 : 0>();
    fkv_wg_settle<PF_KEYS / 2>(x);
    if (SHARED || !pf_is_open(item, key / FKV_PAGE_TOKENS)) return;
    fkv_wg_begin();
    pf_issue_products<PF_KEYS, PF_KEYS, true>(s, 0, s.unit + PF_AT_LOW / 16, r, x);
    fkv_wg_wait<0>();
    fkv_wg_settle<PF_KEYS / 2>(x);
}
#else
/* x: sums of one tile's keys, group by group: the products of two groups are under way at a time. */
FKV_FN void pf_score(fkv_shared s, int stage, const pf_rows &r, pf_scales &scales, float *x) {
    float acc[PF_GROUPS > 1 ? 2 : 1][PF_KEYS / 2];
    fkv_wg_begin();
    pf_issue_group(s, 0, stage, r, acc[0]);
    if (PF_GROUPS > 1) pf_issue_group(s, 1, stage, r, acc[PF_GROUPS > 1]);
    FKV_UNROLL for (int g = 0; g < PF_GROUPS; g++) {
        if (g + 1 < PF_GROUPS)
            fkv_wg_wait<1>();
        else
            fkv_wg_wait<0>();
        fkv_wg_settle<PF_KEYS / 2>(acc[g % 2 * (PF_GROUPS > 1)]);
        if (!PF_SCALED) {
            FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) x[i] = acc[0][i];
        } else if (PF_BIASED) {
            pf_fold_scaled(g, scales, acc[g % 2 * (PF_GROUPS > 1)], x);
            if (g == 0) {
                fkv_wg_settle<PF_KEYS / 2>(x);
                pf_load_scales(s, stage, PF_AHEAD, PF_SCALES_HELD, scales);
            }
        } else {
            const float *sums = (const float *)(s.base + PF_AT_SUMS) + (fkv_u32)g * PF_ROWS + pf_first_row(s);
            pf_fold_group(s, g, stage, scales, PF_SUMS_HELD ? r.sums[0][g % 2] : sums[0],
                          PF_SUMS_HELD ? r.sums[1][g % 2] : sums[8], acc[g % 2 * (PF_GROUPS > 1)], x);
        }
        fkv_wg_settle<PF_KEYS / 2>(x);
        if (g + 2 < PF_GROUPS) {
            fkv_wg_begin();
            pf_issue_group(s, g + 2, stage, r, acc[g % 2]);
        }
    }
}
#endif

/* One tile of keys: its scores, its weights into p while the values of the tile before are summed. Its keys are there.
 *
 * Reads of shared memory, shuffles and exponentials wait in one queue with the products that were issued before them. So scales
 * are read ahead of the scores, and values are issued behind the shuffles. The warpgroups take turns at the scores: one makes
 * them while the other works out its weights. Of sealed pages they take none. SHARED: of a page that several blocks meet, which
 * all rows see, and is sealed; its values are issued right behind the scores.
 */
template <bool FIRST, bool SHARED> FKV_FN void pf_meet(fkv_shared s, const pf_item &item, fkv_u32 tile, pf_rows &r) {
    const int stage = (int)(tile % PF_STAGES), last_stage = (int)((tile + PF_STAGES - 1) % PF_STAGES);
    const int next_stage = (int)((tile + 1) % PF_STAGES);
    const fkv_u32 next_phase = (tile + 1) / PF_STAGES % 2, of_four = SHARED ? (tile - 1) % PF_FOUR : 0;
    float x[PF_KEYS / 2];
    float shrink[2];
    fkv_u32 key = pf_first_key(item, tile);
    fkv_u32 v_at = r.v_at + (fkv_u32)last_stage * (PF_TILE_BYTES / 16);
#if FKV_SEALED
    const fkv_u32 unit_at = pf_unit_at(tile);
    float unit = fkv_float_of(fkv_get4(s, unit_at));
#else
    pf_scales scales;
    if (PF_SCALED) pf_load_scales(s, stage, 0, PF_AHEAD, scales);
    float unit = 1.0f;
#endif
    if (!FIRST) fkv_wg_settle_bits<PF_KEYS / 4>(r.p);
    fkv_wg_settle<PF_COLS / 2>(r.o);
    if (!PF_Q_HELD) fkv_wg_settle_bits<1>(&r.q_at); /* places are worked out anew: kept, they would spill */
    if (PF_TURNS) fkv_gate_wait(s, pf_gate(PF_TURN, r.group), (tile + 1 + (fkv_u32)r.group) % 2);
#if FKV_SEALED
    if (of_four == 0) pf_score_offsets(s, stage, r);
    pf_score<SHARED>(s, item, key, stage, v_at, r, x);
#else
    pf_score(s, stage, r, scales, x);
#endif
    fkv_sync_warp();
    if (s.index % 32 == 0) {
        if (PF_TURNS) fkv_gate_arrive(s, pf_gate(PF_TURN, 1 - r.group));
        fkv_gate_arrive(s, pf_gate(PF_K_EMPTY, stage));
    }

    bool masked = !SHARED && (key + PF_KEYS - 1 > r.low ||
                              (FKV_WINDOW != 0 && r.high - key + 1 >= FKV_WINDOW + 1 && key + PF_KEYS > FKV_SINKS));
    pf_tile_unit u = pf_unit_of(s, unit, r, of_four);
    pf_follow_top(s, item, x, u, key, masked, r.state, shrink);
    if (!FIRST && !SHARED) {
        fkv_wg_settle<PF_KEYS / 2>(x);
        fkv_wg_begin();
        pf_issue_values(s, v_at, r.p, r.o);
    }
    pf_weigh(x, u, r.state, shrink);
#if FKV_SEALED
    fkv_u32 weights[PF_KEYS / 4];
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 4; i++) weights[i] = fkv_pack_f16(x[2 * i], x[2 * i + 1]);
    fkv_wg_settle_bits<PF_KEYS / 4>(weights);
    fkv_u32 norms[PF_KEYS / 8];
    FKV_UNROLL for (fkv_u32 i = 0; i < PF_KEYS / 8; i += 4) fkv_get16(s, unit_at + pf_norms_at(s.index % 4) + i * 4, norms + i);
#else
    fkv_wg_settle<PF_KEYS / 2>(x); /* packed here they would be where the products under way read the last ones */
#endif
    /* Looking for the next keys here keeps ptxas from moving the weights behind the wait for the products that they are to be
     * worked out beside. */
    if (PF_STAGES > 1) fkv_gate_wait(s, pf_gate(PF_FULL, next_stage), next_phase);
    if (!FIRST) {
        fkv_wg_wait<0>();
        fkv_wg_settle<PF_COLS / 2>(r.o);
        fkv_sync_warp();
        if (s.index % 32 == 0) fkv_gate_arrive(s, pf_gate(PF_V_EMPTY, last_stage));
        if (fkv_any(shrink[0] != 1.0f || shrink[1] != 1.0f))
            FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) r.o[i] *= shrink[i / 2 % 2];
    }
    if (PF_STAGES == 1) fkv_gate_wait(s, pf_gate(PF_FULL, next_stage), next_phase);
#if FKV_SEALED
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 4; i++) r.p[i] = pf_times(weights[i], norms[i / 2]);
#else
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 4; i++) r.p[i] = fkv_pack_f16(x[2 * i], x[2 * i + 1]);
#endif
}

/* What a multiplying thread begins with. */
FKV_FN void pf_begin_rows(fkv_shared s, const pf_item &x, fkv_u32 row, pf_rows &r) {
    int lane = (int)s.index % 32;
    r.group = (int)fkv_uniform(s.index / 128) - PF_FEEDERS;
    int first_row = PF_HALVES ? 0 : r.group * 64;
    int first_col = PF_HALVES ? r.group * PF_COLS : 0;
    const float *sums = (const float *)(s.base + PF_AT_SUMS) + row;
    r.q_at = s.unit + (fkv_u32)(PF_AT_Q / 16 + first_row * 8);
    r.v_at = s.unit + (fkv_u32)(PF_AT_V / 16 + first_col / 64 * (PF_KEYS * 8));
    r.low = pf_position(x, (fkv_u32)first_row), r.high = pf_position(x, (fkv_u32)first_row + 63);
    FKV_UNROLL for (int i = 0; i < 2; i++) {
        r.state[i].factor = ((const float *)(s.base + PF_AT_FACTORS))[row + 8 * (fkv_u32)i] * 1.44269504f;
        r.state[i].top = -1e30f;
        r.state[i].total = 0;
        if (PF_SUMS_HELD)
            FKV_UNROLL for (int g = 0; g < PF_GROUPS; g++) r.sums[i][g % 2] = sums[(fkv_u32)g * PF_ROWS + 8 * (fkv_u32)i];
    }
    if (PF_BIASED) FKV_UNROLL for (int i = 0; i < 4; i++) {
            int group = lane % 4 / 2;
            float sum = i < 2 && group < PF_GROUPS ? PF_SUM_UNIT * sums[(fkv_u32)group * PF_ROWS + 8 * (fkv_u32)i] : 0.0f;
            float high = fkv_f16_to_f32(fkv_f32_to_f16(sum));
            r.sum_halves[i] = fkv_pack_f16(high, sum - high);
        }
    FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) r.o[i] = 0;
    if (PF_Q_HELD) FKV_UNROLL for (int i = 0; i < FKV_D / 4; i++) {
            fkv_u32 place = (fkv_u32)(i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2);
            r.held[i] = *(const fkv_u32 *)pf_query_at(s, row + (fkv_u32)(i % 2) * 8, place);
        }
}

/* The sums, divided, into shared memory in the place of everything else. */
FKV_FN void pf_put_sums(fkv_shared s, const pf_item &x, const float *sink_logits, fkv_u32 row, const pf_rows &r) {
    fkv_u32 first_col = PF_HALVES ? (fkv_u32)(r.group * PF_COLS) : 0;
    float factor[2];
    FKV_UNROLL for (int i = 0; i < 2; i++) {
        float total = r.state[i].total * (1.0f / (1u << PF_WEIGHT_EXPONENT));
        total += fkv_shuffle_xor(total, 1);
        total += fkv_shuffle_xor(total, 2);
        float top = r.state[i].top * (FKV_SOFTCAP_BITS != 0 ? 1.0f : r.state[i].factor);
        factor[i] = PF_VALUE_UNIT /
                    fkv_denominator(total, top, sink_logits, x.head * FKV_R + (x.first_row + row + 8 * (fkv_u32)i) % FKV_R);
    }
    fkv_sync_team(1, 256); /* the other warpgroup's products are done with shared memory too */
    FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) {
        fkv_u32 place = first_col + (fkv_u32)(i / 4 * 8) + s.index % 4 * 2 + (fkv_u32)(i % 2);
        if (place < FKV_D)
            ((float *)s.base)[(row + (fkv_u32)(i / 2 % 2) * 8) * PF_OUT_STRIDE + pf_v_channel(place)] =
                r.o[i] * factor[i / 2 % 2];
    }
}

/* The role of the other warpgroups. */
FKV_FN void pf_multiply(fkv_shared s, const pf_item &x, const float *sink_logits) {
    pf_rows r;
    fkv_u32 row = pf_first_row(s);
    pf_begin_rows(s, x, row, r);
    fkv_u32 n_tiles = fkv_uniform(x.n_tiles);
#if FKV_SEALED
    fkv_u32 shared_end = fkv_uniform(x.shared_end);
#endif
    fkv_gate_wait(s, pf_gate(PF_FULL, 0), 0);
    pf_meet<true, false>(s, x, 0, r);
    fkv_u32 tile = 1;
#if FKV_SEALED
    for (; tile < shared_end; tile++) pf_meet<false, true>(s, x, tile, r);
#endif
    for (; tile < n_tiles; tile++) pf_meet<false, false>(s, x, tile, r);
    fkv_wg_settle_bits<PF_KEYS / 4>(r.p);
    fkv_wg_settle<PF_COLS / 2>(r.o);
    fkv_wg_begin();
    pf_issue_values(s, r.v_at + (tile + PF_STAGES - 1) % PF_STAGES * (PF_TILE_BYTES / 16), r.p, r.o);
    fkv_wg_wait<0>();
    fkv_wg_settle<PF_COLS / 2>(r.o);
    pf_put_sums(s, x, sink_logits, row, r);
}

FKV_FN void fkv_attend_prefill(fkv_place place, fkv_u32 *shared, const void *q, const void *pool FKV_OPEN_POOL,
                               const fkv_u32 *table, const float *sink_logits, void *out) {
    fkv_shared s = fkv_shared_make(shared, place.index);
#if FKV_SEALED
    place = pf_take_turn(s, place, ring, table);
#endif
    pf_item x = pf_item_at((const fkv_u8 *)pool FKV_OPEN_GIVEN, table, place.x, place.y, place.z);
    if (x.n_rows == 0) return;
#if FKV_SEALED
    x.shared_end = pf_shared_end(x);
#endif
    if ((int)s.index == 0) {
        for (int stage = 0; stage < PF_STAGES; stage++) {
            fkv_gate_make(s, pf_gate(PF_FULL, stage), 4 * PF_FEEDERS);
            fkv_gate_make(s, pf_gate(PF_K_EMPTY, stage), 8);
            fkv_gate_make(s, pf_gate(PF_V_EMPTY, stage), 8);
        }
        for (int group = 0; group < 2; group++) fkv_gate_make(s, pf_gate(PF_TURN, group), 4);
        for (int stage = 0; stage < PF_PACKED; stage++) {
            fkv_gate_make(s, pf_gate(PF_PACKED_FULL, stage), 1);
            fkv_gate_make(s, pf_gate(PF_PACKED_EMPTY, stage), 4 * PF_FEEDERS);
        }
        if (FKV_SEALED) fkv_gate_make(s, pf_gate(PF_LENT_FULL, 0), 1);
        fkv_gates_made();
        pf_bring_first(s, x);
    }
    fkv_sync_warp();
    pf_load_queries(s, x, q);
#if !FKV_SEALED
    pf_clear_stages(s);
#endif
    pf_clear_marks(s, x);
    fkv_publish();
    fkv_sync();
    if ((int)s.index < 128 * PF_FEEDERS) {
        fkv_fewer_registers<PF_REGS_UNPACK>();
        pf_unpack(s, x);
    } else {
        fkv_more_registers<PF_REGS_MULTIPLY>();
        pf_multiply(s, x, sink_logits);
    }
    fkv_sync();
    pf_store_outputs(s, x, out);
#if FKV_SEALED
    pf_end_turn(s, x);
#endif
}
