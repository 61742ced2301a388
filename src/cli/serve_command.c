/* flatkv serve: HTTP server with the OpenAI and Anthropic APIs. This file creates the model, the engine and the server from the
 * options. */
#include "../kit/process.h"
#include "../serve/serve.h"
#include "cli.h"
#include "model_names.h"
#include "model_options.h"
#include "pull_model.h"
#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: flatkv serve -m MODEL [--port N] [options]\n"
    "Serves the model over HTTP: /v1/chat/completions, /v1/completions, /v1/messages, /metrics and other endpoints.\n"
    "Without an API key only clients on this machine are accepted.\n";

static const uint32_t NOT_GIVEN = UINT32_MAX;
enum { MAX_DRAIN_SECONDS = 86400 };

typedef struct serve_options {
    model_options model;
    serve_config http;
    uint32_t port;
    kit_texts keys;
    const char *key_file;
    const char *admin_key_file;
    bool no_auth;
    const char *alias;
    uint32_t parallel;
    uint32_t queue;
    uint32_t connections;
    uint32_t default_new;
    double step_ms;
    double max_wait;
    int metrics_names; /* 0: flatkv, 1: vllm */
    uint32_t busy_status;
    uint32_t drafts;
    bool embeddings;
    uint32_t embed_tokens; /* 0: not given */
    const char *prefix_dir;
    uint64_t prefix_disk;
} serve_options;

static bool is_local(const char *host) {
    return strcmp(host, "127.0.0.1") == 0 || strcmp(host, "::1") == 0 || strcmp(host, "localhost") == 0;
}

static int add_key(serve_options *o, const char *key) {
    if (strlen(key) < 8) return kit_fail(EXIT_USAGE, "an API key must have at least 8 characters (got %zu)", strlen(key));
    if (o->http.n_keys == SERVE_MAX_KEYS)
        return kit_fail(EXIT_USAGE, "too many API keys; at most %d are supported", SERVE_MAX_KEYS);
    o->http.keys[o->http.n_keys++] = key;
    return EXIT_GOOD;
}

/* Collects the keys from the command line and the key file, one key per line. The keys point into `file`. */
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

/* Appends the admin key, the only line of its file. The key points into `file`. */
static int read_admin_key(serve_options *o, text_buffer *file) {
    if (o->admin_key_file == NULL) return EXIT_GOOD;
    int code = text_read(file, o->admin_key_file);
    if (code != EXIT_GOOD) return code;
    text_add(file, "", 1);
    char *key = strtok(file->bytes, "\r\n");
    if (key == NULL || strtok(NULL, "\r\n") != NULL)
        return kit_fail(EXIT_USAGE, "--admin-key-file %s must contain exactly one line", o->admin_key_file);
    o->http.has_admin_key = true;
    return add_key(o, key);
}

static int check_serve_options(serve_options *o) {
    if (o->port > 65535) return kit_fail(EXIT_USAGE, "--port must be at most 65535 (got %u)", o->port);
    o->http.any_host = o->no_auth;
    const char *cors = o->http.cors;
    const char *host = cors != NULL ? strstr(cors, "://") : NULL;
    if (cors != NULL && strcmp(cors, "*") != 0 &&
        (host == NULL || host == cors || host[3] == 0 || strpbrk(host + 3, "/, \t\r\n") != NULL))
        return kit_fail(EXIT_USAGE, "--cors %s is not an origin: expected SCHEME://HOST[:PORT] without a path, or *", cors);
    if (o->http.n_keys == 0 && !o->no_auth && !is_local(o->http.host))
        return kit_fail(EXIT_USAGE, "--host %s accepts connections from other machines: add --api-key KEY or --no-auth",
                        o->http.host);
    if (o->parallel == 0 || o->parallel >= o->model.chunk)
        return kit_fail(EXIT_USAGE, "--parallel must be at least 1 and less than --chunk, so at most %u (got %u)",
                        o->model.chunk - 1, o->parallel);
    if (o->embed_tokens != 0 && !o->embeddings) return kit_fail(EXIT_USAGE, "--embedding-tokens requires --embeddings");
    if (o->embeddings && o->model.device == FKV_BACKEND_MLX)
        return kit_fail(EXIT_USAGE, "--embeddings requires --device cpu: MLX runs only one model thread at a time");
    if (o->step_ms == 0.0) o->step_ms = o->model.device == FKV_BACKEND_MLX ? 40.0 : 100.0;
    if (o->drafts == NOT_GIVEN)
        o->drafts = o->model.device == FKV_BACKEND_MLX ? 0 : 3; /* the gain from drafts was measured only on CPUs */
    if (o->busy_status != 429 && o->busy_status != 503)
        return kit_fail(EXIT_USAGE, "--busy-status must be 429 or 503 (got %u)", o->busy_status);
    if (o->http.drain_s > MAX_DRAIN_SECONDS)
        return kit_fail(EXIT_USAGE, "--drain-seconds must be at most %d (got %g)", MAX_DRAIN_SECONDS, o->http.drain_s);
    for (const char *c = o->http.server_name; c != NULL && *c != 0; c++)
        if (*c < '!' || *c > '~')
            return kit_fail(EXIT_USAGE,
                            "--server-name may contain only visible ASCII characters, because it is sent in a header");
    o->http.busy_status = (int)o->busy_status;
    o->http.max_wait_s = o->max_wait;
    o->http.vllm_metrics = o->metrics_names == 1;
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
    const uint32_t spare =
        step > o->parallel ? step - o->parallel : 0; /* number of rows left for drafts if each answer uses one row */
    c.draft_tokens = o->drafts < spare ? o->drafts : spare;
    const uint32_t drafted =
        (o->parallel < 4 ? o->parallel : 4) * c.draft_tokens; /* with more than 4 answers, drafts rarely help */
    c.runner.max_logit_rows = o->parallel + (drafted < spare ? drafted : spare);
    c.step_ms = o->step_ms;
    c.max_queue = o->queue;
    c.max_wait_s = o->max_wait;
    c.default_new = o->default_new;
    return c;
}

