/* Tests invalid calls of the public API. One table lists the calls and the exact status that each must return. test_bad_config.c
 * tests invalid configurations.
 *
 * Every rejected call must set a new message, leave the statistics unchanged and write no output parameter, and all invariants
 * must hold afterwards. After all calls, the sequence continues, and its outputs must be bit-identical to those of an undisturbed
 * cache.
 */
#include "cache_fixture.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

enum {
    PAGE = 16,
    MAX_TOKENS = 256,
    MAX_SEQS = 4,
    STEP_TOKENS = 32,
    LIVE_TOKENS = 60, /* length at which the window group has already released a page */
    LIVE_MOST = 80,
    ROOMY_MOST = 64,
    UNTOUCHED = 77 /* byte value with which all output parameters are filled */
};

static const fkv_layer_config LAYERS[] = {
    {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {8, 64}, .v = {4, 64}},
    {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .window = 16, .n_sinks = 4, .k = {16, 0}, .v = {16, 0}},
};

static fkv_config good_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = N_OF(LAYERS);
    config.layers = LAYERS;
    config.rotate = FKV_ROTATE_K;
    config.rotation_seed = 3;
    config.page_tokens = PAGE;
    config.max_tokens = MAX_TOKENS;
    config.max_seqs = MAX_SEQS;
    config.max_step_tokens = STEP_TOKENS;
    config.n_threads = 1;
    config.weights_id[0] = 9;
    (void)snprintf(config.rope_id, sizeof config.rope_id, "neox base=10000");
    return config;
}

/* ---- calls ---- */

/* The cache under test and the arguments of the calls below. */
typedef struct stage {
    cache_fixture w;
    cache_fixture other;
    fkv_cache *cache; /* the cache under test, same as w.cache */
    fkv_seq live;     /* sequence that holds LIVE_TOKENS tokens; its max_tokens is LIVE_MOST */
    fkv_seq roomy;    /* empty sequence; its max_tokens is ROOMY_MOST */
    fkv_seq closed;
    fkv_seq foreign; /* sequence of the cache `other`, unknown to the cache under test */
    uint32_t tokens[MAX_TOKENS];
    uint32_t strange[MAX_TOKENS];
    const uint8_t *rows; /* K, V or Q rows for a one-token step */
    uint8_t out[4 * 64 * 4];
    fkv_step *step;
    fkv_seq spare; /* sequence that exists only in some test states */
    fkv_seq crowd[MAX_SEQS];
    /* output parameters; all their bytes are set to UNTOUCHED before a call */
    fkv_seq out_seq;
    uint32_t out_n;
    fkv_step *out_step;
    fkv_stats out_stats;
    fkv_file_info out_info;
    /* files */
    char good[512], damaged[512], newer[512], text[512], missing[512], folder[512], no_folder[512], written[512];
    char weights[512], rope[512], rotation[512], seed[512], codec[512], shape[512], page_type[512],
        pages[512]; /* page files of other identities; each identity differs from that of the cache in the field for which the
                       file is named */
} stage;

typedef enum moment {
    IDLE,
    BEGUN,     /* a one-token step of `live` is open, and no layer has been written */
    HALF,      /* a one-token step of `live` is open, and only layer 0 of the two layers has been written */
    WRITTEN,   /* a one-token step of `live` is open, and both layers have been written */
    COMMITTED, /* s->step is the handle of a finished step */
    ABORTED,
    CROWDED,  /* max_seqs sequences are open */
    CLOSED_IN /* a one-token step of `spare` is open, and `spare` was closed during the step */
} moment;

#define ROWS(...) ((const fkv_row[]){__VA_ARGS__})
#define SEQ(...) (&(fkv_seq_config){__VA_ARGS__})

