/* Tests of engine admission: which requests are admitted, the retry times of rejected requests, and whether clients that respect
 * their retry times are served as predicted.
 */
#include "../src/engine/admission.h"
#include "test.h"

#include <math.h>
#include <stdio.h>

static fkv_admission admission;

static fkv_admission_result ask(uint64_t tenant, uint64_t what, double now, uint32_t n_waiting, double *seconds) {
    return fkv_admission_decide(&admission,
                                (fkv_queue_state){.n_waiting = n_waiting,
                                                  .n_own = n_waiting,
                                                  .n_tenants = 1,
                                                  .wait_s = 0.5 * n_waiting,
                                                  .next_start_s = 0.5,
                                                  .unit_s = 1.0,
                                                  .learned = now > 0.0},
                                (fkv_admission_request){.tenant = tenant, .hash = what, .work_s = 0.5, .now = now}, seconds);
}

START_TEST(returning_client_keeps_its_place_in_the_queue) {
    double seconds = 0.0;
    fkv_admission_init(&admission, 4, 0.0);
    ck_assert_int_eq(ask(0, 1, 10.0, 4, &seconds), FKV_ADMISSION_QUEUE_FULL);
    ck_assert_double_eq(seconds, 2.0);
    ck_assert_int_eq(ask(0, 2, 10.0, 4, &seconds),
                     FKV_ADMISSION_QUEUE_FULL); /* the second rejected request gets a later retry time than the first one */
    ck_assert_double_eq(seconds, 2.5);
    ck_assert_int_eq(ask(0, 2, 12.5, 4, &seconds), FKV_ADMISSION_QUEUE_FULL); /* a retry does not create a second reservation */
    ck_assert_uint_eq(admission.n, 2);
    ck_assert_int_eq(ask(0, 2, 14.0, 3, &seconds), FKV_ADMISSION_ADMITTED);
    ck_assert_double_eq(seconds, 4.0);
    ck_assert_uint_eq(admission.n, 1);
    ck_assert_uint_eq(admission.reservations[0].hash, 1);
    ck_assert_int_eq(ask(0, 2, 14.0, 1, &seconds),
                     FKV_ADMISSION_ADMITTED); /* an admitted request that is submitted again counts as a new request */
    ck_assert_double_eq(seconds, 0.0);
}
END_TEST

START_TEST(new_requests_leave_capacity_for_rejected_ones) {
    double seconds = 0.0;
    fkv_admission_init(&admission, 4, 0.0);
    for (uint64_t i = 0; i < 4; i++) ck_assert_int_eq(ask(1, i, 0.0, 4, &seconds), FKV_ADMISSION_QUEUE_FULL);
    ck_assert_int_eq(ask(1, 10, 0.5, 2, &seconds), FKV_ADMISSION_QUEUE_FULL);
    ck_assert_int_eq(ask(1, 11, 0.5, 1, &seconds),
                     FKV_ADMISSION_ADMITTED); /* admitted despite reservations, to keep the engine busy */
    ck_assert_int_eq(ask(2, 12, 0.5, 3, &seconds), FKV_ADMISSION_ADMITTED); /* reservations of tenant 1 do not delay tenant 2 */
    ck_assert_int_eq(ask(2, 13, 0.5, 4, &seconds), FKV_ADMISSION_QUEUE_FULL);
    ck_assert_double_eq(seconds, 2.0); /* the retry time does not include the reservations of tenant 1 */
    ck_assert_int_eq(ask(1, 3, 0.5, 3, &seconds),
                     FKV_ADMISSION_QUEUE_FULL); /* the client retries at 0.5 s, before its retry time of 3.5 s */
    ck_assert_double_eq(seconds, 3.0);
    ck_assert_int_eq(ask(1, 3, 3.5, 3, &seconds), FKV_ADMISSION_ADMITTED);
}
END_TEST

