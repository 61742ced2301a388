/* Grid of flatkv niah: recall of one fact for each depth and context length.
 *
 * By default each haystack contains one fact. For each context length, the cells run from the deepest fact to the shallowest,
 * because the text before a shallower fact is then already cached. For each cell, the sequence is truncated at the position of
 * its fact, and only the text after this position is prefilled.
 *
 * With --together, one haystack contains the facts for all depths. Each question is asked at the end of the haystack, without
 * the other questions in its context. The text is prefilled once per length, and the other facts act as distractors.
 */
#include "generation.h"
#include "heat_map.h"
#include "niah.h"

#include "../kit/numbers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { ANSWER_TOKENS = 24 };

typedef struct cell {
    uint32_t length;
    double depth;
    fact fact;
    bool found;
    char *answer; /* UTF-8, owned */
} cell;

typedef struct grid {
    niah *n;
    cell *cells; /* [n_lengths, n_haystacks, n_depths] */
    size_t n_cells;
    size_t n_found;
    generation generation;
    progress_bar progress;
    double seconds;
} grid;

/* Tokens of one haystack for one context length. */
typedef struct stack {
    token_list begin; /* tokens that precede `body`, such as the start of a chat message */
    token_list body;  /* excerpt from the book in which the facts are planted */
    token_list rest;  /* complete input of a cell; with --together, the haystack that all cells share */
    size_t kept;      /* number of leading `body` tokens that are in the session's cache */
} stack;

static int add_sentence(const grid *g, const cell *c, token_list *list) {
    char sentence[FACT_TEXT];
    fact_sentence(&c->fact, sentence);
    return token_list_add_text(list, g->n->model, sentence, strlen(sentence), FKV_TOKENIZE_PLAIN);
}

/* Returns the number of body tokens that fit into a context of `length` tokens in addition to `around` other tokens and the
 * answer. If there is no room, prints an error and returns -1. */
static int64_t room_for_text(uint32_t length, size_t around) {
    if (around + ANSWER_TOKENS < length) return (int64_t)(length - around - ANSWER_TOKENS);
    (void)kit_fail(0, "--lengths %u leaves no room for text: facts, question and answer need %zu tokens; use a longer context",
                   length, around + ANSWER_TOKENS);
    return -1;
}

static int answer_cell(grid *g, cell *c, const float *logits) {
    generation_clear(&g->generation);
    int code = generation_run(&g->generation, NULL, 0, logits);
    if (code == EXIT_GOOD && g->generation.stopped == STOP_INTERRUPTED) code = EXIT_INTERRUPTED;
    if (code != EXIT_GOOD) return code;
    c->answer = text_to_utf8(g->generation.text.bytes != NULL ? g->generation.text.bytes : "", g->generation.text.n);
    const char *at = strstr(c->answer, c->fact.number);
    c->found = g->n->about->has_chat ? at != NULL : at == c->answer;
    g->n_found += c->found;
    return EXIT_GOOD;
}

/* ---- single facts ---- */

/* Feeds the haystack and the question of a cell, reusing the cached prefix. */
static int feed_cell(grid *g, stack *s, const cell *c, const token_list *planted, const token_list *question,
                     const float **logits) {
    model_session *session = &g->n->session;
    int64_t room = room_for_text(c->length, s->begin.n + planted->n + question->n);
    if (room < 0) return EXIT_USAGE;
    size_t at = haystack_insertion_point(&g->n->haystack, &s->body, (size_t)((double)room * c->depth));
    size_t shared = session->length == 0 ? 0 : s->begin.n + (at < s->kept ? at : s->kept);
    s->rest.n = 0;
    token_list_add(&s->rest, s->begin.tokens, s->begin.n);
    token_list_add(&s->rest, s->body.tokens, at);
    token_list_add(&s->rest, planted->tokens, planted->n);
    token_list_add(&s->rest, s->body.tokens + at, (size_t)room - at);
    token_list_add(&s->rest, question->tokens, question->n);
    int code = session_truncate(session, (uint32_t)shared);
    shared = session->length; /* the sequence may now be shorter than requested, because sealed pages and sliding windows limit
                                 truncation */
    s->kept = at;
    return code == EXIT_GOOD ? session_feed(session, s->rest.tokens + shared, s->rest.n - shared, logits, &g->progress) : code;
}

