/* Seals pages with MLX operations, bit-identical to src/codec/seal.c, and decodes sealed pages to floats. docs/page_format.md
 * specifies the layout of codes.
 *
 * Codes are packed into lines of 16 dwords, and dword i of every line belongs to lane i. For packing, codes are arranged as
 * [blocks of 16 tokens, 16 lanes, D]. For K, lane i holds the D channels of token i. For V, element 16 * u + t of lane i is
 * channel 16 * u + i of token t. A plane with b bits per code packs 32 / b consecutive codes of a lane into a dword; code e of
 * a dword starts at bit 8 * (e % 4) + b * (e / 4).
 */
#include "mlx_codec.h"

#include "../codec/sealed.h"

#include <float.h>
#include <math.h>

enum { LANES = FKV_SEALED_TOKENS };

/* ---- code layout ---- */

/* Returns the number of lines in the low plane, which holds the low bits of 3-bit codes, or all bits of 4-bit and 2-bit codes. */
static int low_lines(const fkv_codec *codec) { return (int)codec->dim / 16 * (codec->bits == 4 ? 2 : 1); }

static int low_bits(const fkv_codec *codec) { return codec->bits == 4 ? 4 : 2; }

static uint32_t place_in_dword(uint32_t e, uint32_t bits) { return 8 * (e % 4) + bits * (e / 4); }

/* Converts codes from token order [B, 16 tokens, D] to lane order [B, 16 lanes, D], or back. This conversion is its own inverse.
 */
static mlx_array to_lanes(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x) {
    if (codec->kind == FKV_CODEC_SEALED || g->failed) return x;
    const int blocks = mlx_array_shape(x)[0];
    const int units = (int)codec->dim / 16;
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(blocks, LANES, units, 16));
    x = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(0, 3, 2, 1));
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(blocks, LANES, (int)codec->dim));
}

/* Packs codes [from, end) of the last axis, `per` codes per dword. codes: uint32 [B, 16, D] -> [lines, B, 16] dwords. */
static mlx_array packed_lines(fkv_mlx_graph *g, mlx_array codes, int from, int end, int per, uint32_t bits) {
    if (g->failed) return codes;
    const int blocks = mlx_array_shape(codes)[0];
    const int lines = (end - from) / per;
    uint32_t place[32];
    for (int e = 0; e < per; e++) place[e] = 1u << place_in_dword((uint32_t)e, bits);
    const mlx_array places = fkv_mlx_adopt(g, mlx_array_new_data(place, &per, 1, MLX_UINT32));
    mlx_array x = fkv_mlx_slice(g, codes, FKV_MLX_SHAPE(0, 0, from), FKV_MLX_SHAPE(blocks, LANES, end));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(blocks, LANES, lines, per));
    x = fkv_mlx_reshape(g, fkv_mlx_sum_last(g, fkv_mlx_multiply(g, x, places)), FKV_MLX_SHAPE(blocks, LANES, lines));
    return fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(2, 0, 1));
}

/* Converts lines [lines, B, 16] of N pages to 16-bit words [N, T * row_bytes / 2]. */
static mlx_array pages_of(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array lines, int n, int page_tokens) {
    const int row_numbers = (int)codec->row_bytes[FKV_PART_CODES] / 2;
    const mlx_array dwords = fkv_mlx_transpose(g, lines, FKV_MLX_SHAPE(1, 0, 2));
    return fkv_mlx_view(g, fkv_mlx_reshape(g, dwords, FKV_MLX_SHAPE(n, page_tokens * row_numbers / 2)), MLX_UINT16);
}

