/* See hub_verify.h. */
#include "hub_verify.h"

#include "../kit/program.h"
#include "hub_digest.h"
#include "hub_progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns whether the digest of a complete blob matches its name. */
static bool blob_matches(const hub_cache *cache, const hub_file *file, const hub_session *session) {
    enum { BUFFER = 1 << 20 };
    char path[HUB_PATH];
    char text[HUB_DIGEST] = "";
    FILE *blob = fopen(hub_cache_blob(cache, file, "", path), "r");
    if (blob == NULL) return false;
    char *buffer = kit_alloc(BUFFER);
    hub_digest *digest = hub_digest_open(file);
    while (!session->stop() && feof(blob) == 0 && ferror(blob) == 0)
        hub_digest_add(digest, buffer, fread(buffer, 1, BUFFER, blob));
    hub_digest_close(digest, text);
    free(buffer);
    (void)fclose(blob);
    return strcmp(text, file->id) == 0;
}

int hub_verify(const hub_session *session, const hub_cache *cache, const hub_listing *listing, const uint32_t *files,
               uint32_t n_files) {
    for (uint32_t i = 0; i < n_files; i++) {
        const hub_file *file = &listing->files[files[i]];
        char path[HUB_PATH];
        if (!hub_cache_has(cache, file)) continue;
        bool matches = blob_matches(cache, file, session);
        if (session->stop()) return EXIT_INTERRUPTED;
        if (matches) continue;
        hub_note("the checksum of %s is wrong: downloading it again", file->path);
        if (unlink(hub_cache_blob(cache, file, "", path)) != 0)
            return kit_fail(EXIT_FAILED, "cannot remove the damaged file %s", path);
    }
    return EXIT_GOOD;
}
