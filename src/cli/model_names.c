/* See model_names.h. */
#include "model_names.h"

#include "../kit/process.h"
#include "../kit/suggestion.h"
#include "cli.h"
#include "model_files.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const model_name model_names[] = {
    {"needle", "byte-level test model that only recalls planted facts; included with flatkv", "MIT", 7220464, 131072},
    {"smollm2", "SmolLM2-135M-Instruct, Q4_1", "Apache-2.0", 98362432, 8192},
    {"qwen2.5-0.5b", "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", "Apache-2.0", 491400064, 32768},
    {"qwen2.5-1.5b", "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M", "Apache-2.0", 1117320768, 32768},
    {"gemma3-270m", "Gemma-3-270M base, Q4_K_M", "Gemma Terms of Use", 253113024, 32768},
};
const unsigned n_model_names = sizeof model_names / sizeof model_names[0];

const model_name *model_name_find(const char *name) {
    for (unsigned i = 0; i < n_model_names; i++)
        if (strcmp(model_names[i].name, name) == 0) return &model_names[i];
    return NULL;
}

static bool is_readable(const char *path) { return access(path, R_OK) == 0; }

/* Truncates a path after its last slash. */
static void truncate_to_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash != NULL) slash[1] = 0;
}

const char *model_fetcher(void) {
    char path[MODEL_PATH];
    if (!process_program_path(path, sizeof path)) return "flatkv-get-model";
    truncate_to_folder(path);
    const size_t length = strlen(path);
    snprintf(path + length, sizeof path - length, "flatkv-get-model");
    return is_readable(path) ? "flatkv-get-model" : "scripts/get-model";
}

static bool needle_folder(char path[MODEL_PATH]) {
    char program[MODEL_PATH / 2];
    if (process_program_path(program, sizeof program)) {
        truncate_to_folder(program);
        snprintf(path, MODEL_PATH, "%s../share/flatkv/models/needle", program);
        if (is_readable(path)) return true;
    }
    snprintf(path, MODEL_PATH, "%s/models/needle", FLATKV_SOURCE_DIR);
    return is_readable(path);
}

static bool cached_file(const char *name, char path[MODEL_PATH]) {
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (cache != NULL && cache[0] == '/')
        snprintf(path, MODEL_PATH, "%s/flatkv/models/%s.gguf", cache, name);
    else
        snprintf(path, MODEL_PATH, "%s/.cache/flatkv/models/%s.gguf", home != NULL ? home : "", name);
    return is_readable(path);
}

bool model_name_path(const model_name *name, char path[MODEL_PATH]) {
    return strcmp(name->name, "needle") == 0 ? needle_folder(path) : cached_file(name->name, path);
}

static int fail_unknown_model(const char *word) {
    suggestion near = {.typed = word};
    char hint[96];
    for (unsigned i = 0; i < n_model_names; i++) suggestion_offer(&near, model_names[i].name);
    return kit_fail(EXIT_FAILED, "-m %s is neither a readable file or folder nor a model name%s; 'flatkv models' lists the names",
                    word, suggestion_hint(&near, "", hint));
}

int model_fail_unnamed(void) {
    char path[MODEL_PATH];
    for (unsigned i = 0; i < n_model_names; i++)
        if (strcmp(model_names[i].name, "needle") != 0 && model_name_path(&model_names[i], path))
            return kit_fail(
                EXIT_USAGE,
                "no model given: use -m %s, which is on this machine, or -m with a .gguf file or a safetensors folder",
                model_names[i].name);
    return kit_fail(
        EXIT_USAGE,
        "no model given: use -m with a .gguf file or a safetensors folder, or run %s smollm2 to download a small model "
        "and then use -m smollm2",
        model_fetcher());
}

/* Finds the snapshot folder of org/name in the Hugging Face cache: the snapshot in refs/main, or the parent folder of all
 * snapshots if refs/main is missing. Returns false if the word does not have the form org/name or the model is not cached. */
static bool hub_folder(const char *word, char folder[MODEL_PATH]) {
    char hub[MODEL_PATH];
    char path[2 * MODEL_PATH];
    char commit[41] = "";
    const char *slash = strchr(word, '/');
    if (slash == NULL || slash == word || strchr(slash + 1, '/') != NULL || !model_files_hub(hub)) return false;
    int n = snprintf(path, sizeof path, "%s/models--%.*s--%s", hub, (int)(slash - word), word, slash + 1);
    if (n < 0 || n + 64 > MODEL_PATH) return false;
    snprintf(path + n, sizeof path - (size_t)n, "/refs/main");
    FILE *main = fopen(path, "r");
    if (main != NULL) {
        commit[fread(commit, 1, sizeof commit - 1, main)] = 0;
        (void)fclose(main);
    }
    commit[strspn(commit, "0123456789abcdef")] = 0;
    snprintf(folder, MODEL_PATH, "%.*s/snapshots/%s", n, path, commit);
    return is_readable(folder);
}

static int find_in_hub(const char *word, char path[MODEL_PATH]) {
    char folder[MODEL_PATH];
    model_files found = {0};
    if (!hub_folder(word, folder)) return fail_unknown_model(word);
    model_files_add(&found, folder);
    int code = EXIT_GOOD;
    if (found.n == 1)
        snprintf(path, MODEL_PATH, "%s", found.files[0].path);
    else if (found.n == 0)
        code = kit_fail(EXIT_FAILED, "-m %s: no .gguf file and no safetensors folder in %s", word, folder);
    else
        code = kit_fail(EXIT_FAILED, "-m %s is ambiguous: %u models in %s; pass one of the paths listed by 'flatkv models'", word,
                        found.n, folder);
    model_files_free(&found);
    return code;
}

int model_path_of(const char *word, char path[MODEL_PATH]) {
    const model_name *name = model_name_find(word);
    if (name == NULL) {
        if (strlen(word) >= MODEL_PATH)
            return kit_fail(EXIT_USAGE, "-m: the path has %zu bytes; at most %d are supported", strlen(word), MODEL_PATH - 1);
        if (!is_readable(word)) return find_in_hub(word, path);
        snprintf(path, MODEL_PATH, "%s", word);
        return EXIT_GOOD;
    }
    if (model_name_path(name, path)) return EXIT_GOOD;
    if (strcmp(word, "needle") == 0)
        return kit_fail(EXIT_FAILED, "the needle model is missing at %s: reinstall flatkv, or pass its folder with -m", path);
    return kit_fail(EXIT_FAILED, "model %s has not been downloaded to %s: run %s %s", word, path, model_fetcher(), word);
}

int model_needle_file(const char *file, char path[MODEL_PATH]) {
    char folder[MODEL_PATH];
    int code = model_path_of("needle", folder);
    if (code != EXIT_GOOD) return code;
    int length = snprintf(path, MODEL_PATH, "%s/%s", folder, file);
    if (length < MODEL_PATH && is_readable(path)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "%s is missing from the needle model's folder %s: reinstall flatkv", file, folder);
}
