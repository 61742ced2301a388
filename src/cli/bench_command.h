/* Benchmarks of the flatkv program. All functions have the signature of a command, as described in cli.h. */
#ifndef FKV_CLI_BENCH_COMMAND_H
#define FKV_CLI_BENCH_COMMAND_H

int bench_speed(int argc, char **argv); /* runs flatkv bench without a subcommand */
int bench_flat(int argc, char **argv);
int bench_attention(int argc, char **argv);

#endif
