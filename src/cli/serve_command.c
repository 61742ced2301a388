/* flatkv serve: a model behind the OpenAI and Anthropic APIs. Options become a model, an engine and a server. */
#include "../kit/process.h"
#include "../serve/serve.h"
#include "cli.h"
#include "model_names.h"
#include "model_options.h"
#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: flatkv serve -m MODEL [--port N] [options]\n"
    "Serves the model over HTTP: /v1/chat/completions, /v1/completions, /v1/messages, /metrics and more.\n"
    "Without a key only this machine can ask. docs/serving.md has the paths and figures.\n";

static const uint32_t UNSAID = UINT32_MAX;

typedef struct serve_options {
    model_options model;
    serve_config http;
    uint32_t port;
    kit_texts keys;
    const char *key_file;
    bool no_auth;
    const char *alias;
    uint32_t parallel;
    uint32_t queue;
    uint32_t connections;
    uint32_t default_new;
    double step_ms;
    double max_wait;
    uint32_t drafts;
    const char *prefix_dir;
    uint64_t prefix_disk;
} serve_options;

static bool is_local(const char *host) {
    return strcmp(host, "127.0.0.1") == 0 || strcmp(host, "::1") == 0 || strcmp(host, "localhost") == 0;
}

static int add_key(serve_options *o, const char *key) {
    if (strlen(key) < 8) return kit_fail(EXIT_USAGE, "a key of %zu characters: at least 8", strlen(key));
    if (o->http.n_keys == SERVE_MAX_KEYS) return kit_fail(EXIT_USAGE, "more than %d keys", SERVE_MAX_KEYS);
    o->http.keys[o->http.n_keys++] = key;
    return EXIT_GOOD;
}

/* One key a line. file: lives as long as the keys. */
static int read_keys(serve_options *o, text_buffer *file) {
    int code = EXIT_GOOD;
    for (uint32_t i = 0; i < o->keys.n && code == EXIT_GOOD; i++) code = add_key(o, o->keys.texts[i]);
    if (o->key_file == NULL || code != EXIT_GOOD) return code;
    code = text_read(file, o->key_file);
    if (code != EXIT_GOOD) return code;
    text_add(file, "", 1);
    for (char *key = strtok(file->bytes, "\r\n"); key != NULL && code == EXIT_GOOD; key = strtok(NULL, "\r\n"))
        code = add_key(o, key);
    return code;
}

static int check_options(serve_options *o) {
    if (o->port > 65535) return kit_fail(EXIT_USAGE, "--port %u: 0 to 65535", o->port);
    o->http.any_host = o->no_auth;
    if (o->http.n_keys == 0 && !o->no_auth && !is_local(o->http.host))
        return kit_fail(EXIT_USAGE, "--host %s lets other machines ask: give --api-key KEY, or say --no-auth", o->http.host);
    if (o->parallel == 0 || o->parallel >= o->model.chunk)
        return kit_fail(EXIT_USAGE, "--parallel %u: 1 to %u, less than --chunk", o->parallel, o->model.chunk - 1);
    if (o->step_ms == 0.0) o->step_ms = o->model.device == FKV_BACKEND_MLX ? 40.0 : 100.0;
    if (o->drafts == UNSAID) o->drafts = o->model.device == FKV_BACKEND_MLX ? 0 : 3; /* measured on CPUs alone */
    o->http.port = (uint16_t)o->port;
    if (o->connections == 0) o->connections = o->parallel + o->queue + 64;
    o->http.max_connections = o->connections;
    return o->model.model != NULL ? EXIT_GOOD : model_fail_unnamed();
}

static fkv_engine_config engine_config(const serve_options *o, const fkv_model_info *about) {
    fkv_engine_config c = fkv_engine_config_default();
    uint64_t tokens = o->model.context;
    if (tokens == 0) tokens = (uint64_t)about->context * o->parallel;
    c.runner = model_options_runner(&o->model, (uint32_t)(tokens < INT32_MAX ? tokens : INT32_MAX));
    c.runner.max_seqs = o->parallel;
    const uint32_t step = c.runner.max_step_tokens;
    const uint32_t spare = step > o->parallel ? step - o->parallel : 0; /* rows of a step beside the answers' own */
    c.draft_tokens = o->drafts < spare ? o->drafts : spare;
    const uint32_t drafted = (o->parallel < 4 ? o->parallel : 4) * c.draft_tokens; /* with more answers few drafts pay */
    c.runner.max_logit_rows = o->parallel + (drafted < spare ? drafted : spare);
    c.step_ms = o->step_ms;
    c.max_queue = o->queue;
    c.max_wait_s = o->max_wait;
    c.default_new = o->default_new;
    return c;
}

static const char *last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL && slash[1] != 0 ? slash + 1 : path;
}

static void say_store(const fkv_store_stats *stats, const char *folder) {
    char used[32];
    char most[32];
    char buffers[32];
    (void)fprintf(stderr, "prefixes in %s: %llu pages, %s of %s; %s of memory for them\n", folder,
                  (unsigned long long)stats->figures.pages, kit_bytes(stats->figures.bytes, used),
                  kit_bytes(stats->figures.max_bytes, most), kit_bytes(stats->buffer_bytes + stats->figures.memory, buffers));
}

