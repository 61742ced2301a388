/* Where bytes come from: anonymous maps of whole OS pages, counted, and what the machine can give. The host's malloc is left
 * alone. Nothing here is called between fkv_cache_open() and fkv_cache_close().
 */
#ifndef FKV_MEMORY_H
#define FKV_MEMORY_H

#include "base.h"

uint64_t fkv_os_page_bytes(void);

/* Bytes that a map of `bytes` occupies: whole OS pages, at least one. The plan counts these. UINT64_MAX: no such map. */
uint64_t fkv_map_rounded(uint64_t bytes);

/* An anonymous zeroed map, whole OS pages, huge pages where the system has them. commit: every page is resident on return. */
fkv_status fkv_map_open(uint64_t bytes, bool commit, void **map);
void fkv_map_close(void *map, uint64_t bytes);

/* The sum of fkv_map_rounded() over the maps that are open in this process. Any thread may ask. For tests. */
uint64_t fkv_map_live_bytes(void);

/* fkv_memory_available() with `root` before every path that is read: for tests. */
uint64_t fkv_memory_available_under(const char *root, const char **source);

#endif
