/* See serve_models.h. */
#include "serve_models.h"

#include "../kit/process.h"
#include "cli.h"
#include "model_names.h"
#include "redis_tls.h"
#include "text.h"

#include <string.h>
#include <unistd.h>

enum { MIN_TOKENS = 1024, SHARE_STEPS = 4096 };

/* ---- names ---- */

/* Returns the default name of a model. For a path, this is the file name; a short name or ORG/NAME[:QUANT] is returned
 * unchanged. */
static const char *default_name(const char *word) {
    const char *slash = strrchr(word, '/');
    const bool is_path = access(word, F_OK) == 0 && model_name_find(word) == NULL;
    return is_path && slash != NULL && slash[1] != 0 ? slash + 1 : word;
}

int serve_models_name(serve_models *s, const kit_texts *words, const kit_texts *aliases) {
    if (words->n == 0) return model_fail_unnamed();
    if (words->n > SERVE_MAX_MODELS)
        return kit_fail(EXIT_USAGE, "too many models: at most %d are supported (got %u)", SERVE_MAX_MODELS, words->n);
    if (aliases->n > words->n)
        return kit_fail(EXIT_USAGE, "--alias was given %u times for %u models: give one name per -m, in the same order",
                        aliases->n, words->n);
    if (words->n > 1 && s->options.device == FKV_BACKEND_MLX)
        return kit_fail(EXIT_USAGE, "several models require --device cpu: MLX runs only one model thread at a time");
    for (s->n = 0; s->n < words->n; s->n++) {
        model_slot *slot = &s->slots[s->n];
        slot->word = words->texts[s->n];
        slot->name = s->n < aliases->n ? aliases->texts[s->n] : default_name(slot->word);
        for (uint32_t i = 0; i < s->n; i++)
            if (strcmp(s->slots[i].name, slot->name) == 0)
                return kit_fail(EXIT_USAGE, "two models have the name %s: give each model a different name with --alias",
                                slot->name);
    }
    return EXIT_GOOD;
}

/* ---- plan ---- */

static bool has_store(const serve_models *s) { return s->engine.prefix_dir != NULL || s->engine.prefix_redis != NULL; }

/* Returns the memory of the open prefix store, which all models share, or 0 if there is none. */
static uint64_t store_memory(const serve_models *s) {
    fkv_prefix_store_stats stats = {0};
    if (s->store.stats != NULL) s->store.stats(s->store.self, &stats);
    return stats.memory;
}

/* Writes the engine configuration for a cache of n_tokens tokens. */
static void configure_engine(const serve_models *s, model_slot *slot, uint64_t n_tokens) {
    const engine_options *o = &s->engine;
    fkv_engine_config c = fkv_engine_config_default();
    c.runner = model_options_runner(&slot->options, (uint32_t)(n_tokens < INT32_MAX ? n_tokens : INT32_MAX));
    c.runner.max_seqs = o->parallel;
    const uint32_t step = c.runner.max_step_tokens;
    const uint32_t spare = step > o->parallel ? step - o->parallel : 0; /* rows left for drafts after one row for each request */
    c.draft_tokens = o->drafts < spare ? o->drafts : spare;
    const uint32_t drafted =
        (o->parallel < 4 ? o->parallel : 4) * c.draft_tokens; /* with more than 4 concurrent requests, drafts rarely help */
    c.runner.max_logit_rows = o->parallel + (drafted < spare ? drafted : spare);
    c.runner.drafts = c.draft_tokens > 0; /* as the engine sets it, so that the plan is the same */
    c.step_ms = o->step_ms;
    c.max_queue = o->queue;
    c.max_wait_s = o->max_wait;
    c.default_new = o->default_new;
    if (s->n > 1) c.runner.memory_limit = 0; /* the limit applies to all models together */
    if (c.runner.memory_limit > store_memory(s)) c.runner.memory_limit -= store_memory(s);
    slot->config = c;
}

/* Writes the configuration of the runner for embeddings: one sequence with 16-bit keys and values. */
static fkv_status configure_embedder(const serve_models *s, model_slot *slot) {
    const uint32_t context = fkv_model_about(slot->model)->context;
    const uint32_t n_tokens = s->engine.embed_tokens != 0 ? s->engine.embed_tokens : context < 8192 ? context : 8192;
    fkv_runner_config *c = &slot->embed_config;
    *c = model_options_runner(&slot->options, n_tokens);
    c->embeddings = true;
    if (c->max_step_tokens > c->max_tokens) c->max_step_tokens = c->max_tokens;
    if (s->n > 1) c->memory_limit = 0;
    return fkv_codec_parse("16/16", &c->k, &c->v);
}

