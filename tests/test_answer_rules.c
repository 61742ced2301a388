/* Tests the response formats in requests and the grammar rules derived from them, without the grammar library. */
#include "../src/serve/answer_rules.h"
#include "test.h"

#include <stdlib.h>
#include <string.h>

/* Vocabulary with <tool_call> as a special token and </tool_call> as plain text. */
static uint32_t special(const void *user, const char *text) {
    (void)user;
    return strcmp(text, "<tool_call>") == 0 ? 77 : (uint32_t)FKV_NO_TOKEN;
}

static bool is_one(const void *user, const char *text) { return user != NULL && strcmp(text, "[ARGS]") == 0; }

static answer_marks marks_of(fkv_tool_syntax tools) {
    return (answer_marks){.syntax = {FKV_REASONING_NONE, tools},
                          .thinking = {.open = FKV_NO_TOKEN, .close = FKV_NO_TOKEN},
                          .chat = true,
                          .token_of = special,
                          .is_token = is_one};
}

#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"
#define ONE_SPACING "\"x-guidance\":{\"whitespace_flexible\":false,\"item_separator\":\", \",\"key_separator\":\": \"}"
#define TOOLS                                                                                                                    \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get\",\"parameters\":{\"type\":\"object\",\"properties\":"       \
    "{\"n\":{\"type\":\"integer\"}}}}},{\"type\":\"function\",\"function\":{\"name\":\"now\"}}]"

/* Returns the grammar rules of a request. If the request is rejected, returns NULL and stores the message in `said`. */
static char said[GRAMMAR_ERROR_BYTES];

static char *rules_of(api_kind kind, const char *body, const answer_marks *marks) {
    static api_request r;
    const char *param = NULL;
    fkv_sampler_config defaults = fkv_sampler_config_default();
    char *text = NULL;
    said[0] = 0;
    if (!api_request_parse(kind, body, strlen(body), &defaults, &r))
        (void)snprintf(said, sizeof said, "%s", r.error);
    else if (!answer_rules_wanted(&r, &param))
        (void)snprintf(said, sizeof said, "none");
    else
        text = answer_rules_text(&r, marks, said);
    api_request_free(&r);
    return text;
}

static void check(api_kind kind, const char *body, const answer_marks *marks, const char *expected) {
    char *text = rules_of(kind, body, marks);
    ck_assert_msg(text != NULL, "%s: %s", body, said);
    ck_assert_str_eq(text, expected);
    free(text);
}

static void check_rejected(api_kind kind, const char *body, const answer_marks *marks, const char *words) {
    char *text = rules_of(kind, body, marks);
    ck_assert_msg(text == NULL, "%s: %s", body, text);
    ck_assert_msg(strstr(said, words) != NULL, "%s: %s", body, said);
}

START_TEST(schema_becomes_rules) {
    answer_marks m = marks_of(FKV_TOOLS_NONE);
    check(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"json_object\"}}", &m,
          "start: (value)\nvalue: %json {\"type\":\"object\"," ONE_SPACING "}\n");
    const char *expected = "start: (value)\nvalue: %json {\"enum\":[1]," ONE_SPACING "}\n";
    check(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"enum\":[1]}}}}",
          &m, expected);
    check(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"json_schema\",\"schema\":{\"enum\":[1]}}}", &m, expected);
    check(API_MESSAGES, "{" MESSAGES ",\"output_config\":{\"format\":{\"type\":\"json_schema\",\"schema\":{\"enum\":[1]}}}}", &m,
          expected);
    check(API_MESSAGES, "{" MESSAGES ",\"output_format\":{\"type\":\"json_schema\",\"schema\":{\"enum\":[1]}}}", &m, expected);
    m.thinking = (grammar_thinking){.open = 1, .close = 2};
    check(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"json_schema\",\"schema\":{\"enum\":[1]}}}", &m,
          "start: SPACE? (value)\nSPACE: /[ \\n]{1,2}/\nvalue: %json {\"enum\":[1]," ONE_SPACING "}\n");
}
END_TEST

