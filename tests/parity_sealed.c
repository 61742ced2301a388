/* Compares sealed blocks with a second implementation byte for byte: reads the vectors written by scripts/make-sealed-vectors
 * (its header describes the file) and seals all blocks of the vectors with each supported instruction set. Then seals blocks of
 * random bits with each instruction set and compares the results with those of plain C. Decoded values of sealed blocks must be
 * close to the original values.
 *
 * Does not use the check library, because this program is cross-compiled and run under an emulator.
 *
 * usage: parity_sealed [vectors]
 */
#include "../src/attn/attn.h"
#include "../src/attn/cpu/kernels.h"
#include "../src/base/float16.h"
#include "../src/codec/sealed.h"
#include "channel_bits.h"
#include "sanitized.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* If TEST_EVERY is above 1, every fifth case runs. The settings of the cases repeat with periods that are not multiples of 5. */
enum { CASE_STEP = TEST_EVERY > 1 ? 5 : 1 };

static uint32_t n_passed;
static uint32_t n_failed;

static const fkv_isa isas[] = {FKV_ISA_SCALAR, FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};

/* Header of a case, as stored in the vector file. */
typedef struct seal_case {
    uint32_t type;
    uint32_t dim;
    uint32_t page_tokens;
    uint32_t bits;
    uint32_t open_bits;
    uint32_t open_group;
    uint32_t open_bytes;
    uint32_t sealed_bytes;
} seal_case;

static void count(bool good, const char *what, const seal_case *c, const char *isa) {
    if (good) {
        n_passed++;
        return;
    }
    n_failed++;
    printf("FAIL %s: %s, type %u, D %u, pages of %u tokens, sealed to %u bits from %u\n", what, isa, c->type, c->dim,
           c->page_tokens, c->bits, c->open_bits);
}

static bool make_blocks(const seal_case *c, fkv_block *open, fkv_block *sealed) {
    fkv_codec from;
    fkv_codec k;
    fkv_codec v;
    fkv_type type = (fkv_type)c->type;
    if (fkv_codec_make((fkv_codec_config){c->open_bits, c->open_group}, c->dim, type, &from) != FKV_OK) return false;
    if (fkv_codec_make((fkv_codec_config){c->bits, 0, FKV_CODEC_SEALED}, c->dim, type, &k) != FKV_OK) return false;
    if (fkv_codec_make((fkv_codec_config){c->bits, 0, FKV_CODEC_SEALED_V}, c->dim, type, &v) != FKV_OK) return false;
    fkv_block_make(&from, &from, c->page_tokens, open);
    fkv_block_make(&k, &v, c->page_tokens, sealed);
    return true;
}

static void *zeroes(size_t bytes) {
    void *block = calloc(1, bytes + 1);
    if (block == NULL) abort();
    return block;
}

static void check_isas(const seal_case *c, const fkv_block *open, const fkv_block *sealed, const uint8_t *from,
                       const uint8_t *reference) {
    uint8_t *got = zeroes(sealed->bytes);
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[i]);
        if (kernels == NULL) continue;
        memset(got, 0, sealed->bytes);
        kernels->seal(open, from, sealed, got);
        count(memcmp(got, reference, sealed->bytes) == 0, "bytes differ", c, kernels->name);
    }
    free(got);
}

/* ---- the vectors ---- */

static uint8_t *read_file(const char *path, size_t *bytes) {
    enum { MOST = 1 << 20 };
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        printf("cannot open %s\n", path);
        exit(EXIT_FAILURE);
    }
    uint8_t *data = zeroes(MOST);
    *bytes = fread(data, 1, MOST, file);
    (void)fclose(file);
    return data;
}

enum { CALIBRATED = 0x100 }; /* flag in `bits` */

