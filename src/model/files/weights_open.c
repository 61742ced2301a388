/* From a path to weights: a folder holds safetensors, a file is GGUF. A new format is one more case here. */
#include "gguf.h"
#include "safetensors.h"
#include "weights_state.h"

#include <errno.h>
#include <sys/stat.h>

static fkv_status open_into(fkv_weights *weights, const char *path) {
    struct stat about;
    FKV_REQUIRE(stat(path, &about) == 0, FKV_IO, "%s: %s", strerror(errno), path);
    if (S_ISDIR(about.st_mode)) return fkv_safetensors_open(weights, path);
    return fkv_gguf_open(weights, path);
}

fkv_status fkv_weights_open(const char *path, fkv_weights **weights) {
    FKV_ASSERT(path != NULL && weights != NULL);
    *weights = NULL;
    fkv_weights *made = fkv_weights_new();
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "no memory for the tables of a weight file: %s", path);
    const fkv_status status = open_into(made, path);
    if (status != FKV_OK) {
        fkv_weights_close(made);
        return status;
    }
    *weights = made;
    return FKV_OK;
}
