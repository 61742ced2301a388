/* Step transactions: allocate pages for the new tokens of every row. begin() allocates the pages and enters them into the tables,
 * after the pages of the existing tokens. commit() updates the lengths and releases the pages that have left the windows. It also
 * releases the pages of tokens that keep() has discarded. abort() restores the tables and returns the pages to the free list in
 * reverse order.
 *
 * In the state group, every row reads the state of its sequence and writes a new state. The new state replaces the old one in the
 * table, and the step holds the old state's reference until it ends.
 *
 * begin() changes nothing that abort() cannot restore exactly. The source page of a copy keeps its reference until commit(), so
 * between begin() and commit() neither the tree nor the counts of other pages change. While a step is open, refs(page) is the
 * number of tables that hold the page, plus 1 if the tree holds it, plus the number of copies in the step that read it. The
 * number of promised pages in the full group is lower by the number of pages that the step has allocated. A sequence that is
 * closed during the step keeps its row and its pages until the step ends, because the device still uses them. When the step ends,
 * this sequence is committed or restored like the others and is then released.
 */
#include "page_table.h"
#include "pager_state.h"
#include "pool.h"
#include "prefix_tree.h"

static void unmark_rows(fkv_pager *pager, const fkv_row *rows, uint32_t n_rows) {
    uint32_t slot = 0;
    for (uint32_t r = 0; r < n_rows; r++)
        if (fkv_pager_slot(pager, rows[r].seq, &slot) == FKV_OK) pager->sequences[slot].row = FKV_NO_ROW;
}

static fkv_status check_row(const fkv_pager *pager, const fkv_row *row, uint64_t *n_tokens, uint32_t *slot) {
    FKV_TRY(fkv_pager_slot(pager, row->seq, slot));
    const fkv_sequence *s = &pager->sequences[*slot];
    FKV_REQUIRE(s->row == FKV_NO_ROW, FKV_BAD_ARGUMENT,
                "sequence %llu has more than one row in the step; pass all its tokens in one row", (unsigned long long)row->seq);
    FKV_REQUIRE(row->n_tokens > 0, FKV_BAD_ARGUMENT, "the row of sequence %llu has 0 tokens; omit this row",
                (unsigned long long)row->seq);
    FKV_REQUIRE(
        row->n_tokens <= s->max_tokens - s->len, FKV_SEQ_FULL,
        "%u new tokens after the %u tokens of sequence %llu exceed its reservation of %u tokens; call fkv_seq_reserve() first",
        row->n_tokens, s->len, (unsigned long long)row->seq, s->max_tokens);
    *n_tokens += row->n_tokens;
    FKV_REQUIRE(*n_tokens <= pager->spec.max_step_tokens, FKV_STEP_FULL,
                "the rows have at least %llu tokens but max_step_tokens is %u; split them over several steps",
                (unsigned long long)*n_tokens, pager->spec.max_step_tokens);
    return FKV_OK;
}

/* Checks all rows and stores the index of each row in its sequence. If a check fails, removes the stored indices. */
static fkv_status mark_rows(fkv_pager *pager, const fkv_row *rows, uint32_t n_rows) {
    uint64_t n_tokens = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint32_t slot = 0;
        fkv_status status = check_row(pager, &rows[r], &n_tokens, &slot);
        if (status != FKV_OK) {
            unmark_rows(pager, rows, r);
            return status;
        }
        pager->sequences[slot].row = r;
    }
    return FKV_OK;
}

/* ---- begin ---- */

/* Returns the table entry of the partially filled page to which the tokens of the row are appended, or NULL if the row starts a
 * new page. */
static uint32_t *tail_entry(const fkv_pager *pager, uint32_t group, const fkv_step_row *row) {
    if (row->start % pager->spec.page_tokens == 0) return NULL;
    return fkv_table_entry(&pager->groups[group], row->slot, row->start / pager->spec.page_tokens);
}

/* Counts the rows that append to each page. If all references to a page belong to rows that append to it, the row of the longest
 * sequence may write in place. The other rows write to copies. Their sequences are not longer, so they never read the slots that
 * are written in place, even if the step is aborted. */
