/* The servers of a Redis prefix store: names and placement of pages, connections, and failures (see redis_store.h). */
#include "redis_store.h"

#include <stdio.h>

enum { MIN_EXPIRY_SECONDS = 60, DEPTH_SECONDS = 1 };
enum { MIN_SAMPLE_BYTES = 64 * 1024 };      /* minimum size of a transfer that updates the measured rate */
static const double RATE_STEP = 0.2;        /* weight of the newest measurement in the moving average of the transfer rate */
static const double MIN_SAMPLE_S = 1e-3;    /* minimum duration, in seconds, of a transfer that updates the measured rate */
static const double MIN_RATE = 1e6;         /* lower limit of the assumed transfer rate, in bytes per second */
static const double REFUSED_PROBE_S = 30.0; /* time, in seconds, between probes of a server that rejects the login or a command */

/* ---- keys ---- */

fkv_status fkv_redis_name(const fkv_redis_store *s, const fkv_page_key *key, char name[FKV_REDIS_NAME_BYTES + 1]) {
    static const char digits[] = "0123456789abcdef";
    uint8_t hash[FKV_CIPHER_KEY_BYTES];
    FKV_TRY(fkv_keyed_hash(s->name_key, key->bytes, sizeof key->bytes, hash));
    memcpy(name, "fkv:1:", 6);
    for (size_t i = 0; i < sizeof hash; i++) {
        name[6 + 2 * i] = digits[hash[i] >> 4];
        name[7 + 2 * i] = digits[hash[i] & 15];
    }
    name[FKV_REDIS_NAME_BYTES] = 0;
    return FKV_OK;
}

uint64_t fkv_redis_mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Rendezvous hashing: a page belongs to the server with the largest hash of (server name, page key). */
fkv_redis_server *fkv_redis_server_of(fkv_redis_store *s, const fkv_page_key *key) {
    uint64_t low = 0;
    memcpy(&low, key->bytes, sizeof low);
    fkv_redis_server *best = &s->servers[0];
    uint64_t most = 0;
    for (uint32_t i = 0; i < s->n_servers; i++) {
        const uint64_t weight = fkv_redis_mix(low ^ s->servers[i].hash);
        if (weight > most) best = &s->servers[i];
        if (weight > most) most = weight;
    }
    return best;
}

uint64_t fkv_redis_lifetime_ms(const fkv_redis_store *s, uint64_t depth) {
    const uint64_t earlier = depth * DEPTH_SECONDS;
    const uint64_t seconds = s->expiry_s > earlier + MIN_EXPIRY_SECONDS ? s->expiry_s - earlier : MIN_EXPIRY_SECONDS;
    return seconds * 1000;
}

size_t fkv_redis_bound(const char *name, const uint8_t header[FKV_REDIS_HEADER_BYTES], uint8_t bound[FKV_REDIS_NAME_BYTES + 8]) {
    memcpy(bound, name, FKV_REDIS_NAME_BYTES);
    memcpy(bound + FKV_REDIS_NAME_BYTES, header, 8);
    return FKV_REDIS_NAME_BYTES + 8;
}

/* ---- failures ---- */

void fkv_redis_log(const fkv_redis_store *s, const fkv_redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 200];
    if (s->log == NULL) return;
    (void)snprintf(line, sizeof line, "prefix store %s: %s", server->address.name, text);
    s->log(s->log_user, line);
}

bool fkv_redis_is_usable(fkv_redis_store *s, const fkv_redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool usable = !server->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return usable;
}

/* Stops using a server until a probe succeeds. probe_s: time until the first probe, in seconds, or 0 to use the server's current
 * delay, which grows during an outage. Only the first failure of an outage is logged, with its reason. */
static void stop_using(fkv_redis_store *s, fkv_redis_server *server, double probe_s, const char *reason) {
    bool is_new = false;
    (void)pthread_mutex_lock(&s->lock);
    if (!server->is_down || probe_s > 0.0) {
        server->is_down = true;
        if (probe_s > 0.0) server->probe_s = probe_s;
        server->probe_at = fkv_seconds_now() + server->probe_s;
        is_new = !server->outage_is_logged;
        server->outage_is_logged = true;
        (void)pthread_cond_signal(&s->changed);
    }
    (void)pthread_mutex_unlock(&s->lock);
    if (is_new) fkv_redis_log(s, server, reason);
}

