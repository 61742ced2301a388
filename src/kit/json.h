/* Writer for one JSON object on one line.
 *
 * The object is built in memory and printed only when it is complete, so a program that fails halfway prints no partial JSON.
 * Members appear in the order in which they are added. Inside arrays, the key must be NULL.
 */
#ifndef FKV_KIT_JSON_H
#define FKV_KIT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kit_json kit_json;

/* Opens the top-level object. Exits the program if memory is exhausted. */
kit_json *kit_json_begin(void);

/* Closes all open objects and arrays, prints the JSON and a newline to standard output, and frees the writer. Returns an exit
 * code; on failure the error has been printed. */
int kit_json_print(kit_json *json);

/* Frees the writer without printing. */
void kit_json_free(kit_json *json);

void kit_json_object(kit_json *json, const char *key);
void kit_json_array(kit_json *json, const char *key);
void kit_json_close(kit_json *json); /* closes the innermost object or array that is open */

/* Write strings. Invalid UTF-8 becomes U+FFFD. Control characters, bidirectional controls and line separators are \u-escaped, so
 * that the output is safe to show on a terminal. */
void kit_json_text(kit_json *json, const char *key, const char *text);
void kit_json_bytes(kit_json *json, const char *key, const char *bytes, size_t n);
void kit_json_integer(kit_json *json, const char *key, uint64_t value);
void kit_json_real(kit_json *json, const char *key,
                   double value); /* writes 9 significant digits, or null for a non-finite value */
void kit_json_bool(kit_json *json, const char *key, bool value);

#endif
