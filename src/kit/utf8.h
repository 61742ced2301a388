/* UTF-8 validation and safe printing of untrusted text. */
#ifndef FKV_KIT_UTF8_H
#define FKV_KIT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

extern const char UTF8_REPLACEMENT[]; /* UTF-8 encoding of U+FFFD, 3 bytes long */

/* Returns the length of the character that starts at `bytes`, where n > 0 bytes are available. Returns 0 if the bytes are not
 * valid UTF-8, or -1 if they are an incomplete character. */
int utf8_length(const char *bytes, size_t n);

/* Returns the code point of a valid character of `length` bytes. */
uint32_t utf8_code_point(const char *bytes, int length);

/* Returns whether the character is a control character: C0, DEL or C1. */
bool utf8_is_control(const char *bytes, int length);

/* Returns whether the character can change how a terminal or an editor shows the text around it: a control character, a
 * bidirectional embedding, override or isolate, or a line or paragraph separator. */
bool utf8_is_unsafe(const char *bytes, int length);

/* Prints untrusted text. Each byte of an unsafe character or of invalid UTF-8 is printed as \xNN. */
void utf8_print_escaped(FILE *file, const char *text);

#endif
