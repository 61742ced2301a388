/* String operations shared by filters and methods. See jinja_value.h. */
#include "jinja_value.h"

jinja_string fkv_jinja_capitalized(jinja_context *c, jinja_string s, bool every_word) {
    jinja_writer w = {.c = c};
    bool begins = true;
    for (size_t at = 0; at < s.n_bytes && !c->failed;) {
        size_t n = fkv_jinja_char_bytes(s, at);
        jinja_string character = fkv_jinja_part(s, at, at + n);
        fkv_jinja_write(&w, fkv_jinja_case(c, character, begins));
        uint32_t x = fkv_jinja_char(s, at);
        begins = every_word && (fkv_jinja_is_space(x) || (x < 0x80 && strchr("-({[<", (int)x) != NULL));
        at += n;
    }
    return fkv_jinja_written(&w);
}

bool fkv_jinja_is_case(jinja_context *c, jinja_string s, bool upper) {
    return fkv_jinja_same(c, s, fkv_jinja_case(c, s, upper)) && !fkv_jinja_same(c, s, fkv_jinja_case(c, s, !upper));
}

jinja_string fkv_jinja_replaced(jinja_context *c, jinja_string s, jinja_string old, jinja_string new, int64_t most) {
    jinja_writer w = {.c = c};
    size_t begin = 0;
    for (size_t at = fkv_jinja_find(c, s, old, 0); at != SIZE_MAX && most-- > 0 && !c->failed;) {
        fkv_jinja_write(&w, fkv_jinja_part(s, begin, at));
        fkv_jinja_write(&w, new);
        begin = at + old.n_bytes;
        size_t next = begin;
        if (old.n_bytes == 0) { /* an empty pattern matches before and after every character */
            if (begin == s.n_bytes) break;
            next += fkv_jinja_char_bytes(s, begin);
        }
        at = fkv_jinja_find(c, s, old, next);
    }
    fkv_jinja_write(&w, fkv_jinja_part(s, begin, s.n_bytes));
    return fkv_jinja_written(&w);
}

jinja_string fkv_jinja_formatted(jinja_context *c, jinja_string format, const jinja_value *values, size_t n_values) {
    jinja_writer w = {.c = c};
    size_t used = 0;
    for (size_t i = 0; i < format.n_bytes && !c->failed; i++) {
        if (format.text[i] != '%' || i + 1 == format.n_bytes) {
            fkv_jinja_write(&w, fkv_jinja_part(format, i, i + 1));
            continue;
        }
        char kind = format.text[++i];
        if (kind == '%') {
            fkv_jinja_write_text(&w, "%");
        } else if (used == n_values || strchr("sdir", kind) == NULL) {
            (void)fkv_jinja_fail(c, "the format string has an unsupported conversion or too few values");
        } else if (kind == 'r') {
            fkv_jinja_write_repr(&w, &values[used++]);
        } else {
            fkv_jinja_write_str(&w, &values[used++]);
        }
    }
    return fkv_jinja_written(&w);
}
