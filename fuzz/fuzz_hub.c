/* Fuzzes the parsers of data from a hub. The first byte selects file listings or GGUF headers. Every accepted listing must
 * contain only safe file names and well-formed digests, and every variant must refer to files of the listing. */
#include "../src/hub/gguf_header.h"
#include "../src/hub/hub_variants.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_listing(const hub_listing *listing) {
    hub_name name;
    if (strlen(listing->commit) != HUB_COMMIT - 1 || !hub_name_parse(listing->repo, &name)) abort();
    for (uint32_t i = 0; i < listing->n_files; i++) {
        const hub_file *file = &listing->files[i];
        size_t digits = file->is_large ? 64 : 40;
        if (!hub_file_name_is_safe(file->path) || strlen(file->id) != digits || strspn(file->id, "0123456789abcdef") != digits)
            abort();
        if (file->bytes > HUB_MAX_FILE_BYTES || hub_listing_find(listing, file->path) != file) abort();
    }
}

static void check_variants(const hub_listing *listing) {
    hub_variants found;
    hub_variants_find(listing, &found);
    for (uint32_t i = 0; i < found.n; i++) {
        const hub_variant *v = &found.variants[i];
        uint64_t bytes = 0;
        if (v->n_files == 0 || v->weight_bytes > v->total_bytes || (v->label[0] == 0) != v->is_folder) abort();
        for (uint32_t k = 0; k < v->n_files; k++) bytes += listing->files[v->files[k]].bytes;
        if (bytes != v->total_bytes) abort();
    }
    hub_variants_free(&found);
}

static void feed_listing(const uint8_t *data, size_t size) {
    hub_listing listing;
    char error[HUB_ERROR] = "";
    if (hub_listing_parse((const char *)data, size, &listing, error)) {
        check_listing(&listing);
        check_variants(&listing);
    } else if (error[0] == 0 || listing.files != NULL || listing.n_files != 0) {
        abort();
    }
    hub_listing_free(&listing);
}

static void feed_header(const uint8_t *data, size_t size) {
    size_t end = 0;
    size_t again = 0;
    if (gguf_header_end(data, size, &end) != GGUF_HEADER_COMPLETE) return;
    if (end > size || gguf_header_end(data, end, &again) != GGUF_HEADER_COMPLETE || again != end) abort();
    if (end > 0 && gguf_header_end(data, end - 1, &again) != GGUF_HEADER_TRUNCATED) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    if (data[0] % 2 == 0)
        feed_listing(data + 1, size - 1);
    else
        feed_header(data + 1, size - 1);
    return 0;
}
