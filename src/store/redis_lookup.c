/* Existence queries of a Redis prefix store: a table of cached results, and the background thread, which sends the queries,
 * refreshes expiry times and probes failed servers (see redis_store.h). */
#include "../base/timed_wait.h"
#include "redis_store.h"

#include <stdio.h>

static const double PENDING_SHARE = 0.2; /* an unanswered query counts as pending for this fraction of the timeout */
static const double FOUND_S = 10.0;      /* time, in seconds, for which a cached "page exists" result is trusted */
static const double MISSING_S = 2.0;
static const double MAX_PROBE_S = 8.0;

/* Finds the cached existence-query result of a page. If there is none and `add` is true, replaces the oldest entry in the set
 * that the page key maps to. The caller holds the lock.
 */
static fkv_redis_answer *find_answer(fkv_redis_store *s, const fkv_page_key *key, bool add) {
    uint32_t set = 0;
    memcpy(&set, key->bytes + FKV_REDIS_ANSWER_KEY_BYTES, sizeof set);
    fkv_redis_answer *ways = s->answers[set % FKV_REDIS_ANSWER_SETS];
    fkv_redis_answer *oldest = &ways[0];
    for (uint32_t i = 0; i < FKV_REDIS_ANSWER_WAYS; i++) {
        if (ways[i].state != FKV_REDIS_UNKNOWN && memcmp(ways[i].key, key->bytes, FKV_REDIS_ANSWER_KEY_BYTES) == 0)
            return &ways[i];
        if (ways[i].state == FKV_REDIS_UNKNOWN || (oldest->state != FKV_REDIS_UNKNOWN && ways[i].at < oldest->at))
            oldest = &ways[i];
    }
    if (!add) return NULL;
    *oldest = (fkv_redis_answer){.state = FKV_REDIS_UNKNOWN};
    memcpy(oldest->key, key->bytes, FKV_REDIS_ANSWER_KEY_BYTES);
    return oldest;
}

void fkv_redis_set_answer(fkv_redis_store *s, const fkv_page_key *key, fkv_redis_answer_state state) {
    fkv_redis_answer *a = find_answer(s, key, true);
    a->state = state;
    a->at = fkv_seconds_now();
}

void fkv_redis_note_answer(fkv_redis_store *s, const fkv_page_key *key, fkv_redis_answer_state state) {
    (void)pthread_mutex_lock(&s->lock);
    fkv_redis_set_answer(s, key, state);
    (void)pthread_mutex_unlock(&s->lock);
}

/* Returns the cached result of the existence query for a page. Returns FKV_REDIS_UNKNOWN if there is no result or if the result
 * or the unanswered query is too old. The caller holds the lock. */
static fkv_redis_answer_state current_answer(fkv_redis_store *s, const fkv_page_key *key) {
    const fkv_redis_answer *a = find_answer(s, key, false);
    if (a == NULL) return FKV_REDIS_UNKNOWN;
    const double age = fkv_seconds_now() - a->at;
    const double limit = a->state == FKV_REDIS_FOUND     ? FOUND_S
                         : a->state == FKV_REDIS_MISSING ? MISSING_S
                                                         : PENDING_SHARE * s->timeout_s;
    return age <= limit ? a->state : FKV_REDIS_UNKNOWN;
}

/* Queues a task for the background thread. Returns false if the queue is full. The caller holds the lock. */
static bool add_task(fkv_redis_store *s, fkv_redis_task_kind kind, const fkv_page_key *key, uint32_t depth) {
    if (s->n_tasks == FKV_REDIS_RING_ENTRIES) return false;
    if (s->n_tasks == 0) (void)pthread_cond_signal(&s->changed);
    s->tasks[(s->first_task + s->n_tasks++) % FKV_REDIS_RING_ENTRIES] =
        (fkv_redis_task){.key = *key, .kind = kind, .depth = depth};
    return true;
}

/* Returns the result of current_answer(). If the result is unknown and no query is outstanding, queues an existence query for the
 * page and returns FKV_REDIS_PENDING. The caller holds the lock. */
static fkv_redis_answer_state ask_for(fkv_redis_store *s, const fkv_page_key *key) {
    const fkv_redis_answer_state state = current_answer(s, key);
    const fkv_redis_answer *a = find_answer(s, key, false);
    if (state != FKV_REDIS_UNKNOWN || (a != NULL && a->state == FKV_REDIS_PENDING)) return state;
    if (fkv_redis_server_of(s, key)->is_down || !add_task(s, FKV_REDIS_ASK, key, 0)) return FKV_REDIS_UNKNOWN;
    fkv_redis_set_answer(s, key, FKV_REDIS_PENDING);
    return FKV_REDIS_PENDING;
}

/* ---- functions that do not block ---- */

bool fkv_redis_contains(void *self, const fkv_page_key *key) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    const bool there = ask_for(s, key) == FKV_REDIS_FOUND && !fkv_redis_server_of(s, key)->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return there;
}

bool fkv_redis_pending(void *self, const fkv_page_key *key) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    const bool pending = current_answer(s, key) == FKV_REDIS_PENDING && !fkv_redis_server_of(s, key)->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return pending;
}

/* Returns true if the page is not known to exist and its server is up. While a server is down, writes to it are dropped. */
bool fkv_redis_wants(void *self, const fkv_page_key *key) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    const bool wanted = ask_for(s, key) != FKV_REDIS_FOUND && !fkv_redis_server_of(s, key)->is_down;
    (void)pthread_mutex_unlock(&s->lock);
    return wanted;
}

