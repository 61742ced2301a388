/* flatkv bench: measures the prefill and decode rates of a model for each codec, number of threads and depth (number of cached
 * tokens).
 *
 * Each repetition of a test truncates the sequence to the depth and then times the prefill or the decode steps. Prompts are
 * random tokens, because rates do not depend on the text. --compare llama.cpp measures the same tests with llama.cpp
 * (llama_peer.h).
 */
#include "../kit/numbers.h"
#include "bench_command.h"
#include "llama_peer.h"
#include "model_names.h"
#include "model_options.h"
#include "pull_model.h"
#include "session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv bench -m MODEL [options]    prefill and decode rates by depth, codec and number of threads\n"
    "       flatkv bench flat [options]        process memory while a model fills its context; see flatkv bench flat --help\n"
    "       flatkv bench attn [options]        attention time with the head counts of a model; see flatkv bench attn --help\n";

enum { MAX_VALUES = 16, MAX_CACHES = 8 };

typedef struct number_list {
    uint32_t values[MAX_VALUES];
    uint32_t n;
} number_list;

typedef struct speed_options {
    model_options model;
    uint32_t n_prompt;
    uint32_t n_new;
    uint32_t n_repeats;
    const char *depth_text;
    const char *thread_text;
    number_list depths;
    number_list threads;
    const char *compare;
    const char *python;
    const char *package;
    const char *caches;
} speed_options;

/* Rates of one test over all repetitions, in tokens per second. */
typedef struct rate_sample {
    double sum;
    double sum_of_squares;
    uint32_t n;
} rate_sample;

typedef struct speed_bench {
    speed_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    char path[MODEL_PATH]; /* path of the model's file or folder */
    const char *name;
    uint32_t *tokens; /* random tokens, at least as many as any test feeds */
    kit_json *json;   /* NULL: print a table */
    uint32_t n_done;
    uint32_t n_configurations;
} speed_bench;

/* ---- options ---- */

/* Parses a comma-separated list, such as "0,4K", of integers in the range from `least` to `most`. */
static int parse_numbers(const char *option, const char *text, uint32_t least, uint32_t most, number_list *list) {
    char word[KIT_WORD];
    const char *at = text;
    list->n = 0;
    while (kit_next_word(&at, word)) {
        uint64_t value = 0;
        if (list->n == MAX_VALUES)
            return kit_fail(EXIT_USAGE, "%s: too many values; at most %d are supported", option, MAX_VALUES);
        if (!kit_number(option, word, most, &value)) return EXIT_USAGE;
        if (value < least) return kit_fail(EXIT_USAGE, "%s %s: expected at least %u", option, word, least);
        list->values[list->n++] = (uint32_t)value;
    }
    return list->n > 0 ? EXIT_GOOD : kit_fail(EXIT_USAGE, "%s needs at least one value", option);
}

static int check_speed_options(speed_options *o) {
    if (o->compare != NULL && strcmp(o->compare, "llama.cpp") != 0)
        return kit_fail(EXIT_USAGE, "--compare %s: expected llama.cpp", o->compare);
    if (o->n_prompt == 0 && o->n_new == 0) return kit_fail(EXIT_USAGE, "-p 0 and -n 0 leave nothing to measure");
    if (o->model.model == NULL) return model_fail_unnamed();
    int code = parse_numbers("--depths", o->depth_text, 0, INT32_MAX / 2, &o->depths);
    if (code == EXIT_GOOD && o->thread_text != NULL) code = parse_numbers("--threads", o->thread_text, 1, 256, &o->threads);
    if (code == EXIT_GOOD && o->thread_text == NULL) {
        const long n = sysconf(_SC_NPROCESSORS_ONLN);
        o->threads = (number_list){.values = {n > 0 && n <= 256 ? (uint32_t)n : 1}, .n = 1};
    }
    return code;
}

/* ---- output ---- */

static void add_rate(rate_sample *s, double rate) {
    s->sum += rate;
    s->sum_of_squares += rate * rate;
    s->n++;
}

static double mean_rate(const rate_sample *s) { return s->n > 0 ? s->sum / s->n : NAN; }

static double rate_deviation(const rate_sample *s) {
    if (s->n < 2) return 0.0;
    const double mean = mean_rate(s);
    const double variance = (s->sum_of_squares - s->n * mean * mean) / (s->n - 1);
    return variance > 0.0 ? sqrt(variance) : 0.0;
}

