/* Tests of the codec that need no reference: error bounds, NaN and infinity, block layout, rejected configurations, and the
 * effect of rotation. parity_codec checks that the bytes are identical to MLX's.
 */
#include "../src/base/float16.h"
#include "../src/codec/block.h"
#include "../src/codec/rotation.h"
#include "test.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* Assertion macro for inner loops. Unlike ck_assert(), it does not record its location each time it is evaluated. */
#define ck_each(cond)                                                                                                            \
    do {                                                                                                                         \
        if (!(cond)) ck_abort_msg("%s", #cond);                                                                                  \
    } while (0)

enum { MAX_DIM = FKV_MAX_HEAD_DIM, CANARY = 0xa5 };

/* Bound on the rounding errors of float arithmetic in encode and decode (one difference, one quotient and one sum), relative to
 * the largest value in the group. */
static const double FLOAT_SLACK = 0x1p-21;

static const fkv_type page_types[] = {FKV_F16, FKV_BF16};
static const uint32_t dims[] = {32, 64, 80, 96, 128, 256, 512};
static const uint32_t widths[] = {16, 8, 4, 2};
static const uint32_t groups[] = {32, 64, 128};

/* ---- random rows ---- */

typedef struct random_state {
    uint64_t state;
} random_state;

static random_state random_new(uint64_t seed) {
    printf("seed %llu\n", (unsigned long long)seed);
    return (random_state){.state = seed};
}

static uint32_t random_u32(random_state *d) {
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 32);
}

/* Approximates a standard normal variable by the sum of 12 uniforms minus 6. */
static float random_normal(random_state *d) {
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += (double)random_u32(d) * 0x1p-32;
    return (float)(sum - 6.0);
}

typedef enum row_kind {
    ROW_NORMAL,
    ROW_OUTLIERS,
    ROW_OFFSET,
    ROW_POSITIVE,
    ROW_TINY,
    ROW_CONSTANT,
    ROW_WIDE,
    N_ROW_KINDS
} row_kind;

static void fill_row(random_state *d, row_kind kind, uint32_t dim, float *x) {
    float offset = kind == ROW_OFFSET ? 1000.0f * random_normal(d) : 0.0f;
    float size = kind == ROW_TINY ? 1e-7f : kind == ROW_WIDE ? 8000.0f : 1.0f;
    float first = random_normal(d);
    for (uint32_t i = 0; i < dim; i++) {
        float value = size * (kind == ROW_CONSTANT ? first : random_normal(d)) + offset;
        if (kind == ROW_OUTLIERS && i % 31 == 5) value *= 20.0f;
        x[i] = kind == ROW_POSITIVE ? fabsf(value) : value;
    }
}

/* ---- single rows ---- */

typedef struct packed {
    fkv_codec codec;
    uint8_t bytes[FKV_N_PARTS][2 * MAX_DIM];
} packed;

static bool packed_make(uint32_t bits, uint32_t group, uint32_t dim, fkv_type type, packed *p) {
    memset(p, 0, sizeof *p);
    return fkv_codec_make((fkv_codec_config){.bits = bits, .group = group}, dim, type, &p->codec) == FKV_OK;
}

static void packed_encode(packed *p, const float *x) {
    uint8_t *const part[FKV_N_PARTS] = {p->bytes[0], p->bytes[1], p->bytes[2]};
    fkv_codec_encode(&p->codec, x, part);
}

static void packed_decode(const packed *p, float *x) {
    const uint8_t *const part[FKV_N_PARTS] = {p->bytes[0], p->bytes[1], p->bytes[2]};
    fkv_codec_decode(&p->codec, part, x);
}

static float packed_half(const packed *p, fkv_part part, uint32_t i) {
    uint16_t half;
    memcpy(&half, p->bytes[part] + 2 * (size_t)i, sizeof half);
    return fkv_half_to_f32(p->codec.type, half);
}

static uint32_t packed_code(const packed *p, uint32_t i) {
    uint32_t bit = i * p->codec.bits;
    uint32_t word;
    memcpy(&word, p->bytes[FKV_PART_CODES] + bit / 32 * 4, sizeof word);
    return word >> bit % 32 & ((1u << p->codec.bits) - 1u);
}

typedef void (*codec_fn)(packed *p, random_state *d);

/* Runs a check for every valid combination of bits, group size, head dimension and page type. */
static void for_every_codec(uint64_t seed, codec_fn check) {
    random_state d = random_new(seed);
    packed p;
    uint32_t n_codecs = 0;
    for (size_t t = 0; t < sizeof page_types / sizeof page_types[0]; t++)
        for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
            for (size_t b = 0; b < sizeof widths / sizeof widths[0]; b++)
                for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++)
                    if (packed_make(widths[b], groups[g], dims[i], page_types[t], &p)) {
                        check(&p, &d);
                        n_codecs++;
                    }
    ck_assert_uint_eq(n_codecs, 2 * (7 * 3 + 3 * (1 + 2 + 1 + 3 + 3 + 3)));
}

/* ---- 16-bit floats ---- */

START_TEST(every_16_bit_float_round_trips_through_float) {
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t half = (uint16_t)h;
        bool nan_f16 = (h & 0x7fff) > 0x7c00;
        bool nan_bf16 = (h & 0x7fff) > 0x7f80;
        uint16_t f16 = fkv_f32_to_f16(fkv_f16_to_f32(half));
        uint16_t bf16 = fkv_f32_to_bf16(fkv_bf16_to_f32(half));
        ck_each(nan_f16 ? (f16 & 0x7fff) > 0x7c00 : f16 == half);
        ck_each(nan_bf16 ? (bf16 & 0x7fff) > 0x7f80 : bf16 == half);
        ck_each(!nan_f16 == (fkv_f16_to_f32(half) == fkv_f16_to_f32(half)));
    }
}
END_TEST

START_TEST(f16_to_f32_matches_the_bit_fields) {
    for (uint32_t h = 0; h < 0x7c00; h++) {
        int exponent = (int)(h >> 10);
        double fraction = h & 0x3ff;
        double value = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024.0 + fraction, exponent - 25);
        ck_each((double)fkv_f16_to_f32((uint16_t)h) == value);
        ck_each((double)fkv_f16_to_f32((uint16_t)(h | 0x8000)) == -value);
    }
    ck_assert(isinf(fkv_f16_to_f32(0x7c00)) && isinf(fkv_f16_to_f32(0xfc00)));
}
END_TEST

/* Rounding between two adjacent 16-bit values depends only on their midpoint, which a float represents exactly. Checking the
 * midpoint and its two adjacent floats for every pair therefore covers all floats. */
