/* The models that have names: what they are, and where their files lie on this machine.
 *
 * needle comes with flatkv: in share/flatkv/models beside an installed program, else in the source tree it was built from. The
 * others are fetched by model_fetcher() into the user's cache folder.
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
    uint64_t bytes;   /* of its weights */
    uint32_t context; /* tokens */
} model_name;

extern const model_name model_names[];
extern const unsigned n_model_names;

/* NULL: no model has this name. */
const model_name *model_name_find(const char *name);

/* Where its file or folder is or would be; false where it is not there. */
bool model_name_path(const model_name *name, char path[MODEL_PATH]);

/* The command that fetches models: flatkv-get-model beside an installed program, else the script of the source tree. */
const char *model_fetcher(void);

/* What -m says as a path: a file or a folder as it is, a name by its place. Returns an exit code, with a message what to do. */
int model_path_of(const char *word, char path[MODEL_PATH]);

/* Says that a command needs a model, and how to come by one. Returns an exit code. */
int model_fail_unnamed(void);

/* A file that lies beside the needle model: its book, its lexicon. Returns an exit code, with a message on failure. */
int model_needle_file(const char *file, char path[MODEL_PATH]);

#endif
