/* Unit tests of the pager: sequences, steps, forks, truncation and windows. test_sequence.c tests reservations, matching, closing
 * during a step and sequence IDs. test_prefix.c tests the prefix tree, and test_pager_model.c compares random operations with a
 * model.
 */
#include "pager_fixture.h"

#include <pthread.h>

/* Pager configurations. The fields are page_tokens, max_seqs, max_seq_tokens, max_step_tokens and n_groups, followed by {window,
 * n_sinks, n_pages} for each group. */
static const fkv_pager_spec full_spec = {16, 4, 256, 64, 1, {{0, 0, 16}}};
static const fkv_pager_spec window_spec = {16, 2, 100000, 24, 1, {{40, 20, 16}}};
static const fkv_pager_spec mixed_spec = {16, 4, 512, 32, 3, {{64, 4, 40}, {0, 0, 40}, {24, 0, 40}}};

/* ---- layout ---- */

START_TEST(counting_and_carving_need_the_same_bytes) {
    fkv_pager *pager = (fkv_pager *)&fixture;
    fkv_carve count = {0};
    fkv_pager_layout(&count, &mixed_spec, &pager);
    ck_assert_ptr_null(pager);
    pager = pager_fixture_open(&mixed_spec);
    fkv_carve carve = {.base = fixture.block, .size = fixture.bytes};
    fkv_pager_layout(&carve, &mixed_spec, &pager);
    ck_assert_uint_eq(carve.used, count.used);
    ck_assert_ptr_nonnull(pager);
}
END_TEST

START_TEST(layout_sizes_beyond_64_bits_set_overflow) {
    fkv_pager *pager = NULL;
    fkv_carve count = {.used = UINT64_MAX - 1000};
    fkv_pager_layout(&count, &mixed_spec, &pager);
    ck_assert(count.overflow);
}
END_TEST

START_TEST(all_pages_of_a_new_pager_are_free) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.n_groups, 3);
    ck_assert_uint_eq(stats.seqs, 0);
    for (uint32_t g = 0; g < 3; g++) {
        ck_assert_uint_eq(stats.groups[g].pages, 40);
        ck_assert_uint_eq(stats.groups[g].free, 40);
        ck_assert_uint_eq(stats.groups[g].promised, 0);
    }
}
END_TEST

/* ---- admission ---- */

START_TEST(open_promises_pages_for_max_tokens) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq first = open_seq(pager, 161);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 11);
    ck_assert_uint_eq(stats_of(pager, 0).free, 16);
    fkv_seq second = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 81}, &second, NULL), FKV_POOL_FULL);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "81 tokens needs 6 pages of group 0, but only 5 of this group's 16"));
    second = open_seq(pager, 80);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 16);
    close_seq(pager, first);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 5);
    close_seq(pager, second);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
}
END_TEST

START_TEST(admitted_sequences_never_run_out_of_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seqs[4];
    for (int i = 0; i < 4; i++) seqs[i] = open_seq(pager, 64);
    for (uint32_t round = 0; round < 64; round += 16) {
        fkv_row rows[4];
        for (int i = 0; i < 4; i++) rows[i] = (fkv_row){seqs[i], 16};
        ck_ok(fkv_pager_step_begin(pager, rows, 4));
        commit(pager);
    }
    ck_assert_uint_eq(stats_of(pager, 0).free, 0);
    ck_assert_uint_eq(stats_of(pager, 0).held, 16);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
}
END_TEST

START_TEST(sequence_longer_than_max_seq_tokens_is_rejected) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    fkv_seq seq = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 100001}, &seq, NULL), FKV_POOL_FULL);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "100001"));
    ck_ok(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 100000}, &seq, NULL));
}
END_TEST

START_TEST(sequences_beyond_max_seqs_are_rejected) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = 0;
    for (int i = 0; i < 4; i++) seq = open_seq(pager, 1);
    fkv_seq fifth = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 1}, &fifth, NULL), FKV_SEQS_FULL);
    ck_status(fkv_pager_fork(pager, seq, 1, &fifth), FKV_SEQS_FULL);
    close_seq(pager, seq);
    (void)open_seq(pager, 1);
}
END_TEST

