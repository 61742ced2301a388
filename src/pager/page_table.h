/* Page tables: which page of the pool holds a sequence's logical page, and which logical pages a length holds. */
#ifndef FKV_PAGE_TABLE_H
#define FKV_PAGE_TABLE_H

#include "pager_state.h"

/* Shape of the group's tables (n_fixed, n_ring, width) from the spec. */
void fkv_table_shape(const fkv_pager_spec *spec, uint32_t group, fkv_group *shape);

/* Pages that a sequence of max_tokens reserves in the group: pages(max_tokens), at most n_fixed + n_ring in a window group. */
uint32_t fkv_table_cap(const fkv_pager *pager, uint32_t group, uint32_t max_tokens);

/* First logical page, sinks apart, that a query at `position` sees. */
FKV_INLINE uint32_t fkv_table_first(const fkv_group *group, uint32_t page_tokens, uint32_t position) {
    if (group->window == 0 || position < group->window) return 0;
    return (position - group->window + 1) / page_tokens;
}

/* The first logical page from `logical` on that a sequence of n_tokens holds, if it is below pages(n_tokens):
 *     for (i = fkv_table_skip(.., 0); i < pages; i = fkv_table_skip(.., i + 1)) */
FKV_INLINE uint32_t fkv_table_skip(const fkv_group *group, uint32_t page_tokens, uint32_t n_tokens, uint32_t logical) {
    if (logical < group->n_fixed) return logical;
    return fkv_max_u32(logical, fkv_table_first(group, page_tokens, n_tokens));
}

FKV_INLINE uint32_t *fkv_table_entry(const fkv_group *group, uint32_t slot, uint32_t logical) {
    uint32_t place = logical < group->n_fixed ? logical : group->n_fixed + (logical - group->n_fixed) % group->n_ring;
    return &group->entries[(uint64_t)slot * group->width + place];
}

/* Whether a table of n_tokens holds all that a query at position n_wanted sees; n_wanted <= n_tokens. */
bool fkv_table_covers(const fkv_pager *pager, uint32_t group, uint32_t n_tokens, uint32_t n_wanted);

/* Every table holds what its length says and nothing else; adds holders and tails to refs and tails, both [n_pages]. */
bool fkv_table_consistent(const fkv_pager *pager, uint32_t group, uint32_t *refs, uint32_t *tails);

#endif
