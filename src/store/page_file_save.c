/* Writes page files. All data is written to a part file, `name.part`, which is renamed to `name` when it is complete.
 *
 * Write order: first the layers and tokens, then the pages interleaved with batches of index entries, and finally the header. The
 * digest covers the header, layers, tokens and index, in file order. An index entry is final once its page is written. Therefore
 * one pass over the pages suffices, and only one batch of index entries is kept in memory.
 *
 * Only the process that holds the lock on the part file may truncate, rename or unlink it. If the process is killed during a
 * save, an unlocked part file remains, which the next save to the same name reuses. Names that end in ".part" are rejected, so a
 * finished file is never mistaken for a part file.
 *
 * Only regular files are replaced. rename() cannot enforce this rule, so the type of the destination is checked before the part
 * file is created and again just before the rename. Someone who can change the folder between the last check and the rename could
 * also delete the saved file, so this race adds no risk.
 */
#include "page_file_format.h"

#include "../base/file_sync.h"

#include <stdio.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>

enum {
    FOLDER_BYTES = 4096, /* maximum length of a folder path */
    NAME_BYTES = 256,    /* maximum length of a file name, including the terminator */
    INDEX_ENTRIES = 512, /* number of index entries in one batch, which is written with one call */
    INDEX_BYTES = INDEX_ENTRIES * (int)sizeof(fkv_file_entry),        /* size of one batch of index entries */
    CHUNK_BYTES = (FKV_FILE_BUFFER_BYTES - INDEX_BYTES) / 4096 * 4096 /* maximum number of page bytes in one write */
};

static const char PART_SUFFIX[] = ".part";

typedef struct part_file {
    const char *path; /* path that the caller passed */
    const char *name; /* last component of path */
    char part_name[NAME_BYTES];
    int folder;
    int fd;
    bool published; /* true once the part file has its final name, so that it must not be removed */
} part_file;

typedef struct page_writer {
    const fkv_slab *slab;
    const fkv_pager *pager;
    const fkv_file_plan *plan;
    uint32_t slot;
    uint32_t n_tokens;
    int fd;
    const char *path;
    uint8_t *chunk; /* [CHUNK_BYTES] */
} page_writer;

