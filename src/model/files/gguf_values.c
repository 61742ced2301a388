/* Reads the metadata of a GGUF file; see gguf_values.h.
 *
 * String arrays are bounds-checked again on every access, because the file is mapped and may have changed since it was opened.
 * Nested arrays are rejected; no model uses them.
 */
#include "gguf_values.h"

#include <math.h>
#include <stdlib.h>

enum {
    MAX_VALUES = 1 << 16,
    MIN_VALUE_BYTES = 8 + 1 + 4 + 1, /* size of the smallest key-value pair: a one-character key, a type and a one-byte value */
    MAX_KEY_BYTES = 65535,           /* maximum length of a key in the GGUF format */
    /* maximum number of elements in an array that a getter reads; all other arrays may be longer */
    MAX_ITEMS = 1 << 24
};

static const char *const TYPE_NAMES[FKV_GGUF_N_TYPES] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "bool", "string", "array", "u64", "i64", "f64"};
static const uint8_t TYPE_BYTES[FKV_GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}; /* 0: variable size */

/* ---- reading ---- */

static uint64_t bytes_left(const fkv_gguf_reader *reader) { return (uint64_t)(reader->end - reader->at); }

static fkv_status read_bytes(fkv_gguf_reader *reader, void *out, size_t n) {
    FKV_REQUIRE(n <= bytes_left(reader), FKV_FILE_DAMAGED, "%s: the file ends inside its header", reader->path);
    memcpy(out, reader->at, n);
    reader->at += n;
    return FKV_OK;
}

fkv_status fkv_gguf_take_u32(fkv_gguf_reader *reader, uint32_t *number) { return read_bytes(reader, number, sizeof *number); }
fkv_status fkv_gguf_take_u64(fkv_gguf_reader *reader, uint64_t *number) { return read_bytes(reader, number, sizeof *number); }

fkv_status fkv_gguf_take_string(fkv_gguf_reader *reader, fkv_bytes *string) {
    uint64_t size = 0;
    FKV_REQUIRE(bytes_left(reader) >= sizeof size, FKV_FILE_DAMAGED, "%s: the file ends inside its header", reader->path);
    memcpy(&size, reader->at, sizeof size);
    FKV_REQUIRE(size <= bytes_left(reader) - sizeof size, FKV_FILE_DAMAGED,
                "%s: a string has a declared length of %llu bytes, but only %llu bytes are left in the file", reader->path,
                (unsigned long long)size, (unsigned long long)(bytes_left(reader) - sizeof size));
    *string = (fkv_bytes){.data = (const char *)reader->at + sizeof size, .size = (size_t)size};
    reader->at += sizeof size + size;
    return FKV_OK;
}

static fkv_status skip_items(fkv_gguf_reader *reader, const fkv_gguf_value *value) {
    if (value->item == FKV_GGUF_STRING) {
        fkv_bytes string;
        for (uint64_t i = 0; i < value->count; i++) FKV_TRY(fkv_gguf_take_string(reader, &string));
        return FKV_OK;
    }
    uint64_t bytes = 0;
    FKV_REQUIRE(
        !fkv_mul_overflows(value->count, TYPE_BYTES[value->item], &bytes) && bytes <= bytes_left(reader), FKV_FILE_DAMAGED,
        "%s: the header declares an array of %llu values for key %s, but only %llu bytes are left in the file", reader->path,
        (unsigned long long)value->count, fkv_show(value->key).text, (unsigned long long)bytes_left(reader));
    reader->at += bytes;
    return FKV_OK;
}

static fkv_status read_value(fkv_gguf_reader *reader, fkv_gguf_value *value) {
    uint32_t type = 0;
    FKV_TRY(fkv_gguf_take_string(reader, &value->key));
    FKV_REQUIRE(value->key.size > 0 && value->key.size <= MAX_KEY_BYTES, FKV_FILE_DAMAGED, "%s: invalid key length of %zu bytes",
                reader->path, value->key.size);
    FKV_TRY(fkv_gguf_take_u32(reader, &type));
    FKV_REQUIRE(type < FKV_GGUF_N_TYPES, FKV_FILE_DAMAGED, "%s: %s has the invalid GGUF type %u", reader->path,
                fkv_show(value->key).text, type);
    value->type = (fkv_gguf_type)type;
    value->count = 1;
    if (value->type == FKV_GGUF_ARRAY) {
        FKV_TRY(fkv_gguf_take_u32(reader, &type));
        FKV_TRY(fkv_gguf_take_u64(reader, &value->count));
        FKV_REQUIRE(type < FKV_GGUF_N_TYPES, FKV_FILE_DAMAGED, "%s: %s is an array of the invalid GGUF type %u", reader->path,
                    fkv_show(value->key).text, type);
        FKV_REQUIRE(type != FKV_GGUF_ARRAY, FKV_UNSUPPORTED, "%s: %s is an array of arrays, which is not supported", reader->path,
                    fkv_show(value->key).text);
    }
    value->item = (fkv_gguf_type)type;
    value->data = reader->at;
    return skip_items(reader, value);
}

