/* See exchange.h. */
#include "exchange.h"

#include "fleet.h"

#include <event2/bufferevent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LARGE_BODY = 256 << 10 }; /* requests with larger bodies are prepared with a low priority */

/* ---- creation and release ---- */

/* Removes all callbacks and timers that refer to the exchange. */
static void detach_connection(exchange *x) {
    if (x->closed != NULL) event_free(x->closed);
    if (x->ping != NULL) event_free(x->ping);
    x->closed = x->ping = NULL;
    if (x->req != NULL) evhttp_connection_set_closecb(evhttp_request_get_connection(x->req), NULL, NULL);
}

typedef struct answer_parser {
    exchange *x;
    uint32_t answer;
    fkv_reply *reply;
} answer_parser;

static void free_exchange(exchange *x) {
    detach_connection(x);
    for (uint32_t i = 0; i < API_MAX_CHOICES; i++) {
        answer_out *a = &x->answers[i];
        answer_parser *r = a->parser;
        for (uint32_t k = 0; k < a->n_parts; k++) {
            free(a->parts[k].name);
            evbuffer_free(a->parts[k].bytes);
        }
        if (r != NULL) fkv_reply_close(r->reply);
        free(r);
        free(a->stop);
        json_decref(a->logprobs);
    }
    exchange **link = &x->s->open;
    while (*link != x) link = &(*link)->next;
    *link = x->next;
    x->s->n_open--;
    api_request_free(&x->api);
    grammar_close(x->rules);
    free(x->event_bytes);
    for (uint32_t i = 0; i < x->n_jobs; i++) {
        prompt_tokens_free(&x->jobs[i].prompt);
        if (x->jobs[i].echo != NULL) evbuffer_free(x->jobs[i].echo);
    }
    free(x->jobs);
    if (x->body != NULL) evbuffer_free(x->body);
    json_decref(x->answer);
    free(x->text);
    free(x);
}

/* Cancels all engine jobs of the exchange. The engine still delivers a DONE record for each job. */
static void cancel_jobs(exchange *x) {
    for (uint32_t i = 0; i < x->n_jobs; i++)
        if (x->jobs[i].in_engine) fkv_engine_cancel(x->m->engine, x->jobs[i].id);
}

/* Handles a closed connection. */
static void on_close(struct evhttp_connection *connection, void *user) {
    exchange *x = user;
    (void)connection;
    struct evhttp_request *req = x->req;
    x->s->metrics.disconnects++;
    x->req = NULL;
    detach_connection(x);
    if (evhttp_request_get_connection(req) == NULL)
        evhttp_send_reply_end(req); /* evhttp frees a partially sent response only after it is ended explicitly */
    if (x->n_in_engine > 0)
        cancel_jobs(x);
    else if (x->preparing)
        atomic_store_explicit(&x->abandoned, true, memory_order_relaxed);
    else
        free_exchange(x);
}

/* Detects a client that disconnects while its request is queued or in prefill. evhttp itself detects disconnects only while
 * writing. */
static void on_hang_up(evutil_socket_t fd, short what, void *user) {
    exchange *x = user;
    (void)fd, (void)what;
    if (x->req != NULL) evhttp_connection_free(evhttp_request_get_connection(x->req)); /* calls on_close() */
}

static void on_ping(evutil_socket_t fd, short what, void *user) {
    exchange *x = user;
    (void)fd, (void)what;
    if (x->req == NULL) return;
    struct evbuffer *out = evbuffer_new();
    (void)evbuffer_add_printf(out, ": ping\n\n");
    evhttp_send_reply_chunk(x->req, out);
    evbuffer_free(out);
}

/* During shutdown, ends the event loop if no requests are left. If some responses have not been sent completely, the loop runs
 * for one more second. */
void exchange_end_when_empty(server *s) {
    struct timeval second = {1, 0};
    if (!s->draining || s->n_open > 0) return;
    if (connections_awaiting_reply(s->connections) == 0)
        (void)event_base_loopbreak(s->base);
    else
        (void)event_base_loopexit(s->base, &second);
}

static void serialize_answer(exchange *x);
static void start_work(exchange *x, void (*prepare)(exchange *x), bool large);

