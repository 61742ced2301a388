/* Calibration statistics. A sample text is run through the model with a 16-bit cache. For each channel of each KV head, the
 * squared queries and the squared key ranges within a page are summed. An error in a key changes a score by the product of the
 * error and the query, and the quantization error is proportional to the key range. When bits are assigned, the cost of a channel
 * is therefore the product of its two sums.
 *
 * CPU only: the forward pass reports queries and keys through fkv_runner.observe before they are written to the cache.
 */
#include "runner.h"

#include "../calibration.h"

#include <math.h>
#include <stdlib.h>

enum { PAGE = 64, CHUNK = 512, WINDOW = 2048 }; /* sizes in tokens; CHUNK is a multiple of PAGE */

typedef struct statistics {
    fkv_runner *runner;
    fkv_calibration_layer layers[FKV_MAX_LAYERS];
    uint32_t n_layers;
    size_t first[FKV_MAX_LAYERS]; /* index of the layer's first channel */
    double *queries;              /* [channels] sum of the squared queries of each channel */
    double *ranges;               /* [channels] sum of the squared key ranges of each channel over all pages */
} statistics;

static void add_queries(const statistics *s, uint32_t layer, const float *q, uint32_t n_rows) {
    uint32_t n_q_heads = s->runner->model->hparams->n_q_heads;
    uint32_t heads_per_kv = n_q_heads / s->layers[layer].n_kv_heads;
    size_t dim = s->layers[layer].head_dim;
    for (size_t row = 0; row < n_rows; row++) {
        for (uint32_t h = 0; h < n_q_heads; h++) {
            const float *x = q + (row * n_q_heads + h) * dim;
            double *sum = s->queries + s->first[layer] + h / heads_per_kv * dim;
            for (size_t d = 0; d < dim; d++) sum[d] += (double)x[d] * (double)x[d];
        }
    }
}

/* Adds the squared key range of each channel within one page. k: [PAGE, G * D] */
static void add_ranges(const statistics *s, uint32_t layer, const float *k) {
    size_t row = (size_t)s->layers[layer].n_kv_heads * s->layers[layer].head_dim;
    for (size_t c = 0; c < row; c++) {
        float lo = k[c];
        float hi = k[c];
        for (size_t t = 1; t < PAGE; t++) {
            lo = fminf(lo, k[t * row + c]);
            hi = fmaxf(hi, k[t * row + c]);
        }
        s->ranges[s->first[layer] + c] += ((double)hi - (double)lo) * ((double)hi - (double)lo);
    }
}

/* Adds the queries and keys of one chunk to the statistics. Skips the keys of the first page of a sequence, because this page is
 * never sealed and contains attention sinks. */
static void add_observation(void *user, uint32_t layer, const float *q, const float *k, uint32_t n_rows, uint32_t position) {
    const statistics *s = user;
    size_t row = (size_t)s->layers[layer].n_kv_heads * s->layers[layer].head_dim;
    add_queries(s, layer, q, n_rows);
    for (uint32_t t = position == 0 ? PAGE : 0; t + PAGE <= n_rows; t += PAGE) add_ranges(s, layer, k + t * row);
}

/* Allocates the statistics of all layers that store keys. Queries of layers that attend to the keys of another layer are
 * ignored. */
static fkv_status open_statistics(const fkv_model *model, statistics *s) {
    const fkv_hparams *h = model->hparams;
    size_t n = 0;
    s->n_layers = fkv_architecture_n_kv_layers(h);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        s->layers[i] = (fkv_calibration_layer){h->shapes[i].n_kv_heads, fkv_runner_head_pad(s->runner, h->shapes[i].head_dim)};
        s->first[i] = n;
        n += (size_t)s->layers[i].n_kv_heads * s->layers[i].head_dim;
    }
    FKV_REQUIRE(n > 0, FKV_UNSUPPORTED, "the model stores no keys to calibrate");
    s->queries = calloc(n, sizeof *s->queries);
    s->ranges = calloc(n, sizeof *s->ranges);
    FKV_REQUIRE(s->queries != NULL && s->ranges != NULL, FKV_NO_MEMORY,
                "out of memory allocating calibration statistics for %zu channels", n);
    s->runner->observe = add_observation;
    s->runner->observer = s;
    return FKV_OK;
}

