/* Memory, strings, lists and dicts of the template language. See jinja_value.h; comparison and printing are in jinja_python.c. */
#include "jinja_value.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

/* ---- context ---- */

struct jinja_chunk {
    jinja_chunk *next;
    size_t used, size;
    max_align_t bytes[];
};

enum { CHUNK_BYTES = 64 * 1024 };

void fkv_jinja_context_close(jinja_context *c) {
    while (c->chunks != NULL) {
        jinja_chunk *next = c->chunks->next;
        free(c->chunks);
        c->chunks = next;
    }
    c->n_bytes = 0;
}

jinja_value fkv_jinja_fail(jinja_context *c, const char *format, ...) {
    if (!c->failed) {
        va_list args;
        va_start(args, format);
        (void)vsnprintf(c->message, sizeof c->message, format, args);
        va_end(args);
        c->failed = true;
    }
    return fkv_jinja_undefined();
}

bool fkv_jinja_charge(jinja_context *c, uint64_t work) {
    if (c->failed) return false;
    if (work <= c->max_work - c->work) {
        c->work += work;
        return true;
    }
    fkv_jinja_fail(c, "rendering the template exceeds the work limit of %llu units (about 1 ns each)",
                   (unsigned long long)c->max_work);
    return false;
}

void *fkv_jinja_take(jinja_context *c, size_t n, size_t bytes) {
    uint64_t wanted = 0;
    if (c->failed) return NULL;
    if (fkv_mul_overflows(n, bytes, &wanted) || wanted > c->max_bytes || c->n_bytes + wanted > c->max_bytes) {
        fkv_jinja_fail(c, "the template exceeds the memory limit of %zu bytes", c->max_bytes);
        return NULL;
    }
    wanted = fkv_align_up(wanted, sizeof(max_align_t));
    if (!fkv_jinja_charge(c, JINJA_WORK_ITEM + fkv_jinja_copy_work(wanted))) return NULL;
    if (c->chunks == NULL || c->chunks->size - c->chunks->used < wanted) {
        size_t size = wanted > CHUNK_BYTES ? wanted : CHUNK_BYTES;
        jinja_chunk *chunk = calloc(1, sizeof *chunk + size);
        if (chunk == NULL) {
            fkv_jinja_fail(c, "out of memory allocating %zu bytes", size);
            return NULL;
        }
        chunk->size = size;
        chunk->next = c->chunks;
        c->chunks = chunk;
    }
    void *taken = (char *)c->chunks->bytes + c->chunks->used;
    c->chunks->used += wanted;
    c->n_bytes += wanted;
    return taken;
}

/* ---- writers ---- */

static bool writer_grow(jinja_writer *w, size_t n_more) {
    if (n_more > SIZE_MAX / 4 - w->n_bytes) return false;
    size_t capacity = w->capacity == 0 ? 64 : w->capacity;
    while (capacity < w->n_bytes + n_more) capacity *= 2;
    if (capacity == w->capacity) return true;
    char *text = fkv_jinja_take(w->c, capacity, 1);
    uint8_t *given = fkv_jinja_take(w->c, capacity, 1);
    if (text == NULL || given == NULL) return false;
    if (w->n_bytes > 0) {
        memcpy(text, w->text, w->n_bytes);
        memcpy(given, w->given, w->n_bytes);
    }
    w->text = text;
    w->given = given;
    w->capacity = capacity;
    return true;
}

void fkv_jinja_write(jinja_writer *w, jinja_string s) {
    if (!fkv_jinja_charge(w->c, JINJA_WORK_ITEM + fkv_jinja_copy_work(s.n_bytes))) return;
    if (s.n_bytes == 0 || !writer_grow(w, s.n_bytes)) return;
    memcpy(w->text + w->n_bytes, s.text, s.n_bytes);
    if (s.given != NULL) {
        memcpy(w->given + w->n_bytes, s.given, s.n_bytes);
        w->any_given = true;
    }
    w->n_bytes += s.n_bytes;
}

void fkv_jinja_write_text(jinja_writer *w, const char *text) { fkv_jinja_write(w, fkv_jinja_text(text)); }

jinja_string fkv_jinja_written(const jinja_writer *w) {
    return (jinja_string){w->n_bytes > 0 ? w->text : "", w->any_given ? w->given : NULL, w->n_bytes, false};
}

/* ---- strings ---- */

jinja_string fkv_jinja_text(const char *text) { return (jinja_string){text, NULL, strlen(text), false}; }

size_t fkv_jinja_char_bytes(jinja_string s, size_t at) {
    uint8_t first = (uint8_t)s.text[at];
    size_t n = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    for (size_t i = 1; i < n; i++)
        if (at + i >= s.n_bytes || ((uint8_t)s.text[at + i] & 0xc0) != 0x80)
            return 1; /* invalid UTF-8: every byte counts as one character */
    return n;
}

