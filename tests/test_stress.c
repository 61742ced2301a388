/* Stress test of the public API that checks every output against a reference. Called as test_stress [--seed N] [--steps N |
 * --seconds S] [--only I].
 *
 * A run opens one or two caches of one random configuration and performs steps, forks, truncations, prefix operations, page-file
 * operations, aborts and invalid calls in random order (stress_operations.h). The expected contents are lists of tokens
 * (stress_cache.h). The expected outputs are computed from docs/page_format.md and the definition of attention (stress_format.h,
 * stress_reference.h). With the same seed, run number I is always the same; --only I repeats only this run.
 */
#include "stress_operations.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DEFAULT_STEPS = 3000, MAX_RUN_BYTES = 400 * 1000 * 1000 };

static struct {
    uint64_t seed;
    uint64_t run;
    uint64_t operation;
    const stress_config *config;
    char folder[STRESS_PATH];
} now;

static void forget_folder(void) {
    char command[STRESS_PATH];
    for (uint32_t i = 0; i < STRESS_FILES + 1; i++) {
        if (i < STRESS_FILES)
            (void)snprintf(command, sizeof command, "%.480s/%u.fkv", now.folder, i);
        else
            (void)snprintf(command, sizeof command, "%.480s/damaged.fkv", now.folder);
        (void)remove(command);
    }
    (void)rmdir(now.folder);
}

void stress_fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    (void)fflush(stdout);
    printf("FAILED: ");
    (void)vprintf(format, values);
    va_end(values);
    printf("\n  in operation %" PRIu64 "; to repeat: test_stress --seed %" PRIu64 " --only %" PRIu64 "\n  %s\n", now.operation,
           now.seed, now.run, now.config != NULL ? stress_config_text(now.config) : "");
    (void)fflush(stdout);
    forget_folder();
    exit(EXIT_FAILURE);
}

typedef struct options {
    uint64_t seed;
    uint64_t steps;
    uint64_t seconds; /* time limit in seconds; if 0, the test stops after `steps` steps */
    int64_t only;     /* number of the only run to execute; -1 for all runs */
} options;

static double clock_seconds(void) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void *allocate(size_t bytes) {
    void *block = calloc(1, bytes + 1);
    if (block == NULL) stress_fail("out of memory");
    return block;
}

static void open_stress(stress_run *l, const fkv_isa *isas, uint32_t n_isas, stress_counts *counts) {
    *l = (stress_run){.random = {stress_mix(now.seed, now.run)}, .folder = now.folder, .counts = counts};
    stress_config_draw(&l->random, isas, n_isas, &l->config);
    now.config = &l->config;
    stress_config sibling;
    stress_config_sibling(&l->random, &l->config, &sibling);
    l->n_caches = stress_chance(&l->random, 60) ? STRESS_CACHES : 1;
    uint32_t most = l->config.base.max_tokens > sibling.base.max_tokens ? l->config.base.max_tokens : sibling.base.max_tokens;
    uint32_t most_rows = l->config.base.max_step_tokens > sibling.base.max_step_tokens ? l->config.base.max_step_tokens
                                                                                       : sibling.base.max_step_tokens;
    stress_fixture_open(&l->fixture, &l->config, most + 1);
    for (uint32_t i = 0; i < l->n_caches; i++) stress_cache_open(&l->caches[i], &l->fixture, i == 0 ? &l->config : &sibling);
    for (uint32_t i = 0; i < l->config.base.n_layers; i++)
        for (uint32_t what = 0; what < 3; what++)
            if (stress_rows_bytes(&l->fixture, i, what) > l->rows_bytes) l->rows_bytes = stress_rows_bytes(&l->fixture, i, what);
    l->rows_bytes *= most_rows;
    for (uint32_t i = 0; i < 4; i++) l->rows[i] = allocate(l->rows_bytes);
    l->ids = allocate((most + 64) * sizeof *l->ids);
}

static void close_stress(stress_run *l) {
    stress_counts *n = l->counts;
    for (uint32_t i = 0; i < l->n_caches; i++) stress_cache_close(&l->caches[i]);
    stress_files_forget(l);
    stress_prefixes_forget(l);
    n->configurations++;
    n->answers += l->fixture.n_answers;
    n->sealed += l->fixture.n_sealed;
    n->calibrated += l->fixture.n_calibrated;
    n->latent += l->fixture.n_latent;
    n->sealed_latent += l->fixture.n_sealed_latent;
    n->turbo += l->fixture.n_turbo;
    n->same += l->fixture.n_same;
    n->slack += l->fixture.n_slack;
    n->beyond += l->fixture.n_beyond;
    stress_fixture_close(&l->fixture);
    for (uint32_t i = 0; i < 4; i++) free(l->rows[i]);
    free(l->ids);
    now.config = NULL;
}

static void run_configuration(const options *o, double end, const fkv_isa *isas, uint32_t n_isas, stress_counts *counts) {
    static stress_run l;
    open_stress(&l, isas, n_isas, counts);
    uint32_t n_operations = stress_between(&l.random, 50, 400);
    for (now.operation = 0; now.operation < n_operations && l.fixture.memory < MAX_RUN_BYTES; now.operation++) {
        if (o->only < 0 && o->seconds == 0 && counts->steps >= o->steps) break;
        if (o->only < 0 && o->seconds != 0 && clock_seconds() >= end) break;
        stress_operate(&l);
    }
    close_stress(&l);
}

