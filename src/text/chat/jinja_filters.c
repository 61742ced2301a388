/* Tables of filters and tests. See jinja_eval.h. Filters and tests behave as in jinja2. The exception is tojson, which behaves as
 * in transformers: it writes the output of json.dumps(), without HTML escapes. */
#include "jinja_eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static jinja_value string_value(jinja_string s) { return fkv_jinja_of_string(s); }

static bool argument_truth(const jinja_arguments *args, size_t position, const char *name, bool fallback) {
    const jinja_value *given = fkv_jinja_argument(args, position, name);
    return given != NULL ? fkv_jinja_truth(given) : fallback;
}

/* Parses a number with optional white space around it. Returns false if the string is not a number. */
static bool parse_number_string(jinja_context *c, jinja_string s, double *x) {
    char text[64];
    if (!fkv_jinja_charge(c, JINJA_WORK_NUMBER_TEXT)) return false;
    s = fkv_jinja_strip(c, s, NULL, true, true);
    if (s.n_bytes == 0 || s.n_bytes >= sizeof text) return false;
    memcpy(text, s.text, s.n_bytes);
    text[s.n_bytes] = 0;
    char *end;
    *x = strtod(text, &end);
    return *end == 0 && strpbrk(text, "xXpP") == NULL;
}

/* Evaluates an attribute path such as "a.b.0" on a value. */
static jinja_value attribute_path(jinja_context *c, const jinja_value *a, jinja_string path) {
    jinja_value value = *a;
    for (size_t begin = 0; begin <= path.n_bytes && fkv_jinja_charge(c, JINJA_WORK_TABLE);) {
        size_t end = fkv_jinja_find(c, path, JINJA_TEXT("."), begin);
        if (end == SIZE_MAX) end = path.n_bytes;
        jinja_string name = fkv_jinja_part(path, begin, end);
        jinja_value key = string_value(name);
        double index;
        if (name.n_bytes > 0 && name.n_bytes < 10 && name.text[0] >= '0' && name.text[0] <= '9' &&
            parse_number_string(c, name, &index))
            key = fkv_jinja_int((int64_t)index);
        value = fkv_jinja_item(c, &value, &key);
        begin = end + 1;
    }
    return value;
}

/* ---- sorting ---- */

typedef struct sort_key {
    jinja_value value;
    jinja_value item;
} sort_key;

/* Returns the sort key of an item: the item itself, or one of its attributes if a name is given. Strings are converted to
 * lowercase unless case_sensitive is set. */
static jinja_value sort_key_of(jinja_context *c, const jinja_value *item, const jinja_value *attribute, bool case_sensitive) {
    jinja_value key = *item;
    if (attribute != NULL && attribute->kind == JINJA_STRING) key = attribute_path(c, item, attribute->as.string);
    if (attribute != NULL && attribute->kind == JINJA_INT) key = fkv_jinja_item(c, item, attribute);
    if (!case_sensitive && key.kind == JINJA_STRING) key = string_value(fkv_jinja_case(c, key.as.string, false));
    return key;
}

static sort_key *sort_keys_of(jinja_context *c, const jinja_list *items, const jinja_value *attribute, bool case_sensitive) {
    sort_key *keys = fkv_jinja_take(c, items->n_items + 1, sizeof *keys);
    for (size_t i = 0; keys != NULL && i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_NODE); i++)
        keys[i] = (sort_key){sort_key_of(c, &items->items[i], attribute, case_sensitive), items->items[i]};
    return keys;
}

/* Sorts keys [begin, end) with a stable merge sort. room: scratch array of the same size as `keys`. */
static void merge_sort_keys(jinja_context *c, sort_key *keys, sort_key *room, size_t begin, size_t end, bool reverse) {
    if (end - begin < 2 || c->failed) return;
    size_t middle = begin + (end - begin) / 2;
    merge_sort_keys(c, keys, room, begin, middle, reverse);
    merge_sort_keys(c, keys, room, middle, end, reverse);
    size_t a = begin;
    size_t b = middle;
    for (size_t to = begin; to < end && fkv_jinja_charge(c, JINJA_WORK_NODE); to++) {
        bool second = a == middle;
        if (a < middle && b < end) {
            int order = fkv_jinja_order(c, &keys[a].value, &keys[b].value);
            second = reverse ? order < 0 : order > 0;
        }
        room[to] = second ? keys[b++] : keys[a++];
    }
    if (!c->failed) memcpy(keys + begin, room + begin, (end - begin) * sizeof *keys);
}

