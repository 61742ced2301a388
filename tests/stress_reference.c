/* See stress_reference.h.
 *
 * Tolerance: kernels sum in float and the reference in double, so outputs must agree within 1e-3 relative L2 before rounding to
 * the row type. For Gaussian rows of typical scale, this is the only tolerance. Other inputs need more precision than float has:
 * scores of size A = sum |q * k| are accurate to A * 2^-24 at best, kernels with integer dot products round each query to
 * multiples of about 2^-24 times its largest value, and sums of values can cancel. For these inputs, and only if 1e-3 is
 * exceeded, a bound on the rounding errors is added (slack_of). A lost row, a wrong mask or a wrong scale exceeds that bound by
 * far.
 */
#include "stress_reference.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_BUCKETS = 1 << 16 };

static const uint32_t WITH_NAN = 0x80000000u; /* flag in the ID of a token with NaN rows */

static const double TOLERANCE = 1e-3;
static const double SCORE_ERROR = 0x1p-21; /* allowed score error, relative to sum |q * k| */
static const double VALUE_ERROR = 0x1p-17; /* allowed value error, relative to sum p * |v| */
static const double LEAST_SCALE = 1e-7;    /* smallest scale of an affine group; groups of zeros have this scale */
static const double LEAST_WEIGHT = 1e-37;  /* softmax weights below this limit underflow to 0 in float */
static const double FLOAT_HOLDS = 1e37;    /* sums of scores or values above this limit may overflow in float */

/* ---- rows ---- */

static bool is_outlier(const stress_config *c, uint32_t what, uint32_t dim, uint32_t d) {
    uint32_t first = c->outlier_channel[what];
    return d == first % dim || d == (first / 3 + 5) % dim || (what == STRESS_K && d == (first / 7 + 11) % dim);
}

/* Generates an extreme row, which no model should produce. */
static void odd_row(const stress_config *c, stress_random *r, uint32_t what, uint32_t dim, float *x) {
    uint32_t kind = stress_below(r, c->numbers == STRESS_EXTREME ? 8 : 4);
    float base = stress_gaussian(r);
    float most = c->base.page_type == FKV_F16 ? 65504.0f : STRESS_DOMAIN.bf16_most;
    if (what == STRESS_Q) most = STRESS_DOMAIN.query_most;
    for (uint32_t d = 0; d < dim; d++) {
        bool some = stress_below(r, 16) == 0;
        switch (kind) {
        case 0: x[d] = STRESS_DOMAIN.zero_rows ? 0 : base; break;
        case 1: x[d] = base; break;
        case 2: x[d] = base * (1 + (float)(stress_draw(r) & 3) * 1e-6f); break;
        case 3: x[d] *= 1e-7f; break;
        case 4: x[d] = x[d] > 0 ? most : -most; break;
        case 5: x[d] = some ? most : x[d]; break;
        case 6: x[d] = some ? NAN : x[d]; break;
        default: x[d] = some && what != STRESS_Q ? (x[d] > 0 ? most * 1.0009765625f : -most * 4) : x[d];
        }
    }
}

/* Returns the number of values in a stored row, or in a query. */
static uint32_t row_dim(const stress_fixture *w, uint32_t layer, uint32_t what) {
    const fkv_layer_config *l = &w->config->layers[layer];
    return what == STRESS_Q ? l->head_dim + l->rope_dim : w->config->codec[layer][what].dim;
}

/* Generates one row whose values are exact in the row type. x: [row_dim()] */
static void make_row(const stress_fixture *w, const stress_token *token, uint32_t layer, uint32_t what, uint32_t head, float *x) {
    const stress_config *c = w->config;
    uint32_t dim = row_dim(w, layer, what);
    stress_random r = {stress_mix(stress_mix(token->chain, c->seed), (layer * 4 + what) * 4096 + head)};
    for (uint32_t d = 0; d < dim; d++) {
        x[d] = stress_gaussian(&r) * (what == STRESS_Q ? c->query_size : 1);
        if (c->outlier[what] != 1 && is_outlier(c, what, dim, d)) x[d] *= c->outlier[what];
    }
    if (c->numbers != STRESS_GAUSSIAN && stress_below(&r, 40) == 0) odd_row(c, &r, what, dim, x);
    for (uint32_t d = 0; d < dim && c->base.row_type != FKV_F32; d++)
        x[d] = stress_from_half(c->base.row_type, stress_to_half(c->base.row_type, x[d]));
}

