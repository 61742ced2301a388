/* Tests step tables: the entries of splits, and the changes between the tables of two steps, which must be exact and few in
 * consecutive decode steps.
 */
#include "../src/attn/gpu/step_table.h"
#include "test.h"

#include <string.h>

enum { PAGE = 64, MAX_WORDS = 4096, MAX_RUNS = 4, N_PAGES = 64 };

/* Applies the runs to the table, as the kernel in src/mlx/mlx_table.c does. */
static void apply_runs(uint32_t *table, uint32_t n, const fkv_table_run *runs, uint32_t n_runs) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t add = 0;
        for (uint32_t r = 0; r < n_runs; r++) {
            const uint32_t at = i - runs[r].first;
            if (at % runs[r].stride == 0 && at / runs[r].stride < runs[r].count) add += runs[r].add;
        }
        table[i] += add;
    }
}

/* Fills the table of a decode step after `start` tokens. Returns the number of words in the table. */
static uint32_t decode_table(uint32_t start, bool sealed, uint32_t *words) {
    static uint32_t pages[N_PAGES];
    static uint32_t open[N_PAGES];
    for (uint32_t p = 0; p < N_PAGES; p++) {
        pages[p] = 7 * p + 3;
        open[p] = 5 * p + 1;
    }
    const fkv_step_plan plan = {
        .page_tokens = PAGE, .heads_per_kv = 4, .blocks_per_kv = 47, .tile_queries = 32, .sealed = sealed};
    const fkv_attn_row row = {
        .start = start, .n_tokens = 1, .view = {.pages = pages, .n_fixed = N_PAGES}, .open = {.pages = open, .n_fixed = N_PAGES}};
    const uint32_t n = fkv_step_table_words(&plan, &row, 1);
    ck_assert_uint_le(n, MAX_WORDS);
    memset(words, 0, MAX_WORDS * sizeof *words);
    fkv_step_table_fill(&plan, &row, 1, words);
    return n;
}

START_TEST(consecutive_decode_steps_differ_by_few_runs) {
    static uint32_t from[MAX_WORDS];
    static uint32_t to[MAX_WORDS];
    for (int sealed = 0; sealed < 2; sealed++) {
        uint32_t n_few = 0;
        uint32_t n = decode_table(0, sealed != 0, from);
        for (uint32_t start = 1; start < 4000; start++) {
            const uint32_t n_next = decode_table(start, sealed != 0, to);
            fkv_table_run runs[MAX_RUNS];
            const uint32_t n_runs = fkv_step_table_changes(from, to, MAX_WORDS, runs, MAX_RUNS);
            if (n_runs <= MAX_RUNS) {
                apply_runs(from, MAX_WORDS, runs, n_runs);
                ck_assert_mem_eq(from, to, sizeof to);
                n_few++;
            } else {
                ck_assert_msg((start + 1) % PAGE <= 1, "the step at position %u changes more than the usual words", start);
            }
            memcpy(from, to, sizeof to);
            n = n_next;
        }
        ck_assert_uint_gt(n, 0);
        ck_assert_uint_ge(n_few, 3999 - 2 * (3999 / PAGE + 1));
    }
}
END_TEST

/* Returns the result of fkv_step_merges_in_decode() for a step that decodes one token after `start` tokens in each of n
 * sequences. */
static bool merges(fkv_kernel_device device, uint32_t start, uint32_t n) {
    static uint32_t pages[1 << 12];
    static uint32_t words[1 << 16];
    static fkv_attn_row rows[256];
    fkv_attn_layer layer = {.n_q_heads = 32, .n_kv_heads = 8, .head_dim = 128, .sealed = true};
    layer.block.page_tokens = PAGE;
    layer.block.codec[FKV_SIDE_K] = (fkv_codec){.kind = FKV_CODEC_SEALED, .bits = 4};
    layer.block.codec[FKV_SIDE_V] = (fkv_codec){.kind = FKV_CODEC_SEALED_V, .bits = 4};
    for (uint32_t r = 0; r < n; r++)
        rows[r] = (fkv_attn_row){.start = start,
                                 .n_tokens = 1,
                                 .view = {.pages = pages, .n_fixed = sizeof pages / sizeof pages[0]},
                                 .open = {.pages = pages, .n_fixed = sizeof pages / sizeof pages[0]}};
    const fkv_step_plan plan = fkv_step_plan_of(&layer, 32);
    ck_assert_uint_le(fkv_step_table_words(&plan, rows, n), sizeof words / sizeof words[0]);
    fkv_step_table_fill(&plan, rows, n, words);
    return fkv_step_merges_in_decode(device, &layer, words);
}

