/* A client connection to a Redis or Valkey server (RESP2), over TCP, optionally with TLS, or a Unix socket.
 *
 * Every call has a deadline on the clock of fkv_seconds_now(). It applies to the whole call, not to each system call. After a
 * failure the connection is closed, because a late reply must not be mistaken for the reply to the next command. Values are sent
 * from and received into the caller's memory. A connection allocates no memory and must be used by one thread at a time.
 */
#ifndef FKV_RESP_H
#define FKV_RESP_H

#include "../base/timed_wait.h"

#include <flatkv/prefix_store.h>

#include <sys/socket.h>
#include <sys/uio.h>

enum { FKV_RESP_LINE_BYTES = 256, FKV_RESP_MAX_ADDRESSES = 4 };

/* Address of a server. A host name may resolve to several socket addresses, which are tried one after another. */
typedef struct fkv_resp_address {
    struct sockaddr_storage addresses[FKV_RESP_MAX_ADDRESSES];
    socklen_t n_bytes[FKV_RESP_MAX_ADDRESSES];
    uint32_t n;
    char name[80];    /* for messages */
    char host[256];   /* name or address without the port; empty for a Unix socket */
    bool is_loopback; /* true if all addresses are loopback addresses or Unix sockets */
} fkv_resp_address;

/* Reason for the most recent failure on a connection. */
typedef enum fkv_resp_failure {
    FKV_RESP_NONE,
    FKV_RESP_TIMEOUT,
    FKV_RESP_CLOSED,   /* the server refused, reset or closed the connection */
    FKV_RESP_PROTOCOL, /* invalid reply */
    FKV_RESP_TLS       /* the TLS handshake failed */
} fkv_resp_failure;

typedef struct fkv_resp {
    int fd;                    /* -1 if closed */
    const fkv_tls_client *tls; /* NULL: no encryption */
    void *session;             /* TLS session, or NULL */
    char tls_reason[120];      /* reason of FKV_RESP_TLS */
    fkv_resp_failure failure;
    size_t at; /* bytes [at, n) of `in` are unread */
    size_t n;
    char in[4096];
} fkv_resp;

typedef enum fkv_resp_kind {
    FKV_RESP_STATUS = '+',
    FKV_RESP_ERROR = '-',
    FKV_RESP_INTEGER = ':',
    FKV_RESP_BULK = '$'
} fkv_resp_kind;

/* Parsed first line of a reply. */
typedef struct fkv_resp_reply {
    fkv_resp_kind kind;
    int64_t number; /* value of an integer reply, or length of a bulk string; -1 if the requested value does not exist */
    char text[FKV_RESP_LINE_BYTES]; /* text of a status or error reply, with unprintable bytes replaced */
} fkv_resp_reply;

/* Parses "unix:PATH" or resolves "HOST:PORT". May block while the name is resolved. */
fkv_status fkv_resp_resolve(const char *text, fkv_resp_address *address);

/* Returns true if the connection is open and no data from the server is waiting to be read. */
bool fkv_resp_is_idle(const fkv_resp *c);

/* Connects to the first address that accepts the connection. Returns false on failure. On entry, *c must be a closed connection,
 * or zeroed except for fd = -1 and tls. Also performs the TLS handshake if tls is not NULL. */
bool fkv_resp_connect(fkv_resp *c, const fkv_resp_address *address, double deadline);
void fkv_resp_close(fkv_resp *c);

/* Sends n_parts buffers. Returns false on failure. Overwrites the array `parts`. */
bool fkv_resp_send(fkv_resp *c, struct iovec *parts, int n_parts, double deadline);

/* Reads the first line of a reply. */
bool fkv_resp_receive(fkv_resp *c, fkv_resp_reply *reply, double deadline);

/* Reads 1 to n bytes of a bulk string, as many as have arrived. Waits only for the first byte. Returns 0 on failure. */
size_t fkv_resp_receive_part(fkv_resp *c, void *bytes, size_t n, double deadline);

/* Reads the next n bytes of a bulk string. */
bool fkv_resp_receive_bytes(fkv_resp *c, void *bytes, size_t n, double deadline);

/* Reads the line terminator (CRLF) after a bulk string. */
bool fkv_resp_receive_end(fkv_resp *c, double deadline);

#endif
