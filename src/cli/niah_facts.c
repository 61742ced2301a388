/* Many facts at once: N are planted at random places of a haystack, M of them are asked one after another at its end. Answers are
 * given, not drawn (teacher forced), so that every question is asked over the same text whatever was answered before; what
 * counts is how likely each token of the right answer was. One fact is found with almost any codec; a hundred rank them.
 */
#include "likelihood.h"
#include "niah.h"

#include "../kit/numbers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct question {
    token_list question; /* what stands between the answer before and this one */
    token_list answer;
} question;

/* Everything of one haystack, as tokens. */
typedef struct planted {
    fact *facts;         /* [n_facts]; the first n_asked are asked */
    token_list *places;  /* [n_facts] their sentences */
    token_list text;     /* up to the first question */
    question *questions; /* [n_asked] */
} planted;

typedef struct score {
    double nll;
    uint64_t n_answer_tokens;
    uint32_t n_right;
    uint32_t n_asked;
    double seconds;
} score;

/* ---- planting ---- */

/* Facts with names of their own: two of one name would be one question with two answers. */
static void draw_facts(const niah *n, uint64_t *random, fact *facts) {
    for (uint32_t i = 0; i < n->o->n_facts;) {
        bool taken = false;
        haystack_draw_fact(&n->haystack, random, &facts[i]);
        for (uint32_t j = 0; j < i && !taken; j++) taken = strcmp(facts[j].name, facts[i].name) == 0;
        i += !taken;
    }
}

static int make_question(const niah *n, uint32_t i, const fact *f, question *q) {
    int code = EXIT_GOOD;
    if (i > 0) code = niah_next_tokens(n, &q->question);
    if (code == EXIT_GOOD) code = niah_add_question(n, f, &q->question);
    if (code == EXIT_GOOD) code = token_list_add_text(&q->answer, n->model, f->number, strlen(f->number), FKV_TOKENIZE_PLAIN);
    return code;
}

static int by_size(const void *left, const void *right) {
    size_t a = *(const size_t *)left;
    size_t b = *(const size_t *)right;
    return (a > b) - (a < b);
}

/* The body with the sentences between its tokens, at sorted random places, each fact at a place of its own draw. */
static void plant_sentences(const niah *n, uint64_t *random, const token_list *body, planted *p) {
    uint32_t n_facts = n->o->n_facts;
    size_t *places = kit_take(n_facts * sizeof *places);
    uint32_t *order = kit_take(n_facts * sizeof *order);
    for (uint32_t i = 0; i < n_facts; i++) {
        places[i] = haystack_place(&n->haystack, body, kit_random(random) % (body->n + 1));
        uint32_t j = (uint32_t)(kit_random(random) % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    qsort(places, n_facts, sizeof *places, by_size);
    size_t at = 0;
    for (uint32_t i = 0; i < n_facts; i++) {
        token_list_add(&p->text, body->tokens + at, places[i] - at);
        token_list_add(&p->text, p->places[order[i]].tokens, p->places[order[i]].n);
        at = places[i];
    }
    token_list_add(&p->text, body->tokens + at, body->n - at);
    free(places);
    free(order);
}

/* Text, sentences and questions together are `length` tokens. */
static int plant(const niah *n, uint32_t length, uint64_t seed, planted *p) {
    enum { LEAST_SENTENCE = 4 }; /* tokens, with any tokenizer: what cannot fit is refused before anything is drawn */
    uint64_t random = seed ^ UINT64_C(0xfac75);
    if (n->o->n_facts >= length / LEAST_SENTENCE)
        return kit_fail(EXIT_USAGE, "%u facts do not fit %u tokens: plant fewer, or raise -c", n->o->n_facts, length);
    draw_facts(n, &random, p->facts);
    int code = EXIT_GOOD;
    niah_begin_tokens(n, &p->text);
    size_t used = p->text.n;
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_facts; i++) {
        char sentence[FACT_TEXT];
        fact_sentence(&p->facts[i], sentence);
        code = token_list_add_text(&p->places[i], n->model, sentence, strlen(sentence), FKV_TOKENIZE_PLAIN);
        used += p->places[i].n;
    }
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_asked; i++) {
        code = make_question(n, i, &p->facts[i], &p->questions[i]);
        used += p->questions[i].question.n + p->questions[i].answer.n;
    }
    if (code != EXIT_GOOD) return code;
    if (used >= length)
        return kit_fail(EXIT_USAGE, "%u facts and %u questions need %zu tokens and leave no room for text in -c %u: raise it",
                        n->o->n_facts, n->o->n_asked, used, length);
    token_list body = {0};
    haystack_cut(&n->haystack, seed, length - used, &body);
    plant_sentences(n, &random, &body, p);
    token_list_free(&body);
    return EXIT_GOOD;
}

