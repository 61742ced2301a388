/* bench_attn --device mlx: compares attention on the MLX backend with MLX's own attention. */
#ifndef FKV_BENCH_ATTN_MLX_H
#define FKV_BENCH_ATTN_MLX_H

/* Runs the program if its options contain --device mlx. Returns the exit status. */
int bench_attn_mlx(int argc, char **argv);

#endif
