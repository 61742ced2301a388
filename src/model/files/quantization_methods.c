/* Quantized Hugging Face models: reads a "quantization_config" with a quant_method and combines the parts of each linear layer M.
 *
 *   mxfp4  M_blocks and M_scales (gpt-oss), read by quantization.c like MLX's mxfp4
 *   fp8    M.weight (F8_E4M3) and M.weight_scale_inv, one scale per block of weight_block_size or per tensor
 *   awq    M.qweight, M.qzeros (I32), M.scales
 *   gptq   M.qweight, M.qzeros (I32), M.scales and M.g_idx, the group of each column
 *
 * GPTQ with act-order (desc_act) is rejected, because groups must be contiguous columns. linear_codes.h describes the layouts.
 */
#include "linear_codes.h"
#include "quantization.h"

static const char *const CONVERT_HINT = "convert the model with mlx_lm.convert, or to GGUF";

/* ---- quantization_config ---- */

static json_int_t integer_field(const json_t *config, const char *key) {
    return json_integer_value(json_object_get(config, key));
}

static bool field_equals(const json_t *config, const char *key, const char *word) {
    const char *text = json_string_value(json_object_get(config, key));
    return text != NULL && strcmp(text, word) == 0;
}

/* Reads bits and group size of awq and gptq. A group size of -1 means one scale per row. */
static fkv_status read_bits(const json_t *config, const char *method, const char *path, struct fkv_quantization *out) {
    const json_int_t bits = integer_field(config, json_object_get(config, "bits") != NULL ? "bits" : "w_bit");
    const json_int_t group = integer_field(config, json_object_get(config, "group_size") != NULL ? "group_size" : "q_group_size");
    const bool good_bits = bits == 4 || (out->type == FKV_TENSOR_GPTQ && (bits == 2 || bits == 3 || bits == 8));
    FKV_REQUIRE(good_bits && (group == -1 || (group > 0 && group % 32 == 0 && group <= INT32_MAX)), FKV_UNSUPPORTED,
                "%s: quantization_config: unsupported %s with %" JSON_INTEGER_FORMAT " bits in groups of %" JSON_INTEGER_FORMAT
                ": expected %s bits and a group size of -1 or a multiple of 32",
                path, method, bits, group, out->type == FKV_TENSOR_GPTQ ? "2, 3, 4 or 8" : "4");
    out->bits = (uint32_t)bits;
    out->group = group == -1 ? 0 : (uint32_t)group;
    return FKV_OK;
}

static fkv_status read_awq(const json_t *config, const char *path, struct fkv_quantization *out) {
    out->type = FKV_TENSOR_AWQ;
    const json_t *version = json_object_get(config, "version");
    FKV_REQUIRE(version == NULL || field_equals(config, "version", "gemm") || field_equals(config, "version", "GEMM"),
                FKV_UNSUPPORTED, "%s: quantization_config: unsupported awq version '%s': expected gemm", path,
                fkv_show_text(json_is_string(version) ? json_string_value(version) : "").text);
    FKV_REQUIRE(!json_is_false(json_object_get(config, "zero_point")), FKV_UNSUPPORTED,
                "%s: quantization_config: awq with zero_point false is not supported", path);
    return read_bits(config, "awq", path, out);
}

static fkv_status read_gptq(const json_t *config, const char *path, struct fkv_quantization *out) {
    out->type = FKV_TENSOR_GPTQ;
    out->zero_offset = field_equals(config, "checkpoint_format", "gptq_v2") ? 0 : 1;
    const json_t *format = json_object_get(config, "checkpoint_format");
    FKV_REQUIRE(format == NULL || json_is_null(format) || field_equals(config, "checkpoint_format", "gptq") ||
                    field_equals(config, "checkpoint_format", "gptq_v2"),
                FKV_UNSUPPORTED, "%s: quantization_config: unsupported gptq checkpoint_format '%s': expected gptq or gptq_v2",
                path, fkv_show_text(json_is_string(format) ? json_string_value(format) : "").text);
    FKV_REQUIRE(
        !json_is_true(json_object_get(config, "desc_act")), FKV_UNSUPPORTED,
        "%s: quantization_config: gptq with act-order (desc_act true) is not supported, because its groups are not contiguous; "
        "%s",
        path, CONVERT_HINT);
    return read_bits(config, "gptq", path, out);
}

