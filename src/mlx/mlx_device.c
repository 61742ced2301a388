/* MLX implementation of fkv_device: pools, step tables, access to page bytes for copies and files, and the public functions of
 * flatkv/mlx.h. mlx_plain.c and mlx_fused.c implement write and attend.
 */
#include "mlx_state.h"

#include "../base/carve.h"

#include <float.h>
#include <math.h>

enum { NO_TABLE = UINT32_MAX >> 1 }; /* value of fkv_mlx_layer.table_of for a layer without a step table */

/* ---- state ---- */

/* Lays out the state of the MLX backend with `carve` (carve.h): counts bytes and, if `carve` has a base address, assigns
 * addresses. */
static fkv_mlx_state *layout_state(fkv_carve *carve, uint32_t n_pools, uint32_t n_groups, uint32_t max_seqs, uint64_t n_states) {
    fkv_mlx_state *mlx = FKV_CARVE(carve, 1, fkv_mlx_state);
    fkv_mlx_layer *layers = FKV_CARVE(carve, n_pools, fkv_mlx_layer);
    mlx_array *tables = FKV_CARVE(carve, (uint64_t)n_groups * max_seqs, mlx_array);
    mlx_array *states = FKV_CARVE(carve, n_states, mlx_array);
    if (mlx == NULL) return NULL;
    mlx->n_pools = n_pools;
    mlx->n_groups = n_groups;
    mlx->max_seqs = max_seqs;
    mlx->layers = layers;
    mlx->tables = tables;
    mlx->states = states;
    return mlx;
}

/* Returns the total number of state slots of all layers. */
static uint64_t count_states(const fkv_shape *shape) {
    uint64_t n = 0;
    for (uint32_t l = 0; l < shape->n_layers; l++)
        if (fkv_shape_is_state(fkv_shape_layer(&shape->config, l))) n += shape->slab.group_pages[shape->state_group];
    return n;
}

static uint64_t mlx_state_bytes(const fkv_shape *shape) {
    fkv_carve carve = {0};
    (void)layout_state(&carve, shape->slab.n_layers, shape->pager.n_groups, shape->pager.max_seqs, count_states(shape));
    return carve.overflow ? UINT64_MAX : carve.used;
}

/* ---- selection of stream and method ---- */

/* Returns a new handle to the requested stream, or to the default stream. */
static fkv_status open_stream(const fkv_mlx_config *config, mlx_stream *stream) {
    if (config->stream.ctx != NULL) return fkv_mlx_check(mlx_stream_set(stream, config->stream), "opening the stream");
    mlx_device device = mlx_device_new();
    int code = mlx_get_default_device(&device);
    if (code == 0) code = mlx_get_default_stream(stream, device);
    (void)mlx_device_free(device);
    return fkv_mlx_check(code, "opening the default stream");
}

static fkv_status is_gpu_stream(mlx_stream stream, bool *is_gpu) {
    mlx_device device = mlx_device_new();
    mlx_device_type type = MLX_CPU;
    int code = mlx_stream_get_device(&device, stream);
    if (code == 0) code = mlx_device_get_type(&type, device);
    (void)mlx_device_free(device);
    *is_gpu = type == MLX_GPU;
    return fkv_mlx_check(code, "querying the stream's device");
}

/* The attention parameters of a state layer are all 0. */
static bool is_state(const fkv_attn_layer *attn) { return attn->n_q_heads == 0; }

static fkv_status choose_way(fkv_mlx_state *mlx, fkv_mlx_way wanted) {
    bool is_gpu = false;
    bool has_metal = false;
    FKV_REQUIRE((unsigned)wanted <= FKV_MLX_FUSED, FKV_BAD_CONFIG,
                "invalid fkv_mlx_way %d: expected FKV_MLX_AUTO, FKV_MLX_PLAIN or FKV_MLX_FUSED", (int)wanted);
    FKV_TRY(is_gpu_stream(mlx->stream, &is_gpu));
    FKV_TRY(fkv_mlx_check(mlx_metal_is_available(&has_metal), "querying Metal"));
    mlx->kernels_for = has_metal ? FKV_KERNEL_METAL : FKV_KERNEL_CUDA;
    bool supported = true;
    for (uint32_t l = 0; l < mlx->n_layers; l++)
        supported &= is_state(mlx->layers[l].attn) || fkv_kernels_support(mlx->kernels_for, mlx->layers[l].attn);
    FKV_REQUIRE(
        supported || wanted != FKV_MLX_FUSED, FKV_UNSUPPORTED,
        "the fused kernels support latent layers only on CUDA, with unsealed rows of 16, 8, 4 or 2 bits, up to 512 latent channels "
        "in multiples of 64, and at most half as many RoPE channels: choose FKV_MLX_PLAIN or FKV_MLX_AUTO");
    FKV_REQUIRE(is_gpu || wanted != FKV_MLX_FUSED, FKV_UNSUPPORTED,
                "the fused kernels need a GPU stream but the stream is on the CPU: choose FKV_MLX_PLAIN or FKV_MLX_AUTO");
    mlx->way = is_gpu && wanted != FKV_MLX_PLAIN && supported ? FKV_MLX_FUSED : FKV_MLX_PLAIN;
    mlx->name = !is_gpu ? "mlx cpu" : has_metal ? "mlx metal" : "mlx cuda";
    return FKV_OK;
}

