/* Reading page files: opening and judging them, loading into pages, and the two public calls that need no cache.
 *
 * A file is judged in this order, and each step may trust the ones before it: regular file and magic (FKV_FILE_FORMAT), version
 * (FKV_FILE_VERSION), lengths and offsets against the file's own length, digest, numbers of header and layers, zeroes between the
 * parts (all FKV_FILE_DAMAGED), identity (FKV_FILE_FOREIGN), index and CRC of every page (FKV_FILE_DAMAGED).
 *
 * Works in one buffer, whatever the file claims:  layers | piece of the index | piece of anything else.
 */
#include "page_file_format.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LAYERS_BYTES = FKV_MAX_LAYERS * (int)sizeof(fkv_file_layer),
    INDEX_ENTRIES = 340, /* read at once */
    INDEX_BYTES = 8 * 1024,
    LOOK_BUFFER_BYTES = 64 * 1024 /* on the stack, for readers without a cache */
};
_Static_assert(INDEX_ENTRIES * sizeof(fkv_file_entry) <= INDEX_BYTES, "a piece of the index fits its place");
_Static_assert(LAYERS_BYTES + INDEX_BYTES + FKV_FILE_DATA_ALIGN <= LOOK_BUFFER_BYTES, "the zeroes before the pages fit a piece");

typedef struct page_reader {
    const char *path;
    int fd;
    fkv_file_header header;
    fkv_file_plan plan;
    fkv_file_layer *layers;  /* [FKV_MAX_LAYERS] */
    fkv_file_entry *entries; /* [INDEX_ENTRIES]: entries [entries_first, entries_end) of the index */
    uint64_t entries_first;
    uint64_t entries_end;
    uint8_t *piece;
    uint64_t piece_bytes;
} page_reader;

/* ---- opening and judging ------------------------------------------------------------------------------------- */

static fkv_status read_at(const page_reader *reader, void *bytes, uint64_t n, uint64_t offset) {
    uint8_t *to = bytes;
    while (n > 0) {
        ssize_t done = pread(reader->fd, to, n < FKV_FILE_CALL_BYTES ? n : FKV_FILE_CALL_BYTES, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return fkv_file_os_failed("cannot read the page file", reader->path);
        FKV_REQUIRE(done > 0, FKV_FILE_DAMAGED,
                    "damaged page file: it ends at byte %" PRIu64 ", sooner than when it was opened: %s", offset, reader->path);
        to += done;
        offset += (uint64_t)done;
        n -= (uint64_t)done;
    }
    return FKV_OK;
}

/* The rows behind the first layer depend on what the queries before them saw. */
static fkv_status refuse_old_sealed(const page_reader *reader) {
    return fkv_fail(FKV_FILE_VERSION,
                    "a page file of version %u with sealed layers: their queries saw fewer pages open than now, and such files "
                    "are read from version %d on: compute its tokens again: %s",
                    reader->header.version, FKV_FILE_VERSION_8, reader->path);
}

/* Magic, version, and what the file's length alone can contradict. */
static fkv_status read_header(page_reader *reader, uint64_t file_bytes) {
    fkv_file_header *header = &reader->header;
    const uint64_t n = file_bytes < sizeof *header ? file_bytes : sizeof *header;
    FKV_TRY(read_at(reader, header, n, 0));
    FKV_REQUIRE(n >= sizeof header->magic && memcmp(header->magic, FKV_FILE_MAGIC, sizeof header->magic) == 0, FKV_FILE_FORMAT,
                "not a page file: %s", reader->path);
    FKV_REQUIRE(n >= offsetof(fkv_file_header, header_bytes), FKV_FILE_DAMAGED,
                "damaged page file: cut after %" PRIu64 " bytes: %s", file_bytes, reader->path);
    if (header->version == FKV_FILE_VERSION_4) return refuse_old_sealed(reader);
    FKV_REQUIRE(fkv_file_layer_bytes(header->version) != 0, FKV_FILE_VERSION,
                "a page file of version %u; this library reads versions %d, %d and %d: %s", header->version, FKV_FILE_VERSION_1,
                FKV_FILE_VERSION_2, FKV_FILE_VERSION_8, reader->path);
    FKV_REQUIRE(n == sizeof *header, FKV_FILE_DAMAGED, "damaged page file: cut after %" PRIu64 " bytes: %s", file_bytes,
                reader->path);
    FKV_REQUIRE(header->file_bytes == file_bytes, FKV_FILE_DAMAGED,
                "damaged page file: %" PRIu64 " bytes long instead of %" PRIu64 ": %s", file_bytes, header->file_bytes,
                reader->path);
    FKV_REQUIRE(header->header_bytes == sizeof(fkv_file_header) && header->layer_bytes == fkv_file_layer_bytes(header->version) &&
                    header->entry_bytes == sizeof(fkv_file_entry),
                FKV_FILE_DAMAGED, "damaged page file: records of %u, %u and %u bytes: %s", header->header_bytes,
                header->layer_bytes, header->entry_bytes, reader->path);
    FKV_REQUIRE(header->n_layers >= 1 && header->n_layers <= FKV_MAX_LAYERS, FKV_FILE_DAMAGED, "damaged page file: %u layers: %s",
                header->n_layers, reader->path);
    fkv_file_plan *plan = &reader->plan;
    FKV_REQUIRE(fkv_file_plan_offsets(header, header->n_pages, plan) && header->tokens_offset == plan->tokens_offset &&
                    header->index_offset == plan->index_offset && header->data_offset == plan->data_offset &&
                    plan->data_offset <= file_bytes,
                FKV_FILE_DAMAGED,
                "damaged page file: %u tokens and %" PRIu64 " pages do not agree with its offsets or its length: %s",
                header->n_tokens, header->n_pages, reader->path);
    return FKV_OK;
}

/* The digest of everything before the pages. */
static fkv_status check_digest(const page_reader *reader) {
    uint8_t digest[FKV_SHA256_BYTES];
    fkv_status status = FKV_OK;
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, &reader->header, offsetof(fkv_file_header, sha256));
    for (uint64_t at = sizeof reader->header; at < reader->header.data_offset && status == FKV_OK;) {
        const uint64_t left = reader->header.data_offset - at;
        const uint64_t n = left < reader->piece_bytes ? left : reader->piece_bytes;
        status = read_at(reader, reader->piece, n, at);
        if (status == FKV_OK) fkv_sha256_add(&sha, reader->piece, n);
        at += n;
    }
    fkv_status closed = fkv_sha256_close(&sha, digest);
    FKV_TRY(status);
    FKV_TRY(closed);
    FKV_REQUIRE(memcmp(digest, reader->header.sha256, sizeof digest) == 0, FKV_FILE_DAMAGED,
                "damaged page file: the SHA-256 of header, tokens and index does not agree: %s", reader->path);
    return FKV_OK;
}

