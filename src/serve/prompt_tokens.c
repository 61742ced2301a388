/* See prompt_tokens.h. */
#include "prompt_tokens.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Returns the current Unix time plus the local UTC offset. Templates format this time as UTC and therefore show the local date.
 */
static int64_t local_clock(void) {
    time_t now = time(NULL);
    struct tm local;
    return localtime_r(&now, &local) != NULL ? (int64_t)timegm(&local) : (int64_t)now;
}

/* Tokenizes text. If `given` is not NULL, given[i] is 1 if byte i comes from the client (see fkv_chat_render()). */
static fkv_status tokenize_marked(const fkv_model *model, const char *text, const uint8_t *given, size_t n, unsigned flags,
                                  prompt_tokens *out) {
    size_t capacity = n / 2 + 64; /* sufficient for most texts, so that a second attempt is rarely needed */
    fkv_status status = FKV_OK;
    for (int attempt = 0; attempt < 2; attempt++) {
        free(out->tokens);
        out->tokens = malloc((capacity + 1) * sizeof *out->tokens);
        if (out->tokens == NULL) return FKV_NO_MEMORY;
        status = given != NULL ? fkv_tokenize_given(model, text, given, n, out->tokens, capacity, &out->n)
                               : fkv_tokenize(model, text, n, flags, out->tokens, capacity, &out->n);
        if (status != FKV_OK || out->n <= capacity) break;
        capacity = out->n;
    }
    if (status != FKV_OK) out->n = 0;
    return status;
}

fkv_status prompt_tokens_of_text(const fkv_model *model, const char *text, size_t n, unsigned flags, prompt_tokens *out) {
    return tokenize_marked(model, text, NULL, n, flags, out);
}

static char *plain_text(const json_t *conversation, size_t *n) {
    size_t i;
    const json_t *message;
    const json_t *messages = json_object_get(conversation, "messages");
    *n = 0;
    json_array_foreach(messages, i, message) *n += json_string_length(json_object_get(message, "content")) + 2;
    char *text = malloc(*n + 1);
    if (text == NULL) return NULL;
    char *end = text;
    json_array_foreach(messages, i, message) {
        const json_t *content = json_object_get(message, "content");
        if (i > 0) *end++ = '\n';
        if (json_string_length(content) > 0) memcpy(end, json_string_value(content), json_string_length(content));
        end += json_string_length(content);
    }
    *n = (size_t)(end - text);
    return text;
}

/* Renders a conversation with the model's chat template. If `given` is not NULL, *given receives an array that marks the bytes
 * that come from the client. The caller frees *text and *given, even after a failure. */
static fkv_status render_conversation(const fkv_model *model, const json_t *conversation, char **text, uint8_t **given,
                                      size_t *n) {
    char *json = json_dumps(conversation, JSON_COMPACT);
    if (json == NULL) return FKV_NO_MEMORY;
    const int64_t now = local_clock();
    const size_t n_json = strlen(json);
    size_t capacity = n_json + 1024; /* sufficient for most conversations, so that a second attempt is rarely needed */
    fkv_status status = FKV_OK;
    for (int attempt = 0; attempt < 2; attempt++) {
        free(*text);
        *text = malloc(capacity + 1);
        if (given != NULL) {
            free(*given);
            *given = malloc(capacity + 1);
        }
        status = *text != NULL && (given == NULL || *given != NULL)
                     ? fkv_chat_render(model, json, n_json, &now, *text, given != NULL ? *given : NULL, capacity, n)
                     : FKV_NO_MEMORY;
        if (status != FKV_OK || *n <= capacity) break;
        capacity = *n;
    }
    free(json);
    return status;
}

/* Renders a conversation and appends the start of the answer. The caller frees *text and *given, even after a failure. */
static fkv_status render_prompt(const fkv_model *model, const api_request *r, char **text, uint8_t **given, size_t *n) {
    const bool chat = fkv_model_about(model)->has_chat;
    fkv_status status = FKV_OK;
    if (chat)
        status = render_conversation(model, r->conversation, text, given, n);
    else
        *text = plain_text(r->conversation, n);
    if (status != FKV_OK || *text == NULL) return status != FKV_OK ? status : FKV_NO_MEMORY;
    if (r->final_text == NULL) return FKV_OK;
    const size_t n_more = json_string_length(r->final_text);
    const size_t n_breaks = !chat && *n > 0 ? 1 : 0;
    char *longer = realloc(*text, *n + n_breaks + n_more + 1);
    if (longer == NULL) return FKV_NO_MEMORY;
    *text = longer;
    if (n_breaks > 0) longer[*n] = '\n';
    if (n_more > 0) memcpy(longer + *n + n_breaks, json_string_value(r->final_text), n_more);
    if (given != NULL && *given != NULL) {
        uint8_t *marks = realloc(*given, *n + n_more + 1);
        if (marks == NULL) return FKV_NO_MEMORY;
        *given = marks;
        memset(marks + *n, 1, n_more);
    }
    *n += n_breaks + n_more;
    return FKV_OK;
}

