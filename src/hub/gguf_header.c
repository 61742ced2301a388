/* See gguf_header.h. */
#include "gguf_header.h"

#include <stdbool.h>
#include <string.h>

enum { MAX_DIMENSIONS = 8, TYPE_STRING = 8, TYPE_ARRAY = 9 };

/* Size of each GGUF value type, in bytes; 0 for strings and arrays. */
static const uint8_t TYPE_BYTES[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

typedef struct reader {
    const uint8_t *bytes;
    size_t n;
    size_t at;
    gguf_header state; /* parsing result; GGUF_HEADER_COMPLETE until a read fails */
} reader;

/* Advances by `count` bytes. Returns false if fewer bytes are left. The count comes from the file and may have any value. */
static bool skip_bytes(reader *r, uint64_t count) {
    if (r->state == GGUF_HEADER_COMPLETE && count > r->n - r->at) r->state = GGUF_HEADER_TRUNCATED;
    if (r->state != GGUF_HEADER_COMPLETE) return false;
    r->at += (size_t)count;
    return true;
}

/* Reads a little-endian integer of `size` bytes. Returns 0 if the integer cannot be read. */
static uint64_t read_integer(reader *r, unsigned size) {
    uint64_t value = 0;
    size_t at = r->at;
    if (!skip_bytes(r, size)) return 0;
    for (unsigned i = 0; i < size; i++) value |= (uint64_t)r->bytes[at + i] << (8 * i);
    return value;
}

static bool skip_string(reader *r) { return skip_bytes(r, read_integer(r, 8)) && r->state == GGUF_HEADER_COMPLETE; }

static void fail(reader *r) {
    if (r->state == GGUF_HEADER_COMPLETE) r->state = GGUF_HEADER_INVALID;
}

static void skip_array(reader *r) {
    uint64_t type = read_integer(r, 4);
    uint64_t count = read_integer(r, 8);
    if (r->state != GGUF_HEADER_COMPLETE) return;
    if (type == TYPE_STRING) {
        for (uint64_t i = 0; i < count && skip_string(r); i++) continue;
    } else if (type < sizeof TYPE_BYTES && TYPE_BYTES[type] > 0) {
        (void)skip_bytes(r, count > UINT64_MAX / 8 ? UINT64_MAX : count * TYPE_BYTES[type]);
    } else {
        fail(r); /* nested arrays do not occur in model files */
    }
}

static void skip_value(reader *r) {
    uint64_t type = read_integer(r, 4);
    if (r->state != GGUF_HEADER_COMPLETE) return;
    if (type == TYPE_STRING)
        (void)skip_string(r);
    else if (type == TYPE_ARRAY)
        skip_array(r);
    else if (type < sizeof TYPE_BYTES)
        (void)skip_bytes(r, TYPE_BYTES[type]);
    else
        fail(r);
}

static void skip_tensor(reader *r) {
    if (!skip_string(r)) return;
    uint64_t n_dims = read_integer(r, 4);
    if (n_dims > MAX_DIMENSIONS) fail(r);
    (void)skip_bytes(r, n_dims * 8 + 4 + 8); /* shape, type, offset */
}

gguf_header gguf_header_end(const uint8_t *bytes, size_t n, size_t *end) {
    reader r = {.bytes = bytes, .n = n};
    if (n >= 4 && memcmp(bytes, "GGUF", 4) != 0) return GGUF_HEADER_INVALID;
    (void)skip_bytes(&r, 4);
    uint64_t version = read_integer(&r, 4);
    if (r.state == GGUF_HEADER_COMPLETE && (version < 2 || version > 3)) return GGUF_HEADER_INVALID;
    uint64_t n_tensors = read_integer(&r, 8);
    uint64_t n_values = read_integer(&r, 8);
    for (uint64_t i = 0; i < n_values && r.state == GGUF_HEADER_COMPLETE; i++)
        if (skip_string(&r)) skip_value(&r);
    for (uint64_t i = 0; i < n_tensors && r.state == GGUF_HEADER_COMPLETE; i++) skip_tensor(&r);
    *end = r.at;
    return r.state;
}
