/* A mapped and validated weight file: hyperparameters, vocabulary and tensors in a common form for GGUF and safetensors. All
 * tensor data points into the mapping and has been bounds-checked; nothing is decoded or copied.
 */
#ifndef FKV_WEIGHTS_H
#define FKV_WEIGHTS_H

#include "../../base/base.h"
#include "../../base/printable.h"
#include "../../text/vocab/vocab_source.h"

#include <flatkv/model.h>

typedef enum fkv_tensor_type {
    FKV_TENSOR_F32,
    FKV_TENSOR_F16,
    FKV_TENSOR_BF16,
    FKV_TENSOR_Q4_0,
    FKV_TENSOR_Q4_1,
    FKV_TENSOR_Q5_0,
    FKV_TENSOR_Q8_0,
    FKV_TENSOR_Q4_K,
    FKV_TENSOR_Q6_K,
    FKV_TENSOR_Q5_1,
    FKV_TENSOR_Q2_K,
    FKV_TENSOR_Q3_K,
    FKV_TENSOR_Q5_K,
    FKV_TENSOR_IQ4_NL,
    FKV_TENSOR_IQ4_XS,
    FKV_TENSOR_MXFP4,
    FKV_TENSOR_NVFP4,
    FKV_TENSOR_IQ1_S,
    FKV_TENSOR_IQ1_M,
    FKV_TENSOR_IQ2_XXS,
    FKV_TENSOR_IQ2_XS,
    FKV_TENSOR_IQ2_S,
    FKV_TENSOR_IQ3_XXS,
    FKV_TENSOR_IQ3_S,
    FKV_TENSOR_TQ1_0,
    FKV_TENSOR_TQ2_0,
    FKV_N_BLOCK_TYPES, /* number of GGUF types */
    FKV_TENSOR_MLX_AFFINE = FKV_N_BLOCK_TYPES,
    FKV_TENSOR_MLX_MXFP4,
    FKV_TENSOR_MLX_NVFP4,
    FKV_TENSOR_MLX_MXFP8,
    FKV_TENSOR_AWQ, /* AWQ, GPTQ and FP8: see linear_codes.h */
    FKV_TENSOR_GPTQ,
    FKV_TENSOR_FP8,
    FKV_TENSOR_U8,   /* the following types occur only in parts of quantized weights, while a file is read */
    FKV_TENSOR_U32,  /* packed codes (MLX) */
    FKV_TENSOR_I32,  /* packed codes and zero points (AWQ, GPTQ) */
    FKV_TENSOR_E4M3, /* 8-bit floats with separate scales */
    FKV_N_TENSOR_TYPES
} fkv_tensor_type;

/* Block layout of a tensor type. */
typedef struct fkv_tensor_format {
    const char *name; /* "Q4_K" */
    uint32_t block_cols;
    uint32_t block_bytes;
} fkv_tensor_format;

FKV_INTERNAL const fkv_tensor_format *fkv_tensor_format_of(fkv_tensor_type type);

enum { FKV_MAX_TENSOR_NAME = 128 };

typedef struct fkv_tensor {
    char name[FKV_MAX_TENSOR_NAME]; /* printable GGUF name, also for safetensors files: "blk.3.attn_q.weight" */
    fkv_tensor_type type;
    uint32_t n_rows;     /* 1 for a vector */
    uint32_t n_cols;     /* columns are contiguous in memory unless col_step is not 0 */
    const uint8_t *data; /* [n_rows, row_bytes], possibly unaligned: a safetensors header may have any length */
    uint64_t row_bytes;
    uint64_t col_step; /* stride between columns, in bytes, if this is a strided view of a float tensor; otherwise 0 */

    /* MLX types: codes, scales and biases are stored separately. */
    uint32_t bits;              /* number of bits per code; 0 if the tensor does not have an MLX type */
    uint32_t group;             /* number of columns that share a scale */
    fkv_tensor_type scale_type; /* type of the scales: F32, F16, BF16 or U8 */
    const uint8_t *scales;      /* [n_rows, n_cols / group] */
    const uint8_t *biases;      /* [n_rows, n_cols / group] biases, or NULL */
    uint64_t scale_row_bytes;   /* stride between rows of scales, in bytes */

    /* AWQ, GPTQ and FP8: rows are not contiguous. */
    const struct fkv_linear_codes *linear; /* NULL for all other types; otherwise, row_bytes is the average size of a row */
    uint32_t first_row;                    /* index of the first row of a view */
} fkv_tensor;

