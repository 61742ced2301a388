/* Fuzzes the readers of packed pages and open pages. Byte 0 selects the page, and whether the input is its open form. Byte 1
 * selects the parts of the input that are repaired (FIX_ flags), so that the fuzzer gets past checks whose expected values it
 * cannot guess. The other bytes are the packed page.
 *
 * For any input the readers must not crash and must return a listed status. The cache must stay consistent, a rejected page must
 * leave it unchanged, and attention must work on any accepted bytes.
 */
#include "../src/base/checksum.h"
#include "../tests/cache_fixture.h"

#include <flatkv/prefix_store.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FIX_HEADER = 1, /* repair all header fields except the checksums */
    FIX_TOKENS = 2,
    FIX_LENGTH = 4, /* repair the length in the header */
    FIX_CRC = 8,
    FIX_DIGEST = 16,
    FIX_REST = 32, /* append the bytes of the correct page that are missing in the input */
    PAGE = 16,
    N_PAGES = 6,
    N_MORE = 3, /* number of tokens that attend to an accepted page */
    MAX_BYTES = 8192,
    TENANT = 1,
    /* offsets from docs/page_format.md, section 7 */
    LENGTH_AT = 16,
    CRC_AT = 36,
    IDENTITY_AT = 40,
    DIGEST_AT = 128,
    TOKENS_AT = 160,
    PAGES_AT = TOKENS_AT + PAGE * 4
};

typedef struct packed_page {
    fkv_page_key key;
    uint8_t bytes[MAX_BYTES];
    uint64_t n;
} packed_page;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static cache_fixture w;
static uint32_t tokens[N_PAGES * PAGE + N_MORE];
static packed_page good[2][N_PAGES]; /* correct pages and open pages; page 0 has no separate open form */

static void must(bool is_good, const char *what) {
    if (is_good) return;
    (void)fprintf(stderr, "%s: %s\n", what, fkv_message());
    abort();
}

static void open_fixture(void) {
    const fkv_layer_config layer[] = {{.n_q_heads = 2,
                                       .n_kv_heads = 1,
                                       .head_dim = 32,
                                       .k = {.bits = 4, .kind = FKV_CODEC_SEALED},
                                       .v = {.bits = 4, .kind = FKV_CODEC_SEALED_V}}};
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layers = layer;
    config.page_tokens = PAGE;
    config.max_tokens = 2 * N_PAGES * PAGE;
    config.max_seqs = 2;
    config.max_step_tokens = 2 * PAGE;
    config.n_threads = 1;
    must(cache_fixture_open(&w, &config) == FKV_OK && fkv_prefix_packed_bytes(w.cache) <= MAX_BYTES, "open");
    cache_tokens(5, tokens, N_PAGES * PAGE + N_MORE);
    fkv_page_key above;
    fkv_seq seq = 0;
    must(fkv_prefix_root(w.cache, "fuzz", 4, &above) == FKV_OK, "root");
    must(fkv_seq_open(w.cache, &(fkv_seq_config){.max_tokens = N_PAGES * PAGE, .tenant = TENANT}, &seq, NULL) == FKV_OK, "seq");
    for (uint32_t i = 0; i < N_PAGES; i++) {
        packed_page *page = &good[0][i];
        packed_page *open = &good[1][i];
        must(fkv_prefix_key(&above, tokens + i * PAGE, PAGE, &page->key) == FKV_OK, "key");
        must(fkv_prefix_open_key(&page->key, &open->key) == FKV_OK, "key");
        cache_fixture_run(&w, seq, tokens, i * PAGE, (i + 1) * PAGE, PAGE, NULL);
        must(fkv_prefix_insert(w.cache, seq, tokens, (i + 1) * PAGE) == FKV_OK, "insert");
        must(fkv_prefix_pack(w.cache, TENANT, tokens, i + 1, &page->key, page->bytes, &page->n) == FKV_OK, "pack");
        if (i > 0)
            must(fkv_prefix_pack_open(w.cache, TENANT, tokens, i + 1, &open->key, open->bytes, &open->n) == FKV_OK, "pack");
        above = page->key;
    }
    must(fkv_seq_close(w.cache, seq) == FKV_OK, "close");
}

