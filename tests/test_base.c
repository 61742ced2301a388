/* Unit tests of the base layer: messages, carving, memory maps, cgroup limits and the worker threads.
 *
 * The cgroup limits are read from small file trees that the tests write. The worker threads are tested with more threads than
 * cores, with jobs so long that the caller falls asleep, and with pauses so long that the workers fall asleep.
 */
#include "test.h"

#include "../src/base/carve.h"
#include "../src/base/cgroup.h"
#include "../src/base/cpu.h"
#include "../src/base/memory.h"
#include "../src/base/printable.h"
#include "../src/base/workers.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const uint64_t MIB = UINT64_C(1) << 20;

/* ---- messages ---- */

static fkv_status refuse(int value) {
    FKV_REQUIRE(value < 3, FKV_BAD_ARGUMENT, "value is %d; expected less than 3", value);
    return FKV_OK;
}

static fkv_status refuse_through_try(int value) {
    FKV_TRY(refuse(value));
    return FKV_OK;
}

START_TEST(failure_carries_its_status_and_message) {
    ck_ok(refuse_through_try(2));
    ck_status(refuse_through_try(7), FKV_BAD_ARGUMENT);
    ck_assert_str_eq(fkv_message(), "value is 7; expected less than 3");
}
END_TEST

static void *message_of_a_fresh_thread(void *seen) {
    *(bool *)seen = fkv_message()[0] == 0;
    return NULL;
}

