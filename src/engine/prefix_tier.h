/* Second tier of the prefix cache: decides which pages are written to a prefix store, and which pages are restored from it before
 * a request is admitted. Runs on the engine thread.
 *
 * Writes: full pages of the prompt and of the first answer are written to the store once the prefix tree holds them, unless the
 * store already has them. If no buffer is free, or if the store does not know yet whether it has the page, the write is retried
 * after the next step, as long as the request runs.
 *
 * In a cache with sealed layers or state layers, a prefix has additional parts (prefix_parts.h). They are written for prefixes
 * that end where later prompts are likely to diverge (fkv_job.ends): where the prompt diverges from earlier prompts, at the end
 * of the prompt, at the end of the answer and at snapshots of the prompt. Pages are restored only up to the end of a prefix whose
 * additional parts are in the store, and these parts are restored last. A restore therefore uses at most three open pages in
 * addition to the first page of the prompt, for which the plan of the cache has room.
 *
 * Restores: pages are restored for one request at a time, namely the first request in scheduling order whose next pages are in
 * the store but not in memory. During the restore, the request stays queued, and other requests may overtake it. A restore starts
 * only if it is predicted to be faster than computing the pages, based on the measured read time per page. A request that has
 * waited longer than the predicted compute time continues with the pages restored so far. Before the first step, the compute time
 * cannot be predicted, so a request waits up to MAX_FIRST_WAIT_S for its restore. A page that fails verification is removed from
 * the store together with the later pages of the prompt, because one damaged page suggests that others are damaged, too. The
 * request computes the removed pages, and they are written to the store again.
 */
#ifndef FKV_PREFIX_TIER_H
#define FKV_PREFIX_TIER_H

#include "prefix_parts.h"
#include "prefix_traffic.h"
#include "request.h"
#include "step_cost.h"

typedef struct fkv_prefix_tier {
    fkv_prefix_store store;
    fkv_prefix_traffic *traffic; /* NULL if there is no prefix store */
    fkv_cache *cache;
    uint32_t page_tokens;
    fkv_part_kinds kinds; /* additional parts of prefixes in this cache */
    uint32_t first_group; /* first layer group that holds keys and values instead of recurrent states */
    double (*seconds)(void *user);
    void *seconds_user;
    fkv_job *job;         /* job whose pages are being restored; NULL if there is none */
    uint32_t first_page;  /* first page to restore */
    uint32_t end_page;    /* end of the page range to restore; the store holds pages [first_page, end_page). The additional parts
                             of this prefix have the numbers end_page, end_page + 1, ... */
    uint32_t n_requested; /* pages and parts [0, n_requested) are in memory or have been requested */
    uint32_t n_restored;  /* pages and parts [0, n_restored) are in the prefix tree */
    double started_at;
    double limit_s;      /* maximum duration of the restore, in seconds: the predicted time to compute the pages instead */
    double first_page_s; /* moving average of the time to restore the first page, including the latency of the store, in seconds;
                            0 before the first measurement */
    double page_s;       /* moving average of the time to restore each further page, in seconds; 0 before the first measurement */
    bool removing; /* true after a page failed verification; the pages and parts from n_removed on must then be removed from the
                      store */
    uint32_t n_removed;  /* number of the next page or part to remove; valid if `removing` is true */
    double asking_until; /* until this time, a job counts as waiting for the store to report which pages it has */
    fkv_store_stats stats;
} fkv_prefix_tier;

/* Computes the page keys of the job's prompt. If tenant_name is NULL, the tenant number identifies the tenant. May be called from
 * any thread, because it reads only constants of the cache. */
fkv_status fkv_tier_compute_keys(const fkv_cache *cache, uint32_t page_tokens, const char *tenant_name, fkv_job *job);

/* Announces the keys of the job's prompt pages, snapshots and last open pages to the store, which can then look them up in
 * advance. May be called from any thread. */
void fkv_tier_announce(const fkv_prefix_tier *tier, const fkv_job *job);

/* Returns true if reads or removals are in progress. As long as this is true, fkv_tier_poll() must be called again. */
bool fkv_tier_busy(const fkv_prefix_tier *tier);

/* Returns true if a job is waiting for the store to report which pages it has. fkv_tier_delays() must then be called again
 * soon. */
bool fkv_tier_asks(const fkv_prefix_tier *tier);

/* Inserts pages that have arrived into the prefix tree and requests the next pages. */
void fkv_tier_poll(fkv_prefix_tier *tier);

/* Returns true if the job must not be admitted yet because its pages are being restored or will be restored. job->n_matched must
 * be up to date. */
bool fkv_tier_delays(fkv_prefix_tier *tier, fkv_job *job, const fkv_step_cost *cost);

/* Records that later prompts are likely to share the first n_pages pages of the job, so that fkv_tier_send() also writes the
 * additional parts of this prefix. */
void fkv_tier_note_end(const fkv_prefix_tier *tier, fkv_job *job, uint32_t n_pages);

/* Writes pages and parts of the job that are in the prefix tree but not in the store, until no buffer is free or the store does
 * not know yet whether it has a page. */
void fkv_tier_send(fkv_prefix_tier *tier, fkv_job *job);

/* Ends the restore of a job that is about to finish, and sends its remaining pages to the store while buffers are free. */
void fkv_tier_end_job(fkv_prefix_tier *tier, fkv_job *job);

#endif
