/* Vocabulary of a model file in its original form, before the tokenizer is opened. Readers of GGUF, tokenizer.json and
 * tokenizer.model fill in the same struct. Strings are not 0-terminated; they point into a mapped file or into a copy owned by
 * the same fkv_file_arena. */
#ifndef FKV_VOCAB_SOURCE_H
#define FKV_VOCAB_SOURCE_H

#include "../../base/base.h"
#include "../../base/printable.h"
#include "text_steps.h"

#include <flatkv/model.h>

/* Matching rules of an added token, as in tokenizer.json. */
enum {
    FKV_TOKEN_LSTRIP = 1,      /* the match includes white space before the token */
    FKV_TOKEN_RSTRIP = 2,      /* the match includes white space after the token */
    FKV_TOKEN_SINGLE_WORD = 4, /* the token matches only if no letter, mark, digit or connector is adjacent */
    FKV_TOKEN_NORMALIZED = 8   /* the token is matched in the normalized text */
};

/* Bits of fkv_sampling_source.fields. A bit is set if the file sets the parameter. */
enum {
    FKV_SAMPLING_TEMPERATURE = 1,
    FKV_SAMPLING_TOP_K = 2,
    FKV_SAMPLING_TOP_P = 4,
    FKV_SAMPLING_MIN_P = 8,
    FKV_SAMPLING_REPETITION = 16
};

/* Sampling defaults recommended by the model file. */
typedef struct fkv_sampling_source {
    unsigned fields; /* FKV_SAMPLING_* */
    uint32_t top_k;
    float temperature, top_p, min_p, repetition;
} fkv_sampling_source;

typedef struct fkv_vocab_source {
    fkv_bytes model; /* "gpt2" (byte-level BPE), "llama" (SentencePiece with scores), "gemma4" (BPE over characters) or "byte"
                        (one token per byte) */
    fkv_bytes pre;   /* value of tokenizer.ggml.pre; may be empty */
    const fkv_text_steps
        *steps; /* steps applied to a text before encoding; if NULL, the steps are derived from `model` and `pre` */
    uint32_t n_tokens;
    const fkv_bytes *tokens; /* [n_tokens] token strings; NULL for the model "byte" */
    const float *scores;     /* [n_tokens] or NULL */
    const int32_t *types; /* [n_tokens] token types (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte), or NULL */
    const uint8_t *token_flags; /* [n_tokens] combinations of FKV_TOKEN_* bits; NULL if all are 0 */
    uint32_t n_merges;
    const fkv_bytes *merges;       /* [n_merges] merges in the form "left right"; NULL if there are no merges */
    const fkv_bytes *merge_rights; /* [n_merges] right strings of the merges, whose left strings are in `merges`; NULL if `merges`
                                      contains both */
    uint32_t bos, eos, eot, unk;   /* FKV_NO_TOKEN if unset */
    uint32_t suffix;               /* token that FKV_TOKENIZE_EOS appends to a text; FKV_NO_TOKEN if there is none */
    uint32_t n_ends;               /* number of additional end-of-text tokens, from lists in eos_token_id */
    uint32_t ends[FKV_MAX_END_TOKENS];
    bool add_bos;
    bool add_space_prefix; /* SentencePiece; default true */
    bool whole_words;   /* true if a word that is a token is emitted without applying merges; determined by `pre` in GGUF files */
    bool byte_fallback; /* for "gemma4" from tokenizer.json: true if unknown characters become byte tokens instead of unk */
    bool fuse_unk;      /* true if consecutive unknown characters become a single unk token */
    bool leftmost; /* true to prefer the leftmost of overlapping special tokens, then the longest; false to prefer the longest */
    fkv_bytes chat_template; /* or empty */
    fkv_sampling_source sampling;
} fkv_vocab_source;

/* Returns an empty vocabulary with default values for all fields. */
fkv_vocab_source fkv_vocab_source_default(void);

/* Adds an end-of-text token unless it is already in the list. Tokens beyond FKV_MAX_END_TOKENS are dropped. */
void fkv_vocab_add_end(fkv_vocab_source *vocab, uint32_t token);

#endif
