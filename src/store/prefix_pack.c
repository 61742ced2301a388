/* Packing and verifying single pages of the prefix tree. See prefix_pack.h. */
#include "prefix_pack.h"

#include "page_file_format.h"

enum { PACK_VERSION = 1, PACK_CRC_BYTES = 1 << 30 };

/* Like FKV_FILE_MAGIC, but with the letter P in place of the letter V. */
static const char PACK_MAGIC[] = "\x89"
                                 "FKP\r\n\x1a\n";

typedef struct pack_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint64_t total_bytes;
    uint32_t page_tokens;
    uint32_t logical; /* logical page number within the prompt */
    uint32_t groups;  /* bit g is set if the packed page includes group g */
    uint32_t crc32c;  /* checksum of all pages */
    uint8_t identity[FKV_SHA256_BYTES];
    uint8_t key[FKV_PAGE_KEY_BYTES];
    uint8_t zero[24];
    uint8_t sha256[FKV_SHA256_BYTES]; /* digest of the preceding header bytes and the tokens */
} pack_header;

_Static_assert(sizeof(pack_header) == 160 && offsetof(pack_header, sha256) == 128, "the header is 160 bytes");

fkv_status fkv_pack_identity_make(const fkv_file_identity *identity, fkv_pack_identity *out) {
    fkv_file_header header;
    fkv_file_layer layers[FKV_MAX_LAYERS];
    fkv_sha256 sha;
    fkv_file_identity_write(identity, &header, layers);
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, &header, sizeof header);
    fkv_sha256_add(&sha, layers, identity->n_layers * sizeof layers[0]);
    return fkv_sha256_close(&sha, out->digest);
}

fkv_status fkv_prefix_key(const fkv_page_key *above, const uint32_t *tokens, uint32_t page_tokens, fkv_page_key *key) {
    FKV_REQUIRE(above != NULL && tokens != NULL && key != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_key: argument \"above\", \"tokens\" or \"key\" is NULL");
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, above->bytes, sizeof above->bytes);
    fkv_sha256_add(&sha, tokens, (size_t)page_tokens * sizeof *tokens);
    return fkv_sha256_close(&sha, key->bytes);
}

/* Derives a key from the key of a page. label: [n_label] */
static fkv_status derive_key(const fkv_page_key *page, const char *label, size_t n_label, fkv_page_key *key) {
    FKV_REQUIRE(page != NULL && key != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_state_key or fkv_prefix_open_key: argument \"page\" or \"key\" is NULL");
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, page->bytes, sizeof page->bytes);
    fkv_sha256_add(&sha, label, n_label);
    return fkv_sha256_close(&sha, key->bytes);
}

fkv_status fkv_prefix_state_key(const fkv_page_key *page, fkv_page_key *key) {
    static const char label[] = "recurrent state";
    return derive_key(page, label, sizeof label, key);
}

fkv_status fkv_prefix_open_key(const fkv_page_key *page, fkv_page_key *key) {
    static const char label[] = "open page";
    return derive_key(page, label, sizeof label, key);
}

/* ---- layout ---- */

static uint64_t pages_offset(const fkv_slab *slab) { return sizeof(pack_header) + slab->page_tokens * sizeof(uint32_t); }

uint64_t fkv_pack_bytes(const fkv_slab *slab, uint32_t groups) {
    uint64_t bytes = pages_offset(slab);
    for (uint32_t g = 0; g < slab->n_groups; g++)
        if ((groups >> g & 1) != 0) bytes += slab->group_page_bytes[g];
    return bytes;
}

static uint32_t pages_crc(const uint8_t *bytes, uint64_t n) {
    uint32_t crc = 0;
    for (uint64_t from = 0; from < n; from += PACK_CRC_BYTES)
        crc = fkv_crc32c(crc, bytes + from, n - from < PACK_CRC_BYTES ? n - from : PACK_CRC_BYTES);
    return crc;
}

/* Returns the header, with crc32c and sha256 set to 0. */
static pack_header make_pack_header(const fkv_slab *slab, const fkv_pack_place *place, uint32_t groups) {
    pack_header h = {.version = PACK_VERSION,
                     .header_bytes = sizeof h,
                     .total_bytes = fkv_pack_bytes(slab, groups),
                     .page_tokens = slab->page_tokens,
                     .logical = place->logical,
                     .groups = groups};
    memcpy(h.magic, PACK_MAGIC, sizeof h.magic);
    memcpy(h.identity, place->identity->digest, sizeof h.identity);
    memcpy(h.key, place->key->bytes, sizeof h.key);
    return h;
}

static fkv_status pack_digest(const pack_header *h, const void *tokens, uint8_t digest[FKV_SHA256_BYTES]) {
    fkv_sha256 sha;
    fkv_sha256_open(&sha);
    fkv_sha256_add(&sha, h, offsetof(pack_header, sha256));
    fkv_sha256_add(&sha, tokens, h->page_tokens * sizeof(uint32_t));
    return fkv_sha256_close(&sha, digest);
}

/* ---- packing and unpacking ---- */

