/* See partial_file.h. */
#include "partial_file.h"

#include "../kit/numbers.h"
#include "../kit/program.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char PART[] = ".flatkv-part";
static const char STATE[] = ".flatkv-state";
static const char STATE_FORMAT[] = "flatkv-state 1";

static int fail_file(const partial_file *p, const char *what) {
    char path[HUB_PATH];
    int reason = errno;
    return kit_fail(EXIT_FAILED, "cannot %s %s: %s", what, hub_cache_blob(p->cache, p->file, PART, path), strerror(reason));
}

/* ---- parts ---- */

static void make_parts(partial_file *p, uint64_t part_bytes) {
    uint64_t bytes = p->file->bytes;
    if (part_bytes == 0) part_bytes = bytes;
    free(p->parts);
    p->n_parts = bytes == 0 ? 0 : (uint32_t)((bytes + part_bytes - 1) / part_bytes);
    p->parts = kit_alloc(p->n_parts * sizeof *p->parts);
    for (uint32_t i = 0; i < p->n_parts; i++) {
        uint64_t from = i * part_bytes;
        p->parts[i] = (file_part){from, bytes - from < part_bytes ? bytes : from + part_bytes, from};
    }
}

uint64_t partial_file_done(const partial_file *p) {
    uint64_t done = 0;
    for (uint32_t i = 0; i < p->n_parts; i++) done += p->parts[i].at - p->parts[i].from;
    return done;
}

/* ---- state ---- */

/* Restores the progress of each part from the state file. Changes nothing if the state file is missing or belongs to another
 * file. */
static void restore(partial_file *p) {
    char path[HUB_PATH];
    char format[sizeof STATE_FORMAT];
    uint64_t bytes = 0;
    FILE *state = fopen(hub_cache_blob(p->cache, p->file, STATE, path), "r");
    if (state == NULL) return;
    bool good = fgets(format, sizeof format, state) != NULL && strcmp(format, STATE_FORMAT) == 0 &&
                fscanf(state, " %" SCNu64, &bytes) == 1 && bytes == p->file->bytes;
    for (uint32_t i = 0; good && i < p->n_parts; i++) {
        uint64_t done = 0;
        file_part *part = &p->parts[i];
        if (fscanf(state, " %" SCNu64, &done) != 1 || done > part->until - part->from) break;
        part->at = part->from + done;
    }
    (void)fclose(state);
}

void partial_file_save(partial_file *p, bool now) {
    char path[HUB_PATH];
    char made[HUB_PATH];
    double time = kit_seconds();
    if (p->fd < 0 || (!now && time - p->saved < 1)) return;
    p->saved = time;
    FILE *state = fopen(hub_cache_blob(p->cache, p->file, ".flatkv-state-part", made), "w");
    if (state == NULL) return;
    bool good = fprintf(state, "%s %" PRIu64 "\n", STATE_FORMAT, p->file->bytes) > 0;
    for (uint32_t i = 0; good && i < p->n_parts; i++)
        good = fprintf(state, "%" PRIu64 "\n", p->parts[i].at - p->parts[i].from) > 0;
    good = fclose(state) == 0 && good;
    if (!good || rename(made, hub_cache_blob(p->cache, p->file, STATE, path)) != 0) (void)unlink(made);
}

uint64_t partial_file_stored(const hub_cache *cache, const hub_file *file) {
    char path[HUB_PATH];
    struct stat about;
    if (stat(hub_cache_blob(cache, file, PART, path), &about) != 0) return 0;
    uint64_t stored = (uint64_t)about.st_blocks * 512;
    return stored < file->bytes ? stored : file->bytes;
}

/* ---- data ---- */

static void restart_digest(partial_file *p) {
    char unused[HUB_DIGEST];
    if (p->digest != NULL) hub_digest_close(p->digest, unused);
    p->digest = hub_digest_open(p->file);
    p->hashed = 0;
}

