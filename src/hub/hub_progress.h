/* Progress of a download on standard error: one line that is redrawn on a terminal, otherwise a line for every 10 %, at most one
 * every 10 seconds.
 */
#ifndef FKV_HUB_PROGRESS_H
#define FKV_HUB_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hub_progress {
    uint64_t total;     /* bytes, including those of an earlier, interrupted download */
    uint64_t done;      /* bytes */
    double shown;       /* kit_seconds() of the last line; 0: none yet */
    double noted;       /* kit_seconds() of the last note */
    uint64_t next_line; /* without a terminal: number of bytes at which the next line is printed */
    double rate;        /* bytes per second, smoothed */
    uint64_t rate_from; /* fetched bytes and kit_seconds() when the rate was last updated */
    double rate_time;
    bool terminal;
    bool drawn; /* a line on the terminal must be erased */
} hub_progress;

hub_progress hub_progress_begin(uint64_t total);

/* Shows the number of bytes that are complete. The rate is that of `fetched`, the bytes received since the start. Cheap; may be
 * called at any rate. */
void hub_progress_show(hub_progress *p, uint64_t done, uint64_t fetched);

/* Prints a line such as "[connection lost: trying again in 2 s]" above the progress, at most one every 3 seconds. */
void hub_progress_note(hub_progress *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints a line in brackets to standard error, with control characters escaped. */
void hub_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Erases the line. */
void hub_progress_end(hub_progress *p);

#endif
