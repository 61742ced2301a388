/* See memory_line.h. */
#include "memory_line.h"

#include "../kit/plot.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double FLAT_SLACK = 1024.0 * 1024.0; /* tolerance, in bytes, for stdio buffers and stack growth */
static const double PLAN_SLACK = 0.01;

enum { COMPUTED = 33 }; /* number of points in each computed line of the plot */

bool memory_in_use(fkv_backend backend, double *bytes) {
    fkv_backend_memory device;
    process_memory process;
    bool known = backend == FKV_BACKEND_CPU ? process_memory_now(&process) : fkv_backend_memory_now(backend, &device) == FKV_OK;
    if (known) *bytes = (double)(backend == FKV_BACKEND_CPU ? process.anonymous_bytes : device.active_bytes);
    return known;
}

int memory_line_begin(memory_line *line, fkv_backend backend, size_t n_steps) {
    *line = (memory_line){.backend = backend, .capacity = n_steps + 16};
    line->tokens = kit_alloc(line->capacity * sizeof *line->tokens);
    line->bytes = kit_alloc(line->capacity * sizeof *line->bytes);
    (void)memory_in_use(backend, &line->before); /* the first call may allocate memory, so its result is discarded */
    if (memory_in_use(backend, &line->before)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "the system does not report the memory of this process");
}

void memory_line_add(memory_line *line, uint32_t tokens) {
    double now = 0;
    if (line->n == line->capacity || !memory_in_use(line->backend, &now)) return;
    line->tokens[line->n] = tokens;
    line->bytes[line->n++] = now - line->before;
}

static void sample_session(void *user) {
    memory_line *line = user;
    memory_line_add(line, line->session->length);
}

void memory_line_watch(memory_line *line, model_session *s) {
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    line->session = s;
    line->plan_bytes = (double)s->plan.total_bytes;
    line->held_bytes = (double)(on_cpu ? s->plan.total_bytes : s->plan.cache.slab_bytes);
    sample_session(line);
    s->after_step = sample_session;
    s->after_step_user = line;
}

memory_verdict memory_line_judge(const memory_line *line, bool lazy) {
    memory_verdict v = {.open_bytes = line->bytes[0], .end_bytes = line->bytes[line->n - 1], .lazy = lazy};
    double most = 0;
    double least = v.open_bytes;
    for (size_t i = 0; i < line->n; i++) {
        most = fmax(most, line->bytes[i]);
        least = fmin(least, line->bytes[i]);
    }
    v.peak_bytes = most;
    fkv_backend_memory device;
    if (line->backend != FKV_BACKEND_CPU && fkv_backend_memory_now(line->backend, &device) == FKV_OK) {
        v.peak_bytes = (double)device.peak_bytes - line->before;
        v.cached_bytes = (double)device.cached_bytes;
    }
    double slack = fmax(PLAN_SLACK * line->held_bytes, FLAT_SLACK);
    bool is_within = v.peak_bytes <= line->plan_bytes + slack && v.end_bytes + v.cached_bytes <= line->plan_bytes + slack;
    v.is_plan = is_within && (lazy || fabs(v.open_bytes - line->held_bytes) <= slack);
    v.stays = lazy || (most <= v.open_bytes + FLAT_SLACK && least >= v.open_bytes - FLAT_SLACK);
    v.flat = v.is_plan && v.stays;
    return v;
}

/* ---- 16-bit comparison ---- */

/* Returns the size, in bytes, of all pages of a 16-bit cache with `tokens` tokens. The size comes from a plan, so a windowed
 * layer counts only the pages of its window. */
static double session_pages_16bit(const void *user, uint32_t tokens) {
    const session_shape *of = user;
    fkv_runner_config wide = *of->config;
    fkv_runner_plan plan;
    wide.k = wide.v = (fkv_codec_config){.bits = 16};
    wide.rotate = FKV_ROTATE_NONE;
    wide.memory_limit = 0;
    wide.max_tokens = tokens;
    if (tokens == 0 || fkv_runner_plan_make(of->model, &wide, &plan) != FKV_OK) return 0;
    return (double)plan.cache.slab_bytes;
}

memory_comparison memory_comparison_of_session(const session_shape *of) {
    return (memory_comparison){.pages_16bit = session_pages_16bit,
                               .user = of,
                               .n_q_heads = fkv_model_about(of->model)->n_q_heads,
                               .chunk = of->config->max_step_tokens};
}

/* Returns the size, in bytes, of one layer's f32 score matrix for all query heads and one query chunk. */
static double score_bytes(const memory_comparison *wide, double tokens) { return tokens * wide->n_q_heads * wide->chunk * 4; }

/* ---- output ---- */

