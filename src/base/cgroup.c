/* Reads the limits of the enclosing cgroups. See cgroup.h.
 *
 * /proc/self/cgroup contains the path of the process's cgroup relative to the root of its hierarchy. In a container, the
 * hierarchy mounted at /sys/fs/cgroup may start below that root, so some of the parent directories may not exist; these are
 * skipped. The loop over the parent directories always ends at the mount point. In a container, the mount point is the
 * container's own cgroup.
 *
 * Allocates no memory: every file is read into a stack buffer.
 */
#include "cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, TEXT_BYTES = 8192 };

/* cgroup version 1 expresses "no limit" as the largest multiple of the page size below 2^63. */
static const uint64_t NO_LIMIT_V1 = UINT64_C(1) << 62;

bool fkv_text_read(const char *root, const char *name, char *text, size_t size) {
    char path[PATH_BYTES];
    int length = snprintf(path, sizeof path, "%s%s", root, name);
    if (length < 0 || (size_t)length >= sizeof path) return false;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    size_t used = 0;
    while (used + 1 < size) {
        ssize_t got = read(file, text + used, size - 1 - used);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        used += (size_t)got;
    }
    (void)close(file);
    text[used] = 0;
    return used > 0;
}

static bool parse_decimal(const char *text, uint64_t *value) {
    while (*text == ' ' || *text == '\t') text++;
    if (*text < '0' || *text > '9') return false;
    errno = 0;
    *value = strtoull(text, NULL, 10);
    return errno == 0;
}

bool fkv_text_number(const char *text, const char *key, uint64_t *value) {
    size_t length = strlen(key);
    for (const char *line = text; line != NULL && *line != 0;) {
        if (strncmp(line, key, length) == 0 && (line[length] == ' ' || line[length] == '\t'))
            return parse_decimal(line + length, value);
        line = strchr(line, '\n');
        if (line != NULL) line++;
    }
    return false;
}

/* Returns whether the comma-separated list [list, end) contains `name`. */
static bool comma_list_contains(const char *list, const char *end, const char *name) {
    size_t length = strlen(name);
    while (list < end) {
        const char *comma = memchr(list, ',', (size_t)(end - list));
        const char *stop = comma != NULL ? comma : end;
        if ((size_t)(stop - list) == length && memcmp(list, name, length) == 0) return true;
        list = stop + 1;
    }
    return false;
}

/* Finds the line of the form "id:controllers:path" whose list of controllers contains `controller`, and copies its path. If
 * controller is NULL, finds the line of cgroup version 2, which is "0::path". */
static bool find_cgroup_path(const char *text, const char *controller, char *path, size_t size) {
    for (const char *line = text; *line != 0;) {
        size_t length = strcspn(line, "\n");
        const char *end = line + length;
        const char *first = memchr(line, ':', length);
        const char *second = first != NULL ? memchr(first + 1, ':', (size_t)(end - first - 1)) : NULL;
        if (second != NULL) {
            bool is_v2 = first == line + 1 && line[0] == '0' && second == first + 1;
            bool found = controller == NULL ? is_v2 : comma_list_contains(first + 1, second, controller);
            size_t path_length = (size_t)(end - second - 1);
            if (found && path_length > 0 && path_length < size) {
                memcpy(path, second + 1, path_length);
                path[path_length] = 0;
                return true;
            }
        }
        line = *end != 0 ? end + 1 : end;
    }
    return false;
}

/* Type of a function that reads the limit of one cgroup directory and lowers *least to that limit if it is smaller. */
typedef void (*limit_fn)(const char *root, const char *directory, uint64_t *least);

/* Calls `limit` for the cgroup directory `path` and for each of its parents, up to the mount point. */
static void walk_up(const char *root, const char *mount, char *path, limit_fn limit, uint64_t *least) {
    char directory[PATH_BYTES];
    size_t length = strlen(path);
    for (;;) {
        while (length > 0 && path[length - 1] == '/') path[--length] = 0;
        int written = snprintf(directory, sizeof directory, "%s%s", mount, path);
        if (written > 0 && (size_t)written < sizeof directory) limit(root, directory, least);
        if (length == 0) return;
        while (length > 0 && path[length - 1] != '/') path[--length] = 0;
    }
}

