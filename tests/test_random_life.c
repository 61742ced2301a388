/* Random lives through the public header, every answer against a plain reference: test_random_life [--seed N] [--steps N |
 * --seconds S]
 * [--only I].
 *
 * A life is one random configuration in one or two caches of the same identity, and then steps, forks, truncates, prefixes,
 * files, aborts and refusals in any order (life_operations.h). What the cache must hold is kept as plain lists of tokens
 * (life_cache.h); what it must answer is computed from docs/page_format.md and the definition of attention (life_format.h,
 * life_reference.h). Life i of a seed is always the same one: --only i runs it alone.
 */
#include "life_operations.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DEFAULT_STEPS = 3000, MEMORY_OF_A_LIFE = 400 * 1000 * 1000 };

static struct {
    uint64_t seed;
    uint64_t life;
    uint64_t operation;
    const life_config *config;
    char folder[LIFE_PATH];
} now;

static void forget_folder(void) {
    char command[LIFE_PATH];
    for (uint32_t i = 0; i < LIFE_FILES + 1; i++) {
        if (i < LIFE_FILES)
            (void)snprintf(command, sizeof command, "%.480s/%u.fkv", now.folder, i);
        else
            (void)snprintf(command, sizeof command, "%.480s/damaged.fkv", now.folder);
        (void)remove(command);
    }
    (void)rmdir(now.folder);
}

void life_fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    (void)fflush(stdout);
    printf("FAILED: ");
    (void)vprintf(format, values);
    va_end(values);
    printf("\n  in operation %" PRIu64 "; again: test_random_life --seed %" PRIu64 " --only %" PRIu64 "\n  %s\n", now.operation,
           now.seed, now.life, now.config != NULL ? life_config_text(now.config) : "");
    (void)fflush(stdout);
    forget_folder();
    exit(EXIT_FAILURE);
}

typedef struct options {
    uint64_t seed;
    uint64_t steps;
    uint64_t seconds; /* 0: steps count */
    int64_t only;     /* -1: all */
} options;