void memory_verdict_print(const memory_line *line, const memory_comparison *wide, const memory_verdict *v) {
    char a[32];
    double tokens = line->tokens[line->n - 1];
    double growing = wide->pages_16bit(wide->user, (uint32_t)tokens);
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    printf("%-26s %12s\n", "plan", kit_bytes((uint64_t)line->plan_bytes, a));
    printf("%-26s %12s  %+.3f %% of %s\n", on_cpu ? "resident after open" : "MLX active after open",
           kit_bytes((uint64_t)fmax(0, v->open_bytes), a), (v->open_bytes / line->held_bytes - 1) * 100,
           on_cpu ? "the plan" : "the pages");
    printf("%-26s %12s  %+.0f KiB since open, %zu samples\n", on_cpu ? "peak" : "MLX peak, also in steps",
           kit_bytes((uint64_t)fmax(0, v->peak_bytes), a), (v->peak_bytes - v->open_bytes) / 1024, line->n);
    printf("%-26s %12s  %+.0f KiB since open\n", "at the end", kit_bytes((uint64_t)fmax(0, v->end_bytes), a),
           (v->end_bytes - v->open_bytes) / 1024);
    if (!on_cpu) printf("%-26s %12s\n", "MLX buffer cache", kit_bytes((uint64_t)v->cached_bytes, a));
    printf("%-26s %12s  computed, not measured\n", "growing 16-bit cache", kit_bytes((uint64_t)growing, a));
    printf("%-26s %12s  computed, not measured\n", "  with its score matrix",
           kit_bytes((uint64_t)(growing + score_bytes(wide, tokens)), a));
    printf("%s\n", !v->flat ? "NOT FLAT" : v->lazy ? "lazy allocation: never above the plan" : "FLAT");
}

void memory_verdict_json(const memory_line *line, const memory_verdict *v, kit_json *json) {
    kit_json_integer(json, "plan_bytes", (uint64_t)line->plan_bytes);
    kit_json_integer(json, "held_bytes", (uint64_t)line->held_bytes);
    kit_json_integer(json, "open_bytes", (uint64_t)fmax(0, v->open_bytes));
    kit_json_integer(json, "peak_bytes", (uint64_t)fmax(0, v->peak_bytes));
    kit_json_integer(json, "end_bytes", (uint64_t)fmax(0, v->end_bytes));
    kit_json_integer(json, "cached_bytes", (uint64_t)v->cached_bytes);
    kit_json_bool(json, "flat", v->flat);
}

void memory_line_samples_json(const memory_line *line, kit_json *json) {
    kit_json_array(json, "samples");
    for (size_t i = 0; i < line->n; i++) {
        kit_json_array(json, NULL);
        kit_json_integer(json, NULL, (uint64_t)line->tokens[i]);
        kit_json_integer(json, NULL, (uint64_t)fmax(0, line->bytes[i]));
        kit_json_close(json);
    }
    kit_json_close(json);
}

int memory_line_draw(const memory_line *line, const memory_comparison *wide, const char *subtitle, const char *path) {
    bool on_cpu = line->backend == FKV_BACKEND_CPU;
    double end = line->tokens[line->n - 1];
    double x[COMPUTED];
    double growing[COMPUTED];
    double with_scores[COMPUTED];
    for (int i = 0; i < COMPUTED; i++) {
        x[i] = floor(end * i / (COMPUTED - 1));
        growing[i] = wide->pages_16bit(wide->user, (uint32_t)x[i]);
        with_scores[i] = growing[i] + score_bytes(wide, x[i]);
    }
    double ends[2] = {0, end};
    double planned[2] = {line->plan_bytes, line->plan_bytes};
    char scores[96];
    (void)snprintf(scores, sizeof scores, "16-bit cache + f32 scores of a %u-token chunk (computed)", wide->chunk);
    const plot_line lines[] = {
        {"plan, computed before allocation", ends, planned, 2, "#8ec5ff", 9, NULL, "#3f83c6", false, NULL},
        {"growing 16-bit cache (computed)", x, growing, COMPUTED, "#c2410c", 2, "9 5", NULL, false, NULL},
        {on_cpu ? "resident, measured after every step" : "MLX active memory, measured after every step", line->tokens,
         line->bytes, line->n, "#0b4fb3", 2.5, NULL, NULL, false, NULL},
        {scores, x, with_scores, COMPUTED, "#9d174d", 2, "2 4", NULL, false, NULL},
    };
    const char *what = line->session != NULL ? "the runner was opened, weights included" : "the cache was opened";
    char footnote[192];
    (void)snprintf(footnote, sizeof footnote, "%s minus its value before %s. Computed lines are not measured.",
                   on_cpu ? "Resident: anonymous memory" : "MLX active memory", what);
    plot p = {.title = "Memory of the process while the context fills",
              .subtitle = subtitle,
              .footnote = footnote,
              .x = PLOT_TOKENS,
              .y = PLOT_BYTES,
              .lines = lines,
              .n_lines = sizeof lines / sizeof lines[0]};
    p.x.label = "tokens in the cache";
    p.y.label = line->session != NULL ? "cache and activations" : "memory of the cache";
    if (plot_write_svg(&p, path)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "cannot write %s: %s", path, strerror(errno));
}

void memory_line_free(memory_line *line) {
    free(line->tokens);
    free(line->bytes);
    *line = (memory_line){0};
}
