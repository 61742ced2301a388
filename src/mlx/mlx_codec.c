/* See mlx_codec.h.
 *
 * Affine codes are computed by mlx.core.quantize, except for rotated rows with at most 4 bits per value. The scales and biases of
 * these rows are fitted by least squares (src/codec/affine.h). To be bit-identical to the host, the fit must add the elements of
 * a group in a fixed order, which fkv_mlx_sum_in_lanes() does.
 */
#include "mlx_codec.h"

#include "../codec/affine.h"
#include "../codec/turbo.h"

#include <float.h>
#include <math.h>

mlx_array fkv_mlx_storable(fkv_mlx_state *mlx, mlx_array x) {
    fkv_mlx_graph *g = &mlx->graph;
    const fkv_mlx_constants *c = &mlx->constants;
    mlx_array numbers = fkv_mlx_where(g, fkv_mlx_isnan(g, x), c->zero, x);
    return fkv_mlx_minimum(g, fkv_mlx_maximum(g, numbers, c->minus_limit), c->limit);
}

/* Zeroes non-finite values as take_odd() specifies (mlx_codec.h). size: float32 [G, S, n], the magnitudes of the decoded values.
 */
static mlx_array take_odd_of(fkv_mlx_graph *g, mlx_array size, mlx_array *part, mlx_array *other) {
    const mlx_array zero = fkv_mlx_astype(g, fkv_mlx_number(g, 0.0f), MLX_UINT16);
    const mlx_array finite = fkv_mlx_less_equal(g, size, fkv_mlx_number(g, FLT_MAX));
    *part = fkv_mlx_where(g, finite, *part, zero);
    if (other != NULL) *other = fkv_mlx_where(g, finite, *other, zero);
    return fkv_mlx_sum_last(g, fkv_mlx_where(g, finite, fkv_mlx_number(g, 0.0f), fkv_mlx_number(g, NAN)));
}

/* ---- 16 bits ---- */

static void encode_half(fkv_mlx_state *mlx, const fkv_codec *codec, mlx_array x, mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    part[FKV_PART_CODES] = fkv_mlx_view(g, fkv_mlx_astype(g, x, fkv_mlx_page_type(codec)), MLX_UINT16);
}

static mlx_array half_rows(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    return fkv_mlx_astype(g, fkv_mlx_view(g, part[FKV_PART_CODES], fkv_mlx_page_type(codec)), MLX_FLOAT32);
}

static mlx_array scores_half(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q) {
    return fkv_mlx_matmul(g, q, fkv_mlx_transpose(g, half_rows(g, codec, part), FKV_MLX_SHAPE(0, 2, 1)));
}

static mlx_array values_half(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p) {
    return fkv_mlx_matmul(g, p, half_rows(g, codec, part));
}

static mlx_array take_odd_half(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]) {
    return take_odd_of(g, fkv_mlx_abs(g, half_rows(g, codec, part)), &part[FKV_PART_CODES], NULL);
}

/* ---- affine groups ---- */

/* Scale and bias of each group. Both arrays have shape [rows, 1]. */
typedef struct fitted_line {
    mlx_array scale;
    mlx_array bias;
} fitted_line;

/* Returns (x - bias) / scale, the codes before rounding. x: [rows, group] */
static mlx_array places_of(fkv_mlx_graph *g, mlx_array x, fitted_line line) {
    return fkv_mlx_divide(g, fkv_mlx_subtract(g, x, line.bias), line.scale);
}

static mlx_array nearest_codes(fkv_mlx_graph *g, mlx_array places, float bins) {
    return fkv_mlx_round(g, fkv_mlx_minimum(g, fkv_mlx_maximum(g, places, fkv_mlx_number(g, 0.0f)), fkv_mlx_number(g, bins)));
}