static int ask_cell(grid *g, stack *s, cell *c) {
    const float *logits = NULL;
    token_list planted = {0};
    token_list question = {0};
    int code = add_sentence(g, c, &planted);
    if (code == EXIT_GOOD) code = niah_add_question(g->n, &c->fact, &question);
    if (code == EXIT_GOOD) code = feed_cell(g, s, c, &planted, &question, &logits);
    if (code == EXIT_GOOD) code = answer_cell(g, c, logits);
    token_list_free(&planted);
    token_list_free(&question);
    return code;
}

static int ask_alone(grid *g, stack *s, cell *cells) {
    int code = EXIT_GOOD;
    for (uint32_t i = g->n->o->n_depths; code == EXIT_GOOD && i-- > 0;) code = ask_cell(g, s, &cells[i]);
    return code;
}

/* ---- shared haystack ---- */

/* Builds a haystack that contains the facts for all depths and leaves room for the longest question. */
static int plant_all(grid *g, stack *s, const cell *cells, size_t longest_question) {
    const niah *n = g->n;
    token_list planted[MAX_DEPTHS] = {0};
    size_t around = s->begin.n + longest_question;
    int code = EXIT_GOOD;
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->n_depths; i++) {
        code = add_sentence(g, &cells[i], &planted[i]);
        around += planted[i].n;
    }
    int64_t room = code == EXIT_GOOD ? room_for_text(cells[0].length, around) : -1;
    if (code == EXIT_GOOD && room < 0) code = EXIT_USAGE;
    if (code == EXIT_GOOD) {
        size_t from = 0;
        token_list_add(&s->rest, s->begin.tokens, s->begin.n);
        for (uint32_t i = 0; i < n->o->n_depths; i++) {
            size_t at = haystack_insertion_point(&n->haystack, &s->body, (size_t)((double)room * cells[i].depth));
            token_list_add(&s->rest, s->body.tokens + from, at - from);
            token_list_add(&s->rest, planted[i].tokens, planted[i].n);
            from = at;
        }
        token_list_add(&s->rest, s->body.tokens + from, (size_t)room - from);
    }
    for (uint32_t i = 0; i < n->o->n_depths; i++) token_list_free(&planted[i]);
    return code;
}

/* Asks one question at the end of the shared haystack. First removes the previous question from the cache, and feeds the haystack
 * if it is not cached yet. */
static int ask_after_text(grid *g, const stack *s, cell *c, const token_list *question) {
    model_session *session = &g->n->session;
    const float *logits = NULL;
    int code = session->length > s->rest.n ? session_truncate(session, (uint32_t)s->rest.n) : EXIT_GOOD;
    if (code == EXIT_GOOD && session->length < s->rest.n)
        code = session_feed(session, s->rest.tokens + session->length, s->rest.n - session->length, NULL, &g->progress);
    if (code == EXIT_GOOD) code = session_feed(session, question->tokens, question->n, &logits, &g->progress);
    return code == EXIT_GOOD ? answer_cell(g, c, logits) : code;
}

static int ask_together(grid *g, stack *s, cell *cells) {
    uint32_t n_depths = g->n->o->n_depths;
    token_list questions[MAX_DEPTHS] = {0};
    size_t longest = 0;
    int code = EXIT_GOOD;
    for (uint32_t i = 0; code == EXIT_GOOD && i < n_depths; i++) {
        code = niah_add_question(g->n, &cells[i].fact, &questions[i]);
        if (questions[i].n > longest) longest = questions[i].n;
    }
    if (code == EXIT_GOOD) code = plant_all(g, s, cells, longest);
    for (uint32_t i = 0; code == EXIT_GOOD && i < n_depths; i++) code = ask_after_text(g, s, &cells[i], &questions[i]);
    for (uint32_t i = 0; i < n_depths; i++) token_list_free(&questions[i]);
    return code;
}

