/* See text_plan.h.
 *
 * A normalizer step produces one piece, and a split step produces several. Each piece passes through the remaining steps
 * immediately, so no list of pieces is stored. A regular expression is matched within one piece; lookarounds do not see other
 * pieces.
 *
 * Patterns come from untrusted files, so each match attempt is limited to MATCH_LIMIT PCRE2 steps. Known patterns take linear
 * time and are exempt from this limit, because a run of a million spaces would exceed it.
 */
#include "text_plan.h"

#include "normal_form.h"
#include "onig_pattern.h"
#include "pre_names.h"
#include "utf8_text.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>

enum { MATCH_LIMIT = 2000000 };

/* Limit on the output size of a step: GROWTH bytes per byte of the text, plus GROWTH_MIN bytes. Known vocabularies expand text by
 * a factor of up to 33: up to 11 for NFKD, times 3 for replacing spaces with U+2581. */
enum { GROWTH = 64, GROWTH_MIN = 1 << 16 };

struct fkv_text_plan {
    fkv_text_step steps[FKV_MAX_TEXT_STEPS];
    pcre2_code *code[FKV_MAX_TEXT_STEPS]; /* compiled pattern of each step; NULL if the step has no regular expression */
    bool is_known[FKV_MAX_TEXT_STEPS];
    uint32_t n_steps, n_normalizers;
    uint32_t repair_at; /* first step that needs valid UTF-8; n_steps if no step does */
    pcre2_match_context *known_limits, *unknown_limits;
};

/* ---- construction ---------------------------------------------------------------------------------------------------- */

static fkv_status compile_pattern(fkv_text_plan *plan, uint32_t i, pcre2_compile_context *context) {
    const fkv_text_step *step = &plan->steps[i];
    int error = 0;
    PCRE2_SIZE where = 0;
    char *pattern = malloc(FKV_MAX_PATTERN_BYTES);
    FKV_REQUIRE(pattern != NULL, FKV_NO_MEMORY, "out of memory compiling a pattern");
    fkv_status status = fkv_onig_pattern(step->pattern, pattern, FKV_MAX_PATTERN_BYTES);
    if (status == FKV_OK)
        plan->code[i] = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error,
                                      &where, context);
    free(pattern);
    FKV_TRY(status);
    FKV_REQUIRE(plan->code[i] != NULL, FKV_UNSUPPORTED, "PCRE2 rejects the pattern \"%s\" at byte %zu (error %d)",
                fkv_show(step->pattern).text, where, error);
    (void)pcre2_jit_compile(plan->code[i], PCRE2_JIT_COMPLETE); /* a failure is ignored; matching is then only slower */
    plan->is_known[i] = fkv_pre_pattern_is_known(step->pattern);
    return FKV_OK;
}

static bool needs_utf8(const fkv_text_step *step) {
    return step->kind <= FKV_STEP_NFKD || step->kind == FKV_STEP_STRIP_LEFT || step->kind == FKV_STEP_STRIP_RIGHT ||
           step->is_regex;
}

static fkv_status plan_fill(fkv_text_plan *plan, const fkv_text_steps *steps) {
    plan->n_steps = plan->repair_at = steps->n_steps;
    plan->n_normalizers = steps->n_normalizers;
    memcpy(plan->steps, steps->steps, sizeof plan->steps);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    plan->known_limits = pcre2_match_context_create(NULL);
    plan->unknown_limits = pcre2_match_context_create(NULL);
    bool have_all = context != NULL && plan->known_limits != NULL && plan->unknown_limits != NULL;
    fkv_status status = have_all ? FKV_OK : fkv_fail(FKV_NO_MEMORY, "out of memory creating PCRE2 contexts");
    if (have_all) {
        (void)pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        (void)pcre2_set_match_limit(plan->known_limits, UINT32_MAX);
        (void)pcre2_set_match_limit(plan->unknown_limits, MATCH_LIMIT);
    }
    for (uint32_t i = 0; i < plan->n_steps && status == FKV_OK; i++) {
        if (plan->repair_at == plan->n_steps && needs_utf8(&plan->steps[i])) plan->repair_at = i;
        if (plan->steps[i].is_regex) status = compile_pattern(plan, i, context);
    }
    pcre2_compile_context_free(context);
    return status;
}

fkv_status fkv_text_plan_open(const fkv_text_steps *steps, fkv_text_plan **plan) {
    *plan = NULL;
    fkv_text_plan *made = calloc(1, sizeof *made);
    FKV_REQUIRE(made != NULL, FKV_NO_MEMORY, "out of memory allocating a tokenizer (%zu bytes)", sizeof *made);
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
    FKV_REQUIRE(run->match != NULL, FKV_NO_MEMORY, "out of memory allocating PCRE2 match data");
    return FKV_OK;
}

void fkv_text_run_close(fkv_text_run *run) {
    if (run->plan == NULL) return;
    for (int i = 0; i < FKV_MAX_TEXT_STEPS; i++) {
        fkv_scratch_close(&run->scratch[i]);
        fkv_scratch_close(&run->pcre_text[i]);
    }
    fkv_scratch_close(&run->repaired);
    pcre2_match_data_free(run->match);
    run->plan = NULL;
}

