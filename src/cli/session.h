/* A session is a runner with one sequence, to which tokens are fed in chunks. Used by run, niah, ppl and bench flat. */
#ifndef FKV_CLI_SESSION_H
#define FKV_CLI_SESSION_H

#include "progress.h"

#include <flatkv/model.h>

typedef struct model_session {
    const fkv_model *model;
    fkv_runner *runner;
    fkv_cache *cache;
    fkv_runner_plan plan;
    fkv_seq seq;
    uint32_t max_tokens;
    uint32_t chunk;
    uint32_t page_tokens;
    uint32_t length; /* number of tokens in the sequence */

    void (*after_step)(void *user); /* optional callback that is called after every step; may be NULL */
    void *after_step_user;
} model_session;

/* Plans and opens a runner with a sequence of up to config->max_tokens tokens. Returns an exit code; session_close() may be
 * called even after a failure. */
int session_open(model_session *s, const fkv_model *model, const fkv_runner_config *config);

/* Opens a runner without a sequence. The caller then loads a sequence from a page file, or calls session_begin(). */
int session_open_empty(model_session *s, const fkv_model *model, const fkv_runner_config *config);
int session_begin(model_session *s); /* opens an empty sequence */

/* Feeds tokens in chunks whose lengths are determined by fkv_runner_chunk(). After Ctrl-C, stops between two chunks and returns
 * EXIT_INTERRUPTED without printing a message; the sequence keeps the tokens fed so far. If logits is not NULL, *logits receives
 * the logits of the last token. progress may be NULL. */
int session_feed(model_session *s, const uint32_t *tokens, size_t n, const float **logits, progress_bar *progress);

/* Returns an upper bound on the number of chunks that session_feed() needs for n tokens. */
size_t session_max_chunks(size_t n, uint32_t max_step_tokens);

/* Runs one step of at most `chunk` tokens. *logits: [n, n_vocab], the logits of every token. Returns an exit code. */
int session_feed_all(model_session *s, const uint32_t *tokens, uint32_t n, const float **logits);

/* Truncates the sequence to at most n tokens. Sealed pages and windowed layers may require a shorter length; the caller must then
 * feed the tokens from s->length to n again. Returns an exit code. */
int session_truncate(model_session *s, uint32_t n);

void session_close(model_session *s);

#endif
