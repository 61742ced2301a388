/* flatkv calibrate: runs a text through the model and writes a calibration file with the bit width of each key channel. */
#include "model_names.h"
#include "model_options.h"
#include "progress.h"
#include "text.h"
#include "token_list.h"

#include "../kit/numbers.h"

#include <stdlib.h>

static const char usage[] =
    "usage: flatkv calibrate [-m MODEL] [--text FILE] [-o FILE] [options]\n"
    "Measures the keys of a model and writes a calibration file with the bit width of each key channel. The codecs calibrated,\n"
    "c4/s4 and c3/s3 need this file.\n";

enum { TOKENS = 16384, WINDOW = 2048 };

typedef struct calibrate_options {
    const char *model;
    const char *text;
    const char *output;
    uint32_t n_tokens;
    uint32_t n_threads;
    bool json;
} calibrate_options;

static int read_calibration_text(const calibrate_options *o, const fkv_model *model, token_list *list) {
    char book[MODEL_PATH];
    text_buffer content = {0};
    int code = o->text == NULL ? model_needle_file("book.txt", book) : EXIT_GOOD;
    if (code == EXIT_GOOD) code = text_read(&content, o->text != NULL ? o->text : book);
    if (code == EXIT_GOOD) code = token_list_add_text(list, model, content.bytes, content.n, FKV_TOKENIZE_PLAIN);
    text_free(&content);
    if (code != EXIT_GOOD) return code;
    if (list->n < WINDOW)
        return kit_fail(EXIT_FAILED, "%s has only %zu tokens: calibration needs at least %d; use a longer text",
                        o->text != NULL ? o->text : "the default text", list->n, WINDOW);
    if (list->n > o->n_tokens) list->n = o->n_tokens;
    return EXIT_GOOD;
}

static bool show_progress(void *user, size_t n_done, size_t n_tokens) {
    progress_bar *p = user;
    (void)n_tokens;
    progress_add(p, n_done - p->done);
    return !cli_interrupted();
}

static int report_calibration(const calibrate_options *o, const char *path, double seconds) {
    fkv_calibration_info info;
    fkv_status status = fkv_calibration_inspect(path, &info);
    if (status != FKV_OK) return cli_fail_status(status);
    if (!o->json) {
        double n = (double)info.n_channels / 100;
        printf("%s: %u layers, %llu channels, %llu tokens in %.1f s\n", path, info.n_layers, (unsigned long long)info.n_channels,
               (unsigned long long)info.n_tokens, seconds);
        printf("with an average of 4 bits per channel: %.1f %% of the channels use 2 bits, %.1f %% use 4, %.1f %% use 6\n",
               (double)info.n_4[0] / n, (double)info.n_4[1] / n, (double)info.n_4[2] / n);
        printf("with an average of 3 bits per channel: %.1f %% of the channels use 2 bits, %.1f %% use 4, %.1f %% use 6\n",
               (double)info.n_3[0] / n, (double)info.n_3[1] / n, (double)info.n_3[2] / n);
        return EXIT_GOOD;
    }
    kit_json *json = kit_json_begin();
    kit_json_text(json, "version", fkv_version());
    kit_json_text(json, "model", o->model);
    kit_json_text(json, "file", path);
    kit_json_integer(json, "layers", info.n_layers);
    kit_json_integer(json, "channels", info.n_channels);
    kit_json_integer(json, "tokens", info.n_tokens);
    kit_json_real(json, "seconds", seconds);
    const struct {
        const char *name;
        const uint64_t *n;
    } averages[] = {{"bits_4", info.n_4}, {"bits_3", info.n_3}};
    for (int i = 0; i < 2; i++) {
        kit_json_array(json, averages[i].name);
        for (int j = 0; j < 3; j++) kit_json_integer(json, NULL, averages[i].n[j]);
        kit_json_close(json);
    }
    return kit_json_print(json);
}

static int run_calibration(const calibrate_options *o, const fkv_model *model, const token_list *list) {
    char path[MODEL_PATH];
    fkv_status status = FKV_OK;
    if (o->output == NULL) status = fkv_calibration_path(model, path, sizeof path);
    if (status != FKV_OK) return cli_fail_status(status);
    const char *output = o->output != NULL ? o->output : path;
    if (!kit_can_write(output)) return EXIT_FAILED;
    cli_catch_interrupts();
    progress_bar progress = progress_begin("calibrating", 0, list->n);
    fkv_calibrate_config config = {
        .tokens = list->tokens, .n_tokens = list->n, .n_threads = o->n_threads, .progress = show_progress, .user = &progress};
    status = fkv_calibrate(model, &config, output);
    progress_end(&progress);
    if (status != FKV_OK && cli_interrupted()) return EXIT_INTERRUPTED;
    return status == FKV_OK ? report_calibration(o, output, kit_seconds() - progress.start) : cli_fail_status(status);
}

int cli_calibrate(int argc, char **argv) {
    calibrate_options o = {.model = "needle", .n_tokens = TOKENS};
    const kit_option own[] = {
        {"model", 'm', OPTION_TEXT, &o.model, 0, "MODEL", ".gguf file, safetensors folder, or model name (default needle)"},
        {"text", 0, OPTION_TEXT, &o.text, 0, "FILE",
         "calibration text, ideally similar to the texts that the model will read\n(default: a book included with flatkv)"},
        {"output", 'o', OPTION_OUTPUT, &o.output, 0, "FILE",
         "calibration file to write (default: next to the model, where it is found automatically)"},
        {"tokens", 0, OPTION_U32, &o.n_tokens, 1 << 24, "N", "number of tokens to use, at least 2048 (default 16384)"},
        {"threads", 0, OPTION_U32, &o.n_threads, 256, "N", "worker threads (default: one per core)"},
        {"json", 0, OPTION_FLAG, &o.json, 0, NULL, "print one JSON object to standard output"},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, argc, argv, &code)) return code;
    if (o.n_tokens < WINDOW) return kit_fail(EXIT_USAGE, "--tokens must be at least %d (got %u)", WINDOW, o.n_tokens);
    model_options usual = model_options_default();
    usual.model = o.model;
    usual.n_threads = o.n_threads;
    fkv_model *model = NULL;
    token_list list = {0};
    code = model_options_load(&usual, false, &model);
    if (code == EXIT_GOOD) code = read_calibration_text(&o, model, &list);
    if (code == EXIT_GOOD) code = run_calibration(&o, model, &list);
    token_list_free(&list);
    fkv_model_close(model);
    return code;
}
