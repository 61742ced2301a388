/* Values of the template language (a subset of Jinja), and the context of one rendering with its memory and limits.
 *
 * A string has a mark for each byte: 1 if the caller provided the byte, 0 if the template wrote the byte. Every operation
 * preserves the marks, so that the tokenizer can distinguish a special token written by the template from the same text typed by
 * a user.
 *
 * All memory comes from one arena. The context records the first failure; after a failure, every operation returns undefined and
 * loops end, so callers need to check for a failure only once.
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
    JINJA_LIST, /* lists and tuples */
    JINJA_DICT, /* dicts and namespaces */
    JINJA_LOOP,
    JINJA_MACRO,
    JINJA_BUILTIN /* global function, or method bound to its object */
} jinja_kind;

typedef struct jinja_string {
    const char *text;
    const uint8_t *given; /* [n_bytes] 1 for each byte that the caller provided, otherwise 0; NULL if all are 0 */
    size_t n_bytes;
    bool is_safe; /* true after the "safe" filter: text concatenated with this string is HTML-escaped, as in markupsafe */
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
        jinja_string string; /* string value; for an undefined value, the name that was not found */
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
    jinja_pair *pairs; /* in insertion order */
    size_t n_pairs, capacity;
    bool is_namespace;
};

struct jinja_bound {
    jinja_string name;
    jinja_value object; /* object to which the method is bound; undefined for a global function */
};

typedef struct jinja_chunk jinja_chunk;

typedef struct jinja_context {
    jinja_chunk *chunks;
    size_t n_bytes, max_bytes;
    uint64_t work, max_work; /* work done so far and the work limit, in units of about a nanosecond; see fkv_jinja_charge() */
    uint32_t depth, max_depth;
    uint32_t line; /* template line of the node being evaluated */
    int64_t now;   /* see fkv_template_input */
    bool has_now;
    bool failed;
    char message[512];
} jinja_context;

void fkv_jinja_context_close(jinja_context *c);

/* Records a failure unless one has already been recorded. Returns an undefined value. */
jinja_value fkv_jinja_fail(jinja_context *c, const char *format, ...) FKV_PRINTF(2, 3);

/* Adds `work` to the number of work units used by this rendering. Records a failure and returns false if the sum exceeds the
 * limit. Every operation whose cost depends on the size of a string, list or scope calls this function, so no template runs much
 * longer than the limit allows. */
bool fkv_jinja_charge(jinja_context *c, uint64_t work);

/* Costs in work units. The constants are the costs of evaluating a node, handling a list element, looking up a function by name,
 * and converting a number to or from text. fkv_jinja_copy_work() returns the cost of copying or comparing bytes.
 * fkv_jinja_walk_work() returns the cost of decoding bytes as characters. */
enum { JINJA_WORK_NODE = 32, JINJA_WORK_ITEM = 16, JINJA_WORK_TABLE = 128, JINJA_WORK_NUMBER_TEXT = 512 };
FKV_INLINE uint64_t fkv_jinja_copy_work(size_t n_bytes) { return n_bytes / 4; }
FKV_INLINE uint64_t fkv_jinja_walk_work(size_t n_bytes) { return (uint64_t)n_bytes * 8; }

/* Allocates zeroed memory for n elements from the arena. Fails and returns NULL if the memory limit is exceeded. */
void *fkv_jinja_take(jinja_context *c, size_t n, size_t bytes);

/* Returns a copy of an array with twice the capacity. The array has n elements of `bytes` bytes each. The old array stays
 * allocated until the arena is freed. */
void *fkv_jinja_grown(jinja_context *c, const void *old, size_t n, size_t *capacity, size_t bytes);

/* ---- string builder ---- */

typedef struct jinja_writer {
    jinja_context *c;
    char *text;
    uint8_t *given; /* [capacity] */
    size_t n_bytes, capacity;
    bool any_given;
} jinja_writer;

void fkv_jinja_write(jinja_writer *w, jinja_string s);
void fkv_jinja_write_text(jinja_writer *w, const char *text); /* writes text as if it came from the template */
jinja_string fkv_jinja_written(const jinja_writer *w);

/* ---- constructors ---- */

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
jinja_value fkv_jinja_pair_of(jinja_context *c, jinja_value a, jinja_value b); /* returns the tuple (a, b) */
void fkv_jinja_append(jinja_context *c, jinja_value list, jinja_value item);