/* Packs the codes of N pages. codes: integer-valued float32 [N, T, D] -> 16-bit words [N, T * row_bytes / 2]. */
static mlx_array packed_words(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array codes, int n, int page_tokens) {
    const int dim = (int)codec->dim;
    const int blocks = n * page_tokens / LANES;
    codes = to_lanes(g, codec, fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(blocks, LANES, dim)));
    mlx_array low = codes;
    mlx_array high = {NULL};
    if (codec->bits == 3) {
        high = fkv_mlx_astype(g, fkv_mlx_less(g, fkv_mlx_number(g, 3.5f), codes), MLX_FLOAT32);
        low = fkv_mlx_subtract(g, codes, fkv_mlx_multiply(g, high, fkv_mlx_number(g, 4.0f)));
        high = fkv_mlx_astype(g, high, MLX_UINT32);
    }
    const int per = 32 / low_bits(codec);
    mlx_array lines = packed_lines(g, fkv_mlx_astype(g, low, MLX_UINT32), 0, dim, per, (uint32_t)low_bits(codec));
    if (codec->bits == 3) { /* the last line of the high plane may be half-filled */
        if (dim >= 32) lines = fkv_mlx_concatenate_first(g, lines, packed_lines(g, high, 0, dim / 32 * 32, 32, 1));
        if (dim % 32 != 0) lines = fkv_mlx_concatenate_first(g, lines, packed_lines(g, high, dim - 16, dim, 16, 1));
    }
    return pages_of(g, codec, lines, n, page_tokens);
}

/* Unpacks the codes of the plane in lines [from, end). dwords: [B, 16, lines] -> uint8 [B, 16, n]. */
static mlx_array unpacked_lines(fkv_mlx_graph *g, mlx_array dwords, int from, int end, uint32_t bits, int n) {
    if (g->failed) return dwords;
    const int blocks = mlx_array_shape(dwords)[0];
    const int quads = 8 / (int)bits; /* codes per byte */
    const uint8_t mask = (uint8_t)((1u << bits) - 1u);
    uint8_t shift[8];
    for (int i = 0; i < quads; i++) shift[i] = (uint8_t)(i * (int)bits);
    const mlx_array shifts = fkv_mlx_adopt(g, mlx_array_new_data(shift, (const int[]){quads, 1}, 2, MLX_UINT8));
    const mlx_array masks = fkv_mlx_adopt(g, mlx_array_new_data(&mask, (const int[]){1}, 1, MLX_UINT8));
    mlx_array x = fkv_mlx_slice(g, dwords, FKV_MLX_SHAPE(0, 0, from), FKV_MLX_SHAPE(blocks, LANES, end));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(blocks * LANES * (end - from), 1, 1));
    x = fkv_mlx_right_shift(g, fkv_mlx_view(g, x, MLX_UINT8), shifts);
    x = fkv_mlx_reshape(g, fkv_mlx_bitwise_and(g, x, masks), FKV_MLX_SHAPE(blocks, LANES, (end - from) * quads * 4));
    return fkv_mlx_slice(g, x, FKV_MLX_SHAPE(0, 0, 0), FKV_MLX_SHAPE(blocks, LANES, n));
}

/* Converts the 16-bit words of B blocks of 16 tokens to [B, 16, lines] dwords. */
static mlx_array dwords_of(fkv_mlx_graph *g, mlx_array codes, int blocks, int lines) {
    const mlx_array x = fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(blocks, lines * FKV_SEALED_LINE / 2));
    const mlx_array dwords = fkv_mlx_reshape(g, fkv_mlx_view(g, x, MLX_UINT32), FKV_MLX_SHAPE(blocks, lines, LANES));
    return fkv_mlx_transpose(g, dwords, FKV_MLX_SHAPE(0, 2, 1));
}

/* Unpacks all codes of n pages: words [n, G, T * row_bytes / 2] -> uint8 [G, n, T, D]. */
static mlx_array unpacked_codes(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array codes, uint32_t page_tokens) {
    if (g->failed) return codes;
    const int n = mlx_array_shape(codes)[0];
    const int heads = mlx_array_shape(codes)[1];
    const int dim = (int)codec->dim;
    const int blocks = n * heads * (int)page_tokens / LANES;
    const int lines = (int)(codec->row_bytes[FKV_PART_CODES] * LANES / FKV_SEALED_LINE);
    const mlx_array dwords = dwords_of(g, codes, blocks, lines);
    mlx_array x = unpacked_lines(g, dwords, 0, low_lines(codec), (uint32_t)low_bits(codec), dim);
    if (codec->bits == 3) {
        const uint8_t four = 4;
        const mlx_array fours = fkv_mlx_adopt(g, mlx_array_new_data(&four, (const int[]){1}, 1, MLX_UINT8));
        const mlx_array high = unpacked_lines(g, dwords, low_lines(codec), lines, 1, dim);
        x = fkv_mlx_add(g, x, fkv_mlx_multiply(g, high, fours));
    }
    x = fkv_mlx_reshape(g, to_lanes(g, codec, x), FKV_MLX_SHAPE(n, heads, (int)page_tokens, dim));
    return fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(1, 0, 2, 3));
}

