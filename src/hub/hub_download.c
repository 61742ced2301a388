/* Downloads files in parts; see hub_download() in hub_session.h.
 *
 * One thread drives all transfers with libcurl's multi interface. Parts are started in file order, so that digests can be
 * computed while later parts arrive. A part that fails temporarily is retried with increasing delays. An attempt that receives
 * enough data resets the failure count of the part, so a download over a bad connection continues as long as it makes progress.
 */
#include "hub_request.h"

#include "../kit/numbers.h"
#include "../kit/program.h"
#include "hub_progress.h"
#include "partial_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROGRESS_BYTES = 64 << 10 }; /* an attempt that receives at least this many bytes resets the failure count */

typedef enum job_state { JOB_WAITING, JOB_OPEN, JOB_DONE } job_state;

/* One file. */
typedef struct job {
    const hub_file *file;
    job_state state;
    partial_file partial; /* valid while open */
    char *url;            /* address of the file on the hub */
    char *storage;        /* address to which the hub redirects; NULL if it is not known */
    bool whole;           /* true if the server does not support range requests; the file is then downloaded as one part */
    bool restarted;       /* true if the download was repeated once because of a wrong digest */
    double retry_lock;    /* time, as in kit_seconds(), of the next attempt to lock the blob */
    struct attempt {
        bool active;
        uint32_t n_failures; /* number of consecutive failed attempts that received little data */
        uint32_t n_redirects;
        double retry_at;
    } *attempts; /* retry state of each part */
} job;

/* One transfer. */
typedef struct slot {
    struct download *owner;
    CURL *easy;
    bool active;
    hub_request request;
    job *job;
    uint32_t part;
} slot;

typedef struct download {
    hub_session *session;
    const hub_cache *cache;
    const hub_listing *listing;
    job *jobs;
    uint32_t n_jobs;
    slot *slots;
    uint32_t n_slots;
    CURLM *multi;
    uint64_t done_bytes; /* total size of the complete files */
    uint64_t fetched;    /* bytes received */
    double hold_until;   /* time before which no transfer starts, because the server requested a pause */
    hub_progress progress;
    int code; /* exit code of the download; EXIT_GOOD until an error occurs */
} download;

static void end_with(download *d, int code) {
    if (d->code == EXIT_GOOD) d->code = code;
}

/* ---- jobs ---- */

static void make_attempts(job *j) {
    free(j->attempts);
    j->attempts = kit_alloc(j->partial.n_parts * sizeof *j->attempts);
}

static void close_job(job *j) {
    if (j->state == JOB_OPEN) partial_file_close(&j->partial);
    free(j->attempts);
    free(j->storage);
    free(j->url);
    j->attempts = NULL;
    j->storage = j->url = NULL;
}

static void finish_job(download *d, job *j) {
    close_job(j);
    j->state = JOB_DONE;
    d->done_bytes += j->file->bytes;
}

/* Opens the partial file of a job, unless another program is downloading the same file. */
static void open_job(download *d, job *j) {
    double now = kit_seconds();
    if (now < j->retry_lock) return;
    int lock = hub_cache_lock_blob(d->cache, j->file);
    if (lock == -1) {
        hub_progress_note(&d->progress, "another program is downloading %s; waiting for it", j->file->path);
        j->retry_lock = now + 1;
        return;
    }
    int code = partial_file_open(&j->partial, d->cache, j->file);
    j->partial.lock = lock;
    j->state = JOB_OPEN;
    if (code != EXIT_GOOD) {
        end_with(d, code);
        return;
    }
    if (hub_cache_has(d->cache, j->file)) { /* another program has downloaded the file in the meantime */
        finish_job(d, j);
        return;
    }
    j->url = hub_file_url(d->session, d->listing, j->file);
    make_attempts(j);
}

/* Aborts all transfers of a file and discards its data. */
static void restart_job(download *d, job *j) {
    for (uint32_t i = 0; i < d->n_slots; i++) {
        slot *s = &d->slots[i];
        if (!s->active || s->job != j) continue;
        (void)curl_multi_remove_handle(d->multi, s->easy);
        hub_request_free(&s->request);
        s->active = false;
    }
    end_with(d, partial_file_restart(&j->partial, j->whole ? 0 : PARTIAL_PART_BYTES));
    make_attempts(j);
}

/* Adds newly received data to the digest of a file, and completes the file when all data has arrived. Sets *pending if some
 * received data is not hashed yet. */
static void advance_job(download *d, job *j, bool *pending) {
    bool matches = true;
    int code = partial_file_hash(&j->partial, pending);
    partial_file_save(&j->partial, false);
    if (code == EXIT_GOOD && j->partial.hashed < j->file->bytes) return;
    if (code == EXIT_GOOD) code = partial_file_finish(&j->partial, &matches);
    if (code != EXIT_GOOD) {
        end_with(d, code);
    } else if (matches) {
        finish_job(d, j);
    } else if (!j->restarted) {
        hub_progress_note(&d->progress, "the checksum of %s is wrong: downloading it again", j->file->path);
        j->restarted = true;
        free(j->storage);
        j->storage = NULL;
        restart_job(d, j);
    } else {
        hub_progress_end(&d->progress);
        (void)partial_file_restart(&j->partial, PARTIAL_PART_BYTES); /* a later download must not resume from corrupt data */
        end_with(d, kit_fail(EXIT_FAILED,
                             "the checksum of %s is still wrong after a second download: the file on the server is damaged, or a "
                             "proxy changes it",
                             j->file->path));
    }
}

