/* Selects the format of a model path: folders contain safetensors, files are GGUF. */
#include "config_tensors.h"
#include "gguf.h"
#include "safetensors.h"
#include "weights_state.h"

#include <errno.h>
#include <sys/stat.h>

static bool is_safetensors_file(const char *path) {
    static const char suffix[] = ".safetensors";
    size_t n = strlen(path);
    return n >= strlen(suffix) && strcmp(path + n - strlen(suffix), suffix) == 0;
}

static fkv_status open_format(fkv_weights *weights, const char *path) {
    struct stat about;
    FKV_REQUIRE(stat(path, &about) == 0, FKV_IO, "%.300s: %s", path, strerror(errno));
    if (S_ISDIR(about.st_mode)) return fkv_safetensors_open(weights, path);
    FKV_REQUIRE(
        !is_safetensors_file(path), FKV_FILE_FORMAT,
        "%s: a single safetensors file is not a model: pass the folder that contains it together with config.json and the "
        "tokenizer",
        path);
    if (fkv_ends_with(path, ".json")) return fkv_config_open(weights, path);
    return fkv_gguf_open(weights, path);
}

fkv_status fkv_weights_open(const char *path, fkv_weights **weights) {
    FKV_ASSERT(path != NULL && weights != NULL);
    *weights = NULL;
    fkv_weights *made = fkv_weights_new();
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "out of memory opening %s", path);
    const fkv_status status = open_format(made, path);
    if (status != FKV_OK) {
        fkv_weights_close(made);
        return status;
    }
    *weights = made;
    return FKV_OK;
}