START_TEST(closed_id_stays_invalid_when_its_slot_is_reused) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq first = open_seq(pager, 16);
    uint32_t slot = slot_of(pager, first);
    close_seq(pager, first);
    fkv_seq second = open_seq(pager, 16);
    ck_assert_uint_eq(slot_of(pager, second), slot);
    ck_assert(first != second && first != 0 && second != 0);
    ck_status(fkv_pager_close(pager, first), FKV_BAD_SEQ);
    ck_assert_uint_eq(length_of(pager, second), 0);
}
END_TEST

/* ---- steps ---- */

START_TEST(step_lists_its_rows_and_assigns_their_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq a = open_seq(pager, 64);
    fkv_seq b = open_seq(pager, 64);
    grow(pager, a, 20);
    fkv_row rows[] = {{b, 33}, {a, 1}};
    ck_ok(fkv_pager_step_begin(pager, rows, 2));
    uint32_t n = 0;
    const fkv_step_row *assigned = fkv_pager_step_rows(pager, &n);
    ck_assert_uint_eq(n, 2);
    ck_assert(assigned[0].slot == slot_of(pager, b) && assigned[0].start == 0 && assigned[0].n_tokens == 33);
    ck_assert(assigned[1].slot == slot_of(pager, a) && assigned[1].start == 20 && assigned[1].n_tokens == 1);
    for (uint32_t i = 0; i < 3; i++) ck_assert_uint_ne(page_of(pager, b, 0, i), FKV_NO_PAGE);
    (void)fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 0);
    ck_assert_uint_eq(length_of(pager, b), 0);
    ck_assert_uint_eq(stats_of(pager, 0).held, 5);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 3);
    commit(pager);
    ck_assert_uint_eq(length_of(pager, b), 33);
    ck_assert_uint_eq(length_of(pager, a), 21);
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.steps, 2);
    ck_assert_uint_eq(stats.tokens, 54);
}
END_TEST

START_TEST(abort_restores_every_byte) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    uint32_t tokens[48];
    text(1, tokens, 48);
    keep_tokens(pager, 0, tokens, 48);
    fkv_seq a = open_on(pager, 0, 200, tokens, 48, 48);
    ck_ok(fkv_pager_truncate(pager, a, 40)); /* the last page of sequence a is also in the tree */
    fkv_seq b = open_seq(pager, 100);
    grow(pager, b, 21);
    fkv_seq c = fork_seq(pager, b, 90);
    fkv_seq d = open_seq(pager, 50);
    pager_fixture_snapshot(pager);
    fkv_row rows[] = {{a, 9}, {b, 12}, {c, 1}, {d, 10}};
    ck_ok(fkv_pager_step_begin(pager, rows, 4));
    uint32_t n_copies = 0;
    (void)fkv_pager_step_copies(pager, &n_copies);
    /* In each group, the step copies the last page of sequence a, unless the tree has released this page. The step also makes one
     * copy of the page that sequences b and c share. The other of the two sequences writes in place. */
    ck_assert_uint_ge(n_copies, 4);
    ck_assert(!pager_fixture_unchanged(pager));
    ck_assert(fkv_pager_consistent(pager));
    ck_ok(fkv_pager_step_abort(pager));
    ck_assert(pager_fixture_unchanged(pager));
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.aborts, 1);
}
END_TEST

START_TEST(aborted_step_returns_its_pages_in_order) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = open_seq(pager, 64);
    uint32_t pages[4];
    for (int round = 0; round < 3; round++) {
        ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, 50}, 1));
        for (uint32_t i = 0; i < 4; i++) {
            if (round > 0) ck_assert_uint_eq(page_of(pager, seq, 0, i), pages[i]);
            pages[i] = page_of(pager, seq, 0, i);
        }
        ck_ok(fkv_pager_step_abort(pager));
    }
}
END_TEST

/* ---- forks ---- */

START_TEST(fork_then_append_copies_only_the_tail_page) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 64);
    grow(pager, parent, 40);
    fkv_seq child = fork_seq(pager, parent, 64);
    ck_assert_uint_eq(length_of(pager, child), 40);
    ck_assert_uint_eq(stats_of(pager, 0).shared, 3);
    ck_assert_uint_eq(stats_of(pager, 0).held, 3);
    ck_assert_uint_eq(stats_of(pager, 0).promised,
                      3); /* each of the two sequences needs one more page, and one of them needs a copy of the shared page */
    uint32_t tail = page_of(pager, child, 0, 2);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){child, 1}, 1));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert(copies[0].group == 0 && copies[0].from == tail && copies[0].to == page_of(pager, child, 0, 2));
    commit(pager);
    ck_assert_uint_eq(page_of(pager, parent, 0, 2), tail);
    for (uint32_t i = 0; i < 2; i++) ck_assert_uint_eq(page_of(pager, parent, 0, i), page_of(pager, child, 0, i));
    ck_assert_uint_eq(stats_of(pager, 0).shared, 2);
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.page_copies, 1);
}
END_TEST

