/* UTF-8 decoding and encoding, and conversion of arbitrary bytes to UTF-8 that PCRE2 accepts. */
#ifndef FKV_UTF8_TEXT_H
#define FKV_UTF8_TEXT_H

#include "../../base/base.h"

/* Reads one character and returns its length in bytes, or 0 if the text does not start with a character. Accepts overlong forms
 * and surrogates. n_bytes > 0. */
uint32_t fkv_character_read(const char *text, size_t n_bytes, uint32_t *character);
uint32_t fkv_character_write(uint32_t character, char *out); /* writes 1 to 4 bytes and returns their number */

/* Returns the offset of the last character of a UTF-8 text. n_bytes > 0. */
size_t fkv_character_before(const char *text, size_t n_bytes);

/* Returns whether the text is UTF-8 without overlong forms. Surrogates are accepted. */
bool fkv_utf8_is_valid(const char *text, size_t n_bytes);

/* Writes every character in its shortest form, and U+FFFD for each byte that does not start a character, as llama.cpp does. out:
 * [3 * n_bytes]. Returns the number of bytes written. */
size_t fkv_utf8_repair(const char *from, size_t n_bytes, char *out);

/* fkv_utf8_is_pcre_text() returns whether PCRE2 can match a valid text directly. This is not the case if PCRE2 rejects a
 * character of the text or if the character may be missing from PCRE2's Unicode tables. fkv_utf8_pcre_text() then writes a
 * substitute text with the same length and the same character boundaries. out: [n_bytes]. */
bool fkv_utf8_is_pcre_text(const char *text, size_t n_bytes);
void fkv_utf8_pcre_text(const char *text, size_t n_bytes, char *out);

/* Return whether a character is white space (Unicode property White_Space) or a word character (letter, mark, decimal digit or
 * connector). */
bool fkv_is_space_character(uint32_t character);
bool fkv_is_word_character(uint32_t character);

#endif