/* Refits the scale and bias of every group in the same way as fkv_codec_refit(). x: [rows, group] */
static fitted_line refit_groups(fkv_mlx_state *mlx, mlx_array x, fitted_line line, int rows, int group, float bins) {
    fkv_mlx_graph *g = &mlx->graph;
    const mlx_array limit = mlx->constants.limit;
    mlx_array place = places_of(g, x, line);
    mlx_array code = nearest_codes(g, place, bins);
    mlx_array n = fkv_mlx_number(g, (float)group);
    mlx_array c = fkv_mlx_sum_in_lanes(g, code, rows, group);
    mlx_array cc = fkv_mlx_sum_in_lanes(g, fkv_mlx_multiply(g, code, code), rows, group);
    mlx_array p = fkv_mlx_sum_in_lanes(g, place, rows, group);
    mlx_array cp = fkv_mlx_sum_in_lanes(g, fkv_mlx_multiply(g, code, place), rows, group);
    mlx_array determinant = fkv_mlx_subtract(g, fkv_mlx_multiply(g, n, cc), fkv_mlx_multiply(g, c, c));
    mlx_array slope = fkv_mlx_subtract(g, fkv_mlx_multiply(g, n, cp), fkv_mlx_multiply(g, c, p));
    slope = fkv_mlx_divide(g, slope, determinant);
    mlx_array start = fkv_mlx_divide(g, fkv_mlx_subtract(g, p, fkv_mlx_multiply(g, slope, c)), n);
    const fitted_line fitted = {.scale = fkv_mlx_multiply(g, line.scale, slope),
                                .bias = fkv_mlx_add(g, fkv_mlx_multiply(g, line.scale, start), line.bias)};
    mlx_array good = fkv_mlx_less(g, mlx->constants.zero, determinant);
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less(g, mlx->constants.zero, fitted.scale));
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less_equal(g, fitted.scale, limit));
    good = fkv_mlx_logical_and(g, good, fkv_mlx_less_equal(g, fkv_mlx_abs(g, fitted.bias), limit));
    return (fitted_line){.scale = fkv_mlx_where(g, good, fitted.scale, line.scale),
                         .bias = fkv_mlx_where(g, good, fitted.bias, line.bias)};
}

/* Packs codes into 32-bit words, with the first code in the lowest bits. codes: integer-valued floats, [rows, group]. */
static mlx_array pack_code_words(fkv_mlx_graph *g, mlx_array codes, int rows, int group, int bits) {
    const int per_word = 32 / bits;
    uint32_t place[32];
    for (int i = 0; i < per_word; i++) place[i] = 1u << i * bits;
    mlx_array places = fkv_mlx_adopt(g, mlx_array_new_data(place, &per_word, 1, MLX_UINT32));
    mlx_array words = fkv_mlx_reshape(g, fkv_mlx_astype(g, codes, MLX_UINT32), FKV_MLX_SHAPE(rows, group / per_word, per_word));
    return fkv_mlx_sum_last(g, fkv_mlx_multiply(g, words, places));
}

/* Quantizes rotated rows that have at most 4 bits per value, with fitted scales and biases (src/codec/affine.h). x: [T, G, D] */
static fkv_mlx_affine quantize_fitted(fkv_mlx_state *mlx, mlx_array x, const fkv_codec *codec) {
    fkv_mlx_graph *g = &mlx->graph;
    fkv_mlx_affine out = {.bits = (int)codec->bits, .group = (int)codec->group};
    if (g->failed) return out;
    const int *shape = mlx_array_shape(x);
    const int n_groups = shape[2] / out.group;
    const int rows = shape[0] * shape[1] * n_groups;
    const float bins = (float)((1u << codec->bits) - 1u);
    const fkv_mlx_shape of_lines = FKV_MLX_SHAPE(shape[0], shape[1], n_groups);
    const fkv_mlx_shape of_words = FKV_MLX_SHAPE(shape[0], shape[1], shape[2] * out.bits / 32);
    mlx_array groups = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, out.group));
    mlx_array lo = fkv_mlx_min_last(g, groups);
    mlx_array step = fkv_mlx_divide(g, fkv_mlx_subtract(g, fkv_mlx_max_last(g, groups), lo), fkv_mlx_number(g, bins));
    fitted_line line = {.scale = fkv_mlx_maximum(g, step, fkv_mlx_number(g, 1e-7f)), .bias = lo};
    for (int i = 0; i < FKV_REFITS; i++) line = refit_groups(mlx, groups, line, rows, out.group, bins);
    mlx_array codes = nearest_codes(g, places_of(g, groups, line), bins);
    out.codes = fkv_mlx_reshape(g, pack_code_words(g, codes, rows, out.group, out.bits), of_words);
    out.scales = fkv_mlx_reshape(g, line.scale, of_lines);
    out.biases = fkv_mlx_reshape(g, line.bias, of_lines);
    return out;
}