/* Table columns: name, state of the cache, expected status, call. */
#define BAD_CALLS(ROW)                                                                                                           \
    /* null pointers */                                                                                                          \
    ROW(plan_null_config, IDLE, BAD_ARGUMENT, fkv_plan_make(NULL, &(fkv_plan){0}))                                               \
    ROW(plan_null_plan, IDLE, BAD_ARGUMENT, fkv_plan_make(&s->w.config, NULL))                                                   \
    ROW(cache_open_null_config, IDLE, BAD_ARGUMENT, fkv_cache_open(NULL, &(fkv_cache *){NULL}))                                  \
    ROW(cache_open_null_cache, IDLE, BAD_ARGUMENT, fkv_cache_open(&s->w.config, NULL))                                           \
    ROW(stats_null_cache, IDLE, BAD_ARGUMENT, fkv_cache_stats(NULL, &s->out_stats))                                              \
    ROW(stats_null_stats, IDLE, BAD_ARGUMENT, fkv_cache_stats(s->cache, NULL))                                                   \
    ROW(seq_open_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_open(NULL, SEQ(.max_tokens = 1), &s->out_seq, &s->out_n))               \
    ROW(seq_open_null_config, IDLE, BAD_ARGUMENT, fkv_seq_open(s->cache, NULL, &s->out_seq, &s->out_n))                          \
    ROW(seq_open_null_seq, IDLE, BAD_ARGUMENT, fkv_seq_open(s->cache, SEQ(.max_tokens = 1), NULL, &s->out_n))                    \
    ROW(fork_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_fork(NULL, s->live, LIVE_MOST, &s->out_seq))                                \
    ROW(fork_null_child, IDLE, BAD_ARGUMENT, fkv_seq_fork(s->cache, s->live, LIVE_MOST, NULL))                                   \
    ROW(reserve_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_reserve(NULL, s->live, LIVE_MOST))                                       \
    ROW(match_null_cache, IDLE, BAD_ARGUMENT, fkv_prefix_match(NULL, SEQ(.max_tokens = 1), &s->out_n))                           \
    ROW(match_null_config, IDLE, BAD_ARGUMENT, fkv_prefix_match(s->cache, NULL, &s->out_n))                                      \
    ROW(match_null_n_shared, IDLE, BAD_ARGUMENT, fkv_prefix_match(s->cache, SEQ(.max_tokens = 1), NULL))                         \
    ROW(truncate_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_truncate(NULL, s->live, 59))                                            \
    ROW(close_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_close(NULL, s->live))                                                      \
    ROW(length_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_length(NULL, s->live, &s->out_n))                                         \
    ROW(length_null_n_tokens, IDLE, BAD_ARGUMENT, fkv_seq_length(s->cache, s->live, NULL))                                       \
    ROW(insert_null_cache, IDLE, BAD_ARGUMENT, fkv_prefix_insert(NULL, s->live, s->tokens, 32))                                  \
    ROW(insert_null_tokens, IDLE, BAD_ARGUMENT, fkv_prefix_insert(s->cache, s->live, NULL, 32))                                  \
    ROW(clear_null_cache, IDLE, BAD_ARGUMENT, fkv_prefix_clear(NULL))                                                            \
    ROW(begin_null_cache, IDLE, BAD_ARGUMENT, fkv_step_begin(NULL, ROWS({s->live, 1}), 1, &s->out_step))                         \
    ROW(begin_null_rows, IDLE, BAD_ARGUMENT, fkv_step_begin(s->cache, NULL, 1, &s->out_step))                                    \
    ROW(begin_null_step, IDLE, BAD_ARGUMENT, fkv_step_begin(s->cache, ROWS({s->live, 1}), 1, NULL))                              \
    ROW(write_null_step, BEGUN, BAD_ARGUMENT, fkv_write(NULL, 0, s->rows, s->rows))                                              \
    ROW(write_null_k, BEGUN, BAD_ARGUMENT, fkv_write(s->step, 0, NULL, s->rows))                                                 \
    ROW(write_null_v, BEGUN, BAD_ARGUMENT, fkv_write(s->step, 0, s->rows, NULL))                                                 \
    ROW(attend_null_step, HALF, BAD_ARGUMENT, fkv_attend(NULL, 0, s->rows, s->out))                                              \
    ROW(attend_null_q, HALF, BAD_ARGUMENT, fkv_attend(s->step, 0, NULL, s->out))                                                 \
    ROW(attend_null_out, HALF, BAD_ARGUMENT, fkv_attend(s->step, 0, s->rows, NULL))                                              \
    ROW(commit_null_step, WRITTEN, BAD_ARGUMENT, fkv_step_commit(NULL))                                                          \
    ROW(abort_null_step, WRITTEN, BAD_ARGUMENT, fkv_step_abort(NULL))                                                            \
    ROW(save_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_save(NULL, s->live, s->tokens, 0, s->written))                              \
    ROW(save_null_tokens, IDLE, BAD_ARGUMENT, fkv_seq_save(s->cache, s->live, NULL, 0, s->written))                              \
    ROW(save_null_path, IDLE, BAD_ARGUMENT, fkv_seq_save(s->cache, s->live, s->tokens, 0, NULL))                                 \
    ROW(load_null_cache, IDLE, BAD_ARGUMENT, fkv_seq_load(NULL, SEQ(.max_tokens = 64), s->good, &s->out_seq))                    \
    ROW(load_null_config, IDLE, BAD_ARGUMENT, fkv_seq_load(s->cache, NULL, s->good, &s->out_seq))                                \
    ROW(load_null_path, IDLE, BAD_ARGUMENT, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), NULL, &s->out_seq))                    \
    ROW(load_null_seq, IDLE, BAD_ARGUMENT, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->good, NULL))                         \
    ROW(inspect_null_path, IDLE, BAD_ARGUMENT, fkv_file_inspect(NULL, true, &s->out_info))                                       \
    ROW(inspect_null_info, IDLE, BAD_ARGUMENT, fkv_file_inspect(s->good, true, NULL))                                            \
    ROW(file_tokens_null_path, IDLE, BAD_ARGUMENT, fkv_file_tokens(NULL, s->strange, 1, &s->out_n))                              \
    ROW(file_tokens_null_tokens, IDLE, BAD_ARGUMENT, fkv_file_tokens(s->good, NULL, 1, &s->out_n))                               \
    ROW(file_tokens_null_n_tokens, IDLE, BAD_ARGUMENT, fkv_file_tokens(s->good, s->strange, 1, NULL))                            \
    /* arguments that are out of range */                                                                                        \
    ROW(seq_open_for_no_tokens, IDLE, BAD_ARGUMENT, fkv_seq_open(s->cache, SEQ(.max_tokens = 0), &s->out_seq, &s->out_n))        \
    ROW(seq_open_prompt_null, IDLE, BAD_ARGUMENT,                                                                                \
        fkv_seq_open(s->cache, SEQ(.max_tokens = 9, .n_prompt = 3), &s->out_seq, &s->out_n))                                     \
    ROW(fork_shorter_than_the_parent, IDLE, BAD_ARGUMENT, fkv_seq_fork(s->cache, s->live, LIVE_TOKENS - 1, &s->out_seq))         \
    ROW(fork_for_no_tokens, IDLE, BAD_ARGUMENT, fkv_seq_fork(s->cache, s->roomy, 0, &s->out_seq))                                \
    ROW(reserve_below_the_length, IDLE, BAD_ARGUMENT, fkv_seq_reserve(s->cache, s->live, LIVE_TOKENS - 1))                       \
    ROW(reserve_for_no_tokens, IDLE, BAD_ARGUMENT, fkv_seq_reserve(s->cache, s->roomy, 0))                                       \
    ROW(match_for_no_tokens, IDLE, BAD_ARGUMENT, fkv_prefix_match(s->cache, SEQ(.max_tokens = 0), &s->out_n))                    \
    ROW(match_prompt_null, IDLE, BAD_ARGUMENT, fkv_prefix_match(s->cache, SEQ(.max_tokens = 9, .n_prompt = 3), &s->out_n))       \
    ROW(truncate_beyond_the_length, IDLE, BAD_ARGUMENT, fkv_seq_truncate(s->cache, s->live, LIVE_TOKENS + 1))                    \
    ROW(insert_beyond_the_length, IDLE, BAD_ARGUMENT, fkv_prefix_insert(s->cache, s->live, s->tokens, LIVE_TOKENS + 1))          \
    ROW(insert_other_tokens, IDLE, BAD_ARGUMENT, fkv_prefix_insert(s->cache, s->live, s->strange, 32))                           \
    ROW(begin_no_rows, IDLE, BAD_ARGUMENT, fkv_step_begin(s->cache, ROWS({s->live, 1}), 0, &s->out_step))                        \
    ROW(begin_row_of_no_tokens, IDLE, BAD_ARGUMENT, fkv_step_begin(s->cache, ROWS({s->live, 0}), 1, &s->out_step))               \
    ROW(begin_one_sequence_twice, IDLE, BAD_ARGUMENT,                                                                            \
        fkv_step_begin(s->cache, ROWS({s->live, 1}, {s->roomy, 1}, {s->live, 1}), 3, &s->out_step))                              \
    ROW(begin_more_rows_than_sequences, IDLE, BAD_ARGUMENT,                                                                      \
        fkv_step_begin(s->cache, ROWS({s->live, 1}), UINT32_MAX, &s->out_step))                                                  \
    ROW(write_layer_2_of_2, BEGUN, BAD_ARGUMENT, fkv_write(s->step, 2, s->rows, s->rows))                                        \
    ROW(write_layer_of_no_number, BEGUN, BAD_ARGUMENT, fkv_write(s->step, UINT32_MAX, s->rows, s->rows))                         \
    ROW(attend_layer_2_of_2, WRITTEN, BAD_ARGUMENT, fkv_attend(s->step, 2, s->rows, s->out))                                     \
    ROW(save_more_than_there_is, IDLE, BAD_ARGUMENT, fkv_seq_save(s->cache, s->live, s->tokens, LIVE_TOKENS + 1, s->written))    \
    ROW(save_an_empty_sequence, IDLE, BAD_ARGUMENT, fkv_seq_save(s->cache, s->roomy, s->tokens, 0, s->written))                  \
    ROW(load_with_another_prompt, IDLE, BAD_ARGUMENT,                                                                            \
        fkv_seq_load(s->cache, SEQ(.max_tokens = 64, .prompt = s->strange, .n_prompt = 64), s->good, &s->out_seq))               \
    ROW(load_with_a_shorter_prompt, IDLE, BAD_ARGUMENT,                                                                          \
        fkv_seq_load(s->cache, SEQ(.max_tokens = 64, .prompt = s->tokens, .n_prompt = 5), s->good, &s->out_seq))                 \
    ROW(load_prompt_null, IDLE, BAD_ARGUMENT,                                                                                    \
        fkv_seq_load(s->cache, SEQ(.max_tokens = 64, .n_prompt = 64), s->good, &s->out_seq))                                     \
    /* calls with unknown or closed sequences */                                                                                 \
    ROW(fork_closed, IDLE, BAD_SEQ, fkv_seq_fork(s->cache, s->closed, LIVE_MOST, &s->out_seq))                                   \
    ROW(reserve_closed, IDLE, BAD_SEQ, fkv_seq_reserve(s->cache, s->closed, LIVE_MOST))                                          \
    ROW(reserve_foreign, IDLE, BAD_SEQ, fkv_seq_reserve(s->cache, s->foreign, LIVE_MOST))                                        \
    ROW(truncate_closed, IDLE, BAD_SEQ, fkv_seq_truncate(s->cache, s->closed, 0))                                                \
    ROW(close_closed, IDLE, BAD_SEQ, fkv_seq_close(s->cache, s->closed))                                                         \
    ROW(length_closed, IDLE, BAD_SEQ, fkv_seq_length(s->cache, s->closed, &s->out_n))                                            \
    ROW(insert_closed, IDLE, BAD_SEQ, fkv_prefix_insert(s->cache, s->closed, s->tokens, 0))                                      \
    ROW(begin_closed, IDLE, BAD_SEQ, fkv_step_begin(s->cache, ROWS({s->live, 1}, {s->closed, 1}), 2, &s->out_step))              \
    ROW(save_closed, IDLE, BAD_SEQ, fkv_seq_save(s->cache, s->closed, s->tokens, 0, s->written))                                 \
    ROW(fork_foreign, IDLE, BAD_SEQ, fkv_seq_fork(s->cache, s->foreign, LIVE_MOST, &s->out_seq))                                 \
    ROW(truncate_foreign, IDLE, BAD_SEQ, fkv_seq_truncate(s->cache, s->foreign, 0))                                              \
    ROW(close_foreign, IDLE, BAD_SEQ, fkv_seq_close(s->cache, s->foreign))                                                       \
    ROW(begin_foreign, IDLE, BAD_SEQ, fkv_step_begin(s->cache, ROWS({s->foreign, 1}), 1, &s->out_step))                          \
    ROW(save_foreign, IDLE, BAD_SEQ, fkv_seq_save(s->cache, s->foreign, s->tokens, 0, s->written))                               \
    ROW(close_zero, IDLE, BAD_SEQ, fkv_seq_close(s->cache, 0))                                                                   \
    ROW(length_zero, IDLE, BAD_SEQ, fkv_seq_length(s->cache, 0, &s->out_n))                                                      \
    ROW(begin_zero, IDLE, BAD_SEQ, fkv_step_begin(s->cache, ROWS({0, 1}), 1, &s->out_step))                                      \
    ROW(close_garbage, IDLE, BAD_SEQ, fkv_seq_close(s->cache, UINT64_MAX))                                                       \
    ROW(fork_garbage, IDLE, BAD_SEQ, fkv_seq_fork(s->cache, UINT64_C(0xdeadbeefcafe), LIVE_MOST, &s->out_seq))                   \
    ROW(truncate_next_generation, IDLE, BAD_SEQ, fkv_seq_truncate(s->cache, s->live + 65536, 0))                                 \
    /* wrong state */                                                                                                            \
    ROW(begin_in_a_step, BEGUN, BAD_STATE, fkv_step_begin(s->cache, ROWS({s->roomy, 1}), 1, &s->out_step))                       \
    ROW(seq_open_in_a_step, BEGUN, BAD_STATE, fkv_seq_open(s->cache, SEQ(.max_tokens = 1), &s->out_seq, &s->out_n))              \
    ROW(fork_in_a_step, HALF, BAD_STATE, fkv_seq_fork(s->cache, s->live, LIVE_MOST, &s->out_seq))                                \
    ROW(reserve_in_a_step, HALF, BAD_STATE, fkv_seq_reserve(s->cache, s->live, LIVE_MOST + 1))                                   \
    ROW(truncate_in_a_step, HALF, BAD_STATE, fkv_seq_truncate(s->cache, s->live, 59))                                            \
    ROW(close_twice_in_a_step, CLOSED_IN, BAD_SEQ, fkv_seq_close(s->cache, s->spare))                                            \
    ROW(length_of_one_closed_in_the_step, CLOSED_IN, BAD_SEQ, fkv_seq_length(s->cache, s->spare, &s->out_n))                     \
    ROW(truncate_of_one_closed_in_the_step, CLOSED_IN, BAD_STATE, fkv_seq_truncate(s->cache, s->spare, 0))                       \
    ROW(save_of_one_closed_in_the_step, CLOSED_IN, BAD_STATE, fkv_seq_save(s->cache, s->spare, s->tokens, 0, s->written))        \
    ROW(commit_with_a_close_and_nothing_written, CLOSED_IN, BAD_STATE, fkv_step_commit(s->step))                                 \
    ROW(insert_in_a_step, WRITTEN, BAD_STATE, fkv_prefix_insert(s->cache, s->live, s->tokens, 32))                               \
    ROW(clear_in_a_step, BEGUN, BAD_STATE, fkv_prefix_clear(s->cache))                                                           \
    ROW(save_in_a_step, WRITTEN, BAD_STATE, fkv_seq_save(s->cache, s->live, s->tokens, 0, s->written))                           \
    ROW(load_in_a_step, BEGUN, BAD_STATE, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->good, &s->out_seq))                   \
    ROW(attend_before_write, BEGUN, BAD_STATE, fkv_attend(s->step, 0, s->rows, s->out))                                          \
    ROW(attend_another_layer, HALF, BAD_STATE, fkv_attend(s->step, 1, s->rows, s->out))                                          \
    ROW(write_twice, HALF, BAD_STATE, fkv_write(s->step, 0, s->rows, s->rows))                                                   \
    ROW(commit_nothing_written, BEGUN, BAD_STATE, fkv_step_commit(s->step))                                                      \
    ROW(commit_half_written, HALF, BAD_STATE, fkv_step_commit(s->step))                                                          \
    ROW(commit_twice, COMMITTED, BAD_STATE, fkv_step_commit(s->step))                                                            \
    ROW(abort_after_commit, COMMITTED, BAD_STATE, fkv_step_abort(s->step))                                                       \
    ROW(write_after_commit, COMMITTED, BAD_STATE, fkv_write(s->step, 0, s->rows, s->rows))                                       \
    ROW(attend_after_commit, COMMITTED, BAD_STATE, fkv_attend(s->step, 0, s->rows, s->out))                                      \
    ROW(commit_after_abort, ABORTED, BAD_STATE, fkv_step_commit(s->step))                                                        \
    ROW(abort_twice, ABORTED, BAD_STATE, fkv_step_abort(s->step))                                                                \
    ROW(write_after_abort, ABORTED, BAD_STATE, fkv_write(s->step, 1, s->rows, s->rows))                                          \
    ROW(attend_after_abort, ABORTED, BAD_STATE, fkv_attend(s->step, 1, s->rows, s->out))                                         \
    /* does not fit */                                                                                                           \
    ROW(begin_beyond_the_reservation, IDLE, SEQ_FULL,                                                                            \
        fkv_step_begin(s->cache, ROWS({s->roomy, 1}, {s->live, LIVE_MOST - LIVE_TOKENS + 1}), 2, &s->out_step))                  \
    ROW(begin_far_beyond, IDLE, SEQ_FULL, fkv_step_begin(s->cache, ROWS({s->live, UINT32_MAX}), 1, &s->out_step))                \
    ROW(begin_beyond_the_step, IDLE, STEP_FULL, fkv_step_begin(s->cache, ROWS({s->roomy, 33}), 1, &s->out_step))                 \
    ROW(begin_beyond_the_step_together, IDLE, STEP_FULL,                                                                         \
        fkv_step_begin(s->cache, ROWS({s->live, 20}, {s->roomy, 13}), 2, &s->out_step))                                          \
    ROW(seq_open_longer_than_any, IDLE, POOL_FULL,                                                                               \
        fkv_seq_open(s->cache, SEQ(.max_tokens = MAX_TOKENS + 1), &s->out_seq, &s->out_n))                                       \
    ROW(seq_open_promised_to_others, IDLE, POOL_FULL,                                                                            \
        fkv_seq_open(s->cache, SEQ(.max_tokens = MAX_TOKENS), &s->out_seq, &s->out_n))                                           \
    ROW(fork_longer_than_any, IDLE, POOL_FULL, fkv_seq_fork(s->cache, s->live, MAX_TOKENS + 1, &s->out_seq))                     \
    ROW(reserve_longer_than_any, IDLE, POOL_FULL, fkv_seq_reserve(s->cache, s->live, MAX_TOKENS + 1))                            \
    ROW(reserve_promised_to_others, IDLE, POOL_FULL, fkv_seq_reserve(s->cache, s->roomy, MAX_TOKENS))                            \
    ROW(fork_promised_to_others, IDLE, POOL_FULL, fkv_seq_fork(s->cache, s->live, MAX_TOKENS, &s->out_seq))                      \
    ROW(load_longer_than_any, IDLE, POOL_FULL, fkv_seq_load(s->cache, SEQ(.max_tokens = MAX_TOKENS + 1), s->good, &s->out_seq))  \
    ROW(seq_open_one_too_many, CROWDED, SEQS_FULL, fkv_seq_open(s->cache, SEQ(.max_tokens = 1), &s->out_seq, &s->out_n))         \
    ROW(fork_one_too_many, CROWDED, SEQS_FULL, fkv_seq_fork(s->cache, s->live, LIVE_MOST, &s->out_seq))                          \
    ROW(load_one_too_many, CROWDED, SEQS_FULL, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->good, &s->out_seq))              \
    ROW(load_for_fewer_tokens, IDLE, SEQ_FULL, fkv_seq_load(s->cache, SEQ(.max_tokens = 59), s->good, &s->out_seq))              \
    ROW(truncate_into_the_dropped_window, IDLE, GONE, fkv_seq_truncate(s->cache, s->live, 30))                                   \
    ROW(save_from_the_dropped_window, IDLE, GONE, fkv_seq_save(s->cache, s->live, s->tokens, 30, s->written))                    \
    /* files */                                                                                                                  \
    ROW(load_missing, IDLE, IO, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->missing, &s->out_seq))                          \
    ROW(load_a_folder, IDLE, FILE_FORMAT, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->folder, &s->out_seq))                 \
    ROW(load_a_text, IDLE, FILE_FORMAT, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->text, &s->out_seq))                     \
    ROW(load_newer, IDLE, FILE_VERSION, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->newer, &s->out_seq))                    \
    ROW(load_damaged, IDLE, FILE_DAMAGED, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->damaged, &s->out_seq))                \
    ROW(load_other_weights, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->weights, &s->out_seq))          \
    ROW(load_other_rope, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->rope, &s->out_seq))                \
    ROW(load_other_codec, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->codec, &s->out_seq))              \
    ROW(load_other_rotation, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->rotation, &s->out_seq))        \
    ROW(load_other_shape, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->shape, &s->out_seq))              \
    ROW(load_other_seed, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->seed, &s->out_seq))                \
    ROW(load_other_page_type, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->page_type, &s->out_seq))      \
    ROW(load_other_page_size, IDLE, FILE_FOREIGN, fkv_seq_load(s->cache, SEQ(.max_tokens = 64), s->pages, &s->out_seq))          \
    ROW(save_into_no_folder, IDLE, IO, fkv_seq_save(s->cache, s->live, s->tokens, 0, s->no_folder))                              \
    ROW(save_over_a_folder, IDLE, IO, fkv_seq_save(s->cache, s->live, s->tokens, 0, s->folder))                                  \
    ROW(inspect_missing, IDLE, IO, fkv_file_inspect(s->missing, false, &s->out_info))                                            \
    ROW(inspect_a_text, IDLE, FILE_FORMAT, fkv_file_inspect(s->text, false, &s->out_info))                                       \
    ROW(inspect_damaged, IDLE, FILE_DAMAGED, fkv_file_inspect(s->damaged, true, &s->out_info))                                   \
    ROW(file_tokens_missing, IDLE, IO, fkv_file_tokens(s->missing, s->strange, 1, &s->out_n))                                    \
    ROW(file_tokens_of_a_text, IDLE, FILE_FORMAT, fkv_file_tokens(s->text, s->strange, 1, &s->out_n))

