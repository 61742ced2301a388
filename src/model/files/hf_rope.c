/* Reads the RoPE parameters of a Hugging Face config.json: bases, scaling, partial rotation and factors per pair of channels. See
 * hf_reader.h.
 */
#include "hf_reader.h"

#include "hf_latent.h"
#include "hf_traits.h"

#include <math.h>

/* Reads one factor per RoPE pair into memory that lives as long as the weights. */
static fkv_status read_rope_factors(fkv_weights *weights, const json_t *rope, const char *key, const char *path, uint32_t *n,
                                    const float **out) {
    const json_t *list = get_field(rope, key);
    FKV_REQUIRE(json_is_array(list) && json_array_size(list) > 0 && json_array_size(list) <= FKV_MAX_HEAD_DIM / 2,
                FKV_FILE_FORMAT, "%s: longrope requires %s to be a list of numbers", path, key);
    *n = (uint32_t)json_array_size(list);
    float *numbers = fkv_weights_keep(weights, *n * sizeof *numbers);
    FKV_REQUIRE(numbers != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %u RoPE factors", path, *n);
    for (uint32_t i = 0; i < *n; i++) {
        const json_t *number = json_array_get(list, i);
        numbers[i] = (float)json_number_value(number);
        FKV_REQUIRE(json_is_number(number) && isfinite(numbers[i]) && numbers[i] > 0, FKV_FILE_FORMAT,
                    "%s: %s must contain only numbers above 0", path, key);
    }
    *out = numbers;
    return FKV_OK;
}

/* Reads proportional RoPE: the leading fraction partial_rotary_factor of the pairs rotates at the usual frequencies, and the
 * other pairs do not rotate. As in GGUF, pairs that rotate have a frequency divisor of 1, and pairs that do not rotate have a
 * divisor of 1e30. */
static fkv_status read_proportional_rope(fkv_weights *weights, const json_t *object, const char *path, fkv_rope *rope) {
    const uint32_t n = weights->hparams.head_dim / 2;
    float rotary_share = 1;
    FKV_TRY(get_f32(object, "partial_rotary_factor", path, &rotary_share));
    FKV_TRY(get_f32(object, "factor", path, &rope->factor));
    FKV_REQUIRE(rotary_share > 0 && rotary_share <= 1 && rope->factor > 0 && n > 0 && n <= FKV_MAX_HEAD_DIM / 2, FKV_FILE_FORMAT,
                "%s: invalid proportional RoPE: partial_rotary_factor %g, factor %g", path, (double)rotary_share,
                (double)rope->factor);
    float *factors = fkv_weights_keep(weights, n * sizeof *factors);
    FKV_REQUIRE(factors != NULL, FKV_NO_MEMORY, "%s: out of memory allocating %u RoPE factors", path, n);
    for (uint32_t i = 0; i < n; i++) factors[i] = i < (uint32_t)((double)rotary_share * n) ? 1.0f : 1e30f;
    rope->n_factors = n;
    rope->short_factors = rope->long_factors = factors;
    return FKV_OK;
}

static fkv_status read_rope_scaling(fkv_weights *weights, const json_t *object, const char *type, const char *path,
                                    fkv_rope *rope) {
    static const struct {
        const char *type;
        fkv_rope_scaling scaling;
    } known[] = {{"linear", FKV_ROPE_LINEAR},
                 {"llama3", FKV_ROPE_LLAMA3},
                 {"yarn", FKV_ROPE_YARN},
                 {"longrope", FKV_ROPE_LONG},
                 {"su", FKV_ROPE_LONG}};
    size_t i = 0;
    while (i < sizeof known / sizeof known[0] && strcmp(type, known[i].type) != 0) i++;
    FKV_REQUIRE(i < sizeof known / sizeof known[0], FKV_UNSUPPORTED,
                "%s: unsupported RoPE scaling '%s': expected linear, llama3, yarn or longrope", path, fkv_show_text(type).text);
    rope->scaling = known[i].scaling;
    bool truncate = true;
    float factor = 0;
    uint32_t n_short = 0;
    const struct {
        const char *key;
        float *out;
    } keys[] = {{"factor", &factor},
                {"attention_factor", &rope->attention_factor},
                {"low_freq_factor", &rope->low_freq},
                {"high_freq_factor", &rope->high_freq},
                {"beta_fast", &rope->beta_fast},
                {"beta_slow", &rope->beta_slow},
                {"mscale", &rope->mscale},
                {"mscale_all_dim", &rope->mscale_all}};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) FKV_TRY(get_f32(object, keys[k].key, path, keys[k].out));
    FKV_TRY(get_u32(object, "original_max_position_embeddings", path, &rope->original_context));
    FKV_TRY(get_bool(object, "truncate", path, &truncate));
    rope->yarn_unrounded = !truncate;
    if (rope->scaling == FKV_ROPE_LONG) {
        FKV_TRY(read_rope_factors(weights, object, "short_factor", path, &n_short, &rope->short_factors));
        FKV_TRY(read_rope_factors(weights, object, "long_factor", path, &rope->n_factors, &rope->long_factors));
        FKV_REQUIRE(n_short == rope->n_factors, FKV_FILE_FORMAT, "%s: short_factor and long_factor differ in length", path);
    }
    FKV_REQUIRE(factor > 0 || rope->scaling == FKV_ROPE_LONG || rope->scaling == FKV_ROPE_YARN, FKV_FILE_FORMAT,
                "%s: %s RoPE scaling has an invalid factor of %g", path, type, (double)factor);
    if (get_field(object, "short_mscale") != NULL) {
        float long_mscale = 0;
        FKV_TRY(get_f32(object, "short_mscale", path, &rope->attention_factor));
        FKV_TRY(get_f32(object, "long_mscale", path, &long_mscale));
        FKV_REQUIRE(long_mscale == rope->attention_factor, FKV_UNSUPPORTED,
                    "%s: different values of short_mscale and long_mscale are not supported", path);
    }
    rope->factor = factor; /* if the factor is 0, fkv_hf_read_rope() derives it from the context lengths */
    return FKV_OK;
}

