/* Converts requests of Ollama's API to chat and completion requests. */
#ifndef FKV_SERVE_OLLAMA_REQUEST_H
#define FKV_SERVE_OLLAMA_REQUEST_H

#include "api_request.h"

/* Replaces request->root with an equivalent request that uses the field names of the OpenAI API. A request of kind
 * API_OLLAMA_GENERATE becomes a chat with one user message, or a completion if `raw` is true. Sets request->only_loads if the
 * request has no prompt. Returns false and sets request->error if the request is invalid. */
bool ollama_as_openai(api_request *request);

#endif
