/* Metal prelude. Defines the same names as prelude_cuda.h. The framework must include metal_stdlib before this source, as MLX
 * does. The source is compiled without fast math and without contraction, because the page format specifies how every operation
 * of an encoder is rounded.
 */
#pragma METAL fp contract(off)

#define FKV_FN static inline
#define FKV_DEVICE device
#define FKV_SHARED threadgroup
#define FKV_LOCAL thread
#define FKV_SHARED_ARRAY(type, name, n) threadgroup type name[n]
#define FKV_UNROLL _Pragma("clang loop unroll(full)")
#define FKV_UNROLL_8 _Pragma("clang loop unroll_count(8)")

typedef uchar fkv_u8;
typedef ushort fkv_u16;
typedef uint fkv_u32;
typedef ulong fkv_u64;

struct fkv_place {
    fkv_u32 index;
    fkv_u32 x;
    fkv_u32 y;
    fkv_u32 z;
};
struct fkv_words4 {
    fkv_u32 w[4];
};

FKV_FN fkv_u32 fkv_bits_of(float x) { return metal::as_type<fkv_u32>(x); }
FKV_FN float fkv_float_of(fkv_u32 u) { return metal::as_type<float>(u); }
FKV_FN float fkv_add(float a, float b) { return a + b; }
FKV_FN float fkv_sub(float a, float b) { return a - b; }
FKV_FN float fkv_mul(float a, float b) { return a * b; }
FKV_FN float fkv_div(float a, float b) { return a / b; }
FKV_FN float fkv_fma(float a, float b, float c) { return metal::fma(a, b, c); }
FKV_FN float fkv_sqrt(float x) { return metal::precise::sqrt(x); }
FKV_FN float fkv_rint(float x) { return metal::rint(x); }
FKV_FN float fkv_abs(float x) { return metal::fabs(x); }
FKV_FN float fkv_reciprocal(float x) { return 1.0f / x; }
FKV_FN float fkv_max(float a, float b) { return metal::fmax(a, b); }
FKV_FN float fkv_exp2(float x) { return metal::exp2(x); }
FKV_FN float fkv_f16_to_f32(fkv_u32 bits) { return (float)metal::as_type<half>((fkv_u16)bits); }
FKV_FN fkv_u32 fkv_f32_to_f16(float x) { return metal::as_type<fkv_u16>((half)x); }

FKV_FN float fkv_shuffle_xor(float x, fkv_u32 mask) { return metal::simd_shuffle_xor(x, (fkv_u16)mask); }
FKV_FN fkv_u32 fkv_shuffle_xor_bits(fkv_u32 x, fkv_u32 mask) { return metal::simd_shuffle_xor(x, (fkv_u16)mask); }
FKV_FN float fkv_shuffle(float x, fkv_u32 lane) { return metal::simd_shuffle(x, (fkv_u16)lane); }
FKV_FN void fkv_sync() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
FKV_FN void fkv_sync_warp() { metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup); }
