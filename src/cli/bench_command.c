/* flatkv bench: dispatches to the benchmarks. */
#include "bench_command.h"

#include "cli.h"

#include <string.h>

static const char help[] = "usage: flatkv bench flat [options]   process memory while a model fills its context\n"
                           "       flatkv bench attn [options]   attention time with the head counts of a model\n"
                           "See flatkv bench flat --help and flatkv bench attn --help.\n";

int cli_bench(int argc, char **argv) {
    if (argc >= 2 && strcmp(argv[1], "flat") == 0) return bench_flat(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "attn") == 0) return bench_attention(argc - 1, argv + 1);
    bool asked = argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    fputs(help, asked ? stdout : stderr);
    return asked ? EXIT_GOOD : EXIT_USAGE;
}
