/* Tests the prefix store that combines a near and a far store. Both are stores in memory, whose pages have one byte. */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <string.h>

enum { N_KEYS = 8, N_READS = 6 };

typedef struct memory_store {
    uint8_t bytes[N_KEYS]; /* contents of each page; 0 if the page is not in the store */
    bool pending[N_KEYS];
    fkv_status read_status;
    fkv_status write_status;
    int n_reads;
    int n_sequences; /* calls of read_pages() */
    int n_expected;
    int n_touched;
    bool closed;
} memory_store;

static bool memory_contains(void *self, const fkv_page_key *key) { return ((memory_store *)self)->bytes[key->bytes[0]] != 0; }

static bool memory_pending(void *self, const fkv_page_key *key) {
    return !memory_contains(self, key) && ((memory_store *)self)->pending[key->bytes[0]];
}

static void memory_expect(void *self, const fkv_page_key *keys, uint32_t n) {
    (void)keys;
    ((memory_store *)self)->n_expected += (int)n;
}

static fkv_status memory_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    memory_store *m = self;
    m->n_reads++;
    if (m->read_status != FKV_OK) return m->read_status;
    if (!memory_contains(self, key) || capacity == 0) return FKV_GONE;
    *packed = m->bytes[key->bytes[0]];
    *n_bytes = 1;
    return FKV_OK;
}

/* Reads pages in batches of two: requests both pages before the first of them is done. */
static void memory_read_pages(void *self, const fkv_page_reads *reads) {
    fkv_page_read *pages[2];
    ((memory_store *)self)->n_sequences++;
    for (;;) {
        size_t n = 0;
        while (n < N_OF(pages) && (pages[n] = reads->next(reads->user)) != NULL) n++;
        if (n == 0) return;
        for (size_t i = 0; i < n; i++) {
            pages[i]->status = memory_read(self, &pages[i]->key, pages[i]->packed, pages[i]->capacity, &pages[i]->n_bytes);
            reads->done(reads->user);
        }
    }
}

static fkv_status memory_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    memory_store *m = self;
    if (m->write_status == FKV_OK && n_bytes == 1) m->bytes[key->bytes[0]] = *packed;
    return m->write_status;
}

static void memory_remove(void *self, const fkv_page_key *key) { ((memory_store *)self)->bytes[key->bytes[0]] = 0; }

static void memory_touch(void *self, const fkv_page_key *keys, uint32_t n) {
    (void)keys;
    ((memory_store *)self)->n_touched += (int)n;
}

static void memory_stats(void *self, fkv_prefix_store_stats *stats) {
    (void)self;
    *stats = (fkv_prefix_store_stats){.pages = 3, .bytes = 30, .memory = 100, .refused = 1, .n_unavailable = 2};
}

static void memory_close(void *self) { ((memory_store *)self)->closed = true; }

static fkv_prefix_store store_of(memory_store *m, bool is_far) {
    fkv_prefix_store store = {.self = m,
                              .contains = memory_contains,
                              .read = memory_read,
                              .write = memory_write,
                              .remove = memory_remove,
                              .touch = memory_touch,
                              .stats = memory_stats,
                              .close = memory_close};
    if (is_far) store.pending = memory_pending;
    if (is_far) store.expect = memory_expect;
    if (is_far) store.read_pages = memory_read_pages;
    return store;
}

static fkv_prefix_store open_pair(memory_store *near, memory_store *far) {
    fkv_prefix_store pair;
    const fkv_prefix_store a = store_of(near, false);
    const fkv_prefix_store b = store_of(far, true);
    ck_ok(fkv_prefix_pair_open(&a, &b, &pair));
    return pair;
}

static fkv_page_key key_of(uint8_t i) { return (fkv_page_key){{i}}; }

START_TEST(pages_are_looked_up_and_read_in_the_near_store_first) {
    memory_store near = {.bytes = {10, 0, 12}};
    memory_store far = {.bytes = {0, 21, 22}, .pending = {true, true, true, true}};
    fkv_prefix_store pair = open_pair(&near, &far);
    const uint8_t expected[] = {10, 21, 12, 0};
    for (uint8_t i = 0; i < N_OF(expected); i++) {
        const fkv_page_key key = key_of(i);
        uint8_t page = 0;
        uint64_t n_bytes = 0;
        ck_assert_int_eq(pair.contains(pair.self, &key), expected[i] != 0);
        ck_assert_int_eq(pair.pending(pair.self, &key), i == 3);
        ck_status(pair.read(pair.self, &key, &page, 1, &n_bytes), expected[i] != 0 ? FKV_OK : FKV_GONE);
        ck_assert_uint_eq(page, expected[i]);
    }
    ck_assert_int_eq(near.n_reads, 2);
    near.read_status = FKV_FILE_DAMAGED; /* the damaged page must be removed and read from the far store */
    const fkv_page_key key = key_of(2);
    uint8_t page = 0;
    uint64_t n_bytes = 0;
    ck_ok(pair.read(pair.self, &key, &page, 1, &n_bytes));
    ck_assert_uint_eq(page, 22);
    ck_assert(!memory_contains(&near, &key));
    pair.close(pair.self);
}
END_TEST

