/* Step tables of the fused method on the device.
 *
 * The host fills every new array. On CUDA, MLX allocates it in managed memory, and the first kernel that reads it takes more
 * than 0.1 ms longer than later ones, probably because of a page fault. The tables of consecutive decode steps differ in few
 * words, and most of these words change by the same amount and are a constant stride apart. In this case, a kernel computes the
 * table from that of the previous step, which is already on the device. The changes are passed as arrays of 8 bytes, for which
 * MLX uses a pool that the device can access without migrating it.
 *
 * The previous table is used only on the thread that created it, because MLX evaluates an array only on that thread.
 */
#include "mlx_state.h"

#include <stdlib.h>

enum { MAX_RUNS = 4, THREADS = 256, MAX_WORDS = 1 << 16 };

/* Each run consists of two words: first | stride << 16 and count | add << 16, where add is signed. */
static const char UPDATE[] =
    "const unsigned *runs[] = {run0, run1, run2, run3};\n"
    "const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "unsigned x = table[i];\n"
    "for (int r = 0; r < 4; r++) {\n"
    "    const unsigned at = i - (runs[r][0] & 0xffffu);\n"
    "    const unsigned stride = runs[r][0] >> 16;\n"
    "    if (at % stride == 0 && at / stride < (runs[r][1] & 0xffffu)) x += (unsigned)((int)runs[r][1] >> 16);\n"
    "}\n"
    "updated[i] = x;\n";

static fkv_status open_kernel(fkv_mlx_kernel *kernel) {
    static const char *const inputs[] = {"table", "run0", "run1", "run2", "run3", NULL};
    static const char *const outputs[] = {"updated", NULL};
    return fkv_mlx_kernel_open(
        kernel, false,
        &(fkv_mlx_kernel_source){
            .name = "flatkv_update_table", .header = "", .source = UPDATE, .inputs = inputs, .outputs = outputs});
}

/* Returns an array with the packed run, or with an empty run if `run` is NULL. */
static mlx_array run_array(fkv_mlx_graph *g, const fkv_table_run *run) {
    uint32_t words[2] = {1u << 16, 0};
    if (run != NULL) {
        words[0] = run->first | run->stride << 16;
        words[1] = run->count | run->add << 16;
    }
    return fkv_mlx_adopt(g, mlx_array_new_data(words, (const int[]){2}, 1, MLX_UINT32));
}

static bool fits(const fkv_table_run *run) {
    return run->stride < MAX_WORDS && run->count < MAX_WORDS && run->add + 0x8000u < 0x10000u;
}

/* Computes the table from that of the previous step. Returns false if there is no previous table or if the two differ too
 * much. */
static bool update(fkv_mlx_state *mlx, fkv_mlx_layer *layer, const uint32_t *words, uint32_t n) {
    fkv_mlx_last_table *last = &layer->last_table;
    fkv_mlx_graph *g = &mlx->graph;
    fkv_table_run runs[MAX_RUNS];
    if (mlx->kernels_for != FKV_KERNEL_CUDA || last->n_words != n || n > MAX_WORDS ||
        !pthread_equal(last->thread, pthread_self()))
        return false;
    const uint32_t n_runs = fkv_step_table_changes(last->words, words, n, runs, MAX_RUNS);
    if (n_runs > MAX_RUNS) return false;
    for (uint32_t r = 0; r < n_runs; r++)
        if (!fits(&runs[r])) return false;
    if (!mlx->update_table.is_open && open_kernel(&mlx->update_table) != FKV_OK) g->failed = true;
    mlx_array inputs[1 + MAX_RUNS] = {last->table};
    for (uint32_t r = 0; r < MAX_RUNS && !g->failed; r++) inputs[1 + r] = run_array(g, r < n_runs ? &runs[r] : NULL);
    const fkv_mlx_launch launch = {
        .blocks = {n / THREADS, 1, 1}, .threads = THREADS, .out_shape = FKV_MLX_SHAPE((int)n), .out_type = MLX_UINT32};
    fkv_mlx_keep(g, &layer->table, fkv_mlx_kernel_apply(g, &mlx->update_table, &launch, inputs, NULL));
    fkv_mlx_graph_release(g, 0);
    return true;
}

fkv_status fkv_mlx_table_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t *words, uint32_t n) {
    fkv_mlx_last_table *last = &layer->last_table;
    FKV_ASSERT(n % THREADS == 0);
    const bool updated = update(mlx, layer, words, n);
    uint32_t *kept = updated ? last->words : realloc(last->words, n * sizeof *kept);
    if (kept != NULL) last->words = memcpy(kept, words, n * sizeof *kept);
    if (updated)
        free(words);
    else
        layer->table = mlx_array_new_data_managed(words, (const int[]){(int)n}, 1, MLX_UINT32, free);
    if (layer->table.ctx == NULL) mlx->graph.failed = true;
    fkv_mlx_keep(&mlx->graph, &last->table, layer->table);
    const fkv_status status = fkv_mlx_graph_status(&mlx->graph, "fkv_step_begin");
    last->n_words = kept != NULL && status == FKV_OK ? n : 0;
    last->thread = pthread_self();
    return status;
}

void fkv_mlx_table_close(fkv_mlx_layer *layer) {
    free(layer->last_table.words);
    (void)mlx_array_free(layer->last_table.table);
    layer->last_table = (fkv_mlx_last_table){0};
}
