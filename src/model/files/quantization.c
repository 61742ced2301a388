/* Reads MLX quantization; see quantization.h. The config has this form:
 *
 *   "quantization": {"bits": 4, "group_size": 64, "mode": "affine", "model.layers.0.mlp.gate": {"bits": 8, ...}, "x": false}
 *
 * A quantized module M has M.weight (U32 words), M.scales and, if affine, M.biases. gpt-oss stores mxfp4 as M_blocks (bytes)
 * and M_scales. The weights, scales and biases of a module may be in different files, so they are joined after all files have
 * been read. quantization_methods.c handles all other methods.
 */
#include "quantization.h"

#include <stdlib.h>

static const char *const METHOD_HINT = "convert the model with mlx_lm.convert, or to GGUF";

typedef struct mode {
    const char *name;
    fkv_tensor_type type;
    uint32_t bits;  /* 0 if the config states the value */
    uint32_t group; /* 0 if the config states the value */
} mode;

static const mode MODES[] = {{"affine", FKV_TENSOR_MLX_AFFINE, 0, 0},
                             {"mxfp4", FKV_TENSOR_MLX_MXFP4, 4, 32},
                             {"nvfp4", FKV_TENSOR_MLX_NVFP4, 4, 16},
                             {"mxfp8", FKV_TENSOR_MLX_MXFP8, 8, 32}};

/* ---- config.json ---- */

static fkv_status read_mlx_quantization(const json_t *object, const char *path, struct fkv_quantization *out) {
    const json_int_t bits = json_integer_value(json_object_get(object, "bits"));
    const json_int_t group = json_integer_value(json_object_get(object, "group_size"));
    const char *name = json_string_value(json_object_get(object, "mode"));
    const mode *match = NULL;
    if (name == NULL) name = "affine";
    for (size_t i = 0; i < sizeof MODES / sizeof MODES[0]; i++)
        if (strcmp(MODES[i].name, name) == 0) match = &MODES[i];
    FKV_REQUIRE(match != NULL, FKV_UNSUPPORTED,
                "%s: unsupported quantization mode '%s': expected affine, mxfp4, nvfp4 or mxfp8; %s", path,
                fkv_show_text(name).text, METHOD_HINT);
    if (match->bits != 0) {
        FKV_REQUIRE(bits == match->bits && group == match->group, FKV_FILE_FORMAT,
                    "%s: quantization mode %s has %" JSON_INTEGER_FORMAT " bits in groups of %" JSON_INTEGER_FORMAT
                    ", expected %u bits in groups of %u",
                    path, name, bits, group, match->bits, match->group);
    } else {
        bool known = (bits >= 2 && bits <= 6) || bits == 8;
        FKV_REQUIRE(known && (group == 32 || group == 64 || group == 128), FKV_UNSUPPORTED,
                    "%s: unsupported quantization with %" JSON_INTEGER_FORMAT " bits in groups of %" JSON_INTEGER_FORMAT
                    ": expected 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128",
                    path, bits, group);
    }
    out->type = match->type;
    out->bits = (uint32_t)bits;
    out->group = (uint32_t)group;
    return FKV_OK;
}

static fkv_status read_modules(json_t *object, const char *path, fkv_weights *weights) {
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach(object, key, value) {
        if (!json_is_object(value)) continue;
        struct fkv_quantization *one = &weights->quantized[weights->n_quantized];
        char *module = fkv_weights_keep(weights, strlen(key) + 1);
        FKV_REQUIRE(module != NULL, FKV_NO_MEMORY, "%s: out of memory reading the quantization of %s", path,
                    fkv_show_text(key).text);
        memcpy(module, key, strlen(key) + 1);
        one->module = module;
        FKV_TRY(read_mlx_quantization(value, path, one));
        weights->n_quantized++;
    }
    return FKV_OK;
}

