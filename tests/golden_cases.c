/* Table of damaged page files. Offsets refer to small.fkv: header at 0, layer 0 at 288, ten tokens at 336, index at 376, zero
 * padding from 400, and one page from 4096 to the end of the file at 5120.
 */
#include "golden_cases.h"

#include "page_file_fixture.h"

#define SET32(at, number) {.offset = (at), .n_bytes = 4, .value = (number)}
#define SET64(at, number) {.offset = (at), .n_bytes = 8, .value = (number)}
#define FLIP(at, mask) {.offset = (at), .n_bytes = 1, .flip = true, .value = (mask)}

/* clang-format off */
const golden_case GOLDEN_CASES[] = {
    /* files that are not page files */
    {"empty", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .resize = true, .length = 0},
    {"cut_in_magic", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .resize = true, .length = 5},
    {"bad_magic", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .patches = {FLIP(0, 0x80)}},
    {"text_transfer", false, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .patches = {SET32(4, 0x0a1a0a0a)}},

    /* unsupported version */
    {"future_version", true, GOLDEN_LOOK, FKV_FILE_VERSION, "version 3", .patches = {SET32(8, 3)}},
    {"version_2", false, GOLDEN_LOOK, FKV_FILE_VERSION, "version 2", .patches = {SET32(8, 2)}},
    {"version_0", false, GOLDEN_LOOK, FKV_FILE_VERSION, "version 0", .patches = {SET32(8, 0)}},
    {"future_version_cut", false, GOLDEN_LOOK, FKV_FILE_VERSION, "version 3", .patches = {SET32(8, 3)}, .resize = true, .length = 12},

    /* files that are truncated or have extra bytes at the end */
    {"cut_in_version", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "truncated to 10 bytes", .resize = true, .length = 10},
    {"cut_in_header", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "truncated to 100 bytes", .resize = true, .length = 100},
    {"cut_in_layers", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 302 bytes", .resize = true, .length = 302},
    {"cut_in_tokens", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 352 bytes", .resize = true, .length = 352},
    {"cut_in_index", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 392 bytes", .resize = true, .length = 392},
    {"cut_in_zeroes", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 2000 bytes", .resize = true, .length = 2000},
    {"cut_in_page", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 4608 bytes", .resize = true, .length = 4608},
    {"cut_last_byte", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 5119 bytes", .resize = true, .length = 5119},
    {"trailing_byte", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "size is 5121 bytes", .resize = true, .length = 5121},

    /* flipped bits */
    {"flip_header", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(88, 1)}},
    {"flip_weights", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(100, 16)}},
    {"flip_digest", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(287, 128)}},
    {"flip_layer", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(292, 32)}},
    {"flip_token", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(342, 4)}},
    {"flip_index", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(393, 8)}},
    {"flip_zeroes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(3000, 2)}},
    {"flip_page_first", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C of page 0", .patches = {FLIP(4096, 1)}},
    {"flip_page_last", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C of page 0", .patches = {FLIP(5119, 128)}},

    /* valid files written for another model or configuration */
    {"foreign_weights", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "weights_id is ff01", .patches = {FLIP(96, 0xff)}, .fix_digest = true},
    {"foreign_rope", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rope_id is \"neoxxbase=10000\" in the file but \"neox base=10000\" in this cache", .patches = {FLIP(132, ' ' ^ 'x')}, .fix_digest = true},
    {"foreign_rope_escape", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rope_id is \"neox\\x1bbase=10000\"", .patches = {FLIP(132, ' ' ^ 0x1b)}, .fix_digest = true},
    {"foreign_numerics", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "numerics is \"cpu golden 2\" in the file but \"cpu golden 1\" in this cache; these kernels compute different bits, so save the file again", .patches = {FLIP(235, '1' ^ '2')}, .fix_digest = true},
    {"foreign_numerics_escape", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "numerics is \"cpu\\x1bgolden 1\"", .patches = {FLIP(227, ' ' ^ 0x1b)}, .fix_digest = true},
    {"foreign_page_type", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "page_type is 2 in the file but 1 in this cache", .patches = {SET32(80, FKV_BF16)}, .fix_digest = true},
    {"foreign_page_tokens", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "page_tokens is 32 in the file but 16 in this cache", .patches = {SET32(76, 32), SET64(24, 5888)}, .resize = true, .length = 5888, .fix_crcs = true, .fix_digest = true},
    {"foreign_rotation", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rotate is 3 in the file but 1 in this cache", .patches = {SET32(84, FKV_ROTATE_KV)}, .fix_digest = true},
    {"foreign_rotation_seed", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rotation_seed is 8 in the file but 7 in this cache", .patches = {SET64(88, 8)}, .fix_digest = true},
    {"foreign_codec", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "v.bits of layer 0 is 2 in the file but 4 in this cache", .patches = {SET32(316, 2), SET64(24, 4992)}, .resize = true, .length = 4992, .fix_crcs = true, .fix_digest = true},
    {"foreign_heads", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "n_kv_heads of layer 0 is 2 in the file but 1 in this cache", .patches = {SET32(288, 2), SET64(24, 6144)}, .resize = true, .length = 6144, .fix_crcs = true, .fix_digest = true},
    {"foreign_window", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "window of layer 0 is 100 in the file but 0 in this cache", .patches = {SET32(296, 100)}, .fix_digest = true},

    /* files with impossible values but valid checksums */
    {"hostile_file_bytes", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "expected 18446744073709551615", .patches = {SET64(24, UINT64_MAX)}, .fix_digest = true},
    {"hostile_tokens", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4294967295 tokens", .patches = {SET32(64, UINT32_MAX)}, .fix_digest = true},
    {"hostile_tokens_and_offsets", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4294967295 tokens", .patches = {SET32(64, UINT32_MAX), SET64(40, 17179869520), SET64(48, 17179873280)}, .fix_digest = true},
    {"hostile_fewer_tokens", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "0 pages", .patches = {SET32(64, 0), SET64(56, 0), SET64(40, 336)}, .fix_digest = true},
    {"hostile_pages", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "1152921504606846976 pages", .patches = {SET64(56, UINT64_C(1) << 60)}, .fix_digest = true},
    {"hostile_pages_overflow", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "12297829382473034411 pages", .patches = {SET64(56, UINT64_C(12297829382473034411))}, .fix_digest = true},
    {"hostile_one_page_more", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "2 pages", .patches = {SET64(56, 2)}, .fix_digest = true},
    {"hostile_layers", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_layers is 4294967295", .patches = {SET32(68, UINT32_MAX)}, .fix_digest = true},
    {"hostile_layers_513", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_layers is 513", .patches = {SET32(68, 513)}, .fix_digest = true},
    {"hostile_no_layers", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_layers is 0", .patches = {SET32(68, 0)}, .fix_digest = true},
    {"hostile_groups", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "9 groups", .patches = {SET32(72, 9)}, .fix_digest = true},
    {"hostile_header_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "records of 4096", .patches = {SET32(12, 4096)}, .fix_digest = true},
    {"hostile_layer_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "records of 288, 0", .patches = {SET32(16, 0)}, .fix_digest = true},
    {"hostile_entry_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "and 25 bytes", .patches = {SET32(20, 25)}, .fix_digest = true},
    {"hostile_tokens_offset", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(32, 0)}, .fix_digest = true},
    {"hostile_index_offset", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(40, UINT64_MAX - 7)}, .fix_digest = true},
    {"hostile_data_offset", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(48, UINT64_C(1) << 63)}, .fix_digest = true},
    {"hostile_page_tokens", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_tokens is 0", .patches = {SET32(76, 0)}, .fix_digest = true},
    {"hostile_page_tokens_odd", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_tokens is 48", .patches = {SET32(76, 48)}, .fix_digest = true},
    {"hostile_page_tokens_huge", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_tokens is 2147483648", .patches = {SET32(76, UINT32_C(1) << 31)}, .fix_digest = true},
    {"hostile_page_tokens_few", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_tokens is 8", .patches = {SET32(76, 8)}, .fix_digest = true},
    {"hostile_page_type", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_type is 0", .patches = {SET32(80, FKV_F32)}, .fix_digest = true},
    {"hostile_page_type_huge", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page_type is 4294967295", .patches = {SET32(80, UINT32_MAX)}, .fix_digest = true},
    {"hostile_rotate", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rotate is 4", .patches = {SET32(84, 4)}, .fix_digest = true},
    {"hostile_seed_without_rotation", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rotate is 0 and rotation_seed is 7", .patches = {SET32(84, 0)}, .fix_digest = true},
    {"hostile_rope_unended", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rope_id is not", .patches = {FLIP(190, 'x')}, .fix_digest = true},
    {"hostile_numerics_unended", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "numerics is not", .patches = {FLIP(250, 'x')}, .fix_digest = true},
    {"hostile_calibration", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "calibration is not 0", .patches = {FLIP(223, 1)}, .fix_digest = true},
    {"hostile_head_dim", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "head_dim 4294967280", .patches = {SET32(292, 0xfffffff0)}, .fix_digest = true},
    {"hostile_head_dim_0", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "head_dim 0", .patches = {SET32(292, 0)}, .fix_digest = true},
    {"hostile_head_dim_odd", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "head_dim 33", .patches = {SET32(292, 33)}, .fix_digest = true},
    {"hostile_heads", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "(expected 1, 1 and", .patches = {SET32(288, UINT32_MAX)}, .fix_digest = true},
    {"hostile_no_heads", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_kv_heads 0", .patches = {SET32(288, 0)}, .fix_digest = true},
    {"hostile_sinks_without_window", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_sinks 5 but no window", .patches = {SET32(300, 5)}, .fix_digest = true},
    {"hostile_window_of_fewer_pages", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "1 pages and 5120 bytes (expected", .patches = {SET32(296, 1), SET32(64, 16), SET64(40, 400)}, .fix_digest = true},
    {"hostile_k_bits", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 2, bits 3", .patches = {SET32(304, 3)}, .fix_digest = true},
    {"hostile_v_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V kind 2, bits 0, group 32", .patches = {SET32(316, 0)}, .fix_digest = true},
    {"hostile_k_group", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "bits 8, group 0; V", .patches = {SET32(308, 0)}, .fix_digest = true},
    {"hostile_v_group", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V kind 2, bits 4, group 64", .patches = {SET32(320, 64)}, .fix_digest = true},
    {"hostile_k_group_of_16_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 2, bits 16, group 32", .patches = {SET32(304, 16)}, .fix_digest = true},
    {"hostile_v_group_of_16_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V kind 2, bits 16, group 32", .patches = {SET32(316, 16)}, .fix_digest = true},
    {"hostile_k_group_of_half", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 1, bits 16, group 32", .patches = {SET32(304, 16), SET32(312, FKV_CODEC_HALF)}, .fix_digest = true},
    {"hostile_k_kind_0", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "a codec of layer 0 has kind 0", .patches = {SET32(312, FKV_CODEC_AUTO)}, .fix_digest = true},
    {"hostile_k_kind", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 7", .patches = {SET32(312, 7)}, .fix_digest = true},
    {"hostile_k_kind_of_v", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 4", .patches = {SET32(312, FKV_CODEC_SEALED_V)}, .fix_digest = true},
    {"hostile_v_kind_of_k", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V kind 3", .patches = {SET32(324, FKV_CODEC_SEALED)}, .fix_digest = true},
    {"hostile_v_kind_without_sealed_k", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V kind 4", .patches = {SET32(320, 0), SET32(324, FKV_CODEC_SEALED_V)}, .fix_digest = true},
    {"hostile_layer_state_size", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "layer 0 has a state of 1 bytes", .patches = {SET32(332, 1)}, .fix_digest = true},
    {"hostile_layer_state_and_keys", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "layer 0 has a state of 64 bytes", .patches = {SET32(332, 64)}, .fix_digest = true},
    {"hostile_rope_dim", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_kv_heads 1, rope_dim 8)", .patches = {SET32(328, 8)}, .fix_digest = true},
    {"hostile_rope_dim_huge", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rope_dim 4294967280)", .patches = {SET32(328, 0xfffffff0)}, .fix_digest = true},
    {"hostile_latent_heads", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "n_kv_heads 2, rope_dim 16)", .patches = {SET32(288, 2), SET32(328, 16)}, .fix_digest = true},
    {"hostile_latent_v", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "layer 0 has an invalid codec", .patches = {SET32(328, 16)}, .fix_digest = true},
    {"hostile_latent_calibrated", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 6, bits 4", .patches = {SET64(304, 4), SET64(312, UINT64_C(16) << 32 | FKV_CODEC_CALIBRATED), SET64(320, UINT64_C(1) << 32), SET32(328, 16)}, .fix_digest = true},
    {"hostile_latent_sealed_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K kind 3, bits 3", .patches = {SET64(304, 3), SET64(312, UINT64_C(16) << 32 | FKV_CODEC_SEALED), SET64(320, UINT64_C(1) << 32), SET32(328, 16)}, .fix_digest = true},
    {"hostile_latent_sealed_pages", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "(expected 2, 2 and", .patches = {SET64(304, 4), SET64(312, UINT64_C(16) << 32 | FKV_CODEC_SEALED), SET64(320, UINT64_C(1) << 32), SET32(328, 16)}, .fix_digest = true},
    {"hostile_zeroes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "are not 0", .patches = {FLIP(4095, 1)}, .fix_digest = true},
    {"hostile_index_group", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "index entry 0", .patches = {SET32(376, 7)}, .fix_digest = true},
    {"hostile_index_page", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "index entry 0", .patches = {SET32(380, 4)}, .fix_digest = true},
    {"hostile_index_page_offset", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "index entry 0", .patches = {SET64(384, UINT64_MAX - 4095)}, .fix_digest = true},
    {"hostile_index_crc", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C", .patches = {FLIP(392, 1)}, .fix_digest = true},
    {"hostile_index_zero", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "index entry 0", .patches = {SET32(396, 1)}, .fix_digest = true},
};
/* clang-format on */

const size_t N_GOLDEN_CASES = sizeof GOLDEN_CASES / sizeof GOLDEN_CASES[0];

size_t golden_damage(const golden_case *c, uint8_t *bytes, size_t n) {
    for (int p = 0; p < GOLDEN_PATCHES; p++) {
        const golden_patch *patch = &c->patches[p];
        for (uint32_t i = 0; i < patch->n_bytes; i++) {
            const uint8_t byte = (uint8_t)(patch->value >> 8 * i);
            bytes[patch->offset + i] = (uint8_t)(patch->flip ? bytes[patch->offset + i] ^ byte : byte);
        }
    }
    if (c->resize) {
        if (c->length > n) memset(bytes + n, 0, c->length - n);
        n = c->length;
    }
    if (c->fix_crcs) file_fixture_fix_crcs(bytes, n);
    if (c->fix_digest) file_fixture_fix_digest(bytes, n);
    return n;
}