static jinja_value sort_items(jinja_context *c, const jinja_list *items, const jinja_value *attribute, bool case_sensitive,
                              bool reverse) {
    jinja_value out = fkv_jinja_list(c, false);
    sort_key *keys = sort_keys_of(c, items, attribute, case_sensitive);
    sort_key *room = fkv_jinja_take(c, items->n_items + 1, sizeof *room);
    if (c->failed) return out;
    merge_sort_keys(c, keys, room, 0, items->n_items, reverse);
    for (size_t i = 0; i < items->n_items && !c->failed; i++) fkv_jinja_append(c, out, keys[i].item);
    return out;
}

static jinja_value filter_sort(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    if (items == NULL) return fkv_jinja_undefined();
    return sort_items(c, items, fkv_jinja_argument(args, 2, "attribute"), argument_truth(args, 1, "case_sensitive", false),
                      argument_truth(args, 0, "reverse", false));
}

static jinja_value dict_items(jinja_context *c, const jinja_value *a) {
    jinja_value list = fkv_jinja_list(c, false);
    if (a->kind == JINJA_UNDEFINED) return list;
    if (a->kind != JINJA_DICT || a->as.dict->is_namespace)
        return fkv_jinja_fail(c, "the items filter requires a dict (got %s)", fkv_jinja_kind_name(a));
    for (size_t i = 0; i < a->as.dict->n_pairs && !c->failed; i++)
        fkv_jinja_append(c, list, fkv_jinja_pair_of(c, a->as.dict->pairs[i].key, a->as.dict->pairs[i].value));
    return list;
}

static jinja_value filter_dictsort(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *by = fkv_jinja_argument(args, 1, "by");
    jinja_value at = fkv_jinja_int(by != NULL && by->kind == JINJA_STRING && fkv_jinja_is(by->as.string, "value"));
    jinja_value pairs = dict_items(c, a);
    if (c->failed) return pairs;
    return sort_items(c, pairs.as.list, &at, argument_truth(args, 0, "case_sensitive", false),
                      argument_truth(args, 2, "reverse", false));
}

static jinja_value extreme_item(jinja_context *c, const jinja_value *a, const jinja_arguments *args, int sign) {
    const jinja_list *items = fkv_jinja_items(c, a);
    if (items == NULL || items->n_items == 0) return fkv_jinja_undefined();
    const sort_key *keys =
        sort_keys_of(c, items, fkv_jinja_argument(args, 1, "attribute"), argument_truth(args, 0, "case_sensitive", false));
    size_t best = 0;
    for (size_t i = 1; i < items->n_items && !c->failed; i++)
        if (fkv_jinja_order(c, &keys[i].value, &keys[best].value) * sign > 0) best = i;
    return items->items[best];
}

static jinja_value filter_min(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return extreme_item(c, a, args, -1);
}
static jinja_value filter_max(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return extreme_item(c, a, args, 1);
}

static jinja_value filter_unique(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    jinja_value seen = fkv_jinja_list(c, false);
    jinja_value out = fkv_jinja_list(c, false);
    for (size_t i = 0; items != NULL && i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_NODE); i++) {
        jinja_value key = sort_key_of(c, &items->items[i], fkv_jinja_argument(args, 1, "attribute"),
                                      argument_truth(args, 0, "case_sensitive", false));
        if (fkv_jinja_contains(c, &seen, &key)) continue;
        fkv_jinja_append(c, seen, key);
        fkv_jinja_append(c, out, items->items[i]);
    }
    return out;
}

/* ---- selection and mapping ---- */

/* Returns the arguments starting at index `first`. */
static jinja_arguments arguments_from(const jinja_arguments *args, size_t first) {
    jinja_arguments rest = {.n = 0};
    for (size_t i = first; i < args->n; i++) {
        rest.value[rest.n] = args->value[i];
        rest.name[rest.n++] = args->name[i];
        if (i < args->n_positions) rest.n_positions++;
    }
    return rest;
}

