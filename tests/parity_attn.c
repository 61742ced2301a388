/* Compares the vector attention kernels with the scalar reference, and checks that outputs are bit-identical regardless of how
 * tokens are divided into steps and of the number of threads. Does not use the check library, because this program is also
 * cross-compiled and run under an emulator. An argument selects one instruction set. By default, all instruction sets that the
 * machine supports are tested.
 */
#include "attn_cases.h"
#include "sanitized.h"

#include "../src/attn/attn_reference.h"
#include "../src/attn/cpu/kernels.h"
#include "../src/base/cpu.h"
#include "../src/base/float16.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Tolerance for kernels that accumulate in float, whereas the reference accumulates in double. Scores are at most a few tens, and
 * histories have at most a few thousand tokens. */
static const double KERNEL_TOLERANCE = 1e-3;

static const fkv_isa isas[] = {FKV_ISA_SCALAR, FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};

static double worst_of[sizeof isas / sizeof isas[0]];
static int n_passed;
static int n_failed;

static void *allocate(size_t bytes) {
    void *block = aligned_alloc(64, fkv_align_up(bytes + 1, 64));
    if (block == NULL) abort();
    return block;
}

/* Returns n_threads workers, which are opened once and kept until the program ends. */
static fkv_workers *workers_of(uint32_t n_threads) {
    static fkv_workers *opened[4];
    if (opened[n_threads] == NULL) {
        void *place = allocate(fkv_workers_bytes(n_threads));
        memset(place, 0, fkv_workers_bytes(n_threads));
        if (fkv_workers_open(place, n_threads, &opened[n_threads]) != FKV_OK) abort();
    }
    return opened[n_threads];
}

static const char *describe(const attn_case *c) {
    static char text[512];
    int n = snprintf(text, sizeof text, "%uq/%ukv/%u+%u %s page %u window %u sinks %u cap %g rotate %d types %d/%d%s",
                     c->shape.n_q_heads, c->shape.n_kv_heads, c->shape.head_dim, c->shape.rope_dim, attn_codecs[c->codec].name,
                     c->page_tokens, c->window, c->n_sinks, (double)c->softcap, (int)c->rotate, (int)c->page_type,
                     (int)c->row_type, c->outliers ? " outliers" : "");
    n +=
        snprintf(text + n, sizeof text - (size_t)n, " scale %g, learned sinks %g, gain and peak: q %g %g, k %g %g, v %g %g; rows",
                 (double)c->scale, (double)c->sinks, (double)c->q.gain, (double)c->q.peak, (double)c->k.gain, (double)c->k.peak,
                 (double)c->v.gain, (double)c->v.peak);
    for (uint32_t r = 0; r < c->n_rows && n < (int)sizeof text - 16; r++)
        n += snprintf(text + n, sizeof text - (size_t)n, " %u+%u", c->rows[r].start, c->rows[r].n_tokens);
    return text;
}

static void report(bool good, const char *isa, const attn_case *c, const char *what, double value) {
    if (good) {
        n_passed++;
        return;
    }
    n_failed++;
    printf("FAILED %s: %s: %s (%g)\n", isa, describe(c), what, value);
}

static void run(const fkv_cpu_kernels *kernels, const attn_fixture *w, const fkv_attn_row *rows, uint32_t n_rows, const void *q,
                void *out, fkv_workers *workers) {
    void *scratch = allocate(fkv_attn_scratch_bytes(&w->layer, n_rows, fkv_workers_count(workers)));
    (void)fkv_attn_attend(kernels, &w->layer, rows, n_rows, q, out, scratch, workers);
    free(scratch);
}

/* Repeats the step with each sequence alone, with each token alone, and with different numbers of threads. All outputs must be
 * bit-identical. */
static void check_same_bits(const fkv_cpu_kernels *kernels, const attn_fixture *w, const uint8_t *together,
                            fkv_workers *const *workers, uint32_t n_workers) {
    size_t row_bytes = (size_t)w->c.shape.n_q_heads * w->c.shape.head_dim * fkv_type_bytes(w->c.row_type);
    size_t q_bytes = (size_t)w->c.shape.n_q_heads * fkv_attn_key_dim(&w->layer) * fkv_type_bytes(w->c.row_type);
    uint8_t *alone = allocate(w->n_new * row_bytes);
    for (uint32_t i = 0; i < n_workers; i++) {
        run(kernels, w, w->rows, w->c.n_rows, w->q, alone, workers[i]);
        report(memcmp(alone, together, w->n_new * row_bytes) == 0, fkv_cpu_kernels_name(kernels), &w->c,
               "outputs are not bit-identical with other thread counts", fkv_workers_count(workers[i]));
    }
    size_t at = 0;
    for (uint32_t r = 0; r < w->c.n_rows; r++) {
        for (uint32_t t = 0; t < w->rows[r].n_tokens; t++, at++) {
            fkv_attn_row one = w->rows[r];
            one.start += t;
            one.n_tokens = 1;
            run(kernels, w, &one, 1, (const uint8_t *)w->q + at * q_bytes, alone + at * row_bytes, workers[t % n_workers]);
        }
    }
    report(memcmp(alone, together, w->n_new * row_bytes) == 0, fkv_cpu_kernels_name(kernels), &w->c,
           "outputs are not bit-identical for single tokens", 0);
    free(alone);
}

