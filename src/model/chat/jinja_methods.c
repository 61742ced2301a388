/* Methods of strings, lists and dicts, and global functions, by name. See jinja_eval.h. */
#include "jinja_eval.h"

#include <time.h>

typedef enum method_kind {
    METHOD_STRIP,
    METHOD_LSTRIP,
    METHOD_RSTRIP,
    METHOD_SPLIT,
    METHOD_RSPLIT,
    METHOD_SPLITLINES,
    METHOD_STARTSWITH,
    METHOD_ENDSWITH,
    METHOD_REPLACE,
    METHOD_UPPER,
    METHOD_LOWER,
    METHOD_TITLE,
    METHOD_CAPITALIZE,
    METHOD_FIND,
    METHOD_RFIND,
    METHOD_COUNT,
    METHOD_JOIN,
    METHOD_FORMAT,
    METHOD_REMOVEPREFIX,
    METHOD_REMOVESUFFIX,
    METHOD_ISDIGIT,
    METHOD_APPEND,
    METHOD_INSERT,
    METHOD_EXTEND,
    METHOD_POP,
    METHOD_INDEX,
    METHOD_GET,
    METHOD_ITEMS,
    METHOD_KEYS,
    METHOD_VALUES,
    METHOD_UPDATE,
    METHOD_CYCLE
} method_kind;

static const struct {
    const char *name;
    jinja_kind of;
    method_kind kind;
} methods[] = {
    {"strip", JINJA_STRING, METHOD_STRIP},
    {"lstrip", JINJA_STRING, METHOD_LSTRIP},
    {"rstrip", JINJA_STRING, METHOD_RSTRIP},
    {"split", JINJA_STRING, METHOD_SPLIT},
    {"rsplit", JINJA_STRING, METHOD_RSPLIT},
    {"splitlines", JINJA_STRING, METHOD_SPLITLINES},
    {"startswith", JINJA_STRING, METHOD_STARTSWITH},
    {"endswith", JINJA_STRING, METHOD_ENDSWITH},
    {"replace", JINJA_STRING, METHOD_REPLACE},
    {"upper", JINJA_STRING, METHOD_UPPER},
    {"lower", JINJA_STRING, METHOD_LOWER},
    {"title", JINJA_STRING, METHOD_TITLE},
    {"capitalize", JINJA_STRING, METHOD_CAPITALIZE},
    {"find", JINJA_STRING, METHOD_FIND},
    {"rfind", JINJA_STRING, METHOD_RFIND},
    {"count", JINJA_STRING, METHOD_COUNT},
    {"join", JINJA_STRING, METHOD_JOIN},
    {"format", JINJA_STRING, METHOD_FORMAT},
    {"removeprefix", JINJA_STRING, METHOD_REMOVEPREFIX},
    {"removesuffix", JINJA_STRING, METHOD_REMOVESUFFIX},
    {"isdigit", JINJA_STRING, METHOD_ISDIGIT},
    {"isnumeric", JINJA_STRING, METHOD_ISDIGIT},
    {"append", JINJA_LIST, METHOD_APPEND},
    {"insert", JINJA_LIST, METHOD_INSERT},
    {"extend", JINJA_LIST, METHOD_EXTEND},
    {"pop", JINJA_LIST, METHOD_POP},
    {"index", JINJA_LIST, METHOD_INDEX},
    {"count", JINJA_LIST, METHOD_COUNT},
    {"get", JINJA_DICT, METHOD_GET},
    {"items", JINJA_DICT, METHOD_ITEMS},
    {"keys", JINJA_DICT, METHOD_KEYS},
    {"values", JINJA_DICT, METHOD_VALUES},
    {"pop", JINJA_DICT, METHOD_POP},
    {"update", JINJA_DICT, METHOD_UPDATE},
    {"cycle", JINJA_LOOP, METHOD_CYCLE},
};

static const char *const globals[] = {"range", "namespace", "dict", "raise_exception", "strftime_now"};

bool fkv_jinja_has_method(const jinja_value *a, jinja_string name) {
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (methods[i].of == a->kind && fkv_jinja_is(name, methods[i].name)) return true;
    return false;
}

bool fkv_jinja_has_global(jinja_string name) {
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (fkv_jinja_is(name, globals[i])) return true;
    return false;
}

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

