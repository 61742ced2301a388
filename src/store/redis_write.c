/* Writes of a Redis prefix store (see redis_store.h). */
#include "prefix_pack.h"
#include "redis_store.h"

#include <stdio.h>

static const double WRITE_S = 1.0;      /* timeout of a write, in seconds, in addition to the expected transfer time */
static const double FULL_PAUSE_S = 1.0; /* time, in seconds, without writes after a server has reported that its memory is full */

/* Handles an error reply to a write. If the server is out of memory, pauses writes to it but continues to read from it. */
static void handle_write_error(fkv_redis_store *s, fkv_redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 100];
    if (strncmp(text, "OOM", 3) != 0) {
        fkv_redis_error_reply(s, server, text);
        return;
    }
    (void)pthread_mutex_lock(&s->lock);
    const bool is_new = !server->full_is_logged;
    server->full_is_logged = true;
    server->full_until = fkv_seconds_now() + FULL_PAUSE_S;
    (void)pthread_mutex_unlock(&s->lock);
    (void)snprintf(line, sizeof line, "pages are not written, because the server is full: %s", text);
    if (is_new) fkv_redis_log(s, server, line);
}

/* Sends a SET command, encrypting the page in chunks. */
static bool send_page(fkv_redis_store *s, fkv_redis_server *server, const char *name, const uint8_t *packed, uint64_t n_bytes,
                      fkv_status *status) {
    fkv_resp *c = &server->writer;
    const double deadline = fkv_seconds_now() + WRITE_S + fkv_redis_transfer_seconds(s, server, n_bytes);
    uint8_t header[FKV_REDIS_HEADER_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[FKV_REDIS_NAME_BYTES + 8];
    char begin[200];
    char end[80];
    char ms[24];
    const uint32_t version = FKV_REDIS_VERSION;
    memcpy(header, FKV_REDIS_MAGIC, 4);
    memcpy(header + 4, &version, sizeof version);
    *status = fkv_cipher_nonce(header + 8);
    if (*status == FKV_OK) *status = fkv_cipher_begin(&s->cipher, header + 8, bound, fkv_redis_bound(name, header, bound));
    (void)snprintf(ms, sizeof ms, "%llu", (unsigned long long)fkv_redis_lifetime_ms(s, fkv_pack_logical(packed, n_bytes)));
    int n = snprintf(begin, sizeof begin, "*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%llu\r\n", FKV_REDIS_NAME_BYTES, name,
                     (unsigned long long)n_bytes + FKV_REDIS_OVERHEAD);
    struct iovec parts[2] = {{.iov_base = begin, .iov_len = (size_t)n}, {.iov_base = header, .iov_len = sizeof header}};
    if (*status != FKV_OK || !fkv_resp_send(c, parts, 2, deadline)) return false;
    for (uint64_t at = 0; at < n_bytes; at += FKV_REDIS_CHUNK_BYTES) {
        const size_t size = n_bytes - at < FKV_REDIS_CHUNK_BYTES ? (size_t)(n_bytes - at) : FKV_REDIS_CHUNK_BYTES;
        *status = fkv_cipher_add(&s->cipher, packed + at, s->chunk, size);
        parts[0] = (struct iovec){.iov_base = s->chunk, .iov_len = size};
        if (*status != FKV_OK || !fkv_resp_send(c, parts, 1, deadline)) return false;
    }
    *status = fkv_cipher_end(&s->cipher, tag);
    n = snprintf(end, sizeof end, "\r\n$2\r\nPX\r\n$%zu\r\n%s\r\n", strlen(ms), ms);
    parts[0] = (struct iovec){.iov_base = tag, .iov_len = sizeof tag};
    parts[1] = (struct iovec){.iov_base = end, .iov_len = (size_t)n};
    return *status == FKV_OK && fkv_resp_send(c, parts, 2, deadline);
}

/* Returns whether pages can be written to the server now. */
static bool accepts_writes(fkv_redis_store *s, const fkv_redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool accepts = !server->is_down && fkv_seconds_now() >= server->full_until;
    (void)pthread_mutex_unlock(&s->lock);
    return accepts;
}

fkv_status fkv_redis_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    fkv_redis_store *s = self;
    fkv_redis_server *server = fkv_redis_server_of(s, key);
    fkv_resp *c = &server->writer;
    char name[FKV_REDIS_NAME_BYTES + 1];
    fkv_resp_reply reply;
    FKV_TRY(fkv_redis_name(s, key, name));
    FKV_REQUIRE(accepts_writes(s, server), FKV_BUSY, "the prefix store %s does not accept pages at the moment",
                server->address.name);
    (void)pthread_mutex_lock(&s->write_lock);
    fkv_status status = FKV_OK;
    bool done = fkv_redis_connect(s, server, c) && send_page(s, server, name, packed, n_bytes, &status) &&
                fkv_resp_receive(c, &reply, fkv_seconds_now() + WRITE_S);
    if (status != FKV_OK) {
        fkv_resp_close(c); /* the value was not sent completely */
    } else if (!done) {
        status = fkv_redis_transfer_failed(s, server, c);
    } else if (reply.kind == FKV_RESP_ERROR) {
        handle_write_error(s, server, reply.text);
        status = fkv_fail(FKV_IO, "the prefix store %s rejected a page: %s", server->address.name, reply.text);
    }
    (void)pthread_mutex_unlock(&s->write_lock);
    if (status != FKV_OK) return status;
    fkv_redis_note_success(s, server);
    (void)pthread_mutex_lock(&s->lock);
    server->full_is_logged = false;
    fkv_redis_set_answer(s, key, FKV_REDIS_FOUND);
    (void)pthread_mutex_unlock(&s->lock);
    return FKV_OK;
}
