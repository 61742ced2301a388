/* Lexer for templates. See jinja_syntax.h.
 *
 * White space control: a block tag or comment removes the blanks before it on the same line, and the newline after it. A "-" at
 * the start or end of a tag removes all white space before or after the tag; a "+" keeps the white space. The final newline of
 * the template is dropped.
 */
#include "jinja_syntax.h"

typedef struct lexer {
    jinja_context *c;
    const char *text;
    size_t n_bytes, at;
    uint32_t line;
    bool line_starts; /* true at the start of the template or after a newline */
    jinja_token *tokens;
    size_t n_tokens, capacity;
} lexer;

static bool is_blank_byte(char x) { return x == ' ' || (x >= '\t' && x <= '\r'); }
static bool is_digit_byte(char x) { return x >= '0' && x <= '9'; }
static bool is_name_start(char x) { return (x >= 'a' && x <= 'z') || (x >= 'A' && x <= 'Z') || x == '_' || (uint8_t)x >= 0x80; }

static bool at_text(const lexer *l, size_t at, const char *what) {
    size_t n = strlen(what);
    return n <= l->n_bytes - at && memcmp(l->text + at, what, n) == 0;
}

static void add_token(lexer *l, jinja_token_kind kind, jinja_string text) {
    if (l->n_tokens == l->capacity) {
        size_t capacity = l->capacity == 0 ? 256 : 2 * l->capacity;
        jinja_token *tokens = fkv_jinja_take(l->c, capacity, sizeof *tokens);
        if (tokens == NULL) return;
        if (l->n_tokens > 0) memcpy(tokens, l->tokens, l->n_tokens * sizeof *tokens);
        l->tokens = tokens;
        l->capacity = capacity;
    }
    l->tokens[l->n_tokens++] = (jinja_token){kind, l->line, text};
}

static jinja_string source_between(const lexer *l, size_t begin, size_t end) {
    return (jinja_string){l->text + begin, NULL, end - begin, false};
}

/* Advances to `end` and counts lines. */
static void advance_to(lexer *l, size_t end) {
    for (size_t i = l->at; i < end; i++) l->line += l->text[i] == '\n';
    if (end > l->at) l->line_starts = l->text[end - 1] == '\n';
    l->at = end;
}

static void skip_blanks(lexer *l) {
    size_t end = l->at;
    while (end < l->n_bytes && is_blank_byte(l->text[end])) end++;
    advance_to(l, end);
}

/* Adds the text up to `end`, where a tag starts. sign: the "-" or "+" at the start of the tag; 0 if there is none. trims: true if
 * the tag removes the blanks before it on the same line. */
static void lex_data(lexer *l, size_t end, char sign, bool trims) {
    size_t begin = l->at;
    size_t stop = end;
    if (sign == '-') {
        while (stop > begin && is_blank_byte(l->text[stop - 1])) stop--;
    } else if (sign != '+' && trims) {
        size_t line = end;
        while (line > begin && is_blank_byte(l->text[line - 1]) && l->text[line - 1] != '\n') line--;
        bool starts = line > begin ? l->text[line - 1] == '\n' : l->line_starts;
        if (starts) stop = line;
    }
    if (stop > begin) add_token(l, JINJA_TOKEN_DATA, source_between(l, begin, stop));
    advance_to(l, end);
}

/* Skips white space after a tag. sign: the "-" or "+" at the end of the tag; 0 if there is none. trims: true if the tag removes a
 * newline after it. */
static void end_tag(lexer *l, char sign, bool trims) {
    if (sign == '-')
        skip_blanks(l);
    else if (sign != '+' && trims && l->at < l->n_bytes && l->text[l->at] == '\n')
        advance_to(l, l->at + 1);
    else
        l->line_starts = false;
}

