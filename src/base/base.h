/* Definitions that every module uses: error reporting, assertions, checked integer arithmetic, and compiler macros.
 *
 * All compiler-specific and operating-system-specific conditionals are in src/base, and most of them are in this file. The only
 * flatkv header included here is the public one.
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
#define FKV_PREFETCH_FAR(address) __builtin_prefetch((address), 0, 2) /* prefetches into L2 only */
#else
#error "flatkv requires gcc or clang"
#endif

/* Unrolls the following loop, which must have a small constant trip count, so that its arrays stay in registers. Disabled under
 * sanitizers, because unrolled code with instrumentation takes a minute per file to compile. */
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
#error "flatkv requires a little-endian machine"
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

#define FKV_STRINGIFY(x) #x
#define FKV_JOIN_VERSION(major, minor, patch) FKV_STRINGIFY(major) "." FKV_STRINGIFY(minor) "." FKV_STRINGIFY(patch)
#define FKV_VERSION_TEXT FKV_JOIN_VERSION(FKV_VERSION_MAJOR, FKV_VERSION_MINOR, FKV_VERSION_PATCH)

/* Exports a symbol of the internal API, so that other flatkv libraries of the same version can use it. All other internal symbols
 * are hidden. */
#define FKV_INTERNAL FKV_API

/* Stores the calling thread's error message, which fkv_message() returns, and returns `status`. Arguments may contain untrusted
 * text, because the message is escaped before it is stored (printable.h). */
FKV_INTERNAL fkv_status fkv_fail(fkv_status status, const char *format, ...) FKV_PRINTF(2, 3);

/* Evaluates expr and, if its status is not FKV_OK, returns that status from the calling function. */
#define FKV_TRY(expr)                                                                                                            \
    do {                                                                                                                         \
        fkv_status fkv_try_status_ = (expr);                                                                                     \
        if (FKV_UNLIKELY(fkv_try_status_ != FKV_OK)) return fkv_try_status_;                                                     \
    } while (0)

/* FKV_REQUIRE(cond, status, "format", ...) returns `status` from the calling function and stores the formatted message if cond is
 * false. It validates the arguments of public functions.
 */
#define FKV_REQUIRE(cond, ...)                                                                                                   \
    do {                                                                                                                         \
        if (FKV_UNLIKELY(!(cond))) return fkv_fail(__VA_ARGS__);                                                                 \
    } while (0)

/* Internal assertions. FKV_ASSERT is enabled unless NDEBUG is defined. FKV_ASSERT_DEEP is meant for checks that traverse whole
 * data structures. It is enabled only if FKV_DEEP_CHECKS is defined. */
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

/* Store a * b or a + b in *out. Return true if the result overflows; in that case, the value of *out is unspecified. */
FKV_INLINE bool fkv_mul_overflows(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_mul_overflow(a, b, out); }
FKV_INLINE bool fkv_add_overflows(uint64_t a, uint64_t b, uint64_t *out) { return __builtin_add_overflow(a, b, out); }

#endif
