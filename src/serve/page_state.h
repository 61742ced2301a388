/* What the page at / shows: the page itself and the figures it asks for every second. */
#ifndef FKV_SERVE_PAGE_STATE_H
#define FKV_SERVE_PAGE_STATE_H

#include "exchange.h"

/* page.html, as it was built in: [*n] */
const char *page_html(size_t *n);

json_t *page_state(server *s, uint64_t resident_bytes);

#endif
