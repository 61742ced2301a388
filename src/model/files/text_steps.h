/* What is done to a text before its pieces are looked up in a vocabulary: a list of steps, each applied to every piece that the
 * step before left. A tokenizer.json spells its list out; for GGUF the list belongs to the name of the pre-tokenizer.
 */
#ifndef FKV_TEXT_STEPS_H
#define FKV_TEXT_STEPS_H

#include "../../base/shown.h"

#include <stdint.h>

enum { FKV_MAX_TEXT_STEPS = 16 };

typedef enum fkv_text_step_kind {
    FKV_STEP_NFC,
    FKV_STEP_NFD,
    FKV_STEP_NFKC,
    FKV_STEP_NFKD,
    FKV_STEP_REPLACE,        /* every match of the pattern by `text` */
    FKV_STEP_PREPEND,        /* `text` before a piece */
    FKV_STEP_PREPEND_UNLESS, /* the same unless the piece begins with `text` */
    FKV_STEP_STRIP_LEFT,     /* white space */
    FKV_STEP_STRIP_RIGHT,
    FKV_STEP_SPLIT /* into matches of the pattern and what lies between them; then `behavior` */
} fkv_text_step_kind;

/* What becomes of the matches. */
typedef enum fkv_split_behavior {
    FKV_SPLIT_ISOLATED,
    FKV_SPLIT_REMOVED,
    FKV_SPLIT_WITH_PREVIOUS, /* a match joins the piece before it, unless that is a match */
    FKV_SPLIT_WITH_NEXT,
    FKV_SPLIT_CONTIGUOUS /* matches side by side are one piece */
} fkv_split_behavior;

typedef struct fkv_text_step {
    fkv_text_step_kind kind;
    fkv_bytes pattern; /* replace, split: not empty */
    bool is_regex;     /* the pattern is a regular expression as Oniguruma reads it, else the very text */
    bool invert;       /* split: what lies between counts as the matches */
    bool only_first;   /* prepend: only to the piece that begins the whole text */
    fkv_split_behavior behavior;
    fkv_bytes text;
} fkv_text_step;

typedef struct fkv_text_steps {
    fkv_text_step steps[FKV_MAX_TEXT_STEPS];
    uint32_t n_steps;
    uint32_t n_normalizers; /* the first so many come before tokens that are found in normalized text */
} fkv_text_steps;

#endif
