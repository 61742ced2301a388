/* See text_plan.h.
 *
 * A step that changes a text leaves one piece, a split leaves several; each piece goes through the next step at once, so that no
 * list of pieces is kept. A regular expression sees its piece alone: what lies around it is not there.
 *
 * Patterns come from strangers' files: from each place of a text one takes at most UNKNOWN_STEPS. Those that are known to take
 * linear time have no limit, since a run of a million spaces must not look like a bad pattern.
 */
#include "text_plan.h"

#include "normal_form.h"
#include "onig_pattern.h"
#include "pre_names.h"
#include "utf8_text.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <inttypes.h>
#include <pcre2.h>
#include <stdlib.h>

enum { UNKNOWN_STEPS = 2000000 };

struct fkv_text_plan {
    fkv_text_step steps[FKV_MAX_TEXT_STEPS];
    pcre2_code *code[FKV_MAX_TEXT_STEPS]; /* NULL: no regular expression */
    bool is_known[FKV_MAX_TEXT_STEPS];
    uint32_t n_steps, n_normalizers;
    uint32_t mend_at; /* the first step that needs UTF-8; n_steps: none */
    pcre2_match_context *known_limits, *unknown_limits;
};

/* ---- open ---------------------------------------------------------------------------------------------------- */

static fkv_status compile(fkv_text_plan *plan, uint32_t i, pcre2_compile_context *context) {
    const fkv_text_step *step = &plan->steps[i];
    int error = 0;
    PCRE2_SIZE where = 0;
    char *pattern = malloc(FKV_MAX_PATTERN_BYTES);
    FKV_REQUIRE(pattern != NULL, FKV_NO_MEMORY, "no memory for a pattern");
    fkv_status status = fkv_onig_pattern(step->pattern, pattern, FKV_MAX_PATTERN_BYTES);
    if (status == FKV_OK)
        plan->code[i] = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error,
                                      &where, context);
    free(pattern);
    FKV_TRY(status);
    FKV_REQUIRE(plan->code[i] != NULL, FKV_UNSUPPORTED, "PCRE2 refuses the pattern \"%s\" at %zu (error %d)",
                fkv_show(step->pattern).text, where, error);
    (void)pcre2_jit_compile(plan->code[i], PCRE2_JIT_COMPLETE); /* where there is none, matching is slower */
    plan->is_known[i] = fkv_pre_pattern_is_known(step->pattern);
    return FKV_OK;
}

static bool needs_utf8(const fkv_text_step *step) {
    return step->kind <= FKV_STEP_NFKD || step->kind == FKV_STEP_STRIP_LEFT || step->kind == FKV_STEP_STRIP_RIGHT ||
           step->is_regex;
}

static fkv_status plan_fill(fkv_text_plan *plan, const fkv_text_steps *steps) {
    plan->n_steps = plan->mend_at = steps->n_steps;
    plan->n_normalizers = steps->n_normalizers;
    memcpy(plan->steps, steps->steps, sizeof plan->steps);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    plan->known_limits = pcre2_match_context_create(NULL);
    plan->unknown_limits = pcre2_match_context_create(NULL);
    bool have_all = context != NULL && plan->known_limits != NULL && plan->unknown_limits != NULL;
    fkv_status status = have_all ? FKV_OK : fkv_fail(FKV_NO_MEMORY, "no memory for PCRE2");
    if (have_all) {
        (void)pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        (void)pcre2_set_match_limit(plan->known_limits, UINT32_MAX);
        (void)pcre2_set_match_limit(plan->unknown_limits, UNKNOWN_STEPS);
    }
    for (uint32_t i = 0; i < plan->n_steps && status == FKV_OK; i++) {
        if (plan->mend_at == plan->n_steps && needs_utf8(&plan->steps[i])) plan->mend_at = i;
        if (plan->steps[i].is_regex) status = compile(plan, i, context);
    }
    pcre2_compile_context_free(context);
    return status;
}

