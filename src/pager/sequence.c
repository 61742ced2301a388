/* Lifecycle of sequences: open, fork, reserve, truncate, fill and close, and queries about a sequence. A sequence is admitted
 * with pages for max_tokens or not at all, so later calls cannot run out of pages.
 *
 * Every used table entry counts as one reference to its page; fkv_tree_page_change() maintains these counts. The set of used
 * entries follows from the length of the sequence (page_table.h).
 */
#include "page_table.h"
#include "pager_state.h"
#include "pool.h"
#include "prefix_tree.h"

enum { SLOT_BITS = 16 };

_Atomic uint64_t fkv_sequences_opened;

/* Returns a new generation number, which is never 0. A number repeats only after all 2^48 - 1 numbers have been used. */
static uint64_t next_generation(void) {
    const uint64_t n_generations = (UINT64_C(1) << (64 - SLOT_BITS)) - 1;
    return atomic_fetch_add_explicit(&fkv_sequences_opened, 1, memory_order_relaxed) % n_generations + 1;
}

fkv_status fkv_pager_slot(const fkv_pager *pager, fkv_seq seq, uint32_t *slot) {
    uint32_t at = (uint32_t)(seq & ((UINT32_C(1) << SLOT_BITS) - 1));
    uint64_t generation = seq >> SLOT_BITS;
    bool known = generation != 0 && at < pager->spec.max_seqs && pager->sequences[at].generation == generation;
    FKV_REQUIRE(known, FKV_BAD_SEQ, "sequence handle %llu is not open in this cache; the sequence was closed or never opened",
                (unsigned long long)seq);
    *slot = at;
    return FKV_OK;
}

fkv_status fkv_pager_length(const fkv_pager *pager, fkv_seq seq, uint32_t *n_tokens) {
    uint32_t slot = 0;
    FKV_REQUIRE(n_tokens != NULL, FKV_BAD_ARGUMENT, "n_tokens is NULL");
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    *n_tokens = pager->sequences[slot].len;
    return FKV_OK;
}

fkv_page_view fkv_pager_view(const fkv_pager *pager, uint32_t group, uint32_t slot) {
    FKV_ASSERT(group < pager->spec.n_groups && slot < pager->spec.max_seqs);
    const fkv_group *g = &pager->groups[group];
    return (fkv_page_view){.pages = &g->entries[(uint64_t)slot * g->width], .n_fixed = g->n_fixed, .n_ring = g->n_ring};
}

uint32_t fkv_pager_first_page(const fkv_pager *pager, uint32_t group, uint32_t position) {
    return fkv_table_first(&pager->groups[group], pager->spec.page_tokens, position);
}

bool fkv_pager_covers(const fkv_pager *pager, uint32_t slot, uint32_t n_tokens) {
    uint32_t len = pager->sequences[slot].len;
    if (n_tokens > len) return false;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (!fkv_table_covers(pager, g, &pager->sequences[slot], n_tokens)) return false;
    return true;
}

static fkv_status require_no_step(const fkv_pager *pager) {
    FKV_REQUIRE(!pager->step.open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    return FKV_OK;
}

/* ---- admission ---- */

/* Checks that max_tokens does not exceed the maximum length of a sequence. */
static fkv_status check_max_tokens(const fkv_pager *pager, uint32_t max_tokens) {
    FKV_REQUIRE(max_tokens <= pager->spec.max_seq_tokens, FKV_POOL_FULL,
                "max_tokens is %u but the cache holds at most %u tokens; lower it, or open the cache with a larger max_tokens",
                max_tokens, pager->spec.max_seq_tokens);
    return FKV_OK;
}

/* Checks whether a new sequence with this max_tokens can be admitted. In the full group, the new sequence shares n_shared pages,
 * pins n_pinned cached pages, and requires n_copies additional page copies. */
static fkv_status check_admission(const fkv_pager *pager, uint32_t max_tokens, uint32_t n_shared, uint32_t n_pinned,
                                  uint32_t n_copies) {
    FKV_TRY(check_max_tokens(pager, max_tokens));
    FKV_REQUIRE(pager->n_seqs < pager->spec.max_seqs, FKV_SEQS_FULL,
                "%u sequences are already open, which is the maximum; close one, or open the cache with a larger max_seqs",
                pager->spec.max_seqs);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group with = fkv_table_reserve(pager, g, max_tokens, 0);
        uint64_t reserved = fkv_group_reserved(&pager->groups[g]);
        uint64_t needed = fkv_group_reserved(&with) - reserved;
        uint64_t room = pager->groups[g].pool.n_pages - reserved;
        if (g == pager->full) {
            needed = needed - n_shared + n_copies + n_pinned;
            room = fkv_group_room(pager, g) - fkv_group_promised(pager, g);
        }
        FKV_REQUIRE(
            needed <= room, FKV_POOL_FULL,
            "a sequence of %u tokens needs %llu pages of group %u, but only %llu of this group's %u pages are not reserved: close "
            "sequences, lower max_tokens, or open the cache with a larger max_tokens",
            max_tokens, (unsigned long long)needed, g, (unsigned long long)room, pager->groups[g].pool.n_pages);
    }
    return FKV_OK;
}

