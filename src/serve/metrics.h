/* Figures of a server: histograms of what clients waited for, and the text that Prometheus reads. */
#ifndef FKV_SERVE_METRICS_H
#define FKV_SERVE_METRICS_H

#include <event2/buffer.h>
#include <flatkv/engine.h>

enum { METRIC_BUCKETS = 16 };

typedef struct metric_histogram {
    uint64_t counts[METRIC_BUCKETS + 1]; /* the last: above all bounds */
    double sum;
    uint64_t n;
} metric_histogram;

typedef struct metrics {
    metric_histogram first_token; /* seconds from arrival */
    metric_histogram between_tokens;
    metric_histogram whole;
    metric_histogram queue;
    uint64_t disconnects;
    uint64_t slow_readers; /* dropped because they did not read */
    uint32_t connections;  /* open */
    uint64_t refused_connections;
    uint64_t http[6]; /* answers by hundreds of their status */
} metrics;

void metric_add(metric_histogram *h, double seconds);

/* resident_bytes: anonymous memory of the process. */
void metrics_write(const metrics *m, const fkv_engine_stats *stats, const char *model, uint64_t resident_bytes,
                   struct evbuffer *out);

#endif
