/* See llama_peer.h. */
#include "llama_peer.h"

#include "../kit/process.h"
#include "cli.h"

#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_PATH = 4096, MAX_LINE = 16384 };

struct llama_peer {
    pid_t process;
    FILE *requests;
    FILE *answers;
};

/* Writes the path of llama_cpp_peer.py in an installed tree or in the source tree. */
static bool find_script(char path[MAX_PATH]) {
    char here[MAX_PATH / 2];
    if (process_program_path(here, sizeof here)) {
        char *slash = strrchr(here, '/');
        if (slash != NULL) slash[1] = 0;
        (void)snprintf(path, MAX_PATH, "%s" FLATKV_LIBEXEC "/llama_cpp_peer.py", here);
        if (access(path, R_OK) == 0) return true;
    }
    (void)snprintf(path, MAX_PATH, "%s/bench/peers/llama_cpp_peer.py", FLATKV_SOURCE_DIR);
    return access(path, R_OK) == 0;
}

/* Executes the Python interpreter in the child process. Does not return. */
static void run_script(const llama_peer_config *c, const char *script, const int requests[2], const int answers[2]) {
    char threads[16];
    char depth[16];
    char n_prompt[16];
    char n_new[16];
    (void)snprintf(threads, sizeof threads, "%u", c->threads);
    (void)snprintf(depth, sizeof depth, "%u", c->depth);
    (void)snprintf(n_prompt, sizeof n_prompt, "%u", c->n_prompt);
    (void)snprintf(n_new, sizeof n_new, "%u", c->n_new);
    char *const arguments[] = {(char *)c->python,
                               (char *)script,
                               "turns",
                               "-m",
                               (char *)c->model,
                               "--caches",
                               (char *)c->cache,
                               "--depths",
                               depth,
                               "--threads",
                               threads,
                               "--prefill",
                               n_prompt,
                               "-n",
                               n_new,
                               "--patience",
                               "1e9",
                               "--package",
                               (char *)c->package,
                               NULL};
    if (dup2(requests[0], STDIN_FILENO) >= 0 && dup2(answers[1], STDOUT_FILENO) >= 0) {
        for (int i = 0; i < 2; i++) {
            (void)close(requests[i]);
            (void)close(answers[i]);
        }
        (void)execvp(c->python, arguments);
    }
    (void)fprintf(stderr, "flatkv: cannot start %s\n", c->python);
    _exit(127);
}

/* Reads one line of the process's output as a JSON object. Returns NULL at the end of the output or if the line is invalid. */
static json_t *read_answer(llama_peer *peer) {
    char line[MAX_LINE];
    if (fgets(line, sizeof line, peer->answers) == NULL) return NULL;
    json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(object)) return object;
    json_decref(object);
    return NULL;
}

static void report_failure(const char *what) {
    (void)kit_fail(
        EXIT_FAILED,
        "%s: --python needs a Python interpreter with the package xllamacpp, for example after python3 -m venv peers && "
        "peers/bin/pip install xllamacpp numpy",
        what);
}

llama_peer *llama_peer_open(const llama_peer_config *config) {
    char script[MAX_PATH];
    int requests[2] = {-1, -1};
    int answers[2] = {-1, -1};
    if (!find_script(script)) {
        (void)kit_fail(EXIT_FAILED, "llama_cpp_peer.py not found: install flatkv again, or run it from its source tree");
        return NULL;
    }
    if (pipe(requests) != 0 || pipe(answers) != 0) {
        (void)kit_fail(EXIT_FAILED, "cannot create a pipe");
        return NULL;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    const pid_t process = fork();
    if (process == 0) run_script(config, script, requests, answers);
    (void)close(requests[0]);
    (void)close(answers[1]);
    llama_peer *peer = kit_alloc(sizeof *peer);
    *peer = (llama_peer){.process = process, .requests = fdopen(requests[1], "w"), .answers = fdopen(answers[0], "r")};
    json_t *about = process > 0 && peer->requests != NULL && peer->answers != NULL ? read_answer(peer) : NULL;
    if (about == NULL) {
        llama_peer_close(peer);
        if (!cli_interrupted()) report_failure("llama.cpp did not start");
        return NULL;
    }
    json_decref(about);
    return peer;
}

bool llama_peer_measure(llama_peer *peer, double *prefill_tps, double *decode_tps) {
    json_t *answer = NULL;
    if (fputc('\n', peer->requests) != EOF && fflush(peer->requests) == 0) answer = read_answer(peer);
    const json_t *prefill = json_object_get(answer, "prefill_tps");
    const json_t *decode = json_object_get(answer, "decode_mean_tps");
    const bool good = json_is_number(prefill) && json_is_number(decode);
    *prefill_tps = json_number_value(prefill);
    *decode_tps = json_number_value(decode);
    json_decref(answer);
    if (!good && !cli_interrupted()) report_failure("llama.cpp stopped");
    return good;
}

void llama_peer_close(llama_peer *peer) {
    if (peer == NULL) return;
    if (peer->requests != NULL) (void)fclose(peer->requests); /* the process exits when its standard input is closed */
    if (peer->answers != NULL) (void)fclose(peer->answers);
    if (peer->process > 0) (void)waitpid(peer->process, NULL, 0);
    free(peer);
}
