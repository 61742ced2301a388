/* A prefix store that keeps its pages in a folder. Each packed page is one file named KEY.page, where KEY is the page's key in 64
 * hexadecimal digits.
 *
 * Crash safety: a page is written to KEY.part, synced and renamed, so KEY.page is always complete. Unfinished files are removed
 * at the next open. Disk corruption is detected when a page is read, because its checksums are verified. A lock on the file
 * `lock` prevents other processes from using the folder.
 *
 * The index of pages is kept in memory. It consists of a hash table keyed by page key, and an LRU list. Its mutex is never held
 * during I/O, so contains() and touch() do not block.
 *
 *   bytes = sum of the sizes of all entries and of all pages being written, each rounded up to 4 KiB;  bytes <= max_bytes
 *
 * The LRU order is stored in the modification times of the files. The modification time of a file is set when its page is
 * written. If the page is used after that, the time is set again when the folder is closed. The store sets these times explicitly
 * and makes them all distinct, because the kernel's own file timestamps are too coarse.
 */
#include "page_file_format.h"

#include "../base/file_sync.h"
#include "../base/memory.h"

#include <flatkv/prefix_store.h>

#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

enum {
    NO_ENTRY = -1,
    BYTES_PER_ENTRY = 256 * 1024, /* the index has max_bytes / BYTES_PER_ENTRY entries, clamped to [MIN_ENTRIES, MAX_ENTRIES] */
    MIN_ENTRIES = 1024,
    MAX_ENTRIES = 1 << 22,
    BLOCK_BYTES = 4096,
    KEY_DIGITS = 2 * FKV_PAGE_KEY_BYTES,
    NAME_BYTES = KEY_DIGITS + 8
};

static const uint64_t MAX_FOLDER_BYTES = UINT64_C(1) << 41; /* MAX_ENTRIES files of this size total less than 2^64 bytes */
static const char PAGE_SUFFIX[] = ".page";
static const char PART_SUFFIX[] = ".part";

typedef struct entry {
    fkv_page_key key;
    uint64_t bytes;     /* file size, rounded up to BLOCK_BYTES */
    int64_t written_ns; /* modification time of the file; valid only while the folder is being opened */
    int32_t younger;    /* next more recently used entry, or NO_ENTRY if there is none; free entries are linked through `older` */
    int32_t older;
    int32_t next; /* next entry in the hash bucket */
    bool used;    /* true if the page was used since the folder was opened */
} entry;

typedef struct folder {
    uint64_t map_bytes;
    uint64_t max_bytes;
    uint64_t bytes;
    uint64_t n_evicted;
    int64_t last_ns; /* latest modification time assigned to a file */
    uint32_t n_entries;
    uint32_t capacity;
    uint32_t n_buckets; /* power of two */
    int32_t youngest;
    int32_t oldest;
    int32_t free;
    int dir;
    int lock_file;
    pthread_mutex_t lock;
    entry *entries;   /* [capacity] */
    int32_t *buckets; /* [n_buckets] */
} folder;

/* ---- index ---- */

/* The caller of the following functions must hold the lock. */

static int32_t *folder_bucket(const folder *f, const fkv_page_key *key) {
    uint32_t low = 0;
    memcpy(&low, key->bytes, sizeof low); /* keys are SHA-256 digests, so any of their bits are suitable as a hash */
    return &f->buckets[low & (f->n_buckets - 1)];
}

static int32_t find_entry(const folder *f, const fkv_page_key *key) {
    int32_t at = *folder_bucket(f, key);
    while (at != NO_ENTRY && memcmp(f->entries[at].key.bytes, key->bytes, sizeof key->bytes) != 0) at = f->entries[at].next;
    return at;
}

static void unlink_use(folder *f, int32_t at) {
    const entry *e = &f->entries[at];
    *(e->younger == NO_ENTRY ? &f->youngest : &f->entries[e->younger].older) = e->older;
    *(e->older == NO_ENTRY ? &f->oldest : &f->entries[e->older].younger) = e->younger;
}

static void link_youngest(folder *f, int32_t at) {
    entry *e = &f->entries[at];
    e->younger = NO_ENTRY;
    e->older = f->youngest;
    *(f->youngest == NO_ENTRY ? &f->oldest : &f->entries[f->youngest].younger) = at;
    f->youngest = at;
}

