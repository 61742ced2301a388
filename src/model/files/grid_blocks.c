/* Unpacking of ggml's codebook formats IQ1, IQ2 and IQ3; see grid_blocks.h. A block has 256 values. The codebook
 * (grid_tables.c) gives the magnitude of each value, and a sign is stored separately. Every format has at most 8 magnitudes, so
 * a code has at most 4 bits: the magnitude index in the low bits, and the sign in the bit above the index.
 *
 *   IQ1_S    f16 d, 32 low bytes of grid indices, 8 words: three high bits of four grid indices, 3-bit scale, sign of the shift.
 *            Groups of 32: d * (2 * scale + 1) * (g +- 1/8), g in {-1, 0, 1}
 *   IQ1_M    32 low bytes, 32 nibbles (three high bits and the sign of the shift), 4 words (four 3-bit scales and 4 bits of d).
 *            Values as in IQ1_S, groups of 16
 *   IQ2_XXS  f16 d; for every 32 values: four grid indices, 4 x 7 sign bits, 4-bit scale.
 *            d * (scale + 1/2) / 4 * (+-8, +-25, +-43)
 *   IQ2_XS   f16 d, 32 words (9-bit grid index, 7 sign bits), 16 4-bit scales. Values as in IQ2_XXS, groups of 16
 *   IQ2_S    f16 d, 32 low bytes, 32 bytes of signs, 32 high bit pairs, 16 scales. Values as in IQ2_XXS, groups of 16
 *   IQ3_XXS  f16 d, 64 grid indices; for every 32 values: 4 x 7 sign bits, 4-bit scale.
 *            d * (scale + 1/2) / 2 * (+-4, +-12, ..., +-52, +-62)
 *   IQ3_S    f16 d, 64 low bytes, 64 high bits, 32 bytes of signs, 8 4-bit scales.
 *            d * (2 * scale + 1) * (+-1, +-3, ..., +-15)
 *
 * If only 7 of 8 sign bits are stored, the eighth sign bit is chosen so that the number of set bits is even.
 */
#include "grid_blocks.h"

#include "../../base/float16.h"
#include "grid_tables.h"

/* The table of IQ1 holds the values multiplied by 8, 8 * (g +- 1/8), because these products are integers. */
const int8_t FKV_TABLE_IQ1[16] = {-7, 1, 9, 0, -9, -1, 7, 0};
const int8_t FKV_TABLE_IQ2[16] = {8, 25, 43, 0, -8, -25, -43, 0};
const int8_t FKV_TABLE_IQ3_XXS[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
const int8_t FKV_TABLE_IQ3_S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

static uint32_t u16_at(const uint8_t *bytes) { return bytes[0] | (uint32_t)bytes[1] << 8; }
static uint32_t u32_at(const uint8_t *bytes) { return u16_at(bytes) | u16_at(bytes + 2) << 16; }
static float grid_half_at(const uint8_t *bytes) { return fkv_f16_to_f32((uint16_t)u16_at(bytes)); }
static uint32_t nibble_at(const uint8_t *bytes, uint32_t i) { return (uint32_t)bytes[i / 2] >> i % 2 * 4 & 15; }

/* Expands seven stored sign bits to eight with even parity. */
static uint32_t even_signs(uint32_t seven) {
    uint32_t odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return seven | (odd & 1) << 7;
}

static void write_pair_codes(uint32_t word, uint32_t signs, uint8_t *codes) {
    for (uint32_t i = 0; i < 8; i++) codes[i] = (uint8_t)((word >> 2 * i & 3) | (signs >> i & 1) << 2);
}

static void write_four_codes(const uint16_t *grid, uint32_t first, uint32_t second, uint32_t signs, uint8_t *codes) {
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t word = grid[i < 4 ? first : second];
        codes[i] = (uint8_t)((word >> i % 4 * 4 & 7) | (signs >> i & 1) << 3);
    }
}

