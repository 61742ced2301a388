/* A file that is being downloaded in parts. It is stored in the same cache folder as the final file. A state file records the
 * number of complete bytes of each part, so that an interrupted download can be resumed. The digest is computed over the
 * contiguous bytes at the start of the file while later parts are still arriving.
 *
 * Invariants: from <= at <= until in every part; the parts cover the file in order; `hashed` is at most the number of contiguous
 * bytes at the start of the file.
 */
#ifndef FKV_HUB_PARTIAL_FILE_H
#define FKV_HUB_PARTIAL_FILE_H

#include "hub_cache.h"
#include "hub_digest.h"

typedef struct file_part {
    uint64_t from;
    uint64_t until;
    uint64_t at; /* bytes [from, at) have been received */
} file_part;

typedef struct partial_file {
    const hub_cache *cache;
    const hub_file *file;
    int fd;   /* -1: closed */
    int lock; /* descriptor of the blob's lock file; negative if there is none */
    file_part *parts;
    uint32_t n_parts;
    hub_digest *digest;
    uint64_t hashed; /* number of bytes added to the digest */
    double saved;    /* kit_seconds() when the state was last saved */
} partial_file;

enum { PARTIAL_PART_BYTES = 32 << 20 };

/* Opens or creates the file and restores its state. Returns an exit code. partial_file_close() may be called even after a
 * failure. */
int partial_file_open(partial_file *p, const hub_cache *cache, const hub_file *file);

/* Discards all data and divides the file into parts of part_bytes bytes, or into one part if part_bytes is 0. Returns an exit
 * code. */
int partial_file_restart(partial_file *p, uint64_t part_bytes);

/* Writes the next bytes of a part. Returns false and sets errno if the bytes cannot be written. */
bool partial_file_write(partial_file *p, uint32_t part, const char *bytes, size_t n);

uint64_t partial_file_done(const partial_file *p); /* number of complete bytes */

/* Adds up to 16 MiB of received data to the digest. Sets *pending if more received data must be hashed. Returns an exit code. */
int partial_file_hash(partial_file *p, bool *pending);

/* Saves the state if the last save was more than a second ago, or at once if `now` is set. Errors are ignored, because without
 * the state a later download is only slower. */
void partial_file_save(partial_file *p, bool now);

/* Compares the digest of a completely hashed file with the expected digest and sets *matches. If the digests are equal, renames
 * the file to its final path. Otherwise, the file remains open, and its contents must be discarded. Returns an exit code. */
int partial_file_finish(partial_file *p, bool *matches);

/* Saves the state and closes the file. */
void partial_file_close(partial_file *p);

/* Returns the number of bytes that an earlier, interrupted download of the file left on disk. */
uint64_t partial_file_stored(const hub_cache *cache, const hub_file *file);

#endif
