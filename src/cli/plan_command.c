/* flatkv plan: what a cache of given shapes will take, what a 16-bit one would, and the longest context this machine can hold. */
#include "cli.h"

#include <getopt.h>
#include <string.h>

static const char help[] =
    "usage: flatkv plan --layers N --heads Q/KV/DIM [options]\n\n"
    "  --layers N          layers of the model\n"
    "  --heads Q/KV/DIM    query heads, KV heads, head dimension: 32/8/128\n"
    "  -c, --context N     tokens to reserve (default 32768; K, M and G multiply by 1024)\n"
    "  --k-bits N --v-bits N      16, 8, 4 or 2 (default 8 and 4)\n"
    "  --k-group N --v-group N    32, 64 or 128 (default 64)\n"
    "  --max-kv N --sinks N       bounded context: every layer keeps the first sinks and the last max-kv tokens\n"
    "  --seqs N            sequences open at once (default 1)\n"
    "  --chunk N           rows of one step (default 512)\n"
    "  --page N            tokens of a page (default 64)\n"
    "  --threads N         (default: all cores)\n"
    "  --json              one JSON object instead of the table\n";

enum {
    OPT_LAYERS = 256,
    OPT_HEADS,
    OPT_K_BITS,
    OPT_V_BITS,
    OPT_K_GROUP,
    OPT_V_GROUP,
    OPT_MAX_KV,
    OPT_SINKS,
    OPT_SEQS,
    OPT_CHUNK,
    OPT_PAGE,
    OPT_THREADS
};

static const struct option options[] = {{"layers", required_argument, NULL, OPT_LAYERS},
                                        {"heads", required_argument, NULL, OPT_HEADS},
                                        {"context", required_argument, NULL, 'c'},
                                        {"k-bits", required_argument, NULL, OPT_K_BITS},
                                        {"v-bits", required_argument, NULL, OPT_V_BITS},
                                        {"k-group", required_argument, NULL, OPT_K_GROUP},
                                        {"v-group", required_argument, NULL, OPT_V_GROUP},
                                        {"max-kv", required_argument, NULL, OPT_MAX_KV},
                                        {"sinks", required_argument, NULL, OPT_SINKS},
                                        {"seqs", required_argument, NULL, OPT_SEQS},
                                        {"chunk", required_argument, NULL, OPT_CHUNK},
                                        {"page", required_argument, NULL, OPT_PAGE},
                                        {"threads", required_argument, NULL, OPT_THREADS},
                                        {"json", no_argument, NULL, 'j'},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};

static uint32_t *field_of(fkv_config *c, int option) {
    switch (option) {
    case OPT_LAYERS: return &c->n_layers;
    case 'c': return &c->max_tokens;
    case OPT_K_BITS: return &c->layer.k.bits;
    case OPT_V_BITS: return &c->layer.v.bits;
    case OPT_K_GROUP: return &c->layer.k.group;
    case OPT_V_GROUP: return &c->layer.v.group;
    case OPT_MAX_KV: return &c->layer.window;
    case OPT_SINKS: return &c->layer.n_sinks;
    case OPT_SEQS: return &c->max_seqs;
    case OPT_CHUNK: return &c->max_step_tokens;
    case OPT_PAGE: return &c->page_tokens;
    case OPT_THREADS: return &c->n_threads;
    default: return NULL;
    }
}

/* The longest context whose plan is at most `bytes`; 0 where none is. Plans grow with the context, so halving finds it. */
static uint32_t longest_context(fkv_config c, uint64_t bytes) {
    uint32_t fits = 0;
    uint32_t too_long = INT32_MAX;
    while (too_long - fits > 1) {
        fkv_plan plan;
        c.max_tokens = fits + (too_long - fits) / 2;
        if (fkv_plan_make(&c, &plan) == FKV_OK && plan.total_bytes <= bytes)
            fits = c.max_tokens;
        else
            too_long = c.max_tokens;
    }
    return fits;
}

