/* The HTTP server over an engine: one libevent loop for all connections, and the engine's thread.
 *
 * Who owns what: the loop's thread owns every connection, exchange and figure; the engine's thread only appends records to an
 * exchange's mail, under the server's lock, and wakes the loop through a pipe. Nothing a client sends reaches a log.
 */
#ifndef FKV_SERVE_H
#define FKV_SERVE_H

#include <flatkv/engine.h>

enum { SERVE_MAX_KEYS = 64 };

typedef struct serve_config {
    const char *host;
    uint16_t port;                    /* 0: any; the one taken is printed */
    const char *keys[SERVE_MAX_KEYS]; /* each is a tenant of its own; none: everybody may ask */
    uint32_t n_keys;
    bool any_host;            /* answers to any name in Host without a key */
    size_t max_body;          /* bytes of a request */
    size_t max_unread;        /* bytes that wait for a client that does not read; then it is dropped */
    uint32_t max_connections; /* open at once */
    double request_s;         /* for a whole request, and between two of a connection */
    double ping_s;            /* between comments in a stream that has nothing to say */
    double shutdown_s;        /* what runs may take to end after SIGTERM */
} serve_config;

serve_config serve_config_default(void);

typedef struct server server;

/* Listens, and answers 503 by a thread of its own until serve_run(): the model may be loaded meanwhile. NULL: the address could
 * not be had; errno says why, EINVAL that no such name is known. */
server *serve_open(const serve_config *config);

typedef struct serve_subject {
    const fkv_model *model;
    fkv_engine *engine;
    const char *model_name; /* what /v1/models calls it */
    uint64_t base_bytes;    /* memory of the process before the engine was opened: program, weights, vocabulary */
} serve_subject;

/* Serves until SIGINT or SIGTERM. Once; false: there was no memory for it. */
bool serve_run(server *s, const serve_subject *subject);

void serve_close(server *s); /* before the engine; NULL is allowed */

#endif
