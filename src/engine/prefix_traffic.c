/* See prefix_traffic.h. */
#include "prefix_traffic.h"

#include "../base/carve.h"
#include "../base/memory.h"

#include <pthread.h>
#include <time.h>

/* The buffers of a ring occupy up to RING_BYTES. A ring always has at least MIN_SLOTS and at most MAX_SLOTS buffers. */
enum { RING_BYTES = 16 << 20, MIN_SLOTS = 2, MAX_SLOTS = 64 };

typedef struct io_slot {
    fkv_page_read page;
    bool remove;
    double seconds;
} io_slot;

typedef struct io_ring {
    fkv_prefix_traffic *traffic;
    pthread_mutex_t lock;
    pthread_cond_t submitted;
    pthread_t thread;
    bool started;
    bool closing;
    uint32_t n_slots;
    io_slot *slots;
    uint64_t n_submitted;
    uint64_t n_started;
    uint64_t n_completed;
    uint64_t n_released;
    double waiting_since; /* time at which the store began to work on slot n_completed; used by the thread only */
} io_ring;

struct fkv_prefix_traffic {
    fkv_prefix_store store;
    uint64_t map_bytes;
    void (*wake)(void *user);
    void *wake_user;
    io_ring out;
    io_ring in;
    fkv_traffic_stats stats; /* protected by the lock of the write ring (`out`) */
};

static uint32_t ring_slots(uint64_t packed_bytes) {
    uint64_t n = RING_BYTES / (packed_bytes > 0 ? packed_bytes : 1);
    if (n < MIN_SLOTS) return MIN_SLOTS;
    return n < MAX_SLOTS ? (uint32_t)n : MAX_SLOTS;
}

static void layout_ring(fkv_carve *carve, uint64_t packed_bytes, io_ring *ring) {
    uint32_t n = ring_slots(packed_bytes);
    io_slot *slots = FKV_CARVE(carve, n, io_slot);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *packed = fkv_carve_take(carve, 1, packed_bytes);
        if (slots != NULL) slots[i].page = (fkv_page_read){.packed = packed, .capacity = packed_bytes};
    }
    if (ring != NULL) *ring = (io_ring){.n_slots = n, .slots = slots};
}

static fkv_prefix_traffic *layout_traffic(fkv_carve *carve, uint64_t packed_bytes) {
    fkv_prefix_traffic *t = FKV_CARVE(carve, 1, fkv_prefix_traffic);
    layout_ring(carve, packed_bytes, t != NULL ? &t->out : NULL);
    layout_ring(carve, packed_bytes, t != NULL ? &t->in : NULL);
    return t;
}

uint64_t fkv_traffic_bytes(uint64_t packed_bytes) {
    fkv_carve counting = {0};
    (void)layout_traffic(&counting, packed_bytes);
    return counting.overflow ? UINT64_MAX : fkv_map_rounded(counting.used);
}

/* ---- I/O threads ---- */

