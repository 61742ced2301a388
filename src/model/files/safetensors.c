/* Reads safetensors files. A file consists of an 8-byte header length, a JSON object with type, shape and offsets of every
 * tensor, and the data. A folder may contain several files and an index that maps tensors to files.
 *
 * Every value is checked against the file: offsets must be within the data and match type and shape, and tensors must not overlap
 * (weights.c).
 */
#include "safetensors.h"

#include "../../text/vocab/json_read.h"
#include "../../text/vocab/vocab_folder.h"
#include "hf_config.h"
#include "quantization.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_PATH = 4096 };

/* ---- files ---- */

static fkv_status safetensors_type(const json_t *about, const char *name, const char *path, fkv_tensor_type *type) {
    const char *dtype = json_string_value(json_object_get(about, "dtype"));
    FKV_REQUIRE(dtype != NULL, FKV_FILE_FORMAT, "%s: tensor %s has no dtype", path, fkv_show_text(name).text);
    static const fkv_tensor_type types[] = {FKV_TENSOR_F32, FKV_TENSOR_F16, FKV_TENSOR_BF16, FKV_TENSOR_U8,
                                            FKV_TENSOR_U32, FKV_TENSOR_I32, FKV_TENSOR_E4M3};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(fkv_tensor_type_name(types[i]), dtype) != 0) continue;
        *type = types[i];
        return FKV_OK;
    }
    return fkv_fail(
        FKV_UNSUPPORTED,
        "%s: tensor %s has unsupported type %s: expected F32, F16, BF16, or a part of a quantized weight (U8, U32, I32, "
        "F8_E4M3)",
        path, fkv_show_text(name).text, fkv_show_text(dtype).text);
}

/* Reads an array of non-negative integers. */
static fkv_status read_integers(const json_t *about, const char *key, const char *name, const char *path, uint64_t *numbers,
                                uint32_t max, uint32_t *n) {
    const json_t *array = json_object_get(about, key);
    FKV_REQUIRE(json_is_array(array) && json_array_size(array) <= max, FKV_FILE_FORMAT,
                "%s: tensor %s: %s must be an array of at most %u integers", path, fkv_show_text(name).text, key, max);
    *n = (uint32_t)json_array_size(array);
    for (uint32_t i = 0; i < *n; i++) {
        const json_t *number = json_array_get(array, i);
        FKV_REQUIRE(json_is_integer(number) && json_integer_value(number) >= 0, FKV_FILE_FORMAT,
                    "%s: tensor %s: %s must contain only non-negative integers", path, fkv_show_text(name).text, key);
        numbers[i] = (uint64_t)json_integer_value(number);
    }
    return FKV_OK;
}

/* Folds the last two dimensions of gpt-oss blocks, [..., blocks, 16 bytes], into one row of bytes. */
static fkv_status join_blocks(const char *name, const char *path, uint64_t *dims, uint32_t *n_dims) {
    if (!fkv_ends_with(name, "_blocks")) return FKV_OK;
    FKV_REQUIRE(*n_dims >= 2 && dims[*n_dims - 1] == 16 && dims[*n_dims - 2] <= UINT32_MAX, FKV_FILE_DAMAGED,
                "%s: tensor %s must have at least 2 dimensions, and the last must be 16", path, fkv_show_text(name).text);
    dims[*n_dims - 2] *= 16;
    (*n_dims)--;
    return FKV_OK;
}

