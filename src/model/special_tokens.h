/* Tokens that are found in a text before anything else: control tokens ("<|im_end|>") where the caller asks for them, and those
 * a vocabulary defines to be taken whole always. Longer ones are found before shorter ones wherever they stand, and among equals
 * the leftmost, as if each token in turn were cut out of what the ones before it left over; but in one pass over the text.
 */
#ifndef FKV_SPECIAL_TOKENS_H
#define FKV_SPECIAL_TOKENS_H

#include "token_merge.h"
#include "vocab_map.h"

/* A trie of the tokens. A token's order is its place when all are sorted by falling length, then rising number. */
typedef struct fkv_special_tokens {
    fkv_pair_map edges;   /* node << 8 | byte to node */
    uint32_t *node_order; /* [max_nodes] order + 1 of the token that ends here; 0: none */
    uint32_t *tokens;     /* [n_tokens] by order */
    bool *hidden;         /* [n_tokens] by order: found only where control tokens are asked for */
    uint32_t n_tokens;
    uint32_t n_nodes, max_nodes;
    uint32_t first[256]; /* the node of each first byte; 0: none */
} fkv_special_tokens;

typedef struct fkv_special_token {
    fkv_bytes text;
    uint32_t token;
    bool hidden;
} fkv_special_token;

/* `tokens` is sorted in place. Close takes a zeroed one too. */
fkv_status fkv_special_tokens_open(fkv_special_tokens *specials, fkv_arena *arena, fkv_special_token *tokens, uint32_t n_tokens);
void fkv_special_tokens_close(fkv_special_tokens *specials, fkv_arena *arena);

typedef struct fkv_special_scan {
    const fkv_special_tokens *specials;
    const char *text;
    size_t n_bytes;
    bool with_hidden;
    size_t at;
    size_t contest_start, contest_end; /* tokens that overlap, decided and being handed out */
    fkv_scratch scratch;
} fkv_special_scan;

typedef struct fkv_special_hit {
    size_t start, end; /* n_bytes both: none is left */
    uint32_t token;
} fkv_special_hit;

/* The next token of the text from scan->at on. */
fkv_status fkv_special_scan_next(fkv_special_scan *scan, fkv_special_hit *hit);

#endif
