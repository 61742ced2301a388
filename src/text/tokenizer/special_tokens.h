/* Finds special tokens in a text, before any other processing. Control tokens ("<|im_end|>") are matched only on request,
 * user-defined tokens always. Longer tokens take precedence over shorter tokens. Among tokens of equal length, the token with the
 * lower id takes precedence. Overlapping matches of the same token are resolved from left to right. The result is the same as if
 * the text were split at one token after another, but it is computed in a single pass. */
#ifndef FKV_SPECIAL_TOKENS_H
#define FKV_SPECIAL_TOKENS_H

#include "token_merge.h"
#include "vocab_map.h"

/* A node of the automaton, which represents a suffix of a token. Node 0 represents the empty suffix. */
typedef struct fkv_special_node {
    uint32_t parent;   /* node of the next shorter suffix of the token */
    uint32_t back;     /* failure link: node of the longest proper prefix of this suffix that has a node */
    uint32_t token[2]; /* node of the longest token that is a prefix of this suffix; 0 if there is none. token[0] considers all
                          tokens, token[1] only tokens that are not hidden */
    uint32_t order;    /* rank of the token when sorted by descending length, then ascending id; FKV_NO_TOKEN if not a token */
    uint16_t n_bytes;
    uint8_t byte; /* first byte */
} fkv_special_node;

typedef struct fkv_special_tokens {
    fkv_pair_map edges;      /* maps (node << 8 | preceding byte) to a node */
    fkv_special_node *nodes; /* [max_nodes] */
    uint32_t *tokens;        /* [n_tokens] token ids, indexed by order */
    uint32_t n_tokens;
    uint32_t n_nodes, max_nodes;
    uint32_t longest;   /* length of the longest token, in bytes */
    uint32_t last[256]; /* node of each single-byte suffix; 0 if there is none */
} fkv_special_tokens;

typedef struct fkv_special_token {
    fkv_bytes text; /* unique text of 1 to FKV_MAX_TOKEN_BYTES bytes */
    uint32_t token;
    bool hidden; /* true for a control token, which is matched only on request */
} fkv_special_token;

/* Builds the automaton. Sorts `tokens` in place. fkv_special_tokens_close() accepts a zeroed struct. */
fkv_status fkv_special_tokens_open(fkv_special_tokens *specials, fkv_special_token *tokens, uint32_t n_tokens);
void fkv_special_tokens_close(fkv_special_tokens *specials);

typedef struct fkv_special_scan {
    const fkv_special_tokens *specials;
    const char *text;
    const uint8_t *given; /* [n_bytes] marks; a hidden token never matches text with a byte marked 1; NULL if no byte is marked */
    size_t n_bytes;       /* below 2^32 */
    bool with_hidden;
    bool leftmost; /* true to prefer the leftmost of overlapping tokens, then the longest */
    size_t at;
    size_t block_start, block_end;     /* byte range in which the longest token at each byte is known */
    size_t contest_start, contest_end; /* byte range in which overlapping tokens have been resolved */
    fkv_scratch block;
    fkv_scratch contest;
} fkv_special_scan;

typedef struct fkv_special_hit {
    size_t start, end; /* byte range of the token; both are n_bytes if no token is left */
    uint32_t token;
} fkv_special_hit;

/* Finds the next token at or after scan->at. */
fkv_status fkv_special_scan_next(fkv_special_scan *scan, fkv_special_hit *hit);
void fkv_special_scan_close(fkv_special_scan *scan);

#endif