/* Changes the layout of the block such that its keys are calibrated. */
static void calibrate(const seal_case *c, const fkv_channel_order *order, fkv_block *sealed) {
    fkv_codec k;
    fkv_codec v = sealed->codec[FKV_SIDE_V];
    if (fkv_codec_make((fkv_codec_config){c->bits, 0, FKV_CODEC_CALIBRATED}, c->dim, (fkv_type)c->type, &k) != FKV_OK) abort();
    k.channels = order;
    fkv_block_make(&k, &v, c->page_tokens, sealed);
}

static void vectors(const char *path) {
    size_t left = 0;
    uint8_t *data = read_file(path, &left);
    uint32_t n_cases = 0;
    if (left < 16 || memcmp(data, "FKVSEALS", 8) != 0) {
        printf("%s: not a vector file\n", path);
        exit(EXIT_FAILURE);
    }
    memcpy(&n_cases, data + 12, sizeof n_cases);
    const uint8_t *at = data + 16;
    left -= 16;
    for (uint32_t i = 0; i < n_cases; i++) {
        seal_case c = {0};
        fkv_block open;
        fkv_block sealed;
        if (left >= sizeof c) memcpy(&c, at, sizeof c);
        fkv_channel_order order;
        uint16_t channel[FKV_MAX_HEAD_DIM];
        bool calibrated = (c.bits & CALIBRATED) != 0;
        c.bits &= ~(uint32_t)CALIBRATED;
        uint64_t bytes = sizeof c + (calibrated ? c.dim : 0) + (uint64_t)c.open_bytes + c.sealed_bytes;
        bool made = left >= bytes && make_blocks(&c, &open, &sealed);
        if (made && calibrated) {
            made = fkv_channel_bits_check(at + sizeof c, c.dim, c.bits, 0) == FKV_OK;
            if (made) fkv_channel_order_make(at + sizeof c, c.dim, channel, &order);
            if (made) calibrate(&c, &order, &sealed);
        }
        if (!made || open.bytes != c.open_bytes || sealed.bytes != c.sealed_bytes) {
            count(false, "the blocks in the vector file have unexpected sizes", &c, "case");
            break;
        }
        const uint8_t *from = at + bytes - c.open_bytes - c.sealed_bytes;
        check_isas(&c, &open, &sealed, from, from + c.open_bytes);
        at += bytes;
        left -= bytes;
    }
    count(left == 0, "bytes after the last vector", &(seal_case){0}, "end");
    free(data);
}

/* ---- random blocks ---- */

