/* Reads the files of test vectors written by scripts/make-*-vectors, which contain a sequence of integers and arrays. */
#ifndef FKV_VECTOR_READER_H
#define FKV_VECTOR_READER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const uint8_t *bytes;
    size_t left;
} reader;

static inline const uint8_t *take(reader *from, size_t n) {
    if (n > from->left) {
        printf("the vector file is too short\n");
        exit(EXIT_FAILURE);
    }
    const uint8_t *taken = from->bytes;
    from->bytes += n;
    from->left -= n;
    return taken;
}

static inline uint32_t take_u32(reader *from) {
    uint32_t value;
    memcpy(&value, take(from, sizeof value), sizeof value);
    return value;
}

#endif
