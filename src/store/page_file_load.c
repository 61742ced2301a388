/* Reading page files: validation, loading into pages, and the public functions that need no cache.
 *
 * A file is checked in the following order, so that each check can rely on the previous ones. If a check fails, the status in
 * parentheses is returned.
 *   1. The file is a regular file with the magic of a page file (FKV_FILE_FORMAT).
 *   2. The version is supported (FKV_FILE_VERSION).
 *   3. Sizes and offsets match the length of the file; digest, header fields, layer fields and padding are valid
 *      (FKV_FILE_DAMAGED).
 *   4. The identity matches the cache (FKV_FILE_FOREIGN).
 *   5. The index and the CRC32C of every page are correct (FKV_FILE_DAMAGED).
 *
 * All data is read into one fixed-size buffer: layers | part of the index | chunk of the file.
 */
#include "page_file_format.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LAYERS_BYTES = FKV_MAX_LAYERS * (int)sizeof(fkv_file_layer),
    INDEX_ENTRIES = 340, /* number of index entries in one read */
    INDEX_BYTES = 8 * 1024,
    INSPECT_BUFFER_BYTES = 64 * 1024 /* size of the stack buffer in functions that are called without a cache */
};
_Static_assert(INDEX_ENTRIES * sizeof(fkv_file_entry) <= INDEX_BYTES, "INDEX_BYTES holds INDEX_ENTRIES entries");
_Static_assert(LAYERS_BYTES + INDEX_BYTES + FKV_FILE_DATA_ALIGN <= INSPECT_BUFFER_BYTES, "the padding fits in one chunk");

typedef struct page_reader {
    const char *path;
    int fd;
    fkv_file_header header;
    fkv_file_plan plan;
    fkv_file_layer *layers;  /* [FKV_MAX_LAYERS] */
    fkv_file_entry *entries; /* [INDEX_ENTRIES] buffer that holds entries [entries_first, entries_end) of the index */
    uint64_t entries_first;
    uint64_t entries_end;
    uint8_t *chunk;
    uint64_t chunk_bytes;
} page_reader;

/* ---- validation ---------------------------------------------------------------------------------------------- */

