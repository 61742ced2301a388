/* See pull_model.h. */
#include "pull_model.h"

#include "../hub/gguf_header.h"
#include "../hub/hub_verify.h"
#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <flatkv/model.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* ---- temporary files: headers without weights ---- */

static int make_folder(pull_choice *c) {
    const char *parent = getenv("TMPDIR");
    if (c->folder[0] != 0) return EXIT_GOOD;
    if (parent == NULL || parent[0] == 0) parent = "/tmp";
    int n = snprintf(c->folder, sizeof c->folder, "%s/flatkv-XXXXXX", parent);
    if (n < MODEL_PATH - 1400 && mkdtemp(c->folder) != NULL) return EXIT_GOOD;
    c->folder[0] = 0;
    return kit_fail(EXIT_FAILED, "cannot create a temporary folder in %s: %s", parent, strerror(errno));
}

static void empty_folder(pull_choice *c) {
    if (c->folder[0] == 0) return;
    DIR *entries = opendir(c->folder);
    for (const struct dirent *entry = NULL; entries != NULL && (entry = readdir(entries)) != NULL;)
        (void)unlinkat(dirfd(entries), entry->d_name, 0);
    if (entries != NULL) (void)closedir(entries);
}

static bool write_all(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        ssize_t written = write(fd, bytes, n);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        bytes += written;
        n -= (size_t)written;
    }
    return true;
}

/* Writes a temporary file with the first n bytes of a file on the hub. The rest is a hole, so the temporary file has the full
 * size but needs little disk space. */
static int write_head(pull_choice *c, const hub_file *file, const char *bytes, size_t n) {
    char path[MODEL_PATH + 1100];
    (void)snprintf(path, sizeof path, "%s/%s", c->folder, base_name(file->path));
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool good = fd >= 0 && write_all(fd, bytes, n) && ftruncate(fd, (off_t)file->bytes) == 0;
    int reason = errno;
    if (fd >= 0) good = close(fd) == 0 && good;
    return good ? EXIT_GOOD : kit_fail(EXIT_FAILED, "cannot write %s: %s", path, strerror(reason));
}

/* Reads the header of a GGUF file in growing parts, because the size of the header is not known in advance. */
static int get_gguf_head(hub_session *session, pull_choice *c, const hub_file *file) {
    enum { FIRST = 1 << 20, MOST = 256 << 20 };
    hub_bytes head = {0};
    size_t end = 0;
    gguf_header state = GGUF_HEADER_TRUNCATED;
    int code = EXIT_GOOD;
    for (uint64_t more = FIRST; code == EXIT_GOOD && state == GGUF_HEADER_TRUNCATED; more *= 2) {
        hub_bytes part;
        if (head.n >= MOST || head.n >= file->bytes) break;
        code = hub_get_bytes(session, &c->listing, file, head.n, more, &part);
        if (code != EXIT_GOOD) break;
        head.bytes = kit_realloc(head.bytes, head.n + part.n);
        if (part.n > 0) memcpy(head.bytes + head.n, part.bytes, part.n);
        head.n += part.n;
        free(part.bytes);
        state = gguf_header_end((const uint8_t *)head.bytes, head.n, &end);
    }
    if (code == EXIT_GOOD && state != GGUF_HEADER_COMPLETE)
        code = kit_fail(EXIT_FAILED, "%s in the repository %s is not a valid GGUF file", file->path, c->listing.repo);
    if (code == EXIT_GOOD) code = write_head(c, file, head.bytes, end);
    free(head.bytes);
    return code;
}

static int get_config(hub_session *session, pull_choice *c, const hub_file *file) {
    enum { MOST = 16 << 20 };
    hub_bytes config;
    if (file->bytes > MOST)
        return kit_fail(EXIT_FAILED, "%s in the repository %s is too large for a configuration file", file->path,
                        c->listing.repo);
    int code = hub_get_bytes(session, &c->listing, file, 0, file->bytes, &config);
    if (code == EXIT_GOOD) code = write_head(c, file, config.bytes, config.n);
    free(config.bytes);
    return code;
}

/* Downloads the config.json or the GGUF headers of a variant, and plans the memory of the variant. */
static int plan_variant(hub_session *session, pull_choice *c, const hub_variant *variant) {
    enum { MAX_PARTS = 256 };
    const hub_file *first = &c->listing.files[variant->files[0]];
    int code = make_folder(c);
    empty_folder(c);
    c->variant = variant;
    if (code == EXIT_GOOD && variant->is_folder) {
        code = get_config(session, c, first);
    } else if (code == EXIT_GOOD) {
        if (variant->n_files > MAX_PARTS)
            return kit_fail(EXIT_FAILED, "%s has %u parts; at most %d are supported", first->path, variant->n_files, MAX_PARTS);
        for (uint32_t i = 0; code == EXIT_GOOD && i < variant->n_files; i++)
            code = get_gguf_head(session, c, &c->listing.files[variant->files[i]]);
    }
    if (code != EXIT_GOOD) return code;
    (void)snprintf(c->head, sizeof c->head, "%.*s/%s", MODEL_PATH - 1400, c->folder, base_name(first->path));
    c->cost = model_cost_of(c->head);
    c->fits = c->cost.loads && c->cost.total_bytes <= c->available_bytes;
    return EXIT_GOOD;
}

