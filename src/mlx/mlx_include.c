/* See mlx_include.h. */
#include "mlx_include.h"

#if FKV_OS_LINUX

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_TEXTS = 256 }; /* more kinds of layers than a process has: the next ones are given whole */

static struct {
    uint64_t hash;
    int fd;
} texts[MAX_TEXTS];
static uint32_t n_texts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The file of a text, or -1. It is not among the process's open files that a program started by it would have. */
static int file_of(const char *text) {
    const int fd = memfd_create("flatkv", MFD_CLOEXEC);
    const size_t length = strlen(text);
    size_t done = 0;
    while (fd >= 0 && done < length) {
        const ssize_t n = write(fd, text + done, length - done);
        if (n <= 0) break;
        done += (size_t)n;
    }
    if (fd < 0 || done == length) return fd;
    (void)close(fd);
    return -1;
}

static void line_of(int fd, const char *before, const char *after, char line[FKV_MLX_INCLUDE_CHARS]) {
    (void)snprintf(line, FKV_MLX_INCLUDE_CHARS, "%s/proc/self/fd/%d%s", before, fd, after);
}

/* Whether the compiler will find it: a sandbox may have no /proc. */
static bool is_reachable(int fd) {
    char path[FKV_MLX_INCLUDE_CHARS];
    line_of(fd, "", "", path);
    return access(path, R_OK) == 0;
}

bool fkv_mlx_include(const char *text, uint64_t hash, char line[FKV_MLX_INCLUDE_CHARS]) {
    (void)pthread_mutex_lock(&lock);
    uint32_t i = 0;
    while (i < n_texts && texts[i].hash != hash) i++;
    if (i == n_texts && i < MAX_TEXTS) {
        const int fd = file_of(text);
        if (fd >= 0 && is_reachable(fd)) {
            texts[n_texts].hash = hash;
            texts[n_texts++].fd = fd;
        } else if (fd >= 0) {
            (void)close(fd);
        }
    }
    const bool found = i < n_texts;
    if (found) line_of(texts[i].fd, "#include \"", "\"\n", line);
    (void)pthread_mutex_unlock(&lock);
    return found;
}

#else

bool fkv_mlx_include(const char *text, uint64_t hash, char line[FKV_MLX_INCLUDE_CHARS]) {
    (void)text;
    (void)hash;
    (void)line;
    return false;
}

#endif
