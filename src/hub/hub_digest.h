/* Digests of downloaded files: SHA-256 for large files, and the SHA-1 of git's blob format for small ones. Only SHA-256
 * protects against tampering, but the hub provides only SHA-1 digests of files that are stored in git.
 */
#ifndef FKV_HUB_DIGEST_H
#define FKV_HUB_DIGEST_H

#include "hub_listing.h"

typedef struct hub_digest hub_digest;

/* Starts computing the digest of a file: SHA-256 for a large file, git's SHA-1 otherwise. Never returns NULL. */
hub_digest *hub_digest_open(const hub_file *file);
void hub_digest_add(hub_digest *digest, const void *bytes, size_t n);

/* Writes the digest in hex and frees the digest state. */
void hub_digest_close(hub_digest *digest, char text[HUB_DIGEST]);

#endif
