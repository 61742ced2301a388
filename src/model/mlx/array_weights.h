/* Weights as MLX runs them. A matrix of a file is either codes with a scale and a bias for every 32 of them, as MLX's affine
 * quantized products take it, or half floats; a model is never expanded to floats.
 *
 *   in the file                       here                                how exact
 *   Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ  4, 4, 5, 5, 8, 2 bits, groups of 32   to the bit
 *   Q4_K, Q5_K                        4, 5 bits, groups of 32               f16 scales: as on the CPU, 2^-11 of scale and bias;
 * f32: exact IQ4, MXFP4, IQ1_S, IQ2_XXS, IQ3   8 bits, groups of 32                  the same F16 half floats to the bit BF16
 * half floats                           to the bit from 2^-14 to 65504; below that steps of 2^-24 F32, all with groups of 16 half
 * floats                           2^-11 of each number (MLX has no such groups)
 *
 * On MLX's CPU stream F32 stays F32, to the bit.
 *
 * Scales and biases have the type of the rows that a product takes: f16 on a GPU. On MLX's CPU stream they are f32, because its
 * quantized products add up in the type of their rows.
 */
#ifndef FKV_ARRAY_WEIGHTS_H
#define FKV_ARRAY_WEIGHTS_H

#include "../../mlx/mlx_graph.h"
#include "../model.h"

typedef struct fkv_array_matrix {
    mlx_dtype rows; /* the type of the rows it takes: MLX_FLOAT16 or MLX_FLOAT32 */
    bool is_coded;
    fkv_mlx_affine affine; /* coded: codes [R, C bits / 32] in words of 32 bits, scales and biases [R, C / 32] */
    mlx_array halves;      /* else: [R, C] */
    mlx_array across;      /* else: [C, R], the same numbers seen the other way */
} fkv_array_matrix;

/* The same part of all experts of a layer: every array of it has one dimension more in front, [E, ...]. Floats are f32 on MLX's
 * CPU stream, whose gathered products take nothing else. */
typedef fkv_array_matrix fkv_array_stack;

/* Vectors are f32; those a model has not are empty. */
typedef struct fkv_array_layer {
    fkv_array_matrix q, k, v, o, gate, up, down;
    fkv_array_matrix input_gate, input_proj;
    mlx_array q_bias, k_bias, v_bias, o_bias;
    mlx_array gate_bias, up_bias, down_bias;
    mlx_array q_norm, k_norm;
    mlx_array attn_norm, ffn_norm;
    mlx_array attn_norm_bias, ffn_norm_bias;
    mlx_array post_attn_norm, post_ffn_norm;
    mlx_array input_norm, out_scale;
    fkv_array_matrix router;               /* [E, dim] */
    fkv_array_matrix shared_gate;          /* [1, dim] of gate, up and down beside experts, or empty */
    mlx_array router_correction;           /* [E] */
    mlx_array router_scale, expert_scales; /* [dim], [E]: of experts beside a feed-forward with norms of its own, as */
    mlx_array experts_norm, post_dense_norm, post_experts_norm; /* [dim] */
    fkv_array_stack gate_experts, up_experts, down_experts;
    mlx_array router_bias;                                           /* [E] */
    mlx_array gate_experts_bias, up_experts_bias, down_experts_bias; /* [E, ffn_dim], [E, ffn_dim], [E, dim] */
} fkv_array_layer;

struct fkv_array_weights {
    mlx_device device;
    bool on_gpu;
    fkv_array_layer *layers; /* [n_layers] */
    mlx_array final_norm;
    mlx_array final_norm_bias;
    fkv_array_matrix output;
    fkv_array_matrix own_embedding; /* empty where the output's rows are the embedding */
    fkv_array_matrix inputs;        /* what layers read of tokens, as the next two empty where they do not */
    fkv_array_matrix inputs_proj;
    mlx_array inputs_norm;
};

/* The device that MLX runs on unless told otherwise. To be given back with mlx_device_free(). */
fkv_status fkv_array_device(mlx_device *device, bool *on_gpu);

/* Bytes MLX may still take: its own limit less what is in use, and on its CPU no more than the system has. */
uint64_t fkv_array_available(const char **source);

/* One matrix of a file. fkv_array_matrix_free() is right after a failure too, and for one that is all zeros. */
fkv_status fkv_array_matrix_load(const fkv_tensor *tensor, bool on_gpu, mlx_stream stream, fkv_array_matrix *matrix);
void fkv_array_matrix_free(fkv_array_matrix *matrix);

/* As fkv_model_backend has them. */
fkv_status fkv_array_weights_count(fkv_model *model);
fkv_status fkv_array_weights_load(fkv_model *model);
void fkv_array_weights_unload(fkv_model *model);

#endif
