/* Parts of a stored prefix. A prefix of n full pages consists of these pages and of the additional parts that a sequence needs to
 * continue after page n - 1. In a cache with sealed layers, the additional parts are the pages of the last span in open form. In
 * a cache with state layers, the snapshot of the recurrent state is an additional part. Each part is a separate object of the
 * store. The first page contains its own open form. */
#ifndef FKV_PREFIX_PARTS_H
#define FKV_PREFIX_PARTS_H

#include "../base/base.h"

#include <flatkv/prefix_store.h>

enum { FKV_SPAN_PAGES = 4 }; /* pages in a span of a sealed layer, as defined in docs/page_format.md */

typedef enum fkv_part_kind { FKV_PART_PAGE, FKV_PART_OPEN_PAGE, FKV_PART_STATE } fkv_part_kind;

typedef struct fkv_prefix_part {
    fkv_part_kind kind;
    uint32_t page; /* logical page; for a snapshot, the page after whose last token the state was saved */
} fkv_prefix_part;

/* Kinds of additional parts that the prefixes of a cache have. */
typedef struct fkv_part_kinds {
    bool has_open_pages;
    bool has_states;
} fkv_part_kinds;

/* Returns the number of additional parts of a prefix with n_pages pages: at most FKV_SPAN_PAGES. */
uint32_t fkv_parts_count(fkv_part_kinds kinds, uint32_t n_pages);

/* Returns additional part i of a prefix with n_pages pages. The snapshot comes first, because the prefix tree evicts open pages
 * that no snapshot needs. */
fkv_prefix_part fkv_parts_get(fkv_part_kinds kinds, uint32_t n_pages, uint32_t i);

/* Returns the store key of a part. keys: [part.page + 1] store keys of the pages */
fkv_page_key fkv_part_key(fkv_prefix_part part, const fkv_page_key *keys);

/* Packs or unpacks a part of the prompt `tokens`. See fkv_prefix_pack() and fkv_prefix_unpack(). */
fkv_status fkv_part_pack(const fkv_cache *cache, fkv_prefix_part part, uint64_t tenant, const uint32_t *tokens,
                         const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);
fkv_status fkv_part_unpack(fkv_cache *cache, fkv_prefix_part part, uint64_t tenant, const uint32_t *tokens,
                           const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

#endif