/* ---- strings ---- */

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

static size_t find_last(jinja_string s, jinja_string what, size_t end) {
    size_t last = SIZE_MAX;
    for (size_t at = fkv_jinja_find(s, what, 0); at != SIZE_MAX && at + what.n_bytes <= end; at = fkv_jinja_find(s, what, at + 1))
        last = at;
    return last;
}

/* From the end, at most `most` times. */
static void split_from_end(jinja_context *c, jinja_value list, jinja_string s, jinja_string by, int64_t most) {
    size_t cuts[64];
    size_t n = 0;
    size_t end = s.n_bytes;
    for (size_t at = find_last(s, by, end); at != SIZE_MAX && (int64_t)n < most && n < 64; at = find_last(s, by, end))
        cuts[n++] = end = at;
    size_t begin = 0;
    while (n > 0 && !c->failed) {
        append_part(c, list, s, begin, cuts[--n]);
        begin = cuts[n] + by.n_bytes;
    }
    append_part(c, list, s, begin, s.n_bytes);
}

static jinja_value split(jinja_context *c, jinja_string s, const jinja_arguments *args, bool from_end) {
    jinja_value list = fkv_jinja_list(c, false);
    const jinja_value *by = fkv_jinja_argument(args, 0, "sep");
    int64_t most = fkv_jinja_count_argument(args, 1, "maxsplit");
    if (by == NULL || by->kind == JINJA_NONE) {
        split_blanks(c, list, s, most);
    } else if (by->kind != JINJA_STRING || by->as.string.n_bytes == 0) {
        fkv_jinja_fail(c, "split by what is not a string, or empty");
    } else if (from_end && most != INT64_MAX) {
        split_from_end(c, list, s, by->as.string, most);
    } else {
        split_at(c, list, s, by->as.string, most);
    }
    return list;
}

static jinja_value split_lines(jinja_context *c, jinja_string s) {
    jinja_value list = fkv_jinja_list(c, false);
    for (size_t begin = 0; begin < s.n_bytes && !c->failed;) {
        size_t end = begin;
        while (end < s.n_bytes && s.text[end] != '\n' && s.text[end] != '\r') end++;
        append_part(c, list, s, begin, end);
        begin = end + 1 + (end + 1 < s.n_bytes && s.text[end] == '\r' && s.text[end + 1] == '\n');
    }
    return list;
}

static bool ends_at(jinja_string s, jinja_string what, bool at_start) {
    if (what.n_bytes > s.n_bytes) return false;
    size_t begin = at_start ? 0 : s.n_bytes - what.n_bytes;
    return fkv_jinja_same(fkv_jinja_part(s, begin, begin + what.n_bytes), what);
}

static jinja_value begins_or_ends(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    const jinja_value *what = args->n > 0 ? &args->value[0] : NULL;
    if (what != NULL && what->kind == JINJA_LIST) {
        for (size_t i = 0; i < what->as.list->n_items; i++)
            if (what->as.list->items[i].kind == JINJA_STRING && ends_at(s, what->as.list->items[i].as.string, at_start))
                return fkv_jinja_bool(true);
        return fkv_jinja_bool(false);
    }
    jinja_string one;
    if (!string_argument(c, args, 0, &one)) return fkv_jinja_undefined();
    return fkv_jinja_bool(ends_at(s, one, at_start));
}

static jinja_value replace(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string old;
    jinja_string new;
    if (!string_argument(c, args, 0, &old) || !string_argument(c, args, 1, &new)) return fkv_jinja_undefined();
    return fkv_jinja_of_string(fkv_jinja_replaced(c, s, old, new, fkv_jinja_count_argument(args, 2, "count")));
}

static jinja_value find(jinja_context *c, jinja_string s, const jinja_arguments *args, bool last) {
    jinja_string what;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    size_t at = last ? find_last(s, what, s.n_bytes) : fkv_jinja_find(s, what, 0);
    return fkv_jinja_int(at == SIZE_MAX ? -1 : (int64_t)fkv_jinja_n_chars(fkv_jinja_part(s, 0, at)));
}

