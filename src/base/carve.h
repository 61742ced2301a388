/* Memory laid out by arithmetic: one walk over the same take() calls counts the bytes (base NULL: the plan) or hands out the
 * addresses (base set: the open), so the plan and what is taken cannot differ.
 *
 * Invariant: used <= size whenever base is set; every piece starts on a FKV_CARVE_ALIGN boundary.
 */
#ifndef FKV_CARVE_H
#define FKV_CARVE_H

#include "base.h"

enum { FKV_CARVE_ALIGN = 64 };

typedef struct fkv_carve {
    uint8_t *base; /* NULL while counting */
    uint64_t used;
    uint64_t size; /* of the block at base; not looked at while counting */
    bool overflow; /* a count that did not fit 64 bits; the plan must be refused */
} fkv_carve;

/* n pieces of `bytes`. NULL while counting: callers assign the pointer and touch nothing behind it until base is set. */
FKV_INLINE void *fkv_carve_take(fkv_carve *carve, uint64_t n, uint64_t bytes) {
    uint64_t wanted = 0;
    uint64_t end = 0;
    uint64_t start = fkv_align_up(carve->used, FKV_CARVE_ALIGN);
    if (fkv_mul_overflows(n, bytes, &wanted) || fkv_add_overflows(start, wanted, &end)) {
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
