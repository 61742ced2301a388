/* See door.h. */
#include "door.h"

static const double LEAST_TOLD_S = 1.0; /* Retry-After has whole seconds */
static const double MOST_TOLD_S = 600.0;
static const double BACK_STEP = 0.02;
static const double LEAST_BACK = 0.1;

void fkv_door_start(fkv_door *door, uint32_t max_queue, double max_wait_s) {
    *door = (fkv_door){.max_queue = max_queue, .max_wait_s = max_wait_s, .back_share = 1.0};
}

static void note_back(fkv_door *door, double came) {
    door->back_share += BACK_STEP * (came - door->back_share);
    if (door->back_share < LEAST_BACK) door->back_share = LEAST_BACK;
}

static void drop_lapsed(fkv_door *door, double now) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < door->n; i++) {
        if (door->tickets[i].lapses_at > now)
            door->tickets[kept++] = door->tickets[i];
        else
            note_back(door, 0.0);
    }
    door->n = kept;
}

static uint32_t find(const fkv_door *door, fkv_caller caller) {
    uint32_t i = 0;
    while (i < door->n && (door->tickets[i].tenant != caller.tenant || door->tickets[i].what != caller.what)) i++;
    return i;
}

typedef struct outside {
    uint32_t n;    /* of the tenant */
    double work_s; /* that is done before it is the tenant's turn again */
} outside;

/* The first `end` tickets, as one tenant sees them: tenants take turns, so the others come before it with no more than it has
 * itself. */
static outside outside_before(const fkv_door *door, uint32_t end, uint64_t tenant) {
    outside own = {0};
    double all_s = 0.0;
    uint64_t tenants = 0; /* by the last bits of their numbers */
    for (uint32_t i = 0; i < end; i++) {
        const fkv_ticket *t = &door->tickets[i];
        tenants |= (uint64_t)1 << t->tenant % 64;
        all_s += t->work_s;
        own.n += t->tenant == tenant;
        own.work_s += t->tenant == tenant ? t->work_s : 0.0;
    }
    own.work_s *= __builtin_popcountll(tenants);
    if (own.work_s > all_s) own.work_s = all_s;
    own.work_s *= door->back_share;
    return own;
}

static double told(double seconds) {
    if (!(seconds > LEAST_TOLD_S)) return LEAST_TOLD_S;
    return seconds < MOST_TOLD_S ? seconds : MOST_TOLD_S;
}

static void hand_in(fkv_door *door, uint32_t at) {
    fkv_ticket *ticket = &door->tickets[at];
    memmove(ticket, ticket + 1, (--door->n - at) * sizeof *ticket);
    note_back(door, 1.0);
}

static void promise(fkv_ticket *ticket, double now, double seconds) {
    const double lapses_at = now + 1.5 * seconds + 5.0;
    ticket->due_at = now + seconds;
    if (ticket->lapses_at < lapses_at) ticket->lapses_at = lapses_at;
}

/* Somebody with a ticket whose time has come: room is all that it needs, which the line makes one by one. */
static fkv_door_answer ask_in_time(fkv_door *door, fkv_line_state line, fkv_caller caller, uint32_t at, double *seconds) {
    fkv_ticket *ticket = &door->tickets[at];
    if (line.n_waiting >= door->max_queue) {
        *seconds = told(outside_before(door, at, caller.tenant).work_s + line.wait_s / (line.n_waiting + 1));
        promise(ticket, caller.now, *seconds);
        return FKV_DOOR_FULL;
    }
    *seconds = caller.now - ticket->asked_at;
    hand_in(door, at);
    return FKV_DOOR_OPEN;
}

fkv_door_answer fkv_door_ask(fkv_door *door, fkv_line_state line, fkv_caller caller, double *seconds) {
    drop_lapsed(door, caller.now);
    const uint32_t at = find(door, caller);
    const bool known = at < door->n;
    if (known && caller.now >= door->tickets[at].due_at) return ask_in_time(door, line, caller, at, seconds);
    /* new, or too early, which is no better */
    const outside before = outside_before(door, at, caller.tenant);
    const outside counted = line.n_waiting >= (door->max_queue + 1) / 2 ? before : (outside){0};
    const bool full = line.n_waiting + counted.n >= door->max_queue;
    const bool late = line.learned && door->max_wait_s > 0.0 && line.wait_s + counted.work_s > door->max_wait_s;
    if (!full && !late) {
        *seconds = known ? caller.now - door->tickets[at].asked_at : 0.0;
        if (known) hand_in(door, at);
        return FKV_DOOR_OPEN;
    }
    *seconds = told(known ? door->tickets[at].due_at - caller.now : line.wait_s + before.work_s);
    if (!known && door->n < FKV_MAX_TICKETS && before.n < FKV_MAX_TENANT_TICKETS) {
        door->tickets[door->n] =
            (fkv_ticket){.tenant = caller.tenant, .what = caller.what, .asked_at = caller.now, .work_s = caller.work_s};
        promise(&door->tickets[door->n++], caller.now, *seconds);
    }
    return full ? FKV_DOOR_FULL : FKV_DOOR_LATE;
}
