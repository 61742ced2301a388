/* flatkv pull: downloads a model from a Hugging Face hub into the cache that other tools share. */
#include "pull_model.h"

#include "cli.h"

#include <string.h>

static const char usage[] =
    "usage: flatkv pull ORG/NAME[:QUANT] [options]\n"
    "Downloads a model from huggingface.co into the Hugging Face cache, where flatkv, mlx-lm, llama.cpp and transformers find it.\n"
    "-m ORG/NAME[:QUANT] then runs it. An interrupted download resumes. Every file is verified by its checksum.\n"
    "From a repository with several GGUF quantizations, the largest up to 8 bits that fits in memory is downloaded, unless\n"
    "QUANT names one. Names that 'flatkv models' lists are accepted, too.\n\n"
    "Environment: HF_TOKEN (for gated and private models), HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HTTPS_PROXY\n";

typedef struct pull_options {
    kit_texts words;
    uint32_t connections;
    uint32_t tries;
    const char *revision;
    bool list;
    bool verify;
    bool force;
    bool json;
} pull_options;

static void print_choice(const pull_choice *c) {
    const hub_variant *v = c->variant;
    char size[32];
    char needs[32];
    char has[32];
    (void)fprintf(stderr, "%s: %s, %s in %u %s", c->listing.repo, v->is_folder ? "safetensors" : v->label,
                  kit_bytes(v->total_bytes, size), v->n_files, v->n_files == 1 ? "file" : "files");
    (void)fprintf(stderr, c->reason[0] != 0 ? " (%s)\n" : "\n", c->reason);
    if (!c->cost.loads) {
        (void)kit_fail(0, "warning: flatkv cannot run this model: %s", c->cost.reason);
        return;
    }
    (void)fprintf(stderr, "needs %s with %u tokens of context; %s of memory is available\n",
                  kit_bytes(c->cost.total_bytes, needs), c->cost.context, kit_bytes(c->available_bytes, has));
    if (!c->fits) (void)kit_fail(0, "warning: the model does not fit in the memory of this machine");
}

/* Prints all models that the repository contains. */
static void print_list(const pull_choice *c) {
    char size[32];
    for (uint32_t i = 0; i < c->variants.n; i++) {
        const hub_variant *v = &c->variants.variants[i];
        printf("%-12s %9s%s%s\n", v->is_folder ? "safetensors" : v->label, kit_bytes(v->total_bytes, size),
               v == c->variant ? "  chosen" : "", v->is_complete ? "" : "  incomplete");
    }
}

static void json_files(kit_json *json, const pull_choice *c) {
    kit_json_array(json, "files");
    for (uint32_t i = 0; i < c->variant->n_files; i++) {
        const hub_file *file = &c->listing.files[c->variant->files[i]];
        kit_json_object(json, NULL);
        kit_json_text(json, "name", file->path);
        kit_json_integer(json, "bytes", file->bytes);
        kit_json_text(json, file->is_large ? "sha256" : "git_sha1", file->id);
        kit_json_close(json);
    }
    kit_json_close(json);
}

/* Prints a JSON object that describes the chosen model and, unless path is NULL, the result of the download. */
static int print_pull_json(const pull_choice *c, const char *path, uint64_t downloaded) {
    kit_json *json = kit_json_begin();
    kit_json_text(json, "model", c->listing.repo);
    kit_json_text(json, "commit", c->listing.commit);
    kit_json_text(json, "format", c->variant->is_folder ? "safetensors" : "gguf");
    if (!c->variant->is_folder) kit_json_text(json, "quant", c->variant->label);
    if (c->reason[0] != 0) kit_json_text(json, "reason", c->reason);
    kit_json_integer(json, "bytes", c->variant->total_bytes);
    kit_json_bool(json, "supported", c->cost.loads);
    if (c->cost.loads) {
        kit_json_integer(json, "needed_bytes", c->cost.total_bytes);
        kit_json_integer(json, "plan_context", c->cost.context);
    }
    kit_json_integer(json, "available_bytes", c->available_bytes);
    kit_json_bool(json, "fits", c->fits);
    if (path != NULL) {
        kit_json_integer(json, "downloaded_bytes", downloaded);
        kit_json_bytes(json, "path", path, strlen(path));
    }
    json_files(json, c);
    kit_json_array(json, "variants");
    for (uint32_t i = 0; i < c->variants.n; i++) {
        const hub_variant *v = &c->variants.variants[i];
        kit_json_object(json, NULL);
        kit_json_text(json, "name", v->is_folder ? "safetensors" : v->label);
        kit_json_integer(json, "bytes", v->total_bytes);
        kit_json_close(json);
    }
    kit_json_close(json);
    return kit_json_print(json);
}

