/* Unit tests of the prefix tree: sharing, admission, pinning and the order of eviction. */
#include "pager_fixture.h"

#include "../src/pager/prefix_tree.h"

/* Pager configurations. The fields are page_tokens, max_seqs, max_seq_tokens, max_step_tokens and n_groups, followed by {window,
 * n_sinks, n_pages} for each group. */
static const fkv_pager_spec full_spec = {16, 4, 256, 16, 1, {{0, 0, 16}}};
static const fkv_pager_spec window_spec = {16, 4, 256, 16, 2, {{0, 0, 24}, {32, 4, 24}}};
static const fkv_pager_spec window_only_spec = {16, 3, 400, 16, 1, {{32, 4, 15}}};

static bool in_tree(const fkv_pager *pager, const uint32_t *tokens, uint32_t n_pages) {
    uint32_t node = FKV_NO_NODE;
    for (uint32_t i = 0; i < n_pages; i++) {
        node = fkv_tree_find(&pager->tree, 0, node, &tokens[i * 16]);
        if (node == FKV_NO_NODE) return false;
    }
    return true;
}

static uint32_t node_of(const fkv_pager *pager, const uint32_t *tokens, uint32_t n_pages) {
    uint32_t node = FKV_NO_NODE;
    for (uint32_t i = 0; i < n_pages; i++) node = fkv_tree_find(&pager->tree, 0, node, &tokens[i * 16]);
    ck_assert_uint_ne(node, FKV_NO_NODE);
    return node;
}

/* ---- sharing ---- */

START_TEST(cached_prompt_is_shared_in_full_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 50);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 3);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 48);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 48), 48);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 47), 32);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 15), 0);
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.hits, 3);
    ck_assert_uint_eq(stats.hit_tokens, 128);

    fkv_seq a = open_on(pager, 0, 64, tokens, 64, 48);
    fkv_seq b = open_on(pager, 0, 40, tokens, 64, 32); /* a match is limited to the maximum length of the sequence */
    ck_assert_uint_eq(page_of(pager, a, 0, 1), page_of(pager, b, 0, 1));
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 0).shared, 3);
    ck_ok(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 16, .prompt = tokens, .n_prompt = 16}, &a, NULL));
}
END_TEST

/* Checks that the page listing agrees with the statistics. */
static void check_pages(const fkv_pager *pager, uint32_t group) {
    fkv_page_info list[64];
    uint32_t counts[5] = {0};
    uint32_t n = fkv_pager_pages(pager, group, list, 64);
    for (uint32_t i = 0; i < n; i++) counts[list[i].state]++;
    const fkv_group_stats stats = stats_of(pager, group);
    ck_assert_uint_eq(n, stats.pages);
    ck_assert_uint_eq(counts[FKV_PAGE_FREE], stats.free);
    ck_assert_uint_eq(counts[FKV_PAGE_CACHED], stats.cached);
    ck_assert_uint_eq(counts[FKV_PAGE_PRIVATE] + counts[FKV_PAGE_SHARED] + counts[FKV_PAGE_PINNED], stats.held);
}

START_TEST(page_listing_reports_the_owner_of_each_page) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 7, tokens, 50);
    check_pages(pager, 0);
    fkv_seq a = open_on(pager, 7, 64, tokens, 64, 48);
    fkv_seq other;
    ck_ok(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 40, .tenant = 9}, &other, NULL));
    ck_ok(fkv_pager_fill(pager, other, 40));
    check_pages(pager, 0);
    fkv_page_info list[16];
    ck_assert_uint_eq(fkv_pager_pages(pager, 0, list, 16), 16);
    for (uint32_t i = 0; i < 3; i++) {
        fkv_page_info shared = list[page_of(pager, a, 0, i)];
        fkv_page_info own = list[page_of(pager, other, 0, i)];
        ck_assert(shared.state == FKV_PAGE_PINNED && shared.tenant == 7);
        ck_assert(own.state == FKV_PAGE_PRIVATE && own.tenant == 9);
    }
    fkv_seq b = open_on(pager, 7, 64, tokens, 64, 48);
    ck_assert_uint_eq(fkv_pager_pages(pager, 0, list, 16), 16);
    ck_assert(list[page_of(pager, b, 0, 0)].state == FKV_PAGE_SHARED);
    fkv_page_info few[5]; /* an array of five entries receives about every third of the 16 pages */
    ck_assert_uint_eq(fkv_pager_pages(pager, 0, few, 5), 5);
    for (uint32_t i = 0; i < 5; i++)
        ck_assert(few[i].state == list[i * 16 / 5].state && few[i].tenant == list[i * 16 / 5].tenant);
}
END_TEST

