/* Implements visible_values.h. Copies of tiles are on the stack. A copy holds the scales and biases of the tile or, for 16-bit
 * codecs, the rows of 16 tokens. The kernels process the copy like a page, so results are bit-identical whether or not masked
 * values are finite. */
#include "visible_values.h"

enum { SLICE_TOKENS = 16, MAX_ROW_GROUPS = FKV_MAX_HEAD_DIM / 32 };

static bool mask_shows(fkv_row_mask mask, uint32_t token) {
    return token < mask.end && (token >= mask.begin || token < mask.sinks);
}

/* Returns whether the codec has scales. A codec without scales stores rows as 16-bit values. */
static bool has_scales(const fkv_codec *codec) { return codec->row_bytes[FKV_PART_SCALES] != 0; }

/* Returns whether any value of the tokens [from, end) may be non-finite. Float16 rows, scales and biases are checked for infinity
 * and NaN. For bfloat16, the limit is 2^112, so that scale * code + bias cannot overflow a float. */
static bool any_not_finite(const fkv_value_tile *t, uint32_t from, uint32_t end) {
    enum { F16_INFINITY = 0x7c00, BF16_2_POW_112 = (127 + 112) << 7 };
    const fkv_codec *codec = t->codec;
    uint16_t limit = codec->type == FKV_F16 ? F16_INFINITY : BF16_2_POW_112;
    if (from >= end) return false;
    for (int p = 0; p < FKV_N_PARTS; p++) {
        if (p == FKV_PART_CODES && has_scales(codec)) continue; /* codes are always finite */
        size_t bytes = codec->row_bytes[p];
        if (t->kernels->largest(t->part[p] + from * bytes, (end - from) * bytes / 2) >= limit) return true;
    }
    return false;
}

/* Returns whether a masked value may be non-finite. A token that is masked for any row is either before the window of the last
 * row (and not a sink) or past the end of the first row's mask. */
static bool hides_not_finite(const fkv_value_tile *t) {
    fkv_row_mask last = t->masks[t->n_rows - 1];
    return any_not_finite(t, last.sinks, fkv_min_u32(last.begin, t->n_tokens)) || any_not_finite(t, t->masks[0].end, t->n_tokens);
}

/* Copies one part (codes, scales or biases) of n tokens, starting at token `from`. Bytes of masked tokens are set to 0. */
static void copy_visible(const fkv_value_tile *t, fkv_row_mask mask, uint32_t from, uint32_t n, fkv_part p, uint8_t *to) {
    uint32_t bytes = t->codec->row_bytes[p];
    for (uint32_t i = 0; i < n; i++) {
        if (mask_shows(mask, from + i))
            memcpy(to + (size_t)i * bytes, t->part[p] + (size_t)(from + i) * bytes, bytes);
        else
            memset(to + (size_t)i * bytes, 0, bytes);
    }
}

static void visible_scaled_values(const fkv_value_tile *t, uint32_t row, fkv_fetch *next) {
    /* the arrays are also zeroed past n_tokens, because kernels read whole vectors */
    uint8_t scales[FKV_TILE_TOKENS * MAX_ROW_GROUPS * 2] = {0};
    uint8_t biases[FKV_TILE_TOKENS * MAX_ROW_GROUPS * 2] = {0};
    const fkv_codec *codec = t->codec;
    copy_visible(t, t->masks[row], 0, t->n_tokens, FKV_PART_SCALES, scales);
    copy_visible(t, t->masks[row], 0, t->n_tokens, FKV_PART_BIASES, biases);
    const uint8_t *part[FKV_N_PARTS] = {t->part[FKV_PART_CODES], scales, biases};
    t->values(codec, part, next, t->n_tokens, t->p + (size_t)row * FKV_TILE_TOKENS, t->heads, t->out + (size_t)row * codec->dim);
}

static void visible_half_values(const fkv_value_tile *t, uint32_t row, fkv_fetch *next) {
    uint8_t rows[SLICE_TOKENS * FKV_MAX_HEAD_DIM * 2];
    const fkv_codec *codec = t->codec;
    const uint8_t *part[FKV_N_PARTS] = {rows, NULL, NULL};
    for (uint32_t from = 0; from < t->n_tokens; from += SLICE_TOKENS) {
        uint32_t n = fkv_min_u32(SLICE_TOKENS, t->n_tokens - from);
        copy_visible(t, t->masks[row], from, n, FKV_PART_CODES, rows);
        t->values(codec, part, next, n, t->p + (size_t)row * FKV_TILE_TOKENS + from, t->heads, t->out + (size_t)row * codec->dim);
    }
}

void fkv_attn_visible_values(const fkv_value_tile *t, fkv_fetch *next) {
    const fkv_codec *codec = t->codec;
    if (!hides_not_finite(t)) {
        t->values(codec, t->part, next, t->n_tokens, t->p, t->n_rows, t->out);
        return;
    }
    const fkv_cpu_kernels *kernels = t->kernels;
    kernels->leave(); /* ends the pass that the caller started for all rows; each query below starts a new pass */
    for (uint32_t row = 0; row < t->n_rows; row += t->heads) {
        kernels->enter(t->k_codec, t->heads);
        if (has_scales(codec))
            visible_scaled_values(t, row, next);
        else
            visible_half_values(t, row, next);
        kernels->leave();
    }
    kernels->enter(t->k_codec, t->n_rows);
}
