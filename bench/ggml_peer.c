/* See ggml_peer.h. This code runs in a second process of bench_compare. */
#include "ggml_peer.h"

#include "bench_util.h"
#include "compare_case.h"

#include <dirent.h>
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char GGML_PEER_OPTION[] = "--as-ggml-peer";
static const char PROGRAM[] = "ggml_peer";

enum {
    MAX_LIBRARIES = 8,
    MASK_ROWS = 64,          /* mask rows are padded to a multiple of 64, which satisfies every version of ggml */
    N_WARM = 256,            /* number of tokens in the small case that is run only to wake the worker threads */
    HANDLES_BYTES = 1 << 20, /* size of a ggml context without its tensor data */
    WORK_BYTES = 256 << 20,  /* size of the work buffer of one call; memory pages that a call does not need are never touched */
    N_NUMBERS = 7,           /* number of integer arguments that describe a case */
    N_ARGUMENTS = 4 + N_NUMBERS
};

/* ---- library ---- */

typedef struct ggml_tensor ggml_tensor;
typedef struct ggml_context ggml_context;
typedef struct ggml_cgraph ggml_cgraph;
typedef struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} ggml_init_params;

/* Type numbers of ggml. The first four are the same in all versions of ggml; the last type exists only in ik_llama.cpp. */
static const struct {
    const char *name;
    int number;
} cache_types[] = {{"f16", 1}, {"q4_0", 2}, {"q8_0", 8}, {"bf16", 30}, {"q8_KV", 151}};
enum { TYPE_F32 = 0, TYPE_F16 = 1 };

typedef struct ggml {
    void *libraries[MAX_LIBRARIES];
    int n_libraries;
    ggml_context *(*init)(ggml_init_params);
    void (*release)(ggml_context *);
    ggml_tensor *(*new_tensor)(ggml_context *, int type, int64_t, int64_t, int64_t, int64_t);
    ggml_tensor *(*permute)(ggml_context *, ggml_tensor *, int, int, int, int);
    ggml_tensor *(*flash_attn)(ggml_context *, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *mask, float scale,
                               float max_bias, float softcap);
    ggml_cgraph *(*new_graph)(ggml_context *);
    void (*expand)(ggml_cgraph *, ggml_tensor *);
    int (*compute)(ggml_context *, ggml_cgraph *, int n_threads);
    void *(*data)(const ggml_tensor *);
    size_t (*row_size)(int type, int64_t n);
    /* only ik_llama.cpp has the last parameter (user_data), which may be NULL; other versions ignore the extra argument */
    size_t (*quantize)(int type, const float *from, void *to, int64_t start, int64_t n_rows, int64_t row_numbers,
                       const float *importance, const void *user_data);
} ggml;

static void add_library(ggml *g, const char *path) {
    void *library = g->n_libraries < MAX_LIBRARIES ? dlopen(path, RTLD_LAZY | RTLD_GLOBAL) : NULL;
    if (library != NULL) g->libraries[g->n_libraries++] = library;
}

/* Adds the libraries in a folder to the list of libraries, in dependency order. */
static void add_folder(ggml *g, const char *folder) {
    static const char *const names[] = {"libggml-base.so", "libggml-cpu.so", "libggml.so"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[4096];
        (void)snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (access(path, R_OK) == 0) add_library(g, path);
    }
}

/* Looks up a function by name. Returns NULL if it is missing and not required. */
static void *symbol(const ggml *g, const char *name, bool must) {
    for (int i = 0; i < g->n_libraries; i++) {
        void *found = dlsym(g->libraries[i], name);
        if (found != NULL) return found;
    }
    if (must) kit_die(EXIT_FAILED, "the library does not define %s", name);
    return NULL;
}

/* Converts the object pointer of dlsym() to a function pointer, which C does not define but POSIX does. */
#define FIND(field, name)                                                                                                        \
    do {                                                                                                                         \
        void *found_ = symbol(g, name, true);                                                                                    \
        memcpy(&g->field, &found_, sizeof found_);                                                                               \
    } while (0)

