/* A session contains the address of a hub, the access token and limits. Its functions list repositories, read small files into
 * memory and download models. They need libcurl; in a build without libcurl, they fail with a message (hub_none.c). */
#ifndef FKV_HUB_SESSION_H
#define FKV_HUB_SESSION_H

#include "hub_cache.h"

typedef struct hub_session {
    char endpoint[HUB_ENDPOINT]; /* address of the hub, without a trailing slash */
    char token[HUB_TOKEN];       /* access token, sent only to the endpoint's host and port; "" if there is none */
    char token_source[HUB_PATH];
    const char *revision; /* branch, tag or commit to list; see hub_revision_is_valid() */
    long stall_seconds;   /* a transfer fails if it receives no data for this number of seconds */
    uint32_t n_tries;     /* maximum number of consecutive attempts without progress for each request */
    bool (*stop)(void);   /* polled callback; if it returns true, the operation ends with EXIT_INTERRUPTED */
    void *connection;     /* of hub_fetch.c */
} hub_session;

/* Bytes read into memory. The caller releases them with free(). */
typedef struct hub_bytes {
    char *bytes;
    size_t n;
} hub_bytes;

/* Opens a session with settings from environment variables. Does not connect to the hub. Returns an exit code.
 * hub_session_close() may be called even after a failure. */
int hub_session_open(hub_session *session, bool (*stop)(void));
void hub_session_close(hub_session *session);

/* Reads the listing of a repository at session->revision. Returns an exit code. Error messages about missing, gated and renamed
 * models explain what the user can do. The caller frees the listing. */
int hub_get_listing(hub_session *session, const char *repo, hub_listing *listing);

/* Reads `n` bytes of a file, starting at offset `from`, or fewer if the file ends earlier. Returns an exit code. */
int hub_get_bytes(hub_session *session, const hub_listing *listing, const hub_file *file, uint64_t from, uint64_t n,
                  hub_bytes *out);

/* Downloads the files of a listing that the cache lacks, with up to n_connections transfers at once, and verifies their digests.
 * Resumes interrupted downloads. Prints progress to standard error. Returns an exit code. Does not create the links of a
 * snapshot. */
int hub_download(hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
                 uint32_t n_files, uint32_t n_connections);

/* Returns the number of bytes that hub_download() would have to fetch. */
uint64_t hub_missing_bytes(const hub_cache *cache, const hub_listing *listing, const uint32_t *files, uint32_t n_files);

#endif