static void print_table(const fkv_config *c, const fkv_plan *plan, const fkv_plan *half, uint64_t available, const char *source) {
    char a[32];
    char b[32];
    printf("%u layers, %u/%u/%u, %u tokens%s\n\n", c->n_layers, c->layer.n_q_heads, c->layer.n_kv_heads, c->layer.head_dim,
           c->max_tokens, c->layer.window != 0 ? ", bounded" : "");
    printf("%-22s %12s %12s\n", "", "this plan", "16-bit");
    const struct {
        const char *name;
        uint64_t mine;
        uint64_t half;
    } lines[] = {{"pages", plan->slab_bytes, half->slab_bytes},         {"tables", plan->tables_bytes, half->tables_bytes},
                 {"scratch", plan->scratch_bytes, half->scratch_bytes}, {"worker stacks", plan->stacks_bytes, half->stacks_bytes},
                 {"total", plan->total_bytes, half->total_bytes},       {"one token", plan->token_bytes, half->token_bytes}};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        printf("%-22s %12s %12s\n", lines[i].name, cli_bytes(lines[i].mine, a), cli_bytes(lines[i].half, b));
    printf("\nthis machine can give %s (%s)\n", cli_bytes(available, a), source);
    if (c->layer.window == 0) {
        fkv_config wide = *c;
        wide.layer.k.bits = wide.layer.v.bits = 16;
        printf("longest context that fits: %u tokens; at 16 bits %u\n", longest_context(*c, available),
               longest_context(wide, available));
    }
}

static void print_json(const fkv_config *c, const fkv_plan *plan, const fkv_plan *half, uint64_t available, const char *source) {
    printf(
        "{\"tokens\": %u, \"total_bytes\": %llu, \"slab_bytes\": %llu, \"tables_bytes\": %llu, \"scratch_bytes\": %llu, "
        "\"stacks_bytes\": %llu, \"token_bytes\": %llu, \"total_bytes_16bit\": %llu, \"available_bytes\": %llu, \"available_source\": ",
        c->max_tokens, (unsigned long long)plan->total_bytes, (unsigned long long)plan->slab_bytes,
        (unsigned long long)plan->tables_bytes, (unsigned long long)plan->scratch_bytes, (unsigned long long)plan->stacks_bytes,
        (unsigned long long)plan->token_bytes, (unsigned long long)half->total_bytes, (unsigned long long)available);
    cli_json_string(stdout, source);
    printf(", \"fits\": %s, \"longest_context\": %u}\n", plan->total_bytes <= available ? "true" : "false",
           longest_context(*c, available));
}

int cli_plan(int argc, char **argv) {
    fkv_config c = fkv_config_default();
    c.max_tokens = 32768;
    bool json = false;
    int option;
    while ((option = getopt_long(argc, argv, "c:h", options, NULL)) != -1) {
        uint32_t *field = field_of(&c, option);
        uint64_t value = 0;
        if (field != NULL) {
            if (!cli_number(argv[optind - 1] == optarg ? argv[optind - 2] : argv[optind - 1], optarg, INT32_MAX, &value))
                return EXIT_USAGE;
            *field = (uint32_t)value;
        } else if (option == OPT_HEADS) {
            char rest = 0;
            if (sscanf(optarg, "%u/%u/%u%c", &c.layer.n_q_heads, &c.layer.n_kv_heads, &c.layer.head_dim, &rest) != 3)
                return cli_fail(EXIT_USAGE, "--heads %s: query heads, KV heads and head dimension, as 32/8/128", optarg);
        } else if (option == 'j') {
            json = true;
        } else if (option == 'h') {
            fputs(help, stdout);
            return EXIT_GOOD;
        } else {
            fputs(help, stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc || c.n_layers == 0 || c.layer.n_q_heads == 0) {
        fputs(help, stderr);
        return EXIT_USAGE;
    }
    fkv_config wide = c;
    wide.layer.k.bits = wide.layer.v.bits = 16;
    fkv_plan plan;
    fkv_plan half;
    if (fkv_plan_make(&c, &plan) != FKV_OK || fkv_plan_make(&wide, &half) != FKV_OK)
        return cli_fail(EXIT_USAGE, "%s", fkv_message());
    const char *source = NULL;
    uint64_t available = fkv_memory_available(&source);
    (json ? print_json : print_table)(&c, &plan, &half, available, source);
    if (plan.total_bytes <= available) return EXIT_GOOD;
    return cli_fail(EXIT_NO_FIT, "the plan does not fit: lower the context or the bits");
}
