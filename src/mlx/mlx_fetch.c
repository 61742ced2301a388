/* fkv_mlx_fetch(): the rows of one sequence as arrays, for models that compute attention themselves.
 *
 * The pages of the sequence are gathered with one operation, decoded with MLX operations and rotated back. In the fused method,
 * kernels write into the pool in place, so the gather operation and the next kernel are ordered by the dependency array of the
 * layer. The decoded copy of a layer's rows exists only while the graph that reads it is evaluated.
 */
#include "mlx_codec.h"

/* Orders the next kernel on the layer's pool after the read that produced `pages`. MLX orders GPU work by the buffers that
 * operations take as inputs, so the dependency array must be computed from `pages`. */
static void order_after_read(fkv_mlx_state *mlx, fkv_mlx_layer *layer, mlx_array pages) {
    fkv_mlx_graph *g = &mlx->graph;
    mlx_array word = fkv_mlx_slice(g, pages, FKV_MLX_SHAPE(0, 0, 0), FKV_MLX_SHAPE(1, 1, 1));
    word = fkv_mlx_reshape(g, fkv_mlx_astype(g, word, MLX_UINT32), FKV_MLX_SHAPE(1));
    const mlx_array zero = fkv_mlx_multiply(g, word, mlx->constants.zero_u32);
    fkv_mlx_keep(g, &layer->dependency, fkv_mlx_add(g, layer->dependency, zero));
}

/* Returns page numbers that depend on the kernels that wrote to the layer's pool. The numbers must be computed from the
 * dependency array: a dependency without data (mlx_depends()) orders the evaluation, but not the work of a CUDA graph. */
static mlx_array ordered_after_writes(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, mlx_array numbers) {
    fkv_mlx_graph *g = &mlx->graph;
    const mlx_array words = fkv_mlx_reshape(g, layer->dependency, FKV_MLX_SHAPE(-1));
    const mlx_array word = fkv_mlx_slice(g, words, FKV_MLX_SHAPE(0), FKV_MLX_SHAPE(1));
    return fkv_mlx_add(g, numbers, fkv_mlx_multiply(g, word, mlx->constants.zero_u32));
}

/* Returns the pages that contain the first n_tokens tokens of a row: [pages, G, block.bytes / 2]. */
static mlx_array gathered_pages(fkv_mlx_state *mlx, fkv_mlx_layer *layer, const fkv_attn_row *row, uint32_t n_pages) {
    fkv_mlx_graph *g = &mlx->graph;
    mlx_array numbers = fkv_mlx_adopt(g, mlx_array_new_data(row->view.pages, (const int[]){(int)n_pages}, 1, MLX_UINT32));
    if (mlx->way == FKV_MLX_FUSED) numbers = ordered_after_writes(mlx, layer, numbers);
    const mlx_array pages = fkv_mlx_take_first(g, layer->pool, numbers);
    if (mlx->way == FKV_MLX_FUSED) order_after_read(mlx, layer, pages);
    return pages;
}

/* Decodes one side of gathered pages: float32 [G, n_tokens, D]. In a latent layer, the V side has rope_dim channels. */
static mlx_array decoded_side(fkv_mlx_state *mlx, const fkv_mlx_layer *layer, mlx_array pages, uint32_t n_pages, fkv_side side,
                              uint32_t n_tokens) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_block *block = layer->block;
    const fkv_codec *codec = &block->codec[side];
    const int heads = (int)layer->attn->n_kv_heads;
    const int n = (int)n_pages;
    const int page_tokens = (int)block->page_tokens;
    mlx_array part[FKV_N_PARTS] = {{NULL}};
    for (int p = 0; p < FKV_N_PARTS; p++) {
        const int width = (int)codec->row_bytes[p] / 2;
        const int at = (int)(block->offset[side][p] / 2);
        if (width == 0) continue;
        mlx_array x = fkv_mlx_slice(g, pages, FKV_MLX_SHAPE(0, 0, at), FKV_MLX_SHAPE(n, heads, at + page_tokens * width));
        x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, heads, page_tokens, width));
        x = fkv_mlx_reshape(g, fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 0, 2, 3)), FKV_MLX_SHAPE(heads, n * page_tokens, width));
        part[p] = fkv_mlx_slice(g, x, FKV_MLX_SHAPE(0, 0, 0), FKV_MLX_SHAPE(heads, (int)n_tokens, width));
    }
    const fkv_rotation *rotation = fkv_mlx_stored_rotation(layer, side);
    const mlx_array rows = fkv_mlx_decoded_rows(g, codec, part);
    return rotation != NULL ? fkv_mlx_unrotate(g, rows, rotation, layer->signs[side]) : rows;
}

fkv_status fkv_mlx_fetch(fkv_step *step, uint32_t layer, uint32_t row, mlx_array *k, mlx_array *v) {
    FKV_TRY(fkv_step_check(step, &fkv_device_mlx, layer, FKV_LAYER_WRITTEN, "fkv_mlx_fetch"));
    fkv_mlx_state *mlx = fkv_step_device_state(step);
    fkv_mlx_layer *at = &mlx->layers[layer];
    FKV_TRY(fkv_mlx_require_pages(at, layer, "fkv_mlx_fetch"));
    FKV_REQUIRE(k != NULL && v != NULL, FKV_BAD_ARGUMENT, "fkv_mlx_fetch: k or v is NULL");
    FKV_REQUIRE(row < mlx->step.n_rows, FKV_BAD_ARGUMENT, "fkv_mlx_fetch: row is %u but the step has %u rows", row,
                mlx->step.n_rows);
    FKV_REQUIRE(at->open == NULL && at->attn->window == 0, FKV_UNSUPPORTED,
                "fkv_mlx_fetch: layer %u is sealed or has a window; use a codec such as 8/4 and full attention", layer);
    const fkv_attn_row *of = fkv_mlx_rows(mlx, at) + row;
    const uint32_t n_tokens = of->start + of->n_tokens;
    const uint32_t n_pages = fkv_ceil_div(n_tokens, at->block->page_tokens);
    FKV_ASSERT(n_pages <= of->view.n_fixed);
    const mlx_array pages = gathered_pages(mlx, at, of, n_pages);
    fkv_mlx_keep(&mlx->graph, k, decoded_side(mlx, at, pages, n_pages, FKV_SIDE_K, n_tokens));
    fkv_mlx_keep(&mlx->graph, v, decoded_side(mlx, at, pages, n_pages, FKV_SIDE_V, n_tokens));
    fkv_mlx_graph_release(&mlx->graph, 0);
    return fkv_mlx_graph_status(&mlx->graph, "fkv_mlx_fetch");
}