START_TEST(messages_are_thread_local) {
    pthread_t thread;
    bool was_empty = false;
    ck_status(refuse(9), FKV_BAD_ARGUMENT);
    ck_assert_int_eq(pthread_create(&thread, NULL, message_of_a_fresh_thread, &was_empty), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert(was_empty);
}
END_TEST

START_TEST(terminal_control_sequences_are_escaped) {
    static const struct {
        const char *text;
        const char *shown;
    } cases[] = {
        {"plain 'text', 100 %", "plain 'text', 100 %"},
        {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\x1b[2J", "\\x1b[2J"},
        {"a\nb\tc\x7f", "a\\x0ab\\x09c\\x7f"},
        {"\xc2\x9b"
         "31m",
         "\\xc2\\x9b31m"}, /* the control sequence introducer (CSI), encoded as the C1 character U+009B */
        {"\x9b"
         "31m",
         "\\x9b31m"}, /* the control sequence introducer (CSI), encoded as the single byte 0x9b */
        {"\xe2\x80\xae"
         "fdp",
         "\\xe2\\x80\\xae"
         "fdp"},                                               /* right-to-left override */
        {"\xe2\x82", "\\xe2\\x82"},                            /* truncated character */
        {"\xc0\xaf\xed\xa0\x80", "\\xc0\\xaf\\xed\\xa0\\x80"}, /* overlong, surrogate */
        {"\xf4\x90\x80\x80\xff", "\\xf4\\x90\\x80\\x80\\xff"}, /* above U+10FFFF */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ck_assert_str_eq(fkv_show_text(cases[i].text).text, cases[i].shown);
        ck_assert_str_eq(fkv_show_text(cases[i].shown).text, cases[i].shown);
        ck_status(fkv_fail(FKV_IO, "%s: it", cases[i].text), FKV_IO); /* fkv_fail() escapes text that its caller did not escape */
        ck_assert_msg(strncmp(fkv_message(), cases[i].shown, strlen(cases[i].shown)) == 0, "%s", fkv_message());
    }
    ck_assert_str_eq(fkv_show((fkv_bytes){"a\0b", 3}).text, "a\\x00b");
}
END_TEST

/* Encodes a code point from U+0080 to U+FFFF as UTF-8. */
static void encode_utf8(uint32_t code, char text[4]) {
    size_t n = 0;
    if (code < 0x800) {
        text[n++] = (char)(0xc0 | code >> 6);
    } else {
        text[n++] = (char)(0xe0 | code >> 12);
        text[n++] = (char)(0x80 | (code >> 6 & 0x3f));
    }
    text[n++] = (char)(0x80 | (code & 0x3f));
    text[n] = 0;
}

START_TEST(c1_controls_line_separators_and_bidi_controls_are_escaped) {
    for (uint32_t code = 0x80; code < 0x2100; code++) {
        const bool escaped = code <= 0x9f || code == 0x61c || code == 0x200e || code == 0x200f ||
                             (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
        char text[4];
        encode_utf8(code, text);
        const fkv_printable shown = fkv_show_text(text);
        ck_assert_msg((strcmp(shown.text, text) != 0) == escaped, "U+%04X is shown as \"%s\"", code, shown.text);
        if (escaped) ck_assert_uint_eq(strlen(shown.text), 4 * strlen(text)); /* each byte is escaped as \xNN */
    }
    ck_status(fkv_fail(FKV_IO, "name %s", "\xc2\x9b\xe2\x80\xa8\xe2\x81\xa6"), FKV_IO);
    ck_assert_str_eq(fkv_message(), "name \\xc2\\x9b\\xe2\\x80\\xa8\\xe2\\x81\\xa6");
}
END_TEST

START_TEST(text_too_long_to_print_ends_in_dots) {
    char text[300];
    for (size_t n = 0; n + 1 < sizeof text;
         n++) { /* letters if n is even, characters whose escape sequence has four characters if n is odd */
        char out[16];
        memset(text, n % 2 == 0 ? 'x' : '\x1b', n);
        text[n] = 0;
        const size_t whole = n % 2 == 0 ? n : 4 * n;
        fkv_show_into((fkv_bytes){text, n}, out, sizeof out);
        ck_assert_uint_lt(strlen(out), sizeof out);
        ck_assert(whole < sizeof out ? strlen(out) == whole : strcmp(out + strlen(out) - 3, "...") == 0);
        ck_assert(n % 2 == 0 || strlen(out) % 4 == 0 || strlen(out) % 4 == 3); /* the text never ends with a partial escape */
    }
    ck_status(fkv_fail(FKV_IO, "%0600d", 1), FKV_IO);
    ck_assert_str_eq(fkv_message() + strlen(fkv_message()) - 3, "...");
}
END_TEST

START_TEST(every_status_has_its_own_name) {
    static const fkv_status all[] = {FKV_OK,           FKV_BAD_ARGUMENT, FKV_BAD_CONFIG, FKV_BAD_SEQ,     FKV_BAD_STATE,
                                     FKV_POOL_FULL,    FKV_SEQ_FULL,     FKV_SEQS_FULL,  FKV_STEP_FULL,   FKV_NO_MEMORY,
                                     FKV_GONE,         FKV_BUSY,         FKV_IO,         FKV_FILE_FORMAT, FKV_FILE_VERSION,
                                     FKV_FILE_DAMAGED, FKV_FILE_FOREIGN, FKV_UNSUPPORTED};
    size_t n = sizeof all / sizeof all[0];
    for (size_t i = 0; i < n; i++) {
        ck_assert_int_eq(strncmp(fkv_status_name(all[i]), "FKV_", 4), 0);
        for (size_t j = 0; j < i; j++) ck_assert_str_ne(fkv_status_name(all[i]), fkv_status_name(all[j]));
    }
    ck_assert_str_eq(fkv_status_name((fkv_status)-1000), "unknown status");
    ck_assert_str_eq(fkv_status_name(FKV_POOL_FULL), "FKV_POOL_FULL");
}
END_TEST

START_TEST(version_matches_the_header) {
    char expected[32];
    (void)snprintf(expected, sizeof expected, "%d.%d.%d", FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH);
    ck_assert_str_eq(fkv_version(), expected);
}
END_TEST

/* ---- carving ---- */

static uint64_t carve_three(fkv_carve *carve, uint8_t **bytes, uint32_t **words, uint64_t **longs) {
    *bytes = FKV_CARVE(carve, 3, uint8_t);
    *words = FKV_CARVE(carve, 17, uint32_t);
    *longs = FKV_CARVE(carve, 5, uint64_t);
    return carve->used;
}

START_TEST(counting_and_carving_need_the_same_bytes) {
    uint8_t *bytes = NULL;
    uint32_t *words = NULL;
    uint64_t *longs = NULL;
    fkv_carve count = {0};
    uint64_t size = carve_three(&count, &bytes, &words, &longs);
    ck_assert_ptr_null(bytes);
    ck_assert_uint_eq(size, 64 + 128 + 5 * 8);
    alignas(64) uint8_t block[512];
    fkv_carve carve = {.base = block, .size = size};
    ck_assert_uint_eq(carve_three(&carve, &bytes, &words, &longs), size);
    ck_assert_ptr_eq(bytes, block);
    ck_assert_ptr_eq(words, block + 64);
    ck_assert_ptr_eq(longs, block + 192);
}
END_TEST

START_TEST(carve_beyond_64_bits_sets_overflow) {
    fkv_carve count = {0};
    (void)fkv_carve_take(&count, UINT64_MAX / 2, 3);
    ck_assert(count.overflow);
    fkv_carve sum = {0};
    (void)fkv_carve_take(&sum, 1, UINT64_MAX - 100);
    ck_assert(!sum.overflow);
    (void)fkv_carve_take(&sum, 1, 200);
    ck_assert(sum.overflow);
}
END_TEST

/* ---- memory maps ---- */

static bool is_zero(const uint8_t *block, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i++)
        if (block[i] != 0) return false;
    return true;
}

static uint64_t resident_pages(void *map, uint64_t bytes) {
    uint64_t n_pages = (bytes + fkv_os_page_bytes() - 1) / fkv_os_page_bytes();
    uint8_t *flags = calloc(1, n_pages);
    uint64_t n = 0;
    ck_assert_ptr_nonnull(flags);
    ck_assert_int_eq(mincore(map, bytes, (void *)flags), 0);
    for (uint64_t i = 0; i < n_pages; i++) n += flags[i] & 1;
    free(flags);
    return n;
}

START_TEST(committed_map_is_zero_and_fully_resident) {
    static const uint64_t sizes[] = {1, 100 * 1000, 2 * 1024 * 1024, 5 * 1024 * 1024 + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        void *map = NULL;
        ck_ok(fkv_map_open(sizes[i], true, &map));
        uint64_t n_pages = (sizes[i] + fkv_os_page_bytes() - 1) / fkv_os_page_bytes();
        ck_assert_uint_eq(resident_pages(map, sizes[i]), n_pages);
        ck_assert(is_zero(map, sizes[i]));
        ck_assert_uint_eq((uintptr_t)map % (sizes[i] >= 2 * MIB ? 2 * MIB : fkv_os_page_bytes()), 0);
        fkv_map_close(map, sizes[i]);
    }
    fkv_map_close(NULL, 10);
}
END_TEST

START_TEST(maps_are_counted_in_full_pages) {
    static const uint64_t sizes[] = {1, 4096, 5000, 100 * 1000, 3 * 1000 * 1000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    const uint64_t page = fkv_os_page_bytes();
    const uint64_t before = fkv_map_live_bytes();
    void *maps[N];
    uint64_t sum = 0;
    for (int i = 0; i < N; i++) {
        ck_ok(fkv_map_open(sizes[i], i % 2 == 0, &maps[i]));
        ck_assert_uint_eq(fkv_map_rounded(sizes[i]), (sizes[i] + page - 1) / page * page);
        sum += fkv_map_rounded(sizes[i]);
        ck_assert_uint_eq(fkv_map_live_bytes(), before + sum);
    }
    void *none = NULL;
    ck_status(fkv_map_open(UINT64_C(1) << 60, true, &none), FKV_NO_MEMORY);
    ck_assert_uint_eq(fkv_map_live_bytes(), before + sum);
    for (int i = 0; i < N; i++) {
        fkv_map_close(maps[i], sizes[i]);
        sum -= fkv_map_rounded(sizes[i]);
        ck_assert_uint_eq(fkv_map_live_bytes(), before + sum);
    }
    ck_assert_uint_eq(fkv_map_rounded(0), page);
    ck_assert_uint_eq(fkv_map_rounded(UINT64_MAX), UINT64_MAX);
}
END_TEST

static void *open_and_close_maps(void *good) {
    for (uint64_t i = 0; i < 300; i++) {
        void *map = NULL;
        if (fkv_map_open(64 + i * 100, true, &map) != FKV_OK) return NULL;
        fkv_map_close(map, 64 + i * 100);
    }
    return good;
}

START_TEST(maps_of_concurrent_threads_are_counted) {
    enum { N_THREADS = 6 };
    pthread_t threads[N_THREADS];
    const uint64_t before = fkv_map_live_bytes();
    for (int i = 0; i < N_THREADS; i++) ck_assert_int_eq(pthread_create(&threads[i], NULL, open_and_close_maps, threads), 0);
    for (int i = 0; i < N_THREADS; i++) {
        void *finished = NULL;
        ck_assert_int_eq(pthread_join(threads[i], &finished), 0);
        ck_assert(finished == threads);
    }
    ck_assert_uint_eq(fkv_map_live_bytes(), before);
}
END_TEST

START_TEST(lazy_map_is_committed_on_first_touch) {
    void *map = NULL;
    uint64_t bytes = 64 * MIB;
    ck_ok(fkv_map_open(bytes, false, &map));
    uint64_t before = resident_pages(map, bytes);
    ((uint8_t *)map)[40 * MIB] = 1;
    uint64_t after = resident_pages(map, bytes);
    ck_assert_uint_eq(before, 0);
    ck_assert_uint_ge(after, 1);
    ck_assert_uint_le(after, 2 * MIB / fkv_os_page_bytes());
    fkv_map_close(map, bytes);
}
END_TEST

START_TEST(map_larger_than_the_machine_is_rejected_with_its_size) {
    void *map = &map;
    ck_status(fkv_map_open(UINT64_C(1) << 60, true, &map), FKV_NO_MEMORY);
    ck_assert_ptr_null(map);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "1152921504606846976"));
    ck_status(fkv_map_open(0, true, &map), FKV_BAD_ARGUMENT);
    ck_status(fkv_map_open(UINT64_MAX, true, &map), FKV_BAD_ARGUMENT);
}
END_TEST

/* ---- limits ---- */

static char tree[64];

static void tree_begin(void) {
    (void)snprintf(tree, sizeof tree, "/tmp/flatkv-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(tree));
}

static void tree_end(void) {
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf '%s'", tree);
    ck_assert_int_eq(system(command), 0);
}

/* Writes a file of the tree and creates its directories. */
static void tree_write(const char *name, const char *text) {
    char path[512];
    (void)snprintf(path, sizeof path, "%s%s", tree, name);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    (void)fputs(text, file);
    (void)fclose(file);
}

START_TEST(text_number_matches_keys_at_line_starts_only) {
    const char *text = "active_file 1\ninactive_file 22\nnot inactive_file 3\nempty\nhuge 99999999999999999999999\n";
    uint64_t value = 0;
    ck_assert(fkv_text_number(text, "inactive_file", &value));
    ck_assert_uint_eq(value, 22);
    ck_assert(!fkv_text_number(text, "file", &value));
    ck_assert(!fkv_text_number(text, "inactive", &value));
    ck_assert(!fkv_text_number(text, "empty", &value));
    ck_assert(!fkv_text_number(text, "huge", &value));
    ck_assert(!fkv_text_number("", "x", &value));
}
END_TEST

START_TEST(without_cgroups_there_is_no_limit) {
    tree_begin();
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), UINT64_MAX);
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), UINT32_MAX);
    tree_write("/proc/self/cgroup", "0::/a/b\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), UINT64_MAX);
    tree_write("/sys/fs/cgroup/a/b/memory.max", "max\n");
    tree_write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), UINT64_MAX);
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), UINT32_MAX);
    tree_end();
}
END_TEST