static size_t fix(const packed_page *page, uint8_t flags, uint8_t *bytes, size_t n) {
    if ((flags & FIX_REST) != 0 && n < page->n) {
        memcpy(bytes + n, page->bytes + n, page->n - n);
        n = page->n;
    }
    if (n < PAGES_AT) return n;
    if ((flags & FIX_HEADER) != 0) {
        memcpy(bytes, page->bytes, CRC_AT);
        memcpy(bytes + IDENTITY_AT, page->bytes + IDENTITY_AT, DIGEST_AT - IDENTITY_AT);
    }
    if ((flags & FIX_TOKENS) != 0) memcpy(bytes + TOKENS_AT, page->bytes + TOKENS_AT, PAGES_AT - TOKENS_AT);
    if ((flags & FIX_LENGTH) != 0) memcpy(bytes + LENGTH_AT, &(uint64_t){n}, sizeof(uint64_t));
    const uint32_t crc = fkv_crc32c(0, bytes + PAGES_AT, n - PAGES_AT);
    if ((flags & FIX_CRC) != 0) memcpy(bytes + CRC_AT, &crc, sizeof crc);
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, bytes, DIGEST_AT);
    fkv_sha256_add(&sha, bytes + TOKENS_AT, PAGES_AT - TOKENS_AT);
    if ((flags & FIX_DIGEST) != 0) must(fkv_sha256_close(&sha, bytes + DIGEST_AT) == FKV_OK, "digest");
    return n;
}

/* Inserts the correct pages before the fuzzed page, so that the fuzzed page can be inserted. */
static void insert_pages(uint32_t n) {
    must(fkv_prefix_clear(w.cache) == FKV_OK, "clear");
    for (uint32_t i = 0; i < n; i++)
        must(fkv_prefix_unpack(w.cache, TENANT, tokens, i + 1, &good[0][i].key, good[0][i].bytes, good[0][i].n) == FKV_OK,
             "page");
}

/* Runs a step that attends to the longest shared prefix of n_pages pages. */
static void attend(uint32_t n_pages) {
    const uint32_t n_prompt = n_pages * PAGE;
    const fkv_seq_config config = {.max_tokens = n_prompt + N_MORE, .tenant = TENANT, .prompt = tokens, .n_prompt = n_prompt};
    fkv_seq seq = 0;
    uint32_t n_shared = 0;
    must(fkv_seq_open(w.cache, &config, &seq, &n_shared) == FKV_OK, "open");
    cache_fixture_run(&w, seq, tokens, n_shared, n_prompt + N_MORE, PAGE, NULL);
    must(fkv_seq_close(w.cache, seq) == FKV_OK, "close");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t bytes[MAX_BYTES];
    if (w.cache == NULL) open_fixture();
    if (size < 2) return 0;
    const uint32_t i = data[0] % N_PAGES;
    const bool is_open = data[0] >= 128 && i > 0;
    const packed_page *page = &good[is_open][i];
    size_t n = size - 2 < MAX_BYTES ? size - 2 : MAX_BYTES;
    memcpy(bytes, data + 2, n);
    n = fix(page, data[1], bytes, n);

    insert_pages(is_open ? i + 1 : i);
    const fkv_stats before = cache_fixture_stats(&w);
    const fkv_status status =
        (is_open ? fkv_prefix_unpack_open : fkv_prefix_unpack)(w.cache, TENANT, tokens, i + 1, &page->key, bytes, n);
    must(status == FKV_OK || status == FKV_FILE_DAMAGED || status == FKV_FILE_FOREIGN, "unlisted status");
    must(status == FKV_OK || n != page->n || memcmp(bytes, page->bytes, n) != 0, "the correct page was rejected");
    must(fkv_cache_consistent(w.cache), "inconsistent");
    const fkv_stats after = cache_fixture_stats(&w);
    if (status != FKV_OK)
        must(memcmp(after.groups, before.groups, sizeof before.groups) == 0, "a rejected page changed the cache");
    if (status == FKV_OK) attend(i + 1);
    return 0;
}
