/* The prefix tree: what is shared, what counts for admission, what is pinned, and what is given up first. */
#include "pager_world.h"

#include "../src/pager/prefix_tree.h"

/* page_tokens, max_seqs, max_seq_tokens, max_step_tokens, n_groups, {window, n_sinks, n_pages} of each */
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

START_TEST(a_cached_prompt_is_shared_in_whole_pages) {
    fkv_pager *pager = pager_world_open(&full_spec);
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
    fkv_seq b = open_on(pager, 0, 40, tokens, 64, 32); /* a match ends where the sequence does */
    ck_assert_uint_eq(page_of(pager, a, 0, 1), page_of(pager, b, 0, 1));
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0);
    ck_assert_uint_eq(stats_of(pager, 0).shared, 3);
    ck_ok(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 16, .prompt = tokens, .n_prompt = 16}, &a, NULL));
}
END_TEST

/* The picture of the pages says what the figures say. */
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

START_TEST(pages_say_whose_they_are) {
    fkv_pager *pager = pager_world_open(&full_spec);
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
    fkv_page_info few[5]; /* every third or so */
    ck_assert_uint_eq(fkv_pager_pages(pager, 0, few, 5), 5);
    for (uint32_t i = 0; i < 5; i++)
        ck_assert(few[i].state == list[i * 16 / 5].state && few[i].tenant == list[i * 16 / 5].tenant);
}
END_TEST

START_TEST(one_other_token_ends_the_match) {
    fkv_pager *pager = pager_world_open(&full_spec);
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

START_TEST(the_same_page_after_another_beginning_is_another_page) {
    fkv_pager *pager = pager_world_open(&full_spec);
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
    fkv_pager *pager = pager_world_open(&full_spec);
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
    fkv_seq child = fork_seq(pager, mine, 32); /* stays with its tenant */
    ck_assert_uint_eq(pager->sequences[slot_of(pager, child)].tenant, 8);
}
END_TEST

START_TEST(colliding_hashes_do_not_share) {
    fkv_pager *pager = pager_world_open(&full_spec);
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

    /* nor do equal pages after different ones */
    memcpy(&texts[1][16], &texts[0][16], 16 * sizeof texts[0][0]);
    keep_tokens(pager, 0, texts[0], 32);
    ck_assert_uint_eq(found_tokens(pager, 0, texts[1], 32), 0);
    keep_tokens(pager, 0, texts[1], 16);
    ck_assert_uint_eq(found_tokens(pager, 0, texts[1], 32), 16);
}
END_TEST

START_TEST(writing_after_a_shared_prefix_leaves_it_alone) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[48];
    text(1, tokens, 48);
    keep_tokens(pager, 0, tokens, 48);
    fkv_seq seq = open_on(pager, 0, 100, tokens, 48, 48);
    ck_ok(fkv_pager_truncate(pager, seq, 40));
    ck_assert(fkv_pager_consistent(pager));
    uint32_t shared = page_of(pager, seq, 0, 2);
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3); /* also the page it uses in part */
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

START_TEST(prompt_found_in_the_tree_counts_for_admission) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[192];
    text(1, tokens, 192);
    keep_tokens(pager, 0, tokens, 192);
    fkv_seq a = open_on(pager, 0, 256, tokens, 192, 192); /* 12 found, 4 free */
    fkv_seq b = 0;
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 192}, &b, NULL), FKV_POOL_FULL);
    b = open_on(pager, 0, 192, tokens, 192, 192);
    close_seq(pager, b);
    ck_status(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = 193, .prompt = tokens, .n_prompt = 192}, &b, NULL),
              FKV_POOL_FULL);
    grow(pager, a, 64);
}
END_TEST

START_TEST(pinning_cached_pages_does_not_break_a_promise) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[128];
    text(1, tokens, 128);
    keep_tokens(pager, 0, tokens, 128);
    fkv_seq seq = open_seq(pager, 208); /* 13 of the 16, and 8 are cached */
    ck_assert_uint_eq(stats_of(pager, 0).cached, 8);
    fkv_seq other = 0;
    pager_world_snapshot(pager);
    fkv_seq_config config = {.max_tokens = 128, .prompt = tokens, .n_prompt = 128};
    ck_status(fkv_pager_open(pager, &config, &other, NULL), FKV_POOL_FULL); /* needs no page, but would pin 8 */
    ck_assert(pager_world_unchanged(pager));
    (void)open_on(pager, 0, 48, tokens, 48, 48);
    grow(pager, seq, 208);
}
END_TEST

