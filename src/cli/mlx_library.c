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

enum { PATH_ROOM = 4096 };

static int missing(const char *why) {
    return kit_fail(EXIT_FAILED,
                    "--device mlx: %s\n"
                    "It needs MLX with mlx-c (macOS: brew install mlx-c; Linux: scripts/get-mlx in flatkv's source tree) and a\n"
                    "flatkv built with -DFKV_MLX=ON. FLATKV_MLX=FOLDER names the folder of another %s.",
                    why, MLXC);
}

/* What libflatkv_mlx asks for by this name is then already there. */
static int load_mlxc(const char *folder) {
    char path[PATH_ROOM];
    if (snprintf(path, sizeof path, "%s/%s", folder, MLXC) >= PATH_ROOM) return missing("the path in FLATKV_MLX is too long");
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL) != NULL ? EXIT_GOOD : missing(dlerror());
}

/* Where the library is: beside the program, else in its install. */
static bool find(char path[PATH_ROOM]) {
    static const char *const folders[] = {".", FLATKV_MLX_FOLDER};
    char program[PATH_ROOM / 2];
    if (!process_program_path(program, sizeof program)) return false;
    char *slash = strrchr(program, '/');
    if (slash != NULL) *slash = 0;
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, PATH_ROOM, "%s/%s/%s", slash != NULL ? program : ".", folders[i], FLATKV_MLX_LIBRARY);
        if (access(path, R_OK) == 0) return true;
    }
    return false;
}

int mlx_library_load(void) {
    const char *folder = getenv("FLATKV_MLX");
    char path[PATH_ROOM];
    if (!find(path)) return missing("there is no " FLATKV_MLX_LIBRARY " with this flatkv");
    if (folder != NULL && folder[0] != 0) {
        int code = load_mlxc(folder);
        if (code != EXIT_GOOD) return code;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* open until the program ends */
    if (library == NULL) return missing(dlerror());
    fkv_status (*enter)(void) = NULL;
    void *symbol = dlsym(library, "fkv_mlx_register");
    if (symbol == NULL) return missing(dlerror());
    memcpy(&enter, &symbol, sizeof enter); /* a function, which C does not make of a void pointer */
    fkv_status status = enter();
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}
