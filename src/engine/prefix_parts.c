/* See prefix_parts.h. */
#include "prefix_parts.h"

/* Returns the first page that a prefix with n_pages pages needs in open form, apart from the first page of the prompt. */
static uint32_t first_open_page(uint32_t n_pages) { return fkv_max_u32(n_pages - n_pages % FKV_SPAN_PAGES, 1); }

static uint32_t count_open_pages(fkv_part_kinds kinds, uint32_t n_pages) {
    const uint32_t first = first_open_page(n_pages);
    return kinds.has_open_pages && n_pages > first ? n_pages - first : 0;
}

uint32_t fkv_parts_count(fkv_part_kinds kinds, uint32_t n_pages) {
    return count_open_pages(kinds, n_pages) + (kinds.has_states && n_pages > 0 ? 1 : 0);
}

fkv_prefix_part fkv_parts_get(fkv_part_kinds kinds, uint32_t n_pages, uint32_t i) {
    FKV_ASSERT(i < fkv_parts_count(kinds, n_pages));
    if (kinds.has_states && i == 0) return (fkv_prefix_part){FKV_PART_STATE, n_pages - 1};
    return (fkv_prefix_part){FKV_PART_OPEN_PAGE, first_open_page(n_pages) + i - (kinds.has_states ? 1 : 0)};
}

fkv_page_key fkv_part_key(fkv_prefix_part part, const fkv_page_key *keys) {
    fkv_page_key key = keys[part.page];
    /* these calls cannot fail, because requests are rejected earlier if SHA-256 is not available */
    if (part.kind == FKV_PART_STATE) (void)fkv_prefix_state_key(&keys[part.page], &key);
    if (part.kind == FKV_PART_OPEN_PAGE) (void)fkv_prefix_open_key(&keys[part.page], &key);
    return key;
}

fkv_status fkv_part_pack(const fkv_cache *cache, fkv_prefix_part part, uint64_t tenant, const uint32_t *tokens,
                         const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes) {
    switch (part.kind) {
    case FKV_PART_OPEN_PAGE: return fkv_prefix_pack_open(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    case FKV_PART_STATE: return fkv_prefix_pack_state(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    default: return fkv_prefix_pack(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    }
}

fkv_status fkv_part_unpack(fkv_cache *cache, fkv_prefix_part part, uint64_t tenant, const uint32_t *tokens,
                           const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    switch (part.kind) {
    case FKV_PART_OPEN_PAGE: return fkv_prefix_unpack_open(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    case FKV_PART_STATE: return fkv_prefix_unpack_state(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    default: return fkv_prefix_unpack(cache, tenant, tokens, part.page + 1, key, packed, n_bytes);
    }
}