static fkv_status read_fp8(const json_t *config, const char *path, struct fkv_quantization *out) {
    const json_t *block = json_object_get(config, "weight_block_size");
    const json_t *format = json_object_get(config, "fmt");
    out->type = FKV_TENSOR_FP8;
    FKV_REQUIRE(format == NULL || field_equals(config, "fmt", "e4m3"), FKV_UNSUPPORTED,
                "%s: quantization_config: unsupported fp8 fmt '%s': expected e4m3", path,
                fkv_show_text(json_is_string(format) ? json_string_value(format) : "").text);
    if (block == NULL || json_is_null(block)) return FKV_OK;
    const json_int_t rows = json_integer_value(json_array_get(block, 0));
    const json_int_t cols = json_integer_value(json_array_get(block, 1));
    FKV_REQUIRE(json_array_size(block) == 2 && rows > 0 && rows <= INT32_MAX && cols > 0 && cols <= INT32_MAX, FKV_FILE_FORMAT,
                "%s: quantization_config: weight_block_size must be two integers above 0", path);
    out->group_rows = (uint32_t)rows;
    out->group = (uint32_t)cols;
    return FKV_OK;
}

fkv_status fkv_quantization_method(const json_t *config, const char *method, const char *path, struct fkv_quantization *out) {
    *out = (struct fkv_quantization){.is_hf = true};
    if (strcmp(method, "awq") == 0) return read_awq(config, path, out);
    if (strcmp(method, "gptq") == 0) return read_gptq(config, path, out);
    if (strcmp(method, "fp8") == 0) return read_fp8(config, path, out);
    FKV_REQUIRE(strcmp(method, "mxfp4") == 0, FKV_UNSUPPORTED,
                "%s: quantization_config: unsupported quant_method '%s': expected awq, fp8, gptq or mxfp4; %s", path,
                fkv_show_text(method).text, CONVERT_HINT);
    out->type = FKV_TENSOR_MLX_MXFP4;
    out->bits = 4;
    out->group = 32;
    return FKV_OK;
}

/* ---- parts of a linear layer ---- */

static fkv_status take_part(fkv_weights *weights, const fkv_tensor *part, uint64_t n_rows, uint64_t n_cols, const fkv_tensor *of,
                            bool *taken, const char *path) {
    FKV_REQUIRE(part->n_rows == n_rows && part->n_cols == n_cols, FKV_FILE_DAMAGED,
                "%s: tensor %s is %u x %u, but tensor %s requires %llu x %llu", path, part->name, part->n_rows, part->n_cols,
                of->name, (unsigned long long)n_rows, (unsigned long long)n_cols);
    taken[part - weights->tensors] = true;
    return FKV_OK;
}

static fkv_status take_scales(fkv_weights *weights, const fkv_tensor *part, const fkv_tensor *of, uint64_t n_rows,
                              uint64_t n_cols, struct fkv_linear_codes *l, bool *taken, const char *path) {
    FKV_REQUIRE(part != NULL, FKV_FILE_DAMAGED, "%s: tensor %s is quantized, but its scales are missing", path, of->name);
    FKV_REQUIRE(part->type <= FKV_TENSOR_BF16, FKV_UNSUPPORTED, "%s: tensor %s has type %s: scales must be F32, F16 or BF16",
                path, part->name, fkv_tensor_type_name(part->type));
    FKV_TRY(take_part(weights, part, n_rows, n_cols, of, taken, path));
    l->scales = part->data;
    l->scale_type = part->type;
    l->scale_bytes = part->n_rows * part->row_bytes;
    return FKV_OK;
}

/* Checks that groups are contiguous: column i must belong to group i / group. */
static fkv_status check_order(const fkv_tensor *part, uint32_t n_cols, uint32_t group, const char *path) {
    FKV_REQUIRE(part->type == FKV_TENSOR_I32, FKV_UNSUPPORTED, "%s: tensor %s has type %s, expected I32", path, part->name,
                fkv_tensor_type_name(part->type));
    for (uint32_t i = 0; i < n_cols; i++) {
        int32_t number;
        memcpy(&number, part->data + sizeof number * i, sizeof number);
        FKV_REQUIRE(number == (int32_t)(i / group), FKV_UNSUPPORTED,
                    "%s: tensor %s assigns column %u to group %d: act-order (desc_act) is not supported; %s", path, part->name, i,
                    (int)number, CONVERT_HINT);
    }
    return FKV_OK;
}

/* Computes the shape of a linear layer from the shape of the tensor that holds its packed codes. */
static fkv_status linear_shape(const fkv_tensor *words, const struct fkv_quantization *q, const char *path, uint64_t *n_rows,
                               uint64_t *n_cols) {
    const bool is_awq = q->type == FKV_TENSOR_AWQ;
    *n_rows = is_awq ? (uint64_t)words->n_cols * 8 : words->n_cols;
    *n_cols = is_awq ? words->n_rows : (uint64_t)words->n_rows * 32 / q->bits;
    const uint64_t group = q->group != 0 ? q->group : *n_cols;
    const bool whole = is_awq || (uint64_t)words->n_rows * 32 % q->bits == 0;
    FKV_REQUIRE(
        whole && *n_rows <= UINT32_MAX && *n_cols <= UINT32_MAX && *n_cols % 32 == 0 && *n_cols % group == 0 &&
            *n_rows * q->bits % 32 == 0,
        FKV_UNSUPPORTED,
        "%s: tensor %s (%u x %u words) contains %llu x %llu codes of %u bits, which do not fill whole groups of %llu columns and whole 32-bit words",
        path, words->name, words->n_rows, words->n_cols, (unsigned long long)(*n_rows), (unsigned long long)(*n_cols), q->bits,
        (unsigned long long)group);
    return FKV_OK;
}