#define AS_FUNCTION(name, when, status, call)                                                                                    \
    static fkv_status name(stage *s) { return (void)s, (call); }
BAD_CALLS(AS_FUNCTION)

#define AS_ROW(name, when, status, call) {#name, name, when, FKV_##status},
static const struct {
    const char *name;
    fkv_status (*call)(stage *s);
    moment when;
    fkv_status expected;
} CALLS[] = {BAD_CALLS(AS_ROW)};

/* ---- setup ---- */

static void save_as(const fkv_config *config, const uint32_t *tokens, char *path, const char *name) {
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, config));
    fkv_seq seq = cache_fixture_seq(&w, LIVE_TOKENS);
    cache_fixture_run(&w, seq, tokens, 0, LIVE_TOKENS, STEP_TOKENS, NULL);
    ck_ok(fkv_seq_save(w.cache, seq, tokens, 0, cache_path(path, name)));
    cache_fixture_close(&w);
}

static void flip_byte(const char *from, const char *to, long at) {
    FILE *in = fopen(from, "rb");
    FILE *out = fopen(to, "wb");
    ck_assert(in != NULL && out != NULL);
    long n = 0;
    for (int c = fgetc(in); c != EOF; c = fgetc(in), n++) ck_assert_int_ne(fputc(n == at ? c ^ 0xff : c, out), EOF);
    ck_assert_int_eq(fclose(in), 0);
    ck_assert_int_eq(fclose(out), 0);
    ck_assert_int_lt(at, n);
}

