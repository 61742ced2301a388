/* Constrained decoding through the C API of llguidance. See grammar.h. */
#include "grammar.h"

#include <llguidance.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* These limits are stricter than the defaults of llguidance, because grammars come from untrusted clients. The times in the
 * following comments are estimates from the documentation of llguidance.
 */
static const LlgParserLimits LIMITS = {.max_items_in_row = 2000,
                                       .initial_lexer_fuel = 500000, /* 10 ms */
                                       .step_lexer_fuel = 200000,    /* limits the time per mask to about 14 ms */
                                       .step_max_items = 50000,      /* 3 ms */
                                       .max_lexer_states = 10000,    /* each state takes about 2 KB */
                                       .max_grammar_size = 30000};

enum {
    STACK_BYTES = 128 << 20,
    MAX_ABANDONED = 2 /* new compilations are rejected while this many abandoned compilations are still running */
};

struct grammar_maker {
    LlgTokenizer *tokenizer;
    uint32_t n_vocab;
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
};

typedef struct answer_state {
    LlgMatcher *matcher;
    uint32_t n_consumed; /* number of answer tokens already applied to the state */
    bool thinks;
} answer_state;

struct grammar {
    const grammar_maker *maker;
    grammar_thinking thinking;
    bool failed;
    uint32_t n_answers;
    answer_state answers[];
};

/* ---- vocabulary ---- */

static bool is_end_of_text(const grammar_maker *m, uint32_t token) {
    for (uint32_t i = 0; i < m->n_end; i++)
        if (m->end[i] == token) return true;
    return false;
}

/* Writes the bytes of a token to `out`, unless `out` is NULL, and returns their number. In llguidance format, a special token
 * starts with the byte 0xff. */
static size_t llg_token_bytes(const grammar_maker *m, const fkv_model *model, uint32_t token, uint8_t *out) {
    size_t n = 0;
    const char *text = fkv_token_text(model, token, false, &n);
    bool special = n == 0 || is_end_of_text(m, token);
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
        lengths[i] = (uint32_t)llg_token_bytes(m, model, i, NULL);
        total += lengths[i];
    }
    uint8_t *bytes = malloc(total + 1);
    LlgTokenizer *made = NULL;
    if (lengths != NULL && bytes != NULL && total <= UINT32_MAX) {
        char error[256];
        uint8_t *to = bytes;
        for (uint32_t i = 0; i < m->n_vocab; i++) to += llg_token_bytes(m, model, i, to);
        LlgTokenizerInitV2 init = {.struct_size = sizeof init,
                                   .vocab_size = m->n_vocab,
                                   .tok_eos = m->n_end > 0 ? m->end[0] : (uint32_t)FKV_NO_TOKEN,
                                   .token_lens = lengths,
                                   .token_bytes = bytes,
                                   .use_approximate_greedy_tokenize_fn =
                                       true, /* exact tokenization is needed only by llguidance features that are not used here */
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

/* Returns the length of the error text without the grammar listing ("\n   1 | start: ...") at its end, because the client did not
 * write this grammar. */
static size_t before_rules(const char *text) {
    for (size_t i = 0; text[i] != 0; i++) {
        if (text[i] != '\n') continue;
        size_t number = i + 1 + strspn(text + i + 1, " ");
        size_t bar = number + strspn(text + number, "0123456789");
        if (bar > number && strncmp(text + bar, " | ", 3) == 0) return i;
    }
    return strlen(text);
}

/* Copies the error message of the matcher as a single line. */
static void copy_error(LlgMatcher *matcher, char *error) {
    static const char before[] = "failed to compile JSON schema: ";
    const char *why = llg_matcher_get_error(matcher);
    const char *of_schema = why != NULL ? strstr(why, before) : NULL;
    if (of_schema != NULL) why = of_schema + sizeof before - 1;
    if (why == NULL || strncmp(why, "NoExtension", 11) == 0) why = "no text matches it";
    (void)snprintf(error, GRAMMAR_ERROR_BYTES, "%.*s", (int)before_rules(why), why);
    for (char *c = error; *c != 0; c++)
        if (*c == '\n') *c = ' ';
}

static bool within_bounds(const char *rules, char *error) {
    int n_refs = 0;
    for (const char *at = rules; (at = strstr(at, "\"$ref\"")) != NULL; at++) n_refs++;
    if (strlen(rules) > GRAMMAR_MAX_BYTES)
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "the schemas have %zu bytes: at most %d are allowed", strlen(rules),
                       GRAMMAR_MAX_BYTES);
    else if (n_refs > GRAMMAR_MAX_REFS)
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "the schemas have %d references: at most %d are allowed", n_refs,
                       GRAMMAR_MAX_REFS);
    else
        return true;
    return false;
}

