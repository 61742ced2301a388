/* See resp.h. */
#include "resp.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- addresses ---- */

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == 127;
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static fkv_status resolve_unix(const char *path, fkv_resp_address *address) {
    struct sockaddr_un u = {.sun_family = AF_UNIX};
    FKV_REQUIRE(path[0] != 0 && strlen(path) < sizeof u.sun_path, FKV_BAD_ARGUMENT,
                "the path of a Unix socket must be 1 to %zu bytes long (got %s)", sizeof u.sun_path - 1, path);
    memcpy(u.sun_path, path, strlen(path) + 1);
    memcpy(&address->addresses[0], &u, sizeof u);
    address->n_bytes[0] = sizeof u;
    address->n = 1;
    address->is_loopback = true;
    return FKV_OK;
}

fkv_status fkv_resp_resolve(const char *text, fkv_resp_address *address) {
    char host[256];
    *address = (fkv_resp_address){0};
    (void)snprintf(address->name, sizeof address->name, "%s", text);
    if (strncmp(text, "unix:", 5) == 0) return resolve_unix(text + 5, address);
    const bool brackets = text[0] == '[';
    const char *begin = text + brackets;
    const char *end = brackets ? strchr(text, ']') : strrchr(text, ':');
    const char *port = end != NULL ? end + brackets : NULL;
    FKV_REQUIRE(port != NULL && port[0] == ':' && port[1] != 0 && end > begin && (size_t)(end - begin) < sizeof host,
                FKV_BAD_ARGUMENT, "invalid address of a Redis server: expected HOST:PORT, [IPV6]:PORT or unix:PATH (got %s)",
                text);
    (void)snprintf(host, sizeof host, "%.*s", (int)(end - begin), begin);
    (void)snprintf(address->host, sizeof address->host, "%s", host);
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    const int code = getaddrinfo(host, port + 1, &hints, &found);
    FKV_REQUIRE(code == 0, FKV_IO, "cannot resolve the Redis server %s: %s", text, gai_strerror(code));
    address->is_loopback = true;
    for (const struct addrinfo *a = found; a != NULL && address->n < FKV_RESP_MAX_ADDRESSES; a = a->ai_next) {
        memcpy(&address->addresses[address->n], a->ai_addr, a->ai_addrlen);
        address->n_bytes[address->n++] = a->ai_addrlen;
        address->is_loopback = address->is_loopback && is_loopback(a->ai_addr);
    }
    freeaddrinfo(found);
    return FKV_OK;
}

/* ---- connection ---- */

void fkv_resp_close(fkv_resp *c) {
    if (c->session != NULL) c->tls->close(c->session);
    c->session = NULL;
    if (c->fd >= 0) (void)close(c->fd);
    c->fd = -1;
    c->at = c->n = 0;
}

static bool fail(fkv_resp *c, fkv_resp_failure failure) {
    fkv_resp_close(c);
    c->failure = failure;
    return false;
}

/* Waits until the socket is ready for one of `events`. Returns false on failure. */
static bool wait_ready(fkv_resp *c, short events, double deadline) {
    for (;;) {
        const double left = deadline - fkv_seconds_now();
        if (left <= 0.0) return fail(c, FKV_RESP_TIMEOUT);
        struct pollfd p = {.fd = c->fd, .events = events};
        const int n = poll(&p, 1, left > 1e6 ? INT_MAX : (int)(left * 1e3) + 1);
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return fail(c, FKV_RESP_CLOSED);
    }
}

