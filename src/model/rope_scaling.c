/* RoPE frequencies; see rope_scaling.h. Each scaling method follows its paper and Hugging Face transformers, and is computed in
 * double precision. */
#include "rope_scaling.h"

#include <math.h>

static double original_context(const fkv_rope *rope, const fkv_hparams *h) {
    return rope->original_context != 0 ? rope->original_context : h->context;
}

/* Llama 3 scaling: divides low frequencies by the scaling factor, keeps high frequencies, and interpolates in between. */
static double scale_llama3(const fkv_rope *rope, const fkv_hparams *h, double frequency) {
    double turns =
        original_context(rope, h) * frequency / (2.0 * acos(-1.0)); /* number of full rotations within the original context */
    double low = (double)rope->low_freq;
    double high = (double)rope->high_freq;
    if (turns > high) return frequency;
    if (turns < low) return frequency / (double)rope->factor;
    double smooth = (turns - low) / (high - low);
    return (1.0 - smooth) * frequency / (double)rope->factor + smooth * frequency;
}

/* Returns the fractional index of the channel pair that completes `turns` rotations within the original context. */
static double yarn_pair_index(const fkv_rope *rope, const fkv_hparams *h, double turns) {
    return rope->dim * log(original_context(rope, h) / (turns * 2.0 * acos(-1.0))) / (2.0 * log((double)rope->base));
}

static void scale_yarn(const fkv_rope *rope, const fkv_hparams *h, double *frequencies) {
    double low = yarn_pair_index(rope, h, (double)rope->beta_fast);
    double high = yarn_pair_index(rope, h, (double)rope->beta_slow);
    low = fmax(rope->yarn_unrounded ? low : floor(low), 0.0);
    high = fmin(rope->yarn_unrounded ? high : ceil(high), rope->dim - 1.0);
    if (high == low) high += 0.001;
    for (uint32_t i = 0; i < rope->dim / 2; i++) {
        double stretched = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        frequencies[i] *= stretched / (double)rope->factor + (1.0 - stretched);
    }
}

static double yarn_mscale(double factor, double mscale) { return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0; }

/* Returns the attention factor, by which the cosines and sines of RoPE are multiplied. */
static double attention_factor(const fkv_rope *rope, const fkv_hparams *h) {
    double factor = (double)rope->factor;
    if (rope->attention_factor != 0.0f) return (double)rope->attention_factor;
    if (rope->scaling == FKV_ROPE_YARN && rope->mscale != 0.0f && rope->mscale_all != 0.0f)
        return yarn_mscale(factor, (double)rope->mscale) / yarn_mscale(factor, (double)rope->mscale_all);
    if (rope->scaling == FKV_ROPE_YARN) return yarn_mscale(factor, 1.0);
    if (rope->scaling == FKV_ROPE_LONG && factor > 1.0) return sqrt(1.0 + log(factor) / log(original_context(rope, h)));
    return 1.0;
}

double fkv_rope_frequencies(const fkv_rope *rope, const fkv_hparams *h, bool is_long, double *frequencies) {
    const float *divisors = is_long ? rope->long_factors : rope->short_factors;
    for (uint32_t i = 0; i < rope->dim / 2; i++) {
        double frequency = pow((double)rope->base, -2.0 * i / rope->dim);
        if (rope->scaling == FKV_ROPE_LINEAR) frequency /= (double)rope->factor;
        if (rope->scaling == FKV_ROPE_LLAMA3) frequency = scale_llama3(rope, h, frequency);
        frequencies[i] = divisors != NULL ? frequency / (double)divisors[i] : frequency;
    }
    if (rope->scaling == FKV_ROPE_YARN) scale_yarn(rope, h, frequencies);
    return attention_factor(rope, h);
}

bool fkv_rope_is_long(const fkv_hparams *h, uint32_t max_tokens) {
    return h->rope.short_factors != h->rope.long_factors && max_tokens > original_context(&h->rope, h);
}
