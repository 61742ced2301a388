/* See metrics.h. Metrics have the same names as in vLLM except for the prefix, so a vLLM dashboard works after the metric
 * prefix in it is changed. */
#include "metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double BOUNDS[METRIC_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                              0.5,   1.0,    2.5,   5.0,  10.0,  30.0, 60.0, 120.0};

void metric_add(metric_histogram *h, double seconds) {
    int i = 0;
    while (i < METRIC_BUCKETS && seconds > BOUNDS[i]) i++;
    h->counts[i]++;
    h->sum += seconds;
    h->n++;
}

/* Metric-name prefix and labels that all samples of a scope share, such as {"flatkv", ""} or {"vllm", "model_name=\"a\""}. */
typedef struct metric_scope {
    const char *prefix;
    const char *labels;
} metric_scope;

static const metric_scope FLATKV = {"flatkv", ""};

static void write_head(struct evbuffer *out, const metric_scope *scope, const char *name, const char *kind, const char *help) {
    (void)evbuffer_add_printf(out, "# HELP %s:%s %s\n# TYPE %s:%s %s\n", scope->prefix, name, help, scope->prefix, name, kind);
}

/* Writes the name of a sample with the labels of the scope and one additional label, which may be "". */
static void write_name(struct evbuffer *out, const metric_scope *scope, const char *name, const char *suffix, const char *label) {
    const bool both = *scope->labels != 0 && *label != 0;
    (void)evbuffer_add_printf(out, "%s:%s%s", scope->prefix, name, suffix);
    if (*scope->labels != 0 || *label != 0) (void)evbuffer_add_printf(out, "{%s%s%s}", scope->labels, both ? "," : "", label);
}

static void write_histogram(struct evbuffer *out, const metric_scope *scope, const char *name, const metric_histogram *h) {
    uint64_t sum = 0;
    char label[32];
    for (int i = 0; i < METRIC_BUCKETS; i++) {
        sum += h->counts[i];
        (void)snprintf(label, sizeof label, "le=\"%g\"", BOUNDS[i]);
        write_name(out, scope, name, "_bucket", label);
        (void)evbuffer_add_printf(out, " %" PRIu64 "\n", sum);
    }
    write_name(out, scope, name, "_bucket", "le=\"+Inf\"");
    (void)evbuffer_add_printf(out, " %" PRIu64 "\n", h->n);
    write_name(out, scope, name, "_sum", "");
    (void)evbuffer_add_printf(out, " %.6f\n", h->sum);
    write_name(out, scope, name, "_count", "");
    (void)evbuffer_add_printf(out, " %" PRIu64 "\n", h->n);
}

enum { MAX_VALUES = 32, MAX_LABEL = 1024 };

typedef struct metric_value {
    const char *name;
    const char *kind;
    const char *help;
    double value;
} metric_value;

static void write_values(struct evbuffer *out, const metric_scope *scope, const metric_value *values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        write_head(out, scope, values[i].name, values[i].kind, values[i].help);
        write_name(out, scope, values[i].name, "", "");
        (void)evbuffer_add_printf(out, " %.17g\n", values[i].value);
    }
}

/* Returns the fraction of pages that are in use or reserved. */
static double cache_usage(const fkv_engine_stats *s) {
    const fkv_group_stats *g = &s->cache.groups[s->page_group];
    const double usage = g->pages > 0 ? (double)(g->held + g->promised) / g->pages : 0.0;
    return usage > 1.0 ? 1.0 : usage;
}

/* Statistics of a model, and the metric-name prefix and labels of its samples. */
typedef struct labelled_model {
    metric_scope scope;
    char label[MAX_LABEL]; /* label text, such as model_name="a"; empty if the samples have no model label */
    const fkv_engine_stats *stats;
    const metric_latencies *latencies;
    metric_value values[MAX_VALUES];
} labelled_model;

/* Writes the label model_name, escaped as the Prometheus text format requires. The label is empty if the name is too long. */
static void format_model_label(const char *model, char label[MAX_LABEL]) {
    size_t at = (size_t)snprintf(label, MAX_LABEL, "model_name=\"");
    for (const char *c = model; *c != 0; c++) {
        if (at + 4 > MAX_LABEL) { /* 4 bytes: an escaped character, the closing quote and the null terminator */
            label[0] = 0;
            return;
        }
        if (*c == '\\' || *c == '"' || *c == '\n') label[at++] = '\\';
        label[at++] = *c == '\n' ? 'n' : *c;
    }
    label[at++] = '"';
    label[at] = 0;
}

