/* See process.h. */
#include "process.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __APPLE__
#include <mach-o/dyld.h>
#include <mach/mach.h>
#include <pthread/qos.h>

bool process_memory_now(process_memory *now) {
    task_vm_info_data_t info;
    mach_msg_type_number_t count = TASK_VM_INFO_COUNT;
    *now = (process_memory){0};
    if (task_info(mach_task_self(), TASK_VM_INFO, (task_info_t)&info, &count) != KERN_SUCCESS) return false;
    now->anonymous_bytes = info.phys_footprint;
    return true;
}

uint64_t process_memory_peak(void) { return 0; }

bool process_program_path(char *path, size_t capacity) {
    uint32_t room = (uint32_t)capacity;
    return _NSGetExecutablePath(path, &room) == 0;
}

void process_lower_thread_priority(void) { (void)pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0); }

#else

#include <sys/resource.h>

/* Files under /proc are read into a stack buffer, because measuring must not allocate memory. */
enum { PROC_TEXT = 8192 };

static bool proc_read(const char *path, char text[PROC_TEXT]) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    size_t used = 0;
    ssize_t got = 0;
    while (used < PROC_TEXT - 1 && (got = read(file, text + used, PROC_TEXT - 1 - used)) > 0) used += (size_t)got;
    (void)close(file);
    text[used] = '\0';
    return used > 0;
}

/* Finds the line that starts with `key` and converts its value from KiB to bytes. */
static bool proc_bytes(const char *text, const char *key, uint64_t *bytes) {
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, strlen(key)) != 0) continue;
        *bytes = strtoull(line + strlen(key), NULL, 10) * 1024;
        return true;
    }
    return false;
}

/* smaps_rollup walks the page tables and is exact. The counters in /proc/self/status lag by several pages per core, so they are
 * only the fallback. */
bool process_memory_now(process_memory *now) {
    char text[PROC_TEXT];
    uint64_t anonymous = 0;
    uint64_t other = 0;
    *now = (process_memory){0};
    if (proc_read("/proc/self/smaps_rollup", text) && proc_bytes(text, "Anonymous:", &anonymous) &&
        proc_bytes(text, "Rss:", &other)) {
        *now = (process_memory){anonymous, other - anonymous};
        return true;
    }
    if (!proc_read("/proc/self/status", text) || !proc_bytes(text, "RssAnon:", &anonymous) ||
        !proc_bytes(text, "RssFile:", &other))
        return false;
    *now = (process_memory){anonymous, other};
    return true;
}

uint64_t process_memory_peak(void) {
    char text[PROC_TEXT];
    uint64_t peak = 0;
    return proc_read("/proc/self/status", text) && proc_bytes(text, "VmHWM:", &peak) ? peak : 0;
}

bool process_program_path(char *path, size_t capacity) {
    ssize_t length = readlink("/proc/self/exe", path, capacity - 1);
    if (length <= 0 || (size_t)length == capacity - 1) return false;
    path[length] = '\0';
    return true;
}

void process_lower_thread_priority(void) {
    (void)setpriority(PRIO_PROCESS, 0, 5); /* a third of the normal weight; on Linux, for this thread only */
}

#endif