START_TEST(cached_pages_make_room_when_a_promise_needs_them) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[256];
    text(1, tokens, 256);
    keep_tokens(pager, 0, tokens, 256);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 16);
    fkv_seq seq = open_seq(pager, 256);
    /* only what the next step may take is given up, and the front of the prompt stays longest */
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

START_TEST(a_cut_page_is_given_up_by_the_tree_where_its_copy_has_no_room) {
    fkv_pager *pager = pager_world_open(&full_spec);
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

START_TEST(an_offer_never_pins_what_is_promised) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq other = open_seq(pager, 160); /* of 16: 10 promised here, 4 there; 2 cached are part of it */
    fkv_seq seq = open_seq(pager, 64);
    grow(pager, seq, 64);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 2);
    fkv_seq more = open_seq(pager, 32);
    insert(pager, seq, tokens, 64); /* a node below the cached two would pin them */
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

/* ---- offers ---- */

START_TEST(what_is_in_the_tree_stays_when_offered_again) {
    fkv_pager *pager = pager_world_open(&full_spec);
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
    ck_assert_uint_eq(stats_of(pager, 0).cached, 0); /* b is below: what it does not hold is pinned as well */
    ck_assert_uint_eq(stats_of(pager, 0).pinned, 3);
    close_seq(pager, b);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 3);
}
END_TEST

START_TEST(tokens_that_contradict_the_tree_are_refused) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[64];
    text(1, tokens, 64);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq seq = open_on(pager, 0, 64, tokens, 64, 32);
    grow(pager, seq, 32);
    for (uint32_t i = 0; i < 32; i += 15) {
        uint32_t other[64];
        memcpy(other, tokens, sizeof other);
        other[i] = 5;
        pager_world_snapshot(pager);
        ck_status(fkv_pager_insert(pager, seq, other, 64), FKV_BAD_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(fkv_message(), "other tokens"));
        ck_assert(pager_world_unchanged(pager));
    }
    insert(pager, seq, tokens, 64);
    tokens[60] = 5;
    ck_status(fkv_pager_insert(pager, seq, tokens, 64), FKV_BAD_ARGUMENT);
}
END_TEST

START_TEST(an_offer_of_less_than_a_page_is_nothing) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t tokens[16];
    text(1, tokens, 16);
    fkv_seq seq = open_seq(pager, 16);
    grow(pager, seq, 16);
    insert(pager, seq, NULL, 0);
    insert(pager, seq, tokens, 15);
    ck_assert_uint_eq(pager->tree.n_free, pager->tree.n_nodes);
}
END_TEST

/* ---- pins and age ---- */

START_TEST(evicts_the_oldest_leaf_first) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t texts[4][48];
    for (uint32_t t = 0; t < 4; t++) {
        text(t, texts[t], 48);
        keep_tokens(pager, 0, texts[t], 48);
    }
    ck_assert_uint_eq(found_tokens(pager, 0, texts[0], 48), 48); /* now the youngest */
    fkv_seq seq = open_seq(pager, 256);                          /* of 4 free pages a step may take 3 */
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

START_TEST(an_offer_makes_a_prefix_young) {
    fkv_pager *pager = pager_world_open(&full_spec);
    uint32_t texts[2][48];
    for (uint32_t t = 0; t < 2; t++) text(t, texts[t], 48);
    keep_tokens(pager, 0, texts[0], 48);
    keep_tokens(pager, 0, texts[1], 48);
    keep_tokens(pager, 0, texts[0], 48); /* computed again, offered again: the pages are other ones, the age counts */
    fkv_seq seq = open_seq(pager, 256);
    grow(pager, seq, 160);
    ck_assert(in_tree(pager, texts[0], 3));
    ck_assert(!in_tree(pager, texts[1], 1));
}
END_TEST

