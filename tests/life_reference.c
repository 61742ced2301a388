/* See life_reference.h.
 *
 * Tolerance. Kernels add in float, the reference in double: 1e-3 relative L2, before the answer is rounded to the row type.
 * Gaussian rows under usual scales are held to that alone. Others may ask for what float cannot do: scores of size A = sum |q k|
 * are known to A * 2^-24 at best, kernels with integer products round a query to 24 bits of its largest number, and a sum of
 * values can cancel. For them, and only where 1e-3 was missed, the bound of the rounding errors is added (slack_of). A lost row,
 * a wrong mask or a wrong scale is far beyond it.
 */
#include "life_reference.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_BUCKETS = 1 << 16 };

static const uint32_t WITH_NAN = 0x80000000u; /* in the number of a token */

static const double TOLERANCE = 1e-3;
static const double SCORE_ERROR = 0x1p-21; /* of sum |q k| */
static const double VALUE_ERROR = 0x1p-17; /* of sum p |v| */
static const double LEAST_SCALE = 1e-7;    /* of an affine group, rows of zeros too */
static const double LEAST_WEIGHT = 1e-37;  /* below, exp() is 0 in float */
static const double FLOAT_HOLDS = 1e37;    /* sums of scores and of values above overflow in float */

/* ---- rows ---- */

static bool is_outlier(const life_config *c, uint32_t what, uint32_t dim, uint32_t d) {
    uint32_t first = c->outlier_channel[what];
    return d == first % dim || d == (first / 3 + 5) % dim || (what == LIFE_K && d == (first / 7 + 11) % dim);
}

/* A row like none that a model should give. */
static void odd_row(const life_config *c, life_random *r, uint32_t what, uint32_t dim, float *x) {
    uint32_t kind = life_below(r, c->numbers == LIFE_EXTREME ? 8 : 4);
    float base = life_gaussian(r);
    float most = c->base.page_type == FKV_F16 ? 65504.0f : LIFE_DOMAIN.bf16_most;
    if (what == LIFE_Q) most = LIFE_DOMAIN.query_most;
    for (uint32_t d = 0; d < dim; d++) {
        bool some = life_below(r, 16) == 0;
        switch (kind) {
        case 0: x[d] = LIFE_DOMAIN.zero_rows ? 0 : base; break;
        case 1: x[d] = base; break;
        case 2: x[d] = base * (1 + (float)(life_draw(r) & 3) * 1e-6f); break;
        case 3: x[d] *= 1e-7f; break;
        case 4: x[d] = x[d] > 0 ? most : -most; break;
        case 5: x[d] = some ? most : x[d]; break;
        case 6: x[d] = some ? NAN : x[d]; break;
        default: x[d] = some && what != LIFE_Q ? (x[d] > 0 ? most * 1.0009765625f : -most * 4) : x[d];
        }
    }
}

/* x: [D], exact in the row type. */
static void make_row(const life_world *w, const life_token *token, uint32_t layer, uint32_t what, uint32_t head, float *x) {
    const life_config *c = w->config;
    uint32_t dim = c->layers[layer].head_dim;
    life_random r = {life_mix(life_mix(token->chain, c->seed), (layer * 4 + what) * 4096 + head)};
    for (uint32_t d = 0; d < dim; d++) {
        x[d] = life_gaussian(&r) * (what == LIFE_Q ? c->query_size : 1);
        if (c->outlier[what] != 1 && is_outlier(c, what, dim, d)) x[d] *= c->outlier[what];
    }
    if (c->numbers != LIFE_GAUSSIAN && life_below(&r, 40) == 0) odd_row(c, &r, what, dim, x);
    for (uint32_t d = 0; d < dim && c->base.row_type != FKV_F32; d++)
        x[d] = life_from_half(c->base.row_type, life_to_half(c->base.row_type, x[d]));
}

static uint32_t heads_of(const life_world *w, uint32_t layer, uint32_t what) {
    const fkv_layer_config *l = &w->config->layers[layer];
    return what == LIFE_Q ? l->n_q_heads : l->n_kv_heads;
}

size_t life_rows_bytes(const life_world *w, uint32_t layer, uint32_t what) {
    size_t numbers = (size_t)heads_of(w, layer, what) * w->config->layers[layer].head_dim;
    return numbers * (w->config->base.row_type == FKV_F32 ? 4 : 2);
}