START_TEST(wait_beyond_the_bound_is_rejected_and_honoured_later) {
    double seconds = 0.0;
    fkv_admission_init(&admission, 100, 10.0);
    ck_assert_int_eq(ask(0, 1, 0.0, 30, &seconds),
                     FKV_ADMISSION_ADMITTED); /* the request is admitted, because the engine cannot estimate the wait yet */
    ck_assert_int_eq(ask(0, 1, 1.0, 30, &seconds), FKV_ADMISSION_WAIT_TOO_LONG);
    ck_assert_double_eq(seconds, 15.0);
    ck_assert_int_eq(ask(0, 1, 2.0, 30, &seconds),
                     FKV_ADMISSION_WAIT_TOO_LONG); /* a retry before the retry time is rejected again */
    ck_assert_double_eq(seconds, 14.0);
    ck_assert_int_eq(ask(0, 1, 16.0, 30, &seconds), FKV_ADMISSION_ADMITTED);
    ck_assert_double_eq(seconds, 15.0);
}
END_TEST

START_TEST(reservations_are_bounded_and_expire) {
    double seconds = 0.0;
    fkv_admission_init(&admission, 1, 0.0);
    for (uint64_t i = 0; i < 3 * FKV_MAX_RESERVATIONS; i++) {
        ck_assert_int_eq(ask(0, i, 0.0, 1, &seconds), FKV_ADMISSION_QUEUE_FULL);
        ck_assert(seconds >= 1.0 && seconds <= 600.0);
    }
    ck_assert_uint_eq(admission.n, FKV_MAX_TENANT_RESERVATIONS); /* the other reservation slots stay free for other tenants */
    for (uint64_t i = 0; i < 3 * FKV_MAX_RESERVATIONS; i++) (void)ask(1 + i % 3, i, 0.0, 1, &seconds);
    ck_assert_uint_eq(admission.n, FKV_MAX_RESERVATIONS);
    ck_assert_int_eq(ask(0, 9999, 0.0, 0, &seconds),
                     FKV_ADMISSION_ADMITTED); /* the request is admitted despite all reservations, because the queue is empty */
    ck_assert_int_eq(ask(0, 9999, 1000.0, 1, &seconds), FKV_ADMISSION_QUEUE_FULL);
    ck_assert_uint_eq(admission.n, 1);
    ck_assert_double_lt(admission.return_rate, 0.2);
}
END_TEST

/* ---- several tenants ---- */

/* Tenants of the queued requests, one element per request. */
static uint64_t queued[1024];
static uint32_t n_queued;

/* Submits a request with 2 s of work to an engine whose queue is queued[]. If the request is admitted, adds it to queued[]. */
static fkv_admission_result submit_as(uint64_t tenant, double *seconds) {
    fkv_tenant_load load = fkv_tenant_load_init(tenant);
    for (uint32_t i = 0; i < n_queued; i++) fkv_tenant_load_add(&load, queued[i], 2.0);
    const fkv_queue_state queue = {.n_waiting = n_queued,
                                   .n_own = load.n_own,
                                   .n_tenants = fkv_tenant_load_tenants(&load),
                                   .wait_s = fkv_tenant_load_wait(&load, 1.0 + 2.0 * n_queued, 1.0),
                                   .next_start_s = 1.0,
                                   .unit_s = 2.0,
                                   .learned = true};
    static uint64_t hash;
    const fkv_admission_request request = {.tenant = tenant, .hash = ++hash, .work_s = 2.0, .now = 1.0};
    const fkv_admission_result result = fkv_admission_decide(&admission, queue, request, seconds);
    if (result == FKV_ADMISSION_ADMITTED) queued[n_queued++] = tenant;
    return result;
}

static uint32_t fill_as(uint64_t tenant) {
    double seconds;
    uint32_t n = 0;
    while (submit_as(tenant, &seconds) == FKV_ADMISSION_ADMITTED) n++;
    return n;
}

START_TEST(tenant_that_fills_the_queue_does_not_lock_out_others) {
    n_queued = 0;
    fkv_admission_init(&admission, 100, 0.0);
    ck_assert_uint_eq(fill_as(7), 100); /* a tenant alone may use the whole queue */
    ck_assert_uint_eq(fill_as(8), 50);
    ck_assert_uint_eq(fill_as(9), 34);
    ck_assert_uint_eq(fill_as(7) + fill_as(8) + fill_as(9), 0);
    n_queued = 0;
    fkv_admission_init(&admission, 2, 0.0);
    for (uint64_t tenant = 0; tenant < 64; tenant++)
        ck_assert_uint_ge(fill_as(tenant), 1); /* each tenant may queue at least one request */
    ck_assert_uint_eq(n_queued, 2 + 63);
    n_queued = 0;
    fkv_admission_init(&admission, 0, 0.0);
    ck_assert_uint_eq(fill_as(7) + fill_as(8), 0); /* an engine without a queue */
}
END_TEST

