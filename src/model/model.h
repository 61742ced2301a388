/* A loaded model: every matrix repacked into one anonymous map, every norm and bias as floats behind them, the vocabulary.
 *
 * Made by fkv_model_load(), read-only from then on. Columns of a matrix are padded to a multiple of 32 with zeros, so the rows of
 * activations it meets must be too (fkv_model_pad). Where the output is a matrix of its own, the embedding is only looked up and
 * stays where the file is mapped.
 */
#ifndef FKV_MODEL_STATE_H
#define FKV_MODEL_STATE_H

#include "architecture.h"
#include "tensor_rows.h"
#include "tokenizer.h"

enum { FKV_COLUMN_ALIGN = 32 };

typedef struct fkv_model_layer {
    fkv_matrix q, k, v; /* [H D, dim], [G D, dim], [G D, dim] */
    fkv_matrix o;       /* [dim, H D] */
    fkv_matrix gate, up;
    fkv_matrix down;
    float *q_bias, *k_bias, *v_bias; /* NULL: none */
    float *q_norm, *k_norm;          /* [D]; NULL: none */
    float *attn_norm, *ffn_norm;     /* [dim] */
    float *post_attn_norm;           /* [dim]; NULL: none */
    float *post_ffn_norm;
} fkv_model_layer;

struct fkv_model {
    fkv_model_info info;
    fkv_model_config config;
    const fkv_architecture *architecture;
    const fkv_hparams *hparams;
    float embedding_scale;
    float query_scale;
    fkv_model_layer *layers;     /* [n_layers] */
    float *final_norm;           /* [dim] */
    fkv_matrix output;           /* [n_vocab, dim] */
    const fkv_tensor *embedding; /* [n_vocab, dim] where the file is mapped; NULL: the rows of `output` are the embedding */
    uint64_t mapped_bytes;       /* of what is used where the file is mapped */
    void *packed;                /* one map, info.packed_bytes */
    fkv_weights *weights;
    fkv_tokenizer *tokenizer;
};

FKV_INLINE uint32_t fkv_model_pad(uint32_t n) { return (uint32_t)fkv_align_up(n, FKV_COLUMN_ALIGN); }

/* The embedding of a token, scaled as the architecture wants. out: [dim padded]; what is padded is left as it is or zeroed. */
void fkv_model_embed(const fkv_model *model, uint32_t token, float *out);

#endif
