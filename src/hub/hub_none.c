/* Replaces hub_fetch.c, hub_request.c, hub_download.c and hub_verify.c in a build without libcurl. Downloads fail with an error
 * message. Models that are already in the cache can still be used. */
#include "hub_session.h"
#include "hub_verify.h"

#include "../kit/program.h"

int hub_session_open(hub_session *session, bool (*stop)(void)) {
    *session = (hub_session){.stop = stop, .revision = "main"};
    return kit_fail(EXIT_FAILED,
                    "this flatkv was built without libcurl and cannot download models: install libcurl 7.85 or later "
                    "with its headers (or run scripts/setup) and build flatkv again");
}

void hub_session_close(hub_session *session) { (void)session; }

int hub_get_listing(hub_session *session, const char *repo, hub_listing *listing) {
    (void)session, (void)repo, (void)listing;
    return EXIT_FAILED;
}

int hub_get_bytes(hub_session *session, const hub_listing *listing, const hub_file *file, uint64_t from, uint64_t n,
                  hub_bytes *out) {
    (void)session, (void)listing, (void)file, (void)from, (void)n, (void)out;
    return EXIT_FAILED;
}

int hub_download(hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
                 uint32_t n_files, uint32_t n_connections) {
    (void)session, (void)cache, (void)listing, (void)files, (void)n_files, (void)n_connections;
    return EXIT_FAILED;
}

uint64_t hub_missing_bytes(const hub_cache *cache, const hub_listing *listing, const uint32_t *files, uint32_t n_files) {
    (void)cache, (void)listing, (void)files, (void)n_files;
    return 0;
}

int hub_verify(const hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
               uint32_t n_files) {
    (void)session, (void)cache, (void)listing, (void)files, (void)n_files;
    return EXIT_FAILED;
}
