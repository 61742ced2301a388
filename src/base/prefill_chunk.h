/* The length of prefill chunks. In sealed layers, attention kernels divide the queries of a chunk into tiles that never cross a
 * page boundary, so a chunk that starts and ends at page boundaries has the smallest number of tiles.
 */
#ifndef FKV_PREFILL_CHUNK_H
#define FKV_PREFILL_CHUNK_H

#include "base.h"

/* Minimum length, in pages, of a chunk before it is shortened. Shortening removes less than a quarter of its tokens. */
enum { FKV_LONG_CHUNK_PAGES = 4 };

/* Returns the length of a prefill chunk that starts at position `from`, if n_left tokens of the prompt remain and the step has
 * room for `most` tokens. A chunk of FKV_LONG_CHUNK_PAGES pages or more that does not reach the end of the prompt is shortened to
 * end at a page boundary. The result is 0 only if n_left or `most` is 0. */
FKV_INLINE uint32_t fkv_prefill_chunk(uint32_t page_tokens, uint32_t from, uint32_t n_left, uint32_t most) {
    if (n_left <= most) return n_left;
    return most / page_tokens >= FKV_LONG_CHUNK_PAGES ? most - (from + most) % page_tokens : most;
}

#endif
