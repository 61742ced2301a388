/* Tests the JSON validator of builds without llguidance. It must accept every object in its subset of JSON and reject other texts
 * at the first wrong byte. Every text that it accepts must be the beginning of a text that jansson can parse. */
#include "../src/serve/json_text.h"
#include "test.h"

#include <jansson.h>
#include <string.h>

/* Returns the number of accepted bytes. *complete is set to true if the text is a complete object. */
static size_t accepted(const char *text, size_t n, bool *complete) {
    json_text t = json_text_begin(2);
    size_t i = 0;
    while (i < n && json_text_add(&t, (unsigned char)text[i])) i++;
    *complete = i == n && json_text_complete(&t);
    return i;
}

START_TEST(objects_are_accepted) {
    static const char *const good[] = {"{}",
                                       " \n{}",
                                       "{\"a\":1}",
                                       "{\"a\": [], \"b\": {}}",
                                       "{\"a\":[1, 2,[true,false , null]]}",
                                       "{\"a\": -0.5e+10, \"b\": 0, \"c\": 10E2, \"d\": -12.25}",
                                       "{\"\\u00e9\\n\\\"\": \"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \\/\"}"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        bool complete = false;
        const size_t n = accepted(good[i], strlen(good[i]), &complete);
        const bool has_space_before_comma =
            strstr(good[i], " ,") != NULL; /* valid JSON outside the subset that the validator accepts */
        ck_assert_msg(complete != has_space_before_comma, "%s: %zu bytes accepted", good[i], n);
    }
}
END_TEST

START_TEST(other_texts_are_rejected_at_the_first_wrong_byte) {
    static const struct {
        const char *text;
        size_t n; /* number of accepted bytes */
    } bad[] = {
        {"[]", 0},           {"   {}", 2},       {"{}}", 2},         {"{}\n", 2},        {"{,", 1},
        {"{\"a\":1,}", 7},   {"{\"a\":1,  ", 8}, {"{\"a\":  ", 6},   {"{\"a\" ", 4},     {"{\"a\":[1}", 7},
        {"{\"a\":{]", 6},    {"{\"a\":[,", 6},   {"{a", 1},          {"{'", 1},          {"{\"\n", 2},
        {"{\"\\x", 3},       {"{\"\\u12g", 6},   {"{\"\\ud800", 5},  {"{\"\\uDF", 5},    {"{\"\\u0000", 7},
        {"{\"\x80", 2},      {"{\"\xc1", 2},     {"{\"\xe0\x80", 3}, {"{\"\xed\xa0", 3}, {"{\"\xf4\x90", 3},
        {"{\"\xc3\"", 3},    {"{\"a\":01", 6},   {"{\"a\":-}", 6},   {"{\"a\":1.}", 7},  {"{\"a\":1e}", 7},
        {"{\"a\":1e123", 9}, {"{\"a\":+1", 5},   {"{\"a\":tru}", 8}, {"{\"a\":nan", 6},  {"{\"a\":123456789012345678901", 25}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        bool complete = true;
        const size_t n = accepted(bad[i].text, strlen(bad[i].text), &complete);
        ck_assert_msg(n == bad[i].n && !complete, "%s: %zu bytes accepted, expected %zu", bad[i].text, n, bad[i].n);
    }
}
END_TEST

START_TEST(nesting_is_limited) {
    char text[1000];
    size_t n = 0;
    json_text t = json_text_begin(0);
    n += (size_t)snprintf(text, sizeof text, "{\"a\":");
    while (n < sizeof text) text[n++] = '[';
    for (n = 0; json_text_add(&t, (unsigned char)text[n]);) n++;
    ck_assert_uint_eq(n, 5 + JSON_TEXT_MAX_DEPTH - 1);
    for (uint32_t i = 1; i < JSON_TEXT_MAX_DEPTH; i++) {
        if (i == 1) { /* restores the state, which is undefined after the failed call */
            t = json_text_begin(0);
            for (size_t k = 0; k < n; k++) ck_assert(json_text_add(&t, (unsigned char)text[k]));
        }
        ck_assert(!json_text_complete(&t) && json_text_add(&t, ']'));
    }
    ck_assert(json_text_add(&t, '}') && json_text_complete(&t));
}
END_TEST

/* Adds random bytes. A complete text must be valid JSON. As long as the text is incomplete, at least one byte must be accepted as
 * the next byte. */
START_TEST(random_texts_are_valid_json) {
    uint64_t random = 3;
    size_t n_complete = 0;
    for (int round = 0; round < 20000; round++) {
        static const char likely[] = "{}[]\",: 0123456789.eE+-truefalsenull\\u\xc3\xa9\xe2\x82";
        char text[200];
        json_text t = json_text_begin(0);
        size_t n = 0;
        while (n < sizeof text && !json_text_complete(&t)) {
            json_text next = t;
            bool found = false;
            for (int tries = 0; tries < 2000 && !found; tries++) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                const uint32_t draw = (uint32_t)(random >> 33);
                text[n] = tries < 500 ? likely[draw % (sizeof likely - 1)] : (char)(draw % 256);
                next = t;
                found = json_text_add(&next, (unsigned char)text[n]);
            }
            ck_assert_msg(found, "no byte continues %.*s", (int)n, text);
            t = next;
            n++;
        }
        if (!json_text_complete(&t)) continue;
        json_error_t why;
        json_t *value = json_loadb(text, n, 0, &why);
        ck_assert_msg(json_is_object(value), "%.*s: %s", (int)n, text, why.text);
        json_decref(value);
        n_complete++;
    }
    ck_assert_uint_ge(n_complete, 5000);
}
END_TEST

TEST_MAIN("json_text", objects_are_accepted, other_texts_are_rejected_at_the_first_wrong_byte, nesting_is_limited,
          random_texts_are_valid_json)
