/* Tests steps whose last tokens are discarded (fkv_runner_verify() and fkv_runner_accept()), as in speculative decoding. Wrong
 * draft tokens must leave no trace: the logits of all later tokens are bit-identical to those of a run without drafts. The models
 * have recurrent layers of every kind, sliding windows, sealed pages and latent attention.
 */
#include "golden_models.h"
#include "model_fixture.h"
#include "sanitized.h"
#include "test.h"

#include "../src/base/memory.h"

#include <string.h>

static const char *const NAMES[] = {"lfm2",      "qwen35_odd",      "qwen3_next", "granite4_h", "nemotron_h_moe",
                                    "falcon_h1", "kimi_linear_odd", "gemma3",     "gpt_oss",    "deepseek_v2"};
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0], N = 150, MAX_DRAFT = 5, MAX_SEQS = 3 };

static golden_model golden;
static float expected[N * GOLDEN_VOCAB];

static void close_golden(fkv_model *model) {
    fkv_model_close(model);
    golden_model_close(&golden);
}

/* Returns whether n rows of logits equal those of the golden tokens from position `from` on. */
static bool are_expected(const float *logits, uint32_t from, uint32_t n) {
    return memcmp(logits, expected + (size_t)from * GOLDEN_VOCAB, (size_t)n * GOLDEN_VOCAB * sizeof *logits) == 0;
}

static fkv_runner_config draft_config(uint32_t bits, bool drafts) {
    fkv_runner_config config = model_runner_config(bits, MAX_SEQS * N, N);
    config.n_threads = 2;
    config.max_seqs = MAX_SEQS;
    config.drafts = drafts;
    config.page_tokens = 16;
    return config;
}

/* Sequences that repeat the golden tokens at different positions. */
typedef struct readers {
    fkv_runner *runner;
    fkv_seq seqs[MAX_SEQS];
    uint32_t done[MAX_SEQS];
    uint64_t n_accepted, n_rejected;
} readers;

/* Runs one step. Sequence 0 has up to MAX_DRAFT drafts, sequence 1 has drafts in every second step, and sequence 2 has none.
 * Checks the logits of all correct tokens. */
static void run_draft_step(readers *r, uint32_t turn, const char *name) {
    uint32_t drafts[MAX_SEQS][1 + MAX_DRAFT];
    fkv_tokens rows[MAX_SEQS];
    uint32_t owners[MAX_SEQS];
    uint32_t n_kept[MAX_SEQS];
    uint32_t n_rows = 0;
    const float *logits = NULL;
    for (uint32_t s = 0; s < MAX_SEQS; s++) {
        const uint32_t left = N - r->done[s];
        uint32_t n = s == 0 ? 1 + turn % (1 + MAX_DRAFT) : s == 1 && turn % 2 == 0 ? 4 : 1;
        if (left == 0) continue;
        if (n > left) n = left;
        const uint32_t n_right = 1 + (turn / 2 + s) % n; /* number of correct tokens, including the one that is not a draft */
        for (uint32_t i = 0; i < n; i++) drafts[s][i] = golden.tokens[r->done[s] + i] ^ (i < n_right ? 0 : 1);
        owners[n_rows] = s;
        n_kept[n_rows] = n_right;
        rows[n_rows++] = (fkv_tokens){r->seqs[s], drafts[s], n, n > 1 ? FKV_LOGITS_ALL : FKV_LOGITS_LAST};
    }
    ck_ok(fkv_runner_verify(r->runner, rows, n_rows, &logits));
    for (uint32_t i = 0; i < n_rows; i++) {
        ck_assert_msg(are_expected(logits, r->done[owners[i]], n_kept[i]),
                      "%s, step %u: drafts change the logits of sequence %u after %u tokens", name, turn, owners[i],
                      r->done[owners[i]]);
        logits += (size_t)rows[i].n_tokens * GOLDEN_VOCAB;
        r->done[owners[i]] += n_kept[i];
        r->n_accepted += n_kept[i] - 1;
        r->n_rejected += rows[i].n_tokens - n_kept[i];
    }
    ck_ok(fkv_runner_accept(r->runner, n_kept));
    for (uint32_t i = 0; i < n_rows; i++) {
        uint32_t length = 0;
        ck_ok(fkv_seq_length(fkv_runner_cache(r->runner), rows[i].seq, &length));
        ck_assert_uint_eq(length, r->done[owners[i]]);
    }
}

/* bits: 4 or 16; 0 selects the default codec, which is sealed */
static void check_drafts(const char *name, const fkv_model *model, uint32_t bits, bool drafts) {
    fkv_runner_config config = draft_config(bits != 0 ? bits : 4, drafts);
    if (bits == 0) config.k = fkv_runner_config_default().k;
    if (bits == 0) config.v = fkv_runner_config_default().v;
    readers r = {.runner = model_runner(model, config)};
    fkv_seq seq = model_seq(r.runner, N);
    model_run(r.runner, seq, golden.tokens, N, N, GOLDEN_VOCAB, expected);
    ck_ok(fkv_seq_close(fkv_runner_cache(r.runner), seq));
    for (uint32_t s = 0; s < MAX_SEQS; s++) {
        r.seqs[s] = model_seq(r.runner, N);
        r.done[s] = 10 + 27 * s;
        model_run(r.runner, r.seqs[s], golden.tokens, r.done[s], N, GOLDEN_VOCAB, NULL);
    }
    for (uint32_t turn = 0; r.done[0] < N; turn++) run_draft_step(&r, turn, name);
    ck_assert_uint_gt(r.n_accepted, 30);
    ck_assert_uint_gt(r.n_rejected, 30);
    ck_assert(fkv_cache_consistent(fkv_runner_cache(r.runner)));
    fkv_runner_close(r.runner);
}

