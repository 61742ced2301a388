/* Unpacking of ggml's IQ1, IQ2 and IQ3 blocks, whose values are looked up in a codebook, eight or four at a time. Used by
 * block_formats.c. */
#ifndef FKV_GRID_BLOCKS_H
#define FKV_GRID_BLOCKS_H

#include <stdint.h>

extern const int8_t FKV_TABLE_IQ1[16];
extern const int8_t FKV_TABLE_IQ2[16];
extern const int8_t FKV_TABLE_IQ3_XXS[16];
extern const int8_t FKV_TABLE_IQ3_S[16];

/* Implementations of fkv_unpack_fn. */
void fkv_unpack_iq1_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq1_m(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq2_xxs(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq2_xs(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq2_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq3_xxs(const uint8_t *block, uint8_t *codes, float *scales, float *biases);
void fkv_unpack_iq3_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases);

#endif
