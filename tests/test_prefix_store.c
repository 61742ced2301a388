/* Tests packed prefix pages and the prefix store in a folder. Packed pages must be restored bit-identically or rejected. The
 * folder must stay within its size limit and keep its LRU order across restarts and kills.
 *
 * For the kills, a child process writes pages and counts the acknowledged ones. The contents of a page are derived from its
 * number. The parent kills the child after a random delay, reopens the folder and reads all pages. The environment variable
 * FLATKV_KILLS sets the number of kills.
 */
#include "cache_fixture.h"
#include "test.h"

#include <flatkv/prefix_store.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PAGE = 16,
    N_PAGES = 8 /* a multiple of SPAN */,
    N_TOKENS = N_PAGES * PAGE,
    N_MORE = 24,
    SPAN = 4, /* number of pages in a span of a sealed layer */
    TENANT = 3,
    MOST_PACKED = 64 * 1024
};

#define AFFINE {.n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {.bits = 8, .group = 64}, .v = {.bits = 4, .group = 64}}
#define SEALED                                                                                                                   \
    {                                                                                                                            \
        .n_q_heads = 4, .n_kv_heads = 2, .head_dim = 64, .k = {.bits = 4, .kind = FKV_CODEC_SEALED}, .v = {                      \
            .bits = 4,                                                                                                           \
            .kind = FKV_CODEC_SEALED_V                                                                                           \
        }                                                                                                                        \
    }

static fkv_config config_of(const fkv_layer_config *layers, uint32_t n_layers) {
    fkv_config config = fkv_config_default();
    config.n_layers = n_layers;
    config.layers = layers;
    config.rotate = FKV_ROTATE_V;
    config.page_tokens = PAGE;
    config.max_tokens = 400;
    config.max_seqs = 2;
    config.max_step_tokens = 40;
    config.n_threads = 1;
    return config;
}

/* ---- packed pages ---- */

typedef struct packed_prefix {
    uint32_t tokens[N_TOKENS + N_MORE];
    fkv_page_key keys[N_PAGES];
    uint8_t bytes[N_PAGES][MOST_PACKED];
    uint64_t n_bytes[N_PAGES];
    fkv_page_key open_keys[N_PAGES];
    uint8_t open[N_PAGES][MOST_PACKED]; /* packed open pages */
    uint64_t n_open[N_PAGES];           /* 0 if the page has no separate open form */
} packed_prefix;

static packed_prefix one;
static packed_prefix other;

static void keys_of(const fkv_cache *cache, const char *name, packed_prefix *p) {
    fkv_page_key above;
    ck_ok(fkv_prefix_root(cache, name, strlen(name), &above));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        ck_ok(fkv_prefix_key(&above, p->tokens + (size_t)i * PAGE, PAGE, &p->keys[i]));
        above = p->keys[i];
        ck_ok(fkv_prefix_open_key(&p->keys[i], &p->open_keys[i]));
    }
}

static void check_key(const fkv_page_key *key, const char *expected) {
    char text[2 * FKV_PAGE_KEY_BYTES + 1];
    for (int i = 0; i < FKV_PAGE_KEY_BYTES; i++) (void)snprintf(text + 2 * (size_t)i, 3, "%02x", key->bytes[i]);
    ck_assert_str_eq(text, expected);
}

static fkv_status unpack(cache_fixture *w, const packed_prefix *p, uint32_t i) {
    return fkv_prefix_unpack(w->cache, TENANT, p->tokens, i + 1, &p->keys[i], p->bytes[i], p->n_bytes[i]);
}

static bool has_sealed_layers(const cache_fixture *w) {
    bool any = false;
    for (uint32_t i = 0; i < w->config.n_layers; i++) any |= cache_fixture_layer(w, i)->k.kind == FKV_CODEC_SEALED;
    return any;
}

static fkv_status unpack_open(cache_fixture *w, const packed_prefix *p, uint32_t i) {
    return fkv_prefix_unpack_open(w->cache, TENANT, p->tokens, i + 1, &p->open_keys[i], p->open[i], p->n_open[i]);
}

/* Computes the prefix in a new sequence, inserts it into the tree and packs its pages and open pages. Then appends more tokens to
 * the sequence, which stays open. */
static fkv_seq compute(cache_fixture *w, packed_prefix *p, uint8_t *outputs) {
    fkv_seq_config config = {.max_tokens = N_TOKENS + N_MORE, .tenant = TENANT};
    fkv_seq seq = 0;
    cache_tokens(11, p->tokens, N_TOKENS + N_MORE);
    ck_ok(fkv_seq_open(w->cache, &config, &seq, NULL));
    keys_of(w->cache, "a tenant", p);
    ck_assert_uint_le(fkv_prefix_packed_bytes(w->cache), MOST_PACKED);
    for (uint32_t i = 0; i < N_PAGES; i++) { /* inserts tokens after every step, as an engine does */
        cache_fixture_run(w, seq, p->tokens, i * PAGE, (i + 1) * PAGE, PAGE, outputs);
        ck_ok(fkv_prefix_insert(w->cache, seq, p->tokens, (i + 1) * PAGE));
        p->n_open[i] = 0;
        const fkv_status status =
            fkv_prefix_pack_open(w->cache, TENANT, p->tokens, i + 1, &p->open_keys[i], p->open[i], &p->n_open[i]);
        ck_status(status, i > 0 && has_sealed_layers(w) ? FKV_OK : FKV_GONE);
    }
    for (uint32_t i = 0; i < N_PAGES; i++)
        ck_ok(fkv_prefix_pack(w->cache, TENANT, p->tokens, i + 1, &p->keys[i], p->bytes[i], &p->n_bytes[i]));
    cache_fixture_run(w, seq, p->tokens, N_TOKENS, N_TOKENS + N_MORE, 7, outputs);
    return seq;
}