static void count_writers(fkv_pager *pager, uint32_t group) {
    const fkv_pool *pool = &pager->groups[group].pool;
    const fkv_step_row *rows = pager->step.rows;
    for (uint32_t r = 0; r < pager->step.n_rows; r++) {
        const uint32_t *entry = tail_entry(pager, group, &rows[r]);
        if (entry == NULL) continue;
        if (pool->writers[*entry]++ == 0 || rows[pool->in_place[*entry]].start <= rows[r].start) pool->in_place[*entry] = r;
    }
}

static void clear_writers(fkv_pager *pager, uint32_t group) {
    const fkv_pool *pool = &pager->groups[group].pool;
    for (uint32_t r = 0; r < pager->step.n_rows; r++) {
        const uint32_t *entry = tail_entry(pager, group, &pager->step.rows[r]);
        if (entry == NULL) continue;
        pool->writers[*entry] = 0;
        pool->in_place[*entry] = 0;
    }
    for (uint32_t c = 0; c < pager->step.n_copies; c++) {
        if (pager->step.copies[c].group != group) continue;
        pool->writers[pager->step.copies[c].from] = 0;
        pool->in_place[pager->step.copies[c].from] = 0;
    }
}

static uint32_t allocate_step_page(fkv_group *group) {
    if (group->window == 0) group->taken++;
    return fkv_pool_take(&group->pool);
}

/* Allocates the state that row r writes. */
static void assign_state(fkv_pager *pager, uint32_t r) {
    fkv_group *group = &pager->groups[pager->state];
    uint32_t *entry = fkv_table_entry(group, pager->step.rows[r].slot, 0);
    pager->step.states[r] = (fkv_state_move){.from = *entry, .to = fkv_pool_take(&group->pool)};
    *entry = pager->step.states[r].to;
}

/* Allocates the pages of row r in group g: a copy of the last page if it cannot be written in place, then new pages. */
static void assign_pages(fkv_pager *pager, uint32_t r, uint32_t g) {
    fkv_group *group = &pager->groups[g];
    const fkv_step_row *row = &pager->step.rows[r];
    uint32_t *entry = tail_entry(pager, g, row);
    if (entry != NULL && (group->pool.writers[*entry] != group->pool.refs[*entry] || group->pool.in_place[*entry] != r)) {
        uint32_t to = allocate_step_page(group);
        fkv_pool_change(&group->pool, to, 0, 1);
        pager->step.copies[pager->step.n_copies++] = (fkv_page_copy){.group = g, .from = *entry, .to = to};
        *entry = to;
    }
    uint32_t end = fkv_pages_of(pager, row->start + row->n_tokens);
    for (uint32_t i = fkv_pages_of(pager, row->start); i < end; i++) {
        FKV_ASSERT(*fkv_table_entry(group, row->slot, i) == FKV_NO_PAGE);
        *fkv_table_entry(group, row->slot, i) = allocate_step_page(group);
    }
}

fkv_status fkv_pager_step_begin(fkv_pager *pager, const fkv_row *rows, uint32_t n_rows) {
    fkv_step_state *step = &pager->step;
    FKV_REQUIRE(!step->open, FKV_BAD_STATE, "a step is open; commit or abort it first");
    FKV_REQUIRE(rows != NULL && n_rows > 0, FKV_BAD_ARGUMENT, "rows is NULL or n_rows is 0; a step needs at least one row");
    FKV_REQUIRE(n_rows <= pager->spec.max_seqs, FKV_BAD_ARGUMENT,
                "the step has %u rows but max_seqs is %u; pass one row per sequence", n_rows, pager->spec.max_seqs);
    FKV_TRY(mark_rows(pager, rows, n_rows));

    step->open = true;
    step->n_rows = n_rows;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint32_t slot = 0;
        (void)fkv_pager_slot(pager, rows[r].seq, &slot);
        step->rows[r] = (fkv_step_row){
            .slot = slot, .start = pager->sequences[slot].len, .n_tokens = rows[r].n_tokens, .n_kept = rows[r].n_tokens};
    }
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (g == pager->state) {
            for (uint32_t r = 0; r < n_rows; r++) assign_state(pager, r);
            continue;
        }
        count_writers(pager, g);
        for (uint32_t r = 0; r < n_rows; r++) assign_pages(pager, r, g);
        clear_writers(pager, g);
    }
    fkv_pager_publish(pager);
    return FKV_OK;
}

