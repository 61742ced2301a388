/* Which layers are full and which have a window, as the one number that fkv_hparams has: the period of the full layers. Feed it
 * layers in order; the period is the place of the first full layer.
 */
#ifndef FKV_LAYER_PATTERN_H
#define FKV_LAYER_PATTERN_H

#include "../../base/base.h"

typedef struct fkv_layer_pattern {
    uint32_t n_layers;
    uint32_t period; /* 0: no full layer so far */
    bool is_irregular;
} fkv_layer_pattern;

static inline void fkv_layer_pattern_add(fkv_layer_pattern *pattern, bool is_full) {
    pattern->n_layers++;
    if (pattern->period == 0 && is_full) pattern->period = pattern->n_layers;
    const bool expected = pattern->period != 0 && pattern->n_layers % pattern->period == 0;
    if (is_full != expected) pattern->is_irregular = true;
}

/* FKV_UNSUPPORTED where one number does not say it. Without any full layer the period is one more than the layers. */
static inline fkv_status fkv_layer_pattern_period(const fkv_layer_pattern *pattern, const char *path, uint32_t *period) {
    FKV_REQUIRE(!pattern->is_irregular, FKV_UNSUPPORTED, "full and windowed layers in no regular order are not supported: %s",
                path);
    *period = pattern->period != 0 ? pattern->period : pattern->n_layers + 1;
    return FKV_OK;
}

#endif
