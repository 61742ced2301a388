/* What tells one architecture from another. One table, one line each: the forward pass asks the line, never the name.
 *
 * What a file says of itself (hparams) goes before what its architecture is known for; the line has the rest.
 */
#ifndef FKV_ARCHITECTURE_H
#define FKV_ARCHITECTURE_H

#include "files/weights.h"

typedef enum fkv_activation { FKV_SILU, FKV_GELU_TANH } fkv_activation;

typedef struct fkv_architecture {
    const char *name;
    bool qkv_bias;           /* q, k and v have biases; a file of another architecture may have them too */
    bool qk_norm;            /* each head of q and k is normalized before it rotates */
    bool post_norms;         /* what attention and feed-forward give is normalized before it is added */
    bool embedding_sqrt_dim; /* embeddings are multiplied by sqrt(dim) */
    fkv_activation activation;
    uint32_t window_pattern; /* where a file has a window but no pattern: every layer of this period is full; 0: no layer is
                                windowed */
    float rope_base_local;   /* of windowed layers, where the file does not say */
} fkv_architecture;

/* NULL for a name that is not in the table. */
const fkv_architecture *fkv_architecture_find(const char *name);

/* Names of the table, for messages: "llama, qwen2, ...". */
const char *fkv_architecture_names(void);

/* The window of a layer; 0: it sees everything. */
uint32_t fkv_architecture_window(const fkv_architecture *architecture, const fkv_hparams *hparams, uint32_t layer);

/* The base of the windowed layers' RoPE; that of the others where they do not differ. */
float fkv_architecture_local_base(const fkv_architecture *architecture, const fkv_hparams *hparams);

/* Whether keys are stored less a vector that is the same for every token of a head: the mean over the context of what RoPE makes
 * of the K bias. A score loses the same for every key, so softmax gives the same weights; what is lost is the range that a few
 * large biases (Qwen2 has some of several hundred, in pairs that hardly turn) would take from all other numbers of their group.
 */
FKV_SEAM bool fkv_architecture_centers_keys(const fkv_architecture *architecture, const fkv_hparams *hparams);

/* RoPE in words, for page files: style, numbers that rotate, bases, scale, what is taken off keys. FKV_UNSUPPORTED if it takes
 * more words than fit. */
fkv_status fkv_architecture_rope_id(const fkv_architecture *architecture, const fkv_hparams *hparams, char rope_id[64]);

#endif
