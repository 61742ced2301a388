/* Grammars by llguidance, through its C header. See grammar.h. */
#include "grammar.h"

#include <llguidance.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's defaults are for hosts that trust their callers. Rates are its own figures. */
static const LlgParserLimits LIMITS = {.max_items_in_row = 2000,
                                       .initial_lexer_fuel = 500000, /* 10 ms */
                                       .step_lexer_fuel = 200000,    /* 14 ms for a mask, at the very most */
                                       .step_max_items = 50000,      /* 3 ms */
                                       .max_lexer_states = 10000,    /* 2 KB each */
                                       .max_grammar_size = 30000};

enum { STACK_BYTES = 128 << 20 };

struct grammar_maker {
    LlgTokenizer *tokenizer;
    uint32_t n_vocab;
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
};

typedef struct answer_state {
    LlgMatcher *matcher;
    uint32_t n_seen; /* tokens */
    bool thinks;
} answer_state;

struct grammar {
    const grammar_maker *maker;
    grammar_thinking thinking;
    bool failed;
    uint32_t n_answers;
    answer_state answers[];
};

/* ---- the vocabulary ---- */

static bool is_end(const grammar_maker *m, uint32_t token) {
    for (uint32_t i = 0; i < m->n_end; i++)
        if (m->end[i] == token) return true;
    return false;
}

/* The bytes of a token as llguidance takes them: behind a byte that no text has where it is a special one. Into out unless NULL.
 */
static size_t token_bytes(const grammar_maker *m, const fkv_model *model, uint32_t token, uint8_t *out) {
    size_t n = 0;
    const char *text = fkv_token_text(model, token, false, &n);
    bool special = n == 0 || is_end(m, token);
    if (special) text = fkv_token_text(model, token, true, &n);
    if (n == 0) return 0;
    if (out != NULL) {
        if (special) *out++ = 0xff;
        memcpy(out, text, n);
    }
    return n + special;
}

static LlgTokenizer *make_tokenizer(const grammar_maker *m, const fkv_model *model) {
    uint32_t *lengths = malloc((size_t)m->n_vocab * sizeof *lengths);
    size_t total = 0;
    for (uint32_t i = 0; i < m->n_vocab && lengths != NULL; i++) {
        lengths[i] = (uint32_t)token_bytes(m, model, i, NULL);
        total += lengths[i];
    }
    uint8_t *bytes = malloc(total + 1);
    LlgTokenizer *made = NULL;
    if (lengths != NULL && bytes != NULL && total <= UINT32_MAX) {
        char error[256];
        uint8_t *to = bytes;
        for (uint32_t i = 0; i < m->n_vocab; i++) to += token_bytes(m, model, i, to);
        LlgTokenizerInitV2 init = {.struct_size = sizeof init,
                                   .vocab_size = m->n_vocab,
                                   .tok_eos = m->n_end > 0 ? m->end[0] : (uint32_t)FKV_NO_TOKEN,
                                   .token_lens = lengths,
                                   .token_bytes = bytes,
                                   .use_approximate_greedy_tokenize_fn = true, /* for what is not asked of it here */
                                   .tok_eos_extra = m->end + 1,
                                   .tok_eos_extra_count = m->n_end > 1 ? m->n_end - 1 : 0};
        made = llg_new_tokenizer_v2(&init, error, sizeof error);
    }
    free(lengths);
    free(bytes);
    return made;
}

grammar_maker *grammar_maker_open(const fkv_model *model) {
    const fkv_model_info *about = fkv_model_about(model);
    grammar_maker *m = calloc(1, sizeof *m);
    if (m == NULL) return NULL;
    m->n_vocab = about->n_vocab;
    m->n_end = about->n_end;
    memcpy(m->end, about->end, sizeof m->end);
    m->tokenizer = make_tokenizer(m, model);
    if (m->tokenizer != NULL) return m;
    free(m);
    return NULL;
}

void grammar_maker_close(grammar_maker *m) {
    if (m == NULL) return;
    llg_free_tokenizer(m->tokenizer);
    free(m);
}

/* ---- grammars ---- */

/* Where the library begins to show the rules, which the client did not write: "\n   1 | start: ...". Else the end. */
static size_t before_rules(const char *text) {
    for (size_t i = 0; text[i] != 0; i++) {
        if (text[i] != '\n') continue;
        size_t number = i + 1 + strspn(text + i + 1, " ");
        size_t bar = number + strspn(text + number, "0123456789");
        if (bar > number && strncmp(text + bar, " | ", 3) == 0) return i;
    }
    return strlen(text);
}

