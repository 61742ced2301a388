/* String methods with the semantics of Python, and access to call arguments. See jinja_eval.h. Positions count characters, not
 * bytes. */
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

/* Sets *s to the argument at `position`, which must be a string. Otherwise records a failure and returns false. */
static bool string_argument(jinja_context *c, const jinja_arguments *args, size_t position, jinja_string *s) {
    if (position < args->n && args->value[position].kind == JINJA_STRING) {
        *s = args->value[position].as.string;
        return true;
    }
    fkv_jinja_fail(c, "this string method requires a string argument");
    return false;
}

static void append_part(jinja_context *c, jinja_value list, jinja_string s, size_t begin, size_t end) {
    if (!c->failed) fkv_jinja_append(c, list, fkv_jinja_of_string(fkv_jinja_part(s, begin, end)));
}

/* ---- splitting ---- */

static size_t find_last(jinja_context *c, jinja_string s, jinja_string what, size_t end) {
    if (what.n_bytes > end) return SIZE_MAX;
    for (size_t at = end - what.n_bytes + 1; at-- > 0 && fkv_jinja_charge(c, JINJA_WORK_ITEM);)
        if (fkv_jinja_same(c, fkv_jinja_part(s, at, at + what.n_bytes), what)) return at;
    return SIZE_MAX;
}

/* Splits a string at runs of white space, at most `most` times. White space within the last part is kept. */
static void split_blanks(jinja_context *c, jinja_value list, jinja_string s, int64_t most) {
    s = fkv_jinja_strip(c, s, NULL, true, false);
    while (s.n_bytes > 0 && !c->failed) {
        size_t end = 0;
        while (end < s.n_bytes && !fkv_jinja_is_space(fkv_jinja_char(s, end))) end += fkv_jinja_char_bytes(s, end);
        if (!fkv_jinja_charge(c, fkv_jinja_walk_work(end))) return;
        if (most-- == 0) {
            jinja_string rest = fkv_jinja_strip(c, s, NULL, false, true);
            append_part(c, list, rest, 0, rest.n_bytes);
            return;
        }
        append_part(c, list, s, 0, end);
        s = fkv_jinja_strip(c, fkv_jinja_part(s, end, s.n_bytes), NULL, true, false);
    }
}

static void split_at(jinja_context *c, jinja_value list, jinja_string s, jinja_string by, int64_t most) {
    size_t begin = 0;
    for (size_t at = fkv_jinja_find(c, s, by, 0); at != SIZE_MAX && most-- > 0 && !c->failed;
         at = fkv_jinja_find(c, s, by, begin)) {
        append_part(c, list, s, begin, at);
        begin = at + by.n_bytes;
    }
    append_part(c, list, s, begin, s.n_bytes);
}

/* Returns the offset of the first byte after the last white-space character, or 0 if there is no white space. */
static size_t last_word(jinja_context *c, jinja_string s) {
    for (size_t at = s.n_bytes; at > 0 && fkv_jinja_charge(c, JINJA_WORK_ITEM);) {
        size_t end = at--;
        while (at > 0 && end - at < 4 && ((uint8_t)s.text[at] & 0xc0) == 0x80) at--;
        if (fkv_jinja_is_space(fkv_jinja_char(s, at))) return end;
    }
    return 0;
}

/* Splits a string, starting at its end, at most `most` times. The parts are found in reverse order, so the list of parts is
 * reversed afterwards. If `by` is NULL, splits at runs of white space. */
