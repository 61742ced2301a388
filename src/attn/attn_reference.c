/* Scalar attention reference. Decodes every row with its codec, accumulates in double, computes softmax in three passes and
 * applies each mask token by token. It uses no tiles, splits, threads or scratch memory. Tests and benchmarks compare the kernels
 * with it. */
#include "attn_reference.h"

#include "../base/float16.h"

#include <math.h>

enum { HEADS = 8 }; /* maximum query heads of a KV head that are computed together, so that they share decoded rows */

typedef struct queries {
    const fkv_attn_layer *layer;
    const fkv_attn_row *row;
    uint32_t head;    /* KV head */
    uint32_t q_head;  /* first query head */
    uint32_t n_heads; /* number of query heads, at most HEADS */
    uint32_t position;
    float q[HEADS][2 * FKV_MAX_HEAD_DIM]; /* the RoPE channels of a latent layer follow the latent channels */
} queries;

static void decode_token_row(const queries *x, uint32_t token, fkv_side side, float *out) {
    const fkv_attn_layer *layer = x->layer;
    uint32_t page_tokens = layer->block.page_tokens;
    uint32_t logical = token / page_tokens;
    bool open = layer->sealed && fkv_attn_sees_open(x->position / page_tokens, logical);
    const fkv_block *block = open ? &layer->open : fkv_attn_head_block(layer, x->head);
    size_t page = fkv_page_at(open ? x->row->open : x->row->view, logical);
    const uint8_t *bytes = (open ? layer->open_pages : layer->pages) + (page * layer->n_kv_heads + x->head) * block->bytes;
    fkv_block_decode(block, bytes, side, token % page_tokens, out);
}

static bool token_is_visible(const queries *x, uint32_t token) {
    uint32_t window = x->layer->window;
    return token <= x->position && (window == 0 || token < x->layer->n_sinks || x->position - token < window);
}

static void decode_key(const queries *x, uint32_t token, float *k) {
    decode_token_row(x, token, FKV_SIDE_K, k);
    if (x->layer->rope_dim != 0) decode_token_row(x, token, FKV_SIDE_ROPE, k + x->layer->head_dim);
}

static double score(const queries *x, uint32_t h, const float *k) {
    double sum = 0;
    for (uint32_t d = 0; d < fkv_attn_key_dim(x->layer); d++) sum += (double)x->q[h][d] * (double)k[d];
    sum *= (double)x->layer->scale;
    double cap = (double)x->layer->softcap;
    return cap > 0 ? cap * tanh(sum / cap) : sum;
}

/* out: [n_heads, D] */
static void attend_heads(const queries *x, float *out) {
    uint32_t dim = x->layer->head_dim;
    float k[2 * FKV_MAX_HEAD_DIM];
    float v[FKV_MAX_HEAD_DIM];
    double max[HEADS];
    double total[HEADS];
    double sum[HEADS][FKV_MAX_HEAD_DIM] = {0};
    for (uint32_t h = 0; h < x->n_heads; h++) max[h] = -INFINITY;
    for (uint32_t t = 0; t <= x->position; t++) {
        if (!token_is_visible(x, t)) continue;
        decode_key(x, t, k);
        for (uint32_t h = 0; h < x->n_heads; h++) max[h] = fmax(max[h], score(x, h, k));
    }
    for (uint32_t h = 0; h < x->n_heads; h++)
        total[h] = x->layer->sink_logits != NULL ? exp((double)x->layer->sink_logits[x->q_head + h] - max[h]) : 0;
    for (uint32_t t = 0; t <= x->position; t++) {
        if (!token_is_visible(x, t)) continue;
        decode_key(x, t, k);
        decode_token_row(x, t, fkv_attn_value_side(x->layer), v);
        for (uint32_t h = 0; h < x->n_heads; h++) {
            double p = exp(score(x, h, k) - max[h]);
            total[h] += p;
            for (uint32_t d = 0; d < dim; d++) sum[h][d] += p * (double)v[d];
        }
    }
    for (uint32_t h = 0; h < x->n_heads; h++, out += dim) {
        for (uint32_t d = 0; d < dim; d++) out[d] = (float)(sum[h][d] / total[h]);
        if (x->layer->rotate_v != NULL) fkv_rotation_undo(x->layer->rotate_v, out);
    }
}

void fkv_attn_reference(const fkv_attn_layer *layer, const fkv_attn_row *rows, uint32_t n_rows, const void *q, void *out) {
    const uint32_t heads_per_kv = layer->n_q_heads / layer->n_kv_heads;
    const uint32_t key_dim = fkv_attn_key_dim(layer);
    const size_t number = fkv_type_bytes(layer->row_type);
    size_t first = 0; /* index of the current token's first query head among the heads of all tokens */
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < rows[r].n_tokens; i++, first += layer->n_q_heads) {
            for (uint32_t h = 0; h < layer->n_q_heads;) {
                queries x = {
                    .layer = layer, .row = &rows[r], .head = h / heads_per_kv, .q_head = h, .position = rows[r].start + i};
                x.n_heads = fkv_min_u32(HEADS, heads_per_kv - h % heads_per_kv);
                float result[HEADS * FKV_MAX_HEAD_DIM];
                for (uint32_t n = 0; n < x.n_heads; n++) {
                    fkv_rows_to_f32(layer->row_type, (const uint8_t *)q + (first + h + n) * key_dim * number, x.q[n], key_dim);
                    if (layer->rotate_k != NULL) fkv_rotation_apply(layer->rotate_k, x.q[n]);
                }
                attend_heads(&x, result);
                fkv_rows_from_f32(layer->row_type, result, (uint8_t *)out + (first + h) * layer->head_dim * number,
                                  (size_t)x.n_heads * layer->head_dim);
                h += x.n_heads;
            }
        }
    }
}