static void add_folder_entry(folder *f, const fkv_page_key *key, uint64_t bytes, bool used) {
    FKV_ASSERT(f->free != NO_ENTRY);
    int32_t at = f->free;
    entry *e = &f->entries[at];
    f->free = e->older;
    *e = (entry){.key = *key, .bytes = bytes, .next = *folder_bucket(f, key), .used = used};
    *folder_bucket(f, key) = at;
    link_youngest(f, at);
    f->n_entries++;
}

static void drop_entry(folder *f, int32_t at) {
    entry *e = &f->entries[at];
    int32_t *link = folder_bucket(f, &e->key);
    while (*link != at) link = &f->entries[*link].next;
    *link = e->next;
    unlink_use(f, at);
    f->bytes -= e->bytes;
    f->n_entries--;
    e->older = f->free;
    f->free = at;
}

static bool drop_key(folder *f, const fkv_page_key *key) {
    (void)pthread_mutex_lock(&f->lock);
    int32_t at = find_entry(f, key);
    if (at != NO_ENTRY) drop_entry(f, at);
    (void)pthread_mutex_unlock(&f->lock);
    return at != NO_ENTRY;
}

/* ---- file names ---- */

static void format_file_name(const fkv_page_key *key, const char *suffix, char name[NAME_BYTES]) {
    static const char digits[] = "0123456789abcdef";
    for (uint32_t i = 0; i < FKV_PAGE_KEY_BYTES; i++) {
        name[2 * i] = digits[key->bytes[i] >> 4];
        name[2 * i + 1] = digits[key->bytes[i] & 15];
    }
    memcpy(name + KEY_DIGITS, suffix, strlen(suffix) + 1);
}