const fkv_page_copy *fkv_pager_step_copies(const fkv_pager *pager, uint32_t *n_copies) {
    *n_copies = pager->step.n_copies;
    return pager->step.copies;
}

const fkv_step_row *fkv_pager_step_rows(const fkv_pager *pager, uint32_t *n_rows) {
    *n_rows = pager->step.n_rows;
    return pager->step.rows;
}

const fkv_state_move *fkv_pager_step_states(const fkv_pager *pager) { return pager->step.states; }

/* ---- keep, commit, abort ---- */

fkv_status fkv_pager_step_keep(fkv_pager *pager, const uint32_t *n_kept, bool *changed) {
    const fkv_step_state *step = &pager->step;
    FKV_REQUIRE(step->open, FKV_BAD_STATE, "no step is open; call fkv_step_begin() first");
    for (uint32_t r = 0; r < step->n_rows; r++)
        FKV_REQUIRE(n_kept[r] > 0 && n_kept[r] <= step->rows[r].n_tokens, FKV_BAD_ARGUMENT,
                    "row %u cannot keep %u of its %u tokens (expected 1 to %u)", r, n_kept[r], step->rows[r].n_tokens,
                    step->rows[r].n_tokens);
    *changed = false;
    for (uint32_t r = 0; r < step->n_rows; r++) {
        *changed = *changed || step->rows[r].n_kept != n_kept[r];
        step->rows[r].n_kept = n_kept[r];
    }
    return FKV_OK;
}

/* Releases the pages that contain only discarded tokens of a row. */
static void release_discarded(fkv_pager *pager, const fkv_step_row *row) {
    const uint32_t end = fkv_pages_of(pager, row->start + row->n_tokens);
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        if (g == pager->state) continue;
        for (uint32_t i = fkv_pages_of(pager, row->start + row->n_kept); i < end; i++) {
            uint32_t *entry = fkv_table_entry(&pager->groups[g], row->slot, i);
            fkv_tree_page_change(pager, g, *entry, -1, 0);
            *entry = FKV_NO_PAGE;
        }
    }
}

/* Resets the step state and releases the sequences that were closed during the step. */
static void finish_step(fkv_pager *pager) {
    fkv_step_state *step = &pager->step;
    for (uint32_t r = 0; r < step->n_rows; r++) pager->sequences[step->rows[r].slot].row = FKV_NO_ROW;
    memset(step->rows, 0, step->n_rows * sizeof *step->rows);
    memset(step->copies, 0, step->n_copies * sizeof *step->copies);
    if (step->states != NULL) memset(step->states, 0, step->n_rows * sizeof *step->states);
    step->open = false;
    step->n_rows = 0;
    step->n_copies = 0;
    if (step->n_closing > 0) fkv_pager_end_closing(pager);
    fkv_pager_settle(pager);
}

/* Sets the new length of a row's sequence, updates the tail counts, and releases the pages that have left the window. */
static void advance_row(fkv_pager *pager, const fkv_step_row *row) {
    fkv_sequence *s = &pager->sequences[row->slot];
    uint32_t page_tokens = pager->spec.page_tokens;
    uint32_t len = row->start + row->n_kept;
    s->len = len;
    for (uint32_t g = 0; g < pager->spec.n_groups; g++) {
        fkv_group *group = &pager->groups[g];
        if (group->is_state) continue; /* begin() has already replaced the only table entry */
        const uint32_t *entry = tail_entry(pager, g, row);
        if (entry != NULL) fkv_pool_change(&group->pool, *entry, 0, -1);
        if (fkv_has_tail(pager, s)) fkv_pool_change(&group->pool, *fkv_table_entry(group, row->slot, len / page_tokens), 0, 1);
        if (g == pager->full) {
            group->entered += fkv_pages_of(pager, len) - fkv_pages_of(pager, row->start);
            continue;
        }
        uint32_t kept = fkv_table_skip(group, page_tokens, s, len, group->n_fixed);
        for (uint32_t i = fkv_table_skip(group, page_tokens, s, row->start, group->n_fixed); i < kept; i++) {
            uint32_t *gone = fkv_table_entry(group, row->slot, i);
            fkv_tree_page_change(pager, g, *gone, -1, 0);
            *gone = FKV_NO_PAGE;
        }
    }
}

