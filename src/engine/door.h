/* The engine's door: who may join the line, and when those who may not should come back.
 *
 * Who is refused gets a ticket: what was asked, when, and when to come back, which is when all that runs, stands in the line or
 * has an older ticket will have been served. Who comes back then is known by what it asks and counts as waiting since it first
 * asked; who comes back sooner is judged like somebody new, and keeps its ticket.
 * So that there is room for it, newcomers of a tenant with tickets fill the first half of the line only; that half keeps the
 * engine busy where nobody comes back. Tickets lapse.
 *
 * Tickets lie in the order of their first refusal, one for each thing asked. Bookkeeping only: the caller has the clock and the
 * lock.
 */
#ifndef FKV_DOOR_H
#define FKV_DOOR_H

#include "../base/base.h"

enum { FKV_MAX_TICKETS = 1024, FKV_MAX_TENANT_TICKETS = FKV_MAX_TICKETS / 2 };

typedef struct fkv_ticket {
    uint64_t tenant;
    uint64_t what;   /* hash of the request */
    double asked_at; /* first */
    double due_at;   /* when to come back */
    double lapses_at;
    double work_s; /* seconds of the machine */
} fkv_ticket;

typedef struct fkv_door {
    uint32_t max_queue;
    double max_wait_s; /* 0: no bound */
    double back_share; /* of the tickets, that come back */
    uint32_t n;
    fkv_ticket tickets[FKV_MAX_TICKETS];
} fkv_door;

typedef struct fkv_caller {
    uint64_t tenant;
    uint64_t what;
    double work_s;
    double now;
} fkv_caller;

typedef struct fkv_line_state {
    uint32_t n_waiting;
    double wait_s; /* predicted, of the last in the line */
    bool learned;  /* enough to refuse for a wait that is too long */
} fkv_line_state;

typedef enum fkv_door_answer { FKV_DOOR_OPEN = 0, FKV_DOOR_FULL = 1, FKV_DOOR_LATE = 2 } fkv_door_answer;

void fkv_door_start(fkv_door *door, uint32_t max_queue, double max_wait_s);

/* FKV_DOOR_OPEN: *seconds is how long ago it first asked, its ticket is gone. Else how long it should wait before it asks again,
 * at least 1. */
fkv_door_answer fkv_door_ask(fkv_door *door, fkv_line_state line, fkv_caller caller, double *seconds);

#endif