static const char *file_name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL && slash[1] != 0 ? slash + 1 : path;
}

static void report_store(const fkv_store_stats *stats, const char *folder) {
    char used[32];
    char most[32];
    char buffers[32];
    (void)fprintf(stderr, "prefix store %s: %llu pages, %s of %s on disk; %s of memory for buffers and index\n", folder,
                  (unsigned long long)stats->usage.pages, kit_bytes(stats->usage.bytes, used),
                  kit_bytes(stats->usage.max_bytes, most), kit_bytes(stats->buffer_bytes + stats->usage.memory, buffers));
}

/* Opens the runner for embeddings: one sequence with 16-bit keys and values. *n_bytes receives its planned memory. */
static fkv_status open_embedder(serve_options *o, const fkv_model *model, fkv_runner **embedder, uint64_t *n_bytes) {
    const uint32_t context = fkv_model_about(model)->context;
    char bytes[32];
    fkv_runner_plan plan = {0};
    if (o->embed_tokens == 0) o->embed_tokens = context < 8192 ? context : 8192;
    fkv_runner_config config = model_options_runner(&o->model, o->embed_tokens);
    config.embeddings = true;
    if (config.max_step_tokens > config.max_tokens) config.max_step_tokens = config.max_tokens;
    fkv_status status = fkv_codec_parse("16/16", &config.k, &config.v);
    if (status == FKV_OK) status = fkv_runner_plan_make(model, &config, &plan);
    if (status == FKV_OK) status = fkv_runner_open(model, &config, embedder);
    *n_bytes = plan.total_bytes;
    if (status == FKV_OK)
        (void)fprintf(stderr, "embeddings of up to %u tokens, %s\n", o->embed_tokens, kit_bytes(plan.total_bytes, bytes));
    return status;
}

/* Loads the model, opens the engine and serves until shutdown is requested. Returns an exit code. */
static int serve_model(serve_options *o, server *http, fkv_prefix_store *store, fkv_model **model, fkv_engine **engine,
                       fkv_runner **embedder) {
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
    (void)fprintf(stderr, "cache of %u tokens for %u parallel requests, %s; up to %u tokens per request\n",
                  config.runner.max_tokens, o->parallel, kit_bytes(stats.plan.total_bytes, bytes), stats.max_request_tokens);
    model_report_chat(*model);
    if (o->prefix_dir != NULL) report_store(&stats.store, o->prefix_dir);
    uint64_t embedder_bytes = 0;
    if (o->embeddings) status = open_embedder(o, *model, embedder, &embedder_bytes);
    if (status != FKV_OK) return cli_fail_status(status);
    const serve_subject subject = {.model = *model,
                                   .engine = *engine,
                                   .embedder = *embedder,
                                   .embed_tokens = o->embed_tokens,
                                   .model_name = o->alias != NULL ? o->alias : file_name_of(o->model.model),
                                   .parallel = o->parallel,
                                   .base_bytes = before.anonymous_bytes + embedder_bytes};
    return serve_run(http, &subject) ? EXIT_GOOD : kit_fail(EXIT_FAILED, "out of memory starting the server's event loop");
}