static void make_files(stage *s) {
    enum { VERSION_AT = 8 }; /* offset of the version number, which follows the magic number */
    fkv_config config = good_config();
    save_as(&config, s->tokens, s->good, "good.fkv");
    config.weights_id[31] = 1;
    save_as(&config, s->tokens, s->weights, "weights.fkv");
    config = good_config();
    (void)snprintf(config.rope_id, sizeof config.rope_id, "neox base=1000000");
    save_as(&config, s->tokens, s->rope, "rope.fkv");
    config = good_config();
    config.rotate = FKV_ROTATE_KV;
    save_as(&config, s->tokens, s->rotation, "rotation.fkv");
    config = good_config();
    config.rotation_seed++;
    save_as(&config, s->tokens, s->seed, "seed.fkv");
    config = good_config();
    config.page_type = FKV_BF16;
    save_as(&config, s->tokens, s->page_type, "page_type.fkv");
    config = good_config();
    config.page_tokens = 2 * PAGE;
    save_as(&config, s->tokens, s->pages, "pages.fkv");
    fkv_layer_config layers[N_OF(LAYERS)];
    memcpy(layers, LAYERS, sizeof layers);
    config = good_config();
    config.layers = layers;
    layers[0].v.bits = 8;
    save_as(&config, s->tokens, s->codec, "codec.fkv");
    layers[0] = LAYERS[0];
    layers[1].n_sinks = 5;
    save_as(&config, s->tokens, s->shape, "shape.fkv");

    fkv_file_info info;
    ck_ok(fkv_file_inspect(s->good, true, &info));
    flip_byte(s->good, cache_path(s->damaged, "damaged.fkv"), (long)info.file_bytes - 100);
    flip_byte(s->good, cache_path(s->newer, "newer.fkv"), VERSION_AT);
    FILE *text = fopen(cache_path(s->text, "text.fkv"), "w");
    ck_assert_ptr_nonnull(text);
    ck_assert_int_gt(fprintf(text, "%500s", "this is not a page file"), 0);
    ck_assert_int_eq(fclose(text), 0);
    (void)cache_path(s->missing, "missing.fkv");
    (void)cache_path(s->no_folder, "no-folder/written.fkv");
    (void)cache_path(s->folder, ".");
    (void)cache_path(s->written, "written.fkv");
}

