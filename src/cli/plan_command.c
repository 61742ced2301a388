/* flatkv plan: prints the memory that a model, or a cache of a given shape, needs. Compares this memory with that of a 16-bit
 * cache and finds the longest context that fits in the machine's memory. A config.json file is enough to plan a model that has
 * not been downloaded. */
#include "model_names.h"
#include "model_options.h"
#include "pull_model.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: flatkv plan [MODEL] [-c TOKENS] [options]                 plans a model and its cache; MODEL may be\n"
    "                                                                  a config.json without weights, or a model\n"
    "                                                                  on huggingface.co (ORG/NAME[:QUANT]), of which\n"
    "                                                                  only config.json or the GGUF header is read\n"
    "       flatkv plan --layers N --heads Q/KV/DIM [options]         plans a cache of the given shape\n";

typedef struct plan_options {
    model_options model;
    uint32_t layers;
    const char *heads;
    uint32_t seqs;
    uint64_t machine;
    double gpu_share;   /* fraction of the machine's memory that --device mlx may use; 0 selects the default */
    double weight_bits; /* bits per weight; 0 selects the value in config.json */
} plan_options;

/* Subject of the plan: a model, or a cache of a given shape. */
typedef struct subject {
    plan_options *o;
    fkv_model *model;      /* the planned model; NULL for a cache without a model */
    uint8_t *channel_bits; /* bit widths of key channels for a cache without a model; NULL if the codec is not calibrated */
    fkv_config shape;
    uint32_t n_tokens;
    pull_choice remote; /* the model on a hub, if it is not on this machine */
} subject;

/* Memory in which a plan must fit. */
typedef struct budget {
    uint64_t bytes;   /* without weights */
    uint64_t whole;   /* including weights */
    uint64_t weights; /* weights that must fit in `whole` */
    const char *source;
} budget;

static uint64_t weights_of(const fkv_runner_plan *plan) { return plan->packed_bytes + plan->mapped_bytes; }

static uint32_t trained_for(const subject *s) { return s->model != NULL ? fkv_model_about(s->model)->context : 0; }

static bool is_bounded(const subject *s) { return s->o->model.max_kv != 0; }

static bool is_config(const subject *s) { return s->model != NULL && fkv_model_about(s->model)->config_only; }

/* Scales the weight size to --weight-bits per parameter if only the config.json of the model is available. */
static void scale_weights(const subject *s, fkv_runner_plan *plan) {
    if (!is_config(s) || !(s->o->weight_bits > 0) || weights_of(plan) == 0) return;
    double wanted = (double)fkv_model_about(s->model)->n_parameters * s->o->weight_bits / 8;
    double factor = wanted / (double)weights_of(plan);
    plan->packed_bytes = (uint64_t)((double)plan->packed_bytes * factor);
    plan->mapped_bytes = (uint64_t)((double)plan->mapped_bytes * factor);
    plan->touched_bytes = (uint64_t)((double)plan->touched_bytes * factor);
}

/* The 16-bit codec that all plans are compared with. */
static const codec_choice HALVES = {.k = {.bits = 16}, .v = {.bits = 16}};

static fkv_status plan_shape(const subject *s, uint32_t n_tokens, const codec_choice *codec, fkv_runner_plan *plan) {
    fkv_config c = s->shape;
    c.max_tokens = n_tokens;
    if (codec != NULL) c.layer.k = codec->k;
    if (codec != NULL) c.layer.v = codec->v;
    c.layer.channel_bits = codec != NULL ? NULL : s->channel_bits;
    *plan = (fkv_runner_plan){0};
    fkv_status status = fkv_plan_make(&c, &plan->cache);
    plan->total_bytes = plan->cache.total_bytes;
    return status;
}

/* Plans the memory for n_tokens tokens with the given codec, or with the configured codec if codec is NULL. */
static fkv_status plan_subject(const subject *s, uint32_t n_tokens, const codec_choice *codec, fkv_runner_plan *plan) {
    if (s->model == NULL) return plan_shape(s, n_tokens, codec, plan);
    fkv_runner_config c = model_options_runner(&s->o->model, n_tokens);
    c.max_seqs = s->o->seqs;
    if (codec != NULL) codec_apply(codec, &c);
    fkv_status status = fkv_runner_plan_make(s->model, &c, plan);
    if (status == FKV_OK) scale_weights(s, plan);
    return status;
}

