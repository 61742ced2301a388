/* See cli.h. */
#include "cli.h"

#include <signal.h>

int cli_fail_status(fkv_status status) {
    int code = EXIT_FAILED;
    if (status == FKV_NO_MEMORY || status == FKV_POOL_FULL) code = EXIT_NO_FIT;
    if (status == FKV_BAD_CONFIG) code = EXIT_USAGE;
    return kit_fail(code, "%s: %s", fkv_status_name(status), fkv_message());
}

/* ---- interrupts ---- */

static volatile sig_atomic_t interrupted;

static void note_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

void cli_catch_interrupts(void) {
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = (int)SA_RESETHAND};
    (void)sigemptyset(&action.sa_mask);
    (void)sigaction(SIGINT, &action, NULL);
}

bool cli_interrupted(void) { return interrupted != 0; }

void cli_forget_interrupt(void) {
    interrupted = 0;
    cli_catch_interrupts();
}