static void split_from_end(jinja_context *c, jinja_value list, jinja_string s, const jinja_string *by, int64_t most) {
    if (by == NULL) s = fkv_jinja_strip(c, s, NULL, false, true);
    while (!c->failed && most-- > 0) {
        size_t end = by != NULL ? find_last(c, s, *by, s.n_bytes) : last_word(c, s);
        if (end == SIZE_MAX || (by == NULL && end == 0)) break;
        append_part(c, list, s, end + (by != NULL ? by->n_bytes : 0), s.n_bytes);
        s = fkv_jinja_part(s, 0, end);
        if (by == NULL) s = fkv_jinja_strip(c, s, NULL, false, true);
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

static jinja_value split_string(jinja_context *c, jinja_string s, const jinja_arguments *args, bool from_end) {
    jinja_value list = fkv_jinja_list(c, false);
    const jinja_value *by = fkv_jinja_argument(args, 0, "sep");
    int64_t most = fkv_jinja_count_argument(args, 1, "maxsplit");
    bool blanks = by == NULL || by->kind == JINJA_NONE;
    if (!blanks && (by->kind != JINJA_STRING || by->as.string.n_bytes == 0))
        return fkv_jinja_fail(c, "the separator of split must be a non-empty string");
    if (from_end && most != INT64_MAX)
        split_from_end(c, list, s, blanks ? NULL : &by->as.string, most);
    else if (blanks)
        split_blanks(c, list, s, most);
    else
        split_at(c, list, s, by->as.string, most);
    return list;
}

static jinja_value method_split(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return split_string(c, s, args, false);
}
static jinja_value method_rsplit(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return split_string(c, s, args, true);
}

static bool ends_line(uint32_t x) {
    return (x >= '\n' && x <= '\r') || (x >= 0x1c && x <= 0x1e) || x == 0x85 || x == 0x2028 || x == 0x2029;
}

static jinja_value method_splitlines(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_value list = fkv_jinja_list(c, false);
    const jinja_value *keep = fkv_jinja_argument(args, 0, "keepends");
    for (size_t begin = 0; begin < s.n_bytes && !c->failed;) {
        size_t end = begin;
        while (end < s.n_bytes && !ends_line(fkv_jinja_char(s, end))) end += fkv_jinja_char_bytes(s, end);
        if (!fkv_jinja_charge(c, fkv_jinja_walk_work(end - begin))) break;
        size_t next = end;
        if (end < s.n_bytes)
            next += s.text[end] == '\r' && end + 1 < s.n_bytes && s.text[end + 1] == '\n' ? 2 : fkv_jinja_char_bytes(s, end);
        append_part(c, list, s, begin, keep != NULL && fkv_jinja_truth(keep) ? next : end);
        begin = next;
    }
    return list;
}

/* Splits a string into the text before the separator, the separator and the text after it. If the separator is not found, one
 * part is the whole string and the other two are empty. */
static jinja_value partition_string(jinja_context *c, jinja_string s, const jinja_arguments *args, bool last) {
    jinja_value parts = fkv_jinja_list(c, true);
    jinja_string by;
    if (!string_argument(c, args, 0, &by)) return parts;
    if (by.n_bytes == 0) return fkv_jinja_fail(c, "the separator of partition() must not be empty");
    size_t at = last ? find_last(c, s, by, s.n_bytes) : fkv_jinja_find(c, s, by, 0);
    size_t begin = at != SIZE_MAX ? at : last ? 0 : s.n_bytes;
    size_t end = at != SIZE_MAX ? at + by.n_bytes : begin;
    append_part(c, parts, s, 0, begin);
    append_part(c, parts, s, begin, end);
    append_part(c, parts, s, end, s.n_bytes);
    return parts;
}

static jinja_value method_partition(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return partition_string(c, s, args, false);
}
static jinja_value method_rpartition(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return partition_string(c, s, args, true);
}

static jinja_value strip_ends(jinja_context *c, jinja_string s, const jinja_arguments *args, bool left, bool right) {
    bool named = args->n > 0 && args->value[0].kind == JINJA_STRING;
    return fkv_jinja_of_string(fkv_jinja_strip(c, s, named ? &args->value[0].as.string : NULL, left, right));
}

static jinja_value method_strip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return strip_ends(c, s, args, true, true);
}
static jinja_value method_lstrip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return strip_ends(c, s, args, true, false);
}
static jinja_value method_rstrip(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return strip_ends(c, s, args, false, true);
}

/* ---- searching ---- */

static size_t byte_of_position(jinja_context *c, jinja_string s, const jinja_value *position, size_t fallback) {
    if (position == NULL || position->kind != JINJA_INT) return fallback;
    int64_t at = position->as.integer;
    if (at < 0) at += (int64_t)fkv_jinja_n_chars(c, s);
    return at > 0 ? fkv_jinja_byte_of_char(c, s, (size_t)at) : 0;
}