/* ---- decoding to floats ---- */

/* Converts values of the page type to floats: [n, G, rows * columns] -> float32 [G, n, rows, columns]. */
static mlx_array floats_of(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array numbers, int rows, int columns) {
    if (g->failed) return numbers;
    const int n = mlx_array_shape(numbers)[0];
    const int heads = mlx_array_shape(numbers)[1];
    mlx_array x = fkv_mlx_transpose(g, numbers, FKV_MLX_SHAPE(1, 0, 2));
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n, rows, columns));
    return fkv_mlx_astype(g, fkv_mlx_view(g, x, fkv_mlx_page_type(codec)), MLX_FLOAT32);
}

/* Concatenates the rows of all pages: [G, n, T, D] -> [G, n * T, D]. */
static mlx_array page_rows(fkv_mlx_graph *g, mlx_array x) {
    if (g->failed) return x;
    const int *shape = mlx_array_shape(x);
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(shape[0], shape[1] * shape[2], shape[3]));
}

static mlx_array key_rows(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels,
                          const mlx_array part[FKV_N_PARTS], uint32_t page_tokens) {
    (void)channels;
    const int dim = (int)codec->dim;
    mlx_array x = fkv_mlx_astype(g, unpacked_codes(g, codec, part[FKV_PART_CODES], page_tokens), MLX_FLOAT32);
    x = fkv_mlx_multiply(g, x, floats_of(g, codec, part[FKV_PART_SCALES], 1, dim));
    return page_rows(g, fkv_mlx_add(g, x, floats_of(g, codec, part[FKV_PART_BIASES], 1, dim)));
}

static mlx_array value_rows(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels,
                            const mlx_array part[FKV_N_PARTS], uint32_t page_tokens) {
    (void)channels;
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    const uint32_t sign = 1u << (codec->bits - 1);
    float value[2 * FKV_SEALED_LEVELS] = {0};
    for (uint32_t i = 0; i < 2 * sign; i++)
        value[i] = (float)book->level[i & (sign - 1)] * ((i & sign) != 0 ? -0x1p-7f : 0x1p-7f);
    const mlx_array values = fkv_mlx_adopt(g, mlx_array_new_data(value, (const int[]){2 * FKV_SEALED_LEVELS}, 1, MLX_FLOAT32));
    const mlx_array norms = fkv_mlx_abs(g, floats_of(g, codec, part[FKV_PART_SCALES], (int)page_tokens, 1));
    const mlx_array x = fkv_mlx_take_first(g, values, unpacked_codes(g, codec, part[FKV_PART_CODES], page_tokens));
    return page_rows(g, fkv_mlx_multiply(g, x, norms));
}

/* ---- matrix products; part 0 holds the decoded rows ---- */

static mlx_array scores(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q) {
    (void)codec;
    return fkv_mlx_matmul(g, q, fkv_mlx_transpose(g, part[0], FKV_MLX_SHAPE(0, 2, 1)));
}

static mlx_array values(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p) {
    (void)codec;
    return fkv_mlx_matmul(g, p, part[0]);
}

static mlx_array take_odd(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]) {
    (void)codec;
    const mlx_array zero = fkv_mlx_number(g, 0.0f);
    const mlx_array finite = fkv_mlx_less_equal(g, fkv_mlx_abs(g, part[0]), fkv_mlx_number(g, FLT_MAX));
    part[0] = fkv_mlx_where(g, finite, part[0], zero);
    return fkv_mlx_sum_last(g, fkv_mlx_where(g, finite, zero, fkv_mlx_number(g, NAN)));
}

/* ---- sealing ---- */

/* Rounds nonnegative float32 values to the page type. Values below FKV_SEALED_SMALLEST become 0. */
static mlx_array rounded(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x) {
    const mlx_array half = fkv_mlx_astype(g, fkv_mlx_astype(g, x, fkv_mlx_page_type(codec)), MLX_FLOAT32);
    return fkv_mlx_where(g, fkv_mlx_less(g, half, fkv_mlx_number(g, FKV_SEALED_SMALLEST)), fkv_mlx_number(g, 0.0f), half);
}

