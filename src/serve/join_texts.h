/* Concatenates JSON strings for the request parsers. */
#ifndef FKV_JOIN_TEXTS_H
#define FKV_JOIN_TEXTS_H

#include <jansson.h>

/* Concatenates an array of strings in linear time. Returns NULL if out of memory. */
json_t *join_texts(const json_t *texts, const char *separator);

#endif
