/* Implements the Python semantics of values, which chat templates expect: truth, equality, order, str(), repr(), JSON and dicts.
 * See jinja_value.h. */
#include "jinja_value.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_NESTING = 100 }; /* maximum nesting depth of lists and dicts; bounds the recursion if a list contains itself */

const char *fkv_jinja_kind_name(const jinja_value *v) {
    switch (v->kind) {
    case JINJA_UNDEFINED: return "Undefined";
    case JINJA_NONE: return "NoneType";
    case JINJA_BOOL: return "bool";
    case JINJA_INT: return "int";
    case JINJA_FLOAT: return "float";
    case JINJA_STRING: return "str";
    case JINJA_LIST: return v->as.list->is_tuple ? "tuple" : "list";
    case JINJA_DICT: return v->as.dict->is_namespace ? "Namespace" : "dict";
    case JINJA_LOOP: return "LoopContext";
    default: return "function";
    }
}

bool fkv_jinja_has_length(const jinja_value *v) {
    return v->kind == JINJA_UNDEFINED || v->kind == JINJA_STRING || v->kind == JINJA_LIST ||
           (v->kind == JINJA_DICT && !v->as.dict->is_namespace);
}

int64_t fkv_jinja_length(jinja_context *c, const jinja_value *v) {
    switch (v->kind) {
    case JINJA_UNDEFINED: return 0;
    case JINJA_STRING: return (int64_t)fkv_jinja_n_chars(c, v->as.string);
    case JINJA_LIST: return (int64_t)v->as.list->n_items;
    case JINJA_DICT: return v->as.dict->is_namespace ? -1 : (int64_t)v->as.dict->n_pairs;
    default: return -1;
    }
}

bool fkv_jinja_truth(const jinja_value *v) {
    switch (v->kind) {
    case JINJA_UNDEFINED:
    case JINJA_NONE: return false;
    case JINJA_BOOL: return v->as.truth;
    case JINJA_INT: return v->as.integer != 0;
    case JINJA_FLOAT: return v->as.real != 0.0;
    case JINJA_STRING: return v->as.string.n_bytes > 0;
    case JINJA_LIST: return v->as.list->n_items > 0;
    case JINJA_DICT: return v->as.dict->is_namespace || v->as.dict->n_pairs > 0;
    default: return true;
    }
}

bool fkv_jinja_number(const jinja_value *v, double *x) {
    if (v->kind == JINJA_INT)
        *x = (double)v->as.integer;
    else if (v->kind == JINJA_FLOAT)
        *x = v->as.real;
    else if (v->kind == JINJA_BOOL)
        *x = v->as.truth ? 1.0 : 0.0;
    else
        return false;
    return true;
}

static bool equal_values(jinja_context *c, const jinja_value *a, const jinja_value *b, uint32_t depth);

static bool equal_lists(jinja_context *c, const jinja_list *a, const jinja_list *b, uint32_t depth) {
    if (a->n_items != b->n_items || a->is_tuple != b->is_tuple) return false;
    for (size_t i = 0; i < a->n_items; i++)
        if (!equal_values(c, &a->items[i], &b->items[i], depth)) return false;
    return true;
}

static bool equal_dicts(jinja_context *c, const jinja_dict *a, const jinja_dict *b, uint32_t depth) {
    if (a->is_namespace || b->is_namespace) return a == b;
    if (a->n_pairs != b->n_pairs) return false;
    for (size_t i = 0; i < a->n_pairs; i++) {
        const jinja_value *other = fkv_jinja_get(c, b, a->pairs[i].key);
        if (other == NULL || !equal_values(c, &a->pairs[i].value, other, depth)) return false;
    }
    return true;
}