static void check_case(const attn_case *c, fkv_isa only) {
    static size_t n_cases;
    const size_t number = n_cases++;
    if (!test_runs_case(number)) return;
    fkv_workers *workers[] = {workers_of(1), workers_of(2), workers_of(3)};
    attn_fixture w;
    if (!attn_fixture_open(&w, c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers[0], 20261115)) return;

    /* Measures the errors of a kernel on float outputs, and checks that 16-bit outputs are equal to the rounded float outputs. */
    size_t n = (size_t)w.n_new * c->shape.n_q_heads * c->shape.head_dim;
    attn_fixture w32 = w;
    w32.layer.row_type = FKV_F32;
    size_t n_queries = (size_t)w.n_new * c->shape.n_q_heads * fkv_attn_key_dim(&w.layer);
    w32.q = allocate(n_queries * sizeof(float));
    fkv_rows_to_f32(c->row_type, w.q, w32.q, n_queries);
    float *reference = allocate(n * sizeof(float));
    float *got32 = allocate(n * sizeof(float));
    void *got = allocate(n * fkv_type_bytes(c->row_type));
    void *rounded = allocate(n * fkv_type_bytes(c->row_type));
    float *vnni32 = allocate(n * sizeof(float));
    bool have_vnni = false;
    fkv_attn_reference(&w32.layer, w.rows, c->n_rows, w32.q, reference);
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[i]);
        if (kernels == NULL || (only != FKV_ISA_AUTO && only != isas[i])) continue;
        if (isas[i] == FKV_ISA_SCALAR && number % 4 != 0) continue; /* scalar kernels would take most of the time */
        run(kernels, &w32, w.rows, c->n_rows, w32.q, got32, workers[0]);
        double worst = 0;
        for (size_t row = 0; row < n; row += c->shape.head_dim) {
            double error = relative_l2(got32 + row, reference + row, c->shape.head_dim);
            if (!(error <= worst)) worst = error;
        }
        report(worst <= KERNEL_TOLERANCE, fkv_cpu_kernels_name(kernels), c, "relative L2 error against the reference", worst);
        if (!(worst <= worst_of[i])) worst_of[i] = worst;
        if (isas[i] == FKV_ISA_AVX512VNNI) {
            have_vnni = true;
            memcpy(vnni32, got32, n * sizeof(float));
        }
        if (isas[i] == FKV_ISA_AMX && have_vnni)
            report(memcmp(got32, vnni32, n * sizeof(float)) == 0, fkv_cpu_kernels_name(kernels), c, "not bit-identical to VNNI",
                   0);
        run(kernels, &w, w.rows, c->n_rows, w.q, got, workers[0]);
        fkv_rows_from_f32(c->row_type, got32, rounded, n);
        report(memcmp(got, rounded, n * fkv_type_bytes(c->row_type)) == 0, fkv_cpu_kernels_name(kernels), c,
               "16-bit outputs are not the rounded float outputs", 0);
        check_same_bits(kernels, &w, got, workers + 1, 2);
    }
    free(w32.q);
    free(reference);
    free(vnni32);
    free(got32);
    free(got);
    free(rounded);
    attn_fixture_close(&w);
}

static const attn_shape shapes[] = {{4, 4, 64},  {4, 1, 80},  {9, 3, 96},  {8, 2, 128},
                                    {4, 1, 256}, {7, 1, 512}, {40, 1, 64}, {2, 2, 16}};

/* Numbers of cached tokens around every boundary: one token, a page, a tile and a split. */
static const uint32_t starts[] = {0, 1, 15, 16, 17, 62, 63, 64, 65, 127, 128, 255, 256, 257, 700};

static void every_codec_and_shape(fkv_isa only) {
    for (uint32_t codec = 0; codec < N_ATTN_CODECS; codec++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            attn_case c = {.shape = shapes[s], .codec = codec, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 2};
            c.rows[0] = (attn_mix){130, 1};
            c.rows[1] = (attn_mix){61, 5};
            c.outliers = (codec + s) % 2 == 1;
            check_case(&c, only);
            c.page_type = FKV_BF16;
            c.row_type = codec % 3 == 0 ? FKV_F16 : codec % 3 == 1 ? FKV_BF16 : FKV_F32;
            c.rotate = (fkv_rotate)(1 + (codec + s) % 3);
            c.outliers = !c.outliers;
            check_case(&c, only);
        }
    }
}

