/* See connections.h.
 *
 * evhttp does not report connections that close before their first request. Each entry therefore holds a reference to the
 * connection's bufferevent. evhttp clears the callbacks of the bufferevent when it frees the connection. An entry whose
 * bufferevent has no callbacks releases its reference, which closes the socket. Entries are checked every second and before a
 * connection is rejected.
 */
#include "connections.h"

#include "http_filter.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_LINGER_BYTES = 256 << 10, /* maximum number of bytes to discard after an error response before the connection is closed */
    ADDRESS_RESERVE = 64 /* number of connections that a single address must leave free for other addresses; at most a quarter of
                            all connections */
};
static const double LINGER_S = 1.0; /* seconds that a client may take to read an error response */

/* Input state of a connection. Its address must not change, because evbuffer callbacks hold pointers to it. */
typedef struct validated_input {
    struct bufferevent *io;
    http_filter *filter;
    struct evbuffer *raw; /* received bytes that have not been validated yet */
    bool busy;            /* true while the input callback itself modifies the input buffer */
    uint64_t n_replied;   /* number of responses sent */
    int error;            /* HTTP status of the response to the first protocol violation; 0 if there was none */
    const char *message;
    double rejected_at;  /* time when the error response was sent; 0 if none was sent */
    size_t n_discarded;  /* number of bytes received after the violation */
    double header_since; /* time when the first bytes of an incomplete request header arrived; 0 if no header is incomplete */
} validated_input;

typedef struct entry {
    struct bufferevent *io;
    validated_input *input;
    double since;        /* time when the connection was accepted or the last response was sent */
    bool awaiting_reply; /* true while a received request has not been answered completely */
    bool served;         /* true if at least one response was sent */
    uint64_t address;    /* hash of the peer address; 0 if it is not known yet */
} entry;

struct connections {
    struct evconnlistener *listener; /* NULL after connections_stop_listening() */
    struct event *reject; /* while the connection limit is reached, answers each new connection with 503 and closes it */
    struct event *tick;
    struct event *resume; /* timer that ends a pause after a failed accept() */
    struct event *check;  /* checks the peer addresses of new connections, which are not known yet in on_accept() */
    bool paused;          /* true after accept() failed: connections are neither accepted nor rejected for a while */
    double warned_at;     /* time of the last log line about a failed accept() */
    connections *next;    /* next object in the list `all` */
    double request_s;
    double header_s;
    size_t max_header;
    size_t max_body;
    uint64_t n_rejected;
    uint32_t max;
    uint32_t n;
    entry entries[];
};

/* List of all open `connections` objects. The error callback of a listener searches this list for the object of the listener,
 * because the listener's user-data pointer belongs to evhttp. */
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static connections *all;

static double monotonic_seconds(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool was_freed(struct bufferevent *io) {
    bufferevent_data_cb on_read = NULL;
    bufferevent_data_cb on_write = NULL;
    bufferevent_event_cb on_event = NULL;
    void *user = NULL;
    bufferevent_getcb(io, &on_read, &on_write, &on_event, &user);
    return on_event == NULL;
}

/* ---- input validation ---- */

static const char *reason_phrase(int status) {
    return status == 413   ? "Content Too Large"
           : status == 417 ? "Expectation Failed"
           : status == 431 ? "Request Header Fields Too Large"
           : status == 501 ? "Not Implemented"
           : status == 503 ? "Service Unavailable"
                           : "Bad Request";
}

/* Sends the error response for a violation and ends the output. Further input is read and discarded for a while, because closing
 * a socket with unread input would reset the connection and lose the response. */
static void send_violation(validated_input *in) {
    char body[256];
    char reply[512];
    const int fd = bufferevent_getfd(in->io);
    const int n = snprintf(body, sizeof body, "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":%d}}\n",
                           in->message, in->error < 500 ? "invalid_request_error" : "server_error", in->error);
    const int n_reply = snprintf(reply, sizeof reply,
                                 "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nConnection: close\r\n"
                                 "Content-Length: %d\r\n\r\n%s",
                                 in->error, reason_phrase(in->error), n, body);
    (void)send(fd, reply, (size_t)n_reply, 0);
    (void)shutdown(fd, SHUT_WR);
    in->rejected_at = monotonic_seconds();
}

