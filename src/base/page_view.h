/* The page table of one sequence in one layer group, as everybody walks it: the pager fills it, attention and page files read it.
 * Logical page i holds tokens [i * page_tokens, (i + 1) * page_tokens). The first n_fixed have an entry each, the rest share a
 * ring (n_ring >= 1).
 */
#ifndef FKV_PAGE_VIEW_H
#define FKV_PAGE_VIEW_H

#include "base.h"

typedef struct fkv_page_view {
    const uint32_t *pages;
    uint32_t n_fixed;
    uint32_t n_ring;
} fkv_page_view;

FKV_INLINE uint32_t fkv_page_at(fkv_page_view view, uint32_t logical) {
    return view.pages[logical < view.n_fixed ? logical : view.n_fixed + (logical - view.n_fixed) % view.n_ring];
}

#endif
