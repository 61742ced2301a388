/* Reads and removals of a Redis prefix store (see redis_store.h). */
#include "redis_store.h"

#include <stdio.h>

static void count_refused(fkv_redis_store *s) {
    (void)pthread_mutex_lock(&s->lock);
    s->n_refused++;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Receives the n_value bytes of a value. Decrypts each part as soon as it arrives, while it is still in the processor's cache and
 * the server sends the next one. The cipher receives whole blocks, except at the end of the value. */
static fkv_status receive_page(fkv_redis_store *s, fkv_redis_server *server, const char *name, uint64_t n_value, uint8_t *packed,
                               uint64_t capacity, uint64_t *n_bytes) {
    fkv_resp *c = &server->reader;
    uint8_t header[FKV_REDIS_HEADER_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[FKV_REDIS_NAME_BYTES + 8];
    if (n_value < FKV_REDIS_OVERHEAD || n_value - FKV_REDIS_OVERHEAD > capacity) {
        fkv_resp_close(c); /* closing the connection is cheaper than reading and discarding the value */
        count_refused(s);
        return fkv_fail(FKV_GONE, "the value of a stored page is %llu bytes long (expected %d to %llu)",
                        (unsigned long long)n_value, FKV_REDIS_OVERHEAD, (unsigned long long)capacity + FKV_REDIS_OVERHEAD);
    }
    const uint64_t n_page = n_value - FKV_REDIS_OVERHEAD;
    const double start = fkv_seconds_now();
    const double deadline = start + s->timeout_s + fkv_redis_transfer_seconds(s, server, n_value);
    if (!fkv_resp_receive_bytes(c, header, sizeof header, deadline)) return fkv_redis_transfer_failed(s, server, c);
    uint32_t version = 0;
    memcpy(&version, header + 4, sizeof version);
    fkv_status status = FKV_OK;
    if (memcmp(header, FKV_REDIS_MAGIC, 4) != 0 || version != FKV_REDIS_VERSION) /* possibly written by another flatkv version */
        status = fkv_fail(FKV_GONE, "the value of a stored page has an unknown format");
    if (status == FKV_OK) status = fkv_cipher_begin(&s->opener, header + 8, bound, fkv_redis_bound(name, header, bound));
    for (uint64_t received = 0, decrypted = 0; received < n_page;) {
        const size_t most = n_page - received < FKV_REDIS_CHUNK_BYTES ? (size_t)(n_page - received) : FKV_REDIS_CHUNK_BYTES;
        const size_t n = fkv_resp_receive_part(c, packed + received, most, deadline);
        if (n == 0) return fkv_redis_transfer_failed(s, server, c);
        received += n;
        const uint64_t end = received < n_page ? received / FKV_CIPHER_BLOCK_BYTES * FKV_CIPHER_BLOCK_BYTES : n_page;
        if (status == FKV_OK) status = fkv_cipher_add(&s->opener, packed + decrypted, packed + decrypted, end - decrypted);
        decrypted = end;
    }
    if (!fkv_resp_receive_bytes(c, tag, sizeof tag, deadline) || !fkv_resp_receive_end(c, deadline))
        return fkv_redis_transfer_failed(s, server, c);
    fkv_redis_note_rate(s, server, n_value, fkv_seconds_now() - start);
    fkv_redis_note_success(s, server);
    s->value_bytes = n_value;
    if (status == FKV_OK) status = fkv_cipher_end(&s->opener, tag);
    if (status == FKV_FILE_DAMAGED || status == FKV_GONE) count_refused(s);
    if (status == FKV_OK) *n_bytes = n_page;
    return status;
}

/* A requested page. */
typedef struct page_request {
    fkv_page_read *page;
    fkv_redis_server *server;
    uint64_t serial; /* value of reader_serial when the command was sent, which identifies the connection */
    int n_command;   /* length of `command`; 0 if there is no command to send */
    bool sent;
    char name[FKV_REDIS_NAME_BYTES + 1];
    char command[160]; /* GET command */
} page_request;

/* Ensures that the read connection of a server is ready for a command. Replaces a connection that holds unread data of an
 * abandoned reply. */
static bool connect_reader(fkv_redis_store *s, fkv_redis_server *server) {
    fkv_resp *c = &server->reader;
    if (c->fd >= 0 && server->n_in_flight > 0) return true;
    const bool is_open = c->fd >= 0 && fkv_resp_is_idle(c);
    server->n_in_flight = 0;
    server->reader_serial += !is_open;
    return is_open || fkv_redis_connect(s, server, c);
}

static page_request make_request(fkv_redis_store *s, fkv_page_read *page) {
    page_request r = {.page = page, .server = fkv_redis_server_of(s, &page->key)};
    page->n_bytes = 0;
    if (fkv_redis_is_usable(s, r.server) && fkv_redis_name(s, &page->key, r.name) == FKV_OK)
        r.n_command = snprintf(r.command, sizeof r.command, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", FKV_REDIS_NAME_BYTES, r.name);
    return r;
}

/* Sends the commands of n requests, with one system call for each server. Failures are reported by receive_request(). */
static void send_requests(fkv_redis_store *s, page_request *const requests[FKV_REDIS_READ_AHEAD], uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        struct iovec parts[FKV_REDIS_READ_AHEAD];
        int n_parts = 0;
        fkv_redis_server *server = requests[i]->server;
        if (requests[i]->n_command == 0) continue;
        const bool connected = connect_reader(s, server);
        for (uint32_t j = i; j < n; j++) {
            page_request *r = requests[j];
            if (r->server != server || r->n_command == 0) continue;
            parts[n_parts++] = (struct iovec){.iov_base = r->command, .iov_len = (size_t)r->n_command};
            r->serial = server->reader_serial;
            r->sent = connected;
            r->n_command = 0;
        }
        if (connected && fkv_resp_send(&server->reader, parts, n_parts, fkv_seconds_now() + s->timeout_s))
            server->n_in_flight += (uint32_t)n_parts;
        else
            (void)fkv_redis_connection_failed(s, server, &server->reader);
    }
}

/* Reads the reply to the oldest command of a server. */
static fkv_status receive_request(fkv_redis_store *s, const page_request *r) {
    fkv_resp *c = &r->server->reader;
    fkv_page_read *page = r->page;
    fkv_resp_reply reply;
    FKV_REQUIRE(r->sent && c->fd >= 0 && r->serial == r->server->reader_serial, FKV_GONE, "the prefix store %s is not available",
                r->server->address.name);
    r->server->n_in_flight--;
    if (!fkv_resp_receive(c, &reply, fkv_seconds_now() + s->timeout_s)) return fkv_redis_connection_failed(s, r->server, c);
    if (reply.kind == FKV_RESP_ERROR) {
        fkv_redis_error_reply(s, r->server, reply.text);
        return fkv_fail(FKV_GONE, "the prefix store %s rejected the request for a page: %s", r->server->address.name, reply.text);
    }
    if (reply.kind == FKV_RESP_BULK && reply.number >= 0)
        return receive_page(s, r->server, r->name, (uint64_t)reply.number, page->packed, page->capacity, &page->n_bytes);
    if (reply.kind != FKV_RESP_BULK) fkv_resp_close(c);
    return fkv_fail(FKV_GONE, "the page is not in the prefix store");
}

/* Returns the maximum number of pages in flight, assuming that all pages are as large as the last one received. */
static uint32_t most_in_flight(const fkv_redis_store *s) {
    if (s->value_bytes == 0) return FKV_REDIS_READ_AHEAD;
    const uint64_t n = (uint64_t)s->n_servers * FKV_REDIS_READ_AHEAD_BYTES / s->value_bytes;
    return n < 2 ? 2 : n < FKV_REDIS_READ_AHEAD ? (uint32_t)n : FKV_REDIS_READ_AHEAD;
}

void fkv_redis_read_pages(void *self, const fkv_page_reads *reads) {
    fkv_redis_store *s = self;
    page_request requests[FKV_REDIS_READ_AHEAD]; /* ring of n requests that begins at `first` */
    uint32_t first = 0;
    uint32_t n = 0;
    (void)pthread_mutex_lock(&s->read_lock);
    for (;;) {
        /* After the first batch, new pages are requested only when a quarter of the maximum number in flight has arrived, so that
         * one system call sends several commands. */
        const uint32_t most = most_in_flight(s);
        uint32_t n_new = 0;
        page_request *new_requests[FKV_REDIS_READ_AHEAD];
        while (n + n_new < most && n <= most - most / 4) {
            fkv_page_read *page = reads->next(reads->user);
            if (page == NULL) break;
            new_requests[n_new] = &requests[(first + n + n_new) % FKV_REDIS_READ_AHEAD];
            *new_requests[n_new++] = make_request(s, page);
        }
        send_requests(s, new_requests, n_new);
        n += n_new;
        if (n == 0) break;
        const page_request *r = &requests[first];
        fkv_status status = receive_request(s, r);
        if (status != FKV_OK) fkv_redis_note_answer(s, &r->page->key, FKV_REDIS_MISSING);
        r->page->status = status == FKV_IO ? FKV_GONE : status;
        reads->done(reads->user);
        first = (first + 1) % FKV_REDIS_READ_AHEAD;
        n--;
    }
    (void)pthread_mutex_unlock(&s->read_lock);
}

/* Implements fkv_page_reads.next() for a single page: returns the page once, then NULL. */
static fkv_page_read *next_of_one(void *user) {
    fkv_page_read **next = user;
    fkv_page_read *page = *next;
    *next = NULL;
    return page;
}

static void done_with_one(void *user) { (void)user; }

fkv_status fkv_redis_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    fkv_page_read page = {.key = *key, .packed = packed, .capacity = capacity};
    fkv_page_read *next = &page;
    const fkv_page_reads reads = {.user = &next, .next = next_of_one, .done = done_with_one};
    fkv_redis_read_pages(self, &reads);
    *n_bytes = page.n_bytes;
    return page.status;
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
    const bool connected = connect_reader(s, server);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    if (!connected || !fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline))
        (void)fkv_redis_connection_failed(s, server, c);
    else if (reply.kind == FKV_RESP_ERROR)
        fkv_redis_error_reply(s, server, reply.text);
    (void)pthread_mutex_unlock(&s->read_lock);
    fkv_redis_note_answer(s, key, FKV_REDIS_MISSING);
}
