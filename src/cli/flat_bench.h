/* Internal declarations of flatkv bench flat. */
#ifndef FKV_CLI_FLAT_BENCH_H
#define FKV_CLI_FLAT_BENCH_H

#include "model_options.h"

typedef struct flat_options {
    model_options model;
    const char *file;   /* text file that fills the context; NULL selects the needle model's book */
    const char *svg;    /* NULL: no plot */
    uint32_t layers;    /* number of layers of a cache without a model; 0 means that a model is run */
    const char *heads;  /* shape "Q/KV/DIM" of a cache without a model: query heads, KV heads, head dimension */
    bool skip_capacity; /* true to skip the comparison of decode times at two capacities */
} flat_options;

/* Fills a cache without a model (flat_cache.c). Returns an exit code. */
int flat_cache_run(const flat_options *o);

#endif