/* Returns the cache capacity, in tokens, that the options request. */
static uint64_t wanted_tokens(const serve_models *s, const model_slot *slot) {
    if (s->options.context != 0) return s->options.context;
    return (uint64_t)fkv_model_about(slot->model)->context * s->engine.parallel;
}

/* Plans all models, each with share / SHARE_STEPS of its requested number of tokens, but at least MIN_TOKENS if it requests
 * that many. *total receives the planned bytes of all models and of the prefix store. */
static fkv_status plan_share(serve_models *s, uint32_t share, uint64_t *total) {
    s->store_bytes = store_memory(s);
    *total = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        model_slot *slot = &s->slots[i];
        fkv_runner_plan plan = {0};
        const uint64_t wanted = wanted_tokens(s, slot);
        const uint64_t least = wanted < MIN_TOKENS ? wanted : MIN_TOKENS;
        const uint64_t n_tokens = wanted * share / SHARE_STEPS;
        configure_engine(s, slot, n_tokens > least ? n_tokens : least);
        fkv_status status = fkv_runner_plan_make(slot->model, &slot->config.runner, &plan);
        if (status != FKV_OK) return status;
        slot->planned_bytes = plan.total_bytes;
        if (has_store(s)) s->store_bytes += fkv_engine_buffer_bytes(&plan, slot->config.runner.page_tokens);
        if (s->engine.embeddings) {
            status = configure_embedder(s, slot);
            if (status == FKV_OK) status = fkv_runner_plan_make(slot->model, &slot->embed_config, &plan);
            if (status != FKV_OK) return status;
            slot->planned_bytes += plan.total_bytes;
        }
        *total += slot->planned_bytes;
    }
    *total += s->store_bytes;
    return FKV_OK;
}

/* Plans all models. If several models do not fit into --memory and -c is not given, the caches of all models are reduced by the
 * same factor. Returns an exit code. */
static int plan_models(serve_models *s) {
    const uint64_t limit = s->options.memory;
    uint64_t total = 0;
    char needed[32];
    char allowed[32];
    fkv_status status = plan_share(s, SHARE_STEPS, &total);
    if (status != FKV_OK) return cli_fail_status(status);
    if (limit != 0 && store_memory(s) >= limit)
        return kit_fail(EXIT_FAILED, "the prefix store needs %s of memory, but --memory allows %s: raise --memory%s",
                        kit_bytes(store_memory(s), needed), kit_bytes(limit, allowed),
                        s->engine.prefix_dir != NULL ? " or lower --prefix-disk" : "");
    if (s->n == 1 || limit == 0 || total <= limit) return EXIT_GOOD;
    if (s->options.context != 0)
        return kit_fail(EXIT_FAILED,
                        "%u models with -c %u need %s in addition to their weights, but --memory allows %s: lower -c", s->n,
                        s->options.context, kit_bytes(total, needed), kit_bytes(limit, allowed));
    uint32_t fits = 0;
    for (uint32_t step = SHARE_STEPS / 2; step > 0; step /= 2) {
        status = plan_share(s, fits + step, &total);
        if (status != FKV_OK) return cli_fail_status(status);
        if (total <= limit) fits += step;
    }
    status = plan_share(s, fits, &total);
    if (status != FKV_OK) return cli_fail_status(status);
    if (total > limit)
        return kit_fail(
            EXIT_FAILED,
            "%u models need at least %s in addition to their weights, but --memory allows %s: raise --memory or serve fewer models",
            s->n, kit_bytes(total, needed), kit_bytes(limit, allowed));
    return EXIT_GOOD;
}

/* ---- open ---- */

static int load_models(serve_models *s) {
    for (uint32_t i = 0; i < s->n; i++) {
        model_slot *slot = &s->slots[i];
        slot->options = s->options;
        slot->options.model = slot->word;
        int code = model_options_load(&slot->options, false, &slot->model);
        if (code != EXIT_GOOD) return code;
    }
    return EXIT_GOOD;
}

