/* Values of the template language (Jinja, the part that chat templates use), and the memory and limits of one rendering.
 *
 * Strings carry a mark for each byte: given, where it came from the caller and not from the template. Every operation keeps the
 * marks, so the tokenizer can tell a role that the template wrote from one that a user typed.
 *
 * All memory comes from one arena that is given back at once. A failure is remembered in the context, with its line; from then on
 * every operation returns undefined and loops end, so callers check once.
 */
#ifndef FKV_JINJA_VALUE_H
#define FKV_JINJA_VALUE_H

#include "../../base/base.h"

typedef enum jinja_kind {
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_FLOAT,
    JINJA_STRING,
    JINJA_LIST, /* and tuples */
    JINJA_DICT, /* and namespaces */
    JINJA_LOOP,
    JINJA_MACRO,
    JINJA_BUILTIN /* a global function, or a method bound to its object */
} jinja_kind;

typedef struct jinja_string {
    const char *text;
    const uint8_t *given; /* [n_bytes] 1 where the caller's; NULL: nowhere */
    size_t n_bytes;
    bool is_safe; /* through the filter "safe": what is added to it is escaped for HTML, as markupsafe does */
} jinja_string;

typedef struct jinja_list jinja_list;
typedef struct jinja_dict jinja_dict;
typedef struct jinja_loop jinja_loop;
typedef struct jinja_macro jinja_macro;
typedef struct jinja_bound jinja_bound;

typedef struct jinja_value {
    jinja_kind kind;
    union {
        bool truth;
        int64_t integer;
        double real;
        jinja_string string; /* of an undefined value: the name that was not there */
        jinja_list *list;
        jinja_dict *dict;
        jinja_loop *loop;
        jinja_macro *macro;
        jinja_bound *bound;
    } as;
} jinja_value;

struct jinja_list {
    jinja_value *items;
    size_t n_items, capacity;
    bool is_tuple;
};

typedef struct jinja_pair {
    jinja_value key, value;
} jinja_pair;

struct jinja_dict {
    jinja_pair *pairs; /* in the order of insertion */
    size_t n_pairs, capacity;
    bool is_namespace;
};

struct jinja_bound {
    jinja_string name;
    jinja_value object; /* undefined: a global function */
};

typedef struct jinja_chunk jinja_chunk;

typedef struct jinja_context {
    jinja_chunk *chunks;
    size_t n_bytes, max_bytes;
    uint64_t n_steps, max_steps;
    uint32_t depth, max_depth;
    uint32_t line; /* of the node at hand */
    int64_t now;   /* seconds; see fkv_template_input */
    bool has_now;
    bool failed;
    char message[512];
} jinja_context;

void fkv_jinja_context_close(jinja_context *c);

/* Remembers the first failure. Returns undefined. */
jinja_value fkv_jinja_fail(jinja_context *c, const char *format, ...) FKV_PRINTF(2, 3);

/* Counts work; false once a limit is passed or something failed. */
bool fkv_jinja_step(jinja_context *c, uint64_t n_steps);

/* Zeroed, aligned for any value. Never NULL while nothing failed; NULL when the limit is passed, which fails. */
void *fkv_jinja_take(jinja_context *c, size_t n, size_t bytes);

/* Twice the room for elements of `bytes` each, the first n copied; the old block stays in the arena. */
void *fkv_jinja_grown(jinja_context *c, const void *old, size_t n, size_t *capacity, size_t bytes);

/* ---- strings under construction ---- */

typedef struct jinja_writer {
    jinja_context *c;
    char *text;
    uint8_t *given; /* [capacity] */
    size_t n_bytes, capacity;
    bool any_given;
} jinja_writer;

void fkv_jinja_write(jinja_writer *w, jinja_string s);
void fkv_jinja_write_text(jinja_writer *w, const char *text); /* the template's own */
jinja_string fkv_jinja_written(const jinja_writer *w);

/* ---- making values ---- */

#define JINJA_TEXT(literal) ((jinja_string){(literal), NULL, sizeof(literal) - 1, false})

