/* Tests grammars with the vocabulary of the needle model: random answers drawn from the allowed tokens match the schema, and
 * hostile schemas are rejected. Builds without llguidance support only JSON objects without a schema, so they skip the other
 * tests.
 */
#include "../src/serve/grammar.h"
#include "test.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 2000 };

static fkv_model *model;
static grammar_maker *maker;
static const grammar_thinking AT_ONCE = {.open = FKV_NO_TOKEN, .close = FKV_NO_TOKEN};

static void open_maker(void) {
    fkv_model_config config = fkv_model_config_default();
    config.plan_only = true;
    ck_ok(fkv_model_load("models/needle", &config, &model));
    maker = grammar_maker_open(model);
    ck_assert(maker != NULL);
}

static void close_maker(void) {
    grammar_maker_close(maker);
    fkv_model_close(model);
}

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

static bool ends(uint32_t token) {
    const fkv_model_info *about = fkv_model_about(model);
    for (uint32_t i = 0; i < about->n_end; i++)
        if (about->end[i] == token) return true;
    return false;
}

static bool is_set(const uint32_t *bits, uint32_t token) { return bits[token / 32] >> token % 32 & 1; }

/* Draws a random token that the mask allows. Returns FKV_NO_TOKEN if the mask allows none. Also returns FKV_NO_TOKEN if an error
 * occurred; *why is then the error message. */
static uint32_t draw(grammar *g, uint32_t answer, const uint32_t *tokens, uint32_t n, uint64_t *random, const char **why) {
    static uint32_t bits[4096];
    uint32_t n_vocab = fkv_model_about(model)->n_vocab;
    uint32_t found = FKV_NO_TOKEN;
    uint32_t n_found = 0;
    memset(bits, 0, sizeof bits);
    *why = grammar_mask(g, answer, tokens, n, bits, n_vocab);
    for (uint32_t i = 0; i < n_vocab && *why == NULL; i++)
        if (is_set(bits, i) && random_below(random, ++n_found) == 0) found = i;
    return found;
}

/* Generates a complete answer as text and returns its length. */
static size_t write_answer(grammar *g, uint32_t answer, uint64_t *random, char text[MOST + 1]) {
    uint32_t tokens[MOST];
    size_t n_text = 0;
    for (uint32_t n = 0; n < MOST; n++) {
        const char *why = NULL;
        size_t n_bytes = 0;
        tokens[n] = draw(g, answer, tokens, n, random, &why);
        ck_assert_msg(why == NULL, "%.*s: %s", (int)n_text, text, why);
        if (tokens[n] == FKV_NO_TOKEN || ends(tokens[n])) break;
        const char *bytes = fkv_token_text(model, tokens[n], false, &n_bytes);
        ck_assert_uint_le(n_text + n_bytes, MOST);
        memcpy(text + n_text, bytes, n_bytes);
        n_text += n_bytes;
    }
    text[n_text] = 0;
    return n_text;
}

/* Generates random answers token by token. Once an answer is long, prefers tokens that close strings, arrays and objects. Every
 * complete answer must be a JSON object. */
START_TEST(random_answers_without_a_schema_are_objects) {
    char error[GRAMMAR_ERROR_BYTES];
    uint64_t random = 11;
    size_t n_complete = 0;
    size_t n_members = 0;
    open_maker();
    for (int round = 0; round < 200; round++) {
        uint32_t tokens[MOST];
        char text[MOST + 1];
        uint32_t n = 0;
        const char *why = NULL;
        grammar *g = grammar_open(maker, NULL, AT_ONCE, 1, error);
        ck_assert_msg(g != NULL, "%s", error);
        for (; n < MOST; n++) {
            static const char closing[] = "\"}]:";
            static uint32_t bits[4096];
            const uint32_t n_vocab = fkv_model_about(model)->n_vocab;
            uint32_t closed = FKV_NO_TOKEN;
            memset(bits, 0, sizeof bits);
            ck_assert(grammar_mask(g, 0, tokens, n, bits, n_vocab) == NULL);
            for (size_t i = 0; closing[i] != 0 && closed == FKV_NO_TOKEN; i++)
                if (is_set(bits, (uint32_t)closing[i])) closed = (uint32_t)closing[i];
            const bool ending = random_below(&random, 4) == 0 || n > 60;
            tokens[n] = ending && closed != FKV_NO_TOKEN ? closed : draw(g, 0, tokens, n, &random, &why);
            if (tokens[n] == FKV_NO_TOKEN) break;
            text[n] = (char)tokens[n]; /* each token of the needle model is one byte */
        }
        text[n] = 0;
        json_error_t error_of_value;
        json_t *value = json_loads(text, 0, &error_of_value);
        const bool overflow = value == NULL && json_error_code(&error_of_value) == json_error_numeric_overflow; /* valid JSON */
        if (n < MOST && !overflow) {
            ck_assert_msg(json_is_object(value), "%s: %s", text, error_of_value.text);
            n_complete++;
            n_members += json_object_size(value);
        }
        json_decref(value);
        grammar_close(g);
    }
    close_maker();
    ck_assert_uint_ge(n_complete, 150);
    ck_assert_uint_ge(n_members, 50);
}
END_TEST

