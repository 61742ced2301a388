/* Tokens (jinja_lexer.c) and syntax tree (jinja_parser.c) of a template. The grammar, the white space control and the operator
 * precedence are the same as in jinja2 with trim_blocks, lstrip_blocks and loop controls, which transformers enables.
 *
 * Tokens, nodes and strings are allocated in the arena of the context.
 */
#ifndef FKV_JINJA_SYNTAX_H
#define FKV_JINJA_SYNTAX_H

#include "jinja_value.h"

typedef enum jinja_token_kind {
    JINJA_TOKEN_DATA,        /* text outside of tags */
    JINJA_TOKEN_OPEN_OUTPUT, /* {{ */
    JINJA_TOKEN_OPEN_BLOCK,  /* {% */
    JINJA_TOKEN_CLOSE,       /* }} or %} */
    JINJA_TOKEN_NAME,
    JINJA_TOKEN_STRING,
    JINJA_TOKEN_INT,
    JINJA_TOKEN_FLOAT,
    JINJA_TOKEN_OPERATOR,
    JINJA_TOKEN_END
} jinja_token_kind;

typedef struct jinja_token {
    jinja_token_kind kind;
    uint32_t line;
    jinja_string text; /* text of the token; string literals are unquoted and unescaped */
} jinja_token;

/* Returns the tokens of a template, terminated by JINJA_TOKEN_END, or NULL after a failure. */
jinja_token *fkv_jinja_lex(jinja_context *c, const char *text, size_t n_bytes);

typedef enum jinja_node_kind {
    /* statements */
    JINJA_NODE_DATA,     /* name: the text */
    JINJA_NODE_OUTPUT,   /* a */
    JINJA_NODE_IF,       /* runs `body` if the condition `a` is true, otherwise runs `otherwise` */
    JINJA_NODE_FOR,      /* runs `body` for each item of `a` for which `b` is true; runs `otherwise` if there is none */
    JINJA_NODE_SET,      /* target = a */
    JINJA_NODE_SET_BODY, /* assigns the rendered body, after applying the filters in `a`, to the target */
    JINJA_NODE_FILTERED, /* outputs the rendered body after applying the filters in `a` */
    JINJA_NODE_MACRO,    /* name(args) body */
    JINJA_NODE_SCOPED,   /* {% with %} or {% generation %}: runs `body` in its own scope, with args as variables */
    JINJA_NODE_CALLED,   /* {% call %}: calls the macro `a`; in this macro, caller(args) renders `body` */
    JINJA_NODE_BREAK,
    JINJA_NODE_CONTINUE,
    /* expressions */
    JINJA_NODE_CONST,     /* value */
    JINJA_NODE_NAME,      /* name */
    JINJA_NODE_LIST,      /* args: items */
    JINJA_NODE_TUPLE,     /* args: items */
    JINJA_NODE_DICT,      /* dict literal; `args` are the entries, each with its key in `a` and its value in `b` */
    JINJA_NODE_ATTRIBUTE, /* a.name */
    JINJA_NODE_ITEM,      /* a[b] */
    JINJA_NODE_SLICE,     /* slice a[b:c:d]; `b`, `c` and `d` may be NULL */
    JINJA_NODE_CALL,      /* a(args) */
    JINJA_NODE_FILTER,  /* filter `name` applied to `a`, as in a | name(args); `a` is NULL if the input is the body of a block */
    JINJA_NODE_TEST,    /* test `name` applied to `a`, as in "a is name(args)" */
    JINJA_NODE_UNARY,   /* unary operator `name` ("not", "-" or "+") applied to the operand `a` */
    JINJA_NODE_BINARY,  /* a name b */
    JINJA_NODE_COMPARE, /* chain of comparisons with the first operand `a`; each node in `args` has an operator (`name`) and a
                           right operand (`a`) */
    JINJA_NODE_CHOICE,  /* conditional expression (b if a else c); `c` is NULL if there is no else branch */
    JINJA_NODE_ARGUMENT /* call argument: `a` is the value, `name` is the keyword, "*", "**", or "" for a positional argument.
                           Dict entry: `a` is the key, `b` is the value */
} jinja_node_kind;

typedef struct jinja_node jinja_node;
struct jinja_node {
    jinja_node_kind kind;
    uint32_t line;
    jinja_string name;
    jinja_value value;
    jinja_node *a, *b, *c, *d;
    jinja_node *args;      /* linked by next */
    jinja_node *target;    /* assignment target: a node of kind NAME, ATTRIBUTE (of a namespace) or TUPLE (of targets) */
    jinja_node *body;      /* statements of the body, a list linked by `next` */
    jinja_node *otherwise; /* statements of the else branch */
    jinja_node *next;
};

/* Returns the statements of a template. Returns NULL if the template is empty, or after a failure (c->failed). */
jinja_node *fkv_jinja_parse(jinja_context *c, const char *text, size_t n_bytes);

#endif
