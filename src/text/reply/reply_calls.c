/* Parses tool calls in the syntaxes of the model families. Unexpected input ends a call, and reply_call_fail() then emits the
 * held bytes as text. See reply_parts.h. */
#include "reply_parts.h"

#include <string.h>

static void ignore_byte(fkv_reply *r, char c) {
    (void)r;
    (void)c;
}

/* Accepts white space between tags. Any other byte makes the call invalid. */
static void accept_space(fkv_reply *r, char c) {
    if (!reply_is_space(c)) reply_call_fail(r);
}

/* ---- JSON calls ---- */

/* Syntax: JSON between <tool_call> and </tool_call> */

void reply_found_json_tag(fkv_reply *r) {
    reply_call_open(r, "<tool_call>");
    r->state = &REPLY_JSON_CALLS;
}

/* ---- function and invoke tags ---- */

/* Syntax: <function=NAME> <parameter=KEY> value </parameter> </function>, or <invoke name="NAME"> <parameter name="KEY"> */

static const reply_state FUNCTION_BODY;
static const reply_state FUNCTION_DONE;

static void found_parameter_end(fkv_reply *r) {
    reply_value_end(r);
    r->state = &FUNCTION_BODY;
}

static const reply_state PARAMETER_VALUE = {.byte = reply_value_byte,
                                            .markers = {{.text = "</parameter>", .found = found_parameter_end}}};

/* Removes the closing quote of <invoke name="NAME"> from the name. */
static void end_quoted(const fkv_reply *r, reply_word *word) {
    if (r->syntax == FKV_TOOLS_INVOKE && word->n > 0 && word->bytes[word->n - 1] == '"') word->bytes[--word->n] = 0;
}

static void parameter_key(fkv_reply *r, char c) {
    if (c != '>') {
        reply_word_add(&r->key, c);
        return;
    }
    end_quoted(r, &r->key);
    if (r->key.n == 0 || r->key.too_long) {
        reply_call_fail(r);
    } else {
        reply_value_begin(r);
        r->state = &PARAMETER_VALUE;
    }
}

static const reply_state PARAMETER_KEY = {.byte = parameter_key};

static void found_parameter(fkv_reply *r) {
    r->key = (reply_word){0};
    r->state = &PARAMETER_KEY;
}

static void found_function_end(fkv_reply *r) {
    reply_values_end(r);
    r->state = &FUNCTION_DONE;
}

static const reply_state FUNCTION_BODY = {.byte = accept_space,
                                          .markers = {{.text = "<parameter=", .found = found_parameter},
                                                      {.text = "</function>", .found = found_function_end},
                                                      {.text = "<parameter name=\"", .found = found_parameter},
                                                      {.text = "</invoke>", .found = found_function_end}}};

static void function_name(fkv_reply *r, char c) {
    if (c != '>') {
        reply_word_add(&r->name, c);
        return;
    }
    r->state = &FUNCTION_BODY;
    end_quoted(r, &r->name);
    reply_call_named(r);
}

static const reply_state FUNCTION_NAME = {.byte = function_name};

static void found_name_tag(fkv_reply *r) { r->state = &FUNCTION_NAME; }

static const reply_state FUNCTION_TAG = {.byte = accept_space, .markers = {{.text = "<function=", .found = found_name_tag}}};
static const reply_state INVOKE_TAG = {.byte = accept_space, .markers = {{.text = "<invoke name=\"", .found = found_name_tag}}};

void reply_found_function(fkv_reply *r) {
    reply_call_open(r, "<function=");
    r->state = &FUNCTION_NAME;
}

void reply_found_function_tag(fkv_reply *r) {
    reply_call_open(r, "<tool_call>");
    r->state = &FUNCTION_TAG;
}

void reply_found_invoke_tag(fkv_reply *r) {
    reply_call_open(r, "<minimax:tool_call>");
    r->state = &INVOKE_TAG;
}

static void found_invoke(fkv_reply *r) {
    reply_call_open(r, "<invoke name=\"");
    r->state = &FUNCTION_NAME;
}

static void after_function(fkv_reply *r, char c) {
    if (!reply_is_space(c)) reply_to_text(r, c);
}

static const reply_state FUNCTION_DONE = {.byte = after_function,
                                          .markers = {{.text = "</tool_call>", .found = reply_call_over},
                                                      {.text = "<function=", .found = reply_found_function},
                                                      {.text = "<tool_call>", .found = reply_found_function_tag},
                                                      {.text = "</minimax:tool_call>", .found = reply_call_over},
                                                      {.text = "<invoke name=\"", .found = found_invoke}}};