/* ---- choice ---- */

/* Writes the labels of all GGUF models, such as "Q8_0 (8.54 GB), Q4_K_M (4.92 GB)". */
static void list_labels(const hub_variants *found, char text[1024]) {
    size_t n = 0;
    text[0] = 0;
    for (uint32_t i = 0; i < found->n && n + HUB_QUANT + 32 < 1024; i++) {
        char bytes[32];
        if (found->variants[i].is_folder) continue;
        n += (size_t)snprintf(text + n, 1024 - n, "%s%s (%s)", n > 0 ? ", " : "", found->variants[i].label,
                              kit_bytes(found->variants[i].weight_bytes, bytes));
    }
}

static int fail_no_model(const pull_choice *c) {
    return kit_fail(EXIT_FAILED,
                    "%s contains no model that flatkv can read: expected .gguf files, or config.json with .safetensors files",
                    c->listing.repo);
}

static int choose_named(hub_session *session, pull_choice *c) {
    char labels[1024];
    const hub_variant *variant = hub_variants_named(&c->variants, c->name.quant);
    list_labels(&c->variants, labels);
    if (variant == NULL && labels[0] == 0)
        return kit_fail(EXIT_FAILED, "%s contains no GGUF files: use the name without :%s", c->listing.repo, c->name.quant);
    if (variant == NULL)
        return kit_fail(EXIT_FAILED, "%s has no %s quantization; available quantizations: %s", c->listing.repo, c->name.quant,
                        labels);
    return plan_variant(session, c, variant);
}

/* Returns whether `variant` is expected to fit in memory. If another GGUF model of the repository has already been planned, its
 * weight memory is scaled by the ratio of the file sizes. */
static bool may_fit(const pull_choice *c, const hub_variant *variant) {
    if (c->variant == NULL || c->variant->is_folder || !c->cost.loads || c->variant->weight_bytes == 0)
        return variant->weight_bytes <= c->available_bytes;
    double ratio = (double)variant->weight_bytes / (double)c->variant->weight_bytes;
    double others = (double)(c->cost.total_bytes - c->cost.weights_bytes);
    return others + ratio * (double)c->cost.weights_bytes <= (double)c->available_bytes;
}

/* Returns whether the variant may be chosen automatically. It must be a complete GGUF model. Models with 16 or 32 bits per weight
 * may be chosen only if there are no others, because they are larger and slower, but hardly better. */
static bool is_candidate(const pull_choice *c, const hub_variant *v) {
    bool all_wide = true;
    for (uint32_t i = 0; i < c->variants.n; i++) {
        const hub_variant *other = &c->variants.variants[i];
        all_wide = all_wide && (other->is_folder || !other->is_complete || other->is_wide);
    }
    return !v->is_folder && v->is_complete && (all_wide || !v->is_wide);
}

/* Chooses the largest candidate that fits, or the smallest candidate if none fits. Plans the candidates in order of decreasing
 * size until one fits. */
static int choose_gguf(hub_session *session, pull_choice *c) {
    uint32_t n_candidates = 0;
    const hub_variant *smallest = NULL;
    for (uint32_t i = 0; i < c->variants.n; i++) n_candidates += is_candidate(c, &c->variants.variants[i]);
    for (uint32_t i = 0; i < c->variants.n; i++) {
        const hub_variant *v = &c->variants.variants[i];
        if (!is_candidate(c, v)) continue;
        smallest = v;
        if (!may_fit(c, v)) continue;
        int code = plan_variant(session, c, v);
        if (code != EXIT_GOOD) return code;
        if (!c->fits && c->cost.loads) continue;
        if (n_candidates > 1)
            (void)snprintf(c->reason, sizeof c->reason, "the largest quantization%s that fits",
                           v->is_wide ? "" : " up to 8 bits");
        return EXIT_GOOD;
    }
    if (smallest == NULL) return fail_no_model(c);
    if (n_candidates > 1) (void)snprintf(c->reason, sizeof c->reason, "the smallest quantization");
    return plan_variant(session, c, smallest);
}

static int choose_variant(hub_session *session, pull_choice *c) {
    bool has_gguf = c->variants.n > 0 && !c->variants.variants[c->variants.n - 1].is_folder;
    if (c->variants.n == 0) return fail_no_model(c);
    if (c->name.quant[0] != 0) return choose_named(session, c);
    if (c->variants.variants[0].is_folder) {
        int code = plan_variant(session, c, &c->variants.variants[0]);
        if (code != EXIT_GOOD || (c->fits && c->variant->is_complete) || !has_gguf) {
            if (has_gguf)
                (void)snprintf(c->reason, sizeof c->reason, "the unquantized model fits; its GGUF files are not needed");
            return code;
        }
    }
    return choose_gguf(session, c);
}