static fkv_status read_at(const page_reader *reader, void *bytes, uint64_t n, uint64_t offset) {
    uint8_t *to = bytes;
    while (n > 0) {
        ssize_t done = pread(reader->fd, to, n < FKV_FILE_CALL_BYTES ? n : FKV_FILE_CALL_BYTES, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return fkv_file_os_failed("cannot read the page file", reader->path);
        FKV_REQUIRE(done > 0, FKV_FILE_DAMAGED, "%s: damaged page file: truncated to %llu bytes while it was being read",
                    reader->path, (unsigned long long)offset);
        to += done;
        offset += (uint64_t)done;
        n -= (uint64_t)done;
    }
    return FKV_OK;
}

/* Reads the header and checks the magic, the version, and all sizes and offsets that can be checked against the file's length. */
static fkv_status read_header(page_reader *reader, uint64_t file_bytes) {
    fkv_file_header *header = &reader->header;
    const uint64_t n = file_bytes < sizeof *header ? file_bytes : sizeof *header;
    FKV_TRY(read_at(reader, header, n, 0));
    FKV_REQUIRE(n >= sizeof header->magic && memcmp(header->magic, FKV_FILE_MAGIC, sizeof header->magic) == 0, FKV_FILE_FORMAT,
                "%s: not a page file", reader->path);
    FKV_REQUIRE(n >= offsetof(fkv_file_header, header_bytes), FKV_FILE_DAMAGED, "%s: damaged page file: truncated to %llu bytes",
                reader->path, (unsigned long long)file_bytes);
    FKV_REQUIRE(header->version == FKV_FILE_FORMAT_VERSION, FKV_FILE_VERSION,
                "%s: page-file version %u is not supported (this library reads version %d)", reader->path, header->version,
                FKV_FILE_FORMAT_VERSION);
    FKV_REQUIRE(n == sizeof *header, FKV_FILE_DAMAGED, "%s: damaged page file: truncated to %llu bytes", reader->path,
                (unsigned long long)file_bytes);
    FKV_REQUIRE(header->file_bytes == file_bytes, FKV_FILE_DAMAGED,
                "%s: damaged page file: its size is %llu bytes (expected %llu)", reader->path, (unsigned long long)file_bytes,
                (unsigned long long)header->file_bytes);
    FKV_REQUIRE(
        header->header_bytes == sizeof(fkv_file_header) && header->layer_bytes == sizeof(fkv_file_layer) &&
            header->entry_bytes == sizeof(fkv_file_entry),
        FKV_FILE_DAMAGED,
        "%s: damaged page file: it declares header, layer and index records of %u, %u and %u bytes (expected %zu, %zu and %zu)",
        reader->path, header->header_bytes, header->layer_bytes, header->entry_bytes, sizeof(fkv_file_header),
        sizeof(fkv_file_layer), sizeof(fkv_file_entry));
    FKV_REQUIRE(header->n_layers >= 1 && header->n_layers <= FKV_MAX_LAYERS, FKV_FILE_DAMAGED,
                "%s: damaged page file: n_layers is %u (expected 1 to %d)", reader->path, header->n_layers, FKV_MAX_LAYERS);
    fkv_file_plan *plan = &reader->plan;
    FKV_REQUIRE(fkv_file_plan_offsets(header, header->n_pages, plan) && header->tokens_offset == plan->tokens_offset &&
                    header->index_offset == plan->index_offset && header->data_offset == plan->data_offset &&
                    plan->data_offset <= file_bytes,
                FKV_FILE_DAMAGED, "%s: damaged page file: its offsets or its size are wrong for %u tokens and %llu pages",
                reader->path, header->n_tokens, (unsigned long long)header->n_pages);
    return FKV_OK;
}

/* Verifies the SHA-256 digest of all bytes that precede the pages. */
static fkv_status check_digest(const page_reader *reader) {
    uint8_t digest[FKV_SHA256_BYTES];
    fkv_status status = FKV_OK;
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, &reader->header, offsetof(fkv_file_header, sha256));
    for (uint64_t at = sizeof reader->header; at < reader->header.data_offset && status == FKV_OK;) {
        const uint64_t left = reader->header.data_offset - at;
        const uint64_t n = left < reader->chunk_bytes ? left : reader->chunk_bytes;
        status = read_at(reader, reader->chunk, n, at);
        if (status == FKV_OK) fkv_sha256_add(&sha, reader->chunk, n);
        at += n;
    }
    fkv_status closed = fkv_sha256_close(&sha, digest);
    FKV_TRY(status);
    FKV_TRY(closed);
    FKV_REQUIRE(memcmp(digest, reader->header.sha256, sizeof digest) == 0, FKV_FILE_DAMAGED,
                "%s: damaged page file: SHA-256 mismatch in the header, layers, tokens or index", reader->path);
    return FKV_OK;
}

static bool all_zero(const void *bytes, size_t n) {
    const uint8_t *at = bytes;
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++) any |= at[i];
    return any == 0;
}

/* Returns whether a text field of n bytes is null-terminated and padded with zeros. */
static bool is_padded_text(const char *text, size_t n) {
    const size_t length = strnlen(text, n);
    return length < n && all_zero(text + length, n - length);
}

static fkv_status check_padding(const page_reader *reader, uint64_t from, uint64_t to) {
    FKV_ASSERT(to - from <= reader->chunk_bytes);
    FKV_TRY(read_at(reader, reader->chunk, to - from, from));
    FKV_REQUIRE(all_zero(reader->chunk, to - from), FKV_FILE_DAMAGED,
                "%s: damaged page file: some padding bytes between offsets %llu and %llu are not 0", reader->path,
                (unsigned long long)from, (unsigned long long)to);
    return FKV_OK;
}

/* Returns true if at least one layer is calibrated, or if the calibration hash is 0. */
static bool calibration_is_valid(const page_reader *reader) {
    for (uint32_t l = 0; l < reader->header.n_layers; l++)
        if (reader->layers[l].k.kind == FKV_CODEC_CALIBRATED) return true;
    return all_zero(reader->header.calibration, sizeof reader->header.calibration);
}

