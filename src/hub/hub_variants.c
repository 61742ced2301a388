/* See hub_variants.h. */
#include "hub_variants.h"

#include "../kit/program.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    MAX_SMALL_BYTES = 256 << 20, /* maximum size of a configuration or vocabulary file, in bytes */
    MAX_VARIANTS = 512           /* maximum number of GGUF models in a repository; any further models are ignored */
};

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text);
    size_t n_end = strlen(end);
    return n >= n_end && strcasecmp(text + n - n_end, end) == 0;
}

static bool starts_with(const char *text, const char *start) { return strncasecmp(text, start, strlen(start)) == 0; }

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* ---- names of GGUF files ---- */

/* Parses the part number and the number of parts in a name that ends with "-00001-of-00005.gguf" or
 * "-00001-of-00005.safetensors". Returns the position of the suffix "-00001-of-...", or NULL if the name has no such suffix. */
static const char *split_suffix(const char *path, unsigned *part, unsigned *n_parts) {
    enum { DIGITS = 5, SUFFIX = 1 + DIGITS + 4 + DIGITS }; /* "-", digits, "-of-", digits */
    const char *end = strrchr(path, '.');
    if (end == NULL || end - path <= SUFFIX) return NULL;
    const char *at = end - SUFFIX;
    if (at[0] != '-' || strspn(at + 1, "0123456789") != DIGITS || strncmp(at + 1 + DIGITS, "-of-", 4) != 0 ||
        strspn(at + DIGITS + 5, "0123456789") != DIGITS)
        return NULL;
    *part = (unsigned)strtoul(at + 1, NULL, 10);
    *n_parts = (unsigned)strtoul(at + DIGITS + 5, NULL, 10);
    return at;
}

/* Returns the length of the path without ".gguf" and without the part suffix. */
static size_t stem_length(const char *path) {
    unsigned part = 0;
    unsigned n_parts = 0;
    const char *split = split_suffix(path, &part, &n_parts);
    return split != NULL ? (size_t)(split - path) : strlen(path) - strlen(".gguf");
}

/* Returns the length of the quantization name that starts at `text`, or 0 if there is none. */
static size_t quant_length(const char *text, size_t n) {
    static const char *const plain[] = {"BF16", "F16", "FP16", "F32", "FP32", "MXFP4", "NVFP4"};
    size_t length = 0;
    while (length < n && (isalnum((unsigned char)text[length]) != 0 || text[length] == '_')) length++;
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        size_t n_plain = strlen(plain[i]);
        if (length >= n_plain && starts_with(text, plain[i]) && (length == n_plain || text[n_plain] == '_')) return length;
    }
    size_t digit = starts_with(text, "IQ") || starts_with(text, "TQ") ? 2 : starts_with(text, "Q") ? 1 : 0;
    bool good = digit > 0 && length > digit && text[digit] >= '1' && text[digit] <= '8' &&
                (length == digit + 1 || text[digit + 1] == '_');
    return good ? length : 0;
}

/* Finds the last quantization name, such as Q4_K_M, in the first n bytes of a file name. */
static bool find_quant(const char *text, size_t n, char label[HUB_QUANT]) {
    bool found = false;
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && strchr("-._ ", text[i - 1]) == NULL) continue;
        size_t length = quant_length(text + i, n - i);
        if (length == 0 || length + 4 > HUB_QUANT) continue;
        bool dynamic =
            i >= 3 && starts_with(text + i - 3, "UD-"); /* prefix of quantizations with mixed types, as in UD-Q4_K_XL */
        (void)snprintf(label, HUB_QUANT, "%s%.*s", dynamic ? "UD-" : "", (int)length, text + i);
        found = true;
    }
    for (char *p = label; found && *p != 0; p++) *p = (char)toupper((unsigned char)*p);
    return found;
}

bool hub_quant_of(const char *path, char label[HUB_QUANT]) {
    if (!ends_with(path, ".gguf")) return false;
    const char *name = base_name(path);
    if (find_quant(name, stem_length(path) - (size_t)(name - path), label)) return true;
    if (name == path) return false;
    const char *folder = name - 1; /* the folder name may be the quantization, as in Q4_K_M/model.gguf */
    while (folder > path && folder[-1] != '/') folder--;
    return find_quant(folder, (size_t)(name - 1 - folder), label);
}

bool hub_is_gguf_model(const char *path) {
    static const char *const others[] = {"mmproj", "imatrix", "lora", "adapter", "vocab", "ggml-vocab"};
    const char *name = base_name(path);
    if (!ends_with(name, ".gguf")) return false;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (starts_with(name, others[i])) return false;
    return strcasestr(name, "mmproj") == NULL && strcasestr(name, "imatrix") == NULL;
}

/* ---- variants ---- */

static hub_variant *add_variant(hub_variants *found) {
    found->variants = kit_realloc(found->variants, (found->n + 1) * sizeof *found->variants);
    found->variants[found->n] = (hub_variant){0};
    return &found->variants[found->n++];
}

static void add_file(hub_variant *variant, const hub_listing *listing, uint32_t index, bool is_weight) {
    variant->files = kit_realloc(variant->files, (variant->n_files + 1) * sizeof *variant->files);
    variant->files[variant->n_files++] = index;
    variant->total_bytes += listing->files[index].bytes;
    if (is_weight) variant->weight_bytes += listing->files[index].bytes;
}

/* Returns whether the files of a variant are the parts 1 to n of a split model, or a single file. The files are sorted by part
 * number, because the listing is sorted by path. */
static bool parts_are_complete(const hub_listing *listing, const hub_variant *variant) {
    unsigned part = 0;
    unsigned n_parts = 0;
    for (uint32_t i = 0; i < variant->n_files; i++) {
        if (split_suffix(listing->files[variant->files[i]].path, &part, &n_parts) == NULL) return variant->n_files == 1;
        if (part != i + 1 || n_parts != variant->n_files) return false;
    }
    return true;
}

