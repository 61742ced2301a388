/* Converts tensors of a file to MLX arrays, one at a time. In addition to the arrays, memory contains at most a temporary copy
 * of one matrix. For experts, this is one matrix kind (gate, up or down) of all experts of a layer. The mapped pages of
 * converted tensors are released. See array_weights.h.
 */
#include "array_weights.h"

#include "../../base/float16.h"
#include "../forward/tensor_matrix.h"

#include <stdlib.h>

enum { GROUP = 32, WORD_BITS = 32 };

/* ---- representation of a tensor ---- */

/* Returns the number of bits per code, or 0 if the tensor is converted to half-precision floats. Types with groups of 16 are
 * converted to half precision, because MLX has no affine groups of 16. Codes of table formats are converted to 8-bit affine
 * codes. */
static int code_bits(const fkv_tensor *tensor) {
    if (tensor->bits != 0) return (int)tensor->bits;
    uint32_t group = 0;
    fkv_panel_layout layout = fkv_panel_layout_of(fkv_tensor_matrix_kind(tensor, &group));
    if (group != GROUP) return 0;
    return layout.table ? 8 : (int)layout.bits;
}

/* The number of columns of a quantized tensor is a multiple of 32, so that codes of any width fill whole words. */
static uint64_t row_words(const fkv_tensor *tensor) { return (uint64_t)tensor->n_cols / WORD_BITS * (uint64_t)code_bits(tensor); }

/* On the CPU backend, F32 tensors are not converted to half floats, because MLX multiplies floats just as fast there. */
static bool keeps_floats(const fkv_tensor *tensor, bool on_gpu) { return tensor->type == FKV_TENSOR_F32 && !on_gpu; }

/* Returns the number of columns that share a scale. */
static uint32_t scale_group(const fkv_tensor *tensor) { return tensor->bits != 0 ? tensor->group : GROUP; }

static uint64_t matrix_bytes(const fkv_tensor *tensor, bool on_gpu) {
    if (tensor == NULL) return 0;
    uint64_t n_rows = tensor->n_rows;
    if (keeps_floats(tensor, on_gpu)) return n_rows * tensor->n_cols * sizeof(float);
    if (code_bits(tensor) == 0) return n_rows * tensor->n_cols * sizeof(uint16_t);
    uint64_t scale = on_gpu ? sizeof(uint16_t) : sizeof(float);
    uint64_t n_groups = tensor->n_cols / scale_group(tensor);
    uint64_t of_scales = tensor->scale_type == FKV_TENSOR_U8 ? n_groups : 2 * scale * n_groups;
    return n_rows * (row_words(tensor) * sizeof(uint32_t) + of_scales);
}

static uint64_t vector_bytes(const fkv_tensor *tensor) {
    return tensor != NULL ? (uint64_t)tensor->n_rows * tensor->n_cols * sizeof(float) : 0;
}

static uint64_t expert_bytes(const fkv_tensor *tensor, bool on_gpu) {
    bool widens = !on_gpu && code_bits(tensor) == 0;
    return widens ? (uint64_t)tensor->n_rows * tensor->n_cols * sizeof(float) : matrix_bytes(tensor, on_gpu);
}

