/* The steps of a tokenizer made ready to run, and one run of them over a text: what comes out are the pieces to look up.
 */
#ifndef FKV_TEXT_PLAN_H
#define FKV_TEXT_PLAN_H

#include "../files/text_steps.h"
#include "token_merge.h"

typedef struct fkv_text_plan fkv_text_plan;

/* FKV_UNSUPPORTED for a pattern that PCRE2 or the rewriting for it refuses. The strings of the steps must outlive the plan. close
 * takes NULL. */
fkv_status fkv_text_plan_open(const fkv_text_steps *steps, fkv_text_plan **plan);
void fkv_text_plan_close(fkv_text_plan *plan);

/* One piece. is_first: it begins the whole text. The bytes are good until the call ends. */
typedef fkv_status (*fkv_piece_fn)(void *context, const char *text, size_t n_bytes, bool is_first);

typedef struct fkv_text_run {
    const fkv_text_plan *plan;
    fkv_piece_fn put;        /* every piece that all steps leave */
    fkv_piece_fn normalized; /* or NULL: gets what the normalizers leave, and goes on with fkv_text_run_rest() */
    void *context;
    fkv_scratch scratch[FKV_MAX_TEXT_STEPS]; /* what each step writes */
    fkv_scratch seen[FKV_MAX_TEXT_STEPS];    /* what PCRE2 sees there */
    fkv_scratch mended;
    void *match; /* of PCRE2 */
} fkv_text_run;

/* close takes a run that did not open. */
fkv_status fkv_text_run_open(fkv_text_run *run, const fkv_text_plan *plan);
void fkv_text_run_close(fkv_text_run *run);

fkv_status fkv_text_run_all(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first);
fkv_status fkv_text_run_rest(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first); /* behind the normalizers */

#endif