/* Sets *part to the slice that the second and third arguments select, and *begin to the offset of the first byte of the slice.
 * Returns false if the slice starts after its end or after the end of the string. */
static bool selected_part(jinja_context *c, jinja_string s, const jinja_arguments *args, jinja_string *part, size_t *begin) {
    const jinja_value *start = args->n > 1 ? &args->value[1] : NULL;
    bool after_end = start != NULL && start->kind == JINJA_INT && start->as.integer > (int64_t)fkv_jinja_n_chars(c, s);
    *begin = byte_of_position(c, s, start, 0);
    size_t end = byte_of_position(c, s, args->n > 2 ? &args->value[2] : NULL, s.n_bytes);
    *part = fkv_jinja_part(s, *begin, end > *begin ? end : *begin);
    return !after_end && end >= *begin;
}

static bool has_affix(jinja_context *c, jinja_string s, jinja_string what, bool at_start) {
    if (what.n_bytes > s.n_bytes) return false;
    size_t begin = at_start ? 0 : s.n_bytes - what.n_bytes;
    return fkv_jinja_same(c, fkv_jinja_part(s, begin, begin + what.n_bytes), what);
}

static jinja_value test_affix(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    const jinja_value *what = args->n > 0 ? &args->value[0] : NULL;
    jinja_string part;
    size_t begin;
    bool in_range = selected_part(c, s, args, &part, &begin);
    if (what != NULL && what->kind == JINJA_LIST) {
        for (size_t i = 0; in_range && i < what->as.list->n_items && fkv_jinja_charge(c, JINJA_WORK_ITEM); i++)
            if (what->as.list->items[i].kind == JINJA_STRING && has_affix(c, part, what->as.list->items[i].as.string, at_start))
                return fkv_jinja_bool(true);
        return fkv_jinja_bool(false);
    }
    jinja_string one;
    if (!string_argument(c, args, 0, &one)) return fkv_jinja_undefined();
    return fkv_jinja_bool(in_range && has_affix(c, part, one, at_start));
}

static jinja_value method_startswith(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return test_affix(c, s, args, true);
}
static jinja_value method_endswith(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return test_affix(c, s, args, false);
}

/* Returns the position of a substring. If the substring does not occur, returns -1 or, if `must` is true, records a failure. */
static jinja_value find_substring(jinja_context *c, jinja_string s, const jinja_arguments *args, bool last, bool must) {
    jinja_string what;
    jinja_string part;
    size_t begin;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    bool in_range = selected_part(c, s, args, &part, &begin);
    size_t at = !in_range ? SIZE_MAX : last ? find_last(c, part, what, part.n_bytes) : fkv_jinja_find(c, part, what, 0);
    if (at == SIZE_MAX && must) return fkv_jinja_fail(c, "str.index(): substring not found");
    return fkv_jinja_int(at == SIZE_MAX ? -1 : (int64_t)fkv_jinja_n_chars(c, fkv_jinja_part(s, 0, begin + at)));
}

static jinja_value method_find(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_substring(c, s, args, false, false);
}
static jinja_value method_rfind(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_substring(c, s, args, true, false);
}
static jinja_value method_index(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_substring(c, s, args, false, true);
}
static jinja_value method_rindex(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return find_substring(c, s, args, true, true);
}

static jinja_value method_count(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string what;
    size_t begin;
    int64_t n = 0;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (!selected_part(c, s, args, &s, &begin)) return fkv_jinja_int(0);
    if (what.n_bytes == 0) return fkv_jinja_int((int64_t)fkv_jinja_n_chars(c, s) + 1);
    for (size_t at = fkv_jinja_find(c, s, what, 0); at != SIZE_MAX; at = fkv_jinja_find(c, s, what, at + what.n_bytes)) n++;
    return fkv_jinja_int(n);
}

/* ---- character classes ---- */

