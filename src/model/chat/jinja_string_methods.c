/* Methods of strings, by name, as Python has them, and the arguments of calls. See jinja_eval.h. Positions are characters, not
 * bytes.
 */
#include "jinja_eval.h"

#include <utf8proc.h>

/* ---- arguments ---- */

const jinja_value *fkv_jinja_argument(const jinja_arguments *args, size_t position, const char *name) {
    if (position < args->n_positions) return &args->value[position];
    for (size_t i = args->n_positions; i < args->n; i++)
        if (fkv_jinja_is(args->name[i], name)) return &args->value[i];
    return NULL;
}

int64_t fkv_jinja_count_argument(const jinja_arguments *args, size_t position, const char *name) {
    const jinja_value *given = fkv_jinja_argument(args, position, name);
    return given != NULL && given->kind == JINJA_INT && given->as.integer >= 0 ? given->as.integer : INT64_MAX;
}

/* An argument that must be a string; false, and a failure, where it is not. */
static bool string_argument(jinja_context *c, const jinja_arguments *args, size_t position, jinja_string *s) {
    if (position < args->n && args->value[position].kind == JINJA_STRING) {
        *s = args->value[position].as.string;
        return true;
    }
    fkv_jinja_fail(c, "a method of strings is called without the string that it takes");
    return false;
}

static void append_part(jinja_context *c, jinja_value list, jinja_string s, size_t begin, size_t end) {
    if (fkv_jinja_step(c, 1)) fkv_jinja_append(c, list, fkv_jinja_of_string(fkv_jinja_part(s, begin, end)));
}

/* ---- cutting ---- */

static size_t find_last(jinja_context *c, jinja_string s, jinja_string what, size_t end) {
    if (what.n_bytes > end) return SIZE_MAX;
    for (size_t at = end - what.n_bytes + 1; at-- > 0 && fkv_jinja_step(c, what.n_bytes / 64);)
        if (fkv_jinja_same(fkv_jinja_part(s, at, at + what.n_bytes), what)) return at;
    return SIZE_MAX;
}

/* At runs of white space; what is behind the last split keeps its own. */
static void split_blanks(jinja_context *c, jinja_value list, jinja_string s, int64_t most) {
    s = fkv_jinja_strip(s, NULL, true, false);
    while (s.n_bytes > 0 && !c->failed) {
        size_t end = 0;
        while (end < s.n_bytes && !fkv_jinja_is_space(fkv_jinja_char(s, end))) end += fkv_jinja_char_bytes(s, end);
        if (most-- == 0) {
            jinja_string rest = fkv_jinja_strip(s, NULL, false, true);
            append_part(c, list, rest, 0, rest.n_bytes);
            return;
        }
        append_part(c, list, s, 0, end);
        s = fkv_jinja_strip(fkv_jinja_part(s, end, s.n_bytes), NULL, true, false);
    }
}

static void split_at(jinja_context *c, jinja_value list, jinja_string s, jinja_string by, int64_t most) {
    size_t begin = 0;
    for (size_t at = fkv_jinja_find(s, by, 0); at != SIZE_MAX && most-- > 0 && !c->failed; at = fkv_jinja_find(s, by, begin)) {
        append_part(c, list, s, begin, at);
        begin = at + by.n_bytes;
    }
    append_part(c, list, s, begin, s.n_bytes);
}

/* The byte behind the last white space, or 0. */
static size_t last_word(jinja_string s) {
    for (size_t at = s.n_bytes; at > 0;) {
        size_t end = at--;
        while (at > 0 && end - at < 4 && ((uint8_t)s.text[at] & 0xc0) == 0x80) at--;
        if (fkv_jinja_is_space(fkv_jinja_char(s, at))) return end;
    }
    return 0;
}

