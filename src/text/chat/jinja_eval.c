/* Evaluates statements and expressions. See jinja_eval.h.
 *
 * Scopes follow jinja2: every loop iteration, macro call and {% set %} body has its own scope; `if` blocks do not. Variables
 * exist until the end of their scope. To pass a value out of a scope, templates use a namespace object.
 */
#include "jinja_eval.h"

#include <math.h>

struct jinja_binding {
    jinja_binding *next;
    jinja_string name;
    jinja_value value;
};

enum { JINJA_WORK_BINDING = 8 };

typedef enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow;

static jinja_value eval(jinja_context *c, const jinja_node *node, jinja_scope *scope);
static flow run_all(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_writer *w);

/* ---- scopes ---- */

void fkv_jinja_bind(jinja_context *c, jinja_scope *scope, jinja_string name, jinja_value value) {
    for (jinja_binding *b = scope->first; b != NULL; b = b->next) {
        if (!fkv_jinja_charge(c, JINJA_WORK_BINDING)) return;
        if (!fkv_jinja_same(c, b->name, name)) continue;
        b->value = value;
        return;
    }
    jinja_binding *b = fkv_jinja_take(c, 1, sizeof *b);
    if (b == NULL) return;
    *b = (jinja_binding){scope->first, name, value};
    scope->first = b;
}

static jinja_value look_up(jinja_context *c, const jinja_scope *scope, jinja_string name) {
    for (; scope != NULL && fkv_jinja_charge(c, JINJA_WORK_BINDING); scope = scope->parent)
        for (const jinja_binding *b = scope->first; b != NULL && fkv_jinja_charge(c, JINJA_WORK_BINDING); b = b->next)
            if (fkv_jinja_same(c, b->name, name)) return b->value;
    if (fkv_jinja_has_global(name)) return fkv_jinja_bound(c, name);
    return (jinja_value){.kind = JINJA_UNDEFINED, .as.string = name};
}

/* ---- slices ---- */

/* Computes a slice bound as Python's slice.indices() does. A missing bound is a NULL pointer or the Jinja value none. */
static bool slice_bound(jinja_context *c, const jinja_value *bound, int64_t n, int64_t step, bool is_stop, int64_t *at) {
    int64_t least = step > 0 ? 0 : -1;
    int64_t most = step > 0 ? n : n - 1;
    if (bound == NULL || bound->kind == JINJA_NONE) {
        *at = (step > 0) == is_stop ? most : least;
        return true;
    }
    if (bound->kind != JINJA_INT) {
        fkv_jinja_fail(c, "a slice bound must be an int (got %s)", fkv_jinja_kind_name(bound));
        return false;
    }
    *at = bound->as.integer < 0 ? bound->as.integer + n : bound->as.integer;
    if (*at < least) *at = least;
    if (*at > most) *at = most;
    return true;
}

/* Returns characters [start, stop) of a string, without copying. */
static jinja_value substring(jinja_context *c, jinja_string s, int64_t start, int64_t stop) {
    if (start >= stop) return fkv_jinja_of_string(JINJA_TEXT(""));
    size_t begin = fkv_jinja_byte_of_char(c, s, (size_t)start);
    jinja_string rest = fkv_jinja_part(s, begin, s.n_bytes);
    size_t n_bytes = fkv_jinja_byte_of_char(c, rest, (size_t)(stop - start));
    return fkv_jinja_of_string(fkv_jinja_part(rest, 0, n_bytes));
}

