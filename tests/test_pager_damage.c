/* Checks that fkv_pager_consistent() detects every kind of damage inflicted on a valid pager. */
#include "pager_fixture.h"

#include "../src/pager/node_heap.h"
#include "../src/pager/page_table.h"
#include "../src/pager/pool.h"
#include "../src/pager/prefix_tree.h"

enum { FULL = 0, WINDOW = 1 };

/* Pager configuration. The fields are page_tokens, max_seqs, max_seq_tokens, max_step_tokens and n_groups, followed by {window,
 * n_sinks, n_pages} for each group. */
static const fkv_pager_spec spec = {16, 6, 256, 32, 2, {{0, 0, 32}, {32, 4, 32}}};

static fkv_seq forked; /* sequence that shares a partly filled page */
static fkv_seq pinned; /* sequence that shares a prefix of 4 pages */

/* Returns a pager with idle prefixes, a pinned prefix, and a forked sequence that shares its last page. */
static fkv_pager *valid_pager(void) {
    fkv_pager *pager = pager_fixture_open(&spec);
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

static void page_in_the_free_list_twice(fkv_pager *p) { pool(p)->free[0] = pool(p)->free[1]; }
static void free_page_out_of_range(fkv_pager *p) { pool(p)->free[0] = 99; }
static void more_free_than_pages(fkv_pager *p) { pool(p)->n_free = 33; }
static void held_page_in_the_free_list(fkv_pager *p) { pool(p)->free[0] = held(p); }
static void free_page_with_a_node(fkv_pager *p) { pool(p)->node[pool(p)->free[0]] = idle_node(p); }
static void too_many_refs(fkv_pager *p) { pool(p)->refs[held(p)]++; }
static void too_few_refs(fkv_pager *p) { pool(p)->refs[held(p)]--; }
static void too_many_tails(fkv_pager *p) { pool(p)->tails[held(p)]++; }
static void more_tails_than_refs(fkv_pager *p) { pool(p)->tails[held(p)] = 9; }
static void stale_writers(fkv_pager *p) { pool(p)->writers[3] = 1; }
static void used_miscounted(fkv_pager *p) { pool(p)->counts.used++; }
static void shared_miscounted(fkv_pager *p) { pool(p)->counts.shared++; }
static void in_tree_miscounted(fkv_pager *p) { pool(p)->counts.in_tree++; }
static void copies_miscounted(fkv_pager *p) { pool(p)->counts.copies++; }

static void missing_table_entry(fkv_pager *p) { *entry(p, FULL, 0) = FKV_NO_PAGE; }
static void extra_table_entry(fkv_pager *p) { *entry(p, FULL, 7) = held(p); }
static void table_entry_of_another_sequence(fkv_pager *p) { *entry(p, WINDOW, 0) = page_of(p, pinned, WINDOW, 0); }
static void longer_than_its_maximum(fkv_pager *p) { sequence(p)->len = sequence(p)->max_tokens + 1; }
static void changed_maximum(fkv_pager *p) { sequence(p)->max_tokens += 16; }
static void more_pages_than_reserved(fkv_pager *p) { sequence(p)->max_tokens = 16, sequence(p)->len = 16; }
static void cap_below_held_pages(fkv_pager *p) {
    p->groups[FULL].width = 1; /* the width is also the length of a page-table row, so the table is misread, too */
}
static void entered_miscounted(fkv_pager *p) { p->groups[FULL].entered++; }
static void reserved_miscounted(fkv_pager *p) { p->groups[WINDOW].reserved++; }
static void pages_taken_without_a_step(fkv_pager *p) { p->groups[WINDOW].taken = 1; }

static void too_many_sequences(fkv_pager *p) { p->n_seqs++; }
static void open_slot_in_the_free_list(fkv_pager *p) { p->slots[p->n_seqs] = slot_of(p, forked); }
static void open_sequence_without_an_id(fkv_pager *p) { sequence(p)->generation = 0; }
static void closed_sequence_with_an_id(fkv_pager *p) { p->sequences[p->slots[p->n_seqs]].generation = 7; }
static void pending_close_without_a_step(fkv_pager *p) {
    sequence(p)->generation = 0;
    p->step.n_closing = 1;
    p->counters.seqs--;
}
static void row_without_a_step(fkv_pager *p) { sequence(p)->row = 0; }
static void step_without_rows(fkv_pager *p) { p->step.open = true; }
static void stale_page_count(fkv_pager *p) { p->counters.groups[WINDOW].shared++; }
static void stale_sequence_count(fkv_pager *p) { p->counters.seqs++; }

static void node_age_beyond_the_clock(fkv_pager *p) { p->tree.nodes[busy_node(p)].last_use = p->tree.clock + 1; }
static void changed_token(fkv_pager *p) { p->tree.tokens[idle_node(p) * 16 + 3] ^= 1; }
static void changed_tenant(fkv_pager *p) { p->tree.nodes[idle_node(p)].tenant ^= 1; }
static void root_node_with_a_depth(fkv_pager *p) { p->tree.nodes[busy_node(p)].depth = 1; }
static void parent_out_of_range(fkv_pager *p) { p->tree.nodes[idle_node(p)].parent = 99; }
static void dead_parent(fkv_pager *p) { p->tree.nodes[p->tree.nodes[idle_node(p)].parent].live = false; }
static void skipped_depth(fkv_pager *p) { p->tree.nodes[idle_node(p)].depth++; }
static void parent_older_than_its_child(fkv_pager *p) { p->tree.nodes[busy_node(p)].last_use = 0; }
static void missing_full_page(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[FULL] = FKV_NO_PAGE; }
static void missing_window_page(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[WINDOW] = FKV_NO_PAGE; }
static void page_out_of_range(fkv_pager *p) { p->tree.nodes[idle_node(p)].pages[FULL] = 99; }
static void page_of_another_node(fkv_pager *p) {
    p->tree.nodes[idle_node(p)].pages[FULL] = p->tree.nodes[busy_node(p)].pages[FULL];
}
static void uncounted_use(fkv_pager *p) { p->tree.nodes[busy_node(p)].used = 0; }
static void busy_miscounted(fkv_pager *p) { p->tree.nodes[busy_node(p)].busy++; }
static void children_miscounted(fkv_pager *p) { p->tree.nodes[busy_node(p)].n_children++; }
static void idle_miscounted(fkv_pager *p) { p->tree.n_idle--; }
static void lost_node(fkv_pager *p) { p->tree.n_free--; }
static void leaf_missing_from_its_heap(fkv_pager *p) { fkv_heap_remove(&p->tree.leaves, p->tree.nodes, idle_node(p)); }
static void dead_node_in_a_heap(fkv_pager *p) { fkv_heap_push(&p->tree.leaves, p->tree.nodes, p->tree.free[0]); }
static void used_page_in_a_heap(fkv_pager *p) { fkv_heap_push(&p->tree.cached[WINDOW], p->tree.nodes, busy_node(p)); }
static void heap_out_of_order(fkv_pager *p) {
    fkv_node_heap *heap = &p->tree.leaves;
    uint32_t top = heap->items[0];
    heap->items[0] = heap->items[1];
    heap->items[1] = top;
    heap->place[heap->items[0]] = 0;
    heap->place[heap->items[1]] = 1;
}
static void window_heap_out_of_order(fkv_pager *p) { p->tree.nodes[p->tree.cached[WINDOW].items[0]].depth += 40; }
static void heap_with_a_wrong_index(fkv_pager *p) { p->tree.cached[WINDOW].place[p->tree.cached[WINDOW].items[1]] = 0; }
static void heap_too_large(fkv_pager *p) { p->tree.cached[WINDOW].n = 99; }
static void heap_too_small(fkv_pager *p) { p->tree.cached[WINDOW].n--; }

typedef struct damage {
    const char *name;
    void (*done)(fkv_pager *pager);
} damage;

#define DAMAGE(what) {#what, what}

static const damage damages[] = {
    DAMAGE(page_in_the_free_list_twice),
    DAMAGE(free_page_out_of_range),
    DAMAGE(more_free_than_pages),
    DAMAGE(held_page_in_the_free_list),
    DAMAGE(free_page_with_a_node),
    DAMAGE(too_many_refs),
    DAMAGE(too_few_refs),
    DAMAGE(too_many_tails),
    DAMAGE(more_tails_than_refs),
    DAMAGE(stale_writers),
    DAMAGE(used_miscounted),
    DAMAGE(shared_miscounted),
    DAMAGE(in_tree_miscounted),
    DAMAGE(copies_miscounted),
    DAMAGE(missing_table_entry),
    DAMAGE(extra_table_entry),
    DAMAGE(table_entry_of_another_sequence),
    DAMAGE(longer_than_its_maximum),
    DAMAGE(changed_maximum),
    DAMAGE(more_pages_than_reserved),
    DAMAGE(cap_below_held_pages),
    DAMAGE(entered_miscounted),
    DAMAGE(reserved_miscounted),
    DAMAGE(pages_taken_without_a_step),
    DAMAGE(too_many_sequences),
    DAMAGE(open_slot_in_the_free_list),
    DAMAGE(open_sequence_without_an_id),
    DAMAGE(closed_sequence_with_an_id),
    DAMAGE(pending_close_without_a_step),
    DAMAGE(row_without_a_step),
    DAMAGE(step_without_rows),
    DAMAGE(stale_page_count),
    DAMAGE(stale_sequence_count),
    DAMAGE(node_age_beyond_the_clock),
    DAMAGE(changed_token),
    DAMAGE(changed_tenant),
    DAMAGE(root_node_with_a_depth),
    DAMAGE(parent_out_of_range),
    DAMAGE(dead_parent),
    DAMAGE(skipped_depth),
    DAMAGE(parent_older_than_its_child),
    DAMAGE(missing_full_page),
    DAMAGE(missing_window_page),
    DAMAGE(page_out_of_range),
    DAMAGE(page_of_another_node),
    DAMAGE(uncounted_use),
    DAMAGE(busy_miscounted),
    DAMAGE(children_miscounted),
    DAMAGE(idle_miscounted),
    DAMAGE(lost_node),
    DAMAGE(leaf_missing_from_its_heap),
    DAMAGE(dead_node_in_a_heap),
    DAMAGE(used_page_in_a_heap),
    DAMAGE(heap_out_of_order),
    DAMAGE(window_heap_out_of_order),
    DAMAGE(heap_with_a_wrong_index),
    DAMAGE(heap_too_large),
    DAMAGE(heap_too_small),
};

START_TEST(every_kind_of_damage_is_detected) {
    fkv_pager *pager = valid_pager();
    pager_fixture_snapshot(pager);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        damages[i].done(pager);
        ck_assert_msg(!fkv_pager_consistent(pager), "%s was not detected", damages[i].name);
        pager_fixture_restore();
        ck_assert(fkv_pager_consistent(pager));
    }
}
END_TEST

