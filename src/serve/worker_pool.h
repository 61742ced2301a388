/* Threads that run jobs that would block the event loop for too long, such as parsing and tokenizing a request.
 *
 * Small jobs start in the order of their submission, and so do large jobs. Large jobs run on separate threads with a low
 * priority, so that they delay neither small jobs nor the engines. The queue holds at most one job per open connection.
 * worker_pool_add() and worker_pool_discard() must be called on the event-loop thread.
 */
#ifndef FKV_SERVE_WORKER_POOL_H
#define FKV_SERVE_WORKER_POOL_H

#include <stdbool.h>
#include <stdint.h>

enum {
    WORKER_SMALL_THREADS = 4,
    WORKER_LARGE_THREADS = 2, /* maximum number of large jobs that run at the same time */
};

typedef struct worker_job {
    void (*run)(void *user);  /* called on a worker thread */
    void (*done)(void *user); /* called on the thread that ran or discarded the job; after this call, the pool no longer accesses
                                 the job */
    void *user;
    bool large;
    struct worker_job *next;
} worker_job;

typedef struct worker_pool worker_pool;

worker_pool *worker_pool_open(void); /* returns NULL if out of memory */

/* Adds a job, which the caller owns and keeps valid until done() is called. */
void worker_pool_add(worker_pool *pool, worker_job *job);

/* Removes all jobs that have not started. For these jobs, done() is called but run() is not. */
void worker_pool_discard(worker_pool *pool);

/* Waits for the running jobs and joins the threads. No job may be queued. pool may be NULL. */
void worker_pool_close(worker_pool *pool);

#endif
