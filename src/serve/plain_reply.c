/* Sends responses that consist of one JSON object, including errors. See exchange.h. */
#include "exchange.h"

#include "../kit/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

json_t *reply_utf8_text(const char *bytes, size_t n) {
    json_t *text = json_stringn(bytes, n);
    if (text != NULL) return text;
    struct evbuffer *sound = evbuffer_new();
    for (size_t i = 0; i < n;) {
        int length = utf8_length(bytes + i, n - i);
        (void)evbuffer_add(sound, length > 0 ? bytes + i : UTF8_REPLACEMENT, length > 0 ? (size_t)length : 3);
        i += length > 0 ? (size_t)length : 1;
    }
    text = json_stringn((const char *)evbuffer_pullup(sound, -1), evbuffer_get_length(sound));
    evbuffer_free(sound);
    return text != NULL ? text : json_string("");
}

void exchange_send_bytes(server *s, struct evhttp_request *req, int status, const char *type, struct evbuffer *bytes) {
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    s->metrics.http[status / 100 % 6]++;
    (void)evhttp_add_header(headers, "Content-Type", type);
    if (evhttp_request_get_command(req) == EVHTTP_REQ_HEAD) {
        char length[24];
        (void)snprintf(length, sizeof length, "%zu", evbuffer_get_length(bytes));
        (void)evhttp_add_header(headers, "Content-Length", length);
        (void)evbuffer_drain(bytes, evbuffer_get_length(bytes));
    }
    evhttp_send_reply(req, status, NULL, bytes);
    evbuffer_free(bytes);
}

void exchange_send_json(server *s, struct evhttp_request *req, int status, json_t *object) {
    char *text = object != NULL ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (text == NULL) status = 500;
    struct evbuffer *out = evbuffer_new();
    (void)evbuffer_add_printf(out, "%s\n", text != NULL ? text : "{}");
    free(text);
    exchange_send_bytes(s, req, status, "application/json", out);
}

static const char *error_type(int status, bool anthropic) {
    static const struct {
        int status;
        const char *openai;
        const char *anthropic;
    } types[] = {{400, "invalid_request_error", "invalid_request_error"}, {401, "authentication_error", "authentication_error"},
                 {403, "permission_error", "permission_error"},           {404, "invalid_request_error", "not_found_error"},
                 {405, "invalid_request_error", "invalid_request_error"}, {413, "invalid_request_error", "request_too_large"},
                 {429, "rate_limit_error", "rate_limit_error"},           {503, "server_error", "overloaded_error"}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (types[i].status == status) return anthropic ? types[i].anthropic : types[i].openai;
    return anthropic ? "api_error" : "server_error";
}

void exchange_send_error(server *s, struct evhttp_request *req, int status, const char *param, const char *format, ...) {
    char text[600];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(req));
    bool anthropic = path != NULL && (strncmp(path, "/v1/messages", 12) == 0 || strncmp(path, "/messages", 9) == 0);
    json_t *message = reply_utf8_text(text, strlen(text));
    json_t *error;
    if (path != NULL && strncmp(path, "/api/", 5) == 0) /* Ollama */
        error = json_pack("{s:o}", "error", message);
    else if (anthropic)
        error = json_pack("{s:s, s:{s:s, s:o}}", "type", "error", "error", "type", error_type(status, true), "message", message);
    else
        error = json_pack("{s:{s:o, s:s, s:s?, s:i}}", "error", "message", message, "type", error_type(status, false), "param",
                          param, "code", status);
    exchange_send_json(s, req, status, error);
}
