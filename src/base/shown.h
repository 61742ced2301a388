/* Text from untrusted files, made fit for a message or a terminal. fkv_fail() passes every message through here, so that no
 * caller can forget it; what is kept for later (a model's name) is cleaned when it is taken from the file.
 *
 * UTF-8 passes as it is. Control characters (the escape that begins a terminal's commands, newlines), characters that turn the
 * direction of writing, and bytes that are no UTF-8 become \xNN, a byte each. A text that was shown once is not changed by
 * showing it again.
 */
#ifndef FKV_SHOWN_H
#define FKV_SHOWN_H

#include <stdbool.h>
#include <stddef.h>

/* A text that is not 0-terminated and may contain anything. */
typedef struct fkv_bytes {
    const char *data;
    size_t size;
} fkv_bytes;

typedef struct fkv_shown {
    char text[96];
} fkv_shown;

/* What is too long ends in "...", at a whole character. */
fkv_shown fkv_show(fkv_bytes bytes);
fkv_shown fkv_show_text(const char *text);

/* The same into out: [capacity], at least 8, 0-terminated. */
void fkv_show_into(fkv_bytes bytes, char *out, size_t capacity);

/* Printable ASCII without spaces, and at least one: what the names of tensors and architectures are made of. */
bool fkv_is_plain(fkv_bytes text);

#endif
