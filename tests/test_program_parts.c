/* Unit tests of parts of the flatkv program: text output, likelihoods and option parsing. program.py tests the commands.
 */
#include "test.h"

#include "../src/cli/codec_list.h"
#include "../src/cli/likelihood.h"
#include "../src/cli/text.h"
#include "../src/kit/numbers.h"
#include "../src/kit/options.h"
#include "../src/kit/program.h"
#include "../src/kit/suggestion.h"

#include <math.h>
#include <string.h>

/* ---- text ---- */

/* Feeds the bytes to a text stream one by one. Stores the output of the stream in `out`, with a terminating 0. */
static void stream_bytes(const char *bytes, size_t n, char *out, size_t capacity) {
    memset(out, 0, capacity);
    FILE *file = fmemopen(out, capacity, "w");
    ck_assert_ptr_nonnull(file);
    text_stream s = text_stream_open(file);
    for (size_t i = 0; i < n; i++) text_stream_put(&s, bytes + i, 1);
    text_stream_end(&s);
    fclose(file);
}

START_TEST(an_incomplete_character_is_held_back) {
    char out[64] = "";
    FILE *file = fmemopen(out, sizeof out, "w");
    text_stream s = text_stream_open(file);
    text_stream_put(&s, "a\xf0\x9f", 3);
    ck_assert_str_eq(out, "a");
    text_stream_put(&s, "\x98", 1);
    ck_assert_str_eq(out, "a");
    text_stream_put(&s, "\x80 b", 3);
    ck_assert_str_eq(out, "a\xf0\x9f\x98\x80 b");
    text_stream_end(&s);
    fclose(file);
}
END_TEST