/* Prints the configuration that is currently being measured, if standard error is a terminal. */
static void show_progress(speed_bench *b, const char *program, const char *types, uint32_t threads, uint32_t depth) {
    b->n_done++;
    if (isatty(STDERR_FILENO) == 0) return;
    (void)fprintf(stderr, "\r\x1b[K[%u of %u] %s %s, %u threads, depth %u ...", b->n_done, b->n_configurations, program, types,
                  threads, depth);
    (void)fflush(stderr);
}

static void clear_progress(void) {
    if (isatty(STDERR_FILENO) != 0) (void)fputs("\r\x1b[K", stderr);
}

static void print_head(const speed_bench *b) {
    if (b->json != NULL) return;
    printf("| model | size | parameters | program | cache | threads | test | tokens/s |\n"
           "|---|---:|---:|---|---|---:|---|---:|\n");
}

/* Prints one row of the table, or writes it as JSON. what: "prefill" or "decode". */
static void print_row(const speed_bench *b, const char *program, const char *types, uint32_t threads, uint32_t depth,
                      bool prefill, const rate_sample *rate) {
    const uint32_t n = prefill ? b->o->n_prompt : b->o->n_new;
    if (rate->n == 0) return;
    clear_progress();
    if (b->json != NULL) {
        kit_json_object(b->json, NULL);
        kit_json_text(b->json, "program", program);
        kit_json_text(b->json, "cache", types);
        kit_json_integer(b->json, "threads", threads);
        kit_json_integer(b->json, "depth", depth);
        kit_json_text(b->json, "test", prefill ? "prefill" : "decode");
        kit_json_integer(b->json, "tokens", n);
        kit_json_integer(b->json, "repeats", rate->n);
        kit_json_real(b->json, "tps", mean_rate(rate));
        kit_json_real(b->json, "tps_deviation", rate_deviation(rate));
        kit_json_close(b->json);
        return;
    }
    char size[32];
    char test[48];
    const double parameters = (double)b->about->n_parameters;
    const bool large = b->about->n_parameters >= 1000000000;
    (void)snprintf(test, sizeof test, depth > 0 ? "%s%u @ d%u" : "%s%u", prefill ? "pp" : "tg", n, depth);
    printf("| %s | %s | %.2f %s | %s | %s | %u | %s | %.2f ± %.2f |\n", b->name, kit_bytes(b->about->file_bytes, size),
           parameters / (large ? 1e9 : 1e6), large ? "B" : "M", program, types, threads, test, mean_rate(rate),
           rate_deviation(rate));
    (void)fflush(stdout);
}

/* ---- flatkv ---- */

/* Truncates or fills the sequence so that it has `depth` tokens. */
static int go_to_depth(const speed_bench *b, model_session *s, uint32_t depth) {
    int code = s->length > depth ? session_truncate(s, depth) : EXIT_GOOD;
    if (code == EXIT_GOOD && s->length < depth) code = session_feed(s, b->tokens + s->length, depth - s->length, NULL, NULL);
    return code;
}

/* Feeds n tokens, either all in one call (prefill) or one by one (decode). *rate receives the number of tokens per second. */
static int time_tokens(const speed_bench *b, model_session *s, uint32_t n, bool prefill, double *rate) {
    const float *logits = NULL;
    const uint32_t first = s->length;
    const double start = kit_seconds();
    int code = EXIT_GOOD;
    if (prefill) code = session_feed(s, b->tokens + first, n, &logits, NULL);
    for (uint32_t i = 0; !prefill && i < n && code == EXIT_GOOD; i++)
        code = session_feed(s, b->tokens + first + i, 1, &logits, NULL);
    *rate = n / (kit_seconds() - start);
    return code;
}

static int time_depth(const speed_bench *b, model_session *s, uint32_t depth, rate_sample rates[2]) {
    const uint32_t counts[2] = {b->o->n_prompt, b->o->n_new};
    double rate = 0.0;
    int code = go_to_depth(b, s, depth);
    if (code == EXIT_GOOD) code = time_tokens(b, s, 1, false, &rate); /* warm-up: wakes the threads and loads the weights */
    for (uint32_t test = 0; test < 2; test++) {
        for (uint32_t i = 0; i < b->o->n_repeats && counts[test] > 0 && code == EXIT_GOOD; i++) {
            code = go_to_depth(b, s, depth);
            if (code == EXIT_GOOD) code = time_tokens(b, s, counts[test], test == 0, &rate);
            if (code == EXIT_GOOD) add_rate(&rates[test], rate);
        }
    }
    return code;
}

