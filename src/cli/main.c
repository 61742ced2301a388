/* The flatkv program: finds the command. */
#include "../kit/near_word.h"
#include "cli.h"

#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"run", cli_run, "completes a prompt or holds a conversation"},
    {"serve", cli_serve, "serves a model over HTTP: OpenAI's and Anthropic's APIs, many requests over one cache"},
    {"plan", cli_plan, "memory that a model or a cache will take, beside 16 bits and what this machine has"},
    {"ppl", cli_ppl, "perplexity of a text, and the KL divergence from a 16-bit cache"},
    {"niah", cli_niah, "needle in a haystack: plants facts in a long text and asks for them"},
    {"bench", cli_bench, "flat: memory while the context fills; attn: time of attention"},
    {"calibrate", cli_calibrate, "shares the bits of keys out over their channels: a file for --codecs calibrated"},
    {"tokenize", cli_tokenize, "tokens of a text"},
    {"pages", cli_pages, "verifies or shows a saved page file"},
    {"models", cli_models, "lists models by name and on this machine, and what each would cost"},
};

static void usage(FILE *out) {
    fprintf(out,
            "flatkv %s: a KV cache whose memory is a flat line\n\n"
            "usage: flatkv COMMAND [options]     (flatkv COMMAND --help lists its options)\n\n",
            fkv_version());
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(out, "\n  --version, --help\n\n"
                 "exit codes: 0 good, 1 failed, 2 wrong usage, 3 does not fit this machine or the limit, 130 interrupted\n");
}

static bool asks_for_help(const char *word) {
    return strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

/* What could not be written was not done. */
static int written(int code) {
    bool good = fflush(stdout) == 0 && ferror(stdout) == 0;
    return good || code != EXIT_GOOD ? code : kit_fail(EXIT_FAILED, "the output could not be written");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 && argc > 2 && !asks_for_help(argv[2])) { /* flatkv help run is flatkv run --help */
        argv[1] = argv[2];
        argv[2] = "--help";
        argc = 3;
    } else if (asks_for_help(argv[1])) {
        usage(stdout);
        return EXIT_GOOD;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("flatkv %s\n", fkv_version());
        return EXIT_GOOD;
    }
    near_word near = {.typed = argv[1]};
    char hint[96];
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return written(commands[i].run(argc - 1, argv + 1));
        near_word_offer(&near, commands[i].name);
    }
    return kit_fail(EXIT_USAGE, "no command %s%s; flatkv --help lists them", argv[1], near_word_hint(&near, "", hint));
}
