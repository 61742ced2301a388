/* A weight file, mapped and checked: hyperparameters, vocabulary and tensors of GGUF and of safetensors with config.json in
 * one form. Everything that comes out of here lies inside the mapping and was checked against it; nothing is expanded.
 */
#ifndef FKV_WEIGHTS_H
#define FKV_WEIGHTS_H

#include "../../base/base.h"
#include "../../base/shown.h"
#include "text_steps.h"

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
    FKV_N_BLOCK_TYPES, /* those of GGUF */
    FKV_TENSOR_MLX_AFFINE = FKV_N_BLOCK_TYPES,
    FKV_TENSOR_MLX_MXFP4,
    FKV_TENSOR_MLX_NVFP4,
    FKV_TENSOR_MLX_MXFP8,
    FKV_TENSOR_AWQ, /* these three: linear_codes.h */
    FKV_TENSOR_GPTQ,
    FKV_TENSOR_FP8,
    FKV_TENSOR_U8,   /* from here on parts of a weight, until they are joined: no tensor of open weights */
    FKV_TENSOR_U32,  /* words of codes, until they are described */
    FKV_TENSOR_I32,  /* words of codes and zeros */
    FKV_TENSOR_E4M3, /* floats of 8 bits, whose scales lie apart */
    FKV_N_TENSOR_TYPES
} fkv_tensor_type;

/* The blocks that rows of a type are made of. */
typedef struct fkv_tensor_format {
    const char *name; /* "Q4_K" */
    uint32_t block_cols;
    uint32_t block_bytes;
} fkv_tensor_format;

FKV_SEAM const fkv_tensor_format *fkv_tensor_format_of(fkv_tensor_type type);

enum { FKV_MAX_TENSOR_NAME = 128 };

typedef struct fkv_tensor {
    char name[FKV_MAX_TENSOR_NAME]; /* GGUF's names for both kinds of file: "blk.3.attn_q.weight"; printable */
    fkv_tensor_type type;
    uint32_t n_rows;     /* 1 for a vector */
    uint32_t n_cols;     /* consecutive in memory */
    const uint8_t *data; /* [n_rows, row_bytes], at any address: MLX writes headers of any length */
    uint64_t row_bytes;
    uint64_t col_step; /* 0 but in a view of floats: bytes from one number of a row to the next; row_bytes then leads to the next
                          row and is not its size */

    /* MLX's types, whose parts lie apart: */
    uint32_t bits;              /* of a code; 0: another type */
    uint32_t group;             /* columns that share a scale */
    fkv_tensor_type scale_type; /* F32, F16, BF16 or U8 */
    const uint8_t *scales;      /* [n_rows, n_cols / group] */
    const uint8_t *biases;      /* the same, or NULL */
    uint64_t scale_row_bytes;   /* from one row of scales to the next */

    /* AWQ, GPTQ and FP8, whose rows have no place of their own: */
    const struct fkv_linear_codes *linear; /* or NULL; row_bytes is then a row's share */
    uint32_t first_row;                    /* of the whole, in a view */
} fkv_tensor;

/* Rows [first, first + n_rows) of a tensor, as a tensor: a matrix of a stack. */
fkv_tensor fkv_tensor_rows(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows);

/* Rows first, first + 2, ... of one of MLX's types: row_bytes then leads to the next row and is not its size. */
fkv_tensor fkv_tensor_every_second_row(const fkv_tensor *tensor, uint32_t first, uint32_t n_rows);

/* What a row of its own takes, wherever the next one lies. */
FKV_SEAM uint64_t fkv_tensor_row_size(const fkv_tensor *tensor);

const char *fkv_tensor_type_name(fkv_tensor_type type); /* "Q4_K" */

/* ---- what a model file says of itself ---- */

/* How frequencies are stretched beyond the context that a model was first trained for. */
typedef enum fkv_rope_scaling { FKV_ROPE_LINEAR, FKV_ROPE_LLAMA3, FKV_ROPE_YARN, FKV_ROPE_LONG } fkv_rope_scaling;

typedef struct fkv_rope {
    fkv_rope_scaling scaling;
    float base;                 /* 0: not said */
    float factor;               /* 1: none */
    float attention_factor;     /* of cosines and sines; 0: what the scaling makes of its factor */
    float low_freq, high_freq;  /* llama3 */
    float beta_fast, beta_slow; /* yarn */
    float mscale, mscale_all;   /* yarn; 0: not said */
    bool keeps_fractions;       /* yarn: the range of its ramp is not rounded */
    uint32_t dim;               /* numbers of a head that rotate; 0: not said */
    uint32_t original_context;  /* of all but linear; 0: the context */
    uint32_t n_factors;
    const float *short_factors; /* [n_factors] what each frequency is divided by, or NULL */
    const float *long_factors;  /* the same where a sequence may grow beyond original_context */
} fkv_rope;