START_TEST(tightest_v2_cgroup_on_the_path_applies) {
    tree_begin();
    tree_write("/proc/self/cgroup", "0::/a/b\n");
    tree_write("/sys/fs/cgroup/a/b/memory.max", "5000000\n");
    tree_write("/sys/fs/cgroup/a/b/memory.current", "1000000\n");
    tree_write("/sys/fs/cgroup/a/b/memory.stat", "anon 700000\ninactive_file 300000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), 4300000);
    tree_write("/sys/fs/cgroup/a/memory.max", "2000000\n");
    tree_write("/sys/fs/cgroup/a/memory.current", "1500000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), 500000);
    tree_write("/sys/fs/cgroup/a/memory.current", "2500000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), 0);
    tree_write("/sys/fs/cgroup/a/b/cpu.max", "250000 100000\n");
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), 3);
    tree_write("/sys/fs/cgroup/a/cpu.max", "50000 100000\n");
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), 1);
    tree_end();
}
END_TEST

START_TEST(container_reads_its_cgroup_at_the_mount_point) {
    tree_begin();
    tree_write("/proc/self/cgroup", "0::/docker/0123456789abcdef\n");
    tree_write("/sys/fs/cgroup/memory.max", "3000000\n");
    tree_write("/sys/fs/cgroup/memory.current", "1000000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), 2000000);
    tree_end();
}
END_TEST

START_TEST(v1_cgroup_limits_apply) {
    tree_begin();
    tree_write("/proc/self/cgroup", "5:pids:/x\n4:hugetlb,memory:/jobs/one\n1:cpuacct,cpu:/jobs\n0::/\n");
    tree_write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    tree_write("/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "8000000\n");
    tree_write("/sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", "6000000\n");
    tree_write("/sys/fs/cgroup/memory/jobs/one/memory.stat", "inactive_file 5\ntotal_inactive_file 1000000\n");
    ck_assert_uint_eq(fkv_cgroup_memory_room(tree), 3000000);
    tree_write("/sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us", "-1\n");
    tree_write("/sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us", "100000\n");
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), UINT32_MAX);
    tree_write("/sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us", "400000\n");
    ck_assert_uint_eq(fkv_cgroup_cpu_quota(tree), 4);
    tree_end();
}
END_TEST

