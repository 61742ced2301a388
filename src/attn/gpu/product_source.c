/* See product_source.h. */
#include "product_source.h"

#include <kernel_files.h>

#include <stdio.h>

const char *const *fkv_affine_product_inputs(void) {
    static const char *const names[] = {"x", "codes", "scales", "biases", NULL};
    return names;
}

const char *const *fkv_affine_product_outputs(void) {
    static const char *const names[] = {"out", NULL};
    return names;
}

bool fkv_affine_product_describe(uint32_t bits, uint32_t group, fkv_type row_type, fkv_type scale_type, uint32_t n_columns,
                                 uint32_t n_outputs, fkv_affine_product *product) {
    if ((bits != 4 && bits != 8) || (group != 32 && group != 64 && group != 128)) return false;
    if (n_columns == 0 || n_columns % 128 != 0 || n_outputs == 0) return false;
    *product = (fkv_affine_product){.bits = bits,
                                    .group = group,
                                    .row_type = row_type,
                                    .scale_type = scale_type,
                                    .tiles = 1,
                                    .warps = 8,
                                    .stages = row_type == FKV_F32 && bits == 8 ? 1 : 2, /* more would spill registers */
                                    .blocks = 2,
                                    .chunk = n_columns % 256 == 0 && row_type != FKV_F32 && bits == 4 ? 256 : 128};
    return true;
}

size_t fkv_affine_product_header(fkv_kernel_device device, const fkv_affine_product *p, char *text, size_t size) {
    const bool host = device == FKV_KERNEL_HOST;
    const int n = snprintf(text, size,
                           "%s#define FKV_BITS %u\n#define FKV_GROUP %u\n#define FKV_ROW_TYPE %d\n#define FKV_SCALE_TYPE %d\n"
                           "#define FKV_TILES %u\n#define FKV_STAGES %u\n#define FKV_CHUNK %u\n"
                           "#define FKV_LAUNCH_THREADS %u\n#define FKV_LAUNCH_BLOCKS %u\n%s%s%s%s%s",
                           host ? "#include \"base/float16.h\"\n" : "", p->bits, p->group, (int)p->row_type, (int)p->scale_type,
                           p->tiles, p->stages, p->chunk, 32 * p->warps, p->blocks, host ? fkv_kernel_file_lanes_host : "",
                           host ? fkv_kernel_file_prelude_host : fkv_kernel_file_prelude_cuda, host ? "namespace {\n" : "",
                           fkv_kernel_file_affine_product, host ? "}\n" : "");
    return n < 0 ? 0 : (size_t)n;
}

#define SHARED "FKV_SHARED_ARRAY(float, shared, AP_SHARED);\n"

const char *fkv_affine_product_body(fkv_kernel_device device) {
    if (device == FKV_KERNEL_HOST)
        return SHARED "fkv_affine_product(place, shared, x, codes, scales, biases, n_rows, n_columns, n_outputs, out);\n";
    return "fkv_place place = {threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z};\n" SHARED "fkv_u32 n_rows = 1;\n"
           "for (int i = 0; i + 1 < x_ndim; i++) n_rows *= (fkv_u32)x_shape[i];\n"
           "fkv_affine_product(place, shared, x, codes, scales, biases, n_rows, (fkv_u32)x_shape[x_ndim - 1], "
           "(fkv_u32)codes_shape[0], out);\n";
}