static void mark_down(fkv_redis_store *s, fkv_redis_server *server, const fkv_resp *c) {
    char line[sizeof c->tls_reason + 100];
    const fkv_resp_failure failure = c->failure;
    if (failure == FKV_RESP_TLS) {
        (void)snprintf(line, sizeof line, "the TLS handshake failed (%s); pages are computed until it succeeds", c->tls_reason);
        stop_using(s, server, 0.0, line);
        return;
    }
    /* A server that closes connections is probed soon, because it may be restarting. A server that times out is probed less and
     * less often. */
    stop_using(s, server, failure == FKV_RESP_TIMEOUT ? 0.0 : FKV_REDIS_PROBE_S,
               failure == FKV_RESP_TIMEOUT    ? "no reply before the deadline; pages are computed until the server responds"
               : failure == FKV_RESP_PROTOCOL ? "invalid reply; pages are computed until the server responds"
                                              : "not reachable; pages are computed until the server responds");
}

void fkv_redis_error_reply(fkv_redis_store *s, fkv_redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 100];
    const bool busy = strncmp(text, "LOADING", 7) == 0 || strncmp(text, "BUSY", 4) == 0;
    (void)snprintf(line, sizeof line, "not used: %s", text);
    stop_using(s, server, busy ? FKV_REDIS_PROBE_S : REFUSED_PROBE_S, line);
}

void fkv_redis_note_success(fkv_redis_store *s, fkv_redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool ends = server->outage_is_logged && !server->is_down; /* another thread may have detected a new failure */
    if (!server->is_down) {
        server->outage_is_logged = false;
        server->probe_s = FKV_REDIS_PROBE_S;
    }
    (void)pthread_mutex_unlock(&s->lock);
    if (ends) fkv_redis_log(s, server, "in use again");
}

bool fkv_redis_connect(fkv_redis_store *s, fkv_redis_server *server, fkv_resp *c) {
    const double deadline = fkv_seconds_now() + s->timeout_s;
    fkv_resp_reply reply;
    if (fkv_resp_is_idle(c))
        return true; /* a connection that is not idle cannot be reused: the server has closed it, or it has unread data */
    if (!fkv_resp_connect(c, &server->address, deadline)) return false;
    if (s->n_login == 0) return true;
    struct iovec part = {.iov_base = s->login, .iov_len = s->n_login};
    if (!fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline)) return false;
    if (reply.kind == FKV_RESP_STATUS) return true;
    reply.text[strcspn(reply.text, " ")] = 0; /* the rest of the reply may contain the password */
    fkv_redis_error_reply(s, server, reply.text);
    fkv_resp_close(c);
    c->failure = FKV_RESP_NONE; /* already reported */
    return false;
}

fkv_status fkv_redis_connection_failed(fkv_redis_store *s, fkv_redis_server *server, const fkv_resp *c) {
    if (c->failure != FKV_RESP_NONE) mark_down(s, server, c);
    return fkv_fail(FKV_IO, "the prefix store %s is not available", server->address.name);
}

/* ---- transfers ---- */

double fkv_redis_transfer_seconds(fkv_redis_store *s, const fkv_redis_server *server, uint64_t n_bytes) {
    (void)pthread_mutex_lock(&s->lock);
    const double rate = server->rate;
    (void)pthread_mutex_unlock(&s->lock);
    return 4.0 * (double)n_bytes / rate;
}

void fkv_redis_note_rate(fkv_redis_store *s, fkv_redis_server *server, uint64_t n_bytes, double seconds) {
    if (n_bytes < MIN_SAMPLE_BYTES || seconds < MIN_SAMPLE_S) return;
    (void)pthread_mutex_lock(&s->lock);
    server->rate += RATE_STEP * ((double)n_bytes / seconds - server->rate);
    if (server->rate < MIN_RATE) server->rate = MIN_RATE;
    (void)pthread_mutex_unlock(&s->lock);
}

fkv_status fkv_redis_transfer_failed(fkv_redis_store *s, fkv_redis_server *server, const fkv_resp *c) {
    (void)pthread_mutex_lock(&s->lock);
    if (c->failure == FKV_RESP_TIMEOUT) server->rate = server->rate > 2.0 * MIN_RATE ? 0.5 * server->rate : MIN_RATE;
    (void)pthread_mutex_unlock(&s->lock);
    return fkv_redis_connection_failed(s, server, c);
}