/* Returns the longest context whose plan needs at most `bytes`, or 0 if there is none. Uses bisection, because plans grow with
 * the context. */
static uint32_t longest_context(const subject *s, const codec_choice *codec, uint64_t bytes) {
    uint32_t fits = 0;
    uint32_t too_long = INT32_MAX;
    while (too_long - fits > 1) {
        fkv_runner_plan plan;
        uint32_t tokens = fits + (too_long - fits) / 2;
        if (plan_subject(s, tokens, codec, &plan) == FKV_OK && plan.total_bytes <= bytes)
            fits = tokens;
        else
            too_long = tokens;
    }
    return fits;
}

/* ---- table ---- */

enum { MAX_COLUMNS = 4 };

typedef struct column {
    char name[24];
    fkv_runner_plan plan;
} column;

typedef struct table {
    column columns[MAX_COLUMNS];
    uint32_t n;
} table;

static void add_column(table *t, const subject *s, const char *name, uint32_t n_tokens, const codec_choice *codec) {
    column *c = &t->columns[t->n];
    if (plan_subject(s, n_tokens, codec, &c->plan) != FKV_OK) return;
    snprintf(c->name, sizeof c->name, "%s", name);
    t->n++;
}

static void print_line(const table *t, const char *name, size_t offset) {
    char text[32];
    printf("%-22s", name);
    for (uint32_t i = 0; i < t->n; i++) {
        uint64_t bytes;
        memcpy(&bytes, (const char *)&t->columns[i].plan + offset, sizeof bytes);
        printf(" %16s", kit_bytes(bytes, text));
    }
    putchar('\n');
}

/* Prints which files flatkv pull would download. */
static void print_remote(const pull_choice *remote) {
    char size[32];
    printf("Not downloaded; flatkv pull would download %s (%s).\n", kit_bytes(remote->variant->total_bytes, size),
           remote->variant->is_folder ? "safetensors" : remote->variant->label);
}

/* Prints the row size of the first layer with latent attention. Earlier layers may be recurrent. */
static void print_latent(const fkv_model *model) {
    fkv_model_layer layer = {0};
    if (fkv_model_about(model)->latent_dim == 0) return;
    for (uint32_t i = 0; layer.rope_dim == 0; i++)
        if (fkv_model_layer_about(model, i, &layer) != FKV_OK) return;
    printf(
        "Each layer with attention stores %u latent channels and %u RoPE channels per token, for keys and values of all heads.\n",
        layer.head_dim, layer.rope_dim);
}

static void print_head(const subject *s) {
    const char *bounded = is_bounded(s) ? ", bounded" : "";
    if (s->model == NULL) {
        const fkv_layer_config *l = &s->shape.layer;
        printf("%u layers, %u/%u/%u, %u tokens%s\n\n", s->shape.n_layers, l->n_q_heads, l->n_kv_heads, l->head_dim, s->n_tokens,
               bounded);
        return;
    }
    const fkv_model_info *a = fkv_model_about(s->model);
    char parameters[64] = "";
    if (is_config(s)) (void)snprintf(parameters, sizeof parameters, "%.3g billion parameters, ", (double)a->n_parameters / 1e9);
    printf("%s (%s, %u layers, %u/%u/%u, %strained for %u tokens), %u tokens%s\n", s->o->model.model, a->architecture,
           a->n_layers, a->n_q_heads, a->n_kv_heads, a->head_dim, parameters, a->context, s->n_tokens, bounded);
    print_latent(s->model);
    if (is_config(s)) printf("The size of the weights is an estimate based on config.json.\n");
    if (s->remote.variant != NULL) print_remote(&s->remote);
    putchar('\n');
}

static void print_total_with_weights(const table *t) {
    char text[32];
    printf("%-22s", "total with weights");
    for (uint32_t i = 0; i < t->n; i++) {
        const fkv_runner_plan *plan = &t->columns[i].plan;
        printf(" %16s", kit_bytes(plan->total_bytes + weights_of(plan), text));
    }
    putchar('\n');
}

/* Prints the number and size of a model's recurrent states, and the number of tokens whose keys and values need as much memory as
 * one state. */