/* Rounds scales with rounded(), and then to seven significant bits. */
static mlx_array key_scales(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x) {
    const uint16_t half = codec->type == FKV_F16 ? 8 : 1; /* half a unit in the last place of the rounded scale */
    const uint16_t kept = (uint16_t)~(2 * half - 1);
    const mlx_array halves = fkv_mlx_adopt(g, mlx_array_new_data(&half, (const int[]){1}, 1, MLX_UINT16));
    const mlx_array mask = fkv_mlx_adopt(g, mlx_array_new_data(&kept, (const int[]){1}, 1, MLX_UINT16));
    const mlx_dtype type = fkv_mlx_page_type(codec);
    x = fkv_mlx_view(g, fkv_mlx_astype(g, rounded(g, codec, x), type), MLX_UINT16);
    x = fkv_mlx_bitwise_and(g, fkv_mlx_add(g, x, halves), mask);
    return fkv_mlx_astype(g, fkv_mlx_view(g, x, type), MLX_FLOAT32);
}

/* Converts float32 values that the page type can represent to 16-bit words [N, n]. */
static mlx_array halves_of(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x, int blocks, int n) {
    const mlx_array halves = fkv_mlx_astype(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(blocks, n)), fkv_mlx_page_type(codec));
    return fkv_mlx_view(g, halves, MLX_UINT16);
}

static mlx_array integral(fkv_mlx_graph *g, mlx_array x, mlx_array most) {
    return fkv_mlx_round(g, fkv_mlx_minimum(g, fkv_mlx_maximum(g, x, fkv_mlx_number(g, 0.0f)), most));
}

/* Result of quantizing keys channel by channel. */
typedef struct key_lines {
    mlx_array scale; /* scales, representable in the page type: float32 [n, G, D, 1] */
    mlx_array bias;
    mlx_array codes; /* integer-valued codes: float32 [n, G, D, T] */
} key_lines;

/* Returns a bool [n, G, T, 1] mask of the outlier rows of x: float32 [n, G, T, D], see FKV_SEALED_OUTLIER. */
static mlx_array outlier_rows(fkv_mlx_graph *g, mlx_array x) {
    const mlx_array magnitude = fkv_mlx_max_last(g, fkv_mlx_abs(g, x));
    const mlx_array others = fkv_mlx_transpose(g, magnitude, FKV_MLX_SHAPE(0, 1, 3, 2));
    const mlx_array ratio = fkv_mlx_number(g, FKV_SEALED_OUTLIER_RATIO);
    const mlx_array smaller = fkv_mlx_less(g, fkv_mlx_multiply(g, others, ratio), magnitude);
    const mlx_array n_smaller = fkv_mlx_sum_last(g, fkv_mlx_astype(g, smaller, MLX_FLOAT32));
    const mlx_array half = fkv_mlx_number(g, (float)mlx_array_shape(x)[2] / 2);
    return fkv_mlx_logical_and(g, fkv_mlx_less(g, fkv_mlx_number(g, FKV_SEALED_OUTLIER), magnitude),
                               fkv_mlx_less_equal(g, half, n_smaller));
}

/* Quantizes keys per channel. x: float32 [n, G, T, D]; bins: the largest code, as a scalar or as [G, D, 1] (one per channel). */
static key_lines key_lines_of(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array x, mlx_array bins) {
    const mlx_array zero = fkv_mlx_number(g, 0.0f);
    const mlx_array channels = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(0, 1, 3, 2));
    const mlx_array outlier = fkv_mlx_transpose(g, outlier_rows(g, x), FKV_MLX_SHAPE(0, 1, 3, 2));
    const mlx_array lo = fkv_mlx_min_last(g, fkv_mlx_where(g, outlier, fkv_mlx_number(g, INFINITY), channels));
    const mlx_array hi = fkv_mlx_max_last(g, fkv_mlx_where(g, outlier, fkv_mlx_number(g, -INFINITY), channels));
    const mlx_array range = fkv_mlx_subtract(g, hi, lo);
    key_lines k = {.scale = key_scales(g, codec, fkv_mlx_divide(g, range, bins))};
    const mlx_array bias = fkv_mlx_astype(g, fkv_mlx_add(g, lo, zero), fkv_mlx_page_type(codec)); /* adds 0 to turn -0 into +0 */
    k.bias = fkv_mlx_astype(g, bias, MLX_FLOAT32);
    const mlx_array one_over = fkv_mlx_divide(g, fkv_mlx_number(g, 1.0f), k.scale);
    const mlx_array inverse = fkv_mlx_where(g, fkv_mlx_less(g, zero, k.scale), one_over, zero);
    k.codes = integral(g, fkv_mlx_multiply(g, fkv_mlx_subtract(g, channels, k.bias), inverse), bins);
    return k;
}

