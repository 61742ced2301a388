/* Read bandwidth of an MLX device. */
#ifndef FKV_BENCH_MLX_ROOF_H
#define FKV_BENCH_MLX_ROOF_H

#include "../src/mlx/mlx_graph.h"

/* Returns the read bandwidth, in bytes per second, of the device of the graph's stream. Sets g->failed on failure. If is_quick is
 * true, the buffer is small and the result is not meaningful. */
double bench_mlx_roof(fkv_mlx_graph *g, bool is_gpu, bool is_quick);

#endif