static void check_round_trip(const fkv_config *config) {
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, config));
    uint8_t *computed = calloc(N_TOKENS + N_MORE, w.output_bytes);
    uint8_t *restored = calloc(N_TOKENS + N_MORE, w.output_bytes);
    ck_assert(computed != NULL && restored != NULL);
    (void)compute(&w, &one, computed);
    cache_fixture_close(&w);

    ck_ok(cache_fixture_open(&w, config));
    other = one;
    for (uint32_t i = 0; i < N_PAGES; i++) {
        ck_ok(unpack(&w, &one, i));
        ck_assert(fkv_cache_consistent(w.cache));
        ck_ok(fkv_prefix_pack(w.cache, TENANT, one.tokens, i + 1, &one.keys[i], other.bytes[i], &other.n_bytes[i]));
        ck_assert_uint_eq(other.n_bytes[i], one.n_bytes[i]);
        ck_assert_mem_eq(other.bytes[i], one.bytes[i], one.n_bytes[i]);
    }
    ck_ok(unpack(&w, &one, 0)); /* unpacking a page that the tree already has succeeds and keeps the existing page */
    fkv_seq_config open = {
        .max_tokens = N_TOKENS + N_MORE, .tenant = TENANT, .prompt = one.tokens, .n_prompt = N_TOKENS + N_MORE - 1};
    fkv_seq seq = 0;
    uint32_t n_shared = 0;
    ck_ok(fkv_seq_open(w.cache, &open, &seq, &n_shared));
    ck_assert_uint_eq(n_shared, N_TOKENS);
    cache_fixture_run(&w, seq, one.tokens, N_TOKENS, N_TOKENS + N_MORE, 5, restored);
    ck_assert_mem_eq(restored + N_TOKENS * w.output_bytes, computed + N_TOKENS * w.output_bytes, N_MORE * w.output_bytes);
    ck_ok(fkv_seq_close(w.cache, seq));
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
    free(computed);
    free(restored);
}

START_TEST(unpacked_pages_are_bit_identical) {
    fkv_layer_config windowed = AFFINE;
    fkv_layer_config sealed_window = SEALED;
    windowed.window = sealed_window.window = 40;
    windowed.n_sinks = 4;
    const fkv_layer_config affine[] = {AFFINE, AFFINE};
    const fkv_layer_config sealed[] = {SEALED, SEALED};
    const fkv_layer_config mixed[] = {AFFINE, windowed, AFFINE};
    const fkv_layer_config all_windowed[] = {windowed, windowed};
    const fkv_layer_config sealed_mixed[] = {SEALED, sealed_window, windowed};
    const struct {
        const fkv_layer_config *layers;
        uint32_t n;
    } cases[] = {{affine, 2}, {sealed, 2}, {mixed, 3}, {all_windowed, 2}, {sealed_mixed, 3}};
    for (size_t i = 0; i < N_OF(cases); i++) {
        fkv_config config = config_of(cases[i].layers, cases[i].n);
        check_round_trip(&config);
    }
}
END_TEST

/* Restores only the first n pages and the open pages of their last span in a new cache, and continues the sequence there. */
static void check_restored_end(const fkv_config *config, uint32_t n, const uint8_t *computed) {
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, config));
    uint8_t *restored = calloc(N_TOKENS + N_MORE, w.output_bytes);
    ck_assert_ptr_nonnull(restored);
    fkv_seq_config open = {
        .max_tokens = N_TOKENS + N_MORE, .tenant = TENANT, .prompt = one.tokens, .n_prompt = N_TOKENS + N_MORE - 1};
    fkv_seq seq = 0;
    uint32_t n_shared = 0;
    for (uint32_t i = 0; i < n; i++) ck_ok(unpack(&w, &one, i));
    ck_ok(fkv_prefix_match(w.cache, &open, &n_shared));
    ck_assert_uint_eq(n_shared, n < SPAN ? PAGE : (n - n % SPAN) * PAGE);
    for (uint32_t i = n - n % SPAN; i < n; i++) {
        if (i == 0) continue;
        ck_ok(unpack_open(&w, &one, i));
        ck_ok(unpack_open(&w, &one, i)); /* unpacking an open page again has no effect */
        ck_assert(fkv_cache_consistent(w.cache));
        ck_ok(fkv_prefix_pack_open(w.cache, TENANT, one.tokens, i + 1, &one.open_keys[i], other.open[i], &other.n_open[i]));
        ck_assert_uint_eq(other.n_open[i], one.n_open[i]);
        ck_assert_mem_eq(other.open[i], one.open[i], one.n_open[i]);
    }
    ck_ok(fkv_seq_open(w.cache, &open, &seq, &n_shared));
    ck_assert_uint_eq(n_shared, n * PAGE);
    cache_fixture_run(&w, seq, one.tokens, n * PAGE, N_TOKENS + N_MORE, 5, restored);
    ck_assert_mem_eq(restored + n * PAGE * w.output_bytes, computed + n * PAGE * w.output_bytes,
                     (N_TOKENS + N_MORE - n * PAGE) * w.output_bytes);
    cache_fixture_close(&w);
    free(restored);
}

