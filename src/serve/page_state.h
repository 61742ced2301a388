/* Dashboard: the HTML page at / and the JSON state at /flatkv/state, which the page polls every second. */
#ifndef FKV_SERVE_PAGE_STATE_H
#define FKV_SERVE_PAGE_STATE_H

#include "exchange.h"

/* Returns the embedded page.html and its size. */
const char *page_html(size_t *n);

/* Returns the state shown by the dashboard. resident_bytes: anonymous memory of the process. */
json_t *page_state(server *s, uint64_t resident_bytes);

#endif
