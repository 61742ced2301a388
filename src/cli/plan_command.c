/* flatkv plan: what a model, or a cache of given shapes, will take, what a 16-bit one would, and the longest context this machine
 * can hold.
 */
#include "config_shape.h"
#include "model_names.h"
#include "model_options.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: flatkv plan [-m MODEL] [-c TOKENS] [options]              a model and its cache; a config.json\n"
    "                                                                  is enough where it is not downloaded\n"
    "       flatkv plan --layers N --heads Q/KV/DIM [options]         a cache alone, by its shape\n";

typedef struct plan_options {
    model_options model;
    uint32_t layers;
    const char *heads;
    uint32_t seqs;
    uint32_t page;
    uint64_t machine;
    double weight_bits; /* 0: as the config says */
} plan_options;

/* What is planned: a running model, or a cache alone. */
typedef struct subject {
    const plan_options *o;
    fkv_model *model;    /* NULL: shapes */
    config_shape config; /* of a model that is not there */
    bool has_config;
    fkv_layer_config layers[CONFIG_MAX_LAYERS]; /* with it */
    uint8_t *channel_bits;                      /* of shapes with calibrated keys, or NULL */
    fkv_config shape;
    uint32_t n_tokens;
} subject;

/* The memory that counts. */
typedef struct budget {
    uint64_t bytes; /* beside the weights */
    uint64_t whole; /* with them */
    const char *source;
} budget;

static bool has_weights(const subject *s) { return s->model != NULL || s->has_config; }

static uint64_t weights_of(const fkv_runner_plan *plan) { return plan->packed_bytes + plan->mapped_bytes; }

static uint32_t trained_for(const subject *s) {
    if (s->has_config) return s->config.context;
    return s->model != NULL ? fkv_model_about(s->model)->context : 0;
}

static bool is_bounded(const subject *s) { return s->o->model.max_kv != 0; }

/* Never more than a sum of two can hold: configs are not trusted. */
static uint64_t weight_bytes(uint64_t n, double bits) {
    double bytes = (double)n * bits / 8;
    return bytes < 0x1p61 ? (uint64_t)bytes : (uint64_t)1 << 61;
}

/* Of a model that is known by its config alone: weights, and the activations of a step. */
static void add_estimates(const subject *s, fkv_runner_plan *plan) {
    const config_shape *c = &s->config;
    uint64_t row = 2ull * c->ffn_dim + 6ull * c->dim + 2ull * c->n_q_heads * c->head_dim;
    double bits = s->o->weight_bits > 0 ? s->o->weight_bits : c->weight_bits;
    plan->activations_bytes = 4 * (row * s->o->model.chunk + c->n_vocab);
    bool maps = s->o->model.device == FKV_BACKEND_CPU;
    plan->mapped_bytes = maps ? weight_bytes(c->n_mapped, bits) : 0;
    plan->touched_bytes = maps ? weight_bytes(c->n_touched, bits) : 0;
    plan->packed_bytes = weight_bytes(c->n_parameters - (maps ? c->n_mapped : 0), bits);
}

/* What every plan is compared with. */
static const codec_choice HALVES = {.k = {.bits = 16}, .v = {.bits = 16}};

/* The plan for so many tokens, as asked for (codec is NULL) or with other codecs. */
static fkv_status make_plan(const subject *s, uint32_t n_tokens, const codec_choice *codec, fkv_runner_plan *plan) {
    if (s->model == NULL) {
        fkv_config c = s->shape;
        c.max_tokens = n_tokens;
        fkv_layer_config layers[CONFIG_MAX_LAYERS];
        if (codec != NULL) c.layer.k = codec->k;
        if (codec != NULL) c.layer.v = codec->v;
        c.layer.channel_bits = codec != NULL ? NULL : s->channel_bits;
        for (uint32_t i = 0; s->has_config && i < s->shape.n_layers; i++) {
            layers[i] = s->layers[i];
            layers[i].k = c.layer.k;
            layers[i].v = c.layer.v;
            layers[i].channel_bits = c.layer.channel_bits;
        }
        c.layers = s->has_config ? layers : NULL;
        *plan = (fkv_runner_plan){0};
        fkv_status status = fkv_plan_make(&c, &plan->cache);
        if (s->has_config) add_estimates(s, plan);
        plan->total_bytes = plan->cache.total_bytes + plan->activations_bytes;
        return status;
    }
    fkv_runner_config c = model_options_runner(&s->o->model, n_tokens);
    c.max_seqs = s->o->seqs;
    c.page_tokens = s->o->page;
    if (codec != NULL) codec_apply(codec, &c);
    return fkv_runner_plan_make(s->model, &c, plan);
}

