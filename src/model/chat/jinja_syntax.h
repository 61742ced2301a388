/* From the text of a template to its tree: tokens (jinja_lexer.c), then nodes (jinja_parser.c). Grammar, white space rules and
 * precedence are those of jinja2 with trim_blocks, lstrip_blocks and loop controls, which is how transformers sets it up.
 *
 * Everything lives in the arena of the context; strings point into the template's text, which must outlive the tree.
 */
#ifndef FKV_JINJA_SYNTAX_H
#define FKV_JINJA_SYNTAX_H

#include "jinja_value.h"

typedef enum jinja_token_kind {
    JINJA_TOKEN_DATA,        /* text between tags */
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
    jinja_string text; /* strings without quotes and escapes */
} jinja_token;

/* The tokens of a template, the last one JINJA_TOKEN_END; NULL after a failure. */
jinja_token *fkv_jinja_lex(jinja_context *c, const char *text, size_t n_bytes);

typedef enum jinja_node_kind {
    /* statements */
    JINJA_NODE_DATA,     /* name: the text */
    JINJA_NODE_OUTPUT,   /* a */
    JINJA_NODE_IF,       /* a: condition; body; otherwise */
    JINJA_NODE_FOR,      /* target in a, where b holds; body; otherwise */
    JINJA_NODE_SET,      /* target = a */
    JINJA_NODE_SET_BODY, /* target = body through the filters of a */
    JINJA_NODE_FILTERED, /* body through the filters of a */
    JINJA_NODE_MACRO,    /* name(args) body */
    JINJA_NODE_SCOPED,   /* body, with args as names of its own: {% with %}, {% generation %} */
    JINJA_NODE_CALLED,   /* the call a of a macro, whose caller(args) is body */
    JINJA_NODE_BREAK,
    JINJA_NODE_CONTINUE,
    /* expressions */
    JINJA_NODE_CONST,     /* value */
    JINJA_NODE_NAME,      /* name */
    JINJA_NODE_LIST,      /* args: items */
    JINJA_NODE_TUPLE,     /* args: items */
    JINJA_NODE_DICT,      /* args: a key, b value */
    JINJA_NODE_ATTRIBUTE, /* a.name */
    JINJA_NODE_ITEM,      /* a[b] */
    JINJA_NODE_SLICE,     /* a[b:c:d], each or NULL */
    JINJA_NODE_CALL,      /* a(args) */
    JINJA_NODE_FILTER,    /* a | name(args); a NULL: the body of a block */
    JINJA_NODE_TEST,      /* a is name(args) */
    JINJA_NODE_UNARY,     /* name a: "not", "-", "+" */
    JINJA_NODE_BINARY,    /* a name b */
    JINJA_NODE_COMPARE,   /* a, then args: name and operand a of each comparison */
    JINJA_NODE_CHOICE,    /* b if a else c; c NULL: undefined */
    JINJA_NODE_ARGUMENT   /* in args: name "", the keyword, "*" or "**"; a (and b of a pair) */
} jinja_node_kind;

typedef struct jinja_node jinja_node;
struct jinja_node {
    jinja_node_kind kind;
    uint32_t line;
    jinja_string name;
    jinja_value value;
    jinja_node *a, *b, *c, *d;
    jinja_node *args;      /* list over next */
    jinja_node *target;    /* a NAME, an ATTRIBUTE of a namespace, or a TUPLE of targets */
    jinja_node *body;      /* statements, list over next */
    jinja_node *otherwise; /* likewise */
    jinja_node *next;
};

/* The statements of a template; NULL where it is empty or after a failure (c->failed says which). */
jinja_node *fkv_jinja_parse(jinja_context *c, const char *text, size_t n_bytes);

#endif
