/* Hadamard rotation with seeded random signs: spreads the few large channels of a row over all of them, so that few bits hold it.
 *
 * y = H.(sign * x) / sqrt(block), over equal blocks of the largest power of two that divides D; undo is its exact inverse in real
 * numbers (x = sign * H.y / sqrt(block)). The order of the additions is fixed (stages of 1, 2, 4, ...), so that every
 * implementation gives the same bits.
 */
#ifndef FKV_ROTATION_H
#define FKV_ROTATION_H

#include "../base/base.h"

typedef struct fkv_rotation {
    uint32_t dim;
    uint32_t block;
    float norm;                            /* 1 / sqrt(block) */
    uint32_t signs[FKV_MAX_HEAD_DIM / 32]; /* bit d of word d / 32 set: channel d is negated */
} fkv_rotation;

/* stream tells K (0) from V (1), so that the two sides get different signs from one seed. */
void fkv_rotation_make(uint64_t seed, uint32_t stream, uint32_t dim, fkv_rotation *rotation);

void fkv_rotation_apply(const fkv_rotation *rotation, float *x); /* x: [D], in place */
void fkv_rotation_undo(const fkv_rotation *rotation, float *x);

#endif
