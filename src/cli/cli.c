/* See cli.h. */
#include "cli.h"

#include "text.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
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

int cli_fail_status(fkv_status status) {
    int code = EXIT_FAILED;
    if (status == FKV_NO_MEMORY || status == FKV_POOL_FULL) code = EXIT_NO_FIT;
    if (status == FKV_BAD_CONFIG) code = EXIT_USAGE;
    return cli_fail(code, "%s: %s", fkv_status_name(status), fkv_message());
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

/* ---- memory of the program's own ---- */

void *cli_take_more(void *block, size_t bytes) {
    void *more = realloc(block, bytes > 0 ? bytes : 1);
    if (more == NULL) exit(cli_fail(EXIT_NO_FIT, "the system has no %zu bytes left", bytes));
    return more;
}

void *cli_take(size_t bytes) {
    void *block = cli_take_more(NULL, bytes);
    memset(block, 0, bytes);
    return block;
}

/* ---- JSON ---- */

void cli_json_set(json_t *object, const char *key, json_t *value) {
    if (value == NULL || json_object_set_new(object, key, value) != 0)
        exit(cli_fail(EXIT_FAILED, "the JSON value of %s cannot be made", key));
}

void cli_json_integer(json_t *object, const char *key, uint64_t value) {
    cli_json_set(object, key, json_integer((json_int_t)value));
}

void cli_json_real(json_t *object, const char *key, double value) {
    cli_json_set(object, key, isfinite(value) ? json_real(value) : json_null());
}

void cli_json_bool(json_t *object, const char *key, bool value) { cli_json_set(object, key, json_boolean(value)); }

void cli_json_text(json_t *object, const char *key, const char *text) {
    char *sound = text_sound(text, strlen(text));
    cli_json_set(object, key, json_string(sound));
    free(sound);
}

int cli_print_json(json_t *object) {
    bool good = json_dumpf(object, stdout, JSON_REAL_PRECISION(9) | JSON_PRESERVE_ORDER) == 0;
    json_decref(object);
    good = putchar('\n') != EOF && good;
    if (fflush(stdout) == 0 && good) return EXIT_GOOD;
    return cli_fail(EXIT_FAILED, "the JSON could not be written: %s", strerror(errno));
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