/* From the end, at most `most` times: pieces are found last first, then turned around. by NULL: at runs of white space. */
static void split_from_end(jinja_context *c, jinja_value list, jinja_string s, const jinja_string *by, int64_t most) {
    if (by == NULL) s = fkv_jinja_strip(s, NULL, false, true);
    while (!c->failed && most-- > 0) {
        size_t end = by != NULL ? find_last(c, s, *by, s.n_bytes) : last_word(s);
        if (end == SIZE_MAX || (by == NULL && end == 0)) break;
        append_part(c, list, s, end + (by != NULL ? by->n_bytes : 0), s.n_bytes);
        s = fkv_jinja_part(s, 0, end);
        if (by == NULL) s = fkv_jinja_strip(s, NULL, false, true);
    }
    if (by != NULL || s.n_bytes > 0) append_part(c, list, s, 0, s.n_bytes);
    if (c->failed) return;
    jinja_value *items = list.as.list->items;
    for (size_t i = 0, n = list.as.list->n_items; i < n / 2; i++) {
        jinja_value kept = items[i];
        items[i] = items[n - 1 - i];
        items[n - 1 - i] = kept;
    }
}

static jinja_value split_either(jinja_context *c, jinja_string s, const jinja_arguments *args, bool from_end) {
    jinja_value list = fkv_jinja_list(c, false);
    const jinja_value *by = fkv_jinja_argument(args, 0, "sep");
    int64_t most = fkv_jinja_count_argument(args, 1, "maxsplit");
    bool blanks = by == NULL || by->kind == JINJA_NONE;
    if (!blanks && (by->kind != JINJA_STRING || by->as.string.n_bytes == 0))
        return fkv_jinja_fail(c, "split by what is not a string, or empty");
    if (from_end && most != INT64_MAX)
        split_from_end(c, list, s, blanks ? NULL : &by->as.string, most);
    else if (blanks)
        split_blanks(c, list, s, most);
    else
        split_at(c, list, s, by->as.string, most);
    return list;
}

static jinja_value split(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return split_either(c, s, args, false);
}
static jinja_value rsplit(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return split_either(c, s, args, true);
}

static bool ends_line(uint32_t x) {
    return (x >= '\n' && x <= '\r') || (x >= 0x1c && x <= 0x1e) || x == 0x85 || x == 0x2028 || x == 0x2029;
}

static jinja_value split_lines(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_value list = fkv_jinja_list(c, false);
    const jinja_value *keep = fkv_jinja_argument(args, 0, "keepends");
    for (size_t begin = 0; begin < s.n_bytes && !c->failed;) {
        size_t end = begin;
        while (end < s.n_bytes && !ends_line(fkv_jinja_char(s, end))) end += fkv_jinja_char_bytes(s, end);
        size_t next = end;
        if (end < s.n_bytes)
            next += s.text[end] == '\r' && end + 1 < s.n_bytes && s.text[end + 1] == '\n' ? 2 : fkv_jinja_char_bytes(s, end);
        append_part(c, list, s, begin, keep != NULL && fkv_jinja_truth(keep) ? next : end);
        begin = next;
    }
    return list;
}

/* In three: before, the separator, behind; without one all of it stands at one end. */
static jinja_value cut_once(jinja_context *c, jinja_string s, const jinja_arguments *args, bool last) {
    jinja_value parts = fkv_jinja_list(c, true);
    jinja_string by;
    if (!string_argument(c, args, 0, &by)) return parts;
    if (by.n_bytes == 0) return fkv_jinja_fail(c, "partition by an empty string");
    size_t at = last ? find_last(c, s, by, s.n_bytes) : fkv_jinja_find(s, by, 0);
    size_t begin = at != SIZE_MAX ? at : last ? 0 : s.n_bytes;
    size_t end = at != SIZE_MAX ? at + by.n_bytes : begin;
    append_part(c, parts, s, 0, begin);
    append_part(c, parts, s, begin, end);
    append_part(c, parts, s, end, s.n_bytes);
    return parts;
}

static jinja_value partition(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return cut_once(c, s, args, false);
}
static jinja_value rpartition(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return cut_once(c, s, args, true);
}

static jinja_value strip_ends(jinja_string s, const jinja_arguments *args, bool left, bool right) {
    bool named = args->n > 0 && args->value[0].kind == JINJA_STRING;
    return fkv_jinja_of_string(fkv_jinja_strip(s, named ? &args->value[0].as.string : NULL, left, right));
}

static jinja_value strip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)c;
    return strip_ends(s, args, true, true);
}
static jinja_value lstrip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)c;
    return strip_ends(s, args, true, false);
}
static jinja_value rstrip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)c;
    return strip_ends(s, args, false, true);
}

/* ---- looking ---- */

