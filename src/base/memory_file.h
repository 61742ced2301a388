/* Files that exist only in memory. */
#ifndef FKV_MEMORY_FILE_H
#define FKV_MEMORY_FILE_H

#include "base.h"

/* Creates a memory file that contains the text. Returns a file descriptor with the close-on-exec flag set, or -1 if the system
 * does not support memory files. */
FKV_INTERNAL int fkv_memory_file(const char *text);

#endif
