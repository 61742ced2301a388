/* Tests that a prefix store on Redis accepts a value only if it is unchanged, was written under the same key, and was written
 * with the same secret. A server in this process stores the last value that was written. The tests make it return changed values.
 */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PAGE_BYTES = 40, LARGE_BYTES = 150001, MAX_VALUE = LARGE_BYTES + 100, MAX_CONNECTIONS = 128 };

typedef struct value_server {
    int listener;
    char path[100];
    pthread_t thread;
    pthread_t threads[MAX_CONNECTIONS];
    size_t n_threads;
    pthread_mutex_t lock; /* protects the following fields */
    uint8_t value[MAX_VALUE];
    size_t n_value;
    uint8_t reply[MAX_VALUE]; /* value that GET returns */
    size_t n_reply;
    size_t n_missing; /* if not 0, GET omits this number of bytes at the end of the value and closes the connection */
} value_server;

typedef struct connection {
    value_server *server;
    FILE *in;
    int fd;
    uint8_t words[5][MAX_VALUE];
    char reply[MAX_VALUE + 40];
} connection;

/* Reads a bulk string of up to n bytes. Returns its length, or -1 at the end of the connection. */
static long read_bulk(FILE *in, uint8_t *bytes, size_t n) {
    char line[32];
    if (fgets(line, sizeof line, in) == NULL || line[0] != '$') return -1;
    const long length = strtol(line + 1, NULL, 10);
    if (length < 0 || (size_t)length > n || fread(bytes, 1, (size_t)length, in) != (size_t)length) return -1;
    return fgetc(in) == '\r' && fgetc(in) == '\n' ? length : -1;
}

static bool send_all(int fd, const char *bytes, size_t n) {
    enum { PART_BYTES = 20011 }; /* not a multiple of the cipher block size, so that received parts end within cipher blocks */
    for (size_t at = 0; at < n;) {
        const ssize_t sent = send(fd, bytes + at, n - at < PART_BYTES ? n - at : PART_BYTES, 0);
        if (sent <= 0) return false;
        at += (size_t)sent;
    }
    return true;
}

static void *serve_values(void *user) {
    connection *c = user;
    value_server *s = c->server;
    char line[32];
    bool is_open = true;
    while (is_open && fgets(line, sizeof line, c->in) != NULL && line[0] == '*') {
        long lengths[5] = {0};
        size_t n_reply = (size_t)snprintf(c->reply, sizeof c->reply, "$-1\r\n");
        const long n = strtol(line + 1, NULL, 10);
        for (long i = 0; i < n && i < 5; i++) lengths[i] = read_bulk(c->in, c->words[i], MAX_VALUE);
        (void)pthread_mutex_lock(&s->lock);
        if (lengths[0] == 3 && memcmp(c->words[0], "SET", 3) == 0 && lengths[2] > 0) {
            s->n_value = (size_t)lengths[2];
            memcpy(s->value, c->words[2], s->n_value);
            n_reply = (size_t)snprintf(c->reply, sizeof c->reply, "+OK\r\n");
        } else if (lengths[0] == 3 && memcmp(c->words[0], "GET", 3) == 0) {
            n_reply = (size_t)snprintf(c->reply, sizeof c->reply, "$%zu\r\n", s->n_reply);
            memcpy(c->reply + n_reply, s->reply, s->n_reply);
            memcpy(c->reply + n_reply + s->n_reply, "\r\n", 2);
            is_open = s->n_missing == 0;
            n_reply += is_open ? s->n_reply + 2 : s->n_reply - s->n_missing;
        }
        (void)pthread_mutex_unlock(&s->lock);
        is_open = send_all(c->fd, c->reply, n_reply) && is_open;
    }
    (void)fclose(c->in);
    free(c);
    return NULL;
}

static void *accept_connections(void *user) {
    value_server *s = user;
    for (int fd = accept(s->listener, NULL, NULL); fd >= 0; fd = accept(s->listener, NULL, NULL)) {
        connection *c = malloc(sizeof *c);
        if (c == NULL || s->n_threads == MAX_CONNECTIONS) abort();
        c->server = s;
        c->in = fdopen(fd, "r");
        c->fd = fd;
        if (pthread_create(&s->threads[s->n_threads++], NULL, serve_values, c) != 0) abort();
    }
    return NULL;
}