START_TEST(open_pages_continue_a_prefix_after_any_page) {
    const fkv_layer_config sealed[] = {SEALED, AFFINE, SEALED};
    fkv_config config = config_of(sealed, 3);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    uint8_t *computed = calloc(N_TOKENS + N_MORE, w.output_bytes);
    ck_assert_ptr_nonnull(computed);
    (void)compute(&w, &one, computed);
    cache_fixture_close(&w);
    for (uint32_t n = 1; n <= N_PAGES; n++) check_restored_end(&config, n, computed);
    free(computed);
}
END_TEST

START_TEST(misplaced_open_pages_are_rejected) {
    const fkv_layer_config layers[] = {SEALED, AFFINE};
    const fkv_layer_config affine[] = {AFFINE, AFFINE};
    fkv_config config = config_of(layers, 2);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_close(w.cache, compute(&w, &one, NULL)));
    ck_ok(fkv_prefix_clear(w.cache));
    ck_status(unpack_open(&w, &one, 1), FKV_GONE); /* the page itself is not in the tree */
    ck_ok(unpack(&w, &one, 0));
    ck_status(unpack_open(&w, &one, 1), FKV_GONE);
    ck_ok(unpack(&w, &one, 1));
    const fkv_stats before = cache_fixture_stats(&w);
    other = one;
    memcpy(other.open[1], one.open[2], one.n_open[2]); /* replaces an open page with the open form of another page */
    ck_status(unpack_open(&w, &other, 1), FKV_FILE_FOREIGN);
    /* tries to unpack a sealed page as an open page, and an open page as a sealed page */
    ck_status(fkv_prefix_unpack_open(w.cache, TENANT, one.tokens, 2, &one.keys[1], one.bytes[1], one.n_bytes[1]),
              FKV_FILE_FOREIGN);
    ck_status(fkv_prefix_unpack(w.cache, TENANT, one.tokens, 2, &one.open_keys[1], one.open[1], one.n_open[1]), FKV_FILE_FOREIGN);
    /* the first page has no separate open form */
    ck_status(fkv_prefix_unpack_open(w.cache, TENANT, one.tokens, 1, &one.keys[0], one.bytes[0], one.n_bytes[0]),
              FKV_FILE_FOREIGN);
    ck_status(fkv_prefix_pack_open(w.cache, TENANT, one.tokens, 1, &one.open_keys[0], other.open[0], &other.n_open[0]), FKV_GONE);
    ck_status(fkv_prefix_unpack_open(w.cache, TENANT, one.tokens, 0, &one.keys[0], one.open[1], one.n_open[1]), FKV_BAD_ARGUMENT);
    ck_status(fkv_prefix_unpack_open(NULL, TENANT, one.tokens, 2, &one.keys[1], one.open[1], one.n_open[1]), FKV_BAD_ARGUMENT);
    ck_status(fkv_prefix_pack_open(NULL, TENANT, one.tokens, 2, &one.keys[1], other.open[1], &other.n_open[1]), FKV_BAD_ARGUMENT);
    ck_status(fkv_prefix_open_key(NULL, &other.open_keys[0]), FKV_BAD_ARGUMENT);
    const fkv_stats after = cache_fixture_stats(&w);
    ck_assert_mem_eq(after.groups, before.groups, sizeof before.groups);
    ck_ok(unpack_open(&w, &one, 1));
    cache_fixture_close(&w);

    config = config_of(affine, 2);
    ck_ok(cache_fixture_open(&w, &config));
    ck_status(unpack_open(&w, &one, 1), FKV_FILE_FOREIGN);
    cache_fixture_close(&w);
}
END_TEST

START_TEST(open_pages_keep_promises) {
    const fkv_layer_config layers[] = {SEALED};
    fkv_config config = config_of(layers, 1);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_close(w.cache, compute(&w, &one, NULL)));
    ck_ok(fkv_prefix_clear(w.cache));
    uint32_t tokens[2][11 * PAGE];
    fkv_seq seqs[2];
    for (uint32_t s = 0; s < 2; s++) {
        cache_tokens(20 + s, tokens[s], 11 * PAGE);
        seqs[s] = cache_fixture_seq(&w, 11 * PAGE);
    }
    for (uint32_t i = 0; i < N_PAGES; i++) { /* unpacks more open pages than the plan provides for cached prefixes */
        fkv_status status = unpack(&w, &one, i);
        if (status == FKV_OK && i > 0) status = unpack_open(&w, &one, i);
        ck_assert_msg(status == FKV_OK || status == FKV_POOL_FULL || status == FKV_GONE, "%s", fkv_message());
        ck_assert(fkv_cache_consistent(w.cache));
        const fkv_stats now = cache_fixture_stats(&w);
        for (uint32_t g = 0; g < now.n_groups; g++)
            ck_assert_uint_le(now.groups[g].promised, now.groups[g].free + now.groups[g].cached);
    }
    for (uint32_t s = 0; s < 2; s++) cache_fixture_run(&w, seqs[s], tokens[s], 0, 11 * PAGE, 40, NULL);
    ck_assert(fkv_cache_consistent(w.cache));
    cache_fixture_close(&w);
}
END_TEST

