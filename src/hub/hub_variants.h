/* Finds the models in a repository: a folder with safetensors files, and one model per GGUF quantization.
 *
 * Only files that flatkv can read are selected. Weights in other formats (.bin, .pth, .onnx, .h5, ...), vision projectors
 * (mmproj), importance matrices and adapters are ignored.
 */
#ifndef FKV_HUB_VARIANTS_H
#define FKV_HUB_VARIANTS_H

#include "hub_listing.h"

typedef struct hub_variant {
    bool is_folder;        /* true for a safetensors folder with config.json, false for GGUF */
    char label[HUB_QUANT]; /* quantization of a GGUF model, such as "Q4_K_M", or the file name without ".gguf" if the quantization
                              is missing or not unique; "" for a folder */
    bool is_wide;          /* true for a GGUF model with 16 or 32 bits per weight */
    uint32_t *files;       /* indices of the model's files in the listing; for a folder, the first file is config.json */
    uint32_t n_files;
    uint64_t weight_bytes; /* size of the weight files */
    uint64_t total_bytes;  /* size of all files */
    bool is_complete;      /* true if no part of a split model is missing */
} hub_variant;

typedef struct hub_variants {
    hub_variant *variants; /* the safetensors folder first, then GGUF models in order of decreasing size */
    uint32_t n;
} hub_variants;

/* Finds all models of a repository. The caller frees the result with hub_variants_free(). */
void hub_variants_find(const hub_listing *listing, hub_variants *found);

/* Returns the GGUF variant with this label, or NULL if there is none. Case is ignored. */
const hub_variant *hub_variants_named(const hub_variants *found, const char *label);

/* Extracts the quantization from the name of a GGUF file, in upper case: "Q4_K_M" for "dir/model-q4_k_m-00001-of-00002.gguf".
 * Returns false if the name contains no quantization. */
bool hub_quant_of(const char *path, char label[HUB_QUANT]);

/* Returns whether a .gguf file is a language model, according to its name, and not a projector, importance matrix or adapter. */
bool hub_is_gguf_model(const char *path);

void hub_variants_free(hub_variants *found);

#endif