START_TEST(available_memory_names_the_limit_that_applies) {
    const char *source = NULL;
    uint64_t available = fkv_memory_available(&source);
    ck_assert_uint_gt(available, 0);
    ck_assert_ptr_nonnull(source);
    ck_assert_uint_gt(fkv_memory_available(NULL), 0);
#if !FKV_OS_APPLE
    tree_begin();
    tree_write("/proc/meminfo", "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:    4000 kB\n");
    ck_assert_uint_eq(fkv_memory_available_under(tree, &source), 4000 * 1024);
    ck_assert_ptr_nonnull(strstr(source, "MemAvailable"));
    tree_write("/proc/self/cgroup", "0::/\n");
    tree_write("/sys/fs/cgroup/memory.max", "1000000\n");
    ck_assert_uint_eq(fkv_memory_available_under(tree, &source), 1000000);
    ck_assert_ptr_nonnull(strstr(source, "cgroup"));
    struct rlimit before;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &before), 0);
    if (before.rlim_cur == RLIM_INFINITY) {
        tree_write("/sys/fs/cgroup/memory.max", "max\n");
        tree_write("/proc/meminfo", "nothing of use\n");
        struct rlimit tight = {.rlim_cur = (rlim_t)1 << 46, .rlim_max = before.rlim_max};
        tree_write("/proc/self/statm", "1000 10 10\n");
        ck_assert_int_eq(setrlimit(RLIMIT_AS, &tight), 0);
        uint64_t room = fkv_memory_available_under(tree, &source);
        ck_assert_int_eq(setrlimit(RLIMIT_AS, &before), 0);
        ck_assert_uint_eq(room, (UINT64_C(1) << 46) - 1000 * fkv_os_page_bytes());
        ck_assert_ptr_nonnull(strstr(source, "address space"));
    }
    tree_end();
