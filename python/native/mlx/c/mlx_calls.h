/* Function declarations of mlx.h, without its types, so that tests/mlx_interface.c can compare them with the headers of mlx-c. */

void mlx_set_error_handler(mlx_error_handler_func handler, void *data, void (*dtor)(void *));

mlx_array mlx_array_new_data(const void *data, const int *shape, int dim, mlx_dtype dtype);
mlx_array mlx_array_new_data_managed(void *data, const int *shape, int dim, mlx_dtype dtype, void (*dtor)(void *));
mlx_array mlx_array_new_float32(float val);
mlx_array mlx_array_new_int(int val);
int mlx_array_free(mlx_array arr);
int mlx_array_set(mlx_array *arr, const mlx_array src);
int mlx_array_eval(mlx_array arr);
size_t mlx_array_ndim(const mlx_array arr);
size_t mlx_array_size(const mlx_array arr);
size_t mlx_array_nbytes(const mlx_array arr);
const int *mlx_array_shape(const mlx_array arr);
mlx_dtype mlx_array_dtype(const mlx_array arr);
const uint16_t *mlx_array_data_uint16(const mlx_array arr);
const float *mlx_array_data_float32(const mlx_array arr);
int _mlx_array_is_row_contiguous(bool *res, const mlx_array arr);

mlx_vector_array mlx_vector_array_new(void);
mlx_vector_array mlx_vector_array_new_data(const mlx_array *data, size_t size);
mlx_vector_array mlx_vector_array_new_value(const mlx_array val);
int mlx_vector_array_free(mlx_vector_array vec);
int mlx_vector_array_append_value(mlx_vector_array vec, const mlx_array val);
size_t mlx_vector_array_size(mlx_vector_array vec);
int mlx_vector_array_get(mlx_array *res, const mlx_vector_array vec, size_t idx);
mlx_vector_string mlx_vector_string_new(void);
int mlx_vector_string_append_value(mlx_vector_string vec, const char *val);
int mlx_vector_string_free(mlx_vector_string vec);

mlx_device mlx_device_new(void);
int mlx_device_free(mlx_device dev);
int mlx_device_get_type(mlx_device_type *type, mlx_device dev);
int mlx_get_default_device(mlx_device *dev);
mlx_stream mlx_stream_new(void);
int mlx_stream_free(mlx_stream stream);
int mlx_stream_set(mlx_stream *stream, const mlx_stream src);
int mlx_stream_get_device(mlx_device *dev, mlx_stream stream);
int mlx_get_default_stream(mlx_stream *stream, mlx_device dev);
int mlx_metal_is_available(bool *res);
int mlx_get_active_memory(size_t *res);
int mlx_get_memory_limit(size_t *res);

