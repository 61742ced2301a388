/* bench_attn --device mlx: the same question asked of the MLX device, and of MLX's own attention beside it. */
#ifndef FKV_BENCH_ATTN_MLX_H
#define FKV_BENCH_ATTN_MLX_H

/* The program's main, when its options say --device mlx. Returns the exit status. */
int bench_attn_mlx(int argc, char **argv);

#endif
