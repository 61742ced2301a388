/* The fused method: flatkv's kernels from src/attn/gpu on Metal and CUDA streams.
 *
 * Kernels update pools in place. A pool is an input of every kernel that accesses it. The input is a view of the first words of
 * the pool: MLX adds up the sizes of all inputs and submits its graph when they exceed a limit, which a whole pool would reach in
 * every layer. Kernels that write to the pool cast away const, so MLX does not know that the pool changes. Each pool has a chain
 * of small dependency arrays that orders the kernels: a write takes the previous dependency array and produces the next one,
 * attention takes the array produced by the write, and the next write takes an array produced by attention. A page is therefore
 * never overwritten while it is read. Kernels that are not ordered by a dependency array may run in any order or concurrently.
 *
 * A sealed layer has two pools with one chain each. A kernel that accesses both pools takes both dependency arrays and produces
 * the next array of each chain. Prefill of sealed layers also writes to a ring buffer, which is shared by all layers and has its
 * own chain of dependency arrays.
 *
 * The table of a step is uploaded once and shared by all layers that split their work in the same way. Kernels are created on
 * first use, once per layer shape, and kept until the cache is closed.
 */
#include "mlx_include.h"
#include "mlx_state.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    LARGE_ANSWER_BYTES = 64 * 1024, /* larger attention outputs are not kept as dependency arrays, so that MLX can free them */
    TABLE_STEP = 1024, /* step tables are padded to a multiple of this many words, so that their shape rarely changes; see
                          fkv_mlx_step_state() */
    DEPENDENCY_WORDS =
        8 /* minimum array size; MLX would pass smaller inputs to Metal kernels as constants and compile every kernel twice */
};

/* ---- kernel source ---- */

/* Creates the kernel under a name unique to its source, because MLX looks up compiled kernels by name. */
static fkv_status open_kernel(const fkv_mlx_state *mlx, const fkv_attn_layer *layer, fkv_kernel which, uint32_t decode_rows,
                              fkv_mlx_kernel *kernel) {
    const size_t length = fkv_kernel_header(mlx->kernels_for, which, layer, decode_rows, NULL, 0);
    char *header = malloc(length + 1);
    FKV_REQUIRE(header != NULL, FKV_NO_MEMORY, "out of memory allocating %zu bytes of kernel source", length + 1);
    (void)fkv_kernel_header(mlx->kernels_for, which, layer, decode_rows, header, length + 1);
    const uint64_t hash = fkv_mlx_source_hash(header);
    char name[48];
    (void)snprintf(name, sizeof name, "flatkv_%d_%016llx", (int)which, (unsigned long long)hash);
    char line[FKV_MLX_INCLUDE_CHARS]; /* the Metal compiler cannot include files */
    const bool as_file = mlx->kernels_for == FKV_KERNEL_CUDA && fkv_mlx_include(header, hash, line);
    const fkv_mlx_kernel_source text = {.name = name,
                                        .header = as_file ? line : header,
                                        .source = fkv_kernel_source(mlx->kernels_for, which, layer->sealed),
                                        .shared_bytes = (int)fkv_kernel_shared_bytes(mlx->kernels_for, which, layer, decode_rows),
                                        .inputs = fkv_kernel_inputs(which, layer),
                                        .outputs = fkv_kernel_outputs(which)};
    fkv_status status = fkv_mlx_kernel_open(kernel, mlx->kernels_for == FKV_KERNEL_METAL, &text);
    free(header);
    return status;
}

/* Returns the layer for which kernels for rows of this type are compiled. */
static fkv_attn_layer shape_for(const fkv_mlx_layer *layer, fkv_type rows) {
    fkv_attn_layer shape = *layer->attn;
    shape.row_type = rows;
    shape.block = *layer->block; /* kernels treat the pool of open pages as a separate layer */
    shape.sealed = layer->open != NULL;
    shape.calibrated = layer->orders.ctx != NULL;
    return shape;
}

