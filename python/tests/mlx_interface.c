/* Compiled against the headers of mlx-c. A declaration in native/mlx/c/mlx_calls.h that differs from mlx-c is a compile error. */
#include <mlx/c/mlx.h>

#include "../native/mlx/c/mlx_calls.h"

_Static_assert(MLX_UINT16 == 2 && MLX_UINT32 == 3 && MLX_INT32 == 7 && MLX_FLOAT16 == 9,
               "data types must have the values of mlx-c");
_Static_assert(MLX_FLOAT32 == 10 && MLX_BFLOAT16 == 12 && MLX_CPU == 0 && MLX_GPU == 1,
               "data types must have the values of mlx-c");
_Static_assert(sizeof(mlx_array) == sizeof(void *) && sizeof(mlx_stream) == sizeof(void *),
               "handles must consist of one pointer");

int main(void) { return 0; }
