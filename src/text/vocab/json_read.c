/* See json_read.h. */
#include "json_read.h"

enum { MAX_JSON_BYTES = 16 << 20 };

fkv_status fkv_json_read(const char *text, size_t size, const char *path, json_t **root) {
    json_error_t error;
    FKV_REQUIRE(size <= MAX_JSON_BYTES, FKV_UNSUPPORTED, "the JSON text has %zu bytes; at most %d are supported (in %s)", size,
                MAX_JSON_BYTES, path);
    *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    FKV_REQUIRE(*root != NULL, FKV_FILE_FORMAT, "not valid JSON: %s (line %d): %s", error.text, error.line, path);
    if (json_is_object(*root)) return FKV_OK;
    json_decref(*root);
    *root = NULL;
    return fkv_fail(FKV_FILE_FORMAT, "the JSON text is not an object: %s", path);
}
