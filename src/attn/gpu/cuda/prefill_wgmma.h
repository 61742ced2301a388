/* Warpgroup prefill kernel: computes attention of many queries over packed pages. Runs on sm_90a and is emulated on the host.
 * Grid: (tile of the step table, KV head, slice of FKV_PREFILL_ROWS rows of queries x heads). Scores never leave the thread
 * block.
 *
 * One or two warpgroups unpack pages (prefill_feed.h); in sealed layers, the MMA warpgroups unpack the first tile. Two more
 * warpgroups, the MMA warpgroups, compute the matrix products and the softmax, each for 64 rows. If the head dimension exceeds
 * 256, both MMA warpgroups process the same 64 rows, each for half of V's channels. While the weights of one tile are computed,
 * the tensor cores accumulate the values of the previous tile and compute the scores of the other warpgroup.
 *
 * K codes are exact in fp16. A score is the sum over scale groups of s * (q . codes) + b * sum(q), in float, where s and b are
 * the scale and bias of the group. Values of float32 or rotated queries are split into two fp16 values, which requires two matrix
 * products. pf_side::channel() defines the order of channels in shared memory, which is chosen for fast unpacking.
 *
 * The result of a row does not depend on batching: tiles start at multiples of PF_KEYS, masked tiles add only zeros, and a row's
 * sums are rescaled only when its own maximum grows. The kernel is limited by the latency of the dependent operations of a
 * warpgroup on one tile (scores, maxima, exponentials). For sealed pages, it is limited by the power limit of the device.
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

/* Applies the rotation of K to a row in shared memory (see docs/page_format.md). Called by one warp. */
FKV_FN void pf_rotate(fkv_shared s, float *row) {
    fkv_u32 lane = s.index % 32;
    for (fkv_u32 d = lane; d < FKV_D; d += 32) row[d] = fkv_float_of(fkv_bits_of(row[d]) ^ fkv_k_sign(d));
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
    for (fkv_u32 d = lane; d < FKV_D; d += 32) row[d] *= fkv_rotation_norm();
    fkv_sync_warp();
}

/* Returns the address of the fp16 value at index `place` of a query row. */
FKV_FN fkv_u16 *pf_query_at(fkv_shared s, fkv_u32 row, fkv_u32 place) {
    return (fkv_u16 *)(s.base + PF_AT_Q + place / 64 * (PF_ROWS * 128) + row * 128 + ((place % 64 / 8) ^ (row % 8)) * 16) +
           place % 8;
}

constexpr int PF_LANE_CHANNELS = (FKV_D + 31) / 32;

FKV_FN void pf_fetch_query(const pf_item &x, const void *q, fkv_u32 row, fkv_u32 lane, float *numbers) {
    if (row >= x.n_rows) return;
    FKV_UNROLL for (int i = 0; i < PF_LANE_CHANNELS; i++) {
        fkv_u32 d = lane + 32 * (fkv_u32)i;
        numbers[i] = d < FKV_D ? fkv_row_value(q, pf_row_at(x, row) + d) : 0.0f;
    }
}

#if FKV_SEALED && !FKV_ROTATE_K && FKV_ROW_TYPE != 0 && FKV_D <= 128
/* Query rows of one warp: four adjacent channels of each row per lane. */
struct pf_query_rows {
    float y[PF_ROWS / (PF_THREADS / 32)][4];
};

/* Loads the queries into registers. Called by all warps. */
FKV_FN void pf_fetch_queries(fkv_shared s, const pf_item &x, const void *q, pf_query_rows &rows) {
    constexpr int n_rows = PF_ROWS / (PF_THREADS / 32);
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    FKV_UNROLL for (int i = 0; i < n_rows; i++) FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) {
        fkv_u32 row = warp * n_rows + (fkv_u32)i;
        fkv_u32 channel = FKV_CALIBRATED && lane * 4 < FKV_D ? pf_key_channel(s, lane * 4 + n) : lane * 4 + n;
        rows.y[i][n] = row < x.n_rows && lane * 4 < FKV_D ? fkv_row_value(q, pf_row_at(x, row) + channel) : 0.0f;
    }
}

