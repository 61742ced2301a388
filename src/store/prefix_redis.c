/* A prefix store on one or more Redis or Valkey servers, which several flatkv servers share. Each packed page is one value.
 *
 * Keys: "fkv:1:" and 64 hexadecimal digits of HMAC-SHA-256(name key, page key). Values: "FKVR", version (4 bytes), nonce (12),
 * the packed page encrypted with AES-256-GCM, tag (16). The Redis key and the version are authenticated with the page, so a value
 * is accepted only under the key it was written to. The name key and the encryption key are derived from a secret that all flatkv
 * servers share. Read access to a Redis server reveals neither prompts nor tenants. Write access without the secret does not
 * suffice to forge a page.
 *
 * Threads: contains(), pending(), expect() and touch() only use tables in memory. A background thread asks the servers which
 * pages exist, refreshes expiry times and probes servers that have failed. read() and write() use the network on the threads of
 * their callers, with deadlines.
 *
 * Failures: after a failure, a server is not used until a probe of the background thread succeeds. Meanwhile its pages count as
 * missing, and writes to it are dropped. An outage lasts until a page has been read or written. During an outage, failures are
 * logged once, and the time between a failure and the next probe grows. Each page belongs to one server, chosen by rendezvous
 * hashing, so adding or losing one of n servers moves 1/n of the pages.
 *
 * Expiry: a page expires DEPTH_SECONDS earlier for each page that precedes it in its prompt. With the eviction policy
 * volatile-ttl, Redis therefore evicts the ends of prompts first. All memory is allocated at open.
 */
#include "../base/memory.h"
#include "../base/page_cipher.h"
#include "../base/timed_wait.h"
#include "page_file_format.h"
#include "prefix_pack.h"
#include "resp.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    MAX_SERVERS = 16,
    ANSWER_SETS = 16384, /* number of sets in the set-associative table that caches which pages exist; a power of two */
    ANSWER_WAYS = 4,
    ANSWER_KEY_BYTES = 16,
    RING_ENTRIES = 4096, /* capacity of the background thread's queue of existence queries and expiry refreshes */
    BATCH = 128,         /* maximum number of commands in one pipeline */
    CHUNK_BYTES = 64 * 1024,
    MIN_SAMPLE_BYTES = 64 * 1024,                 /* transfers of fewer bytes do not affect the measured rate */
    NAME_TEXT_BYTES = 6 + 2 * FKV_PAGE_KEY_BYTES, /* length of a Redis key */
    VALUE_HEADER_BYTES = 20,
    VALUE_OVERHEAD = VALUE_HEADER_BYTES + FKV_CIPHER_TAG_BYTES,
    VALUE_VERSION = 1,
    MAX_LOGIN_BYTES = 512,
    MIN_SECRET_BYTES = 16,
    DEFAULT_EXPIRY_SECONDS = 24 * 3600,
    MIN_EXPIRY_SECONDS = 60,
    DEPTH_SECONDS = 1
};

static const uint8_t VALUE_MAGIC[4] = {'F', 'K', 'V', 'R'};
static const double DEFAULT_TIMEOUT_S = 0.1; /* timeout for connecting, existence queries and the first line of a reply */
static const double PENDING_SHARE = 0.2;     /* fraction of the timeout for which an unanswered query counts as pending */
static const double WRITE_S = 1.0;           /* fixed part of the timeout for a write; the expected transfer time is added */
static const double FIRST_RATE = 20e6;       /* assumed transfer rate, in bytes per second, before the first measurement */
static const double MIN_RATE = 1e6;          /* lower limit of the assumed transfer rate */
static const double RATE_STEP = 0.2;         /* weight of the newest measurement in the moving average of the transfer rate */
static const double MIN_SAMPLE_S = 1e-3;     /* transfers that take fewer seconds do not affect the measured rate */
static const double FOUND_S = 10.0;          /* time, in seconds, for which a cached "page exists" result is trusted */
static const double MISSING_S = 2.0;
static const double PROBE_S = 0.5; /* time, in seconds, between the first failure of an outage and the first probe */
static const double MAX_PROBE_S = 8.0;
static const double REFUSED_PROBE_S = 30.0; /* time between probes of a server that rejects the login or a command */
static const double FULL_PAUSE_S = 1.0;     /* pause in writes, in seconds, after a server has reported that its memory is full */

typedef enum answer_state { ANSWER_UNKNOWN, ANSWER_PENDING, ANSWER_FOUND, ANSWER_MISSING } answer_state;

typedef struct answer {
    uint8_t key[ANSWER_KEY_BYTES];
    answer_state state;
    double at; /* fkv_seconds_now() */
} answer;

typedef enum task_kind { TASK_ASK, TASK_REFRESH } task_kind;

typedef struct task {
    fkv_page_key key;
    task_kind kind;
    uint32_t depth;
} task;

