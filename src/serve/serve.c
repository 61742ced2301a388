/* HTTP server: authentication, routing, the event loop and shutdown. See serve.h.
 *
 * The server limits the number of connections and the time to send a request (connections.h), the size of a request body
 * (max_body), the size of a request header (16 KiB), and the number of unsent output bytes per client (max_unread).
 */
#include "serve.h"

#include "../kit/process.h"
#include "exchange.h"
#include "fleet.h"
#include "ollama_info.h"
#include "page_files.h"
#include "page_state.h"
#include "prepare.h"

#include <errno.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    STUCK_SECONDS = 300,
    HEADER_SECONDS = 10,
    MAX_HEADER_BYTES = 16 * 1024,
    OTHER_FILES = 32 /* number of descriptors reserved for the model, prefix files and the event loop */
};

serve_config serve_config_default(void) {
    return (serve_config){.host = "127.0.0.1",
                          .port = 8080,
                          .max_body = 8 << 20,
                          .max_unread = 1 << 20,
                          .max_connections = 328,
                          .request_s = 60.0,
                          .ping_s = 5.0,
                          .shutdown_s = 30.0,
                          .busy_status = 429};
}

bool serve_supports_schemas(void) { return grammar_supports_rules(); }

/* ---- authentication ---- */

/* Returns true if two texts are equal. To prevent timing attacks, the run time depends only on the length of `a`. */
static bool same_text(const char *a, const char *b) {
    size_t n_a = strlen(a);
    size_t n_b = strlen(b);
    unsigned char different = n_a != n_b;
    for (size_t i = 0; i < n_a; i++) different |= (unsigned char)(a[i] ^ b[n_b > 0 ? i % n_b : 0]);
    return different == 0;
}

/* Returns the tenant number of the request's API key. Returns 0 if no keys are configured, and UINT64_MAX if the key is missing
 * or unknown. */
static uint64_t tenant_of(const server *s, struct evhttp_request *req) {
    if (s->config.n_keys == 0) return 0;
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    const char *key = evhttp_find_header(headers, "x-api-key");
    const char *bearer = evhttp_find_header(headers, "Authorization");
    if (key == NULL && bearer != NULL && strncasecmp(bearer, "Bearer ", 7) == 0) key = bearer + 7;
    uint64_t found = UINT64_MAX;
    for (uint32_t i = 0; key != NULL && i < s->config.n_keys; i++)
        if (same_text(key, s->config.keys[i]))
            found = i + 1; /* no early exit, so that the run time does not depend on which key matches */
    return found;
}

/* Returns true if the tenant may read the statistics of all tenants. If no keys are configured, every client may read them. */
static bool is_admin(const server *s, uint64_t tenant) {
    return s->config.n_keys == 0 || (s->config.has_admin_key && tenant == s->config.n_keys);
}

/* Returns true if --cors allows the origin of the page that sent the request. */
static bool allows_origin(const server *s, struct evhttp_request *req) {
    const char *origin = evhttp_find_header(evhttp_request_get_input_headers(req), "Origin");
    return s->config.cors != NULL && origin != NULL && (strcmp(s->config.cors, "*") == 0 || strcmp(s->config.cors, origin) == 0);
}

/* Adds the CORS headers that let pages of an allowed origin read the response. */
static void add_cors_headers(const server *s, struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    if (!allows_origin(s, req)) return;
    (void)evhttp_add_header(headers, "Access-Control-Allow-Origin", s->config.cors);
    (void)evhttp_add_header(headers, "Access-Control-Expose-Headers", "Retry-After");
    (void)evhttp_add_header(headers, "Vary", "Origin");
}

