/* Operations of the stress test: each call runs one random operation or one random step and checks all results. */
#ifndef FKV_STRESS_OPERATIONS_H
#define FKV_STRESS_OPERATIONS_H

#include "stress_cache.h"

#include <flatkv/prefix_store.h>

enum { STRESS_CACHES = 2, STRESS_FILES = 3, STRESS_PATH = 512, STRESS_PREFIXES = 4, STRESS_STORED_PAGES = 14 };

typedef struct stress_file {
    char path[STRESS_PATH];
    stress_token **tokens;
    uint32_t n; /* number of tokens; 0 if there is no file yet */
    uint64_t origin;
} stress_file;

typedef struct stress_object {
    fkv_page_key key;
    uint8_t *bytes; /* NULL if the prefix does not have this object */
    uint64_t n;
} stress_object;

enum { STRESS_PAGE, STRESS_OPEN_PAGE, STRESS_STATE, STRESS_N_PARTS };

/* A packed prefix. */
typedef struct stress_prefix {
    uint64_t tenant;
    uint32_t *ids;
    uint32_t n_pages; /* 0 if there is no prefix yet */
    stress_object objects[STRESS_N_PARTS][STRESS_STORED_PAGES];
} stress_prefix;

typedef struct stress_counts {
    uint64_t configurations, steps, commits, aborts, opened, hits, forks, truncates, gone, inserts, clears, closes,
        closes_in_steps, reserves, discarded;
    uint64_t saves, loads, damaged, foreign, nan_files, refusals, bad_calls, answers, sealed, calibrated, latent, sealed_latent,
        turbo, same, slack, beyond, gone_open;
    uint64_t states, state_hits, state_truncates, state_gone, state_saves, state_loads, drops;
    uint64_t stored, restored, restored_open, restored_states, wrong_objects;
} stress_counts;

typedef struct stress_run {
    stress_random random;
    stress_config config;
    stress_fixture fixture;
    stress_cache caches[STRESS_CACHES]; /* two caches with the same identity but different sizes */
    uint32_t n_caches;
    stress_file files[STRESS_FILES];
    stress_prefix prefixes[STRESS_PREFIXES];
    const char *folder;
    uint8_t *rows[4]; /* K, V, Q and output rows of one layer of a step */
    size_t rows_bytes;
    uint32_t *ids; /* buffer for a prompt */
    stress_counts *counts;
} stress_run;

/* Runs one random operation on one of the caches. */
void stress_operate(stress_run *l);

/* Runs a step over some of the sequences and commits or aborts it. Returns false if no sequence can grow. */
bool stress_step(stress_run *l, stress_cache *cache);

/* Checks the status of open, fork or load. The call must succeed if the max_tokens of all sequences add up to at most the cache's
 * max_tokens. It must fail if the sequence is too long or there are too many sequences. Returns true if a sequence was opened. */
bool stress_admitted(stress_run *l, const stress_cache *cache, uint32_t max_tokens, fkv_status status, const char *call);

/* Inserts the prefixes and states of all sequences whose length is a multiple of the page size. */
void stress_snapshot(stress_run *l, stress_cache *cache);

/* ---- page files ---- */
void stress_save(stress_run *l, stress_cache *cache);
void stress_load(stress_run *l, stress_cache *cache);
void stress_files_forget(stress_run *l);

/* ---- packed prefixes ---- */
void stress_store_prefix(stress_run *l, stress_cache *cache);
void stress_restore_prefix(stress_run *l, stress_cache *cache);
void stress_prefixes_forget(stress_run *l);

#endif
