/* Methods of lists and dicts, and global functions. See jinja_eval.h. */
#include "jinja_eval.h"

#include <time.h>

typedef enum method_kind {
    METHOD_APPEND,
    METHOD_COUNT,
    METHOD_COPY,
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
    {"append", JINJA_LIST, METHOD_APPEND}, {"insert", JINJA_LIST, METHOD_INSERT}, {"extend", JINJA_LIST, METHOD_EXTEND},
    {"pop", JINJA_LIST, METHOD_POP},       {"index", JINJA_LIST, METHOD_INDEX},   {"count", JINJA_LIST, METHOD_COUNT},
    {"copy", JINJA_LIST, METHOD_COPY},     {"copy", JINJA_DICT, METHOD_COPY},     {"get", JINJA_DICT, METHOD_GET},
    {"items", JINJA_DICT, METHOD_ITEMS},   {"keys", JINJA_DICT, METHOD_KEYS},     {"values", JINJA_DICT, METHOD_VALUES},
    {"pop", JINJA_DICT, METHOD_POP},       {"update", JINJA_DICT, METHOD_UPDATE}, {"cycle", JINJA_LOOP, METHOD_CYCLE},
};

static const char *const globals[] = {"range", "namespace", "dict", "raise_exception", "strftime_now"};

bool fkv_jinja_has_method(const jinja_value *a, jinja_string name) {
    if (a->kind == JINJA_STRING) return fkv_jinja_string_method(name) != NULL;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (methods[i].of == a->kind && fkv_jinja_is(name, methods[i].name)) return true;
    return false;
}

bool fkv_jinja_has_global(jinja_string name) {
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (fkv_jinja_is(name, globals[i])) return true;
    return false;
}

/* ---- lists and dicts ---- */

static jinja_value pop_item(jinja_context *c, jinja_list *list, const jinja_arguments *args) {
    int64_t n = (int64_t)list->n_items;
    int64_t at = args->n > 0 && args->value[0].kind == JINJA_INT ? args->value[0].as.integer : -1;
    if (at < 0) at += n;
    if (at < 0 || at >= n) return fkv_jinja_fail(c, "list.pop(): index out of range");
    jinja_value item = list->items[at];
    if (!fkv_jinja_charge(c, fkv_jinja_copy_work((size_t)(n - at) * sizeof *list->items))) return fkv_jinja_undefined();
    memmove(list->items + at, list->items + at + 1, (size_t)(n - at - 1) * sizeof *list->items);
    list->n_items--;
    return item;
}

static jinja_value insert_item(jinja_context *c, jinja_value value, const jinja_arguments *args) {
    jinja_list *list = value.as.list;
    if (args->n != 2 || args->value[0].kind != JINJA_INT)
        return fkv_jinja_fail(c, "list.insert() requires a position and a value");
    int64_t n = (int64_t)list->n_items;
    int64_t at = args->value[0].as.integer < 0 ? args->value[0].as.integer + n : args->value[0].as.integer;
    at = at < 0 ? 0 : at > n ? n : at;
    fkv_jinja_append(c, value, args->value[1]);
    if (!fkv_jinja_charge(c, fkv_jinja_copy_work((size_t)(n - at) * sizeof *list->items))) return fkv_jinja_undefined();
    memmove(list->items + at + 1, list->items + at, (size_t)(n - at) * sizeof *list->items);
    list->items[at] = args->value[1];
    return fkv_jinja_none();
}

static jinja_value list_index_of(jinja_context *c, const jinja_list *list, const jinja_value *what) {
    for (size_t i = 0; i < list->n_items && !c->failed; i++)
        if (fkv_jinja_equal(c, &list->items[i], what)) return fkv_jinja_int((int64_t)i);
    return fkv_jinja_fail(c, "list.index(): the value is not in the list");
}

static jinja_value count_items(jinja_context *c, const jinja_list *list, const jinja_value *what) {
    int64_t n = 0;
    for (size_t i = 0; i < list->n_items && !c->failed; i++) n += fkv_jinja_equal(c, &list->items[i], what);
    return fkv_jinja_int(n);
}

/* Appends all items of `more` to a list and returns the list. `more` may be the list itself, so its length is read once. */
static jinja_value append_items(jinja_context *c, jinja_value list, const jinja_list *more) {
    size_t n = more->n_items;
    for (size_t i = 0; i < n && !c->failed; i++) fkv_jinja_append(c, list, more->items[i]);
    return list;
}

