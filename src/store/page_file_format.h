/* On-disk structures of a page file, and the functions that compute its layout. docs/page_format.md is the bit-exact
 * specification.
 *
 *   header | layers | tokens | padding | index | padding | pages
 *
 * The position and size of every part follow from the counts in the header and from the layer records. fkv_file_plan_make()
 * computes these positions and sizes. The writer stores the computed values, and the reader rejects a file whose stored values
 * differ from them. Offsets and sizes read from a file have no other use. These functions open no files and allocate no memory.
 */
#ifndef FKV_PAGE_FILE_FORMAT_H
#define FKV_PAGE_FILE_FORMAT_H

#include "../base/checksum.h"
#include "page_file.h"

#include <stddef.h>

enum {
    FKV_FILE_FORMAT_VERSION = 1,
    FKV_FILE_MAGIC_BYTES = 8,
    FKV_FILE_DATA_ALIGN = 4096, /* alignment of the first page, so that readers can map it */
    FKV_FILE_INDEX_ALIGN = 8,
    FKV_FILE_CALL_BYTES = 1 << 30 /* maximum size of one read or write, in bytes; Apple systems reject sizes of 2^31 and more */
};

/* The magic contains a byte with the high bit set, both kinds of line endings and an end-of-file character. A text-mode transfer
 * would change these bytes and is therefore detected. */
#define FKV_FILE_MAGIC                                                                                                           \
    "\x89"                                                                                                                       \
    "FKV\r\n\x1a\n"

typedef struct fkv_file_header {
    uint8_t magic[FKV_FILE_MAGIC_BYTES];
    uint32_t version;
    uint32_t header_bytes; /* 288 */
    uint32_t layer_bytes;  /* 48 */
    uint32_t entry_bytes;  /* 24 */
    uint64_t file_bytes;
    uint64_t tokens_offset;
    uint64_t index_offset;
    uint64_t data_offset;
    uint64_t n_pages;
    uint32_t n_tokens;
    uint32_t n_layers;
    uint32_t n_groups;
    uint32_t page_tokens;
    uint32_t page_type;     /* fkv_type */
    uint32_t rotate;        /* fkv_rotate */
    uint64_t rotation_seed; /* 0 if rotate is FKV_ROTATE_NONE */
    uint8_t weights_id[32];
    char rope_id[64];                      /* null-terminated and zero-padded */
    uint8_t calibration[FKV_SHA256_BYTES]; /* see fkv_file_identity; 0 if no layer is calibrated */
    char numerics[32];                     /* null-terminated and zero-padded */
    uint8_t sha256[FKV_SHA256_BYTES];      /* digest of the bytes [0, data_offset), excluding this field */
} fkv_file_header;

/* Index entry of one page. */
typedef struct fkv_file_entry {
    uint32_t group;
    uint32_t logical; /* logical page number within the sequence */
    uint64_t offset;  /* byte offset in the file */
    uint32_t crc32c;
    uint32_t zero;
} fkv_file_entry;

_Static_assert(sizeof(fkv_file_header) == 288 && offsetof(fkv_file_header, sha256) == 256, "the header is 288 bytes");
_Static_assert(offsetof(fkv_file_header, file_bytes) == 24 && offsetof(fkv_file_header, n_tokens) == 64, "no padding");
_Static_assert(offsetof(fkv_file_header, rotation_seed) == 88 && offsetof(fkv_file_header, rope_id) == 128, "no padding");
_Static_assert(sizeof(fkv_file_layer) == 48 && offsetof(fkv_file_layer, v) == 28, "a layer record is twelve 32-bit integers");
_Static_assert(sizeof(fkv_file_entry) == 24 && offsetof(fkv_file_entry, crc32c) == 16, "an index entry is 24 bytes");

/* Pages of one group in a file: logical pages [0, n_front) and [first, end), where n_front <= first. */
typedef struct fkv_file_group {
    bool is_state; /* true for the group of all state layers, which has a single page: the state after the last token */
    uint32_t window;
    uint32_t n_sinks;
    uint32_t span; /* pages per span, at least 1; the first page of the window is rounded down to a multiple of this number */
    uint32_t n_front;
    uint32_t first;
    uint32_t end;
    uint64_t page_bytes; /* size of one page, summed over the layers of the group */
} fkv_file_group;

/* Layout of a file. */
typedef struct fkv_file_plan {
    uint32_t n_groups;
    fkv_file_group groups[FKV_MAX_GROUPS];
    uint8_t layer_group[FKV_MAX_LAYERS];
    uint64_t tokens_offset;
    uint64_t index_offset;
    uint64_t data_offset;
    uint64_t n_pages;
    uint64_t file_bytes;
} fkv_file_plan;

/* Computes the layout of a file from n_tokens, page_tokens, page_type and n_layers (<= FKV_MAX_LAYERS) of the header and from the
 * layer records. layers: [n_layers]. Returns FKV_FILE_DAMAGED, with path in the message, if a value is invalid or the file would
 * be too large. */
fkv_status fkv_file_plan_make(const fkv_file_header *header, const fkv_file_layer *layers, const char *path, fkv_file_plan *plan);

/* Computes tokens_offset, index_offset and data_offset from n_layers and n_tokens of the header and from n_pages. Returns false
 * if an offset does not fit in 63 bits, the limit on file sizes. */
bool fkv_file_plan_offsets(const fkv_file_header *header, uint64_t n_pages, fkv_file_plan *plan);

/* Iterator over the pages in index order (by group, then by logical page). Initialize it to {.offset = data_offset}. */
typedef struct fkv_file_cursor {
    uint32_t group;
    uint32_t logical;
    uint64_t offset;
} fkv_file_cursor;

/* Advances to the next page and fills in *entry, except for crc32c, which is set to 0. Returns false after the last page. */
bool fkv_file_cursor_next(const fkv_file_plan *plan, fkv_file_cursor *cursor, fkv_file_entry *entry);

/* Initializes a header and the layer records from the identity, in canonical form. Sets n_layers. Sets all other counts, all
 * offsets and the file size to 0. layers: [n_layers], output. */
void fkv_file_identity_write(const fkv_file_identity *identity, fkv_file_header *header, fkv_file_layer *layers);

/* Returns FKV_FILE_FOREIGN if the identity of the file differs from `identity`. The message contains the first differing field
 * and both values. layers: the layer records of the file. */
fkv_status fkv_file_identity_check(const fkv_file_identity *identity, const fkv_file_header *header, const fkv_file_layer *layers,
                                   const char *path);

/* Returns FKV_IO, with the error text of errno in the message. what: the failed operation, such as "cannot open the page
 * file". */
fkv_status fkv_file_os_failed(const char *what, const char *path);

#endif