static fkv_status read_tensor_entry(const json_t *about, const char *hf_name, const char *name, const uint8_t *data,
                                    uint64_t data_bytes, const char *path, fkv_tensor *tensor) {
    fkv_tensor_type type = FKV_TENSOR_F32;
    uint64_t dims[FKV_MAX_DIMS] = {0};
    uint64_t span[2] = {0};
    uint64_t bytes = 0;
    uint32_t n_dims = 0;
    uint32_t n_span = 0;
    FKV_REQUIRE(json_is_object(about), FKV_FILE_FORMAT, "%s: tensor %s is not a JSON object", path, fkv_show_text(hf_name).text);
    FKV_TRY(safetensors_type(about, hf_name, path, &type));
    FKV_TRY(read_integers(about, "shape", hf_name, path, dims, FKV_MAX_DIMS, &n_dims));
    FKV_TRY(read_integers(about, "data_offsets", hf_name, path, span, 2, &n_span));
    FKV_TRY(join_blocks(hf_name, path, dims, &n_dims));
    FKV_TRY(fkv_tensor_describe(tensor, (fkv_bytes){.data = name, .size = strlen(name)}, type, dims, n_dims, path, &bytes));
    FKV_REQUIRE(n_span == 2 && span[0] <= span[1] && span[1] <= data_bytes, FKV_FILE_DAMAGED,
                "%s: tensor %s has offsets %llu to %llu, but the file has only %llu bytes of data (incomplete download?)", path,
                fkv_show_text(hf_name).text, (unsigned long long)span[0], (unsigned long long)span[1],
                (unsigned long long)data_bytes);
    FKV_REQUIRE(span[1] - span[0] == bytes, FKV_FILE_DAMAGED,
                "%s: tensor %s is %llu bytes long, but its type and shape require %llu", path, fkv_show_text(hf_name).text,
                (unsigned long long)(span[1] - span[0]), (unsigned long long)bytes);
    tensor->data = data + span[0];
    return FKV_OK;
}

/* Name suffixes of the parts of quantized weights. A part has the same name as its weight except for the suffix. */
typedef struct part_name {
    const char *end;   /* name suffix of the part in the file */
    const char *whole; /* name suffix, in the file, of the weight to which the part belongs */
    const char *part;  /* suffix of the part's internal name, in place of ".weight" */
} part_name;

static const part_name PARTS[] = {
    {".scales", ".weight", ".scales"},    {".biases", ".weight", ".biases"},
    {".qweight", ".weight", ".qweight"},  {".qzeros", ".weight", ".qzeros"},
    {".g_idx", ".weight", ".g_idx"},      {".weight_scale_inv", ".weight", ".weight_scale_inv"},
    {"_proj_blocks", "_proj", ".weight"}, {"_proj_scales", "_proj", ".scales"},
};

static const part_name *find_part_suffix(const char *hf_name) {
    for (size_t i = 0; i < sizeof PARTS / sizeof PARTS[0]; i++)
        if (fkv_ends_with(hf_name, PARTS[i].end)) return &PARTS[i];
    return NULL;
}

/* Returns whether a tensor is an activation scale, which is ignored because activations are not quantized to FP8. */
static bool is_activation_scale(const fkv_weights *weights, const char *hf_name) {
    const bool is_fp8 = weights->n_quantized > 0 && weights->quantized[0].type == FKV_TENSOR_FP8;
    return is_fp8 && (fkv_ends_with(hf_name, ".activation_scale") || fkv_ends_with(hf_name, ".input_scale"));
}

/* Derives the internal name of a part of a quantized weight (such as its scales) from the internal name of the weight. Returns
 * false if the weight has no internal name. */
static bool translate_part_name(const fkv_weights *weights, const char *hf_name, const part_name *part,
                                char name[FKV_MAX_TENSOR_NAME]) {
    char weight[FKV_MAX_TENSOR_NAME];
    const int stem = (int)(strlen(hf_name) - strlen(part->end));
    const int n = snprintf(weight, sizeof weight, "%.*s%s", stem, hf_name, part->whole);
    if (n < 0 || n >= FKV_MAX_TENSOR_NAME || !fkv_hf_tensor_name(weights->architecture, weight, name)) return false;
    const size_t before = strlen(name) - strlen(".weight");
    if (!fkv_ends_with(name, ".weight") || before + strlen(part->part) >= FKV_MAX_TENSOR_NAME) return false;
    memcpy(name + before, part->part, strlen(part->part) + 1);
    return true;
}

/* Translates a Hugging Face tensor name. Returns false if the tensor is not needed. */
static bool translate_name(const fkv_weights *weights, const char *hf_name, char name[FKV_MAX_TENSOR_NAME]) {
    const part_name *part = find_part_suffix(hf_name);
    if (is_activation_scale(weights, hf_name)) return false;
    if (part == NULL || !translate_part_name(weights, hf_name, part, name))
        if (!fkv_hf_tensor_name(weights->architecture, hf_name, name)) return false;
    /* with tied embeddings, lm_head is a copy of the embedding and is not needed */
    return !weights->is_tied || strncmp(name, "output.", 7) != 0;
}

