/* Matches special tokens in one pass. See special_tokens.h.
 *
 * The automaton is an Aho-Corasick automaton over the reversed tokens. It scans a text backwards and finds the longest token that
 * starts at each byte. The text is processed in blocks. The scan of a block starts far enough after the end of the block to find
 * every token that begins in the block.
 *
 * A chain of overlapping tokens is resolved as a whole, with a heap of candidates sorted by (order, position). A candidate that
 * overlaps a chosen token is replaced with the longest token at the same position that ends before the chosen token. From the
 * second replacement on, each replacement at least halves the number of free bytes at the position, because the chosen token was
 * at least as long as the replaced candidate. Each position is therefore visited O(log n) times, where n is the length of the
 * longest token.
 */
#include "special_tokens.h"

#include <stdlib.h>

enum {
    MAX_SPECIAL_BYTES = 4 << 20, /* maximum total size of all special tokens, in bytes */
    BLOCK_BYTES = 1 << 14,
};

static const uint32_t WON = UINT32_C(1) << 31; /* flag bit in contest_arrays.nodes, larger than any node number */

/* ---- automaton ------------------------------------------------------------------------------------------- */

static int compare_special(const void *a, const void *b) {
    const fkv_special_token *x = a;
    const fkv_special_token *y = b;
    if (x->text.size != y->text.size) return x->text.size > y->text.size ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

/* Returns the node whose string is `byte` followed by the string of `node`, or 0 if it does not exist. */
static uint32_t automaton_edge(const fkv_special_tokens *specials, uint32_t node, uint8_t byte) {
    if (node == 0) return specials->last[byte];
    uint64_t next = fkv_pair_map_find(&specials->edges, (uint64_t)node << 8 | byte);
    return next != FKV_NO_PAIR ? (uint32_t)next : 0;
}

static uint32_t automaton_step(const fkv_special_tokens *specials, uint32_t node, uint8_t byte) {
    uint32_t next = automaton_edge(specials, node, byte);
    while (next == 0 && node != 0) {
        node = specials->nodes[node].back;
        next = automaton_edge(specials, node, byte);
    }
    return next;
}

static fkv_status add_special_token(fkv_special_tokens *specials, fkv_bytes text, uint32_t order, bool hidden) {
    uint32_t node = 0;
    for (size_t i = text.size; i-- > 0;) {
        uint8_t byte = (uint8_t)text.data[i];
        uint32_t next = automaton_edge(specials, node, byte);
        if (next == 0) {
            next = specials->n_nodes++;
            FKV_ASSERT(next < specials->max_nodes);
            specials->nodes[next] =
                (fkv_special_node){.parent = node, .order = FKV_NO_TOKEN, .n_bytes = (uint16_t)(text.size - i), .byte = byte};
            if (node == 0) specials->last[byte] = next;
            if (node != 0) FKV_TRY(fkv_pair_map_add(&specials->edges, (uint64_t)node << 8 | byte, next));
        }
        node = next;
    }
    specials->nodes[node].order = order;
    specials->nodes[node].token[0] = node;
    specials->nodes[node].token[1] = hidden ? 0 : node;
    return FKV_OK;
}

/* Sets `back` and `token` of every node, in order of increasing string length. by_length: [n_nodes] scratch array. */
static void link_nodes(fkv_special_tokens *specials, uint32_t *by_length) {
    uint32_t start[FKV_MAX_TOKEN_BYTES + 2] = {0};
    for (uint32_t i = 1; i < specials->n_nodes; i++) start[specials->nodes[i].n_bytes + 1]++;
    for (uint32_t i = 1; i < FKV_MAX_TOKEN_BYTES + 2; i++) start[i] += start[i - 1];
    for (uint32_t i = 1; i < specials->n_nodes; i++) by_length[start[specials->nodes[i].n_bytes]++] = i;
    for (uint32_t i = 0; i + 1 < specials->n_nodes; i++) {
        fkv_special_node *node = &specials->nodes[by_length[i]];
        if (node->parent != 0) node->back = automaton_step(specials, specials->nodes[node->parent].back, node->byte);
        for (int which = 0; which < 2; which++) {
            if (node->token[which] == 0) node->token[which] = specials->nodes[node->back].token[which];
        }
    }
}

static fkv_status add_special_tokens(fkv_special_tokens *specials, fkv_special_token *tokens, uint32_t *by_length) {
    if (specials->n_tokens == 0) return FKV_OK;
    qsort(tokens, specials->n_tokens, sizeof *tokens, compare_special);
    specials->longest = (uint32_t)tokens[0].text.size;
    for (uint32_t order = 0; order < specials->n_tokens; order++) {
        specials->tokens[order] = tokens[order].token;
        FKV_TRY(add_special_token(specials, tokens[order].text, order, tokens[order].hidden));
    }
    link_nodes(specials, by_length);
    return FKV_OK;
}

fkv_status fkv_special_tokens_open(fkv_special_tokens *specials, fkv_special_token *tokens, uint32_t n_tokens) {
    *specials = (fkv_special_tokens){0};
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < n_tokens; i++) n_bytes += tokens[i].text.size;
    FKV_REQUIRE(n_bytes <= MAX_SPECIAL_BYTES, FKV_UNSUPPORTED,
                "the special tokens of the vocabulary have %llu bytes in total; at most %d are supported",
                (unsigned long long)n_bytes, MAX_SPECIAL_BYTES);
    specials->n_tokens = n_tokens;
    specials->n_nodes = 1;
    specials->max_nodes = (uint32_t)n_bytes + 1;
    FKV_TRY(fkv_pair_map_open(&specials->edges, (uint32_t)n_bytes));
    specials->nodes = calloc(specials->max_nodes, sizeof *specials->nodes);
    specials->tokens = calloc(n_tokens + (size_t)1, sizeof *specials->tokens);
    FKV_REQUIRE(specials->nodes != NULL && specials->tokens != NULL, FKV_NO_MEMORY, "out of memory allocating %u special tokens",
                n_tokens);
    uint32_t *by_length = calloc(specials->max_nodes, sizeof *by_length);
    FKV_REQUIRE(by_length != NULL, FKV_NO_MEMORY, "out of memory allocating %u special tokens", n_tokens);
    fkv_status status = add_special_tokens(specials, tokens, by_length);
    free(by_length);
    return status;
}

