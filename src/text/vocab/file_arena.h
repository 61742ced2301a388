/* An arena owns read-only file mappings and heap blocks, which fkv_file_arena_close() releases together. Model weights contain an
 * arena, from which vocabulary readers allocate. */
#ifndef FKV_FILE_ARENA_H
#define FKV_FILE_ARENA_H

#include "../../base/base.h"

typedef struct fkv_mapped {
    const uint8_t *bytes;
    uint64_t size;
} fkv_mapped;

/* A zero-initialized arena is valid and empty. */
typedef struct fkv_file_arena {
    fkv_mapped *maps; /* [n_maps] */
    uint32_t n_maps;
    void **blocks; /* [n_blocks] heap blocks allocated by fkv_file_arena_alloc() */
    uint32_t n_blocks;
} fkv_file_arena;

/* Maps a whole regular file read-only. Returns FKV_IO if the file cannot be opened, or FKV_FILE_FORMAT if it is empty, is not a
 * regular file or is a Git LFS pointer. */
fkv_status fkv_file_arena_map(fkv_file_arena *arena, const char *path, fkv_mapped *mapped);

/* Returns a zeroed block, or NULL if out of memory. */
void *fkv_file_arena_alloc(fkv_file_arena *arena, size_t bytes);

/* Returns the total size of all mapped files. */
uint64_t fkv_file_arena_mapped_bytes(const fkv_file_arena *arena);

void fkv_file_arena_close(fkv_file_arena *arena);

#endif