START_TEST(decode_merges_few_splits) {
    ck_assert(merges(FKV_KERNEL_CUDA, 0, 1));
    ck_assert(merges(FKV_KERNEL_CUDA, 1023, 1));
    ck_assert(merges(FKV_KERNEL_CUDA, 1023, 64));
    ck_assert(!merges(FKV_KERNEL_CUDA, 1023, 256)); /* more blocks than counters */
    ck_assert(!merges(FKV_KERNEL_CUDA, 131071, 1));
    ck_assert(!merges(FKV_KERNEL_METAL, 1023, 1));
}
END_TEST

START_TEST(splits_refer_to_their_item) {
    static uint32_t words[MAX_WORDS];
    (void)decode_table(1000, true, words);
    const uint32_t *item = words + words[FKV_STEP_ITEMS];
    ck_assert_uint_gt(item[FKV_ITEM_N_SPLITS], 1);
    ck_assert_uint_eq(words[FKV_STEP_MOST_SPLITS], item[FKV_ITEM_N_SPLITS]);
    for (uint32_t s = 0; s < words[FKV_STEP_N_SPLITS]; s++) {
        const uint32_t *split = words + words[FKV_STEP_SPLITS] + s * FKV_SPLIT_WORDS;
        ck_assert_uint_eq(split[FKV_SPLIT_FIRST_SPLIT], item[FKV_ITEM_FIRST_SPLIT]);
        ck_assert_uint_eq(split[FKV_SPLIT_N_SPLITS], item[FKV_ITEM_N_SPLITS]);
    }
}
END_TEST

/* The first pages in a split's entry must equal those in the page table, including rings, windows, sinks and open pages. */
START_TEST(first_pages_equal_the_page_table) {
    static uint32_t words[1 << 14];
    uint32_t pages[N_PAGES];
    uint32_t open[N_PAGES];
    for (uint32_t p = 0; p < N_PAGES; p++) {
        pages[p] = 7 * p + 3;
        open[p] = 5 * p + 1;
    }
    uint32_t n_compared = 0;
    for (uint32_t i = 0; i < 2 * 2 * 3 * 2; i++) {
        const bool sealed = i % 2 != 0;
        const uint32_t page_tokens = i / 2 % 2 == 0 ? 16 : 64;
        const uint32_t window = i / 4 % 3 == 0 ? 0 : 300;
        const fkv_step_plan plan = {.page_tokens = page_tokens,
                                    .window = window,
                                    .n_sinks = i / 4 % 3 == 2 ? 70 : 0,
                                    .heads_per_kv = 4,
                                    .blocks_per_kv = 47,
                                    .tile_queries = 32,
                                    .sealed = sealed};
        const fkv_page_view view = i / 12 == 0 ? (fkv_page_view){.pages = pages, .n_fixed = N_PAGES}
                                               : (fkv_page_view){.pages = pages, .n_fixed = 6, .n_ring = N_PAGES - 6};
        for (uint32_t start = 0; start < N_PAGES * page_tokens - 8; start += 37) {
            const fkv_attn_row row = {.start = start,
                                      .n_tokens = 1 + start % 8,
                                      .view = view,
                                      .open = {.pages = open, .n_fixed = 2, .n_ring = N_PAGES - 2}};
            ck_assert_uint_le(fkv_step_table_words(&plan, &row, 1), sizeof words / sizeof *words);
            fkv_step_table_fill(&plan, &row, 1, words);
            for (uint32_t n = 0; n < words[FKV_STEP_N_SPLITS]; n++) {
                const uint32_t *split = words + words[FKV_STEP_SPLITS] + (size_t)n * FKV_SPLIT_WORDS;
                const uint32_t n_pages = fkv_ceil_div(split[FKV_SPLIT_N_TOKENS], page_tokens);
                for (uint32_t k = 0; k < fkv_min_u32(n_pages, FKV_N_FIRST_PAGES); k++, n_compared++) {
                    uint32_t logical = split[FKV_SPLIT_FIRST_VISIBLE] + k;
                    if (window != 0 && logical >= fkv_ceil_div(plan.n_sinks, page_tokens)) logical += split[FKV_SPLIT_SKIPPED];
                    const uint32_t n_fixed = split[FKV_SPLIT_N_FIXED];
                    if (logical >= n_fixed) logical = n_fixed + (logical - n_fixed) % split[FKV_SPLIT_N_RING];
                    ck_assert_uint_eq(split[FKV_SPLIT_FIRST_PAGES + k], words[split[FKV_SPLIT_PAGES] + logical]);
                }
            }
        }
    }
    ck_assert_uint_gt(n_compared, 10000);
}
END_TEST

