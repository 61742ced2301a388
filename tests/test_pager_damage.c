/* A check that cannot fail checks nothing: every kind of damage done by hand to a sound pager is noticed by
 * fkv_pager_consistent().
 */
#include "pager_world.h"

#include "../src/pager/node_heap.h"
#include "../src/pager/page_table.h"
#include "../src/pager/pool.h"
#include "../src/pager/prefix_tree.h"

enum { FULL = 0, WINDOW = 1 };

/* page_tokens, max_seqs, max_seq_tokens, max_step_tokens, n_groups, {window, n_sinks, n_pages} of each */
static const fkv_pager_spec spec = {16, 6, 256, 32, 2, {{0, 0, 32}, {32, 4, 32}}};

static fkv_seq forked; /* shares a partly filled page */
static fkv_seq pinned; /* on a prefix of 4 pages */

/* Idle prefixes, a pinned one, a fork with a shared tail. */
static fkv_pager *sound_pager(void) {
    fkv_pager *pager = pager_world_open(&spec);
    uint32_t tokens[64];
    for (uint32_t t = 0; t < 3; t++) {
        text(t, tokens, 64);
        keep_tokens(pager, 0, tokens, 64);
    }
    pinned = open_on(pager, 0, 100, tokens, 64, 64);
    fkv_seq parent = open_seq(pager, 40);
    grow(pager, parent, 20);
    forked = fork_seq(pager, parent, 40);
    return pager;
}

static uint32_t idle_node(const fkv_pager *pager) { return pager->tree.leaves.items[0]; }
static uint32_t busy_node(const fkv_pager *pager) { return pager->groups[FULL].pool.node[page_of(pager, pinned, FULL, 0)]; }
static fkv_pool *pool(fkv_pager *pager) { return &pager->groups[FULL].pool; }
static uint32_t held(const fkv_pager *pager) { return page_of(pager, forked, FULL, 0); }
static uint32_t *entry(const fkv_pager *pager, uint32_t group, uint32_t i) {
    return fkv_table_entry(&pager->groups[group], slot_of(pager, forked), i);
}
static fkv_sequence *sequence(fkv_pager *pager) { return &pager->sequences[slot_of(pager, forked)]; }

static void a_page_free_twice(fkv_pager *p) { pool(p)->free[0] = pool(p)->free[1]; }
static void a_free_page_that_is_none(fkv_pager *p) { pool(p)->free[0] = 99; }
static void more_free_than_pages(fkv_pager *p) { pool(p)->n_free = 33; }
static void a_held_page_in_the_free_list(fkv_pager *p) { pool(p)->free[0] = held(p); }
static void a_free_page_with_a_node(fkv_pager *p) { pool(p)->node[pool(p)->free[0]] = idle_node(p); }
static void too_many_refs(fkv_pager *p) { pool(p)->refs[held(p)]++; }
static void too_few_refs(fkv_pager *p) { pool(p)->refs[held(p)]--; }
static void a_tail_too_many(fkv_pager *p) { pool(p)->tails[held(p)]++; }
static void more_tails_than_refs(fkv_pager *p) { pool(p)->tails[held(p)] = 9; }
static void writers_left_behind(fkv_pager *p) { pool(p)->writers[3] = 1; }
static void used_miscounted(fkv_pager *p) { pool(p)->counts.used++; }
static void shared_miscounted(fkv_pager *p) { pool(p)->counts.shared++; }
static void in_tree_miscounted(fkv_pager *p) { pool(p)->counts.in_tree++; }
static void copies_miscounted(fkv_pager *p) { pool(p)->counts.copies++; }

static void an_entry_lost(fkv_pager *p) { *entry(p, FULL, 0) = FKV_NO_PAGE; }
static void an_entry_too_many(fkv_pager *p) { *entry(p, FULL, 7) = held(p); }
static void an_entry_of_another_sequence(fkv_pager *p) { *entry(p, WINDOW, 0) = page_of(p, pinned, WINDOW, 0); }
static void longer_than_its_maximum(fkv_pager *p) { sequence(p)->len = sequence(p)->max_tokens + 1; }
static void another_maximum(fkv_pager *p) { sequence(p)->max_tokens += 16; }
static void more_pages_than_reserved(fkv_pager *p) { sequence(p)->max_tokens = 16, sequence(p)->len = 16; }
static void cap_below_what_is_held(fkv_pager *p) { p->groups[FULL].width = 1; /* the table is then read wrongly as well */ }
static void entered_miscounted(fkv_pager *p) { p->groups[FULL].entered++; }
static void reserved_miscounted(fkv_pager *p) { p->groups[WINDOW].reserved++; }
static void pages_taken_by_no_step(fkv_pager *p) { p->groups[WINDOW].taken = 1; }

