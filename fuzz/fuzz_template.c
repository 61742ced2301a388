/* Fuzzes chat templates: rendering a conversation with any bytes as the template must produce either text or an error within the
 * work and memory limits. */
#include "../src/text/chat/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char variables_text[] =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"  hi <b> \\u00e9\"}, {\"role\": \"assistant\", \"content\": null, \"tool_calls\": "
    "[{\"function\": {\"name\": \"f\", \"arguments\": {\"a\": [1, 2.5, true]}}}]}], \"tools\": [{\"function\": {\"name\": \"f\"}}], "
    "\"n\": 7, \"x\": -2.5, \"yes\": true, \"names\": [\"b\", \"A\"], \"table\": {\"z\": 1}, \"text\": \" a,b \"}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static json_t *variables = NULL;
    static const fkv_template_word words[] = {{"bos_token", "<s>"}};
    int64_t now = 1763200000;
    fkv_template *chat = NULL;
    fkv_rendered out = {0};
    if (variables == NULL) variables = json_loads(variables_text, 0, NULL);
    if (fkv_template_open((const char *)data, size, &chat) != FKV_OK) return 0;
    fkv_template_input input = {.variables = variables, .words = words, .n_words = 1, .now = &now};
    if (fkv_template_render(chat, &input, &out) == FKV_OK) {
        for (size_t i = 0; i < out.n_bytes; i++) FKV_ASSERT(out.given[i] <= 1);
        fkv_rendered_close(&out);
    }
    fkv_template_close(chat);
    return 0;
}
