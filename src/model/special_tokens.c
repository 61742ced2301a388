/* Finds special tokens in one pass. See special_tokens.h.
 *
 * Where candidates overlap, the whole chain of overlapping ones is decided at once: a heap of (order, position) hands out the
 * best first. A candidate whose bytes are partly taken looks again for the longest token that still fits before the taken ones.
 * Each such look at least halves the room behind its position (a better candidate inside the room was at least as long as this
 * one), so a position is looked at log(longest token) times at most.
 */
#include "special_tokens.h"

#include <inttypes.h>
#include <stdlib.h>

enum { MAX_SPECIAL_BYTES = 16 << 20 }; /* of all special tokens together */

static const uint32_t TAKEN = UINT32_MAX; /* a byte inside a token; its first byte holds order + 1 */

/* ---- the trie ------------------------------------------------------------------------------------------------ */

static int compare_special(const void *a, const void *b) {
    const fkv_special_token *x = a;
    const fkv_special_token *y = b;
    if (x->text.size != y->text.size) return x->text.size > y->text.size ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

static uint64_t edge_key(uint32_t node, char byte) { return (uint64_t)node << 8 | (uint8_t)byte; }

static fkv_status trie_add(fkv_special_tokens *specials, fkv_bytes text, uint32_t order) {
    uint32_t *first = &specials->first[(uint8_t)text.data[0]];
    if (*first == 0) *first = ++specials->n_nodes;
    uint32_t node = *first;
    for (size_t i = 1; i < text.size; i++) {
        uint64_t next = fkv_pair_map_find(&specials->edges, edge_key(node, text.data[i]));
        if (next == FKV_NO_PAIR) {
            next = ++specials->n_nodes;
            FKV_TRY(fkv_pair_map_add(&specials->edges, edge_key(node, text.data[i]), next));
        }
        node = (uint32_t)next;
    }
    FKV_ASSERT(node < specials->max_nodes);
    if (specials->node_order[node] == 0) specials->node_order[node] = order + 1;
    return FKV_OK;
}

fkv_status fkv_special_tokens_open(fkv_special_tokens *specials, fkv_arena *arena, fkv_special_token *tokens, uint32_t n_tokens) {
    *specials = (fkv_special_tokens){0};
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < n_tokens; i++) n_bytes += tokens[i].text.size;
    FKV_REQUIRE(n_bytes <= MAX_SPECIAL_BYTES, FKV_UNSUPPORTED,
                "the special tokens of the vocabulary have %" PRIu64 " bytes; at most %d are supported", n_bytes,
                MAX_SPECIAL_BYTES);
    specials->n_tokens = n_tokens;
    specials->max_nodes = (uint32_t)n_bytes + 1;
    FKV_TRY(fkv_pair_map_open(&specials->edges, arena, (uint32_t)n_bytes));
    specials->node_order = fkv_arena_take(arena, specials->max_nodes * sizeof *specials->node_order);
    specials->tokens = fkv_arena_take(arena, n_tokens * sizeof *specials->tokens);
    specials->hidden = fkv_arena_take(arena, n_tokens * sizeof *specials->hidden);
    FKV_REQUIRE(specials->node_order != NULL && specials->tokens != NULL && specials->hidden != NULL, FKV_NO_MEMORY,
                "no memory for %" PRIu32 " special tokens", n_tokens);
    if (n_tokens > 0) qsort(tokens, n_tokens, sizeof *tokens, compare_special);
    for (uint32_t order = 0; order < n_tokens; order++) {
        specials->tokens[order] = tokens[order].token;
        specials->hidden[order] = tokens[order].hidden;
        FKV_TRY(trie_add(specials, tokens[order].text, order));
    }
    return FKV_OK;
}

void fkv_special_tokens_close(fkv_special_tokens *specials, fkv_arena *arena) {
    fkv_pair_map_close(&specials->edges, arena);
    fkv_arena_give(arena, specials->node_order, specials->max_nodes * sizeof *specials->node_order);
    fkv_arena_give(arena, specials->tokens, specials->n_tokens * sizeof *specials->tokens);
    fkv_arena_give(arena, specials->hidden, specials->n_tokens * sizeof *specials->hidden);
    *specials = (fkv_special_tokens){0};
}

/* ---- the scan ------------------------------------------------------------------------------------------------ */

typedef struct candidate {
    uint32_t order;
    size_t n_bytes; /* 0: none */
} candidate;