START_TEST(random_answers_match_the_schema) {
    if (!grammar_supports_rules()) return;
    static const char rules[] =
        "start: value\nvalue: %json {\"type\":\"object\",\"properties\":{\"kind\":{\"enum\":[\"a\",\"b\"]},\"n\":{\"type\":\"integer\","
        "\"minimum\":3,\"maximum\":12},\"list\":{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},\"minItems\":1,\"maxItems\":3}},"
        "\"required\":[\"kind\",\"n\",\"list\"],\"additionalProperties\":false,\"x-guidance\":{\"whitespace_flexible\":false}}\n";
    char error[GRAMMAR_ERROR_BYTES];
    char text[MOST + 1];
    uint64_t random = 5;
    open_maker();
    for (int round = 0; round < 20; round++) {
        grammar *g = grammar_open(maker, rules, AT_ONCE, 2, error);
        ck_assert_msg(g != NULL, "%s", error);
        for (uint32_t answer = 0; answer < 2; answer++) {
            size_t n = write_answer(g, answer, &random, text);
            json_t *value = json_loadb(text, n, 0, NULL);
            const char *kind = json_string_value(json_object_get(value, "kind"));
            json_int_t number = json_integer_value(json_object_get(value, "n"));
            size_t length = json_array_size(json_object_get(value, "list"));
            ck_assert_msg(kind != NULL && (kind[0] == 'a' || kind[0] == 'b') && number >= 3 && number <= 12 && length >= 1 &&
                              length <= 3,
                          "%s", text);
            ck_assert_uint_eq(json_object_size(value), 3);
            json_decref(value);
        }
        ck_assert(!grammar_failed(g));
        grammar_close(g);
    }
    close_maker();
}
END_TEST

/* A JSON object may follow the reasoning text, both with and without llguidance. */
START_TEST(object_begins_after_the_reasoning) {
    static uint32_t bits[4096];
    char error[GRAMMAR_ERROR_BYTES];
    const uint32_t tokens[] = {'T', '}', 'E', '{', '}'};
    open_maker();
    grammar *g = grammar_open(maker, NULL, (grammar_thinking){.open = 'T', .close = 'E'}, 1, error);
    ck_assert_msg(g != NULL, "%s", error);
    for (uint32_t n = 0; n < 5; n++) {
        memset(bits, 0, sizeof bits);
        ck_assert(grammar_mask(g, 0, tokens, n, bits, fkv_model_about(model)->n_vocab) == NULL);
        ck_assert(is_set(bits, tokens[n]));
        ck_assert_int_eq(is_set(bits, 'z'), n == 1 || n == 2);
    }
    grammar_close(g);
    close_maker();
}
END_TEST

START_TEST(grammar_begins_after_the_reasoning) {
    if (!grammar_supports_rules()) return;
    char error[GRAMMAR_ERROR_BYTES];
    uint64_t random = 7;
    const char *why = NULL;
    open_maker();
    for (int opened = 0; opened < 2; opened++) {
        static uint32_t bits[4096];
        grammar *g =
            grammar_open(maker, "start: \"yes\"\n", (grammar_thinking){.open = 'T', .close = 'E', .opened = opened}, 1, error);
        ck_assert_msg(g != NULL, "%s", error);
        uint32_t tokens[8] = {'T', 'q', 'y', 'E', 'y', 'e', 's'};
        const uint32_t *written = opened ? tokens + 1 : tokens;
        const uint32_t n_vocab = fkv_model_about(model)->n_vocab;
        for (uint32_t n = 0; written + n < tokens + 7; n++) {
            memset(bits, 0, sizeof bits);
            ck_assert(grammar_mask(g, 0, written, n, bits, n_vocab) == NULL);
            ck_assert(is_set(bits, written[n]));
            bool free = opened ? n < 3 : n > 0 && n < 4;
            ck_assert_int_eq(is_set(bits, 'z'), free);
        }
        ck_assert_uint_eq(draw(g, 0, written, opened ? 6 : 7, &random, &why),
                          FKV_NO_TOKEN); /* nothing may follow, and the needle model has no end token */
        grammar_close(g);
    }
    close_maker();
}
END_TEST

/* Returns n schema definitions, each of which refers to the next one. */
static char *chain(int n) {
    size_t room = (size_t)n * 60 + 200;
    char *text = malloc(room);
    if (text == NULL) abort();
    size_t at = (size_t)snprintf(text, room, "start: %%json {\"$ref\":\"#/$defs/a0\",\"$defs\":{");
    for (int i = 0; i < n; i++)
        at += (size_t)snprintf(text + at, room - at, "\"a%d\":{\"items\":{\"anyOf\":[{\"$ref\":\"#/$defs/a%d\"}]}},", i, i + 1);
    (void)snprintf(text + at, room - at, "\"a%d\":{\"type\":\"string\"}}}\n", n);
    return text;
}

