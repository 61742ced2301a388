/* Condition variables with timed waits on the monotonic clock. On Apple systems, a condition variable cannot be bound to a clock,
 * so waits use a relative timeout instead. */
#ifndef FKV_TIMED_WAIT_H
#define FKV_TIMED_WAIT_H

#include "base.h"

#include <pthread.h>
#include <time.h>

/* Returns the monotonic time in seconds. */
FKV_INLINE double fkv_seconds_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Initializes a condition variable for fkv_cond_wait_until(). */
FKV_INLINE void fkv_cond_init(pthread_cond_t *cond) {
#if FKV_OS_APPLE
    (void)pthread_cond_init(cond, NULL);
#else
    pthread_condattr_t monotonic;
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(cond, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
#endif
}

/* Waits for a signal until fkv_seconds_now() reaches `end`. Returns false on timeout. The caller holds the lock. */
FKV_INLINE bool fkv_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, double end) {
#if FKV_OS_APPLE
    const double left = end - fkv_seconds_now();
    const double seconds = left > 0.0 ? left : 0.0;
    const struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    return pthread_cond_timedwait_relative_np(cond, lock, &t) == 0;
#else
    const struct timespec t = {.tv_sec = (time_t)end, .tv_nsec = (long)((end - (double)(time_t)end) * 1e9)};
    return pthread_cond_timedwait(cond, lock, &t) == 0;
#endif
}

#endif