START_TEST(fork_on_a_page_boundary_copies_nothing) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 64);
    grow(pager, parent, 32);
    fkv_seq child = fork_seq(pager, parent, 64);
    fkv_row rows[] = {{parent, 5}, {child, 5}};
    ck_ok(fkv_pager_step_begin(pager, rows, 2));
    uint32_t n = 0;
    (void)fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 0);
    commit(pager);
    ck_assert_uint_ne(page_of(pager, parent, 0, 2), page_of(pager, child, 0, 2));
}
END_TEST

START_TEST(last_holder_of_a_page_writes_in_place) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 64);
    grow(pager, parent, 20);
    fkv_seq child = fork_seq(pager, parent, 64);
    uint32_t tail = page_of(pager, parent, 0, 1);
    grow(pager, child, 1);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){parent, 1}, 1));
    uint32_t n = 0;
    (void)fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 0);
    ck_assert_uint_eq(page_of(pager, parent, 0, 1), tail);
    commit(pager);
}
END_TEST

START_TEST(longest_row_writes_in_place_when_only_rows_hold_the_page) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq a = open_seq(pager, 64);
    grow(pager, a, 24);
    fkv_seq b = fork_seq(pager, a, 64);
    fkv_seq c = fork_seq(pager, a, 64);
    ck_ok(fkv_pager_truncate(pager, a, 18));
    ck_ok(fkv_pager_truncate(pager, c, 20));
    uint32_t tail = page_of(pager, b, 0, 1);
    fkv_row rows[] = {{a, 1}, {b, 1}, {c, 1}};
    ck_ok(fkv_pager_step_begin(pager, rows, 3));
    uint32_t n = 0;
    (void)fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 2);
    ck_assert_uint_eq(page_of(pager, b, 0, 1), tail);
    ck_assert_uint_ne(page_of(pager, a, 0, 1), tail);
    ck_assert_uint_ne(page_of(pager, c, 0, 1), tail);
    ck_ok(fkv_pager_step_abort(pager));

    /* a fourth sequence also reads the page but has no row in the step, so every row of the step copies the page */
    fkv_seq d = fork_seq(pager, b, 64);
    ck_ok(fkv_pager_step_begin(pager, rows, 3));
    (void)fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 3);
    ck_ok(fkv_pager_step_abort(pager));

    /* among rows of equal length, the last one writes in place */
    close_seq(pager, a);
    close_seq(pager, c);
    fkv_row equal[] = {{d, 1}, {b, 1}};
    ck_ok(fkv_pager_step_begin(pager, equal, 2));
    ck_assert_uint_eq(page_of(pager, b, 0, 1), tail);
    commit(pager);
}
END_TEST

START_TEST(page_that_is_full_in_another_row_is_copied) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq a = open_seq(pager, 64);
    grow(pager, a, 32);
    fkv_seq b = fork_seq(pager, a, 64);
    ck_ok(fkv_pager_truncate(pager, b, 20));
    fkv_row rows[] = {{a, 1}, {b, 1}};
    ck_ok(fkv_pager_step_begin(pager, rows, 2));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(copies[0].from, page_of(pager, a, 0, 1));
    commit(pager);
}
END_TEST

START_TEST(fork_reserves_the_copy_that_it_causes) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 240);
    grow(pager, parent, 10);
    fkv_seq child = 0;
    /* of the 16 pages, 1 is held and 14 are promised, which leaves 1 page for the copy of the shared page */
    ck_status(fkv_pager_fork(pager, parent, 17, &child), FKV_POOL_FULL);
    child = fork_seq(pager, parent, 16);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 15);
    close_seq(pager, child);
    /* the child has reached its max_tokens and never writes, so the parent must copy the page instead */
    child = fork_seq(pager, parent, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 15);
    /* a second child that never writes needs no additional page */
    (void)fork_seq(pager, parent, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 15);
    grow(pager, parent, 230);
    ck_assert_uint_eq(stats_of(pager, 0).free, 0);
}
END_TEST

