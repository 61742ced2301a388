/* A folder as a store of packed pages: one file for each, KEY.page, where KEY is the 64 hex digits of its key.
 *
 * Killed at any moment: a page is written to KEY.part, synced, and only then gets its name, so a name always holds a whole file;
 * what is left of unfinished ones is removed at the next open. What the power or the disk does to a file, the reader of the page
 * finds by its checksums. A lock on the file `lock` keeps a second process out.
 *
 * Which pages there are is known in memory: a table by key, and a list by use. The lock of the table is held for a few links and
 * never over a call to the disk, so that look() and used() do not wait.
 *
 *   bytes = sum over entries and over pages being written of their size, in blocks of 4 KiB;  bytes <= max_bytes
 *
 * Files keep the order of use in their times: set when they are written, and at close for those used since. No two get the same
 * time; the kernel's own clock for files ticks too slowly for that.
 */
#include "page_file_format.h"

#include "../base/file_sync.h"
#include "../base/memory.h"

#include <flatkv/prefix_store.h>

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

enum {
    NONE = -1,
    ENTRY_SHARE = 256 * 1024, /* of max_bytes there is an entry for each so many */
    LEAST_ENTRIES = 1024,
    MOST_ENTRIES = 1 << 22,
    BLOCK_BYTES = 4096,
    KEY_DIGITS = 2 * FKV_PAGE_KEY_BYTES,
    NAME_BYTES = KEY_DIGITS + 8
};

static const uint64_t MOST_BYTES = UINT64_C(1) << 41; /* times MOST_ENTRIES still a uint64_t */
static const char PAGE_END[] = ".page";
static const char PART_END[] = ".part";

typedef struct entry {
    fkv_page_key key;
    uint64_t bytes;     /* in blocks */
    int64_t written_ns; /* the file's time; at open only */
    int32_t younger;    /* in the list by use; NONE at its ends. Free entries are linked by `older` */
    int32_t older;
    int32_t next; /* in the bucket */
    bool used;    /* since it was opened */
} entry;

typedef struct folder {
    uint64_t map_bytes;
    uint64_t max_bytes;
    uint64_t bytes;
    uint64_t n_evicted;
    int64_t last_ns; /* the latest time that a file was given */
    uint32_t n_entries;
    uint32_t capacity;
    uint32_t n_buckets; /* a power of two */
    int32_t youngest;
    int32_t oldest;
    int32_t free;
    int dir;
    int lock_file;
    pthread_mutex_t lock;
    entry *entries;   /* [capacity] */
    int32_t *buckets; /* [n_buckets] */
} folder;

/* ---- the table; under the lock ---- */

static int32_t *bucket_of(const folder *f, const fkv_page_key *key) {
    uint32_t low = 0;
    memcpy(&low, key->bytes, sizeof low); /* keys are digests: any bits do */
    return &f->buckets[low & (f->n_buckets - 1)];
}

static int32_t find(const folder *f, const fkv_page_key *key) {
    int32_t at = *bucket_of(f, key);
    while (at != NONE && memcmp(f->entries[at].key.bytes, key->bytes, sizeof key->bytes) != 0) at = f->entries[at].next;
    return at;
}

static void unlink_use(folder *f, int32_t at) {
    const entry *e = &f->entries[at];
    *(e->younger == NONE ? &f->youngest : &f->entries[e->younger].older) = e->older;
    *(e->older == NONE ? &f->oldest : &f->entries[e->older].younger) = e->younger;
}

static void link_youngest(folder *f, int32_t at) {
    entry *e = &f->entries[at];
    e->younger = NONE;
    e->older = f->youngest;
    *(f->youngest == NONE ? &f->oldest : &f->entries[f->youngest].younger) = at;
    f->youngest = at;
}

static void enter(folder *f, const fkv_page_key *key, uint64_t bytes, bool used) {
    FKV_ASSERT(f->free != NONE);
    int32_t at = f->free;
    entry *e = &f->entries[at];
    f->free = e->older;
    *e = (entry){.key = *key, .bytes = bytes, .next = *bucket_of(f, key), .used = used};
    *bucket_of(f, key) = at;
    link_youngest(f, at);
    f->n_entries++;
}

