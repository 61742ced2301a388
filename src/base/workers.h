/* Worker threads of one cache. They run the items of a job together with the calling thread.
 *
 * Items are distributed by one atomic counter; no lock is taken while a job runs. It is unspecified which thread runs an item, so
 * results must not depend on it. A work function receives the number of the thread it runs on, which it may use only to select
 * that thread's scratch memory.
 */
#ifndef FKV_WORKERS_H
#define FKV_WORKERS_H

#include "cpu.h"

typedef struct fkv_workers fkv_workers;

/* Runs one item. item is in [0, n_items), thread in [0, n_threads); thread 0 is the caller. */
typedef void (*fkv_work_fn)(void *job, uint32_t item, uint32_t thread);

enum { FKV_WORKER_STACK_BYTES = 512 * 1024 };

/* Returns the size of fkv_workers for n_threads threads, without their stacks. */
FKV_INTERNAL uint64_t fkv_workers_bytes(uint32_t n_threads);

/* Starts n_threads - 1 threads, each with a resident stack of FKV_WORKER_STACK_BYTES. place: fkv_workers_bytes() bytes of zeroed
 * memory, which must outlive the workers. */
FKV_INTERNAL fkv_status fkv_workers_open(void *place, uint32_t n_threads, fkv_workers **workers);
FKV_INTERNAL void fkv_workers_close(fkv_workers *workers);

/* Returns n_threads. */
FKV_INTERNAL uint32_t fkv_workers_count(const fkv_workers *workers);

/* Runs all items and waits until they have finished. Everything that the items have written is then visible to the caller. */
FKV_INTERNAL void fkv_workers_run(fkv_workers *workers, fkv_work_fn work, void *job, uint32_t n_items);

#endif
