/* Hashes of the prompt pages of recent requests. Admission uses them to estimate how many prompt tokens of a new request are
 * cached.
 *
 * The prefix tree belongs to the engine thread, so the thread that submits a request cannot search it. This table is only a hint,
 * because it also contains pages that are still being computed or that were evicted. The scheduler determines the exact number of
 * cached tokens when it receives the request. The hash of a page covers the tenant and all tokens up to the end of the page. If
 * two pages map to the same slot, the newer page replaces the older one.
 */
#ifndef FKV_RECENT_PREFIXES_H
#define FKV_RECENT_PREFIXES_H

#include "../base/base.h"

enum { FKV_RECENT_PAGES = 1 << 14 };

typedef struct fkv_recent_prefixes {
    uint64_t hashes[FKV_RECENT_PAGES]; /* a hash is stored at index hash % FKV_RECENT_PAGES; the value 0 marks an empty slot */
} fkv_recent_prefixes;

/* Computes the hash of every full page of a prompt and returns the number of hashes. hashes: [n_tokens / page_tokens], output. */
uint32_t fkv_prefix_hashes(uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens, uint32_t page_tokens, uint64_t *hashes);

/* Returns the number of consecutive pages, starting with the first, whose hashes are in the table. */
uint32_t fkv_recent_match(const fkv_recent_prefixes *recent, const uint64_t *hashes, uint32_t n);

void fkv_recent_add(fkv_recent_prefixes *recent, const uint64_t *hashes, uint32_t n);

#endif