START_TEST(hostile_schemas_are_rejected) {
    if (!grammar_supports_rules()) return;
    static const struct {
        const char *schema;
        const char *words;
    } bad[] = {{"{\"type\":\"banana\"}", "banana"},
               {"{\"not\":{}}", "not"},
               {"{\"$ref\":\"#\"}", "no text"},
               {"{\"$ref\":\"http://127.0.0.1/x\"}", "does not fetch"},
               {"{\"$ref\":\"file:///etc/passwd\"}", "does not fetch"},
               {"{\"type\":\"string\",\"pattern\":\"(\"}", "unclosed"},
               {"{\"type\":\"string\",\"minLength\":1000000000000000000}", "regex"},
               {"{\"type\":\"integer\",\"multipleOf\":999999937}", "fuel"},
               {"{\"enum\":[]}", ""},
               {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", ""}};
    char error[GRAMMAR_ERROR_BYTES];
    char rules[400];
    open_maker();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        (void)snprintf(rules, sizeof rules, "start: %%json %s\n", bad[i].schema);
        grammar *g = grammar_open(maker, rules, AT_ONCE, 1, error);
        ck_assert_msg(g == NULL && strstr(error, bad[i].words) != NULL, "%s: %s", bad[i].schema, error);
        ck_assert_msg(strstr(error, "start:") == NULL && strchr(error, '\n') == NULL, "%s", error);
    }
    char *within = chain(GRAMMAR_MAX_REFS - 1);
    grammar *g = grammar_open(maker, within, AT_ONCE, 1, error);
    ck_assert_msg(g != NULL, "%s", error);
    grammar_close(g);
    char *beyond = chain(GRAMMAR_MAX_REFS);
    ck_assert(grammar_open(maker, beyond, AT_ONCE, 1, error) == NULL && strstr(error, "references") != NULL);
    char *huge = chain(3000);
    ck_assert(grammar_open(maker, huge, AT_ONCE, 1, error) == NULL && strstr(error, "bytes") != NULL);
    free(within);
    free(beyond);
    free(huge);
    close_maker();
}
END_TEST

START_TEST(compilation_beyond_its_time_limit_is_rejected) {
    if (!grammar_supports_rules()) return;
    static const char rules[] = "start: %json {\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"}}}\n";
    char error[GRAMMAR_ERROR_BYTES] = "";
    open_maker();
    ck_assert_int_eq(GRAMMAR_COMPILE_SECONDS, 5); /* documented in docs/serving.md */
    grammar_set_compile_seconds(0);
    for (int i = 0; i < 20; i++) { /* at most MAX_ABANDONED compilations keep running after the time limit */
        ck_assert_ptr_null(grammar_open(maker, rules, AT_ONCE, 1, error));
        ck_assert_msg(strstr(error, "takes longer than 0 s") != NULL || strstr(error, "still compiling earlier schemas") != NULL,
                      "%s", error);
    }
    grammar_set_compile_seconds(600); /* long enough for slow machines */
    grammar *g = NULL;
    for (int i = 0; g == NULL && i < 60000; i++) { /* waits until enough abandoned compilations have ended */
        const struct timespec pause = {0, 10000000};
        g = grammar_open(maker, rules, AT_ONCE, 1, error);
        if (g == NULL) (void)nanosleep(&pause, NULL);
    }
    ck_assert_msg(g != NULL, "%s", error);
    grammar_close(g);
    grammar_set_compile_seconds(GRAMMAR_COMPILE_SECONDS);
    close_maker();
}
END_TEST

START_TEST(mask_beyond_its_work_limit_fails_with_a_message) {
    if (!grammar_supports_rules()) return;
    char error[GRAMMAR_ERROR_BYTES];
    uint32_t tokens[MOST];
    uint64_t random = 9;
    const char *why = NULL;
    open_maker();
    grammar *g =
        grammar_open(maker, "start: %json {\"type\":\"string\",\"pattern\":\"(.*a.{20}|.*b.{25})*\"}\n", AT_ONCE, 1, error);
    ck_assert_msg(g != NULL, "%s", error);
    for (uint32_t n = 0; n < MOST && why == NULL; n++) {
        tokens[n] = draw(g, 0, tokens, n, &random, &why);
        if (why == NULL && (tokens[n] == FKV_NO_TOKEN || ends(tokens[n]))) break;
    }
    ck_assert_int_eq(why != NULL, grammar_failed(g));
    ck_assert(why == NULL || strstr(why, "work limit") != NULL);
    grammar_close(g);
    close_maker();
}
END_TEST

TEST_MAIN("grammar", random_answers_without_a_schema_are_objects, object_begins_after_the_reasoning,
          random_answers_match_the_schema, grammar_begins_after_the_reasoning, hostile_schemas_are_rejected,
          compilation_beyond_its_time_limit_is_rejected, mask_beyond_its_work_limit_fails_with_a_message)