static void put_number(fkv_type type, uint8_t *rows, size_t i, float x) {
    uint16_t half = type == FKV_F32 ? 0 : life_to_half(type, x);
    if (type == FKV_F32)
        memcpy(rows + 4 * i, &x, 4);
    else
        memcpy(rows + 2 * i, &half, 2);
}

static float get_number(fkv_type type, const uint8_t *rows, size_t i) {
    uint16_t half = 0;
    float x = 0;
    memcpy(type == FKV_F32 ? (void *)&x : (void *)&half, rows + (type == FKV_F32 ? 4 : 2) * i, type == FKV_F32 ? 4 : 2);
    return type == FKV_F32 ? x : life_from_half(type, half);
}

void life_rows(const life_world *w, const life_token *token, uint32_t layer, uint32_t what, uint8_t *rows) {
    uint32_t dim = w->config->layers[layer].head_dim;
    for (uint32_t h = 0; h < heads_of(w, layer, what); h++) {
        float x[FKV_MAX_HEAD_DIM];
        make_row(w, token, layer, what, h, x);
        for (uint32_t d = 0; d < dim; d++) put_number(w->config->base.row_type, rows, (size_t)h * dim + d, x[d]);
    }
}

/* ---- tokens ---- */

static void *take(life_world *w, size_t bytes) {
    void *block = calloc(1, bytes + 1);
    if (block == NULL) life_fail("no memory for the reference");
    w->memory += bytes;
    return block;
}

void life_world_open(life_world *w, const life_config *config, uint32_t most_tokens) {
    *w = (life_world){.config = config, .n_layers = config->base.n_layers};
    for (uint32_t i = 0; i < w->n_layers; i++) {
        for (uint32_t side = 0; side < LIFE_N_SIDES; side++) {
            w->stored_at[i][side] = w->stored_floats;
            w->bytes_at[i][side] = w->stored_bytes;
            w->stored_floats += (size_t)config->layers[i].n_kv_heads * config->layers[i].head_dim;
            w->stored_bytes += (size_t)config->layers[i].n_kv_heads * life_row_bytes(&config->codec[i][side]);
            w->sealed_at[i][side] = w->sealed_floats;
            if (life_layer_is_sealed(config, i))
                w->sealed_floats += (size_t)config->base.page_tokens * config->layers[i].n_kv_heads * config->layers[i].head_dim;
        }
        w->blocks_at[i] = w->blocks_bytes;
        if (life_layer_is_sealed(config, i)) w->blocks_bytes += config->layers[i].n_kv_heads * life_sealed_block_bytes(config, i);
    }
    w->buckets = take(w, N_BUCKETS * sizeof(life_token *));
    w->weights = take(w, most_tokens * sizeof(double));
}

void life_world_close(life_world *w) {
    for (uint32_t i = 0; i < N_BUCKETS; i++) {
        for (life_token *t = w->buckets[i], *next = NULL; t != NULL; t = next) {
            next = t->next;
            free(t->stored);
            free(t->sealed);
            free(t->blocks);
            free(t->bytes);
            free(t->answers);
            free(t);
        }
    }
    free((void *)w->buckets);
    free(w->weights);
}

uint64_t life_chain_begin(const life_world *w, uint64_t tenant) { return life_mix(w->config->seed, tenant); }

static void store(const life_world *w, life_token *token) {
    for (uint32_t i = 0; i < w->n_layers; i++) {
        uint32_t dim = w->config->layers[i].head_dim;
        for (uint32_t side = 0; side < LIFE_N_SIDES; side++) {
            const life_codec *codec = &w->config->codec[i][side];
            for (uint32_t head = 0; head < w->config->layers[i].n_kv_heads; head++) {
                float x[FKV_MAX_HEAD_DIM];
                uint8_t *bytes = token->bytes + w->bytes_at[i][side] + (size_t)head * life_row_bytes(codec);
                make_row(w, token, i, side, head, x);
                life_encode(codec, x, bytes);
                life_decode(codec, bytes, token->stored + w->stored_at[i][side] + (size_t)head * dim);
            }
        }
    }
}