static void ggml_open(ggml *g, const char *path) {
    DIR *folder = opendir(path);
    if (folder != NULL) {
        (void)closedir(folder);
        add_folder(g, path);
    } else {
        add_library(g, path);
    }
    if (g->n_libraries == 0) {
        const char *why = dlerror();
        kit_die(EXIT_USAGE, "%s is neither a libggml nor a folder that contains one%s%s", path, why != NULL ? ": " : "",
                why != NULL ? why : "");
    }
    FIND(init, "ggml_init");
    FIND(release, "ggml_free");
    FIND(new_tensor, "ggml_new_tensor_4d");
    FIND(permute, "ggml_permute");
    FIND(flash_attn, "ggml_flash_attn_ext");
    FIND(new_graph, "ggml_new_graph");
    FIND(expand, "ggml_build_forward_expand");
    FIND(compute, "ggml_graph_compute_with_ctx");
    FIND(data, "ggml_get_data");
    FIND(row_size, "ggml_row_size");
    FIND(quantize, "ggml_quantize_chunk");
    void (*cpu_init)(void) = NULL; /* newer versions of ggml initialize their tables in this function */
    void *found = symbol(g, "ggml_cpu_init", false);
    memcpy(&cpu_init, &found, sizeof found);
    if (cpu_init != NULL) cpu_init();
}

static int type_named(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof cache_types / sizeof cache_types[0]; i++)
        if (strlen(cache_types[i].name) == length && strncmp(cache_types[i].name, name, length) == 0)
            return cache_types[i].number;
    kit_die(EXIT_USAGE, "unknown cache type \"%.*s\": expected f16, bf16, q8_0, q4_0, q8_KV (ik_llama.cpp only)", (int)length,
            name);
}

/* ---- case ---- */

typedef struct attention {
    const ggml *g;
    compare_case c;
    ggml_context *context;
    ggml_cgraph *graph;
    ggml_tensor *out; /* [D, H, T, B] */
} attention;

/* Creates K or V in the layout of llama.cpp: stored as [D, G, tokens, B], viewed as [D, tokens, G, B]. */
static ggml_tensor *cache_tensor(const attention *a, compare_side side, int type) {
    const ggml *g = a->g;
    const compare_case *c = &a->c;
    ggml_tensor *tensor = g->new_tensor(a->context, type, c->head_dim, c->n_kv_heads, c->n_cached, c->n_seqs);
    float *row = bench_take((size_t)c->n_kv_heads * c->head_dim * sizeof *row);
    char *to = g->data(tensor);
    size_t row_bytes = c->n_kv_heads * g->row_size(type, c->head_dim);
    for (uint32_t token = 0; token < c->n_cached; token++) {
        compare_row(c, side, token, row);
        (void)g->quantize(type, row, to + token * row_bytes, 0, c->n_kv_heads, c->head_dim, NULL, NULL);
    }
    for (uint32_t i = 1; i < c->n_seqs; i++) memcpy(to + i * c->n_cached * row_bytes, to, c->n_cached * row_bytes);
    free(row);
    return g->permute(a->context, tensor, 0, 2, 1, 3);
}

static void attention_open(attention *a, const ggml *g, const compare_case *c, int k_type, int v_type) {
    static const uint16_t minus_infinity = 0xfc00; /* as half */
    size_t mask_rows = (c->n_queries + MASK_ROWS - 1) / MASK_ROWS * MASK_ROWS;
    size_t rows = (size_t)c->n_cached * c->n_kv_heads * c->n_seqs;
    size_t bytes = HANDLES_BYTES + rows * (g->row_size(k_type, c->head_dim) + g->row_size(v_type, c->head_dim)) +
                   mask_rows * c->n_cached * sizeof(uint16_t) +
                   2 * (size_t)c->n_queries * c->n_seqs * c->n_q_heads * c->head_dim * sizeof(float);
    *a = (attention){.g = g, .c = *c, .context = g->init((ggml_init_params){bytes, NULL, false})};
    if (a->context == NULL) kit_die(EXIT_NO_FIT, "ggml_init() failed to allocate %zu bytes", bytes);
    ggml_tensor *k = cache_tensor(a, COMPARE_K, k_type);
    ggml_tensor *v = cache_tensor(a, COMPARE_V, v_type);
    ggml_tensor *q = g->new_tensor(a->context, TYPE_F32, c->head_dim, c->n_q_heads, c->n_queries, c->n_seqs);
    ggml_tensor *mask = g->new_tensor(a->context, TYPE_F16, c->n_cached, (int64_t)mask_rows, 1, 1);
    uint32_t first = c->n_cached - c->n_queries;
    uint16_t *seen = g->data(mask);
    float *rows_of_q = g->data(q);
    memset(seen, 0, mask_rows * c->n_cached * sizeof *seen);
    for (uint32_t i = 0; i < c->n_queries; i++) {
        compare_row(c, COMPARE_Q, first + i, rows_of_q + (size_t)i * c->n_q_heads * c->head_dim);
        for (uint32_t token = first + i + 1; token < c->n_cached; token++) seen[(size_t)i * c->n_cached + token] = minus_infinity;
    }
    size_t sequence = (size_t)c->n_queries * c->n_q_heads * c->head_dim;
    for (uint32_t i = 1; i < c->n_seqs; i++) memcpy(rows_of_q + i * sequence, rows_of_q, sequence * sizeof *rows_of_q);
    a->out = g->flash_attn(a->context, g->permute(a->context, q, 0, 2, 1, 3), k, v, mask, 1.0f / sqrtf((float)c->head_dim), 0.0f,
                           0.0f);
    a->graph = g->new_graph(a->context);
    g->expand(a->graph, a->out);
}