static void finish_exchange(exchange *x, fkv_finish reason, const char *message) {
    const bool answered =
        reason != FKV_FINISH_FAILED && reason != FKV_FINISH_CANCELLED && (reason != FKV_FINISH_DEADLINE || x->n_new > 0);
    metric_add(&x->m->latencies.whole, exchange_now() - x->arrived_at);
    if (x->req != NULL && !x->streaming) fleet_add_answer_headers(x);
    if (x->req != NULL && answered && !x->streaming && x->api.logprobs) { /* log probabilities take a long time to serialize */
        x->answer = reply_answer(x);
        start_work(x, serialize_answer, false);
        return;
    }
    if (x->req != NULL) {
        detach_connection(x);
        const char *why = message != NULL && *message != 0 ? message
                          : reason == FKV_FINISH_DEADLINE  ? "the request timed out before its first token"
                                                           : "the server is shutting down";
        if (answered)
            reply_end(x);
        else if (x->streaming)
            reply_failed(x, why);
        else
            exchange_send_error(x->s, x->req,
                                grammar_failed(x->rules)        ? 400
                                : reason == FKV_FINISH_FAILED   ? 500
                                : reason == FKV_FINISH_DEADLINE ? 504
                                                                : 503,
                                NULL, "%s", why);
        x->req = NULL;
    }
    server *s = x->s;
    free_exchange(x);
    exchange_end_when_empty(s);
}

void exchange_cancel_all(server *s) {
    for (exchange *x = s->open; x != NULL; x = x->next) cancel_jobs(x);
}

/* ---- engine events ---- */

typedef struct event_record {
    fkv_event_kind kind;
    uint32_t job;    /* index of the job */
    uint32_t answer; /* index of the answer within the exchange */
    uint32_t token;
    fkv_finish reason;
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new;
    uint32_t n_top;
    float logprob;
    double waited_s;
    double at;
    size_t n_text; /* the arrays `top`, `text`, `stop` and `message` are stored directly after the record */
    size_t n_stop;
    size_t n_message;
} event_record;

static void append_event_bytes(exchange *x, const void *bytes, size_t n) {
    if (n == 0) return;
    memcpy(x->event_bytes + x->n_event_bytes, bytes, n);
    x->n_event_bytes += n;
}

/* Wakes the event loop, which then calls exchange_read_events(). The caller must hold the lock. */
static void wake_loop(server *s) {
    if (!s->wake_pending) s->wake_pending = write(s->wake[1], "", 1) == 1;
}

/* Queues a copy of the event for the event loop. Runs on the engine thread. */
static void on_event(void *user, const fkv_event *e) {
    const prompt_job *job = user;
    exchange *x = job->x;
    server *s = x->s;
    event_record r = {e->kind,
                      (uint32_t)(job - x->jobs),
                      job->first_answer + e->answer,
                      e->token,
                      e->reason,
                      e->n_prompt,
                      e->n_cached,
                      e->n_new,
                      e->n_top,
                      e->logprob,
                      e->waited_s,
                      exchange_now(),
                      e->n_text,
                      e->stop != NULL ? strlen(e->stop) : 0,
                      e->message != NULL ? strlen(e->message) : 0};
    size_t n = sizeof r + r.n_top * sizeof(fkv_logprob) + r.n_text + r.n_stop + r.n_message;
    (void)pthread_mutex_lock(&s->lock);
    if (x->n_event_bytes + n > x->event_capacity) {
        size_t room = 2 * (x->n_event_bytes + n);
        char *more = realloc(x->event_bytes, room);
        if (more == NULL) abort(); /* aborts the program, because the client would wait forever for a lost event */
        x->event_bytes = more;
        x->event_capacity = room;
    }
    append_event_bytes(x, &r, sizeof r);
    append_event_bytes(x, e->top, r.n_top * sizeof(fkv_logprob));
    append_event_bytes(x, e->text, r.n_text);
    append_event_bytes(x, e->stop, r.n_stop);
    append_event_bytes(x, e->message, r.n_message);
    if (!x->has_events) {
        x->has_events = true;
        x->next_with_events = s->with_events;
        s->with_events = x;
    }
    wake_loop(s);
    (void)pthread_mutex_unlock(&s->lock);
}

static json_t *logprob_json(const exchange *x, uint32_t token, float logprob) {
    size_t n = 0;
    const char *bytes = fkv_token_text(x->m->model, token, true, &n);
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) (void)json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return json_pack("{s:o, s:f, s:o}", "token", reply_utf8_text(bytes, n), "logprob",
                     isfinite(logprob) ? (double)logprob : -9999.0, "bytes", list);
}