static jinja_value slice_of(jinja_context *c, const jinja_value *a, const jinja_value *part[3]) {
    int64_t step = 1;
    int64_t start;
    int64_t stop;
    if (part[2] != NULL && part[2]->kind == JINJA_INT) step = part[2]->as.integer;
    if (step == 0 || step == INT64_MIN) return fkv_jinja_fail(c, "invalid slice step %lld", (long long)step);
    if (a->kind != JINJA_LIST && a->kind != JINJA_STRING) {
        if (a->kind == JINJA_UNDEFINED) return fkv_jinja_fail_undefined(c, a, "slice", JINJA_TEXT(":"));
        return fkv_jinja_fail(c, "cannot slice a %s", fkv_jinja_kind_name(a));
    }
    bool is_substring = a->kind == JINJA_STRING && step == 1;
    const jinja_list *items = is_substring ? NULL : fkv_jinja_items(c, a);
    int64_t n = is_substring ? fkv_jinja_length(c, a) : items != NULL ? (int64_t)items->n_items : 0;
    if (!slice_bound(c, part[0], n, step, false, &start) || !slice_bound(c, part[1], n, step, true, &stop) || c->failed)
        return fkv_jinja_undefined();
    if (is_substring) return substring(c, a->as.string, start, stop);
    if (items == NULL) return fkv_jinja_undefined(); /* out of memory; the failure was already recorded */
    jinja_value list = fkv_jinja_list(c, a->kind == JINJA_LIST && a->as.list->is_tuple);
    jinja_writer w = {.c = c};
    for (int64_t i = start; (step > 0 ? i < stop : i > stop) && fkv_jinja_charge(c, JINJA_WORK_ITEM); i += step) {
        if (a->kind == JINJA_LIST)
            fkv_jinja_append(c, list, items->items[i]);
        else
            fkv_jinja_write(&w, items->items[i].as.string);
        if (step > stop - i && step > 0) break; /* prevents an overflow of i += step */
        if (step < 0 && step < stop - i) break;
    }
    return a->kind == JINJA_LIST ? list : fkv_jinja_of_string(fkv_jinja_written(&w));
}

static jinja_value eval_slice(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value a = eval(c, node->a, scope);
    const jinja_node *nodes[3] = {node->b, node->c, node->d};
    jinja_value values[3];
    const jinja_value *part[3] = {NULL, NULL, NULL};
    for (int i = 0; i < 3; i++) {
        if (nodes[i] == NULL) continue;
        values[i] = eval(c, nodes[i], scope);
        part[i] = &values[i];
    }
    return c->failed ? fkv_jinja_undefined() : slice_of(c, &a, part);
}

/* ---- operators ---- */

static jinja_value fail_operands(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_value *b) {
    const jinja_value *undefined = a->kind == JINJA_UNDEFINED ? a : b->kind == JINJA_UNDEFINED ? b : NULL;
    if (undefined != NULL) return fkv_jinja_fail_undefined(c, undefined, "use for", name);
    return fkv_jinja_fail(c, "unsupported operands: %s %.*s %s", fkv_jinja_kind_name(a), (int)name.n_bytes, name.text,
                          fkv_jinja_kind_name(b));
}

enum { MAX_POWER = 1000 }; /* larger exponents overflow int64_t unless the base is 0, 1 or -1 */

/* Applies an operator to integers. Division rounds down, as in Python. Returns false on overflow. b must not be 0 in a division
 * and must not be negative in a power. */
static bool integer_result(char operator, bool twice, int64_t a, int64_t b, int64_t *out) {
    if (operator== '+') return !__builtin_add_overflow(a, b, out);
    if (operator== '-') return !__builtin_sub_overflow(a, b, out);
    if (operator== '*' && !twice) return !__builtin_mul_overflow(a, b, out);
    if (operator== '*') {
        *out = 1;
        for (int64_t i = 0; i < b; i++)
            if (i > MAX_POWER || __builtin_mul_overflow(*out, a, out)) return false;
        return true;
    }
    if (b == -1) return operator== '%' ? *out = 0, true : !__builtin_sub_overflow(0, a, out);
    int64_t quotient = a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
    *out = operator== '/' ? quotient : a - quotient * b;
    return true;
}

static int64_t integer_of(const jinja_value *v) { return v->kind == JINJA_BOOL ? v->as.truth : v->as.integer; }

static jinja_value arithmetic_result(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_value *b) {
    double x;
    double y;
    bool twice = name.n_bytes == 2;
    char operator= name.text[0];
    if (!fkv_jinja_number(a, &x) || !fkv_jinja_number(b, &y)) return fail_operands(c, name, a, b);
    if ((operator== '/' || operator== '%') && y == 0.0) return fkv_jinja_fail(c, "division by zero");
    bool whole = a->kind != JINJA_FLOAT && b->kind != JINJA_FLOAT;
    if (operator== '*' && twice && !fkv_jinja_charge(c, MAX_POWER)) return fkv_jinja_undefined();
    if (whole && !(operator== '/' && !twice) && !(operator== '*' && twice && y<0)) {
        int64_t n;
        if (integer_result(operator, twice, integer_of(a), integer_of(b), &n)) return fkv_jinja_int(n);
        return fkv_jinja_fail(c, "integer overflow in %.*s", (int)name.n_bytes, name.text);
    }
    switch (operator) {
    case '+': return fkv_jinja_float(x + y);
    case '-': return fkv_jinja_float(x - y);
    case '*': return fkv_jinja_float(twice ? pow(x, y) : x * y);
    case '/': return fkv_jinja_float(twice ? floor(x / y) : x / y);
    default: return fkv_jinja_float(x - floor(x / y) * y);
    }
}