static const struct {
    const char *bytes;
    const char *valid;
} invalid_utf8[] = {
    {"caf\xc3\xa9", "caf\xc3\xa9"},
    {"\xff", "\xef\xbf\xbd"},
    {"\x80x", "\xef\xbf\xbdx"},
    {"\xc3", "\xef\xbf\xbd"},
    {"a\xe2\x82", "a\xef\xbf\xbd\xef\xbf\xbd"},
    {"\xc3(", "\xef\xbf\xbd("},
    {"\xe2\x82(", "\xef\xbf\xbd\xef\xbf\xbd("},
    {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},                                 /* overlong */
    {"\xe0\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},                 /* overlong */
    {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},                 /* surrogate */
    {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* above U+10FFFF */
    {"\xe2\x82\xac\xf0\x9f\x98\x80", "\xe2\x82\xac\xf0\x9f\x98\x80"},
};

START_TEST(invalid_utf8_is_replaced) {
    for (size_t i = 0; i < sizeof invalid_utf8 / sizeof invalid_utf8[0]; i++) {
        char *valid = text_to_utf8(invalid_utf8[i].bytes, strlen(invalid_utf8[i].bytes));
        ck_assert_str_eq(valid, invalid_utf8[i].valid);
        free(valid);
    }
    char *valid = text_to_utf8("a\0b", 3);
    ck_assert_str_eq(valid, "a\xef\xbf\xbd"
                            "b");
    free(valid);
}
END_TEST

START_TEST(a_stream_matches_the_whole_text) {
    for (size_t i = 0; i < sizeof invalid_utf8 / sizeof invalid_utf8[0]; i++) {
        char out[64];
        stream_bytes(invalid_utf8[i].bytes, strlen(invalid_utf8[i].bytes), out, sizeof out);
        ck_assert_str_eq(out, invalid_utf8[i].valid);
    }
}
END_TEST

/* ---- likelihood ---- */

enum { N_VOCAB = 5003 };

static void draw_logits(uint64_t seed, float *logits) {
    kit_gaussian(&seed, N_VOCAB, logits);
    for (int i = 0; i < N_VOCAB; i++) logits[i] *= 4;
}

static double exact_log_sum(const float *logits) {
    double sum = 0;
    for (int i = 0; i < N_VOCAB; i++) sum += exp((double)logits[i]);
    return log(sum);
}

START_TEST(likelihoods_agree_with_double) {
    static float p[N_VOCAB];
    static float q[N_VOCAB];
    static float exps[N_VOCAB];
    for (uint64_t seed = 1; seed < 20; seed++) {
        draw_logits(seed, p);
        draw_logits(seed + 100, q);
        for (int i = 0; i < N_VOCAB; i++) q[i] = p[i] + 0.02f * q[i];
        p[17] = -INFINITY;
        p[18] = -300.0f;
        likelihood lp = likelihood_of(p, N_VOCAB, exps);
        likelihood lq = likelihood_of(q, N_VOCAB, NULL);
        double log_p = exact_log_sum(p);
        double log_q = exact_log_sum(q);
        ck_assert_double_eq_tol(lp.log_sum, log_p, 1e-6);
        ck_assert_double_eq_tol(likelihood_nll(&lq, q, 5), log_q - (double)q[5], 1e-6);
        for (int i = 0; i < N_VOCAB; i++) ck_assert(p[i] <= p[lp.top]);
        p[17] = q[17] = -40.0f; /* the divergence requires finite logits */
        lp = likelihood_of(p, N_VOCAB, exps);
        lq = likelihood_of(q, N_VOCAB, NULL);
        log_p = exact_log_sum(p);
        log_q = exact_log_sum(q);
        double kl = 0;
        for (int i = 0; i < N_VOCAB; i++) kl += exp((double)p[i] - log_p) * ((double)p[i] - log_p - (double)q[i] + log_q);
        ck_assert_double_eq_tol(likelihood_kl(&lp, p, exps, &lq, q, N_VOCAB), kl, 1e-7 + 1e-4 * kl);
    }
}
END_TEST

START_TEST(ties_go_to_the_lowest_token) {
    static float logits[N_VOCAB];
    logits[4000] = logits[37] = logits[38] = 2;
    ck_assert_uint_eq(likelihood_of(logits, N_VOCAB, NULL).top, 37);
}
END_TEST

START_TEST(nan_logits_propagate) {
    static float logits[N_VOCAB];
    const int places[] = {0, 37, N_VOCAB - 1};
    for (int i = 0; i < 3; i++) {
        draw_logits(1, logits);
        logits[places[i]] = NAN;
        ck_assert(isnan(likelihood_of(logits, N_VOCAB, NULL).log_sum));
    }
}
END_TEST

/* ---- options ---- */

typedef struct parsed {
    bool flag;
    uint32_t count;
    uint64_t bytes;
    double real;
    const char *text;
    int choice;
    kit_texts list;
    kit_texts words;
} parsed;

/* Splits a command line at spaces and parses it. Returns the exit code of a failed parse, or -1 on success. */
static int parse_command_line(const char *line, parsed *p) {
    static char copy[256];
    char *argv[32] = {"program"};
    int argc = 1;
    int code = 0;
    *p = (parsed){0};
    (void)snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " ")) argv[argc++] = word;
    const kit_option own[] = {{"flag", 'f', OPTION_FLAG, &p->flag, 0, NULL, ""},
                              {"count", 'n', OPTION_COUNT, &p->count, 100, "N", ""},
                              {"bytes", 0, OPTION_U64, &p->bytes, UINT64_MAX, "N", ""},
                              {"real", 0, OPTION_REAL, &p->real, 0, "X", ""},
                              {"text", 't', OPTION_TEXT, &p->text, 0, "TEXT", ""},
                              {"choice", 0, OPTION_CHOICE, &p->choice, 0, "one|two|three", ""},
                              {"list", 0, OPTION_TEXTS, &p->list, 0, "TEXT", ""},
                              {"words", 0, OPTION_POSITIONAL, &p->words, 0, "FILE...", ""},
                              {0}};
    const kit_option *const tables[] = {own, NULL};
    return kit_options_parse("usage: program\n", tables, argc, argv, &code) ? -1 : code;
}

START_TEST(options_fill_their_targets) {
    parsed p;
    ck_assert_int_eq(parse_command_line("a -f -n 7 --bytes=3G --real 0.5 b -t x --choice three --list l --list=m", &p), -1);
    ck_assert(p.flag && p.count == 7 && p.bytes == 3 * (UINT64_C(1) << 30) && p.real == 0.5 && p.choice == 2);
    ck_assert_str_eq(p.text, "x");
    ck_assert(p.list.n == 2 && strcmp(p.list.texts[0], "l") == 0 && strcmp(p.list.texts[1], "m") == 0);
    ck_assert(p.words.n == 2 && strcmp(p.words.texts[0], "a") == 0 && strcmp(p.words.texts[1], "b") == 0);
}
END_TEST