typedef struct read_order {
    fkv_page_read pages[N_READS];
    uint8_t bytes[N_READS];
    size_t n_next;
    size_t n_done;
} read_order;

static fkv_page_read *next_page(void *user) {
    read_order *order = user;
    return order->n_next < N_READS ? &order->pages[order->n_next++] : NULL;
}

static void page_done(void *user) {
    read_order *order = user;
    ck_assert_uint_lt(order->n_done, order->n_next);
    ck_assert_int_ne(order->pages[order->n_done++].status, FKV_BUSY); /* the initial value */
}

/* Tests every combination in which each page is in the near store, in the far store or in neither. */
START_TEST(pages_of_both_stores_are_read_in_order) {
    for (unsigned where = 0; where < 729; where++) {
        memory_store near = {.read_status = FKV_OK};
        memory_store far = {.read_status = FKV_OK};
        read_order order = {0};
        unsigned rest = where;
        for (uint8_t i = 0; i < N_READS; i++, rest /= 3) {
            if (rest % 3 == 1) near.bytes[i] = (uint8_t)(i + 1);
            if (rest % 3 == 2) far.bytes[i] = (uint8_t)(i + 101);
            order.pages[i] = (fkv_page_read){.key = key_of(i), .packed = &order.bytes[i], .capacity = 1, .status = FKV_BUSY};
        }
        fkv_prefix_store pair = open_pair(&near, &far);
        pair.read_pages(pair.self, &(fkv_page_reads){.user = &order, .next = next_page, .done = page_done});
        ck_assert_uint_eq(order.n_done, N_READS);
        for (uint8_t i = 0; i < N_READS; i++) {
            ck_assert_uint_eq(order.bytes[i], near.bytes[i] + far.bytes[i]);
            ck_status(order.pages[i].status, order.bytes[i] != 0 ? FKV_OK : FKV_GONE);
        }
        if (where == 728) ck_assert_int_eq(far.n_sequences, 1); /* one call reads all pages from the far store */
        pair.close(pair.self);
    }
}
END_TEST

START_TEST(pages_are_written_to_both_stores) {
    const uint8_t page = 5;
    memory_store near = {.bytes = {10, 0, 12, 0}};
    memory_store far = {.bytes = {20, 21, 0, 0}};
    fkv_prefix_store pair = open_pair(&near, &far);
    for (uint8_t i = 0; i < 4; i++) {
        const fkv_page_key key = key_of(i);
        ck_assert_int_eq(pair.wants(pair.self, &key), i != 0);
        ck_ok(pair.write(pair.self, &key, &page, 1));
        ck_assert(memory_contains(&near, &key) && memory_contains(&far, &key));
        ck_assert(!pair.wants(pair.self, &key));
    }
    ck_assert_uint_eq(near.bytes[0], 10); /* existing pages are not written again */
    ck_assert_uint_eq(far.bytes[1], 21);
    const fkv_page_key key = key_of(0);
    far.bytes[0] = 0;
    far.pending[0] = true;
    ck_assert(!pair.wants(pair.self, &key)); /* the near store has the page, and the lookup in the far store is pending */
    pair.remove(pair.self, &key);
    ck_assert(!memory_contains(&near, &key) && !memory_contains(&far, &key) && pair.wants(pair.self, &key));
    pair.close(pair.self);
}
END_TEST

START_TEST(write_succeeds_if_one_store_has_the_page) {
    const uint8_t page = 5;
    const struct {
        fkv_status near;
        fkv_status far;
        fkv_status both;
    } cases[] = {{FKV_OK, FKV_BUSY, FKV_OK}, {FKV_IO, FKV_OK, FKV_OK}, {FKV_IO, FKV_BUSY, FKV_IO}};
    for (size_t i = 0; i < N_OF(cases); i++) {
        memory_store near = {.write_status = cases[i].near};
        memory_store far = {.write_status = cases[i].far};
        fkv_prefix_store pair = open_pair(&near, &far);
        const fkv_page_key key = key_of(1);
        ck_status(pair.write(pair.self, &key, &page, 1), cases[i].both);
        pair.close(pair.self);
    }
}
END_TEST

START_TEST(other_calls_reach_both_stores) {
    memory_store near = {0};
    memory_store far = {0};
    fkv_prefix_store pair = open_pair(&near, &far);
    const fkv_page_key keys[3] = {{{1}}, {{2}}, {{3}}};
    fkv_prefix_store_stats stats;
    pair.expect(pair.self, keys, 3);
    pair.touch(pair.self, keys, 2);
    pair.stats(pair.self, &stats);
    ck_assert_int_eq(far.n_expected, 3);
    ck_assert(near.n_touched == 2 && far.n_touched == 2);
    ck_assert(stats.pages == 3 && stats.bytes == 30 && stats.memory > 200 && stats.refused == 2 && stats.n_unavailable == 4);
    pair.close(pair.self);
    ck_assert(near.closed && far.closed);
    ck_status(fkv_prefix_pair_open(NULL, NULL, &pair), FKV_BAD_ARGUMENT);
}
END_TEST

TEST_MAIN("prefix_pair", pages_are_looked_up_and_read_in_the_near_store_first, pages_of_both_stores_are_read_in_order,
          pages_are_written_to_both_stores, write_succeeds_if_one_store_has_the_page, other_calls_reach_both_stores)