typedef enum fkv_activation { FKV_SILU, FKV_GELU_TANH, FKV_SWIGLU_CLAMPED } fkv_activation;
typedef enum fkv_norm_kind { FKV_NORM_RMS, FKV_NORM_LAYER } fkv_norm_kind;
/* OWN_HEADS: a layer norm of each head, with weights of its own. */
typedef enum fkv_qk_norm { FKV_QK_PLAIN, FKV_QK_NORM_HEADS, FKV_QK_NORM_ROWS, FKV_QK_NORM_OWN_HEADS } fkv_qk_norm;

/* What layers do beside their sizes. An architecture is known for most of it; a file may say otherwise. */
typedef struct fkv_features {
    fkv_norm_kind norm;
    fkv_qk_norm qk_norm;     /* each head of q and k is normalized before it rotates, or all heads of a row at once */
    bool no_pre_norms;       /* attention and feed-forward read what layers add to as it is */
    bool post_norms;         /* what attention and feed-forward give is normalized before it is added */
    bool parallel;           /* attention and feed-forward read the same normalized row */
    bool qkv_bias;           /* q, k and v must have biases; others may have them */
    bool sinks;              /* every query head has a learned logit more */
    bool experts_beside;     /* experts, where there are any, beside a feed-forward, each with norms of its own */
    bool norm_experts;       /* the shares of the experts taken add up to 1 */
    bool sigmoid_router;     /* the score of an expert is a sigmoid, else a softmax over all */
    bool rope_by_kind;       /* windowed layers have a RoPE of their own, never scaled */
    bool no_rope_full;       /* where there are windowed layers, the others do not rotate */
    bool keeps_fractions;    /* of yarn */
    bool embedding_sqrt_dim; /* embeddings are multiplied by sqrt(dim) */
    bool v_norm;             /* each head of v is normalized, without a weight */
    bool k_may_be_v;   /* a layer without a matrix for v takes what the one for k gives, before it is normalized or rotates */
    bool layer_scales; /* what layers add to may be multiplied by a number behind each of them */
    fkv_activation activation;
    uint32_t no_rope_period; /* every layer of this period does not rotate; 0: all do */
    uint32_t window_period;  /* where a file has a window and no pattern: every layer of this period is full; 0: no layer has the
                                window, FKV_NO_PERIOD: all have it */
} fkv_features;

enum { FKV_NO_PERIOD = UINT32_MAX, FKV_MAX_EXPERTS_USED = 64, FKV_MAX_EXPERTS = 1024, FKV_MAX_EXPERT_GROUPS = 64 };

/* Of layers. */
enum { FKV_LAYER_WINDOW = 1, FKV_LAYER_NO_ROPE = 2 };

/* Of one layer. */
typedef struct fkv_layer_shape {
    uint32_t n_kv_heads, head_dim, ffn_dim; /* 0: as the model's */
    uint32_t kv_layer;                      /* whose pages it attends over: itself, or one before it that it shares them with */
} fkv_layer_shape;

/* The strings live as long as the weights. */
typedef struct fkv_hparams {
    const char *architecture; /* general.architecture or what model_type maps to */
    const char *name;
    uint32_t n_layers, dim, ffn_dim, n_q_heads, n_kv_heads, head_dim, n_vocab, context;
    uint32_t
        n_sharing; /* of the last layers have no keys and values: they attend over those of the last one of their kind before */
    uint32_t input_dim;                 /* of what each layer reads of a token beside what layers add to; 0: nothing */
    uint32_t n_experts, n_experts_used; /* 0: the feed-forward is one */
    uint32_t expert_dim;                /* of an expert's feed-forward; 0: ffn_dim */
    uint32_t shared_dim;                /* of one beside the experts, which every token goes through; 0: none */
    uint32_t n_dense;                   /* of the first layers have no experts */
    uint32_t n_expert_groups;           /* experts are chosen from the best n_expert_groups_used of them; 0: from all */
    uint32_t n_expert_groups_used;
    float experts_scale; /* of what the chosen ones give; 0 is 1 */
    uint32_t n_next;     /* layers behind the last that guess further tokens and are not read */
    fkv_features features;
    float norm_eps;                 /* 0: not said, which model.c refuses */
    fkv_rope rope;                  /* base 0 becomes 10000 */
    fkv_rope local_rope;            /* of windowed layers; base 0: as the others */
    uint32_t window;                /* 0: none */
    uint8_t layers[FKV_MAX_LAYERS]; /* FKV_LAYER_ of each */
    fkv_layer_shape shapes[FKV_MAX_LAYERS];
    float softcap;         /* of attention; 0: none */
    float final_softcap;   /* of logits; 0: none */
    float query_scale;     /* of the scores; 0: not said */
    float embedding_scale; /* these three: 0 is 1 */
    float residual_scale;  /* of what a layer adds */
    float logit_scale;
    float temperature; /* queries grow by this times ln(1 + floor(position / temperature_context)); 0: they do not */
    uint32_t temperature_context;
    float swiglu_alpha, swiglu_limit; /* of FKV_SWIGLU_CLAMPED */
    bool rope_interleaved;            /* pairs (2i, 2i+1) instead of (i, i + D/2) */
    bool norm_plus_one;               /* norm weights mean 1 + w: gemma in safetensors */
} fkv_hparams;

