/* Converts tensors of a file to MLX arrays, one at a time. In addition to the arrays, memory contains at most one temporary copy
 * of a matrix; for experts, a copy of one matrix kind (gate, up or down) of all experts in a layer. The mapped pages of converted
 * tensors are released. See array_weights.h.
 */
#include "array_weights.h"

#include "../../base/float16.h"
#include "../forward/tensor_matrix.h"

#include <math.h>
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

/* Returns the number of 32-bit words per row. A quantized tensor has a multiple of 32 columns, so codes of any width fill whole
 * words. */
static uint64_t row_words(const fkv_tensor *tensor) { return (uint64_t)tensor->n_cols / WORD_BITS * (uint64_t)code_bits(tensor); }

/* Returns whether a tensor is stored as f32 on the CPU backend. F32 tensors are not converted to half precision, because MLX
 * multiplies f32 values just as fast on the CPU. FP8 tensors are converted to f32, because their scales are F32. */
static bool keeps_floats(const fkv_tensor *tensor, bool on_gpu) {
    return !on_gpu && (tensor->type == FKV_TENSOR_F32 || (tensor->linear != NULL && code_bits(tensor) == 0));
}

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

/* ---- tensors of a layer ---- */

/* Conversions of tensors that are not matrices. All of them give f32 arrays. */
typedef enum vector_kind {
    VECTOR,      /* [n] */
    NORM_VECTOR, /* [n] norm weights; 1 is added if the file stores weight - 1 */
    TABLE,       /* [n_rows, n] */
    DECAY_VECTOR /* [n] negated decay rates, computed from the logarithms in the file */
} vector_kind;

/* Offsets of a tensor in fkv_layer_tensors and of its array or matrix in fkv_array_layer. */
typedef struct layer_part {
    size_t tensor;
    size_t array;
    vector_kind kind;
} layer_part;

#define PART(name, ...) {offsetof(fkv_layer_tensors, name), offsetof(fkv_array_layer, name), __VA_ARGS__}
#define N_PARTS(parts) (sizeof(parts) / sizeof((parts)[0]))

static const layer_part MATRICES[] = {
    PART(q, 0),          PART(k, 0),           PART(v, 0),         PART(o, 0),           PART(attn_gate, 0),
    PART(gate, 0),       PART(up, 0),          PART(down, 0),      PART(input_gate, 0),  PART(input_proj, 0),
    PART(router, 0),     PART(shared_gate, 0), PART(latent_up, 0), PART(latent_down, 0), PART(mixer_in, 0),
    PART(mixer_gate, 0), PART(mixer_fused, 0), PART(mixer_out, 0), PART(alpha, 0),       PART(beta, 0),
    PART(beta_alpha, 0), PART(alpha_low, 0),   PART(gate_low, 0),  PART(q_a, 0),         PART(kv_a, 0)};

static const layer_part STACKS[] = {PART(gate_experts, 0), PART(up_experts, 0), PART(down_experts, 0)};

static const layer_part VECTORS[] = {PART(q_bias, VECTOR),
                                     PART(k_bias, VECTOR),
                                     PART(v_bias, VECTOR),
                                     PART(o_bias, VECTOR),
                                     PART(gate_bias, VECTOR),
                                     PART(up_bias, VECTOR),
                                     PART(down_bias, VECTOR),
                                     PART(q_norm, NORM_VECTOR),
                                     PART(k_norm, NORM_VECTOR),
                                     PART(attn_norm, NORM_VECTOR),
                                     PART(ffn_norm, NORM_VECTOR),
                                     PART(attn_norm_bias, VECTOR),
                                     PART(ffn_norm_bias, VECTOR),
                                     PART(post_attn_norm, NORM_VECTOR),
                                     PART(post_ffn_norm, NORM_VECTOR),
                                     PART(router_bias, VECTOR),
                                     PART(router_correction, VECTOR),
                                     PART(router_scale, VECTOR),
                                     PART(expert_scales, VECTOR),
                                     PART(experts_norm, NORM_VECTOR),
                                     PART(post_dense_norm, NORM_VECTOR),
                                     PART(post_experts_norm, NORM_VECTOR),
                                     PART(gate_experts_bias, TABLE),
                                     PART(up_experts_bias, TABLE),
                                     PART(down_experts_bias, TABLE),
                                     PART(input_norm, NORM_VECTOR),
                                     PART(out_scale, VECTOR),
                                     PART(mixer_in_bias, VECTOR),
                                     PART(mixer_out_bias, VECTOR),
                                     PART(conv_bias, VECTOR),
                                     PART(alpha_bias, VECTOR),
                                     PART(skip, VECTOR),
                                     PART(mixer_norm, VECTOR), /* unlike other norm weights, never stored as weight - 1 */
                                     PART(decay, VECTOR),
                                     {offsetof(fkv_layer_tensors, decay_log), offsetof(fkv_array_layer, decay), DECAY_VECTOR},
                                     PART(q_a_bias, VECTOR),
                                     PART(kv_a_bias, VECTOR),
                                     PART(q_a_norm, NORM_VECTOR),
                                     PART(kv_a_norm, NORM_VECTOR)};

