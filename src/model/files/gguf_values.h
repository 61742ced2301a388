/* The metadata (key-value pairs) of a GGUF file, as a table sorted by key.
 *
 * All values were bounds-checked when the table was read. If a key is missing, getters return FKV_OK and leave *out unchanged. If
 * it has the wrong type, they return FKV_FILE_FORMAT.
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

/* A read position in the file. Reads past the end return FKV_FILE_DAMAGED and do not advance the position. */
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
    fkv_gguf_type item;  /* element type if the value is an array, otherwise equal to `type` */
    uint64_t count;      /* number of elements if the value is an array, otherwise 1 */
    const uint8_t *data; /* `count` consecutive elements */
} fkv_gguf_value;

typedef struct fkv_gguf_values {
    fkv_gguf_value *values; /* [n_values], sorted by key; keys are unique */
    uint32_t n_values;
    const char *path;
    const uint8_t *end; /* end of the file */
} fkv_gguf_values;

/* Reads n key-value pairs and advances the reader past them. After a failure, fkv_gguf_values_close() need not be called. */
fkv_status fkv_gguf_values_read(fkv_gguf_reader *reader, uint64_t n, fkv_gguf_values *values);
void fkv_gguf_values_close(fkv_gguf_values *values);

const fkv_gguf_value *fkv_gguf_find(const fkv_gguf_values *values, const char *key); /* NULL if missing */

/* fkv_gguf_get_u32() accepts every integer type if the value fits in 32 bits; fkv_gguf_get_f32() accepts finite f32 and f64
 * values. */
fkv_status fkv_gguf_get_u32(const fkv_gguf_values *values, const char *key, uint32_t *out);
fkv_status fkv_gguf_get_f32(const fkv_gguf_values *values, const char *key, float *out);
fkv_status fkv_gguf_get_bool(const fkv_gguf_values *values, const char *key, bool *out);
fkv_status fkv_gguf_get_string(const fkv_gguf_values *values, const char *key, fkv_bytes *out);

/* Array getters. The caller frees *out. If the array is empty or missing, *n is 0 and *out is NULL. */
fkv_status fkv_gguf_get_strings(const fkv_gguf_values *values, const char *key, fkv_bytes **out, uint32_t *n);
fkv_status fkv_gguf_get_f32s(const fkv_gguf_values *values, const char *key, float **out, uint32_t *n);
fkv_status fkv_gguf_get_i32s(const fkv_gguf_values *values, const char *key, int32_t **out, uint32_t *n);

#endif