static void keep_logprobs(exchange *x, const event_record *r, const char *top) {
    answer_out *a = &x->answers[r->answer];
    json_t *one = logprob_json(x, r->token, r->logprob);
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_top; i++) {
        fkv_logprob other;
        memcpy(&other, top + i * sizeof other, sizeof other);
        (void)json_array_append_new(list, logprob_json(x, other.token, other.logprob));
    }
    (void)json_object_set_new(one, "top_logprobs", list);
    if (a->logprobs == NULL) a->logprobs = json_array();
    (void)json_array_append_new(a->logprobs, one);
}

static void note_times(exchange *x, const event_record *r) {
    metric_latencies *m = &x->m->latencies;
    if (r->kind == FKV_EVENT_STARTED) metric_add(&m->queue, r->waited_s);
    if (r->kind == FKV_EVENT_STARTED && r->waited_s > x->waited_s) x->waited_s = r->waited_s;
    if (r->kind != FKV_EVENT_TOKEN) return;
    if (x->last_at == 0.0) {
        x->first_at = r->at;
        metric_add(&m->first_token, r->at - x->arrived_at);
    } else if (exchange_choices(x) == 1) {
        metric_add(&m->between_tokens, r->at - x->last_at);
    }
    x->last_at = r->at;
}

static void parse_text(exchange *x, const event_record *r, const char *text) {
    answer_parser *parser = x->answers[r->answer].parser;
    if (parser == NULL) {
        if (r->n_text > 0) reply_part(x, r->answer, PART_TEXT, text, r->n_text);
    } else if (r->kind == FKV_EVENT_TOKEN) {
        (void)fkv_reply_token(parser->reply, r->token);
    }
}

/* If the client requested `echo`, starts each answer of the job with the prompt. */
static void echo_prompt(exchange *x, prompt_job *job) {
    if (job->echo == NULL) return;
    const size_t n = evbuffer_get_length(job->echo);
    const char *text = n > 0 ? (const char *)evbuffer_pullup(job->echo, -1) : NULL;
    for (uint32_t i = 0; text != NULL && i < x->api.n; i++) reply_part(x, job->first_answer + i, PART_TEXT, text, n);
    evbuffer_free(job->echo);
    job->echo = NULL;
}

/* Processes one event record. The DONE record of the last job frees the exchange. */
static void handle_record(exchange *x, const event_record *r, const char *data) {
    const char *top = data;
    const char *text = top + r->n_top * sizeof(fkv_logprob);
    const char *stop = text + r->n_text;
    prompt_job *job = &x->jobs[r->job];
    note_times(x, r);
    x->n_prompt += r->n_prompt - job->n_prompt;
    x->n_cached += r->n_cached - job->n_cached;
    job->n_prompt = r->n_prompt;
    job->n_cached = r->n_cached;
    if (r->kind == FKV_EVENT_STARTED && x->streaming && x->req != NULL && r->job == 0) reply_begin(x);
    if (r->kind == FKV_EVENT_STARTED) echo_prompt(x, job);
    if (r->kind == FKV_EVENT_TOKEN) {
        x->n_new++;
        if (x->api.logprobs) keep_logprobs(x, r, top);
        parse_text(x, r, text);
    }
    if (r->kind == FKV_EVENT_ANSWERED) {
        answer_out *a = &x->answers[r->answer];
        answer_parser *parser = a->parser;
        parse_text(x, r, text);
        if (parser != NULL) (void)fkv_reply_end(parser->reply);
        a->reason = r->reason;
        if (r->n_stop > 0) a->stop = strndup(stop, r->n_stop);
        const bool only_answer =
            r->reason == FKV_FINISH_FAILED && exchange_choices(x) == 1; /* the DONE record reports this failure */
        if (x->req != NULL && !only_answer && r->reason != FKV_FINISH_CANCELLED) reply_answered(x, r->answer);
    }
    if (r->kind == FKV_EVENT_DONE) {
        job->in_engine = false;
        if (r->reason >= FKV_FINISH_CANCELLED && x->reason < FKV_FINISH_CANCELLED) { /* only the first failed job is reported */
            x->reason = r->reason;
            (void)snprintf(x->failure, sizeof x->failure, "%.*s", (int)r->n_message, stop + r->n_stop);
            if (r->reason == FKV_FINISH_FAILED) cancel_jobs(x);
        }
        if (--x->n_in_engine == 0) finish_exchange(x, x->reason, x->failure);
    }
}

