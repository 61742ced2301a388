/* flatkv ppl: perplexity of a text, window by window, and how far a packed cache moves the model from a 16-bit one.
 *
 * The text is tokenized once and cut into windows that do not overlap; each is prefilled in chunks, so that later chunks attend
 * to packed history. Of each window the second half is scored, as llama.cpp does, so that every scored token has seen at least
 * half a window. Every codec that was asked for, and with --kl a 16-bit cache as the reference, is a lane of its own over the
 * same model: all lanes take the same step, then their logits are compared, row by row. N codecs cost N + 1 forwards.
 *
 * Interrupted, it reports the windows that were done.
 *
 * What is kept: one row of exps, and a divergence for each scored token and lane. Logits are never copied.
 */
#include "likelihood.h"
#include "model_options.h"
#include "session.h"
#include "text.h"
#include "token_list.h"

#include "../kit/numbers.h"

#include <math.h>
#include <stdlib.h>

static const char usage[] = "usage: flatkv ppl -f FILE [-m MODEL] [options]\n"
                            "Perplexity over windows of a text. The second half of each window is scored, as in llama.cpp.\n";

enum { LOGIT_ROWS = 128 }; /* of one scored step: a large vocabulary has a megabyte a row */

typedef struct ppl_options {
    model_options model;
    const char *file;
    uint32_t window;
    uint32_t n_windows;
    int score; /* 0 half, 1 all */
    bool kl;
    bool verbose;
} ppl_options;

/* Sums over scored tokens. */
typedef struct lane_sums {
    double nll;
    double kl;
    uint64_t n_same; /* where it agrees with the reference about the likeliest next one */
} lane_sums;

typedef struct lane {
    codec_choice codec;
    model_session session;
    lane_sums now;
    lane_sums whole; /* of the windows that are done */
    double *kl;      /* [scored tokens] */
} lane;

typedef struct ppl {
    const ppl_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    token_list text;
    lane lanes[MAX_CODECS + 1]; /* the reference, where there is one, is the first */
    uint32_t n_lanes;
    uint32_t n_windows;
    uint64_t n_scored;
    uint64_t n_kept; /* of the windows that are done */
    float *exps;     /* [n_vocab] of the reference */
    progress_bar progress;
    double seconds;
} ppl;

static bool is_reference(const ppl *p, uint32_t i) { return p->o->kl && i == 0; }

/* ---- opening ---- */

static int open_lane(ppl *p, const codec_choice *codec) {
    lane *l = &p->lanes[p->n_lanes++];
    l->codec = *codec;
    fkv_runner_config config = model_options_runner(&p->o->model, p->o->window);
    codec_apply(codec, &config);
    config.max_logit_rows = config.max_step_tokens < LOGIT_ROWS ? config.max_step_tokens : LOGIT_ROWS;
    int code = session_open(&l->session, p->model, &config);
    if (code == EXIT_GOOD && p->o->kl) l->kl = kit_take((size_t)p->n_windows * p->o->window * sizeof *l->kl);
    return code;
}

static int open_lanes(ppl *p) {
    static const codec_choice reference = {.k = {.bits = 16}, .v = {.bits = 16}};
    int code = p->o->kl ? open_lane(p, &reference) : EXIT_GOOD;
    for (uint32_t i = 0; code == EXIT_GOOD && i < p->o->model.codecs.n; i++) code = open_lane(p, &p->o->model.codecs.codecs[i]);
    return code;
}

static int read_text(ppl *p) {
    text_buffer content = {0};
    int code = text_read(&content, p->o->file);
    if (code == EXIT_GOOD)
        code = token_list_add_text(&p->text, p->model, content.bytes, content.n,
                                   p->about->add_bos ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
    text_free(&content);
    if (code != EXIT_GOOD) return code;
    p->n_windows = (uint32_t)(p->text.n / p->o->window);
    if (p->n_windows == 0)
        return kit_fail(EXIT_FAILED, "%s has %zu tokens, less than one window of %u: use a smaller --window", p->o->file,
                        p->text.n, p->o->window);
    if (p->o->n_windows != 0 && p->o->n_windows < p->n_windows) p->n_windows = p->o->n_windows;
    return EXIT_GOOD;
}

/* ---- scoring ---- */

/* The row of one token in every lane; `target` is the token that follows it. */
static void score_row(ppl *p, const float *const *logits, uint32_t row, uint32_t target) {
    size_t at = (size_t)row * p->about->n_vocab;
    likelihood reference = {0};
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        lane *l = &p->lanes[i];
        const float *mine = logits[i] + at;
        likelihood here = likelihood_of(mine, p->about->n_vocab, is_reference(p, i) ? p->exps : NULL);
        l->now.nll += likelihood_nll(&here, mine, target);
        if (is_reference(p, i)) reference = here;
        if (!p->o->kl) continue;
        double kl = is_reference(p, i) ? 0 : likelihood_kl(&reference, logits[0] + at, p->exps, &here, mine, p->about->n_vocab);
        l->kl[p->n_scored] = kl;
        l->now.kl += kl;
        l->now.n_same += here.top == reference.top;
    }
    p->n_scored++;
}

