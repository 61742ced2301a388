/* Random operations on the pager. Each operation also predicts the result with the model. See pager_model.h. */
#include "pager_model_state.h"

/* ---- operations ---- */

static model_seq *pick(pager_model *m, pager_choices *choices) {
    model_seq *q = &m->seqs[pager_choose(choices, m->spec.max_seqs)];
    return q->open ? q : NULL;
}

static model_seq *vacant(pager_model *m) {
    for (uint32_t s = 0; s < m->spec.max_seqs; s++)
        if (!m->seqs[s].open) return &m->seqs[s];
    return NULL;
}

static uint32_t choose_max_tokens(const pager_model *m, pager_choices *choices, uint32_t least) {
    uint32_t most = m->spec.max_seq_tokens;
    if (model_one_in(choices, 24)) return most + 1 + pager_choose(choices, 40);
    if (model_one_in(choices, 8)) return least > 0 ? least : 1;
    uint32_t range = model_one_in(choices, 3) ? most : most / 3 + 1;
    return fkv_min_u32(fkv_max_u32(least, 1) + pager_choose(choices, range), most);
}

/* Builds a prompt that begins like an existing sequence or a fixed text and may continue with another text. */
static uint32_t choose_prompt(const pager_model *m, pager_choices *choices, uint32_t *prompt) {
    uint32_t n = pager_choose(choices, m->spec.max_seq_tokens / (model_one_in(choices, 3) ? 1 : 3) + 1);
    const model_seq *like = &m->seqs[pager_choose(choices, m->spec.max_seqs)];
    uint32_t text = pager_choose(choices, N_TEXTS);
    uint32_t change_at = model_one_in(choices, 2) ? pager_choose(choices, m->spec.max_seq_tokens + 1) : UINT32_MAX;
    for (uint32_t i = 0; i < n; i++) {
        if (i == change_at) text = (text + 1) % N_TEXTS;
        prompt[i] = like->open && i < like->len && i < change_at ? like->tokens[i] : model_text(text, i);
    }
    return n;
}

/* Checks the result of fkv_pager_match() against the model. May be called during a step, and before a call of fkv_pager_open()
 * that may fail. */
static bool match_agrees(pager_model *m, const fkv_seq_config *config, uint32_t n_found) {
    uint32_t n_shared = 0;
    EXPECT(fkv_pager_match(m->pager, config, &n_shared) == FKV_OK && n_shared == n_found * m->spec.page_tokens,
           "match found %u tokens, expected %u", n_shared, n_found * m->spec.page_tokens);
    m->tally.matched += n_found > 0;
    return true;
}