/* Returns whether the architecture (Hunyuan) supports RoPE scaling with a fixed factor alpha. */
static bool has_alpha_rope(const fkv_weights *weights) { return strncmp(weights->architecture, "hunyuan", 7) == 0; }

/* Scales the RoPE base by alpha^(dim / (dim - 2)), if the config states alpha. */
static fkv_status read_rope_alpha(const fkv_hf_reader *r, const fkv_weights *weights) {
    fkv_hparams *h = r->h;
    const json_t *object = get_field(r->root, "rope_parameters");
    if (object == NULL) object = get_field(r->root, "rope_scaling");
    float alpha = 0;
    const char *type = "";
    if (!has_alpha_rope(weights) || object == NULL || h->head_dim <= 2) return FKV_OK;
    FKV_TRY(get_text(object, "type", r->path, &type));
    FKV_TRY(get_text(object, "rope_type", r->path, &type));
    FKV_TRY(get_f32(object, "alpha", r->path, &alpha));
    if (strcmp(type, "dynamic") != 0 || !(alpha > 0)) return FKV_OK;
    const float base = h->rope.base != 0 ? h->rope.base : 10000.0f;
    h->rope.base = (float)((double)base * pow(alpha, (double)h->head_dim / (double)(h->head_dim - 2)));
    return FKV_OK;
}

/* Reads a RoPE object: {"rope_type": ..., "factor": ..., "rope_theta": ...}. Old files use "type" for "rope_type". */
static fkv_status read_rope_object(fkv_weights *weights, const json_t *object, const char *path, fkv_rope *rope, float *rotary) {
    const char *type = "default";
    FKV_REQUIRE(json_is_object(object), FKV_FILE_FORMAT, "%s: the RoPE scaling is not an object", path);
    FKV_TRY(get_text(object, "type", path, &type));
    FKV_TRY(get_text(object, "rope_type", path, &type));
    FKV_TRY(get_f32(object, "rope_theta", path, &rope->base));
    if (strcmp(type, "proportional") == 0) return read_proportional_rope(weights, object, path, rope);
    FKV_TRY(get_f32(object, "partial_rotary_factor", path, rotary));
    FKV_TRY(get_f32(object, "llama_4_scaling_beta", path, &weights->hparams.temperature));
    /* mrope: the three positions of a text token are equal, so the result is the same as with plain RoPE */
    if (strcmp(type, "default") == 0 || strcmp(type, "mrope") == 0) return FKV_OK;
    if (strcmp(type, "dynamic") == 0 && get_field(object, "alpha") != NULL && has_alpha_rope(weights))
        return FKV_OK; /* fkv_hf_read_rope() scales the base */
    return read_rope_scaling(weights, object, type, path, rope);
}

/* Reads rope_theta, rope_scaling and rope_local_base_freq, or the newer rope_parameters, which may have one object per layer
 * type. */
static fkv_status read_ropes(const fkv_hf_reader *r, fkv_weights *weights, float *rotary) {
    const json_t *scaling = get_field(r->root, "rope_scaling");
    const json_t *parameters = get_field(r->root, "rope_parameters");
    fkv_hparams *h = r->h;
    FKV_TRY(get_f32(r->root, "rope_theta", r->path, &h->rope.base));
    FKV_TRY(get_f32(r->root, "partial_rotary_factor", r->path, rotary));
    if (h->features.separate_local_rope) FKV_TRY(get_f32(r->root, "rope_local_base_freq", r->path, &h->local_rope.base));
    if (scaling != NULL) FKV_TRY(read_rope_object(weights, scaling, r->path, &h->rope, rotary));
    if (parameters == NULL) return FKV_OK;
    const json_t *full = get_field(parameters, "full_attention");
    const json_t *local = get_field(parameters, "sliding_attention");
    if (full == NULL) return read_rope_object(weights, parameters, r->path, &h->rope, rotary);
    FKV_REQUIRE(h->features.separate_local_rope, FKV_UNSUPPORTED,
                "%s: rope_parameters per layer type are not supported for model_type %s", r->path, r->model->type);
    FKV_TRY(read_rope_object(weights, full, r->path, &h->rope, rotary));
    if (local == NULL) return FKV_OK;
    const float of_full = *rotary;
    FKV_TRY(read_rope_object(weights, local, r->path, &h->local_rope, rotary));
    FKV_REQUIRE(*rotary == of_full, FKV_UNSUPPORTED,
                "%s: different values of partial_rotary_factor per layer type are not supported", r->path);
    FKV_REQUIRE(h->local_rope.scaling == FKV_ROPE_LINEAR && h->local_rope.factor == 1 && h->local_rope.n_factors == 0,
                FKV_UNSUPPORTED, "%s: scaled RoPE in windowed layers is not supported", r->path);
    return FKV_OK;
}

