/* See exchange.h. */
#include "exchange.h"

#include <event2/bufferevent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double exchange_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- the life of an exchange ---- */

/* Nothing of the connection refers to the exchange any more. */
static void let_go(exchange *x) {
    if (x->closed != NULL) event_free(x->closed);
    if (x->ping != NULL) event_free(x->ping);
    x->closed = x->ping = NULL;
    if (x->req != NULL) evhttp_connection_set_closecb(evhttp_request_get_connection(x->req), NULL, NULL);
}

typedef struct reader {
    exchange *x;
    uint32_t answer;
    fkv_reply *reply;
} reader;

static void free_exchange(exchange *x) {
    let_go(x);
    for (uint32_t i = 0; i < FKV_MAX_ANSWERS; i++) {
        answer_out *a = &x->answers[i];
        reader *r = a->reader;
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
    free(x->mail);
    free(x);
}

/* The client left, or was dropped. */
static void on_close(struct evhttp_connection *connection, void *user) {
    exchange *x = user;
    (void)connection;
    struct evhttp_request *req = x->req;
    x->s->metrics.disconnects++;
    x->req = NULL;
    let_go(x);
    if (evhttp_request_get_connection(req) == NULL)
        evhttp_send_reply_end(req); /* in the middle of a reply evhttp leaves it to us */
    if (x->in_engine)
        fkv_engine_cancel(x->s->engine, x->job);
    else
        free_exchange(x);
}

/* evhttp looks for the end of a connection only while it writes; this event tells of it in the queue and in prefill too. */
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

/* Who does not read gets a second. */
void exchange_end_when_empty(server *s) {
    struct timeval second = {1, 0};
    if (!s->draining || s->n_open > 0) return;
    if (connections_unanswered(s->connections) == 0)
        (void)event_base_loopbreak(s->base);
    else
        (void)event_base_loopexit(s->base, &second);
}

static void finish(exchange *x, fkv_finish reason, const char *message) {
    metric_add(&x->s->metrics.whole, exchange_now() - x->arrived_at);
    if (x->req != NULL) {
        let_go(x);
        bool answered =
            reason != FKV_FINISH_FAILED && reason != FKV_FINISH_CANCELLED && (reason != FKV_FINISH_DEADLINE || x->n_new > 0);
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
    for (exchange *x = s->open; x != NULL; x = x->next)
        if (x->in_engine) fkv_engine_cancel(s->engine, x->job);
}

/* ---- mail: what the engine's thread tells ---- */

typedef struct mail_record {
    fkv_event_kind kind;
    uint32_t answer;
    uint32_t token;
    fkv_finish reason;
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new;
    uint32_t n_top;
    float logprob;
    double waited_s;
    double at;
    size_t n_text; /* behind the record: top, text, stop, message */
    size_t n_stop;
    size_t n_message;
} mail_record;

static void mail_add(exchange *x, const void *bytes, size_t n) {
    if (n == 0) return;
    memcpy(x->mail + x->n_mail, bytes, n);
    x->n_mail += n;
}

/* On the engine's thread. */
static void on_event(void *user, const fkv_event *e) {
    exchange *x = user;
    server *s = x->s;
    mail_record r = {e->kind,
                     e->answer,
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
    if (x->n_mail + n > x->mail_room) {
        size_t room = 2 * (x->n_mail + n);
        char *more = realloc(x->mail, room);
        if (more == NULL) abort(); /* a lost event would leave a client waiting for ever */
        x->mail = more;
        x->mail_room = room;
    }
    mail_add(x, &r, sizeof r);
    mail_add(x, e->top, r.n_top * sizeof(fkv_logprob));
    mail_add(x, e->text, r.n_text);
    mail_add(x, e->stop, r.n_stop);
    mail_add(x, e->message, r.n_message);
    if (!x->has_mail) {
        x->has_mail = true;
        x->next_mailed = s->mailed;
        s->mailed = x;
    }
    if (!s->awake) s->awake = write(s->wake[1], "", 1) == 1;
    (void)pthread_mutex_unlock(&s->lock);
}

static json_t *token_json(const exchange *x, uint32_t token, float logprob) {
    size_t n = 0;
    const char *bytes = fkv_token_text(x->s->model, token, true, &n);
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) (void)json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return json_pack("{s:o, s:f, s:o}", "token", reply_sound_text(bytes, n), "logprob",
                     isfinite(logprob) ? (double)logprob : -9999.0, "bytes", list);
}

static void keep_logprobs(exchange *x, const mail_record *r, const char *top) {
    answer_out *a = &x->answers[r->answer];
    json_t *one = token_json(x, r->token, r->logprob);
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_top; i++) {
        fkv_logprob other;
        memcpy(&other, top + i * sizeof other, sizeof other);
        (void)json_array_append_new(list, token_json(x, other.token, other.logprob));
    }
    (void)json_object_set_new(one, "top_logprobs", list);
    if (a->logprobs == NULL) a->logprobs = json_array();
    (void)json_array_append_new(a->logprobs, one);
}

static void note_times(exchange *x, const mail_record *r) {
    metrics *m = &x->s->metrics;
    if (r->kind == FKV_EVENT_STARTED) metric_add(&m->queue, r->waited_s);
    if (r->kind != FKV_EVENT_TOKEN) return;
    if (x->last_at == 0.0)
        metric_add(&m->first_token, r->at - x->arrived_at);
    else if (x->api.n == 1)
        metric_add(&m->between_tokens, r->at - x->last_at);
    x->last_at = r->at;
}

static void read_text(exchange *x, const mail_record *r, const char *text) {
    reader *reads = x->answers[r->answer].reader;
    if (reads == NULL) {
        if (r->n_text > 0) reply_part(x, r->answer, PART_TEXT, text, r->n_text);
    } else if (r->kind == FKV_EVENT_TOKEN) {
        (void)fkv_reply_token(reads->reply, r->token);
    }
}

/* One record; the exchange is gone after DONE. */
static void read_record(exchange *x, const mail_record *r, const char *data) {
    const char *top = data;
    const char *text = top + r->n_top * sizeof(fkv_logprob);
    const char *stop = text + r->n_text;
    note_times(x, r);
    x->n_prompt = r->n_prompt;
    x->n_cached = r->n_cached;
    if (r->kind == FKV_EVENT_STARTED && x->streaming && x->req != NULL) reply_begin(x);
    if (r->kind == FKV_EVENT_TOKEN) {
        x->n_new++;
        if (x->api.logprobs) keep_logprobs(x, r, top);
        read_text(x, r, text);
    }
    if (r->kind == FKV_EVENT_ANSWERED) {
        answer_out *a = &x->answers[r->answer];
        reader *reads = a->reader;
        read_text(x, r, text);
        if (reads != NULL) (void)fkv_reply_end(reads->reply);
        a->reason = r->reason;
        if (r->n_stop > 0) a->stop = strndup(stop, r->n_stop);
        const bool whole = r->reason == FKV_FINISH_FAILED && x->api.n == 1; /* an error, told with DONE */
        if (x->req != NULL && !whole && r->reason != FKV_FINISH_CANCELLED) reply_answered(x, r->answer);
    }
    if (r->kind == FKV_EVENT_DONE) {
        char message[512];
        (void)snprintf(message, sizeof message, "%.*s", (int)r->n_message, stop + r->n_stop);
        x->in_engine = false;
        finish(x, r->reason, message);
    }
}

static void drop_slow_reader(exchange *x) {
    struct evhttp_connection *connection = evhttp_request_get_connection(x->req);
    struct bufferevent *io = evhttp_connection_get_bufferevent(connection);
    if (evbuffer_get_length(bufferevent_get_output(io)) <= x->s->config.max_unread) return;
    x->s->metrics.slow_readers++;
    evhttp_connection_free(connection); /* calls on_close() */
}

void exchange_read_mail(server *s) {
    (void)pthread_mutex_lock(&s->lock);
    exchange *x = s->mailed;
    s->mailed = NULL;
    s->awake = false;
    (void)pthread_mutex_unlock(&s->lock);
    while (x != NULL) {
        exchange *next = x->next_mailed;
        (void)pthread_mutex_lock(&s->lock);
        char *mail = x->mail;
        size_t n = x->n_mail;
        x->mail = NULL;
        x->n_mail = x->mail_room = 0;
        x->has_mail = false;
        (void)pthread_mutex_unlock(&s->lock);
        mail_record r = {.kind = FKV_EVENT_STARTED};
        for (size_t at = 0; at < n;) {
            memcpy(&r, mail + at, sizeof r);
            read_record(x, &r, mail + at + sizeof r);
            at += sizeof r + r.n_top * sizeof(fkv_logprob) + r.n_text + r.n_stop + r.n_message;
        }
        free(mail);
        if (r.kind != FKV_EVENT_DONE && x->req != NULL && x->streaming) drop_slow_reader(x);
        x = next;
    }
}

/* ---- begin ---- */

static void on_reply(void *user, const fkv_reply_event *e) {
    static const part_kind kinds[] = {PART_TEXT, PART_REASONING, PART_CALL, PART_ARGUMENTS, PART_CALL_END};
    reader *r = user;
    if (e->kind >= FKV_REPLY_CALL && e->call > 0 && r->x->api.one_call) return; /* the others are not asked for */
    if (e->n_bytes > 0 || e->kind == FKV_REPLY_CALL || e->kind == FKV_REPLY_CALL_END)
        reply_part(r->x, r->answer, kinds[e->kind], e->bytes, e->n_bytes);
}

/* Chats of models with a template: text, reasoning and tool calls are told apart. */
static bool open_readers(exchange *x, const uint32_t *prompt, uint32_t n_prompt) {
    if (x->api.kind == API_COMPLETIONS || !fkv_model_about(x->s->model)->has_chat) return true;
    json_t *tools = json_object_get(x->api.conversation, "tools");
    char *text = tools != NULL ? json_dumps(tools, JSON_COMPACT) : NULL;
    bool good = true;
    for (uint32_t i = 0; i < x->api.n && good; i++) {
        reader *r = calloc(1, sizeof *r);
        if (r == NULL) return false;
        fkv_reply_config c = fkv_reply_config_default();
        *r = (reader){.x = x, .answer = i};
        c.tools = text;
        c.n_tools = text != NULL ? strlen(text) : 0;
        if (text == NULL) c.syntax.tools = FKV_TOOLS_NONE; /* nobody asked for calls */
        c.prompt = prompt;
        c.n_prompt = n_prompt;
        c.stop = x->api.stops; /* its own: the engine's text is without the tokens that mark reasoning and calls */
        c.n_stop = x->api.n_stops;
        c.on_event = on_reply;
        c.user = r;
        x->answers[i].reader = r;
        good = fkv_reply_open(x->s->model, &c, &r->reply) == FKV_OK;
    }
    free(text);
    return good;
}

static void refuse(exchange *x, struct evhttp_request *req, fkv_status status, double retry_s) {
    char message[512];
    (void)snprintf(message, sizeof message, "%s", fkv_message());
    if (status == FKV_BUSY) {
        char seconds[32];
        (void)snprintf(seconds, sizeof seconds, "%.0f", ceil(retry_s > 1.0 ? retry_s : 1.0));
        (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Retry-After", seconds);
    }
    bool callers = status == FKV_POOL_FULL || status == FKV_BAD_ARGUMENT || status == FKV_SEQ_FULL;
    exchange_send_error(x->s, req, status == FKV_BUSY ? 429 : callers ? 400 : 500, NULL, "%s", message);
    free_exchange(x);
}

static void start_stream(exchange *x) {
    struct evkeyvalq *headers = evhttp_request_get_output_headers(x->req);
    (void)evhttp_add_header(headers, "Content-Type", "text/event-stream");
    (void)evhttp_add_header(headers, "Cache-Control", "no-cache");
    x->s->metrics.http[2]++;
    x->streaming = true;
    evhttp_send_reply_start(x->req, 200, NULL);
    x->ping = event_new(x->s->base, -1, EV_PERSIST, on_ping, x);
    struct timeval every = {(time_t)x->s->config.ping_s, (suseconds_t)(fmod(x->s->config.ping_s, 1.0) * 1e6)};
    if (x->ping != NULL) (void)event_add(x->ping, &every);
}

void exchange_begin(server *s, struct evhttp_request *req, api_request *api, grammar *rules, const uint32_t *prompt,
                    uint32_t n_prompt, uint64_t tenant) {
    exchange *x = calloc(1, sizeof *x);
    if (x == NULL) {
        api_request_free(api);
        grammar_close(rules);
        exchange_send_error(s, req, 503, NULL, "no memory for another request");
        return;
    }
    static uint64_t number;
    x->next = s->open;
    s->open = x;
    s->n_open++;
    x->s = s;
    x->api = *api;
    x->rules = rules;
    x->arrived_at = exchange_now();
    x->created = (int64_t)time(NULL);
    static const char *const prefixes[] = {"chatcmpl", "cmpl", "msg", "resp"};
    (void)snprintf(x->id, sizeof x->id, "%s-%08llx%08llx", prefixes[api->kind], (unsigned long long)x->created,
                   (unsigned long long)++number);
    x->api.sampler.bias = x->api.bias;
    fkv_request r = {.prompt = prompt,
                     .n_prompt = n_prompt,
                     .max_new = api->max_new,
                     .n = api->n,
                     .sampler = x->api.sampler,
                     .stops = x->api.stops,
                     .n_stops = api->n_stops,
                     .ignore_end = api->ignore_end,
                     .logprobs = api->logprobs,
                     .n_top = api->n_top,
                     .tenant = tenant,
                     .tenant_name = tenant > 0 ? s->config.keys[tenant - 1] : "",
                     .priority = api->priority,
                     .deadline_s = api->deadline_s,
                     .mask = rules != NULL ? grammar_mask : NULL,
                     .mask_user = rules,
                     .event = on_event,
                     .user = x};
    double retry = 0.0;
    fkv_status status = open_readers(x, prompt, n_prompt) ? fkv_engine_submit(s->engine, &r, &x->job, &retry) : FKV_NO_MEMORY;
    if (status != FKV_OK) {
        refuse(x, req, status, retry);
        return;
    }
    x->req = req;
    x->in_engine = true;
    struct evhttp_connection *connection = evhttp_request_get_connection(req);
    evhttp_connection_set_closecb(connection, on_close, x);
    x->closed = event_new(s->base, bufferevent_getfd(evhttp_connection_get_bufferevent(connection)), EV_CLOSED, on_hang_up, x);
    if (x->closed != NULL) (void)event_add(x->closed, NULL);
    if (x->api.stream) start_stream(x);
}
