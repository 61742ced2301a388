/* The loop: connections, routes, keys, and the end. See serve.h.
 *
 * Limits: connections and the time that one may take to ask by connections.h, bodies by evhttp and max_body, headers to 16 KiB,
 * unread output to max_unread.
 */
#include "serve.h"

#include "../kit/process.h"
#include "answer_rules.h"
#include "exchange.h"
#include "page_state.h"
#include "prompt_tokens.h"

#include <errno.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { STUCK_SECONDS = 300, MAX_HEADER_BYTES = 16 * 1024 };

serve_config serve_config_default(void) {
    return (serve_config){.host = "127.0.0.1",
                          .port = 8080,
                          .max_body = 8 << 20,
                          .max_unread = 1 << 20,
                          .max_connections = 328,
                          .request_s = 60.0,
                          .ping_s = 5.0,
                          .shutdown_s = 30.0};
}

/* ---- keys ---- */

/* Takes the same time whatever differs. */
static bool same_text(const char *a, const char *b) {
    size_t n_a = strlen(a);
    size_t n_b = strlen(b);
    unsigned char different = n_a != n_b;
    for (size_t i = 0; i < n_a; i++) different |= (unsigned char)(a[i] ^ b[n_b > 0 ? i % n_b : 0]);
    return different == 0;
}

/* The tenant of the key that the request carries: 0 where no keys are set, UINT64_MAX: no such key. */
static uint64_t tenant_of(const server *s, struct evhttp_request *req) {
    if (s->config.n_keys == 0) return 0;
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    const char *key = evhttp_find_header(headers, "x-api-key");
    const char *bearer = evhttp_find_header(headers, "Authorization");
    if (key == NULL && bearer != NULL && strncasecmp(bearer, "Bearer ", 7) == 0) key = bearer + 7;
    uint64_t found = UINT64_MAX;
    for (uint32_t i = 0; key != NULL && i < s->config.n_keys; i++)
        if (same_text(key, s->config.keys[i])) found = i + 1; /* every key is looked at */
    return found;
}

/* A page of another site must not drive a server on this machine: browsers say where a request comes from. */
static bool foreign_origin(struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    const char *origin = evhttp_find_header(headers, "Origin");
    const char *host = evhttp_find_header(headers, "Host");
    if (origin == NULL) return false;
    const char *name = strstr(origin, "://");
    return host == NULL || name == NULL || strcmp(name + 3, host) != 0;
}

/* A name of another site that leads to this machine (DNS rebinding) must not, either: who asks without a key asks by our name. */
static bool foreign_host(const server *s, struct evhttp_request *req) {
    const char *const own[] = {"localhost", "127.0.0.1", "[::1]", s->config.host};
    const char *host = evhttp_find_header(evhttp_request_get_input_headers(req), "Host");
    if (s->config.any_host || s->config.n_keys > 0 || host == NULL) return false;
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        size_t n = strlen(own[i]);
        if (evutil_ascii_strncasecmp(host, own[i], n) == 0 && (host[n] == 0 || host[n] == ':')) return false;
    }
    return true;
}

/* ---- routes ---- */

typedef struct call {
    server *s;
    struct evhttp_request *req;
    const char *body;
    size_t n_body;
    uint64_t tenant;
} call;

/* Every client of the Messages API has to say max_tokens, and says the most that a large model may write: here it is what fits.
 */
static void fit_answer(const server *s, api_request *api, size_t n_prompt) {
    fkv_engine_stats stats;
    fkv_engine_stats_now(s->engine, &stats);
    if (n_prompt < stats.max_request_tokens && api->max_new > stats.max_request_tokens - n_prompt)
        api->max_new = (uint32_t)(stats.max_request_tokens - n_prompt);
}

/* The grammar of the answer where the request asks for one; false: the client has heard why there is none. */
static bool make_rules(const call *c, const api_request *api, const prompt_tokens *prompt, grammar **rules) {
    const char *param = NULL;
    char why[GRAMMAR_ERROR_BYTES] = "this build cannot hold answers to a form; build with -DFKV_LLGUIDANCE=ON (docs/serving.md)";
    if (!answer_rules_wanted(api, &param)) return true;
    if (c->s->grammars != NULL) *rules = answer_rules_open(c->s->grammars, c->s->model, api, prompt->tokens, prompt->n, why);
    if (*rules == NULL) exchange_send_error(c->s, c->req, 400, param, "%s: %s", param, why);
    return *rules != NULL;
}

