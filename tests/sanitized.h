/* Macros for builds in which tests run slowly.
 *
 * TEST_SANITIZED: 1 in a build with AddressSanitizer or ThreadSanitizer, else 0. Such builds allocate additional memory, so
 * resident memory is not checked.
 *
 * TEST_EVERY: tests with many cases run only one of TEST_EVERY cases. tests/CMakeLists.txt sets the value for some programs and
 * builds.
 */
#ifndef FKV_SANITIZED_H
#define FKV_SANITIZED_H

#include <stdbool.h>
#include <stdint.h>

#ifndef __has_feature /* gcc */
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer) || defined(__SANITIZE_ADDRESS__) ||                          \
    __has_feature(address_sanitizer)
#define TEST_SANITIZED 1
#else
#define TEST_SANITIZED 0
#endif
#ifndef TEST_EVERY
#define TEST_EVERY (TEST_SANITIZED ? 12 : 1)
#endif

/* Returns true if a test runs this case. The selection is fixed and independent of the order of nested loops. The hash is that of
 * SplitMix64. */
static inline bool test_runs_case(uint64_t number) {
    uint64_t x = (number + 1) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return (x ^ x >> 31) >> 32 <= UINT32_MAX / TEST_EVERY;
}

#endif