START_TEST(invalid_options_are_rejected) {
    static const char *const wrong[] = {
        "--count 0", "--count 101",     "--count -1",  "--count",      "--count x", "--bytes 99999999999999999999",
        "--real -1", "--choice fourth", "--choice tw", "--real 1e999", "--nothing", "-x"};
    parsed p;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_msg(parse_command_line(wrong[i], &p) == EXIT_USAGE, "%s", wrong[i]);
}
END_TEST

START_TEST(sizes_have_units) {
    static const struct {
        const char *text;
        uint64_t bytes; /* expected size in bytes; 0 if the text must be rejected */
    } cases[] = {{"16G", UINT64_C(16) << 30},
                 {"16GB", UINT64_C(16) << 30},
                 {"16GiB", UINT64_C(16) << 30},
                 {"16 GB", UINT64_C(16) << 30},
                 {"16gb", UINT64_C(16) << 30},
                 {"2T", UINT64_C(2) << 40},
                 {"500M", UINT64_C(500) << 20},
                 {"64k", 65536},
                 {"1048576", 1048576},
                 {"1048576 B", 1048576},
                 {"16", 0},
                 {"1023", 0},
                 {"16X", 0},
                 {"16Gx", 0},
                 {"G", 0},
                 {"", 0},
                 {"-1G", 0},
                 {"99999999999G", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t bytes = 0;
        bool good = kit_size("--size", cases[i].text, UINT64_MAX, &bytes);
        ck_assert_msg(good == (cases[i].bytes != 0) && bytes == cases[i].bytes, "%s", cases[i].text);
    }
}
END_TEST

START_TEST(separated_numbers_must_be_complete) {
    static const uint32_t max[3] = {64, 64, 512};
    static const char *const wrong[] = {"",          "32",      "32/8",    "32/8/",   "32/8/128/1",
                                        "32/8/1024", "0/8/128", "32//128", "a/8/128", "32/8/128 "};
    uint32_t parts[3];
    ck_assert(kit_numbers("32/8/128", '/', max, parts, 3) && parts[0] == 32 && parts[1] == 8 && parts[2] == 128);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_msg(!kit_numbers(wrong[i], '/', max, parts, 3), "%s", wrong[i]);
}
END_TEST

START_TEST(suggestions_are_close_or_absent) {
    static const char *const words[] = {"run", "plan", "prompt", "prefix"};
    static const char *const typed[][2] = {{"prompr", " (did you mean --prompt?)"},
                                           {"prfix", " (did you mean --prefix?)"},
                                           {"plam", " (did you mean --plan?)"},
                                           {"runn", " (did you mean --run?)"},
                                           {"sing", ""},
                                           {"", ""},
                                           {"a word that is longer than any name", ""}};
    char hint[96];
    for (size_t i = 0; i < sizeof typed / sizeof typed[0]; i++) {
        suggestion near = {.typed = typed[i][0]};
        for (size_t w = 0; w < sizeof words / sizeof words[0]; w++) suggestion_offer(&near, words[w]);
        ck_assert_str_eq(suggestion_hint(&near, "--", hint), typed[i][1]);
    }
}
END_TEST

/* The V codec of a latent layer is that of its 16-bit RoPE channels. The name of the codec does not contain it. */
START_TEST(files_of_latent_layers_name_their_codec) {
    static const char *const names[] = {"8/8", "4/4g32", "4/4:none", "tq4/tq4", "s4/s4", "s2/s2", "s4/s4:none"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        codec_list list = {.codecs = {{.k = {4, 64}, .v = {4, 64}}}, .n = 1};
        char name[CODEC_NAME];
        ck_assert_int_eq(codec_list_parse(names[i], 1, &list), EXIT_GOOD);
        const codec_choice codec = list.codecs[0];
        const fkv_file_info info = {.first_layer = {.rope_dim = 64, .k = codec.k, .v = {16, 0, FKV_CODEC_HALF}},
                                    .rotate = codec.rotate};
        const codec_choice of_file = codec_of_file(&info);
        ck_assert_str_eq(codec_name(&of_file, name), names[i]);
    }
}
END_TEST

TEST_MAIN("program parts", files_of_latent_layers_name_their_codec, options_fill_their_targets, invalid_options_are_rejected,
          suggestions_are_close_or_absent, sizes_have_units, separated_numbers_must_be_complete,
          an_incomplete_character_is_held_back, invalid_utf8_is_replaced, a_stream_matches_the_whole_text,
          likelihoods_agree_with_double, ties_go_to_the_lowest_token, nan_logits_propagate)
