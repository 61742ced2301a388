/* The running process: its memory use, the path of its executable and the priority of its threads.
 *
 * Programs include only the public headers of flatkv, so they cannot use src/base, which contains the library's
 * platform-specific code. The platform-specific code of the programs is confined to this module.
 */
#ifndef FKV_KIT_PROCESS_H
#define FKV_KIT_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Current memory use of the process. Linux: anonymous pages and file-backed pages, counted exactly. macOS: the physical
 * footprint, which excludes clean file-backed pages; file_bytes is 0. */
typedef struct process_memory {
    uint64_t anonymous_bytes;
    uint64_t file_bytes;
} process_memory;

/* Reads the current memory use without allocating. Returns false and zeroes *now if the system does not report it. */
bool process_memory_now(process_memory *now);

/* Returns the peak resident size (anonymous and file-backed pages together), or 0 if the system does not record it. */
uint64_t process_memory_peak(void);

/* Writes the path of the running executable. Returns false if the system does not report it or `capacity` is too small. */
bool process_program_path(char *path, size_t capacity);

/* Lowers the scheduling priority of the calling thread. Other threads of the process then run first if all cores are busy. */
void process_lower_thread_priority(void);

#endif
