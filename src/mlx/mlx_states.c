/* Recurrent states on MLX.
 *
 * MLX arrays are immutable, and a step never writes a state in place (src/pager/pager.h). A slot is therefore a handle to an
 * array: a step reads the handle of one slot and replaces the handle of another, and no state is copied. An aborted step leaves
 * the slot that it read unchanged, even if its operations were never evaluated.
 *
 * A slot holds an array with its own memory, never a view of a larger array. Otherwise the larger array would stay allocated.
 */
#include "mlx_state.h"

static mlx_array contiguous(fkv_mlx_graph *g, mlx_array a) {
    mlx_array out = {NULL};
    if (g->failed) return out;
    if (mlx_contiguous(&out, a, false, g->stream) != 0) g->failed = true;
    return fkv_mlx_adopt(g, out);
}

void fkv_mlx_states_open(fkv_mlx_graph *g, fkv_mlx_layer *layer) {
    for (uint32_t i = 0; i < layer->n_states; i++) {
        const mlx_array zeros = fkv_mlx_zeros(g, FKV_MLX_SHAPE((int)layer->n_state_values), MLX_FLOAT32);
        fkv_mlx_eval_one(g, zeros); /* commits the memory of the slot */
        fkv_mlx_keep(g, &layer->states[i], zeros);
        fkv_mlx_graph_release(g, 0);
    }
}

void fkv_mlx_states_close(fkv_mlx_layer *layer) {
    for (uint32_t i = 0; i < layer->n_states; i++) {
        (void)mlx_array_free(layer->states[i]);
        layer->states[i] = (mlx_array){NULL};
    }
}

void fkv_mlx_states_read(fkv_mlx_graph *g, const fkv_mlx_layer *layer, uint32_t slot, uint64_t from, uint64_t bytes,
                         uint8_t *out) {
    fkv_mlx_eval_one(g, layer->states[slot]);
    if (g->failed) return;
    const float *values = mlx_array_data_float32(layer->states[slot]);
    if (values == NULL)
        g->failed = true;
    else
        memcpy(out, (const uint8_t *)values + from, bytes);
}

void fkv_mlx_states_write(fkv_mlx_graph *g, fkv_mlx_layer *layer, uint32_t slot, uint64_t from, uint64_t bytes,
                          const uint8_t *in) {
    FKV_ASSERT(from % sizeof(float) == 0 && bytes % sizeof(float) == 0);
    const int begin = (int)(from / sizeof(float));
    const int n = (int)(bytes / sizeof(float));
    mlx_array update = fkv_mlx_adopt(g, mlx_array_new_data(in, (const int[]){(int)bytes}, 1, MLX_UINT8));
    update = fkv_mlx_view(g, update, MLX_FLOAT32);
    mlx_array state = fkv_mlx_slice_update(g, layer->states[slot], update, FKV_MLX_SHAPE(begin), FKV_MLX_SHAPE(begin + n));
    fkv_mlx_keep(g, &layer->states[slot], state);
    fkv_mlx_graph_release(g, 0);
    fkv_mlx_eval_one(g, layer->states[slot]);
}

/* ---- steps ---- */

fkv_status fkv_mlx_states_get(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t row, mlx_array *state) {
    FKV_REQUIRE(state != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_state_get: state is NULL");
    FKV_REQUIRE(row < mlx->step.n_rows, FKV_BAD_ARGUMENT, "fkv_mlx_state_get: row is %u but the step has %u rows", row,
                mlx->step.n_rows);
    fkv_mlx_graph *g = &mlx->graph;
    const uint32_t from = mlx->step.states[row].from;
    const fkv_mlx_shape shape = FKV_MLX_SHAPE((int)layer->n_state_values);
    fkv_mlx_keep(g, state, from == FKV_NO_PAGE ? fkv_mlx_zeros(g, shape, MLX_FLOAT32) : layer->states[from]);
    fkv_mlx_graph_release(g, 0);
    return fkv_mlx_graph_status(g, "fkv_mlx_state_get");
}

static fkv_status check_state(const fkv_mlx_layer *layer, mlx_array state, uint32_t row) {
    FKV_REQUIRE(state.ctx != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_state_put: the state of row %u is an empty array", row);
    FKV_REQUIRE(mlx_array_dtype(state) == MLX_FLOAT32 && mlx_array_ndim(state) == 1 &&
                    mlx_array_size(state) == layer->n_state_values,
                FKV_BAD_ARGUMENT,
                "fkv_mlx_state_put: the state of row %u has MLX type %d, %zu dimensions and %zu values; expected float32 [%u]",
                row, (int)mlx_array_dtype(state), mlx_array_ndim(state), mlx_array_size(state), layer->n_state_values);
    return FKV_OK;
}

fkv_status fkv_mlx_states_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, const mlx_array *states) {
    FKV_REQUIRE(states != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_state_put: states is NULL");
    fkv_mlx_graph *g = &mlx->graph;
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) FKV_TRY(check_state(layer, states[r], r));
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) {
        fkv_mlx_keep(g, &layer->states[mlx->step.states[r].to], contiguous(g, states[r]));
        fkv_mlx_graph_release(g, 0);
    }
    return fkv_mlx_graph_status(g, "fkv_mlx_state_put");
}
