/* flatkv tokenize: prints the tokens of a text. */
#include "model_options.h"
#include "text.h"
#include "token_list.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] = "usage: flatkv tokenize [-m MODEL] [-p TEXT | -f FILE] [options]     (default: standard input)\n"
                            "Prints one line for each token: its ID and its text.\n";

typedef struct tokenize_options {
    const char *model;
    const char *prompt;
    const char *file;
    bool bos;
    bool special;
    bool count;
    bool json;
} tokenize_options;

static void print_tokens(const tokenize_options *o, const fkv_model *model, const token_list *list) {
    if (o->count) {
        printf("%zu\n", list->n);
        return;
    }
    for (size_t i = 0; i < list->n; i++) {
        size_t n = 0;
        const char *bytes = fkv_token_text(model, list->tokens[i], true, &n);
        printf("%8u  \"", list->tokens[i]);
        for (size_t b = 0; b < n; b++) {
            unsigned char c = (unsigned char)bytes[b];
            if (c == '"' || c == '\\') putchar('\\');
            if (c >= 0x20 && c < 0x7f)
                putchar(c);
            else
                printf("\\x%02x", c);
        }
        puts("\"");
    }
}

static int print_tokens_json(const tokenize_options *o, const fkv_model *model, const token_list *list) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "model", o->model);
    kit_json_text(json, "tokenizer", fkv_model_about(model)->tokenizer);
    kit_json_integer(json, "n_tokens", list->n);
    if (!o->count) kit_json_array(json, "tokens");
    for (size_t i = 0; !o->count && i < list->n; i++) kit_json_integer(json, NULL, list->tokens[i]);
    return kit_json_print(json);
}

int cli_tokenize(int argc, char **argv) {
    tokenize_options o = {.model = "needle"};
    const kit_option own[] = {
        {"model", 'm', OPTION_TEXT, &o.model, 0, "MODEL", ".gguf file, safetensors folder, or model name (default needle)"},
        {"prompt", 'p', OPTION_TEXT, &o.prompt, 0, "TEXT", "text to tokenize"},
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "file to tokenize; \"-\" reads standard input"},
        {"bos", 0, OPTION_FLAG, &o.bos, 0, NULL, "start with the bos token if the model uses one"},
        {"special", 0, OPTION_FLAG, &o.special, 0, NULL,
         "parse special tokens such as <|im_end|> instead of treating them as text"},
        {"count", 0, OPTION_FLAG, &o.count, 0, NULL, "print only the number of tokens"},
        {"json", 0, OPTION_FLAG, &o.json, 0, NULL, "print one JSON object to standard output"},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (o.prompt != NULL && o.file != NULL) return kit_fail(EXIT_USAGE, "-p and -f cannot be combined");
    model_options defaults = model_options_default();
    defaults.model = o.model;
    fkv_model *model = NULL;
    text_buffer content = {0};
    token_list list = {0};
    code = model_options_load(&defaults, true, &model);
    if (code == EXIT_GOOD && o.prompt != NULL) text_add(&content, o.prompt, strlen(o.prompt));
    if (code == EXIT_GOOD && o.prompt == NULL) code = text_read(&content, o.file != NULL ? o.file : "-");
    unsigned flags = (o.bos ? (unsigned)FKV_TOKENIZE_BOS : 0) | (o.special ? (unsigned)FKV_TOKENIZE_SPECIAL : 0);
    if (code == EXIT_GOOD) code = token_list_add_text(&list, model, content.bytes, content.n, flags);
    if (code == EXIT_GOOD && o.json) code = print_tokens_json(&o, model, &list);
    if (code == EXIT_GOOD && !o.json) print_tokens(&o, model, &list);
    token_list_free(&list);
    text_free(&content);
    fkv_model_close(model);
    return code;
}