static void report_store(const fkv_store_stats *stats, const char *folder) {
    char used[32];
    char most[32];
    char buffers[32];
    (void)fprintf(stderr, "prefix store %s: %llu pages, %s of %s on disk; %s of memory for buffers and index\n", folder,
                  (unsigned long long)stats->usage.pages, kit_bytes(stats->usage.bytes, used),
                  kit_bytes(stats->usage.max_bytes, most), kit_bytes(stats->buffer_bytes + stats->usage.memory, buffers));
}

/* Prints the planned memory of each model and the total. */
static void report_plan(const serve_models *s) {
    uint64_t total = store_memory(s);
    uint64_t weights = 0;
    char bytes[32];
    char weight_bytes[32];
    char limit[32];
    for (uint32_t i = 0; i < s->n; i++) {
        const model_slot *slot = &s->slots[i];
        fkv_engine_stats stats;
        fkv_engine_stats_now(slot->engine, &stats);
        (void)fprintf(stderr, "%s%scache of %u tokens for %u parallel requests, %s; up to %u tokens per request\n",
                      s->n > 1 ? slot->name : "", s->n > 1 ? ": " : "", slot->config.runner.max_tokens, s->engine.parallel,
                      kit_bytes(stats.plan.total_bytes, bytes), stats.max_request_tokens);
        model_report_chat(s->n > 1 ? slot->name : "", slot->model);
        if (i == 0 && s->engine.prefix_dir != NULL) report_store(&stats.store, s->engine.prefix_dir);
        if (i == 0 && s->engine.prefix_redis != NULL && s->engine.prefix_dir != NULL)
            (void)fprintf(stderr, "prefixes are also shared through %s\n", s->engine.prefix_redis);
        if (i == 0 && s->engine.prefix_redis != NULL && s->engine.prefix_dir == NULL)
            (void)fprintf(stderr, "prefix store %s: %s of memory for buffers and tables\n", s->engine.prefix_redis,
                          kit_bytes(stats.store.buffer_bytes + stats.store.usage.memory, bytes));
        if (slot->embedder != NULL)
            (void)fprintf(stderr, "%s%sembeddings of up to %u tokens, %s\n", s->n > 1 ? slot->name : "", s->n > 1 ? ": " : "",
                          slot->embed_config.max_tokens, kit_bytes(slot->planned_bytes - stats.plan.total_bytes, bytes));
        total += slot->planned_bytes + stats.store.buffer_bytes;
        weights += stats.plan.packed_bytes + stats.plan.mapped_bytes;
    }
    if (s->n == 1) return;
    (void)fprintf(stderr, "%u models: %s", s->n, kit_bytes(total, bytes));
    if (s->options.memory != 0) (void)fprintf(stderr, " of %s", kit_bytes(s->options.memory, limit));
    (void)fprintf(stderr, ", in addition to %s of weights\n", kit_bytes(weights, weight_bytes));
}

static void log_to_stderr(void *user, const char *line) {
    (void)user;
    (void)fprintf(stderr, "%s\n", line);
}

/* Reads the first line of a file, which must not be empty. *password points into `text`. Returns an exit code. */
static int read_password(text_buffer *text, const char *path, const char **password) {
    const int code = text_read(text, path);
    if (code != EXIT_GOOD) return code;
    text_add(text, "", 0); /* allocates the buffer even if the file is empty */
    *password = strtok(text->bytes, "\r\n");
    return *password != NULL ? EXIT_GOOD : kit_fail(EXIT_USAGE, "the password file %s is empty: expected a line of text", path);
}

static int read_secret(text_buffer *text, const char *path) {
    const int code = text_read(text, path);
    if (code != EXIT_GOOD || text->n > 0) return code;
    return kit_fail(EXIT_USAGE, "the secret file %s is empty: expected at least 16 random bytes", path);
}

/* Opens the store on Redis servers. Returns an exit code. */
static int open_redis(serve_models *s, fkv_prefix_store *store) {
    const engine_options *o = &s->engine;
    text_buffer text = {0};
    text_buffer secret = {0};
    const char *password = NULL;
    int code = EXIT_GOOD;
    if (o->prefix_password_file != NULL) code = read_password(&text, o->prefix_password_file, &password);
    if (o->prefix_secret_file != NULL && code == EXIT_GOOD) code = read_secret(&secret, o->prefix_secret_file);
    if (code == EXIT_GOOD && strncmp(o->prefix_redis, "rediss:", 7) == 0) code = redis_tls_open(o->prefix_ca_file, &s->tls);
    if (code == EXIT_GOOD) {
        const fkv_prefix_redis_config config = {.url = o->prefix_redis,
                                                .tls = s->tls.self != NULL ? &s->tls : NULL,
                                                .password = password,
                                                .secret = (const uint8_t *)secret.bytes,
                                                .n_secret = secret.n,
                                                .timeout_s = o->prefix_timeout_ms * 1e-3,
                                                .log = log_to_stderr};
        const fkv_status status = fkv_prefix_redis_open(&config, store);
        if (status != FKV_OK) code = cli_fail_status(status);
    }
    text_free(&text);
    text_free(&secret);
    return code;
}

