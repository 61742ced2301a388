/* Compiles the normalizer and pre-tokenizer steps of a tokenizer and applies them to a text. The result is a sequence of pieces,
 * which are encoded one by one. */
#ifndef FKV_TEXT_PLAN_H
#define FKV_TEXT_PLAN_H

#include "../vocab/text_steps.h"
#include "token_merge.h"

typedef struct fkv_text_plan fkv_text_plan;

/* Compiles the steps. Returns FKV_UNSUPPORTED for a pattern that cannot be translated for PCRE2 or that PCRE2 rejects. The
 * strings of the steps must outlive the plan. fkv_text_plan_close() accepts NULL. */
fkv_status fkv_text_plan_open(const fkv_text_steps *steps, fkv_text_plan **plan);
void fkv_text_plan_close(fkv_text_plan *plan);

/* Receives a piece. is_first: true for the first piece of the whole text. The bytes are valid only during the call. */
typedef fkv_status (*fkv_piece_fn)(void *context, const char *text, size_t n_bytes, bool is_first);

typedef struct fkv_text_run {
    const fkv_text_plan *plan;
    fkv_piece_fn put;        /* callback that receives the pieces that the last step produces */
    fkv_piece_fn normalized; /* optional callback that receives the normalized text; it must call fkv_text_run_rest() to run the
                                remaining steps */
    void *context;
    fkv_scratch scratch[FKV_MAX_TEXT_STEPS];   /* output buffer of each step */
    fkv_scratch pcre_text[FKV_MAX_TEXT_STEPS]; /* substitute text for PCRE2; see fkv_utf8_pcre_text() */
    fkv_scratch repaired;
    uint64_t n_input;                      /* total size of all input texts of this run, in bytes */
    uint64_t n_output[FKV_MAX_TEXT_STEPS]; /* number of bytes that each step wrote in this run; see count_output() */
    void *match;                           /* PCRE2 match data */
} fkv_text_run;

/* fkv_text_run_close() accepts a run that failed to open. */
fkv_status fkv_text_run_open(fkv_text_run *run, const fkv_text_plan *plan);
void fkv_text_run_close(fkv_text_run *run);

fkv_status fkv_text_run_all(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first);
fkv_status fkv_text_run_rest(fkv_text_run *run, const char *text, size_t n_bytes,
                             bool is_first); /* runs only the steps after the normalizers */

#endif
