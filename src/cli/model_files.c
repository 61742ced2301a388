/* See model_files.h. The recursion depth is limited, so a cycle of symbolic links terminates. */
#include "model_files.h"

#include "../hub/hub_variants.h"
#include "../kit/program.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_DEPTH = 5, MAX_FOUND = 4096 };

static bool has_suffix(const char *text, const char *end) {
    size_t n = strlen(text);
    size_t n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* Returns whether the file is part 2 or later of a split model, such as "-00002-of-00005.gguf". Only part 1 is listed. */
static bool is_later_part(const char *name) {
    const char *of = strstr(name, "-of-");
    return of != NULL && of - name > 6 && of[-6] == '-' && strncmp(of - 5, "00001", 5) != 0;
}

static void add_file(model_files *list, const char *path, uint64_t bytes) {
    if (list->n == MAX_FOUND) return;
    if (list->n == list->capacity) {
        list->capacity = 2 * list->capacity + 16;
        list->files = kit_realloc(list->files, list->capacity * sizeof *list->files);
    }
    model_file *file = &list->files[list->n++];
    (void)snprintf(file->path, sizeof file->path, "%s", path);
    file->bytes = bytes;
}

/* Contents of one folder, excluding its subfolders. */
typedef struct folder_sums {
    bool has_config;
    uint64_t safetensors_bytes;
} folder_sums;

static void scan_folder(model_files *list, const char *folder, int depth);

static void scan_entry(model_files *list, const char *folder, const char *name, int depth, folder_sums *sums) {
    char path[MODEL_PATH];
    struct stat about;
    if (name[0] == '.' || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path || stat(path, &about) != 0)
        return;
    if (S_ISDIR(about.st_mode)) {
        if (depth < MAX_DEPTH && strcmp(name, "blobs") != 0) scan_folder(list, path, depth + 1);
        return;
    }
    if (!S_ISREG(about.st_mode)) return;
    if (strcmp(name, "config.json") == 0) sums->has_config = true;
    if (has_suffix(name, ".safetensors")) sums->safetensors_bytes += (uint64_t)about.st_size;
    if (hub_is_gguf_model(name) && !is_later_part(name)) add_file(list, path, (uint64_t)about.st_size);
}

static void scan_folder(model_files *list, const char *folder, int depth) {
    folder_sums sums = {0};
    DIR *entries = opendir(folder);
    if (entries == NULL) return;
    for (const struct dirent *entry = NULL; (entry = readdir(entries)) != NULL;)
        scan_entry(list, folder, entry->d_name, depth, &sums);
    (void)closedir(entries);
    if (sums.has_config && sums.safetensors_bytes > 0) add_file(list, folder, sums.safetensors_bytes);
}

static int by_path(const void *a, const void *b) { return strcmp(((const model_file *)a)->path, ((const model_file *)b)->path); }

void model_files_add(model_files *list, const char *folder) {
    uint32_t before = list->n;
    scan_folder(list, folder, 0);
    if (list->n > before) qsort(list->files + before, list->n - before, sizeof *list->files, by_path);
}

void model_file_label(const model_file *file, char label[MODEL_PATH]) {
    const char *slash = strrchr(file->path, '/');
    const char *name = slash != NULL ? slash + 1 : file->path;
    char quant[HUB_QUANT];
    label[0] = 0;
    if (!has_suffix(name, ".gguf")) return;
    if (hub_quant_of(file->path, quant))
        (void)snprintf(label, MODEL_PATH, "%s", quant);
    else
        (void)snprintf(label, MODEL_PATH, "%.*s", (int)(strlen(name) - strlen(".gguf")), name);
}

void model_files_free(model_files *list) {
    free(list->files);
    *list = (model_files){0};
}
