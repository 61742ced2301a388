/* See program.h. */
#include "program.h"

#include "utf8.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *program = "flatkv";

void kit_set_program(const char *name) { program = name; }

/* Prints a message line by line, with control characters escaped. Long messages are truncated. */
static void print_message(const char *format, va_list values) {
    char message[16384];
    (void)vsnprintf(message, sizeof message, format, values);
    (void)fprintf(stderr, "%s: ", program);
    for (char *line = message, *next; line != NULL; line = next) {
        next = strchr(line, '\n');
        if (next != NULL) *next++ = 0;
        utf8_print_escaped(stderr, line);
        (void)fputc('\n', stderr);
    }
}

int kit_fail(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_message(format, values);
    va_end(values);
    return code;
}

noreturn void kit_die(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_message(format, values);
    va_end(values);
    exit(code);
}

/* ---- numbers ---- */

bool kit_number(const char *option, const char *text, uint64_t max, uint64_t *out) {
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
        (void)kit_fail(0, "%s %s: expected an integer from 0 to %llu, such as 4096 or 4K", option, text, (unsigned long long)max);
        return false;
    }
    *out = (uint64_t)value << shift;
    return true;
}

/* Returns log2 of the factor that a unit stands for: 10 for K, KB or KiB, up to 40 for T, in upper or lower case. Returns 0 if
 * there is no unit, or -1 if the unit is unknown. */
static int unit_shift(const char *unit) {
    static const char letters[] = "KMGT";
    if (unit[0] == 0 || strcasecmp(unit, "B") == 0) return 0;
    const char *letter = strchr(letters, toupper((unsigned char)unit[0]));
    bool known = letter != NULL && (unit[1] == 0 || strcasecmp(unit + 1, "B") == 0 || strcasecmp(unit + 1, "iB") == 0);
    return known ? 10 * (int)(letter - letters + 1) : -1;
}

bool kit_size(const char *option, const char *text, uint64_t max, uint64_t *out) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    int shift = end != NULL ? unit_shift(end + strspn(end, " ")) : -1;
    if (shift < 0 || errno != 0 || value > max >> shift) {
        (void)kit_fail(0, "%s %s: expected a size such as 500M, 16G or 16 GB", option, text);
        return false;
    }
    if (shift == 0 && value > 0 && value < 1024) {
        (void)kit_fail(0, "%s %s: a size of %llu bytes is too small; add a unit, such as %s %lluG", option, text, value, option,
                       value);
        return false;
    }
    *out = (uint64_t)value << shift;
    return true;
}

bool kit_next_word(const char **list, char word[KIT_WORD]) {
    if (**list == 0) return false;
    size_t length = strcspn(*list, ",");
    (void)snprintf(word, KIT_WORD, "%.*s", length < KIT_WORD ? (int)length : KIT_WORD, *list);
    *list += length + ((*list)[length] == ',');
    return true;
}

bool kit_numbers(const char *text, char separator, const uint32_t *max, uint32_t *numbers, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        char *end = NULL;
        errno = 0;
        unsigned long long value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
        if (end == NULL || errno != 0 || value < 1 || value > max[i] || *end != (i + 1 < n ? separator : 0)) return false;
        numbers[i] = (uint32_t)value;
        text = end + 1;
    }
    return true;
}

const char *kit_bytes(uint64_t bytes, char text[32]) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    (void)snprintf(text, 32,
                   unit == 0       ? "%.0f %s"
                   : value < 9.995 ? "%.2f %s"
                   : value < 99.95 ? "%.1f %s"
                                   : "%.0f %s",
                   value, units[unit]);
    return text;
}

/* ---- memory ---- */

void *kit_realloc(void *block, size_t bytes) {
    void *more = realloc(block, bytes > 0 ? bytes : 1);
    if (more == NULL) kit_die(EXIT_NO_FIT, "out of memory allocating %zu bytes", bytes);
    return more;
}

void *kit_alloc(size_t bytes) {
    void *block = kit_realloc(NULL, bytes);
    memset(block, 0, bytes);
    return block;
}