START_TEST(full_sequence_is_not_a_writer) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq parent = open_seq(pager, 10);
    grow(pager, parent, 10);
    fkv_seq child = fork_seq(pager, parent, 10);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
    fkv_seq writer = fork_seq(pager, parent, 11);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 1);
    close_seq(pager, child);
    close_seq(pager, parent);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 0);
    grow(pager, writer, 1);
}
END_TEST

/* ---- truncate ---- */

START_TEST(truncate_frees_pages_and_keeps_the_promise) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = open_seq(pager, 256);
    grow(pager, seq, 256);
    ck_ok(fkv_pager_truncate(pager, seq, 256));
    ck_ok(fkv_pager_truncate(pager, seq, 33));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert_uint_eq(length_of(pager, seq), 33);
    ck_assert_uint_eq(stats_of(pager, 0).free, 13);
    ck_assert_uint_eq(stats_of(pager, 0).promised, 13);
    grow(pager, seq, 223);
    ck_ok(fkv_pager_truncate(pager, seq, 0));
    ck_assert_uint_eq(stats_of(pager, 0).free, 16);
    grow(pager, seq, 256);
}
END_TEST

START_TEST(truncate_is_rejected_if_other_holders_keep_the_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq a = open_seq(pager, 256);
    grow(pager, a, 256);
    fkv_seq b = fork_seq(pager, a, 256); /* the fork shares all 16 pages and needs no others */
    pager_fixture_snapshot(pager);
    ck_status(fkv_pager_truncate(pager, b, 240), FKV_POOL_FULL);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "1 pages would be reserved, but only 0 are available"));
    ck_status(fkv_pager_truncate(pager, b, 250), FKV_POOL_FULL);
    ck_status(fkv_pager_truncate(pager, b, 0), FKV_POOL_FULL);
    ck_assert(pager_fixture_unchanged(pager));
    close_seq(pager, a);
    ck_ok(fkv_pager_truncate(pager, b, 240));
    ck_assert(fkv_pager_consistent(pager));
}
END_TEST

/* ---- windows ---- */

START_TEST(sinks_survive_any_number_of_steps) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    fkv_seq seq = open_seq(pager, 100000);
    grow(pager, seq, 5);
    uint32_t first = page_of(pager, seq, 0, 0);
    grow(pager, seq, 20);
    uint32_t second = page_of(pager, seq, 0, 1); /* this page contains the last 4 of the 20 sinks */
    for (uint32_t n = 1; length_of(pager, seq) < 5000; n = n % 24 + 1) {
        grow(pager, seq, n);
        ck_assert_uint_eq(page_of(pager, seq, 0, 0), first);
        ck_assert_uint_eq(page_of(pager, seq, 0, 1), second);
    }
}
END_TEST

START_TEST(commit_releases_pages_before_the_window) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    fkv_seq seq = open_seq(pager, 1000);
    grow(pager, seq, 87);
    /* a query at position 87 sees tokens from 48 on, so page 2 (tokens 32 to 47) is released; pages 0 and 1 hold sinks */
    ck_assert_uint_eq(fkv_pager_first_page(pager, 0, 87), 3);
    ck_assert_uint_eq(stats_of(pager, 0).held, 5);
    grow(pager, seq, 15);
    ck_assert_uint_eq(fkv_pager_first_page(pager, 0, 102), 3);
    ck_assert_uint_eq(stats_of(pager, 0).held, 6);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, 1}, 1));
    ck_assert_uint_eq(stats_of(pager, 0).held, 6);
    commit(pager);
    ck_assert_uint_eq(stats_of(pager, 0).held, 5);
}
END_TEST

START_TEST(long_sequence_never_exceeds_its_page_cap) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t cap = fkv_pager_window_pages(&window_spec, 0).most;
    fkv_seq seq = open_seq(pager, 100000);
    ck_assert_uint_eq(stats_of(pager, 0).promised, cap);
    for (uint32_t n = 1; length_of(pager, seq) < 3000; n = (n * 7 + 3) % 24 + 1) {
        ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, n}, 1));
        ck_assert_uint_le(stats_of(pager, 0).held, cap);
        ck_assert_uint_eq(stats_of(pager, 0).held + stats_of(pager, 0).promised, cap);
        commit(pager);
    }
}
END_TEST

