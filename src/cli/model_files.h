/* Finds models on this machine: .gguf files and folders with safetensors files, in the Hugging Face cache or in any other folder.
 */
#ifndef FKV_CLI_MODEL_FILES_H
#define FKV_CLI_MODEL_FILES_H

#include "model_names.h"

#include <stdint.h>

typedef struct model_file {
    char path[MODEL_PATH]; /* path of a .gguf file or of a folder with safetensors files */
    uint64_t bytes;        /* total size of the weight files */
} model_file;

typedef struct model_files {
    model_file *files;
    uint32_t n;
    uint32_t capacity;
} model_files;

/* Adds the models in a folder and its subfolders, sorted by path. Adds nothing if the folder does not exist. */
void model_files_add(model_files *list, const char *folder);

/* Extracts the quantization, such as "Q4_K_M", from the file name of a GGUF model. If the file name contains no quantization,
 * writes the file name without ".gguf". Writes "" for a folder. */
void model_file_label(const model_file *file, char label[MODEL_PATH]);

void model_files_free(model_files *list);

#endif
