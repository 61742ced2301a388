/* The backends a model can run on. See model_backend.h. */
#include "model_backend.h"

#include <stdatomic.h>

static const fkv_model_backend *_Atomic mlx_backend; /* NULL until it is registered */

fkv_status fkv_model_backend_register(fkv_backend backend, const fkv_model_backend *table, const char *version) {
    FKV_REQUIRE(backend == FKV_BACKEND_MLX, FKV_BAD_CONFIG, "backend %d cannot be registered", (int)backend);
    FKV_REQUIRE(strcmp(version, fkv_version()) == 0, FKV_UNSUPPORTED,
                "libflatkv_mlx is of version %s and libflatkv of %s: install both from one build", version, fkv_version());
    atomic_store(&mlx_backend, table);
    return FKV_OK;
}

fkv_status fkv_model_backend_find(fkv_backend backend, const fkv_model_backend **found) {
    FKV_REQUIRE(backend == FKV_BACKEND_CPU || backend == FKV_BACKEND_MLX, FKV_BAD_CONFIG, "backend %d: FKV_BACKEND_CPU or _MLX",
                (int)backend);
    *found = backend == FKV_BACKEND_CPU ? &fkv_cpu_model_backend : atomic_load(&mlx_backend);
    FKV_REQUIRE(*found != NULL, FKV_UNSUPPORTED,
                "MLX is not registered: link flatkv_mlx and call fkv_mlx_register() before a model is loaded for it");
    return FKV_OK;
}

fkv_status fkv_backend_memory_now(fkv_backend backend, fkv_backend_memory *now) {
    const fkv_model_backend *found = NULL;
    FKV_REQUIRE(now != NULL, FKV_BAD_ARGUMENT, "fkv_backend_memory_now: now is NULL");
    FKV_TRY(fkv_model_backend_find(backend, &found));
    FKV_ASSERT(found != NULL);
    return found->memory(now);
}

uint64_t fkv_backend_available(fkv_backend backend, const char **source) {
    const fkv_model_backend *found = NULL;
    const char *unasked = NULL;
    const char **name = source != NULL ? source : &unasked;
    *name = "a backend that is not there";
    return fkv_model_backend_find(backend, &found) == FKV_OK && found != NULL ? found->available(name) : 0;
}
