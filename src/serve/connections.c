/* See connections.h.
 *
 * evhttp tells nobody when a connection ends before a request came. So each entry holds a reference to the connection's
 * bufferevent: evhttp lets go of it by taking its callbacks away, and the entry that finds it so gives it back, which closes the
 * socket. That is looked for every second, and before anybody is refused.
 */
#include "connections.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct entry {
    struct bufferevent *io;
    double since;    /* accepted, or answered last */
    bool unanswered; /* a request is here */
} entry;

struct connections {
    struct evconnlistener *listener; /* NULL: ended */
    struct event *refuse;            /* on the listener's socket, while there is no room */
    struct event *tick;
    double request_s;
    size_t max_ahead; /* bytes read that nobody took yet: a whole body, and no more */
    uint64_t n_refused;
    uint32_t max;
    uint32_t n;
    entry entries[];
};

static double seconds(void) {
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

/* Between accepting and refusing, as there is room. */
static void turn(connections *c) {
    if (c->listener == NULL) return;
    if (c->n < c->max) {
        (void)event_del(c->refuse);
        (void)evconnlistener_enable(c->listener);
    } else {
        (void)evconnlistener_disable(c->listener);
        (void)event_add(c->refuse, NULL);
    }
}

static void sweep(connections *c) {
    uint32_t before = c->n;
    for (uint32_t i = 0; i < c->n;) {
        if (was_freed(c->entries[i].io)) {
            (void)bufferevent_decref(c->entries[i].io);
            c->entries[i] = c->entries[--c->n];
        } else {
            i++;
        }
    }
    if (c->n < before) turn(c);
}

static void on_tick(evutil_socket_t fd, short what, void *user) {
    connections *c = user;
    double now = seconds();
    (void)fd, (void)what;
    sweep(c);
    for (uint32_t i = 0; i < c->n; i++) {
        const entry *e = &c->entries[i];
        if (!e->unanswered && now - e->since > c->request_s)
            (void)shutdown(bufferevent_getfd(e->io), SHUT_RDWR); /* evhttp reads its end */
    }
}

static struct bufferevent *on_accept(struct event_base *base, void *user) {
    connections *c = user;
    struct bufferevent *io = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
    if (io == NULL || c->n == c->max) return io;
    bufferevent_incref(io);
    bufferevent_setwatermark(io, EV_READ, 0, c->max_ahead);
    c->entries[c->n++] = (entry){.io = io, .since = seconds()};
    if (c->n == c->max) turn(c);
    return io;
}

static void on_too_many(evutil_socket_t listening, short what, void *user) {
    static const char reply[] =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        "Connection: close\r\nContent-Length: 91\r\n\r\n"
        "{\"error\":{\"message\":\"too many connections\",\"type\":\"server_error\",\"param\":null,\"code\":503}}\n";
    connections *c = user;
    (void)what;
    sweep(c);
    if (c->n < c->max) return; /* the listener takes it */
    int fd = accept(listening, NULL, NULL);
    if (fd < 0) return;
    (void)evutil_make_socket_nonblocking(fd);
    char bytes[4096];
    while (recv(fd, bytes, sizeof bytes, 0) > 0) { /* what is unread at the end would take the reply with it */
    }
    (void)send(fd, reply, sizeof reply - 1, 0);
    (void)close(fd);
    c->n_refused++;
}

connections *connections_open(struct event_base *base, struct evhttp *http, struct evhttp_bound_socket *socket,
                              const connections_config *config) {
    const struct timeval second = {1, 0};
    connections *c = calloc(1, sizeof *c + config->max * sizeof c->entries[0]);
    if (c == NULL) return NULL;
    *c = (connections){.listener = evhttp_bound_socket_get_listener(socket),
                       .max = config->max,
                       .max_ahead = config->max_ahead,
                       .request_s = config->request_s};
    c->refuse = event_new(base, evhttp_bound_socket_get_fd(socket), EV_READ | EV_PERSIST, on_too_many, c);
    c->tick = event_new(base, -1, EV_PERSIST, on_tick, c);
    if (c->refuse == NULL || c->tick == NULL || event_add(c->tick, &second) != 0) {
        connections_close(c);
        return NULL;
    }
    evhttp_set_bevcb(http, on_accept, c);
    return c;
}

void connections_close(connections *c) {
    if (c == NULL) return;
    for (uint32_t i = 0; i < c->n; i++) (void)bufferevent_decref(c->entries[i].io);
    if (c->refuse != NULL) event_free(c->refuse);
    if (c->tick != NULL) event_free(c->tick);
    free(c);
}

void connections_stop_listening(connections *c) {
    c->listener = NULL;
    (void)event_del(c->refuse);
}

/* NULL: the connection is gone. */
static entry *entry_of(connections *c, struct evhttp_request *req) {
    struct evhttp_connection *connection = evhttp_request_get_connection(req);
    const struct bufferevent *io = connection != NULL ? evhttp_connection_get_bufferevent(connection) : NULL;
    for (uint32_t i = 0; io != NULL && i < c->n; i++)
        if (c->entries[i].io == io) return &c->entries[i];
    return NULL;
}

void connections_asked(connections *c, struct evhttp_request *req) {
    entry *e = entry_of(c, req);
    if (e != NULL) e->unanswered = true;
}

void connections_answered(connections *c, struct evhttp_request *req) {
    entry *e = entry_of(c, req);
    if (e == NULL) return;
    e->unanswered = false;
    e->since = seconds();
}

uint32_t connections_count(connections *c) {
    sweep(c);
    return c->n;
}

uint32_t connections_unanswered(connections *c) {
    uint32_t n = 0;
    sweep(c);
    for (uint32_t i = 0; i < c->n; i++) n += c->entries[i].unanswered;
    return n;
}

uint64_t connections_refused(const connections *c) { return c->n_refused; }