/* Fails if flatkv cannot run the chosen model on this machine. */
static int check_choice(const pull_choice *c) {
    char needs[32];
    char has[32];
    const hub_variant *v = c->variant;
    if (!v->is_complete)
        return kit_fail(EXIT_FAILED, "%s is incomplete on the hub: a part of %s is missing", c->listing.repo,
                        c->listing.files[v->files[v->n_files - 1]].path);
    if (!c->cost.loads)
        return kit_fail(EXIT_FAILED, "flatkv cannot run %s: %s (use --force to download it anyway)", c->listing.repo,
                        c->cost.reason);
    if (c->fits || c->name.quant[0] != 0)
        return EXIT_GOOD; /* a quantization that the user requests is downloaded even if it does not fit */
    return kit_fail(
        EXIT_NO_FIT,
        "%s does not fit: %s%sneeds %s with %u tokens of context, but only %s is available (%s); %suse --force to download "
        "it anyway",
        c->listing.repo, v->label, v->is_folder ? "it " : " ", kit_bytes(c->cost.total_bytes, needs), c->cost.context,
        kit_bytes(c->available_bytes, has), c->available_source,
        v->is_folder ? "look for a quantized version of the model (GGUF or MLX), or " : "");
}

int pull_choose(hub_session *session, const char *word, bool force, uint64_t available_bytes, pull_choice *c) {
    const model_name *known = model_name_find(word);
    *c = (pull_choice){0};
    if (!hub_name_parse(known != NULL && known->hub != NULL ? known->hub : word, &c->name))
        return kit_fail(EXIT_USAGE, "%s: expected the name of a model on the hub, such as %s or org/name:Q4_K_M", word,
                        model_name_find("smollm2")->hub);
    c->available_bytes = available_bytes != 0 ? available_bytes : fkv_backend_available(FKV_BACKEND_CPU, &c->available_source);
    int code = hub_get_listing(session, c->name.repo, &c->listing);
    if (code != EXIT_GOOD) return code;
    hub_variants_find(&c->listing, &c->variants);
    code = choose_variant(session, c);
    if (code == EXIT_GOOD && !force) code = check_choice(c);
    return code;
}

static void remove_folder(pull_choice *c) {
    empty_folder(c);
    if (c->folder[0] != 0) (void)rmdir(c->folder);
    c->folder[0] = 0;
}

void pull_choice_free(pull_choice *c) {
    remove_folder(c);
    hub_variants_free(&c->variants);
    hub_listing_free(&c->listing);
}

/* ---- download ---- */

int pull_fetch(hub_session *session, pull_choice *c, uint32_t n_connections, bool verify, char path[MODEL_PATH],
               uint64_t *downloaded) {
    const hub_variant *v = c->variant;
    hub_cache cache;
    remove_folder(c);
    int code = hub_cache_open(c->listing.repo, session->stop, &cache);
    if (code == EXIT_GOOD && verify) code = hub_verify(session, &cache, &c->listing, v->files, v->n_files);
    *downloaded = 0;
    if (code == EXIT_GOOD) {
        *downloaded = hub_missing_bytes(&cache, &c->listing, v->files, v->n_files);
        code = hub_cache_check_space(&cache, *downloaded);
    }
    if (code == EXIT_GOOD) code = hub_download(session, &cache, &c->listing, v->files, v->n_files, n_connections);
    if (code == EXIT_GOOD) code = hub_cache_publish(&cache, &c->listing, session->revision, v->files, v->n_files);
    if (code == EXIT_GOOD) {
        (void)hub_cache_file(&cache, &c->listing, &c->listing.files[v->files[0]], path);
        if (v->is_folder) *strrchr(path, '/') = 0;
    }
    hub_cache_close(&cache);
    return code;
}

int pull_offer(const char *word) {
    char bytes[32];
    char path[MODEL_PATH];
    char reply[16] = "";
    uint64_t downloaded = 0;
    hub_session session;
    pull_choice choice = {0};
    if (word == NULL || isatty(STDIN_FILENO) == 0 || isatty(STDERR_FILENO) == 0 || !model_is_remote(word)) return EXIT_GOOD;
    struct sigaction before;
    (void)sigaction(SIGINT, NULL, &before);
    cli_catch_interrupts();
    int code = hub_session_open(&session, cli_interrupted);
    if (code == EXIT_GOOD) code = pull_choose(&session, word, false, 0, &choice);
    if (code == EXIT_GOOD) {
        (void)fprintf(stderr, "%s is not in the cache. Download it (%s)? [Y/n] ", word,
                      kit_bytes(choice.variant->total_bytes, bytes));
        bool yes = fgets(reply, sizeof reply, stdin) != NULL && strchr("Yy\n", reply[0]) != NULL;
        code = yes ? pull_fetch(&session, &choice, PULL_CONNECTIONS, false, path, &downloaded)
                   : kit_fail(EXIT_FAILED, "%s was not downloaded", word);
    }
    if (code == EXIT_INTERRUPTED) (void)kit_fail(0, "interrupted; run the same command to continue the download");
    pull_choice_free(&choice);
    hub_session_close(&session);
    cli_clear_interrupt();
    (void)sigaction(SIGINT, &before, NULL);
    return code;
}