static void every_length_and_mask(fkv_isa only) {
    static const struct {
        uint32_t window;
        uint32_t n_sinks;
    } masks[] = {{0, 0}, {1, 0}, {7, 0}, {7, 4}, {64, 1}, {65, 70}, {200, 16}};
    for (size_t m = 0; m < sizeof masks / sizeof masks[0]; m++) {
        for (size_t s = 0; s < sizeof starts / sizeof starts[0]; s++) {
            attn_case c = {.shape = {6, 2, 64}, .codec = 2 /* 8/4 */, .page_type = FKV_F16, .n_rows = 2};
            c.page_tokens = 16u << s % 5;
            c.window = masks[m].window;
            c.n_sinks = masks[m].n_sinks;
            c.softcap = s % 2 == 0 ? 0.0f : 30.0f;
            c.sinks = s % 3 == 0 ? 0.0f : 4.0f;
            c.outliers = c.sinks == 0; /* with outlier channels, some scores would be several hundred below the sink logit, and
                                          the outputs would underflow */
            c.rows[0] = (attn_mix){starts[s], 1};
            c.rows[1] = (attn_mix){starts[sizeof starts / sizeof starts[0] - 1 - s], 19};
            check_case(&c, only);
        }
    }
}

/* Tests latent layers with every codec that encodes single rows, with the shapes of published models and unusual shapes, with
 * masks, and with histories of several splits. */
static void latent_layers(fkv_isa only) {
    static const attn_shape latent_shapes[] = {
        {16, 1, 512, 64}, {5, 1, 256, 32}, {40, 1, 64, 16}, {3, 1, 96, 48}, {128, 1, 32, 16}};
    enum { N_SHAPES = sizeof latent_shapes / sizeof latent_shapes[0] };
    for (uint32_t codec = 0; codec < FIRST_SEALED_CODEC; codec++) {
        for (uint32_t s = 0; s < 2; s++) {
            attn_case c = {.shape = latent_shapes[(codec + s * 2) % N_SHAPES], .codec = codec, .page_tokens = 64, .n_rows = 2};
            c.page_type = (codec + s) % 2 == 0 ? FKV_F16 : FKV_BF16;
            c.row_type = (fkv_type)((codec + s) % 3);
            c.rotate = (fkv_rotate)(codec % 2 == s ? FKV_ROTATE_NONE : FKV_ROTATE_K);
            c.rows[0] = (attn_mix){130, 1};
            c.rows[1] = (attn_mix){61, 5};
            c.outliers = s == 1;
            check_case(&c, only);
        }
    }
    for (uint32_t i = 0; i < 6; i++) {
        attn_case c = {.shape = latent_shapes[i % N_SHAPES], .codec = i % 4, .page_tokens = 16u << i % 5, .n_rows = 2};
        c.page_type = FKV_F16;
        c.window = i % 2 == 0 ? 0 : 70;
        c.n_sinks = i % 2 == 0 ? 0 : 3;
        c.softcap = i % 3 == 0 ? 30.0f : 0.0f;
        c.sinks = i % 3 == 1 ? 4.0f : 0.0f;
        c.rows[0] = (attn_mix){900 + 7 * i, 1};
        c.rows[1] = (attn_mix){starts[i], 19};
        check_case(&c, only);
    }
}

/* Tests latent layers whose pages are all sealed, and sealed latent layers, in which a query reads both open and sealed pages. */
static void sealed_latent_layers(fkv_isa only) {
    static const attn_shape latent_shapes[] = {
        {16, 1, 512, 64}, {5, 1, 256, 32}, {40, 1, 64, 16}, {3, 1, 96, 48}, {128, 1, 32, 16}};
    for (uint32_t i = 0; i < 40; i++) {
        attn_case c = {.shape = latent_shapes[i % 5],
                       .codec = FIRST_SEALED_CODEC + (i / 5 % 2 == 0 ? 0 : 2), /* s4/s4 or s2/s2 */
                       .page_tokens = 16u << i % 3,
                       .n_rows = 3,
                       .opens = i % 4 != 3};
        c.page_type = i % 2 == 0 ? FKV_F16 : FKV_BF16;
        c.row_type = (fkv_type)(i % 3);
        c.rotate = (fkv_rotate)(i / 4 % 4);
        c.window = i % 6 == 5 ? 150 : 0;
        c.n_sinks = i % 6 == 5 ? 3 : 0;
        c.softcap = i % 7 == 6 ? 30.0f : 0.0f;
        c.sinks = i % 5 == 4 ? 4.0f : 0.0f;
        c.outliers = c.sinks == 0 && i % 2 == 1;
        c.rows[0] = (attn_mix){i % 8 == 0 ? 1100 : 330, 1};
        c.rows[1] = (attn_mix){starts[i % (sizeof starts / sizeof starts[0])], 19};
        c.rows[2] = (attn_mix){61, i % 9 == 0 ? 200 : 5};
        check_case(&c, only);
    }
}