/* Checks all fields of the header and the layers, and the padding. A correct digest does not imply that the values are valid. */
static fkv_status check_fields(page_reader *reader) {
    const fkv_file_header *header = &reader->header;
    FKV_REQUIRE(header->rotate <= FKV_ROTATE_KV && (header->rotate != FKV_ROTATE_NONE || header->rotation_seed == 0),
                FKV_FILE_DAMAGED,
                "%s: damaged page file: rotate is %u and rotation_seed is %llu, which is not a valid combination", reader->path,
                header->rotate, (unsigned long long)header->rotation_seed);
    FKV_REQUIRE(is_padded_text(header->rope_id, sizeof header->rope_id), FKV_FILE_DAMAGED,
                "%s: damaged page file: rope_id is not null-terminated and zero-padded", reader->path);
    FKV_REQUIRE(is_padded_text(header->numerics, sizeof header->numerics), FKV_FILE_DAMAGED,
                "%s: damaged page file: numerics is not null-terminated and zero-padded", reader->path);
    FKV_TRY(read_at(reader, reader->layers, (uint64_t)header->n_layers * header->layer_bytes, sizeof *header));
    for (uint32_t l = 0; l < header->n_layers; l++)
        FKV_REQUIRE(reader->layers[l].state_bytes != 0 ||
                        (reader->layers[l].k.kind != FKV_CODEC_AUTO && reader->layers[l].v.kind != FKV_CODEC_AUTO),
                    FKV_FILE_DAMAGED, "%s: damaged page file: a codec of layer %u has kind 0", reader->path, l);
    FKV_REQUIRE(calibration_is_valid(reader), FKV_FILE_DAMAGED,
                "%s: damaged page file: calibration is not 0, although no layer is calibrated", reader->path);
    FKV_TRY(fkv_file_plan_make(header, reader->layers, reader->path, &reader->plan));
    const fkv_file_plan *plan = &reader->plan;
    FKV_REQUIRE(header->n_groups == plan->n_groups && header->n_pages == plan->n_pages && header->file_bytes == plan->file_bytes,
                FKV_FILE_DAMAGED,
                "%s: damaged page file: the header states %u groups, %llu pages and %llu bytes (expected %u, %llu and %llu)",
                reader->path, header->n_groups, (unsigned long long)header->n_pages, (unsigned long long)header->file_bytes,
                plan->n_groups, (unsigned long long)plan->n_pages, (unsigned long long)plan->file_bytes);
    FKV_TRY(check_padding(reader, plan->tokens_offset + (uint64_t)header->n_tokens * sizeof(uint32_t), plan->index_offset));
    return check_padding(reader, plan->index_offset + plan->n_pages * sizeof(fkv_file_entry), plan->data_offset);
}

static void reader_close(const page_reader *reader) { (void)close(reader->fd); }

/* Opens a file and checks everything except the index and the pages. Closes the file on failure. */
static fkv_status reader_open(page_reader *reader, const char *path, uint8_t *buffer, uint64_t buffer_bytes) {
    *reader = (page_reader){.path = path,
                            .layers = (fkv_file_layer *)(void *)buffer,
                            .entries = (fkv_file_entry *)(void *)(buffer + LAYERS_BYTES),
                            .chunk = buffer + LAYERS_BYTES + INDEX_BYTES,
                            .chunk_bytes = buffer_bytes - LAYERS_BYTES - INDEX_BYTES};
    /* O_NONBLOCK: if the path is a named pipe, open() must not wait for a writer */
    reader->fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (reader->fd < 0) return fkv_file_os_failed("cannot open the page file", path);
    struct stat info;
    fkv_status status = FKV_OK;
    if (fstat(reader->fd, &info) != 0)
        status = fkv_file_os_failed("cannot stat the page file", path);
    else if (!S_ISREG(info.st_mode))
        status = fkv_fail(FKV_FILE_FORMAT, "%s: not a page file, because it is not a regular file", path);
    if (status == FKV_OK) status = read_header(reader, (uint64_t)info.st_size);
    if (status == FKV_OK) status = check_digest(reader);
    if (status == FKV_OK) status = check_fields(reader);
    if (status != FKV_OK) reader_close(reader);
    return status;
}

/* ---- pages --------------------------------------------------------------------------------------------------- */

/* Checks that index entry `number` equals the expected entry, and stores its checksum in *crc32c. */
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
    FKV_REQUIRE(
        entry->group == expected->group && entry->logical == expected->logical && entry->offset == expected->offset &&
            entry->zero == 0,
        FKV_FILE_DAMAGED,
        "%s: damaged page file: index entry %llu is page %u of group %u at byte %llu (expected page %u of group %u at byte %llu)",
        reader->path, (unsigned long long)number, entry->logical, entry->group, (unsigned long long)entry->offset,
        expected->logical, expected->group, (unsigned long long)expected->offset);
    *crc32c = entry->crc32c;
    return FKV_OK;
}

