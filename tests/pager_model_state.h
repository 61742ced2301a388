/* State shared by the pager model and its operations. Tests include only pager_model.h. */
#ifndef FKV_TEST_PAGER_MODEL_STATE_H
#define FKV_TEST_PAGER_MODEL_STATE_H

#include "pager_model.h"

#include "../src/pager/pager_state.h"

enum { MAX_SEQS = 8, MAX_TOKENS = 512, MAX_PAGES = 256, N_TENANTS = 2, N_TEXTS = 3 };

/* Content of one token slot in page memory: the unique number of the write, and a hash of all tokens of the sequence up to and
 * including the written token. */
typedef struct written {
    uint64_t write;
    uint64_t prefix;
} written;

typedef struct model_seq {
    bool open;
    bool closing; /* true if the sequence was closed during the current step; its pages are held until the step ends */
    fkv_seq seq;
    uint32_t slot;
    uint64_t tenant;
    uint32_t max_tokens;
    uint32_t len;
    uint32_t text;    /* index of the text from which the next tokens of the sequence are taken */
    uint32_t n_known; /* number of tokens found in the prefix tree when the sequence was opened; their pages stay in the tree */
    uint32_t tokens[MAX_TOKENS];
    uint64_t prefix[MAX_TOKENS + 1]; /* prefix[i] is a hash of the tenant and the first i tokens */
    uint64_t writes[FKV_MAX_GROUPS]
                   [MAX_TOKENS]; /* for each group and token, the write number that the sequence must find in page memory */
    uint32_t state_len;          /* number of tokens that the sequence's recurrent state covers */
    uint64_t state_write;        /* unique number of the write that stored the recurrent state */
    bool spare[MAX_TOKENS]; /* for each logical page, true if the groups with spare pages hold the page even though no query needs
                               it */
} model_seq;

struct pager_model {
    fkv_pager_spec spec;
    fkv_pager *pager;
    uint8_t *block;
    uint8_t *snapshot; /* copy of the pager's memory block, made before the operation */
    uint8_t *aside;    /* second copy of the pager's memory block, for checks that compare or restore it */
    size_t block_bytes;
    uint32_t n_full;  /* index of the full-attention group, or n_groups if there is none */
    uint32_t n_state; /* index of the state group, or n_groups if there is none */
    model_seq seqs[MAX_SEQS];
    written *memory[FKV_MAX_GROUPS]; /* [n_pages, page_tokens] */
    fkv_seq closed;                  /* ID of a sequence that was closed; calls with this ID must fail */
    uint64_t n_writes;
    uint64_t n_operations;
    pager_model_tally tally;
    char fault[512];
};

/* A page table of a sequence in the full-attention group, either an actual one or one that an operation would create. */
typedef struct shadow {
    uint32_t pages[MAX_TOKENS];
    uint32_t len;
    uint32_t max_tokens;
} shadow;

typedef struct balance {
    uint64_t promised, free, cached;
    bool busy[MAX_PAGES]; /* indexed by node */
} balance;

/* ---- checks ---- */

bool model_fault(pager_model *m, const char *format, ...) FKV_PRINTF(2, 3); /* stores the message in `fault` and returns false */

#define EXPECT(cond, ...)                                                                                                        \
    do {                                                                                                                         \
        if (!(cond)) return model_fault(m, __VA_ARGS__);                                                                         \
    } while (0)

void model_snapshot(pager_model *m);
bool model_unchanged(pager_model *m); /* compares every byte of the pager with the snapshot */

/* Checks that aborting a step in which sequences were closed gives the same state, slot by slot, as closing these sequences
 * without a step. */
bool model_check_closed_only(pager_model *m);

/* Checks the returned status. A failed call must leave the pager unchanged. */
bool model_answered(pager_model *m, const char *call, fkv_status got, fkv_status expected);

/* Updates the spare pages of sequence q for its current length: keeps the pages that are at most n_spare pages away from a page
 * that a query needs. */
void model_keep_spare(const pager_model *m, model_seq *q);

/* Checks that the page tables of sequence s lead to the expected write for every token that is visible to a query at `position`.
 */
bool model_check_sequence(pager_model *m, uint32_t s, uint32_t position);
bool model_check_all(pager_model *m);

/* ---- tokens ---- */

uint64_t model_mix(uint64_t x);
bool model_one_in(pager_choices *choices, uint32_t n);
uint32_t model_pages(const pager_model *m, uint32_t n_tokens);
bool model_holds(const pager_model *m, uint32_t group, uint32_t position, uint32_t token);
uint32_t model_text(uint32_t text, uint32_t i);
void model_extend(model_seq *q, uint32_t at, uint32_t token);
void model_write(pager_model *m, model_seq *q, uint32_t slot, uint32_t i);

/* Writes the state after len tokens to a page of the state group. A state is a hash of the sequence's tokens: it is computed from
 * the state `from` after the first n_from tokens, and from tokens [n_from, len). from: page, or FKV_NO_PAGE for an empty
 * sequence. Returns false if page `from` does not contain the state after n_from tokens. */
bool model_write_state(pager_model *m, model_seq *q, uint32_t from, uint32_t n_from, uint32_t to, uint32_t len);

/* Returns the page that holds the recurrent state of sequence q, or FKV_NO_PAGE. */
uint32_t model_state_page(const pager_model *m, const model_seq *q);

/* Returns the content of a page of the state group. */
written *model_state(const pager_model *m, uint32_t page);

/* ---- pager equations ---- */

uint32_t model_shadows(const pager_model *m, shadow *shadows); /* returns the number of open sequences */
balance model_count(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without);
bool model_fits(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without);
/* Returns true if the pools have enough pages for the windows of all open sequences and one new sequence of max_tokens tokens. If
 * `instead` is not NULL, the new sequence replaces `instead`. */
bool model_windows_fit(const pager_model *m, uint32_t max_tokens, const model_seq *instead);

/* ---- prefix tree ---- */

uint32_t model_find_path(const pager_model *m, uint64_t tenant, const uint32_t *tokens, uint32_t n, uint32_t *path);
uint32_t model_usable_pages(const pager_model *m, const uint32_t *path, uint32_t n);

/* Returns true if the state of sequence q after n_tokens tokens is available: it is the current state, the state of an empty
 * sequence, or stored in the tree node of the sequence's page. */
bool model_has_state(const pager_model *m, const model_seq *q, uint32_t n_tokens);

#endif
