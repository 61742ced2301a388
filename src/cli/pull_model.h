/* Models on a hub: chooses which files of a repository to use, plans a model before its weights are downloaded, and downloads it
 * into the cache. Used by pull, plan, run and serve.
 */
#ifndef FKV_CLI_PULL_MODEL_H
#define FKV_CLI_PULL_MODEL_H

#include "../hub/hub_session.h"
#include "../hub/hub_variants.h"
#include "model_cost.h"
#include "model_names.h"

/* A repository and the model that was chosen from it. pull_choice_free() releases it and removes its temporary files. */
typedef struct pull_choice {
    hub_name name;
    hub_listing listing;
    hub_variants variants;
    const hub_variant *variant; /* the chosen model */
    model_cost cost;            /* memory that the chosen model needs */
    uint64_t available_bytes;   /* memory that the model may use */
    const char *available_source;
    bool fits;
    char reason[256];        /* reason why this model was chosen */
    char folder[MODEL_PATH]; /* temporary folder; "" if there is none */
    char head[MODEL_PATH];   /* file with the header or config.json of the chosen model, which fkv_model_load() with plan_only can
                                read */
} pull_choice;

/* Lists a repository and chooses a model. If the name contains a quantization, this quantization is chosen. Otherwise, the
 * safetensors folder is chosen if it fits, or else the largest GGUF quantization up to 8 bits that fits. `available_bytes` is the
 * available memory; 0 selects the memory of this machine. With `force`, a model is chosen even if flatkv does not support it or
 * it does not fit. Only the listing, config.json and GGUF headers are downloaded. Returns an exit code. */
int pull_choose(hub_session *session, const char *word, bool force, uint64_t available_bytes, pull_choice *choice);
void pull_choice_free(pull_choice *choice);

/* Removes the temporary files, downloads the chosen model into the cache and writes the path of its .gguf file or folder.
 * *downloaded receives the number of bytes that were missing before the download. With `verify`, files that are already in the
 * cache are checked first. Returns an exit code. */
int pull_fetch(hub_session *session, pull_choice *choice, uint32_t n_connections, bool verify, char path[MODEL_PATH],
               uint64_t *downloaded);

/* Offers to download the model that -m names if it is not in the cache and if standard input and standard error are terminals.
 * Returns EXIT_GOOD after the download, or if there is nothing to download. */
int pull_offer(const char *word);

enum { PULL_CONNECTIONS = 8 };

#endif
