/* See model_options.h. */
#include "model_options.h"

#include "mlx_library.h"
#include "model_names.h"

#include <string.h>

model_options model_options_default(void) {
    fkv_runner_config runner = fkv_runner_config_default();
    model_options o = {
        .model = "needle", .n_sinks = 4, .snapshots = runner.max_snapshots, .chunk = runner.max_step_tokens, .seed = 1};
    o.codecs.codecs[o.codecs.n++] = codec_of_runner(&runner);
    return o;
}

static void write_codecs_help(model_options *o) {
    char name[CODEC_NAME];
    (void)snprintf(o->codecs_help, sizeof o->codecs_help,
                   "%s (default %s).\n"
                   "K/V: bits of keys and values, 16, 8, 4 or 2 each, as in 8/4;\n"
                   "sealed: full pages are repacked to 4 bits (also s4/s4, s3/s3, s2/s2);\n"
                   "calibrated: sealed, with a bit width for each key channel (also c4/s4, c3/s3; see flatkv calibrate);\n"
                   "tq4, tq3, tq2: TurboQuant. Suffixes: g32 or g128 sets the group size (default 64),\n"
                   ":none, :k, :v or :kv selects whether keys (k) and values (v) are rotated",
                   o->compares ? "cache codecs to compare, such as 16/16,8/4,sealed" : "cache codec, such as 8/4, sealed or tq4",
                   codec_name(&o->codecs.codecs[0], name));
}

static const char *const MODEL_HELP[] = {
    ".gguf file, safetensors folder, ORG/NAME[:QUANT] in the Hugging Face cache (see flatkv pull), or a short\n"
    "name ('flatkv models' lists them; default needle, a test model that only recalls planted facts)",
    ".gguf file, safetensors folder, ORG/NAME[:QUANT] in the Hugging Face cache (see flatkv pull), or a short\n"
    "name ('flatkv models' lists them)",
};

void model_options_list(model_options *o, kit_option list[N_MODEL_OPTIONS]) {
    write_codecs_help(o);
    const kit_option options[N_MODEL_OPTIONS] = {
        KIT_HEADING("Model and cache"),
        {"model", 'm', OPTION_TEXT, &o->model, 0, "MODEL", MODEL_HELP[o->model == NULL]},
        {"device", 0, OPTION_CHOICE, &o->device, 0, "cpu|mlx",
         "compute device (default cpu); mlx runs on Metal, CUDA or MLX's own CPU backend"},
        {"context", 'c', OPTION_U32, &o->context, INT32_MAX, "N",
         "context size in tokens, reserved in advance; 32K means 32768 (K, M and G multiply by 1024)"},
        {"codecs", 0, OPTION_TEXT, &o->codec_names, 0, o->compares ? "LIST" : "NAME", o->codecs_help},
        {"calibration", 0, OPTION_TEXT, &o->calibration, 0, "FILE",
         "file written by flatkv calibrate, for calibrated codecs (default: next to the model)"},
        {"max-kv", 0, OPTION_U32, &o->max_kv, INT32_MAX, "N",
         "sliding window: each layer keeps only the last N tokens and the sink tokens,\nso the text may be of any length"},
        {"sinks", 0, OPTION_U32, &o->n_sinks, INT32_MAX, "N",
         "sink tokens: number of first tokens that --max-kv keeps (default 4)"},
        {"snapshots", 0, OPTION_U32, &o->snapshots, 1 << 20, "N",
         "models with recurrent layers: number of states kept for later prompts\n(default: as many as need 512 MiB, but 8 to 64); 'flatkv plan' prints their size"},
        KIT_HEADING("Execution and output"),
        {"chunk", 0, OPTION_U32, &o->chunk, 1 << 20, "N", "tokens per prefill step (default 512)"},
        {"memory", 0, OPTION_SIZE, &o->memory, UINT64_MAX, "SIZE",
         "memory limit for everything except the weights, such as 500M; fail if more memory is needed"},
        {"threads", 0, OPTION_U32, &o->n_threads, 256, "N", "worker threads (default: one per core)"},
        {"lazy", 0, OPTION_FLAG, &o->lazy, 0, NULL, "allocate pages when they are first written, not in advance"},
        {"seed", 0, OPTION_U64, &o->seed, UINT64_MAX, "N", "random seed (default 1)"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, "print one JSON object to standard output"},
        {0}};
    memcpy(list, options, sizeof options);
}

void model_options_drop(kit_option list[N_MODEL_OPTIONS], const char *name) {
    kit_option *to = list;
    for (const kit_option *from = list; from->name != NULL; from++)
        if (strcmp(from->name, name) != 0) *to++ = *from;
    *to = (kit_option){0};
}