/* The longest context whose plan is at most `bytes`; 0 where none is. Plans grow with the context, so halving finds it. */
static uint32_t longest_context(const subject *s, const codec_choice *codec, uint64_t bytes) {
    uint32_t fits = 0;
    uint32_t too_long = INT32_MAX;
    while (too_long - fits > 1) {
        fkv_runner_plan plan;
        uint32_t tokens = fits + (too_long - fits) / 2;
        if (make_plan(s, tokens, codec, &plan) == FKV_OK && plan.total_bytes <= bytes)
            fits = tokens;
        else
            too_long = tokens;
    }
    return fits;
}

/* ---- the table ---- */

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
    if (make_plan(s, n_tokens, codec, &c->plan) != FKV_OK) return;
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

static void print_head(const subject *s) {
    if (s->has_config) {
        const config_shape *c = &s->config;
        printf(
            "%s (%s, %u layers with keys and values, %u/%u/%u, about %.3g billion parameters, trained for %u tokens), %u tokens%s\n"
            "weights and activations are estimates: config.json alone was read\n\n",
            s->o->model.model, c->architecture, c->n_layers, c->n_q_heads, c->n_kv_heads, c->head_dim,
            (double)c->n_parameters / 1e9, c->context, s->n_tokens, is_bounded(s) ? ", bounded" : "");
        return;
    }
    if (s->model == NULL) {
        const fkv_layer_config *l = &s->shape.layer;
        printf("%u layers, %u/%u/%u, %u tokens%s\n\n", s->shape.n_layers, l->n_q_heads, l->n_kv_heads, l->head_dim, s->n_tokens,
               is_bounded(s) ? ", bounded" : "");
        return;
    }
    const fkv_model_info *a = fkv_model_about(s->model);
    printf("%s (%s, %u layers, %u/%u/%u, trained for %u tokens), %u tokens%s\n\n", s->o->model.model, a->architecture,
           a->n_layers, a->n_q_heads, a->n_kv_heads, a->head_dim, a->context, s->n_tokens, is_bounded(s) ? ", bounded" : "");
}

/* A line of the columns' own sums. */
static void print_whole(const table *t) {
    char text[32];
    printf("%-22s", "total with weights");
    for (uint32_t i = 0; i < t->n; i++) {
        const fkv_runner_plan *plan = &t->columns[i].plan;
        printf(" %16s", kit_bytes(plan->total_bytes + weights_of(plan), text));
    }
    putchar('\n');
}

static void print_verdict(const subject *s, const fkv_runner_plan *plan, const budget *b, uint32_t longest, uint32_t longest_16) {
    char needs[32];
    char has[32];
    bool fits = plan->total_bytes <= b->bytes;
    uint64_t needed = has_weights(s) ? plan->total_bytes + weights_of(plan) : plan->total_bytes;
    printf("\n%s: %s of %s (%s)\n", fits ? "It fits" : "It does not fit", kit_bytes(needed, needs), kit_bytes(b->whole, has),
           b->source);
    if (is_bounded(s)) return;
    printf("longest context that fits: %u tokens%s; with 16 bits %u\n", longest, longest > 0 ? " (the last column)" : "",
           longest_16);
    uint32_t trained = trained_for(s);
    if (trained != 0 && longest > trained) printf("the model was trained for %u: beyond that its answers get worse\n", trained);
}

/* Sealed layers keep the pages that sequences are in open: for many short ones that is most of them. */
static void say_what_is_smaller(const subject *s, const fkv_runner_plan *plan) {
    const fkv_layer_config usual = fkv_config_default().layer; /* 8/4 */
    const codec_choice rows = {.k = usual.k, .v = usual.v};
    fkv_runner_plan by_row;
    char text[32];
    if (make_plan(s, s->n_tokens, &rows, &by_row) == FKV_OK && by_row.total_bytes < plan->total_bytes)
        printf("--codecs 8/4 would take less for so few tokens: %s without weights\n", kit_bytes(by_row.total_bytes, text));
}

static void print_table(const subject *s, const budget *b) {
    table t = {0};
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
    if (has_weights(s)) print_line(&t, "weights, mapped", offsetof(fkv_runner_plan, mapped_bytes));
    if (has_weights(s)) print_line(&t, "  read by a token", offsetof(fkv_runner_plan, touched_bytes));
    if (has_weights(s)) print_line(&t, "weights, repacked", offsetof(fkv_runner_plan, packed_bytes));
    print_line(&t, "pages", offsetof(fkv_runner_plan, cache.slab_bytes));
    print_line(&t, "tables", offsetof(fkv_runner_plan, cache.tables_bytes));
    print_line(&t, "scratch", offsetof(fkv_runner_plan, cache.scratch_bytes));
    print_line(&t, "worker stacks", offsetof(fkv_runner_plan, cache.stacks_bytes));
    if (has_weights(s)) print_line(&t, "activations", offsetof(fkv_runner_plan, activations_bytes));
    print_line(&t, has_weights(s) ? "total without weights" : "total", offsetof(fkv_runner_plan, total_bytes));
    if (has_weights(s)) print_whole(&t);
    print_line(&t, "one token", offsetof(fkv_runner_plan, cache.token_bytes));
    print_verdict(s, &t.columns[0].plan, b, longest, longest_16);
    if (!s->o->model.codecs.named) say_what_is_smaller(s, &t.columns[0].plan);
}