static void label_by_name(const char *path, hub_variant *variant) {
    const char *name = base_name(path);
    (void)snprintf(variant->label, sizeof variant->label, "%.*s", (int)(stem_length(path) - (size_t)(name - path)), name);
}

static void label_gguf(const char *path, hub_variant *variant) {
    if (!hub_quant_of(path, variant->label)) label_by_name(path, variant);
    variant->is_wide = starts_with(variant->label, "BF16") || starts_with(variant->label, "F16") ||
                       starts_with(variant->label, "FP16") || starts_with(variant->label, "F32") ||
                       starts_with(variant->label, "FP32");
}

static bool same_stem(const char *a, const char *b) {
    size_t n = stem_length(a);
    return n == stem_length(b) && memcmp(a, b, n) == 0;
}

static void find_gguf(const hub_listing *listing, hub_variants *found) {
    const char *before = NULL; /* path of the first file of the current variant */
    for (uint32_t i = 0; i < listing->n_files; i++) {
        const char *path = listing->files[i].path;
        if (!hub_is_gguf_model(path)) continue;
        if (before == NULL || !same_stem(before, path)) {
            if (found->n == MAX_VARIANTS) break;
            label_gguf(path, add_variant(found));
            before = path;
        }
        add_file(&found->variants[found->n - 1], listing, i, true);
    }
    for (uint32_t i = 0; i < found->n; i++) found->variants[i].is_complete = parts_are_complete(listing, &found->variants[i]);
}

/* If several models have the same quantization, replaces their labels with their file names. */
static void make_labels_unique(const hub_listing *listing, hub_variants *found) {
    bool *twice = kit_alloc(found->n * sizeof *twice);
    for (uint32_t i = 0; i < found->n; i++)
        for (uint32_t j = 0; j < found->n; j++)
            twice[i] = twice[i] || (i != j && strcasecmp(found->variants[i].label, found->variants[j].label) == 0);
    for (uint32_t i = 0; i < found->n; i++)
        if (twice[i]) label_by_name(listing->files[found->variants[i].files[0]].path, &found->variants[i]);
    free(twice);
}

/* Returns whether a file of a safetensors folder is a configuration, vocabulary, template or licence file. */
static bool is_companion(const hub_file *file) {
    static const char *const ends[] = {".json", ".jinja", ".txt", ".model"};
    if (strchr(file->path, '/') != NULL || file->bytes > MAX_SMALL_BYTES) return false;
    if (starts_with(file->path, "LICENSE") || starts_with(file->path, "NOTICE")) return true;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (ends_with(file->path, ends[i])) return true;
    return false;
}

static bool is_weight_file(const char *path) {
    return strchr(path, '/') == NULL && ends_with(path, ".safetensors") && !starts_with(path, "adapter");
}

/* Returns whether a weight file is used. If model.safetensors or its parts exist, other files are ignored, because
 * consolidated.safetensors is a second copy of the weights. */
static bool is_selected_weight(const hub_listing *listing, const char *path) {
    if (!is_weight_file(path)) return false;
    if (hub_listing_find(listing, "model.safetensors") != NULL) return strcmp(path, "model.safetensors") == 0;
    if (hub_listing_find(listing, "model.safetensors.index.json") != NULL) return starts_with(path, "model");
    return true;
}

static void find_folder(const hub_listing *listing, hub_variants *found) {
    bool has_weights = false;
    for (uint32_t i = 0; i < listing->n_files; i++)
        has_weights = has_weights || is_selected_weight(listing, listing->files[i].path);
    const hub_file *config = hub_listing_find(listing, "config.json");
    if (!has_weights || config == NULL) return;
    hub_variant *folder = add_variant(found);
    folder->is_folder = true;
    folder->is_complete = true;
    add_file(folder, listing, (uint32_t)(config - listing->files), false);
    unsigned n_found = 0;
    unsigned part = 0;
    unsigned n_parts = 0;
    for (uint32_t i = 0; i < listing->n_files; i++) {
        const hub_file *file = &listing->files[i];
        bool is_weight = is_selected_weight(listing, file->path);
        if (is_weight || (file != config && is_companion(file))) add_file(folder, listing, i, is_weight);
        if (is_weight && split_suffix(file->path, &part, &n_parts) != NULL) n_found++;
    }
    folder->is_complete = n_found == n_parts;
}

/* Orders the safetensors folder before GGUF models, and GGUF models by decreasing size. Models of equal size are ordered by
 * label. */
static int by_size(const void *a, const void *b) {
    const hub_variant *x = a;
    const hub_variant *y = b;
    if (x->is_folder != y->is_folder) return x->is_folder ? -1 : 1;
    if (x->weight_bytes != y->weight_bytes) return x->weight_bytes > y->weight_bytes ? -1 : 1;
    return strcmp(x->label, y->label);
}

void hub_variants_find(const hub_listing *listing, hub_variants *found) {
    *found = (hub_variants){0};
    find_gguf(listing, found);
    make_labels_unique(listing, found);
    find_folder(listing, found);
    if (found->n > 0) qsort(found->variants, found->n, sizeof *found->variants, by_size);
}

const hub_variant *hub_variants_named(const hub_variants *found, const char *label) {
    for (uint32_t i = 0; i < found->n; i++)
        if (!found->variants[i].is_folder && strcasecmp(found->variants[i].label, label) == 0) return &found->variants[i];
    return NULL;
}

void hub_variants_free(hub_variants *found) {
    for (uint32_t i = 0; i < found->n; i++) free(found->variants[i].files);
    free(found->variants);
    *found = (hub_variants){0};
}