/* The longest token that starts at `at` and ends by `end`; taken: [end - at], the bytes it must not touch are not 0; or NULL. */
static candidate longest_at(const fkv_special_scan *scan, size_t at, size_t end, const uint32_t *taken) {
    const fkv_special_tokens *specials = scan->specials;
    candidate best = {0};
    uint64_t node = specials->first[(uint8_t)scan->text[at]];
    if (node == 0) return best;
    for (size_t depth = 0;;) {
        if (taken != NULL && taken[depth] != 0) return best;
        uint32_t order = specials->node_order[node];
        depth++;
        if (order != 0 && (scan->with_hidden || !specials->hidden[order - 1])) best = (candidate){order - 1, depth};
        if (depth == end - at) return best;
        node = fkv_pair_map_find(&specials->edges, edge_key((uint32_t)node, scan->text[at + depth]));
        if (node == FKV_NO_PAIR) return best;
    }
}

/* Decides between the overlapping candidates of [start, end): the first byte of each token that won holds its order + 1. */
static fkv_status contest_decide(fkv_special_scan *scan, size_t start, size_t end) {
    size_t n = end - start;
    FKV_TRY(fkv_scratch_need(&scan->scratch, n * (sizeof(uint64_t) + sizeof(uint32_t))));
    uint64_t *heap = scan->scratch.block;
    uint32_t *taken = (uint32_t *)(heap + n);
    size_t n_heap = 0;
    memset(taken, 0, n * sizeof *taken);
    for (size_t i = 0; i < n; i++) {
        candidate found = longest_at(scan, start + i, end, NULL);
        if (found.n_bytes > 0) fkv_heap_push(heap, &n_heap, (uint64_t)found.order << 32 | i);
    }
    while (n_heap > 0) {
        uint64_t entry = fkv_heap_pop(heap, &n_heap);
        size_t i = (uint32_t)entry;
        candidate found = longest_at(scan, start + i, end, taken + i);
        if (found.n_bytes == 0) continue;
        if (found.order != entry >> 32) {
            fkv_heap_push(heap, &n_heap, (uint64_t)found.order << 32 | i);
            continue;
        }
        for (size_t j = 1; j < found.n_bytes; j++) taken[i + j] = TAKEN;
        taken[i] = found.order + 1;
    }
    return FKV_OK;
}

/* The next token of a decided contest. */
static bool contest_next(fkv_special_scan *scan, fkv_special_hit *hit) {
    const uint32_t *taken = (const uint32_t *)((uint64_t *)scan->scratch.block + (scan->contest_end - scan->contest_start));
    for (; scan->at < scan->contest_end; scan->at++) {
        size_t i = scan->at - scan->contest_start;
        if (taken[i] == 0) continue;
        hit->start = scan->at;
        hit->token = scan->specials->tokens[taken[i] - 1];
        do scan->at++;
        while (scan->at < scan->contest_end && taken[++i] == TAKEN);
        hit->end = scan->at;
        return true;
    }
    return false;
}

fkv_status fkv_special_scan_next(fkv_special_scan *scan, fkv_special_hit *hit) {
    if (scan->at < scan->contest_end && contest_next(scan, hit)) return FKV_OK;
    candidate found = {0};
    for (; scan->at < scan->n_bytes; scan->at++) {
        found = longest_at(scan, scan->at, scan->n_bytes, NULL);
        if (found.n_bytes > 0) break;
    }
    size_t start = scan->at;
    size_t end = start + found.n_bytes;
    for (size_t at = start + 1; at < end; at++) {
        candidate other = longest_at(scan, at, scan->n_bytes, NULL);
        if (at + other.n_bytes > end) end = at + other.n_bytes;
    }
    if (end == start + found.n_bytes) { /* nothing reaches beyond it, so whatever overlaps it is shorter */
        *hit = (fkv_special_hit){
            .start = start, .end = end, .token = found.n_bytes > 0 ? scan->specials->tokens[found.order] : FKV_NO_TOKEN};
        scan->at = end;
        return FKV_OK;
    }
    FKV_TRY(contest_decide(scan, start, end));
    scan->contest_start = start;
    scan->contest_end = end;
    bool decided = contest_next(scan, hit);
    FKV_ASSERT(decided); /* the best candidate always wins */
    (void)decided;
    return FKV_OK;
}