/* ---- GLM calls ---- */

/* Syntax: <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> </tool_call> */

static const reply_state GLM_BODY;

static void found_arg_value_end(fkv_reply *r) {
    reply_value_end(r);
    r->state = &GLM_BODY;
}

static const reply_state GLM_VALUE = {.byte = reply_value_byte,
                                      .markers = {{.text = "</arg_value>", .found = found_arg_value_end}}};

static void found_arg_value(fkv_reply *r) {
    reply_value_begin(r);
    r->one_value = true; /* a newline after the opening tag belongs to the value */
    r->state = &GLM_VALUE;
}

static const reply_state GLM_KEY_DONE = {.byte = accept_space, .markers = {{.text = "<arg_value>", .found = found_arg_value}}};

static void found_arg_key_end(fkv_reply *r) {
    r->state = &GLM_KEY_DONE;
    if (r->key.n == 0 || r->key.too_long) reply_call_fail(r);
}

static void glm_key(fkv_reply *r, char c) { reply_word_add(&r->key, c); }

static const reply_state GLM_KEY = {.byte = glm_key, .markers = {{.text = "</arg_key>", .found = found_arg_key_end}}};

static void found_arg_key(fkv_reply *r) {
    r->key = (reply_word){0};
    r->state = &GLM_KEY;
    if (r->phase == CALL_HELD) reply_call_named(r);
}

static void found_glm_end(fkv_reply *r) {
    if (r->phase == CALL_HELD) reply_call_named(r);
    if (r->phase != CALL_NAMED) return;
    reply_values_end(r);
    reply_call_over(r);
}

static void glm_name(fkv_reply *r, char c) {
    if (r->name.n > 0 || !reply_is_space(c)) reply_word_add(&r->name, c);
    if (r->name.too_long) reply_call_fail(r);
}

static const reply_state GLM_NAME = {
    .byte = glm_name,
    .markers = {{.text = "<arg_key>", .found = found_arg_key}, {.text = "</tool_call>", .found = found_glm_end}}};
static const reply_state GLM_BODY = {
    .byte = accept_space,
    .markers = {{.text = "<arg_key>", .found = found_arg_key}, {.text = "</tool_call>", .found = found_glm_end}}};

void reply_found_glm_tag(fkv_reply *r) {
    reply_call_open(r, "<tool_call>");
    r->state = &GLM_NAME;
}

/* ---- Kimi calls ---- */

/* Syntax: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> */

static const reply_state KIMI_SECTION;

static void kimi_between(fkv_reply *r, char c) {
    if (reply_is_space(c)) return;
    if (r->phase == CALL_HELD)
        reply_call_fail(r);
    else
        reply_to_text(r, c);
}

static void found_kimi_section_end(fkv_reply *r) {
    if (r->phase == CALL_HELD)
        reply_call_fail(r);
    else
        reply_call_over(r);
}

static void kimi_args(fkv_reply *r, char c) {
    if (r->has_item || (!r->scan.started && reply_is_space(c))) return;
    reply_scan_answer answer = reply_scan_byte(&r->scan, c);
    if (answer != SCAN_BEFORE) reply_args(r, c);
    r->has_item = answer != SCAN_MORE;
}

static void found_kimi_end(fkv_reply *r) {
    bool complete = r->has_item || !r->scan.started || r->scan.scalar;
    if (!r->scan.started) reply_args_text(r, "{}");
    reply_call_end(r, complete);
    r->state = &KIMI_SECTION;
}

static const reply_state KIMI_ARGS = {.byte = kimi_args, .markers = {{.text = "<|tool_call_end|>", .found = found_kimi_end}}};

/* Reduces a name such as "functions.NAME:7" to NAME. */
static void found_kimi_args(fkv_reply *r) {
    static const char before[] = "functions.";
    reply_word *name = &r->name;
    size_t n = name->n;
    while (n > 0 && name->bytes[n - 1] >= '0' && name->bytes[n - 1] <= '9') n--;
    if (n > 0 && n < name->n && name->bytes[n - 1] == ':') name->bytes[name->n = n - 1] = 0;
    if (name->n > strlen(before) && memcmp(name->bytes, before, strlen(before)) == 0) {
        name->n -= strlen(before);
        memmove(name->bytes, name->bytes + strlen(before), name->n + 1);
    }
    r->scan = (reply_scan){0};
    r->has_item = false;
    r->state = &KIMI_ARGS;
    reply_call_named(r);
}