static uint64_t layer_bytes(const fkv_layer_tensors *t, uint32_t n_experts, bool on_gpu) {
    const fkv_tensor *matrices[] = {t->q,  t->k,    t->v,          t->o,          t->attn_gate, t->gate,
                                    t->up, t->down, t->input_gate, t->input_proj, t->router,    t->shared_gate};
    const fkv_tensor *vectors[] = {t->q_bias,
                                   t->k_bias,
                                   t->v_bias,
                                   t->o_bias,
                                   t->gate_bias,
                                   t->up_bias,
                                   t->down_bias,
                                   t->q_norm,
                                   t->k_norm,
                                   t->attn_norm,
                                   t->ffn_norm,
                                   t->attn_norm_bias,
                                   t->ffn_norm_bias,
                                   t->post_attn_norm,
                                   t->post_ffn_norm,
                                   t->router_bias,
                                   t->router_correction,
                                   t->router_scale,
                                   t->expert_scales,
                                   t->experts_norm,
                                   t->post_dense_norm,
                                   t->post_experts_norm,
                                   t->gate_experts_bias,
                                   t->up_experts_bias,
                                   t->down_experts_bias,
                                   t->input_norm,
                                   t->out_scale};
    uint64_t bytes = 0;
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) bytes += matrix_bytes(matrices[i], on_gpu);
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) bytes += vector_bytes(vectors[i]);
    for (uint32_t e = 0; t->router != NULL && e < n_experts; e++)
        bytes += expert_bytes(t->gate_experts[e], on_gpu) + expert_bytes(t->up_experts[e], on_gpu) +
                 expert_bytes(t->down_experts[e], on_gpu);
    return bytes;
}

/* ---- the device ---- */

fkv_status fkv_array_device(mlx_device *device, bool *on_gpu) {
    fkv_mlx_catch_errors();
    mlx_device_type type = MLX_CPU;
    *device = mlx_device_new();
    FKV_TRY(fkv_mlx_check(mlx_get_default_device(device), "querying MLX's device"));
    FKV_TRY(fkv_mlx_check(mlx_device_get_type(&type, *device), "querying MLX's device"));
    *on_gpu = type == MLX_GPU;
    return FKV_OK;
}

uint64_t fkv_array_available(const char **source) {
    mlx_device device;
    bool on_gpu = false;
    size_t limit = 0;
    size_t active = 0;
    if (fkv_array_device(&device, &on_gpu) != FKV_OK) return fkv_memory_available(source);
    (void)mlx_device_free(device);
    if (mlx_get_memory_limit(&limit) != 0 || mlx_get_active_memory(&active) != 0) return fkv_memory_available(source);
    uint64_t room = limit > active ? limit - active : 0;
    const char *of_system = NULL;
    uint64_t system = fkv_memory_available(&of_system);
    bool is_bound = room <= system || on_gpu;
    *source = is_bound ? "MLX's memory limit" : of_system;
    return is_bound ? room : system;
}

fkv_status fkv_array_weights_count(fkv_model *model) {
    mlx_device device;
    bool on_gpu = false;
    FKV_TRY(fkv_array_device(&device, &on_gpu));
    (void)mlx_device_free(device);
    uint64_t bytes = matrix_bytes(model->output, on_gpu) + vector_bytes(model->final_norm) + vector_bytes(model->final_norm_bias);
    if (model->embedding != model->output) bytes += matrix_bytes(model->embedding, on_gpu);
    bytes += matrix_bytes(model->inputs, on_gpu) + matrix_bytes(model->inputs_proj, on_gpu) + vector_bytes(model->inputs_norm);
    for (uint32_t i = 0; i < model->hparams->n_layers; i++)
        bytes += layer_bytes(&model->tensors[i], model->hparams->n_experts, on_gpu);
    model->info.packed_bytes = bytes;
    model->mapped_bytes = 0;
    model->touched_bytes = 0;
    return FKV_OK;
}

/* ---- load ---- */

typedef struct loading {
    const fkv_model *model;
    fkv_array_weights *weights;
    mlx_stream stream;
    fkv_status status; /* status of the first failure; after a failure, no further tensors are loaded */
} loading;

/* Host buffers for the conversion of one matrix. */
typedef struct staging {
    void *bytes;    /* all rows of the matrix, in MLX's layout */
    uint8_t *codes; /* [C] codes of one row */
    float *row;     /* [C] values or scales of one row */
    float *biases;  /* [C] biases of one row */
} staging;

static fkv_status said(bool good) { return good ? FKV_OK : fkv_mlx_failed("loading weights"); }

