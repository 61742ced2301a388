/* See metrics.h. Names follow vLLM's, so that its dashboards need another prefix and nothing else. */
#include "metrics.h"

#include <inttypes.h>

static const double BOUNDS[METRIC_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                              0.5,   1.0,    2.5,   5.0,  10.0,  30.0, 60.0, 120.0};

void metric_add(metric_histogram *h, double seconds) {
    int i = 0;
    while (i < METRIC_BUCKETS && seconds > BOUNDS[i]) i++;
    h->counts[i]++;
    h->sum += seconds;
    h->n++;
}

static void write_histogram(struct evbuffer *out, const char *name, const char *help, const metric_histogram *h) {
    uint64_t sum = 0;
    (void)evbuffer_add_printf(out, "# HELP flatkv:%s %s\n# TYPE flatkv:%s histogram\n", name, help, name);
    for (int i = 0; i < METRIC_BUCKETS; i++) {
        sum += h->counts[i];
        (void)evbuffer_add_printf(out, "flatkv:%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, BOUNDS[i], sum);
    }
    (void)evbuffer_add_printf(out, "flatkv:%s_bucket{le=\"+Inf\"} %" PRIu64 "\nflatkv:%s_sum %.6f\nflatkv:%s_count %" PRIu64 "\n",
                              name, h->n, name, h->sum, name, h->n);
}

typedef struct figure {
    const char *name;
    const char *kind;
    const char *help;
    double value;
} figure;

static void write_figures(struct evbuffer *out, const figure *figures, size_t n) {
    for (size_t i = 0; i < n; i++)
        (void)evbuffer_add_printf(out, "# HELP flatkv:%s %s\n# TYPE flatkv:%s %s\nflatkv:%s %.17g\n", figures[i].name,
                                  figures[i].help, figures[i].name, figures[i].kind, figures[i].name, figures[i].value);
}

static void write_ends(struct evbuffer *out, const fkv_engine_stats *s) {
    static const char *const reasons[] = {"end", "stop", "length", "abort", "deadline", "error"};
    (void)evbuffer_add_printf(out, "# HELP flatkv:request_success_total Answers by how they ended.\n"
                                   "# TYPE flatkv:request_success_total counter\n");
    for (int i = 0; i < 6; i++)
        (void)evbuffer_add_printf(out, "flatkv:request_success_total{finished_reason=\"%s\"} %" PRIu64 "\n", reasons[i],
                                  s->finished[i]);
}

static void write_pages(struct evbuffer *out, const fkv_engine_stats *s) {
    (void)evbuffer_add_printf(out, "# HELP flatkv:pages Pages by state.\n# TYPE flatkv:pages gauge\n");
    for (uint32_t g = 0; g < s->cache.n_groups; g++) {
        const fkv_group_stats *p = &s->cache.groups[g];
        (void)evbuffer_add_printf(
            out,
            "flatkv:pages{group=\"%u\",state=\"free\"} %u\nflatkv:pages{group=\"%u\",state=\"held\"} %u\n"
            "flatkv:pages{group=\"%u\",state=\"cached\"} %u\nflatkv:pages{group=\"%u\",state=\"promised\"} %u\n"
            "flatkv:pages{group=\"%u\",state=\"shared\"} %u\n",
            g, p->free, g, p->held, g, p->cached, g, p->promised, g, p->shared);
    }
}

/* Prefixes beyond memory. */
static void write_store(struct evbuffer *out, const fkv_store_stats *s) {
    const figure figures[] = {
        {"prefix_store_pages", "gauge", "Pages of prefixes on disk.", (double)s->figures.pages},
        {"prefix_store_bytes", "gauge", "Their bytes.", (double)s->figures.bytes},
        {"prefix_store_max_bytes", "gauge", "The bound of these bytes.", (double)s->figures.max_bytes},
        {"prefix_store_evictions_total", "counter", "Pages given up for younger ones.", (double)s->figures.evicted},
        {"prefix_store_read_pages_total", "counter", "Pages that came back, verified.", (double)s->read_pages},
        {"prefix_store_read_bytes_total", "counter", "Their bytes.", (double)s->read_bytes},
        {"prefix_store_read_seconds_total", "counter", "Time that requests waited for them.", s->read_seconds},
        {"prefix_store_written_pages_total", "counter", "Pages written.", (double)s->written_pages},
        {"prefix_store_write_seconds_total", "counter", "Their time.", s->write_seconds},
        {"prefix_store_failed_writes_total", "counter", "Pages that could not be written.", (double)s->failed_writes},
        {"prefix_store_unsent_pages_total", "counter", "Pages not written because the disk was behind.", (double)s->unsent_pages},
        {"prefix_store_damaged_pages_total", "counter", "Pages refused and removed.", (double)s->damaged_pages},
        {"prefix_store_declined_total", "counter", "Requests for which computing was faster.", (double)s->declined},
        {"prefix_store_late_total", "counter", "Requests that stopped waiting for pages.", (double)s->late},
    };
    if (s->figures.max_bytes > 0) write_figures(out, figures, sizeof figures / sizeof figures[0]);
}

void metrics_write(const metrics *m, const fkv_engine_stats *s, const char *model, uint64_t resident_bytes,
                   struct evbuffer *out) {
    const fkv_group_stats *g = &s->cache.groups[0];
    double usage = g->pages > 0 ? (double)(g->held + g->promised) / g->pages : 0.0;
    const figure figures[] = {
        {"num_requests_running", "gauge", "Requests that are computed.", s->running},
        {"num_requests_waiting", "gauge", "Requests in the queue.", s->waiting},
        {"kv_cache_usage_perc", "gauge", "Pages held or promised, of all: 1 is full.", usage > 1.0 ? 1.0 : usage},
        {"predicted_wait_seconds", "gauge", "What a request would wait that came now.", s->predicted_wait_s},
        {"prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", (double)s->prompt_tokens},
        {"prompt_tokens_computed_total", "counter", "Prompt tokens that were computed.", (double)s->computed_tokens},
        {"generation_tokens_total", "counter", "Tokens written.", (double)s->new_tokens},
        {"prefix_cache_queries_total", "counter", "Prompt tokens looked for in the prefix cache.", (double)s->prompt_tokens},
        {"prefix_cache_hits_total", "counter", "Prompt tokens found there.", (double)s->cached_tokens},
        {"spec_decode_num_draft_tokens_total", "counter", "Tokens tried beyond the next one.", (double)s->drafted_tokens},
        {"spec_decode_num_accepted_tokens_total", "counter", "Of them, right.", (double)s->accepted_tokens},
        {"page_waits_total", "counter", "Requests that waited for a page another one was computing.", (double)s->page_waits},
        {"requests_total", "counter", "Requests taken.", (double)s->submitted},
        {"refused_busy_total", "counter", "Requests refused because of the queue.", (double)s->refused_busy},
        {"refused_size_total", "counter", "Requests refused because they can never fit.", (double)s->refused_size},
        {"disconnects_total", "counter", "Clients that left before their answer ended.", (double)m->disconnects},
        {"connections", "gauge", "Connections that are open.", m->connections},
        {"refused_connections_total", "counter", "Connections beyond the most that may be open.", (double)m->refused_connections},
        {"slow_readers_total", "counter", "Clients dropped because they did not read.", (double)m->slow_readers},
        {"steps_total", "counter", "Forward passes.", (double)s->steps},
        {"cancel_steps_max", "gauge", "Most steps that ended from a disconnect to the return of its pages.",
         (double)s->cancel_steps_most},
        {"step_seconds_total", "counter", "Their time.", s->step_seconds},
        {"step_predicted_seconds_total", "counter", "The time predicted for them.", s->predicted_seconds},
        {"evictions_total", "counter", "Pages that the prefix cache gave up.", (double)s->cache.evictions},
        {"page_copies_total", "counter", "Pages copied because two sequences shared them.", (double)s->cache.page_copies},
        {"cache_consistent", "gauge", "1: the books of the pages were right when there was last nothing to do.", s->consistent},
        {"planned_bytes", "gauge", "Cache, activations and buffers, as planned.",
         (double)(s->plan.total_bytes + s->store.buffer_bytes + s->store.figures.memory)},
        {"resident_bytes", "gauge", "Anonymous memory of the process.", (double)resident_bytes},
    };
    (void)evbuffer_add_printf(out, "# flatkv %s, model %s\n", fkv_version(), model);
    write_figures(out, figures, sizeof figures / sizeof figures[0]);
    write_store(out, &s->store);
    write_ends(out, s);
    write_pages(out, s);
    write_histogram(out, "time_to_first_token_seconds", "From arrival to the first token.", &m->first_token);
    write_histogram(out, "inter_token_latency_seconds", "Between two tokens of an answer.", &m->between_tokens);
    write_histogram(out, "e2e_request_latency_seconds", "From arrival to the end of the answer.", &m->whole);
    write_histogram(out, "request_queue_time_seconds", "In the queue.", &m->queue);
}
