/* A line on standard error that says how far a long piece of work is: share, rate and time left. Only on a terminal, and never
 * beside output that is being streamed.
 */
#ifndef FKV_CLI_PROGRESS_H
#define FKV_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress_bar {
    const char *what;
    uint64_t total;
    uint64_t done;
    double start;
    double shown; /* when the line was last drawn */
    bool terminal;
} progress_bar;

progress_bar progress_begin(const char *what, uint64_t total);
void progress_add(progress_bar *p, uint64_t n); /* p may be NULL */
void progress_end(progress_bar *p);             /* wipes the line */

#endif