/* Creates an MLX array with a copy of host memory. */
static fkv_status copy_to(mlx_array *array, const void *data, uint64_t n_rows, uint64_t n_cols, mlx_dtype type) {
    const int shape[] = {(int)n_rows, (int)n_cols};
    *array = mlx_array_new_data(data, shape, 2, type);
    return said(array->ctx != NULL);
}

static fkv_status take_halves(const fkv_tensor *tensor, const staging *s, mlx_stream stream, fkv_array_matrix *m) {
    const void *data = tensor->data; /* the data in the file is used directly unless it is converted below */
    bool is_odd = (uintptr_t)data % mlx_dtype_size(m->rows) != 0;
    if (m->rows == MLX_FLOAT32 && is_odd) {
        memcpy(s->bytes, data, (size_t)(tensor->n_rows * tensor->row_bytes));
        data = s->bytes;
    } else if (m->rows == MLX_FLOAT16 && (tensor->type != FKV_TENSOR_F16 || is_odd)) {
        uint16_t *to = s->bytes;
        for (uint32_t r = 0; r < tensor->n_rows; r++) {
            fkv_tensor_row_floats(tensor, r, s->row);
            for (uint32_t i = 0; i < tensor->n_cols; i++) *to++ = fkv_f32_to_f16(s->row[i]);
        }
        data = s->bytes;
    }
    FKV_TRY(copy_to(&m->halves, data, tensor->n_rows, tensor->n_cols, m->rows));
    return said(mlx_swapaxes(&m->across, m->halves, 0, 1, stream) == 0 && mlx_array_eval(m->across) == 0);
}

/* Packs codes of `bits` bits into the zeroed words of a row, with the first code in the lowest bits. */
static void pack_codes(const uint8_t *codes, uint32_t n, uint32_t bits, uint32_t *words) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * bits;
        uint64_t wide = (uint64_t)codes[i] << at % WORD_BITS;
        words[at / WORD_BITS] |= (uint32_t)wide;
        if (wide >> WORD_BITS != 0) words[at / WORD_BITS + 1] |= (uint32_t)(wide >> WORD_BITS);
    }
}

/* Converts values to `type` (f32 or f16) and stores them in `table`, starting at element `at`. */
static void put_numbers(mlx_dtype type, const float *numbers, uint32_t n, void *table, size_t at) {
    if (type == MLX_FLOAT32) {
        memcpy((float *)table + at, numbers, n * sizeof *numbers);
        return;
    }
    for (uint32_t i = 0; i < n; i++) ((uint16_t *)table)[at + i] = fkv_f32_to_f16(numbers[i]);
}

/* Converts table codes to affine codes: scale * table[code] becomes scale * byte + bias. */
static void table_to_affine(const int8_t *table, uint32_t n_cols, uint8_t *codes, const float *scales, float *biases) {
    for (uint32_t i = 0; i < n_cols; i++) codes[i] = (uint8_t)(table[codes[i]] + 128);
    for (uint32_t g = 0; g < n_cols / GROUP; g++) biases[g] = -128 * scales[g];
}

/* Copies rows of `bytes` bytes with a stride of `step` bytes, at any alignment. */
static void gather_rows(const uint8_t *from, uint64_t step, uint64_t bytes, uint32_t n_rows, uint8_t *out) {
    for (uint32_t r = 0; r < n_rows; r++) memcpy(out + r * bytes, from + r * step, bytes);
}

