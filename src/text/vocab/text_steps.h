/* Normalizer and pre-tokenizer steps, which transform a text into pieces before the pieces are encoded with a vocabulary. Each
 * step is applied to every piece that the previous step produces. tokenizer.json lists the steps; in a GGUF file, the name of the
 * pre-tokenizer implies them. */
#ifndef FKV_TEXT_STEPS_H
#define FKV_TEXT_STEPS_H

#include "../../base/base.h"
#include "../../base/printable.h"

#include <stdint.h>

enum { FKV_MAX_TEXT_STEPS = 16 };

typedef enum fkv_text_step_kind {
    FKV_STEP_NFC,
    FKV_STEP_NFD,
    FKV_STEP_NFKC,
    FKV_STEP_NFKD,
    FKV_STEP_REPLACE,        /* replace every match of the pattern with `text` */
    FKV_STEP_PREPEND,        /* insert `text` before the piece */
    FKV_STEP_PREPEND_UNLESS, /* insert `text` before the piece unless the piece already starts with it */
    FKV_STEP_STRIP_LEFT,     /* remove leading white space */
    FKV_STEP_STRIP_RIGHT,    /* remove trailing white space */
    FKV_STEP_SPLIT           /* split into matches of the pattern and the text between them, as `behavior` specifies */
} fkv_text_step_kind;

/* Specifies how a split step treats the matches of its pattern. */
typedef enum fkv_split_behavior {
    FKV_SPLIT_ISOLATED, /* each match of the pattern becomes a separate piece */
    FKV_SPLIT_REMOVED,
    FKV_SPLIT_WITH_PREVIOUS, /* a match is merged with the preceding piece, unless that piece is a match */
    FKV_SPLIT_WITH_NEXT,     /* a match is merged with the following piece, unless that piece is a match */
    FKV_SPLIT_CONTIGUOUS     /* adjacent matches form one piece */
} fkv_split_behavior;

typedef struct fkv_text_step {
    fkv_text_step_kind kind;
    fkv_bytes pattern; /* pattern of a replace or split step; not empty */
    bool is_regex;     /* true if the pattern is a regular expression in Oniguruma syntax, false if it is literal text */
    bool invert;       /* split: true to swap the roles of the matches and the text between them */
    bool only_first;   /* prepend: true to insert `text` only before the first piece of the whole text */
    fkv_split_behavior behavior;
    fkv_bytes text;
} fkv_text_step;

typedef struct fkv_text_steps {
    fkv_text_step steps[FKV_MAX_TEXT_STEPS];
    uint32_t n_steps;
    uint32_t n_normalizers; /* number of leading steps that are normalizers; FKV_TOKEN_NORMALIZED tokens are matched in the output
                               of these steps */
} fkv_text_steps;

#endif
