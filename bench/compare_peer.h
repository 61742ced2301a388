/* A peer of bench_compare is another attention implementation in a separate process. It runs one case with one pair of cache
 * types and receives requests over a pipe. Separate processes isolate libraries from each other and from aborts, and a peer may
 * be written in any language.
 *
 * The last arguments of the process are the types, H, G, D, cached tokens, queries, sequences and threads. The process generates
 * the values of the case (compare_case.h), computes attention once, and writes three results to its standard output: the output
 * of the last query of the last sequence as floats [H, D]; the growth of its anonymous memory since it began to generate the
 * values, in bytes, as a double; and the duration of the call, in seconds, as a double. Every byte that it reads afterwards
 * requests one more call: the process wakes its threads with a small case, computes attention again and writes the duration. It
 * exits when the pipe is closed.
 */
#ifndef FKV_COMPARE_PEER_H
#define FKV_COMPARE_PEER_H

#include "compare_case.h"

#include <stdbool.h>
#include <sys/types.h>

typedef struct compare_peer {
    pid_t process;
    int to;   /* request pipe; one byte requests one call */
    int from; /* pipe from which the duration of each call is read */
} compare_peer;

enum { COMPARE_PEER_WORDS = 3 }; /* maximum number of words in a command, without the types and the case */

/* Starts a peer and reads its first result. `command` is a program and its first arguments, terminated by NULL. `types` is a
 * cache type such as "f16", or a pair such as "q8_0/q4_0" for K and V. `out` receives the output of the last query: [H, D].
 * *memory receives the memory of the case in bytes, *seconds the duration of the first call. Returns false on failure; the peer
 * process then prints the reason to stderr.
 */
bool compare_peer_open(compare_peer *peer, const char *const command[COMPARE_PEER_WORDS + 1], const char *types,
                       const compare_case *c, float *out, double *memory, double *seconds);

/* Requests one call and returns its duration in seconds, not counting the time to wake the threads. Returns a negative value if
 * the peer has exited. */
double compare_peer_call(const compare_peer *peer);

void compare_peer_close(compare_peer *peer);

#endif
