/* See fair_share.h. */
#include "fair_share.h"

static uint32_t place_of(fkv_fair_share *share, uint64_t name) {
    uint32_t oldest = UINT32_MAX;
    for (uint32_t i = 0; i < share->n; i++) {
        const fkv_tenant *t = &share->tenants[i];
        if (t->name == name) return i;
        if (t->n_live == 0 && (oldest == UINT32_MAX || t->last < share->tenants[oldest].last)) oldest = i;
    }
    if (share->n < share->capacity) oldest = share->n++;
    if (oldest == UINT32_MAX)
        return share->n > 0 ? (uint32_t)(name % share->n) : 0; /* everywhere somebody lives: they share a place */
    share->tenants[oldest] = (fkv_tenant){.name = name};
    return oldest;
}

/* What a tenant is lifted to: the least of those who have something to do, or where the last of them stood. */
static double least_counter(const fkv_fair_share *share) {
    double least = share->left_at;
    bool found = false;
    for (uint32_t i = 0; i < share->n; i++) {
        const fkv_tenant *t = &share->tenants[i];
        if (t->n_live == 0 || (found && t->counter >= least)) continue;
        least = t->counter;
        found = true;
    }
    return least;
}

uint32_t fkv_fair_share_join(fkv_fair_share *share, uint64_t name, double weight) {
    double least = least_counter(share);
    uint32_t place = place_of(share, name);
    fkv_tenant *t = &share->tenants[place];
    t->weight = weight > 0.0 ? weight : 1.0;
    if (t->n_live == 0 && t->counter < least) t->counter = least;
    t->n_live++;
    t->last = ++share->turn;
    return place;
}

void fkv_fair_share_leave(fkv_fair_share *share, uint32_t place) {
    fkv_tenant *t = &share->tenants[place];
    FKV_ASSERT(t->n_live > 0);
    t->n_live--;
    t->last = ++share->turn;
    if (t->n_live == 0) share->left_at = t->counter;
}

void fkv_fair_share_serve(fkv_fair_share *share, uint32_t place, double tokens) {
    share->tenants[place].counter += tokens / share->tenants[place].weight;
}