static void drop_slow_reader(exchange *x) {
    struct evhttp_connection *connection = evhttp_request_get_connection(x->req);
    struct bufferevent *io = evhttp_connection_get_bufferevent(connection);
    if (evbuffer_get_length(bufferevent_get_output(io)) <= x->s->config.max_unread) return;
    x->s->metrics.slow_readers++;
    evhttp_connection_free(connection); /* calls on_close() */
}

static void finish_preparation(exchange *x);

void exchange_read_events(server *s) {
    (void)pthread_mutex_lock(&s->lock);
    exchange *prepared = s->prepared;
    exchange *x = s->with_events;
    s->prepared = NULL;
    s->with_events = NULL;
    s->wake_pending = false;
    (void)pthread_mutex_unlock(&s->lock);
    while (x != NULL) {
        exchange *next = x->next_with_events;
        (void)pthread_mutex_lock(&s->lock);
        char *event_bytes = x->event_bytes;
        size_t n = x->n_event_bytes;
        x->event_bytes = NULL;
        x->n_event_bytes = x->event_capacity = 0;
        x->has_events = false;
        (void)pthread_mutex_unlock(&s->lock);
        event_record r = {.kind = FKV_EVENT_STARTED};
        for (size_t at = 0; at < n;) {
            memcpy(&r, event_bytes + at, sizeof r);
            handle_record(x, &r, event_bytes + at + sizeof r);
            at += sizeof r + r.n_top * sizeof(fkv_logprob) + r.n_text + r.n_stop + r.n_message;
        }
        free(event_bytes);
        if (r.kind != FKV_EVENT_DONE && x->req != NULL && x->streaming) drop_slow_reader(x);
        x = next;
    }
    while (prepared != NULL) {
        exchange *next = prepared->next_prepared;
        finish_preparation(prepared);
        prepared = next;
    }
}

/* ---- new requests ---- */

static void on_reply(void *user, const fkv_reply_event *e) {
    static const part_kind kinds[] = {PART_TEXT, PART_REASONING, PART_CALL, PART_ARGUMENTS, PART_CALL_END};
    answer_parser *r = user;
    if (e->kind >= FKV_REPLY_CALL && e->call > 0 && r->x->api.one_call)
        return; /* further tool calls are dropped, because the client allows only one */
    if (e->n_bytes > 0 || e->kind == FKV_REPLY_CALL || e->kind == FKV_REPLY_CALL_END)
        reply_part(r->x, r->answer, kinds[e->kind], e->bytes, e->n_bytes);
}

bool exchange_open_parsers(exchange *x) {
    if (x->api.conversation == NULL || !fkv_model_about(x->m->model)->has_chat) return true;
    json_t *tools = json_object_get(x->api.conversation, "tools");
    char *text = tools != NULL ? json_dumps(tools, JSON_COMPACT) : NULL;
    bool good = true;
    for (uint32_t i = 0; i < x->api.n && good; i++) {
        answer_parser *r = calloc(1, sizeof *r);
        if (r == NULL) return false;
        fkv_reply_config c = fkv_reply_config_default();
        *r = (answer_parser){.x = x, .answer = i};
        c.tools = text;
        c.n_tools = text != NULL ? strlen(text) : 0;
        if (text == NULL) c.syntax.tools = FKV_TOOLS_NONE; /* without tools, the answer contains no tool calls */
        c.prompt = x->jobs[0].prompt.tokens;
        c.n_prompt = x->jobs[0].prompt.n;
        c.stop = x->api.stops; /* the engine also matches stop strings, but only the parser sees the special tokens of reasoning
                                  and tool calls */
        c.n_stop = x->api.n_stops;
        c.on_event = on_reply;
        c.user = r;
        x->answers[i].parser = r;
        good = fkv_reply_open(x->m->model, &c, &r->reply) == FKV_OK;
    }
    free(text);
    return good;
}