/* For each sequence length, counts the pages that a step uses. Returns the largest count. */
static uint32_t most_pages_by_counting(const fkv_pager_spec *spec, uint32_t group) {
    const fkv_group_spec *g = &spec->groups[group];
    uint32_t most = 0;
    for (uint32_t start = 0; start < spec->max_seq_tokens; start++) {
        uint32_t end = fkv_min_u32(start + spec->max_step_tokens, spec->max_seq_tokens);
        uint32_t n = 0;
        for (uint32_t page = 0; page * spec->page_tokens < end; page++) {
            bool seen = page * spec->page_tokens < g->n_sinks;
            for (uint32_t i = 0; i < spec->page_tokens; i++) {
                uint32_t token = page * spec->page_tokens + i;
                seen |= token < end && token + g->window > start;
            }
            n += seen;
        }
        most = fkv_max_u32(most, n);
    }
    return most;
}

START_TEST(page_cap_equals_the_worst_case) {
    const uint32_t windows[] = {1, 2, 15, 16, 17, 31, 33, 64, 100, 4000};
    const uint32_t steps[] = {1, 2, 16, 17, 40};
    const uint32_t sinks[] = {0, 1, 16, 17, 500};
    for (uint32_t w = 0; w < 10; w++)
        for (uint32_t s = 0; s < 5; s++)
            for (uint32_t k = 0; k < 5; k++) {
                fkv_pager_spec spec = {16, 1, 400, steps[s], 1, {{windows[w], sinks[k], 1}}};
                ck_assert_uint_eq(fkv_pager_window_pages(&spec, 0).most, most_pages_by_counting(&spec, 0));
            }
    ck_assert_uint_eq(fkv_pager_window_pages(&full_spec, 0).most, 16);
}
END_TEST

START_TEST(windows_reserve_their_pages_and_one_step) {
    fkv_pager_spec spec = window_spec;
    spec.max_step_tokens = 70;
    fkv_window_pages one = fkv_pager_window_pages(&spec, 0);
    ck_assert_uint_eq(one.step, 3);
    ck_assert_uint_eq(one.rest + one.step, one.most);
    spec.groups[0].n_pages = 2 * one.rest + one.step; /* the pages for one step are reserved only once, not for each sequence */
    fkv_pager *pager = pager_fixture_open(&spec);
    fkv_seq a = open_seq(pager, 100000);
    fkv_seq b = fork_seq(pager, a, 50000);
    for (uint32_t i = 0; i < 40; i++) {
        fkv_row rows[] = {{a, 1 + 13 * i % 69}, {b, 69 - 13 * i % 69}};
        ck_ok(fkv_pager_step_begin(pager, rows, 2));
        commit(pager);
    }
    close_seq(pager, b);
    spec.groups[0].n_pages--;
    pager = pager_fixture_open(&spec);
    a = open_seq(pager, 100000);
    ck_status(fkv_pager_fork(pager, a, 50000, &b), FKV_POOL_FULL);
    (void)fork_seq(pager, a, 16); /* a short sequence needs one page, regardless of the window */
}
END_TEST

START_TEST(forks_share_and_copy_window_pages) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_seq a = open_seq(pager, 400);
    grow(pager, a, 150);
    fkv_seq b = fork_seq(pager, a, 300);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){b, 4}, 1));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 3);
    for (uint32_t g = 0; g < 3; g++) {
        ck_assert_uint_eq(copies[g].group, g);
        ck_assert_uint_eq(copies[g].from, page_of(pager, a, g, 9));
        ck_assert_uint_eq(copies[g].to, page_of(pager, b, g, 9));
    }
    commit(pager);
    grow(pager, a, 100); /* sequence a releases window pages that sequence b still needs */
    ck_assert_uint_eq(length_of(pager, b), 154);
}
END_TEST

