/* A loaded model: the tensors of each layer, the vocabulary, and the weights in the backend's format.
 *
 * fkv_model_load() creates a model, which is read-only afterwards. All backends share the code that locates tensors and checks
 * their shapes. packed_weights.h declares the weights of the CPU backend, and src/model/mlx contains those of MLX.
 */
#ifndef FKV_MODEL_STATE_H
#define FKV_MODEL_STATE_H

#include "../text/chat/chat.h"
#include "../text/tokenizer/tokenizer.h"
#include "architecture.h"
#include "model_backend.h"

/* Tensors of one layer. NULL marks a tensor that the layer does not have. Parts of a fused tensor are views of its rows. */
typedef struct fkv_layer_tensors {
    /* q: [H * D, dim]; k and v: [G * D, dim]. Layers that read the keys and values of another layer have only q */
    const fkv_tensor *q, *k, *v;
    const fkv_tensor *o;         /* [dim, H * D] */
    const fkv_tensor *attn_gate; /* [H * D, dim] */
    const fkv_tensor *gate, *up; /* [ffn_dim, dim]; a feed-forward block without a gate has only `up` */
    const fkv_tensor *down;      /* [dim, ffn_dim] */
    const fkv_tensor *q_bias, *k_bias, *v_bias, *o_bias;
    const fkv_tensor *gate_bias, *up_bias, *down_bias;
    const fkv_tensor *q_norm,
        *k_norm; /* weights: [D] if heads are normalized separately; [H * D] and [G * D] if whole rows are normalized */
    const fkv_tensor *attn_norm, *ffn_norm; /* [dim] */
    const fkv_tensor *attn_norm_bias, *ffn_norm_bias;
    const fkv_tensor *post_attn_norm, *post_ffn_norm;
    const fkv_tensor *out_scale;               /* [1] */
    const fkv_tensor *input_gate, *input_proj; /* per-layer inputs: gate [input_dim, dim] and projection [dim, input_dim] */
    const fkv_tensor *input_norm;              /* [dim] */
    const fkv_tensor *sinks;                   /* [H] */

    /* Tensors of recurrent layers. Such layers have no q, k, v and o unless attention runs in parallel. In KDA layers, q, k and v
     * replace mixer_in. C is the number of channels of the convolution. */
    const fkv_tensor *mixer_out;      /* [dim, n_v_heads * v_dim] output projection; in a short convolution [dim, dim] */
    const fkv_tensor *mixer_out_bias; /* [dim] */
    const fkv_tensor *mixer_in; /* [C, dim] projection to the input of the convolution; for a short convolution, [3 * dim, dim]:
                                   projections to B, C and x */
    const fkv_tensor *mixer_in_bias; /* [3 * dim] */
    const fkv_tensor *mixer_gate;    /* [n_v_heads * v_dim, dim] output gate of a delta net; [n_v_heads * v_dim, v_dim] in KDA */
    const fkv_tensor *gate_low;      /* [v_dim, dim] KDA: low-rank projection to the input of mixer_gate */
    const fkv_tensor *alpha_low;     /* [k_dim, dim] KDA: low-rank projection to the input of alpha */
    const fkv_tensor *mixer_fused; /* mixer_in and mixer_gate in one tensor, grouped by key head: rows for the query, the key, the
                                      values and the gates, in this order */
    const fkv_tensor *alpha, *beta;    /* [n_v_heads, dim] projections to the decay and write strength of a delta net; in KDA,
                                          alpha is [n_v_heads * k_dim, k_dim] */
    const fkv_tensor *beta_alpha;      /* beta and alpha in one tensor, grouped by key head: rows for beta, then rows for alpha */
    const fkv_tensor *conv;            /* [C, n_taps]; in KDA, of the query channels only: [n_v_heads * k_dim, n_taps] */
    const fkv_tensor *conv_k, *conv_v; /* KDA: convolutions of the keys and the values, or NULL */
    const fkv_tensor *conv_bias;       /* [C] */
    const fkv_tensor *decay_log;       /* [n_v_heads] logarithms of the decay rates */
    const fkv_tensor *decay;           /* [n_v_heads] negated decay rates; replaces decay_log in GGUF files */
    const fkv_tensor *alpha_bias;      /* [n_v_heads]; in KDA [n_v_heads * k_dim] */
    const fkv_tensor *skip;            /* [n_v_heads] Mamba-2: factors of the skip connection from input to output */
    const fkv_tensor *mixer_norm;      /* output norm weights: [v_dim], in Mamba-2 [n_v_heads * v_dim] */
    /* Tensors of latent attention. q is [H * (nope_dim + rope_dim), dim], or [H * (nope_dim + rope_dim), q_dim] if q_a exists.
     * The projections from the latent vector are either kv_b, or k_b and v_b. */
    const fkv_tensor *q_a, *q_a_bias; /* [q_dim, dim] */
    const fkv_tensor *q_a_norm;       /* [q_dim] */
    const fkv_tensor *kv_a;           /* projection to the latent vector and the RoPE key: [latent dim + rope_dim, dim] */
    const fkv_tensor *kv_a_bias;
    const fkv_tensor *kv_a_norm; /* [latent dim] */
    const fkv_tensor *kv_b;      /* projection from the latent vector to keys and values: [H * (nope_dim + v_dim), latent dim] */
    const fkv_tensor *k_b, *v_b; /* k_b: [H * latent dim, nope_dim], each head transposed; v_b: [H * v_dim, latent dim] */
    const fkv_tensor *router; /* [E, dim] router matrix; in layers with a router, gate, up and down belong to the shared expert or
                                 the dense feed-forward block, and are NULL if the layer has neither */
    const fkv_tensor *router_scale, *expert_scales; /* [dim], [E] */
    const fkv_tensor *experts_norm; /* [dim] input norm of the experts if they run in parallel with a dense feed-forward block,
                                       whose input norm is ffn_norm */
    const fkv_tensor *post_dense_norm, *post_experts_norm; /* [dim] output norms of the dense feed-forward block and of the
                                                              experts, applied before the two outputs are added */
    const fkv_tensor *router_correction; /* [E] corrections, added to the expert scores only to select experts */
    const fkv_tensor *shared_gate;       /* [1, dim] gate of the shared expert, whose matrices are `gate`, `up` and `down` */
    const fkv_tensor *router_bias;       /* [E] */
    const fkv_tensor *latent_down, *latent_up; /* before the experts: [latent_dim, dim]; after the experts: [dim, latent_dim] */
    const fkv_tensor **gate_experts, **up_experts, **down_experts; /* [E], one per expert; gate_experts is NULL without a gate */
    const fkv_tensor *gate_experts_bias, *up_experts_bias, *down_experts_bias; /* gate and up: [E, expert_dim]; down: [E, dim] */
} fkv_layer_tensors;

