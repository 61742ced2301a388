/* Computes attention without matrix instructions, for any head dimension, codec and device. Shared by decode_plain.h and
 * prefill_plain.h. One warp processes one tile of keys, which are all in the same page, for a few query rows. Each lane first
 * computes the scores of one key for all rows. It then accumulates the values of channels lane, lane + 32, ... Codes are unpacked
 * in registers, one chunk at a time (chunks.h), and each code is unpacked only once for all rows of the warp.
 */
/* Processes a tile of n_keys keys. `token` is the position of the first key, and `slot` is the page slot of that key. queries:
 * [rows, D]. weights: buffer [rows, 32] of this warp for softmax weights. */
template <int ROWS>
FKV_FN void fkv_plain_process_tile(fkv_u32 lane, FKV_SHARED const float *queries, FKV_SHARED float *weights,
                                   FKV_DEVICE const fkv_u8 *block, fkv_u32 slot, fkv_u32 token, fkv_u32 n_keys,
                                   FKV_LOCAL fkv_plain_rows<ROWS> &rows FKV_ORDER) {
    float score[ROWS];
    FKV_UNROLL
    for (int row = 0; row < ROWS; row++) score[row] = 0.0f;
    if (lane < n_keys) {
        for (fkv_u32 d = 0; d < FKV_D; d += fkv_k_row_shape::CHANNELS) {
            fkv_k_row_shape::chunk chunk = fkv_k_row_shape::take(block, slot + lane, d FKV_ORDER_GIVEN);
            FKV_UNROLL
            for (int i = 0; i < fkv_k_row_shape::CHANNELS; i++) {
                float k = fkv_k_row_shape::number(chunk, i);
                FKV_UNROLL
                for (int row = 0; row < ROWS; row++)
                    score[row] = fkv_fma(queries[(fkv_u32)row * FKV_D + d + (fkv_u32)i], k, score[row]);
            }
        }
    }
    FKV_UNROLL
    for (int row = 0; row < ROWS; row++) {
        bool visible = lane < n_keys && fkv_is_visible(rows.position[row], token + lane);
        float x = visible ? fkv_cap(score[row]) : FKV_NO_SCORE;
        float largest = fkv_max(rows.max[row], x);
        FKV_UNROLL
        for (fkv_u32 h = 1; h < 32; h *= 2) largest = fkv_max(largest, fkv_shuffle_xor(largest, h));
        float shrink = rows.max[row] == largest ? 1.0f : fkv_exp2(rows.max[row] - largest);
        float mine = fkv_exp2(x - (largest == FKV_NO_SCORE ? 0.0f : largest));
        rows.max[row] = largest;
        rows.total[row] = fkv_fma(rows.total[row], shrink, mine);
        weights[(fkv_u32)row * 32 + lane] = mine;
        FKV_UNROLL
        for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) rows.sum[row][i] *= shrink;
    }
    fkv_sync_warp();
    for (fkv_u32 t = 0; t < n_keys; t += fkv_v_column_shape::TOKENS) {
        fkv_v_column_shape::chunk chunks[FKV_PLAIN_CHANNELS] = {};
        FKV_UNROLL
        for (int i = 0; i < FKV_PLAIN_CHANNELS; i++)
            if (lane + 32 * (fkv_u32)i < FKV_D) chunks[i] = fkv_v_column_shape::take(block, slot + t, lane + 32 * (fkv_u32)i);
        FKV_UNROLL
        for (int n = 0; n < fkv_v_column_shape::TOKENS; n++) {
            bool visible[ROWS]; /* masked keys are skipped explicitly, because 0 * NaN is NaN */
            FKV_UNROLL
            for (int row = 0; row < ROWS; row++) visible[row] = fkv_is_visible(rows.position[row], token + t + (fkv_u32)n);
            FKV_UNROLL
            for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) {
                float v = fkv_v_column_shape::number(chunks[i], n);
                FKV_UNROLL
                for (int row = 0; row < ROWS; row++)
                    if (visible[row])
                        rows.sum[row][i] = fkv_fma(weights[(fkv_u32)row * 32 + t + (fkv_u32)n], v, rows.sum[row][i]);
            }
        }
    }
    fkv_sync_warp(); /* all lanes must have read the weights before the next tile overwrites them */
}
