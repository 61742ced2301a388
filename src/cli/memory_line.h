/* Measures the process memory while a context is being filled. Memory is sampled after every step, compared with the plan,
 * printed and plotted.
 *
 * On the CPU, the measured value is the anonymous memory of the process, which equals the whole plan while the cache is open.
 * On MLX, the measured values are MLX's own counters. The active memory equals the size of the pages while the cache is open,
 * and the peak of the active memory does not exceed the plan.
 *
 * In addition to the measured memory, the plot shows two computed lines. The first is the size of a 16-bit cache that grows
 * with the number of tokens. The second adds the score matrix of one chunk, which unfused attention would allocate.
 */
#ifndef FKV_CLI_MEMORY_LINE_H
#define FKV_CLI_MEMORY_LINE_H

#include "cli.h"
#include "session.h"

#include "../kit/process.h"

#include <stddef.h>

typedef struct memory_line {
    fkv_backend backend;
    double before;     /* memory in use before the cache or runner was opened */
    double plan_bytes; /* size of the whole plan, in bytes */
    double held_bytes; /* bytes in use while the cache is open: the whole plan on the CPU, only the pages on MLX */
    double *tokens;    /* [n] number of tokens in the cache at each sample */
    double *bytes;     /* [n] memory in use at each sample, in bytes, minus `before` */
    size_t n;
    size_t capacity;
    const model_session *session; /* session whose memory is sampled after every step; NULL if the caller adds the samples */
} memory_line;

/* Reads the anonymous memory of the process, or MLX's active memory. Returns false if the system does not report it. */
bool memory_in_use(fkv_backend backend, double *bytes);

/* Allocates room for the samples of n_steps steps and records `before`. Call before the cache or runner is opened. Returns an
 * exit code. */
int memory_line_begin(memory_line *line, fkv_backend backend, size_t n_steps);

/* Adds a sample taken when the cache holds `tokens` tokens. */
void memory_line_add(memory_line *line, uint32_t tokens);

/* Copies the plan of an open session, adds the first sample, and registers a callback that adds a sample after every step. */
void memory_line_watch(memory_line *line, model_session *s);

typedef struct memory_verdict {
    double open_bytes;
    double peak_bytes; /* largest sample on the CPU; peak counter on MLX, which also covers the time between samples */
    double end_bytes;
    double cached_bytes; /* memory in MLX's buffer cache at the end, not included in end_bytes */
    bool is_plan; /* true if the memory after opening the cache is within 1 % of held_bytes (not checked if `lazy`), and neither
                     the peak nor the cached memory exceeds the plan */
    bool stays;   /* true if every sample is within 1 MiB of the first sample; always true if `lazy` */
    bool flat;    /* is_plan and stays */
    bool lazy;
} memory_verdict;

memory_verdict memory_line_judge(const memory_line *line, bool lazy);

/* Describes the 16-bit cache with which the measured memory is compared. */
typedef struct memory_comparison {
    double (*pages_16bit)(const void *user,
                          uint32_t tokens); /* returns the size, in bytes, of a 16-bit cache that holds `tokens` tokens */
    const void *user;
    uint32_t n_q_heads; /* number of query heads; with `chunk`, determines the size of a layer's f32 score matrix */
    uint32_t chunk;
} memory_comparison;

void memory_verdict_print(const memory_line *line, const memory_comparison *wide, const memory_verdict *v);

/* Writes the JSON fields plan_bytes, held_bytes, open_bytes, peak_bytes, end_bytes, cached_bytes and flat. */
void memory_verdict_json(const memory_line *line, const memory_verdict *v, kit_json *json);
void memory_line_samples_json(const memory_line *line, kit_json *json); /* "samples": [[tokens, bytes], ...] */

/* Writes the plot. Returns an exit code. */
int memory_line_draw(const memory_line *line, const memory_comparison *wide, const char *subtitle, const char *path);

/* Returns the comparison for a session with the given model and configuration. `of` must outlive the returned comparison. */
typedef struct session_shape {
    const fkv_model *model;
    const fkv_runner_config *config;
} session_shape;
memory_comparison memory_comparison_of_session(const session_shape *of);

void memory_line_free(memory_line *line);

#endif
