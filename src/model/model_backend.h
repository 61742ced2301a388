/* What a backend brings to run models: weights in the form its products take, a cache in its memory, and a forward pass.
 *
 * Everything else knows no backend: weight files, tensors found and checked, tokenizers, the configuration of the cache, what a
 * step is. A model has the backend its weights were loaded for, and its runners run there.
 */
#ifndef FKV_MODEL_BACKEND_H
#define FKV_MODEL_BACKEND_H

#include "../base/carve.h"

#include <flatkv/model.h>

typedef struct fkv_model_backend {
    /* Sets packed_bytes and mapped_bytes of the model, whose tensors are known; takes nothing. */
    fkv_status (*count_weights)(fkv_model *model);

    /* Brings the weights to where they are used. unload is right whether load was called, failed or did well. */
    fkv_status (*load_weights)(fkv_model *model);
    void (*unload_weights)(fkv_model *model);

    /* Bytes that can still be had for pages and activations; *source names what bounds it. */
    uint64_t (*available)(const char **source);

    fkv_status (*plan_cache)(const fkv_config *config, fkv_plan *plan);

    /* Activations of one step: those in host memory, in a walk that counts or places, and the bytes of all others. */
    void (*layout)(fkv_carve *carve, fkv_runner *runner);
    uint64_t (*step_bytes)(const fkv_runner *runner, const fkv_config *cache);

    /* Opens the cache of a runner, whose tables are filled, and what else the backend needs. close is right after a failure too.
     */
    fkv_status (*open)(fkv_runner *runner, const fkv_config *cache);
    void (*close)(fkv_runner *runner);

    /* All layers over the rows listed in the runner, and the logits of those asked for. Nothing is left pending on return. */
    fkv_status (*forward)(fkv_runner *runner, fkv_step *step);

    fkv_status (*memory)(fkv_backend_memory *now);
} fkv_model_backend;

/* FKV_UNSUPPORTED for a backend that is not registered, or that is none. */
fkv_status fkv_model_backend_find(fkv_backend backend, const fkv_model_backend **found);

/* From now on `backend`, which is not the CPU, is this one. `version` is that of the library it is in: FKV_UNSUPPORTED where it
 * is not this one's, since what they share is not public. Any thread may call, again too. */
FKV_SEAM fkv_status fkv_model_backend_register(fkv_backend backend, const fkv_model_backend *table, const char *version);

extern const fkv_model_backend fkv_cpu_model_backend;

#endif
