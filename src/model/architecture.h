/* The table of supported architectures. Weight-file readers start from the features of an architecture's entry and override them
 * with the values in the file. All later code looks only at the resulting hyperparameters, never at the architecture's name.
 *
 * Functions in this header do not access files.
 */
#ifndef FKV_ARCHITECTURE_H
#define FKV_ARCHITECTURE_H

#include "files/weights.h"

/* A tensor name in Hugging Face checkpoints and its GGUF equivalent. */
typedef struct fkv_name_pair {
    const char *hf;
    const char *gguf;
} fkv_name_pair;

enum { FKV_MAX_OWN_NAMES = 24 };

typedef struct fkv_architecture {
    const char *name; /* general.architecture of GGUF */
    fkv_features features;
    fkv_name_pair hf_names[FKV_MAX_OWN_NAMES]; /* tensor names that take precedence over the common names */
    bool gguf_interleaved;                     /* in GGUF files, RoPE rotates interleaved pairs (2i, 2i+1) */
    bool hf_interleaved;                       /* in safetensors files, RoPE rotates interleaved pairs */
    bool hf_norm_plus_one;                     /* safetensors files store norm weights minus 1 */
    bool gguf_post_attn_is_ffn_norm; /* the GGUF tensor post_attention_norm is the input norm of the feed-forward block */
    bool gguf_tiled_heads;         /* GGUF files store the value heads of a delta net in tiled order; see fkv_recurrence.tiled */
    bool gguf_yarn_log_multiplier; /* GGUF files state mscale_all_dim as rope.scaling.yarn_log_multiplier */
    bool divides_logits;           /* logits are divided by the logit scale in the file, not multiplied by it */
    float rope_base;               /* default RoPE base if the file does not state one; 0 means 10000 */
    float rope_base_local;   /* default RoPE base of windowed layers if separate_local_rope is set; 0 means the base of the other
                                layers */
    float query_scale;       /* default attention scale; 0 means 1 / sqrt(head_dim) */
    uint32_t large_n_layers; /* models with this number of layers scale attention scores by 1 / sqrt(dim / n_q_heads); GGUF files
                                do not store this scale */
} fkv_architecture;

/* Returns the table entry of a GGUF architecture name, or NULL if the architecture is not supported. */
const fkv_architecture *fkv_architecture_find(const char *name);

/* Returns the supported architecture names, as a list for error messages: "llama, qwen2, ...". */
const char *fkv_architecture_names(void);

/* Returns the reason why an architecture or model_type is not supported, as text for an error message ("layers with a recurrent
 * state ..."). Returns NULL if no reason is known.
 */
const char *fkv_architecture_refusal(const char *name);

/* Sets the window and no-RoPE flags of all layers from the periods in the model's features (such as "every 4th layer"). Used for
 * files that do not list the layers explicitly. Ignores layers beyond FKV_MAX_LAYERS; model.c rejects such models. */
void fkv_architecture_set_layers(fkv_hparams *hparams);

/* Completes hyperparameters after a file was read: fills in missing values and computes derived values. */
void fkv_architecture_finish(const fkv_architecture *architecture, fkv_hparams *hparams);

/* Returns the sliding-window size of a layer, or 0 if the layer has full attention. */
uint32_t fkv_architecture_window(const fkv_hparams *hparams, uint32_t layer);

/* Returns the dimension of a value head of a layer. */
FKV_INTERNAL uint32_t fkv_architecture_v_dim(const fkv_hparams *hparams, const fkv_layer_shape *shape);

/* Returns whether the model has multi-head latent attention. */
FKV_INLINE bool fkv_architecture_is_latent(const fkv_hparams *hparams) { return hparams->latent.dim != 0; }

/* Returns whether a layer has routed experts. */
bool fkv_architecture_has_experts(const fkv_hparams *hparams, uint32_t layer);

/* Returns the number of layers that store their own keys and values. These are the first layers of the model; the remaining
 * layers attend to the keys and values of these layers. */
uint32_t fkv_architecture_n_kv_layers(const fkv_hparams *hparams);

/* Returns whether a layer has a recurrent state. */
FKV_INTERNAL bool fkv_architecture_is_recurrent(const fkv_hparams *hparams, uint32_t layer);

/* Returns whether a layer has attention. */
FKV_INTERNAL bool fkv_architecture_has_attention(const fkv_hparams *hparams, uint32_t layer);

/* Returns whether a layer has a feed-forward block, which may consist of experts. */
FKV_INTERNAL bool fkv_architecture_has_ffn(const fkv_hparams *hparams, uint32_t layer);

/* Returns the number of layers of the cache: one for each layer that stores keys and one for each recurrent state. */
uint32_t fkv_architecture_n_cache_layers(const fkv_hparams *hparams);

/* Returns 1 plus the index of the last layer that stores keys or a recurrent state. */
FKV_INTERNAL uint32_t fkv_architecture_n_storing_layers(const fkv_hparams *hparams);

/* Returns whether the model has at least one recurrent layer. */
FKV_INTERNAL bool fkv_architecture_has_recurrence(const fkv_hparams *hparams);

/* Returns the number of channels of a recurrent layer's convolution. */
FKV_INTERNAL uint32_t fkv_architecture_conv_channels(const fkv_hparams *hparams);

/* Returns the size, in bytes, of the recurrent state of one layer, a multiple of 64. A state consists of f32 values: first the
 * states [n_v_heads, v_dim, k_dim] of a delta net or of Mamba-2, if any, then the last n_taps - 1 inputs of the convolution. */
FKV_INTERNAL uint64_t fkv_architecture_state_bytes(const fkv_hparams *hparams);

/* Returns whether keys are centered before they are stored. Centering subtracts one vector per head from all keys: the K bias
 * after RoPE, averaged over all positions of the context. This shifts all scores of a query by the same amount, so the result of
 * the softmax does not change. Without centering, large biases (several hundred in the slowly rotating pairs of Qwen2) would
 * dominate the range of their quantization groups. */
FKV_INTERNAL bool fkv_architecture_centers_keys(const fkv_hparams *hparams);

/* Writes the RoPE description stored in page files: pair layout, rotated dimensions, bases, scaling and key centering. RoPE
 * scaling by a plain factor is written as that factor; any other scaling is written as its name and a checksum of the
 * frequencies. is_long: see fkv_rope_frequencies(). Returns FKV_UNSUPPORTED if the description is longer than 63 characters. */
fkv_status fkv_architecture_rope_id(const fkv_hparams *hparams, bool is_long, char rope_id[64]);

#endif
