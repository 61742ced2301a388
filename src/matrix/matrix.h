/* Weights as rows of codes, and their product with activations: the score side of attention with weights for keys.
 *
 * A matrix [R rows, C columns] is cut into panels of 16 rows, because 16 is the number of lanes: in a panel four columns of one
 * row (a quad) are one dword, and the dwords of the 16 rows lie side by side, which is what the score kernels make of a tile of
 * keys before they use it (kernels_vnni.h), what the dot products of every instruction set read, and the layout of a tile of AMX.
 * The layout in full is in panels.h.
 *
 *   AFFINE2, 3, 4, 5, 6, 8  value = scale * code + bias: 12, 16, 20, 24, 28, 36 bytes for 32 weights
 *   CENTERED4, 5, 8         value = scale * (code - 2 ^ (bits - 1)): 18, 22, 34 bytes
 *   TABLE4                  value = scale * table[code], a table of 16 signed bytes for each matrix: 18 bytes
 *   F16, BF16, F32          no groups
 *
 * A group of columns that share a scale has 32, in kinds that end with _16 it has 16 (AFFINE2: 16 bytes for 32 weights, CENTERED3
 * and CENTERED6: 16 and 28, TABLE4: 20).
 *
 * Scales and biases are f16. Rows are padded to a whole panel (with zeros); columns must be a multiple of 32.
 *
 * For every row of activations the product is a function of that row and the matrix alone, to the last bit.
 */
#ifndef FKV_MATRIX_H
#define FKV_MATRIX_H

#include "../base/workers.h"
#include "panels.h"

#include <stdatomic.h>

typedef struct fkv_matrix fkv_matrix;

/* Rows that stay where they are, in a mapped file: a matrix that has them has no panels of its own. Each is made on the way to a
 * product, in room that the caller keeps, and forgotten: what is in memory twice is a few panels for each thread. */
typedef struct fkv_matrix_rows {
    /* Rows [row, row + n_rows) of the source as rows 0 on of `panel`, a matrix of one panel. False: as fkv_matrix_set_codes(). */
    bool (*set)(const void *source, uint32_t row, uint32_t n_rows, fkv_matrix *panel, void *scratch);
    const void *source;
    uint64_t scratch_bytes; /* that set() takes */
    fkv_row_form form;
    const uint8_t *data; /* [R, row_bytes] of a form that kernels know */
    uint64_t row_bytes;
} fkv_matrix_rows;

struct fkv_matrix {
    fkv_matrix_kind kind;
    uint32_t group;  /* 16 or 32; 0 for floats */
    uint32_t n_rows; /* R, outputs */
    uint32_t n_cols; /* C, inputs */
    uint64_t panel_bytes;
    const int8_t *table; /* [16] of the kinds with a table, set by whoever made it; else NULL */
    uint8_t *panels;     /* [ceil(R / 16), panel_bytes], 64-byte aligned; owned by whoever made it. NULL: `rows` has them */
    fkv_matrix_rows rows;
};

/* Fills in all but `panels` and `table`; FKV_UNSUPPORTED, with the numbers, for columns that do not fit or a group that is not
 * the kind's. */
fkv_status fkv_matrix_make(fkv_matrix_kind kind, uint32_t group, uint32_t n_rows, uint32_t n_cols, fkv_matrix *matrix);
uint64_t fkv_matrix_bytes(const fkv_matrix *matrix);

/* Rows may be set by several threads at once if they are of different panels. Panels must be zeroed before. Centered kinds do not
 * look at biases. False: a scale or a bias is not finite as f16; the row is set all the same. */
bool fkv_matrix_set_codes(fkv_matrix *matrix, uint32_t row, const uint8_t *codes /* [C], one each */,
                          const float *scales /* [C / group] */, const float *biases /* [C / group] */);
void fkv_matrix_set_floats(fkv_matrix *matrix, uint32_t row, const void *numbers /* [C] of the kind's own type */);

/* One row as floats: the truth of the format, and the lookup of an embedding. */
void fkv_matrix_get_row(const fkv_matrix *matrix, uint32_t row, float *out /* [C] */);

/* Activations made ready once for all the matrices they meet. */
uint64_t fkv_product_input_bytes(uint32_t n_tokens, uint32_t n_cols);

/* Where panels are made of rows; one for the products that one thread asks for. */
typedef struct fkv_panel_room {
    uint8_t *bytes; /* [n_threads, thread_bytes], 64-byte aligned */
    uint64_t thread_bytes;
    uint64_t scratch_bytes; /* of each thread's, in front */
    atomic_bool lost;       /* a scale or a bias was not finite as f16: what was multiplied is not the matrix */
} fkv_panel_room;

/* Grows the sizes, not the bytes, to what products with a matrix take. */
void fkv_panel_room_grow(fkv_panel_room *room, const fkv_matrix *matrix);

/* One matrix of a job; jobs of one call share their input. out: [T, out_stride], column `row` gets the product (+ bias[row]
 * where bias is not NULL). */
typedef struct fkv_product {
    const fkv_matrix *matrix;
    const float *bias; /* [R] or NULL */
    float *out;        /* [T, out_stride] */
    uint32_t out_stride;
    fkv_panel_room *room; /* for a matrix without panels */
} fkv_product;

enum { FKV_MAX_PRODUCTS = 4 };

/* out = x . matrixT for up to FKV_MAX_PRODUCTS matrices with the same columns. x: [T, C], rows x_stride apart; input:
 * fkv_product_input_bytes(T, C), 64-byte aligned. Allocates nothing. isa must run on this machine (FKV_ISA_AUTO is not taken). */
void fkv_product_run(fkv_workers *workers, fkv_isa isa, const fkv_product *products, uint32_t n_products, const float *x,
                     uint32_t n_tokens, uint32_t x_stride, void *input);

#endif
