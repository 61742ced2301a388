/* Renders a chat template and prints the text. If the template is rejected, prints a message on standard error and exits with
 * status 1. Called as render_of TEMPLATE VARIABLES.json [NOW]. Run manually through scripts/check-templates, which compares the
 * output with jinja2.
 */
#include "../src/text/chat/template.h"

#include <stdio.h>
#include <stdlib.h>

static char *read_file(const char *path, size_t *n_bytes) {
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(1 << 24);
    if (file == NULL || bytes == NULL) exit(2);
    *n_bytes = fread(bytes, 1, 1 << 24, file);
    (void)fclose(file);
    return bytes;
}

int main(int n_args, char **args) {
    static const fkv_template_word words[] = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
    if (n_args < 3) return 2;
    size_t n_bytes = 0;
    char *text = read_file(args[1], &n_bytes);
    json_t *variables = json_load_file(args[2], 0, NULL);
    int64_t now = n_args > 3 ? strtoll(args[3], NULL, 10) : 0;
    fkv_template *chat = NULL;
    fkv_rendered out = {0};
    fkv_template_input input = {.variables = variables, .words = words, .n_words = 2, .now = &now};
    bool good = fkv_template_open(text, n_bytes, &chat) == FKV_OK && fkv_template_render(chat, &input, &out) == FKV_OK;
    if (good)
        (void)fwrite(out.text, 1, out.n_bytes, stdout);
    else
        (void)fprintf(stderr, "%s\n", fkv_message());
    fkv_rendered_close(&out);
    fkv_template_close(chat);
    json_decref(variables);
    free(text);
    return good ? 0 : 1;
}
