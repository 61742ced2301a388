/* Parses and renders chat templates within limits on work, depth and memory. See template.h. */
#include "template.h"

#include "jinja_eval.h"

#include <stdlib.h>

enum {
    MAX_TEMPLATE_BYTES = 1 << 20,
    MAX_PARSE_BYTES = 64 << 20,
    MAX_PARSE_DEPTH = 200,
    MAX_RENDER_BYTES = 256 << 20,
    MAX_RENDER_DEPTH = 600, /* rendering at this nesting depth needs about 300 KiB of stack */
    MAX_RENDER_BYTES_PER_INPUT_BYTE = 32,
    MAX_RENDER_WORK = 1000000000, /* limit in work units, which corresponds to about 1 s of rendering */
    MAX_RENDER_WORK_PER_INPUT_BYTE = 256
};

struct fkv_template {
    jinja_context c; /* context whose arena holds the syntax tree */
    const jinja_node *nodes;
};

fkv_status fkv_template_open(const char *text, size_t n_bytes, fkv_template **out) {
    FKV_REQUIRE(n_bytes <= MAX_TEMPLATE_BYTES, FKV_UNSUPPORTED, "the chat template is %zu bytes long; at most %d are supported",
                n_bytes, MAX_TEMPLATE_BYTES);
    fkv_template *chat = calloc(1, sizeof *chat);
    FKV_REQUIRE(chat != NULL, FKV_NO_MEMORY, "out of memory allocating a chat template");
    chat->c = (jinja_context){.max_bytes = MAX_PARSE_BYTES, .max_depth = MAX_PARSE_DEPTH, .max_work = UINT64_MAX};
    chat->nodes = fkv_jinja_parse(&chat->c, text, n_bytes);
    if (chat->c.failed) {
        fkv_status status = fkv_fail(FKV_UNSUPPORTED, "the chat template is not supported: %s", chat->c.message);
        fkv_template_close(chat);
        return status;
    }
    *out = chat;
    return FKV_OK;
}

void fkv_template_close(fkv_template *chat) {
    if (chat == NULL) return;
    fkv_jinja_context_close(&chat->c);
    free(chat);
}

/* ---- input ---- */

/* Returns the size of the input: the number of bytes in all strings, plus a constant for each value. The rendering limits depend
 * on this size. */
static size_t json_size(const json_t *json) {
    enum { VALUE_BYTES = 16 };
    size_t size = VALUE_BYTES;
    const char *key;
    json_t *item;
    json_object_foreach((json_t *)json, key, item) size +=
        strlen(key) + json_size(item); /* the cast is safe, because the iteration does not modify the object */
    for (size_t i = 0; i < json_array_size(json); i++) size += json_size(json_array_get(json, i));
    return size + json_string_length(json);
}

static jinja_string given_string(jinja_context *c, const char *text, size_t n_bytes) {
    char *copy = fkv_jinja_take(c, n_bytes + 1, 1);
    uint8_t *given = fkv_jinja_take(c, n_bytes + 1, 1);
    if (copy == NULL || given == NULL) return JINJA_TEXT("");
    memcpy(copy, text, n_bytes);
    memset(given, 1, n_bytes);
    return (jinja_string){copy, given, n_bytes, false};
}

static jinja_value from_json(jinja_context *c, const json_t *json);

static jinja_value from_json_object(jinja_context *c, const json_t *json) {
    jinja_value dict = fkv_jinja_dict(c, false);
    json_t *object = (json_t *)json; /* the cast is safe, because the iteration does not modify the object */
    const char *key;
    json_t *item;
    size_t n = json_object_size(json);
    if (c->failed) return dict;
    dict.as.dict->pairs = fkv_jinja_take(c, n, sizeof *dict.as.dict->pairs);
    dict.as.dict->capacity = n;
    json_object_foreach(object, key, item) { /* keys are unique, so no lookup is needed */
        if (c->failed) break;
        jinja_pair *pair = &dict.as.dict->pairs[dict.as.dict->n_pairs++];
        pair->key = fkv_jinja_of_string(given_string(c, key, strlen(key)));
        pair->value = from_json(c, item);
    }
    return dict;
}