static void check_rounding(fkv_type type, uint16_t infinity) {
    for (uint16_t h = 0; h < infinity; h++) {
        double low = (double)fkv_half_to_f32(type, h);
        double next = h + 1 == infinity ? 2 * low - (double)fkv_half_to_f32(type, (uint16_t)(h - 1))
                                        : (double)fkv_half_to_f32(type, (uint16_t)(h + 1));
        float middle = (float)((low + next) / 2);
        uint16_t up = (uint16_t)(h + 1);
        ck_each((double)middle == (low + next) / 2);
        ck_each(fkv_f32_to_half(type, middle) == (h % 2 == 0 ? h : up));
        ck_each(fkv_f32_to_half(type, nextafterf(middle, 0.0f)) == h);
        ck_each(fkv_f32_to_half(type, nextafterf(middle, INFINITY)) == up);
        ck_each(fkv_f32_to_half(type, -middle) == (0x8000 | (h % 2 == 0 ? h : up)));
    }
}

START_TEST(conversion_to_16_bits_rounds_to_nearest_even) {
    check_rounding(FKV_F16, 0x7c00);
    check_rounding(FKV_BF16, 0x7f80);
}
END_TEST

START_TEST(conversion_to_f16_at_its_limits) {
    const struct {
        float value;
        uint16_t f16;
    } known[] = {
        {0.0f, 0x0000},
        {-0.0f, 0x8000},
        {1.0f, 0x3c00},
        {-2.0f, 0xc000},
        {65504.0f, 0x7bff},
        {65519.996f, 0x7bff},
        {65520.0f, 0x7c00},
        {-65520.0f, 0xfc00},
        {FLT_MAX, 0x7c00},
        {INFINITY, 0x7c00},
        {0x1p-14f, 0x0400},
        {0x1.ff8p-15f, 0x03ff},
        {0x1.ffbffep-15f, 0x03ff},
        {0x1.ffcp-15f, 0x0400},
        {0x1p-24f, 0x0001},
        {0x1p-25f, 0x0000},
        {0x1.8p-24f, 0x0002},
        {0x1.000002p-25f, 0x0001},
        {FLT_MIN, 0x0000},
        {0x1p-149f, 0x0000},
        {1e-7f, 0x0002},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) ck_assert_uint_eq(fkv_f32_to_f16(known[i].value), known[i].f16);
    ck_assert_uint_gt(fkv_f32_to_f16(NAN) & 0x7fff, 0x7c00);
    ck_assert_uint_gt(fkv_f32_to_bf16(fkv_float_of(0x7f800001u)) & 0x7fff, 0x7f80);
    ck_assert_uint_eq(fkv_f32_to_bf16(FLT_MAX), 0x7f80);
    ck_assert_uint_eq(fkv_f32_to_bf16(-INFINITY), 0xff80);
}
END_TEST

START_TEST(rows_of_every_type_convert_both_ways) {
    const fkv_type types[] = {FKV_F32, FKV_F16, FKV_BF16};
    const float x[] = {1.0f, -0.5f, 0.0f, 1.0f / 3.0f, -2000.125f};
    enum { N = sizeof x / sizeof x[0] };
    for (size_t t = 0; t < 3; t++) {
        void *rows = malloc(sizeof x);
        float back[N + 1] = {[N] = 7.0f};
        ck_assert_ptr_nonnull(rows);
        fkv_rows_from_f32(types[t], x, rows, N);
        fkv_rows_to_f32(types[t], rows, back, N);
        for (size_t i = 0; i < N; i++) {
            float expected = types[t] == FKV_F32 ? x[i] : fkv_half_to_f32(types[t], fkv_f32_to_half(types[t], x[i]));
            ck_assert(back[i] == expected);
        }
        ck_assert(back[N] == 7.0f);
        ck_assert_uint_eq(fkv_type_bytes(types[t]), t == 0 ? 4 : 2);
        free(rows);
    }
}
END_TEST

/* ---- configurations ---- */

START_TEST(invalid_configurations_are_rejected_with_their_values) {
    const struct {
        uint32_t bits, group, dim;
        fkv_type type;
        const char *number;
        fkv_codec_kind kind;
    } bad[] = {
        {3, 64, 128, FKV_F16, "3 bits"},
        {0, 64, 128, FKV_F16, "0 bits"},
        {32, 64, 128, FKV_F16, "32 bits"},
        {6, 64, 128, FKV_BF16, "6 bits"},
        {8, 0, 128, FKV_F16, "group size 0"},
        {8, 16, 128, FKV_F16, "group size 16"},
        {4, 48, 96, FKV_F16, "group size 48"},
        {4, 256, 256, FKV_F16, "group size 256"},
        {8, 64, 80, FKV_F16, "dimension 80"},
        {2, 32, 80, FKV_F16, "dimension 80"},
        {8, 64, 96, FKV_BF16, "dimension 96"},
        {8, 128, 64, FKV_F16, "dimension 64"},
        {8, 64, 0, FKV_F16, "dimension 0"},
        {16, 0, 24, FKV_F16, "dimension 24"},
        {16, 0, 1024, FKV_F16, "dimension 1024"},
        {8, 64, 64, FKV_F32, "type 0"},
        {16, 64, 64, (fkv_type)9, "type 9"},
        {8, 64, 64, FKV_F16, "of 8 bits", FKV_CODEC_HALF},
        {16, 64, 64, FKV_F16, "of 16 bits", FKV_CODEC_AFFINE},
        {8, 64, 64, FKV_F16, "kind 99", (fkv_codec_kind)99},
        {8, 0, 64, FKV_F16, "8 bits", FKV_CODEC_SEALED},
        {5, 0, 64, FKV_F16, "5 bits", FKV_CODEC_SEALED_V},
        {4, 0, 24, FKV_F16, "dimension 24", FKV_CODEC_SEALED},
        {2, 0, 64, FKV_F16, "2 bits", FKV_CODEC_CALIBRATED},
        {8, 0, 64, FKV_F16, "of 8 bits", FKV_CODEC_TURBO},
        {4, 0, 48, FKV_F16, "dimension 48", FKV_CODEC_TURBO},
        {16, 0, 64, FKV_F16, "kind -1", (fkv_codec_kind)-1},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        fkv_codec codec;
        fkv_codec untouched;
        memset(&codec, CANARY, sizeof codec);
        memset(&untouched, CANARY, sizeof untouched);
        const fkv_codec_config config = {.bits = bad[i].bits, .group = bad[i].group, .kind = bad[i].kind};
        ck_status(fkv_codec_make(config, bad[i].dim, bad[i].type, &codec), FKV_BAD_CONFIG);
        ck_assert_msg(strstr(fkv_message(), bad[i].number) != NULL, "\"%s\" does not contain \"%s\"", fkv_message(),
                      bad[i].number);
        ck_assert_mem_eq(&codec, &untouched, sizeof codec);
    }
}
END_TEST

