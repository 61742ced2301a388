/* Buffers the output text of an answer. Complete UTF-8 characters are released to the client; text that may be the beginning of a
 * stop string is held back.
 *
 * The request owns the buffer. The buffer holds at most one token in addition to an incomplete character or an incomplete stop
 * string, so its size is known when the request is submitted.
 */
#ifndef FKV_ANSWER_TEXT_H
#define FKV_ANSWER_TEXT_H

#include "../base/base.h"

typedef struct fkv_stop_list {
    const char *const *stops; /* [n] non-empty strings */
    uint32_t n;
} fkv_stop_list;

typedef struct fkv_answer_text {
    char *held;
    size_t capacity;
    size_t n;
    size_t n_shown; /* number of leading bytes of `held` that the last call released */
} fkv_answer_text;

/* Appends the bytes of a token. On return, the first n_shown bytes of `held` are the newly released text; the next call removes
 * them from the buffer. If the text contains a stop string, truncates the text before the first stop string in it and returns
 * this stop string. Otherwise returns NULL. */
const char *fkv_answer_text_add(fkv_answer_text *text, fkv_stop_list stops, const char *bytes, size_t n);

/* Releases all held text at the end of an answer. */
void fkv_answer_text_end(fkv_answer_text *text);

#endif
