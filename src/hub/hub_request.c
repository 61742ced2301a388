/* See hub_request.h. */
#include "hub_request.h"

#include "../kit/program.h"

#include <ctype.h>
#include <errno.h>
#include <flatkv/flatkv.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_ERROR_BODY = 64 << 10, SLOW_BYTES_PER_SECOND = 100, CONNECT_SECONDS = 20 };

/* Returns the length of the URL's origin: scheme, host and port. */
static size_t origin_length(const char *url) {
    const char *host = strstr(url, "://");
    return host == NULL ? 0 : (size_t)(host + 3 - url) + strcspn(host + 3, "/?#");
}

static bool same_origin(const char *a, const char *b) {
    size_t n = origin_length(a);
    return n > 0 && n == origin_length(b) && strncasecmp(a, b, n) == 0;
}

/* ---- callbacks of libcurl ---- */

/* Parses a Content-Range value such as "bytes 0-99/1234". */
static void read_content_range(hub_request *r, const char *value) {
    char *end = NULL;
    value += strspn(value, " \t");
    if (strncasecmp(value, "bytes ", 6) != 0 || isdigit((unsigned char)value[6]) == 0) return;
    r->range_from = strtoull(value + 6, &end, 10);
    const char *slash = strchr(end, '/');
    if (*end != '-' || slash == NULL) return;
    r->range_total = isdigit((unsigned char)slash[1]) != 0 ? strtoull(slash + 1, NULL, 10) : UINT64_MAX;
    r->has_range = true;
}

/* Returns the value of the header line if its field has this name, otherwise NULL. */
static const char *header_value(const char *line, const char *name) {
    size_t n = strlen(name);
    return strncasecmp(line, name, n) == 0 && line[n] == ':' ? line + n + 1 : NULL;
}

static size_t on_header(char *bytes, size_t size, size_t n, void *user) {
    hub_request *r = user;
    char line[256];
    (void)snprintf(line, sizeof line, "%.*s", (int)(size * n < sizeof line ? size * n : sizeof line - 1), bytes);
    line[strcspn(line, "\r\n")] = 0;
    const char *value = header_value(line, "Content-Range");
    if (value != NULL) read_content_range(r, value);
    value = header_value(line, "X-Error-Code");
    if (value != NULL) (void)snprintf(r->code, sizeof r->code, "%s", value + strspn(value, " \t"));
    return size * n;
}

/* Checks the status and the range of a response. Returns false if the body must be discarded. */
static bool accepts_body(hub_request *r) {
    (void)curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &r->status);
    if (r->status == 200) {
        r->no_ranges = !r->whole && r->from > 0;
        return !r->no_ranges;
    }
    if (r->status != 206) return false;
    return r->has_range && r->range_from == r->from &&
           (r->file_bytes == UINT64_MAX || r->range_total == UINT64_MAX || r->range_total == r->file_bytes);
}

static size_t on_body(char *bytes, size_t size, size_t n_items, void *user) {
    hub_request *r = user;
    size_t n = size * n_items;
    if (r->received == 0 && !accepts_body(r)) {
        r->discarded += n;
        return r->status >= 300 && r->discarded <= MAX_ERROR_BODY ? n : 0;
    }
    size_t wanted = n <= r->limit - r->received ? n : (size_t)(r->limit - r->received);
    if (!r->sink(r->user, bytes, wanted)) {
        (void)snprintf(r->problem, sizeof r->problem, "cannot write the data: %s", strerror(errno));
        return 0;
    }
    r->received += wanted;
    return wanted; /* less than n if the server sends more than requested; libcurl then aborts the transfer */
}

static int on_progress(void *user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    const hub_request *r = user;
    (void)a, (void)b, (void)c, (void)d;
    return r->session->stop() ? 1 : 0;
}

/* ---- requests ---- */

static void add_header(hub_request *r, const char *line) {
    struct curl_slist *more = curl_slist_append(r->headers, line);
    if (more == NULL) kit_die(EXIT_NO_FIT, "out of memory allocating a request");
    r->headers = more;
}

static void set_headers(hub_request *r) {
    char line[HUB_TOKEN + 64];
    add_header(r, "Accept-Encoding: identity"); /* a compressed body would not match the expected size and range */
    if (r->is_hub && r->session->token[0] != 0) {
        (void)snprintf(line, sizeof line, "Authorization: Bearer %s", r->session->token);
        add_header(r, line);
    }
    if (!r->whole) {
        (void)snprintf(line, sizeof line, "Range: bytes=%" PRIu64 "-%" PRIu64, r->from, r->from + r->limit - 1);
        add_header(r, line);
    }
    (void)curl_easy_setopt(r->easy, CURLOPT_HTTPHEADER, r->headers);
}

