/* Worker threads of one cache: they run numbered items of a job together with the calling thread.
 *
 * Items are handed out by one atomic counter; no lock is taken from the first item to the last. Which thread runs an item is
 * not defined, so items must not depend on it (each gets the thread's number only to find its scratch).
 */
#ifndef FKV_WORKERS_H
#define FKV_WORKERS_H

#include "cpu.h"

typedef struct fkv_workers fkv_workers;

/* item in [0, n_items); thread in [0, n_threads). */
typedef void (*fkv_work_fn)(void *job, uint32_t item, uint32_t thread);

enum { FKV_WORKER_STACK_BYTES = 512 * 1024 };

uint64_t fkv_workers_bytes(uint32_t n_threads); /* of the struct, for the carve; stacks apart */

/* Starts n_threads - 1 threads on stacks of FKV_WORKER_STACK_BYTES each, resident from here on. `place` is fkv_workers_bytes() of
 * zeroed memory that outlives the workers. */
fkv_status fkv_workers_open(void *place, uint32_t n_threads, fkv_workers **workers);
void fkv_workers_close(fkv_workers *workers);

uint32_t fkv_workers_count(const fkv_workers *workers);

/* Runs all items and returns when the last has ended; everything written by them is then visible to the caller. */
void fkv_workers_run(fkv_workers *workers, fkv_work_fn work, void *job, uint32_t n_items);

#endif
