/* See suggestion.h. */
#include "suggestion.h"

#include <stdio.h>
#include <string.h>

enum { MAX_LETTERS = 32 }; /* maximum length of words that are compared */

static unsigned min_unsigned(unsigned a, unsigned b) { return a < b ? a : b; }

/* Returns the Levenshtein distance. Keeps only one row of the dynamic-programming table in memory. */
static unsigned edit_distance(const char *a, size_t n_a, const char *b, size_t n_b) {
    unsigned row[MAX_LETTERS + 1];
    for (size_t j = 0; j <= n_b; j++) row[j] = (unsigned)j;
    for (size_t i = 1; i <= n_a; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n_b; j++) {
            unsigned changed = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_unsigned(changed, min_unsigned(row[j], row[j - 1]) + 1);
        }
    }
    return row[n_b];
}

void suggestion_offer(suggestion *near, const char *word) {
    size_t n_typed = strlen(near->typed);
    size_t n_word = strlen(word);
    if (n_typed > MAX_LETTERS || n_word > MAX_LETTERS) return;
    unsigned distance = edit_distance(near->typed, n_typed, word, n_word);
    if (distance * 3 > n_word || (near->best != NULL && distance >= near->distance)) return;
    near->best = word;
    near->distance = distance;
}

const char *suggestion_hint(const suggestion *near, const char *prefix, char out[96]) {
    out[0] = 0;
    if (near->best != NULL) (void)snprintf(out, 96, " (did you mean %s%s?)", prefix, near->best);
    return out;
}
