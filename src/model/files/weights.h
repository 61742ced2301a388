/* A weight file, mapped and checked: hyperparameters, vocabulary and tensors of GGUF v3 and of safetensors with config.json in
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
    FKV_TENSOR_Q6_K
} fkv_tensor_type;

enum { FKV_MAX_TENSOR_NAME = 128 };

typedef struct fkv_tensor {
    char name[FKV_MAX_TENSOR_NAME]; /* GGUF's names for both kinds of file: "blk.3.attn_q.weight"; printable */
    fkv_tensor_type type;
    uint32_t n_rows;     /* 1 for a vector */
    uint32_t n_cols;     /* consecutive in memory */
    const uint8_t *data; /* [n_rows, row_bytes], aligned as the numbers of the type ask */
    uint64_t row_bytes;
} fkv_tensor;

const char *fkv_tensor_type_name(fkv_tensor_type type); /* "Q4_K" */

/* What a model file says of itself. The strings live as long as the weights. */
typedef struct fkv_hparams {
    const char *architecture; /* general.architecture or what model_type maps to */
    const char *name;
    uint32_t n_layers, dim, ffn_dim, n_q_heads, n_kv_heads, head_dim, n_vocab, context;
    float rms_eps; /* 0: not said, which model.c refuses */
    float rope_base;
    float rope_base_local; /* of windowed layers; 0: not said */
    float rope_scale;      /* linear position scaling: positions are divided by it; 1: none. Other scalings are FKV_UNSUPPORTED */
    uint32_t rope_dim;     /* numbers of a head that rotate; head_dim unless said */
    uint32_t window;       /* 0: not said */
    uint32_t window_pattern; /* every layer of this period is full; 0: not said */
    float softcap;           /* of attention; 0: none */
    float query_scale;       /* of the scores; 0: not said */
    bool rope_interleaved;   /* pairs (2i, 2i+1) instead of (i, i + D/2): GGUF llama yes, safetensors no */
    bool norm_plus_one;      /* norm weights mean 1 + w: gemma in safetensors */
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
    bool add_bos;
    bool add_space_prefix;   /* spm; default true */
    bool whole_words;        /* a piece that is a token is taken as it is, without merges; GGUF: by `pre` */
    bool byte_fallback;      /* "gemma4" from tokenizer.json: what is no token becomes its bytes' tokens, else unk */
    bool fuse_unk;           /* unknowns side by side become one */
    bool leftmost;           /* of overlapping special tokens the leftmost, then the longest; else the longest first */
    fkv_bytes chat_template; /* or empty */
} fkv_vocab_source;

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
