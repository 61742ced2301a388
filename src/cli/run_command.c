/* flatkv run: completes a prompt or starts a conversation.
 *
 * The maximum length of the sequence (the prompt plus -n new tokens) is known before the first token is generated, so exactly
 * this number of tokens is reserved unless -c requests more. A prefix saved by one run can be loaded by another run without
 * recomputing its tokens. The answer is bit-identical with and without a saved prefix.
 */
#include "../kit/numbers.h"
#include "../kit/process.h"
#include "chat_loop.h"
#include "partial_prefix.h"
#include "pull_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv run -m MODEL [-p TEXT] [-f FILE] [options]     completes a prompt (default: standard input)\n"
    "       flatkv run -i -m MODEL [options]                      starts a conversation; /? lists its commands\n";

typedef struct run_options {
    model_options model;
    const char *prompt;
    const char *file;
    const char *system;
    uint32_t n_new;
    bool interactive;
    bool raw;
    bool ignore_end;
    bool no_think;
    sampling_options sampling;
    const char *save_prefix;
    const char *prefix;
} run_options;

/* State of one run. */
typedef struct run {
    run_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    bool has_chat;
    chat chat; /* used if has_chat */
    token_list prompt;
    size_t n_prefix;   /* number of leading prompt tokens that --save-prefix saves */
    uint32_t n_loaded; /* number of tokens whose pages were loaded from a file */
    model_session session;
    generation generation;
    fkv_runner_config runner;
    chat_settings settings;
    fkv_logit_bias biases[SAMPLING_BIASES];
    double prefill_seconds;
    uint32_t n_prefilled;
    uint64_t start_bytes; /* anonymous memory before the model was loaded */
    uint64_t peak_bytes;  /* largest sample of anonymous memory, minus start_bytes */
} run;

static void sample_memory(run *r) {
    process_memory now;
    if (!process_memory_now(&now) || now.anonymous_bytes < r->start_bytes) return;
    if (now.anonymous_bytes - r->start_bytes > r->peak_bytes) r->peak_bytes = now.anonymous_bytes - r->start_bytes;
}

/* ---- prompt ---- */

/* The parts of a prompt are tokenized separately, so that the tokens of a document do not depend on the question. */
typedef struct prompt_parts {
    text_buffer document; /* document, read from the file that -f names or from standard input */
    text_buffer question; /* -p */
} prompt_parts;

/* Returns whether standard input is a file or a pipe. Its contents are then the document to which the question in -p refers. */
static bool input_is_piped(void) {
    struct stat input;
    return fstat(STDIN_FILENO, &input) == 0 && (S_ISFIFO(input.st_mode) || S_ISREG(input.st_mode));
}

static int read_prompt_parts(const run_options *o, prompt_parts *parts) {
    const char *file = o->file;
    if (o->prompt != NULL) text_add(&parts->question, o->prompt, strlen(o->prompt));
    if (file == NULL && o->prompt == NULL && o->prefix == NULL && !o->interactive) {
        if (isatty(STDIN_FILENO) != 0)
            return kit_fail(EXIT_USAGE, "no prompt given: use -p TEXT or -f FILE, or pipe text to standard input");
        file = "-";
    }
    if (file == NULL && o->prompt != NULL && o->prefix == NULL && !o->interactive && input_is_piped()) file = "-";
    int code = file != NULL ? text_read(&parts->document, file) : EXIT_GOOD;
    if (code != EXIT_GOOD) return code;
    if (parts->document.n + parts->question.n == 0 && o->prefix == NULL && !o->interactive)
        return kit_fail(EXIT_USAGE, "the prompt is empty: use -p TEXT or -f FILE, or pipe text to standard input");
    return EXIT_GOOD;
}

/* Checks that a page file was saved with this model and codec. Unlike the library's error message, the message of this check
 * names the difference. */
