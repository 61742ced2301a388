/* What every module stands on: answers with messages, asserts, checked integer arithmetic.
 *
 * Compiler and operating system switches live in src/base, the common ones here. It includes nothing of flatkv but the public
 * header.
 */
#ifndef FKV_BASE_H
#define FKV_BASE_H

#include <flatkv/flatkv.h>

#include <assert.h>
#include <stdalign.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define FKV_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define FKV_LIKELY(x) __builtin_expect(!!(x), 1)
#define FKV_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define FKV_INLINE static inline __attribute__((always_inline))
#define FKV_RESTRICT restrict
#define FKV_PREFETCH(address) __builtin_prefetch((address), 0, 3)
#define FKV_PREFETCH_FAR(address) __builtin_prefetch((address), 0, 2) /* into L2, not L1: for later */
#else
#error "flatkv is built with gcc or clang"
#endif

/* Before a loop with a small constant count whose arrays are meant to live in registers. With a sanitizer every unrolled access
 * is checked code, which takes a minute a file to compile and wins nothing. */
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FKV_UNROLL
#else
#define FKV_UNROLL _Pragma("unroll")
#endif
#else
#define FKV_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pages are little-endian and so are the machines flatkv runs on"
#endif

#if defined(__x86_64__)
#define FKV_ARCH_X86 1
#else
#define FKV_ARCH_X86 0
#endif
#if defined(__aarch64__)
#define FKV_ARCH_ARM 1
#else
#define FKV_ARCH_ARM 0
#endif
#if defined(__APPLE__)
#define FKV_OS_APPLE 1
#else
#define FKV_OS_APPLE 0
#endif
#if defined(__linux__)
#define FKV_OS_LINUX 1
#else
#define FKV_OS_LINUX 0
#endif

#define FKV_TEXT_OF(x) #x
#define FKV_JOIN_VERSION(major, minor, patch) FKV_TEXT_OF(major) "." FKV_TEXT_OF(minor) "." FKV_TEXT_OF(patch)
#define FKV_VERSION_TEXT FKV_JOIN_VERSION(FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH)

/* Not of the public API: what libflatkv_mlx, of the same version, takes from libflatkv. Every other symbol is hidden. */
#define FKV_SEAM FKV_API

/* Records the message for fkv_message() of this thread and returns the status. Names from files may stand in it as they are: what
 * a terminal would obey is shown instead (shown.h). */
FKV_SEAM fkv_status fkv_fail(fkv_status status, const char *format, ...) FKV_PRINTF(2, 3);

#define FKV_TRY(expr)                                                                                                            \
    do {                                                                                                                         \
        fkv_status fkv_try_status_ = (expr);                                                                                     \
        if (FKV_UNLIKELY(fkv_try_status_ != FKV_OK)) return fkv_try_status_;                                                     \
    } while (0)

/* FKV_REQUIRE(cond, status, "format", ...): the public edge's check. */
#define FKV_REQUIRE(cond, ...)                                                                                                   \
    do {                                                                                                                         \
        if (FKV_UNLIKELY(!(cond))) return fkv_fail(__VA_ARGS__);                                                                 \
    } while (0)

/* Inner asserts: FKV_ASSERT where NDEBUG is not set, FKV_ASSERT_DEEP (walks of whole structures) where FKV_DEEP_CHECKS is. */
#define FKV_ASSERT(cond) assert(cond)
#ifdef FKV_DEEP_CHECKS
#define FKV_ASSERT_DEEP(cond) assert(cond)
#else
#define FKV_ASSERT_DEEP(cond) ((void)0)
#endif

FKV_INLINE uint64_t fkv_align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }
FKV_INLINE uint32_t fkv_ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
FKV_INLINE uint32_t fkv_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
FKV_INLINE uint32_t fkv_max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
FKV_INLINE bool fkv_is_pow2(uint32_t x) { return x != 0 && (x & (x - 1)) == 0; }

/* True when the product or sum does not fit; *out is then not to be used. */
FKV_INLINE bool fkv_mul_overflows(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_mul_overflow(a, b, out); }
FKV_INLINE bool fkv_add_overflows(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_add_overflow(a, b, out); }

#endif
