/* See model_names.h. */
#include "model_names.h"

#include "../kit/near_word.h"
#include "../kit/process.h"
#include "cli.h"
#include "model_files.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const model_name model_names[] = {
    {"needle", "looks up planted facts in bytes; comes with flatkv", "MIT", 7220464, 131072},
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

static bool there(const char *path) { return access(path, R_OK) == 0; }

/* Everything before the last slash, the slash included. */
static void cut_to_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash != NULL) slash[1] = 0;
}

const char *model_fetcher(void) {
    char path[MODEL_PATH];
    if (!process_program_path(path, sizeof path)) return "flatkv-get-model";
    cut_to_folder(path);
    const size_t length = strlen(path);
    snprintf(path + length, sizeof path - length, "flatkv-get-model");
    return there(path) ? "flatkv-get-model" : "scripts/get-model";
}

static bool needle_folder(char path[MODEL_PATH]) {
    char program[MODEL_PATH / 2];
    if (process_program_path(program, sizeof program)) {
        cut_to_folder(program);
        snprintf(path, MODEL_PATH, "%s../share/flatkv/models/needle", program);
        if (there(path)) return true;
    }
    snprintf(path, MODEL_PATH, "%s/models/needle", FLATKV_SOURCE_DIR);
    return there(path);
}

static bool cached_file(const char *name, char path[MODEL_PATH]) {
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (cache != NULL && cache[0] == '/')
        snprintf(path, MODEL_PATH, "%s/flatkv/models/%s.gguf", cache, name);
    else
        snprintf(path, MODEL_PATH, "%s/.cache/flatkv/models/%s.gguf", home != NULL ? home : "", name);
    return there(path);
}

bool model_name_path(const model_name *name, char path[MODEL_PATH]) {
    return strcmp(name->name, "needle") == 0 ? needle_folder(path) : cached_file(name->name, path);
}

static int fail_unknown(const char *word) {
    near_word near = {.typed = word};
    char hint[96];
    for (unsigned i = 0; i < n_model_names; i++) near_word_offer(&near, model_names[i].name);
    return kit_fail(EXIT_FAILED, "%s is neither a readable file or folder nor the name of a model%s: flatkv models lists those",
                    word, near_word_hint(&near, "", hint));
}

int model_fail_unnamed(void) {
    char path[MODEL_PATH];
    for (unsigned i = 0; i < n_model_names; i++)
        if (strcmp(model_names[i].name, "needle") != 0 && model_name_path(&model_names[i], path))
            return kit_fail(EXIT_USAGE,
                            "no model: -m %s is on this machine; -m also takes a .gguf file or a folder with safetensors",
                            model_names[i].name);
    return kit_fail(
        EXIT_USAGE,
        "no model: give -m FILE.gguf, or a folder with safetensors; or %s smollm2, which fetches a small one, and then "
        "-m smollm2",
        model_fetcher());
}

/* What the Hugging Face cache has of org/name: the snapshot that refs/main names, or all of them. False: it is no such name. */
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
    return there(folder);
}

static int path_in_hub(const char *word, char path[MODEL_PATH]) {
    char folder[MODEL_PATH];
    model_files found = {0};
    if (!hub_folder(word, folder)) return fail_unknown(word);
    model_files_add(&found, folder);
    int code = EXIT_GOOD;
    if (found.n == 1)
        snprintf(path, MODEL_PATH, "%s", found.files[0].path);
    else if (found.n == 0)
        code = kit_fail(EXIT_FAILED, "%s has no .gguf file and no safetensors in %s", word, folder);
    else
        code = kit_fail(EXIT_FAILED, "%s has %u models in %s: flatkv models lists them, -m takes one of their paths", word,
                        found.n, folder);
    model_files_free(&found);
    return code;
}

int model_path_of(const char *word, char path[MODEL_PATH]) {
    const model_name *name = model_name_find(word);
    if (name == NULL) {
        if (strlen(word) >= MODEL_PATH) return kit_fail(EXIT_USAGE, "the path of the model has %zu bytes", strlen(word));
        if (!there(word)) return path_in_hub(word, path);
        snprintf(path, MODEL_PATH, "%s", word);
        return EXIT_GOOD;
    }
    if (model_name_path(name, path)) return EXIT_GOOD;
    if (strcmp(word, "needle") == 0)
        return kit_fail(EXIT_FAILED, "the needle model is not at %s: install flatkv again, or name a folder with -m", path);
    return kit_fail(EXIT_FAILED, "%s is not on this machine (%s): %s %s fetches it", word, path, model_fetcher(), word);
}

int model_needle_file(const char *file, char path[MODEL_PATH]) {
    char folder[MODEL_PATH];
    int code = model_path_of("needle", folder);
    if (code != EXIT_GOOD) return code;
    int length = snprintf(path, MODEL_PATH, "%s/%s", folder, file);
    if (length < MODEL_PATH && there(path)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "%s is missing beside the needle model in %s", file, folder);
}