static int check_prefix(const run *r) {
    fkv_file_info info;
    fkv_status status = fkv_file_inspect(r->o->prefix, false, &info);
    if (status != FKV_OK) return cli_fail_status(status);
    if (memcmp(info.weights_id, r->about->weights_id, sizeof info.weights_id) != 0)
        return kit_fail(EXIT_FAILED,
                        "--prefix %s was saved with another model: use the model that it was saved with, or save it "
                        "again with -m %s",
                        r->o->prefix, r->o->model.model);
    const codec_choice *requested = &r->o->model.codecs.codecs[0];
    codec_choice saved = codec_of_file(&info);
    const bool is_latent = info.first_layer.rope_dim != 0;
    if (is_latent && requested->k.kind == saved.k.kind) saved.v = requested->v; /* latent layers have no V codec */
    char saved_name[CODEC_NAME];
    char requested_name[CODEC_NAME];
    (void)codec_name(&saved, saved_name);
    (void)codec_name(requested, requested_name);
    if (strcmp(saved_name, requested_name) != 0)
        return kit_fail(EXIT_FAILED, "--prefix %s was saved with --codecs %s, but this run uses %s: add --codecs %s",
                        r->o->prefix, saved_name, requested_name, saved_name);
    return EXIT_GOOD;
}

