/* Tests every check of a configuration in fkv_plan_make() and fkv_cache_open(). Most cases come from a table, in which each case
 * sets one field to an invalid value. A few cases involve several fields. Both calls must reject each configuration with the same
 * status and a message, and must write nothing. Sizes that exceed 64 bits or the memory of the machine must be rejected too. */
#include "cache_fixture.h"
#include "test.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* A 4-byte config field and the invalid value to store in it. */
typedef struct poke {
    bool set;
    size_t field; /* offset in fkv_config */
    uint32_t value;
} poke;

#define SET(member, to) {true, offsetof(fkv_config, member), (uint32_t)(to)}
enum {
    FLOAT_NAN = 0x7fc00000,
    FLOAT_INFINITY = 0x7f800000,
    FLOAT_MINUS_ONE = (int)0xbf800000,
    FLOAT_5E_7 = 0x350637bd,
    FLOAT_2E6 = 0x49f42400,
    FLOAT_MINUS_2E6 = (int)0xc9f42400
};

static const struct {
    const char *name;
    poke pokes[3];
} BAD_CONFIGS[] = {
    {"no layers", {SET(n_layers, 0)}},
    {"too many layers", {SET(n_layers, 513)}},
    {"row_type out of range", {SET(row_type, 3)}},
    {"row_type negative", {SET(row_type, -1)}},
    {"page_type f32", {SET(page_type, FKV_F32)}},
    {"page_type out of range", {SET(page_type, 7)}},
    {"rotate out of range", {SET(rotate, 4)}},
    {"isa out of range", {SET(isa, FKV_ISA_AMX + 1)}},
    {"isa negative", {SET(isa, -2)}},
    {"pages of 0 tokens", {SET(page_tokens, 0)}},
    {"pages of 8 tokens", {SET(page_tokens, 8)}},
    {"pages of 48 tokens", {SET(page_tokens, 48)}},
    {"pages of 512 tokens", {SET(page_tokens, 512)}},
    {"no tokens", {SET(max_tokens, 0)}},
    {"2^31 tokens", {SET(max_tokens, 0x80000000u)}},
    {"no sequences", {SET(max_seqs, 0)}},
    {"65536 sequences", {SET(max_seqs, 65536)}},
    {"steps of no tokens", {SET(max_step_tokens, 0)}},
    {"steps of more than 2^20 tokens", {SET(max_step_tokens, (1 << 20) + 1)}},
    {"257 threads", {SET(n_threads, 257)}},
    {"no query heads", {SET(layer.n_q_heads, 0)}},
    {"no KV heads", {SET(layer.n_kv_heads, 0)}},
    {"6 query heads for 4 KV heads", {SET(layer.n_q_heads, 6), SET(layer.n_kv_heads, 4)}},
    {"fewer query heads than KV heads", {SET(layer.n_q_heads, 2), SET(layer.n_kv_heads, 4)}},
    {"129 query heads for one KV head", {SET(layer.n_q_heads, 129), SET(layer.n_kv_heads, 1)}},
    {"131072 query heads", {SET(layer.n_q_heads, 131072), SET(layer.n_kv_heads, 131072)}},
    {"head_dim 0", {SET(layer.head_dim, 0)}},
    {"head_dim 24", {SET(layer.head_dim, 24), SET(layer.k.bits, 16), SET(layer.v.bits, 16)}},
    {"head_dim 528", {SET(layer.head_dim, 528), SET(layer.k.bits, 16), SET(layer.v.bits, 16)}},
    {"head_dim that the group does not divide", {SET(layer.head_dim, 96)}},
    {"sinks without a window", {SET(layer.n_sinks, 4)}},
    {"window of 2^31", {SET(layer.window, 0x80000000u)}},
    {"2^31 sinks", {SET(layer.window, 16), SET(layer.n_sinks, 0x80000000u)}},
    {"scale NaN", {SET(layer.scale, FLOAT_NAN)}},
    {"scale infinite", {SET(layer.scale, FLOAT_INFINITY)}},
    {"scale too small", {SET(layer.scale, FLOAT_5E_7)}},
    {"scale too large", {SET(layer.scale, FLOAT_2E6)}},
    {"negative scale too large", {SET(layer.scale, FLOAT_MINUS_2E6)}},
    {"softcap NaN", {SET(layer.softcap, FLOAT_NAN)}},
    {"softcap infinite", {SET(layer.softcap, FLOAT_INFINITY)}},
    {"softcap negative", {SET(layer.softcap, FLOAT_MINUS_ONE)}},
    {"K of 3 bits", {SET(layer.k.bits, 3)}},
    {"K of 0 bits", {SET(layer.k.bits, 0)}},
    {"V of 32 bits", {SET(layer.v.bits, 32)}},
    {"K in groups of 16", {SET(layer.k.group, 16)}},
    {"K codec kind out of range", {SET(layer.k.kind, FKV_CODEC_CALIBRATED + 1)}},
    {"K as sealed values", {SET(layer.k.bits, 4), SET(layer.k.kind, FKV_CODEC_SEALED_V)}},
    {"V as sealed keys", {SET(layer.v.bits, 4), SET(layer.v.kind, FKV_CODEC_SEALED)}},
    {"calibrated K without channel bits", {SET(layer.k.bits, 4), SET(layer.k.kind, FKV_CODEC_CALIBRATED)}},
    {"V as calibrated keys", {SET(layer.v.bits, 4), SET(layer.v.kind, FKV_CODEC_CALIBRATED)}},
    {"sealed K of 5 bits", {SET(layer.k.bits, 5), SET(layer.k.kind, FKV_CODEC_SEALED)}},
    {"sealed V with K that is not sealed", {SET(layer.v.bits, 4), SET(layer.v.kind, FKV_CODEC_SEALED_V)}},
    {"V codec kind far out of range", {SET(layer.v.kind, UINT32_MAX)}},
    {"K of 8 bits as 16-bit rows", {SET(layer.k.kind, FKV_CODEC_HALF)}},
    {"V of 16 bits as affine codes", {SET(layer.v.bits, 16), SET(layer.v.kind, FKV_CODEC_AFFINE)}},
    {"V in groups of 0", {SET(layer.v.group, 0)}},
    {"V groups that do not divide head_dim", {SET(layer.v.group, 128)}},
};

