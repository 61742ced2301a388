/* Entry point of the flatkv program: dispatches to the commands. */
#include "../kit/suggestion.h"
#include "cli.h"

#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"pull", cli_pull, "downloads a model from Hugging Face"},
    {"run", cli_run, "completes a prompt or starts a conversation"},
    {"serve", cli_serve, "serves models over HTTP with the APIs of OpenAI, Anthropic and Ollama"},
    {"plan", cli_plan, "prints the memory that a model and its cache need, and whether it fits"},
    {"ppl", cli_ppl, "measures perplexity on a text, and the KL divergence from a 16-bit cache"},
    {"niah", cli_niah, "needle in a haystack: plants facts in a long text and asks for them"},
    {"bench", cli_bench, "benchmarks: prefill and decode rates, memory while the context fills (flat), attention time (attn)"},
    {"calibrate", cli_calibrate, "writes a calibration file for --codecs calibrated"},
    {"embed", cli_embed, "prints the embedding of a text"},
    {"tokenize", cli_tokenize, "prints the tokens of a text"},
    {"pages", cli_pages, "verifies or shows a saved page file"},
    {"doctor", cli_doctor, "checks this machine and the program, for bug reports"},
    {"models", cli_models, "lists known and local models and the memory that each needs"},
};

static const char GLOSSARY[] = "Glossary of terms: man flatkv, or docs/glossary.md in the source tree";

static void usage(FILE *out) {
    fprintf(out,
            "flatkv %s: runs language models with a KV cache of constant memory\n\n"
            "usage: flatkv COMMAND [options]     (flatkv COMMAND --help lists the options of a command)\n\n",
            fkv_version());
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(out,
            "\n  --version, --help\n\n"
            "exit codes: 0 success, 1 failure, 2 invalid command line, 3 not enough memory, 130 interrupted\n\n"
            "%s\n",
            GLOSSARY);
}

static bool asks_for_help(const char *word) {
    return strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

/* Returns `code`, or a failure code if `code` is EXIT_GOOD but standard output could not be written. */
static int check_output(int code) {
    bool good = fflush(stdout) == 0 && ferror(stdout) == 0;
    return good || code != EXIT_GOOD ? code : kit_fail(EXIT_FAILED, "cannot write to standard output");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 && argc > 2 && !asks_for_help(argv[2])) { /* "help run" means "run --help" */
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
    kit_options_set_footer(GLOSSARY);
    suggestion near = {.typed = argv[1]};
    char hint[96];
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return check_output(commands[i].run(argc - 1, argv + 1));
        suggestion_offer(&near, commands[i].name);
    }
    return kit_fail(EXIT_USAGE, "unknown command %s%s; 'flatkv --help' lists the commands", argv[1],
                    suggestion_hint(&near, "", hint));
}