typedef fkv_status (*unpack_fn)(cache_fixture *w, const packed_prefix *p, uint32_t i);

/* Checks that a packed page with any flipped bit, or truncated to any length, is rejected. */
static void check_damage(cache_fixture *w, unpack_fn unpack_one, uint32_t i, uint8_t *bytes, uint64_t *n_bytes) {
    const fkv_stats before = cache_fixture_stats(w);
    const uint64_t n = *n_bytes;
    for (uint64_t at = 0; at < n; at++) {
        for (uint32_t bit = 0; bit < 8; bit++) {
            bytes[at] ^= (uint8_t)(1u << bit);
            const fkv_status status = unpack_one(w, &one, i);
            ck_assert_msg(status == FKV_FILE_DAMAGED || status == FKV_FILE_FOREIGN, "byte %u: %s", (unsigned)at,
                          fkv_status_name(status));
            bytes[at] ^= (uint8_t)(1u << bit);
        }
        *n_bytes = at;
        const fkv_status status = unpack_one(w, &one, i);
        ck_assert(status == FKV_FILE_DAMAGED || status == FKV_FILE_FOREIGN);
        *n_bytes = n;
    }
    const fkv_stats after = cache_fixture_stats(w);
    ck_assert_mem_eq(after.groups, before.groups, sizeof before.groups);
    ck_ok(unpack_one(w, &one, i));
}

START_TEST(page_with_a_changed_bit_or_missing_byte_is_rejected) {
    const fkv_layer_config layer[] = {{.n_q_heads = 1,
                                       .n_kv_heads = 1,
                                       .head_dim = 32,
                                       .k = {.bits = 4, .kind = FKV_CODEC_SEALED},
                                       .v = {.bits = 4, .kind = FKV_CODEC_SEALED_V}}};
    fkv_config config = config_of(layer, 1);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_close(w.cache, compute(&w, &one, NULL)));
    ck_ok(fkv_prefix_clear(w.cache));
    check_damage(&w, unpack, 0, one.bytes[0], &one.n_bytes[0]);
    check_damage(&w, unpack, 1, one.bytes[1], &one.n_bytes[1]);
    check_damage(&w, unpack_open, 1, one.open[1], &one.n_open[1]);
    cache_fixture_close(&w);
}
END_TEST

START_TEST(page_of_another_model_codec_tenant_or_position_is_rejected) {
    const fkv_layer_config layers[] = {AFFINE, AFFINE};
    fkv_layer_config fewer_bits[] = {AFFINE, AFFINE};
    fewer_bits[1].k.bits = 4;
    cache_fixture w;
    fkv_config config = config_of(layers, 2);
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_close(w.cache, compute(&w, &one, NULL)));
    ck_ok(fkv_prefix_clear(w.cache));
    other = one;
    keys_of(w.cache, "another tenant", &other);
    ck_assert_mem_ne(other.keys[0].bytes, one.keys[0].bytes, FKV_PAGE_KEY_BYTES);
    ck_status(unpack(&w, &other, 0), FKV_FILE_FOREIGN);
    other = one;
    other.tokens[5] ^= 1; /* the caller passes tokens that do not match the key */
    ck_status(unpack(&w, &other, 0), FKV_FILE_FOREIGN);
    other = one;
    memcpy(other.bytes[0], one.bytes[1], one.n_bytes[1]); /* stores a page under the key of another page, like a renamed file */
    ck_status(unpack(&w, &other, 0), FKV_FILE_FOREIGN);
    ck_status(unpack(&w, &one, 1), FKV_GONE);
    ck_ok(unpack(&w, &one, 0));
    uint32_t n_shared = 0;
    fkv_seq_config stranger = {.max_tokens = N_TOKENS, .tenant = TENANT + 1, .prompt = one.tokens, .n_prompt = N_TOKENS};
    ck_ok(fkv_prefix_match(w.cache, &stranger, &n_shared));
    ck_assert_uint_eq(n_shared, 0);
    cache_fixture_close(&w);

    fkv_config others[5] = {config, config, config, config, config};
    others[0].weights_id[31] = 1;
    others[1].layers = fewer_bits;
    (void)strcpy(others[2].rope_id, "neox base=10000");
    others[3].rotation_seed = 9;
    (void)strcpy(others[4].numerics, "cpu avx2 1");
    for (size_t i = 0; i < N_OF(others); i++) {
        ck_ok(cache_fixture_open(&w, &others[i]));
        other = one;
        ck_status(unpack(&w, &other, 0), FKV_FILE_FOREIGN);
        keys_of(w.cache, "a tenant", &other);
        ck_assert_mem_ne(other.keys[0].bytes, one.keys[0].bytes, FKV_PAGE_KEY_BYTES);
        ck_status(unpack(&w, &other, 0), FKV_FILE_FOREIGN);
        cache_fixture_close(&w);
    }
}
END_TEST