/* Repeats a string or list n times. */
static jinja_value repeat_sequence(jinja_context *c, const jinja_value *a, int64_t n) {
    jinja_writer w = {.c = c};
    jinja_value list = fkv_jinja_list(c, a->kind == JINJA_LIST && a->as.list->is_tuple);
    for (int64_t i = 0; i < n && fkv_jinja_charge(c, JINJA_WORK_ITEM); i++) {
        if (a->kind == JINJA_STRING) fkv_jinja_write(&w, a->as.string);
        for (size_t j = 0; a->kind == JINJA_LIST && j < a->as.list->n_items && !c->failed; j++)
            fkv_jinja_append(c, list, a->as.list->items[j]);
    }
    return a->kind == JINJA_STRING ? fkv_jinja_of_string(fkv_jinja_written(&w)) : list;
}

static jinja_value concatenate(jinja_context *c, const jinja_value *a, const jinja_value *b) {
    if (a->kind == JINJA_STRING) {
        jinja_writer w = {.c = c};
        bool is_safe = a->as.string.is_safe || b->as.string.is_safe;
        fkv_jinja_write(&w, is_safe ? fkv_jinja_escaped(c, a->as.string) : a->as.string);
        fkv_jinja_write(&w, is_safe ? fkv_jinja_escaped(c, b->as.string) : b->as.string);
        jinja_string s = fkv_jinja_written(&w);
        s.is_safe = is_safe;
        return fkv_jinja_of_string(s);
    }
    jinja_value list = fkv_jinja_list(c, a->as.list->is_tuple);
    for (size_t i = 0; i < a->as.list->n_items; i++) fkv_jinja_append(c, list, a->as.list->items[i]);
    for (size_t i = 0; i < b->as.list->n_items; i++) fkv_jinja_append(c, list, b->as.list->items[i]);
    return list;
}

static bool is_sequence(const jinja_value *v) { return v->kind == JINJA_STRING || v->kind == JINJA_LIST; }

static jinja_value eval_binary(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    char operator= node->name.text[0];
    jinja_value a = eval(c, node->a, scope);
    if (c->failed) return a;
    if (operator== 'a') return fkv_jinja_truth(&a) ? eval(c, node->b, scope) : a;
    if (operator== 'o') return fkv_jinja_truth(&a) ? a : eval(c, node->b, scope);
    jinja_value b = eval(c, node->b, scope);
    if (c->failed) return b;
    if (operator== '~') {
        jinja_value left = fkv_jinja_of_string(fkv_jinja_str(c, &a));
        jinja_value right = fkv_jinja_of_string(fkv_jinja_str(c, &b));
        left.as.string.is_safe = right.as.string.is_safe = false;
        return concatenate(c, &left, &right);
    }
    if (operator== '+' && a.kind == b.kind && is_sequence(&a)) return concatenate(c, &a, &b);
    if (operator== '*' && is_sequence(&a) && b.kind == JINJA_INT) return repeat_sequence(c, &a, b.as.integer);
    if (operator== '*' && is_sequence(&b) && a.kind == JINJA_INT) return repeat_sequence(c, &b, a.as.integer);
    if (operator== '%' && a.kind == JINJA_STRING) {
        bool is_tuple = b.kind == JINJA_LIST && b.as.list->is_tuple;
        return fkv_jinja_of_string(
            fkv_jinja_formatted(c, a.as.string, is_tuple ? b.as.list->items : &b, is_tuple ? b.as.list->n_items : 1));
    }
    return arithmetic_result(c, node->name, &a, &b);
}

static jinja_value eval_unary(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value a = eval(c, node->a, scope);
    double x;
    if (c->failed) return a;
    if (node->name.text[0] == 'n') return fkv_jinja_bool(!fkv_jinja_truth(&a));
    if (!fkv_jinja_number(&a, &x)) return fkv_jinja_fail(c, "unary + and - require a number (got %s)", fkv_jinja_kind_name(&a));
    bool negative = node->name.text[0] == '-';
    if (a.kind == JINJA_FLOAT) return fkv_jinja_float(negative ? -x : x);
    int64_t n = a.kind == JINJA_INT ? a.as.integer : (int64_t)x;
    if (negative && n == INT64_MIN) return fkv_jinja_fail(c, "integer overflow in negation");
    return fkv_jinja_int(negative ? -n : n);
}