/* Answers a preflight request from an allowed origin. Browsers send preflight requests without a key. */
static void send_preflight(server *s, struct evhttp_request *req, const char *methods) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ";
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    const char *wanted = evhttp_find_header(evhttp_request_get_input_headers(req), "Access-Control-Request-Headers");
    const bool valid = wanted != NULL && wanted[strspn(wanted, letters)] == 0;
    (void)evhttp_add_header(headers, "Access-Control-Allow-Methods", methods);
    (void)evhttp_add_header(headers, "Access-Control-Allow-Headers", valid ? wanted : "Authorization, Content-Type, X-Api-Key");
    (void)evhttp_add_header(headers, "Access-Control-Max-Age", "86400");
    s->metrics.http[2]++;
    evhttp_send_reply(req, 204, NULL, NULL);
}

/* Returns true if a browser sent the request on behalf of a page from another site. Such pages must not be able to use a local
 * server. */
static bool is_foreign_origin(const server *s, struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    if (allows_origin(s, req)) return false;
    const char *origin = evhttp_find_header(headers, "Origin");
    const char *host = evhttp_find_header(headers, "Host");
    if (origin == NULL) return false;
    const char *name = strstr(origin, "://");
    return host == NULL || name == NULL || strcmp(name + 3, host) != 0;
}

/* Returns true if the Host header is not a name of this server. Protects servers without keys against DNS rebinding. */
static bool is_foreign_host(const server *s, struct evhttp_request *req) {
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

typedef struct http_call {
    server *s;
    struct evhttp_request *req;
    uint64_t tenant;
} http_call;

static json_t *model_card(const served_model *m) {
    const fkv_model_info *about = fkv_model_about(m->model);
    fkv_engine_stats stats;
    fkv_engine_stats_now(m->engine, &stats);
    return json_pack("{s:s, s:s, s:s, s:I, s:s, s:I, s:I, s:b}", "id", m->name, "object", "model", "owned_by", "flatkv",
                     "created", (json_int_t)0, "architecture", about->architecture, "max_model_len",
                     (json_int_t)stats.max_request_tokens, "default_max_tokens", (json_int_t)stats.default_new, "chat",
                     about->has_chat);
}

static void do_models(http_call *c) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < c->s->n_models; i++) (void)json_array_append_new(list, model_card(&c->s->models[i]));
    exchange_send_json(c->s, c->req, 200, json_pack("{s:s, s:o}", "object", "list", "data", list));
}

/* Serves /models/NAME, where NAME may contain slashes. */
static void do_model(http_call *c) {
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(c->req));
    char *name = evhttp_uridecode(strstr(path, "/models/") + strlen("/models/"), 0, NULL);
    const served_model *m = name != NULL ? served_model_find(c->s->models, c->s->n_models, name) : NULL;
    if (m != NULL)
        exchange_send_json(c->s, c->req, 200, model_card(m));
    else
        exchange_send_error(c->s, c->req, 404, "model", "unknown model: /v1/models lists the models of this server");
    free(name);
}

static void do_ollama_tags(http_call *c) { exchange_send_json(c->s, c->req, 200, ollama_tags(c->s)); }

static void do_ollama_running(http_call *c) { exchange_send_json(c->s, c->req, 200, ollama_running(c->s)); }

static void do_ollama_version(http_call *c) { exchange_send_json(c->s, c->req, 200, ollama_version()); }

static void do_health(http_call *c) {
    const bool drains = c->s->draining || c->s->leaving;
    exchange_send_json(c->s, c->req, drains ? 503 : 200, json_pack("{s:s}", "status", drains ? "draining" : "ok"));
}

static void do_ready(http_call *c) {
    const char *status = fleet_readiness(c->s);
    const bool ready = strcmp(status, "ready") == 0;
    if (!ready) (void)evhttp_add_header(evhttp_request_get_output_headers(c->req), "Retry-After", "1");
    exchange_send_json(c->s, c->req, ready ? 200 : 503, json_pack("{s:s}", "status", status));
}

static void do_live(http_call *c) { exchange_send_json(c->s, c->req, 200, json_pack("{s:s}", "status", "alive")); }

