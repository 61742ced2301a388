/* A slow, obviously right model of the pager, and operations that drive the two side by side.
 *
 * The model knows tokens, not pages: a sequence is an array of tokens, and the memory behind the pages is an array of write
 * numbers which copies and writes of steps change as a device would. After every operation each sequence must find, through its
 * page tables, exactly what was written for it; every admission must agree with the equations of pager.h, counted afresh; and a
 * call that fails or a step that is aborted must leave every byte of the pager as it was.
 *
 * Operations are drawn from choices: random numbers in the test, the bytes of the input in the fuzzer.
 */
#ifndef FKV_TEST_PAGER_MODEL_H
#define FKV_TEST_PAGER_MODEL_H

#include "../src/pager/pager.h"

/* Where choices come from: the bytes, then nothing; or an endless seeded generator where bytes is NULL. */
typedef struct pager_choices {
    const uint8_t *bytes;
    size_t n_bytes;
    size_t at;
    uint64_t state;
} pager_choices;

pager_choices pager_choices_seeded(uint64_t seed);
pager_choices pager_choices_of(const uint8_t *bytes, size_t n_bytes);
bool pager_choices_left(const pager_choices *choices);
uint32_t pager_choose(pager_choices *choices, uint32_t n); /* 0 .. n - 1 */

typedef struct pager_model_spec {
    const char *name;
    bool one_bucket; /* every hash of the prefix tree collides */
    fkv_pager_spec spec;
} pager_model_spec;

extern const pager_model_spec pager_model_specs[];
extern const uint32_t pager_model_n_specs;

typedef struct pager_model pager_model;

pager_model *pager_model_open(const pager_model_spec *spec);
void pager_model_close(pager_model *model);

/* One operation on both sides, then every check. False once something disagreed; pager_model_fault() then says what. */
bool pager_model_operate(pager_model *model, pager_choices *choices);
const char *pager_model_fault(const pager_model *model);

/* How often each kind of operation succeeded, for the test to see that nothing was left out. */
typedef struct pager_model_tally {
    uint64_t opened, shared, refused, forked, truncated, truncate_refused, gone, inserted, cleared, filled, closed;
    uint64_t committed, aborted, copies, bad_calls, contradicted, reserved, reserve_refused, closed_in_step, matched;
} pager_model_tally;

const pager_model_tally *pager_model_tallied(const pager_model *model);

/* Adds one tally to another. */
void pager_model_tally_add(pager_model_tally *sum, const pager_model_tally *one);

#endif