/* Returns the kernel for rows of this type. Creates the kernel on first use. Sets the failure flag of the graph if this fails. */
static fkv_mlx_kernel *kernel_for(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, fkv_kernel which, fkv_type rows,
                                  uint32_t decode_rows) {
    fkv_mlx_kernels *kernels = &mlx->layers[layer->kind].kernels;
    fkv_mlx_kernel *kernel = &kernels->of[rows][which];
    const int size = decode_rows > 8 ? 2 : decode_rows > 4 ? 1 : 0;
    if (which == FKV_KERNEL_DECODE) kernel = &kernels->decode[rows][size];
    if (which == FKV_KERNEL_DECODE_MERGE) kernel = &kernels->decode_merge[rows][size];
    if (mlx->graph.failed || kernel->is_open) return kernel;
    const fkv_attn_layer shape = shape_for(layer, rows);
    if (open_kernel(mlx, &shape, which, decode_rows, kernel) != FKV_OK) mlx->graph.failed = true;
    return kernel;
}

static fkv_type rows_type(mlx_array rows) {
    const mlx_dtype type = mlx_array_dtype(rows);
    return type == MLX_FLOAT32 ? FKV_F32 : type == MLX_FLOAT16 ? FKV_F16 : FKV_BF16;
}

static uint32_t threads_of(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer, fkv_kernel which, fkv_type rows) {
    const fkv_attn_layer shape = shape_for(layer, rows);
    return fkv_kernel_threads(mlx->kernels_for, which, &shape);
}

/* ---- open and close ---- */

/* Returns true if two pools of one cache use the same kernel source. Their rotations need not be compared, because all pools of a
 * cache with the same head dimension share one rotation. */
static bool same_kind(const fkv_mlx_layer *one, const fkv_mlx_layer *other) {
    const fkv_attn_layer *a = one->attn;
    const fkv_attn_layer *b = other->attn;
    return a->n_q_heads == b->n_q_heads && a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim &&
           a->rope_dim == b->rope_dim && a->window == b->window && a->n_sinks == b->n_sinks && a->scale == b->scale &&
           a->softcap == b->softcap && (a->sink_logits != NULL) == (b->sink_logits != NULL) &&
           (a->rotate_k != NULL) == (b->rotate_k != NULL) && (a->rotate_v != NULL) == (b->rotate_v != NULL) &&
           (one->open != NULL) == (other->open != NULL) &&
           fkv_codec_same(&one->block->codec[FKV_SIDE_K], &other->block->codec[FKV_SIDE_K]) &&
           fkv_codec_same(&one->block->codec[FKV_SIDE_V], &other->block->codec[FKV_SIDE_V]);
}

static bool same_cut(const fkv_step_plan *a, const fkv_step_plan *b) {
    return a->page_tokens == b->page_tokens && a->window == b->window && a->n_sinks == b->n_sinks &&
           a->heads_per_kv == b->heads_per_kv && a->blocks_per_kv == b->blocks_per_kv && a->tile_queries == b->tile_queries &&
           a->sealed == b->sealed && a->latent == b->latent && a->items_only == b->items_only;
}

static mlx_array first_dependency(fkv_mlx_graph *g) {
    const uint32_t words[DEPENDENCY_WORDS] = {0};
    return fkv_mlx_adopt(g, mlx_array_new_data(words, (const int[]){DEPENDENCY_WORDS}, 1, MLX_UINT32));
}

/* Creates the ring buffer, or replaces it with a larger one if this layer needs more memory. */
static void open_ring(fkv_mlx_state *mlx, const fkv_mlx_layer *layer) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint64_t bytes = fkv_prefill_ring_bytes(mlx->kernels_for, layer->attn);
    const int words = (int)fkv_max_u32((uint32_t)(bytes / sizeof(uint32_t)), DEPENDENCY_WORDS);
    if (g->failed || (mlx->ring.ctx != NULL && mlx_array_size(mlx->ring) >= (size_t)words)) return;
    const mlx_array ring = fkv_mlx_zeros(g, FKV_MLX_SHAPE(words), MLX_UINT32);
    fkv_mlx_eval_one(g, ring);
    fkv_mlx_keep(g, &mlx->ring, ring);
    fkv_mlx_keep(g, &mlx->ring_dependency, first_dependency(g));
}

