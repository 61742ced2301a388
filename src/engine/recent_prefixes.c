/* See recent_prefixes.h. */
#include "recent_prefixes.h"

uint32_t fkv_prefix_hashes(uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens, uint32_t page_tokens, uint64_t *hashes) {
    uint64_t hash = (tenant + 1) * 0x9E3779B97F4A7C15u;
    const uint32_t n = n_tokens / page_tokens;
    for (uint32_t page = 0; page < n; page++) {
        for (uint32_t i = 0; i < page_tokens; i++) {
            hash = (hash ^ tokens[page * page_tokens + i]) * 0x9E3779B97F4A7C15u;
            hash ^= hash >> 29;
        }
        hashes[page] = hash != 0 ? hash : 1;
    }
    return n;
}

uint32_t fkv_recent_match(const fkv_recent_prefixes *recent, const uint64_t *hashes, uint32_t n) {
    uint32_t i = 0;
    while (i < n && recent->hashes[hashes[i] % FKV_RECENT_PAGES] == hashes[i]) i++;
    return i;
}

void fkv_recent_add(fkv_recent_prefixes *recent, const uint64_t *hashes, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) recent->hashes[hashes[i] % FKV_RECENT_PAGES] = hashes[i];
}