/* Returns a list of the models, which the caller frees, or NULL if out of memory. */
static labelled_model *label_models(const metrics_model *models, uint32_t n_models, const char *prefix, bool has_label) {
    labelled_model *all = calloc(n_models, sizeof *all);
    for (uint32_t i = 0; all != NULL && i < n_models; i++) {
        if (has_label) format_model_label(models[i].name, all[i].label);
        all[i].scope = (metric_scope){prefix, all[i].label};
        all[i].stats = &models[i].stats;
        all[i].latencies = models[i].latencies;
    }
    return all;
}

/* For each of the first n_values metrics, writes one sample per model. Prometheus requires all samples of a metric to be
 * adjacent. */
static void write_model_values(struct evbuffer *out, const labelled_model *models, uint32_t n_models, size_t n_values) {
    for (size_t i = 0; i < n_values; i++) {
        const metric_value *first = &models[0].values[i];
        write_head(out, &models[0].scope, first->name, first->kind, first->help);
        for (uint32_t k = 0; k < n_models; k++) {
            write_name(out, &models[k].scope, first->name, "", "");
            (void)evbuffer_add_printf(out, " %.17g\n", models[k].values[i].value);
        }
    }
}

/* Writes one histogram per model for each latency. */
static void write_latencies(struct evbuffer *out, const labelled_model *models, uint32_t n_models) {
    static const struct {
        const char *name;
        const char *help;
        size_t offset; /* offset of the histogram in metric_latencies */
    } all[] = {
        {"time_to_first_token_seconds", "Time from arrival to the first token.", offsetof(metric_latencies, first_token)},
        {"inter_token_latency_seconds", "Time between two tokens of an answer.", offsetof(metric_latencies, between_tokens)},
        {"e2e_request_latency_seconds", "Time from arrival to the end of the answer.", offsetof(metric_latencies, whole)},
        {"request_queue_time_seconds", "Time that a request spent in the queue.", offsetof(metric_latencies, queue)},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        write_head(out, &models[0].scope, all[i].name, "histogram", all[i].help);
        for (uint32_t k = 0; k < n_models; k++)
            write_histogram(out, &models[k].scope, all[i].name,
                            (const metric_histogram *)((const char *)models[k].latencies + all[i].offset));
    }
}

static void write_finish_reasons(struct evbuffer *out, const labelled_model *models, uint32_t n_models) {
    static const char *const reasons[] = {"end", "stop", "length", "abort", "deadline", "error"};
    char label[48];
    write_head(out, &models[0].scope, "request_success_total", "counter", "Answers by finish reason.");
    for (uint32_t k = 0; k < n_models; k++) {
        for (int i = 0; i < 6; i++) {
            (void)snprintf(label, sizeof label, "finished_reason=\"%s\"", reasons[i]);
            write_name(out, &models[k].scope, "request_success_total", "", label);
            (void)evbuffer_add_printf(out, " %" PRIu64 "\n", models[k].stats->finished[i]);
        }
    }
}

static void write_page_metrics(struct evbuffer *out, const labelled_model *models, uint32_t n_models) {
    char label[64];
    write_head(out, &models[0].scope, "pages", "gauge", "Pages by state.");
    for (uint32_t k = 0; k < n_models; k++) {
        for (uint32_t g = 0; g < models[k].stats->cache.n_groups; g++) {
            const fkv_group_stats *p = &models[k].stats->cache.groups[g];
            const struct {
                const char *state;
                uint32_t n;
            } counts[] = {
                {"free", p->free}, {"held", p->held}, {"cached", p->cached}, {"promised", p->promised}, {"shared", p->shared}};
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                (void)snprintf(label, sizeof label, "group=\"%u\",state=\"%s\"", g, counts[i].state);
                write_name(out, &models[k].scope, "pages", "", label);
                (void)evbuffer_add_printf(out, " %u\n", counts[i].n);
            }
        }
    }
}

