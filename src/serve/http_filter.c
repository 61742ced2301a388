/* See http_filter.h. */
#include "http_filter.h"

#include <event2/http.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_CHUNK_LINE = 1024, MAX_CHUNK_DIGITS = 8 };

typedef enum filter_state { REQUEST_LINE, HEADER, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER } filter_state;

struct http_filter {
    size_t max_header;
    size_t max_body;
    filter_state state;
    uint64_t n_requests;
    size_t n_header; /* number of header bytes of the current request */
    size_t n_body;   /* number of body bytes of the current request, including all chunks */
    size_t left;     /* number of bytes of the current body or chunk that have not been passed on yet */
    bool http_1_0;
    bool may_have_body;
    bool has_host;
    bool has_length;
    bool chunked;
    const char *message;
};

http_filter *http_filter_open(size_t max_header, size_t max_body) {
    http_filter *f = calloc(1, sizeof *f);
    if (f != NULL) *f = (http_filter){.max_header = max_header, .max_body = max_body};
    return f;
}

void http_filter_close(http_filter *f) { free(f); }
uint64_t http_filter_requests(const http_filter *f) { return f->n_requests; }
bool http_filter_at_start(const http_filter *f) { return f->state == REQUEST_LINE; }
bool http_filter_in_header(const http_filter *f) { return f->state == HEADER; }

static int violation(http_filter *f, int status, const char *message) {
    f->message = message;
    return status;
}

static void end_request(http_filter *f) {
    *f = (http_filter){.max_header = f->max_header, .max_body = f->max_body, .n_requests = f->n_requests + 1};
}

/* Returns the number of leading characters that may occur in a token (RFC 9110, section 5.6.2). */
static size_t token_length(const char *text, size_t n) {
    size_t i = 0;
    while (i < n && (unsigned char)text[i] > ' ' && (unsigned char)text[i] < 0x7f &&
           strchr("\"(),/:;<=>?@[\\]{}", text[i]) == NULL)
        i++;
    return i;
}

/* Returns true if the bytes contain a control character other than a tab. */
static bool has_control(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((unsigned char)text[i] < ' ' && text[i] != '\t') || text[i] == 0x7f) return true;
    return false;
}

/* ---- request line ---- */

static bool is_known_method(const char *method, size_t n, bool *may_have_body) {
    static const char *const methods[] = {"POST", "PUT", "PATCH", "GET", "HEAD", "DELETE", "OPTIONS", "TRACE"};
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        if (strlen(methods[i]) != n || memcmp(methods[i], method, n) != 0) continue;
        *may_have_body = i < 3; /* with other methods, evhttp would parse the body as the next request */
        return true;
    }
    return false;
}

/* Returns true if evhttp can parse the request target. */
static bool is_valid_target(const char *target, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (target[i] <= ' ' || target[i] >= 0x7f) return false;
    char *copy = n > 0 ? strndup(target, n) : NULL;
    struct evhttp_uri *uri = copy != NULL ? evhttp_uri_parse_with_flags(copy, EVHTTP_URI_NONCONFORMANT) : NULL;
    free(copy);
    if (uri == NULL) return false;
    evhttp_uri_free(uri);
    return true;
}

static int check_request_line(http_filter *f, const char *line, size_t n) {
    const char *space = memchr(line, ' ', n);
    const size_t n_method = space != NULL ? (size_t)(space - line) : 0;
    if (n_method == 0 || token_length(line, n_method) != n_method || n < n_method + 10)
        return violation(f, 400, "invalid request line: expected METHOD TARGET HTTP/1.1");
    const char *version = line + n - 9;
    if (memcmp(version, " HTTP/1.", 8) != 0 || (version[8] != '0' && version[8] != '1'))
        return violation(f, 400, "invalid request line: expected METHOD TARGET HTTP/1.1");
    if (!is_known_method(line, n_method, &f->may_have_body)) return violation(f, 501, "unknown HTTP method");
    if (!is_valid_target(space + 1, n - n_method - 10)) return violation(f, 400, "invalid request target");
    f->http_1_0 = version[8] == '0';
    f->state = HEADER;
    return 0;
}