static bool all_zero(const void *bytes, size_t n) {
    const uint8_t *at = bytes;
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++) any |= at[i];
    return any == 0;
}

static fkv_status check_zeroes(const page_reader *reader, uint64_t from, uint64_t to) {
    FKV_ASSERT(to - from <= reader->piece_bytes);
    FKV_TRY(read_at(reader, reader->piece, to - from, from));
    FKV_REQUIRE(all_zero(reader->piece, to - from), FKV_FILE_DAMAGED,
                "damaged page file: the bytes %" PRIu64 " to %" PRIu64 " are not 0: %s", from, to, reader->path);
    return FKV_OK;
}

/* Numbers whose digest is right but that no writer of this version writes. */
static fkv_status check_numbers(page_reader *reader) {
    const fkv_file_header *header = &reader->header;
    FKV_REQUIRE(header->rotate <= FKV_ROTATE_KV && (header->rotate != FKV_ROTATE_NONE || header->rotation_seed == 0),
                FKV_FILE_DAMAGED, "damaged page file: rotation %u with seed %" PRIu64 ": %s", header->rotate,
                header->rotation_seed, reader->path);
    const size_t rope_bytes = strnlen(header->rope_id, sizeof header->rope_id);
    FKV_REQUIRE(rope_bytes < sizeof header->rope_id &&
                    all_zero(header->rope_id + rope_bytes, sizeof header->rope_id - rope_bytes) &&
                    (header->version == FKV_FILE_VERSION_8 || all_zero(header->calibration, sizeof header->calibration)),
                FKV_FILE_DAMAGED, "damaged page file: bytes of the header that must be 0 are not: %s", reader->path);
    FKV_TRY(read_at(reader, reader->layers, (uint64_t)header->n_layers * header->layer_bytes, sizeof *header));
    fkv_file_layers_unpack(header->version, reader->layers, header->n_layers);
    for (uint32_t l = 0; l < header->n_layers; l++)
        FKV_REQUIRE(reader->layers[l].k.kind != FKV_CODEC_AUTO && reader->layers[l].v.kind != FKV_CODEC_AUTO, FKV_FILE_DAMAGED,
                    "damaged page file: a codec of layer %u has no kind: %s", l, reader->path);
    const uint32_t version = fkv_file_version_of(reader->layers, header->n_layers);
    if (header->version == FKV_FILE_VERSION_2 && version == FKV_FILE_VERSION_8) return refuse_old_sealed(reader);
    FKV_REQUIRE(header->version == version, FKV_FILE_DAMAGED,
                "damaged page file: version %u for layers that are written in another: %s", header->version, reader->path);
    FKV_TRY(fkv_file_plan_make(header, reader->layers, reader->path, &reader->plan));
    const fkv_file_plan *plan = &reader->plan;
    FKV_REQUIRE(header->n_groups == plan->n_groups && header->n_pages == plan->n_pages && header->file_bytes == plan->file_bytes,
                FKV_FILE_DAMAGED,
                "damaged page file: %u groups, %" PRIu64 " pages, %" PRIu64 " bytes instead of %u, %" PRIu64 ", %" PRIu64 ": %s",
                header->n_groups, header->n_pages, header->file_bytes, plan->n_groups, plan->n_pages, plan->file_bytes,
                reader->path);
    FKV_TRY(check_zeroes(reader, plan->tokens_offset + (uint64_t)header->n_tokens * sizeof(uint32_t), plan->index_offset));
    return check_zeroes(reader, plan->index_offset + plan->n_pages * sizeof(fkv_file_entry), plan->data_offset);
}

