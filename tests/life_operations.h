/* What a life is made of: one random call, or one random step, and everything that must follow from it. */
#ifndef FKV_LIFE_OPERATIONS_H
#define FKV_LIFE_OPERATIONS_H

#include "life_cache.h"

enum { LIFE_CACHES = 2, LIFE_FILES = 3, LIFE_PATH = 512 };

typedef struct life_file {
    char path[LIFE_PATH];
    life_token **tokens;
    uint32_t n; /* 0: no file yet */
    uint64_t origin;
} life_file;

typedef struct life_counts {
    uint64_t configurations, steps, commits, aborts, opened, hits, forks, truncates, gone, inserts, clears, closes,
        closes_in_steps, reserves;
    uint64_t saves, loads, damaged, foreign, nan_files, refusals, bad_calls, answers, sealed, calibrated, turbo, same, slack,
        beyond, gone_open;
} life_counts;

typedef struct life {
    life_random random;
    life_config config;
    life_world world;
    life_cache caches[LIFE_CACHES]; /* of one identity; the second of other sizes */
    uint32_t n_caches;
    life_file files[LIFE_FILES];
    const char *folder;
    uint8_t *rows[4]; /* K, V, Q and out of a step */
    size_t rows_bytes;
    uint32_t *ids; /* room for a prompt */
    life_counts *counts;
} life;

/* One operation on one of the caches. */
void life_operate(life *l);

/* A step over some of the sequences, committed or aborted; false where no sequence has room. */
bool life_step(life *l, life_cache *cache);

/* Whether the answer to open, fork or load is one that may be given: sure where all sequences add up to max_tokens, refused where
 * one is too long or too many. True: a sequence was opened. */
bool life_admitted(life *l, const life_cache *cache, uint32_t max_tokens, fkv_status status, const char *call);

/* Saves and loads. */
void life_save(life *l, life_cache *cache);
void life_load(life *l, life_cache *cache);
void life_files_forget(life *l);

#endif
