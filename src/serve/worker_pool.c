/* See worker_pool.h. */
#include "worker_pool.h"

#include "../kit/process.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct job_list {
    worker_job *first;
    worker_job **end; /* address of the NULL pointer that ends the list; the next job is stored there */
} job_list;

struct worker_pool {
    pthread_mutex_t lock; /* protects all fields below */
    pthread_cond_t changed;
    job_list small;
    job_list large;
    bool closing;
    uint32_t n_threads;
    pthread_t threads[WORKER_SMALL_THREADS + WORKER_LARGE_THREADS]; /* the threads for small jobs come first */
};

static void append_job(job_list *list, worker_job *job) {
    job->next = NULL;
    *list->end = job;
    list->end = &job->next;
}

/* Removes and returns the first job, or returns NULL if the list is empty. */
static worker_job *take_job(job_list *list) {
    worker_job *job = list->first;
    if (job == NULL) return NULL;
    list->first = job->next;
    if (list->first == NULL) list->end = &list->first;
    return job;
}

static void run_jobs(worker_pool *pool, job_list *list) {
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        worker_job *job = take_job(list);
        if (job == NULL && pool->closing) break;
        if (job == NULL) {
            (void)pthread_cond_wait(&pool->changed, &pool->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&pool->lock);
        job->run(job->user);
        job->done(job->user);
        (void)pthread_mutex_lock(&pool->lock);
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

static void *run_small(void *user) {
    worker_pool *pool = user;
    run_jobs(pool, &pool->small);
    return NULL;
}

static void *run_large(void *user) {
    worker_pool *pool = user;
    process_lower_thread_priority();
    run_jobs(pool, &pool->large);
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
    const uint32_t n_threads = WORKER_SMALL_THREADS + WORKER_LARGE_THREADS;
    uint32_t n = 0;
    while (n < n_threads && pthread_create(&pool->threads[n], NULL, n < WORKER_SMALL_THREADS ? run_small : run_large, pool) == 0)
        n++;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->n_threads = n;
    if (n == n_threads) return pool;
    worker_pool_close(pool);
    return NULL;
}

void worker_pool_add(worker_pool *pool, worker_job *job) {
    (void)pthread_mutex_lock(&pool->lock);
    append_job(job->large ? &pool->large : &pool->small, job);
    (void)pthread_cond_broadcast(&pool->changed); /* wakes all threads, because only some of them can run this job */
    (void)pthread_mutex_unlock(&pool->lock);
}

void worker_pool_discard(worker_pool *pool) {
    for (;;) {
        (void)pthread_mutex_lock(&pool->lock);
        worker_job *job = take_job(pool->small.first != NULL ? &pool->small : &pool->large);
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
