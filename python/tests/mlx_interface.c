/* Compiled where mlx-c is there: a call of native/mlx/c/mlx_calls.h that is not mlx-c's is an error of the compiler. */
#include <mlx/c/mlx.h>

#include "../native/mlx/c/mlx_calls.h"

_Static_assert(MLX_UINT16 == 2 && MLX_UINT32 == 3 && MLX_INT32 == 7 && MLX_FLOAT16 == 9, "types have mlx-c's numbers");
_Static_assert(MLX_FLOAT32 == 10 && MLX_BFLOAT16 == 12 && MLX_CPU == 0 && MLX_GPU == 1, "types have mlx-c's numbers");
_Static_assert(sizeof(mlx_array) == sizeof(void *) && sizeof(mlx_stream) == sizeof(void *), "handles are one pointer");

int main(void) { return 0; }