static bool is_on_gpu(const fkv_mlx_config *config) {
    mlx_stream stream = mlx_stream_new();
    bool is_gpu = false;
    fkv_status status = open_stream(config, &stream);
    if (status == FKV_OK) status = is_gpu_stream(stream, &is_gpu);
    (void)mlx_stream_free(stream);
    return status == FKV_OK && is_gpu;
}

enum { MLX_PAGE_BYTES = 16384 };

/* Returns the size of the largest pool of latent pages; in a sealed layer, the size of its two pools. In the plain method on a
 * GPU, the first write of a step to a latent pool copies the pool, because MLX still holds a reference to it after the previous
 * evaluation. */
static uint64_t latent_copy_bytes(const fkv_shape *shape) {
    uint64_t most = 0;
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        const fkv_layer_config *layer = fkv_shape_layer(&shape->config, l);
        fkv_attn_layer attn;
        if (!fkv_shape_is_latent(layer) || fkv_shape_attn(&shape->config, layer, &attn) != FKV_OK) continue;
        /* upper bound: uses the number of pages of the largest group, whichever group the layer belongs to */
        uint64_t n_pages = 0;
        for (uint32_t g = 0; g < shape->slab.n_groups; g++)
            if (shape->slab.group_pages[g] > n_pages) n_pages = shape->slab.group_pages[g];
        uint64_t bytes = n_pages * attn.block.bytes;
        if (attn.sealed) bytes += (uint64_t)shape->slab.group_pages[shape->open_group] * attn.open.bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

/* Returns the size of the arrays with the channel orders of calibrated keys, which the fused method allocates for each layer. */
static uint64_t channel_order_bytes(const fkv_shape *shape) {
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        const fkv_layer_config *layer = fkv_shape_layer(&shape->config, l);
        fkv_attn_layer attn;
        if (fkv_shape_is_state(layer) || fkv_shape_attn(&shape->config, layer, &attn) != FKV_OK || !attn.calibrated) continue;
        const uint64_t words = (uint64_t)attn.n_kv_heads * fkv_kernel_order_words(&attn);
        bytes += (words * sizeof(uint32_t) + MLX_PAGE_BYTES - 1) / MLX_PAGE_BYTES * MLX_PAGE_BYTES;
    }
    return bytes;
}

/* Returns the number of bytes that MLX needs in addition to the pools. On a GPU, MLX rounds the size of an array up to whole
 * memory pages, and the plain method copies latent pools. The fused method on CUDA also allocates counters for each layer, and a
 * ring buffer, in which the thread blocks of a prefill share unpacked pages. All layers share one ring buffer, which is large
 * enough for each of them. */
static uint64_t mlx_extra_bytes(const fkv_shape *shape, const void *options) {
    const fkv_mlx_config usual = fkv_mlx_config_default();
    const fkv_mlx_config *config = options != NULL ? options : &usual;
    bool has_metal = false;
    if (!is_on_gpu(config)) return 0;
    const uint64_t rounding = (shape->slab.n_layers + count_states(shape)) * MLX_PAGE_BYTES;
    uint64_t plain = rounding + latent_copy_bytes(shape);
    if (config->way == FKV_MLX_PLAIN) return plain;
    const uint64_t orders = channel_order_bytes(shape);
    plain += orders;
    if (mlx_metal_is_available(&has_metal) != 0 || has_metal) return plain;
    uint64_t most = 0;
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        fkv_attn_layer attn;
        if (fkv_shape_is_state(fkv_shape_layer(&shape->config, l))) continue;
        if (fkv_shape_attn(&shape->config, fkv_shape_layer(&shape->config, l), &attn) != FKV_OK ||
            !fkv_kernels_support(FKV_KERNEL_CUDA, &attn))
            return plain;
        const uint64_t bytes = fkv_prefill_ring_bytes(FKV_KERNEL_CUDA, &attn);
        most = bytes > most ? bytes : most;
    }
    return rounding + orders + most + MLX_PAGE_BYTES + (uint64_t)shape->n_layers * FKV_MERGE_COUNTERS * sizeof(uint32_t);
}

/* Returns the available memory, which on a GPU is MLX's memory limit minus the memory that MLX uses. */
static uint64_t mlx_available(const void *options, const char **source) {
    size_t limit = 0;
    size_t taken = 0;
    if (!is_on_gpu(options)) return fkv_memory_available(source);
    if (mlx_get_memory_limit(&limit) != 0 || mlx_get_active_memory(&taken) != 0) return fkv_memory_available(source);
    if (source != NULL) *source = "MLX's memory limit";
    return limit > taken ? limit - taken : 0;
}

/* ---- open and close ---- */

static void release_array(mlx_array *a) {
    (void)mlx_array_free(*a);
    *a = (mlx_array){NULL};
}