/* Reads the tokens of a saved prefix. */
static int read_prefix_tokens(const run *r, token_list *saved) {
    uint32_t n = 0;
    int code = check_prefix(r);
    if (code != EXIT_GOOD) return code;
    fkv_status status = fkv_file_tokens(r->o->prefix, NULL, 0, &n);
    if (status != FKV_OK) return cli_fail_status(status);
    uint32_t capacity = n;
    uint32_t *tokens = kit_alloc((size_t)capacity * sizeof *tokens);
    status = fkv_file_tokens(r->o->prefix, tokens, capacity, &n);
    token_list_add(saved, tokens, n < capacity ? n : capacity); /* if the file was replaced meanwhile, loading it fails later */
    free(tokens);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

static bool starts_with(const token_list *list, const token_list *begin) {
    if (begin->n == 0) return true;
    return list->n >= begin->n && memcmp(list->tokens, begin->tokens, begin->n * sizeof *begin->tokens) == 0;
}

/* Builds the prompt of a model without a chat template: the document followed by the question. If a prefix was loaded and no
 * document is given, the question follows the prefix. */
static int make_plain_prompt(run *r, const prompt_parts *parts, const token_list *saved) {
    const text_buffer *texts[2] = {&parts->document, &parts->question};
    int code = token_list_add_text(&r->prompt, r->model, "", 0, FKV_TOKENIZE_BOS);
    for (int i = 0; i < 2 && code == EXIT_GOOD; i++)
        if (texts[i]->n > 0) code = token_list_add_text(&r->prompt, r->model, texts[i]->bytes, texts[i]->n, FKV_TOKENIZE_PLAIN);
    if (code == EXIT_GOOD && !starts_with(&r->prompt, saved) && parts->document.n == 0) {
        r->prompt.n = 0;
        token_list_add(&r->prompt, saved->tokens, saved->n);
        if (parts->question.n > 0)
            code = token_list_add_text(&r->prompt, r->model, parts->question.bytes, parts->question.n, FKV_TOKENIZE_PLAIN);
    }
    r->n_prefix = r->prompt.n;
    return code;
}

/* Builds a chat prompt: one user message with the document and the question. --save-prefix saves the prompt up to the end of the
 * document, or up to the end of the question if there is no document. */
static int make_chat_prompt(run *r, const prompt_parts *parts, const token_list *saved) {
    const text_buffer *d = &parts->document;
    const text_buffer *q = &parts->question;
    if (d->n == 0 && saved->n > 0) {
        token_list_add(&r->chat.base, saved->tokens, saved->n);
        chat_add_document(&r->chat, "", 0, q->n > 0 ? q->bytes : "", q->n);
    } else if (d->n > 0) {
        chat_add_document(&r->chat, d->bytes, d->n, q->n > 0 ? q->bytes : "", q->n);
    } else if (r->o->save_prefix != NULL) {
        chat_add_document(&r->chat, q->bytes, q->n, "", 0);
    } else {
        chat_add(&r->chat, "user", q->bytes, q->n);
    }
    return chat_tokens(&r->chat, &r->prompt, &r->n_prefix);
}

static int make_prompt(run *r, const prompt_parts *parts) {
    token_list saved = {0};
    int code = EXIT_GOOD;
    if (r->has_chat) r->chat = chat_open(r->model, r->o->system);
    if (r->o->no_think) r->chat.think = CHAT_THINK_OFF;
    if (parts->document.n + parts->question.n == 0 && r->o->prefix == NULL)
        return EXIT_GOOD; /* a conversation may start without a prompt */
    if (r->o->prefix != NULL) code = read_prefix_tokens(r, &saved);
    if (code == EXIT_GOOD) code = (r->has_chat ? make_chat_prompt : make_plain_prompt)(r, parts, &saved);
    token_list_free(&saved);
    if (code == EXIT_GOOD && r->prompt.n == 0)
        code = kit_fail(EXIT_FAILED, "the prompt is empty: %s",
                        r->has_chat ? "the chat template produced no text for this message; use --raw to bypass the template"
                                    : "the text has no tokens");
    return code;
}

/* ---- context size ---- */

enum { MAX_CONVERSATION = 32768 }; /* maximum default context length of a conversation, in tokens */

/* Prints which prompt tokens are no longer visible to the model because of --max-kv. */
static void report_forgotten(const run *r) {
    const model_options *o = &r->o->model;
    const uint64_t kept = (uint64_t)o->max_kv + o->n_sinks;
    if (o->max_kv == 0 || r->prompt.n <= kept) return;
    (void)fprintf(stderr, "[--max-kv %u: at the end of the prompt, the model has forgotten tokens %u to %zu of %zu (%.0f %%)]\n",
                  o->max_kv, o->n_sinks + 1, r->prompt.n - o->max_kv, r->prompt.n,
                  100.0 * (double)(r->prompt.n - kept) / (double)r->prompt.n);
}

/* Chooses the number of tokens to reserve. With --max-kv, the text may be longer than the model's context, because the number
 * of pages is bounded. */
static int choose_context(const run *r, uint32_t *max_tokens) {
    const model_options *o = &r->o->model;
    uint64_t most = INT32_MAX;
    if (o->max_kv == 0 || o->context != 0) most = o->context != 0 ? o->context : r->about->context;
    if (r->o->interactive && o->context == 0 && most > MAX_CONVERSATION && r->prompt.n < MAX_CONVERSATION / 2)
        most = MAX_CONVERSATION;
    if (r->prompt.n > most) {
        if (o->context != 0)
            return kit_fail(
                EXIT_FAILED,
                "the prompt has %zu tokens, but -c reserves only %llu (the model was trained for %u): shorten the prompt, "
                "raise -c, or use a sliding window (--max-kv)",
                r->prompt.n, (unsigned long long)most, r->about->context);
        const uint32_t window = r->about->context / 2;
        const uint32_t sinks = o->n_sinks < window ? o->n_sinks : window;
        return kit_fail(EXIT_FAILED,
                        "the prompt has %zu tokens, but the model's context is %u: shorten the prompt, or use a sliding window. "
                        "With --max-kv %u --sinks %u, the model reads the whole prompt, but afterwards it sees only the first %u "
                        "and the last %u tokens and has forgotten the %zu tokens (%.0f %%) between them",
                        r->prompt.n, r->about->context, window, sinks, sinks, window, r->prompt.n - window - sinks,
                        100.0 * (double)(r->prompt.n - window - sinks) / (double)r->prompt.n);
    }
    report_forgotten(r);
    uint64_t needed = (uint64_t)r->prompt.n + r->o->n_new;
    if (o->context == 0 && !r->o->interactive && needed < most) most = needed;
    *max_tokens = (uint32_t)most;
    return EXIT_GOOD;
}

/* ---- saved prefix ---- */

/* Opens the sequence with the saved pages. If the pages cover the whole prompt, removes the last token from the sequence,
 * because it must be computed again to obtain its logits. */
static int load_prefix(run *r) {
    model_session *s = &r->session;
    fkv_seq_config config = {.max_tokens = s->max_tokens, .prompt = r->prompt.tokens, .n_prompt = (uint32_t)r->prompt.n};
    fkv_status status = fkv_seq_load(s->cache, &config, r->o->prefix, &s->seq);
    if (status == FKV_BAD_ARGUMENT ||
        status == FKV_SEQ_FULL) /* FKV_SEQ_FULL means that the file has more tokens than the prompt */
        return kit_fail(EXIT_FAILED, "the prompt (%zu tokens) does not start with the tokens saved in %s: %s", r->prompt.n,
                        r->o->prefix, fkv_message());
    if (status == FKV_OK) status = fkv_seq_length(s->cache, s->seq, &s->length);
    if (status != FKV_OK) return cli_fail_status(status);
    if (s->length == r->prompt.n) {
        int code = session_truncate(s, s->length - 1);
        if (code != EXIT_GOOD) return code;
    }
    r->n_loaded = s->length;
    return EXIT_GOOD;
}

static int save_prefix(run *r) {
    if (r->o->save_prefix == NULL) return EXIT_GOOD;
    fkv_status status = fkv_seq_save(r->session.cache, r->session.seq, r->prompt.tokens, r->session.length, r->o->save_prefix);
    if (status != FKV_OK) return cli_fail_status(status);
    partial_prefix_remove(r->o->save_prefix);
    return EXIT_GOOD;
}

/* ---- generation ---- */

static int open_sampler(run *r) {
    fkv_sampler_config *config = &r->settings.sampling;
    sampling_use how = !r->has_chat ? SAMPLE_TEXT : r->o->interactive ? SAMPLE_CONVERSATION : SAMPLE_ANSWER;
    int code = sampling_options_config(&r->o->sampling, r->model, how, r->o->model.seed, r->biases, config);
    if (code != EXIT_GOOD) return code;
    fkv_status status = fkv_sampler_open(config, r->about->n_vocab, &r->generation.sampler);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

static int open_run_session(run *r) {
    uint32_t max_tokens = 0;
    int code = choose_context(r, &max_tokens);
    if (code != EXIT_GOOD) return code;
    r->runner = model_options_runner(&r->o->model, max_tokens);
    r->settings.runner = &r->runner;
    code = session_open_empty(&r->session, r->model, &r->runner);
    if (code != EXIT_GOOD) return code;
    sample_memory(r);
    if (r->o->save_prefix != NULL) {
        r->n_loaded = partial_prefix_load(r->o->save_prefix, &r->session, &r->prompt, r->n_prefix);
        if (r->n_loaded > 0) return EXIT_GOOD;
    }
    return r->o->prefix != NULL ? load_prefix(r) : session_begin(&r->session);
}

/* Feeds the prompt up to token `end`. *logits receives the logits only if `end` is the end of the prompt. */
static int feed_prompt(run *r, size_t end, const float **logits, progress_bar *progress) {
    uint32_t before = r->session.length;
    if (before >= end) return EXIT_GOOD;
    double start = kit_seconds();
    int code = session_feed(&r->session, r->prompt.tokens + before, end - before, end == r->prompt.n ? logits : NULL, progress);
    r->prefill_seconds += kit_seconds() - start;
    r->n_prefilled += r->session.length - before;
    return code;
}

/* Prefills the prompt. With --save-prefix, the prefix is saved as soon as it is prefilled, because a windowed layer may discard
 * its tokens in the next step. */
static int prefill_prompt(run *r, const float **logits) {
    progress_bar progress = progress_begin("prefill", r->session.length, r->prompt.n);
    int code = EXIT_GOOD;
    if (r->o->save_prefix != NULL) {
        code = feed_prompt(r, r->n_prefix, logits, &progress);
        if (code == EXIT_GOOD) code = save_prefix(r);
    }
    if (code == EXIT_GOOD) code = feed_prompt(r, r->prompt.n, logits, &progress);
    progress_end(&progress);
    if (code != EXIT_GOOD && r->o->save_prefix != NULL && r->session.length > 0 && r->session.length < r->n_prefix)
        partial_prefix_save(r->o->save_prefix, &r->session, &r->prompt, r->n_prefix);
    sample_memory(r);
    return code;
}

/* ---- report ---- */

static double tokens_per_second(uint32_t n, double seconds) { return n > 0 && seconds > 0 ? n / seconds : NAN; }

static int report_run(const run *r, int code) {
    const generation *g = &r->generation;
    const char *stop = code == EXIT_INTERRUPTED ? "interrupted" : stop_reason_name(g->stopped);
    double prefill_tps = tokens_per_second(r->n_prefilled, r->prefill_seconds);
    double decode_tps = tokens_per_second(g->n_steps, g->seconds);
    if (!r->o->model.json) {
        (void)putchar('\n');
        if (isatty(STDERR_FILENO) == 0) return code;
        char pages[32];
        (void)fputc('\n', stderr);
        if (code == EXIT_INTERRUPTED && (size_t)r->n_loaded + r->n_prefilled < r->prompt.n)
            (void)fprintf(stderr, "%zu of ", (size_t)r->n_loaded + r->n_prefilled);
        (void)fprintf(stderr, "%zu prompt tokens", r->prompt.n);
        if (r->n_loaded > 0) (void)fprintf(stderr, " (%u loaded from the prefix)", r->n_loaded);
        if (!isnan(prefill_tps)) (void)fprintf(stderr, ", %.0f t/s", prefill_tps);
        (void)fprintf(stderr, "; %zu new", g->tokens.n);
        if (!isnan(decode_tps)) (void)fprintf(stderr, ", %.1f t/s", decode_tps);
        (void)fprintf(stderr, "; pages %s; stopped: %s\n", kit_bytes(r->session.plan.cache.slab_bytes, pages), stop);
        return code;
    }
    kit_json *json = kit_json_begin();
    model_options_json(&r->o->model, r->about, json);
    kit_json_bytes(json, "text", g->text.bytes, g->text.n);
    if (g->reasoning.n > 0) kit_json_bytes(json, "reasoning", g->reasoning.bytes, g->reasoning.n);
    if (g->calls.n > 0) kit_json_bytes(json, "tool_calls", g->calls.bytes, g->calls.n);
    kit_json_real(json, "temperature", (double)r->settings.sampling.temperature);
    kit_json_integer(json, "prompt_tokens", r->prompt.n);
    kit_json_integer(json, "prefix_tokens", r->n_loaded);
    kit_json_integer(json, "new_tokens", g->tokens.n);
    kit_json_text(json, "stop", stop);
    kit_json_real(json, "prefill_tps", prefill_tps);
    kit_json_real(json, "decode_tps", decode_tps);
    kit_json_integer(json, "kv_bytes", r->session.plan.cache.slab_bytes);
    kit_json_integer(json, "plan_bytes", r->session.plan.total_bytes);
    kit_json_integer(json, "packed_bytes", r->about->packed_bytes);
    kit_json_integer(json, "peak_bytes", r->peak_bytes);
    kit_json_array(json, "tokens");
    for (size_t i = 0; i < g->tokens.n; i++) kit_json_integer(json, NULL, g->tokens.tokens[i]);
    int written = kit_json_print(json);
    return code != EXIT_GOOD ? code : written;
}

static int complete(run *r) {
    const float *logits = NULL;
    int code = prefill_prompt(r, &logits);
    if (code == EXIT_GOOD) code = generation_run(&r->generation, r->prompt.tokens, r->prompt.n, logits);
    sample_memory(r);
    if (code == EXIT_GOOD && r->generation.stopped == STOP_INTERRUPTED) code = EXIT_INTERRUPTED;
    return code == EXIT_GOOD || code == EXIT_INTERRUPTED ? report_run(r, code) : code;
}

/* Runs a conversation. If the command line gives a prompt or a saved prefix, generates an answer to it before the first turn. */
static int converse(run *r) {
    conversation c = {.generation = &r->generation, .chat = r->has_chat ? &r->chat : NULL, .model = r->o->model.model};
    int code = EXIT_GOOD;
    r->generation.last_is_fed = true;
    if (r->prompt.n > 0) {
        const float *logits = NULL;
        code = prefill_prompt(r, &logits);
        if (code == EXIT_GOOD) code = generation_run(&r->generation, r->prompt.tokens, r->prompt.n, logits);
        (void)putchar('\n');
        token_list_add(&c.fed, r->prompt.tokens, r->prompt.n);
        conversation_add_answer(&c);
        cli_clear_interrupt();
    }
    if (code == EXIT_GOOD) code = chat_loop_run(&c, &r->settings);
    conversation_free(&c);
    return code;
}

static int load_and_run(run *r, const prompt_parts *parts) {
    run_options *o = r->o;
    process_memory before = {0};
    (void)process_memory_now(&before);
    r->start_bytes = before.anonymous_bytes;
    int code = pull_offer(o->model.model);
    if (code == EXIT_GOOD) code = model_options_load(&o->model, false, &r->model);
    if (code != EXIT_GOOD) return code;
    r->about = fkv_model_about(r->model);
    r->has_chat = r->about->has_chat && !o->raw;
    if (!o->raw) model_report_chat("", r->model);
    sample_memory(r);
    code = make_prompt(r, parts);
    if (code == EXIT_GOOD) code = open_sampler(r);
    if (code == EXIT_GOOD) code = open_run_session(r);
    if (code != EXIT_GOOD) return code;
    r->generation.session = &r->session;
    r->generation.max_new = o->n_new;
    r->generation.plain = !r->has_chat;
    r->generation.hide_reasoning = o->sampling.reasoning != 0;
    r->generation.stop = o->sampling.stop.texts;
    r->generation.n_stop = o->sampling.stop.n;
    r->generation.ignore_end = o->ignore_end;
    r->generation.out = text_stream_open(o->model.json ? NULL : stdout);
    return o->interactive ? converse(r) : complete(r);
}

static bool check_run_options(const run_options *o) {
    if (o->interactive && o->model.json) return kit_fail(0, "-i and --json cannot be combined") != 0;
    if (o->n_new == 0 && o->save_prefix == NULL)
        return kit_fail(0, "-n 0 requires --save-prefix: without it the run would produce nothing") != 0;
    return true;
}

int cli_run(int argc, char **argv) {
    run_options o = {.model = model_options_default(), .n_new = UINT32_MAX, .sampling = sampling_options_default()};
    kit_option common[N_MODEL_OPTIONS];
    kit_option sampling[N_SAMPLING_OPTIONS];
    o.model.model = NULL;
    model_options_list(&o.model, common);
    sampling_options_list(&o.sampling, sampling);
    const kit_option own[] = {
        KIT_HEADING("Prompt"),
        {"prompt", 'p', OPTION_TEXT, &o.prompt, 0, "TEXT", "prompt; with -f it follows the text of the file"},
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "read the prompt from a file; \"-\" reads standard input"},
        {"interactive", 'i', OPTION_FLAG, &o.interactive, 0, NULL, "start a conversation; its history stays in the cache"},
        {"system", 0, OPTION_TEXT, &o.system, 0, "TEXT", "system message of the chat"},
        {"raw", 0, OPTION_FLAG, &o.raw, 0, NULL, "continue the text as it is, without the model's chat template"},
        {"no-think", 0, OPTION_FLAG, &o.no_think, 0, NULL,
         "disable thinking for models that support it (such as Qwen3 and SmolLM3)"},
        {"save-prefix", 0, OPTION_OUTPUT, &o.save_prefix, 0, "FILE",
         "save the cache of the document (-f) or of the prompt to a page file; after Ctrl-C, the same\ncommand continues where it was interrupted"},
        {"prefix", 0, OPTION_TEXT, &o.prefix, 0, "FILE",
         "load a saved page file instead of computing its tokens; -p asks about the saved text,\nwithout -p the text is continued"},
        KIT_HEADING("Answer"),
        {"new", 'n', OPTION_U32, &o.n_new, INT32_MAX, "N", "maximum number of new tokens per answer (default 256; 2048 with -i)"},
        {"ignore-end", 0, OPTION_FLAG, &o.ignore_end, 0, NULL, "do not stop at the model's end token"},
        {0}};
    const kit_option *const tables[] = {own, sampling, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (o.n_new == UINT32_MAX) o.n_new = o.interactive ? 2048 : 256;
    if (!check_run_options(&o)) return EXIT_USAGE;
    cli_catch_interrupts();
    run r = {.o = &o};
    prompt_parts parts = {0};
    code = read_prompt_parts(
        &o, &parts); /* options are checked before the model is loaded, so that errors are reported immediately */
    if (code == EXIT_GOOD) code = load_and_run(&r, &parts);
    text_free(&parts.document);
    text_free(&parts.question);
    generation_free(&r.generation);
    token_list_free(&r.prompt);
    chat_close(&r.chat);
    session_close(&r.session);
    fkv_model_close(r.model);
    return code;
}