static bool is_letter_char(uint32_t x) {
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

/* Returns whether the character is a decimal digit, a superscript or a subscript. */
static bool is_digit_char(uint32_t x) {
    return is_decimal(x) || x == 0xb2 || x == 0xb3 || x == 0xb9 || x == 0x2070 || (x >= 0x2074 && x <= 0x2079) ||
           (x >= 0x2080 && x <= 0x2089);
}

static bool is_letter_or_number(uint32_t x) { return is_letter_char(x) || is_numeric(x); }

static jinja_value all_are(jinja_context *c, jinja_string s, bool (*is)(uint32_t)) {
    if (!fkv_jinja_charge(c, fkv_jinja_walk_work(s.n_bytes))) return fkv_jinja_undefined();
    for (size_t at = 0; at < s.n_bytes; at += fkv_jinja_char_bytes(s, at))
        if (!is(fkv_jinja_char(s, at))) return fkv_jinja_bool(false);
    return fkv_jinja_bool(s.n_bytes > 0);
}

#define ALL_ARE(name, is)                                                                                                        \
    static jinja_value name(jinja_context *c, jinja_string s, const jinja_arguments *args) {                                     \
        (void)args;                                                                                                              \
        return all_are(c, s, is);                                                                                                \
    }
ALL_ARE(method_isalpha, is_letter_char)
ALL_ARE(method_isalnum, is_letter_or_number)
ALL_ARE(method_isdigit, is_digit_char)
ALL_ARE(method_isdecimal, is_decimal)
ALL_ARE(method_isnumeric, is_numeric)
ALL_ARE(method_isspace, fkv_jinja_is_space)

static jinja_value method_isupper(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_bool(fkv_jinja_is_case(c, s, true));
}
static jinja_value method_islower(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_bool(fkv_jinja_is_case(c, s, false));
}

/* ---- conversion ---- */

static jinja_value method_upper(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_case(c, s, true));
}
static jinja_value method_lower(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_case(c, s, false));
}
static jinja_value method_capitalize(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    (void)args;
    return fkv_jinja_of_string(fkv_jinja_capitalized(c, s, false));
}

/* Converts the first letter, and each letter after a character without case, to uppercase. Converts all other letters to
 * lowercase. Unlike the title filter, str.title() also capitalizes a letter after an apostrophe. */
