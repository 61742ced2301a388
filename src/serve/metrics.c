/* See metrics.h. The metric names are those of vLLM with another prefix, so vLLM dashboards work after the prefix is changed. */
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

typedef struct metric_value {
    const char *name;
    const char *kind;
    const char *help;
    double value;
} metric_value;

static void write_values(struct evbuffer *out, const metric_value *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        (void)evbuffer_add_printf(out, "# HELP flatkv:%s %s\n# TYPE flatkv:%s %s\nflatkv:%s %.17g\n", values[i].name,
                                  values[i].help, values[i].name, values[i].kind, values[i].name, values[i].value);
}

static void write_finish_reasons(struct evbuffer *out, const fkv_engine_stats *s) {
    static const char *const reasons[] = {"end", "stop", "length", "abort", "deadline", "error"};
    (void)evbuffer_add_printf(out, "# HELP flatkv:request_success_total Answers by finish reason.\n"
                                   "# TYPE flatkv:request_success_total counter\n");
    for (int i = 0; i < 6; i++)
        (void)evbuffer_add_printf(out, "flatkv:request_success_total{finished_reason=\"%s\"} %" PRIu64 "\n", reasons[i],
                                  s->finished[i]);
}

static void write_page_metrics(struct evbuffer *out, const fkv_engine_stats *s) {
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

/* Writes the metrics of the prefix store. */
static void write_store_metrics(struct evbuffer *out, const fkv_store_stats *s) {
    const metric_value values[] = {
        {"prefix_store_pages", "gauge", "Prefix pages on disk.", (double)s->usage.pages},
        {"prefix_store_bytes", "gauge", "Bytes of prefix pages on disk.", (double)s->usage.bytes},
        {"prefix_store_max_bytes", "gauge", "Maximum size of the prefix store on disk, in bytes.", (double)s->usage.max_bytes},
        {"prefix_store_evictions_total", "counter", "Pages evicted from disk.", (double)s->usage.evicted},
        {"prefix_store_read_pages_total", "counter", "Pages restored from disk after verification.", (double)s->read_pages},
        {"prefix_store_read_bytes_total", "counter", "Bytes restored from disk.", (double)s->read_bytes},
        {"prefix_store_read_seconds_total", "counter", "Time that requests waited for restores.", s->read_seconds},
        {"prefix_store_written_pages_total", "counter", "Pages written to disk.", (double)s->written_pages},
        {"prefix_store_write_seconds_total", "counter", "Time spent writing pages.", s->write_seconds},
        {"prefix_store_failed_writes_total", "counter", "Failed page writes.", (double)s->failed_writes},
        {"prefix_store_unsent_pages_total", "counter", "Pages not written because the disk was too slow.",
         (double)s->unsent_pages},
        {"prefix_store_damaged_pages_total", "counter", "Pages that failed verification and were removed.",
         (double)s->damaged_pages},
        {"prefix_store_declined_total", "counter", "Restores skipped because computing was predicted to be faster.",
         (double)s->declined},
        {"prefix_store_late_total", "counter", "Restores abandoned because they took longer than computing.", (double)s->late},
    };
    if (s->usage.max_bytes > 0) write_values(out, values, sizeof values / sizeof values[0]);
}

void metrics_write(const metrics *m, const fkv_engine_stats *s, const char *model, uint64_t resident_bytes,
                   struct evbuffer *out) {
    const fkv_group_stats *g = &s->cache.groups[0];
    double usage = g->pages > 0 ? (double)(g->held + g->promised) / g->pages : 0.0;
    const metric_value values[] = {
        {"num_requests_running", "gauge", "Running requests.", s->running},
        {"num_requests_waiting", "gauge", "Queued requests.", s->waiting},
        {"num_requests_preparing", "gauge", "Requests being parsed and tokenized.", m->preparing},
        {"kv_cache_usage_perc", "gauge", "Fraction of pages in use or reserved; 1 means full.", usage > 1.0 ? 1.0 : usage},
        {"predicted_wait_seconds", "gauge", "Predicted queue time of a request submitted now.", s->predicted_wait_s},
        {"prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", (double)s->prompt_tokens},
        {"prompt_tokens_computed_total", "counter", "Prompt tokens that were computed.", (double)s->computed_tokens},
        {"generation_tokens_total", "counter", "Generated tokens.", (double)s->new_tokens},
        {"prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", (double)s->prompt_tokens},
        {"prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", (double)s->cached_tokens},
        {"spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.", (double)s->drafted_tokens},
        {"spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", (double)s->accepted_tokens},
        {"page_waits_total", "counter", "Requests that waited for a page computed by another request.", (double)s->page_waits},
        {"requests_total", "counter", "Accepted requests.", (double)s->submitted},
        {"refused_busy_total", "counter", "Requests rejected because the queue was full or the predicted wait was too long.",
         (double)s->refused_busy},
        {"refused_size_total", "counter", "Requests rejected because they can never fit.", (double)s->refused_size},
        {"disconnects_total", "counter", "Clients that disconnected before their reply ended.", (double)m->disconnects},
        {"connections", "gauge", "Open connections.", m->connections},
        {"refused_connections_total", "counter", "Connections rejected because of the connection limit.",
         (double)m->refused_connections},
        {"slow_readers_total", "counter", "Clients that were disconnected because they did not read their stream.",
         (double)m->slow_readers},
        {"steps_total", "counter", "Forward passes.", (double)s->steps},
        {"cancel_steps_max", "gauge", "Maximum number of steps between a disconnect and the release of the pages.",
         (double)s->max_cancel_steps},
        {"step_seconds_total", "counter", "Time spent in forward passes.", s->step_seconds},
        {"step_predicted_seconds_total", "counter", "Time predicted for the forward passes.", s->predicted_seconds},
        {"evictions_total", "counter", "Pages evicted from the prefix cache.", (double)s->cache.evictions},
        {"page_copies_total", "counter", "Pages copied on write.", (double)s->cache.page_copies},
        {"cache_consistent", "gauge", "1 if the page accounting was consistent when the engine was last idle.", s->consistent},
        {"planned_bytes", "gauge", "Planned memory: cache, activations and buffers.",
         (double)(s->plan.total_bytes + s->store.buffer_bytes + s->store.usage.memory)},
        {"resident_bytes", "gauge", "Anonymous memory of the process.", (double)resident_bytes},
    };
    (void)evbuffer_add_printf(out, "# flatkv %s, model %s\n", fkv_version(), model);
    write_values(out, values, sizeof values / sizeof values[0]);
    write_store_metrics(out, &s->store);
    write_finish_reasons(out, s);
    write_page_metrics(out, s);
    write_histogram(out, "time_to_first_token_seconds", "Time from arrival to the first token.", &m->first_token);
    write_histogram(out, "inter_token_latency_seconds", "Time between two tokens of an answer.", &m->between_tokens);
    write_histogram(out, "e2e_request_latency_seconds", "Time from arrival to the end of the answer.", &m->whole);
    write_histogram(out, "request_queue_time_seconds", "Time that a request spent in the queue.", &m->queue);
}
