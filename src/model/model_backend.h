/* The interface of a model backend. A backend provides weights in the format of its matrix kernels, a cache in its memory, and a
 * forward pass.
 *
 * All other code is backend-independent: weight files, tensor checks, tokenizers, cache configuration and step bookkeeping. A
 * model is loaded for one backend, and all of its runners use that backend.
 */
#ifndef FKV_MODEL_BACKEND_H
#define FKV_MODEL_BACKEND_H

#include "../base/carve.h"

#include <flatkv/model.h>

typedef struct fkv_model_backend {
    /* Computes packed_bytes and mapped_bytes of a model whose tensors have been found. Allocates nothing. */
    fkv_status (*count_weights)(fkv_model *model);

    /* `load_weights` loads the weights, and `unload_weights` releases them. `unload_weights` may also be called if loading failed
     * or nothing was loaded. */
    fkv_status (*load_weights)(fkv_model *model);
    void (*unload_weights)(fkv_model *model);

    /* Returns the number of bytes available for pages and activations. *source receives a text that names the limit. */
    uint64_t (*available)(const char **source);

    /* Writes the identity of the backend's arithmetic (fkv_config.numerics). isa: instruction set of CPU kernels, not
     * FKV_ISA_AUTO. */
    fkv_status (*numerics)(fkv_isa isa, char text[32]);

    fkv_status (*plan_cache)(const fkv_config *config, fkv_plan *plan);

    /* `layout` reserves memory for the activations of one step that are in host memory (carve.h). `step_bytes` returns the size
     * of all other activations. */
    void (*layout)(fkv_carve *carve, fkv_runner *runner);
    uint64_t (*step_bytes)(const fkv_runner *runner, const fkv_config *cache);

    /* Opens the cache of a runner and the backend's own state. The tables of the runner must already be filled in. `close` may
     * also be called after `open` has failed. */
    fkv_status (*open)(fkv_runner *runner, const fkv_config *cache);
    void (*close)(fkv_runner *runner);

    /* Runs all layers over the rows of the runner and computes the requested logits. All work has finished on return. */
    fkv_status (*forward)(fkv_runner *runner, fkv_step *step);

    /* Writes the recurrent states of the shortened rows (fkv_runner.shortened) again, from the inputs that `forward` has saved.
     * NULL if the backend does not save inputs. */
    fkv_status (*replay)(fkv_runner *runner, fkv_step *step);

    fkv_status (*memory)(fkv_backend_memory *now);
} fkv_model_backend;

/* Looks up a backend. Returns FKV_UNSUPPORTED if the backend is not registered, and FKV_BAD_CONFIG if `backend` is not a valid
 * value. */
fkv_status fkv_model_backend_find(fkv_backend backend, const fkv_model_backend **found);

/* Registers the implementation of a backend other than the CPU. `version` is the version of the library that contains the
 * backend. Because the interface is internal, FKV_UNSUPPORTED is returned if that version differs from the version of this
 * library. Thread-safe; a backend may be registered more than once. */
FKV_INTERNAL fkv_status fkv_model_backend_register(fkv_backend backend, const fkv_model_backend *table, const char *version);

extern const fkv_model_backend fkv_cpu_model_backend;

#endif
