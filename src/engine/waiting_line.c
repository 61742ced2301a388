/* See waiting_line.h. */
#include "waiting_line.h"

#include <math.h>

void fkv_waiting_line_add(fkv_waiting_line *line, fkv_job *job) {
    job->next = NULL;
    if (line->last != NULL)
        line->last->next = job;
    else
        line->first = job;
    line->last = job;
    line->n++;
}

void fkv_waiting_line_remove(fkv_waiting_line *line, fkv_job *job) {
    fkv_job *before = NULL;
    for (fkv_job *j = line->first; j != job; j = j->next) {
        FKV_ASSERT(j != NULL);
        before = j;
    }
    if (before != NULL)
        before->next = job->next;
    else
        line->first = job->next;
    if (line->last == job) line->last = before;
    job->next = NULL;
    line->n--;
}

static double priority_of(const fkv_job *job, double now, double ageing_s) {
    double aged = ageing_s > 0.0 ? floor((now - job->asked_at) / ageing_s) : 0.0;
    return (double)job->r.priority + aged;
}

/* a came before b; b may have asked before, and been refused. */
static bool goes_before(const fkv_job *b, const fkv_job *a, const fkv_fair_share *share, double now, double ageing_s) {
    double counter_a = share->tenants[a->place].counter;
    double counter_b = share->tenants[b->place].counter;
    if (counter_a != counter_b) return counter_b < counter_a;
    double priority_a = priority_of(a, now, ageing_s);
    double priority_b = priority_of(b, now, ageing_s);
    if (priority_a != priority_b) return priority_b > priority_a;
    if (a->deadline_at != b->deadline_at) return b->deadline_at < a->deadline_at;
    if (a->n_known != b->n_known) return b->n_known > a->n_known;
    return b->asked_at < a->asked_at;
}

fkv_job *fkv_waiting_line_next(const fkv_waiting_line *line, const fkv_fair_share *share, double now, double ageing_s,
                               uint64_t turn) {
    fkv_job *best = NULL;
    for (fkv_job *j = line->first; j != NULL; j = j->next)
        if (j->passed_over != turn && (best == NULL || goes_before(j, best, share, now, ageing_s))) best = j;
    return best;
}
