/* A model in motion: a cache, the tables of one step, and what its backend keeps for itself, in one map that is taken at open.
 *
 * Everything up to the backends' own parts is the same wherever a model runs. The CPU's activations are below and its forward
 * pass is forward.c; MLX's are in src/model/mlx.
 */
#ifndef FKV_RUNNER_H
#define FKV_RUNNER_H

#include "../../matrix/matrix.h"
#include "../model.h"
#include "vector_ops.h"

enum { FKV_ROPE_GLOBAL = 0, FKV_ROPE_LOCAL = 1, FKV_N_ROPES = 2, FKV_ROPE_NONE = 2 };

/* The CPU's activations; T = max_step_tokens. Rows are as wide as the columns of the matrices they meet, a multiple of 32 with
 * zeros behind. Heads lie in q, k and v as wide as pages hold them (head_pad), also with zeros behind: neither changes a score.
 *
 * The threads are the cache's own (fkv_cache_workers): products run on them between the cache's calls, so that no second pool
 * fights the first for the cores. */
typedef struct fkv_cpu_runner {
    fkv_workers *workers;
    uint32_t dim_pad;
    uint32_t ffn_pad;            /* as the down projection's columns, of the widest layer */
    float *cosines[FKV_N_ROPES]; /* [T, n_pairs] */
    float *sines[FKV_N_ROPES];
    float *x;         /* [T, dim_pad] what layers add to */
    float *h;         /* [T, dim_pad] what products of the layer read, then what they give */
    float *q;         /* [T, H, head_pad] queries, then what attention gives */
    float *k, *v;     /* [T, G, head_pad] */
    float *gate;      /* [T, ffn_pad] */
    float *up;        /* [T, ffn_pad] */
    float *gathered;  /* [T, H D padded] where heads of a layer lie apart, else NULL */
    float *inputs;    /* [T, n_layers input_dim] what layers read beside x, or NULL */
    float *looked_up; /* the same, of the tokens alone */
    void *input;      /* of products */

    /* Of experts; NULL without. */
    float *router;         /* [T, E] */
    float *shares;         /* [T, n_experts_used] */
    uint32_t *choices;     /* [T, n_experts_used], ascending */
    uint32_t *expert_rows; /* [T n_experts_used] rows and places in them, by expert */
    uint32_t *expert_from; /* [E + 1] */
    float *expert_in;      /* [T, dim_pad] rows of one expert, then what it gives */
    float *expert_sum;     /* [T, dim_pad] */
    float *dense;          /* [T, dim_pad] what a feed-forward beside them gives, else NULL */
    float *shared_share;   /* [T] of the feed-forward beside experts */
    fkv_panel_room room;   /* for their panels */
} fkv_cpu_runner;

typedef struct fkv_array_runner fkv_array_runner;

struct fkv_runner {
    const fkv_model *model;
    fkv_runner_config config; /* with its zeros resolved */
    fkv_cache *cache;
    const fkv_vector_ops *ops;
    uint64_t bytes; /* of the map this lies at the front of */

    uint32_t kv_dim;  /* G D of the layer that has most */
    uint32_t n_ropes; /* 1, or 2 where windowed layers have a base of their own */

    bool is_long; /* see fkv_rope_frequencies() */

    uint32_t n_pairs[FKV_N_ROPES];    /* of one head that rotate */
    double *frequencies[FKV_N_ROPES]; /* [n_pairs] */
    float rope_sizes[FKV_N_ROPES];    /* of cosines and sines */
    float *k_centers; /* [n_layers, kv_dim] what is taken off every key, or NULL: see fkv_architecture_centers_keys() */
    float *logits;    /* [max_logit_rows, n_vocab] */

    /* The step; T = max_step_tokens. */
    fkv_row *rows;       /* [max_seqs] */
    uint32_t *tokens;    /* [T] */
    uint32_t *positions; /* [T] */
    uint32_t *asked;     /* [T] rows of the step whose logits are asked for, ascending */
    uint32_t n_tokens;
    uint32_t n_asked;

    /* NULL, or shown the queries and keys of every layer that has pages, as they go to the cache: q: [rows, H, head_pad], k:
     * [rows, G, head_pad], of a step of one sequence from `position` on. On the CPU. */
    void (*observe)(void *observer, uint32_t layer, const float *q, const float *k, uint32_t n_rows, uint32_t position);
    void *observer;

    fkv_cpu_runner cpu;       /* zeros on other backends */
    fkv_array_runner *arrays; /* MLX's, else NULL */
};

/* Numbers of a head of that many as pages hold it. */
FKV_SEAM uint32_t fkv_runner_head_pad(const fkv_runner *runner, uint32_t head_dim);

/* The RoPE of a layer: FKV_ROPE_, the last where it does not rotate. */
FKV_SEAM uint32_t fkv_runner_rope(const fkv_runner *runner, uint32_t layer);

/* What queries at a position are multiplied by. */
FKV_SEAM float fkv_runner_temperature(const fkv_runner *runner, uint32_t position);

/* What is taken off every key of a layer: [G, D], or NULL. */
FKV_SEAM const float *fkv_runner_k_center(const fkv_runner *runner, uint32_t layer);

#endif