static void print_states(const subject *s, const fkv_plan *plan) {
    char all[32];
    char one[32];
    if (plan->state_bytes == 0) return;
    printf("\nrecurrent states: %s of the pages are %u states of %s: two for each of %u sequence%s, and %u snapshots\n",
           kit_bytes(plan->state_slots * plan->state_bytes, all), plan->state_slots, kit_bytes(plan->state_bytes, one),
           s->o->seqs, s->o->seqs == 1 ? "" : "s", plan->state_slots - 2 * s->o->seqs);
    if (plan->token_bytes != 0)
        printf("one snapshot needs as much memory as %llu tokens of keys and values\n",
               (unsigned long long)(plan->state_bytes / plan->token_bytes));
}

static void print_verdict(const subject *s, const fkv_runner_plan *plan, const budget *b, uint32_t longest, uint32_t longest_16) {
    char needs[32];
    char has[32];
    bool fits = plan->total_bytes <= b->bytes;
    uint64_t needed = plan->total_bytes + b->weights;
    uint64_t mapped = weights_of(plan) - b->weights;
    char in_file[32];
    printf("\n%s: %s of %s (%s)\n", fits ? "It fits" : "It does not fit", kit_bytes(needed, needs), kit_bytes(b->whole, has),
           b->source);
    if (fits && s->o->model.memory == 0 && mapped > b->whole - needed)
        printf(
            "the mapped weights (%s) do not fit in the remaining memory, so parts of them are read from the file for every token\n",
            kit_bytes(mapped, in_file));
    if (is_bounded(s)) return;
    printf("longest context that fits: %u tokens%s, or %u with a 16-bit cache\n", longest, longest > 0 ? " (last column)" : "",
           longest_16);
    uint32_t trained = trained_for(s);
    if (trained != 0 && longest > trained)
        printf("the model was trained for %u tokens; longer contexts degrade its answers\n", trained);
}

/* Suggests the codec 8/4 if it needs less memory than the chosen codec. This is the case for short sequences, because sealed
 * layers keep the newest pages of every sequence open, with 8 bits per value. */
static void suggest_smaller_codecs(const subject *s, const fkv_runner_plan *plan) {
    const codec_choice rows = {.k = {8, 64}, .v = {4, 64}};
    fkv_runner_plan by_row;
    char text[32];
    if (plan_subject(s, s->n_tokens, &rows, &by_row) == FKV_OK && by_row.total_bytes < plan->total_bytes)
        printf("--codecs 8/4 needs less memory for this number of tokens: %s without weights\n",
               kit_bytes(by_row.total_bytes, text));
}

static void print_table(const subject *s, const budget *b) {
    table t = {0};
    bool has_weights = s->model != NULL;
    uint32_t longest = is_bounded(s) ? 0 : longest_context(s, NULL, b->bytes);
    uint32_t longest_16 = is_bounded(s) ? 0 : longest_context(s, &HALVES, b->bytes);
    print_head(s);
    add_column(&t, s, "this plan", s->n_tokens, NULL);
    add_column(&t, s, "16-bit", s->n_tokens, &HALVES);
    char name[24];
    snprintf(name, sizeof name, "%u tokens", longest);
    if (longest > 0) add_column(&t, s, name, longest, NULL);
    printf("%-22s", "");
    for (uint32_t i = 0; i < t.n; i++) printf(" %16s", t.columns[i].name);
    putchar('\n');
    if (has_weights) print_line(&t, "weights, mapped", offsetof(fkv_runner_plan, mapped_bytes));
    if (has_weights) print_line(&t, "  read per token", offsetof(fkv_runner_plan, touched_bytes));
    if (has_weights) print_line(&t, "weights, repacked", offsetof(fkv_runner_plan, packed_bytes));
    print_line(&t, "pages", offsetof(fkv_runner_plan, cache.slab_bytes));
    print_line(&t, "tables", offsetof(fkv_runner_plan, cache.tables_bytes));
    print_line(&t, "scratch", offsetof(fkv_runner_plan, cache.scratch_bytes));
    print_line(&t, "worker stacks", offsetof(fkv_runner_plan, cache.stacks_bytes));
    if (has_weights) print_line(&t, "activations", offsetof(fkv_runner_plan, activations_bytes));
    print_line(&t, has_weights ? "total without weights" : "total", offsetof(fkv_runner_plan, total_bytes));
    if (has_weights) print_total_with_weights(&t);
    print_line(&t, "one token", offsetof(fkv_runner_plan, cache.token_bytes));
    print_states(s, &t.columns[0].plan.cache);
    print_verdict(s, &t.columns[0].plan, b, longest, longest_16);
    if (s->o->model.codecs.codecs[0].k.kind == FKV_CODEC_SEALED && !s->o->model.codecs.named)
        suggest_smaller_codecs(s, &t.columns[0].plan);
}

