/* Unit tests of pager sequences: reservations, prompt matching, closing during a step, and sequence IDs. test_step_close.c tests
 * closing during a step with the public API and with K, V and Q rows.
 */
#include "pager_fixture.h"

/* Pager configurations. The fields are page_tokens, max_seqs, max_seq_tokens, max_step_tokens and n_groups, followed by {window,
 * n_sinks, n_pages} for each group. */
static const fkv_pager_spec full_spec = {16, 4, 256, 64, 1, {{0, 0, 16}}};
static const fkv_pager_spec window_spec = {16, 2, 100000, 24, 1, {{40, 20, 16}}};
static const fkv_pager_spec mixed_spec = {16, 4, 512, 32, 3, {{64, 4, 40}, {0, 0, 40}, {24, 0, 40}}};

static void reserve(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens) {
    ck_ok(fkv_pager_reserve(pager, seq, max_tokens));
    ck_assert(fkv_pager_consistent(pager));
}

static fkv_stats all_stats(const fkv_pager *pager) {
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    return stats;
}

/* ---- reserve ---- */

START_TEST(reserve_can_grow_and_shrink_the_promise) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = open_seq(pager, 32);
    grow(pager, seq, 32);
    ck_status(fkv_pager_step_begin(pager, &(fkv_row){seq, 1}, 1), FKV_SEQ_FULL);
    reserve(pager, seq, 100);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 5);
    grow(pager, seq, 68);
    ck_status(fkv_pager_step_begin(pager, &(fkv_row){seq, 1}, 1), FKV_SEQ_FULL);
    reserve(pager, seq, 256);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 9);
    reserve(pager, seq, 256);
    reserve(pager, seq, 113);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 1);
    reserve(pager, seq, 100);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
    fkv_seq other = open_seq(pager, 144); /* released pages are available to other sequences */
    grow(pager, other, 144);
    ck_assert_uint_eq(stats_of(pager, 0).free, 0);
}
END_TEST

START_TEST(reserve_that_does_not_fit_fails_and_changes_nothing) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = open_seq(pager, 64);
    grow(pager, seq, 20);
    (void)open_seq(pager, 128);
    pager_fixture_snapshot(pager);
    ck_status(fkv_pager_reserve(pager, seq, 129), FKV_POOL_FULL);
    ck_assert_msg(strstr(fkv_message(),
                         "129 tokens instead of 64: this needs 5 more pages of group 0, but only 4 of this group's 16") != NULL,
                  "%s", fkv_message());
    ck_status(fkv_pager_reserve(pager, seq, 257), FKV_POOL_FULL);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "max_tokens is 257 but the cache holds at most 256 tokens"));
    ck_status(fkv_pager_reserve(pager, seq, 19), FKV_BAD_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "max_tokens is 19 but the sequence has 20 tokens"));
    ck_assert(pager_fixture_unchanged(pager));
    reserve(pager, seq, 128);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 14);
}
END_TEST

START_TEST(new_writer_of_a_shared_page_is_promised_a_copy) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 32);
    grow(pager, parent, 10);
    fkv_seq child = fork_seq(pager, parent, 10); /* the child never writes, so the parent will copy the shared page */
    ck_assert_uint_eq(stats_of(pager, 0).promised, 2);
    reserve(pager, child, 16); /* both sequences will write: one copies the shared page, the other writes in place */
    ck_assert_uint_eq(stats_of(pager, 0).promised, 2);
    fkv_seq third = fork_seq(pager, parent, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 3);
    reserve(pager, parent, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 1);
    reserve(pager, child, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
    reserve(pager, third, 11);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 1);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){third, 1}, 1));
    uint32_t n_copies = 0;
    (void)fkv_pager_step_copies(pager, &n_copies);
    ck_assert_uint_eq(n_copies, 1);
    commit(pager);
}
END_TEST

START_TEST(reserve_beyond_a_window_costs_nothing) {
    fkv_pager_spec spec = window_spec;
    uint32_t cap = fkv_pager_window_pages(&spec, 0).most;
    spec.groups[0].n_pages = 2 * cap - 1;
    fkv_pager *pager = pager_fixture_open(&spec);
    fkv_seq a = open_seq(pager, 16);
    fkv_seq b = open_seq(pager, 16);
    reserve(pager, a, 100000);
    ck_assert_uint_eq(stats_of(pager, 0).promised, cap + 1);
    pager_fixture_snapshot(pager);
    ck_status(fkv_pager_reserve(pager, b, 100000), FKV_POOL_FULL);
    ck_assert(pager_fixture_unchanged(pager));
    reserve(pager, b, (cap - 1) * 16);
    grow(pager, a, 1000);
    grow(pager, b, (cap - 1) * 16);
    reserve(pager, a, 1000);
    ck_status(fkv_pager_reserve(pager, b, 100000), FKV_POOL_FULL); /* sequence a still holds its window pages */
    close_seq(pager, a);
    reserve(pager, b, 100000);
    grow(pager, b, 1000);
}
END_TEST

