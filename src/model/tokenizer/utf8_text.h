/* Characters of UTF-8, and text from anywhere made into UTF-8 that PCRE2 takes.
 */
#ifndef FKV_UTF8_TEXT_H
#define FKV_UTF8_TEXT_H

#include "../../base/base.h"

/* Reads one character of any form of UTF-8 that has one; 0 bytes: none begins here. Long forms and surrogates are read.
 * n_bytes > 0. */
uint32_t fkv_character_read(const char *text, size_t n_bytes, uint32_t *character);
uint32_t fkv_character_write(uint32_t character, char *out); /* out: [4]; how many were written */

/* The last character of a text: where it starts. n_bytes > 0; the text is UTF-8. */
size_t fkv_character_before(const char *text, size_t n_bytes);

/* Every character has its shortest form. Surrogates pass. */
bool fkv_utf8_is_whole(const char *text, size_t n_bytes);

/* What is read as a character is written in its shortest form, a byte that begins none becomes U+FFFD, as llama.cpp does.
 * out: [3 n_bytes]. Returns how many were written. */
size_t fkv_utf8_mend(const char *from, size_t n_bytes, char *out);

/* False: PCRE2 must see fkv_utf8_seen() of the text, as long as the text and cut at the same places, since its tables are too old
 * for some character or it takes it for no text. The text is whole. */
bool fkv_utf8_is_seen_as_is(const char *text, size_t n_bytes);
void fkv_utf8_seen(const char *text, size_t n_bytes, char *out);

/* Of Unicode: White_Space; letters, marks, decimal digits and connectors. */
bool fkv_is_space_character(uint32_t character);
bool fkv_is_word_character(uint32_t character);

#endif
