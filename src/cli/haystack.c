/* See haystack.h. */
#include "haystack.h"

#include "../kit/numbers.h"
#include "cli.h"
#include "model_names.h"

#include <stdlib.h>
#include <string.h>

/* ---- book ---- */

/* ASCII replacements for the non-ASCII characters that are common in books; all other non-ASCII characters are dropped. */
static const struct {
    const char *from;
    const char *to;
} ascii_replacements[] = {{"\r\n", "\n"},        {"\xe2\x80\x9c", "\""}, {"\xe2\x80\x9d", "\""},
                          {"\xe2\x80\x98", "'"}, {"\xe2\x80\x99", "'"},  {"\xe2\x80\x94", "--"}};

static void convert_to_ascii(const text_buffer *in, text_buffer *out) {
    for (size_t i = 0; i < in->n;) {
        size_t used = 0;
        for (size_t p = 0; p < sizeof ascii_replacements / sizeof ascii_replacements[0] && used == 0; p++) {
            size_t n = strlen(ascii_replacements[p].from);
            if (in->n - i < n || memcmp(in->bytes + i, ascii_replacements[p].from, n) != 0) continue;
            text_add(out, ascii_replacements[p].to, strlen(ascii_replacements[p].to));
            used = n;
        }
        if (used == 0 && (unsigned char)in->bytes[i] < 0x80) text_add(out, in->bytes + i, 1);
        i += used > 0 ? used : 1;
    }
}

/* Joins the lines of each paragraph: single newlines become spaces, runs of spaces are collapsed, and paragraphs are separated by
 * two newlines. */
static void join_lines(const text_buffer *in, text_buffer *out) {
    for (size_t i = 0; i < in->n;) {
        size_t lines = strspn(in->bytes + i, "\n");
        if (lines >= 2) {
            text_add(out, "\n\n", 2);
            i += lines;
            continue;
        }
        size_t blanks = strspn(in->bytes + i, " \t");
        char c = in->bytes[i];
        if (lines == 1 || blanks > 0) {
            if (out->n == 0 || out->bytes[out->n - 1] != ' ') text_add(out, " ", 1);
            i += lines + blanks;
        } else {
            text_add(out, &c, 1);
            i++;
        }
    }
}

static int read_book(haystack *h, const char *file) {
    char path[MODEL_PATH];
    if (file == NULL) {
        int code = model_needle_file("book.txt", path);
        if (code != EXIT_GOOD) return code;
        file = path;
    }
    text_buffer raw = {0};
    text_buffer ascii = {0};
    text_buffer clean = {0};
    int code = text_read(&raw, file);
    text_buffer *used = &raw;
    if (code == EXIT_GOOD && strcmp(fkv_model_about(h->model)->tokenizer, "byte") == 0) {
        convert_to_ascii(&raw, &ascii);
        join_lines(&ascii, &clean);
        used = &clean;
    }
    if (code == EXIT_GOOD) code = token_list_add_text(&h->book, h->model, used->bytes, used->n, FKV_TOKENIZE_PLAIN);
    if (code == EXIT_GOOD && h->book.n == 0) code = kit_fail(EXIT_FAILED, "%s is empty: expected a text file", file);
    text_free(&raw);
    text_free(&ascii);
    text_free(&clean);
    return code;
}

static bool is_word_list(const json_t *list) {
    size_t i;
    const json_t *word;
    if (json_array_size(list) == 0) return false;
    json_array_foreach(list, i, word) if (!json_is_string(word) || json_string_length(word) >= FACT_WORD / 4 * 3) return false;
    return true;
}

static int read_lexicon(haystack *h) {
    char path[MODEL_PATH];
    int code = model_needle_file("lexicon.json", path);
    if (code != EXIT_GOOD) return code;
    json_error_t error;
    h->lexicon = json_load_file(path, 0, &error);
    if (h->lexicon == NULL) return kit_fail(EXIT_FAILED, "%s: line %d: %s", path, error.line, error.text);
    if (!is_word_list(json_object_get(h->lexicon, "kind")) || !is_word_list(json_object_get(h->lexicon, "syllable")))
        return kit_fail(EXIT_FAILED, "%s: \"kind\" and \"syllable\" must be non-empty lists of words shorter than %d characters",
                        path, FACT_WORD / 4 * 3);
    return EXIT_GOOD;
}

int haystack_open(haystack *h, const fkv_model *model, const char *file) {
    *h = (haystack){.model = model};
    int code = read_book(h, file);
    return code == EXIT_GOOD ? read_lexicon(h) : code;
}

void haystack_close(haystack *h) {
    token_list_free(&h->book);
    json_decref(h->lexicon);
    h->lexicon = NULL;
}

void haystack_excerpt(const haystack *h, uint64_t seed, size_t n, token_list *out) {
    uint64_t random = seed;
    size_t room = h->book.n > n ? h->book.n - n : 0;
    size_t at = room > 0 ? kit_random(&random) % room : 0;
    while (n > 0) {
        size_t part = h->book.n - at < n ? h->book.n - at : n;
        token_list_add(out, h->book.tokens + at, part);
        n -= part;
        at = 0;
    }
}

/* ---- facts ---- */

static const char *draw_word(const haystack *h, const char *list, uint64_t *random) {
    const json_t *words = json_object_get(h->lexicon, list);
    return json_string_value(json_array_get(words, kit_random(random) % json_array_size(words)));
}

void haystack_draw_fact(const haystack *h, uint64_t *random, fact *out) {
    snprintf(out->kind, sizeof out->kind, "%s", draw_word(h, "kind", random));
    unsigned syllables = 2 + (unsigned)(kit_random(random) % 3);
    out->name[0] = 0;
    for (unsigned i = 0; i < syllables; i++) {
        size_t used = strlen(out->name);
        snprintf(out->name + used, sizeof out->name - used, "%s", draw_word(h, "syllable", random));
    }
    if (out->name[0] >= 'a' && out->name[0] <= 'z') out->name[0] = (char)(out->name[0] - 'a' + 'A');
    for (int i = 0; i < FACT_DIGITS; i++) out->number[i] = (char)('0' + kit_random(random) % 10);
    out->number[FACT_DIGITS] = 0;
}

static bool ends_sentence(const fkv_model *model, uint32_t token) {
    size_t n = 0;
    const char *bytes = fkv_token_text(model, token, false, &n);
    return n > 0 && (bytes[n - 1] == '.' || bytes[n - 1] == '\n');
}

size_t haystack_insertion_point(const haystack *h, const token_list *body, size_t at) {
    if (strcmp(fkv_model_about(h->model)->tokenizer, "byte") == 0) return at;
    size_t end = at;
    while (end > 0 && !ends_sentence(h->model, body->tokens[end - 1])) end--;
    return end;
}

void fact_sentence(const fact *f, char text[FACT_TEXT]) {
    snprintf(text, FACT_TEXT, " The %s of %s is %s. ", f->kind, f->name, f->number);
}

void fact_question(const fact *f, bool chat, char text[FACT_TEXT]) {
    if (chat)
        snprintf(text, FACT_TEXT, "\n\nWhat is the %s of %s? Answer with the number alone.", f->kind, f->name);
    else
        snprintf(text, FACT_TEXT, "\nQuestion: What is the %s of %s?\nAnswer: The %s of %s is ", f->kind, f->name, f->kind,
                 f->name);
}
