/* Compares TurboQuant rows with a second implementation: reads the vectors written by scripts/make-turbo-vectors (its header
 * describes the file). The plain codec and the encoder of every instruction set must produce the same bytes, and the decoder must
 * produce the same floats.
 *
 * Does not use the check library, because this program is cross-compiled and run under an emulator.
 *
 * usage: parity_turbo [vectors]
 */
#include "../src/attn/attn.h"
#include "../src/attn/cpu/kernels.h"
#include "vector_reader.h"

#include <stdio.h>
#include <stdlib.h>

static uint32_t n_passed;
static uint32_t n_failed;

static void count(bool good, const char *what, const fkv_codec *codec, uint32_t row) {
    n_passed += good;
    n_failed += !good;
    if (!good) printf("FAIL %s: type %d, D %u, %u bits, row %u\n", what, (int)codec->type, codec->dim, codec->bits, row);
}

/* Checks the encoded and decoded form of one row. by: kernels that encode the row; NULL selects the plain codec. */
static void check_row(const fkv_codec *codec, const fkv_cpu_kernels *by, const float *x, const uint8_t *codes,
                      const uint8_t *scale, uint32_t row) {
    uint8_t bytes[FKV_MAX_HEAD_DIM];
    uint8_t half[2];
    uint8_t *const part[FKV_N_PARTS] = {bytes, half, NULL};
    if (by != NULL)
        fkv_codec_kernels_of(by, codec)->encode(codec, x, part);
    else
        fkv_codec_encode(codec, x, part);
    const char *name = by != NULL ? fkv_cpu_kernels_name(by) : "plain";
    count(memcmp(bytes, codes, codec->row_bytes[FKV_PART_CODES]) == 0, name, codec, row);
    count(memcmp(half, scale, sizeof half) == 0, name, codec, row);
}

static void check_set(reader *from) {
    fkv_type type = (fkv_type)take_u32(from);
    uint32_t dim = take_u32(from);
    fkv_codec_config config = {.bits = take_u32(from), .kind = FKV_CODEC_TURBO};
    uint32_t n = take_u32(from);
    fkv_codec codec;
    if (fkv_codec_make(config, dim, type, &codec) != FKV_OK) {
        printf("%s\n", fkv_message());
        exit(EXIT_FAILURE);
    }
    const uint8_t *rows = take(from, (size_t)n * dim * sizeof(float));
    const uint8_t *codes = take(from, (size_t)n * codec.row_bytes[FKV_PART_CODES]);
    const uint8_t *scales = take(from, (size_t)n * 2);
    const uint8_t *decoded = take(from, (size_t)n * dim * sizeof(float));
    for (uint32_t r = 0; r < n; r++) {
        float x[FKV_MAX_HEAD_DIM];
        float y[FKV_MAX_HEAD_DIM];
        memcpy(x, rows + (size_t)r * dim * sizeof *x, dim * sizeof *x);
        const uint8_t *code = codes + (size_t)r * codec.row_bytes[FKV_PART_CODES];
        const uint8_t *scale = scales + 2 * (size_t)r;
        check_row(&codec, NULL, x, code, scale, r);
        for (int isa = FKV_ISA_SCALAR; isa <= FKV_ISA_AMX; isa++) {
            const fkv_cpu_kernels *kernels = fkv_cpu_kernels_for((fkv_isa)isa);
            if (kernels != NULL) check_row(&codec, kernels, x, code, scale, r);
        }
        const uint8_t *const part[FKV_N_PARTS] = {code, scale, NULL};
        fkv_codec_decode(&codec, part, y);
        count(memcmp(y, decoded + (size_t)r * dim * sizeof *y, dim * sizeof *y) == 0, "decoded", &codec, r);
    }
}

int main(int argc, char **argv) {
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(argc > 1 ? argv[1] : "tests/vectors/codec_turbo.bin", "rb");
    size_t n = file != NULL ? fread(bytes, 1, sizeof bytes, file) : 0;
    if (file != NULL) (void)fclose(file);
    reader from = {bytes, n};
    if (memcmp(take(&from, 8), "FKVTURBO", 8) != 0 || take_u32(&from) != 1) return EXIT_FAILURE;
    for (uint32_t sets = take_u32(&from); sets > 0; sets--) check_set(&from);
    printf("%u passed, %u failed\n", n_passed, n_failed);
    return n_failed == 0 && n_passed > 0 && from.left == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
