/* Rows into pages: each K and V row is widened, rotated and encoded straight into its slot. The only unpacked copy is one row on
 * the stack of the thread that encodes it.
 */
#include "attn.h"
#include "cpu/kernels.h"

#include "../base/float16.h"

enum { TOKENS_PER_ITEM = 8 };

typedef struct write_job {
    const fkv_codec_kernels *codecs[FKV_N_SIDES];
    const fkv_attn_layer *layer;
    const fkv_attn_row *rows;
    uint32_t n_tokens; /* of all rows */
    const uint8_t *side[FKV_N_SIDES];
} write_job;

static void write_row(const write_job *j, uint8_t *block, uint32_t slot, fkv_side side, size_t at, const fkv_rotation *rotation) {
    const fkv_attn_layer *layer = j->layer;
    float x[FKV_MAX_HEAD_DIM];
    uint8_t *part[FKV_N_PARTS];
    fkv_rows_to_f32(layer->row_type, j->side[side] + at * fkv_type_bytes(layer->row_type), x, layer->head_dim);
    fkv_block_row(&layer->block, block, side, slot, part);
    if (rotation != NULL) {
        fkv_codec_clean(&layer->block.codec[side], x);
        fkv_rotation_apply(rotation, x);
    }
    j->codecs[side]->encode(&layer->block.codec[side], x, part);
}

static void write_tokens(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    const write_job *j = context;
    const fkv_attn_layer *layer = j->layer;
    uint32_t token = item * TOKENS_PER_ITEM;
    uint32_t end = fkv_min_u32(token + TOKENS_PER_ITEM, j->n_tokens);
    const fkv_attn_row *row = j->rows;
    uint32_t row_start = 0;
    for (; token < end; token++) {
        while (token >= row_start + row->n_tokens) {
            row_start += row->n_tokens;
            row++;
        }
        uint32_t position = row->start + (token - row_start);
        uint32_t page = fkv_page_at(row->view, position / layer->block.page_tokens);
        uint32_t slot = position % layer->block.page_tokens;
        uint8_t *blocks = layer->pages + (size_t)page * layer->n_kv_heads * layer->block.bytes;
        for (uint32_t head = 0; head < layer->n_kv_heads; head++) {
            size_t from = ((size_t)token * layer->n_kv_heads + head) * layer->head_dim;
            uint8_t *block = blocks + (size_t)head * layer->block.bytes;
            write_row(j, block, slot, FKV_SIDE_K, from, layer->rotate_k);
            write_row(j, block, slot, FKV_SIDE_V, from, layer->rotate_v);
        }
    }
}

void fkv_attn_write(const fkv_cpu_kernels *kernels, const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows,
                    const void *k, const void *v, fkv_workers *workers) {
    write_job j = {.layer = layer, .rows = rows, .side = {k, v}};
    for (int side = 0; side < FKV_N_SIDES; side++) j.codecs[side] = fkv_codec_kernels_of(kernels, &layer->block.codec[side]);
    for (uint32_t r = 0; r < n_rows; r++) j.n_tokens += rows[r].n_tokens;
    fkv_workers_run(workers, write_tokens, &j, fkv_ceil_div(j.n_tokens, TOKENS_PER_ITEM));
}