static bool equal_values(jinja_context *c, const jinja_value *a, const jinja_value *b, uint32_t depth) {
    double x;
    double y;
    if (!fkv_jinja_charge(c, JINJA_WORK_NODE)) return false;
    if (depth > MAX_NESTING) {
        fkv_jinja_fail(c, "values are nested more than %d levels deep", MAX_NESTING);
        return false;
    }
    if (a->kind == JINJA_INT && b->kind == JINJA_INT) return a->as.integer == b->as.integer;
    if (fkv_jinja_number(a, &x) && fkv_jinja_number(b, &y)) return x == y;
    if (a->kind != b->kind) return false;
    switch (a->kind) {
    case JINJA_STRING: return fkv_jinja_same(c, a->as.string, b->as.string);
    case JINJA_LIST: return equal_lists(c, a->as.list, b->as.list, depth + 1);
    case JINJA_DICT: return equal_dicts(c, a->as.dict, b->as.dict, depth + 1);
    case JINJA_LOOP: return a->as.loop == b->as.loop;
    case JINJA_MACRO: return a->as.macro == b->as.macro;
    case JINJA_BUILTIN: return a->as.bound == b->as.bound;
    default: return true; /* undefined equals undefined, and none equals none */
    }
}

bool fkv_jinja_equal(jinja_context *c, const jinja_value *a, const jinja_value *b) { return equal_values(c, a, b, 0); }

static int sign_of_int(int64_t x) { return (x > 0) - (x < 0); }

static int order_strings(jinja_context *c, jinja_string a, jinja_string b) {
    size_t n = a.n_bytes < b.n_bytes ? a.n_bytes : b.n_bytes;
    if (!fkv_jinja_charge(c, fkv_jinja_copy_work(n))) return 0;
    int order = n > 0 ? memcmp(a.text, b.text, n) : 0;
    return order != 0 ? sign_of_int(order) : sign_of_int((int64_t)a.n_bytes - (int64_t)b.n_bytes);
}

static int order_values(jinja_context *c, const jinja_value *a, const jinja_value *b, uint32_t depth) {
    double x;
    double y;
    if (!fkv_jinja_charge(c, JINJA_WORK_NODE)) return 0;
    if (a->kind == JINJA_INT && b->kind == JINJA_INT) return (a->as.integer > b->as.integer) - (a->as.integer < b->as.integer);
    if (fkv_jinja_number(a, &x) && fkv_jinja_number(b, &y)) return (x > y) - (x < y);
    if (a->kind == JINJA_STRING && b->kind == JINJA_STRING) return order_strings(c, a->as.string, b->as.string);
    if (a->kind == JINJA_LIST && b->kind == JINJA_LIST && depth < MAX_NESTING) {
        const jinja_list *left = a->as.list;
        const jinja_list *right = b->as.list;
        for (size_t i = 0; i < left->n_items && i < right->n_items && !c->failed; i++)
            if (!fkv_jinja_equal(c, &left->items[i], &right->items[i]))
                return order_values(c, &left->items[i], &right->items[i], depth + 1);
        return sign_of_int((int64_t)left->n_items - (int64_t)right->n_items);
    }
    fkv_jinja_fail(c, "cannot compare %s with %s", fkv_jinja_kind_name(a), fkv_jinja_kind_name(b));
    return 0;
}

int fkv_jinja_order(jinja_context *c, const jinja_value *a, const jinja_value *b) { return order_values(c, a, b, 0); }

bool fkv_jinja_contains(jinja_context *c, const jinja_value *in, const jinja_value *what) {
    if (in->kind == JINJA_STRING) {
        if (what->kind == JINJA_STRING) return fkv_jinja_find(c, in->as.string, what->as.string, 0) != SIZE_MAX;
        fkv_jinja_fail(c, "'in' on a string requires a string (got %s)", fkv_jinja_kind_name(what));
        return false;
    }
    if (in->kind == JINJA_DICT) return fkv_jinja_get(c, in->as.dict, *what) != NULL;
    const jinja_list *items = fkv_jinja_items(c, in);
    for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++)
        if (fkv_jinja_equal(c, &items->items[i], what)) return true;
    return false;
}