fkv_status fkv_pack_write(const fkv_slab *slab, const fkv_pack_place *place, const uint32_t pages[FKV_MAX_GROUPS], uint8_t *out) {
    uint8_t *at = out + pages_offset(slab);
    uint32_t groups = 0;
    for (uint32_t g = 0; g < slab->n_groups; g++) {
        if (pages[g] == FKV_NO_PAGE) continue;
        groups |= UINT32_C(1) << g;
        for (uint32_t l = 0; l < slab->n_layers; l++) {
            if (slab->layers[l].group != g) continue;
            const uint64_t n = fkv_slab_run_bytes(slab, l);
            const uint32_t end = (place->logical + 1) * slab->page_tokens;
            FKV_TRY(fkv_slab_read(slab, l, pages[g], 0, n, at));
            fkv_slab_blank(slab, l, at, 0, n, fkv_slab_live_rows(slab, l, place->logical, end));
            at += n;
        }
    }
    pack_header h = make_pack_header(slab, place, groups);
    h.crc32c = pages_crc(out + pages_offset(slab), (uint64_t)(at - out) - pages_offset(slab));
    FKV_TRY(pack_digest(&h, place->tokens, h.sha256));
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, place->tokens, slab->page_tokens * sizeof(uint32_t));
    return FKV_OK;
}

fkv_status fkv_pack_check(const fkv_slab *slab, const fkv_pack_place *place, const uint8_t *packed, uint64_t n_bytes,
                          uint32_t *groups) {
    pack_header got;
    uint8_t digest[FKV_SHA256_BYTES];
    const uint8_t *tokens = packed + sizeof got;
    FKV_REQUIRE(n_bytes >= pages_offset(slab), FKV_FILE_DAMAGED, "damaged packed page: truncated to %llu bytes",
                (unsigned long long)n_bytes);
    memcpy(&got, packed, sizeof got);
    FKV_REQUIRE(memcmp(got.magic, PACK_MAGIC, sizeof got.magic) == 0 && got.version == PACK_VERSION, FKV_FILE_DAMAGED,
                "damaged packed page: not a packed page of version %d", PACK_VERSION);
    FKV_REQUIRE(got.page_tokens == slab->page_tokens, FKV_FILE_FOREIGN,
                "packed page mismatch: page_tokens is %u in the page but %u in this cache", got.page_tokens, slab->page_tokens);
    FKV_TRY(pack_digest(&got, tokens, digest));
    FKV_REQUIRE(memcmp(digest, got.sha256, sizeof digest) == 0, FKV_FILE_DAMAGED,
                "damaged packed page: SHA-256 mismatch in the header or tokens");
    FKV_REQUIRE(got.groups >> slab->n_groups == 0, FKV_FILE_FOREIGN,
                "packed page mismatch: the page contains layer groups that this cache does not have");
    pack_header expected = make_pack_header(slab, place, got.groups);
    FKV_REQUIRE(memcmp(&got, &expected, offsetof(pack_header, crc32c)) == 0 && expected.total_bytes == n_bytes, FKV_FILE_FOREIGN,
                "packed page mismatch: the size or the logical page number differs from that of the expected page");
    FKV_REQUIRE(memcmp(got.identity, expected.identity, sizeof got.identity) == 0, FKV_FILE_FOREIGN,
                "packed page mismatch: the page was saved with another model, codec, RoPE or arithmetic");
    FKV_REQUIRE(memcmp(got.key, expected.key, sizeof got.key) == 0 && memcmp(got.zero, expected.zero, sizeof got.zero) == 0 &&
                    memcmp(tokens, place->tokens, slab->page_tokens * sizeof(uint32_t)) == 0,
                FKV_FILE_FOREIGN, "packed page mismatch: the tokens or the tenant differ from those of the expected page");
    FKV_REQUIRE(pages_crc(packed + pages_offset(slab), n_bytes - pages_offset(slab)) == got.crc32c, FKV_FILE_DAMAGED,
                "damaged packed page: CRC32C mismatch");
    *groups = got.groups;
    return FKV_OK;
}

uint32_t fkv_pack_logical(const uint8_t *packed, uint64_t n_bytes) {
    pack_header header;
    if (n_bytes < sizeof header) return 0;
    memcpy(&header, packed, sizeof header);
    return header.logical;
}

fkv_status fkv_pack_read(const fkv_slab *slab, uint32_t groups, const uint8_t *packed, const uint32_t pages[FKV_MAX_GROUPS]) {
    const uint8_t *at = packed + pages_offset(slab);
    for (uint32_t g = 0; g < slab->n_groups; g++) {
        if ((groups >> g & 1) == 0) continue;
        for (uint32_t l = 0; l < slab->n_layers; l++) {
            if (slab->layers[l].group != g) continue;
            const uint64_t n = fkv_slab_run_bytes(slab, l);
            if (pages[g] != FKV_NO_PAGE) FKV_TRY(fkv_slab_write(slab, l, pages[g], 0, n, at));
            at += n;
        }
    }
    return FKV_OK;
}