jinja_string fkv_jinja_text(const char *text); /* not copied */
FKV_INLINE jinja_value fkv_jinja_undefined(void) { return (jinja_value){.kind = JINJA_UNDEFINED}; }
FKV_INLINE jinja_value fkv_jinja_none(void) { return (jinja_value){.kind = JINJA_NONE}; }
FKV_INLINE jinja_value fkv_jinja_bool(bool truth) { return (jinja_value){.kind = JINJA_BOOL, .as.truth = truth}; }
FKV_INLINE jinja_value fkv_jinja_int(int64_t n) { return (jinja_value){.kind = JINJA_INT, .as.integer = n}; }
FKV_INLINE jinja_value fkv_jinja_float(double x) { return (jinja_value){.kind = JINJA_FLOAT, .as.real = x}; }
FKV_INLINE jinja_value fkv_jinja_of_string(jinja_string s) { return (jinja_value){.kind = JINJA_STRING, .as.string = s}; }
jinja_value fkv_jinja_list(jinja_context *c, bool is_tuple);
jinja_value fkv_jinja_dict(jinja_context *c, bool is_namespace);
jinja_value fkv_jinja_pair_of(jinja_context *c, jinja_value a, jinja_value b); /* a tuple of two */
void fkv_jinja_append(jinja_context *c, jinja_value list, jinja_value item);

/* ---- strings: positions are characters, not bytes ---- */

size_t fkv_jinja_n_chars(jinja_string s);
size_t fkv_jinja_char_bytes(jinja_string s, size_t at); /* of the character that begins at byte `at` */
uint32_t fkv_jinja_char(jinja_string s, size_t at);
jinja_string fkv_jinja_part(jinja_string s, size_t begin, size_t end); /* bytes [begin, end) */
bool fkv_jinja_same(jinja_string a, jinja_string b);                   /* bytes alone: marks do not count */
bool fkv_jinja_is(jinja_string a, const char *text);
size_t fkv_jinja_find(jinja_string s, jinja_string what, size_t from); /* the byte, or SIZE_MAX */
bool fkv_jinja_is_space(uint32_t character);
jinja_string fkv_jinja_strip(jinja_string s, const jinja_string *chars, bool left, bool right); /* NULL: white space */
/* Each word, or the first one, begins with a capital; the rest is small. */
jinja_string fkv_jinja_capitalized(jinja_context *c, jinja_string s, bool every_word);
jinja_string fkv_jinja_replaced(jinja_context *c, jinja_string s, jinja_string old, jinja_string new, int64_t most);
/* "%s and %d" with values: %s, %d, %i, %r and %%. */
jinja_string fkv_jinja_formatted(jinja_context *c, jinja_string format, const jinja_value *values, size_t n_values);
jinja_string fkv_jinja_escaped(jinja_context *c, jinja_string s); /* for HTML */
jinja_string fkv_jinja_case(jinja_context *c, jinja_string s, bool upper);
bool fkv_jinja_is_case(jinja_context *c, jinja_string s, bool upper); /* all letters are, and there are some */

/* ---- lists and dicts ---- */

const jinja_value *fkv_jinja_get(jinja_context *c, const jinja_dict *dict, jinja_value key); /* NULL: not there */
const jinja_value *fkv_jinja_get_named(jinja_context *c, const jinja_dict *dict, jinja_string name);
void fkv_jinja_set(jinja_context *c, jinja_dict *dict, jinja_value key, jinja_value value);

/* ---- what values are, as Python says ---- */

const char *fkv_jinja_kind_name(const jinja_value *v); /* "str", "NoneType" */
bool fkv_jinja_truth(const jinja_value *v);
bool fkv_jinja_equal(jinja_context *c, const jinja_value *a, const jinja_value *b);
int fkv_jinja_order(jinja_context *c, const jinja_value *a, const jinja_value *b); /* -1, 0, 1; fails for what has no order */
bool fkv_jinja_contains(jinja_context *c, const jinja_value *in, const jinja_value *what);
bool fkv_jinja_number(const jinja_value *v, double *x); /* ints, floats and bools */
void fkv_jinja_write_str(jinja_writer *w, const jinja_value *v);
void fkv_jinja_write_repr(jinja_writer *w, const jinja_value *v);
jinja_string fkv_jinja_str(jinja_context *c, const jinja_value *v);

/* The items of anything that can be iterated: characters, items, keys. Fails for the rest; undefined has none. */
jinja_list *fkv_jinja_items(jinja_context *c, const jinja_value *v);
/* Their number, or -1 for what has none. */
int64_t fkv_jinja_length(const jinja_value *v);

typedef struct jinja_json_style {
    int64_t indent; /* below 0: on one line */
    jinja_string item_separator, key_separator;
    bool sort_keys, ascii;
} jinja_json_style;
void fkv_jinja_write_json(jinja_writer *w, const jinja_value *v, const jinja_json_style *style, uint32_t level);

#endif