fkv_status fkv_text_plan_open(const fkv_text_steps *steps, fkv_text_plan **plan) {
    *plan = NULL;
    fkv_text_plan *made = calloc(1, sizeof *made);
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "no memory for %zu bytes of tokenizer", sizeof *made);
    fkv_status status = plan_fill(made, steps);
    if (status == FKV_OK) *plan = made;
    if (status != FKV_OK) fkv_text_plan_close(made);
    return status;
}

void fkv_text_plan_close(fkv_text_plan *plan) {
    if (plan == NULL) return;
    for (uint32_t i = 0; i < plan->n_steps; i++) pcre2_code_free(plan->code[i]);
    pcre2_match_context_free(plan->known_limits);
    pcre2_match_context_free(plan->unknown_limits);
    free(plan);
}

fkv_status fkv_text_run_open(fkv_text_run *run, const fkv_text_plan *plan) {
    *run = (fkv_text_run){.plan = plan};
    run->match = pcre2_match_data_create(1, NULL);
    FKV_REQUIRE(run->match != NULL, FKV_NO_MEMORY, "no memory for a PCRE2 match");
    return FKV_OK;
}

void fkv_text_run_close(fkv_text_run *run) {
    if (run->plan == NULL) return;
    for (int i = 0; i < FKV_MAX_TEXT_STEPS; i++) {
        fkv_scratch_close(&run->scratch[i]);
        fkv_scratch_close(&run->seen[i]);
    }
    fkv_scratch_close(&run->mended);
    pcre2_match_data_free(run->match);
    run->plan = NULL;
}

/* ---- matches ------------------------------------------------------------------------------------------------- */

typedef struct match_scan {
    fkv_text_run *run;
    uint32_t step;
    const char *text; /* or what PCRE2 sees of it */
    size_t n_bytes;
    size_t at;          /* where to look from */
    size_t end_of_last; /* an empty match there is none */
} match_scan;

static fkv_status regex_find(match_scan *scan, size_t *start, size_t *end) {
    const fkv_text_plan *plan = scan->run->plan;
    pcre2_code *code = plan->code[scan->step];
    pcre2_match_context *limits = plan->is_known[scan->step] ? plan->known_limits : plan->unknown_limits;
    uint32_t options = PCRE2_NO_UTF_CHECK;
    while (scan->at <= scan->n_bytes) {
        int n = pcre2_match(code, (PCRE2_SPTR)scan->text, scan->n_bytes, scan->at, options, scan->run->match, limits);
        if (n == PCRE2_ERROR_JIT_STACKLIMIT && (options & PCRE2_NO_JIT) == 0) { /* slower, on the heap */
            options |= PCRE2_NO_JIT;
            continue;
        }
        if (n == PCRE2_ERROR_NOMATCH) break;
        FKV_REQUIRE(n != PCRE2_ERROR_MATCHLIMIT, FKV_UNSUPPORTED,
                    "the pattern \"%s\" of the tokenizer takes too long on this text",
                    fkv_show(plan->steps[scan->step].pattern).text);
        FKV_REQUIRE(n >= 0, FKV_NO_MEMORY, "PCRE2 could not search the text from byte %zu on (error %d)", scan->at, n);
        *start = pcre2_get_ovector_pointer(scan->run->match)[0];
        *end = pcre2_get_ovector_pointer(scan->run->match)[1];
        if (*end > *start || *start != scan->end_of_last) return FKV_OK;
        uint32_t character = 0; /* empty, and just behind the last one */
        scan->at = *start < scan->n_bytes ? *start + fkv_character_read(scan->text + *start, scan->n_bytes - *start, &character)
                                          : scan->n_bytes + 1;
    }
    *start = *end = SIZE_MAX;
    return FKV_OK;
}

/* The next match from scan->at on, or SIZE_MAX. */
static fkv_status find_next(match_scan *scan, size_t *start, size_t *end) {
    const fkv_text_step *step = &scan->run->plan->steps[scan->step];
    if (step->is_regex) {
        FKV_TRY(regex_find(scan, start, end));
    } else {
        const char *found = scan->at < scan->n_bytes
                                ? memmem(scan->text + scan->at, scan->n_bytes - scan->at, step->pattern.data, step->pattern.size)
                                : NULL;
        *start = found != NULL ? (size_t)(found - scan->text) : SIZE_MAX;
        *end = found != NULL ? *start + step->pattern.size : SIZE_MAX;
    }
    scan->at = scan->end_of_last = *end;
    return FKV_OK;
}