static void a_sequence_too_many(fkv_pager *p) { p->n_seqs++; }
static void an_open_slot_among_the_free(fkv_pager *p) { p->slots[p->n_seqs] = slot_of(p, forked); }
static void an_open_sequence_without_a_number(fkv_pager *p) { sequence(p)->generation = 0; }
static void a_closed_sequence_with_a_number(fkv_pager *p) { p->sequences[p->slots[p->n_seqs]].generation = 7; }
static void a_close_that_waits_for_no_step(fkv_pager *p) {
    sequence(p)->generation = 0;
    p->step.n_closing = 1;
    p->figures.seqs--;
}
static void a_row_without_a_step(fkv_pager *p) { sequence(p)->row = 0; }
static void a_step_without_rows(fkv_pager *p) { p->step.open = true; }
static void a_stale_figure(fkv_pager *p) { p->figures.groups[WINDOW].shared++; }
static void a_stale_count_of_sequences(fkv_pager *p) { p->figures.seqs++; }

static void a_node_from_the_future(fkv_pager *p) { p->tree.nodes[busy_node(p)].last_use = p->tree.clock + 1; }
static void a_token_changed(fkv_pager *p) { p->tree.tokens[idle_node(p) * 16 + 3] ^= 1; }
static void a_tenant_changed(fkv_pager *p) { p->tree.nodes[idle_node(p)].tenant ^= 1; }
static void a_first_page_not_at_the_front(fkv_pager *p) { p->tree.nodes[busy_node(p)].depth = 1; }
static void a_parent_that_is_none(fkv_pager *p) { p->tree.nodes[idle_node(p)].parent = 99; }
static void a_dead_parent(fkv_pager *p) { p->tree.nodes[p->tree.nodes[idle_node(p)].parent].live = false; }
static void a_depth_skipped(fkv_pager *p) { p->tree.nodes[idle_node(p)].depth++; }
static void a_parent_older_than_its_child(fkv_pager *p) { p->tree.nodes[busy_node(p)].last_use = 0; }
static void a_full_page_lost(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[FULL] = FKV_NO_PAGE; }
static void a_window_page_lost(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[WINDOW] = FKV_NO_PAGE; }
static void a_page_that_is_none(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[FULL] = 99; }
static void a_page_of_another_node(fkv_pager *p) {
    p->tree.nodes[idle_node(p)].pages[FULL] = p->tree.nodes[busy_node(p)].pages[FULL];
}
static void a_use_unnoticed(fkv_pager *p) { p->tree.nodes[busy_node(p)].used = 0; }
static void busy_miscounted(fkv_pager *p) { p->tree.nodes[busy_node(p)].busy++; }
static void children_miscounted(fkv_pager *p) { p->tree.nodes[busy_node(p)].n_children++; }
static void idle_miscounted(fkv_pager *p) { p->tree.n_idle--; }
static void a_node_lost(fkv_pager *p) { p->tree.n_free--; }
static void a_leaf_not_in_its_heap(fkv_pager *p) { fkv_heap_remove(&p->tree.leaves, p->tree.nodes, idle_node(p)); }
static void a_dead_node_in_a_heap(fkv_pager *p) { fkv_heap_push(&p->tree.leaves, p->tree.nodes, p->tree.free[0]); }
static void a_used_page_in_a_heap(fkv_pager *p) { fkv_heap_push(&p->tree.cached[WINDOW], p->tree.nodes, busy_node(p)); }
static void a_heap_out_of_order(fkv_pager *p) {
    fkv_node_heap *heap = &p->tree.leaves;
    uint32_t top = heap->items[0];
    heap->items[0] = heap->items[1];
    heap->items[1] = top;
    heap->place[heap->items[0]] = 0;
    heap->place[heap->items[1]] = 1;
}
static void a_window_heap_out_of_order(fkv_pager *p) { p->tree.nodes[p->tree.cached[WINDOW].items[0]].depth += 40; }
static void a_heap_with_a_wrong_place(fkv_pager *p) { p->tree.cached[WINDOW].place[p->tree.cached[WINDOW].items[1]] = 0; }
static void a_heap_with_too_many(fkv_pager *p) { p->tree.cached[WINDOW].n = 99; }
static void a_heap_with_too_few(fkv_pager *p) { p->tree.cached[WINDOW].n--; }

typedef struct damage {
    const char *name;
    void (*done)(fkv_pager *pager);
} damage;

#define DAMAGE(what) {#what, what}

