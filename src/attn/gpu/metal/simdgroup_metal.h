/* Metal implementation of 8 x 8 float matrices that are distributed over the lanes of a simdgroup. simdgroup_host.h defines the
 * same names for the host. Metal does not document which lane holds which element, so elements are exchanged between lanes
 * through threadgroup memory. fkv_sums_scale() needs no such exchange, because its two matrices have the same type and therefore
 * the same layout.
 *
 * A product is sums += left . right. The three matrices have different type names, because the host emulation stores them
 * differently.
 */
#include <metal_simdgroup_matrix>

typedef metal::simdgroup_float8x8 fkv_left;
typedef metal::simdgroup_float8x8 fkv_right;
typedef metal::simdgroup_float8x8 fkv_sums;

/* The next functions load a matrix whose rows are `stride` floats apart. If `turned` is true, the matrix is transposed, so that a
 * row in memory becomes a column. */
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
/* Multiplies two matrices element by element. Each lane multiplies the two elements that it holds. */
FKV_FN void fkv_sums_scale(FKV_LOCAL fkv_sums &x, fkv_sums by) {
    x.thread_elements()[0] *= by.thread_elements()[0];
    x.thread_elements()[1] *= by.thread_elements()[1];
}