/* Returns a view of rows [first, first + n_rows), for example one matrix of a stack. */
fkv_tensor fkv_tensor_rows(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows);

/* Returns a view of rows first, first + 2, ... of an MLX tensor. row_bytes of the view is the stride between rows. */
fkv_tensor fkv_tensor_every_second_row(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows);

/* Returns the size of one row in bytes, which may be less than the stride between rows. */
FKV_INTERNAL uint64_t fkv_tensor_row_size(const fkv_tensor *tensor);

const char *fkv_tensor_type_name(fkv_tensor_type type); /* "Q4_K" */

/* ---- hyperparameters ---- */

/* RoPE scaling methods, which extend the context beyond the original training length. */
typedef enum fkv_rope_scaling { FKV_ROPE_LINEAR, FKV_ROPE_LLAMA3, FKV_ROPE_YARN, FKV_ROPE_LONG } fkv_rope_scaling;

typedef struct fkv_rope {
    fkv_rope_scaling scaling;
    float base;                 /* 0: not specified */
    float factor;               /* 1: no scaling */
    float attention_factor;     /* factor applied to cosines and sines; 0 if it is derived from the scaling factor */
    float low_freq, high_freq;  /* llama3 */
    float beta_fast, beta_slow; /* yarn */
    float mscale, mscale_all;   /* yarn: mscale and mscale_all_dim; 0 if not specified */
    bool yarn_unrounded;        /* yarn: true if the bounds of the interpolation ramp are not rounded to integers */
    uint32_t dim;               /* number of rotated dimensions per head; 0 if not specified */
    uint32_t original_context;  /* original training length, in tokens; 0 means the model's context length */
    uint32_t n_factors;
    const float *short_factors; /* [n_factors] divisors of the frequencies, or NULL */
    const float *long_factors;  /* [n_factors] divisors for sequences longer than original_context, or NULL */
} fkv_rope;

/* FKV_RELU2 is max(x, 0)^2. FKV_XIELU is quadratic above 0 and exponential below, with parameters that differ between layers. */
typedef enum fkv_activation { FKV_SILU, FKV_GELU_TANH, FKV_SWIGLU_CLAMPED, FKV_RELU2, FKV_XIELU } fkv_activation;
typedef enum fkv_norm_kind { FKV_NORM_RMS, FKV_NORM_LAYER } fkv_norm_kind;
/* Norms of queries and keys, in the order of the constants: none; RMS norm of each head; RMS norm of the whole row; layer norm of
 * each head, with separate weights for each head; RMS norm of each head without weights, only in layers with RoPE. */
typedef enum fkv_qk_norm {
    FKV_QK_PLAIN,
    FKV_QK_NORM_HEADS,
    FKV_QK_NORM_ROWS,
    FKV_QK_NORM_OWN_HEADS,
    FKV_QK_NORM_UNWEIGHTED
} fkv_qk_norm;

/* Kinds of recurrent layers. A recurrent layer replaces attention or runs in parallel with it. Its memory of a sequence is a
 * state of fixed size. */
typedef enum fkv_recurrence_kind {
    FKV_RECURRENCE_NONE,
    FKV_SHORT_CONV, /* gated short convolution (LFM2) */
    FKV_DELTA_NET,  /* gated delta net: linear attention with the delta rule and a decay per head (Qwen3-Next, Qwen3.5) */
    FKV_MAMBA2,     /* Mamba-2 state-space model (Granite 4, Nemotron-H, Falcon-H1) */
    FKV_KDA         /* Kimi Delta Attention: a gated delta net with a decay per key channel (Kimi Linear) */
} fkv_recurrence_kind;