static void send_loading(const http_call *c, const char *path) {
    (void)evhttp_add_header(evhttp_request_get_output_headers(c->req), "Retry-After", "1");
    if (strcmp(path, "/health") == 0)
        exchange_send_json(c->s, c->req, 503, json_pack("{s:s}", "status", "loading"));
    else
        exchange_send_error(c->s, c->req, 503, NULL, "the model is loading");
}

static uint64_t resident_bytes(void) {
    process_memory now = {0};
    (void)process_memory_now(&now);
    return now.anonymous_bytes;
}

static void do_metrics(http_call *c) {
    metrics_model models[SERVE_MAX_MODELS];
    struct evbuffer *out = evbuffer_new();
    for (uint32_t i = 0; i < c->s->n_models; i++) {
        models[i].name = c->s->models[i].name;
        models[i].latencies = &c->s->models[i].latencies;
        fkv_engine_stats_now(c->s->models[i].engine, &models[i].stats);
    }
    c->s->metrics.connections = connections_count(c->s->connections);
    c->s->metrics.preparing = c->s->n_preparing;
    c->s->metrics.refused_connections = connections_rejected(c->s->connections);
    metrics_write(&c->s->metrics, models, c->s->n_models, resident_bytes(), out);
    if (c->s->config.vllm_metrics) metrics_write_vllm(models, c->s->n_models, out);
    exchange_send_bytes(c->s, c->req, 200, "text/plain; version=0.0.4", out);
}

/* Returns the model that the query parameter `model` selects; without the parameter, the first model. Sends an error and returns
 * NULL if there is no such model. */
static served_model *model_of_query(http_call *c) {
    const char *query = evhttp_uri_get_query(evhttp_request_get_evhttp_uri(c->req));
    struct evkeyvalq fields = {0};
    char error[600] = "the query is not valid";
    served_model *m = NULL;
    if (query == NULL) return &c->s->models[0];
    if (evhttp_parse_query_str(query, &fields) == 0) {
        const char *name = evhttp_find_header(&fields, "model");
        json_t *text = name != NULL ? reply_utf8_text(name, strlen(name)) : NULL;
        m = served_model_choose(c->s->models, c->s->n_models, text, error, sizeof error);
        json_decref(text);
        evhttp_clear_headers(&fields);
    }
    if (m == NULL) exchange_send_error(c->s, c->req, 404, "model", "%s", error);
    return m;
}

static void do_server_info(http_call *c) {
    const served_model *m = model_of_query(c);
    if (m != NULL) exchange_send_json(c->s, c->req, 200, fleet_server_info(c->s, m));
}

static void do_model_info(http_call *c) {
    const served_model *m = model_of_query(c);
    if (m != NULL) exchange_send_json(c->s, c->req, 200, fleet_model_info(m));
}

static void do_props(http_call *c) {
    const served_model *m = model_of_query(c);
    if (m != NULL) exchange_send_json(c->s, c->req, 200, props_state(m));
}

static void do_slots(http_call *c) {
    const served_model *m = model_of_query(c);
    if (m != NULL) exchange_send_json(c->s, c->req, 200, slots_state(m));
}

static void do_state(http_call *c) {
    const served_model *m = model_of_query(c);
    if (m != NULL) exchange_send_json(c->s, c->req, 200, page_state(c->s, m, resident_bytes()));
}

/* Serves a file of the web page. These requests need no key, because the files contain no private data and the page itself asks
 * the user for the key. */