static bool compare_values(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_value *b) {
    if (fkv_jinja_is(name, "==")) return fkv_jinja_equal(c, a, b);
    if (fkv_jinja_is(name, "!=")) return !fkv_jinja_equal(c, a, b);
    if (fkv_jinja_is(name, "in")) return fkv_jinja_contains(c, b, a);
    if (fkv_jinja_is(name, "not in")) return !fkv_jinja_contains(c, b, a);
    if (a->kind == JINJA_UNDEFINED || b->kind == JINJA_UNDEFINED) {
        fail_operands(c, name, a, b);
        return false;
    }
    int order = fkv_jinja_order(c, a, b);
    if (name.text[0] == '<') return order < 0 || (name.n_bytes == 2 && order == 0);
    return order > 0 || (name.n_bytes == 2 && order == 0);
}

static jinja_value eval_compare(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value a = eval(c, node->a, scope);
    for (const jinja_node *arg = node->args; arg != NULL && !c->failed; arg = arg->next) {
        jinja_value b = eval(c, arg->a, scope);
        if (c->failed || !compare_values(c, arg->name, &a, &b)) return fkv_jinja_bool(false);
        a = b;
    }
    return fkv_jinja_bool(true);
}

/* ---- calls ---- */

static void add_argument(jinja_context *c, jinja_arguments *args, jinja_string name, jinja_value value) {
    if (args->n == JINJA_MAX_ARGUMENTS) {
        fkv_jinja_fail(c, "a call has more than %d arguments", JINJA_MAX_ARGUMENTS);
        return;
    }
    args->value[args->n] = value;
    args->name[args->n++] = name;
    if (name.n_bytes == 0) args->n_positions++;
}

static void add_named_arguments(jinja_context *c, jinja_arguments *args, const jinja_value *from) {
    if (from->kind != JINJA_DICT || from->as.dict->is_namespace) {
        fkv_jinja_fail(c, "the argument after ** must be a dict (got %s)", fkv_jinja_kind_name(from));
        return;
    }
    for (size_t i = 0; i < from->as.dict->n_pairs && !c->failed; i++) {
        const jinja_pair *pair = &from->as.dict->pairs[i];
        if (pair->key.kind != JINJA_STRING || pair->key.as.string.n_bytes == 0)
            fkv_jinja_fail(c, "keyword argument names must be non-empty strings (got %s)", fkv_jinja_kind_name(&pair->key));
        else
            add_argument(c, args, pair->key.as.string, pair->value);
    }
}

static void eval_arguments(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_arguments *args) {
    args->n = args->n_positions = 0;
    for (const jinja_node *node = nodes; node != NULL && !c->failed; node = node->next) {
        jinja_value value = eval(c, node->a, scope);
        if (c->failed) return;
        if (fkv_jinja_is(node->name, "**")) {
            add_named_arguments(c, args, &value);
        } else if (fkv_jinja_is(node->name, "*")) {
            const jinja_list *items = fkv_jinja_items(c, &value);
            for (size_t i = 0; items != NULL && i < items->n_items && !c->failed; i++)
                add_argument(c, args, JINJA_TEXT(""), items->items[i]);
        } else {
            add_argument(c, args, node->name, value);
        }
    }
}

