/* Codecs built from MLX operations, for the plain method (mlx_plain.c). A codec encodes rows as codes, scales and biases, which
 * are called its parts. It computes attention scores from the parts of keys, and weighted sums from the parts of values. The
 * codec table has one entry per codec kind; mlx_sealed.c defines the sealed kinds. */
#ifndef FKV_MLX_CODEC_H
#define FKV_MLX_CODEC_H

#include "mlx_state.h"

/* The keys or values of S tokens are stored as the parts of their codec. Each part (codes, scales or biases) is an array [G, S,
 * row_bytes / 2] of 16-bit words. */
typedef struct fkv_mlx_codec {
    /* Encodes rows, bit-identical to fkv_codec_encode(). x: float32 [T, G, D], a result of fkv_mlx_storable(). Output: part[p]:
     * [T, G, row_bytes / 2] words.
     */
    void (*encode)(fkv_mlx_state *mlx, const fkv_codec *codec, mlx_array x, mlx_array part[FKV_N_PARTS]);

    /* Computes the dot products of queries and keys. q: float32 [G, n, D] -> float32 [G, n, S] */
    mlx_array (*scores)(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q);

    /* Computes weighted sums of values. p: softmax weights, float32 [G, n, S] -> float32 [G, n, D] */
    mlx_array (*values)(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p);

    /* Replaces non-finite values of the parts with 0. Returns float32 [G, S, 1]: NaN for each token that had a non-finite value,
     * otherwise 0. */
    mlx_array (*take_odd)(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]);

    /* Decodes whole pages. NULL except for sealed kinds, which have no encode(). part[p]: [n, G, bytes of the part / 2] ->
     * float32 [G, n * page_tokens, D]. scores(), values() and take_odd() of sealed kinds take this result as part 0. `channels`
     * holds the channel tables of calibrated keys and is NULL for other kinds. */
    mlx_array (*rows)(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels,
                      const mlx_array part[FKV_N_PARTS], uint32_t page_tokens);

    /* Seals N blocks, bit-identical to fkv_seal_block(). x: float32 [N, page_tokens, D], a result of fkv_mlx_storable(), with
     * blocks sorted by page and then by head. Output: part[p]: [N, bytes of the part / 2]. */
    void (*seal)(fkv_mlx_state *mlx, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array x,
                 mlx_array part[FKV_N_PARTS]);
} fkv_mlx_codec;

const fkv_mlx_codec *fkv_mlx_codec_of(const fkv_codec *codec);

extern const fkv_mlx_codec fkv_mlx_sealed_keys;
extern const fkv_mlx_codec fkv_mlx_sealed_values;
extern const fkv_mlx_codec fkv_mlx_calibrated_keys;

FKV_INLINE mlx_dtype fkv_mlx_page_type(const fkv_codec *codec) { return codec->type == FKV_BF16 ? MLX_BFLOAT16 : MLX_FLOAT16; }

/* Decodes rows of open blocks. part: [N, S, row_bytes / 2] -> float32 [N, S, D] */
mlx_array fkv_mlx_open_rows(fkv_mlx_state *mlx, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]);

/* Decodes rows of a codec that encodes each row separately. part: [G, S, row_bytes / 2] -> float32 [G, S, D], still rotated */
mlx_array fkv_mlx_decoded_rows(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]);

/* Converts rows to values that pages can store: NaN becomes 0, and magnitudes are clamped to the limit of page_type. */
mlx_array fkv_mlx_storable(fkv_mlx_state *mlx, mlx_array x);

#endif
