/* Performs one attention step on the CPU: writes K and V rows into pages and computes attention over the pages. The functions
 * access pages through page views, so they do not depend on the pager.
 *
 * Results are deterministic. For a given instruction set, a query's output depends only on the tokens that are visible to the
 * query, down to the last bit. The history is split at boundaries that depend only on the query's position
 * (fkv_attn_split_pages). Each split is processed as an online softmax over the tiles of its pages, and the split results are
 * combined from first to last. The output does not depend on the other rows of the step, the number of threads or the physical
 * page numbers.
 *
 * The scratch size depends on the shapes and the number of threads, never on the context length (fkv_attn_scratch_bytes).
 *
 * A sealed layer has two blocks per page. Rows are written to the open block, and a full page is packed into the sealed block
 * before attention runs. The form that a query sees depends only on its position: it sees page 0 and the pages of its own span
 * (FKV_OPEN_SPAN) in open form, and every other page in sealed form.
 *
 * A latent layer has one KV head. Its keys consist of head_dim latent channels and rope_dim RoPE channels, and the latent
 * channels are also the values. A score is the sum of two dot products, one over the latent channels and one over the RoPE
 * channels. Each dot product uses the kernels of the codec of its channels. In a sealed latent layer, both blocks have row
 * codecs: 8 bits in open form and fewer bits in sealed form.
 */
#ifndef FKV_ATTN_H
#define FKV_ATTN_H

#include "../base/page_view.h"
#include "../base/workers.h"
#include "../codec/block.h"
#include "../codec/rotation.h"

/* Supported range of a layer's softmax scale. The test parity_attn covers this range. The soft cap has no such limits. */
static const float FKV_SMALLEST_SCALE = 1e-6f;
static const float FKV_LARGEST_SCALE = 1e6f;

/* Layer parameters, fixed when the cache is opened. */
typedef struct fkv_attn_layer {
    uint32_t n_q_heads;  /* H */
    uint32_t n_kv_heads; /* G */
    uint32_t head_dim;   /* D */
    uint32_t rope_dim;   /* R: number of RoPE channels per key in a latent layer; 0 for other layers */
    uint32_t window;     /* 0: unlimited */
    uint32_t n_sinks;
    float scale;
    float softcap;
    const float *sink_logits; /* [H] or NULL */
    fkv_type row_type;
    fkv_block block;
    const fkv_rotation *rotate_k; /* NULL: no rotation */
    const fkv_rotation *rotate_v;
    uint8_t *pages;  /* base address; the block of (page, head) is at byte offset (page * G + head) * block.bytes */
    bool calibrated; /* true if each head has its own channel order; head_blocks is then not NULL once the pages are allocated */
    bool sealed; /* if true, `block` and `pages` describe sealed pages, and rows are written to open_pages in the layout `open` */
    fkv_block open;
    uint8_t *open_pages; /* base address of the open pages, which are addressed like `pages`, with open.bytes bytes per block */
    const fkv_block *head_blocks; /* [G] block layout of each head if keys are calibrated, otherwise NULL; differs from `block`
                                     only in the channel order of K */
} fkv_attn_layer;

/* Returns the first logical page of the span that contains page `own`. A query in page `own` reads this page and all later pages
 * in open form. */
FKV_INLINE uint32_t fkv_attn_first_open(uint32_t own) { return own - own % FKV_OPEN_SPAN; }

/* Returns whether a query in logical page `own` reads logical page `page` in open form. */
FKV_INLINE bool fkv_attn_sees_open(uint32_t own, uint32_t page) { return page == 0 || page >= fkv_attn_first_open(own); }

/* Returns the number of values in a key or query row of one head. */
FKV_INLINE uint32_t fkv_attn_key_dim(const fkv_attn_layer *layer) { return layer->head_dim + layer->rope_dim; }

/* Returns the side of a block that holds the values: FKV_SIDE_V, or FKV_SIDE_LATENT in a latent layer. */
FKV_INLINE fkv_side fkv_attn_value_side(const fkv_attn_layer *layer) {
    return layer->rope_dim != 0 ? FKV_SIDE_LATENT : FKV_SIDE_V;
}

/* Returns the layout of the block that rows are written to. */
FKV_INLINE const fkv_block *fkv_attn_row_block(const fkv_attn_layer *layer) {
    return layer->sealed ? &layer->open : &layer->block;
}

/* Returns the block layout of a KV head (the sealed layout if the layer is sealed). */
FKV_INLINE const fkv_block *fkv_attn_head_block(const fkv_attn_layer *layer, uint32_t head) {
    return layer->head_blocks != NULL ? &layer->head_blocks[head] : &layer->block;
}

/* A row of a step: the new tokens of one sequence. In the arrays k, v, q and out, the row's tokens start at index
 * first - rows[0].first. */
typedef struct fkv_attn_row {
    fkv_page_view view;
    uint32_t start;     /* position of the first new token */
    uint32_t n_tokens;  /* number of new tokens */
    uint32_t first;     /* total number of new tokens in the step's preceding rows */
    fkv_page_view open; /* page numbers of the open pages; used only if the layer is sealed */
} fkv_attn_row;

/* The next two functions return, for a sealed layer, the first logical page that the new tokens of a row fill, and the number of
 * pages that they fill. The first page of a sequence is not counted: it is never sealed, because all queries read it in open
 * form. */
FKV_INLINE uint32_t fkv_attn_first_to_seal(const fkv_attn_row *row, uint32_t page_tokens) {
    return fkv_max_u32(1, row->start / page_tokens);
}

FKV_INLINE uint32_t fkv_attn_n_to_seal(const fkv_attn_row *row, uint32_t page_tokens) {
    uint32_t first = fkv_attn_first_to_seal(row, page_tokens);
    uint32_t end = (row->start + row->n_tokens) / page_tokens;
    return end > first ? end - first : 0;
}

typedef struct fkv_cpu_kernels fkv_cpu_kernels;

/* Returns the kernels of an instruction set, or NULL if this build or machine does not support it. FKV_ISA_AUTO selects the best
 * instruction set.
 */
const fkv_cpu_kernels *fkv_cpu_kernels_for(fkv_isa isa);
const char *fkv_cpu_kernels_name(const fkv_cpu_kernels *kernels);

/* Returns the number of pages per split for a query at `position`, chosen so that the history has at most FKV_ATTN_MAX_SPLITS
 * splits. */
enum { FKV_ATTN_MAX_SPLITS = 32 };
uint32_t fkv_attn_split_pages(uint32_t position, uint32_t page_tokens);

/* Returns a scratch size, in bytes, that suffices for any step over this layer. A cache reserves the maximum over its layers. */
uint64_t fkv_attn_scratch_bytes(const fkv_attn_layer *layer, uint32_t max_rows, uint32_t n_threads);

/* Writes the rows k: [T, G, D] and v: [T, G, D] to pages. In a latent layer, k is [T, D + R], and v is not used. In a sealed
 * layer, also seals the pages that are now full. */
void fkv_attn_write(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                    const void *k, const void *v, fkv_workers *workers);

/* Computes attention for the queries q: [T, H, D + R] and writes the result to out: [T, H, D]. The tokens of this step must
 * already be in the pages. Returns the number of packed bytes read. */
uint64_t fkv_attn_attend(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                         const void *q, void *out, void *scratch, fkv_workers *workers);

#endif