/* The vocabulary as the file has it; tokenizer.c makes sense of it. Strings are not 0-terminated; all lie inside the mapping or a
 * copy that lives as long as the weights. */
/* Of tokens that are found before anything else, as tokenizer.json has them. */
enum {
    FKV_TOKEN_LSTRIP = 1, /* white space before it belongs to it */
    FKV_TOKEN_RSTRIP = 2,
    FKV_TOKEN_SINGLE_WORD = 4, /* found only where no letter, mark, digit or connector is next to it */
    FKV_TOKEN_NORMALIZED = 8   /* found in the normalized text */
};

/* What a file says about sampling; said: which of the fields. */
enum { FKV_SAID_TEMPERATURE = 1, FKV_SAID_TOP_K = 2, FKV_SAID_TOP_P = 4, FKV_SAID_MIN_P = 8, FKV_SAID_REPETITION = 16 };

typedef struct fkv_sampling_source {
    unsigned said;
    uint32_t top_k;
    float temperature, top_p, min_p, repetition;
} fkv_sampling_source;

typedef struct fkv_vocab_source {
    fkv_bytes
        model; /* "gpt2": BPE over bytes, "llama": SentencePiece by scores, "gemma4": BPE over characters, "byte": 256 bytes */
    fkv_bytes pre;               /* tokenizer.ggml.pre, or empty */
    const fkv_text_steps *steps; /* NULL: those of `model` and `pre` */
    uint32_t n_tokens;
    const fkv_bytes *tokens;    /* [n_tokens] or NULL for byte */
    const float *scores;        /* [n_tokens] or NULL */
    const int32_t *types;       /* [n_tokens] or NULL: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte */
    const uint8_t *token_flags; /* [n_tokens] of FKV_TOKEN_*, or NULL */
    uint32_t n_merges;
    const fkv_bytes *merges;       /* [n_merges] "left right" or NULL */
    const fkv_bytes *merge_rights; /* [n_merges] or NULL; where there, merges holds the left halves alone */
    uint32_t bos, eos, eot, unk;   /* FKV_NO_TOKEN where not said */
    uint32_t n_ends;               /* more that end a text: lists of eos_token_id */
    uint32_t ends[FKV_MAX_END_TOKENS];
    bool add_bos;
    bool add_space_prefix;   /* spm; default true */
    bool whole_words;        /* a piece that is a token is taken as it is, without merges; GGUF: by `pre` */
    bool byte_fallback;      /* "gemma4" from tokenizer.json: what is no token becomes its bytes' tokens, else unk */
    bool fuse_unk;           /* unknowns side by side become one */
    bool leftmost;           /* of overlapping special tokens the leftmost, then the longest; else the longest first */
    fkv_bytes chat_template; /* or empty */
    fkv_sampling_source sampling;
} fkv_vocab_source;

/* One more token that ends a text; beyond FKV_MAX_END_TOKENS they are left out. */
void fkv_vocab_add_end(fkv_vocab_source *vocab, uint32_t token);

typedef struct fkv_weights fkv_weights;

/* path: a .gguf file, or a folder. Status as in flatkv/model.h; nothing is left open on failure. Defined in weights_open.c, which
 * alone knows all formats. */
fkv_status fkv_weights_open(const char *path, fkv_weights **weights);
void fkv_weights_close(fkv_weights *weights);

const fkv_hparams *fkv_weights_hparams(const fkv_weights *weights);
const fkv_vocab_source *fkv_weights_vocab(const fkv_weights *weights);

uint32_t fkv_weights_n_tensors(const fkv_weights *weights);
const fkv_tensor *fkv_weights_tensor(const fkv_weights *weights, uint32_t index);
const fkv_tensor *fkv_weights_find(const fkv_weights *weights, const char *name); /* NULL: not there */

uint64_t fkv_weights_file_bytes(const fkv_weights *weights);

/* SHA-256 over what tells weights apart: the architecture and its numbers, names, types, shapes and a sample of every tensor's
 * bytes; the same however a model is cut into files. FKV_UNSUPPORTED where libcrypto refuses. */
fkv_status fkv_weights_id(const fkv_weights *weights, uint8_t id[32]);

/* Tells the system that the mapped bytes of a tensor are not needed again soon (after repacking). */
FKV_SEAM void fkv_weights_release(const fkv_weights *weights, const fkv_tensor *tensor);

#endif