static void do_page(http_call *c) {
    const page_file *file = page_file_find(evhttp_uri_get_path(evhttp_request_get_evhttp_uri(c->req)));
    if (file == NULL) {
        exchange_send_error(c->s, c->req, 404, NULL, "unknown path: the web page has no such file");
        return;
    }
    const char *known = evhttp_find_header(evhttp_request_get_input_headers(c->req), "If-None-Match");
    const bool unchanged = known != NULL && strcmp(known, file->etag) == 0;
    const struct {
        const char *name;
        const char *value;
    } fields[] = {{"Content-Security-Policy", PAGE_SECURITY_POLICY},
                  {"X-Content-Type-Options", "nosniff"},
                  {"Referrer-Policy", "no-referrer"},
                  {"Cross-Origin-Opener-Policy", "same-origin"},
                  {"Cross-Origin-Resource-Policy", "same-origin"},
                  {"Cache-Control", "no-cache"},
                  {"ETag", file->etag}};
    struct evkeyvalq *headers = evhttp_request_get_output_headers(c->req);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        (void)evhttp_add_header(headers, fields[i].name, fields[i].value);
    struct evbuffer *out = evbuffer_new();
    if (!unchanged) (void)evbuffer_add_reference(out, file->bytes, file->n_bytes, NULL, NULL);
    exchange_send_bytes(c->s, c->req, unchanged ? 304 : 200, file->type, out);
}

typedef struct route {
    const char *path; /* a path that ends with a slash, other than "/" itself, matches all paths that start with it */
    enum evhttp_cmd_type method;
    enum { WITH_KEY, OPEN, ADMIN } access; /* OPEN: no key required; ADMIN: admin key required if there are keys */
    void (*serve)(http_call *c);           /* sends the response on the event-loop thread; NULL if `prepare` is used */
    void (*prepare)(exchange *x);          /* prepares the response on a worker thread; NULL if `serve` is used */
} route;

static const route ROUTES[] = {
    {"/v1/chat/completions", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_chat},
    {"/v1/completions", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_completions},
    {"/v1/messages", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_messages},
    {"/v1/responses", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_responses},
    {"/v1/messages/count_tokens", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_token_count},
    {"/v1/embeddings", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_embeddings},
    {"/v1/models", EVHTTP_REQ_GET, WITH_KEY, do_models, NULL},
    {"/v1/models/", EVHTTP_REQ_GET, WITH_KEY, do_model, NULL},
    {"/api/chat", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_ollama_chat},
    {"/api/generate", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_ollama_generate},
    {"/api/embed", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_ollama_embed},
    {"/api/embeddings", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_ollama_embeddings},
    {"/api/show", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_ollama_show},
    {"/api/tags", EVHTTP_REQ_GET, WITH_KEY, do_ollama_tags, NULL},
    {"/api/ps", EVHTTP_REQ_GET, WITH_KEY, do_ollama_running, NULL},
    {"/api/version", EVHTTP_REQ_GET, WITH_KEY, do_ollama_version, NULL},
    {"/tokenize", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_tokens},
    {"/detokenize", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_token_text},
    {"/apply-template", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_template_text},
    {"/infill", EVHTTP_REQ_POST, WITH_KEY, NULL, prepare_infill},
    {"/props", EVHTTP_REQ_GET, WITH_KEY, do_props, NULL},
    {"/slots", EVHTTP_REQ_GET, ADMIN, do_slots, NULL},
    {"/metrics", EVHTTP_REQ_GET, ADMIN, do_metrics, NULL},
    {"/health", EVHTTP_REQ_GET, OPEN, do_health, NULL},
    {"/ready", EVHTTP_REQ_GET, OPEN, do_ready, NULL},
    {"/live", EVHTTP_REQ_GET, OPEN, do_live, NULL},
    {"/server_info", EVHTTP_REQ_GET, WITH_KEY, do_server_info, NULL},
    {"/get_server_info", EVHTTP_REQ_GET, WITH_KEY, do_server_info, NULL},
    {"/get_model_info", EVHTTP_REQ_GET, WITH_KEY, do_model_info, NULL},
    {"/flatkv/state", EVHTTP_REQ_GET, ADMIN, do_state, NULL},
    {"/page/", EVHTTP_REQ_GET, OPEN, do_page, NULL},
    {"/", EVHTTP_REQ_GET, OPEN, do_page, NULL},
};

