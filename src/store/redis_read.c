/* Reads and removals of a Redis prefix store (see redis_store.h). */
#include "redis_store.h"

#include <stdio.h>

static void count_refused(fkv_redis_store *s) {
    (void)pthread_mutex_lock(&s->lock);
    s->n_refused++;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Receives the n_value bytes of a value and decrypts the page. */
static fkv_status receive_page(fkv_redis_store *s, fkv_redis_server *server, const char *name, uint64_t n_value, uint8_t *packed,
                               uint64_t capacity, uint64_t *n_bytes) {
    fkv_resp *c = &server->reader;
    uint8_t header[FKV_REDIS_HEADER_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[FKV_REDIS_NAME_BYTES + 8];
    if (n_value < FKV_REDIS_OVERHEAD || n_value - FKV_REDIS_OVERHEAD > capacity) {
        fkv_resp_close(c); /* closing the connection is cheaper than reading and discarding the value */
        count_refused(s);
        return fkv_fail(FKV_GONE, "the value of a stored page has %llu bytes (expected %d to %llu)", (unsigned long long)n_value,
                        FKV_REDIS_OVERHEAD, (unsigned long long)capacity + FKV_REDIS_OVERHEAD);
    }
    const uint64_t n_page = n_value - FKV_REDIS_OVERHEAD;
    const double start = fkv_seconds_now();
    const double deadline = start + s->timeout_s + fkv_redis_transfer_seconds(s, server, n_value);
    if (!fkv_resp_receive_bytes(c, header, sizeof header, deadline) || !fkv_resp_receive_bytes(c, packed, n_page, deadline) ||
        !fkv_resp_receive_bytes(c, tag, sizeof tag, deadline) || !fkv_resp_receive_end(c, deadline))
        return fkv_redis_transfer_failed(s, server, c);
    fkv_redis_note_rate(s, server, n_value, fkv_seconds_now() - start);
    fkv_redis_note_success(s, server);
    uint32_t version = 0;
    memcpy(&version, header + 4, sizeof version);
    if (memcmp(header, FKV_REDIS_MAGIC, 4) != 0 ||
        version != FKV_REDIS_VERSION) { /* perhaps written by another version of flatkv */
        count_refused(s);
        return fkv_fail(FKV_GONE, "the value of a stored page has an unknown format");
    }
    FKV_TRY(fkv_cipher_begin(&s->opener, header + 8, bound, fkv_redis_bound(name, header, bound)));
    for (uint64_t at = 0; at < n_page; at += FKV_REDIS_CHUNK_BYTES)
        FKV_TRY(fkv_cipher_add(&s->opener, packed + at, packed + at,
                               n_page - at < FKV_REDIS_CHUNK_BYTES ? n_page - at : FKV_REDIS_CHUNK_BYTES));
    const fkv_status status = fkv_cipher_end(&s->opener, tag);
    if (status == FKV_FILE_DAMAGED) count_refused(s);
    *n_bytes = n_page;
    return status;
}

fkv_status fkv_redis_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    fkv_redis_store *s = self;
    fkv_redis_server *server = fkv_redis_server_of(s, key);
    fkv_resp *c = &server->reader;
    char name[FKV_REDIS_NAME_BYTES + 1];
    char command[160];
    fkv_resp_reply reply;
    FKV_TRY(fkv_redis_name(s, key, name));
    FKV_REQUIRE(fkv_redis_is_usable(s, server), FKV_GONE, "the prefix store %s is not available", server->address.name);
    const int n = snprintf(command, sizeof command, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", FKV_REDIS_NAME_BYTES, name);
    struct iovec part = {.iov_base = command, .iov_len = (size_t)n};
    (void)pthread_mutex_lock(&s->read_lock);
    fkv_status status = FKV_OK;
    const bool connected = fkv_redis_connect(s, server, c);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    if (!connected || !fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline)) {
        status = fkv_redis_connection_failed(s, server, c);
    } else if (reply.kind == FKV_RESP_ERROR) {
        fkv_redis_error_reply(s, server, reply.text);
        status = fkv_fail(FKV_GONE, "the prefix store %s refused to read a page: %s", server->address.name, reply.text);
    } else if (reply.kind != FKV_RESP_BULK || reply.number < 0) {
        status = fkv_fail(FKV_GONE, "the page is not in the prefix store");
        if (reply.kind != FKV_RESP_BULK) fkv_resp_close(c);
    } else {
        status = receive_page(s, server, name, (uint64_t)reply.number, packed, capacity, n_bytes);
    }
    (void)pthread_mutex_unlock(&s->read_lock);
    if (status != FKV_OK) fkv_redis_note_answer(s, key, FKV_REDIS_MISSING);
    return status == FKV_IO ? fkv_fail(FKV_GONE, "the prefix store %s is not available", server->address.name) : status;
}

void fkv_redis_remove(void *self, const fkv_page_key *key) {
    fkv_redis_store *s = self;
    fkv_redis_server *server = fkv_redis_server_of(s, key);
    fkv_resp *c = &server->reader;
    char name[FKV_REDIS_NAME_BYTES + 1];
    char command[160];
    fkv_resp_reply reply;
    if (!fkv_redis_is_usable(s, server) || fkv_redis_name(s, key, name) != FKV_OK) return;
    const int n = snprintf(command, sizeof command, "*2\r\n$6\r\nUNLINK\r\n$%d\r\n%s\r\n", FKV_REDIS_NAME_BYTES, name);
    struct iovec part = {.iov_base = command, .iov_len = (size_t)n};
    (void)pthread_mutex_lock(&s->read_lock);
    const bool connected = fkv_redis_connect(s, server, c);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    if (!connected || !fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline))
        (void)fkv_redis_connection_failed(s, server, c);
    else if (reply.kind == FKV_RESP_ERROR)
        fkv_redis_error_reply(s, server, reply.text);
    (void)pthread_mutex_unlock(&s->read_lock);
    fkv_redis_note_answer(s, key, FKV_REDIS_MISSING);
}