static bool operate_open(pager_model *m, pager_choices *choices) {
    static shadow shadows[MAX_SEQS + 1];
    uint32_t prompt[MAX_TOKENS];
    uint32_t path[MAX_TOKENS];
    uint32_t n_prompt = model_one_in(choices, 3) ? 0 : choose_prompt(m, choices, prompt);
    uint32_t max_tokens = choose_max_tokens(m, choices, n_prompt);
    /* sometimes makes max_tokens smaller than the prompt */
    if (model_one_in(choices, 16)) max_tokens = 1 + pager_choose(choices, n_prompt + 1);
    uint64_t tenant = pager_choose(choices, N_TENANTS);
    fkv_seq_config config = {
        .max_tokens = max_tokens, .tenant = tenant, .prompt = n_prompt == 0 ? NULL : prompt, .n_prompt = n_prompt};

    uint32_t n_path = model_find_path(
        m, tenant, prompt, fkv_min_u32(n_prompt, fkv_min_u32(max_tokens, m->spec.max_seq_tokens)) / m->spec.page_tokens, path);
    uint32_t n_found = model_usable_pages(m, path, n_path);
    fkv_status expected = FKV_OK;
    if (max_tokens > m->spec.max_seq_tokens)
        expected = FKV_POOL_FULL;
    else if (vacant(m) == NULL)
        expected = FKV_SEQS_FULL;
    else if (!model_windows_fit(m, max_tokens, NULL))
        expected = FKV_POOL_FULL;
    else if (m->n_full < m->spec.n_groups) {
        uint32_t n = model_shadows(m, shadows);
        shadows[n].len = n_found * m->spec.page_tokens;
        shadows[n].max_tokens = max_tokens;
        for (uint32_t i = 0; i < n_found; i++) shadows[n].pages[i] = m->pager->tree.nodes[path[i]].pages[m->n_full];
        if (!model_fits(m, shadows, n + 1, FKV_NO_NODE)) expected = FKV_POOL_FULL;
    }
    fkv_seq seq = 0;
    uint32_t n_shared = 0;
    if (!match_agrees(m, &config, n_found) || !model_unchanged(m))
        return model_fault(m, "fkv_pager_match() returned a wrong result or changed the pager");
    if (!model_answered(m, "open", fkv_pager_open(m->pager, &config, &seq, &n_shared), expected)) return false;
    m->tally.refused += expected != FKV_OK;
    if (expected != FKV_OK) return true;
    EXPECT(n_shared == n_found * m->spec.page_tokens, "open shared %u tokens, expected %u", n_shared,
           n_found * m->spec.page_tokens);

    model_seq *q = vacant(m);
    q->open = true;
    q->closing = false;
    q->seq = seq;
    q->tenant = tenant;
    q->max_tokens = max_tokens;
    q->len = n_shared;
    q->n_known = n_shared;
    q->text = pager_choose(choices, N_TEXTS);
    q->prefix[0] = model_mix(tenant);
    for (uint32_t i = 0; i < n_shared; i++) model_extend(q, i, prompt[i]);
    memset(q->spare, 0, sizeof q->spare);
    model_keep_spare(m, q);
    /* any sequence may have written the shared tokens, so only their hashes are compared with the prompt; the model records the
     * write numbers of these tokens, which must not change later */
    uint32_t slot = 0;
    EXPECT(seq != 0 && seq != m->closed && fkv_pager_slot(m->pager, seq, &slot) == FKV_OK, "open returned no valid sequence");
    q->slot = slot;
    q->state_len = n_shared;
    if (m->n_state < m->spec.n_groups && n_shared > 0) q->state_write = model_state(m, model_state_page(m, q))->write;
    for (uint32_t g = 0; g < m->spec.n_groups; g++)
        for (uint32_t i = 0; g != m->n_state && i < n_shared; i++) {
            uint32_t page = fkv_page_at(fkv_pager_view(m->pager, g, slot), i / m->spec.page_tokens);
            if (model_holds(m, g, n_shared, i))
                q->writes[g][i] = m->memory[g][page * m->spec.page_tokens + i % m->spec.page_tokens].write;
        }
    m->tally.opened++;
    m->tally.shared += n_shared > 0;
    return true;
}

static bool operate_fork(pager_model *m, pager_choices *choices) {
    static shadow shadows[MAX_SEQS + 1];
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    uint32_t max_tokens = choose_max_tokens(m, choices, q->len);
    if (model_one_in(choices, 16)) max_tokens = q->len == 0 ? 0 : q->len - 1;
    fkv_status expected = FKV_OK;
    if (max_tokens == 0 || max_tokens < q->len)
        expected = FKV_BAD_ARGUMENT;
    else if (max_tokens > m->spec.max_seq_tokens)
        expected = FKV_POOL_FULL;
    else if (vacant(m) == NULL)
        expected = FKV_SEQS_FULL;
    else if (!model_windows_fit(m, max_tokens, NULL))
        expected = FKV_POOL_FULL;
    else if (m->n_full < m->spec.n_groups) {
        uint32_t n = model_shadows(m, shadows);
        uint32_t slot = 0;
        (void)fkv_pager_slot(m->pager, q->seq, &slot);
        shadows[n].len = q->len;
        shadows[n].max_tokens = max_tokens;
        for (uint32_t i = 0; i < model_pages(m, q->len); i++)
            shadows[n].pages[i] = fkv_page_at(fkv_pager_view(m->pager, m->n_full, slot), i);
        if (!model_fits(m, shadows, n + 1, FKV_NO_NODE)) expected = FKV_POOL_FULL;
    }
    fkv_seq child = 0;
    if (!model_answered(m, "fork", fkv_pager_fork(m->pager, q->seq, max_tokens, &child), expected)) return false;
    if (expected != FKV_OK) return true;
    model_seq *other = vacant(m);
    *other = *q;
    other->seq = child;
    other->max_tokens = max_tokens;
    m->tally.forked++;
    EXPECT(fkv_pager_slot(m->pager, child, &other->slot) == FKV_OK, "fork returned no valid sequence");
    return true;
}

/* Examines the partly filled last page of sequence `s` of shadows[]. Returns the tree node of this page if all sequences that
 * hold the page will write to it and no sequence needs a node below it. Otherwise, or if the last page is full, returns
 * FKV_NO_NODE. The tree must release the returned node if fkv_pager_truncate() would otherwise fail. */