/* Finds the route of a path. The prefix /v1 is optional, because some clients include it in their base URL and some do not. */
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
    connections_reply_sent(s->connections, req);
    exchange_end_when_empty(s);
}

static bool accepts_method(const route *r, enum evhttp_cmd_type method) {
    return method == r->method || (method == EVHTTP_REQ_HEAD && r->method == EVHTTP_REQ_GET);
}

/* Returns true if the request has a body that evhttp did not read (TRACE). The connection must then be closed, because evhttp
 * would parse the body as the next request. */
static bool has_unread_body(struct evhttp_request *req) {
    struct evkeyvalq *headers = evhttp_request_get_input_headers(req);
    return evbuffer_get_length(evhttp_request_get_input_buffer(req)) == 0 &&
           (evhttp_find_header(headers, "Content-Length") != NULL || evhttp_find_header(headers, "Transfer-Encoding") != NULL);
}

static void on_request(struct evhttp_request *req, void *user) {
    server *s = user;
    if (has_unread_body(req)) (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Connection", "close");
    connections_request_received(s->connections, req);
    evhttp_request_set_on_complete_cb(req, on_sent, s);
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
    const route *r = route_of(uri != NULL ? evhttp_uri_get_path(uri) : NULL);
    http_call c = {.s = s, .req = req, .tenant = tenant_of(s, req)};
    const char *methods = r == NULL || r->method == EVHTTP_REQ_POST ? "POST" : "GET, HEAD";
    add_cors_headers(s, req);
    fleet_add_headers(s, req);
    if (r != NULL && evhttp_request_get_command(req) == EVHTTP_REQ_OPTIONS && allows_origin(s, req)) {
        send_preflight(s, req, methods);
    } else if (r == NULL) {
        exchange_send_error(
            s, req, 404, NULL,
            "unknown path: expected an endpoint such as /v1/chat/completions, /v1/completions, /v1/messages or /v1/models");
    } else if (r->access != OPEN && c.tenant == UINT64_MAX) {
        exchange_send_error(s, req, 401, NULL, "missing or unknown API key: send Authorization: Bearer KEY, or x-api-key");
    } else if (r->access == ADMIN && !is_admin(s, c.tenant)) {
        exchange_send_error(s, req, 403, NULL, "this path requires the admin key, which --admin-key-file sets");
    } else if (!accepts_method(r, evhttp_request_get_command(req))) {
        (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Allow", methods);
        exchange_send_error(s, req, 405, NULL, "method not allowed: expected %s", methods);
    } else if (is_foreign_host(s, req)) {
        exchange_send_error(
            s, req, 403, NULL,
            "unknown Host header: without API keys only localhost, 127.0.0.1 and the --host address are accepted; --no-auth accepts all");
    } else if (is_foreign_origin(s, req)) {
        exchange_send_error(s, req, 403, NULL,
                            "requests from pages of other sites are not allowed; --cors ORIGIN allows one site");
    } else if (s->draining && r->method == EVHTTP_REQ_POST) {
        (void)evhttp_add_header(evhttp_request_get_output_headers(req), "Retry-After", "5");
        exchange_send_error(s, req, 503, NULL, "the server is shutting down");
    } else if (s->n_models == 0 && r->serve != do_page && r->serve != do_ready && r->serve != do_live) {
        send_loading(&c, r->path);
    } else if (r->prepare != NULL) {
        const bool embeds =
            r->prepare == prepare_embeddings || r->prepare == prepare_ollama_embed || r->prepare == prepare_ollama_embeddings;
        exchange_begin(s, req, r->prepare, embeds, c.tenant);
    } else {
        r->serve(&c);
    }
}

/* ---- event loop ---- */

static void on_wake(evutil_socket_t fd, short what, void *user) {
    char bytes[64];
    (void)what;
    while (read(fd, bytes, sizeof bytes) > 0) {
    }
    exchange_read_events(user);
}

static void on_time_is_up(evutil_socket_t fd, short what, void *user) {
    (void)fd, (void)what;
    (void)event_base_loopbreak(((server *)user)->base);
}

/* Stops listening and lets running requests finish. */
static void stop_accepting(evutil_socket_t fd, short what, void *user) {
    server *s = user;
    (void)fd, (void)what;
    s->draining = true;
    connections_stop_listening(s->connections);
    evhttp_del_accept_socket(s->http, s->socket);
    s->socket = NULL;
    struct timeval limit = {(time_t)s->config.shutdown_s, 0};
    (void)event_base_once(s->base, -1, EV_TIMEOUT, on_time_is_up, s, &limit);
    exchange_end_when_empty(s);
}

/* Handles SIGINT and SIGTERM. After the first signal, the server reports for drain_s seconds that it is not ready, but still
 * accepts requests, so that load balancers can redirect their clients. Then it stops accepting requests. After the second signal,
 * the server ends immediately. */
static void on_signal(evutil_socket_t fd, short what, void *user) {
    server *s = user;
    if (s->draining || s->leaving) {
        (void)event_base_loopbreak(s->base);
        return;
    }
    s->leaving = true;
    const double drain_s = s->config.drain_s;
    const struct timeval delay = {(time_t)drain_s, (suseconds_t)((drain_s - (double)(time_t)drain_s) * 1e6)};
    if (drain_s <= 0.0 || event_base_once(s->base, -1, EV_TIMEOUT, stop_accepting, s, &delay) != 0)
        stop_accepting(fd, what, user);
}

/* Discards log messages of libevent, because the caller reports the error. */
static void discard_log(int severity, const char *message) {
    (void)severity;
    (void)message;
}

/* Returns true if the host name can be resolved. libevent does not set errno for unknown names. */
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
                                            EVHTTP_REQ_OPTIONS | EVHTTP_REQ_TRACE |
                                            EVHTTP_REQ_PATCH); /* methods other than GET, HEAD and POST are answered with 405 */
    evhttp_set_gencb(s->http, on_request, s);
    event_set_log_callback(discard_log);
    s->socket = evhttp_bind_socket_with_handle(s->http, s->config.host, s->config.port);
    event_set_log_callback(NULL);
    if (s->socket == NULL) {
        const int why = errno;
        errno = is_known(s->config.host) ? why : EINVAL;
        return false;
    }
    const connections_config bounds = {.max = s->config.max_connections,
                                       .max_header = MAX_HEADER_BYTES,
                                       .max_body = s->config.max_body,
                                       .header_s = HEADER_SECONDS,
                                       .request_s = s->config.request_s};
    s->connections = connections_open(s->base, s->http, s->socket, &bounds);
    return s->connections != NULL;
}