static void lex_comment(lexer *l) {
    size_t end = l->at + 2;
    while (end < l->n_bytes && !at_text(l, end, "#}")) end++;
    if (end >= l->n_bytes) {
        fkv_jinja_fail(l->c, "line %u: unterminated comment", l->line);
        return;
    }
    char sign = end > l->at + 2 ? l->text[end - 1] : 0;
    advance_to(l, end + 2);
    end_tag(l, sign, true);
}

/* ---- tags ---- */

static uint32_t parse_hex(const char *text, size_t n) {
    uint32_t value = 0;
    for (size_t i = 0; i < n; i++) {
        char x = text[i];
        uint32_t digit = is_digit_byte(x)       ? (uint32_t)(x - '0')
                         : x >= 'a' && x <= 'f' ? (uint32_t)(x - 'a' + 10)
                         : x >= 'A' && x <= 'F' ? (uint32_t)(x - 'A' + 10)
                                                : 16;
        if (digit == 16) return UINT32_MAX;
        value = value << 4 | digit;
    }
    return value;
}

static size_t encode_utf8(uint32_t x, char *to) {
    if (x < 0x80) return to[0] = (char)x, 1;
    if (x < 0x800) return to[0] = (char)(0xc0 | x >> 6), to[1] = (char)(0x80 | (x & 63)), 2;
    if (x < 0x10000)
        return to[0] = (char)(0xe0 | x >> 12), to[1] = (char)(0x80 | (x >> 6 & 63)), to[2] = (char)(0x80 | (x & 63)), 3;
    return to[0] = (char)(0xf0 | x >> 18), to[1] = (char)(0x80 | (x >> 12 & 63)), to[2] = (char)(0x80 | (x >> 6 & 63)),
           to[3] = (char)(0x80 | (x & 63)), 4;
}

/* Decodes the escape sequence after a backslash. Returns the number of bytes read. Sets *n_put to the number of bytes written to
 * `to`: at most 4, and at most the length of the sequence including the backslash. */
static size_t decode_escape(const char *from, size_t n_left, char *to, size_t *n_put) {
    static const char names[] = "abfnrtv\\'\"";
    static const char values[] = "\a\b\f\n\r\t\v\\'\"";
    const char *name = from[0] != 0 ? strchr(names, from[0]) : NULL;
    if (name != NULL) return to[0] = values[name - names], *n_put = 1, 1;
    if (from[0] == '\n') return *n_put = 0, 1;
    size_t n_hex = from[0] == 'x' ? 2 : from[0] == 'u' ? 4 : from[0] == 'U' ? 8 : 0;
    if (n_hex > 0 && n_hex < n_left) {
        uint32_t x = parse_hex(from + 1, n_hex);
        if (x <= 0x10ffff && (x < 0xd800 || x > 0xdfff)) return *n_put = encode_utf8(x, to), n_hex + 1;
    }
    if (from[0] >= '0' && from[0] <= '7') {
        size_t n = 0;
        uint32_t x = 0;
        while (n < 3 && n < n_left && from[n] >= '0' && from[n] <= '7') x = x * 8 + (uint32_t)(from[n++] - '0');
        return *n_put = encode_utf8(x, to), n;
    }
    return to[0] = '\\', *n_put = 1, 0; /* unknown escape sequences are kept, as in Python */
}

static void lex_string(lexer *l) {
    char quote = l->text[l->at];
    size_t begin = l->at + 1;
    size_t end = begin;
    bool escapes = false;
    while (end < l->n_bytes && l->text[end] != quote) {
        escapes |= l->text[end] == '\\';
        end += l->text[end] == '\\' && end + 1 < l->n_bytes ? 2 : 1;
    }
    if (end >= l->n_bytes) {
        fkv_jinja_fail(l->c, "line %u: unterminated string", l->line);
        return;
    }
    jinja_string s = source_between(l, begin, end);
    if (escapes) {
        char *text = fkv_jinja_take(l->c, s.n_bytes, 1);
        size_t n = 0;
        for (size_t i = 0; text != NULL && i < s.n_bytes;) {
            size_t n_put = 1;
            if (s.text[i] == '\\' && i + 1 < s.n_bytes)
                i += 1 + decode_escape(s.text + i + 1, s.n_bytes - i - 1, text + n, &n_put);
            else
                text[n] = s.text[i++];
            n += n_put;
        }
        s = (jinja_string){text, NULL, n, false};
    }
    add_token(l, JINJA_TOKEN_STRING, s);
    advance_to(l, end + 1);
}

