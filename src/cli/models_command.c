/* flatkv models: lists named models and local models, with the memory that each needs. */
#include "../kit/utf8.h"
#include "model_files.h"
#include "model_options.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv models [FOLDER...] [--json]\n"
    "Lists the models that -m accepts by name, and the models in the Hugging Face cache or in FOLDER, with the memory that each\n"
    "needs. flatkv-get-model NAME (scripts/get-model in the source tree) downloads a named model.\n";

enum { DEFAULT_CONTEXT = 32768 };

/* Memory that a model needs with the default options. */
typedef struct model_cost {
    bool loads;
    char architecture[32];
    uint32_t trained;     /* trained context, in tokens */
    uint32_t context;     /* context size of the estimate: the trained context, but at most DEFAULT_CONTEXT */
    uint64_t total_bytes; /* weights and plan */
    uint64_t token_bytes;
    char reason[512]; /* error message if the model cannot be loaded */
} model_cost;

static model_cost cost_of(const char *path) {
    model_cost cost = {0};
    fkv_model *model = NULL;
    fkv_runner_plan plan;
    fkv_model_config config = fkv_model_config_default();
    model_options defaults = model_options_default();
    config.plan_only = true;
    fkv_status status = fkv_model_load(path, &config, &model);
    if (status == FKV_OK) {
        const fkv_model_info *about = fkv_model_about(model);
        (void)snprintf(cost.architecture, sizeof cost.architecture, "%s", about->architecture);
        cost.trained = about->context;
        cost.context = about->context < DEFAULT_CONTEXT ? about->context : DEFAULT_CONTEXT;
        fkv_runner_config runner = model_options_runner(&defaults, cost.context);
        status = fkv_runner_plan_make(model, &runner, &plan);
    }
    cost.loads = status == FKV_OK;
    if (cost.loads) {
        cost.total_bytes = plan.total_bytes + plan.packed_bytes + plan.mapped_bytes;
        cost.token_bytes = plan.cache.token_bytes;
    } else {
        (void)snprintf(cost.reason, sizeof cost.reason, "%s", fkv_message());
    }
    fkv_model_close(model);
    return cost;
}

/* Prints a path. If the path is in the Hugging Face cache (models--org--name/snapshots/...), prints org/name before it. */
static void print_path(const char *path) {
    const char *hub = strstr(path, "/models--");
    if (hub != NULL) {
        for (const char *p = hub + strlen("/models--"); *p != 0 && *p != '/'; p++) {
            bool split = p[0] == '-' && p[1] == '-';
            (void)putchar(split ? '/' : *p);
            if (split) p++;
        }
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

static void print_named(void) {
    for (unsigned i = 0; i < n_model_names; i++) {
        const model_name *m = &model_names[i];
        char path[MODEL_PATH];
        char size[32];
        bool present = model_name_path(m, path);
        printf("%-14s %9s  %-8s %s; %s\n", m->name, kit_bytes(m->bytes, size), present ? "present" : "missing", m->what,
               m->licence);
        if (!present) continue;
        model_cost cost = cost_of(path);
        printf("%35s%s\n%35s", "", path, "");
        print_cost(&cost);
    }
    printf("\n%s NAME downloads a missing model\n", model_fetcher());
}

/* Prints the names for shell completion without opening any file. */
static int print_names(void) {
    for (unsigned i = 0; i < n_model_names; i++) puts(model_names[i].name);
    return EXIT_GOOD;
}

static void print_found(const model_files *found) {
    char size[32];
    for (uint32_t i = 0; i < found->n; i++) {
        model_cost cost = cost_of(found->files[i].path);
        printf("\n%9s  ", kit_bytes(found->files[i].bytes, size));
        print_path(found->files[i].path);
        printf("\n%11s", "");
        print_cost(&cost);
    }
    if (found->n > 0) printf("\n-m accepts these paths and the names of models in the Hugging Face cache (org/name)\n");
}

static void json_cost(kit_json *json, const char *path) {
    model_cost cost = cost_of(path);
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
        kit_json_integer(json, "bytes", m->bytes);
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
    char hub[MODEL_PATH];
    if (folders.n == 0 && model_files_hub(hub)) model_files_add(&found, hub);
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
