/* See model_options.h. */
#include "model_options.h"

#include "mlx_library.h"
#include "model_names.h"

#include <string.h>

model_options model_options_default(void) {
    fkv_runner_config runner = fkv_runner_config_default();
    return (model_options){.model = "needle",
                           .k_bits = runner.k.bits,
                           .v_bits = runner.v.bits,
                           .k_group = runner.k.group,
                           .v_group = runner.v.group,
                           .rotate = (int)runner.rotate,
                           .n_sinks = 4,
                           .chunk = runner.max_step_tokens,
                           .seed = 1};
}

void model_options_list(model_options *o, kit_option list[N_MODEL_OPTIONS]) {
    const kit_option options[N_MODEL_OPTIONS] = {
        {"model", 'm', OPTION_TEXT, &o->model, 0, "MODEL", "a .gguf file, a folder with safetensors, or a name (flatkv models)"},
        {"device", 0, OPTION_CHOICE, &o->device, 0, "cpu|mlx",
         "where the model runs; MLX uses Metal, CUDA or its own CPU code (default cpu)"},
        {"context", 'c', OPTION_U32, &o->context, INT32_MAX, "N",
         "tokens to reserve; 32K is 32768 (K, M and G multiply by 1024)"},
        {"k-bits", 0, OPTION_U32, &o->k_bits, 16, "N", "bits of a key: 16, 8, 4 or 2 (default 8)"},
        {"v-bits", 0, OPTION_U32, &o->v_bits, 16, "N", "bits of a value: 16, 8, 4 or 2 (default 4)"},
        {"k-group", 0, OPTION_U32, &o->k_group, 128, "N", "numbers of a key that share a scale: 32, 64 or 128 (default 64)"},
        {"v-group", 0, OPTION_U32, &o->v_group, 128, "N", "the same for values (default 64)"},
        {"rotate", 0, OPTION_CHOICE, &o->rotate, 0, "none|k|v|kv", "Hadamard rotation before quantization (default kv)"},
        {"max-kv", 0, OPTION_U32, &o->max_kv, INT32_MAX, "N",
         "sliding window: each layer keeps the last N tokens and the sinks,\nso a text of any length fits"},
        {"sinks", 0, OPTION_U32, &o->n_sinks, INT32_MAX, "N", "first tokens that --max-kv keeps too (default 4)"},
        {"chunk", 0, OPTION_U32, &o->chunk, 1 << 20, "N", "tokens in one prefill step (default 512)"},
        {"memory", 0, OPTION_U64, &o->memory, UINT64_MAX, "BYTES", "refuse to take more than this, weights not counted"},
        {"threads", 0, OPTION_U32, &o->n_threads, 256, "N", "worker threads (default: one for each core)"},
        {"lazy", 0, OPTION_FLAG, &o->lazy, 0, NULL, "take memory for pages when they are first written, not at open"},
        {"seed", 0, OPTION_U64, &o->seed, UINT64_MAX, "N", "random seed (default 1)"},
        {"json", 0, OPTION_FLAG, &o->json, 0, NULL, "one JSON object on standard output"},
        {0}};
    memcpy(list, options, sizeof options);
}

int model_options_load(const model_options *o, bool plan_only, fkv_model **model) {
    char path[MODEL_PATH];
    int code = model_path_of(o->model, path);
    if (code != EXIT_GOOD) return code;
    if (o->chunk == 0) return kit_fail(EXIT_USAGE, "--chunk 0: a step needs at least one token");
    if (o->lazy && o->device == FKV_BACKEND_MLX)
        return kit_fail(EXIT_USAGE, "--lazy is not available on MLX, which takes all pages at open");
    if (o->device == FKV_BACKEND_MLX) {
        code = mlx_library_load();
        if (code != EXIT_GOOD) return code;
    }
    fkv_model_config config = fkv_model_config_default();
    config.backend = (fkv_backend)o->device;
    config.n_threads = o->n_threads;
    config.plan_only = plan_only;
    fkv_status status = fkv_model_load(path, &config, model);
    return status == FKV_OK ? EXIT_GOOD : cli_fail_status(status);
}

fkv_runner_config model_options_runner(const model_options *o, uint32_t max_tokens) {
    fkv_runner_config c = fkv_runner_config_default();
    c.max_tokens = max_tokens;
    c.max_step_tokens = max_tokens != 0 && max_tokens < o->chunk ? max_tokens : o->chunk;
    c.k = (fkv_codec_config){o->k_bits, o->k_group};
    c.v = (fkv_codec_config){o->v_bits, o->v_group};
    c.rotate = (fkv_rotate)o->rotate;
    c.max_kv = o->max_kv;
    c.n_sinks = o->max_kv != 0 ? o->n_sinks : 0;
    c.n_threads = o->n_threads;
    c.lazy = o->lazy;
    c.memory_limit = o->memory;
    return c;
}

const char *model_device_name(const model_options *o) {
    static const char *const names[] = {"cpu", "mlx"};
    return names[o->device & 1];
}

const char *model_rotate_name(fkv_rotate rotate) {
    static const char *const names[] = {"none", "k", "v", "kv"};
    return names[rotate & 3];
}

void model_options_json(const model_options *o, const fkv_model_info *about, kit_json *json) {
    kit_json_text(json, "version", fkv_version());
    kit_json_text(json, "model", o->model);
    kit_json_text(json, "architecture", about->architecture);
    kit_json_text(json, "device", model_device_name(o));
    kit_json_integer(json, "k_bits", o->k_bits);
    kit_json_integer(json, "v_bits", o->v_bits);
    kit_json_integer(json, "k_group", o->k_group);
    kit_json_integer(json, "v_group", o->v_group);
    kit_json_text(json, "rotate", model_rotate_name((fkv_rotate)o->rotate));
    if (o->max_kv != 0) {
        kit_json_integer(json, "max_kv", o->max_kv);
        kit_json_integer(json, "sinks", o->n_sinks);
    }
}