static void seal_key_pages(fkv_mlx_state *mlx, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array x,
                           mlx_array part[FKV_N_PARTS]) {
    (void)channels;
    fkv_mlx_graph *g = &mlx->graph;
    if (g->failed) return;
    const int n = mlx_array_shape(x)[0];
    const int page_tokens = mlx_array_shape(x)[1];
    const int dim = (int)codec->dim;
    const mlx_array blocks = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, 1, page_tokens, dim));
    const key_lines k = key_lines_of(g, codec, blocks, fkv_mlx_number(g, (float)((1u << codec->bits) - 1u)));
    part[FKV_PART_CODES] = packed_words(g, codec, fkv_mlx_transpose(g, k.codes, FKV_MLX_SHAPE(0, 1, 3, 2)), n, page_tokens);
    part[FKV_PART_SCALES] = halves_of(g, codec, k.scale, n, dim);
    part[FKV_PART_BIASES] = halves_of(g, codec, k.bias, n, dim);
}

/* Returns 128 / norm, or 0 for tiny norms. This factor converts values to multiples of norm / 128. norm: [rows, 1] */
static mlx_array inverse_of(fkv_mlx_graph *g, mlx_array norm) {
    const mlx_array small = fkv_mlx_less(g, norm, fkv_mlx_number(g, FKV_SEALED_SMALLEST));
    return fkv_mlx_where(g, small, fkv_mlx_number(g, 0.0f), fkv_mlx_divide(g, fkv_mlx_number(g, 128.0f), norm));
}

/* Returns the codebook index of each magnitude, as a float. magnitude: [rows, D] */
static mlx_array code_magnitudes(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array magnitude, mlx_array inverse) {
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    const mlx_array m = integral(g, fkv_mlx_multiply(g, magnitude, inverse), fkv_mlx_number(g, 127.0f));
    mlx_array size = fkv_mlx_number(g, 0.0f);
    for (uint32_t i = 0; i + 1 < 1u << (codec->bits - 1); i++) {
        const mlx_array above = fkv_mlx_less(g, fkv_mlx_number(g, (float)book->above[i]), m);
        size = fkv_mlx_add(g, size, fkv_mlx_astype(g, above, MLX_FLOAT32));
    }
    return size;
}

/* Returns the unrounded norm of each row: [rows, 1]. magnitude: [rows, D] */
static mlx_array norms_of(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array magnitude, int rows) {
    const fkv_sealed_book *book = fkv_sealed_book_of(codec->bits);
    const int dim = (int)codec->dim;
    float level[FKV_SEALED_LEVELS];
    for (int i = 0; i < FKV_SEALED_LEVELS; i++) level[i] = (float)book->level[i];
    const mlx_array levels = fkv_mlx_adopt(g, mlx_array_new_data(level, (const int[]){FKV_SEALED_LEVELS}, 1, MLX_FLOAT32));
    mlx_array norm = fkv_mlx_divide(g, fkv_mlx_sum_in_lanes(g, magnitude, rows, dim), fkv_mlx_number(g, (float)dim));
    norm = fkv_mlx_multiply(g, norm, fkv_mlx_number(g, book->start));
    for (int i = 0; i < FKV_SEALED_REFITS; i++) {
        const mlx_array sizes = fkv_mlx_astype(g, code_magnitudes(g, codec, magnitude, inverse_of(g, norm)), MLX_UINT32);
        const mlx_array of_row = fkv_mlx_take_first(g, levels, sizes);
        const mlx_array products = fkv_mlx_sum_in_lanes(g, fkv_mlx_multiply(g, magnitude, of_row), rows, dim);
        const mlx_array squares = fkv_mlx_sum_in_lanes(g, fkv_mlx_multiply(g, of_row, of_row), rows, dim);
        norm = fkv_mlx_divide(g, fkv_mlx_multiply(g, fkv_mlx_number(g, 128.0f), products), squares);
    }
    return norm;
}

