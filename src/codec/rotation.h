/* Hadamard rotation with seeded random signs. It spreads the few large channels of a row over all channels, so that the row can
 * be stored with few bits.
 *
 * y = H * (sign . x) / sqrt(block), where H is the Hadamard matrix and . is the elementwise product. A row of D channels is
 * divided into blocks, whose size is the largest power of two that divides D, and each block is rotated separately.
 * fkv_rotation_undo() computes the inverse x = sign . (H * y) / sqrt(block). The order of additions is fixed (stages 1, 2, 4,
 * ...), so that all implementations are bit-identical.
 */
#ifndef FKV_ROTATION_H
#define FKV_ROTATION_H

#include "../base/base.h"

typedef struct fkv_rotation {
    uint32_t dim;
    uint32_t block;
    float norm;                            /* 1 / sqrt(block) */
    uint32_t signs[FKV_MAX_HEAD_DIM / 32]; /* bit d % 32 of signs[d / 32] is set if channel d is negated */
} fkv_rotation;

/* Creates a rotation. `stream` is 0 for K and 1 for V, so that K and V use different signs with the same seed. */
void fkv_rotation_make(uint64_t seed, uint32_t stream, uint32_t dim, fkv_rotation *rotation);

void fkv_rotation_apply(const fkv_rotation *rotation, float *x); /* rotates x: [D] in place */
void fkv_rotation_undo(const fkv_rotation *rotation, float *x);

#endif
