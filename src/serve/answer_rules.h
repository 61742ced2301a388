/* What a request says about the form of its answer, as the rules of a grammar: a JSON schema, a tool call that must be made, or
 * either of them.
 *
 * A call is written as the model itself writes calls, so that it is read back like any other. Everything from the client is
 * checked or quoted before it becomes part of the rules.
 */
#ifndef FKV_SERVE_ANSWER_RULES_H
#define FKV_SERVE_ANSWER_RULES_H

#include "api_request.h"
#include "grammar.h"

/* How the model at hand marks things. */
typedef struct answer_marks {
    fkv_reply_syntax syntax;
    grammar_thinking thinking;
    bool chat;                                                /* calls are read at all */
    uint32_t (*token_of)(const void *user, const char *text); /* of a special token with this text, or FKV_NO_TOKEN */
    bool (*is_token)(const void *user, const char *text);     /* the text is one token, special or not */
    const void *user;
} answer_marks;

/* The request needs rules; *param is the field that asks for them. */
bool answer_rules_wanted(const api_request *api, const char **param);

/* The rules, the caller's. NULL: error[GRAMMAR_ERROR_BYTES] says what cannot be. */
char *answer_rules_text(const api_request *api, const answer_marks *marks, char *error);

/* The grammar of a request that needs one, to be closed by the caller. */
grammar *answer_rules_open(const grammar_maker *maker, const fkv_model *model, const api_request *api, const uint32_t *prompt,
                           size_t n_prompt, char *error);

#endif
