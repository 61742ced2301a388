/* Host emulation of simdgroup matrices. The host functions define the semantics of the functions in simdgroup_metal.h. Each lane
 * holds two adjacent elements of the result. It also holds the inputs of these elements: one row of the left matrix and two
 * columns of the right matrix. Lanes do not wait for each other. Each lane accesses shared memory itself, so ThreadSanitizer
 * reports a missing barrier as a data race. */
struct fkv_left {
    float row[8];
};
struct fkv_right {
    float column[2][8];
};
struct fkv_sums {
    float of[2];
};

FKV_FN fkv_u32 fkv_host_sums_row() { return fkv_host_thread.lane / 4; }
FKV_FN fkv_u32 fkv_host_sums_column() { return fkv_host_thread.lane % 4 * 2; }

FKV_FN fkv_left fkv_left_load(const float *at, fkv_u32 stride) {
    fkv_left x;
    for (fkv_u32 k = 0; k < 8; k++) x.row[k] = at[fkv_host_sums_row() * stride + k];
    return x;
}
FKV_FN fkv_right fkv_right_load(const float *at, fkv_u32 stride, bool turned) {
    fkv_right x;
    for (fkv_u32 i = 0; i < 2; i++) {
        fkv_u32 column = fkv_host_sums_column() + i;
        for (fkv_u32 k = 0; k < 8; k++) x.column[i][k] = turned ? at[column * stride + k] : at[k * stride + column];
    }
    return x;
}
FKV_FN fkv_sums fkv_sums_load(const float *at, fkv_u32 stride) {
    const float *own = at + fkv_host_sums_row() * stride + fkv_host_sums_column();
    return {{own[0], own[1]}};
}
FKV_FN void fkv_sums_store(fkv_sums x, float *at, fkv_u32 stride) {
    float *own = at + fkv_host_sums_row() * stride + fkv_host_sums_column();
    own[0] = x.of[0];
    own[1] = x.of[1];
}

FKV_FN fkv_sums fkv_sums_zero() { return {{0.0f, 0.0f}}; }
FKV_FN void fkv_sums_add(fkv_sums &x, const fkv_left &left, const fkv_right &right) {
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 8; k++) x.of[i] += left.row[k] * right.column[i][k];
}
FKV_FN void fkv_sums_scale(fkv_sums &x, fkv_sums by) {
    x.of[0] *= by.of[0];
    x.of[1] *= by.of[1];
}