/* Tests histories with several splits. In one case, the queries of a tile have splits of different lengths. */
static void long_histories(fkv_isa only) {
    attn_case c = {.shape = {4, 2, 64}, .codec = 2, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 3};
    c.rows[0] = (attn_mix){5000, 1};
    c.rows[1] = (attn_mix){8188, 8}; /* the length of a split doubles at token 8192 */
    c.rows[2] = (attn_mix){300, 3};
    check_case(&c, only);
    c.window = 600;
    c.n_sinks = 5;
    c.sinks = 6;
    check_case(&c, only);
    c.n_rows = 1;
    c.codec = 0;
    check_case(&c, only);
}

/* Tests histories with several splits and with enough sealed pages for kernels that process many pages at once. In some queries,
 * one channel is much larger than the others, so kernels must use float instead of integer dot products. */
static void runs_of_sealed_pages(fkv_isa only) {
    static const attn_shape run_shapes[] = {{4, 1, 128}, {8, 2, 128}, {3, 3, 64}, {2, 1, 96}, {4, 1, 256}, {4, 2, 512}};
    for (uint32_t codec = FIRST_SEALED_CODEC; codec < N_ATTN_CODECS; codec++) {
        for (size_t s = 0; s < sizeof run_shapes / sizeof run_shapes[0]; s++) {
            attn_case c = {.shape = run_shapes[s], .codec = codec, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 2};
            c.rows[0] = (attn_mix){900 + 64 * (uint32_t)s, TEST_SANITIZED ? 1 : 2};
            c.rows[1] = (attn_mix){255 + 64 * (codec % 3), 1}; /* the sequence has three to five full pages */
            c.opens = (codec + s) % 2 == 0;
            check_case(&c, only);
            c.outliers = true;
            c.q.peak = 300;
            c.opens = !c.opens;
            check_case(&c, only);
        }
    }
}

/* Tests prefill over sealed pages with queries of different sizes. Integer kernels round small queries to 16 bits and larger
 * queries to 23 bits. With some gains, rows of both kinds are in one block of 16 rows. */
static void every_size_of_queries(fkv_isa only) {
    static const attn_shape block_shapes[] = {{4, 1, 64}, {4, 1, 128}, {4, 1, 256}, {4, 1, 96}};
    static const uint32_t codecs[] = {FIRST_SEALED_CODEC, FIRST_CALIBRATED_CODEC};
    static const float gains[] = {0.3f, 0.6f, 1, 1.5f, 2, 2.5f, 3, 5};
    for (uint32_t i = 0; i < sizeof gains / sizeof gains[0]; i++) {
        for (uint32_t k = 0; k < 2;
             k++) { /* one shape per size is enough, because the 16-bit limit does not depend on the shape */
            attn_case c = {
                .shape = block_shapes[(i + k) % 4], .codec = codecs[k], .page_tokens = 64, .page_type = FKV_F16, .n_rows = 1};
            c.rows[0] = TEST_SANITIZED ? (attn_mix){280, 5} : (attn_mix){600, 9}; /* at least 16 rows of queries */
            c.q.gain = gains[i];
            check_case(&c, only);
        }
    }
}

/* ---- full configuration range ---- */

/* Returns the next case of a cycle through codecs and shapes. Each test below varies one setting (scale, soft cap or magnitude of
 * values) over its whole range. The other settings keep scores at a few tens or less. */
static attn_case sweep_case(void) {
    static const attn_shape sweep_shapes[] = {{8, 2, 128}, {3, 1, 64}, {16, 1, 128}, {4, 1, 256}};
    enum { S4 = FIRST_SEALED_CODEC, S3, C4 = FIRST_CALIBRATED_CODEC, C3 };
    static const uint32_t codecs[] = {3, 2, 0, 8, 1, 6, 7, S4, S3, C4, C3, 3, 2, 13, 8, 1, 15, 7, S4, S3, C4};
    /* names of the codecs: 4/4, 8/4, 16/16, 4/4 g32, 8/8, 2/2, 8/4 g32, s4/s4, s3/s3, c4/s4, c3/s3; the second half of the list
     * has tq4 and tq2 instead of 16/16 and 2/2 */
    static uint32_t turn;
    attn_case c = {.shape = sweep_shapes[turn % 4], .codec = codecs[turn % 21], .page_tokens = 64, .n_rows = 2};
    c.page_type = turn / 2 % 2 == 0 ? FKV_F16 : FKV_BF16;
    c.rows[0] = (attn_mix){130, 1};
    c.rows[1] = (attn_mix){61, 5};
    turn++;
    return c;
}

