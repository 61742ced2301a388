/* See text.h. */
#include "text.h"

#include "../kit/utf8.h"
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t MAX_FILE = (size_t)1 << 30;

void text_add(text_buffer *t, const char *bytes, size_t n) {
    if (t->n + n + 1 > t->capacity) {
        t->capacity = 2 * (t->n + n + 1);
        t->bytes = kit_realloc(t->bytes, t->capacity);
    }
    memcpy(t->bytes + t->n, bytes, n);
    t->n += n;
    t->bytes[t->n] = 0;
}

void text_free(text_buffer *t) {
    free(t->bytes);
    *t = (text_buffer){0};
}

int text_read(text_buffer *t, const char *path) {
    bool standard = strcmp(path, "-") == 0;
    FILE *file = standard ? stdin : fopen(path, "rb");
    if (file == NULL) return kit_fail(EXIT_FAILED, "cannot open %s: %s", path, strerror(errno));
    static char part[65536];
    size_t got = 0;
    size_t n = 0;
    errno = 0;
    do {
        got = fread(part, 1, sizeof part, file);
        text_add(t, part, got);
        n += got;
    } while (got == sizeof part && n <= MAX_FILE);
    bool failed = ferror(file) != 0;
    int reason = errno;
    if (!standard) (void)fclose(file);
    if (cli_interrupted()) return EXIT_INTERRUPTED;
    if (failed) return kit_fail(EXIT_FAILED, "cannot read %s: %s", path, strerror(reason));
    if (n > MAX_FILE) return kit_fail(EXIT_FAILED, "%s exceeds the maximum of %zu bytes: split the file", path, MAX_FILE);
    return EXIT_GOOD;
}

char *text_to_utf8(const char *bytes, size_t n) {
    text_buffer out = {0};
    text_add(&out, "", 0);
    for (size_t i = 0; i < n;) {
        int length = utf8_length(bytes + i, n - i);
        if (length > 0 && bytes[i] != 0) {
            text_add(&out, bytes + i, (size_t)length);
            i += (size_t)length;
        } else {
            text_add(&out, UTF8_REPLACEMENT, 3);
            i++;
        }
    }
    return out.bytes;
}

text_stream text_stream_open(FILE *file) {
    return (text_stream){.file = file, .terminal = file != NULL && isatty(fileno(file)) != 0};
}

/* Writes one character. length: number of bytes in the character; 0 means that bytes[0] is not valid UTF-8. */
static void put_character(const text_stream *s, const char *bytes, int length) {
    bool control = utf8_is_control(bytes, length) && bytes[0] != '\n' && bytes[0] != '\t';
    if (length == 0 || (s->terminal && control))
        (void)fputs(UTF8_REPLACEMENT, s->file);
    else
        (void)fwrite(bytes, 1, (size_t)length, s->file);
}

void text_stream_put(text_stream *s, const char *bytes, size_t n) {
    if (s->file == NULL) return;
    for (size_t i = 0; i < n; i++) {
        s->held[s->n_held++] = bytes[i];
        while (s->n_held > 0) { /* a byte that makes the held character invalid may be the first byte of the next character */
            int length = utf8_length(s->held, s->n_held);
            if (length < 0) break;
            put_character(s, s->held, length);
            size_t used = length > 0 ? (size_t)length : 1;
            s->n_held -= used;
            memmove(s->held, s->held + used, s->n_held);
        }
    }
    (void)fflush(s->file);
}

void text_stream_end(text_stream *s) {
    if (s->file == NULL) return;
    for (; s->n_held > 0; s->n_held--) put_character(s, s->held, 0);
    (void)fflush(s->file);
}
