/* See bench_attn_options.h. */
#include "bench_attn_options.h"

#include "bench_util.h"

#include <stdlib.h>

const char *const attn_op_names[N_ATTN_OPS] = {"write", "decode", "prefill"};

static const attn_bench_case default_cases[] = {
    {{32, 8, 128}, 16384}, {{9, 3, 64}, 8192}, {{4, 1, 256}, 32768}, {{8, 1, 512}, 8192}};
enum { N_DEFAULT_CASES = sizeof default_cases / sizeof default_cases[0] };
static const char default_codecs[] = "16/16,8/8,8/4,4/4,4/2";

static const char usage[] =
    "usage: bench_attn [options]                 CPU kernels on pages of random rows\n"
    "       bench_attn --device mlx [options]    the MLX backend; --device mlx --help lists its options\n"
    "Times write, decode and prefill over packed pages for each codec and shape, after comparing their results with the reference.\n"
    "Exit status: 0 success, 1 wrong result, 2 invalid usage, 3 out of memory.\n";

static bool same_codec(fkv_codec_config a, fkv_codec_config b) {
    a = fkv_codec_canonical(a);
    b = fkv_codec_canonical(b);
    return a.kind == b.kind && a.bits == b.bits && a.group == b.group;
}

/* Returns the index of a codec, given its table name or an alias such as "sealed" or "tq4". Returns N_ATTN_CODECS if the name is
 * unknown. */
static uint32_t codec_of(const char *word) {
    fkv_codec_config k = {.group = 64};
    fkv_codec_config v = {.group = 64};
    bool parsed = fkv_codec_parse(word, &k, &v) == FKV_OK;
    uint32_t i = 0;
    for (; i < N_ATTN_CODECS; i++)
        if (strcmp(attn_codecs[i].name, word) == 0 ||
            (parsed && same_codec(k, attn_codecs[i].k) && same_codec(v, attn_codecs[i].v)))
            break;
    return i;
}

static void take_codecs(attn_options *o, const char *list) {
    char word[KIT_WORD];
    bool all = strcmp(list, "all") == 0;
    for (uint32_t i = 0; i < N_ATTN_CODECS; i++) o->codecs[i] = all;
    while (!all && kit_next_word(&list, word)) {
        uint32_t i = codec_of(word);
        if (i == N_ATTN_CODECS) kit_die(EXIT_USAGE, "--codecs %s: unknown codec; see --help", word);
        o->codecs[i] = true;
    }
}

static void take_ops(attn_options *o, const char *list) {
    char word[KIT_WORD];
    while (kit_next_word(&list, word)) {
        uint32_t i = 0;
        while (i < N_ATTN_OPS && strcmp(attn_op_names[i], word) != 0) i++;
        if (i == N_ATTN_OPS) kit_die(EXIT_USAGE, "--only %s: expected write, decode or prefill", word);
        o->ops[i] = true;
    }
}

static attn_shape shape_of(const char *text) {
    static const uint32_t max[3] = {4096, 4096, FKV_MAX_HEAD_DIM};
    uint32_t parts[3];
    if (!kit_numbers(text, '/', max, parts, 3))
        kit_die(EXIT_USAGE, "--shape %s: expected query heads/KV heads/head dimension, such as 32/8/128", text);
    if (parts[0] % parts[1] != 0 || parts[0] / parts[1] > FKV_MAX_HEADS_PER_KV)
        kit_die(
            EXIT_USAGE,
            "--shape %s: the number of query heads must be a multiple of the number of KV heads, and at most %d times that number",
            text, FKV_MAX_HEADS_PER_KV);
    if (parts[2] % 16 != 0) kit_die(EXIT_USAGE, "--shape %s: the head dimension must be a multiple of 16", text);
    return (attn_shape){parts[0], parts[1], parts[2]};
}

static void add_case(attn_options *o, attn_shape shape, uint32_t n_cached) {
    if (o->n_cases == ATTN_MAX_CASES)
        kit_die(EXIT_USAGE, "too many combinations of --shape and --cached: at most %d are supported", ATTN_MAX_CASES);
    if (n_cached < o->n_queries)
        kit_die(EXIT_USAGE, "--queries %u: must be at most %u, the number of cached tokens, which includes the queries",
                o->n_queries, n_cached);
    o->cases[o->n_cases++] = (attn_bench_case){shape, n_cached};
}

/* Returns the default number of cached tokens of a shape. */
static uint32_t usual_depth(const attn_options *o, const attn_shape *shape) {
    uint32_t n_cached = 16384;
    for (size_t i = 0; i < N_DEFAULT_CASES; i++)
        if (memcmp(&default_cases[i].shape, shape, sizeof *shape) == 0) n_cached = default_cases[i].n_cached;
    return o->quick ? fkv_min_u32(n_cached, 2048) : n_cached;
}