static const fkv_tensor *tensor_of(const fkv_layer_tensors *t, const layer_part *part) {
    return *(const fkv_tensor *const *)(const void *)((const char *)t + part->tensor);
}

static void *array_of(fkv_array_layer *layer, const layer_part *part) { return (char *)layer + part->array; }

/* Returns the size of the per-head projections of latent attention. */
static uint64_t heads_bytes(const fkv_hparams *h, bool on_gpu) {
    const fkv_latent *l = &h->latent;
    return (uint64_t)h->n_q_heads * l->dim * (l->nope_dim + l->v_dim) * (on_gpu ? sizeof(uint16_t) : sizeof(float));
}

static uint64_t layer_bytes(const fkv_hparams *h, const fkv_layer_tensors *t, bool on_gpu) {
    uint64_t bytes = t->kv_a != NULL ? heads_bytes(h, on_gpu) : 0;
    bytes += vector_bytes(t->conv) + vector_bytes(t->conv_k) + vector_bytes(t->conv_v);
    for (size_t i = 0; i < N_PARTS(MATRICES); i++) bytes += matrix_bytes(tensor_of(t, &MATRICES[i]), on_gpu);
    for (size_t i = 0; i < N_PARTS(VECTORS); i++) bytes += vector_bytes(tensor_of(t, &VECTORS[i]));
    const fkv_tensor **const stacks[] = {t->gate_experts, t->up_experts, t->down_experts};
    for (size_t i = 0; i < N_PARTS(stacks); i++)
        for (uint32_t e = 0; stacks[i] != NULL && e < h->n_experts; e++) bytes += expert_bytes(stacks[i][e], on_gpu);
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
    for (uint32_t i = 0; i < model->hparams->n_layers; i++) bytes += layer_bytes(model->hparams, &model->tensors[i], on_gpu);
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
    if (m->rows == MLX_FLOAT32 && tensor->type != FKV_TENSOR_F32) {
        for (uint32_t r = 0; r < tensor->n_rows; r++)
            fkv_tensor_row_floats(tensor, r, (float *)s->bytes + (size_t)r * tensor->n_cols);
        data = s->bytes;
    } else if (m->rows == MLX_FLOAT32 && is_odd) {
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

/* ---- layers ---- */

/* Reads all values of a tensor. values: [n_rows, n_cols] */
static fkv_status read_values(const loading *l, const fkv_tensor *tensor, vector_kind kind, float *values) {
    fkv_tensor gathered;
    void *bytes = NULL;
    FKV_TRY(gather_tensor(tensor, &gathered, &bytes));
    for (uint32_t r = 0; r < tensor->n_rows; r++) fkv_tensor_row_floats(&gathered, r, values + (size_t)r * tensor->n_cols);
    free(bytes);
    if (kind == NORM_VECTOR) fkv_tensor_norm_floats(tensor, l->model->hparams, values);
    for (uint32_t i = 0; kind == DECAY_VECTOR && i < tensor->n_cols; i++) values[i] = -expf(values[i]);
    return FKV_OK;
}

/* Transposes values: [n_rows, n_cols] -> [n_cols, n_rows]. */
static void transpose_values(const float *values, uint32_t n_rows, uint32_t n_cols, float *out) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t c = 0; c < n_cols; c++) out[(size_t)c * n_rows + r] = values[(size_t)r * n_cols + c];
}

