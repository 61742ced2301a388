/* See stress_config.h. */
#include "stress_config.h"

#include "channel_bits.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const stress_domain STRESS_DOMAIN = {
    .softcap_least = 1e-38f,
    .softcap_most = 3e38f,
    .scale_least = 1e-6f,
    .scale_most = 1e6f,
    .key_outlier_most = 1000.0f,
    .query_outlier_most = 30000.0f,
    .query_most = 10000.0f,
    .bf16_most = 3e38f,
    .bias_apart = true,
    .zero_rows = false,
    .nan_outside_windows = true,
    .pins_are_harmless = false,
};

enum {
    LATENT_PERCENT = 20,
    MOST_WORK = 3000000,          /* limit on the number of multiplications per query token over the longest history */
    MOST_TOKEN_FLOATS = 4096,     /* limit on the number of K and V values of one token, over all layers */
    MOST_FLOATS = 6 * 1000 * 1000 /* limit on the number of K and V values of all tokens in a cache */
};

uint32_t stress_isas(fkv_isa isas[STRESS_MAX_ISAS]) {
    fkv_config config = fkv_config_default();
    config.n_layers = 1;
    config.layer = (fkv_layer_config){.n_q_heads = 1, .n_kv_heads = 1, .head_dim = 64, .k = {16, 0}, .v = {16, 0}};
    config.max_tokens = 16;
    config.n_threads = 1;
    uint32_t n = 0;
    for (int isa = FKV_ISA_SCALAR; isa <= FKV_ISA_AMX; isa++) {
        config.isa = (fkv_isa)isa;
        fkv_cache *cache = NULL;
        fkv_status status = fkv_cache_open(&config, &cache);
        if (status == FKV_UNSUPPORTED) continue;
        if (status != FKV_OK) stress_fail("isa %d: %s", isa, fkv_message());
        fkv_cache_close(cache);
        isas[n++] = (fkv_isa)isa;
    }
    return n;
}

/* Draws a value from a log-uniform distribution between low and high. */
static float log_uniform(stress_random *r, float low, float high) {
    return (float)(exp(stress_uniform(r) * log((double)high / (double)low)) * (double)low);
}

static fkv_codec_config draw_codec(stress_random *r, uint32_t dim) {
    static const uint32_t bits[] = {16, 8, 8, 4, 4, 4, 2};
    if (dim % 32 == 0 && stress_chance(r, 15))
        return (fkv_codec_config){.bits = stress_between(r, 2, 4), .kind = FKV_CODEC_TURBO};
    fkv_codec_config codec = {.bits = bits[stress_below(r, 7)], .group = 32u << stress_below(r, 3)};
    while (codec.group > 32 && dim % codec.group != 0) codec.group /= 2;
    if (dim % codec.group != 0) codec.bits = 16;
    return codec;
}

typedef uint8_t layer_bits[STRESS_MAX_HEADS_KV * FKV_MAX_HEAD_DIM]; /* [G, D] */

/* Draws different channel bits for each head. */
static void draw_channel_bits(stress_random *r, fkv_layer_config *l, uint8_t *bits) {
    uint64_t state = stress_draw(r);
    for (uint32_t g = 0; g < l->n_kv_heads; g++)
        channel_bits_random(&state, l->head_dim, l->k.bits, bits + (size_t)g * l->head_dim);
    l->channel_bits = bits;
}

static void draw_codecs(stress_random *r, fkv_layer_config *l) {
    l->channel_bits = NULL;
    l->k = draw_codec(r, l->head_dim);
    l->v = draw_codec(r, l->head_dim);
    if (!stress_chance(r, 30)) return;
    l->k = (fkv_codec_config){.bits = stress_between(r, 2, 4), .kind = FKV_CODEC_SEALED};
    if (stress_chance(r, 75)) l->v = (fkv_codec_config){.bits = stress_between(r, 2, 4), .kind = FKV_CODEC_SEALED_V};
    if (!stress_chance(r, 40)) return;
    l->k = (fkv_codec_config){.bits = stress_between(r, 3, 4), .kind = FKV_CODEC_CALIBRATED};
    static layer_bits bits[STRESS_MAX_LAYERS]; /* static, because copies of the configuration keep pointers to this array */
    static uint32_t n_drawn;
    draw_channel_bits(r, l, bits[n_drawn++ % STRESS_MAX_LAYERS]);
}

