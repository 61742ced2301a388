/* Progress bar on standard error, which shows the number of tokens, the rate and the remaining time. The bar is drawn only on a
 * terminal, and never while output is being streamed. */
#ifndef FKV_CLI_PROGRESS_H
#define FKV_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress_bar {
    const char *what; /* name of the operation */
    uint64_t first;   /* number of tokens that were already processed when the operation started */
    uint64_t done;    /* tokens, including `first` */
    uint64_t total;   /* tokens, including `first` */
    double start;     /* kit_seconds() at progress_begin() */
    double shown;     /* kit_seconds() when the bar was last drawn */
    bool terminal;
} progress_bar;

progress_bar progress_begin(const char *what, uint64_t first, uint64_t total);
void progress_add(progress_bar *p, uint64_t n); /* p may be NULL */
void progress_end(progress_bar *p);             /* erases the bar */

#endif
