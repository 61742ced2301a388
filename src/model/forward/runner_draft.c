/* Ends a step that fkv_runner_verify() has left open, and discards rejected draft tokens.
 *
 * Keys and values of discarded tokens are released with their pages (fkv_step_keep()). A recurrent state depends on all tokens of
 * its row, so the states of shortened rows are written again. The CPU backend saves the inputs of the recurrence for draft tokens
 * and replays those of the accepted tokens. If the inputs were not saved, the step is aborted and the remaining tokens are
 * computed again.
 */
#include "runner.h"

/* Lists the rows that keep fewer tokens than they have. Returns the number of these rows. *saved receives whether the inputs of
 * all of them were saved. */
static uint32_t list_shortened(fkv_runner *r, const uint32_t *n_kept, bool *saved) {
    uint32_t n = 0;
    *saved = true;
    for (uint32_t i = 0; i < r->n_rows; i++) {
        if (n_kept[i] == r->rows[i].n_tokens) continue;
        *saved = *saved && r->saved_from[i] != FKV_NOT_SAVED;
        r->shortened[n++] = i;
    }
    return n;
}

/* Writes the states of the shortened rows again. */
static fkv_status replay_states(fkv_runner *r, fkv_step *step, const uint32_t *n_kept, uint32_t n_shortened) {
    r->n_tokens = 0;
    for (uint32_t i = 0; i < n_shortened; i++) {
        const uint32_t row = r->shortened[i];
        r->rows[i] = (fkv_row){r->rows[row].seq, n_kept[row]};
        r->saved_from[i] = r->saved_from[row];
        r->n_tokens += n_kept[row];
    }
    r->n_rows = n_shortened;
    return r->model->backend->replay(r, step);
}

/* Aborts the step and runs it again with the kept tokens only. Sequences that were closed during the step are omitted. */
static fkv_status rerun_step(fkv_runner *r, fkv_step *step, const uint32_t *n_kept) {
    FKV_TRY(fkv_step_abort(step));
    uint32_t n_rows = 0;
    uint32_t n_tokens = 0;
    uint32_t first = 0; /* index of the row's first token in the aborted step */
    for (uint32_t i = 0; i < r->n_rows; first += r->rows[i++].n_tokens) {
        uint32_t length = 0;
        if (fkv_seq_length(r->cache, r->rows[i].seq, &length) != FKV_OK) continue;
        memmove(r->tokens + n_tokens, r->tokens + first, n_kept[i] * sizeof *r->tokens);
        memmove(r->positions + n_tokens, r->positions + first, n_kept[i] * sizeof *r->positions);
        n_tokens += n_kept[i];
        r->shortened[n_rows++] = i;
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        r->rows[i] = (fkv_row){r->rows[r->shortened[i]].seq, n_kept[r->shortened[i]]};
        r->saved_from[i] = FKV_NOT_SAVED;
    }
    r->n_rows = n_rows;
    r->n_tokens = n_tokens;
    r->n_logit_rows = 0;
    if (n_rows == 0) return FKV_OK;
    FKV_TRY(fkv_step_begin(r->cache, r->rows, n_rows, &step));
    fkv_status status = r->model->backend->forward(r, step);
    if (status == FKV_OK) status = fkv_step_commit(step);
    if (status != FKV_OK) (void)fkv_step_abort(step);
    return status;
}

fkv_status fkv_runner_accept(fkv_runner *runner, const uint32_t *n_kept) {
    FKV_REQUIRE(runner != NULL && n_kept != NULL, FKV_BAD_ARGUMENT, "fkv_runner_accept: runner or n_kept is NULL");
    FKV_REQUIRE(runner->step != NULL, FKV_BAD_STATE, "fkv_runner_accept: no step is open; call fkv_runner_verify() first");
    fkv_step *step = runner->step;
    FKV_TRY(fkv_step_keep(step, n_kept));
    runner->step = NULL;
    bool saved = false;
    fkv_status status = FKV_OK;
    const uint32_t n_shortened = list_shortened(runner, n_kept, &saved);
    if (n_shortened > 0 && fkv_architecture_has_recurrence(runner->model->hparams)) {
        if (!saved) return rerun_step(runner, step, n_kept);
        status = replay_states(runner, step, n_kept, n_shortened);
    }
    if (status == FKV_OK) status = fkv_step_commit(step);
    if (status != FKV_OK) (void)fkv_step_abort(step);
    return status;
}