static void reader_close(const page_reader *reader) { (void)close(reader->fd); }

/* Opens and judges all but the pages and the index. Nothing is open after a failure. */
static fkv_status reader_open(page_reader *reader, const char *path, uint8_t *buffer, uint64_t buffer_bytes) {
    *reader = (page_reader){.path = path,
                            .layers = (fkv_file_layer *)(void *)buffer,
                            .entries = (fkv_file_entry *)(void *)(buffer + LAYERS_BYTES),
                            .piece = buffer + LAYERS_BYTES + INDEX_BYTES,
                            .piece_bytes = buffer_bytes - LAYERS_BYTES - INDEX_BYTES};
    /* O_NONBLOCK: the open of a pipe must not wait for its writer */
    reader->fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (reader->fd < 0) return fkv_file_os_failed("cannot open the page file", path);
    struct stat info;
    fkv_status status = FKV_OK;
    if (fstat(reader->fd, &info) != 0)
        status = fkv_file_os_failed("cannot look at the page file", path);
    else if (!S_ISREG(info.st_mode))
        status = fkv_fail(FKV_FILE_FORMAT, "not a page file, not even a regular file: %s", path);
    if (status == FKV_OK) status = read_header(reader, (uint64_t)info.st_size);
    if (status == FKV_OK) status = check_digest(reader);
    if (status == FKV_OK) status = check_numbers(reader);
    if (status != FKV_OK) reader_close(reader);
    return status;
}

/* ---- pages --------------------------------------------------------------------------------------------------- */

/* Entry `number` of the index, which must be the expected one; *crc32c is what it says of the page. */
static fkv_status check_entry(page_reader *reader, uint64_t number, const fkv_file_entry *expected, uint32_t *crc32c) {
    if (number < reader->entries_first || number >= reader->entries_end) {
        const uint64_t left = reader->plan.n_pages - number;
        const uint64_t n = left < INDEX_ENTRIES ? left : INDEX_ENTRIES;
        FKV_TRY(read_at(reader, reader->entries, n * sizeof(fkv_file_entry),
                        reader->plan.index_offset + number * sizeof(fkv_file_entry)));
        reader->entries_first = number;
        reader->entries_end = number + n;
    }
    const fkv_file_entry *entry = &reader->entries[number - reader->entries_first];
    FKV_REQUIRE(entry->group == expected->group && entry->logical == expected->logical && entry->offset == expected->offset &&
                    entry->zero == 0,
                FKV_FILE_DAMAGED,
                "damaged page file: entry %" PRIu64 " of the index is page %u of group %u at byte %" PRIu64
                " instead of page %u of group %u at byte %" PRIu64 ": %s",
                number, entry->logical, entry->group, entry->offset, expected->logical, expected->group, expected->offset,
                reader->path);
    *crc32c = entry->crc32c;
    return FKV_OK;
}

static fkv_status check_crc(const page_reader *reader, const fkv_file_entry *entry, uint32_t in_index, uint32_t of_bytes) {
    FKV_REQUIRE(in_index == of_bytes, FKV_FILE_DAMAGED,
                "damaged page file: the CRC32C of page %u of group %u is %08x instead of %08x: %s", entry->logical, entry->group,
                of_bytes, in_index, reader->path);
    return FKV_OK;
}

