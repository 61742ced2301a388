/* See utf8_text.h. */
#include "utf8_text.h"

#include <utf8proc.h>

uint32_t fkv_character_read(const char *text, size_t n_bytes, uint32_t *character) {
    const uint8_t *bytes = (const uint8_t *)text;
    uint32_t n = bytes[0] < 0x80 ? 1 : bytes[0] < 0xc0 ? 0 : bytes[0] < 0xe0 ? 2 : bytes[0] < 0xf0 ? 3 : bytes[0] < 0xf8 ? 4 : 0;
    if (n == 0 || n > n_bytes) return 0;
    *character = n == 1 ? bytes[0] : bytes[0] & (0x7fu >> n);
    for (uint32_t i = 1; i < n; i++) {
        if ((bytes[i] & 0xc0) != 0x80) return 0;
        *character = *character << 6 | (bytes[i] & 0x3fu);
    }
    return *character <= 0x10ffff ? n : 0;
}

static uint32_t character_size(uint32_t character) {
    return character < 0x80 ? 1 : character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
}

uint32_t fkv_character_write(uint32_t character, char *out) {
    static const uint8_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    uint32_t n = character_size(character);
    for (uint32_t i = n; i-- > 1; character >>= 6) out[i] = (char)(0x80 | (character & 0x3f));
    out[0] = (char)(lead[n] | character);
    return n;
}

size_t fkv_character_before(const char *text, size_t n_bytes) {
    size_t at = n_bytes - 1;
    while (at > 0 && n_bytes - at < 4 && ((uint8_t)text[at] & 0xc0) == 0x80) at--;
    return at;
}

/* Returns whether the text starts with eight ASCII bytes. */
static bool eight_are_ascii(const char *text, size_t n_bytes) {
    uint64_t eight = 0;
    if (n_bytes < 8) return false;
    memcpy(&eight, text, 8);
    return (eight & UINT64_C(0x8080808080808080)) == 0;
}

bool fkv_utf8_is_valid(const char *text, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes;) {
        if (eight_are_ascii(text + at, n_bytes - at)) {
            at += 8;
            continue;
        }
        uint32_t character = 0;
        uint32_t n = fkv_character_read(text + at, n_bytes - at, &character);
        if (n == 0 || n != character_size(character)) return false;
        at += n;
    }
    return true;
}

size_t fkv_utf8_repair(const char *from, size_t n_bytes, char *out) {
    size_t n = 0;
    for (size_t at = 0; at < n_bytes;) {
        uint32_t character = 0;
        uint32_t step = fkv_character_read(from + at, n_bytes - at, &character);
        if (step == 0) {
            character = 0xfffd;
            step = 1;
        }
        n += fkv_character_write(character, out + n);
        at += step;
    }
    return n;
}

/* ---- text for PCRE2 ----------------------------------------------------------------------------------------- */

/* A range of characters that are replaced before PCRE2 matches a text: letters and numbers of Unicode 15.1 that may be missing
 * from the tables of PCRE2, and surrogates, which PCRE2 rejects. */
typedef struct substitute_range {
    uint32_t first, last;
    uint32_t character; /* substitute character with the same UTF-8 length and the same character class */
} substitute_range;

enum { SOME_LETTER = 0x20000, SOME_NUMBER = 0x1d7ce, OTHER = 0xe000 };

static const substitute_range SUBSTITUTES[] = {
    {0xd800, 0xdfff, OTHER},         {0x1123f, 0x11240, SOME_LETTER}, {0x11f02, 0x11f02, SOME_LETTER},
    {0x11f04, 0x11f10, SOME_LETTER}, {0x11f12, 0x11f33, SOME_LETTER}, {0x11f50, 0x11f59, SOME_NUMBER},
    {0x1342f, 0x1342f, SOME_LETTER}, {0x13441, 0x13446, SOME_LETTER}, {0x1b132, 0x1b132, SOME_LETTER},
    {0x1b155, 0x1b155, SOME_LETTER}, {0x1d2c0, 0x1d2d3, SOME_NUMBER}, {0x1df25, 0x1df2a, SOME_LETTER},
    {0x1e030, 0x1e06d, SOME_LETTER}, {0x1e4d0, 0x1e4eb, SOME_LETTER}, {0x1e4f0, 0x1e4f9, SOME_NUMBER},
    {0x2b739, 0x2b739, SOME_LETTER}, {0x2ebf0, 0x2ee5d, SOME_LETTER}, {0x31350, 0x323af, SOME_LETTER},
};

static uint32_t substitute_of(uint32_t character) {
    for (size_t i = 0; i < sizeof SUBSTITUTES / sizeof SUBSTITUTES[0] && character >= SUBSTITUTES[i].first; i++) {
        if (character <= SUBSTITUTES[i].last) return SUBSTITUTES[i].character;
    }
    return character;
}

bool fkv_utf8_is_pcre_text(const char *text, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes;) {
        uint8_t lead = (uint8_t)text[at];
        if (lead < 0xed) { /* below U+D000 */
            at += eight_are_ascii(text + at, n_bytes - at) ? 8 : lead < 0x80 ? 1 : lead < 0xe0 ? 2 : 3;
            continue;
        }
        uint32_t character = 0;
        uint32_t n = fkv_character_read(text + at, n_bytes - at, &character);
        FKV_ASSERT(n > 0);
        if (substitute_of(character) != character) return false;
        at += n;
    }
    return true;
}

void fkv_utf8_pcre_text(const char *text, size_t n_bytes, char *out) {
    for (size_t at = 0; at < n_bytes;) {
        uint32_t character = 0;
        uint32_t n = fkv_character_read(text + at, n_bytes - at, &character);
        FKV_ASSERT(n > 0);
        uint32_t written = fkv_character_write(substitute_of(character), out + at);
        FKV_ASSERT(written == n);
        (void)written;
        at += n;
    }
}

/* ---- classes ------------------------------------------------------------------------------------------------- */

bool fkv_is_space_character(uint32_t character) {
    if (character < 0x80) return character == ' ' || (character >= '\t' && character <= '\r');
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)character);
    return character == 0x85 || category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
           category == UTF8PROC_CATEGORY_ZP;
}

bool fkv_is_word_character(uint32_t character) {
    switch (utf8proc_category((utf8proc_int32_t)character)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
    }
}