/* Adds the reservation of a sequence with max_tokens = `more` to the group, and removes the reservation of a sequence with
 * max_tokens = `less`. If `more` is 0, nothing is added; if `less` is 0, nothing is removed.
 */
static void reserve_pages(fkv_pager *pager, uint32_t group, uint32_t more, uint32_t less) {
    fkv_group with = fkv_table_reserve(pager, group, more, less);
    pager->groups[group].reserved = with.reserved;
    pager->groups[group].in_steps = with.in_steps;
}

/* Initializes a free slot and reserves the pages of its sequence. */
static uint32_t allocate_slot(fkv_pager *pager, uint64_t tenant, uint32_t len, uint32_t max_tokens, uint32_t spare_from) {
    uint32_t slot = pager->slots[pager->n_seqs++];
    fkv_table_prepare(pager, slot);
    fkv_sequence *s = &pager->sequences[slot];
    *s = (fkv_sequence){.generation = next_generation(),
                        .tenant = tenant,
                        .len = len,
                        .max_tokens = max_tokens,
                        .spare_from = spare_from,
                        .row = FKV_NO_ROW,
                        .open = true};
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        reserve_pages(pager, g, max_tokens, 0);
        if (g == pager->full) pager->groups[g].entered += fkv_pages_of(pager, len);
    }
    return slot;
}

static fkv_seq slot_handle(const fkv_pager *pager, uint32_t slot) {
    return pager->sequences[slot].generation << SLOT_BITS | slot;
}

/* ---- open, fork ---- */

/* Shares the pages of the path that ends in `node`, and marks the path as most recently used. */
static void share_path(fkv_pager *pager, uint32_t slot, uint32_t node) {
    const fkv_sequence *s = &pager->sequences[slot];
    pager->tree.clock++;
    for (; node != FKV_NO_NODE; node = pager->tree.nodes[node].parent) {
        fkv_tree_touch(pager, node);
        uint32_t i = pager->tree.nodes[node].depth;
        for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
            fkv_group *group = &pager->groups[g];
            if (fkv_table_skip(group, pager->spec.page_tokens, s, s->len, i) != i) continue;
            uint32_t page = pager->tree.nodes[node].pages[g];
            *fkv_table_entry(group, slot, i) = page;
            fkv_tree_page_change(pager, g, page, 1, 0);
        }
    }
}

static fkv_status check_seq_config(const fkv_seq_config *config) {
    FKV_REQUIRE(config != NULL, FKV_BAD_ARGUMENT, "config is NULL");
    FKV_REQUIRE(config->max_tokens > 0, FKV_BAD_ARGUMENT,
                "max_tokens is 0; set it to the maximum length of the sequence, prompt included");
    FKV_REQUIRE(config->prompt != NULL || config->n_prompt == 0, FKV_BAD_ARGUMENT,
                "prompt is NULL but n_prompt is %u; pass the tokens, or set n_prompt to 0", config->n_prompt);
    return FKV_OK;
}