static void check_row_bytes(packed *p, random_state *d) {
    (void)d;
    const fkv_codec *c = &p->codec;
    bool half = c->bits == 16;
    ck_assert_int_eq(c->kind, half ? FKV_CODEC_HALF : FKV_CODEC_AFFINE);
    if (half) ck_assert_uint_eq(c->group, c->dim);
    ck_assert_uint_eq(c->row_bytes[FKV_PART_CODES], c->dim * c->bits / 8);
    ck_assert_uint_eq(c->row_bytes[FKV_PART_SCALES], half ? 0 : 2 * c->dim / c->group);
    ck_assert_uint_eq(c->row_bytes[FKV_PART_BIASES], half ? 0 : 2 * c->dim / c->group);
}

START_TEST(row_bytes_follow_from_bits_and_group) { for_every_codec(1, check_row_bytes); }
END_TEST

/* ---- kinds and names ---- */

/* Checks that a codec whose config states its kind encodes a row like a codec whose kind is derived from the bit width. */
static void check_kind(packed *p, random_state *d) {
    const fkv_codec *c = &p->codec;
    const fkv_codec_config config = {.bits = c->bits, .group = c->group, .kind = c->kind};
    packed named;
    memset(&named, 0, sizeof named);
    ck_ok(fkv_codec_make(config, c->dim, c->type, &named.codec));
    ck_assert(fkv_codec_same(c, &named.codec));
    ck_assert_mem_eq(named.codec.row_bytes, c->row_bytes, sizeof c->row_bytes);
    float x[MAX_DIM];
    float back[2][MAX_DIM];
    fill_row(d, ROW_OUTLIERS, c->dim, x);
    packed_encode(p, x);
    packed_encode(&named, x);
    ck_assert_mem_eq(p->bytes, named.bytes, sizeof p->bytes);
    packed_decode(p, back[0]);
    packed_decode(&named, back[1]);
    ck_assert_mem_eq(back[0], back[1], c->dim * sizeof(float));

    fkv_codec_info info;
    ck_ok(fkv_codec_about(config, &info));
    bool half = c->kind == FKV_CODEC_HALF;
    ck_assert_uint_eq(info.group, half ? 0 : c->group);
    ck_assert_uint_eq(info.dim_multiple, half ? 16 : c->group);
    ck_assert_uint_eq(c->dim % info.dim_multiple, 0);
    ck_assert_int_eq(info.rotates, !half);
    ck_assert_int_eq(atoi(info.name), (int)c->bits);
}

START_TEST(explicit_kind_equals_the_kind_derived_from_the_bits) { for_every_codec(11, check_kind); }
END_TEST

START_TEST(codecs_are_equal_only_if_their_bytes_are) {
    packed p;
    packed q;
    ck_assert(packed_make(4, 64, 128, FKV_F16, &p));
    ck_assert(packed_make(4, 64, 128, FKV_F16, &q));
    ck_assert(fkv_codec_same(&p.codec, &q.codec));
    fkv_codec_rotated(&q.codec);
    ck_assert(!fkv_codec_same(&p.codec, &q.codec));
    const struct {
        uint32_t bits, group, dim;
        fkv_type type;
    } others[] = {
        {8, 64, 128, FKV_F16}, {4, 32, 128, FKV_F16}, {4, 64, 64, FKV_F16}, {4, 64, 128, FKV_BF16}, {16, 0, 128, FKV_F16}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        ck_assert(packed_make(others[i].bits, others[i].group, others[i].dim, others[i].type, &q));
        ck_assert(!fkv_codec_same(&p.codec, &q.codec));
    }
}
END_TEST

static void check_config(fkv_codec_config config, fkv_codec_kind kind, uint32_t bits, uint32_t group) {
    ck_assert_int_eq(config.kind, kind);
    ck_assert_uint_eq(config.bits, bits);
    ck_assert_uint_eq(config.group, group);
}

