/* UTF-8, for what programs print. */
#ifndef FKV_KIT_UTF8_H
#define FKV_KIT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

extern const char UTF8_REPLACEMENT[]; /* U+FFFD, 3 bytes */

/* Bytes of the character at `bytes`, of which n > 0 are left: 0 where it is none, -1 where it may become one with more bytes. */
int utf8_length(const char *bytes, size_t n);

/* Whether the character of this length at `bytes` is a control character: what a terminal obeys instead of showing it. */
bool utf8_is_control(const char *bytes, int length);

/* A text from an untrusted file: control characters and bytes that are not UTF-8 are printed as \xNN. */
void utf8_print_shown(FILE *file, const char *text);

#endif
