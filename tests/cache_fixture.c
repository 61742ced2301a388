/* See cache_fixture.h. */
#include "cache_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 512 };

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "cache_fixture: %s: %s\n", what, fkv_message());
    abort();
}

static void *allocate(size_t bytes) {
    void *block = malloc(bytes > 0 ? bytes : 1);
    must(block != NULL, "malloc");
    return block;
}

/* ---- random numbers ---- */

static uint64_t mix(uint64_t x) { /* final mixing step of splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void cache_tokens(uint64_t seed, uint32_t *tokens, uint32_t n_tokens) {
    for (uint32_t i = 0; i < n_tokens; i++) tokens[i] = (uint32_t)(mix(mix(seed) + i) % 100000);
}

/* Conversions to and from 16-bit floats, written from the format definitions and independent of the library. They support only
 * finite values that are well below the largest f16. */
static uint16_t to_f16(float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent = 0;
    float fraction = frexpf(fabsf(x), &exponent); /* value in [0.5, 1) */
    if (x == 0.0f) return sign;
    if (exponent < -13) return (uint16_t)(sign | (uint16_t)rintf(ldexpf(fabsf(x), 24)));
    return (uint16_t)(sign | (uint16_t)((exponent + 14) * 1024 + (int)rintf(fraction * 2048.0f) - 1024));
}

static float from_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    int fraction = bits & 1023;
    float size = exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(fraction + 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
}

static uint16_t to_bf16(float x) {
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x = 0;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static size_t type_bytes(fkv_type type) { return type == FKV_F32 ? 4 : 2; }

static void store(fkv_type type, float x, uint8_t *to) {
    uint16_t half = type == FKV_F16 ? to_f16(x) : to_bf16(x);
    if (type == FKV_F32)
        memcpy(to, &x, sizeof x);
    else
        memcpy(to, &half, sizeof half);
}

static float load(fkv_type type, const uint8_t *from) {
    uint16_t half = 0;
    float x = 0;
    if (type == FKV_F32) {
        memcpy(&x, from, sizeof x);
        return x;
    }
    memcpy(&half, from, sizeof half);
    return type == FKV_F16 ? from_f16(half) : from_bf16(half);
}

/* Approximates a standard normal variable by the sum of four uniform variables, each computed from 16 bits of the hash. */
static float gaussian(uint64_t hash) {
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(hash >> 16 * i & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
}

/* Returns the number of values in a row of a layer. */
static uint32_t row_dim(const fkv_layer_config *l, cache_side side) { return l->head_dim + (side == CACHE_V ? 0 : l->rope_dim); }

static void make_row(const cache_fixture *w, cache_side side, uint32_t token, uint32_t position, uint32_t layer, uint32_t head,
                     uint8_t *to) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    uint32_t dim = row_dim(l, side);
    if (l->rope_dim != 0 && side == CACHE_V) side = CACHE_K;
    size_t bytes = type_bytes(w->config.row_type);
    uint64_t row = mix(mix(mix(w->seed ^ (uint64_t)token << 32) + position) + (layer * 3 + (uint64_t)side) * 65536 + head);
    for (uint32_t d = 0; d < dim; d++) {
        float x = gaussian(mix(row + d * 0x9e3779b97f4a7c15u));
        if (side == CACHE_K && (d == 3 || d == dim - 2)) x *= w->outliers;
        store(w->config.row_type, x, to + d * bytes);
    }
}

void cache_fixture_row(const cache_fixture *w, cache_side side, uint32_t token, uint32_t position, uint32_t layer, uint32_t head,
                       float *row) {
    uint8_t bytes[2 * FKV_MAX_HEAD_DIM * 4];
    make_row(w, side, token, position, layer, head, bytes);
    for (uint32_t d = 0; d < row_dim(cache_fixture_layer(w, layer), side); d++)
        row[d] = load(w->config.row_type, bytes + d * type_bytes(w->config.row_type));
}

/* ---- cache ---- */

const fkv_layer_config *cache_fixture_layer(const cache_fixture *w, uint32_t layer) {
    return w->config.layers != NULL ? &w->layers[layer] : &w->config.layer;
}

static size_t layer_output_bytes(const cache_fixture *w, uint32_t layer) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    return (size_t)l->n_q_heads * l->head_dim * type_bytes(w->config.row_type);
}

fkv_status cache_fixture_open(cache_fixture *w, const fkv_config *config) {
    *w = (cache_fixture){.config = *config, .seed = 1, .outliers = 1.0f};
    if (config->layers != NULL) {
        must(config->n_layers <= CACHE_FIXTURE_LAYERS, "too many layers");
        memcpy(w->layers, config->layers, config->n_layers * sizeof w->layers[0]);
    }
    fkv_status status = fkv_cache_open(config, &w->cache);
    if (status != FKV_OK) return status;
    if (config->layers != NULL) w->config.layers = w->layers;
    size_t most = 0;
    for (uint32_t i = 0; i < config->n_layers; i++) {
        const fkv_layer_config *l = cache_fixture_layer(w, i);
        size_t bytes = (size_t)l->n_q_heads * row_dim(l, CACHE_Q) * type_bytes(config->row_type);
        w->output_bytes += layer_output_bytes(w, i);
        if (bytes > most) most = bytes;
    }
    for (int i = 0; i < 3; i++) w->rows[i] = allocate(most * config->max_step_tokens);
    w->out = allocate(most * config->max_step_tokens);
    return FKV_OK;
}

void cache_fixture_close(cache_fixture *w) {
    fkv_cache_close(w->cache);
    for (int i = 0; i < 3; i++) free(w->rows[i]);
    free(w->out);
}

fkv_seq cache_fixture_seq(cache_fixture *w, uint32_t max_tokens) {
    fkv_seq seq = 0;
    must(fkv_seq_open(w->cache, &(fkv_seq_config){.max_tokens = max_tokens}, &seq, NULL) == FKV_OK, "fkv_seq_open");
    return seq;
}

uint32_t cache_fixture_length(const cache_fixture *w, fkv_seq seq) {
    uint32_t n_tokens = 0;
    must(fkv_seq_length(w->cache, seq, &n_tokens) == FKV_OK, "fkv_seq_length");
    return n_tokens;
}

fkv_stats cache_fixture_stats(const cache_fixture *w) {
    fkv_stats stats;
    must(fkv_cache_stats(w->cache, &stats) == FKV_OK, "fkv_cache_stats");
    return stats;
}

/* ---- steps ---- */

static void make_rows(cache_fixture *w, cache_side side, const cache_chunk *chunks, uint32_t n_chunks, uint32_t layer) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    uint32_t n_heads = side == CACHE_Q ? l->n_q_heads : l->n_kv_heads;
    uint8_t *to = w->rows[side];
    for (uint32_t c = 0; c < n_chunks; c++) {
        for (uint32_t i = 0; i < chunks[c].n_tokens; i++) {
            uint32_t position = chunks[c].first + i;
            for (uint32_t head = 0; head < n_heads; head++) {
                make_row(w, side, chunks[c].tokens[position], position, layer, head, to);
                to += row_dim(l, side) * type_bytes(w->config.row_type);
            }
        }
    }
}

