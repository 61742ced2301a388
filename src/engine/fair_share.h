/* Fair scheduling between tenants: the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI
 * 2024).
 *
 * A tenant's counter is the number of tokens computed for the tenant so far, divided by the tenant's weight. An output token
 * counts as output_weight tokens. The tenant with the smallest counter runs first. When an idle tenant becomes active, its
 * counter is raised to the smallest counter of the active tenants, so idle time earns no credit. A tenant slot is reused only
 * while its tenant has no requests.
 */
#ifndef FKV_FAIR_SHARE_H
#define FKV_FAIR_SHARE_H

#include "../base/base.h"

typedef struct fkv_tenant {
    uint64_t name;
    double counter;
    double weight;
    uint32_t n_live;    /* number of queued and running requests */
    uint64_t last_used; /* logical time at which n_live last changed; the free slot with the smallest value is reused first */
} fkv_tenant;

typedef struct fkv_fair_share {
    fkv_tenant *tenants; /* [capacity] */
    uint32_t capacity;
    uint32_t n;
    uint64_t turn;            /* logical clock, incremented whenever a request is added or removed */
    double last_idle_counter; /* counter of the tenant that most recently became idle */
} fkv_fair_share;

/* Adds a request of a tenant and returns the tenant's slot. If all slots belong to other active tenants, the tenant shares one of
 * them. */
uint32_t fkv_fair_share_join(fkv_fair_share *share, uint64_t name, double weight);
void fkv_fair_share_leave(fkv_fair_share *share, uint32_t slot);
void fkv_fair_share_serve(fkv_fair_share *share, uint32_t slot, double tokens);

#endif
