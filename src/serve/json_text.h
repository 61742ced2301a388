/* Validates a JSON object byte by byte, to constrain generated text in builds without llguidance.
 *
 * The accepted language is a subset of JSON in which a model cannot loop on whitespace, digits or brackets: one space may follow
 * each colon and comma, numbers have at most JSON_TEXT_MAX_NUMBER bytes and two exponent digits, and containers are nested at
 * most JSON_TEXT_MAX_DEPTH deep. Strings are valid UTF-8 and contain no escaped surrogates. Every accepted text is a prefix of a
 * valid JSON object.
 */
#ifndef FKV_SERVE_JSON_TEXT_H
#define FKV_SERVE_JSON_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum { JSON_TEXT_MAX_DEPTH = 64, JSON_TEXT_MAX_NUMBER = 20 };

/* State of the validator. It has no pointers and may be copied. */
typedef struct json_text {
    uint64_t arrays; /* bit i is set if the container at depth i + 1 is an array */
    uint8_t depth;
    uint8_t state;
    uint8_t count; /* counter whose meaning depends on the state: leading spaces left, bytes of a number or literal, hexadecimal
                      digits, or UTF-8 continuation bytes */
    uint8_t low;   /* smallest allowed value of the next UTF-8 continuation byte */
    uint8_t high;
    uint8_t word; /* index of the literal: true, false or null */
    bool in_key;  /* true if the current string is an object key */
} json_text;

/* Returns the state before the first byte. max_spaces: maximum number of spaces or line breaks before the object. */
json_text json_text_begin(uint8_t max_spaces);

/* Processes the next byte. Returns false if the text including this byte is not a prefix of an accepted object; the state is then
 * undefined. */
bool json_text_add(json_text *t, unsigned char byte);

/* Returns true if the object is complete. No further byte is then accepted. */
bool json_text_complete(const json_text *t);

#endif
