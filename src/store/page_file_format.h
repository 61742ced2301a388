/* The bytes of a page file before its pages, and where everything in it lies. docs/page_format.md is the bit-exact truth.
 *
 *   header | layers | tokens | 0.. | index | 0.. | pages
 *
 * Everything but the pages is a function of the header's counts and the layers: fkv_file_plan_make() computes it, the writer
 * writes it, and the reader refuses a file that says anything else. So no offset or count of a file is ever followed; it is only
 * compared. Owns no file and takes no memory.
 */
#ifndef FKV_PAGE_FILE_FORMAT_H
#define FKV_PAGE_FILE_FORMAT_H

#include "../base/checksum.h"
#include "page_file.h"

#include <stddef.h>

enum {
    FKV_FILE_VERSION_1 = 1, /* written where the bits of every codec tell its kind */
    FKV_FILE_VERSION_2 = 2, /* layer records name the kinds. No bit flipped makes a version of another */
    FKV_FILE_VERSION_4 = 4, /* not read any more; so is 2 with sealed layers: their queries saw other pages open */
    FKV_FILE_VERSION_8 = 8, /* sealed layers; the header has the hash of the bits of calibrated ones */
    FKV_FILE_LAYER_BYTES_1 = 32,
    FKV_FILE_MAGIC_BYTES = 8,
    FKV_FILE_DATA_ALIGN = 4096, /* of the first page, so that a reader may map it */
    FKV_FILE_INDEX_ALIGN = 8,
    FKV_FILE_CALL_BYTES = 1 << 30 /* read or written by one system call; Apple's refuse 2^31 */
};

/* High bit, line ends of two systems and an end-of-file: a transfer that treats the file as text spoils the first bytes. */
#define FKV_FILE_MAGIC                                                                                                           \
    "\x89"                                                                                                                       \
    "FKV\r\n\x1a\n"

typedef struct fkv_file_header {
    uint8_t magic[FKV_FILE_MAGIC_BYTES];
    uint32_t version;
    uint32_t header_bytes; /* 256 */
    uint32_t layer_bytes;  /* 48; 32 in version 1 */
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
    uint64_t rotation_seed; /* 0 where nothing is rotated */
    uint8_t weights_id[32];
    char rope_id[64];                      /* 0-terminated, 0-filled */
    uint8_t calibration[FKV_SHA256_BYTES]; /* fkv_file_identity; 0 before version 8 */
    uint8_t sha256[FKV_SHA256_BYTES];      /* of the bytes [0, data_offset) without these 32 */
} fkv_file_header;

/* One page of the index. */
typedef struct fkv_file_entry {
    uint32_t group;
    uint32_t logical; /* page of the sequence */
    uint64_t offset;  /* in the file */
    uint32_t crc32c;
    uint32_t zero;
} fkv_file_entry;

_Static_assert(sizeof(fkv_file_header) == 256 && offsetof(fkv_file_header, sha256) == 224, "the header is 256 bytes");
_Static_assert(offsetof(fkv_file_header, file_bytes) == 24 && offsetof(fkv_file_header, n_tokens) == 64, "no padding");
_Static_assert(offsetof(fkv_file_header, rotation_seed) == 88 && offsetof(fkv_file_header, rope_id) == 128, "no padding");
_Static_assert(sizeof(fkv_file_layer) == 48 && offsetof(fkv_file_layer, v) == 28, "a layer record is twelve 32-bit numbers");
_Static_assert(sizeof(fkv_file_entry) == 24 && offsetof(fkv_file_entry, crc32c) == 16, "an index entry is 24 bytes");

/* The pages of one group in a file: logical pages [0, n_front) and [first, end), n_front <= first. */
typedef struct fkv_file_group {
    uint32_t window;
    uint32_t n_sinks;
    uint32_t span; /* pages, at least 1: the first one seen is a multiple of it */
    uint32_t n_front;
    uint32_t first;
    uint32_t end;
    uint64_t page_bytes; /* of all layers of the group */
} fkv_file_group;

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

/* Where a file of these counts (n_tokens, page_tokens, page_type, n_layers <= FKV_MAX_LAYERS of the header) and layers has
 * everything. layers: [n_layers]. FKV_FILE_DAMAGED, with path in the message, for anything that cannot be. */
fkv_status fkv_file_plan_make(const fkv_file_header *header, const fkv_file_layer *layers, const char *path, fkv_file_plan *plan);

/* Offsets that follow from layer_bytes, n_layers, n_tokens and n_pages of a header. False if they do not fit 63 bits, what a file
 * can have. */
bool fkv_file_plan_offsets(const fkv_file_header *header, uint64_t n_pages, fkv_file_plan *plan);

/* Bytes of a layer record of a version, 0 for one that is not known. */
uint32_t fkv_file_layer_bytes(uint32_t version);

/* The layer records of a version out of those of version 2 and back, in place. layers: [n_layers] */
void fkv_file_layers_pack(uint32_t version, fkv_file_layer *layers, uint32_t n_layers);
void fkv_file_layers_unpack(uint32_t version, fkv_file_layer *layers, uint32_t n_layers);

/* The version in which these layers are written: the first that can. FKV_CODEC_AUTO counts as the kind that it means. */
uint32_t fkv_file_version_of(const fkv_file_layer *layers, uint32_t n_layers);

/* Walks the pages in the order of the index: group by group, logical pages upwards. Start from {.offset = data_offset}. */
typedef struct fkv_file_cursor {
    uint32_t group;
    uint32_t logical;
    uint64_t offset;
} fkv_file_cursor;

/* False after the last page. *entry is the page at hand, crc32c 0. */
bool fkv_file_cursor_next(const fkv_file_plan *plan, fkv_file_cursor *cursor, fkv_file_entry *entry);

/* Everything of a header that the identity says, 16-bit sides and absent rotation in their one canonical form; sizes, counts and
 * offsets are left 0. layers: [n_layers] out. */
void fkv_file_identity_write(const fkv_file_identity *identity, fkv_file_header *header, fkv_file_layer *layers);

/* FKV_FILE_FOREIGN, with the first field that differs and both its values, if the file is not of this identity. layers: of the
 * file. */
fkv_status fkv_file_identity_check(const fkv_file_identity *identity, const fkv_file_header *header, const fkv_file_layer *layers,
                                   const char *path);

/* FKV_IO with errno's words. what: "cannot open". */
fkv_status fkv_file_os_failed(const char *what, const char *path);

#endif
