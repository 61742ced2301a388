/* Recursive descent parser for templates. See jinja_syntax.h.
 *
 * Operator precedence, from lowest to highest: conditional expression (a if b else c); or; and; not; comparison; + and -; ~; * /
 * // and %; **; sign; the postfix operators .name, [index] and (call); filters and tests.
 */
#include "jinja_syntax.h"

#include <stdlib.h>

typedef struct parser {
    jinja_context *c;
    const jinja_token *at;
    uint32_t loops; /* number of enclosing loops */
} parser;

static jinja_node *parse_expression(parser *p);
static jinja_node *parse_choice(parser *p, bool with_if);
static jinja_node *parse_unary(parser *p, bool with_filters);

/* ---- tokens ---- */

static jinja_node *fail_at(parser *p, const char *what) {
    jinja_string found = p->at->text;
    int n = found.n_bytes < 40 ? (int)found.n_bytes : 40;
    if (p->at->kind == JINJA_TOKEN_END || p->at->kind == JINJA_TOKEN_CLOSE)
        fkv_jinja_fail(p->c, "line %u: %s, but found the end of the %s", p->at->line, what,
                       p->at->kind == JINJA_TOKEN_END ? "template" : "tag");
    else
        fkv_jinja_fail(p->c, "line %u: %s (got \"%.*s\")", p->at->line, what, n, found.text);
    return NULL;
}

static bool is_operator(const parser *p, const char *text) {
    return p->at->kind == JINJA_TOKEN_OPERATOR && fkv_jinja_is(p->at->text, text);
}

static bool is_keyword(const parser *p, const char *text) {
    return p->at->kind == JINJA_TOKEN_NAME && fkv_jinja_is(p->at->text, text);
}

static bool skip_operator(parser *p, const char *text) {
    if (p->c->failed || !is_operator(p, text)) return false;
    p->at++;
    return true;
}

static bool skip_keyword(parser *p, const char *text) {
    if (p->c->failed || !is_keyword(p, text)) return false;
    p->at++;
    return true;
}

static bool expect_operator(parser *p, const char *text) {
    char what[32] = "expected \"?\"";
    what[sizeof "expected \"" - 1] = text[0];
    if (skip_operator(p, text)) return true;
    fail_at(p, what);
    return false;
}

static jinja_string expect_name(parser *p) {
    if (p->at->kind == JINJA_TOKEN_NAME && !p->c->failed) return (p->at++)->text;
    fail_at(p, "expected a name");
    return JINJA_TEXT("");
}

static jinja_node *new_node(parser *p, jinja_node_kind kind) {
    jinja_node *node = fkv_jinja_take(p->c, 1, sizeof *node);
    if (node == NULL) return NULL;
    node->kind = kind;
    node->line = p->at->line;
    node->name.text = "";
    return node;
}

static jinja_node *new_binary(parser *p, jinja_string name, jinja_node *a, jinja_node *b) {
    jinja_node *node = new_node(p, JINJA_NODE_BINARY);
    if (node == NULL) return NULL;
    node->name = name;
    node->a = a;
    node->b = b;
    return node;
}

/* Enters a nesting level. Returns false if the nesting is too deep; otherwise the caller must call leave_level(). */
static bool enter_level(parser *p) {
    if (p->c->failed) return false;
    if (++p->c->depth <= p->c->max_depth) return true;
    fkv_jinja_fail(p->c, "line %u: blocks or expressions are nested more than %u levels deep", p->at->line, p->c->max_depth);
    p->c->depth--;
    return false;
}

static void leave_level(parser *p) { p->c->depth--; }

/* ---- operands ---- */

static jinja_node **append_argument(parser *p, jinja_node **tail, jinja_string name, jinja_node *a, jinja_node *b) {
    jinja_node *argument = new_node(p, JINJA_NODE_ARGUMENT);
    if (argument == NULL) return tail;
    argument->name = name;
    argument->a = a;
    argument->b = b;
    *tail = argument;
    return &argument->next;
}

/* Parses call arguments, from the token after "(" to the closing ")". An unpacked argument (*args or **kwargs) has the name "*"
 * or "**". */