START_TEST(rejected_drafts_do_not_change_logits) {
    uint32_t n_cases = 0;
    for (uint32_t i = 0; i < N_NAMES; i++) {
        fkv_model *model = golden_model_load(&golden, NAMES[i]);
        if (test_runs_case(n_cases++)) check_drafts(NAMES[i], model, 0, true);
        if (test_runs_case(n_cases++)) check_drafts(NAMES[i], model, 16, true);
        if (test_runs_case(n_cases++)) check_drafts(NAMES[i], model, 4, false);
        close_golden(model);
    }
}
END_TEST

START_TEST(a_sequence_may_be_closed_while_its_drafts_are_verified) {
    fkv_model *model = golden_model_load(&golden, "qwen35");
    for (int drafts = 0; drafts < 2; drafts++) {
        fkv_runner *runner = model_runner(model, draft_config(16, drafts != 0));
        fkv_cache *cache = fkv_runner_cache(runner);
        fkv_seq seqs[2] = {model_seq(runner, N), model_seq(runner, N)};
        const uint32_t n_kept[] = {2, 3};
        const float *logits = NULL;
        uint32_t length = 0;
        model_run(runner, seqs[1], golden.tokens, N, N, GOLDEN_VOCAB, expected);
        ck_ok(fkv_seq_truncate(cache, seqs[1], 0));
        const fkv_tokens rows[] = {{seqs[0], golden.tokens, 4, FKV_LOGITS_ALL}, {seqs[1], golden.tokens, 5, FKV_LOGITS_ALL}};
        ck_ok(fkv_runner_verify(runner, rows, 2, &logits));
        ck_ok(fkv_seq_close(cache, seqs[0]));
        ck_ok(fkv_runner_accept(runner, n_kept));
        ck_status(fkv_seq_length(cache, seqs[0], &length), FKV_BAD_SEQ);
        ck_ok(fkv_seq_length(cache, seqs[1], &length));
        ck_assert_uint_eq(length, 3);
        const fkv_tokens rest = {seqs[1], golden.tokens + 3, 1, FKV_LOGITS_LAST};
        ck_ok(fkv_runner_forward(runner, &rest, 1, &logits));
        ck_assert(are_expected(logits, 3, 1));
        /* a step in which all sequences were closed */
        const fkv_tokens last = {seqs[1], golden.tokens + 4, 3, FKV_LOGITS_ALL};
        ck_ok(fkv_runner_verify(runner, &last, 1, &logits));
        ck_ok(fkv_seq_close(cache, seqs[1]));
        ck_ok(fkv_runner_accept(runner, n_kept));
        ck_assert(fkv_cache_consistent(cache));
        fkv_runner_close(runner);
    }
    close_golden(model);
}
END_TEST

START_TEST(calls_in_the_wrong_order_are_rejected) {
    fkv_model *model = golden_model_load(&golden, "qwen35");
    fkv_runner *runner = model_runner(model, draft_config(16, true));
    const fkv_tokens row = {model_seq(runner, N), golden.tokens, 4, FKV_LOGITS_ALL};
    const uint32_t too_few = 0;
    const uint32_t too_many = 5;
    const uint32_t three = 3;
    const float *logits = NULL;
    uint32_t length = 0;
    ck_status(fkv_runner_accept(runner, &three), FKV_BAD_STATE);
    ck_ok(fkv_runner_verify(runner, &row, 1, &logits));
    ck_status(fkv_runner_verify(runner, &row, 1, &logits), FKV_BAD_STATE);
    ck_status(fkv_runner_forward(runner, &row, 1, &logits), FKV_BAD_STATE);
    ck_status(fkv_runner_accept(runner, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_runner_accept(runner, &too_few), FKV_BAD_ARGUMENT);
    ck_status(fkv_runner_accept(runner, &too_many), FKV_BAD_ARGUMENT);
    ck_ok(fkv_runner_accept(runner, &three));
    ck_ok(fkv_seq_length(fkv_runner_cache(runner), row.seq, &length));
    ck_assert_uint_eq(length, 3);
    ck_ok(fkv_runner_verify(runner, &row, 1, &logits));
    fkv_runner_close(runner); /* aborts the open step */
    close_golden(model);
}
END_TEST

START_TEST(the_plan_includes_the_inputs_of_drafts) {
    fkv_model *model = golden_model_load(&golden, "qwen35");
    fkv_runner_config config = draft_config(16, false);
    fkv_runner_plan without;
    fkv_runner_plan with;
    config.max_logit_rows = 7;
    ck_ok(fkv_runner_plan_make(model, &config, &without));
    config.drafts = true;
    ck_ok(fkv_runner_plan_make(model, &config, &with));
    /* each of the three delta nets saves 256 inputs of the convolution, 4 decays and 4 values of beta per token; the total is
     * rounded up to whole OS pages */
    const uint64_t bytes = 3 * 7 * (256 + 4 + 4) * sizeof(float);
    ck_assert_uint_ge(with.total_bytes + fkv_os_page_bytes(), without.total_bytes + bytes);
    ck_assert_uint_le(with.total_bytes, without.total_bytes + bytes + fkv_os_page_bytes());
    const uint64_t before = fkv_map_live_bytes();
    fkv_runner *runner = model_runner(model, config);
    ck_assert_uint_eq(fkv_map_live_bytes() - before, with.total_bytes);
    fkv_runner_close(runner);
    close_golden(model);
}
END_TEST

TEST_MAIN("drafts", rejected_drafts_do_not_change_logits, a_sequence_may_be_closed_while_its_drafts_are_verified,
          calls_in_the_wrong_order_are_rejected, the_plan_includes_the_inputs_of_drafts)