static uint32_t blocking_node(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t s) {
    uint32_t page_tokens = m->spec.page_tokens;
    if (shadows[s].len % page_tokens == 0) return FKV_NO_NODE;
    uint32_t page = shadows[s].pages[shadows[s].len / page_tokens];
    for (uint32_t other = 0; other < n; other++)
        for (uint32_t i = 0; i < model_pages(m, shadows[other].len); i++)
            if (shadows[other].pages[i] == page &&
                ((i + 1) * page_tokens <= shadows[other].len || shadows[other].len == shadows[other].max_tokens))
                return FKV_NO_NODE;
    uint32_t without = m->pager->groups[m->n_full].pool.node[page];
    balance b = model_count(m, shadows, n, FKV_NO_NODE);
    for (uint32_t node = 0; node < m->pager->tree.n_nodes; node++)
        if (m->pager->tree.nodes[node].live && m->pager->tree.nodes[node].parent == without && b.busy[node]) return FKV_NO_NODE;
    return without;
}

/* Returns true if the sequence still holds the pages and the recurrent state that it needs after truncation to n_tokens tokens.
 */
static bool can_truncate(const pager_model *m, const model_seq *q, uint32_t n_tokens) {
    for (uint32_t g = 0; g < m->spec.n_groups; g++)
        for (uint32_t i = 0; g != m->n_state && i < n_tokens && i < q->len; i++)
            if (model_holds(m, g, n_tokens, i) && !model_holds(m, g, q->len, i) &&
                !(m->spec.groups[g].n_spare > 0 && q->spare[i / m->spec.page_tokens]))
                return false;
    return model_has_state(m, q, n_tokens);
}

/* Checks fkv_pager_reachable() against the model: the result is n_tokens, or else the largest page boundary to which the sequence
 * can be truncated. */
static bool reachable_agrees(pager_model *m, const model_seq *q, uint32_t n_tokens) {
    uint32_t expected = n_tokens;
    uint32_t length = 0;
    while (!can_truncate(m, q, expected)) expected = (expected - 1) / m->spec.page_tokens * m->spec.page_tokens;
    EXPECT(fkv_pager_reachable(m->pager, q->seq, n_tokens, &length) == FKV_OK && length == expected,
           "length %u can be reached from %u, expected %u", length, n_tokens, expected);
    EXPECT(model_unchanged(m), "fkv_pager_reachable() changed the pager");
    return true;
}

static bool operate_truncate(pager_model *m, pager_choices *choices) {
    static shadow shadows[MAX_SEQS + 1];
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    uint32_t n_tokens =
        model_one_in(choices, 3) ? q->len - fkv_min_u32(q->len, pager_choose(choices, 12)) : pager_choose(choices, q->len + 1);
    /* about half of the truncations, those to an even length, are changed to end at a stored state */
    while (m->n_state < m->spec.n_groups && n_tokens > 0 && n_tokens % 2 == 0 && !model_has_state(m, q, n_tokens))
        n_tokens = (n_tokens - 1) / m->spec.page_tokens * m->spec.page_tokens;
    if (model_one_in(choices, 24)) n_tokens = q->len + 1;
    fkv_status expected = can_truncate(m, q, n_tokens) ? FKV_OK : FKV_GONE;
    if (n_tokens > q->len) expected = FKV_BAD_ARGUMENT;
    if (n_tokens <= q->len && !reachable_agrees(m, q, n_tokens)) return false;
    if (expected == FKV_OK && m->n_full < m->spec.n_groups) {
        uint32_t n = model_shadows(m, shadows);
        uint32_t s = 0;
        for (model_seq *before = m->seqs; before < q; before++) s += before->open;
        shadows[s].len = n_tokens;
        uint32_t without = blocking_node(m, shadows, n, s);
        if (!model_fits(m, shadows, n, FKV_NO_NODE) && (without == FKV_NO_NODE || !model_fits(m, shadows, n, without)))
            expected = FKV_POOL_FULL;
    }
    fkv_status got = fkv_pager_truncate(m->pager, q->seq, n_tokens);
    if (expected == FKV_POOL_FULL) {
        /* a truncation that fails with FKV_POOL_FULL may reorder the heaps of the tree, so this test does not require unchanged
         * bytes */
        EXPECT(got == expected, "truncate returned %s, expected FKV_POOL_FULL", fkv_status_name(got));
        m->tally.truncate_refused++;
        return true;
    }
    if (!model_answered(m, "truncate", got, expected)) return false;
    m->tally.gone += expected == FKV_GONE;
    if (expected != FKV_OK) return true;
    if (m->n_state < m->spec.n_groups && n_tokens < q->len && n_tokens > 0) {
        /* the snapshot may have been written by any sequence with the same first n_tokens tokens */
        uint32_t page = model_state_page(m, q);
        EXPECT(page != FKV_NO_PAGE, "no state after a truncation to a snapshot");
        q->state_write = model_state(m, page)->write;
        m->tally.to_snapshot++;
    }
    q->len = n_tokens;
    q->state_len = n_tokens;
    model_keep_spare(m, q);
    q->n_known = fkv_min_u32(q->n_known, n_tokens / m->spec.page_tokens * m->spec.page_tokens);
    m->tally.truncated++;
    return true;
}

