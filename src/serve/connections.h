/* Limits the number of open connections and the time that a client may take to send a request, and validates all input.
 *
 * evhttp itself has no such limits. Every accepted connection has an entry in this module. Connections beyond the limit are
 * answered with 503 and closed before evhttp sees them. One client address may use all connections except a reserve for other
 * addresses; further connections from this address are answered with 503. A connection that sends no complete request within
 * `request_s`, or no complete header within `header_s`, is closed. Input that violates HTTP (see http_filter.h) is answered
 * with a JSON error. If accept() fails because descriptors or memory run out, no connections are accepted for a moment, and at
 * most one line per second is logged. All functions must be called on the event-loop thread.
 */
#ifndef FKV_SERVE_CONNECTIONS_H
#define FKV_SERVE_CONNECTIONS_H

#include <event2/http.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct connections connections;

typedef struct connections_config {
    uint32_t max;      /* maximum number of open connections */
    size_t max_header; /* maximum size of a request header, in bytes */
    size_t max_body;   /* maximum size of a request body, in bytes */
    double header_s;   /* seconds within which a client must send a complete header */
    double request_s;  /* seconds within which a client must send a complete request; also the keep-alive timeout */
} connections_config;

/* Starts tracking the connections of `http`, which is already listening on `socket`. Returns NULL if out of memory. The result
 * must be closed after `http` is freed and before the event base is freed. */
connections *connections_open(struct event_base *base, struct evhttp *http, struct evhttp_bound_socket *socket,
                              const connections_config *config);
void connections_close(connections *c);

/* Record that a complete request was received, and that its response was sent. */
void connections_request_received(connections *c, struct evhttp_request *req);
void connections_reply_sent(connections *c, struct evhttp_request *req);

/* Stops listening: connections are neither accepted nor rejected from now on. */
void connections_stop_listening(connections *c);

uint32_t connections_count(connections *c);
uint32_t connections_awaiting_reply(connections *c); /* returns the number of connections whose response is not complete */
uint64_t connections_rejected(const connections *c);

#endif
