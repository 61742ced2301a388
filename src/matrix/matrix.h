/* Quantized weight matrices and their products with activations.
 *
 * A matrix [R rows, C columns] is divided into panels of 16 rows. In vector registers, each lane holds one row of a panel. A
 * dword holds four columns of one row (a quad), and the dwords of the 16 rows are adjacent. Dot-product instructions read
 * this layout directly; the AMX kernels convert codes to bfloat16 tiles. panels.h specifies the layout.
 *
 *   AFFINE2, 3, 4, 5, 6, 8  value = scale * code + bias: 12, 16, 20, 24, 28, 36 bytes per 32 weights
 *   CENTERED4, 5, 8         value = scale * (code - 2 ^ (bits - 1)): 18, 22, 34 bytes
 *   TABLE4                  value = scale * table[code], with 16 signed bytes per matrix: 18 bytes
 *   F16, BF16, F32          no groups
 *
 * In kinds whose names end with _16, 16 columns share a scale; in all other kinds, 32 columns do. In the _16 kinds, 32 weights
 * take 16 (AFFINE2, CENTERED3), 28 (CENTERED6) or 20 (TABLE4) bytes. Scales and biases are f16. Rows are zero-padded to whole
 * panels; the number of columns must be a multiple of 32. The result for a token depends, bit for bit, only on the matrix and the
 * activations of this token.
 */
#ifndef FKV_MATRIX_H
#define FKV_MATRIX_H

#include "../base/workers.h"
#include "panels.h"

#include <stdatomic.h>

typedef struct fkv_matrix fkv_matrix;

/* Source of a matrix that has no panels, because its rows stay in a mapped file. For each product, panels are built in the
 * caller's scratch memory and then discarded, so only a few panels per thread are in memory at a time. */
typedef struct fkv_matrix_rows {
    /* Converts rows [row, row + n_rows) of the source to rows 0 to n_rows - 1 of `panel`, a matrix with a single panel. Returns
     * false in the same cases as fkv_matrix_set_codes(). */
    bool (*set)(const void *source, uint32_t row, uint32_t n_rows, fkv_matrix *panel, void *scratch);
    const void *source;
    uint64_t scratch_bytes; /* number of scratch bytes that set() needs */
    fkv_row_form form;
    const uint8_t *data; /* [R, row_bytes] rows in a block format that kernels convert without calling set() */
    uint64_t row_bytes;
} fkv_matrix_rows;

struct fkv_matrix {
    fkv_matrix_kind kind;
    uint32_t group;  /* columns that share a scale: 16 or 32; 0 for float kinds */
    uint32_t n_rows; /* R, outputs */
    uint32_t n_cols; /* C, inputs */
    uint64_t panel_bytes;
    const int8_t *table; /* [16] code table, set and owned by the caller; NULL for kinds without a table */
    uint8_t *panels;     /* [ceil(R / 16), panel_bytes], 64-byte aligned, owned by the caller; NULL if `rows` is used */
    fkv_matrix_rows rows;
};

/* Initializes all fields of a matrix except `panels` and `table`. Returns FKV_UNSUPPORTED, with the rejected values in the
 * message, if the number of columns or the group size is not supported. */
fkv_status fkv_matrix_make(fkv_matrix_kind kind, uint32_t group, uint32_t n_rows, uint32_t n_cols, fkv_matrix *matrix);
uint64_t fkv_matrix_bytes(const fkv_matrix *matrix);

/* Sets a row from codes. Several threads may set rows of different panels at once. Panels must be zero-initialized. Centered
 * kinds ignore biases. Returns false if a scale or bias is not finite in f16; the row is set nevertheless. */
bool fkv_matrix_set_codes(fkv_matrix *matrix, uint32_t row, const uint8_t *codes /* [C], one byte each */,
                          const float *scales /* [C / group] */, const float *biases /* [C / group] */);
void fkv_matrix_set_floats(fkv_matrix *matrix, uint32_t row, const void *numbers /* [C] values in the float type of the kind */);

/* Decodes one row to floats. This function is the reference for the format and is also used to look up embeddings. */
void fkv_matrix_get_row(const fkv_matrix *matrix, uint32_t row, float *out /* [C] */);

/* Returns the size, in bytes, of the prepared activations that all products of a call share. */
uint64_t fkv_product_input_bytes(uint32_t n_tokens, uint32_t n_cols);

/* Scratch memory in which panels are built for products with matrices that are not stored as panels. Each thread that calls
 * fkv_product_run() needs its own fkv_panel_room. */
typedef struct fkv_panel_room {
    uint8_t *bytes; /* [n_threads, thread_bytes], 64-byte aligned */
    uint64_t thread_bytes;
    uint64_t scratch_bytes; /* size of the scratch memory of set(), which is at the start of each thread's memory */
    atomic_bool lost;       /* set to true if a scale or bias was not finite in f16, in which case the product is wrong */
} fkv_panel_room;

/* Increases the sizes in `room`, if necessary, so that they suffice for products with `matrix`. Does not allocate memory. */
void fkv_panel_room_grow(fkv_panel_room *room, const fkv_matrix *matrix);

/* One of several matrix products that share their activations. out: [T, out_stride]; column `row` receives the dot product of the
 * activations with matrix row `row`, plus bias[row] if bias is not NULL. */
typedef struct fkv_product {
    const fkv_matrix *matrix;
    const float *bias; /* [R] or NULL */
    float *out;        /* [T, out_stride] */
    uint32_t out_stride;
    fkv_panel_room *room; /* scratch memory in which panels are built; required if the matrix is not stored as panels */
} fkv_product;

enum { FKV_MAX_PRODUCTS = 4 };

/* For each of up to FKV_MAX_PRODUCTS matrices with the same number of columns, computes out = x * transpose(matrix). x: [T, C],
 * with rows x_stride floats apart; input: fkv_product_input_bytes(T, C) bytes, 64-byte aligned. Does not allocate memory. `isa`
 * must be supported by this machine and must not be FKV_ISA_AUTO. */
void fkv_product_run(fkv_workers *workers, fkv_isa isa, const fkv_product *products, uint32_t n_products, const float *x,
                     uint32_t n_tokens, uint32_t x_stride, void *input);

/* Products of several heads, each with its own matrix and its own activations. */
typedef struct fkv_head_products {
    const fkv_matrix *matrices; /* [n_heads] matrices [R, C] with panels, all of the same shape; their kinds may differ */
    uint32_t n_heads;
    const float *x;       /* [n_heads, T, C] */
    float *out;           /* [T, out_stride]; the output of head h starts at column h * head_stride */
    uint32_t out_stride;  /* at least n_heads * head_stride */
    uint32_t head_stride; /* at least R */
} fkv_head_products;

/* Computes the products of all heads for n_tokens tokens. input: n_heads * fkv_product_input_bytes(T, C) bytes, 64-byte aligned.
 * The other arguments have the same meaning as in fkv_product_run(). */
void fkv_product_run_heads(fkv_workers *workers, fkv_isa isa, const fkv_head_products *products, uint32_t n_tokens, void *input);

#endif