static uint64_t draw(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Generates rows whose channels differ in magnitude and mean, as in real keys. */
static void fill_open(uint64_t *state, const fkv_block *open, uint8_t *bytes) {
    for (int side = 0; side < FKV_N_SIDES; side++) {
        for (uint32_t t = 0; t < open->page_tokens; t++) {
            float x[FKV_MAX_HEAD_DIM];
            for (uint32_t c = 0; c < open->codec[side].dim; c++) {
                float sum = -2.0f;
                for (int i = 0; i < 4; i++) sum += (float)(draw(state) >> 40) * 0x1p-24f;
                x[c] = side == FKV_SIDE_K ? sum * (float)(1 + c % 7) + (float)(c % 5) : sum;
            }
            uint8_t *part[FKV_N_PARTS];
            fkv_block_row(open, bytes, (fkv_side)side, t, part);
            fkv_codec_encode(&open->codec[side], x, part);
        }
    }
}

/* Returns the squared error of the keys or values of a page, relative to the variance of the keys or the squared norm of the
 * values. */
static double error_of(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, const uint8_t *to, fkv_side side) {
    double error = 0;
    double size = 0;
    float mean[FKV_MAX_HEAD_DIM] = {0};
    uint32_t dim = open->codec[side].dim;
    float x[FKV_MAX_HEAD_DIM];
    float y[FKV_MAX_HEAD_DIM];
    for (uint32_t t = 0; side == FKV_SIDE_K && t < open->page_tokens; t++) {
        fkv_block_decode(open, from, side, t, x);
        for (uint32_t c = 0; c < dim; c++) mean[c] += x[c] / (float)open->page_tokens;
    }
    for (uint32_t t = 0; t < open->page_tokens; t++) {
        fkv_block_decode(open, from, side, t, x);
        fkv_block_decode(sealed, to, side, t, y);
        for (uint32_t c = 0; c < dim; c++) {
            error += pow((double)(y[c] - x[c]), 2);
            size += pow((double)(x[c] - mean[c]), 2);
        }
    }
    return error / size;
}

/* Checks that the error of each calibrated key value is at most about half a quantization step of its channel. Channels are in
 * the order of the open block. */
static void check_calibrated(const fkv_block *open, const uint8_t *from, const fkv_block *sealed, const uint8_t *to,
                             const uint8_t *bits, const seal_case *c) {
    float lo[FKV_MAX_HEAD_DIM];
    float hi[FKV_MAX_HEAD_DIM];
    float x[FKV_MAX_HEAD_DIM];
    float y[FKV_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < c->dim; d++) {
        lo[d] = INFINITY;
        hi[d] = -INFINITY;
    }
    for (uint32_t t = 0; t < c->page_tokens; t++) {
        fkv_block_decode(open, from, FKV_SIDE_K, t, x);
        for (uint32_t d = 0; d < c->dim; d++) {
            lo[d] = fminf(lo[d], x[d]);
            hi[d] = fmaxf(hi[d], x[d]);
        }
    }
    bool good = true;
    for (uint32_t t = 0; t < c->page_tokens; t++) {
        fkv_block_decode(open, from, FKV_SIDE_K, t, x);
        fkv_block_decode(sealed, to, FKV_SIDE_K, t, y);
        for (uint32_t d = 0; d < c->dim; d++) {
            float step = (hi[d] - lo[d]) / (float)((1 << bits[d]) - 1);
            float rounded = (fabsf(lo[d]) + hi[d] - lo[d]) * (c->type == FKV_BF16 ? 0x1p-8f : 0x1p-11f) *
                            2; /* bound on the error from rounding the scale and the bias */
            good = good && fabsf(y[d] - x[d]) <= 0.51f * step + rounded;
        }
    }
    count(good, "the error of calibrated keys exceeds the bound for their bit widths", c, "C");
}

static void calibrated_blocks(void) {
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256, 512};
    uint64_t state = 5;
    for (uint32_t i = 0; i < 96; i += CASE_STEP) {
        seal_case c = {
            .type = 1 + i % 2, .dim = dims[i / 2 % 8], .page_tokens = 16u << i / 3 % 5, .bits = 3 + i / 16 % 2, .open_bits = 8};
        c.open_group = c.dim % 64 == 0 ? 64 : 32;
        if (c.dim % 32 != 0) c.open_bits = 16;
        uint8_t bits[FKV_MAX_HEAD_DIM];
        uint16_t channel[FKV_MAX_HEAD_DIM];
        fkv_channel_order order;
        fkv_block open;
        fkv_block sealed;
        channel_bits_random(&state, c.dim, c.bits, bits);
        fkv_channel_order_make(bits, c.dim, channel, &order);
        if (!make_blocks(&c, &open, &sealed)) abort();
        calibrate(&c, &order, &sealed);
        uint8_t *from = zeroes(open.bytes);
        uint8_t *reference = zeroes(sealed.bytes);
        fill_open(&state, &open, from);
        bool hostile = i % 4 == 3;
        for (uint32_t at = 0; hostile && at < open.bytes; at++) from[at] = (uint8_t)draw(&state);
        fkv_seal_block(&open, from, &sealed, reference);
        check_isas(&c, &open, &sealed, from, reference);
        if (!hostile) check_calibrated(&open, from, &sealed, reference, bits, &c);
        free(from);
        free(reference);
    }
}