/* Creates the channel orders of a layer with calibrated keys. Kernels read a copy in device memory, because arrays written by the
 * host are in managed memory on CUDA. */
static void open_orders(fkv_mlx_state *mlx, fkv_mlx_layer *layer) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint32_t n = layer->attn->n_kv_heads * fkv_kernel_order_words(layer->attn);
    if (g->failed) return;
    uint32_t *words = malloc(n * sizeof *words);
    if (words == NULL) {
        (void)fkv_fail(FKV_NO_MEMORY, "out of memory allocating %zu bytes for channel orders", n * sizeof *words);
        g->failed = true;
        return;
    }
    fkv_kernel_orders(layer->attn, words);
    const mlx_array written = fkv_mlx_adopt(g, mlx_array_new_data(words, (const int[]){(int)n}, 1, MLX_UINT32));
    const mlx_array orders = fkv_mlx_fresh(g, written, mlx->constants.zero_u32);
    free(words);
    fkv_mlx_eval_one(g, orders);
    fkv_mlx_keep(g, &layer->orders, orders);
}

void fkv_mlx_fused_open(fkv_mlx_state *mlx, uint32_t l) {
    fkv_mlx_layer *layer = &mlx->layers[l];
    layer->cut = fkv_step_plan_of(layer->attn, fkv_prefill_queries(mlx->kernels_for, layer->attn));
    layer->kind = 0;
    while (!same_kind(&mlx->layers[layer->kind], layer)) layer->kind++;
    layer->table_of = 0;
    while (mlx->layers[layer->table_of].group != layer->group || !same_cut(&mlx->layers[layer->table_of].cut, &layer->cut))
        layer->table_of++;
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_keep(g, &layer->dependency, first_dependency(g));
    if (layer->open != NULL) open_ring(mlx, layer);
    if (layer->open != NULL && layer->attn->calibrated) open_orders(mlx, layer);
    if (l < mlx->n_layers && mlx->kernels_for == FKV_KERNEL_CUDA) {
        const mlx_array counters = fkv_mlx_zeros(g, FKV_MLX_SHAPE(FKV_MERGE_COUNTERS), MLX_UINT32);
        fkv_mlx_eval_one(g, counters);
        fkv_mlx_keep(g, &layer->counters, counters);
    }
    bool in_rows = false;
    if (!g->failed && (_mlx_array_is_row_contiguous(&in_rows, layer->pool) != 0 || !in_rows)) g->failed = true;
    const mlx_array start = fkv_mlx_slice(g, layer->pool, FKV_MLX_SHAPE(0, 0, 0), FKV_MLX_SHAPE(1, 1, DEPENDENCY_WORDS));
    fkv_mlx_eval_one(g, start);
    fkv_mlx_keep(g, &layer->pool_start, start);
}

void fkv_mlx_fused_close(fkv_mlx_layer *layer) {
    for (int type = 0; type < FKV_MLX_ROW_TYPES; type++) {
        for (int k = 0; k < FKV_N_KERNELS; k++) fkv_mlx_kernel_close(&layer->kernels.of[type][k]);
        for (int k = 0; k < FKV_MLX_DECODES; k++) fkv_mlx_kernel_close(&layer->kernels.decode[type][k]);
        for (int k = 0; k < FKV_MLX_DECODES; k++) fkv_mlx_kernel_close(&layer->kernels.decode_merge[type][k]);
    }
}

/* ---- steps ---- */