static void generate(call *c, api_kind kind) {
    api_request api;
    prompt_tokens prompt = {0};
    fkv_sampler_config defaults = fkv_model_sampling(c->s->model, NULL);
    defaults.seed = c->s->next_seed++;
    if (!api_request_parse(kind, c->body, c->n_body, &defaults, &api)) {
        exchange_send_error(c->s, c->req, 400, api.param[0] != 0 ? api.param : NULL, "%s", api.error);
        api_request_free(&api);
        return;
    }
    fkv_status status = prompt_tokens_of(c->s->model, &api, &prompt);
    grammar *rules = NULL;
    if (status != FKV_OK || prompt.n > UINT32_MAX) {
        exchange_send_error(c->s, c->req, status == FKV_NO_MEMORY ? 503 : 400, "messages", "%s", fkv_message());
        api_request_free(&api);
    } else if (prompt.n == 0) {
        exchange_send_error(c->s, c->req, 400, "prompt", "the prompt is empty");
        api_request_free(&api);
    } else if (!make_rules(c, &api, &prompt, &rules)) {
        api_request_free(&api);
    } else {
        if (kind == API_MESSAGES) fit_answer(c->s, &api, prompt.n);
        exchange_begin(c->s, c->req, &api, rules, prompt.tokens, (uint32_t)prompt.n, c->tenant);
    }
    prompt_tokens_free(&prompt);
}

static void do_chat(call *c) { generate(c, API_CHAT); }
static void do_completions(call *c) { generate(c, API_COMPLETIONS); }
static void do_messages(call *c) { generate(c, API_MESSAGES); }
static void do_responses(call *c) { generate(c, API_RESPONSES); }

static void do_count_tokens(call *c) {
    api_request api;
    fkv_sampler_config any = fkv_sampler_config_default();
    prompt_tokens prompt = {0};
    bool good = api_request_parse(API_MESSAGES, c->body, c->n_body, &any, &api);
    if (good && prompt_tokens_of(c->s->model, &api, &prompt) == FKV_OK)
        exchange_send_json(c->s, c->req, 200, json_pack("{s:I}", "input_tokens", (json_int_t)prompt.n));
    else
        exchange_send_error(c->s, c->req, 400, NULL, "%s", good ? fkv_message() : api.error);
    prompt_tokens_free(&prompt);
    api_request_free(&api);
}

static void do_apply_template(call *c) {
    api_request api;
    fkv_sampler_config any = fkv_sampler_config_default();
    size_t n = 0;
    bool good = api_request_parse(API_CHAT, c->body, c->n_body, &any, &api);
    char *text = good ? prompt_text_of(c->s->model, api.conversation, &n) : NULL;
    if (text != NULL)
        exchange_send_json(c->s, c->req, 200, json_pack("{s:o}", "prompt", reply_sound_text(text, n)));
    else
        exchange_send_error(c->s, c->req, 400, NULL, "%s", good ? fkv_message() : api.error);
    free(text);
    api_request_free(&api);
}

static json_t *token_json(const fkv_model *model, uint32_t token, bool with_text) {
    size_t n = 0;
    if (!with_text) return json_integer(token);
    const char *text = fkv_token_text(model, token, true, &n);
    return json_pack("{s:I, s:o}", "id", (json_int_t)token, "piece", reply_sound_text(text, n));
}

static void do_tokenize(call *c) {
    char error[240];
    json_t *root = api_json(c->body, c->n_body, error, sizeof error);
    json_t *text = json_object_get(root, "content") != NULL ? json_object_get(root, "content") : json_object_get(root, "prompt");
    prompt_tokens t = {0};
    unsigned flags = json_is_true(json_object_get(root, "add_special")) ? FKV_TOKENIZE_BOS : FKV_TOKENIZE_PLAIN;
    if (root == NULL) {
        exchange_send_error(c->s, c->req, 400, NULL, "%s", error);
    } else if (!json_is_string(text)) {
        exchange_send_error(c->s, c->req, 400, "content", "content: a text is expected");
    } else if (prompt_tokens_of_text(c->s->model, json_string_value(text), json_string_length(text), flags, &t) != FKV_OK) {
        exchange_send_error(c->s, c->req, 400, "content", "%s", fkv_message());
    } else {
        json_t *list = json_array();
        bool pieces = json_is_true(json_object_get(root, "with_pieces"));
        for (size_t i = 0; i < t.n; i++) (void)json_array_append_new(list, token_json(c->s->model, t.tokens[i], pieces));
        exchange_send_json(c->s, c->req, 200, json_pack("{s:o, s:I}", "tokens", list, "count", (json_int_t)t.n));
    }
    prompt_tokens_free(&t);
    json_decref(root);
}

