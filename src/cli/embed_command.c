/* flatkv embed: prints the embedding of a text. */
#include "cli.h"
#include "model_names.h"
#include "model_options.h"
#include "text.h"
#include "token_list.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] = "usage: flatkv embed -m MODEL [-p TEXT | -f FILE] [options]     (default: standard input)\n"
                            "Prints the embedding of a text: the final hidden state of its last token, scaled to length 1.\n";

typedef struct embed_options {
    model_options model;
    const char *prompt;
    const char *file;
    uint32_t dimensions;
} embed_options;

static int read_tokens(const embed_options *o, const fkv_model *model, token_list *list) {
    text_buffer content = {0};
    int code = EXIT_GOOD;
    if (o->prompt != NULL)
        text_add(&content, o->prompt, strlen(o->prompt));
    else
        code = text_read(&content, o->file != NULL ? o->file : "-");
    if (code == EXIT_GOOD) code = token_list_add_text(list, model, content.bytes, content.n, FKV_TOKENIZE_BOS | FKV_TOKENIZE_EOS);
    text_free(&content);
    if (code == EXIT_GOOD && list->n == 0) code = kit_fail(EXIT_FAILED, "the text is empty: nothing to embed");
    if (code == EXIT_GOOD && list->n > INT32_MAX)
        code = kit_fail(EXIT_FAILED, "the text has %zu tokens; at most 2^31 - 1 are supported", list->n);
    return code;
}

static int print_embedding(const embed_options *o, const fkv_model *model, const token_list *list, const float *values,
                           uint32_t n) {
    if (!o->model.json) {
        for (uint32_t i = 0; i < n; i++) printf("%.9g\n", (double)values[i]);
        return EXIT_GOOD;
    }
    kit_json *json = kit_json_begin();
    model_options_json(&o->model, fkv_model_about(model), json);
    kit_json_integer(json, "n_tokens", list->n);
    kit_json_integer(json, "dimensions", n);
    kit_json_array(json, "embedding");
    for (uint32_t i = 0; i < n; i++) kit_json_real(json, NULL, (double)values[i]);
    return kit_json_print(json);
}

static int embed(const embed_options *o, const fkv_model *model) {
    const uint32_t dim = fkv_model_about(model)->dim;
    const uint32_t n = o->dimensions != 0 ? o->dimensions : dim;
    if (n > dim) return kit_fail(EXIT_USAGE, "--dimensions must be at most %u, the hidden size of the model (got %u)", dim, n);
    token_list list = {0};
    fkv_runner *runner = NULL;
    float *values = calloc(n, sizeof *values);
    if (values == NULL) return kit_fail(EXIT_NO_FIT, "out of memory allocating the embedding");
    int code = read_tokens(o, model, &list);
    if (code == EXIT_GOOD) {
        fkv_runner_config config = model_options_runner(&o->model, (uint32_t)list.n);
        config.embeddings = true;
        if (config.max_step_tokens > config.max_tokens) config.max_step_tokens = config.max_tokens;
        fkv_status status = fkv_runner_open(model, &config, &runner);
        if (status == FKV_OK) status = fkv_embed(runner, list.tokens, (uint32_t)list.n, n, values);
        if (status != FKV_OK) code = cli_fail_status(status);
    }
    if (code == EXIT_GOOD) code = print_embedding(o, model, &list, values, n);
    fkv_runner_close(runner);
    token_list_free(&list);
    free(values);
    return code;
}

int cli_embed(int argc, char **argv) {
    embed_options o = {.model = model_options_default()};
    kit_option common[N_MODEL_OPTIONS];
    o.model.model = NULL;
    fkv_runner_config precise = fkv_runner_config_default();
    (void)fkv_codec_parse("16/16", &precise.k, &precise.v);
    o.model.codecs.codecs[0] = codec_of_runner(&precise);
    model_options_list(&o.model, common);
    static const char *const unused[] = {"context", "max-kv", "sinks", "seed"};
    for (size_t i = 0; i < sizeof unused / sizeof unused[0]; i++) model_options_drop(common, unused[i]);
    const kit_option own[] = {{"prompt", 'p', OPTION_TEXT, &o.prompt, 0, "TEXT", "text to embed"},
                              {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "file to embed; \"-\" reads standard input"},
                              {"dimensions", 0, OPTION_COUNT, &o.dimensions, INT32_MAX, "N",
                               "keep only the first N values before scaling (default: the hidden size of the model)"},
                              {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (o.prompt != NULL && o.file != NULL) return kit_fail(EXIT_USAGE, "-p and -f cannot be combined");
    if (o.model.model == NULL) return model_fail_unnamed();
    fkv_model *model = NULL;
    code = model_options_load(&o.model, false, &model);
    if (code == EXIT_GOOD) code = embed(&o, model);
    fkv_model_close(model);
    return code;
}