START_TEST(codec_names_are_parsed_and_keep_unnamed_groups) {
    const struct {
        const char *text;
        uint32_t k_bits, v_bits, k_group, v_group;
    } good[] = {
        {"8/4", 8, 4, 64, 128},
        {"16/16", 16, 16, 64, 128},
        {"8", 8, 8, 64, 128},
        {"4g32", 4, 4, 32, 32},
        {"2/16", 2, 16, 64, 128},
        {"4/4g32", 4, 4, 32, 32},
        {"16/2g64", 16, 2, 64, 64},
        {"8/16g128", 8, 16, 128, 128},
        {"8/8g4294967295", 8, 8, UINT32_MAX, UINT32_MAX} /* only fkv_codec_make() checks whether the group size is valid */};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        fkv_codec_config k = {.group = 64};
        fkv_codec_config v = {.group = 128};
        ck_ok(fkv_codec_parse(good[i].text, &k, &v));
        check_config(k, good[i].k_bits == 16 ? FKV_CODEC_HALF : FKV_CODEC_AFFINE, good[i].k_bits, good[i].k_group);
        check_config(v, good[i].v_bits == 16 ? FKV_CODEC_HALF : FKV_CODEC_AFFINE, good[i].v_bits, good[i].v_group);
    }
    fkv_codec_config sealed[2] = {{.group = 64}, {.group = 64}};
    ck_ok(fkv_codec_parse("sealed", &sealed[0], &sealed[1]));
    check_config(sealed[0], FKV_CODEC_SEALED, 4, 64);
    check_config(sealed[1], FKV_CODEC_SEALED_V, 4, 64);
    check_config(fkv_codec_canonical(sealed[0]), FKV_CODEC_SEALED, 4, 0);
    ck_ok(fkv_codec_parse("s3/s2", &sealed[0], &sealed[1]));
    check_config(sealed[0], FKV_CODEC_SEALED, 3, 64);
    check_config(sealed[1], FKV_CODEC_SEALED_V, 2, 64);
    ck_ok(fkv_codec_parse("s4/4g32", &sealed[0], &sealed[1]));
    check_config(sealed[0], FKV_CODEC_SEALED, 4, 32);
    check_config(sealed[1], FKV_CODEC_AFFINE, 4, 32);
    ck_ok(fkv_codec_parse("calibrated", &sealed[0], &sealed[1]));
    check_config(sealed[0], FKV_CODEC_CALIBRATED, 4, 32);
    check_config(sealed[1], FKV_CODEC_SEALED_V, 4, 32);
    ck_ok(fkv_codec_parse("c3/s3", &sealed[0], &sealed[1]));
    check_config(sealed[0], FKV_CODEC_CALIBRATED, 3, 32);
    ck_status(fkv_codec_parse("8/c4", &sealed[0], &sealed[1]), FKV_BAD_CONFIG);
    fkv_codec_info info;
    ck_ok(fkv_codec_about((fkv_codec_config){4, 64, FKV_CODEC_SEALED_V}, &info));
    ck_assert(strcmp(info.name, "s4") == 0 && info.group == 0 && info.dim_multiple == 16 && info.rotates);
    fkv_codec_config turbo_k = {.group = 64};
    fkv_codec_config turbo_v = {.group = 128};
    ck_ok(fkv_codec_parse("8/tq4", &turbo_k, &turbo_v));
    check_config(turbo_k, FKV_CODEC_AFFINE, 8, 64);
    check_config(turbo_v, FKV_CODEC_TURBO, 4, 128);
    ck_ok(fkv_codec_parse("tq3/tq2", &turbo_k, &turbo_v));
    check_config(turbo_k, FKV_CODEC_TURBO, 3, 64);
    check_config(turbo_v, FKV_CODEC_TURBO, 2, 128);
    ck_ok(fkv_codec_about(turbo_k, &info));
    ck_assert_str_eq(info.name, "tq3");
    ck_assert(info.rotates && info.needs_rotation && info.dim_multiple == 32 && info.group == 0);
    static const char *const bad[] = {
        "",     "sealed/4", "s5/4",    "s/s",    "8x",    "8/",      "/4",     "8/4/4",   "eight/four",
        "3/4",  "4/3",      "8/4x",    "8/4g",   "8/4gx", "8/4g32x", "8g32/4", " 8/4",    "8/ 4",
        "88/4", "8/4g-1",   "8/4 g32", "8/4:kv", "08/4",  "16/16/",  "8\\4",   "8/4g 32", "8/4g99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        fkv_codec_config k = {.bits = 5, .group = 6};
        fkv_codec_config v = {.bits = 7, .group = 8};
        ck_assert_msg(fkv_codec_parse(bad[i], &k, &v) == FKV_BAD_CONFIG, "\"%s\" was accepted", bad[i]);
        ck_assert_msg(strstr(fkv_message(), bad[i]) != NULL && strstr(fkv_message(), "16, 8, 4, 2") != NULL, "%s", fkv_message());
        check_config(k, FKV_CODEC_AUTO, 5, 6);
        check_config(v, FKV_CODEC_AUTO, 7, 8);
    }
    fkv_codec_config k;
    ck_status(fkv_codec_parse(NULL, &k, &k), FKV_BAD_ARGUMENT);
    ck_status(fkv_codec_parse("8/4", NULL, &k), FKV_BAD_ARGUMENT);
    ck_status(fkv_codec_parse("8/4", &k, NULL), FKV_BAD_ARGUMENT);
    ck_status(fkv_codec_about((fkv_codec_config){8, 64}, NULL), FKV_BAD_ARGUMENT);
}
END_TEST

START_TEST(canonical_form_names_the_kind_and_drops_unused_groups) {
    check_config(fkv_codec_canonical((fkv_codec_config){8, 64}), FKV_CODEC_AFFINE, 8, 64);
    check_config(fkv_codec_canonical((fkv_codec_config){16, 64}), FKV_CODEC_HALF, 16, 0);
    check_config(fkv_codec_canonical((fkv_codec_config){16, 5, FKV_CODEC_HALF}), FKV_CODEC_HALF, 16, 0);
    check_config(fkv_codec_canonical((fkv_codec_config){3, 5}), FKV_CODEC_AFFINE, 3, 5);
    check_config(fkv_codec_canonical((fkv_codec_config){3, 5, (fkv_codec_kind)9}), (fkv_codec_kind)9, 3, 5);
    check_config(fkv_codec_canonical((fkv_codec_config){3, 5, FKV_CODEC_TURBO}), FKV_CODEC_TURBO, 3, 0);
}
END_TEST

/* ---- encode and decode ---- */

START_TEST(codes_are_packed_from_the_low_bits_up) {
    packed p;
    float x[32];
    float back[32];

    ck_assert(packed_make(2, 32, 32, FKV_F16, &p));
    for (uint32_t i = 0; i < 32; i++) x[i] = 1.0f - 0.5f * (float)(i % 4);
    packed_encode(&p, x);
    packed_decode(&p, back);
    for (uint32_t i = 0; i < 8; i++) ck_assert_uint_eq(p.bytes[FKV_PART_CODES][i], 0xe4);
    ck_assert(packed_half(&p, FKV_PART_SCALES, 0) == -0.5f && packed_half(&p, FKV_PART_BIASES, 0) == 1.0f);
    ck_assert_mem_eq(back, x, sizeof x);

    ck_assert(packed_make(4, 32, 32, FKV_BF16, &p));
    for (uint32_t i = 0; i < 32; i++) x[i] = -15.0f + (float)(i % 16);
    packed_encode(&p, x);
    packed_decode(&p, back);
    for (uint32_t i = 0; i < 16; i++) ck_assert_uint_eq(p.bytes[FKV_PART_CODES][i], 0x10 + 0x22 * (i % 8));
    ck_assert(packed_half(&p, FKV_PART_SCALES, 0) == 1.0f && packed_half(&p, FKV_PART_BIASES, 0) == -15.0f);
    ck_assert_mem_eq(back, x, sizeof x);

    ck_assert(packed_make(8, 32, 32, FKV_F16, &p));
    for (uint32_t i = 0; i < 32; i++) x[i] = i == 0 ? 255.0f : (float)i - 1.0f;
    packed_encode(&p, x);
    packed_decode(&p, back);
    for (uint32_t i = 0; i < 32; i++) ck_assert_uint_eq(p.bytes[FKV_PART_CODES][i], i == 0 ? 0 : 256 - i);
    ck_assert_mem_eq(back, x, sizeof x);
}
END_TEST

/* Returns half the distance between adjacent values of the 16-bit type at the given magnitude, which is the largest error of
 * rounding to the type. */
