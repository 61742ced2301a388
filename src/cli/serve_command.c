/* flatkv serve: HTTP server with the OpenAI, Anthropic and Ollama APIs. This file parses the options; serve_models.c opens the
 * models. */
#include "cli.h"
#include "pull_model.h"
#include "serve_models.h"
#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: flatkv serve -m MODEL [-m MODEL ...] [--port N] [options]\n"
    "Serves models over HTTP: /v1/chat/completions, /v1/completions, /v1/messages, /metrics and other endpoints.\n"
    "Without an API key only clients on this machine are accepted.\n";

static const uint32_t NOT_GIVEN = UINT32_MAX;
static const double MAX_DRAIN_SECONDS = 86400.0;

typedef struct serve_options {
    serve_models models;
    kit_texts words;   /* values of -m */
    kit_texts aliases; /* values of --alias */
    serve_config http;
    uint32_t port;
    kit_texts keys;
    const char *key_file;
    const char *admin_key_file;
    bool no_auth;
    uint32_t connections;
    int metrics_names; /* 0: flatkv, 1: vllm */
    uint32_t busy_status;
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

/* Collects the API keys from the command line and from the key file, which has one key per line. The keys point into `file`. */
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

/* Appends the admin key, which is the only line of its file. The key points into `file`. */
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
    const model_options *m = &o->models.options;
    engine_options *e = &o->models.engine;
    if (e->parallel == 0 || e->parallel >= m->chunk)
        return kit_fail(EXIT_USAGE, "--parallel must be from 1 to %u, which is one less than --chunk (got %u)", m->chunk - 1,
                        e->parallel);
    if (m->context != 0 && m->context <= e->parallel)
        return kit_fail(EXIT_USAGE,
                        "-c must be more than --parallel (%u), because a step decodes one token of each answer (got %u)",
                        e->parallel, m->context);
    if (e->prefix_redis == NULL && (e->prefix_password_file != NULL || e->prefix_secret_file != NULL))
        return kit_fail(EXIT_USAGE, "--prefix-password-file and --prefix-secret-file require --prefix-redis");
    if (e->prefix_ca_file != NULL && (e->prefix_redis == NULL || strncmp(e->prefix_redis, "rediss:", 7) != 0))
        return kit_fail(EXIT_USAGE, "--prefix-ca-file requires --prefix-redis with rediss://");
    if (e->embed_tokens != 0 && !e->embeddings) return kit_fail(EXIT_USAGE, "--embedding-tokens requires --embeddings");
    if (e->embeddings && m->device == FKV_BACKEND_MLX)
        return kit_fail(EXIT_USAGE, "--embeddings requires --device cpu: MLX runs only one model thread at a time");
    if (e->step_ms == 0.0) e->step_ms = m->device == FKV_BACKEND_MLX ? 40.0 : 100.0;
    if (e->drafts == NOT_GIVEN)
        e->drafts = m->device == FKV_BACKEND_MLX ? 0 : 3; /* drafts are off on MLX, because they were measured only on CPUs */
    if (o->busy_status != 429 && o->busy_status != 503)
        return kit_fail(EXIT_USAGE, "--busy-status must be 429 or 503 (got %u)", o->busy_status);
    if (o->http.drain_s > MAX_DRAIN_SECONDS)
        return kit_fail(EXIT_USAGE, "--drain-seconds must be at most %g (got %g)", MAX_DRAIN_SECONDS, o->http.drain_s);
    for (const char *c = o->http.server_name; c != NULL && *c != 0; c++)
        if (*c < '!' || *c > '~')
            return kit_fail(EXIT_USAGE,
                            "--server-name may contain only visible ASCII characters, because it is sent in a header");
    o->http.busy_status = (int)o->busy_status;
    o->http.max_wait_s = e->max_wait;
    o->http.vllm_metrics = o->metrics_names == 1;
    o->http.port = (uint16_t)o->port;
    if (o->connections == 0) o->connections = e->parallel + e->queue + 64;
    o->http.max_connections = o->connections;
    return serve_models_name(&o->models, &o->words, &o->aliases);
}

/* Opens the models and serves until shutdown is requested. Returns an exit code. */
static int serve_until_shutdown(serve_models *models, server *http) {
    serve_subject subjects[SERVE_MAX_MODELS];
    int code = serve_models_open(models);
    if (code != EXIT_GOOD) return code;
    serve_models_subjects(models, subjects);
    return serve_run(http, subjects, models->n, models->base_bytes)
               ? EXIT_GOOD
               : kit_fail(EXIT_FAILED, "out of memory starting the server's event loop");
}

/* Binds the address before loading the model, so that an address in use is reported at once. */
static int serve(serve_options *o) {
    server *http = serve_open(&o->http);
    if (http == NULL)
        return kit_fail(EXIT_FAILED, "cannot listen on %s port %u: %s; choose another --port (0 selects any free port) or --host",
                        o->http.host, o->port, errno == EINVAL ? "the host name has no known address" : strerror(errno));
    int code = serve_until_shutdown(&o->models, http);
    serve_close(http);
    serve_models_close(&o->models);
    return code;
}