/* Opens the prefix stores that the options select, if any, and combines them. Returns an exit code. */
static int open_store(serve_models *s) {
    const engine_options *o = &s->engine;
    fkv_prefix_store redis = {0};
    if (o->prefix_dir != NULL) {
        const fkv_status status = fkv_prefix_folder_open(o->prefix_dir, o->prefix_disk, &s->store);
        if (status != FKV_OK) return cli_fail_status(status);
    }
    if (o->prefix_redis == NULL) return EXIT_GOOD;
    if (o->prefix_dir == NULL) return open_redis(s, &s->store);
    const int code = open_redis(s, &redis);
    if (code != EXIT_GOOD) return code;
    const fkv_prefix_store folder = s->store;
    const fkv_status status = fkv_prefix_pair_open(&folder, &redis, &s->store);
    if (status == FKV_OK) return EXIT_GOOD;
    redis.close(redis.self);
    return cli_fail_status(status);
}

static fkv_status open_engines(serve_models *s) {
    fkv_status status = FKV_OK;
    process_memory before = {0};
    (void)process_memory_now(&before);
    s->base_bytes = before.anonymous_bytes;
    for (uint32_t i = 0; i < s->n && status == FKV_OK; i++) {
        model_slot *slot = &s->slots[i];
        if (has_store(s)) slot->config.store = &s->store;
        if (i > 0) slot->config.peer = s->slots[0].engine;
        status = fkv_engine_open(slot->model, &slot->config, &slot->engine);
        if (status != FKV_OK || !s->engine.embeddings) continue;
        fkv_engine_stats stats;
        fkv_engine_stats_now(slot->engine, &stats);
        status = fkv_runner_open(slot->model, &slot->embed_config, &slot->embedder);
        fkv_runner_plan plan;
        if (status == FKV_OK) status = fkv_runner_plan_make(slot->model, &slot->embed_config, &plan);
        if (status != FKV_OK) continue;
        slot->planned_bytes = stats.plan.total_bytes + plan.total_bytes;
        s->base_bytes += plan.total_bytes;
    }
    return status;
}

int serve_models_open(serve_models *s) {
    int code = load_models(s);
    if (code == EXIT_GOOD) code = open_store(s); /* opened before planning, because its memory is part of the plan */
    if (code == EXIT_GOOD) code = plan_models(s);
    if (code != EXIT_GOOD) return code;
    fkv_status status = open_engines(s);
    if (status != FKV_OK) code = cli_fail_status(status);
    if (status == FKV_NO_MEMORY && s->options.memory != 0 && s->store_bytes != 0) {
        char bytes[32];
        (void)fprintf(stderr, "[--memory includes %s for the prefix store and its buffers]\n", kit_bytes(s->store_bytes, bytes));
    }
    if (code != EXIT_GOOD) return code;
    report_plan(s);
    return EXIT_GOOD;
}

void serve_models_subjects(const serve_models *s, serve_subject *subjects) {
    for (uint32_t i = 0; i < s->n; i++) {
        const model_slot *slot = &s->slots[i];
        subjects[i] = (serve_subject){.model = slot->model,
                                      .engine = slot->engine,
                                      .model_name = slot->name,
                                      .parallel = s->engine.parallel,
                                      .embedder = slot->embedder,
                                      .embed_tokens = slot->embed_config.max_tokens};
    }
}

void serve_models_close(serve_models *s) {
    for (uint32_t i = 0; i < s->n; i++) {
        fkv_runner_close(s->slots[i].embedder);
        fkv_engine_close(s->slots[i].engine);
    }
    if (s->store.close != NULL) s->store.close(s->store.self);
    redis_tls_close(&s->tls);
    for (uint32_t i = 0; i < s->n; i++) fkv_model_close(s->slots[i].model);
}
