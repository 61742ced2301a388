/* A slow, simple reference model of the pager, and operations that drive the pager and the model together.
 *
 * The model predicts tokens, not pages. A sequence is an array of tokens. Instead of K and V rows, page memory contains a unique
 * number for each write; steps copy and write these numbers as a device would copy and write rows. After every operation, each
 * sequence must find its own writes through its page tables, and every admission decision must agree with the equations in
 * pager.h, which the model evaluates independently. A failed call or an aborted step must leave every byte of the pager
 * unchanged.
 *
 * Operations are drawn from random numbers in the test and from the input bytes in the fuzzer.
 */
#ifndef FKV_TEST_PAGER_MODEL_H
#define FKV_TEST_PAGER_MODEL_H

#include "../src/pager/pager.h"

/* Source of random choices: the given bytes until all of them are used or, if `bytes` is NULL, an endless random generator. */
typedef struct pager_choices {
    const uint8_t *bytes;
    size_t n_bytes;
    size_t at;
    uint64_t state;
} pager_choices;

pager_choices pager_choices_seeded(uint64_t seed);
pager_choices pager_choices_of(const uint8_t *bytes, size_t n_bytes);
bool pager_choices_left(const pager_choices *choices);
uint32_t pager_choose(pager_choices *choices, uint32_t n); /* returns a number from 0 to n - 1 */

typedef struct pager_model_spec {
    const char *name;
    bool one_bucket; /* true to make all hashes of the prefix tree collide */
    fkv_pager_spec spec;
} pager_model_spec;

extern const pager_model_spec pager_model_specs[];
extern const uint32_t pager_model_n_specs;

typedef struct pager_model pager_model;

pager_model *pager_model_open(const pager_model_spec *spec);
void pager_model_close(pager_model *model);

/* Runs one operation on the pager and the model, then all checks. Returns false on a mismatch, which pager_model_fault()
 * describes. */
bool pager_model_operate(pager_model *model, pager_choices *choices);
const char *pager_model_fault(const pager_model *model);

/* Number of successful operations of each kind. The test checks that every kind occurred. */
typedef struct pager_model_tally {
    uint64_t opened, shared, refused, forked, truncated, truncate_refused, gone, inserted, cleared, filled, closed;
    uint64_t committed, aborted, copies, bad_calls, contradicted, reserved, reserve_refused, closed_in_step, matched;
    uint64_t discarded;              /* number of tokens discarded at the ends of rows */
    uint64_t snapshots, to_snapshot; /* number of snapshots stored in the tree, and number of truncations to a snapshot */
} pager_model_tally;

const pager_model_tally *pager_model_tallied(const pager_model *model);

/* Adds the counts of `one` to `sum`. */
void pager_model_tally_add(pager_model_tally *sum, const pager_model_tally *one);

#endif