/* Creates one case for every combination of a shape and a number of cached tokens. */
static void make_cases(attn_options *o, const kit_texts *shapes, const char *depths) {
    uint32_t cached[BENCH_MAX_ROOFS];
    uint32_t n_cached = bench_numbers("--cached", depths, 1u << 26, cached, BENCH_MAX_ROOFS);
    uint32_t n_shapes = shapes->n > 0 ? shapes->n : N_DEFAULT_CASES;
    for (uint32_t i = 0; i < n_shapes; i++) {
        attn_shape shape = shapes->n > 0 ? shape_of(shapes->texts[i]) : default_cases[i].shape;
        if (n_cached == 0) add_case(o, shape, usual_depth(o, &shape));
        for (uint32_t j = 0; j < n_cached; j++) add_case(o, shape, cached[j]);
    }
}

/* Sets the options that were not given on the command line to their defaults. */
static void complete(attn_options *o) {
    bool any_codec = false;
    for (uint32_t i = 0; i < N_ATTN_CODECS; i++) any_codec = any_codec || o->codecs[i];
    if (!any_codec || !(o->ops[OP_WRITE] || o->ops[OP_DECODE] || o->ops[OP_PREFILL]))
        kit_die(EXIT_USAGE, "--codecs and --only leave nothing to measure");
    if (o->n_threads == 0) {
        o->threads[o->n_threads++] = 1;
        if (fkv_cpu_count() > 1) o->threads[o->n_threads++] = fkv_cpu_count();
    }
}

/* Lists the codec names for --help. */
static const char *codec_help(void) {
    static char text[512];
    size_t n = (size_t)snprintf(text, sizeof text, "such as 8/4, sealed or tq4, or all (default %s);\n", default_codecs);
    for (uint32_t i = 0; i < N_ATTN_CODECS && n < sizeof text; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", i == 0 ? "" : i % 8 == 0 ? ",\n" : ", ", attn_codecs[i].name);
    return text;
}

void attn_options_parse(attn_options *o, int argc, char **argv) {
    kit_texts shapes = {0};
    const char *depths = "";
    const char *codecs = default_codecs;
    const char *ops = "write,decode,prefill";
    const char *threads = "";
    const char *isa = NULL;
    int device = 0;
    const kit_option own[] = {
        {"device", 0, OPTION_CHOICE, &device, 0, "cpu|mlx", "(default cpu)"},
        {"shape", 0, OPTION_TEXTS, &shapes, 0, "H/G/D",
         "query heads/KV heads/head dimension; may be repeated\n"
         "(default 32/8/128 at 16384, 9/3/64 at 8192, 4/1/256 at 32768, 8/1/512 at 8192)"},
        {"cached", 'c', OPTION_TEXT, &depths, 0, "LIST",
         "tokens in the pages, including the new tokens (default 16384 for shapes without a default above)"},
        {"queries", 0, OPTION_COUNT, &o->n_queries, 1u << 16, "N", "new tokens of a prefill (default 64)"},
        {"codecs", 0, OPTION_TEXT, &codecs, 0, "LIST", codec_help()},
        {"only", 0, OPTION_TEXT, &ops, 0, "LIST", "operations: write, decode, prefill (default all)"},
        {"threads", 0, OPTION_TEXT, &threads, 0, "LIST", "thread counts (default 1 and the number of cores)"},
        {"isa", 0, OPTION_TEXT, &isa, 0, "NAME",
         "kernels: auto, scalar, neon, avx2, avx512, avx512vnni, amx (default FKV_ISA from the environment, or auto)"},
        {"rounds", 0, OPTION_COUNT, &o->n_rounds, ATTN_MAX_ROUNDS, "N",
         "timed calls per case (default 15; prefill uses a third of them, but at least 3)"},
        {"quick", 0, OPTION_FLAG, &o->quick, 0, NULL,
         "3 rounds, 16 queries and at most 2048 cached tokens, to test the program; times are not meaningful"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, BENCH_JSON_HELP},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) exit(code);
    if (o->n_queries == 0) o->n_queries = o->quick ? 16 : 64;
    if (o->n_rounds == 0) o->n_rounds = o->quick ? 3 : 15;
    make_cases(o, &shapes, depths);
    take_codecs(o, codecs);
    take_ops(o, ops);
    o->n_threads = bench_numbers("--threads", threads, FKV_MAX_THREADS, o->threads, BENCH_MAX_ROOFS);
    o->isa = bench_isa(isa);
    complete(o);
}