/* Returns the items that pass the named test, or the items that fail it if `wanted` is false. If no test is named, tests whether
 * an item is truthy. With by_attribute, tests an attribute of each item. */
static jinja_value select_items(jinja_context *c, const jinja_value *a, const jinja_arguments *args, bool by_attribute,
                                bool wanted) {
    const jinja_list *items = fkv_jinja_truth(a) ? fkv_jinja_items(c, a) : NULL; /* none and 0 are treated as empty lists */
    jinja_value out = fkv_jinja_list(c, false);
    size_t at = by_attribute ? 1 : 0;
    bool has_test = args->n_positions > at;
    jinja_arguments rest = arguments_from(args, at + 1);
    if (by_attribute && (args->n_positions == 0 || args->value[0].kind != JINJA_STRING))
        return fkv_jinja_fail(c, "the filters selectattr and rejectattr require an attribute name");
    if (has_test && args->value[at].kind != JINJA_STRING) return fkv_jinja_fail(c, "the name of a test must be a string");
    for (size_t i = 0; items != NULL && i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_TABLE); i++) {
        jinja_value value = items->items[i];
        if (by_attribute) value = attribute_path(c, &value, args->value[0].as.string);
        bool passes = has_test ? fkv_jinja_test(c, args->value[at].as.string, &value, &rest) : fkv_jinja_truth(&value);
        if (passes == wanted) fkv_jinja_append(c, out, items->items[i]);
    }
    return out;
}

static jinja_value filter_select(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return select_items(c, a, args, false, true);
}
static jinja_value filter_reject(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return select_items(c, a, args, false, false);
}
static jinja_value filter_selectattr(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return select_items(c, a, args, true, true);
}
static jinja_value filter_rejectattr(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    return select_items(c, a, args, true, false);
}

static jinja_value filter_map(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_truth(a) ? fkv_jinja_items(c, a) : NULL;
    jinja_value out = fkv_jinja_list(c, false);
    const jinja_value *attribute = fkv_jinja_argument(args, SIZE_MAX, "attribute");
    const jinja_value *fallback = fkv_jinja_argument(args, SIZE_MAX, "default");
    jinja_arguments rest = arguments_from(args, 1);
    const jinja_value *name = attribute != NULL ? attribute : args->n_positions > 0 ? &args->value[0] : NULL;
    if (name == NULL || name->kind != JINJA_STRING)
        return fkv_jinja_fail(c, "the map filter requires the name of a filter, or attribute=NAME");
    for (size_t i = 0; items != NULL && i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_TABLE); i++) {
        jinja_value value = items->items[i];
        if (attribute != NULL) {
            value = attribute_path(c, &value, name->as.string);
            if (value.kind == JINJA_UNDEFINED && fallback != NULL) value = *fallback;
        } else {
            value = fkv_jinja_filter(c, name->as.string, &value, &rest);
        }
        fkv_jinja_append(c, out, value);
    }
    return out;
}

/* ---- strings ---- */

static jinja_value filter_upper(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_case(c, fkv_jinja_str(c, a), true));
}

static jinja_value filter_lower(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_case(c, fkv_jinja_str(c, a), false));
}

static jinja_value filter_title(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_capitalized(c, fkv_jinja_str(c, a), true));
}

static jinja_value filter_capitalize(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_capitalized(c, fkv_jinja_str(c, a), false));
}

static jinja_value filter_trim(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *chars = fkv_jinja_argument(args, 0, "chars");
    bool named = chars != NULL && chars->kind == JINJA_STRING;
    return string_value(fkv_jinja_strip(c, fkv_jinja_str(c, a), named ? &chars->as.string : NULL, true, true));
}

static jinja_value filter_replace(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *old = fkv_jinja_argument(args, 0, "old");
    const jinja_value *new = fkv_jinja_argument(args, 1, "new");
    if (old == NULL || new == NULL) return fkv_jinja_fail(c, "the replace filter requires two arguments: old and new");
    return string_value(fkv_jinja_replaced(c, fkv_jinja_str(c, a), fkv_jinja_str(c, old), fkv_jinja_str(c, new),
                                           fkv_jinja_count_argument(args, 2, "count")));
}