static int hex_digit_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Parses a file name that consists of a key and `suffix`. Returns false if `name` does not have this form. */
static bool parse_file_name(const char *name, const char *suffix, fkv_page_key *key) {
    if (strlen(name) != KEY_DIGITS + strlen(suffix) || strcmp(name + KEY_DIGITS, suffix) != 0) return false;
    for (uint32_t i = 0; i < FKV_PAGE_KEY_BYTES; i++) {
        int high = hex_digit_value(name[2 * i]);
        int low = hex_digit_value(name[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        key->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static uint64_t round_to_blocks(uint64_t bytes) { return fkv_align_up(bytes, BLOCK_BYTES); }

static void remove_page_file(const folder *f, const fkv_page_key *key, const char *suffix) {
    char name[NAME_BYTES];
    format_file_name(key, suffix, name);
    (void)unlinkat(f->dir, name, 0);
}

/* ---- contains, touch, read, remove ---- */

static bool folder_contains(void *self, const fkv_page_key *key) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    bool there = find_entry(f, key) != NO_ENTRY;
    (void)pthread_mutex_unlock(&f->lock);
    return there;
}

static void folder_touch(void *self, const fkv_page_key *keys, uint32_t n) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    for (uint32_t i = n; i-- > 0;) {
        int32_t at = find_entry(f, &keys[i]);
        if (at == NO_ENTRY) continue;
        f->entries[at].used = true;
        unlink_use(f, at);
        link_youngest(f, at);
    }
    (void)pthread_mutex_unlock(&f->lock);
}

static fkv_status read_page_file(int fd, const char *name, uint8_t *out, uint64_t capacity, uint64_t *n_bytes) {
    struct stat about;
    if (fstat(fd, &about) != 0) return fkv_file_os_failed("cannot stat a stored page", name);
    FKV_REQUIRE(S_ISREG(about.st_mode) && about.st_size >= 0 && (uint64_t)about.st_size <= capacity, FKV_FILE_DAMAGED,
                "%s: damaged stored page: its size is %lld bytes (expected at most %llu)", name, (long long)about.st_size,
                (unsigned long long)capacity);
    uint64_t done = 0;
    while (done < (uint64_t)about.st_size) {
        ssize_t n = read(fd, out + done, (uint64_t)about.st_size - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fkv_file_os_failed("cannot read a stored page", name);
        FKV_REQUIRE(n > 0, FKV_FILE_DAMAGED, "%s: damaged stored page: truncated while it was being read", name);
        done += (uint64_t)n;
    }
    *n_bytes = done;
    return FKV_OK;
}

static void folder_remove(void *self, const fkv_page_key *key) {
    folder *f = self;
    (void)drop_key(f, key);
    remove_page_file(f, key, PAGE_SUFFIX);
}

static fkv_status folder_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    folder *f = self;
    char name[NAME_BYTES];
    format_file_name(key, PAGE_SUFFIX, name);
    int fd = openat(f->dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        /* remove the file even if another thread has rewritten it in the meantime, so that no file exists without an index
         * entry */
        folder_remove(f, key);
        return fkv_fail(FKV_GONE, "page %s is not in the prefix folder", name);
    }
    if (fd < 0) return fkv_file_os_failed("cannot open a stored page", name);
    fkv_file_read_ahead(fd);
    fkv_status status = read_page_file(fd, name, packed, capacity, n_bytes);
    (void)close(fd);
    return status;
}

/* ---- write ---- */

/* Evicts the least recently used pages until a new page of `bytes` bytes fits into the folder, then adds these bytes to the
 * total. Returns false if the new page does not fit even after all other pages are evicted. */
static bool evict_for(folder *f, uint64_t bytes) {
    fkv_page_key key;
    if (bytes > f->max_bytes) return false;
    for (bool fits = false; !fits;) {
        (void)pthread_mutex_lock(&f->lock);
        fits = f->bytes + bytes <= f->max_bytes && f->free != NO_ENTRY;
        bool empty = f->oldest == NO_ENTRY;
        if (fits) {
            f->bytes += bytes;
        } else if (!empty) {
            key = f->entries[f->oldest].key;
            drop_entry(f, f->oldest);
            f->n_evicted++;
        }
        (void)pthread_mutex_unlock(&f->lock);
        if (!fits && empty) return false;
        if (!fits) remove_page_file(f, &key, PAGE_SUFFIX);
    }
    return true;
}

/* Returns a time that is later than all previously returned times. */
static struct timespec next_file_time(folder *f) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    int64_t ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    (void)pthread_mutex_lock(&f->lock);
    f->last_ns = ns > f->last_ns ? ns : f->last_ns + 1000;
    ns = f->last_ns;
    (void)pthread_mutex_unlock(&f->lock);
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
}

static fkv_status write_part(folder *f, const char *part, const uint8_t *packed, uint64_t n_bytes) {
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(f->dir, part, flags, S_IRUSR | S_IWUSR);
    if (fd < 0) return fkv_file_os_failed("cannot create the file of a stored page", part);
    fkv_status status = FKV_OK;
    for (uint64_t done = 0; status == FKV_OK && done < n_bytes;) {
        ssize_t n = write(fd, packed + done, n_bytes - done < FKV_FILE_CALL_BYTES ? n_bytes - done : FKV_FILE_CALL_BYTES);
        if (n >= 0)
            done += (uint64_t)n;
        else if (errno != EINTR)
            status = fkv_file_os_failed("cannot write a page to the store", part);
    }
    const struct timespec time = next_file_time(f);
    const struct timespec times[2] = {time, time};
    (void)futimens(fd, times);
    if (status == FKV_OK && fkv_file_sync(fd) != 0) status = fkv_file_os_failed("cannot sync a stored page", part);
    (void)close(fd);
    return status;
}

static fkv_status folder_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    folder *f = self;
    char part[NAME_BYTES];
    char name[NAME_BYTES];
    uint64_t bytes = round_to_blocks(n_bytes);
    if (folder_contains(f, key)) return FKV_OK;
    format_file_name(key, PART_SUFFIX, part);
    format_file_name(key, PAGE_SUFFIX, name);
    FKV_REQUIRE(evict_for(f, bytes), FKV_POOL_FULL, "page %s takes %llu bytes, which do not fit in a prefix folder of %llu bytes",
                name, (unsigned long long)n_bytes, (unsigned long long)f->max_bytes);
    fkv_status status = write_part(f, part, packed, n_bytes);
    if (status == FKV_OK && renameat(f->dir, part, f->dir, name) != 0)
        status = fkv_file_os_failed("cannot rename a stored page", name);
    if (status != FKV_OK) (void)unlinkat(f->dir, part, 0);
    (void)pthread_mutex_lock(&f->lock);
    if (status == FKV_OK && find_entry(f, key) == NO_ENTRY && f->free != NO_ENTRY)
        add_folder_entry(f, key, bytes, false);
    else
        f->bytes -= bytes;
    (void)pthread_mutex_unlock(&f->lock);
    return status;
}

