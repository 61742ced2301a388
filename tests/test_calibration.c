/* Tests of calibration: channels whose quantization errors matter more get more bits, files are read back unchanged, and invalid
 * files are rejected with a message that names the field and the reason. */
#include "../src/base/checksum.h"
#include "../src/model/calibration.h"
#include "cache_fixture.h"
#include "model_fixture.h"
#include "page_file_fixture.h"
#include "test.h"

#include <stdio.h>
#include <string.h>

enum { N_TOKENS = 2048, DIM = 32, FILE_BYTES = 4096, HEADER = 128, DIGEST_AT = 96 };

static const model_spec SPEC = {"qwen3", 2, 32, 64, 4, 2, DIM, .tied = true};

static fkv_model *load(model_fixture *w, uint64_t seed) {
    fkv_model *model = NULL;
    fkv_model_config config = fkv_model_config_default();
    model_fixture_make(w, &SPEC, seed);
    ck_ok(fkv_model_load(model_fixture_write(w), &config, &model));
    return model;
}

static void calibrate(const fkv_model *model, const char *path) {
    static uint32_t tokens[N_TOKENS];
    for (uint32_t i = 0; i < N_TOKENS; i++) tokens[i] = (i * i + i / 7) % MODEL_FIXTURE_VOCAB;
    ck_ok(fkv_calibrate(model, &(fkv_calibrate_config){.tokens = tokens, .n_tokens = N_TOKENS, .n_threads = 1}, path));
}

static fkv_runner_config calibrated(const char *path, uint32_t bits) {
    fkv_runner_config c = fkv_runner_config_default();
    c.max_tokens = 256;
    c.max_step_tokens = 64;
    c.n_threads = 1;
    c.k = (fkv_codec_config){.bits = bits, .kind = FKV_CODEC_CALIBRATED};
    c.v = (fkv_codec_config){.bits = bits, .kind = FKV_CODEC_SEALED_V};
    c.calibration = path;
    return c;
}

/* ---- channel bits ---- */

static void check_shares(const double *cost, uint32_t dim, uint32_t average) {
    uint8_t bits[FKV_MAX_HEAD_DIM];
    uint32_t n[8] = {0};
    fkv_channels_share(cost, dim, average, bits);
    for (uint32_t c = 0; c < dim; c++) n[bits[c] / 2]++;
    ck_assert_uint_eq(2 * n[1] + 4 * n[2] + 6 * n[3], average * dim);
    ck_assert_uint_eq(n[2] % 4 + n[3] % 4, 0);
    for (uint32_t a = 0; a < dim; a++)
        for (uint32_t b = 0; b < dim; b++) ck_assert_msg(cost[a] <= cost[b] || bits[a] >= bits[b], "channels %u and %u", a, b);
}

START_TEST(channels_with_the_highest_error_cost_get_most_bits) {
    double cost[FKV_MAX_HEAD_DIM];
    uint8_t bits[16];
    static const uint8_t expected[16] = {4, 4, 6, 2, 4, 4, 6, 2, 4, 4, 6, 2, 4, 4, 6, 2};
    for (uint32_t c = 0; c < 16; c++) cost[c] = c % 4 == 2 ? 400 : c % 4 == 3 ? 0.01 : 1;
    fkv_channels_share(cost, 16, 4, bits);
    ck_assert_mem_eq(bits, expected, sizeof bits);
    for (uint32_t c = 0; c < 16; c++) cost[c] = 3;
    fkv_channels_share(cost, 16, 4, bits);
    for (uint32_t c = 0; c < 16; c++) ck_assert_uint_eq(bits[c], 4);
    uint64_t state = 3;
    for (uint32_t dim = 16; dim <= FKV_MAX_HEAD_DIM; dim += 16) {
        for (uint32_t c = 0; c < dim; c++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            cost[c] = (double)(state >> 40) * (c % 3 == 0 ? 1e6 : c % 5 == 0 ? 0 : 1);
        }
        check_shares(cost, dim, 4);
        check_shares(cost, dim, 3);
    }
}
END_TEST

/* ---- files ---- */

START_TEST(calibration_is_found_next_to_its_model_and_foreign_to_others) {
    char path[512];
    char next_to_model[512];
    (void)cache_path(path, "other.fkc");
    model_fixture w;
    model_fixture other;
    fkv_runner *runner = NULL;
    fkv_runner_plan plan;
    fkv_model *model = load(&w, 1);
    ck_ok(fkv_calibration_path(model, next_to_model, sizeof next_to_model));
    ck_assert_ptr_nonnull(strstr(next_to_model, "/calibration.fkc"));
    fkv_runner_config c = calibrated(NULL, 4);
    ck_status(fkv_runner_open(model, &c, &runner), FKV_IO);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "flatkv calibrate"));
    calibrate(model, next_to_model);
    for (uint32_t bits = 3; bits <= 4; bits++) {
        c = calibrated(NULL, bits);
        ck_ok(fkv_runner_plan_make(model, &c, &plan));
        ck_ok(fkv_runner_open(model, &c, &runner));
        fkv_runner_close(runner);
    }
    fkv_calibration_info info;
    ck_ok(fkv_calibration_inspect(next_to_model, &info));
    ck_assert_uint_eq(info.n_layers, 2);
    ck_assert_uint_eq(info.n_tokens, N_TOKENS);
    ck_assert_uint_eq(info.n_channels, 2 * 2 * DIM);
    ck_assert_uint_eq(info.n_4[0] + info.n_4[1] + info.n_4[2], info.n_channels);
    ck_assert_uint_eq(info.n_4[0], info.n_4[2]);
    ck_assert_mem_eq(info.weights_id, fkv_model_about(model)->weights_id, sizeof info.weights_id);

    fkv_model *foreign = load(&other, 2);
    c = calibrated(next_to_model, 4);
    ck_status(fkv_runner_open(foreign, &c, &runner), FKV_FILE_FOREIGN);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "weights_id"));
    ck_assert_ptr_nonnull(strstr(fkv_message(), next_to_model));
    fkv_model_close(foreign);
    model_fixture_free(&other);
    (void)remove(next_to_model);
    fkv_model_close(model);
    model_fixture_free(&w);
}
END_TEST

