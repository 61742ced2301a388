/* A runner: a cache, the tables of one step, and the backend's activations, in one mapping allocated at open.
 *
 * All backends use the fields of fkv_runner, except `cpu` and `arrays`, which belong to one backend each. This header also
 * declares the activations of the CPU backend, whose forward pass is in forward.c. The counterparts for MLX are in src/model/mlx.
 */
#ifndef FKV_RUNNER_H
#define FKV_RUNNER_H

#include "../../matrix/matrix.h"
#include "../model.h"
#include "vector_ops.h"

enum { FKV_NOT_SAVED = UINT32_MAX };

enum { FKV_ROPE_GLOBAL = 0, FKV_ROPE_LOCAL = 1, FKV_N_ROPES = 2, FKV_ROPE_NONE = 2 };

/* Activations of the CPU backend; T = max_step_tokens. Rows are zero-padded to the column count of the matrices that read them, a
 * multiple of 32. Heads in q, k and v are zero-padded to the page head dimension (head_pad), which does not change scores.
 *
 * Matrix products run on the worker threads of the cache (fkv_cache_workers) while no call to the cache is running, so that two
 * thread pools never compete for cores. */
typedef struct fkv_cpu_runner {
    fkv_workers *workers;
    uint32_t dim_pad;
    uint32_t ffn_pad;            /* largest padded feed-forward dimension over all layers */
    float *cosines[FKV_N_ROPES]; /* [T, n_pairs] */
    float *sines[FKV_N_ROPES];
    float *x;         /* [T, dim_pad] residual stream */
    float *h;         /* [T, dim_pad] input of a layer's matrix products, later their output */
    float *q;         /* [T, H, head_pad] queries, later the attention output */
    float *k, *v;     /* [T, G, head_pad] */
    float *attn_gate; /* [T, H * D] gate logits of the attention output, or NULL */
    float *gate;      /* [T, ffn_pad] */
    float *up;        /* [T, ffn_pad] */
    float *gathered;  /* [T, padded H * D] attention output without head padding, or NULL if no layer needs it */
    float *inputs;    /* [T, n_layers * input_dim] per-layer inputs, or NULL */
    float *looked_up; /* [T, n_layers * input_dim] per-layer token embeddings, or NULL */
    void *input;      /* input activations of a matrix product, in the format of the matrix kernels */
    float *q_gate;    /* [T, H * 2 * D] queries and gates of gated attention, or NULL */

    /* Buffers of latent attention, NULL for models without it. */
    float *latent_q;     /* [T, H * (nope_dim + rope_dim)] queries before absorption */
    float *latent_low;   /* [T, padded q_dim] latent vectors of the queries */
    float *latent_kv;    /* [T, latent dim + rope_dim] latent vectors and RoPE keys */
    float *latent_heads; /* [H, T, n] inputs of the per-head matrix products, where n is the padded nope_dim or latent dim */
    float *attended;     /* [T, H, head_pad] output of attention */
    float *latent_out;   /* [T, padded H * v_dim] input of the output projection */

    /* Buffers of recurrent layers, NULL for models without such layers. */
    fkv_state_row *states; /* [max_seqs] states of the current layer */
    float *mixer_in;       /* [T, channels] input of the convolution, later its output */
    float *mixed;          /* [T, padded output width] gates, later the input of the output projection */
    float *decay, *beta; /* [T, n_v_heads] decay and write strength of a delta net, decay and step size of Mamba-2; in KDA, decay
                            is [T, n_v_heads * k_dim] */
    float *alpha_low, *gate_low; /* KDA: [T, padded k_dim] and [T, padded v_dim] inputs of the second low-rank projections */
    float *mixer_fused;          /* [T, rows of the fused projection] output of the fused projection, or NULL */
    float *saved_inputs;         /* [recurrent layers, max_logit_rows, width] inputs of draft tokens, or NULL */

    /* Expert buffers, NULL for models without experts. */
    float *router;              /* [T, E] router logits */
    float *routing_weights;     /* [T, n_experts_used] routing weights */
    uint32_t *selected_experts; /* [T, n_experts_used] indices of the selected experts, in ascending order */
    uint32_t *expert_rows;      /* [T * n_experts_used] indices into selected_experts, sorted by expert */
    uint32_t *expert_from;      /* [E + 1] index of each expert's first entry in expert_rows */
    float *expert_in;           /* [T, expert_pad] input of one expert, later its output */
    float *expert_sum;          /* [T, expert_pad] weighted sum of expert outputs */
    float *latent;              /* [T, expert_pad] projected inputs of the experts, or NULL */
    uint32_t expert_pad;        /* row stride of the expert buffers: the larger of dim_pad and the padded latent_dim */
    float *dense;               /* [T, dim_pad] output of the parallel dense feed-forward block, or NULL */
    float *shared_gate_logits;  /* [T] gate logits of the shared expert */
    fkv_panel_room room;        /* per-thread buffers for expert panels */
} fkv_cpu_runner;

