/* Layout of a repository's folder in the Hugging Face cache, which huggingface_hub, mlx-lm and llama.cpp share:
 *
 *   models--ORG--NAME/blobs/DIGEST              contents of a file
 *   models--ORG--NAME/snapshots/COMMIT/FILE     relative symbolic link to a blob
 *   models--ORG--NAME/refs/main                 COMMIT
 *   .locks/models--ORG--NAME/DIGEST.lock        locked (flock) while a program writes this blob
 *
 * A file appears in blobs only after its digest has been verified. Links and refs/main are written after all files of a model are
 * complete, so a reader never finds part of a model. Incomplete files have the suffix ".flatkv-part"; huggingface_hub ignores
 * them.
 */
#ifndef FKV_HUB_CACHE_H
#define FKV_HUB_CACHE_H

#include "hub_listing.h"
#include "hub_place.h"

typedef struct hub_cache {
    char folder[HUB_PATH]; /* models--ORG--NAME */
    char locks[HUB_PATH];  /* .locks/models--ORG--NAME */
    int lock;              /* descriptor of the lock file that prevents concurrent pulls of the repository; -1 if there is none */
} hub_cache;

/* Writes the path of a repository's snapshot: the folder of the commit in refs/main, or the parent folder of all snapshots if
 * refs/main is missing. Returns false if the repository is not in the cache. */
bool hub_cache_snapshot(const char *repo, char folder[HUB_PATH]);

/* Calls visit() with the name (org/name) of each model in the cache, in no particular order. */
void hub_cache_each(void (*visit)(const char *repo, void *user), void *user);

/* Creates the folders of a repository and waits until no other process is pulling it. `stop` is polled while waiting. Returns an
 * exit code. hub_cache_close() may be called even after a failure. */
int hub_cache_open(const char *repo, bool (*stop)(void), hub_cache *cache);
void hub_cache_close(hub_cache *cache);

/* Acquires the lock that huggingface_hub also uses while it writes a blob. Returns a descriptor, -1 if another program holds the
 * lock, or -2 if the file system does not support locks. */
int hub_cache_lock_blob(const hub_cache *cache, const hub_file *file);

/* Writes the path of a blob, with a suffix. Returns `path`. */
const char *hub_cache_blob(const hub_cache *cache, const hub_file *file, const char *suffix, char path[HUB_PATH]);

/* Returns whether the cache contains the complete blob of the file. */
bool hub_cache_has(const hub_cache *cache, const hub_file *file);

/* Checks that the file system has `bytes` bytes of free space. Returns an exit code. */
int hub_cache_check_space(const hub_cache *cache, uint64_t bytes);

/* Writes the links of a snapshot, then refs/REVISION unless the revision is a commit. Returns an exit code. */
int hub_cache_publish(const hub_cache *cache, const hub_listing *listing, const char *revision, const uint32_t *files,
                      uint32_t n_files);

/* Writes the path of a file in a snapshot. Returns `path`. */
const char *hub_cache_file(const hub_cache *cache, const hub_listing *listing, const hub_file *file, char path[HUB_PATH]);

#endif