START_TEST(reserve_evicts_cached_pages_and_then_nodes_in_use) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[128];
    text(1, tokens, 128);
    keep_tokens(pager, 0, tokens, 128);
    fkv_seq seq = open_on(pager, 0, 128, tokens, 32, 32);
    ck_ok(fkv_pager_truncate(pager, seq, 20));
    reserve(pager, seq,
            20); /* the tree keeps the page with tokens 16 to 31; the sequence holds this page and does not write to it */
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
    fkv_seq other = open_seq(pager, 128);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 8);
    /* of the 16 pages, 2 are held, 8 are promised and 6 are left; the call needs these 6 pages, and would need one more for a
     * copy of the shared page, so the tree must release that page */
    reserve(pager, seq, 128);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 14);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 1);
    grow(pager, seq, 108);
    grow(pager, other, 128);
    ck_assert_uint_eq(stats_of(pager, 0).free, 0);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
}
END_TEST

START_TEST(reserve_over_several_groups_keeps_all_counts) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_seq seq = open_seq(pager, 50);
    grow(pager, seq, 50);
    fkv_seq child = fork_seq(pager, seq, 50);
    for (uint32_t n = 50; n < 400; n += 27) {
        reserve(pager, seq, n);
        reserve(pager, child, 450 - n);
        ck_ok(fkv_pager_step_begin(pager, &(fkv_row){child, 1}, 1));
        ck_assert(fkv_pager_consistent(pager));
        ck_ok(fkv_pager_step_abort(pager));
    }
    grow(pager, child, length_of(pager, child) / 2);
}
END_TEST

/* ---- match ---- */

static uint32_t matched(fkv_pager *pager, uint64_t tenant, uint32_t max_tokens, const uint32_t *prompt, uint32_t n_prompt) {
    uint32_t n_shared = UINT32_MAX;
    fkv_seq_config config = {.max_tokens = max_tokens, .tenant = tenant, .prompt = prompt, .n_prompt = n_prompt};
    pager_fixture_snapshot(pager);
    ck_ok(fkv_pager_match(pager, &config, &n_shared));
    ck_assert(pager_fixture_unchanged(pager));
    return n_shared;
}

START_TEST(match_predicts_what_open_shares_and_changes_nothing) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[128];
    uint32_t other[128];
    text(1, tokens, 128);
    text(1, other, 128);
    other[40]++;
    keep_tokens(pager, 7, tokens, 100);
    const uint32_t lengths[] = {0, 15, 16, 31, 96, 97, 128};
    for (uint32_t i = 0; i < 7; i++) {
        uint32_t found = matched(pager, 7, 128, lengths[i] == 0 ? NULL : tokens, lengths[i]);
        ck_assert_uint_eq(found, fkv_min_u32(lengths[i] / 16 * 16, 96));
        close_seq(pager, open_on(pager, 7, 128, lengths[i] == 0 ? NULL : tokens, lengths[i], found));
    }
    ck_assert_uint_eq(matched(pager, 7, 128, other, 128), 32);
    ck_assert_uint_eq(matched(pager, 8, 128, tokens, 128), 0);
    ck_assert_uint_eq(matched(pager, 7, 50, tokens, 128), 48); /* max_tokens is smaller than the prompt */
    ck_assert_uint_eq(all_stats(pager).hits, 5);
}
END_TEST

START_TEST(match_needs_no_free_pages_and_works_in_a_step) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 64);
    fkv_seq seq = open_seq(pager, 192);
    fkv_seq out = 0;
    fkv_seq_config config = {.max_tokens = 128, .prompt = tokens, .n_prompt = 64};
    ck_status(fkv_pager_open(pager, &config, &out, NULL), FKV_POOL_FULL);
    ck_assert_uint_eq(matched(pager, 0, 128, tokens, 64), 64);
    ck_assert_uint_eq(matched(pager, 0, 100000, tokens, 64), 64);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, 3}, 1));
    ck_assert_uint_eq(matched(pager, 0, 128, tokens, 64), 64);
    commit(pager);
}
END_TEST