/* Loads MLX codes unchanged. Byte scales are kept; other scales are converted to the row type. */
static fkv_status take_arrays(const fkv_tensor *tensor, const staging *s, fkv_array_matrix *m) {
    const uint32_t n_groups = tensor->n_cols / tensor->group;
    gather_rows(tensor->data, tensor->row_bytes, fkv_tensor_row_size(tensor), tensor->n_rows, s->bytes);
    FKV_TRY(copy_to(&m->affine.codes, s->bytes, tensor->n_rows, row_words(tensor), MLX_UINT32));
    if (tensor->scale_type == FKV_TENSOR_U8) {
        gather_rows(tensor->scales, tensor->scale_row_bytes, n_groups, tensor->n_rows, s->bytes);
        return copy_to(&m->affine.scales, s->bytes, tensor->n_rows, n_groups, MLX_UINT8);
    }
    const uint8_t *parts[] = {tensor->scales, tensor->biases};
    mlx_array *arrays[] = {&m->affine.scales, &m->affine.biases};
    for (size_t i = 0; i < 2; i++) {
        fkv_tensor part = {.type = tensor->scale_type, .n_rows = tensor->n_rows, .n_cols = n_groups, .data = parts[i]};
        part.row_bytes = tensor->scale_row_bytes;
        for (uint32_t r = 0; r < part.n_rows; r++) {
            fkv_tensor_row_floats(&part, r, s->row);
            put_numbers(m->rows, s->row, n_groups, s->bytes, (size_t)r * n_groups);
        }
        FKV_TRY(copy_to(arrays[i], s->bytes, tensor->n_rows, n_groups, m->rows));
    }
    return FKV_OK;
}

static fkv_status take_codes(const fkv_tensor *tensor, const staging *s, fkv_array_matrix *m) {
    uint32_t n_groups = tensor->n_cols / GROUP;
    const int8_t *table = fkv_tensor_table(tensor);
    size_t n_words = (size_t)row_words(tensor);
    size_t n_scales = (size_t)tensor->n_rows * n_groups;
    uint32_t *words = s->bytes;
    uint8_t *scales = (uint8_t *)(words + n_words * tensor->n_rows);
    uint8_t *biases = scales + n_scales * mlx_dtype_size(m->rows);
    memset(words, 0, n_words * tensor->n_rows * sizeof *words);
    for (uint32_t r = 0; r < tensor->n_rows; r++) {
        fkv_tensor_row_codes(tensor, r, s->codes, s->row, s->biases);
        if (table != NULL) table_to_affine(table, tensor->n_cols, s->codes, s->row, s->biases);
        pack_codes(s->codes, tensor->n_cols, (uint32_t)m->affine.bits, words + n_words * r);
        put_numbers(m->rows, s->row, n_groups, scales, (size_t)r * n_groups);
        put_numbers(m->rows, s->biases, n_groups, biases, (size_t)r * n_groups);
    }
    FKV_TRY(copy_to(&m->affine.codes, words, tensor->n_rows, n_words, MLX_UINT32));
    FKV_TRY(copy_to(&m->affine.scales, scales, tensor->n_rows, n_groups, m->rows));
    return copy_to(&m->affine.biases, biases, tensor->n_rows, n_groups, m->rows);
}

static const char *mode_of(const fkv_tensor *tensor) {
    if (tensor->type == FKV_TENSOR_MLX_MXFP4) return "mxfp4";
    if (tensor->type == FKV_TENSOR_MLX_MXFP8) return "mxfp8";
    return tensor->type == FKV_TENSOR_MLX_NVFP4 ? "nvfp4" : NULL;
}

fkv_status fkv_array_matrix_load(const fkv_tensor *tensor, bool on_gpu, mlx_stream stream, fkv_array_matrix *m) {
    int bits = code_bits(tensor);
    *m = (fkv_array_matrix){.is_coded = bits != 0,
                            .rows = bits != 0 && !on_gpu ? MLX_FLOAT32 : MLX_FLOAT16,
                            .affine = {.bits = bits, .group = (int)scale_group(tensor), .mode = mode_of(tensor)}};
    if (keeps_floats(tensor, on_gpu)) m->rows = MLX_FLOAT32;
    uint64_t bytes = matrix_bytes(tensor, on_gpu);
    staging s = {.bytes = malloc(bytes),
                 .codes = malloc(tensor->n_cols),
                 .row = malloc(tensor->n_cols * sizeof *s.row),
                 .biases = malloc(tensor->n_cols * sizeof *s.biases)};
    fkv_status status = FKV_OK;
    if (s.bytes == NULL || s.codes == NULL || s.row == NULL || s.biases == NULL)
        status = fkv_fail(FKV_NO_MEMORY, "out of memory allocating %llu bytes to convert tensor %s for MLX",
                          (unsigned long long)bytes, tensor->name);
    else
        status = tensor->bits != 0 ? take_arrays(tensor, &s, m)
                 : m->is_coded     ? take_codes(tensor, &s, m)
                                   : take_halves(tensor, &s, stream, m);
    free(s.bytes);
    free(s.codes);
    free(s.row);
    free(s.biases);
    return status;
}

