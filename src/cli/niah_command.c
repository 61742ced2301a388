/* flatkv niah: plants facts in a long text and asks the model questions about them (needle in a haystack). This file contains the
 * options, the session and the loop over codecs. niah_grid.c tests single facts at each depth; niah_facts.c tests many facts at
 * once. */
#include "niah.h"

#include <string.h>

static const char usage[] =
    "usage: flatkv niah [-m MODEL] [--lengths LIST] [options]\n"
    "           needle in a haystack: recall of one fact for each depth and context length\n"
    "       flatkv niah [-m MODEL] --facts N [--ask M] [-c TOKENS] [options]\n"
    "           recall of many facts, asked one after another: share of correct answers and likelihood of the correct answer\n";

/* ---- setup ---- */

static int choose_lengths(niah *n) {
    const char *at = n->o->lengths;
    if (at == NULL) {
        uint32_t usual = n->o->n_facts > 0 ? 16384 : 8192;
        uint32_t most = n->about->context < usual ? n->about->context : usual;
        n->lengths[n->n_lengths++] = n->o->model.context != 0 ? n->o->model.context : most;
        return EXIT_GOOD;
    }
    while (*at != 0) {
        char word[32];
        uint64_t value = 0;
        size_t length = strcspn(at, ",");
        if (n->n_lengths == MAX_LENGTHS)
            return kit_fail(EXIT_USAGE, "--lengths: too many lengths; at most %d are supported", MAX_LENGTHS);
        snprintf(word, sizeof word, "%.*s", length < sizeof word ? (int)length : (int)sizeof word, at);
        if (!kit_number("--lengths", word, INT32_MAX, &value)) return EXIT_USAGE;
        n->lengths[n->n_lengths++] = (uint32_t)value;
        at += length + (at[length] == ',');
    }
    return n->n_lengths > 0 ? EXIT_GOOD : kit_fail(EXIT_USAGE, "--lengths needs at least one length, such as 4K,16K");
}

static uint32_t longest(const niah *n) {
    uint32_t most = n->o->model.context;
    for (uint32_t i = 0; i < n->n_lengths; i++) most = n->lengths[i] > most ? n->lengths[i] : most;
    return most;
}

static void choose_depths(niah *n) {
    for (uint32_t i = 0; i < n->o->n_depths; i++) n->depths[i] = n->o->n_depths == 1 ? 0.5 : (double)i / (n->o->n_depths - 1);
}

/* ---- codecs ---- */

static int show_line(const niah *n, const codec_choice *codec, const fkv_runner_config *config, kit_json *json) {
    char name[CODEC_NAME];
    char subtitle[160];
    memory_verdict v = memory_line_judge(&n->line, config->lazy);
    const session_shape shape = {n->model, config};
    const memory_comparison wide = memory_comparison_of_session(&shape);
    memory_verdict_json(&n->line, &v, json);
    if (!n->o->model.json) {
        putchar('\n');
        memory_verdict_print(&n->line, &wide, &v);
    }
    snprintf(subtitle, sizeof subtitle, "%s over %u tokens with a planted fact; %s; prefill in steps of %u", n->o->model.model,
             longest(n), codec_name(codec, name), config->max_step_tokens);
    return memory_line_draw(&n->line, &wide, subtitle, n->o->line);
}

static int run_codec(niah *n, const codec_choice *codec, kit_json *json) {
    fkv_runner_config config = model_options_runner(&n->o->model, longest(n));
    codec_apply(codec, &config);
    config.max_logit_rows = config.max_step_tokens < NIAH_LOGIT_ROWS ? config.max_step_tokens : NIAH_LOGIT_ROWS;
    int code = EXIT_GOOD;
    if (n->o->line != NULL)
        code = memory_line_begin(&n->line, (fkv_backend)n->o->model.device,
                                 session_max_chunks(longest(n), config.max_step_tokens) + 256);
    if (code == EXIT_GOOD) code = session_open(&n->session, n->model, &config);
    if (code == EXIT_GOOD && n->o->line != NULL) memory_line_watch(&n->line, &n->session);
    if (code == EXIT_GOOD) code = n->o->n_facts > 0 ? niah_facts_run(n, codec, json) : niah_grid_run(n, codec, json);
    if (code == EXIT_GOOD && n->o->line != NULL) code = show_line(n, codec, &config, json);
    session_close(&n->session);
    memory_line_free(&n->line);
    return code;
}