#endif
}
END_TEST

/* ---- workers ---- */

enum { MOST_ITEMS = 1000, MOST_THREADS = 8 };

typedef struct tally {
    _Atomic uint32_t runs[MOST_ITEMS];
    uint32_t plain[MOST_ITEMS]; /* written by work items without atomics; the caller must see the written values after the run */
    _Atomic bool bad_thread;
    uint32_t n_threads;
    uint32_t stamp;
    long sleep_ns; /* time that each item sleeps, in nanoseconds */
} tally;

static void nap(long nanoseconds) {
    struct timespec time = {.tv_nsec = nanoseconds};
    if (nanoseconds > 0) (void)nanosleep(&time, NULL);
}

static void tally_item(void *job, uint32_t item, uint32_t thread) {
    tally *t = job;
    if (thread >= t->n_threads || item >= MOST_ITEMS) {
        atomic_store(&t->bad_thread, true);
        return;
    }
    (void)atomic_fetch_add(&t->runs[item], 1);
    t->plain[item] = t->stamp;
    nap(t->sleep_ns);
}

static void tally_check(tally *t, uint32_t n_items, uint32_t stamp) {
    ck_assert(!atomic_load(&t->bad_thread));
    uint32_t n_wrong = 0;
    for (uint32_t i = 0; i < MOST_ITEMS; i++) {
        n_wrong += atomic_exchange(&t->runs[i], 0) != (i < n_items ? 1 : 0);
        n_wrong += i < n_items && t->plain[i] != stamp;
    }
    ck_assert_uint_eq(n_wrong, 0);
}