static bool read_options(int argc, char **argv, options *o) {
    *o = (options){.seed = 20261115, .steps = DEFAULT_STEPS, .only = -1};
    for (int i = 1; i < argc; i += 2) {
        char *end = NULL;
        errno = 0;
        uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], &end, 10) : 0;
        if (i + 1 == argc || errno != 0 || end == argv[i + 1] || *end != 0) return false;
        if (strcmp(argv[i], "--seed") == 0)
            o->seed = value;
        else if (strcmp(argv[i], "--steps") == 0)
            o->steps = value;
        else if (strcmp(argv[i], "--seconds") == 0)
            o->seconds = value;
        else if (strcmp(argv[i], "--only") == 0)
            o->only = (int64_t)value;
        else
            return false;
    }
    return true;
}

static void print_counts(const stress_counts *n) {
    printf("configurations %" PRIu64 " steps %" PRIu64 " commits %" PRIu64 " aborts %" PRIu64 " answers %" PRIu64
           " (over sealed pages %" PRIu64 ", of them calibrated %" PRIu64 " and latent %" PRIu64 ", latent %" PRIu64
           ", TurboQuant %" PRIu64 ", bit-identical again %" PRIu64 ", with slack %" PRIu64 ", beyond float %" PRIu64
           ") opened %" PRIu64 " hits %" PRIu64 " forks %" PRIu64 " truncates %" PRIu64 " gone %" PRIu64
           " (open pages alone %" PRIu64 ") inserts %" PRIu64 " clears %" PRIu64 " closes %" PRIu64 " (in steps %" PRIu64
           ") reserves %" PRIu64 " saves %" PRIu64 " loads %" PRIu64 " damaged %" PRIu64 " foreign %" PRIu64 " with NaN %" PRIu64
           " refusals %" PRIu64 " bad calls %" PRIu64 " states %" PRIu64 " (hits %" PRIu64 " truncates %" PRIu64 " gone %" PRIu64
           " saves %" PRIu64 " loads %" PRIu64 " drops %" PRIu64 ") stored %" PRIu64 " restored %" PRIu64
           " (after an open page %" PRIu64 ", with a state %" PRIu64 ") wrong objects %" PRIu64 " discarded tokens %" PRIu64 "\n",
           n->configurations, n->steps, n->commits, n->aborts, n->answers, n->sealed, n->calibrated, n->sealed_latent, n->latent,
           n->turbo, n->same, n->slack, n->beyond, n->opened, n->hits, n->forks, n->truncates, n->gone, n->gone_open, n->inserts,
           n->clears, n->closes, n->closes_in_steps, n->reserves, n->saves, n->loads, n->damaged, n->foreign, n->nan_files,
           n->refusals, n->bad_calls, n->states, n->state_hits, n->state_truncates, n->state_gone, n->state_saves, n->state_loads,
           n->drops, n->stored, n->restored, n->restored_open, n->restored_states, n->wrong_objects, n->discarded);
}

/* Returns true if every kind of operation occurred. A run in which one kind is missing tests less than it should. */
static bool saw_everything(const stress_counts *n) {
    return n->sealed > 0 && n->calibrated > 0 && n->sealed_latent > 0 && n->latent > 0 && n->turbo > 0 && n->gone_open > 0 &&
           n->aborts > 0 && n->same > 0 && n->hits > 0 && n->forks > 0 && n->truncates > 0 && n->gone > 0 && n->clears > 0 &&
           n->saves > 0 && n->loads > 0 && n->damaged > 0 && n->foreign > 0 && n->nan_files > 0 && n->closes_in_steps > 0 &&
           n->reserves > 0 && n->refusals > 0 && n->bad_calls > 0 && n->states > 0 && n->state_hits > 0 &&
           n->state_truncates > 0 && n->state_gone > 0 && n->state_loads > 0 && n->drops > 0 && n->stored > 0 &&
           n->restored_open > 0 && n->restored_states > 0 && n->wrong_objects > 0 && n->discarded > 0;
}

int main(int argc, char **argv) {
    options o;
    if (!read_options(argc, argv, &o)) {
        printf("usage: test_stress [--seed N] [--steps N | --seconds S] [--only I]\n");
        return EXIT_FAILURE;
    }
    now.seed = o.seed;
    const char *parent = getenv("TMPDIR");
    (void)snprintf(now.folder, sizeof now.folder, "%s/flatkv-stress-XXXXXX", parent != NULL && parent[0] != 0 ? parent : "/tmp");
    if (mkdtemp(now.folder) == NULL) stress_fail("cannot create the temporary folder");
    fkv_isa isas[STRESS_MAX_ISAS];
    uint32_t n_isas = stress_isas(isas);
    stress_counts counts = {0};
    double end = clock_seconds() + (double)o.seconds;
    printf("seed %" PRIu64 "\n", o.seed);
    for (now.run = o.only < 0 ? 0 : (uint64_t)o.only;; now.run++) {
        run_configuration(&o, end, isas, n_isas, &counts);
        if (o.only >= 0 || (o.seconds == 0 ? counts.steps >= o.steps : clock_seconds() >= end)) break;
    }
    forget_folder();
    print_counts(&counts);
    if (o.only < 0 && counts.steps >= DEFAULT_STEPS && !saw_everything(&counts)) {
        printf("FAILED: some kind of operation never occurred\n");
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