static int run_stack(grid *g, uint32_t length, uint32_t index, cell *cells) {
    uint64_t seed = g->n->o->model.seed + 1000003 * (uint64_t)index;
    uint64_t random = seed ^ UINT64_C(0x5eed0fac75);
    stack s = {0};
    niah_begin_tokens(g->n, &s.begin);
    int code = session_truncate(&g->n->session, 0);
    haystack_excerpt(&g->n->haystack, seed, length, &s.body);
    for (uint32_t i = g->n->o->n_depths; i-- > 0;) {
        cells[i] = (cell){.length = length, .depth = g->n->depths[i]};
        haystack_draw_fact(&g->n->haystack, &random, &cells[i].fact);
    }
    if (code == EXIT_GOOD) code = (g->n->o->together ? ask_together : ask_alone)(g, &s, cells);
    token_list_free(&s.begin);
    token_list_free(&s.body);
    token_list_free(&s.rest);
    return code;
}

/* ---- results ---- */

static double share_of(const grid *g, uint32_t length, uint32_t depth) {
    const niah *n = g->n;
    uint32_t found = 0;
    for (uint32_t h = 0; h < n->n_haystacks; h++)
        found += g->cells[((size_t)length * n->n_haystacks + h) * n->o->n_depths + depth].found;
    return (double)found / n->n_haystacks;
}

static int write_heat_map(const grid *g, const codec_choice *codec) {
    const niah *n = g->n;
    char name[CODEC_NAME];
    char subtitle[160];
    double *shares = kit_alloc((size_t)n->o->n_depths * n->n_lengths * sizeof *shares);
    for (uint32_t d = 0; d < n->o->n_depths; d++)
        for (uint32_t l = 0; l < n->n_lengths; l++) shares[(size_t)d * n->n_lengths + l] = share_of(g, l, d);
    snprintf(subtitle, sizeof subtitle, "%s, %s, %u %s per cell: %zu of %zu found", n->o->model.model, codec_name(codec, name),
             n->n_haystacks, n->n_haystacks == 1 ? "fact" : "facts", g->n_found, g->n_cells);
    heat_map map = {.title = "Recall of planted facts",
                    .subtitle = subtitle,
                    .note = "A fact is planted at one depth of a long text and asked for at the end of the text.",
                    .lengths = n->lengths,
                    .n_lengths = n->n_lengths,
                    .depths = n->depths,
                    .n_depths = n->o->n_depths,
                    .shares = shares};
    bool good = heat_map_write(&map, n->o->svg);
    int reason = errno;
    free(shares);
    return good ? EXIT_GOOD : kit_fail(EXIT_FAILED, "cannot write %s: %s", n->o->svg, strerror(reason));
}

static void write_grid_json(const grid *g, kit_json *json) {
    kit_json_integer(json, "found", g->n_found);
    kit_json_integer(json, "total", g->n_cells);
    kit_json_integer(json, "haystacks", g->n->n_haystacks);
    kit_json_bool(json, "together", g->n->o->together);
    kit_json_real(json, "seconds", g->seconds);
    if (g->n->o->line == NULL) /* with --line, memory_verdict_json() writes this field */
        kit_json_integer(json, "plan_bytes", g->n->session.plan.total_bytes);
    kit_json_array(json, "cells");
    for (size_t i = 0; i < g->n_cells; i++) {
        const cell *c = &g->cells[i];
        kit_json_object(json, NULL);
        kit_json_integer(json, "length", c->length);
        kit_json_real(json, "depth", c->depth);
        kit_json_bool(json, "found", c->found);
        kit_json_text(json, "answer", c->answer);
        kit_json_text(json, "expected", c->fact.number);
        kit_json_close(json);
    }
    kit_json_close(json);
}