static size_t byte_of(jinja_string s, const jinja_value *position, size_t unsaid) {
    if (position == NULL || position->kind != JINJA_INT) return unsaid;
    int64_t at = position->as.integer;
    if (at < 0) at += (int64_t)fkv_jinja_n_chars(s);
    size_t byte = 0;
    while (at-- > 0 && byte < s.n_bytes) byte += fkv_jinja_char_bytes(s, byte);
    return byte;
}

/* The part that arguments behind the first choose, as a slice does; *begin: its first byte. False: it begins behind the end. */
static bool chosen_part(jinja_string s, const jinja_arguments *args, jinja_string *part, size_t *begin) {
    const jinja_value *start = args->n > 1 ? &args->value[1] : NULL;
    bool behind = start != NULL && start->kind == JINJA_INT && start->as.integer > (int64_t)fkv_jinja_n_chars(s);
    *begin = byte_of(s, start, 0);
    size_t end = byte_of(s, args->n > 2 ? &args->value[2] : NULL, s.n_bytes);
    *part = fkv_jinja_part(s, *begin, end > *begin ? end : *begin);
    return !behind && end >= *begin;
}

static bool ends_at(jinja_string s, jinja_string what, bool at_start) {
    if (what.n_bytes > s.n_bytes) return false;
    size_t begin = at_start ? 0 : s.n_bytes - what.n_bytes;
    return fkv_jinja_same(fkv_jinja_part(s, begin, begin + what.n_bytes), what);
}

static jinja_value begins_or_ends(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    const jinja_value *what = args->n > 0 ? &args->value[0] : NULL;
    jinja_string part;
    size_t begin;
    bool inside = chosen_part(s, args, &part, &begin);
    if (what != NULL && what->kind == JINJA_LIST) {
        for (size_t i = 0; inside && i < what->as.list->n_items; i++)
            if (what->as.list->items[i].kind == JINJA_STRING && ends_at(part, what->as.list->items[i].as.string, at_start))
                return fkv_jinja_bool(true);
        return fkv_jinja_bool(false);
    }
    jinja_string one;
    if (!string_argument(c, args, 0, &one)) return fkv_jinja_undefined();
    return fkv_jinja_bool(inside && ends_at(part, one, at_start));
}

static jinja_value startswith(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return begins_or_ends(c, s, args, true);
}
static jinja_value endswith(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return begins_or_ends(c, s, args, false);
}

/* The position, or -1, which is a failure where it must be there. */
static jinja_value find_either(jinja_context *c, jinja_string s, const jinja_arguments *args, bool last, bool must) {
    jinja_string what;
    jinja_string part;
    size_t begin;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    bool inside = chosen_part(s, args, &part, &begin);
    size_t at = !inside ? SIZE_MAX : last ? find_last(c, part, what, part.n_bytes) : fkv_jinja_find(part, what, 0);
    if (at == SIZE_MAX && must) return fkv_jinja_fail(c, "index of a text that is not in the string");
    return fkv_jinja_int(at == SIZE_MAX ? -1 : (int64_t)fkv_jinja_n_chars(fkv_jinja_part(s, 0, begin + at)));
}

static jinja_value find(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_either(c, s, args, false, false);
}
static jinja_value rfind(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_either(c, s, args, true, false);
}
static jinja_value index_of(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_either(c, s, args, false, true);
}
static jinja_value rindex_of(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_either(c, s, args, true, true);
}

static jinja_value count(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string what;
    size_t begin;
    int64_t n = 0;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (!chosen_part(s, args, &s, &begin)) return fkv_jinja_int(0);
    if (what.n_bytes == 0) return fkv_jinja_int((int64_t)fkv_jinja_n_chars(s) + 1);
    for (size_t at = fkv_jinja_find(s, what, 0); at != SIZE_MAX; at = fkv_jinja_find(s, what, at + what.n_bytes)) n++;
    return fkv_jinja_int(n);
}

/* ---- kinds of characters ---- */

static bool is_letter(uint32_t x) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)x);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

static bool has_case(uint32_t x) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)x);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LT;
}

static bool is_decimal(uint32_t x) { return utf8proc_category((utf8proc_int32_t)x) == UTF8PROC_CATEGORY_ND; }

static bool is_numeric(uint32_t x) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)x);
    return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