static void seal_value_pages(fkv_mlx_state *mlx, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array x,
                             mlx_array part[FKV_N_PARTS]) {
    (void)channels;
    fkv_mlx_graph *g = &mlx->graph;
    if (g->failed) return;
    const int n = mlx_array_shape(x)[0];
    const int page_tokens = mlx_array_shape(x)[1];
    const int rows = n * page_tokens;
    const mlx_array y = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(rows, (int)codec->dim));
    const mlx_array magnitude = fkv_mlx_abs(g, y);
    mlx_array norm = fkv_mlx_minimum(g, norms_of(g, codec, magnitude, rows), mlx->constants.limit);
    norm = rounded(g, codec, norm);
    const mlx_array size = code_magnitudes(g, codec, magnitude, inverse_of(g, norm));
    const mlx_array negative = fkv_mlx_astype(g, fkv_mlx_less(g, y, fkv_mlx_number(g, 0.0f)), MLX_FLOAT32);
    const mlx_array sign = fkv_mlx_multiply(g, negative, fkv_mlx_number(g, (float)(1u << (codec->bits - 1))));
    part[FKV_PART_CODES] = packed_words(g, codec, fkv_mlx_add(g, size, sign), n, page_tokens);
    part[FKV_PART_SCALES] = halves_of(g, codec, norm, n, page_tokens);
}

/* ---- calibrated keys ----
 *
 * Each head has its own channel order and bit widths. A code consists of one to three digits of 2 bits (channel_order.h). Rows
 * are gathered by index for all heads at once: the first axis of an array combines heads and channels, or heads and digits.
 */

/* Returns the number of packed 2-bit digits of one token and head, including padding. */
static uint32_t head_digits(const fkv_codec *codec) { return codec->row_bytes[FKV_PART_CODES] * 4; }

/* Appends n values of one head to *kept, which holds the values of the previous heads. */
static void append_values(fkv_mlx_graph *g, const uint32_t *numbers, uint32_t n, mlx_array *kept) {
    const mlx_array made = fkv_mlx_adopt(g, mlx_array_new_data(numbers, (const int[]){(int)n}, 1, MLX_UINT32));
    fkv_mlx_keep(g, kept, kept->ctx == NULL ? made : fkv_mlx_concatenate_first(g, *kept, made));
}

/* Appends the channel tables of head h of n_heads. */
static void append_head(fkv_mlx_graph *g, const fkv_codec *codec, uint32_t h, uint32_t n_heads, fkv_mlx_channels *channels) {
    const fkv_channel_order *order = codec->channels;
    const uint32_t dim = codec->dim;
    const uint32_t n_digits = head_digits(codec);
    uint32_t bins[FKV_MAX_HEAD_DIM] = {0};
    uint32_t channel[FKV_MAX_HEAD_DIM] = {0};
    uint32_t place[FKV_MAX_HEAD_DIM] = {0};
    uint32_t packed_at[FKV_MAX_HEAD_DIM * FKV_MAX_DIGITS] = {0};
    uint32_t there[FKV_MAX_HEAD_DIM * FKV_MAX_DIGITS] = {0};
    uint32_t digit[FKV_MAX_DIGITS][FKV_MAX_HEAD_DIM] = {{0}};
    uint32_t weight[FKV_MAX_DIGITS][FKV_MAX_HEAD_DIM] = {{0}};
    for (uint32_t p = 0; p < dim; p++) {
        const uint32_t c = order->channel[p];
        const uint32_t n = fkv_channel_digits(order, p);
        uint32_t at = p; /* index of digit d in the concatenated planes of the head */
        bins[c] = (1u << 2 * n) - 1;
        channel[p] = h * dim + c;
        place[c] = h * dim + p;
        for (uint32_t d = 0; d < n; at += order->n[d++]) {
            packed_at[at] = (d * n_heads + h) * dim + c;
            there[at] = 1;
            digit[d][c] = h * n_digits + at;
            weight[d][c] = 1u << 2 * d;
        }
    }
    append_values(g, bins, dim, &channels->bins);
    append_values(g, channel, dim, &channels->channel);
    append_values(g, place, dim, &channels->place);
    append_values(g, packed_at, n_digits, &channels->packed);
    append_values(g, there, n_digits, &channels->there);
    for (int d = 0; d < FKV_MAX_DIGITS; d++) {
        append_values(g, digit[d], dim, &channels->digit[d]);
        append_values(g, weight[d], dim, &channels->weight[d]);
    }
}

