/* flatkv plan: what a model, or a cache of given shapes, will take, what a 16-bit one would, and the longest context this machine
 * can hold.
 */
#include "model_options.h"

#include <string.h>

static const char usage[] = "usage: flatkv plan [-m MODEL] [-c TOKENS] [options]              a model and its cache\n"
                            "       flatkv plan --layers N --heads Q/KV/DIM [options]         a cache alone, by its shape\n";

typedef struct plan_options {
    model_options model;
    uint32_t layers;
    const char *heads;
    uint32_t seqs;
    uint32_t page;
} plan_options;

/* What is planned: a running model, or a cache alone. */
typedef struct subject {
    const plan_options *o;
    fkv_model *model; /* NULL: shapes */
    fkv_config shape;
    uint32_t n_tokens;
} subject;

static bool is_bounded(const subject *s) { return s->o->model.max_kv != 0; }

/* The plan for so many tokens, as asked for or with 16 bits. */
static fkv_status make_plan(const subject *s, uint32_t n_tokens, bool wide, fkv_runner_plan *plan) {
    if (s->model == NULL) {
        fkv_config c = s->shape;
        c.max_tokens = n_tokens;
        if (wide) c.layer.k = c.layer.v = (fkv_codec_config){.bits = 16};
        *plan = (fkv_runner_plan){0};
        fkv_status status = fkv_plan_make(&c, &plan->cache);
        plan->total_bytes = plan->cache.total_bytes;
        return status;
    }
    fkv_runner_config c = model_options_runner(&s->o->model, n_tokens);
    c.max_seqs = s->o->seqs;
    c.page_tokens = s->o->page;
    if (wide) c.k = c.v = (fkv_codec_config){.bits = 16};
    return fkv_runner_plan_make(s->model, &c, plan);
}