/* Decimals, and those written small above or below the line. */
static bool is_digit(uint32_t x) {
    return is_decimal(x) || x == 0xb2 || x == 0xb3 || x == 0xb9 || x == 0x2070 || (x >= 0x2074 && x <= 0x2079) ||
           (x >= 0x2080 && x <= 0x2089);
}

static bool is_letter_or_number(uint32_t x) { return is_letter(x) || is_numeric(x); }

static jinja_value all_are(jinja_string s, bool (*is)(uint32_t)) {
    for (size_t at = 0; at < s.n_bytes; at += fkv_jinja_char_bytes(s, at))
        if (!is(fkv_jinja_char(s, at))) return fkv_jinja_bool(false);
    return fkv_jinja_bool(s.n_bytes > 0);
}

#define ALL_ARE(name, is)                                                                                                        \
    static jinja_value name(jinja_context *c, jinja_string s, const jinja_arguments *args) {                                     \
        (void)c;                                                                                                                 \
        (void)args;                                                                                                              \
        return all_are(s, is);                                                                                                   \
    }
ALL_ARE(isalpha_, is_letter)
ALL_ARE(isalnum_, is_letter_or_number)
ALL_ARE(isdigit_, is_digit)
ALL_ARE(isdecimal_, is_decimal)
ALL_ARE(isnumeric_, is_numeric)
ALL_ARE(isspace_, fkv_jinja_is_space)

static jinja_value isupper_(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_bool(fkv_jinja_is_case(c, s, true));
}
static jinja_value islower_(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_bool(fkv_jinja_is_case(c, s, false));
}

/* ---- new texts ---- */

static jinja_value upper(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_case(c, s, true));
}
static jinja_value lower(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_case(c, s, false));
}
static jinja_value capitalize(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_capitalized(c, s, false));
}

