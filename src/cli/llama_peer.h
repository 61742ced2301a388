/* Runs llama.cpp as a separate process, for flatkv bench --compare llama.cpp. The process runs bench/peers/llama_cpp_peer.py in
 * a Python interpreter, because the llama.cpp library in the xllamacpp package depends on symbols of the interpreter. */
#ifndef FKV_CLI_LLAMA_PEER_H
#define FKV_CLI_LLAMA_PEER_H

#include <stdbool.h>
#include <stdint.h>

typedef struct llama_peer llama_peer;

typedef struct llama_peer_config {
    const char *python;  /* interpreter */
    const char *package; /* xllamacpp, llama-cpp-python, or a folder with libllama.so */
    const char *model;   /* .gguf file */
    const char *cache;   /* cache type, such as q8_0 or q8_0/q4_0 */
    uint32_t threads;
    uint32_t depth; /* number of cached tokens */
    uint32_t n_prompt;
    uint32_t n_new;
} llama_peer_config;

/* Starts the process, which loads the model and fills its cache. Returns NULL after printing an error. */
llama_peer *llama_peer_open(const llama_peer_config *config);

/* Measures one prefill and the decode steps after it, in tokens per second. Returns false after printing an error. */
bool llama_peer_measure(llama_peer *peer, double *prefill_tps, double *decode_tps);

void llama_peer_close(llama_peer *peer); /* peer may be NULL */

#endif