/* ---- strings ---- */

size_t fkv_jinja_n_chars(jinja_context *c, jinja_string s);
size_t fkv_jinja_byte_of_char(jinja_context *c, jinja_string s, size_t n); /* byte offset of character n, at most s.n_bytes */
size_t fkv_jinja_char_bytes(jinja_string s, size_t at);                    /* returns the length of the character at byte `at` */
uint32_t fkv_jinja_char(jinja_string s, size_t at);
jinja_string fkv_jinja_part(jinja_string s, size_t begin, size_t end); /* bytes [begin, end) */
bool fkv_jinja_same(jinja_context *c, jinja_string a, jinja_string b); /* compares the bytes and ignores the marks */
bool fkv_jinja_is(jinja_string a, const char *text);
size_t fkv_jinja_find(jinja_context *c, jinja_string s, jinja_string what,
                      size_t from); /* returns the byte offset, or SIZE_MAX if not found */
bool fkv_jinja_is_space(uint32_t character);
jinja_string fkv_jinja_strip(jinja_context *c, jinja_string s, const jinja_string *chars, bool left,
                             bool right); /* removes the characters in `chars`, or white space if chars is NULL */
/* Converts the first letter of each word, or only the first letter of the string, to uppercase. Converts all other letters to
 * lowercase. */
jinja_string fkv_jinja_capitalized(jinja_context *c, jinja_string s, bool every_word);
jinja_string fkv_jinja_replaced(jinja_context *c, jinja_string s, jinja_string old, jinja_string new, int64_t most);
/* Formats values as Python's % operator does. Supports %s, %d, %i, %r and %%. */
jinja_string fkv_jinja_formatted(jinja_context *c, jinja_string format, const jinja_value *values, size_t n_values);
jinja_string fkv_jinja_escaped(jinja_context *c, jinja_string s); /* escapes HTML */
jinja_string fkv_jinja_case(jinja_context *c, jinja_string s, bool upper);
bool fkv_jinja_is_case(jinja_context *c, jinja_string s, bool upper); /* like Python's str.isupper() and str.islower() */

/* ---- lists and dicts ---- */

const jinja_value *fkv_jinja_get(jinja_context *c, const jinja_dict *dict, jinja_value key); /* NULL if missing */
const jinja_value *fkv_jinja_get_named(jinja_context *c, const jinja_dict *dict, jinja_string name);
void fkv_jinja_set(jinja_context *c, jinja_dict *dict, jinja_value key, jinja_value value);

/* ---- Python semantics ---- */

const char *fkv_jinja_kind_name(const jinja_value *v); /* "str", "NoneType" */
bool fkv_jinja_truth(const jinja_value *v);
bool fkv_jinja_equal(jinja_context *c, const jinja_value *a, const jinja_value *b);
int fkv_jinja_order(jinja_context *c, const jinja_value *a,
                    const jinja_value *b); /* returns -1, 0 or 1; fails for values that cannot be ordered */
bool fkv_jinja_contains(jinja_context *c, const jinja_value *in, const jinja_value *what);
bool fkv_jinja_number(const jinja_value *v, double *x); /* returns false if v is not an int, float or bool */
void fkv_jinja_write_str(jinja_writer *w, const jinja_value *v);
void fkv_jinja_write_repr(jinja_writer *w, const jinja_value *v);
jinja_string fkv_jinja_str(jinja_context *c, const jinja_value *v);

/* Returns the elements of an iterable: characters, items or keys. Returns an empty list for undefined, and fails for all other
 * values. */
jinja_list *fkv_jinja_items(jinja_context *c, const jinja_value *v);
/* Returns the number of elements, or -1 if the value has no length. */
int64_t fkv_jinja_length(jinja_context *c, const jinja_value *v);
bool fkv_jinja_has_length(const jinja_value *v);

typedef struct jinja_json_style {
    int64_t indent; /* number of spaces per nesting level; if negative, the JSON is written on one line */
    jinja_string item_separator, key_separator;
    bool sort_keys, ascii;
} jinja_json_style;
void fkv_jinja_write_json(jinja_writer *w, const jinja_value *v, const jinja_json_style *style, uint32_t level);

#endif