/* Looks up the prompt in the prefix tree. */
static fkv_match match_prompt(const fkv_pager *pager, const fkv_seq_config *config) {
    uint32_t n_tokens = fkv_min_u32(config->n_prompt, fkv_min_u32(config->max_tokens, pager->spec.max_seq_tokens));
    return fkv_tree_match(pager, config->tenant, config->prompt, n_tokens);
}

fkv_status fkv_pager_match(const fkv_pager *pager, const fkv_seq_config *config, uint32_t *n_shared) {
    FKV_REQUIRE(n_shared != NULL, FKV_BAD_ARGUMENT, "n_shared is NULL");
    FKV_TRY(check_seq_config(config));
    *n_shared = match_prompt(pager, config).n_pages * pager->spec.page_tokens;
    return FKV_OK;
}

fkv_status fkv_pager_overlap(const fkv_pager *pager, const fkv_seq_config *config, uint32_t *n_tokens) {
    FKV_REQUIRE(n_tokens != NULL, FKV_BAD_ARGUMENT, "n_tokens is NULL");
    FKV_TRY(check_seq_config(config));
    const uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t node = FKV_NO_NODE;
    uint32_t n_pages = 0;
    while (n_pages < config->n_prompt / page_tokens) {
        node = fkv_tree_find(&pager->tree, config->tenant, node, config->prompt + (uint64_t)n_pages * page_tokens);
        if (node == FKV_NO_NODE) break;
        n_pages++;
    }
    *n_tokens = n_pages * page_tokens;
    return FKV_OK;
}

