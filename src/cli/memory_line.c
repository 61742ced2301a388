/* See memory_line.h. */
#include "memory_line.h"

#include "../kit/plot.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What a process may touch of its own (stdio, a deeper stack) beside what is measured. */
static const double FLAT_SLACK = 1024.0 * 1024.0;
static const double PLAN_SLACK = 0.01;

enum { COMPUTED = 33 }; /* points of a computed line */

bool memory_in_use(fkv_backend backend, double *bytes) {
    fkv_backend_memory device;
    process_memory process;
    bool said = backend == FKV_BACKEND_CPU ? process_memory_now(&process) : fkv_backend_memory_now(backend, &device) == FKV_OK;
    if (said) *bytes = (double)(backend == FKV_BACKEND_CPU ? process.anonymous_bytes : device.active_bytes);
    return said;
}

int memory_line_begin(memory_line *line, fkv_backend backend, size_t n_steps) {
    *line = (memory_line){.backend = backend, .room = n_steps + 16};
    line->tokens = kit_take(line->room * sizeof *line->tokens);
    line->bytes = kit_take(line->room * sizeof *line->bytes);
    (void)memory_in_use(backend, &line->before); /* whatever the first look takes is not the runner's */
    if (memory_in_use(backend, &line->before)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "the system does not say what this process occupies");
}

static void sample(void *user) {
    memory_line *line = user;
    double now = 0;
    if (line->n == line->room || !memory_in_use(line->backend, &now)) return;
    line->tokens[line->n] = line->session->length;
    line->bytes[line->n++] = now - line->before;
}

void memory_line_watch(memory_line *line, model_session *s) {
    line->session = s;
    sample(line);
    s->after_step = sample;
    s->after_step_user = line;
}

memory_verdict memory_line_judge(const memory_line *line, bool lazy) {
    const fkv_runner_plan *plan = &line->session->plan;
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    memory_verdict v = {.plan_bytes = (double)plan->total_bytes,
                        .held_bytes = (double)(on_cpu ? plan->total_bytes : plan->cache.slab_bytes),
                        .open_bytes = line->bytes[0],
                        .end_bytes = line->bytes[line->n - 1],
                        .lazy = lazy};
    double most = 0;
    double least = v.open_bytes;
    for (size_t i = 0; i < line->n; i++) {
        most = fmax(most, line->bytes[i]);
        least = fmin(least, line->bytes[i]);
    }
    v.peak_bytes = most;
    fkv_backend_memory device;
    if (!on_cpu && fkv_backend_memory_now(line->backend, &device) == FKV_OK) {
        v.peak_bytes = (double)device.peak_bytes - line->before;
        v.cached_bytes = (double)device.cached_bytes;
    }
    double slack = fmax(PLAN_SLACK * v.held_bytes, FLAT_SLACK);
    bool is_within = v.peak_bytes <= v.plan_bytes + slack && v.end_bytes + v.cached_bytes <= v.plan_bytes + slack;
    v.is_plan = is_within && (lazy || fabs(v.open_bytes - v.held_bytes) <= slack);
    v.stays = lazy || (most <= v.open_bytes + FLAT_SLACK && least >= v.open_bytes - FLAT_SLACK);
    v.flat = v.is_plan && v.stays;
    return v;
}

/* Pages of a 16-bit cache that holds so many tokens, as they would be planned: windowed layers stay bounded. */
static double pages_16bit(const memory_line *line, const fkv_runner_config *config, uint32_t tokens) {
    fkv_runner_config wide = *config;
    fkv_runner_plan plan;
    wide.k = wide.v = (fkv_codec_config){.bits = 16};
    wide.rotate = FKV_ROTATE_NONE;
    wide.memory_limit = 0;
    wide.max_tokens = tokens;
    if (tokens == 0 || fkv_runner_plan_make(line->session->model, &wide, &plan) != FKV_OK) return 0;
    return (double)plan.cache.slab_bytes;
}

/* f32 scores of one layer, all query heads, a chunk of queries: what attention that is not fused has beside its cache. */
static double scores_bytes(const memory_line *line, const fkv_runner_config *config, double tokens) {
    return tokens * fkv_model_about(line->session->model)->n_q_heads * config->max_step_tokens * 4;
}