/* ---- matches ------------------------------------------------------------------------------------------------- */

typedef struct match_scan {
    fkv_text_run *run;
    uint32_t step;
    const char *text; /* the input text, or a substitute that PCRE2 accepts; see fkv_utf8_pcre_text() */
    size_t n_bytes;
    size_t at;          /* position at which the search continues */
    size_t end_of_last; /* end of the previous match, at which an empty match is ignored */
} match_scan;

static fkv_status regex_find(match_scan *scan, size_t *start, size_t *end) {
    const fkv_text_plan *plan = scan->run->plan;
    pcre2_code *code = plan->code[scan->step];
    pcre2_match_context *limits = plan->is_known[scan->step] ? plan->known_limits : plan->unknown_limits;
    uint32_t options = PCRE2_NO_UTF_CHECK;
    while (scan->at <= scan->n_bytes) {
        int n = pcre2_match(code, (PCRE2_SPTR)scan->text, scan->n_bytes, scan->at, options, scan->run->match, limits);
        if (n == PCRE2_ERROR_JIT_STACKLIMIT &&
            (options & PCRE2_NO_JIT) == 0) { /* retries without JIT; PCRE2 then uses the heap instead of the JIT stack */
            options |= PCRE2_NO_JIT;
            continue;
        }
        if (n == PCRE2_ERROR_NOMATCH) break;
        FKV_REQUIRE(n != PCRE2_ERROR_MATCHLIMIT, FKV_UNSUPPORTED, "the tokenizer pattern \"%s\" takes too long on this text",
                    fkv_show(plan->steps[scan->step].pattern).text);
        FKV_REQUIRE(n >= 0, FKV_NO_MEMORY, "PCRE2 failed at byte %zu of the text (error %d)", scan->at, n);
        *start = pcre2_get_ovector_pointer(scan->run->match)[0];
        *end = pcre2_get_ovector_pointer(scan->run->match)[1];
        if (*end > *start || *start != scan->end_of_last) return FKV_OK;
        uint32_t character = 0; /* skips an empty match directly after the previous match */
        scan->at = *start < scan->n_bytes ? *start + fkv_character_read(scan->text + *start, scan->n_bytes - *start, &character)
                                          : scan->n_bytes + 1;
    }
    *start = *end = SIZE_MAX;
    return FKV_OK;
}

/* Finds the next match at or after scan->at. Sets *start to SIZE_MAX if there is none. */
static fkv_status find_match(match_scan *scan, size_t *start, size_t *end) {
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

static fkv_status match_scan_open(match_scan *scan, fkv_text_run *run, uint32_t step, const char *text, size_t n_bytes) {
    *scan = (match_scan){.run = run, .step = step, .text = text, .n_bytes = n_bytes, .end_of_last = SIZE_MAX};
    if (!run->plan->steps[step].is_regex || fkv_utf8_is_pcre_text(text, n_bytes)) return FKV_OK;
    FKV_TRY(fkv_scratch_need(&run->pcre_text[step], n_bytes));
    fkv_utf8_pcre_text(text, n_bytes, run->pcre_text[step].block);
    scan->text = run->pcre_text[step].block;
    return FKV_OK;
}

/* ---- steps --------------------------------------------------------------------------------------------------- */

static fkv_status run_text_step(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first);

typedef struct splitting {
    fkv_text_run *run;
    uint32_t step;
    const char *text;
    bool is_first;
    bool has_held; /* true if a piece is held back because the next piece may be merged with it */
    bool held_is_match;
    size_t held_start, held_end;
} splitting;

static fkv_status emit_piece(splitting *split, size_t start, size_t end) {
    if (start == end) return FKV_OK;
    return run_text_step(split->run, split->step + 1, split->text + start, end - start, split->is_first && start == 0);
}

static fkv_status add_split_part(splitting *split, size_t start, size_t end, bool is_match) {
    const fkv_text_step *step = &split->run->plan->steps[split->step];
    is_match = is_match != step->invert;
    if (step->behavior == FKV_SPLIT_ISOLATED) return emit_piece(split, start, end);
    if (step->behavior == FKV_SPLIT_REMOVED) return is_match ? FKV_OK : emit_piece(split, start, end);
    if (start == end) return FKV_OK;
    bool joins = split->has_held && ((step->behavior == FKV_SPLIT_WITH_PREVIOUS && is_match && !split->held_is_match) ||
                                     (step->behavior == FKV_SPLIT_WITH_NEXT && !is_match && split->held_is_match) ||
                                     (step->behavior == FKV_SPLIT_CONTIGUOUS && is_match == split->held_is_match));
    if (split->has_held && !joins) FKV_TRY(emit_piece(split, split->held_start, split->held_end));
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
        FKV_TRY(find_match(scan, &start, &end));
        if (start == SIZE_MAX) break;
        if (start > done) FKV_TRY(add_split_part(split, done, start, false));
        FKV_TRY(add_split_part(split, start, end, true));
        done = end;
    }
    if (done < scan->n_bytes) FKV_TRY(add_split_part(split, done, scan->n_bytes, false));
    return split->has_held ? emit_piece(split, split->held_start, split->held_end) : FKV_OK;
}