/* ---- header fields ---- */

static bool is_name(const char *line, size_t n_name, const char *name) {
    return strlen(name) == n_name && strncasecmp(line, name, n_name) == 0;
}

static int read_content_length(http_filter *f, const char *value, size_t n) {
    if (f->has_length) return violation(f, 400, "more than one Content-Length header");
    if (n == 0) return violation(f, 400, "invalid Content-Length: expected decimal digits");
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        if (value[i] < '0' || value[i] > '9') return violation(f, 400, "invalid Content-Length: expected decimal digits");
        if (length <= f->max_body) length = 10 * length + (size_t)(value[i] - '0');
    }
    f->has_length = true;
    f->left = length;
    return 0;
}

static int read_transfer_encoding(http_filter *f, const char *value, size_t n) {
    if (f->chunked) return violation(f, 400, "more than one Transfer-Encoding header");
    if (f->http_1_0) return violation(f, 400, "Transfer-Encoding is not allowed in HTTP/1.0");
    if (n != 7 || strncasecmp(value, "chunked", 7) != 0)
        return violation(f, 501, "unsupported Transfer-Encoding: expected chunked");
    f->chunked = true;
    return 0;
}

static int check_field(http_filter *f, const char *line, size_t n) {
    const size_t n_name = token_length(line, n);
    if (n_name == 0 || n_name == n || line[n_name] != ':')
        return violation(f, 400, "invalid header: expected NAME: VALUE without spaces before the colon");
    const char *value = line + n_name + 1;
    size_t n_value = n - n_name - 1;
    if (has_control(value, n_value)) return violation(f, 400, "invalid header: the value contains a control character");
    while (n_value > 0 && (*value == ' ' || *value == '\t')) {
        value++;
        n_value--;
    }
    while (n_value > 0 && (value[n_value - 1] == ' ' || value[n_value - 1] == '\t')) n_value--;
    if (f->state == TRAILER) return 0;
    if (is_name(line, n_name, "Content-Length")) return read_content_length(f, value, n_value);
    if (is_name(line, n_name, "Transfer-Encoding")) return read_transfer_encoding(f, value, n_value);
    if (is_name(line, n_name, "Expect") && (n_value != 12 || strncasecmp(value, "100-continue", 12) != 0))
        return violation(f, 417, "unsupported Expect header: expected 100-continue");
    if (is_name(line, n_name, "Host")) {
        if (f->has_host) return violation(f, 400, "more than one Host header");
        f->has_host = true;
    }
    return 0;
}

static int end_header(http_filter *f) {
    if (!f->has_host && !f->http_1_0) return violation(f, 400, "missing Host header");
    if (f->chunked && f->has_length) return violation(f, 400, "Content-Length and Transfer-Encoding cannot be combined");
    if (!f->may_have_body && (f->chunked || f->left > 0)) return violation(f, 400, "this method does not allow a request body");
    if (f->left > f->max_body) return violation(f, 413, "the request body is too large");
    f->state = f->chunked ? CHUNK_SIZE : BODY;
    return 0;
}

/* ---- chunks ---- */

