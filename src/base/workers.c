/* Worker threads of one cache. See workers.h.
 *
 * Running a job. The caller writes the job, then `unfinished`, then `left` (with release order), and then increments `epoch`. All
 * threads, including the caller, claim items by decrementing `left`. A thread that reads a positive value of `left` before its
 * decrement owns an item, and only then reads the job. While a thread owns an item, its job cannot finish and therefore cannot be
 * replaced by the next job. A thread that is still looking for items of an earlier job either finds no item or claims an item of
 * the current job. No thread can therefore run an item of a job that has finished.
 *
 * Waiting. The caller and the workers first spin for some microseconds and then sleep on a condition variable. Spinning avoids
 * most wake-ups during decode, which starts a job every few microseconds. A thread announces that it is going to sleep before it
 * checks the state for the last time. A thread that changes the state does so before it checks for sleeping threads. These
 * accesses are sequentially consistent, so at least one of the two threads sees the change made by the other.
 *
 * Invariants. `unfinished` is the number of items of the current job that have not finished; left <= unfinished; between jobs,
 * left <= 0 and unfinished = 0.
 */
#include "workers.h"

#include "memory.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

enum { SPIN_NANOSECONDS = 20 * 1000, SPINS_PER_CLOCK_READ = 32 };

typedef struct worker {
    fkv_workers *workers;
    pthread_t thread;
    uint32_t number;
} worker;

struct fkv_workers {
    /* the next two fields are modified by all threads, so each has its own cache line */
    alignas(64) _Atomic int64_t left;
    alignas(64) _Atomic int64_t unfinished;

    /* current job: written by the caller between jobs, read by threads that own an item */
    alignas(64) fkv_work_fn work;
    void *job;
    uint32_t n_items;

    alignas(64) _Atomic uint64_t epoch; /* incremented for every job and at close */
    _Atomic uint32_t n_asleep;          /* number of sleeping workers; modified while holding `lock` */
    _Atomic bool caller_asleep;         /* true while the caller sleeps; modified while holding `lock` */
    _Atomic bool stop;

    pthread_mutex_t lock; /* used only to put threads to sleep and to wake them */
    pthread_cond_t job_ready;
    pthread_cond_t job_done;
    bool may_spin; /* true if the process has at least one core per thread; never changes */
    uint32_t n_threads;
    uint8_t *stacks;  /* [n_threads - 1, FKV_WORKER_STACK_BYTES], resident; NULL if n_threads is 1 */
    worker threads[]; /* [n_threads - 1] */
};

FKV_INLINE void spin_hint(void) {
#if FKV_ARCH_X86
    __builtin_ia32_pause();
#elif FKV_ARCH_ARM
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

typedef bool (*condition_fn)(fkv_workers *workers, uint64_t seen);

/* Spins until the condition is true. Returns false if the condition is still false when the spin time ends. */
static bool spin_until(fkv_workers *workers, condition_fn holds, uint64_t seen) {
    if (!workers->may_spin) return holds(workers, seen);
    int64_t end = nanoseconds_now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < SPINS_PER_CLOCK_READ; i++) {
            if (holds(workers, seen)) return true;
            spin_hint();
        }
    } while (nanoseconds_now() < end);
    return false;
}

static bool job_is_done(fkv_workers *workers, uint64_t seen) {
    (void)seen;
    return atomic_load(&workers->unfinished) == 0;
}

static bool epoch_has_changed(fkv_workers *workers, uint64_t seen) { return atomic_load(&workers->epoch) != seen; }

static void finish_item(fkv_workers *workers) {
    bool was_last = atomic_fetch_sub(&workers->unfinished, 1) == 1;
    if (!was_last || !atomic_load(&workers->caller_asleep)) return;
    (void)pthread_mutex_lock(&workers->lock);
    (void)pthread_cond_signal(&workers->job_done);
    (void)pthread_mutex_unlock(&workers->lock);
}

/* Claims and runs items of the current job until no unclaimed item is left. */
static void run_items(fkv_workers *workers, uint32_t number) {
    for (;;) {
        int64_t left = atomic_fetch_sub(&workers->left, 1);
        if (left <= 0) return;
        workers->work(workers->job, (uint32_t)(workers->n_items - left), number);
        finish_item(workers);
    }
}

static void sleep_until_epoch_changes(fkv_workers *workers, uint64_t seen) {
    (void)pthread_mutex_lock(&workers->lock);
    (void)atomic_fetch_add(&workers->n_asleep, 1);
    while (!epoch_has_changed(workers, seen)) (void)pthread_cond_wait(&workers->job_ready, &workers->lock);
    (void)atomic_fetch_sub(&workers->n_asleep, 1);
    (void)pthread_mutex_unlock(&workers->lock);
}

static void wait_for_workers(fkv_workers *workers) {
    if (spin_until(workers, job_is_done, 0)) return;
    (void)pthread_mutex_lock(&workers->lock);
    atomic_store(&workers->caller_asleep, true);
    while (!job_is_done(workers, 0)) (void)pthread_cond_wait(&workers->job_done, &workers->lock);
    atomic_store(&workers->caller_asleep, false);
    (void)pthread_mutex_unlock(&workers->lock);
}

static uint64_t stacks_bytes(uint32_t n_stacks) { return (uint64_t)n_stacks * FKV_WORKER_STACK_BYTES; }