/* Creates one step table for each distinct `cut`; layers with the same `cut` split their work in the same way. */
fkv_status fkv_mlx_fused_begin(fkv_mlx_state *mlx) {
    for (uint32_t l = 0; l < mlx->n_layers; l++) { /* pools of open pages have no step table */
        fkv_mlx_layer *layer = &mlx->layers[l];
        if (layer->table_of != l) continue;
        const fkv_attn_row *rows = fkv_mlx_rows(mlx, layer);
        uint32_t n = fkv_step_table_words(&layer->cut, rows, mlx->step.n_rows);
        n = fkv_ceil_div(n, TABLE_STEP) * TABLE_STEP;
        uint32_t *words = calloc(n, sizeof *words);
        FKV_REQUIRE(words != NULL, FKV_NO_MEMORY, "out of memory allocating %zu bytes for the table of a step",
                    n * sizeof *words);
        fkv_step_table_fill(&layer->cut, rows, mlx->step.n_rows, words);
        memcpy(layer->header, words, sizeof layer->header);
        layer->table_words = n;
        FKV_TRY(fkv_mlx_table_put(mlx, layer, words, n));
    }
    return FKV_OK;
}

void fkv_mlx_fused_form(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t *form) {
    const uint32_t *words = layer->header;
    const uint32_t of[FKV_MLX_FORM_WORDS] = {
        mlx->step.n_tokens,      words[FKV_STEP_N_ITEMS], words[FKV_STEP_N_SPLITS], words[FKV_STEP_ITEM_QUERIES],
        words[FKV_STEP_N_TILES], words[FKV_STEP_N_SEALS], layer->table_words};
    memcpy(form, of, sizeof of);
}

/* Replaces the dependency array of the layer's pools. A kernel that takes the new array as input runs after all earlier accesses
 * to the pools. */
static void keep_dependency(fkv_mlx_graph *g, fkv_mlx_layer *layer, mlx_array dependency) {
    fkv_mlx_keep(g, &layer->dependency, dependency);
    if (layer->open != NULL) fkv_mlx_keep(g, &layer->open->dependency, dependency);
}

/* Collects the inputs of a kernel in the order of fkv_kernel_inputs(). */
typedef struct kernel_inputs {
    mlx_array at[FKV_MLX_KERNEL_INPUTS];
    uint32_t n;
} kernel_inputs;

static void add_kernel_input(kernel_inputs *to, mlx_array a) { to->at[to->n++] = a; }

/* Starts the inputs of a kernel that reads or seals pages. If the keys are calibrated, the channel orders come first. */
static kernel_inputs page_inputs(const fkv_mlx_layer *layer) {
    kernel_inputs inputs = {.n = 0};
    if (layer->orders.ctx != NULL) add_kernel_input(&inputs, layer->orders);
    return inputs;
}

/* ---- write ---- */

static const fkv_mlx_launch DEPENDENCY = {.out_shape = {1, {DEPENDENCY_WORDS}}, .out_type = MLX_UINT32};

/* Seals the pages that the step has filled. The dependency arrays order the seal kernel after the kernel that writes the rows. */
static void seal(fkv_mlx_state *mlx, fkv_mlx_layer *layer) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_mlx_layer *shared = &mlx->layers[layer->table_of];
    if (shared->header[FKV_STEP_N_SEALS] == 0) return;
    fkv_mlx_kernel *kernel = kernel_for(mlx, layer, FKV_KERNEL_SEAL, FKV_F32, 0);
    fkv_mlx_launch launch = DEPENDENCY;
    launch.threads = threads_of(mlx, layer, FKV_KERNEL_SEAL, FKV_F32);
    launch.blocks[0] = shared->header[FKV_STEP_N_SEALS];
    launch.blocks[1] = layer->attn->n_kv_heads;
    launch.blocks[2] = FKV_N_SIDES;
    kernel_inputs inputs = page_inputs(layer);
    add_kernel_input(&inputs, layer->open->pool_start);
    add_kernel_input(&inputs, layer->pool_start);
    add_kernel_input(&inputs, shared->table);
    add_kernel_input(&inputs, layer->dependency);
    add_kernel_input(&inputs, layer->open->dependency);
    keep_dependency(g, layer, fkv_mlx_kernel_apply(g, kernel, &launch, inputs.at, NULL));
}

