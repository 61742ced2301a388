/* One cache and what must be true of it: its sequences with the tokens they hold, the prefixes that were offered to its tree, and
 * its figures. Knows the public header only.
 */
#ifndef FKV_LIFE_CACHE_H
#define FKV_LIFE_CACHE_H

#include "life_reference.h"

typedef struct life_seq {
    fkv_seq number;
    uint64_t tenant;
    uint32_t max_tokens;
    uint32_t n; /* tokens */
    life_token **tokens;
    uint64_t origin;    /* tenant that the rows were computed for: another one in a sequence loaded from its file */
    uint32_t n_shared;  /* of its first tokens: in pages that stand in the prefix tree */
    uint32_t n_prompt;  /* prefill until here */
    uint32_t open_from; /* sealed layers: the pages from here on have their open form, beside page 0 */
    bool closing;       /* closed in the step that is open */
    uint32_t document;  /* that its next tokens are from */
} life_seq;

typedef struct life_cache {
    life_world *world;
    life_config config;
    fkv_cache *cache;
    fkv_plan plan;
    life_seq seqs[LIFE_MAX_SEQS];
    uint32_t n_seqs;
    fkv_seq closed;    /* a number that was closed */
    uint64_t *offered; /* chains of the last tokens of pages offered to the tree */
    uint32_t n_offered;
    uint32_t most_offered;
    bool exact;        /* the tree holds all that was offered */
    fkv_stats figures; /* as they were; those that can be foretold are kept up to date by whoever changes them */
} life_cache;

void life_cache_open(life_cache *cache, life_world *world, const life_config *config);
void life_cache_close(life_cache *cache);

/* Every figure, every length, now and then every structure. After each operation, and after calls that must change nothing. */
void life_cache_check(life_cache *cache, bool whole);

life_seq *life_seq_add(life_cache *cache, fkv_seq number, uint64_t tenant, uint64_t origin, uint32_t max_tokens);
void life_seq_remove(life_cache *cache, life_seq *seq);

/* Room for other max_tokens, at least its length. */
void life_seq_resize(life_seq *seq, uint32_t max_tokens);
void life_seq_push(life_cache *cache, life_seq *seq, uint32_t id);

/* The chain behind the first n tokens. */
uint64_t life_seq_chain(const life_cache *cache, const life_seq *seq, uint32_t n);

/* Sum of max_tokens of the open sequences. */
uint64_t life_cache_promised(const life_cache *cache);

/* Pages that are in the prefix tree and in use. */
uint32_t life_cache_pinned(const life_cache *cache);

/* Whether a layer has dropped something that token n would see, n <= length: behind its window, or the open form of a page. */
bool life_is_gone(const life_cache *cache, const life_seq *seq, uint32_t n);

/* The sequence has its n tokens by now: after a step it keeps the open form of the page of the next token and of the one before.
 */
void life_seq_grown(const life_cache *cache, life_seq *seq);

/* It has no open page but the first and those of the span of the next token. */
void life_seq_without_spare(const life_cache *cache, life_seq *seq);
/* It was cut back to its length. */
void life_seq_cut(const life_cache *cache, life_seq *seq);

/* Tokens in whole pages that the tree holds of a prompt at most; exactly that many where cache->exact. */
uint32_t life_tree_match(const life_cache *cache, uint64_t tenant, const uint32_t *prompt, uint32_t n_prompt);
void life_tree_offer(life_cache *cache, const life_seq *seq, uint32_t n_tokens);
void life_tree_clear(life_cache *cache);

/* Sequences have changed: is there still room for all that was offered? */
void life_tree_settle(life_cache *cache);

uint32_t life_document_token(const life_config *config, uint32_t document, uint32_t position);

void life_expect(fkv_status got, fkv_status expected, const char *call);

#endif
