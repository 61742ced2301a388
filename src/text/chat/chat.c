/* See chat.h. */
#include "chat.h"

#include <stdio.h>
#include <stdlib.h>

enum { N_WORDS = 3 };

struct fkv_chat {
    fkv_template *text; /* parsed chat template; NULL if the model has no usable template (see `refusal`) */
    fkv_template_word words[N_WORDS];
    size_t n_words;
    char refusal[320];
};

static const char chatml[] =
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

static void add_word(fkv_chat *chat, const fkv_tokenizer *tokenizer, const char *name, uint32_t token) {
    size_t n_bytes = 0;
    if (token == FKV_NO_TOKEN) return;
    const char *text = fkv_tokenizer_text(tokenizer, token, true, &n_bytes);
    chat->words[chat->n_words++] = (fkv_template_word){name, text};
}

fkv_status fkv_chat_open(const fkv_vocab_source *source, const fkv_tokenizer *tokenizer, fkv_chat **out) {
    fkv_chat *chat = calloc(1, sizeof *chat);
    FKV_REQUIRE(chat != NULL, FKV_NO_MEMORY, "out of memory allocating a chat template");
    add_word(chat, tokenizer, "bos_token", source->bos);
    add_word(chat, tokenizer, "eos_token", source->eos);
    add_word(chat, tokenizer, "unk_token", source->unk);
    fkv_bytes text = source->chat_template;
    if (text.size == 0 && fkv_tokenizer_has_chatml(tokenizer)) text = (fkv_bytes){chatml, sizeof chatml - 1};
    fkv_status status = FKV_OK;
    if (text.size == 0)
        (void)snprintf(chat->refusal, sizeof chat->refusal, "the model has no chat template; it can only continue text");
    else
        status = fkv_template_open(text.data, text.size, &chat->text);
    if (status == FKV_UNSUPPORTED) {
        (void)snprintf(chat->refusal, sizeof chat->refusal, "%s", fkv_message());
        status = FKV_OK;
    }
    if (status != FKV_OK) {
        fkv_chat_close(chat);
        return status;
    }
    *out = chat;
    return FKV_OK;
}

void fkv_chat_close(fkv_chat *chat) {
    if (chat == NULL) return;
    fkv_template_close(chat->text);
    free(chat);
}

const char *fkv_chat_refusal(const fkv_chat *chat) { return chat->refusal; }

fkv_status fkv_chat_run(const fkv_chat *chat, const char *conversation, size_t n_bytes, const int64_t *now, fkv_rendered *out) {
    json_error_t error;
    FKV_REQUIRE(chat->text != NULL, FKV_UNSUPPORTED, "%s", chat->refusal);
    json_t *variables = json_loadb(conversation, n_bytes, JSON_REJECT_DUPLICATES, &error);
    FKV_REQUIRE(variables != NULL, FKV_BAD_ARGUMENT, "the conversation is not valid JSON: line %d: %s", error.line, error.text);
    fkv_template_input input = {.variables = variables, .words = chat->words, .n_words = chat->n_words, .now = now};
    fkv_status status = json_is_object(variables) && json_is_array(json_object_get(variables, "messages"))
                            ? fkv_template_render(chat->text, &input, out)
                            : fkv_fail(FKV_BAD_ARGUMENT, "the conversation must be a JSON object with an array \"messages\"");
    json_decref(variables);
    return status;
}