static void do_detokenize(call *c) {
    char error[240];
    json_t *root = api_json(c->body, c->n_body, error, sizeof error);
    const json_t *tokens = json_object_get(root, "tokens");
    struct evbuffer *text = evbuffer_new();
    size_t i;
    const json_t *token;
    bool good = json_is_array(tokens);
    json_array_foreach(tokens, i, token) {
        size_t n = 0;
        json_int_t number = json_integer_value(token);
        good = good && json_is_integer(token) && number >= 0 && number < (json_int_t)fkv_model_about(c->s->model)->n_vocab;
        if (!good) break;
        const char *bytes = fkv_token_text(c->s->model, (uint32_t)number, true, &n);
        (void)evbuffer_add(text, bytes, n);
    }
    size_t n = evbuffer_get_length(text);
    if (good)
        exchange_send_json(
            c->s, c->req, 200,
            json_pack("{s:o}", "content", reply_sound_text(n > 0 ? (const char *)evbuffer_pullup(text, -1) : "", n)));
    else
        exchange_send_error(c->s, c->req, 400, "tokens", "%s",
                            root == NULL ? error : "tokens: an array of tokens of this model is expected");
    evbuffer_free(text);
    json_decref(root);
}

static json_t *model_card(const call *c) {
    const fkv_model_info *about = fkv_model_about(c->s->model);
    fkv_engine_stats stats;
    fkv_engine_stats_now(c->s->engine, &stats);
    return json_pack("{s:s, s:s, s:s, s:I, s:s, s:I, s:I, s:b}", "id", c->s->model_name, "object", "model", "owned_by", "flatkv",
                     "created", (json_int_t)0, "architecture", about->architecture, "max_model_len",
                     (json_int_t)stats.max_request_tokens, "default_max_tokens", (json_int_t)stats.default_new, "chat",
                     about->has_chat);
}

static void do_models(call *c) {
    exchange_send_json(c->s, c->req, 200, json_pack("{s:s, s:[o]}", "object", "list", "data", model_card(c)));
}

/* Behind /models/ stands a name, which may have slashes of its own. */
static void do_model(call *c) {
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(c->req));
    char *name = evhttp_uridecode(strstr(path, "/models/") + strlen("/models/"), 0, NULL);
    if (name != NULL && strcmp(name, c->s->model_name) == 0)
        exchange_send_json(c->s, c->req, 200, model_card(c));
    else
        exchange_send_error(c->s, c->req, 404, "model", "there is one model here: %s", c->s->model_name);
    free(name);
}

static void do_health(call *c) {
    exchange_send_json(c->s, c->req, c->s->draining ? 503 : 200,
                       json_pack("{s:s}", "status", c->s->draining ? "draining" : "ok"));
}

static void say_loading(const call *c, const char *path) {
    (void)evhttp_add_header(evhttp_request_get_output_headers(c->req), "Retry-After", "1");
    if (strcmp(path, "/health") == 0)
        exchange_send_json(c->s, c->req, 503, json_pack("{s:s}", "status", "loading"));
    else
        exchange_send_error(c->s, c->req, 503, NULL, "the model is being loaded");
}

static uint64_t resident(void) {
    process_memory now = {0};
    (void)process_memory_now(&now);
    return now.anonymous_bytes;
}

static void do_metrics(call *c) {
    fkv_engine_stats stats;
    struct evbuffer *out = evbuffer_new();
    fkv_engine_stats_now(c->s->engine, &stats);
    c->s->metrics.connections = connections_count(c->s->connections);
    c->s->metrics.refused_connections = connections_refused(c->s->connections);
    metrics_write(&c->s->metrics, &stats, c->s->model_name, resident(), out);
    exchange_send_bytes(c->s, c->req, 200, "text/plain; version=0.0.4", out);
}

