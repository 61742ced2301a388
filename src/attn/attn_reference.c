/* Scalar attention reference. Decodes every row with its codec, accumulates in double, computes softmax in three passes and
 * applies each mask token by token. It uses no tiles, splits, threads or scratch memory. Tests and benchmarks compare the kernels
 * with it. */
#include "attn_reference.h"

#include "../base/float16.h"

#include <math.h>

typedef struct query {
    const fkv_attn_layer *layer;
    const fkv_attn_row *row;
    uint32_t head; /* KV head */
    uint32_t q_head;
    uint32_t position;
    float q[2 * FKV_MAX_HEAD_DIM]; /* the RoPE channels of a latent layer follow the latent channels */
} query;

static void decode_token_row(const query *x, uint32_t token, fkv_side side, float *out) {
    const fkv_attn_layer *layer = x->layer;
    uint32_t page_tokens = layer->block.page_tokens;
    uint32_t logical = token / page_tokens;
    bool open = layer->sealed && fkv_attn_sees_open(x->position / page_tokens, logical);
    const fkv_block *block = open ? &layer->open : fkv_attn_head_block(layer, x->head);
    size_t page = fkv_page_at(open ? x->row->open : x->row->view, logical);
    const uint8_t *bytes = (open ? layer->open_pages : layer->pages) + (page * layer->n_kv_heads + x->head) * block->bytes;
    fkv_block_decode(block, bytes, side, token % page_tokens, out);
}

static bool query_sees(const query *x, uint32_t token) {
    uint32_t window = x->layer->window;
    return token <= x->position && (window == 0 || token < x->layer->n_sinks || x->position - token < window);
}

static double score(const query *x, uint32_t token) {
    float k[2 * FKV_MAX_HEAD_DIM];
    decode_token_row(x, token, FKV_SIDE_K, k);
    if (x->layer->rope_dim != 0) decode_token_row(x, token, FKV_SIDE_ROPE, k + x->layer->head_dim);
    double sum = 0;
    for (uint32_t d = 0; d < fkv_attn_key_dim(x->layer); d++) sum += (double)x->q[d] * (double)k[d];
    sum *= (double)x->layer->scale;
    double cap = (double)x->layer->softcap;
    return cap > 0 ? cap * tanh(sum / cap) : sum;
}

static void attend_one(const query *x, float *out) {
    uint32_t dim = x->layer->head_dim;
    double max = -INFINITY;
    for (uint32_t t = 0; t <= x->position; t++)
        if (query_sees(x, t)) max = fmax(max, score(x, t));
    double total = x->layer->sink_logits != NULL ? exp((double)x->layer->sink_logits[x->q_head] - max) : 0;
    double sum[FKV_MAX_HEAD_DIM] = {0};
    for (uint32_t t = 0; t <= x->position; t++) {
        if (!query_sees(x, t)) continue;
        float v[FKV_MAX_HEAD_DIM];
        decode_token_row(x, t, fkv_attn_value_side(x->layer), v);
        double p = exp(score(x, t) - max);
        total += p;
        for (uint32_t d = 0; d < dim; d++) sum[d] += p * (double)v[d];
    }
    for (uint32_t d = 0; d < dim; d++) out[d] = (float)(sum[d] / total);
    if (x->layer->rotate_v != NULL) fkv_rotation_undo(x->layer->rotate_v, out);
}

void fkv_attn_reference(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q, void *out) {
    size_t number = fkv_type_bytes(layer->row_type);
    size_t at = 0;   /* index in `out` of the current query's first value */
    size_t from = 0; /* index in `q` of the current query's first value */
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < rows[r].n_tokens; i++) {
            for (uint32_t h = 0; h < layer->n_q_heads; h++, at += layer->head_dim, from += fkv_attn_key_dim(layer)) {
                query x = {.layer = layer, .row = &rows[r], .q_head = h, .position = rows[r].start + i};
                x.head = h / (layer->n_q_heads / layer->n_kv_heads);
                fkv_rows_to_f32(layer->row_type, (const uint8_t *)q + from * number, x.q, fkv_attn_key_dim(layer));
                if (layer->rotate_k != NULL) fkv_rotation_apply(layer->rotate_k, x.q);
                float result[FKV_MAX_HEAD_DIM];
                attend_one(&x, result);
                fkv_rows_from_f32(layer->row_type, result, (uint8_t *)out + at * number, layer->head_dim);
            }
        }
    }
}