static int time_configuration(speed_bench *b, const codec_choice *codec, uint32_t threads, uint32_t max_tokens) {
    model_session s = {0};
    char name[CODEC_NAME];
    fkv_runner_config config = model_options_runner(&b->o->model, max_tokens);
    codec_apply(codec, &config);
    config.n_threads = threads;
    (void)codec_name(codec, name);
    int code = session_open(&s, b->model, &config);
    for (uint32_t i = 0; i < b->o->depths.n && code == EXIT_GOOD; i++) {
        const uint32_t depth = b->o->depths.values[i];
        rate_sample rates[2] = {0};
        show_progress(b, "flatkv", name, threads, depth);
        code = time_depth(b, &s, depth, rates);
        for (uint32_t test = 0; test < 2; test++) print_row(b, "flatkv", name, threads, depth, test == 0, &rates[test]);
    }
    clear_progress();
    session_close(&s);
    return code;
}

/* ---- llama.cpp ---- */

static int time_llama(speed_bench *b, const char *cache, uint32_t threads, uint32_t depth) {
    const speed_options *o = b->o;
    const llama_peer_config config = {.python = o->python,
                                      .package = o->package,
                                      .model = b->path,
                                      .cache = cache,
                                      .threads = threads,
                                      .depth = depth,
                                      .n_prompt = o->n_prompt,
                                      .n_new = o->n_new};
    rate_sample rates[2] = {0};
    show_progress(b, "llama.cpp", cache, threads, depth);
    llama_peer *peer = llama_peer_open(&config);
    int code = peer != NULL ? EXIT_GOOD : EXIT_FAILED;
    for (uint32_t i = 0; i < o->n_repeats && code == EXIT_GOOD && !cli_interrupted(); i++) {
        double prefill = 0.0;
        double decode = 0.0;
        code = llama_peer_measure(peer, &prefill, &decode) ? EXIT_GOOD : EXIT_FAILED;
        if (code == EXIT_GOOD && o->n_prompt > 0) add_rate(&rates[0], prefill);
        if (code == EXIT_GOOD && o->n_new > 0) add_rate(&rates[1], decode);
    }
    llama_peer_close(peer);
    for (uint32_t test = 0; test < 2; test++) print_row(b, "llama.cpp", cache, threads, depth, test == 0, &rates[test]);
    return cli_interrupted() ? EXIT_INTERRUPTED : code;
}

static int compare_llama(speed_bench *b) {
    int code = EXIT_GOOD;
    for (uint32_t t = 0; t < b->o->threads.n && code == EXIT_GOOD; t++) {
        char cache[KIT_WORD];
        const char *at = b->o->caches;
        while (code == EXIT_GOOD && kit_next_word(&at, cache))
            for (uint32_t i = 0; i < b->o->depths.n && code == EXIT_GOOD; i++)
                code = time_llama(b, cache, b->o->threads.values[t], b->o->depths.values[i]);
    }
    clear_progress();
    return code;
}

/* ---- command ---- */

static uint32_t count_words(const char *list) {
    char word[KIT_WORD];
    uint32_t n = 0;
    while (kit_next_word(&list, word)) n++;
    return n;
}

static int measure(speed_bench *b) {
    const speed_options *o = b->o;
    uint32_t depth = 0;
    for (uint32_t i = 0; i < o->depths.n; i++) depth = o->depths.values[i] > depth ? o->depths.values[i] : depth;
    const uint32_t longest = o->n_prompt > o->n_new ? o->n_prompt : o->n_new;
    const uint32_t max_tokens = depth + longest + 1;
    if (o->model.max_kv == 0 && max_tokens > b->about->context)
        return kit_fail(EXIT_FAILED, "depth %u plus %u tokens exceed the model's context of %u tokens: lower --depths", depth,
                        longest, b->about->context);
    b->tokens = kit_alloc((size_t)max_tokens * sizeof *b->tokens);
    uint64_t state = o->model.seed * 2654435761U + 1;
    for (uint32_t i = 0; i < max_tokens; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        b->tokens[i] = (uint32_t)(state >> 33) % b->about->n_vocab;
    }
    b->n_configurations = o->depths.n * o->threads.n * (o->model.codecs.n + (o->compare != NULL ? count_words(o->caches) : 0));
    print_head(b);
    int code = EXIT_GOOD;
    for (uint32_t t = 0; t < o->threads.n; t++)
        for (uint32_t i = 0; i < o->model.codecs.n && code == EXIT_GOOD; i++)
            code = time_configuration(b, &o->model.codecs.codecs[i], o->threads.values[t], max_tokens);
    if (code == EXIT_GOOD && o->compare != NULL) code = compare_llama(b);
    return code;
}