/* ---- table ---- */

static int compare_bytes(fkv_bytes a, fkv_bytes b) {
    const int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static int compare_keys(const void *a, const void *b) {
    return compare_bytes(((const fkv_gguf_value *)a)->key, ((const fkv_gguf_value *)b)->key);
}

static fkv_status read_sorted_values(fkv_gguf_reader *reader, fkv_gguf_values *values) {
    for (uint32_t i = 0; i < values->n_values; i++) FKV_TRY(read_value(reader, &values->values[i]));
    qsort(values->values, values->n_values, sizeof *values->values, compare_keys);
    for (uint32_t i = 1; i < values->n_values; i++)
        FKV_REQUIRE(compare_keys(&values->values[i - 1], &values->values[i]) != 0, FKV_FILE_DAMAGED, "%s: duplicate key %s",
                    reader->path, fkv_show(values->values[i].key).text);
    return FKV_OK;
}

fkv_status fkv_gguf_values_read(fkv_gguf_reader *reader, uint64_t n, fkv_gguf_values *values) {
    *values = (fkv_gguf_values){.path = reader->path, .end = reader->end};
    FKV_REQUIRE(n <= bytes_left(reader) / MIN_VALUE_BYTES, FKV_FILE_DAMAGED,
                "%s: the header declares %llu keys, but only %llu bytes follow", reader->path, (unsigned long long)n,
                (unsigned long long)bytes_left(reader));
    FKV_REQUIRE(n <= MAX_VALUES, FKV_UNSUPPORTED, "%s: the file has more than %d keys", reader->path, MAX_VALUES);
    if (n == 0) return FKV_OK;
    values->values = calloc(n, sizeof *values->values);
    FKV_REQUIRE(values->values != NULL, FKV_NO_MEMORY, "%s: out of memory reading %llu keys", reader->path,
                (unsigned long long)n);
    values->n_values = (uint32_t)n;
    const fkv_status status = read_sorted_values(reader, values);
    if (status != FKV_OK) fkv_gguf_values_close(values);
    return status;
}

void fkv_gguf_values_close(fkv_gguf_values *values) {
    free(values->values);
    *values = (fkv_gguf_values){0};
}

const fkv_gguf_value *fkv_gguf_find(const fkv_gguf_values *values, const char *key) {
    const fkv_gguf_value wanted = {.key = {.data = key, .size = strlen(key)}};
    if (values->n_values == 0) return NULL;
    return bsearch(&wanted, values->values, values->n_values, sizeof wanted, compare_keys);
}

/* ---- scalars ---- */

static fkv_status wrong_type(const fkv_gguf_values *values, const fkv_gguf_value *value, const char *wanted) {
    if (value->type == FKV_GGUF_ARRAY)
        return fkv_fail(FKV_FILE_FORMAT, "%s: %s is an array of %llu %s, expected %s", values->path, fkv_show(value->key).text,
                        (unsigned long long)value->count, TYPE_NAMES[value->item], wanted);
    return fkv_fail(FKV_FILE_FORMAT, "%s: %s has type %s, expected %s", values->path, fkv_show(value->key).text,
                    TYPE_NAMES[value->type], wanted);
}

/* Reads a value of any integer type. *number receives its bits, zero-extended to 64 bits, and *negative receives its sign.
 * Returns false if the value is not an integer. */
static bool integer_value(const fkv_gguf_value *value, uint64_t *number, bool *negative) {
    static const bool is_signed[FKV_GGUF_N_TYPES] = {
        [FKV_GGUF_I8] = true, [FKV_GGUF_I16] = true, [FKV_GGUF_I32] = true, [FKV_GGUF_I64] = true};
    switch (value->type) {
    case FKV_GGUF_F32:
    case FKV_GGUF_F64:
    case FKV_GGUF_BOOL:
    case FKV_GGUF_STRING:
    case FKV_GGUF_ARRAY: return false;
    default: break;
    }
    const unsigned bytes = TYPE_BYTES[value->type];
    *number = 0;
    memcpy(number, value->data, bytes); /* little-endian */
    *negative = is_signed[value->type] && (*number >> (8 * bytes - 1)) != 0;
    return true;
}

fkv_status fkv_gguf_get_u32(const fkv_gguf_values *values, const char *key, uint32_t *out) {
    const fkv_gguf_value *value = fkv_gguf_find(values, key);
    uint64_t number = 0;
    bool negative = false;
    if (value == NULL) return FKV_OK;
    if (!integer_value(value, &number, &negative)) return wrong_type(values, value, "an integer");
    FKV_REQUIRE(!negative && number <= UINT32_MAX, FKV_FILE_FORMAT, "%s: %s is negative or does not fit in 32 bits", values->path,
                key);
    *out = (uint32_t)number;
    return FKV_OK;
}

fkv_status fkv_gguf_get_f32(const fkv_gguf_values *values, const char *key, float *out) {
    const fkv_gguf_value *value = fkv_gguf_find(values, key);
    float number = 0;
    double wide = 0;
    if (value == NULL) return FKV_OK;
    if (value->type == FKV_GGUF_F32) {
        memcpy(&number, value->data, sizeof number);
    } else if (value->type == FKV_GGUF_F64) {
        memcpy(&wide, value->data, sizeof wide);
        number = (float)wide;
    } else {
        return wrong_type(values, value, "a float");
    }
    FKV_REQUIRE(isfinite(number), FKV_FILE_FORMAT, "%s: %s is not a finite number", values->path, key);
    *out = number;
    return FKV_OK;
}

fkv_status fkv_gguf_get_bool(const fkv_gguf_values *values, const char *key, bool *out) {
    const fkv_gguf_value *value = fkv_gguf_find(values, key);
    if (value == NULL) return FKV_OK;
    if (value->type != FKV_GGUF_BOOL) return wrong_type(values, value, "a bool");
    *out = value->data[0] != 0;
    return FKV_OK;
}

fkv_status fkv_gguf_get_string(const fkv_gguf_values *values, const char *key, fkv_bytes *out) {
    const fkv_gguf_value *value = fkv_gguf_find(values, key);
    if (value == NULL) return FKV_OK;
    if (value->type != FKV_GGUF_STRING) return wrong_type(values, value, "a string");
    fkv_gguf_reader reader = {.at = value->data, .end = values->end, .path = values->path};
    return fkv_gguf_take_string(&reader, out);
}

/* ---- arrays ---- */

/* Finds an array and checks its element type. *value is set to NULL if the array is missing or empty. */
static fkv_status find_array(const fkv_gguf_values *values, const char *key, fkv_gguf_type item, const char *wanted,
                             const fkv_gguf_value **value) {
    *value = fkv_gguf_find(values, key);
    if (*value == NULL) return FKV_OK;
    if ((*value)->type != FKV_GGUF_ARRAY || (*value)->item != item) return wrong_type(values, *value, wanted);
    FKV_REQUIRE((*value)->count <= MAX_ITEMS, FKV_UNSUPPORTED, "%s: %s has %llu elements, more than the limit of %d",
                values->path, key, (unsigned long long)(*value)->count, MAX_ITEMS);
    if ((*value)->count == 0) *value = NULL;
    return FKV_OK;
}

static fkv_status get_32bit_array(const fkv_gguf_values *values, const char *key, fkv_gguf_type item, const char *wanted,
                                  void **out, uint32_t *n) {
    const fkv_gguf_value *value = NULL;
    *out = NULL;
    *n = 0;
    FKV_TRY(find_array(values, key, item, wanted, &value));
    if (value == NULL) return FKV_OK;
    *out = malloc((size_t)value->count * 4);
    FKV_REQUIRE(*out != NULL, FKV_NO_MEMORY, "%s: out of memory reading %s", values->path, key);
    memcpy(*out, value->data, (size_t)value->count * 4);
    *n = (uint32_t)value->count;
    return FKV_OK;
}

fkv_status fkv_gguf_get_f32s(const fkv_gguf_values *values, const char *key, float **out, uint32_t *n) {
    void *words = NULL;
    FKV_TRY(get_32bit_array(values, key, FKV_GGUF_F32, "an array of f32", &words, n));
    *out = words;
    return FKV_OK;
}

fkv_status fkv_gguf_get_i32s(const fkv_gguf_values *values, const char *key, int32_t **out, uint32_t *n) {
    void *words = NULL;
    FKV_TRY(get_32bit_array(values, key, FKV_GGUF_I32, "an array of i32", &words, n));
    *out = words;
    return FKV_OK;
}

fkv_status fkv_gguf_get_strings(const fkv_gguf_values *values, const char *key, fkv_bytes **out, uint32_t *n) {
    const fkv_gguf_value *value = NULL;
    *out = NULL;
    *n = 0;
    FKV_TRY(find_array(values, key, FKV_GGUF_STRING, "an array of strings", &value));
    if (value == NULL) return FKV_OK;
    fkv_bytes *strings = malloc((size_t)value->count * sizeof *strings);
    FKV_REQUIRE(strings != NULL, FKV_NO_MEMORY, "%s: out of memory reading %s", values->path, key);
    fkv_gguf_reader reader = {.at = value->data, .end = values->end, .path = values->path};
    fkv_status status = FKV_OK;
    for (uint64_t i = 0; i < value->count && status == FKV_OK; i++) status = fkv_gguf_take_string(&reader, &strings[i]);
    if (status != FKV_OK) {
        free(strings);
        return status;
    }
    *out = strings;
    *n = (uint32_t)value->count;
    return FKV_OK;
}
