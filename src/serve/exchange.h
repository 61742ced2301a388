/* An exchange is one API request together with its response. A worker thread prepares the exchange: it parses the body, tokenizes
 * the prompt and compiles the grammar. The event loop then sends the response or submits the request to the engine. The exchange
 * exists until three conditions are met: the worker has finished, the DONE record of the engine was read, and the response has
 * ended or the client has disconnected. A disconnect cancels the request in the engine immediately. If the request is still being
 * prepared, the prepared request is discarded when the worker has finished.
 */
#ifndef FKV_SERVE_EXCHANGE_H
#define FKV_SERVE_EXCHANGE_H

#include "api_request.h"
#include "connections.h"
#include "metrics.h"
#include "prompt_tokens.h"
#include "served_model.h"
#include "worker_pool.h"

#include <event2/event.h>
#include <event2/http.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

typedef struct exchange exchange;

struct server {
    served_model models[SERVE_MAX_MODELS];
    uint32_t n_models; /* number of models; 0 while they are loading */
    uint64_t base_bytes;
    worker_pool *pool;
    serve_config config;
    struct event_base *base;
    struct evhttp *http;
    struct evhttp_bound_socket *socket;
    int wake[2]; /* pipe that wakes the event loop; engine threads and worker threads write to it */
    pthread_mutex_t lock;
    exchange *with_events; /* list of exchanges with unread events; protected by the lock */
    exchange *prepared;    /* list of exchanges whose preparation has ended; protected by the lock */
    metrics metrics;
    uint64_t next_seed;
    int64_t started_at; /* Unix time */
    exchange *open;     /* list of all open exchanges */
    uint32_t n_open;
    uint32_t n_preparing; /* number of exchanges that are queued for a worker thread or running on one */
    connections *connections;
    bool leaving; /* true after SIGTERM: requests are still accepted, but load balancers should use other servers */
    bool draining;
    bool ending;              /* true after the event loop has ended; remaining requests are answered with 503 */
    pthread_t loading_thread; /* thread that runs the event loop until the models are loaded */
    bool is_loading;
    bool wake_pending; /* true if the pipe contains a byte; protected by the lock */
};

/* Kinds of answer fragments. */
typedef enum part_kind { PART_TEXT, PART_REASONING, PART_CALL, PART_ARGUMENTS, PART_CALL_END } part_kind;

enum { MAX_PARTS = 64 };

typedef struct answer_part {
    part_kind kind; /* kind of the part: PART_TEXT, PART_REASONING or PART_CALL */
    char *name;
    struct evbuffer *bytes;
} answer_part;

typedef struct answer_out {
    answer_part parts[MAX_PARTS];
    uint32_t n_parts;
    uint32_t n_calls;
    json_t *logprobs; /* log probabilities of the tokens that have not been sent yet */
    fkv_finish reason;
    char *stop;
    void *parser; /* reply parser, which separates text, reasoning and tool calls; NULL if the answer is plain text */
} answer_out;

/* One prompt of an exchange, submitted to the engine as one request. */
typedef struct prompt_job {
    exchange *x;
    prompt_tokens prompt; /* tokens of the prompt; freed after submission, because the engine has a copy */
    struct evbuffer
        *echo; /* prompt text that the response repeats before each answer; NULL if the client did not request `echo` */
    uint32_t first_answer; /* index of the job's first answer in the exchange */
    uint64_t id;           /* ID of the request in the engine */
    bool in_engine;        /* true from the submission of the job until its DONE record is read */
    uint32_t n_prompt;
    uint32_t n_cached;
} prompt_job;

struct exchange {
    server *s;
    served_model *m; /* model of the request; the first model until the body is parsed */
    exchange *next;
    struct evhttp_request *req; /* the HTTP request; NULL after the response has ended or the client has disconnected */
    struct event *closed;
    struct event *ping;
    worker_job work;
    void (*prepare)(exchange *x); /* prepares the request on a worker thread; see prepare.h */
    bool preparing;               /* true while a worker thread owns body, jobs, error, text, api, rules and answers[].parser */
    _Atomic bool abandoned;       /* true if the client disconnected while the exchange was being prepared */
    struct evbuffer *body;
    prompt_job *jobs; /* [n_jobs] */
    uint32_t n_jobs;
    uint32_t n_in_engine; /* number of jobs in the engine */
    char *text;           /* complete response as JSON text; NULL until the response is complete */
    json_t *answer;       /* complete response that a worker thread converts to text; NULL if there is none */
    struct {
        int status; /* HTTP status of the error; 0 if there is none */
        char param[32];
        char message[600];
    } error;
    uint64_t seed; /* sampling seed that is used if the request does not specify a seed */
    uint64_t tenant;
    exchange *next_prepared;
    api_request api;
    grammar *rules; /* grammar of the answers; NULL if they are not constrained */
    char id[40];
    int64_t created;
    fkv_finish reason; /* finish reason of the exchange: FKV_FINISH_END, or the finish reason of the job that failed */
    char failure[512]; /* error message of the failed job */
    bool streaming;    /* true after the response headers of a stream were sent */
    double arrived_at;
    double waited_s; /* longest queue time of all jobs, in seconds */
    double first_at; /* time when the first token was generated; 0 if no token has been generated yet */
    double last_at;  /* time when the last token was generated */
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new;
    int block; /* the open content block, as a part_kind (Messages API) or a part index (Responses API); -1 if no block is open */
    uint32_t n_blocks;
    uint64_t n_events;                   /* number of events sent, which is the next sequence number in the Responses API */
    answer_out answers[API_MAX_CHOICES]; /* the answers of all jobs, in the order of the prompts */