/* Shape of the recurrent layers. All recurrent layers of a model have the same shape. */
typedef struct fkv_recurrence {
    uint32_t n_taps;               /* number of taps of the causal convolution, including the current token */
    uint32_t n_k_heads, n_v_heads; /* number of key heads and of value heads; n_v_heads / n_k_heads value heads share the query
                                      and key of one key head. In Mamba-2, n_k_heads is the number of groups of B and C */
    uint32_t k_dim, v_dim;         /* head dimensions; the state of a value head is [v_dim, k_dim] */
    float min_step, max_step;      /* Mamba-2: limits of the step size; a max_step of 0 means no upper limit */
    uint32_t n_norm_groups; /* Mamba-2: number of channel groups with separate output norms; 0 if outputs are not normalized */
    bool norm_may_miss;     /* Mamba-2: the norm weights may be missing from the file, in which case outputs are not normalized */
    bool norms_before_gate; /* Mamba-2: true if outputs are normalized before they are gated, false if after */
    float in_scales[5]; /* Mamba-2: factors applied to gates, values, keys, queries and step sizes before the convolution; all 0
                           if there is no scaling */
    float out_scale;    /* Mamba-2: factor applied to the output; 0 means 1 */
    bool tiled;         /* delta net: value head h belongs to key head h % n_k_heads instead of h / (n_v_heads / n_k_heads) */
} fkv_recurrence;

/* Shape of multi-head latent attention (MLA). Keys and values of all heads are projections of one latent vector per token, and
 * all heads share one key part with RoPE. */
typedef struct fkv_latent {
    uint32_t dim;      /* number of latent channels; 0 if the model has no latent attention */
    uint32_t rope_dim; /* number of query and key channels with RoPE */
    uint32_t nope_dim; /* number of query and key channels per head without RoPE */
    uint32_t v_dim;    /* number of value channels per head */
    uint32_t q_dim;    /* dimension of the latent query vector; 0 if queries are projected directly */
    float norm_eps;    /* norm epsilon for latent vectors; 0 means the epsilon of the other norms */
} fkv_latent;

enum { FKV_MAX_TAPS = 8, FKV_MAX_STATE_DIM = 256 };

/* Structural features of the layers. Defaults come from the architecture table; files may override them. */
typedef struct fkv_features {
    fkv_norm_kind norm;
    fkv_qk_norm qk_norm;      /* norms applied to q and k */
    bool qk_norm_after_rope;  /* true if q and k are normalized after RoPE, false if before */
    bool attn_gate;           /* the attention output is multiplied by the sigmoid of a projection of the attention input */
    bool plain_ffn;           /* feed-forward blocks and experts have no gate: down(activation(up(x))) */
    bool no_pre_norms;        /* attention and feed-forward blocks read the residual stream without normalizing it */
    bool post_norms;          /* the outputs of attention and feed-forward blocks are normalized before the residual addition */
    bool parallel;            /* attention and feed-forward blocks read the same normalized input */
    bool qkv_bias;            /* biases of q, k and v are required; otherwise they are optional */
    bool window_sinks;        /* if `sinks` is also set, only windowed layers have attention sinks */
    bool sinks;               /* every query head has an attention sink (learned extra logit) */
    bool parallel_experts;    /* experts run in parallel with a dense feed-forward block, and both have separate norms */
    bool norm_experts;        /* routing weights of the selected experts are normalized to a sum of 1 */
    bool sigmoid_router;      /* expert scores are the sigmoids of the router logits, not a softmax over all experts */
    bool groups_by_max;       /* the score of a group is the largest score of its experts, not the sum of the two largest */
    bool sparse_mixer;        /* each token uses two experts, each weighted by a softmax over the experts with similar logits */
    bool experts_scale_input; /* routing weights scale the inputs of the experts, not their outputs */
    bool separate_local_rope; /* windowed layers have a separate, unscaled RoPE */
    bool no_rope_full;        /* full-attention layers have no RoPE */
    bool no_window_ropes_all; /* if the file states no window, no_rope_full is ignored, and all layers have RoPE */
    bool yarn_unrounded;      /* see fkv_rope */
    bool embedding_sqrt_dim;  /* embeddings are multiplied by sqrt(dim) */
    bool v_norm;              /* each head of v is RMS-normalized, without weights */
    bool k_may_be_v;          /* in layers without a V matrix, the values are the keys before norm and RoPE */
    bool layer_scales;        /* the residual stream may be multiplied by a scale at the end of each layer */
    bool gate_in_q;           /* like attn_gate, but each head of q has 2 * head_dim rows: first the query, then the gate */
    bool parallel_mixers;     /* recurrent layers also have attention, which reads the same input */
    bool single_blocks;       /* a layer is either a mixer (attention or recurrence) or a feed-forward block, with one norm */
    fkv_recurrence_kind recurrence; /* kind of recurrence in layers with the flag FKV_LAYER_RECURRENT */
    fkv_activation activation;
    uint32_t no_rope_period; /* every n-th layer has no RoPE; 0 if all layers have RoPE */
    uint32_t window_period; /* every n-th layer has full attention; 0 means all layers, and FKV_NO_PERIOD means none. Used only if
                               the file states a window but no layer pattern */
} fkv_features;

