/* See join_texts.h. */
#include "join_texts.h"

#include <stdlib.h>
#include <string.h>

json_t *join_texts(const json_t *texts, const char *separator) {
    size_t i;
    const json_t *text;
    size_t n = 1;
    json_array_foreach(texts, i, text) n += json_string_length(text) + strlen(separator);
    char *whole = malloc(n);
    if (whole == NULL) return NULL;
    char *end = whole;
    json_array_foreach(texts, i, text) {
        if (i > 0) end = stpcpy(end, separator);
        if (json_string_length(text) > 0) memcpy(end, json_string_value(text), json_string_length(text));
        end += json_string_length(text);
    }
    json_t *joined = json_stringn_nocheck(whole, (size_t)(end - whole));
    free(whole);
    return joined;
}