static fkv_config plain_config(void) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {8, 64}, .v = {4, 64}};
    config.rotate = FKV_ROTATE_NONE;
    config.page_tokens = 16;
    config.max_tokens = 256;
    config.max_seqs = 4;
    config.max_step_tokens = 32;
    config.n_threads = 1;
    return config;
}

static void check_rejected(const fkv_config *config, fkv_status expected, const char *name) {
    fkv_plan plan;
    fkv_plan untouched;
    fkv_cache *cache = (fkv_cache *)&plan;
    memset(&plan, 0xee, sizeof plan);
    memset(&untouched, 0xee, sizeof untouched);
    (void)fkv_seq_close(NULL, 0);
    char before[512];
    (void)snprintf(before, sizeof before, "%s", fkv_message());
    fkv_status planned = fkv_plan_make(config, &plan);
    ck_assert_msg(planned == expected, "fkv_plan_make, %s: %s (%s)", name, fkv_status_name(planned), fkv_message());
    ck_assert_msg(strcmp(fkv_message(), before) != 0 && fkv_message()[0] != 0, "fkv_plan_make, %s: no message", name);
    ck_assert_msg(memcmp(&plan, &untouched, sizeof plan) == 0, "%s: the plan was modified", name);
    fkv_status opened = fkv_cache_open(config, &cache);
    ck_assert_msg(opened == expected, "fkv_cache_open, %s: %s (%s)", name, fkv_status_name(opened), fkv_message());
    ck_assert_msg(cache == (fkv_cache *)&plan, "%s: the cache pointer was modified", name);
}

START_TEST(invalid_configurations_are_rejected_with_a_message) {
    fkv_config good = plain_config();
    fkv_plan plan;
    ck_ok(fkv_plan_make(&good, &plan));
    for (size_t i = 0; i < N_OF(BAD_CONFIGS); i++) {
        fkv_config config = good;
        for (size_t p = 0; p < N_OF(BAD_CONFIGS[i].pokes); p++) {
            const poke *one = &BAD_CONFIGS[i].pokes[p];
            if (one->set) memcpy((uint8_t *)&config + one->field, &one->value, sizeof one->value);
        }
        check_rejected(&config, FKV_BAD_CONFIG, BAD_CONFIGS[i].name);
    }
}
END_TEST