/* Turns a layer into a latent layer. The head dimension does not change. */
static void draw_latent(stress_random *r, const stress_config *c, fkv_layer_config *l) {
    const uint32_t n_q_heads = l->n_q_heads / l->n_kv_heads;
    *l = (fkv_layer_config){.n_q_heads = n_q_heads, .n_kv_heads = 1, .head_dim = l->head_dim};
    l->rope_dim = 16 * (c->long_history ? 1 : stress_mostly_small(r, 1, stress_chance(r, 10) ? FKV_MAX_HEAD_DIM / 16 : 8));
    l->k = draw_codec(r, l->head_dim);
    if (stress_chance(r, 50)) l->v = draw_codec(r, l->head_dim); /* ignored by the cache */
    if (l->head_dim % 32 == 0 && stress_chance(r, 40))
        l->k = (fkv_codec_config){.bits = stress_chance(r, 70) ? 4 : 2, .kind = FKV_CODEC_SEALED};
}

static void draw_shape(stress_random *r, const stress_config *c, fkv_layer_config *l) {
    static const uint32_t usual[] = {64, 128, 96, 256, 32};
    if (c->long_history) {
        *l = (fkv_layer_config){.n_q_heads = stress_between(r, 1, 2), .n_kv_heads = 1, .head_dim = 16 * stress_between(r, 1, 2)};
        draw_codecs(r, l);
        if (stress_chance(r, LATENT_PERCENT)) draw_latent(r, c, l);
        return;
    }
    l->head_dim = stress_chance(r, 60) ? usual[stress_below(r, 5)] : 16 * stress_mostly_small(r, 1, FKV_MAX_HEAD_DIM / 16);
    l->n_kv_heads = stress_mostly_small(r, 1, STRESS_MAX_HEADS_KV);
    l->n_q_heads = l->n_kv_heads * stress_mostly_small(r, 1, stress_chance(r, 5) ? FKV_MAX_HEADS_PER_KV : 12);
    l->rope_dim = 0;
    draw_codecs(r, l);
    if (stress_chance(r, LATENT_PERCENT)) draw_latent(r, c, l);
}

/* Draws sink logits for the largest number of heads. The array is static, because copies of the configuration keep pointers to
 * it. */
static const float *draw_sink_logits(stress_random *r) {
    static float logits[8 * FKV_MAX_HEADS_PER_KV * STRESS_MAX_HEADS_KV];
    enum { N = sizeof logits / sizeof logits[0], MOST = FKV_MAX_HEADS_PER_KV * STRESS_MAX_HEADS_KV };
    stress_random fixed = {.state = 5};
    for (uint32_t i = 0; i < N && logits[N - 1] == 0; i++) logits[i] = (i < N / 2 ? 3.0f : 30.0f) * stress_gaussian(&fixed);
    return logits + stress_below(r, N - MOST);
}

static void draw_scores(stress_random *r, fkv_layer_config *l) {
    l->scale = 0;
    if (stress_chance(r, 25)) l->scale = log_uniform(r, STRESS_DOMAIN.scale_least, STRESS_DOMAIN.scale_most);
    if (l->rope_dim != 0 && l->scale == 0) l->scale = 1.0f / sqrtf((float)(l->head_dim + l->rope_dim));
    if (stress_chance(r, 3)) l->scale = -l->scale;
    l->softcap = 0;
    if (stress_chance(r, 20)) l->softcap = log_uniform(r, 5, 60);
    if (stress_chance(r, 10)) l->softcap = log_uniform(r, STRESS_DOMAIN.softcap_least, STRESS_DOMAIN.softcap_most);
    l->sink_logits = stress_chance(r, 20) ? draw_sink_logits(r) : NULL;
}

