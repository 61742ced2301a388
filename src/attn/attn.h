/* A step on the CPU: rows into pages, queries over pages. Plain views in, no pager and no cache: src/cache glues.
 *
 * Same answer however it got there. A query's output is a function of its own tokens alone, to the last bit, within one
 * instruction set: the history is cut at boundaries that depend only on the query's position (fkv_attn_split_pages), each piece
 * is an online softmax over tiles of the page, and the pieces are folded from first to last. Neither the rows beside it in the
 * step, nor the number of threads, nor the numbers of the pages enter.
 *
 * Scratch is a function of shapes and threads, never of the context length (fkv_attn_scratch_bytes).
 *
 * A sealed layer has two blocks for a page: rows are written into the open one, and a page that is full is packed anew into the
 * sealed one before the layer's attention. Who sees which is a matter of position alone: a query sees the pages of the span
 * that it is in (FKV_OPEN_SPAN) and the first page open, every other page sealed.
 */
#ifndef FKV_ATTN_H
#define FKV_ATTN_H

#include "../base/page_view.h"
#include "../base/workers.h"
#include "../codec/block.h"
#include "../codec/rotation.h"

/* Sizes of a layer's scale: those over which parity_attn holds the kernels against the truth. A soft cap may be any float. */
static const float FKV_SMALLEST_SCALE = 1e-6f;
static const float FKV_LARGEST_SCALE = 1e6f;

/* One layer, fixed at open. */
typedef struct fkv_attn_layer {
    uint32_t n_q_heads;  /* H */
    uint32_t n_kv_heads; /* G */
    uint32_t head_dim;   /* D */
    uint32_t window;     /* 0: all */
    uint32_t n_sinks;
    float scale;
    float softcap;
    const float *sink_logits; /* [H] or NULL */
    fkv_type row_type;
    fkv_block block;
    const fkv_rotation *rotate_k; /* NULL: none */
    const fkv_rotation *rotate_v;
    uint8_t *pages;  /* block of (page 0, head 0); (page, head) is at (page * G + head) * block.bytes */
    bool calibrated; /* K has channels of its own for each head: head_blocks is there where pages are */
    bool sealed;     /* block and pages are the sealed ones, open and open_pages where rows are written */
    fkv_block open;
    uint8_t *open_pages;          /* as pages, with open.bytes */
    const fkv_block *head_blocks; /* [G] where heads differ (calibrated keys), else NULL; as `block` but for K's channels */
} fkv_attn_layer;

/* The first logical page of the span that page `own` is in: from there on a query in `own` sees all pages open. */
FKV_INLINE uint32_t fkv_attn_first_open(uint32_t own) { return own - own % FKV_OPEN_SPAN; }

/* Whether a query in logical page `own` sees logical page `page` of the layer open. */
FKV_INLINE bool fkv_attn_sees_open(uint32_t own, uint32_t page) { return page == 0 || page >= fkv_attn_first_open(own); }

/* Where the rows of a layer are written, and in which pages. */
FKV_INLINE const fkv_block *fkv_attn_row_block(const fkv_attn_layer *layer) {
    return layer->sealed ? &layer->open : &layer->block;
}

/* The block of a page and KV head, sealed where the layer is. */
FKV_INLINE const fkv_block *fkv_attn_head_block(const fkv_attn_layer *layer, uint32_t head) {
    return layer->head_blocks != NULL ? &layer->head_blocks[head] : &layer->block;
}

/* One sequence's share of a step. first - rows[0].first is where its tokens lie in k, v, q and out. */
typedef struct fkv_attn_row {
    fkv_page_view view;
    uint32_t start;     /* position of the first new token */
    uint32_t n_tokens;  /* new */
    uint32_t first;     /* new tokens of the rows before it */
    fkv_page_view open; /* of the open pages; read where the layer is sealed */
} fkv_attn_row;

/* Logical pages of a sealed layer that are full with this row and were not before it: how many, from which on. The first page of
 * a sequence is never sealed: nobody sees it so. */
FKV_INLINE uint32_t fkv_attn_first_to_seal(const fkv_attn_row *row, uint32_t page_tokens) {
    return fkv_max_u32(1, row->start / page_tokens);
}

FKV_INLINE uint32_t fkv_attn_n_to_seal(const fkv_attn_row *row, uint32_t page_tokens) {
    uint32_t first = fkv_attn_first_to_seal(row, page_tokens);
    uint32_t end = (row->start + row->n_tokens) / page_tokens;
    return end > first ? end - first : 0;
}

typedef struct fkv_cpu_kernels fkv_cpu_kernels;

/* The kernels of an instruction set; NULL where this build or machine has none. AUTO: the best. */
const fkv_cpu_kernels *fkv_cpu_kernels_for(fkv_isa isa);
const char *fkv_cpu_kernels_name(const fkv_cpu_kernels *kernels);

/* Pages of one piece of history for a query at `position`: a power of two, at most FKV_ATTN_MAX_SPLITS pieces. */
enum { FKV_ATTN_MAX_SPLITS = 32 };
uint32_t fkv_attn_split_pages(uint32_t position, uint32_t page_tokens);

/* Scratch for any step over this layer; a cache takes the largest over its layers. */
uint64_t fkv_attn_scratch_bytes(const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads);

/* k, v: [T, G, D] -> pages; pages of a sealed layer that are full now are sealed. */
void fkv_attn_write(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                    const void *k, const void *v, fkv_workers *workers);

/* q -> out: [T, H, D]; the step's own tokens are in the pages already. Returns the packed bytes it read. */
uint64_t fkv_attn_attend(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                         const void *q, void *out, void *scratch, fkv_workers *workers);

#endif
