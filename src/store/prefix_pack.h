/* One page of the prefix tree as bytes that stand on their own: header | tokens | pages of its groups. docs/page_format.md is the
 * bit-exact truth. Takes no memory and owns no file.
 *
 * Everything is a function of the configuration, the groups and the tokens but for the key, the checksums and the page bytes: a
 * reader computes what must stand there and compares. Slots and gaps that no token wrote are 0.
 */
#ifndef FKV_PREFIX_PACK_H
#define FKV_PREFIX_PACK_H

#include "../base/checksum.h"
#include "page_file.h"

#include <flatkv/prefix_store.h>

/* Digest of everything but tokens and tenant that pages depend on. */
typedef struct fkv_pack_identity {
    uint8_t digest[FKV_SHA256_BYTES];
} fkv_pack_identity;

fkv_status fkv_pack_identity_make(const fkv_file_identity *identity, fkv_pack_identity *out);

/* Which page it is. */
typedef struct fkv_pack_place {
    const fkv_pack_identity *identity;
    const fkv_page_key *key;
    const uint32_t *tokens; /* [page_tokens] of this page */
    uint32_t logical;
} fkv_pack_place;

uint64_t fkv_pack_bytes(const fkv_slab *slab, uint32_t groups); /* bit g: with the page of group g */

/* pages: of each group, FKV_NO_PAGE where there is none. out: [fkv_pack_bytes()] */
fkv_status fkv_pack_write(const fkv_slab *slab, const fkv_pack_place *place, const uint32_t pages[FKV_MAX_GROUPS], uint8_t *out);

/* Everything is checked: FKV_FILE_DAMAGED, or FKV_FILE_FOREIGN for a sound one of something else. *groups: those it has. */
fkv_status fkv_pack_check(const fkv_slab *slab, const fkv_pack_place *place, const uint8_t *packed, uint64_t n_bytes,
                          uint32_t *groups);

/* The bytes of a checked page into pages; a group whose page is FKV_NO_PAGE is passed over. Fails only where the device does. */
fkv_status fkv_pack_read(const fkv_slab *slab, uint32_t groups, const uint8_t *packed, const uint32_t pages[FKV_MAX_GROUPS]);

#endif
