/* Resolves model names that -m accepts to files on this machine.
 *
 * The needle model is part of flatkv: it is in share/flatkv/models of an installed program, or in the source tree. The other
 * short names refer to models on huggingface.co. flatkv looks for their files first in the folder flatkv/models of the user's
 * cache, where scripts/get-model stores test models. Then it looks in the Hugging Face cache, where flatkv pull stores models.
 */
#ifndef FKV_CLI_MODEL_NAMES_H
#define FKV_CLI_MODEL_NAMES_H

#include <stdbool.h>
#include <stdint.h>

enum { MODEL_PATH = 4096 };

typedef struct model_name {
    const char *name;
    const char *what;
    const char *licence;
    const char
        *hub; /* name of the model on huggingface.co, from which flatkv pull downloads it; NULL if the model is part of flatkv */
    uint64_t bytes;   /* size of the weights */
    uint32_t context; /* tokens */
} model_name;

extern const model_name model_names[];
extern const unsigned n_model_names;

/* Returns NULL if the name is unknown. */
const model_name *model_name_find(const char *name);

/* Writes the path of the model's file or folder. Returns false if neither exists. */
bool model_name_path(const model_name *name, char path[MODEL_PATH]);

/* Resolves the value of -m to a path: a short name, an existing path, or org/name[:quant] in the Hugging Face cache. Returns an
 * exit code. */
int model_path_of(const char *word, char path[MODEL_PATH]);

/* Returns whether the word names a model on a hub that is not on this machine. */
bool model_is_remote(const char *word);

/* Reports that -m is missing and explains how to obtain a model. Returns an exit code. */
int model_fail_unnamed(void);

/* Writes the path of a file in the needle model's folder, such as its book or its lexicon. Returns an exit code. */
int model_needle_file(const char *file, char path[MODEL_PATH]);

#endif
