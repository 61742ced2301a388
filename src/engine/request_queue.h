/* Stores queued requests in arrival order and selects the next request to admit.
 *
 * The tenant with the smallest fair-share counter is served first. The requests of a tenant are ordered by priority (highest
 * first), then by deadline (earliest first), then by cached prefix (longest first), then by first attempt (earliest first). A
 * priority rises by one for every ageing_s seconds of waiting.
 */
#ifndef FKV_REQUEST_QUEUE_H
#define FKV_REQUEST_QUEUE_H

#include "fair_share.h"
#include "request.h"

typedef struct fkv_request_queue {
    fkv_job *first;
    fkv_job *last;
    uint32_t n;
} fkv_request_queue;

void fkv_request_queue_add(fkv_request_queue *queue, fkv_job *job);
void fkv_request_queue_remove(fkv_request_queue *queue, fkv_job *job);

/* Returns the next job to admit, or NULL if there is none. Ignores jobs that were already considered, but not admitted, in this
 * turn of the scheduler. */
fkv_job *fkv_request_queue_next(const fkv_request_queue *queue, const fkv_fair_share *share, double now, double ageing_s,
                                uint64_t turn);

#endif
