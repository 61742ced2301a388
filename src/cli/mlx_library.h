/* Loads libflatkv_mlx at run time for --device mlx, so that the program also runs on machines without MLX.
 */
#ifndef FKV_CLI_MLX_LIBRARY_H
#define FKV_CLI_MLX_LIBRARY_H

/* Registers FKV_BACKEND_MLX with the library. Searches the folder of the program (build tree) and the installed library folder.
 * The environment variable FLATKV_MLX sets the folder that contains libmlxc. Returns an exit code; the error says what to
 * install. */
int mlx_library_load(void);

#endif
