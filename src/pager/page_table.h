/* Page tables: which page of the pool holds a sequence's logical page, and which logical pages a length holds. */
#ifndef FKV_PAGE_TABLE_H
#define FKV_PAGE_TABLE_H

#include "pager_state.h"

/* Shape of the group's tables (n_fixed, n_ring, width) from the spec. */
void fkv_table_shape(const fkv_pager_spec *spec, uint32_t group, fkv_group *shape);

/* fkv_sequence.spare_from of one that gets n_tokens tokens and no spare pages. */
uint32_t fkv_table_joins(const fkv_pager *pager, uint32_t n_tokens);

/* What reserved and in_steps of the group become with one more sequence of `more` tokens and one less of `less`, 0: none. */
fkv_group fkv_table_reserve(const fkv_pager *pager, uint32_t group, uint32_t more, uint32_t less);

/* First logical page, sinks apart, that a query at `position` sees. */
FKV_INLINE uint32_t fkv_table_first(const fkv_group *group, uint32_t page_tokens, uint32_t position) {
    if (group->window == 0 || position < group->window) return 0;
    uint32_t first = (position - group->window + 1) / page_tokens;
    return first - first % group->span;
}

/* First logical page, sinks apart, that the sequence holds at n_tokens tokens. */
FKV_INLINE uint32_t fkv_table_first_held(const fkv_group *group, uint32_t page_tokens, const fkv_sequence *s, uint32_t n_tokens) {
    if (group->n_spare == 0) return fkv_table_first(group, page_tokens, n_tokens);
    uint32_t back = fkv_min_u32(n_tokens, group->n_spare * page_tokens);
    return fkv_max_u32(fkv_table_first(group, page_tokens, n_tokens - back), s->spare_from);
}

/* The first logical page from `logical` on that the sequence holds at n_tokens tokens, if it is below pages(n_tokens):
 *     for (i = fkv_table_skip(.., 0); i < pages; i = fkv_table_skip(.., i + 1)) */
FKV_INLINE uint32_t fkv_table_skip(const fkv_group *group, uint32_t page_tokens, const fkv_sequence *s, uint32_t n_tokens,
                                   uint32_t logical) {
    if (logical < group->n_fixed) return logical;
    return fkv_max_u32(logical, fkv_table_first_held(group, page_tokens, s, n_tokens));
}

FKV_INLINE uint32_t *fkv_table_entry(const fkv_group *group, uint32_t slot, uint32_t logical) {
    uint32_t place = logical < group->n_fixed ? logical : group->n_fixed + (logical - group->n_fixed) % group->n_ring;
    return &group->entries[(uint64_t)slot * group->width + place];
}

/* Whether the sequence's table holds all that a query at position n_wanted sees; n_wanted <= its length. */
bool fkv_table_covers(const fkv_pager *pager, uint32_t group, const fkv_sequence *s, uint32_t n_wanted);

/* Every table holds what its length says and nothing else; adds holders and tails to refs and tails, both [n_pages]. */
bool fkv_table_consistent(const fkv_pager *pager, uint32_t group, uint32_t *refs, uint32_t *tails);

#endif