static double half_ulp(fkv_type type, double magnitude) {
    int exponent;
    (void)frexp(magnitude, &exponent);
    int least = type == FKV_BF16 ? -125 : -13;
    return ldexp(1.0, (exponent < least ? least : exponent) - (type == FKV_BF16 ? 9 : 12));
}

/* Returns a bound on |x - decode(encode(x))|. Let c be the code, s and b the scale and bias before rounding to 16 bits, S and B
 * those after rounding, and bins the largest code. If x is within the range of the codes, then |x - (s * c + b)| <= |s| / 2.
 * Values beyond the largest code are off by at most |s|, for the following reason. Let range be the difference between the
 * largest and the smallest value of the group, and edge whichever of these two values has the larger magnitude. Let s0 = range /
 * bins and r = |edge / s0|. The encoder sets s = edge / rint(edge / s0), so |s| is at least |s0| * r / (r + 1/2). The range is
 * therefore at most bins * (r + 1/2) / r steps. Because |edge| is at least half the range, r >= bins / 2, and the range is at
 * most bins + 1 steps. Rounding to 16 bits adds at most |s * c - S * c| <= c * half_ulp(S) and |b - B| <= half_ulp(B). Also, |s|
 * <= |S| + half_ulp(S). FLOAT_SLACK covers the errors of float arithmetic. */
static double step_bound(const packed *p, uint32_t i) {
    fkv_type type = p->codec.type;
    double scale = fabs((double)packed_half(p, FKV_PART_SCALES, i / p->codec.group));
    double bias = fabs((double)packed_half(p, FKV_PART_BIASES, i / p->codec.group));
    double bins = (double)((1u << p->codec.bits) - 1u);
    double code = (double)packed_code(p, i);
    double reach = code == bins ? 1.0 : 0.5;
    return reach * (scale + half_ulp(type, scale)) + code * half_ulp(type, scale) + half_ulp(type, bias) +
           FLOAT_SLACK * (bias + bins * scale);
}

static void check_step_bound(packed *p, random_state *d) {
    float x[MAX_DIM];
    float back[MAX_DIM];
    for (uint32_t r = 0; r < 20 * N_ROW_KINDS; r++) {
        fill_row(d, (row_kind)(r % N_ROW_KINDS), p->codec.dim, x);
        packed_encode(p, x);
        packed_decode(p, back);
        for (uint32_t i = 0; i < p->codec.dim; i++) {
            double error = fabs((double)x[i] - (double)back[i]);
            double bound = p->codec.bits == 16 ? half_ulp(p->codec.type, (double)x[i]) : step_bound(p, i);
            if (!(error <= bound))
                ck_abort_msg("row %u, channel %u: %g decoded as %g, error %g, bound %g (%u bits, group %u, D %u)", r, i,
                             (double)x[i], (double)back[i], error, bound, p->codec.bits, p->codec.group, p->codec.dim);
        }
    }
}

START_TEST(decoded_values_stay_within_the_error_bound) { for_every_codec(2, check_step_bound); }
END_TEST

START_TEST(edge_is_exact_and_the_other_end_may_be_off_by_one_step) {
    packed p;
    float x[32] = {[3] = 1.0f, [9] = -1.0f};
    float back[32];
    ck_assert(packed_make(2, 32, 32, FKV_F16, &p));
    packed_encode(&p, x);
    packed_decode(&p, back);
    ck_assert(back[3] == 1.0f && back[9] == -0.5f && back[0] == 0.0f);
}
END_TEST

static void check_constants(packed *p, random_state *d) {
    const float constants[] = {0.0f, -0.0f, 1.0f, -1.5f, 65504.0f, -65504.0f, 0x1p-24f, 1024.0f};
    (void)d;
    for (size_t c = 0; c < sizeof constants / sizeof constants[0]; c++) {
        float value = fkv_half_to_f32(p->codec.type, fkv_f32_to_half(p->codec.type, constants[c]));
        float x[MAX_DIM];
        float back[MAX_DIM];
        for (uint32_t i = 0; i < p->codec.dim; i++) x[i] = value;
        packed_encode(p, x);
        packed_decode(p, back);
        for (uint32_t i = 0; i < p->codec.dim; i++) ck_each(back[i] == value);
    }
}

START_TEST(constant_rows_are_exact) { for_every_codec(3, check_constants); }
END_TEST

START_TEST(constant_at_the_limit_is_stored_as_bias) {
    packed p;
    float x[32];
    float back[32];
    ck_assert(packed_make(4, 32, 32, FKV_BF16, &p));
    for (uint32_t i = 0; i < 32; i++) x[i] = fkv_codec_limit(FKV_BF16);
    packed_encode(&p, x);
    packed_decode(&p, back);
    for (uint32_t i = 0; i < 16; i++) ck_assert_uint_eq(p.bytes[FKV_PART_CODES][i], 0);
    ck_assert_mem_eq(back, x, sizeof x);
}
END_TEST

static void check_group_is_alone(packed *p, random_state *d) {
    uint32_t group = p->codec.group;
    uint32_t dim = p->codec.dim;
    float x[MAX_DIM];
    packed alone;
    if (p->codec.bits == 16) return;
    fill_row(d, ROW_NORMAL, dim, x);
    for (uint32_t g = 0; g < dim / group; g++) x[g * group] *= (float)(1u << 2 * g % 16);
    packed_encode(p, x);
    ck_assert(packed_make(p->codec.bits, group, group, p->codec.type, &alone));
    for (uint32_t g = 0; g < dim / group; g++) {
        uint32_t code_bytes = alone.codec.row_bytes[FKV_PART_CODES];
        packed_encode(&alone, x + (size_t)g * group);
        ck_assert_mem_eq(alone.bytes[FKV_PART_CODES], p->bytes[FKV_PART_CODES] + (size_t)g * code_bytes, code_bytes);
        ck_assert_mem_eq(alone.bytes[FKV_PART_SCALES], p->bytes[FKV_PART_SCALES] + (size_t)g * 2, 2);
        ck_assert_mem_eq(alone.bytes[FKV_PART_BIASES], p->bytes[FKV_PART_BIASES] + (size_t)g * 2, 2);
    }
}

START_TEST(groups_are_independent) { for_every_codec(4, check_group_is_alone); }
END_TEST