START_TEST(truncate_before_the_window_returns_gone) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    fkv_seq seq = open_seq(pager, 1000);
    grow(pager, seq, 200);
    /* pages from (200 - 39) / 16 = 10 on and the two sink pages are still held */
    pager_fixture_snapshot(pager);
    ck_status(fkv_pager_truncate(pager, seq, 198), FKV_GONE);
    ck_status(fkv_pager_truncate(pager, seq, 33), FKV_GONE);
    ck_assert(pager_fixture_unchanged(pager));
    ck_ok(fkv_pager_truncate(pager, seq, 199));
    ck_assert(fkv_pager_covers(pager, slot_of(pager, seq), 32));
    ck_ok(fkv_pager_truncate(pager, seq, 32)); /* at this length, a query sees only the pages of the sinks */
    ck_assert(fkv_pager_consistent(pager));
    grow(pager, seq, 300);
    ck_ok(fkv_pager_truncate(pager, seq, 3));
    ck_assert(fkv_pager_consistent(pager));
    ck_ok(fkv_pager_truncate(pager, seq, 0));
    grow(pager, seq, 300);
}
END_TEST

START_TEST(covers_predicts_the_result_of_truncate) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_seq seq = open_seq(pager, 512);
    for (uint32_t len = 16; len <= 512; len += 31) {
        grow(pager, seq, len - length_of(pager, seq));
        for (uint32_t n = 0; n <= len + 1; n++) {
            pager_fixture_snapshot(pager);
            bool covered = fkv_pager_covers(pager, slot_of(pager, seq), n);
            ck_assert_int_eq(fkv_pager_truncate(pager, seq, n) == FKV_OK, covered);
            pager_fixture_restore();
        }
    }
}
END_TEST

START_TEST(first_page_follows_the_window) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    /* columns: position, first page with window 64, first page with window 24 */
    const uint32_t cases[][3] = {{0, 0, 0}, {22, 0, 0}, {38, 0, 0}, {39, 0, 1}, {63, 0, 2}, {78, 0, 3}, {79, 1, 3}, {200, 8, 11}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ck_assert_uint_eq(fkv_pager_first_page(pager, 0, cases[i][0]), cases[i][1]);
        ck_assert_uint_eq(fkv_pager_first_page(pager, 1, cases[i][0]), 0);
        ck_assert_uint_eq(fkv_pager_first_page(pager, 2, cases[i][0]), cases[i][2]);
    }
}
END_TEST

/* ---- fill ---- */

START_TEST(fill_allocates_the_pages_visible_to_the_next_query) {
    fkv_pager *pager = pager_fixture_open(&mixed_spec);
    fkv_seq seq = open_seq(pager, 300);
    ck_ok(fkv_pager_fill(pager, seq, 0));
    ck_ok(fkv_pager_fill(pager, seq, 250));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert_uint_eq(length_of(pager, seq), 250);
    ck_assert_uint_eq(stats_of(pager, 0).held, 6); /* the sink page and the pages of tokens 187 to 249 are held */
    ck_assert_uint_eq(stats_of(pager, 1).held, 16);
    ck_assert_uint_eq(stats_of(pager, 2).held, 2);
    grow(pager, seq, 50);
}
END_TEST

START_TEST(fill_can_exceed_a_step_and_evicts_cached_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[256];
    text(1, tokens, 256);
    keep_tokens(pager, 0, tokens, 256);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 16);
    fkv_seq seq = open_seq(pager, 256);
    ck_assert_uint_gt(stats_of(pager, 0).cached, 0);
    ck_ok(fkv_pager_fill(pager, seq, 256));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert_uint_eq(stats_of(pager, 0).held, 16);
}
END_TEST

/* ---- bad calls ---- */

START_TEST(bad_calls_return_their_status_and_change_nothing) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq good = open_seq(pager, 64);
    grow(pager, good, 20);
    fkv_seq empty = open_seq(pager, 16);
    fkv_seq closed = open_seq(pager, 16);
    close_seq(pager, closed);
    const fkv_seq_config config = {.max_tokens = 16};
    const fkv_seq_config no_length = {.max_tokens = 0};
    const fkv_seq_config no_prompt = {.max_tokens = 16, .n_prompt = 3};
    const fkv_seq_config too_long = {.max_tokens = 257};
    const fkv_seq_config too_much = {.max_tokens = 256};
    const uint32_t tokens[32] = {0};
    const fkv_row twice[] = {{good, 1}, {good, 1}};
    const fkv_row none[] = {{good, 0}};
    const fkv_row unknown[] = {{good, 1}, {closed, 1}};
    const fkv_row beyond[] = {{empty, 1}, {good, 45}};
    const fkv_row many[] = {{good, 44}, {empty, 16}};
    const fkv_row large[] = {{good, UINT32_MAX}};
    const fkv_row five[5] = {{good, 1}};
    fkv_pager_spec small_steps = full_spec;
    small_steps.max_step_tokens = 8;
    fkv_seq out = 0;
    uint32_t n = 0;
    pager_fixture_snapshot(pager);