static void encode_affine(fkv_mlx_state *mlx, const fkv_codec *codec, mlx_array x, mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    const mlx_dtype page_type = fkv_mlx_page_type(codec);
    fkv_mlx_affine made =
        codec->fitted ? quantize_fitted(mlx, x, codec) : fkv_mlx_quantize(g, x, (int)codec->bits, (int)codec->group);
    part[FKV_PART_CODES] = fkv_mlx_view(g, made.codes, MLX_UINT16);
    part[FKV_PART_SCALES] = fkv_mlx_view(g, fkv_mlx_astype(g, made.scales, page_type), MLX_UINT16);
    part[FKV_PART_BIASES] = fkv_mlx_view(g, fkv_mlx_astype(g, made.biases, page_type), MLX_UINT16);
}

static fkv_mlx_affine affine_rows(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    const mlx_dtype type = fkv_mlx_page_type(codec);
    return (fkv_mlx_affine){.codes = fkv_mlx_view(g, part[FKV_PART_CODES], MLX_UINT32),
                            .scales = fkv_mlx_astype(g, fkv_mlx_view(g, part[FKV_PART_SCALES], type), MLX_FLOAT32),
                            .biases = fkv_mlx_astype(g, fkv_mlx_view(g, part[FKV_PART_BIASES], type), MLX_FLOAT32),
                            .bits = (int)codec->bits,
                            .group = (int)codec->group};
}

static mlx_array scores_affine(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q) {
    const fkv_mlx_affine rows = affine_rows(g, codec, part);
    return fkv_mlx_quantized_matmul(g, q, &rows, true);
}

static mlx_array values_affine(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p) {
    const fkv_mlx_affine rows = affine_rows(g, codec, part);
    return fkv_mlx_quantized_matmul(g, p, &rows, false);
}

/* Decodes rows of affine codes. Used for the 8-bit open blocks of sealed layers. */
static mlx_array affine_numbers(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    if (g->failed) return part[FKV_PART_CODES];
    const int *shape = mlx_array_shape(part[FKV_PART_CODES]);
    const int n_groups = shape[0] * shape[1] * (int)(codec->dim / codec->group);
    const fkv_mlx_shape of_rows = FKV_MLX_SHAPE(shape[0], shape[1], (int)codec->dim);
    const fkv_mlx_affine rows = affine_rows(g, codec, part);
    mlx_array codes = fkv_mlx_astype(g, fkv_mlx_view(g, part[FKV_PART_CODES], MLX_UINT8), MLX_FLOAT32);
    codes = fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(n_groups, (int)codec->group));
    mlx_array x = fkv_mlx_multiply(g, codes, fkv_mlx_reshape(g, rows.scales, FKV_MLX_SHAPE(n_groups, 1)));
    x = fkv_mlx_add(g, x, fkv_mlx_reshape(g, rows.biases, FKV_MLX_SHAPE(n_groups, 1)));
    return fkv_mlx_reshape(g, x, of_rows);
}

