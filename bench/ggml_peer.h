/* Runs ggml_flash_attn_ext() of a libggml library as a peer of bench_compare (compare_peer.h). The library belongs to llama.cpp,
 * ik_llama.cpp or a package that contains one of them.
 *
 * ggml is not needed at build time. Functions are looked up by name in the given library. Only functions with plain numbers and
 * handles as arguments are called, because their signatures are stable.
 */
#ifndef FKV_GGML_PEER_H
#define FKV_GGML_PEER_H

/* Runs the peer if the first argument is GGML_PEER_OPTION. The second argument is the library: a file, or a folder with
 * libggml*.so. Returns the exit status. */
extern const char GGML_PEER_OPTION[];
int ggml_peer_main(int argc, char **argv);

#endif
