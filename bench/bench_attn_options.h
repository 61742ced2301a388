/* Options of bench_attn on the CPU. */
#ifndef FKV_BENCH_ATTN_OPTIONS_H
#define FKV_BENCH_ATTN_OPTIONS_H

#include "bench_roof.h"

#include "../tests/attn_cases.h"

enum { ATTN_MAX_CASES = 64, ATTN_MAX_ROUNDS = 1000 };

typedef enum attn_op { OP_WRITE = 0, OP_DECODE, OP_PREFILL, N_ATTN_OPS } attn_op;
extern const char *const attn_op_names[N_ATTN_OPS];

typedef struct attn_bench_case {
    attn_shape shape;
    uint32_t n_cached; /* number of cached tokens, including the new tokens */
} attn_bench_case;

typedef struct attn_options {
    attn_bench_case cases[ATTN_MAX_CASES];
    uint32_t n_cases;
    uint32_t threads[BENCH_MAX_ROOFS];
    uint32_t n_threads;
    bool codecs[N_ATTN_CODECS];
    bool ops[N_ATTN_OPS];
    uint32_t n_queries;
    uint32_t n_rounds;
    bool quick;
    fkv_isa isa;
    bool json;
} attn_options;

/* Parses the command line into zeroed options and fills in defaults. Exits after --help and on invalid options. */
void attn_options_parse(attn_options *o, int argc, char **argv);

#endif