/* Writes the metrics of the prefix store itself, which all models share. A Redis store does not report its number of pages or its
 * size. */
static void write_store_usage(struct evbuffer *out, const fkv_prefix_store_stats *u) {
    const metric_value values[] = {
        {"prefix_store_pages", "gauge", "Pages in a prefix store on disk.", (double)u->pages},
        {"prefix_store_bytes", "gauge", "Size of a prefix store on disk, in bytes.", (double)u->bytes},
        {"prefix_store_max_bytes", "gauge", "Maximum size of a prefix store on disk, in bytes.", (double)u->max_bytes},
        {"prefix_store_memory_bytes", "gauge", "Memory of the prefix store: its index or its connections.", (double)u->memory},
        {"prefix_store_evictions_total", "counter", "Pages evicted from a prefix store on disk.", (double)u->evicted},
        {"prefix_store_refused_values_total", "counter", "Values that failed authentication or have an unknown format.",
         (double)u->refused},
        {"prefix_store_unavailable_servers", "gauge", "Servers of the prefix store that do not respond.",
         (double)u->n_unavailable},
    };
    write_values(out, &FLATKV, values, sizeof values / sizeof values[0]);
}

/* Writes the prefix-store metrics of one model to `out`. Returns their number. */
static size_t store_values(const fkv_store_stats *s, metric_value out[MAX_VALUES]) {
    const metric_value values[] = {
        {"prefix_store_read_pages_total", "counter", "Pages restored after verification.", (double)s->read_pages},
        {"prefix_store_read_bytes_total", "counter", "Bytes restored from the prefix store.", (double)s->read_bytes},
        {"prefix_store_read_seconds_total", "counter", "Time that requests waited for restores.", s->read_seconds},
        {"prefix_store_written_pages_total", "counter", "Pages written to the prefix store.", (double)s->written_pages},
        {"prefix_store_write_seconds_total", "counter", "Time spent writing pages.", s->write_seconds},
        {"prefix_store_failed_writes_total", "counter", "Failed page writes.", (double)s->failed_writes},
        {"prefix_store_unsent_pages_total", "counter", "Pages not written because the prefix store was too slow.",
         (double)s->unsent_pages},
        {"prefix_store_damaged_pages_total", "counter", "Pages that failed verification and were removed.",
         (double)s->damaged_pages},
        {"prefix_store_declined_total", "counter", "Restores skipped because computing was predicted to be faster.",
         (double)s->declined},
        {"prefix_store_late_total", "counter", "Restores abandoned because they took longer than computing.", (double)s->late},
    };
    _Static_assert(sizeof values / sizeof values[0] <= MAX_VALUES, "raise MAX_VALUES");
    memcpy(out, values, sizeof values);
    return sizeof values / sizeof values[0];
}

/* Writes the metrics of one engine to `out`. Returns their number. */
static size_t engine_values(const fkv_engine_stats *s, metric_value out[MAX_VALUES]) {
    const metric_value values[] = {
        {"num_requests_running", "gauge", "Running requests.", s->running},
        {"num_requests_waiting", "gauge", "Queued requests.", s->waiting},
        {"kv_cache_usage_perc", "gauge", "Fraction of pages in use or reserved; 1 means full.", cache_usage(s)},
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
        {"steps_total", "counter", "Forward passes.", (double)s->steps},
        {"cancel_steps_max", "gauge", "Maximum number of steps between a disconnect and the release of the pages.",
         (double)s->max_cancel_steps},
        {"step_seconds_total", "counter", "Time spent in forward passes.", s->step_seconds},
        {"step_predicted_seconds_total", "counter", "Time predicted for the forward passes.", s->predicted_seconds},
        {"evictions_total", "counter", "Pages evicted from the prefix cache.", (double)s->cache.evictions},
        {"page_copies_total", "counter", "Pages copied on write.", (double)s->cache.page_copies},
        {"cache_consistent", "gauge", "1 if the page accounting was consistent when the engine was last idle.", s->consistent},
        {"planned_bytes", "gauge", "Planned memory: cache, activations and buffers.",
         (double)(s->plan.total_bytes + s->store.buffer_bytes)},
    };
    _Static_assert(sizeof values / sizeof values[0] <= MAX_VALUES, "raise MAX_VALUES");
    memcpy(out, values, sizeof values);
    return sizeof values / sizeof values[0];
}