/* Returns the score scale, 1 / sqrt(D), at which queries and keys with values around 1 give scores around 1. */
static float plain_scale(const attn_case *c) { return 1.0f / sqrtf((float)c->shape.head_dim); }

static void every_softcap(fkv_isa only) {
    static const float caps[] = {1e-45f, 1e-39f, 1e-30f, 1e-6f, 1e-2f, 0.5f,  2,     10,     30,
                                 1e3f,   1e4f,   3e4f,   3e5f,  3e7f,  1e12f, 1e30f, 3.4e38f};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        static const float gains[] = {1, 8,
                                      1e-44f}; /* query gains that give scores around 1, scores of a few tens, and scores of 0 */
        for (int g = 0; g < 3; g++) {
            attn_case c = sweep_case();
            c.softcap = caps[i];
            c.q.gain = gains[g];
            if (g < 2 || caps[i] < 1) check_case(&c, only);
        }
    }
}

static void every_scale(fkv_isa only) {
    const float scales[] = {FKV_SMALLEST_SCALE, 1e-3f, 1, 1e3f, FKV_LARGEST_SCALE};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            attn_case c = sweep_case();
            c.scale = (float)sign * scales[i];
            c.q.gain = plain_scale(&c) / scales[i];
            check_case(&c, only);
        }
    }
}

/* Tests learned sink logits of all magnitudes: negligible, dominant, and so large that all outputs are 0. */
static void every_sink(fkv_isa only) {
    static const float sizes[] = {1e-38f, 1, 10, 30, 1e38f};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        attn_case c = sweep_case();
        c.sinks = sizes[i];
        c.softcap = i % 2 == 0 ? 0 : 5;
        check_case(&c, only);
    }
}

/* Returns true if the scores of the case cannot be accurate in float. In open pages of a sealed layer, several channels share a
 * scale, so a channel with values around 1e-9 is decoded with a large relative error. Queries around 1e9 multiply this error,
 * which makes the softmax meaningless. */
static bool exceeds_float_precision(const attn_case *c) {
    return c->codec >= FIRST_SEALED_CODEC && c->q.peak * c->k.peak > 0 && c->q.peak > 1e6f;
}

/* Tests queries in which one channel is many times larger than the others: with ordinary keys, with keys that are small in the
 * same channel, and with a rotation. */
static void every_peak_of_queries(fkv_isa only) {
    static const float peaks[] = {30, 100, 300, 600, 1000, 3000, 1e4f, 3e4f, 1e5f, 1e6f, 1e9f};
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++) {
        for (uint32_t how = 0; how < 3; how++) {
            attn_case c = sweep_case();
            c.q.peak = peaks[i];
            if (how == 1) c.k.peak = 1 / peaks[i];
            if (how == 2) c.rotate = FKV_ROTATE_K;
            if (!exceeds_float_precision(&c)) check_case(&c, only);
        }
    }
}

/* Tests keys in which one channel is many times larger than the others, up to values that exceed the codec's limit and are
 * clamped. */
static void every_peak_of_keys(fkv_isa only) {
    static const float peaks[] = {100, 1000, 1e4f, 1e6f};
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++) {
        for (uint32_t rotated = 0; rotated < 2; rotated++) {
            attn_case c = sweep_case();
            c.k.peak = peaks[i];
            c.q.peak = rotated ? 1 : 1 / peaks[i];
            c.q.gain = 4 / peaks[i];
            c.rotate = rotated ? FKV_ROTATE_K : FKV_ROTATE_NONE;
            check_case(&c, only);
        }
    }
}

/* Tests K or V rows with values that exceed the codec's limit and are clamped, in one channel or in all channels. */
static void saturated_rows(fkv_isa only) {
    for (uint32_t what = 0; what < 16; what++) {
        attn_case c = sweep_case();
        c.page_type = what % 2 == 0 ? FKV_F16 : FKV_BF16;
        c.rotate = what / 2 % 2 == 0 ? FKV_ROTATE_NONE : FKV_ROTATE_KV;
        attn_sizes sizes = {.gain = what / 8 == 0 ? 1e38f : 1, .peak = what / 8 == 0 ? 1 : 1e38f};
        if (what / 4 % 2 == 0) {
            c.v = sizes;
        } else {
            c.k = sizes;
            c.q.gain = 4 / fkv_codec_limit(c.page_type);
        }
        check_case(&c, only);
    }
}