uint32_t fkv_jinja_char(jinja_string s, size_t at) {
    utf8proc_int32_t character = 0;
    size_t n = fkv_jinja_char_bytes(s, at);
    if (n == 1) return (uint8_t)s.text[at];
    utf8proc_ssize_t used = utf8proc_iterate((const utf8proc_uint8_t *)s.text + at, (utf8proc_ssize_t)n, &character);
    return used > 0 ? (uint32_t)character : 0xfffd;
}

/* Returns the length, in bytes, of the ASCII text that starts at offset `at`, rounded down to a multiple of 8. */
static size_t ascii_run(jinja_string s, size_t at) {
    size_t n = 0;
    for (uint64_t word; s.n_bytes - at - n >= sizeof word; n += sizeof word) {
        memcpy(&word, s.text + at + n, sizeof word);
        if ((word & UINT64_C(0x8080808080808080)) != 0) break;
    }
    return n;
}

size_t fkv_jinja_byte_of_char(jinja_context *c, jinja_string s, size_t n) {
    size_t at = 0;
    while (n > 0 && at < s.n_bytes) {
        size_t run = ascii_run(s, at);
        if (run > n) run = n;
        at += run;
        n -= run;
        for (int i = 0; i < 8 && n > 0 && at < s.n_bytes; i++, n--) at += fkv_jinja_char_bytes(s, at);
    }
    return fkv_jinja_charge(c, at) ? at : s.n_bytes;
}

size_t fkv_jinja_n_chars(jinja_context *c, jinja_string s) {
    size_t n = 0;
    if (!fkv_jinja_charge(c, s.n_bytes)) return 0;
    for (size_t at = 0; at < s.n_bytes;) {
        size_t run = ascii_run(s, at);
        at += run;
        n += run;
        for (int i = 0; i < 8 && at < s.n_bytes; i++, n++) at += fkv_jinja_char_bytes(s, at);
    }
    return n;
}

jinja_string fkv_jinja_part(jinja_string s, size_t begin, size_t end) {
    FKV_ASSERT(begin <= end && end <= s.n_bytes);
    return (jinja_string){s.text + begin, s.given != NULL ? s.given + begin : NULL, end - begin, false};
}

bool fkv_jinja_same(jinja_context *c, jinja_string a, jinja_string b) {
    if (a.n_bytes != b.n_bytes || !fkv_jinja_charge(c, fkv_jinja_copy_work(a.n_bytes))) return false;
    return a.n_bytes == 0 || memcmp(a.text, b.text, a.n_bytes) == 0;
}

bool fkv_jinja_is(jinja_string a, const char *text) {
    size_t i = 0;
    while (i < a.n_bytes && text[i] != 0 && a.text[i] == text[i]) i++;
    return i == a.n_bytes && text[i] == 0;
}

/* Charges work units only for the bytes up to the end of the match, not for the whole string, so that splitting a long string
 * costs linear work. Longer search strings cost more, up to the length at which memmem() switches to a linear-time algorithm. */
size_t fkv_jinja_find(jinja_context *c, jinja_string s, jinja_string what, size_t from) {
    enum { LONG_NEEDLE = 256 };
    if (from > s.n_bytes || what.n_bytes > s.n_bytes - from) return SIZE_MAX;
    if (what.n_bytes == 0) return from;
    const char *found = memmem(s.text + from, s.n_bytes - from, what.text, what.n_bytes);
    size_t end = found == NULL ? s.n_bytes : (size_t)(found - s.text) + what.n_bytes;
    uint64_t per_byte = 1 + (what.n_bytes < LONG_NEEDLE ? what.n_bytes : LONG_NEEDLE) / 32;
    if (!fkv_jinja_charge(c, JINJA_WORK_ITEM + (end - from) * per_byte)) return SIZE_MAX;
    return found == NULL ? SIZE_MAX : (size_t)(found - s.text);
}

bool fkv_jinja_is_space(uint32_t x) {
    return (x >= 9 && x <= 13) || (x >= 0x1c && x <= 0x20) || x == 0x85 || x == 0xa0 || x == 0x1680 ||
           (x >= 0x2000 && x <= 0x200a) || x == 0x2028 || x == 0x2029 || x == 0x202f || x == 0x205f || x == 0x3000;
}

static bool is_stripped(jinja_context *c, jinja_string s, size_t at, const jinja_string *chars) {
    if (chars == NULL) return fkv_jinja_is_space(fkv_jinja_char(s, at));
    jinja_string character = fkv_jinja_part(s, at, at + fkv_jinja_char_bytes(s, at));
    return fkv_jinja_find(c, *chars, character, 0) != SIZE_MAX;
}

