/* A runner with one sequence, fed in chunks: what run, niah and the benches drive a model with.
 */
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
    uint32_t length; /* tokens fed */

    void (*after_step)(void *user); /* NULL, or called after every step */
    void *after_step_user;
} model_session;

/* Plans and opens; the sequence may grow to config->max_tokens. Returns an exit code, with a message on failure; session_close()
 * is then still right. */
int session_open(model_session *s, const fkv_model *model, const fkv_runner_config *config);

/* The same without a sequence: for one that will come from a page file. */
int session_open_empty(model_session *s, const fkv_model *model, const fkv_runner_config *config);
int session_begin(model_session *s); /* opens the sequence */

/* Feeds tokens in chunks, between which an interrupt is noticed (EXIT_INTERRUPTED, silently; the sequence keeps what it got).
 * *logits, where logits is not NULL, are those of the last token. progress may be NULL. */
int session_feed(model_session *s, const uint32_t *tokens, size_t n, const float **logits, progress_bar *progress);

/* One step of at most `chunk` tokens with the logits of every one: [n, n_vocab]. */
int session_feed_all(model_session *s, const uint32_t *tokens, uint32_t n, const float **logits);

/* Back to the first n tokens: to the start of their page where that is sealed, to none where a windowed layer has let go of what
 * they need. The caller feeds again what lies between s->length and n. */
int session_truncate(model_session *s, uint32_t n);

void session_close(model_session *s);

#endif