void fkv_special_tokens_close(fkv_special_tokens *specials) {
    fkv_pair_map_close(&specials->edges);
    free(specials->nodes);
    free(specials->tokens);
    *specials = (fkv_special_tokens){0};
}

/* ---- scan ------------------------------------------------------------------------------------------------ */

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Finds the longest token at each byte of the block that starts at `start`. */
static fkv_status block_find(fkv_special_scan *scan, size_t start) {
    const fkv_special_tokens *specials = scan->specials;
    size_t end = min_size(start + BLOCK_BYTES, scan->n_bytes);
    FKV_TRY(fkv_scratch_need(&scan->block, (end - start) * sizeof(uint32_t)));
    uint32_t *found = scan->block.block;
    uint32_t node = 0;
    for (size_t at = min_size(end + specials->longest, scan->n_bytes); at-- > start;) {
        node = automaton_step(specials, node, (uint8_t)scan->text[at]);
        if (at < end) found[at - start] = specials->nodes[node].token[scan->with_hidden ? 0 : 1];
    }
    scan->block_start = start;
    scan->block_end = end;
    return FKV_OK;
}

/* Returns the node of the longest token that is a proper prefix of the node's string, or 0 if there is none. */
static uint32_t shorter_token(const fkv_special_scan *scan, uint32_t node) {
    const fkv_special_node *nodes = scan->specials->nodes;
    return nodes[nodes[node].back].token[scan->with_hidden ? 0 : 1];
}

/* Returns the node of the longest token that may match at byte `at`, which is the token of `node` or a prefix of it. Returns 0 if
 * there is none. Hidden tokens must not match bytes that are marked in scan->given. */
static uint32_t longest_allowed(const fkv_special_scan *scan, size_t at, uint32_t node) {
    const fkv_special_node *nodes = scan->specials->nodes;
    if (scan->given == NULL) return node;
    while (node != 0 && nodes[node].token[1] != node && memchr(scan->given + at, 1, nodes[node].n_bytes) != NULL)
        node = shorter_token(scan, node);
    return node;
}

/* Sets *node to the node of the longest token that starts at byte `at`, or to 0 if there is none. */
static fkv_status token_at(fkv_special_scan *scan, size_t at, uint32_t *node) {
    if (at < scan->block_start || at >= scan->block_end) FKV_TRY(block_find(scan, at));
    *node = longest_allowed(scan, at, ((const uint32_t *)scan->block.block)[at - scan->block_start]);
    return FKV_OK;
}

/* Arrays for choosing among the overlapping tokens in a range of n bytes. All arrays are stored in one buffer. */
typedef struct contest_arrays {
    uint64_t *heap;
    uint32_t *nodes;  /* node of the candidate that starts at each byte, with the flag WON if it was chosen; 0 if there is none */
    uint8_t *covered; /* 1 for bytes inside a chosen token */
} contest_arrays;