fkv_status fkv_pager_open(fkv_pager *pager, const fkv_seq_config *config, fkv_seq *seq, uint32_t *n_shared) {
    FKV_REQUIRE(seq != NULL, FKV_BAD_ARGUMENT, "seq is NULL");
    FKV_TRY(check_seq_config(config));
    FKV_TRY(require_no_step(pager));
    fkv_match match = match_prompt(pager, config);
    FKV_TRY(check_admission(pager, config->max_tokens, match.n_pages, match.n_idle, 0));

    uint32_t len = match.n_pages * pager->spec.page_tokens;
    uint32_t slot = allocate_slot(pager, config->tenant, len, config->max_tokens, fkv_table_joins(pager, len));
    if (len > 0) {
        share_path(pager, slot, match.node);
        fkv_counter_add(&pager->counters.hits, 1);
        fkv_counter_add(&pager->counters.hit_tokens, len);
    }
    *seq = slot_handle(pager, slot);
    if (n_shared != NULL) *n_shared = len;
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* Returns the amount by which a fork increases copies(page), as defined in pager.h, for the partially filled last page of the
 * sequence. */
static uint32_t fork_copies(const fkv_pager *pager, uint32_t slot, uint32_t max_tokens) {
    const fkv_sequence *s = &pager->sequences[slot];
    if (pager->full == FKV_NO_GROUP || s->len % pager->spec.page_tokens == 0) return 0;
    const fkv_pool *pool = &pager->groups[pager->full].pool;
    uint32_t page = *fkv_table_entry(&pager->groups[pager->full], slot, s->len / pager->spec.page_tokens);
    uint32_t tails = pool->tails[page] + (s->len < max_tokens);
    return fkv_pool_copies(pool->refs[page] + 1, tails) - fkv_pool_copies(pool->refs[page], pool->tails[page]);
}

fkv_status fkv_pager_fork(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens, fkv_seq *child) {
    uint32_t slot = 0;
    FKV_REQUIRE(child != NULL, FKV_BAD_ARGUMENT, "child is NULL");
    FKV_TRY(require_no_step(pager));
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    const fkv_sequence *parent = &pager->sequences[slot];
    FKV_REQUIRE(
        max_tokens > 0 && max_tokens >= parent->len, FKV_BAD_ARGUMENT,
        "max_tokens is %u but the fork starts with the %u tokens of its parent; set max_tokens to at least the length of the parent",
        max_tokens, parent->len);

    uint32_t n_pages = fkv_pages_of(pager, parent->len);
    FKV_TRY(check_admission(pager, max_tokens, n_pages, 0, fork_copies(pager, slot, max_tokens)));

    uint32_t other = allocate_slot(pager, parent->tenant, parent->len, max_tokens, parent->spare_from);
    const fkv_sequence *s = &pager->sequences[other];
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        const fkv_group *group = &pager->groups[g];
        for (uint32_t i = fkv_table_skip(group, pager->spec.page_tokens, s, s->len, 0); i < n_pages;
             i = fkv_table_skip(group, pager->spec.page_tokens, s, s->len, i + 1)) {
            uint32_t page = *fkv_table_entry(group, slot, i);
            *fkv_table_entry(group, other, i) = page;
            fkv_tree_page_change(pager, g, page, 1, fkv_is_tail(pager, group, s, i) ? 1 : 0);
        }
    }
    *child = slot_handle(pager, other);
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* ---- truncate, close ---- */

/* Releases all pages that hold only tokens after the first n_tokens. The caller then updates the length and the table entries. */
static void release_pages(fkv_pager *pager, uint32_t group, uint32_t slot, uint32_t n_tokens) {
    const fkv_group *g = &pager->groups[group];
    const fkv_sequence *s = &pager->sequences[slot];
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t n_kept = fkv_pages_of(pager, n_tokens);
    uint32_t ring = fkv_table_skip(g, page_tokens, s, s->len, g->n_fixed);
    for (uint32_t i = fkv_pages_of(pager, s->len); i-- > n_kept;) {
        if (i >= g->n_fixed && i < ring) {
            i = g->n_fixed; /* skips the pages that have left the window */
            continue;
        }
        fkv_tree_page_change(pager, group, *fkv_table_entry(g, slot, i), -1, fkv_is_tail(pager, g, s, i) ? -1 : 0);
    }
    if (n_tokens % page_tokens != 0 && !fkv_is_tail(pager, g, s, n_kept - 1))
        fkv_tree_page_change(pager, group, *fkv_table_entry(g, slot, n_kept - 1), 0, 1);
}

/* Undoes release_pages() in reverse order, so that the free list is restored exactly. */
static void unrelease_pages(fkv_pager *pager, uint32_t group, uint32_t slot, uint32_t n_tokens) {
    const fkv_group *g = &pager->groups[group];
    const fkv_sequence *s = &pager->sequences[slot];
    uint32_t n_kept = fkv_pages_of(pager, n_tokens);
    if (n_tokens % pager->spec.page_tokens != 0 && !fkv_is_tail(pager, g, s, n_kept - 1))
        fkv_tree_page_change(pager, group, *fkv_table_entry(g, slot, n_kept - 1), 0, -1);
    for (uint32_t i = n_kept; i < fkv_pages_of(pager, s->len); i++)
        fkv_tree_page_change(pager, group, *fkv_table_entry(g, slot, i), 1, fkv_is_tail(pager, g, s, i) ? 1 : 0);
}

/* Returns whether a sequence could write to the page without copying it first if the page were evicted from the tree. This is
 * true if all references other than that of the tree belong to sequences that may write to the page, and if no descendant of the
 * page's node is busy. */
static bool eviction_avoids_copy(const fkv_pager *pager, uint32_t page) {
    const fkv_pool *pool = &pager->groups[pager->full].pool;
    uint32_t node = pool->node[page];
    return node != FKV_NO_NODE && pager->tree.nodes[node].busy == 1 && pool->tails[page] == pool->refs[page] - 1;
}

/* Returns whether the pool invariant holds in the full group. If the pool is one page short and dropping the tree's reference to
 * `page` would avoid a copy, drops this reference and returns true. page: the partially filled last page of a sequence, or
 * FKV_NO_PAGE. */
static bool full_group_fits(fkv_pager *pager, uint32_t page) {
    uint64_t promised = fkv_group_promised(pager, pager->full);
    uint64_t room = fkv_group_room(pager, pager->full);
    if (promised <= room) return true;
    if (page == FKV_NO_PAGE || promised > room + 1 || !eviction_avoids_copy(pager, page)) return false;
    fkv_tree_forget(pager, pager->groups[pager->full].pool.node[page]);
    return true;
}

/* Truncates a sequence in the full group. Each released page must be promised to the sequence again. Fails if released pages are
 * still in use elsewhere and the pool therefore has too few pages for these promises. */
static fkv_status truncate_full_group(fkv_pager *pager, uint32_t slot, uint32_t n_tokens) {
    fkv_group *g = &pager->groups[pager->full];
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t n_dropped = fkv_pages_of(pager, pager->sequences[slot].len) - fkv_pages_of(pager, n_tokens);
    release_pages(pager, pager->full, slot, n_tokens);
    g->entered -= n_dropped;
    uint32_t page = n_tokens % page_tokens == 0 ? FKV_NO_PAGE : *fkv_table_entry(g, slot, n_tokens / page_tokens);
    if (full_group_fits(pager, page)) return FKV_OK;

    uint64_t promised = fkv_group_promised(pager, pager->full);
    uint64_t room = fkv_group_room(pager, pager->full);
    g->entered += n_dropped;
    unrelease_pages(pager, pager->full, slot, n_tokens);
    return fkv_fail(
        FKV_POOL_FULL,
        "cannot truncate to %u tokens: the removed pages are still shared and would not become free, so %llu pages would be "
        "reserved, but only %llu are available; close a sequence that shares the pages, or close this sequence",
        n_tokens, (unsigned long long)promised, (unsigned long long)room);
}

/* Clears the table entries of the pages after the first n_tokens tokens. */
static void clear_entries(fkv_pager *pager, uint32_t slot, uint32_t n_tokens) {
    const fkv_sequence *s = &pager->sequences[slot];
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        const fkv_group *group = &pager->groups[g];
        uint32_t n_pages = fkv_pages_of(pager, s->len);
        for (uint32_t i = fkv_table_skip(group, pager->spec.page_tokens, s, s->len, fkv_pages_of(pager, n_tokens)); i < n_pages;
             i = fkv_table_skip(group, pager->spec.page_tokens, s, s->len, i + 1))
            *fkv_table_entry(group, slot, i) = FKV_NO_PAGE;
    }
}