static jinja_value method_title(jinja_context *c, jinja_string s, const jinja_arguments *args) {
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

static jinja_value method_replace(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string old;
    jinja_string new;
    if (!string_argument(c, args, 0, &old) || !string_argument(c, args, 1, &new)) return fkv_jinja_undefined();
    return fkv_jinja_of_string(fkv_jinja_replaced(c, s, old, new, fkv_jinja_count_argument(args, 2, "count")));
}

static jinja_value remove_end(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    jinja_string what;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (!has_affix(c, s, what, at_start)) return fkv_jinja_of_string(s);
    return fkv_jinja_of_string(at_start ? fkv_jinja_part(s, what.n_bytes, s.n_bytes)
                                        : fkv_jinja_part(s, 0, s.n_bytes - what.n_bytes));
}

static jinja_value method_removeprefix(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return remove_end(c, s, args, true);
}
static jinja_value method_removesuffix(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return remove_end(c, s, args, false);
}

static jinja_value method_join(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    const jinja_list *items = args->n > 0 ? fkv_jinja_items(c, &args->value[0]) : NULL;
    jinja_writer w = {.c = c};
    if (args->n == 0) return fkv_jinja_fail(c, "str.join() requires an iterable");
    for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++) {
        if (i > 0) fkv_jinja_write(&w, s);
        fkv_jinja_write_str(&w, &items->items[i]);
    }
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

/* Returns the argument that a replacement field of str.format() refers to. The field is empty, a digit or a name. */
static const jinja_value *format_field(jinja_context *c, const jinja_arguments *args, jinja_string field, size_t *next) {
    if (field.n_bytes == 0) return *next < args->n_positions ? &args->value[(*next)++] : NULL;
    if (field.n_bytes == 1 && field.text[0] >= '0' && field.text[0] <= '9') {
        size_t at = (size_t)(field.text[0] - '0');
        return at < args->n_positions ? &args->value[at] : NULL;
    }
    for (size_t i = args->n_positions; i < args->n; i++)
        if (fkv_jinja_same(c, args->name[i], field)) return &args->value[i];
    return NULL;
}

static jinja_value method_format(jinja_context *c, jinja_string s, const jinja_arguments *args) {
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
        size_t end = fkv_jinja_find(c, s, JINJA_TEXT("}"), i);
        const jinja_value *value = end == SIZE_MAX ? NULL : format_field(c, args, fkv_jinja_part(s, i + 1, end), &next);
        if (value == NULL) return fkv_jinja_fail(c, "str.format(): unsupported replacement field or missing argument");
        fkv_jinja_write_str(&w, value);
        i = end;
    }
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

/* Pads a string to a width on the left, on the right or on both sides. */
static jinja_value pad_string(jinja_context *c, jinja_string s, const jinja_arguments *args, bool left, bool right) {
    jinja_string fill = JINJA_TEXT(" ");
    if (args->n == 0 || args->value[0].kind != JINJA_INT) return fkv_jinja_fail(c, "the width must be an integer");
    if (args->n > 1 && !string_argument(c, args, 1, &fill)) return fkv_jinja_undefined();
    int64_t width = args->value[0].as.integer;
    int64_t n = width > 0 ? width - (int64_t)fkv_jinja_n_chars(c, s) : 0;
    if (n <= 0) return fkv_jinja_of_string(s);
    int64_t before = !left ? 0 : right ? n / 2 + (n & width & 1) : n; /* rounds in the same way as Python's str.center() */
    jinja_writer w = {.c = c};
    for (int64_t i = 0; i < before && !c->failed; i++) fkv_jinja_write(&w, fill);
    fkv_jinja_write(&w, s);
    for (int64_t i = before; i < n && !c->failed; i++) fkv_jinja_write(&w, fill);
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

static jinja_value method_ljust(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return pad_string(c, s, args, false, true);
}
static jinja_value method_rjust(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return pad_string(c, s, args, true, false);
}
static jinja_value method_center(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    return pad_string(c, s, args, true, true);
}

static jinja_value method_zfill(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    bool sign = s.n_bytes > 0 && (s.text[0] == '-' || s.text[0] == '+');
    jinja_arguments wanted = {.n = 2, .n_positions = 2, .value = {fkv_jinja_none(), fkv_jinja_of_string(JINJA_TEXT("0"))}};
    if (args->n == 1 && args->value[0].kind == JINJA_INT) { /* a width below 1 adds no padding */
        int64_t width = args->value[0].as.integer;
        wanted.value[0] = fkv_jinja_int(width > 0 ? width - sign : 0);
    }
    jinja_value digits = pad_string(c, fkv_jinja_part(s, sign, s.n_bytes), &wanted, true, false);
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
        {"capitalize", method_capitalize},
        {"center", method_center},
        {"count", method_count},
        {"endswith", method_endswith},
        {"find", method_find},
        {"format", method_format},
        {"index", method_index},
        {"isalnum", method_isalnum},
        {"isalpha", method_isalpha},
        {"isdecimal", method_isdecimal},
        {"isdigit", method_isdigit},
        {"islower", method_islower},
        {"isnumeric", method_isnumeric},
        {"isspace", method_isspace},
        {"isupper", method_isupper},
        {"join", method_join},
        {"ljust", method_ljust},
        {"lower", method_lower},
        {"lstrip", method_lstrip},
        {"partition", method_partition},
        {"removeprefix", method_removeprefix},
        {"removesuffix", method_removesuffix},
        {"replace", method_replace},
        {"rfind", method_rfind},
        {"rindex", method_rindex},
        {"rjust", method_rjust},
        {"rpartition", method_rpartition},
        {"rsplit", method_rsplit},
        {"rstrip", method_rstrip},
        {"split", method_split},
        {"splitlines", method_splitlines},
        {"startswith", method_startswith},
        {"strip", method_strip},
        {"title", method_title},
        {"upper", method_upper},
        {"zfill", method_zfill},
    };
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (fkv_jinja_is(name, methods[i].name)) return methods[i].run;
    return NULL;
}