static int print_plan_json(const subject *s, const fkv_runner_plan *plan, const budget *b) {
    fkv_runner_plan wide = {0};
    (void)plan_subject(s, s->n_tokens, &HALVES, &wide);
    kit_json *json = kit_json_begin();
    if (s->model != NULL)
        model_options_json(&s->o->model, fkv_model_about(s->model), json);
    else
        codec_json(&s->o->model.codecs.codecs[0], json);
    kit_json_integer(json, "tokens", s->n_tokens);
    kit_json_integer(json, "total_bytes", plan->total_bytes);
    kit_json_integer(json, "slab_bytes", plan->cache.slab_bytes);
    kit_json_integer(json, "tables_bytes", plan->cache.tables_bytes);
    kit_json_integer(json, "scratch_bytes", plan->cache.scratch_bytes);
    kit_json_integer(json, "stacks_bytes", plan->cache.stacks_bytes);
    kit_json_integer(json, "token_bytes", plan->cache.token_bytes);
    if (plan->cache.state_bytes != 0) {
        kit_json_integer(json, "state_bytes", plan->cache.state_bytes);
        kit_json_integer(json, "state_slots", plan->cache.state_slots);
    }
    if (s->model != NULL) {
        kit_json_integer(json, "total_with_weights_bytes", plan->total_bytes + weights_of(plan));
        kit_json_integer(json, "parameters", fkv_model_about(s->model)->n_parameters);
        kit_json_integer(json, "trained_context", trained_for(s));
        kit_json_integer(json, "activations_bytes", plan->activations_bytes);
        kit_json_integer(json, "weights_mapped_bytes", plan->mapped_bytes);
        kit_json_integer(json, "weights_packed_bytes", plan->packed_bytes);
        kit_json_integer(json, "weights_touched_bytes", plan->touched_bytes);
    }
    kit_json_integer(json, "total_bytes_16bit", wide.total_bytes);
    kit_json_integer(json, "available_bytes", b->bytes);
    kit_json_text(json, "available_source", b->source);
    kit_json_bool(json, "fits", plan->total_bytes <= b->bytes);
    kit_json_integer(json, "longest_context", is_bounded(s) ? 0 : longest_context(s, NULL, b->bytes));
    kit_json_integer(json, "longest_context_16bit", is_bounded(s) ? 0 : longest_context(s, &HALVES, b->bytes));
    return kit_json_print(json);
}

/* ---- command ---- */

/* Assigns arbitrary bit widths to the channels of calibrated keys. Only the average width, 4 or 3 bits, affects the size of the
 * cache. */
static void make_channel_bits(subject *s) {
    enum { MOST_HEADS = 65536, QUAD = 4 };
    const fkv_layer_config *l = &s->shape.layer;
    if (l->k.kind != FKV_CODEC_CALIBRATED || l->n_kv_heads > MOST_HEADS) return;
    s->channel_bits = kit_alloc((size_t)l->n_kv_heads * FKV_MAX_HEAD_DIM);
    for (size_t i = 0; i < (size_t)l->n_kv_heads * FKV_MAX_HEAD_DIM; i++)
        s->channel_bits[i] = l->k.bits == 3 && i / QUAD % 2 == 0 ? 2 : 4;
}

static int make_shape(subject *s) {
    const model_options *m = &s->o->model;
    fkv_config *c = &s->shape;
    char rest = 0;
    *c = fkv_config_default();
    c->layer.k = m->codecs.codecs[0].k;
    c->layer.v = m->codecs.codecs[0].v;
    c->layer.window = m->max_kv;
    c->layer.n_sinks = m->max_kv != 0 ? m->n_sinks : 0;
    c->rotate = m->codecs.codecs[0].rotate;
    c->max_seqs = s->o->seqs;
    c->max_step_tokens = m->chunk;
    c->n_threads = m->n_threads;
    if (m->device != FKV_BACKEND_CPU)
        return kit_fail(EXIT_USAGE, "--device: a cache specified by --layers and --heads can only be planned for the CPU");
    if (s->o->layers == 0 || s->o->heads == NULL) return kit_fail(EXIT_USAGE, "--layers and --heads must be given together");
    if (sscanf(s->o->heads, "%u/%u/%u%c", &c->layer.n_q_heads, &c->layer.n_kv_heads, &c->layer.head_dim, &rest) != 3)
        return kit_fail(EXIT_USAGE, "--heads %s: expected query heads/KV heads/head dimension, such as 32/8/128", s->o->heads);
    c->n_layers = s->o->layers;
    s->n_tokens = m->context != 0 ? m->context : 32768;
    make_channel_bits(s);
    return EXIT_GOOD;
}

