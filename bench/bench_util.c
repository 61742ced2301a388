/* See bench_util.h. */
#include "bench_util.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void *bench_take(size_t bytes) {
    size_t rounded = (bytes + 64) / 64 * 64;
    void *block = aligned_alloc(64, rounded);
    if (block == NULL) kit_die(EXIT_NO_FIT, "cannot allocate a buffer of %zu bytes", rounded);
    memset(block, 0, rounded);
    return block;
}

const char *bench_bytes(double bytes, char text[BENCH_TEXT]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    while (fabs(bytes) >= 1024 && unit + 1 < sizeof units / sizeof units[0]) {
        bytes /= 1024;
        unit++;
    }
    (void)snprintf(text, BENCH_TEXT, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return text;
}

uint32_t bench_numbers(const char *option, const char *list, uint32_t max, uint32_t *numbers, uint32_t room) {
    char word[KIT_WORD];
    uint32_t n = 0;
    for (; kit_next_word(&list, word); n++) {
        uint64_t value = 0;
        if (n == room) kit_die(EXIT_USAGE, "%s: more than %u values", option, room);
        if (!kit_number(option, word, max, &value)) exit(EXIT_USAGE);
        if (value == 0) kit_die(EXIT_USAGE, "%s must be at least 1 (got 0)", option);
        numbers[n] = (uint32_t)value;
    }
    return n;
}
