/* A libggml as a peer (compare_peer.h): ggml_flash_attn_ext() of llama.cpp, of ik_llama.cpp or of any package that carries one
 * of them.
 *
 * Nothing of ggml is needed to build this: functions are found by name in the library that is pointed at, and only those whose
 * arguments are plain numbers and handles are called, which have been the same in both for years.
 */
#ifndef FKV_GGML_PEER_H
#define FKV_GGML_PEER_H

/* What a program started with GGML_PEER_OPTION as its first argument does; the second is the library: a file, or a folder with
 * libggml*.so. Returns its exit status. */
extern const char GGML_PEER_OPTION[];
int ggml_peer_main(int argc, char **argv);

#endif
