/* Where bytes come from: a counted arena for tables and scratch (jemalloc's own arena where built with it), plain maps for the
 * slab, and what the machine can give. Nothing here is called between fkv_cache_open() and fkv_cache_close().
 */
#ifndef FKV_MEMORY_H
#define FKV_MEMORY_H

#include "base.h"

/* An arena of one cache, its own from open to close; closed ones are used again. Any thread may open and close. live_bytes = sum
 * of fkv_memory_rounded() over the blocks taken and not given back. */
typedef struct fkv_arena {
    uint32_t index; /* of the jemalloc arena; unused without jemalloc */
    uint64_t live_bytes;
} fkv_arena;

fkv_status fkv_arena_open(fkv_arena *arena);
void fkv_arena_close(fkv_arena *arena); /* every block must have been given back */

/* Zeroed, resident, aligned to 64 bytes. NULL when the system has none. */
void *fkv_arena_take(fkv_arena *arena, uint64_t bytes);
void fkv_arena_give(fkv_arena *arena, void *block, uint64_t bytes);

/* Bytes that a block of `bytes` really occupies, all of them resident. The plan counts these. UINT64_MAX: no such block. */
uint64_t fkv_memory_rounded(uint64_t bytes);

/* Bytes the arena's allocator says it holds, asked afresh; equals live_bytes. For tests. */
uint64_t fkv_arena_measured(const fkv_arena *arena);

uint64_t fkv_os_page_bytes(void);

/* An anonymous zeroed map, whole OS pages, huge pages where the system has them. commit: every page is resident on return. */
fkv_status fkv_map_open(uint64_t bytes, bool commit, void **map);
void fkv_map_close(void *map, uint64_t bytes);

/* fkv_memory_available() with `root` before every path that is read: for tests. */
uint64_t fkv_memory_available_under(const char *root, const char **source);

#endif