/* Calls a macro. caller: macro that renders the body of a {% call %} block; NULL if the macro is called in an expression. */
static jinja_value call_macro(jinja_context *c, const jinja_macro *macro, const jinja_arguments *args, jinja_macro *caller) {
    jinja_scope scope = {.parent = macro->scope};
    size_t position = 0;
    size_t n_used = 0;
    for (const jinja_node *p = macro->node->args; p != NULL && fkv_jinja_charge(c, JINJA_WORK_NODE); p = p->next, position++) {
        const jinja_value *given = NULL;
        if (position < args->n_positions) given = &args->value[position];
        for (size_t i = args->n_positions; i < args->n && given == NULL; i++)
            if (fkv_jinja_same(c, args->name[i], p->name)) given = &args->value[i];
        n_used += given != NULL;
        jinja_value unset = {.kind = JINJA_UNDEFINED, .as.string = p->name};
        fkv_jinja_bind(c, &scope, p->name, given != NULL ? *given : p->a != NULL ? eval(c, p->a, &scope) : unset);
    }
    if (n_used < args->n)
        return fkv_jinja_fail(c, "macro \"%.*s\" got an unexpected argument", (int)macro->node->name.n_bytes,
                              macro->node->name.text);
    jinja_value given = {.kind = JINJA_MACRO, .as.macro = caller};
    if (caller != NULL) fkv_jinja_bind(c, &scope, caller->node->name, given);
    jinja_writer w = {.c = c};
    jinja_scope *kept =
        fkv_jinja_take(c, 1, sizeof *kept); /* in the arena, because macros in the body may access the scope after the call */
    if (kept == NULL) return fkv_jinja_undefined();
    *kept = scope;
    fkv_jinja_run(c, macro->node->body, kept, &w);
    return fkv_jinja_of_string(fkv_jinja_written(&w));
}

static jinja_value eval_call(jinja_context *c, const jinja_node *node, jinja_scope *scope, jinja_macro *caller) {
    jinja_value callee = eval(c, node->a, scope);
    jinja_arguments args;
    eval_arguments(c, node->args, scope, &args);
    if (c->failed) return fkv_jinja_undefined();
    if (callee.kind == JINJA_MACRO) return call_macro(c, callee.as.macro, &args, caller);
    if (callee.kind == JINJA_BUILTIN) return fkv_jinja_builtin(c, callee.as.bound, &args);
    jinja_string name = node->a->name;
    return fkv_jinja_fail(c, "\"%.*s\" is not callable (%s)", name.n_bytes < 60 ? (int)name.n_bytes : 60, name.text,
                          callee.kind == JINJA_UNDEFINED ? "undefined" : fkv_jinja_kind_name(&callee));
}

/* Evaluates a chain of filters. body: rendered text of a filter block, which is the input of the first filter; NULL for filters
 * in an expression. */
static jinja_value eval_filter(jinja_context *c, const jinja_node *node, jinja_scope *scope, const jinja_value *body) {
    jinja_value a;
    if (body != NULL)
        a = node->a == NULL ? *body : eval_filter(c, node->a, scope, body);
    else
        a = eval(c, node->a, scope);
    jinja_arguments args;
    eval_arguments(c, node->args, scope, &args);
    if (!fkv_jinja_charge(c, JINJA_WORK_TABLE)) return fkv_jinja_undefined();
    return c->failed ? fkv_jinja_undefined() : fkv_jinja_filter(c, node->name, &a, &args);
}

static jinja_value eval_test(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value a = eval(c, node->a, scope);
    jinja_arguments args;
    eval_arguments(c, node->args, scope, &args);
    if (!fkv_jinja_charge(c, JINJA_WORK_TABLE)) return fkv_jinja_undefined();
    return c->failed ? fkv_jinja_undefined() : fkv_jinja_bool(fkv_jinja_test(c, node->name, &a, &args));
}

/* ---- expressions ---- */

static jinja_value eval_list(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value list = fkv_jinja_list(c, node->kind == JINJA_NODE_TUPLE);
    for (const jinja_node *item = node->args; item != NULL && !c->failed; item = item->next)
        fkv_jinja_append(c, list, eval(c, item->a, scope));
    return list;
}

static jinja_value eval_dict(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value dict = fkv_jinja_dict(c, false);
    for (const jinja_node *item = node->args; item != NULL && !c->failed; item = item->next) {
        jinja_value key = eval(c, item->a, scope);
        fkv_jinja_set(c, dict.as.dict, key, eval(c, item->b, scope));
    }
    return dict;
}