static mlx_array signs_of(fkv_mlx_graph *g, const fkv_rotation *rotation) {
    float signs[FKV_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < rotation->dim; d++) signs[d] = (rotation->signs[d / 32] >> d % 32 & 1) != 0 ? -1.0f : 1.0f;
    return fkv_mlx_adopt(g, mlx_array_new_data(signs, (const int[]){(int)rotation->dim}, 1, MLX_FLOAT32));
}

/* Creates the array of sink logits: [H], padded to at least 8 elements, because MLX passes smaller inputs to Metal kernels as
 * constants. */
static mlx_array sink_logits_of(fkv_mlx_graph *g, const fkv_attn_layer *attn) {
    const int n = (int)fkv_max_u32(attn->n_q_heads, 8);
    const mlx_array zeroes = fkv_mlx_zeros(g, FKV_MLX_SHAPE(n), MLX_FLOAT32);
    if (attn->sink_logits == NULL) return zeroes;
    mlx_array given =
        fkv_mlx_adopt(g, mlx_array_new_data(attn->sink_logits, (const int[]){(int)attn->n_q_heads}, 1, MLX_FLOAT32));
    return fkv_mlx_slice_update(g, zeroes, given, FKV_MLX_SHAPE(0), FKV_MLX_SHAPE((int)attn->n_q_heads));
}

static void open_layer(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t n_pages) {
    const fkv_attn_layer *attn = layer->attn;
    fkv_mlx_graph *g = &mlx->graph;
    if (layer->states != NULL) {
        fkv_mlx_states_open(g, layer);
        return;
    }
    const mlx_array pool =
        fkv_mlx_zeros(g, FKV_MLX_SHAPE((int)n_pages, (int)attn->n_kv_heads, (int)(layer->block->bytes / 2)), MLX_UINT16);
    fkv_mlx_eval_one(g, pool); /* evaluating the array commits the memory of the pool */
    fkv_mlx_keep(g, &layer->pool, pool);
    fkv_mlx_keep(g, &layer->sink_logits, sink_logits_of(g, attn));
    if (attn->rotate_k != NULL) fkv_mlx_keep(g, &layer->signs[FKV_SIDE_K], signs_of(g, attn->rotate_k));
    if (attn->rotate_v != NULL) fkv_mlx_keep(g, &layer->signs[FKV_SIDE_V], signs_of(g, attn->rotate_v));
    if (mlx->way == FKV_MLX_PLAIN && attn->calibrated && layer->block == &attn->block)
        fkv_mlx_channels_open(g, attn, &layer->channels);
}

static void close_channels(fkv_mlx_channels *c) {
    mlx_array *const one[] = {&c->bins, &c->channel, &c->place, &c->packed, &c->there};
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++) release_array(one[i]);
    for (int d = 0; d < FKV_MAX_DIGITS; d++) {
        release_array(&c->digit[d]);
        release_array(&c->weight[d]);
    }
}

static void open_constants(fkv_mlx_graph *g, fkv_mlx_constants *c, fkv_type page_type) {
    const float limit = fkv_codec_limit(page_type);
    fkv_mlx_keep(g, &c->zero, fkv_mlx_adopt(g, mlx_array_new_float32(0.0f)));
    fkv_mlx_keep(g, &c->limit, fkv_mlx_adopt(g, mlx_array_new_float32(limit)));
    fkv_mlx_keep(g, &c->minus_limit, fkv_mlx_adopt(g, mlx_array_new_float32(-limit)));
    fkv_mlx_keep(g, &c->minus_infinity, fkv_mlx_adopt(g, mlx_array_new_float32(-INFINITY)));
    fkv_mlx_keep(g, &c->lowest, fkv_mlx_adopt(g, mlx_array_new_float32(-FLT_MAX)));
    const uint16_t zero = 0;
    const uint32_t wide_zero = 0;
    fkv_mlx_keep(g, &c->zero_u16, fkv_mlx_adopt(g, mlx_array_new_data(&zero, (const int[]){1}, 1, MLX_UINT16)));
    fkv_mlx_keep(g, &c->zero_u32, fkv_mlx_adopt(g, mlx_array_new_data(&wide_zero, (const int[]){1}, 1, MLX_UINT32)));
}

/* Assigns pools to layers, and slots to state layers. The pools of open pages are stored after those of all layers, in layer
 * order. */
static void place_pools(fkv_mlx_state *mlx, const fkv_device_place *place) {
    mlx->n_layers = place->config->n_layers;
    uint32_t n_open = 0;
    for (uint32_t l = 0; l < mlx->n_layers; l++) {
        const fkv_attn_layer *attn = &place->layers[l];
        mlx->layers[l].attn = attn;
        mlx->layers[l].block = &attn->block;
        if (!attn->sealed) continue;
        fkv_mlx_layer *open = &mlx->layers[mlx->n_layers + n_open++];
        mlx->layers[l].open = open;
        open->attn = attn;
        open->block = &attn->open;
    }
    FKV_ASSERT(mlx->n_layers + n_open == mlx->n_pools);
    mlx_array *states = mlx->states;
    for (uint32_t l = 0; l < mlx->n_pools; l++) {
        fkv_mlx_layer *layer = &mlx->layers[l];
        layer->group = place->slab->layers[l].group;
        if (!is_state(layer->attn)) continue;
        layer->states = states;
        layer->n_states = place->slab->group_pages[layer->group];
        layer->n_state_values = place->slab->layers[l].block_bytes / (uint32_t)sizeof(float);
        states += layer->n_states;
    }
}

