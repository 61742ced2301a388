/* A GGUF model in the file system: one file, or parts that are called NAME-00001-of-00003.gguf, as llama.cpp and gguf-py cut
 * them. The first part has all keys, every part has tensors of its own.
 */
#include "gguf.h"
#include "weights_state.h"

#include <stdio.h>
#include <unistd.h>

enum { MAX_PATH = 4096, TAIL_BYTES = 20 /* -00001-of-00003.gguf */ };

static bool are_digits(const char *text, int n) {
    for (int i = 0; i < n; i++)
        if (text[i] < '0' || text[i] > '9') return false;
    return true;
}

/* Where the name of a part has its "-00001-of-00003.gguf"; NULL: it is called otherwise. */
static const char *tail_of(const char *path) {
    const size_t n = strlen(path);
    if (n <= TAIL_BYTES) return NULL;
    const char *tail = path + n - TAIL_BYTES;
    const bool is_part = tail[0] == '-' && are_digits(tail + 1, 5) && memcmp(tail + 6, "-of-", 4) == 0 &&
                         are_digits(tail + 10, 5) && strcmp(tail + 15, ".gguf") == 0;
    return is_part ? tail : NULL;
}

/* The path of part `number`, from 0, beside another. */
static fkv_status path_of_part(const char *path, uint32_t number, char out[MAX_PATH]) {
    const char *tail = tail_of(path);
    FKV_REQUIRE(tail != NULL && strlen(path) < MAX_PATH, FKV_FILE_FORMAT,
                "the file is one part of several (split.count), which must be called NAME-00001-of-00003.gguf and so on to be "
                "found: %s",
                path);
    const int n = snprintf(out, MAX_PATH, "%.*s-%05u%s", (int)(tail - path), path, number + 1, tail + 6);
    FKV_REQUIRE(n > 0 && n < MAX_PATH, FKV_FILE_FORMAT, "a path of more than %d bytes: %s", MAX_PATH, path);
    return FKV_OK;
}

static fkv_status read_one(fkv_weights *weights, const char *path, uint32_t number, fkv_gguf_part *part) {
    fkv_mapped mapped = {0};
    FKV_TRY(fkv_weights_map(weights, path, &mapped));
    return fkv_gguf_read_part(weights, mapped.bytes, mapped.size, path, number, part);
}

static fkv_status read_others(fkv_weights *weights, const char *first_path, const fkv_gguf_part *first) {
    for (uint32_t i = 1; i < first->n_parts; i++) {
        char path[MAX_PATH];
        fkv_gguf_part part = {0};
        FKV_TRY(path_of_part(first_path, i, path));
        FKV_REQUIRE(access(path, F_OK) == 0, FKV_IO, "part %u of %u is missing; all parts belong in one folder: %s", i + 1,
                    first->n_parts, path);
        FKV_TRY(read_one(weights, path, i, &part));
        FKV_REQUIRE(part.n_parts == first->n_parts, FKV_FILE_DAMAGED,
                    "split.count is %u, the first part has %u: parts of two models? %s", part.n_parts, first->n_parts, path);
    }
    FKV_REQUIRE(first->n_all_tensors == 0 || weights->n_tensors == first->n_all_tensors, FKV_FILE_DAMAGED,
                "split.tensors.count is %u and the %u parts have %u tensors: parts of two models? %s", first->n_all_tensors,
                first->n_parts, weights->n_tensors, first_path);
    return FKV_OK;
}

/* A part that is not the first leads to the first by its name; where that is not there, it is said before anything is read. */
static fkv_status first_path_of(const char *path, char out[MAX_PATH]) {
    const char *tail = tail_of(path);
    if (tail == NULL || memcmp(tail + 1, "00001", 5) == 0) {
        FKV_REQUIRE(strlen(path) < MAX_PATH, FKV_BAD_ARGUMENT, "a path of more than %d bytes: %s", MAX_PATH, path);
        memcpy(out, path, strlen(path) + 1);
        return FKV_OK;
    }
    FKV_TRY(path_of_part(path, 0, out));
    FKV_REQUIRE(access(out, F_OK) == 0, FKV_IO, "the first part of %s is missing; all parts belong in one folder: %s", path, out);
    return FKV_OK;
}

/* Command-R+ has norms of queries and keys, Command-R has not, and no key says so. */
static void note_norms(fkv_weights *weights) {
    if (strcmp(weights->architecture, "command-r") == 0 && fkv_weights_find(weights, "blk.0.attn_q_norm.weight") != NULL)
        weights->hparams.features.qk_norm = FKV_QK_NORM_OWN_HEADS;
}

fkv_status fkv_gguf_open(fkv_weights *weights, const char *path) {
    char first_path[MAX_PATH];
    fkv_gguf_part first = {0};
    FKV_TRY(first_path_of(path, first_path));
    FKV_TRY(read_one(weights, first_path, 0, &first));
    FKV_TRY(read_others(weights, first_path, &first));
    FKV_TRY(fkv_weights_finish(weights, path));
    note_norms(weights);
    return FKV_OK;
}