static fkv_status read_tensor_entries(fkv_weights *weights, json_t *header, const uint8_t *data, uint64_t data_bytes,
                                      const char *path) {
    fkv_tensor *next = NULL;
    const char *hf_name = NULL;
    json_t *about = NULL;
    FKV_TRY(fkv_weights_reserve(weights, json_object_size(header), &next));
    json_object_foreach(header, hf_name, about) {
        char name[FKV_MAX_TENSOR_NAME];
        if (strcmp(hf_name, "__metadata__") == 0) continue;
        FKV_REQUIRE(strlen(hf_name) < FKV_MAX_TENSOR_NAME, FKV_UNSUPPORTED, "%s: tensor name %s is longer than %d characters",
                    path, fkv_show_text(hf_name).text, FKV_MAX_TENSOR_NAME - 1);
        if (!translate_name(weights, hf_name, name)) continue;
        FKV_TRY(read_tensor_entry(about, hf_name, name, data, data_bytes, path, next));
        FKV_TRY(fkv_quantization_describe(weights, hf_name, path, next));
        next++;
        weights->n_tensors++;
    }
    return FKV_OK;
}

fkv_status fkv_safetensors_read(fkv_weights *weights, const uint8_t *bytes, uint64_t size, const char *path) {
    uint64_t header_bytes = 0;
    json_t *header = NULL;
    FKV_REQUIRE(size >= sizeof header_bytes, FKV_FILE_FORMAT, "%s: not a safetensors file: it has only %llu bytes", path,
                (unsigned long long)size);
    memcpy(&header_bytes, bytes, sizeof header_bytes);
    const uint8_t *text = bytes + sizeof header_bytes;
    const uint64_t bytes_left = size - sizeof header_bytes;
    FKV_REQUIRE(header_bytes <= bytes_left, FKV_FILE_DAMAGED, "%s: the header length is %llu bytes, but the file has only %llu",
                path, (unsigned long long)header_bytes, (unsigned long long)size);
    FKV_TRY(fkv_json_read((const char *)text, (size_t)header_bytes, path, &header));
    const fkv_status status = read_tensor_entries(weights, header, text + header_bytes, bytes_left - header_bytes, path);
    json_decref(header);
    return status;
}

/* ---- folders ---- */

typedef struct file_list {
    char **names;
    size_t n;
} file_list;

static void list_close(file_list *list) {
    for (size_t i = 0; i < list->n; i++) free(list->names[i]);
    free(list->names);
    *list = (file_list){0};
}

static fkv_status list_add(file_list *list, const char *name, const char *path) {
    FKV_REQUIRE(list->n < FKV_MAX_SHARDS, FKV_UNSUPPORTED, "%s: the model has more than %d safetensors files", path,
                FKV_MAX_SHARDS);
    char **names = realloc(list->names, (list->n + 1) * sizeof *names);
    if (names != NULL) list->names = names;
    char *copy = names == NULL ? NULL : strdup(name);
    FKV_REQUIRE(copy != NULL, FKV_NO_MEMORY, "out of memory listing the files of %s", path);
    list->names[list->n++] = copy;
    return FKV_OK;
}

static bool list_has(const file_list *list, const char *name) {
    for (size_t i = list->n; i-- > 0;)
        if (strcmp(list->names[i], name) == 0) return true;
    return false;
}

