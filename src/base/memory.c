/* Maps memory and determines how much memory is available. See memory.h.
 *
 * This module owns the memory maps and counts the mapped bytes. The caller determines the layout inside a map (carve.h).
 *
 * Invariant: live_bytes is the sum of the rounded sizes of all open maps.
 */
#include "memory.h"

#include "cgroup.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#if FKV_OS_APPLE
#include <mach/mach.h>
#endif

static const uint64_t HUGE_BYTES = UINT64_C(2) << 20;

/* ---- maps ---------------------------------------------------------------------------------------------------- */

uint64_t fkv_os_page_bytes(void) {
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (uint64_t)bytes : 4096;
}

uint64_t fkv_map_rounded(uint64_t bytes) {
    uint64_t page = fkv_os_page_bytes();
    if (bytes > UINT64_MAX - page) return UINT64_MAX;
    return fkv_align_up(bytes > 0 ? bytes : 1, page);
}

static _Atomic uint64_t live_bytes;

uint64_t fkv_map_live_bytes(void) { return atomic_load(&live_bytes); }

static void *map_anonymous(uint64_t bytes) {
    if (bytes > SIZE_MAX) return NULL;
    void *map = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map != MAP_FAILED ? map : NULL;
}

/* Maps more memory than requested and unmaps the excess at both ends, so that the map starts at a huge-page boundary. */
static void *map_aligned(uint64_t bytes, uint64_t align) {
    uint64_t wide = 0;
    if (fkv_add_overflows(bytes, align, &wide)) return NULL;
    uint8_t *start = map_anonymous(wide);
    if (start == NULL) return NULL;
    uint64_t before = fkv_align_up((uintptr_t)start, align) - (uintptr_t)start;
    if (before > 0) (void)munmap(start, (size_t)before);
    (void)munmap(start + before + bytes, (size_t)(align - before));
    return start + before;
}

/* Makes every OS page of the map resident. Tries madvise() first, because it returns an error if memory runs out, whereas
 * touching the pages would get the process killed. */
static bool map_commit(uint8_t *map, uint64_t bytes, uint64_t page) {
#ifdef MADV_POPULATE_WRITE
    int result = -1;
    do result = madvise(map, (size_t)bytes, MADV_POPULATE_WRITE);
    while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return false; /* EINVAL or ENOSYS: the kernel is older than Linux 5.14 */
#endif
    for (uint64_t at = 0; at < bytes; at += page) *(volatile uint8_t *)(map + at) = 0;
    return true;
}

fkv_status fkv_map_open(uint64_t bytes, bool commit, void **map) {
    uint64_t rounded = fkv_map_rounded(bytes);
    *map = NULL;
    FKV_REQUIRE(bytes > 0 && rounded != UINT64_MAX, FKV_BAD_ARGUMENT, "cannot map %llu bytes: the size is 0 or overflows 64 bits",
                (unsigned long long)bytes);
    uint8_t *start = rounded >= HUGE_BYTES ? map_aligned(rounded, HUGE_BYTES) : map_anonymous(rounded);
    FKV_REQUIRE(start != NULL, FKV_NO_MEMORY, "cannot map %llu bytes (%llu MiB): %s; lower max_tokens or raise the memory limit",
                (unsigned long long)rounded, (unsigned long long)(rounded >> 20), strerror(errno));
#ifdef MADV_HUGEPAGE
    if (rounded >= HUGE_BYTES) (void)madvise(start, (size_t)rounded, MADV_HUGEPAGE);
#endif
    if (commit && !map_commit(start, rounded, fkv_os_page_bytes())) {
        int error = errno;
        (void)munmap(start, (size_t)rounded);
        return fkv_fail(FKV_NO_MEMORY, "mapped %llu bytes (%llu MiB) but cannot commit them: %s; lower max_tokens",
                        (unsigned long long)rounded, (unsigned long long)(rounded >> 20), strerror(error));
    }
    (void)atomic_fetch_add(&live_bytes, rounded);
    *map = start;
    return FKV_OK;
}

void fkv_map_close(void *map, uint64_t bytes) {
    if (map == NULL) return;
    (void)munmap(map, (size_t)fkv_map_rounded(bytes));
    (void)atomic_fetch_sub(&live_bytes, fkv_map_rounded(bytes));
}

/* ---- available memory ---------------------------------------------------------------------------------------- */

/* If `value` is smaller than *least, sets *least to `value` and *source to `name`. */
static void keep_least(uint64_t value, const char *name, uint64_t *least, const char **source) {
    if (value >= *least) return;
    *least = value;
    *source = name;
}

#if FKV_OS_APPLE

static uint64_t machine_available(const char *root) {
    (void)root;
    vm_statistics64_data_t vm;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    vm_size_t page = 0;
    mach_port_t host = mach_host_self();
    bool known = host_page_size(host, &page) == KERN_SUCCESS &&
                 host_statistics64(host, HOST_VM_INFO64, (host_info64_t)&vm, &count) == KERN_SUCCESS;
    (void)mach_port_deallocate(mach_task_self(), host);
    return known ? ((uint64_t)vm.free_count + vm.inactive_count) * page : UINT64_MAX;
}

static uint64_t address_space_used(const char *root) {
    (void)root;
    return 0; /* Apple systems do not enforce the address-space limit */
}

static const char MACHINE_SOURCE[] = "free and inactive memory";

#else

static uint64_t machine_available(const char *root) {
    char text[4096];
    uint64_t kib = 0;
    if (!fkv_text_read(root, "/proc/meminfo", text, sizeof text)) return UINT64_MAX;
    return fkv_text_number(text, "MemAvailable:", &kib) ? kib * 1024 : UINT64_MAX;
}

static uint64_t address_space_used(const char *root) {
    char text[256];
    if (!fkv_text_read(root, "/proc/self/statm", text, sizeof text)) return 0;
    return strtoull(text, NULL, 10) * fkv_os_page_bytes();
}

static const char MACHINE_SOURCE[] = "MemAvailable of the machine";

#endif

uint64_t fkv_memory_available_under(const char *root, const char **source) {
    uint64_t least = UINT64_MAX;
    *source = "nothing";
    keep_least(machine_available(root), MACHINE_SOURCE, &least, source);
    keep_least(fkv_cgroup_memory_room(root), "the memory limit of the cgroup", &least, source);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        uint64_t used = address_space_used(root);
        uint64_t cap = (uint64_t)limit.rlim_cur;
        keep_least(cap > used ? cap - used : 0, "the address space limit (ulimit -v)", &least, source);
    }
    return least;
}

uint64_t fkv_memory_available(const char **source) {
    const char *ignored;
    return fkv_memory_available_under("", source != NULL ? source : &ignored);
}