static int run_speed_bench(speed_bench *b) {
    speed_options *o = b->o;
    int code = pull_offer(o->model.model);
    if (code == EXIT_GOOD) code = model_path_of(o->model.model, b->path);
    if (code == EXIT_GOOD && o->compare != NULL && (strlen(b->path) < 5 || strcmp(b->path + strlen(b->path) - 5, ".gguf") != 0))
        code = kit_fail(EXIT_USAGE, "--compare llama.cpp needs a model in a .gguf file (got %s)", b->path);
    if (code == EXIT_GOOD) code = model_options_load(&o->model, false, &b->model);
    if (code != EXIT_GOOD) return code;
    b->about = fkv_model_about(b->model);
    if (o->model.json) {
        b->json = kit_json_begin();
        model_options_json(&o->model, b->about, b->json);
        kit_json_array(b->json, "rows");
    }
    code = measure(b);
    if (b->json == NULL) return code;
    kit_json_close(b->json);
    const int written = kit_json_print(b->json);
    return code != EXIT_GOOD ? code : written;
}

int bench_speed(int argc, char **argv) {
    static speed_options o; /* static, because it contains a large codec list */
    o = (speed_options){.model = model_options_default(),
                        .n_prompt = 512,
                        .n_new = 128,
                        .n_repeats = 3,
                        .depth_text = "0",
                        .python = "python3",
                        .package = "xllamacpp",
                        .caches = "f16,q8_0"};
    kit_option common[N_MODEL_OPTIONS];
    o.model.model = NULL;
    o.model.compares = true;
    model_options_list(&o.model, common);
    model_options_drop(common, "threads");
    model_options_drop(common, "context");
    const kit_option own[] = {
        KIT_HEADING("Tests"),
        {"prompt-tokens", 'p', OPTION_U32, &o.n_prompt, 1 << 24, "N", "tokens of the prefill test (default 512; 0 disables it)"},
        {"new", 'n', OPTION_U32, &o.n_new, 1 << 24, "N", "tokens of the decode test (default 128; 0 disables it)"},
        {"depths", 'd', OPTION_TEXT, &o.depth_text, 0, "LIST",
         "numbers of cached tokens before a test, such as 0,4K,16K (default 0)"},
        {"threads", 0, OPTION_TEXT, &o.thread_text, 0, "LIST", "numbers of threads, such as 1,2,4 (default: one per core)"},
        {"repeat", 'r', OPTION_COUNT, &o.n_repeats, 1000, "N", "repetitions of each test (default 3)"},
        KIT_HEADING("Comparison"),
        {"compare", 0, OPTION_TEXT, &o.compare, 0, "PROGRAM",
         "also measure llama.cpp: --compare llama.cpp. Needs Python with the packages xllamacpp and numpy"},
        {"python", 0, OPTION_TEXT, &o.python, 0, "FILE", "Python interpreter with these packages (default python3)"},
        {"package", 0, OPTION_TEXT, &o.package, 0, "NAME",
         "xllamacpp, llama-cpp-python, or a folder with libllama.so (default xllamacpp)"},
        {"caches", 0, OPTION_TEXT, &o.caches, 0, "LIST",
         "cache types of llama.cpp: f16, q8_0, q4_0, q8_0/q4_0 (default f16,q8_0)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    code = check_speed_options(&o);
    if (code != EXIT_GOOD) return code;
    cli_catch_interrupts();
    static speed_bench b; /* static, because it contains a long path buffer */
    b = (speed_bench){.o = &o, .name = o.model.model};
    code = run_speed_bench(&b);
    fkv_model_close(b.model);
    free(b.tokens);
    return code;
}
