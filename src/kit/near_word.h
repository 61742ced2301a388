/* The word that was meant where one was mistyped. Words are offered one by one; the nearest is kept, the first of those as near.
 */
#ifndef KIT_NEAR_WORD_H
#define KIT_NEAR_WORD_H

typedef struct near_word {
    const char *typed;
    const char *best; /* NULL: none is near enough to be named */
    unsigned distance;
} near_word;

/* Keeps `word` where fewer letters are wrong, missing or too many than in the best so far: at most one in three. */
void near_word_offer(near_word *near, const char *word);

/* " (did you mean WORD?)" with the prefix before the word, or "". */
const char *near_word_hint(const near_word *near, const char *prefix, char out[96]);

#endif
