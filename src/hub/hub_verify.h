/* Checks the digests of files that are already in the cache. */
#ifndef FKV_HUB_VERIFY_H
#define FKV_HUB_VERIFY_H

#include "hub_session.h"

/* Checks every complete file and removes files with a wrong digest, so that hub_download() downloads them again. Returns an
 * exit code. */
int hub_verify(const hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
               uint32_t n_files);

#endif