/* In one line. */
static void take_error(LlgMatcher *matcher, char *error) {
    static const char before[] = "failed to compile JSON schema: ";
    const char *why = llg_matcher_get_error(matcher);
    const char *of_schema = why != NULL ? strstr(why, before) : NULL;
    if (of_schema != NULL) why = of_schema + sizeof before - 1;
    if (why == NULL || strncmp(why, "NoExtension", 11) == 0) why = "no answer can satisfy it";
    (void)snprintf(error, GRAMMAR_ERROR_BYTES, "%.*s", (int)before_rules(why), why);
    for (char *c = error; *c != 0; c++)
        if (*c == '\n') *c = ' ';
}

static bool within_bounds(const char *rules, char *error) {
    int n_refs = 0;
    for (const char *at = rules; (at = strstr(at, "\"$ref\"")) != NULL; at++) n_refs++;
    if (strlen(rules) > GRAMMAR_MAX_BYTES)
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "%zu bytes of schemas: at most %d", strlen(rules), GRAMMAR_MAX_BYTES);
    else if (n_refs > GRAMMAR_MAX_REFS)
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "%d references in schemas: at most %d", n_refs, GRAMMAR_MAX_REFS);
    else
        return true;
    return false;
}

typedef struct compile_job {
    const grammar_maker *maker;
    const char *rules;
    LlgMatcher *matcher;
} compile_job;

static void *compile(void *user) {
    compile_job *job = user;
    LlgConstraintInit init;
    llg_constraint_init_set_defaults(&init, job->maker->tokenizer);
    init.log_stderr_level = 0; /* nothing that a client sent reaches a log */
    init.limits = LIMITS;
    job->matcher = llg_new_matcher(&init, "lark", job->rules);
    if (!llg_matcher_is_error(job->matcher)) (void)!llg_matcher_compute_mask(job->matcher); /* the first may fail too */
    return NULL;
}

/* The library follows references by recursion and counts no levels: on a stack that holds as many as fit into the bounds. */
static LlgMatcher *compile_on_a_large_stack(const grammar_maker *maker, const char *rules) {
    compile_job job = {.maker = maker, .rules = rules};
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) return NULL;
    bool started =
        pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0 && pthread_create(&thread, &attributes, compile, &job) == 0;
    if (started) (void)pthread_join(thread, NULL);
    (void)pthread_attr_destroy(&attributes);
    return job.matcher;
}

grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error) {
    if (!within_bounds(rules, error)) return NULL;
    grammar *g = calloc(1, sizeof *g + n_answers * sizeof *g->answers);
    LlgMatcher *first = g != NULL ? compile_on_a_large_stack(maker, rules) : NULL;
    if (first == NULL || llg_matcher_is_error(first)) {
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "there is no memory for its grammar");
        if (first != NULL) take_error(first, error);
        llg_free_matcher(first);
        free(g);
        return NULL;
    }
    *g = (grammar){.maker = maker, .thinking = thinking, .n_answers = n_answers};
    for (uint32_t i = 0; i < n_answers; i++)
        g->answers[i] = (answer_state){.matcher = i == 0 ? first : llg_clone_matcher(first), .thinks = thinking.opened};
    return g;
}

void grammar_close(grammar *g) {
    if (g == NULL) return;
    for (uint32_t i = 0; i < g->n_answers; i++) llg_free_matcher(g->answers[i].matcher);
    free(g);
}

bool grammar_failed(const grammar *g) { return g != NULL && g->failed; }

/* ---- masks ---- */

/* A token that was written. */
static bool take_token(const grammar *g, answer_state *a, uint32_t token) {
    bool first = a->n_seen++ == 0;
    if (a->thinks) {
        a->thinks = token != g->thinking.close;
        return true;
    }
    if (first && token == g->thinking.open) {
        a->thinks = true;
        return true;
    }
    return llg_matcher_consume_token(a->matcher, token) == 0;
}

static void allow(uint32_t *bits, uint32_t token) { bits[token / 32] |= UINT32_C(1) << token % 32; }

const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab) {
    grammar *g = user;
    answer_state *a = &g->answers[answer];
    size_t n_bytes = ((size_t)n_vocab + 31) / 32 * sizeof *bits;
    bool good = true;
    while (good && a->n_seen < n_tokens) good = take_token(g, a, tokens[a->n_seen]);
    if (good && a->thinks) {
        memset(bits, 0xff, n_bytes);
        for (uint32_t i = 0; i < g->maker->n_end; i++) bits[g->maker->end[i] / 32] &= ~(UINT32_C(1) << g->maker->end[i] % 32);
        return NULL;
    }
    if (good && g->maker->n_end == 0 && llg_matcher_is_stopped(a->matcher)) return NULL; /* nothing may come */
    good = good && llg_matcher_compute_mask_into(a->matcher, bits, n_bytes) == 0;
    if (good && n_tokens == 0 && g->thinking.open != FKV_NO_TOKEN) allow(bits, g->thinking.open);
    if (good) return NULL;
    g->failed = true;
    return "the grammar of the answer asks for more work than a step has room for";
}