static jinja_value list_method(jinja_context *c, method_kind kind, jinja_value value, const jinja_arguments *args) {
    if (kind == METHOD_POP) return pop_item(c, value.as.list, args);
    if (kind == METHOD_INSERT) return insert_item(c, value, args);
    if (kind == METHOD_COPY) {
        jinja_value empty = fkv_jinja_list(c, false);
        return c->failed ? empty : append_items(c, empty, value.as.list);
    }
    if (args->n != 1) return fkv_jinja_fail(c, "this list method requires exactly one argument");
    if (kind == METHOD_INDEX) return list_index_of(c, value.as.list, &args->value[0]);
    if (kind == METHOD_COUNT) return count_items(c, value.as.list, &args->value[0]);
    if (kind == METHOD_APPEND) {
        fkv_jinja_append(c, value, args->value[0]);
        return fkv_jinja_none();
    }
    const jinja_list *more = fkv_jinja_items(c, &args->value[0]);
    if (more != NULL) (void)append_items(c, value, more);
    return fkv_jinja_none();
}

static jinja_value pop_key(jinja_context *c, jinja_dict *dict, const jinja_arguments *args) {
    for (size_t i = 0; args->n > 0 && i < dict->n_pairs && !c->failed; i++) {
        if (!fkv_jinja_equal(c, &dict->pairs[i].key, &args->value[0])) continue;
        jinja_value value = dict->pairs[i].value;
        if (!fkv_jinja_charge(c, fkv_jinja_copy_work((dict->n_pairs - i) * sizeof *dict->pairs))) return fkv_jinja_undefined();
        memmove(dict->pairs + i, dict->pairs + i + 1, (dict->n_pairs - i - 1) * sizeof *dict->pairs);
        dict->n_pairs--;
        return value;
    }
    return args->n > 1 ? args->value[1] : fkv_jinja_fail(c, "dict.pop(): the key does not exist");
}

static void add_pairs(jinja_context *c, jinja_dict *dict, const jinja_dict *more) {
    for (size_t i = 0; more != dict && i < more->n_pairs && !c->failed; i++)
        fkv_jinja_set(c, dict, more->pairs[i].key, more->pairs[i].value);
}

/* Adds the entries of the positional argument, which is a dict or a list of pairs, and then the keyword arguments. */
static jinja_value update_dict(jinja_context *c, jinja_dict *dict, const jinja_arguments *args) {
    const jinja_value *more = args->n_positions == 1 ? &args->value[0] : NULL;
    if (more != NULL && more->kind == JINJA_DICT) add_pairs(c, dict, more->as.dict);
    for (size_t i = 0; more != NULL && more->kind == JINJA_LIST && i < more->as.list->n_items && !c->failed; i++) {
        const jinja_value *pair = &more->as.list->items[i];
        if (pair->kind != JINJA_LIST || pair->as.list->n_items != 2)
            return fkv_jinja_fail(c, "a list from which a dict is updated must contain only key-value pairs");
        fkv_jinja_set(c, dict, pair->as.list->items[0], pair->as.list->items[1]);
    }
    if (args->n_positions > 1 || (more != NULL && more->kind != JINJA_DICT && more->kind != JINJA_LIST))
        return fkv_jinja_fail(c, "a dict can be updated only from a dict or a list of key-value pairs");
    for (size_t i = args->n_positions; i < args->n; i++)
        fkv_jinja_set(c, dict, fkv_jinja_of_string(args->name[i]), args->value[i]);
    return fkv_jinja_none();
}

