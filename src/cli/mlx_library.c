/* See mlx_library.h. */
#include "mlx_library.h"

#include "../kit/process.h"
#include "cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __APPLE__
static const char MLXC[] = "libmlxc.dylib";
#else
static const char MLXC[] = "libmlxc.so";
#endif

enum { PATH_BYTES = 4096 };

static int fail_unavailable(const char *why) {
    return kit_fail(
        EXIT_FAILED,
        "--device mlx is not available: %s\n"
        "The option needs MLX with mlx-c (macOS: brew install mlx-c; Linux: scripts/get-mlx in the flatkv source tree) and a\n"
        "flatkv built with -DFKV_MLX=ON. Set FLATKV_MLX=FOLDER to use %s from another folder.",
        why, MLXC);
}

/* Loads mlx-c with global symbols, so that libflatkv_mlx, which depends on mlx-c, uses this copy. */
static int load_mlxc(const char *folder) {
    char path[PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/%s", folder, MLXC) >= PATH_BYTES)
        return fail_unavailable("the path in FLATKV_MLX is too long");
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL) != NULL ? EXIT_GOOD : fail_unavailable(dlerror());
}

/* Finds libflatkv_mlx next to the program or in the installed library folder. */
static bool find_mlx_library(char path[PATH_BYTES]) {
    static const char *const folders[] = {".", FLATKV_MLX_FOLDER};
    char program[PATH_BYTES / 2];
    if (!process_program_path(program, sizeof program)) return false;
    char *slash = strrchr(program, '/');
    if (slash != NULL) *slash = 0;
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, PATH_BYTES, "%s/%s/%s", slash != NULL ? program : ".", folders[i], FLATKV_MLX_LIBRARY);
        if (access(path, R_OK) == 0) return true;
    }
    return false;
}

bool mlx_library_probe(char *text, size_t capacity) {
    char path[PATH_BYTES];
    if (!find_mlx_library(path)) {
        (void)snprintf(text, capacity, "%s is neither next to the flatkv program nor in its library folder", FLATKV_MLX_LIBRARY);
        return false;
    }
    const bool good = dlopen(path, RTLD_NOW | RTLD_LOCAL) != NULL; /* never closed */
    (void)snprintf(text, capacity, "%s", good ? path : dlerror());
    return good;
}

int mlx_library_load(void) {
    const char *folder = getenv("FLATKV_MLX");
    char path[PATH_BYTES];
    if (!find_mlx_library(path))
        return fail_unavailable(FLATKV_MLX_LIBRARY " is neither next to the flatkv program nor in its library folder");
    if (folder != NULL && folder[0] != 0) {
        int code = load_mlxc(folder);
        if (code != EXIT_GOOD) return code;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never closed */
    if (library == NULL) return fail_unavailable(dlerror());
    fkv_status (*register_mlx)(void) = NULL;
    void *symbol = dlsym(library, "fkv_mlx_register");
    if (symbol == NULL) return fail_unavailable(dlerror());
    memcpy(&register_mlx, &symbol,
           sizeof register_mlx); /* C defines no conversion from void * to a function pointer, so the pointer is copied */
    fkv_status status = register_mlx();
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}
