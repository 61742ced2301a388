/* flatkv ppl: computes the perplexity of a text, and the KL divergence between a quantized cache and a 16-bit cache.
 *
 * The text is tokenized once and split into non-overlapping windows. Each window is prefilled in chunks, so later chunks attend
 * to quantized keys and values. The second half of each window is scored, as in llama.cpp, so every scored token has at least
 * half a window of context. Each codec has its own session, called a lane, with the same model. --kl adds a lane with a 16-bit
 * reference cache. All lanes run the same step, and their logits are compared row by row.
 *
 * After Ctrl-C, the results of the completed windows are printed.
 */
#include "likelihood.h"
#include "model_options.h"
#include "session.h"
#include "text.h"
#include "token_list.h"

#include "../kit/numbers.h"

#include <math.h>
#include <stdlib.h>

static const char usage[] =
    "usage: flatkv ppl -f FILE [-m MODEL] [options]\n"
    "Measures perplexity over windows of a text. The second half of each window is scored, as in llama.cpp.\n";

enum { LOGIT_ROWS = 128 }; /* maximum number of rows per scored step; one row of logits can take a megabyte */

typedef struct ppl_options {
    model_options model;
    const char *file;
    uint32_t window;
    uint32_t n_windows;
    bool kl;
    bool verbose;
} ppl_options;

/* Sums over all scored tokens. */
typedef struct lane_sums {
    double nll;
    double kl;
    uint64_t n_same; /* number of positions where the most likely next token is the same as in the reference */
} lane_sums;

typedef struct lane {
    codec_choice codec;
    model_session session;
    lane_sums now;
    lane_sums completed; /* sums over the completed windows */
    double *kl;          /* [scored tokens] */
} lane;

typedef struct ppl {
    ppl_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    token_list text;
    lane lanes[MAX_CODECS + 1]; /* one lane per codec; with --kl, lane 0 is the reference */
    uint32_t n_lanes;
    uint32_t n_windows;
    uint64_t n_scored;
    uint64_t n_completed; /* number of scored tokens in the completed windows */
    float *exps;          /* [n_vocab] exponentials of the reference lane's logits */
    progress_bar progress;
    double seconds;
} ppl;

static bool is_reference(const ppl *p, uint32_t i) { return p->o->kl && i == 0; }

/* ---- setup ---- */

static int open_lane(ppl *p, const codec_choice *codec) {
    lane *l = &p->lanes[p->n_lanes++];
    l->codec = *codec;
    fkv_runner_config config = model_options_runner(&p->o->model, p->o->window);
    codec_apply(codec, &config);
    config.max_logit_rows = config.max_step_tokens < LOGIT_ROWS ? config.max_step_tokens : LOGIT_ROWS;
    int code = session_open(&l->session, p->model, &config);
    if (code == EXIT_GOOD && p->o->kl) l->kl = kit_alloc((size_t)p->n_windows * p->o->window * sizeof *l->kl);
    return code;
}

static int open_lanes(ppl *p) {
    static const codec_choice reference = {.k = {.bits = 16}, .v = {.bits = 16}};
    int code = p->o->kl ? open_lane(p, &reference) : EXIT_GOOD;
    for (uint32_t i = 0; code == EXIT_GOOD && i < p->o->model.codecs.n; i++) code = open_lane(p, &p->o->model.codecs.codecs[i]);
    return code;
}

static int read_ppl_text(ppl *p) {
    text_buffer content = {0};
    int code = text_read(&content, p->o->file);
    if (code == EXIT_GOOD)
        code = token_list_add_text(&p->text, p->model, content.bytes, content.n,
                                   p->about->add_bos ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN);
    text_free(&content);
    if (code != EXIT_GOOD) return code;
    p->n_windows = (uint32_t)(p->text.n / p->o->window);
    if (p->n_windows == 0)
        return kit_fail(EXIT_FAILED, "%s has %zu tokens, fewer than one window of %u: lower --window", p->o->file, p->text.n,
                        p->o->window);
    if (p->o->n_windows != 0 && p->o->n_windows < p->n_windows) p->n_windows = p->o->n_windows;
    return EXIT_GOOD;
}

/* ---- scoring ---- */

/* Scores one row of the logits of every lane. target: the token that follows in the text. */
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

/* Runs one step in every lane. A scored step must not include the last token of the window, because no token of the window
 * follows it. */