START_TEST(forced_call_uses_the_models_call_syntax) {
    answer_marks m = marks_of(FKV_TOOLS_JSON);
    const char *rest =
        "call_0: <[77]> \"\\n{\\\"name\\\": \\\"\" \"get\" \"\\\", \\\"arguments\\\": \" arguments_0 \"}\\n\" "
        "\"</tool_call>\"\narguments_0: %json {\"type\":\"object\",\"properties\":{\"n\":{\"type\":\"integer\"}}," ONE_SPACING
        "}\n";
    const char *named =
        "call_0: <[77]> \"\\n{\\\"name\\\": \\\"\" \"now\" \"\\\", \\\"arguments\\\": \" arguments_0 \"}\\n\" "
        "\"</tool_call>\"\narguments_0: %json {\"type\":\"object\",\"properties\":{},\"additionalProperties\":false," ONE_SPACING
        "}\ncall: call_0\ncalls: call\n";
    char expected[2000];
    (void)snprintf(expected, sizeof expected, "start: (calls)\n%s", named);
    check(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"now\"}}}", &m,
          expected);
    char *many = rules_of(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"required\"}", &m);
    ck_assert(many != NULL && strstr(many, rest) != NULL &&
              strstr(many, "call: call_0 | call_1\ncalls: call ( \"\\n\" call){0,7}\n"));
    free(many);
    char *one = rules_of(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"required\",\"parallel_tool_calls\":false}", &m);
    ck_assert(one != NULL && strstr(one, "calls: call\n") != NULL);
    free(one);
    char *either = rules_of(API_CHAT, "{" MESSAGES "," TOOLS ",\"response_format\":{\"type\":\"json_object\"}}", &m);
    ck_assert(either != NULL && strncmp(either, "start: (value | calls)\n", 23) == 0);
    free(either);
    static const char anthropic[] =
        "{" MESSAGES ",\"tools\":[{\"name\":\"now\",\"input_schema\":{}}],\"tool_choice\":{\"type\":\"any\","
        "\"disable_parallel_tool_use\":true}}";
    char *any = rules_of(API_MESSAGES, anthropic, &m);
    ck_assert(any != NULL && strstr(any, "%json {\"type\":\"object\"," ONE_SPACING "}") != NULL &&
              strstr(any, "calls: call\n") != NULL);
    free(any);
    m = marks_of(FKV_TOOLS_MISTRAL);
    m.user = "";
    char *mistral = rules_of(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"required\"}", &m);
    ck_assert(mistral != NULL && strstr(mistral, "call_1: \"[TOOL_CALLS]\" \"now\" \"[ARGS]\" arguments_1\n") != NULL);
    free(mistral);
}
END_TEST

START_TEST(unsupported_requests_are_rejected) {
    answer_marks json = marks_of(FKV_TOOLS_JSON);
    answer_marks none = marks_of(FKV_TOOLS_NONE);
    answer_marks harmony = marks_of(FKV_TOOLS_HARMONY);
    harmony.syntax.reasoning = FKV_REASONING_HARMONY;
    static const struct {
        const char *fields;
        const char *words;
    } wrong[] = {
        {"\"tool_choice\":\"required\"", "contains no tools"},
        {"\"tools\":[],\"tool_choice\":\"required\"", "list of tools is empty"},
        {TOOLS ",\"tool_choice\":\"sometimes\"", "tool_choice"},
        {TOOLS ",\"tool_choice\":3", "tool_choice"},
        {TOOLS ",\"tool_choice\":{}", "tool_choice"},
        {TOOLS ",\"tool_choice\":{\"type\":\"function\"}", "function name"},
        {TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"put\"}}", "unknown tool put"},
        {TOOLS ",\"tool_choice\":\"required\",\"ignore_eos\":true", "ignore_eos"},
        {TOOLS ",\"parallel_tool_calls\":1", "parallel_tool_calls"},
        {"\"tools\":[{\"function\":{\"name\":\"a\\\" | \\\"b\"}}],\"tool_choice\":\"required\"", "name of the tool at index 0"},
        {"\"tools\":[{\"function\":{\"name\":\"a\",\"parameters\":3}}],\"tool_choice\":\"required\"", "parameters"},
        {"\"response_format\":{\"type\":\"xml\"}", "response_format"},
        {"\"response_format\":3", "response_format"},
        {"\"response_format\":{\"type\":\"json_schema\"}", "schema"},
        {"\"response_format\":{\"type\":\"json_schema\",\"schema\":true}", "schema"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char body[1000];
        (void)snprintf(body, sizeof body, "{" MESSAGES ",%s}", wrong[i].fields);
        check_rejected(API_CHAT, body, &json, wrong[i].words);
    }
    check_rejected(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"required\"}", &none, "tool calls cannot be enforced");
    check_rejected(API_CHAT, "{" MESSAGES ",\"response_format\":{\"type\":\"json_object\"}}", &harmony, "harmony");
    check_rejected(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"none\"}", &json, "none");
    check_rejected(API_CHAT, "{" MESSAGES "," TOOLS ",\"tool_choice\":\"auto\",\"response_format\":{\"type\":\"text\"}}", &json,
                   "none");
    char *body = malloc(20000);
    size_t n =
        (size_t)snprintf(body, 20000, "{" MESSAGES ",\"response_format\":{\"type\":\"json_schema\",\"schema\":{\"properties\":{");
    for (int i = 0; i < 300; i++) n += (size_t)snprintf(body + n, 20000 - n, "%s\"p%d\":{}", i > 0 ? "," : "", i);
    (void)snprintf(body + n, 20000 - n, "}}}}");
    check_rejected(API_CHAT, body, &json, "300 members");
    free(body);
}
END_TEST

TEST_MAIN("answer_rules", schema_becomes_rules, forced_call_uses_the_models_call_syntax, unsupported_requests_are_rejected)