/* Generates a row of arbitrary bit patterns, or a row of special values such as zero, denormals and the largest values. */
static void hostile_row(uint64_t *state, uint32_t dim, float *x) {
    static const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 65504.0f, -65504.0f, 1e-7f, 6e-8f, 3e38f, -3e38f, 0.5f, 1e30f};
    uint64_t kind = attn_random(state) % 4;
    float base = attn_gaussian(state);
    for (uint32_t d = 0; d < dim; d++) {
        uint64_t r = attn_random(state);
        if (kind == 0) x[d] = fkv_float_of((uint32_t)r);
        if (kind == 1) x[d] = special[r % (sizeof special / sizeof special[0])];
        if (kind == 2) x[d] = base * (1.0f + (float)(r & 3) * 1e-6f);
        if (kind == 3) x[d] = attn_gaussian(state);
    }
}

static void check_encoding(fkv_isa only, fkv_codec_kind kind) {
    uint64_t state = 7;
    for (uint32_t bits = 2; bits <= 16; bits = kind == FKV_CODEC_TURBO ? bits + 1 : 2 * bits) {
        for (uint32_t i = 0; i < 1500; i++) {
            attn_case c = {.shape = {1, 1, 32u << i % 5}, .page_type = i % 2 == 0 ? FKV_F16 : FKV_BF16};
            uint32_t dim = c.shape.head_dim;
            fkv_codec codec;
            if (fkv_codec_make((fkv_codec_config){bits, 32u << i % 3, kind}, dim, c.page_type, &codec) != FKV_OK) continue;
            if (i / 3 % 2 == 1) fkv_codec_rotated(&codec);
            float x[FKV_MAX_HEAD_DIM];
            hostile_row(&state, dim, x);
            uint8_t bytes[2][4 * FKV_MAX_HEAD_DIM] = {{0}};
            uint8_t *reference[FKV_N_PARTS] = {bytes[0], bytes[0] + 1024, bytes[0] + 1536};
            uint8_t *got[FKV_N_PARTS] = {bytes[1], bytes[1] + 1024, bytes[1] + 1536};
            fkv_codec_encode(&codec, x, reference);
            for (size_t k = 0; k < sizeof isas / sizeof isas[0]; k++) {
                const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[k]);
                if (kernels == NULL || (only != FKV_ISA_AUTO && only != isas[k])) continue;
                memset(bytes[1], 0, sizeof bytes[1]);
                fkv_codec_kernels_of(kernels, &codec)->encode(&codec, x, got);
                report(memcmp(bytes[0], bytes[1], sizeof bytes[0]) == 0, kernels->name, &c,
                       "encoded bytes differ from the codec's, bits", bits);
            }
        }
    }
}

static void encoding_matches_the_codec(fkv_isa only) {
    check_encoding(only, FKV_CODEC_AUTO);
    check_encoding(only, FKV_CODEC_TURBO);
}

static bool all_nan(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (x[i] == x[i]) return false;
    return true;
}

static bool all_finite(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!(x[i] - x[i] == 0)) return false;
    return true;
}

/* If a query or a page contains NaN or infinity, all outputs that depend on it must be NaN, and all others must be finite. */
static void nan_and_infinity_propagate(fkv_isa only) {
    enum { HEADS = 4, TOKENS = 3 };
    fkv_workers *workers = workers_of(1);
    static const uint32_t codecs[] = {0, 1, 2, 3, 13, FIRST_SEALED_CODEC}; /* codecs: 16/16, 8/8, 8/4, 4/4, tq4, s4/s4 */
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; i++) {
        uint32_t codec = codecs[i];
        for (uint32_t what = 0; what < 5; what++) {
            attn_case c = {.shape = {HEADS, 1, 64}, .codec = codec, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 2};
            c.rows[0] = (attn_mix){200, TOKENS};
            c.rows[1] = (attn_mix){70, 1};
            c.softcap = what % 2 == 0 ? 0.0f : 30.0f;
            if (what >= 3 && attn_codecs[codec].k.bits == 16) continue;
            attn_fixture w;
            if (!attn_fixture_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers, 5)) continue;
            /* cases 0 to 2 put NaN or infinity into the queries of token 1; cases 3 and 4 put NaN into the scale of a key or a
             * value that the first sequence reads */
            if (what < 3)
                for (uint32_t h = 0; h < HEADS; h++)
                    ((float *)w.q)[(HEADS + h) * 64 + 63 - h] = fkv_float_of(what == 2 ? 0x7f800000u : 0x7fc00000u);
            uint8_t *part[FKV_N_PARTS];
            uint8_t *block = w.pages + (size_t)fkv_page_at(w.rows[0].view, 2) * w.layer.block.bytes;
            fkv_block_row(&w.layer.block, block, what == 3 ? FKV_SIDE_K : FKV_SIDE_V, 60, part);
            if (what >= 3) memcpy(part[FKV_PART_SCALES], &(uint16_t){0x7e00}, 2);
            float out[(TOKENS + 1) * HEADS * 64];
            for (size_t k = 0; k < sizeof isas / sizeof isas[0]; k++) {
                const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[k]);
                if (kernels == NULL || (only != FKV_ISA_AUTO && only != isas[k])) continue;
                run(kernels, &w, w.rows, c.n_rows, w.q, out, workers);
                const size_t token = (size_t)HEADS * 64;
                bool good = all_nan(out + token, token) && all_finite(out + TOKENS * token, token);
                good = good &&
                       (what < 3 ? all_finite(out, token) && all_finite(out + 2 * token, token) : all_nan(out, TOKENS * token));
                report(good, kernels->name, &c, "a NaN was hidden or spread to other outputs", what);
            }
            attn_fixture_close(&w);
        }
    }
}

