/* See prompt.h. */
#include "prompt.h"

#include "cli.h"

#include <string.h>

int prompt_add_plain(token_list *list, const fkv_model *model, const text_buffer *content) {
    return token_list_add_text(list, model, content->bytes, content->n, list->n == 0 ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
}

static int add_frame(token_list *list, const fkv_model *model, const char *frame, bool begins) {
    unsigned flags = FKV_TOKENIZE_SPECIAL | (begins ? (unsigned)FKV_TOKENIZE_BOS : 0);
    return token_list_add_text(list, model, frame, strlen(frame), flags);
}

int prompt_open_message(token_list *list, const fkv_model *model, const char *role) {
    fkv_chat_frame frame;
    fkv_status status = fkv_chat_frame_of(model, role, false, &frame);
    return status == FKV_OK ? add_frame(list, model, frame.before, list->n == 0) : cli_fail_status(status);
}

int prompt_close_message(token_list *list, const fkv_model *model, const char *role, bool answer) {
    fkv_chat_frame frame;
    fkv_status status = fkv_chat_frame_of(model, role, answer, &frame);
    return status == FKV_OK ? add_frame(list, model, frame.after, false) : cli_fail_status(status);
}

int prompt_add_message(token_list *list, const fkv_model *model, const char *role, const text_buffer *content, bool answer) {
    int code = prompt_open_message(list, model, role);
    if (code == EXIT_GOOD) code = token_list_add_text(list, model, content->bytes, content->n, FKV_TOKENIZE_PLAIN);
    return code == EXIT_GOOD ? prompt_close_message(list, model, role, answer) : code;
}

int prompt_close_answer(token_list *list, const fkv_model *model) {
    return prompt_close_message(list, model, "assistant", false);
}