START_TEST(predicted_wait_counts_other_tenants_only_up_to_the_own_work) {
    double seconds = 0.0;
    n_queued = 0;
    fkv_admission_init(&admission, 100, 20.0);
    ck_assert_uint_eq(fill_as(1), 10); /* the next request would wait for 1 + 10 * 2 s */
    ck_assert_int_eq(submit_as(1, &seconds), FKV_ADMISSION_WAIT_TOO_LONG);
    ck_assert_uint_eq(fill_as(2), 5); /* tenants take turns: the next request would wait for 1 + 2 * 5 * 2 s */
    ck_assert_int_eq(submit_as(2, &seconds), FKV_ADMISSION_WAIT_TOO_LONG);
    const fkv_tenant_load only = fkv_tenant_load_init(3);
    ck_assert_double_eq(fkv_tenant_load_wait(&only, 9.0, 1.0),
                        9.0); /* no other tenant is queued, so the wait for the whole queue applies */
}
END_TEST

/* ---- simulated clients ---- */

enum { CLIENTS = 64, PLACES = 8, QUEUE = 8, TICKS = 30000 };
static const double TICK = 0.01;
static const double UNLEARNED = 0.02;

typedef struct client {
    enum { AWAY, QUEUED, RUNNING } where;
    uint64_t hash;
    double returns_at;
    double asked_at;
    double left_s; /* remaining work of the request, in seconds */
    double refused_at;
    double retry_s; /* retry time in seconds; 0 if the request was not rejected */
    uint32_t n_rejected;
} client;

static client crowd[CLIENTS];
/* time at which the engine has learned its speed; earlier predictions are too low by a factor of UNLEARNED */
static double learned_at;
static uint64_t state;

static double random_one(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 33) / (double)(1u << 31);
}

static client *first_queued(void) {
    client *first = NULL;
    for (client *c = crowd; c < crowd + CLIENTS; c++)
        if (c->where == QUEUED && (first == NULL || c->asked_at < first->asked_at)) first = c;
    return first;
}

static uint32_t count(int where) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < CLIENTS; i++) n += (int)crowd[i].where == where;
    return n;
}

/* Returns the engine's estimate of the time until the next running request is done. */
static double next_start(void) {
    double first = INFINITY;
    for (uint32_t i = 0; i < CLIENTS; i++)
        if (crowd[i].where == RUNNING) first = fmin(first, crowd[i].left_s);
    return count(RUNNING) < PLACES ? 0.0 : (double)PLACES * first;
}

/* Returns the engine's estimate of the time that a new request must wait, with a random error of up to one third. */
static double predicted_wait(void) {
    double wait = 0.0;
    double first = INFINITY;
    for (uint32_t i = 0; i < CLIENTS; i++) {
        if (crowd[i].where == QUEUED) wait += crowd[i].left_s;
        if (crowd[i].where == RUNNING) first = fmin(first, crowd[i].left_s);
    }
    if (count(RUNNING) < PLACES) return 0.0;
    return (wait + (double)PLACES * first) * (0.67 + 0.66 * random_one());
}

static void arrive(client *c, double now) {
    const double scale = now < learned_at ? UNLEARNED : 1.0;
    const fkv_admission_request caller = {.hash = c->hash, .work_s = scale * c->left_s, .now = now};
    double seconds = 0.0;
    ck_assert_uint_le(count(QUEUED), QUEUE);
    if (fkv_admission_decide(&admission,
                             (fkv_queue_state){.n_waiting = count(QUEUED),
                                               .n_own = count(QUEUED),
                                               .n_tenants = 1,
                                               .wait_s = scale * predicted_wait(),
                                               .next_start_s = scale * next_start(),
                                               .unit_s = scale,
                                               .learned = true},
                             caller, &seconds) == FKV_ADMISSION_ADMITTED) {
        c->where = QUEUED;
        c->asked_at = now - seconds;
        return;
    }
    c->n_rejected++;
    if (c->retry_s <= 0.0) {
        c->retry_s = ceil(seconds);
        c->refused_at = now;
    }
    c->returns_at = now + ceil(seconds) + 0.2 * random_one();
}

