/* Mixture-of-experts feed-forward block. A router scores the experts, each row uses the n_experts_used experts with the best
 * scores, and the outputs of these experts are summed with routing weights.
 *
 * Scores are a softmax over all experts or a sigmoid of each logit. Experts are selected by score plus an optional learned
 * correction; some models first select groups of experts. Routing weights are the scores of the selected experts; some models
 * normalize them to a sum of 1.
 *
 * Each expert runs once per step, over all rows routed to it. A row's outputs are summed in ascending expert order, so the result
 * does not depend on the other rows of the step.
 */
#ifndef FKV_EXPERTS_H
#define FKV_EXPERTS_H

#include "packed_weights.h"
#include "runner.h"

/* Applies the activation of a feed-forward block without a gate to one row: x = activation(x). x: [n] */
void fkv_activate_plain(const fkv_runner *runner, uint32_t layer, float *x, uint32_t n);

/* Computes gate = activation(gate) * up for one row. gate, up: [n] */
FKV_INLINE void fkv_activate(const fkv_runner *runner, float *gate, const float *up, uint32_t n) {
    const fkv_hparams *h = runner->model->hparams;
    switch (h->features.activation) {
    case FKV_SILU: runner->ops->silu_mul(gate, up, n); break;
    case FKV_GELU_TANH: runner->ops->gelu_mul(gate, up, n); break;
    case FKV_SWIGLU_CLAMPED: runner->ops->swiglu_mul(gate, up, h->swiglu_alpha, h->swiglu_limit, n); break;
    case FKV_RELU2:
    case FKV_XIELU: FKV_ASSERT(false); break; /* used only in blocks without a gate; see fkv_activate_plain() */
    }
}

/* Reserves the expert buffers of a runner (carve.h). dim_pad must be set. */
void fkv_experts_layout(fkv_carve *carve, fkv_runner *runner);

/* Selects the experts and routing weights of the first n_rows rows of h. */
void fkv_experts_route(fkv_runner *runner, const fkv_packed_layer *layer, uint32_t n_rows);

/* Replaces each of the first n_rows rows of h with the sum of the outputs of its experts and the shared expert. The rows must
 * have been routed. Overwrites the buffers `gate` and `up`. */
void fkv_experts_run(fkv_runner *runner, const fkv_packed_layer *layer, const fkv_layer_shape *shape, uint32_t n_rows);

/* Must be called after the last layer of a step. Returns FKV_UNSUPPORTED if a scale of an expert overflowed f16 in this step. */
fkv_status fkv_experts_status(fkv_runner *runner);

#endif
