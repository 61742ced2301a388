/* Page table of one sequence in one layer group. The pager fills it in; attention and the page-file code read it. Logical page i
 * holds tokens [i * page_tokens, (i + 1) * page_tokens). Each of the first n_fixed logical pages has its own entry. All later
 * logical pages share a ring of n_ring entries (n_ring >= 1).
 */
#ifndef FKV_PAGE_VIEW_H
#define FKV_PAGE_VIEW_H

#include "base.h"

typedef struct fkv_page_view {
    const uint32_t *pages;
    uint32_t n_fixed;
    uint32_t n_ring;
} fkv_page_view;

/* Returns the index of the pool page that holds logical page `logical`. */
FKV_INLINE uint32_t fkv_page_at(fkv_page_view view, uint32_t logical) {
    return view.pages[logical < view.n_fixed ? logical : view.n_fixed + (logical - view.n_fixed) % view.n_ring];
}

#endif
