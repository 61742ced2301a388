/* Translates the output constraints of a request into grammar rules. A request can require a JSON answer that follows a schema, a
 * tool call, or either of the two.
 *
 * Tool calls use the model's own syntax, so the reply parser needs no special case for constrained calls. All client input is
 * validated or quoted before it becomes part of the rules.
 */
#ifndef FKV_SERVE_ANSWER_RULES_H
#define FKV_SERVE_ANSWER_RULES_H

#include "api_request.h"
#include "grammar.h"

/* Special tokens and chat markup of the loaded model. */
typedef struct answer_marks {
    fkv_reply_syntax syntax;
    grammar_thinking thinking;
    bool chat; /* true if the model has a chat template; tool calls are parsed only in this case */
    uint32_t (*token_of)(const void *user, const char *text); /* returns the special token with this text, or FKV_NO_TOKEN */
    bool (*is_token)(const void *user, const char *text);     /* returns true if the text is a single token, special or not */
    const void *user;
} answer_marks;

/* Returns true if the request constrains the format of its answer. *param receives the name of the request field that sets the
 * constraint. */
bool answer_rules_wanted(const api_request *api, const char **param);

/* Returns the grammar rules, which the caller frees. If the constraint is not supported, returns NULL and writes a message to
 * error: [GRAMMAR_ERROR_BYTES]. */
char *answer_rules_text(const api_request *api, const answer_marks *marks, char *error);

/* Compiles the grammar of a constrained request. The caller closes the grammar. On failure, returns NULL and writes a message
 * to error: [GRAMMAR_ERROR_BYTES]. */
grammar *answer_rules_open(const grammar_maker *maker, const fkv_model *model, const api_request *api, const uint32_t *prompt,
                           size_t n_prompt, char *error);

#endif