/* Compilation on a separate thread. The compiling thread and the waiting caller share the job, and the last of the two to finish
 * frees it. */
typedef struct compile_job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool finished;
    bool abandoned; /* true after the caller has stopped waiting */
    LlgTokenizer *tokenizer;
    char *rules;
    LlgMatcher *matcher;
} compile_job;

static _Atomic uint32_t compile_seconds = GRAMMAR_COMPILE_SECONDS;

void grammar_set_compile_seconds(uint32_t seconds) { atomic_store(&compile_seconds, seconds); }

static _Atomic uint32_t n_abandoned; /* number of threads that are still compiling an abandoned grammar */

static void free_compile_job(compile_job *job) {
    if (job == NULL) return;
    if (job->matcher != NULL) llg_free_matcher(job->matcher);
    if (job->tokenizer != NULL) llg_free_tokenizer(job->tokenizer);
    (void)pthread_cond_destroy(&job->changed);
    (void)pthread_mutex_destroy(&job->lock);
    free(job->rules);
    free(job);
}

static compile_job *make_compile_job(const grammar_maker *maker, const char *rules) {
    compile_job *job = calloc(1, sizeof *job);
    if (job == NULL) return NULL;
    pthread_condattr_t monotonic;
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&job->changed, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
    (void)pthread_mutex_init(&job->lock, NULL);
    job->tokenizer = llg_clone_tokenizer(maker->tokenizer); /* cloned, because the compilation may outlive the maker */
    job->rules = strdup(rules);
    if (job->tokenizer != NULL && job->rules != NULL) return job;
    free_compile_job(job);
    return NULL;
}

static void *compile_grammar(void *user) {
    compile_job *job = user;
    LlgConstraintInit init;
    llg_constraint_init_set_defaults(&init, job->tokenizer);
    init.log_stderr_level = 0; /* client input must not be logged */
    init.limits = LIMITS;
    job->matcher = llg_new_matcher(&init, "lark", job->rules);
    if (!llg_matcher_is_error(job->matcher))
        (void)!llg_matcher_compute_mask(job->matcher); /* detects grammars that compile but fail at the first mask */
    (void)pthread_mutex_lock(&job->lock);
    job->finished = true;
    const bool abandoned = job->abandoned;
    (void)pthread_cond_signal(&job->changed);
    (void)pthread_mutex_unlock(&job->lock);
    if (abandoned) {
        free_compile_job(job);
        atomic_fetch_sub(&n_abandoned, 1);
    }
    return NULL;
}

static bool is_past(struct timespec end) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec >= end.tv_nsec);
}

/* Waits for the compilation. Returns true if it finished within the time limit; the caller then frees the job. Returns false
 * otherwise; the job is then freed by this function if it has finished, or else by the compiling thread. */
static bool wait_for_compilation(compile_job *job, pthread_t thread, uint32_t seconds) {
    struct timespec end;
    (void)clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += seconds;
    (void)pthread_mutex_lock(&job->lock);
    while (!job->finished && pthread_cond_timedwait(&job->changed, &job->lock, &end) == 0) {
    }
    const bool finished = job->finished;
    job->abandoned = !finished;
    if (!finished) atomic_fetch_add(&n_abandoned, 1);
    (void)pthread_mutex_unlock(&job->lock);
    if (!finished) {
        (void)pthread_detach(thread);
        return false;
    }
    (void)pthread_join(thread, NULL);
    if (!is_past(end)) return true;
    free_compile_job(job);
    return false;
}

