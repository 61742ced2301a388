/* See json_read.h. */
#include "json_read.h"

enum { MAX_JSON_BYTES = 16 << 20 };

fkv_status fkv_json_read(const char *text, size_t size, const char *path, json_t **root) {
    json_error_t error;
    FKV_REQUIRE(size <= MAX_JSON_BYTES, FKV_UNSUPPORTED, "%s: the JSON text is %zu bytes long; at most %d are supported", path,
                size, MAX_JSON_BYTES);
    *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    FKV_REQUIRE(*root != NULL, FKV_FILE_FORMAT, "%s: not valid JSON: %s (line %d)", path, error.text, error.line);
    if (json_is_object(*root)) return FKV_OK;
    json_decref(*root);
    *root = NULL;
    return fkv_fail(FKV_FILE_FORMAT, "%s: the JSON text is not an object", path);
}
