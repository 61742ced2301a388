/* Weights on MLX. A matrix is stored either as codes with a scale and a bias per group of 32, in MLX's affine quantization
 * format, or as half-precision floats. docs/mlx.md lists the representation and precision of every file type.
 *
 * Scales and biases have the type of the activation rows: f16 on a GPU, f32 on the CPU backend. The quantized products of the
 * CPU backend accumulate in the type of the rows. On the CPU backend, F32 tensors stay F32.
 */
#ifndef FKV_ARRAY_WEIGHTS_H
#define FKV_ARRAY_WEIGHTS_H

#include "../../mlx/mlx_graph.h"
#include "../model.h"

typedef struct fkv_array_matrix {
    mlx_dtype rows; /* row type of the product: MLX_FLOAT16 or MLX_FLOAT32 */
    bool is_coded;
    fkv_mlx_affine affine; /* quantized matrix: codes in 32-bit words [R, C * bits / 32], scales and biases [R, C / 32] */
    mlx_array halves;      /* otherwise: [R, C] */
    mlx_array across;      /* unquantized matrix: [C, R], a transposed view */
} fkv_array_matrix;

/* One matrix (gate, up or down) of all experts of a layer. Every array has a leading expert dimension: [E, ...]. Float matrices
 * are f32 on the CPU backend, because its gathered products support no other type. */
typedef fkv_array_matrix fkv_array_stack;

/* Vectors are f32; vectors that the model does not have are empty. */
typedef struct fkv_array_layer {
    fkv_array_matrix q, k, v, o, attn_gate, gate, up, down;
    fkv_array_matrix input_gate, input_proj;
    mlx_array q_bias, k_bias, v_bias, o_bias;
    mlx_array gate_bias, up_bias, down_bias;
    mlx_array q_norm, k_norm;
    mlx_array attn_norm, ffn_norm;
    mlx_array attn_norm_bias, ffn_norm_bias;
    mlx_array post_attn_norm, post_ffn_norm;
    mlx_array input_norm, out_scale;
    fkv_array_matrix router;               /* [E, dim] */
    fkv_array_matrix shared_gate;          /* [1, dim] gate of the shared expert, or empty */
    mlx_array router_correction;           /* [E] */
    mlx_array router_scale, expert_scales; /* [dim] and [E]; empty unless the layer has both experts and a parallel dense block */
    mlx_array experts_norm, post_dense_norm, post_experts_norm; /* [dim]; empty if router_scale is empty */
    fkv_array_stack gate_experts, up_experts, down_experts;
    mlx_array router_bias;                                           /* [E] */
    mlx_array gate_experts_bias, up_experts_bias, down_experts_bias; /* gate and up: [E, expert_dim]; down: [E, dim] */
    fkv_array_matrix latent_down, latent_up;                         /* projections before and after the experts, or empty */

    /* recurrent layers; see fkv_layer_tensors */
    fkv_array_matrix mixer_in, mixer_gate, mixer_fused, mixer_out, alpha, beta, beta_alpha;
    fkv_array_matrix alpha_low, gate_low;
    mlx_array mixer_in_bias, mixer_out_bias;
    mlx_array conv;                    /* [n_taps, C]; in KDA, the channels of queries, keys and values, in this order */
    mlx_array conv_bias;               /* [C] */
    mlx_array decay, alpha_bias, skip; /* [n_v_heads]; decay: negated decay rates; in KDA, alpha_bias is [n_v_heads * k_dim] */
    mlx_array mixer_norm;              /* [v_dim]; in Mamba-2 [n_v_heads * v_dim] */

    /* latent attention; see fkv_layer_tensors */
    fkv_array_matrix q_a, kv_a;
    mlx_array q_a_bias, kv_a_bias, q_a_norm, kv_a_norm;
    mlx_array k_up, v_up; /* [H, nope_dim, latent dim] and [H, latent dim, v_dim]; f16 on a GPU, otherwise f32 */
} fkv_array_layer;

struct fkv_array_weights {
    mlx_device device;
    bool on_gpu;
    fkv_array_layer *layers; /* [n_layers] */
    mlx_array final_norm;
    mlx_array final_norm_bias;
    mlx_array output_bias; /* [n_vocab] */
    fkv_array_matrix output;
    fkv_array_matrix own_embedding; /* embedding matrix; empty if the output matrix is also the embedding matrix */
    fkv_array_matrix inputs; /* table of per-layer token embeddings; the fields whose names begin with `inputs` are empty if the
                                model has no per-layer inputs */
    fkv_array_matrix inputs_proj;
    mlx_array inputs_norm;
};

/* Returns the default device of MLX, which the caller releases with mlx_device_free(). */
fkv_status fkv_array_device(mlx_device *device, bool *on_gpu);

/* Returns the number of bytes that MLX may still allocate: its limit minus the memory in use. On the CPU, the result is at most
 * the available system memory. */
uint64_t fkv_array_available(const char **source);

/* Loads one matrix of a file. fkv_array_matrix_free() also accepts a zeroed matrix and a matrix whose loading failed. */
fkv_status fkv_array_matrix_load(const fkv_tensor *tensor, bool on_gpu, mlx_stream stream, fkv_array_matrix *matrix);
void fkv_array_matrix_free(fkv_array_matrix *matrix);

/* Implement the functions of fkv_model_backend. */
fkv_status fkv_array_weights_count(fkv_model *model);
fkv_status fkv_array_weights_load(fkv_model *model);
void fkv_array_weights_unload(fkv_model *model);

#endif
