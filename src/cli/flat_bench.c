/* flatkv bench flat: fills a context and checks that the process memory equals the plan, from opening the cache to the last
 * token.
 *
 * This file fills the context of a model with the text of a book. flat_cache.c fills a cache without a model. memory_line.h
 * defines the measurement, which starts when the runner is opened and therefore excludes the weights. All buffers of the
 * benchmark are allocated before the measurement starts.
 */
#include "flat_bench.h"

#include "../kit/numbers.h"
#include "bench_command.h"
#include "haystack.h"
#include "memory_line.h"
#include "session.h"

static const char usage[] =
    "usage: flatkv bench flat [-m MODEL] [-c TOKENS] [options]               a model reads a book\n"
    "       flatkv bench flat --layers N --heads Q/KV/DIM [options]          a cache without a model\n"
    "Fills the whole context and measures the memory of the process. The memory is flat if it is within 1 % of the plan\n"
    "after open and then stays within 1 MiB of that value. With --device mlx, MLX's active memory must not grow\n"
    "after open, and its peak must be within the plan. The exit code is 1 if the memory is not flat. Without a model, the\n"
    "outputs of attention and the decode time at 8 times the capacity are checked as well.\n";

enum { DECODED = 64 }; /* number of tokens at the end of the context that are decoded one by one, with logits */

typedef struct flat {
    flat_options *o;
    fkv_model *model;
    const fkv_model_info *about;
    uint32_t n_tokens;
    token_list tokens;
    fkv_runner_config config;
    uint64_t weights_bytes; /* measured increase in memory while the model was loaded */
    model_session session;
    memory_line line;
    double seconds;
    double decode_seconds;
} flat;

static int load_flat_model(flat *f) {
    double before = 0;
    double after = 0;
    (void)memory_in_use((fkv_backend)f->o->model.device, &before);
    int code = model_options_load(&f->o->model, false, &f->model);
    if (code != EXIT_GOOD) return code;
    (void)memory_in_use((fkv_backend)f->o->model.device, &after);
    f->weights_bytes = after > before ? (uint64_t)(after - before) : 0;
    f->about = fkv_model_about(f->model);
    f->n_tokens = f->o->model.context != 0 ? f->o->model.context : f->about->context;
    if (f->n_tokens <= DECODED)
        return kit_fail(EXIT_USAGE, "-c must be more than %d for bench flat (got %u)", DECODED, f->n_tokens);
    haystack book;
    code = haystack_open(&book, f->model, f->o->file);
    if (code == EXIT_GOOD) haystack_excerpt(&book, f->o->model.seed, f->n_tokens, &f->tokens);
    haystack_close(&book);
    return code;
}

static int fill_context(flat *f) {
    progress_bar progress = progress_begin("filling", 0, f->n_tokens);
    uint32_t prefilled = f->n_tokens - DECODED;
    int code = session_feed(&f->session, f->tokens.tokens, prefilled, NULL, &progress);
    double middle = kit_seconds();
    for (uint32_t i = prefilled; code == EXIT_GOOD && i < f->n_tokens; i++) {
        const float *logits = NULL;
        code = session_feed(&f->session, f->tokens.tokens + i, 1, &logits, &progress);
    }
    f->seconds = kit_seconds() - progress.start;
    f->decode_seconds = kit_seconds() - middle;
    progress_end(&progress);
    return code;
}

static int report_flat_json(const flat *f, const memory_verdict *v) {
    kit_json *json = kit_json_begin();
    const fkv_runner_plan *plan = &f->session.plan;
    model_options_json(&f->o->model, f->about, json);
    kit_json_integer(json, "tokens", f->session.length);
    kit_json_integer(json, "chunk", f->config.max_step_tokens);
    kit_json_integer(json, "threads", plan->cache.n_threads);
    kit_json_bool(json, "lazy", f->o->model.lazy);
    memory_verdict_json(&f->line, v, json);
    kit_json_integer(json, "pages_bytes", plan->cache.slab_bytes);
    kit_json_integer(json, "activations_bytes", plan->activations_bytes);
    kit_json_integer(json, "token_bytes", plan->cache.token_bytes);
    kit_json_integer(json, "weights_mapped_bytes", plan->mapped_bytes);
    kit_json_integer(json, "weights_packed_bytes", plan->packed_bytes);
    kit_json_integer(json, "weights_measured_bytes", f->weights_bytes);
    kit_json_real(json, "seconds", f->seconds);
    kit_json_real(json, "decode_tps", (double)DECODED / f->decode_seconds);
    memory_line_samples_json(&f->line, json);
    return kit_json_print(json);
}