char *prompt_text_of(const fkv_model *model, const api_request *r, size_t *n) {
    char *text = NULL;
    if (render_prompt(model, r, &text, NULL, n) == FKV_OK) return text;
    free(text);
    return NULL;
}

static fkv_status conversation_tokens(const fkv_model *model, const api_request *r, size_t max_bytes, prompt_tokens *out) {
    size_t n = 0;
    char *text = NULL;
    uint8_t *given = NULL;
    fkv_status status = render_prompt(model, r, &text, &given, &n);
    out->n_bytes = n;
    if (status == FKV_OK && n > max_bytes) status = FKV_POOL_FULL;
    if (status == FKV_OK) status = tokenize_marked(model, text, given, n, FKV_TOKENIZE_BOS, out);
    free(text);
    free(given);
    return status;
}

/* ---- snapshots ---- */

static size_t common_prefix(const prompt_tokens *a, const prompt_tokens *b) {
    size_t n = 0;
    while (n < a->n && n < b->n && a->tokens[n] == b->tokens[n]) n++;
    return n;
}

/* Appends the length, in tokens, of the prompt prefix that contains the first n_messages messages. Does nothing if the template
 * cannot render these messages alone. */
static void add_mark(const fkv_model *model, const api_request *r, size_t n_messages, prompt_tokens *out) {
    api_request shorter = {.conversation = json_copy(r->conversation)};
    json_t *messages = json_array();
    prompt_tokens prefix = {0};
    const json_t *all = json_object_get(r->conversation, "messages");
    for (size_t i = 0; i < n_messages; i++) (void)json_array_append(messages, json_array_get(all, i));
    if (shorter.conversation != NULL && messages != NULL && json_object_set(shorter.conversation, "messages", messages) == 0 &&
        conversation_tokens(model, &shorter, SIZE_MAX, &prefix) == FKV_OK)
        out->marks[out->n_marks++] = (uint32_t)common_prefix(&prefix, out);
    json_decref(messages);
    json_decref(shorter.conversation);
    prompt_tokens_free(&prefix);
}

/* Finds the positions up to which later prompts are likely to repeat this prompt: the end of the system prompt and the start of
 * the last user message. Only models with recurrent layers need these positions. */
static void find_marks(const fkv_model *model, const api_request *r, prompt_tokens *out) {
    const json_t *messages = json_object_get(r->conversation, "messages");
    size_t last_user = 0;
    size_t i;
    const json_t *message;
    if (fkv_model_about(model)->state_bytes == 0 || out->n > UINT32_MAX) return;
    json_array_foreach(messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        if (role != NULL && strcmp(role, "user") == 0) last_user = i;
    }
    const char *first = json_string_value(json_object_get(json_array_get(messages, 0), "role"));
    if (first != NULL && strcmp(first, "user") != 0 && last_user > 1) add_mark(model, r, 1, out);
    if (last_user > 0) add_mark(model, r, last_user, out);
}

/* ---- fill-in-the-middle ---- */

/* Special tokens of fill-in-the-middle prompts. They mark the text before the gap, the text after the gap, and the start of the
 * answer. */
typedef struct fim_marks {
    uint32_t prefix;
    uint32_t suffix;
    uint32_t middle;
    uint32_t file; /* token that precedes the name of another file; FKV_NO_TOKEN if there is none */
} fim_marks;

/* Returns the number of the special token with this text, or FKV_NO_TOKEN. */
static uint32_t special_token_of(const fkv_model *model, const char *text) {
    uint32_t tokens[2];
    size_t n = 0;
    size_t n_plain = 0;
    const fkv_status status = fkv_tokenize(model, text, strlen(text), FKV_TOKENIZE_SPECIAL, tokens, 2, &n);
    if (status != FKV_OK || n != 1) return FKV_NO_TOKEN;
    (void)fkv_token_text(model, tokens[0], false, &n_plain);
    return n_plain == 0 ? tokens[0] : (uint32_t)FKV_NO_TOKEN;
}

