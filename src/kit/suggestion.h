/* "Did you mean": finds the known word closest to a mistyped one. Candidates are offered one by one. Among equally close
 * candidates, the first one is kept.
 */
#ifndef KIT_SUGGESTION_H
#define KIT_SUGGESTION_H

typedef struct suggestion {
    const char *typed;
    const char *best;  /* closest candidate so far; NULL if no candidate is close enough */
    unsigned distance; /* edit distance between `best` and the typed word */
} suggestion;

/* Makes `word` the best candidate if its edit distance to the typed word is at most a third of its own length and less than the
 * distance of the current best candidate. */
void suggestion_offer(suggestion *near, const char *word);

/* Writes " (did you mean PREFIXWORD?)", or "" if no candidate is close enough. Returns `out`. */
const char *suggestion_hint(const suggestion *near, const char *prefix, char out[96]);

#endif