/* One Redis server. The fields from `is_down` on are protected by the lock of the store. */
typedef struct redis_server {
    fkv_resp_address address;
    uint64_t hash;
    fkv_resp asker; /* connection used by the background thread */
    fkv_resp reader;
    fkv_resp writer;
    bool is_down;
    double probe_at;
    double probe_s;    /* number of seconds to wait after the next failure before the server is probed */
    double full_until; /* time before which no pages are written to the server */
    bool full_is_logged;
    bool outage_is_logged; /* true if a failure has been logged and no page has been read or written since then */
    double rate;           /* measured transfer rate, in bytes per second */
} redis_server;

typedef struct redis_store {
    uint64_t map_bytes;
    uint32_t n_servers;
    redis_server servers[MAX_SERVERS];
    char login[MAX_LOGIN_BYTES]; /* AUTH command; empty if no password is configured */
    size_t n_login;
    uint8_t name_key[FKV_CIPHER_KEY_BYTES];
    uint8_t value_key[FKV_CIPHER_KEY_BYTES];
    uint64_t expiry_s;
    double timeout_s;
    fkv_log_fn log;
    void *log_user;

    pthread_mutex_t read_lock; /* held while a page is read or removed; protects the servers' read connections and `opener` */
    fkv_cipher opener;
    pthread_mutex_t write_lock; /* held while a page is written; protects the servers' write connections, `cipher` and `chunk` */
    fkv_cipher cipher;

    pthread_mutex_t lock; /* protects the following fields; never held during I/O */
    pthread_cond_t changed;
    bool closing;
    uint32_t n_tasks;
    uint32_t first_task;
    uint64_t n_refused; /* number of values that failed authentication or had an unknown format */

    pthread_t thread;
    bool thread_runs;
    task batch[BATCH]; /* tasks that the background thread is processing */
    char names[BATCH][NAME_TEXT_BYTES + 1];
    char commands[BATCH * 160];
    uint8_t chunk[CHUNK_BYTES];
    task tasks[RING_ENTRIES];
    answer answers[ANSWER_SETS][ANSWER_WAYS];
} redis_store;

/* ---- keys ---- */

static fkv_status make_name(const redis_store *s, const fkv_page_key *key, char name[NAME_TEXT_BYTES + 1]) {
    uint8_t hash[FKV_CIPHER_KEY_BYTES];
    FKV_TRY(fkv_keyed_hash(s->name_key, key->bytes, sizeof key->bytes, hash));
    (void)snprintf(name, 7, "fkv:1:");
    for (size_t i = 0; i < sizeof hash; i++) (void)snprintf(name + 6 + 2 * i, 3, "%02x", hash[i]);
    return FKV_OK;
}

static uint64_t mix_bits(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Returns the server that stores a page: the server for which the hash of its name and the page key is largest. */
static redis_server *server_of(redis_store *s, const fkv_page_key *key) {
    uint64_t low = 0;
    memcpy(&low, key->bytes, sizeof low);
    redis_server *best = &s->servers[0];
    uint64_t most = 0;
    for (uint32_t i = 0; i < s->n_servers; i++) {
        const uint64_t weight = mix_bits(low ^ s->servers[i].hash);
        if (weight > most) best = &s->servers[i];
        if (weight > most) most = weight;
    }
    return best;
}

/* Returns the remaining lifetime of a page in milliseconds. depth: number of pages that precede it in its prompt. */
static uint64_t lifetime_ms(const redis_store *s, uint64_t depth) {
    const uint64_t earlier = depth * DEPTH_SECONDS;
    const uint64_t seconds = s->expiry_s > earlier + MIN_EXPIRY_SECONDS ? s->expiry_s - earlier : MIN_EXPIRY_SECONDS;
    return seconds * 1000;
}

/* ---- state of servers ---- */

static void log_line(const redis_store *s, const redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 200];
    if (s->log == NULL) return;
    (void)snprintf(line, sizeof line, "prefix store %s: %s", server->address.name, text);
    s->log(s->log_user, line);
}

static bool is_usable(redis_store *s, const redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool usable = !server->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return usable;
}

/* Stops using a server until a probe succeeds. The first probe is sent after probe_s seconds. If probe_s is 0, the delay is
 * chosen by the store and grows during an outage. Only the first failure of an outage is logged, with its reason. */
static void stop_using(redis_store *s, redis_server *server, double probe_s, const char *reason) {
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
    if (is_new) log_line(s, server, reason);
}

static void mark_down(redis_store *s, redis_server *server, fkv_resp_failure failure) {
    stop_using(s, server, 0.0,
               failure == FKV_RESP_TIMEOUT    ? "no reply before the deadline; pages are computed until the server responds"
               : failure == FKV_RESP_PROTOCOL ? "invalid reply; pages are computed until the server responds"
                                              : "not reachable; pages are computed until the server responds");
}

/* Handles an error reply: the server is not used until it accepts commands again. */
static void handle_error_reply(redis_store *s, redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 100];
    const bool busy = strncmp(text, "LOADING", 7) == 0 || strncmp(text, "BUSY", 4) == 0;
    (void)snprintf(line, sizeof line, "not used: %s", text);
    stop_using(s, server, busy ? PROBE_S : REFUSED_PROBE_S, line);
}