static void draw_window(stress_random *r, uint32_t page_tokens, fkv_layer_config *l) {
    l->window = stress_chance(r, 50) ? stress_mostly_small(r, 1, 300) : page_tokens * stress_between(r, 1, 3);
    l->n_sinks = stress_chance(r, 50) ? 0 : stress_mostly_small(r, 1, 2 * page_tokens);
}

static void draw_layers(stress_random *r, stress_config *c) {
    fkv_layer_config *first = &c->layers[0];
    bool varied = stress_chance(r, 35);
    uint32_t windowed =
        stress_below(r, 3); /* 0: no layer has a window; 1: all layers have a window; 2: some layers have a window */
    memset(c->layers, 0, sizeof c->layers);
    draw_shape(r, c, first);
    draw_scores(r, first);
    if (windowed == 1) draw_window(r, c->base.page_tokens, first);
    for (uint32_t i = 1; i < c->base.n_layers; i++) {
        fkv_layer_config *l = &c->layers[i];
        *l = *first;
        if (varied) draw_shape(r, c, l);
        if (varied) draw_scores(r, l);
        if (windowed == 2 && stress_chance(r, 60)) draw_window(r, c->base.page_tokens, l);
    }
    c->one_layer = !varied && windowed != 2;
}

/* Draws the state layers and their positions among the attention layers. */
static void draw_states(stress_random *r, stress_config *c) {
    c->n_states = stress_chance(r, 30) ? stress_between(r, 1, STRESS_MAX_STATES) : 0;
    const uint32_t n = c->base.n_layers + c->n_states;
    for (uint32_t i = 0; i < n; i++) c->at[i] = i;
    for (uint32_t i = c->base.n_layers; i < n; i++) { /* inserts the layer at a random position */
        const uint32_t place = stress_between(r, 0, i);
        for (uint32_t k = 0; k < i; k++) c->at[k] += c->at[k] >= place;
        c->at[i] = place;
        c->state_bytes[i - c->base.n_layers] = 64 * stress_mostly_small(r, 1, 40);
    }
    if (c->n_states > 0) c->one_layer = false;
}

/* Fills in the layers of the cache. */
static void place_layers(stress_config *c) {
    for (uint32_t i = 0; i < c->base.n_layers; i++) c->all_layers[c->at[i]] = c->layers[i];
    for (uint32_t i = 0; i < c->n_states; i++)
        c->all_layers[c->at[c->base.n_layers + i]] = (fkv_layer_config){.state_bytes = c->state_bytes[i]};
}

static uint32_t token_floats(const stress_config *c) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->base.n_layers; i++) {
        const fkv_layer_config *l = &c->layers[i];
        n += l->rope_dim != 0 ? l->head_dim + l->rope_dim : 2 * l->n_kv_heads * l->head_dim;
    }
    return n;
}

uint64_t stress_token_work(const stress_config *c) {
    uint64_t work = 0;
    for (uint32_t i = 0; i < c->base.n_layers; i++) {
        const fkv_layer_config *l = &c->layers[i];
        work += (uint64_t)l->n_q_heads * (2 * l->head_dim + l->rope_dim);
    }
    return work;
}

