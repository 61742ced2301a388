/* Models on this machine: .gguf files and folders with safetensors, in the Hugging Face cache and wherever else one looks.
 */
#ifndef FKV_CLI_MODEL_FILES_H
#define FKV_CLI_MODEL_FILES_H

#include "model_names.h"

#include <stdint.h>

/* One that was found. */
typedef struct model_file {
    char path[MODEL_PATH];
    uint64_t bytes; /* of all its files of weights */
} model_file;

typedef struct model_files {
    model_file *files;
    uint32_t n;
    uint32_t room;
} model_files;

/* Adds what a folder and the folders below it have, sorted by path; nothing where there is no such folder. */
void model_files_add(model_files *list, const char *folder);

/* The hub of the Hugging Face cache. False: it has no place (HOME is not set). */
bool model_files_hub(char path[MODEL_PATH]);

void model_files_free(model_files *list);

#endif