START_TEST(match_does_not_change_the_age_of_prefixes) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t older[64];
    uint32_t newer[64];
    text(1, older, 64);
    text(2, newer, 64);
    keep_tokens(pager, 0, older, 64);
    keep_tokens(pager, 0, newer, 64);
    for (int i = 0; i < 10; i++) ck_assert_uint_eq(matched(pager, 0, 64, older, 64), 64);
    fkv_seq seq = open_seq(pager, 192);
    grow(pager, seq, 192);
    ck_assert_uint_eq(matched(pager, 0, 64, older, 64), 0);
    ck_assert_uint_eq(matched(pager, 0, 64, newer, 64), 64);
}
END_TEST

/* ---- closing during a step ---- */

static void close_in_step(fkv_pager *pager, fkv_seq seq) {
    fkv_stats before = all_stats(pager);
    uint32_t n_tokens = 0;
    close_seq(pager, seq);
    fkv_stats after = all_stats(pager);
    ck_assert_uint_eq(after.seqs, before.seqs - 1);
    ck_assert(memcmp(after.groups, before.groups, sizeof after.groups) ==
              0); /* pages and reservations are kept until the step ends */
    ck_status(fkv_pager_close(pager, seq), FKV_BAD_SEQ);
    ck_status(fkv_pager_length(pager, seq, &n_tokens), FKV_BAD_SEQ);
}

START_TEST(sequence_closed_in_a_step_is_freed_at_commit) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq kept = open_seq(pager, 64);
    fkv_seq gone = open_seq(pager, 64);
    grow(pager, kept, 20);
    grow(pager, gone, 20);
    uint32_t slot = slot_of(pager, gone);
    fkv_row rows[] = {{gone, 17}, {kept, 1}};
    ck_ok(fkv_pager_step_begin(pager, rows, 2));
    uint32_t page = page_of(pager, gone, 0, 1);
    close_in_step(pager, gone);
    ck_assert_uint_eq(fkv_page_at(fkv_pager_view(pager, 0, slot), 1), page); /* the device still reads and writes this page */
    uint32_t n_rows = 0;
    ck_assert_uint_eq(fkv_pager_step_rows(pager, &n_rows)[0].slot, slot);
    ck_assert_uint_eq(n_rows, 2);
    commit(pager);
    fkv_stats stats = all_stats(pager);
    ck_assert_uint_eq(stats.seqs, 1);
    ck_assert_uint_eq(stats.steps, 3);
    ck_assert_uint_eq(stats.tokens, 41); /* the 17 new tokens of the closed sequence are discarded */
    ck_assert_uint_eq(stats.groups[0].held, 2);
    ck_assert_uint_eq(stats.groups[0].promised, 2);
    ck_assert_uint_eq(length_of(pager, kept), 21);
    ck_status(fkv_pager_truncate(pager, gone, 0), FKV_BAD_SEQ);
    for (int i = 0; i < 3; i++) ck_assert_uint_ne(open_seq(pager, 64), gone);
}
END_TEST

START_TEST(sequence_closed_in_a_step_is_freed_at_abort) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_seq kept = open_seq(pager, 100);
    grow(pager, kept, 21);
    fkv_seq in_step = fork_seq(pager, kept, 90);
    fkv_seq outside = fork_seq(pager, kept, 80);
    ck_assert_uint_lt(slot_of(pager, in_step), slot_of(pager, outside));
    pager_fixture_snapshot(pager);
    fkv_row rows[] = {{in_step, 9}, {kept, 12}};
    ck_ok(fkv_pager_step_begin(pager, rows, 2));
    close_in_step(pager, outside);
    close_in_step(pager, in_step);
    ck_ok(fkv_pager_step_abort(pager));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert_uint_eq(all_stats(pager).seqs, 1);
    ck_assert_uint_eq(length_of(pager, kept), 21);

    /* the state is the same as after closing the two sequences outside of a step */
    uint8_t *ended = malloc(fixture.bytes);
    ck_assert_ptr_nonnull(ended);
    memcpy(ended, fixture.block, fixture.bytes);
    pager_fixture_restore();
    close_seq(pager, in_step);
    close_seq(pager, outside);
    pager_fixture_snapshot(pager);
    memcpy(fixture.block, ended, fixture.bytes);
    free(ended);
    ck_assert(pager_fixture_unchanged(pager));
}
END_TEST

