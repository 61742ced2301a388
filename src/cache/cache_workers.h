/* The worker threads of a cache, for a model that runs its products on them between the cache's calls: a second pool would fight
 * the first for the cores.
 */
#ifndef FKV_CACHE_WORKERS_H
#define FKV_CACHE_WORKERS_H

#include "../base/workers.h"

/* NULL where the cache is of a device that has none. */
fkv_workers *fkv_cache_workers(fkv_cache *cache);

#endif
