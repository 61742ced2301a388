/* Registry of model backends; see model_backend.h. */
#include "model_backend.h"

#include <stdatomic.h>

static const fkv_model_backend *_Atomic mlx_backend; /* NULL until the MLX backend is registered */

fkv_status fkv_model_backend_register(fkv_backend backend, const fkv_model_backend *table, const char *version) {
    FKV_REQUIRE(backend == FKV_BACKEND_MLX, FKV_BAD_CONFIG, "backend %d cannot be registered: expected FKV_BACKEND_MLX",
                (int)backend);
    FKV_REQUIRE(strcmp(version, fkv_version()) == 0, FKV_UNSUPPORTED,
                "libflatkv_mlx has version %s but libflatkv has %s: install both from the same build", version, fkv_version());
    atomic_store(&mlx_backend, table);
    return FKV_OK;
}

fkv_status fkv_model_backend_find(fkv_backend backend, const fkv_model_backend **found) {
    FKV_REQUIRE(backend == FKV_BACKEND_CPU || backend == FKV_BACKEND_MLX, FKV_BAD_CONFIG,
                "invalid backend %d: expected FKV_BACKEND_CPU or FKV_BACKEND_MLX", (int)backend);
    *found = backend == FKV_BACKEND_CPU ? &fkv_cpu_model_backend : atomic_load(&mlx_backend);
    FKV_REQUIRE(*found != NULL, FKV_UNSUPPORTED,
                "the MLX backend is not registered: link flatkv_mlx and call fkv_mlx_register() before loading a model");
    return FKV_OK;
}

fkv_status fkv_backend_memory_now(fkv_backend backend, fkv_backend_memory *now) {
    const fkv_model_backend *found = NULL;
    FKV_REQUIRE(now != NULL, FKV_BAD_ARGUMENT, "fkv_backend_memory_now: argument \"now\" is NULL");
    FKV_TRY(fkv_model_backend_find(backend, &found));
    FKV_ASSERT(found != NULL);
    return found->memory(now);
}

uint64_t fkv_backend_available(fkv_backend backend, const char **source) {
    const fkv_model_backend *found = NULL;
    const char *ignored = NULL;
    const char **name = source != NULL ? source : &ignored;
    *name = "backend not available";
    return fkv_model_backend_find(backend, &found) == FKV_OK && found != NULL ? found->available(name) : 0;
}
