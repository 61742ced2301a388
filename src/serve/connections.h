/* The connections that are open: how many there may be, and how long one may take to send a request.
 *
 * evhttp has no bound of its own. Every connection has an entry here from its accept on; beyond the bound a client is told 503
 * and let go before evhttp sees it. One that sends no whole request for `request_s` (slow on purpose, or idle) is closed.
 * Belongs to the loop's thread.
 */
#ifndef FKV_SERVE_CONNECTIONS_H
#define FKV_SERVE_CONNECTIONS_H

#include <event2/http.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct connections connections;

typedef struct connections_config {
    uint32_t max;     /* open at once */
    size_t max_ahead; /* bytes of one that are read before evhttp takes them: at least the largest body */
    double request_s; /* for a whole request, and between two of a connection */
} connections_config;

/* NULL: no memory. `http` listens on `socket` already. Closed after `http` is freed and before its base is. */
connections *connections_open(struct event_base *base, struct evhttp *http, struct evhttp_bound_socket *socket,
                              const connections_config *config);
void connections_close(connections *c);

/* A request came whole, its answer was sent. */
void connections_asked(connections *c, struct evhttp_request *req);
void connections_answered(connections *c, struct evhttp_request *req);

/* Nobody else is let in, nor told why. */
void connections_stop_listening(connections *c);

uint32_t connections_count(connections *c);
uint32_t connections_unanswered(connections *c); /* that wait for an answer, or for the rest of one */
uint64_t connections_refused(const connections *c);

#endif
