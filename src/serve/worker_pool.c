/* See worker_pool.h. */
#include "worker_pool.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct job_list {
    worker_job *first;
    worker_job **end; /* address of the NULL pointer at the end of the list, to which the next job is attached */
} job_list;

struct worker_pool {
    pthread_mutex_t lock; /* protects all fields below */
    pthread_cond_t changed;
    job_list small;
    job_list large;
    uint32_t n_large; /* number of large jobs that are running */
    bool closing;
    uint32_t n_threads;
    pthread_t threads[WORKER_THREADS];
};

static void append_job(job_list *list, worker_job *job) {
    job->next = NULL;
    *list->end = job;
    list->end = &job->next;
}

static worker_job *take_job(job_list *list) {
    worker_job *job = list->first;
    list->first = job->next;
    if (list->first == NULL) list->end = &list->first;
    return job;
}

/* Returns the next job that may start, or NULL if there is none. The caller holds the lock. */
static worker_job *next_job(worker_pool *pool) {
    if (pool->large.first != NULL && pool->n_large < WORKER_MAX_LARGE) return take_job(&pool->large);
    return pool->small.first != NULL ? take_job(&pool->small) : NULL;
}

static void *run_worker(void *user) {
    worker_pool *pool = user;
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        worker_job *job = next_job(pool);
        if (job == NULL && pool->closing) break;
        if (job == NULL) {
            (void)pthread_cond_wait(&pool->changed, &pool->lock);
            continue;
        }
        const bool large = job->large;
        pool->n_large += large;
        (void)pthread_mutex_unlock(&pool->lock);
        job->run(job->user);
        job->done(job->user);
        (void)pthread_mutex_lock(&pool->lock);
        pool->n_large -= large;
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return NULL;
}

worker_pool *worker_pool_open(void) {
    worker_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return NULL;
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_cond_init(&pool->changed, NULL);
    pool->small.end = &pool->small.first;
    pool->large.end = &pool->large.first;
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all); /* blocks all signals, because the event loop handles them */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    uint32_t n = 0;
    while (n < WORKER_THREADS && pthread_create(&pool->threads[n], NULL, run_worker, pool) == 0) n++;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->n_threads = n;
    if (n == WORKER_THREADS) return pool;
    worker_pool_close(pool);
    return NULL;
}

void worker_pool_add(worker_pool *pool, worker_job *job) {
    (void)pthread_mutex_lock(&pool->lock);
    append_job(job->large ? &pool->large : &pool->small, job);
    (void)pthread_cond_signal(&pool->changed);
    (void)pthread_mutex_unlock(&pool->lock);
}

void worker_pool_discard(worker_pool *pool) {
    for (;;) {
        (void)pthread_mutex_lock(&pool->lock);
        worker_job *job = NULL;
        if (pool->small.first != NULL)
            job = take_job(&pool->small);
        else if (pool->large.first != NULL)
            job = take_job(&pool->large);
        (void)pthread_mutex_unlock(&pool->lock);
        if (job == NULL) return;
        job->done(job->user);
    }
}

void worker_pool_close(worker_pool *pool) {
    if (pool == NULL) return;
    (void)pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    (void)pthread_cond_broadcast(&pool->changed);
    (void)pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->n_threads; i++) (void)pthread_join(pool->threads[i], NULL);
    (void)pthread_cond_destroy(&pool->changed);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
}
