/* The key-value part of a GGUF file: a table sorted by key, asked by name and type.
 *
 * Everything a value points to was inside the file when the table was read. The getters leave *out as it was, and answer FKV_OK,
 * where the file has no such key; a value of the wrong type is FKV_FILE_FORMAT with the key's name.
 */
#ifndef FKV_GGUF_VALUES_H
#define FKV_GGUF_VALUES_H

#include "weights_state.h"

typedef enum fkv_gguf_type {
    FKV_GGUF_U8 = 0,
    FKV_GGUF_I8,
    FKV_GGUF_U16,
    FKV_GGUF_I16,
    FKV_GGUF_U32,
    FKV_GGUF_I32,
    FKV_GGUF_F32,
    FKV_GGUF_BOOL,
    FKV_GGUF_STRING,
    FKV_GGUF_ARRAY,
    FKV_GGUF_U64,
    FKV_GGUF_I64,
    FKV_GGUF_F64,
    FKV_GGUF_N_TYPES
} fkv_gguf_type;

/* A place in the file. Reading past the end is FKV_FILE_DAMAGED and leaves the place as it was. */
typedef struct fkv_gguf_reader {
    const uint8_t *at;
    const uint8_t *end;
    const char *path;
} fkv_gguf_reader;

fkv_status fkv_gguf_take_u32(fkv_gguf_reader *reader, uint32_t *number);
fkv_status fkv_gguf_take_u64(fkv_gguf_reader *reader, uint64_t *number);
fkv_status fkv_gguf_take_string(fkv_gguf_reader *reader, fkv_bytes *string);

typedef struct fkv_gguf_value {
    fkv_bytes key;
    fkv_gguf_type type;
    fkv_gguf_type item;  /* of an array; else as type */
    uint64_t count;      /* of an array; else 1 */
    const uint8_t *data; /* count items one after another */
} fkv_gguf_value;

typedef struct fkv_gguf_values {
    fkv_gguf_value *values; /* [n_values], sorted by key, no key twice */
    uint32_t n_values;
    const char *path;
    const uint8_t *end; /* of the file */
} fkv_gguf_values;

/* Reads n values; the reader then stands behind them. After a failure there is nothing to close. */
fkv_status fkv_gguf_values_read(fkv_gguf_reader *reader, uint64_t n, fkv_gguf_values *values);
void fkv_gguf_values_close(fkv_gguf_values *values);

const fkv_gguf_value *fkv_gguf_find(const fkv_gguf_values *values, const char *key); /* NULL: not there */

/* Any integer type is taken for a u32 that it fits in, f32 and f64 for a finite float. */
fkv_status fkv_gguf_get_u32(const fkv_gguf_values *values, const char *key, uint32_t *out);
fkv_status fkv_gguf_get_f32(const fkv_gguf_values *values, const char *key, float *out);
fkv_status fkv_gguf_get_bool(const fkv_gguf_values *values, const char *key, bool *out);
fkv_status fkv_gguf_get_string(const fkv_gguf_values *values, const char *key, fkv_bytes *out);

/* Arrays. *out is taken with malloc() and belongs to the caller; *n is 0 and *out NULL where the array is empty or not there. */
fkv_status fkv_gguf_get_strings(const fkv_gguf_values *values, const char *key, fkv_bytes **out, uint32_t *n);
fkv_status fkv_gguf_get_f32s(const fkv_gguf_values *values, const char *key, float **out, uint32_t *n);
fkv_status fkv_gguf_get_i32s(const fkv_gguf_values *values, const char *key, int32_t **out, uint32_t *n);

#endif