static void print_address(const server *s) {
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
    if (good) {
        print_address(s); /* after the signal handlers are installed, so that a reader of this line can send SIGTERM */
        (void)event_base_dispatch(s->base);
    }
    /* Cancel the remaining requests and process their last events. */
    s->draining = s->ending = true;
    worker_pool_discard(s->pool);
    for (int i = 0; s->n_open > 0; i++) { /* the engine may use an exchange until its current step ends; a worker thread may use
                                             it until its current job ends */
        const struct timespec pause = {0, 1000000};
        bool drained = true;
        for (uint32_t k = 0; k < s->n_models; k++) drained = fkv_engine_drain(s->models[k].engine, 0.01) && drained;
        if (drained) (void)nanosleep(&pause, NULL);
        exchange_read_events(s);
        (void)event_base_loop(s->base, EVLOOP_NONBLOCK);
        if (i == 0) exchange_cancel_all(s);
    }
    struct event *const events[] = {wake, interrupt, terminate};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i] != NULL) event_free(events[i]);
    return good;
}

/* ---- loading ---- */

static void *run_loading_loop(void *user) {
    (void)event_base_dispatch(((server *)user)->base);
    return NULL;
}

/* Runs the event loop on a separate thread. All signals are blocked in this thread, so that other threads receive them. */
static bool start_loading_loop(server *s) {
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = event_base_once(s->base, s->wake[0], EV_READ, on_time_is_up, s, NULL) == 0 ? 0 : ENOMEM;
    if (code == 0) code = pthread_create(&s->loading_thread, NULL, run_loading_loop, s);
    if (code != 0) errno = code; /* the caller reads errno */
    s->is_loading = code == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s->is_loading;
}

