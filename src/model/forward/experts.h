/* A feed-forward of many experts of which each row meets a few: a router scores them, the best are taken, and what they give is
 * added up by their shares.
 *
 * Scores are a softmax over all experts or a sigmoid of each. Experts are chosen by their scores, with a correction that a model
 * may have learned for that alone, some models first by groups of them; shares are the scores, made to add up to 1 or not.
 *
 * An expert is computed only where a row has chosen it, for all such rows of the step at once. A row's sum is taken in the order
 * of its experts, so that it does not depend on what else is in the step.
 */
#ifndef FKV_EXPERTS_H
#define FKV_EXPERTS_H

#include "packed_weights.h"
#include "runner.h"

/* gate = activation(gate) * up; [n] of one row. */
FKV_INLINE void fkv_activate(const fkv_runner *runner, float *gate, const float *up, uint32_t n) {
    const fkv_hparams *h = runner->model->hparams;
    switch (h->features.activation) {
    case FKV_SILU: runner->ops->silu_mul(gate, up, n); break;
    case FKV_GELU_TANH: runner->ops->gelu_mul(gate, up, n); break;
    case FKV_SWIGLU_CLAMPED: runner->ops->swiglu_mul(gate, up, h->swiglu_alpha, h->swiglu_limit, n); break;
    }
}

/* The part of the runner's walk that experts need; dim_pad is set. */
void fkv_experts_layout(fkv_carve *carve, fkv_runner *runner);

/* Which experts the first n_rows of h go to, and their shares. */
void fkv_experts_route(fkv_runner *runner, const fkv_packed_layer *layer, uint32_t n_rows);

/* The first n_rows of h, which were routed, go through the layer's experts and the feed-forward beside them; what they give
 * replaces them. Uses gate and up. */
void fkv_experts_run(fkv_runner *runner, const fkv_packed_layer *layer, const fkv_layer_shape *shape, uint32_t n_rows);

/* Behind all layers of a step: FKV_UNSUPPORTED if an expert was not what its file says, because f16 cannot hold its scales. */
fkv_status fkv_experts_status(fkv_runner *runner);

#endif
