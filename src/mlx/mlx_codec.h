/* The codecs in MLX's own operations, for the plain way: rows to parts, parts in a product. One entry for each kind; sealed ones
 * are in mlx_sealed.c. */
#ifndef FKV_MLX_CODEC_H
#define FKV_MLX_CODEC_H

#include "mlx_state.h"

/* S tokens of a side are the parts that its codec has, each [G, S, row_bytes / 2] of 16-bit numbers. */
typedef struct fkv_mlx_codec {
    /* x: float32 [T, G, D], storable -> part[p]: [T, G, row_bytes / 2] of 16-bit numbers, with the bits of fkv_codec_encode(). */
    void (*encode)(fkv_mlx_state *mlx, const fkv_codec *codec, mlx_array x, mlx_array part[FKV_N_PARTS]);

    /* q: float32 [G, n, D] -> float32 [G, n, S] */
    mlx_array (*scores)(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array q);

    /* p: float32 [G, n, S] -> float32 [G, n, D] */
    mlx_array (*values)(fkv_mlx_graph *g, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS], mlx_array p);

    /* What is not finite in the parts becomes 0 -> float32 [G, S, 1]: NaN for a token that had such a number, else 0. */
    mlx_array (*take_odd)(fkv_mlx_graph *g, const fkv_codec *codec, mlx_array part[FKV_N_PARTS]);

    /* Of kinds that are sealed, which have no encode(). part[p]: [n, G, bytes of the part / 2], of whole pages -> float32 [G, n *
     * page_tokens, D], which the three functions before this one then take as their part 0. Else NULL. channels: of calibrated
     * keys; NULL of all other kinds, here and below. */
    mlx_array (*rows)(fkv_mlx_graph *g, const fkv_codec *codec, const fkv_mlx_channels *channels,
                      const mlx_array part[FKV_N_PARTS], uint32_t page_tokens);

    /* x: float32 [N, page_tokens, D], storable: N blocks, of all heads of a page and then of the next -> part[p]: [N, bytes of
     * the part / 2], with the bits of fkv_seal_block(). */
    void (*seal)(fkv_mlx_state *mlx, const fkv_codec *codec, const fkv_mlx_channels *channels, mlx_array x,
                 mlx_array part[FKV_N_PARTS]);
} fkv_mlx_codec;

const fkv_mlx_codec *fkv_mlx_codec_of(const fkv_codec *codec);

extern const fkv_mlx_codec fkv_mlx_sealed_keys;
extern const fkv_mlx_codec fkv_mlx_sealed_values;
extern const fkv_mlx_codec fkv_mlx_calibrated_keys;

FKV_INLINE mlx_dtype fkv_mlx_page_type(const fkv_codec *codec) { return codec->type == FKV_BF16 ? MLX_BFLOAT16 : MLX_FLOAT16; }

/* The storable rows of an open block. part: as gathered, [N, S, row_bytes / 2] -> float32 [N, S, D] */
mlx_array fkv_mlx_open_rows(fkv_mlx_state *mlx, const fkv_codec *codec, const mlx_array part[FKV_N_PARTS]);

/* NaN becomes 0, what is beyond the limit of a page the limit. */
mlx_array fkv_mlx_storable(fkv_mlx_state *mlx, mlx_array x);

#endif