void metrics_write(const metrics *m, const metrics_model *models, uint32_t n_models, uint64_t resident_bytes,
                   struct evbuffer *out) {
    const metric_value values[] = {
        {"num_requests_preparing", "gauge", "Requests being parsed and tokenized.", m->preparing},
        {"disconnects_total", "counter", "Clients that disconnected before their reply ended.", (double)m->disconnects},
        {"connections", "gauge", "Open connections.", m->connections},
        {"refused_connections_total", "counter", "Connections rejected because of the connection limit.",
         (double)m->refused_connections},
        {"slow_readers_total", "counter", "Clients disconnected because they did not read their stream.",
         (double)m->slow_readers},
        {"resident_bytes", "gauge", "Anonymous memory of the process.", (double)resident_bytes},
    };
    labelled_model *all = label_models(models, n_models, FLATKV.prefix, n_models > 1);
    if (all == NULL) return;
    size_t n_values = 0;
    (void)evbuffer_add_printf(out, "# flatkv %s", fkv_version());
    for (uint32_t i = 0; i < n_models; i++) {
        (void)evbuffer_add_printf(out, ", model %s", models[i].name);
        n_values = engine_values(all[i].stats, all[i].values);
    }
    (void)evbuffer_add_printf(out, "\n");
    write_values(out, &FLATKV, values, sizeof values / sizeof values[0]);
    write_model_values(out, all, n_models, n_values);
    write_finish_reasons(out, all, n_models);
    write_page_metrics(out, all, n_models);
    for (uint32_t i = 0; i < n_models; i++) n_values = store_values(&all[i].stats->store, all[i].values);
    if (models[0].stats.store.usage.memory > 0) {
        write_store_usage(out, &models[0].stats.store.usage);
        write_model_values(out, all, n_models, n_values);
    }
    write_latencies(out, all, n_models);
    free(all);
}

/* Writes to `out` the metrics that vLLM also has. Returns their number. */
static size_t vllm_values(const fkv_engine_stats *s, metric_value out[MAX_VALUES]) {
    const metric_value values[] = {
        {"num_requests_running", "gauge", "Running requests.", s->running},
        {"num_requests_waiting", "gauge", "Queued requests.", s->waiting},
        {"kv_cache_usage_perc", "gauge", "Fraction of pages in use or reserved; 1 means full.", cache_usage(s)},
        {"prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", (double)s->prompt_tokens},
        {"generation_tokens_total", "counter", "Generated tokens.", (double)s->new_tokens},
        {"prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", (double)s->prompt_tokens},
        {"prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", (double)s->cached_tokens},
        {"spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified.", (double)s->drafted_tokens},
        {"spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", (double)s->accepted_tokens},
    };
    _Static_assert(sizeof values / sizeof values[0] <= MAX_VALUES, "raise MAX_VALUES");
    memcpy(out, values, sizeof values);
    return sizeof values / sizeof values[0];
}

void metrics_write_vllm(const metrics_model *models, uint32_t n_models, struct evbuffer *out) {
    char blocks[96];
    size_t n_values = 0;
    labelled_model *all = label_models(models, n_models, "vllm", true);
    if (all == NULL) return;
    for (uint32_t i = 0; i < n_models; i++) n_values = vllm_values(all[i].stats, all[i].values);
    write_model_values(out, all, n_models, n_values);
    write_head(out, &all[0].scope, "cache_config_info", "gauge", "Page size in tokens and number of pages.");
    for (uint32_t i = 0; i < n_models; i++) {
        const fkv_engine_stats *s = all[i].stats;
        (void)snprintf(blocks, sizeof blocks, "block_size=\"%u\",num_gpu_blocks=\"%u\"", s->page_tokens,
                       s->cache.groups[s->page_group].pages);
        write_name(out, &all[i].scope, "cache_config_info", "", blocks);
        (void)evbuffer_add_printf(out, " 1\n");
    }
    write_finish_reasons(out, all, n_models);
    write_latencies(out, all, n_models);
    free(all);
}
