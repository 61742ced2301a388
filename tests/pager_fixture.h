/* A pager for unit tests, in its own memory block, and helper functions for common operations. After its operation, every helper
 * checks that the whole pager is consistent.
 */
#ifndef FKV_TEST_PAGER_FIXTURE_H
#define FKV_TEST_PAGER_FIXTURE_H

#include "test.h"

#include "../src/pager/pager_state.h"

typedef struct pager_fixture {
    uint8_t *block;
    uint8_t *snapshot;
    size_t bytes;
} pager_fixture;

static pager_fixture fixture;

static inline void pager_fixture_close(void) {
    free(fixture.block);
    free(fixture.snapshot);
    fixture = (pager_fixture){0};
}

/* Opens a new pager and frees the previous one. */
static inline fkv_pager *pager_fixture_open(const fkv_pager_spec *spec) {
    pager_fixture_close();
    fkv_pager *pager = NULL;
    fkv_carve carve = {0};
    fkv_pager_layout(&carve, spec, &pager);
    fixture.bytes = (size_t)fkv_align_up(carve.used, FKV_CARVE_ALIGN);
    fixture.block = aligned_alloc(FKV_CARVE_ALIGN, fixture.bytes);
    fixture.snapshot = aligned_alloc(FKV_CARVE_ALIGN, fixture.bytes);
    ck_assert(fixture.block != NULL && fixture.snapshot != NULL);
    memset(fixture.block, 0x5a, fixture.bytes);
    carve = (fkv_carve){.base = fixture.block, .size = fixture.bytes};
    fkv_pager_layout(&carve, spec, &pager);
    ck_assert(fkv_pager_consistent(pager));
    return pager;
}

/* Copies the pager's bytes. First clears the scratch memory of fkv_pager_consistent(), which is not part of the pager's state. */
static inline void pager_fixture_snapshot(fkv_pager *pager) {
    memset(pager->audit, 0, 2 * (size_t)pager->n_audit * sizeof *pager->audit);
    memcpy(fixture.snapshot, fixture.block, fixture.bytes);
}

static inline void pager_fixture_restore(void) { memcpy(fixture.block, fixture.snapshot, fixture.bytes); }

/* Returns true if every byte of the pager, except for the abort counter, is the same as in the snapshot. */
static inline bool pager_fixture_unchanged(fkv_pager *pager) {
    memset(pager->audit, 0, 2 * (size_t)pager->n_audit * sizeof *pager->audit);
    uint64_t aborts = pager->counters.aborts;
    pager->counters.aborts = ((fkv_pager *)(void *)fixture.snapshot)->counters.aborts;
    bool same = memcmp(fixture.block, fixture.snapshot, fixture.bytes) == 0;
    pager->counters.aborts = aborts;
    return same;
}

static inline fkv_seq open_seq(fkv_pager *pager, uint32_t max_tokens) {
    fkv_seq seq = 0;
    ck_ok(fkv_pager_open(pager, &(fkv_seq_config){.max_tokens = max_tokens}, &seq, NULL));
    ck_assert(fkv_pager_consistent(pager));
    return seq;
}

static inline fkv_seq open_on(fkv_pager *pager, uint64_t tenant, uint32_t max_tokens, const uint32_t *prompt, uint32_t n_prompt,
                              uint32_t n_expected) {
    fkv_seq seq = 0;
    uint32_t n_shared = UINT32_MAX;
    fkv_seq_config config = {.max_tokens = max_tokens, .tenant = tenant, .prompt = prompt, .n_prompt = n_prompt};
    ck_ok(fkv_pager_open(pager, &config, &seq, &n_shared));
    ck_assert_uint_eq(n_shared, n_expected);
    ck_assert(fkv_pager_consistent(pager));
    return seq;
}

static inline fkv_seq fork_seq(fkv_pager *pager, fkv_seq seq, uint32_t max_tokens) {
    fkv_seq child = 0;
    ck_ok(fkv_pager_fork(pager, seq, max_tokens, &child));
    ck_assert(fkv_pager_consistent(pager));
    return child;
}

static inline void close_seq(fkv_pager *pager, fkv_seq seq) {
    ck_ok(fkv_pager_close(pager, seq));
    ck_assert(fkv_pager_consistent(pager));
}

static inline void commit(fkv_pager *pager) {
    ck_ok(fkv_pager_step_commit(pager));
    ck_assert(fkv_pager_consistent(pager));
}

/* Appends n_tokens tokens to a sequence, in steps of the largest allowed size. */
static inline void grow(fkv_pager *pager, fkv_seq seq, uint32_t n_tokens) {
    while (n_tokens > 0) {
        uint32_t n = fkv_min_u32(n_tokens, pager->spec.max_step_tokens);
        ck_ok(fkv_pager_step_begin(pager, &(fkv_row){seq, n}, 1));
        ck_assert(fkv_pager_consistent(pager));
        commit(pager);
        n_tokens -= n;
    }
}

static inline void insert(fkv_pager *pager, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens) {
    ck_ok(fkv_pager_insert(pager, seq, tokens, n_tokens));
    ck_assert(fkv_pager_consistent(pager));
}

/* Opens a sequence, appends the tokens, inserts them into the prefix tree and closes the sequence. */
static inline void keep_tokens(fkv_pager *pager, uint64_t tenant, const uint32_t *tokens, uint32_t n_tokens) {
    fkv_seq seq = open_on(pager, tenant, n_tokens, NULL, 0, 0);
    grow(pager, seq, n_tokens);
    insert(pager, seq, tokens, n_tokens);
    close_seq(pager, seq);
}

/* Returns the number of prompt tokens found in the prefix tree. If any are found, their nodes become the most recently used. */
static inline uint32_t found_tokens(fkv_pager *pager, uint64_t tenant, const uint32_t *prompt, uint32_t n_prompt) {
    fkv_seq seq = 0;
    uint32_t n_shared = 0;
    fkv_seq_config config = {.max_tokens = n_prompt, .tenant = tenant, .prompt = prompt, .n_prompt = n_prompt};
    ck_ok(fkv_pager_open(pager, &config, &seq, &n_shared));
    close_seq(pager, seq);
    return n_shared;
}

static inline uint32_t slot_of(const fkv_pager *pager, fkv_seq seq) {
    uint32_t slot = 0;
    ck_ok(fkv_pager_slot(pager, seq, &slot));
    return slot;
}

static inline uint32_t length_of(const fkv_pager *pager, fkv_seq seq) {
    uint32_t n_tokens = 0;
    ck_ok(fkv_pager_length(pager, seq, &n_tokens));
    return n_tokens;
}

static inline uint32_t page_of(const fkv_pager *pager, fkv_seq seq, uint32_t group, uint32_t logical) {
    return fkv_page_at(fkv_pager_view(pager, group, slot_of(pager, seq)), logical);
}

static inline fkv_group_stats stats_of(const fkv_pager *pager, uint32_t group) {
    fkv_stats stats = {0};
    fkv_pager_stats(pager, &stats);
    ck_assert_uint_eq(stats.groups[group].free + stats.groups[group].held + stats.groups[group].cached,
                      stats.groups[group].pages);
    return stats.groups[group];
}

/* Generates the tokens of a test text. Texts with different numbers have different tokens. */
static inline void text(uint32_t number, uint32_t *tokens, uint32_t n_tokens) {
    for (uint32_t i = 0; i < n_tokens; i++) tokens[i] = number * 1000 + i;
}

#endif
