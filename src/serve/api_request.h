/* What a client asked for: the JSON of the OpenAI and Anthropic APIs, read into one form.
 *
 * Bodies are not trusted: size is bounded by the server, depth here, every field by its kind and range. A conversation comes out
 * as chat templates expect it: roles system, user, assistant and tool, contents as text, arguments of calls as objects.
 */
#ifndef FKV_SERVE_API_REQUEST_H
#define FKV_SERVE_API_REQUEST_H

#include <flatkv/engine.h>
#include <jansson.h>

enum { API_MAX_DEPTH = 64, API_MAX_BIAS = 300, API_MOST_BIAS = 1000, API_MAX_PARTS = 4096 };

typedef enum api_kind { API_CHAT, API_COMPLETIONS, API_MESSAGES, API_RESPONSES } api_kind;

typedef struct api_request {
    api_kind kind;
    json_t *root;
    json_t *conversation; /* of chats: "messages", "tools" and what the template looks at */
    json_t *prompt;       /* of completions: a string, or an array of tokens; borrowed from root */
    bool stream;
    bool include_usage;
    uint32_t max_new; /* 0: not said */
    uint32_t n;
    fkv_sampler_config sampler;
    fkv_logit_bias bias[API_MAX_BIAS];
    const char *stops[FKV_MAX_STOPS];
    uint32_t n_stops;
    bool logprobs;
    uint32_t n_top;
    bool ignore_end;
    int32_t priority;
    double deadline_s;
    json_t *schema;          /* what the answer must be, or NULL: any text */
    bool forced_call;        /* the answer must be a call of a tool */
    bool one_call;           /* at most one */
    const char *forced_name; /* of this tool; NULL: any */
    char param[32];          /* the field that was wrong */
    char error[240];         /* and why */
} api_request;

/* False: error says what was wrong. api_request_free() is right in both cases. defaults: of what the request does not say.
 * sampler.bias points into the request, which must not move while it is used. */
bool api_request_parse(api_kind kind, const char *body, size_t n_bytes, const fkv_sampler_config *defaults, api_request *request);
void api_request_free(api_request *request);

/* A JSON object; NULL with the reason in error[n_error]. The caller's. */
json_t *api_json(const char *body, size_t n_bytes, char *error, size_t n_error);

#endif
