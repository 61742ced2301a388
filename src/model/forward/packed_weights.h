/* Weights as the CPU runs them: every matrix repacked into one anonymous map, every norm and bias as floats behind them.
 *
 * Columns of a matrix are padded to a multiple of 32 with zeros, so the rows of activations it meets must be too
 * (fkv_packed_pad). Where the output is a matrix of its own, the embedding is only looked up and stays where the file is mapped.
 * So do experts, whose panels are made where a row is routed to them (fkv_matrix_rows).
 */
#ifndef FKV_PACKED_WEIGHTS_H
#define FKV_PACKED_WEIGHTS_H

#include "../model.h"
#include "tensor_matrix.h"

/* Vectors a layer has not are NULL. */
typedef struct fkv_packed_layer {
    fkv_matrix q, k, v; /* [H D, dim], [G D, dim], [G D, dim] */
    fkv_matrix o;       /* [dim, H D] */
    fkv_matrix gate, up;
    fkv_matrix down;
    float *q_bias, *k_bias, *v_bias, *o_bias;
    float *gate_bias, *up_bias, *down_bias;
    float *q_norm, *k_norm;      /* [D], or [H D] and [G D] */
    float *attn_norm, *ffn_norm; /* [dim] */
    float *attn_norm_bias, *ffn_norm_bias;
    float *post_attn_norm, *post_ffn_norm;
    float *out_scale;                  /* [1] */
    fkv_matrix input_gate, input_proj; /* [input_dim, dim], [dim, input_dim]; without inputs all zeros */
    float *input_norm;                 /* [dim] */
    fkv_matrix router;                 /* [E, dim]; without experts all zeros */
    float *router_norm;                /* [dim] of a norm before the router, or NULL: it reads what experts read */
    float *expert_scales;              /* [E] of their shares */
    float *experts_norm, *post_dense_norm, *post_experts_norm; /* [dim] */
    float *router_correction;                                  /* [E] of the scores that experts are chosen by, or NULL */
    fkv_matrix shared_gate;                                    /* [1, dim] of gate, up and down beside experts; or all zeros */
    float *router_bias;                                        /* [E] */
    fkv_matrix *gate_experts, *up_experts, *down_experts; /* [E]; gate, up and down are all zeros then, unless both are there */
    float *gate_experts_bias, *up_experts_bias;           /* [E, expert_dim] */
    float *down_experts_bias;                             /* [E, dim] */
} fkv_packed_layer;

struct fkv_packed_weights {
    fkv_packed_layer *layers; /* [n_layers] */
    fkv_matrix *experts;      /* what the layers' experts lie in, or NULL */
    float *final_norm;        /* [dim] */
    float *final_norm_bias;   /* [dim] or NULL */
    fkv_matrix output;        /* [n_vocab, dim]; its rows are the embedding too where the model is tied */
    fkv_matrix inputs_proj;   /* [n_layers input_dim, dim]; the table of tokens stays where the file is mapped */
    float *inputs_norm;       /* [input_dim] */
    float *ones;              /* [head_dim] of the widest heads: the weight of a norm that has none, or NULL */
    void *map;                /* one map, info.packed_bytes */
};

/* As fkv_model_backend has them. */
fkv_status fkv_packed_weights_count(fkv_model *model);
fkv_status fkv_packed_weights_load(fkv_model *model);
void fkv_packed_weights_unload(fkv_model *model);

/* The embedding of a token, scaled as the architecture wants. out: [dim padded]; what is padded is left as it is or zeroed. */
void fkv_packed_embed(const fkv_model *model, uint32_t token, float *out);

#endif