START_TEST(unknown_codec_kind_is_reported_by_number) {
    static const int kinds[] = {FKV_CODEC_CALIBRATED + 1, 77, -5};
    for (size_t i = 0; i < N_OF(kinds); i++) {
        char number[32];
        (void)snprintf(number, sizeof number, "kind %d:", kinds[i]);
        fkv_config config = plain_config();
        config.layer.v.kind = (fkv_codec_kind)kinds[i];
        check_rejected(&config, FKV_BAD_CONFIG, number);
        ck_assert_msg(strstr(fkv_message(), number) != NULL, "%s", fkv_message());
        fkv_codec_info info = {.group = 7};
        ck_status(fkv_codec_about(config.layer.v, &info), FKV_BAD_CONFIG);
        ck_assert_msg(strstr(fkv_message(), number) != NULL, "%s", fkv_message());
        ck_assert_uint_eq(info.group, 7);
    }
}
END_TEST

START_TEST(invalid_configurations_of_several_fields_are_rejected) {
    fkv_config config = plain_config();
    memset(config.rope_id, 'x', sizeof config.rope_id);
    check_rejected(&config, FKV_BAD_CONFIG, "rope_id without a terminator");
    config = plain_config();
    memset(config.numerics, 'x', sizeof config.numerics);
    check_rejected(&config, FKV_BAD_CONFIG, "numerics without a terminator");

    fkv_layer_config layers[FKV_MAX_GROUPS + 1];
    for (uint32_t i = 0; i < N_OF(layers); i++) {
        layers[i] = (fkv_layer_config){.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 32, .k = {16, 0}, .v = {16, 0}};
        layers[i].window = 16 + i;
    }
    config = plain_config();
    config.layers = layers;
    config.n_layers = N_OF(layers);
    check_rejected(&config, FKV_BAD_CONFIG, "nine different windows");
    config.n_layers = FKV_MAX_GROUPS;
    fkv_plan plan;
    ck_ok(fkv_plan_make(&config, &plan));
    ck_assert_uint_eq(plan.n_groups, FKV_MAX_GROUPS);

    layers[3].head_dim = 40;
    layers[3].v = (fkv_codec_config){8, 32};
    check_rejected(&config, FKV_BAD_CONFIG, "one invalid layer among valid ones");
    ck_assert_ptr_nonnull(strstr(fkv_message(), "40"));
}
END_TEST

/* Checks that the smallest and the largest scales and soft caps that parity_attn tests are accepted. A scale beyond the range
 * must be rejected with a message that states the scale and the range. */
START_TEST(scale_and_softcap_limits_are_accepted) {
    static const float scales[] = {0, 1e-6f, -1e-6f, 1e6f, -1e6f};
    static const float softcaps[] = {0, 1e-45f, 3.4e38f};
    fkv_plan plan;
    for (size_t i = 0; i < N_OF(scales) * N_OF(softcaps); i++) {
        fkv_config config = plain_config();
        config.layer.scale = scales[i % N_OF(scales)];
        config.layer.softcap = softcaps[i / N_OF(scales)];
        ck_ok(fkv_plan_make(&config, &plan));
    }
    fkv_config config = plain_config();
    config.layer.scale = 2e6f;
    ck_status(fkv_plan_make(&config, &plan), FKV_BAD_CONFIG);
    ck_assert_msg(strstr(fkv_message(), "2e+06") != NULL && strstr(fkv_message(), "from 1e-06 to 1e+06") != NULL, "%s",
                  fkv_message());
}
END_TEST

START_TEST(turboquant_without_rotation_is_rejected) {
    fkv_config config = plain_config();
    fkv_cache *cache = NULL;
    config.layer.v = (fkv_codec_config){.bits = 3, .kind = FKV_CODEC_TURBO};
    check_rejected(&config, FKV_BAD_CONFIG, "no rotation");
    config.rotate = FKV_ROTATE_K;
    check_rejected(&config, FKV_BAD_CONFIG, "only the other side is rotated");
    config.rotate = FKV_ROTATE_V;
    ck_ok(fkv_cache_open(&config, &cache));
    fkv_cache_close(cache);
}
END_TEST

START_TEST(learned_sinks_must_be_finite) {
    float sink_logits[128] = {[2] = -3.4e38f, [3] = 3.4e38f};
    fkv_config config = plain_config();
    fkv_plan plan;
    fkv_plan without;
    ck_ok(fkv_plan_make(&config, &without));
    config.layer.sink_logits = sink_logits;
    ck_ok(fkv_plan_make(&config, &plan));
    ck_assert_uint_ge(plan.tables_bytes, without.tables_bytes);
    sink_logits[config.layer.n_q_heads - 1] = INFINITY;
    check_rejected(&config, FKV_BAD_CONFIG, "an infinite sink");
    sink_logits[config.layer.n_q_heads - 1] = NAN;
    check_rejected(&config, FKV_BAD_CONFIG, "a NaN sink");
}
END_TEST

