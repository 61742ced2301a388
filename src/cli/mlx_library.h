/* libflatkv_mlx, loaded when --device mlx asks for it: a program on a machine without MLX runs all the same.
 */
#ifndef FKV_CLI_MLX_LIBRARY_H
#define FKV_CLI_MLX_LIBRARY_H

/* Makes FKV_BACKEND_MLX known to the library. Looks beside the program (a build tree) and in the library folder of its install;
 * the environment's FLATKV_MLX is the folder of a libmlxc to use instead of the one it was built with. Exit code, said what to
 * install. */
int mlx_library_load(void);

#endif
