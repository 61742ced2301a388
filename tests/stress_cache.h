/* A cache under test and its expected state: the sequences with their tokens, the prefixes inserted into its tree, and its
 * statistics. Uses the public header only.
 */
#ifndef FKV_STRESS_CACHE_H
#define FKV_STRESS_CACHE_H

#include "stress_reference.h"

typedef struct stress_seq {
    fkv_seq number;
    uint64_t tenant;
    uint32_t max_tokens;
    uint32_t n; /* number of tokens */
    stress_token **tokens;
    uint64_t origin;    /* tenant for which the rows were computed; differs from `tenant` if the sequence was loaded from another
                           tenant's file */
    uint32_t n_shared;  /* number of leading tokens whose pages are in the prefix tree */
    uint32_t n_prompt;  /* length of the prompt */
    uint32_t open_from; /* sealed layers only: index of the first page, not counting page 0, that still has its open form */
    bool closing;       /* true if the sequence was closed during the current step */
    uint32_t document;  /* index of the document from which the next tokens are taken */
} stress_seq;

/* A set of chain hashes, each of which covers a token and its whole history. */
typedef struct stress_chains {
    uint64_t *chains;
    uint32_t n, most;
} stress_chains;

typedef struct stress_cache {
    stress_fixture *fixture;
    stress_config config;
    fkv_cache *cache;
    fkv_plan plan;
    stress_seq seqs[STRESS_MAX_SEQS];
    uint32_t n_seqs;
    fkv_seq closed;           /* ID of a sequence that was closed, for calls that must fail */
    stress_chains offered;    /* chain hash of the last token of each page that was inserted into the tree */
    stress_chains snapped;    /* chain hash of the last token that each snapshot in the tree covers */
    bool exact;               /* true if the tree still holds all prefixes and snapshots that were inserted */
    fkv_stats expected_stats; /* expected statistics; operations update the predictable counters */
} stress_cache;

void stress_cache_open(stress_cache *cache, stress_fixture *fixture, const stress_config *config);
void stress_cache_close(stress_cache *cache);

/* Checks all statistics and lengths and, if `whole` is true, the internal consistency. Called after each operation, and after
 * calls that must not change the cache. */
void stress_cache_check(stress_cache *cache, bool whole);

stress_seq *stress_seq_add(stress_cache *cache, fkv_seq number, uint64_t tenant, uint64_t origin, uint32_t max_tokens);
void stress_seq_remove(stress_cache *cache, stress_seq *seq);

/* Changes max_tokens, which must not be smaller than the sequence length. */
void stress_seq_resize(stress_seq *seq, uint32_t max_tokens);
void stress_seq_push(stress_cache *cache, stress_seq *seq, uint32_t id);

/* Returns the chain hash of the first n tokens. */
uint64_t stress_seq_chain(const stress_cache *cache, const stress_seq *seq, uint32_t n);

/* Returns the sum of max_tokens over the open sequences. */
uint64_t stress_cache_promised(const stress_cache *cache);

/* Returns the number of pages that are both in the prefix tree and in use. */
uint32_t stress_cache_pinned(const stress_cache *cache);

/* Returns true if the sequence cannot be truncated to n tokens, because a layer has dropped data that a query at position n
 * needs: rows that have left its window, or the open form of a page. */
bool stress_is_gone(const stress_cache *cache, const stress_seq *seq, uint32_t n);

/* Updates open_from after a step. Pages keep their open form from the start of the span that contains the position one page
 * before the end of the sequence. */
void stress_seq_grown(const stress_cache *cache, stress_seq *seq);

/* Drops the open forms of all pages except page 0 and the pages in the span of the next token. */
void stress_seq_without_spare(const stress_cache *cache, stress_seq *seq);
/* Updates open_from after the sequence was truncated to its current length. */
void stress_seq_cut(const stress_cache *cache, stress_seq *seq);

/* Returns an upper bound on the number of prompt tokens in full pages of the tree. The bound is exact if cache->exact is true. */
uint32_t stress_tree_match(const stress_cache *cache, uint64_t tenant, const uint32_t *prompt, uint32_t n_prompt);
void stress_tree_offer(stress_cache *cache, const stress_seq *seq, uint32_t n_tokens);
void stress_tree_clear(stress_cache *cache);

/* Records that the pages of n_tokens tokens, and the snapshot after them if has_state is true, were unpacked into the tree, which
 * may have evicted other prefixes. */
void stress_tree_restored(stress_cache *cache, uint64_t tenant, const uint32_t *ids, uint32_t n_tokens, bool has_state);

/* Returns whether the tree may have a snapshot after the first n tokens of the sequence. */
bool stress_was_snapped(const stress_cache *cache, const stress_seq *seq, uint32_t n);

/* Clears cache->exact if the pool may no longer have enough pages for all inserted prefixes. */
void stress_tree_settle(stress_cache *cache);

uint32_t stress_document_token(const stress_config *config, uint32_t document, uint32_t position);

void stress_expect(fkv_status got, fkv_status expected, const char *call);

#endif
