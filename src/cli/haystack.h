/* Long texts with planted facts, for niah and bench flat.
 *
 * A fact is a sentence of the form " The KIND of NAME is NUMBER. ". The needle model was trained on sentences of this form.
 * Kinds and name syllables come from the model's lexicon. The book is tokenized once, and facts are inserted between its
 * tokens. A book that is too short is repeated. The facts and their positions depend on a seed, not on the codec.
 */
#ifndef FKV_CLI_HAYSTACK_H
#define FKV_CLI_HAYSTACK_H

#include "text.h"
#include "token_list.h"

#include <jansson.h>

enum { FACT_WORD = 32, FACT_DIGITS = 7, FACT_TEXT = 192 };

typedef struct fact {
    char kind[FACT_WORD];
    char name[FACT_WORD];
    char number[FACT_DIGITS + 1];
} fact;

typedef struct haystack {
    const fkv_model *model;
    token_list book;
    json_t *lexicon;
} haystack;

/* Reads and tokenizes the book. If `file` is NULL, reads the book of the needle model. For a byte-level model, the book is
 * converted to the form of the model's training text: ASCII, with one line per paragraph. Returns an exit code. */
int haystack_open(haystack *h, const fkv_model *model, const char *file);
void haystack_close(haystack *h);

/* Appends n tokens of the book, starting at a position derived from the seed. */
void haystack_excerpt(const haystack *h, uint64_t seed, size_t n, token_list *out);

/* Draws a random fact. */
void haystack_draw_fact(const haystack *h, uint64_t *random, fact *out);

/* Returns the position in `body` at which to insert a fact: the end of the sentence before `at`, or `at` itself for a byte-level
 * model. */
size_t haystack_insertion_point(const haystack *h, const token_list *body, size_t at);

/* Write the sentence that states a fact, or the question that asks for the fact. The question is worded differently for chat
 * models. */
void fact_sentence(const fact *f, char text[FACT_TEXT]);
void fact_question(const fact *f, bool chat, char text[FACT_TEXT]);

#endif