mlx_array fkv_mlx_open_rows(fkv_mlx_state *mlx, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    FKV_ASSERT(codec->bits == 8 || codec->bits == 16);
    return fkv_mlx_storable(mlx, codec->bits == 8 ? affine_numbers(g, codec, part) : half_rows(g, codec, part));
}

/* Implements take_odd() for affine groups. A group is non-finite if |scale| * (largest code) + |bias| is not finite. */
static mlx_array take_odd_affine(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]) {
    const fkv_mlx_affine rows = affine_rows(g, codec, part);
    const mlx_array bins = fkv_mlx_number(g, (float)((1u << codec->bits) - 1));
    const mlx_array size = fkv_mlx_add(g, fkv_mlx_multiply(g, fkv_mlx_abs(g, rows.scales), bins), fkv_mlx_abs(g, rows.biases));
    return take_odd_of(g, size, &part[FKV_PART_SCALES], &part[FKV_PART_BIASES]);
}

/* ---- TurboQuant ---- */

/* Computes the scale of each row in the same way as fkv_turbo_scale(). x: [rows, D] -> [rows, 1] */
static mlx_array turbo_scales(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x, int rows) {
    const mlx_array largest = fkv_mlx_max_last(g, fkv_mlx_abs(g, x));
    const mlx_array zero = fkv_mlx_number(g, 0.0f);
    const mlx_array divisor = fkv_mlx_where(g, fkv_mlx_less(g, zero, largest), largest, fkv_mlx_number(g, 1.0f));
    const mlx_array share = fkv_mlx_divide(g, x, divisor);
    mlx_array sum = fkv_mlx_sum_in_lanes(g, fkv_mlx_multiply(g, share, share), rows, (int)codec->dim);
    mlx_array root = fkv_mlx_sqrt(g, fkv_mlx_divide(g, sum, fkv_mlx_number(g, (float)codec->dim)));
    return fkv_mlx_multiply(g, fkv_mlx_multiply(g, largest, root), fkv_mlx_number(g, fkv_turbo_books[codec->bits].unit));
}

/* Returns the codes of x as integer-valued floats. x: [rows, D] */
static mlx_array turbo_codes(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x, mlx_array scales) {
    const int8_t *value = fkv_turbo_books[codec->bits].value;
    const mlx_array place = fkv_mlx_divide(g, x, fkv_mlx_maximum(g, scales, fkv_mlx_number(g, 1e-30f)));
    mlx_array code = fkv_mlx_number(g, 0.0f);
    for (uint32_t i = 0; i + 1 < 1u << codec->bits; i++) {
        const mlx_array above = fkv_mlx_less(g, fkv_mlx_number(g, 0.5f * (float)(value[i] + value[i + 1])), place);
        code = fkv_mlx_add(g, code, fkv_mlx_astype(g, above, MLX_FLOAT32));
    }
    return code;
}

/* Packs 3-bit codes into a plane with the low 2 bits of each code, followed by a plane with the high bits: [rows, 3 * D / 32]
 * words. */
static mlx_array packed_planes(fkv_mlx_graph *g, mlx_array codes, int rows, int dim) {
    const mlx_array high = fkv_mlx_astype(g, fkv_mlx_less(g, fkv_mlx_number(g, 3.5f), codes), MLX_FLOAT32);
    const mlx_array low = fkv_mlx_subtract(g, codes, fkv_mlx_multiply(g, high, fkv_mlx_number(g, 4.0f)));
    mlx_array words = fkv_mlx_reshape(g, pack_code_words(g, low, rows, dim, 2), FKV_MLX_SHAPE(rows, dim / 16));
    mlx_array plane = fkv_mlx_reshape(g, pack_code_words(g, high, rows, dim, 1), FKV_MLX_SHAPE(rows, dim / 32));
    const fkv_mlx_shape turned = FKV_MLX_SHAPE(1, 0);
    words = fkv_mlx_concatenate_first(g, fkv_mlx_transpose(g, words, turned), fkv_mlx_transpose(g, plane, turned));
    return fkv_mlx_transpose(g, words, turned);
}

