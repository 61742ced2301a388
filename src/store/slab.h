/* The one reserved region: where the bytes of (layer, page) are. Arithmetic on integers; knows neither tokens nor codecs.
 *
 *   address(layer, page, head) = base + layer.offset + (page * layer.n_heads + head) * layer.block_bytes
 *
 * The pages of a layer lie side by side, so that attention over one layer stays in few OS pages. All layers of a group have the
 * same number of pages; page p of a group is page p of each of its layers. A sealed layer is two of them: its sealed blocks under
 * its own number, its open blocks behind all layers, in the group of open pages.
 *
 * Where a device keeps the pages out of the host's reach there is no base: copies of pages and the bytes of page files go through
 * its fkv_page_store. The layout is the same.
 */
#ifndef FKV_SLAB_H
#define FKV_SLAB_H

#include "../base/base.h"

/* One token-major piece of a block, so that slots nobody wrote can be blanked before they leave the process. */
typedef struct fkv_slab_part {
    uint32_t offset;
    uint32_t row_bytes;  /* 0: the codec has no such part, or one for all rows */
    uint32_t page_bytes; /* of the whole page, behind its rows */
} fkv_slab_part;

enum { FKV_SLAB_PARTS = 6 };

/* offset + page_tokens * row_bytes + page_bytes of a part <= offset of the next one, and of the last one <= block_bytes. */
typedef struct fkv_slab_layer {
    uint32_t group;
    uint32_t n_heads; /* KV heads */
    uint32_t block_bytes;
    bool sealed;     /* a page holds all of its rows or none */
    uint64_t offset; /* set by fkv_slab_layout() */
    fkv_slab_part parts[FKV_SLAB_PARTS];
} fkv_slab_layer;

/* Pages that the host reaches by asking. A run is all KV heads of (layer, page); bytes [from, from + bytes) of it. */
typedef struct fkv_page_store {
    fkv_status (*copy)(void *self, uint32_t group, uint32_t from, uint32_t to);
    fkv_status (*read)(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out);
    fkv_status (*write)(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in);
} fkv_page_store;

typedef struct fkv_slab {
    uint8_t *base;               /* NULL until mapped, and where there is a store */
    const fkv_page_store *store; /* NULL: the pages are at base */
    void *store_self;
    uint64_t bytes;
    uint32_t page_tokens;
    uint32_t n_layers;
    uint32_t n_groups;
    uint32_t group_pages[FKV_MAX_GROUPS];
    uint64_t group_page_bytes[FKV_MAX_GROUPS]; /* sum over the group's layers of n_heads * block_bytes */
    fkv_slab_layer *layers;                    /* [n_layers]; those of open pages are the last */
} fkv_slab;

/* Fills offsets, group_page_bytes and bytes from layers, n_groups and group_pages. FKV_BAD_CONFIG if the bytes overflow. */
fkv_status fkv_slab_layout(fkv_slab *slab);

/* All KV heads of (layer, page): n_heads * block_bytes bytes. */
FKV_INLINE uint8_t *fkv_slab_run(const fkv_slab *slab, uint32_t layer, uint32_t page) {
    const fkv_slab_layer *l = &slab->layers[layer];
    FKV_ASSERT(page < slab->group_pages[l->group]);
    return slab->base + l->offset + (uint64_t)page * l->n_heads * l->block_bytes;
}

FKV_INLINE uint64_t fkv_slab_run_bytes(const fkv_slab *slab, uint32_t layer) {
    return (uint64_t)slab->layers[layer].n_heads * slab->layers[layer].block_bytes;
}

/* Copies a page of a group, all its layers: copy-on-write. Fails only where the store does. */
fkv_status fkv_slab_copy_page(const fkv_slab *slab, uint32_t group, uint32_t from, uint32_t to);

/* Bytes [from, from + bytes) of the run of (layer, page), out of the pages and into them. Fail only where the store does. */
fkv_status fkv_slab_read(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out);
fkv_status fkv_slab_write(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in);

/* Rows of logical page `logical` that the first n_tokens tokens of a sequence wrote. Of a sealed layer all or none, and none of
 * the first page, which nobody reads sealed. */
FKV_INLINE uint32_t fkv_slab_live_rows(const fkv_slab *slab, uint32_t layer, uint32_t logical, uint32_t n_tokens) {
    uint32_t n = fkv_min_u32(slab->page_tokens, n_tokens - logical * slab->page_tokens);
    return slab->layers[layer].sealed && (logical == 0 || n < slab->page_tokens) ? 0 : n;
}

/* Zeroes what no token of the first n_tokens wrote, the gaps between parts included, in `piece`: a copy of the bytes
 * [from, from + bytes) of a run. */
void fkv_slab_blank(const fkv_slab *slab, uint32_t layer, uint8_t *piece, uint64_t from, uint64_t bytes, uint32_t n_tokens);

#endif
