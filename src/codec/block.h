/* The bytes of one page for one (layer, KV head): K codes, K scales, K biases, V codes, V scales, V biases, each token-major and
 * starting on a FKV_BLOCK_ALIGN boundary. docs/page_format.md is the bit-exact truth of it.
 *
 * The KV heads of a layer share one fkv_block (fkv_attn_layer.block). Heads that differ (an order of channels of their own) would
 * have one each there: nothing in a block speaks of the heads beside it.
 */
#ifndef FKV_BLOCK_H
#define FKV_BLOCK_H

#include "codec.h"

enum { FKV_BLOCK_ALIGN = 64 };

typedef enum fkv_side { FKV_SIDE_K = 0, FKV_SIDE_V = 1, FKV_N_SIDES = 2 } fkv_side;

typedef struct fkv_block {
    fkv_codec codec[FKV_N_SIDES];
    uint32_t page_tokens;
    uint32_t offset[FKV_N_SIDES][FKV_N_PARTS]; /* of each part from the start of the block */
    uint32_t bytes;                            /* of the block, a multiple of FKV_BLOCK_ALIGN */
    uint32_t token_bytes;                      /* of one token in all parts of both sides */
} fkv_block;

void fkv_block_make(const fkv_codec *k, const fkv_codec *v, uint32_t page_tokens, fkv_block *block);

/* The parts of the row of one token. */
FKV_INLINE void fkv_block_row(const fkv_block *block, uint8_t *bytes, fkv_side side, uint32_t token, uint8_t *part[FKV_N_PARTS]) {
    for (int p = 0; p < FKV_N_PARTS; p++)
        part[p] = bytes + block->offset[side][p] + (size_t)token * block->codec[side].row_bytes[p];
}

#endif