/* An independent program computed the expected keys as sections 4 and 7 of docs/page_format.md specify. Servers that share a
 * store must compute equal keys. If the computation of keys changes, all stored pages become unreachable. */
START_TEST(keys_equal_the_golden_keys) {
    static const struct {
        const char *tenant;
        const char *root;
        const char *first;
        const char *second;
        const char *open;  /* of the second page */
        const char *state; /* after the second page */
    } golden[] = {
        {"", "0ec03114479652de2671c98d66367cb3cf75bd167037522698ce44d4a4cd3046",
         "1c5b59f97d9e17c0d7418dcaa5cc66a0384645aa08706350a8ed0b0d7449a57c",
         "3537054c9252209447f9700649c8d668002e6f4f758acc5ee314d132c4a94852",
         "ff08f2771e9b2cfab62ba599801ac72b5c4409b010a2ac8e81d6973179a16445",
         "85bc2d1c5fdb058fe908c19d5ff0f7c538cf965effb96c5c94cb8d9781f52089"},
        {"a tenant", "3817f10bb4fd6834f888b1fce40134886152fe0f6027ac92d83c85972c3f34c4",
         "dc9b2c3f74e1ebbe87dd952e0234ea2cfde574d1ebc5d167c6992fce3b8c7f27",
         "18c7a0e74395ff5c8d4b2e01ad9970a9178cdcb6bf630f6403a8cdea2e8bba27",
         "c226d47bb6c396d7b3e1e00e4128bb394ff518a126d926a2c47e3ef8e6f2408a",
         "f0077c36d0d83daff7917b418782b4ae3fffa226d442f8453252f274a46d8ecd"},
    };
    const fkv_layer_config layers[] = {
        AFFINE,
        {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 64, .window = 24, .n_sinks = 3, .k = {.bits = 16}, .v = {.bits = 16}}};
    fkv_config config = config_of(layers, 2);
    for (uint8_t i = 0; i < 32; i++) config.weights_id[i] = i;
    config.rotation_seed = 7;
    (void)strcpy(config.rope_id, "neox base=10000");
    (void)strcpy(config.numerics, "cpu int8dot 1 intel");
    uint32_t tokens[2 * PAGE];
    for (uint32_t i = 0; i < 2 * PAGE; i++) tokens[i] = 1000 * i + 1;
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    for (size_t i = 0; i < N_OF(golden); i++) {
        fkv_page_key key;
        ck_ok(fkv_prefix_root(w.cache, golden[i].tenant, strlen(golden[i].tenant), &key));
        check_key(&key, golden[i].root);
        ck_ok(fkv_prefix_key(&key, tokens, PAGE, &key));
        check_key(&key, golden[i].first);
        ck_ok(fkv_prefix_key(&key, tokens + PAGE, PAGE, &key));
        check_key(&key, golden[i].second);
        fkv_page_key part;
        ck_ok(fkv_prefix_open_key(&key, &part));
        check_key(&part, golden[i].open);
        ck_ok(fkv_prefix_state_key(&key, &part));
        check_key(&part, golden[i].state);
    }
    cache_fixture_close(&w);
}
END_TEST

START_TEST(unpacked_pages_keep_promises_and_evict_only_older_prefixes) {
    const fkv_layer_config layers[] = {AFFINE};
    fkv_config config = config_of(layers, 1);
    cache_fixture w;
    ck_ok(cache_fixture_open(&w, &config));
    ck_ok(fkv_seq_close(w.cache, compute(&w, &one, NULL)));
    ck_ok(fkv_prefix_clear(w.cache));
    const uint32_t n_pages = cache_fixture_stats(&w).groups[0].pages;

    fkv_seq most = cache_fixture_seq(&w, (n_pages - 3) * PAGE); /* reserves all pages except three */
    for (uint32_t i = 0; i < N_PAGES; i++) {
        fkv_status status = unpack(&w, &one, i);
        ck_assert(status == FKV_OK || status == FKV_POOL_FULL || status == FKV_GONE);
        ck_assert(fkv_cache_consistent(w.cache));
        const fkv_stats now = cache_fixture_stats(&w);
        ck_assert_uint_le(now.groups[0].promised, now.groups[0].free + now.groups[0].cached);
    }
    uint32_t *tokens = calloc(n_pages, PAGE * sizeof *tokens);
    ck_assert_ptr_nonnull(tokens);
    cache_tokens(12, tokens, (n_pages - 3) * PAGE);
    /* the sequence can still use all pages that were reserved for it */
    cache_fixture_run(&w, most, tokens, 0, (n_pages - 3) * PAGE, 40, NULL);
    ck_ok(fkv_prefix_insert(w.cache, most, tokens, (n_pages - 3) * PAGE));
    fkv_step *step = NULL;
    const fkv_seq spare = cache_fixture_seq(&w, 1);
    const fkv_row row = {.seq = spare, .n_tokens = 1};
    ck_ok(fkv_step_begin(w.cache, &row, 1, &step));
    ck_status(unpack(&w, &one, 0), FKV_BAD_STATE);
    ck_ok(fkv_step_abort(step));
    ck_ok(fkv_seq_close(w.cache, spare));
    ck_ok(fkv_seq_close(w.cache, most));
    for (uint32_t i = 0; i < N_PAGES; i++) ck_ok(unpack(&w, &one, i)); /* evicts the older prefix */
    ck_assert(fkv_cache_consistent(w.cache));
    free(tokens);
    cache_fixture_close(&w);
}
END_TEST