/* Every page against the index. */
static fkv_status verify_pages(page_reader *reader) {
    fkv_file_cursor cursor = {.offset = reader->plan.data_offset};
    fkv_file_entry entry;
    for (uint64_t number = 0; fkv_file_cursor_next(&reader->plan, &cursor, &entry); number++) {
        uint32_t in_index = 0;
        uint32_t crc = 0;
        FKV_TRY(check_entry(reader, number, &entry, &in_index));
        for (uint64_t at = entry.offset; at < cursor.offset;) {
            const uint64_t left = cursor.offset - at;
            const uint64_t n = left < reader->piece_bytes ? left : reader->piece_bytes;
            FKV_TRY(read_at(reader, reader->piece, n, at));
            crc = fkv_crc32c(crc, reader->piece, n);
            at += n;
        }
        FKV_TRY(check_crc(reader, &entry, in_index, crc));
    }
    return FKV_OK;
}

/* One page into the slab, piece by piece, so that the CRC finds the bytes in the core's cache; *crc32c is that of the bytes read.
 * Slots and gaps that no token wrote become 0, whatever the file has there. */
static fkv_status read_page(const page_reader *reader, const fkv_slab *slab, const fkv_file_entry *entry, uint32_t page,
                            uint32_t *crc32c) {
    uint64_t at = entry->offset;
    for (uint32_t l = 0; l < slab->n_layers; l++) {
        if (slab->layers[l].group != entry->group) continue;
        const uint64_t run_bytes = fkv_slab_run_bytes(slab, l);
        const uint32_t n_live = fkv_slab_live_rows(slab, l, entry->logical, reader->header.n_tokens);
        uint64_t n = 0;
        for (uint64_t from = 0; from < run_bytes; from += n, at += n) {
            n = run_bytes - from < reader->piece_bytes ? run_bytes - from : reader->piece_bytes;
            FKV_TRY(read_at(reader, reader->piece, n, at));
            *crc32c = fkv_crc32c(*crc32c, reader->piece, n);
            fkv_slab_blank(slab, l, reader->piece, from, n, n_live);
            FKV_TRY(fkv_slab_write(slab, l, page, from, n, reader->piece));
        }
    }
    return FKV_OK;
}

/* All pages into those of the sequence in `slot`, checked again: the file may have changed since it was verified. */
static fkv_status read_pages(page_reader *reader, const fkv_slab *slab, const fkv_pager *pager, uint32_t slot) {
    fkv_file_cursor cursor = {.offset = reader->plan.data_offset};
    fkv_file_entry entry;
    reader->entries_end = 0;
    for (uint64_t number = 0; fkv_file_cursor_next(&reader->plan, &cursor, &entry); number++) {
        uint32_t in_index = 0;
        uint32_t crc = 0;
        const uint32_t page = fkv_page_at(fkv_pager_view(pager, entry.group, slot), entry.logical);
        FKV_ASSERT(page != FKV_NO_PAGE);
        FKV_TRY(check_entry(reader, number, &entry, &in_index));
        FKV_TRY(read_page(reader, slab, &entry, page, &crc));
        FKV_TRY(check_crc(reader, &entry, in_index, crc));
    }
    return check_digest(reader);
}

/* ---- load ---------------------------------------------------------------------------------------------------- */

/* The prompt, where given, begins with the saved tokens. */
static fkv_status check_prompt(const page_reader *reader, const fkv_seq_config *config) {
    if (config->n_prompt == 0) return FKV_OK;
    const uint32_t n_tokens = reader->header.n_tokens;
    FKV_REQUIRE(config->prompt != NULL, FKV_BAD_ARGUMENT, "prompt is NULL and n_prompt is %u: pass the tokens, or 0: %s",
                config->n_prompt, reader->path);
    FKV_REQUIRE(config->n_prompt >= n_tokens, FKV_BAD_ARGUMENT,
                "the prompt of %u tokens is shorter than the %u saved ones it must begin with: %s", config->n_prompt, n_tokens,
                reader->path);
    const uint32_t piece_tokens = (uint32_t)(reader->piece_bytes / sizeof(uint32_t));
    for (uint32_t first = 0; first < n_tokens;) {
        const uint32_t n = fkv_min_u32(n_tokens - first, piece_tokens);
        const uint32_t *saved = (const uint32_t *)(const void *)reader->piece;
        FKV_TRY(read_at(reader, reader->piece, n * sizeof saved[0], reader->plan.tokens_offset + first * sizeof saved[0]));
        for (uint32_t i = 0; i < n; i++)
            FKV_REQUIRE(saved[i] == config->prompt[first + i], FKV_BAD_ARGUMENT,
                        "the prompt has token %u at position %u where the file has %u: %s", config->prompt[first + i], first + i,
                        saved[i], reader->path);
        first += n;
    }
    return FKV_OK;
}

