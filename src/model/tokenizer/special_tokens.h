/* Tokens that are found in a text before anything else: control tokens ("<|im_end|>") where the caller asks for them, and those
 * a vocabulary defines to be taken whole always. Longer ones are found before shorter ones wherever they stand, and among equals
 * the leftmost, as if each token in turn were cut out of what the ones before it left over; but in one pass over the text.
 */
#ifndef FKV_SPECIAL_TOKENS_H
#define FKV_SPECIAL_TOKENS_H

#include "token_merge.h"
#include "vocab_map.h"

/* A node of the automaton: a string that one of the tokens ends with. Node 0 is the empty one. */
typedef struct fkv_special_node {
    uint32_t parent; /* without its first byte */
    uint32_t back;   /* the longest other node that this string begins with */
    uint32_t
        token[2];   /* the longest token that this string begins with, as a node: of all, of those that are not hidden; 0: none */
    uint32_t order; /* of the token that it is: its place among all by falling length, then rising number; or FKV_NO_TOKEN */
    uint16_t n_bytes;
    uint8_t byte; /* its first */
} fkv_special_node;

typedef struct fkv_special_tokens {
    fkv_pair_map edges;      /* node << 8 | byte before it to node */
    fkv_special_node *nodes; /* [max_nodes] */
    uint32_t *tokens;        /* [n_tokens] by order */
    uint32_t n_tokens;
    uint32_t n_nodes, max_nodes;
    uint32_t longest;   /* bytes */
    uint32_t last[256]; /* the node of each single byte; 0: none */
} fkv_special_tokens;

typedef struct fkv_special_token {
    fkv_bytes text; /* 1 to FKV_MAX_TOKEN_BYTES, no two the same */
    uint32_t token;
    bool hidden; /* found only where control tokens are asked for */
} fkv_special_token;

/* `tokens` is sorted in place. Close takes a zeroed one too. */
fkv_status fkv_special_tokens_open(fkv_special_tokens *specials, fkv_special_token *tokens, uint32_t n_tokens);
void fkv_special_tokens_close(fkv_special_tokens *specials);

typedef struct fkv_special_scan {
    const fkv_special_tokens *specials;
    const char *text;
    const uint8_t *given; /* [n_bytes] or NULL: hidden tokens are not found where a byte is marked with 1 */
    size_t n_bytes;       /* below 2^32 */
    bool with_hidden;
    bool leftmost; /* of tokens that overlap the leftmost is found, then the longest */
    size_t at;
    size_t block_start, block_end;     /* where the longest token at each byte is known */
    size_t contest_start, contest_end; /* tokens that overlap, decided and being handed out */
    fkv_scratch block;
    fkv_scratch contest;
} fkv_special_scan;

typedef struct fkv_special_hit {
    size_t start, end; /* n_bytes both: none is left */
    uint32_t token;
} fkv_special_hit;

/* The next token of the text from scan->at on. */
fkv_status fkv_special_scan_next(fkv_special_scan *scan, fkv_special_hit *hit);
void fkv_special_scan_close(fkv_special_scan *scan);

#endif
