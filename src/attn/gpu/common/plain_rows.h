/* Per-lane state of the plain attention loops. A kernel source includes this file once, even if it includes plain_tile.h twice
 * (for the open and the sealed pages of a sealed layer).
 */
#define FKV_PLAIN_KEYS (FKV_PAGE_TOKENS < 32 ? FKV_PAGE_TOKENS : 32)
#define FKV_PLAIN_CHANNELS ((FKV_D + 31) / 32) /* channels per lane */

/* Softmax state and output sums of one lane, for the query rows of its warp. */
template <int ROWS> struct fkv_plain_rows {
    fkv_u32 position[ROWS];
    float max[ROWS];
    float total[ROWS]; /* total softmax weight of the keys whose scores this lane computed */
    float sum[ROWS][FKV_PLAIN_CHANNELS];
};

template <int ROWS> FKV_FN void fkv_plain_begin(FKV_LOCAL fkv_plain_rows<ROWS> &rows) {
    FKV_UNROLL
    for (int row = 0; row < ROWS; row++) {
        rows.max[row] = FKV_NO_SCORE;
        rows.total[row] = 0.0f;
        FKV_UNROLL
        for (int i = 0; i < FKV_PLAIN_CHANNELS; i++) rows.sum[row][i] = 0.0f;
    }
}

/* Returns the total weight of a row, summed over all lanes. */
FKV_FN float fkv_plain_total(float total) {
    FKV_UNROLL
    for (fkv_u32 h = 1; h < 32; h *= 2) total += fkv_shuffle_xor(total, h);
    return total;
}
