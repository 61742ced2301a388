/* Unit tests of the slab: page addresses, page copies, and clearing of unwritten slots. */
#include "../src/store/slab.h"
#include "test.h"

#include <stdio.h>

enum { PAGE_TOKENS = 16, N_PAGES = 5, N_LAYERS = 3 };

/* Layers 0 and 2 are in group 0, layer 1 is in group 1. Blocks have gaps between parts, and some parts have no rows. */
static const fkv_slab_layer LAYERS[N_LAYERS] = {
    {.group = 0, .n_heads = 2, .block_bytes = 1024, .parts = {{0, 32}, {512, 2}, {576, 2}, {640, 16}, {896, 2}, {960, 2}}},
    {.group = 1, .n_heads = 3, .block_bytes = 1024, .parts = {{0, 32}, {512, 0}, {512, 0}, {512, 32}, {1024, 0}, {1024, 0}}},
    {.group = 0, .n_heads = 1, .block_bytes = 704, .parts = {{0, 32}, {512, 2}, {576, 2}, {640, 4}, {0, 0}, {0, 0}}},
};

typedef struct small_slab {
    fkv_slab slab;
    fkv_slab_layer layers[N_LAYERS];
} small_slab;

static void open_slab(small_slab *s) {
    memcpy(s->layers, LAYERS, sizeof LAYERS);
    s->slab = (fkv_slab){.page_tokens = PAGE_TOKENS, .n_layers = N_LAYERS, .n_groups = 2, .layers = s->layers};
    s->slab.group_pages[0] = N_PAGES;
    s->slab.group_pages[1] = 2;
    ck_ok(fkv_slab_layout(&s->slab));
    s->slab.base = malloc(s->slab.bytes);
    ck_assert_ptr_nonnull(s->slab.base);
}

START_TEST(every_slab_byte_belongs_to_exactly_one_run) {
    small_slab s;
    open_slab(&s);
    ck_assert_uint_eq(s.slab.group_page_bytes[0], 2 * 1024 + 704);
    ck_assert_uint_eq(s.slab.group_page_bytes[1], 3 * 1024);
    ck_assert_uint_eq(s.slab.bytes, N_PAGES * (2 * 1024 + 704) + 2 * 3 * 1024);
    memset(s.slab.base, 0, s.slab.bytes);
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t page = 0; page < s.slab.group_pages[s.layers[l].group]; page++) {
            uint8_t *run = fkv_slab_run(&s.slab, l, page);
            for (uint64_t i = 0; i < fkv_slab_run_bytes(&s.slab, l); i++) run[i]++;
        }
    for (uint64_t i = 0; i < s.slab.bytes; i++) ck_assert_uint_eq(s.slab.base[i], 1);
    free(s.slab.base);
}
END_TEST

START_TEST(slab_larger_than_64_bits_is_rejected_with_its_sizes) {
    small_slab s;
    open_slab(&s);
    free(s.slab.base);
    s.layers[1].n_heads = UINT32_MAX;
    s.layers[1].block_bytes = UINT32_MAX;
    s.slab.group_pages[1] = UINT32_MAX;
    ck_status(fkv_slab_layout(&s.slab), FKV_BAD_CONFIG);
    ck_assert_ptr_nonnull(strstr(fkv_message(), "4294967295"));
    s.slab.group_pages[1] = 1; /* one layer of this size fits in 64 bits, but two do not */
    ck_ok(fkv_slab_layout(&s.slab));
    s.layers[2].n_heads = UINT32_MAX;
    s.layers[2].block_bytes = UINT32_MAX;
    s.slab.group_pages[0] = 1;
    ck_status(fkv_slab_layout(&s.slab), FKV_BAD_CONFIG);
    /* the group has no pages, but the size of a page with all three layers already overflows 64 bits */
    s.layers[0].group = s.layers[1].group = s.layers[2].group = 1;
    s.slab.group_pages[1] = 0;
    ck_status(fkv_slab_layout(&s.slab), FKV_BAD_CONFIG);
}
END_TEST