fkv_status cache_fixture_write(cache_fixture *w, fkv_step *step, const cache_chunk *chunks, uint32_t n_chunks, uint32_t layer) {
    make_rows(w, CACHE_K, chunks, n_chunks, layer);
    if (cache_fixture_layer(w, layer)->rope_dim != 0) return fkv_write(step, layer, w->rows[CACHE_K], NULL);
    make_rows(w, CACHE_V, chunks, n_chunks, layer);
    return fkv_write(step, layer, w->rows[CACHE_K], w->rows[CACHE_V]);
}

static void keep_outputs(const cache_fixture *w, const cache_chunk *chunks, uint32_t n_chunks, uint32_t layer) {
    size_t bytes = layer_output_bytes(w, layer);
    size_t before = 0;
    for (uint32_t l = 0; l < layer; l++) before += layer_output_bytes(w, l);
    const uint8_t *from = w->out;
    for (uint32_t c = 0; c < n_chunks; c++) {
        for (uint32_t i = 0; i < chunks[c].n_tokens; i++, from += bytes) {
            if (chunks[c].outputs == NULL) continue;
            memcpy(chunks[c].outputs + (chunks[c].first + i) * w->output_bytes + before, from, bytes);
        }
    }
}

void cache_fixture_step(cache_fixture *w, const cache_chunk *chunks, uint32_t n_chunks, cache_ending ending) {
    enum { MOST = 64 };
    fkv_row rows[MOST];
    fkv_step *step = NULL;
    must(n_chunks <= MOST, "too many chunks");
    for (uint32_t c = 0; c < n_chunks; c++) rows[c] = (fkv_row){chunks[c].seq, chunks[c].n_tokens};
    must(fkv_step_begin(w->cache, rows, n_chunks, &step) == FKV_OK, "fkv_step_begin");
    for (uint32_t layer = 0; layer < w->config.n_layers; layer++) {
        must(cache_fixture_write(w, step, chunks, n_chunks, layer) == FKV_OK, "fkv_write");
        make_rows(w, CACHE_Q, chunks, n_chunks, layer);
        must(fkv_attend(step, layer, w->rows[CACHE_Q], w->out) == FKV_OK, "fkv_attend");
        keep_outputs(w, chunks, n_chunks, layer);
    }
    fkv_status ended = ending == CACHE_COMMIT ? fkv_step_commit(step) : fkv_step_abort(step);
    must(ended == FKV_OK, "fkv_step_commit or fkv_step_abort");
}