static bool operate_reserve(pager_model *m, pager_choices *choices) {
    static shadow shadows[MAX_SEQS + 1];
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    uint32_t max_tokens = choose_max_tokens(m, choices, q->len);
    if (model_one_in(choices, 16)) max_tokens = q->len == 0 ? 0 : q->len - 1;
    fkv_status expected = FKV_OK;
    if (max_tokens == 0 || max_tokens < q->len)
        expected = FKV_BAD_ARGUMENT;
    else if (max_tokens > m->spec.max_seq_tokens || !model_windows_fit(m, max_tokens, q))
        expected = FKV_POOL_FULL;
    else if (m->n_full < m->spec.n_groups) {
        uint32_t n = model_shadows(m, shadows);
        uint32_t s = 0;
        for (model_seq *before = m->seqs; before < q; before++) s += before->open;
        shadows[s].max_tokens = max_tokens;
        uint32_t without = blocking_node(m, shadows, n, s);
        if (!model_fits(m, shadows, n, FKV_NO_NODE) && (without == FKV_NO_NODE || !model_fits(m, shadows, n, without)))
            expected = FKV_POOL_FULL;
    }
    if (!model_answered(m, "reserve", fkv_pager_reserve(m->pager, q->seq, max_tokens), expected)) return false;
    m->tally.reserve_refused += expected == FKV_POOL_FULL;
    if (expected != FKV_OK) return true;
    q->max_tokens = max_tokens;
    m->tally.reserved++;
    return true;
}

static bool operate_insert(pager_model *m, pager_choices *choices) {
    static shadow shadows[MAX_SEQS + 1];
    uint32_t path[MAX_TOKENS];
    uint32_t tokens[MAX_TOKENS];
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    uint32_t n_tokens = model_one_in(choices, 2) ? q->len : pager_choose(choices, q->len + 1);
    memcpy(tokens, q->tokens, n_tokens * sizeof *tokens);
    bool has_full = m->n_full < m->spec.n_groups;
    uint32_t n_told = fkv_min_u32(q->n_known, n_tokens / m->spec.page_tokens * m->spec.page_tokens);
    if (has_full && n_told > 0 && model_one_in(choices, 8)) {
        tokens[pager_choose(choices, n_told)] ^= 1u << 20;
        m->tally.contradicted++;
        return model_answered(m, "insert of other tokens", fkv_pager_insert(m->pager, q->seq, tokens, n_tokens),
                              FKV_BAD_ARGUMENT);
    }
    uint32_t n_pages = n_tokens / m->spec.page_tokens;
    uint32_t n_before = model_find_path(m, q->tenant, tokens, n_pages, path);
    bool fits = true;
    if (has_full) {
        balance b = model_count(m, shadows, model_shadows(m, shadows), FKV_NO_NODE);
        for (uint32_t i = 0; i < n_before; i++) b.promised += !b.busy[path[i]];
        fits = b.promised <= b.free + b.cached;
    }
    if (!model_answered(m, "insert", fkv_pager_insert(m->pager, q->seq, n_tokens == 0 ? NULL : tokens, n_tokens), FKV_OK))
        return false;
    uint32_t n_after = model_find_path(m, q->tenant, tokens, n_pages, path);
    if (has_full)
        EXPECT(n_after == (fits ? n_pages : n_before), "after insert, %u of %u pages are in the tree", n_after, n_pages);
    for (uint32_t i = 0; m->n_state < m->spec.n_groups && i < n_after; i++) {
        uint32_t page = m->pager->tree.nodes[path[i]].pages[m->n_state];
        uint32_t end = (i + 1) * m->spec.page_tokens;
        EXPECT(page == FKV_NO_PAGE || model_state(m, page)->prefix == q->prefix[end],
               "the tree has a wrong state after %u tokens", end);
        EXPECT(page != FKV_NO_PAGE || end != q->len, "insert did not store the state of the sequence");
        m->tally.snapshots += page != FKV_NO_PAGE && end == q->len;
    }
    m->tally.inserted++;
    return true;
}