static uint32_t heads_of(const stress_fixture *w, uint32_t layer, uint32_t what) {
    const fkv_layer_config *l = &w->config->layers[layer];
    return what == STRESS_Q ? l->n_q_heads : l->n_kv_heads;
}

static size_t number_bytes(const stress_fixture *w) { return w->config->base.row_type == FKV_F32 ? 4 : 2; }

size_t stress_rows_bytes(const stress_fixture *w, uint32_t layer, uint32_t what) {
    const fkv_layer_config *l = &w->config->layers[layer];
    if (stress_layer_is_latent(w->config, layer) && what == STRESS_V) return 0;
    return heads_of(w, layer, what) * (size_t)(l->head_dim + l->rope_dim) * number_bytes(w);
}

size_t stress_answer_bytes(const stress_fixture *w, uint32_t layer) {
    return (size_t)w->config->layers[layer].n_q_heads * w->config->layers[layer].head_dim * number_bytes(w);
}

static void put_number(fkv_type type, uint8_t *rows, size_t i, float x) {
    uint16_t half = type == FKV_F32 ? 0 : stress_to_half(type, x);
    if (type == FKV_F32)
        memcpy(rows + 4 * i, &x, 4);
    else
        memcpy(rows + 2 * i, &half, 2);
}

static float get_number(fkv_type type, const uint8_t *rows, size_t i) {
    uint16_t half = 0;
    float x = 0;
    memcpy(type == FKV_F32 ? (void *)&x : (void *)&half, rows + (type == FKV_F32 ? 4 : 2) * i, type == FKV_F32 ? 4 : 2);
    return type == FKV_F32 ? x : stress_from_half(type, half);
}

void stress_rows(const stress_fixture *w, const stress_token *token, uint32_t layer, uint32_t what, uint8_t *rows) {
    const bool is_latent = stress_layer_is_latent(w->config, layer);
    if (is_latent && what == STRESS_V) return;
    uint32_t dim = w->config->layers[layer].head_dim + w->config->layers[layer].rope_dim;
    for (uint32_t h = 0; h < heads_of(w, layer, what); h++) {
        float x[STRESS_MAX_KEY_DIM];
        make_row(w, token, layer, what, h, x);
        if (is_latent && what == STRESS_K) make_row(w, token, layer, STRESS_V, h, x + row_dim(w, layer, STRESS_K));
        for (uint32_t d = 0; d < dim; d++) put_number(w->config->base.row_type, rows, (size_t)h * dim + d, x[d]);
    }
}

/* ---- tokens ---- */

static void *allocate(stress_fixture *w, size_t bytes) {
    void *block = calloc(1, bytes + 1);
    if (block == NULL) stress_fail("out of memory allocating the reference");
    w->memory += bytes;
    return block;
}

void stress_fixture_open(stress_fixture *w, const stress_config *config, uint32_t most_tokens) {
    *w = (stress_fixture){.config = config, .n_layers = config->base.n_layers};
    for (uint32_t i = 0; i < w->n_layers; i++) {
        for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
            w->stored_at[i][side] = w->stored_floats;
            w->bytes_at[i][side] = w->stored_bytes;
            w->stored_floats += (size_t)config->layers[i].n_kv_heads * row_dim(w, i, side);
            w->stored_bytes += (size_t)config->layers[i].n_kv_heads * stress_row_bytes(&config->codec[i][side]);
            w->sealed_at[i][side] = w->sealed_floats;
            if (stress_layer_is_sealed(config, i))
                w->sealed_floats += (size_t)config->base.page_tokens * config->layers[i].n_kv_heads * row_dim(w, i, side);
        }
        w->blocks_at[i] = w->blocks_bytes;
        if (stress_layer_is_sealed(config, i))
            w->blocks_bytes += config->layers[i].n_kv_heads * stress_sealed_block_bytes(config, i);
    }
    w->buckets = allocate(w, N_BUCKETS * sizeof(stress_token *));
    w->weights = allocate(w, most_tokens * sizeof(double));
}