/* ---- transfers ---- */

static bool write_part(void *user, const char *bytes, size_t n) {
    slot *s = user;
    s->owner->fetched += n;
    return partial_file_write(&s->job->partial, s->part, bytes, n);
}

static void start_transfer(download *d, slot *s, job *j, uint32_t part) {
    const file_part *p = &j->partial.parts[part];
    uint64_t left = p->until - p->at;
    s->owner = d;
    s->job = j;
    s->part = part;
    s->active = true;
    j->attempts[part].active = true;
    s->request = (hub_request){.from = p->at,
                               .limit = left,
                               .exact = true,
                               .whole = p->at == 0 && left == j->file->bytes,
                               .file_bytes = j->file->bytes,
                               .sink = write_part,
                               .user = s};
    hub_request_begin(&s->request, s->easy, d->session, j->storage != NULL ? j->storage : j->url);
    (void)curl_easy_setopt(s->easy, CURLOPT_PRIVATE, s);
    if (curl_multi_add_handle(d->multi, s->easy) != CURLM_OK)
        end_with(d, kit_fail(EXIT_FAILED, "libcurl cannot start another transfer"));
}

/* Returns whether a transfer of the part can be started now. */
static bool is_ready(const job *j, uint32_t part, double now) {
    const file_part *p = &j->partial.parts[part];
    return p->at < p->until && !j->attempts[part].active && now >= j->attempts[part].retry_at;
}

/* Finds the first part whose transfer can be started. Opens files as needed. */
static bool next_part(download *d, double now, job **found, uint32_t *part) {
    for (uint32_t i = 0; i < d->n_jobs && d->code == EXIT_GOOD; i++) {
        job *j = &d->jobs[i];
        if (j->state == JOB_WAITING) open_job(d, j);
        if (j->state != JOB_OPEN || d->code != EXIT_GOOD) continue;
        for (uint32_t k = 0; k < j->partial.n_parts; k++) {
            if (!is_ready(j, k, now)) continue;
            *found = j;
            *part = k;
            return true;
        }
    }
    return false;
}

static void start_transfers(download *d) {
    double now = kit_seconds();
    job *j = NULL;
    uint32_t part = 0;
    if (now < d->hold_until) return;
    for (uint32_t i = 0; i < d->n_slots; i++)
        if (!d->slots[i].active && next_part(d, now, &j, &part)) start_transfer(d, &d->slots[i], j, part);
}

/* Schedules the next attempt to download a part, or ends the whole download after too many failed attempts. */
static void retry(download *d, job *j, uint32_t part, const hub_request *r) {
    struct attempt *a = &j->attempts[part];
    double now = kit_seconds();
    if (++a->n_failures >= d->session->n_tries) {
        hub_progress_end(&d->progress);
        end_with(d, hub_request_fail(r, d->listing->repo, j->file->path));
        return;
    }
    double wait = r->wait > 0 ? r->wait : hub_backoff(a->n_failures);
    a->retry_at = now + wait;
    if (r->wait > 0) d->hold_until = now + r->wait; /* a rate limit of the server applies to all requests */
    if (r->wait > 0 || a->n_failures > 1) hub_progress_note(&d->progress, "%s: trying again in %.0f s", r->problem, wait);
}

static void follow_redirect(download *d, job *j, uint32_t part, hub_request *r) {
    struct attempt *a = &j->attempts[part];
    if (++a->n_redirects > HUB_MAX_REDIRECTS) {
        hub_progress_end(&d->progress);
        end_with(d, kit_fail(EXIT_FAILED, "cannot download %s: the server's redirects form a loop", j->file->path));
        return;
    }
    free(j->storage);
    j->storage = r->url;
    r->url = NULL;
}

static void end_transfer(download *d, slot *s, CURLcode result) {
    job *j = s->job;
    uint32_t part = s->part;
    hub_outcome outcome = hub_request_end(&s->request, result);
    hub_request r = s->request;
    (void)curl_multi_remove_handle(d->multi, s->easy);
    s->active = false;
    s->request = (hub_request){0};
    j->attempts[part].active = false;
    if (r.received >= PROGRESS_BYTES || outcome == HUB_DONE) j->attempts[part].n_failures = 0;
    switch (outcome) {
    case HUB_DONE: j->attempts[part].n_redirects = 0; break;
    case HUB_REDIRECTED: follow_redirect(d, j, part, &r); break;
    case HUB_TRY_AGAIN: retry(d, j, part, &r); break;
    case HUB_EXPIRED:
        free(j->storage);
        j->storage = NULL;
        j->attempts[part].n_redirects = 0;
        retry(d, j, part, &r);
        break;
    case HUB_NO_RANGES:
        j->whole = true;
        restart_job(d, j);
        break;
    case HUB_STOPPED: end_with(d, EXIT_INTERRUPTED); break;
    case HUB_FAILED:
        hub_progress_end(&d->progress);
        end_with(d, hub_request_fail(&r, d->listing->repo, j->file->path));
        break;
    }
    hub_request_free(&r);
}