/* Handles an error reply to a write. If the server has no free memory, only writes to it are paused. */
static void handle_write_error(redis_store *s, redis_server *server, const char *text) {
    char line[FKV_RESP_LINE_BYTES + 100];
    if (strncmp(text, "OOM", 3) != 0) {
        handle_error_reply(s, server, text);
        return;
    }
    (void)pthread_mutex_lock(&s->lock);
    const bool is_new = !server->full_is_logged;
    server->full_is_logged = true;
    server->full_until = fkv_seconds_now() + FULL_PAUSE_S;
    (void)pthread_mutex_unlock(&s->lock);
    (void)snprintf(line, sizeof line, "pages are not written, because the server is full: %s", text);
    if (is_new) log_line(s, server, line);
}

/* Ends an outage after a page has been read or written. */
static void note_success(redis_store *s, redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool ends = server->outage_is_logged && !server->is_down; /* another thread may have detected a new failure */
    if (!server->is_down) {
        server->outage_is_logged = false;
        server->probe_s = PROBE_S;
    }
    (void)pthread_mutex_unlock(&s->lock);
    if (ends) log_line(s, server, "in use again");
}

/* Connects and logs in, unless the connection is already open and idle. */
static bool ensure_connected(redis_store *s, redis_server *server, fkv_resp *c) {
    const double deadline = fkv_seconds_now() + s->timeout_s;
    fkv_resp_reply reply;
    if (fkv_resp_is_idle(c)) return true; /* a connection that is not idle was closed by the server or has unread data */
    if (!fkv_resp_connect(c, &server->address, deadline)) return false;
    if (s->n_login == 0) return true;
    struct iovec part = {.iov_base = s->login, .iov_len = s->n_login};
    if (!fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline)) return false;
    if (reply.kind == FKV_RESP_STATUS) return true;
    reply.text[strcspn(reply.text, " ")] = 0; /* the rest of the reply may contain the password */
    handle_error_reply(s, server, reply.text);
    fkv_resp_close(c);
    c->failure = FKV_RESP_NONE; /* already reported */
    return false;
}

static fkv_status connection_failed(redis_store *s, redis_server *server, const fkv_resp *c) {
    if (c->failure != FKV_RESP_NONE) mark_down(s, server, c->failure);
    return fkv_fail(FKV_IO, "the prefix store %s is not available", server->address.name);
}

/* ---- cached results of existence queries ---- */

/* Finds the cached existence-query result of a page. If there is none and `add` is true, replaces the oldest entry in the set
 * that the page key maps to. The caller holds the lock.
 */
static answer *find_answer(redis_store *s, const fkv_page_key *key, bool add) {
    uint32_t set = 0;
    memcpy(&set, key->bytes + ANSWER_KEY_BYTES, sizeof set);
    answer *ways = s->answers[set % ANSWER_SETS];
    answer *oldest = &ways[0];
    for (uint32_t i = 0; i < ANSWER_WAYS; i++) {
        if (ways[i].state != ANSWER_UNKNOWN && memcmp(ways[i].key, key->bytes, ANSWER_KEY_BYTES) == 0) return &ways[i];
        if (ways[i].state == ANSWER_UNKNOWN || (oldest->state != ANSWER_UNKNOWN && ways[i].at < oldest->at)) oldest = &ways[i];
    }
    if (!add) return NULL;
    *oldest = (answer){.state = ANSWER_UNKNOWN};
    memcpy(oldest->key, key->bytes, ANSWER_KEY_BYTES);
    return oldest;
}

static void set_answer(redis_store *s, const fkv_page_key *key, answer_state state) {
    answer *a = find_answer(s, key, true);
    a->state = state;
    a->at = fkv_seconds_now();
}

static void note_answer(redis_store *s, const fkv_page_key *key, answer_state state) {
    (void)pthread_mutex_lock(&s->lock);
    set_answer(s, key, state);
    (void)pthread_mutex_unlock(&s->lock);
}

/* Returns the cached result of the existence query for a page. Returns ANSWER_UNKNOWN if there is no result or if the result or
 * the unanswered query is too old. The caller holds the lock. */
static answer_state current_answer(redis_store *s, const fkv_page_key *key) {
    const answer *a = find_answer(s, key, false);
    if (a == NULL) return ANSWER_UNKNOWN;
    const double age = fkv_seconds_now() - a->at;
    const double limit = a->state == ANSWER_FOUND     ? FOUND_S
                         : a->state == ANSWER_MISSING ? MISSING_S
                                                      : PENDING_SHARE * s->timeout_s;
    return age <= limit ? a->state : ANSWER_UNKNOWN;
}

/* Queues a task for the background thread. Returns false if the queue is full. The caller holds the lock. */
static bool add_task(redis_store *s, task_kind kind, const fkv_page_key *key, uint32_t depth) {
    if (s->n_tasks == RING_ENTRIES) return false;
    if (s->n_tasks == 0) (void)pthread_cond_signal(&s->changed);
    s->tasks[(s->first_task + s->n_tasks++) % RING_ENTRIES] = (task){.key = *key, .kind = kind, .depth = depth};
    return true;
}

/* Returns current_answer(). If the answer is unknown and no query is outstanding, queues an existence query for the page. The
 * caller holds the lock. */