static void do_state(call *c) { exchange_send_json(c->s, c->req, 200, page_state(c->s, resident())); }

/* Needs no key: it holds nothing, and asks for one where the figures need it. */
static void do_page(call *c) {
    size_t n = 0;
    const char *html = page_html(&n);
    struct evbuffer *out = evbuffer_new();
    struct evkeyvalq *headers = evhttp_request_get_output_headers(c->req);
    (void)evbuffer_add_reference(out, html, n, NULL, NULL);
    (void)evhttp_add_header(
        headers, "Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'");
    (void)evhttp_add_header(headers, "X-Content-Type-Options", "nosniff");
    exchange_send_bytes(c->s, c->req, 200, "text/html; charset=utf-8", out);
}

typedef struct route {
    const char *path; /* more may follow where it ends with a slash and is not the root */
    enum evhttp_cmd_type method;
    bool open; /* without a key */
    void (*serve)(call *c);
} route;

static const route ROUTES[] = {
    {"/v1/chat/completions", EVHTTP_REQ_POST, false, do_chat},
    {"/v1/completions", EVHTTP_REQ_POST, false, do_completions},
    {"/v1/messages", EVHTTP_REQ_POST, false, do_messages},
    {"/v1/responses", EVHTTP_REQ_POST, false, do_responses},
    {"/v1/messages/count_tokens", EVHTTP_REQ_POST, false, do_count_tokens},
    {"/v1/models", EVHTTP_REQ_GET, false, do_models},
    {"/v1/models/", EVHTTP_REQ_GET, false, do_model},
    {"/tokenize", EVHTTP_REQ_POST, false, do_tokenize},
    {"/detokenize", EVHTTP_REQ_POST, false, do_detokenize},
    {"/apply-template", EVHTTP_REQ_POST, false, do_apply_template},
    {"/metrics", EVHTTP_REQ_GET, false, do_metrics},
    {"/health", EVHTTP_REQ_GET, true, do_health},
    {"/flatkv/state", EVHTTP_REQ_GET, false, do_state},
    {"/", EVHTTP_REQ_GET, true, do_page},
};

/* /v1 may be left out: some clients have it in their base URL, some do not. */
static const route *route_of(const char *path) {
    for (size_t i = 0; path != NULL && i < sizeof ROUTES / sizeof ROUTES[0]; i++) {
        const char *own = ROUTES[i].path;
        if (strncmp(own, "/v1/", 4) == 0 && strncmp(path, "/v1/", 4) != 0) own += 3;
        size_t n = strlen(own);
        bool begins = n > 1 && own[n - 1] == '/' && strncmp(path, own, n) == 0;
        if (begins || strcmp(path, own) == 0) return &ROUTES[i];
    }
    return NULL;
}

static void on_sent(struct evhttp_request *req, void *user) {
    server *s = user;
    connections_answered(s->connections, req);
    exchange_end_when_empty(s);
}

static bool takes(const route *r, enum evhttp_cmd_type method) {
    return method == r->method || (method == EVHTTP_REQ_HEAD && r->method == EVHTTP_REQ_GET);
}

/* evhttp reads no body of some methods (TRACE): what follows would be taken for the next request. */
static bool has_unread_body(struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    return evbuffer_get_length(evhttp_request_get_input_buffer(req)) == 0 &&
           (evhttp_find_header(headers, "Content-Length") != NULL || evhttp_find_header(headers, "Transfer-Encoding") != NULL);
}

