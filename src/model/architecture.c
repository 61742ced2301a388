/* The table. See architecture.h. A new architecture that differs in these ways only is one line here and nothing elsewhere. */
#include "architecture.h"

#include <stdio.h>

static const fkv_architecture ARCHITECTURES[] = {
    {.name = "llama"},
    {.name = "qwen2", .qkv_bias = true},
    {.name = "qwen3", .qk_norm = true},
    {.name = "gemma3",
     .qk_norm = true,
     .post_norms = true,
     .embedding_sqrt_dim = true,
     .activation = FKV_GELU_TANH,
     .window_pattern = 6,
     .rope_base_local = 10000.0f},
};

const fkv_architecture *fkv_architecture_find(const char *name) {
    for (size_t i = 0; i < sizeof ARCHITECTURES / sizeof ARCHITECTURES[0]; i++)
        if (strcmp(ARCHITECTURES[i].name, name) == 0) return &ARCHITECTURES[i];
    return NULL;
}

const char *fkv_architecture_names(void) { return "llama, qwen2, qwen3 and gemma3"; }

static bool has_windows(const fkv_architecture *architecture, const fkv_hparams *hparams) {
    return architecture->window_pattern != 0 && hparams->window != 0;
}

uint32_t fkv_architecture_window(const fkv_architecture *architecture, const fkv_hparams *hparams, uint32_t layer) {
    if (!has_windows(architecture, hparams)) return 0;
    uint32_t pattern = hparams->window_pattern != 0 ? hparams->window_pattern : architecture->window_pattern;
    return (layer + 1) % pattern == 0 ? 0 : hparams->window;
}

float fkv_architecture_local_base(const fkv_architecture *architecture, const fkv_hparams *hparams) {
    if (!has_windows(architecture, hparams)) return hparams->rope_base;
    if (hparams->rope_base_local != 0.0f) return hparams->rope_base_local;
    return architecture->rope_base_local != 0.0f ? architecture->rope_base_local : hparams->rope_base;
}

/* Not behind a norm, which would undo what is known of the bias, nor under a soft cap, which shifts do not pass. */
bool fkv_architecture_centers_keys(const fkv_architecture *architecture, const fkv_hparams *hparams) {
    return architecture->qkv_bias && !architecture->qk_norm && hparams->softcap == 0.0f;
}

fkv_status fkv_architecture_rope_id(const fkv_architecture *architecture, const fkv_hparams *hparams, char rope_id[64]) {
    char local[32] = "";
    char scale[32] = "";
    char center[24] = "";
    if (has_windows(architecture, hparams))
        (void)snprintf(local, sizeof local, " local=%.9g", (double)fkv_architecture_local_base(architecture, hparams));
    if (hparams->rope_scale != 1.0f) (void)snprintf(scale, sizeof scale, " scale=%.9g", (double)hparams->rope_scale);
    if (fkv_architecture_centers_keys(architecture, hparams))
        (void)snprintf(center, sizeof center, " center=%u", hparams->context);
    int length = snprintf(rope_id, 64, "%s dim=%u base=%.9g%s%s%s", hparams->rope_interleaved ? "pairs" : "neox",
                          hparams->rope_dim, (double)hparams->rope_base, local, scale, center);
    FKV_REQUIRE(length > 0 && length < 64, FKV_UNSUPPORTED, "the RoPE of this model takes %d characters to name and 63 are kept",
                length);
    return FKV_OK;
}