static void open_stage(stage *s) {
    fkv_config config = good_config();
    memset(s, 0, sizeof *s);
    ck_ok(cache_fixture_open(&s->w, &config));
    ck_ok(cache_fixture_open(&s->other, &config));
    s->cache = s->w.cache;
    s->rows = s->w.rows[CACHE_K];
    cache_tokens(1, s->tokens, MAX_TOKENS);
    cache_tokens(2, s->strange, MAX_TOKENS);
    make_files(s);
    s->closed = cache_fixture_seq(&s->w, 10);
    ck_ok(fkv_seq_close(s->cache, s->closed));
    s->live = cache_fixture_seq(&s->w, LIVE_MOST);
    s->roomy = cache_fixture_seq(&s->w, ROOMY_MOST);
    cache_fixture_run(&s->w, s->live, s->tokens, 0, LIVE_TOKENS, STEP_TOKENS, NULL);
    ck_ok(fkv_prefix_insert(s->cache, s->live, s->tokens, LIVE_TOKENS));
    for (int i = 0; i < 3; i++) s->foreign = cache_fixture_seq(&s->other, 10);
    ck_assert(s->foreign != s->live && s->foreign != s->roomy && s->foreign != s->closed);
}

static void enter(stage *s, moment when) {
    cache_chunk chunk = {s->live, s->strange, LIVE_TOKENS, 1, NULL};
    if (when == COMMITTED) {
        s->spare = cache_fixture_seq(&s->w, 4);
        chunk = (cache_chunk){s->spare, s->strange, 0, 1, NULL};
    }
    if (when == CROWDED)
        for (uint32_t n = 2; n < MAX_SEQS; n++) s->crowd[n] = cache_fixture_seq(&s->w, 1);
    if (when == CLOSED_IN) {
        s->spare = cache_fixture_seq(&s->w, 4);
        ck_ok(fkv_step_begin(s->cache, &(fkv_row){s->spare, 1}, 1, &s->step));
        ck_ok(fkv_seq_close(s->cache, s->spare));
        return;
    }
    if (when == IDLE || when == CROWDED) return;
    ck_ok(fkv_step_begin(s->cache, &(fkv_row){chunk.seq, 1}, 1, &s->step));
    if (when == BEGUN) return;
    ck_ok(cache_fixture_write(&s->w, s->step, &chunk, 1, 0));
    if (when == HALF) return;
    ck_ok(cache_fixture_write(&s->w, s->step, &chunk, 1, 1));
    if (when == COMMITTED) ck_ok(fkv_step_commit(s->step));
    if (when == ABORTED) ck_ok(fkv_step_abort(s->step));
}

