/* What a program asks of the system about itself: what it occupies, and where it lies.
 *
 * Programs see the public headers of flatkv only, so src/base, where operating system switches live for the library, is out of
 * their reach: theirs are here.
 */
#ifndef FKV_KIT_PROCESS_H
#define FKV_KIT_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the process holds in memory now. Linux: anonymous pages, counted page by page, and file pages apart. macOS: the physical
 * footprint, which leaves clean file pages out, and no figure for those. */
typedef struct process_memory {
    uint64_t anonymous_bytes;
    uint64_t file_bytes;
} process_memory;

/* False where the system does not say; *now is then 0. Takes no memory. */
bool process_memory_now(process_memory *now);

/* The most that anonymous and file pages together ever were, as the system kept it; 0 where it does not say. */
uint64_t process_memory_peak(void);

/* The file the running program was started from. False where the system does not say or `capacity` is too small. */
bool process_program_path(char *path, size_t capacity);

#endif