/* ---- folder ---- */

static const char *folder_path(void) {
    static char path[200];
    const char *root = getenv("TMPDIR");
    if (path[0] != '\0') return path; /* a child process uses the folder of its parent */
    (void)snprintf(path, sizeof path, "%s/flatkv_prefix_test_%d", root != NULL ? root : "/tmp", (int)getpid());
    return path;
}

/* Deletes the folder and its contents. */
static void remove_folder(const char *path) {
    char name[600];
    DIR *dir = opendir(path);
    if (dir == NULL) return;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        (void)snprintf(name, sizeof name, "%s/%s", path, d->d_name);
        if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0 && unlink(name) != 0) (void)rmdir(name);
    }
    (void)closedir(dir);
    (void)rmdir(path);
}

static uint64_t folder_bytes(const char *path, uint32_t *n_parts) {
    char name[600];
    uint64_t bytes = 0;
    struct stat about;
    DIR *dir = opendir(path);
    ck_assert_ptr_nonnull(dir);
    *n_parts = 0;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        (void)snprintf(name, sizeof name, "%s/%s", path, d->d_name);
        *n_parts += strstr(d->d_name, ".part") != NULL;
        if (strstr(d->d_name, ".page") != NULL && stat(name, &about) == 0)
            bytes += ((uint64_t)about.st_size + 4095) / 4096 * 4096;
    }
    (void)closedir(dir);
    return bytes;
}

static void unlink_page(const fkv_page_key *key) {
    char path[600];
    int n = snprintf(path, sizeof path, "%s/", folder_path());
    for (uint32_t i = 0; i < sizeof key->bytes; i++) n += snprintf(path + n, sizeof path - (size_t)n, "%02x", key->bytes[i]);
    (void)snprintf(path + n, sizeof path - (size_t)n, ".page");
    ck_assert_int_eq(unlink(path), 0);
}

static fkv_page_key number_key(uint32_t number) {
    fkv_page_key key = {{0}};
    uint32_t mixed = number * 2654435761u; /* spreads consecutive numbers over the hash buckets */
    memcpy(key.bytes, &mixed, sizeof mixed);
    memcpy(key.bytes + 8, &number, sizeof number);
    return key;
}

enum { MOST_NUMBERED = 20000 };

static uint64_t number_bytes(uint32_t number, uint8_t *bytes) {
    uint64_t n = 1 + (uint64_t)number * 7919 % MOST_NUMBERED;
    for (uint64_t i = 0; i < n; i++) bytes[i] = (uint8_t)((number + i) * 31 >> 2);
    return n;
}

static fkv_status write_number(const fkv_prefix_store *s, uint32_t number) {
    static uint8_t bytes[MOST_NUMBERED];
    fkv_page_key key = number_key(number);
    uint64_t n = number_bytes(number, bytes);
    return s->write(s->self, &key, bytes, n);
}

static bool look_number(const fkv_prefix_store *s, uint32_t number) {
    fkv_page_key key = number_key(number);
    return s->contains(s->self, &key);
}

/* Checks that reading the page returns the bytes that were written. */
static void check_number(const fkv_prefix_store *s, uint32_t number) {
    static uint8_t got[MOST_NUMBERED];
    static uint8_t wanted[MOST_NUMBERED];
    fkv_page_key key = number_key(number);
    uint64_t n = 0;
    ck_ok(s->read(s->self, &key, got, sizeof got, &n));
    ck_assert_uint_eq(n, number_bytes(number, wanted));
    ck_assert_mem_eq(got, wanted, n);
}

static fkv_prefix_store open_folder(uint64_t max_bytes) {
    fkv_prefix_store s;
    ck_ok(fkv_prefix_folder_open(folder_path(), max_bytes, &s));
    return s;
}

