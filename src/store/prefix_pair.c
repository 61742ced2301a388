/* A prefix store that combines two stores: a near one, for example a folder on this machine, and a far one, which several
 * machines share. Pages are looked up and read in the near store first. A page that only one of the stores has is written to the
 * other one at the next opportunity. For example, a page that was read from the far store is then written to the near store, and
 * a page that the far store has lost is written to it again.
 *
 * The pair has no state except the two stores, whose functions it calls directly. All invariants are those of the stores.
 */
#include "../base/base.h"
#include "../base/memory.h"
#include "../base/store_queries.h"

typedef struct store_pair {
    uint64_t map_bytes;
    fkv_prefix_store near;
    fkv_prefix_store far;
} store_pair;

static bool is_in(const fkv_prefix_store *store, const fkv_page_key *key) { return store->contains(store->self, key); }

/* ---- lookups ---- */

static bool pair_contains(void *self, const fkv_page_key *key) {
    const store_pair *p = self;
    return is_in(&p->near, key) || is_in(&p->far, key);
}

static bool pair_pending(void *self, const fkv_page_key *key) {
    const store_pair *p = self;
    return !is_in(&p->near, key) && (fkv_store_pending(&p->near, key) || fkv_store_pending(&p->far, key));
}

/* A page that the near store has is written to the far store only if the far store is known not to have it. */
static bool pair_wants(void *self, const fkv_page_key *key) {
    const store_pair *p = self;
    return fkv_store_wants(&p->near, key) || (fkv_store_wants(&p->far, key) && !fkv_store_pending(&p->far, key));
}

static void pair_expect(void *self, const fkv_page_key *keys, uint32_t n) {
    const store_pair *p = self;
    if (p->near.expect != NULL) p->near.expect(p->near.self, keys, n);
    if (p->far.expect != NULL) p->far.expect(p->far.self, keys, n);
}

static void pair_touch(void *self, const fkv_page_key *keys, uint32_t n) {
    const store_pair *p = self;
    p->near.touch(p->near.self, keys, n);
    p->far.touch(p->far.self, keys, n);
}

/* ---- transfers ---- */

static fkv_status pair_read(void *self, const fkv_page_key *key, uint8_t *packed, uint64_t capacity, uint64_t *n_bytes) {
    const store_pair *p = self;
    fkv_status status = FKV_GONE;
    if (is_in(&p->near, key)) status = p->near.read(p->near.self, key, packed, capacity, n_bytes);
    if (status == FKV_FILE_DAMAGED) p->near.remove(p->near.self, key);
    return status == FKV_OK ? status : p->far.read(p->far.self, key, packed, capacity, n_bytes);
}

/* A run of consecutive pages that the near store does not have. The run ends before the next page that the near store has. */
typedef struct far_pages {
    const store_pair *pair;
    const fkv_page_reads *reads;
    fkv_page_read *first; /* NULL after next_far() has returned it */
    fkv_page_read *held;  /* page after the end of the run, which the near store has; NULL if the run has not ended */
} far_pages;

static fkv_page_read *next_far(void *user) {
    far_pages *f = user;
    fkv_page_read *page = f->first;
    f->first = NULL;
    if (page != NULL) return page;
    if (f->held == NULL) page = f->reads->next(f->reads->user);
    if (page == NULL || !is_in(&f->pair->near, &page->key)) return page;
    f->held = page;
    return NULL;
}

static void done_far(void *user) {
    const far_pages *f = user;
    f->reads->done(f->reads->user);
}

static void pair_read_pages(void *self, const fkv_page_reads *reads) {
    const store_pair *p = self;
    fkv_page_read *page = reads->next(reads->user);
    while (page != NULL) {
        if (!is_in(&p->near, &page->key) && p->far.read_pages != NULL) {
            far_pages f = {.pair = p, .reads = reads, .first = page};
            p->far.read_pages(p->far.self, &(fkv_page_reads){.user = &f, .next = next_far, .done = done_far});
            page = f.held;
            if (page == NULL) return;
        }
        page->n_bytes = 0;
        page->status = pair_read(self, &page->key, page->packed, page->capacity, &page->n_bytes);
        reads->done(reads->user);
        page = reads->next(reads->user);
    }
}

/* Succeeds if at least one of the stores has the page after the call. */
static fkv_status pair_write(void *self, const fkv_page_key *key, const uint8_t *packed, uint64_t n_bytes) {
    const store_pair *p = self;
    fkv_status near = FKV_OK;
    fkv_status far = FKV_OK;
    if (fkv_store_wants(&p->near, key)) near = p->near.write(p->near.self, key, packed, n_bytes);
    if (fkv_store_wants(&p->far, key)) far = p->far.write(p->far.self, key, packed, n_bytes);
    return near == FKV_OK ? near : far == FKV_OK && is_in(&p->far, key) ? far : near;
}

static void pair_remove(void *self, const fkv_page_key *key) {
    const store_pair *p = self;
    p->near.remove(p->near.self, key);
    p->far.remove(p->far.self, key);
}

/* ---- open and close ---- */

/* Reports the sizes of the near store only, because the far store may hold the same pages. */
static void pair_stats(void *self, fkv_prefix_store_stats *stats) {
    const store_pair *p = self;
    fkv_prefix_store_stats far = {0};
    p->near.stats(p->near.self, stats);
    p->far.stats(p->far.self, &far);
    stats->memory += far.memory + p->map_bytes;
    stats->refused += far.refused;
    stats->n_unavailable += far.n_unavailable;
}

static void pair_close(void *self) {
    store_pair *p = self;
    p->near.close(p->near.self);
    p->far.close(p->far.self);
    fkv_map_close(p, p->map_bytes);
}

fkv_status fkv_prefix_pair_open(const fkv_prefix_store *near, const fkv_prefix_store *far, fkv_prefix_store *store) {
    FKV_REQUIRE(near != NULL && far != NULL && store != NULL, FKV_BAD_ARGUMENT,
                "fkv_prefix_pair_open: near, far or store is NULL");
    void *map = NULL;
    FKV_TRY(fkv_map_open(sizeof(store_pair), true, &map));
    store_pair *p = map;
    *p = (store_pair){.map_bytes = sizeof *p, .near = *near, .far = *far};
    *store = (fkv_prefix_store){.self = p,
                                .contains = pair_contains,
                                .pending = pair_pending,
                                .expect = pair_expect,
                                .wants = pair_wants,
                                .read = pair_read,
                                .read_pages = pair_read_pages,
                                .write = pair_write,
                                .remove = pair_remove,
                                .touch = pair_touch,
                                .stats = pair_stats,
                                .close = pair_close};
    return FKV_OK;
}
