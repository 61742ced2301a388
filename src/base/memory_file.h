/* A file that is in memory only. */
#ifndef FKV_MEMORY_FILE_H
#define FKV_MEMORY_FILE_H

#include "base.h"

/* The descriptor of a file that holds this text, closed on exec; -1 where the system has no such files. */
FKV_SEAM int fkv_memory_file(const char *text);

#endif