void fkv_redis_expect(void *self, const fkv_page_key *keys, uint32_t n) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n; i++) (void)ask_for(s, &keys[i]);
    (void)pthread_mutex_unlock(&s->lock);
}

void fkv_redis_touch(void *self, const fkv_page_key *keys, uint32_t n) {
    fkv_redis_store *s = self;
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n; i++)
        if (current_answer(s, &keys[i]) == FKV_REDIS_FOUND) (void)add_task(s, FKV_REDIS_REFRESH, &keys[i], i);
    (void)pthread_mutex_unlock(&s->lock);
}

/* ---- background thread ---- */

/* Sends the tasks of one server as a single pipeline and reads the replies. */
static bool run_pipeline(fkv_redis_store *s, fkv_redis_server *server, uint32_t n_tasks) {
    fkv_resp *c = &server->asker;
    size_t n_bytes = 0;
    uint32_t n_sent = 0;
    fkv_redis_task *sent[FKV_REDIS_BATCH];
    if (!fkv_redis_connect(s, server, c)) return false;
    for (uint32_t i = 0; i < n_tasks; i++) {
        fkv_redis_task *t = &s->batch[i];
        char *at = s->commands + n_bytes;
        const size_t room = sizeof s->commands - n_bytes;
        char ms[24];
        if (fkv_redis_server_of(s, &t->key) != server) continue;
        sent[n_sent++] = t;
        (void)snprintf(ms, sizeof ms, "%llu", (unsigned long long)fkv_redis_lifetime_ms(s, t->depth));
        if (t->kind == FKV_REDIS_ASK)
            n_bytes += (size_t)snprintf(at, room, "*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%s\r\n", FKV_REDIS_NAME_BYTES, s->names[i]);
        else
            n_bytes += (size_t)snprintf(at, room, "*3\r\n$7\r\nPEXPIRE\r\n$%d\r\n%s\r\n$%zu\r\n%s\r\n", FKV_REDIS_NAME_BYTES,
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
            fkv_redis_error_reply(s, server, reply.text);
            fkv_resp_close(c);
            c->failure = FKV_RESP_NONE;
            return false;
        }
        if (sent[i]->kind == FKV_REDIS_ASK)
            fkv_redis_note_answer(s, &sent[i]->key,
                                  reply.kind == FKV_RESP_INTEGER && reply.number > FKV_REDIS_OVERHEAD ? FKV_REDIS_FOUND
                                                                                                      : FKV_REDIS_MISSING);
    }
    return true;
}

/* Resets the unanswered existence queries of the batch to FKV_REDIS_UNKNOWN, so that they can be queued again. */
static void forget_queries(fkv_redis_store *s, uint32_t n_tasks) {
    (void)pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < n_tasks; i++) {
        fkv_redis_answer *a = s->batch[i].kind == FKV_REDIS_ASK ? find_answer(s, &s->batch[i].key, false) : NULL;
        if (a != NULL && a->state == FKV_REDIS_PENDING) a->state = FKV_REDIS_UNKNOWN;
    }
    (void)pthread_mutex_unlock(&s->lock);
}

static void run_tasks(fkv_redis_store *s, uint32_t n_tasks) {
    bool named = true;
    for (uint32_t i = 0; i < n_tasks && named; i++) named = fkv_redis_name(s, &s->batch[i].key, s->names[i]) == FKV_OK;
    for (uint32_t i = 0; i < s->n_servers && named; i++) {
        fkv_redis_server *server = &s->servers[i];
        if (fkv_redis_is_usable(s, server) && !run_pipeline(s, server, n_tasks))
            (void)fkv_redis_connection_failed(s, server, &server->asker);
    }
    forget_queries(s, n_tasks);
}

/* Sends PING to a server that has failed, and uses the server again if it replies. */
static void probe_server(fkv_redis_store *s, fkv_redis_server *server) {
    static const char ping[] = "*1\r\n$4\r\nPING\r\n";
    struct iovec part = {.iov_base = (void *)(uintptr_t)ping, .iov_len = sizeof ping - 1};
    fkv_resp_reply reply = {0};
    fkv_resp_close(&server->asker); /* late replies may still arrive on the old connection */
    const bool connected = fkv_redis_connect(s, server, &server->asker);
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
static void wait_for_tasks(fkv_redis_store *s) {
    double until = 0.0;
    for (uint32_t i = 0; i < s->n_servers; i++)
        if (s->servers[i].is_down && (until == 0.0 || s->servers[i].probe_at < until)) until = s->servers[i].probe_at;
    if (until == 0.0) {
        (void)pthread_cond_wait(&s->changed, &s->lock);
    } else if (until > fkv_seconds_now()) {
        (void)fkv_cond_wait_until(&s->changed, &s->lock, until);
    }
}

void *fkv_redis_background(void *user) {
    fkv_redis_store *s = user;
    (void)pthread_mutex_lock(&s->lock);
    while (!s->closing) {
        if (s->n_tasks == 0) wait_for_tasks(s);
        uint32_t n = 0;
        for (; n < FKV_REDIS_BATCH && s->n_tasks > 0; n++, s->n_tasks--) {
            s->batch[n] = s->tasks[s->first_task];
            s->first_task = (s->first_task + 1) % FKV_REDIS_RING_ENTRIES;
        }
        const double now = fkv_seconds_now();
        bool probe[FKV_REDIS_MAX_SERVERS] = {false};
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
