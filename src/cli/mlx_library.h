/* Loads libflatkv_mlx at run time for --device mlx, so that the program also runs on machines without MLX.
 */
#ifndef FKV_CLI_MLX_LIBRARY_H
#define FKV_CLI_MLX_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

/* Loads libflatkv_mlx and registers FKV_BACKEND_MLX. Searches the folder of the program (build tree) and the installed library
 * folder. The environment variable FLATKV_MLX sets the folder that contains libmlxc. Returns an exit code. On failure, the
 * printed error names the missing software. */
int mlx_library_load(void);

/* Returns whether the library can be loaded. Writes the path of the library, or the reason for the failure, to text:
 * [capacity]. Prints nothing. */
bool mlx_library_probe(char *text, size_t capacity);

#endif
