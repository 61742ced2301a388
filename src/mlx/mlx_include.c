/* See mlx_include.h. */
#include "mlx_include.h"

#include "../base/memory_file.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

enum { MAX_TEXTS = 256 }; /* maximum number of in-memory files; further kernel sources are passed as text */

static struct {
    uint64_t hash;
    int fd;
} texts[MAX_TEXTS];
static uint32_t n_texts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void format_line(int fd, const char *before, const char *after, char line[FKV_MLX_INCLUDE_CHARS]) {
    (void)snprintf(line, FKV_MLX_INCLUDE_CHARS, "%s/proc/self/fd/%d%s", before, fd, after);
}

/* Returns true if the compiler can open the file through /proc, which may be missing in a sandbox. */
static bool is_reachable(int fd) {
    char path[FKV_MLX_INCLUDE_CHARS];
    format_line(fd, "", "", path);
    return access(path, R_OK) == 0;
}

uint64_t fkv_mlx_source_hash(const char *text) { /* FNV-1a */
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text != 0; text++) hash = (hash ^ (uint8_t)*text) * 0x100000001b3u;
    return hash;
}

bool fkv_mlx_include(const char *text, uint64_t hash, char line[FKV_MLX_INCLUDE_CHARS]) {
    (void)pthread_mutex_lock(&lock);
    uint32_t i = 0;
    while (i < n_texts && texts[i].hash != hash) i++;
    if (i == n_texts && i < MAX_TEXTS) {
        const int fd = fkv_memory_file(text);
        if (fd >= 0 && is_reachable(fd)) {
            texts[n_texts].hash = hash;
            texts[n_texts++].fd = fd;
        } else if (fd >= 0) {
            (void)close(fd);
        }
    }
    const bool found = i < n_texts;
    if (found) format_line(texts[i].fd, "#include \"", "\"\n", line);
    (void)pthread_mutex_unlock(&lock);
    return found;
}