START_TEST(same_text_gives_the_same_file) {
    static uint8_t first[FILE_BYTES];
    static uint8_t again[FILE_BYTES];
    char path[512];
    (void)cache_path(path, "again.fkc");
    model_fixture w;
    fkv_model *model = load(&w, 1);
    calibrate(model, path);
    size_t n = file_fixture_read_file(path, first, FILE_BYTES);
    calibrate(model, path);
    ck_assert_uint_eq(file_fixture_read_file(path, again, FILE_BYTES), n);
    ck_assert_mem_eq(first, again, n);
    fkv_model_close(model);
    model_fixture_free(&w);
}
END_TEST

/* Writes a calibration file of one layer with one head of 16 channels. For 4-bit keys, all channels have 4 bits; for 3-bit keys,
 * they alternate between 2 and 4 bits. */
static size_t small_file(uint8_t bytes[FILE_BYTES], const char *path) {
    static const uint8_t weights_id[32] = {7};
    fkv_calibration c;
    ck_ok(fkv_calibration_new(&(fkv_calibration_layer){1, 16}, 1, weights_id, &c));
    for (uint32_t d = 0; d < 16; d++) c.both[d] = (uint8_t)(4 | (d % 2 == 0 ? 2 : 4) << 4);
    ck_ok(fkv_calibration_write(&c, path));
    fkv_calibration_close(&c);
    return file_fixture_read_file(path, bytes, FILE_BYTES);
}

START_TEST(every_flipped_bit_and_wrong_length_is_detected) {
    static uint8_t bytes[FILE_BYTES];
    char path[512];
    (void)cache_path(path, "flipped.fkc");
    fkv_calibration_info info;
    size_t n = small_file(bytes, path);
    ck_ok(fkv_calibration_inspect(path, &info));
    for (size_t bit = 0; bit < 8 * n; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        file_fixture_write_file(path, bytes, n);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        ck_status(fkv_calibration_inspect(path, &info), bit < 64   ? FKV_FILE_FORMAT
                                                        : bit < 96 ? FKV_FILE_VERSION
                                                                   : FKV_FILE_DAMAGED);
        ck_assert_ptr_nonnull(strstr(fkv_message(), path));
    }
    for (size_t length = 0; length < n; length++) {
        file_fixture_write_file(path, bytes, length);
        ck_status(fkv_calibration_inspect(path, &info), length < 8 ? FKV_FILE_FORMAT : FKV_FILE_DAMAGED);
    }
    file_fixture_write_file(path, bytes, n + 1);
    ck_status(fkv_calibration_inspect(path, &info), FKV_FILE_DAMAGED);
    (void)remove(path);
    ck_status(fkv_calibration_inspect(path, &info), FKV_IO);
    ck_status(fkv_calibration_inspect("tests", &info), FKV_FILE_FORMAT); /* the path is a folder, not a file */
}
END_TEST

/* Files with a valid digest but invalid values must be rejected. */
START_TEST(invalid_values_are_rejected_by_name) {
    static const struct {
        size_t at;
        uint8_t byte;
        const char *says;
    } bad[] = {{16, 0, "n_layers is 0"},
               {17, 3, "n_layers is 769"},
               {20, 9, "layer_bytes is 9"},
               {24, 1, "file_bytes is"},
               {40, 1, "byte 40 is not 0"},
               {HEADER, 0, "0 KV heads"},
               {HEADER + 4, 24, "dimension 24"},
               {HEADER + 4, 32, "32 channels"},
               {HEADER + 8, 0x23, "channel 0 of KV head 0, layer 0, has 3 bits in the 4-bit assignment"},
               {HEADER + 8, 0x84, "has 8 bits in the 3-bit assignment"},
               {HEADER + 8, 0x26, "1 channels of 2, 4 and 6 bits"}};
    static uint8_t bytes[FILE_BYTES];
    char path[512];
    (void)cache_path(path, "numbers.fkc");
    size_t n = small_file(bytes, path);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t kept = bytes[bad[i].at];
        fkv_calibration_info info;
        fkv_sha256 sha;
        bytes[bad[i].at] = bad[i].byte;
        fkv_sha256_open(&sha);
        fkv_sha256_add(&sha, bytes, DIGEST_AT);
        fkv_sha256_add(&sha, bytes + HEADER, n - HEADER);
        ck_ok(fkv_sha256_close(&sha, bytes + DIGEST_AT));
        file_fixture_write_file(path, bytes, n);
        ck_status(fkv_calibration_inspect(path, &info), FKV_FILE_DAMAGED);
        ck_assert_msg(strstr(fkv_message(), bad[i].says) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(), bad[i].says);
        bytes[bad[i].at] = kept;
    }
}
END_TEST

TEST_MAIN("calibration", channels_with_the_highest_error_cost_get_most_bits,
          calibration_is_found_next_to_its_model_and_foreign_to_others, same_text_gives_the_same_file,
          every_flipped_bit_and_wrong_length_is_detected, invalid_values_are_rejected_by_name)