static void print_cell(const cell *c, bool chat) {
    char question[FACT_TEXT];
    char sentence[FACT_TEXT];
    fact_question(&c->fact, chat, question);
    fact_sentence(&c->fact, sentence);
    text_stream out = text_stream_open(stdout);
    printf("planted at %.0f %% of %u tokens: \"%s\"\nasked: \"%s\"\nanswered: ", c->depth * 100, c->length, sentence,
           question + strspn(question, "\n"));
    text_stream_put(&out, c->answer, strlen(c->answer));
    text_stream_end(&out);
    printf("\n%s\n", c->found ? "found" : "NOT FOUND");
}

static void print_grid(const grid *g, const codec_choice *codec) {
    const niah *n = g->n;
    char name[CODEC_NAME];
    printf("%s, %s: %zu of %zu found, %.1f s\n\n%8s", n->o->model.model, codec_name(codec, name), g->n_found, g->n_cells,
           g->seconds, "depth");
    for (uint32_t l = 0; l < n->n_lengths; l++) printf(" %9u", n->lengths[l]);
    putchar('\n');
    for (uint32_t d = 0; d < n->o->n_depths; d++) {
        printf("%6.0f %%", n->depths[d] * 100);
        for (uint32_t l = 0; l < n->n_lengths; l++) printf(" %7.0f %%", share_of(g, l, d) * 100);
        putchar('\n');
    }
    putchar('\n');
}

/* ---- run ---- */

/* Estimates the number of tokens to feed, for the progress bar. The cell with the deepest fact feeds the whole haystack. Every
 * other cell feeds only the text after its fact. */
static uint64_t tokens_to_feed(const niah *n) {
    double total = 0;
    for (uint32_t l = 0; l < n->n_lengths; l++) {
        total += n->lengths[l];
        if (n->o->together) continue;
        for (uint32_t d = 0; d + 1 < n->o->n_depths; d++) total += n->lengths[l] * (1 - n->depths[d]);
    }
    return (uint64_t)(total * n->n_haystacks);
}

static int run_cells(grid *g) {
    niah *n = g->n;
    int code = EXIT_GOOD;
    g->progress = progress_begin("asking", 0, tokens_to_feed(n));
    for (uint32_t l = 0; code == EXIT_GOOD && l < n->n_lengths; l++)
        for (uint32_t h = 0; code == EXIT_GOOD && h < n->n_haystacks; h++)
            code = run_stack(g, n->lengths[l], h, &g->cells[((size_t)l * n->n_haystacks + h) * n->o->n_depths]);
    progress_end(&g->progress);
    g->seconds = kit_seconds() - g->progress.start;
    return code;
}

int niah_grid_run(niah *n, const codec_choice *codec, kit_json *json) {
    grid g = {.n = n, .n_cells = (size_t)n->n_lengths * n->n_haystacks * n->o->n_depths};
    fkv_sampler_config greedy = fkv_sampler_config_default();
    fkv_status status = fkv_sampler_open(&greedy, n->about->n_vocab, &g.generation.sampler);
    if (status != FKV_OK) return cli_fail_status(status);
    g.generation.session = &n->session;
    g.generation.max_new = n->about->has_chat ? ANSWER_TOKENS : FACT_DIGITS + 1;
    g.cells = kit_alloc(g.n_cells * sizeof *g.cells);
    int code = run_cells(&g);
    if (code == EXIT_GOOD) {
        write_grid_json(&g, json);
        if (!n->o->model.json && g.n_cells == 1) print_cell(&g.cells[0], n->about->has_chat);
        if (!n->o->model.json && g.n_cells > 1) print_grid(&g, codec);
        if (n->o->svg != NULL) code = write_heat_map(&g, codec);
    }
    for (size_t i = 0; i < g.n_cells; i++) free(g.cells[i].answer);
    free(g.cells);
    generation_free(&g.generation);
    return code;
}