static void leave(stage *s, moment when) {
    if (when == BEGUN || when == HALF || when == WRITTEN || when == CLOSED_IN) ck_ok(fkv_step_abort(s->step));
    if (when == COMMITTED) ck_ok(fkv_seq_close(s->cache, s->spare));
    if (when == CROWDED)
        for (uint32_t n = 2; n < MAX_SEQS; n++) ck_ok(fkv_seq_close(s->cache, s->crowd[n]));
}

static void clear_out(stage *s) {
    s->out_seq = UNTOUCHED;
    s->out_n = UNTOUCHED;
    s->out_step = (fkv_step *)(void *)s;
    memset(&s->out_stats, UNTOUCHED, sizeof s->out_stats);
    memset(&s->out_info, UNTOUCHED, sizeof s->out_info);
    memset(s->out, UNTOUCHED, sizeof s->out);
}

static bool all_untouched(const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const uint8_t *)bytes)[i] != UNTOUCHED) return false;
    return true;
}

static bool out_is_clear(const stage *s) {
    return s->out_seq == UNTOUCHED && s->out_n == UNTOUCHED && s->out_step == (const fkv_step *)(const void *)s &&
           all_untouched(&s->out_stats, sizeof s->out_stats) && all_untouched(&s->out_info, sizeof s->out_info) &&
           all_untouched(s->out, sizeof s->out);
}