void fkv_mlx_channels_open(fkv_mlx_graph *g, const fkv_attn_layer *attn, fkv_mlx_channels *channels) {
    const int heads = (int)attn->n_kv_heads;
    const int dim = (int)attn->head_dim;
    const uint32_t mark = fkv_mlx_graph_mark(g);
    for (uint32_t h = 0; h < attn->n_kv_heads; h++) {
        append_head(g, &attn->head_blocks[h].codec[FKV_SIDE_K], h, attn->n_kv_heads, channels);
        fkv_mlx_graph_release(g, mark);
    }
    if (g->failed) return;
    const int n_digits = heads * (int)head_digits(&attn->block.codec[FKV_SIDE_K]);
    const mlx_array bins = fkv_mlx_astype(g, channels->bins, MLX_FLOAT32);
    fkv_mlx_keep(g, &channels->bins, fkv_mlx_reshape(g, bins, FKV_MLX_SHAPE(heads, dim, 1)));
    fkv_mlx_keep(g, &channels->there, fkv_mlx_reshape(g, channels->there, FKV_MLX_SHAPE(n_digits, 1)));
    for (int d = 0; d < FKV_MAX_DIGITS; d++) {
        const mlx_array weight = fkv_mlx_astype(g, channels->weight[d], MLX_FLOAT32);
        fkv_mlx_keep(g, &channels->weight[d], fkv_mlx_reshape(g, weight, FKV_MLX_SHAPE(heads * dim, 1)));
    }
    fkv_mlx_graph_release(g, mark);
}

/* Reorders rows: row i of the result [G, D, n] is row rows[i] of x: [G * D, n]. `rows` maps channels to positions, or positions
 * to channels. */
static mlx_array reordered(fkv_mlx_graph *g, mlx_array x, mlx_array rows, int heads, int dim, int n) {
    x = fkv_mlx_take_first(g, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads * dim, n)), rows);
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, dim, n));
}

/* Converts scales or biases from their stored order (by position) to channel order: [n, G, D] -> float32 [G, n, 1, D]. */
static mlx_array by_channel(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array numbers) {
    if (g->failed) return numbers;
    const int n = mlx_array_shape(numbers)[0];
    const int heads = mlx_array_shape(numbers)[1];
    const int dim = (int)codec->dim;
    mlx_array x = fkv_mlx_transpose(g, floats_of(g, codec, numbers, 1, dim), FKV_MLX_SHAPE(0, 3, 1, 2));
    x = fkv_mlx_transpose(g, reordered(g, x, channels->place, heads, dim, n), FKV_MLX_SHAPE(0, 2, 1));
    return fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, n, 1, dim));
}

static mlx_array calibrated_rows(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels,
                                 const mlx_array part[FKV_N_PARTS], uint32_t page_tokens) {
    if (g->failed) return part[FKV_PART_CODES];
    const int n = mlx_array_shape(part[FKV_PART_CODES])[0];
    const int heads = mlx_array_shape(part[FKV_PART_CODES])[1];
    const int tokens = (int)page_tokens;
    const int dim = (int)codec->dim;
    const int n_digits = (int)head_digits(codec);
    const int lines = n_digits / LANES;
    const mlx_array dwords = dwords_of(g, part[FKV_PART_CODES], n * heads * tokens / LANES, lines);
    mlx_array digits = unpacked_lines(g, dwords, 0, lines, 2, n_digits);
    digits = fkv_mlx_reshape(g, digits, FKV_MLX_SHAPE(n, heads, tokens, n_digits));
    digits = fkv_mlx_transpose(g, digits, FKV_MLX_SHAPE(1, 3, 0, 2));
    digits = fkv_mlx_reshape(g, digits, FKV_MLX_SHAPE(heads * n_digits, n * tokens));
    mlx_array x = {NULL};
    for (int d = 0; d < FKV_MAX_DIGITS; d++) {
        const mlx_array digit = fkv_mlx_astype(g, fkv_mlx_take_first(g, digits, channels->digit[d]), MLX_FLOAT32);
        const mlx_array counted = fkv_mlx_multiply(g, digit, channels->weight[d]);
        x = d == 0 ? counted : fkv_mlx_add(g, x, counted);
    }
    x = fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(heads, dim, n, tokens));
    x = fkv_mlx_transpose(g, x, FKV_MLX_SHAPE(0, 2, 3, 1));
    x = fkv_mlx_multiply(g, x, by_channel(g, codec, channels, part[FKV_PART_SCALES]));
    return page_rows(g, fkv_mlx_add(g, x, by_channel(g, codec, channels, part[FKV_PART_BIASES])));
}