static answer_state ask_for(redis_store *s, const fkv_page_key *key) {
    const answer_state state = current_answer(s, key);
    const answer *a = find_answer(s, key, false);
    if (state != ANSWER_UNKNOWN || (a != NULL && a->state == ANSWER_PENDING)) return state;
    if (server_of(s, key)->is_down || !add_task(s, TASK_ASK, key, 0)) return ANSWER_UNKNOWN;
    set_answer(s, key, ANSWER_PENDING);
    return ANSWER_PENDING;
}

/* ---- functions that do not block ---- */

static bool redis_contains(void *self, const fkv_page_key *key) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    const bool there = ask_for(s, key) == ANSWER_FOUND && !server_of(s, key)->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return there;
}

static bool redis_pending(void *self, const fkv_page_key *key) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    const bool pending = current_answer(s, key) == ANSWER_PENDING && !server_of(s, key)->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return pending;
}

static void redis_expect(void *self, const fkv_page_key *keys, uint32_t n) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n; i++) (void)ask_for(s, &keys[i]);
    (void)pthread_mutex_unlock(&s->lock);
}

static void redis_touch(void *self, const fkv_page_key *keys, uint32_t n) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n; i++)
        if (current_answer(s, &keys[i]) == ANSWER_FOUND) (void)add_task(s, TASK_REFRESH, &keys[i], i);
    (void)pthread_mutex_unlock(&s->lock);
}

/* ---- background thread ---- */

/* Sends the tasks of one server as a single pipeline and reads the replies. */
static bool run_pipeline(redis_store *s, redis_server *server, uint32_t n_tasks) {
    fkv_resp *c = &server->asker;
    size_t n_bytes = 0;
    uint32_t n_sent = 0;
    task *sent[BATCH];
    if (!ensure_connected(s, server, c)) return false;
    for (uint32_t i = 0; i < n_tasks; i++) {
        task *t = &s->batch[i];
        char *at = s->commands + n_bytes;
        const size_t room = sizeof s->commands - n_bytes;
        char ms[24];
        if (server_of(s, &t->key) != server) continue;
        sent[n_sent++] = t;
        (void)snprintf(ms, sizeof ms, "%llu", (unsigned long long)lifetime_ms(s, t->depth));
        if (t->kind == TASK_ASK)
            n_bytes += (size_t)snprintf(at, room, "*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%s\r\n", NAME_TEXT_BYTES, s->names[i]);
        else
            n_bytes += (size_t)snprintf(at, room, "*3\r\n$7\r\nPEXPIRE\r\n$%d\r\n%s\r\n$%zu\r\n%s\r\n", NAME_TEXT_BYTES,
                                        s->names[i], strlen(ms), ms);
    }
    const double deadline = fkv_seconds_now() + s->timeout_s;
    struct iovec part = {.iov_base = s->commands, .iov_len = n_bytes};
    if (n_sent == 0) return true;
    if (!fkv_resp_send(c, &part, 1, deadline)) return false;
    for (uint32_t i = 0; i < n_sent; i++) {
        fkv_resp_reply reply;
        if (!fkv_resp_receive(c, &reply, deadline)) return false;
        if (reply.kind == FKV_RESP_ERROR) {
            handle_error_reply(s, server, reply.text);
            fkv_resp_close(c);
            c->failure = FKV_RESP_NONE;
            return false;
        }
        if (sent[i]->kind == TASK_ASK)
            note_answer(s, &sent[i]->key,
                        reply.kind == FKV_RESP_INTEGER && reply.number > VALUE_OVERHEAD ? ANSWER_FOUND : ANSWER_MISSING);
    }
    return true;
}

/* Marks the unanswered existence queries of the batch as unknown, so that they can be queued again. */
static void forget_queries(redis_store *s, uint32_t n_tasks) {
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n_tasks; i++) {
        answer *a = s->batch[i].kind == TASK_ASK ? find_answer(s, &s->batch[i].key, false) : NULL;
        if (a != NULL && a->state == ANSWER_PENDING) a->state = ANSWER_UNKNOWN;
    }
    (void)pthread_mutex_unlock(&s->lock);
}

static void run_tasks(redis_store *s, uint32_t n_tasks) {
    bool named = true;
    for (uint32_t i = 0; i < n_tasks && named; i++) named = make_name(s, &s->batch[i].key, s->names[i]) == FKV_OK;
    for (uint32_t i = 0; i < s->n_servers && named; i++) {
        redis_server *server = &s->servers[i];
        if (is_usable(s, server) && !run_pipeline(s, server, n_tasks)) (void)connection_failed(s, server, &server->asker);
    }
    forget_queries(s, n_tasks);
}