static double clock_seconds(void) {
    struct timespec at;
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void *take(size_t bytes) {
    void *block = calloc(1, bytes + 1);
    if (block == NULL) life_fail("no memory");
    return block;
}

static void open_life(life *l, const fkv_isa *isas, uint32_t n_isas, life_counts *counts) {
    *l = (life){.random = {life_mix(now.seed, now.life)}, .folder = now.folder, .counts = counts};
    life_config_draw(&l->random, isas, n_isas, &l->config);
    now.config = &l->config;
    life_config sibling;
    life_config_sibling(&l->random, &l->config, &sibling);
    l->n_caches = life_chance(&l->random, 60) ? LIFE_CACHES : 1;
    uint32_t most = l->config.base.max_tokens > sibling.base.max_tokens ? l->config.base.max_tokens : sibling.base.max_tokens;
    uint32_t most_rows = l->config.base.max_step_tokens > sibling.base.max_step_tokens ? l->config.base.max_step_tokens
                                                                                       : sibling.base.max_step_tokens;
    life_world_open(&l->world, &l->config, most + 1);
    for (uint32_t i = 0; i < l->n_caches; i++) life_cache_open(&l->caches[i], &l->world, i == 0 ? &l->config : &sibling);
    for (uint32_t i = 0; i < l->config.base.n_layers; i++)
        for (uint32_t what = 0; what < 3; what++)
            if (life_rows_bytes(&l->world, i, what) > l->rows_bytes) l->rows_bytes = life_rows_bytes(&l->world, i, what);
    l->rows_bytes *= most_rows;
    for (uint32_t i = 0; i < 4; i++) l->rows[i] = take(l->rows_bytes);
    l->ids = take((most + 64) * sizeof *l->ids);
}

static void close_life(life *l) {
    life_counts *n = l->counts;
    for (uint32_t i = 0; i < l->n_caches; i++) life_cache_close(&l->caches[i]);
    life_files_forget(l);
    n->configurations++;
    n->answers += l->world.n_answers;
    n->sealed += l->world.n_sealed;
    n->calibrated += l->world.n_calibrated;
    n->turbo += l->world.n_turbo;
    n->same += l->world.n_same;
    n->slack += l->world.n_slack;
    n->beyond += l->world.n_beyond;
    life_world_close(&l->world);
    for (uint32_t i = 0; i < 4; i++) free(l->rows[i]);
    free(l->ids);
    now.config = NULL;
}

static void live(const options *o, double end, const fkv_isa *isas, uint32_t n_isas, life_counts *counts) {
    static life l;
    open_life(&l, isas, n_isas, counts);
    uint32_t n_operations = life_between(&l.random, 50, 400);
    for (now.operation = 0; now.operation < n_operations && l.world.memory < MEMORY_OF_A_LIFE; now.operation++) {
        if (o->only < 0 && o->seconds == 0 && counts->steps >= o->steps) break;
        if (o->only < 0 && o->seconds != 0 && clock_seconds() >= end) break;
        life_operate(&l);
    }
    close_life(&l);
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

static void print_counts(const life_counts *n) {
    printf("configurations %" PRIu64 " steps %" PRIu64 " commits %" PRIu64 " aborts %" PRIu64 " answers %" PRIu64
           " (over sealed pages %" PRIu64 ", of them calibrated %" PRIu64 ", TurboQuant %" PRIu64 ", same bits again %" PRIu64
           ", with slack %" PRIu64 ", beyond float %" PRIu64 ") opened %" PRIu64 " hits %" PRIu64 " forks %" PRIu64
           " truncates %" PRIu64 " gone %" PRIu64 " (open pages alone %" PRIu64 ") inserts %" PRIu64 " clears %" PRIu64
           " closes %" PRIu64 " (in steps %" PRIu64 ") reserves %" PRIu64 " saves %" PRIu64 " loads %" PRIu64 " damaged %" PRIu64
           " foreign %" PRIu64 " with NaN %" PRIu64 " refusals %" PRIu64 " bad calls %" PRIu64 "\n",
           n->configurations, n->steps, n->commits, n->aborts, n->answers, n->sealed, n->calibrated, n->turbo, n->same, n->slack,
           n->beyond, n->opened, n->hits, n->forks, n->truncates, n->gone, n->gone_open, n->inserts, n->clears, n->closes,
           n->closes_in_steps, n->reserves, n->saves, n->loads, n->damaged, n->foreign, n->nan_files, n->refusals, n->bad_calls);
}

/* A run of some length has seen everything, or it tests less than it says. */
static bool saw_everything(const life_counts *n) {
    return n->sealed > 0 && n->calibrated > 0 && n->turbo > 0 && n->gone_open > 0 && n->aborts > 0 && n->same > 0 &&
           n->hits > 0 && n->forks > 0 && n->truncates > 0 && n->gone > 0 && n->clears > 0 && n->saves > 0 && n->loads > 0 &&
           n->damaged > 0 && n->foreign > 0 && n->nan_files > 0 && n->closes_in_steps > 0 && n->reserves > 0 && n->refusals > 0 &&
           n->bad_calls > 0;
}

int main(int argc, char **argv) {
    options o;
    if (!read_options(argc, argv, &o)) {
        printf("usage: test_random_life [--seed N] [--steps N | --seconds S] [--only I]\n");
        return EXIT_FAILURE;
    }
    now.seed = o.seed;
    const char *parent = getenv("TMPDIR");
    (void)snprintf(now.folder, sizeof now.folder, "%s/flatkv-life-XXXXXX", parent != NULL && parent[0] != 0 ? parent : "/tmp");
    if (mkdtemp(now.folder) == NULL) life_fail("no folder for the files of the test");
    fkv_isa isas[LIFE_MAX_ISAS];
    uint32_t n_isas = life_isas(isas);
    life_counts counts = {0};
    double end = clock_seconds() + (double)o.seconds;
    printf("seed %" PRIu64 "\n", o.seed);
    for (now.life = o.only < 0 ? 0 : (uint64_t)o.only;; now.life++) {
        live(&o, end, isas, n_isas, &counts);
        if (o.only >= 0 || (o.seconds == 0 ? counts.steps >= o.steps : clock_seconds() >= end)) break;
    }
    forget_folder();
    print_counts(&counts);
    if (o.only < 0 && counts.steps >= DEFAULT_STEPS && !saw_everything(&counts)) {
        printf("FAILED: some kind of operation never happened\n");
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