fkv_status fkv_quantization_read(fkv_weights *weights, const json_t *root, const char *path) {
    json_t *object = json_object_get(root, "quantization");
    if (!json_is_object(object)) object = json_object_get(root, "quantization_config");
    if (object == NULL || json_is_null(object)) return FKV_OK;
    FKV_REQUIRE(json_is_object(object), FKV_FILE_FORMAT, "%s: quantization_config is not an object", path);
    FKV_REQUIRE(json_object_size(object) <= FKV_MAX_TENSORS, FKV_UNSUPPORTED,
                "%s: quantization_config has %zu fields, more than the limit of %d", path, json_object_size(object),
                FKV_MAX_TENSORS);
    const char *method = json_string_value(json_object_get(object, "quant_method"));
    weights->quantized = fkv_weights_keep(weights, (json_object_size(object) + 1) * sizeof *weights->quantized);
    FKV_REQUIRE(weights->quantized != NULL, FKV_NO_MEMORY, "%s: out of memory reading quantization_config", path);
    if (method != NULL) {
        FKV_TRY(fkv_quantization_method(object, method, path, &weights->quantized[0]));
        weights->n_quantized = 1;
        return FKV_OK;
    }
    FKV_TRY(read_mlx_quantization(object, path, &weights->quantized[0]));
    weights->n_quantized = 1;
    return read_modules(object, path, weights);
}

/* ---- tensors ---- */

/* Returns the quantization of the module to which a tensor belongs, or NULL if the model is not quantized. The module name is the
 * part of the tensor name before the last dot. */
static const struct fkv_quantization *quantization_of(const fkv_weights *weights, const char *name) {
    const char *end = strrchr(name, '.');
    const size_t n = end == NULL ? 0 : (size_t)(end - name);
    const struct fkv_quantization *match = weights->n_quantized > 0 ? &weights->quantized[0] : NULL;
    for (uint32_t i = 1; i < weights->n_quantized; i++) {
        const char *module = weights->quantized[i].module;
        if (strlen(module) == n && memcmp(module, name, n) == 0) match = &weights->quantized[i];
    }
    return match;
}

/* Sets type and shape of a tensor of packed codes. n_bits: bits per row */
static fkv_status describe_codes(const struct fkv_quantization *match, uint64_t n_bits, const char *name, const char *path,
                                 fkv_tensor *tensor) {
    const uint64_t n_cols = n_bits / match->bits;
    FKV_REQUIRE(n_bits % match->bits == 0 && n_cols % match->group == 0 && n_cols <= UINT32_MAX, FKV_FILE_DAMAGED,
                "%s: tensor %s has rows of %llu bytes, which cannot be divided into groups of %u codes with %u bits each", path,
                fkv_show_text(name).text, (unsigned long long)(n_bits / 8), match->group, match->bits);
    tensor->type = match->type;
    tensor->n_cols = (uint32_t)n_cols;
    tensor->bits = match->bits;
    tensor->group = match->group;
    return FKV_OK;
}

fkv_status fkv_quantization_describe(const fkv_weights *weights, const char *name, const char *path, fkv_tensor *tensor) {
    const bool is_words = tensor->type == FKV_TENSOR_U32;
    const bool is_blocks = tensor->type == FKV_TENSOR_U8 && fkv_ends_with(name, "_blocks");
    if (!is_words && !is_blocks) return FKV_OK;
    const struct fkv_quantization *match = quantization_of(weights, name);
    FKV_REQUIRE(
        match != NULL && match->bits != 0 && match->is_hf == is_blocks && (!is_blocks || match->type == FKV_TENSOR_MLX_MXFP4),
        FKV_UNSUPPORTED,
        "%s: tensor %s has type %s, but config.json has no \"quantization\" that describes it; without one, only F32, F16 and "
        "BF16 can be read",
        path, fkv_show_text(name).text, fkv_tensor_type_name(tensor->type));
    return describe_codes(match, tensor->row_bytes * 8, name, path, tensor);
}

/* Returns the tensor whose name differs from that of `tensor` only in the text after the last dot, which is `end`. Returns NULL
 * if it does not exist. */
static fkv_tensor *find_part(fkv_weights *weights, const fkv_tensor *tensor, const char *end) {
    char name[FKV_MAX_TENSOR_NAME];
    const char *dot = strrchr(tensor->name, '.');
    if (dot == NULL) return NULL;
    const size_t stem = (size_t)(dot - tensor->name);
    if (stem + strlen(end) >= sizeof name) return NULL;
    memcpy(name, tensor->name, stem);
    memcpy(name + stem, end, strlen(end) + 1);
    const fkv_tensor *match = fkv_weights_find(weights, name);
    return match == NULL ? NULL : &weights->tensors[match - weights->tensors];
}