typedef struct fkv_array_runner fkv_array_runner;

struct fkv_runner {
    const fkv_model *model;
    fkv_runner_config config; /* the caller's configuration with defaults filled in */
    fkv_cache *cache;
    const fkv_vector_ops *ops;
    uint64_t bytes; /* size of the memory mapping that holds the runner; this struct is at its start */

    uint32_t kv_dim;  /* largest G * D over all layers */
    uint32_t n_ropes; /* number of RoPE variants: 1, or 2 if windowed layers have a separate RoPE base */

    bool is_long; /* see fkv_rope_frequencies() */

    uint32_t n_pairs[FKV_N_ROPES];    /* number of rotated pairs per head */
    double *frequencies[FKV_N_ROPES]; /* [n_pairs] */
    float rope_factors[FKV_N_ROPES];  /* factor applied to cosines and sines */
    float *k_centers; /* [n_layers, kv_dim] vectors subtracted from keys, or NULL; see fkv_architecture_centers_keys() */
    float *logits;    /* [max_logit_rows, fkv_runner_row_values()] */

    /* Tables of the current step; T = max_step_tokens. */
    fkv_row *rows;        /* [max_seqs] */
    uint32_t *tokens;     /* [T] */
    uint32_t *positions;  /* [T] */
    uint32_t *logit_rows; /* [T] indices of the rows whose logits are requested, in ascending order */
    uint32_t n_rows;      /* number of entries in `rows` */
    uint32_t n_tokens;
    uint32_t n_logit_rows;

    /* Speculative decoding (runner_draft.c). */
    fkv_step *step; /* step that fkv_runner_verify() has left open, or NULL */
    uint32_t
        *saved_from; /* [max_seqs] index of each row's first token in the saved inputs of recurrent layers, or FKV_NOT_SAVED */
    uint32_t *shortened; /* [max_seqs] indices of the rows from which fkv_runner_accept() discards tokens; it then removes all
                            other rows from `rows` and saved_from */

    /* Callback for calibration, or NULL. It is called with the queries and keys of every layer that stores keys, before the
     * keys are written to the cache. The step has one sequence and starts at `position`. q: [rows, H, head_pad], k: [rows, G,
     * head_pad]. CPU only. */
    void (*observe)(void *observer, uint32_t layer, const float *q, const float *k, uint32_t n_rows, uint32_t position);
    void *observer;

    fkv_cpu_runner cpu;       /* used only by the CPU backend, otherwise zeroed */
    fkv_array_runner *arrays; /* MLX state, or NULL */
};

/* Returns the number of values per output row: n_vocab logits, or dim values of a hidden state. */
FKV_INTERNAL uint32_t fkv_runner_row_values(const fkv_runner *runner);

/* Returns the padded head dimension in pages. */
FKV_INTERNAL uint32_t fkv_runner_head_pad(const fkv_runner *runner, uint32_t head_dim);

/* Returns the padded number of RoPE channels in pages of latent layers; 0 if the model has no latent attention. */
FKV_INTERNAL uint32_t fkv_runner_rope_pad(const fkv_hparams *hparams);

/* Returns the RoPE variant of a layer: FKV_ROPE_GLOBAL, FKV_ROPE_LOCAL or FKV_ROPE_NONE. */
FKV_INTERNAL uint32_t fkv_runner_rope(const fkv_runner *runner, uint32_t layer);

/* Applies RoPE to one head, in the model's pair layout. */
FKV_INLINE void fkv_runner_rotate(const fkv_runner *runner, float *head, const float *cosines, const float *sines,
                                  uint32_t n_pairs) {
    if (runner->model->hparams->rope_interleaved)
        runner->ops->rope_pairs(head, cosines, sines, n_pairs);
    else
        runner->ops->rope_halves(head, cosines, sines, n_pairs);
}

/* Returns the factor applied to queries at a position (attention temperature). */
FKV_INTERNAL float fkv_runner_temperature(const fkv_runner *runner, uint32_t position);

/* Returns whether the queries of a layer are multiplied by fkv_runner_temperature(). */
FKV_INTERNAL bool fkv_runner_has_temperature(const fkv_runner *runner, uint32_t layer);

/* Returns the vector subtracted from all keys of a layer, [G, D], or NULL. */
FKV_INTERNAL const float *fkv_runner_k_center(const fkv_runner *runner, uint32_t layer);

#endif