START_TEST(a_branch_goes_before_what_it_branches_from) {
    fkv_pager *pager = pager_world_open(&full_spec);
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
    grow(pager, seq, 144); /* two pages must go: the end of the older branch */
    ck_assert(in_tree(pager, branch, 4) && in_tree(pager, trunk, 2) && !in_tree(pager, trunk, 3));
    grow(pager, seq, 112);
    ck_assert(!in_tree(pager, trunk, 1));
}
END_TEST

START_TEST(an_open_sequence_pins_its_prefix) {
    fkv_pager *pager = pager_world_open(&full_spec);
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

START_TEST(a_fork_from_before_the_offer_pins_too) {
    fkv_pager *pager = pager_world_open(&full_spec);
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

START_TEST(clear_gives_up_all_but_what_is_in_use) {
    fkv_pager *pager = pager_world_open(&window_spec);
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
    ck_assert_uint_eq(stats_of(pager, 1).pinned, 3); /* the sinks' page and the two of the window */
}
END_TEST

/* ---- windows ---- */

START_TEST(a_match_needs_the_sinks_and_the_window) {
    fkv_pager *pager = pager_world_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    /* offered at the end: of the window group only the sinks' page and the last two are left, so only depth 6 can be used */
    keep_tokens(pager, 0, tokens, 96);
    ck_assert_uint_eq(stats_of(pager, 0).cached, 6);
    ck_assert_uint_eq(stats_of(pager, 1).cached, 3);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 96);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 95), 16); /* the sinks' page is all there is before page 4 */
    fkv_seq seq = open_on(pager, 0, 200, tokens, 96, 96);
    ck_assert_uint_eq(page_of(pager, seq, 1, 0), pager->tree.nodes[node_of(pager, tokens, 1)].pages[1]);
    grow(pager, seq, 100);
}
END_TEST

START_TEST(a_match_without_the_sinks_is_none) {
    fkv_pager *pager = pager_world_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    keep_tokens(pager, 0, tokens, 96);
    fkv_seq seq = open_on(pager, 0, 96, tokens, 96, 96);
    ck_ok(fkv_pager_truncate(pager, seq, 10)); /* the sinks' page is its own to write to, and leaves the tree */
    ck_assert_uint_eq(pager->tree.nodes[node_of(pager, tokens, 1)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 0);
}
END_TEST

START_TEST(a_node_without_its_window_page_is_given_one) {
    fkv_pager *pager = pager_world_open(&window_spec);
    uint32_t tokens[96];
    text(1, tokens, 96);
    keep_tokens(pager, 0, tokens, 96);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 16);
    fkv_seq seq = open_on(pager, 0, 96, tokens, 64, 16);
    grow(pager, seq, 48);
    insert(pager, seq, tokens, 64); /* pages 2 and 3 are still in its window */
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 64);
    close_seq(pager, seq);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 64), 64);
    ck_assert_uint_eq(found_tokens(pager, 0, tokens, 96), 96);
}
END_TEST

START_TEST(window_pages_are_stripped_oldest_first_and_sinks_last) {
    fkv_pager_spec spec = window_spec;
    spec.groups[1].n_pages = 8;
    fkv_pager *pager = pager_world_open(&spec);
    uint32_t old[64];
    uint32_t young[32];
    text(1, old, 64);
    text(2, young, 32);
    keep_tokens(pager, 0, old, 64);
    keep_tokens(pager, 0, young, 32);
    ck_assert_uint_eq(stats_of(pager, 1).cached, 5);
    const fkv_node *nodes = pager->tree.nodes;
    fkv_seq seq = open_seq(pager, 256); /* a step may take 3 of 8, 3 are free */
    grow(pager, seq, 16);
    ck_assert_uint_eq(nodes[node_of(pager, old, 3)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, old, 4)].pages[1], FKV_NO_PAGE);
    grow(pager, seq, 16);
    ck_assert_uint_eq(nodes[node_of(pager, old, 4)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, old, 1)].pages[1], FKV_NO_PAGE);
    ck_assert_uint_ne(nodes[node_of(pager, young, 2)].pages[1], FKV_NO_PAGE);
    ck_assert(in_tree(pager, old, 4)); /* the nodes and their full pages stay */
    ck_assert_uint_eq(stats_of(pager, 0).cached, 6);
}
END_TEST

