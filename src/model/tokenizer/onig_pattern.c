/* See onig_pattern.h.
 *
 * White space is spelled out: \s of PCRE2 has U+180E in it, Oniguruma's does not. So are word characters. ^ and $ are those of
 * lines there (PCRE2_MULTILINE). Nested classes, intersections and POSIX names in brackets are refused, and so is a + behind
 * {n,m}: it repeats there and makes the repeat possessive here.
 */
#include "onig_pattern.h"

#define SPACE "\\t-\\r\\x{85}\\p{Z}"
#define WORD "\\p{L}\\p{M}\\p{Nd}\\p{Pc}"

typedef struct rewriting {
    fkv_bytes from;
    size_t at;
    char *out;
    size_t n_out, capacity;
    bool in_class;
} rewriting;

static fkv_status refuse(const rewriting *r, const char *why) {
    return fkv_fail(FKV_UNSUPPORTED, "the pattern \"%s\" has %s at byte %zu, which is not supported", fkv_show(r->from).text, why,
                    r->at);
}

static fkv_status put(rewriting *r, const char *text, size_t n) {
    FKV_REQUIRE(n < r->capacity - r->n_out, FKV_UNSUPPORTED, "the pattern \"%s\" has %zu bytes, which is too long",
                fkv_show(r->from).text, r->from.size);
    memcpy(r->out + r->n_out, text, n);
    r->n_out += n;
    r->out[r->n_out] = 0;
    return FKV_OK;
}

static fkv_status put_text(rewriting *r, const char *text) { return put(r, text, strlen(text)); }

static char peek(const rewriting *r, size_t ahead) { return ahead < r->from.size - r->at ? r->from.data[r->at + ahead] : 0; }

/* A class of ours in place of \s and the like. */
static fkv_status put_class(rewriting *r, const char *members, bool negated) {
    if (r->in_class) return negated ? refuse(r, "a negated class inside a class") : put_text(r, members);
    FKV_TRY(put_text(r, negated ? "[^" : "["));
    FKV_TRY(put_text(r, members));
    return put_text(r, "]");
}

static bool is_any_of(char c, const char *these) { return c != 0 && strchr(these, c) != NULL; }

static bool is_hex(char c) { return is_any_of(c, "0123456789abcdefABCDEF"); }

/* \uHHHH is \x{HHHH} here. */
static fkv_status put_code_point(rewriting *r) {
    for (size_t i = 2; i < 6; i++)
        if (!is_hex(peek(r, i))) return refuse(r, "a \\u without four digits");
    FKV_TRY(put_text(r, "\\x{"));
    FKV_TRY(put(r, r->from.data + r->at + 2, 4));
    r->at += 6;
    return put_text(r, "}");
}

static fkv_status put_escape(rewriting *r) {
    char c = peek(r, 1);
    if (c == 'u') return put_code_point(r);
    r->at += 2;
    switch (c) {
    case 's': return put_class(r, SPACE, false);
    case 'S':
        if (r->in_class) return put_text(r, "\\S"); /* and U+180E, which is in neither here and in both there */
        return put_class(r, SPACE, true);
    case 'w': return put_class(r, WORD, false);
    case 'W': return put_class(r, WORD, true);
    default: break;
    }
    r->at -= 2;
    bool known = is_any_of(c, "pPdDrntfxb") ||
                 (c > 0 && c < 0x7f && !is_any_of(c, "0123456789") && is_any_of(c, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ "));
    if (!known) return refuse(r, "an escape");
    if (c == 'b' && r->in_class) return refuse(r, "a \\b inside a class");
    size_t n = 2;
    if (is_any_of(c, "pPx") && peek(r, 2) == '{') { /* a name or a number in braces */
        const char *end = memchr(r->from.data + r->at, '}', r->from.size - r->at);
        if (end == NULL) return refuse(r, "an open brace");
        n = (size_t)(end - (r->from.data + r->at)) + 1;
    }
    FKV_TRY(put(r, r->from.data + r->at, n));
    r->at += n;
    return FKV_OK;
}

static fkv_status put_in_class(rewriting *r) {
    char c = peek(r, 0);
    if (c == '[') return refuse(r, "a class inside a class");
    if (c == '&' && peek(r, 1) == '&') return refuse(r, "an intersection of classes");
    if (c == ']') r->in_class = false;
    r->at++;
    return put(r, &c, 1);
}

static fkv_status put_class_start(rewriting *r) {
    size_t n = peek(r, 1) == '^' ? 2 : 1;
    if (peek(r, n) == ']') return refuse(r, "a class that begins with ]");
    FKV_TRY(put(r, r->from.data + r->at, n));
    r->at += n;
    r->in_class = true;
    return FKV_OK;
}

/* Of what begins with (? only plain groups, looks around and the option i mean the same. */
static fkv_status put_group(rewriting *r) {
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i)", "(?i:"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t n = strlen(known[i]);
        if (r->from.size - r->at < n || memcmp(r->from.data + r->at, known[i], n) != 0) continue;
        r->at += n;
        return put(r, known[i], n);
    }
    return refuse(r, "a group");
}

static fkv_status put_next(rewriting *r) {
    char c = peek(r, 0);
    if (c == 0) return refuse(r, "a byte of 0");
    if (c == '\\') return put_escape(r);
    if (r->in_class) return put_in_class(r);
    if (c == '[') return put_class_start(r);
    if (c == '(' && peek(r, 1) == '?') return put_group(r);
    if (c == '(' && peek(r, 1) == '*') return refuse(r, "a verb");
    if (c == '}' && peek(r, 1) == '+') return refuse(r, "a + behind {n,m}");
    r->at++;
    return put(r, &c, 1);
}

fkv_status fkv_onig_pattern(fkv_bytes pattern, char *out, size_t capacity) {
    rewriting r = {.from = pattern, .out = out, .capacity = capacity};
    static const char at_line_end[] = "\\s+$";
    out[0] = 0;
    /* From each place of a run this looks to its end, so only the first place of a run is tried: no other one can be found. */
    if (pattern.size == sizeof at_line_end - 1 && memcmp(pattern.data, at_line_end, pattern.size) == 0)
        return put_text(&r, "(?<![" SPACE "])[" SPACE "]+$");
    while (r.at < pattern.size) FKV_TRY(put_next(&r));
    return FKV_OK;
}
