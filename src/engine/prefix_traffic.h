/* Asynchronous I/O between the engine and a prefix store: two threads and a fixed set of page buffers. The engine thread fills
 * and empties the buffers and never waits for the store.
 *
 * All memory is in a single mapping, which holds two ring buffers: one for writes and one for reads. Each ring has one producer
 * and one consumer, with the invariant
 *     n_released <= n_completed <= n_started <= n_submitted <= n_released + n_slots.
 * In the write ring, the engine submits a page, and the write thread completes and releases the slot. In the read ring, the
 * engine submits a key, the read thread completes the slot with the page, and the engine releases the slot. The read thread may
 * start several reads before the first one is complete.
 */
#ifndef FKV_PREFIX_TRAFFIC_H
#define FKV_PREFIX_TRAFFIC_H

#include "../base/base.h"

#include <flatkv/prefix_store.h>

typedef struct fkv_prefix_traffic fkv_prefix_traffic;

/* Returns the number of bytes that fkv_traffic_open() allocates. packed_bytes: size of the largest packed page. */
uint64_t fkv_traffic_bytes(uint64_t packed_bytes);

/* Allocates the buffers and starts both threads. The read thread calls wake(user) after each completed request. The store must
 * stay open until fkv_traffic_close() returns. */
fkv_status fkv_traffic_open(const fkv_prefix_store *store, uint64_t packed_bytes, void (*wake)(void *user), void *user,
                            fkv_prefix_traffic **traffic);

/* Waits until all submitted pages are written. Pending reads are dropped. `traffic` may be NULL. */
void fkv_traffic_close(fkv_prefix_traffic *traffic);

/* Returns a buffer of packed_bytes bytes for the next page to write, or NULL if all buffers are in use. */
uint8_t *fkv_traffic_buffer(fkv_prefix_traffic *traffic);

/* Submits the buffer from fkv_traffic_buffer() for writing. */
void fkv_traffic_send(fkv_prefix_traffic *traffic, const fkv_page_key *key, uint64_t n_bytes);

/* Requests that a page be read or removed. Returns false if the read ring is full. Requests complete in submission order. */
bool fkv_traffic_request_page(fkv_prefix_traffic *traffic, const fkv_page_key *key);
bool fkv_traffic_request_removal(fkv_prefix_traffic *traffic, const fkv_page_key *key);

/* Cancels all read and removal requests that have not started yet. */
void fkv_traffic_cancel(fkv_prefix_traffic *traffic);

typedef struct fkv_arrival {
    const uint8_t *packed; /* valid until fkv_traffic_release() */
    uint64_t n_bytes;
    fkv_status status;
    bool removed;   /* true if the request was a removal */
    double seconds; /* time, in seconds, that the store spent on this request, not including earlier requests */
} fkv_arrival;

/* Returns true and fills in *arrival if the oldest request is complete. */
bool fkv_traffic_next_arrival(fkv_prefix_traffic *traffic, fkv_arrival *arrival);

/* Releases the buffer of the oldest completed request. */
void fkv_traffic_release(fkv_prefix_traffic *traffic);

/* Returns the number of submitted read and removal requests whose buffers are not released yet. */
uint32_t fkv_traffic_pending(fkv_prefix_traffic *traffic);

typedef struct fkv_traffic_stats {
    uint64_t written; /* number of pages written */
    uint64_t failed;  /* number of failed writes */
    double write_seconds;
} fkv_traffic_stats;

void fkv_traffic_stats_now(fkv_prefix_traffic *traffic, fkv_traffic_stats *stats);

#endif
