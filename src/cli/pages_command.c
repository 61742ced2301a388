/* flatkv pages: inspects page files without opening a cache. `verify` checks all checksums, `show` prints the header. */
#include "../kit/utf8.h"
#include "codec_list.h"

#include <string.h>

static const char usage[] = "usage: flatkv pages verify FILE...       checks the checksum of every page\n"
                            "       flatkv pages show FILE [--json]   prints the header: tokens, model, codec\n";

static void print_hex(const uint8_t *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) printf("%02x", bytes[i]);
}

static void show_text(const char *path, const fkv_file_info *info) {
    char size[32];
    const fkv_layer_config *l = &info->first_layer;
    utf8_print_escaped(stdout, path);
    printf(": page file version %u, %s, %llu pages of %u tokens\n", info->version, kit_bytes(info->file_bytes, size),
           (unsigned long long)info->n_pages, info->page_tokens);
    printf("tokens   %u\nlayers   %u; first layer: ", info->n_tokens, info->n_layers);
    if (l->rope_dim != 0)
        printf("latent of dimension %u and %u RoPE channels", l->head_dim, l->rope_dim);
    else
        printf("%u KV heads of dimension %u", l->n_kv_heads, l->head_dim);
    printf(", window %u, sinks %u\n", l->window, l->n_sinks);
    codec_choice codec = codec_of_file(info);
    char name[CODEC_NAME];
    printf("codec    %s; %s scales; rotation %s\n", codec_name(&codec, name), info->page_type == FKV_BF16 ? "bf16" : "fp16",
           codec_rotate_name(info->rotate));
    printf("rope     ");
    utf8_print_escaped(stdout, info->rope_id);
    printf("\nnumerics ");
    utf8_print_escaped(stdout, info->numerics);
    printf("\nweights  ");
    print_hex(info->weights_id, sizeof info->weights_id);
    putchar('\n');
}

static int show_json(const fkv_file_info *info) {
    const fkv_layer_config *l = &info->first_layer;
    char weights[2 * sizeof info->weights_id + 1];
    for (size_t i = 0; i < sizeof info->weights_id; i++) snprintf(weights + 2 * i, 3, "%02x", info->weights_id[i]);
    codec_choice codec = codec_of_file(info);
    kit_json *json = kit_json_begin();
    kit_json_integer(json, "version", info->version);
    kit_json_integer(json, "file_bytes", info->file_bytes);
    kit_json_integer(json, "n_pages", info->n_pages);
    kit_json_integer(json, "page_tokens", info->page_tokens);
    kit_json_integer(json, "n_tokens", info->n_tokens);
    kit_json_integer(json, "n_layers", info->n_layers);
    kit_json_object(json, "first_layer");
    kit_json_integer(json, "n_kv_heads", l->n_kv_heads);
    kit_json_integer(json, "head_dim", l->head_dim);
    kit_json_integer(json, "rope_dim", l->rope_dim);
    kit_json_integer(json, "window", l->window);
    kit_json_integer(json, "n_sinks", l->n_sinks);
    codec_json(&codec, json);
    kit_json_close(json);
    kit_json_text(json, "page_type", info->page_type == FKV_BF16 ? "bf16" : "f16");
    kit_json_text(json, "rope", info->rope_id);
    kit_json_text(json, "numerics", info->numerics);
    kit_json_text(json, "weights", weights);
    return kit_json_print(json);
}

static int inspect_file(const char *path, bool verify, fkv_file_info *info) {
    fkv_status status = fkv_file_inspect(path, verify, info);
    if (status == FKV_OK) return EXIT_GOOD;
    return cli_fail_status(status);
}

static int verify_files(const kit_texts *files) {
    int worst = EXIT_GOOD;
    for (uint32_t i = 0; i < files->n; i++) {
        fkv_file_info info;
        int code = inspect_file(files->texts[i], true, &info);
        if (code != EXIT_GOOD) worst = code;
        if (code != EXIT_GOOD) continue;
        utf8_print_escaped(stdout, files->texts[i]);
        printf(": good, %u tokens, %llu pages\n", info.n_tokens, (unsigned long long)info.n_pages);
    }
    return worst;
}

static int show_file(const char *path, bool json) {
    fkv_file_info info;
    int code = inspect_file(path, false, &info);
    if (code != EXIT_GOOD) return code;
    if (json) return show_json(&info);
    show_text(path, &info);
    return EXIT_GOOD;
}

int cli_pages(int argc, char **argv) {
    bool json = false;
    kit_texts files = {0};
    const kit_option own[] = {
        {"files", 0, OPTION_POSITIONAL, &files, 0, "FILE", "page file written by flatkv run --save-prefix or /save"},
        {"json", 0, OPTION_FLAG, &json, 0, NULL, "print one JSON object to standard output (show only)"},
        {0}};
    const kit_option *const tables[] = {own, NULL};
    const char *what = argc >= 2 ? argv[1] : "";
    bool known = strcmp(what, "verify") == 0 || strcmp(what, "show") == 0;
    int code = EXIT_GOOD;
    if (!kit_options_parse(usage, tables, known ? argc - 1 : argc, known ? argv + 1 : argv, &code)) return code;
    if (!known) return kit_fail(EXIT_USAGE, "pages: expected \"verify\" or \"show\"; see 'flatkv pages --help'");
    if (files.n == 0) return kit_fail(EXIT_USAGE, "'pages %s' needs a page file", what);
    if (what[0] == 'v' && json) return kit_fail(EXIT_USAGE, "--json is supported only by 'pages show'");
    if (what[0] == 'v') return verify_files(&files);
    return files.n == 1 ? show_file(files.texts[0], json)
                        : kit_fail(EXIT_USAGE, "'pages show' accepts only one file (got %u)", files.n);
}
