/* Texts of kernels as files in memory. MLX's CUDA kernels copy and hash their whole text at every call, a microsecond for each 6
 * KB; a text that includes such a file is one line. The files live as long as the process: MLX compiles a text when it first
 * runs.
 */
#ifndef FKV_MLX_INCLUDE_H
#define FKV_MLX_INCLUDE_H

#include "../base/base.h"

enum { FKV_MLX_INCLUDE_CHARS = 40 };

/* One line that includes a file of this text, which has this hash. False where the system has no such files: take the text
 * itself. */
bool fkv_mlx_include(const char *text, uint64_t hash, char line[FKV_MLX_INCLUDE_CHARS]);

#endif