/* One step in every lane. The rows of scored tokens are those whose next token is inside the window. */
static int take_step(ppl *p, const uint32_t *window, uint32_t at, uint32_t n, bool scored) {
    const float *logits[MAX_CODECS + 1];
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        model_session *s = &p->lanes[i].session;
        int code = scored ? session_feed_all(s, window + at, n, &logits[i]) : session_feed(s, window + at, n, NULL, NULL);
        if (code != EXIT_GOOD) return code;
        if (cli_interrupted()) return EXIT_INTERRUPTED;
    }
    for (uint32_t row = 0; scored && row < n; row++) score_row(p, logits, row, window[at + row + 1]);
    progress_add(&p->progress, n);
    return EXIT_GOOD;
}

static int score_window(ppl *p, uint32_t *window) {
    uint32_t n = p->o->window;
    uint32_t first = p->o->score == 0 ? n / 2 : 0; /* the first row that is scored; the last token has no next one */
    uint32_t chunk = p->o->model.chunk;
    uint32_t scored_chunk = chunk < LOGIT_ROWS ? chunk : LOGIT_ROWS;
    if (p->about->add_bos) window[0] = p->about->bos;
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        int code = session_truncate(&p->lanes[i].session, 0);
        if (code != EXIT_GOOD) return code;
    }
    for (uint32_t at = 0; at < n - 1;) {
        bool scored = at >= first;
        uint32_t room = (scored ? n - 1 : first) - at;
        uint32_t most = scored ? scored_chunk : chunk;
        uint32_t part = room < most ? room : most;
        int code = take_step(p, window, at, part, scored);
        if (code != EXIT_GOOD) return code;
        at += part;
    }
    return EXIT_GOOD;
}

static void print_window(const ppl *p, uint32_t index) {
    char name[CODEC_NAME];
    (void)fprintf(stderr, "%swindow %u:", p->progress.terminal ? "\r" : "", index + 1);
    for (uint32_t i = 0; i < p->n_lanes; i++)
        (void)fprintf(stderr, " %s %.4f%s", is_reference(p, i) ? "reference" : codec_name(&p->lanes[i].codec, name),
                      exp(p->lanes[i].now.nll / (double)p->n_scored), i + 1 < p->n_lanes ? "," : "\n");
}

static void keep_window(ppl *p, uint32_t index) {
    for (uint32_t i = 0; i < p->n_lanes; i++) p->lanes[i].whole = p->lanes[i].now;
    p->n_kept = p->n_scored;
    if (p->o->verbose) print_window(p, index);
}

/* A run that is stopped reports the windows that were done. */
static void go_back_to(ppl *p, uint32_t n_windows) {
    for (uint32_t i = 0; i < p->n_lanes; i++) p->lanes[i].now = p->lanes[i].whole;
    p->n_scored = p->n_kept;
    p->n_windows = n_windows;
}

/* ---- results ---- */

typedef struct lane_result {
    double ppl;
    double kl_mean;
    double kl_p99;
    double top1;
} lane_result;

static lane_result judge(const ppl *p, lane *l) {
    double n = (double)p->n_scored;
    lane_result r = {.ppl = exp(l->now.nll / n)};
    if (!p->o->kl) return r;
    r.kl_mean = l->now.kl / n;
    kit_sort(l->kl, p->n_scored);
    r.kl_p99 = kit_quantile(l->kl, p->n_scored, 0.99);
    r.top1 = (double)l->now.n_same / n;
    return r;
}

static void put_result(const ppl *p, const lane_result *r, kit_json *json) {
    kit_json_real(json, "ppl", r->ppl);
    kit_json_integer(json, "tokens", p->n_scored);
    if (!p->o->kl) return;
    kit_json_real(json, "kl_mean", r->kl_mean);
    kit_json_real(json, "kl_p99", r->kl_p99);
    kit_json_real(json, "top1", r->top1);
}

