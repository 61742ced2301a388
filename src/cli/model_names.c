/* See model_names.h. */
#include "model_names.h"

#include "../hub/hub_cache.h"
#include "../kit/process.h"
#include "../kit/suggestion.h"
#include "cli.h"
#include "model_files.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

const model_name model_names[] = {
    {"needle", "byte-level test model that only recalls planted facts; included with flatkv", "MIT", NULL, 7220464, 131072},
    {"smollm2", "SmolLM2-135M-Instruct", "Apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct", 269060552, 8192},
    {"qwen2.5-0.5b", "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", "Apache-2.0", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M",
     491400064, 32768},
    {"qwen2.5-1.5b", "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M", "Apache-2.0", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
     1117320768, 32768},
    {"gemma3-270m", "Gemma-3-270M base; gated", "Gemma Terms of Use", "google/gemma-3-270m", 536223056, 32768},
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

/* ---- the Hugging Face cache ---- */

/* Finds the models that match org/name[:quant] in the Hugging Face cache. Returns false if no model matches. Sets `folder` to ""
 * if the cache has no snapshot of the repository. */
static bool find_cached(const hub_name *name, model_files *found, char folder[HUB_PATH]) {
    *found = (model_files){0};
    if (!hub_cache_snapshot(name->repo, folder)) {
        folder[0] = 0;
        return false;
    }
    model_files_add(found, folder);
    uint32_t n = 0;
    for (uint32_t i = 0; i < found->n; i++) {
        char label[MODEL_PATH];
        model_file_label(&found->files[i], label);
        bool wanted = name->quant[0] == 0 || strcasecmp(label, name->quant) == 0;
        if (wanted && n != i) found->files[n] = found->files[i];
        n += wanted;
    }
    found->n = n;
    return n > 0;
}

bool model_name_path(const model_name *name, char path[MODEL_PATH]) {
    hub_name hub;
    model_files found;
    char folder[HUB_PATH];
    if (strcmp(name->name, "needle") == 0) return needle_folder(path);
    if (cached_file(name->name, path)) return true;
    if (!hub_name_parse(name->hub, &hub)) return false;
    bool present = find_cached(&hub, &found, folder);
    if (present) (void)snprintf(path, MODEL_PATH, "%s", found.files[0].path);
    model_files_free(&found);
    return present;
}

/* Returns whether a word that is not an existing path ends like the name of a model file or text file. */
static bool looks_like_path(const char *word) {
    static const char *const ends[] = {".gguf", ".json", ".safetensors", ".fkv", ".bin", ".txt"};
    size_t n = strlen(word);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t n_end = strlen(ends[i]);
        if (n > n_end && strcasecmp(word + n - n_end, ends[i]) == 0) return true;
    }
    return false;
}

/* A model in the Hugging Face cache that the user may mean. */
typedef struct cached_name {
    const char *word;    /* value of -m; NULL if -m is missing */
    char best[HUB_REPO]; /* first model in alphabetical order that the word may refer to; "" if there is none */
} cached_name;

/* Returns true if the Hugging Face cache contains all files of the repository's model. */
static bool is_cached(const char *repo) {
    hub_name name;
    model_files found;
    char folder[HUB_PATH];
    if (!hub_name_parse(repo, &name)) return false;
    const bool present = find_cached(&name, &found, folder);
    model_files_free(&found);
    return present;
}

/* Updates found->best with the downloaded model `repo` if found->word may refer to it. The word must equal org/name or name,
 * ignoring case. If the word is missing, every downloaded model is considered. */
static void consider_name(const char *repo, void *user) {
    cached_name *found = user;
    const char *slash = strchr(repo, '/');
    const bool matches =
        found->word == NULL || strcasecmp(found->word, repo) == 0 || (slash != NULL && strcasecmp(found->word, slash + 1) == 0);
    if (matches && (found->best[0] == 0 || strcmp(repo, found->best) < 0) && is_cached(repo))
        (void)snprintf(found->best, sizeof found->best, "%s", repo);
}

static cached_name find_similar(const char *word) {
    cached_name found = {.word = word};
    hub_cache_each(consider_name, &found);
    return found;
}

static int fail_unknown_model(const char *word) {
    suggestion near = {.typed = word};
    char hint[96];
    const cached_name cached = find_similar(word);
    if (cached.best[0] != 0)
        return kit_fail(EXIT_FAILED,
                        "-m %s is neither a readable file or folder nor a model name; use -m %s, which is on this machine", word,
                        cached.best);
    for (unsigned i = 0; i < n_model_names; i++) suggestion_offer(&near, model_names[i].name);
    return kit_fail(EXIT_FAILED,
                    "-m %s is neither a readable file or folder nor a model name%s; 'flatkv models' lists the names, and 'flatkv "
                    "pull ORG/NAME' downloads a model",
                    word, suggestion_hint(&near, "", hint));
}

