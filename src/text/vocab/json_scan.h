/* In-place scanner for large untrusted JSON files. Objects and arrays are traversed without building a tree, and only strings
 * with escapes are copied. For small values, the scanner only finds the start and the end; jansson then parses the value. */
#ifndef FKV_JSON_SCAN_H
#define FKV_JSON_SCAN_H

#include "../../base/base.h"
#include "../../base/printable.h"

typedef struct fkv_json_scan {
    const char *at, *end;
    const char *start; /* start of the file, for error messages */
    const char *path;
    char *copies; /* buffer for unescaped strings, as large as the file; NULL if strings with escapes are only skipped */
    size_t n_copies;
} fkv_json_scan;

/* Advances to the next element of an object (open is '{') or array (open is '['). is_first: true for the first call, which also
 * reads the opening bracket. If there is no further element, consumes the closing bracket and sets *more to false. Otherwise sets
 * *more to true; in an object, the caller must then read the key with fkv_json_scan_key(). */
fkv_status fkv_json_scan_next(fkv_json_scan *scan, char open, bool is_first, bool *more);

fkv_status fkv_json_scan_key(fkv_json_scan *scan, fkv_bytes *key); /* reads a key and the following colon */
fkv_status fkv_json_scan_string(fkv_json_scan *scan,
                                fkv_bytes *string); /* reads a string as unescaped UTF-8 that is not 0-terminated */
fkv_status fkv_json_scan_number(fkv_json_scan *scan, uint64_t *number); /* reads a non-negative integer below 10^18 */
fkv_status fkv_json_scan_skip(fkv_json_scan *scan,
                              fkv_bytes *span); /* skips a value of any type without validating its content */
char fkv_json_scan_peek(fkv_json_scan *scan);   /* returns the first character of the next value, or 0 at the end of the text */

/* Finds the members of an object with the given names. spans: [n_names] receives the text of each value; the data of a missing
 * member is NULL. Fails if a name occurs twice. */
fkv_status fkv_json_scan_members(fkv_json_scan *scan, const char *const *names, size_t n_names, fkv_bytes *spans);

/* Returns a scanner for part of the same file. Both scanners share the buffer for unescaped strings. */
fkv_json_scan fkv_json_scan_within(const fkv_json_scan *scan, fkv_bytes span);

#endif