static void end_transfers(download *d) {
    int n_left = 0;
    for (CURLMsg *m = NULL; (m = curl_multi_info_read(d->multi, &n_left)) != NULL;) {
        void *owner = NULL;
        CURLcode result = m->data.result;
        if (m->msg != CURLMSG_DONE) continue;
        (void)curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &owner);
        slot *s = owner;
        if (s != NULL && s->active) end_transfer(d, s, result);
    }
}

/* ---- download ---- */

static uint64_t bytes_done(const download *d) {
    uint64_t done = d->done_bytes;
    for (uint32_t i = 0; i < d->n_jobs; i++)
        if (d->jobs[i].state == JOB_OPEN) done += partial_file_done(&d->jobs[i].partial);
    return done;
}

/* Hashes new data of all open files and completes finished files. Returns whether any file is incomplete. */
static bool advance_jobs(download *d, bool *pending) {
    bool incomplete = false;
    for (uint32_t i = 0; i < d->n_jobs && d->code == EXIT_GOOD; i++) {
        job *j = &d->jobs[i];
        if (j->state == JOB_OPEN) advance_job(d, j, pending);
        incomplete = incomplete || j->state != JOB_DONE;
    }
    return incomplete;
}

static void run_download(download *d) {
    enum { POLL_MS = 100 };
    int n_running = 0;
    for (bool incomplete = true; incomplete && d->code == EXIT_GOOD;) {
        bool pending = false;
        if (d->session->stop()) end_with(d, EXIT_INTERRUPTED);
        start_transfers(d);
        if (curl_multi_perform(d->multi, &n_running) != CURLM_OK) end_with(d, kit_fail(EXIT_FAILED, "libcurl failed"));
        end_transfers(d);
        incomplete = advance_jobs(d, &pending);
        hub_progress_show(&d->progress, bytes_done(d), d->fetched);
        if (incomplete && !pending && d->code == EXIT_GOOD) (void)curl_multi_poll(d->multi, NULL, 0, POLL_MS, NULL);
    }
    hub_progress_end(&d->progress);
}

static void add_jobs(download *d, const uint32_t *files, uint32_t n_files) {
    d->jobs = kit_alloc(n_files * sizeof *d->jobs);
    for (uint32_t i = 0; i < n_files; i++) {
        const hub_file *file = &d->listing->files[files[i]];
        bool twice = false; /* files with the same contents share a blob */
        for (uint32_t k = 0; k < d->n_jobs; k++) twice = twice || strcmp(d->jobs[k].file->id, file->id) == 0;
        if (!twice && !hub_cache_has(d->cache, file)) d->jobs[d->n_jobs++].file = file;
    }
}

static uint64_t total_bytes(const download *d) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < d->n_jobs; i++) total += d->jobs[i].file->bytes;
    return total;
}

uint64_t hub_missing_bytes(const hub_cache *cache, const hub_listing *listing, const uint32_t *files, uint32_t n_files) {
    download d = {.cache = cache, .listing = listing};
    uint64_t missing = 0;
    add_jobs(&d, files, n_files);
    for (uint32_t i = 0; i < d.n_jobs; i++) missing += d.jobs[i].file->bytes - partial_file_stored(cache, d.jobs[i].file);
    free(d.jobs);
    return missing;
}

int hub_download(hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
                 uint32_t n_files, uint32_t n_connections) {
    download d = {.session = session, .cache = cache, .listing = listing, .n_slots = n_connections, .multi = curl_multi_init()};
    d.slots = kit_alloc(n_connections * sizeof *d.slots);
    bool good = d.multi != NULL;
    for (uint32_t i = 0; i < n_connections && good; i++) good = (d.slots[i].easy = curl_easy_init()) != NULL;
    if (good) {
        add_jobs(&d, files, n_files);
        d.progress = hub_progress_begin(total_bytes(&d));
        run_download(&d);
    } else {
        d.code = kit_fail(EXIT_FAILED, "libcurl cannot create %u connections", n_connections);
    }
    for (uint32_t i = 0; i < n_connections; i++) {
        if (d.slots[i].active) (void)curl_multi_remove_handle(d.multi, d.slots[i].easy);
        if (d.slots[i].active) hub_request_free(&d.slots[i].request);
        curl_easy_cleanup(d.slots[i].easy);
    }
    for (uint32_t i = 0; i < d.n_jobs; i++) close_job(&d.jobs[i]);
    if (d.multi != NULL) (void)curl_multi_cleanup(d.multi);
    free(d.jobs);
    free(d.slots);
    return d.code;
}
