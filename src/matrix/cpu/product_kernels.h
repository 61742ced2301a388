/* What one instruction set brings to the products of a model with its weights. A kernel sees some panels of one matrix and some
 * rows of activations; src/matrix/product.c cuts them.
 *
 * For every row of activations the result is a function of that row and the matrix alone, to the last bit: not of the rows or
 * panels beside it.
 */
#ifndef FKV_PRODUCT_KERNELS_H
#define FKV_PRODUCT_KERNELS_H

#include "../panels.h"

enum { FKV_BLOCK_TOKENS = 16 };

/* Some panels of one matrix. */
typedef struct fkv_panels {
    fkv_matrix_kind kind;
    uint32_t n_cols;
    uint32_t n_panels;
    uint64_t panel_bytes;
    const int8_t *table;  /* [16] of the kinds with one */
    const uint8_t *first; /* panel, 64-byte aligned */
} fkv_panels;

/* The rows of activations of one product, and room for what the kernels make of them. */
typedef struct fkv_activations {
    const float *x; /* [T, C], rows x_stride apart */
    size_t x_stride;
    uint32_t n_tokens;
    uint32_t n_cols;
    void *prepared; /* fkv_activation_bytes(), 64-byte aligned */
    bool as_tiles;  /* prepared as kernels want it that answered so to wants_tiles() */
} fkv_activations;

/* Two numbers of 16 bits for each and a float for each 32 of them, in whole blocks: the most that any kernels prepare. */
enum { FKV_PREPARED_BYTES = 132 };
FKV_INLINE uint64_t fkv_activation_bytes(uint64_t n_tokens, uint64_t n_cols) {
    return fkv_align_up(n_tokens, FKV_BLOCK_TOKENS) * (n_cols / 32) * FKV_PREPARED_BYTES;
}

typedef enum fkv_filled {
    FKV_FILLED,
    FKV_FILLED_NOT_FINITE, /* with scales or biases that are not finite as f16 */
    FKV_FILL_UNKNOWN
} fkv_filled;

typedef struct fkv_product_kernels {
    /* Whether activations of so many tokens are to be prepared as tiles for this kind; NULL: never. */
    bool (*wants_tiles)(fkv_matrix_kind kind, uint32_t n_tokens);

    /* What product() wants of tokens [token, token + n_tokens) for packed panels beside their floats; NULL: nothing. */
    void (*prepare_tokens)(const fkv_activations *in, uint32_t token, uint32_t n_tokens);

    /* out[t][16 p + r] = row r of panel p . x[token + t], for n_tokens tokens from `token` on and every panel. token: a multiple
     * of FKV_BLOCK_TOKENS; n_tokens: one too, unless they are the last. out: [n_tokens, out_stride]. */
    void (*product)(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                    size_t out_stride);

    /* One panel of 16 rows of a form, with the bytes that fkv_matrix_set_codes() would give it; NULL, or FKV_FILL_UNKNOWN of some
     * forms: not here. n_cols: a whole number of blocks. */
    fkv_filled (*fill)(fkv_row_form form, const uint8_t *rows, uint64_t row_bytes, uint32_t n_cols, uint8_t *panel);
} fkv_product_kernels;

extern const fkv_product_kernels fkv_product_scalar;
extern const fkv_product_kernels fkv_product_avx2;
extern const fkv_product_kernels fkv_product_avx512;
extern const fkv_product_kernels fkv_product_avx512vnni;
extern const fkv_product_kernels fkv_product_amx;
extern const fkv_product_kernels fkv_product_neon;

/* The kernels of an instruction set; NULL where this build or machine has none. */
const fkv_product_kernels *fkv_product_kernels_for(fkv_isa isa);

#endif
