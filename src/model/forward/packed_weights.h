/* Weights of the CPU backend. One anonymous mapping holds all repacked matrices, and the norms and biases converted to floats.
 *
 * Matrix rows and activation rows are zero-padded to a multiple of 32 columns (fkv_packed_pad). Experts, and an embedding that
 * is not also the output matrix, are read from the mapped file. Experts are packed into panels when a row is routed to them
 * (fkv_matrix_rows).
 */
#ifndef FKV_PACKED_WEIGHTS_H
#define FKV_PACKED_WEIGHTS_H

#include "../model.h"
#include "tensor_matrix.h"

/* Packed weights of one layer. Missing vectors are NULL and missing matrices are zeroed. */
typedef struct fkv_packed_layer {
    fkv_matrix q, k, v;   /* q: [H * D, dim]; k and v: [G * D, dim] */
    fkv_matrix o;         /* [dim, H * D] */
    fkv_matrix attn_gate; /* [H * D, dim] */
    fkv_matrix gate, up;
    fkv_matrix down;
    float *q_bias, *k_bias, *v_bias, *o_bias;
    float *gate_bias, *up_bias, *down_bias;
    float *q_norm, *k_norm;      /* [D] if heads are normalized separately; [H * D] and [G * D] if whole rows are normalized */
    float *attn_norm, *ffn_norm; /* [dim] */
    float *attn_norm_bias, *ffn_norm_bias;
    float *post_attn_norm, *post_ffn_norm;
    float *out_scale;                             /* [1] */
    fkv_matrix mixer_in, mixer_gate, mixer_fused; /* recurrent layers; see fkv_layer_tensors */
    fkv_matrix mixer_out;
    fkv_matrix alpha, beta, beta_alpha;
    fkv_matrix alpha_low, gate_low;
    float *mixer_in_bias, *mixer_out_bias;
    float *conv;                 /* [n_taps, C] transposed taps of the convolution */
    float *conv_bias;            /* [C] or NULL */
    float *decay;                /* [n_v_heads] negated decay rates */
    float *alpha_bias;           /* [n_v_heads]; in KDA [n_v_heads * k_dim] */
    float *skip;                 /* [n_v_heads] */
    float *mixer_norm;           /* output norm weights: [v_dim], in Mamba-2 [n_v_heads * v_dim] or NULL */
    fkv_matrix q_a, kv_a;        /* latent attention; see fkv_layer_tensors */
    fkv_matrix *k_up, *v_up;     /* [H] matrices, one per head: transposed key projection [latent dim, nope_dim], value projection
                                    [v_dim, latent dim] */
    float *q_a_bias, *kv_a_bias; /* [q_dim] and [latent dim + rope_dim] */
    float *q_a_norm, *kv_a_norm; /* [q_dim], [latent dim] */
    fkv_matrix input_gate, input_proj; /* per-layer inputs: gate [input_dim, dim] and projection [dim, input_dim] */
    float *input_norm;                 /* [dim] */
    fkv_matrix router;                 /* [E, dim] */
    float *router_norm;   /* [dim] norm of the router's input; NULL if the router reads the same input as the experts */
    float *expert_scales; /* [E] factors applied to the routing weights */
    float *experts_norm, *post_dense_norm, *post_experts_norm; /* [dim] */
    float *router_correction;          /* [E] corrections, added to the expert scores only to select experts, or NULL */
    fkv_matrix shared_gate;            /* [1, dim] gate of the shared expert */
    float *router_bias;                /* [E] */
    fkv_matrix latent_down, latent_up; /* projections before the experts, [latent_dim, dim], and after them, [dim, latent_dim] */
    fkv_matrix *gate_experts, *up_experts, *down_experts; /* [E] routed experts; `gate`, `up` and `down` hold the shared expert or
                                                             the parallel dense feed-forward block, if the layer has one */
    float *gate_experts_bias, *up_experts_bias;           /* [E, expert_dim] */
    float *down_experts_bias;                             /* [E, dim] */
} fkv_packed_layer;

struct fkv_packed_weights {
    fkv_packed_layer *layers; /* [n_layers] */
    fkv_matrix *experts;      /* array that holds the expert matrices of all layers, or NULL */
    fkv_matrix *heads;        /* array that holds the per-head matrices of latent attention in all layers, or NULL */
    float *final_norm;        /* [dim] */
    float *final_norm_bias;   /* [dim] or NULL */
    float *output_bias;       /* [n_vocab] or NULL */
    fkv_matrix output;        /* [n_vocab, dim]; also the embedding if the embeddings are tied */
    fkv_matrix inputs_proj;   /* [n_layers * input_dim, dim]; the per-layer token embeddings stay in the mapped file */
    float *inputs_norm;       /* [input_dim] */
    float *ones;              /* [largest head_dim] vector of ones, the weights of norms without learned weights, or NULL */
    void *map;                /* mapping of info.packed_bytes bytes */
};

/* Implementations of the fkv_model_backend functions. */
fkv_status fkv_packed_weights_count(fkv_model *model);
fkv_status fkv_packed_weights_load(fkv_model *model);
void fkv_packed_weights_unload(fkv_model *model);

/* Writes the scaled embedding of a token. out: [padded dim]; the padding may be zeroed or left unchanged. */
void fkv_packed_embed(const fkv_model *model, uint32_t token, float *out);

#endif