START_TEST(all_sequences_can_be_closed_in_a_step) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[32];
    text(1, tokens, 32);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq seqs[4];
    fkv_row rows[4];
    for (int i = 0; i < 4; i++) {
        seqs[i] = open_on(pager, 0, 64, tokens, 32, 32);
        rows[i] = (fkv_row){seqs[i], 10};
    }
    fkv_seq out = 0;
    ck_ok(fkv_pager_step_begin(pager, rows, 3));
    for (int i = 0; i < 4; i++) close_in_step(pager, seqs[i]);
    /* slots and pages are not released before the step ends */
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 1}, &out, NULL), FKV_BAD_STATE);
    ck_status(fkv_pager_insert(pager, seqs[0], tokens, 32), FKV_BAD_STATE);
    commit(pager);
    fkv_stats stats = all_stats(pager);
    ck_assert_uint_eq(stats.seqs, 0);
    ck_assert_uint_eq(stats.groups[0].free, 14);
    /* only the pages of the prefix are cached, and none of the rows in the step */
    ck_assert_uint_eq(stats.groups[0].cached, 2);
    ck_assert_uint_eq(stats.groups[0].promised, 0);
    ck_assert_uint_eq(stats.tokens, 32);
    for (int i = 0; i < 4; i++) (void)open_seq(pager, 64);
}
END_TEST

/* ---- sequence IDs ---- */

static fkv_pager *second_pager(void **block) {
    fkv_pager *pager = NULL;
    fkv_carve carve = {0};
    fkv_pager_layout(&carve, &full_spec, &pager);
    size_t bytes = (size_t)fkv_align_up(carve.used, FKV_CARVE_ALIGN);
    *block = aligned_alloc(FKV_CARVE_ALIGN, bytes);
    ck_assert_ptr_nonnull(*block);
    carve = (fkv_carve){.base = *block, .size = bytes};
    fkv_pager_layout(&carve, &full_spec, &pager);
    return pager;
}

/* Keeps one sequence open in each of two pagers while others are opened and closed. The global sequence counter is set to values
 * near 2^8, 2^16 and so on, where narrower IDs would wrap around and be reused.
 */
START_TEST(sequence_ids_are_unique_across_pagers_and_never_reused) {
    void *block = NULL;
    fkv_pager *a = pager_fixture_open(&full_spec);
    fkv_pager *b = second_pager(&block);
    uint64_t before = atomic_load(&fkv_sequences_opened);
    const uint32_t bits[] = {8, 16, 24, 32, 40, 47, 48};
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++) {
        atomic_store(&fkv_sequences_opened, i == 0 ? 0 : 99);
        fkv_seq first_of_a = open_seq(a, 16);
        fkv_seq first_of_b = open_seq(b, 16);
        fkv_seq closed = 0;
        atomic_store(&fkv_sequences_opened, (UINT64_C(1) << bits[i]) - 4);
        for (int round = 0; round < 8; round++) {
            uint32_t slot = 0;
            fkv_pager *one = round % 2 == 0 ? a : b;
            fkv_pager *other = round % 2 == 0 ? b : a;
            fkv_seq seq = open_seq(one, 16);
            ck_assert(seq >> 16 != 0 && seq != closed && seq != first_of_a && seq != first_of_b);
            ck_ok(fkv_pager_slot(one, seq, &slot));
            ck_status(fkv_pager_slot(other, seq, &slot), FKV_BAD_SEQ);
            close_seq(one, seq);
            ck_status(fkv_pager_slot(one, seq, &slot), FKV_BAD_SEQ);
            if (closed != 0) ck_status(fkv_pager_slot(other, closed, &slot), FKV_BAD_SEQ);
            closed = seq;
        }
        close_seq(a, first_of_a);
        close_seq(b, first_of_b);
    }
    atomic_store(&fkv_sequences_opened, before);
    free(block);
    pager_fixture_close();
}
END_TEST

TEST_MAIN("sequence", reserve_can_grow_and_shrink_the_promise, reserve_that_does_not_fit_fails_and_changes_nothing,
          new_writer_of_a_shared_page_is_promised_a_copy, reserve_beyond_a_window_costs_nothing,
          reserve_evicts_cached_pages_and_then_nodes_in_use, reserve_over_several_groups_keeps_all_counts,
          match_predicts_what_open_shares_and_changes_nothing, match_needs_no_free_pages_and_works_in_a_step,
          match_does_not_change_the_age_of_prefixes, sequence_closed_in_a_step_is_freed_at_commit,
          sequence_closed_in_a_step_is_freed_at_abort, all_sequences_can_be_closed_in_a_step,
          sequence_ids_are_unique_across_pagers_and_never_reused)
