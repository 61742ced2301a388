/* Page pool of one group: free list, reference counts, and the counters that admission needs. */
#ifndef FKV_POOL_H
#define FKV_POOL_H

#include "pager_state.h"

void fkv_pool_layout(fkv_carve *carve, fkv_pool *pool, uint32_t n_pages);
void fkv_pool_reset(fkv_pool *pool); /* makes all pages free; page 0 will be allocated first */

/* Adds the given differences to refs and tails of a page. All changes of refs and tails must use this function. A page that loses
 * its last reference is pushed onto the free list. Only the page on top of the free list can gain its first reference. */
void fkv_pool_change(fkv_pool *pool, uint32_t page, int d_refs, int d_tails);

/* Allocates a page and sets its refs to 1. The free list must not be empty. */
uint32_t fkv_pool_take(fkv_pool *pool);

/* Returns copies(page) as defined in pager.h. */
uint32_t fkv_pool_copies(uint32_t refs, uint32_t tails);

/* Add or remove the reference that a prefix-tree node holds to a page. */
void fkv_pool_adopt(fkv_pool *pool, uint32_t page, uint32_t node);
void fkv_pool_abandon(fkv_pool *pool, uint32_t page);

/* Checks the free list and the counters against refs, tails and nodes. seen: [n_pages] scratch memory. */
bool fkv_pool_consistent(const fkv_pool *pool, uint32_t *seen);

#endif