int cli_serve(int argc, char **argv) {
    static serve_options o; /* static, because the struct contains large arrays */
    o.models.options = model_options_default();
    o.models.engine = (engine_options){.parallel = 8,
                                       .queue = 256,
                                       .default_new = 1024,
                                       .max_wait = 120.0,
                                       .drafts = NOT_GIVEN,
                                       .prefix_disk = UINT64_C(20) << 30};
    o.http = serve_config_default();
    o.port = 8080;
    o.busy_status = 429;
    model_options *m = &o.models.options;
    engine_options *e = &o.models.engine;
    kit_option common[N_MODEL_OPTIONS];
    m->model = NULL;
    model_options_list(m, common);
    model_options_repeat(common, &o.words);
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
        {"alias", 0, OPTION_TEXTS, &o.aliases, 0, "NAME",
         "model name in requests and replies; repeatable, in the order of -m (default: name of the model or of its file)"},
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
        {"parallel", 0, OPTION_COUNT, &e->parallel, 1024, "N", "number of answers decoded at the same time (default 8)"},
        {"queue", 0, OPTION_COUNT, &e->queue, 1 << 20, "N", "maximum number of queued requests (default 256)"},
        {"max-wait", 0, OPTION_REAL, &e->max_wait, 0, "SECONDS",
         "reject a request whose predicted queueing time is longer than this; 0 disables the limit (default 120)"},
        {"default-new", 0, OPTION_COUNT, &e->default_new, INT32_MAX, "N",
         "maximum number of new tokens for requests without max_tokens (default 1024)"},
        {"draft-tokens", 0, OPTION_U32, &e->drafts, FKV_MAX_DRAFT, "N",
         "n-gram speculative decoding: draft up to N tokens per step; does not change the output;\n0 disables (default 3; 0 on MLX)"},
        {"step-ms", 0, OPTION_REAL, &e->step_ms, 0, "MS",
         "target time of a step that includes prefill, in milliseconds; bounds the delay between tokens (default 100; 40 on MLX)"},
        KIT_HEADING("Embeddings"),
        {"embeddings", 0, OPTION_FLAG, &e->embeddings, 0, NULL,
         "also serve /v1/embeddings, with a separate 16-bit cache for one text"},
        {"embedding-tokens", 0, OPTION_COUNT, &e->embed_tokens, INT32_MAX, "N",
         "maximum number of tokens of an embedded text (default 8192, or the model's context if that is shorter)"},
        KIT_HEADING("Prefix store"),
        {"prefix-dir", 0, OPTION_TEXT, &e->prefix_dir, 0, "DIR",
         "also store prefixes in this folder, so that they survive eviction and restarts"},
        {"prefix-disk", 0, OPTION_SIZE, &e->prefix_disk, INT64_MAX, "SIZE",
         "maximum size of the prefix store; the least recently used prefixes are deleted first (default 20G)"},
        {"prefix-redis", 0, OPTION_TEXT, &e->prefix_redis, 0, "URL",
         "share prefixes with other servers through Redis: redis://[USER@]HOST:PORT[,HOST:PORT...], or rediss:// for TLS; with --prefix-dir, the folder is "
         "the nearer cache"},
        {"prefix-ca-file", 0, OPTION_TEXT, &e->prefix_ca_file, 0, "FILE",
         "certificates in PEM format that are trusted for rediss:// (default: those of the system)"},
        {"prefix-password-file", 0, OPTION_TEXT, &e->prefix_password_file, 0, "FILE", "file with the Redis password"},
        {"prefix-timeout", 0, OPTION_REAL, &e->prefix_timeout_ms, 0, "MS",
         "milliseconds after which a Redis server that does not reply is not used until it responds again (default 100)"},
        {"prefix-secret-file", 0, OPTION_TEXT, &e->prefix_secret_file, 0, "FILE",
         "file with at least 16 random bytes, the same on all servers; encrypts the pages on Redis"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    text_buffer file = {0};
    text_buffer admin_file = {0};
    int code = EXIT_GOOD;
    if (!model_options_parse(m, usage, tables, argc, argv, &code)) return code;
    cli_name_sequences("--parallel");
    code = read_keys(&o, &file);
    if (code == EXIT_GOOD) code = read_admin_key(&o, &admin_file);
    if (code == EXIT_GOOD) code = check_serve_options(&o);
    for (uint32_t i = 0; i < o.models.n && code == EXIT_GOOD; i++) code = pull_offer(o.models.slots[i].word);
    if (code == EXIT_GOOD) code = serve(&o);
    text_free(&file);
    text_free(&admin_file);
    return code;
}
