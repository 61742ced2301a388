/* Models that -m accepts by name, and the location of their files on this machine.
 *
 * The needle model is part of flatkv: it is in share/flatkv/models of an installed program, or in the source tree. All other
 * models are downloaded into the user's cache folder by the command that model_fetcher() returns.
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
    uint64_t bytes;   /* size of the weights */
    uint32_t context; /* tokens */
} model_name;

extern const model_name model_names[];
extern const unsigned n_model_names;

/* Returns NULL if the name is unknown. */
const model_name *model_name_find(const char *name);

/* Writes the path where the model's file or folder is expected. Returns false if it does not exist. */
bool model_name_path(const model_name *name, char path[MODEL_PATH]);

/* Returns the command that downloads models: flatkv-get-model for an installed program, otherwise the script of the source tree.
 */
const char *model_fetcher(void);

/* Resolves the value of -m, a path or a name, to a path. Returns an exit code. */
int model_path_of(const char *word, char path[MODEL_PATH]);

/* Reports that -m is missing and how to obtain a model. Returns an exit code. */
int model_fail_unnamed(void);

/* Writes the path of a file in the needle model's folder: its book or its lexicon. Returns an exit code. */
int model_needle_file(const char *file, char path[MODEL_PATH]);

#endif
