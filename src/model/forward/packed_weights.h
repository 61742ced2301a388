/* Weights as the CPU runs them: every matrix repacked into one anonymous map, every norm and bias as floats behind them.
 *
 * Columns of a matrix are padded to a multiple of 32 with zeros, so the rows of activations it meets must be too
 * (fkv_packed_pad). Where the output is a matrix of its own, the embedding is only looked up and stays where the file is mapped.
 */
#ifndef FKV_PACKED_WEIGHTS_H
#define FKV_PACKED_WEIGHTS_H

#include "../files/tensor_rows.h"
#include "../model.h"

enum { FKV_COLUMN_ALIGN = 32 };

typedef struct fkv_packed_layer {
    fkv_matrix q, k, v; /* [H D, dim], [G D, dim], [G D, dim] */
    fkv_matrix o;       /* [dim, H D] */
    fkv_matrix gate, up;
    fkv_matrix down;
    float *q_bias, *k_bias, *v_bias; /* NULL: none */
    float *q_norm, *k_norm;          /* [D]; NULL: none */
    float *attn_norm, *ffn_norm;     /* [dim] */
    float *post_attn_norm;           /* [dim]; NULL: none */
    float *post_ffn_norm;
} fkv_packed_layer;

struct fkv_packed_weights {
    fkv_packed_layer *layers; /* [n_layers] */
    float *final_norm;        /* [dim] */
    fkv_matrix output;        /* [n_vocab, dim]; its rows are the embedding too where the model is tied */
    void *map;                /* one map, info.packed_bytes */
};

FKV_INLINE uint32_t fkv_packed_pad(uint32_t n) { return (uint32_t)fkv_align_up(n, FKV_COLUMN_ALIGN); }

/* As fkv_model_backend has them. */
fkv_status fkv_packed_weights_count(fkv_model *model);
fkv_status fkv_packed_weights_load(fkv_model *model);
void fkv_packed_weights_unload(fkv_model *model);

/* The embedding of a token, scaled as the architecture wants. out: [dim padded]; what is padded is left as it is or zeroed. */
void fkv_packed_embed(const fkv_model *model, uint32_t token, float *out);

#endif