static bool operate_fill(pager_model *m, pager_choices *choices) {
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    uint32_t n_tokens = pager_choose(choices, q->max_tokens + 2);
    fkv_status expected = q->len > 0 ? FKV_BAD_STATE : n_tokens > q->max_tokens ? FKV_SEQ_FULL : FKV_OK;
    if (!model_answered(m, "fill", fkv_pager_fill(m->pager, q->seq, n_tokens), expected)) return false;
    if (expected != FKV_OK) return true;
    uint32_t slot = 0;
    (void)fkv_pager_slot(m->pager, q->seq, &slot);
    for (uint32_t i = 0; i < n_tokens; i++) {
        model_extend(q, i, model_text(q->text, i));
        model_write(m, q, slot, i);
    }
    if (m->n_state < m->spec.n_groups && n_tokens > 0 &&
        !model_write_state(m, q, FKV_NO_PAGE, 0, model_state_page(m, q), n_tokens))
        return false;
    q->len = n_tokens;
    memset(q->spare, 0, sizeof q->spare);
    model_keep_spare(m, q);
    m->tally.filled++;
    return true;
}

static bool operate_close(pager_model *m, pager_choices *choices) {
    model_seq *q = pick(m, choices);
    if (q == NULL) return true;
    if (!model_answered(m, "close", fkv_pager_close(m->pager, q->seq), FKV_OK)) return false;
    q->open = false;
    m->closed = q->seq;
    m->tally.closed++;
    return true;
}

static bool operate_clear(pager_model *m) {
    if (!model_answered(m, "clear", fkv_pager_clear(m->pager), FKV_OK)) return false;
    fkv_stats stats = {0};
    fkv_pager_stats(m->pager, &stats);
    for (uint32_t g = 0; g < m->spec.n_groups; g++)
        EXPECT(stats.groups[g].cached == 0, "clear left %u cached pages", stats.groups[g].cached);
    m->tally.cleared++;
    return true;
}

/* ---- steps ---- */

static uint32_t choose_rows(pager_model *m, pager_choices *choices, fkv_row *rows) {
    uint32_t n_rows = 0;
    uint32_t first = pager_choose(choices, m->spec.max_seqs);
    uint32_t skip = pager_choose(choices, 3);
    uint32_t left = m->spec.max_step_tokens;
    bool careless = model_one_in(choices, 16);
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
        const model_seq *q = &m->seqs[(first + s) % m->spec.max_seqs];
        if (!q->open || (skip > 0 && pager_choose(choices, skip + 1) == 0)) continue;
        uint32_t n_tokens = 1 + pager_choose(choices, model_one_in(choices, 3) ? m->spec.max_step_tokens : 5);
        /* about half of the chunks end at a page boundary, because a state can be stored only there */
        if (m->n_state < m->spec.n_groups && model_one_in(choices, 2))
            n_tokens = m->spec.page_tokens - q->len % m->spec.page_tokens;
        if (!careless) n_tokens = fkv_min_u32(n_tokens, fkv_min_u32(left, q->max_tokens - q->len));
        if (n_tokens == 0) continue;
        left -= fkv_min_u32(left, n_tokens);
        rows[n_rows++] = (fkv_row){q->seq, n_tokens};
    }
    if (n_rows == 0 || !model_one_in(choices, 16)) return n_rows;
    uint32_t r = pager_choose(choices, n_rows);
    if (model_one_in(choices, 2))
        rows[r].seq = model_one_in(choices, 2) ? m->closed : rows[0].seq;
    else
        rows[r].n_tokens = 0;
    return n_rows;
}

static model_seq *seq_of(pager_model *m, fkv_seq seq) {
    for (uint32_t s = 0; s < m->spec.max_seqs; s++)
        if (m->seqs[s].open && m->seqs[s].seq == seq) return &m->seqs[s];
    return NULL;
}

static fkv_status expected_of_rows(pager_model *m, const fkv_row *rows, uint32_t n_rows) {
    uint32_t sum = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        const model_seq *q = seq_of(m, rows[r].seq);
        if (q == NULL) return FKV_BAD_SEQ;
        for (uint32_t other = 0; other < r; other++)
            if (rows[other].seq == rows[r].seq) return FKV_BAD_ARGUMENT;
        if (rows[r].n_tokens == 0) return FKV_BAD_ARGUMENT;
        if (q->len + rows[r].n_tokens > q->max_tokens) return FKV_SEQ_FULL;
        sum += rows[r].n_tokens;
        if (sum > m->spec.max_step_tokens) return FKV_STEP_FULL;
    }
    return n_rows == 0 ? FKV_BAD_ARGUMENT : FKV_OK;
}

