/* The two threads between an engine and a store of prefixes, and the buffers that pages travel in: the engine's thread fills and
 * empties buffers and never waits for the store.
 *
 * Owns one map: a lane of buffers for pages on their way out, one for pages on their way in, each a ring that one thread fills
 * and another empties:   released <= done <= handed <= released + n_slots. Going out, a slot is handed over by the engine, done
 * and released by the thread. Coming in, it is handed over with a key alone, done by the thread, released by the engine.
 */
#ifndef FKV_PREFIX_TRAFFIC_H
#define FKV_PREFIX_TRAFFIC_H

#include "../base/base.h"

#include <flatkv/prefix_store.h>

typedef struct fkv_prefix_traffic fkv_prefix_traffic;

/* Bytes that fkv_traffic_open() takes. packed_bytes: of the largest page. */
uint64_t fkv_traffic_bytes(uint64_t packed_bytes);

/* wake: called by a thread when a page has arrived. The store outlives the traffic. */
fkv_status fkv_traffic_open(const fkv_prefix_store *store, uint64_t packed_bytes, void (*wake)(void *user), void *user,
                            fkv_prefix_traffic **traffic);
/* Waits until what was sent is written; what was asked for is dropped. NULL is allowed. */
void fkv_traffic_close(fkv_prefix_traffic *traffic);

/* A buffer of packed_bytes for the next page to send, NULL: all are on their way. */
uint8_t *fkv_traffic_buffer(fkv_prefix_traffic *traffic);
void fkv_traffic_send(fkv_prefix_traffic *traffic, const fkv_page_key *key, uint64_t n_bytes);

/* Asks for a page, or has it removed. False: every buffer is asked for. Pages arrive in the order they were asked for. */
bool fkv_traffic_ask(fkv_prefix_traffic *traffic, const fkv_page_key *key);
bool fkv_traffic_remove(fkv_prefix_traffic *traffic, const fkv_page_key *key);

/* Takes back what was asked for and is not being read yet. */
void fkv_traffic_forget(fkv_prefix_traffic *traffic);

typedef struct fkv_arrival {
    const uint8_t *packed; /* until fkv_traffic_release() */
    uint64_t n_bytes;
    fkv_status status;
    bool removed; /* this was a removal */
    double seconds;
} fkv_arrival;

/* The oldest page asked for, if it is here. */
bool fkv_traffic_arrived(fkv_prefix_traffic *traffic, fkv_arrival *arrival);
void fkv_traffic_release(fkv_prefix_traffic *traffic);
uint32_t fkv_traffic_asked(fkv_prefix_traffic *traffic); /* and not released */

typedef struct fkv_traffic_figures {
    uint64_t written; /* pages */
    uint64_t failed;  /* writes */
    double write_seconds;
} fkv_traffic_figures;

void fkv_traffic_figures_now(fkv_prefix_traffic *traffic, fkv_traffic_figures *figures);

#endif