static fkv_status run_window(const fkv_model *model, fkv_runner *runner, const uint32_t *tokens) {
    fkv_seq seq = 0;
    uint32_t chunk[CHUNK];
    FKV_TRY(fkv_seq_open(fkv_runner_cache(runner), &(fkv_seq_config){.max_tokens = WINDOW}, &seq, NULL));
    fkv_status status = FKV_OK;
    for (uint32_t at = 0; status == FKV_OK && at < WINDOW; at += CHUNK) {
        memcpy(chunk, tokens + at, sizeof chunk);
        if (at == 0 && model->info.add_bos) chunk[0] = model->info.bos;
        status = fkv_runner_forward(runner, &(fkv_tokens){.seq = seq, .tokens = chunk, .n_tokens = CHUNK}, 1, NULL);
    }
    fkv_status closed = fkv_seq_close(fkv_runner_cache(runner), seq);
    return status != FKV_OK ? status : closed;
}

static fkv_status run_text(const fkv_model *model, const fkv_calibrate_config *c, fkv_runner *runner) {
    for (size_t at = 0; at + WINDOW <= c->n_tokens; at += WINDOW) {
        FKV_TRY(run_window(model, runner, c->tokens + at));
        FKV_REQUIRE(c->progress == NULL || c->progress(c->user, at + WINDOW, c->n_tokens), FKV_BAD_STATE,
                    "calibration was stopped after %zu tokens", at + WINDOW);
    }
    return FKV_OK;
}

static void assign_bits(const statistics *s, fkv_calibration *calibration) {
    uint8_t *both = calibration->both;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        uint32_t dim = s->layers[l].head_dim;
        for (uint32_t h = 0; h < s->layers[l].n_kv_heads; h++, both += dim) {
            double cost[FKV_MAX_HEAD_DIM];
            uint8_t bits[FKV_MAX_HEAD_DIM];
            size_t at = s->first[l] + (size_t)h * dim;
            for (uint32_t d = 0; d < dim; d++) {
                cost[d] = s->queries[at + d] * s->ranges[at + d];
                if (!isfinite(cost[d])) cost[d] = 0;
            }
            fkv_channels_share(cost, dim, 4, both);
            fkv_channels_share(cost, dim, 3, bits);
            for (uint32_t d = 0; d < dim; d++) both[d] = (uint8_t)(both[d] | bits[d] << 4);
        }
    }
}

static fkv_status write_calibration(const fkv_model *model, const statistics *s, uint64_t n_tokens, const char *path) {
    fkv_calibration calibration = {0};
    FKV_TRY(fkv_calibration_new(s->layers, s->n_layers, model->info.weights_id, &calibration));
    calibration.n_tokens = n_tokens;
    assign_bits(s, &calibration);
    fkv_status status = fkv_calibration_write(&calibration, path);
    fkv_calibration_close(&calibration);
    return status;
}

static fkv_status calibrate(const fkv_model *model, const fkv_calibrate_config *config, const char *path, statistics *s) {
    fkv_runner_config c = fkv_runner_config_default();
    c.max_tokens = WINDOW;
    c.max_step_tokens = CHUNK;
    c.k = c.v = (fkv_codec_config){.bits = 16};
    c.rotate = FKV_ROTATE_NONE;
    c.n_threads = config->n_threads;
    FKV_TRY(fkv_runner_open(model, &c, &s->runner));
    FKV_TRY(open_statistics(model, s));
    FKV_TRY(run_text(model, config, s->runner));
    return write_calibration(model, s, config->n_tokens / WINDOW * WINDOW, path);
}

fkv_status fkv_calibrate(const fkv_model *model, const fkv_calibrate_config *config, const char *path) {
    FKV_REQUIRE(model != NULL && config != NULL && path != NULL && config->tokens != NULL, FKV_BAD_ARGUMENT,
                "fkv_calibrate: model, config, config->tokens or path is NULL");
    FKV_REQUIRE(model->config.backend == FKV_BACKEND_CPU, FKV_UNSUPPORTED,
                "calibration requires a model loaded for the CPU backend; the file is valid for every backend");
    FKV_REQUIRE(!fkv_architecture_is_latent(model->hparams), FKV_UNSUPPORTED,
                "models with latent attention cannot be calibrated, because their pages have no scales per channel");
    FKV_REQUIRE(config->n_tokens >= WINDOW, FKV_BAD_ARGUMENT,
                "the calibration text has %zu tokens, but at least %d tokens (one window of %d) are required", config->n_tokens,
                WINDOW, WINDOW);
    statistics *s = calloc(1, sizeof *s);
    FKV_REQUIRE(s != NULL, FKV_NO_MEMORY, "out of memory allocating calibration statistics");
    fkv_status status = calibrate(model, config, path, s);
    fkv_runner_close(s->runner);
    free(s->queries);
    free(s->ranges);
    free(s);
    return status;
}