fkv_status fkv_mlx_fused_write(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array k, mlx_array v) {
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_layer *to = layer->open != NULL ? layer->open : layer;
    if (fkv_mlx_is_latent(layer)) v = k; /* the rows of a latent layer also contain the RoPE channels */
    if (mlx_array_dtype(v) != mlx_array_dtype(k)) v = fkv_mlx_astype(g, v, mlx_array_dtype(k));
    fkv_mlx_kernel *kernel = kernel_for(mlx, to, FKV_KERNEL_WRITE, rows_type(k), 0);
    fkv_mlx_launch launch = DEPENDENCY;
    launch.threads = threads_of(mlx, to, FKV_KERNEL_WRITE, rows_type(k));
    launch.blocks[0] = mlx->step.n_tokens;
    launch.blocks[1] = layer->attn->n_kv_heads;
    launch.blocks[2] = FKV_N_SIDES;
    const mlx_array inputs[] = {k, v, to->pool_start, mlx->layers[layer->table_of].table, to->dependency};
    fkv_mlx_keep(g, &to->dependency, fkv_mlx_kernel_apply(g, kernel, &launch, inputs, NULL));
    if (layer->open != NULL && !g->failed) seal(mlx, layer);
    fkv_mlx_graph_release(g, 0);
    return fkv_mlx_graph_status(g, "fkv_mlx_write");
}

void fkv_mlx_fused_copy(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t from, uint32_t to) {
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_kernel *kernel = kernel_for(mlx, layer, FKV_KERNEL_COPY_PAGES, FKV_F32, 0);
    const uint32_t pairs[DEPENDENCY_WORDS] = {from, to}; /* padded; see DEPENDENCY_WORDS */
    mlx_array pair = fkv_mlx_adopt(g, mlx_array_new_data(pairs, (const int[]){4, 2}, 2, MLX_UINT32));
    fkv_mlx_launch launch = DEPENDENCY;
    launch.threads = threads_of(mlx, layer, FKV_KERNEL_COPY_PAGES, FKV_F32);
    launch.blocks[0] = 1;
    launch.blocks[1] = layer->attn->n_kv_heads;
    launch.blocks[2] = 1;
    const mlx_array inputs[] = {pair, layer->pool_start, layer->dependency};
    fkv_mlx_keep(g, &layer->dependency, fkv_mlx_kernel_apply(g, kernel, &launch, inputs, NULL));
    fkv_mlx_graph_release(g, 0);
}

void fkv_mlx_fused_put(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint64_t at, uint32_t n, mlx_array numbers) {
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_kernel *kernel = kernel_for(mlx, layer, FKV_KERNEL_PUT_NUMBERS, FKV_F32, 0);
    const uint32_t words[DEPENDENCY_WORDS] = {(uint32_t)at, (uint32_t)(at >> 32), n};
    mlx_array where = fkv_mlx_adopt(g, mlx_array_new_data(words, (const int[]){8}, 1, MLX_UINT32));
    fkv_mlx_launch launch = DEPENDENCY;
    launch.threads = threads_of(mlx, layer, FKV_KERNEL_PUT_NUMBERS, FKV_F32);
    launch.blocks[0] = fkv_ceil_div(n, launch.threads);
    launch.blocks[1] = 1;
    launch.blocks[2] = 1;
    const mlx_array inputs[] = {numbers, where, layer->pool_start, layer->dependency};
    fkv_mlx_keep(g, &layer->dependency, fkv_mlx_kernel_apply(g, kernel, &launch, inputs, NULL));
    fkv_mlx_graph_release(g, 0);
    fkv_mlx_eval_one(g, layer->dependency);
}

/* ---- attend ---- */

/* Returns the inputs that decode and prefill have in common. `ring` is the ring buffer, or an empty handle if the kernel does not
 * use it. */
