/* Computes text embeddings: the final hidden state of the last token. The runner must be opened with `embeddings`. */
#include "runner.h"

#include <math.h>

static fkv_status run_tokens(fkv_runner *r, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, const float **state) {
    for (uint32_t at = 0; at < n_tokens;) {
        const uint32_t n = fkv_runner_chunk(r, at, n_tokens - at);
        const bool is_last = at + n == n_tokens;
        const fkv_tokens row = {
            .seq = seq, .tokens = tokens + at, .n_tokens = n, .logits = is_last ? FKV_LOGITS_LAST : FKV_LOGITS_NONE};
        FKV_TRY(fkv_runner_forward(r, &row, 1, is_last ? state : NULL));
        at += n;
    }
    return FKV_OK;
}

/* Writes the first n values of a row, scaled to a Euclidean norm of 1. A row of zeros stays unchanged. */
static fkv_status normalize(const float *row, uint32_t n, float *out) {
    double squares = 0.0;
    for (uint32_t i = 0; i < n; i++) squares += (double)row[i] * (double)row[i];
    FKV_REQUIRE(isfinite(squares), FKV_UNSUPPORTED, "the embedding contains values that are not finite");
    const double scale = squares > 0.0 ? 1.0 / sqrt(squares) : 1.0;
    for (uint32_t i = 0; i < n; i++) out[i] = (float)((double)row[i] * scale);
    return FKV_OK;
}

fkv_status fkv_embed(fkv_runner *runner, const uint32_t *tokens, uint32_t n_tokens, uint32_t n_dims, float *out) {
    FKV_REQUIRE(runner != NULL && tokens != NULL && out != NULL, FKV_BAD_ARGUMENT, "fkv_embed: runner, tokens or out is NULL");
    const uint32_t dim = runner->model->hparams->dim;
    FKV_REQUIRE(runner->config.embeddings, FKV_BAD_STATE, "fkv_embed: the runner was opened without `embeddings`");
    FKV_REQUIRE(n_tokens > 0, FKV_BAD_ARGUMENT, "fkv_embed: the text has no tokens");
    FKV_REQUIRE(n_tokens <= runner->config.max_tokens, FKV_BAD_ARGUMENT,
                "the text has %u tokens; the runner was opened for at most %u", n_tokens, runner->config.max_tokens);
    FKV_REQUIRE(n_dims > 0 && n_dims <= dim, FKV_BAD_ARGUMENT, "invalid number of dimensions %u: expected 1 to %u", n_dims, dim);
    fkv_cache *cache = fkv_runner_cache(runner);
    fkv_seq seq;
    const float *state = NULL;
    FKV_TRY(fkv_seq_open(cache, &(fkv_seq_config){.max_tokens = n_tokens}, &seq, NULL));
    fkv_status status = run_tokens(runner, seq, tokens, n_tokens, &state);
    if (status == FKV_OK) status = normalize(state, n_dims, out);
    const fkv_status closed = fkv_seq_close(cache, seq);
    return status != FKV_OK ? status : closed;
}
