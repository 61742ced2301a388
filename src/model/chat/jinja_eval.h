/* Running a template's tree: scopes, statements and expressions (jinja_eval.c), and the functions, methods, filters and tests
 * that templates call by name (jinja_filters.c, jinja_methods.c, jinja_string_methods.c).
 */
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
    jinja_scope *scope; /* that it was defined in */
};

/* Arguments of a call, evaluated: those without a name first. */
enum { JINJA_MAX_ARGUMENTS = 16 };
typedef struct jinja_arguments {
    jinja_value value[JINJA_MAX_ARGUMENTS];
    jinja_string name[JINJA_MAX_ARGUMENTS]; /* "" in the first n_positions */
    size_t n, n_positions;
} jinja_arguments;

/* The argument at `position` (or SIZE_MAX: by name alone) or with that name; NULL: not given. */
const jinja_value *fkv_jinja_argument(const jinja_arguments *args, size_t position, const char *name);

/* A number that is not negative; INT64_MAX where none is given. */
int64_t fkv_jinja_count_argument(const jinja_arguments *args, size_t position, const char *name);

/* Statements into a writer. */
void fkv_jinja_run(jinja_context *c, const jinja_node *nodes, jinja_scope *scope, jinja_writer *w);
void fkv_jinja_bind(jinja_context *c, jinja_scope *scope, jinja_string name, jinja_value value);

/* a.name and a[key] as Jinja looks them up; undefined where there is none. */
jinja_value fkv_jinja_attribute(jinja_context *c, const jinja_value *a, jinja_string name);
jinja_value fkv_jinja_item(jinja_context *c, const jinja_value *a, const jinja_value *key);

/* A function, to be bound to its object. */
jinja_value fkv_jinja_bound(jinja_context *c, jinja_string name);

/* "a" is undefined, so it has no WHAT "name". */
jinja_value fkv_jinja_fail_undefined(jinja_context *c, const jinja_value *a, const char *what, jinja_string name);

/* By name; a name that is not known fails. */
jinja_value fkv_jinja_filter(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args);
bool fkv_jinja_test(jinja_context *c, jinja_string name, const jinja_value *a, const jinja_arguments *args);
jinja_value fkv_jinja_builtin(jinja_context *c, const jinja_bound *what, const jinja_arguments *args);
typedef jinja_value (*fkv_jinja_method)(jinja_context *c, jinja_string s, const jinja_arguments *args);
fkv_jinja_method fkv_jinja_string_method(jinja_string name); /* NULL: there is none */
bool fkv_jinja_has_method(const jinja_value *a, jinja_string name);
bool fkv_jinja_has_global(jinja_string name);

#endif
