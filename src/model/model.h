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

/* Of one layer; NULL where it has none. Parts of a fused tensor are views of its rows. */
typedef struct fkv_layer_tensors {
    const fkv_tensor *q, *k, *v; /* [H D, dim], [G D, dim], [G D, dim]; of a layer that shares pages q alone */
    const fkv_tensor *o;         /* [dim, H D] */
    const fkv_tensor *gate, *up; /* [ffn_dim, dim] */
    const fkv_tensor *down;      /* [dim, ffn_dim] */
    const fkv_tensor *q_bias, *k_bias, *v_bias, *o_bias;
    const fkv_tensor *gate_bias, *up_bias, *down_bias;
    const fkv_tensor *q_norm, *k_norm;      /* [D], or [H D] and [G D] */
    const fkv_tensor *attn_norm, *ffn_norm; /* [dim] */
    const fkv_tensor *attn_norm_bias, *ffn_norm_bias;
    const fkv_tensor *post_attn_norm, *post_ffn_norm;
    const fkv_tensor *out_scale;                    /* [1] */
    const fkv_tensor *input_gate, *input_proj;      /* [input_dim, dim], [dim, input_dim] */
    const fkv_tensor *input_norm;                   /* [dim] */
    const fkv_tensor *sinks;                        /* [H] */
    const fkv_tensor *router;                       /* [E, dim]; gate, up and down are NULL then, unless both are there */
    const fkv_tensor *router_scale, *expert_scales; /* [dim], [E] */
    const fkv_tensor *experts_norm;                 /* [dim] before experts beside a feed-forward; ffn_norm is before that one */
    const fkv_tensor *post_dense_norm, *post_experts_norm; /* [dim] behind each of them, before both are added */
    const fkv_tensor *router_correction;                   /* [E] of the scores that experts are chosen by */
    const fkv_tensor *shared_gate; /* [1, dim] of the feed-forward beside experts, whose gate, up and down are the layer's */
    const fkv_tensor *router_bias; /* [E] */
    const fkv_tensor **gate_experts, **up_experts, **down_experts;             /* [E] of gate, up, down */
    const fkv_tensor *gate_experts_bias, *up_experts_bias, *down_experts_bias; /* [E, ffn_dim], [E, ffn_dim], [E, dim] */
} fkv_layer_tensors;

typedef struct fkv_packed_weights fkv_packed_weights;
typedef struct fkv_array_weights fkv_array_weights;

struct fkv_model {
    fkv_model_info info;
    fkv_model_config config;
    char *path; /* as it was given */
    const fkv_model_backend *backend;
    const fkv_architecture *architecture;
    const fkv_hparams *hparams;
    float embedding_scale;
    float residual_scale;
    float query_scale;
    fkv_layer_tensors *tensors;   /* [n_layers] */
    const fkv_tensor *embedding;  /* [n_vocab, dim] */
    const fkv_tensor *output;     /* [n_vocab, dim]; the embedding where the file has none of its own */
    const fkv_tensor *final_norm; /* [dim] */
    const fkv_tensor *final_norm_bias;
    const fkv_tensor *inputs;      /* [n_vocab, n_layers input_dim] what each layer reads of a token, or NULL */
    const fkv_tensor *inputs_proj; /* [n_layers input_dim, dim] what it reads of the embedding */
    const fkv_tensor *inputs_norm; /* [input_dim] of that */
    float *sinks;                  /* [n_layers, H] learned logits, or NULL */
    fkv_tensor *views;             /* [n_views] parts of fused tensors */
    const fkv_tensor **experts;    /* what the layers' lists of experts lie in */
    uint64_t mapped_bytes;         /* of what is used where the file is mapped */
    uint64_t touched_bytes;        /* of that, what one token reads */
    uint64_t room_bytes;           /* of each thread, to make panels in of what is mapped */
    uint64_t room_scratch;         /* of those */
    fkv_packed_weights *packed;    /* the CPU's, else NULL */
    fkv_array_weights *arrays;     /* MLX's, else NULL */
    fkv_weights *weights;
    fkv_tokenizer *tokenizer;
    fkv_chat *chat;
};

#endif