static jinja_value count(jinja_context *c, jinja_string s, const jinja_arguments *args) {
    jinja_string what;
    int64_t n = 0;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (what.n_bytes == 0) return fkv_jinja_int((int64_t)fkv_jinja_n_chars(s) + 1);
    for (size_t at = fkv_jinja_find(s, what, 0); at != SIZE_MAX; at = fkv_jinja_find(s, what, at + what.n_bytes)) n++;
    return fkv_jinja_int(n);
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

static jinja_value remove_end(jinja_context *c, jinja_string s, const jinja_arguments *args, bool at_start) {
    jinja_string what;
    if (!string_argument(c, args, 0, &what)) return fkv_jinja_undefined();
    if (!ends_at(s, what, at_start)) return fkv_jinja_of_string(s);
    return fkv_jinja_of_string(at_start ? fkv_jinja_part(s, what.n_bytes, s.n_bytes)
                                        : fkv_jinja_part(s, 0, s.n_bytes - what.n_bytes));
}

static jinja_value is_digits(jinja_string s) {
    for (size_t i = 0; i < s.n_bytes; i++)
        if (s.text[i] < '0' || s.text[i] > '9') return fkv_jinja_bool(false);
    return fkv_jinja_bool(s.n_bytes > 0);
}

static jinja_value strip(jinja_string s, const jinja_arguments *args, bool left, bool right) {
    bool named = args->n > 0 && args->value[0].kind == JINJA_STRING;
    return fkv_jinja_of_string(fkv_jinja_strip(s, named ? &args->value[0].as.string : NULL, left, right));
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

static jinja_value string_method(jinja_context *c, method_kind kind, jinja_string s, const jinja_arguments *args) {
    switch (kind) {
    case METHOD_STRIP: return strip(s, args, true, true);
    case METHOD_LSTRIP: return strip(s, args, true, false);
    case METHOD_RSTRIP: return strip(s, args, false, true);
    case METHOD_SPLIT: return split(c, s, args, false);
    case METHOD_RSPLIT: return split(c, s, args, true);
    case METHOD_SPLITLINES: return split_lines(c, s);
    case METHOD_STARTSWITH: return begins_or_ends(c, s, args, true);
    case METHOD_ENDSWITH: return begins_or_ends(c, s, args, false);
    case METHOD_REPLACE: return replace(c, s, args);
    case METHOD_UPPER: return fkv_jinja_of_string(fkv_jinja_case(c, s, true));
    case METHOD_LOWER: return fkv_jinja_of_string(fkv_jinja_case(c, s, false));
    case METHOD_TITLE: return fkv_jinja_of_string(fkv_jinja_capitalized(c, s, true));
    case METHOD_CAPITALIZE: return fkv_jinja_of_string(fkv_jinja_capitalized(c, s, false));
    case METHOD_FIND: return find(c, s, args, false);
    case METHOD_RFIND: return find(c, s, args, true);
    case METHOD_COUNT: return count(c, s, args);
    case METHOD_JOIN: return join(c, s, args);
    case METHOD_FORMAT: return format(c, s, args);
    case METHOD_REMOVEPREFIX: return remove_end(c, s, args, true);
    case METHOD_REMOVESUFFIX: return remove_end(c, s, args, false);
    default: return is_digits(s);
    }
}

/* ---- lists and dicts ---- */

static jinja_value pop_item(jinja_context *c, jinja_list *list, const jinja_arguments *args) {
    int64_t n = (int64_t)list->n_items;
    int64_t at = args->n > 0 && args->value[0].kind == JINJA_INT ? args->value[0].as.integer : -1;
    if (at < 0) at += n;
    if (at < 0 || at >= n) return fkv_jinja_fail(c, "pop from a list that does not have that item");
    jinja_value item = list->items[at];
    memmove(list->items + at, list->items + at + 1, (size_t)(n - at - 1) * sizeof *list->items);
    list->n_items--;
    return item;
}

static jinja_value insert_item(jinja_context *c, jinja_value value, const jinja_arguments *args) {
    jinja_list *list = value.as.list;
    if (args->n != 2 || args->value[0].kind != JINJA_INT) return fkv_jinja_fail(c, "insert takes a position and a value");
    int64_t n = (int64_t)list->n_items;
    int64_t at = args->value[0].as.integer < 0 ? args->value[0].as.integer + n : args->value[0].as.integer;
    at = at < 0 ? 0 : at > n ? n : at;
    fkv_jinja_append(c, value, args->value[1]);
    if (c->failed) return fkv_jinja_undefined();
    memmove(list->items + at + 1, list->items + at, (size_t)(n - at) * sizeof *list->items);
    list->items[at] = args->value[1];
    return fkv_jinja_none();
}

static jinja_value index_of(jinja_context *c, const jinja_list *list, const jinja_value *what) {
    for (size_t i = 0; i < list->n_items; i++)
        if (fkv_jinja_equal(c, &list->items[i], what)) return fkv_jinja_int((int64_t)i);
    return fkv_jinja_fail(c, "index of a value that is not in the list");
}

static jinja_value count_items(jinja_context *c, const jinja_list *list, const jinja_value *what) {
    int64_t n = 0;
    for (size_t i = 0; i < list->n_items; i++) n += fkv_jinja_equal(c, &list->items[i], what);
    return fkv_jinja_int(n);
}

static jinja_value list_method(jinja_context *c, method_kind kind, jinja_value value, const jinja_arguments *args) {
    if (kind == METHOD_POP) return pop_item(c, value.as.list, args);
    if (kind == METHOD_INSERT) return insert_item(c, value, args);
    if (args->n != 1) return fkv_jinja_fail(c, "a method of lists is called without the value that it takes");
    if (kind == METHOD_INDEX) return index_of(c, value.as.list, &args->value[0]);
    if (kind == METHOD_COUNT) return count_items(c, value.as.list, &args->value[0]);
    if (kind == METHOD_APPEND) {
        fkv_jinja_append(c, value, args->value[0]);
        return fkv_jinja_none();
    }
    const jinja_list *more = fkv_jinja_items(c, &args->value[0]);
    size_t n = more != NULL ? more->n_items : 0; /* a list may be extended by itself */
    for (size_t i = 0; i < n && !c->failed; i++) fkv_jinja_append(c, value, more->items[i]);
    return fkv_jinja_none();
}

static jinja_value pop_key(jinja_context *c, jinja_dict *dict, const jinja_arguments *args) {
    for (size_t i = 0; args->n > 0 && i < dict->n_pairs; i++) {
        if (!fkv_jinja_equal(c, &dict->pairs[i].key, &args->value[0])) continue;
        jinja_value value = dict->pairs[i].value;
        memmove(dict->pairs + i, dict->pairs + i + 1, (dict->n_pairs - i - 1) * sizeof *dict->pairs);
        dict->n_pairs--;
        return value;
    }
    return args->n > 1 ? args->value[1] : fkv_jinja_fail(c, "pop of a key that is not there");
}

static jinja_value update(jinja_context *c, jinja_dict *dict, const jinja_arguments *args) {
    if (args->n_positions == 1 && args->value[0].kind == JINJA_DICT) {
        const jinja_dict *more = args->value[0].as.dict;
        for (size_t i = 0; more != dict && i < more->n_pairs; i++)
            fkv_jinja_set(c, dict, more->pairs[i].key, more->pairs[i].value);
    } else if (args->n_positions > 0) {
        return fkv_jinja_fail(c, "update takes a dict");
    }
    for (size_t i = args->n_positions; i < args->n; i++)
        fkv_jinja_set(c, dict, fkv_jinja_of_string(args->name[i]), args->value[i]);
    return fkv_jinja_none();
}

static jinja_value dict_method(jinja_context *c, method_kind kind, jinja_dict *dict, const jinja_arguments *args) {
    const jinja_value *found = NULL;
    jinja_value list;
    switch (kind) {
    case METHOD_GET:
        if (args->n == 0) return fkv_jinja_fail(c, "get without a key");
        found = fkv_jinja_get(c, dict, args->value[0]);
        return found != NULL ? *found : args->n > 1 ? args->value[1] : fkv_jinja_none();
    case METHOD_POP: return pop_key(c, dict, args);
    case METHOD_UPDATE: return update(c, dict, args);
    default: break;
    }
    list = fkv_jinja_list(c, false);
    for (size_t i = 0; i < dict->n_pairs && !c->failed; i++) {
        const jinja_pair *pair = &dict->pairs[i];
        fkv_jinja_append(c, list,
                         kind == METHOD_KEYS     ? pair->key
                         : kind == METHOD_VALUES ? pair->value
                                                 : fkv_jinja_pair_of(c, pair->key, pair->value));
    }
    return list;
}

/* ---- global functions ---- */

static jinja_value range(jinja_context *c, const jinja_arguments *args) {
    int64_t part[3] = {0, 0, 1};
    for (size_t i = 0; i < args->n; i++)
        if (args->value[i].kind != JINJA_INT || i == 3) return fkv_jinja_fail(c, "range takes up to three whole numbers");
    if (args->n == 0) return fkv_jinja_fail(c, "range takes up to three whole numbers");
    part[1] = args->value[0].as.integer;
    for (size_t i = 0; i < args->n && args->n > 1; i++) part[i] = args->value[i].as.integer;
    if (part[2] == 0) return fkv_jinja_fail(c, "range with a step of 0");
    jinja_value list = fkv_jinja_list(c, false);
    int64_t i = part[0];
    while ((part[2] > 0 ? i < part[1] : i > part[1]) && fkv_jinja_step(c, 1)) {
        fkv_jinja_append(c, list, fkv_jinja_int(i));
        if (__builtin_add_overflow(i, part[2], &i)) break;
    }
    return list;
}

static jinja_value new_dict(jinja_context *c, const jinja_arguments *args, bool is_namespace) {
    jinja_value dict = fkv_jinja_dict(c, is_namespace);
    if (!c->failed) (void)update(c, dict.as.dict, args);
    return dict;
}

static jinja_value raise(jinja_context *c, const jinja_arguments *args) {
    jinja_string s = args->n > 0 ? fkv_jinja_str(c, &args->value[0]) : JINJA_TEXT("no reason is given");
    return fkv_jinja_fail(c, "it refuses this conversation: %.*s", s.n_bytes < 300 ? (int)s.n_bytes : 300, s.text);
}

static jinja_value format_date(jinja_context *c, const jinja_arguments *args) {
    char pattern[128];
    char *text = fkv_jinja_take(c, 256, 1);
    struct tm broken_down;
    time_t now = (time_t)c->now;
    if (!c->has_now) return fkv_jinja_fail(c, "it asks for the date, and none was given");
    if (args->n != 1 || args->value[0].kind != JINJA_STRING || args->value[0].as.string.n_bytes >= sizeof pattern || text == NULL)
        return fkv_jinja_fail(c, "strftime_now takes a format of at most %zu bytes", sizeof pattern - 1);
    memcpy(pattern, args->value[0].as.string.text, args->value[0].as.string.n_bytes);
    pattern[args->value[0].as.string.n_bytes] = 0;
    if (gmtime_r(&now, &broken_down) == NULL) return fkv_jinja_fail(c, "the date is out of range");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, 256, pattern, &broken_down);
#pragma GCC diagnostic pop
    return fkv_jinja_of_string((jinja_string){text, NULL, n, false});
}

static jinja_value call_global(jinja_context *c, jinja_string name, const jinja_arguments *args) {
    if (fkv_jinja_is(name, "range")) return range(c, args);
    if (fkv_jinja_is(name, "namespace")) return new_dict(c, args, true);
    if (fkv_jinja_is(name, "dict")) return new_dict(c, args, false);
    if (fkv_jinja_is(name, "raise_exception")) return raise(c, args);
    return format_date(c, args);
}

jinja_value fkv_jinja_builtin(jinja_context *c, const jinja_bound *what, const jinja_arguments *args) {
    jinja_value object = what->object;
    if (object.kind == JINJA_UNDEFINED) return call_global(c, what->name, args);
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        if (methods[i].of != object.kind || !fkv_jinja_is(what->name, methods[i].name)) continue;
        if (object.kind == JINJA_STRING) return string_method(c, methods[i].kind, object.as.string, args);
        if (object.kind == JINJA_LIST) return list_method(c, methods[i].kind, object, args);
        if (object.kind == JINJA_DICT) return dict_method(c, methods[i].kind, object.as.dict, args);
        if (args->n == 0) return fkv_jinja_fail(c, "cycle without values");
        return args->value[object.as.loop->index % args->n];
    }
    return fkv_jinja_fail(c, "a method that is not known");
}