static void *worker_main(void *argument) {
    worker *self = argument;
    fkv_workers *workers = self->workers;
    uint64_t seen = 0;
    for (;;) {
        if (!spin_until(workers, epoch_has_changed, seen)) sleep_until_epoch_changes(workers, seen);
        seen = atomic_load(&workers->epoch);
        if (atomic_load(&workers->stop)) return NULL;
        run_items(workers, self->number);
    }
}

/* Increments the epoch and wakes up to n_wanted sleeping workers. */
static void announce(fkv_workers *workers, uint32_t n_wanted) {
    (void)atomic_fetch_add(&workers->epoch, 1);
    uint32_t n_asleep = atomic_load(&workers->n_asleep);
    if (n_asleep == 0) return;
    (void)pthread_mutex_lock(&workers->lock);
    if (n_wanted >= n_asleep) {
        (void)pthread_cond_broadcast(&workers->job_ready);
    } else {
        for (uint32_t i = 0; i < n_wanted; i++) (void)pthread_cond_signal(&workers->job_ready);
    }
    (void)pthread_mutex_unlock(&workers->lock);
}

/* Stops and joins the first n_started threads. */
static void stop_threads(fkv_workers *workers, uint32_t n_started) {
    atomic_store(&workers->stop, true);
    announce(workers, UINT32_MAX);
    for (uint32_t i = 0; i < n_started; i++) (void)pthread_join(workers->threads[i].thread, NULL);
}

/* Maps the stacks of the workers. The map is committed and its size is part of the plan, so deep calls do not increase the memory
 * use of the process. The lowest page of each stack is a guard page, so an overflow causes a crash instead of corrupting the
 * neighboring stack. */
static fkv_status open_stacks(fkv_workers *workers) {
    uint32_t n_stacks = workers->n_threads - 1;
    void *map = NULL;
    if (n_stacks == 0) return FKV_OK;
    FKV_TRY(fkv_map_open(stacks_bytes(n_stacks), true, &map));
    workers->stacks = map;
    for (uint32_t i = 0; i < n_stacks; i++)
        (void)mprotect(workers->stacks + stacks_bytes(i), (size_t)fkv_os_page_bytes(), PROT_NONE);
    return FKV_OK;
}

static int start_thread(fkv_workers *workers, uint32_t i) {
    pthread_attr_t attributes;
    worker *next = &workers->threads[i];
    *next = (worker){.workers = workers, .number = i + 1};
    int error = pthread_attr_init(&attributes);
    if (error != 0) return error;
    error = pthread_attr_setstack(&attributes, workers->stacks + stacks_bytes(i), FKV_WORKER_STACK_BYTES);
    if (error == 0) error = pthread_create(&next->thread, &attributes, worker_main, next);
    (void)pthread_attr_destroy(&attributes);
    return error;
}

/* Starts the threads with all signals blocked, so that signal handlers run on the application's threads. */
static int start_threads(fkv_workers *workers, uint32_t *n_started) {
    sigset_t all;
    sigset_t before;
    int error = 0;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    while (error == 0 && *n_started < workers->n_threads - 1) {
        error = start_thread(workers, *n_started);
        if (error == 0) ++*n_started;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void destroy_workers(fkv_workers *workers) {
    (void)pthread_cond_destroy(&workers->job_done);
    (void)pthread_cond_destroy(&workers->job_ready);
    (void)pthread_mutex_destroy(&workers->lock);
    fkv_map_close(workers->stacks, stacks_bytes(workers->n_threads - 1));
}

uint64_t fkv_workers_bytes(uint32_t n_threads) {
    return fkv_align_up(sizeof(fkv_workers) + (uint64_t)n_threads * sizeof(worker), alignof(fkv_workers));
}

fkv_status fkv_workers_open(void *place, uint32_t n_threads, fkv_workers **workers) {
    *workers = NULL;
    FKV_REQUIRE(n_threads >= 1 && n_threads <= FKV_MAX_THREADS, FKV_BAD_CONFIG, "n_threads is %u (expected 1 to %d)", n_threads,
                FKV_MAX_THREADS);
    FKV_ASSERT((uintptr_t)place % alignof(fkv_workers) == 0);
    fkv_workers *made = place;
    made->n_threads = n_threads;
    made->may_spin = n_threads <= fkv_cpu_count();
    FKV_TRY(open_stacks(made));
    (void)pthread_mutex_init(&made->lock, NULL);
    (void)pthread_cond_init(&made->job_ready, NULL);
    (void)pthread_cond_init(&made->job_done, NULL);
    uint32_t n_started = 0;
    int error = start_threads(made, &n_started);
    if (error != 0) {
        stop_threads(made, n_started);
        destroy_workers(made);
        return fkv_fail(FKV_NO_MEMORY, "cannot start worker thread %u of %u: %s; lower n_threads", n_started + 1, n_threads - 1,
                        strerror(error));
    }
    *workers = made;
    return FKV_OK;
}

void fkv_workers_close(fkv_workers *workers) {
    if (workers == NULL) return;
    stop_threads(workers, workers->n_threads - 1);
    destroy_workers(workers);
}

uint32_t fkv_workers_count(const fkv_workers *workers) { return workers->n_threads; }

void fkv_workers_run(fkv_workers *workers, fkv_work_fn work, void *job, uint32_t n_items) {
    if (workers->n_threads == 1 || n_items <= 1) {
        for (uint32_t item = 0; item < n_items; item++) work(job, item, 0);
        return;
    }
    workers->work = work;
    workers->job = job;
    workers->n_items = n_items;
    atomic_store(&workers->unfinished, n_items);
    atomic_store(&workers->left, n_items);
    announce(workers, n_items - 1);
    run_items(workers, 0);
    wait_for_workers(workers);
}