/* Returns the duration of one call, in seconds. Each call creates a new context for its work buffer. */
static double attention_call(const attention *a) {
    ggml_context *work = a->g->init((ggml_init_params){WORK_BYTES, NULL, false});
    if (work == NULL) kit_die(EXIT_NO_FIT, "ggml_init() failed to allocate %d bytes", WORK_BYTES);
    double start = kit_seconds();
    int status = a->g->compute(work, a->graph, (int)a->c.n_threads);
    double seconds = kit_seconds() - start;
    a->g->release(work);
    if (status != 0) kit_die(EXIT_FAILED, "ggml_graph_compute_with_ctx() returned %d", status);
    return seconds;
}

/* ---- process ---- */

int ggml_peer_main(int argc, char **argv) {
    kit_set_program(PROGRAM);
    if (argc != N_ARGUMENTS) kit_die(EXIT_USAGE, "this mode is called by bench_compare only");
    FILE *answers = fdopen(dup(STDOUT_FILENO), "wb");
    (void)dup2(STDERR_FILENO, STDOUT_FILENO); /* the library prints to stderr; stdout carries only answers */
    uint32_t numbers[N_NUMBERS];
    for (int i = 0; i < N_NUMBERS; i++) {
        static const uint32_t max[1] = {1u << 26};
        if (!kit_numbers(argv[4 + i], 0, max, &numbers[i], 1)) kit_die(EXIT_USAGE, "%s: expected a number", argv[4 + i]);
    }
    const compare_case c = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]};
    const char *types = argv[3];
    size_t k_length = strcspn(types, "/");
    int k_type = type_named(types, k_length);
    const char *v = types[k_length] == '/' ? types + k_length + 1 : types;
    int v_type = type_named(v, strlen(v));

    ggml g = {.n_libraries = 0};
    attention asked;
    attention small;
    process_memory before;
    process_memory after;
    ggml_open(&g, argv[2]);
    bool is_reported = process_memory_now(&before);
    attention_open(&asked, &g, &c, k_type, v_type);
    compare_case warm = c;
    warm.n_cached = N_WARM;
    warm.n_queries = warm.n_seqs = 1;
    attention_open(&small, &g, &warm, k_type, v_type);

    double seconds = attention_call(&asked);
    is_reported = process_memory_now(&after) && is_reported;
    double memory = is_reported ? (double)after.anonymous_bytes - (double)before.anonymous_bytes : NAN;
    size_t row = (size_t)c.n_q_heads * c.head_dim;
    const float *out = (const float *)g.data(asked.out) + ((size_t)c.n_seqs * c.n_queries - 1) * row;
    if (answers == NULL || fwrite(out, sizeof *out, row, answers) != row || fwrite(&memory, sizeof memory, 1, answers) != 1)
        return EXIT_FAILED;
    while (fwrite(&seconds, sizeof seconds, 1, answers) == 1 && fflush(answers) == 0) {
        char request;
        if (read(STDIN_FILENO, &request, 1) != 1) return EXIT_GOOD;
        (void)attention_call(&small);
        seconds = attention_call(&asked);
    }
    return EXIT_FAILED;
}
