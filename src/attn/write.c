/* Writes rows into pages. Each K or V row is converted to float, rotated and encoded directly into its slot. The only unpacked
 * copy is one row on the stack of the encoding thread. Pages of a sealed layer that are now full are sealed, except the first
 * page of a sequence, which all queries read in open form. */
#include "attn.h"
#include "cpu/kernels.h"

#include "../base/float16.h"

enum { TOKENS_PER_ITEM = 8 };

typedef struct write_job {
    const fkv_codec_kernels *codecs[FKV_N_SIDES];
    const fkv_attn_layer *layer;
    const fkv_cpu_kernels *kernels;
    const fkv_block *block; /* layout of the blocks to which rows are written */
    uint8_t *pages;
    const fkv_attn_row *rows;
    uint32_t n_rows;
    uint32_t n_tokens; /* total number of new tokens in the step */
    const uint8_t *side[FKV_N_SIDES];
} write_job;

/* Encodes one K or V row into a slot of a block. The row starts at element `at` of `rows`. */
static void write_row(const write_job *j, uint8_t *block, uint32_t slot, fkv_side side, const uint8_t *rows, size_t at,
                      const fkv_rotation *rotation) {
    const fkv_attn_layer *layer = j->layer;
    float x[FKV_MAX_HEAD_DIM];
    uint8_t *part[FKV_N_PARTS];
    fkv_rows_to_f32(layer->row_type, rows + at * fkv_type_bytes(layer->row_type), x, j->block->codec[side].dim);
    fkv_block_row(j->block, block, side, slot, part);
    if (rotation != NULL) {
        fkv_codec_clean(&j->block->codec[side], x);
        fkv_rotation_apply(rotation, x);
    }
    j->codecs[side]->encode(&j->block->codec[side], x, part);
}

/* Returns the sequence (row of the step) that token `token` of the step belongs to. */
static const fkv_attn_row *row_of(const write_job *j, uint32_t token) {
    uint32_t low = 0;
    uint32_t high = j->n_rows;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (j->rows[middle].first - j->rows[0].first <= token)
            low = middle;
        else
            high = middle;
    }
    return &j->rows[low];
}

static void write_tokens(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const write_job *j = context;
    const fkv_attn_layer *layer = j->layer;
    uint32_t token = item * TOKENS_PER_ITEM;
    uint32_t end = fkv_min_u32(token + TOKENS_PER_ITEM, j->n_tokens);
    const fkv_attn_row *row = row_of(j, token);
    for (; token < end; token++) {
        uint32_t at = token + j->rows[0].first; /* index of the token, in the numbering of fkv_attn_row.first */
        while (at >= row->first + row->n_tokens) row++;
        uint32_t position = row->start + (at - row->first);
        uint32_t page = fkv_page_at(layer->sealed ? row->open : row->view, position / j->block->page_tokens);
        uint32_t slot = position % j->block->page_tokens;
        uint8_t *blocks = j->pages + (size_t)page * layer->n_kv_heads * j->block->bytes;
        for (uint32_t head = 0; head < layer->n_kv_heads; head++) {
            size_t from = ((size_t)token * layer->n_kv_heads + head) * fkv_attn_key_dim(layer);
            uint8_t *block = blocks + (size_t)head * j->block->bytes;
            write_row(j, block, slot, FKV_SIDE_K, j->side[FKV_SIDE_K], from, layer->rotate_k);
            if (layer->rope_dim != 0)
                write_row(j, block, slot, FKV_SIDE_ROPE, j->side[FKV_SIDE_K], from + layer->head_dim, NULL);
            else
                write_row(j, block, slot, FKV_SIDE_V, j->side[FKV_SIDE_V], from, layer->rotate_v);
        }
    }
}

/* Seals one block, which belongs to page item / G and KV head item % G. The pages to seal are numbered consecutively over all
 * rows of the step. */
static void seal_page(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const write_job *j = context;
    const fkv_attn_layer *layer = j->layer;
    uint32_t head = item % layer->n_kv_heads;
    uint32_t number = item / layer->n_kv_heads;
    const fkv_attn_row *row = j->rows;
    for (uint32_t n = 0; (n = fkv_attn_n_to_seal(row, j->block->page_tokens)) <= number; row++) number -= n;
    uint32_t logical = fkv_attn_first_to_seal(row, j->block->page_tokens) + number;
    size_t from = ((size_t)fkv_page_at(row->open, logical) * layer->n_kv_heads + head) * j->block->bytes;
    size_t to = ((size_t)fkv_page_at(row->view, logical) * layer->n_kv_heads + head) * layer->block.bytes;
    j->kernels->seal(j->block, j->pages + from, fkv_attn_head_block(layer, head), layer->pages + to);
}

void fkv_attn_write(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                    const void *k, const void *v, fkv_workers *workers) {
    const fkv_attn_row *last = &rows[n_rows - 1];
    write_job j = {.kernels = kernels,
                   .layer = layer,
                   .block = fkv_attn_row_block(layer),
                   .pages = layer->sealed ? layer->open_pages : layer->pages,
                   .rows = rows,
                   .n_rows = n_rows,
                   .side = {k, v}};
    for (int side = 0; side < FKV_N_SIDES; side++) j.codecs[side] = fkv_codec_kernels_of(kernels, &j.block->codec[side]);
    j.n_tokens = last->first + last->n_tokens - rows[0].first;
    fkv_workers_run(workers, write_tokens, &j, fkv_ceil_div(j.n_tokens, TOKENS_PER_ITEM));
    if (!layer->sealed) return;
    uint32_t n_pages = 0;
    for (uint32_t r = 0; r < n_rows; r++) n_pages += fkv_attn_n_to_seal(&rows[r], j.block->page_tokens);
    if (n_pages > 0) fkv_workers_run(workers, seal_page, &j, n_pages * layer->n_kv_heads);
}
