/* Bytes of a file that must outlive the machine's power, not only the process. On Apple fsync() stops at the drive's own cache;
 * F_FULLFSYNC goes through it, where the file system knows it.
 */
#ifndef FKV_FILE_SYNC_H
#define FKV_FILE_SYNC_H

#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* 0, or -1 with errno as fsync() sets it. */
FKV_INLINE int fkv_file_sync(int fd) {
#if FKV_OS_APPLE
    if (fcntl(fd, F_FULLFSYNC) == 0) return 0;
#endif
    int result = 0;
    do result = fsync(fd);
    while (result != 0 && errno == EINTR);
    return result;
}

#endif
