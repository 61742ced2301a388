/* Prints the progress of a download to standard error. On a terminal, one line is redrawn. Otherwise, a line is printed for every
 * 10 %, but at most one line every 10 seconds. */
#ifndef FKV_HUB_PROGRESS_H
#define FKV_HUB_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hub_progress {
    uint64_t total;     /* size of the download in bytes, including data from an earlier, interrupted download */
    uint64_t done;      /* bytes */
    double shown;       /* kit_seconds() when the progress was last printed; initially the start time */
    double noted;       /* kit_seconds() when the last note was printed */
    uint64_t next_line; /* value of `done` at which the next line is printed if standard error is not a terminal */
    double rate;        /* smoothed rate, in bytes per second */
    uint64_t rate_from; /* number of fetched bytes and kit_seconds() when the rate was last updated */
    double rate_time;
    bool terminal;
    bool drawn; /* true if the terminal shows a progress line, which must be erased before other output */
} hub_progress;

hub_progress hub_progress_begin(uint64_t total);

/* Shows the number of complete bytes (`done`) and the transfer rate. The rate is computed from `fetched`, the number of bytes
 * received since the start. May be called very often, because most calls return immediately. */
void hub_progress_show(hub_progress *p, uint64_t done, uint64_t fetched);

/* Erases the progress line and prints a note such as "[connection lost: trying again in 2 s]". Prints at most one note every 3
 * seconds. */
void hub_progress_note(hub_progress *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints a line in brackets to standard error, with control characters escaped. */
void hub_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Erases the line. */
void hub_progress_end(hub_progress *p);

#endif
