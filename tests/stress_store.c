/* Operations of the stress test on packed prefixes: the pages, open pages and snapshots of a prefix are packed, and later
 * unpacked into any cache of the run. Sequences that share an unpacked prefix are checked like all others. Damaged and misplaced
 * objects must be rejected and leave the cache unchanged.
 */
#include "stress_operations.h"

#include <flatkv/prefix_store.h>

#include <stdlib.h>
#include <string.h>

typedef fkv_status (*pack_fn)(const fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                              const fkv_page_key *key, uint8_t *packed, uint64_t *n_bytes);
typedef fkv_status (*unpack_fn)(fkv_cache *cache, uint64_t tenant, const uint32_t *tokens, uint32_t n_pages,
                                const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes);

static const pack_fn PACK[STRESS_N_PARTS] = {fkv_prefix_pack, fkv_prefix_pack_open, fkv_prefix_pack_state};
static const unpack_fn UNPACK[STRESS_N_PARTS] = {fkv_prefix_unpack, fkv_prefix_unpack_open, fkv_prefix_unpack_state};

static void forget_prefix(stress_prefix *p) {
    for (uint32_t part = 0; part < STRESS_N_PARTS; part++)
        for (uint32_t i = 0; i < STRESS_STORED_PAGES; i++) free(p->objects[part][i].bytes);
    free(p->ids);
    *p = (stress_prefix){0};
}

void stress_prefixes_forget(stress_run *l) {
    for (uint32_t i = 0; i < STRESS_PREFIXES; i++) forget_prefix(&l->prefixes[i]);
}

/* Packs one part of page i. Returns false if the prefix tree does not have this part. */
static bool pack_object(const stress_cache *c, stress_prefix *p, uint32_t part, uint32_t i) {
    stress_object *object = &p->objects[part][i];
    object->bytes = malloc(fkv_prefix_packed_bytes(c->cache));
    if (object->bytes == NULL) stress_fail("out of memory allocating a packed page");
    const fkv_status status = PACK[part](c->cache, p->tenant, p->ids, i + 1, &object->key, object->bytes, &object->n);
    if (status == FKV_OK) return true;
    stress_expect(status, FKV_GONE, "pack");
    free(object->bytes);
    object->bytes = NULL;
    return false;
}

void stress_store_prefix(stress_run *l, stress_cache *c) {
    const stress_seq *seq = &c->seqs[stress_below(&l->random, c->n_seqs)];
    const uint32_t page = c->config.base.page_tokens;
    uint32_t n_pages = seq->n / page < STRESS_STORED_PAGES ? seq->n / page : STRESS_STORED_PAGES;
    if (seq->origin != seq->tenant || n_pages == 0) return;
    for (uint32_t i = 0; i < seq->n; i++) l->ids[i] = seq->tokens[i]->id;
    stress_expect(fkv_prefix_insert(c->cache, seq->number, l->ids, seq->n), FKV_OK, "insert of a prefix to store");
    stress_tree_offer(c, seq, seq->n);

    stress_prefix *p = &l->prefixes[stress_below(&l->random, STRESS_PREFIXES)];
    forget_prefix(p);
    p->tenant = seq->tenant;
    p->ids = malloc((size_t)n_pages * page * sizeof *p->ids);
    if (p->ids == NULL) stress_fail("out of memory allocating the tokens of a prefix");
    memcpy(p->ids, l->ids, (size_t)n_pages * page * sizeof *p->ids);
    fkv_page_key above;
    stress_expect(fkv_prefix_root(c->cache, &p->tenant, sizeof p->tenant, &above), FKV_OK, "root key");
    for (uint32_t i = 0; i < n_pages; i++) {
        stress_object *object = &p->objects[STRESS_PAGE][i];
        stress_expect(fkv_prefix_key(&above, p->ids + (size_t)i * page, page, &object->key), FKV_OK, "key");
        stress_expect(fkv_prefix_open_key(&object->key, &p->objects[STRESS_OPEN_PAGE][i].key), FKV_OK, "open key");
        stress_expect(fkv_prefix_state_key(&object->key, &p->objects[STRESS_STATE][i].key), FKV_OK, "state key");
        above = object->key;
        if (!pack_object(c, p, STRESS_PAGE, i)) break;
        p->n_pages = i + 1;
        const bool is_open = pack_object(c, p, STRESS_OPEN_PAGE, i);
        const bool has_state = pack_object(c, p, STRESS_STATE, i);
        if (is_open && (i == 0 || !stress_has_sealed_layer(&c->config)))
            stress_fail("packed the open form of a page that has no open form");
        if (has_state && c->config.n_states == 0) stress_fail("packed a snapshot, but the cache has no state layers");
    }
    l->counts->stored++;
}

