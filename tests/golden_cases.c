/* The table of damages. Offsets are those of small.fkv: header at 0, layer 0 at 256, ten tokens at 288, index at 328, zeroes from
 * 352, one page from 4096 to the end at 5120.
 */
#include "golden_cases.h"

#include "page_file_world.h"

#define SET32(at, number) {.offset = (at), .n_bytes = 4, .value = (number)}
#define SET64(at, number) {.offset = (at), .n_bytes = 8, .value = (number)}
#define FLIP(at, mask) {.offset = (at), .n_bytes = 1, .flip = true, .value = (mask)}

/* clang-format off */
const golden_case GOLDEN_CASES[] = {
    /* not a page file */
    {"empty", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .resize = true, .length = 0},
    {"cut_in_magic", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .resize = true, .length = 5},
    {"bad_magic", true, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .patches = {FLIP(0, 0x80)}},
    {"text_transfer", false, GOLDEN_LOOK, FKV_FILE_FORMAT, "not a page file", .patches = {SET32(4, 0x0a1a0a0a)}},

    /* another version */
    {"future_version", true, GOLDEN_LOOK, FKV_FILE_VERSION, "version 3", .patches = {SET32(8, 3)}},
    {"version_2_of_version_1", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "records of 256, 32", .patches = {SET32(8, 2)}},
    {"version_0", false, GOLDEN_LOOK, FKV_FILE_VERSION, "version 0", .patches = {SET32(8, 0)}},
    {"future_version_cut", false, GOLDEN_LOOK, FKV_FILE_VERSION, "version 3", .patches = {SET32(8, 3)}, .resize = true, .length = 12},

    /* truncated, or more than there should be */
    {"cut_in_version", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "cut after 10", .resize = true, .length = 10},
    {"cut_in_header", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "cut after 100", .resize = true, .length = 100},
    {"cut_in_layers", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "270 bytes long", .resize = true, .length = 270},
    {"cut_in_tokens", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "300 bytes long", .resize = true, .length = 300},
    {"cut_in_index", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "340 bytes long", .resize = true, .length = 340},
    {"cut_in_zeroes", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "2000 bytes long", .resize = true, .length = 2000},
    {"cut_in_page", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4608 bytes long", .resize = true, .length = 4608},
    {"cut_last_byte", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "5119 bytes long", .resize = true, .length = 5119},
    {"trailing_byte", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "5121 bytes long", .resize = true, .length = 5121},

    /* flipped bits */
    {"flip_header", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(88, 1)}},
    {"flip_weights", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(100, 16)}},
    {"flip_digest", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(255, 128)}},
    {"flip_layer", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(260, 32)}},
    {"flip_token", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(300, 4)}},
    {"flip_index", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(345, 8)}},
    {"flip_zeroes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "SHA-256", .patches = {FLIP(3000, 2)}},
    {"flip_page_first", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C of page 0", .patches = {FLIP(4096, 1)}},
    {"flip_page_last", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C of page 0", .patches = {FLIP(5119, 128)}},

    /* sound, but of somebody else */
    {"foreign_weights", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "weights_id is ff01", .patches = {FLIP(96, 0xff)}, .fix_digest = true},
    {"foreign_rope", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rope_id is \"neoxxbase=10000\" in the file and \"neox base=10000\" here", .patches = {FLIP(132, ' ' ^ 'x')}, .fix_digest = true},
    {"foreign_rope_escape", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rope_id is \"neox\\x1bbase=10000\"", .patches = {FLIP(132, ' ' ^ 0x1b)}, .fix_digest = true},
    {"foreign_page_type", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "page_type is 2 in the file and 1 here", .patches = {SET32(80, FKV_BF16)}, .fix_digest = true},
    {"foreign_page_tokens", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "page_tokens is 32 in the file and 16 here", .patches = {SET32(76, 32), SET64(24, 5888)}, .resize = true, .length = 5888, .fix_crcs = true, .fix_digest = true},
    {"foreign_rotation", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rotate is 3 in the file and 1 here", .patches = {SET32(84, FKV_ROTATE_KV)}, .fix_digest = true},
    {"foreign_rotation_seed", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "rotation_seed is 8 in the file and 7 here", .patches = {SET64(88, 8)}, .fix_digest = true},
    {"foreign_codec", true, GOLDEN_LOAD, FKV_FILE_FOREIGN, "v.bits of layer 0 is 2 in the file and 4 here", .patches = {SET32(280, 2), SET64(24, 4992)}, .resize = true, .length = 4992, .fix_crcs = true, .fix_digest = true},
    {"foreign_heads", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "n_kv_heads of layer 0 is 2 in the file and 1 here", .patches = {SET32(256, 2), SET64(24, 6144)}, .resize = true, .length = 6144, .fix_crcs = true, .fix_digest = true},
    {"foreign_window", false, GOLDEN_LOAD, FKV_FILE_FOREIGN, "window of layer 0 is 100 in the file and 0 here", .patches = {SET32(264, 100)}, .fix_digest = true},

    /* right checksums over numbers that cannot be */
    {"hostile_file_bytes", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "instead of 18446744073709551615", .patches = {SET64(24, UINT64_MAX)}, .fix_digest = true},
    {"hostile_tokens", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4294967295 tokens", .patches = {SET32(64, UINT32_MAX)}, .fix_digest = true},
    {"hostile_tokens_and_offsets", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4294967295 tokens", .patches = {SET32(64, UINT32_MAX), SET64(40, 17179869472), SET64(48, 17179873280)}, .fix_digest = true},
    {"hostile_fewer_tokens", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "0 pages", .patches = {SET32(64, 0), SET64(56, 0), SET64(40, 288)}, .fix_digest = true},
    {"hostile_pages", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "1152921504606846976 pages", .patches = {SET64(56, UINT64_C(1) << 60)}, .fix_digest = true},
    {"hostile_pages_overflow", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "12297829382473034411 pages", .patches = {SET64(56, UINT64_C(12297829382473034411))}, .fix_digest = true},
    {"hostile_one_page_more", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "2 pages", .patches = {SET64(56, 2)}, .fix_digest = true},
    {"hostile_layers", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "4294967295 layers", .patches = {SET32(68, UINT32_MAX)}, .fix_digest = true},
    {"hostile_layers_513", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "513 layers", .patches = {SET32(68, 513)}, .fix_digest = true},
    {"hostile_no_layers", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "0 layers", .patches = {SET32(68, 0)}, .fix_digest = true},
    {"hostile_groups", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "9 groups", .patches = {SET32(72, 9)}, .fix_digest = true},
    {"hostile_header_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "records of 4096", .patches = {SET32(12, 4096)}, .fix_digest = true},
    {"hostile_layer_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "records of 256, 0", .patches = {SET32(16, 0)}, .fix_digest = true},
    {"hostile_entry_bytes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "and 25 bytes", .patches = {SET32(20, 25)}, .fix_digest = true},
    {"hostile_tokens_offset", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(32, 0)}, .fix_digest = true},
    {"hostile_index_offset", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(40, UINT64_MAX - 7)}, .fix_digest = true},
    {"hostile_data_offset", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "offsets", .patches = {SET64(48, UINT64_C(1) << 63)}, .fix_digest = true},
    {"hostile_page_tokens", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "pages of 0 tokens", .patches = {SET32(76, 0)}, .fix_digest = true},
    {"hostile_page_tokens_odd", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "pages of 48 tokens", .patches = {SET32(76, 48)}, .fix_digest = true},
    {"hostile_page_tokens_huge", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "pages of 2147483648 tokens", .patches = {SET32(76, UINT32_C(1) << 31)}, .fix_digest = true},
    {"hostile_page_tokens_few", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "pages of 8 tokens", .patches = {SET32(76, 8)}, .fix_digest = true},
    {"hostile_page_type", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page type 0", .patches = {SET32(80, FKV_F32)}, .fix_digest = true},
    {"hostile_page_type_huge", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "page type 4294967295", .patches = {SET32(80, UINT32_MAX)}, .fix_digest = true},
    {"hostile_rotate", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rotation 4", .patches = {SET32(84, 4)}, .fix_digest = true},
    {"hostile_seed_without_rotation", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "rotation 0 with seed 7", .patches = {SET32(84, 0)}, .fix_digest = true},
    {"hostile_rope_unended", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "must be 0", .patches = {FLIP(190, 'x')}, .fix_digest = true},
    {"hostile_reserved", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "must be 0", .patches = {FLIP(223, 1)}, .fix_digest = true},
    {"hostile_head_dim", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "dimension 4294967280", .patches = {SET32(260, 0xfffffff0)}, .fix_digest = true},
    {"hostile_head_dim_0", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "dimension 0", .patches = {SET32(260, 0)}, .fix_digest = true},
    {"hostile_head_dim_odd", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "dimension 33", .patches = {SET32(260, 33)}, .fix_digest = true},
    {"hostile_heads", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "instead of", .patches = {SET32(256, UINT32_MAX)}, .fix_digest = true},
    {"hostile_no_heads", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "0 KV heads", .patches = {SET32(256, 0)}, .fix_digest = true},
    {"hostile_sinks_without_window", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "no window but 5 sinks", .patches = {SET32(268, 5)}, .fix_digest = true},
    {"hostile_window_of_fewer_pages", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "1 pages, 5120 bytes instead of", .patches = {SET32(264, 1), SET32(64, 16), SET64(40, 352)}, .fix_digest = true},
    {"hostile_k_bits", true, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K of 3 bits", .patches = {SET32(272, 3)}, .fix_digest = true},
    {"hostile_v_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V of 0 in 32", .patches = {SET32(280, 0)}, .fix_digest = true},
    {"hostile_k_group", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "groups of 0", .patches = {SET32(276, 0)}, .fix_digest = true},
    {"hostile_v_group", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V of 4 in 64", .patches = {SET32(284, 64)}, .fix_digest = true},
    {"hostile_k_group_of_16_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "K of 16 bits in groups of 32", .patches = {SET32(272, 16)}, .fix_digest = true},
    {"hostile_v_group_of_16_bits", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "V of 16 in 32", .patches = {SET32(280, 16)}, .fix_digest = true},
    {"hostile_zeroes", false, GOLDEN_LOOK, FKV_FILE_DAMAGED, "are not 0", .patches = {FLIP(4095, 1)}, .fix_digest = true},
    {"hostile_index_group", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "entry 0 of the index", .patches = {SET32(328, 7)}, .fix_digest = true},
    {"hostile_index_page", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "entry 0 of the index", .patches = {SET32(332, 4)}, .fix_digest = true},
    {"hostile_index_page_offset", true, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "entry 0 of the index", .patches = {SET64(336, UINT64_MAX - 4095)}, .fix_digest = true},
    {"hostile_index_crc", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "CRC32C", .patches = {FLIP(344, 1)}, .fix_digest = true},
    {"hostile_index_zero", false, GOLDEN_VERIFY, FKV_FILE_DAMAGED, "entry 0 of the index", .patches = {SET32(348, 1)}, .fix_digest = true},
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
    if (c->fix_crcs) file_world_fix_crcs(bytes, n);
    if (c->fix_digest) file_world_fix_digest(bytes, n);
    return n;
}