static fkv_status load(page_reader *reader, const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                       const fkv_seq_config *config, fkv_seq *seq) {
    const uint32_t n_tokens = reader->header.n_tokens;
    FKV_TRY(fkv_file_identity_check(identity, &reader->header, reader->layers, reader->path));
    FKV_REQUIRE(config->max_tokens >= n_tokens, FKV_SEQ_FULL, "max_tokens is %u and the file has %u tokens: %s",
                config->max_tokens, n_tokens, reader->path);
    FKV_TRY(check_prompt(reader, config));
    FKV_TRY(verify_pages(reader));

    /* no prompt: the pages come from the file, not from the prefix tree */
    const fkv_seq_config empty = {.max_tokens = config->max_tokens, .tenant = config->tenant};
    fkv_seq opened = 0;
    uint32_t slot = 0;
    FKV_TRY(fkv_pager_open(pager, &empty, &opened, NULL));
    fkv_status status = fkv_pager_slot(pager, opened, &slot);
    if (status == FKV_OK && n_tokens > 0) status = fkv_pager_fill(pager, opened, n_tokens);
    if (status == FKV_OK) status = read_pages(reader, slab, pager, slot);
    if (status != FKV_OK)
        (void)fkv_pager_close(pager, opened);
    else
        *seq = opened;
    return status;
}

fkv_status fkv_page_file_load(const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                              const fkv_seq_config *config, const char *path, uint8_t *buffer, fkv_seq *seq) {
    FKV_REQUIRE(path != NULL && config != NULL && seq != NULL, FKV_BAD_ARGUMENT,
                "a page file is loaded with a config, from a path, into a sequence: none of them may be NULL");
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, FKV_FILE_BUFFER_BYTES));
    fkv_status status = load(&reader, identity, slab, pager, config, seq);
    reader_close(&reader);
    return status;
}

/* ---- looking without a cache --------------------------------------------------------------------------------- */

fkv_status fkv_file_inspect(const char *path, bool verify, fkv_file_info *info) {
    FKV_REQUIRE(path != NULL && info != NULL, FKV_BAD_ARGUMENT, "fkv_file_inspect() needs a path and an info to fill in");
    alignas(64) uint8_t buffer[LOOK_BUFFER_BYTES] = {0};
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, sizeof buffer));
    fkv_status status = verify ? verify_pages(&reader) : FKV_OK;
    reader_close(&reader);
    FKV_TRY(status);
    const fkv_file_header *header = &reader.header;
    const fkv_file_layer *layer = &reader.layers[0];
    *info = (fkv_file_info){
        .version = header->version,
        .n_layers = header->n_layers,
        .n_tokens = header->n_tokens,
        .page_tokens = header->page_tokens,
        .page_type = (fkv_type)header->page_type,
        .rotate = (fkv_rotate)header->rotate,
        .rotation_seed = header->rotation_seed,
        .n_pages = header->n_pages,
        .file_bytes = header->file_bytes,
        .first_layer = {.n_kv_heads = layer->n_kv_heads,
                        .head_dim = layer->head_dim,
                        .window = layer->window,
                        .n_sinks = layer->n_sinks,
                        .k = fkv_file_codec(layer->k),
                        .v = fkv_file_codec(layer->v)},
    };
    memcpy(info->weights_id, header->weights_id, sizeof info->weights_id);
    memcpy(info->rope_id, header->rope_id, sizeof info->rope_id);
    return FKV_OK;
}

fkv_status fkv_file_tokens(const char *path, uint32_t *tokens, uint32_t capacity, uint32_t *n_tokens) {
    FKV_REQUIRE(path != NULL && n_tokens != NULL && (tokens != NULL || capacity == 0), FKV_BAD_ARGUMENT,
                "fkv_file_tokens() needs a path, room for the tokens and for their number");
    alignas(64) uint8_t buffer[LOOK_BUFFER_BYTES];
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, sizeof buffer));
    const uint32_t n = fkv_min_u32(capacity, reader.header.n_tokens);
    fkv_status status = read_at(&reader, tokens, (uint64_t)n * sizeof tokens[0], reader.plan.tokens_offset);
    reader_close(&reader);
    FKV_TRY(status);
    *n_tokens = reader.header.n_tokens;
    return FKV_OK;
}
