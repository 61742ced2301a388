/* Runs random operations on the pager and its reference model. Called as test_pager_model [seed] [n_ops]. Without a seed, runs
 * once with a fixed seed and once with a seed from the clock. Prints each seed, so that a failure can be reproduced. */
#include "pager_model.h"
#include "sanitized.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DEFAULT_OPERATIONS = TEST_SANITIZED ? 25000 : 100000 };

static bool run(uint64_t seed, uint64_t n_operations, pager_model_tally *sum) {
    bool good = true;
    for (uint32_t s = 0; s < pager_model_n_specs && good; s++) {
        pager_model *model = pager_model_open(&pager_model_specs[s]);
        pager_choices choices = pager_choices_seeded(seed * pager_model_n_specs + s);
        for (uint64_t i = 0; i < n_operations / pager_model_n_specs + 1 && good; i++) good = pager_model_operate(model, &choices);
        if (!good) printf("seed %" PRIu64 ", %s: %s\n", seed, pager_model_specs[s].name, pager_model_fault(model));
        pager_model_tally_add(sum, pager_model_tallied(model));
        pager_model_close(model);
    }
    return good;
}

int main(int argc, char **argv) {
    uint64_t seeds[2] = {20240229, (uint64_t)time(NULL)};
    uint32_t n_seeds = 2;
    if (argc > 1) {
        seeds[0] = strtoull(argv[1], NULL, 10);
        n_seeds = 1;
    }
    uint64_t n_operations = argc > 2 ? strtoull(argv[2], NULL, 10) : DEFAULT_OPERATIONS;

    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < n_seeds; i++) {
        pager_model_tally t = {0};
        printf("seed %" PRIu64 ", %" PRIu64 " operations\n", seeds[i], n_operations);
        bool good = run(seeds[i], n_operations, &t);
        printf("  opened %" PRIu64 " (shared %" PRIu64 ", refused %" PRIu64 ") forked %" PRIu64 " truncated %" PRIu64
               " (refused %" PRIu64 ", gone %" PRIu64 ") inserted %" PRIu64 " (contradicted %" PRIu64 ") cleared %" PRIu64
               " filled %" PRIu64 " closed %" PRIu64 "\n  committed %" PRIu64 " aborted %" PRIu64 " copies %" PRIu64
               " failed calls %" PRIu64 "\n  reserved %" PRIu64 " (refused %" PRIu64 ") closed in a step %" PRIu64
               " matched %" PRIu64 " discarded %" PRIu64 "\n  snapshots %" PRIu64 ", truncated to a snapshot %" PRIu64 "\n",
               t.opened, t.shared, t.refused, t.forked, t.truncated, t.truncate_refused, t.gone, t.inserted, t.contradicted,
               t.cleared, t.filled, t.closed, t.committed, t.aborted, t.copies, t.bad_calls, t.reserved, t.reserve_refused,
               t.closed_in_step, t.matched, t.discarded, t.snapshots, t.to_snapshot);
        bool seen = t.shared > 0 && t.refused > 0 && t.forked > 0 && t.truncated > 0 && t.truncate_refused > 0 && t.gone > 0 &&
                    t.inserted > 0 && t.contradicted > 0 && t.cleared > 0 && t.filled > 0 && t.closed > 0 && t.committed > 0 &&
                    t.aborted > 0 && t.copies > 0 && t.bad_calls > 0 && t.reserved > 0 && t.reserve_refused > 0 &&
                    t.closed_in_step > 0 && t.matched > 0 && t.discarded > 0 && t.snapshots > 0 && t.to_snapshot > 0;
        /* with another seed, a rare kind may not occur */
        if (good && !seen && argc == 1 && i == 0 && n_operations >= DEFAULT_OPERATIONS) {
            printf("seed %" PRIu64 ": some kind of operation never occurred\n", seeds[i]);
            good = false;
        }
        n_failed += !good;
    }
    printf("%u passed, %u failed\n", n_seeds - n_failed, n_failed);
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