static int fail_absent_model(const char *word) {
    const cached_name cached = find_similar(word);
    if (cached.best[0] != 0)
        return kit_fail(EXIT_FAILED,
                        "-m %s is not a readable path, but the Hugging Face cache contains this model as %s: use -m %s", word,
                        cached.best, cached.best);
    return kit_fail(EXIT_FAILED, "-m %s is neither a readable path nor a model in the Hugging Face cache: run 'flatkv pull %s'",
                    word, word);
}

static int fail_unnamed_with(const char *present) {
    return kit_fail(
        EXIT_USAGE,
        "no model given: use -m %s, which is on this machine, or -m with a .gguf file, a safetensors folder or ORG/NAME",
        present);
}

int model_fail_unnamed(void) {
    char path[MODEL_PATH];
    for (unsigned i = 0; i < n_model_names; i++)
        if (strcmp(model_names[i].name, "needle") != 0 && model_name_path(&model_names[i], path))
            return fail_unnamed_with(model_names[i].name);
    const cached_name cached = find_similar(NULL);
    if (cached.best[0] != 0) return fail_unnamed_with(cached.best);
    return kit_fail(EXIT_USAGE, "no model given: use -m with a .gguf file, a safetensors folder or ORG/NAME, or run 'flatkv pull "
                                "smollm2' to download a small model and then use -m smollm2");
}

/* Prints an error that lists all models in the cache that match the name, and the name that selects each of them. */
static int fail_ambiguous(const char *word, const hub_name *name, const model_files *found) {
    char names[2048] = "";
    size_t n = 0;
    for (uint32_t i = 0; i < found->n; i++) {
        char label[MODEL_PATH];
        model_file_label(&found->files[i], label);
        int more = label[0] != 0 ? snprintf(names + n, sizeof names - n, "%s%s:%s", n > 0 ? ", " : "", name->repo, label)
                                 : snprintf(names + n, sizeof names - n, "%s%s", n > 0 ? ", " : "", found->files[i].path);
        if (more < 0 || (size_t)more >= sizeof names - n) break;
        n += (size_t)more;
    }
    return kit_fail(EXIT_FAILED, "-m %s is ambiguous: the cache has %u models of this name; use one of %s", word, found->n,
                    names);
}

static int find_in_hub(const char *word, char path[MODEL_PATH]) {
    char folder[HUB_PATH];
    model_files found;
    hub_name name;
    int code = EXIT_GOOD;
    if (looks_like_path(word) || !hub_name_parse(word, &name)) return fail_unknown_model(word);
    bool present = find_cached(&name, &found, folder);
    if (!present)
        code = fail_absent_model(word);
    else if (found.n > 1)
        code = fail_ambiguous(word, &name, &found);
    else
        (void)snprintf(path, MODEL_PATH, "%s", found.files[0].path);
    model_files_free(&found);
    return code;
}

bool model_is_remote(const char *word) {
    char path[MODEL_PATH];
    char folder[HUB_PATH];
    model_files found;
    hub_name name;
    const model_name *known = model_name_find(word);
    if (known != NULL) return known->hub != NULL && !model_name_path(known, path);
    if (is_readable(word) || looks_like_path(word) || !hub_name_parse(word, &name)) return false;
    bool present = find_cached(&name, &found, folder);
    model_files_free(&found);
    return !present;
}

int model_path_of(const char *word, char path[MODEL_PATH]) {
    const model_name *name = model_name_find(word);
    if (name == NULL) {
        if (strlen(word) >= MODEL_PATH)
            return kit_fail(EXIT_USAGE, "-m: the path is %zu bytes long; at most %d are supported", strlen(word), MODEL_PATH - 1);
        if (!is_readable(word)) return find_in_hub(word, path);
        snprintf(path, MODEL_PATH, "%s", word);
        return EXIT_GOOD;
    }
    if (model_name_path(name, path)) return EXIT_GOOD;
    if (strcmp(word, "needle") == 0)
        return kit_fail(EXIT_FAILED, "the needle model is missing at %s: reinstall flatkv, or pass its folder with -m", path);
    return kit_fail(EXIT_FAILED, "model %s has not been downloaded: run 'flatkv pull %s'", word, word);
}

int model_needle_file(const char *file, char path[MODEL_PATH]) {
    char folder[MODEL_PATH];
    int code = model_path_of("needle", folder);
    if (code != EXIT_GOOD) return code;
    int length = snprintf(path, MODEL_PATH, "%s/%s", folder, file);
    if (length < MODEL_PATH && is_readable(path)) return EXIT_GOOD;
    return kit_fail(EXIT_FAILED, "%s is missing from the needle model's folder %s: reinstall flatkv", file, folder);
}