static void planted_open(const niah *n, planted *p) {
    p->facts = kit_take(n->o->n_facts * sizeof *p->facts);
    p->places = kit_take(n->o->n_facts * sizeof *p->places);
    p->questions = kit_take(n->o->n_asked * sizeof *p->questions);
}

static void planted_free(const niah *n, planted *p) {
    for (uint32_t i = 0; i < n->o->n_facts; i++) token_list_free(&p->places[i]);
    for (uint32_t i = 0; i < n->o->n_asked; i++) {
        token_list_free(&p->questions[i].question);
        token_list_free(&p->questions[i].answer);
    }
    token_list_free(&p->text);
    free(p->facts);
    free(p->places);
    free(p->questions);
}

/* ---- asking ---- */

/* The question but for its last token, then that one and the answer in a step whose logits say how likely the answer was. */
static int ask(niah *n, const question *q, score *s) {
    uint32_t step[NIAH_LOGIT_ROWS];
    size_t n_step = 1 + q->answer.n;
    if (n_step > NIAH_LOGIT_ROWS || n_step > n->session.chunk)
        return kit_fail(EXIT_USAGE, "an answer of %zu tokens does not fit one step: raise --chunk", q->answer.n);
    step[0] = q->question.tokens[q->question.n - 1];
    memcpy(step + 1, q->answer.tokens, q->answer.n * sizeof *step);
    const float *logits = NULL;
    int code = session_feed(&n->session, q->question.tokens, q->question.n - 1, NULL, NULL);
    if (code == EXIT_GOOD) code = session_feed_all(&n->session, step, (uint32_t)n_step, &logits);
    if (code != EXIT_GOOD) return code;
    bool right = true;
    for (size_t i = 0; i < q->answer.n; i++) {
        const float *row = logits + i * n->about->n_vocab;
        likelihood here = likelihood_of(row, n->about->n_vocab, NULL);
        s->nll += likelihood_nll(&here, row, q->answer.tokens[i]);
        right = right && here.top == q->answer.tokens[i];
    }
    s->n_answer_tokens += q->answer.n;
    s->n_right += right;
    s->n_asked++;
    return EXIT_GOOD;
}

static int run_haystack(niah *n, uint32_t length, uint32_t index, progress_bar *progress, score *s) {
    planted p = {0};
    planted_open(n, &p);
    int code = plant(n, length, n->o->model.seed + 1000003 * (uint64_t)index, &p);
    if (code == EXIT_GOOD) code = session_truncate(&n->session, 0);
    if (code == EXIT_GOOD) code = session_feed(&n->session, p.text.tokens, p.text.n, NULL, progress);
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_asked; i++) code = ask(n, &p.questions[i], s);
    planted_free(n, &p);
    return code;
}

int niah_facts_run(niah *n, const codec_choice *codec, kit_json *json) {
    score s = {0};
    uint32_t length = n->lengths[0];
    int code = EXIT_GOOD;
    progress_bar progress = progress_begin("asking", (uint64_t)length * n->n_haystacks);
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->n_haystacks; i++) code = run_haystack(n, length, i, &progress, &s);
    progress_end(&progress);
    if (code != EXIT_GOOD) return code;
    s.seconds = kit_seconds() - progress.start;
    double right = (double)s.n_right / s.n_asked;
    double nll = s.nll / (double)s.n_answer_tokens;
    kit_json_integer(json, "length", length);
    kit_json_integer(json, "facts", n->o->n_facts);
    kit_json_integer(json, "asked", s.n_asked);
    kit_json_integer(json, "haystacks", n->n_haystacks);
    kit_json_real(json, "right", right);
    kit_json_real(json, "nll", nll);
    kit_json_real(json, "seconds", s.seconds);
    if (n->o->model.json) return EXIT_GOOD;
    char name[CODEC_NAME];
    printf("%-14s %u tokens, %u facts, %u asked: %.3f right, nll %.5f a token, %.1f s\n", codec_name(codec, name), length,
           n->o->n_facts, s.n_asked, right, nll, s.seconds);
    (void)fflush(stdout);
    return EXIT_GOOD;
}
