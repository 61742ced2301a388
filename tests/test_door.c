/* The engine's door: who is let in, who is told what, and whether a crowd that does as it is told gets what it was told. */
#include "../src/engine/door.h"
#include "test.h"

#include <math.h>
#include <stdio.h>

static fkv_door door;

static fkv_door_answer ask(uint64_t tenant, uint64_t what, double now, uint32_t n_waiting, double *seconds) {
    return fkv_door_ask(&door, (fkv_line_state){.n_waiting = n_waiting, .wait_s = 0.5 * n_waiting, .learned = now > 0.0},
                        (fkv_caller){.tenant = tenant, .what = what, .work_s = 0.5, .now = now}, seconds);
}

START_TEST(who_comes_back_stands_where_it_first_asked) {
    double seconds = 0.0;
    fkv_door_start(&door, 4, 0.0);
    ck_assert_int_eq(ask(0, 1, 10.0, 4, &seconds), FKV_DOOR_FULL);
    ck_assert_double_eq(seconds, 2.0);
    ck_assert_int_eq(ask(0, 2, 10.0, 4, &seconds), FKV_DOOR_FULL); /* behind the first */
    ck_assert_double_eq(seconds, 2.5);
    ck_assert_int_eq(ask(0, 2, 12.5, 4, &seconds), FKV_DOOR_FULL); /* again, without a second ticket */
    ck_assert_uint_eq(door.n, 2);
    ck_assert_int_eq(ask(0, 2, 14.0, 3, &seconds), FKV_DOOR_OPEN);
    ck_assert_double_eq(seconds, 4.0);
    ck_assert_uint_eq(door.n, 1);
    ck_assert_uint_eq(door.tickets[0].what, 1);
    ck_assert_int_eq(ask(0, 2, 14.0, 1, &seconds), FKV_DOOR_OPEN); /* the same once more is somebody new */
    ck_assert_double_eq(seconds, 0.0);
}
END_TEST

START_TEST(newcomers_leave_room_for_those_who_were_refused) {
    double seconds = 0.0;
    fkv_door_start(&door, 4, 0.0);
    for (uint64_t i = 0; i < 4; i++) ck_assert_int_eq(ask(1, i, 0.0, 4, &seconds), FKV_DOOR_FULL);
    ck_assert_int_eq(ask(1, 10, 0.5, 2, &seconds), FKV_DOOR_FULL);
    ck_assert_int_eq(ask(1, 11, 0.5, 1, &seconds), FKV_DOOR_OPEN); /* the engine is kept busy */
    ck_assert_int_eq(ask(2, 12, 0.5, 3, &seconds), FKV_DOOR_OPEN); /* no other tenant is held up */
    ck_assert_int_eq(ask(2, 13, 0.5, 4, &seconds), FKV_DOOR_FULL);
    ck_assert_double_eq(seconds, 2.0);                            /* nor does it wait for their tickets */
    ck_assert_int_eq(ask(1, 3, 0.5, 3, &seconds), FKV_DOOR_FULL); /* too early: told to come after 3.5 s */
    ck_assert_double_eq(seconds, 3.0);
    ck_assert_int_eq(ask(1, 3, 3.5, 3, &seconds), FKV_DOOR_OPEN);
}
END_TEST

START_TEST(a_wait_beyond_the_bound_is_refused_and_honoured_later) {
    double seconds = 0.0;
    fkv_door_start(&door, 100, 10.0);
    ck_assert_int_eq(ask(0, 1, 0.0, 30, &seconds), FKV_DOOR_OPEN); /* a guess refuses nobody */
    ck_assert_int_eq(ask(0, 1, 1.0, 30, &seconds), FKV_DOOR_LATE);
    ck_assert_double_eq(seconds, 15.0);
    ck_assert_int_eq(ask(0, 1, 2.0, 30, &seconds), FKV_DOOR_LATE); /* asking twice is no way in */
    ck_assert_double_eq(seconds, 14.0);
    ck_assert_int_eq(ask(0, 1, 16.0, 30, &seconds), FKV_DOOR_OPEN);
    ck_assert_double_eq(seconds, 15.0);
}
END_TEST

START_TEST(tickets_are_bounded_lapse_and_are_expected_less_then) {
    double seconds = 0.0;
    fkv_door_start(&door, 1, 0.0);
    for (uint64_t i = 0; i < 3 * FKV_MAX_TICKETS; i++) {
        ck_assert_int_eq(ask(0, i, 0.0, 1, &seconds), FKV_DOOR_FULL);
        ck_assert(seconds >= 1.0 && seconds <= 600.0);
    }
    ck_assert_uint_eq(door.n, FKV_MAX_TENANT_TICKETS); /* the others are for other tenants */
    for (uint64_t i = 0; i < 3 * FKV_MAX_TICKETS; i++) (void)ask(1 + i % 3, i, 0.0, 1, &seconds);
    ck_assert_uint_eq(door.n, FKV_MAX_TICKETS);
    ck_assert_int_eq(ask(0, 9999, 0.0, 0, &seconds), FKV_DOOR_OPEN); /* whoever is outside: nobody waits inside */
    ck_assert_int_eq(ask(0, 9999, 1000.0, 1, &seconds), FKV_DOOR_FULL);
    ck_assert_uint_eq(door.n, 1);
    ck_assert_double_lt(door.back_share, 0.2);
}
END_TEST