static jinja_value filter_format(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    if (args->n > args->n_positions) return fkv_jinja_fail(c, "the format filter does not support keyword arguments");
    return string_value(fkv_jinja_formatted(c, fkv_jinja_str(c, a), args->value, args->n));
}

static jinja_value filter_string(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_str(c, a));
}

static jinja_value filter_join(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    const jinja_value *between = fkv_jinja_argument(args, 0, "d");
    const jinja_value *attribute = fkv_jinja_argument(args, 1, "attribute");
    jinja_writer w = {.c = c};
    for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++) {
        jinja_value item = items->items[i];
        if (attribute != NULL && attribute->kind == JINJA_STRING) item = attribute_path(c, &item, attribute->as.string);
        if (i > 0 && between != NULL) fkv_jinja_write_str(&w, between);
        fkv_jinja_write_str(&w, &item);
    }
    return string_value(fkv_jinja_written(&w));
}

static jinja_value filter_indent(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *width = fkv_jinja_argument(args, 0, "width");
    bool first = argument_truth(args, 1, "first", false);
    bool blank = argument_truth(args, 2, "blank", false);
    jinja_writer by = {.c = c};
    if (width != NULL && width->kind == JINJA_STRING)
        fkv_jinja_write(&by, width->as.string);
    else
        for (int64_t i = 0; i < (width != NULL && width->kind == JINJA_INT ? width->as.integer : 4) && !c->failed; i++)
            fkv_jinja_write_text(&by, " ");
    jinja_string s = fkv_jinja_str(c, a);
    jinja_writer w = {.c = c};
    for (size_t begin = 0, line = 0; begin <= s.n_bytes && !c->failed; line++) {
        size_t end = fkv_jinja_find(c, s, JINJA_TEXT("\n"), begin);
        if (end == SIZE_MAX) end = s.n_bytes;
        if (line > 0) fkv_jinja_write_text(&w, "\n");
        if (line == 0 ? first : blank || end > begin) fkv_jinja_write(&w, fkv_jinja_written(&by));
        fkv_jinja_write(&w, fkv_jinja_part(s, begin, end));
        begin = end + 1;
    }
    return string_value(fkv_jinja_written(&w));
}

static jinja_value filter_escape(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return string_value(fkv_jinja_escaped(c, fkv_jinja_str(c, a)));
}

static jinja_value filter_tojson(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *indent = fkv_jinja_argument(args, 1, "indent");
    const jinja_value *separators = fkv_jinja_argument(args, 2, "separators");
    jinja_json_style style = {.indent = -1, .item_separator = JINJA_TEXT(", "), .key_separator = JINJA_TEXT(": ")};
    if (indent != NULL && indent->kind == JINJA_INT) {
        style.indent = indent->as.integer < 0 ? 0 : indent->as.integer < INT32_MAX ? indent->as.integer : INT32_MAX;
        style.item_separator = JINJA_TEXT(",");
    }
    style.ascii = argument_truth(args, 0, "ensure_ascii", false);
    style.sort_keys = argument_truth(args, 3, "sort_keys", false);
    if (separators != NULL && separators->kind == JINJA_LIST && separators->as.list->n_items == 2 &&
        separators->as.list->items[0].kind == JINJA_STRING && separators->as.list->items[1].kind == JINJA_STRING) {
        style.item_separator = separators->as.list->items[0].as.string;
        style.key_separator = separators->as.list->items[1].as.string;
    }
    jinja_writer w = {.c = c};
    fkv_jinja_write_json(&w, a, &style, 0);
    return string_value(fkv_jinja_written(&w));
}

/* ---- other filters ---- */

static jinja_value filter_default(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *fallback = fkv_jinja_argument(args, 0, "default_value");
    bool by_truth = argument_truth(args, 1, "boolean", false);
    (void)c;
    if (by_truth ? fkv_jinja_truth(a) : a->kind != JINJA_UNDEFINED) return *a;
    return fallback != NULL ? *fallback : string_value(JINJA_TEXT(""));
}

static jinja_value filter_length(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    int64_t n = fkv_jinja_length(c, a);
    (void)args;
    return n >= 0 ? fkv_jinja_int(n)
                  : fkv_jinja_fail(c, "the length filter requires a string, list or dict (got %s)", fkv_jinja_kind_name(a));
}

