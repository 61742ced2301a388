/* What tells one architecture from another: a table, one line each. The readers of weight files take a line's features, change
 * what the file says otherwise, and from then on nobody asks for a name again.
 *
 * Nothing here needs a file: hparams are numbers.
 */
#ifndef FKV_ARCHITECTURE_H
#define FKV_ARCHITECTURE_H

#include "files/weights.h"

/* A tensor that Hugging Face calls otherwise than most models do. */
typedef struct fkv_name_pair {
    const char *hf;
    const char *gguf;
} fkv_name_pair;

enum { FKV_MAX_OWN_NAMES = 16 };

typedef struct fkv_architecture {
    const char *name; /* general.architecture of GGUF */
    fkv_features features;
    fkv_name_pair hf_names[FKV_MAX_OWN_NAMES]; /* before the common ones */
    bool gguf_interleaved;                     /* pairs of RoPE lie side by side in GGUF; */
    bool hf_interleaved;                       /* in safetensors */
    bool hf_norm_plus_one;                     /* norm weights of safetensors mean 1 + w */
    bool gguf_post_attn_is_ffn_norm;           /* the norm before the feed-forward has the name of the one behind attention */
    bool logits_divided;                       /* by the logit scale of the file, which multiplies else */
    float rope_base;                           /* where the file does not say; 0: 10000 */
    float rope_base_local;                     /* with rope_by_kind; 0: that of the others */
    float query_scale;                         /* where the file does not say; 0: 1 / sqrt(head_dim) */
    uint32_t layers_of_large; /* GGUF: the model of so many layers scales scores by dim / heads and no file says so */
} fkv_architecture;

/* NULL for a name that is not in the table. */
const fkv_architecture *fkv_architecture_find(const char *name);

/* Names of the table, for messages: "llama, qwen2, ...". */
const char *fkv_architecture_names(void);

/* Why models of a name (GGUF's or a model_type) that is not in the table cannot run here: "layers with a recurrent state ...".
 * NULL: nothing is known of them. */
const char *fkv_architecture_refusal(const char *name);

/* Which layers have the window and which do not rotate, by the periods of the features, for a file that has no list. Numbers of
 * layers that cannot be are left to model.c. */
void fkv_architecture_set_layers(fkv_hparams *hparams);

/* Behind all that a file says: what follows from it, and what it left open. */
void fkv_architecture_finish(const fkv_architecture *architecture, fkv_hparams *hparams);

/* The window of a layer; 0: it sees everything. */
uint32_t fkv_architecture_window(const fkv_hparams *hparams, uint32_t layer);

/* Of the layers that keep keys and values, which are the first ones. */
FKV_SEAM uint32_t fkv_architecture_n_kv_layers(const fkv_hparams *hparams);

/* Whether keys are stored less a vector that is the same for every token of a head: the mean over the context of what RoPE makes
 * of the K bias. A score loses the same for every key, so softmax gives the same weights; what is lost is the range that a few
 * large biases (Qwen2 has some of several hundred, in pairs that hardly turn) would take from all other numbers of their group.
 */
FKV_SEAM bool fkv_architecture_centers_keys(const fkv_hparams *hparams);

/* RoPE in words, for page files: style, numbers that rotate, bases, scale, what is taken off keys; a scaling that takes more than
 * a factor by its name and a checksum of the frequencies it makes. is_long: as fkv_rope_frequencies(). FKV_UNSUPPORTED if it
 * takes more words than fit. */
fkv_status fkv_architecture_rope_id(const fkv_hparams *hparams, bool is_long, char rope_id[64]);

#endif
