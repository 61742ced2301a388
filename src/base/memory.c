/* Takes bytes from the system and says how many it could give. See memory.h.
 *
 * Owns the jemalloc arena of a cache, the maps, and the reading of the machine's limits. Does not own what is laid out inside
 * the blocks: that is carve.h.
 *
 * Invariants
 *   A block is resident in full, up to its size class, from the moment it is taken: what the plan counts is what the process
 *   holds, and no later write makes it hold more. That is why blocks are zeroed by writing them and not by asking for zeroed
 *   pages.
 *   A jemalloc arena is never destroyed: destroying one keeps its address space and a page of its books for good, so caches that
 *   come and go would eat the process. Arenas without a cache wait, empty, for the next one.
 *
 * Built without jemalloc (sanitizers, fuzzing, cross builds) a block is rounded to 64 bytes and nothing else differs.
 */
#include "memory.h"

#include "cgroup.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifdef FKV_HAVE_JEMALLOC
#include <jemalloc/jemalloc.h>
#endif
#if FKV_OS_APPLE
#include <mach/mach.h>
#endif

enum { BLOCK_ALIGN = 64 };

static const uint64_t HUGE_BYTES = UINT64_C(2) << 20;

/* ---- arena --------------------------------------------------------------------------------------------------- */

#ifdef FKV_HAVE_JEMALLOC

enum { IDLE_WORDS = 64, WORD_BITS = 64 }; /* jemalloc numbers its arenas below 4096 */

/* A bit for each arena that was created here and has no cache. Set after the arena was emptied, cleared by who takes it. */
static _Atomic uint64_t idle_arenas[IDLE_WORDS];

static bool idle_take(uint32_t *index) {
    for (uint32_t w = 0; w < IDLE_WORDS; w++) {
        uint64_t bits = atomic_load(&idle_arenas[w]);
        while (bits != 0) {
            if (!atomic_compare_exchange_weak(&idle_arenas[w], &bits, bits & (bits - 1))) continue;
            *index = w * WORD_BITS + (uint32_t)__builtin_ctzll(bits);
            return true;
        }
    }
    return false;
}

static void idle_give(uint32_t index) {
    FKV_ASSERT(index < IDLE_WORDS * WORD_BITS);
    (void)atomic_fetch_or(&idle_arenas[index / WORD_BITS], UINT64_C(1) << index % WORD_BITS);
}

static int arena_control(uint32_t index, const char *what, void *value, size_t value_bytes) {
    char name[64];
    (void)snprintf(name, sizeof name, "arena.%" PRIu32 ".%s", index, what);
    return mallctl(name, NULL, NULL, value, value_bytes);
}

static int arena_flags(uint32_t index) { return MALLOCX_ALIGN(BLOCK_ALIGN) | MALLOCX_ARENA(index) | MALLOCX_TCACHE_NONE; }

fkv_status fkv_arena_open(fkv_arena *arena) {
    *arena = (fkv_arena){0};
    if (idle_take(&arena->index)) return FKV_OK;
    unsigned index = 0;
    size_t size = sizeof index;
    int error = mallctl("arenas.create", &index, &size, NULL, 0);
    FKV_REQUIRE(error == 0, FKV_NO_MEMORY, "jemalloc could not create an arena for the cache: %s", strerror(error));
    arena->index = index;
    ssize_t at_once = 0; /* pages go back to the system when their block does; where this fails, at close */
    (void)arena_control(index, "dirty_decay_ms", &at_once, sizeof at_once);
    (void)arena_control(index, "muzzy_decay_ms", &at_once, sizeof at_once);
    return FKV_OK;
}

void fkv_arena_close(fkv_arena *arena) {
    FKV_ASSERT(arena->live_bytes == 0);
    (void)arena_control(arena->index, "purge", NULL, 0);
    idle_give(arena->index);
}

/* The arena does not matter to the size class. 0 where there is none so large. */
static uint64_t size_class(uint64_t bytes) {
    return bytes <= SIZE_MAX ? nallocx((size_t)(bytes > 0 ? bytes : 1), MALLOCX_ALIGN(BLOCK_ALIGN)) : 0;
}

static void *block_take(const fkv_arena *arena, uint64_t rounded) { return mallocx((size_t)rounded, arena_flags(arena->index)); }

static void block_give(const fkv_arena *arena, void *block, uint64_t rounded) {
    sdallocx(block, (size_t)rounded, arena_flags(arena->index));
}

static uint64_t arena_figure(uint32_t index, const char *figure) {
    char name[64];
    size_t value = 0;
    size_t size = sizeof value;
    (void)snprintf(name, sizeof name, "stats.arenas.%" PRIu32 ".%s", index, figure);
    return mallctl(name, &value, &size, NULL, 0) == 0 ? value : 0;
}

uint64_t fkv_arena_measured(const fkv_arena *arena) {
    uint64_t epoch = 1; /* writing it has jemalloc refresh its figures */
    (void)mallctl("epoch", NULL, NULL, &epoch, sizeof epoch);
    return arena_figure(arena->index, "small.allocated") + arena_figure(arena->index, "large.allocated");
}

