/* TEST_SANITIZED: 1 in a build with AddressSanitizer or ThreadSanitizer, else 0. Such builds allocate additional memory, so
 * resident memory is not checked, and they are several times slower, so that some tests run a part of their cases. */
#ifndef FKV_SANITIZED_H
#define FKV_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

#endif