static void reject_request(exchange *x, fkv_status status, double retry_s) {
    char message[512];
    (void)snprintf(message, sizeof message, "%s", fkv_message());
    if (status == FKV_BUSY) {
        char seconds[32];
        (void)snprintf(seconds, sizeof seconds, "%.0f", ceil(retry_s > 1.0 ? retry_s : 1.0));
        (void)evhttp_add_header(evhttp_request_get_output_headers(x->req), "Retry-After", seconds);
    }
    bool callers = status == FKV_POOL_FULL || status == FKV_BAD_ARGUMENT || status == FKV_SEQ_FULL;
    detach_connection(x);
    exchange_send_error(x->s, x->req, status == FKV_BUSY ? x->s->config.busy_status : callers ? 400 : 500, NULL, "%s", message);
    x->req = NULL;
}

static void start_stream(exchange *x) {
    struct evkeyvalq *headers = evhttp_request_get_output_headers(x->req);
    const bool lines = reply_is_lines(x);
    (void)evhttp_add_header(headers, "Content-Type", lines ? "application/x-ndjson" : "text/event-stream");
    (void)evhttp_add_header(headers, "Cache-Control", "no-cache");
    x->s->metrics.http[2]++;
    x->streaming = true;
    evhttp_send_reply_start(x->req, 200, NULL);
    if (lines) return; /* streams of JSON lines cannot contain keep-alive comments */
    x->ping = event_new(x->s->base, -1, EV_PERSIST, on_ping, x);
    struct timeval every = {(time_t)x->s->config.ping_s, (suseconds_t)(fmod(x->s->config.ping_s, 1.0) * 1e6)};
    if (x->ping != NULL) (void)event_add(x->ping, &every);
}

/* Implements fkv_mask_fn. user: the job. */
static const char *mask_of_job(void *user, uint32_t answer, const uint32_t *tokens, uint32_t n_tokens, uint32_t *bits,
                               uint32_t n_vocab) {
    const prompt_job *job = user;
    return grammar_mask(job->x->rules, job->first_answer + answer, tokens, n_tokens, bits, n_vocab);
}

/* Submits the jobs of a prepared exchange to the engine. Sends an error response if the engine rejects a job. Returns true if the
 * exchange waits for DONE records of the engine. */
static bool submit_exchange(exchange *x) {
    server *s = x->s;
    const api_request *api = &x->api;
    static uint64_t number;
    static const char *const prefixes[] = {"chatcmpl", "cmpl", "msg", "resp", "ollama", "ollama", "infill"};
    (void)snprintf(x->id, sizeof x->id, "%s-%08llx%08llx", prefixes[api->kind], (unsigned long long)x->created,
                   (unsigned long long)++number);
    x->api.sampler.bias = x->api.bias;
    fkv_request r = {.max_new = api->max_new,
                     .n = api->n,
                     .sampler = x->api.sampler,
                     .stops = x->api.stops,
                     .n_stops = api->n_stops,
                     .ignore_end = api->ignore_end,
                     .logprobs = api->logprobs,
                     .n_top = api->n_top,
                     .tenant = x->tenant,
                     .tenant_name = x->tenant > 0 ? s->config.keys[x->tenant - 1] : "",
                     .priority = api->priority,
                     .deadline_s = api->deadline_s,
                     .mask = x->rules != NULL ? mask_of_job : NULL,
                     .event = on_event};
    double retry = 0.0;
    fkv_status status = FKV_OK;
    for (uint32_t i = 0; i < x->n_jobs && status == FKV_OK; i++) {
        prompt_job *job = &x->jobs[i];
        r.prompt = job->prompt.tokens;
        r.n_prompt = (uint32_t)job->prompt.n;
        memcpy(r.snapshots, job->prompt.marks, sizeof r.snapshots);
        r.n_snapshots = job->prompt.n_marks;
        r.mask_user = r.user = job;
        job->first_answer = i * api->n;
        status = fkv_engine_submit(x->m->engine, &r, &job->id, &retry);
        job->in_engine = status == FKV_OK;
        x->n_in_engine += job->in_engine;
        prompt_tokens_free(&job->prompt);
    }
    if (status != FKV_OK) { /* one rejected prompt rejects the request, so the jobs that were already submitted are cancelled */
        reject_request(x, status, retry);
        cancel_jobs(x);
        return x->n_in_engine > 0;
    }
    struct bufferevent *io = evhttp_connection_get_bufferevent(evhttp_request_get_connection(x->req));
    x->closed = event_new(s->base, bufferevent_getfd(io), EV_CLOSED, on_hang_up, x);
    if (x->closed != NULL) (void)event_add(x->closed, NULL);
    if (x->api.stream) start_stream(x);
    return true;
}