/* Parses the line with the size of a chunk, and writes the line to `out` without chunk extensions. */
static int read_chunk_size(http_filter *f, const char *line, size_t n, struct evbuffer *out) {
    size_t digits = 0;
    size_t size = 0;
    while (digits < n && digits <= MAX_CHUNK_DIGITS && strchr("0123456789abcdefABCDEF", line[digits]) != NULL &&
           line[digits] != 0) {
        const char c = line[digits++];
        size = 16 * size + (size_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    size_t at = digits;
    while (at < n && (line[at] == ' ' || line[at] == '\t')) at++;
    const bool extended = at < n && line[at] == ';';
    if (digits == 0 || digits > MAX_CHUNK_DIGITS || (!extended && digits < n) || has_control(line, n))
        return violation(f, 400, "invalid chunk size: expected hexadecimal digits");
    f->n_body += size;
    if (f->n_body > f->max_body) return violation(f, 413, "the request body is too large");
    f->left = size;
    f->state = size > 0 ? CHUNK_DATA : TRAILER;
    (void)evbuffer_add_printf(out, "%zx\r\n", size);
    return 0;
}

/* Processes a complete line, which is passed without its line break. */
static int handle_line(http_filter *f, const char *line, size_t n, struct evbuffer *out) {
    int status = 0;
    if (f->state == CHUNK_SIZE) return read_chunk_size(f, line, n, out);
    f->n_header += n + 2;
    if (f->n_header > f->max_header) return violation(f, 431, "the request header is too large");
    if (f->state == TRAILER && n > 0) return check_field(f, line, n);
    if (f->state == REQUEST_LINE && n == 0) return 0; /* empty lines before a request are ignored */
    if (f->state == REQUEST_LINE)
        status = check_request_line(f, line, n);
    else if (f->state == HEADER)
        status = n > 0 ? check_field(f, line, n) : end_header(f);
    if (status != 0) return status;
    (void)evbuffer_add(out, line, n);
    (void)evbuffer_add(out, "\r\n", 2);
    if (f->state == TRAILER || (f->state == BODY && f->left == 0)) end_request(f);
    return 0;
}

bool http_filter_pass(http_filter *f, size_t n) {
    if ((f->state != BODY && f->state != CHUNK_DATA) || n > f->left) return false;
    f->left -= n;
    if (f->left > 0) return true;
    if (f->state == BODY)
        end_request(f);
    else
        f->state = CHUNK_END;
    return true;
}

/* Moves bytes of the body or of the current chunk from the input to the output. Returns false if no such bytes have been
 * received. */
static bool move_body(http_filter *f, struct evbuffer *raw, struct evbuffer *out) {
    const size_t n = evbuffer_get_length(raw) < f->left ? evbuffer_get_length(raw) : f->left;
    if (n == 0) return false;
    (void)evbuffer_remove_buffer(raw, out, n);
    return http_filter_pass(f, n);
}

int http_filter_run(http_filter *f, struct evbuffer *raw, struct evbuffer *out, const char **message) {
    int status = 0;
    while (status == 0) {
        if (f->state == BODY || f->state == CHUNK_DATA) {
            if (!move_body(f, raw, out)) break;
        } else if (f->state == CHUNK_END) {
            char end[2];
            if (evbuffer_get_length(raw) < 2) break;
            (void)evbuffer_remove(raw, end, 2);
            if (end[0] != '\r' || end[1] != '\n') status = violation(f, 400, "a chunk does not end with CRLF");
            (void)evbuffer_add(out, end, status == 0 ? 2 : 0);
            f->state = CHUNK_SIZE;
        } else {
            const size_t most = f->state == CHUNK_SIZE ? MAX_CHUNK_LINE : f->max_header - f->n_header;
            struct evbuffer_ptr at = evbuffer_search(raw, "\n", 1, NULL);
            if (at.pos < 0 && evbuffer_get_length(raw) <= most) break;
            if (at.pos < 0 || (size_t)at.pos > most) {
                status = f->state == CHUNK_SIZE ? violation(f, 400, "a chunk header is too long")
                                                : violation(f, 431, "the request header is too large");
                break;
            }
            const size_t n = (size_t)at.pos + 1;
            const char *line = (const char *)evbuffer_pullup(raw, (ev_ssize_t)n);
            if (line == NULL || n < 2 || line[n - 2] != '\r')
                status = violation(f, 400, "a line does not end with CRLF");
            else
                status = handle_line(f, line, n - 2, out);
            (void)evbuffer_drain(raw, n);
        }
    }
    *message = f->message;
    return status;
}