static kernel_inputs first_inputs(const fkv_mlx_layer *layer, mlx_array q, mlx_array ring, mlx_array table) {
    kernel_inputs inputs = page_inputs(layer);
    add_kernel_input(&inputs, q);
    add_kernel_input(&inputs, layer->pool_start);
    if (layer->open != NULL) add_kernel_input(&inputs, layer->open->pool_start);
    if (ring.ctx != NULL) add_kernel_input(&inputs, ring);
    add_kernel_input(&inputs, table);
    return inputs;
}

static void add_dependencies(const fkv_mlx_layer *layer, kernel_inputs *to) {
    if (layer->open != NULL) add_kernel_input(to, layer->open->dependency);
    add_kernel_input(to, layer->dependency);
}

/* Returns the shape of the output: [T, H, D] or [T, H, 1, D], with as many dimensions as q. */
static fkv_mlx_shape shape_of(const fkv_attn_layer *attn, mlx_array q) {
    fkv_mlx_shape shape = {.n = (int)mlx_array_ndim(q)};
    memcpy(shape.at, mlx_array_shape(q), (size_t)shape.n * sizeof shape.at[0]);
    shape.at[shape.n - 1] = (int)attn->head_dim;
    return shape;
}

/* Computes attention for all decode rows with one kernel, which also merges the splits. The launch is that of the decode kernel
 * without merge. */
static mlx_array decode_and_merge_rows(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, fkv_mlx_launch launch,
                                       uint32_t rows) {
    const fkv_mlx_layer *shared = &mlx->layers[layer->table_of];
    launch.second_words = launch.out_shape.at[0]; /* the second output is the array of partial results */
    launch.out_shape = shape_of(layer->attn, q);
    launch.out_type = mlx_array_dtype(q);
    kernel_inputs read = first_inputs(layer, q, (mlx_array){NULL}, shared->table);
    add_kernel_input(&read, layer->sink_logits);
    add_kernel_input(&read, layer->counters);
    add_dependencies(layer, &read);
    fkv_mlx_kernel *kernel = kernel_for(mlx, layer, FKV_KERNEL_DECODE_MERGE, rows_type(q), rows);
    return fkv_mlx_kernel_apply(&mlx->graph, kernel, &launch, read.at, NULL);
}

/* Computes attention for all decode rows and returns [T, H, D]. The other rows of the result are undefined. */
static mlx_array decode_rows(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_layer *attn = layer->attn;
    const fkv_mlx_layer *shared = &mlx->layers[layer->table_of];
    const uint32_t *words = shared->header;
    const uint32_t queries = words[FKV_STEP_ITEM_QUERIES];
    const uint32_t rows = fkv_decode_rows(mlx->kernels_for, attn, queries);
    const uint32_t shares = fkv_ceil_div(attn->n_q_heads / attn->n_kv_heads * queries, rows);
    const fkv_mlx_launch splits = {.blocks = {words[FKV_STEP_N_SPLITS] * shares, attn->n_kv_heads, 1},
                                   .threads = threads_of(mlx, layer, FKV_KERNEL_DECODE, rows_type(q)),
                                   .out_shape = FKV_MLX_SHAPE((int)fkv_step_parts_floats(attn, words)),
                                   .out_type = MLX_FLOAT32};
    if (fkv_step_merges_in_decode(mlx->kernels_for, attn, words)) return decode_and_merge_rows(mlx, layer, q, splits, rows);
    kernel_inputs read = first_inputs(layer, q, (mlx_array){NULL}, shared->table);
    add_dependencies(layer, &read);
    fkv_mlx_kernel *kernel = kernel_for(mlx, layer, FKV_KERNEL_DECODE, rows_type(q), rows);
    mlx_array parts = fkv_mlx_kernel_apply(g, kernel, &splits, read.at, NULL);

    const fkv_mlx_launch merge = {.blocks = {words[FKV_STEP_N_ITEMS], attn->n_q_heads, queries},
                                  .threads = threads_of(mlx, layer, FKV_KERNEL_MERGE, rows_type(q)),
                                  .out_shape = shape_of(attn, q),
                                  .out_type = mlx_array_dtype(q)};
    const mlx_array folded[] = {parts, shared->table, layer->sink_logits};
    kernel = kernel_for(mlx, layer, FKV_KERNEL_MERGE, rows_type(q), 0);
    return fkv_mlx_kernel_apply(g, kernel, &merge, folded, NULL);
}