/* Loads a tensor that is not a matrix; the array stays empty if the model does not have the tensor. */
static void load_vector(loading *l, const fkv_tensor *tensor, vector_kind kind, mlx_array *array) {
    if (tensor == NULL || l->status != FKV_OK) return;
    const size_t n = (size_t)tensor->n_rows * tensor->n_cols;
    float *values = malloc(n * sizeof *values);
    if (values == NULL) {
        l->status = fkv_fail(FKV_NO_MEMORY, "out of memory converting tensor %s for MLX", tensor->name);
        return;
    }
    l->status = read_values(l, tensor, kind, values);
    const int shape[] = {(int)tensor->n_rows, (int)tensor->n_cols};
    if (l->status == FKV_OK) {
        *array = mlx_array_new_data(values, kind == TABLE ? shape : shape + 1, kind == TABLE ? 2 : 1, MLX_FLOAT32);
        l->status = said(array->ctx != NULL);
    }
    free(values);
}

/* Loads the taps of a convolution and transposes them: [n_taps, C]. In KDA, the channels of queries, keys and values are in three
 * tensors. */
static void load_conv(loading *l, const fkv_layer_tensors *t, mlx_array *array) {
    const fkv_tensor *const parts[] = {t->conv, t->conv_k, t->conv_v};
    if (t->conv == NULL || l->status != FKV_OK) return;
    const uint32_t n_taps = t->conv->n_cols;
    uint32_t n_channels = 0;
    for (size_t i = 0; i < N_PARTS(parts); i++) n_channels += parts[i] != NULL ? parts[i]->n_rows : 0;
    const size_t n = (size_t)n_channels * n_taps;
    float *values = malloc(2 * n * sizeof *values); /* the second half holds the transposed values */
    if (values == NULL) {
        l->status = fkv_fail(FKV_NO_MEMORY, "out of memory converting tensor %s for MLX", t->conv->name);
        return;
    }
    float *to = values;
    for (size_t i = 0; i < N_PARTS(parts) && l->status == FKV_OK; i++) {
        if (parts[i] == NULL) continue;
        l->status = read_values(l, parts[i], TABLE, to);
        to += (size_t)parts[i]->n_rows * n_taps;
    }
    if (l->status == FKV_OK) {
        transpose_values(values, n_channels, n_taps, values + n);
        l->status = copy_to(array, values + n, n_taps, n_channels, MLX_FLOAT32);
    }
    free(values);
}

/* Creates the array of all heads' projections from f32 values: [H, n_rows, n_cols]. */
static fkv_status make_heads(const loading *l, const float *values, uint32_t n_rows, uint32_t n_cols, mlx_array *array) {
    const int shape[] = {(int)l->model->hparams->n_q_heads, (int)n_rows, (int)n_cols};
    mlx_array full = mlx_array_new_data(values, shape, 3, MLX_FLOAT32);
    bool good = full.ctx != NULL;
    if (good && l->weights->on_gpu)
        good = mlx_astype(array, full, MLX_FLOAT16, l->stream) == 0 && mlx_array_eval(*array) == 0;
    else if (good)
        good = mlx_array_set(array, full) == 0;
    (void)mlx_array_free(full);
    return said(good);
}

/* Reads the projections of one head, which map the latent vector to keys and values. k: [nope_dim, latent dim]; v: [latent dim,
 * v_dim]; rows: scratch memory, as large as the larger of k and v */
static void read_head(const fkv_latent *latent, const fkv_layer_tensors *t, uint32_t head, float *k, float *v, float *rows) {
    const uint32_t n = latent->nope_dim;
    const uint32_t d = latent->dim;
    if (t->kv_b != NULL) {
        const uint32_t first = head * (n + latent->v_dim);
        for (uint32_t i = 0; i < n; i++) fkv_tensor_row_floats(t->kv_b, first + i, k + (size_t)i * d);
        for (uint32_t i = 0; i < latent->v_dim; i++) fkv_tensor_row_floats(t->kv_b, first + n + i, rows + (size_t)i * d);
    } else {
        for (uint32_t i = 0; i < d; i++) fkv_tensor_row_floats(t->k_b, head * d + i, rows + (size_t)i * n);
        transpose_values(rows, d, n, k);
        for (uint32_t i = 0; i < latent->v_dim; i++)
            fkv_tensor_row_floats(t->v_b, head * latent->v_dim + i, rows + (size_t)i * d);
    }
    transpose_values(rows, latent->v_dim, d, v);
}