START_TEST(folder_keeps_pages_across_restarts_within_its_limit) {
    enum { BOUND = 200 * 1024, WRITTEN = 60 };
    remove_folder(folder_path());
    fkv_prefix_store s = open_folder(BOUND);
    fkv_prefix_store_stats stats;
    uint32_t n_parts = 0;
    for (uint32_t i = 0; i < WRITTEN; i++) {
        ck_ok(write_number(&s, i));
        ck_ok(write_number(&s, i)); /* writing a page again has no effect */
        s.stats(s.self, &stats);
        ck_assert_uint_eq(folder_bytes(folder_path(), &n_parts), stats.bytes);
        ck_assert_uint_le(stats.bytes, BOUND);
    }
    ck_assert_uint_gt(stats.evicted, 0);
    ck_assert_uint_eq(stats.pages + stats.evicted, WRITTEN);
    for (uint32_t i = 0; i < WRITTEN; i++) ck_assert(look_number(&s, i) == (i >= WRITTEN - stats.pages));
    s.close(s.self);

    s = open_folder(BOUND);
    for (uint32_t i = 0; i < WRITTEN; i++) {
        ck_assert(look_number(&s, i) == (i >= WRITTEN - stats.pages));
        if (look_number(&s, i)) check_number(&s, i);
    }
    fkv_page_key gone = number_key(WRITTEN - 1);
    s.remove(s.self, &gone);
    ck_assert(!look_number(&s, WRITTEN - 1));
    uint8_t byte = 0;
    uint64_t n = 0;
    ck_status(s.read(s.self, &gone, &byte, 1, &n), FKV_GONE);
    fkv_page_key taken = number_key(WRITTEN - 2); /* deletes the file, as another program might; the read counts as one miss */
    unlink_page(&taken);
    ck_assert(look_number(&s, WRITTEN - 2));
    ck_status(s.read(s.self, &taken, &byte, 1, &n), FKV_GONE);
    ck_assert(!look_number(&s, WRITTEN - 2));
    s.stats(s.self, &stats);
    ck_assert_uint_eq(folder_bytes(folder_path(), &n_parts), stats.bytes);
    s.close(s.self);
    s = open_folder(BOUND / 4); /* reopens the folder with a quarter of the size limit */
    s.stats(s.self, &stats);
    ck_assert_uint_le(stats.bytes, BOUND / 4);
    ck_assert_uint_eq(folder_bytes(folder_path(), &n_parts), stats.bytes);
    s.close(s.self);
    remove_folder(folder_path());
}
END_TEST

START_TEST(least_recently_used_pages_and_prompt_ends_are_evicted_first) {
    enum { BOUND = 6 * 4096, ONE = MOST_NUMBERED }; /* a page whose number is a multiple of ONE needs one disk block */
    remove_folder(folder_path());
    fkv_prefix_store s = open_folder(BOUND);
    fkv_page_key prompt[3] = {number_key(1 * ONE), number_key(2 * ONE), number_key(3 * ONE)};
    for (uint32_t i = 1; i <= 6; i++) ck_ok(write_number(&s, i * ONE));
    s.touch(s.self, prompt, 3);
    s.close(s.self);
    s = open_folder(BOUND); /* the LRU order survives a restart */
    uint32_t next = 100;
    while (look_number(&s, 6 * ONE)) ck_ok(write_number(&s, next++ * ONE));
    ck_assert(!look_number(&s, 4 * ONE) && !look_number(&s, 5 * ONE) && look_number(&s, 1 * ONE) && look_number(&s, 2 * ONE) &&
              look_number(&s, 3 * ONE));
    while (look_number(&s, 3 * ONE)) ck_ok(write_number(&s, next++ * ONE));
    ck_assert(look_number(&s, 1 * ONE) && look_number(&s, 2 * ONE));
    while (look_number(&s, 2 * ONE)) ck_ok(write_number(&s, next++ * ONE));
    ck_assert(look_number(&s, 1 * ONE));
    s.close(s.self);
    remove_folder(folder_path());
}
END_TEST

START_TEST(folder_that_other_users_can_write_to_is_rejected) {
    fkv_prefix_store s;
    char link[210];
    const mode_t modes[] = {0777, 0770, 0702};
    ck_assert_int_eq(mkdir(folder_path(), 0700), 0);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        ck_assert_int_eq(chmod(folder_path(), modes[i]), 0);
        ck_status(fkv_prefix_folder_open(folder_path(), 1 << 20, &s), FKV_BAD_ARGUMENT);
        ck_assert_msg(strstr(fkv_message(), "writable by other users") != NULL, "%s", fkv_message());
    }
    ck_assert_int_eq(chmod(folder_path(), 0755), 0);
    (void)snprintf(link, sizeof link, "%s-link", folder_path());
    ck_assert_int_eq(symlink(folder_path(), link), 0);
    ck_ok(fkv_prefix_folder_open(link, 1 << 20, &s)); /* opens the folder through a symbolic link that the user created */
    s.close(s.self);
    if (geteuid() == 0) {
        char slash[220];
        (void)snprintf(slash, sizeof slash, "%s/", link);
        ck_assert_int_eq(lchown(link, 12345, 12345), 0);
        ck_status(fkv_prefix_folder_open(link, 1 << 20, &s), FKV_BAD_ARGUMENT);
        ck_status(fkv_prefix_folder_open(slash, 1 << 20, &s), FKV_BAD_ARGUMENT);
        ck_assert_int_eq(chown(folder_path(), 12345, 12345), 0);
        ck_status(fkv_prefix_folder_open(folder_path(), 1 << 20, &s), FKV_BAD_ARGUMENT);
        ck_assert_msg(strstr(fkv_message(), "uid 12345") != NULL, "%s", fkv_message());
    }
    ck_assert_int_eq(unlink(link), 0);
    remove_folder(folder_path());
}
END_TEST

