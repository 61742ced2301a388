/* Parses small untrusted JSON files with jansson. */
#ifndef FKV_JSON_READ_H
#define FKV_JSON_READ_H

#include "../../base/base.h"

#include <jansson.h>

/* Parses a JSON object without duplicate keys. Returns FKV_UNSUPPORTED if the text exceeds 16 MiB, because parsed JSON takes
 * several times the memory of its text. Returns FKV_FILE_FORMAT if the text is not a JSON object or has duplicate keys. The
 * caller releases *root with json_decref(). path is used in error messages. */
fkv_status fkv_json_read(const char *text, size_t size, const char *path, json_t **root);

#endif