static int run_codecs(niah *n, kit_json *json) {
    int code = EXIT_GOOD;
    if (n->o->model.codecs.named) kit_json_array(json, "codecs");
    for (uint32_t i = 0; code == EXIT_GOOD && i < n->o->model.codecs.n; i++) {
        if (n->o->model.codecs.named) kit_json_object(json, NULL);
        if (n->o->model.codecs.named) codec_json(&n->o->model.codecs.codecs[i], json);
        code = run_codec(n, &n->o->model.codecs.codecs[i], json);
        if (n->o->model.codecs.named) kit_json_close(json);
    }
    if (n->o->model.codecs.named) kit_json_close(json);
    return code;
}

static int run_niah(niah *n) {
    int code = model_options_load(&n->o->model, false, &n->model);
    if (code != EXIT_GOOD) return code;
    n->about = fkv_model_about(n->model);
    code = niah_frames_open(n);
    if (code == EXIT_GOOD) code = choose_lengths(n);
    if (code == EXIT_GOOD) code = haystack_open(&n->haystack, n->model, n->o->file);
    if (code != EXIT_GOOD) return code;
    choose_depths(n);
    kit_json *json = kit_json_begin();
    model_options_json(&n->o->model, n->about, json);
    code = run_codecs(n, json);
    if (code == EXIT_GOOD && n->o->model.json) return kit_json_print(json);
    kit_json_free(json);
    return code;
}

static bool check_niah_options(const niah_options *o) {
    bool one_cell = o->n_depths == 1 && o->n_haystacks <= 1 && (o->lengths == NULL || strchr(o->lengths, ',') == NULL);
    if ((o->n_asked > o->n_facts || o->n_asked == 0) && o->n_facts > 0)
        return kit_fail(0, "--ask must be from 1 to %u, the number of planted facts (got %u)", o->n_facts, o->n_asked) != 0;
    if (o->n_facts > 0 && o->lengths != NULL)
        return kit_fail(0, "--lengths cannot be combined with --facts: use -c to set the context length") != 0;
    if (o->svg != NULL && (o->n_facts > 0 || o->model.codecs.n > 1))
        return kit_fail(0, "--svg draws the grid of a single codec: remove --facts and pass one codec") != 0;
    if (o->line != NULL && (o->n_facts > 0 || o->model.codecs.n > 1 || !one_cell))
        return kit_fail(
                   0,
                   "--line plots the memory use of a single grid cell: pass one length, --depths 1, one haystack and one codec") !=
               0;
    return true;
}

int cli_niah(int argc, char **argv) {
    niah_options o = {.model = model_options_default(), .n_depths = 11, .n_asked = 64};
    o.model.compares = true;
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    const kit_option own[] = {
        KIT_HEADING("Test"),
        {"lengths", 'l', OPTION_TEXT, &o.lengths, 0, "LIST",
         "context lengths in tokens, including question and answer, such as 4K,16K,64K\n(default: the value of -c, or 8192)"},
        {"depths", 'd', OPTION_COUNT, &o.n_depths, MAX_DEPTHS, "N",
         "number of depths, evenly spaced from start to end (default 11); 1 uses the middle"},
        {"together", 0, OPTION_FLAG, &o.together, 0, NULL,
         "plant the facts of all depths in one haystack and ask for each separately,\nso each length is prefilled only once"},
        {"haystacks", 0, OPTION_U32, &o.n_haystacks, 1000, "N",
         "number of haystacks, each with its own excerpt and facts (default 1; 3 with --facts)"},
        {"facts", 0, OPTION_U32, &o.n_facts, 100000, "N", "plant N facts at random positions"},
        {"ask", 0, OPTION_U32, &o.n_asked, 100000, "M",
         "ask for M of the facts (default 64); each question is followed by its correct answer"},
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "haystack text (default: a book included with flatkv)"},
        {"svg", 0, OPTION_OUTPUT, &o.svg, 0, "FILE", "write the grid as an SVG heat map"},
        {"line", 0, OPTION_OUTPUT, &o.line, 0, "FILE",
         "write an SVG plot of the memory of the process during a single grid cell"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (!check_niah_options(&o)) return EXIT_USAGE;
    cli_catch_interrupts();
    static niah n;
    n = (niah){.o = &o, .n_haystacks = o.n_haystacks != 0 ? o.n_haystacks : o.n_facts > 0 ? 3 : 1};
    code = run_niah(&n);
    haystack_close(&n.haystack);
    niah_frames_close(&n);
    fkv_model_close(n.model);
    return code;
}
