/* See progress.h. */
#include "progress.h"

#include "../kit/numbers.h"

#include <stdio.h>
#include <unistd.h>

enum { BAR = 16, LINE = 78 };

static const double REDRAW_INTERVAL = 0.1; /* seconds */

progress_bar progress_begin(const char *what, uint64_t first, uint64_t total) {
    double now = kit_seconds();
    return (progress_bar){.what = what,
                          .first = first,
                          .done = first,
                          .total = total,
                          .start = now,
                          .shown = now,
                          .terminal = isatty(STDERR_FILENO) != 0};
}

void progress_add(progress_bar *p, uint64_t n) {
    if (p == NULL) return;
    p->done += n;
    double now = kit_seconds();
    if (!p->terminal || now - p->shown < REDRAW_INTERVAL || p->total == 0) return;
    p->shown = now;
    double share = (double)p->done / (double)p->total;
    double rate = (double)(p->done - p->first) / (now - p->start);
    double left = (double)(p->total - (p->done < p->total ? p->done : p->total)) / rate;
    char bar[BAR + 1];
    for (int i = 0; i < BAR; i++) bar[i] = i < share * (double)BAR ? '#' : '.';
    bar[BAR] = 0;
    long seconds = (long)left;
    (void)fprintf(stderr, "\r%s %s %llu of %llu tokens  %.0f t/s  %ld:%02ld left   ", p->what, bar, (unsigned long long)p->done,
                  (unsigned long long)p->total, rate, seconds / 60, seconds % 60);
    (void)fflush(stderr);
}

void progress_end(progress_bar *p) {
    if (p->terminal) (void)fprintf(stderr, "\r%*s\r", LINE, "");
}