/* Draws the cache sizes. Two caches may differ in size and still load each other's page files. */
static void draw_sizes(stress_random *r, stress_config *c) {
    uint64_t most = MOST_FLOATS / token_floats(c);
    if (most > MOST_WORK / stress_token_work(c)) most = MOST_WORK / stress_token_work(c);
    if (most > 12000) most = 12000;
    c->base.max_tokens =
        32 + (stress_chance(r, 60) ? stress_below(r, (uint32_t)most) : stress_mostly_small(r, 0, (uint32_t)most));
    c->base.max_seqs = stress_chance(r, 15) ? 1 : stress_between(r, 2, STRESS_MAX_SEQS);
    c->base.max_step_tokens = stress_chance(r, 60) ? stress_between(r, 16, 400) : stress_mostly_small(r, 1, 64);
    c->base.n_threads = stress_between(r, 1, 3);
    c->base.lazy = stress_chance(r, 50);
    c->base.max_snapshots = stress_chance(r, 20) ? 0 : stress_mostly_small(r, 1, 12);
    if (!c->long_history) return;
    c->base.max_tokens = 2 * stress_between(r, STRESS_SPLITS_DOUBLE + 100, STRESS_SPLITS_DOUBLE + 800);
    c->base.max_seqs = stress_between(r, 1, 2);
    c->base.max_step_tokens = stress_between(r, 1000, 2000);
}

static void draw_numbers(stress_random *r, stress_config *c) {
    uint32_t at = stress_below(r, 10);
    c->numbers = at < 4 ? STRESS_GAUSSIAN : at < 8 ? STRESS_OUTLIERS : STRESS_EXTREME;
    for (int i = 0; i < 3; i++) {
        c->outlier[i] = 1;
        c->outlier_channel[i] = stress_below(r, FKV_MAX_HEAD_DIM);
    }
    if (c->numbers != STRESS_GAUSSIAN) {
        if (stress_chance(r, 70)) c->outlier[STRESS_K] = log_uniform(r, 5, STRESS_DOMAIN.key_outlier_most);
        if (stress_chance(r, 40)) c->outlier[STRESS_V] = log_uniform(r, 5, STRESS_DOMAIN.key_outlier_most);
        if (stress_chance(r, 40)) c->outlier[STRESS_Q] = log_uniform(r, 5, STRESS_DOMAIN.query_outlier_most);
    }
    c->query_size = stress_chance(r, 70) ? 1 : log_uniform(r, 0.1f, 8);
}

/* Returns the codec of open rows in a sealed layer: 8 bits if a group size divides the head dimension, otherwise 16 bits. */
static fkv_codec_config open_codec(uint32_t dim) {
    if (dim % 32 != 0) return (fkv_codec_config){.bits = 16};
    return (fkv_codec_config){.bits = 8, .group = dim % 64 == 0 ? 64 : 32};
}

static void make_codecs(stress_config *c) {
    for (uint32_t i = 0; i < c->base.n_layers; i++) {
        uint32_t dim = c->layers[i].head_dim;
        bool sealed = stress_layer_is_sealed(c, i);
        for (uint32_t side = 0; side < STRESS_N_SIDES; side++) {
            fkv_codec_config codec = side == STRESS_K ? c->layers[i].k : c->layers[i].v;
            if (stress_layer_is_latent(c, i) && side == STRESS_V) {
                const fkv_codec_config rope = {.bits = 16};
                c->codec[i][side] = stress_codec_make(rope, c->layers[i].rope_dim, c->base.page_type, false, 0, side);
                c->sealed[i][side] = c->codec[i][side];
                continue;
            }
            uint32_t rotation = side; /* sealed keys are not rotated; sealed latent channels are rotated like values */
            if (sealed && stress_layer_is_latent(c, i)) {
                rotation = STRESS_V;
                codec = (fkv_codec_config){.bits = codec.bits, .group = open_codec(dim).group};
            }
            bool rotated = ((uint32_t)c->base.rotate >> rotation & 1) != 0 && !(sealed && rotation == STRESS_K);
            uint64_t seed = c->base.rotation_seed;
            fkv_type type = c->base.page_type;
            c->codec[i][side] = stress_codec_make(sealed ? open_codec(dim) : codec, dim, type, rotated, seed, rotation);
            c->sealed[i][side] = stress_codec_make(codec, dim, type, rotated, seed, rotation);
            c->sealed[i][side].channel_bits = side == STRESS_K ? c->layers[i].channel_bits : NULL;
        }
    }
}