enum { FKV_NO_PERIOD = UINT32_MAX, FKV_MAX_EXPERTS_USED = 64, FKV_MAX_EXPERTS = 1024, FKV_MAX_EXPERT_GROUPS = 64 };

/* Flags of fkv_hparams.layers. */
enum {
    FKV_LAYER_WINDOW = 1,
    FKV_LAYER_NO_ROPE = 2,
    FKV_LAYER_DENSE = 4,     /* dense layer in a model whose other layers have experts */
    FKV_LAYER_RECURRENT = 8, /* layer with a recurrent state, instead of attention or in parallel with it (parallel_mixers) */
    FKV_LAYER_NO_MIXER = 16, /* layer that consists of only a feed-forward block */
    FKV_LAYER_NO_FFN = 32    /* layer without a feed-forward block */
};

/* Shape of one layer. */
typedef struct fkv_layer_shape {
    uint32_t n_kv_heads, head_dim, ffn_dim; /* 0 means the value in fkv_hparams */
    uint32_t kv_layer; /* index of the layer whose keys and values this layer attends to: this layer or an earlier layer */
    uint32_t page_layer, state_layer; /* indices of the cache layers that hold the keys and values this layer reads (page_layer)
                                         and its recurrent state (state_layer) */
} fkv_layer_shape;

/* Scale factors of Falcon-H1 that must still be applied if the folder was converted by MLX. MLX has multiplied all other factors
 * into the weights. */
typedef struct fkv_mlx_scales {
    float query_scale, value_scale; /* see fkv_hparams */
    float logit_scale;              /* used only if the embeddings are tied */
} fkv_mlx_scales;