static void kimi_name(fkv_reply *r, char c) {
    if (!reply_is_space(c)) reply_word_add(&r->name, c);
    if (r->name.too_long) reply_call_fail(r);
}

static const reply_state KIMI_NAME = {.byte = kimi_name,
                                      .markers = {{.text = "<|tool_call_argument_begin|>", .found = found_kimi_args},
                                                  {.text = "<|tool_call_end|>", .found = reply_call_fail}}};

void reply_found_kimi_call(fkv_reply *r) {
    if (r->phase != CALL_HELD) reply_call_open(r, "<|tool_call_begin|>");
    r->state = &KIMI_NAME;
}

static const reply_state KIMI_SECTION = {.byte = kimi_between,
                                         .markers = {{.text = "<|tool_call_begin|>", .found = reply_found_kimi_call},
                                                     {.text = "<|tool_calls_section_end|>", .found = found_kimi_section_end}}};

void reply_found_kimi_section(fkv_reply *r) {
    reply_call_open(r, "<|tool_calls_section_begin|>");
    r->state = &KIMI_SECTION;
}

/* ---- Gemma calls ---- */

/* Syntax: <|tool_call>call:NAME{key:<|"|>text<|"|>,key:1}<tool_call|> */

static const reply_state GEMMA_ARGS;
static const reply_state GEMMA_STRING;

static bool gemma_in_object(const fkv_reply *r) { return (r->objects >> (r->depth - 1) & 1) != 0; }

/* Writes a key or an unquoted value. JSON literals are copied unchanged; all other words become JSON strings. */
static void gemma_word_end(fkv_reply *r, bool is_key) {
    reply_word *word = &r->key;
    while (word->n > 0 && reply_is_space(word->bytes[word->n - 1])) word->n--;
    if (word->n == 0) return;
    json_t *value = is_key ? NULL : json_loadb(word->bytes, word->n, JSON_DECODE_ANY, NULL);
    bool quoted = value == NULL && word->bytes[0] != '"';
    json_decref(value);
    if (quoted) reply_args(r, '"');
    for (size_t i = 0; i < word->n; i++)
        if (quoted)
            reply_args_quoted(r, word->bytes[i]);
        else
            reply_args(r, word->bytes[i]);
    if (quoted) reply_args(r, '"');
    *word = (reply_word){0};
}

static void gemma_open(fkv_reply *r, char c) {
    if (r->depth == REPLY_DEPTH) {
        reply_call_fail(r);
        return;
    }
    uint64_t bit = (uint64_t)1 << r->depth++;
    r->objects = c == '{' ? r->objects | bit : r->objects & ~bit;
    r->in_key = c == '{';
    reply_args(r, c);
}

static void gemma_close(fkv_reply *r) {
    reply_args(r, gemma_in_object(r) ? '}' : ']');
    r->in_key = false;
    if (--r->depth > 0) return;
    reply_call_end(r, true);
    r->state = &GEMMA_ARGS; /* after the call, this state accepts only white space and the closing tag */
}

static void gemma_args(fkv_reply *r, char c) {
    if (r->phase == CALL_NONE) { /* after the arguments */
        if (!reply_is_space(c)) reply_to_text(r, c);
        return;
    }
    bool in_quotes = r->key.n > 0 && r->key.bytes[0] == '"' && (r->key.n == 1 || r->key.bytes[r->key.n - 1] != '"');
    bool structure = !in_quotes && strchr("{}[],:", c) != NULL && c != 0;
    if (!structure || (c == ':' && !r->in_key)) {
        if (r->key.n > 0 || !reply_is_space(c)) reply_word_add(&r->key, c);
        if (r->key.too_long) reply_call_fail(r);
        return;
    }
    gemma_word_end(r, c == ':');
    if (c == '{' || c == '[') {
        gemma_open(r, c);
    } else if (c == '}' || c == ']') {
        gemma_close(r);
    } else {
        reply_args(r, c);
        r->in_key = c == ',' && gemma_in_object(r);
    }
}

static void found_gemma_quote(fkv_reply *r) {
    if (r->phase != CALL_NAMED) return;
    gemma_word_end(r, false);
    reply_args(r, '"');
    r->state = &GEMMA_STRING;
}

