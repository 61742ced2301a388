/* See recurrent_source.h. */
#include "recurrent_source.h"

#include <stdio.h>

const char *const fkv_recurrent_inputs[] = {"state", "queries", "keys", "values", "decay", "beta", "n_tokens", NULL};
const char *const fkv_recurrent_outputs[] = {"out", NULL};

size_t fkv_recurrent_header(fkv_recurrent_device device, fkv_recurrence_kind kind, const fkv_recurrence *s, char *text,
                            size_t size) {
    static const char *const functions[] = {
        [FKV_RECURRENT_CUDA] = "typedef unsigned long long fkv_index;\n"
                               "static __device__ __forceinline__ float fkv_sum_lanes(float x) {\n"
                               "    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);\n"
                               "    return x;\n"
                               "}\n",
        [FKV_RECURRENT_METAL] = "typedef ulong fkv_index;\n"
                                "static inline float fkv_sum_lanes(float x) {\n"
                                "    for (ushort mask = 16; mask > 0; mask /= 2) x += metal::simd_shuffle_xor(x, mask);\n"
                                "    return x;\n"
                                "}\n",
        [FKV_RECURRENT_HOST] = "typedef fkv_u64 fkv_index;\n"
                               "FKV_FN float fkv_sum_lanes(float x) {\n"
                               "    for (fkv_u32 mask = 16; mask > 0; mask /= 2) x += fkv_shuffle_xor(x, mask);\n"
                               "    return x;\n"
                               "}\n"};
    const int n = snprintf(text, size,
                           "#define FKV_IS_DELTA_RULE %d\n#define FKV_IS_KDA %d\n#define FKV_IS_TILED %d\n"
                           "#define FKV_K_HEADS %u\n#define FKV_V_HEADS %u\n"
                           "#define FKV_K_DIM %u\n#define FKV_V_DIM %u\n#define FKV_LANE_VALUES %u\n#define FKV_ROWS %d\n%s",
                           kind != FKV_MAMBA2, kind == FKV_KDA, s->tiled, s->n_k_heads, s->n_v_heads, s->k_dim, s->v_dim,
                           (s->k_dim + 31) / 32, FKV_RECURRENT_ROWS, functions[device]);
    return n < 0 ? 0 : (size_t)n;
}

#define BODY                                                                                                                     \
    "if (row >= FKV_V_HEADS * FKV_V_DIM) return;\n"                                                                              \
    "const int head = row / FKV_V_DIM;\n"                                                                                        \
    "const int k_head = FKV_IS_TILED ? head % FKV_K_HEADS : head / (FKV_V_HEADS / FKV_K_HEADS);\n"                               \
    "const int n = (int)n_tokens[0];\n"                                                                                          \
    "float s[FKV_LANE_VALUES];\n"                                                                                                \
    "for (int i = 0; i < FKV_LANE_VALUES; i++) {\n"                                                                              \
    "    const int at = i * 32 + lane;\n"                                                                                        \
    "    s[i] = at < FKV_K_DIM ? state[(fkv_index)row * FKV_K_DIM + at] : 0.0f;\n"                                               \
    "}\n"                                                                                                                        \
    "for (int t = 0; t < n; t++) {\n"                                                                                            \
    "    const fkv_index gate = (fkv_index)t * FKV_V_HEADS + head;\n"                                                            \
    "    const fkv_index key = ((fkv_index)t * FKV_K_HEADS + k_head) * FKV_K_DIM;\n"                                             \
    "    const fkv_index value = (fkv_index)t * (FKV_V_HEADS * FKV_V_DIM) + row;\n"                                              \
    "    const float rate = FKV_IS_KDA ? 0.0f : decay[gate];\n"                                                                  \
    "    float k[FKV_LANE_VALUES];\n"                                                                                            \
    "    float seen = 0.0f;\n"                                                                                                   \
    "    for (int i = 0; i < FKV_LANE_VALUES; i++) {\n"                                                                          \
    "        const int at = i * 32 + lane;\n"                                                                                    \
    "        k[i] = at < FKV_K_DIM ? keys[key + at] : 0.0f;\n"                                                                   \
    "        s[i] *= !FKV_IS_KDA ? rate : at < FKV_K_DIM ? decay[gate * FKV_K_DIM + at] : 0.0f;\n"                               \
    "        seen += s[i] * k[i];\n"                                                                                             \
    "    }\n"                                                                                                                    \
    "    const float v = FKV_IS_DELTA_RULE ? values[value] - fkv_sum_lanes(seen) : values[value];\n"                             \
    "    const float d = v * beta[gate];\n"                                                                                      \
    "    float o = 0.0f;\n"                                                                                                      \
    "    for (int i = 0; i < FKV_LANE_VALUES; i++) {\n"                                                                          \
    "        const int at = i * 32 + lane;\n"                                                                                    \
    "        s[i] += d * k[i];\n"                                                                                                \
    "        o += s[i] * (at < FKV_K_DIM ? queries[key + at] : 0.0f);\n"                                                         \
    "    }\n"                                                                                                                    \
    "    o = fkv_sum_lanes(o);\n"                                                                                                \
    "    if (lane == 0) out[value] = o;\n"                                                                                       \
    "}\n"                                                                                                                        \
    "const fkv_index after = (fkv_index)n * (FKV_V_HEADS * FKV_V_DIM) + (fkv_index)row * FKV_K_DIM;\n"                           \
    "for (int i = 0; i < FKV_LANE_VALUES; i++) {\n"                                                                              \
    "    const int at = i * 32 + lane;\n"                                                                                        \
    "    if (at < FKV_K_DIM) out[after + at] = s[i];\n"                                                                          \
    "}\n"

const char *fkv_recurrent_body(fkv_recurrent_device device) {
    static const char *const bodies[] = {
        [FKV_RECURRENT_CUDA] = "const int lane = threadIdx.x % 32;\n"
                               "const int row = blockIdx.x * FKV_ROWS + threadIdx.x / 32;\n" BODY,
        [FKV_RECURRENT_METAL] =
            "const int lane = thread_position_in_threadgroup.x % 32;\n"
            "const int row = threadgroup_position_in_grid.x * FKV_ROWS + thread_position_in_threadgroup.x / 32;\n" BODY,
        [FKV_RECURRENT_HOST] = "const int lane = (int)(place.index % 32);\n"
                               "const int row = (int)(place.x * FKV_ROWS + place.index / 32);\n" BODY};
    return bodies[device];
}
