/* See step_turns.h. Implements a ticket lock in which waiting threads sleep. */
#include "step_turns.h"

#include <pthread.h>
#include <stdlib.h>

struct fkv_step_turns {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t next_ticket;
    uint64_t now_serving; /* at most next_ticket */
    uint32_t n_members;
};

fkv_step_turns *fkv_step_turns_open(void) {
    fkv_step_turns *t = calloc(1, sizeof *t);
    if (t == NULL) return NULL;
    (void)pthread_mutex_init(&t->lock, NULL);
    (void)pthread_cond_init(&t->changed, NULL);
    t->n_members = 1;
    return t;
}

void fkv_step_turns_join(fkv_step_turns *t) {
    (void)pthread_mutex_lock(&t->lock);
    t->n_members++;
    (void)pthread_mutex_unlock(&t->lock);
}

void fkv_step_turns_leave(fkv_step_turns *t) {
    if (t == NULL) return;
    (void)pthread_mutex_lock(&t->lock);
    const bool last = --t->n_members == 0;
    (void)pthread_mutex_unlock(&t->lock);
    if (!last) return;
    (void)pthread_cond_destroy(&t->changed);
    (void)pthread_mutex_destroy(&t->lock);
    free(t);
}

void fkv_step_turns_begin(fkv_step_turns *t) {
    (void)pthread_mutex_lock(&t->lock);
    const uint64_t ticket = t->next_ticket++;
    while (t->now_serving != ticket) (void)pthread_cond_wait(&t->changed, &t->lock);
    (void)pthread_mutex_unlock(&t->lock);
}

void fkv_step_turns_end(fkv_step_turns *t) {
    (void)pthread_mutex_lock(&t->lock);
    FKV_ASSERT(t->now_serving < t->next_ticket);
    t->now_serving++;
    (void)pthread_cond_broadcast(&t->changed);
    (void)pthread_mutex_unlock(&t->lock);
}
