/* Functions that map anonymous memory, count the mapped bytes, and determine the amount of available memory. They do not use
 * malloc. A cache does not call them between fkv_cache_open() and fkv_cache_close().
 */
#ifndef FKV_MEMORY_H
#define FKV_MEMORY_H

#include "base.h"

FKV_INTERNAL uint64_t fkv_os_page_bytes(void);

/* Returns the size that a map of `bytes` bytes occupies: `bytes` rounded up to whole OS pages, at least one page. Returns
 * UINT64_MAX on overflow. */
FKV_INTERNAL uint64_t fkv_map_rounded(uint64_t bytes);

/* Maps zeroed anonymous memory, with huge pages if available. If commit is true, all pages are resident on return. Returns
 * FKV_NO_MEMORY if the system cannot provide the memory. */
FKV_INTERNAL fkv_status fkv_map_open(uint64_t bytes, bool commit, void **map);

/* Unmaps memory. bytes must be the size passed to fkv_map_open(). NULL is allowed. */
FKV_INTERNAL void fkv_map_close(void *map, uint64_t bytes);

/* For tests: returns the total size of all open maps of this process, after rounding (see fkv_map_rounded()). Thread-safe. */
uint64_t fkv_map_live_bytes(void);

/* For tests: like fkv_memory_available(), but prepends `root` to the path of every file that it reads. */
uint64_t fkv_memory_available_under(const char *root, const char **source);

#endif