void fkv_array_matrix_free(fkv_array_matrix *m) {
    (void)mlx_array_free(m->halves);
    (void)mlx_array_free(m->across);
    (void)mlx_array_free(m->affine.codes);
    (void)mlx_array_free(m->affine.scales);
    (void)mlx_array_free(m->affine.biases);
}

static void load_matrix(loading *l, const fkv_tensor *tensor, fkv_array_matrix *m) {
    if (tensor == NULL || l->status != FKV_OK) return;
    l->status = fkv_array_matrix_load(tensor, l->weights->on_gpu, l->stream, m);
    fkv_weights_release(l->model->weights, tensor);
}

/* ---- experts ---- */

/* Copies a strided tensor into contiguous memory, which the caller frees. */
static fkv_status gather_tensor(const fkv_tensor *tensor, fkv_tensor *gathered, void **bytes) {
    *gathered = *tensor;
    *bytes = NULL;
    if (tensor->col_step == 0) return FKV_OK;
    gathered->col_step = 0;
    gathered->row_bytes = (uint64_t)tensor->n_cols * fkv_tensor_format_of(tensor->type)->block_bytes;
    uint8_t *to = malloc((size_t)(tensor->n_rows * gathered->row_bytes));
    FKV_REQUIRE(to != NULL, FKV_NO_MEMORY, "out of memory converting tensor %s for MLX", tensor->name);
    for (uint32_t r = 0; r < tensor->n_rows; r++) fkv_tensor_gather_row(tensor, r, to + r * gathered->row_bytes);
    gathered->data = to;
    *bytes = to;
    return FKV_OK;
}

static fkv_status load_floats(const fkv_tensor *tensor, mlx_array *array) {
    float *numbers = malloc((size_t)tensor->n_rows * tensor->n_cols * sizeof *numbers);
    FKV_REQUIRE(numbers != NULL, FKV_NO_MEMORY, "out of memory converting tensor %s for MLX", tensor->name);
    for (uint32_t r = 0; r < tensor->n_rows; r++) fkv_tensor_row_floats(tensor, r, numbers + (size_t)r * tensor->n_cols);
    fkv_status status = copy_to(array, numbers, tensor->n_rows, tensor->n_cols, MLX_FLOAT32);
    free(numbers);
    return status;
}

/* Loads one matrix of an expert. The columns of the matrix may be strided in the file. */
static fkv_status load_expert(loading *l, const fkv_tensor *tensor, fkv_array_matrix *m) {
    fkv_tensor gathered;
    void *bytes = NULL;
    FKV_TRY(gather_tensor(tensor, &gathered, &bytes));
    fkv_status status = FKV_OK;
    if (l->weights->on_gpu || code_bits(tensor) != 0) {
        status = fkv_array_matrix_load(&gathered, l->weights->on_gpu, l->stream, m);
    } else {
        *m = (fkv_array_matrix){.rows = MLX_FLOAT32};
        status = load_floats(&gathered, &m->halves);
    }
    free(bytes);
    return status;
}