/* ---- open and close ---- */

/* Sets the modification times of used files so that the next open can restore the LRU order. */
static void save_lru_order(folder *f) {
    char name[NAME_BYTES];
    for (int32_t at = f->oldest; at != NO_ENTRY; at = f->entries[at].younger) {
        if (!f->entries[at].used) continue;
        const struct timespec time = next_file_time(f);
        const struct timespec times[2] = {time, time};
        format_file_name(&f->entries[at].key, PAGE_SUFFIX, name);
        (void)utimensat(f->dir, name, times, AT_SYMLINK_NOFOLLOW);
    }
}

static void folder_close(void *self) {
    folder *f = self;
    if (f->lock_file >= 0) {
        save_lru_order(f);
        (void)close(f->lock_file);
    }
    if (f->dir >= 0) (void)close(f->dir);
    (void)pthread_mutex_destroy(&f->lock);
    fkv_map_close(f, f->map_bytes);
}

static void folder_stats(void *self, fkv_prefix_store_stats *stats) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    *stats = (fkv_prefix_store_stats){
        .pages = f->n_entries, .bytes = f->bytes, .max_bytes = f->max_bytes, .evicted = f->n_evicted, .memory = f->map_bytes};
    (void)pthread_mutex_unlock(&f->lock);
}

/* Examines one file in the folder. Adds a complete page to the index as entries[*n], and deletes an unfinished page. */
static void scan_file(folder *f, const char *name, uint32_t *n) {
    fkv_page_key key;
    struct stat about;
    if (parse_file_name(name, PART_SUFFIX, &key)) {
        (void)unlinkat(f->dir, name, 0);
    } else if (parse_file_name(name, PAGE_SUFFIX, &key) && fstatat(f->dir, name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
               S_ISREG(about.st_mode)) {
        if (*n == f->capacity || (uint64_t)about.st_size > f->max_bytes) { /* prevents an overflow of the total size */
            (void)unlinkat(f->dir, name, 0);
            return;
        }
        f->entries[(*n)++] =
            (entry){.key = key, .bytes = round_to_blocks((uint64_t)about.st_size), .written_ns = fkv_file_written_ns(&about)};
    }
}

static int compare_times(const void *a, const void *b) {
    int64_t x = ((const entry *)a)->written_ns;
    int64_t y = ((const entry *)b)->written_ns;
    return (x > y) - (x < y);
}

static fkv_status scan_prefix_folder(folder *f, const char *path) {
    int copy = openat(f->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
    if (dir == NULL) {
        if (copy >= 0) (void)close(copy);
        return fkv_file_os_failed("cannot list the prefix folder", path);
    }
    uint32_t n = 0;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) scan_file(f, d->d_name, &n);
    (void)closedir(dir);
    qsort(f->entries, n, sizeof *f->entries, compare_times);
    for (uint32_t i = 0; i < f->n_buckets; i++) f->buckets[i] = NO_ENTRY;
    for (uint32_t i = 0; i < n; i++) { /* link the oldest entries first and the most recently used entry last */
        entry *e = &f->entries[i];
        e->next = *folder_bucket(f, &e->key);
        *folder_bucket(f, &e->key) = (int32_t)i;
        link_youngest(f, (int32_t)i);
        f->bytes += e->bytes;
    }
    f->n_entries = n;
    if (n > 0) f->last_ns = f->entries[n - 1].written_ns;
    for (uint32_t i = f->capacity; i-- > n;) {
        f->entries[i].older = f->free;
        f->free = (int32_t)i;
    }
    (void)evict_for(f, 0); /* evict pages if max_bytes is lower than when the folder was last open */
    return FKV_OK;
}

/* Checks that other users cannot replace the folder or write to it, because anyone who can write pages can control the model's
 * output. The root user is trusted. */
static fkv_status check_folder_owner(const folder *f, const char *path) {
    char name[PATH_MAX];
    struct stat link;
    struct stat opened;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--; /* a trailing slash would make lstat() follow a link */
    FKV_REQUIRE(n < sizeof name, FKV_BAD_ARGUMENT, "the path of the prefix folder is too long: %s", path);
    (void)snprintf(name, sizeof name, "%.*s", (int)n, path);
    if (lstat(name, &link) != 0 || fstat(f->dir, &opened) != 0)
        return fkv_file_os_failed("cannot read the attributes of the prefix folder", path);
    const uid_t user = geteuid();
    FKV_REQUIRE(!S_ISLNK(link.st_mode) || link.st_uid == user, FKV_BAD_ARGUMENT,
                "the prefix folder %s is a symbolic link owned by another user (uid %u): use a folder or a link that you own",
                path, (unsigned)link.st_uid);
    FKV_REQUIRE(opened.st_uid == user || opened.st_uid == 0, FKV_BAD_ARGUMENT,
                "the prefix folder %s belongs to another user (uid %u): use a folder that you own", path,
                (unsigned)opened.st_uid);
    FKV_REQUIRE((opened.st_mode & (S_IWGRP | S_IWOTH)) == 0, FKV_BAD_ARGUMENT,
                "the prefix folder %s is writable by other users (mode %04o): run chmod go-w on it or use another folder", path,
                (unsigned)opened.st_mode & 07777);
    return FKV_OK;
}

static fkv_status open_and_lock_folder(folder *f, const char *path) {
    if (mkdir(path, S_IRWXU) != 0 && errno != EEXIST) return fkv_file_os_failed("cannot create the prefix folder", path);
    f->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->dir < 0) return fkv_file_os_failed("cannot open the prefix folder", path);
    FKV_TRY(check_folder_owner(f, path));
    int lock = openat(f->dir, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (lock < 0) return fkv_file_os_failed("cannot create the lock file of the prefix folder", path);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        (void)close(lock);
        return fkv_fail(FKV_BUSY, "another process uses the prefix folder %s: use a separate folder for each process", path);
    }
    f->lock_file = lock;
    return scan_prefix_folder(f, path);
}

