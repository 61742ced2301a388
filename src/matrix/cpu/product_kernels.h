/* Interface of the matrix-product kernels of one instruction set. A kernel processes a range of panels of one matrix for a range
 * of activation rows; src/matrix/product.c chooses both ranges.
 *
 * The result for a token depends, bit for bit, only on the matrix and the activations of this token, and not on other tokens or
 * on the division into panels. The sign and the payload of NaN results are unspecified.
 */
#ifndef FKV_PRODUCT_KERNELS_H
#define FKV_PRODUCT_KERNELS_H

#include "../panels.h"

enum {
    FKV_BLOCK_TOKENS = 16,
    FKV_TILE_PANELS = 16 /* number of panels whose codes the AMX kernels unpack together */
};

/* A range of panels of one matrix. */
typedef struct fkv_panels {
    fkv_matrix_kind kind;
    uint32_t n_cols;
    uint32_t n_panels;
    uint64_t panel_bytes;
    const int8_t *table;  /* [16] table of signed bytes; used by table kinds only */
    const uint8_t *first; /* first panel, 64-byte aligned */
} fkv_panels;

/* Activations of one matrix product, and the buffer for their prepared form. */
typedef struct fkv_activations {
    const float *x; /* [T, C] activations; consecutive rows are x_stride floats apart */
    size_t x_stride;
    uint32_t n_tokens;
    uint32_t n_cols;
    void *prepared; /* fkv_activation_bytes() bytes, 64-byte aligned */
    bool as_tiles;  /* true if the activations are prepared as AMX tiles */
} fkv_activations;

/* Upper bound, over all kernels, on the size of the prepared activations of one token in one unit (32 columns): two 16-bit values
 * per activation and three floats. */
enum { FKV_PREPARED_BYTES = 140 };

/* Returns the size of a buffer for prepared activations. Tokens are rounded up to whole blocks. */
FKV_INLINE uint64_t fkv_activation_bytes(uint64_t n_tokens, uint64_t n_cols) {
    return fkv_align_up(n_tokens, FKV_BLOCK_TOKENS) * (n_cols / 32) * FKV_PREPARED_BYTES;
}

typedef enum fkv_filled {
    FKV_FILLED,
    FKV_FILLED_NOT_FINITE, /* converted, but a scale or bias is not finite in f16 */
    FKV_FILL_UNKNOWN
} fkv_filled;

typedef struct fkv_product_kernels {
    /* Activations of a call with at least this number of tokens are prepared as AMX tiles. 0 if the kernels do not use tiles. */
    uint32_t min_tile_tokens;

    /* Prepares columns [column, column + n_columns) of tokens [token, token + n_tokens) for products with packed panels. column
     * and n_columns are multiples of FKV_UNIT_COLS; token and n_tokens are restricted as in product(). NULL if no preparation is
     * needed. */
    void (*prepare)(const fkv_activations *in, uint32_t token, uint32_t n_tokens, uint32_t column, uint32_t n_columns);

    /* Computes out[t][16 * p + r], the dot product of row r of panel p with x[token + t], for every panel and t < n_tokens.
     * `token` is a multiple of FKV_BLOCK_TOKENS. n_tokens is also a multiple of FKV_BLOCK_TOKENS, unless the range includes the
     * last token. out: [n_tokens, out_stride]. */
    void (*product)(const fkv_panels *panels, const fkv_activations *in, uint32_t token, uint32_t n_tokens, float *out,
                    size_t out_stride);

    /* Converts 16 rows of a block format to one panel. The panel is byte-identical to the result of fkv_matrix_set_codes().
     * n_cols must be a multiple of the block size. Returns FKV_FILL_UNKNOWN for unsupported formats. NULL if no format is
     * supported.
     */
    fkv_filled (*fill)(fkv_row_form form, const uint8_t *rows, uint64_t row_bytes, uint32_t n_cols, uint8_t *panel);
} fkv_product_kernels;

extern const fkv_product_kernels fkv_product_scalar;
extern const fkv_product_kernels fkv_product_avx2;
extern const fkv_product_kernels fkv_product_avx512;
extern const fkv_product_kernels fkv_product_avx512vnni;
extern const fkv_product_kernels fkv_product_amx;
extern const fkv_product_kernels fkv_product_neon;

/* Returns the kernels of an instruction set, or NULL if this build or machine does not support it. */
const fkv_product_kernels *fkv_product_kernels_for(fkv_isa isa);

#endif
