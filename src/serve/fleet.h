/* Endpoints and response headers for load balancers. The endpoints report readiness and describe the server and its model. */
#ifndef FKV_SERVE_FLEET_H
#define FKV_SERVE_FLEET_H

#include "exchange.h"

/* Returns "ready", or the reason why a load balancer should send requests elsewhere: "loading", "draining", or "busy" if the
 * predicted wait of every model exceeds max_wait_s. */
const char *fleet_readiness(const server *s);

/* Return the responses to /server_info and /get_model_info, which use SGLang's field names. */
json_t *fleet_server_info(const server *s, const served_model *m);
json_t *fleet_model_info(const served_model *m);

/* Adds the headers that every response has: the server's name, and Connection: close while the server drains, so that clients
 * connect to another server. */
void fleet_add_headers(const server *s, struct evhttp_request *req);

/* Adds the headers of a complete answer: the number of cached prompt tokens and the time that the request was queued. */
void fleet_add_answer_headers(const exchange *x);

#endif