/* Places the codes, scales and biases at odd addresses, between canary bytes. */
static void check_bounds(packed *p, random_state *d) {
    float x[MAX_DIM];
    float back[MAX_DIM];
    float expected[MAX_DIM];
    uint8_t room[FKV_N_PARTS][2 * MAX_DIM + 16];
    memset(room, CANARY, sizeof room);
    fill_row(d, ROW_OUTLIERS, p->codec.dim, x);
    uint8_t *const part[FKV_N_PARTS] = {room[0] + 7, room[1] + 7, room[2] + 7};
    const uint8_t *const written[FKV_N_PARTS] = {room[0] + 7, room[1] + 7, room[2] + 7};
    fkv_codec_encode(&p->codec, x, part);
    fkv_codec_decode(&p->codec, written, back);
    packed_encode(p, x);
    packed_decode(p, expected);
    ck_assert_mem_eq(back, expected, p->codec.dim * sizeof back[0]);
    for (int i = 0; i < FKV_N_PARTS; i++) {
        uint32_t end = 7 + p->codec.row_bytes[i];
        ck_assert_mem_eq(written[i], p->bytes[i], p->codec.row_bytes[i]);
        for (uint32_t at = 0; at < sizeof room[i]; at++) ck_each((at >= 7 && at < end) || room[i][at] == CANARY);
    }
}

START_TEST(encode_writes_exactly_its_row_bytes_at_any_alignment) { for_every_codec(5, check_bounds); }
END_TEST

START_TEST(rows_of_16_bits_round_trip_within_the_limit) {
    for (size_t t = 0; t < 2; t++) {
        fkv_type type = page_types[t];
        float limit = fkv_codec_limit(type);
        packed p;
        ck_assert(packed_make(16, 0, 512, type, &p));
        for (uint32_t first = 0; first < 65536; first += 512) {
            float x[512];
            for (uint32_t i = 0; i < 512; i++) x[i] = fkv_half_to_f32(type, (uint16_t)(first + i));
            packed_encode(&p, x);
            for (uint32_t i = 0; i < 512; i++) {
                uint16_t word;
                memcpy(&word, p.bytes[FKV_PART_CODES] + 2 * (size_t)i, sizeof word);
                float expected = isnan(x[i]) ? 0.0f : fmaxf(fminf(x[i], limit), -limit);
                ck_each(word == (fabsf(x[i]) <= limit ? first + i : fkv_f32_to_half(type, expected)));
            }
        }
    }
}
END_TEST

/* ---- NaN and infinity ---- */

static void check_same_bytes(packed *p, const float *x, const float *as_if) {
    packed expected = *p;
    packed_encode(p, x);
    packed_encode(&expected, as_if);
    ck_assert_mem_eq(p->bytes, expected.bytes, sizeof p->bytes);
}

static void check_non_finite(packed *p, random_state *d) {
    float limit = fkv_codec_limit(p->codec.type);
    const struct {
        float given, stored;
    } odd[] = {{NAN, 0.0f},      {-NAN, 0.0f},       {INFINITY, limit},       {-INFINITY, -limit},
               {FLT_MAX, limit}, {-FLT_MAX, -limit}, {1.001f * limit, limit}, {-1.001f * limit, -limit}};
    float x[MAX_DIM];
    float as_if[MAX_DIM];
    for (size_t o = 0; o < sizeof odd / sizeof odd[0]; o++) {
        for (uint32_t n_odd = 1; n_odd <= p->codec.dim; n_odd += p->codec.dim - 1) {
            fill_row(d, ROW_NORMAL, p->codec.dim, x);
            memcpy(as_if, x, sizeof x);
            for (uint32_t i = 0; i < n_odd; i++) {
                uint32_t at = n_odd == 1 ? random_u32(d) % p->codec.dim : i;
                x[at] = odd[o].given;
                as_if[at] = odd[o].stored;
            }
            check_same_bytes(p, x, as_if);
            fkv_codec_clean(&p->codec, x);
            ck_assert_mem_eq(x, as_if, p->codec.dim * sizeof x[0]);
        }
    }
}

START_TEST(nan_is_stored_as_zero_and_large_values_are_clamped) { for_every_codec(6, check_non_finite); }
END_TEST

static void check_finite(packed *p, random_state *d) {
    float x[MAX_DIM];
    for (int r = 0; r < 200; r++) {
        uint32_t keep = r % 2 == 0 ? UINT32_MAX : 0xff800000u | random_u32(d);
        for (uint32_t i = 0; i < p->codec.dim; i++) x[i] = fkv_float_of(random_u32(d) & keep);
        if (r % 3 == 0) x[random_u32(d) % p->codec.dim] = random_u32(d) % 2 ? NAN : -INFINITY;
        packed_encode(p, x);
        if (p->codec.bits != 16) {
            for (uint32_t g = 0; g < p->codec.dim / p->codec.group; g++) {
                ck_each(isfinite(packed_half(p, FKV_PART_SCALES, g)));
                ck_each(isfinite(packed_half(p, FKV_PART_BIASES, g)));
            }
        }
        packed_decode(p, x);
        for (uint32_t i = 0; i < p->codec.dim; i++) ck_each(isfinite(x[i]));
    }
}

START_TEST(stored_and_decoded_values_are_always_finite) { for_every_codec(7, check_finite); }
END_TEST

/* ---- least-squares fit ---- */

static double squared_error(packed *p, const float *x) {
    float back[MAX_DIM];
    double sum = 0.0;
    packed_encode(p, x);
    packed_decode(p, back);
    for (uint32_t i = 0; i < p->codec.dim; i++) sum += ((double)back[i] - x[i]) * ((double)back[i] - x[i]);
    return sum;
}

/* Checks the least-squares fit with rows that look like rotated rows. 8-bit and 16-bit codecs have no fit. */
static void check_fitted(packed *p, random_state *d) {
    packed fitted = *p;
    fkv_codec_rotated(&fitted.codec);
    ck_assert(fitted.codec.fitted == (p->codec.bits <= 4));
    double plain_error = 0.0;
    double fitted_error = 0.0;
    for (int r = 0; r < 200; r++) {
        float x[MAX_DIM];
        fill_row(d, ROW_NORMAL, p->codec.dim, x);
        plain_error += squared_error(p, x);
        fitted_error += squared_error(&fitted, x);
    }
    ck_assert_double_le(fitted_error, (p->codec.bits == 2 ? 0.8 : p->codec.bits == 4 ? 0.92 : 1.0) * plain_error);
}

START_TEST(fitted_line_reduces_the_error) { for_every_codec(8, check_fitted); }
END_TEST