/* Loads, opens the engine and serves until it is told to end. */
static int serve_model(serve_options *o, server *http, fkv_prefix_store *store, fkv_model **model, fkv_engine **engine) {
    int code = model_options_load(&o->model, false, model);
    if (code != EXIT_GOOD) return code;
    fkv_engine_config config = engine_config(o, fkv_model_about(*model));
    fkv_status status = FKV_OK;
    if (o->prefix_dir != NULL) {
        status = fkv_prefix_folder_open(o->prefix_dir, o->prefix_disk, store);
        config.store = store;
    }
    process_memory before = {0};
    (void)process_memory_now(&before);
    if (status == FKV_OK) status = fkv_engine_open(*model, &config, engine);
    if (status != FKV_OK) return cli_fail_status(status);
    fkv_engine_stats stats;
    char bytes[32];
    fkv_engine_stats_now(*engine, &stats);
    (void)fprintf(stderr, "%u tokens of cache for %u answers at once, %s; a request may have %u tokens\n",
                  config.runner.max_tokens, o->parallel, kit_bytes(stats.plan.total_bytes, bytes), stats.max_request_tokens);
    model_say_chat(*model);
    if (o->prefix_dir != NULL) say_store(&stats.store, o->prefix_dir);
    const serve_subject subject = {.model = *model,
                                   .engine = *engine,
                                   .model_name = o->alias != NULL ? o->alias : last_part(o->model.model),
                                   .base_bytes = before.anonymous_bytes};
    return serve_run(http, &subject) ? EXIT_GOOD : kit_fail(EXIT_FAILED, "no memory for the loop of the server");
}

/* The address first: who finds it taken need not wait for a model. */
static int serve(serve_options *o) {
    fkv_model *model = NULL;
    fkv_engine *engine = NULL;
    fkv_prefix_store store = {0};
    server *http = serve_open(&o->http);
    if (http == NULL)
        return kit_fail(EXIT_FAILED, "%s port %u cannot be listened on: %s; --port names another, 0 takes a free one",
                        o->http.host, o->port, errno == EINVAL ? "no address of that name is known" : strerror(errno));
    int code = serve_model(o, http, &store, &model, &engine);
    serve_close(http);
    fkv_engine_close(engine);
    if (store.close != NULL) store.close(store.self);
    fkv_model_close(model);
    return code;
}

int cli_serve(int argc, char **argv) {
    serve_options o = {.model = model_options_default(),
                       .http = serve_config_default(),
                       .port = 8080,
                       .parallel = 8,
                       .queue = 256,
                       .default_new = 1024,
                       .step_ms = 0.0,
                       .max_wait = 120.0,
                       .drafts = UNSAID,
                       .prefix_disk = UINT64_C(20) << 30};
    kit_option common[N_MODEL_OPTIONS];
    fkv_engine_config usual = fkv_engine_config_default();
    o.model.codecs.codecs[0] = codec_of_runner(&usual.runner);
    o.model.model = NULL;
    model_options_list(&o.model, common);
    model_options_drop(common, "seed");
    model_options_drop(common, "json");
    const kit_option own[] = {
        {"host", 0, OPTION_TEXT, &o.http.host, 0, "ADDRESS", "where to listen (default 127.0.0.1: this machine alone)"},
        {"port", 0, OPTION_U32, &o.port, 65535, "N", "0 takes any free one (default 8080)"},
        {"api-key", 0, OPTION_TEXTS, &o.keys, 0, "KEY",
         "who may ask; may be given several times, each key is a tenant of its own"},
        {"api-key-file", 0, OPTION_TEXT, &o.key_file, 0, "FILE", "keys, one a line"},
        {"no-auth", 0, OPTION_FLAG, &o.no_auth, 0, NULL, "let other machines ask without a key"},
        {"alias", 0, OPTION_TEXT, &o.alias, 0, "NAME", "the name of the model in answers (default: its file)"},
        {"parallel", 0, OPTION_COUNT, &o.parallel, 1024, "N", "answers computed at once (default 8)"},
        {"queue", 0, OPTION_COUNT, &o.queue, 1 << 20, "N", "requests that may wait (default 256)"},
        {"connections", 0, OPTION_U32, &o.connections, 1 << 20, "N",
         "open at once at most; others are told 503 (default: 64 more than --parallel and --queue together)"},
        {"request-seconds", 0, OPTION_REAL, &o.http.request_s, 0, "S",
         "a client that takes longer to send a whole request, or is idle for so long, is let go (default 60)"},
        {"max-wait", 0, OPTION_REAL, &o.max_wait, 0, "SECONDS",
         "refuse a request that would wait longer; 0: no bound (default 120)"},
        {"default-new", 0, OPTION_COUNT, &o.default_new, INT32_MAX, "N",
         "new tokens of a request without max_tokens (default 1024)"},
        {"draft-tokens", 0, OPTION_U32, &o.drafts, FKV_MAX_DRAFT, "N",
         "try so many tokens at once that followed the last ones before; never changes a text; 0: off (default 3, on MLX 0)"},
        {"prefix-dir", 0, OPTION_TEXT, &o.prefix_dir, 0, "DIR",
         "keep prefixes in this folder too: they outlive the cache and the process"},
        {"prefix-disk", 0, OPTION_U64, &o.prefix_disk, INT64_MAX, "BYTES",
         "of files there at most; the least recently used go first (default 20G)"},
        {"step-ms", 0, OPTION_REAL, &o.step_ms, 0, "MS", "predicted time of a step with prefill in it (default 100, on MLX 40)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    text_buffer file = {0};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    cli_name_sequences("--parallel");
    code = read_keys(&o, &file);
    if (code == EXIT_GOOD) code = check_options(&o);
    if (code == EXIT_GOOD) code = serve(&o);
    text_free(&file);
    return code;
}
