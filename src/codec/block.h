/* Layout of a block, which is the part of a page that belongs to one layer and one KV head. A block consists of K codes, K
 * scales, K biases, V codes, V scales, V biases. Each of these parts is token-major and aligned to FKV_BLOCK_ALIGN.
 * docs/page_format.md is the bit-exact specification.
 *
 * The KV heads of a layer share one fkv_block (fkv_attn_layer.block), unless each head has its own channel order
 * (fkv_attn_layer.head_blocks). An fkv_block contains no information about other heads.
 */
#ifndef FKV_BLOCK_H
#define FKV_BLOCK_H

#include "codec.h"

enum { FKV_BLOCK_ALIGN = 64 };

/* In a latent layer, the K side of a block stores the latent channels, which are both key and value. The V side stores the RoPE
 * channels of the key. */
typedef enum fkv_side {
    FKV_SIDE_K = 0,
    FKV_SIDE_V = 1,
    FKV_N_SIDES = 2,
    FKV_SIDE_LATENT = FKV_SIDE_K,
    FKV_SIDE_ROPE = FKV_SIDE_V
} fkv_side;

typedef struct fkv_block {
    fkv_codec codec[FKV_N_SIDES];
    uint32_t page_tokens;
    uint32_t offset[FKV_N_SIDES][FKV_N_PARTS]; /* byte offsets of the codes, scales and biases of K and V */
    uint32_t bytes;                            /* size of the block, a multiple of FKV_BLOCK_ALIGN */
    uint32_t token_bytes;                      /* packed bytes per token, summed over the codes, scales and biases of K and V */
} fkv_block;

void fkv_block_make(const fkv_codec *k, const fkv_codec *v, uint32_t page_tokens, fkv_block *block);

/* Number of pages in a span of a sealed layer; the first span starts at page 0. A query reads the open blocks of page 0 and of
 * the pages in its own span, and the sealed blocks of all other pages. */
enum { FKV_OPEN_SPAN = 4 };

/* Computes the layout of an open block. The rows of a sealed layer are first written to open blocks; sealed.h describes sealing.
 * K and V are stored as 8-bit codes in groups of 64, or in groups of 32 if the head dimension is not a multiple of 64. If it is
 * not a multiple of 32 either, K and V are stored as 16-bit floats. In a latent layer, rope_dim is the number of RoPE channels,
 * which are stored as 16-bit floats; in other layers, it is 0. */
void fkv_block_make_open(uint32_t dim, uint32_t rope_dim, fkv_type type, uint32_t page_tokens, fkv_block *block);

/* Returns the codec of the rows of latent channels in the pages of a latent layer. FKV_CODEC_SEALED is replaced with an affine
 * codec of the same bit width, because latent channels are also values, and values need one scale per row. The groups are the
 * same as in open blocks. Other codecs are returned unchanged. */
fkv_codec_config fkv_block_latent_codec(fkv_codec_config config, uint32_t dim);

/* Sets part[] to the addresses of a token's codes, scales and biases. For a sealed codec, `token` must be a multiple of
 * FKV_SEALED_TOKENS. */
FKV_INLINE void fkv_block_row(const fkv_block *block, uint8_t *bytes, fkv_side side, uint32_t token, uint8_t *part[FKV_N_PARTS]) {
    for (int p = 0; p < FKV_N_PARTS; p++)
        part[p] = bytes + block->offset[side][p] + (size_t)token * block->codec[side].row_bytes[p];
}

/* Returns the number of bytes that a block needs regardless of the number of tokens, for example for the scales of sealed
 * keys. */
FKV_INLINE uint32_t fkv_block_page_bytes(const fkv_block *block) {
    uint32_t bytes = 0;
    for (int side = 0; side < FKV_N_SIDES; side++)
        for (int p = 0; p < FKV_N_PARTS; p++) bytes += block->codec[side].page_bytes[p];
    return bytes;
}

/* Decodes the row of one token to x: [D]. */
void fkv_block_decode(const fkv_block *block, const uint8_t *bytes, fkv_side side, uint32_t token, float *x);

#endif
