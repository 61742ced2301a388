/* Text buffers, reading of text files, UTF-8 validation and streaming output. */
#ifndef FKV_CLI_TEXT_H
#define FKV_CLI_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Growable buffer. `bytes` is NULL until the first text_add() and null-terminated afterwards. */
typedef struct text_buffer {
    char *bytes;
    size_t n;
    size_t capacity;
} text_buffer;

void text_add(text_buffer *t, const char *bytes, size_t n);
void text_free(text_buffer *t);

/* Appends a whole file, or standard input if path is "-". Returns an exit code. */
int text_read(text_buffer *t, const char *path);

/* Returns a null-terminated UTF-8 copy, which the caller frees. Invalid bytes and zero bytes become U+FFFD. */
char *text_to_utf8(const char *bytes, size_t n);

/* Output stream for text that arrives in fragments. Only complete characters are written, and invalid UTF-8 becomes U+FFFD. On a
 * terminal, all control characters except newline and tab also become U+FFFD. */
typedef struct text_stream {
    FILE *file; /* NULL: discards the text */
    bool terminal;
    char held[4]; /* bytes of an incomplete character */
    size_t n_held;
} text_stream;

text_stream text_stream_open(FILE *file);
void text_stream_put(text_stream *s, const char *bytes, size_t n);
void text_stream_end(text_stream *s); /* writes an incomplete character as U+FFFD */

#endif