/* Sends PING to a server that has failed, and uses the server again if it replies. */
static void probe_server(redis_store *s, redis_server *server) {
    static const char ping[] = "*1\r\n$4\r\nPING\r\n";
    struct iovec part = {.iov_base = (void *)(uintptr_t)ping, .iov_len = sizeof ping - 1};
    fkv_resp_reply reply = {0};
    fkv_resp_close(&server->asker); /* late replies may still arrive on the old connection */
    const bool connected = ensure_connected(s, server, &server->asker);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    const bool replied = connected && fkv_resp_send(&server->asker, &part, 1, deadline) &&
                         fkv_resp_receive(&server->asker, &reply, deadline) && reply.kind != FKV_RESP_ERROR;
    (void)pthread_mutex_lock(&s->lock);
    server->is_down = !replied;
    if (replied || server->asker.failure == FKV_RESP_TIMEOUT)
        server->probe_s = 2.0 * server->probe_s < MAX_PROBE_S ? 2.0 * server->probe_s : MAX_PROBE_S;
    server->probe_at = fkv_seconds_now() + server->probe_s;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Waits until there is a task or the next probe is due. The caller holds the lock. */
static void wait_for_tasks(redis_store *s) {
    double until = 0.0;
    for (uint32_t i = 0; i < s->n_servers; i++)
        if (s->servers[i].is_down && (until == 0.0 || s->servers[i].probe_at < until)) until = s->servers[i].probe_at;
    if (until == 0.0) {
        (void)pthread_cond_wait(&s->changed, &s->lock);
    } else if (until > fkv_seconds_now()) {
        (void)fkv_cond_wait_until(&s->changed, &s->lock, until);
    }
}

static void *run_background(void *user) {
    redis_store *s = user;
    (void)pthread_mutex_lock(&s->lock);
    while (!s->closing) {
        if (s->n_tasks == 0) wait_for_tasks(s);
        uint32_t n = 0;
        for (; n < BATCH && s->n_tasks > 0; n++, s->n_tasks--) {
            s->batch[n] = s->tasks[s->first_task];
            s->first_task = (s->first_task + 1) % RING_ENTRIES;
        }
        const double now = fkv_seconds_now();
        bool probe[MAX_SERVERS] = {false};
        for (uint32_t i = 0; i < s->n_servers; i++) probe[i] = s->servers[i].is_down && s->servers[i].probe_at <= now;
        (void)pthread_mutex_unlock(&s->lock);
        if (n > 0) run_tasks(s, n);
        for (uint32_t i = 0; i < s->n_servers; i++)
            if (probe[i]) probe_server(s, &s->servers[i]);
        (void)pthread_mutex_lock(&s->lock);
    }
    (void)pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- read, write, remove ---- */

/* Builds the additional authenticated data of a value: its Redis key, magic and version. */
static size_t make_bound(const char *name, const uint8_t header[VALUE_HEADER_BYTES], uint8_t bound[NAME_TEXT_BYTES + 8]) {
    memcpy(bound, name, NAME_TEXT_BYTES);
    memcpy(bound + NAME_TEXT_BYTES, header, 8);
    return NAME_TEXT_BYTES + 8;
}

static void count_refused(redis_store *s) {
    (void)pthread_mutex_lock(&s->lock);
    s->n_refused++;
    (void)pthread_mutex_unlock(&s->lock);
}

static double time_for_bytes(redis_store *s, const redis_server *server, uint64_t n_bytes) {
    (void)pthread_mutex_lock(&s->lock);
    const double rate = server->rate;
    (void)pthread_mutex_unlock(&s->lock);
    return 4.0 * (double)n_bytes / rate;
}

static void note_rate(redis_store *s, redis_server *server, uint64_t n_bytes, double seconds) {
    if (n_bytes < MIN_SAMPLE_BYTES || seconds < MIN_SAMPLE_S) return;
    (void)pthread_mutex_lock(&s->lock);
    server->rate += RATE_STEP * ((double)n_bytes / seconds - server->rate);
    if (server->rate < MIN_RATE) server->rate = MIN_RATE;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Handles a failed transfer of a page. After a timeout, the deadline of the next transfer is longer. */
static fkv_status transfer_failed(redis_store *s, redis_server *server, const fkv_resp *c) {
    (void)pthread_mutex_lock(&s->lock);
    if (c->failure == FKV_RESP_TIMEOUT) server->rate = server->rate > 2.0 * MIN_RATE ? 0.5 * server->rate : MIN_RATE;
    (void)pthread_mutex_unlock(&s->lock);
    return connection_failed(s, server, c);
}

/* Receives the n_value bytes of a value and decrypts the page. */
static fkv_status receive_page(redis_store *s, redis_server *server, const char *name, uint64_t n_value, uint8_t *packed,
                               uint64_t capacity, uint64_t *n_bytes) {
    fkv_resp *c = &server->reader;
    uint8_t header[VALUE_HEADER_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[NAME_TEXT_BYTES + 8];
    if (n_value < VALUE_OVERHEAD || n_value - VALUE_OVERHEAD > capacity) {
        fkv_resp_close(c); /* closing the connection is cheaper than reading and discarding the value */
        count_refused(s);
        return fkv_fail(FKV_GONE, "the value of a stored page has %llu bytes (expected %d to %llu)", (unsigned long long)n_value,
                        VALUE_OVERHEAD, (unsigned long long)capacity + VALUE_OVERHEAD);
    }
    const uint64_t n_page = n_value - VALUE_OVERHEAD;
    const double start = fkv_seconds_now();
    const double deadline = start + s->timeout_s + time_for_bytes(s, server, n_value);
    if (!fkv_resp_receive_bytes(c, header, sizeof header, deadline) || !fkv_resp_receive_bytes(c, packed, n_page, deadline) ||
        !fkv_resp_receive_bytes(c, tag, sizeof tag, deadline) || !fkv_resp_receive_end(c, deadline))
        return transfer_failed(s, server, c);
    note_rate(s, server, n_value, fkv_seconds_now() - start);
    note_success(s, server);
    uint32_t version = 0;
    memcpy(&version, header + 4, sizeof version);
    if (memcmp(header, VALUE_MAGIC, 4) != 0 || version != VALUE_VERSION) { /* possibly written by another flatkv version */
        count_refused(s);
        return fkv_fail(FKV_GONE, "the value of a stored page has an unknown format");
    }
    FKV_TRY(fkv_cipher_begin(&s->opener, header + 8, bound, make_bound(name, header, bound)));
    for (uint64_t at = 0; at < n_page; at += CHUNK_BYTES)
        FKV_TRY(fkv_cipher_add(&s->opener, packed + at, packed + at, n_page - at < CHUNK_BYTES ? n_page - at : CHUNK_BYTES));
    const fkv_status status = fkv_cipher_end(&s->opener, tag);
    if (status == FKV_FILE_DAMAGED) count_refused(s);
    *n_bytes = n_page;
    return status;
}

static fkv_status redis_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    redis_store *s = self;
    redis_server *server = server_of(s, key);
    fkv_resp *c = &server->reader;
    char name[NAME_TEXT_BYTES + 1];
    char command[160];
    fkv_resp_reply reply;
    FKV_TRY(make_name(s, key, name));
    FKV_REQUIRE(is_usable(s, server), FKV_GONE, "the prefix store %s is not available", server->address.name);
    const int n = snprintf(command, sizeof command, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", NAME_TEXT_BYTES, name);
    struct iovec part = {.iov_base = command, .iov_len = (size_t)n};
    (void)pthread_mutex_lock(&s->read_lock);
    fkv_status status = FKV_OK;
    const bool connected = ensure_connected(s, server, c);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    if (!connected || !fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline)) {
        status = connection_failed(s, server, c);
    } else if (reply.kind == FKV_RESP_ERROR) {
        handle_error_reply(s, server, reply.text);
        status = fkv_fail(FKV_GONE, "the prefix store %s refused to read a page: %s", server->address.name, reply.text);
    } else if (reply.kind != FKV_RESP_BULK || reply.number < 0) {
        status = fkv_fail(FKV_GONE, "the page is not in the prefix store");
        if (reply.kind != FKV_RESP_BULK) fkv_resp_close(c);
    } else {
        status = receive_page(s, server, name, (uint64_t)reply.number, packed, capacity, n_bytes);
    }
    (void)pthread_mutex_unlock(&s->read_lock);
    if (status != FKV_OK) note_answer(s, key, ANSWER_MISSING);
    return status == FKV_IO ? fkv_fail(FKV_GONE, "the prefix store %s is not available", server->address.name) : status;
}

/* Sends a SET command, encrypting the page in chunks. */
static bool send_page(redis_store *s, redis_server *server, const char *name, const uint8_t *packed, uint64_t n_bytes,
                      fkv_status *status) {
    fkv_resp *c = &server->writer;
    const double deadline = fkv_seconds_now() + WRITE_S + time_for_bytes(s, server, n_bytes);
    uint8_t header[VALUE_HEADER_BYTES];
    uint8_t tag[FKV_CIPHER_TAG_BYTES];
    uint8_t bound[NAME_TEXT_BYTES + 8];
    char begin[200];
    char end[80];
    char ms[24];
    const uint32_t version = VALUE_VERSION;
    memcpy(header, VALUE_MAGIC, 4);
    memcpy(header + 4, &version, sizeof version);
    *status = fkv_cipher_nonce(header + 8);
    if (*status == FKV_OK) *status = fkv_cipher_begin(&s->cipher, header + 8, bound, make_bound(name, header, bound));
    (void)snprintf(ms, sizeof ms, "%llu", (unsigned long long)lifetime_ms(s, fkv_pack_logical(packed, n_bytes)));
    int n = snprintf(begin, sizeof begin, "*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%llu\r\n", NAME_TEXT_BYTES, name,
                     (unsigned long long)n_bytes + VALUE_OVERHEAD);
    struct iovec parts[2] = {{.iov_base = begin, .iov_len = (size_t)n}, {.iov_base = header, .iov_len = sizeof header}};
    if (*status != FKV_OK || !fkv_resp_send(c, parts, 2, deadline)) return false;
    for (uint64_t at = 0; at < n_bytes; at += CHUNK_BYTES) {
        const size_t size = n_bytes - at < CHUNK_BYTES ? (size_t)(n_bytes - at) : CHUNK_BYTES;
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
static bool accepts_writes(redis_store *s, const redis_server *server) {
    (void)pthread_mutex_lock(&s->lock);
    const bool accepts = !server->is_down && fkv_seconds_now() >= server->full_until;
    (void)pthread_mutex_unlock(&s->lock);
    return accepts;
}

static fkv_status redis_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    redis_store *s = self;
    redis_server *server = server_of(s, key);
    fkv_resp *c = &server->writer;
    char name[NAME_TEXT_BYTES + 1];
    fkv_resp_reply reply;
    FKV_TRY(make_name(s, key, name));
    FKV_REQUIRE(accepts_writes(s, server), FKV_BUSY, "the prefix store %s accepts no pages now", server->address.name);
    (void)pthread_mutex_lock(&s->write_lock);
    fkv_status status = FKV_OK;
    bool done = ensure_connected(s, server, c) && send_page(s, server, name, packed, n_bytes, &status) &&
                fkv_resp_receive(c, &reply, fkv_seconds_now() + WRITE_S);
    if (status != FKV_OK) {
        fkv_resp_close(c); /* the value was not sent completely */
    } else if (!done) {
        status = transfer_failed(s, server, c);
    } else if (reply.kind == FKV_RESP_ERROR) {
        handle_write_error(s, server, reply.text);
        status = fkv_fail(FKV_IO, "the prefix store %s refused a page: %s", server->address.name, reply.text);
    }
    (void)pthread_mutex_unlock(&s->write_lock);
    if (status != FKV_OK) return status;
    note_success(s, server);
    (void)pthread_mutex_lock(&s->lock);
    server->full_is_logged = false;
    set_answer(s, key, ANSWER_FOUND);
    (void)pthread_mutex_unlock(&s->lock);
    return FKV_OK;
}

static void redis_remove(void *self, const fkv_page_key *key) {
    redis_store *s = self;
    redis_server *server = server_of(s, key);
    fkv_resp *c = &server->reader;
    char name[NAME_TEXT_BYTES + 1];
    char command[160];
    fkv_resp_reply reply;
    if (!is_usable(s, server) || make_name(s, key, name) != FKV_OK) return;
    const int n = snprintf(command, sizeof command, "*2\r\n$6\r\nUNLINK\r\n$%d\r\n%s\r\n", NAME_TEXT_BYTES, name);
    struct iovec part = {.iov_base = command, .iov_len = (size_t)n};
    (void)pthread_mutex_lock(&s->read_lock);
    const bool connected = ensure_connected(s, server, c);
    const double deadline = fkv_seconds_now() + s->timeout_s;
    if (!connected || !fkv_resp_send(c, &part, 1, deadline) || !fkv_resp_receive(c, &reply, deadline))
        (void)connection_failed(s, server, c);
    else if (reply.kind == FKV_RESP_ERROR)
        handle_error_reply(s, server, reply.text);
    (void)pthread_mutex_unlock(&s->read_lock);
    note_answer(s, key, ANSWER_MISSING);
}

/* ---- open and close ---- */

static void redis_stats(void *self, fkv_prefix_store_stats *stats) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    *stats = (fkv_prefix_store_stats){.memory = s->map_bytes, .refused = s->n_refused};
    for (uint32_t i = 0; i < s->n_servers; i++) stats->n_unavailable += s->servers[i].is_down;
    (void)pthread_mutex_unlock(&s->lock);
}

static void redis_close(void *self) {
    redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    s->closing = true;
    (void)pthread_cond_signal(&s->changed);
    (void)pthread_mutex_unlock(&s->lock);
    if (s->thread_runs) (void)pthread_join(s->thread, NULL);
    for (uint32_t i = 0; i < s->n_servers; i++) {
        fkv_resp_close(&s->servers[i].asker);
        fkv_resp_close(&s->servers[i].reader);
        fkv_resp_close(&s->servers[i].writer);
    }
    fkv_cipher_close(&s->opener);
    fkv_cipher_close(&s->cipher);
    (void)pthread_cond_destroy(&s->changed);
    (void)pthread_mutex_destroy(&s->lock);
    (void)pthread_mutex_destroy(&s->read_lock);
    (void)pthread_mutex_destroy(&s->write_lock);
    fkv_map_close(s, s->map_bytes);
}

/* Derives the name key and the encryption key from the secret. */
static fkv_status derive_keys(redis_store *s, const uint8_t *secret, size_t n_secret) {
    uint8_t master[FKV_SHA256_BYTES];
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    if (n_secret > 0) fkv_sha256_add(&sha, secret, n_secret);
    FKV_TRY(fkv_sha256_close(&sha, master));
    FKV_TRY(fkv_keyed_hash(master, "flatkv redis name 1", 19, s->name_key));
    return fkv_keyed_hash(master, "flatkv redis value 1", 20, s->value_key);
}

/* Parses redis://[USER@]ADDRESS[,ADDRESS...] and resolves the addresses. */
static fkv_status parse_url(redis_store *s, const char *url, const char *password) {
    char user[128] = "";
    char address[300];
    FKV_REQUIRE(strncmp(url, "redis://", 8) == 0, FKV_BAD_ARGUMENT,
                "invalid URL of a prefix store: expected redis://[USER@]HOST:PORT[,HOST:PORT...] (got %s)", url);
    const char *at = url + 8;
    const char *name_end = strchr(at, '@');
    if (name_end != NULL) {
        FKV_REQUIRE((size_t)(name_end - at) < sizeof user && memchr(at, ':', (size_t)(name_end - at)) == NULL, FKV_BAD_ARGUMENT,
                    "the URL of a prefix store must not contain a password, because other users can see command lines: use a "
                    "password file");
        (void)snprintf(user, sizeof user, "%.*s", (int)(name_end - at), at);
        at = name_end + 1;
    }
    while (*at != 0) {
        const size_t n = strcspn(at, ",");
        FKV_REQUIRE(s->n_servers < MAX_SERVERS, FKV_BAD_ARGUMENT, "too many Redis servers: at most %d are supported",
                    MAX_SERVERS);
        FKV_REQUIRE(n < sizeof address, FKV_BAD_ARGUMENT, "the address of a Redis server is too long");
        (void)snprintf(address, sizeof address, "%.*s", (int)n, at);
        redis_server *server = &s->servers[s->n_servers++];
        *server = (redis_server){
            .asker = {.fd = -1}, .reader = {.fd = -1}, .writer = {.fd = -1}, .probe_s = PROBE_S, .rate = FIRST_RATE};
        FKV_TRY(fkv_resp_resolve(address, &server->address));
        for (const char *c = address; *c != 0; c++) server->hash = mix_bits(server->hash * 257 + (unsigned char)*c);
        at += n + (at[n] == ',');
    }
    FKV_REQUIRE(s->n_servers > 0, FKV_BAD_ARGUMENT, "the URL of a prefix store has no address: %s", url);
    FKV_REQUIRE(user[0] == 0 || password != NULL, FKV_BAD_ARGUMENT, "the Redis user %s requires a password file", user);
    if (password == NULL) return FKV_OK;
    FKV_REQUIRE(strlen(password) + strlen(user) + 64 < sizeof s->login, FKV_BAD_ARGUMENT, "the Redis password is too long");
    int n = 0;
    if (user[0] != 0)
        n = snprintf(s->login, sizeof s->login, "*3\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", strlen(user), user,
                     strlen(password), password);
    else
        n = snprintf(s->login, sizeof s->login, "*2\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n", strlen(password), password);
    s->n_login = (size_t)n;
    return FKV_OK;
}

static fkv_status open_redis(redis_store *s, const fkv_prefix_redis_config *config) {
    FKV_TRY(parse_url(s, config->url, config->password));
    for (uint32_t i = 0; i < s->n_servers && config->n_secret == 0; i++)
        FKV_REQUIRE(
            s->servers[i].address.is_loopback, FKV_BAD_ARGUMENT,
            "the Redis server %s is on another machine, so its pages must be encrypted: add a secret file with at least %d "
            "random bytes, the same on all servers",
            s->servers[i].address.name, MIN_SECRET_BYTES);
    FKV_TRY(derive_keys(s, config->secret, config->n_secret));
    FKV_TRY(fkv_cipher_open(&s->cipher, s->value_key, true));
    FKV_TRY(fkv_cipher_open(&s->opener, s->value_key, false));
    const int code = pthread_create(&s->thread, NULL, run_background, s);
    FKV_REQUIRE(code == 0, FKV_NO_MEMORY, "cannot start a thread for the prefix store: %s", strerror(code));
    s->thread_runs = true;
    return FKV_OK;
}

fkv_status fkv_prefix_redis_open(const fkv_prefix_redis_config *config, fkv_prefix_store *store) {
    FKV_REQUIRE(config != NULL && config->url != NULL && store != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_redis_open: config, url or store is NULL");
    FKV_REQUIRE(config->n_secret == 0 || (config->secret != NULL && config->n_secret >= MIN_SECRET_BYTES), FKV_BAD_ARGUMENT,
                "the secret of a prefix store has %zu bytes (expected at least %d)", config->n_secret, MIN_SECRET_BYTES);
    void *map = NULL;
    FKV_TRY(fkv_map_open(sizeof(redis_store), true, &map));
    redis_store *s = map;
    s->map_bytes = sizeof *s;
    s->expiry_s = config->expiry_s > 0 ? config->expiry_s : DEFAULT_EXPIRY_SECONDS;
    s->timeout_s = config->timeout_s > 0.0 ? config->timeout_s : DEFAULT_TIMEOUT_S;
    s->log = config->log;
    s->log_user = config->log_user;
    fkv_cond_init(&s->changed);
    (void)pthread_mutex_init(&s->lock, NULL);
    (void)pthread_mutex_init(&s->read_lock, NULL);
    (void)pthread_mutex_init(&s->write_lock, NULL);
    const fkv_status status = open_redis(s, config);
    if (status != FKV_OK) {
        redis_close(s);
        return status;
    }
    *store = (fkv_prefix_store){.self = s,
                                .contains = redis_contains,
                                .pending = redis_pending,
                                .expect = redis_expect,
                                .read = redis_read,
                                .write = redis_write,
                                .remove = redis_remove,
                                .touch = redis_touch,
                                .stats = redis_stats,
                                .close = redis_close};
    return FKV_OK;
}
