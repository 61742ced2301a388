/* flatkv models: the models that have names, what they are and whether they are on this machine. */
#include "cli.h"
#include "model_names.h"
#include "options.h"

static const char usage[] =
    "usage: flatkv models [--json]\n"
    "The names -m knows. flatkv-get-model NAME (scripts/get-model in a source tree) fetches a missing one.\n";

int cli_models(int argc, char **argv) {
    bool as_json = false;
    const cli_option own[] = {{"json", 0, OPTION_FLAG, &as_json, 0, NULL, "one JSON object on standard output"}, {0}};
    const cli_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!cli_options_parse(usage, tables, argc, argv, &code)) return code;
    json_t *list = json_array();
    for (unsigned i = 0; i < n_model_names; i++) {
        const model_name *m = &model_names[i];
        char path[MODEL_PATH];
        char size[32];
        bool present = model_name_path(m, path);
        if (!as_json) {
            printf("%-14s %9s  %-8s %s\n%14s %9s  %-8s %s; context %u; %s\n", m->name, cli_bytes(m->bytes, size),
                   present ? "present" : "missing", m->what, "", "", "", path, m->context, m->licence);
            continue;
        }
        json_t *one = json_object();
        cli_json_text(one, "name", m->name);
        cli_json_text(one, "what", m->what);
        cli_json_text(one, "path", path);
        cli_json_bool(one, "present", present);
        cli_json_integer(one, "bytes", m->bytes);
        cli_json_integer(one, "context", m->context);
        cli_json_text(one, "licence", m->licence);
        (void)json_array_append_new(list, one);
    }
    if (!as_json) {
        json_decref(list);
        printf("\n%s NAME fetches what is missing\n", model_fetcher());
        return EXIT_GOOD;
    }
    json_t *object = json_object();
    cli_json_set(object, "models", list);
    return cli_print_json(object);
}