void fkv_unpack_iq1_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = grid_half_at(block);
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t upper = u16_at(block + 34 + 2 * (size_t)g);
        scales[g] = d * (float)(2 * (upper >> 12 & 7) + 1) * 0.125f;
        biases[g] = 0;
        for (uint32_t i = 0; i < 4; i++)
            write_pair_codes(FKV_GRID_IQ1[block[2 + 4 * g + i] | (upper >> 3 * i & 7) << 8], (upper >> 15) * 255,
                             codes + 32 * g + 8 * i);
    }
}

void fkv_unpack_iq1_m(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    uint32_t half = 0;
    for (uint32_t i = 0; i < 4; i++) half |= u16_at(block + 48 + 2 * (size_t)i) >> 12 << 4 * i;
    const float d = fkv_f16_to_f32((uint16_t)half);
    for (uint32_t g = 0; g < 16; g++) {
        scales[g] = d * (float)(2 * (u16_at(block + 48 + g / 4 * 2) >> g % 4 * 3 & 7) + 1) * 0.125f;
        biases[g] = 0;
    }
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t upper = nibble_at(block + 32, i);
        write_pair_codes(FKV_GRID_IQ1[block[i] | (upper & 7) << 8], (upper >> 3) * 255, codes + 8 * (size_t)i);
    }
}

void fkv_unpack_iq2_xxs(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = grid_half_at(block);
    for (uint32_t g = 0; g < 8; g++) {
        const uint8_t *at = block + 2 + 8 * (size_t)g;
        const uint32_t signs = u32_at(at + 4);
        scales[g] = d * (0.5f + (float)(signs >> 28)) * 0.25f;
        biases[g] = 0;
        for (uint32_t i = 0; i < 4; i++)
            write_pair_codes(FKV_GRID_IQ2_XXS[at[i]], even_signs(signs >> 7 * i & 127), codes + 32 * g + 8 * i);
    }
}

/* Unpacks 16 4-bit scales. */
static void iq2_scales(float d, const uint8_t *nibbles, float *scales, float *biases) {
    for (uint32_t g = 0; g < 16; g++) {
        scales[g] = d * (0.5f + (float)nibble_at(nibbles, g)) * 0.25f;
        biases[g] = 0;
    }
}

void fkv_unpack_iq2_xs(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    iq2_scales(grid_half_at(block), block + 66, scales, biases);
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t word = u16_at(block + 2 + 2 * (size_t)i);
        write_pair_codes(FKV_GRID_IQ2_XS[word & 511], even_signs(word >> 9), codes + 8 * (size_t)i);
    }
}

void fkv_unpack_iq2_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    iq2_scales(grid_half_at(block), block + 74, scales, biases);
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t upper = (uint32_t)block[66 + i / 4] >> i % 4 * 2 & 3;
        write_pair_codes(FKV_GRID_IQ2_S[block[2 + i] | upper << 8], block[34 + i], codes + 8 * (size_t)i);
    }
}

void fkv_unpack_iq3_xxs(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = grid_half_at(block);
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t signs = u32_at(block + 66 + 4 * (size_t)g);
        scales[g] = d * (0.5f + (float)(signs >> 28)) * 0.5f;
        biases[g] = 0;
        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *at = block + 2 + 8 * (size_t)g + 2 * (size_t)i;
            write_four_codes(FKV_GRID_IQ3_XXS, at[0], at[1], even_signs(signs >> 7 * i & 127), codes + 32 * g + 8 * i);
        }
    }
}

void fkv_unpack_iq3_s(const uint8_t *block, uint8_t *codes, float *scales, float *biases) {
    const float d = grid_half_at(block);
    for (uint32_t g = 0; g < 8; g++) {
        scales[g] = d * (float)(1 + 2 * nibble_at(block + 106, g));
        biases[g] = 0;
    }
    for (uint32_t i = 0; i < 32; i++) {
        const uint8_t *low = block + 2 + 2 * (size_t)i;
        const uint32_t upper = (uint32_t)block[66 + i / 4] >> i % 4 * 2;
        write_four_codes(FKV_GRID_IQ3_S, low[0] | (upper & 1) << 8, low[1] | (upper >> 1 & 1) << 8, block[74 + i],
                         codes + 8 * (size_t)i);
    }
}
