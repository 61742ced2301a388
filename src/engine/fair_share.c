/* See fair_share.h. */
#include "fair_share.h"

static uint32_t tenant_slot_of(fkv_fair_share *share, uint64_t name) {
    uint32_t free_slot = UINT32_MAX;
    for (uint32_t i = 0; i < share->n; i++) {
        const fkv_tenant *t = &share->tenants[i];
        if (t->name == name) return i;
        if (t->n_live == 0 && (free_slot == UINT32_MAX || t->last_used < share->tenants[free_slot].last_used)) free_slot = i;
    }
    if (share->n < share->capacity) free_slot = share->n++;
    if (free_slot == UINT32_MAX)
        return share->n > 0 ? (uint32_t)(name % share->n) : 0; /* no slot is free, so two tenants share a slot */
    share->tenants[free_slot] = (fkv_tenant){.name = name};
    return free_slot;
}

/* Returns the smallest counter of all active tenants. If no tenant is active, returns the counter of the tenant that most
 * recently became idle. */
static double min_active_counter(const fkv_fair_share *share) {
    double floor = share->last_idle_counter;
    bool found = false;
    for (uint32_t i = 0; i < share->n; i++) {
        const fkv_tenant *t = &share->tenants[i];
        if (t->n_live == 0 || (found && t->counter >= floor)) continue;
        floor = t->counter;
        found = true;
    }
    return floor;
}

uint32_t fkv_fair_share_join(fkv_fair_share *share, uint64_t name, double weight) {
    double floor = min_active_counter(share);
    uint32_t slot = tenant_slot_of(share, name);
    fkv_tenant *t = &share->tenants[slot];
    t->weight = weight > 0.0 ? weight : 1.0;
    if (t->n_live == 0 && t->counter < floor) t->counter = floor;
    t->n_live++;
    t->last_used = ++share->turn;
    return slot;
}

void fkv_fair_share_leave(fkv_fair_share *share, uint32_t slot) {
    fkv_tenant *t = &share->tenants[slot];
    FKV_ASSERT(t->n_live > 0);
    t->n_live--;
    t->last_used = ++share->turn;
    if (t->n_live == 0) share->last_idle_counter = t->counter;
}

void fkv_fair_share_serve(fkv_fair_share *share, uint32_t slot, double tokens) {
    share->tenants[slot].counter += tokens / share->tenants[slot].weight;
}