static jinja_value filter_list(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    jinja_value out = fkv_jinja_list(c, false);
    (void)args;
    for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++) fkv_jinja_append(c, out, items->items[i]);
    return out;
}

static jinja_value filter_items(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return dict_items(c, a);
}

static jinja_value first_or_last(jinja_context *c, const jinja_value *a, bool last) {
    const jinja_list *items = fkv_jinja_items(c, a);
    if (items == NULL || items->n_items == 0) return fkv_jinja_undefined();
    return items->items[last ? items->n_items - 1 : 0];
}

static jinja_value filter_first(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return first_or_last(c, a, false);
}

static jinja_value filter_last(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    return first_or_last(c, a, true);
}

static jinja_value filter_reverse(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    jinja_value out = fkv_jinja_list(c, false);
    jinja_writer w = {.c = c};
    (void)args;
    for (size_t i = items != NULL ? items->n_items : 0; i-- > 0 && !c->failed;) {
        if (a->kind == JINJA_STRING) fkv_jinja_write(&w, items->items[i].as.string);
        fkv_jinja_append(c, out, items->items[i]);
    }
    return a->kind == JINJA_STRING ? string_value(fkv_jinja_written(&w)) : out;
}

static jinja_value filter_sum(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_list *items = fkv_jinja_items(c, a);
    const jinja_value *attribute = fkv_jinja_argument(args, 0, "attribute");
    const jinja_value *start = fkv_jinja_argument(args, 1, "start");
    double sum = 0.0;
    bool whole = true;
    if (start != NULL && !fkv_jinja_number(start, &sum))
        return fkv_jinja_fail(c, "the start argument of the sum filter must be a number");
    whole = start == NULL || start->kind != JINJA_FLOAT;
    for (size_t i = 0; items != NULL && i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_ITEM); i++) {
        jinja_value item = items->items[i];
        double x;
        if (attribute != NULL && attribute->kind == JINJA_STRING) item = attribute_path(c, &item, attribute->as.string);
        if (!fkv_jinja_number(&item, &x))
            return fkv_jinja_fail(c, "the sum filter requires numbers (got %s)", fkv_jinja_kind_name(&item));
        whole = whole && item.kind != JINJA_FLOAT;
        sum += x;
    }
    return whole && fabs(sum) < 0x1p53 ? fkv_jinja_int((int64_t)sum) : fkv_jinja_float(sum);
}

static jinja_value filter_int(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *fallback = fkv_jinja_argument(args, 0, "default");
    double x = 0.0;
    if (a->kind == JINJA_INT) return *a;
    bool good = a->kind == JINJA_STRING ? parse_number_string(c, a->as.string, &x) : fkv_jinja_number(a, &x);
    if (good && fabs(x) < 0x1p62) return fkv_jinja_int((int64_t)x);
    return fallback != NULL ? *fallback : fkv_jinja_int(0);
}

static jinja_value filter_float(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *fallback = fkv_jinja_argument(args, 0, "default");
    double x = 0.0;
    bool good = a->kind == JINJA_STRING ? parse_number_string(c, a->as.string, &x) : fkv_jinja_number(a, &x);
    if (good) return fkv_jinja_float(x);
    return fallback != NULL ? *fallback : fkv_jinja_float(0.0);
}

static jinja_value filter_abs(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    (void)args;
    if (a->kind == JINJA_INT && a->as.integer != INT64_MIN)
        return fkv_jinja_int(a->as.integer < 0 ? -a->as.integer : a->as.integer);
    if (a->kind == JINJA_FLOAT) return fkv_jinja_float(fabs(a->as.real));
    return fkv_jinja_fail(c, "the abs filter requires a number (got %s)", fkv_jinja_kind_name(a));
}