static bool all_refused_in_step(pager_model *m, fkv_row row) {
    fkv_seq other = 0;
    fkv_seq_config config = {.max_tokens = 1};
    EXPECT(fkv_pager_open(m->pager, &config, &other, NULL) == FKV_BAD_STATE, "open was not rejected in a step");
    EXPECT(fkv_pager_fork(m->pager, row.seq, m->spec.max_seq_tokens, &other) == FKV_BAD_STATE, "fork was not rejected in a step");
    EXPECT(fkv_pager_truncate(m->pager, row.seq, 0) == FKV_BAD_STATE, "truncate was not rejected in a step");
    EXPECT(fkv_pager_reserve(m->pager, row.seq, m->spec.max_seq_tokens) == FKV_BAD_STATE, "reserve was not rejected in a step");
    EXPECT(fkv_pager_insert(m->pager, row.seq, NULL, 0) == FKV_BAD_STATE, "insert was not rejected in a step");
    EXPECT(fkv_pager_fill(m->pager, row.seq, 1) == FKV_BAD_STATE, "fill was not rejected in a step");
    EXPECT(fkv_pager_clear(m->pager) == FKV_BAD_STATE, "clear was not rejected in a step");
    EXPECT(fkv_pager_step_begin(m->pager, &row, 1) == FKV_BAD_STATE, "a nested step was not rejected");
    return true;
}

/* Executes the page copies and writes all new tokens of the step. Afterwards, the sequences of the model contain the new tokens,
 * but their lengths do not include them yet. */
static bool write_step(pager_model *m, pager_choices *choices, const fkv_row *rows, uint32_t n_rows) {
    uint32_t n_copies = 0;
    const fkv_page_copy *copies = fkv_pager_step_copies(m->pager, &n_copies);
    size_t page_bytes = m->spec.page_tokens * sizeof(written);
    for (uint32_t c = 0; c < n_copies; c++) {
        written *pages_of_group = m->memory[copies[c].group];
        memcpy(&pages_of_group[copies[c].to * m->spec.page_tokens], &pages_of_group[copies[c].from * m->spec.page_tokens],
               page_bytes);
    }
    m->tally.copies += n_copies;
    uint32_t n_step_rows = 0;
    const fkv_step_row *step_rows = fkv_pager_step_rows(m->pager, &n_step_rows);
    EXPECT(n_step_rows == n_rows, "the step has %u rows, expected %u", n_step_rows, n_rows);
    for (uint32_t r = 0; r < n_rows; r++) {
        model_seq *q = seq_of(m, rows[r].seq);
        EXPECT(step_rows[r].start == q->len && step_rows[r].n_tokens == rows[r].n_tokens, "row %u has a wrong start or length",
               r);
        for (uint32_t i = q->len; i < q->len + rows[r].n_tokens; i++) {
            if (model_one_in(choices, 20)) q->text = pager_choose(choices, N_TEXTS);
            model_extend(q, i, model_text(q->text, i));
            model_write(m, q, step_rows[r].slot, i);
        }
        if (m->n_state == m->spec.n_groups) continue;
        const fkv_state_move *move = &fkv_pager_step_states(m->pager)[r];
        EXPECT(move->to == model_state_page(m, q), "the table of row %u does not hold the new state", r);
        if (!model_write_state(m, q, move->from, q->len, move->to, q->len + rows[r].n_tokens)) return false;
    }
    return true;
}

/* Discards tokens at the ends of some rows and writes the states of these rows again. Updates n_tokens of the rows. */
static bool keep_in_step(pager_model *m, pager_choices *choices, fkv_row *rows, uint32_t n_rows) {
    uint32_t n_kept[MAX_SEQS];
    bool changed = false;
    for (uint32_t r = 0; r < n_rows; r++) n_kept[r] = rows[r].n_tokens;
    const uint32_t wrong = pager_choose(choices, n_rows);
    n_kept[wrong] = model_one_in(choices, 2) ? 0 : rows[wrong].n_tokens + 1;
    EXPECT(fkv_pager_step_keep(m->pager, n_kept, &changed) == FKV_BAD_ARGUMENT, "a row kept no tokens, or more than it has");
    for (uint32_t r = 0; r < n_rows; r++) n_kept[r] = 1 + pager_choose(choices, rows[r].n_tokens);
    EXPECT(fkv_pager_step_keep(m->pager, n_kept, &changed) == FKV_OK, "fkv_pager_step_keep() failed");
    EXPECT(fkv_pager_consistent(m->pager), "inconsistent after tokens were discarded");
    for (uint32_t r = 0; r < n_rows; r++) {
        model_seq *q = seq_of(m, rows[r].seq);
        EXPECT(changed || n_kept[r] == rows[r].n_tokens, "a change of row %u was not reported", r);
        m->tally.discarded += rows[r].n_tokens - n_kept[r];
        rows[r].n_tokens = n_kept[r];
        if (m->n_state == m->spec.n_groups) continue;
        const fkv_state_move *move = &fkv_pager_step_states(m->pager)[r];
        if (!model_write_state(m, q, move->from, q->len, move->to, q->len + n_kept[r])) return false;
    }
    return true;
}

