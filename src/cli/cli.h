/* What the commands of the flatkv program share beside src/kit: the library's failures, Ctrl-C, and the commands themselves.
 * Public headers only.
 *
 * Every command is int command(int argc, char **argv), argv[0] being its name; it prints results on standard output, everything
 * else on standard error, and returns an exit code of kit/program.h. Helpers that can fail do the same: they return an exit code,
 * and where it is not EXIT_GOOD they have already said why.
 */
#ifndef FKV_CLI_H
#define FKV_CLI_H

#include "../kit/json.h"
#include "../kit/options.h"
#include "../kit/program.h"

#include <flatkv/flatkv.h>

#include <stdio.h>

/* The library's words about the call that just returned `status`, which is not FKV_OK; returns the exit code that fits. */
int cli_fail_status(fkv_status status);

/* A message of the library in the words of the program: options instead of fields, MB and GB instead of long numbers. */
void cli_in_options(const char *message, char *out, size_t room);

/* What this command calls max_seqs; commands without such an option have one sequence, and no message speaks of it. */
void cli_name_sequences(const char *option);

/* Ctrl-C. From the first call on an interrupt sets a flag instead of ending the program; a second one ends it. */
void cli_catch_interrupts(void);
bool cli_interrupted(void);
void cli_forget_interrupt(void); /* and catch the next one */

int cli_bench(int argc, char **argv);
int cli_calibrate(int argc, char **argv);
int cli_models(int argc, char **argv);
int cli_niah(int argc, char **argv);
int cli_pages(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_ppl(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_serve(int argc, char **argv);
int cli_tokenize(int argc, char **argv);

#endif