static void random_blocks(void) {
    static const uint32_t dims[] = {16, 32, 64, 80, 96, 128, 256, 512};
    static const double most[FKV_N_SIDES][5] = {{0, 0, 0.35, 0.07, 0.015}, {0, 0, 0.14, 0.04, 0.012}}; /* indexed by bits */
    uint64_t state = 3;
    for (uint32_t i = 0; i < 160; i += CASE_STEP) {
        seal_case c = {
            .type = 1 + i % 2, .dim = dims[i / 2 % 8], .page_tokens = 16u << i / 3 % 5, .bits = 2 + i % 3, .open_bits = 8};
        c.open_group = c.dim % 64 == 0 ? 64 : 32;
        if (c.dim % 32 != 0) c.open_bits = 16;
        bool hostile = i % 4 == 3; /* arbitrary bits */
        fkv_block open;
        fkv_block sealed;
        if (!make_blocks(&c, &open, &sealed)) abort();
        uint8_t *from = zeroes(open.bytes);
        uint8_t *reference = zeroes(sealed.bytes);
        fill_open(&state, &open, from);
        for (uint32_t at = 0; hostile && at < open.bytes; at++) from[at] = (uint8_t)draw(&state);
        fkv_seal_block(&open, from, &sealed, reference);
        check_isas(&c, &open, &sealed, from, reference);
        for (int side = 0; !hostile && side < FKV_N_SIDES; side++)
            count(error_of(&open, from, &sealed, reference, (fkv_side)side) < most[side][c.bits],
                  side == 0 ? "key error too large" : "value error too large", &c, "C");
        for (uint32_t t = 0; t < c.page_tokens; t++) { /* sealed values are finite for any input */
            float x[FKV_N_SIDES][FKV_MAX_HEAD_DIM] = {{0}};
            fkv_block_decode(&sealed, reference, FKV_SIDE_K, t, x[0]);
            fkv_block_decode(&sealed, reference, FKV_SIDE_V, t, x[1]);
            bool good = true;
            for (uint32_t d = 0; d < c.dim; d++) good = good && isfinite(x[0][d]) && isfinite(x[1][d]);
            count(good, "not finite", &c, "C");
        }
        free(from);
        free(reference);
    }
}

/* Seals latent blocks: each row is encoded separately, and the 16-bit RoPE channels are copied. */
static void latent_blocks(void) {
    static const uint32_t dims[] = {32, 64, 96, 128, 256, 512};
    uint64_t state = 13;
    for (uint32_t i = 0; i < 48; i++) {
        seal_case c = {.type = 1 + i % 2, .dim = dims[i % 6], .page_tokens = 16u << i / 6 % 5, .bits = i % 4 < 2 ? 4 : 2};
        const uint32_t rope_dim = 16 * (1 + i % 5);
        const fkv_codec_config config = {c.bits, 0, FKV_CODEC_SEALED};
        fkv_codec latent;
        fkv_block open;
        fkv_block sealed;
        fkv_block_make_open(c.dim, rope_dim, (fkv_type)c.type, c.page_tokens, &open);
        if (fkv_codec_make(fkv_block_latent_codec(config, c.dim), c.dim, (fkv_type)c.type, &latent) != FKV_OK) abort();
        if (i % 3 != 0) fkv_codec_rotated(&latent);
        fkv_block_make(&latent, &open.codec[FKV_SIDE_ROPE], c.page_tokens, &sealed);
        c.open_bits = open.codec[FKV_SIDE_LATENT].bits;
        uint8_t *from = zeroes(open.bytes);
        uint8_t *reference = zeroes(sealed.bytes);
        fill_open(&state, &open, from);
        const bool hostile = i % 8 == 7;
        for (uint32_t at = 0; hostile && at < open.bytes; at++) from[at] = (uint8_t)draw(&state);
        fkv_seal_block(&open, from, &sealed, reference);
        check_isas(&c, &open, &sealed, from, reference);
        if (!hostile) {
            const uint32_t rope_bytes = c.page_tokens * rope_dim * 2;
            count(memcmp(from + open.offset[FKV_SIDE_ROPE][FKV_PART_CODES],
                         reference + sealed.offset[FKV_SIDE_ROPE][FKV_PART_CODES], rope_bytes) == 0,
                  "RoPE channels differ", &c, "C");
            count(error_of(&open, from, &sealed, reference, FKV_SIDE_LATENT) < (c.bits == 4 ? 0.03 : 0.7),
                  "latent error too large", &c, "C");
        }
        free(from);
        free(reference);
    }
}