static jinja_value filter_round(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *digits = fkv_jinja_argument(args, 0, "precision");
    const jinja_value *method = fkv_jinja_argument(args, 1, "method");
    double x;
    if (!fkv_jinja_charge(c, 4 * JINJA_WORK_NUMBER_TEXT)) return fkv_jinja_undefined();
    if (!fkv_jinja_number(a, &x)) return fkv_jinja_fail(c, "the round filter requires a number (got %s)", fkv_jinja_kind_name(a));
    int64_t n = digits != NULL && digits->kind == JINJA_INT ? digits->as.integer : 0;
    bool up = method != NULL && method->kind == JINJA_STRING && fkv_jinja_is(method->as.string, "ceil");
    bool down = method != NULL && method->kind == JINJA_STRING && fkv_jinja_is(method->as.string, "floor");
    if (!up && !down && a->kind != JINJA_FLOAT && n >= 0) return a->kind == JINJA_INT ? *a : fkv_jinja_int((int64_t)x);
    if (!up && !down && n >= 0 && n < 20 && fabs(x) < 1e20) { /* rounds the exact binary value, as Python does: 2.675 is stored as
                                                                 a slightly smaller value, so it rounds to 2.67 */
        char text[64];
        (void)snprintf(text, sizeof text, "%.*f", (int)n, x);
        return fkv_jinja_float(strtod(text, NULL));
    }
    double by = pow(10.0, (double)n);
    return fkv_jinja_float((up ? ceil(x * by) : down ? floor(x * by) : nearbyint(x * by)) / by);
}

static jinja_value filter_safe(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    jinja_string s = fkv_jinja_str(c, a);
    (void)args;
    s.is_safe = true;
    return string_value(s);
}

static jinja_value filter_attr(jinja_context *c, const jinja_value *a, const jinja_arguments *args) {
    const jinja_value *name = fkv_jinja_argument(args, 0, "name");
    if (name == NULL || name->kind != JINJA_STRING) return fkv_jinja_fail(c, "the attr filter requires an attribute name");
    return fkv_jinja_attribute(c, a, name->as.string);
}

typedef jinja_value (*filter_fn)(jinja_context *c, const jinja_value *a, const jinja_arguments *args);

static const struct {
    const char *name;
    filter_fn run;
} filters[] = {
    {"abs", filter_abs},
    {"attr", filter_attr},
    {"capitalize", filter_capitalize},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"e", filter_escape},
    {"escape", filter_escape},
    {"first", filter_first},
    {"float", filter_float},
    {"format", filter_format},
    {"indent", filter_indent},
    {"int", filter_int},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"lower", filter_lower},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"replace", filter_replace},
    {"reverse", filter_reverse},
    {"round", filter_round},
    {"safe", filter_safe},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"sort", filter_sort},
    {"string", filter_string},
    {"sum", filter_sum},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"unique", filter_unique},
    {"upper", filter_upper},
};

jinja_value fkv_jinja_filter(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args) {
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
        if (fkv_jinja_is(name, filters[i].name)) return filters[i].run(c, a, args);
    return fkv_jinja_fail(c, "unknown filter \"%.*s\"", name.n_bytes < 60 ? (int)name.n_bytes : 60, name.text);
}

/* ---- tests ---- */

typedef enum test_kind {
    TEST_DEFINED,
    TEST_UNDEFINED,
    TEST_NONE,
    TEST_STRING,
    TEST_MAPPING,
    TEST_SEQUENCE,
    TEST_ITERABLE,
    TEST_NUMBER,
    TEST_INTEGER,
    TEST_FLOAT,
    TEST_BOOLEAN,
    TEST_TRUE,
    TEST_FALSE,
    TEST_CALLABLE,
    TEST_ODD,
    TEST_EVEN,
    TEST_UPPER,
    TEST_LOWER,
    /* tests that take an argument */
    TEST_DIVISIBLE,
    TEST_EQUAL,
    TEST_UNEQUAL,
    TEST_LESS,
    TEST_LESS_EQUAL,
    TEST_MORE,
    TEST_MORE_EQUAL,
    TEST_IN
} test_kind;