/* A tile's entry contains a copy of the words of its row that describe the page tables, and the table has no unwritten words. */
START_TEST(tiles_contain_the_page_tables_of_their_row) {
    static uint32_t words[1 << 14];
    static uint32_t again[1 << 14];
    uint32_t pages[N_PAGES];
    for (uint32_t p = 0; p < N_PAGES; p++) pages[p] = 7 * p + 3;
    const fkv_step_plan plan = {.page_tokens = 16, .heads_per_kv = 4, .blocks_per_kv = 47, .tile_queries = 32, .sealed = true};
    fkv_attn_row rows[3];
    for (uint32_t r = 0; r < 3; r++)
        rows[r] = (fkv_attn_row){.start = 50 * r,
                                 .n_tokens = 100 + r,
                                 .view = {.pages = pages, .n_fixed = 5 + r, .n_ring = N_PAGES - 5 - r},
                                 .open = {.pages = pages, .n_fixed = 1 + r, .n_ring = N_PAGES - 1 - r}};
    const uint32_t n = fkv_step_table_words(&plan, rows, 3);
    ck_assert_uint_le(n, sizeof words / sizeof *words);
    memset(words, 0x5a, sizeof words);
    memset(again, 0xa5, sizeof again);
    fkv_step_table_fill(&plan, rows, 3, words);
    fkv_step_table_fill(&plan, rows, 3, again);
    ck_assert_mem_eq(words, again, n * sizeof *words);
    ck_assert_uint_ge(words[FKV_STEP_N_TILES], 9);
    for (uint32_t t = 0; t < words[FKV_STEP_N_TILES]; t++) {
        const uint32_t *tile = words + words[FKV_STEP_TILES] + t * FKV_TILE_WORDS;
        const uint32_t *row = words + words[FKV_STEP_ROWS] + tile[FKV_TILE_ROW] * FKV_ROW_WORDS;
        ck_assert_uint_eq(tile[FKV_TILE_PAGES], row[FKV_ROW_PAGES]);
        ck_assert_uint_eq(tile[FKV_TILE_N_FIXED], 5 + tile[FKV_TILE_ROW]);
        ck_assert_uint_eq(tile[FKV_TILE_N_RING], N_PAGES - 5 - tile[FKV_TILE_ROW]);
        ck_assert_uint_eq(tile[FKV_TILE_OPEN_PAGES], row[FKV_ROW_OPEN_PAGES]);
        ck_assert_uint_eq(tile[FKV_TILE_OPEN_FIXED], 1 + tile[FKV_TILE_ROW]);
        ck_assert_uint_eq(tile[FKV_TILE_OPEN_RING], N_PAGES - 1 - tile[FKV_TILE_ROW]);
    }
}
END_TEST

START_TEST(every_change_is_found) {
    static uint32_t from[300];
    static uint32_t to[300];
    fkv_table_run runs[300];
    uint32_t random = 1;
    for (uint32_t round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < 300; i++) {
            random = random * 1664525u + 1013904223u;
            from[i] = random >> 8;
            to[i] = from[i] + (random >> 28 < round % 17 ? (random >> 20) % 3 - 1 : 0);
        }
        const uint32_t n_runs = fkv_step_table_changes(from, to, 300, runs, 300);
        ck_assert_uint_le(n_runs, 300);
        apply_runs(from, 300, runs, n_runs);
        ck_assert_mem_eq(from, to, sizeof to);
    }
    to[0]++;
    to[1] += 2;
    ck_assert_uint_eq(fkv_step_table_changes(from, to, 300, runs, 1), 2);
    ck_assert_uint_eq(fkv_step_table_changes(from, from, 300, runs, 0), 0);
}
END_TEST

TEST_MAIN("step_table", consecutive_decode_steps_differ_by_few_runs, decode_merges_few_splits, splits_refer_to_their_item,
          first_pages_equal_the_page_table, tiles_contain_the_page_tables_of_their_row, every_change_is_found)