#define BAD(call, status)                                                                                                        \
    do {                                                                                                                         \
        ck_status(call, status);                                                                                                 \
        ck_assert_msg(fkv_message()[0] != '\0', "%s failed without a message", #call);                                           \
        ck_assert_msg(pager_fixture_unchanged(pager), "%s changed the pager", #call);                                            \
    } while (0)
    BAD(fkv_pager_open(pager, NULL, &out, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_open(pager, &config, NULL, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_open(pager, &no_length, &out, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_open(pager, &no_prompt, &out, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_open(pager, &too_long, &out, &n), FKV_POOL_FULL);
    BAD(fkv_pager_open(pager, &too_much, &out, &n), FKV_POOL_FULL);
    BAD(fkv_pager_fork(pager, good, 64, NULL), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_fork(pager, good, 19, &out), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_fork(pager, empty, 0, &out), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_fork(pager, good, 257, &out), FKV_POOL_FULL);
    BAD(fkv_pager_fork(pager, good, 256, &out), FKV_POOL_FULL);
    BAD(fkv_pager_fork(pager, closed, 64, &out), FKV_BAD_SEQ);
    BAD(fkv_pager_reserve(pager, good, 19), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_reserve(pager, empty, 0), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_reserve(pager, good, 257), FKV_POOL_FULL);
    BAD(fkv_pager_reserve(pager, good, 256), FKV_POOL_FULL);
    BAD(fkv_pager_reserve(pager, closed, 16), FKV_BAD_SEQ);
    BAD(fkv_pager_match(pager, NULL, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_match(pager, &config, NULL), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_match(pager, &no_length, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_match(pager, &no_prompt, &n), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_truncate(pager, good, 21), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_truncate(pager, closed, 0), FKV_BAD_SEQ);
    BAD(fkv_pager_close(pager, closed), FKV_BAD_SEQ);
    BAD(fkv_pager_close(pager, 0), FKV_BAD_SEQ);
    BAD(fkv_pager_close(pager, UINT64_MAX), FKV_BAD_SEQ);
    BAD(fkv_pager_close(pager, good + (UINT64_C(1) << 16)), FKV_BAD_SEQ);
    BAD(fkv_pager_length(pager, closed, &n), FKV_BAD_SEQ);
    BAD(fkv_pager_length(pager, good, NULL), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_insert(pager, good, NULL, 16), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_insert(pager, good, tokens, 21), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_insert(pager, closed, tokens, 0), FKV_BAD_SEQ);
    BAD(fkv_pager_fill(pager, good, 30), FKV_BAD_STATE);
    BAD(fkv_pager_fill(pager, empty, 17), FKV_SEQ_FULL);
    BAD(fkv_pager_fill(pager, closed, 1), FKV_BAD_SEQ);
    BAD(fkv_pager_step_begin(pager, NULL, 1), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_step_begin(pager, none, 0), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_step_begin(pager, five, 5), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_step_begin(pager, none, 1), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_step_begin(pager, twice, 2), FKV_BAD_ARGUMENT);
    BAD(fkv_pager_step_begin(pager, unknown, 2), FKV_BAD_SEQ);
    BAD(fkv_pager_step_begin(pager, beyond, 2), FKV_SEQ_FULL);
    BAD(fkv_pager_step_begin(pager, large, 1), FKV_SEQ_FULL);
    BAD(fkv_pager_step_commit(pager), FKV_BAD_STATE);
    BAD(fkv_pager_step_abort(pager), FKV_BAD_STATE);
    ck_ok(fkv_pager_step_begin(pager, many, 2));
    ck_ok(fkv_pager_step_abort(pager));

    pager = pager_fixture_open(&small_steps);
    good = open_seq(pager, 64);
    const fkv_row nine[] = {{good, 9}};
    pager_fixture_snapshot(pager);
    BAD(fkv_pager_step_begin(pager, nine, 1), FKV_STEP_FULL);
}
END_TEST

START_TEST(only_close_commit_and_abort_are_allowed_in_a_step) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    fkv_seq seq = open_seq(pager, 64);
    const fkv_seq_config config = {.max_tokens = 16};
    const fkv_row row = {seq, 4};
    const uint32_t tokens[16] = {0};
    fkv_seq out = 0;
    ck_ok(fkv_pager_step_begin(pager, &row, 1));
    pager_fixture_snapshot(pager);
    BAD(fkv_pager_open(pager, &config, &out, NULL), FKV_BAD_STATE);
    BAD(fkv_pager_fork(pager, seq, 64, &out), FKV_BAD_STATE);
    BAD(fkv_pager_truncate(pager, seq, 0), FKV_BAD_STATE);
    BAD(fkv_pager_reserve(pager, seq, 65), FKV_BAD_STATE);
    BAD(fkv_pager_insert(pager, seq, tokens, 0), FKV_BAD_STATE);
    BAD(fkv_pager_clear(pager), FKV_BAD_STATE);
    BAD(fkv_pager_fill(pager, seq, 4), FKV_BAD_STATE);
    BAD(fkv_pager_step_begin(pager, &row, 1), FKV_BAD_STATE);
    ck_assert_uint_eq(length_of(pager, seq), 0);
    commit(pager);
    ck_status(fkv_pager_step_commit(pager), FKV_BAD_STATE);
    ck_status(fkv_pager_step_abort(pager), FKV_BAD_STATE);
}
END_TEST
#undef BAD

/* ---- statistics from other threads ---- */

typedef struct stats_reader {
    const fkv_pager *pager;
    _Atomic bool stop;
    uint64_t n_read;
    bool sane;
} stats_reader;

static void *read_stats(void *argument) {
    stats_reader *reader = argument;
    uint64_t tokens = 0;
    reader->sane = true;
    while (!atomic_load(&reader->stop) || reader->n_read == 0) {
        fkv_stats stats = {0};
        fkv_pager_stats(reader->pager, &stats);
        reader->sane &= stats.tokens >= tokens && stats.groups[0].free <= 16 && stats.groups[0].promised <= 16;
        tokens = stats.tokens;
        reader->n_read++;
    }
    return NULL;
}

START_TEST(any_thread_may_read_stats_during_steps) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    stats_reader reader = {.pager = pager};
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, read_stats, &reader), 0);
    for (int round = 0; round < 300; round++) {
        fkv_seq seq = open_seq(pager, 256);
        grow(pager, seq, 100);
        ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, 9}, 1));
        ck_ok(fkv_pager_step_abort(pager));
        close_seq(pager, seq);
    }
    atomic_store(&reader.stop, true);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert(reader.sane);
    pager_fixture_close();
}
END_TEST

