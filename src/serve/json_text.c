/* See json_text.h. The states form a pushdown automaton whose stack is the bit set `arrays`. */
#include "json_text.h"

#include <string.h>

enum {
    STATE_START,
    STATE_FIRST_KEY,   /* after { */
    STATE_AFTER_COMMA, /* of an object */
    STATE_KEY,
    STATE_COLON,
    STATE_VALUE_OR_SPACE,
    STATE_VALUE,
    STATE_FIRST_ITEM, /* after [ */
    STATE_AFTER_VALUE,
    STATE_STRING,
    STATE_CONTINUATION, /* inside a UTF-8 character */
    STATE_ESCAPE,
    STATE_HEX,
    STATE_LITERAL,
    STATE_MINUS,
    STATE_ZERO,
    STATE_INTEGER,
    STATE_POINT,
    STATE_FRACTION,
    STATE_E,
    STATE_EXPONENT_SIGN,
    STATE_EXPONENT,
    STATE_DONE
};

static const char *const WORDS[] = {"true", "false", "null"};
enum { N_WORDS = 3, MAX_EXPONENT_DIGITS = 2 };

json_text json_text_begin(uint8_t max_spaces) { return (json_text){.state = STATE_START, .count = max_spaces}; }

bool json_text_complete(const json_text *t) { return t->state == STATE_DONE; }

static bool go(json_text *t, uint8_t state) {
    t->state = state;
    return true;
}

static bool is_digit(unsigned char byte) { return byte >= '0' && byte <= '9'; }

/* ---- containers ---- */

static bool in_array(const json_text *t) { return t->arrays >> (t->depth - 1) & 1; }

static bool open_container(json_text *t, bool array) {
    if (t->depth == JSON_TEXT_MAX_DEPTH) return false;
    const uint64_t bit = UINT64_C(1) << t->depth++;
    t->arrays = array ? t->arrays | bit : t->arrays & ~bit;
    return go(t, array ? STATE_FIRST_ITEM : STATE_FIRST_KEY);
}

static bool close_container(json_text *t) { return go(t, --t->depth == 0 ? STATE_DONE : STATE_AFTER_VALUE); }

static bool add_after_value(json_text *t, unsigned char byte) {
    if (byte == ',') return go(t, in_array(t) ? STATE_VALUE_OR_SPACE : STATE_AFTER_COMMA);
    return byte == (in_array(t) ? ']' : '}') && close_container(t);
}

/* ---- strings ---- */

static bool begin_string(json_text *t, bool key) {
    t->in_key = key;
    return go(t, STATE_STRING);
}

/* Processes the first byte of a multi-byte UTF-8 character. The range of the second byte excludes overlong forms, surrogates and
 * characters above U+10FFFF. */
static bool begin_character(json_text *t, unsigned char byte) {
    if (byte < 0xc2 || byte > 0xf4) return false;
    t->count = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    t->low = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    t->high = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    return go(t, STATE_CONTINUATION);
}

static bool add_to_string(json_text *t, unsigned char byte) {
    if (byte == '"') return go(t, t->in_key ? STATE_COLON : STATE_AFTER_VALUE);
    if (byte == '\\') return go(t, STATE_ESCAPE);
    if (byte >= 0x80) return begin_character(t, byte);
    return byte >= 0x20 && byte != 0x7f;
}

static bool add_continuation(json_text *t, unsigned char byte) {
    if (byte < t->low || byte > t->high) return false;
    t->low = 0x80;
    t->high = 0xbf;
    return --t->count > 0 || go(t, STATE_STRING);
}

static bool add_escape(json_text *t, unsigned char byte) {
    if (byte == 'u') {
        t->count = 0;
        t->high = 0;
        return go(t, STATE_HEX);
    }
    return byte != 0 && strchr("\"\\/bfnrt", byte) != NULL && go(t, STATE_STRING);
}

/* Processes a digit of the escape sequence \uXXXX. Rejects escaped NULs and surrogates (D800 to DFFF). `high` is 1 if any digit
 * so far was not 0. */
static bool add_hex(json_text *t, unsigned char byte) {
    const unsigned char lower = (unsigned char)(byte | 0x20);
    const bool letter = lower >= 'a' && lower <= 'f';
    if (!is_digit(byte) && !letter) return false;
    if (t->count == 1 && t->low == 'd' && (letter || byte >= '8')) return false;
    if (t->count == 0) t->low = letter ? lower : byte;
    if (byte != '0') t->high = 1;
    if (++t->count < 4) return true;
    return t->high != 0 && go(t, STATE_STRING);
}

