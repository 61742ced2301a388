/* Texts as bytes: read from files, checked for UTF-8, printed as they come.
 */
#ifndef FKV_CLI_TEXT_H
#define FKV_CLI_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Grows as bytes are added. bytes has a 0 behind it once anything was added, and is NULL before. */
typedef struct text_buffer {
    char *bytes;
    size_t n;
    size_t room;
} text_buffer;

void text_add(text_buffer *t, const char *bytes, size_t n);
void text_free(text_buffer *t);

/* The whole file, or standard input where path is "-", behind what is in t. Returns an exit code, with a message on failure. */
int text_read(text_buffer *t, const char *path);

/* A copy that is UTF-8, 0-terminated, to be freed: what is not, and zeros, becomes U+FFFD. */
char *text_sound(const char *bytes, size_t n);

/* A text on its way to a reader: characters appear whole, what is not UTF-8 as U+FFFD; on a terminal no control character but
 * newline and tab passes. */
typedef struct text_stream {
    FILE *file; /* NULL: nothing is printed */
    bool terminal;
    char held[4]; /* the beginning of a character whose rest is not there yet */
    size_t n_held;
} text_stream;

text_stream text_stream_open(FILE *file);
void text_stream_put(text_stream *s, const char *bytes, size_t n);
void text_stream_end(text_stream *s); /* what is held will not be completed */

#endif
