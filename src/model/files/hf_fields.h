/* Reads fields of a config.json. The functions leave *out unchanged if the key is missing or null. path is used in messages only.
 */
#ifndef FKV_HF_FIELDS_H
#define FKV_HF_FIELDS_H

#include "../../base/printable.h"
#include "../../text/vocab/json_read.h"

#include <math.h>

FKV_INLINE const json_t *get_field(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

FKV_INLINE fkv_status get_u32(const json_t *object, const char *key, const char *path, uint32_t *out) {
    const json_t *value = get_field(object, key);
    if (value == NULL) return FKV_OK;
    const json_int_t number = json_integer_value(value);
    FKV_REQUIRE(json_is_integer(value) && number >= 0 && number <= UINT32_MAX, FKV_FILE_FORMAT,
                "%s: %s must be an integer from 0 to 2^32 - 1", path, key);
    *out = (uint32_t)number;
    return FKV_OK;
}

FKV_INLINE fkv_status get_f32(const json_t *object, const char *key, const char *path, float *out) {
    const json_t *value = get_field(object, key);
    if (value == NULL) return FKV_OK;
    const float number = (float)json_number_value(value);
    FKV_REQUIRE(json_is_number(value) && isfinite(number) && number >= 0, FKV_FILE_FORMAT,
                "%s: %s must be a finite number of at least 0", path, key);
    *out = number;
    return FKV_OK;
}

FKV_INLINE fkv_status get_bool(const json_t *object, const char *key, const char *path, bool *out) {
    const json_t *value = get_field(object, key);
    if (value == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_boolean(value), FKV_FILE_FORMAT, "%s: %s must be true or false", path, key);
    *out = json_is_true(value);
    return FKV_OK;
}

FKV_INLINE fkv_status get_text(const json_t *object, const char *key, const char *path, const char **out) {
    const json_t *value = get_field(object, key);
    if (value == NULL) return FKV_OK;
    FKV_REQUIRE(json_is_string(value), FKV_FILE_FORMAT, "%s: %s must be a string", path, key);
    *out = json_string_value(value);
    return FKV_OK;
}

#endif