/* Returns the offset of the last character. */
static size_t last_char_offset(jinja_string s) {
    size_t at = s.n_bytes - 1;
    while (at > 0 && s.n_bytes - at < 4 && ((uint8_t)s.text[at] & 0xc0) == 0x80) at--;
    return at + fkv_jinja_char_bytes(s, at) == s.n_bytes ? at : s.n_bytes - 1;
}

jinja_string fkv_jinja_strip(jinja_context *c, jinja_string s, const jinja_string *chars, bool left, bool right) {
    while (left && s.n_bytes > 0 && fkv_jinja_charge(c, JINJA_WORK_ITEM) && is_stripped(c, s, 0, chars))
        s = fkv_jinja_part(s, fkv_jinja_char_bytes(s, 0), s.n_bytes);
    while (right && s.n_bytes > 0 && fkv_jinja_charge(c, JINJA_WORK_ITEM) && is_stripped(c, s, last_char_offset(s), chars))
        s = fkv_jinja_part(s, 0, last_char_offset(s));
    return s;
}

jinja_string fkv_jinja_escaped(jinja_context *c, jinja_string s) {
    jinja_writer w = {.c = c};
    if (s.is_safe) return s;
    for (size_t i = 0; i < s.n_bytes && !c->failed; i++) {
        const char *entity = s.text[i] == '&'    ? "&amp;"
                             : s.text[i] == '<'  ? "&lt;"
                             : s.text[i] == '>'  ? "&gt;"
                             : s.text[i] == '"'  ? "&#34;"
                             : s.text[i] == '\'' ? "&#39;"
                                                 : NULL;
        if (entity != NULL)
            fkv_jinja_write_text(&w, entity);
        else
            fkv_jinja_write(&w, fkv_jinja_part(s, i, i + 1));
    }
    s = fkv_jinja_written(&w);
    s.is_safe = true;
    return s;
}

jinja_string fkv_jinja_case(jinja_context *c, jinja_string s, bool upper) {
    jinja_writer w = {.c = c};
    for (size_t at = 0; at < s.n_bytes && fkv_jinja_charge(c, JINJA_WORK_ITEM);) {
        size_t n = fkv_jinja_char_bytes(s, at);
        utf8proc_uint8_t bytes[4];
        utf8proc_int32_t from = (utf8proc_int32_t)fkv_jinja_char(s, at);
        jinja_string part = fkv_jinja_part(s, at, at + n);
        if (n > 1 || from < 0x80) {
            utf8proc_int32_t to = upper ? utf8proc_toupper(from) : utf8proc_tolower(from);
            uint8_t given[4];
            memset(given, part.given != NULL ? part.given[0] : 0, sizeof given);
            size_t n_bytes = (size_t)utf8proc_encode_char(to, bytes);
            fkv_jinja_write(&w, (jinja_string){(const char *)bytes, part.given != NULL ? given : NULL, n_bytes, false});
        } else {
            fkv_jinja_write(&w, part);
        }
        at += n;
    }
    return fkv_jinja_written(&w);
}

/* ---- lists and dicts ---- */

jinja_value fkv_jinja_list(jinja_context *c, bool is_tuple) {
    jinja_list *list = fkv_jinja_take(c, 1, sizeof *list);
    if (list == NULL) return fkv_jinja_undefined();
    list->is_tuple = is_tuple;
    return (jinja_value){.kind = JINJA_LIST, .as.list = list};
}

jinja_value fkv_jinja_dict(jinja_context *c, bool is_namespace) {
    jinja_dict *dict = fkv_jinja_take(c, 1, sizeof *dict);
    if (dict == NULL) return fkv_jinja_undefined();
    dict->is_namespace = is_namespace;
    return (jinja_value){.kind = JINJA_DICT, .as.dict = dict};
}

jinja_value fkv_jinja_pair_of(jinja_context *c, jinja_value a, jinja_value b) {
    jinja_value pair = fkv_jinja_list(c, true);
    fkv_jinja_append(c, pair, a);
    fkv_jinja_append(c, pair, b);
    return pair;
}

void *fkv_jinja_grown(jinja_context *c, const void *old, size_t n, size_t *capacity, size_t bytes) {
    size_t wanted = *capacity == 0 ? 4 : 2 * *capacity;
    void *block = fkv_jinja_take(c, wanted, bytes);
    if (block == NULL) return NULL;
    if (n > 0) memcpy(block, old, n * bytes);
    *capacity = wanted;
    return block;
}

void fkv_jinja_append(jinja_context *c, jinja_value value, jinja_value item) {
    if (value.kind != JINJA_LIST || !fkv_jinja_charge(c, JINJA_WORK_ITEM)) return;
    jinja_list *list = value.as.list;
    if (list->n_items == list->capacity) {
        jinja_value *items = fkv_jinja_grown(c, list->items, list->n_items, &list->capacity, sizeof *items);
        if (items == NULL) return;
        list->items = items;
    }
    list->items[list->n_items++] = item;
}