static fkv_status join_words(fkv_weights *weights, fkv_tensor *words, const struct fkv_quantization *q, fkv_part_fn find_part,
                             struct fkv_linear_codes *l, bool *taken, const char *path) {
    const fkv_tensor *zeros = find_part(weights, words, ".qzeros");
    const fkv_tensor *order = find_part(weights, words, ".g_idx");
    uint64_t n_rows = 0;
    uint64_t n_cols = 0;
    FKV_TRY(linear_shape(words, q, path, &n_rows, &n_cols));
    *l = (struct fkv_linear_codes){.bits = q->bits,
                                   .group = q->group != 0 ? q->group : (uint32_t)n_cols,
                                   .group_rows = 1,
                                   .n_rows = (uint32_t)n_rows,
                                   .zero_offset = q->zero_offset};
    const uint64_t n_groups = n_cols / l->group;
    FKV_REQUIRE(zeros != NULL && zeros->type == FKV_TENSOR_I32, FKV_FILE_DAMAGED,
                "%s: tensor %s is quantized, but its qzeros (I32) are missing", path, words->name);
    FKV_TRY(take_part(weights, zeros, n_groups, n_rows * q->bits / 32, words, taken, path));
    FKV_TRY(take_scales(weights, find_part(weights, words, ".scales"), words, n_groups, n_rows, l, taken, path));
    if (order != NULL) {
        FKV_TRY(take_part(weights, order, 1, n_cols, words, taken, path));
        FKV_TRY(check_order(order, (uint32_t)n_cols, l->group, path));
    }
    l->zeros = zeros->data;
    words->type = q->type;
    words->n_rows = (uint32_t)n_rows;
    words->n_cols = (uint32_t)n_cols;
    words->row_bytes = n_cols * q->bits / 8;
    words->linear = l;
    l->centered = fkv_linear_codes_centered(words);
    return FKV_OK;
}

static fkv_status join_fp8(fkv_weights *weights, fkv_tensor *numbers, const struct fkv_quantization *q, fkv_part_fn find_part,
                           struct fkv_linear_codes *l, bool *taken, const char *path) {
    const uint32_t group = q->group != 0 ? q->group : numbers->n_cols;
    const uint32_t group_rows = q->group_rows != 0 ? q->group_rows : numbers->n_rows;
    *l = (struct fkv_linear_codes){.bits = 8, .group = group, .group_rows = group_rows, .n_rows = numbers->n_rows};
    FKV_TRY(take_scales(weights, find_part(weights, numbers, ".weight_scale_inv"), numbers,
                        fkv_ceil_div(numbers->n_rows, group_rows), fkv_ceil_div(numbers->n_cols, group), l, taken, path));
    numbers->type = FKV_TENSOR_FP8;
    numbers->linear = l;
    return FKV_OK;
}

fkv_status fkv_quantization_join_linear(fkv_weights *weights, fkv_tensor *tensor, fkv_part_fn find_part, bool *taken,
                                        const char *path) {
    const struct fkv_quantization *q = weights->n_quantized > 0 ? &weights->quantized[0] : NULL;
    const bool is_words = tensor->type == FKV_TENSOR_I32;
    const bool fits = q != NULL && (is_words ? q->type == FKV_TENSOR_AWQ || q->type == FKV_TENSOR_GPTQ
                                             : q->type == FKV_TENSOR_FP8 && fkv_ends_with(tensor->name, ".weight"));
    FKV_REQUIRE(fits, FKV_UNSUPPORTED,
                "%s: tensor %s has type %s, but config.json has no \"quantization_config\" that describes it", path, tensor->name,
                fkv_tensor_type_name(tensor->type));
    struct fkv_linear_codes *l = fkv_weights_keep(weights, sizeof *l);
    FKV_REQUIRE(l != NULL, FKV_NO_MEMORY, "%s: out of memory combining the parts of the quantized weight %s", path, tensor->name);
    return is_words ? join_words(weights, tensor, q, find_part, l, taken, path)
                    : join_fp8(weights, tensor, q, find_part, l, taken, path);
}