/* The codec never writes a TurboQuant row with a negative scale, but a file may contain such a row. Kernels must then agree with
 * the reference. */
static void negative_scales_are_read(fkv_isa only) {
    static const uint32_t tokens[] = {3, 62, 63, 130, 201};
    for (uint32_t i = 0; i < 6; i++) {
        attn_case c = {.shape = {6, 1, 96}, .codec = 13 + i / 2, .page_tokens = 64, .page_type = FKV_F16, .n_rows = 1};
        c.rows[0] = (attn_mix){200, i % 2 == 0 ? 1 : 3}; /* alternates between decode-sized and prefill-sized steps */
        attn_fixture w;
        if (!attn_fixture_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers_of(1), 11)) continue;
        for (uint32_t t = 0; t < 2 * sizeof tokens / sizeof tokens[0]; t++) {
            uint8_t *part[FKV_N_PARTS];
            uint32_t token = tokens[t / 2];
            uint8_t *block = w.pages + (size_t)fkv_page_at(w.rows[0].view, token / 64) * w.layer.block.bytes;
            fkv_block_row(&w.layer.block, block, (fkv_side)(t % 2), token % 64, part);
            part[FKV_PART_SCALES][1] ^= 0x80;
        }
        float reference[3 * 6 * 96];
        float got[3 * 6 * 96];
        size_t n = (size_t)w.n_new * 6 * 96;
        fkv_attn_reference(&w.layer, w.rows, 1, w.q, reference);
        for (size_t k = 0; k < sizeof isas / sizeof isas[0]; k++) {
            const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[k]);
            if (kernels == NULL || (only != FKV_ISA_AUTO && only != isas[k])) continue;
            run(kernels, &w, w.rows, 1, w.q, got, workers_of(1));
            double error = relative_l2(got, reference, n);
            report(error <= KERNEL_TOLERANCE, kernels->name, &c, "negative scales", error);
        }
        attn_fixture_close(&w);
    }
}

/* ---- masked tokens ---- */

typedef struct poison {
    fkv_side side;
    uint32_t token;
    uint16_t half; /* bit pattern that overwrites the token's first scale or, if rows are stored unquantized in 16 bits, its first
                      value */
    bool shows;    /* true if the decoded value is not finite, so that all outputs that depend on the token must be NaN */
} poison;

static bool is_visible(const attn_case *c, uint32_t position, uint32_t token) {
    return token <= position && (token < c->n_sinks || position - token < c->window);
}

/* Overwrites a value of one token (see poison). Checks that all outputs that depend on a non-finite value are NaN. Outputs of
 * queries that do not see the token must be bit-identical to `clean`, the outputs without poison. Runs the queries both one at a
 * time and in one batch. */
static void check_poison(const fkv_cpu_kernels *kernels, const attn_fixture *w, poison what, const float *clean) {
    const attn_case *c = &w->c;
    const size_t n = (size_t)c->shape.n_q_heads * c->shape.head_dim;
    const size_t n_query = (size_t)c->shape.n_q_heads * fkv_attn_key_dim(&w->layer);
    float *got = allocate(w->n_new * n * sizeof(float));
    float *alone = allocate(n * sizeof(float));
    uint8_t *block = w->pages + (size_t)fkv_page_at(w->rows[0].view, what.token / c->page_tokens) * w->layer.block.bytes;
    uint8_t *part[FKV_N_PARTS];
    fkv_block_row(&w->layer.block, block, what.side, what.token % c->page_tokens, part);
    uint8_t *at = part[w->layer.block.codec[what.side].kind == FKV_CODEC_HALF ? FKV_PART_CODES : FKV_PART_SCALES];
    uint16_t kept;
    memcpy(&kept, at, sizeof kept);
    memcpy(at, &what.half, sizeof what.half);
    run(kernels, w, w->rows, 1, w->q, got, workers_of(1));
    bool good = true;
    for (uint32_t i = 0; i < w->n_new; i++) {
        fkv_attn_row one = w->rows[0];
        one.start += i;
        one.n_tokens = 1;
        run(kernels, w, &one, 1, (const float *)w->q + i * n_query, alone, workers_of(1));
        if (is_visible(c, one.start, what.token))
            good = good && (!what.shows || (!all_finite(got + i * n, n) && !all_finite(alone, n)));
        else
            good = good && memcmp(got + i * n, clean + i * n, n * sizeof(float)) == 0 &&
                   memcmp(alone, clean + i * n, n * sizeof(float)) == 0;
    }
    report(good, kernels->name, c, "an output depends on a masked token, or does not depend on a visible one: token", what.token);
    memcpy(at, &kept, sizeof kept);
    free(got);
    free(alone);
}