/* Stacks one array [R, C] of each expert into [n, R, C]. offset: byte offset of the array within the matrix struct. */
static fkv_status stack_arrays(loading *l, const fkv_array_matrix *experts, size_t offset, uint32_t n, mlx_array *stack) {
    mlx_vector_array list = mlx_vector_array_new();
    mlx_array joined = mlx_array_new();
    bool good = true;
    const int *shape = NULL;
    for (uint32_t e = 0; good && e < n; e++) {
        const mlx_array *part = (const mlx_array *)(const void *)((const char *)&experts[e] + offset);
        if (e == 0) shape = mlx_array_shape(*part);
        good = mlx_vector_array_append_value(list, *part) == 0;
    }
    if (good && shape != NULL) {
        const int whole[] = {(int)n, shape[0], shape[1]};
        good = mlx_concatenate_axis(&joined, list, 0, l->stream) == 0 && mlx_reshape(stack, joined, whole, 3, l->stream) == 0 &&
               mlx_array_eval(*stack) == 0;
    }
    (void)mlx_array_free(joined);
    (void)mlx_vector_array_free(list);
    return said(good);
}

static fkv_status join_experts(loading *l, const fkv_array_matrix *experts, uint32_t n, fkv_array_stack *stack) {
    stack->rows = experts[0].rows;
    stack->is_coded = experts[0].is_coded;
    stack->affine.bits = experts[0].affine.bits;
    stack->affine.group = experts[0].affine.group;
    stack->affine.mode = experts[0].affine.mode;
    if (!stack->is_coded) {
        FKV_TRY(stack_arrays(l, experts, offsetof(fkv_array_matrix, halves), n, &stack->halves));
        return said(mlx_swapaxes(&stack->across, stack->halves, 1, 2, l->stream) == 0 && mlx_array_eval(stack->across) == 0);
    }
    FKV_TRY(stack_arrays(l, experts, offsetof(fkv_array_matrix, affine.codes), n, &stack->affine.codes));
    FKV_TRY(stack_arrays(l, experts, offsetof(fkv_array_matrix, affine.scales), n, &stack->affine.scales));
    if (stack->affine.mode != NULL) return FKV_OK;
    return stack_arrays(l, experts, offsetof(fkv_array_matrix, affine.biases), n, &stack->affine.biases);
}

static fkv_status load_stack(loading *l, const fkv_tensor **tensors, fkv_array_matrix *experts, fkv_array_stack *stack) {
    uint32_t n = l->model->hparams->n_experts;
    for (uint32_t e = 0; e < n; e++) {
        FKV_REQUIRE(tensors[e]->type == tensors[0]->type && tensors[e]->bits == tensors[0]->bits &&
                        tensors[e]->group == tensors[0]->group,
                    FKV_UNSUPPORTED,
                    "tensor %s and %s have different types; on MLX all experts of a layer must have the same type",
                    tensors[e]->name, tensors[0]->name);
        FKV_TRY(load_expert(l, tensors[e], &experts[e]));
        fkv_weights_release(l->model->weights, tensors[e]);
    }
    return join_experts(l, experts, n, stack);
}

static void take_stack(loading *l, const fkv_tensor **tensors, fkv_array_stack *stack) {
    if (tensors == NULL || l->status != FKV_OK) return;
    uint32_t n = l->model->hparams->n_experts;
    fkv_array_matrix *experts = calloc(n, sizeof *experts);
    if (experts == NULL) {
        l->status = fkv_fail(FKV_NO_MEMORY, "out of memory allocating tables of %u experts", n);
        return;
    }
    l->status = load_stack(l, tensors, experts, stack);
    for (uint32_t e = 0; e < n; e++) fkv_array_matrix_free(&experts[e]);
    free(experts);
}

/* Loads the biases of all experts, one row per expert. */
static void take_table(loading *l, const fkv_tensor *tensor, mlx_array *array) {
    if (tensor == NULL || l->status != FKV_OK) return;
    fkv_tensor gathered;
    void *bytes = NULL;
    l->status = gather_tensor(tensor, &gathered, &bytes);
    if (l->status == FKV_OK) l->status = load_floats(&gathered, array);
    free(bytes);
}

/* ---- layers ---- */

