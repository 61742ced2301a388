/* What the model and its operations share; tests see pager_model.h only. */
#ifndef FKV_TEST_PAGER_MODEL_STATE_H
#define FKV_TEST_PAGER_MODEL_STATE_H

#include "pager_model.h"

#include "../src/pager/pager_state.h"

enum { MAX_SEQS = 8, MAX_TOKENS = 512, MAX_PAGES = 256, N_TENANTS = 2, N_TEXTS = 3 };

/* What was written: a number that no other write has, and the tokens it depends on, in one number. */
typedef struct written {
    uint64_t write;
    uint64_t prefix;
} written;

typedef struct model_seq {
    bool open;
    bool closing; /* closed since the step began: its pages stay until the step ends */
    fkv_seq seq;
    uint32_t slot;
    uint64_t tenant;
    uint32_t max_tokens;
    uint32_t len;
    uint32_t text;    /* what it goes on with */
    uint32_t n_known; /* tokens whose pages stand in the tree for sure: those it was opened on */
    uint32_t tokens[MAX_TOKENS];
    uint64_t prefix[MAX_TOKENS + 1];             /* prefix[i + 1] depends on tokens 0 .. i; prefix[0] on the tenant */
    uint64_t writes[FKV_MAX_GROUPS][MAX_TOKENS]; /* what the sequence must find */
    bool spare[MAX_TOKENS];                      /* by logical page: held in groups with spare pages, wanted or not */
} model_seq;

struct pager_model {
    fkv_pager_spec spec;
    fkv_pager *pager;
    uint8_t *block;
    uint8_t *snapshot; /* of the block before the operation */
    uint8_t *aside;    /* of the block, while another state is looked at */
    size_t block_bytes;
    uint32_t n_full; /* the full group, n_groups where there is none */
    model_seq seqs[MAX_SEQS];
    written *memory[FKV_MAX_GROUPS]; /* [n_pages, page_tokens] */
    fkv_seq closed;                  /* some number that was closed */
    uint64_t n_writes;
    uint64_t n_operations;
    pager_model_tally tally;
    char fault[512];
};

/* A table of the full group as it is or as it would be. */
typedef struct shadow {
    uint32_t pages[MAX_TOKENS];
    uint32_t len;
    uint32_t max_tokens;
} shadow;

typedef struct balance {
    uint64_t promised, free, cached;
    bool busy[MAX_PAGES]; /* by node */
} balance;

/* ---- agreeing ---- */

bool model_fault(pager_model *m, const char *format, ...) FKV_PRINTF(2, 3); /* false */

#define EXPECT(cond, ...)                                                                                                        \
    do {                                                                                                                         \
        if (!(cond)) return model_fault(m, __VA_ARGS__);                                                                         \
    } while (0)

void model_snapshot(pager_model *m);
bool model_unchanged(pager_model *m); /* every byte of the pager, since the snapshot */

/* An aborted step in which sequences were closed leaves what closing them without it leaves, slot by slot. */
bool model_check_closed_only(pager_model *m);

/* An expected status; where it is a failure, nothing may have changed. */
bool model_answered(pager_model *m, const char *call, fkv_status got, fkv_status expected);

/* The spare pages that sequence q is left with at its length: of the pages that it had, those within n_spare of what it needs. */
void model_keep_spare(const pager_model *m, model_seq *q);

/* Every token that a query at `position` of sequence s sees is found through the tables, as it was written. */
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

/* ---- equations ---- */

uint32_t model_shadows(const pager_model *m, shadow *shadows); /* how many */
balance model_count(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without);
bool model_fits(const pager_model *m, const shadow *shadows, uint32_t n, uint32_t without);
/* One more sequence of max_tokens, in place of `instead` where it is not NULL. */
bool model_windows_fit(const pager_model *m, uint32_t max_tokens, const model_seq *instead);

/* ---- the tree, by looking at every node ---- */

uint32_t model_find_path(const pager_model *m, uint64_t tenant, const uint32_t *tokens, uint32_t n, uint32_t *path);
uint32_t model_usable_pages(const pager_model *m, const uint32_t *path, uint32_t n);

#endif
