/* See json.h. */
#include "json.h"

#include "program.h"
#include "utf8.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 16 };

struct kit_json {
    FILE *file; /* memory stream that writes to `text` */
    char *text;
    size_t n_bytes;
    int depth;
    char closers[MAX_DEPTH]; /* closing brackets of the open objects and arrays */
    bool has_members;        /* true if the innermost open object or array is not empty */
};

/* Write errors of the memory stream are reported by kit_json_print(). */
static void put_json_bytes(kit_json *json, const char *bytes, size_t n) { (void)fwrite(bytes, 1, n, json->file); }

static void put_json_string(kit_json *json, const char *bytes, size_t n) {
    put_json_bytes(json, "\"", 1);
    for (size_t i = 0; i < n;) {
        int length = utf8_length(bytes + i, n - i);
        unsigned char c = (unsigned char)bytes[i];
        char escaped[16];
        if (length <= 0 || c == 0)
            put_json_bytes(json, UTF8_REPLACEMENT, 3);
        else if (utf8_is_unsafe(bytes + i, length)) /* the code point is below U+10000, so no surrogate pair is needed */
            put_json_bytes(json, escaped,
                           (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", utf8_code_point(bytes + i, length)));
        else {
            if (c == '"' || c == '\\') put_json_bytes(json, "\\", 1);
            put_json_bytes(json, bytes + i, (size_t)length);
        }
        i += length > 0 ? (size_t)length : 1;
    }
    put_json_bytes(json, "\"", 1);
}

/* Writes the comma and the key that precede a value. */
static void before_value(kit_json *json, const char *key) {
    if (json->has_members) put_json_bytes(json, ", ", 2);
    json->has_members = true;
    assert(json->depth > 0 && (key == NULL) == (json->closers[json->depth - 1] == ']'));
    if (key == NULL) return;
    put_json_string(json, key, strlen(key));
    put_json_bytes(json, ": ", 2);
}

static void open_level(kit_json *json, const char *opener, char closer) {
    put_json_bytes(json, opener, 1);
    json->has_members = false;
    assert(json->depth < MAX_DEPTH);
    json->closers[json->depth++] = closer;
}

kit_json *kit_json_begin(void) {
    kit_json *json = kit_alloc(sizeof *json);
    json->file = open_memstream(&json->text, &json->n_bytes);
    if (json->file == NULL) kit_die(EXIT_NO_FIT, "out of memory allocating the JSON output: %s", strerror(errno));
    open_level(json, "{", '}');
    return json;
}

void kit_json_object(kit_json *json, const char *key) {
    before_value(json, key);
    open_level(json, "{", '}');
}

void kit_json_array(kit_json *json, const char *key) {
    before_value(json, key);
    open_level(json, "[", ']');
}

void kit_json_close(kit_json *json) {
    assert(json->depth > 0);
    put_json_bytes(json, &json->closers[--json->depth], 1);
    json->has_members = true;
}

void kit_json_free(kit_json *json) {
    (void)fclose(json->file);
    free(json->text);
    free(json);
}

int kit_json_print(kit_json *json) {
    while (json->depth > 0) kit_json_close(json);
    put_json_bytes(json, "\n", 1);
    bool good = fflush(json->file) == 0 && ferror(json->file) == 0;
    good = good && fwrite(json->text, 1, json->n_bytes, stdout) == json->n_bytes && fflush(stdout) == 0;
    int reason = errno;
    kit_json_free(json);
    return good ? EXIT_GOOD : kit_fail(EXIT_FAILED, "cannot write the JSON to standard output: %s", strerror(reason));
}

void kit_json_bytes(kit_json *json, const char *key, const char *bytes, size_t n) {
    before_value(json, key);
    put_json_string(json, bytes, n);
}

void kit_json_text(kit_json *json, const char *key, const char *text) { kit_json_bytes(json, key, text, strlen(text)); }

void kit_json_integer(kit_json *json, const char *key, uint64_t value) {
    char text[24];
    before_value(json, key);
    put_json_bytes(json, text, (size_t)snprintf(text, sizeof text, "%" PRIu64, value));
}

void kit_json_real(kit_json *json, const char *key, double value) {
    char text[32] = "null";
    before_value(json, key);
    if (isfinite(value)) (void)snprintf(text, sizeof text, "%.9g", value);
    put_json_bytes(json, text, strlen(text));
}

void kit_json_bool(kit_json *json, const char *key, bool value) {
    before_value(json, key);
    put_json_bytes(json, value ? "true" : "false", value ? 4 : 5);
}