START_TEST(first_different_token_ends_the_match) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 64);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t other[64];
        memcpy(other, tokens, sizeof other);
        other[i] ^= 0x80000000u;
        ck_assert_uint_eq(found_tokens(pager, 0, other, 64), i / 16 * 16);
    }
}
END_TEST

START_TEST(same_page_after_a_different_prefix_does_not_match) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t first[32];
    uint32_t second[32];
    text(1, first, 32);
    text(2, second, 32);
    memcpy(&second[16], &first[16], 16 * sizeof *first);
    keep_tokens(pager, 0, first, 32);
    ck_assert_uint_eq(found_tokens(pager, 0, second, 32), 0);
    keep_tokens(pager, 0, second, 32);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 4);
    ck_assert_uint_eq(found_tokens(pager, 0, second, 32), 32);
    ck_assert_uint_eq(found_tokens(pager, 0, &first[16], 16), 0);
}
END_TEST

START_TEST(tenants_never_share) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[32];
    text(1, tokens, 32);
    keep_tokens(pager, 7, tokens, 32);
    ck_assert_uint_eq(found_tokens(pager, 8, tokens, 32), 0);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 32), 0);
    ck_assert_uint_eq(found_tokens(pager, 7, tokens, 32), 32);
    keep_tokens(pager, 8, tokens, 32);
    fkv_seq mine = open_on(pager, 8, 32, tokens, 32, 32);
    fkv_seq theirs = open_on(pager, 7, 32, tokens, 32, 32);
    for (uint32_t i = 0; i < 2; i++) ck_assert_uint_ne(page_of(pager, mine, 0, i), page_of(pager, theirs, 0, i));
    fkv_seq child = fork_seq(pager, mine, 32); /* the child inherits the tenant of its parent */
    ck_assert_uint_eq(pager->sequences[slot_of(pager, child)].tenant, 8);
}
END_TEST

START_TEST(colliding_hashes_do_not_share) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    pager->tree.hash_mask = 0;
    uint32_t texts[4][32];
    for (uint32_t t = 0; t < 4; t++) {
        text(t, texts[t], 32);
        keep_tokens(pager, t / 2, texts[t], 32);
    }
    for (uint32_t t = 0; t < 4; t++)
        for (uint64_t tenant = 0; tenant < 2; tenant++)
            ck_assert_uint_eq(found_tokens(pager, tenant, texts[t], 32), tenant == t / 2 ? 32 : 0);
    ck_ok(fkv_pager_clear(pager));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert_uint_eq(stats_of(pager, 0).free, 16);

    /* pages with equal tokens are not shared if the preceding pages differ */
    memcpy(&texts[1][16], &texts[0][16], 16 * sizeof texts[0][0]);
    keep_tokens(pager, 0, texts[0], 32);
    ck_assert_uint_eq(found_tokens(pager, 0, texts[1], 32), 0);
    keep_tokens(pager, 0, texts[1], 16);
    ck_assert_uint_eq(found_tokens(pager, 0, texts[1], 32), 16);
}
END_TEST

START_TEST(appending_to_a_shared_prefix_does_not_change_it) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[48];
    text(1, tokens, 48);
    keep_tokens(pager, 0, tokens, 48);
    fkv_seq seq = open_on(pager, 0, 100, tokens, 48, 48);
    ck_ok(fkv_pager_truncate(pager, seq, 40));
    ck_assert(fkv_pager_consistent(pager));
    uint32_t shared = page_of(pager, seq, 0, 2);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3); /* the count includes the partly used page */
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, 1}, 1));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(copies[0].from, shared);
    commit(pager);
    ck_assert_uint_ne(page_of(pager, seq, 0, 2), shared);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 2);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 1);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 48), 48);
}
END_TEST

/* ---- admission ---- */

START_TEST(cached_prompt_counts_towards_admission) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[192];
    text(1, tokens, 192);
    keep_tokens(pager, 0, tokens, 192);
    fkv_seq a = open_on(pager, 0, 256, tokens, 192, 192); /* 12 pages are found in the tree, and 4 are free */
    fkv_seq b = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 192}, &b, NULL), FKV_POOL_FULL);
    b = open_on(pager, 0, 192, tokens, 192, 192);
    close_seq(pager, b);
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 193, .prompt = tokens, .n_prompt = 192}, &b, NULL),
              FKV_POOL_FULL);
    grow(pager, a, 64);
}
END_TEST

