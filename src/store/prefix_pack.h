/* Packs one page of the prefix tree into a self-contained byte string: header | tokens | page bytes of each layer group.
 * docs/page_format.md is the bit-exact specification. These functions allocate no memory and open no files.
 *
 * Except for the key, the checksums and the page bytes, all fields of a packed page are determined by the configuration, the
 * groups and the tokens. A reader recomputes these fields and compares them with the packed page. Unwritten slots and padding are
 * 0.
 */
#ifndef FKV_PREFIX_PACK_H
#define FKV_PREFIX_PACK_H

#include "../base/checksum.h"
#include "page_file.h"

#include <flatkv/prefix_store.h>

/* Digest of all settings that determine the contents of pages, except the tokens and the tenant. */
typedef struct fkv_pack_identity {
    uint8_t digest[FKV_SHA256_BYTES];
} fkv_pack_identity;

fkv_status fkv_pack_identity_make(const fkv_file_identity *identity, fkv_pack_identity *out);

/* Identifies a page. */
typedef struct fkv_pack_place {
    const fkv_pack_identity *identity;
    const fkv_page_key *key;
    const uint32_t *tokens; /* [page_tokens] tokens of this page */
    uint32_t logical;       /* logical page number within the prompt */
} fkv_pack_place;

/* Returns the size of a packed page. groups: bit g is set if the page of group g is included. */
uint64_t fkv_pack_bytes(const fkv_slab *slab, uint32_t groups);

/* Packs a page. pages: the page of each group, or FKV_NO_PAGE. out: [fkv_pack_bytes()] */
fkv_status fkv_pack_write(const fkv_slab *slab, const fkv_pack_place *place, const uint32_t pages[FKV_MAX_GROUPS], uint8_t *out);

/* Verifies a packed page. Returns FKV_FILE_DAMAGED if it is damaged, and FKV_FILE_FOREIGN if it is intact but does not match
 * `place`. *groups receives the included groups. */
fkv_status fkv_pack_check(const fkv_slab *slab, const fkv_pack_place *place, const uint8_t *packed, uint64_t n_bytes,
                          uint32_t *groups);

/* Returns the logical page number in the header of a packed page, or 0 if n_bytes is too small for a header. Does not verify the
 * page. */
uint32_t fkv_pack_logical(const uint8_t *packed, uint64_t n_bytes);

/* Copies a verified packed page into the slab. Skips groups whose page is FKV_NO_PAGE. Fails only if the device fails. */
fkv_status fkv_pack_read(const fkv_slab *slab, uint32_t groups, const uint8_t *packed, const uint32_t pages[FKV_MAX_GROUPS]);

#endif