static double io_seconds(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Waits for the next submitted slot, starts it and returns it. Returns NULL if the ring is closed. If `finish` is true, slots
 * that were submitted before the ring was closed are returned first. The caller must hold the lock. */
static io_slot *next_slot(io_ring *ring, bool finish) {
    while (ring->n_started == ring->n_submitted && !ring->closing) (void)pthread_cond_wait(&ring->submitted, &ring->lock);
    if (ring->n_started == ring->n_submitted || (ring->closing && !finish)) return NULL;
    return &ring->slots[ring->n_started++ % ring->n_slots];
}

static void *write_thread(void *user) {
    io_ring *ring = user;
    fkv_prefix_traffic *t = ring->traffic;
    (void)pthread_mutex_lock(&ring->lock);
    for (io_slot *s = next_slot(ring, true); s != NULL; s = next_slot(ring, true)) {
        (void)pthread_mutex_unlock(&ring->lock);
        double start = io_seconds();
        fkv_status status = t->store.write(t->store.self, &s->page.key, s->page.packed, s->page.n_bytes);
        double seconds = io_seconds() - start;
        (void)pthread_mutex_lock(&ring->lock);
        *(status == FKV_OK ? &t->stats.written : &t->stats.failed) += 1;
        t->stats.write_seconds += seconds;
        ring->n_completed++;
        ring->n_released++;
    }
    (void)pthread_mutex_unlock(&ring->lock);
    return NULL;
}

/* Completes the oldest started slot of the read ring. The time of the slot counts from the completion of the previous slot. */
static void complete_slot(void *user) {
    io_ring *ring = user;
    const double now = io_seconds();
    (void)pthread_mutex_lock(&ring->lock);
    ring->slots[ring->n_completed % ring->n_slots].seconds = now - ring->waiting_since;
    ring->n_completed++;
    (void)pthread_mutex_unlock(&ring->lock);
    ring->waiting_since = now;
    ring->traffic->wake(ring->traffic->wake_user);
}

/* Sequence of read requests that is passed to the store: the request that read_thread() has started, followed by the requests
 * that are submitted while the store is reading. */
typedef struct read_sequence {
    io_ring *ring;
    io_slot *first; /* NULL after next_read() has returned it */
} read_sequence;

static fkv_page_read *next_read(void *user) {
    read_sequence *sequence = user;
    io_ring *ring = sequence->ring;
    io_slot *s = sequence->first;
    sequence->first = NULL;
    if (s != NULL) return &s->page;
    (void)pthread_mutex_lock(&ring->lock);
    if (ring->n_started < ring->n_submitted && !ring->closing && !ring->slots[ring->n_started % ring->n_slots].remove)
        s = &ring->slots[ring->n_started++ % ring->n_slots];
    (void)pthread_mutex_unlock(&ring->lock);
    return s != NULL ? &s->page : NULL;
}

static void complete_read(void *user) {
    const read_sequence *sequence = user;
    complete_slot(sequence->ring);
}

static void *read_thread(void *user) {
    io_ring *ring = user;
    const fkv_prefix_store *store = &ring->traffic->store;
    (void)pthread_mutex_lock(&ring->lock);
    for (io_slot *s = next_slot(ring, false); s != NULL; s = next_slot(ring, false)) {
        (void)pthread_mutex_unlock(&ring->lock);
        ring->waiting_since = io_seconds();
        s->page.status = FKV_OK;
        s->page.n_bytes = 0;
        if (!s->remove && store->read_pages != NULL) {
            read_sequence sequence = {.ring = ring, .first = s};
            store->read_pages(store->self, &(fkv_page_reads){.user = &sequence, .next = next_read, .done = complete_read});
        } else {
            if (s->remove)
                store->remove(store->self, &s->page.key);
            else
                s->page.status = store->read(store->self, &s->page.key, s->page.packed, s->page.capacity, &s->page.n_bytes);
            complete_slot(ring);
        }
        (void)pthread_mutex_lock(&ring->lock);
    }
    (void)pthread_mutex_unlock(&ring->lock);
    return NULL;
}

static void ring_start(io_ring *ring, fkv_prefix_traffic *t, void *(*work)(void *)) {
    ring->traffic = t;
    (void)pthread_mutex_init(&ring->lock, NULL);
    (void)pthread_cond_init(&ring->submitted, NULL);
    ring->started = pthread_create(&ring->thread, NULL, work, ring) == 0;
}

static void ring_close(io_ring *ring) {
    (void)pthread_mutex_lock(&ring->lock);
    ring->closing = true;
    (void)pthread_cond_signal(&ring->submitted);
    (void)pthread_mutex_unlock(&ring->lock);
    if (ring->started) (void)pthread_join(ring->thread, NULL);
    (void)pthread_cond_destroy(&ring->submitted);
    (void)pthread_mutex_destroy(&ring->lock);
}

fkv_status fkv_traffic_open(const fkv_prefix_store *store, uint64_t packed_bytes, void (*wake)(void *user), void *user,
                            fkv_prefix_traffic **traffic) {
    void *map = NULL;
    uint64_t bytes = fkv_traffic_bytes(packed_bytes);
    FKV_TRY(fkv_map_open(bytes, true, &map));
    fkv_carve carve = {.base = map, .size = bytes};
    fkv_prefix_traffic *t = layout_traffic(&carve, packed_bytes);
    t->store = *store;
    t->map_bytes = bytes;
    t->wake = wake;
    t->wake_user = user;
    ring_start(&t->out, t, write_thread);
    ring_start(&t->in, t, read_thread);
    if (!t->out.started || !t->in.started) {
        fkv_traffic_close(t);
        return fkv_fail(FKV_NO_MEMORY, "cannot start the I/O threads of the prefix store");
    }
    *traffic = t;
    return FKV_OK;
}

void fkv_traffic_close(fkv_prefix_traffic *t) {
    if (t == NULL) return;
    ring_close(&t->in);
    ring_close(&t->out);
    fkv_map_close(t, t->map_bytes);
}

/* ---- engine thread ---- */

/* Returns the next slot to fill, or NULL if the ring is full. Only the engine thread submits slots, so the slot stays free after
 * the lock is released. */
static io_slot *free_slot(io_ring *ring) {
    (void)pthread_mutex_lock(&ring->lock);
    bool full = ring->n_submitted - ring->n_released == ring->n_slots;
    (void)pthread_mutex_unlock(&ring->lock);
    return full ? NULL : &ring->slots[ring->n_submitted % ring->n_slots];
}

static void submit_slot(io_ring *ring) {
    (void)pthread_mutex_lock(&ring->lock);
    ring->n_submitted++;
    (void)pthread_cond_signal(&ring->submitted);
    (void)pthread_mutex_unlock(&ring->lock);
}

uint8_t *fkv_traffic_buffer(fkv_prefix_traffic *t) {
    io_slot *s = free_slot(&t->out);
    return s != NULL ? s->page.packed : NULL;
}

void fkv_traffic_send(fkv_prefix_traffic *t, const fkv_page_key *key, uint64_t n_bytes) {
    io_slot *s = &t->out.slots[t->out.n_submitted % t->out.n_slots];
    s->page.key = *key;
    s->page.n_bytes = n_bytes;
    submit_slot(&t->out);
}

static bool submit_read(fkv_prefix_traffic *t, const fkv_page_key *key, bool remove) {
    io_slot *s = free_slot(&t->in);
    if (s == NULL) return false;
    s->page.key = *key;
    s->remove = remove;
    submit_slot(&t->in);
    return true;
}

bool fkv_traffic_request_page(fkv_prefix_traffic *t, const fkv_page_key *key) { return submit_read(t, key, false); }
bool fkv_traffic_request_removal(fkv_prefix_traffic *t, const fkv_page_key *key) { return submit_read(t, key, true); }

void fkv_traffic_cancel(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    t->in.n_submitted = t->in.n_started;
    (void)pthread_mutex_unlock(&t->in.lock);
}

bool fkv_traffic_next_arrival(fkv_prefix_traffic *t, fkv_arrival *arrival) {
    io_ring *ring = &t->in;
    (void)pthread_mutex_lock(&ring->lock);
    bool here = ring->n_released < ring->n_completed;
    (void)pthread_mutex_unlock(&ring->lock);
    if (!here) return false;
    const io_slot *s = &ring->slots[ring->n_released % ring->n_slots];
    *arrival = (fkv_arrival){.packed = s->page.packed,
                             .n_bytes = s->page.n_bytes,
                             .status = s->page.status,
                             .removed = s->remove,
                             .seconds = s->seconds};
    return true;
}

void fkv_traffic_release(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    t->in.n_released++;
    (void)pthread_mutex_unlock(&t->in.lock);
}

uint32_t fkv_traffic_pending(fkv_prefix_traffic *t) {
    (void)pthread_mutex_lock(&t->in.lock);
    uint32_t n = (uint32_t)(t->in.n_submitted - t->in.n_released);
    (void)pthread_mutex_unlock(&t->in.lock);
    return n;
}

void fkv_traffic_stats_now(fkv_prefix_traffic *t, fkv_traffic_stats *stats) {
    (void)pthread_mutex_lock(&t->out.lock);
    *stats = t->stats;
    (void)pthread_mutex_unlock(&t->out.lock);
}