static void encode_turbo(fkv_mlx_state *mlx, const fkv_codec *codec, mlx_array x, mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    if (g->failed) return;
    const int *shape = mlx_array_shape(x);
    const int dim = (int)codec->dim;
    const int rows = shape[0] * shape[1];
    const fkv_mlx_shape of_words = FKV_MLX_SHAPE(shape[0], shape[1], dim * (int)codec->bits / 32);
    const fkv_mlx_shape of_scales = FKV_MLX_SHAPE(shape[0], shape[1], 1);
    const mlx_array flat = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, dim));
    const mlx_array scales = turbo_scales(g, codec, flat, rows);
    const mlx_array codes = turbo_codes(g, codec, flat, scales);
    mlx_array words =
        codec->bits == 3 ? packed_planes(g, codes, rows, dim) : pack_code_words(g, codes, rows, dim, (int)codec->bits);
    part[FKV_PART_CODES] = fkv_mlx_view(g, fkv_mlx_reshape(g, words, of_words), MLX_UINT16);
    part[FKV_PART_SCALES] =
        fkv_mlx_view(g, fkv_mlx_astype(g, fkv_mlx_reshape(g, scales, of_scales), fkv_mlx_page_type(codec)), MLX_UINT16);
}

/* Unpacks 32-bit words into codes: [G, S, n] -> [G, S, 32 * n / bits]. */
static mlx_array unpack_codes(fkv_mlx_graph *g, mlx_array words, int bits) {
    if (g->failed) return words;
    const int *shape = mlx_array_shape(words);
    const int per_word = 32 / bits;
    const fkv_mlx_shape apart = FKV_MLX_SHAPE(shape[0], shape[1], shape[2], 1);
    const fkv_mlx_shape whole = FKV_MLX_SHAPE(shape[0], shape[1], shape[2] * per_word);
    uint32_t shift[32];
    for (int i = 0; i < per_word; i++) shift[i] = (uint32_t)(i * bits);
    const uint32_t mask = (1u << bits) - 1u;
    const mlx_array shifts = fkv_mlx_adopt(g, mlx_array_new_data(shift, &per_word, 1, MLX_UINT32));
    const mlx_array masks = fkv_mlx_adopt(g, mlx_array_new_data(&mask, (const int[]){1}, 1, MLX_UINT32));
    mlx_array codes = fkv_mlx_right_shift(g, fkv_mlx_reshape(g, words, apart), shifts);
    return fkv_mlx_reshape(g, fkv_mlx_bitwise_and(g, codes, masks), whole);
}

static mlx_array turbo_indices(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array words) {
    if (codec->bits != 3 || g->failed) return unpack_codes(g, words, (int)codec->bits);
    const int *shape = mlx_array_shape(words);
    const int n = (int)codec->dim / 16;
    const fkv_mlx_shape end = FKV_MLX_SHAPE(shape[0], shape[1], shape[2]);
    const fkv_mlx_shape middle = FKV_MLX_SHAPE(shape[0], shape[1], n);
    const mlx_array low = unpack_codes(g, fkv_mlx_slice(g, words, FKV_MLX_SHAPE(0, 0, 0), middle), 2);
    const mlx_array high = unpack_codes(g, fkv_mlx_slice(g, words, FKV_MLX_SHAPE(0, 0, n), end), 1);
    const uint32_t four = 4;
    const mlx_array fours = fkv_mlx_adopt(g, mlx_array_new_data(&four, (const int[]){1}, 1, MLX_UINT32));
    return fkv_mlx_add(g, low, fkv_mlx_multiply(g, high, fours));
}

static mlx_array turbo_row_scales(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    return fkv_mlx_astype(g, fkv_mlx_view(g, part[FKV_PART_SCALES], fkv_mlx_page_type(codec)), MLX_FLOAT32);
}

