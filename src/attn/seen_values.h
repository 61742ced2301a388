/* Values of a tile in which some row does not see some token. What a row does not see adds nothing to it, whatever its bytes are;
 * but kernels multiply values by a weight of 0, and 0 * NaN is NaN. So tiles with a mask edge are looked at first, and where an
 * unseen value is not finite, each query gets a copy without the tokens that it does not see.
 */
#ifndef FKV_SEEN_VALUES_H
#define FKV_SEEN_VALUES_H

#include "attn.h"
#include "cpu/kernels.h"

/* One tile of values and the rows that look at it: heads rows of each query, whose masks end and begin later from query to query.
 */
typedef struct fkv_value_tile {
    const fkv_cpu_kernels *kernels;
    void (*values)(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], fkv_fetch *next, uint32_t n_tokens,
                   const float *p, uint32_t n_rows, float *out); /* of the codec */
    const fkv_block *block;
    const uint8_t *part[FKV_N_PARTS];
    uint32_t n_tokens;
    const fkv_row_mask *masks; /* [rows] */
    uint32_t n_rows;
    uint32_t heads;
    const float *p; /* [rows, FKV_TILE_TOKENS], as softmax() left it */
    float *out;     /* [rows, D] */
} fkv_value_tile;

/* Whether some row does not see some of n_tokens tokens. What the first and the last row see, those between them see. */
FKV_INLINE bool fkv_masks_hide(const fkv_row_mask *masks, uint32_t n_rows, uint32_t n_tokens) {
    return masks[0].end < n_tokens || masks[n_rows - 1].begin > masks[n_rows - 1].sinks;
}

/* values(), with nothing of what a row does not see. Between enter() and leave() of the same rows. */
void fkv_attn_seen_values(const fkv_value_tile *tile, fkv_fetch *next);

#endif
