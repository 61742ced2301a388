/* See onig_pattern.h.
 *
 * \s and \w are replaced with explicit character classes, because they differ between the two libraries. For example, \s includes
 * U+180E in PCRE2 but not in Oniguruma. ^ and $ match at line boundaries, which requires PCRE2_MULTILINE. Nested classes, class
 * intersections and POSIX class names are rejected. A '+' after {n,m} is rejected as well, because it means repetition in
 * Oniguruma but makes the quantifier possessive in PCRE2.
 */
#include "onig_pattern.h"

#define SPACE "\\t-\\r\\x{85}\\p{Z}"
#define WORD "\\p{L}\\p{M}\\p{Nd}\\p{Pc}"

typedef struct translation {
    fkv_bytes from;
    size_t at;
    char *out;
    size_t n_out, capacity;
    bool in_class;
} translation;

static fkv_status fail_unsupported_syntax(const translation *r, const char *why) {
    return fkv_fail(FKV_UNSUPPORTED, "the pattern \"%s\" is not supported: %s (at byte %zu)", fkv_show(r->from).text, why, r->at);
}

static fkv_status append_pattern(translation *r, const char *text, size_t n) {
    FKV_REQUIRE(n < r->capacity - r->n_out, FKV_UNSUPPORTED, "the pattern \"%s\" is too long (%zu bytes)", fkv_show(r->from).text,
                r->from.size);
    memcpy(r->out + r->n_out, text, n);
    r->n_out += n;
    r->out[r->n_out] = 0;
    return FKV_OK;
}

static fkv_status append_pattern_text(translation *r, const char *text) { return append_pattern(r, text, strlen(text)); }

static char peek_pattern(const translation *r, size_t ahead) {
    return ahead < r->from.size - r->at ? r->from.data[r->at + ahead] : 0;
}

/* Writes the character class that replaces \s or \w. */
static fkv_status put_class(translation *r, const char *members, bool negated) {
    if (r->in_class)
        return negated ? fail_unsupported_syntax(r, "negated character class inside a character class")
                       : append_pattern_text(r, members);
    FKV_TRY(append_pattern_text(r, negated ? "[^" : "["));
    FKV_TRY(append_pattern_text(r, members));
    return append_pattern_text(r, "]");
}

static bool is_one_of(char c, const char *these) { return c != 0 && strchr(these, c) != NULL; }

static bool is_hex_digit(char c) { return is_one_of(c, "0123456789abcdefABCDEF"); }

/* Translates \uHHHH to \x{HHHH}. */
static fkv_status put_code_point(translation *r) {
    for (size_t i = 2; i < 6; i++)
        if (!is_hex_digit(peek_pattern(r, i))) return fail_unsupported_syntax(r, "\\u without four hexadecimal digits");
    FKV_TRY(append_pattern_text(r, "\\x{"));
    FKV_TRY(append_pattern(r, r->from.data + r->at + 2, 4));
    r->at += 6;
    return append_pattern_text(r, "}");
}

static fkv_status put_escape(translation *r) {
    char c = peek_pattern(r, 1);
    if (c == 'u') return put_code_point(r);
    r->at += 2;
    switch (c) {
    case 's': return put_class(r, SPACE, false);
    case 'S':
        if (r->in_class) return append_pattern_text(r, "\\S"); /* inexact: PCRE2 treats U+180E as a space */
        return put_class(r, SPACE, true);
    case 'w': return put_class(r, WORD, false);
    case 'W': return put_class(r, WORD, true);
    default: break;
    }
    r->at -= 2;
    bool known = is_one_of(c, "pPdDrntfxb") ||
                 (c > 0 && c < 0x7f && !is_one_of(c, "0123456789") && is_one_of(c, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ "));
    if (!known) return fail_unsupported_syntax(r, "escape sequence that may have a different meaning in PCRE2");
    if (c == 'b' && r->in_class) return fail_unsupported_syntax(r, "\\b inside a character class");
    size_t n = 2;
    if (is_one_of(c, "pPx") && peek_pattern(r, 2) == '{') { /* a name or a code point in braces follows the escape */
        const char *end = memchr(r->from.data + r->at, '}', r->from.size - r->at);
        if (end == NULL) return fail_unsupported_syntax(r, "opening brace without a closing brace");
        n = (size_t)(end - (r->from.data + r->at)) + 1;
    }
    FKV_TRY(append_pattern(r, r->from.data + r->at, n));
    r->at += n;
    return FKV_OK;
}

static fkv_status put_in_class(translation *r) {
    char c = peek_pattern(r, 0);
    if (c == '[') return fail_unsupported_syntax(r, "character class inside a character class");
    if (c == '&' && peek_pattern(r, 1) == '&') return fail_unsupported_syntax(r, "intersection of character classes");
    if (c == ']') r->in_class = false;
    r->at++;
    return append_pattern(r, &c, 1);
}

static fkv_status put_class_start(translation *r) {
    size_t n = peek_pattern(r, 1) == '^' ? 2 : 1;
    if (peek_pattern(r, n) == ']') return fail_unsupported_syntax(r, "character class that begins with ']'");
    FKV_TRY(append_pattern(r, r->from.data + r->at, n));
    r->at += n;
    r->in_class = true;
    return FKV_OK;
}

/* Copies a group that starts with "(?". Only plain groups, lookarounds and the option i have the same meaning in Oniguruma and
 * PCRE2. */
static fkv_status put_group(translation *r) {
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i)", "(?i:"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t n = strlen(known[i]);
        if (r->from.size - r->at < n || memcmp(r->from.data + r->at, known[i], n) != 0) continue;
        r->at += n;
        return append_pattern(r, known[i], n);
    }
    return fail_unsupported_syntax(r, "unsupported kind of group");
}

static fkv_status put_next(translation *r) {
    char c = peek_pattern(r, 0);
    if (c == 0) return fail_unsupported_syntax(r, "zero byte in the pattern");
    if (c == '\\') return put_escape(r);
    if (r->in_class) return put_in_class(r);
    if (c == '[') return put_class_start(r);
    if (c == '(' && peek_pattern(r, 1) == '?') return put_group(r);
    if (c == '(' && peek_pattern(r, 1) == '*') return fail_unsupported_syntax(r, "PCRE2 verb, which starts with (*");
    if (c == '}' && peek_pattern(r, 1) == '+') return fail_unsupported_syntax(r, "unsupported possessive quantifier {n,m}+");
    r->at++;
    return append_pattern(r, &c, 1);
}

fkv_status fkv_onig_pattern(fkv_bytes pattern, char *out, size_t capacity) {
    translation r = {.from = pattern, .out = out, .capacity = capacity};
    static const char at_line_end[] = "\\s+$";
    out[0] = 0;
    /* The pattern \s+$ takes quadratic time, because it scans to the end of a run of spaces from every position in the run. A
     * match always starts at the first position of a run, so the replacement tries only this position. */
    if (pattern.size == sizeof at_line_end - 1 && memcmp(pattern.data, at_line_end, pattern.size) == 0)
        return append_pattern_text(&r, "(?<![" SPACE "])[" SPACE "]+$");
    while (r.at < pattern.size) FKV_TRY(put_next(&r));
    return FKV_OK;
}