/* Unpacks one part of page i. Returns false if the cache has no room for it or lacks the preceding pages. */
static bool unpack_object(stress_cache *c, const stress_prefix *p, uint32_t part, uint32_t i) {
    const stress_object *object = &p->objects[part][i];
    const fkv_status status = UNPACK[part](c->cache, p->tenant, p->ids, i + 1, &object->key, object->bytes, object->n);
    if (status != FKV_OK && status != FKV_POOL_FULL && status != FKV_GONE)
        stress_fail("unpacking part %u of page %u returned %s (%s)", part, i, fkv_status_name(status), fkv_message());
    return status == FKV_OK;
}

/* Unpacks an object in which a bit is flipped, or unpacks an object as the wrong part. The call must be rejected. */
static void unpack_wrong(stress_run *l, stress_cache *c, stress_prefix *p) {
    const uint32_t i = stress_below(&l->random, p->n_pages);
    uint32_t part = stress_below(&l->random, STRESS_N_PARTS);
    if (p->objects[part][i].bytes == NULL) part = STRESS_PAGE;
    const stress_object *object = &p->objects[part][i];
    const uint32_t read_as = stress_chance(&l->random, 30) ? (part + 1) % STRESS_N_PARTS : part;
    const size_t at = stress_below(&l->random, (uint32_t)object->n);
    const uint8_t bit = read_as == part ? (uint8_t)(1u << stress_below(&l->random, 8)) : 0;
    object->bytes[at] ^= bit;
    const fkv_status status = UNPACK[read_as](c->cache, p->tenant, p->ids, i + 1, &object->key, object->bytes, object->n);
    object->bytes[at] ^= bit;
    if (status != FKV_FILE_DAMAGED && status != FKV_FILE_FOREIGN)
        stress_fail("unpacking a damaged or mismatched object returned %s (%s)", fkv_status_name(status), fkv_message());
    l->counts->wrong_objects++;
}

void stress_restore_prefix(stress_run *l, stress_cache *c) {
    stress_prefix *p = &l->prefixes[stress_below(&l->random, STRESS_PREFIXES)];
    const uint32_t page = c->config.base.page_tokens;
    const uint32_t most = p->n_pages < c->config.base.max_tokens / page ? p->n_pages : c->config.base.max_tokens / page;
    if (most == 0) return;
    if (most == p->n_pages && stress_chance(&l->random, 10)) {
        unpack_wrong(l, c, p);
        return;
    }
    const uint32_t end = stress_between(&l->random, 1, most);
    uint32_t n = 0;
    while (n < end && unpack_object(c, p, STRESS_PAGE, n)) n++;
    bool has_state = false;
    if (n == end) {
        const uint32_t first = stress_chance(&l->random, 20) ? 0 : end - end % STRESS_SPAN;
        for (uint32_t i = first; i < end; i++)
            if (p->objects[STRESS_OPEN_PAGE][i].bytes != NULL) (void)unpack_object(c, p, STRESS_OPEN_PAGE, i);
        if (p->objects[STRESS_STATE][end - 1].bytes != NULL) has_state = unpack_object(c, p, STRESS_STATE, end - 1);
    }
    stress_tree_restored(c, p->tenant, p->ids, n * page, has_state);
    uint32_t n_shared = 0;
    const fkv_seq_config config = {.max_tokens = end * page, .tenant = p->tenant, .prompt = p->ids, .n_prompt = end * page};
    stress_expect(fkv_prefix_match(c->cache, &config, &n_shared), FKV_OK, "match");
    const bool is_whole = n_shared == end * page;
    l->counts->restored++;
    l->counts->restored_open += is_whole && end > 1 && end % STRESS_SPAN != 0 && stress_has_sealed_layer(&c->config);
    l->counts->restored_states += is_whole && has_state;
}
