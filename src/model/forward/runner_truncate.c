/* Truncates a sequence to any length. If the cache cannot truncate to exactly this length, truncates further and recomputes the
 * missing tokens. */
#include "runner.h"

fkv_status fkv_runner_truncate(fkv_runner *runner, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens) {
    FKV_REQUIRE(runner != NULL && (tokens != NULL || n_tokens == 0), FKV_BAD_ARGUMENT,
                "fkv_runner_truncate: runner or tokens is NULL");
    fkv_cache *cache = fkv_runner_cache(runner);
    uint32_t length = 0;
    FKV_TRY(fkv_seq_reachable(cache, seq, n_tokens, &length));
    FKV_TRY(fkv_seq_truncate(cache, seq, length));
    while (length < n_tokens) {
        const uint32_t n = fkv_runner_chunk(runner, length, n_tokens - length);
        const fkv_tokens row = {.seq = seq, .tokens = tokens + length, .n_tokens = n, .logits = FKV_LOGITS_NONE};
        FKV_TRY(fkv_runner_forward(runner, &row, 1, NULL));
        length += n;
    }
    return FKV_OK;
}
