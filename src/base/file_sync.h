/* Portable wrappers for file syncing, read-ahead and file timestamps. On Apple systems, fsync() writes data only to the drive's
 * cache, so F_FULLFSYNC is used instead if the file system supports it.
 */
#ifndef FKV_FILE_SYNC_H
#define FKV_FILE_SYNC_H

#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Flushes a file to stable storage. Returns 0 on success, or -1 with errno set on failure. */
FKV_INLINE int fkv_file_sync(int fd) {
#if FKV_OS_APPLE
    if (fcntl(fd, F_FULLFSYNC) == 0) return 0;
#endif
    int result = 0;
    do result = fsync(fd);
    while (result != 0 && errno == EINTR);
    return result;
}

/* Advises the system that the whole file is about to be read. */
FKV_INLINE void fkv_file_read_ahead(int fd) {
#if FKV_OS_APPLE
    (void)fcntl(fd, F_RDAHEAD, 1);
#else
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
#endif
}

/* Returns the modification time of a file in nanoseconds since 1970, clamped to the years 1970 to 2100. */
FKV_INLINE int64_t fkv_file_written_ns(const struct stat *about) {
#if FKV_OS_APPLE
    const struct timespec *t = &about->st_mtimespec;
#else
    const struct timespec *t = &about->st_mtim;
#endif
    const int64_t last = INT64_C(4102444800);
    int64_t seconds = t->tv_sec < 0 ? 0 : (int64_t)t->tv_sec;
    return (seconds < last ? seconds : last) * 1000000000 + t->tv_nsec;
}

#endif