/* The longest context whose plan is at most `bytes`; 0 where none is. Plans grow with the context, so halving finds it. */
static uint32_t longest_context(const subject *s, bool wide, uint64_t bytes) {
    uint32_t fits = 0;
    uint32_t too_long = INT32_MAX;
    while (too_long - fits > 1) {
        fkv_runner_plan plan;
        uint32_t tokens = fits + (too_long - fits) / 2;
        if (make_plan(s, tokens, wide, &plan) == FKV_OK && plan.total_bytes <= bytes)
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

static void add_column(table *t, const subject *s, const char *name, uint32_t n_tokens, bool wide) {
    column *c = &t->columns[t->n];
    if (make_plan(s, n_tokens, wide, &c->plan) != FKV_OK) return;
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

static void print_table(const subject *s, uint64_t available, const char *source) {
    char text[32];
    table t = {0};
    uint32_t longest = is_bounded(s) ? 0 : longest_context(s, false, available);
    uint32_t longest_16 = is_bounded(s) ? 0 : longest_context(s, true, available);
    print_head(s);
    add_column(&t, s, "this plan", s->n_tokens, false);
    add_column(&t, s, "16-bit", s->n_tokens, true);
    char name[24];
    snprintf(name, sizeof name, "%u tokens", longest);
    if (longest > 0) add_column(&t, s, name, longest, false);
    printf("%-22s", "");
    for (uint32_t i = 0; i < t.n; i++) printf(" %16s", t.columns[i].name);
    putchar('\n');
    if (s->model != NULL) {
        print_line(&t, "weights, mapped", offsetof(fkv_runner_plan, mapped_bytes));
        print_line(&t, "weights, repacked", offsetof(fkv_runner_plan, packed_bytes));
    }
    print_line(&t, "pages", offsetof(fkv_runner_plan, cache.slab_bytes));
    print_line(&t, "tables", offsetof(fkv_runner_plan, cache.tables_bytes));
    print_line(&t, "scratch", offsetof(fkv_runner_plan, cache.scratch_bytes));
    print_line(&t, "worker stacks", offsetof(fkv_runner_plan, cache.stacks_bytes));
    if (s->model != NULL) print_line(&t, "activations", offsetof(fkv_runner_plan, activations_bytes));
    print_line(&t, s->model != NULL ? "total without weights" : "total", offsetof(fkv_runner_plan, total_bytes));
    print_line(&t, "one token", offsetof(fkv_runner_plan, cache.token_bytes));
    printf("\navailable on this machine: %s%s (%s)\n", kit_bytes(available, text), s->model != NULL ? " beside the weights" : "",
           source);
    if (!is_bounded(s)) printf("longest context that fits: %u tokens; with 16 bits %u\n", longest, longest_16);
}

static int print_json(const subject *s, const fkv_runner_plan *plan, uint64_t available, const char *source) {
    fkv_runner_plan wide = {0};
    (void)make_plan(s, s->n_tokens, true, &wide);
    kit_json *json = kit_json_begin();
    if (s->model != NULL) model_options_json(&s->o->model, fkv_model_about(s->model), json);
    kit_json_integer(json, "tokens", s->n_tokens);
    kit_json_integer(json, "total_bytes", plan->total_bytes);
    kit_json_integer(json, "slab_bytes", plan->cache.slab_bytes);
    kit_json_integer(json, "tables_bytes", plan->cache.tables_bytes);
    kit_json_integer(json, "scratch_bytes", plan->cache.scratch_bytes);
    kit_json_integer(json, "stacks_bytes", plan->cache.stacks_bytes);
    kit_json_integer(json, "token_bytes", plan->cache.token_bytes);
    if (s->model != NULL) {
        kit_json_integer(json, "activations_bytes", plan->activations_bytes);
        kit_json_integer(json, "weights_mapped_bytes", plan->mapped_bytes);
        kit_json_integer(json, "weights_packed_bytes", plan->packed_bytes);
    }
    kit_json_integer(json, "total_bytes_16bit", wide.total_bytes);
    kit_json_integer(json, "available_bytes", available);
    kit_json_text(json, "available_source", source);
    kit_json_bool(json, "fits", plan->total_bytes <= available);
    kit_json_integer(json, "longest_context", is_bounded(s) ? 0 : longest_context(s, false, available));
    kit_json_integer(json, "longest_context_16bit", is_bounded(s) ? 0 : longest_context(s, true, available));
    return kit_json_print(json);
}

/* ---- the command ---- */

static int make_shape(subject *s) {
    const model_options *m = &s->o->model;
    fkv_config *c = &s->shape;
    char rest = 0;
    *c = fkv_config_default();
    if (m->device != FKV_BACKEND_CPU)
        return kit_fail(EXIT_USAGE, "--device: a cache given by --layers and --heads is planned for the CPU");
    if (s->o->layers == 0 || s->o->heads == NULL) return kit_fail(EXIT_USAGE, "both --layers and --heads are needed");
    if (sscanf(s->o->heads, "%u/%u/%u%c", &c->layer.n_q_heads, &c->layer.n_kv_heads, &c->layer.head_dim, &rest) != 3)
        return kit_fail(EXIT_USAGE, "--heads %s: query heads, KV heads and head dimension, as 32/8/128", s->o->heads);
    c->n_layers = s->o->layers;
    c->layer.k = (fkv_codec_config){m->k_bits, m->k_group};
    c->layer.v = (fkv_codec_config){m->v_bits, m->v_group};
    c->layer.window = m->max_kv;
    c->layer.n_sinks = m->max_kv != 0 ? m->n_sinks : 0;
    c->rotate = (fkv_rotate)m->rotate;
    c->max_seqs = s->o->seqs;
    c->max_step_tokens = m->chunk;
    c->page_tokens = s->o->page;
    c->n_threads = m->n_threads;
    s->n_tokens = m->context != 0 ? m->context : 32768;
    return EXIT_GOOD;
}

static int work(subject *s) {
    int code = EXIT_GOOD;
    if (s->o->layers != 0 || s->o->heads != NULL) {
        code = make_shape(s);
    } else {
        code = model_options_load(&s->o->model, true, &s->model);
        if (code == EXIT_GOOD) s->n_tokens = s->o->model.context != 0 ? s->o->model.context : fkv_model_about(s->model)->context;
    }
    if (code != EXIT_GOOD) return code;
    fkv_runner_plan plan;
    if (make_plan(s, s->n_tokens, false, &plan) != FKV_OK) return kit_fail(EXIT_USAGE, "%s", fkv_message());
    const char *source = NULL;
    uint64_t available = fkv_backend_available((fkv_backend)s->o->model.device, &source);
    available -= available < plan.packed_bytes ? available : plan.packed_bytes; /* weights are repacked before a runner opens */
    if (s->o->model.memory != 0 && s->o->model.memory < available) {
        available = s->o->model.memory;
        source = "--memory";
    }
    if (s->o->model.json)
        code = print_json(s, &plan, available, source);
    else
        print_table(s, available, source);
    if (code != EXIT_GOOD || plan.total_bytes <= available) return code;
    return kit_fail(EXIT_NO_FIT, "the plan does not fit: lower the context or the bits");
}

int cli_plan(int argc, char **argv) {
    fkv_config usual = fkv_config_default();
    plan_options o = {.model = model_options_default(), .seqs = 1, .page = usual.page_tokens};
    kit_option common[N_MODEL_OPTIONS];
    model_options_list(&o.model, common);
    const kit_option own[] = {
        {"layers", 0, OPTION_U32, &o.layers, INT32_MAX, "N", "number of layers"},
        {"heads", 0, OPTION_TEXT, &o.heads, 0, "Q/KV/DIM", "query heads/KV heads/head dimension, as 32/8/128"},
        {"seqs", 0, OPTION_U32, &o.seqs, INT32_MAX, "N", "sequences open at once (default 1)"},
        {"page", 0, OPTION_U32, &o.page, INT32_MAX, "N", "tokens in a page (default 64)"},
        {0}};
    const kit_option *const tables[] = {own, common, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    subject s = {.o = &o};
    code = work(&s);
    fkv_model_close(s.model);
    return code;
}
