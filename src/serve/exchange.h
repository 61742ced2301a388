/* One request and its answer: from the JSON of the client to the last byte sent.
 *
 * An exchange lives from the request until both ends are done with it: the engine (its DONE record was read) and the connection
 * (the reply ended, or the client left). A client that leaves cancels the engine's part at once.
 */
#ifndef FKV_SERVE_EXCHANGE_H
#define FKV_SERVE_EXCHANGE_H

#include "api_request.h"
#include "connections.h"
#include "grammar.h"
#include "metrics.h"
#include "serve.h"

#include <event2/event.h>
#include <event2/http.h>
#include <pthread.h>

typedef struct exchange exchange;

struct server {
    const fkv_model *model; /* NULL: it is being loaded, and so is what follows */
    fkv_engine *engine;
    const char *model_name;
    uint64_t base_bytes;
    grammar_maker *grammars; /* NULL: this build has none */
    serve_config config;
    struct event_base *base;
    struct evhttp *http;
    struct evhttp_bound_socket *socket;
    int wake[2]; /* a pipe: the engine's thread writes, the loop reads */
    pthread_mutex_t lock;
    exchange *mailed; /* those with mail; under the lock */
    bool awake;       /* a byte is in the pipe; under the lock */
    metrics metrics;
    uint64_t next_seed;
    exchange *open; /* all of them */
    uint32_t n_open;
    connections *connections;
    bool draining;
    pthread_t waiting; /* runs the loop until the model is there */
    bool is_waiting;
};

/* What an answer is made of. */
typedef enum part_kind { PART_TEXT, PART_REASONING, PART_CALL, PART_ARGUMENTS, PART_CALL_END } part_kind;

enum { MAX_PARTS = 64 };

typedef struct answer_part {
    part_kind kind; /* TEXT, REASONING or CALL */
    char *name;
    struct evbuffer *bytes;
} answer_part;

typedef struct answer_out {
    answer_part parts[MAX_PARTS];
    uint32_t n_parts;
    uint32_t n_calls;
    json_t *logprobs; /* of tokens that were not sent yet */
    fkv_finish reason;
    char *stop;
    void *reader; /* tells text, reasoning and calls apart; NULL: all is text */
} answer_out;

struct exchange {
    server *s;
    exchange *next;
    struct evhttp_request *req; /* NULL: the reply ended or the client left */
    struct event *closed;
    struct event *ping;
    api_request api;
    grammar *rules; /* of the answers, or NULL */
    char id[40];
    int64_t created;
    uint64_t job;
    bool in_engine; /* until DONE */
    bool streaming; /* headers are out */
    double arrived_at;
    double last_at; /* of the last token */
    uint32_t n_prompt;
    uint32_t n_cached;
    uint32_t n_new;
    int block; /* of a stream, -1: none. Anthropic: the part_kind of the open block; responses: the number of the open part */
    uint32_t n_blocks;
    uint64_t n_events; /* of a stream of responses */
    answer_out answers[FKV_MAX_ANSWERS];

    char *mail; /* under the lock: records of the engine's events */
    size_t n_mail;
    size_t mail_room;
    bool has_mail;
    exchange *next_mailed;
};

double exchange_now(void);

/* ---- plain answers (plain_reply.c) */

/* Answers with these bytes, which are taken over; HEAD with their number. */
void exchange_send_bytes(server *s, struct evhttp_request *req, int status, const char *type, struct evbuffer *bytes);

/* Answers with one JSON object and its status. Takes the object over. */
void exchange_send_json(server *s, struct evhttp_request *req, int status, json_t *object);

/* Errors as the API of the path shapes them. param may be NULL. */
void exchange_send_error(server *s, struct evhttp_request *req, int status, const char *param, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

json_t *reply_sound_text(const char *bytes, size_t n); /* a JSON string, U+FFFD for what is not UTF-8 */

/* ---- exchanges (exchange.c) */

/* Takes a parsed request, its prompt and its grammar (or NULL); answers the client itself where the engine refuses. `api` and
 * `rules` are taken over. */
void exchange_begin(server *s, struct evhttp_request *req, api_request *api, grammar *rules, const uint32_t *prompt,
                    uint32_t n_prompt, uint64_t tenant);

/* Reads the mail of every exchange that has some. */
void exchange_read_mail(server *s);

/* The engine's part of all of them ends. */
void exchange_cancel_all(server *s);

/* Ends the loop of a server that is shutting down once nothing is open and everything was sent. */
void exchange_end_when_empty(server *s);

/* ---- what the APIs share (answer_parts.c) */

void reply_send_event(exchange *x, const char *name, json_t *data); /* takes data; name NULL: data alone */

/* Keeps a piece with the parts of its answer; the part, or NULL: there are too many. */
answer_part *reply_keep(answer_out *a, part_kind kind, const char *bytes, size_t n);
json_t *reply_part_text(const answer_part *part);
json_t *reply_call_id(const exchange *x, uint32_t answer, uint32_t call);

/* ---- the APIs (reply_writer.c) */
void reply_begin(exchange *x);                                                              /* of a stream */
void reply_part(exchange *x, uint32_t answer, part_kind kind, const char *bytes, size_t n); /* a piece of an answer */
void reply_answered(exchange *x, uint32_t answer);                                          /* of a stream */
void reply_end(exchange *x);                                                                /* stream or not */
json_t *reply_answer(exchange *x);                   /* the whole of an answer that was not streamed */
void reply_failed(exchange *x, const char *message); /* of a stream that began */

/* ---- responses (responses_reply.c); the same steps */
void responses_begin(exchange *x);
void responses_part(exchange *x, part_kind kind, const char *bytes, size_t n);
void responses_end(exchange *x);
void responses_failed(exchange *x, const char *message);
json_t *responses_answer(const exchange *x);

#endif