life_token *life_token_after(life_world *w, uint64_t before, uint32_t position, uint32_t id) {
    uint64_t chain = life_mix(before, id);
    life_token **bucket = &w->buckets[chain % N_BUCKETS];
    for (life_token *t = *bucket; t != NULL; t = t->next)
        if (t->chain == chain) return t;
    life_token *token = take(w, sizeof *token);
    *token = (life_token){.chain = chain, .id = id, .position = position, .next = *bucket};
    token->stored = take(w, w->stored_floats * sizeof(float));
    token->bytes = take(w, w->stored_bytes);
    token->answers = take(w, w->n_layers * sizeof(uint64_t));
    store(w, token);
    *bucket = token;
    return token;
}

life_token *life_token_with_nan(life_world *w, uint64_t before, uint32_t position, uint32_t id) {
    life_token *token = life_token_after(w, before, position, id | WITH_NAN); /* no other token has such a number */
    life_random r = {token->chain};
    uint32_t layer = life_below(&r, w->n_layers);
    uint32_t side = life_below(&r, LIFE_N_SIDES);
    uint32_t head = life_below(&r, w->config->layers[layer].n_kv_heads);
    const life_codec *codec = &w->config->codec[layer][side];
    uint32_t part = codec->bits == 16 ? 0 : life_part_bytes(codec, 2) == 0 ? 1 : life_between(&r, 1, 2);
    uint32_t at = (part >= 1 ? life_part_bytes(codec, 0) : 0) + (part == 2 ? life_part_bytes(codec, 1) : 0);
    uint8_t *bytes = token->bytes + w->bytes_at[layer][side] + (size_t)head * life_row_bytes(codec);
    at += life_below(&r, life_part_bytes(codec, part) / 2) * 2;
    bytes[at] = 0xff;
    bytes[at + 1] = 0x7f; /* NaN in either type */
    life_decode(codec, bytes, token->stored + w->stored_at[layer][side] + (size_t)head * codec->dim);
    return token;
}

const uint8_t *life_stored_row(const life_world *w, const life_token *token, uint32_t layer, uint32_t side, uint32_t head) {
    return token->bytes + w->bytes_at[layer][side] + (size_t)head * life_row_bytes(&w->config->codec[layer][side]);
}

/* ---- sealed pages ---- */

static size_t aligned_part(const life_codec *c, uint32_t part, uint32_t page_tokens) {
    return (life_page_part_bytes(c, part, page_tokens) + 63) / 64 * 64;
}

size_t life_sealed_block_bytes(const life_config *c, uint32_t layer) {
    size_t n = 0;
    for (uint32_t i = 0; i < LIFE_N_SIDES * LIFE_PARTS; i++)
        n += aligned_part(&c->sealed[layer][i / LIFE_PARTS], i % LIFE_PARTS, c->base.page_tokens);
    return n;
}

/* One head of one layer: of what the open rows stand for. */
static void seal_head(const life_world *w, life_token *const *page, uint32_t layer, uint32_t head, life_token *to) {
    static float rows[256 * FKV_MAX_HEAD_DIM];
    uint32_t dim = w->config->layers[layer].head_dim;
    uint32_t n_heads = w->config->layers[layer].n_kv_heads;
    uint32_t n = w->config->base.page_tokens;
    uint8_t *at = to->blocks + w->blocks_at[layer] + head * life_sealed_block_bytes(w->config, layer);
    for (uint32_t side = 0; side < LIFE_N_SIDES; side++) {
        life_codec of_head = w->config->sealed[layer][side];
        if (of_head.channel_bits != NULL) of_head.channel_bits += (size_t)head * dim;
        const life_codec *codec = &of_head;
        uint8_t *part[LIFE_PARTS];
        for (uint32_t p = 0; p < LIFE_PARTS; p++) {
            part[p] = at;
            at += aligned_part(codec, p, n);
        }
        for (uint32_t t = 0; t < n; t++)
            memcpy(rows + (size_t)t * dim, page[t]->stored + w->stored_at[layer][side] + (size_t)head * dim, dim * sizeof(float));
        life_seal(codec, rows, n, part);
        for (uint32_t t = 0; t < n; t++)
            life_decode_at(codec, part, t, to->sealed + w->sealed_at[layer][side] + ((size_t)t * n_heads + head) * dim);
    }
}