START_TEST(pinning_cached_pages_cannot_break_a_promise) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[128];
    text(1, tokens, 128);
    keep_tokens(pager, 0, tokens, 128);
    fkv_seq seq = open_seq(pager, 208); /* the sequence may need 13 of the 16 pages, and 8 of the 16 pages are cached */
    ck_assert_uint_eq(stats_of(pager, 0).cached, 8);
    fkv_seq other = 0;
    pager_fixture_snapshot(pager);
    fkv_seq_config config = {.max_tokens = 128, .prompt = tokens, .n_prompt = 128};
    /* the second sequence would need no new page but would pin the 8 cached pages, some of which the first may need */
    ck_status(fkv_pager_open(pager, &config, &other, NULL), FKV_POOL_FULL);
    ck_assert(pager_fixture_unchanged(pager));
    (void)open_on(pager, 0, 48, tokens, 48, 48);
    grow(pager, seq, 208);
}
END_TEST

START_TEST(cached_pages_are_evicted_when_a_promise_needs_them) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[256];
    text(1, tokens, 256);
    keep_tokens(pager, 0, tokens, 256);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 16);
    fkv_seq seq = open_seq(pager, 256);
    /* opening a sequence evicts only as many pages as its next step may need; the start of the cached prompt is evicted last */
    ck_assert_uint_eq(stats_of(pager, 0).free, 3);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 13);
    grow(pager, seq, 128);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 5);
    ck_assert(in_tree(pager, tokens, 5));
    grow(pager, seq, 128);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.evictions, 16);
}
END_TEST

START_TEST(tree_releases_a_truncated_page_if_its_copy_does_not_fit) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[256];
    text(1, tokens, 256);
    fkv_seq seq = open_seq(pager, 256);
    grow(pager, seq, 256);
    insert(pager, seq, tokens, 256);
    ck_ok(fkv_pager_truncate(pager, seq, 100));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert(in_tree(pager, tokens, 6));
    ck_assert(!in_tree(pager, tokens, 7));
    grow(pager, seq, 156);
    ck_assert_uint_eq(length_of(pager, seq), 256);
}
END_TEST

START_TEST(insert_never_pins_promised_pages) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 32);
    /* the sequences `other`, `seq` and `more` may need 10 + 4 + 2 pages, which is the whole pool, including the 2 cached pages */
    fkv_seq other = open_seq(pager, 160);
    fkv_seq seq = open_seq(pager, 64);
    grow(pager, seq, 64);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 2);
    fkv_seq more = open_seq(pager, 32);
    insert(pager, seq, tokens, 64); /* no node is inserted, because it would pin the two cached nodes above it */
    ck_assert(!in_tree(pager, tokens, 3));
    close_seq(pager, more);
    insert(pager, seq, tokens, 64);
    ck_assert(in_tree(pager, tokens, 4));
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 4);
    ck_assert_uint_ne(page_of(pager, seq, 0, 0), pager->tree.nodes[node_of(pager, tokens, 1)].pages[0]);
    grow(pager, other, 160);
    close_seq(pager, seq);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 4);
}
END_TEST

/* ---- insertion ---- */

START_TEST(existing_nodes_are_kept_when_inserted_again) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[48];
    text(1, tokens, 48);
    fkv_seq a = open_seq(pager, 48);
    fkv_seq b = open_seq(pager, 48);
    grow(pager, a, 32);
    grow(pager, b, 48);
    insert(pager, a, tokens, 32);
    insert(pager, b, tokens, 48);
    fkv_seq c = open_on(pager, 0, 48, tokens, 48, 48);
    for (uint32_t i = 0; i < 2; i++) {
        ck_assert_uint_eq(page_of(pager, c, 0, i), page_of(pager, a, 0, i));
        ck_assert_uint_ne(page_of(pager, b, 0, i), page_of(pager, a, 0, i));
    }
    ck_assert_uint_eq(page_of(pager, c, 0, 2), page_of(pager, b, 0, 2));
    close_seq(pager, a);
    close_seq(pager, c);
    /* sequence b holds the page of the last node, so the pages of the nodes above it are pinned too, although b does not hold
     * them */
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3);
    close_seq(pager, b);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 3);
}
END_TEST

