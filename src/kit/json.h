/* One JSON object, written member by member, on one line. It is kept in memory and printed when it is whole, so that a program
 * that fails on the way prints none. Members stand in the order of the calls; a key is NULL inside arrays.
 */
#ifndef FKV_KIT_JSON_H
#define FKV_KIT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kit_json kit_json;

kit_json *kit_json_begin(void); /* opens the object; ends the program where there is no memory */

/* Closes what is open, prints all of it and a newline on standard output, and frees it. Returns an exit code, with a message on
 * failure. */
int kit_json_print(kit_json *json);

/* Frees it unprinted. */
void kit_json_drop(kit_json *json);

void kit_json_object(kit_json *json, const char *key);
void kit_json_array(kit_json *json, const char *key);
void kit_json_close(kit_json *json); /* the innermost object or array */

void kit_json_text(kit_json *json, const char *key, const char *text); /* what is not UTF-8 becomes U+FFFD */
void kit_json_bytes(kit_json *json, const char *key, const char *bytes, size_t n);
void kit_json_integer(kit_json *json, const char *key, uint64_t value);
void kit_json_real(kit_json *json, const char *key, double value); /* 9 digits; null where it is not finite */
void kit_json_bool(kit_json *json, const char *key, bool value);

#endif
