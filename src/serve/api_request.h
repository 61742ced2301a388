/* Parses request bodies of the OpenAI, Anthropic and Ollama APIs into one common structure.
 *
 * Bodies are untrusted. The server limits their size; this module limits the nesting depth and checks the type and range of every
 * field. Conversations are normalized for chat templates: the roles are system, user, assistant and tool, contents are strings,
 * and tool-call arguments are objects.
 */
#ifndef FKV_SERVE_API_REQUEST_H
#define FKV_SERVE_API_REQUEST_H

#include <flatkv/engine.h>
#include <jansson.h>

enum {
    API_MAX_DEPTH = 64,
    API_MAX_BIASES = 300,
    API_MAX_BIAS_VALUE = 1000,
    API_MAX_PARTS = 4096,
    API_MAX_CHOICES = 64,
    API_MAX_FILES = 256,
    API_MAX_ECHO = 64 << 10, /* maximum size, in bytes, of request fields that the Responses API repeats in its response */
    API_MAX_METADATA = 16,   /* limits of OpenAI */
    API_MAX_METADATA_NAME = 64,
    API_MAX_METADATA_VALUE = 512
};

typedef enum api_kind {
    API_CHAT,
    API_COMPLETIONS,
    API_MESSAGES,
    API_RESPONSES,
    API_OLLAMA_CHAT,
    API_OLLAMA_GENERATE,
    API_INFILL, /* llama.cpp */
    N_API_KINDS
} api_kind;

typedef struct api_request {
    api_kind kind;
    json_t *root;
    json_t *conversation; /* template variables of a chat, such as "messages" and "tools"; NULL for a completion request */
    json_t *final_text;   /* text of a final assistant message, which the answer continues; NULL if there is no such message */
    const json_t *prompts[API_MAX_CHOICES]; /* prompts of a completion request: strings or arrays of tokens, owned by root */
    uint32_t n_prompts;                     /* number of prompts; 1 for a conversation */
    const json_t *suffix; /* text after the gap of a fill-in-the-middle prompt, owned by root; NULL if there is none */
    const json_t *middle; /* infill: start of the answer, owned by root; NULL if there is none */
    const json_t *extra;  /* infill: array of context files, each {"filename", "text"}, owned by root; NULL if there are none */
    bool echo;            /* true if the response repeats the prompt before each answer */
    bool only_loads;      /* Ollama: true if the request has no prompt and only asks to load the model */
    bool unloads;         /* Ollama: true if keep_alive is 0, which asks the server to unload the model */
    bool parse_special;   /* true to recognize special tokens in the prompt text of a completion request */
    bool stream;
    bool include_usage;
    uint32_t max_new; /* maximum number of new tokens; 0 if the request does not specify it */
    uint32_t n;
    fkv_sampler_config sampler;
    fkv_logit_bias bias[API_MAX_BIASES];
    const char *stops[FKV_MAX_STOPS];
    uint32_t n_stops;
    char *stop_text; /* buffer that holds the stop strings copied by api_request_detach() */
    bool logprobs;
    uint32_t n_top;
    bool ignore_end;
    int32_t priority;
    double deadline_s;
    json_t *schema;          /* JSON schema of the answer; NULL if there is none */
    bool any_object;         /* true if the answer may be any JSON object (response_format json_object) */
    bool forced_call;        /* true if the answer must be a tool call */
    bool one_call;           /* true if the answer may contain at most one tool call */
    const char *forced_name; /* name of the required tool, or NULL if any tool may be called */
    char param[32];          /* name of the invalid request field */
    char error[240];         /* error message */
} api_request;

/* Parses a request body. Returns false and sets `error` if the body is invalid; api_request_free() must be called in both cases.
 * defaults: default sampling options for omitted fields. sampler.bias points into the request, so the request must not be moved
 * while it is in use. */
bool api_request_parse(api_kind kind, const char *body, size_t n_bytes, const fkv_sampler_config *defaults, api_request *request);

/* Reads a request from a body that api_json() has already parsed. Takes ownership of root. Otherwise works like
 * api_request_parse(). */
bool api_request_read(api_kind kind, json_t *root, const fkv_sampler_config *defaults, api_request *request);
void api_request_free(api_request *request);

/* Frees the parsed JSON, except for the fields that responses repeat. The options and stop strings stay valid. Called on a worker
 * thread, because freeing the JSON of a large request may take a long time. Returns false if out of memory. */
bool api_request_detach(api_request *request);

/* Parses a body that must be a JSON object. The caller owns the result. On failure, returns NULL and writes a message to
 * error: [n_error]. */
json_t *api_json(const char *body, size_t n_bytes, char *error, size_t n_error);

#endif
