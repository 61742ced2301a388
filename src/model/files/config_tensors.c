/* Declares the tensors of a model of which only config.json is available; see config_tensors.h.
 *
 * Tensor types are estimates. It is assumed that MLX quantizes all matrices, that AWQ, GPTQ and FP8 quantize the projections of
 * the layers, and that MXFP4 quantizes the experts. Quantization settings that config.json states for individual modules are
 * ignored.
 */
#include "config_tensors.h"

#include "../architecture.h"
#include "hf_config.h"
#include "linear_codes.h"
#include "quantization.h"

#include <inttypes.h>

static const uint8_t NO_DATA[64]; /* base address of all declared tensors, never read */

fkv_status fkv_config_open(fkv_weights *weights, const char *path) {
    fkv_mapped config = {0};
    FKV_TRY(fkv_weights_map(weights, path, &config));
    weights->is_config = true;
    return fkv_hf_config_read(weights, (const char *)config.bytes, (size_t)config.size, path);
}

/* ---- optional tensors ---- */

static bool ends_with_any(const char *name, const char *const *ends, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (fkv_ends_with(name, ends[i])) return true;
    return false;
}

bool fkv_config_has_tensor(const fkv_weights *weights, uint32_t layer, const char *name) {
    static const char *const stacked[] = {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"};
    static const char *const qkv_biases[] = {"attn_q.bias", "attn_k.bias", "attn_v.bias"};
    static const char *const mlp_biases[] = {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"};
    static const char *const expert_biases[] = {"ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias",
                                                "ffn_down_exps.bias"};
    const fkv_hparams *h = &weights->hparams;
    const fkv_declared *d = &weights->declared;
    if (ends_with_any(name, stacked, 3)) return true;
    if (ends_with_any(name, qkv_biases, 3)) return d->qkv_bias;
    if (ends_with_any(name, mlp_biases, 3)) return d->mlp_bias;
    if (ends_with_any(name, expert_biases, 4)) return h->features.activation == FKV_SWIGLU_CLAMPED;
    if (strcmp(name, "attn_output.bias") == 0) return d->o_bias;
    if (strcmp(name, "attn_v.weight") == 0) return !d->k_is_v || fkv_architecture_window(h, layer) != 0;
    if (strcmp(name, "exp_probs_b.bias") == 0) return h->features.sigmoid_router;
    if (strcmp(name, "ffn_gate_inp_shexp.weight") == 0) return !h->features.sigmoid_router;
    if (strcmp(name, "layer_output_scale.weight") == 0 || strcmp(name, "ffn_down_exps.scale") == 0) return true;
    return strcmp(name, "output.weight") == 0 && !d->is_tied;
}

/* ---- types ---- */

static bool is_projection(const char *name) {
    static const char *const ends[] = {".attn_q.weight",     ".attn_k.weight",   ".attn_v.weight",    ".attn_output.weight",
                                       ".ffn_gate.weight",   ".ffn_up.weight",   ".ffn_down.weight",  "_exps.weight",
                                       "_gate_shexp.weight", "_up_shexp.weight", "_down_shexp.weight"};
    return ends_with_any(name, ends, sizeof ends / sizeof ends[0]) && !fkv_ends_with(name, "_inp_shexp.weight");
}

static bool is_quantized(const struct fkv_quantization *q, const char *name, uint64_t n_rows, uint32_t n_cols) {
    const uint32_t group = q->group != 0 ? q->group : n_cols;
    if (n_rows == 1 || n_cols % group != 0) return false;
    if (!q->is_hf) return true;
    return q->type == FKV_TENSOR_MLX_MXFP4 ? fkv_ends_with(name, "_exps.weight") : is_projection(name);
}

static void set_mlx_type(const struct fkv_quantization *q, fkv_tensor_type float_type, fkv_tensor *t) {
    const bool is_affine = q->type == FKV_TENSOR_MLX_AFFINE;
    t->bits = q->bits;
    t->group = q->group;
    t->row_bytes = (uint64_t)t->n_cols * q->bits / 8;
    t->scale_type = is_affine ? float_type : FKV_TENSOR_U8;
    t->scales = NO_DATA;
    t->biases = is_affine ? NO_DATA : NULL;
    t->scale_row_bytes = (uint64_t)(t->n_cols / q->group) * fkv_tensor_format_of(t->scale_type)->block_bytes;
}

static fkv_status set_linear_type(fkv_weights *weights, const struct fkv_quantization *q, fkv_tensor *t) {
    struct fkv_linear_codes *l = fkv_weights_keep(weights, sizeof *l);
    FKV_REQUIRE(l != NULL, FKV_NO_MEMORY, "out of memory declaring tensor %s", t->name);
    l->bits = q->type == FKV_TENSOR_FP8 ? 8 : q->bits;
    l->group = q->group != 0 ? q->group : t->n_cols;
    l->group_rows = q->type != FKV_TENSOR_FP8 ? 1 : q->group_rows != 0 ? q->group_rows : t->n_rows;
    l->n_rows = t->n_rows;
    l->scale_type = FKV_TENSOR_F16;
    l->scales = NO_DATA;
    l->zeros = NO_DATA;
    t->linear = l;
    t->row_bytes = (uint64_t)t->n_cols * l->bits / 8;
    return FKV_OK;
}

fkv_status fkv_config_declare(fkv_weights *weights, const char *name, uint64_t n_rows, uint32_t n_cols,
                              const fkv_tensor **tensor) {
    const struct fkv_quantization *q = weights->n_quantized > 0 ? &weights->quantized[0] : NULL;
    const uint64_t dims[] = {n_rows, n_cols};
    uint64_t bytes = 0;
    fkv_tensor *t = fkv_weights_keep(weights, sizeof *t);
    FKV_REQUIRE(t != NULL, FKV_NO_MEMORY, "out of memory declaring tensor %s", name);
    FKV_TRY(fkv_tensor_describe(t, (fkv_bytes){.data = name, .size = strlen(name)}, weights->declared.float_type, dims, 2,
                                "config.json", &bytes));
    t->data = NO_DATA;
    if (q != NULL && is_quantized(q, name, n_rows, n_cols)) {
        t->type = q->type;
        if (q->type >= FKV_TENSOR_AWQ)
            FKV_TRY(set_linear_type(weights, q, t));
        else
            set_mlx_type(q, weights->declared.float_type, t);
    }
    *tensor = t;
    return FKV_OK;
}
