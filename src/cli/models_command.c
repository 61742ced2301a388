/* flatkv models: the models that have names, what they are and whether they are on this machine. */
#include "cli.h"
#include "model_names.h"

static const char usage[] =
    "usage: flatkv models [--json]\n"
    "Lists the models that -m knows by name. flatkv-get-model NAME (scripts/get-model in a source tree) fetches a missing one.\n";

static int print_table(void) {
    for (unsigned i = 0; i < n_model_names; i++) {
        const model_name *m = &model_names[i];
        char path[MODEL_PATH];
        char size[32];
        bool present = model_name_path(m, path);
        printf("%-14s %9s  %-8s %s\n%14s %9s  %-8s %s; context %u; %s\n", m->name, kit_bytes(m->bytes, size),
               present ? "present" : "missing", m->what, "", "", "", path, m->context, m->licence);
    }
    printf("\n%s NAME fetches what is missing\n", model_fetcher());
    return EXIT_GOOD;
}

static int print_json(void) {
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
        kit_json_close(json);
    }
    return kit_json_print(json);
}

int cli_models(int argc, char **argv) {
    bool as_json = false;
    const kit_option own[] = {{"json", 0, OPTION_FLAG, &as_json, 0, NULL, "one JSON object on standard output"}, {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    return as_json ? print_json() : print_table();
}
