/* A libggml as a peer: ggml_flash_attn_ext() of llama.cpp, of ik_llama.cpp or of any package that carries one of them, for one
 * case and one pair of cache types, in a process of its own. So two of them do not meet, and one that aborts takes nobody with
 * it.
 *
 * Nothing of ggml is needed to build this: functions are found by name in the library that is pointed at, and only those whose
 * arguments are plain numbers and handles are called, which have been the same in both for years.
 */
#ifndef FKV_GGML_PEER_H
#define FKV_GGML_PEER_H

#include "compare_case.h"

#include <stdbool.h>
#include <sys/types.h>

typedef struct ggml_peer {
    pid_t process;
    int to;   /* a byte asks for a call */
    int from; /* the seconds it took */
} ggml_peer;

/* library: a file, or a folder with libggml*.so. types: "f16", or "q8_0/q4_0" for K and V. The process says what went wrong on
 * stderr itself; false then, and nothing is left. out: [H, D], of the last query; *seconds: of that first call. */
bool ggml_peer_open(ggml_peer *peer, const char *library, const char *types, const compare_case *c, float *out, double *seconds);

/* Seconds of one call, its threads awake; negative where the peer is gone. */
double ggml_peer_call(const ggml_peer *peer);

void ggml_peer_close(ggml_peer *peer);

/* The other side: what a program started with PEER_OPTION as its first argument does. Returns its exit status. */
extern const char GGML_PEER_OPTION[];
int ggml_peer_main(int argc, char **argv);

#endif