static bool is_mlx_codes(const fkv_tensor *tensor) { return tensor->bits != 0; }
static bool is_linear_codes(const fkv_tensor *tensor) {
    return tensor->type == FKV_TENSOR_E4M3 || (tensor->type == FKV_TENSOR_I32 && fkv_ends_with(tensor->name, ".qweight"));
}

static fkv_status join_mlx_parts(fkv_weights *weights, fkv_tensor *codes, bool *taken, const char *path) {
    const bool is_affine = codes->type == FKV_TENSOR_MLX_AFFINE;
    const uint32_t n_groups = codes->n_cols / codes->group;
    const bool is_weight = fkv_ends_with(codes->name, ".weight");
    fkv_tensor *parts[2] = {is_weight ? find_part(weights, codes, ".scales") : NULL,
                            is_weight && is_affine ? find_part(weights, codes, ".biases") : NULL};
    FKV_REQUIRE(parts[0] != NULL && (!is_affine || parts[1] != NULL), FKV_FILE_DAMAGED,
                "%s: tensor %s is quantized, but its scales%s are missing", path, codes->name, is_affine ? " or biases" : "");
    for (uint32_t i = 0; i < 2 && parts[i] != NULL; i++) {
        const fkv_tensor *part = parts[i];
        FKV_REQUIRE(part->n_rows == codes->n_rows && part->n_cols == n_groups, FKV_FILE_DAMAGED,
                    "%s: tensor %s is %u x %u, expected %u x %u (one value per group)", path, part->name, part->n_rows,
                    part->n_cols, codes->n_rows, n_groups);
        bool fits = is_affine ? part->type <= FKV_TENSOR_BF16 && part->type == parts[0]->type : part->type == FKV_TENSOR_U8;
        FKV_REQUIRE(fits, FKV_UNSUPPORTED, "%s: tensor %s has type %s, which is not valid for %s scales", path, part->name,
                    fkv_tensor_type_name(part->type), fkv_tensor_type_name(codes->type));
        taken[part - weights->tensors] = true;
    }
    codes->scales = parts[0]->data;
    codes->biases = is_affine ? parts[1]->data : NULL;
    codes->scale_type = parts[0]->type;
    codes->scale_row_bytes = parts[0]->row_bytes;
    return FKV_OK;
}

/* Removes the tensors marked in `taken` from the table and renames "qweight" to "weight". Fails if a scale, bias or zero-point
 * tensor remains that belongs to no weight. */
static fkv_status remove_parts(fkv_weights *weights, const bool *taken, const char *path) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < weights->n_tensors; i++) {
        fkv_tensor *tensor = &weights->tensors[i];
        if (taken[i]) continue;
        FKV_REQUIRE(tensor->type < FKV_TENSOR_U8, FKV_UNSUPPORTED,
                    "%s: tensor %s has type %s but does not belong to a quantized weight", path, tensor->name,
                    fkv_tensor_type_name(tensor->type));
        if (tensor->linear != NULL && fkv_ends_with(tensor->name, ".qweight"))
            memcpy(tensor->name + strlen(tensor->name) - strlen("qweight"), "weight", sizeof "weight");
        if (n != i) weights->tensors[n] = *tensor;
        n++;
    }
    weights->n_tensors = n;
    return fkv_weights_finish(weights, path);
}

fkv_status fkv_quantization_join(fkv_weights *weights, const char *path) {
    bool *taken = calloc(weights->n_tensors + 1, sizeof *taken);
    FKV_REQUIRE(taken != NULL, FKV_NO_MEMORY, "%s: out of memory combining the parts of quantized weights (%u tensors)", path,
                weights->n_tensors);
    fkv_status status = FKV_OK;
    for (uint32_t i = 0; i < weights->n_tensors && status == FKV_OK; i++)
        if (is_mlx_codes(&weights->tensors[i]))
            status = join_mlx_parts(weights, &weights->tensors[i], taken, path);
        else if (is_linear_codes(&weights->tensors[i]))
            status = fkv_quantization_join_linear(weights, &weights->tensors[i], find_part, taken, path);
    if (status == FKV_OK) status = remove_parts(weights, taken, path);
    free(taken);
    return status;
}
