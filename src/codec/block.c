/* Computes the layout of a block. A block stores the keys and values of one page for one layer and one KV head.
 *
 * This file defines the order and alignment of the parts. Their sizes come from the codec. A part that a codec does not use has
 * size 0 and the same offset as the next part.
 *
 * The parts are stored in the order K codes, K scales, K biases, V codes, V scales, V biases, without overlap. Each part, and the
 * end of the block, is aligned to FKV_BLOCK_ALIGN.
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

void fkv_block_decode(const fkv_block *block, const uint8_t *bytes, fkv_side side, uint32_t token, float *x) {
    const uint8_t *part[FKV_N_PARTS];
    for (int p = 0; p < FKV_N_PARTS; p++) part[p] = bytes + block->offset[side][p];
    fkv_codec_decode_at(&block->codec[side], part, token, x);
}

static uint32_t open_group_size(uint32_t dim) { return dim % 64 == 0 ? 64 : 32; }

/* Creates a codec for a head dimension and page type that the sealed block already uses, so it cannot fail. */
static fkv_codec make_open_codec(fkv_codec_config config, uint32_t dim, fkv_type type) {
    fkv_codec codec;
    fkv_status status = fkv_codec_make(config, dim, type, &codec);
    FKV_ASSERT(status == FKV_OK);
    (void)status;
    return codec;
}

void fkv_block_make_open(uint32_t dim, uint32_t rope_dim, fkv_type type, uint32_t page_tokens, fkv_block *block) {
    const fkv_codec_config half = {.bits = 16, .kind = FKV_CODEC_HALF};
    const fkv_codec_config eight = {.bits = 8, .group = open_group_size(dim), .kind = FKV_CODEC_AFFINE};
    const fkv_codec k = make_open_codec(dim % eight.group == 0 ? eight : half, dim, type);
    const fkv_codec v = rope_dim != 0 ? make_open_codec(half, rope_dim, type) : k;
    fkv_block_make(&k, &v, page_tokens, block);
}

fkv_codec_config fkv_block_latent_codec(fkv_codec_config config, uint32_t dim) {
    if (config.kind != FKV_CODEC_SEALED) return config;
    return (fkv_codec_config){.bits = config.bits, .group = open_group_size(dim), .kind = FKV_CODEC_AFFINE};
}