/* Compiles the rules on a thread with a large stack, because the library resolves references recursively without a depth limit.
 * The stack is large enough for the deepest recursion within the size limits. The library cannot be interrupted, so a
 * compilation that takes too long continues on its thread and its result is discarded. On failure, returns NULL and writes a
 * message to error: [GRAMMAR_ERROR_BYTES]. */
static LlgMatcher *compile_on_large_stack(const grammar_maker *maker, const char *rules, char *error) {
    pthread_attr_t attributes;
    pthread_t thread;
    LlgMatcher *matcher = NULL;
    if (atomic_load(&n_abandoned) >= MAX_ABANDONED) {
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "the server is still compiling earlier schemas: retry later");
        return NULL;
    }
    (void)snprintf(error, GRAMMAR_ERROR_BYTES, "out of memory compiling the grammar");
    compile_job *job = make_compile_job(maker, rules);
    if (job == NULL || pthread_attr_init(&attributes) != 0) {
        free_compile_job(job);
        return NULL;
    }
    const bool started = pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0 &&
                         pthread_create(&thread, &attributes, compile_grammar, job) == 0;
    (void)pthread_attr_destroy(&attributes);
    const uint32_t seconds = atomic_load(&compile_seconds);
    if (started && !wait_for_compilation(job, thread, seconds)) {
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "compiling the schema takes longer than %u s: simplify it", seconds);
        return NULL;
    }
    if (started) {
        matcher = job->matcher;
        job->matcher = NULL;
    }
    free_compile_job(job);
    return matcher;
}

bool grammar_supports_rules(void) { return true; }

grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error) {
    if (rules == NULL) rules = "start: %json {\"type\":\"object\",\"x-guidance\":{\"whitespace_flexible\":false}}\n";
    if (!within_bounds(rules, error)) return NULL;
    grammar *g = calloc(1, sizeof *g + n_answers * sizeof *g->answers);
    (void)snprintf(error, GRAMMAR_ERROR_BYTES, "out of memory compiling the grammar");
    LlgMatcher *first = g != NULL ? compile_on_large_stack(maker, rules, error) : NULL;
    if (first == NULL || llg_matcher_is_error(first)) {
        if (first != NULL) copy_error(first, error);
        if (first != NULL) llg_free_matcher(first);
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

/* Updates the grammar state of an answer with a generated token. Returns false if the grammar does not allow the token. */
static bool consume_token(const grammar *g, answer_state *a, uint32_t token) {
    bool first = a->n_consumed++ == 0;
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

static void allow_token(uint32_t *bits, uint32_t token) { bits[token / 32] |= UINT32_C(1) << token % 32; }

const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab) {
    grammar *g = user;
    answer_state *a = &g->answers[answer];
    size_t n_bytes = ((size_t)n_vocab + 31) / 32 * sizeof *bits;
    bool good = true;
    while (good && a->n_consumed < n_tokens) good = consume_token(g, a, tokens[a->n_consumed]);
    if (good && a->thinks) {
        memset(bits, 0xff, n_bytes);
        for (uint32_t i = 0; i < g->maker->n_end; i++) bits[g->maker->end[i] / 32] &= ~(UINT32_C(1) << g->maker->end[i] % 32);
        return NULL;
    }
    if (good && g->maker->n_end == 0 && llg_matcher_is_stopped(a->matcher)) return NULL; /* the constrained text is complete */
    good = good && llg_matcher_compute_mask_into(a->matcher, bits, n_bytes) == 0;
    if (good && n_tokens == 0 && g->thinking.open != FKV_NO_TOKEN) allow_token(bits, g->thinking.open);
    if (good) return NULL;
    g->failed = true;
    return "computing the next token mask exceeded the work limit: simplify the schema";
}