#else

fkv_status fkv_arena_open(fkv_arena *arena) {
    *arena = (fkv_arena){0};
    return FKV_OK;
}

void fkv_arena_close(fkv_arena *arena) {
    FKV_ASSERT(arena->live_bytes == 0);
    (void)arena;
}

static uint64_t size_class(uint64_t bytes) {
    if (bytes > PTRDIFF_MAX - BLOCK_ALIGN) return 0;
    return fkv_align_up(bytes > 0 ? bytes : 1, BLOCK_ALIGN);
}

static void *block_take(const fkv_arena *arena, uint64_t rounded) {
    (void)arena;
    return aligned_alloc(BLOCK_ALIGN, (size_t)rounded);
}

static void block_give(const fkv_arena *arena, void *block, uint64_t rounded) {
    (void)arena, (void)rounded;
    free(block);
}

uint64_t fkv_arena_measured(const fkv_arena *arena) { return arena->live_bytes; }

#endif

uint64_t fkv_memory_rounded(uint64_t bytes) {
    uint64_t rounded = size_class(bytes);
    return rounded != 0 ? rounded : UINT64_MAX;
}

void *fkv_arena_take(fkv_arena *arena, uint64_t bytes) {
    uint64_t rounded = size_class(bytes);
    void *block = rounded != 0 ? block_take(arena, rounded) : NULL;
    if (block == NULL) return NULL;
    memset(block, 0, (size_t)rounded);
    arena->live_bytes += rounded;
    return block;
}

void fkv_arena_give(fkv_arena *arena, void *block, uint64_t bytes) {
    if (block == NULL) return;
    uint64_t rounded = size_class(bytes);
    FKV_ASSERT(arena->live_bytes >= rounded);
    arena->live_bytes -= rounded;
    block_give(arena, block, rounded);
}

/* ---- maps ---------------------------------------------------------------------------------------------------- */

uint64_t fkv_os_page_bytes(void) {
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (uint64_t)bytes : 4096;
}

static void *map_anonymous(uint64_t bytes) {
    if (bytes > SIZE_MAX) return NULL;
    void *map = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map != MAP_FAILED ? map : NULL;
}

/* Maps more than is needed and gives back both ends, so that the map begins where a huge page can begin. */
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

/* Makes every page resident. The system call answers where touching would end the process, so it goes first. */
static bool map_commit(uint8_t *map, uint64_t bytes, uint64_t page) {
#ifdef MADV_POPULATE_WRITE
    int result = -1;
    do result = madvise(map, (size_t)bytes, MADV_POPULATE_WRITE);
    while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return false; /* these two: a kernel before 5.14 */
#endif
    for (uint64_t at = 0; at < bytes; at += page) *(volatile uint8_t *)(map + at) = 0;
    return true;
}

fkv_status fkv_map_open(uint64_t bytes, bool commit, void **map) {
    uint64_t page = fkv_os_page_bytes();
    *map = NULL;
    FKV_REQUIRE(bytes > 0 && bytes <= UINT64_MAX - page, FKV_BAD_ARGUMENT, "a map of %" PRIu64 " bytes cannot be made", bytes);
    uint64_t whole = fkv_align_up(bytes, page);
    uint8_t *start = whole >= HUGE_BYTES ? map_aligned(whole, HUGE_BYTES) : map_anonymous(whole);
    FKV_REQUIRE(start != NULL, FKV_NO_MEMORY,
                "the system refused to map %" PRIu64 " bytes (%" PRIu64 " MiB): %s; plan for fewer tokens or raise the limit",
                whole, whole >> 20, strerror(errno));
#ifdef MADV_HUGEPAGE
    if (whole >= HUGE_BYTES) (void)madvise(start, (size_t)whole, MADV_HUGEPAGE);
#endif
    if (commit && !map_commit(start, whole, page)) {
        int error = errno;
        (void)munmap(start, (size_t)whole);
        return fkv_fail(FKV_NO_MEMORY,
                        "the system mapped %" PRIu64 " bytes (%" PRIu64
                        " MiB) but could not commit them: %s; plan for fewer tokens",
                        whole, whole >> 20, strerror(error));
    }
    *map = start;
    return FKV_OK;
}

void fkv_map_close(void *map, uint64_t bytes) {
    if (map != NULL) (void)munmap(map, (size_t)fkv_align_up(bytes, fkv_os_page_bytes()));
}

/* ---- what the machine can give ------------------------------------------------------------------------------- */

static void keep_least(uint64_t value, const char *name, uint64_t *least, const char **source) {
    if (value >= *least) return;
    *least = value;
    *source = name;
}

#if FKV_OS_APPLE

static uint64_t machine_room(const char *root) {
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
    return 0; /* the limit is not enforced there */
}

static const char MACHINE_SOURCE[] = "free and inactive memory";

#else

static uint64_t machine_room(const char *root) {
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
    keep_least(machine_room(root), MACHINE_SOURCE, &least, source);
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
    const char *unasked;
    return fkv_memory_available_under("", source != NULL ? source : &unasked);
}
