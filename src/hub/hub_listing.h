/* Parses the list of files in a model repository, which the hub's API returns (GET
 * /api/models/ORG/NAME/revision/main?blobs=true).
 *
 * The response is untrusted. A listing that hub_listing_parse() accepts contains each file only once. All file names are safe
 * relative paths, all digests are well-formed, and all sizes are bounded.
 */
#ifndef FKV_HUB_LISTING_H
#define FKV_HUB_LISTING_H

#include "hub_name.h"

#include <stdint.h>

enum { HUB_COMMIT = 41, HUB_DIGEST = 65, HUB_MAX_FILES = 32768, HUB_MAX_LISTING_BYTES = 8 << 20, HUB_ERROR = 512 };

#define HUB_MAX_FILE_BYTES ((uint64_t)1 << 50)

typedef struct hub_file {
    char *path;          /* path of the file in the repository */
    uint64_t bytes;      /* size */
    char id[HUB_DIGEST]; /* name of the blob in the cache, in hex: the SHA-256 of a large file, or git's SHA-1 of a small file */
    bool is_large;       /* true if the file is stored outside of git (LFS or Xet), so that its id is a SHA-256 */
} hub_file;

typedef struct hub_listing {
    char repo[HUB_REPO];     /* name of the repository in the response; differs from the requested name after a rename */
    char commit[HUB_COMMIT]; /* commit of the listed revision, in hex */
    bool is_gated;           /* true if users must accept the model's conditions before they can read the files */
    hub_file *files;         /* sorted by path */
    uint32_t n_files;
} hub_listing;

/* Parses a response of the API. On failure, returns false and writes the reason to `error`; the listing is then empty. The caller
 * frees the listing with hub_listing_free(). */
bool hub_listing_parse(const char *json, size_t n_bytes, hub_listing *listing, char error[HUB_ERROR]);

/* Returns the file with this path, or NULL if there is none. */
const hub_file *hub_listing_find(const hub_listing *listing, const char *path);

void hub_listing_free(hub_listing *listing);

#endif
