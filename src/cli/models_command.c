/* flatkv models: lists models with short names and models on this machine, with the memory that each model needs. */
#include "../hub/hub_cache.h"
#include "../kit/utf8.h"
#include "model_cost.h"
#include "model_files.h"
#include "model_options.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv models [FOLDER...] [--json]\n"
    "Lists the models that -m accepts by name, and the models in the Hugging Face cache or in FOLDER, with the memory that each\n"
    "needs. flatkv pull NAME downloads a model.\n";

/* Prints the path of a model. If the model is in the Hugging Face cache (models--org--name/snapshots/...), prints
 * org/name[:quant] before the path. */
static void print_path(const model_file *file) {
    char label[MODEL_PATH];
    const char *path = file->path;
    const char *hub = strstr(path, "/models--");
    if (hub != NULL) {
        for (const char *p = hub + strlen("/models--"); *p != 0 && *p != '/'; p++) {
            bool split = p[0] == '-' && p[1] == '-';
            (void)putchar(split ? '/' : *p);
            if (split) p++;
        }
        model_file_label(file, label);
        if (label[0] != 0) (void)putchar(':');
        utf8_print_escaped(stdout, label);
        (void)putchar(' ');
    }
    utf8_print_escaped(stdout, path);
}

static void print_cost(const model_cost *cost) {
    char total[32];
    char token[32];
    if (cost->loads) {
        printf("%s, trained context %u tokens; needs %s with -c %u, weights included; %s per token\n", cost->architecture,
               cost->trained, kit_bytes(cost->total_bytes, total), cost->context, kit_bytes(cost->token_bytes, token));
        return;
    }
    printf("does not load: ");
    utf8_print_escaped(stdout, cost->reason);
    (void)putchar('\n');
}

/* Returns the size of a model's file if it exists, otherwise the size of the download. */
static uint64_t bytes_of(const model_name *m, const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && S_ISREG(about.st_mode) ? (uint64_t)about.st_size : m->bytes;
}

static void print_named(void) {
    for (unsigned i = 0; i < n_model_names; i++) {
        const model_name *m = &model_names[i];
        char path[MODEL_PATH];
        char size[32];
        bool present = model_name_path(m, path);
        printf("%-14s %9s  %-8s %s; %s\n", m->name, kit_bytes(bytes_of(m, path), size), present ? "present" : "missing", m->what,
               m->licence);
        if (!present) continue;
        model_cost cost = model_cost_of(path);
        printf("%35s%s\n%35s", "", path, "");
        print_cost(&cost);
    }
    printf("\nflatkv pull NAME downloads a missing model; flatkv pull ORG/NAME downloads any model of huggingface.co\n");
}

static void print_name(const char *repo, void *user) {
    (void)user;
    puts(repo);
}

/* Prints all model names, for shell completion, without opening any model. */
static int print_names(void) {
    for (unsigned i = 0; i < n_model_names; i++) puts(model_names[i].name);
    hub_cache_each(print_name, NULL);
    return EXIT_GOOD;
}

static void print_found(const model_files *found) {
    char size[32];
    for (uint32_t i = 0; i < found->n; i++) {
        model_cost cost = model_cost_of(found->files[i].path);
        printf("\n%9s  ", kit_bytes(found->files[i].bytes, size));
        print_path(&found->files[i]);
        printf("\n%11s", "");
        print_cost(&cost);
    }
    if (found->n > 0) printf("\n-m accepts these paths and the names of models in the Hugging Face cache (org/name[:quant])\n");
}

static void json_cost(kit_json *json, const char *path) {
    model_cost cost = model_cost_of(path);
    kit_json_bool(json, "loads", cost.loads);
    if (!cost.loads) {
        kit_json_bytes(json, "reason", cost.reason, strlen(cost.reason));
        return;
    }
    kit_json_text(json, "architecture", cost.architecture);
    kit_json_integer(json, "trained_context", cost.trained);
    kit_json_integer(json, "plan_context", cost.context);
    kit_json_integer(json, "total_with_weights_bytes", cost.total_bytes);
    kit_json_integer(json, "token_bytes", cost.token_bytes);
}

static int print_models_json(const model_files *found) {
    kit_json *json = kit_json_begin();
    kit_json_array(json, "models");
    for (unsigned i = 0; i < n_model_names; i++) {
        const model_name *m = &model_names[i];
        char path[MODEL_PATH];
        bool present = model_name_path(m, path);
        kit_json_object(json, NULL);
        kit_json_text(json, "name", m->name);
        kit_json_text(json, "what", m->what);
        kit_json_text(json, "path", path);
        kit_json_bool(json, "present", present);
        kit_json_integer(json, "bytes", bytes_of(m, path));
        if (m->hub != NULL) kit_json_text(json, "hub", m->hub);
        kit_json_integer(json, "context", m->context);
        kit_json_text(json, "licence", m->licence);
        if (present) json_cost(json, path);
        kit_json_close(json);
    }
    kit_json_close(json);
    kit_json_array(json, "found");
    for (uint32_t i = 0; i < found->n; i++) {
        kit_json_object(json, NULL);
        kit_json_bytes(json, "path", found->files[i].path, strlen(found->files[i].path));
        kit_json_integer(json, "bytes", found->files[i].bytes);
        json_cost(json, found->files[i].path);
        kit_json_close(json);
    }
    return kit_json_print(json);
}

int cli_models(int argc, char **argv) {
    bool as_json = false;
    bool names = false;
    static kit_texts folders;
    const kit_option own[] = {
        {"folder", 0, OPTION_POSITIONAL, &folders, 0, "FOLDER", "folder to search for models, including its subfolders"},
        {"names", 0, OPTION_FLAG, &names, 0, NULL, "print only the names that -m accepts, one per line"},
        {"json", 0, OPTION_FLAG, &as_json, 0, NULL, "print one JSON object to standard output"},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (names) return print_names();
    model_files found = {0};
    char hub[HUB_PATH];
    if (folders.n == 0 && hub_cache_folder(hub)) model_files_add(&found, hub);
    for (uint32_t i = 0; i < folders.n; i++) {
        uint32_t before = found.n;
        if (access(folders.texts[i], R_OK) != 0) {
            code = kit_fail(EXIT_FAILED, "cannot open %s: %s", folders.texts[i], strerror(errno));
            continue;
        }
        model_files_add(&found, folders.texts[i]);
        if (found.n == before) (void)kit_fail(0, "no .gguf files and no safetensors folders in %s", folders.texts[i]);
    }
    if (as_json) {
        int printed = print_models_json(&found);
        if (code == EXIT_GOOD) code = printed;
    } else {
        if (folders.n == 0) print_named();
        print_found(&found);
    }
    model_files_free(&found);
    return code;
}