/* Closes some sequences during the step. A closed sequence may or may not have rows in the step. */
static bool close_in_step(pager_model *m, pager_choices *choices) {
    uint32_t n_left = 0;
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
        model_seq *q = &m->seqs[s];
        uint32_t len = 0;
        if (!q->open || q->closing) continue;
        n_left++;
        if (!model_one_in(choices, 3)) continue;
        EXPECT(fkv_pager_close(m->pager, q->seq) == FKV_OK, "sequence %u cannot be closed in a step", s);
        EXPECT(fkv_pager_close(m->pager, q->seq) == FKV_BAD_SEQ, "sequence %u was closed twice in a step", s);
        EXPECT(fkv_pager_length(m->pager, q->seq, &len) == FKV_BAD_SEQ,
               "sequence %u still has a length after it was closed in a step", s);
        q->closing = true;
        n_left--;
        m->closed = q->seq;
        m->tally.closed_in_step++;
    }
    fkv_stats stats = {0};
    fkv_pager_stats(m->pager, &stats);
    EXPECT(stats.seqs == n_left, "%u open sequences after closing some in a step, expected %u", stats.seqs, n_left);
    EXPECT(fkv_pager_consistent(m->pager), "inconsistent after a close in a step");
    return true;
}

/* Checks that fkv_pager_match() returns the same result during a step as outside of a step, and leaves the pager unchanged. */
static bool match_in_step(pager_model *m, pager_choices *choices) {
    uint32_t prompt[MAX_TOKENS];
    uint32_t path[MAX_TOKENS];
    uint32_t n_prompt = choose_prompt(m, choices, prompt);
    fkv_seq_config config = {
        .max_tokens = m->spec.max_seq_tokens, .tenant = pager_choose(choices, N_TENANTS), .prompt = prompt, .n_prompt = n_prompt};
    uint32_t n_path = model_find_path(m, config.tenant, prompt, n_prompt / m->spec.page_tokens, path);
    memcpy(m->aside, m->block, m->block_bytes);
    if (!match_agrees(m, &config, model_usable_pages(m, path, n_path))) return false;
    EXPECT(memcmp(m->aside, m->block, m->block_bytes) == 0, "fkv_pager_match() in a step changed the pager");
    return true;
}

/* Removes the sequences that were closed during the step. Returns the number of new tokens that the step had for these sequences.
 */
static uint32_t forget_closing(pager_model *m, const fkv_row *rows, uint32_t n_rows) {
    uint32_t n_tokens = 0;
    for (uint32_t r = 0; r < n_rows; r++)
        if (seq_of(m, rows[r].seq)->closing) n_tokens += rows[r].n_tokens;
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
        m->tally.closed += m->seqs[s].closing;
        if (m->seqs[s].closing) m->seqs[s].open = false;
        m->seqs[s].closing = false;
    }
    return n_tokens;
}