TEST_MAIN("pager", counting_and_carving_need_the_same_bytes, layout_sizes_beyond_64_bits_set_overflow,
          all_pages_of_a_new_pager_are_free, open_promises_pages_for_max_tokens, admitted_sequences_never_run_out_of_pages,
          sequence_longer_than_max_seq_tokens_is_rejected, sequences_beyond_max_seqs_are_rejected,
          closed_id_stays_invalid_when_its_slot_is_reused, step_lists_its_rows_and_assigns_their_pages, abort_restores_every_byte,
          aborted_step_returns_its_pages_in_order, fork_then_append_copies_only_the_tail_page,
          fork_on_a_page_boundary_copies_nothing, last_holder_of_a_page_writes_in_place,
          longest_row_writes_in_place_when_only_rows_hold_the_page, page_that_is_full_in_another_row_is_copied,
          fork_reserves_the_copy_that_it_causes, full_sequence_is_not_a_writer, truncate_frees_pages_and_keeps_the_promise,
          truncate_is_rejected_if_other_holders_keep_the_pages, sinks_survive_any_number_of_steps,
          commit_releases_pages_before_the_window, long_sequence_never_exceeds_its_page_cap, page_cap_equals_the_worst_case,
          windows_reserve_their_pages_and_one_step, forks_share_and_copy_window_pages, truncate_before_the_window_returns_gone,
          covers_predicts_the_result_of_truncate, first_page_follows_the_window,
          fill_allocates_the_pages_visible_to_the_next_query, fill_can_exceed_a_step_and_evicts_cached_pages,
          bad_calls_return_their_status_and_change_nothing, only_close_commit_and_abort_are_allowed_in_a_step,
          any_thread_may_read_stats_during_steps)
