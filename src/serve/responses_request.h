/* Converts requests of the OpenAI Responses API to chat requests. The server keeps no state between requests. */
#ifndef FKV_SERVE_RESPONSES_REQUEST_H
#define FKV_SERVE_RESPONSES_REQUEST_H

#include "api_request.h"

/* Rewrites request->root as a chat request. The original tools are kept in "given_tools". Returns false and sets request->error
 * if the request is invalid. */
bool responses_as_chat(api_request *request);

#endif
