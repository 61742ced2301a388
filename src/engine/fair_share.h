/* Who was served how much: the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
 *
 * A tenant's counter is what it was served, in weighted tokens, divided by its weight; the least served goes first. A tenant that
 * comes back after it had nothing to do is lifted to the least counter of those who have: idle time gives no credit. Places are
 * given to others only while nobody lives in them.
 */
#ifndef FKV_FAIR_SHARE_H
#define FKV_FAIR_SHARE_H

#include "../base/base.h"

typedef struct fkv_tenant {
    uint64_t name;
    double counter;
    double weight;
    uint32_t n_live; /* requests, waiting or running */
    uint64_t last;   /* turn of its last join or leave; of the free places the oldest is taken first */
} fkv_tenant;

typedef struct fkv_fair_share {
    fkv_tenant *tenants; /* [capacity] */
    uint32_t capacity;
    uint32_t n;
    uint64_t turn;
    double left_at; /* counter of the last tenant that had nothing more to do */
} fkv_fair_share;

/* A request of this tenant arrives. Its place: where `capacity` others live, one of theirs. */
uint32_t fkv_fair_share_join(fkv_fair_share *share, uint64_t name, double weight);
void fkv_fair_share_leave(fkv_fair_share *share, uint32_t place);
void fkv_fair_share_serve(fkv_fair_share *share, uint32_t place, double tokens);

#endif
