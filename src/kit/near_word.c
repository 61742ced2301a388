/* See near_word.h. */
#include "near_word.h"

#include <stdio.h>
#include <string.h>

enum { MAX_LETTERS = 32 }; /* of a word that is compared */

static unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

/* Letters to change, add or take away, to make one word the other: one row of the usual table at a time. */
static unsigned distance_of(const char *a, size_t n_a, const char *b, size_t n_b) {
    unsigned row[MAX_LETTERS + 1];
    for (size_t j = 0; j <= n_b; j++) row[j] = (unsigned)j;
    for (size_t i = 1; i <= n_a; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n_b; j++) {
            unsigned changed = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = least(changed, least(row[j], row[j - 1]) + 1);
        }
    }
    return row[n_b];
}

void near_word_offer(near_word *near, const char *word) {
    size_t n_typed = strlen(near->typed);
    size_t n_word = strlen(word);
    if (n_typed > MAX_LETTERS || n_word > MAX_LETTERS) return;
    unsigned distance = distance_of(near->typed, n_typed, word, n_word);
    if (distance * 3 > n_word || (near->best != NULL && distance >= near->distance)) return;
    near->best = word;
    near->distance = distance;
}

const char *near_word_hint(const near_word *near, const char *prefix, char out[96]) {
    out[0] = 0;
    if (near->best != NULL) (void)snprintf(out, 96, " (did you mean %s%s?)", prefix, near->best);
    return out;
}
