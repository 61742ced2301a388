/* Opens GGUF models that consist of one file, or of the parts NAME-00001-of-00003.gguf and so on, as split by llama.cpp and
 * gguf-py. The first part has all metadata; each part has its own tensors.
 */
#include "gguf.h"
#include "weights_state.h"

#include <stdio.h>
#include <unistd.h>

enum { MAX_PATH = 4096, SUFFIX_BYTES = 20 /* -00001-of-00003.gguf */ };

static bool are_digits(const char *text, int n) {
    for (int i = 0; i < n; i++)
        if (text[i] < '0' || text[i] > '9') return false;
    return true;
}

/* Returns the "-00001-of-00003.gguf" suffix of a part's path, or NULL if the path has no such suffix. */
static const char *part_suffix(const char *path) {
    const size_t n = strlen(path);
    if (n <= SUFFIX_BYTES) return NULL;
    const char *suffix = path + n - SUFFIX_BYTES;
    const bool is_part = suffix[0] == '-' && are_digits(suffix + 1, 5) && memcmp(suffix + 6, "-of-", 4) == 0 &&
                         are_digits(suffix + 10, 5) && strcmp(suffix + 15, ".gguf") == 0;
    return is_part ? suffix : NULL;
}

/* Writes the path of part `number` (numbered from 0). `path` is the path of any part of the model. */
static fkv_status part_path(const char *path, uint32_t number, char out[MAX_PATH]) {
    const char *suffix = part_suffix(path);
    FKV_REQUIRE(
        suffix != NULL && strlen(path) < MAX_PATH, FKV_FILE_FORMAT,
        "%s: the file is one part of a split model (split.count): its name must be NAME-00001-of-00003.gguf or similar, so that "
        "the other parts can be found",
        path);
    const int n = snprintf(out, MAX_PATH, "%.*s-%05u%s", (int)(suffix - path), path, number + 1, suffix + 6);
    FKV_REQUIRE(n > 0 && n < MAX_PATH, FKV_FILE_FORMAT, "the path is longer than %d bytes: %s", MAX_PATH, path);
    return FKV_OK;
}

static fkv_status read_part_file(fkv_weights *weights, const char *path, uint32_t number, fkv_gguf_part *part) {
    fkv_mapped mapped = {0};
    FKV_TRY(fkv_weights_map(weights, path, &mapped));
    return fkv_gguf_read_part(weights, mapped.bytes, mapped.size, path, number, part);
}

static fkv_status read_others(fkv_weights *weights, const char *first_path, const fkv_gguf_part *first) {
    for (uint32_t i = 1; i < first->n_parts; i++) {
        char path[MAX_PATH];
        fkv_gguf_part part = {0};
        FKV_TRY(part_path(first_path, i, path));
        FKV_REQUIRE(access(path, F_OK) == 0, FKV_IO, "%s: part %u of %u is missing; all parts must be in one folder", path, i + 1,
                    first->n_parts);
        FKV_TRY(read_part_file(weights, path, i, &part));
        FKV_REQUIRE(part.n_parts == first->n_parts, FKV_FILE_DAMAGED,
                    "%s: split.count is %u, but the first part states %u; the parts belong to different models", path,
                    part.n_parts, first->n_parts);
    }
    FKV_REQUIRE(first->n_all_tensors == 0 || weights->n_tensors == first->n_all_tensors, FKV_FILE_DAMAGED,
                "%s: split.tensors.count is %u, but the %u parts have %u tensors; the parts may belong to different models",
                first_path, first->n_all_tensors, first->n_parts, weights->n_tensors);
    return FKV_OK;
}

/* Derives the path of the first part from the path of any part. Returns FKV_IO if the first part does not exist. */
static fkv_status first_part_path(const char *path, char out[MAX_PATH]) {
    const char *suffix = part_suffix(path);
    if (suffix == NULL || memcmp(suffix + 1, "00001", 5) == 0) {
        FKV_REQUIRE(strlen(path) < MAX_PATH, FKV_BAD_ARGUMENT, "the path is longer than %d bytes: %s", MAX_PATH, path);
        memcpy(out, path, strlen(path) + 1);
        return FKV_OK;
    }
    FKV_TRY(part_path(path, 0, out));
    FKV_REQUIRE(access(out, F_OK) == 0, FKV_IO, "%s: the first part (%s) is missing; all parts must be in one folder", path, out);
    return FKV_OK;
}

/* Sets features that follow from the presence of tensors, because GGUF metadata does not state them: the QK norms of Command-R+
 * and GLM-4.5/4.6, and the attention biases of models in which they are optional. */
static void detect_features(fkv_weights *weights) {
    fkv_features *f = &weights->hparams.features;
    const bool is_glm = strcmp(weights->architecture, "glm4moe") == 0;
    const bool has_norms = fkv_weights_find(weights, "blk.0.attn_q_norm.weight") != NULL;
    if (has_norms && strcmp(weights->architecture, "command-r") == 0) f->qk_norm = FKV_QK_NORM_OWN_HEADS;
    if (has_norms && is_glm) f->qk_norm = FKV_QK_NORM_HEADS;
    if ((is_glm || strcmp(weights->architecture, "gpt-oss") == 0) && fkv_weights_find(weights, "blk.0.attn_q.bias") == NULL)
        f->qkv_bias = false;
}

fkv_status fkv_gguf_open(fkv_weights *weights, const char *path) {
    char first_path[MAX_PATH];
    fkv_gguf_part first = {0};
    FKV_TRY(first_part_path(path, first_path));
    FKV_TRY(read_part_file(weights, first_path, 0, &first));
    FKV_TRY(read_others(weights, first_path, &first));
    FKV_TRY(fkv_weights_finish(weights, path));
    detect_features(weights);
    return FKV_OK;
}