static fkv_workers *workers_begin(uint32_t n_threads) {
    fkv_workers *workers = NULL;
    uint64_t bytes = fkv_align_up(fkv_workers_bytes(n_threads), 64);
    void *place = aligned_alloc(64, bytes);
    ck_assert_ptr_nonnull(place);
    memset(place, 0, bytes);
    ck_ok(fkv_workers_open(place, n_threads, &workers));
    ck_assert_uint_eq(fkv_workers_count(workers), n_threads);
    return workers;
}

static void workers_end(fkv_workers *workers) {
    fkv_workers_close(workers);
    free(workers); /* the workers struct is at the start of its memory block */
}

START_TEST(every_item_runs_once_in_every_job) {
    static tally t;
    for (uint32_t n_threads = 1; n_threads <= MOST_THREADS; n_threads++) {
        fkv_workers *workers = workers_begin(n_threads);
        t.n_threads = n_threads;
        for (uint32_t job = 1; job <= 300; job++) {
            uint32_t n_items = job % 7 == 0 ? MOST_ITEMS : job % 12;
            t.stamp = n_threads * 1000 + job;
            fkv_workers_run(workers, tally_item, &t, n_items);
            tally_check(&t, n_items, t.stamp);
        }
        workers_end(workers);
    }
}
END_TEST

START_TEST(sleeping_caller_and_workers_are_woken) {
    static tally t;
    fkv_workers *workers = workers_begin(2);
    t.n_threads = 2;
    for (uint32_t job = 1; job <= 40; job++) {
        t.stamp = job;
        t.sleep_ns = job % 2 == 0 ? 300 * 1000 : 0; /* in every second job, items take so long that the caller falls asleep */
        fkv_workers_run(workers, tally_item, &t, 3);
        tally_check(&t, 3, job);
        nap(job % 3 == 0 ? 300 * 1000 : 0); /* every third pause is so long that the workers fall asleep */
    }
    workers_end(workers);
}
END_TEST

static void slow_if_not_the_caller(void *job, uint32_t item, uint32_t thread) {
    (void)item;
    if (thread != 0) (void)atomic_fetch_add((_Atomic uint32_t *)job, 1);
    nap(100 * 1000);
}

START_TEST(workers_run_part_of_a_job) {
    _Atomic uint32_t n_by_workers = 0;
    fkv_workers *workers = workers_begin(4);
    for (int i = 0; i < 100000 && atomic_load(&n_by_workers) == 0; i++)
        fkv_workers_run(workers, slow_if_not_the_caller, &n_by_workers, 50);
    ck_assert_uint_gt(atomic_load(&n_by_workers), 0);
    workers_end(workers);
}
END_TEST

static void note_thread(void *job, uint32_t item, uint32_t thread) {
    (void)item;
    if (thread != 0) atomic_store((_Atomic bool *)job, true);
}

START_TEST(single_item_runs_on_the_caller) {
    _Atomic bool left_the_caller = false;
    fkv_workers *workers = workers_begin(4);
    for (int i = 0; i < 1000; i++) fkv_workers_run(workers, note_thread, &left_the_caller, 1);
    fkv_workers_run(workers, note_thread, &left_the_caller, 0);
    ck_assert(!atomic_load(&left_the_caller));
    workers_end(workers);
}
END_TEST

START_TEST(thousands_of_tiny_jobs_run_each_item_once) {
    static tally t;
    fkv_workers *workers = workers_begin(3);
    t = (tally){.n_threads = 3};
    for (uint32_t job = 1; job <= 20000; job++) {
        t.stamp = job;
        fkv_workers_run(workers, tally_item, &t, 4);
        for (uint32_t i = 0; i < 4; i++) {
            ck_assert_uint_eq(atomic_load(&t.runs[i]), job);
            ck_assert_uint_eq(t.plain[i], job);
        }
    }
    workers_end(workers);
}
END_TEST