static fkv_status check_crc(const page_reader *reader, const fkv_file_entry *entry, uint32_t in_index, uint32_t of_bytes) {
    FKV_REQUIRE(in_index == of_bytes, FKV_FILE_DAMAGED,
                "%s: damaged page file: CRC32C of page %u of group %u is %08x (expected %08x)", reader->path, entry->logical,
                entry->group, of_bytes, in_index);
    return FKV_OK;
}

/* Checks the index and the checksum of every page. */
static fkv_status verify_pages(page_reader *reader) {
    fkv_file_cursor cursor = {.offset = reader->plan.data_offset};
    fkv_file_entry entry;
    for (uint64_t number = 0; fkv_file_cursor_next(&reader->plan, &cursor, &entry); number++) {
        uint32_t in_index = 0;
        uint32_t crc = 0;
        FKV_TRY(check_entry(reader, number, &entry, &in_index));
        for (uint64_t at = entry.offset; at < cursor.offset;) {
            const uint64_t left = cursor.offset - at;
            const uint64_t n = left < reader->chunk_bytes ? left : reader->chunk_bytes;
            FKV_TRY(read_at(reader, reader->chunk, n, at));
            crc = fkv_crc32c(crc, reader->chunk, n);
            at += n;
        }
        FKV_TRY(check_crc(reader, &entry, in_index, crc));
    }
    return FKV_OK;
}

/* Reads one page into the slab in chunks, so that the CRC is computed while the bytes are in the CPU cache. *crc32c receives the
 * checksum of the bytes read. Sets unwritten slots and padding to 0, regardless of the contents of the file. */
static fkv_status read_page(const page_reader *reader, const fkv_slab *slab, const fkv_file_entry *entry, uint32_t page,
                            uint32_t *crc32c) {
    uint64_t at = entry->offset;
    for (uint32_t l = 0; l < slab->n_layers; l++) {
        if (slab->layers[l].group != entry->group) continue;
        const uint64_t run_bytes = fkv_slab_run_bytes(slab, l);
        const uint32_t n_live = fkv_slab_live_rows(slab, l, entry->logical, reader->header.n_tokens);
        uint64_t n = 0;
        for (uint64_t from = 0; from < run_bytes; from += n, at += n) {
            n = run_bytes - from < reader->chunk_bytes ? run_bytes - from : reader->chunk_bytes;
            FKV_TRY(read_at(reader, reader->chunk, n, at));
            *crc32c = fkv_crc32c(*crc32c, reader->chunk, n);
            fkv_slab_blank(slab, l, reader->chunk, from, n, n_live);
            FKV_TRY(fkv_slab_write(slab, l, page, from, n, reader->chunk));
        }
    }
    return FKV_OK;
}