static bool operate_step(pager_model *m, pager_choices *choices) {
    fkv_row rows[MAX_SEQS];
    uint32_t n_rows = choose_rows(m, choices, rows);
    if (n_rows == 0 && !model_one_in(choices, 16)) return operate_close(m, choices); /* no sequence can grow further */
    fkv_status expected = expected_of_rows(m, rows, n_rows);
    if (!model_answered(m, "begin", fkv_pager_step_begin(m->pager, rows, n_rows), expected)) return false;
    if (expected != FKV_OK) return true;
    EXPECT(fkv_pager_consistent(m->pager), "inconsistent in a step");
    if (model_one_in(choices, 4) && (!all_refused_in_step(m, rows[0]) || !match_in_step(m, choices))) return false;

    uint64_t state_writes[MAX_SEQS]; /* state_write of each sequence before the step, restored if the step is aborted */
    for (uint32_t s = 0; s < m->spec.max_seqs; s++) state_writes[s] = m->seqs[s].state_write;
    bool abort = model_one_in(choices, 4);
    uint32_t closing = pager_choose(choices, 8);
    if (closing == 6 && !close_in_step(m, choices)) return false;
    if (!abort || model_one_in(choices, 2)) {
        if (!write_step(m, choices, rows, n_rows)) return false;
        for (uint32_t s = 0; s < m->spec.max_seqs; s++)
            if (m->seqs[s].open && !model_check_sequence(m, s, m->seqs[s].len)) return false;
        for (uint32_t r = 0; r < n_rows; r++) {
            model_seq *q = seq_of(m, rows[r].seq);
            if (!model_check_sequence(m, (uint32_t)(q - m->seqs), q->len + rows[r].n_tokens - 1)) return false;
        }
        if (model_one_in(choices, 3) && !keep_in_step(m, choices, rows, n_rows)) return false;
    }
    if (closing == 7 && !close_in_step(m, choices)) return false;
    if (abort) {
        if (!model_answered(m, "abort", fkv_pager_step_abort(m->pager), FKV_OK)) return false;
        if (!model_check_closed_only(m)) return false;
        (void)forget_closing(m, rows, n_rows);
        for (uint32_t s = 0; s < m->spec.max_seqs; s++) {
            m->seqs[s].state_write = state_writes[s];
            m->seqs[s].state_len = m->seqs[s].len;
        }
        m->tally.aborted++;
        return true;
    }
    uint64_t n_tokens = m->pager->counters.tokens;
    if (!model_answered(m, "commit", fkv_pager_step_commit(m->pager), FKV_OK)) return false;
    for (uint32_t r = 0; r < n_rows; r++) {
        model_seq *q = seq_of(m, rows[r].seq);
        for (uint32_t i = q->len; i < q->len + rows[r].n_tokens; i++) q->spare[i / m->spec.page_tokens] = true;
        q->len += rows[r].n_tokens;
        model_keep_spare(m, q);
    }
    for (uint32_t r = 0; r < n_rows; r++) n_tokens += rows[r].n_tokens;
    n_tokens -= forget_closing(m, rows, n_rows);
    EXPECT(m->pager->counters.tokens == n_tokens, "a step counted tokens of sequences closed during it");
    m->tally.committed++;
    return true;
}

static bool operate_badly(pager_model *m, pager_choices *choices) {
    fkv_seq none = model_one_in(choices, 2) ? m->closed : (fkv_seq)pager_choose(choices, 1u << 16);
    if (seq_of(m, none) != NULL) return true;
    uint32_t n = 0;
    fkv_seq child = 0;
    fkv_row row = {none, 1};
    switch (pager_choose(choices, 11)) {
    case 0: return model_answered(m, "length", fkv_pager_length(m->pager, none, &n), FKV_BAD_SEQ);
    case 1: return model_answered(m, "fork", fkv_pager_fork(m->pager, none, 1, &child), FKV_BAD_SEQ);
    case 2: return model_answered(m, "truncate", fkv_pager_truncate(m->pager, none, 0), FKV_BAD_SEQ);
    case 3: return model_answered(m, "close", fkv_pager_close(m->pager, none), FKV_BAD_SEQ);
    case 4: return model_answered(m, "insert", fkv_pager_insert(m->pager, none, NULL, 0), FKV_BAD_SEQ);
    case 5: return model_answered(m, "fill", fkv_pager_fill(m->pager, none, 0), FKV_BAD_SEQ);
    case 6: return model_answered(m, "begin", fkv_pager_step_begin(m->pager, &row, 1), FKV_BAD_SEQ);
    case 7: return model_answered(m, "commit", fkv_pager_step_commit(m->pager), FKV_BAD_STATE);
    case 9: return model_answered(m, "reserve", fkv_pager_reserve(m->pager, none, 1), FKV_BAD_SEQ);
    case 8: return model_answered(m, "abort", fkv_pager_step_abort(m->pager), FKV_BAD_STATE);
    default: return model_answered(m, "begin", fkv_pager_step_begin(m->pager, &row, m->spec.max_seqs + 1), FKV_BAD_ARGUMENT);
    }
}

bool pager_model_operate(pager_model *m, pager_choices *choices) {
    m->n_operations++;
    model_snapshot(m);
    bool agreed = true;
    uint32_t kind = pager_choose(choices, 35);
    if (kind < 12)
        agreed = operate_step(m, choices);
    else if (kind < 17)
        agreed = operate_open(m, choices);
    else if (kind < 20)
        agreed = operate_fork(m, choices);
    else if (kind < 23)
        agreed = operate_truncate(m, choices);
    else if (kind < 26)
        agreed = operate_insert(m, choices);
    else if (kind < 28)
        agreed = operate_fill(m, choices);
    else if (kind < 31)
        agreed = operate_close(m, choices);
    else if (kind >= 32)
        agreed = operate_reserve(m, choices);
    else if (model_one_in(choices, 8))
        agreed = operate_clear(m);
    else
        agreed = operate_badly(m, choices);
    return agreed && model_check_all(m);
}
