/* See compare_peer.h. */
#include "compare_peer.h"

#include "bench_util.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_NUMBERS = 7 }; /* number of integer arguments that describe a case */

static bool write_all(int to, const void *bytes, size_t n) {
    const char *at = bytes;
    while (n > 0) {
        ssize_t done = write(to, at, n);
        if (done <= 0) return false;
        at += done;
        n -= (size_t)done;
    }
    return true;
}

static bool read_all(int from, void *bytes, size_t n) {
    char *at = bytes;
    while (n > 0) {
        ssize_t done = read(from, at, n);
        if (done <= 0) return false;
        at += done;
        n -= (size_t)done;
    }
    return true;
}

static void start(const char *const *command, const char *types, const compare_case *c, int in, int out) {
    const uint32_t numbers[N_NUMBERS] = {c->n_q_heads, c->n_kv_heads, c->head_dim, c->n_cached,
                                         c->n_queries, c->n_seqs,     c->n_threads};
    char text[2 + N_NUMBERS + COMPARE_PEER_WORDS][4096];
    char *words[2 + N_NUMBERS + COMPARE_PEER_WORDS] = {NULL};
    size_t n = 0;
    for (; *command != NULL; command++) (void)snprintf(text[n++], sizeof text[0], "%s", *command);
    (void)snprintf(text[n++], sizeof text[0], "%s", types);
    for (size_t i = 0; i < N_NUMBERS; i++) (void)snprintf(text[n++], sizeof text[0], "%u", numbers[i]);
    for (size_t i = 0; i < n; i++) words[i] = text[i];
    if (dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0) (void)execvp(words[0], words);
    _exit(EXIT_FAILED);
}

/* Marks both pipe ends close-on-exec, so that no other process keeps the pipe open after bench_compare closes it. */
static bool open_pipe(int ends[2]) {
    if (pipe(ends) != 0) return false;
    for (int i = 0; i < 2; i++) (void)fcntl(ends[i], F_SETFD, FD_CLOEXEC);
    return true;
}

bool compare_peer_open(compare_peer *peer, const char *const command[COMPARE_PEER_WORDS + 1], const char *types,
                       const compare_case *c, float *out, double *memory, double *seconds) {
    int requests[2];
    int answers[2];
    if (!open_pipe(requests)) return false;
    if (!open_pipe(answers)) {
        (void)close(requests[0]);
        (void)close(requests[1]);
        return false;
    }
    (void)signal(SIGPIPE, SIG_IGN); /* a write to a peer that has exited must fail instead of raising SIGPIPE */
    peer->process = fork();
    if (peer->process == 0) start(command, types, c, requests[0], answers[1]);
    (void)close(requests[0]);
    (void)close(answers[1]);
    peer->to = requests[1];
    peer->from = answers[0];
    if (peer->process > 0 && read_all(peer->from, out, (size_t)c->n_q_heads * c->head_dim * sizeof *out) &&
        read_all(peer->from, memory, sizeof *memory) && read_all(peer->from, seconds, sizeof *seconds))
        return true;
    compare_peer_close(peer);
    return false;
}

double compare_peer_call(const compare_peer *peer) {
    double seconds;
    if (!write_all(peer->to, "c", 1) || !read_all(peer->from, &seconds, sizeof seconds)) return -1;
    return seconds;
}

void compare_peer_close(compare_peer *peer) {
    (void)close(peer->to); /* the peer exits when its request pipe is closed */
    (void)close(peer->from);
    if (peer->process > 0) (void)waitpid(peer->process, NULL, 0);
}