static const struct {
    const char *name;
    test_kind kind;
} tests[] = {
    {"defined", TEST_DEFINED},
    {"undefined", TEST_UNDEFINED},
    {"none", TEST_NONE},
    {"string", TEST_STRING},
    {"mapping", TEST_MAPPING},
    {"sequence", TEST_SEQUENCE},
    {"iterable", TEST_ITERABLE},
    {"number", TEST_NUMBER},
    {"integer", TEST_INTEGER},
    {"float", TEST_FLOAT},
    {"boolean", TEST_BOOLEAN},
    {"true", TEST_TRUE},
    {"false", TEST_FALSE},
    {"callable", TEST_CALLABLE},
    {"odd", TEST_ODD},
    {"even", TEST_EVEN},
    {"upper", TEST_UPPER},
    {"lower", TEST_LOWER},
    {"divisibleby", TEST_DIVISIBLE},
    {"equalto", TEST_EQUAL},
    {"eq", TEST_EQUAL},
    {"sameas", TEST_EQUAL},
    {"==", TEST_EQUAL},
    {"ne", TEST_UNEQUAL},
    {"!=", TEST_UNEQUAL},
    {"lt", TEST_LESS},
    {"lessthan", TEST_LESS},
    {"<", TEST_LESS},
    {"le", TEST_LESS_EQUAL},
    {"<=", TEST_LESS_EQUAL},
    {"gt", TEST_MORE},
    {"greaterthan", TEST_MORE},
    {">", TEST_MORE},
    {"ge", TEST_MORE_EQUAL},
    {">=", TEST_MORE_EQUAL},
    {"in", TEST_IN},
};

static bool test_two(jinja_context *c, test_kind kind, const jinja_value *a, const jinja_value *b) {
    switch (kind) {
    case TEST_EQUAL: return fkv_jinja_equal(c, a, b);
    case TEST_UNEQUAL: return !fkv_jinja_equal(c, a, b);
    case TEST_LESS: return fkv_jinja_order(c, a, b) < 0;
    case TEST_LESS_EQUAL: return fkv_jinja_order(c, a, b) <= 0;
    case TEST_MORE: return fkv_jinja_order(c, a, b) > 0;
    case TEST_MORE_EQUAL: return fkv_jinja_order(c, a, b) >= 0;
    case TEST_IN: return fkv_jinja_contains(c, b, a);
    default:
        if (a->kind == JINJA_INT && b->kind == JINJA_INT && b->as.integer != 0 && b->as.integer != -1)
            return a->as.integer % b->as.integer == 0;
        fkv_jinja_fail(c, "divisibleby requires integers");
        return false;
    }
}

static bool test_one(jinja_context *c, test_kind kind, const jinja_value *a) {
    double x;
    switch (kind) {
    case TEST_DEFINED: return a->kind != JINJA_UNDEFINED;
    case TEST_UNDEFINED: return a->kind == JINJA_UNDEFINED;
    case TEST_NONE: return a->kind == JINJA_NONE;
    case TEST_STRING: return a->kind == JINJA_STRING;
    case TEST_MAPPING: return a->kind == JINJA_DICT && !a->as.dict->is_namespace;
    case TEST_SEQUENCE: /* every value with a length and items is a sequence, including dicts and undefined values */
    case TEST_ITERABLE: return fkv_jinja_has_length(a);
    case TEST_NUMBER: return fkv_jinja_number(a, &x);
    case TEST_INTEGER: return a->kind == JINJA_INT;
    case TEST_FLOAT: return a->kind == JINJA_FLOAT;
    case TEST_BOOLEAN: return a->kind == JINJA_BOOL;
    case TEST_TRUE: return a->kind == JINJA_BOOL && a->as.truth;
    case TEST_FALSE: return a->kind == JINJA_BOOL && !a->as.truth;
    case TEST_CALLABLE: return a->kind == JINJA_MACRO || a->kind == JINJA_BUILTIN;
    case TEST_ODD: return a->kind == JINJA_INT && a->as.integer % 2 != 0;
    case TEST_EVEN: return a->kind == JINJA_INT && a->as.integer % 2 == 0;
    default: return fkv_jinja_is_case(c, fkv_jinja_str(c, a), kind == TEST_UPPER);
    }
}

bool fkv_jinja_test(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!fkv_jinja_is(name, tests[i].name)) continue;
        if (tests[i].kind < TEST_DIVISIBLE) return test_one(c, tests[i].kind, a);
        if (args->n > 0) return test_two(c, tests[i].kind, a, &args->value[0]);
        fkv_jinja_fail(c, "the test \"%s\" requires an argument", tests[i].name);
        return false;
    }
    fkv_jinja_fail(c, "unknown test \"%.*s\"", name.n_bytes < 60 ? (int)name.n_bytes : 60, name.text);
    return false;
}