static fkv_status scan_open(match_scan *scan, fkv_text_run *run, uint32_t step, const char *text, size_t n_bytes) {
    *scan = (match_scan){.run = run, .step = step, .text = text, .n_bytes = n_bytes, .end_of_last = SIZE_MAX};
    if (!run->plan->steps[step].is_regex || fkv_utf8_is_seen_as_is(text, n_bytes)) return FKV_OK;
    FKV_TRY(fkv_scratch_need(&run->seen[step], n_bytes));
    fkv_utf8_seen(text, n_bytes, run->seen[step].block);
    scan->text = run->seen[step].block;
    return FKV_OK;
}

/* ---- steps --------------------------------------------------------------------------------------------------- */

static fkv_status run_step(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first);

typedef struct splitting {
    fkv_text_run *run;
    uint32_t step;
    const char *text;
    bool is_first;
    bool has_held; /* a piece that a later one may join */
    bool held_is_match;
    size_t held_start, held_end;
} splitting;

static fkv_status put_piece(splitting *split, size_t start, size_t end) {
    if (start == end) return FKV_OK;
    return run_step(split->run, split->step + 1, split->text + start, end - start, split->is_first && start == 0);
}

static fkv_status add_piece(splitting *split, size_t start, size_t end, bool is_match) {
    const fkv_text_step *step = &split->run->plan->steps[split->step];
    is_match = is_match != step->invert;
    if (step->behavior == FKV_SPLIT_ISOLATED) return put_piece(split, start, end);
    if (step->behavior == FKV_SPLIT_REMOVED) return is_match ? FKV_OK : put_piece(split, start, end);
    if (start == end) return FKV_OK;
    bool joins = split->has_held && ((step->behavior == FKV_SPLIT_WITH_PREVIOUS && is_match && !split->held_is_match) ||
                                     (step->behavior == FKV_SPLIT_WITH_NEXT && !is_match && split->held_is_match) ||
                                     (step->behavior == FKV_SPLIT_CONTIGUOUS && is_match == split->held_is_match));
    if (split->has_held && !joins) FKV_TRY(put_piece(split, split->held_start, split->held_end));
    if (!joins) split->held_start = start;
    split->held_end = end;
    split->held_is_match = is_match;
    split->has_held = true;
    return FKV_OK;
}

static fkv_status split_all(splitting *split, match_scan *scan) {
    size_t done = 0;
    size_t start = 0;
    size_t end = 0;
    for (;;) {
        FKV_TRY(find_next(scan, &start, &end));
        if (start == SIZE_MAX) break;
        if (start > done) FKV_TRY(add_piece(split, done, start, false));
        FKV_TRY(add_piece(split, start, end, true));
        done = end;
    }
    if (done < scan->n_bytes) FKV_TRY(add_piece(split, done, scan->n_bytes, false));
    return split->has_held ? put_piece(split, split->held_start, split->held_end) : FKV_OK;
}

static fkv_status run_split(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    match_scan scan;
    splitting split = {.run = run, .step = i, .text = text, .is_first = is_first};
    FKV_TRY(scan_open(&scan, run, i, text, n_bytes));
    return split_all(&split, &scan);
}

static fkv_status append(fkv_scratch *out, size_t *n_out, const char *text, size_t n) {
    FKV_TRY(fkv_scratch_grow(out, *n_out, n));
    if (n > 0) memcpy((char *)out->block + *n_out, text, n);
    *n_out += n;
    return FKV_OK;
}

