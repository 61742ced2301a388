/* The text of an answer as it may be shown: whole characters, nothing that could still become a stop string.
 *
 * The buffer belongs to the request. What is held is at most a stop string less one byte, or a part of a character, before a
 * token is added, so its size is known when the request comes.
 */
#ifndef FKV_ANSWER_TEXT_H
#define FKV_ANSWER_TEXT_H

#include "../base/base.h"

typedef struct fkv_stop_list {
    const char *const *stops; /* [n], none empty */
    uint32_t n;
} fkv_stop_list;

typedef struct fkv_answer_text {
    char *held;
    size_t capacity;
    size_t n;
    size_t n_shown; /* bytes at the front that the last call released */
} fkv_answer_text;

/* Adds the bytes of a token. The first n_shown bytes of `held` may now be shown, and are dropped by the next call. Returns the
 * stop string that was found first (the text ends before it), or NULL. */
const char *fkv_answer_text_add(fkv_answer_text *text, fkv_stop_list stops, const char *bytes, size_t n);

/* The answer ends: everything held may be shown. */
void fkv_answer_text_end(fkv_answer_text *text);

#endif