START_TEST(workers_open_and_close_without_a_job) {
    for (uint32_t n_threads = 1; n_threads <= 16; n_threads++) workers_end(workers_begin(n_threads));
    fkv_workers_close(NULL);
}
END_TEST

/* Opens workers in a child process whose user may have at most three threads (RLIMIT_NPROC). The child drops root privileges,
 * because the limit does not apply to root. */
static int open_with_a_thread_limit(void) {
    alignas(64) static uint8_t place[64 * 1024];
    struct rlimit few = {.rlim_cur = 3, .rlim_max = 3};
    fkv_workers *workers = NULL;
    if (fkv_workers_bytes(40) > sizeof place) return 2;
    if (geteuid() == 0 && setuid(65534) != 0) return 3;
    if (setrlimit(RLIMIT_NPROC, &few) != 0) return 4;
    if (fkv_workers_open(place, 40, &workers) != FKV_NO_MEMORY || workers != NULL) return 5;
    return strstr(fkv_message(), "of 39: ") != NULL ? 0 : 6;
}

START_TEST(failed_thread_start_is_an_error_and_stops_the_other_threads) {
    int status = 0;
    (void)fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(open_with_a_thread_limit());
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status));
    ck_assert_int_eq(WEXITSTATUS(status), 0);
}
END_TEST

START_TEST(invalid_thread_counts_are_rejected) {
    alignas(64) uint8_t place[64] = {0};
    fkv_workers *workers = NULL;
    ck_status(fkv_workers_open(place, 0, &workers), FKV_BAD_CONFIG);
    ck_status(fkv_workers_open(place, FKV_MAX_THREADS + 1, &workers), FKV_BAD_CONFIG);
    ck_assert_ptr_null(workers);
}
END_TEST

/* ---- processor ---- */

START_TEST(best_instruction_set_is_supported) {
    ck_assert(fkv_cpu_runs(FKV_ISA_SCALAR));
    ck_assert(fkv_cpu_runs(fkv_cpu_best_isa()));
    ck_assert_int_ne(fkv_cpu_best_isa(), FKV_ISA_AUTO);
    ck_assert(!(fkv_cpu_runs(FKV_ISA_NEON) && fkv_cpu_runs(FKV_ISA_AVX2)));
    ck_assert(!fkv_cpu_runs((fkv_isa)99));
    ck_assert_str_eq(fkv_isa_name(FKV_ISA_AVX512), "avx512");
    ck_assert_str_eq(fkv_isa_name((fkv_isa)99), "unknown");
    for (int isa = FKV_ISA_AUTO; isa <= FKV_ISA_AMX; isa++) ck_assert_str_ne(fkv_isa_name((fkv_isa)isa), "unknown");
}
END_TEST

START_TEST(cpu_count_is_within_limits) {
    ck_assert_uint_ge(fkv_cpu_count(), 1);
    ck_assert_uint_le(fkv_cpu_count(), FKV_MAX_THREADS);
}
END_TEST

TEST_MAIN("base", failure_carries_its_status_and_message, messages_are_thread_local, terminal_control_sequences_are_escaped,
          c1_controls_line_separators_and_bidi_controls_are_escaped, text_too_long_to_print_ends_in_dots,
          every_status_has_its_own_name, version_matches_the_header, counting_and_carving_need_the_same_bytes,
          carve_beyond_64_bits_sets_overflow, committed_map_is_zero_and_fully_resident, maps_are_counted_in_full_pages,
          maps_of_concurrent_threads_are_counted, lazy_map_is_committed_on_first_touch,
          map_larger_than_the_machine_is_rejected_with_its_size, text_number_matches_keys_at_line_starts_only,
          without_cgroups_there_is_no_limit, tightest_v2_cgroup_on_the_path_applies,
          container_reads_its_cgroup_at_the_mount_point, v1_cgroup_limits_apply, available_memory_names_the_limit_that_applies,
          every_item_runs_once_in_every_job, sleeping_caller_and_workers_are_woken, workers_run_part_of_a_job,
          single_item_runs_on_the_caller, thousands_of_tiny_jobs_run_each_item_once, workers_open_and_close_without_a_job,
          failed_thread_start_is_an_error_and_stops_the_other_threads, invalid_thread_counts_are_rejected,
          best_instruction_set_is_supported, cpu_count_is_within_limits)
