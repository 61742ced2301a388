/* See admission.h. */
#include "admission.h"

static const double MIN_RETRY_S = 1.0; /* minimum retry delay: the HTTP header Retry-After has a resolution of one second */
static const double MAX_RETRY_S = 600.0;
static const double RETURN_RATE_STEP = 0.02; /* weight of the newest observation in the moving average return_rate */
static const double MIN_RETURN_RATE = 0.1;

void fkv_admission_init(fkv_admission *admission, uint32_t max_queue, double max_wait_s) {
    *admission = (fkv_admission){.max_queue = max_queue, .max_wait_s = max_wait_s, .return_rate = 1.0};
}

/* ---- shares of tenants ---- */

static uint64_t tenant_bit(uint64_t tenant) { return (uint64_t)1 << tenant % 64; }

fkv_tenant_load fkv_tenant_load_init(uint64_t tenant) {
    return (fkv_tenant_load){.tenant = tenant, .tenants = tenant_bit(tenant)};
}

void fkv_tenant_load_add(fkv_tenant_load *load, uint64_t tenant, double seconds) {
    load->tenants |= tenant_bit(tenant);
    if (tenant != load->tenant) return;
    load->n_own++;
    load->own_s += seconds;
}

uint32_t fkv_tenant_load_tenants(const fkv_tenant_load *load) { return (uint32_t)__builtin_popcountll(load->tenants); }

double fkv_tenant_load_wait(const fkv_tenant_load *load, double wait_s, double next_start_s) {
    const uint32_t n = fkv_tenant_load_tenants(load);
    const double in_turn_s = next_start_s + n * load->own_s;
    return n > 1 && in_turn_s < wait_s ? in_turn_s : wait_s;
}

/* Returns true if the queue has no slot for another request of the tenant. n_reserved: number of slots to keep free for the
 * tenant's reservations. */
static bool queue_is_full(const fkv_admission *admission, fkv_queue_state queue, uint32_t n_reserved) {
    const uint32_t share = (admission->max_queue + queue.n_tenants - 1) / queue.n_tenants;
    return queue.n_waiting + n_reserved >= admission->max_queue && queue.n_own + n_reserved >= share;
}

/* ---- reservations ---- */

static void update_return_rate(fkv_admission *admission, double returned) {
    admission->return_rate += RETURN_RATE_STEP * (returned - admission->return_rate);
    if (admission->return_rate < MIN_RETURN_RATE) admission->return_rate = MIN_RETURN_RATE;
}

static void drop_expired(fkv_admission *admission, double now) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < admission->n; i++) {
        if (admission->reservations[i].expires_at > now)
            admission->reservations[kept++] = admission->reservations[i];
        else
            update_return_rate(admission, 0.0);
    }
    admission->n = kept;
}

static uint32_t find_reservation(const fkv_admission *admission, fkv_admission_request request) {
    uint32_t i = 0;
    while (i < admission->n &&
           (admission->reservations[i].tenant != request.tenant || admission->reservations[i].hash != request.hash))
        i++;
    return i;
}

typedef struct reserved_work {
    uint32_t n;    /* number of the tenant's reservations */
    double work_s; /* expected machine time, in seconds, of all reservations that are served before the tenant's next request */
} reserved_work;

/* Estimates the machine time of the reservations that are served before the next request of `tenant`. Only the first `end`
 * reservations are considered. Tenants are served in turn, so each other tenant is assumed to contribute at most as much time as
 * this tenant. */
static reserved_work reserved_work_before(const fkv_admission *admission, uint32_t end, uint64_t tenant, double unit_s) {
    reserved_work own = {0};
    double all_s = 0.0;
    uint64_t tenants = 0; /* set of tenant_bit() values */
    for (uint32_t i = 0; i < end; i++) {
        const fkv_reservation *t = &admission->reservations[i];
        tenants |= tenant_bit(t->tenant);
        all_s += t->work * unit_s;
        own.n += t->tenant == tenant;
        own.work_s += t->tenant == tenant ? t->work * unit_s : 0.0;
    }
    own.work_s *= __builtin_popcountll(tenants);
    if (own.work_s > all_s) own.work_s = all_s;
    own.work_s *= admission->return_rate;
    return own;
}

static double clamp_retry(double seconds) {
    if (!(seconds > MIN_RETRY_S)) return MIN_RETRY_S;
    return seconds < MAX_RETRY_S ? seconds : MAX_RETRY_S;
}

static void redeem_reservation(fkv_admission *admission, uint32_t at) {
    fkv_reservation *reservation = &admission->reservations[at];
    memmove(reservation, reservation + 1, (--admission->n - at) * sizeof *reservation);
    update_return_rate(admission, 1.0);
}

static void schedule_retry(fkv_reservation *reservation, double now, double seconds) {
    const double expires_at = now + 1.5 * seconds + 5.0;
    reservation->retry_at = now + seconds;
    if (reservation->expires_at < expires_at) reservation->expires_at = expires_at;
}

/* Handles a client that retries at or after its retry time. The request is admitted if the queue has a free slot. Otherwise, the
 * new retry time is the predicted time at which a slot becomes free. */
static fkv_admission_result admit_due_reservation(fkv_admission *admission, fkv_queue_state queue, fkv_admission_request request,
                                                  uint32_t at, double *seconds) {
    fkv_reservation *reservation = &admission->reservations[at];
    if (queue_is_full(admission, queue, 0)) {
        *seconds = clamp_retry(reserved_work_before(admission, at, request.tenant, queue.unit_s).work_s + queue.next_start_s);
        schedule_retry(reservation, request.now, *seconds);
        return FKV_ADMISSION_QUEUE_FULL;
    }
    *seconds = request.now - reservation->first_attempt_at;
    redeem_reservation(admission, at);
    return FKV_ADMISSION_ADMITTED;
}

fkv_admission_result fkv_admission_decide(fkv_admission *admission, fkv_queue_state queue, fkv_admission_request request,
                                          double *seconds) {
    drop_expired(admission, request.now);
    const uint32_t at = find_reservation(admission, request);
    const bool known = at < admission->n;
    if (known && request.now >= admission->reservations[at].retry_at)
        return admit_due_reservation(admission, queue, request, at, seconds);
    /* the request is new, or its client retries too early */
    const reserved_work before = reserved_work_before(admission, at, request.tenant, queue.unit_s);
    const reserved_work counted = queue.n_waiting >= (admission->max_queue + 1) / 2 ? before : (reserved_work){0};
    const bool full = queue_is_full(admission, queue, counted.n);
    const bool too_late = queue.learned && admission->max_wait_s > 0.0 && queue.wait_s + counted.work_s > admission->max_wait_s;
    if (!full && !too_late) {
        *seconds = known ? request.now - admission->reservations[at].first_attempt_at : 0.0;
        if (known) redeem_reservation(admission, at);
        return FKV_ADMISSION_ADMITTED;
    }
    *seconds = clamp_retry(known ? admission->reservations[at].retry_at - request.now : queue.wait_s + before.work_s);
    if (!known && admission->n < FKV_MAX_RESERVATIONS && before.n < FKV_MAX_TENANT_RESERVATIONS) {
        admission->reservations[admission->n] = (fkv_reservation){.tenant = request.tenant,
                                                                  .hash = request.hash,
                                                                  .first_attempt_at = request.now,
                                                                  .work = request.work_s / queue.unit_s};
        schedule_retry(&admission->reservations[admission->n++], request.now, *seconds);
    }
    return full ? FKV_ADMISSION_QUEUE_FULL : FKV_ADMISSION_WAIT_TOO_LONG;
}