static void stop_loading_loop(server *s) {
    char byte = 0;
    if (!s->is_loading) return;
    (void)!write(s->wake[1], &byte, 1); /* this write cannot block, because the pipe is empty */
    (void)pthread_join(s->loading_thread, NULL);
    (void)!read(s->wake[0], &byte, 1);
    s->is_loading = false;
}

/* ---- open, run and close ---- */

/* Raises the soft limit on open files if max_connections requires it. Returns the number of connections that the limit allows, at
 * most max_connections. */
static uint32_t allowed_connections(uint32_t max_connections) {
    struct rlimit limit;
    const rlim_t needed = (rlim_t)max_connections + OTHER_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= needed)
        return max_connections;
    const bool enough = limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= needed;
    const struct rlimit raised = {.rlim_cur = enough ? needed : limit.rlim_max, .rlim_max = limit.rlim_max};
    const rlim_t files = setrlimit(RLIMIT_NOFILE, &raised) == 0 ? raised.rlim_cur : limit.rlim_cur;
    if (files >= needed) return max_connections;
    const uint32_t allowed = files > OTHER_FILES ? (uint32_t)(files - OTHER_FILES) : 1;
    (void)fprintf(stderr, "flatkv: the open-file limit of %llu allows %u connections instead of %u; raise it with ulimit -n\n",
                  (unsigned long long)files, allowed, max_connections);
    return allowed;
}

server *serve_open(const serve_config *config) {
    server *s = calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->config = *config;
    s->config.max_connections = allowed_connections(config->max_connections);
    s->next_seed = (uint64_t)(exchange_now() * 1e9);
    s->started_at = (int64_t)time(NULL);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)pthread_mutex_init(&s->lock, NULL);
    s->base = event_base_new();
    bool good = s->base != NULL && pipe(s->wake) == 0;
    for (int i = 0; good && i < 2; i++) {
        (void)evutil_make_socket_nonblocking(s->wake[i]);
        (void)evutil_make_socket_closeonexec(s->wake[i]);
    }
    if (good && listen_on(s) && start_loading_loop(s)) return s;
    int why = errno;
    serve_close(s);
    errno = why;
    return NULL;
}

bool serve_run(server *s, const serve_subject *subjects, uint32_t n_subjects, uint64_t base_bytes) {
    stop_loading_loop(s);
    uint64_t before = resident_bytes();
    bool good = true;
    for (uint32_t i = 0; i < n_subjects; i++) good = served_model_open(&subjects[i], &s->models[s->n_models++]) && good;
    s->pool = worker_pool_open();
    if (s->pool == NULL || !good) return false;
    s->base_bytes = base_bytes + resident_bytes() - before; /* adds the memory of the vocabulary indexes */
    return run_loop(s);
}

void serve_close(server *s) {
    if (s == NULL) return;
    stop_loading_loop(s);
    worker_pool_close(s->pool);
    if (s->http != NULL) evhttp_free(s->http);
    connections_close(s->connections);
    if (s->base != NULL) event_base_free(s->base);
    for (uint32_t i = 0; i < s->n_models; i++) served_model_close(&s->models[i]);
    (void)pthread_mutex_destroy(&s->lock);
    for (int i = 0; i < 2; i++)
        if (s->wake[i] > 0) (void)close(s->wake[i]);
    free(s);
}