/* Loads a norm or bias vector; the array stays empty if the model has none. */
static void take_vector(loading *l, const fkv_tensor *tensor, bool is_norm, mlx_array *array) {
    if (tensor == NULL || l->status != FKV_OK) return;
    float *numbers = malloc(tensor->n_cols * sizeof *numbers);
    const int shape[] = {(int)tensor->n_cols};
    if (numbers == NULL) {
        l->status = fkv_fail(FKV_NO_MEMORY, "out of memory converting tensor %s for MLX", tensor->name);
        return;
    }
    if (is_norm)
        fkv_tensor_norm_floats(tensor, l->model->hparams, numbers);
    else
        fkv_tensor_row_floats(tensor, 0, numbers);
    *array = mlx_array_new_data(numbers, shape, 1, MLX_FLOAT32);
    l->status = said(array->ctx != NULL);
    free(numbers);
}

static void load_layer(loading *l, const fkv_layer_tensors *t, fkv_array_layer *layer) {
    load_matrix(l, t->q, &layer->q);
    load_matrix(l, t->k, &layer->k);
    load_matrix(l, t->v, &layer->v);
    load_matrix(l, t->o, &layer->o);
    load_matrix(l, t->attn_gate, &layer->attn_gate);
    load_matrix(l, t->gate, &layer->gate);
    load_matrix(l, t->up, &layer->up);
    load_matrix(l, t->down, &layer->down);
    load_matrix(l, t->input_gate, &layer->input_gate);
    load_matrix(l, t->input_proj, &layer->input_proj);
    load_matrix(l, t->router, &layer->router);
    load_matrix(l, t->shared_gate, &layer->shared_gate);
    take_vector(l, t->router_correction, false, &layer->router_correction);
    take_vector(l, t->router_scale, false, &layer->router_scale);
    take_vector(l, t->expert_scales, false, &layer->expert_scales);
    take_vector(l, t->experts_norm, true, &layer->experts_norm);
    take_vector(l, t->post_dense_norm, true, &layer->post_dense_norm);
    take_vector(l, t->post_experts_norm, true, &layer->post_experts_norm);
    take_stack(l, t->gate_experts, &layer->gate_experts);
    take_stack(l, t->up_experts, &layer->up_experts);
    take_stack(l, t->down_experts, &layer->down_experts);
    take_table(l, t->gate_experts_bias, &layer->gate_experts_bias);
    take_table(l, t->up_experts_bias, &layer->up_experts_bias);
    take_table(l, t->down_experts_bias, &layer->down_experts_bias);
    take_vector(l, t->router_bias, false, &layer->router_bias);
    take_vector(l, t->q_bias, false, &layer->q_bias);
    take_vector(l, t->k_bias, false, &layer->k_bias);
    take_vector(l, t->v_bias, false, &layer->v_bias);
    take_vector(l, t->o_bias, false, &layer->o_bias);
    take_vector(l, t->gate_bias, false, &layer->gate_bias);
    take_vector(l, t->up_bias, false, &layer->up_bias);
    take_vector(l, t->down_bias, false, &layer->down_bias);
    take_vector(l, t->attn_norm_bias, false, &layer->attn_norm_bias);
    take_vector(l, t->ffn_norm_bias, false, &layer->ffn_norm_bias);
    take_vector(l, t->q_norm, true, &layer->q_norm);
    take_vector(l, t->k_norm, true, &layer->k_norm);
    take_vector(l, t->attn_norm, true, &layer->attn_norm);
    take_vector(l, t->ffn_norm, true, &layer->ffn_norm);
    take_vector(l, t->post_attn_norm, true, &layer->post_attn_norm);
    take_vector(l, t->post_ffn_norm, true, &layer->post_ffn_norm);
    take_vector(l, t->input_norm, true, &layer->input_norm);
    take_vector(l, t->out_scale, false, &layer->out_scale);
}

