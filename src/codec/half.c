/* 16-bit rows: the numbers themselves, in the type of the page, one part. */
#include "codec.h"

#include "../base/float16.h"

static const fkv_codec_name names[] = {{"16", 16}, {NULL, 0}};

static fkv_status check(fkv_codec_config config) {
    FKV_REQUIRE(config.bits == 16, FKV_BAD_CONFIG, "FKV_CODEC_HALF of %u bits: it has 16", config.bits);
    return FKV_OK;
}

static void lay_out(fkv_codec *codec) { codec->row_bytes[FKV_PART_CODES] = codec->dim * 2; }

static void encode(const fkv_codec *codec, const float *x, uint8_t *const part[FKV_N_PARTS]) {
    float limit = fkv_codec_limit(codec->type);
    for (uint32_t d = 0; d < codec->dim; d++)
        fkv_store_half(part[FKV_PART_CODES], d, fkv_f32_to_half(codec->type, fkv_codec_storable(x[d], limit)));
}

static void decode(const fkv_codec *codec, const uint8_t *const part[FKV_N_PARTS], float *x) {
    for (uint32_t d = 0; d < codec->dim; d++) x[d] = fkv_half_to_f32(codec->type, fkv_load_half(part[FKV_PART_CODES], d));
}

const fkv_codec_functions fkv_codec_half = {
    .names = names, .check = check, .lay_out = lay_out, .encode = encode, .decode = decode};
