/* See hub_listing.h. */
#include "hub_listing.h"

#include "../kit/program.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Copies a digest of n lowercase hex digits. Returns false if the value does not have this form. */
static bool copy_digest(const json_t *value, size_t n, char *digest) {
    const char *text = json_string_value(value);
    if (text == NULL || strlen(text) != n || strspn(text, "0123456789abcdef") != n) return false;
    memcpy(digest, text, n + 1);
    return true;
}

static bool copy_size(const json_t *value, uint64_t *bytes) {
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *bytes = (uint64_t)json_integer_value(value);
    return *bytes <= HUB_MAX_FILE_BYTES;
}

/* Reads one entry of the array "siblings", which lists the files. Returns false and writes the reason to `error` if the entry is
 * invalid. */
static bool parse_file(const json_t *entry, hub_file *file, char error[HUB_ERROR]) {
    enum { SHA1_DIGITS = 40, SHA256_DIGITS = 64 };
    const char *path = json_string_value(json_object_get(entry, "rfilename"));
    const json_t *lfs = json_object_get(entry, "lfs");
    if (path == NULL) {
        (void)snprintf(error, HUB_ERROR, "an entry of \"siblings\" has no file name");
        return false;
    }
    if (!hub_file_name_is_safe(path)) {
        (void)snprintf(error, HUB_ERROR, "the file name \"%.200s\" is not safe: it could lead outside of the model's folder",
                       path);
        return false;
    }
    file->is_large = json_is_object(lfs);
    bool good = file->is_large ? copy_digest(json_object_get(lfs, "sha256"), SHA256_DIGITS, file->id) &&
                                     copy_size(json_object_get(lfs, "size"), &file->bytes)
                               : copy_digest(json_object_get(entry, "blobId"), SHA1_DIGITS, file->id) &&
                                     copy_size(json_object_get(entry, "size"), &file->bytes);
    if (!good) {
        (void)snprintf(error, HUB_ERROR, "the entry for \"%.200s\" has no valid size and digest", path);
        return false;
    }
    size_t n = strlen(path) + 1;
    file->path = memcpy(kit_alloc(n), path, n);
    return true;
}

static int by_file_path(const void *a, const void *b) { return strcmp(((const hub_file *)a)->path, ((const hub_file *)b)->path); }

static bool parse_files(const json_t *entries, hub_listing *listing, char error[HUB_ERROR]) {
    size_t n = json_array_size(entries);
    if (n > HUB_MAX_FILES) {
        (void)snprintf(error, HUB_ERROR, "the repository has %zu files; at most %d are supported", n, HUB_MAX_FILES);
        return false;
    }
    listing->files = kit_alloc(n * sizeof *listing->files);
    for (size_t i = 0; i < n; i++) {
        if (!parse_file(json_array_get(entries, i), &listing->files[listing->n_files], error)) return false;
        listing->n_files++;
    }
    qsort(listing->files, n, sizeof *listing->files, by_file_path);
    for (size_t i = 1; i < n; i++) {
        if (strcmp(listing->files[i - 1].path, listing->files[i].path) != 0) continue;
        (void)snprintf(error, HUB_ERROR, "the file \"%.200s\" is listed twice", listing->files[i].path);
        return false;
    }
    return true;
}

static bool parse_root(const json_t *root, hub_listing *listing, char error[HUB_ERROR]) {
    const char *id = json_string_value(json_object_get(root, "id"));
    const json_t *gated = json_object_get(root, "gated");
    const json_t *siblings = json_object_get(root, "siblings");
    hub_name name;
    if (id == NULL || !hub_name_parse(id, &name) || name.quant[0] != 0) {
        (void)snprintf(error, HUB_ERROR, "the response has no valid model name (\"id\")");
        return false;
    }
    if (!copy_digest(json_object_get(root, "sha"), HUB_COMMIT - 1, listing->commit)) {
        (void)snprintf(error, HUB_ERROR, "the response has no valid commit (\"sha\")");
        return false;
    }
    if (!json_is_array(siblings)) {
        (void)snprintf(error, HUB_ERROR, "the response has no list of files (\"siblings\")");
        return false;
    }
    memcpy(listing->repo, name.repo, sizeof listing->repo);
    listing->is_gated = json_is_true(gated) || json_is_string(gated);
    return parse_files(siblings, listing, error);
}

bool hub_listing_parse(const char *json, size_t n_bytes, hub_listing *listing, char error[HUB_ERROR]) {
    json_error_t problem;
    *listing = (hub_listing){0};
    json_t *root = n_bytes <= HUB_MAX_LISTING_BYTES ? json_loadb(json, n_bytes, 0, &problem) : NULL;
    if (root == NULL) {
        if (n_bytes > HUB_MAX_LISTING_BYTES)
            (void)snprintf(error, HUB_ERROR, "the response has more than %d bytes", HUB_MAX_LISTING_BYTES);
        else
            (void)snprintf(error, HUB_ERROR, "the response is not JSON: %.200s", problem.text);
        return false;
    }
    bool good = parse_root(root, listing, error);
    json_decref(root);
    if (!good) hub_listing_free(listing);
    return good;
}

static int find_by_path(const void *path, const void *file) { return strcmp(path, ((const hub_file *)file)->path); }

const hub_file *hub_listing_find(const hub_listing *listing, const char *path) {
    if (listing->n_files == 0) return NULL;
    return bsearch(path, listing->files, listing->n_files, sizeof *listing->files, find_by_path);
}

void hub_listing_free(hub_listing *listing) {
    for (uint32_t i = 0; i < listing->n_files; i++) free(listing->files[i].path);
    free(listing->files);
    *listing = (hub_listing){0};
}