void hub_request_begin(hub_request *r, CURL *easy, const hub_session *session, const char *url) {
    static char agent[64];
    size_t n = strlen(url) + 1;
    (void)snprintf(agent, sizeof agent, "flatkv/%s", fkv_version());
    r->session = session;
    r->easy = easy;
    r->url = memcpy(kit_alloc(n), url, n);
    r->is_hub = same_origin(url, session->endpoint);
    curl_easy_reset(easy);
    (void)curl_easy_setopt(easy, CURLOPT_URL, r->url);
    (void)curl_easy_setopt(easy, CURLOPT_USERAGENT, agent);
    (void)curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    /* HTTP/1.1 gives each parallel transfer its own connection. A single HTTP/2 connection would limit their total rate. */
    (void)curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    bool encrypted = strncasecmp(session->endpoint, "https:", 6) == 0; /* a redirect must not lead to an unencrypted connection */
    (void)curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, encrypted ? "https" : "http,https");
    (void)curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
    (void)curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW_BYTES_PER_SECOND);
    (void)curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, session->stall_seconds);
    (void)curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    (void)curl_easy_setopt(easy, CURLOPT_HEADERDATA, r);
    (void)curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    (void)curl_easy_setopt(easy, CURLOPT_WRITEDATA, r);
    (void)curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
    (void)curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, on_progress);
    (void)curl_easy_setopt(easy, CURLOPT_XFERINFODATA, r);
    (void)curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, r->problem);
    set_headers(r);
}

/* ---- responses ---- */

static bool is_temporary(CURLcode result) {
    switch (result) {
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_PARTIAL_FILE:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR: return true;
    default: return false;
    }
}

static hub_outcome end_redirect(hub_request *r) {
    char *location = NULL;
    (void)curl_easy_getinfo(r->easy, CURLINFO_REDIRECT_URL, &location);
    if (location == NULL) {
        (void)snprintf(r->problem, sizeof r->problem, "HTTP status %ld (a redirect) without a new address", r->status);
        return HUB_FAILED;
    }
    size_t n = strlen(location) + 1;
    free(r->url);
    r->url = memcpy(kit_alloc(n), location, n);
    return HUB_REDIRECTED;
}

static hub_outcome end_error_status(hub_request *r) {
    curl_off_t wait = 0;
    (void)snprintf(r->problem, sizeof r->problem, "HTTP status %ld", r->status);
    (void)curl_easy_getinfo(r->easy, CURLINFO_RETRY_AFTER, &wait);
    r->wait = (double)wait;
    if (r->status == 408 || r->status == 429 || r->status >= 500) return wait > HUB_LONGEST_WAIT ? HUB_FAILED : HUB_TRY_AGAIN;
    bool rejected = r->status == 401 || r->status == 403 || r->status == 404 || r->status == 410;
    return rejected && !r->is_hub ? HUB_EXPIRED : HUB_FAILED;
}

static hub_outcome end_body(hub_request *r) {
    if (r->received == 0 && !accepts_body(r)) { /* the response has no body, or on_body() rejected it */
        if (r->no_ranges) return HUB_NO_RANGES;
        (void)snprintf(r->problem, sizeof r->problem, "the server sent a different range of the file than requested");
        return HUB_TRY_AGAIN;
    }
    if (!r->exact || r->received == r->limit) return HUB_DONE;
    (void)snprintf(r->problem, sizeof r->problem, "the connection ended before the end of the file");
    return HUB_TRY_AGAIN;
}

hub_outcome hub_request_end(hub_request *r, CURLcode result) {
    (void)curl_easy_getinfo(r->easy, CURLINFO_RESPONSE_CODE, &r->status);
    if (result == CURLE_ABORTED_BY_CALLBACK) return HUB_STOPPED;
    if (r->no_ranges) return HUB_NO_RANGES;
    bool answered = result == CURLE_OK || result == CURLE_WRITE_ERROR;
    if (answered && r->status >= 400) return end_error_status(r);
    if (answered && r->status >= 300) return end_redirect(r);
    if (result == CURLE_OK) return end_body(r);
    if (result == CURLE_WRITE_ERROR) {
        if (r->received == 0 && r->discarded > 0) return end_body(r);
        if (r->received >= r->limit && !r->whole && r->status == 200)
            return HUB_DONE; /* the server ignored the range, but the requested bytes are at the start of the file */
        if (r->received >= r->limit) {
            (void)snprintf(r->problem, sizeof r->problem, "the server sent more than the %" PRIu64 " bytes expected", r->limit);
            return HUB_FAILED;
        }
        return HUB_FAILED; /* on_body() has set r->problem */
    }
    if (r->problem[0] == 0) (void)snprintf(r->problem, sizeof r->problem, "%s", curl_easy_strerror(result));
    return is_temporary(result) ? HUB_TRY_AGAIN : HUB_FAILED;
}

