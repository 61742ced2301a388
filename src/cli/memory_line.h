/* The memory of a running model while it fills its context: sampled after every step, judged against the plan, drawn.
 *
 * On the CPU that is the anonymous memory of the process, which holds the whole plan from open to end. On MLX it is what MLX's
 * own counters say: it holds the pages from open to end, and the most it ever had in use, which it keeps itself, is within the
 * plan.
 *
 * Beside the measured line the picture shows two that are computed from the plan of a 16-bit cache and labelled so: what such a
 * cache needs if it grows with the tokens, and the same with the score matrix of one chunk, as attention that is not fused
 * makes it.
 */
#ifndef FKV_CLI_MEMORY_LINE_H
#define FKV_CLI_MEMORY_LINE_H

#include "cli.h"
#include "session.h"

#include "../kit/process.h"

#include <stddef.h>

typedef struct memory_line {
    fkv_backend backend;
    double before; /* the runner was opened */
    double *tokens;
    double *bytes; /* in use beyond `before`, as the backend has it */
    size_t n;
    size_t room;
    const model_session *session;
} memory_line;

/* Anonymous memory of the process, or what MLX has in use. False where the system does not say. */
bool memory_in_use(fkv_backend backend, double *bytes);

/* Takes room for the samples of n_steps steps and takes the first one. Before the runner is opened. Returns an exit code, with a
 * message on failure. */
int memory_line_begin(memory_line *line, fkv_backend backend, size_t n_steps);

/* After the runner was opened: from now on every step of s is sampled. */
void memory_line_watch(memory_line *line, model_session *s);

typedef struct memory_verdict {
    double plan_bytes;
    double held_bytes; /* of the plan: what is there from open to end. CPU: all of it; MLX: the pages */
    double open_bytes;
    double peak_bytes; /* CPU: of the samples; MLX: as it counted, inside of steps too */
    double end_bytes;
    double cached_bytes; /* MLX: kept for the next step at the end, beside what is in use */
    bool is_plan;        /* after open: within 1 % of what is held; peak and what is cached: not above the plan */
    bool stays;          /* every sample within 1 MiB of open; lazy: not asked */
    bool flat;           /* both */
    bool lazy;
} memory_verdict;

memory_verdict memory_line_judge(const memory_line *line, bool lazy);

void memory_verdict_print(const memory_line *line, const fkv_runner_config *config, const memory_verdict *v);
void memory_verdict_json(const memory_verdict *v,
                         kit_json *json); /* plan_bytes, held_bytes, open_bytes, peak_bytes, end_bytes, cached_bytes, flat */

/* config: that of the session, for the computed lines. Returns an exit code, with a message on failure. */
int memory_line_draw(const memory_line *line, const fkv_runner_config *config, const char *subtitle, const char *path);

void memory_line_free(memory_line *line);

#endif
