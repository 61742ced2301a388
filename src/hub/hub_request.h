/* One HTTP request to a hub or to the storage that the hub redirects to.
 *
 * The caller follows redirects itself, by making a new request for each redirect. The access token is therefore sent only to
 * the hub itself, and the redirect address can be reused for the other parts of a file. The size of every response is limited:
 * the requested range limits the body, libcurl limits the header lines, and MAX_ERROR_BODY limits the body of an error
 * response.
 */
#ifndef FKV_HUB_REQUEST_H
#define FKV_HUB_REQUEST_H

#include "hub_session.h"

#include <curl/curl.h>

typedef enum hub_outcome {
    HUB_DONE,       /* the requested bytes have been received */
    HUB_REDIRECTED, /* `url` is the new address */
    HUB_TRY_AGAIN,  /* temporary failure; `wait` is the delay in seconds that the server asks for, or 0 */
    HUB_EXPIRED,    /* the storage server rejected the redirect address, and the hub must be asked for a new one */
    HUB_NO_RANGES,  /* the server sent the whole file although a range was requested; the body was discarded */
    HUB_STOPPED,    /* session->stop() returned true */
    HUB_FAILED,     /* permanent failure */
} hub_outcome;

/* Callback that receives the next bytes of the body. Returns false and sets errno if the bytes cannot be stored. */
typedef bool (*hub_sink)(void *user, const char *bytes, size_t n);

typedef struct hub_request {
    const hub_session *session;
    CURL *easy;
    struct curl_slist *headers;
    char *url;
    bool is_hub;         /* true if the address is on the hub itself; the token is sent only in this case */
    uint64_t from;       /* offset of the first byte to read */
    uint64_t limit;      /* maximum number of bytes to read */
    bool exact;          /* true if receiving fewer bytes than `limit` is a failure */
    bool whole;          /* true to request the whole file without a range; `from` must then be 0 */
    uint64_t file_bytes; /* expected size of the whole file, in bytes; UINT64_MAX if it is unknown */
    hub_sink sink;
    void *user;

    uint64_t received;
    bool has_range; /* true if the response has a valid Content-Range header */
    uint64_t range_from;
    uint64_t range_total;
    bool no_ranges;
    uint64_t discarded;                  /* number of bytes received in the body of an error response */
    char code[64];                       /* X-Error-Code of the hub: RepoNotFound, GatedRepo, ... */
    long status;                         /* HTTP status; 0 until a response has arrived */
    double wait;                         /* delay that the server requests in Retry-After, in seconds */
    char problem[CURL_ERROR_SIZE + 256]; /* reason for the failure, for error messages */
} hub_request;

/* Prepares a request and copies `url`. Later requests may reuse `easy`. */
void hub_request_begin(hub_request *r, CURL *easy, const hub_session *session, const char *url);

/* Evaluates the response after libcurl has finished the transfer with the code `result`. */
hub_outcome hub_request_end(hub_request *r, CURLcode result);

void hub_request_free(hub_request *r);

/* Prints the reason why a request for `what` failed permanently, and how to fix the problem. Returns an exit code. */
int hub_request_fail(const hub_request *r, const char *repo, const char *what);

/* Returns the delay before the next attempt after n > 0 failures: 0.5 s, doubled after each failure, up to 15 s. */
double hub_backoff(uint32_t n_failures);

/* Returns the URL of a file on the hub. The caller frees it. */
char *hub_file_url(const hub_session *session, const hub_listing *listing, const hub_file *file);

enum { HUB_MAX_REDIRECTS = 8, HUB_LONGEST_WAIT = 300 };

#endif