static void masked_tokens_change_nothing(fkv_isa only) {
    static const uint32_t codecs[] = {0, 1, 2, 3, 6, 12, 14, 16, FIRST_SEALED_CODEC};
    /* codecs: 16/16, 8/8, 8/4, 4/4, 2/2, 2/16, tq3, 8/tq4, s4/s4 */
    /* poisoned tokens: a sink, a token before all windows, tokens before some windows, and a token after some queries */
    static const uint32_t tokens[] = {1, 20, 140, 150, 204};
    /* NaN, then infinity (f16 pages) or 2^127 (bf16 pages) */
    static const uint16_t halves[2][2] = {{0x7e00, 0x7c00}, {0x7fc0, 0x7f00}};
    for (uint32_t i = 0; i < 18; i++) {
        attn_case c = {.shape = {i % 2 == 0 ? 2 : 5, 1, 64}, .codec = codecs[i / 2], .page_tokens = 64, .n_rows = 1};
        c.shape.rope_dim = i % 4 == 1 && c.codec < FIRST_SEALED_CODEC ? 16 : 0;
        c.window = 70;
        c.n_sinks = 3;
        c.softcap = i % 3 == 0 ? 30.0f : 0.0f;
        c.page_type = i / 2 % 2 == 0 ? FKV_F16 : FKV_BF16;
        c.rows[0] = (attn_mix){200, i % 4 < 2 ? 5 : 19}; /* alternates between decode-sized and prefill-sized steps */
        attn_fixture w;
        if (!attn_fixture_open(&w, &c, fkv_cpu_kernels_for(FKV_ISA_SCALAR), workers_of(1), 9)) continue;
        float *clean = allocate((size_t)w.n_new * c.shape.n_q_heads * 64 * sizeof(float));
        for (size_t k = 0; k < sizeof isas / sizeof isas[0]; k++) {
            const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for(isas[k]);
            if (kernels == NULL || (only != FKV_ISA_AUTO && only != isas[k])) continue;
            run(kernels, &w, w.rows, 1, w.q, clean, workers_of(1));
            for (uint32_t what = 0; what < 20; what++) {
                poison p = {(fkv_side)(what % 2), tokens[what / 4], halves[c.page_type == FKV_BF16][what / 2 % 2],
                            what / 2 % 2 == 0};
                if (c.codec >= FIRST_SEALED_CODEC && p.side == FKV_SIDE_K) continue; /* sealed keys have no per-token scale */
                check_poison(kernels, &w, p, clean);
            }
        }
        free(clean);
        attn_fixture_close(&w);
    }
}

int main(int argc, char **argv) {
    fkv_isa only = FKV_ISA_AUTO;
    for (fkv_isa isa = FKV_ISA_SCALAR; argc > 1 && isa <= FKV_ISA_AMX; isa++)
        if (strcmp(argv[1], fkv_isa_name(isa)) == 0) only = isa;
    if (argc > 1 && only == FKV_ISA_AUTO) {
        printf("unknown instruction set %s\n", argv[1]);
        return EXIT_FAILURE;
    }
    encoding_matches_the_codec(only);
    nan_and_infinity_propagate(only);
    negative_scales_are_read(only);
    masked_tokens_change_nothing(only);
    every_codec_and_shape(only);
    every_length_and_mask(only);
    latent_layers(only);
    sealed_latent_layers(only);
    long_histories(only);
    runs_of_sealed_pages(only);
    every_size_of_queries(only);
    every_softcap(only);
    every_scale(only);
    every_sink(only);
    every_peak_of_queries(only);
    every_peak_of_keys(only);
    saturated_rows(only);
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++)
        if (worst_of[i] > 0) printf("%s: largest relative L2 error %.1e\n", fkv_isa_name(isas[i]), worst_of[i]);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