    char *event_bytes; /* serialized engine events; protected by the lock */
    size_t n_event_bytes;
    size_t event_capacity;
    bool has_events;
    exchange *next_with_events;
};

/* Returns the monotonic time in seconds. */
static inline double exchange_now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- plain responses (plain_reply.c) ---- */

/* Sends a complete response and frees `bytes`. The response to a HEAD request contains only the headers, including
 * Content-Length. */
void exchange_send_bytes(server *s, struct evhttp_request *req, int status, const char *type, struct evbuffer *bytes);

/* Sends a JSON object and releases the reference to it. */
void exchange_send_json(server *s, struct evhttp_request *req, int status, json_t *object);

/* Sends an error in the format of the API that the path belongs to. param: name of the invalid field, or NULL. */
void exchange_send_error(server *s, struct evhttp_request *req, int status, const char *param, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Converts n bytes to a JSON string and replaces invalid UTF-8 with U+FFFD. */
json_t *reply_utf8_text(const char *bytes, size_t n);

/* ---- exchanges (exchange.c) ---- */

/* Starts preparing a request on a worker thread. prepare: one of the functions in prepare.h. is_large: if true, the request
 * becomes a large job of the worker pool. Otherwise, its body size determines whether it is a large job. */
void exchange_begin(server *s, struct evhttp_request *req, void (*prepare)(exchange *x), bool is_large, uint64_t tenant);

/* Returns the total number of answers to all prompts. */
static inline uint32_t exchange_choices(const exchange *x) { return x->n_jobs * x->api.n; }

/* Opens a reply parser for each answer of a chat. The parser separates text, reasoning and tool calls. Returns false if out of
 * memory. Called on a worker thread. */
bool exchange_open_parsers(exchange *x);

/* Processes the prepared exchanges and the pending engine events of all exchanges. */
void exchange_read_events(server *s);

/* Cancels all requests in the engine. */
void exchange_cancel_all(server *s);

/* During shutdown, ends the event loop once all exchanges are finished and their responses are sent. */
void exchange_end_when_empty(server *s);

/* ---- shared helpers (answer_parts.c) ---- */

/* Sends a server-sent event and releases `data`. name may be NULL. */
void reply_send_event(exchange *x, const char *name, json_t *data);

/* Appends bytes to the last part of the answer if they continue that part, otherwise to a new part. Returns the part, or NULL if
 * there are too many parts. */
answer_part *reply_keep(answer_out *a, part_kind kind, const char *bytes, size_t n);
json_t *reply_part_text(const answer_part *part);
json_t *reply_call_id(const exchange *x, uint32_t answer, uint32_t call);

/* Returns the arguments of a call as an object, or {} if the model did not write valid JSON. */
json_t *reply_call_input(const answer_part *part);

/* Concatenates all answer parts of one kind. Returns NULL if there are none. */
json_t *reply_join_parts(const answer_out *a, part_kind kind);

/* ---- responses of all APIs (reply_writer.c) ---- */
void reply_begin(exchange *x);                                                              /* starts a stream */
void reply_part(exchange *x, uint32_t answer, part_kind kind, const char *bytes, size_t n); /* adds a fragment to an answer */
void reply_answered(exchange *x, uint32_t answer);   /* ends one answer of a streamed response */
void reply_end(exchange *x);                         /* ends a stream or sends the complete response */
json_t *reply_answer(exchange *x);                   /* returns the complete, non-streamed response */
void reply_failed(exchange *x, const char *message); /* ends a stream with an error */

/* Returns true if the stream consists of JSON objects, one per line, instead of server-sent events. */
bool reply_is_lines(const exchange *x);

/* ---- llama.cpp's API (llama_reply.c) ---- */
void llama_part(exchange *x, const char *bytes, size_t n); /* sends text as an event of a stream */
json_t *llama_answer(exchange *x);                         /* returns the complete response, or the last event of a stream */

/* ---- Ollama API (ollama_reply.c) ---- */
void ollama_part(exchange *x, part_kind kind, const char *bytes, size_t n);
void ollama_end(exchange *x); /* sends the last line of a stream */
void ollama_failed(exchange *x, const char *message);
json_t *ollama_answer(const exchange *x);
json_t *ollama_loaded(const exchange *x); /* returns the response to a request that only loads the model */
json_t *ollama_time(int64_t seconds);     /* formats a Unix time */

/* ---- Responses API (responses_reply.c) ---- */
void responses_begin(exchange *x);
void responses_part(exchange *x, part_kind kind, const char *bytes, size_t n);
void responses_end(exchange *x);
void responses_failed(exchange *x, const char *message);
json_t *responses_answer(const exchange *x);

#endif
