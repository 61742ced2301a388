/* See prefix_traffic.h. */
#include "prefix_traffic.h"

#include "../base/carve.h"
#include "../base/memory.h"

#include <pthread.h>
#include <time.h>

enum { LANE_BYTES = 16 << 20, LEAST_SLOTS = 2, MOST_SLOTS = 64 }; /* of buffers in each lane, if two pages fit */

typedef struct slot {
    fkv_page_key key;
    uint8_t *packed;
    uint64_t n_bytes;
    fkv_status status;
    bool remove;
    double seconds;
} slot;

typedef struct lane {
    fkv_prefix_traffic *traffic;
    pthread_mutex_t lock;
    pthread_cond_t handed_over;
    pthread_t thread;
    bool started;
    bool closing;
    bool working; /* on the slot `done` */
    uint32_t n_slots;
    slot *slots;
    uint64_t handed;
    uint64_t done;
    uint64_t released;
} lane;

struct fkv_prefix_traffic {
    fkv_prefix_store store;
    uint64_t map_bytes;
    uint64_t packed_bytes;
    void (*wake)(void *user);
    void *wake_user;
    lane out;
    lane in;
    fkv_traffic_figures figures; /* under the lock of `out` */
};

static uint32_t slots_of(uint64_t packed_bytes) {
    uint64_t n = LANE_BYTES / (packed_bytes > 0 ? packed_bytes : 1);
    if (n < LEAST_SLOTS) return LEAST_SLOTS;
    return n < MOST_SLOTS ? (uint32_t)n : MOST_SLOTS;
}

static void layout_lane(fkv_carve *carve, uint64_t packed_bytes, lane *l) {
    uint32_t n = slots_of(packed_bytes);
    slot *slots = FKV_CARVE(carve, n, slot);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *packed = fkv_carve_take(carve, 1, packed_bytes);
        if (slots != NULL) slots[i].packed = packed;
    }
    if (l != NULL) *l = (lane){.n_slots = n, .slots = slots};
}

static fkv_prefix_traffic *layout(fkv_carve *carve, uint64_t packed_bytes) {
    fkv_prefix_traffic *t = FKV_CARVE(carve, 1, fkv_prefix_traffic);
    layout_lane(carve, packed_bytes, t != NULL ? &t->out : NULL);
    layout_lane(carve, packed_bytes, t != NULL ? &t->in : NULL);
    return t;
}

uint64_t fkv_traffic_bytes(uint64_t packed_bytes) {
    fkv_carve counting = {0};
    (void)layout(&counting, packed_bytes);
    return counting.overflow ? UINT64_MAX : fkv_map_rounded(counting.used);
}

/* ---- the threads ---- */