static void close_stage(stage *s) {
    cache_fixture_close(&s->w);
    cache_fixture_close(&s->other);
}

START_TEST(bad_calls_return_their_status_and_change_nothing) {
    static stage s;
    open_stage(&s);
    for (size_t i = 0; i < N_OF(CALLS); i++) {
        enter(&s, CALLS[i].when);
        clear_out(&s);
        ck_status(fkv_seq_length(s.cache, 987654321, &s.out_n), FKV_BAD_SEQ);
        char message[512];
        (void)snprintf(message, sizeof message, "%s", fkv_message());
        fkv_stats before = cache_fixture_stats(&s.w);

        fkv_status got = CALLS[i].call(&s);
        ck_assert_msg(got == CALLS[i].expected, "%s: returned %s, expected %s (%s)", CALLS[i].name, fkv_status_name(got),
                      fkv_status_name(CALLS[i].expected), fkv_message());
        ck_assert_msg(fkv_message()[0] != 0 && strcmp(fkv_message(), message) != 0, "%s: no error message", CALLS[i].name);
        fkv_stats after = cache_fixture_stats(&s.w);
        ck_assert_msg(memcmp(&before, &after, sizeof after) == 0, "%s: changed the statistics", CALLS[i].name);
        ck_assert_msg(fkv_cache_consistent(s.cache), "%s: broke an invariant", CALLS[i].name);
        ck_assert_msg(out_is_clear(&s), "%s: wrote an output parameter", CALLS[i].name);
        ck_assert_msg(cache_fixture_length(&s.w, s.live) == LIVE_TOKENS, "%s: changed a length", CALLS[i].name);
        ck_assert_msg(cache_fixture_length(&s.w, s.roomy) == 0, "%s: changed a length", CALLS[i].name);
        leave(&s, CALLS[i].when);
    }
    printf("%zu bad calls\n", N_OF(CALLS));
    fkv_file_info none;
    ck_status(fkv_file_inspect(s.written, false, &none), FKV_IO); /* the rejected saves must not have left a file behind */

    /* runs the same tokens in an undisturbed cache */
    cache_fixture calm;
    fkv_config config = good_config();
    ck_ok(cache_fixture_open(&calm, &config));
    fkv_seq seq = cache_fixture_seq(&calm, LIVE_MOST);
    uint8_t *expected = malloc(LIVE_MOST * calm.output_bytes);
    uint8_t *got = malloc(LIVE_MOST * calm.output_bytes);
    ck_assert(expected != NULL && got != NULL);
    cache_fixture_run(&calm, seq, s.tokens, 0, LIVE_TOKENS, STEP_TOKENS, expected);
    cache_fixture_run(&calm, seq, s.tokens, LIVE_TOKENS, LIVE_MOST, 3, expected);
    cache_fixture_run(&s.w, s.live, s.tokens, LIVE_TOKENS, LIVE_MOST, 3, got);
    size_t from = LIVE_TOKENS * calm.output_bytes;
    ck_assert(memcmp(got + from, expected + from, LIVE_MOST * calm.output_bytes - from) == 0);
    free(expected);
    free(got);
    cache_fixture_close(&calm);
    close_stage(&s);
}
END_TEST

START_TEST(null_is_allowed_where_documented) {
    fkv_config config = good_config();
    cache_fixture w;
    fkv_seq seq = 0;
    ck_assert(!fkv_cache_consistent(NULL));
    fkv_cache_close(NULL);
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_open(w.cache, SEQ(.max_tokens = 20), &seq, NULL));
    ck_ok(fkv_prefix_insert(w.cache, seq, (const uint32_t[]){0}, 0));
    fkv_step *step = NULL;
    ck_ok(fkv_step_begin(w.cache, ROWS({seq, 3}), 1, &step));
    cache_fixture_close(&w); /* closes the cache while sequences and a step are open */
    for (int status = -70; status <= 0; status++) ck_assert_ptr_nonnull(fkv_status_name((fkv_status)status));
    ck_assert_str_eq(fkv_status_name(FKV_FILE_FOREIGN), "FKV_FILE_FOREIGN");
}
END_TEST

TEST_MAIN("bad calls", bad_calls_return_their_status_and_change_nothing, null_is_allowed_where_documented)