START_TEST(insert_of_tokens_that_contradict_the_tree_is_rejected) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq seq = open_on(pager, 0, 64, tokens, 64, 32);
    grow(pager, seq, 32);
    for (uint32_t i = 0; i < 32; i += 15) {
        uint32_t other[64];
        memcpy(other, tokens, sizeof other);
        other[i] = 5;
        pager_fixture_snapshot(pager);
        ck_status(fkv_pager_insert(pager, seq, other, 64), FKV_BAD_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "different tokens"));
        ck_assert(pager_fixture_unchanged(pager));
    }
    insert(pager, seq, tokens, 64);
    tokens[60] = 5;
    ck_status(fkv_pager_insert(pager, seq, tokens, 64), FKV_BAD_ARGUMENT);
}
END_TEST

START_TEST(insert_of_less_than_a_page_does_nothing) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[16];
    text(1, tokens, 16);
    fkv_seq seq = open_seq(pager, 16);
    grow(pager, seq, 16);
    insert(pager, seq, NULL, 0);
    insert(pager, seq, tokens, 15);
    ck_assert_uint_eq(pager->tree.n_free, pager->tree.n_nodes);
}
END_TEST

/* ---- pinning and eviction ---- */

START_TEST(oldest_leaf_is_evicted_first) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t texts[4][48];
    for (uint32_t t = 0; t < 4; t++) {
        text(t, texts[t], 48);
        keep_tokens(pager, 0, texts[t], 48);
    }
    ck_assert_uint_eq(found_tokens(pager, 0, texts[0], 48), 48); /* text 0 is now the most recently used */
    fkv_seq seq = open_seq(pager, 256);                          /* 4 pages are free, and a step may need 3 */
    grow(pager, seq, 32);
    ck_assert(!in_tree(pager, texts[1], 3) && in_tree(pager, texts[1], 2));
    grow(pager, seq, 32);
    ck_assert(!in_tree(pager, texts[1], 1));
    ck_assert(in_tree(pager, texts[0], 3) && in_tree(pager, texts[2], 3) && in_tree(pager, texts[3], 3));
    grow(pager, seq, 48);
    ck_assert(in_tree(pager, texts[0], 3) && !in_tree(pager, texts[2], 1) && in_tree(pager, texts[3], 3));
    grow(pager, seq, 48);
    ck_assert(in_tree(pager, texts[0], 3) && !in_tree(pager, texts[3], 1));
}
END_TEST

START_TEST(insert_refreshes_the_age_of_a_prefix) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t texts[2][48];
    for (uint32_t t = 0; t < 2; t++) text(t, texts[t], 48);
    keep_tokens(pager, 0, texts[0], 48);
    keep_tokens(pager, 0, texts[1], 48);
    keep_tokens(pager, 0, texts[0],
                48); /* computes and inserts the text again; the new pages are discarded, but the text counts as recently used */
    fkv_seq seq = open_seq(pager, 256);
    grow(pager, seq, 160);
    ck_assert(in_tree(pager, texts[0], 3));
    ck_assert(!in_tree(pager, texts[1], 1));
}
END_TEST

START_TEST(branch_is_evicted_before_its_trunk) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t trunk[64];
    uint32_t branch[64];
    text(1, trunk, 64);
    text(1, branch, 64);
    branch[40] = 5;
    keep_tokens(pager, 0, trunk, 64);
    fkv_seq seq = open_on(pager, 0, 64, branch, 64, 32);
    grow(pager, seq, 32);
    insert(pager, seq, branch, 64);
    close_seq(pager, seq);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 6);
    seq = open_seq(pager, 256);
    grow(pager, seq, 144); /* evicts the last two pages of the older branch */
    ck_assert(in_tree(pager, branch, 4) && in_tree(pager, trunk, 2) && !in_tree(pager, trunk, 3));
    grow(pager, seq, 112);
    ck_assert(!in_tree(pager, trunk, 1));
}
END_TEST

START_TEST(open_sequence_pins_its_prefix) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    keep_tokens(pager, 0, tokens, 96);
    fkv_seq pin = open_on(pager, 0, 48, tokens, 48, 48);
    fkv_seq seq = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 209}, &seq, NULL), FKV_POOL_FULL);
    seq = open_seq(pager, 208);
    grow(pager, seq, 208);
    ck_assert(in_tree(pager, tokens, 3));
    ck_assert(!in_tree(pager, tokens, 4));
    close_seq(pager, pin);
    ck_ok(fkv_pager_clear(pager));
    ck_assert(!in_tree(pager, tokens, 1));
}
END_TEST

