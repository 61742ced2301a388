/* Evaluates a syntax tree. jinja_eval.c implements scopes, statements and expressions. jinja_filters.c, jinja_methods.c and
 * jinja_string_methods.c implement the functions, methods, filters and tests that templates call by name. */
#ifndef FKV_JINJA_EVAL_H
#define FKV_JINJA_EVAL_H

#include "jinja_syntax.h"

typedef struct jinja_binding jinja_binding;

typedef struct jinja_scope {
    struct jinja_scope *parent;
    jinja_binding *first;
} jinja_scope;

struct jinja_loop {
    const jinja_list *items;
    size_t index;
};

struct jinja_macro {
    const jinja_node *node;
    jinja_scope *scope; /* scope in which the macro was defined */
};

/* Evaluated arguments of a call, with positional arguments first. */
enum { JINJA_MAX_ARGUMENTS = 16 };
typedef struct jinja_arguments {
    jinja_value value[JINJA_MAX_ARGUMENTS];
    jinja_string name[JINJA_MAX_ARGUMENTS]; /* keyword of each argument; "" for the first n_positions arguments */
    size_t n, n_positions;
} jinja_arguments;

/* Returns the argument at `position` or with the given name, or NULL if there is none. With position SIZE_MAX, only the name is
 * used. */
const jinja_value *fkv_jinja_argument(const jinja_arguments *args, size_t position, const char *name);

/* Returns a non-negative integer argument. Returns INT64_MAX if the argument is missing, negative or not an integer. */
int64_t fkv_jinja_count_argument(const jinja_arguments *args, size_t position, const char *name);

/* Runs statements and writes their output to w. */
void fkv_jinja_run(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_writer *w);
void fkv_jinja_bind(jinja_context *c, jinja_scope *scope, jinja_string name, jinja_value value);

/* Evaluate a.name and a[key] as in Jinja. Return an undefined value if the element does not exist. */
jinja_value fkv_jinja_attribute(jinja_context *c, const jinja_value *a, jinja_string name);
jinja_value fkv_jinja_item(jinja_context *c, const jinja_value *a, const jinja_value *key);

/* Creates a value for the built-in function `name`, which is not bound to an object yet. */
jinja_value fkv_jinja_bound(jinja_context *c, jinja_string name);

/* Records a failure with the message '"A" is undefined and has no WHAT "NAME"', where A is the name of the undefined value a. */
jinja_value fkv_jinja_fail_undefined(jinja_context *c, const jinja_value *a, const char *what, jinja_string name);

/* Call a filter, test or built-in function by name. Record a failure if the name is unknown. */
jinja_value fkv_jinja_filter(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args);
bool fkv_jinja_test(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args);
jinja_value fkv_jinja_builtin(jinja_context *c, const jinja_bound *what, const jinja_arguments *args);
typedef jinja_value (*fkv_jinja_method)(jinja_context *c, jinja_string s, const jinja_arguments *args);
fkv_jinja_method fkv_jinja_string_method(jinja_string name); /* NULL if unknown */
bool fkv_jinja_has_method(const jinja_value *a, jinja_string name);
bool fkv_jinja_has_global(jinja_string name);

#endif