void hub_request_free(hub_request *r) {
    curl_slist_free_all(r->headers);
    free(r->url);
    *r = (hub_request){0};
}

double hub_backoff(uint32_t n_failures) {
    double seconds = 0.5;
    for (uint32_t i = 1; i < n_failures && seconds < 15; i++) seconds *= 2;
    return seconds < 15 ? seconds : 15;
}

/* ---- errors ---- */

static int fail_access(const hub_request *r, const char *repo) {
    const hub_session *s = r->session;
    bool has_token = s->token[0] != 0;
    if (strcmp(r->code, "DisabledRepo") == 0) return kit_fail(EXIT_FAILED, "%s has been disabled by the hub", repo);
    if (strcmp(r->code, "GatedRepo") == 0 || (r->status == 403 && r->code[0] == 0))
        return kit_fail(EXIT_FAILED,
                        has_token
                            ? "%s is gated, and your token (%s) does not give access to it: accept the conditions at %s/%s, "
                              "then pull again"
                            : "%s is gated%s: accept its conditions at %s/%s while logged in, create a token in your account's "
                              "settings, and set HF_TOKEN to it",
                        repo, has_token ? s->token_source : "", s->endpoint, repo);
    if (has_token && r->status == 401 && r->code[0] == 0)
        return kit_fail(EXIT_FAILED, "the hub rejects your token (%s): create a new token at %s/settings/tokens", s->token_source,
                        s->endpoint);
    if (has_token)
        return kit_fail(EXIT_FAILED, "%s does not exist at %s, or your token (%s) does not give access to it: check the spelling",
                        repo, s->endpoint, s->token_source);
    return kit_fail(EXIT_FAILED,
                    "%s does not exist at %s, or it is private: check the spelling, or set HF_TOKEN for a private model", repo,
                    s->endpoint);
}

int hub_request_fail(const hub_request *r, const char *repo, const char *what) {
    const char *host = r->is_hub ? r->session->endpoint : r->url;
    int n = (int)(r->is_hub ? strlen(host) : origin_length(host));
    if (r->is_hub && (r->status == 401 || r->status == 403)) return fail_access(r, repo);
    if (r->is_hub && r->status == 404 && (r->code[0] == 0 || strcmp(r->code, "RepoNotFound") == 0) && strcmp(what, repo) == 0)
        return fail_access(r, repo);
    if (r->is_hub && r->status == 404 && strcmp(r->code, "RevisionNotFound") == 0)
        return kit_fail(EXIT_FAILED, "%s has no branch, tag or commit %s", repo, r->session->revision);
    if (r->is_hub && r->status == 404) return kit_fail(EXIT_FAILED, "%s has no file %s (HTTP status 404)", repo, what);
    if (r->status == 429)
        return kit_fail(EXIT_FAILED,
                        "%.*s limits the number of requests (HTTP status 429): wait %.0f s and run the command again%s", n, host,
                        r->wait > 0 ? r->wait : 60, r->session->token[0] == 0 ? ", or set HF_TOKEN for a higher limit" : "");
    if (r->status >= 500)
        return kit_fail(EXIT_FAILED, "%.*s is temporarily unavailable (%s): run the command again later to continue", n, host,
                        r->problem);
    if (r->status == 0)
        return kit_fail(EXIT_FAILED, "cannot reach %.*s: %s; check the network, the proxy settings and HF_ENDPOINT", n, host,
                        r->problem);
    return kit_fail(EXIT_FAILED, "cannot download %s from %.*s: %s", what, n, host, r->problem);
}

char *hub_file_url(const hub_session *session, const hub_listing *listing, const hub_file *file) {
    static const char digits[] = "0123456789ABCDEF";
    char *url = kit_alloc(HUB_ENDPOINT + HUB_REPO + HUB_COMMIT + 3 * strlen(file->path) + 64);
    int n = sprintf(url, "%s/%s/resolve/%s/", session->endpoint, listing->repo, listing->commit);
    for (const char *p = file->path; *p != 0; p++) {
        unsigned char c = (unsigned char)*p;
        if (isalnum(c) != 0 || strchr("-._~/", c) != NULL) {
            url[n++] = (char)c;
            continue;
        }
        url[n++] = '%';
        url[n++] = digits[c >> 4];
        url[n++] = digits[c & 15];
    }
    return url;
}