/* Parameters of the xIELU activation, which is alpha_p * x^2 + beta * x if x > 0, and otherwise (exp(min(x, eps)) - 1 - x) *
 * alpha_n + beta * x.
 */
typedef struct fkv_xielu {
    float alpha_p, alpha_n, beta, eps;
} fkv_xielu;

typedef struct fkv_packed_weights fkv_packed_weights;
typedef struct fkv_array_weights fkv_array_weights;

struct fkv_model {
    fkv_model_info info;
    fkv_model_config config;
    char *path; /* path passed to fkv_model_load() */
    const fkv_model_backend *backend;
    const fkv_architecture *architecture;
    const fkv_hparams *hparams;
    float embedding_scale;
    float residual_scale;
    float query_scale;
    fkv_layer_tensors *tensors;   /* [n_layers] */
    const fkv_tensor *embedding;  /* [n_vocab, dim] */
    const fkv_tensor *output;     /* [n_vocab, dim] output matrix; equal to `embedding` if the embeddings are tied */
    const fkv_tensor *final_norm; /* [dim] */
    const fkv_tensor *final_norm_bias;
    const fkv_tensor *output_bias; /* [n_vocab] */
    const fkv_tensor *inputs;      /* [n_vocab, n_layers * input_dim] per-layer token embeddings, or NULL */
    const fkv_tensor *inputs_proj; /* [n_layers * input_dim, dim] matrix that projects the embedding to the per-layer inputs */
    const fkv_tensor *inputs_norm; /* [input_dim] norm of the projected inputs */
    float *sinks;                  /* [n_layers, H] learned sink logits, or NULL */
    fkv_xielu *xielu;              /* [n_layers] parameters of FKV_XIELU, or NULL */
    fkv_tensor *views;             /* [n_views] views of parts of fused tensors */
    const fkv_tensor **experts;    /* array that holds gate_experts, up_experts and down_experts of all layers */
    uint64_t mapped_bytes;         /* size of the weights that the forward pass reads from the mapped file */
    uint64_t touched_bytes;        /* part of mapped_bytes that the forward pass of one token reads */
    uint64_t panel_bytes;          /* size of the per-thread buffers in which mapped weights are packed into panels */
    uint64_t panel_scratch_bytes;  /* part of panel_bytes that is used for temporary rows */
    fkv_packed_weights *packed;    /* CPU weights, or NULL */
    fkv_array_weights *arrays;     /* MLX weights, or NULL */
    fkv_weights *weights;
    fkv_tokenizer *tokenizer;
    fkv_chat *chat;
};

/* Checks all hyperparameters. Returns FKV_UNSUPPORTED if one of them is out of range. */
fkv_status fkv_hparams_check(const fkv_hparams *hparams);

/* Finds the model's tensors and sets the tensor fields. The fields hparams, architecture and weights must be set. */
fkv_status fkv_model_find_tensors(fkv_model *model);

#endif