/* Hyperparameters of a model. Strings live as long as the weights. */
typedef struct fkv_hparams {
    const char *architecture; /* architecture name: general.architecture of a GGUF file, or the architecture that corresponds to
                                 model_type */
    const char *name;
    uint32_t n_layers, dim, ffn_dim, n_q_heads, n_kv_heads, head_dim, n_vocab, context;
    uint32_t v_dim;              /* dimension of a value head, at most the head dimension; 0 means the head dimension */
    uint32_t n_shared_kv_layers; /* number of layers at the end of the model that store no keys and values, but attend to those of
                                    an earlier layer */
    uint32_t input_dim;          /* dimension of per-layer inputs; 0 if there are none */
    uint32_t n_experts, n_experts_used; /* 0 if all feed-forward blocks are dense */
    uint32_t expert_dim;                /* feed-forward dimension of an expert; 0 means ffn_dim */
    uint32_t latent_dim;      /* dimension of the projected inputs and outputs of experts; 0 if there is no projection */
    uint32_t shared_dim;      /* feed-forward dimension of the shared expert; 0 if there is none */
    uint32_t n_dense;         /* number of leading layers without experts */
    uint32_t n_expert_groups; /* number of groups; if not 0, experts are selected from the best n_expert_groups_used groups */
    uint32_t n_expert_groups_used;
    float experts_scale; /* factor applied to routing weights; 0 means 1 */
    uint32_t n_next;     /* number of multi-token prediction layers after the last layer; they are ignored */
    fkv_features features;
    float norm_eps;                 /* norm epsilon; 0 if not specified, in which case model.c rejects the model */
    fkv_rope rope;                  /* a base of 0 is replaced with the architecture's default */
    fkv_rope local_rope;            /* RoPE of windowed layers; if its base is 0, these layers use `rope` */
    uint32_t window;                /* sliding window of windowed layers; 0 if there is none */
    uint8_t layers[FKV_MAX_LAYERS]; /* FKV_LAYER_* flags of each layer */
    fkv_layer_shape shapes[FKV_MAX_LAYERS];
    fkv_recurrence recurrence; /* shape of the layers with FKV_LAYER_RECURRENT */
    fkv_latent latent;         /* shape of latent attention; models with it have one KV head with latent.dim channels per layer */
    float softcap;             /* soft cap for attention scores; 0 if there is none */
    float final_softcap;       /* soft cap for logits; 0 if there is none */
    float query_scale;         /* factor applied to attention scores; 0 if not specified */
    float embedding_scale;     /* factor applied to embeddings; 0 means 1 */
    float residual_scale; /* factor applied to the output of each block before it is added to the residual stream; 0 means 1 */
    float logit_scale;    /* factor applied to logits; 0 means 1 */
    float temperature;    /* queries are scaled by 1 + temperature * ln(1 + floor(position / temperature_context)) */
    uint32_t temperature_context;
    bool temperature_of_no_rope; /* temperature applies only to layers without RoPE and is computed from position + 1 */
    uint32_t attention_chunk;    /* chunk size, in tokens, of layers with chunked attention; 0 if there are none */
    const float *xielu;          /* [4, n_layers] alpha_p, alpha_n, beta and eps of FKV_XIELU in GGUF files, or NULL */
    float mixer_jitter; /* with sparse_mixer, two logits are similar if their relative difference is at most twice this value */
    float value_scale;  /* factor applied to values; 0 means 1 */
    fkv_mlx_scales mlx_scales;        /* these scales replace those in this struct if the folder was converted by MLX */
    float gate_scale, down_scale;     /* factors applied to the gate and to the output of a feed-forward block; 0 means 1 */
    float swiglu_alpha, swiglu_limit; /* parameters of FKV_SWIGLU_CLAMPED */
    bool rope_interleaved;            /* RoPE rotates channel pairs (2i, 2i+1) instead of (i, i + D/2) */
    bool norm_plus_one;               /* the file stores each norm weight minus 1 (Gemma in safetensors) */
} fkv_hparams;

typedef struct fkv_weights fkv_weights;

/* Opens a .gguf file or a model folder. Returns the statuses listed in flatkv/model.h. Defined in weights_open.c, the only file
 * that depends on all formats. */
fkv_status fkv_weights_open(const char *path, fkv_weights **weights);
void fkv_weights_close(fkv_weights *weights);

const fkv_hparams *fkv_weights_hparams(const fkv_weights *weights);
const fkv_vocab_source *fkv_weights_vocab(const fkv_weights *weights);

uint32_t fkv_weights_n_tensors(const fkv_weights *weights);
const fkv_tensor *fkv_weights_tensor(const fkv_weights *weights, uint32_t index);
const fkv_tensor *fkv_weights_find(const fkv_weights *weights, const char *name); /* NULL if missing */

/* Returns true if the weights were read from a config.json alone, without tensors. */
bool fkv_weights_is_config(const fkv_weights *weights);

uint64_t fkv_weights_file_bytes(const fkv_weights *weights);

/* Computes the identity of the weights: a SHA-256 of the hyperparameters and of every tensor's name, type, shape and sampled
 * bytes. The identity does not depend on how a model is split into files. Returns FKV_UNSUPPORTED if libcrypto fails. */
fkv_status fkv_weights_id(const fkv_weights *weights, uint8_t id[32]);

/* Releases the mapped memory pages of a tensor that has been repacked (madvise). */
FKV_INTERNAL void fkv_weights_release(const fkv_weights *weights, const fkv_tensor *tensor);

#endif
