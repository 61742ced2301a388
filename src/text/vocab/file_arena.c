/* See file_arena.h. Files are mapped, not copied, so a file must not be truncated while its arena is open. */
#include "file_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static fkv_status map_regular_file(int fd, const char *path, fkv_mapped *mapped) {
    struct stat about;
    FKV_REQUIRE(fstat(fd, &about) == 0, FKV_IO, "%s: %s", path, strerror(errno));
    FKV_REQUIRE(S_ISREG(about.st_mode), FKV_FILE_FORMAT, "%s: not a regular file", path);
    FKV_REQUIRE(about.st_size > 0, FKV_FILE_FORMAT, "%s: the file is empty", path);
    void *map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    FKV_REQUIRE(map != MAP_FAILED, FKV_IO, "%s: cannot map %lld bytes: %s", path, (long long)about.st_size, strerror(errno));
    *mapped = (fkv_mapped){.bytes = map, .size = (uint64_t)about.st_size};
    static const char pointer[] = "version https://git-lfs.github.com/";
    if (about.st_size < (off_t)sizeof pointer || memcmp(map, pointer, sizeof pointer - 1) != 0) return FKV_OK;
    (void)munmap(map, (size_t)about.st_size);
    return fkv_fail(FKV_FILE_FORMAT, "%s: the file is only a Git LFS pointer; run git lfs pull to download its content", path);
}

fkv_status fkv_file_arena_map(fkv_file_arena *arena, const char *path, fkv_mapped *mapped) {
    fkv_mapped *maps = realloc(arena->maps, (arena->n_maps + 1) * sizeof *maps);
    FKV_REQUIRE(maps != NULL, FKV_NO_MEMORY, "out of memory mapping %s", path);
    arena->maps = maps;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* opening a FIFO must not block */
    FKV_REQUIRE(fd >= 0, FKV_IO, "%.300s: %s", path, strerror(errno));
    const fkv_status status = map_regular_file(fd, path, mapped);
    (void)close(fd);
    FKV_TRY(status);
    arena->maps[arena->n_maps++] = *mapped;
    return FKV_OK;
}

void *fkv_file_arena_alloc(fkv_file_arena *arena, size_t bytes) {
    void **blocks = realloc(arena->blocks, (arena->n_blocks + 1) * sizeof *blocks);
    if (blocks == NULL) return NULL;
    arena->blocks = blocks;
    void *block = calloc(1, bytes > 0 ? bytes : 1);
    if (block != NULL) blocks[arena->n_blocks++] = block;
    return block;
}

uint64_t fkv_file_arena_mapped_bytes(const fkv_file_arena *arena) {
    uint64_t bytes = 0;
    for (uint32_t m = 0; m < arena->n_maps; m++) bytes += arena->maps[m].size;
    return bytes;
}

void fkv_file_arena_close(fkv_file_arena *arena) {
    for (uint32_t m = 0; m < arena->n_maps; m++) (void)munmap((void *)(uintptr_t)arena->maps[m].bytes, arena->maps[m].size);
    for (uint32_t i = 0; i < arena->n_blocks; i++) free(arena->blocks[i]);
    free(arena->maps);
    free(arena->blocks);
    *arena = (fkv_file_arena){0};
}