static void check_fitted_oddities(packed *p, random_state *d) {
    float x[MAX_DIM];
    float back[MAX_DIM];
    fkv_codec_rotated(&p->codec);
    fill_row(d, ROW_CONSTANT, p->codec.dim, x);
    packed_encode(p, x);
    packed_decode(p, back);
    for (uint32_t i = 0; i < p->codec.dim; i++) ck_each(fabsf(back[i] - x[i]) <= 0x1p-7f * fabsf(x[i]) + 4e-7f);
    check_finite(p, d);
}

START_TEST(fitted_line_is_storable_for_any_row) { for_every_codec(9, check_fitted_oddities); }
END_TEST

/* ---- blocks ---- */

static void check_block(const fkv_codec *k, const fkv_codec *v, uint32_t page_tokens) {
    fkv_block block;
    uint64_t end = 0;
    fkv_block_make(k, v, page_tokens, &block);
    ck_each(block.page_tokens == page_tokens);
    for (int side = 0; side < FKV_N_SIDES; side++) {
        const fkv_codec *codec = side == FKV_SIDE_K ? k : v;
        ck_each(block.codec[side].bits == codec->bits);
        for (int part = 0; part < FKV_N_PARTS; part++) {
            ck_each(block.offset[side][part] % FKV_BLOCK_ALIGN == 0);
            ck_each(block.offset[side][part] >= end);
            ck_each(block.offset[side][part] < end + FKV_BLOCK_ALIGN);
            end = block.offset[side][part] + (uint64_t)page_tokens * codec->row_bytes[part];
        }
    }
    ck_each(block.bytes % FKV_BLOCK_ALIGN == 0);
    ck_each(block.bytes >= end);
    ck_each(block.bytes < end + FKV_BLOCK_ALIGN);
}

START_TEST(block_parts_are_aligned_ordered_and_disjoint) {
    fkv_codec codecs[128];
    uint32_t n = 0;
    packed p;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        for (size_t b = 0; b < sizeof widths / sizeof widths[0]; b++)
            for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++)
                if (packed_make(widths[b], groups[g], dims[i], FKV_F16, &p)) codecs[n++] = p.codec;
    for (uint32_t k = 0; k < n; k++)
        for (uint32_t v = 0; v < n; v++)
            for (uint32_t tokens = 16; tokens <= 256; tokens *= 2) check_block(&codecs[k], &codecs[v], tokens);
}
END_TEST

START_TEST(block_rows_are_token_major_and_disjoint) {
    enum { TOKENS = 16, DIM = 96 };
    packed k;
    packed v;
    fkv_block block;
    ck_assert(packed_make(2, 32, DIM, FKV_F16, &k));
    ck_assert(packed_make(4, 32, DIM, FKV_F16, &v));
    fkv_block_make(&k.codec, &v.codec, TOKENS, &block);
    uint8_t *bytes = malloc(block.bytes);
    ck_assert_ptr_nonnull(bytes);
    memset(bytes, 0, block.bytes);

    uint64_t n_marked = 0;
    for (uint32_t token = 0; token < TOKENS; token++) {
        for (int side = 0; side < FKV_N_SIDES; side++) {
            uint8_t *part[FKV_N_PARTS];
            fkv_block_row(&block, bytes, (fkv_side)side, token, part);
            for (int i = 0; i < FKV_N_PARTS; i++) {
                ck_assert_ptr_eq(part[i], bytes + block.offset[side][i] + (size_t)token * block.codec[side].row_bytes[i]);
                for (uint32_t at = 0; at < block.codec[side].row_bytes[i]; at++) ck_each(part[i][at]++ == 0);
                n_marked += block.codec[side].row_bytes[i];
            }
        }
    }
    ck_assert_uint_eq(n_marked, TOKENS * (24 + 6 + 6 + 48 + 6 + 6));
    free(bytes);
}
END_TEST

/* ---- rotation ---- */

START_TEST(rotation_signs_and_rows_match_the_documentation) {
    const uint32_t stream_0[] = {0x89025cc1, 0x910a2dec, 0x658eec67, 0xbeeb8da1};
    const uint32_t stream_1[] = {0xef0dcf6f, 0x48416938, 0x7ea88ca1, 0x8596845e};
    const float rotated[] = {0.5f, -15.5f, 15.5f, -0.5f, 1.5f, 13.5f,  2.5f,   -1.5f,
                             1.5f, 13.5f,  -5.5f, -1.5f, 4.5f, -15.5f, -18.5f, 1.5f};
    fkv_rotation r;
    float x[16];
    fkv_rotation_make(1, 0, 128, &r);
    ck_assert_mem_eq(r.signs, stream_0, sizeof stream_0);
    ck_assert_uint_eq(r.signs[4], 0);
    fkv_rotation_make(1, 1, 128, &r);
    ck_assert_mem_eq(r.signs, stream_1, sizeof stream_1);
    fkv_rotation_make(1, 0, 80, &r);
    ck_assert(r.signs[0] == stream_0[0] && r.signs[1] == stream_0[1] && r.signs[2] == (stream_0[2] & 0xffff) && r.signs[3] == 0);

    fkv_rotation_make(1, 0, 16, &r);
    for (int i = 0; i < 16; i++) x[i] = (float)(i + 1);
    fkv_rotation_apply(&r, x);
    ck_assert_mem_eq(x, rotated, sizeof rotated);
}
END_TEST

START_TEST(hadamard_block_is_the_largest_power_of_two) {
    const struct {
        uint32_t dim, block;
    } known[] = {{16, 16}, {48, 16}, {64, 64}, {80, 16}, {96, 32}, {128, 128}, {160, 32}, {256, 256}, {512, 512}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        fkv_rotation r;
        fkv_rotation_make(9, 0, known[i].dim, &r);
        ck_assert_uint_eq(r.dim, known[i].dim);
        ck_assert_uint_eq(r.block, known[i].block);
        ck_assert(r.norm == (float)(1.0 / sqrt((double)known[i].block)));
    }
}
END_TEST