/* Loads the per-head projections of latent attention. */
static void load_heads(loading *l, const fkv_layer_tensors *t, fkv_array_layer *layer) {
    if (t->kv_a == NULL || l->status != FKV_OK) return;
    const fkv_hparams *h = l->model->hparams;
    const fkv_latent *latent = &h->latent;
    const size_t n_k = (size_t)latent->nope_dim * latent->dim;
    const size_t n_v = (size_t)latent->v_dim * latent->dim;
    float *k = malloc((h->n_q_heads * (n_k + n_v) + (n_k > n_v ? n_k : n_v)) * sizeof *k);
    if (k == NULL) {
        l->status = fkv_fail(FKV_NO_MEMORY, "out of memory converting the projections of %u heads for MLX", h->n_q_heads);
        return;
    }
    float *v = k + h->n_q_heads * n_k;
    float *rows = v + h->n_q_heads * n_v;
    for (uint32_t head = 0; head < h->n_q_heads; head++) read_head(latent, t, head, k + head * n_k, v + head * n_v, rows);
    l->status = make_heads(l, k, latent->nope_dim, latent->dim, &layer->k_up);
    if (l->status == FKV_OK) l->status = make_heads(l, v, latent->dim, latent->v_dim, &layer->v_up);
    free(k);
    const fkv_tensor *const read[] = {t->kv_b, t->k_b, t->v_b};
    for (size_t i = 0; i < N_PARTS(read); i++)
        if (read[i] != NULL) fkv_weights_release(l->model->weights, read[i]);
}

static void load_layer(loading *l, const fkv_layer_tensors *t, fkv_array_layer *layer) {
    for (size_t i = 0; i < N_PARTS(MATRICES); i++) load_matrix(l, tensor_of(t, &MATRICES[i]), array_of(layer, &MATRICES[i]));
    for (size_t i = 0; i < N_PARTS(VECTORS); i++)
        load_vector(l, tensor_of(t, &VECTORS[i]), VECTORS[i].kind, array_of(layer, &VECTORS[i]));
    load_conv(l, t, &layer->conv);
    take_stack(l, t->gate_experts, &layer->gate_experts);
    take_stack(l, t->up_experts, &layer->up_experts);
    take_stack(l, t->down_experts, &layer->down_experts);
    load_heads(l, t, layer);
}

static fkv_status load_all(loading *l) {
    const fkv_model *m = l->model;
    fkv_array_weights *w = l->weights;
    load_matrix(l, m->output, &w->output);
    if (m->embedding != m->output) load_matrix(l, m->embedding, &w->own_embedding);
    load_matrix(l, m->inputs, &w->inputs);
    load_matrix(l, m->inputs_proj, &w->inputs_proj);
    load_vector(l, m->inputs_norm, NORM_VECTOR, &w->inputs_norm);
    load_vector(l, m->final_norm, NORM_VECTOR, &w->final_norm);
    load_vector(l, m->final_norm_bias, VECTOR, &w->final_norm_bias);
    load_vector(l, m->output_bias, VECTOR, &w->output_bias);
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
    FKV_REQUIRE(w->layers != NULL, FKV_NO_MEMORY, "out of memory allocating the weight tables of %u layers",
                model->hparams->n_layers);
    FKV_TRY(fkv_array_device(&w->device, &w->on_gpu));
    loading l = {.model = model, .weights = w, .stream = mlx_stream_new()};
    l.status = said(mlx_get_default_stream(&l.stream, w->device) == 0);
    fkv_status status = load_all(&l);
    (void)mlx_stream_free(l.stream);
    return status;
}

/* ---- unload ---- */

static void give_layer(fkv_array_layer *layer) {
    for (size_t i = 0; i < N_PARTS(MATRICES); i++) fkv_array_matrix_free(array_of(layer, &MATRICES[i]));
    for (size_t i = 0; i < N_PARTS(STACKS); i++) fkv_array_matrix_free(array_of(layer, &STACKS[i]));
    for (size_t i = 0; i < N_PARTS(VECTORS); i++) {
        mlx_array *array = array_of(layer, &VECTORS[i]);
        (void)mlx_array_free(*array);
        *array = (mlx_array){NULL}; /* two entries of VECTORS may refer to the same array, which must be freed only once */
    }
    (void)mlx_array_free(layer->conv);
    (void)mlx_array_free(layer->k_up);
    (void)mlx_array_free(layer->v_up);
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
