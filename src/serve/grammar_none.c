/* Stubs for builds without grammar support. See grammar.h. */
#include "grammar.h"

#include <stddef.h>

grammar_maker *grammar_maker_open(const fkv_model *model) {
    (void)model;
    return NULL;
}

void grammar_maker_close(grammar_maker *maker) { (void)maker; }

grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error) {
    (void)maker, (void)rules, (void)thinking, (void)n_answers;
    error[0] = 0;
    return NULL;
}

void grammar_close(grammar *g) { (void)g; }

const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab) {
    (void)user, (void)answer, (void)tokens, (void)n_tokens, (void)bits, (void)n_vocab;
    return "this build has no grammar support";
}

bool grammar_failed(const grammar *g) { return g != NULL; }
