/* Where each part of K and of V starts inside the block of one (layer, page, KV head).
 *
 * Owns the order and the alignment of the parts, nothing else: how many bytes a part takes is the codec's answer. A part that a
 * codec does not have takes no bytes and starts where the next one does.
 *
 * Invariant: the parts lie in the order K codes, K scales, K biases, V codes, V scales, V biases, do not overlap, and each starts
 * on a FKV_BLOCK_ALIGN boundary; so does whatever follows the block.
 */
#include "block.h"

void fkv_block_make(const fkv_codec *k, const fkv_codec *v, uint32_t page_tokens, fkv_block *block) {
    uint64_t end = 0;
    memset(block, 0, sizeof *block);
    block->codec[FKV_SIDE_K] = *k;
    block->codec[FKV_SIDE_V] = *v;
    block->page_tokens = page_tokens;
    for (int side = 0; side < FKV_N_SIDES; side++) {
        for (int part = 0; part < FKV_N_PARTS; part++) {
            block->offset[side][part] = (uint32_t)end;
            block->token_bytes += block->codec[side].row_bytes[part];
            end += fkv_align_up(fkv_codec_part_bytes(&block->codec[side], (fkv_part)part, page_tokens), FKV_BLOCK_ALIGN);
        }
    }
    FKV_ASSERT(end <= UINT32_MAX);
    block->bytes = (uint32_t)end;
}
