/* Every family against Hugging Face's transformers: the logits of tiny models (golden_models.h), prompts in chunks and token by
 * token, within 1e-3 relative L2.
 *
 *   parity_models [--mlx] [--json] [--gguf FOLDER] [NAME ...]
 *
 * With --gguf the models are FOLDER/NAME.gguf (scripts/make-model-ggufs), those that are there.
 *
 * 16-bit pages alone account for some 3e-4 (llama.cpp is as far with its f16 cache); a feature that was left out would show with
 * 2e-2 or more, which is in each golden.
 */
#include "golden_models.h"

#ifdef FKV_HAVE_MLX
#include <flatkv/mlx.h>
#endif

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const double LIMIT = 1e-3;
enum { CHUNK = 48, N_SINGLE = 12 };

typedef struct options {
    fkv_backend backend;
    bool json;
    const char *gguf; /* folder, or NULL */
    bool any_name;
    const char *const *names; /* NULL-terminated */
} options;

static bool is_wanted(const options *o, const char *name) {
    if (!o->any_name) return true;
    for (const char *const *n = o->names; *n != NULL; n++)
        if (strcmp(*n, name) == 0) return true;
    return false;
}

static double least_change(const golden_model *g) {
    double least = 1e9;
    const char *label = NULL;
    json_t *change = NULL;
    json_t *features = json_object_get(g->json, "features");
    json_object_foreach(features, label, change) {
        if (json_number_value(change) < least) least = json_number_value(change);
    }
    return least;
}

/* The path of the model to load; false: there is no such GGUF file. */
static bool find_model(const options *o, const golden_model *g, char path[1024]) {
    if (o->gguf == NULL) {
        (void)snprintf(path, 1024, "%s", g->folder);
        return true;
    }
    (void)snprintf(path, 1024, "%s/%s.gguf", o->gguf, g->name);
    return access(path, F_OK) == 0;
}

static bool check(const options *o, const char *name, bool *first) {
    static golden_model g;
    fkv_model_config config = fkv_model_config_default();
    fkv_model *model = NULL;
    config.backend = o->backend;
    golden_model_open(&g, name);
    char path[1024];
    if (!find_model(o, &g, path)) {
        golden_model_close(&g);
        return true;
    }
    fkv_status status = fkv_model_load(path, &config, &model);
    if (status != FKV_OK) {
        (void)fprintf(stderr, "%s: %s\n", name, fkv_message());
        golden_model_close(&g);
        return false;
    }
    double chunked = golden_model_distance(&g, model, CHUNK, N_SINGLE);
    double single = golden_model_distance(&g, model, 1, g.n_tokens);
    double least = least_change(&g);
    bool good = chunked <= LIMIT && single <= LIMIT && least >= 2e-2;
    if (o->json)
        printf("%s{\"model\": \"%s\", \"architecture\": \"%s\", \"chunked\": %.2e, \"single\": %.2e}", *first ? "" : ",\n", name,
               fkv_model_about(model)->architecture, chunked, single);
    else
        printf("%-24s %-10s chunks %.1e  token by token %.1e  least feature %.2g%s\n", name, fkv_model_about(model)->architecture,
               chunked, single, least, good ? "" : "  FAILED");
    *first = false;
    (void)fflush(stdout);
    fkv_model_close(model);
    golden_model_close(&g);
    return good;
}

int main(int argc, char **argv) {
    static char names[GOLDEN_MAX_MODELS][GOLDEN_NAME];
    options o = {.names = (const char *const *)argv + 1};
    for (; *o.names != NULL && (*o.names)[0] == '-'; o.names++) {
        if (strcmp(*o.names, "--json") == 0) o.json = true;
        if (strcmp(*o.names, "--mlx") == 0) o.backend = FKV_BACKEND_MLX;
        if (strcmp(*o.names, "--gguf") == 0 && o.names[1] != NULL) o.gguf = *++o.names;
    }
    o.any_name = *o.names != NULL;
#ifdef FKV_HAVE_MLX
    if (o.backend == FKV_BACKEND_MLX && fkv_mlx_register() != FKV_OK) return 1;
#endif
    uint32_t n_names = golden_model_names(names);
    uint32_t n_bad = 0;
    uint32_t n = 0;
    bool first = true;
    if (o.json) printf("{\"models\": [\n");
    for (uint32_t i = 0; i < n_names; i++)
        if (is_wanted(&o, names[i]) && ++n > 0) n_bad += check(&o, names[i], &first) ? 0 : 1;
    if (o.json) printf("]}\n");
    (void)argc;
    (void)fprintf(stderr, "%u models, %u failed\n", n, n_bad);
    return n > 0 && n_bad == 0 ? 0 : 1;
}
