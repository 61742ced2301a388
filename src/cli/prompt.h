/* A prompt as tokens: a plain text, or messages of a chat in ChatML frames. Frames are tokenized with their special tokens, what
 * people wrote is not, so that nobody can forge a role.
 */
#ifndef FKV_CLI_PROMPT_H
#define FKV_CLI_PROMPT_H

#include "text.h"
#include "token_list.h"

/* A plain text at the beginning of a sequence. Returns an exit code, with a message on failure. */
int prompt_add_plain(token_list *list, const fkv_model *model, const text_buffer *content);

/* What stands before and behind the content of a message, for callers that bring the content as tokens; with the opening of the
 * answer where `answer`. */
int prompt_open_message(token_list *list, const fkv_model *model, const char *role);
int prompt_close_message(token_list *list, const fkv_model *model, const char *role, bool answer);

/* One message; with the opening of the answer behind it where `answer`. */
int prompt_add_message(token_list *list, const fkv_model *model, const char *role, const text_buffer *content, bool answer);

/* Ends an answer that the model gave, whether or not it got to its end. */
int prompt_close_answer(token_list *list, const fkv_model *model);

#endif
