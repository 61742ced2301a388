/* Files in memory, implemented with memfd_create(). See memory_file.h. */
#include "memory_file.h"

#if FKV_OS_LINUX

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int fkv_memory_file(const char *text) {
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

#else

int fkv_memory_file(const char *text) {
    (void)text;
    return -1;
}

#endif
