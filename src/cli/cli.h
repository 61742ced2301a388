/* Declarations shared by all commands of the flatkv program: reporting of library errors, handling of Ctrl-C, and the commands
 * themselves. The program uses only the public headers of the library.
 *
 * Every command has the signature int command(int argc, char **argv), where argv[0] is the command name. It prints results to
 * standard output and everything else to standard error, and returns one of the exit codes of kit/program.h. Helpers that can
 * fail follow the same convention: if the exit code is not EXIT_GOOD, the error has already been printed.
 */
#ifndef FKV_CLI_H
#define FKV_CLI_H

#include "../kit/json.h"
#include "../kit/options.h"
#include "../kit/program.h"

#include <flatkv/flatkv.h>

#include <stdio.h>

/* Prints the library's error message for the call that just returned `status` (not FKV_OK). Returns the matching exit code. */
int cli_fail_status(fkv_status status);

/* Translates a library message for users of the program: replaces field names with option names, and long byte counts with sizes
 * in MB or GB. */
void cli_translate_message(const char *message, char *out, size_t capacity);

/* Sets the option name that replaces max_seqs in messages. Commands without such an option run a single sequence and never print
 * max_seqs. */
void cli_name_sequences(const char *option);

/* After the first call of cli_catch_interrupts(), Ctrl-C sets a flag instead of ending the program. A second Ctrl-C ends the
 * program. cli_interrupted() returns the flag. */
void cli_catch_interrupts(void);
bool cli_interrupted(void);
void cli_clear_interrupt(void); /* clears the flag, so that the next Ctrl-C does not end the program */

int cli_bench(int argc, char **argv);
int cli_calibrate(int argc, char **argv);
int cli_doctor(int argc, char **argv);
int cli_models(int argc, char **argv);
int cli_niah(int argc, char **argv);
int cli_pages(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_ppl(int argc, char **argv);
int cli_pull(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_serve(int argc, char **argv);
int cli_embed(int argc, char **argv);
int cli_tokenize(int argc, char **argv);

#endif
