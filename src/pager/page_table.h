/* Page tables map the logical pages of a sequence to pages of the pool. They determine which logical pages a sequence of a given
 * length holds. */
#ifndef FKV_PAGE_TABLE_H
#define FKV_PAGE_TABLE_H

#include "pager_state.h"

/* Maximum number of states that one sequence holds during a step: the state that the step reads, and the state that it writes. */
enum { FKV_STATES_IN_STEP = 2 };

/* Computes the shape of the group's tables (n_fixed, n_ring, width) from the spec. */
void fkv_table_shape(const fkv_pager_spec *spec, uint32_t group, fkv_group *shape);

/* Returns the initial value of fkv_sequence.spare_from for a sequence that starts with n_tokens tokens but without spare pages.
 */
uint32_t fkv_table_joins(const fkv_pager *pager, uint32_t n_tokens);

/* Returns a copy of the group with updated `reserved` and `in_steps`: a sequence with max_tokens = `more` is added, and a
 * sequence with max_tokens = `less` is removed. If `more` is 0, no sequence is added; if `less` is 0, none is removed. */
fkv_group fkv_table_reserve(const fkv_pager *pager, uint32_t group, uint32_t more, uint32_t less);

/* Returns the first logical page, apart from sink pages, that a query at `position` attends to. */
FKV_INLINE uint32_t fkv_table_first(const fkv_group *group, uint32_t page_tokens, uint32_t position) {
    if (group->window == 0 || position < group->window) return 0;
    uint32_t first = (position - group->window + 1) / page_tokens;
    return first - first % group->span;
}

/* Returns the first logical page, apart from sink pages, that the sequence holds at a length of n_tokens. */
FKV_INLINE uint32_t fkv_table_first_held(const fkv_group *group, uint32_t page_tokens, const fkv_sequence *s, uint32_t n_tokens) {
    if (group->n_spare == 0) return fkv_table_first(group, page_tokens, n_tokens);
    uint32_t back = fkv_min_u32(n_tokens, group->n_spare * page_tokens);
    return fkv_max_u32(fkv_table_first(group, page_tokens, n_tokens - back), s->spare_from);
}

/* Returns the first logical page >= `logical` that the sequence holds at a length of n_tokens. If there is no such page, the
 * result is past the last page. To iterate over all pages that the sequence holds: for (i = fkv_table_skip(.., 0); i < pages; i =
 * fkv_table_skip(.., i + 1)) */
FKV_INLINE uint32_t fkv_table_skip(const fkv_group *group, uint32_t page_tokens, const fkv_sequence *s, uint32_t n_tokens,
                                   uint32_t logical) {
    if (logical < group->n_fixed) return logical;
    return fkv_max_u32(logical, fkv_table_first_held(group, page_tokens, s, n_tokens));
}

/* Returns the table entry of a logical page. */
FKV_INLINE uint32_t *fkv_table_entry(const fkv_group *group, uint32_t slot, uint32_t logical) {
    uint32_t place = logical < group->n_fixed ? logical : group->n_fixed + (logical - group->n_fixed) % group->n_ring;
    return &group->entries[(uint64_t)slot * group->width + place];
}

/* Initializes the page-table rows of a slot before its first use. The rows are not initialized when the cache is opened, so in a
 * lazily committed cache unused rows occupy no memory. */
void fkv_table_prepare(fkv_pager *pager, uint32_t slot);

/* Returns the snapshot of the sequence's state after its first n_tokens tokens. The snapshot belongs to the prefix-tree node of
 * the sequence's page in the full group that ends at n_tokens. Returns FKV_NO_PAGE if there is no snapshot. */
uint32_t fkv_table_snapshot(const fkv_pager *pager, const fkv_sequence *s, uint32_t n_tokens);

/* Returns whether the sequence holds all pages that a query at position n_wanted attends to; n_wanted <= length. In the state
 * group, returns whether the state after n_wanted tokens is available. */
bool fkv_table_covers(const fkv_pager *pager, uint32_t group, const fkv_sequence *s, uint32_t n_wanted);

/* Returns whether the table of every sequence holds exactly the pages that the length of the sequence requires. For each page p,
 * adds to refs[p] the number of tables that hold p, and to tails[p] the number of sequences that may still append to p. refs,
 * tails: [n_pages] */
bool fkv_table_consistent(const fkv_pager *pager, uint32_t group, uint32_t *refs, uint32_t *tails);

#endif