/* Reads all pages of the sequence in `slot` and checks them again, because the file may have changed since it was verified. */
static fkv_status read_file_pages(page_reader *reader, const fkv_slab *slab, const fkv_pager *pager, uint32_t slot) {
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

/* Checks that the prompt, if given, begins with the saved tokens. */
static fkv_status check_saved_prompt(const page_reader *reader, const fkv_seq_config *config) {
    if (config->n_prompt == 0) return FKV_OK;
    const uint32_t n_tokens = reader->header.n_tokens;
    FKV_REQUIRE(config->prompt != NULL, FKV_BAD_ARGUMENT,
                "%s: prompt is NULL but n_prompt is %u; pass the tokens, or set n_prompt to 0", reader->path, config->n_prompt);
    FKV_REQUIRE(config->n_prompt >= n_tokens, FKV_BAD_ARGUMENT,
                "%s: the prompt has %u tokens but must begin with the %u saved tokens", reader->path, config->n_prompt, n_tokens);
    const uint32_t chunk_tokens = (uint32_t)(reader->chunk_bytes / sizeof(uint32_t));
    for (uint32_t first = 0; first < n_tokens;) {
        const uint32_t n = fkv_min_u32(n_tokens - first, chunk_tokens);
        const uint32_t *saved = (const uint32_t *)(const void *)reader->chunk;
        FKV_TRY(read_at(reader, reader->chunk, n * sizeof saved[0], reader->plan.tokens_offset + first * sizeof saved[0]));
        for (uint32_t i = 0; i < n; i++)
            FKV_REQUIRE(saved[i] == config->prompt[first + i], FKV_BAD_ARGUMENT,
                        "%s: the prompt has token %u at position %u but the file has token %u", reader->path,
                        config->prompt[first + i], first + i, saved[i]);
        first += n;
    }
    return FKV_OK;
}

/* Loads an open file: checks its identity, the prompt and all pages, then opens a sequence and reads its pages. */
static fkv_status load_sequence(page_reader *reader, const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                                const fkv_seq_config *config, fkv_seq *seq) {
    const uint32_t n_tokens = reader->header.n_tokens;
    FKV_TRY(fkv_file_identity_check(identity, &reader->header, reader->layers, reader->path));
    FKV_REQUIRE(config->max_tokens >= n_tokens, FKV_SEQ_FULL, "%s: max_tokens is %u but the file has %u tokens; raise max_tokens",
                reader->path, config->max_tokens, n_tokens);
    FKV_TRY(check_saved_prompt(reader, config));
    FKV_TRY(verify_pages(reader));

    /* the sequence is opened without a prompt, so that all pages come from the file and none from the prefix tree */
    const fkv_seq_config empty = {.max_tokens = config->max_tokens, .tenant = config->tenant};
    fkv_seq opened = 0;
    uint32_t slot = 0;
    FKV_TRY(fkv_pager_open(pager, &empty, &opened, NULL));
    fkv_status status = fkv_pager_slot(pager, opened, &slot);
    if (status == FKV_OK && n_tokens > 0) status = fkv_pager_fill(pager, opened, n_tokens);
    if (status == FKV_OK) status = read_file_pages(reader, slab, pager, slot);
    if (status != FKV_OK)
        (void)fkv_pager_close(pager, opened);
    else
        *seq = opened;
    return status;
}

fkv_status fkv_page_file_load(const fkv_file_identity *identity, const fkv_slab *slab, fkv_pager *pager,
                              const fkv_seq_config *config, const char *path, uint8_t *buffer, fkv_seq *seq) {
    FKV_REQUIRE(path != NULL && config != NULL && seq != NULL, FKV_BAD_ARGUMENT, "fkv_seq_load: config, path or seq is NULL");
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, FKV_FILE_BUFFER_BYTES));
    fkv_status status = load_sequence(&reader, identity, slab, pager, config, seq);
    reader_close(&reader);
    return status;
}

/* ---- inspection without a cache ------------------------------------------------------------------------------ */

fkv_status fkv_file_inspect(const char *path, bool verify, fkv_file_info *info) {
    FKV_REQUIRE(path != NULL && info != NULL, FKV_BAD_ARGUMENT, "fkv_file_inspect: path or info is NULL");
    alignas(64) uint8_t buffer[INSPECT_BUFFER_BYTES] = {0};
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, sizeof buffer));
    fkv_status status = verify ? verify_pages(&reader) : FKV_OK;
    reader_close(&reader);
    FKV_TRY(status);
    const fkv_file_header *header = &reader.header;
    const fkv_file_layer *layer = &reader.layers[0]; /* the first layer with keys and values, if there is one */
    while (layer->state_bytes != 0 && layer + 1 < reader.layers + header->n_layers) layer++;
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
                        .rope_dim = layer->rope_dim,
                        .k = fkv_file_codec(layer->k),
                        .v = fkv_file_codec(layer->v)},
    };
    memcpy(info->weights_id, header->weights_id, sizeof info->weights_id);
    memcpy(info->rope_id, header->rope_id, sizeof info->rope_id);
    memcpy(info->numerics, header->numerics, sizeof info->numerics);
    return FKV_OK;
}

fkv_status fkv_file_tokens(const char *path, uint32_t *tokens, uint32_t capacity, uint32_t *n_tokens) {
    FKV_REQUIRE(path != NULL && n_tokens != NULL && (tokens != NULL || capacity == 0), FKV_BAD_ARGUMENT,
                "fkv_file_tokens: path, tokens or n_tokens is NULL");
    alignas(64) uint8_t buffer[INSPECT_BUFFER_BYTES];
    page_reader reader;
    FKV_TRY(reader_open(&reader, path, buffer, sizeof buffer));
    const uint32_t n = fkv_min_u32(capacity, reader.header.n_tokens);
    fkv_status status = read_at(&reader, tokens, (uint64_t)n * sizeof tokens[0], reader.plan.tokens_offset);
    reader_close(&reader);
    FKV_TRY(status);
    *n_tokens = reader.header.n_tokens;
    return FKV_OK;
}
