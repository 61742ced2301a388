/* Recall of many facts: plants N facts at random positions in a haystack and asks questions about M of them at the end of the
 * haystack.
 *
 * Answers are teacher-forced: each question is followed by the correct answer, so the text before a question does not depend on
 * the model's earlier answers. The score is the likelihood of the correct answer's tokens. A single fact can be recalled with
 * almost any codec, but recall of a hundred facts differs between codecs.
 */
#include "likelihood.h"
#include "niah.h"

#include "../kit/numbers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct question {
    token_list question; /* all tokens between the previous answer and the answer to this question */
    token_list answer;
} question;

/* A tokenized haystack with its planted facts and questions. */
typedef struct planted {
    fact *facts;           /* [n_facts]; questions are asked about the first n_asked facts */
    token_list *sentences; /* [n_facts] */
    token_list text;       /* haystack with the planted sentences; ends before the first question */
    question *questions;   /* [n_asked] */
} planted;

typedef struct score {
    double nll;
    uint64_t n_answer_tokens;
    uint32_t n_right;
    uint32_t n_asked;
    double seconds;
} score;

/* ---- planting ---- */

/* Draws facts with distinct names, because a question about a repeated name would have two answers. */
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

static int compare_positions(const void *left, const void *right) {
    size_t a = *(const size_t *)left;
    size_t b = *(const size_t *)right;
    return (a > b) - (a < b);
}

/* Inserts the sentences at random positions in the text, in random order. */
static void plant_sentences(const niah *n, uint64_t *random, const token_list *body, planted *p) {
    uint32_t n_facts = n->o->n_facts;
    size_t *positions = kit_alloc(n_facts * sizeof *positions);
    uint32_t *order = kit_alloc(n_facts * sizeof *order);
    for (uint32_t i = 0; i < n_facts; i++) {
        positions[i] = haystack_insertion_point(&n->haystack, body, kit_random(random) % (body->n + 1));
        uint32_t j = (uint32_t)(kit_random(random) % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    qsort(positions, n_facts, sizeof *positions, compare_positions);
    size_t at = 0;
    for (uint32_t i = 0; i < n_facts; i++) {
        token_list_add(&p->text, body->tokens + at, positions[i] - at);
        token_list_add(&p->text, p->sentences[order[i]].tokens, p->sentences[order[i]].n);
        at = positions[i];
    }
    token_list_add(&p->text, body->tokens + at, body->n - at);
    free(positions);
    free(order);
}

/* Builds a haystack. The text, planted sentences, questions and answers have `length` tokens in total. */
static int plant_facts(const niah *n, uint32_t length, uint64_t seed, planted *p) {
    enum { MIN_SENTENCE = 4 }; /* lower bound on the number of tokens per sentence, to reject impossible requests early */
    uint64_t random = seed ^ UINT64_C(0xfac75);
    if (n->o->n_facts >= length / MIN_SENTENCE)
        return kit_fail(EXIT_USAGE, "%u facts do not fit in %u tokens: lower --facts or raise -c", n->o->n_facts, length);
    draw_facts(n, &random, p->facts);
    int code = EXIT_GOOD;
    niah_begin_tokens(n, &p->text);
    size_t used = p->text.n;
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_facts; i++) {
        char sentence[FACT_TEXT];
        fact_sentence(&p->facts[i], sentence);
        code = token_list_add_text(&p->sentences[i], n->model, sentence, strlen(sentence), FKV_TOKENIZE_PLAIN);
        used += p->sentences[i].n;
    }
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_asked; i++) {
        code = make_question(n, i, &p->facts[i], &p->questions[i]);
        used += p->questions[i].question.n + p->questions[i].answer.n;
    }
    if (code != EXIT_GOOD) return code;
    if (used >= length)
        return kit_fail(
            EXIT_USAGE,
            "%u facts and %u questions need %zu tokens, which leaves no room for text in a context of %u tokens: raise -c",
            n->o->n_facts, n->o->n_asked, used, length);
    token_list body = {0};
    haystack_excerpt(&n->haystack, seed, length - used, &body);
    plant_sentences(n, &random, &body, p);
    token_list_free(&body);
    return EXIT_GOOD;
}

static void planted_open(const niah *n, planted *p) {
    p->facts = kit_alloc(n->o->n_facts * sizeof *p->facts);
    p->sentences = kit_alloc(n->o->n_facts * sizeof *p->sentences);
    p->questions = kit_alloc(n->o->n_asked * sizeof *p->questions);
}

static void planted_free(const niah *n, planted *p) {
    for (uint32_t i = 0; i < n->o->n_facts; i++) token_list_free(&p->sentences[i]);
    for (uint32_t i = 0; i < n->o->n_asked; i++) {
        token_list_free(&p->questions[i].question);
        token_list_free(&p->questions[i].answer);
    }
    token_list_free(&p->text);
    free(p->facts);
    free(p->sentences);
    free(p->questions);
}

/* ---- questions ---- */

/* Feeds all tokens of the question except the last one. Then feeds the last token and the answer in one step and computes the
 * likelihood of the answer from the logits. */
static int ask_question(niah *n, const question *q, score *s) {
    uint32_t step[NIAH_LOGIT_ROWS];
    size_t n_step = 1 + q->answer.n;
    if (n_step > NIAH_LOGIT_ROWS || n_step > n->session.chunk)
        return kit_fail(EXIT_USAGE, "the answer has %zu tokens, which do not fit in one step: raise --chunk", q->answer.n);
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
    int code = plant_facts(n, length, n->o->model.seed + 1000003 * (uint64_t)index, &p);
    if (code == EXIT_GOOD) code = session_truncate(&n->session, 0);
    if (code == EXIT_GOOD) code = session_feed(&n->session, p.text.tokens, p.text.n, NULL, progress);
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_asked; i++) code = ask_question(n, &p.questions[i], s);
    planted_free(n, &p);
    return code;
}

int niah_facts_run(niah *n, const codec_choice *codec, kit_json *json) {
    score s = {0};
    uint32_t length = n->lengths[0];
    int code = EXIT_GOOD;
    progress_bar progress = progress_begin("asking", 0, (uint64_t)length * n->n_haystacks);
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
    printf("%-14s %u tokens, %u facts, %u asked: %.3f correct, nll %.5f per token, %.1f s\n", codec_name(codec, name), length,
           n->o->n_facts, s.n_asked, right, nll, s.seconds);
    (void)fflush(stdout);
    return EXIT_GOOD;
}
