/* The flatkv program: finds the command and holds what the commands share. */
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

int cli_fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("flatkv: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return code;
}

bool cli_number(const char *option, const char *text, uint64_t max, uint64_t *out) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    unsigned shift = 0;
    if (end != NULL && end != text) {
        if (*end == 'K' || *end == 'k') shift = 10;
        if (*end == 'M' || *end == 'm') shift = 20;
        if (*end == 'G' || *end == 'g') shift = 30;
        if (shift != 0) end++;
    }
    if (end == NULL || *end != 0 || errno != 0 || value > max >> shift) {
        cli_fail(0, "%s %s: a whole number up to %llu is needed", option, text, (unsigned long long)max);
        return false;
    }
    *out = (uint64_t)value << shift;
    return true;
}

const char *cli_bytes(uint64_t bytes, char text[32]) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    snprintf(text, 32,
             unit == 0       ? "%.0f %s"
             : value < 9.995 ? "%.2f %s"
             : value < 99.95 ? "%.1f %s"
                             : "%.0f %s",
             value, units[unit]);
    return text;
}

void cli_json_string(FILE *out, const char *text) {
    fputc('"', out);
    for (const unsigned char *p = (const unsigned char *)text; *p != 0; p++) {
        if (*p == '"' || *p == '\\')
            fprintf(out, "\\%c", *p);
        else if (*p < 0x20)
            fprintf(out, "\\u%04x", *p);
        else
            fputc(*p, out);
    }
    fputc('"', out);
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"plan", cli_plan, "the bytes a cache will take, against 16-bit and against this machine"},
    {"pages", cli_pages, "verify or show a saved page file"},
};

static void usage(FILE *out) {
    fprintf(out,
            "flatkv %s: a KV cache whose memory is a flat line\n\n"
            "usage: flatkv COMMAND [options]     (flatkv COMMAND --help tells more)\n\n",
            fkv_version());
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].help);
    fprintf(out, "\n  --version, --help\n\nexit codes: 0 good, 1 failed, 2 wrong usage, 3 does not fit this machine\n");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return EXIT_GOOD;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("flatkv %s\n", fkv_version());
        return EXIT_GOOD;
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    return cli_fail(EXIT_USAGE, "no command %s: flatkv --help lists them", argv[1]);
}