/* Validates the new bytes in the input buffer and leaves only valid bytes in the buffer. */
static void on_input(struct evbuffer *buffer, const struct evbuffer_cb_info *info, void *user) {
    validated_input *in = user;
    if (in->busy || info->n_added == 0) return;
    /* Body bytes need no validation and stay in the buffer. The code below moves all earlier bytes out and back; doing so for
     * every fragment would take time quadratic in the size of the body. */
    if (in->error == 0 && evbuffer_get_length(in->raw) == 0 && http_filter_pass(in->filter, info->n_added)) return;
    in->busy = true;
    struct evbuffer *valid = evbuffer_new();
    const size_t n_old = evbuffer_get_length(buffer) - info->n_added;
    bool good = valid != NULL && (n_old == 0 || evbuffer_remove_buffer(buffer, valid, n_old) == (int)n_old) &&
                evbuffer_add_buffer(in->raw, buffer) == 0;
    if (good && in->error == 0) in->error = http_filter_run(in->filter, in->raw, valid, &in->message);
    if (in->error != 0) {
        in->n_discarded += evbuffer_get_length(in->raw);
        (void)evbuffer_drain(in->raw, evbuffer_get_length(in->raw));
    }
    good = good && evbuffer_add_buffer(buffer, valid) == 0;
    if (valid != NULL) evbuffer_free(valid);
    in->busy = false;
    const bool partial = http_filter_in_header(in->filter) || evbuffer_get_length(in->raw) > 0;
    if (!partial) in->header_since = 0.0;
    if (partial && in->header_since <= 0.0) in->header_since = monotonic_seconds();
    if (in->error != 0 && in->rejected_at <= 0.0 && in->n_replied == http_filter_requests(in->filter)) send_violation(in);
    if (!good || in->n_discarded > MAX_LINGER_BYTES) (void)shutdown(bufferevent_getfd(in->io), SHUT_RDWR);
}

static void close_input(validated_input *in) {
    if (in == NULL) return;
    if (in->io != NULL) (void)evbuffer_remove_cb(bufferevent_get_input(in->io), on_input, in);
    http_filter_close(in->filter);
    if (in->raw != NULL) evbuffer_free(in->raw);
    free(in);
}

static validated_input *open_input(const connections *c, struct bufferevent *io) {
    validated_input *in = calloc(1, sizeof *in);
    if (in == NULL) return NULL;
    in->filter = http_filter_open(c->max_header, c->max_body);
    in->raw = evbuffer_new();
    if (in->filter != NULL && in->raw != NULL && evbuffer_add_cb(bufferevent_get_input(io), on_input, in) != NULL) {
        in->io = io;
        return in;
    }
    close_input(in);
    return NULL;
}

/* ---- accepting ---- */

/* Switches between accepting and rejecting new connections. */
static void update_listener(connections *c) {
    if (c->listener == NULL) return;
    if (c->paused) {
        (void)event_del(c->reject);
        (void)evconnlistener_disable(c->listener);
    } else if (c->n < c->max) {
        (void)event_del(c->reject);
        (void)evconnlistener_enable(c->listener);
    } else {
        (void)evconnlistener_disable(c->listener);
        (void)event_add(c->reject, NULL);
    }
}

static void remove_closed(connections *c) {
    uint32_t before = c->n;
    for (uint32_t i = 0; i < c->n;) {
        if (was_freed(c->entries[i].io)) {
            close_input(c->entries[i].input);
            (void)bufferevent_decref(c->entries[i].io);
            c->entries[i] = c->entries[--c->n];
        } else {
            i++;
        }
    }
    if (c->n < before) update_listener(c);
}

/* Returns true if the client has taken too long to send a request, or to read an error response. */
static bool is_overdue(const connections *c, const entry *e, double now) {
    const double header_s = c->header_s < c->request_s ? c->header_s : c->request_s;
    if (e->input->rejected_at > 0.0) return now - e->input->rejected_at > LINGER_S;
    if (e->awaiting_reply) return false;
    if (e->input->header_since > 0.0 && now - e->input->header_since > header_s) return true;
    const bool silent = !e->served && e->input->header_since <= 0.0 && http_filter_at_start(e->input->filter);
    return now - e->since > (silent ? header_s : c->request_s);
}

static void on_tick(evutil_socket_t fd, short what, void *user) {
    connections *c = user;
    double now = monotonic_seconds();
    (void)fd, (void)what;
    remove_closed(c);
    for (uint32_t i = 0; i < c->n; i++) {
        const entry *e = &c->entries[i];
        if (is_overdue(c, e, now))
            (void)shutdown(bufferevent_getfd(e->io), SHUT_RDWR); /* evhttp then detects the end of the connection and frees it */
    }
}