static jinja_value from_json_array(jinja_context *c, const json_t *json) {
    jinja_value list = fkv_jinja_list(c, false);
    for (size_t i = 0; i < json_array_size(json) && !c->failed; i++)
        fkv_jinja_append(c, list, from_json(c, json_array_get(json, i)));
    return list;
}

/* Converts a JSON value to a template value. jansson's parser limits the recursion depth. */
static jinja_value from_json(jinja_context *c, const json_t *json) {
    switch (json_typeof(json)) {
    case JSON_OBJECT: return from_json_object(c, json);
    case JSON_ARRAY: return from_json_array(c, json);
    case JSON_STRING: return fkv_jinja_of_string(given_string(c, json_string_value(json), json_string_length(json)));
    case JSON_INTEGER: return fkv_jinja_int(json_integer_value(json));
    case JSON_REAL: return fkv_jinja_float(json_real_value(json));
    case JSON_TRUE: return fkv_jinja_bool(true);
    case JSON_FALSE: return fkv_jinja_bool(false);
    default: return fkv_jinja_none();
    }
}

static void bind_input(jinja_context *c, jinja_scope *scope, const fkv_template_input *input) {
    json_t *variables = (json_t *)input->variables;
    const char *key;
    json_t *item;
    for (size_t i = 0; i < input->n_words; i++)
        fkv_jinja_bind(c, scope, fkv_jinja_text(input->words[i].name), fkv_jinja_of_string(fkv_jinja_text(input->words[i].text)));
    json_object_foreach(variables, key, item) {
        if (c->failed) return;
        fkv_jinja_bind(c, scope, given_string(c, key, strlen(key)), from_json(c, item));
    }
}

/* ---- rendering ---- */

static fkv_status copy_out(const jinja_writer *w, fkv_rendered *out) {
    jinja_string s = fkv_jinja_written(w);
    char *text = malloc(s.n_bytes + 1);
    uint8_t *given = calloc(s.n_bytes + 1, 1);
    if (text == NULL || given == NULL) {
        free(text);
        free(given);
        return fkv_fail(FKV_NO_MEMORY, "out of memory allocating %zu bytes for a rendered conversation", 2 * s.n_bytes);
    }
    memcpy(text, s.text, s.n_bytes);
    text[s.n_bytes] = 0;
    if (s.given != NULL) memcpy(given, s.given, s.n_bytes);
    *out = (fkv_rendered){text, given, s.n_bytes};
    return FKV_OK;
}

fkv_status fkv_template_render(const fkv_template *chat, const fkv_template_input *input, fkv_rendered *out) {
    FKV_REQUIRE(json_is_object(input->variables), FKV_BAD_ARGUMENT, "the variables of a chat template must be a JSON object");
    const size_t n_input = json_size(input->variables);
    jinja_context c = {.max_bytes = MAX_RENDER_BYTES + n_input * MAX_RENDER_BYTES_PER_INPUT_BYTE,
                       .max_depth = MAX_RENDER_DEPTH,
                       .max_work =
                           input->max_work != 0 ? input->max_work : MAX_RENDER_WORK + n_input * MAX_RENDER_WORK_PER_INPUT_BYTE,
                       .has_now = input->now != NULL,
                       .now = input->now != NULL ? *input->now : 0};
    jinja_scope scope = {0};
    jinja_writer w = {.c = &c};
    bind_input(&c, &scope, input);
    fkv_jinja_run(&c, chat->nodes, &scope, &w);
    fkv_status status = FKV_OK;
    if (c.failed)
        status = fkv_fail(FKV_BAD_ARGUMENT, "chat template, line %u: %s", c.line, c.message);
    else
        status = copy_out(&w, out);
    fkv_jinja_context_close(&c);
    return status;
}

void fkv_rendered_close(fkv_rendered *rendered) {
    free(rendered->text);
    free(rendered->given);
    *rendered = (fkv_rendered){0};
}