START_TEST(fork_made_before_the_insert_also_pins) {
    fkv_pager *pager = pager_fixture_open(&full_spec);
    uint32_t tokens[32];
    text(1, tokens, 32);
    fkv_seq a = open_seq(pager, 32);
    grow(pager, a, 32);
    fkv_seq b = fork_seq(pager, a, 64);
    insert(pager, a, tokens, 32);
    close_seq(pager, a);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 2);
    close_seq(pager, b);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 2);
}
END_TEST

START_TEST(clear_releases_all_pages_not_in_use) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t used[80];
    uint32_t unused[64];
    text(1, used, 80);
    text(2, unused, 64);
    keep_tokens(pager, 0, unused, 64);
    fkv_seq seq = open_seq(pager, 96);
    grow(pager, seq, 32);
    insert(pager, seq, used, 32);
    grow(pager, seq, 48);
    insert(pager, seq, used, 80);
    ck_assert_uint_gt(stats_of(pager, 1).cached, 0);
    ck_ok(fkv_pager_clear(pager));
    ck_assert(fkv_pager_consistent(pager));
    ck_assert(in_tree(pager, used, 5) && !in_tree(pager, unused, 1));
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 1).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 1).pinned, 3); /* pinned pages: the sink page and the two window pages */
}
END_TEST

/* ---- windows ---- */

START_TEST(match_needs_the_sinks_and_the_window) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    /* The tokens are inserted after all of them have been computed. By then, the window group holds only the sink page and the
     * last two pages, so only a match of all 6 pages can be used. */
    keep_tokens(pager, 0, tokens, 96);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 6);
    ck_assert_uint_eq(stats_of(pager, 1).cached, 3);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 96);
    ck_assert_uint_eq(
        found_tokens(pager, 0, tokens, 95),
        16); /* a match of 2 to 5 pages would need window pages that the tree does not have, so only the sink page is found */
    fkv_seq seq = open_on(pager, 0, 200, tokens, 96, 96);
    ck_assert_uint_eq(page_of(pager, seq, 1, 0), pager->tree.nodes[node_of(pager, tokens, 1)].pages[1]);
    grow(pager, seq, 100);
}
END_TEST

START_TEST(match_without_sinks_finds_nothing) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    keep_tokens(pager, 0, tokens, 96);
    fkv_seq seq = open_on(pager, 0, 96, tokens, 96, 96);
    ck_ok(fkv_pager_truncate(pager, seq, 10)); /* the sequence will write to the sink page, so the page leaves the tree */
    ck_assert_uint_eq(pager->tree.nodes[node_of(pager, tokens, 1)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 0);
}
END_TEST

START_TEST(insert_adds_a_missing_window_page_to_a_node) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    keep_tokens(pager, 0, tokens, 96);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 16);
    fkv_seq seq = open_on(pager, 0, 96, tokens, 64, 16);
    grow(pager, seq, 48);
    insert(pager, seq, tokens, 64); /* pages 2 and 3 are still in the window of the sequence */
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 64);
    close_seq(pager, seq);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 64);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 96);
}
END_TEST

START_TEST(window_pages_are_evicted_oldest_first_and_sinks_last) {
    fkv_pager_spec spec = window_spec;
    spec.groups[1].n_pages = 8;
    fkv_pager *pager = pager_fixture_open(&spec);
    uint32_t old[64];
    uint32_t young[32];
    text(1, old, 64);
    text(2, young, 32);
    keep_tokens(pager, 0, old, 64);
    keep_tokens(pager, 0, young, 32);
    ck_assert_uint_eq(stats_of(pager, 1).cached, 5);
    const fkv_node *nodes = pager->tree.nodes;
    fkv_seq seq = open_seq(pager, 256); /* a step may need 3 of the 8 pages, and 3 are free */
    grow(pager, seq, 16);
    ck_assert_uint_eq(nodes[node_of(pager, old, 3)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, old, 4)].pages[1], FKV_NO_PAGE);
    grow(pager, seq, 16);
    ck_assert_uint_eq(nodes[node_of(pager, old, 4)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, old, 1)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, young, 2)].pages[1], FKV_NO_PAGE);
    ck_assert(in_tree(pager, old, 4)); /* the nodes keep their pages in the full-attention group */
    ck_assert_uint_eq(stats_of(pager, 0).cached, 6);
}
END_TEST

