/* Which tokens an answer may be made of, where a grammar decides: masks over the vocabulary of a model, by llguidance.
 *
 * Optional: the build lists grammar_llguidance.c (FKV_LLGUIDANCE=ON) or grammar_none.c. A grammar is made on the loop's thread
 * and asked on the engine's, never on both at once: it is closed after the last event of its request.
 *
 * Bounds: bytes of a grammar, its rules and the work of compiling it; the work for each mask; states that it may come to have.
 * What goes beyond is an error of the grammar, in words, and never more than that.
 */
#ifndef FKV_SERVE_GRAMMAR_H
#define FKV_SERVE_GRAMMAR_H

#include <flatkv/engine.h>

enum { GRAMMAR_MAX_BYTES = 64 << 10, GRAMMAR_MAX_REFS = 256, GRAMMAR_ERROR_BYTES = 400 };

typedef struct grammar_maker grammar_maker; /* the vocabulary of a model as the library wants it */
typedef struct grammar grammar;             /* of one request */

/* NULL: this build has no grammars, or there was no memory. */
grammar_maker *grammar_maker_open(const fkv_model *model);
void grammar_maker_close(grammar_maker *maker); /* after its grammars; NULL is allowed */

/* What the answer may say before the grammar begins: anything but an end, between these two tokens. */
typedef struct grammar_thinking {
    uint32_t open;  /* FKV_NO_TOKEN: the grammar begins at once */
    uint32_t close; /* a token as well */
    bool opened;    /* by the prompt */
} grammar_thinking;

/* rules: in llguidance's Lark, with a rule `start`. NULL: error[GRAMMAR_ERROR_BYTES] says what is wrong with it. */
grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error);
void grammar_close(grammar *g); /* NULL is allowed */

/* A fkv_mask_fn; user is the grammar. */
const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab);

/* A mask failed: the grammar asks for too much. */
bool grammar_failed(const grammar *g);

#endif
