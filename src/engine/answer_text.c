/* See answer_text.h. */
#include "answer_text.h"

static void drop_released(fkv_answer_text *t) {
    t->n -= t->n_shown;
    if (t->n > 0) memmove(t->held, t->held + t->n_shown, t->n);
    t->n_shown = 0;
}

/* Returns the offset of the last UTF-8 character if this character is incomplete, otherwise n. */
static size_t complete_utf8_end(const char *text, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)text[n - back];
        if ((c & 0xc0) == 0x80) continue;
        size_t length = c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return length > back && c < 0xf8 ? n - back : n;
    }
    return n;
}

/* Returns the offset of the longest suffix of the text that is a proper prefix of the stop string, or n if there is no such
 * suffix. */
static size_t partial_stop_start(const char *text, size_t n, const char *stop) {
    size_t length = strlen(stop);
    for (size_t take = length - 1 < n ? length - 1 : n; take > 0; take--)
        if (memcmp(text + n - take, stop, take) == 0) return n - take;
    return n;
}

const char *fkv_answer_text_add(fkv_answer_text *t, fkv_stop_list stops, const char *bytes, size_t n) {
    const char *found = NULL;
    drop_released(t);
    FKV_ASSERT(t->n + n <= t->capacity);
    if (n > 0) memcpy(t->held + t->n, bytes, n);
    t->n += n;
    size_t end = complete_utf8_end(t->held, t->n);
    size_t first = t->n;
    for (uint32_t i = 0; i < stops.n; i++) {
        const char *at = memmem(t->held, t->n, stops.stops[i], strlen(stops.stops[i]));
        if (at != NULL && (found == NULL || (size_t)(at - t->held) < first)) {
            first = (size_t)(at - t->held);
            found = stops.stops[i];
        }
        size_t possible = partial_stop_start(t->held, t->n, stops.stops[i]);
        if (possible < end) end = possible;
    }
    if (found != NULL) t->n = end = first; /* the stop string is not part of the answer */
    t->n_shown = end;
    return found;
}

void fkv_answer_text_end(fkv_answer_text *t) {
    drop_released(t);
    t->n_shown = t->n;
}