/* Updates spare_from when a sequence is truncated to n_tokens tokens. */
static void set_spare_from(const fkv_pager *pager, fkv_sequence *s, uint32_t n_tokens) {
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t from = s->spare_from;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (pager->groups[g].n_spare > 0)
            from = fkv_max_u32(from, fkv_table_first_held(&pager->groups[g], page_tokens, s, s->len));
    s->spare_from = fkv_min_u32(from, fkv_table_joins(pager, n_tokens));
}

/* Returns the largest length, at most n_tokens, to which the sequence can be truncated. */
static uint32_t largest_reachable(const fkv_pager *pager, uint32_t slot, uint32_t n_tokens) {
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t n = n_tokens;
    while (!fkv_pager_covers(pager, slot, n))
        n = (n - 1) / page_tokens * page_tokens; /* the loop ends at length 0 at the latest: an empty sequence needs no pages */
    return n;
}

fkv_status fkv_pager_reachable(const fkv_pager *pager, fkv_seq seq, uint32_t n_tokens, uint32_t *length) {
    uint32_t slot = 0;
    FKV_REQUIRE(length != NULL, FKV_BAD_ARGUMENT, "length is NULL");
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    const fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(n_tokens <= s->len, FKV_BAD_ARGUMENT, "n_tokens is %u but the sequence has only %u tokens", n_tokens, s->len);
    FKV_TRY(require_no_step(pager));
    *length = largest_reachable(pager, slot, n_tokens);
    return FKV_OK;
}

static fkv_status fail_truncate(const fkv_pager *pager, uint32_t slot, uint32_t n_tokens) {
    const fkv_sequence *s = &pager->sequences[slot];
    uint32_t page_tokens = pager->spec.page_tokens;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        const fkv_group *group = &pager->groups[g];
        if (group->is_state && !fkv_table_covers(pager, g, s, n_tokens)) {
            uint32_t below = largest_reachable(pager, slot, n_tokens);
            return fkv_fail(FKV_GONE,
                            "cannot truncate to %u tokens: the recurrent state at this length is not stored; truncate to %u "
                            "tokens, the nearest shorter length with a stored state, and recompute the rest",
                            n_tokens, below);
        }
        uint32_t below = fkv_table_first(group, page_tokens, n_tokens) * page_tokens;
        if (group->n_spare == 0 || fkv_table_covers(pager, g, s, n_tokens) || !fkv_pager_covers(pager, slot, below)) continue;
        return fkv_fail(
            FKV_GONE,
            "cannot truncate to %u tokens: pages of the last span are already sealed; truncate to %u tokens, the start of the "
            "span, and recompute the rest, or keep at least %u tokens",
            n_tokens, below, fkv_min_u32(fkv_table_first_held(group, page_tokens, s, s->len) * page_tokens, s->len));
    }
    return fkv_fail(
        FKV_GONE,
        "cannot truncate to %u tokens: the sequence has %u tokens, and a sliding-window layer has dropped tokens that the "
        "truncated sequence would attend to; keep more tokens, or recompute the sequence",
        n_tokens, s->len);
}