bool fkv_resp_is_idle(const fkv_resp *c) {
    char byte = 0;
    if (c->fd < 0 || c->at != c->n) return false;
    if (c->session != NULL) return c->tls->is_idle(c->session);
    return recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

static bool connect_to(fkv_resp *c, const struct sockaddr_storage *address, socklen_t n_bytes, double deadline) {
    const int one = 1;
    c->failure = FKV_RESP_NONE;
    c->fd = socket(address->ss_family, SOCK_STREAM, 0);
    if (c->fd < 0) return fail(c, FKV_RESP_CLOSED);
    (void)fcntl(c->fd, F_SETFD, FD_CLOEXEC);
    (void)fcntl(c->fd, F_SETFL, O_NONBLOCK);
#ifdef SO_NOSIGPIPE
    (void)setsockopt(c->fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    if (address->ss_family != AF_UNIX) (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (const struct sockaddr *)(const void *)address, n_bytes) == 0) return true;
    if (errno != EINPROGRESS) return fail(c, FKV_RESP_CLOSED);
    if (!wait_ready(c, POLLOUT, deadline)) return false;
    int error = 0;
    socklen_t n = sizeof error;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0 || error != 0) return fail(c, FKV_RESP_CLOSED);
    return true;
}

/* Waits until a TLS operation that returned the negative value `result` can be repeated. */
static bool wait_tls(fkv_resp *c, int64_t result, double deadline) {
    if (result == FKV_TLS_WANTS_READ) return wait_ready(c, POLLIN, deadline);
    if (result == FKV_TLS_WANTS_WRITE) return wait_ready(c, POLLOUT, deadline);
    return fail(c, FKV_RESP_CLOSED);
}

static bool start_tls(fkv_resp *c, const char *host, double deadline) {
    (void)snprintf(c->tls_reason, sizeof c->tls_reason, "no session");
    c->session = c->tls->open(c->tls->self, c->fd, host);
    if (c->session == NULL) return fail(c, FKV_RESP_TLS);
    for (;;) {
        const int64_t result = c->tls->handshake(c->session, c->tls_reason, sizeof c->tls_reason);
        if (result > 0) return true;
        if (result != FKV_TLS_WANTS_READ && result != FKV_TLS_WANTS_WRITE) return fail(c, FKV_RESP_TLS);
        if (!wait_tls(c, result, deadline)) return false;
    }
}

bool fkv_resp_connect(fkv_resp *c, const fkv_resp_address *address, double deadline) {
    fkv_resp_close(c);
    for (uint32_t i = 0; i < address->n; i++) {
        const double now = fkv_seconds_now(); /* divide the remaining time equally among the remaining addresses */
        const double end = now + (deadline - now) / (address->n - i);
        if (connect_to(c, &address->addresses[i], address->n_bytes[i], end) &&
            (c->tls == NULL || start_tls(c, address->host, end)))
            return true;
    }
    return false;
}

bool fkv_resp_send(fkv_resp *c, struct iovec *parts, int n_parts, double deadline) {
#ifdef MSG_NOSIGNAL
    enum { FLAGS = MSG_NOSIGNAL };
#else
    enum { FLAGS = 0 };
#endif
    while (n_parts > 0) {
        if (parts->iov_len == 0) { /* sent completely */
            parts++;
            n_parts--;
            continue;
        }
        if (c->session != NULL) {
            const int64_t sent = c->tls->send(c->session, parts->iov_base, parts->iov_len);
            if (sent <= 0 && !wait_tls(c, sent, deadline)) return false;
            if (sent <= 0) continue;
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
            continue;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n_parts};
        ssize_t n = sendmsg(c->fd, &message, FLAGS);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return fail(c, FKV_RESP_CLOSED);
        if (n < 0 && !wait_ready(c, POLLOUT, deadline)) return false;
        for (int i = 0; i < n_parts && n > 0; i++) {
            const size_t sent = (size_t)n < parts[i].iov_len ? (size_t)n : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + sent;
            parts[i].iov_len -= sent;
            n -= (ssize_t)sent;
        }
    }
    return true;
}