START_TEST(sizes_beyond_any_machine_are_rejected) {
    fkv_config config = plain_config();
    fkv_cache *cache = NULL;
    config.n_layers = FKV_MAX_LAYERS;
    config.max_tokens = INT32_MAX;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY); /* a cache of about 0.4 PB can be planned but not allocated */
    config.lazy = true;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);

    config.layer = (fkv_layer_config){.n_q_heads = 65536, .n_kv_heads = 65536, .head_dim = 512, .k = {16, 0}, .v = {16, 0}};
    check_rejected(&config, FKV_BAD_CONFIG, "a slab beyond 64 bits");

    config = plain_config();
    config.layer = (fkv_layer_config){.n_q_heads = 8192, .n_kv_heads = 8192, .head_dim = 16, .k = {16, 0}, .v = {16, 0}};
    config.max_step_tokens = 1 << 20;
    check_rejected(&config, FKV_BAD_CONFIG, "too many rows in one step");

    config = plain_config();
    config.max_tokens = INT32_MAX;
    config.max_seqs = 65535;
    config.max_step_tokens = 1 << 20;
    config.memory_limit = UINT64_C(1) << 30;
    ck_status(fkv_cache_open(&config, &cache), FKV_NO_MEMORY);
    ck_assert_ptr_null(cache);
}
END_TEST

/* Uses slabs whose size in bytes barely fits in 64 bits, so that the total size of the plan overflows. */
START_TEST(plans_slightly_beyond_64_bits_are_rejected) {
    fkv_config config = plain_config();
    config.max_seqs = 1;
    config.page_tokens = 256;
    config.n_layers = FKV_MAX_LAYERS;
    config.layer = (fkv_layer_config){.n_q_heads = 55699, .n_kv_heads = 55699, .head_dim = 512, .k = {16, 0}, .v = {16, 0}};
    config.max_tokens = 1233765 * 256; /* 512 layers * 55699 heads * 1233765 pages of 2^19 bytes = 2^64 - 2^28 */
    check_rejected(&config, FKV_BAD_CONFIG, "tables in addition to a slab of 2^64 - 2^28 bytes");

    static fkv_layer_config layers[466];
    fkv_layer_config large = {.n_q_heads = 65536, .n_kv_heads = 65536, .head_dim = 512, .k = {16, 0}, .v = {16, 0}};
    for (uint32_t i = 0; i < 464; i++) layers[i] = large; /* each page of the layer has 65536 blocks of 32768 bytes */
    layers[464] = (fkv_layer_config){.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 16, .k = {16, 0}, .v = {16, 0}}; /* 1024 */
    layers[465] = (fkv_layer_config){.n_q_heads = 3, .n_kv_heads = 3, .head_dim = 32, .k = {8, 32}, .v = {2, 32}}; /* 3 * 896 */
    config.n_layers = N_OF(layers);
    config.layers = layers;
    config.page_tokens = 16;
    config.max_tokens = 18512790 * 16;
    check_rejected(&config, FKV_BAD_CONFIG, "a slab of 2^64 - 256 bytes, before rounding to system pages");
}
END_TEST

START_TEST(instruction_set_of_another_machine_is_unsupported) {
    static const fkv_isa isas[] = {FKV_ISA_NEON, FKV_ISA_AVX2, FKV_ISA_AVX512, FKV_ISA_AVX512VNNI, FKV_ISA_AMX};
    uint32_t n_unsupported = 0;
    for (size_t i = 0; i < N_OF(isas); i++) {
        fkv_config config = plain_config();
        fkv_cache *cache = NULL;
        config.isa = isas[i];
        fkv_status status = fkv_cache_open(&config, &cache);
        ck_assert(status == FKV_OK ? cache != NULL : status == FKV_UNSUPPORTED && cache == NULL);
        n_unsupported += status == FKV_UNSUPPORTED;
        fkv_cache_close(cache);
    }
    ck_assert_uint_ge(n_unsupported, 1); /* no machine supports all of these instruction sets */
}
END_TEST

TEST_MAIN("bad config", invalid_configurations_are_rejected_with_a_message, unknown_codec_kind_is_reported_by_number,
          invalid_configurations_of_several_fields_are_rejected, scale_and_softcap_limits_are_accepted,
          turboquant_without_rotation_is_rejected, learned_sinks_must_be_finite, sizes_beyond_any_machine_are_rejected,
          plans_slightly_beyond_64_bits_are_rejected, instruction_set_of_another_machine_is_unsupported)
