/* Tests of the prefix store on Redis servers against hostile servers in this process: whatever a server sends, a call ends within
 * its deadline and no page is accepted. Also tests invalid configurations. fleet_test.py
 * tests the store with a real Redis server.
 */
#include "../src/store/resp.h"
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

enum { CAPACITY = 1000 };

/* ---- a fake server with fixed replies ---- */

enum { MAX_CONNECTIONS = 64 };

typedef struct fake_server {
    int listener;
    char path[100];
    const char *reply; /* reply to every command except those that get command_reply */
    size_t n_reply;
    bool closes;               /* true if the server closes the connection after this reply */
    size_t n_held;             /* number of commands that the server collects before it replies to any of them */
    const char *command_reply; /* reply to PING and SET; if NULL, these commands get `reply`, too */
    pthread_t thread;
    pthread_t threads[MAX_CONNECTIONS]; /* [n_threads] one thread per connection */
    size_t n_threads;
} fake_server;

typedef struct fake_connection {
    const fake_server *server;
    int fd;
} fake_connection;

/* Reads one command, which is an array of bulk strings, and stores the first string in `name`. Returns false at the end of the
 * connection. */
static bool read_command(FILE *in, char *name, size_t size) {
    char line[64];
    if (fgets(line, sizeof line, in) == NULL || line[0] != '*') return false;
    const long n = strtol(line + 1, NULL, 10);
    for (long i = 0; i < n; i++) {
        if (fgets(line, sizeof line, in) == NULL || line[0] != '$') return false;
        const long n_bytes = strtol(line + 1, NULL, 10) + 2;
        for (long at = 0; at < n_bytes; at++) {
            const int byte = fgetc(in);
            if (byte == EOF) return false;
            if (i == 0 && (size_t)at + 1 < size) name[at] = at + 2 < n_bytes ? (char)byte : 0;
        }
    }
    return true;
}

static void *serve_connection(void *user) {
    const fake_connection c = *(fake_connection *)user;
    const fake_server *f = c.server;
    char name[16] = "";
    FILE *in = fdopen(c.fd, "r");
    free(user);
    size_t n_read = 0;
    while (read_command(in, name, sizeof name)) {
        if (++n_read < f->n_held) continue;
        for (; n_read > 1; n_read--)
            if (write(c.fd, f->reply, f->n_reply) < 0) break;
        n_read = 0;
        const bool is_other = f->command_reply == NULL || (strcmp(name, "PING") != 0 && strcmp(name, "SET") != 0);
        const char *reply = is_other ? f->reply : f->command_reply;
        const size_t n_reply = is_other ? f->n_reply : strlen(reply);
        if (n_reply > 0 && write(c.fd, reply, n_reply) < 0) break;
        if (is_other && f->closes) break;
    }
    (void)fclose(in);
    return NULL;
}

static void *run_fake(void *user) {
    fake_server *f = user;
    for (int fd = accept(f->listener, NULL, NULL); fd >= 0; fd = accept(f->listener, NULL, NULL)) {
        fake_connection *c = malloc(sizeof *c);
        if (c == NULL || f->n_threads == MAX_CONNECTIONS) abort();
        *c = (fake_connection){.server = f, .fd = fd};
        if (pthread_create(&f->threads[f->n_threads++], NULL, serve_connection, c) != 0) abort();
    }
    return NULL;
}

