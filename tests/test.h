/* Test harness of the unit tests. Each test program has one suite, in which every test is a separate test case. The assertion
 * macros print the status and the message of a failed call.
 */
#ifndef FKV_TEST_H
#define FKV_TEST_H

#include <flatkv/flatkv.h>

#include <check.h>
#include <stdlib.h>

/* Replaces a macro of the check library on which its other assertion macros are based. The original writes the position of every
 * passed assertion to a file, which takes most of the time in tests with many assertions. */
#undef ck_assert_msg
#define ck_assert_msg(expr, ...)                                                                                                 \
    ((expr) ? (void)0 : _ck_assert_failed(__FILE__, __LINE__, "Assertion '" #expr "' failed", __VA_ARGS__))

#define ck_status(expr, expected)                                                                                                \
    do {                                                                                                                         \
        fkv_status got_ = (expr);                                                                                                \
        ck_assert_msg(got_ == (expected), "%s returned %s, expected %s (%s)", #expr, fkv_status_name(got_), #expected,           \
                      fkv_message());                                                                                            \
    } while (0)

#define ck_ok(expr) ck_status(expr, FKV_OK)

/* Runs the tests in one process, without forking, so that sanitizers and debuggers can follow them. */
static inline int test_run(const char *name, const TTest *const *tests, size_t n_tests) {
    Suite *suite = suite_create(name);
    for (size_t i = 0; i < n_tests; i++) {
        TCase *one = tcase_create(tests[i]->name);
        tcase_set_timeout(one, 0);
        tcase_add_test(one, tests[i]);
        suite_add_tcase(suite, one);
    }
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_NORMAL);
    const bool good = srunner_ntests_failed(runner) == 0 &&
                      srunner_ntests_run(runner) > 0; /* fails if the environment variable CK_RUN_CASE matches no test */
    srunner_free(runner);
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Defines main(). Place it at the end of a test program: TEST_MAIN("pager", first_test, second_test, ...). */
#define TEST_MAIN(name, ...)                                                                                                     \
    int main(void) {                                                                                                             \
        const TTest *const tests[] = {__VA_ARGS__};                                                                              \
        return test_run(name, tests, sizeof tests / sizeof tests[0]);                                                            \
    }

#endif
