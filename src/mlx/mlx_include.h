/* Stores kernel sources as in-memory files. MLX copies and hashes the source of a CUDA kernel at every call, which takes about
 * a microsecond per 6 KB. To avoid this cost, the source that is passed to MLX is a single #include line that names an
 * in-memory file. The files exist until the process ends, because MLX compiles a kernel at its first evaluation.
 */
#ifndef FKV_MLX_INCLUDE_H
#define FKV_MLX_INCLUDE_H

#include "../base/base.h"

enum { FKV_MLX_INCLUDE_CHARS = 40 };

uint64_t fkv_mlx_source_hash(const char *text);

/* Stores `text` in an in-memory file and writes an #include line for this file to `line`. `hash` is its fkv_mlx_source_hash().
 * Returns false if the system does not support in-memory files; the caller then passes the text itself. */
bool fkv_mlx_include(const char *text, uint64_t hash, char line[FKV_MLX_INCLUDE_CHARS]);

#endif