static void on_request(struct evhttp_request *req, void *user) {
    server *s = user;
    if (has_unread_body(req)) (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Connection", "close");
    connections_asked(s->connections, req);
    evhttp_request_set_on_complete_cb(req, on_sent, s);
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
    const route *r = route_of(uri != NULL ? evhttp_uri_get_path(uri) : NULL);
    struct evbuffer *body = evhttp_request_get_input_buffer(req);
    call c = {.s = s, .req = req, .n_body = evbuffer_get_length(body), .tenant = tenant_of(s, req)};
    c.body = c.n_body > 0 ? (const char *)evbuffer_pullup(body, -1) : "";
    if (r == NULL) {
        exchange_send_error(s, req, 404, NULL, "there is nothing at this path; docs/serving.md lists the paths");
    } else if (!r->open && c.tenant == UINT64_MAX) {
        exchange_send_error(s, req, 401, NULL, "a key is needed: Authorization: Bearer KEY, or x-api-key");
    } else if (!takes(r, evhttp_request_get_command(req))) {
        const char *methods = r->method == EVHTTP_REQ_POST ? "POST" : "GET, HEAD";
        (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Allow", methods);
        exchange_send_error(s, req, 405, NULL, "this path takes %s", methods);
    } else if (foreign_host(s, req)) {
        exchange_send_error(s, req, 403, NULL,
                            "without a key this server answers to localhost and 127.0.0.1; --no-auth lifts that");
    } else if (foreign_origin(req)) {
        exchange_send_error(s, req, 403, NULL, "requests from pages of other sites are not served");
    } else if (s->draining && r->method == EVHTTP_REQ_POST) {
        (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Retry-After", "5");
        exchange_send_error(s, req, 503, NULL, "the server is shutting down");
    } else if (s->model == NULL) {
        say_loading(&c, r->path);
    } else {
        r->serve(&c);
    }
}

/* ---- the loop ---- */

static void on_wake(evutil_socket_t fd, short what, void *user) {
    char bytes[64];
    (void)what;
    while (read(fd, bytes, sizeof bytes) > 0) {
    }
    exchange_read_mail(user);
}

static void on_time_is_up(evutil_socket_t fd, short what, void *user) {
    (void)fd, (void)what;
    (void)event_base_loopbreak(((server *)user)->base);
}

/* The first signal ends what listens and lets what runs finish, the second ends at once. */
static void on_signal(evutil_socket_t fd, short what, void *user) {
    server *s = user;
    (void)fd, (void)what;
    if (s->draining || s->n_open == 0) {
        (void)event_base_loopbreak(s->base);
        return;
    }
    s->draining = true;
    connections_stop_listening(s->connections);
    evhttp_del_accept_socket(s->http, s->socket);
    s->socket = NULL;
    struct timeval limit = {(time_t)s->config.shutdown_s, 0};
    (void)event_base_once(s->base, -1, EV_TIMEOUT, on_time_is_up, s, &limit);
}

/* The caller tells why, in a line of its own. */
static void say_nothing(int severity, const char *message) {
    (void)severity;
    (void)message;
}

/* libevent does not say that a name is unknown: errno is then anything. */
static bool is_known(const char *host) {
    const struct evutil_addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = EVUTIL_AI_PASSIVE};
    struct evutil_addrinfo *found = NULL;
    const bool known = evutil_getaddrinfo(host, NULL, &hints, &found) == 0;
    if (known) evutil_freeaddrinfo(found);
    return known;
}

static bool listen_on(server *s) {
    s->http = evhttp_new(s->base);
    if (s->http == NULL) return false;
    evhttp_set_max_headers_size(s->http, MAX_HEADER_BYTES);
    evhttp_set_max_body_size(s->http, (ev_ssize_t)s->config.max_body);
    evhttp_set_timeout(s->http, STUCK_SECONDS);
    evhttp_set_allowed_methods(s->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD | EVHTTP_REQ_POST | EVHTTP_REQ_PUT | EVHTTP_REQ_DELETE |
                                            EVHTTP_REQ_OPTIONS | EVHTTP_REQ_TRACE | EVHTTP_REQ_PATCH); /* 405 for most */
    evhttp_set_gencb(s->http, on_request, s);
    event_set_log_callback(say_nothing);
    s->socket = evhttp_bind_socket_with_handle(s->http, s->config.host, s->config.port);
    event_set_log_callback(NULL);
    if (s->socket == NULL) {
        const int why = errno;
        errno = is_known(s->config.host) ? why : EINVAL;
        return false;
    }
    const connections_config bounds = {.max = s->config.max_connections,
                                       .max_ahead = s->config.max_body + 2 * MAX_HEADER_BYTES,
                                       .request_s = s->config.request_s};
    s->connections = connections_open(s->base, s->http, s->socket, &bounds);
    return s->connections != NULL;
}

static void say_address(const server *s) {
    struct sockaddr_storage at = {0};
    socklen_t n = sizeof at;
    uint16_t port = s->config.port;
    if (getsockname(evhttp_bound_socket_get_fd(s->socket), (struct sockaddr *)&at, &n) == 0)
        port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port : ((struct sockaddr_in *)&at)->sin_port);
    bool brackets = strchr(s->config.host, ':') != NULL;
    printf("listening on http://%s%s%s:%u\n", brackets ? "[" : "", s->config.host, brackets ? "]" : "", port);
    (void)fflush(stdout);
}

static bool run_loop(server *s) {
    struct event *wake = event_new(s->base, s->wake[0], EV_READ | EV_PERSIST, on_wake, s);
    struct event *interrupt = evsignal_new(s->base, SIGINT, on_signal, s);
    struct event *terminate = evsignal_new(s->base, SIGTERM, on_signal, s);
    const bool good = wake != NULL && interrupt != NULL && terminate != NULL && event_add(wake, NULL) == 0 &&
                      event_add(interrupt, NULL) == 0 && event_add(terminate, NULL) == 0;
    if (good) (void)event_base_dispatch(s->base);
    /* What is still running is told to stop, and its last events are read. */
    s->draining = true;
    for (int i = 0; s->n_open > 0; i++) { /* ends with the step that runs: the engine's thread must find the exchanges */
        (void)fkv_engine_drain(s->engine, 0.01);
        exchange_read_mail(s);
        (void)event_base_loop(s->base, EVLOOP_NONBLOCK);
        if (i == 0) exchange_cancel_all(s);
    }
    struct event *const events[] = {wake, interrupt, terminate};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i] != NULL) event_free(events[i]);
    return good;
}