/* Advances the simulated server. Running clients share the machine, and a client whose request is done submits a new request
 * immediately. */
static void serve(double now) {
    const uint32_t n = count(RUNNING);
    for (client *c = crowd; c < crowd + CLIENTS; c++) {
        if (c->where != RUNNING || (c->left_s -= TICK / n) > 0.0) continue;
        *c = (client){.returns_at = now, .hash = (uint64_t)(1e9 * random_one()), .left_s = 0.1 + 0.4 * random_one()};
    }
}

START_TEST(clients_that_follow_their_retry_times_wait_as_predicted) {
    uint32_t n_rejected = 0;
    uint32_t n_good = 0;
    double longest = 0.0;
    state = 7;
    learned_at = 0.0;
    fkv_admission_init(&admission, QUEUE, 0.0);
    for (uint32_t i = 0; i < CLIENTS; i++) crowd[i] = (client){.hash = i, .left_s = 0.1 + 0.4 * random_one()};
    for (uint32_t t = 0; t < TICKS; t++) {
        const double now = t * TICK;
        for (client *c = crowd; c < crowd + CLIENTS; c++)
            if (c->where == AWAY && c->returns_at <= now) arrive(c, now);
        for (client *c; count(RUNNING) < PLACES && (c = first_queued()) != NULL;) {
            c->where = RUNNING;
            longest = fmax(longest, now - c->asked_at);
            if (c->retry_s <= 0.0) continue;
            n_rejected++;
            n_good += now - c->refused_at <= 2.0 * c->retry_s;
        }
        serve(now);
    }
    printf("%u of %u rejected requests were started after at most twice their retry time; longest wait %.1f s\n", n_good,
           n_rejected, longest);
    ck_assert_uint_gt(n_rejected, 500);
    ck_assert_uint_gt(10 * n_good, 9 * n_rejected);
    ck_assert_double_lt(longest, 60.0);
}
END_TEST

/* A burst arrives at a server that has not measured its speed yet. Later retry times must use the measured speed, even for work
 * that was reserved earlier. */
START_TEST(retry_times_follow_the_learned_speed) {
    uint32_t n_served = 0;
    uint32_t most = 0;
    state = 3;
    learned_at = 0.5;
    fkv_admission_init(&admission, QUEUE, 0.0);
    for (uint32_t i = 0; i < CLIENTS; i++) crowd[i] = (client){.hash = i, .left_s = 1.0 + random_one()};
    for (uint32_t t = 0; t < TICKS && n_served < CLIENTS; t++) {
        const double now = t * TICK;
        for (client *c = crowd; c < crowd + CLIENTS; c++)
            if (c->where == AWAY && c->returns_at <= now) arrive(c, now);
        for (client *c; count(RUNNING) < PLACES && (c = first_queued()) != NULL;) {
            c->where = RUNNING;
            most = c->n_rejected > most ? c->n_rejected : most;
        }
        const uint32_t n = count(RUNNING);
        for (client *c = crowd; c < crowd + CLIENTS; c++) {
            if (c->where != RUNNING || (c->left_s -= TICK / n) > 0.0) continue;
            *c = (client){.returns_at = INFINITY};
            n_served++;
        }
    }
    printf("at most %u rejections per client\n", most);
    ck_assert_uint_eq(n_served, CLIENTS);
    ck_assert_uint_le(most, 5);
}
END_TEST

TEST_MAIN("admission", returning_client_keeps_its_place_in_the_queue, new_requests_leave_capacity_for_rejected_ones,
          wait_beyond_the_bound_is_rejected_and_honoured_later, reservations_are_bounded_and_expire,
          tenant_that_fills_the_queue_does_not_lock_out_others, predicted_wait_counts_other_tenants_only_up_to_the_own_work,
          clients_that_follow_their_retry_times_wait_as_predicted, retry_times_follow_the_learned_speed)