static jinja_node *parse_arguments(parser *p) {
    jinja_node *first = NULL;
    jinja_node **tail = &first;
    bool named = false;
    while (!p->c->failed && !is_operator(p, ")")) {
        if (first != NULL && !expect_operator(p, ",")) return NULL;
        if (is_operator(p, ")")) break;
        jinja_string name = JINJA_TEXT("");
        if (skip_operator(p, "**")) {
            name = JINJA_TEXT("**");
            named = true;
        } else if (!named && skip_operator(p, "*")) {
            name = JINJA_TEXT("*");
        } else if (p->at->kind == JINJA_TOKEN_NAME && p->at[1].kind == JINJA_TOKEN_OPERATOR && fkv_jinja_is(p->at[1].text, "=")) {
            name = p->at->text;
            named = true;
            p->at += 2;
        } else if (named) {
            return fail_at(p, "positional argument follows keyword argument");
        }
        tail = append_argument(p, tail, name, parse_expression(p), NULL);
    }
    expect_operator(p, ")");
    return first;
}

/* Parses list items up to and including the token `close`. Sets *n to the number of items, and sets *comma if a comma follows the
 * last item. */
static jinja_node *parse_items(parser *p, const char *close, uint32_t *n, bool *comma) {
    jinja_node *first = NULL;
    jinja_node **tail = &first;
    *n = 0;
    *comma = false;
    while (!p->c->failed && !is_operator(p, close)) {
        tail = append_argument(p, tail, JINJA_TEXT(""), parse_expression(p), NULL);
        ++*n;
        *comma = skip_operator(p, ",");
        if (!*comma) break;
    }
    expect_operator(p, close);
    return first;
}

static jinja_node *parse_dict(parser *p) {
    jinja_node *node = new_node(p, JINJA_NODE_DICT);
    if (node == NULL) return NULL;
    jinja_node **tail = &node->args;
    while (!p->c->failed && !is_operator(p, "}")) {
        if (node->args != NULL && !expect_operator(p, ",")) return NULL;
        if (is_operator(p, "}")) break;
        jinja_node *key = parse_expression(p);
        if (!expect_operator(p, ":")) return NULL;
        tail = append_argument(p, tail, JINJA_TEXT(""), key, parse_expression(p));
    }
    expect_operator(p, "}");
    return node;
}

static jinja_node *new_const(parser *p, jinja_value value) {
    jinja_node *node = new_node(p, JINJA_NODE_CONST);
    if (node != NULL) node->value = value;
    return node;
}

static jinja_node *parse_number(parser *p) {
    char digits[64];
    size_t n = 0;
    for (size_t i = 0; i < p->at->text.n_bytes; i++) {
        if (p->at->text.text[i] == '_') continue;
        if (n + 1 == sizeof digits) return fail_at(p, "number with too many digits");
        digits[n++] = p->at->text.text[i];
    }
    digits[n] = 0;
    bool is_int = p->at->kind == JINJA_TOKEN_INT;
    if (is_int && n > 18) return fail_at(p, "number with too many digits");
    jinja_node *node = new_const(p, is_int ? fkv_jinja_int(strtoll(digits, NULL, 10)) : fkv_jinja_float(strtod(digits, NULL)));
    p->at++;
    return node;
}

/* Parses string literals. Adjacent literals are concatenated. */
static jinja_node *parse_strings(parser *p) {
    jinja_string s = (p->at++)->text;
    if (p->at->kind == JINJA_TOKEN_STRING) {
        jinja_writer w = {.c = p->c};
        fkv_jinja_write(&w, s);
        while (p->at->kind == JINJA_TOKEN_STRING && !p->c->failed) fkv_jinja_write(&w, (p->at++)->text);
        s = fkv_jinja_written(&w);
    }
    return new_const(p, fkv_jinja_of_string(s));
}