static int compare_texts(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static bool is_shard_name(const char *name) {
    static const char end[] = ".safetensors";
    const size_t n = strlen(name);
    return n > sizeof end - 1 && strcmp(name + n - (sizeof end - 1), end) == 0 && name[0] != '.' && strchr(name, '/') == NULL;
}

static fkv_status join_path(const char *folder, const char *name, char path[MAX_PATH]) {
    const int n = snprintf(path, MAX_PATH, "%s/%s", folder, name);
    FKV_REQUIRE(n > 0 && n < MAX_PATH, FKV_BAD_ARGUMENT, "the path is longer than %d bytes: %s", MAX_PATH, folder);
    return FKV_OK;
}

static fkv_status file_exists(const char *folder, const char *name, bool *there) {
    char path[MAX_PATH];
    FKV_TRY(join_path(folder, name, path));
    *there = access(path, F_OK) == 0;
    return FKV_OK;
}

/* Lists model.safetensors if it exists, otherwise all *.safetensors files. If model.safetensors exists, other files are
 * skipped, because consolidated.safetensors in some folders is a second copy of the weights. */
static fkv_status list_folder(const char *folder, file_list *list) {
    bool whole = false;
    FKV_TRY(file_exists(folder, "model.safetensors", &whole));
    if (whole) return list_add(list, "model.safetensors", folder);
    DIR *open_folder = opendir(folder);
    FKV_REQUIRE(open_folder != NULL, FKV_IO, "%.300s: %s", folder, strerror(errno));
    fkv_status status = FKV_OK;
    for (struct dirent *entry = readdir(open_folder); entry != NULL && status == FKV_OK; entry = readdir(open_folder))
        if (is_shard_name(entry->d_name)) status = list_add(list, entry->d_name, folder);
    (void)closedir(open_folder);
    FKV_TRY(status);
    FKV_REQUIRE(list->n > 0, FKV_FILE_FORMAT, "%s: the weights are missing: the folder contains no .safetensors files", folder);
    qsort(list->names, list->n, sizeof *list->names, compare_texts);
    return FKV_OK;
}

/* Lists the files named in the index, without duplicates. */
static fkv_status list_index(const json_t *index, const char *path, file_list *list) {
    json_t *map = json_object_get(index, "weight_map");
    const char *name = NULL;
    json_t *file = NULL;
    FKV_REQUIRE(json_is_object(map) && json_object_size(map) > 0, FKV_FILE_FORMAT, "%s: weight_map is missing or empty", path);
    json_object_foreach(map, name, file) {
        const char *text = json_string_value(file);
        FKV_REQUIRE(text != NULL && is_shard_name(text), FKV_FILE_FORMAT,
                    "%s: weight_map assigns tensor %s to '%s', which is not the name of a safetensors file", path,
                    fkv_show_text(name).text, fkv_show_text(text == NULL ? "" : text).text);
        if (!list_has(list, text)) FKV_TRY(list_add(list, text, path));
    }
    return FKV_OK;
}

static fkv_status read_shards(fkv_weights *weights, const char *folder, const file_list *list) {
    for (size_t i = 0; i < list->n; i++) {
        char path[MAX_PATH];
        fkv_mapped mapped = {0};
        FKV_TRY(join_path(folder, list->names[i], path));
        FKV_TRY(fkv_weights_map(weights, path, &mapped));
        FKV_TRY(fkv_safetensors_read(weights, mapped.bytes, mapped.size, path));
    }
    FKV_TRY(fkv_weights_finish(weights, folder));
    FKV_TRY(fkv_quantization_join(weights, folder));
    FKV_REQUIRE(!weights->needs_output || fkv_weights_find(weights, "output.weight") != NULL, FKV_FILE_DAMAGED,
                "%s: tie_word_embeddings is false, but lm_head.weight is missing", folder);
    return FKV_OK;
}

/* Checks that the files contain every tensor in the index. A file can be valid on its own and still lack a tensor. */
static fkv_status check_index(const fkv_weights *weights, const json_t *index, const char *path) {
    json_t *map = json_object_get(index, "weight_map");
    const char *hf_name = NULL;
    json_t *file = NULL;
    json_object_foreach(map, hf_name, file) {
        char name[FKV_MAX_TENSOR_NAME];
        if (!translate_name(weights, hf_name, name) || find_part_suffix(name) != NULL) continue;
        FKV_REQUIRE(fkv_weights_find(weights, name) != NULL, FKV_FILE_DAMAGED,
                    "%s: tensor %s is listed in the index but missing from the files", path, fkv_show_text(hf_name).text);
    }
    return FKV_OK;
}

static fkv_status read_indexed(fkv_weights *weights, const char *folder, const char *path, const json_t *index, file_list *list) {
    FKV_TRY(list_index(index, path, list));
    FKV_TRY(read_shards(weights, folder, list));
    return check_index(weights, index, path);
}

/* Reads a JSON file through a temporary mapping. */
static fkv_status read_index(const char *path, json_t **index) {
    fkv_mapped mapped = {0};
    fkv_weights *holder = fkv_weights_new();
    FKV_REQUIRE(holder != NULL, FKV_NO_MEMORY, "out of memory reading %s", path);
    fkv_status status = fkv_weights_map(holder, path, &mapped);
    if (status == FKV_OK) status = fkv_json_read((const char *)mapped.bytes, (size_t)mapped.size, path, index);
    fkv_weights_close(holder);
    return status;
}

/* Fails if the folder contains neither an index nor safetensors files. */
static fkv_status require_weight_files(const char *folder) {
    bool has_index = false;
    file_list list = {0};
    FKV_TRY(file_exists(folder, "model.safetensors.index.json", &has_index));
    if (has_index) return FKV_OK;
    const fkv_status status = list_folder(folder, &list);
    list_close(&list);
    return status;
}

static fkv_status open_shards(fkv_weights *weights, const char *folder, file_list *list) {
    char path[MAX_PATH];
    bool has_index = false;
    json_t *index = NULL;
    FKV_TRY(file_exists(folder, "model.safetensors.index.json", &has_index));
    if (!has_index) {
        FKV_TRY(list_folder(folder, list));
        return read_shards(weights, folder, list);
    }
    FKV_TRY(join_path(folder, "model.safetensors.index.json", path));
    FKV_TRY(read_index(path, &index));
    const fkv_status status = read_indexed(weights, folder, path, index, list);
    json_decref(index);
    return status;
}

/* Removes the scale factors of Falcon-H1 that are already multiplied into the weights of a folder converted by MLX. */
static void drop_folded_scales(fkv_weights *weights) {
    fkv_hparams *h = &weights->hparams;
    if (!h->features.parallel_mixers) return;
    memset(h->recurrence.in_scales, 0, sizeof h->recurrence.in_scales);
    h->recurrence.out_scale = h->gate_scale = h->down_scale = h->embedding_scale = 0;
    h->logit_scale = weights->is_tied ? h->mlx_scales.logit_scale : 0;
    h->query_scale = h->mlx_scales.query_scale;
    h->value_scale = h->mlx_scales.value_scale;
}

/* Detects whether a model with convolutions was converted by MLX, which stores convolution weights as [C, n_taps, 1], so that
 * their last dimension is 1. In a converted folder, the stored norm weights are complete (not minus 1), and the weights of
 * Falcon-H1 are already scaled. */
static void detect_mlx_folder(fkv_weights *weights) {
    bool is_mlx = false;
    for (uint32_t i = 0; i < fkv_weights_n_tensors(weights); i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(weights, i);
        if (tensor->n_cols == 1 && tensor->n_rows > 1 && fkv_ends_with(tensor->name, ".ssm_conv1d.weight")) is_mlx = true;
    }
    if (!is_mlx) return;
    weights->hparams.norm_plus_one = false;
    drop_folded_scales(weights);
}

static void name_after_folder(fkv_weights *weights, const char *folder) {
    size_t end = strlen(folder);
    while (end > 1 && folder[end - 1] == '/') end--;
    size_t first = end;
    while (first > 0 && folder[first - 1] != '/') first--;
    fkv_show_into((fkv_bytes){.data = folder + first, .size = end - first}, weights->name, sizeof weights->name);
}

fkv_status fkv_safetensors_open(fkv_weights *weights, const char *folder) {
    char path[MAX_PATH];
    fkv_mapped config = {0};
    file_list list = {0};
    bool has_config = false;
    FKV_TRY(file_exists(folder, "config.json", &has_config));
    FKV_REQUIRE(has_config, FKV_FILE_FORMAT, "%s: the folder contains no config.json", folder);
    FKV_TRY(join_path(folder, "config.json", path));
    FKV_TRY(fkv_weights_map(weights, path, &config));
    FKV_TRY(fkv_hf_config_read(weights, (const char *)config.bytes, (size_t)config.size, path));
    /* check for weight files before reading the vocabulary, because an incomplete download usually lacks the weights */
    FKV_TRY(require_weight_files(folder));
    FKV_TRY(fkv_vocab_folder_read(fkv_weights_vocab_target(weights), folder));
    name_after_folder(weights, folder);
    const fkv_status status = open_shards(weights, folder, &list);
    list_close(&list);
    if (status == FKV_OK) detect_mlx_folder(weights);
    return status;
}