static fkv_status run_split(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    match_scan scan;
    splitting split = {.run = run, .step = i, .text = text, .is_first = is_first};
    FKV_TRY(match_scan_open(&scan, run, i, text, n_bytes));
    return split_all(&split, &scan);
}

/* Adds n to the number of output bytes of step i. Fails if the sum exceeds the output limit of a step. */
static fkv_status count_output(fkv_text_run *run, uint32_t i, uint64_t n) {
    run->n_output[i] += n;
    const uint64_t limit = GROWTH * run->n_input + GROWTH_MIN;
    FKV_REQUIRE(
        run->n_output[i] <= limit, FKV_UNSUPPORTED,
        "tokenizer step %u expands %llu bytes of text to more than %llu bytes; at most %d bytes per byte of text are supported",
        i + 1, (unsigned long long)run->n_input, (unsigned long long)limit, GROWTH);
    return FKV_OK;
}

/* Appends bytes to the output of step i. */
static fkv_status append_step_output(fkv_text_run *run, uint32_t i, size_t *n_out, const char *text, size_t n) {
    fkv_scratch *out = &run->scratch[i];
    FKV_TRY(count_output(run, i, n));
    FKV_TRY(fkv_scratch_grow(out, *n_out, n));
    if (n > 0) memcpy((char *)out->block + *n_out, text, n);
    *n_out += n;
    return FKV_OK;
}

static fkv_status run_replace(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    fkv_bytes by = run->plan->steps[i].text;
    match_scan scan;
    size_t done = 0;
    size_t n_out = 0;
    size_t start = 0;
    size_t end = 0;
    FKV_TRY(match_scan_open(&scan, run, i, text, n_bytes));
    for (;;) {
        FKV_TRY(find_match(&scan, &start, &end));
        if (start == SIZE_MAX) break;
        FKV_TRY(append_step_output(run, i, &n_out, text + done, start - done));
        FKV_TRY(append_step_output(run, i, &n_out, by.data, by.size));
        done = end;
    }
    if (done == 0 && n_out == 0) return run_text_step(run, i + 1, text, n_bytes, is_first);
    FKV_TRY(append_step_output(run, i, &n_out, text + done, n_bytes - done));
    return run_text_step(run, i + 1, run->scratch[i].block, n_out, is_first);
}

static fkv_status run_prepend(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    const fkv_text_step *step = &run->plan->steps[i];
    size_t n = step->text.size;
    bool has_it = n_bytes >= n && memcmp(text, step->text.data, n) == 0;
    if ((step->only_first && !is_first) || (step->kind == FKV_STEP_PREPEND_UNLESS && has_it))
        return run_text_step(run, i + 1, text, n_bytes, is_first);
    FKV_TRY(count_output(run, i, n + n_bytes));
    FKV_TRY(fkv_scratch_need(&run->scratch[i], n + n_bytes));
    char *out = run->scratch[i].block;
    memcpy(out, step->text.data, n);
    memcpy(out + n, text, n_bytes);
    return run_text_step(run, i + 1, out, n + n_bytes, is_first);
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
    return run_text_step(run, i + 1, text, n_bytes, is_first);
}

static fkv_status run_normal_form(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    fkv_bytes normal = {0};
    FKV_TRY(fkv_normal_form(run->plan->steps[i].kind, text, n_bytes, &run->scratch[i], &normal));
    return run_text_step(run, i + 1, normal.data, normal.size, is_first);
}

/* Runs step i. The text must be valid UTF-8 if the step requires it. */
static fkv_status run_repaired(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
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
    if (i == run->plan->repair_at && !fkv_utf8_is_valid(text, n_bytes)) {
        FKV_TRY(fkv_scratch_need(&run->repaired, 3 * (uint64_t)n_bytes));
        n_bytes = fkv_utf8_repair(text, n_bytes, run->repaired.block);
        text = run->repaired.block;
    }
    return run_repaired(run, i, text, n_bytes, is_first);
}

static fkv_status run_text_step(fkv_text_run *run, uint32_t i, const char *text, size_t n_bytes, bool is_first) {
    if (n_bytes == 0) return FKV_OK;
    if (i == run->plan->n_normalizers && run->normalized != NULL) return run->normalized(run->context, text, n_bytes, is_first);
    return run_from(run, i, text, n_bytes, is_first);
}

fkv_status fkv_text_run_all(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first) {
    run->n_input += n_bytes;
    return run_text_step(run, 0, text, n_bytes, is_first);
}

fkv_status fkv_text_run_rest(fkv_text_run *run, const char *text, size_t n_bytes, bool is_first) {
    return n_bytes > 0 ? run_from(run, run->plan->n_normalizers, text, n_bytes, is_first) : FKV_OK;
}
