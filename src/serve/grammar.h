/* Constrained decoding: computes token masks from a grammar.
 *
 * The implementation is grammar_llguidance.c if llguidance is available, otherwise grammar_builtin.c, which supports only JSON
 * objects without a schema. A grammar is created on a worker thread, is then used only on the engine thread, and is closed after
 * the last event of its request.
 *
 * There are limits on the size of a grammar, its number of rules and states, the time to compile it, and the work per mask.
 * Exceeding a limit is reported as a grammar error.
 */
#ifndef FKV_SERVE_GRAMMAR_H
#define FKV_SERVE_GRAMMAR_H

#include <flatkv/engine.h>

enum { GRAMMAR_MAX_BYTES = 64 << 10, GRAMMAR_MAX_REFS = 256, GRAMMAR_ERROR_BYTES = 400, GRAMMAR_COMPILE_SECONDS = 5 };

typedef struct grammar_maker grammar_maker; /* vocabulary of a model, indexed for token masks */
typedef struct grammar grammar;             /* compiled grammar of a request, with one parser state per answer */

/* Returns true if grammar_open() accepts rules, which requires a build with llguidance. */
bool grammar_supports_rules(void);

/* Sets the time limit for grammar compilations, in seconds. The default is GRAMMAR_COMPILE_SECONDS. A limit of 0 makes every
 * compilation fail. Used only by tests. */
void grammar_set_compile_seconds(uint32_t seconds);

/* Creates the vocabulary index of a model. The model must outlive the index. Returns NULL if memory runs out. */
grammar_maker *grammar_maker_open(const fkv_model *model);
void grammar_maker_close(grammar_maker *maker); /* all grammars of the maker must be closed first; `maker` may be NULL */

/* Tokens that enclose the reasoning before the constrained text. Between these two tokens, every token except an end token is
 * allowed. */
typedef struct grammar_thinking {
    uint32_t open; /* opening token; FKV_NO_TOKEN means that there is no reasoning and the grammar applies from the start */
    uint32_t close;
    bool opened; /* true if the prompt already contains the opening token */
} grammar_thinking;

/* Compiles a grammar. rules: llguidance's Lark dialect with a rule `start`, or NULL for any JSON object. If the grammar is
 * invalid, returns NULL and writes a message to error: [GRAMMAR_ERROR_BYTES]. */
grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error);
void grammar_close(grammar *g); /* g may be NULL */

/* Implements fkv_mask_fn. user: the grammar. */
const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab);

/* Returns true if computing a mask exceeded a limit. */
bool grammar_failed(const grammar *g);

#endif
