/* JSON of tens of megabytes, read where it lies: objects and arrays are walked, strings without escapes are not copied. What is
 * small goes to jansson by its span. Nothing is taken from the bytes before it was checked.
 */
#ifndef FKV_JSON_SCAN_H
#define FKV_JSON_SCAN_H

#include "../../base/base.h"
#include "../../base/shown.h"

typedef struct fkv_json_scan {
    const char *at, *end;
    const char *start; /* of the file, for messages */
    const char *path;
    char *copies; /* where strings with escapes go: as long as the file, or NULL: they are only walked over */
    size_t n_copies;
} fkv_json_scan;

/* Steps into an object or array, or over its commas. *more is false behind the last one, which is then passed. is_first: nothing
 * of it was read yet. For objects, the key comes next, with fkv_json_scan_key(). */
fkv_status fkv_json_scan_next(fkv_json_scan *scan, char open, bool is_first, bool *more);

fkv_status fkv_json_scan_key(fkv_json_scan *scan, fkv_bytes *key);       /* and the colon */
fkv_status fkv_json_scan_string(fkv_json_scan *scan, fkv_bytes *string); /* UTF-8 with escapes resolved; not 0-terminated */
fkv_status fkv_json_scan_number(fkv_json_scan *scan, uint64_t *number);  /* a whole one from 0 on, below 2^63 */
fkv_status fkv_json_scan_skip(fkv_json_scan *scan, fkv_bytes *span);     /* any value; what is inside is not checked */
char fkv_json_scan_peek(fkv_json_scan *scan);                            /* the first character of the next value; 0: none */

/* The spans of an object's members by name; one that is not there has no data. A name of the list that comes twice is refused. */
fkv_status fkv_json_scan_members(fkv_json_scan *scan, const char *const *names, size_t n_names, fkv_bytes *spans);

/* A scan of a span of the same file. Copies are the other's. */
fkv_json_scan fkv_json_scan_within(const fkv_json_scan *scan, fkv_bytes span);

#endif