START_TEST(folder_is_locked_by_one_process_and_follows_no_links) {
    char path[600];
    char target[600];
    remove_folder(folder_path());
    fkv_prefix_store s = open_folder(1 << 20);
    fkv_prefix_store second;
    ck_status(fkv_prefix_folder_open(folder_path(), 1 << 20, &second), FKV_BUSY);
    ck_ok(write_number(&s, 1));
    s.close(s.self);
    ck_status(fkv_prefix_folder_open(folder_path(), 0, &second), FKV_BAD_ARGUMENT);
    (void)snprintf(path, sizeof path, "%s/lock", folder_path());
    ck_status(fkv_prefix_folder_open(path, 1 << 20, &second), FKV_IO);

    (void)snprintf(target, sizeof target, "%s/notes.txt", folder_path());
    FILE *notes = fopen(target, "w");
    ck_assert_ptr_nonnull(notes);
    (void)fputs("not a page", notes);
    (void)fclose(notes);
    (void)snprintf(path, sizeof path, "%s/%064d.page", folder_path(), 7);
    ck_assert_int_eq(symlink(target, path), 0);
    (void)snprintf(path, sizeof path, "%s/%064d.part", folder_path(), 8);
    ck_assert_int_eq(link(target, path), 0);
    s = open_folder(1 << 20);
    fkv_prefix_store_stats stats;
    s.stats(s.self, &stats);
    ck_assert_uint_eq(stats.pages, 1);
    ck_assert_int_ne(access(path, F_OK), 0);
    ck_assert_int_eq(access(target, F_OK), 0);
    uint8_t byte = 0;
    uint64_t n = 0;
    fkv_page_key key = number_key(1);
    ck_status(s.read(s.self, &key, &byte, 1, &n),
              FKV_FILE_DAMAGED); /* a file that is longer than the buffer (one byte here) is reported as damaged */
    s.close(s.self);
    remove_folder(folder_path());
}
END_TEST

/* ---- kills ---- */

static void wait_us(uint32_t us) {
    const struct timespec time = {.tv_nsec = (long)us * 1000};
    (void)nanosleep(&time, NULL);
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Runs in the child process. *next is the number of the next page to write; all pages with lower numbers were acknowledged. */
static void write_forever(volatile uint32_t *next, uint64_t bound) {
    fkv_prefix_store s;
    if (fkv_prefix_folder_open(folder_path(), bound, &s) != FKV_OK) _exit(EXIT_FAILURE);
    for (;;) {
        if (write_number(&s, *next) != FKV_OK) _exit(EXIT_FAILURE);
        *next = *next + 1;
    }
}

START_TEST(killed_store_serves_exactly_the_acknowledged_pages) {
    enum { BOUND = 512 * 1024 };
    const char *said = getenv("FLATKV_KILLS");
    const uint32_t n_kills = said != NULL ? (uint32_t)strtoul(said, NULL, 10) : 40;
    uint32_t seed = 20261116;
    uint32_t n_parts = 0;
    uint64_t n_checked = 0;
    printf("seed %u\n", seed);
    remove_folder(folder_path());
    volatile uint32_t *next = mmap(NULL, sizeof *next, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert(next != MAP_FAILED);
    for (uint32_t k = 0; k < n_kills; k++) {
        (void)fflush(stdout);
        const pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) write_forever(next, BOUND);
        wait_us(next_random(&seed) % 20000);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        int how = 0;
        ck_assert_int_eq(waitpid(child, &how, 0), child);
        ck_assert_msg(WIFSIGNALED(how), "the child failed to write");
        uint32_t parts = 0;
        if (access(folder_path(), F_OK) == 0) (void)folder_bytes(folder_path(), &parts);
        n_parts += parts > 0;
        fkv_prefix_store s = open_folder(BOUND);
        fkv_prefix_store_stats stats;
        s.stats(s.self, &stats);
        ck_assert_uint_le(folder_bytes(folder_path(), &parts), BOUND);
        ck_assert_uint_eq(parts, 0);
        uint64_t n_there = 0;
        for (uint32_t i = *next + 1;
             i-- > 0 && n_there < stats.pages;) { /* the most recently written pages must all exist and be complete */
            bool there = look_number(&s, i);
            ck_assert_msg(there || i == *next, "acknowledged page %u is missing; %u pages exist", i, (unsigned)stats.pages);
            if (!there) continue;
            check_number(&s, i);
            n_there++;
        }
        ck_assert_uint_eq(n_there, stats.pages);
        n_checked += n_there;
        if (look_number(&s, *next))
            *next = *next + 1; /* the child had renamed this page to its final name but was killed before it counted the page */
        s.close(s.self);
    }
    printf("%u kills, %u pages acknowledged, %llu read back, %u kills left a part file\n", n_kills, *next,
           (unsigned long long)n_checked, n_parts);
    ck_assert_uint_gt(*next, 0);
    ck_assert_int_eq(munmap((void *)(uintptr_t)next, sizeof *next), 0);
    remove_folder(folder_path());
}
END_TEST

TEST_MAIN("prefix store", unpacked_pages_are_bit_identical, open_pages_continue_a_prefix_after_any_page,
          misplaced_open_pages_are_rejected, open_pages_keep_promises, page_with_a_changed_bit_or_missing_byte_is_rejected,
          page_of_another_model_codec_tenant_or_position_is_rejected, keys_equal_the_golden_keys,
          unpacked_pages_keep_promises_and_evict_only_older_prefixes, folder_keeps_pages_across_restarts_within_its_limit,
          least_recently_used_pages_and_prompt_ends_are_evicted_first, folder_that_other_users_can_write_to_is_rejected,
          folder_is_locked_by_one_process_and_follows_no_links, killed_store_serves_exactly_the_acknowledged_pages)
