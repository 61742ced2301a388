/* Escapes untrusted text for messages and terminals. fkv_fail() escapes every message, so its callers need not escape their
 * arguments. Text that is stored for later use, such as a model's name, is escaped when it is read from the file.
 *
 * Valid UTF-8 passes through unchanged. Control characters (C0, DEL, C1), line and paragraph separators, bidirectional formatting
 * characters and bytes that are not UTF-8 are replaced with \xNN escapes, one per byte. Escaping is idempotent.
 */
#ifndef FKV_PRINTABLE_H
#define FKV_PRINTABLE_H

#include "base.h"

#include <stdbool.h>
#include <stddef.h>

/* Arbitrary bytes, not null-terminated. */
typedef struct fkv_bytes {
    const char *data;
    size_t size;
} fkv_bytes;

typedef struct fkv_printable {
    char text[96];
} fkv_printable;

/* Return the escaped text. Text that does not fit is truncated at a character boundary and ends in "...". */
FKV_INTERNAL fkv_printable fkv_show(fkv_bytes bytes);
FKV_INTERNAL fkv_printable fkv_show_text(const char *text);

/* Writes the escaped and null-terminated text to out: [capacity], capacity >= 8. Truncates like fkv_show(). */
FKV_INTERNAL void fkv_show_into(fkv_bytes bytes, char *out, size_t capacity);

/* Returns whether the text is non-empty printable ASCII without spaces, like the names of tensors and architectures. */
FKV_INTERNAL bool fkv_is_plain(fkv_bytes text);

#endif