static jinja_value eval_node(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value a;
    jinja_value b;
    switch (node->kind) {
    case JINJA_NODE_CONST: return node->value;
    case JINJA_NODE_NAME: return look_up(c, scope, node->name);
    case JINJA_NODE_LIST:
    case JINJA_NODE_TUPLE: return eval_list(c, node, scope);
    case JINJA_NODE_DICT: return eval_dict(c, node, scope);
    case JINJA_NODE_ATTRIBUTE: a = eval(c, node->a, scope); return c->failed ? a : fkv_jinja_attribute(c, &a, node->name);
    case JINJA_NODE_ITEM:
        a = eval(c, node->a, scope);
        b = eval(c, node->b, scope);
        return c->failed ? a : fkv_jinja_item(c, &a, &b);
    case JINJA_NODE_SLICE: return eval_slice(c, node, scope);
    case JINJA_NODE_CALL: return eval_call(c, node, scope, NULL);
    case JINJA_NODE_FILTER: return eval_filter(c, node, scope, NULL);
    case JINJA_NODE_TEST: return eval_test(c, node, scope);
    case JINJA_NODE_UNARY: return eval_unary(c, node, scope);
    case JINJA_NODE_BINARY: return eval_binary(c, node, scope);
    case JINJA_NODE_COMPARE: return eval_compare(c, node, scope);
    case JINJA_NODE_CHOICE:
        a = eval(c, node->a, scope);
        if (c->failed) return a;
        if (fkv_jinja_truth(&a)) return eval(c, node->b, scope);
        return node->c != NULL ? eval(c, node->c, scope) : fkv_jinja_undefined();
    default: return fkv_jinja_fail(c, "internal error: statement in an expression");
    }
}

static bool enter_node(jinja_context *c, uint32_t line) {
    c->line = line;
    if (!fkv_jinja_charge(c, JINJA_WORK_NODE)) return false;
    if (++c->depth <= c->max_depth) return true;
    c->depth--;
    fkv_jinja_fail(c, "calls and blocks are nested more than %u levels deep", c->max_depth);
    return false;
}

static jinja_value eval(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    if (!enter_node(c, node->line)) return fkv_jinja_undefined();
    jinja_value value = eval_node(c, node, scope);
    c->depth--;
    return value;
}

/* ---- statements ---- */

static void assign_target(jinja_context *c, const jinja_node *target, jinja_scope *scope, jinja_value value) {
    if (c->failed) return;
    if (target->kind == JINJA_NODE_NAME) {
        fkv_jinja_bind(c, scope, target->name, value);
        return;
    }
    if (target->kind == JINJA_NODE_ATTRIBUTE) {
        jinja_value object = look_up(c, scope, target->a->name);
        if (object.kind == JINJA_DICT && object.as.dict->is_namespace)
            fkv_jinja_set(c, object.as.dict, fkv_jinja_of_string(target->name), value);
        else
            fkv_jinja_fail(c, "only attributes of a namespace can be assigned");
        return;
    }
    const jinja_list *items = fkv_jinja_items(c, &value);
    size_t n = 0;
    for (const jinja_node *name = target->args; name != NULL && fkv_jinja_charge(c, JINJA_WORK_ITEM); name = name->next) n++;
    if (c->failed) return;
    if (items == NULL || items->n_items != n) {
        fkv_jinja_fail(c, "cannot unpack %zu values into %zu names", items != NULL ? items->n_items : 0, n);
        return;
    }
    const jinja_value *item = items->items;
    for (const jinja_node *one = target->args; one != NULL; one = one->next) assign_target(c, one->a, scope, *item++);
}

/* Returns a copy of the items for which the loop's condition is true. The items are copied, because the loop body may modify the
 * list. */
static const jinja_list *loop_items(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_value over = eval(c, node->a, scope);
    const jinja_list *items = c->failed ? NULL : fkv_jinja_items(c, &over);
    jinja_value kept = fkv_jinja_list(c, false);
    if (c->failed || items == NULL) return NULL;
    for (size_t i = 0; i < items->n_items && fkv_jinja_charge(c, JINJA_WORK_ITEM); i++) {
        jinja_scope turn = {.parent = scope};
        jinja_value passes = fkv_jinja_bool(true);
        if (node->b != NULL) {
            assign_target(c, node->target, &turn, items->items[i]);
            passes = eval(c, node->b, &turn);
        }
        if (fkv_jinja_truth(&passes)) fkv_jinja_append(c, kept, items->items[i]);
    }
    return c->failed ? NULL : kept.as.list;
}