static int run_lanes(ppl *p, const uint32_t *window, uint32_t at, uint32_t n, bool scored) {
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
    uint32_t first = n / 2; /* first scored row */
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
        const uint32_t scored_part = room < scored_chunk ? room : scored_chunk;
        const uint32_t part = scored ? scored_part : fkv_runner_chunk(p->lanes[0].session.runner, at, room);
        int code = run_lanes(p, window, at, part, scored);
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

static void complete_window(ppl *p, uint32_t index) {
    for (uint32_t i = 0; i < p->n_lanes; i++) p->lanes[i].completed = p->lanes[i].now;
    p->n_completed = p->n_scored;
    if (p->o->verbose) print_window(p, index);
}

/* Discards the partial window of an interrupted run, so that only completed windows are reported. */
static void discard_partial_window(ppl *p, uint32_t n_windows) {
    for (uint32_t i = 0; i < p->n_lanes; i++) p->lanes[i].now = p->lanes[i].completed;
    p->n_scored = p->n_completed;
    p->n_windows = n_windows;
}

/* ---- results ---- */

typedef struct lane_result {
    double ppl;
    double kl_mean;
    double kl_p99;
    double top1;
} lane_result;

static lane_result evaluate_lane(const ppl *p, lane *l) {
    double n = (double)p->n_scored;
    lane_result r = {.ppl = exp(l->now.nll / n)};
    if (!p->o->kl) return r;
    r.kl_mean = l->now.kl / n;
    kit_sort(l->kl, p->n_scored);
    r.kl_p99 = kit_quantile(l->kl, p->n_scored, 0.99);
    r.top1 = (double)l->now.n_same / n;
    return r;
}

static void write_result_json(const ppl *p, const lane_result *r, kit_json *json) {
    kit_json_real(json, "ppl", r->ppl);
    kit_json_integer(json, "tokens", p->n_scored);
    if (!p->o->kl) return;
    kit_json_real(json, "kl_mean", r->kl_mean);
    kit_json_real(json, "kl_p99", r->kl_p99);
    kit_json_real(json, "top1", r->top1);
}

static int report_ppl_json(ppl *p) {
    kit_json *json = kit_json_begin();
    model_options_json(&p->o->model, p->about, json);
    kit_json_integer(json, "window", p->o->window);
    kit_json_integer(json, "windows", p->n_windows);
    kit_json_integer(json, "chunk", p->o->model.chunk);
    kit_json_text(json, "score", "half");
    kit_json_real(json, "seconds", p->seconds);
    if (p->o->kl) kit_json_real(json, "ppl_16bit", evaluate_lane(p, &p->lanes[0]).ppl);
    if (p->o->model.codecs.named) kit_json_array(json, "codecs");
    for (uint32_t i = p->o->kl ? 1 : 0; i < p->n_lanes; i++) {
        lane_result r = evaluate_lane(p, &p->lanes[i]);
        if (p->o->model.codecs.named) kit_json_object(json, NULL);
        if (p->o->model.codecs.named) codec_json(&p->lanes[i].codec, json);
        write_result_json(p, &r, json);
        if (p->o->model.codecs.named) kit_json_close(json);
    }
    return kit_json_print(json);
}

static int report_ppl(ppl *p) {
    if (p->o->model.json) return report_ppl_json(p);
    printf("%s: %u window%s of %u tokens, %llu scored, %.1f s\n\n%-14s %12s", p->o->file, p->n_windows,
           p->n_windows == 1 ? "" : "s", p->o->window, (unsigned long long)p->n_scored, p->seconds, "cache", "perplexity");
    if (p->o->kl) printf(" %10s %12s %12s %8s", "vs 16-bit", "KL mean", "KL p99", "top-1");
    putchar('\n');
    double reference = p->o->kl ? evaluate_lane(p, &p->lanes[0]).ppl : NAN;
    for (uint32_t i = 0; i < p->n_lanes; i++) {
        char name[CODEC_NAME];
        lane_result r = evaluate_lane(p, &p->lanes[i]);
        printf("%-14s %12.4f", is_reference(p, i) ? "16-bit" : codec_name(&p->lanes[i].codec, name), r.ppl);
        if (p->o->kl && !is_reference(p, i))
            printf(" %+9.3f%% %12.3e %12.3e %7.2f%%", (r.ppl / reference - 1) * 100, r.kl_mean, r.kl_p99, r.top1 * 100);
        putchar('\n');
    }
    return EXIT_GOOD;
}

/* ---- command ---- */

static int run_ppl(ppl *p) {
    int code = model_options_load(&p->o->model, false, &p->model);
    if (code != EXIT_GOOD) return code;
    p->about = fkv_model_about(p->model);
    code = read_ppl_text(p);
    if (code == EXIT_GOOD) code = open_lanes(p);
    if (code != EXIT_GOOD) return code;
    p->exps = kit_alloc((size_t)p->about->n_vocab * sizeof *p->exps);
    p->progress = progress_begin("scoring", 0, (uint64_t)p->n_windows * (p->o->window - 1));
    uint32_t n_done = 0;
    while (code == EXIT_GOOD && n_done < p->n_windows) {
        code = score_window(p, p->text.tokens + (size_t)n_done * p->o->window);
        if (code == EXIT_GOOD) complete_window(p, n_done++);
    }
    p->seconds = kit_seconds() - p->progress.start;
    progress_end(&p->progress);
    bool stopped = code == EXIT_INTERRUPTED && n_done > 0;
    if (stopped) discard_partial_window(p, n_done);
    int printed = code == EXIT_GOOD || stopped ? report_ppl(p) : EXIT_GOOD;
    return code == EXIT_GOOD ? printed : code;
}

static void close_ppl(ppl *p) {
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
        KIT_HEADING("Measurement"),
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "text file; \"-\" reads standard input"},
        {"window", 'w', OPTION_U32, &o.window, 1 << 24, "N",
         "tokens per window (default 2048), including the bos token if the model uses one"},
        {"windows", 0, OPTION_U32, &o.n_windows, INT32_MAX, "N", "maximum number of windows (default: all)"},
        {"kl", 0, OPTION_FLAG, &o.kl, 0, NULL, "also run a 16-bit cache and report the KL divergence from it"},
        {"verbose", 'v', OPTION_FLAG, &o.verbose, 0, NULL, "print the running perplexity after every window"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (o.file == NULL) return kit_fail(EXIT_USAGE, "no text given: use -f FILE, or -f - for standard input");
    if (o.window < 4) return kit_fail(EXIT_USAGE, "--window must be at least 4 (got %u)", o.window);
    cli_catch_interrupts();
    static ppl p;
    p = (ppl){.o = &o};
    code = run_ppl(&p);
    close_ppl(&p);
    return code;
}