/* The token that ends a page, with the page sealed: its chain is the history of all the page's tokens. */
static const life_token *sealed_page(life_world *w, life_token *const *history, uint32_t page) {
    uint32_t n = w->config->base.page_tokens;
    life_token *end = history[(size_t)(page + 1) * n - 1];
    if (end->sealed != NULL) return end;
    end->sealed = take(w, w->sealed_floats * sizeof(float));
    end->blocks = take(w, w->blocks_bytes);
    for (uint32_t i = 0; i < w->n_layers; i++)
        for (uint32_t head = 0; head < w->config->layers[i].n_kv_heads && life_layer_is_sealed(w->config, i); head++)
            seal_head(w, history + (size_t)page * n, i, head, end);
    return end;
}

const uint8_t *life_sealed_block(life_world *w, life_token *const *history, uint32_t page, uint32_t layer, uint32_t head) {
    return sealed_page(w, history, page)->blocks + w->blocks_at[layer] + head * life_sealed_block_bytes(w->config, layer);
}

/* ---- attention ---- */

typedef struct question {
    life_world *world;
    life_token *const *history;
    uint32_t n;
    uint32_t layer;
    uint32_t head; /* of the queries */
    double q[FKV_MAX_HEAD_DIM];
} question;

typedef struct reply {
    double out[FKV_MAX_HEAD_DIM];
} reply;

