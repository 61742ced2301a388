/* Server metrics: latency histograms and the Prometheus text format. */
#ifndef FKV_SERVE_METRICS_H
#define FKV_SERVE_METRICS_H

#include <event2/buffer.h>
#include <flatkv/engine.h>

enum { METRIC_BUCKETS = 16 };

typedef struct metric_histogram {
    uint64_t counts[METRIC_BUCKETS + 1]; /* number of values in each bucket; the last bucket counts the values above all bounds */
    double sum;
    uint64_t n;
} metric_histogram;

/* Latencies of one model, in seconds. */
typedef struct metric_latencies {
    metric_histogram first_token; /* time to first token */
    metric_histogram between_tokens;
    metric_histogram whole; /* end-to-end latency */
    metric_histogram queue; /* time in the queue */
} metric_latencies;

/* Metrics of the server as a whole. */
typedef struct metrics {
    uint64_t disconnects;
    uint64_t slow_readers; /* number of clients that were disconnected because they did not read their stream */
    uint32_t connections;  /* number of open connections */
    uint32_t preparing;    /* number of requests being parsed and tokenized */
    uint64_t refused_connections;
    uint64_t http[6]; /* number of responses for each status class (status / 100) */
} metrics;

void metric_add(metric_histogram *h, double seconds);

/* Name, latencies and statistics of one model. */
typedef struct metrics_model {
    const char *name;
    const metric_latencies *latencies;
    fkv_engine_stats stats;
} metrics_model;

/* Writes all metrics in the Prometheus text format. models: [n_models]; if there are several, the metrics of each model have the
 * label model_name. resident_bytes: anonymous memory of the process. */
void metrics_write(const metrics *m, const metrics_model *models, uint32_t n_models, uint64_t resident_bytes,
                   struct evbuffer *out);

/* Writes the metrics that vLLM also has, under their original names and with the label model_name, for dashboards and routers
 * that expect a vLLM server. */
void metrics_write_vllm(const metrics_model *models, uint32_t n_models, struct evbuffer *out);

#endif