static void free_tables(fkv_mlx_state *mlx) {
    for (size_t i = 0; i < (size_t)mlx->n_groups * mlx->max_seqs; i++)
        if (mlx->tables[i].ctx != NULL) release_array(&mlx->tables[i]);
    for (uint32_t l = 0; l < mlx->n_pools; l++) release_array(&mlx->layers[l].table);
}

static void mlx_close(void *state) {
    fkv_mlx_state *mlx = state;
    fkv_mlx_constants *c = &mlx->constants;
    mlx_array *const constants[] = {&c->zero,   &c->limit,    &c->minus_limit, &c->minus_infinity,
                                    &c->lowest, &c->zero_u16, &c->zero_u32};
    fkv_mlx_graph_release(&mlx->graph, 0);
    free_tables(mlx);
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) release_array(constants[i]);
    release_array(&mlx->ring);
    release_array(&mlx->ring_dependency);
    fkv_mlx_kernel_close(&mlx->update_table);
    for (uint32_t l = 0; l < mlx->n_pools; l++) {
        fkv_mlx_fused_close(&mlx->layers[l]);
        fkv_mlx_table_close(&mlx->layers[l]);
        release_array(&mlx->layers[l].dependency);
        release_array(&mlx->layers[l].pool_start);
        release_array(&mlx->layers[l].counters);
        release_array(&mlx->layers[l].orders);
        release_array(&mlx->layers[l].pool);
        release_array(&mlx->layers[l].sink_logits);
        close_channels(&mlx->layers[l].channels);
        fkv_mlx_states_close(&mlx->layers[l]);
        for (int side = 0; side < FKV_N_SIDES; side++) release_array(&mlx->layers[l].signs[side]);
    }
    (void)mlx_stream_free(mlx->stream);
}

static const fkv_page_store page_store;

static fkv_status mlx_open(const fkv_device_place *place) {
    const fkv_mlx_config *config = place->options;
    fkv_slab *slab = place->slab;
    fkv_carve carve = {.base = place->state, .size = UINT64_MAX};
    uint64_t n_states = 0;
    for (uint32_t l = 0; l < place->config->n_layers; l++)
        if (is_state(&place->layers[l])) n_states += slab->group_pages[slab->layers[l].group];
    fkv_mlx_state *mlx = layout_state(&carve, slab->n_layers, slab->n_groups, place->config->max_seqs, n_states);
    mlx->slab = slab;
    mlx->stream = mlx_stream_new();
    fkv_status status = open_stream(config, &mlx->stream);
    place_pools(mlx, place);
    if (status == FKV_OK) status = choose_way(mlx, config->way);
    mlx->graph.stream = mlx->stream;
    mlx->graph.failed = status != FKV_OK;
    open_constants(&mlx->graph, &mlx->constants, place->config->page_type);
    for (uint32_t l = 0; l < slab->n_layers; l++) {
        open_layer(mlx, &mlx->layers[l], slab->group_pages[mlx->layers[l].group]);
        if (mlx->way == FKV_MLX_FUSED && mlx->layers[l].states == NULL) fkv_mlx_fused_open(mlx, l);
        if (mlx->layers[l].states != NULL) mlx->layers[l].table_of = NO_TABLE;
        fkv_mlx_graph_release(&mlx->graph, 0);
    }
    fkv_mlx_graph_release(&mlx->graph, 0);
    if (status == FKV_OK) status = fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_cache_open");
    if (status != FKV_OK) {
        mlx_close(mlx);
        return status;
    }
    slab->store = &page_store;
    slab->store_self = mlx;
    return FKV_OK;
}

static const char *mlx_name(const void *state) { return ((const fkv_mlx_state *)state)->name; }

/* ---- steps ---- */

static void mlx_step_end(void *state) {
    fkv_mlx_state *mlx = state;
    free_tables(mlx);
    mlx->step = (fkv_device_step){0};
}

/* Creates a page table for each row of the step. The table covers the sequence up to the last token of the row. */
static fkv_status begin_plain(fkv_mlx_state *mlx) {
    const fkv_device_step *step = &mlx->step;
    for (uint32_t g = 0; g < mlx->n_groups; g++) {
        for (uint32_t r = 0; r < step->n_rows; r++) {
            const fkv_attn_row *row = &step->rows[(size_t)g * step->stride + r];
            uint32_t n = (row->start + row->n_tokens - 1) / mlx->slab->page_tokens + 1;
            n = fkv_min_u32(n, row->view.n_fixed + row->view.n_ring);
            mlx_array table = mlx_array_new_data(row->view.pages, (const int[]){(int)n}, 1, MLX_UINT32);
            mlx->tables[(size_t)g * mlx->max_seqs + r] = table;
            if (table.ctx == NULL) return fkv_mlx_failed("fkv_step_begin");
        }
    }
    return FKV_OK;
}