void memory_verdict_print(const memory_line *line, const fkv_runner_config *config, const memory_verdict *v) {
    char a[32];
    double tokens = line->tokens[line->n - 1];
    double growing = pages_16bit(line, config, (uint32_t)tokens);
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    printf("%-26s %12s\n", "plan", kit_bytes((uint64_t)v->plan_bytes, a));
    printf("%-26s %12s  %+.3f %% of %s\n", on_cpu ? "resident after open" : "MLX active after open",
           kit_bytes((uint64_t)fmax(0, v->open_bytes), a), (v->open_bytes / v->held_bytes - 1) * 100,
           on_cpu ? "the plan" : "the pages");
    printf("%-26s %12s  %+.0f KiB from open, %zu samples\n", on_cpu ? "peak" : "MLX peak, inside of steps",
           kit_bytes((uint64_t)fmax(0, v->peak_bytes), a), (v->peak_bytes - v->open_bytes) / 1024, line->n);
    printf("%-26s %12s  %+.0f KiB from open\n", "at the end", kit_bytes((uint64_t)fmax(0, v->end_bytes), a),
           (v->end_bytes - v->open_bytes) / 1024);
    if (!on_cpu) printf("%-26s %12s\n", "MLX's buffer cache", kit_bytes((uint64_t)v->cached_bytes, a));
    printf("%-26s %12s  computed, not measured\n", "a growing 16-bit cache", kit_bytes((uint64_t)growing, a));
    printf("%-26s %12s  computed, not measured\n", "  with its score matrix",
           kit_bytes((uint64_t)(growing + scores_bytes(line, config, tokens)), a));
    printf("%s\n", !v->flat ? "NOT FLAT" : v->lazy ? "lazy: never above the plan" : "FLAT");
}

void memory_verdict_json(const memory_verdict *v, kit_json *json) {
    kit_json_integer(json, "plan_bytes", (uint64_t)v->plan_bytes);
    kit_json_integer(json, "held_bytes", (uint64_t)v->held_bytes);
    kit_json_integer(json, "open_bytes", (uint64_t)fmax(0, v->open_bytes));
    kit_json_integer(json, "peak_bytes", (uint64_t)fmax(0, v->peak_bytes));
    kit_json_integer(json, "end_bytes", (uint64_t)fmax(0, v->end_bytes));
    kit_json_integer(json, "cached_bytes", (uint64_t)v->cached_bytes);
    kit_json_bool(json, "flat", v->flat);
}

int memory_line_draw(const memory_line *line, const fkv_runner_config *config, const char *subtitle, const char *path) {
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    double end = line->tokens[line->n - 1];
    double plan = (double)line->session->plan.total_bytes;
    double x[COMPUTED];
    double growing[COMPUTED];
    double with_scores[COMPUTED];
    for (int i = 0; i < COMPUTED; i++) {
        x[i] = floor(end * i / (COMPUTED - 1));
        growing[i] = pages_16bit(line, config, (uint32_t)x[i]);
        with_scores[i] = growing[i] + scores_bytes(line, config, x[i]);
    }
    double ends[2] = {0, end};
    double planned[2] = {plan, plan};
    char scores[96];
    (void)snprintf(scores, sizeof scores, "the same + scores of a %u-token chunk, f32 (computed)", config->max_step_tokens);
    const plot_line lines[] = {
        {"planned, before anything is taken", ends, planned, 2, "#8ec5ff", 9, NULL, "#3f83c6", false, NULL},
        {"growing 16-bit cache (computed)", x, growing, COMPUTED, "#c2410c", 2, "9 5", NULL, false, NULL},
        {on_cpu ? "resident, measured after every step" : "in use by MLX, measured after every step", line->tokens, line->bytes,
         line->n, "#0b4fb3", 2.5, NULL, NULL, false, NULL},
        {scores, x, with_scores, COMPUTED, "#9d174d", 2, "2 4", NULL, false, NULL},
    };
    plot p = {.title = "Memory of a running model against tokens held",
              .subtitle = subtitle,
              .footnote =
                  on_cpu ? "Resident: anonymous memory beyond what the process held, weights included, before the runner was "
                           "opened. Computed lines are not measured."
                         : "In use: MLX's active memory beyond what it held, weights included, before the runner was opened. "
                           "Computed lines are not measured.",
              .x = PLOT_TOKENS,
              .y = PLOT_BYTES,
              .lines = lines,
              .n_lines = sizeof lines / sizeof lines[0]};
    p.x.label = "tokens in the cache";
    p.y.label = "cache and activations";
    if (plot_write_svg(&p, path)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "cannot write the picture %s: %s", path, strerror(errno));
}

void memory_line_free(memory_line *line) {
    free(line->tokens);
    free(line->bytes);
    *line = (memory_line){0};
}