fkv_status fkv_pager_step_commit(fkv_pager *pager) {
    fkv_step_state *step = &pager->step;
    FKV_REQUIRE(step->open, FKV_BAD_STATE, "no step is open; call fkv_step_begin() first");
    if (pager->full != FKV_NO_GROUP) pager->groups[pager->full].taken = 0;
    /* release copied pages before any row advances, because a row that has copied a page must no longer count as a writer of that
     * page */
    for (uint32_t c = 0; c < step->n_copies; c++)
        fkv_tree_page_change(pager, step->copies[c].group, step->copies[c].from, -1, -1);
    for (uint32_t r = 0; step->states != NULL && r < step->n_rows; r++)
        if (step->states[r].from != FKV_NO_PAGE) fkv_tree_page_change(pager, pager->state, step->states[r].from, -1, 0);
    uint64_t n_tokens = 0;
    for (uint32_t r = 0; r < step->n_rows; r++) {
        release_discarded(pager, &step->rows[r]);
        advance_row(pager, &step->rows[r]);
        if (pager->sequences[step->rows[r].slot].generation != 0) n_tokens += step->rows[r].n_kept;
    }
    fkv_counter_add(&pager->counters.steps, 1);
    fkv_counter_add(&pager->counters.tokens, n_tokens);
    fkv_counter_add(&pager->counters.page_copies, step->n_copies);
    finish_step(pager);
    return FKV_OK;
}

/* Undoes assign_state() and restores the order of the free list. */
static void unassign_state(fkv_pager *pager, uint32_t r) {
    fkv_group *group = &pager->groups[pager->state];
    const fkv_state_move *move = &pager->step.states[r];
    fkv_pool_change(&group->pool, move->to, -1, 0);
    *fkv_table_entry(group, pager->step.rows[r].slot, 0) = move->from;
}

/* Undoes assign_pages() and restores the order of the free list. */
static void unassign_pages(fkv_pager *pager, uint32_t r, uint32_t g) {
    fkv_step_state *step = &pager->step;
    fkv_group *group = &pager->groups[g];
    const fkv_step_row *row = &step->rows[r];
    uint32_t first = fkv_pages_of(pager, row->start);
    for (uint32_t i = fkv_pages_of(pager, row->start + row->n_tokens); i-- > first;) {
        uint32_t *entry = fkv_table_entry(group, row->slot, i);
        fkv_pool_change(&group->pool, *entry, -1, 0);
        *entry = FKV_NO_PAGE;
    }
    uint32_t *entry = tail_entry(pager, g, row);
    if (entry == NULL || step->n_copies == 0) return;
    fkv_page_copy *copy = &step->copies[step->n_copies - 1];
    if (copy->group != g || copy->to != *entry) return;
    fkv_pool_change(&group->pool, copy->to, -1, -1);
    *entry = copy->from;
    *copy = (fkv_page_copy){0};
    step->n_copies--;
}

fkv_status fkv_pager_step_abort(fkv_pager *pager) {
    FKV_REQUIRE(pager->step.open, FKV_BAD_STATE, "no step is open");
    for (uint32_t g = pager->spec.n_groups; g-- > 0;) {
        for (uint32_t r = pager->step.n_rows; r-- > 0;) {
            if (g == pager->state)
                unassign_state(pager, r);
            else
                unassign_pages(pager, r, g);
        }
        pager->groups[g].taken = 0;
    }
    fkv_counter_add(&pager->counters.aborts, 1);
    finish_step(pager);
    return FKV_OK;
}