/* Binds the address before loading the model, so that an address in use is reported at once. */
static int serve(serve_options *o) {
    fkv_model *model = NULL;
    fkv_engine *engine = NULL;
    fkv_runner *embedder = NULL;
    fkv_prefix_store store = {0};
    server *http = serve_open(&o->http);
    if (http == NULL)
        return kit_fail(EXIT_FAILED, "cannot listen on %s port %u: %s; choose another --port (0 selects any free port) or --host",
                        o->http.host, o->port, errno == EINVAL ? "the host name has no known address" : strerror(errno));
    int code = serve_model(o, http, &store, &model, &engine, &embedder);
    serve_close(http);
    fkv_runner_close(embedder);
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
                       .busy_status = 429,
                       .drafts = NOT_GIVEN,
                       .prefix_disk = UINT64_C(20) << 30};
    kit_option common[N_MODEL_OPTIONS];
    fkv_engine_config usual = fkv_engine_config_default();
    o.model.codecs.codecs[0] = codec_of_runner(&usual.runner);
    o.model.model = NULL;
    model_options_list(&o.model, common);
    model_options_drop(common, "seed");
    model_options_drop(common, "json");
    const kit_option own[] = {
        KIT_HEADING("Network and access"),
        {"host", 0, OPTION_TEXT, &o.http.host, 0, "ADDRESS", "address to listen on (default 127.0.0.1, this machine only)"},
        {"port", 0, OPTION_U32, &o.port, 65535, "N", "port to listen on; 0 selects any free port (default 8080)"},
        {"api-key", 0, OPTION_TEXTS, &o.keys, 0, "KEY", "require this key; repeatable. Each key is a separate tenant"},
        {"api-key-file", 0, OPTION_TEXT, &o.key_file, 0, "FILE", "file with API keys, one per line"},
        {"admin-key-file", 0, OPTION_TEXT, &o.admin_key_file, 0, "FILE",
         "file with the admin key, which grants access to /metrics and /flatkv/state if API keys are required"},
        {"cors", 0, OPTION_TEXT, &o.http.cors, 0, "ORIGIN",
         "let web pages of this origin, such as https://app.example, use the server; * allows all pages (default: none)"},
        {"no-auth", 0, OPTION_FLAG, &o.no_auth, 0, NULL, "accept connections from other machines without an API key"},
        {"alias", 0, OPTION_TEXT, &o.alias, 0, "NAME", "model name in responses (default: name of the model file)"},
        {"connections", 0, OPTION_U32, &o.connections, 1 << 20, "N",
         "maximum number of open connections; further connections receive status 503 (default: --parallel + --queue + 64)"},
        {"request-seconds", 0, OPTION_REAL, &o.http.request_s, 0, "S",
         "close a connection that is idle or has not sent a complete request for S seconds (default 60)"},
        KIT_HEADING("Load balancing"),
        {"server-name", 0, OPTION_TEXT, &o.http.server_name, 0, "NAME", "send this name in the header x-flatkv-server"},
        {"drain-seconds", 0, OPTION_REAL, &o.http.drain_s, 0, "S",
         "after SIGTERM, report 503 on /ready and /health but accept requests for S more seconds (default 0)"},
        {"busy-status", 0, OPTION_U32, &o.busy_status, 999, "N",
         "status of requests rejected because of overload: 429 or 503 (default 429)"},
        {"metrics-names", 0, OPTION_CHOICE, &o.metrics_names, 0, "flatkv|vllm",
         "vllm: /metrics also contains vLLM's metrics under their original names (default flatkv)"},
        KIT_HEADING("Scheduling"),
        {"parallel", 0, OPTION_COUNT, &o.parallel, 1024, "N", "number of answers decoded at the same time (default 8)"},
        {"queue", 0, OPTION_COUNT, &o.queue, 1 << 20, "N", "maximum number of queued requests (default 256)"},
        {"max-wait", 0, OPTION_REAL, &o.max_wait, 0, "SECONDS",
         "reject a request whose predicted queueing time is longer than this; 0 disables the limit (default 120)"},
        {"default-new", 0, OPTION_COUNT, &o.default_new, INT32_MAX, "N",
         "maximum number of new tokens for requests without max_tokens (default 1024)"},
        {"draft-tokens", 0, OPTION_U32, &o.drafts, FKV_MAX_DRAFT, "N",
         "n-gram speculative decoding: draft up to N tokens per step; does not change the output;\n0 disables (default 3; 0 on MLX)"},
        {"step-ms", 0, OPTION_REAL, &o.step_ms, 0, "MS",
         "target time of a step that includes prefill, in milliseconds; bounds the delay between tokens (default 100; 40 on MLX)"},
        KIT_HEADING("Embeddings"),
        {"embeddings", 0, OPTION_FLAG, &o.embeddings, 0, NULL,
         "also serve /v1/embeddings, with a separate 16-bit cache for one text"},
        {"embedding-tokens", 0, OPTION_COUNT, &o.embed_tokens, INT32_MAX, "N",
         "maximum number of tokens of an embedded text (default 8192, or the model's context if that is shorter)"},
        KIT_HEADING("Prefix store"),
        {"prefix-dir", 0, OPTION_TEXT, &o.prefix_dir, 0, "DIR",
         "also store prefixes in this folder, so that they survive eviction and restarts"},
        {"prefix-disk", 0, OPTION_SIZE, &o.prefix_disk, INT64_MAX, "SIZE",
         "maximum size of the prefix store; the least recently used prefixes are deleted first (default 20G)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    text_buffer file = {0};
    text_buffer admin_file = {0};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    cli_name_sequences("--parallel");
    code = read_keys(&o, &file);
    if (code == EXIT_GOOD) code = read_admin_key(&o, &admin_file);
    if (code == EXIT_GOOD) code = check_serve_options(&o);
    if (code == EXIT_GOOD) code = pull_offer(o.model.model);
    if (code == EXIT_GOOD) code = serve(&o);
    text_free(&file);
    text_free(&admin_file);
    return code;
}