START_TEST(copy_page_copies_all_layers_of_its_group_and_nothing_else) {
    small_slab s;
    open_slab(&s);
    for (uint64_t i = 0; i < s.slab.bytes; i++) s.slab.base[i] = (uint8_t)(i * 131 >> 3);
    uint8_t *before = malloc(s.slab.bytes);
    ck_assert_ptr_nonnull(before);
    memcpy(before, s.slab.base, s.slab.bytes);
    fkv_slab_copy_page(&s.slab, 0, 1, 4);
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t page = 0; page < s.slab.group_pages[s.layers[l].group]; page++) {
            const uint32_t source = s.layers[l].group == 0 && page == 4 ? 1 : page;
            const uint8_t *expected = before + (fkv_slab_run(&s.slab, l, source) - s.slab.base);
            ck_assert_mem_eq(fkv_slab_run(&s.slab, l, page), expected, fkv_slab_run_bytes(&s.slab, l));
        }
    free(before);
    free(s.slab.base);
}
END_TEST

/* Marks the bytes that the first n_tokens tokens of a page occupy in one layer. */
static void mark_live(const fkv_slab_layer *layer, uint32_t n_tokens, uint8_t *live) {
    for (uint32_t head = 0; head < layer->n_heads; head++)
        for (int p = 0; p < FKV_SLAB_PARTS; p++)
            memset(live + head * layer->block_bytes + layer->parts[p].offset, 1, (size_t)n_tokens * layer->parts[p].row_bytes);
}

START_TEST(blank_keeps_live_slots_and_zeroes_everything_else) {
    small_slab s;
    open_slab(&s);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        const uint64_t run_bytes = fkv_slab_run_bytes(&s.slab, l);
        for (uint32_t n_tokens = 0; n_tokens <= PAGE_TOKENS; n_tokens++) {
            uint8_t live[3 * 1024] = {0};
            uint8_t run[3 * 1024];
            mark_live(&s.layers[l], n_tokens, live);
            memset(run, 0xa5, sizeof run);
            fkv_slab_blank(&s.slab, l, run, 0, run_bytes, n_tokens);
            for (uint64_t i = 0; i < run_bytes; i++) ck_assert_uint_eq(run[i], live[i] ? 0xa5 : 0);
        }
    }
    free(s.slab.base);
}
END_TEST

START_TEST(blanking_in_parts_equals_blanking_at_once) {
    small_slab s;
    open_slab(&s);
    const uint32_t seed = 20240607;
    printf("seed %u\n", seed);
    srand(seed);
    for (int round = 0; round < 300; round++) {
        const uint32_t l = (uint32_t)rand() % N_LAYERS;
        const uint32_t n_tokens = (uint32_t)rand() % (PAGE_TOKENS + 1);
        const uint64_t run_bytes = fkv_slab_run_bytes(&s.slab, l);
        uint8_t live[3 * 1024] = {0};
        uint8_t run[3 * 1024];
        mark_live(&s.layers[l], n_tokens, live);
        memset(run, 0x5a, sizeof run);
        for (uint64_t from = 0; from < run_bytes;) {
            uint64_t n = (uint64_t)rand() % 700;
            if (n > run_bytes - from) n = run_bytes - from;
            fkv_slab_blank(&s.slab, l, run + from, from, n, n_tokens);
            from += n;
        }
        for (uint64_t i = 0; i < run_bytes; i++) ck_assert_uint_eq(run[i], live[i] ? 0x5a : 0);
    }
    free(s.slab.base);
}
END_TEST

TEST_MAIN("slab", every_slab_byte_belongs_to_exactly_one_run, slab_larger_than_64_bits_is_rejected_with_its_sizes,
          copy_page_copies_all_layers_of_its_group_and_nothing_else, blank_keeps_live_slots_and_zeroes_everything_else,
          blanking_in_parts_equals_blanking_at_once)
