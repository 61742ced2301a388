/* Admission control: decides whether a request may join the queue, and when a rejected client should retry.
 *
 * A rejected request leaves a reservation: a hash of the request, the time of its first attempt, and the time when it should
 * retry. The retry time is the time at which all running requests, queued requests and older reservations are predicted to have
 * finished. A client that retries after that time is recognized by the hash and keeps the queue position of its first attempt. A
 * client that retries earlier is treated as new and keeps its reservation. To leave space for returning clients, new requests of
 * a tenant with reservations may fill only the first half of the queue. These requests keep the engine busy even if no client
 * returns. A reservation expires some time after its retry time.
 *
 * The queue is shared fairly between tenants. A tenant alone may fill the whole queue. A tenant whose number of queued requests
 * is below its fair share, max_queue divided by the number of tenants with queued requests, is never rejected because of a full
 * queue. Admitted requests are never dropped to make room, so with k tenants the queue may hold up to
 * max_queue * (1 + 1/2 + ... + 1/k) requests. The predicted wait counts the queued work of other tenants only up to the
 * requesting tenant's own queued work, because tenants are served in turn (fair_share.h).
 *
 * Reserved work is measured in multiples of the machine time of a typical request (fkv_queue_state.unit_s). This time is
 * predicted, and the prediction changes while the engine learns its speed. Because reservations store only the multiple, all
 * retry times use the latest prediction.
 *
 * Reservations are ordered by the time of the first rejection. Identical requests of a tenant share one reservation. This module
 * has no clock and no lock; the caller provides both.
 */
#ifndef FKV_ADMISSION_H
#define FKV_ADMISSION_H

#include "../base/base.h"

enum { FKV_MAX_RESERVATIONS = 1024, FKV_MAX_TENANT_RESERVATIONS = FKV_MAX_RESERVATIONS / 2 };

typedef struct fkv_reservation {
    uint64_t tenant;
    uint64_t hash;           /* hash of the request */
    double first_attempt_at; /* time of the first rejected attempt */
    double retry_at;         /* time when the client should retry */
    double expires_at;
    double work; /* estimated machine time of the request, as a multiple of fkv_queue_state.unit_s */
} fkv_reservation;

typedef struct fkv_admission {
    uint32_t max_queue;
    double max_wait_s;  /* maximum predicted queue time, in seconds, of an admitted request; 0 means no limit */
    double return_rate; /* estimated fraction of rejected clients that retry */
    uint32_t n;
    fkv_reservation reservations[FKV_MAX_RESERVATIONS];
} fkv_admission;

typedef struct fkv_admission_request {
    uint64_t tenant;
    uint64_t hash;
    double work_s; /* estimated machine time, in seconds */
    double now;
} fkv_admission_request;

typedef struct fkv_queue_state {
    uint32_t n_waiting;  /* number of queued requests */
    uint32_t n_own;      /* number of queued requests of the requesting tenant */
    uint32_t n_tenants;  /* number of tenants with queued requests, including the requesting tenant; at least 1 */
    double wait_s;       /* predicted queue time, in seconds, of the request */
    double next_start_s; /* predicted time, in seconds, until the next queued request starts and leaves the queue */
    double unit_s;       /* predicted machine time of a typical request, in seconds; more than 0 */
    bool learned;        /* true if the step-cost model is accurate enough to reject requests based on its predictions */
} fkv_queue_state;

/* Summary of the queued requests for the tenant that submits a request. */
typedef struct fkv_tenant_load {
    uint64_t tenant;  /* the requesting tenant */
    uint64_t tenants; /* bit t is set if a tenant whose number modulo 64 is t has queued requests or is the requesting tenant */
    uint32_t n_own;   /* number of queued requests of the requesting tenant */
    double own_s;     /* estimated machine time, in seconds, of these requests */
} fkv_tenant_load;

fkv_tenant_load fkv_tenant_load_init(uint64_t tenant);

/* Adds a queued request that needs `seconds` seconds of machine time. */
void fkv_tenant_load_add(fkv_tenant_load *load, uint64_t tenant, double seconds);

/* Returns the number of tenants with queued requests, including the requesting tenant. */
uint32_t fkv_tenant_load_tenants(const fkv_tenant_load *load);

/* Returns the predicted queue time, in seconds, of the tenant's next request. wait_s: predicted time until all queued requests
 * have started. next_start_s: predicted time until the next queued request starts. */
double fkv_tenant_load_wait(const fkv_tenant_load *load, double wait_s, double next_start_s);

typedef enum fkv_admission_result {
    FKV_ADMISSION_ADMITTED = 0,
    FKV_ADMISSION_QUEUE_FULL = 1,
    FKV_ADMISSION_WAIT_TOO_LONG = 2
} fkv_admission_result;

void fkv_admission_init(fkv_admission *admission, uint32_t max_queue, double max_wait_s);

/* Decides whether a request may join the queue. If the request is admitted, its reservation is removed and *seconds receives the
 * time since its first attempt. Otherwise, *seconds receives the retry delay, which is at least 1 second. */
fkv_admission_result fkv_admission_decide(fkv_admission *admission, fkv_queue_state queue, fkv_admission_request request,
                                          double *seconds);

#endif
