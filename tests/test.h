/* The few lines that every unit test program shares: one suite, one case for each test, and a message with the status when a call
 * did not answer what it should.
 */
#ifndef FKV_TEST_H
#define FKV_TEST_H

#include <flatkv/flatkv.h>

#include <check.h>
#include <stdlib.h>

#define ck_status(expr, expected)                                                                                                \
    do {                                                                                                                         \
        fkv_status got_ = (expr);                                                                                                \
        ck_assert_msg(got_ == (expected), "%s: %s instead of %s (%s)", #expr, fkv_status_name(got_), #expected, fkv_message());  \
    } while (0)

#define ck_ok(expr) ck_status(expr, FKV_OK)

/* Runs the tests without forking (sanitizers and debuggers see one process). */
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
    const bool good = srunner_ntests_failed(runner) == 0 && srunner_ntests_run(runner) > 0; /* CK_RUN_CASE may name none */
    srunner_free(runner);
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* The last line of a test program: TEST_MAIN("pager", first_test, second_test, ...). */
#define TEST_MAIN(name, ...)                                                                                                     \
    int main(void) {                                                                                                             \
        const TTest *const tests[] = {__VA_ARGS__};                                                                              \
        return test_run(name, tests, sizeof tests / sizeof tests[0]);                                                            \
    }

#endif