static fkv_status mlx_step_begin(void *state, const fkv_device_step *step) {
    fkv_mlx_state *mlx = state;
    mlx->step = *step;
    fkv_status status = mlx->way == FKV_MLX_FUSED ? fkv_mlx_fused_begin(mlx) : begin_plain(mlx);
    if (status != FKV_OK) mlx_step_end(mlx);
    return status;
}

/* ---- page bytes outside of steps ---- */

/* Returns n 16-bit words of a page in one layer, starting at word `from`, as an evaluated array that does not share memory with
 * the pool. */
static mlx_array read_page_words(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, uint32_t page, uint64_t from, uint64_t n) {
    fkv_mlx_graph *g = &mlx->graph;
    mlx_array view = {NULL};
    if (mlx->way == FKV_MLX_FUSED) fkv_mlx_eval_one(g, layer->dependency);
    if (g->failed) return view;
    const uint64_t run = (uint64_t)layer->attn->n_kv_heads * layer->block->bytes / 2;
    int code =
        mlx_as_strided(&view, layer->pool, (const int[]){(int)n}, 1, (const int64_t[]){1}, 1, page * run + from, g->stream);
    if (code != 0) g->failed = true;
    mlx_array fresh = fkv_mlx_fresh(g, fkv_mlx_adopt(g, view), mlx->constants.zero_u16);
    fkv_mlx_eval_one(g, fresh);
    return fresh;
}

/* Writes the words in `numbers` to a page, starting at word `from`. The plain method needs one slice update per KV head. */
static void write_numbers(fkv_mlx_state *mlx, fkv_mlx_layer *layer, uint32_t page, uint64_t from, uint64_t n, mlx_array numbers) {
    fkv_mlx_graph *g = &mlx->graph;
    const uint64_t block = layer->block->bytes / 2;
    if (mlx->way == FKV_MLX_FUSED) {
        fkv_mlx_fused_put(mlx, layer, page * block * layer->attn->n_kv_heads + from, (uint32_t)n, numbers);
        return;
    }
    for (uint64_t done = 0; done < n;) {
        const int head = (int)((from + done) / block);
        const uint64_t at = (from + done) % block;
        const uint64_t part = n - done < block - at ? n - done : block - at;
        mlx_array update = fkv_mlx_slice(g, numbers, FKV_MLX_SHAPE((int)done), FKV_MLX_SHAPE((int)(done + part)));
        update = fkv_mlx_reshape(g, update, FKV_MLX_SHAPE(1, 1, (int)part));
        mlx_array pool = fkv_mlx_slice_update(g, layer->pool, update, FKV_MLX_SHAPE((int)page, head, (int)at),
                                              FKV_MLX_SHAPE((int)page + 1, head + 1, (int)(at + part)));
        fkv_mlx_keep(g, &layer->pool, pool);
        done += part;
    }
    fkv_mlx_graph_release(g, 0);
    fkv_mlx_eval_one(g, layer->pool);
}

static fkv_status store_copy(void *self, uint32_t group, uint32_t from, uint32_t to) {
    fkv_mlx_state *mlx = self;
    for (uint32_t l = 0; l < mlx->n_pools; l++) {
        fkv_mlx_layer *layer = &mlx->layers[l];
        if (layer->group != group) continue;
        if (layer->states != NULL) {
            fkv_mlx_keep(&mlx->graph, &layer->states[to], layer->states[from]);
            continue;
        }
        if (mlx->way == FKV_MLX_FUSED) {
            fkv_mlx_fused_copy(mlx, layer, from, to);
            continue;
        }
        const uint64_t n = fkv_slab_run_bytes(mlx->slab, l) / 2;
        mlx_array page = {NULL};
        fkv_mlx_keep(&mlx->graph, &page, read_page_words(mlx, layer, from, 0, n));
        fkv_mlx_graph_release(&mlx->graph, 0);
        write_numbers(mlx, layer, to, 0, n, page);
        (void)mlx_array_free(page);
    }
    return fkv_mlx_graph_status(&mlx->graph, "copying a page");
}

static fkv_status store_read(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, uint8_t *out) {
    fkv_mlx_state *mlx = self;
    FKV_ASSERT(from % 2 == 0 && bytes % 2 == 0);
    if (mlx->layers[layer].states != NULL) {
        fkv_mlx_states_read(&mlx->graph, &mlx->layers[layer], page, from, bytes, out);
        return fkv_mlx_graph_status(&mlx->graph, "reading a state");
    }
    mlx_array numbers = read_page_words(mlx, &mlx->layers[layer], page, from / 2, bytes / 2);
    const uint16_t *data = mlx->graph.failed ? NULL : mlx_array_data_uint16(numbers);
    if (data != NULL) memcpy(out, data, bytes);
    if (data == NULL) mlx->graph.failed = true;
    fkv_mlx_graph_release(&mlx->graph, 0);
    return fkv_mlx_graph_status(&mlx->graph, "reading a page");
}