/* Returns a hash of the peer's IP address, never 0. */
static uint64_t peer_address(int fd) {
    struct sockaddr_storage peer = {0};
    socklen_t n_peer = sizeof peer;
    uint64_t hash = 1;
    const unsigned char *bytes = NULL;
    size_t n = 0;
    if (getpeername(fd, (struct sockaddr *)&peer, &n_peer) == 0 && peer.ss_family == AF_INET) {
        bytes = (const unsigned char *)&((const struct sockaddr_in *)&peer)->sin_addr;
        n = sizeof(struct in_addr);
    } else if (peer.ss_family == AF_INET6) {
        const struct in6_addr *address = &((const struct sockaddr_in6 *)&peer)->sin6_addr;
        const bool mapped = IN6_IS_ADDR_V4MAPPED(address);
        bytes = (const unsigned char *)address + (mapped ? 12 : 0);
        n = mapped ? 4 : 8; /* only the first 64 bits are hashed, because an IPv6 client usually controls a whole /64 network */
    }
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 0x100000001B3u;
    return hash != 0 ? hash : 1;
}

/* Rejects new connections from an address that has too many open connections. */
static void on_check(evutil_socket_t fd, short what, void *user) {
    connections *c = user;
    const uint32_t reserve = c->max / 4 < ADDRESS_RESERVE ? c->max / 4 : ADDRESS_RESERVE;
    (void)fd, (void)what;
    remove_closed(c);
    for (uint32_t i = 0; i < c->n; i++) {
        entry *e = &c->entries[i];
        uint32_t n_same = 0;
        if (e->address != 0 || bufferevent_getfd(e->io) < 0) continue;
        e->address = peer_address(bufferevent_getfd(e->io));
        for (uint32_t k = 0; k < c->n; k++) n_same += c->entries[k].address == e->address && c->entries[k].input->error == 0;
        if (n_same <= c->max - reserve || e->input->error != 0) continue;
        e->input->error = 503;
        e->input->message = "too many connections from this address";
        c->n_rejected++;
        send_violation(e->input);
    }
}

/* Handles a failed accept(). The connection stays in the backlog, so the listening socket stays readable. Without a pause, the
 * event loop would retry immediately, use a whole core and flood the log. */
static void pause_accepting(connections *c, int error) {
    const struct timeval pause = {0, 100000};
    const double now = monotonic_seconds();
    if (now - c->warned_at >= 1.0) {
        c->warned_at = now;
        (void)fprintf(stderr, "flatkv: cannot accept a connection: %s%s\n", strerror(error),
                      error == EMFILE ? "; raise the open-file limit (ulimit -n) or lower --connections" : "");
    }
    c->paused = event_add(c->resume, &pause) == 0;
    update_listener(c);
}

static void on_resume(evutil_socket_t fd, short what, void *user) {
    connections *c = user;
    (void)fd, (void)what;
    c->paused = false;
    remove_closed(c);
    update_listener(c);
}

static void on_accept_error(struct evconnlistener *listener, void *user) {
    const int error = EVUTIL_SOCKET_ERROR();
    (void)user;
    (void)pthread_mutex_lock(&all_lock);
    connections *c = all;
    while (c != NULL && c->listener != listener) c = c->next;
    (void)pthread_mutex_unlock(&all_lock);
    if (c != NULL) pause_accepting(c, error);
}

static struct bufferevent *on_accept(struct event_base *base, void *user) {
    connections *c = user;
    struct bufferevent *io = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
    if (io == NULL || c->n == c->max) return io;
    validated_input *input = open_input(c, io);
    if (input == NULL) {
        bufferevent_free(io);
        return NULL;
    }
    bufferevent_incref(io);
    bufferevent_setwatermark(io, EV_READ, 0, c->max_body + 2 * c->max_header);
    c->entries[c->n++] = (entry){.io = io, .input = input, .since = monotonic_seconds()};
    event_active(c->check, EV_TIMEOUT, 0);
    if (c->n == c->max) update_listener(c);
    return io;
}