/* A huge key row must not change the sealed form of the other rows. Seals a page with a huge row, and the same page with the huge
 * row replaced by a copy of another row. */
static void huge_rows(void) {
    static const uint32_t dims[] = {64, 80, 128};
    static const float sizes[] = {3e3f, -1e4f, 6e4f, -1e6f, 1e8f, 1e30f, INFINITY, -INFINITY};
    uint64_t state = 9;
    for (uint32_t i = 0; i < 96; i += CASE_STEP) {
        seal_case c = {
            .type = 1 + i % 2, .dim = dims[i % 3], .page_tokens = 16u << i / 2 % 3, .bits = 3 + i / 4 % 2, .open_bits = 8};
        c.open_group = c.dim % 64 == 0 ? 64 : 32;
        if (c.dim % 32 != 0) c.open_bits = 16;
        uint8_t bits[FKV_MAX_HEAD_DIM];
        uint16_t channel[FKV_MAX_HEAD_DIM];
        fkv_channel_order order;
        fkv_block open;
        fkv_block sealed;
        channel_bits_random(&state, c.dim, c.bits, bits);
        fkv_channel_order_make(bits, c.dim, channel, &order);
        if (!make_blocks(&c, &open, &sealed)) abort();
        if (i / 8 % 2 == 0) calibrate(&c, &order, &sealed);
        uint8_t *from = zeroes(open.bytes);
        uint8_t *reference = zeroes(sealed.bytes);
        uint8_t *without = zeroes(sealed.bytes);
        fill_open(&state, &open, from);
        uint32_t row = (uint32_t)(draw(&state) % c.page_tokens);
        float x[FKV_MAX_HEAD_DIM] = {0};
        uint8_t *part[FKV_N_PARTS];
        fkv_block_row(&open, from, FKV_SIDE_K, row, part);
        uint8_t *other[FKV_N_PARTS];
        fkv_block_row(&open, from, FKV_SIDE_K, (row + 1) % c.page_tokens, other);
        for (int p = 0; p < FKV_N_PARTS; p++) memcpy(part[p], other[p], open.codec[FKV_SIDE_K].row_bytes[p]);
        fkv_seal_block(&open, from, &sealed, without);
        fkv_block_decode(&open, from, FKV_SIDE_K, row, x);
        for (uint32_t d = 0; d < c.dim; d++)
            if (i / 16 % 2 == 0 || d == c.dim / 3) x[d] = d % 2 == 0 ? sizes[i % 8] : -sizes[i % 8];
        fkv_codec_encode(&open.codec[FKV_SIDE_K], x, part);
        fkv_seal_block(&open, from, &sealed, reference);
        check_isas(&c, &open, &sealed, from, reference);
        bool same = true;
        for (uint32_t t = 0; t < c.page_tokens; t++) {
            float y[FKV_MAX_HEAD_DIM] = {0};
            fkv_block_decode(&sealed, reference, FKV_SIDE_K, t, y);
            fkv_block_decode(&sealed, without, FKV_SIDE_K, t, x);
            same = same && (t == row || memcmp(x, y, c.dim * sizeof *x) == 0);
        }
        count(same, "a huge row changes other rows", &c, "C");
        free(from);
        free(reference);
        free(without);
    }
}

int main(int argc, char **argv) {
    vectors(argc > 1 ? argv[1] : "tests/vectors/sealed.bin");
    random_blocks();
    calibrated_blocks();
    latent_blocks();
    huge_rows();
    printf("%u passed, %u failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
