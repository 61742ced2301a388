/* Opens sessions, reads listings and reads parts of files into memory; see hub_session.h. Requests run one at a time and are
 * retried. */
#include "hub_request.h"

#include "../kit/numbers.h"
#include "../kit/program.h"
#include "hub_progress.h"

#include <curl/curl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* Response body in memory. The buffer grows as data arrives. */
typedef struct memory_sink {
    hub_bytes *out;
    size_t capacity;
} memory_sink;

static bool add_to_memory(void *user, const char *bytes, size_t n) {
    memory_sink *sink = user;
    if (sink->out->n + n > sink->capacity) {
        sink->capacity = 2 * (sink->out->n + n);
        sink->out->bytes = kit_realloc(sink->out->bytes, sink->capacity);
    }
    memcpy(sink->out->bytes + sink->out->n, bytes, n);
    sink->out->n += n;
    return true;
}

int hub_session_open(hub_session *session, bool (*stop)(void)) {
    *session = (hub_session){.stop = stop, .revision = "main", .n_tries = 8, .stall_seconds = hub_stall_seconds()};
    if (hub_is_offline()) return kit_fail(EXIT_FAILED, "HF_HUB_OFFLINE is set: unset it to download models");
    int code = hub_endpoint(session->endpoint);
    if (code == EXIT_GOOD) code = hub_token(session->token, session->token_source);
    if (code != EXIT_GOOD) return code;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) return kit_fail(EXIT_FAILED, "cannot initialize libcurl");
    (void)signal(SIGPIPE, SIG_IGN); /* without SIGPIPE, libcurl reports a closed connection as a transfer error */
    session->connection = curl_easy_init();
    return session->connection != NULL ? EXIT_GOOD : kit_fail(EXIT_FAILED, "cannot initialize libcurl");
}

void hub_session_close(hub_session *session) {
    if (session->connection == NULL) return;
    curl_easy_cleanup(session->connection);
    curl_global_cleanup();
    (void)signal(SIGPIPE, SIG_DFL);
    session->connection = NULL;
}

/* Waits for `seconds` seconds, or until session->stop() returns true. */
static void wait_seconds(const hub_session *session, double seconds) {
    const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
    for (double end = kit_seconds() + seconds; kit_seconds() < end && !session->stop();) (void)nanosleep(&pause, NULL);
}

/* Returns the maximum number of attempts. If the server cannot be reached, fewer attempts are made, because the user is waiting
 * and no downloaded data would be lost. */
static uint32_t max_tries(const hub_session *session, const hub_request *r) {
    enum { UNREACHABLE_TRIES = 4 };
    return r->status == 0 && session->n_tries > UNREACHABLE_TRIES ? UNREACHABLE_TRIES : session->n_tries;
}

/* Reads up to r->limit bytes into memory, following redirects and retrying temporary failures. The caller sets the range in
 * `wanted`. */
static int fetch(hub_session *session, const char *start, const hub_request *wanted, const char *repo, const char *what,
                 hub_bytes *out) {
    char *url = strdup(start);
    int code = EXIT_INTERRUPTED;
    uint32_t n_failures = 0;
    uint32_t n_redirects = 0;
    for (bool again = url != NULL; again && !session->stop();) {
        memory_sink sink = {.out = out};
        hub_request r = *wanted;
        free(out->bytes);
        *out = (hub_bytes){0};
        r.sink = add_to_memory, r.user = &sink;
        hub_request_begin(&r, session->connection, session, url);
        hub_outcome outcome = hub_request_end(&r, curl_easy_perform(r.easy));
        again = outcome == HUB_REDIRECTED                            ? ++n_redirects <= HUB_MAX_REDIRECTS
                : outcome == HUB_TRY_AGAIN || outcome == HUB_EXPIRED ? ++n_failures < max_tries(session, &r)
                                                                     : false;
        if (outcome == HUB_DONE)
            code = EXIT_GOOD;
        else if (outcome == HUB_REDIRECTED && !again)
            code = kit_fail(EXIT_FAILED, "cannot download %s: the hub's redirects form a loop", what);
        else if (outcome == HUB_NO_RANGES)
            code = kit_fail(EXIT_FAILED, "cannot read part of %s: the server does not support range requests", what);
        else if (!again && outcome != HUB_STOPPED)
            code = hub_request_fail(&r, repo, what);
        if (again) {
            free(url);
            url = strdup(outcome == HUB_REDIRECTED ? r.url : start);
            if (outcome != HUB_REDIRECTED) {
                double wait = r.wait > 0 ? r.wait : hub_backoff(n_failures);
                if (wait >= 2) hub_note("%s: trying again in %.0f s", r.problem, wait);
                wait_seconds(session, wait);
            }
        }
        hub_request_free(&r);
    }
    free(url);
    if (code != EXIT_GOOD) {
        free(out->bytes);
        *out = (hub_bytes){0};
    }
    return code;
}

int hub_get_listing(hub_session *session, const char *repo, hub_listing *listing) {
    char url[HUB_ENDPOINT + HUB_REPO + 3 * HUB_REVISION + 64];
    char revision[3 * HUB_REVISION] = "";
    char error[HUB_ERROR];
    hub_bytes answer = {0};
    *listing = (hub_listing){0};
    for (const char *p = session->revision; *p != 0; p++)
        (void)snprintf(revision + strlen(revision), sizeof revision - strlen(revision), *p == '/' ? "%%2F" : "%c", *p);
    (void)snprintf(url, sizeof url, "%s/api/models/%s/revision/%s?blobs=true", session->endpoint, repo, revision);
    const hub_request wanted = {.limit = HUB_MAX_LISTING_BYTES, .whole = true, .file_bytes = UINT64_MAX};
    int code = fetch(session, url, &wanted, repo, repo, &answer);
    if (code != EXIT_GOOD) return code;
    bool good = hub_listing_parse(answer.bytes != NULL ? answer.bytes : "", answer.n, listing, error);
    free(answer.bytes);
    if (!good) return kit_fail(EXIT_FAILED, "%s sent an invalid file list for %s: %s", session->endpoint, repo, error);
    if (strcmp(listing->repo, repo) == 0) return EXIT_GOOD;
    code = strcasecmp(listing->repo, repo) == 0
               ? kit_fail(EXIT_FAILED, "the model %s is spelled %s on the hub: use this spelling", repo, listing->repo)
               : kit_fail(EXIT_FAILED, "%s has been renamed to %s: use the new name", repo, listing->repo);
    hub_listing_free(listing);
    return code;
}

int hub_get_bytes(hub_session *session, const hub_listing *listing, const hub_file *file, uint64_t from, uint64_t n,
                  hub_bytes *out) {
    *out = (hub_bytes){0};
    if (from >= file->bytes || n == 0) return EXIT_GOOD;
    uint64_t limit = n < file->bytes - from ? n : file->bytes - from;
    bool whole = from == 0 && limit == file->bytes;
    const hub_request wanted = {.from = from, .limit = limit, .exact = true, .whole = whole, .file_bytes = file->bytes};
    char *url = hub_file_url(session, listing, file);
    int code = fetch(session, url, &wanted, listing->repo, file->path, out);
    free(url);
    return code;
}
