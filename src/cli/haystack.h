/* Long texts with planted facts: what niah asks about and what bench flat fills a context with.
 *
 * A fact is " The KIND of NAME is NUMBER. ", as the needle model was trained on; kinds and the syllables of names come from its
 * lexicon. Everything is tokens: the book is tokenized once, facts are put between its tokens, and a book that is too short
 * begins again. The same seed plants the same facts at the same places, whatever the codec.
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

/* file: the book, or NULL for the one beside the needle model. For a model of bytes it is cleaned as that model's training text
 * was: ASCII, one line for each paragraph. Returns an exit code, with a message on failure. */
int haystack_open(haystack *h, const fkv_model *model, const char *file);
void haystack_close(haystack *h);

/* n tokens of the book from a place that the seed draws. */
void haystack_cut(const haystack *h, uint64_t seed, size_t n, token_list *out);

/* A fact, drawn. */
void haystack_draw_fact(const haystack *h, uint64_t *random, fact *out);

/* Where in `body` a fact that was meant for `at` belongs: for a model of bytes there; else behind the sentence before it. */
size_t haystack_place(const haystack *h, const token_list *body, size_t at);

/* The sentence, and the question for it; a chat model is asked in its own words. */
void fact_sentence(const fact *f, char text[FACT_TEXT]);
void fact_question(const fact *f, bool chat, char text[FACT_TEXT]);

#endif