static int pull_one(const pull_options *o, hub_session *session, const char *word) {
    pull_choice choice;
    char path[MODEL_PATH];
    char bytes[32];
    uint64_t downloaded = 0;
    int code = pull_choose(session, word, o->force || o->list, 0, &choice);
    if (code == EXIT_GOOD && o->list) {
        if (o->json)
            code = print_pull_json(&choice, NULL, 0);
        else
            print_list(&choice);
    } else if (code == EXIT_GOOD) {
        print_choice(&choice);
        code = pull_fetch(session, &choice, o->connections, o->verify, path, &downloaded);
        if (code == EXIT_INTERRUPTED) (void)kit_fail(0, "interrupted; run the same command to continue the download");
        if (code == EXIT_GOOD && o->json)
            code = print_pull_json(&choice, path, downloaded);
        else if (code == EXIT_GOOD) {
            (void)fprintf(stderr, downloaded > 0 ? "downloaded %s; " : "already complete; ", kit_bytes(downloaded, bytes));
            bool is_short = choice.variant->is_folder || model_name_find(word) != NULL;
            if (strcmp(o->revision, "main") != 0)
                (void)fprintf(stderr, "to chat: flatkv run -m %s -i\n", path);
            else
                (void)fprintf(stderr, "to chat: flatkv run -m %s%s%s -i\n", is_short ? word : choice.listing.repo,
                              is_short ? "" : ":", is_short ? "" : choice.variant->label);
            puts(path);
        }
    }
    pull_choice_free(&choice);
    return code;
}

int cli_pull(int argc, char **argv) {
    static pull_options o = {.connections = PULL_CONNECTIONS, .tries = 8, .revision = "main"};
    const kit_option own[] = {
        {"model", 0, OPTION_POSITIONAL, &o.words, 0, "ORG/NAME[:QUANT]", "model to download"},
        {"revision", 0, OPTION_TEXT, &o.revision, 0, "NAME",
         "branch, tag or commit to download (default main); run a model of another revision by the printed path"},
        {"list", 0, OPTION_FLAG, &o.list, 0, NULL, "print the models of the repository and their sizes, and download nothing"},
        {"verify", 0, OPTION_FLAG, &o.verify, 0, NULL,
         "compute the checksums of files that are already in the cache, and download damaged files again"},
        {"force", 0, OPTION_FLAG, &o.force, 0, NULL,
         "download the model even if flatkv does not support it or it does not fit in memory"},
        {"connections", 0, OPTION_COUNT, &o.connections, 32, "N", "number of parallel transfers (default 8)"},
        {"tries", 0, OPTION_COUNT, &o.tries, 1000, "N", "attempts for each request before giving up (default 8)"},
        {"json", 0, OPTION_FLAG, &o.json, 0, NULL, "print one JSON object to standard output"},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (o.words.n != 1)
        return kit_fail(EXIT_USAGE, "pull requires exactly one model, such as %s", model_name_find("smollm2")->hub);
    if (strcmp(o.words.texts[0], "needle") == 0)
        return kit_fail(EXIT_USAGE, "the needle model is part of flatkv and need not be downloaded");
    if (!hub_revision_is_valid(o.revision))
        return kit_fail(EXIT_USAGE, "--revision %s: expected a branch, a tag or a commit", o.revision);
    hub_session session;
    cli_catch_interrupts();
    code = hub_session_open(&session, cli_interrupted);
    session.n_tries = o.tries;
    session.revision = o.revision;
    if (code == EXIT_GOOD) code = pull_one(&o, &session, o.words.texts[0]);
    hub_session_close(&session);
    return code;
}