static fkv_status store_write(void *self, uint32_t layer, uint32_t page, uint64_t from, uint64_t bytes, const uint8_t *in) {
    fkv_mlx_state *mlx = self;
    FKV_ASSERT(from % 2 == 0 && bytes % 2 == 0);
    if (mlx->layers[layer].states != NULL) {
        fkv_mlx_states_write(&mlx->graph, &mlx->layers[layer], page, from, bytes, in);
        return fkv_mlx_graph_status(&mlx->graph, "writing a state");
    }
    mlx_array numbers = mlx_array_new_data(in, (const int[]){(int)(bytes / 2)}, 1, MLX_UINT16);
    if (numbers.ctx == NULL) return fkv_mlx_failed("writing a page");
    write_numbers(mlx, &mlx->layers[layer], page, from / 2, bytes / 2, numbers);
    (void)mlx_array_free(numbers);
    return fkv_mlx_graph_status(&mlx->graph, "writing a page");
}

static const fkv_page_store page_store = {.copy = store_copy, .read = store_read, .write = store_write};

const fkv_device fkv_device_mlx = {.on_host = false,
                                   .calls = "fkv_mlx_write() and fkv_mlx_attend() of flatkv/mlx.h",
                                   .state_bytes = mlx_state_bytes,
                                   .extra_bytes = mlx_extra_bytes,
                                   .available = mlx_available,
                                   .open = mlx_open,
                                   .close = mlx_close,
                                   .name = mlx_name,
                                   .step_begin = mlx_step_begin,
                                   .step_end = mlx_step_end};

/* ---- public functions ---- */

fkv_mlx_config fkv_mlx_config_default(void) { return (fkv_mlx_config){.way = FKV_MLX_AUTO}; }

fkv_status fkv_mlx_plan_make(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_plan *plan) {
    FKV_REQUIRE(config != NULL && plan != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_plan_make: config or plan is NULL");
    fkv_mlx_catch_errors();
    return fkv_plan_make_on(&fkv_device_mlx, mlx_config, config, plan);
}

fkv_status fkv_mlx_cache_open(const fkv_config *config, const fkv_mlx_config *mlx_config, fkv_cache **cache) {
    FKV_REQUIRE(config != NULL && cache != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_cache_open: config or cache is NULL");
    const fkv_mlx_config usual = fkv_mlx_config_default();
    fkv_mlx_catch_errors();
    return fkv_cache_open_on(&fkv_device_mlx, mlx_config != NULL ? mlx_config : &usual, config, cache);
}

fkv_mlx_way fkv_mlx_cache_way(const fkv_cache *cache) {
    const fkv_mlx_state *mlx = cache != NULL ? fkv_cache_device_state(cache, &fkv_device_mlx) : NULL;
    return mlx != NULL ? mlx->way : FKV_MLX_AUTO;
}

/* Checks the type and shape of a K, V or Q array: [T, heads, D] or, for the fused kernels, [T, heads, 1, D]. */
static fkv_status check_rows(const fkv_mlx_state *mlx, mlx_array a, uint32_t n_heads, uint32_t dim, const char *what) {
    const uint32_t n_tokens = mlx->step.n_tokens;
    FKV_REQUIRE(a.ctx != NULL, FKV_BAD_ARGUMENT, "%s is an empty array", what);
    const mlx_dtype type = mlx_array_dtype(a);
    FKV_REQUIRE(type == MLX_FLOAT16 || type == MLX_BFLOAT16 || type == MLX_FLOAT32, FKV_BAD_ARGUMENT,
                "%s has MLX type %d: expected float16, bfloat16 or float32", what, (int)type);
    const size_t n_dims = mlx_array_ndim(a);
    const int *shape = mlx_array_shape(a);
    const bool of_one = n_dims == 4 && shape[2] == 1 && mlx->way == FKV_MLX_FUSED;
    FKV_REQUIRE(n_dims == 3 || of_one, FKV_BAD_ARGUMENT, "%s has %zu dimensions: expected [%u, %u, %u]", what, n_dims, n_tokens,
                n_heads, dim);
    const int last = shape[n_dims - 1];
    FKV_REQUIRE(shape[0] == (int)n_tokens && shape[1] == (int)n_heads && last == (int)dim, FKV_BAD_ARGUMENT,
                "%s has shape [%d, %d, %d]: expected [%u, %u, %u]", what, shape[0], shape[1], last, n_tokens, n_heads, dim);
    return FKV_OK;
}

fkv_status fkv_mlx_require_pages(const fkv_mlx_layer *layer, uint32_t index, const char *call) {
    FKV_REQUIRE(layer->states == NULL, FKV_BAD_ARGUMENT,
                "%s: layer %u has a recurrent state and no keys and values; use fkv_mlx_state_get() and fkv_mlx_state_put()",
                call, index);
    return FKV_OK;
}

fkv_status fkv_mlx_write(fkv_step *step, uint32_t layer, mlx_array k, mlx_array v) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_UNWRITTEN, "fkv_mlx_write"));
    fkv_mlx_state *mlx = fkv_step_device_state(step);
    fkv_mlx_layer *at = &mlx->layers[layer];
    FKV_TRY(fkv_mlx_require_pages(at, layer, "fkv_mlx_write"));
    const bool is_latent = fkv_mlx_is_latent(at);
    FKV_TRY(check_rows(mlx, k, at->attn->n_kv_heads, fkv_attn_key_dim(at->attn), "fkv_mlx_write: k"));
    FKV_REQUIRE(!is_latent || v.ctx == NULL, FKV_BAD_ARGUMENT,
                "fkv_mlx_write: v of layer %u is not empty, but a latent layer has no separate values", layer);
    if (!is_latent) FKV_TRY(check_rows(mlx, v, at->attn->n_kv_heads, at->attn->head_dim, "fkv_mlx_write: v"));
    FKV_TRY(mlx->way == FKV_MLX_FUSED ? fkv_mlx_fused_write(mlx, at, k, v) : fkv_mlx_plain_write(mlx, at, k, v));
    fkv_step_wrote(step, layer);
    return FKV_OK;
}