static jinja_node *parse_word(parser *p) {
    static const struct {
        const char *name;
        jinja_kind kind;
        bool truth;
    } words[] = {{"true", JINJA_BOOL, true},   {"True", JINJA_BOOL, true},  {"false", JINJA_BOOL, false},
                 {"False", JINJA_BOOL, false}, {"none", JINJA_NONE, false}, {"None", JINJA_NONE, false}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (skip_keyword(p, words[i].name)) return new_const(p, (jinja_value){.kind = words[i].kind, .as.truth = words[i].truth});
    jinja_node *node = new_node(p, JINJA_NODE_NAME);
    jinja_string name = expect_name(p);
    if (node != NULL) node->name = name;
    return node;
}

static jinja_node *parse_parenthesis(parser *p) {
    uint32_t n;
    bool comma;
    jinja_node *items = parse_items(p, ")", &n, &comma);
    if (n == 1 && !comma) return items != NULL ? items->a : NULL;
    jinja_node *node = new_node(p, JINJA_NODE_TUPLE);
    if (node != NULL) node->args = items;
    return node;
}

static jinja_node *parse_operand(parser *p) {
    if (p->c->failed) return NULL;
    switch (p->at->kind) {
    case JINJA_TOKEN_NAME: return parse_word(p);
    case JINJA_TOKEN_STRING: return parse_strings(p);
    case JINJA_TOKEN_INT:
    case JINJA_TOKEN_FLOAT: return parse_number(p);
    default: break;
    }
    if (skip_operator(p, "(")) return parse_parenthesis(p);
    if (skip_operator(p, "{")) return parse_dict(p);
    if (skip_operator(p, "[")) {
        uint32_t n;
        bool comma;
        jinja_node *node = new_node(p, JINJA_NODE_LIST);
        jinja_node *items = parse_items(p, "]", &n, &comma);
        if (node != NULL) node->args = items;
        return node;
    }
    return fail_at(p, "expected a value");
}

/* ---- postfix operators ---- */

/* Parses an index or slice, after "[". */
static jinja_node *parse_subscript(parser *p, jinja_node *a) {
    jinja_node *part[3] = {NULL, NULL, NULL};
    uint32_t n = 0;
    bool is_slice = false;
    while (!p->c->failed && n < 3) {
        if (!is_operator(p, ":") && !is_operator(p, "]")) part[n] = parse_expression(p);
        if (!skip_operator(p, ":")) break;
        is_slice = true;
        n++;
    }
    if (!is_slice && part[0] == NULL) return fail_at(p, "expected an index");
    expect_operator(p, "]");
    jinja_node *node = new_node(p, is_slice ? JINJA_NODE_SLICE : JINJA_NODE_ITEM);
    if (node == NULL) return NULL;
    node->a = a;
    node->b = part[0];
    node->c = part[1];
    node->d = part[2];
    return node;
}

static jinja_node *parse_dot(parser *p, jinja_node *a) {
    bool is_index = p->at->kind == JINJA_TOKEN_INT;
    jinja_node *node = new_node(p, is_index ? JINJA_NODE_ITEM : JINJA_NODE_ATTRIBUTE);
    if (node == NULL) return NULL;
    node->a = a;
    if (is_index)
        node->b = parse_number(p);
    else
        node->name = expect_name(p);
    return node;
}

static jinja_node *parse_call(parser *p, jinja_node *a) {
    jinja_node *node = new_node(p, JINJA_NODE_CALL);
    jinja_node *args = parse_arguments(p);
    if (node == NULL) return NULL;
    node->a = a;
    node->args = args;
    return node;
}

static jinja_node *parse_postfix(parser *p, jinja_node *a) {
    while (!p->c->failed) {
        if (skip_operator(p, "."))
            a = parse_dot(p, a);
        else if (skip_operator(p, "["))
            a = parse_subscript(p, a);
        else if (skip_operator(p, "("))
            a = parse_call(p, a);
        else
            break;
    }
    return a;
}

/* Parses a filter, after "|". */
static jinja_node *parse_filter(parser *p, jinja_node *a) {
    jinja_node *node = new_node(p, JINJA_NODE_FILTER);
    jinja_string name = expect_name(p);
    if (node == NULL) return NULL;
    node->a = a;
    node->name = name;
    if (skip_operator(p, "(")) node->args = parse_arguments(p);
    return node;
}

static bool begins_operand(const parser *p) {
    switch (p->at->kind) {
    case JINJA_TOKEN_STRING:
    case JINJA_TOKEN_INT:
    case JINJA_TOKEN_FLOAT: return true;
    case JINJA_TOKEN_NAME:
        return !is_keyword(p, "else") && !is_keyword(p, "or") && !is_keyword(p, "and") && !is_keyword(p, "if") &&
               !is_keyword(p, "is");
    default: return is_operator(p, "[") || is_operator(p, "{");
    }
}

/* Parses a test, after "is". */
static jinja_node *parse_test(parser *p, jinja_node *a) {
    bool negated = skip_keyword(p, "not");
    jinja_node *node = new_node(p, JINJA_NODE_TEST);
    jinja_string name = expect_name(p);
    if (node == NULL) return NULL;
    node->a = a;
    node->name = name;
    if (skip_operator(p, "("))
        node->args = parse_arguments(p);
    else if (begins_operand(p))
        append_argument(p, &node->args, JINJA_TEXT(""), parse_postfix(p, parse_operand(p)), NULL);
    if (!negated) return node;
    jinja_node *not = new_node(p, JINJA_NODE_UNARY);
    if (not== NULL) return NULL;
    not->name = JINJA_TEXT("not");
    not->a = node;
    return not;
}

static jinja_node *parse_filters(parser *p, jinja_node *a) {
    while (!p->c->failed) {
        if (skip_operator(p, "|"))
            a = parse_filter(p, a);
        else if (skip_keyword(p, "is"))
            a = parse_test(p, a);
        else if (skip_operator(p, "("))
            a = parse_call(p, a); /* only a filter can be followed by a call here; parse_postfix() handles all other calls */
        else
            break;
    }
    return a;
}

/* ---- operator precedence ---- */

static jinja_node *new_unary(parser *p, const char *name, jinja_node *a) {
    jinja_node *node = new_node(p, JINJA_NODE_UNARY);
    if (node == NULL) return NULL;
    node->name = fkv_jinja_text(name);
    node->a = a;
    return node;
}

static jinja_node *parse_unary(parser *p, bool with_filters) {
    if (!enter_level(p)) return NULL;
    jinja_node *node = NULL;
    if (skip_operator(p, "-"))
        node = new_unary(p, "-", parse_unary(p, false));
    else if (skip_operator(p, "+"))
        node = new_unary(p, "+", parse_unary(p, false));
    else
        node = parse_operand(p);
    node = parse_postfix(p, node);
    if (with_filters) node = parse_filters(p, node);
    leave_level(p);
    return node;
}

/* Binary operators by precedence, lowest first. */
static const char *const levels[][5] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
enum { N_LEVELS = sizeof levels / sizeof *levels };

static jinja_node *parse_level(parser *p, size_t level) {
    if (level == N_LEVELS) return parse_unary(p, true);
    jinja_node *a = parse_level(p, level + 1);
    for (bool more = true; more && !p->c->failed;) {
        more = false;
        for (size_t i = 0; levels[level][i] != NULL && !more; i++) {
            if (!skip_operator(p, levels[level][i])) continue;
            a = new_binary(p, fkv_jinja_text(levels[level][i]), a, parse_level(p, level + 1));
            more = true;
        }
    }
    return a;
}

/* Consumes and returns a comparison operator. Returns "" if the next token is not a comparison operator. */
static const char *skip_comparison(parser *p) {
    static const char *const operators[] = {"==", "!=", "<=", ">=", "<", ">"};
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (skip_operator(p, operators[i])) return operators[i];
    if (skip_keyword(p, "in")) return "in";
    if (is_keyword(p, "not") && p->at[1].kind == JINJA_TOKEN_NAME && fkv_jinja_is(p->at[1].text, "in"))
        return p->at += 2, "not in";
    return "";
}

static jinja_node *parse_comparison(parser *p) {
    jinja_node *a = parse_level(p, 0);
    const char *name = skip_comparison(p);
    if (name[0] == 0 || p->c->failed) return a;
    jinja_node *node = new_node(p, JINJA_NODE_COMPARE);
    if (node == NULL) return NULL;
    node->a = a;
    jinja_node **tail = &node->args;
    for (; name[0] != 0 && !p->c->failed; name = skip_comparison(p))
        tail = append_argument(p, tail, fkv_jinja_text(name), parse_level(p, 0), NULL);
    return node;
}

static jinja_node *parse_not(parser *p) {
    if (!is_keyword(p, "not")) return parse_comparison(p);
    if (!enter_level(p)) return NULL;
    p->at++;
    jinja_node *node = new_unary(p, "not", parse_not(p));
    leave_level(p);
    return node;
}

static jinja_node *parse_and(parser *p) {
    jinja_node *a = parse_not(p);
    while (skip_keyword(p, "and")) a = new_binary(p, JINJA_TEXT("and"), a, parse_not(p));
    return a;
}

static jinja_node *parse_or(parser *p) {
    jinja_node *a = parse_and(p);
    while (skip_keyword(p, "or")) a = new_binary(p, JINJA_TEXT("or"), a, parse_and(p));
    return a;
}

static jinja_node *parse_choice(parser *p, bool with_if) {
    if (!enter_level(p)) return NULL;
    jinja_node *a = parse_or(p);
    while (with_if && skip_keyword(p, "if")) {
        jinja_node *node = new_node(p, JINJA_NODE_CHOICE);
        if (node == NULL) break;
        node->b = a;
        node->a = parse_or(p);
        if (skip_keyword(p, "else")) node->c = parse_choice(p, true);
        a = node;
    }
    leave_level(p);
    return a;
}

static jinja_node *parse_expression(parser *p) { return parse_choice(p, true); }

/* Parses an expression, or a tuple of expressions separated by commas. */
static jinja_node *parse_tuple(parser *p, bool with_if) {
    jinja_node *first = parse_choice(p, with_if);
    if (!is_operator(p, ",") || p->c->failed) return first;
    jinja_node *node = new_node(p, JINJA_NODE_TUPLE);
    if (node == NULL) return NULL;
    jinja_node **tail = append_argument(p, &node->args, JINJA_TEXT(""), first, NULL);
    while (skip_operator(p, ",") && p->at->kind != JINJA_TOKEN_CLOSE)
        tail = append_argument(p, tail, JINJA_TEXT(""), parse_choice(p, with_if), NULL);
    return node;
}

/* ---- statements ---- */

static jinja_node *parse_body(parser *p, const char *const *ends);

static void expect_close(parser *p) {
    if (p->c->failed) return;
    if (p->at->kind == JINJA_TOKEN_CLOSE)
        p->at++;
    else
        fail_at(p, "expected the end of the tag");
}

/* Consumes the closing tag of a block. The current token is the name of the closing tag. */
static void close_block(parser *p) {
    if (p->c->failed) return;
    p->at++;
    expect_close(p);
}

static jinja_node *parse_target(parser *p, bool with_attribute);

/* Parses an assignment target: a name, an attribute of a namespace, or targets in parentheses. */
static jinja_node *parse_one_target(parser *p, bool with_attribute) {
    if (!enter_level(p)) return NULL;
    jinja_node *node = NULL;
    if (skip_operator(p, "(")) {
        node = parse_target(p, with_attribute);
        expect_operator(p, ")");
    } else {
        node = new_node(p, JINJA_NODE_NAME);
        jinja_string name = expect_name(p);
        if (node != NULL) node->name = name;
        if (node != NULL && with_attribute && skip_operator(p, ".")) node = parse_dot(p, node);
    }
    leave_level(p);
    return node;
}

/* Parses one or more targets separated by commas. */
static jinja_node *parse_target(parser *p, bool with_attribute) {
    jinja_node *first = parse_one_target(p, with_attribute);
    if (!is_operator(p, ",") || p->c->failed) return first;
    jinja_node *node = new_node(p, JINJA_NODE_TUPLE);
    if (node == NULL) return NULL;
    jinja_node **tail = append_argument(p, &node->args, JINJA_TEXT(""), first, NULL);
    while (skip_operator(p, ",") && !is_keyword(p, "in") && !is_operator(p, "=") && !is_operator(p, ")"))
        tail = append_argument(p, tail, JINJA_TEXT(""), parse_one_target(p, with_attribute), NULL);
    return node;
}

/* Parses a conditional, after "if" or "elif". */
static jinja_node *parse_if(parser *p) {
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    if (!enter_level(p)) return NULL;
    jinja_node *node = new_node(p, JINJA_NODE_IF);
    if (node != NULL) {
        node->a = parse_tuple(p, true);
        expect_close(p);
        node->body = parse_body(p, ends);
        if (skip_keyword(p, "elif")) {
            node->otherwise = parse_if(p);
        } else if (skip_keyword(p, "else")) {
            expect_close(p);
            node->otherwise = parse_body(p, last);
            close_block(p);
        } else {
            close_block(p);
        }
    }
    leave_level(p);
    return node;
}

static jinja_node *parse_for(parser *p) {
    static const char *const ends[] = {"else", "endfor", NULL};
    static const char *const last[] = {"endfor", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_FOR);
    if (node == NULL) return NULL;
    node->target = parse_target(p, false);
    if (!skip_keyword(p, "in")) return fail_at(p, "expected \"in\"");
    node->a = parse_tuple(p, false);
    if (skip_keyword(p, "if")) node->b = parse_expression(p);
    if (is_keyword(p, "recursive")) return fail_at(p, "recursive loops are not supported; expected the end of the tag");
    expect_close(p);
    p->loops++;
    node->body = parse_body(p, ends);
    p->loops--;
    if (skip_keyword(p, "else")) {
        expect_close(p);
        node->otherwise = parse_body(p, last);
    }
    close_block(p);
    return node;
}

static jinja_node *parse_set(parser *p) {
    static const char *const ends[] = {"endset", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_SET);
    if (node == NULL) return NULL;
    node->target = parse_target(p, true);
    if (skip_operator(p, "=")) {
        node->a = parse_tuple(p, true);
        expect_close(p);
        return node;
    }
    node->kind = JINJA_NODE_SET_BODY;
    while (skip_operator(p, "|")) node->a = parse_filter(p, node->a);
    expect_close(p);
    node->body = parse_body(p, ends);
    close_block(p);
    return node;
}

/* Parses macro parameters with optional default values, from the token after "(" to the closing ")". */
static jinja_node *parse_parameters(parser *p) {
    jinja_node *first = NULL;
    jinja_node **tail = &first;
    while (!p->c->failed && !is_operator(p, ")")) {
        if (first != NULL && !expect_operator(p, ",")) return NULL;
        jinja_string name = expect_name(p);
        tail = append_argument(p, tail, name, skip_operator(p, "=") ? parse_expression(p) : NULL, NULL);
    }
    expect_operator(p, ")");
    return first;
}

/* Parses the end of an opening tag and the body that follows it. A break or continue in the body cannot refer to a loop outside
 * of the body. */
static void parse_own_body(parser *p, jinja_node *node, const char *const *ends) {
    expect_close(p);
    uint32_t loops = p->loops;
    p->loops = 0;
    node->body = parse_body(p, ends);
    p->loops = loops;
    close_block(p);
}

static jinja_node *parse_macro(parser *p) {
    static const char *const ends[] = {"endmacro", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_MACRO);
    if (node == NULL) return NULL;
    node->name = expect_name(p);
    expect_operator(p, "(");
    node->args = parse_parameters(p);
    parse_own_body(p, node, ends);
    return node;
}

static jinja_node *parse_called(parser *p) {
    static const char *const ends[] = {"endcall", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_CALLED);
    if (node == NULL) return NULL;
    node->name = JINJA_TEXT("caller");
    if (skip_operator(p, "(")) node->args = parse_parameters(p);
    node->a = parse_expression(p);
    if (!p->c->failed && node->a->kind != JINJA_NODE_CALL) return fail_at(p, "expected a macro call");
    parse_own_body(p, node, ends);
    return node;
}

static jinja_node *parse_with(parser *p) {
    static const char *const ends[] = {"endwith", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_SCOPED);
    if (node == NULL) return NULL;
    jinja_node **tail = &node->args;
    while (!p->c->failed && p->at->kind != JINJA_TOKEN_CLOSE) {
        if (node->args != NULL && !expect_operator(p, ",")) return NULL;
        jinja_string name = expect_name(p);
        if (!expect_operator(p, "=")) return NULL;
        tail = append_argument(p, tail, name, parse_expression(p), NULL);
    }
    expect_close(p);
    node->body = parse_body(p, ends);
    close_block(p);
    return node;
}

static jinja_node *parse_filter_block(parser *p) {
    static const char *const ends[] = {"endfilter", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_FILTERED);
    if (node == NULL) return NULL;
    do node->a = parse_filter(p, node->a);
    while (skip_operator(p, "|"));
    expect_close(p);
    node->body = parse_body(p, ends);
    close_block(p);
    return node;
}

static jinja_node *parse_generation(parser *p) {
    static const char *const ends[] = {"endgeneration", NULL};
    jinja_node *node = new_node(p, JINJA_NODE_SCOPED);
    if (node != NULL) parse_own_body(p, node, ends);
    return node;
}

static jinja_node *parse_jump(parser *p, jinja_node_kind kind) {
    jinja_node *node = new_node(p, kind);
    if (p->loops == 0) return fail_at(p, "\"break\" and \"continue\" are allowed only inside loops");
    expect_close(p);
    return node;
}

/* Parses a statement, after {%. */
static jinja_node *parse_block(parser *p) {
    if (skip_keyword(p, "if")) return parse_if(p);
    if (skip_keyword(p, "for")) return parse_for(p);
    if (skip_keyword(p, "set")) return parse_set(p);
    if (skip_keyword(p, "macro")) return parse_macro(p);
    if (skip_keyword(p, "filter")) return parse_filter_block(p);
    if (skip_keyword(p, "with")) return parse_with(p);
    if (skip_keyword(p, "call")) return parse_called(p);
    if (skip_keyword(p, "generation")) return parse_generation(p);
    if (skip_keyword(p, "break")) return parse_jump(p, JINJA_NODE_BREAK);
    if (skip_keyword(p, "continue")) return parse_jump(p, JINJA_NODE_CONTINUE);
    return fail_at(p, "expected a statement (if, for, set, macro, call, with, filter, generation, break, continue)");
}

static jinja_node *parse_output(parser *p) {
    jinja_node *node = new_node(p, JINJA_NODE_OUTPUT);
    if (node == NULL) return NULL;
    node->a = parse_tuple(p, true);
    expect_close(p);
    return node;
}

static bool at_end_of(const parser *p, const char *const *ends) {
    for (; *ends != NULL; ends++)
        if (p->at[1].kind == JINJA_TOKEN_NAME && fkv_jinja_is(p->at[1].text, *ends)) return true;
    return false;
}

/* Parses statements up to a tag whose name is in `ends`. Afterwards, the current token is the name of that tag. */
static jinja_node *parse_body(parser *p, const char *const *ends) {
    jinja_node *first = NULL;
    jinja_node **tail = &first;
    if (!enter_level(p)) return NULL;
    while (!p->c->failed) {
        jinja_node *node = NULL;
        if (p->at->kind == JINJA_TOKEN_END) {
            if (*ends != NULL) fail_at(p, "unclosed block");
            break;
        }
        if (p->at->kind == JINJA_TOKEN_DATA) {
            node = new_node(p, JINJA_NODE_DATA);
            if (node != NULL) node->name = p->at->text;
            p->at++;
        } else if (p->at->kind == JINJA_TOKEN_OPEN_OUTPUT) {
            p->at++;
            node = parse_output(p);
        } else if (at_end_of(p, ends)) {
            p->at++;
            break;
        } else {
            p->at++;
            node = parse_block(p);
        }
        if (node == NULL) break;
        *tail = node;
        tail = &node->next;
    }
    leave_level(p);
    return first;
}

jinja_node *fkv_jinja_parse(jinja_context *c, const char *text, size_t n_bytes) {
    static const char *const no_ends[] = {NULL};
    const jinja_token *tokens = fkv_jinja_lex(c, text, n_bytes);
    if (tokens == NULL) return NULL;
    parser p = {.c = c, .at = tokens};
    return parse_body(&p, no_ends);
}