static const damage damages[] = {
    DAMAGE(a_page_free_twice),
    DAMAGE(a_free_page_that_is_none),
    DAMAGE(more_free_than_pages),
    DAMAGE(a_held_page_in_the_free_list),
    DAMAGE(a_free_page_with_a_node),
    DAMAGE(too_many_refs),
    DAMAGE(too_few_refs),
    DAMAGE(a_tail_too_many),
    DAMAGE(more_tails_than_refs),
    DAMAGE(writers_left_behind),
    DAMAGE(used_miscounted),
    DAMAGE(shared_miscounted),
    DAMAGE(in_tree_miscounted),
    DAMAGE(copies_miscounted),
    DAMAGE(an_entry_lost),
    DAMAGE(an_entry_too_many),
    DAMAGE(an_entry_of_another_sequence),
    DAMAGE(longer_than_its_maximum),
    DAMAGE(another_maximum),
    DAMAGE(more_pages_than_reserved),
    DAMAGE(cap_below_what_is_held),
    DAMAGE(entered_miscounted),
    DAMAGE(reserved_miscounted),
    DAMAGE(pages_taken_by_no_step),
    DAMAGE(a_sequence_too_many),
    DAMAGE(an_open_slot_among_the_free),
    DAMAGE(an_open_sequence_without_a_number),
    DAMAGE(a_closed_sequence_with_a_number),
    DAMAGE(a_close_that_waits_for_no_step),
    DAMAGE(a_row_without_a_step),
    DAMAGE(a_step_without_rows),
    DAMAGE(a_stale_figure),
    DAMAGE(a_stale_count_of_sequences),
    DAMAGE(a_node_from_the_future),
    DAMAGE(a_token_changed),
    DAMAGE(a_tenant_changed),
    DAMAGE(a_first_page_not_at_the_front),
    DAMAGE(a_parent_that_is_none),
    DAMAGE(a_dead_parent),
    DAMAGE(a_depth_skipped),
    DAMAGE(a_parent_older_than_its_child),
    DAMAGE(a_full_page_lost),
    DAMAGE(a_window_page_lost),
    DAMAGE(a_page_that_is_none),
    DAMAGE(a_page_of_another_node),
    DAMAGE(a_use_unnoticed),
    DAMAGE(busy_miscounted),
    DAMAGE(children_miscounted),
    DAMAGE(idle_miscounted),
    DAMAGE(a_node_lost),
    DAMAGE(a_leaf_not_in_its_heap),
    DAMAGE(a_dead_node_in_a_heap),
    DAMAGE(a_used_page_in_a_heap),
    DAMAGE(a_heap_out_of_order),
    DAMAGE(a_window_heap_out_of_order),
    DAMAGE(a_heap_with_a_wrong_place),
    DAMAGE(a_heap_with_too_many),
    DAMAGE(a_heap_with_too_few),
};

START_TEST(every_kind_of_damage_is_noticed) {
    fkv_pager *pager = sound_pager();
    pager_world_snapshot(pager);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        damages[i].done(pager);
        ck_assert_msg(!fkv_pager_consistent(pager), "%s went unnoticed", damages[i].name);
        pager_world_restore();
        ck_assert(fkv_pager_consistent(pager));
    }
}
END_TEST

START_TEST(damage_in_an_open_step_is_noticed) {
    fkv_pager *pager = sound_pager();
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){forked, 3}, 1));
    ck_assert(fkv_pager_consistent(pager));
    pager_world_snapshot(pager);

    pager->step.copies[0].from = pager->step.copies[0].to; /* the page that was read has lost its holder */
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    pager->step.rows[0].slot ^= 1; /* a row of another sequence */
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    pager->step.rows[0].start--; /* that begins too early */
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    pager->groups[FULL].taken++; /* a page from nowhere */
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    pager->step.n_closing++; /* nobody was closed */
    pager->figures.seqs--;
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    ck_ok(fkv_pager_close(pager, forked));
    ck_assert(fkv_pager_consistent(pager));
    pager->step.n_closing = 0; /* somebody was */
    pager->figures.seqs++;
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_restore();
    ck_assert(fkv_pager_consistent(pager));
}
END_TEST

START_TEST(a_broken_promise_is_noticed) {
    fkv_pager *pager = sound_pager();
    /* a sequence that was let in without asking: every count agrees, but the pages are not there */
    fkv_sequence *s = sequence(pager);
    uint32_t more = 256 - s->max_tokens;
    s->max_tokens += more;
    pager->sequences[slot_of(pager, pinned)].max_tokens = 256;
    pager->groups[FULL].reserved += more / 16 + 9;
    fkv_window_pages window = fkv_pager_window_pages(&spec, WINDOW);
    ck_assert_uint_eq(window.most, 6);
    pager->groups[WINDOW].reserved += window.rest - 3;
    pager->groups[WINDOW].in_steps += window.most - window.rest;
    pager->figures.groups[FULL].promised = (uint32_t)fkv_group_promised(pager, FULL);
    pager->figures.groups[WINDOW].promised = (uint32_t)fkv_group_promised(pager, WINDOW);
    uint32_t refs[32] = {0};
    uint32_t tails[32] = {0};
    ck_assert(fkv_table_consistent(pager, FULL, refs, tails));
    ck_assert_uint_gt(fkv_group_promised(pager, FULL), fkv_group_room(pager, FULL));
    ck_assert(!fkv_pager_consistent(pager));
    pager_world_close();
}
END_TEST

TEST_MAIN("pager damage", every_kind_of_damage_is_noticed, damage_in_an_open_step_is_noticed, a_broken_promise_is_noticed)