/* Stores the queries in shared memory as fp16 values. Called by all warps. */
FKV_FN void pf_put_queries(fkv_shared s, const pf_item &, const void *, pf_query_rows &rows) {
    constexpr int n_rows = PF_ROWS / (PF_THREADS / 32);
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    float scale = fkv_float_of(FKV_SCALE_BITS), sign = scale < 0 ? -1.0f : 1.0f;
    float(&y)[n_rows][4] = rows.y;
    FKV_UNROLL for (int i = 0; i < n_rows; i++) FKV_UNROLL for (fkv_u32 n = 0; n < 4; n++) y[i][n] *= sign;
    FKV_UNROLL for (int i = 0; i < n_rows; i++) {
        fkv_u32 row = warp * n_rows + (fkv_u32)i;
        float largest = 0;
        FKV_UNROLL for (int n = 0; n < 4; n++) largest = fkv_max(largest, fkv_abs(y[i][n]));
        fkv_u32 exponent = fkv_warp_max_bits(fkv_bits_of(largest)) >> 23;
        if (exponent == 0 || exponent > 253) exponent = 127;
        float down = fkv_float_of((254 - exponent) << 23);
        if (lane * 4 < FKV_D) { /* four adjacent places of a row hold four adjacent channels in the order of pf_k_channel() */
            pf_words2 four = {{fkv_pack_f16(y[i][pf_k_channel(0)] * down, y[i][pf_k_channel(1)] * down),
                               fkv_pack_f16(y[i][pf_k_channel(2)] * down, y[i][pf_k_channel(3)] * down)}};
            *(pf_words2 *)pf_query_at(s, row, lane * 4) = four;
        }
        if (lane == 0) ((float *)(s.base + PF_AT_FACTORS))[row] = scale * sign * fkv_float_of(exponent << 23);
    }
}
#else
struct pf_query_rows {};
FKV_FN void pf_fetch_queries(fkv_shared, const pf_item &, const void *, pf_query_rows &) {}