static flow run_for(jinja_context *c, const jinja_node *node, jinja_scope *scope, jinja_writer *w) {
    const jinja_list *items = loop_items(c, node, scope);
    jinja_loop *loop = fkv_jinja_take(c, 1, sizeof *loop);
    if (items == NULL || loop == NULL) return FLOW_ON;
    if (items->n_items == 0) return run_all(c, node->otherwise, scope, w);
    *loop = (jinja_loop){items, 0};
    for (; loop->index < items->n_items && !c->failed; loop->index++) {
        jinja_scope *turn = fkv_jinja_take(c, 1, sizeof *turn);
        if (turn == NULL) break;
        turn->parent = scope;
        fkv_jinja_bind(c, turn, JINJA_TEXT("loop"), (jinja_value){.kind = JINJA_LOOP, .as.loop = loop});
        assign_target(c, node->target, turn, items->items[loop->index]);
        if (run_all(c, node->body, turn, w) == FLOW_BREAK) break;
    }
    return FLOW_ON;
}

/* Renders the body of a tag to a string and applies the filters of the tag to this string. */
static jinja_value run_captured(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_writer w = {.c = c};
    jinja_scope *inner = fkv_jinja_take(c, 1, sizeof *inner);
    if (inner == NULL) return fkv_jinja_undefined();
    inner->parent = scope;
    (void)run_all(c, node->body, inner, &w);
    jinja_value text = fkv_jinja_of_string(fkv_jinja_written(&w));
    return node->a != NULL && !c->failed ? eval_filter(c, node->a, scope, &text) : text;
}

static jinja_macro *new_macro(jinja_context *c, const jinja_node *node, jinja_scope *scope) {
    jinja_macro *macro = fkv_jinja_take(c, 1, sizeof *macro);
    if (macro != NULL) *macro = (jinja_macro){node, scope};
    return macro;
}

static flow run_scoped(jinja_context *c, const jinja_node *node, jinja_scope *scope, jinja_writer *w) {
    jinja_scope *inner = fkv_jinja_take(c, 1, sizeof *inner);
    if (inner == NULL) return FLOW_ON;
    inner->parent = scope;
    for (const jinja_node *arg = node->args; arg != NULL && !c->failed; arg = arg->next)
        fkv_jinja_bind(c, inner, arg->name, eval(c, arg->a, scope));
    return run_all(c, node->body, inner, w);
}

static flow run_node(jinja_context *c, const jinja_node *node, jinja_scope *scope, jinja_writer *w) {
    jinja_value value;
    switch (node->kind) {
    case JINJA_NODE_DATA: fkv_jinja_write(w, node->name); return FLOW_ON;
    case JINJA_NODE_OUTPUT:
        value = eval(c, node->a, scope);
        if (!c->failed) fkv_jinja_write_str(w, &value);
        return FLOW_ON;
    case JINJA_NODE_IF:
        value = eval(c, node->a, scope);
        return run_all(c, fkv_jinja_truth(&value) ? node->body : node->otherwise, scope, w);
    case JINJA_NODE_FOR: return run_for(c, node, scope, w);
    case JINJA_NODE_SET: assign_target(c, node->target, scope, eval(c, node->a, scope)); return FLOW_ON;
    case JINJA_NODE_SET_BODY: assign_target(c, node->target, scope, run_captured(c, node, scope)); return FLOW_ON;
    case JINJA_NODE_FILTERED:
        value = run_captured(c, node, scope);
        if (!c->failed) fkv_jinja_write_str(w, &value);
        return FLOW_ON;
    case JINJA_NODE_MACRO:
        value = (jinja_value){.kind = JINJA_MACRO, .as.macro = new_macro(c, node, scope)};
        fkv_jinja_bind(c, scope, node->name, value);
        return FLOW_ON;
    case JINJA_NODE_SCOPED: return run_scoped(c, node, scope, w);
    case JINJA_NODE_CALLED:
        value = eval_call(c, node->a, scope, new_macro(c, node, scope));
        if (!c->failed) fkv_jinja_write_str(w, &value);
        return FLOW_ON;
    case JINJA_NODE_BREAK: return FLOW_BREAK;
    case JINJA_NODE_CONTINUE: return FLOW_CONTINUE;
    default: fkv_jinja_fail(c, "internal error: expression as a statement"); return FLOW_ON;
    }
}

static flow run_all(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_writer *w) {
    for (const jinja_node *node = nodes; node != NULL; node = node->next) {
        if (!enter_node(c, node->line)) return FLOW_BREAK;
        flow next = run_node(c, node, scope, w);
        c->depth--;
        if (next != FLOW_ON) return next;
    }
    return FLOW_ON;
}

void fkv_jinja_run(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_writer *w) {
    (void)run_all(c, nodes, scope, w);
}
