/* See answer_rules.h. */
#include "answer_rules.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOOLS = 128, MAX_NAME = 128, MAX_CALLS = 8, MAX_PIECES = 10, MAX_MEMBERS = 256 };

/* ---- tool-call syntax ---- */

/* Placeholders for the tool name and the arguments in call_form.pieces. */
static const char NAME[] = "name";
static const char ARGUMENTS[] = "arguments";

typedef struct call_form {
    fkv_tool_syntax syntax;
    const char *needs;   /* special token that the vocabulary must contain; NULL if none is required */
    const char *between; /* separator between calls; NULL if the syntax allows only one call */
    const char *pieces[MAX_PIECES];
} call_form;

/* Tool-call syntaxes in which the arguments are JSON. */
static const call_form FORMS[] = {
    {FKV_TOOLS_JSON,
     NULL,
     "\n",
     {"<tool_call>", "\n{\"name\": \"", NAME, "\", \"arguments\": ", ARGUMENTS, "}\n", "</tool_call>"}},
    {FKV_TOOLS_LLAMA, NULL, NULL, {"{\"name\": \"", NAME, "\", \"parameters\": ", ARGUMENTS, "}"}},
    {FKV_TOOLS_MISTRAL, "[ARGS]", NULL, {"[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS}},
    {FKV_TOOLS_MISTRAL, NULL, NULL, {"[TOOL_CALLS]", "[{\"name\": \"", NAME, "\", \"arguments\": ", ARGUMENTS, "}]"}},
    {FKV_TOOLS_KIMI,
     NULL,
     NULL,
     {"<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.", NAME, ":0", "<|tool_call_argument_begin|>", ARGUMENTS,
      "<|tool_call_end|>", "<|tool_calls_section_end|>"}},
};

static const call_form *call_form_of(const answer_marks *m) {
    for (size_t i = 0; m->chat && i < sizeof FORMS / sizeof FORMS[0]; i++) {
        const call_form *f = &FORMS[i];
        if (f->syntax == m->syntax.tools && (f->needs == NULL || m->is_token(m->user, f->needs))) return f;
    }
    return NULL;
}

/* ---- rule text ---- */

static bool rule_error(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool rule_error(char *error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(error, GRAMMAR_ERROR_BYTES, format, args);
    va_end(args);
    return false;
}

/* Writes the text as a grammar literal, which uses JSON string syntax. */
static void put_literal(FILE *out, const char *text) {
    json_t *string = json_string(text);
    char *quoted = json_dumps(string, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
    (void)fprintf(out, " %s", quoted != NULL ? quoted : "\"\"");
    free(quoted);
    json_decref(string);
}

/* Writes a special token as its token number, and any other text as a literal. */
static void put_mark(FILE *out, const answer_marks *m, const char *text) {
    uint32_t token = m->token_of(m->user, text);
    if (token != FKV_NO_TOKEN)
        (void)fprintf(out, " <[%u]>", token);
    else
        put_literal(out, text);
}

/* Returns the number of members of the largest object in a JSON value. The grammar rules for optional properties grow
 * quadratically with this number. The recursion depth is bounded by the nesting limit for request bodies. */
static size_t max_members(const json_t *value) {
    size_t most = json_object_size(value);
    size_t i;
    const char *key;
    const json_t *inside;
    json_object_foreach((json_t *)value, key, inside) {
        size_t n = max_members(inside);
        if (n > most) most = n;
    }
    json_array_foreach(value, i, inside) {
        size_t n = max_members(inside);
        if (n > most) most = n;
    }
    return most;
}

/* Writes a grammar rule that accepts only single-line JSON with fixed spacing. If arbitrary whitespace were allowed, some models
 * would generate spaces forever. */
static bool put_schema(FILE *out, const json_t *schema, bool of_arguments, char *error) {
    size_t members = max_members(schema);
    if (members > MAX_MEMBERS)
        return rule_error(error, "a schema object has %zu members: at most %d are allowed", members, MAX_MEMBERS);
    json_t *copy = json_copy((json_t *)schema);
    json_t *spacing = json_pack("{s:b, s:s, s:s}", "whitespace_flexible", 0, "item_separator", ", ", "key_separator", ": ");
    if (of_arguments && json_object_get(copy, "type") == NULL) (void)json_object_set_new(copy, "type", json_string("object"));
    bool good = copy != NULL && json_object_set_new(copy, "x-guidance", spacing) == 0;
    char *text = good ? json_dumps(copy, JSON_COMPACT) : NULL;
    if (text != NULL) (void)fprintf(out, " %%json %s\n", text);
    good = text != NULL || rule_error(error, "out of memory building the grammar");
    free(text);
    json_decref(copy);
    return good;
}

/* ---- calls ---- */

static bool is_valid_tool_name(const char *name) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/";
    return name != NULL && name[0] != 0 && strlen(name) <= MAX_NAME && name[strspn(name, letters)] == 0;
}

static bool put_call_rule(FILE *out, const answer_marks *m, const call_form *form, const json_t *function, size_t number,
                          char *error) {
    const char *name = json_string_value(json_object_get(function, "name"));
    const json_t *parameters = json_object_get(function, "parameters");
    if (!is_valid_tool_name(name))
        return rule_error(error, "invalid name of the tool at index %zu: expected 1 to %d characters (letters, digits and _-.:/)",
                          number, MAX_NAME);
    if (parameters != NULL && !json_is_object(parameters) && !json_is_null(parameters))
        return rule_error(error, "parameters of tool %s: expected a JSON schema", name);
    (void)fprintf(out, "call_%zu:", number);
    for (int i = 0; i < MAX_PIECES && form->pieces[i] != NULL; i++) {
        if (form->pieces[i] == NAME)
            put_literal(out, name);
        else if (form->pieces[i] == ARGUMENTS)
            (void)fprintf(out, " arguments_%zu", number);
        else
            put_mark(out, m, form->pieces[i]);
    }
    (void)fprintf(out, "\narguments_%zu:", number);
    json_t *none = json_pack("{s:s, s:{}, s:b}", "type", "object", "properties", "additionalProperties", 0);
    bool good = put_schema(out, json_is_object(parameters) ? parameters : none, true, error);
    json_decref(none);
    return good;
}

/* Writes the grammar rules `call`, which matches one tool call, and `calls`, which matches all tool calls of an answer. */
static bool put_calls(FILE *out, const api_request *api, const answer_marks *m, char *error) {
    const json_t *tools = json_object_get(api->conversation, "tools");
    const call_form *form = call_form_of(m);
    size_t i;
    const json_t *tool;
    size_t n = 0;
    if (json_array_size(tools) > MAX_TOOLS)
        return rule_error(error, "%zu tools: at most %d are allowed", json_array_size(tools), MAX_TOOLS);
    if (form == NULL) return rule_error(error, "tool calls cannot be enforced for this model");
    json_array_foreach(tools, i, tool) {
        const json_t *function = json_object_get(tool, "function");
        const char *name = json_string_value(json_object_get(function, "name"));
        if (api->forced_name != NULL && (name == NULL || strcmp(name, api->forced_name) != 0)) continue;
        if (!put_call_rule(out, m, form, function, n, error)) return false;
        n++;
    }
    if (n == 0 && api->forced_name != NULL)
        return rule_error(error, "unknown tool %.60s: expected a name from tools", api->forced_name);
    if (n == 0) return rule_error(error, "a tool call is required, but the list of tools is empty");
    (void)fprintf(out, "call:");
    for (i = 0; i < n; i++) (void)fprintf(out, "%s call_%zu", i > 0 ? " |" : "", i);
    (void)fprintf(out, "\ncalls: call");
    if (form->between != NULL && api->forced_name == NULL && !api->one_call) {
        (void)fprintf(out, " (");
        put_literal(out, form->between);
        (void)fprintf(out, " call){0,%d}", MAX_CALLS - 1);
    }
    (void)fprintf(out, "\n");
    return true;
}

/* ---- complete grammar ---- */

bool answer_rules_wanted(const api_request *api, const char **param) {
    *param = api->forced_call ? "tool_choice" : "response_format";
    return api->forced_call || api->schema != NULL;
}

/* Returns true if the answer may be a tool call. */
static bool allows_calls(const api_request *api, const answer_marks *m) {
    return api->forced_call || (json_object_get(api->conversation, "tools") != NULL && call_form_of(m) != NULL);
}

static bool can_be_constrained(const api_request *api, const answer_marks *m, char *error) {
    if (m->syntax.reasoning == FKV_REASONING_HARMONY || m->syntax.tools == FKV_TOOLS_HARMONY)
        return rule_error(error, "constrained output is not supported for models that answer in harmony format (gpt-oss)");
    if (api->ignore_end) return rule_error(error, "ignore_eos cannot be combined with constrained output");
    return true;
}

static bool put_rules(FILE *out, const api_request *api, const answer_marks *m, char *error) {
    bool calls = allows_calls(api, m);
    bool value = api->schema != NULL && !api->forced_call;
    if (!can_be_constrained(api, m, error)) return false;
    (void)fprintf(out, "start:%s (%s%s%s)\n", m->thinking.open != FKV_NO_TOKEN ? " SPACE?" : "", value ? "value" : "",
                  value && calls ? " | " : "", calls ? "calls" : "");
    if (m->thinking.open != FKV_NO_TOKEN) (void)fprintf(out, "SPACE: /[ \\n]{1,2}/\n");
    if (value) {
        (void)fprintf(out, "value:");
        if (!put_schema(out, api->schema, false, error)) return false;
    }
    return !calls || put_calls(out, api, m, error);
}

char *answer_rules_text(const api_request *api, const answer_marks *marks, char *error) {
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    if (out == NULL) return rule_error(error, "out of memory building the grammar"), NULL;
    bool good = put_rules(out, api, marks, error);
    good = fclose(out) == 0 && good;
    if (good) return text;
    free(text);
    return NULL;
}

/* ---- model markup ---- */

/* Returns the token number if the text is a single token, otherwise FKV_NO_TOKEN. */
static uint32_t one_token(const fkv_model *model, const char *text) {
    uint32_t tokens[2];
    size_t n = 0;
    fkv_status status = fkv_tokenize(model, text, strlen(text), FKV_TOKENIZE_SPECIAL, tokens, 2, &n);
    return status == FKV_OK && n == 1 ? tokens[0] : (uint32_t)FKV_NO_TOKEN;
}

static bool is_token(const void *user, const char *text) { return one_token(user, text) != FKV_NO_TOKEN; }

static uint32_t special_token(const void *user, const char *text) {
    uint32_t token = one_token(user, text);
    size_t n = 0;
    if (token != FKV_NO_TOKEN) (void)fkv_token_text(user, token, false, &n);
    return n == 0 ? token : (uint32_t)FKV_NO_TOKEN;
}

static bool is_space(const fkv_model *model, uint32_t token) {
    size_t n = 0;
    const char *text = fkv_token_text(model, token, true, &n);
    for (size_t i = 0; i < n; i++)
        if (text[i] != ' ' && text[i] != '\n') return false;
    return true;
}

/* Returns the tokens that enclose reasoning, if the prompt allows the model to reason before the answer. */
static grammar_thinking thinking_of(const fkv_model *model, fkv_reasoning_syntax syntax, const uint32_t *prompt, size_t n) {
    static const struct {
        fkv_reasoning_syntax syntax;
        const char *open;
        const char *close;
    } marks[] = {{FKV_REASONING_THINK, "<think>", "</think>"},
                 {FKV_REASONING_BRACKETS, "[THINK]", "[/THINK]"},
                 {FKV_REASONING_CHANNEL, "<|channel>", "<channel|>"}};
    grammar_thinking none = {.open = FKV_NO_TOKEN, .close = FKV_NO_TOKEN};
    while (n > 0 && is_space(model, prompt[n - 1])) n--;
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++) {
        if (marks[i].syntax != syntax) continue;
        grammar_thinking t = {.open = one_token(model, marks[i].open), .close = one_token(model, marks[i].close)};
        if (t.open == FKV_NO_TOKEN || t.close == FKV_NO_TOKEN) return none;
        t.opened = n > 0 && prompt[n - 1] == t.open;
        return n > 0 && prompt[n - 1] == t.close ? none : t; /* the chat template has already closed the reasoning block */
    }
    return none;
}

grammar *answer_rules_open(const grammar_maker *maker, const fkv_model *model, const api_request *api, const uint32_t *prompt,
                           size_t n_prompt, char *error) {
    const uint32_t n_answers = api->n * api->n_prompts;
    bool chat = api->conversation != NULL && fkv_model_about(model)->has_chat;
    answer_marks marks = {.chat = chat,
                          .thinking = {.open = FKV_NO_TOKEN, .close = FKV_NO_TOKEN},
                          .token_of = special_token,
                          .is_token = is_token,
                          .user = model};
    if (chat) {
        marks.syntax = fkv_reply_syntax_of(model);
        marks.thinking = thinking_of(model, marks.syntax.reasoning, prompt, n_prompt);
    }
    if (!grammar_supports_rules()) {
        if (!can_be_constrained(api, &marks, error)) return NULL;
        if (!api->any_object || allows_calls(api, &marks)) {
            (void)rule_error(
                error, "this build supports only json_object without tools; for JSON schemas and forced tool calls, install "
                       "Rust, run scripts/get-llguidance and build flatkv again");
            return NULL;
        }
        return grammar_open(maker, NULL, marks.thinking, n_answers, error);
    }
    char *text = answer_rules_text(api, &marks, error);
    grammar *g = text != NULL ? grammar_open(maker, text, marks.thinking, n_answers, error) : NULL;
    free(text);
    return g;
}