/* ---- other values ---- */

static bool begin_value(json_text *t, unsigned char byte) {
    t->count = 1;
    if (byte == '{' || byte == '[') return open_container(t, byte == '[');
    if (byte == '"') return begin_string(t, false);
    if (byte == '-') return go(t, STATE_MINUS);
    if (is_digit(byte)) return go(t, byte == '0' ? STATE_ZERO : STATE_INTEGER);
    for (int i = 0; i < N_WORDS; i++) {
        if (byte != (unsigned char)WORDS[i][0]) continue;
        t->word = (uint8_t)i;
        return go(t, STATE_LITERAL);
    }
    return false;
}

static bool add_to_literal(json_text *t, unsigned char byte) {
    const char *word = WORDS[t->word];
    if (byte != (unsigned char)word[t->count]) return false;
    return word[++t->count] != 0 || go(t, STATE_AFTER_VALUE);
}

static bool add_digit(json_text *t, unsigned char byte, uint8_t state, uint8_t max) {
    if (!is_digit(byte) || t->count >= max) return false;
    t->count++;
    return go(t, state);
}

/* Processes the byte after a digit of a number. The byte is another digit, a decimal point or the letter e, or it ends the
 * number. */
static bool add_to_number(json_text *t, unsigned char byte) {
    const bool fraction = t->state == STATE_FRACTION;
    if (t->state == STATE_EXPONENT && is_digit(byte)) return add_digit(t, byte, STATE_EXPONENT, MAX_EXPONENT_DIGITS);
    if (t->state == STATE_INTEGER || fraction)
        if (is_digit(byte)) return add_digit(t, byte, t->state, JSON_TEXT_MAX_NUMBER);
    if (byte == '.' && (t->state == STATE_ZERO || t->state == STATE_INTEGER) && t->count < JSON_TEXT_MAX_NUMBER) {
        return go(t, STATE_POINT);
    }
    if ((byte | 0x20) == 'e' && t->state != STATE_EXPONENT) {
        t->count = 0; /* in the exponent, `count` is the number of exponent digits */
        return go(t, STATE_E);
    }
    return add_after_value(t, byte);
}

bool json_text_add(json_text *t, unsigned char byte) {
    switch (t->state) {
    case STATE_START:
        if (byte == '{') return open_container(t, false);
        if ((byte != ' ' && byte != '\n') || t->count == 0) return false;
        t->count--;
        return true;
    case STATE_FIRST_KEY: return byte == '}' ? close_container(t) : byte == '"' && begin_string(t, true);
    case STATE_AFTER_COMMA: return byte == ' ' ? go(t, STATE_KEY) : byte == '"' && begin_string(t, true);
    case STATE_KEY: return byte == '"' && begin_string(t, true);
    case STATE_COLON: return byte == ':' && go(t, STATE_VALUE_OR_SPACE);
    case STATE_VALUE_OR_SPACE: return byte == ' ' ? go(t, STATE_VALUE) : begin_value(t, byte);
    case STATE_VALUE: return begin_value(t, byte);
    case STATE_FIRST_ITEM: return byte == ']' ? close_container(t) : begin_value(t, byte);
    case STATE_AFTER_VALUE: return add_after_value(t, byte);
    case STATE_STRING: return add_to_string(t, byte);
    case STATE_CONTINUATION: return add_continuation(t, byte);
    case STATE_ESCAPE: return add_escape(t, byte);
    case STATE_HEX: return add_hex(t, byte);
    case STATE_LITERAL: return add_to_literal(t, byte);
    case STATE_MINUS: return is_digit(byte) && go(t, byte == '0' ? STATE_ZERO : STATE_INTEGER);
    case STATE_POINT: return add_digit(t, byte, STATE_FRACTION, JSON_TEXT_MAX_NUMBER);
    case STATE_E:
        if (byte == '+' || byte == '-') return go(t, STATE_EXPONENT_SIGN);
        return add_digit(t, byte, STATE_EXPONENT, MAX_EXPONENT_DIGITS);
    case STATE_EXPONENT_SIGN: return add_digit(t, byte, STATE_EXPONENT, MAX_EXPONENT_DIGITS);
    case STATE_ZERO:
    case STATE_INTEGER:
    case STATE_FRACTION:
    case STATE_EXPONENT: return add_to_number(t, byte);
    default: return false;
    }
}