/* Decodes TurboQuant rows to float32 [G, S, D]. */
static mlx_array turbo_rows(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    float value[16];
    for (int i = 0; i < 16; i++) value[i] = (float)fkv_turbo_books[codec->bits].value[i];
    const mlx_array book = fkv_mlx_adopt(g, mlx_array_new_data(value, (const int[]){16}, 1, MLX_FLOAT32));
    const mlx_array indices = turbo_indices(g, codec, fkv_mlx_view(g, part[FKV_PART_CODES], MLX_UINT32));
    return fkv_mlx_multiply(g, fkv_mlx_take_first(g, book, indices), turbo_row_scales(g, codec, part));
}

static mlx_array scores_turbo(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q) {
    return fkv_mlx_matmul(g, q, fkv_mlx_transpose(g, turbo_rows(g, codec, part), FKV_MLX_SHAPE(0, 2, 1)));
}

static mlx_array values_turbo(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p) {
    return fkv_mlx_matmul(g, p, turbo_rows(g, codec, part));
}

static mlx_array take_odd_turbo(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]) {
    const mlx_array size = fkv_mlx_multiply(g, fkv_mlx_abs(g, turbo_row_scales(g, codec, part)), fkv_mlx_number(g, 128.0f));
    return take_odd_of(g, size, &part[FKV_PART_SCALES], NULL);
}

/* ---- decoding ---- */

/* Decodes affine rows of any bit width: [G, S, D]. */
static mlx_array affine_values(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    if (codec->bits == 8 || g->failed) return affine_numbers(g, codec, part);
    const fkv_mlx_affine rows = affine_rows(g, codec, part);
    mlx_array codes = fkv_mlx_astype(g, unpack_codes(g, rows.codes, rows.bits), MLX_FLOAT32);
    if (g->failed) return codes;
    const int *shape = mlx_array_shape(codes);
    const fkv_mlx_shape whole = FKV_MLX_SHAPE(shape[0], shape[1], shape[2]);
    const fkv_mlx_shape apart = FKV_MLX_SHAPE(shape[0] * shape[1] * (shape[2] / rows.group), rows.group);
    const fkv_mlx_shape line = FKV_MLX_SHAPE(apart.at[0], 1);
    mlx_array x = fkv_mlx_multiply(g, fkv_mlx_reshape(g, codes, apart), fkv_mlx_reshape(g, rows.scales, line));
    return fkv_mlx_reshape(g, fkv_mlx_add(g, x, fkv_mlx_reshape(g, rows.biases, line)), whole);
}

mlx_array fkv_mlx_decoded_rows(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]) {
    FKV_ASSERT(fkv_mlx_codec_of(codec)->rows == NULL);
    return codec->kind == FKV_CODEC_HALF    ? half_rows(g, codec, part)
           : codec->kind == FKV_CODEC_TURBO ? turbo_rows(g, codec, part)
                                            : affine_values(g, codec, part);
}

/* ---- codec table ---- */

static const fkv_mlx_codec half = {encode_half, scores_half, values_half, take_odd_half, NULL, NULL};
static const fkv_mlx_codec affine = {encode_affine, scores_affine, values_affine, take_odd_affine, NULL, NULL};
static const fkv_mlx_codec turbo = {encode_turbo, scores_turbo, values_turbo, take_odd_turbo, NULL, NULL};

static const fkv_mlx_codec *const codecs[] = {[FKV_CODEC_HALF] = &half,
                                              [FKV_CODEC_AFFINE] = &affine,
                                              [FKV_CODEC_SEALED] = &fkv_mlx_sealed_keys,
                                              [FKV_CODEC_SEALED_V] = &fkv_mlx_sealed_values,
                                              [FKV_CODEC_TURBO] = &turbo,
                                              [FKV_CODEC_CALIBRATED] = &fkv_mlx_calibrated_keys};

const fkv_mlx_codec *fkv_mlx_codec_of(const fkv_codec *codec) { return codecs[codec->kind]; }