static void on_rejected_connection(evutil_socket_t listening, short what, void *user) {
    static const char reply[] =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        "Connection: close\r\nContent-Length: 91\r\n\r\n"
        "{\"error\":{\"message\":\"too many connections\",\"type\":\"server_error\",\"param\":null,\"code\":503}}\n";
    connections *c = user;
    (void)what;
    remove_closed(c);
    if (c->n < c->max) return; /* a connection slot is free again, so the listener accepts the connection */
    int fd = accept(listening, NULL, NULL);
    if (fd < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) pause_accepting(c, errno);
        return;
    }
    (void)evutil_make_socket_nonblocking(fd);
    char bytes[4096];
    while (recv(fd, bytes, sizeof bytes, 0) > 0) { /* closing a socket with unread input would reset it and lose the response */
    }
    (void)send(fd, reply, sizeof reply - 1, 0);
    (void)close(fd);
    c->n_rejected++;
}

connections *connections_open(struct event_base *base, struct evhttp *http, struct evhttp_bound_socket *socket,
                              const connections_config *config) {
    const struct timeval second = {1, 0};
    connections *c = calloc(1, sizeof *c + config->max * sizeof c->entries[0]);
    if (c == NULL) return NULL;
    *c = (connections){.listener = evhttp_bound_socket_get_listener(socket),
                       .max = config->max,
                       .max_header = config->max_header,
                       .max_body = config->max_body,
                       .header_s = config->header_s,
                       .request_s = config->request_s};
    c->reject = event_new(base, evhttp_bound_socket_get_fd(socket), EV_READ | EV_PERSIST, on_rejected_connection, c);
    c->tick = event_new(base, -1, EV_PERSIST, on_tick, c);
    c->resume = event_new(base, -1, 0, on_resume, c);
    c->check = event_new(base, -1, 0, on_check, c);
    (void)pthread_mutex_lock(&all_lock);
    c->next = all;
    all = c;
    (void)pthread_mutex_unlock(&all_lock);
    if (c->reject == NULL || c->tick == NULL || c->resume == NULL || c->check == NULL || event_add(c->tick, &second) != 0) {
        connections_close(c);
        return NULL;
    }
    evconnlistener_set_error_cb(c->listener, on_accept_error);
    evhttp_set_bevcb(http, on_accept, c);
    return c;
}

void connections_close(connections *c) {
    if (c == NULL) return;
    (void)pthread_mutex_lock(&all_lock);
    connections **link = &all;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    (void)pthread_mutex_unlock(&all_lock);
    for (uint32_t i = 0; i < c->n; i++) {
        close_input(c->entries[i].input);
        (void)bufferevent_decref(c->entries[i].io);
    }
    if (c->reject != NULL) event_free(c->reject);
    if (c->tick != NULL) event_free(c->tick);
    if (c->resume != NULL) event_free(c->resume);
    if (c->check != NULL) event_free(c->check);
    free(c);
}

void connections_stop_listening(connections *c) {
    c->listener = NULL;
    (void)event_del(c->reject);
    (void)event_del(c->resume);
}

/* Returns the entry for the request's connection, or NULL if the connection is closed. */
static entry *find_connection(connections *c, struct evhttp_request *req) {
    struct evhttp_connection *connection = evhttp_request_get_connection(req);
    const struct bufferevent *io = connection != NULL ? evhttp_connection_get_bufferevent(connection) : NULL;
    for (uint32_t i = 0; io != NULL && i < c->n; i++)
        if (c->entries[i].io == io) return &c->entries[i];
    return NULL;
}

void connections_request_received(connections *c, struct evhttp_request *req) {
    entry *e = find_connection(c, req);
    if (e != NULL) e->awaiting_reply = true;
}

void connections_reply_sent(connections *c, struct evhttp_request *req) {
    entry *e = find_connection(c, req);
    if (e == NULL) return;
    validated_input *in = e->input;
    e->awaiting_reply = false;
    e->served = true;
    e->since = monotonic_seconds();
    in->n_replied++;
    if (in->header_since > 0.0)
        in->header_since =
            e->since; /* the next request was pipelined and waited for this response, so its time limit starts now */
    if (in->error != 0 && in->rejected_at <= 0.0 && in->n_replied == http_filter_requests(in->filter)) send_violation(in);
}

uint32_t connections_count(connections *c) {
    remove_closed(c);
    return c->n;
}

uint32_t connections_awaiting_reply(connections *c) {
    uint32_t n = 0;
    remove_closed(c);
    for (uint32_t i = 0; i < c->n; i++) n += c->entries[i].awaiting_reply;
    return n;
}

uint64_t connections_rejected(const connections *c) { return c->n_rejected; }
