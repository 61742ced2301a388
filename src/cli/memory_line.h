/* The memory of the process while a model fills its context: sampled after every step, judged against the plan, drawn.
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
    process_memory before; /* the runner was opened */
    double *tokens;
    double *bytes; /* anonymous, beyond `before` */
    size_t n;
    size_t room;
    const model_session *session;
} memory_line;

/* Takes room for the samples of n_steps steps and has a first look. Before the runner is opened. Exit code, said. */
int memory_line_begin(memory_line *line, size_t n_steps);

/* After the runner was opened: from now on every step of s is sampled. */
void memory_line_watch(memory_line *line, model_session *s);

typedef struct memory_verdict {
    double plan_bytes;
    double open_bytes;
    double peak_bytes;
    double end_bytes;
    bool is_plan; /* after open: within 1 % of the plan; lazy: never above it */
    bool stays;   /* peak and end within 1 MiB of open; lazy: not asked */
    bool flat;    /* both */
    bool lazy;
} memory_verdict;

memory_verdict memory_line_judge(const memory_line *line, bool lazy);

void memory_verdict_print(const memory_line *line, const fkv_runner_config *config, const memory_verdict *v);
void memory_verdict_json(const memory_verdict *v, json_t *object); /* plan_bytes, open_bytes, peak_bytes, end_bytes, flat */

/* config: that of the session, for the computed lines. Exit code, said. */
int memory_line_draw(const memory_line *line, const fkv_runner_config *config, const char *subtitle, const char *path);

void memory_line_free(memory_line *line);

#endif