/* ---- until the model is there ---- */

static void *wait_for_model(void *user) {
    (void)event_base_dispatch(((server *)user)->base);
    return NULL;
}

/* The loop on a thread of its own, with every signal left to the others. */
static bool start_waiting(server *s) {
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = event_base_once(s->base, s->wake[0], EV_READ, on_time_is_up, s, NULL) == 0 ? 0 : ENOMEM;
    if (code == 0) code = pthread_create(&s->waiting, NULL, wait_for_model, s);
    if (code != 0) errno = code; /* what the caller tells */
    s->is_waiting = code == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s->is_waiting;
}

static void end_waiting(server *s) {
    char byte = 0;
    if (!s->is_waiting) return;
    (void)!write(s->wake[1], &byte, 1); /* the pipe is empty: it has room */
    (void)pthread_join(s->waiting, NULL);
    (void)!read(s->wake[0], &byte, 1);
    s->is_waiting = false;
}

/* ---- open, run, close ---- */

server *serve_open(const serve_config *config) {
    server *s = calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->config = *config;
    s->next_seed = (uint64_t)(exchange_now() * 1e9);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)pthread_mutex_init(&s->lock, NULL);
    s->base = event_base_new();
    bool good = s->base != NULL && pipe(s->wake) == 0;
    for (int i = 0; good && i < 2; i++) {
        (void)evutil_make_socket_nonblocking(s->wake[i]);
        (void)evutil_make_socket_closeonexec(s->wake[i]);
    }
    if (good && listen_on(s) && start_waiting(s)) return s;
    int why = errno;
    serve_close(s);
    errno = why;
    return NULL;
}

bool serve_run(server *s, const serve_subject *subject) {
    end_waiting(s);
    s->model = subject->model;
    s->engine = subject->engine;
    s->model_name = subject->model_name;
    uint64_t before = resident();
    s->grammars = grammar_maker_open(s->model);
    s->base_bytes = subject->base_bytes;
    if (s->grammars != NULL) s->base_bytes += resident() - before; /* part of the line that the page draws */
    say_address(s);
    return run_loop(s);
}

void serve_close(server *s) {
    if (s == NULL) return;
    end_waiting(s);
    if (s->http != NULL) evhttp_free(s->http);
    connections_close(s->connections);
    if (s->base != NULL) event_base_free(s->base);
    grammar_maker_close(s->grammars);
    (void)pthread_mutex_destroy(&s->lock);
    for (int i = 0; i < 2; i++)
        if (s->wake[i] > 0) (void)close(s->wake[i]);
    free(s);
}