/* Stores the queries in shared memory as fp16 values. Each warp converts one row while it loads the next. Called by all warps. */
FKV_FN void pf_put_queries(fkv_shared s, const pf_item &x, const void *q, pf_query_rows &) {
    fkv_u32 warp = s.index / 32, lane = s.index % 32;
    float *row = (float *)(s.base + PF_AT_K) + warp * FKV_D;
    float scale = fkv_float_of(FKV_SCALE_BITS);
    float sign = scale < 0 ? -1.0f : 1.0f;
    float numbers[PF_LANE_CHANNELS];
    pf_fetch_query(x, q, warp, lane, numbers);
    for (fkv_u32 r = warp; r < PF_ROWS; r += PF_THREADS / 32) {
        if (r >= x.n_rows) { /* unused rows are set to 0; their results are not stored */
            for (fkv_u32 place = lane; place < FKV_D; place += 32)
                for (int part = 0; part < PF_PARTS; part++) pf_query_at(s, r, place)[part * (PF_Q_BYTES / 2)] = 0;
            continue;
        }
        FKV_UNROLL for (int i = 0; i < PF_LANE_CHANNELS; i++) if (lane + 32 * (fkv_u32)i < FKV_D) row[lane + 32 * (fkv_u32)i] =
            sign * numbers[i];
        pf_fetch_query(x, q, r + PF_THREADS / 32, lane, numbers);
        fkv_sync_warp();
        if (FKV_ROTATE_K) pf_rotate(s, row);
        float largest = 0;
        for (fkv_u32 d = lane; d < FKV_D; d += 32) largest = fkv_max(largest, fkv_abs(row[d]));
        fkv_u32 exponent = fkv_bits_of(pf_warp_max(largest)) >> 23;
        if (exponent == 0 || exponent > 253) exponent = 127;
        float down = fkv_float_of((254 - exponent) << 23);
        for (fkv_u32 d = lane; d < FKV_D; d += 32) { /* round q, because the sums of q must be computed from the rounded values */
            float y = row[d] * down;
            float high = fkv_f16_to_f32(fkv_f32_to_f16(y));
            row[d] = PF_PARTS == 1 ? high : high + fkv_f16_to_f32(fkv_f32_to_f16(y - high));
        }
        fkv_sync_warp();
        for (fkv_u32 place = lane; place < FKV_D; place += 32) {
            float y = row[pf_key_channel(s, place)];
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

#endif

/* True if the output sums are multiplied by the Hadamard matrix while they are in registers (pf_hadamard()), which takes fewer
 * shuffles than in shared memory. */
constexpr bool PF_HADAMARD_HELD = FKV_ROTATE_V && FKV_SEALED && PF_COLS % FKV_ROTATION_BLOCK == 0;

/* Undoes the rotation of V (only its signs if PF_HADAMARD_HELD is true) and copies the output rows from shared memory to `out`.
 * Called by all warps. With an unrolled loop, this function was slower. */
FKV_FN void pf_store_outputs(fkv_shared s, const pf_item &x, void *out) {
    fkv_u32 lane = s.index % 32;
    FKV_NO_UNROLL for (fkv_u32 r = s.index / 32; r < x.n_rows; r += PF_THREADS / 32) {
        fkv_lane_row row;
        FKV_UNROLL for (fkv_u32 k = 0; k < FKV_LANE_QUADS; k++) {
            fkv_u32 d = k * 128 + 4 * lane;
            pf_floats4 four = {0, 0, 0, 0};
            if (d < FKV_D) four = *(const pf_floats4 *)((const float *)s.base + r * PF_OUT_STRIDE + d);
            row[k][0] = four.x, row[k][1] = four.y, row[k][2] = four.z, row[k][3] = four.w;
        }
        if (FKV_ROTATE_V && !PF_HADAMARD_HELD) fkv_lane_hadamard(lane, row);
        if (FKV_ROTATE_V) fkv_lane_undo_signs(lane, row);
        if (s.base[PF_AT_NONFINITE + r] != 0)
            FKV_UNROLL for (int i = 0; i < 4 * FKV_LANE_QUADS; i++) row[i / 4][i % 4] = fkv_float_of(0x7fc00000u);
        fkv_put_lane_row(out, pf_row_at(x, r), lane, row);
    }
}

/* ---- products and softmax ---- */

/* Returns the first of the two query rows whose scores this thread holds. The second row follows 8 rows later. */
FKV_FN fkv_u32 pf_first_row(fkv_shared s) {
    fkv_u32 of_group = s.index % 128 / 32 * 16 + s.index % 32 / 4;
    return PF_HALVES ? of_group : (s.index / 128 - PF_FEEDERS) * 64 + of_group;
}

struct pf_row_state {
    float factor; /* factor that converts scores to base-2 exponents */
    float top;    /* largest score so far, not yet multiplied by `factor` */
    float total;  /* total weight of the keys whose scores this thread holds */
};

FKV_FN fkv_u32 pf_step_unit(int group, int step) { /* returns the index of the first unit (8 channels) of a matrix product */
#if !FKV_SEALED
    constexpr int pairs = pf_k::per_group / 2 > 0 ? pf_k::per_group / 2 : 1;
    if (pf_k::spread && PF_SCALED) return (fkv_u32)(step / pairs * pf_k::chunks + group * pf_k::per_group + step % pairs * 2);
#endif
    return (fkv_u32)((group * PF_GROUP_STEPS + step) * 2);
}

/* Numbers of registers per thread in the MMA warpgroups and in the warpgroups that unpack. The sum over all warpgroups must not
 * exceed the initial allocation, which is 504 for three warpgroups and 512 for four. */
constexpr int PF_REGS_MULTIPLY = FKV_SEALED ? (PF_WIDE ? 192 : 184) : 216;
constexpr int PF_REGS_UNPACK = FKV_SEALED ? 256 - PF_REGS_MULTIPLY : 504 - 2 * PF_REGS_MULTIPLY;

constexpr int PF_SCORES = PF_WIDE ? PF_K_ROWS : PF_KEYS; /* number of keys, with or without channel offsets, per score product */
constexpr bool PF_TURNS = !FKV_SEALED;                   /* true if the two MMA warpgroups take turns in computing scores */
constexpr bool PF_SUMS_HELD = PF_SCALED && PF_GROUPS <= 2 && !PF_BIASED;

/* State of a thread in an MMA warpgroup, kept between tiles. */
struct pf_rows {
    int group;         /* index of the MMA warpgroup: 0 or 1 */
    fkv_u32 q_at;      /* shared-memory address of the queries, in units of 16 bytes */
    fkv_u32 v_at;      /* shared-memory address of the values in stage 0, in units of 16 bytes */
    fkv_u32 low, high; /* positions of the first and the last query row */
    pf_row_state state[2];
    float sums[2][2];                        /* sums of q for each row and scale group */
    fkv_u32 sum_halves[PF_BIASED ? 4 : 1];   /* sums of q as a matrix operand, to be multiplied by the biases */
    fkv_u32 held[PF_Q_HELD ? FKV_D / 4 : 1]; /* query operands that are kept in registers */
    fkv_u32 p[PF_KEYS / 4];
    float o[PF_COLS / 2];
    float offset[2]; /* score offsets of the thread's two rows; each of four neighbouring lanes holds the offsets for a different
                        page */
};

/* Issues the matrix products of the queries and KEYS keys at k_at (in a tile of ROWS keys), over the channels of one scale group.
 * Accumulates into `acc` if ADD is true, and overwrites `acc` otherwise. */
template <int KEYS, int ROWS, bool ADD, int STEPS = PF_GROUP_STEPS>
FKV_FN void pf_issue_products(fkv_shared s, int group, fkv_u32 k_at, const pf_rows &r, float *acc) {
    FKV_UNROLL for (int part = 0; part < PF_PARTS; part++) {
        FKV_UNROLL for (int step = 0; step < STEPS; step++) {
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

/* Issues the matrix products of the queries and keys for one scale group. If biases are stored as channels, the dot products of
 * the first group include the bias terms of all groups. */
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
        if constexpr (FKV_SEALED != 0) /* the rows of the value tile are channels, so values are read like keys */
            FKV_UNROLL for (int c = 0; c < PF_COLS / PF_V_WIDTH; c++) fkv_wg_scores_held<PF_V_WIDTH, true>(
                s, o + c * (PF_V_WIDTH / 2), p + 4 * step,
                v_at + (fkv_u32)(c / PF_V_FOLDS * (PF_V_WIDTH * 8) + c % PF_V_FOLDS * (PF_KEYS / 8) + step * 2));
        else
            fkv_wg_values<PF_KEYS, PF_COLS>(s, o, p + 4 * step, v_at + (fkv_u32)step * 128);
    }
    fkv_wg_commit();
}

/* Scales of the keys whose scores this thread holds. An entry holds the scales and biases of two keys for one scale group. If
 * biases are stored as channels, an entry holds the scales of four keys, and there are entries for all groups. */
constexpr int PF_SCALES_HELD = PF_BIASED ? PF_GROUPS * PF_KEYS / 16 : PF_KEYS / 8;
struct pf_scales {
    pf_floats4 of[PF_SCALES_HELD];
};
constexpr int PF_AHEAD =
    PF_BIASED && PF_SCALES_HELD > 5
        ? 5
        : PF_SCALES_HELD; /* number of entries loaded before the matrix products; more entries would spill registers */

FKV_FN const pf_floats4 *pf_scales_at(fkv_shared s, int group, int stage) {
    return (const pf_floats4 *)(s.base + PF_AT_SCALES + stage * PF_SCALES_BYTES) + group * (PF_KEYS / 2) + s.index % 4;
}

FKV_FN void pf_load_scales(fkv_shared s, int stage, int from, int to, pf_scales &scales) {
    FKV_UNROLL for (int j = from; j < to; j++) scales.of[j] = pf_scales_at(s, 0, stage)[4 * j];
}

/* Computes x += s * acc for one scale group, where s are the scales and acc the dot products. The first group overwrites x. */
FKV_FN void pf_fold_scaled(int group, const pf_scales &scales, const float *acc, float *x) {
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
        pf_floats4 four = scales.of[group * (PF_KEYS / 16) + i / 8];
        float scale = i / 4 % 2 == 0 ? (i % 2 == 0 ? four.x : four.y) : (i % 2 == 0 ? four.z : four.w);
        x[i] = group == 0 ? scale * acc[i] : fkv_fma(scale, acc[i], x[i]);
    }
}

/* Computes x += s * acc + b * sum(q) for one scale group, where s are the scales, b the biases and acc the dot products. The
 * first group overwrites x. Then replaces `scales` with the scales of the next group. */
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

/* Parameters that convert the dot products x of a tile in a sealed layer to scores: score = unit * (x + offset). In other layers,
 * x already is the score. */
struct pf_tile_unit {
    float unit;
    float offset[2]; /* score offsets of the thread's two rows */
};

FKV_FN pf_tile_unit pf_unit_of(fkv_shared s, float unit, const pf_rows &r, fkv_u32 of_four) {
    pf_tile_unit u = {unit, {0.0f, 0.0f}};
    if (FKV_SEALED)
        FKV_UNROLL for (int i = 0; i < 2; i++) u.offset[i] = fkv_shuffle(
            r.offset[i], s.index % 32 / 4 * 4 + of_four); /* each of four adjacent lanes holds the offsets of a different page */
    return u;
}

/* Updates the maximum score of each row, given the dot products x of one tile. `shrink` receives the factors by which the earlier
 * output sums must be multiplied. */
FKV_FN void pf_update_max(fkv_shared s, const pf_item &item, float *x, const pf_tile_unit &u, fkv_u32 first_key, bool masked,
                          pf_row_state *row, float *shrink) {
    const float none = fkv_float_of(0xff800000u);
    /* maxima are computed from the dot products and then converted to scores */
    const bool offset = FKV_SEALED != 0 && FKV_SOFTCAP_BITS == 0;
    if (FKV_SOFTCAP_BITS != 0) FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
            float sum = FKV_SEALED ? (x[i] + u.offset[i / 2 % 2]) * u.unit : x[i];
            x[i] = fkv_cap(sum * row[i / 2 % 2].factor);
        }
    if (masked) {
        fkv_u32 position[2] = {pf_position(item, pf_first_row(s)), pf_position(item, pf_first_row(s) + 8)};
        FKV_UNROLL for (int i = 0; i < PF_KEYS / 2; i++) {
            fkv_u32 token = first_key + (fkv_u32)(i / 4 * 8 + (int)s.index % 4 * 2 + i % 2);
            if (!fkv_is_visible(position[i / 2 % 2], token)) x[i] = none;
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

/* Converts the dot products x of one tile to softmax weights. */
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
/* Computes the score offsets of the thread's rows for four pages. Each of four neighbouring lanes receives the offsets of one
 * page. */
FKV_FN void pf_score_offsets(fkv_shared s, int stage, pf_rows &r) {
    float sums[4] = {0, 0, 0, 0};
    fkv_wg_begin();
    pf_issue_products<PF_MORE_KEYS, PF_K_ROWS, false>(s, 0, pf_keys_at(s, stage) + PF_KEYS * 8, r, sums);
    fkv_wg_wait<0>();
    fkv_wg_settle<4>(sums);
    FKV_UNROLL for (int i = 0; i < 2; i++) r.offset[i] = sums[2 * i] + sums[2 * i + 1];
}

/* Adds the products of the queries with the second part of a tile's keys, over STEPS steps of 16 channels: the low-order parts of
 * open keys, or the third digits of calibrated keys. The products must have as many accumulators as those of pf_score(). */
template <int STEPS> FKV_FN void pf_add_scores(fkv_shared s, fkv_u32 tile, pf_rows &r, float *x) {
    fkv_wg_begin();
    fkv_u32 k_at = s.unit + pf_low_at(tile) / 16;
    if (PF_WIDE) k_at |= fkv_zero(s), r.q_at |= fkv_zero(s); /* the addresses of the first products must not be kept */
    pf_issue_products<PF_SCORES, PF_KEYS, true, STEPS>(s, 0, k_at, r, x);
    fkv_wg_wait<0>();
    fkv_wg_settle<PF_SCORES / 2>(x);
}

/* Computes the dot products x of the queries with the keys of one tile. If PF_WIDE is true, the same products also compute the
 * score offsets of a sealed page. For a shared page, the value products of the previous tile are issued right after the score
 * products. */
template <bool SHARED>
FKV_FN void pf_score(fkv_shared s, const pf_item &item, fkv_u32 tile, fkv_u32 key, int stage, fkv_u32 v_at, pf_rows &r,
                     float *x) {
    fkv_wg_begin();
    fkv_u32 k_at = pf_keys_at(s, stage);
    if (PF_WIDE) fkv_wg_settle_bits<1>(&k_at); /* forces the addresses to be recomputed for each tile */
    pf_issue_products<PF_SCORES, PF_K_ROWS, false>(s, 0, k_at, r, x);
    if (SHARED && FKV_CALIBRATED)
        pf_issue_products<PF_SCORES, PF_KEYS, true, PF_THIRD_STEPS>(s, 0, s.unit + pf_low_at(tile) / 16, r, x);
    if (SHARED) pf_issue_values(s, v_at, r.p, r.o);
    fkv_wg_wait<SHARED ? 1 : 0>();
    fkv_wg_settle<PF_SCORES / 2>(x);
    bool open = !SHARED && pf_is_open(item, key / FKV_PAGE_TOKENS);
    if (PF_WIDE && !open)
        FKV_UNROLL for (int i = 0; i < 2; i++) r.offset[i] = x[PF_KEYS / 2 + 2 * i] + x[PF_KEYS / 2 + 2 * i + 1];
    if (open)
        pf_add_scores<PF_GROUP_STEPS>(s, tile, r, x);
    else if (FKV_CALIBRATED && !SHARED)
        pf_add_scores<PF_THIRD_STEPS>(s, tile, r, x);
}
#else
/* Computes the scores x of one tile, group by group, with the matrix products of two groups in flight. */
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

/* Processes one tile of keys, which must already be unpacked: computes the scores and weights of the tile while the tensor cores
 * accumulate the values of the previous tile. Shared-memory loads, shuffles and exponentials wait for matrix products that were
 * issued earlier. Scales are therefore loaded before the score products are issued, and value products are issued after the
 * shuffles. The warpgroups take turns in computing scores, except for sealed pages. If SHARED is true, the tile is a sealed page
 * that several blocks share, so all its tokens are visible to every row. In this case, the value products are issued right after
 * the score products. */
template <bool FIRST, bool SHARED> FKV_FN void pf_process_tile(fkv_shared s, const pf_item &item, fkv_u32 tile, pf_rows &r) {
    const int stage = (int)(tile % PF_STAGES), last_stage = (int)((tile + PF_STAGES - 1) % PF_STAGES);
    const int next_stage = (int)((tile + 1) % PF_STAGES);
    const fkv_u32 next_phase = (tile + 1) / PF_STAGES % 2, of_four = SHARED ? (tile - 1) % PF_FOUR : 0;
    float x[PF_SCORES / 2];
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
    /* forces the addresses to be recomputed; keeping them would spill registers */
    if (!PF_Q_HELD) fkv_wg_settle_bits<1>(&r.q_at);
    if (PF_TURNS) fkv_mbarrier_wait(s, pf_mbarrier(PF_TURN, r.group), (tile + 1 + (fkv_u32)r.group) % 2);
#if FKV_SEALED
    if (!PF_WIDE && (SHARED ? of_four == 0 : !pf_is_open(item, key / FKV_PAGE_TOKENS)))
        pf_score_offsets(s, stage, r);
    else if (!SHARED)
        r.offset[0] = r.offset[1] = 0; /* an open page has no channel offsets */
    pf_score<SHARED>(s, item, tile, key, stage, v_at, r, x);
#else
    pf_score(s, stage, r, scales, x);
#endif
    fkv_sync_warp();
    if (s.index % 32 == 0) {
        if (PF_TURNS) fkv_mbarrier_arrive(s, pf_mbarrier(PF_TURN, 1 - r.group));
        fkv_mbarrier_arrive(s, pf_mbarrier(PF_K_EMPTY, stage));
    }

    bool masked = !SHARED && (key + PF_KEYS - 1 > r.low ||
                              (FKV_WINDOW != 0 && r.high - key + 1 >= FKV_WINDOW + 1 && key + PF_KEYS > FKV_SINKS));
    pf_tile_unit u = pf_unit_of(s, unit, r, of_four);
    pf_update_max(s, item, x, u, key, masked, r.state, shrink);
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
    fkv_wg_settle<PF_KEYS / 2>(x); /* packing the weights before this point would overwrite operands of products in flight */
#endif
    /* The computation of the weights should overlap with the value products. Waiting for the next keys at this point prevents
     * ptxas from moving this computation past the wait for the value products. */
    if (PF_STAGES > 1) fkv_mbarrier_wait(s, pf_mbarrier(PF_FULL, next_stage), next_phase);
    if (!FIRST) {
        fkv_wg_wait<0>();
        fkv_wg_settle<PF_COLS / 2>(r.o);
        fkv_sync_warp();
        if (s.index % 32 == 0) fkv_mbarrier_arrive(s, pf_mbarrier(PF_V_EMPTY, last_stage));
        if (fkv_any(shrink[0] != 1.0f || shrink[1] != 1.0f))
            FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) r.o[i] *= shrink[i / 2 % 2];
    }
    if (PF_STAGES == 1) fkv_mbarrier_wait(s, pf_mbarrier(PF_FULL, next_stage), next_phase);
#if FKV_SEALED
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 4; i++) r.p[i] = pf_times(weights[i], norms[i / 2]);
#else
    FKV_UNROLL for (int i = 0; i < PF_KEYS / 4; i++) r.p[i] = fkv_pack_f16(x[2 * i], x[2 * i + 1]);
#endif
}

/* Initializes the state of a thread in an MMA warpgroup. */
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

/* Multiplies the output rows by the Hadamard matrix, in place. For sum o[i], bit 0 of the channel number is bit 0 of i, bits 1
 * and 2 are lane % 4, and the higher bits are i / 4. Bit 1 of i selects the row. */
FKV_FN void pf_hadamard(fkv_shared s, float *o) {
    FKV_UNROLL for (fkv_u32 h = 1; h < FKV_ROTATION_BLOCK; h *= 2) {
        if (h == 2 || h == 4) {
            float sign = (s.index % 4 * 2 & h) == 0 ? 1.0f : -1.0f;
            FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) o[i] = fkv_fma(sign, o[i], fkv_shuffle_xor(o[i], h / 2));
        } else {
            int step = h == 1 ? 1 : (int)h / 2;
            FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) {
                if ((i & step) != 0) continue;
                float a = o[i], b = o[(i + step) % (PF_COLS / 2)];
                o[i] = a + b;
                o[(i + step) % (PF_COLS / 2)] = a - b;
            }
        }
    }
}

/* Divides the output sums by the total weights and stores the results in shared memory, where they overwrite the queries and all
 * stages. */
FKV_FN void pf_put_sums(fkv_shared s, const pf_item &x, const float *sink_logits, fkv_u32 row, pf_rows &r) {
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
    FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) r.o[i] = fkv_mul(r.o[i], factor[i / 2 % 2]);
    if (PF_HADAMARD_HELD) pf_hadamard(s, r.o);
    fkv_sync_team(1, 256); /* waits until the other warpgroup's products have finished reading shared memory */
    FKV_UNROLL for (int i = 0; i < PF_COLS / 2; i++) {
        fkv_u32 place = first_col + (fkv_u32)(i / 4 * 8) + s.index % 4 * 2 + (fkv_u32)(i % 2);
        if (place < FKV_D) ((float *)s.base)[(row + (fkv_u32)(i / 2 % 2) * 8) * PF_OUT_STRIDE + pf_v_channel(place)] = r.o[i];
    }
}