int partial_file_restart(partial_file *p, uint64_t part_bytes) {
    char path[HUB_PATH];
    (void)unlink(hub_cache_blob(p->cache, p->file, STATE, path));
    make_parts(p, part_bytes);
    restart_digest(p);
    bool good = ftruncate(p->fd, 0) == 0 && ftruncate(p->fd, (off_t)p->file->bytes) == 0;
    return good ? EXIT_GOOD : fail_file(p, "resize");
}

int partial_file_open(partial_file *p, const hub_cache *cache, const hub_file *file) {
    char path[HUB_PATH];
    struct stat about;
    *p = (partial_file){.cache = cache, .file = file, .lock = -1};
    p->fd = open(hub_cache_blob(cache, file, PART, path), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (p->fd < 0) return fail_file(p, "create");
    if (fstat(p->fd, &about) != 0) return fail_file(p, "read");
    if ((uint64_t)about.st_size != file->bytes) return partial_file_restart(p, PARTIAL_PART_BYTES);
    make_parts(p, PARTIAL_PART_BYTES);
    restart_digest(p);
    restore(p);
    return EXIT_GOOD;
}

bool partial_file_write(partial_file *p, uint32_t part, const char *bytes, size_t n) {
    file_part *to = &p->parts[part];
    errno = EFBIG;
    if (n > to->until - to->at) return false;
    while (n > 0) {
        ssize_t written = pwrite(p->fd, bytes, n, (off_t)to->at);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        to->at += (uint64_t)written;
        bytes += written;
        n -= (size_t)written;
    }
    return true;
}

/* Returns the number of contiguous bytes at the start of the file that have been received. */
static uint64_t contiguous(const partial_file *p) {
    for (uint32_t i = 0; i < p->n_parts; i++)
        if (p->parts[i].at < p->parts[i].until) return p->parts[i].at;
    return p->file->bytes;
}

int partial_file_hash(partial_file *p, bool *pending) {
    enum { BUFFER = 1 << 20, MAX_BUFFERS = 16 };
    uint64_t end = contiguous(p);
    char *buffer = p->hashed < end ? kit_alloc(BUFFER) : NULL;
    for (int i = 0; i < MAX_BUFFERS && p->hashed < end; i++) {
        size_t n = end - p->hashed < BUFFER ? (size_t)(end - p->hashed) : BUFFER;
        ssize_t got = pread(p->fd, buffer, n, (off_t)p->hashed);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            if (got == 0) errno = EIO; /* another program has truncated the file */
            free(buffer);
            return fail_file(p, "read");
        }
        hub_digest_add(p->digest, buffer, (size_t)got);
        p->hashed += (uint64_t)got;
    }
    free(buffer);
    if (p->hashed < end) *pending = true;
    return EXIT_GOOD;
}

int partial_file_finish(partial_file *p, bool *matches) {
    char part[HUB_PATH];
    char path[HUB_PATH];
    char digest[HUB_DIGEST];
    hub_digest_close(p->digest, digest);
    p->digest = NULL;
    *matches = strcmp(digest, p->file->id) == 0;
    if (!*matches) return EXIT_GOOD;
    (void)hub_cache_blob(p->cache, p->file, PART, part);
    (void)hub_cache_blob(p->cache, p->file, "", path);
    if (fsync(p->fd) != 0) return fail_file(p, "write");
    if (rename(part, path) != 0) return fail_file(p, "rename");
    (void)unlink(hub_cache_blob(p->cache, p->file, STATE, path));
    (void)close(p->fd);
    p->fd = -1;
    return EXIT_GOOD;
}

void partial_file_close(partial_file *p) {
    char unused[HUB_DIGEST];
    partial_file_save(p, true);
    if (p->fd >= 0) (void)close(p->fd);
    if (p->lock >= 0) (void)close(p->lock);
    if (p->digest != NULL) hub_digest_close(p->digest, unused);
    free(p->parts);
    *p = (partial_file){.fd = -1, .lock = -1};
}