static int report_json(ppl *p) {
    kit_json *json = kit_json_begin();
    model_options_json(&p->o->model, p->about, json);
    kit_json_integer(json, "window", p->o->window);
    kit_json_integer(json, "windows", p->n_windows);
    kit_json_integer(json, "chunk", p->o->model.chunk);
    kit_json_text(json, "score", p->o->score == 0 ? "half" : "all");
    kit_json_real(json, "seconds", p->seconds);
    if (p->o->kl) kit_json_real(json, "ppl_16bit", judge(p, &p->lanes[0]).ppl);
    if (p->o->model.codecs.named) kit_json_array(json, "codecs");
    for (uint32_t i = p->o->kl ? 1 : 0; i < p->n_lanes; i++) {
        lane_result r = judge(p, &p->lanes[i]);
        if (p->o->model.codecs.named) kit_json_object(json, NULL);
        if (p->o->model.codecs.named) codec_json(&p->lanes[i].codec, json);
        put_result(p, &r, json);
        if (p->o->model.codecs.named) kit_json_close(json);
    }
    return kit_json_print(json);
}

static int report(ppl *p) {
    if (p->o->model.json) return report_json(p);
    printf("%s: %u window%s of %u tokens, %llu scored, %.1f s\n\n%-14s %12s", p->o->file, p->n_windows,
           p->n_windows == 1 ? "" : "s", p->o->window, (unsigned long long)p->n_scored, p->seconds, "cache", "perplexity");
    if (p->o->kl) printf(" %10s %12s %12s %8s", "of 16-bit", "KL mean", "KL p99", "top-1");
    putchar('\n');
    double reference = p->o->kl ? judge(p, &p->lanes[0]).ppl : NAN;
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        char name[CODEC_NAME];
        lane_result r = judge(p, &p->lanes[i]);
        printf("%-14s %12.4f", is_reference(p, i) ? "16-bit" : codec_name(&p->lanes[i].codec, name), r.ppl);
        if (p->o->kl && !is_reference(p, i))
            printf(" %+9.3f%% %12.3e %12.3e %7.2f%%", (r.ppl / reference - 1) * 100, r.kl_mean, r.kl_p99, r.top1 * 100);
        putchar('\n');
    }
    return EXIT_GOOD;
}

/* ---- the command ---- */

static int work(ppl *p) {
    int code = model_options_load(&p->o->model, false, &p->model);
    if (code != EXIT_GOOD) return code;
    p->about = fkv_model_about(p->model);
    code = read_text(p);
    if (code == EXIT_GOOD) code = open_lanes(p);
    if (code != EXIT_GOOD) return code;
    p->exps = kit_take((size_t)p->about->n_vocab * sizeof *p->exps);
    p->progress = progress_begin("scoring", (uint64_t)p->n_windows * (p->o->window - 1));
    uint32_t n_done = 0;
    while (code == EXIT_GOOD && n_done < p->n_windows) {
        code = score_window(p, p->text.tokens + (size_t)n_done * p->o->window);
        if (code == EXIT_GOOD) keep_window(p, n_done++);
    }
    p->seconds = kit_seconds() - p->progress.start;
    progress_end(&p->progress);
    bool stopped = code == EXIT_INTERRUPTED && n_done > 0;
    if (stopped) go_back_to(p, n_done);
    int printed = code == EXIT_GOOD || stopped ? report(p) : EXIT_GOOD;
    return code == EXIT_GOOD ? printed : code;
}

static void close_all(ppl *p) {
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        session_close(&p->lanes[i].session);
        free(p->lanes[i].kl);
    }
    free(p->exps);
    token_list_free(&p->text);
    fkv_model_close(p->model);
}

int cli_ppl(int argc, char **argv) {
    ppl_options o = {.model = model_options_default(), .window = 2048};
    o.model.compares = true;
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    model_options_drop(common, "context");
    model_options_drop(common, "seed");
    const kit_option own[] = {
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "the text; \"-\" is standard input"},
        {"window", 'w', OPTION_U32, &o.window, 1 << 24, "N",
         "tokens in a window (default 2048); it starts with the bos token if the model uses one"},
        {"windows", 0, OPTION_U32, &o.n_windows, INT32_MAX, "N", "at most N windows (default: all)"},
        {"score", 0, OPTION_CHOICE, &o.score, 0, "half|all", "score the second half of each window, or all of it (default half)"},
        {"kl", 0, OPTION_FLAG, &o.kl, 0, NULL, "also run a 16-bit cache and report the KL divergence from it"},
        {"verbose", 'v', OPTION_FLAG, &o.verbose, 0, NULL, "print the perplexity so far after every window"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (o.file == NULL) return kit_fail(EXIT_USAGE, "-f FILE is needed: the text to score");
    if (o.window < 4) return kit_fail(EXIT_USAGE, "--window %u: at least 4 tokens", o.window);
    cli_catch_interrupts();
    static ppl p;
    p = (ppl){.o = &o};
    code = work(&p);
    close_all(&p);
    return code;
}