void cache_fixture_run(cache_fixture *w, fkv_seq seq, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t chunk,
                       uint8_t *outputs) {
    while (from < to) {
        uint32_t n = to - from < chunk ? to - from : chunk;
        cache_fixture_step(w, &(cache_chunk){seq, tokens, from, n, outputs}, 1, CACHE_COMMIT);
        from += n;
    }
}

/* ---- reference ---- */

static bool is_visible(const fkv_layer_config *l, uint32_t query, uint32_t position) {
    if (position > query) return false;
    return l->window == 0 || position < l->n_sinks || query - position < l->window;
}

/* Returns all rows of a sequence as [n_tokens, G, row_dim()]. The caller frees them. */
static float *rows_of(const cache_fixture *w, cache_side side, const uint32_t *tokens, uint32_t n_tokens, uint32_t layer) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    float *rows = allocate((size_t)n_tokens * l->n_kv_heads * row_dim(l, side) * sizeof *rows);
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t head = 0; head < l->n_kv_heads; head++)
            cache_fixture_row(w, side, tokens[t], t, layer, head, rows + ((size_t)t * l->n_kv_heads + head) * row_dim(l, side));
    return rows;
}

/* Computes attention for one query head. k, v: first row of the KV head. scores: scratch for position + 1 scores. */
static void attend_head(const fkv_layer_config *l, uint32_t q_head, const float *q, const float *k, const float *v,
                        uint32_t position, double *scores, float *out) {
    const size_t k_stride = (size_t)l->n_kv_heads * row_dim(l, CACHE_K);
    const size_t v_stride = (size_t)l->n_kv_heads * row_dim(l, CACHE_V);
    double scale = l->scale != 0.0f ? (double)l->scale : 1.0 / sqrt((double)l->head_dim);
    double sum[FKV_MAX_HEAD_DIM] = {0};
    double largest = -INFINITY;
    double total = 0;
    for (uint32_t t = 0; t <= position; t++) {
        if (!is_visible(l, position, t)) continue;
        double score = 0;
        for (uint32_t d = 0; d < row_dim(l, CACHE_K); d++) score += (double)q[d] * (double)k[t * k_stride + d];
        score *= scale;
        if (l->softcap > 0.0f) score = (double)l->softcap * tanh(score / (double)l->softcap);
        scores[t] = score;
        if (score > largest) largest = score;
    }
    if (l->sink_logits != NULL) total = exp((double)l->sink_logits[q_head] - largest);
    for (uint32_t t = 0; t <= position; t++) {
        if (!is_visible(l, position, t)) continue;
        double weight = exp(scores[t] - largest);
        total += weight;
        for (uint32_t d = 0; d < l->head_dim; d++) sum[d] += weight * (double)v[t * v_stride + d];
    }
    for (uint32_t d = 0; d < l->head_dim; d++) out[d] = (float)(sum[d] / total);
}