jinja_list *fkv_jinja_items(jinja_context *c, const jinja_value *v) {
    if (v->kind == JINJA_LIST) return v->as.list;
    jinja_value list = fkv_jinja_list(c, false);
    if (c->failed) return NULL;
    if (v->kind == JINJA_STRING) {
        for (size_t at = 0; at < v->as.string.n_bytes && !c->failed;) {
            size_t end = at + fkv_jinja_char_bytes(v->as.string, at);
            fkv_jinja_append(c, list, fkv_jinja_of_string(fkv_jinja_part(v->as.string, at, end)));
            at = end;
        }
    } else if (v->kind == JINJA_DICT && !v->as.dict->is_namespace) {
        for (size_t i = 0; i < v->as.dict->n_pairs; i++) fkv_jinja_append(c, list, v->as.dict->pairs[i].key);
    } else if (v->kind != JINJA_UNDEFINED) {
        fkv_jinja_fail(c, "cannot iterate over %s", fkv_jinja_kind_name(v));
        return NULL;
    }
    return list.as.list;
}

/* ---- str() and repr() ---- */

/* Writes a float as Python does, with the fewest digits that parse to the same value. */
static void write_float_text(jinja_writer *w, double x) {
    char digits[32];
    char text[48];
    if (isnan(x) || isinf(x)) {
        fkv_jinja_write_text(w, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
        return;
    }
    int precision = 1;
    do {
        if (!fkv_jinja_charge(w->c, 2 * JINJA_WORK_NUMBER_TEXT)) return;
        (void)snprintf(digits, sizeof digits, "%.*e", precision - 1, x);
    } while (strtod(digits, NULL) != x && ++precision <= 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent < -4 || exponent >= 16) {
        (void)snprintf(text, sizeof text, "%.*se%c%02d", (int)(strchr(digits, 'e') - digits), digits, exponent < 0 ? '-' : '+',
                       abs(exponent));
    } else {
        (void)snprintf(text, sizeof text, "%.*f", precision - 1 - exponent > 1 ? precision - 1 - exponent : 1, x);
    }
    fkv_jinja_write_text(w, text);
}

static void write_int_text(jinja_writer *w, int64_t n) {
    char text[32];
    if (!fkv_jinja_charge(w->c, JINJA_WORK_NUMBER_TEXT)) return;
    (void)snprintf(text, sizeof text, "%lld", (long long)n);
    fkv_jinja_write_text(w, text);
}

/* Writes a quoted string with the escapes of Python's repr(). */
static void write_quoted_string(jinja_writer *w, jinja_string s) {
    bool has_single = fkv_jinja_find(w->c, s, JINJA_TEXT("'"), 0) != SIZE_MAX;
    bool has_double = fkv_jinja_find(w->c, s, JINJA_TEXT("\""), 0) != SIZE_MAX;
    char quote = has_single && !has_double ? '"' : '\'';
    const jinja_string mark = {&quote, NULL, 1, false};
    fkv_jinja_write(w, mark);
    size_t plain = 0; /* offset of the first byte that has not been written yet */
    if (!fkv_jinja_charge(w->c, fkv_jinja_walk_work(s.n_bytes))) return;
    for (size_t at = 0; at < s.n_bytes && !w->c->failed;) {
        size_t n = fkv_jinja_char_bytes(s, at);
        uint32_t x = fkv_jinja_char(s, at);
        char escape[16] = "";
        if (x == (uint32_t)(uint8_t)quote || x == '\\')
            (void)snprintf(escape, sizeof escape, "\\%c", (int)x);
        else if (x == '\n' || x == '\r' || x == '\t')
            (void)snprintf(escape, sizeof escape, "\\%c", x == '\n' ? 'n' : x == '\r' ? 'r' : 't');
        else if (x < 0x20 || (x >= 0x7f && x < 0xa1) || x == 0xad)
            (void)snprintf(escape, sizeof escape, "\\x%02x", x);
        else if (x > 0x20 && (fkv_jinja_is_space(x) || (x >= 0x200b && x <= 0x200f) || x == 0xfeff))
            (void)snprintf(escape, sizeof escape, "\\u%04x", x);
        if (escape[0] != 0) {
            fkv_jinja_write(w, fkv_jinja_part(s, plain, at));
            fkv_jinja_write_text(w, escape);
            plain = at + n;
        }
        at += n;
    }
    fkv_jinja_write(w, fkv_jinja_part(s, plain, s.n_bytes));
    fkv_jinja_write(w, mark);
}

static void write_repr(jinja_writer *w, const jinja_value *v, uint32_t depth);

static void write_list_repr(jinja_writer *w, const jinja_list *list, uint32_t depth) {
    fkv_jinja_write_text(w, list->is_tuple ? "(" : "[");
    for (size_t i = 0; i < list->n_items && !w->c->failed; i++) {
        if (i > 0) fkv_jinja_write_text(w, ", ");
        write_repr(w, &list->items[i], depth + 1);
    }
    if (list->is_tuple && list->n_items == 1) fkv_jinja_write_text(w, ",");
    fkv_jinja_write_text(w, list->is_tuple ? ")" : "]");
}

static void write_dict_repr(jinja_writer *w, const jinja_dict *dict, uint32_t depth) {
    if (dict->is_namespace) {
        fkv_jinja_write_text(w, "<Namespace>");
        return;
    }
    fkv_jinja_write_text(w, "{");
    for (size_t i = 0; i < dict->n_pairs && !w->c->failed; i++) {
        if (i > 0) fkv_jinja_write_text(w, ", ");
        write_repr(w, &dict->pairs[i].key, depth + 1);
        fkv_jinja_write_text(w, ": ");
        write_repr(w, &dict->pairs[i].value, depth + 1);
    }
    fkv_jinja_write_text(w, "}");
}

static void write_repr(jinja_writer *w, const jinja_value *v, uint32_t depth) {
    if (!fkv_jinja_charge(w->c, JINJA_WORK_NODE)) return;
    if (depth > MAX_NESTING) {
        fkv_jinja_fail(w->c, "values are nested more than %d levels deep", MAX_NESTING);
        return;
    }
    switch (v->kind) {
    case JINJA_UNDEFINED: fkv_jinja_write_text(w, depth > 0 ? "Undefined" : ""); break;
    case JINJA_NONE: fkv_jinja_write_text(w, "None"); break;
    case JINJA_BOOL: fkv_jinja_write_text(w, v->as.truth ? "True" : "False"); break;
    case JINJA_INT: write_int_text(w, v->as.integer); break;
    case JINJA_FLOAT: write_float_text(w, v->as.real); break;
    case JINJA_STRING: write_quoted_string(w, v->as.string); break;
    case JINJA_LIST: write_list_repr(w, v->as.list, depth); break;
    case JINJA_DICT: write_dict_repr(w, v->as.dict, depth); break;
    default: fkv_jinja_fail(w->c, "cannot convert a %s to a string", fkv_jinja_kind_name(v)); break;
    }
}

void fkv_jinja_write_repr(jinja_writer *w, const jinja_value *v) { write_repr(w, v, 0); }

void fkv_jinja_write_str(jinja_writer *w, const jinja_value *v) {
    if (v->kind == JINJA_STRING)
        fkv_jinja_write(w, v->as.string);
    else
        write_repr(w, v, 0);
}

jinja_string fkv_jinja_str(jinja_context *c, const jinja_value *v) {
    if (v->kind == JINJA_STRING) return v->as.string;
    jinja_writer w = {.c = c};
    fkv_jinja_write_str(&w, v);
    return fkv_jinja_written(&w);
}

/* ---- JSON output ---- */

static void write_json_string(jinja_writer *w, jinja_string s, bool ascii) {
    fkv_jinja_write_text(w, "\"");
    size_t plain = 0; /* offset of the first byte that has not been written yet */
    if (!fkv_jinja_charge(w->c, fkv_jinja_walk_work(s.n_bytes))) return;
    for (size_t at = 0; at < s.n_bytes && !w->c->failed;) {
        size_t n = fkv_jinja_char_bytes(s, at);
        uint32_t x = fkv_jinja_char(s, at);
        char escape[16] = "";
        const char *named = x == '"'    ? "\\\""
                            : x == '\\' ? "\\\\"
                            : x == '\n' ? "\\n"
                            : x == '\r' ? "\\r"
                            : x == '\t' ? "\\t"
                            : x == '\b' ? "\\b"
                            : x == '\f' ? "\\f"
                                        : NULL;
        if (named != NULL)
            (void)snprintf(escape, sizeof escape, "%s", named);
        else if (x < 0x20 || (ascii && x > 0x7e && x < 0x10000))
            (void)snprintf(escape, sizeof escape, "\\u%04x", x);
        else if (ascii && x >= 0x10000)
            (void)snprintf(escape, sizeof escape, "\\u%04x\\u%04x", 0xd800 + ((x - 0x10000) >> 10),
                           0xdc00 + ((x - 0x10000) & 0x3ff));
        if (escape[0] != 0) {
            fkv_jinja_write(w, fkv_jinja_part(s, plain, at));
            fkv_jinja_write_text(w, escape);
            plain = at + n;
        }
        at += n;
    }
    fkv_jinja_write(w, fkv_jinja_part(s, plain, s.n_bytes));
    fkv_jinja_write_text(w, "\"");
}

static void write_json_break(jinja_writer *w, const jinja_json_style *style, uint32_t level) {
    if (style->indent < 0) return;
    fkv_jinja_write_text(w, "\n");
    for (int64_t i = 0; i < style->indent * (int64_t)level && !w->c->failed; i++) fkv_jinja_write_text(w, " ");
}

static void write_json_list(jinja_writer *w, const jinja_list *list, const jinja_json_style *style, uint32_t level) {
    fkv_jinja_write_text(w, "[");
    for (size_t i = 0; i < list->n_items && !w->c->failed; i++) {
        if (i > 0) fkv_jinja_write(w, style->item_separator);
        write_json_break(w, style, level + 1);
        fkv_jinja_write_json(w, &list->items[i], style, level + 1);
    }
    if (list->n_items > 0) write_json_break(w, style, level);
    fkv_jinja_write_text(w, "]");
}

/* Returns the entries of a dict, sorted by key if requested. */
static const jinja_pair *json_pairs(jinja_context *c, const jinja_dict *dict, bool sorted) {
    if (!sorted || dict->n_pairs == 0) return dict->pairs;
    jinja_pair *pairs = fkv_jinja_take(c, dict->n_pairs, sizeof *pairs);
    for (size_t i = 0; pairs != NULL && i < dict->n_pairs; i++) {
        size_t at = i;
        for (; at > 0 && fkv_jinja_order(c, &pairs[at - 1].key, &dict->pairs[i].key) > 0; at--) pairs[at] = pairs[at - 1];
        pairs[at] = dict->pairs[i];
    }
    return pairs;
}

static void write_json_key(jinja_writer *w, const jinja_value *key, const jinja_json_style *style) {
    if (key->kind == JINJA_STRING) {
        write_json_string(w, key->as.string, style->ascii);
        return;
    }
    if (key->kind == JINJA_LIST || key->kind == JINJA_DICT) {
        fkv_jinja_fail(w->c, "a key of type %s cannot be converted to JSON", fkv_jinja_kind_name(key));
        return;
    }
    fkv_jinja_write_text(w, "\"");
    fkv_jinja_write_json(w, key, style, 0);
    fkv_jinja_write_text(w, "\"");
}

static void write_json_dict(jinja_writer *w, const jinja_dict *dict, const jinja_json_style *style, uint32_t level) {
    const jinja_pair *pairs = json_pairs(w->c, dict, style->sort_keys);
    fkv_jinja_write_text(w, "{");
    for (size_t i = 0; i < dict->n_pairs && !w->c->failed; i++) {
        if (i > 0) fkv_jinja_write(w, style->item_separator);
        write_json_break(w, style, level + 1);
        write_json_key(w, &pairs[i].key, style);
        fkv_jinja_write(w, style->key_separator);
        fkv_jinja_write_json(w, &pairs[i].value, style, level + 1);
    }
    if (dict->n_pairs > 0) write_json_break(w, style, level);
    fkv_jinja_write_text(w, "}");
}

void fkv_jinja_write_json(jinja_writer *w, const jinja_value *v, const jinja_json_style *style, uint32_t level) {
    if (!fkv_jinja_charge(w->c, JINJA_WORK_NODE)) return;
    if (level > MAX_NESTING) {
        fkv_jinja_fail(w->c, "values are nested more than %d levels deep", MAX_NESTING);
        return;
    }
    switch (v->kind) {
    case JINJA_NONE: fkv_jinja_write_text(w, "null"); break;
    case JINJA_BOOL: fkv_jinja_write_text(w, v->as.truth ? "true" : "false"); break;
    case JINJA_INT: write_int_text(w, v->as.integer); break;
    case JINJA_FLOAT:
        if (isnan(v->as.real) || isinf(v->as.real))
            fkv_jinja_write_text(w, isnan(v->as.real) ? "NaN" : v->as.real > 0 ? "Infinity" : "-Infinity");
        else
            write_float_text(w, v->as.real);
        break;
    case JINJA_STRING: write_json_string(w, v->as.string, style->ascii); break;
    case JINJA_LIST: write_json_list(w, v->as.list, style, level); break;
    case JINJA_DICT: write_json_dict(w, v->as.dict, style, level); break;
    default: fkv_jinja_fail(w->c, "a %s cannot be converted to JSON", fkv_jinja_kind_name(v)); break;
    }
}

/* ---- dicts ---- */

const jinja_value *fkv_jinja_get(jinja_context *c, const jinja_dict *dict, jinja_value key) {
    for (size_t i = 0; i < dict->n_pairs && !c->failed; i++)
        if (fkv_jinja_equal(c, &dict->pairs[i].key, &key)) return &dict->pairs[i].value;
    return NULL;
}

const jinja_value *fkv_jinja_get_named(jinja_context *c, const jinja_dict *dict, jinja_string name) {
    return fkv_jinja_get(c, dict, fkv_jinja_of_string(name));
}

/* Returns whether the key is hashable in Python. Lists and dicts are not hashable, so a dict can never contain itself as a key.
 */
static bool is_hashable(jinja_context *c, const jinja_value *key, uint32_t depth) {
    if (key->kind == JINJA_DICT) return key->as.dict->is_namespace;
    if (key->kind != JINJA_LIST) return true;
    if (!key->as.list->is_tuple || depth > MAX_NESTING) return false;
    for (size_t i = 0; i < key->as.list->n_items; i++)
        if (!fkv_jinja_charge(c, JINJA_WORK_ITEM) || !is_hashable(c, &key->as.list->items[i], depth + 1)) return false;
    return true;
}

void fkv_jinja_set(jinja_context *c, jinja_dict *dict, jinja_value key, jinja_value value) {
    if (!is_hashable(c, &key, 0)) {
        fkv_jinja_fail(c, "unhashable key of type %s", fkv_jinja_kind_name(&key));
        return;
    }
    jinja_value *there = (jinja_value *)fkv_jinja_get(c, dict, key);
    if (c->failed) return;
    if (there != NULL) {
        *there = value;
        return;
    }
    if (dict->n_pairs == dict->capacity) {
        jinja_pair *pairs = fkv_jinja_grown(c, dict->pairs, dict->n_pairs, &dict->capacity, sizeof *pairs);
        if (pairs == NULL) return;
        dict->pairs = pairs;
    }
    assert(dict->pairs != NULL);
    dict->pairs[dict->n_pairs++] = (jinja_pair){key, value};
}
