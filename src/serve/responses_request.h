/* Requests of OpenAI's Responses API, rewritten as chats: from there on one path serves both. Nothing is kept between requests.
 */
#ifndef FKV_SERVE_RESPONSES_REQUEST_H
#define FKV_SERVE_RESPONSES_REQUEST_H

#include "api_request.h"

/* Puts messages, tools and the rest into request->root as a chat has them; what the client sent as tools stays in "given_tools".
 * False: error says what was wrong. */
bool responses_as_chat(api_request *request);

#endif