static fkv_status run_replace(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    fkv_bytes by = run->plan->steps[i].text;
    fkv_scratch *out = &run->scratch[i];
    match_scan scan;
    size_t done = 0;
    size_t n_out = 0;
    size_t start = 0;
    size_t end = 0;
    FKV_TRY(scan_open(&scan, run, i, text, n_bytes));
    for (;;) {
        FKV_TRY(find_next(&scan, &start, &end));
        if (start == SIZE_MAX) break;
        FKV_TRY(append(out, &n_out, text + done, start - done));
        FKV_TRY(append(out, &n_out, by.data, by.size));
        done = end;
    }
    if (done == 0 && n_out == 0) return run_step(run, i + 1, text, n_bytes, is_first);
    FKV_TRY(append(out, &n_out, text + done, n_bytes - done));
    return run_step(run, i + 1, out->block, n_out, is_first);
}

static fkv_status run_prepend(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    const fkv_text_step *step = &run->plan->steps[i];
    size_t n = step->text.size;
    bool has_it = n_bytes >= n && memcmp(text, step->text.data, n) == 0;
    if ((step->only_first && !is_first) || (step->kind == FKV_STEP_PREPEND_UNLESS && has_it))
        return run_step(run, i + 1, text, n_bytes, is_first);
    FKV_TRY(fkv_scratch_need(&run->scratch[i], n + n_bytes));
    char *out = run->scratch[i].block;
    memcpy(out, step->text.data, n);
    memcpy(out + n, text, n_bytes);
    return run_step(run, i + 1, out, n + n_bytes, is_first);
}

static fkv_status run_strip(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    uint32_t character = 0;
    while (n_bytes > 0) {
        bool left = run->plan->steps[i].kind == FKV_STEP_STRIP_LEFT;
        size_t at = left ? 0 : fkv_character_before(text, n_bytes);
        uint32_t n = fkv_character_read(text + at, n_bytes - at, &character);
        if (n == 0 || !fkv_is_space_character(character)) break;
        text += left ? n : 0;
        n_bytes -= n;
    }
    return run_step(run, i + 1, text, n_bytes, is_first);
}

static fkv_status run_normal_form(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    fkv_bytes normal = {0};
    FKV_TRY(fkv_normal_form(run->plan->steps[i].kind, text, n_bytes, &run->scratch[i], &normal));
    return run_step(run, i + 1, normal.data, normal.size, is_first);
}

/* As a step, but the text is UTF-8 where it must be. */
static fkv_status run_whole(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    switch (run->plan->steps[i].kind) {
    case FKV_STEP_REPLACE: return run_replace(run, i, text, n_bytes, is_first);
    case FKV_STEP_PREPEND:
    case FKV_STEP_PREPEND_UNLESS: return run_prepend(run, i, text, n_bytes, is_first);
    case FKV_STEP_STRIP_LEFT:
    case FKV_STEP_STRIP_RIGHT: return run_strip(run, i, text, n_bytes, is_first);
    case FKV_STEP_SPLIT: return run_split(run, i, text, n_bytes, is_first);
    default: return run_normal_form(run, i, text, n_bytes, is_first);
    }
}

static fkv_status run_from(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    if (i == run->plan->n_steps) return run->put(run->context, text, n_bytes, is_first);
    if (i == run->plan->mend_at && !fkv_utf8_is_whole(text, n_bytes)) {
        FKV_TRY(fkv_scratch_need(&run->mended, 3 * (uint64_t)n_bytes));
        n_bytes = fkv_utf8_mend(text, n_bytes, run->mended.block);
        text = run->mended.block;
    }
    return run_whole(run, i, text, n_bytes, is_first);
}

static fkv_status run_step(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    if (n_bytes == 0) return FKV_OK;
    if (i == run->plan->n_normalizers && run->normalized != NULL) return run->normalized(run->context, text, n_bytes, is_first);
    return run_from(run, i, text, n_bytes, is_first);
}

fkv_status fkv_text_run_all(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first) {
    return run_step(run, 0, text, n_bytes, is_first);
}

fkv_status fkv_text_run_rest(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first) {
    return n_bytes > 0 ? run_from(run, run->plan->n_normalizers, text, n_bytes, is_first) : FKV_OK;
}