static double now_seconds(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The next slot to work on, NULL: it is time to end. The lock is held. */
static slot *next_slot(lane *l, bool finish) {
    while (l->done == l->handed && !l->closing) (void)pthread_cond_wait(&l->handed_over, &l->lock);
    l->working = l->done < l->handed && (!l->closing || finish);
    if (!l->working) return NULL;
    return &l->slots[l->done % l->n_slots];
}

static void *write_pages(void *user) {
    lane *l = user;
    fkv_prefix_traffic *t = l->traffic;
    (void)pthread_mutex_lock(&l->lock);
    for (slot *s = next_slot(l, true); s != NULL; s = next_slot(l, true)) {
        (void)pthread_mutex_unlock(&l->lock);
        double start = now_seconds();
        fkv_status status = t->store.write(t->store.self, &s->key, s->packed, s->n_bytes);
        double seconds = now_seconds() - start;
        (void)pthread_mutex_lock(&l->lock);
        *(status == FKV_OK ? &t->figures.written : &t->figures.failed) += 1;
        t->figures.write_seconds += seconds;
        l->done++;
        l->released++;
    }
    (void)pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void *read_pages(void *user) {
    lane *l = user;
    fkv_prefix_traffic *t = l->traffic;
    (void)pthread_mutex_lock(&l->lock);
    for (slot *s = next_slot(l, false); s != NULL; s = next_slot(l, false)) {
        (void)pthread_mutex_unlock(&l->lock);
        double start = now_seconds();
        s->status = FKV_OK;
        s->n_bytes = 0;
        if (s->remove)
            t->store.remove(t->store.self, &s->key);
        else
            s->status = t->store.read(t->store.self, &s->key, s->packed, t->packed_bytes, &s->n_bytes);
        s->seconds = now_seconds() - start;
        (void)pthread_mutex_lock(&l->lock);
        l->done++;
        l->working = false;
        (void)pthread_mutex_unlock(&l->lock);
        t->wake(t->wake_user);
        (void)pthread_mutex_lock(&l->lock);
    }
    (void)pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void lane_start(lane *l, fkv_prefix_traffic *t, void *(*work)(void *)) {
    l->traffic = t;
    (void)pthread_mutex_init(&l->lock, NULL);
    (void)pthread_cond_init(&l->handed_over, NULL);
    l->started = pthread_create(&l->thread, NULL, work, l) == 0;
}

static void lane_close(lane *l) {
    (void)pthread_mutex_lock(&l->lock);
    l->closing = true;
    (void)pthread_cond_signal(&l->handed_over);
    (void)pthread_mutex_unlock(&l->lock);
    if (l->started) (void)pthread_join(l->thread, NULL);
    (void)pthread_cond_destroy(&l->handed_over);
    (void)pthread_mutex_destroy(&l->lock);
}

fkv_status fkv_traffic_open(const fkv_prefix_store *store, uint64_t packed_bytes, void (*wake)(void *user), void *user,
                            fkv_prefix_traffic **traffic) {
    void *map = NULL;
    uint64_t bytes = fkv_traffic_bytes(packed_bytes);
    FKV_TRY(fkv_map_open(bytes, true, &map));
    fkv_carve carve = {.base = map, .size = bytes};
    fkv_prefix_traffic *t = layout(&carve, packed_bytes);
    t->store = *store;
    t->map_bytes = bytes;
    t->packed_bytes = packed_bytes;
    t->wake = wake;
    t->wake_user = user;
    lane_start(&t->out, t, write_pages);
    lane_start(&t->in, t, read_pages);
    if (!t->out.started || !t->in.started) {
        fkv_traffic_close(t);
        return fkv_fail(FKV_NO_MEMORY, "the threads of the store of prefixes could not be started");
    }
    *traffic = t;
    return FKV_OK;
}

void fkv_traffic_close(fkv_prefix_traffic *t) {
    if (t == NULL) return;
    lane_close(&t->in);
    lane_close(&t->out);
    fkv_map_close(t, t->map_bytes);
}

/* ---- the engine's side ---- */

/* The slot that is filled next, NULL: none is free. Only the engine's thread hands over, so it stays free after the lock. */
static slot *free_slot(lane *l) {
    (void)pthread_mutex_lock(&l->lock);
    bool full = l->handed - l->released == l->n_slots;
    (void)pthread_mutex_unlock(&l->lock);
    return full ? NULL : &l->slots[l->handed % l->n_slots];
}

static void hand_over(lane *l) {
    (void)pthread_mutex_lock(&l->lock);
    l->handed++;
    (void)pthread_cond_signal(&l->handed_over);
    (void)pthread_mutex_unlock(&l->lock);
}

uint8_t *fkv_traffic_buffer(fkv_prefix_traffic *t) {
    slot *s = free_slot(&t->out);
    return s != NULL ? s->packed : NULL;
}

void fkv_traffic_send(fkv_prefix_traffic *t, const fkv_page_key *key, uint64_t n_bytes) {
    slot *s = &t->out.slots[t->out.handed % t->out.n_slots];
    s->key = *key;
    s->n_bytes = n_bytes;
    hand_over(&t->out);
}

static bool ask(fkv_prefix_traffic *t, const fkv_page_key *key, bool remove) {
    slot *s = free_slot(&t->in);
    if (s == NULL) return false;
    s->key = *key;
    s->remove = remove;
    hand_over(&t->in);
    return true;
}

bool fkv_traffic_ask(fkv_prefix_traffic *t, const fkv_page_key *key) { return ask(t, key, false); }
bool fkv_traffic_remove(fkv_prefix_traffic *t, const fkv_page_key *key) { return ask(t, key, true); }

void fkv_traffic_forget(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    t->in.handed = t->in.done + (t->in.working ? 1 : 0);
    (void)pthread_mutex_unlock(&t->in.lock);
}

bool fkv_traffic_arrived(fkv_prefix_traffic *t, fkv_arrival *arrival) {
    lane *l = &t->in;
    (void)pthread_mutex_lock(&l->lock);
    bool here = l->released < l->done;
    (void)pthread_mutex_unlock(&l->lock);
    if (!here) return false;
    const slot *s = &l->slots[l->released % l->n_slots];
    *arrival = (fkv_arrival){
        .packed = s->packed, .n_bytes = s->n_bytes, .status = s->status, .removed = s->remove, .seconds = s->seconds};
    return true;
}

void fkv_traffic_release(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    t->in.released++;
    (void)pthread_mutex_unlock(&t->in.lock);
}

uint32_t fkv_traffic_asked(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    uint32_t n = (uint32_t)(t->in.handed - t->in.released);
    (void)pthread_mutex_unlock(&t->in.lock);
    return n;
}

void fkv_traffic_figures_now(fkv_prefix_traffic *t, fkv_traffic_figures *figures) {
    (void)pthread_mutex_lock(&t->out.lock);
    *figures = t->figures;
    (void)pthread_mutex_unlock(&t->out.lock);
}