/* A capital behind everything that has no case: unlike the filter, also behind an apostrophe. */
static jinja_value title(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_writer w = {.c = c};
    bool begins = true;
    (void)args;
    for (size_t at = 0; at < s.n_bytes && !c->failed;) {
        size_t n = fkv_jinja_char_bytes(s, at);
        fkv_jinja_write(&w, fkv_jinja_case(c, fkv_jinja_part(s, at, at + n), begins));
        begins = !has_case(fkv_jinja_char(s, at));
        at += n;
    }
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

static jinja_value replace(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string old;
    jinja_string new;
    if (!string_argument(c, args, 0, &old) || !string_argument(c, args, 1, &new)) return fkv_jinja_undefined();
    return fkv_jinja_of_string(fkv_jinja_replaced(c, s, old, new, fkv_jinja_count_argument(args, 2, "count")));
}

static jinja_value remove_end(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    jinja_string what;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (!ends_at(s, what, at_start)) return fkv_jinja_of_string(s);
    return fkv_jinja_of_string(at_start ? fkv_jinja_part(s, what.n_bytes, s.n_bytes)
                                        : fkv_jinja_part(s, 0, s.n_bytes - what.n_bytes));
}

static jinja_value removeprefix(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return remove_end(c, s, args, true);
}
static jinja_value removesuffix(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return remove_end(c, s, args, false);
}

static jinja_value join(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    const jinja_list *items = args->n > 0 ? fkv_jinja_items(c, &args->value[0]) : NULL;
    jinja_writer w = {.c = c};
    if (args->n == 0) return fkv_jinja_fail(c, "join without what to join");
    for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++) {
        if (i > 0) fkv_jinja_write(&w, s);
        fkv_jinja_write_str(&w, &items->items[i]);
    }
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

/* One field of str.format(): "", a number or a name. */
static const jinja_value *format_field(const jinja_arguments *args, jinja_string field, size_t *next) {
    if (field.n_bytes == 0) return *next < args->n_positions ? &args->value[(*next)++] : NULL;
    if (field.n_bytes == 1 && field.text[0] >= '0' && field.text[0] <= '9') {
        size_t at = (size_t)(field.text[0] - '0');
        return at < args->n_positions ? &args->value[at] : NULL;
    }
    for (size_t i = args->n_positions; i < args->n; i++)
        if (fkv_jinja_same(args->name[i], field)) return &args->value[i];
    return NULL;
}

static jinja_value format(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_writer w = {.c = c};
    size_t next = 0;
    for (size_t i = 0; i < s.n_bytes && !c->failed; i++) {
        char x = s.text[i];
        bool doubled = i + 1 < s.n_bytes && s.text[i + 1] == x && (x == '{' || x == '}');
        if (x != '{' || doubled) {
            fkv_jinja_write(&w, fkv_jinja_part(s, i, i + 1));
            i += doubled;
            continue;
        }
        size_t end = fkv_jinja_find(s, JINJA_TEXT("}"), i);
        const jinja_value *value = end == SIZE_MAX ? NULL : format_field(args, fkv_jinja_part(s, i + 1, end), &next);
        if (value == NULL) return fkv_jinja_fail(c, "a format with a field that is not there or not supported");
        fkv_jinja_write_str(&w, value);
        i = end;
    }
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

/* To a width, with a character on the left and on the right. */
static jinja_value padded(jinja_context *c, jinja_string s, const jinja_arguments *args, bool left, bool right) {
    jinja_string fill = JINJA_TEXT(" ");
    if (args->n == 0 || args->value[0].kind != JINJA_INT) return fkv_jinja_fail(c, "a width is expected");
    if (args->n > 1 && !string_argument(c, args, 1, &fill)) return fkv_jinja_undefined();
    int64_t width = args->value[0].as.integer;
    int64_t n = width > 0 ? width - (int64_t)fkv_jinja_n_chars(s) : 0;
    if (n <= 0) return fkv_jinja_of_string(s);
    int64_t before = !left ? 0 : right ? n / 2 + (n & width & 1) : n; /* Python's middle */
    jinja_writer w = {.c = c};
    for (int64_t i = 0; i < before && fkv_jinja_step(c, 1); i++) fkv_jinja_write(&w, fill);
    fkv_jinja_write(&w, s);
    for (int64_t i = before; i < n && fkv_jinja_step(c, 1); i++) fkv_jinja_write(&w, fill);
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

static jinja_value ljust(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return padded(c, s, args, false, true);
}
static jinja_value rjust(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return padded(c, s, args, true, false);
}
static jinja_value center(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return padded(c, s, args, true, true);
}

static jinja_value zfill(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    bool sign = s.n_bytes > 0 && (s.text[0] == '-' || s.text[0] == '+');
    jinja_arguments wanted = {.n = 2, .n_positions = 2, .value = {fkv_jinja_none(), fkv_jinja_of_string(JINJA_TEXT("0"))}};
    if (args->n == 1 && args->value[0].kind == JINJA_INT) { /* below 1 nothing is filled */
        int64_t width = args->value[0].as.integer;
        wanted.value[0] = fkv_jinja_int(width > 0 ? width - sign : 0);
    }
    jinja_value digits = padded(c, fkv_jinja_part(s, sign, s.n_bytes), &wanted, true, false);
    if (!sign || c->failed) return digits;
    jinja_writer w = {.c = c};
    fkv_jinja_write(&w, fkv_jinja_part(s, 0, 1));
    fkv_jinja_write(&w, digits.as.string);
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

fkv_jinja_method fkv_jinja_string_method(jinja_string name) {
    static const struct {
        const char *name;
        fkv_jinja_method run;
    } methods[] = {
        {"capitalize", capitalize},
        {"center", center},
        {"count", count},
        {"endswith", endswith},
        {"find", find},
        {"format", format},
        {"index", index_of},
        {"isalnum", isalnum_},
        {"isalpha", isalpha_},
        {"isdecimal", isdecimal_},
        {"isdigit", isdigit_},
        {"islower", islower_},
        {"isnumeric", isnumeric_},
        {"isspace", isspace_},
        {"isupper", isupper_},
        {"join", join},
        {"ljust", ljust},
        {"lower", lower},
        {"lstrip", lstrip},
        {"partition", partition},
        {"removeprefix", removeprefix},
        {"removesuffix", removesuffix},
        {"replace", replace},
        {"rfind", rfind},
        {"rindex", rindex_of},
        {"rjust", rjust},
        {"rpartition", rpartition},
        {"rsplit", rsplit},
        {"rstrip", rstrip},
        {"split", split},
        {"splitlines", split_lines},
        {"startswith", startswith},
        {"strip", strip},
        {"title", title},
        {"upper", upper},
        {"zfill", zfill},
    };
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (fkv_jinja_is(name, methods[i].name)) return methods[i].run;
    return NULL;
}