static int print_json(const subject *s, const fkv_runner_plan *plan, const budget *b) {
    fkv_runner_plan wide = {0};
    (void)make_plan(s, s->n_tokens, &HALVES, &wide);
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
    if (has_weights(s)) {
        kit_json_integer(json, "total_with_weights_bytes", plan->total_bytes + weights_of(plan));
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

/* ---- the command ---- */

/* What the options say of any shape. */
static void fill_shape(subject *s) {
    const model_options *m = &s->o->model;
    fkv_config *c = &s->shape;
    c->layer.k = m->codecs.codecs[0].k;
    c->layer.v = m->codecs.codecs[0].v;
    c->layer.window = m->max_kv;
    c->layer.n_sinks = m->max_kv != 0 ? m->n_sinks : 0;
    c->rotate = m->codecs.codecs[0].rotate;
    c->max_seqs = s->o->seqs;
    c->max_step_tokens = m->chunk;
    c->page_tokens = s->o->page;
    c->n_threads = m->n_threads;
}

/* Head dimensions are padded to the multiples that the codecs have. */
static uint32_t padded_dim(const codec_choice *codec, uint32_t head_dim) {
    fkv_codec_info k = {.dim_multiple = 16};
    fkv_codec_info v = {.dim_multiple = 16};
    (void)fkv_codec_about(codec->k, &k);
    (void)fkv_codec_about(codec->v, &v);
    uint32_t step = k.dim_multiple > v.dim_multiple ? k.dim_multiple : v.dim_multiple;
    return (head_dim + step - 1) / step * step;
}

static int make_config_shape(subject *s) {
    const config_shape *config = &s->config;
    fkv_config *c = &s->shape;
    *c = fkv_config_default();
    fill_shape(s);
    c->n_layers = config->n_layers;
    c->layer.n_q_heads = config->n_q_heads;
    c->layer.n_kv_heads = config->n_kv_heads;
    c->layer.head_dim = padded_dim(&s->o->model.codecs.codecs[0], config->head_dim);
    for (uint32_t i = 0; i < config->n_layers; i++) {
        s->layers[i] = c->layer;
        if (config->windows[i] == 0) {
            s->layers[i].n_kv_heads = config->full_kv_heads;
            s->layers[i].head_dim = padded_dim(&s->o->model.codecs.codecs[0], config->full_head_dim);
        }
        if (config->windows[i] != 0 && (c->layer.window == 0 || config->windows[i] < c->layer.window)) {
            s->layers[i].window = config->windows[i];
            s->layers[i].n_sinks = 0;
        }
    }
    s->n_tokens = s->o->model.context != 0 ? s->o->model.context : config->context;
    return EXIT_GOOD;
}

static int make_shape(subject *s) {
    const model_options *m = &s->o->model;
    fkv_config *c = &s->shape;
    char rest = 0;
    *c = fkv_config_default();
    fill_shape(s);
    if (m->device != FKV_BACKEND_CPU)
        return kit_fail(EXIT_USAGE, "--device: a cache given by --layers and --heads is planned for the CPU");
    if (s->o->layers == 0 || s->o->heads == NULL) return kit_fail(EXIT_USAGE, "both --layers and --heads are needed");
    if (sscanf(s->o->heads, "%u/%u/%u%c", &c->layer.n_q_heads, &c->layer.n_kv_heads, &c->layer.head_dim, &rest) != 3)
        return kit_fail(EXIT_USAGE, "--heads %s: query heads, KV heads and head dimension, as 32/8/128", s->o->heads);
    c->n_layers = s->o->layers;
    s->n_tokens = m->context != 0 ? m->context : 32768;
    return EXIT_GOOD;
}

/* Another machine is its memory less what its system and programs hold: an eighth, 2 GB at least. */
static budget find_budget(const subject *s, const fkv_runner_plan *plan) {
    const uint64_t GB = (uint64_t)1 << 30;
    static char source[96];
    budget b = {0};
    uint64_t weights = plan->packed_bytes; /* on this machine mapped ones live in the page cache */
    if (s->o->machine != 0) {
        uint64_t held = s->o->machine / 8 > 2 * GB ? s->o->machine / 8 : 2 * GB;
        b.whole = s->o->machine > held ? s->o->machine - held : 0;
        (void)snprintf(source, sizeof source, "what a machine of %.4g GB has beside its system",
                       (double)s->o->machine / (double)GB);
        b.source = source;
        weights = weights_of(plan);
    } else {
        const char *found = NULL;
        b.whole = fkv_backend_available((fkv_backend)s->o->model.device, &found);
        (void)snprintf(source, sizeof source, "available on this machine: %s", found != NULL ? found : "");
        b.source = source;
    }
    b.bytes = b.whole - (b.whole < weights ? b.whole : weights);
    if (s->o->model.memory != 0 && s->o->model.memory < b.bytes) {
        b.bytes = s->o->model.memory;
        b.whole = b.bytes + weights;
        b.source = "--memory, and the weights";
    }
    return b;
}

static int find_subject(subject *s) {
    const model_options *m = &s->o->model;
    char path[MODEL_PATH];
    if (s->o->layers != 0 || s->o->heads != NULL) return make_shape(s);
    if (model_name_find(m->model) == NULL && config_shape_is(m->model, path, MODEL_PATH)) {
        int code = config_shape_read(path, &s->config);
        s->has_config = true;
        return code == EXIT_GOOD ? make_config_shape(s) : code;
    }
    int code = model_options_load(m, true, &s->model);
    if (code == EXIT_GOOD) s->n_tokens = m->context != 0 ? m->context : fkv_model_about(s->model)->context;
    return code;
}

/* Which channels have how many bits is a calibration's to say; all that are 4 or 3 on average take as many bytes. */
static void make_channel_bits(subject *s) {
    enum { MOST_HEADS = 65536, QUAD = 4 };
    const fkv_layer_config *l = &s->shape.layer;
    uint32_t heads = l->n_kv_heads > s->config.full_kv_heads ? l->n_kv_heads : s->config.full_kv_heads;
    if (s->model != NULL || l->k.kind != FKV_CODEC_CALIBRATED || heads > MOST_HEADS) return;
    s->channel_bits = kit_take((size_t)heads * FKV_MAX_HEAD_DIM);
    for (size_t i = 0; i < (size_t)heads * FKV_MAX_HEAD_DIM; i++)
        s->channel_bits[i] = l->k.bits == 3 && i / QUAD % 2 == 0 ? 2 : 4;
}

static int work(subject *s) {
    int code = find_subject(s);
    make_channel_bits(s);
    if (code != EXIT_GOOD) return code;
    fkv_runner_plan plan;
    fkv_status status = make_plan(s, s->n_tokens, NULL, &plan);
    if (status != FKV_OK) {
        (void)cli_fail_status(status);
        return EXIT_USAGE;
    }
    budget b = find_budget(s, &plan);
    if (s->o->model.json)
        code = print_json(s, &plan, &b);
    else
        print_table(s, &b);
    if (code != EXIT_GOOD || plan.total_bytes <= b.bytes) return code;
    return kit_fail(EXIT_NO_FIT, "the plan does not fit: a shorter context (-c), fewer bits (--codecs sealed), a bounded context "
                                 "(--max-kv), or a smaller model");
}

int cli_plan(int argc, char **argv) {
    fkv_config usual = fkv_config_default();
    plan_options o = {.model = model_options_default(), .seqs = 1, .page = usual.page_tokens};
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    model_options_drop(common, "seed");
    const kit_option own[] = {
        {"layers", 0, OPTION_U32, &o.layers, INT32_MAX, "N", "number of layers"},
        {"heads", 0, OPTION_TEXT, &o.heads, 0, "Q/KV/DIM", "query heads/KV heads/head dimension, as 32/8/128"},
        {"seqs", 0, OPTION_COUNT, &o.seqs, 65535, "N", "sequences open at once (default 1)"},
        {"page", 0, OPTION_U32, &o.page, INT32_MAX, "N", "tokens in a page (default 64)"},
        {"machine", 0, OPTION_U64, &o.machine, UINT64_MAX, "BYTES",
         "ask for a machine with so much memory, as 16G, not this one"},
        {"weight-bits", 0, OPTION_REAL, &o.weight_bits, 0, "X",
         "of a model known by its config.json: bits of a parameter, as 4.8 for Q4_K_M\n(default: what the file says)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!model_options_parse(&o.model, usage, tables, argc, argv, &code)) return code;
    cli_name_sequences("--seqs");
    subject s = {.o = &o};
    code = work(&s);
    free(s.channel_bits);
    fkv_model_close(s.model);
    return code;
}