static bool has_safetensors(const char *folder) {
    bool found = false;
    DIR *files = opendir(folder);
    for (const struct dirent *entry = NULL; files != NULL && (entry = readdir(files)) != NULL;) {
        const char *end = strrchr(entry->d_name, '.');
        found = found || (end != NULL && strcmp(end, ".safetensors") == 0);
    }
    if (files != NULL) (void)closedir(files);
    return found;
}

/* Returns the memory available for a model on the machine given by --machine, or 0 without --machine. On the CPU, an eighth of
 * the memory, but at least 2 GB, is left to the operating system. On MLX, the result is the fraction of the memory that the GPU
 * of a Mac may use. */
static uint64_t usable_memory(const plan_options *o) {
    const uint64_t GB = (uint64_t)1 << 30;
    if (o->machine == 0) return 0;
    if (o->model.device == FKV_BACKEND_MLX) {
        double share = o->gpu_share > 0 ? o->gpu_share : o->machine <= 36 * GB ? 2.0 / 3 : 0.75;
        return (uint64_t)((double)o->machine * share);
    }
    uint64_t held = o->machine / 8 > 2 * GB ? o->machine / 8 : 2 * GB;
    return o->machine > held ? o->machine - held : 0;
}

/* Reads the config.json or the GGUF header of a model on a hub. */
static int load_remote(subject *s, model_options *m) {
    hub_session session;
    cli_catch_interrupts();
    int code = hub_session_open(&session, cli_interrupted);
    if (code == EXIT_GOOD) code = pull_choose(&session, m->model, true, usable_memory(s->o), &s->remote);
    hub_session_close(&session);
    m->model = s->remote.head;
    return code;
}

/* Loads the model. If the folder has a config.json but no weights, only the config.json is read. */
static int load_model(subject *s) {
    model_options m = s->o->model;
    char config[MODEL_PATH];
    bool is_name = m.model == NULL || model_name_find(m.model) != NULL;
    if (m.model != NULL && model_is_remote(m.model)) {
        int code = load_remote(s, &m);
        if (code != EXIT_GOOD) return code;
    } else if (!is_name && snprintf(config, sizeof config, "%s/config.json", m.model) < MODEL_PATH && access(config, R_OK) == 0 &&
               !has_safetensors(m.model))
        m.model = config;
    int code = model_options_load(&m, true, &s->model);
    if (code != EXIT_GOOD) return code;
    s->n_tokens = m.context != 0 ? m.context : fkv_model_about(s->model)->context;
    s->o->model.codecs = m.codecs;
    return EXIT_GOOD;
}

static budget find_budget(const subject *s, const fkv_runner_plan *plan) {
    const uint64_t GB = (uint64_t)1 << 30;
    static char source[96];
    budget b = {0};
    b.weights = plan->packed_bytes; /* on this machine, mapped weight files do not count, because they are in the page cache */
    if (s->o->machine != 0) {
        b.whole = usable_memory(s->o);
        (void)snprintf(source, sizeof source, "usable memory of a %.4g GB machine", (double)s->o->machine / (double)GB);
        b.source = source;
        b.weights = weights_of(plan);
    } else {
        const char *found = NULL;
        b.whole = fkv_backend_available((fkv_backend)s->o->model.device, &found);
        (void)snprintf(source, sizeof source, "available on this machine: %s", found != NULL ? found : "");
        b.source = source;
    }
    b.bytes = b.whole - (b.whole < b.weights ? b.whole : b.weights);
    if (s->o->model.memory != 0 && s->o->model.memory < b.bytes) {
        b.bytes = s->o->model.memory;
        b.whole = b.bytes + b.weights;
        b.source = "--memory, plus the weights";
    }
    return b;
}