static void open_fake_with(fake_server *f, fake_server config) {
    static int number;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)signal(SIGPIPE, SIG_IGN); /* a write to a connection that the store has closed must fail instead of raising SIGPIPE */
    *f = config;
    (void)snprintf(f->path, sizeof f->path, "/tmp/flatkv_fake_%d_%d", (int)getpid(), number++);
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", f->path);
    f->listener = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_ge(f->listener, 0);
    ck_assert_int_eq(bind(f->listener, (const struct sockaddr *)(const void *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(f->listener, 8), 0);
    ck_assert_int_eq(pthread_create(&f->thread, NULL, run_fake, f), 0);
}

static void open_fake(fake_server *f, const char *reply, size_t n_reply, bool closes) {
    open_fake_with(f, (fake_server){.reply = reply, .n_reply = n_reply, .closes = closes});
}

static void close_fake(fake_server *f) {
    (void)shutdown(f->listener, SHUT_RDWR);
    (void)pthread_join(f->thread, NULL);
    for (size_t i = 0; i < f->n_threads; i++)
        (void)pthread_join(f->threads[i], NULL); /* these threads end because the store has closed its connections */
    (void)close(f->listener);
    (void)unlink(f->path);
}

/* Log lines of a store, concatenated. */
typedef struct store_log {
    pthread_mutex_t lock;
    char text[4000];
} store_log;

static void add_line(void *user, const char *line) {
    store_log *log = user;
    (void)pthread_mutex_lock(&log->lock);
    const size_t n = strlen(log->text);
    (void)snprintf(log->text + n, sizeof log->text - n, "%s\n", line);
    (void)pthread_mutex_unlock(&log->lock);
}

static size_t count_text(const char *text, const char *part) {
    size_t n = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part)) n++;
    return n;
}

static fkv_prefix_store open_logged_store(const char *path, double timeout_s, const char *password, store_log *log) {
    char url[200];
    fkv_prefix_store store;
    (void)snprintf(url, sizeof url, "redis://unix:%s", path);
    const fkv_prefix_redis_config config = {
        .url = url, .timeout_s = timeout_s, .password = password, .log = log != NULL ? add_line : NULL, .log_user = log};
    ck_ok(fkv_prefix_redis_open(&config, &store));
    return store;
}

static fkv_prefix_store open_store(const char *path, double timeout_s) { return open_logged_store(path, timeout_s, NULL, NULL); }

static void pause_briefly(void) { (void)usleep(1000); }

static uint32_t count_unavailable(const fkv_prefix_store *store) {
    fkv_prefix_store_stats stats;
    store->stats(store->self, &stats);
    return stats.n_unavailable;
}

#define REPLY(text) {text, sizeof text - 1}

static const struct {
    const char *bytes;
    size_t n_bytes;
} REPLIES[] = {
    REPLY("$-1\r\n"),
    REPLY("$0\r\n\r\n"),
    REPLY("$5\r\nshort\r\n"),
    REPLY("$-2\r\n"),
    REPLY("$9223372036854775807\r\n"),
    REPLY("$99999999999999999999\r\n"),
    REPLY("$1037\r\n"),
    REPLY("$40\r\nFKVR\1\0\0\0aaaaaaaaaaaabbbbcccccccccccccccc\r\n"),
    REPLY("$40\r\nFKVR\2\0\0\0aaaaaaaaaaaabbbbcccccccccccccccc\r\n"),
    REPLY("$40\r\nXXXX\1\0\0\0aaaaaaaaaaaabbbbcccccccccccccccc\r\n"),
    REPLY("$40\r\nFKVR\1\0\0\0aaaaaaaaaaaabbbbccccccccccccccccXX"),
    REPLY("$4x\r\n"),
    REPLY("$\r\n"),
    REPLY("$5\0\r\nshort\r\n"),
    REPLY("\0\r\n"),
    REPLY("\r\n"),
    REPLY("\n"),
    REPLY("*1\r\n$4\r\nPONG\r\n"),
    REPLY(":12\r\n"),
    REPLY("+OK\r\n"),
    REPLY("-ERR \x1b[31mred\r\n"),
    REPLY("-OOM command not allowed\r\n"),
    REPLY("-WRONGPASS invalid\r\n"),
    REPLY("\0\0\0\0\0\0"),
    REPLY("HTTP/1.1 400 Bad Request\r\n\r\n"),
};