static fkv_status write_at(int fd, const void *bytes, uint64_t n, uint64_t offset, const char *path) {
    const uint8_t *from = bytes;
    while (n > 0) {
        ssize_t done = pwrite(fd, from, n < FKV_FILE_CALL_BYTES ? n : FKV_FILE_CALL_BYTES, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return fkv_file_os_failed("cannot write the page file", path);
        from += done;
        offset += (uint64_t)done;
        n -= (uint64_t)done;
    }
    return FKV_OK;
}

/* ---- part file ----------------------------------------------------------------------------------------------- */

static fkv_status part_open_folder(part_file *part) {
    char folder[FOLDER_BYTES] = ".";
    const char *slash = strrchr(part->path, '/');
    part->name = slash == NULL ? part->path : slash + 1;
    if (slash != NULL) {
        size_t n = slash == part->path ? 1 : (size_t)(slash - part->path);
        FKV_REQUIRE(n < sizeof folder, FKV_IO, "cannot save %.200s: the folder path is %zu bytes long (maximum %d)", part->path,
                    n, FOLDER_BYTES - 1);
        memcpy(folder, part->path, n);
        folder[n] = '\0';
    }
    FKV_REQUIRE(part->name[0] != '\0', FKV_IO, "cannot save %s: the path is a folder, not a file", part->path);
    int n = snprintf(part->part_name, sizeof part->part_name, "%s%s", part->name, PART_SUFFIX);
    FKV_REQUIRE(n >= 0 && n < NAME_BYTES, FKV_IO, "cannot save %.200s: the file name is longer than %d bytes", part->name,
                NAME_BYTES - (int)sizeof PART_SUFFIX);
    part->folder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (part->folder < 0) return fkv_file_os_failed("cannot open the folder of the page file", part->path);
    return FKV_OK;
}

/* Returns whether the path ends in ".part". Ignores case, because some file systems are case-insensitive. */
static bool is_part_name(const char *path) {
    const size_t n = strlen(path);
    const size_t n_suffix = strlen(PART_SUFFIX);
    return n >= n_suffix && strcasecmp(path + n - n_suffix, PART_SUFFIX) == 0;
}

static const char *file_type_name(mode_t mode) {
    if (S_ISLNK(mode)) return "a symbolic link";
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return S_ISREG(mode) ? "a file" : "a device";
}

/* Checks that `name` does not exist or is a regular file. Does not follow symbolic links. */
static fkv_status require_replaceable(const part_file *part, const char *name) {
    struct stat there;
    if (fstatat(part->folder, name, &there, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) return FKV_OK;
        return fkv_file_os_failed("cannot stat the file to be replaced", part->path);
    }
    FKV_REQUIRE(S_ISREG(there.st_mode), FKV_IO,
                "cannot save %.300s: %.100s is %s, and only regular files can be replaced; remove it or use another name",
                part->path, name, file_type_name(there.st_mode));
    return FKV_OK;
}

/* Acquires exclusive ownership of the part file: locks it, checks that its name still refers to it, and truncates it. */
static fkv_status part_lock(part_file *part) {
    struct stat opened;
    struct stat named;
    if (flock(part->fd, LOCK_EX | LOCK_NB) != 0) {
        FKV_REQUIRE(errno != EWOULDBLOCK, FKV_IO, "cannot save %s: another save to this file is in progress; retry later",
                    part->path);
        return fkv_file_os_failed("cannot lock the part file", part->path);
    }
    /* between open and lock, another save may have renamed or removed the file */
    if (fstat(part->fd, &opened) != 0 || fstatat(part->folder, part->part_name, &named, AT_SYMLINK_NOFOLLOW) != 0 ||
        opened.st_dev != named.st_dev || opened.st_ino != named.st_ino)
        return fkv_fail(FKV_IO, "cannot save %s: another save to this file has just finished; retry", part->path);
    FKV_REQUIRE(S_ISREG(opened.st_mode) && opened.st_nlink == 1, FKV_IO,
                "cannot save: %s.part is not a regular file with a single link; remove it", part->path);
    if (ftruncate(part->fd, 0) != 0) return fkv_file_os_failed("cannot truncate the part file", part->path);
    /* a part file left by an earlier save may be world-readable; errors are ignored, because some file systems have no modes */
    (void)fchmod(part->fd, S_IRUSR | S_IWUSR);
    return FKV_OK;
}

static fkv_status part_create(part_file *part) {
    FKV_TRY(require_replaceable(part, part->name));
    FKV_TRY(require_replaceable(part, part->part_name)); /* opening a device can have side effects */
    const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    part->fd = openat(part->folder, part->part_name, flags, S_IRUSR | S_IWUSR);
    if (part->fd < 0) return fkv_file_os_failed("cannot create the part file", part->path);
    return part_lock(part);
}

static fkv_status part_open(part_file *part, const char *path) {
    *part = (part_file){.path = path, .folder = -1, .fd = -1};
    FKV_TRY(part_open_folder(part));
    fkv_status status = part_create(part);
    if (status == FKV_OK) return FKV_OK;
    if (part->fd >= 0) (void)close(part->fd);
    (void)close(part->folder);
    return status;
}

/* Syncs the part file and renames it. Holds the lock until the rename is done. */
static fkv_status part_publish(part_file *part) {
    if (fkv_file_sync(part->fd) != 0) return fkv_file_os_failed("cannot sync the page file", part->path);
    FKV_TRY(require_replaceable(part, part->name));
    if (renameat(part->folder, part->part_name, part->folder, part->name) != 0)
        return fkv_file_os_failed("cannot rename the part file", part->path);
    part->published = true;
    if (fkv_file_sync(part->folder) != 0 && errno != EINVAL) /* EINVAL: the file system cannot sync folders */
        return fkv_file_os_failed("the page file is saved, but its folder cannot be synced", part->path);
    return FKV_OK;
}

static void part_close(const part_file *part) {
    if (!part->published) (void)unlinkat(part->folder, part->part_name, 0);
    (void)close(part->fd);
    (void)close(part->folder);
}

/* ---- contents ------------------------------------------------------------------------------------------------ */

/* Writes one page at the offset of its index entry and sets the entry's checksum. */
static fkv_status write_page(const page_writer *writer, fkv_file_entry *entry) {
    const fkv_slab *slab = writer->slab;
    const uint32_t page = fkv_page_at(fkv_pager_view(writer->pager, entry->group, writer->slot), entry->logical);
    uint64_t offset = entry->offset;
    uint64_t used = 0;
    uint64_t left = writer->plan->groups[entry->group].page_bytes;
    FKV_ASSERT(page != FKV_NO_PAGE && left == slab->group_page_bytes[entry->group]);
    for (uint32_t l = 0; l < slab->n_layers; l++) {
        if (slab->layers[l].group != entry->group) continue;
        const uint64_t run_bytes = fkv_slab_run_bytes(slab, l);
        const uint32_t n_live = fkv_slab_live_rows(slab, l, entry->logical, writer->n_tokens);
        uint64_t n = 0;
        for (uint64_t from = 0; from < run_bytes; from += n) {
            n = run_bytes - from < CHUNK_BYTES - used ? run_bytes - from : CHUNK_BYTES - used;
            FKV_TRY(fkv_slab_read(slab, l, page, from, n, writer->chunk + used));
            fkv_slab_blank(slab, l, writer->chunk + used, from, n, n_live);
            used += n;
            left -= n;
            if (used < CHUNK_BYTES && left > 0) continue;
            entry->crc32c = fkv_crc32c(entry->crc32c, writer->chunk, used);
            FKV_TRY(write_at(writer->fd, writer->chunk, used, offset, writer->path));
            offset += used;
            used = 0;
        }
    }
    return FKV_OK;
}

/* Writes all pages and the index, and adds the index and the padding after it to the digest. */
static fkv_status write_file_pages(const page_writer *writer, fkv_file_entry *entries, fkv_sha256 *sha) {
    const fkv_file_plan *plan = writer->plan;
    static const uint8_t zeroes[FKV_FILE_DATA_ALIGN];
    fkv_file_cursor cursor = {.offset = plan->data_offset};
    uint64_t index_end = plan->index_offset;
    uint64_t n = 0;
    bool more = true;
    while (more) {
        more = fkv_file_cursor_next(plan, &cursor, &entries[n]);
        if (more) FKV_TRY(write_page(writer, &entries[n++]));
        if (n < INDEX_ENTRIES && more) continue;
        fkv_sha256_add(sha, entries, n * sizeof entries[0]);
        FKV_TRY(write_at(writer->fd, entries, n * sizeof entries[0], index_end, writer->path));
        index_end += n * sizeof entries[0];
        n = 0;
    }
    FKV_ASSERT(cursor.offset == plan->file_bytes && plan->data_offset - index_end < sizeof zeroes);
    fkv_sha256_add(sha, zeroes, plan->data_offset - index_end);
    return write_at(writer->fd, zeroes, plan->data_offset - index_end, index_end, writer->path);
}

/* Writes everything except the header. */
static fkv_status write_body(const page_writer *writer, fkv_file_header *header, const fkv_file_layer *layers,
                             const uint32_t *tokens, fkv_file_entry *entries, fkv_sha256 *sha) {
    const fkv_file_plan *plan = writer->plan;
    static const uint8_t zeroes[FKV_FILE_INDEX_ALIGN];
    const uint64_t tokens_bytes = (uint64_t)header->n_tokens * sizeof tokens[0];
    const uint64_t gap = plan->index_offset - plan->tokens_offset - tokens_bytes;
    fkv_sha256_add(sha, header, offsetof(fkv_file_header, sha256));
    const uint64_t layers_bytes = (uint64_t)header->n_layers * header->layer_bytes;
    fkv_sha256_add(sha, layers, layers_bytes);
    fkv_sha256_add(sha, tokens, tokens_bytes);
    fkv_sha256_add(sha, zeroes, gap);
    FKV_TRY(write_at(writer->fd, layers, layers_bytes, sizeof *header, writer->path));
    FKV_TRY(write_at(writer->fd, tokens, tokens_bytes, plan->tokens_offset, writer->path));
    FKV_TRY(write_at(writer->fd, zeroes, gap, plan->tokens_offset + tokens_bytes, writer->path));
    return write_file_pages(writer, entries, sha);
}

/* ---- save ---------------------------------------------------------------------------------------------------- */

fkv_status fkv_page_file_save(const fkv_file_identity *identity, const fkv_slab *slab, const fkv_pager *pager, uint32_t slot,
                              const uint32_t *tokens, uint32_t n_tokens, const char *path, uint8_t *buffer) {
    FKV_REQUIRE(path != NULL && path[0] != '\0', FKV_BAD_ARGUMENT, "fkv_seq_save: path is NULL or empty");
    FKV_REQUIRE(!is_part_name(path), FKV_BAD_ARGUMENT,
                "cannot save %s: names that end in %s are reserved for unfinished files; use another name", path, PART_SUFFIX);
    FKV_REQUIRE(tokens != NULL || n_tokens == 0, FKV_BAD_ARGUMENT, "fkv_seq_save: tokens is NULL but n_tokens is %u", n_tokens);
    FKV_ASSERT(fkv_pager_covers(pager, slot, n_tokens));
    fkv_file_header header;
    fkv_file_layer layers[FKV_MAX_LAYERS];
    fkv_file_plan plan;
    fkv_file_identity_write(identity, &header, layers);
    header.n_tokens = n_tokens;
    FKV_TRY(fkv_file_plan_make(&header, layers, path, &plan));
    header.n_groups = plan.n_groups;
    header.n_pages = plan.n_pages;
    header.tokens_offset = plan.tokens_offset;
    header.index_offset = plan.index_offset;
    header.data_offset = plan.data_offset;
    header.file_bytes = plan.file_bytes;
    for (uint32_t l = 0; l < header.n_layers; l++) FKV_ASSERT(slab->layers[l].group == plan.layer_group[l]);
    for (uint32_t g = 0; g < plan.n_groups; g++)
        FKV_ASSERT(plan.groups[g].first == fkv_max_u32(plan.groups[g].n_front, fkv_pager_first_page(pager, g, n_tokens)));

    part_file part;
    FKV_TRY(part_open(&part, path));
    const page_writer writer = {.slab = slab,
                                .pager = pager,
                                .plan = &plan,
                                .slot = slot,
                                .n_tokens = n_tokens,
                                .fd = part.fd,
                                .path = path,
                                .chunk = buffer};
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_status status = write_body(&writer, &header, layers, tokens, (fkv_file_entry *)(void *)(buffer + CHUNK_BYTES), &sha);
    fkv_status digest = fkv_sha256_close(&sha, header.sha256);
    if (status == FKV_OK) status = digest;
    if (status == FKV_OK) status = write_at(part.fd, &header, sizeof header, 0, path);
    if (status == FKV_OK) status = part_publish(&part);
    part_close(&part);
    return status;
}