/* Converts scales or biases, float32 [n, G, D, 1], to 16-bit words [n * G, D], and sorts them into the channel order of each
 * head. */
static mlx_array by_place(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array numbers, int n,
                          int heads) {
    const int dim = (int)codec->dim;
    const mlx_array x = fkv_mlx_transpose(g, numbers, FKV_MLX_SHAPE(1, 2, 0, 3));
    const mlx_array placed = reordered(g, x, channels->channel, heads, dim, n);
    return halves_of(g, codec, fkv_mlx_transpose(g, placed, FKV_MLX_SHAPE(2, 0, 1)), n * heads, dim);
}

/* Splits codes into FKV_MAX_DIGITS digits of 2 bits, lowest digit first: uint32 [G * D, n] -> [FKV_MAX_DIGITS * G * D, n]. */
static mlx_array cut_in_digits(fkv_mlx_graph *g, mlx_array codes) {
    const uint32_t three = 3;
    const mlx_array mask = fkv_mlx_adopt(g, mlx_array_new_data(&three, (const int[]){1}, 1, MLX_UINT32));
    mlx_array all = fkv_mlx_bitwise_and(g, codes, mask);
    for (uint32_t d = 1; d < FKV_MAX_DIGITS; d++) {
        const uint32_t by = 2 * d;
        const mlx_array shift = fkv_mlx_adopt(g, mlx_array_new_data(&by, (const int[]){1}, 1, MLX_UINT32));
        all = fkv_mlx_concatenate_first(g, all, fkv_mlx_bitwise_and(g, fkv_mlx_right_shift(g, codes, shift), mask));
    }
    return all;
}

static void seal_calibrated(fkv_mlx_state *mlx, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array x,
                            mlx_array part[FKV_N_PARTS]) {
    fkv_mlx_graph *g = &mlx->graph;
    if (g->failed) return;
    const int heads = mlx_array_shape(channels->bins)[0];
    const int n = mlx_array_shape(x)[0] / heads;
    const int tokens = mlx_array_shape(x)[1];
    const int dim = (int)codec->dim;
    const int n_digits = (int)head_digits(codec);
    const key_lines k = key_lines_of(g, codec, fkv_mlx_reshape(g, x, FKV_MLX_SHAPE(n, heads, tokens, dim)), channels->bins);
    mlx_array codes = fkv_mlx_transpose(g, fkv_mlx_astype(g, k.codes, MLX_UINT32), FKV_MLX_SHAPE(1, 2, 0, 3));
    codes = cut_in_digits(g, fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(heads * dim, n * tokens)));
    codes = fkv_mlx_multiply(g, fkv_mlx_take_first(g, codes, channels->packed), channels->there);
    codes = fkv_mlx_transpose(g, fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(heads, n_digits, n, tokens)), FKV_MLX_SHAPE(2, 0, 3, 1));
    codes = fkv_mlx_reshape(g, codes, FKV_MLX_SHAPE(n * heads * tokens / LANES, LANES, n_digits));
    part[FKV_PART_CODES] = pages_of(g, codec, packed_lines(g, codes, 0, n_digits, 16, 2), n * heads, tokens);
    part[FKV_PART_SCALES] = by_place(g, codec, channels, k.scale, n, heads);
    part[FKV_PART_BIASES] = by_place(g, codec, channels, k.bias, n, heads);
}

const fkv_mlx_codec fkv_mlx_calibrated_keys = {
    .scores = scores, .values = values, .take_odd = take_odd, .rows = calibrated_rows, .seal = seal_calibrated};

const fkv_mlx_codec fkv_mlx_sealed_keys = {
    .scores = scores, .values = values, .take_odd = take_odd, .rows = key_rows, .seal = seal_key_pages};
const fkv_mlx_codec fkv_mlx_sealed_values = {
    .scores = scores, .values = values, .take_odd = take_odd, .rows = value_rows, .seal = seal_value_pages};
