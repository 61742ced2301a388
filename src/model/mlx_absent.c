/* In place of src/model/mlx where flatkv is built without MLX. */
#include "model_backend.h"

const fkv_model_backend *fkv_mlx_model_backend(void) { return NULL; }