/* Reports that the plan does not fit and suggests changes that would make it fit. Returns an exit code. */
static int fail_to_fit(const subject *s, const fkv_runner_plan *plan, const budget *b) {
    char needs[32];
    char has[32];
    uint64_t weights = weights_of(plan);
    if (s->o->machine != 0 && weights > b->whole)
        return kit_fail(
            EXIT_NO_FIT,
            "the weights alone need %s, but only %s is available (%s): use a smaller model, fewer bits per weight, or a larger machine",
            kit_bytes(weights, needs), kit_bytes(b->whole, has), b->source);
    const codec_choice *codec = &s->o->model.codecs.codecs[0];
    const bool is_latent = s->model != NULL && fkv_model_about(s->model)->latent_dim != 0;
    const bool has_more_bits = codec->k.bits > 4 || (codec->v.bits > 4 && !is_latent);
    const char *fewer_bits = has_more_bits ? ", use fewer bits (--codecs sealed)" : "";
    uint32_t longest = is_bounded(s) ? 0 : longest_context(s, NULL, b->bytes);
    if (longest > 0)
        return kit_fail(EXIT_NO_FIT,
                        "the plan does not fit in memory: lower -c from %u to %u%s, or use a sliding window (--max-kv)",
                        s->n_tokens, longest, fewer_bits);
    return kit_fail(
        EXIT_NO_FIT,
        "the plan does not fit in memory even with the shortest context: it needs %s%s, but only %s is available; use a smaller "
        "model%s, or lower --chunk or --seqs",
        kit_bytes(plan->total_bytes, needs), s->model != NULL ? " in addition to the weights" : "", kit_bytes(b->bytes, has),
        fewer_bits);
}

static int run_plan(subject *s) {
    bool is_shape = s->o->layers != 0 || s->o->heads != NULL;
    int code = is_shape ? make_shape(s) : load_model(s);
    if (code != EXIT_GOOD) return code;
    fkv_runner_plan plan;
    fkv_status status = plan_subject(s, s->n_tokens, NULL, &plan);
    if (status != FKV_OK) {
        (void)cli_fail_status(status);
        return EXIT_USAGE;
    }
    budget b = find_budget(s, &plan);
    if (s->o->model.json)
        code = print_plan_json(s, &plan, &b);
    else
        print_table(s, &b);
    if (code != EXIT_GOOD || plan.total_bytes <= b.bytes) return code;
    return fail_to_fit(s, &plan, &b);
}

int cli_plan(int argc, char **argv) {
    plan_options o = {.model = model_options_default(), .seqs = 1};
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    model_options_drop(common, "seed");
    static kit_texts words;
    const kit_option own[] = {
        KIT_HEADING("Plan"),
        {"model", 0, OPTION_POSITIONAL, &words, 0, "MODEL", "same as -m MODEL"},
        {"layers", 0, OPTION_U32, &o.layers, INT32_MAX, "N", "number of layers"},
        {"heads", 0, OPTION_TEXT, &o.heads, 0, "Q/KV/DIM", "query heads/KV heads/head dimension, such as 32/8/128"},
        {"seqs", 0, OPTION_COUNT, &o.seqs, 65535, "N", "sequences open at the same time (default 1)"},
        {"machine", 0, OPTION_SIZE, &o.machine, UINT64_MAX, "SIZE", "plan for a machine with this much memory, such as 16G"},
        {"gpu-share", 0, OPTION_REAL, &o.gpu_share, 0, "X",
         "with --machine and --device mlx: share of the memory that the GPU may use\n(default: as on a Mac, 2/3 up to 36 GB and 3/4 above)"},
        {"weight-bits", 0, OPTION_REAL, &o.weight_bits, 0, "X",
         "bits per parameter of a model given by config.json, such as 4.8 for Q4_K_M\n(default: from config.json)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    if (words.n > 1) return kit_fail(EXIT_USAGE, "unexpected argument %s: flatkv plan takes one model", words.texts[1]);
    if (words.n == 1) o.model.model = words.texts[0];
    if (o.gpu_share > 1) return kit_fail(EXIT_USAGE, "--gpu-share must be at most 1 (got %g)", o.gpu_share);
    cli_name_sequences("--seqs");
    subject s = {.o = &o};
    code = run_plan(&s);
    free(s.channel_bits);
    fkv_model_close(s.model);
    pull_choice_free(&s.remote);
    return code;
}
