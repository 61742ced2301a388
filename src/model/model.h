/* A loaded model: which tensor of the file is which part of it, the vocabulary, and its weights as its backend holds them.
 *
 * Made by fkv_model_load(), read-only from then on. What the parts are and that they have the right shape is found out once, for
 * every backend; packed_weights.h has the CPU's form of them, src/model/mlx that of MLX.
 */
#ifndef FKV_MODEL_STATE_H
#define FKV_MODEL_STATE_H

#include "architecture.h"
#include "chat/chat.h"
#include "model_backend.h"
#include "tokenizer/tokenizer.h"

/* Of one layer; NULL where it has none. */
typedef struct fkv_layer_tensors {
    const fkv_tensor *q, *k, *v; /* [H D, dim], [G D, dim], [G D, dim] */
    const fkv_tensor *o;         /* [dim, H D] */
    const fkv_tensor *gate, *up; /* [ffn_dim, dim] */
    const fkv_tensor *down;      /* [dim, ffn_dim] */
    const fkv_tensor *q_bias, *k_bias, *v_bias;
    const fkv_tensor *q_norm, *k_norm;      /* [D] */
    const fkv_tensor *attn_norm, *ffn_norm; /* [dim] */
    const fkv_tensor *post_attn_norm, *post_ffn_norm;
} fkv_layer_tensors;

typedef struct fkv_packed_weights fkv_packed_weights;
typedef struct fkv_array_weights fkv_array_weights;

struct fkv_model {
    fkv_model_info info;
    fkv_model_config config;
    const fkv_model_backend *backend;
    const fkv_architecture *architecture;
    const fkv_hparams *hparams;
    float embedding_scale;
    float query_scale;
    fkv_layer_tensors *tensors;   /* [n_layers] */
    const fkv_tensor *embedding;  /* [n_vocab, dim] */
    const fkv_tensor *output;     /* [n_vocab, dim]; the embedding where the file has none of its own */
    const fkv_tensor *final_norm; /* [dim] */
    uint64_t mapped_bytes;        /* of what is used where the file is mapped */
    fkv_packed_weights *packed;   /* the CPU's, else NULL */
    fkv_array_weights *arrays;    /* MLX's, else NULL */
    fkv_weights *weights;
    fkv_tokenizer *tokenizer;
    fkv_chat *chat;
};

#endif