static size_t skip_digits(const lexer *l, size_t at) {
    while (at < l->n_bytes &&
           (is_digit_byte(l->text[at]) || (l->text[at] == '_' && at + 1 < l->n_bytes && is_digit_byte(l->text[at + 1]))))
        at++;
    return at;
}

static void lex_number(lexer *l) {
    size_t end = skip_digits(l, l->at);
    jinja_token_kind kind = JINJA_TOKEN_INT;
    if (end + 1 < l->n_bytes && l->text[end] == '.' && is_digit_byte(l->text[end + 1])) {
        kind = JINJA_TOKEN_FLOAT;
        end = skip_digits(l, end + 1);
    }
    if (end < l->n_bytes && (l->text[end] == 'e' || l->text[end] == 'E')) {
        size_t digits = end + 1;
        if (digits < l->n_bytes && (l->text[digits] == '+' || l->text[digits] == '-')) digits++;
        if (digits < l->n_bytes && is_digit_byte(l->text[digits])) {
            kind = JINJA_TOKEN_FLOAT;
            end = skip_digits(l, digits);
        }
    }
    add_token(l, kind, source_between(l, l->at, end));
    advance_to(l, end);
}

static void lex_operator(lexer *l, uint32_t *depth) {
    static const char *const two[] = {"//", "**", "==", "!=", ">=", "<="};
    char x = l->text[l->at];
    size_t n = 1;
    for (size_t i = 0; i < sizeof two / sizeof *two; i++)
        if (at_text(l, l->at, two[i])) n = 2;
    if (n == 1 && strchr("+-/*%~[](){}<>=.:|,;", x) == NULL) {
        fkv_jinja_fail(l->c, "line %u: unexpected character in a tag (byte value %d)", l->line, (int)(uint8_t)x);
        return;
    }
    if (strchr("[({", x) != NULL) ++*depth;
    if (strchr("])}", x) != NULL && *depth > 0) --*depth;
    add_token(l, JINJA_TOKEN_OPERATOR, source_between(l, l->at, l->at + n));
    advance_to(l, l->at + n);
}

/* Lexes the content of a tag, from the byte after {{ or {% up to and including the closing }} or %}. */
static void lex_tag(lexer *l, const char *close, bool trims) {
    uint32_t depth = 0; /* number of open brackets; within brackets, "}}" closes two dicts and does not end the tag */
    while (!l->c->failed) {
        skip_blanks(l);
        if (l->at >= l->n_bytes) {
            fkv_jinja_fail(l->c, "line %u: unterminated tag, expected \"%s\"", l->line, close);
            return;
        }
        char sign = l->text[l->at];
        bool is_signed = (sign == '-' || (sign == '+' && trims)) && at_text(l, l->at + 1, close);
        if (depth == 0 && (is_signed || at_text(l, l->at, close))) {
            add_token(l, JINJA_TOKEN_CLOSE, source_between(l, l->at, l->at));
            advance_to(l, l->at + 2 + is_signed);
            end_tag(l, is_signed ? sign : 0, trims);
            return;
        }
        if (sign == '\'' || sign == '"') {
            lex_string(l);
        } else if (is_digit_byte(sign)) {
            lex_number(l);
        } else if (is_name_start(sign)) {
            size_t end = l->at;
            while (end < l->n_bytes && (is_name_start(l->text[end]) || is_digit_byte(l->text[end]))) end++;
            add_token(l, JINJA_TOKEN_NAME, source_between(l, l->at, end));
            advance_to(l, end);
        } else {
            lex_operator(l, &depth);
        }
    }
}

