/* HTTP server for one or more engines: one libevent loop for all connections.
 *
 * The event-loop thread owns all connections, exchanges and metrics. Worker threads parse request bodies, render chat templates
 * and tokenize prompts, so that no request delays the others. The engine threads only append event records to exchanges while
 * holding the server's lock. The worker threads and the engine threads wake the event loop through a pipe. Client input is never
 * logged.
 */
#ifndef FKV_SERVE_H
#define FKV_SERVE_H

#include <flatkv/engine.h>

enum { SERVE_MAX_KEYS = 64, SERVE_MAX_MODELS = 8 };

typedef struct serve_config {
    const char *host;
    uint16_t port;                    /* port number; 0 selects a free port, which is printed */
    const char *keys[SERVE_MAX_KEYS]; /* API keys, one per tenant; if there are none, clients are not authenticated */
    uint32_t n_keys;
    bool has_admin_key; /* true if the last key is the admin key; only the admin key gives access to /metrics and /flatkv/state */
    const char *cors;  /* origin whose pages may use the server, or "*" for all origins; NULL allows only the server's own page */
    bool any_host;     /* true to accept any Host header if no keys are configured */
    size_t max_body;   /* maximum size of a request body, in bytes */
    size_t max_unread; /* number of unsent bytes at which a slow client is disconnected */
    uint32_t max_connections; /* maximum number of open connections */
    double request_s;         /* seconds within which a client must send a complete request; also the keep-alive timeout */
    double ping_s;            /* seconds between keep-alive comments in a stream */
    double drain_s;           /* seconds after SIGTERM during which requests are still accepted while /ready reports 503 */
    double shutdown_s;        /* grace period for running requests after the listener is closed, in seconds */
    double max_wait_s; /* /ready reports 503 while the predicted queueing time exceeds this number of seconds; 0 means no limit */
    int busy_status;   /* HTTP status of a request that is rejected because of overload: 429 or 503 */
    bool vllm_metrics; /* true if /metrics also contains metrics under the names that vLLM uses */
    const char *server_name; /* value of the header x-flatkv-server, or NULL for no header */
} serve_config;

serve_config serve_config_default(void);

/* Returns whether the server supports JSON schemas and forced tool calls, which need a build with llguidance. */
bool serve_supports_schemas(void);

typedef struct server server;

/* Starts listening. Until serve_run() is called, a separate thread answers all requests with 503, so the caller can load the
 * model meanwhile. Returns NULL and sets errno if the address cannot be bound; EINVAL means that the host name is unknown. */
server *serve_open(const serve_config *config);

/* One model and its engine. */
typedef struct serve_subject {
    const fkv_model *model;
    fkv_engine *engine;
    const char *model_name; /* model name in /v1/models and in responses */
    fkv_runner *embedder;   /* runner for /v1/embeddings, opened with `embeddings`; if NULL, the server rejects such requests */
    uint32_t parallel;      /* number of sequences that are decoded concurrently */
    uint32_t embed_tokens;  /* maximum number of tokens in an embedded text */
} serve_subject;

/* Serves requests until SIGINT or SIGTERM. Call at most once per server. subjects: [n_subjects], 1 to SERVE_MAX_MODELS models
 * with different names. base_bytes: anonymous process memory (program, weights, vocabulary) before the engines were opened.
 * Returns false if out of memory. */
bool serve_run(server *s, const serve_subject *subjects, uint32_t n_subjects, uint64_t base_bytes);

void serve_close(server *s); /* must be called before the engines are closed; s may be NULL */

#endif
