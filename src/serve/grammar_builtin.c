/* Constrained decoding without llguidance: the only supported grammar is a single JSON object without a schema. See grammar.h.
 *
 * The vocabulary index (grammar_maker) sorts the tokens by their bytes and stores the length of the prefix that each token shares
 * with its predecessor. A mask is computed in one pass over the sorted tokens, and each shared prefix is validated only once.
 */
#include "grammar.h"
#include "json_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKEN_BYTES = 255, MAX_LEADING_SPACES = 2 };

typedef struct sorted_token {
    const char *bytes; /* bytes of the token, owned by the model */
    uint32_t token;
    uint8_t n_bytes;
    uint8_t n_shared; /* length of the prefix that the token shares with the preceding token */
} sorted_token;

struct grammar_maker {
    const fkv_model *model;
    uint32_t n_vocab;
    uint32_t n_end;
    uint32_t end[FKV_MAX_END_TOKENS];
    uint32_t n_tokens;
    sorted_token tokens[]; /* all tokens that have text, except end tokens */
};

typedef struct answer_state {
    json_text text;
    uint32_t n_consumed; /* number of answer tokens already applied to the state */
    bool thinks;
} answer_state;

struct grammar {
    const grammar_maker *maker;
    grammar_thinking thinking;
    uint32_t n_answers;
    answer_state answers[];
};

void grammar_set_compile_seconds(uint32_t seconds) { (void)seconds; } /* no effect, because the builtin grammar is not compiled */

bool grammar_supports_rules(void) { return false; }

/* ---- vocabulary ---- */

static bool is_end_of_text(const grammar_maker *m, uint32_t token) {
    for (uint32_t i = 0; i < m->n_end; i++)
        if (m->end[i] == token) return true;
    return false;
}

static int compare_tokens(const void *a, const void *b) {
    const sorted_token *x = a;
    const sorted_token *y = b;
    const int order = memcmp(x->bytes, y->bytes, x->n_bytes < y->n_bytes ? x->n_bytes : y->n_bytes);
    return order != 0 ? order : (int)x->n_bytes - (int)y->n_bytes;
}

grammar_maker *grammar_maker_open(const fkv_model *model) {
    const fkv_model_info *about = fkv_model_about(model);
    grammar_maker *m = calloc(1, sizeof *m + about->n_vocab * sizeof m->tokens[0]);
    if (m == NULL) return NULL;
    m->model = model;
    m->n_vocab = about->n_vocab;
    m->n_end = about->n_end;
    memcpy(m->end, about->end, sizeof m->end);
    for (uint32_t i = 0; i < m->n_vocab; i++) {
        size_t n = 0;
        const char *bytes = fkv_token_text(model, i, false, &n);
        if (n == 0 || n > MAX_TOKEN_BYTES || is_end_of_text(m, i)) continue;
        m->tokens[m->n_tokens++] = (sorted_token){.bytes = bytes, .token = i, .n_bytes = (uint8_t)n};
    }
    qsort(m->tokens, m->n_tokens, sizeof m->tokens[0], compare_tokens);
    for (uint32_t i = 1; i < m->n_tokens; i++) {
        const sorted_token *before = &m->tokens[i - 1];
        sorted_token *t = &m->tokens[i];
        while (t->n_shared < t->n_bytes && t->n_shared < before->n_bytes && t->bytes[t->n_shared] == before->bytes[t->n_shared])
            t->n_shared++;
    }
    return m;
}

void grammar_maker_close(grammar_maker *m) { free(m); }

/* ---- grammars ---- */

grammar *grammar_open(const grammar_maker *maker, const char *rules, grammar_thinking thinking, uint32_t n_answers, char *error) {
    grammar *g = rules == NULL ? calloc(1, sizeof *g + n_answers * sizeof g->answers[0]) : NULL;
    if (g == NULL) {
        (void)snprintf(error, GRAMMAR_ERROR_BYTES, "%s",
                       rules == NULL ? "out of memory creating the grammar" : "this build supports only json_object");
        return NULL;
    }
    *g = (grammar){.maker = maker, .thinking = thinking, .n_answers = n_answers};
    const uint8_t n_spaces = thinking.open != FKV_NO_TOKEN ? MAX_LEADING_SPACES : 0;
    for (uint32_t i = 0; i < n_answers; i++)
        g->answers[i] = (answer_state){.text = json_text_begin(n_spaces), .thinks = thinking.opened};
    return g;
}

void grammar_close(grammar *g) { free(g); }

bool grammar_failed(const grammar *g) {
    (void)g;
    return false;
}

/* ---- masks ---- */

static void allow_token(uint32_t *bits, uint32_t token) { bits[token / 32] |= UINT32_C(1) << token % 32; }

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
    size_t n = 0;
    const char *bytes = fkv_token_text(g->maker->model, token, false, &n);
    for (size_t i = 0; i < n; i++)
        if (!json_text_add(&a->text, (unsigned char)bytes[i])) return false;
    return true;
}

static void allow_json(const grammar_maker *m, const json_text *text, uint32_t *bits) {
    json_text states[MAX_TOKEN_BYTES + 1]; /* states[i]: validator state after the first i bytes of the current token */
    size_t n_valid = 0;                    /* number of accepted bytes of the current token */
    states[0] = *text;
    for (uint32_t i = 0; i < m->n_tokens; i++) {
        const sorted_token *t = &m->tokens[i];
        if (n_valid < t->n_shared) continue; /* the shared prefix contains a byte that was already rejected */
        for (n_valid = t->n_shared; n_valid < t->n_bytes; n_valid++) {
            states[n_valid + 1] = states[n_valid];
            if (!json_text_add(&states[n_valid + 1], (unsigned char)t->bytes[n_valid])) break;
        }
        if (n_valid == t->n_bytes) allow_token(bits, t->token);
    }
}

const char *grammar_mask(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                         uint32_t n_vocab) {
    const grammar *g = user;
    const grammar_maker *m = g->maker;
    answer_state *a = &((grammar *)user)->answers[answer];
    while (a->n_consumed < n_tokens)
        if (!consume_token(g, a, tokens[a->n_consumed])) return "the answer is not a JSON object";
    if (a->thinks) {
        memset(bits, 0xff, ((size_t)n_vocab + 31) / 32 * sizeof *bits);
        for (uint32_t i = 0; i < m->n_end; i++) bits[m->end[i] / 32] &= ~(UINT32_C(1) << m->end[i] % 32);
        return NULL;
    }
    if (json_text_complete(&a->text)) {
        for (uint32_t i = 0; i < m->n_end; i++) allow_token(bits, m->end[i]);
        return NULL;
    }
    allow_json(m, &a->text, bits);
    if (n_tokens == 0 && g->thinking.open != FKV_NO_TOKEN) allow_token(bits, g->thinking.open);
    return NULL;
}