static void report_flat_text(const flat *f, const memory_comparison *wide, const memory_verdict *v) {
    char a[32];
    const fkv_runner_plan *plan = &f->session.plan;
    char name[CODEC_NAME];
    printf("%s, %u tokens, %s\n\n", f->o->model.model, f->session.length, codec_name(&f->o->model.codecs.codecs[0], name));
    printf("%-26s %12s\n", "weights, mapped", kit_bytes(plan->mapped_bytes, a));
    printf("%-26s %12s  planned", "weights, repacked", kit_bytes(plan->packed_bytes, a));
    printf(", %s measured%s\n", kit_bytes(f->weights_bytes, a),
           f->o->model.device == FKV_BACKEND_CPU ? " including the vocabulary" : " by MLX");
    printf("%-26s %10.1f s  the last %d tokens decoded at %.1f t/s\n", "time", f->seconds, DECODED,
           (double)DECODED / f->decode_seconds);
    memory_verdict_print(&f->line, wide, v);
}

static int run_flat(flat *f) {
    int code = load_flat_model(f);
    if (code != EXIT_GOOD) return code;
    f->config = model_options_runner(&f->o->model, f->n_tokens);
    const size_t n_chunks = session_max_chunks(f->n_tokens, f->config.max_step_tokens);
    code = memory_line_begin(&f->line, (fkv_backend)f->o->model.device, n_chunks + DECODED);
    if (code == EXIT_GOOD) code = session_open(&f->session, f->model, &f->config);
    if (code != EXIT_GOOD) return code;
    memory_line_watch(&f->line, &f->session);
    code = fill_context(f);
    if (code != EXIT_GOOD) return code;
    memory_verdict v = memory_line_judge(&f->line, f->o->model.lazy);
    const session_shape shape = {f->model, &f->config};
    const memory_comparison wide = memory_comparison_of_session(&shape);
    if (f->o->svg != NULL) {
        char subtitle[160];
        char name[CODEC_NAME];
        snprintf(subtitle, sizeof subtitle, "%s; %u tokens, %s; filled in steps of at most %u%s", f->o->model.model, f->n_tokens,
                 codec_name(&f->o->model.codecs.codecs[0], name), f->config.max_step_tokens, f->o->model.lazy ? "; lazy" : "");
        code = memory_line_draw(&f->line, &wide, subtitle, f->o->svg);
    }
    if (f->o->model.json && code == EXIT_GOOD) code = report_flat_json(f, &v);
    if (!f->o->model.json) report_flat_text(f, &wide, &v);
    return code == EXIT_GOOD && !v.flat ? EXIT_FAILED : code;
}

int bench_flat(int argc, char **argv) {
    flat_options o = {.model = model_options_default()};
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    const kit_option own[] = {
        KIT_HEADING("Measurement"),
        {"file", 'f', OPTION_TEXT, &o.file, 0, "FILE", "text to fill the context with (default: a book included with flatkv)"},
        {"svg", 0, OPTION_OUTPUT, &o.svg, 0, "FILE",
         "write an SVG plot of the memory, with the computed memory of 16-bit caches for comparison"},
        {"layers", 0, OPTION_U32, &o.layers, FKV_MAX_LAYERS, "N", "without a model: number of layers"},
        {"heads", 0, OPTION_TEXT, &o.heads, 0, "Q/KV/DIM",
         "without a model: query heads/KV heads/head dimension, such as 32/8/128"},
        {"skip-capacity", 0, OPTION_FLAG, &o.skip_capacity, 0, NULL,
         "without a model: do not compare the decode time at two capacities"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (o.layers != 0 || o.heads != NULL) return flat_cache_run(&o);
    cli_catch_interrupts();
    flat f = {.o = &o};
    code = run_flat(&f);
    session_close(&f.session);
    memory_line_free(&f.line);
    token_list_free(&f.tokens);
    fkv_model_close(f.model);
    return code;
}