START_TEST(window_page_held_only_by_writers_leaves_the_tree) {
    fkv_pager *pager = pager_fixture_open(&window_spec);
    uint32_t tokens[32];
    text(1, tokens, 32);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq a = open_on(pager, 0, 64, tokens, 32, 32);
    fkv_seq b = open_on(pager, 0, 64, tokens, 32, 32);
    ck_ok(fkv_pager_truncate(pager, a, 20));
    ck_assert(fkv_pager_consistent(pager));
    const fkv_node *node = &pager->tree.nodes[node_of(pager, tokens, 2)];
    /* sequence b needs the page unchanged, so the page stays in the tree, and sequence a will write to a copy */
    ck_assert_uint_ne(node->pages[1], FKV_NO_PAGE);
    close_seq(pager, b);
    ck_assert_uint_eq(node->pages[1], FKV_NO_PAGE); /* the page leaves the tree, because sequence a will now write in place */
    ck_assert_uint_ne(node->pages[0], FKV_NO_PAGE);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){a, 1}, 1));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(copies[0].group, 0);
    commit(pager);
}
END_TEST

START_TEST(window_pages_pin_without_a_full_group) {
    fkv_pager *pager = pager_fixture_open(&window_only_spec);
    uint32_t tokens[96];
    uint32_t others[240];
    text(1, tokens, 96);
    text(2, others, 240);
    keep_tokens(pager, 0, tokens, 96);
    fkv_seq pin = open_on(pager, 0, 96, tokens, 96, 96);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3);
    fkv_seq seq = open_seq(pager, 400);
    for (uint32_t i = 0; i < 15; i++) {
        grow(pager, seq, 16);
        insert(pager, seq, others,
               (i + 1) * 16); /* the tree has 15 nodes, 6 of which are pinned, so only the first 9 pages can be inserted */
    }
    ck_assert(in_tree(pager, tokens, 6));
    ck_assert(in_tree(pager, others, 9) && !in_tree(pager, others, 10));
    ck_ok(fkv_pager_clear(pager));
    ck_assert(in_tree(pager, tokens, 6));
    close_seq(pager, pin);
    ck_ok(fkv_pager_clear(pager));
    ck_assert(!in_tree(pager, tokens, 1));
}
END_TEST

START_TEST(oldest_leaf_is_evicted_when_nodes_run_out) {
    fkv_pager *pager = pager_fixture_open(&window_only_spec);
    uint32_t texts[3][96];
    for (uint32_t t = 0; t < 3; t++) {
        text(t, texts[t], 96);
        keep_tokens(pager, 0, texts[t], 96); /* each text needs 6 nodes, and the tree has only 15 */
    }
    ck_assert(in_tree(pager, texts[0], 3) && !in_tree(pager, texts[0], 4));
    ck_assert(in_tree(pager, texts[1], 6) && in_tree(pager, texts[2], 6));
    ck_assert_uint_eq(found_tokens(pager, 0, texts[2], 96), 96);
    uint32_t longest[400];
    text(9, longest, 400);
    /* the text has 25 pages, but the tree has only 15 nodes; the start of a text is never evicted to make room for its end */
    keep_tokens(pager, 0, longest, 400);
    ck_assert(in_tree(pager, longest, 15) && !in_tree(pager, longest, 16));
}
END_TEST

TEST_MAIN("prefix", cached_prompt_is_shared_in_full_pages, page_listing_reports_the_owner_of_each_page,
          first_different_token_ends_the_match, same_page_after_a_different_prefix_does_not_match, tenants_never_share,
          colliding_hashes_do_not_share, appending_to_a_shared_prefix_does_not_change_it, cached_prompt_counts_towards_admission,
          pinning_cached_pages_cannot_break_a_promise, cached_pages_are_evicted_when_a_promise_needs_them,
          tree_releases_a_truncated_page_if_its_copy_does_not_fit, insert_never_pins_promised_pages,
          existing_nodes_are_kept_when_inserted_again, insert_of_tokens_that_contradict_the_tree_is_rejected,
          insert_of_less_than_a_page_does_nothing, oldest_leaf_is_evicted_first, insert_refreshes_the_age_of_a_prefix,
          branch_is_evicted_before_its_trunk, open_sequence_pins_its_prefix, fork_made_before_the_insert_also_pins,
          clear_releases_all_pages_not_in_use, match_needs_the_sinks_and_the_window, match_without_sinks_finds_nothing,
          insert_adds_a_missing_window_page_to_a_node, window_pages_are_evicted_oldest_first_and_sinks_last,
          window_page_held_only_by_writers_leaves_the_tree, window_pages_pin_without_a_full_group,
          oldest_leaf_is_evicted_when_nodes_run_out)
