/* Memory layout of the slab that holds all pages. This module computes addresses and copies bytes. It does not depend on codecs.
 *
 *   address(layer, page, head) = base + layer.offset + (page * layer.n_heads + head) * layer.block_bytes
 *
 * The pages of a layer are contiguous, so attention over one layer touches few OS pages. All layers of a group have the same
 * number of pages; page p of a group is page p in each of its layers. A sealed layer has two entries. The first entry, at the
 * index of the layer, describes its sealed blocks. A second entry, after the entries of all layers, describes its open blocks,
 * which belong to the group of open pages.
 *
 * If a device keeps the pages outside of host memory, base is NULL, and page copies and page files access the pages through an
 * fkv_page_store. The layout is the same in both cases.
 */
#ifndef FKV_SLAB_H
#define FKV_SLAB_H

#include "../base/base.h"

/* Describes one token-major part of a block, such as the K scales. The slab uses this description to zero unwritten slots before
 * a page is written to a file or a prefix store.
 */
typedef struct fkv_slab_part {
    uint32_t offset;
    uint32_t row_bytes;  /* 0 if the part does not exist or has no per-token data */
    uint32_t page_bytes; /* number of per-page bytes that follow the rows */
} fkv_slab_part;

enum { FKV_SLAB_PARTS = 6 };

/* Slab entry of a layer: its block layout. A part of a block ends at offset + page_tokens * row_bytes + page_bytes. Invariant:
 * every part ends at or before the start of the next part, and the last part ends at or before block_bytes. */
typedef struct fkv_slab_layer {
    uint32_t group;
    uint32_t n_heads; /* number of KV heads */
    uint32_t block_bytes;
    bool sealed;     /* true if the blocks are sealed; a page then holds either all of its rows or none */
    uint64_t offset; /* set by fkv_slab_layout() */
    fkv_slab_part parts[FKV_SLAB_PARTS];
} fkv_slab_layer;

/* Access to pages in device memory. A *run* consists of the blocks of all KV heads in one page of one layer. read() and write()
 * transfer bytes [from, from + bytes) of a run. */
typedef struct fkv_page_store {
    fkv_status (*copy)(void *self, uint32_t group, uint32_t from, uint32_t to);
    fkv_status (*read)(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out);
    fkv_status (*write)(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in);
} fkv_page_store;

typedef struct fkv_slab {
    uint8_t *base;               /* start of the slab; NULL until the slab is mapped, and always NULL if `store` is set */
    const fkv_page_store *store; /* NULL if the pages are at base */
    void *store_self;
    uint64_t bytes;
    uint32_t page_tokens;
    uint32_t n_layers;
    uint32_t n_groups;
    uint32_t group_pages[FKV_MAX_GROUPS];
    uint64_t group_page_bytes[FKV_MAX_GROUPS]; /* n_heads * block_bytes, summed over the layers of the group */
    fkv_slab_layer *layers;                    /* [n_layers] entries; those for open blocks of sealed layers come last */
} fkv_slab;

/* Computes layer offsets, group_page_bytes and bytes from layers, n_groups and group_pages. Returns FKV_BAD_CONFIG on overflow.
 */
fkv_status fkv_slab_layout(fkv_slab *slab);

/* Returns the address of the run of (layer, page). The run has n_heads * block_bytes bytes. */
FKV_INLINE uint8_t *fkv_slab_run(const fkv_slab *slab, uint32_t layer, uint32_t page) {
    const fkv_slab_layer *l = &slab->layers[layer];
    FKV_ASSERT(page < slab->group_pages[l->group]);
    return slab->base + l->offset + (uint64_t)page * l->n_heads * l->block_bytes;
}

FKV_INLINE uint64_t fkv_slab_run_bytes(const fkv_slab *slab, uint32_t layer) {
    return (uint64_t)slab->layers[layer].n_heads * slab->layers[layer].block_bytes;
}

/* Copies a page in all layers of its group, for copy-on-write. Fails only if the store fails. */
fkv_status fkv_slab_copy_page(const fkv_slab *slab, uint32_t group, uint32_t from, uint32_t to);

/* Read or write bytes [from, from + bytes) of the run of (layer, page). Fail only if the store fails. */
fkv_status fkv_slab_read(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out);
fkv_status fkv_slab_write(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in);

/* Returns the number of rows of a logical page that hold tokens when the sequence has n_tokens tokens. In a sealed layer, the
 * result is page_tokens if the page is full, and 0 otherwise. It is always 0 for page 0, which is never read in sealed form. */
FKV_INLINE uint32_t fkv_slab_live_rows(const fkv_slab *slab, uint32_t layer, uint32_t logical, uint32_t n_tokens) {
    uint32_t n = fkv_min_u32(slab->page_tokens, n_tokens - logical * slab->page_tokens);
    return slab->layers[layer].sealed && (logical == 0 || n < slab->page_tokens) ? 0 : n;
}

/* Sets to 0 all bytes of `chunk` that do not belong to the first n_tokens rows of the page, including the padding between parts.
 * chunk: a copy of bytes [from, from + bytes) of a run. */
void fkv_slab_blank(const fkv_slab *slab, uint32_t layer, uint8_t *chunk, uint64_t from, uint64_t bytes, uint32_t n_tokens);

#endif
