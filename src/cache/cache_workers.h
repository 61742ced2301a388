/* Gives a model runtime access to the worker threads of a cache. The runtime runs its own computations on these threads between
 * calls to the cache. A second thread pool would compete for the same cores.
 */
#ifndef FKV_CACHE_WORKERS_H
#define FKV_CACHE_WORKERS_H

#include "../base/workers.h"

/* Returns the workers of the cache, or NULL if its device has none. */
FKV_INTERNAL fkv_workers *fkv_cache_workers(fkv_cache *cache);

#endif