/* Returns which of K and V must be rotated because at least one codec requires it. Sealed layers never rotate keys. */
static uint32_t required_rotations(const stress_config *c) {
    uint32_t sides = 0;
    for (uint32_t i = 0; i < c->base.n_layers; i++) {
        if (c->layers[i].k.kind == FKV_CODEC_TURBO) sides |= FKV_ROTATE_K;
        if (c->layers[i].v.kind == FKV_CODEC_TURBO && !stress_layer_is_latent(c, i)) sides |= FKV_ROTATE_V;
    }
    return sides;
}

void stress_config_draw(stress_random *r, const fkv_isa *isas, uint32_t n_isas, stress_config *c) {
    memset(c, 0, sizeof *c);
    c->base = fkv_config_default();
    c->long_history = stress_chance(r, 4);
    c->base.n_layers = c->long_history ? 1 : stress_mostly_small(r, 1, STRESS_MAX_LAYERS);
    c->base.page_tokens = 16u << stress_mostly_small(r, 0, 4);
    do {
        draw_layers(r, c);
    } while (token_floats(c) > MOST_TOKEN_FLOATS || stress_token_work(c) > MOST_WORK / 200);
    c->base.row_type = (fkv_type)stress_below(r, 3);
    c->base.page_type = stress_chance(r, 60) ? FKV_F16 : FKV_BF16;
    c->base.rotate = (fkv_rotate)(stress_below(r, 4) | required_rotations(c));
    c->base.rotation_seed = stress_draw(r);
    c->base.isa = isas[stress_below(r, n_isas)];
    for (int i = 0; i < 32; i++) c->base.weights_id[i] = (uint8_t)stress_draw(r);
    (void)snprintf(c->base.rope_id, sizeof c->base.rope_id, "neox base=%u", stress_below(r, 1000000));
    (void)snprintf(c->base.numerics, sizeof c->base.numerics, "cpu stress %u", stress_below(r, 1000000));
    c->seed = stress_draw(r);
    c->step_work = c->long_history ? 20000000 : 1000000u << stress_below(r, 5);
    c->n_documents = stress_between(r, 1, 4);
    draw_numbers(r, c);
    draw_sizes(r, c);
    make_codecs(c);
    draw_states(r, c);
    place_layers(c);
}

fkv_config stress_config_of(const stress_config *c) {
    fkv_config config = c->base;
    config.layer = c->layers[0];
    config.layers = c->one_layer ? NULL : c->all_layers;
    config.n_layers = c->base.n_layers + c->n_states;
    return config;
}

void stress_config_sibling(stress_random *r, const stress_config *c, stress_config *sibling) {
    *sibling = *c;
    draw_sizes(r, sibling);
}

/* Changes the identity of a layer: adds heads or RoPE channels or, if the keys are calibrated, changes their channel bits. */
static void change_heads(stress_random *r, fkv_layer_config *l) {
    static layer_bits others;
    const uint8_t *bits = l->channel_bits;
    if (l->rope_dim != 0) {
        l->rope_dim = l->rope_dim == 16 ? 32 : l->rope_dim - 16;
        return;
    }
    if (bits == NULL) l->n_kv_heads = l->n_q_heads += l->n_kv_heads;
    while (bits != NULL && (l->channel_bits == bits || memcmp(others, bits, (size_t)l->n_kv_heads * l->head_dim) == 0))
        draw_channel_bits(r, l, others);
}