void cache_fixture_reference(const cache_fixture *w, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t layer,
                             float *out) {
    const fkv_layer_config *l = cache_fixture_layer(w, layer);
    float *k = rows_of(w, CACHE_K, tokens, to, layer);
    float *v = rows_of(w, CACHE_V, tokens, to, layer);
    double *scores = allocate(to * sizeof *scores);
    for (uint32_t position = from; position < to; position++) {
        for (uint32_t head = 0; head < l->n_q_heads; head++, out += l->head_dim) {
            float q[2 * FKV_MAX_HEAD_DIM];
            size_t kv_head = head / (l->n_q_heads / l->n_kv_heads);
            cache_fixture_row(w, CACHE_Q, tokens[position], position, layer, head, q);
            attend_head(l, head, q, k + kv_head * row_dim(l, CACHE_K), v + kv_head * row_dim(l, CACHE_V), position, scores, out);
        }
    }
    free(k);
    free(v);
    free(scores);
}

void cache_fixture_output(const cache_fixture *w, const uint8_t *outputs, uint32_t position, uint32_t layer, float *out) {
    const uint8_t *from = outputs + position * w->output_bytes;
    for (uint32_t l = 0; l < layer; l++) from += layer_output_bytes(w, l);
    size_t bytes = type_bytes(w->config.row_type);
    size_t n = layer_output_bytes(w, layer) / bytes;
    for (size_t i = 0; i < n; i++) out[i] = load(w->config.row_type, from + i * bytes);
}

/* ---- process and files ---- */

/* Returns the number after `key` in a /proc file, in bytes, or 0 if the key does not exist. */
static uint64_t proc_number(const char *path, const char *key) {
    char text[8192];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    size_t n = 0;
    ssize_t got = 0;
    while (n < sizeof text - 1 && (got = read(fd, text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    (void)close(fd);
    text[n] = 0;
    const char *at = strstr(text, key);
    return at != NULL ? strtoull(at + strlen(key), NULL, 10) * 1024 : 0;
}

uint64_t cache_anonymous_bytes(void) {
    /* /proc/self/smaps_rollup counts pages exactly; RssAnon in /proc/self/status may lag by a few pages per thread */
    uint64_t exact = proc_number("/proc/self/smaps_rollup", "\nAnonymous:");
    return exact != 0 ? exact : proc_number("/proc/self/status", "\nRssAnon:");
}

static char folder[PATH_BYTES / 2];

/* Deletes the temporary folder and its files at exit. */
static void remove_folder(void) {
    DIR *entries = opendir(folder);
    if (entries == NULL) return;
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        char path[PATH_BYTES + sizeof entry->d_name];
        (void)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) (void)unlink(path);
    }
    (void)closedir(entries);
    (void)rmdir(folder);
}

const char *cache_path(char *path, const char *name) {
    if (folder[0] == 0) {
        const char *parent = getenv("TMPDIR");
        int n = snprintf(folder, sizeof folder, "%s/flatkv-cache-XXXXXX", parent != NULL && parent[0] != 0 ? parent : "/tmp");
        must(n > 0 && (size_t)n < sizeof folder && mkdtemp(folder) != NULL, "cannot create the temporary folder");
        must(atexit(remove_folder) == 0, "atexit");
    }
    int n = snprintf(path, PATH_BYTES, "%s/%s", folder, name);
    must(n > 0 && n < PATH_BYTES, "path too long");
    return path;
}
