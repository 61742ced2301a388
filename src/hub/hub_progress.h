/* Progress of a download on standard error: one line that is redrawn on a terminal, otherwise a line for every 10 %, at most one
 * every 10 seconds.
 */
#ifndef FKV_HUB_PROGRESS_H
#define FKV_HUB_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hub_progress {
    uint64_t total;     /* size of the download in bytes, including data from an earlier, interrupted download */
    uint64_t done;      /* bytes */
    double shown;       /* kit_seconds() when the last line was printed; 0 if there is none yet */
    double noted;       /* kit_seconds() when the last note was printed */
    uint64_t next_line; /* number of complete bytes at which the next line is printed, if standard error is not a terminal */
    double rate;        /* smoothed rate, in bytes per second */
    uint64_t rate_from; /* number of fetched bytes, and kit_seconds(), when the rate was last updated */
    double rate_time;
    bool terminal;
    bool drawn; /* the terminal shows a progress line that must be erased */
} hub_progress;

hub_progress hub_progress_begin(uint64_t total);

/* Shows `done`, the number of complete bytes, and the transfer rate. `fetched` is the number of bytes received since the start,
 * from which the rate is computed. May be called very often, because most calls return immediately. */
void hub_progress_show(hub_progress *p, uint64_t done, uint64_t fetched);

/* Prints a line such as "[connection lost: trying again in 2 s]" above the progress, at most one every 3 seconds. */
void hub_progress_note(hub_progress *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints a line in brackets to standard error, with control characters escaped. */
void hub_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Erases the line. */
void hub_progress_end(hub_progress *p);

#endif