static void free_reply_text(const void *data, size_t n, void *user) {
    (void)n, (void)user;
    free((void *)data);
}

/* Sends the response that the worker thread has prepared. */
static void send_prepared(exchange *x) {
    struct evhttp_request *req = x->req;
    x->req = NULL;
    if (x->error.status != 0) {
        exchange_send_error(x->s, req, x->error.status, x->error.param[0] != 0 ? x->error.param : NULL, "%s", x->error.message);
        return;
    }
    struct evbuffer *out = evbuffer_new();
    const size_t n = strlen(x->text);
    x->text[n] = '\n'; /* overwrites the null terminator, which is not needed because the length is passed explicitly */
    (void)evbuffer_add_reference(out, x->text, n + 1, free_reply_text, NULL);
    x->text = NULL;
    exchange_send_bytes(x->s, req, 200, "application/json", out);
}

/* Handles an exchange whose preparation has ended: sends the response, submits the request to the engine, or frees the exchange
 * if the client has disconnected. */
static void finish_preparation(exchange *x) {
    server *s = x->s;
    x->preparing = false;
    s->n_preparing--;
    if (s->ending && x->error.status == 0 && x->text == NULL) {
        x->error.status = 503;
        (void)snprintf(x->error.message, sizeof x->error.message, "the server is shutting down");
    }
    const bool replies = x->error.status != 0 || x->text != NULL;
    if (x->req != NULL && !replies && submit_exchange(x)) return;
    detach_connection(x);
    if (x->req != NULL) send_prepared(x);
    free_exchange(x);
    exchange_end_when_empty(s);
}

/* Prepares the exchange. Runs on a worker thread. */
static void run_preparation(void *user) {
    exchange *x = user;
    if (!atomic_load_explicit(&x->abandoned, memory_order_relaxed)) x->prepare(x);
    if (x->body != NULL) evbuffer_free(x->body); /* freeing a large body would block the event loop */
    x->body = NULL;
}

/* Hands a prepared exchange to the event loop. */
static void on_prepared(void *user) {
    exchange *x = user;
    server *s = x->s;
    (void)pthread_mutex_lock(&s->lock);
    x->next_prepared = s->prepared;
    s->prepared = x;
    wake_loop(s);
    (void)pthread_mutex_unlock(&s->lock);
}

static void serialize_answer(exchange *x) {
    x->text = x->answer != NULL ? json_dumps(x->answer, JSON_COMPACT) : NULL;
    json_decref(x->answer);
    x->answer = NULL;
    if (x->text != NULL) return;
    x->error.status = 503;
    (void)snprintf(x->error.message, sizeof x->error.message, "out of memory");
}

/* Hands the exchange to a worker thread, which owns it until finish_preparation() is called. */
static void start_work(exchange *x, void (*prepare)(exchange *x), bool large) {
    x->prepare = prepare;
    x->preparing = true;
    x->s->n_preparing++;
    x->work = (worker_job){.run = run_preparation, .done = on_prepared, .user = x, .large = large};
    worker_pool_add(x->s->pool, &x->work);
}

void exchange_begin(server *s, struct evhttp_request *req, void (*prepare)(exchange *x), bool is_large, uint64_t tenant) {
    exchange *x = calloc(1, sizeof *x);
    struct evbuffer *body = evbuffer_new();
    if (x == NULL || body == NULL || evbuffer_add_buffer(body, evhttp_request_get_input_buffer(req)) != 0) {
        free(x);
        if (body != NULL) evbuffer_free(body);
        exchange_send_error(s, req, 503, NULL, "out of memory");
        return;
    }
    x->next = s->open;
    s->open = x;
    s->n_open++;
    x->s = s;
    x->m = &s->models[0];
    x->req = req;
    x->body = body;
    x->tenant = tenant;
    x->seed = s->next_seed++;
    x->arrived_at = exchange_now();
    x->created = (int64_t)time(NULL);
    evhttp_connection_set_closecb(evhttp_request_get_connection(req), on_close, x);
    start_work(x, prepare, is_large || evbuffer_get_length(body) > LARGE_BODY);
}