static double norm_of(const float *x, uint32_t dim) {
    double sum = 0;
    for (uint32_t i = 0; i < dim; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

static double distance(const float *x, const float *y, uint32_t dim) {
    double sum = 0;
    for (uint32_t i = 0; i < dim; i++) sum += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
    return sqrt(sum);
}

START_TEST(inverse_rotation_restores_the_row_and_norms_are_kept) {
    const double ROUNDING = 1e-6; /* relative rounding error of a rotation and its inverse, each with ten stages of float
                                     additions and one multiplication */
    random_state d = random_new(8);
    for (uint32_t dim = 16; dim <= MAX_DIM; dim += 16) {
        float x[MAX_DIM];
        float y[MAX_DIM];
        fkv_rotation r;
        fkv_rotation_make(random_u32(&d), dim / 16 % 2, dim, &r);
        fill_row(&d, ROW_OUTLIERS, dim, x);
        memcpy(y, x, sizeof x);
        fkv_rotation_apply(&r, y);
        ck_assert(distance(x, y, dim) > 0.1 * norm_of(x, dim));
        ck_assert(fabs(norm_of(y, dim) - norm_of(x, dim)) <= ROUNDING * norm_of(x, dim));
        fkv_rotation_undo(&r, y);
        ck_assert(distance(x, y, dim) <= ROUNDING * norm_of(x, dim));
    }
}
END_TEST

START_TEST(rotation_preserves_dot_products) {
    const double ROUNDING = 1e-6; /* rounding error relative to the product of the two vector norms */
    random_state d = random_new(9);
    for (uint32_t dim = 16; dim <= MAX_DIM; dim += 16) {
        float q[MAX_DIM];
        float k[MAX_DIM];
        double before = 0;
        double after = 0;
        fkv_rotation r;
        fkv_rotation_make(3, 0, dim, &r);
        fill_row(&d, ROW_NORMAL, dim, q);
        fill_row(&d, ROW_OUTLIERS, dim, k);
        double lengths = norm_of(q, dim) * norm_of(k, dim);
        for (uint32_t i = 0; i < dim; i++) before += (double)q[i] * (double)k[i];
        fkv_rotation_apply(&r, q);
        fkv_rotation_apply(&r, k);
        for (uint32_t i = 0; i < dim; i++) after += (double)q[i] * (double)k[i];
        ck_assert(fabs(after - before) <= ROUNDING * lengths);
    }
}
END_TEST

START_TEST(rotation_signs_depend_on_seed_and_stream_and_are_reproducible) {
    fkv_rotation made[64];
    for (uint32_t i = 0; i < 64; i++) fkv_rotation_make(i / 2, i % 2, 128, &made[i]);
    for (uint32_t i = 0; i < 64; i++) {
        fkv_rotation again;
        fkv_rotation_make(i / 2, i % 2, 128, &again);
        ck_assert_mem_eq(&again, &made[i], sizeof again);
        uint32_t n_negated = 0;
        for (uint32_t bit = 0; bit < 128; bit++) n_negated += made[i].signs[bit / 32] >> bit % 32 & 1;
        ck_assert(n_negated > 32 && n_negated < 96);
        for (uint32_t j = 0; j < i; j++) ck_each(memcmp(made[i].signs, made[j].signs, 16) != 0);
    }
}
END_TEST

START_TEST(nan_in_a_rotated_row_affects_only_its_own_channel) {
    enum { DIM = 128, AT = 17 };
    random_state d = random_new(11);
    packed p;
    fkv_rotation r;
    float x[DIM];
    float back[DIM];
    ck_assert(packed_make(8, 64, DIM, FKV_F16, &p));
    fkv_rotation_make(42, 0, DIM, &r);
    fill_row(&d, ROW_NORMAL, DIM, x);
    memcpy(back, x, sizeof x);
    back[AT] = NAN;
    x[AT] = 0.0f;
    fkv_codec_clean(&p.codec, back);
    fkv_rotation_apply(&r, back);
    packed_encode(&p, back);
    packed_decode(&p, back);
    fkv_rotation_undo(&r, back);
    ck_assert(distance(x, back, DIM) < 0.02 * norm_of(x, DIM));
}
END_TEST

/* Returns the relative error of 4-bit codes over many rows. */
static double error_of(row_kind kind, bool rotated) {
    enum { DIM = 128, ROWS = 200 };
    random_state d = {.state = 10};
    double error = 0;
    double length = 0;
    packed p;
    fkv_rotation r;
    ck_assert(packed_make(4, 64, DIM, FKV_F16, &p));
    fkv_rotation_make(42, 0, DIM, &r);
    for (int i = 0; i < ROWS; i++) {
        float x[DIM];
        float back[DIM];
        fill_row(&d, kind, DIM, x);
        memcpy(back, x, sizeof x);
        if (rotated) fkv_rotation_apply(&r, back);
        packed_encode(&p, back);
        packed_decode(&p, back);
        if (rotated) fkv_rotation_undo(&r, back);
        error += pow(distance(x, back, DIM), 2);
        length += pow(norm_of(x, DIM), 2);
    }
    return sqrt(error / length);
}

START_TEST(rotation_improves_4_bit_rows_with_outlier_channels) {
    double plain = error_of(ROW_OUTLIERS, false);
    double rotated = error_of(ROW_OUTLIERS, true);
    ck_assert_msg(rotated < 0.6 * plain, "relative error %g with rotation, %g without", rotated, plain);
    ck_assert(error_of(ROW_NORMAL, true) < 1.1 * error_of(ROW_NORMAL, false));
}
END_TEST

TEST_MAIN("codec", every_16_bit_float_round_trips_through_float, f16_to_f32_matches_the_bit_fields,
          conversion_to_16_bits_rounds_to_nearest_even, conversion_to_f16_at_its_limits, rows_of_every_type_convert_both_ways,
          invalid_configurations_are_rejected_with_their_values, row_bytes_follow_from_bits_and_group,
          explicit_kind_equals_the_kind_derived_from_the_bits, codecs_are_equal_only_if_their_bytes_are,
          codec_names_are_parsed_and_keep_unnamed_groups, canonical_form_names_the_kind_and_drops_unused_groups,
          codes_are_packed_from_the_low_bits_up, decoded_values_stay_within_the_error_bound,
          edge_is_exact_and_the_other_end_may_be_off_by_one_step, constant_rows_are_exact,
          constant_at_the_limit_is_stored_as_bias, groups_are_independent, encode_writes_exactly_its_row_bytes_at_any_alignment,
          rows_of_16_bits_round_trip_within_the_limit, nan_is_stored_as_zero_and_large_values_are_clamped,
          stored_and_decoded_values_are_always_finite, fitted_line_reduces_the_error, fitted_line_is_storable_for_any_row,
          block_parts_are_aligned_ordered_and_disjoint, block_rows_are_token_major_and_disjoint,
          rotation_signs_and_rows_match_the_documentation, hadamard_block_is_the_largest_power_of_two,
          inverse_rotation_restores_the_row_and_norms_are_kept, rotation_preserves_dot_products,
          rotation_signs_depend_on_seed_and_stream_and_are_reproducible, nan_in_a_rotated_row_affects_only_its_own_channel,
          rotation_improves_4_bit_rows_with_outlier_channels)