void stress_fixture_close(stress_fixture *w) {
    for (uint32_t i = 0; i < N_BUCKETS; i++) {
        for (stress_token *t = w->buckets[i], *next = NULL; t != NULL; t = next) {
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

uint64_t stress_chain_begin(const stress_fixture *w, uint64_t tenant) { return stress_mix(w->config->seed, tenant); }

static void store(const stress_fixture *w, stress_token *token) {
    for (uint32_t i = 0; i < w->n_layers; i++) {
        for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
            const stress_codec *codec = &w->config->codec[i][side];
            for (uint32_t head = 0; head < w->config->layers[i].n_kv_heads; head++) {
                float x[FKV_MAX_HEAD_DIM];
                uint8_t *bytes = token->bytes + w->bytes_at[i][side] + (size_t)head * stress_row_bytes(codec);
                make_row(w, token, i, side, head, x);
                stress_encode(codec, x, bytes);
                stress_decode(codec, bytes, token->stored + w->stored_at[i][side] + (size_t)head * codec->dim);
            }
        }
    }
}

stress_token *stress_token_after(stress_fixture *w, uint64_t before, uint32_t position, uint32_t id) {
    uint64_t chain = stress_mix(before, id);
    stress_token **bucket = &w->buckets[chain % N_BUCKETS];
    for (stress_token *t = *bucket; t != NULL; t = t->next)
        if (t->chain == chain) return t;
    stress_token *token = allocate(w, sizeof *token);
    *token = (stress_token){.chain = chain, .id = id, .position = position, .next = *bucket};
    token->stored = allocate(w, w->stored_floats * sizeof(float));
    token->bytes = allocate(w, w->stored_bytes);
    token->answers = allocate(w, w->n_layers * sizeof(uint64_t));
    store(w, token);
    *bucket = token;
    return token;
}

stress_token *stress_token_with_nan(stress_fixture *w, uint64_t before, uint32_t position, uint32_t id) {
    stress_token *token =
        stress_token_after(w, before, position, id | WITH_NAN); /* the flag is set only in the IDs of tokens with NaN rows */
    stress_random r = {token->chain};
    uint32_t layer = stress_below(&r, w->n_layers);
    uint32_t side = stress_below(&r, STRESS_N_SIDES);
    uint32_t head = stress_below(&r, w->config->layers[layer].n_kv_heads);
    const stress_codec *codec = &w->config->codec[layer][side];
    uint32_t part = codec->bits == 16 ? 0 : stress_part_bytes(codec, 2) == 0 ? 1 : stress_between(&r, 1, 2);
    uint32_t at = (part >= 1 ? stress_part_bytes(codec, 0) : 0) + (part == 2 ? stress_part_bytes(codec, 1) : 0);
    uint8_t *bytes = token->bytes + w->bytes_at[layer][side] + (size_t)head * stress_row_bytes(codec);
    at += stress_below(&r, stress_part_bytes(codec, part) / 2) * 2;
    bytes[at] = 0xff;
    bytes[at + 1] = 0x7f; /* makes the value NaN in both 16-bit types */
    stress_decode(codec, bytes, token->stored + w->stored_at[layer][side] + (size_t)head * codec->dim);
    return token;
}

const uint8_t *stress_stored_row(const stress_fixture *w, const stress_token *token, uint32_t layer, uint32_t side,
                                 uint32_t head) {
    return token->bytes + w->bytes_at[layer][side] + (size_t)head * stress_row_bytes(&w->config->codec[layer][side]);
}

/* ---- sealed pages ---- */

static size_t aligned_part(const stress_codec *c, uint32_t part, uint32_t page_tokens) {
    return (stress_page_part_bytes(c, part, page_tokens) + 63) / 64 * 64;
}

size_t stress_sealed_block_bytes(const stress_config *c, uint32_t layer) {
    size_t n = 0;
    for (uint32_t i = 0; i < STRESS_N_SIDES * STRESS_PARTS; i++)
        n += aligned_part(&c->sealed[layer][i / STRESS_PARTS], i % STRESS_PARTS, c->base.page_tokens);
    return n;
}

/* Seals one head of one layer from the decoded open rows. */
static void seal_head(const stress_fixture *w, stress_token *const *page, uint32_t layer, uint32_t head, stress_token *to) {
    static float rows[256 * FKV_MAX_HEAD_DIM];
    uint32_t n_heads = w->config->layers[layer].n_kv_heads;
    uint32_t n = w->config->base.page_tokens;
    uint8_t *at = to->blocks + w->blocks_at[layer] + head * stress_sealed_block_bytes(w->config, layer);
    for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
        stress_codec of_head = w->config->sealed[layer][side];
        const uint32_t dim = of_head.dim;
        if (of_head.channel_bits != NULL) of_head.channel_bits += (size_t)head * dim;
        const stress_codec *codec = &of_head;
        uint8_t *part[STRESS_PARTS];
        for (uint32_t p = 0; p < STRESS_PARTS; p++) {
            part[p] = at;
            at += aligned_part(codec, p, n);
        }
        for (uint32_t t = 0; t < n; t++)
            memcpy(rows + (size_t)t * dim, page[t]->stored + w->stored_at[layer][side] + (size_t)head * dim, dim * sizeof(float));
        stress_seal(codec, rows, n, part);
        for (uint32_t t = 0; t < n; t++)
            stress_decode_at(codec, part, t, to->sealed + w->sealed_at[layer][side] + ((size_t)t * n_heads + head) * dim);
    }
}

/* Returns the last token of a page, in which the sealed form of the page is stored. Computes the sealed form on first use. It can
 * be stored with this token, because the token's chain hash covers all tokens of the page. */
static const stress_token *sealed_page(stress_fixture *w, stress_token *const *history, uint32_t page) {
    uint32_t n = w->config->base.page_tokens;
    stress_token *end = history[(size_t)(page + 1) * n - 1];
    if (end->sealed != NULL) return end;
    end->sealed = allocate(w, w->sealed_floats * sizeof(float));
    end->blocks = allocate(w, w->blocks_bytes);
    for (uint32_t i = 0; i < w->n_layers; i++)
        for (uint32_t head = 0; head < w->config->layers[i].n_kv_heads && stress_layer_is_sealed(w->config, i); head++)
            seal_head(w, history + (size_t)page * n, i, head, end);
    return end;
}

const uint8_t *stress_sealed_block(stress_fixture *w, stress_token *const *history, uint32_t page, uint32_t layer,
                                   uint32_t head) {
    return sealed_page(w, history, page)->blocks + w->blocks_at[layer] + head * stress_sealed_block_bytes(w->config, layer);
}

/* ---- attention ---- */

typedef struct question {
    stress_fixture *fixture;
    stress_token *const *history;
    uint32_t n;
    uint32_t layer;
    uint32_t head; /* query head */
    double q[STRESS_MAX_KEY_DIM];
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

/* Returns true if the query reads token t from a sealed page. A query reads page 0 and the pages of its own span in open form,
 * and all other pages in sealed form. */
static bool is_read_sealed(const question *x, uint32_t t) {
    uint32_t page_tokens = x->fixture->config->base.page_tokens;
    uint32_t page = t / page_tokens;
    return stress_layer_is_sealed(x->fixture->config, x->layer) && page != 0 &&
           page / STRESS_SPAN != (x->n - 1) / page_tokens / STRESS_SPAN;
}

static const float *stored_row(const question *x, uint32_t t, uint32_t side) {
    const fkv_layer_config *l = &x->fixture->config->layers[x->layer];
    uint32_t head = x->head / (l->n_q_heads / l->n_kv_heads);
    if (is_read_sealed(x, t)) {
        uint32_t page_tokens = x->fixture->config->base.page_tokens;
        const stress_token *page = sealed_page(x->fixture, x->history, t / page_tokens);
        return page->sealed + x->fixture->sealed_at[x->layer][side] +
               ((size_t)(t % page_tokens) * l->n_kv_heads + head) * row_dim(x->fixture, x->layer, side);
    }
    return x->history[t]->stored + x->fixture->stored_at[x->layer][side] + (size_t)head * row_dim(x->fixture, x->layer, side);
}

/* Returns the side (STRESS_K or STRESS_V) of the stored row that serves as the value. In a latent layer, the key row is also the
 * value. */
static uint32_t value_side(const question *x) {
    return stress_layer_is_latent(x->fixture->config, x->layer) ? STRESS_K : STRESS_V;
}

static bool is_visible(const fkv_layer_config *l, uint32_t query, uint32_t t) {
    return l->window == 0 || t < l->n_sinks || query - t < l->window;
}

static double scale_of(const fkv_layer_config *l) { return l->scale != 0 ? (double)l->scale : 1.0 / sqrt((double)l->head_dim); }

static void ask(const question *x, reply *to) {
    const fkv_layer_config *l = &x->fixture->config->layers[x->layer];
    double *weights = x->fixture->weights;
    double scale = scale_of(l);
    double most = -INFINITY;
    double nan = 0; /* NaN if any score is NaN, otherwise 0; added to every channel, because a NaN score makes all channels NaN */
    *to = (reply){.out = {0}};
    for (uint32_t t = 0; t < x->n; t++) {
        if (!is_visible(l, x->n - 1, t)) continue;
        double score = dot(x->q, stored_row(x, t, STRESS_K), l->head_dim);
        if (l->rope_dim != 0) score += dot(x->q + l->head_dim, stored_row(x, t, STRESS_V), l->rope_dim);
        score *= scale;
        if (isnan(score)) nan = score;
        if (l->softcap > 0) score = (double)l->softcap * tanh(score / (double)l->softcap);
        weights[t] = score;
        most = fmax(most, score);
    }
    double total = l->sink_logits != NULL ? exp((double)l->sink_logits[x->head] - most) : 0;
    for (uint32_t t = 0; t < x->n; t++) {
        if (!is_visible(l, x->n - 1, t)) continue;
        double p = exp(weights[t] - most);
        const float *v = stored_row(x, t, value_side(x));
        weights[t] = p;
        total += p;
        for (uint32_t d = 0; d < l->head_dim; d++) to->out[d] += p * (double)v[d];
    }
    for (uint32_t d = 0; d < l->head_dim; d++) to->out[d] = to->out[d] / total + nan;
    const stress_codec *v = &x->fixture->config->codec[x->layer][value_side(x)];
    if (v->rotated) stress_rotate_back(v, to->out);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool has_integer_products(const question *x) {
    const stress_codec *k = &x->fixture->config->codec[x->layer][STRESS_K];
    bool coded =
        k->bits == 8 || k->bits == 4 || k->kind == FKV_CODEC_TURBO || stress_layer_is_sealed(x->fixture->config, x->layer);
    return x->fixture->config->base.isa >= FKV_ISA_AVX512VNNI && coded;
}

/* Returns the rounding error of each query value in a kernel with integer dot products, or 0 for other kernels. Kernels with
 * integer dot products use float for queries in which more than an eighth of the values are below 1/1024 of the largest value. */
static double query_error(const question *x) {
    uint32_t dim = x->fixture->config->layers[x->layer].head_dim;
    if (!has_integer_products(x)) return 0;
    double size[FKV_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < dim; d++) size[d] = fabs(x->q[d]);
    qsort(size, dim, sizeof *size, by_size);
    return fmin(size[dim - 1], 1024 * size[dim / 8]) * 0x1p-24;
}

/* Returns a bound on the error of one score in a kernel that rounds scale * sum(q * code) and bias * sum(q) separately, although
 * the two terms may cancel. */
static double bias_error(const question *x, const float *k) {
    const stress_codec *codec = &x->fixture->config->codec[x->layer][STRESS_K];
    double error = 0;
    if (!STRESS_DOMAIN.bias_apart || !has_integer_products(x)) return 0;
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

/* Returns the allowed rounding error beyond the tolerance, or infinity if float sums overflow. Uses the softmax weights that
 * ask() stored. */
static double slack_of(const question *x) {
    const fkv_layer_config *l = &x->fixture->config->layers[x->layer];
    double largest = 0; /* largest error of any attention score */
    double of_query = query_error(x);
    double values = 0; /* sum p |v| */
    double norms = 0;  /* sum |v| */
    double most = 0;   /* largest |v| */
    double total = 0;
    for (uint32_t t = 0; t < x->n; t++) {
        if (!is_visible(l, x->n - 1, t)) continue;
        const float *k = stored_row(x, t, STRESS_K);
        const float *v = stored_row(x, t, value_side(x));
        const float *rope = stored_row(x, t, STRESS_V);
        double size = bias_error(x, k);
        double norm = 0;
        for (uint32_t d = 0; d < l->head_dim; d++) {
            size += fabs(x->q[d] * (double)k[d]) * SCORE_ERROR + of_query * fabs((double)k[d]);
            norm += (double)v[d] * (double)v[d];
        }
        for (uint32_t d = 0; d < l->rope_dim; d++) size += fabs(x->q[l->head_dim + d] * (double)rope[d]) * SCORE_ERROR;
        largest = fmax(largest, size * fabs(scale_of(l)));
        values += x->fixture->weights[t] * sqrt(norm);
        norms += sqrt(norm);
        most = fmax(most, sqrt(norm));
        total += x->fixture->weights[t];
    }
    if (largest > FLOAT_HOLDS * SCORE_ERROR || values > FLOAT_HOLDS) return (double)INFINITY;
    const stress_codec *v = &x->fixture->config->codec[x->layer][value_side(x)];
    double least = v->bits == 16 ? 0 : LEAST_SCALE * ((1u << v->bits) - 1) * sqrt((double)l->head_dim);
    if (largest > 1.0 / 16) return 2 * most; /* score errors are too large, so any weighted mean of the values is accepted */
    return (4 * largest + VALUE_ERROR) * values / total + VALUE_ERROR * least + LEAST_WEIGHT * norms;
}

/* ---- comparison ---- */

typedef struct distance {
    double error; /* L2 norm of the difference between output and reference */
    double size;  /* L2 norm of the reference */
    bool nan;     /* true if the output contains a NaN */
    bool reference_nan;
    bool hidden_nan; /* true if a value is NaN in the reference but not in the output */
} distance;

/* Returns half a unit in the last place of the row type, which is the largest error of rounding x. */
static double rounding_of(fkv_type type, double x) {
    if (type == FKV_F32 || x == 0 || !isfinite(x)) return 0;
    int exponent = ilogb(x);
    if (type == FKV_BF16) return ldexp(1, (exponent < -126 ? -126 : exponent) - 8);
    return ldexp(1, (exponent < -14 ? -14 : exponent) - 11);
}

/* Returns the distance of an output value from the reference, beyond rounding. An infinite fp16 output matches any reference
 * value at or above the largest finite fp16 value. */
static double apart(fkv_type type, double got, double reference) {
    double largest = copysign(65504 * (1 - TOLERANCE), got);
    if (isnan(got)) return (double)NAN;
    if (type == FKV_F16 && isinf(got)) return reference / largest >= 1 ? 0 : fabs(reference - largest);
    return fmax(fabs(got - reference) - rounding_of(type, fmax(fabs(got), fabs(reference))), 0);
}

static distance distance_of(fkv_type type, const uint8_t *answer, const double *reference, uint32_t dim) {
    distance between = {.nan = false};
    double error = 0;
    double size = 0;
    for (uint32_t d = 0; d < dim; d++) {
        double got = (double)get_number(type, answer, d);
        double difference = apart(type, got, reference[d]);
        between.nan = between.nan || isnan(got);
        between.reference_nan = between.reference_nan || isnan(reference[d]);
        between.hidden_nan = between.hidden_nan || (isnan(reference[d]) && !isnan(got));
        error += difference * difference;
        size += reference[d] * reference[d];
    }
    between.error = sqrt(error);
    between.size = sqrt(size);
    return between;
}

static void check_head(question *x, const uint8_t *answer) {
    stress_fixture *w = x->fixture;
    const stress_config *c = w->config;
    const fkv_layer_config *l = &c->layers[x->layer];
    const stress_token *token = x->history[x->n - 1];
    float q[STRESS_MAX_KEY_DIM];
    make_row(w, token, x->layer, STRESS_Q, x->head, q);
    for (uint32_t d = 0; d < l->head_dim + l->rope_dim; d++) x->q[d] = (double)q[d];
    if (c->codec[x->layer][STRESS_K].rotated) stress_rotate(&c->codec[x->layer][STRESS_K], x->q);
    reply reference;
    ask(x, &reference);
    distance between = distance_of(c->base.row_type, answer, reference.out, l->head_dim);
    w->n_answers++;
    bool over_sealed = stress_layer_is_sealed(c, x->layer) && x->n > 2 * c->base.page_tokens;
    w->n_sealed += over_sealed;
    w->n_calibrated += over_sealed && l->k.kind == FKV_CODEC_CALIBRATED;
    w->n_latent += stress_layer_is_latent(c, x->layer);
    w->n_sealed_latent += over_sealed && stress_layer_is_latent(c, x->layer);
    w->n_turbo += c->codec[x->layer][STRESS_K].kind == FKV_CODEC_TURBO || c->codec[x->layer][STRESS_V].kind == FKV_CODEC_TURBO;
    if (between.hidden_nan)
        stress_fail("layer %u head %u position %u: the output is finite where the reference is NaN", x->layer, x->head,
                    token->position);
    if (between.nan && between.reference_nan) return; /* the number of channels to which a NaN spreads depends on the kernel */
    double allowed = TOLERANCE * between.size;
    if (between.error <= allowed) {
        if (c->base.row_type == FKV_F32 && between.size > 1e-30) w->worst = fmax(w->worst, between.error / between.size);
        return;
    }
    bool usual = c->numbers == STRESS_GAUSSIAN && fabs(scale_of(l)) <= 2;
    double slack = usual ? 0 : slack_of(x);
    if (isinf(slack)) {
        w->n_beyond++;
        return;
    }
    w->n_slack++;
    if (!(between.error <= allowed + slack))
        stress_fail(
            "layer %u head %u position %u: the L2 error is %g for a norm of %g (relative error %g), but at most %g + %g is allowed%s",
            x->layer, x->head, token->position, between.error, between.size, between.error / between.size, allowed, slack,
            between.nan ? ", NaN" : "");
}

/* Returns a hash that is never 0. */
static uint64_t hash_of(const uint8_t *bytes, size_t n) {
    uint64_t hash = 0;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        hash = stress_mix(hash, word);
    }
    return hash | 1;
}

static bool has_nan(fkv_type type, const uint8_t *answer, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (isnan(get_number(type, answer, i))) return true;
    return false;
}

void stress_check_answer(stress_fixture *w, stress_token *const *history, uint32_t n, uint32_t layer, const uint8_t *answer) {
    const fkv_layer_config *l = &w->config->layers[layer];
    stress_token *token = history[n - 1];
    size_t bytes = stress_answer_bytes(w, layer);
    uint64_t bits = hash_of(answer, bytes);
    if (token->answers[layer] == bits) {
        w->n_same++;
        return;
    }
    question x = {.fixture = w, .history = history, .n = n, .layer = layer};
    for (x.head = 0; x.head < l->n_q_heads; x.head++) check_head(&x, answer + x.head * (bytes / l->n_q_heads));
    if (has_nan(w->config->base.row_type, answer, (size_t)l->n_q_heads * l->head_dim))
        return; /* NaN has many bit patterns, so NaN outputs are not compared */
    if (token->answers[layer] != 0)
        stress_fail("layer %u position %u: the output is correct but not bit-identical to an earlier output for the same history",
                    layer, token->position);
    token->answers[layer] = bits;
}