void model_options_repeat(kit_option list[N_MODEL_OPTIONS], kit_texts *models) {
    for (kit_option *o = list; o->name != NULL; o++) {
        if (strcmp(o->name, "model") != 0) continue;
        o->kind = OPTION_TEXTS;
        o->target = models;
    }
}

static bool any_calibrated(const codec_list *list) {
    bool found = false;
    for (uint32_t i = 0; i < list->n; i++) found = found || list->codecs[i].k.kind == FKV_CODEC_CALIBRATED;
    return found;
}

bool model_options_parse(model_options *o, const char *usage, const kit_option *const *tables, int argc, char **argv, int *code) {
    if (!kit_options_parse(usage, tables, argc, argv, code)) return false;
    *code = codec_list_parse(o->codec_names, o->compares ? MAX_CODECS : 1, &o->codecs);
    if (*code == EXIT_GOOD && o->calibration != NULL && !any_calibrated(&o->codecs))
        *code = kit_fail(EXIT_USAGE, "--calibration requires a calibrated codec: --codecs calibrated, c4/s4 or c3/s3");
    return *code == EXIT_GOOD;
}

void model_options_adapt(model_options *o, const fkv_model *model) {
    const fkv_codec_config eight = {8, 64};
    codec_choice *codec = &o->codecs.codecs[0];
    if (o->codecs.named || fkv_model_about(model)->latent_dim == 0 || codec->k.kind != FKV_CODEC_SEALED) return;
    *codec = (codec_choice){.k = eight, .v = eight, .rotate = FKV_ROTATE_KV};
}

int model_options_load(model_options *o, bool plan_only, fkv_model **model) {
    char path[MODEL_PATH];
    int code = o->model != NULL ? model_path_of(o->model, path) : model_fail_unnamed();
    if (code != EXIT_GOOD) return code;
    if (o->chunk == 0) return kit_fail(EXIT_USAGE, "--chunk must be at least 1 (got 0)");
    if (o->lazy && o->device == FKV_BACKEND_MLX)
        return kit_fail(EXIT_USAGE, "--lazy cannot be combined with --device mlx, which allocates all pages in advance");
    if (o->device == FKV_BACKEND_MLX) {
        code = mlx_library_load();
        if (code != EXIT_GOOD) return code;
    }
    fkv_model_config config = fkv_model_config_default();
    config.backend = (fkv_backend)o->device;
    config.n_threads = o->n_threads;
    config.plan_only = plan_only;
    fkv_status status = fkv_model_load(path, &config, model);
    if (status != FKV_OK) return cli_fail_status(status);
    model_options_adapt(o, *model);
    return EXIT_GOOD;
}

void model_report_chat(const char *name, const fkv_model *model) {
    size_t n = 0;
    if (fkv_chat_render(model, "", 0, NULL, NULL, NULL, 0, &n) != FKV_UNSUPPORTED) return;
    (void)fprintf(stderr, "[%s%s%s]\n", name, name[0] != 0 ? ": " : "", fkv_message());
}

fkv_runner_config model_options_runner(const model_options *o, uint32_t max_tokens) {
    fkv_runner_config c = fkv_runner_config_default();
    c.max_tokens = max_tokens;
    c.max_step_tokens = max_tokens != 0 && max_tokens < o->chunk ? max_tokens : o->chunk;
    codec_apply(&o->codecs.codecs[0], &c);
    c.calibration = o->calibration;
    c.max_kv = o->max_kv;
    c.n_sinks = o->max_kv != 0 ? o->n_sinks : 0;
    c.max_snapshots = o->snapshots;
    c.n_threads = o->n_threads;
    c.lazy = o->lazy;
    c.memory_limit = o->memory;
    return c;
}

const char *model_device_name(const model_options *o) {
    static const char *const names[] = {"cpu", "mlx"};
    return names[o->device & 1];
}

void model_options_json(const model_options *o, const fkv_model_info *about, kit_json *json) {
    kit_json_text(json, "version", fkv_version());
    kit_json_text(json, "model", o->model);
    kit_json_text(json, "architecture", about->architecture);
    kit_json_text(json, "device", model_device_name(o));
    if (!o->compares || !o->codecs.named) codec_json(&o->codecs.codecs[0], json);
    if (o->max_kv != 0) {
        kit_json_integer(json, "max_kv", o->max_kv);
        kit_json_integer(json, "sinks", o->n_sinks);
    }
}