START_TEST(a_window_page_that_only_writers_hold_leaves_the_tree) {
    fkv_pager *pager = pager_world_open(&window_spec);
    uint32_t tokens[32];
    text(1, tokens, 32);
    keep_tokens(pager, 0, tokens, 32);
    fkv_seq a = open_on(pager, 0, 64, tokens, 32, 32);
    fkv_seq b = open_on(pager, 0, 64, tokens, 32, 32);
    ck_ok(fkv_pager_truncate(pager, a, 20));
    ck_assert(fkv_pager_consistent(pager));
    const fkv_node *node = &pager->tree.nodes[node_of(pager, tokens, 2)];
    ck_assert_uint_ne(node->pages[1], FKV_NO_PAGE); /* b needs it as it is, and its cap has room for a's copy */
    close_seq(pager, b);
    ck_assert_uint_eq(node->pages[1], FKV_NO_PAGE); /* now a writes in place */
    ck_assert_uint_ne(node->pages[0], FKV_NO_PAGE);
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){a, 1}, 1));
    uint32_t n = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(pager, &n);
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(copies[0].group, 0);
    commit(pager);
}
END_TEST

START_TEST(without_a_full_group_window_pages_pin) {
    fkv_pager *pager = pager_world_open(&window_only_spec);
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
        insert(pager, seq, others, (i + 1) * 16); /* 15 nodes, of which 6 are pinned: the rest of the offer is dropped */
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

START_TEST(where_nodes_run_out_the_oldest_leaf_makes_room) {
    fkv_pager *pager = pager_world_open(&window_only_spec);
    uint32_t texts[3][96];
    for (uint32_t t = 0; t < 3; t++) {
        text(t, texts[t], 96);
        keep_tokens(pager, 0, texts[t], 96); /* 6 nodes each, of 15 */
    }
    ck_assert(in_tree(pager, texts[0], 3) && !in_tree(pager, texts[0], 4));
    ck_assert(in_tree(pager, texts[1], 6) && in_tree(pager, texts[2], 6));
    ck_assert_uint_eq(found_tokens(pager, 0, texts[2], 96), 96);
    uint32_t longest[400];
    text(9, longest, 400);
    keep_tokens(pager, 0, longest, 400); /* 25 pages: as many as there are nodes stay, and never its own front for its end */
    ck_assert(in_tree(pager, longest, 15) && !in_tree(pager, longest, 16));
}
END_TEST

TEST_MAIN("prefix", a_cached_prompt_is_shared_in_whole_pages, pages_say_whose_they_are, one_other_token_ends_the_match,
          the_same_page_after_another_beginning_is_another_page, tenants_never_share, colliding_hashes_do_not_share,
          writing_after_a_shared_prefix_leaves_it_alone, prompt_found_in_the_tree_counts_for_admission,
          pinning_cached_pages_does_not_break_a_promise, cached_pages_make_room_when_a_promise_needs_them,
          a_cut_page_is_given_up_by_the_tree_where_its_copy_has_no_room, an_offer_never_pins_what_is_promised,
          what_is_in_the_tree_stays_when_offered_again, tokens_that_contradict_the_tree_are_refused,
          an_offer_of_less_than_a_page_is_nothing, evicts_the_oldest_leaf_first, an_offer_makes_a_prefix_young,
          a_branch_goes_before_what_it_branches_from, an_open_sequence_pins_its_prefix, a_fork_from_before_the_offer_pins_too,
          clear_gives_up_all_but_what_is_in_use, a_match_needs_the_sinks_and_the_window, a_match_without_the_sinks_is_none,
          a_node_without_its_window_page_is_given_one, window_pages_are_stripped_oldest_first_and_sinks_last,
          a_window_page_that_only_writers_hold_leaves_the_tree, without_a_full_group_window_pages_pin,
          where_nodes_run_out_the_oldest_leaf_makes_room)
