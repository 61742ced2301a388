/* See hub_progress.h. */
#include "hub_progress.h"

#include "../kit/numbers.h"
#include "../kit/program.h"
#include "../kit/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static const double REDRAW_INTERVAL = 0.15; /* seconds */
static const double LINE_INTERVAL = 10;
static const double NOTE_INTERVAL = 3;
static const double RATE_INTERVAL = 0.5;
static const double RATE_WEIGHT = 0.2;            /* weight of the newest interval in the smoothed rate */
static const uint64_t MIN_RATE_BYTES = 256 << 10; /* number of received bytes at which the rate measurement starts */
static const double MAX_SECONDS_LEFT = 360000;    /* longest remaining time that is displayed, in seconds */

hub_progress hub_progress_begin(uint64_t total) {
    double now = kit_seconds();
    return (hub_progress){.total = total,
                          .shown = now,
                          .noted = now - NOTE_INTERVAL,
                          .next_line = total / 10,
                          .rate_time = now,
                          .terminal = isatty(STDERR_FILENO) != 0};
}

/* Updates the smoothed transfer rate. The first MIN_RATE_BYTES bytes are not measured, because the first responses are small and
 * slow. */
static void update_rate(hub_progress *p, uint64_t fetched, double now) {
    double seconds = now - p->rate_time;
    bool started = fetched >= MIN_RATE_BYTES;
    if (started && seconds < RATE_INTERVAL) return;
    double rate = started ? (double)(fetched - p->rate_from) / seconds : 0;
    p->rate = p->rate > 0 ? p->rate + RATE_WEIGHT * (rate - p->rate) : rate;
    p->rate_from = fetched;
    p->rate_time = now;
}

/* Writes a progress message such as "1.20 GB of 4.90 GB  45.0 MB/s  1:22 left". */
static void describe(const hub_progress *p, char text[128]) {
    char done[32];
    char total[32];
    char rate[32];
    int n = snprintf(text, 128, "%s of %s", kit_bytes(p->done, done), kit_bytes(p->total, total));
    if (!(p->rate >= 1)) return;
    double left = (double)(p->total - p->done) / p->rate;
    if (left >= MAX_SECONDS_LEFT) return;
    unsigned long seconds = (unsigned long)left;
    n += snprintf(text + n, 128 - (size_t)n, "  %s/s", kit_bytes((uint64_t)p->rate, rate));
    if (seconds >= 3600)
        (void)snprintf(text + n, 128 - (size_t)n, "  %lu:%02lu:%02lu left", seconds / 3600, seconds / 60 % 60, seconds % 60);
    else
        (void)snprintf(text + n, 128 - (size_t)n, "  %lu:%02lu left", seconds / 60, seconds % 60);
}

static double percent(const hub_progress *p) { return p->total > 0 ? 100.0 * (double)p->done / (double)p->total : 100; }

static void draw(hub_progress *p) {
    enum { BAR = 24 };
    char bar[BAR + 1];
    char text[128];
    describe(p, text);
    for (int i = 0; i < BAR; i++) bar[i] = i < (int)percent(p) * BAR / 100 ? '#' : '.';
    bar[BAR] = 0;
    (void)fprintf(stderr, "\r\x1b[K%s %3d %%  %s", bar, (int)percent(p), text);
    (void)fflush(stderr);
    p->drawn = true;
}

void hub_progress_show(hub_progress *p, uint64_t done, uint64_t fetched) {
    double now = kit_seconds();
    p->done = done < p->total ? done : p->total;
    update_rate(p, fetched, now);
    if (p->terminal) {
        if (now - p->shown < REDRAW_INTERVAL) return;
        draw(p);
    } else {
        if (p->done < p->next_line || now - p->shown < LINE_INTERVAL) return;
        char text[128];
        describe(p, text);
        (void)fprintf(stderr, "%3d %%  %s\n", (int)percent(p), text);
        p->next_line = p->done + p->total / 10;
    }
    p->shown = now;
}

void hub_progress_end(hub_progress *p) {
    if (p->drawn) (void)fputs("\r\x1b[K", stderr);
    p->drawn = false;
}

static void print_note(const char *format, va_list values) {
    char text[1024];
    (void)vsnprintf(text, sizeof text, format, values);
    (void)fputc('[', stderr);
    utf8_print_escaped(stderr, text);
    (void)fputs("]\n", stderr);
}

void hub_note(const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_note(format, values);
    va_end(values);
}

void hub_progress_note(hub_progress *p, const char *format, ...) {
    va_list values;
    double now = kit_seconds();
    if (now - p->noted < NOTE_INTERVAL) return;
    p->noted = now;
    hub_progress_end(p);
    va_start(values, format);
    print_note(format, values);
    va_end(values);
}