int mlx_abs(mlx_array *res, const mlx_array a, const mlx_stream s);
int mlx_add(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_arange(mlx_array *res, double start, double stop, double step, mlx_dtype dtype, const mlx_stream s);
int mlx_as_strided(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const int64_t *strides,
                   size_t strides_num, size_t offset, const mlx_stream s);
int mlx_astype(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s);
int mlx_bitwise_and(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_concatenate_axis(mlx_array *res, const mlx_vector_array arrays, int axis, const mlx_stream s);
int mlx_contiguous(mlx_array *res, const mlx_array a, bool allow_col_major, const mlx_stream s);
int mlx_cumsum_axis(mlx_array *res, const mlx_array a, int axis, bool reverse, bool inclusive, mlx_optional_dtype dtype,
                    const mlx_stream s);
int mlx_depends(mlx_vector_array *res, const mlx_vector_array inputs, const mlx_vector_array dependencies);
int mlx_divide(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_exp(mlx_array *res, const mlx_array a, const mlx_stream s);
int mlx_hadamard_transform(mlx_array *res, const mlx_array a, mlx_optional_float scale, const mlx_stream s);
int mlx_isnan(mlx_array *res, const mlx_array a, const mlx_stream s);
int mlx_less(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_less_equal(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_logical_and(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_logical_or(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_matmul(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_max_axis(mlx_array *res, const mlx_array a, int axis, bool keepdims, const mlx_stream s);
int mlx_maximum(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_min_axis(mlx_array *res, const mlx_array a, int axis, bool keepdims, const mlx_stream s);
int mlx_minimum(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_multiply(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_quantize(mlx_vector_array *res, const mlx_array w, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                 const mlx_array global_scale, const mlx_stream s);
int mlx_quantized_matmul(mlx_array *res, const mlx_array x, const mlx_array w, const mlx_array scales, const mlx_array biases,
                         bool transpose, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                         const mlx_stream s);
int mlx_reshape(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const mlx_stream s);
int mlx_right_shift(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_round(mlx_array *res, const mlx_array a, int decimals, const mlx_stream s);
int mlx_slice(mlx_array *res, const mlx_array a, const int *start, size_t start_num, const int *stop, size_t stop_num,
              const int *strides, size_t strides_num, const mlx_stream s);
int mlx_slice_update(mlx_array *res, const mlx_array src, const mlx_array update, const int *start, size_t start_num,
                     const int *stop, size_t stop_num, const int *strides, size_t strides_num, const mlx_stream s);
int mlx_sqrt(mlx_array *res, const mlx_array a, const mlx_stream s);
int mlx_subtract(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s);
int mlx_sum_axis(mlx_array *res, const mlx_array a, int axis, bool keepdims, const mlx_stream s);
int mlx_take_axis(mlx_array *res, const mlx_array a, const mlx_array indices, int axis, const mlx_stream s);
int mlx_tanh(mlx_array *res, const mlx_array a, const mlx_stream s);
int mlx_transpose_axes(mlx_array *res, const mlx_array a, const int *axes, size_t axes_num, const mlx_stream s);
int mlx_view(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s);
int mlx_where(mlx_array *res, const mlx_array condition, const mlx_array x, const mlx_array y, const mlx_stream s);
int mlx_zeros(mlx_array *res, const int *shape, size_t shape_num, mlx_dtype dtype, const mlx_stream s);

mlx_fast_cuda_kernel mlx_fast_cuda_kernel_new(const char *name, const mlx_vector_string input_names,
                                              const mlx_vector_string output_names, const char *source, const char *header,
                                              bool ensure_row_contiguous, int shared_memory);
void mlx_fast_cuda_kernel_free(mlx_fast_cuda_kernel cls);
int mlx_fast_cuda_kernel_apply(mlx_vector_array *outputs, mlx_fast_cuda_kernel cls, const mlx_vector_array inputs,
                               const mlx_fast_cuda_kernel_config config, const mlx_stream stream);
mlx_fast_cuda_kernel_config mlx_fast_cuda_kernel_config_new(void);
void mlx_fast_cuda_kernel_config_free(mlx_fast_cuda_kernel_config cls);
int mlx_fast_cuda_kernel_config_add_output_arg(mlx_fast_cuda_kernel_config cls, const int *shape, size_t size, mlx_dtype dtype);
int mlx_fast_cuda_kernel_config_set_grid(mlx_fast_cuda_kernel_config cls, int grid1, int grid2, int grid3);
int mlx_fast_cuda_kernel_config_set_thread_group(mlx_fast_cuda_kernel_config cls, int thread1, int thread2, int thread3);

mlx_fast_metal_kernel mlx_fast_metal_kernel_new(const char *name, const mlx_vector_string input_names,
                                                const mlx_vector_string output_names, const char *source, const char *header,
                                                bool ensure_row_contiguous, bool atomic_outputs);
void mlx_fast_metal_kernel_free(mlx_fast_metal_kernel cls);
int mlx_fast_metal_kernel_apply(mlx_vector_array *outputs, mlx_fast_metal_kernel cls, const mlx_vector_array inputs,
                                const mlx_fast_metal_kernel_config config, const mlx_stream stream);
mlx_fast_metal_kernel_config mlx_fast_metal_kernel_config_new(void);
void mlx_fast_metal_kernel_config_free(mlx_fast_metal_kernel_config cls);
int mlx_fast_metal_kernel_config_add_output_arg(mlx_fast_metal_kernel_config cls, const int *shape, size_t size, mlx_dtype dtype);
int mlx_fast_metal_kernel_config_set_grid(mlx_fast_metal_kernel_config cls, int grid1, int grid2, int grid3);
int mlx_fast_metal_kernel_config_set_thread_group(mlx_fast_metal_kernel_config cls, int thread1, int thread2, int thread3);
