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

/* Pages of a sealed layer lie in spans of so many, from page 0 on. A query sees the pages of the span that it is in, and page 0,
 * as they were written (open), all others sealed. 1: its own page alone. */
enum { FKV_OPEN_SPAN = 4 };

/* The block in which the rows of a sealed layer are written: 8 bits on both sides, in groups of 64, or 32 where 64 does not
 * divide the head dimension; 16 bits where neither does. */
void fkv_block_make_open(uint32_t dim, fkv_type type, uint32_t page_tokens, fkv_block *block);

/* The parts of the row of one token. Of a sealed codec: of a token that is the first of FKV_SEALED_TOKENS. */
FKV_INLINE void fkv_block_row(const fkv_block *block, uint8_t *bytes, fkv_side side, uint32_t token, uint8_t *part[FKV_N_PARTS]) {
    for (int p = 0; p < FKV_N_PARTS; p++)
        part[p] = bytes + block->offset[side][p] + (size_t)token * block->codec[side].row_bytes[p];
}

/* Of what a page has once, whatever its rows. */
FKV_INLINE uint32_t fkv_block_page_bytes(const fkv_block *block) {
    uint32_t bytes = 0;
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++) bytes += block->codec[side].page_bytes[p];
    return bytes;
}

/* The row of one token -> x: [D]. */
void fkv_block_decode(const fkv_block *block, const uint8_t *bytes, fkv_side side, uint32_t token, float *x);

#endif