fkv_status fkv_pager_truncate(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens) {
    uint32_t slot = 0;
    FKV_TRY(require_no_step(pager));
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(n_tokens <= s->len, FKV_BAD_ARGUMENT, "n_tokens is %u but the sequence has only %u tokens", n_tokens, s->len);
    if (!fkv_pager_covers(pager, slot, n_tokens)) return fail_truncate(pager, slot, n_tokens);
    if (n_tokens == s->len) return FKV_OK;

    uint32_t snapshot = fkv_table_snapshot(pager, s, n_tokens);
    if (pager->full != FKV_NO_GROUP) FKV_TRY(truncate_full_group(pager, slot, n_tokens));
    if (snapshot != FKV_NO_PAGE) fkv_tree_page_change(pager, pager->state, snapshot, 1, 0);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++)
        if (g != pager->full) release_pages(pager, g, slot, g == pager->state ? 0 : n_tokens);
    clear_entries(pager, slot, n_tokens);
    if (pager->state != FKV_NO_GROUP) *fkv_table_entry(&pager->groups[pager->state], slot, 0) = snapshot;
    set_spare_from(pager, s, n_tokens);
    s->len = n_tokens;
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* Releases all pages and the reservation of a sequence, and frees its slot. */
static void release_slot(fkv_pager *pager, uint32_t slot) {
    fkv_sequence *s = &pager->sequences[slot];
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        release_pages(pager, g, slot, 0);
        reserve_pages(pager, g, 0, s->max_tokens);
        if (g == pager->full) pager->groups[g].entered -= fkv_pages_of(pager, s->len);
    }
    clear_entries(pager, slot, 0);
    *s = (fkv_sequence){.row = FKV_NO_ROW};
    pager->slots[--pager->n_seqs] = slot;
}

void fkv_pager_end_closing(fkv_pager *pager) {
    for (uint32_t slot = 0; slot < pager->spec.max_seqs; slot++)
        if (pager->sequences[slot].open && pager->sequences[slot].generation == 0) release_slot(pager, slot);
    pager->step.n_closing = 0;
}