static void open_server(value_server *s) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    *s = (value_server){.lock = PTHREAD_MUTEX_INITIALIZER};
    (void)snprintf(s->path, sizeof s->path, "/tmp/flatkv_values_%d", (int)getpid());
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", s->path);
    (void)unlink(s->path); /* an earlier test that failed may have left the socket behind */
    s->listener = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_ge(s->listener, 0);
    ck_assert_int_eq(bind(s->listener, (const struct sockaddr *)(const void *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(s->listener, 8), 0);
    ck_assert_int_eq(pthread_create(&s->thread, NULL, accept_connections, s), 0);
}

/* All stores that use the server must have been closed before. */
static void close_server(value_server *s) {
    (void)shutdown(s->listener, SHUT_RDWR);
    (void)pthread_join(s->thread, NULL);
    for (size_t i = 0; i < s->n_threads; i++) (void)pthread_join(s->threads[i], NULL);
    (void)close(s->listener);
    (void)unlink(s->path);
}

static void set_reply(value_server *s, const uint8_t *value, size_t n) {
    (void)pthread_mutex_lock(&s->lock);
    memcpy(s->reply, value, n);
    s->n_reply = n;
    (void)pthread_mutex_unlock(&s->lock);
}

static void set_missing(value_server *s, size_t n) {
    (void)pthread_mutex_lock(&s->lock);
    s->n_missing = n;
    (void)pthread_mutex_unlock(&s->lock);
}

static fkv_prefix_store open_store(const value_server *s, uint8_t secret_byte) {
    const uint8_t secret[16] = {secret_byte};
    char url[200];
    fkv_prefix_store store;
    (void)snprintf(url, sizeof url, "redis://unix:%s", s->path);
    const fkv_prefix_redis_config config = {.url = url, .timeout_s = 60.0, .secret = secret, .n_secret = sizeof secret};
    ck_ok(fkv_prefix_redis_open(&config, &store));
    return store;
}

static uint64_t count_refused(const fkv_prefix_store *store) {
    fkv_prefix_store_stats stats;
    store->stats(store->self, &stats);
    return stats.refused;
}

/* Reads a page of page_bytes bytes. Checks that the store returns no bytes if the page is not authentic. */
static fkv_status read_key(const fkv_prefix_store *store, uint8_t number, uint8_t *page, uint64_t page_bytes) {
    const fkv_page_key key = {{number}};
    uint64_t n_bytes = 0;
    const fkv_status status = store->read(store->self, &key, page, page_bytes, &n_bytes);
    ck_assert_uint_eq(n_bytes, status == FKV_OK ? page_bytes : 0);
    return status;
}

/* Writes a page and copies the value that the server has received. Returns its length. */
static size_t write_page(value_server *s, const fkv_prefix_store *store, uint8_t *page, size_t n_page, uint8_t *value) {
    const fkv_page_key key = {{1}};
    for (size_t i = 0; i < n_page; i++) page[i] = (uint8_t)(i * 5 + i / 251 + 1);
    ck_ok(store->write(store->self, &key, page, n_page));
    (void)pthread_mutex_lock(&s->lock);
    const size_t n = s->n_value;
    memcpy(value, s->value, n);
    (void)pthread_mutex_unlock(&s->lock);
    ck_assert_uint_eq(n, n_page + 36);
    return n;
}

START_TEST(changed_values_are_refused_and_counted) {
    static value_server s;
    static uint8_t value[MAX_VALUE];
    uint8_t page[PAGE_BYTES];
    uint8_t got[PAGE_BYTES];
    uint64_t n_refused = 0;
    open_server(&s);
    fkv_prefix_store store = open_store(&s, 7);
    fkv_prefix_store other = open_store(&s, 8);
    const size_t n = write_page(&s, &store, page, sizeof page, value);
    for (size_t bit = 0; bit < 8 * n; bit++) { /* every bit */
        value[bit / 8] ^= (uint8_t)(1U << bit % 8);
        set_reply(&s, value, n);
        const fkv_status expected = bit < 64 ? FKV_GONE : FKV_FILE_DAMAGED; /* the first 8 bytes identify the format; a change of
                                                                               any other byte makes the value inauthentic */
        ck_status(read_key(&store, 1, got, sizeof got), expected);
        ck_assert_uint_eq(count_refused(&store), ++n_refused);
        value[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    for (size_t length = 0; length < n; length++) { /* every shorter value */
        set_reply(&s, value, length);
        ck_assert(read_key(&store, 1, got, sizeof got) != FKV_OK);
        ck_assert_uint_eq(count_refused(&store), ++n_refused);
    }
    set_reply(&s, value, n + 1); /* one byte too long for a page */
    ck_assert(read_key(&store, 1, got, sizeof got) != FKV_OK);
    ck_assert_uint_eq(count_refused(&store), ++n_refused);

    set_reply(&s, value, n);
    ck_status(read_key(&store, 2, got, sizeof got), FKV_FILE_DAMAGED); /* the value was written under another key */
    ck_assert_uint_eq(count_refused(&store), ++n_refused);
    ck_status(read_key(&other, 1, got, sizeof got), FKV_FILE_DAMAGED); /* the value was written with another secret */
    ck_assert_uint_eq(count_refused(&other), 1);
    ck_ok(read_key(&store, 1, got, sizeof got)); /* unchanged */
    ck_assert_mem_eq(got, page, sizeof page);
    ck_assert_uint_eq(count_refused(&store), n_refused);
    store.close(store.self);
    other.close(other.self);
    close_server(&s);
}
END_TEST

/* A page is decrypted in parts of up to 64 KiB while it arrives. */
START_TEST(every_part_of_a_large_page_is_authenticated) {
    enum { HEADER = 20, PART = 65536 };
    static const size_t changed[] = {8,
                                     HEADER,
                                     HEADER + 1000,
                                     HEADER + PART - 1,
                                     HEADER + PART,
                                     HEADER + 2 * PART - 1,
                                     HEADER + 2 * PART,
                                     HEADER + LARGE_BYTES - 2,
                                     HEADER + LARGE_BYTES - 1,
                                     HEADER + LARGE_BYTES};
    static value_server s;
    static uint8_t page[LARGE_BYTES];
    static uint8_t got[LARGE_BYTES];
    static uint8_t value[MAX_VALUE];
    open_server(&s);
    fkv_prefix_store store = open_store(&s, 7);
    const size_t n = write_page(&s, &store, page, sizeof page, value);
    for (size_t i = 0; i < N_OF(changed); i++) {
        value[changed[i]] ^= 0x10;
        set_reply(&s, value, n);
        ck_status(read_key(&store, 1, got, sizeof got), FKV_FILE_DAMAGED);
        value[changed[i]] ^= 0x10;
    }
    for (size_t i = 0; i < PART; i++) { /* exchange two parts */
        value[HEADER + i] ^= value[HEADER + PART + i];
        value[HEADER + PART + i] ^= value[HEADER + i];
        value[HEADER + i] ^= value[HEADER + PART + i];
    }
    set_reply(&s, value, n);
    ck_status(read_key(&store, 1, got, sizeof got), FKV_FILE_DAMAGED);
    ck_assert_uint_eq(count_refused(&store), N_OF(changed) + 1);
    set_reply(&s, s.value, n);
    ck_ok(read_key(&store, 1, got, sizeof got));
    ck_assert_mem_eq(got, page, sizeof page);

    for (size_t n_missing = 1; n_missing <= 17; n_missing++) { /* the tag does not arrive completely */
        fkv_prefix_store cut = open_store(&s, 7);
        set_missing(&s, n_missing);
        ck_status(read_key(&cut, 1, got, sizeof got), FKV_GONE);
        cut.close(cut.self);
    }
    store.close(store.self);
    close_server(&s);
}
END_TEST

TEST_MAIN("redis_values", changed_values_are_refused_and_counted, every_part_of_a_large_page_is_authenticated)