START_TEST(hostile_replies_are_refused) {
    static char endless[3000];
    uint8_t packed[CAPACITY];
    memset(endless, 'x', sizeof endless);
    endless[0] = '+';
    for (size_t i = 0; i <= N_OF(REPLIES); i++) {
        fake_server f;
        if (i < N_OF(REPLIES))
            open_fake(&f, REPLIES[i].bytes, REPLIES[i].n_bytes, true);
        else
            open_fake(&f, endless, sizeof endless, true); /* the server sends a line that never ends */
        fkv_prefix_store store = open_store(f.path, 60.0);
        const fkv_page_key key = {{(uint8_t)i}};
        uint64_t n_bytes = 0;
        const fkv_status status = store.read(store.self, &key, packed, sizeof packed, &n_bytes);
        ck_assert_msg(status == FKV_GONE || status == FKV_FILE_DAMAGED, "reply %zu: %s", i, fkv_status_name(status));
        memset(packed, 7, sizeof packed);
        (void)store.write(store.self, &key, packed, sizeof packed);
        store.remove(store.self, &key);
        store.expect(store.self, &key, 1);
        store.touch(store.self, &key, 1);
        (void)store.contains(store.self, &key);
        store.close(store.self);
        close_fake(&f);
    }
}
END_TEST

/* Pages that one call of read_pages() reads. */
typedef struct read_order {
    fkv_page_read pages[40];
    size_t n_pages;
    size_t n_next;
    size_t n_done;
    size_t most_in_flight; /* largest number of pages that were requested but not done at any time */
} read_order;

static fkv_page_read *next_page(void *user) {
    read_order *order = user;
    if (order->n_next == order->n_pages) return NULL;
    const size_t n = order->n_next + 1 - order->n_done;
    if (n > order->most_in_flight) order->most_in_flight = n;
    return &order->pages[order->n_next++];
}

static void page_done(void *user) {
    read_order *order = user;
    ck_assert_uint_lt(order->n_done, order->n_next);
    ck_assert_int_ne(order->pages[order->n_done++].status, FKV_OK);
    if (order->n_done < order->n_next) ck_assert_int_eq(order->pages[order->n_done].status, FKV_OK); /* not set yet */
}

/* Reads n_pages pages into the same buffer. None of them may be accepted. */
static void read_sequence(const fkv_prefix_store *store, size_t n_pages, uint8_t *packed, uint64_t capacity, read_order *order) {
    *order = (read_order){.n_pages = n_pages};
    for (size_t i = 0; i < n_pages; i++)
        order->pages[i] = (fkv_page_read){.key = {{(uint8_t)i}}, .packed = packed, .capacity = capacity};
    store->read_pages(store->self, &(fkv_page_reads){.user = order, .next = next_page, .done = page_done});
    ck_assert_uint_eq(order->n_done, n_pages);
    for (size_t i = 0; i < n_pages; i++)
        ck_assert(order->pages[i].status == FKV_GONE || order->pages[i].status == FKV_FILE_DAMAGED);
}

static void read_all(const char *path, size_t n_pages, read_order *order) {
    static uint8_t packed[CAPACITY];
    fkv_prefix_store store = open_store(path, 60.0);
    read_sequence(&store, n_pages, packed, sizeof packed, order);
    store.close(store.self);
}

/* The server replies only after it has received several commands. */
START_TEST(pages_are_requested_before_earlier_pages_arrive) {
    fake_server f;
    read_order order;
    open_fake_with(&f, (fake_server){.reply = "$-1\r\n", .n_reply = 5, .n_held = 8});
    read_all(f.path, 40, &order);
    close_fake(&f);
}
END_TEST

/* The larger the last value was, the fewer pages the store requests at a time. */
START_TEST(large_pages_are_requested_in_smaller_numbers) {
    static const struct {
        size_t n_value;
        size_t most_in_flight;
    } cases[] = {{400, 16}, {1300000, 9}, {4200000, 2}, {13000000, 2}};
    enum { MOST_BYTES = 13000000 };
    char *reply = calloc(1, MOST_BYTES + 40);
    uint8_t *packed = malloc(MOST_BYTES);
    ck_assert(reply != NULL && packed != NULL);
    for (size_t i = 0; i < N_OF(cases); i++) {
        fake_server f;
        read_order order;
        const size_t n_head = (size_t)snprintf(reply, 40, "$%zu\r\n", cases[i].n_value);
        memcpy(reply + n_head + cases[i].n_value, "\r\n", 2);
        open_fake(&f, reply, n_head + cases[i].n_value + 2, false);
        fkv_prefix_store store = open_store(f.path, 60.0);
        read_sequence(&store, 1, packed, MOST_BYTES, &order);
        read_sequence(&store, cases[i].most_in_flight + 2, packed, MOST_BYTES, &order);
        ck_assert_uint_eq(order.most_in_flight, cases[i].most_in_flight);
        store.close(store.self);
        close_fake(&f);
        memset(reply, 0, n_head + cases[i].n_value + 2);
    }
    free(reply);
    free(packed);
}
END_TEST

