/* The pages of one group: which are free, how many hold each, and the sums that admission needs. */
#ifndef FKV_POOL_H
#define FKV_POOL_H

#include "pager_state.h"

void fkv_pool_layout(fkv_carve *carve, fkv_pool *pool, uint32_t n_pages);
void fkv_pool_reset(fkv_pool *pool); /* all free; page 0 is taken first */

/* The one way in which refs and tails change. A page that loses its last holder goes on top of the free list; a free page can
 * only be taken from the top. */
void fkv_pool_change(fkv_pool *pool, uint32_t page, int d_refs, int d_tails);

uint32_t fkv_pool_take(fkv_pool *pool); /* refs == 1; the pool is not empty */

/* copies(page), the equation in pager.h. */
uint32_t fkv_pool_copies(uint32_t refs, uint32_t tails);

/* The prefix tree's node becomes one more holder, or stops being one. */
void fkv_pool_adopt(fkv_pool *pool, uint32_t page, uint32_t node);
void fkv_pool_abandon(fkv_pool *pool, uint32_t page);

/* Free list and counters against refs, tails and nodes. seen: [n_pages] of scratch. */
bool fkv_pool_consistent(const fkv_pool *pool, uint32_t *seen);

#endif