/* ---- a crowd ---- */

enum { CLIENTS = 64, PLACES = 8, QUEUE = 8, TICKS = 30000 };
static const double TICK = 0.01;

typedef struct client {
    enum { AWAY, IN_LINE, RUNNING } where;
    uint64_t what;
    double back_at;
    double asked_at;
    double left_s; /* of its work */
    double refused_at;
    double told_s; /* 0: not refused */
} client;

static client crowd[CLIENTS];
static uint64_t state;

static double random_one(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 33) / (double)(1u << 31);
}

static client *first_in_line(void) {
    client *first = NULL;
    for (client *c = crowd; c < crowd + CLIENTS; c++)
        if (c->where == IN_LINE && (first == NULL || c->asked_at < first->asked_at)) first = c;
    return first;
}

static uint32_t count(int where) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < CLIENTS; i++) n += (int)crowd[i].where == where;
    return n;
}

/* What the engine would predict, wrong by up to a third. */
static double predicted_wait(void) {
    double wait = 0.0;
    double first = INFINITY;
    for (uint32_t i = 0; i < CLIENTS; i++) {
        if (crowd[i].where == IN_LINE) wait += crowd[i].left_s;
        if (crowd[i].where == RUNNING) first = fmin(first, crowd[i].left_s);
    }
    if (count(RUNNING) < PLACES) return 0.0;
    return (wait + (double)PLACES * first) * (0.67 + 0.66 * random_one());
}

static void come(client *c, double now) {
    const fkv_caller caller = {.what = c->what, .work_s = c->left_s, .now = now};
    double seconds = 0.0;
    ck_assert_uint_le(count(IN_LINE), QUEUE);
    if (fkv_door_ask(&door, (fkv_line_state){count(IN_LINE), predicted_wait(), true}, caller, &seconds) == FKV_DOOR_OPEN) {
        c->where = IN_LINE;
        c->asked_at = now - seconds;
        return;
    }
    if (c->told_s <= 0.0) {
        c->told_s = ceil(seconds);
        c->refused_at = now;
    }
    c->back_at = now + ceil(seconds) + 0.2 * random_one();
}

/* Those who run share the machine; who is done asks for something new at once. */
static void serve(double now) {
    const uint32_t n = count(RUNNING);
    for (client *c = crowd; c < crowd + CLIENTS; c++) {
        if (c->where != RUNNING || (c->left_s -= TICK / n) > 0.0) continue;
        *c = (client){.back_at = now, .what = (uint64_t)(1e9 * random_one()), .left_s = 0.1 + 0.4 * random_one()};
    }
}

START_TEST(a_crowd_that_comes_back_as_told_waits_as_told) {
    uint32_t n_told = 0;
    uint32_t n_good = 0;
    double longest = 0.0;
    state = 7;
    fkv_door_start(&door, QUEUE, 0.0);
    for (uint32_t i = 0; i < CLIENTS; i++) crowd[i] = (client){.what = i, .left_s = 0.1 + 0.4 * random_one()};
    for (uint32_t t = 0; t < TICKS; t++) {
        const double now = t * TICK;
        for (client *c = crowd; c < crowd + CLIENTS; c++)
            if (c->where == AWAY && c->back_at <= now) come(c, now);
        for (client *c; count(RUNNING) < PLACES && (c = first_in_line()) != NULL;) {
            c->where = RUNNING;
            longest = fmax(longest, now - c->asked_at);
            if (c->told_s <= 0.0) continue;
            n_told++;
            n_good += now - c->refused_at <= 2.0 * c->told_s;
        }
        serve(now);
    }
    printf("%u of %u within twice what they were told, longest wait %.1f s\n", n_good, n_told, longest);
    ck_assert_uint_gt(n_told, 500);
    ck_assert_uint_gt(10 * n_good, 9 * n_told);
    ck_assert_double_lt(longest, 60.0);
}
END_TEST

TEST_MAIN("door", who_comes_back_stands_where_it_first_asked, newcomers_leave_room_for_those_who_were_refused,
          a_wait_beyond_the_bound_is_refused_and_honoured_later, tickets_are_bounded_lapse_and_are_expected_less_then,
          a_crowd_that_comes_back_as_told_waits_as_told)