fkv_status fkv_pager_close(fkv_pager *pager, fkv_seq seq) {
    uint32_t slot = 0;
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    if (pager->step.open) {
        pager->sequences[slot].generation = 0;
        pager->step.n_closing++;
        fkv_pager_publish(pager);
        return FKV_OK;
    }
    release_slot(pager, slot);
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* ---- reserve ---- */

static fkv_status fail_reserve(const fkv_pager *pager, uint32_t slot, uint32_t max_tokens, uint32_t group, uint64_t needed,
                               uint64_t room) {
    return fkv_fail(
        FKV_POOL_FULL,
        "cannot reserve %u tokens instead of %u: this needs %llu more pages of group %u, but only %llu of this group's %u pages are not "
        "reserved; close sequences, reserve less, or open the cache with a larger max_tokens",
        max_tokens, pager->sequences[slot].max_tokens, (unsigned long long)needed, group, (unsigned long long)room,
        pager->groups[group].pool.n_pages);
}

/* Changes a reservation in the full group. page: the partially filled last page of the sequence, or FKV_NO_PAGE if its last page
 * is full. d_tails: change in the page's tail count, which is 1 if the sequence gains the ability to append to the page, -1 if it
 * loses this ability, and 0 otherwise. */
static fkv_status reserve_full_group(fkv_pager *pager, uint32_t slot, uint32_t max_tokens, uint32_t page, int d_tails) {
    fkv_group *g = &pager->groups[pager->full];
    uint64_t reserved = g->reserved;
    uint64_t promised = fkv_group_promised(pager, pager->full);
    uint64_t room = fkv_group_room(pager, pager->full);
    reserve_pages(pager, pager->full, max_tokens, pager->sequences[slot].max_tokens);
    if (d_tails != 0) fkv_tree_page_change(pager, pager->full, page, 0, d_tails);
    if (full_group_fits(pager, page)) return FKV_OK;

    uint64_t needed = fkv_group_promised(pager, pager->full) - promised;
    if (d_tails != 0) fkv_tree_page_change(pager, pager->full, page, 0, -d_tails);
    g->reserved = reserved;
    return fail_reserve(pager, slot, max_tokens, pager->full, needed, room - promised);
}

fkv_status fkv_pager_reserve(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens) {
    uint32_t slot = 0;
    FKV_TRY(require_no_step(pager));
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(
        max_tokens > 0 && max_tokens >= s->len, FKV_BAD_ARGUMENT,
        "max_tokens is %u but the sequence has %u tokens; use a larger max_tokens (at least 1), or truncate the sequence first",
        max_tokens, s->len);
    FKV_TRY(check_max_tokens(pager, max_tokens));
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (g == pager->full) continue;
        fkv_group with = fkv_table_reserve(pager, g, max_tokens, s->max_tokens);
        uint64_t before = fkv_group_reserved(&pager->groups[g]);
        uint64_t after = fkv_group_reserved(&with);
        uint64_t room = pager->groups[g].pool.n_pages - before;
        if (after > before && after - before > room) return fail_reserve(pager, slot, max_tokens, g, after - before, room);
    }
    bool has_part = s->len % pager->spec.page_tokens != 0;
    uint32_t last = s->len / pager->spec.page_tokens;
    int d_tails = has_part ? (s->len < max_tokens) - (s->len < s->max_tokens) : 0;
    if (pager->full != FKV_NO_GROUP) {
        uint32_t page = has_part ? *fkv_table_entry(&pager->groups[pager->full], slot, last) : FKV_NO_PAGE;
        FKV_TRY(reserve_full_group(pager, slot, max_tokens, page, d_tails));
    }
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (g == pager->full) continue;
        reserve_pages(pager, g, max_tokens, s->max_tokens);
        if (d_tails != 0 && g != pager->state)
            fkv_tree_page_change(pager, g, *fkv_table_entry(&pager->groups[g], slot, last), 0, d_tails);
    }
    s->max_tokens = max_tokens;
    fkv_pager_settle(pager);
    return FKV_OK;
}

/* ---- fill ---- */

fkv_status fkv_pager_fill(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens) {
    uint32_t slot = 0;
    FKV_TRY(require_no_step(pager));
    FKV_TRY(fkv_pager_slot(pager, seq, &slot));
    fkv_sequence *s = &pager->sequences[slot];
    FKV_REQUIRE(s->len == 0, FKV_BAD_STATE, "the sequence has %u tokens; only an empty sequence can be filled", s->len);
    FKV_REQUIRE(n_tokens <= s->max_tokens, FKV_SEQ_FULL, "%u tokens exceed the reservation of %u tokens", n_tokens,
                s->max_tokens);

    uint32_t n_pages = fkv_pages_of(pager, n_tokens);
    s->len = n_tokens;
    s->spare_from = fkv_table_joins(pager, n_tokens);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group *group = &pager->groups[g];
        for (uint32_t i = fkv_table_skip(group, pager->spec.page_tokens, s, n_tokens, 0); i < n_pages;
             i = fkv_table_skip(group, pager->spec.page_tokens, s, n_tokens, i + 1)) {
            fkv_group_make_free(pager, g, 1);
            uint32_t page = fkv_pool_take(&group->pool);
            if (fkv_is_tail(pager, group, s, i)) fkv_pool_change(&group->pool, page, 0, 1);
            *fkv_table_entry(group, slot, i) = page;
        }
        if (g == pager->full) group->entered += n_pages;
    }
    fkv_pager_settle(pager);
    return FKV_OK;
}