/* Reads at least one byte. Returns the number of bytes, or 0 on failure. */
static size_t receive_some(fkv_resp *c, void *bytes, size_t n, double deadline) {
    while (c->session != NULL) {
        const int64_t got = c->tls->receive(c->session, bytes, n);
        if (got > 0) return (size_t)got;
        if (!wait_tls(c, got, deadline)) return 0;
    }
    for (;;) {
        const ssize_t got = recv(c->fd, bytes, n, 0);
        if (got > 0) return (size_t)got;
        if (got < 0 && errno == EINTR) continue;
        if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return fail(c, FKV_RESP_CLOSED);
        if (!wait_ready(c, POLLIN, deadline)) return 0;
    }
}

static bool receive_line(fkv_resp *c, char line[FKV_RESP_LINE_BYTES], double deadline) {
    size_t length = 0;
    for (;;) {
        if (c->at == c->n) {
            c->at = 0;
            c->n = receive_some(c, c->in, sizeof c->in, deadline);
            if (c->n == 0) return false;
        }
        const char byte = c->in[c->at++];
        if (byte == '\n') break;
        if (byte == 0 || length + 1 == FKV_RESP_LINE_BYTES) return fail(c, FKV_RESP_PROTOCOL);
        line[length++] = byte;
    }
    if (length < 2 || line[length - 1] != '\r') return fail(c, FKV_RESP_PROTOCOL);
    line[length - 1] = 0;
    return true;
}

bool fkv_resp_receive(fkv_resp *c, fkv_resp_reply *reply, double deadline) {
    char line[FKV_RESP_LINE_BYTES];
    *reply = (fkv_resp_reply){0};
    if (!receive_line(c, line, deadline)) return false;
    if (strchr("+-:$", line[0]) == NULL) return fail(c, FKV_RESP_PROTOCOL);
    reply->kind = (fkv_resp_kind)line[0];
    for (size_t i = 0; line[i + 1] != 0; i++) reply->text[i] = line[i + 1] >= ' ' && line[i + 1] <= '~' ? line[i + 1] : '?';
    if (reply->kind == FKV_RESP_STATUS || reply->kind == FKV_RESP_ERROR) return true;
    char *end = NULL;
    errno = 0;
    reply->number = strtoll(line + 1, &end, 10);
    if (errno != 0 || end == line + 1 || *end != 0) return fail(c, FKV_RESP_PROTOCOL);
    if (reply->kind == FKV_RESP_BULK && reply->number < -1) return fail(c, FKV_RESP_PROTOCOL);
    return true;
}

/* Bytes that follow the requested part are received into the buffer `in`, so that a single system call can receive the end of one
 * value and the first line of the next reply. */
size_t fkv_resp_receive_part(fkv_resp *c, void *bytes, size_t n, double deadline) {
    const size_t there = c->n - c->at < n ? c->n - c->at : n;
    memcpy(bytes, c->in + c->at, there);
    c->at += there;
    if (there == n) return n;
    struct iovec parts[2] = {{.iov_base = (char *)bytes + there, .iov_len = n - there},
                             {.iov_base = c->in, .iov_len = sizeof c->in}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t got = c->session == NULL ? recvmsg(c->fd, &message, 0) : -1;
    if (got <= 0) return there > 0 ? there : receive_some(c, bytes, n, deadline);
    if ((size_t)got <= n - there) return there + (size_t)got;
    c->at = 0;
    c->n = (size_t)got - (n - there);
    return n;
}

bool fkv_resp_receive_bytes(fkv_resp *c, void *bytes, size_t n, double deadline) {
    for (size_t done = 0; done < n;) {
        const size_t got = fkv_resp_receive_part(c, (char *)bytes + done, n - done, deadline);
        if (got == 0) return false;
        done += got;
    }
    return true;
}

bool fkv_resp_receive_end(fkv_resp *c, double deadline) {
    char end[2];
    if (!fkv_resp_receive_bytes(c, end, sizeof end, deadline)) return false;
    return (end[0] == '\r' && end[1] == '\n') || fail(c, FKV_RESP_PROTOCOL);
}