static contest_arrays contest_of(const fkv_special_scan *scan, size_t n) {
    contest_arrays arrays = {.heap = scan->contest.block};
    arrays.nodes = (uint32_t *)(arrays.heap + n);
    arrays.covered = (uint8_t *)(arrays.nodes + n);
    return arrays;
}

static fkv_status contest_decide(fkv_special_scan *scan, size_t start, size_t end) {
    const fkv_special_node *nodes = scan->specials->nodes;
    size_t n = end - start;
    size_t n_heap = 0;
    FKV_TRY(fkv_scratch_need(&scan->contest, n * (sizeof(uint64_t) + sizeof(uint32_t) + sizeof(uint8_t))));
    contest_arrays arrays = contest_of(scan, n);
    memset(arrays.covered, 0, n);
    for (size_t i = 0; i < n; i++) {
        FKV_TRY(token_at(scan, start + i, &arrays.nodes[i]));
        if (arrays.nodes[i] != 0) fkv_heap_push(arrays.heap, &n_heap, (uint64_t)nodes[arrays.nodes[i]].order << 32 | i);
    }
    while (n_heap > 0) {
        size_t i = (uint32_t)fkv_heap_pop(arrays.heap, &n_heap);
        uint32_t node = arrays.nodes[i];
        const uint8_t *taken = memchr(arrays.covered + i, 1, nodes[node].n_bytes);
        if (taken == NULL) {
            memset(arrays.covered + i, 1, nodes[node].n_bytes);
            arrays.nodes[i] = node | WON;
            continue;
        }
        size_t room = (size_t)(taken - arrays.covered) - i;
        while (nodes[node].n_bytes > room) node = shorter_token(scan, node);
        node = longest_allowed(scan, start + i, node);
        arrays.nodes[i] = node;
        if (node != 0) fkv_heap_push(arrays.heap, &n_heap, (uint64_t)nodes[node].order << 32 | i);
    }
    scan->contest_start = start;
    scan->contest_end = end;
    return FKV_OK;
}

static void hit_put(fkv_special_scan *scan, size_t start, uint32_t node, fkv_special_hit *hit) {
    const fkv_special_node *found = &scan->specials->nodes[node];
    *hit = (fkv_special_hit){.start = start, .end = start + found->n_bytes, .token = scan->specials->tokens[found->order]};
    scan->at = hit->end;
}

static bool contest_next(fkv_special_scan *scan, fkv_special_hit *hit) {
    if (scan->at >= scan->contest_end) return false;
    contest_arrays arrays = contest_of(scan, scan->contest_end - scan->contest_start);
    for (; scan->at < scan->contest_end; scan->at++) {
        uint32_t node = arrays.nodes[scan->at - scan->contest_start];
        if ((node & WON) == 0) continue;
        hit_put(scan, scan->at, node & ~WON, hit);
        return true;
    }
    return false;
}

fkv_status fkv_special_scan_next(fkv_special_scan *scan, fkv_special_hit *hit) {
    const fkv_special_node *nodes = scan->specials->nodes;
    if (contest_next(scan, hit)) return FKV_OK;
    uint32_t node = 0;
    for (; scan->at < scan->n_bytes; scan->at++) {
        FKV_TRY(token_at(scan, scan->at, &node));
        if (node != 0) break;
    }
    *hit = (fkv_special_hit){.start = scan->n_bytes, .end = scan->n_bytes, .token = FKV_NO_TOKEN};
    if (node == 0) return FKV_OK;
    size_t start = scan->at;
    size_t end = start + nodes[node].n_bytes;
    for (size_t at = start + 1; at < end && !scan->leftmost; at++) {
        uint32_t other = 0;
        FKV_TRY(token_at(scan, at, &other));
        if (at + nodes[other].n_bytes > end) end = at + nodes[other].n_bytes;
    }
    /* this token is a hit if the leftmost token is preferred, or if no overlapping token extends further */
    if (end == start + nodes[node].n_bytes) {
        hit_put(scan, start, node, hit);
        return FKV_OK;
    }
    FKV_TRY(contest_decide(scan, start, end));
    bool decided = contest_next(scan, hit);
    FKV_ASSERT(decided); /* contest_decide() always chooses at least one token */
    (void)decided;
    return FKV_OK;
}

void fkv_special_scan_close(fkv_special_scan *scan) {
    fkv_scratch_close(&scan->block);
    fkv_scratch_close(&scan->contest);
}
