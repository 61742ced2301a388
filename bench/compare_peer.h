/* A peer of bench_compare: one case with one pair of cache types in a process of its own, asked for calls by turns over a pipe.
 * So two libraries do not meet, one that aborts does not end the others, and a peer may be a program in any language.
 *
 * The process is given the types, H, G, D, cached tokens, queries and threads as its last arguments. It makes the numbers of the
 * case itself (compare_case.h), computes once, and writes the last query's output, [H, D] as floats, and the seconds of that
 * call as a double. Then, for every byte it reads, it wakes its threads with a small case, computes again and writes the seconds.
 * It ends when there are no more bytes.
 */
#ifndef FKV_COMPARE_PEER_H
#define FKV_COMPARE_PEER_H

#include "compare_case.h"

#include <stdbool.h>
#include <sys/types.h>

typedef struct compare_peer {
    pid_t process;
    int to;   /* a byte asks for a call */
    int from; /* the seconds it took */
} compare_peer;

enum { COMPARE_PEER_WORDS = 3 }; /* at most, of a command without types and case */

/* command: a program and its first arguments, NULL behind the last. types: "f16", or "q8_0/q4_0" for K and V. The process says
 * what went wrong on stderr itself; false then, and nothing is left. out: [H, D], of the last query; *seconds: of that call. */
bool compare_peer_open(compare_peer *peer, const char *const command[COMPARE_PEER_WORDS + 1], const char *types,
                       const compare_case *c, float *out, double *seconds);

/* Seconds of one call, its threads awake; negative where the peer is gone. */
double compare_peer_call(const compare_peer *peer);

void compare_peer_close(compare_peer *peer);

#endif