static fkv_status load_all(loading *l) {
    const fkv_model *m = l->model;
    fkv_array_weights *w = l->weights;
    load_matrix(l, m->output, &w->output);
    if (m->embedding != m->output) load_matrix(l, m->embedding, &w->own_embedding);
    load_matrix(l, m->inputs, &w->inputs);
    load_matrix(l, m->inputs_proj, &w->inputs_proj);
    take_vector(l, m->inputs_norm, true, &w->inputs_norm);
    take_vector(l, m->final_norm, true, &w->final_norm);
    take_vector(l, m->final_norm_bias, false, &w->final_norm_bias);
    take_vector(l, m->output_bias, false, &w->output_bias);
    for (uint32_t i = 0; i < m->hparams->n_layers; i++) load_layer(l, &m->tensors[i], &w->layers[i]);
    return l->status;
}

fkv_status fkv_array_weights_load(fkv_model *model) {
    const char *source = NULL;
    uint64_t available = fkv_array_available(&source);
    FKV_REQUIRE(model->info.packed_bytes <= available, FKV_NO_MEMORY, "the weights need %llu bytes of memory but %s allows %llu",
                (unsigned long long)model->info.packed_bytes, source, (unsigned long long)available);
    fkv_array_weights *w = calloc(1, sizeof *w);
    FKV_REQUIRE(w != NULL, FKV_NO_MEMORY, "out of memory allocating weight tables");
    model->arrays = w;
    w->layers = calloc(model->hparams->n_layers, sizeof *w->layers);
    FKV_REQUIRE(w->layers != NULL, FKV_NO_MEMORY, "out of memory allocating tables of %u layers", model->hparams->n_layers);
    FKV_TRY(fkv_array_device(&w->device, &w->on_gpu));
    loading l = {.model = model, .weights = w, .stream = mlx_stream_new()};
    l.status = said(mlx_get_default_stream(&l.stream, w->device) == 0);
    fkv_status status = load_all(&l);
    (void)mlx_stream_free(l.stream);
    return status;
}

/* ---- unload ---- */

static void give_layer(fkv_array_layer *l) {
    fkv_array_matrix *matrices[] = {
        &l->q,          &l->k,          &l->v,      &l->o,           &l->attn_gate,    &l->gate,       &l->up,          &l->down,
        &l->input_gate, &l->input_proj, &l->router, &l->shared_gate, &l->gate_experts, &l->up_experts, &l->down_experts};
    mlx_array vectors[] = {l->q_bias,
                           l->k_bias,
                           l->v_bias,
                           l->o_bias,
                           l->gate_bias,
                           l->up_bias,
                           l->down_bias,
                           l->q_norm,
                           l->k_norm,
                           l->attn_norm,
                           l->ffn_norm,
                           l->attn_norm_bias,
                           l->ffn_norm_bias,
                           l->post_attn_norm,
                           l->post_ffn_norm,
                           l->router_bias,
                           l->router_correction,
                           l->router_scale,
                           l->expert_scales,
                           l->experts_norm,
                           l->post_dense_norm,
                           l->post_experts_norm,
                           l->gate_experts_bias,
                           l->up_experts_bias,
                           l->down_experts_bias,
                           l->input_norm,
                           l->out_scale};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) fkv_array_matrix_free(matrices[i]);
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) (void)mlx_array_free(vectors[i]);
}

void fkv_array_weights_unload(fkv_model *model) {
    fkv_array_weights *w = model->arrays;
    if (w == NULL) return;
    fkv_array_matrix_free(&w->own_embedding);
    fkv_array_matrix_free(&w->output);
    fkv_array_matrix_free(&w->inputs);
    fkv_array_matrix_free(&w->inputs_proj);
    (void)mlx_array_free(w->inputs_norm);
    (void)mlx_array_free(w->final_norm);
    (void)mlx_array_free(w->final_norm_bias);
    (void)mlx_array_free(w->output_bias);
    for (uint32_t i = 0; w->layers != NULL && i < model->hparams->n_layers; i++) give_layer(&w->layers[i]);
    if (w->device.ctx != NULL) (void)mlx_device_free(w->device);
    free(w->layers);
    free(w);
    model->arrays = NULL;
}