/* Returns the number of packed bytes that are visible to the queries of the step. In a sealed layer, the number includes the
 * sealed form of every page and, for each row, the open form of two pages. */
static uint64_t packed_bytes(const fkv_mlx_state *mlx, const fkv_mlx_layer *layer) {
    const fkv_attn_layer *attn = layer->attn;
    const fkv_attn_row *rows = fkv_mlx_rows(mlx, layer);
    uint64_t tokens = 0;
    uint64_t open = 0;
    for (uint32_t r = 0; r < mlx->step.n_rows; r++) {
        const uint64_t end = (uint64_t)rows[r].start + rows[r].n_tokens;
        const uint64_t reach = (uint64_t)attn->window + attn->n_sinks + rows[r].n_tokens - 1;
        tokens += attn->window != 0 && reach < end ? reach : end;
        if (attn->sealed) open += 2 * attn->block.page_tokens < end ? 2 * attn->block.page_tokens : end;
    }
    return attn->n_kv_heads * (tokens * attn->block.token_bytes + open * attn->open.token_bytes);
}

fkv_status fkv_mlx_attend(fkv_step *step, uint32_t layer, mlx_array q, mlx_array *out) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_ANY, "fkv_mlx_attend"));
    fkv_mlx_state *mlx = fkv_step_device_state(step);
    fkv_mlx_layer *at = &mlx->layers[layer];
    FKV_TRY(fkv_mlx_require_pages(at, layer, "fkv_mlx_attend"));
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_WRITTEN, "fkv_mlx_attend"));
    FKV_REQUIRE(out != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_attend: out is NULL");
    FKV_TRY(check_rows(mlx, q, at->attn->n_q_heads, fkv_attn_key_dim(at->attn), "fkv_mlx_attend: q"));
    FKV_TRY(mlx->way == FKV_MLX_FUSED ? fkv_mlx_fused_attend(mlx, at, q, out) : fkv_mlx_plain_attend(mlx, at, q, out));
    fkv_step_attended(step, packed_bytes(mlx, at));
    return FKV_OK;
}

static fkv_status require_state(const fkv_mlx_layer *at, uint32_t layer, const char *call) {
    FKV_REQUIRE(at->states != NULL, FKV_BAD_ARGUMENT,
                "%s: layer %u stores keys and values; use fkv_mlx_write() and fkv_mlx_attend()", call, layer);
    return FKV_OK;
}

fkv_status fkv_mlx_state_get(fkv_step *step, uint32_t layer, uint32_t row, mlx_array *state) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_ANY, "fkv_mlx_state_get"));
    fkv_mlx_state *mlx = fkv_step_device_state(step);
    FKV_TRY(require_state(&mlx->layers[layer], layer, "fkv_mlx_state_get"));
    return fkv_mlx_states_get(mlx, &mlx->layers[layer], row, state);
}

fkv_status fkv_mlx_state_put(fkv_step *step, uint32_t layer, const mlx_array *states) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_UNWRITTEN, "fkv_mlx_state_put"));
    fkv_mlx_state *mlx = fkv_step_device_state(step);
    FKV_TRY(require_state(&mlx->layers[layer], layer, "fkv_mlx_state_put"));
    FKV_TRY(fkv_mlx_states_put(mlx, &mlx->layers[layer], states));
    fkv_step_wrote(step, layer);
    return FKV_OK;
}

fkv_status fkv_mlx_step_pending(fkv_step *step, mlx_vector_array arrays) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, 0, FKV_LAYER_WRITTEN, "fkv_mlx_step_pending"));
    const fkv_mlx_state *mlx = fkv_step_device_state(step);
    for (uint32_t l = 1; l < mlx->n_layers; l++)
        FKV_TRY(fkv_step_check(step, &fkv_device_mlx, l, FKV_LAYER_WRITTEN, "fkv_mlx_step_pending"));
    for (uint32_t l = 0; l < mlx->n_pools; l++) {
        const fkv_mlx_layer *layer = &mlx->layers[l];
        for (uint32_t r = 0; layer->states != NULL && r < mlx->step.n_rows; r++)
            FKV_TRY(fkv_mlx_check(mlx_vector_array_append_value(arrays, layer->states[mlx->step.states[r].to]),
                                  "fkv_mlx_step_pending"));
        if (layer->states != NULL) continue;
        const mlx_array newest = mlx->way == FKV_MLX_FUSED ? mlx->layers[l].dependency : mlx->layers[l].pool;
        FKV_TRY(fkv_mlx_check(mlx_vector_array_append_value(arrays, newest), "fkv_mlx_step_pending"));
    }
    return FKV_OK;
}