static void found_gemma_unquote(fkv_reply *r) {
    reply_args(r, '"');
    r->state = &GEMMA_ARGS;
}

static void found_gemma_end(fkv_reply *r) {
    if (r->phase != CALL_NONE) reply_call_fail(r);
    reply_call_over(r);
}

static const reply_state GEMMA_ARGS = {.byte = gemma_args,
                                       .markers = {{.text = "<|\"|>", .found = found_gemma_quote},
                                                   {.text = "<tool_call|>", .found = found_gemma_end},
                                                   {.text = "<|tool_call>", .found = reply_found_gemma_tag}}};
static const reply_state GEMMA_STRING = {.byte = reply_args_quoted,
                                         .markers = {{.text = "<|\"|>", .found = found_gemma_unquote}}};

static void gemma_name(fkv_reply *r, char c) {
    static const char before[] = "call:";
    if (c != '{') {
        reply_word_add(&r->name, c);
        return;
    }
    size_t n = strlen(before);
    if (r->name.n <= n || memcmp(r->name.bytes, before, n) != 0) {
        reply_call_fail(r);
        return;
    }
    memmove(r->name.bytes, r->name.bytes + n, r->name.n - n + 1);
    r->name.n -= n;
    r->depth = 0;
    r->objects = 0;
    r->state = &GEMMA_ARGS;
    reply_call_named(r);
    if (r->phase == CALL_NAMED) gemma_open(r, c);
}

static const reply_state GEMMA_NAME = {.byte = gemma_name, .markers = {{.text = "<tool_call|>", .found = reply_call_fail}}};

void reply_found_gemma_tag(fkv_reply *r) {
    if (r->phase != CALL_NONE) reply_call_fail(r);
    reply_call_open(r, "<|tool_call>");
    r->state = &GEMMA_NAME;
}

/* ---- Mistral calls ---- */

/* Syntax: [TOOL_CALLS] followed by JSON or by NAME[CALL_ID]id[ARGS]{...} */

static void found_mistral_args(fkv_reply *r) {
    r->scan = (reply_scan){0};
    r->state = &REPLY_JSON_ARGS;
    reply_call_named(r);
}

static const reply_state MISTRAL_ID = {.byte = ignore_byte, .markers = {{.text = "[ARGS]", .found = found_mistral_args}}};

static void found_mistral_id(fkv_reply *r) { r->state = &MISTRAL_ID; }

static void mistral_name(fkv_reply *r, char c) {
    if (r->name.n == 0 && (c == '[' || c == '{')) {
        r->state = &REPLY_JSON_CALLS;
        r->state->byte(r, c);
    } else if (c == '{') {
        found_mistral_args(r);
        if (r->phase == CALL_NAMED) r->state->byte(r, c);
    } else if (r->name.n > 0 || !reply_is_space(c)) {
        reply_word_add(&r->name, c);
        if (r->name.too_long) reply_call_fail(r);
    }
}

static const reply_state MISTRAL_NAME = {
    .byte = mistral_name,
    .markers = {{.text = "[ARGS]", .found = found_mistral_args}, {.text = "[CALL_ID]", .found = found_mistral_id}}};

void reply_found_mistral(fkv_reply *r) {
    reply_call_open(r, "[TOOL_CALLS]");
    r->state = &MISTRAL_NAME;
}

/* ---- Llama calls ---- */

/* Syntax: <|python_tag|> followed by JSON or by Python code */

static const reply_state PYTHON_CODE = {.byte = reply_args_quoted};

static void python_first(fkv_reply *r, char c) {
    if (reply_is_space(c)) return;
    if (c == '{' || c == '[') {
        r->state = &REPLY_JSON_CALLS;
        r->state->byte(r, c);
        return;
    }
    for (const char *name = "python"; *name != 0; name++) reply_word_add(&r->name, *name);
    r->state = &PYTHON_CODE;
    reply_call_named(r);
    reply_args_text(r, "{\"code\": \"");
    reply_args_quoted(r, c);
}

static const reply_state PYTHON_FIRST = {.byte = python_first};

void reply_found_python(fkv_reply *r) {
    reply_call_open(r, "<|python_tag|>");
    r->state = &PYTHON_FIRST;
}

bool reply_python_end(fkv_reply *r) {
    if (r->state != &PYTHON_CODE || r->phase != CALL_NAMED) return false;
    reply_args_text(r, "\"}");
    reply_call_end(r, true);
    return true;
}
