/* Matrices of 8 x 8 floats that a simdgroup holds together, for Metal; simdgroup_host.h has the same names. Which lane holds
 * which number is not documented, and nothing here depends on it: numbers come and go through threadgroup memory, and where two
 * matrices meet number by number (fkv_sums_scale) they are of one kind and lie alike.
 *
 * sums += left . right, rows x inner times inner x columns: three names, since the host holds them in three ways.
 */
#include <metal_simdgroup_matrix>

typedef metal::simdgroup_float8x8 fkv_left;
typedef metal::simdgroup_float8x8 fkv_right;
typedef metal::simdgroup_float8x8 fkv_sums;

/* stride: floats from one row to the next. turned: a row in memory is a column of the matrix. */
FKV_FN fkv_left fkv_left_load(FKV_SHARED const float *at, fkv_u32 stride) {
    fkv_left x;
    metal::simdgroup_load(x, at, stride);
    return x;
}
FKV_FN fkv_right fkv_right_load(FKV_SHARED const float *at, fkv_u32 stride, bool turned) {
    fkv_right x;
    metal::simdgroup_load(x, at, stride, ulong2(0, 0), turned);
    return x;
}
FKV_FN fkv_sums fkv_sums_load(FKV_SHARED const float *at, fkv_u32 stride) {
    fkv_sums x;
    metal::simdgroup_load(x, at, stride);
    return x;
}
FKV_FN void fkv_sums_store(fkv_sums x, FKV_SHARED float *at, fkv_u32 stride) { metal::simdgroup_store(x, at, stride); }

FKV_FN fkv_sums fkv_sums_zero() { return metal::make_filled_simdgroup_matrix<float, 8>(0.0f); }
FKV_FN void fkv_sums_add(FKV_LOCAL fkv_sums &x, fkv_left left, fkv_right right) {
    metal::simdgroup_multiply_accumulate(x, left, right, x);
}
/* x *= by, number by number: both are what this lane holds of a matrix, two numbers. */
FKV_FN void fkv_sums_scale(FKV_LOCAL fkv_sums &x, fkv_sums by) {
    x.thread_elements()[0] *= by.thread_elements()[0];
    x.thread_elements()[1] *= by.thread_elements()[1];
}
