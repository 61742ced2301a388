/* flatkv bench attn: runs bench_attn with the head counts of a model.
 *
 * This file reads the head counts and finds the bench_attn executable, which is next to flatkv in a build tree and in libexec in
 * an installation. bench/bench_attn.c times the kernels and compares their output with the scalar reference.
 */
#include "../kit/process.h"
#include "bench_command.h"
#include "model_options.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv bench attn [-m MODEL] [options of bench_attn]\n"
    "Measures attention time. The head counts are those of a model, unless --shape or --device is given.\n\n"
    "  -m, --model MODEL         .gguf file, safetensors folder, or model name (default needle)\n\n";

enum { MAX_ARGUMENTS = 256, MAX_PATH = 4096 };

typedef struct attn_arguments {
    const char *model;
    bool has_shape;
    bool asks_help;
    bool has_device;
    char *rest[MAX_ARGUMENTS]; /* arguments of bench_attn */
    int n;
} attn_arguments;

static bool is_option(const char *text, const char *name) {
    size_t n = strlen(name);
    return strncmp(text, name, n) == 0 && (text[n] == 0 || text[n] == '=');
}

/* Extracts -m MODEL and collects all other arguments for bench_attn. */
static int split_arguments(int argc, char **argv, attn_arguments *f) {
    if (argc > MAX_ARGUMENTS - 4) return kit_fail(EXIT_USAGE, "too many arguments; at most %d are supported", MAX_ARGUMENTS - 4);
    for (int i = 1; i < argc; i++) {
        bool names_model = strcmp(argv[i], "-m") == 0 || strcmp(argv[i], "--model") == 0;
        if (names_model && i + 1 == argc) return kit_fail(EXIT_USAGE, "%s needs a value", argv[i]);
        if (names_model) {
            f->model = argv[++i];
            continue;
        }
        if (is_option(argv[i], "--model")) {
            f->model = strchr(argv[i], '=') + 1;
            continue;
        }
        f->has_device = f->has_device || is_option(argv[i], "--device");
        f->has_shape = f->has_shape || is_option(argv[i], "--shape");
        f->asks_help = f->asks_help || strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
        f->rest[f->n++] = argv[i];
    }
    if (f->model != NULL && (f->has_device || f->has_shape))
        return kit_fail(EXIT_USAGE, "-m sets the shape of the CPU benchmark, so it cannot be combined with --shape or --device");
    return EXIT_GOOD;
}

static bool find_bench_attn(char path[MAX_PATH]) {
    static const char *const places[] = {"bench_attn", FLATKV_LIBEXEC "/bench_attn"};
    char here[MAX_PATH];
    if (!process_program_path(here, sizeof here)) return false;
    *(strrchr(here, '/') + 1) = 0;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        int n = snprintf(path, MAX_PATH, "%s%s", here, places[i]);
        if (n > 0 && n < MAX_PATH && access(path, X_OK) == 0) return true;
    }
    return false;
}

/* Writes the model's head counts as a bench_attn option, such as "--shape=32/8/128". Returns an exit code. */
static int model_shape(const char *name, char shape[64]) {
    model_options usual = model_options_default();
    fkv_model *model = NULL;
    if (name != NULL) usual.model = name;
    int code = model_options_load(&usual, true, &model);
    if (code != EXIT_GOOD) return code;
    const fkv_model_info *about = fkv_model_about(model);
    snprintf(shape, 64, "--shape=%u/%u/%u", about->n_q_heads, about->n_kv_heads, about->head_dim);
    fkv_model_close(model);
    return EXIT_GOOD;
}

int bench_attention(int argc, char **argv) {
    static attn_arguments f;
    static char path[MAX_PATH];
    static char shape[64];
    f.rest[f.n++] = path;
    int code = split_arguments(argc, argv, &f);
    if (code != EXIT_GOOD) return code;
    if (f.asks_help) {
        fputs(usage, stdout);
        (void)fflush(stdout);
    } else if (!f.has_shape && !f.has_device) {
        code = model_shape(f.model, shape);
        f.rest[f.n++] = shape;
    }
    if (code != EXIT_GOOD) return code;
    if (!find_bench_attn(path))
        return kit_fail(EXIT_FAILED, "bench_attn not found next to flatkv or in " FLATKV_LIBEXEC ": build or install it");
    (void)execv(path, f.rest);
    return kit_fail(EXIT_FAILED, "cannot start %s: %s", path, strerror(errno));
}