void stress_config_foreign(stress_random *r, const stress_config *c, stress_config *s) {
    *s = *c;
    s->base.max_tokens = 4096;
    s->base.max_seqs = 1;
    s->base.n_threads = 1;
    s->one_layer = false;
    fkv_layer_config *l = &s->layers[stress_below(r, s->base.n_layers)];
    switch (stress_below(r, s->base.rotate == FKV_ROTATE_NONE ? 8 : 9)) {
    case 0: s->base.weights_id[stress_below(r, 32)] ^= (uint8_t)(1u << stress_below(r, 8)); break;
    case 1: s->base.rope_id[0] = 'N'; break;
    case 2: s->base.page_tokens = s->base.page_tokens == 256 ? 16 : 2 * s->base.page_tokens; break;
    case 3: s->base.page_type = s->base.page_type == FKV_F16 ? FKV_BF16 : FKV_F16; break;
    case 4:
        if (required_rotations(s) == 0)
            s->base.rotate = (fkv_rotate)(((uint32_t)s->base.rotate + stress_between(r, 1, 3)) % 4);
        else
            s->base.rotation_seed ^= 1;
        break;
    case 5: change_heads(r, l); break;
    case 7: s->base.numerics[0] = 'C'; break;
    case 6:
        if (l->k.bits == 16) {
            l->window++;
        } else {
            l->k = l->v = (fkv_codec_config){.bits = 16};
            l->channel_bits = NULL;
        }
        break;
    default: s->base.rotation_seed ^= UINT64_C(1) << stress_below(r, 64);
    }
    place_layers(s);
}

bool stress_layer_is_latent(const stress_config *c, uint32_t layer) { return c->layers[layer].rope_dim != 0; }

bool stress_layer_is_sealed(const stress_config *c, uint32_t layer) {
    return c->layers[layer].k.kind == FKV_CODEC_SEALED || c->layers[layer].k.kind == FKV_CODEC_CALIBRATED;
}

bool stress_has_sealed_layer(const stress_config *c) {
    for (uint32_t i = 0; i < c->base.n_layers; i++)
        if (stress_layer_is_sealed(c, i)) return true;
    return false;
}

bool stress_has_window(const stress_config *c) {
    for (uint32_t i = 0; i < c->base.n_layers; i++)
        if (c->layers[i].window != 0) return true;
    return false;
}

bool stress_has_full_layer(const stress_config *c) {
    for (uint32_t i = 0; i < c->base.n_layers; i++)
        if (c->layers[i].window == 0) return true;
    return false;
}

const char *stress_config_text(const stress_config *c) {
    static char text[1600];
    int n = snprintf(
        text, sizeof text,
        "isa %d, rows %d, pages of %u of type %d, rotate %d, %u tokens, %u seqs, steps of %u, %u threads, numbers %d, outlier %g/%g/%g, queries %g:",
        (int)c->base.isa, (int)c->base.row_type, c->base.page_tokens, (int)c->base.page_type, (int)c->base.rotate,
        c->base.max_tokens, c->base.max_seqs, c->base.max_step_tokens, c->base.n_threads, (int)c->numbers, (double)c->outlier[0],
        (double)c->outlier[1], (double)c->outlier[2], (double)c->query_size);
    for (uint32_t i = 0; i < c->base.n_layers && n < (int)sizeof text - 200; i++) {
        const fkv_layer_config *l = &c->layers[i];
        n += snprintf(text + n, sizeof text - (size_t)n,
                      " [%u/%u/%u+%u K%u g%u kind %d V%u g%u kind %d window %u sinks %u scale %g cap %g%s]", l->n_q_heads,
                      l->n_kv_heads, l->head_dim, l->rope_dim, l->k.bits, l->k.group, (int)l->k.kind, l->v.bits, l->v.group,
                      (int)l->v.kind, l->window, l->n_sinks, (double)l->scale, (double)l->softcap,
                      l->sink_logits != NULL ? " learned sinks" : "");
    }
    for (uint32_t i = 0; i < c->n_states && n < (int)sizeof text - 200; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, " [state of %u bytes in layer %u, %u snapshots]", c->state_bytes[i],
                      c->at[c->base.n_layers + i], c->base.max_snapshots);
    return text;
}
