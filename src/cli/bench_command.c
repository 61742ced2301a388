/* flatkv bench: dispatches to the benchmarks. */
#include "bench_command.h"

#include <string.h>

int cli_bench(int argc, char **argv) {
    if (argc >= 2 && strcmp(argv[1], "flat") == 0) return bench_flat(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "attn") == 0) return bench_attention(argc - 1, argv + 1);
    return bench_speed(argc, argv);
}
