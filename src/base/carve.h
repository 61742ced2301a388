/* Carves one block of memory into arrays in two passes. The same sequence of fkv_carve_take() calls first computes the total
 * size, with a NULL base (the counting pass), and later assigns addresses within the allocated block. The planned size and the
 * allocated size therefore cannot differ.
 *
 * Invariants: used <= size if base is not NULL; every array starts at a multiple of FKV_CARVE_ALIGN.
 */
#ifndef FKV_CARVE_H
#define FKV_CARVE_H

#include "base.h"

enum { FKV_CARVE_ALIGN = 64 };

typedef struct fkv_carve {
    uint8_t *base; /* start of the block; NULL in the counting pass */
    uint64_t used;
    uint64_t size; /* size of the block at base; unused in the counting pass */
    bool overflow; /* true if the total size does not fit in 64 bits; the caller must then reject the plan */
} fkv_carve;

/* Carves an array of n elements of `bytes` bytes each. Returns NULL in the counting pass, so callers must not dereference the
 * result during that pass. */
FKV_INLINE void *fkv_carve_take(fkv_carve *carve, uint64_t n, uint64_t bytes) {
    uint64_t array_bytes = 0;
    uint64_t end = 0;
    uint64_t start = fkv_align_up(carve->used, FKV_CARVE_ALIGN);
    if (fkv_mul_overflows(n, bytes, &array_bytes) || fkv_add_overflows(start, array_bytes, &end)) {
        carve->overflow = true;
        return NULL;
    }
    carve->used = end;
    if (carve->base == NULL) return NULL;
    FKV_ASSERT(end <= carve->size);
    return carve->base + start;
}

#define FKV_CARVE(carve, n, type) ((type *)fkv_carve_take((carve), (n), sizeof(type)))

#endif
