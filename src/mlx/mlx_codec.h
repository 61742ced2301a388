/* The codecs in MLX's own operations, for the plain way: rows to parts, parts in a product. One entry for each kind. */
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
} fkv_mlx_codec;

const fkv_mlx_codec *fkv_mlx_codec_of(const fkv_codec *codec);

#endif