static double dot(const double *a, const float *b, uint32_t n) {
    double sum[8] = {0};
    for (uint32_t d = 0; d < n; d += 8)
        for (uint32_t i = 0; i < 8; i++) sum[i] += a[d + i] * (double)b[d + i];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* A query of a sealed layer sees the span of pages that it is in and the first page open, all others sealed. */
static bool is_seen_sealed(const question *x, uint32_t t) {
    uint32_t page_tokens = x->world->config->base.page_tokens;
    uint32_t page = t / page_tokens;
    return life_layer_is_sealed(x->world->config, x->layer) && page != 0 &&
           page / LIFE_SPAN != (x->n - 1) / page_tokens / LIFE_SPAN;
}

static const float *stored_row(const question *x, uint32_t t, uint32_t side) {
    const fkv_layer_config *l = &x->world->config->layers[x->layer];
    uint32_t head = x->head / (l->n_q_heads / l->n_kv_heads);
    if (is_seen_sealed(x, t)) {
        uint32_t page_tokens = x->world->config->base.page_tokens;
        const life_token *page = sealed_page(x->world, x->history, t / page_tokens);
        return page->sealed + x->world->sealed_at[x->layer][side] +
               ((size_t)(t % page_tokens) * l->n_kv_heads + head) * l->head_dim;
    }
    return x->history[t]->stored + x->world->stored_at[x->layer][side] + (size_t)head * l->head_dim;
}

static bool in_sight(const fkv_layer_config *l, uint32_t query, uint32_t t) {
    return l->window == 0 || t < l->n_sinks || query - t < l->window;
}

static double scale_of(const fkv_layer_config *l) { return l->scale != 0 ? (double)l->scale : 1.0 / sqrt((double)l->head_dim); }

static void ask(const question *x, reply *to) {
    const fkv_layer_config *l = &x->world->config->layers[x->layer];
    double *weights = x->world->weights;
    double scale = scale_of(l);
    double most = -INFINITY;
    double nan = 0; /* a score that is not a number makes every channel one */
    *to = (reply){.out = {0}};
    for (uint32_t t = 0; t < x->n; t++) {
        if (!in_sight(l, x->n - 1, t)) continue;
        double score = dot(x->q, stored_row(x, t, LIFE_K), l->head_dim) * scale;
        if (isnan(score)) nan = score;
        if (l->softcap > 0) score = (double)l->softcap * tanh(score / (double)l->softcap);
        weights[t] = score;
        most = fmax(most, score);
    }
    double total = l->sink_logits != NULL ? exp((double)l->sink_logits[x->head] - most) : 0;
    for (uint32_t t = 0; t < x->n; t++) {
        if (!in_sight(l, x->n - 1, t)) continue;
        double p = exp(weights[t] - most);
        const float *v = stored_row(x, t, LIFE_V);
        weights[t] = p;
        total += p;
        for (uint32_t d = 0; d < l->head_dim; d++) to->out[d] += p * (double)v[d];
    }
    for (uint32_t d = 0; d < l->head_dim; d++) to->out[d] = to->out[d] / total + nan;
    const life_codec *v = &x->world->config->codec[x->layer][LIFE_V];
    if (v->rotated) life_rotate_back(v, to->out);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool has_integer_products(const question *x) {
    const life_codec *k = &x->world->config->codec[x->layer][LIFE_K];
    bool coded = k->bits == 8 || k->bits == 4 || k->kind == FKV_CODEC_TURBO || life_layer_is_sealed(x->world->config, x->layer);
    return x->world->config->base.isa >= FKV_ISA_AVX512VNNI && coded;
}

/* What a kernel with integer products may do to each number of the query. Rows that have more than an eighth of their numbers
 * below 1/1024 of the largest are left to floats. */
static double query_error(const question *x) {
    uint32_t dim = x->world->config->layers[x->layer].head_dim;
    if (!has_integer_products(x)) return 0;
    double size[FKV_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < dim; d++) size[d] = fabs(x->q[d]);
    qsort(size, dim, sizeof *size, by_size);
    return fmin(size[dim - 1], 1024 * size[dim / 8]) * 0x1p-24;
}

/* Of one score, where scale * sum(q * code) and bias * sum(q) are rounded before they cancel. */
static double bias_error(const question *x, const float *k) {
    const life_codec *codec = &x->world->config->codec[x->layer][LIFE_K];
    double error = 0;
    if (!LIFE_DOMAIN.bias_apart || !has_integer_products(x)) return 0;
    for (uint32_t g = 0; g < codec->dim; g += codec->group) {
        double largest = 0;
        double sum = 0;
        for (uint32_t d = g; d < g + codec->group; d++) {
            largest = fmax(largest, fabs((double)k[d]));
            sum += fabs(x->q[d]);
        }
        error += largest * sum * 8 * SCORE_ERROR;
    }
    return error;
}

/* What rounding may do to this answer beyond the tolerance, infinite where float sums overflow; ask() has left the weights. */
static double slack_of(const question *x) {
    const fkv_layer_config *l = &x->world->config->layers[x->layer];
    double largest = 0; /* error of a score */
    double of_query = query_error(x);
    double values = 0; /* sum p |v| */
    double norms = 0;  /* sum |v| */
    double most = 0;   /* largest |v| */
    double total = 0;
    for (uint32_t t = 0; t < x->n; t++) {
        if (!in_sight(l, x->n - 1, t)) continue;
        const float *k = stored_row(x, t, LIFE_K);
        const float *v = stored_row(x, t, LIFE_V);
        double size = bias_error(x, k);
        double norm = 0;
        for (uint32_t d = 0; d < l->head_dim; d++) {
            size += fabs(x->q[d] * (double)k[d]) * SCORE_ERROR + of_query * fabs((double)k[d]);
            norm += (double)v[d] * (double)v[d];
        }
        largest = fmax(largest, size * fabs(scale_of(l)));
        values += x->world->weights[t] * sqrt(norm);
        norms += sqrt(norm);
        most = fmax(most, sqrt(norm));
        total += x->world->weights[t];
    }
    if (largest > FLOAT_HOLDS * SCORE_ERROR || values > FLOAT_HOLDS) return (double)INFINITY;
    const life_codec *v = &x->world->config->codec[x->layer][LIFE_V];
    double least = v->bits == 16 ? 0 : LEAST_SCALE * ((1u << v->bits) - 1) * sqrt((double)l->head_dim);
    if (largest > 1.0 / 16) return 2 * most; /* scores say nothing any more: any mean of the values */
    return (4 * largest + VALUE_ERROR) * values / total + VALUE_ERROR * least + LEAST_WEIGHT * norms;
}

/* ---- answers ---- */

typedef struct distance {
    double error; /* L2 */
    double size;  /* of the truth, L2 */
    bool nan;     /* somewhere in the answer */
    bool truth_nan;
    bool hidden_nan; /* in the truth, not in the answer */
} distance;

/* Half a unit in the last place of the row type: what rounding the answer may do. */
static double rounding_of(fkv_type type, double x) {
    if (type == FKV_F32 || x == 0 || !isfinite(x)) return 0;
    int exponent = ilogb(x);
    if (type == FKV_BF16) return ldexp(1, exponent - 8);
    return ldexp(1, (exponent < -14 ? -14 : exponent) - 11);
}

/* How far a number of the answer is from the truth, rounding apart. Infinite in fp16 is anything from the largest number on. */
static double apart(fkv_type type, double got, double truth) {
    double largest = copysign(65504 * (1 - TOLERANCE), got);
    if (isnan(got)) return (double)NAN;
    if (type == FKV_F16 && isinf(got)) return truth / largest >= 1 ? 0 : fabs(truth - largest);
    return fmax(fabs(got - truth) - rounding_of(type, fmax(fabs(got), fabs(truth))), 0);
}

static distance distance_of(fkv_type type, const uint8_t *answer, const double *truth, uint32_t dim) {
    distance between = {.nan = false};
    double error = 0;
    double size = 0;
    for (uint32_t d = 0; d < dim; d++) {
        double got = (double)get_number(type, answer, d);
        double difference = apart(type, got, truth[d]);
        between.nan = between.nan || isnan(got);
        between.truth_nan = between.truth_nan || isnan(truth[d]);
        between.hidden_nan = between.hidden_nan || (isnan(truth[d]) && !isnan(got));
        error += difference * difference;
        size += truth[d] * truth[d];
    }
    between.error = sqrt(error);
    between.size = sqrt(size);
    return between;
}

static void check_head(question *x, const uint8_t *answer) {
    life_world *w = x->world;
    const life_config *c = w->config;
    const fkv_layer_config *l = &c->layers[x->layer];
    const life_token *token = x->history[x->n - 1];
    float q[FKV_MAX_HEAD_DIM];
    make_row(w, token, x->layer, LIFE_Q, x->head, q);
    for (uint32_t d = 0; d < l->head_dim; d++) x->q[d] = (double)q[d];
    if (c->codec[x->layer][LIFE_K].rotated) life_rotate(&c->codec[x->layer][LIFE_K], x->q);
    reply truth;
    ask(x, &truth);
    distance between = distance_of(c->base.row_type, answer, truth.out, l->head_dim);
    w->n_answers++;
    bool over_sealed = life_layer_is_sealed(c, x->layer) && x->n > 2 * c->base.page_tokens;
    w->n_sealed += over_sealed;
    w->n_calibrated += over_sealed && l->k.kind == FKV_CODEC_CALIBRATED;
    w->n_turbo += c->codec[x->layer][LIFE_K].kind == FKV_CODEC_TURBO || c->codec[x->layer][LIFE_V].kind == FKV_CODEC_TURBO;
    if (between.hidden_nan)
        life_fail("layer %u head %u position %u: what is not a number has an answer", x->layer, x->head, token->position);
    if (between.nan && between.truth_nan) return; /* how far it spreads over the channels is the kernel's affair */
    double allowed = TOLERANCE * between.size;
    if (between.error <= allowed) {
        if (c->base.row_type == FKV_F32 && between.size > 1e-30) w->worst = fmax(w->worst, between.error / between.size);
        return;
    }
    bool usual = c->numbers == LIFE_GAUSSIAN && fabs(scale_of(l)) <= 2;
    double slack = usual ? 0 : slack_of(x);
    if (isinf(slack)) {
        w->n_beyond++;
        return;
    }
    w->n_slack++;
    if (!(between.error <= allowed + slack))
        life_fail("layer %u head %u position %u: L2 error %g of %g, relative %g, allowed %g + %g%s", x->layer, x->head,
                  token->position, between.error, between.size, between.error / between.size, allowed, slack,
                  between.nan ? ", NaN" : "");
}

/* Never 0. */
static uint64_t hash_of(const uint8_t *bytes, size_t n) {
    uint64_t hash = 0;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        hash = life_mix(hash, word);
    }
    return hash | 1;
}

static bool has_nan(fkv_type type, const uint8_t *answer, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (isnan(get_number(type, answer, i))) return true;
    return false;
}

void life_check_answer(life_world *w, life_token *const *history, uint32_t n, uint32_t layer, const uint8_t *answer) {
    const fkv_layer_config *l = &w->config->layers[layer];
    life_token *token = history[n - 1];
    size_t bytes = life_rows_bytes(w, layer, LIFE_Q);
    uint64_t bits = hash_of(answer, bytes);
    if (token->answers[layer] == bits) {
        w->n_same++;
        return;
    }
    question x = {.world = w, .history = history, .n = n, .layer = layer};
    for (x.head = 0; x.head < l->n_q_heads; x.head++) check_head(&x, answer + x.head * (bytes / l->n_q_heads));
    if (has_nan(w->config->base.row_type, answer, (size_t)l->n_q_heads * l->head_dim)) return; /* NaN have many bits */
    if (token->answers[layer] != 0)
        life_fail("layer %u position %u: right, but other bits than the same history gave before", layer, token->position);
    token->answers[layer] = bits;
}