START_TEST(damage_during_a_step_is_detected) {
    fkv_pager *pager = valid_pager();
    ck_ok(fkv_pager_step_begin(pager, &(fkv_row){forked, 3}, 1));
    ck_assert(fkv_pager_consistent(pager));
    pager_fixture_snapshot(pager);

    pager->step.copies[0].from =
        pager->step.copies[0].to; /* makes the source of the copy a page that the sequence does not hold */
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    pager->step.rows[0].slot ^= 1; /* assigns the row to another sequence */
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    pager->step.rows[0].start--; /* makes the row start one token too early */
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    pager->groups[FULL].taken++; /* makes the step count a page that it did not allocate */
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    pager->step.n_closing++; /* makes the step count a closed sequence, although none was closed */
    pager->counters.seqs--;
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    ck_ok(fkv_pager_close(pager, forked));
    ck_assert(fkv_pager_consistent(pager));
    pager->step.n_closing = 0; /* makes the step count no closed sequence, although one was closed */
    pager->counters.seqs++;
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_restore();
    ck_assert(fkv_pager_consistent(pager));
}
END_TEST

START_TEST(overcommitted_pool_is_detected) {
    fkv_pager *pager = valid_pager();
    /* increases reservations without the admission check: all counts stay consistent, but the pool has too few pages */
    fkv_sequence *s = sequence(pager);
    uint32_t more = 256 - s->max_tokens;
    s->max_tokens += more;
    pager->sequences[slot_of(pager, pinned)].max_tokens = 256;
    pager->groups[FULL].reserved += more / 16 + 9;
    fkv_window_pages window = fkv_pager_window_pages(&spec, WINDOW);
    ck_assert_uint_eq(window.most, 6);
    pager->groups[WINDOW].reserved += window.rest - 3;
    pager->groups[WINDOW].in_steps += window.most - window.rest;
    pager->counters.groups[FULL].promised = (uint32_t)fkv_group_promised(pager, FULL);
    pager->counters.groups[WINDOW].promised = (uint32_t)fkv_group_promised(pager, WINDOW);
    uint32_t refs[32] = {0};
    uint32_t tails[32] = {0};
    ck_assert(fkv_table_consistent(pager, FULL, refs, tails));
    ck_assert_uint_gt(fkv_group_promised(pager, FULL), fkv_group_room(pager, FULL));
    ck_assert(!fkv_pager_consistent(pager));
    pager_fixture_close();
}
END_TEST

TEST_MAIN("pager damage", every_kind_of_damage_is_detected, damage_during_a_step_is_detected, overcommitted_pool_is_detected)
