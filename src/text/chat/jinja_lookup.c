/* Looks up attributes, items and methods as in Jinja. See jinja_eval.h. */
#include "jinja_eval.h"

jinja_value fkv_jinja_bound(jinja_context *c, jinja_string what) {
    jinja_bound *b = fkv_jinja_take(c, 1, sizeof *b);
    if (b == NULL) return fkv_jinja_undefined();
    b->name = what;
    return (jinja_value){.kind = JINJA_BUILTIN, .as.bound = b};
}

static jinja_value loop_attribute(const jinja_loop *loop, jinja_string name) {
    size_t n = loop->items->n_items;
    if (fkv_jinja_is(name, "index")) return fkv_jinja_int((int64_t)loop->index + 1);
    if (fkv_jinja_is(name, "index0")) return fkv_jinja_int((int64_t)loop->index);
    if (fkv_jinja_is(name, "revindex")) return fkv_jinja_int((int64_t)(n - loop->index));
    if (fkv_jinja_is(name, "revindex0")) return fkv_jinja_int((int64_t)(n - loop->index) - 1);
    if (fkv_jinja_is(name, "first")) return fkv_jinja_bool(loop->index == 0);
    if (fkv_jinja_is(name, "last")) return fkv_jinja_bool(loop->index + 1 == n);
    if (fkv_jinja_is(name, "length")) return fkv_jinja_int((int64_t)n);
    if (fkv_jinja_is(name, "depth"))
        return fkv_jinja_int(1); /* loop.depth is always 1, because recursive loops are not supported */
    if (fkv_jinja_is(name, "depth0")) return fkv_jinja_int(0);
    if (fkv_jinja_is(name, "previtem")) return loop->index > 0 ? loop->items->items[loop->index - 1] : fkv_jinja_undefined();
    if (fkv_jinja_is(name, "nextitem")) return loop->index + 1 < n ? loop->items->items[loop->index + 1] : fkv_jinja_undefined();
    return (jinja_value){.kind = JINJA_UNDEFINED, .as.string = name};
}

jinja_value fkv_jinja_fail_undefined(jinja_context *c, const jinja_value *a, const char *what, jinja_string name) {
    int n = a->as.string.n_bytes < 60 ? (int)a->as.string.n_bytes : 60;
    int m = name.n_bytes < 60 ? (int)name.n_bytes : 60;
    return fkv_jinja_fail(c, "\"%.*s\" is undefined and has no %s \"%.*s\"", n,
                          a->as.string.text != NULL ? a->as.string.text : "", what, m, name.text);
}

static jinja_value bind_method(jinja_context *c, const jinja_value *a, jinja_string name) {
    jinja_value method = fkv_jinja_bound(c, name);
    if (method.kind == JINJA_BUILTIN) method.as.bound->object = *a;
    return method;
}

jinja_value fkv_jinja_attribute(jinja_context *c, const jinja_value *a, jinja_string name) {
    const jinja_value *found = NULL;
    if (a->kind == JINJA_UNDEFINED) return fkv_jinja_fail_undefined(c, a, "attribute", name);
    if (a->kind != JINJA_DICT && !fkv_jinja_charge(c, JINJA_WORK_NODE)) return fkv_jinja_undefined();
    if (a->kind == JINJA_LOOP && !fkv_jinja_has_method(a, name)) return loop_attribute(a->as.loop, name);
    if (a->kind == JINJA_DICT && a->as.dict->is_namespace) {
        found = fkv_jinja_get_named(c, a->as.dict, name);
    } else if (fkv_jinja_has_method(a, name)) {
        return bind_method(c, a, name);
    } else if (a->kind == JINJA_DICT) {
        found = fkv_jinja_get_named(c, a->as.dict, name);
    }
    return found != NULL ? *found : (jinja_value){.kind = JINJA_UNDEFINED, .as.string = name};
}

/* Converts an index to a position from 0 to n - 1. Negative indexes count from the end. Returns false if the index is out of
 * range. */
static bool position_of(int64_t at, int64_t n, size_t *position) {
    if (at < 0) at += n;
    *position = (size_t)at;
    return at >= 0 && at < n;
}

jinja_value fkv_jinja_item(jinja_context *c, const jinja_value *a, const jinja_value *key) {
    size_t position;
    if (a->kind == JINJA_UNDEFINED) return fkv_jinja_fail_undefined(c, a, "item", fkv_jinja_str(c, key));
    if (a->kind == JINJA_DICT && !a->as.dict->is_namespace) {
        const jinja_value *found = fkv_jinja_get(c, a->as.dict, *key);
        if (found != NULL) return *found;
    }
    if (a->kind == JINJA_LIST && key->kind == JINJA_INT) {
        if (position_of(key->as.integer, fkv_jinja_length(c, a), &position)) return a->as.list->items[position];
    } else if (a->kind == JINJA_STRING && key->kind == JINJA_INT) {
        if (position_of(key->as.integer, fkv_jinja_length(c, a), &position)) {
            size_t at = fkv_jinja_byte_of_char(c, a->as.string, position);
            if (c->failed) return fkv_jinja_undefined();
            return fkv_jinja_of_string(fkv_jinja_part(a->as.string, at, at + fkv_jinja_char_bytes(a->as.string, at)));
        }
    } else if (key->kind == JINJA_STRING) {
        return fkv_jinja_attribute(c, a, key->as.string);
    }
    return fkv_jinja_undefined();
}