/* Computes attention for all prefill rows, copies the results of the decode rows from `decoded`, and returns [T, H, D].
 * `decoded` is an empty handle if there are no decode rows. *done receives an array that becomes available when the kernel has
 * finished. */
static mlx_array prefill_rows(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array decoded, mlx_array *done) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_attn_layer *attn = layer->attn;
    const fkv_mlx_layer *shared = &mlx->layers[layer->table_of];
    const bool beside = decoded.ctx != NULL;
    const fkv_kernel which = beside ? FKV_KERNEL_COPY_DECODED : FKV_KERNEL_PREFILL;
    const uint32_t rows = layer->cut.tile_queries * (attn->n_q_heads / attn->n_kv_heads);
    const fkv_mlx_launch tiles = {.blocks = {shared->header[FKV_STEP_N_TILES] + beside, attn->n_kv_heads,
                                             fkv_ceil_div(rows, fkv_prefill_rows(mlx->kernels_for, attn))},
                                  .threads = threads_of(mlx, layer, which, rows_type(q)),
                                  .out_shape = shape_of(attn, q),
                                  .out_type = mlx_array_dtype(q),
                                  .second_words = DEPENDENCY_WORDS};
    const bool shares = layer->open != NULL;
    kernel_inputs inputs = first_inputs(layer, q, shares ? mlx->ring : (mlx_array){NULL}, shared->table);
    add_kernel_input(&inputs, layer->sink_logits);
    if (beside) add_kernel_input(&inputs, decoded);
    if (shares) add_kernel_input(&inputs, mlx->ring_dependency);
    add_dependencies(layer, &inputs);
    return fkv_mlx_kernel_apply(g, kernel_for(mlx, layer, which, rows_type(q), 0), &tiles, inputs.at, done);
}

/* Returns a small array that depends on `out`, the output of the decode kernel. */
static mlx_array dependency_of(fkv_mlx_state *mlx, mlx_array out) {
    fkv_mlx_graph *g = &mlx->graph;
    if (g->failed) return out;
    mlx_array words = fkv_mlx_view(g, out, MLX_UINT32);
    if (mlx_array_nbytes(out) <= LARGE_ANSWER_BYTES) return words;
    fkv_mlx_shape begin = {.n = (int)mlx_array_ndim(out)};
    fkv_mlx_shape end = {.n = begin.n, .at = {1, 1, 1, 1}};
    end.at[end.n - 1] = DEPENDENCY_WORDS;
    mlx_array some = fkv_mlx_slice(g, words, begin, end);
    return fkv_mlx_fresh(g, some, mlx->constants.zero_u32);
}

fkv_status fkv_mlx_fused_attend(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array q, mlx_array *out) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint32_t *words = mlx->layers[layer->table_of].header;
    mlx_array answer = {NULL};
    mlx_array done = {NULL};
    if (words[FKV_STEP_N_ITEMS] > 0) answer = decode_rows(mlx, layer, q);
    if (words[FKV_STEP_N_TILES] > 0 && !g->failed)
        answer = prefill_rows(mlx, layer, q, answer, &done);
    else
        done = dependency_of(mlx, answer);
    keep_dependency(g, layer, done);
    if (layer->open != NULL && words[FKV_STEP_N_TILES] > 0) fkv_mlx_keep(g, &mlx->ring_dependency, done);
    fkv_mlx_keep(g, out, answer);
    fkv_mlx_graph_release(g, 0);
    return fkv_mlx_graph_status(g, "fkv_mlx_attend");
}