/* Matches {% NAME %} at `at`, with optional "-" and "+" signs. Returns the offset after the tag, or 0 if there is no such tag. */
static size_t tag_named(const lexer *l, size_t at, const char *name, char *before, char *after) {
    *before = *after = 0;
    if (!at_text(l, at, "{%")) return 0;
    at += 2;
    if (at < l->n_bytes && (l->text[at] == '-' || l->text[at] == '+')) *before = l->text[at++];
    while (at < l->n_bytes && is_blank_byte(l->text[at])) at++;
    if (!at_text(l, at, name)) return 0;
    at += strlen(name);
    while (at < l->n_bytes && is_blank_byte(l->text[at])) at++;
    if (at < l->n_bytes && (l->text[at] == '-' || l->text[at] == '+')) *after = l->text[at++];
    return at_text(l, at, "%}") ? at + 2 : 0;
}

/* Lexes {% raw %} ... {% endraw %}. The cursor is at the opening tag, which ends at `tag_end`. */
static void lex_raw(lexer *l, size_t tag_end, char after) {
    char before_end = 0;
    char after_end = 0;
    advance_to(l, tag_end);
    end_tag(l, after, false); /* the newline after {% raw %} is kept, as in jinja2 */
    for (size_t at = l->at; at < l->n_bytes; at++) {
        size_t end = tag_named(l, at, "endraw", &before_end, &after_end);
        if (end == 0) continue;
        lex_data(l, at, before_end, true);
        advance_to(l, end);
        end_tag(l, after_end, true);
        return;
    }
    fkv_jinja_fail(l->c, "line %u: {%% raw %%} without {%% endraw %%}", l->line);
}

static void lex_next(lexer *l) {
    size_t end = l->at;
    while (end < l->n_bytes && !at_text(l, end, "{{") && !at_text(l, end, "{%") && !at_text(l, end, "{#")) end++;
    if (end >= l->n_bytes) {
        lex_data(l, l->n_bytes, '+', false);
        return;
    }
    char kind = l->text[end + 1];
    char sign = end + 2 < l->n_bytes ? l->text[end + 2] : 0;
    if (sign != '-' && (sign != '+' || kind == '{')) sign = 0;
    lex_data(l, end, sign, kind != '{');
    char before = 0;
    char after = 0;
    size_t raw = tag_named(l, l->at, "raw", &before, &after);
    if (kind == '#') {
        lex_comment(l);
    } else if (raw != 0) {
        lex_raw(l, raw, after);
    } else {
        advance_to(l, l->at + 2 + (sign != 0));
        add_token(l, kind == '{' ? JINJA_TOKEN_OPEN_OUTPUT : JINJA_TOKEN_OPEN_BLOCK, source_between(l, end, end + 2));
        lex_tag(l, kind == '{' ? "}}" : "%}", kind != '{');
    }
}

jinja_token *fkv_jinja_lex(jinja_context *c, const char *text, size_t n_bytes) {
    /* normalizes newlines to \n */
    char *plain = fkv_jinja_take(c, n_bytes + 1, 1);
    size_t n = 0;
    for (size_t i = 0; plain != NULL && i < n_bytes; i++) {
        if (text[i] == '\r' && i + 1 < n_bytes && text[i + 1] == '\n') continue;
        plain[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n > 0 && plain[n - 1] == '\n') n--;
    lexer l = {.c = c, .text = plain, .n_bytes = n, .line = 1, .line_starts = true};
    while (l.at < l.n_bytes && !c->failed) lex_next(&l);
    add_token(&l, JINJA_TOKEN_END, JINJA_TEXT(""));
    return c->failed ? NULL : l.tokens;
}