fkv_status fkv_prefix_folder_open(const char *path, uint64_t max_bytes, fkv_prefix_store *store) {
    FKV_REQUIRE(path != NULL && path[0] != '\0' && store != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_folder_open: path is NULL or empty, or store is NULL");
    FKV_REQUIRE(max_bytes > 0, FKV_BAD_ARGUMENT, "fkv_prefix_folder_open: max_bytes must be at least 1");
    FKV_REQUIRE(max_bytes <= MAX_FOLDER_BYTES, FKV_BAD_ARGUMENT, "fkv_prefix_folder_open: max_bytes is %llu (maximum %llu)",
                (unsigned long long)max_bytes, (unsigned long long)MAX_FOLDER_BYTES);
    uint64_t capacity = max_bytes / BYTES_PER_ENTRY;
    if (capacity < MIN_ENTRIES) capacity = MIN_ENTRIES;
    if (capacity > MAX_ENTRIES) capacity = MAX_ENTRIES;
    uint32_t n_buckets = 1;
    while (n_buckets < capacity) n_buckets *= 2;
    uint64_t bytes = sizeof(folder) + capacity * sizeof(entry) + n_buckets * sizeof(int32_t);
    void *map = NULL;
    FKV_TRY(fkv_map_open(bytes, true, &map));
    folder *f = map;
    *f = (folder){.map_bytes = bytes,
                  .max_bytes = max_bytes,
                  .capacity = (uint32_t)capacity,
                  .n_buckets = n_buckets,
                  .youngest = NO_ENTRY,
                  .oldest = NO_ENTRY,
                  .free = NO_ENTRY,
                  .dir = -1,
                  .lock_file = -1};
    f->entries = (entry *)(void *)(f + 1);
    f->buckets = (int32_t *)(void *)(f->entries + capacity);
    (void)pthread_mutex_init(&f->lock, NULL);
    fkv_status status = open_and_lock_folder(f, path);
    if (status != FKV_OK) {
        folder_close(f);
        return status;
    }
    *store = (fkv_prefix_store){.self = f,
                                .contains = folder_contains,
                                .read = folder_read,
                                .write = folder_write,
                                .remove = folder_remove,
                                .touch = folder_touch,
                                .stats = folder_stats,
                                .close = folder_close};
    return FKV_OK;
}