/* Validates partial_rotary_factor. Partial rotation of a head is supported for GLM, phi3, models with delta nets or latent
 * attention, and model types with the trait rotates_partly. For other model types, transformers ignores partial_rotary_factor if
 * RoPE is not scaled, and so does this function. It rejects other models with scaled RoPE and a factor other than 1, which
 * transformers cannot run either. */
static fkv_status check_partial_rotary(const fkv_hf_reader *r, float *rotary) {
    const bool is_supported = strncmp(r->model->type, "glm", 3) == 0 || strcmp(r->model->type, "phi3") == 0 ||
                              fkv_hf_traits_of(r->model->type)->rotates_partly || r->h->features.recurrence == FKV_DELTA_NET ||
                              fkv_hf_is_latent(r->model->type); /* qk_rope_head_dim states the number of rotated dimensions */
    FKV_REQUIRE(*rotary > 0 && *rotary <= 1, FKV_FILE_FORMAT,
                "%s: invalid partial_rotary_factor %g: expected a value greater than 0 and at most 1", r->path, (double)*rotary);
    if (is_supported) return FKV_OK;
    const bool is_scaled = r->h->rope.scaling != FKV_ROPE_LINEAR || r->h->rope.factor != 1;
    FKV_REQUIRE(*rotary == 1 || !is_scaled, FKV_UNSUPPORTED,
                "%s: partial_rotary_factor %g with scaled RoPE is not supported for model_type %s", r->path, (double)*rotary,
                r->model->type);
    const bool is_solar =
        strcmp(r->model->type, "solar_open") == 0; /* transformers cannot run solar_open with partial rotation */
    FKV_REQUIRE(*rotary == 1 || !is_solar, FKV_UNSUPPORTED, "%s: partial_rotary_factor %g is not supported for model_type %s",
                r->path, (double)*rotary, r->model->type);
    *rotary = 1;
    return FKV_OK;
}

fkv_status fkv_hf_read_rope(const fkv_hf_reader *r, fkv_weights *weights) {
    fkv_hparams *h = r->h;
    /* `rotary` is the fraction of each head's dimensions that RoPE rotates; the default values are those of transformers */
    float rotary = strncmp(r->model->type, "glm", 3) == 0 ? 0.5f : r->h->features.recurrence == FKV_DELTA_NET ? 0.25f : 1.0f;
    uint32_t rotary_dim = 0;
    FKV_TRY(get_u32(r->root, "rotary_dim", r->path, &rotary_dim));
    if (rotary_dim != 0 && h->head_dim != 0) rotary = (float)rotary_dim / (float)h->head_dim;
    FKV_TRY(read_ropes(r, weights, &rotary));
    FKV_TRY(check_partial_rotary(r, &rotary));
    FKV_TRY(read_rope_alpha(r, weights));
    h->rope.dim = (uint32_t)((double)h->head_dim * (double)rotary);
    if (r->local.head_dim != 0) h->local_rope.dim = (uint32_t)((double)r->local.head_dim * (double)rotary);
    /* phi3 stores the original context length at the top level of the config */
    FKV_TRY(get_u32(r->root, "original_max_position_embeddings", r->path, &h->rope.original_context));
    uint32_t original = h->rope.original_context != 0 ? h->rope.original_context : h->context;
    /* phi3 configs omit the RoPE factor, which is the ratio of the context length to the original context length. */
    if (h->rope.factor == 0) h->rope.factor = original > 0 ? (float)h->context / (float)original : 1;
    if (fkv_hf_is_latent(r->model->type)) FKV_TRY(get_u32(r->root, "qk_rope_head_dim", r->path, &h->rope.dim));
    FKV_REQUIRE(h->rope.n_factors == 0 || h->rope.n_factors == h->rope.dim / 2, FKV_FILE_FORMAT,
                "%s: the config has %u RoPE factors instead of %u (one per pair of rotated channels)", r->path, h->rope.n_factors,
                h->rope.dim / 2);
    h->temperature_context = original;
    h->rope_interleaved = r->architecture->hf_interleaved;
    return FKV_OK;
}