static jinja_value dict_method(jinja_context *c, method_kind kind, jinja_dict *dict, const jinja_arguments *args) {
    const jinja_value *found = NULL;
    jinja_value list;
    switch (kind) {
    case METHOD_GET:
        if (args->n == 0) return fkv_jinja_fail(c, "dict.get() requires a key");
        found = fkv_jinja_get(c, dict, args->value[0]);
        return found != NULL ? *found : args->n > 1 ? args->value[1] : fkv_jinja_none();
    case METHOD_POP: return pop_key(c, dict, args);
    case METHOD_UPDATE: return update_dict(c, dict, args);
    case METHOD_COPY:
        list = fkv_jinja_dict(c, false);
        if (!c->failed) add_pairs(c, list.as.dict, dict);
        return list;
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

static jinja_value global_range(jinja_context *c, const jinja_arguments *args) {
    int64_t part[3] = {0, 0, 1};
    for (size_t i = 0; i < args->n; i++)
        if (args->value[i].kind != JINJA_INT || i == 3) return fkv_jinja_fail(c, "range() requires one to three integers");
    if (args->n == 0) return fkv_jinja_fail(c, "range() requires one to three integers");
    part[1] = args->value[0].as.integer;
    for (size_t i = 0; i < args->n && args->n > 1; i++) part[i] = args->value[i].as.integer;
    if (part[2] == 0) return fkv_jinja_fail(c, "the step of range() must not be 0");
    jinja_value list = fkv_jinja_list(c, false);
    int64_t i = part[0];
    while ((part[2] > 0 ? i < part[1] : i > part[1]) && !c->failed) {
        fkv_jinja_append(c, list, fkv_jinja_int(i));
        if (__builtin_add_overflow(i, part[2], &i)) break;
    }
    return list;
}

static jinja_value new_dict(jinja_context *c, const jinja_arguments *args, bool is_namespace) {
    jinja_value dict = fkv_jinja_dict(c, is_namespace);
    if (!c->failed) (void)update_dict(c, dict.as.dict, args);
    return dict;
}

static jinja_value global_raise(jinja_context *c, const jinja_arguments *args) {
    jinja_string s = args->n > 0 ? fkv_jinja_str(c, &args->value[0]) : JINJA_TEXT("no reason given");
    return fkv_jinja_fail(c, "the template rejects this conversation: %.*s", s.n_bytes < 300 ? (int)s.n_bytes : 300, s.text);
}

static jinja_value global_strftime_now(jinja_context *c, const jinja_arguments *args) {
    char pattern[128];
    char *text = fkv_jinja_take(c, 256, 1);
    struct tm broken_down;
    time_t now = (time_t)c->now;
    if (!c->has_now) return fkv_jinja_fail(c, "the template needs the current date, which the caller did not provide");
    if (args->n != 1 || args->value[0].kind != JINJA_STRING || args->value[0].as.string.n_bytes >= sizeof pattern || text == NULL)
        return fkv_jinja_fail(c, "strftime_now() requires a format of at most %zu bytes", sizeof pattern - 1);
    memcpy(pattern, args->value[0].as.string.text, args->value[0].as.string.n_bytes);
    pattern[args->value[0].as.string.n_bytes] = 0;
    if (!fkv_jinja_charge(c, 8 * JINJA_WORK_NUMBER_TEXT)) return fkv_jinja_undefined();
    if (gmtime_r(&now, &broken_down) == NULL) return fkv_jinja_fail(c, "the current date is out of range");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, 256, pattern, &broken_down);
#pragma GCC diagnostic pop
    return fkv_jinja_of_string((jinja_string){text, NULL, n, false});
}

static jinja_value call_global(jinja_context *c, jinja_string name, const jinja_arguments *args) {
    if (fkv_jinja_is(name, "range")) return global_range(c, args);
    if (fkv_jinja_is(name, "namespace")) return new_dict(c, args, true);
    if (fkv_jinja_is(name, "dict")) return new_dict(c, args, false);
    if (fkv_jinja_is(name, "raise_exception")) return global_raise(c, args);
    return global_strftime_now(c, args);
}

jinja_value fkv_jinja_builtin(jinja_context *c, const jinja_bound *what, const jinja_arguments *args) {
    jinja_value object = what->object;
    if (object.kind == JINJA_UNDEFINED) return call_global(c, what->name, args);
    if (!fkv_jinja_charge(c, JINJA_WORK_TABLE)) return fkv_jinja_undefined();
    if (object.kind == JINJA_STRING) {
        return fkv_jinja_string_method(what->name)(c, object.as.string, args);
    }
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        if (methods[i].of != object.kind || !fkv_jinja_is(what->name, methods[i].name)) continue;
        if (object.kind == JINJA_LIST) return list_method(c, methods[i].kind, object, args);
        if (object.kind == JINJA_DICT) return dict_method(c, methods[i].kind, object.as.dict, args);
        if (args->n == 0) return fkv_jinja_fail(c, "cycle requires arguments");
        return args->value[object.as.loop->index % args->n];
    }
    return fkv_jinja_fail(c, "unknown method");
}