static bool directory_read(const char *root, const char *directory, const char *file, char *text, size_t size) {
    char name[PATH_BYTES];
    int length = snprintf(name, sizeof name, "%s/%s", directory, file);
    return length > 0 && (size_t)length < sizeof name && fkv_text_read(root, name, text, size);
}

static bool directory_number(const char *root, const char *directory, const char *file, uint64_t *value) {
    char text[64];
    return directory_read(root, directory, file, text, sizeof text) && parse_decimal(text, value);
}

static void lower_to_room(const char *root, const char *directory, uint64_t limit, const char *usage_file,
                          const char *reclaimable_key, uint64_t *least) {
    uint64_t usage = 0;
    uint64_t reclaimable = 0;
    char text[TEXT_BYTES];
    (void)directory_number(root, directory, usage_file, &usage);
    if (directory_read(root, directory, "memory.stat", text, sizeof text))
        (void)fkv_text_number(text, reclaimable_key, &reclaimable);
    usage -= reclaimable < usage ? reclaimable : usage;
    uint64_t room = limit > usage ? limit - usage : 0;
    if (room < *least) *least = room;
}

static void memory_limit_v2(const char *root, const char *directory, uint64_t *least) {
    uint64_t limit = 0;
    if (directory_number(root, directory, "memory.max", &limit))
        lower_to_room(root, directory, limit, "memory.current", "inactive_file", least);
}

static void memory_limit_v1(const char *root, const char *directory, uint64_t *least) {
    uint64_t limit = 0;
    if (directory_number(root, directory, "memory.limit_in_bytes", &limit) && limit < NO_LIMIT_V1)
        lower_to_room(root, directory, limit, "memory.usage_in_bytes", "total_inactive_file", least);
}

static void lower_to_quota(uint64_t quota, uint64_t period, uint64_t *least) {
    if (quota == 0 || period == 0) return;
    uint64_t cores = quota / period + (quota % period != 0);
    if (cores < *least) *least = cores;
}

static void cpu_limit_v2(const char *root, const char *directory, uint64_t *least) {
    char text[64];
    uint64_t quota = 0;
    uint64_t period = 0;
    if (!directory_read(root, directory, "cpu.max", text, sizeof text) || !parse_decimal(text, &quota)) return;
    if (parse_decimal(text + strspn(text, "0123456789"), &period)) lower_to_quota(quota, period, least);
}

static void cpu_limit_v1(const char *root, const char *directory, uint64_t *least) {
    uint64_t quota = 0; /* a quota of -1 means "no limit"; it does not parse as an unsigned number */
    uint64_t period = 0;
    if (directory_number(root, directory, "cpu.cfs_quota_us", &quota) &&
        directory_number(root, directory, "cpu.cfs_period_us", &period))
        lower_to_quota(quota, period, least);
}

static uint64_t least_limit(const char *root, const char *controller, const char *mount_v1, limit_fn limit_v1,
                            limit_fn limit_v2) {
    char text[TEXT_BYTES];
    char path[PATH_BYTES];
    uint64_t least = UINT64_MAX;
    if (!fkv_text_read(root, "/proc/self/cgroup", text, sizeof text)) return least;
    if (find_cgroup_path(text, NULL, path, sizeof path)) walk_up(root, "/sys/fs/cgroup", path, limit_v2, &least);
    if (find_cgroup_path(text, controller, path, sizeof path)) walk_up(root, mount_v1, path, limit_v1, &least);
    return least;
}

uint64_t fkv_cgroup_memory_room(const char *root) {
    return least_limit(root, "memory", "/sys/fs/cgroup/memory", memory_limit_v1, memory_limit_v2);
}

uint32_t fkv_cgroup_cpu_quota(const char *root) {
    uint64_t cores = least_limit(root, "cpu", "/sys/fs/cgroup/cpu", cpu_limit_v1, cpu_limit_v2);
    return cores < UINT32_MAX ? (uint32_t)cores : UINT32_MAX;
}