START_TEST(all_requested_pages_are_reported_if_the_connection_fails) {
    for (size_t i = 0; i < N_OF(REPLIES); i++) {
        fake_server f;
        read_order order;
        open_fake(&f, REPLIES[i].bytes, REPLIES[i].n_bytes, true);
        read_all(f.path, 20, &order);
        close_fake(&f);
    }
}
END_TEST

START_TEST(silent_server_is_not_used_and_costs_no_time) {
    uint8_t packed[CAPACITY] = {0};
    uint64_t n_bytes = 0;
    fake_server f;
    open_fake(&f, "", 0, false);
    fkv_prefix_store store = open_store(f.path, 0.05);
    const fkv_page_key key = {{1}};
    fkv_prefix_store_stats stats;
    ck_status(store.read(store.self, &key, packed, sizeof packed, &n_bytes), FKV_GONE); /* the call ends at its deadline */
    store.stats(store.self, &stats);
    ck_assert_uint_eq(stats.n_unavailable, 1);
    ck_assert(!store.contains(store.self, &key));
    ck_assert(!store.pending(store.self, &key)); /* callers must not wait for a server that does not respond */
    ck_status(store.read(store.self, &key, packed, sizeof packed, &n_bytes), FKV_GONE);
    ck_status(store.write(store.self, &key, packed, sizeof packed), FKV_BUSY);
    store.close(store.self);
    close_fake(&f);
}
END_TEST

/* If a lookup gets no reply in time, the store does not repeat the lookup while the reply is outstanding, and callers stop
 * waiting. */
START_TEST(wait_for_an_answer_is_limited) {
    fake_server f;
    open_fake(&f, "", 0, false);
    fkv_prefix_store store = open_store(f.path, 1.0);
    const fkv_page_key key = {{1}};
    (void)store.contains(store.self, &key);
    while (store.pending(store.self, &key)) pause_briefly();
    for (int i = 0; i < 3; i++) {
        ck_assert(!store.contains(store.self, &key));
        ck_assert(!store.pending(store.self, &key));
    }
    store.close(store.self);
    close_fake(&f);
}
END_TEST

/* The server replies to PING and SET, but closes the connection after any other command. */
START_TEST(outage_is_logged_once_and_ends_with_a_written_page) {
    uint8_t packed[CAPACITY] = {0};
    uint64_t n_bytes = 0;
    fake_server f;
    store_log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    open_fake_with(&f, (fake_server){.reply = "", .closes = true, .command_reply = "+OK\r\n"});
    fkv_prefix_store store = open_logged_store(f.path, 60.0, NULL, &log);
    const fkv_page_key key = {{1}};
    for (int i = 0; i < 2; i++) {
        ck_status(store.read(store.self, &key, packed, sizeof packed, &n_bytes), FKV_GONE);
        while (count_unavailable(&store) > 0) pause_briefly(); /* waits until the store can reach the server again */
    }
    ck_ok(store.write(store.self, &key, packed, sizeof packed));
    store.close(store.self);
    close_fake(&f);
    ck_assert_msg(count_text(log.text, "not reachable") == 1 && count_text(log.text, "in use again") == 1, "%s", log.text);
}
END_TEST

