/* See session.h. */
#include "session.h"

#include "cli.h"

#include <unistd.h>

int session_open_empty(model_session *s, const fkv_model *model, const fkv_runner_config *config) {
    s->model = model;
    s->max_tokens = config->max_tokens;
    s->chunk = config->max_step_tokens;
    s->page_tokens = config->page_tokens;
    fkv_status status = fkv_runner_plan_make(model, config, &s->plan);
    bool slow = status == FKV_OK && s->plan.total_bytes > (uint64_t)1 << 30 && isatty(STDERR_FILENO) != 0;
    char bytes[32];
    if (slow) (void)fprintf(stderr, "reserving %s for %u tokens ...", kit_bytes(s->plan.total_bytes, bytes), s->max_tokens);
    if (status == FKV_OK) status = fkv_runner_open(model, config, &s->runner);
    if (slow) (void)fputs("\r\x1b[K", stderr);
    if (status != FKV_OK) return cli_fail_status(status);
    s->cache = fkv_runner_cache(s->runner);
    return EXIT_GOOD;
}

int session_begin(model_session *s) {
    fkv_seq_config config = {.max_tokens = s->max_tokens};
    fkv_status status = fkv_seq_open(s->cache, &config, &s->seq, NULL);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

int session_open(model_session *s, const fkv_model *model, const fkv_runner_config *config) {
    int code = session_open_empty(s, model, config);
    return code == EXIT_GOOD ? session_begin(s) : code;
}

static int run_step(model_session *s, const uint32_t *tokens, uint32_t n, fkv_logits which, const float **logits) {
    fkv_tokens row = {.seq = s->seq, .tokens = tokens, .n_tokens = n, .logits = which};
    fkv_status status = fkv_runner_forward(s->runner, &row, 1, logits);
    if (status != FKV_OK) return cli_fail_status(status);
    s->length += n;
    if (s->after_step != NULL) s->after_step(s->after_step_user);
    return EXIT_GOOD;
}

int session_feed(model_session *s, const uint32_t *tokens, size_t n, const float **logits, progress_bar *progress) {
    for (size_t at = 0; at < n;) {
        if (cli_interrupted()) return EXIT_INTERRUPTED;
        const uint32_t left = n - at < UINT32_MAX ? (uint32_t)(n - at) : UINT32_MAX;
        const uint32_t part = fkv_runner_chunk(s->runner, s->length, left);
        bool last = at + part == n && logits != NULL;
        int code = run_step(s, tokens + at, part, last ? FKV_LOGITS_LAST : FKV_LOGITS_NONE, last ? logits : NULL);
        if (code != EXIT_GOOD) return code;
        at += part;
        progress_add(progress, part);
    }
    return EXIT_GOOD;
}

size_t session_max_chunks(size_t n, uint32_t max_step_tokens) {
    return n * 4 / ((size_t)max_step_tokens * 3) + 1; /* each chunk except the last has at least 3/4 of max_step_tokens */
}

int session_feed_all(model_session *s, const uint32_t *tokens, uint32_t n, const float **logits) {
    return run_step(s, tokens, n, FKV_LOGITS_ALL, logits);
}

int session_truncate(model_session *s, uint32_t n) {
    fkv_status status = fkv_seq_truncate(s->cache, s->seq, n);
    while (status == FKV_GONE) { /* sealed layers can be truncated only at certain boundaries, so shorter lengths are tried */
        n = (n - 1) / s->page_tokens * s->page_tokens;
        status = fkv_seq_truncate(s->cache, s->seq, n);
    }
    if (status != FKV_OK) return cli_fail_status(status);
    s->length = n;
    return EXIT_GOOD;
}

void session_close(model_session *s) {
    fkv_runner_close(s->runner);
    *s = (model_session){0};
}
