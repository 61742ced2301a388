/* Slab layout, page copies, access to page bytes, and clearing of unwritten slots. This module owns no memory: the pages are in
 * mapped memory at `base`, or in device memory.
 *
 * Invariant: the offset of layer l is the sum of group_pages * n_heads * block_bytes over the layers before l, and `bytes` is the
 * same sum over all layers.
 */
#include "slab.h"

fkv_status fkv_slab_layout(fkv_slab *slab) {
    FKV_ASSERT(slab->n_groups <= FKV_MAX_GROUPS);
    uint64_t used = 0;
    for (uint32_t g = 0; g < slab->n_groups; g++) slab->group_page_bytes[g] = 0;
    for (uint32_t l = 0; l < slab->n_layers; l++) {
        fkv_slab_layer *layer = &slab->layers[l];
        FKV_ASSERT(layer->group < slab->n_groups);
        const uint32_t n_pages = slab->group_pages[layer->group];
        const uint64_t run_bytes = fkv_slab_run_bytes(slab, l); /* the product of two 32-bit factors fits in 64 bits */
        uint64_t *page_bytes = &slab->group_page_bytes[layer->group];
        uint64_t layer_bytes = 0;
        layer->offset = used;
        FKV_REQUIRE(!fkv_mul_overflows(n_pages, run_bytes, &layer_bytes) && !fkv_add_overflows(used, layer_bytes, &used) &&
                        !fkv_add_overflows(*page_bytes, run_bytes, page_bytes),
                    FKV_BAD_CONFIG,
                    "the slab size overflows 64 bits: layer %u has %u pages of %u heads with %u bytes each; lower max_tokens", l,
                    n_pages, layer->n_heads, layer->block_bytes);
    }
    slab->bytes = used;
    return FKV_OK;
}

fkv_status fkv_slab_copy_page(const fkv_slab *slab, uint32_t group, uint32_t from, uint32_t to) {
    FKV_ASSERT(from != to);
    if (slab->store != NULL) return slab->store->copy(slab->store_self, group, from, to);
    for (uint32_t l = 0; l < slab->n_layers; l++)
        if (slab->layers[l].group == group)
            memcpy(fkv_slab_run(slab, l, to), fkv_slab_run(slab, l, from), fkv_slab_run_bytes(slab, l));
    return FKV_OK;
}

fkv_status fkv_slab_read(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out) {
    FKV_ASSERT(from + bytes <= fkv_slab_run_bytes(slab, layer));
    if (slab->store != NULL) return slab->store->read(slab->store_self, layer, page, from, bytes, out);
    memcpy(out, fkv_slab_run(slab, layer, page) + from, bytes);
    return FKV_OK;
}

fkv_status fkv_slab_write(const fkv_slab *slab, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in) {
    FKV_ASSERT(from + bytes <= fkv_slab_run_bytes(slab, layer));
    if (slab->store != NULL) return slab->store->write(slab->store_self, layer, page, from, bytes, in);
    memcpy(fkv_slab_run(slab, layer, page) + from, in, bytes);
    return FKV_OK;
}

/* Zeroes the bytes at offsets [start, end) of a run (slab.h). `chunk` is a copy of bytes [from, from + bytes) of the run; bytes
 * outside of it are ignored. */
static void blank_range(uint8_t *chunk, uint64_t from, uint64_t bytes, uint64_t start, uint64_t end) {
    if (start < from) start = from;
    if (end > from + bytes) end = from + bytes;
    if (start < end) memset(chunk + (start - from), 0, end - start);
}

void fkv_slab_blank(const fkv_slab *slab, uint32_t layer, uint8_t *chunk, uint64_t from, uint64_t bytes, uint32_t n_tokens) {
    const fkv_slab_layer *l = &slab->layers[layer];
    FKV_ASSERT(n_tokens <= slab->page_tokens && from + bytes <= fkv_slab_run_bytes(slab, layer));
    if (bytes == 0) return;
    const uint64_t last_head = (from + bytes - 1) / l->block_bytes;
    for (uint64_t head = from / l->block_bytes; head <= last_head; head++) {
        const uint64_t block = head * l->block_bytes;
        uint64_t end = block + l->block_bytes; /* end of the current part, including the padding after it; the loop runs from the
                                                  last part to the first */
        for (int p = FKV_SLAB_PARTS - 1; p >= 0; p--) {
            const fkv_slab_part *part = &l->parts[p];
            if (part->row_bytes == 0 && part->page_bytes == 0) continue;
            const uint64_t start = block + part->offset;
            const uint64_t kept = (uint64_t)n_tokens * part->row_bytes + (n_tokens == slab->page_tokens ? part->page_bytes : 0);
            FKV_ASSERT(start + (uint64_t)slab->page_tokens * part->row_bytes + part->page_bytes <= end);
            blank_range(chunk, from, bytes, start + kept, end);
            end = start;
        }
    }
}