static bool find_fim_marks(const fkv_model *model, fim_marks *out) {
    static const char *const texts[][4] = {
        {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"}, /* Qwen Coder, CodeGemma */
        {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"},         /* StarCoder, Granite */
        {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ""}};            /* DeepSeek Coder */
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        *out = (fim_marks){special_token_of(model, texts[i][0]), special_token_of(model, texts[i][1]),
                           special_token_of(model, texts[i][2]), special_token_of(model, texts[i][3])};
        if (out->prefix != FKV_NO_TOKEN && out->suffix != FKV_NO_TOKEN && out->middle != FKV_NO_TOKEN) return true;
    }
    return false;
}

/* Appends a special token, unless it is FKV_NO_TOKEN, and then the tokens of a text, unless the text is NULL. */
static fkv_status append_marked(const fkv_model *model, uint32_t mark, const json_t *text, unsigned flags, prompt_tokens *out) {
    prompt_tokens more = {0};
    fkv_status status = FKV_OK;
    if (json_string_length(text) > 0 || flags == FKV_TOKENIZE_BOS)
        status =
            tokenize_marked(model, text != NULL ? json_string_value(text) : "", NULL, json_string_length(text), flags, &more);
    uint32_t *all = status == FKV_OK ? realloc(out->tokens, (out->n + more.n + 2) * sizeof *all) : NULL;
    if (all != NULL) {
        out->tokens = all;
        if (mark != FKV_NO_TOKEN) out->tokens[out->n++] = mark;
        if (more.n > 0) memcpy(out->tokens + out->n, more.tokens, more.n * sizeof *all);
        out->n += more.n;
    } else if (status == FKV_OK) {
        status = FKV_NO_MEMORY;
    }
    prompt_tokens_free(&more);
    return status;
}

/* Builds a fill-in-the-middle prompt: the other files, each preceded by its name, then the text before the gap, the text after
 * the gap and the start of the answer. Client text never becomes a special token. */
static fkv_status fim_tokens(const fkv_model *model, const api_request *r, const json_t *prefix, size_t max_bytes,
                             prompt_tokens *out) {
    fim_marks marks;
    size_t i;
    const json_t *file;
    out->n_bytes = json_string_length(prefix) + json_string_length(r->suffix) + json_string_length(r->middle);
    json_array_foreach(r->extra, i, file) out->n_bytes +=
        json_string_length(json_object_get(file, "text")) + json_string_length(json_object_get(file, "filename"));
    if (out->n_bytes > max_bytes) return FKV_POOL_FULL;
    if (!json_is_string(prefix) || !find_fim_marks(model, &marks)) return FKV_UNSUPPORTED;
    fkv_status status = append_marked(model, FKV_NO_TOKEN, NULL, FKV_TOKENIZE_BOS, out);
    json_array_foreach(r->extra, i, file) {
        json_t *text = json_sprintf(
            "%s\n%s\n",
            json_is_string(json_object_get(file, "filename")) ? json_string_value(json_object_get(file, "filename")) : "file",
            json_string_value(json_object_get(file, "text")));
        if (status == FKV_OK) status = append_marked(model, marks.file, text, FKV_TOKENIZE_PLAIN, out);
        json_decref(text);
    }
    if (status == FKV_OK) status = append_marked(model, marks.prefix, prefix, FKV_TOKENIZE_PLAIN, out);
    if (status == FKV_OK) status = append_marked(model, marks.suffix, r->suffix, FKV_TOKENIZE_PLAIN, out);
    if (status == FKV_OK) status = append_marked(model, marks.middle, r->middle, FKV_TOKENIZE_PLAIN, out);
    return status;
}

/* ---- prompts of requests ---- */

fkv_status prompt_tokens_of(const fkv_model *model, const api_request *r, uint32_t index, size_t max_bytes, prompt_tokens *out) {
    const json_t *prompt = r->prompts[index];
    *out = (prompt_tokens){0};
    if (r->conversation != NULL) {
        const fkv_status status = conversation_tokens(model, r, max_bytes, out);
        if (status == FKV_OK) find_marks(model, r, out);
        return status;
    }
    if (r->suffix != NULL) return fim_tokens(model, r, prompt, max_bytes, out);
    const unsigned flags = FKV_TOKENIZE_BOS | (r->parse_special ? FKV_TOKENIZE_SPECIAL : 0);
    if (json_is_string(prompt)) {
        out->n_bytes = json_string_length(prompt);
        if (out->n_bytes > max_bytes) return FKV_POOL_FULL;
        return prompt_tokens_of_text(model, json_string_value(prompt), json_string_length(prompt), flags, out);
    }
    out->tokens = malloc((json_array_size(prompt) + 1) * sizeof *out->tokens);
    if (out->tokens == NULL) return FKV_NO_MEMORY;
    for (; out->n < json_array_size(prompt); out->n++)
        out->tokens[out->n] = (uint32_t)json_integer_value(json_array_get(prompt, out->n));
    return FKV_OK;
}

void prompt_tokens_free(prompt_tokens *t) {
    free(t->tokens);
    *t = (prompt_tokens){0};
}