/* Returns the MLX state of an open step. Fails if the cache does not use the fused method. */
static fkv_status kept_step(fkv_step *step, const char *call, fkv_mlx_state **mlx) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, 0, FKV_LAYER_ANY, call));
    *mlx = fkv_step_device_state(step);
    FKV_REQUIRE(
        (*mlx)->way == FKV_MLX_FUSED, FKV_UNSUPPORTED,
        "%s: the graphs of FKV_MLX_PLAIN depend on sequence lengths and cannot be reused; open the cache with FKV_MLX_FUSED",
        call);
    for (uint32_t l = 0; l < (*mlx)->n_layers; l++)
        FKV_REQUIRE((*mlx)->layers[l].states == NULL, FKV_UNSUPPORTED,
                    "%s: layer %u has a recurrent state, so the graph of the step cannot be reused", call, l);
    return FKV_OK;
}

fkv_status fkv_mlx_step_state(fkv_step *step, mlx_vector_array arrays, uint32_t *form, uint32_t *n_tables) {
    fkv_mlx_state *mlx = NULL;
    FKV_REQUIRE(form != NULL && n_tables != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_step_state: form or n_tables is NULL");
    FKV_TRY(kept_step(step, "fkv_mlx_step_state", &mlx));
    const uint32_t room = *n_tables;
    *n_tables = 0;
    for (uint32_t l = 0; l < mlx->n_layers; l++) {
        const fkv_mlx_layer *layer = &mlx->layers[l];
        FKV_REQUIRE(
            layer->open == NULL || mlx->layers[layer->table_of].header[FKV_STEP_N_TILES] == 0, FKV_UNSUPPORTED,
            "fkv_mlx_step_state: a step that prefills sealed layers cannot be compiled; use at most %d tokens per sequence",
            FKV_ITEM_QUERIES);
        if (layer->table_of != l) continue;
        FKV_REQUIRE(*n_tables < room, FKV_BAD_ARGUMENT, "fkv_mlx_step_state: n_tables is %u, but the step has more tables", room);
        fkv_mlx_fused_form(mlx, layer, form + (size_t)*n_tables * FKV_MLX_FORM_WORDS);
        FKV_TRY(fkv_mlx_check(mlx_vector_array_append_value(arrays, layer->table), "fkv_mlx_step_state"));
        ++*n_tables;
    }
    for (uint32_t l = 0; l < mlx->n_pools; l++)
        FKV_TRY(fkv_mlx_check(mlx_vector_array_append_value(arrays, mlx->layers[l].dependency), "fkv_mlx_step_state"));
    return FKV_OK;
}

fkv_status fkv_mlx_step_put_state(fkv_step *step, mlx_vector_array arrays, bool replayed) {
    fkv_mlx_state *mlx = NULL;
    FKV_TRY(kept_step(step, "fkv_mlx_step_put_state", &mlx));
    size_t n_expected = mlx->n_pools;
    for (uint32_t l = 0; l < mlx->n_layers; l++) n_expected += mlx->layers[l].table_of == l;
    FKV_REQUIRE(mlx_vector_array_size(arrays) == n_expected, FKV_BAD_ARGUMENT,
                "fkv_mlx_step_put_state: got %zu arrays, expected %zu as returned by fkv_mlx_step_state()",
                mlx_vector_array_size(arrays), n_expected);
    int code = 0;
    size_t at = 0;
    for (uint32_t l = 0; l < mlx->n_layers; l++)
        if (mlx->layers[l].table_of == l) code |= mlx_vector_array_get(&mlx->layers[l].table, arrays, at++);
    for (uint32_t l = 0; l < mlx->n_pools; l++) code |= mlx_vector_array_get(&mlx->layers[l].dependency, arrays, at++);
    FKV_TRY(fkv_mlx_check(code, "fkv_mlx_step_put_state"));
    for (uint32_t l = 0; replayed && l < mlx->n_layers; l++) {
        fkv_step_wrote(step, l);
        fkv_step_attended(step, packed_bytes(mlx, &mlx->layers[l]));
    }
    return FKV_OK;
}

fkv_status fkv_mlx_step_bytes(const fkv_config *config, const fkv_mlx_config *mlx_config, uint64_t *bytes) {
    FKV_REQUIRE(config != NULL && bytes != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_step_bytes: config or bytes is NULL");
    (void)mlx_config; /* the bound of the plain method also holds for the fused method, which needs less memory */
    *bytes = 0;
    for (uint32_t i = 0; i < config->n_layers; i++) {
        if (fkv_shape_is_state(fkv_shape_layer(config, i))) continue;
        const uint64_t layer = fkv_mlx_plain_bytes(fkv_shape_layer(config, i), config->max_step_tokens);
        if (layer > *bytes) *bytes = layer;
    }
    return FKV_OK;
}