START_TEST(password_is_not_logged) {
    static const char reply[] = "-ERR AUTH sesame called without any password configured\r\n";
    uint8_t packed[CAPACITY];
    uint64_t n_bytes = 0;
    fake_server f;
    store_log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    open_fake(&f, reply, sizeof reply - 1, false);
    fkv_prefix_store store = open_logged_store(f.path, 60.0, "sesame", &log);
    const fkv_page_key key = {{1}};
    ck_status(store.read(store.self, &key, packed, sizeof packed, &n_bytes), FKV_GONE);
    ck_assert(strstr(fkv_message(), "sesame") == NULL);
    store.close(store.self);
    close_fake(&f);
    ck_assert_msg(count_text(log.text, "not used: ERR\n") == 1 && count_text(log.text, "sesame") == 0, "%s", log.text);
}
END_TEST

/* A server that replies to a lookup with an error is no longer used, even if the error only reports that its memory is full. */
START_TEST(error_reply_to_a_question_is_a_failure) {
    fake_server f;
    open_fake(&f, "-OOM command not allowed\r\n", 26, false);
    fkv_prefix_store store = open_store(f.path, 60.0);
    const fkv_page_key key = {{1}};
    ck_assert(!store.contains(store.self, &key));
    while (count_unavailable(&store) == 0) pause_briefly();
    ck_assert(!store.contains(store.self, &key) && !store.pending(store.self, &key));
    store.close(store.self);
    close_fake(&f);
}
END_TEST

START_TEST(invalid_configurations_are_rejected) {
    static const uint8_t secret[16] = {1};
    const struct {
        fkv_prefix_redis_config config;
        const char *message;
    } cases[] = {
        {{.url = "http://a:1"}, "expected redis://"},
        {{.url = "rediss://127.0.0.1:1"}, "requires TLS"},
        {{.url = "rediss://unix:/tmp/x", .tls = &(fkv_tls_client){0}}, "not available on Unix sockets"},
        {{.url = "redis://"}, "has no address"},
        {{.url = "redis://127.0.0.1"}, "expected HOST:PORT"},
        {{.url = "redis://127.0.0.1:"}, "expected HOST:PORT"},
        {{.url = "redis://[::1"}, "expected HOST:PORT"},
        {{.url = "redis://user:word@127.0.0.1:1"}, "must not contain a password"},
        {{.url = "redis://user@127.0.0.1:1"}, "requires a password file"},
        {{.url = "redis://192.0.2.1:6379"}, "must be encrypted"},
        {{.url = "redis://127.0.0.1:1,192.0.2.1:1"}, "must be encrypted"},
        {{.url = "redis://127.0.0.1:1", .secret = secret, .n_secret = 15}, "expected at least 16"},
        {{.url = "redis://unix:"}, "path of a Unix socket"},
        {{.url =
              "redis://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3,127.0.0.1:4,127.0.0.1:5,127.0.0.1:6,127.0.0.1:7,127.0.0.1:8,127.0.0.1:9,"
              "127.0.0.1:10,127.0.0.1:11,127.0.0.1:12,127.0.0.1:13,127.0.0.1:14,127.0.0.1:15,127.0.0.1:16,127.0.0.1:17"},
         "at most 16"},
    };
    for (size_t i = 0; i < N_OF(cases); i++) {
        fkv_prefix_store store;
        ck_status(fkv_prefix_redis_open(&cases[i].config, &store), FKV_BAD_ARGUMENT);
        ck_assert_msg(strstr(fkv_message(), cases[i].message) != NULL, "%s: %s", cases[i].config.url, fkv_message());
    }
    const fkv_prefix_redis_config remote = {.url = "redis://192.0.2.1:6379,[::1]:6379", .secret = secret, .n_secret = 16};
    fkv_prefix_store store;
    ck_ok(fkv_prefix_redis_open(&remote, &store)); /* allowed with a secret; the call does not wait for servers */
    store.close(store.self);
}
END_TEST

TEST_MAIN("prefix_redis", invalid_configurations_are_rejected, hostile_replies_are_refused,
          pages_are_requested_before_earlier_pages_arrive, large_pages_are_requested_in_smaller_numbers,
          all_requested_pages_are_reported_if_the_connection_fails, silent_server_is_not_used_and_costs_no_time,
          wait_for_an_answer_is_limited, outage_is_logged_once_and_ends_with_a_written_page, password_is_not_logged,
          error_reply_to_a_question_is_a_failure)
