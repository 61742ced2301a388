/* flatkv/prefix_store.h: pages of the prefix tree beyond memory: packed, named by what they were computed from, kept in a store.
 *
 * Who owns what
 *   A packed page is bytes in the caller's hands: it carries its own key, tokens and checksums, and nothing in it is believed. A
 *   store keeps packed pages under their keys; it may lose any of them at any time and never needs to understand them. A folder
 *   on disk is one (fkv_prefix_folder_open); whoever fills in the table of functions has another.
 *
 * Promises
 *   A key is a digest of everything that a page depends on: weights, shapes, codecs, rotation, RoPE, tenant, and all tokens up to
 *   the end of the page. A page that is not exactly what its key says is refused (FKV_FILE_DAMAGED, FKV_FILE_FOREIGN) and leaves
 *   the cache as it was. Checksums find damage, not malice: who can write to a store can write a page that is false and sound.
 */
#ifndef FLATKV_PREFIX_STORE_H
#define FLATKV_PREFIX_STORE_H

#include "flatkv.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FKV_PAGE_KEY_BYTES = 32 };

typedef struct fkv_page_key {
    uint8_t bytes[FKV_PAGE_KEY_BYTES];
} fkv_page_key;

/* ---- packed pages -------------------------------------------------------------------------------------------- */

/* What stands before the first page of a tenant's prompts in this cache: the name, of any bytes, is hashed and found nowhere. */
FKV_API fkv_status fkv_prefix_root(const fkv_cache *cache, const void *name, size_t n_bytes, fkv_page_key *root);

/* The key of the page of these tokens behind the page (or root) `above`. tokens: [page_tokens] */
FKV_API fkv_status fkv_prefix_key(const fkv_page_key *above, const uint32_t *tokens, uint32_t page_tokens, fkv_page_key *key);

/* The most bytes that a packed page of this cache has. */
FKV_API uint64_t fkv_prefix_packed_bytes(const fkv_cache *cache);

/* Packs page n_pages - 1 of these tokens out of the prefix tree. tokens: [n_pages * page_tokens]; packed:
 * [fkv_prefix_packed_bytes()], of which *n_bytes are written. FKV_GONE: the tree does not have it. */
FKV_API fkv_status fkv_prefix_pack(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                   const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);

/* Verifies a packed page in full, then puts it into the prefix tree, where it counts as used now. FKV_GONE: the tree does not
 * have the pages before it. FKV_POOL_FULL: every page is in use. FKV_BAD_STATE: a step is open. */
FKV_API fkv_status fkv_prefix_unpack(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                     const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

/* ---- stores -------------------------------------------------------------------------------------------------- */

typedef struct fkv_prefix_store_figures {
    uint64_t pages;
    uint64_t bytes;
    uint64_t max_bytes;
    uint64_t evicted; /* pages, since it was opened */
    uint64_t memory;  /* bytes that the store itself takes */
} fkv_prefix_store_figures;

/* All calls come from several threads at once. look() and used() come from a thread that must not wait: they answer from memory.
 * The others may take their time. */
typedef struct fkv_prefix_store {
    void *self;
    bool (*look)(void *self, const fkv_page_key *key);

    /* FKV_GONE: not there, or not any more. FKV_FILE_DAMAGED: it cannot be a packed page of at most `capacity` bytes. */
    fkv_status (*read)(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes);

    /* When it returns FKV_OK the page outlives the process, until it is evicted or removed. A page that is there stays. */
    fkv_status (*write)(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

    void (*remove)(void *self, const fkv_page_key *key);

    /* These pages, from the first of a prompt on, were used now: the last of them are to be given up first. */
    void (*used)(void *self, const fkv_page_key *keys, uint32_t n);

    void (*figures)(void *self, fkv_prefix_store_figures *figures);
    void (*close)(void *self);
} fkv_prefix_store;

/* A folder with a file for each page, made if it is not there; at most max_bytes of them, the least recently used go first. What
 * it holds is kept for the next process. One process at a time (FKV_BUSY). Files of other names are left alone. Takes one map of
 * memory, about 80 bytes for each 256 KiB of max_bytes. */
FKV_API fkv_status fkv_prefix_folder_open(const char *path, uint64_t max_bytes, fkv_prefix_store *store);

#ifdef __cplusplus
}
#endif

#endif
