/* JSON state at /flatkv/state, which the memory view of the web page polls. */
#ifndef FKV_SERVE_PAGE_STATE_H
#define FKV_SERVE_PAGE_STATE_H

#include "exchange.h"

/* Returns the state of one model for the memory view. resident_bytes: anonymous memory of the process. */
json_t *page_state(const server *s, const served_model *m, uint64_t resident_bytes);

/* Returns the properties of a model (/props) and its running requests (/slots) in the format of llama.cpp. The number of slots is
 * the number of sequences that can be decoded concurrently. Unlike in llama.cpp, slots do not own memory. */
json_t *props_state(const served_model *m);
json_t *slots_state(const served_model *m);

#endif
