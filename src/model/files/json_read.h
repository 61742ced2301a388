/* JSON from untrusted files. */
#ifndef FKV_JSON_READ_H
#define FKV_JSON_READ_H

#include "../../base/base.h"

#include <jansson.h>

/* Objects only, no key twice, at most 16 MiB: parsed JSON takes many times its text. The caller gives it back with json_decref().
 * path: for messages. */
fkv_status fkv_json_read(const char *text, size_t size, const char *path, json_t **root);

#endif