static void drop(folder *f, int32_t at) {
    entry *e = &f->entries[at];
    int32_t *link = bucket_of(f, &e->key);
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
    int32_t at = find(f, key);
    if (at != NONE) drop(f, at);
    (void)pthread_mutex_unlock(&f->lock);
    return at != NONE;
}

/* ---- names ---- */

static void name_of(const fkv_page_key *key, const char *end, char name[NAME_BYTES]) {
    static const char digits[] = "0123456789abcdef";
    for (uint32_t i = 0; i < FKV_PAGE_KEY_BYTES; i++) {
        name[2 * i] = digits[key->bytes[i] >> 4];
        name[2 * i + 1] = digits[key->bytes[i] & 15];
    }
    memcpy(name + KEY_DIGITS, end, strlen(end) + 1);
}

static int digit_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* True: `name` is a key and this end. */
static bool key_of(const char *name, const char *end, fkv_page_key *key) {
    if (strlen(name) != KEY_DIGITS + strlen(end) || strcmp(name + KEY_DIGITS, end) != 0) return false;
    for (uint32_t i = 0; i < FKV_PAGE_KEY_BYTES; i++) {
        int high = digit_of(name[2 * i]);
        int low = digit_of(name[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        key->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static uint64_t blocks_of(uint64_t bytes) { return fkv_align_up(bytes, BLOCK_BYTES); }

static void remove_file(const folder *f, const fkv_page_key *key, const char *end) {
    char name[NAME_BYTES];
    name_of(key, end, name);
    (void)unlinkat(f->dir, name, 0);
}

/* ---- look, used, read, remove ---- */

static bool folder_look(void *self, const fkv_page_key *key) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    bool there = find(f, key) != NONE;
    (void)pthread_mutex_unlock(&f->lock);
    return there;
}

static void folder_used(void *self, const fkv_page_key *keys, uint32_t n) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    for (uint32_t i = n; i-- > 0;) {
        int32_t at = find(f, &keys[i]);
        if (at == NONE) continue;
        f->entries[at].used = true;
        unlink_use(f, at);
        link_youngest(f, at);
    }
    (void)pthread_mutex_unlock(&f->lock);
}

static fkv_status read_all(int fd, const char *name, uint8_t *out, uint64_t capacity, uint64_t *n_bytes) {
    struct stat about;
    if (fstat(fd, &about) != 0) return fkv_file_os_failed("cannot look at a page", name);
    FKV_REQUIRE(S_ISREG(about.st_mode) && about.st_size >= 0 && (uint64_t)about.st_size <= capacity, FKV_FILE_DAMAGED,
                "a page has %lld bytes, at most %llu are expected: %s", (long long)about.st_size, (unsigned long long)capacity,
                name);
    uint64_t done = 0;
    while (done < (uint64_t)about.st_size) {
        ssize_t n = read(fd, out + done, (uint64_t)about.st_size - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fkv_file_os_failed("cannot read a page", name);
        FKV_REQUIRE(n > 0, FKV_FILE_DAMAGED, "a page became shorter while it was read: %s", name);
        done += (uint64_t)n;
    }
    *n_bytes = done;
    return FKV_OK;
}

static void folder_remove(void *self, const fkv_page_key *key) {
    folder *f = self;
    (void)drop_key(f, key);
    remove_file(f, key, PAGE_END);
}

static fkv_status folder_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    folder *f = self;
    char name[NAME_BYTES];
    name_of(key, PAGE_END, name);
    int fd = openat(f->dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        folder_remove(f, key); /* with its file: it may have been written anew since, and no file is without an entry */
        return fkv_fail(FKV_GONE, "there is no page %s", name);
    }
    if (fd < 0) return fkv_file_os_failed("cannot open a page", name);
    fkv_file_read_ahead(fd);
    fkv_status status = read_all(fd, name, packed, capacity, n_bytes);
    (void)close(fd);
    return status;
}

/* ---- write ---- */

/* Gives up the oldest pages until `bytes` more and one more entry fit. False: they never will. */
static bool make_room(folder *f, uint64_t bytes) {
    fkv_page_key key;
    if (bytes > f->max_bytes) return false;
    for (bool fits = false; !fits;) {
        (void)pthread_mutex_lock(&f->lock);
        fits = f->bytes + bytes <= f->max_bytes && f->free != NONE;
        bool empty = f->oldest == NONE;
        if (fits) {
            f->bytes += bytes;
        } else if (!empty) {
            key = f->entries[f->oldest].key;
            drop(f, f->oldest);
            f->n_evicted++;
        }
        (void)pthread_mutex_unlock(&f->lock);
        if (!fits && empty) return false;
        if (!fits) remove_file(f, &key, PAGE_END);
    }
    return true;
}

/* A time that is later than any that was given before. */
static struct timespec next_time(folder *f) {
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
    if (fd < 0) return fkv_file_os_failed("cannot make a page", part);
    fkv_status status = FKV_OK;
    for (uint64_t done = 0; status == FKV_OK && done < n_bytes;) {
        ssize_t n = write(fd, packed + done, n_bytes - done < FKV_FILE_CALL_BYTES ? n_bytes - done : FKV_FILE_CALL_BYTES);
        if (n >= 0)
            done += (uint64_t)n;
        else if (errno != EINTR)
            status = fkv_file_os_failed("cannot write a page", part);
    }
    const struct timespec time = next_time(f);
    const struct timespec times[2] = {time, time};
    (void)futimens(fd, times);
    if (status == FKV_OK && fkv_file_sync(fd) != 0) status = fkv_file_os_failed("cannot sync a page", part);
    (void)close(fd);
    return status;
}

static fkv_status folder_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    folder *f = self;
    char part[NAME_BYTES];
    char name[NAME_BYTES];
    uint64_t bytes = blocks_of(n_bytes);
    if (folder_look(f, key)) return FKV_OK;
    name_of(key, PART_END, part);
    name_of(key, PAGE_END, name);
    FKV_REQUIRE(make_room(f, bytes), FKV_POOL_FULL, "a page of %llu bytes does not fit the folder's %llu: %s",
                (unsigned long long)n_bytes, (unsigned long long)f->max_bytes, name);
    fkv_status status = write_part(f, part, packed, n_bytes);
    if (status == FKV_OK && renameat(f->dir, part, f->dir, name) != 0) status = fkv_file_os_failed("cannot name a page", name);
    if (status != FKV_OK) (void)unlinkat(f->dir, part, 0);
    (void)pthread_mutex_lock(&f->lock);
    if (status == FKV_OK && find(f, key) == NONE && f->free != NONE)
        enter(f, key, bytes, false);
    else
        f->bytes -= bytes;
    (void)pthread_mutex_unlock(&f->lock);
    return status;
}

/* ---- open and close ---- */

/* The times of files that were used say so to the next open: from the oldest to the youngest. */
static void keep_order(folder *f) {
    char name[NAME_BYTES];
    for (int32_t at = f->oldest; at != NONE; at = f->entries[at].younger) {
        if (!f->entries[at].used) continue;
        const struct timespec time = next_time(f);
        const struct timespec times[2] = {time, time};
        name_of(&f->entries[at].key, PAGE_END, name);
        (void)utimensat(f->dir, name, times, AT_SYMLINK_NOFOLLOW);
    }
}

static void folder_close(void *self) {
    folder *f = self;
    if (f->lock_file >= 0) {
        keep_order(f);
        (void)close(f->lock_file);
    }
    if (f->dir >= 0) (void)close(f->dir);
    (void)pthread_mutex_destroy(&f->lock);
    fkv_map_close(f, f->map_bytes);
}

static void folder_figures(void *self, fkv_prefix_store_figures *figures) {
    folder *f = self;
    (void)pthread_mutex_lock(&f->lock);
    *figures = (fkv_prefix_store_figures){
        .pages = f->n_entries, .bytes = f->bytes, .max_bytes = f->max_bytes, .evicted = f->n_evicted, .memory = f->map_bytes};
    (void)pthread_mutex_unlock(&f->lock);
}

/* Takes up one name of the folder: a page as entries[n], the rest of an unfinished one is removed. */
static void take_up(folder *f, const char *name, uint32_t *n) {
    fkv_page_key key;
    struct stat about;
    if (key_of(name, PART_END, &key)) {
        (void)unlinkat(f->dir, name, 0);
    } else if (key_of(name, PAGE_END, &key) && fstatat(f->dir, name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
               S_ISREG(about.st_mode)) {
        if (*n == f->capacity || (uint64_t)about.st_size > f->max_bytes) { /* so the sum cannot wrap, either */
            (void)unlinkat(f->dir, name, 0);
            return;
        }
        f->entries[(*n)++] =
            (entry){.key = key, .bytes = blocks_of((uint64_t)about.st_size), .written_ns = fkv_file_written_ns(&about)};
    }
}

static int by_time(const void *a, const void *b) {
    int64_t x = ((const entry *)a)->written_ns;
    int64_t y = ((const entry *)b)->written_ns;
    return (x > y) - (x < y);
}

static fkv_status scan(folder *f, const char *path) {
    int copy = openat(f->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
    if (dir == NULL) {
        if (copy >= 0) (void)close(copy);
        return fkv_file_os_failed("cannot list the folder", path);
    }
    uint32_t n = 0;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) take_up(f, d->d_name, &n);
    (void)closedir(dir);
    qsort(f->entries, n, sizeof *f->entries, by_time);
    for (uint32_t i = 0; i < f->n_buckets; i++) f->buckets[i] = NONE;
    for (uint32_t i = 0; i < n; i++) { /* the oldest first: the last one linked is the youngest */
        entry *e = &f->entries[i];
        e->next = *bucket_of(f, &e->key);
        *bucket_of(f, &e->key) = (int32_t)i;
        link_youngest(f, (int32_t)i);
        f->bytes += e->bytes;
    }
    f->n_entries = n;
    if (n > 0) f->last_ns = f->entries[n - 1].written_ns;
    for (uint32_t i = f->capacity; i-- > n;) {
        f->entries[i].older = f->free;
        f->free = (int32_t)i;
    }
    (void)make_room(f, 0); /* the bound may be lower than it was */
    return FKV_OK;
}

static fkv_status open_files(folder *f, const char *path) {
    if (mkdir(path, S_IRWXU) != 0 && errno != EEXIST) return fkv_file_os_failed("cannot make the folder", path);
    f->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->dir < 0) return fkv_file_os_failed("cannot open the folder", path);
    int lock = openat(f->dir, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (lock < 0) return fkv_file_os_failed("cannot write to the folder", path);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        (void)close(lock);
        return fkv_fail(FKV_BUSY, "another process keeps its prefixes in %s: give each its own folder", path);
    }
    f->lock_file = lock;
    return scan(f, path);
}

fkv_status fkv_prefix_folder_open(const char *path, uint64_t max_bytes, fkv_prefix_store *store) {
    FKV_REQUIRE(path != NULL && path[0] != '\0' && store != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_folder_open: a path and a place for the store are needed");
    FKV_REQUIRE(max_bytes > 0, FKV_BAD_ARGUMENT, "a folder of 0 bytes keeps nothing: allow it some");
    FKV_REQUIRE(max_bytes <= MOST_BYTES, FKV_BAD_ARGUMENT, "a folder of %llu bytes: at most %llu", (unsigned long long)max_bytes,
                (unsigned long long)MOST_BYTES);
    uint64_t capacity = max_bytes / ENTRY_SHARE;
    if (capacity < LEAST_ENTRIES) capacity = LEAST_ENTRIES;
    if (capacity > MOST_ENTRIES) capacity = MOST_ENTRIES;
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
                  .youngest = NONE,
                  .oldest = NONE,
                  .free = NONE,
                  .dir = -1,
                  .lock_file = -1};
    f->entries = (entry *)(void *)(f + 1);
    f->buckets = (int32_t *)(void *)(f->entries + capacity);
    (void)pthread_mutex_init(&f->lock, NULL);
    fkv_status status = open_files(f, path);
    if (status != FKV_OK) {
        folder_close(f);
        return status;
    }
    *store = (fkv_prefix_store){.self = f,
                                .look = folder_look,
                                .read = folder_read,
                                .write = folder_write,
                                .remove = folder_remove,
                                .used = folder_used,
                                .figures = folder_figures,
                                .close = folder_close};
    return FKV_OK;
}