/* Code of the two warpgroups that compute products and softmax. */
FKV_FN void pf_multiply(fkv_shared s, const pf_item &x, const float *sink_logits) {
#if FKV_SEALED
    pf_unpack_first_tile(s, x);
    fkv_wg_settle_bits<1>(&s.index); /* redefines the index without changing it; otherwise, ptxas would keep it in local memory */
#endif
    pf_rows r;
    fkv_u32 row = pf_first_row(s);
    pf_begin_rows(s, x, row, r);
    fkv_u32 n_tiles = fkv_uniform(x.n_tiles);
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    fkv_u32 shared_end = fkv_uniform(x.shared_end);
#endif
    fkv_mbarrier_wait(s, pf_mbarrier(PF_FULL, 0), 0);
    pf_process_tile<true, false>(s, x, 0, r);
    fkv_u32 tile = 1;
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    for (; tile < shared_end; tile++) pf_process_tile<false, true>(s, x, tile, r);
#endif
    for (; tile < n_tiles; tile++) pf_process_tile<false, false>(s, x, tile, r);
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
#if FKV_CALIBRATED
    const fkv_u32 given_head = place.y;
#endif
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    place = pf_take_number(s, place, ring, table);
#endif
    pf_item x = pf_item_at((const fkv_u8 *)pool FKV_OPEN_GIVEN, table, place.x, place.y, place.z);
    if (x.n_rows == 0) return;
#if FKV_CALIBRATED
    /* `order` is that of the given KV head, but pf_take_number() may assign the block to another one */
    pf_put_order(s, order - given_head * FKV_ORDER_WORDS + place.y * FKV_ORDER_WORDS);
#endif
    pf_query_rows queries;
    pf_fetch_queries(s, x, q, queries);
    if ((int)s.index == 0) {
        for (int stage = 0; stage < PF_STAGES; stage++) {
            fkv_mbarrier_init(s, pf_mbarrier(PF_FULL, stage), 4 * PF_FEEDERS);
            fkv_mbarrier_init(s, pf_mbarrier(PF_K_EMPTY, stage), 8);
            fkv_mbarrier_init(s, pf_mbarrier(PF_V_EMPTY, stage), 8);
        }
        for (int group = 0; group < 2; group++) fkv_mbarrier_init(s, pf_mbarrier(PF_TURN, group), 4);
        for (int stage = 0; stage < PF_PACKED; stage++) {
            fkv_mbarrier_init(s, pf_mbarrier(PF_PACKED_FULL, stage), 1);
            fkv_mbarrier_init(s, pf_mbarrier(PF_PACKED_EMPTY, stage), 4 * PF_FEEDERS);
        }
        if (FKV_SEALED) fkv_mbarrier_init(s, pf_mbarrier(PF_TO_SHARE_FULL, 0), 1);
        fkv_mbarriers_ready();
        pf_load_first_tiles(s, x, 0, FKV_SEALED ? 1 : PF_PACKED);
    }
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    if (s.index == 32) pf_decide_shared_pages(s, x); /* in the second warp, at the same time as the code above */
#endif
    fkv_sync_warp();
    pf_put_queries(s, x, q, queries);
#if !FKV_SEALED
    pf_clear_stages(s);
#endif
    pf_clear_marks(s, x);
    fkv_publish();
    fkv_sync();
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    pf_take_shared_pages(s, x);
#endif
    if ((int)s.index < 128 * PF_FEEDERS) {
        fkv_fewer_registers<PF_REGS_UNPACK>();
        pf_unpack(s, x);
    } else {
        fkv_more_registers<PF_REGS_MULTIPLY>();
        pf_multiply(s, x, sink_logits);
    }
    fkv_sync();
    pf_store_outputs(s, x, out);
#if FKV_SEALED && FKV_PREFILL_SHARERS > 0
    pf_reset_ring(s, x);
#endif
}
