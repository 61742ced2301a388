/* Which pages go to a store of prefixes, and which come back before a request is admitted. On the engine's thread.
 *
 * Out: pages of a prompt and of its first answer, once the prefix tree has them, if the store does not. Where no buffer is free
 * it is tried again after the next step, while the request runs.
 *
 * In: one request at a time, the next in line whose pages the store has behind those in memory. It waits in the line meanwhile,
 * others pass. Reading must be predicted to be faster than computing, by the time that pages took so far; and a request that
 * waited as long as computing would have taken, for its pages or for its turn, goes on with what has come. Before the first step
 * nothing is known of computing: then reading goes first, for START_SECONDS at most. A page that is not what it should be is
 * removed from the store and computed.
 */
#ifndef FKV_PREFIX_TIER_H
#define FKV_PREFIX_TIER_H

#include "prefix_traffic.h"
#include "request.h"
#include "step_cost.h"

typedef struct fkv_prefix_tier {
    fkv_prefix_store store;
    fkv_prefix_traffic *traffic; /* NULL: there is no store */
    fkv_cache *cache;
    uint32_t page_tokens;
    double (*seconds)(void *user);
    void *seconds_user;
    fkv_job *job;   /* whose pages come in, or NULL */
    uint32_t first; /* page that was asked for */
    uint32_t asked; /* pages [0, asked) are here or asked for */
    uint32_t got;   /* pages [0, got) are in the prefix tree */
    uint32_t until; /* the store has pages [.., until) */
    double started_at;
    double limit_s; /* what computing would take */
    double page_s;  /* to bring in one page; 0: not known yet */
    bool has_bad;
    fkv_page_key bad; /* to be removed */
    fkv_store_stats stats;
} fkv_prefix_tier;

/* Keys of the pages of the prompt. tenant_name NULL: its number. Any thread; the cache is only asked for constants. */
fkv_status fkv_tier_name(const fkv_cache *cache, uint32_t page_tokens, const char *tenant_name, fkv_job *job);

/* Pages are on their way in: there will be something to pump. */
bool fkv_tier_busy(const fkv_prefix_tier *tier);

/* Takes in what has arrived and asks for more. */
void fkv_tier_pump(fkv_prefix_tier *tier);

/* Whether the job should not be admitted yet, because pages of it are coming in or should be. n_known of it is right. */
bool fkv_tier_holds(fkv_prefix_tier *tier, fkv_job *job, const fkv_step_cost *cost);

/* Sends pages that the prefix tree has and the store lacks. */
void fkv_tier_send(fkv_prefix_tier *tier, fkv_job *job);

/* The job ends. */
void fkv_tier_leave(fkv_prefix_tier *tier, fkv_job *job);

#endif
