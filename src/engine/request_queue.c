/* See request_queue.h. */
#include "request_queue.h"

#include <math.h>

void fkv_request_queue_add(fkv_request_queue *queue, fkv_job *job) {
    job->next = NULL;
    if (queue->last != NULL)
        queue->last->next = job;
    else
        queue->first = job;
    queue->last = job;
    queue->n++;
}

void fkv_request_queue_remove(fkv_request_queue *queue, fkv_job *job) {
    fkv_job *before = NULL;
    for (fkv_job *j = queue->first; j != job; j = j->next) {
        FKV_ASSERT(j != NULL);
        before = j;
    }
    if (before != NULL)
        before->next = job->next;
    else
        queue->first = job->next;
    if (queue->last == job) queue->last = before;
    job->next = NULL;
    queue->n--;
}

static double aged_priority(const fkv_job *job, double now, double ageing_s) {
    double aged = ageing_s > 0.0 ? floor((now - job->first_attempt_at) / ageing_s) : 0.0;
    return (double)job->r.priority + aged;
}

/* Returns true if job b should run before job a. Job a was added to the queue before job b, but the first attempt of job b, which
 * was rejected, may have been earlier. */
static bool precedes(const fkv_job *b, const fkv_job *a, const fkv_fair_share *share, double now, double ageing_s) {
    double counter_a = share->tenants[a->tenant_slot].counter;
    double counter_b = share->tenants[b->tenant_slot].counter;
    if (counter_a != counter_b) return counter_b < counter_a;
    double priority_a = aged_priority(a, now, ageing_s);
    double priority_b = aged_priority(b, now, ageing_s);
    if (priority_a != priority_b) return priority_b > priority_a;
    if (a->deadline_at != b->deadline_at) return b->deadline_at < a->deadline_at;
    if (a->n_matched != b->n_matched) return b->n_matched > a->n_matched;
    return b->first_attempt_at < a->first_attempt_at;
}

fkv_job *fkv_request_queue_next(const fkv_request_queue *queue, const fkv_fair_share *share, double now, double ageing_s,
                                uint64_t turn) {
    fkv_job *best = NULL;
    for (fkv_job *j = queue->first; j != NULL; j = j->next)
        if (j->skipped_turn != turn && (best == NULL || precedes(j, best, share, now, ageing_s))) best = j;
    return best;
}
