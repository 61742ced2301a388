/* One HTTP request to a hub or to the storage that the hub redirects to.
 *
 * Redirects are followed by the caller, one request at a time, so that the token goes only to the hub itself and the address of
 * the storage can be reused for the other parts of a file. Every answer is bounded: the body by the requested range, header lines
 * by libcurl, an error's body by MAX_ERROR_BODY.
 */
#ifndef FKV_HUB_REQUEST_H
#define FKV_HUB_REQUEST_H

#include "hub_session.h"

#include <curl/curl.h>

typedef enum hub_outcome {
    HUB_DONE,       /* the requested bytes have been received */
    HUB_REDIRECTED, /* `url` is the new address */
    HUB_TRY_AGAIN,  /* temporary failure; `wait` is the time that the server asks for, or 0 */
    HUB_EXPIRED,    /* the storage rejects its address: ask the hub again */
    HUB_NO_RANGES,  /* the server sent the whole file although a range was requested; nothing was passed on */
    HUB_STOPPED,    /* session->stop() returned true */
    HUB_FAILED,     /* permanent failure */
} hub_outcome;

/* Receives the next bytes of the body. Returns false if they cannot be stored; errno holds the reason. */
typedef bool (*hub_sink)(void *user, const char *bytes, size_t n);

typedef struct hub_request {
    const hub_session *session;
    CURL *easy;
    struct curl_slist *headers;
    char *url;
    bool is_hub;         /* the address is on the hub itself, which receives the token */
    uint64_t from;       /* first byte to read */
    uint64_t limit;      /* maximum number of bytes to read */
    bool exact;          /* fewer bytes are a failure */
    bool whole;          /* request the whole file, without a range; from must be 0 */
    uint64_t file_bytes; /* expected size of the whole file; UINT64_MAX: unknown */
    hub_sink sink;
    void *user;

    uint64_t received;
    bool has_range; /* the answer has a valid Content-Range */
    uint64_t range_from;
    uint64_t range_total;
    bool no_ranges;
    uint64_t discarded;                  /* bytes of an error's body */
    char code[64];                       /* X-Error-Code of the hub: RepoNotFound, GatedRepo, ... */
    long status;                         /* 0 before an answer */
    double wait;                         /* seconds; from Retry-After */
    char problem[CURL_ERROR_SIZE + 256]; /* reason of a failure, for messages */
} hub_request;

/* Prepares a request. The request owns copies of its strings; `easy` may be reused by several requests, one after another. */
void hub_request_begin(hub_request *r, CURL *easy, const hub_session *session, const char *url);

/* Evaluates the answer after libcurl has finished with `result`. */
hub_outcome hub_request_end(hub_request *r, CURLcode result);

void hub_request_free(hub_request *r);

/* Prints why a request for `what` failed permanently, and what to do. Returns an exit code. */
int hub_request_fail(const hub_request *r, const char *repo, const char *what);

/* Returns the waiting time before attempt number n + 1, after n > 0 failures: 0.5 s, doubling up to 15 s. */
double hub_backoff(uint32_t n_failures);

/* Returns the address of a file on the hub, to be freed by the caller. */
char *hub_file_url(const hub_session *session, const hub_listing *listing, const hub_file *file);

enum { HUB_MAX_REDIRECTS = 8, HUB_LONGEST_WAIT = 300 };

#endif
