/* Fuzzes request bodies: any input must produce either a complete request or an error with a reason, without leaks. The first
 * byte selects the API and the tool-call syntax of the model. If the client requests a response format, the grammar generated for
 * it must consist only of known kinds of lines, whatever bytes the client sent. */
#include "../src/serve/answer_rules.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint32_t no_token(const void *user, const char *text) {
    (void)user, (void)text;
    return FKV_NO_TOKEN;
}

static bool no_such_token(const void *user, const char *text) { return no_token(user, text) != FKV_NO_TOKEN; }

static void check_rules(const api_request *r, uint8_t choice) {
    static const char *const starts[] = {"start:", "value:", "call_", "arguments_", "call:", "calls:"};
    const char *param = NULL;
    char error[GRAMMAR_ERROR_BYTES] = "";
    answer_marks marks = {.syntax = {FKV_REASONING_NONE, (fkv_tool_syntax)(choice % (FKV_TOOLS_INVOKE + 1))},
                          .thinking = {.open = FKV_NO_TOKEN, .close = FKV_NO_TOKEN},
                          .chat = true,
                          .token_of = no_token,
                          .is_token = no_such_token};
    if (!answer_rules_wanted(r, &param)) return;
    char *rules = answer_rules_text(r, &marks, error);
    if (rules == NULL && error[0] == 0) abort();
    for (const char *line = rules; line != NULL && *line != 0; line = strchr(line, '\n') + 1) {
        bool known = false;
        for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++)
            known = known || strncmp(line, starts[i], strlen(starts[i])) == 0;
        if (!known) abort();
    }
    free(rules);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    api_request r;
    fkv_sampler_config defaults = {.top_p = 1.0f};
    if (size == 0) return 0;
    bool good = api_request_parse((api_kind)(data[0] % N_API_KINDS), (const char *)data + 1, size - 1, &defaults, &r);
    if (!good && r.error[0] == 0) abort();
    if (good && (r.n == 0 || r.n > FKV_MAX_ANSWERS || r.n_stops > FKV_MAX_STOPS || r.n_top > FKV_MAX_LOGPROBS)) abort();
    if (good && (r.n_prompts == 0 || r.n_prompts * r.n > API_MAX_CHOICES)) abort();
    if (good && !r.only_loads && (r.prompts[0] == NULL) == (r.conversation == NULL)) abort();
    if (good && r.conversation != NULL) {
        const json_t *messages = json_object_get(r.conversation, "messages");
        size_t i;
        const json_t *message;
        json_array_foreach(messages, i, message) if (!json_is_string(json_object_get(message, "role")) ||
                                                     !json_is_string(json_object_get(message, "content"))) abort();
    }
    if (good) check_rules(&r, data[0] / N_API_KINDS);
    api_request_free(&r);
    return 0;
}
