/* Validates HTTP/1 requests before evhttp parses them.
 *
 * evhttp is lenient: it accepts spaces before colons, several Content-Length headers, malformed chunk sizes and NUL bytes.
 * Proxies may read such requests differently, which allows request smuggling. The filter passes on only requests that RFC 9112
 * allows, in a form that evhttp and every proxy interpret in the same way. It removes chunk extensions and trailers, and it
 * ends the connection at the first violation. No part of the invalid line or chunk is passed on, so evhttp never dispatches the
 * request.
 */
#ifndef FKV_SERVE_HTTP_FILTER_H
#define FKV_SERVE_HTTP_FILTER_H

#include <event2/buffer.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct http_filter http_filter;

http_filter *http_filter_open(size_t max_header, size_t max_body); /* the limits are in bytes; returns NULL if out of memory */
void http_filter_close(http_filter *f);                            /* f may be NULL */

/* Moves validated input from `raw` to `out`. An incomplete line stays in `raw`. Returns 0 if there is no violation. Otherwise
 * returns the HTTP status of the violation, and *message receives its description. After a violation the filter must not be used
 * again. */
int http_filter_run(http_filter *f, struct evbuffer *raw, struct evbuffer *out, const char **message);

/* Counts n bytes of input that need no validation, because they are part of a body or of a chunk; the caller itself passes them
 * on. Does nothing and returns false if some of the bytes need validation. */
bool http_filter_pass(http_filter *f, size_t n);

uint64_t http_filter_requests(const http_filter *f); /* returns the number of requests that were passed on completely */
bool http_filter_at_start(const http_filter *f);     /* returns true if no complete line of the next request has been received */
bool http_filter_in_header(const http_filter *f);    /* returns true between the request line and the end of the header */

#endif
