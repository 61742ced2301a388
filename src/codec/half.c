/* 16-bit rows: unquantized values in the 16-bit type of the page, without scales and biases. */
#include "codec.h"

#include "../base/float16.h"

static const fkv_codec_name half_names[] = {{"16", 16}, {NULL, 0}};

static fkv_status check_half_config(fkv_codec_config config) {
    FKV_REQUIRE(config.bits == 16, FKV_BAD_CONFIG, "unsupported width of %u bits for FKV_CODEC_HALF: expected 16 bits",
                config.bits);
    return FKV_OK;
}

static void lay_out_half(fkv_codec *codec) { codec->row_bytes[FKV_PART_CODES] = codec->dim * 2; }

static void encode_half_row(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    float limit = fkv_codec_limit(codec->type);
    for (uint32_t d = 0; d < codec->dim; d++)
        fkv_store_half(part[FKV_PART_CODES], d, fkv_f32_to_half(codec->type, fkv_codec_storable(x[d], limit)));
}

static void decode_half_row(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    for (uint32_t d = 0; d < codec->dim; d++) x[d] = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_CODES], d));
}

const fkv_codec_functions fkv_codec_half = {.names = half_names,
                                            .check = check_half_config,
                                            .lay_out = lay_out_half,
                                            .encode = encode_half_row,
                                            .decode = decode_half_row};
