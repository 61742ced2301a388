/* The two benches of the program. */
#ifndef FKV_CLI_BENCH_COMMAND_H
#define FKV_CLI_BENCH_COMMAND_H

int bench_flat(int argc, char **argv);
int bench_attention(int argc, char **argv);

#endif
