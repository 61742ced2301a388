/* peer_logits: writes the logits that flatkv computes for a list of tokens, for comparison with other programs.
 *
 *     peer_logits MODEL TOKENS OUT [THREADS]
 *
 * TOKENS contains uint32 token ids; OUT receives float32 logits [tokens, n_vocab], both in native byte order. The cache is filled
 * in chunks. It stores unquantized 16-bit rows, so that only the model's arithmetic is compared.
 */
#include <flatkv/model.h>

#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 128, MAX_TOKENS = 1 << 20 };

static int fail(const char *what, const char *why) {
    (void)fprintf(stderr, "peer_logits: %s: %s\n", what, why);
    return 1;
}

/* Reads the whole file. Returns NULL on failure. */
static uint32_t *read_tokens(const char *path, uint32_t *n_tokens) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return NULL;
    uint32_t *tokens = malloc(MAX_TOKENS * sizeof *tokens);
    if (tokens != NULL) *n_tokens = (uint32_t)fread(tokens, sizeof *tokens, MAX_TOKENS, file);
    (void)fclose(file);
    return tokens;
}

static fkv_status write_logits(fkv_runner *runner, const uint32_t *tokens, uint32_t n_tokens, uint32_t n_vocab, FILE *out) {
    fkv_seq seq;
    fkv_seq_config config = {.max_tokens = n_tokens};
    fkv_status status = fkv_seq_open(fkv_runner_cache(runner), &config, &seq, NULL);
    for (uint32_t at = 0; status == FKV_OK && at < n_tokens; at += CHUNK) {
        uint32_t part = n_tokens - at < CHUNK ? n_tokens - at : CHUNK;
        fkv_tokens row = {.seq = seq, .tokens = tokens + at, .n_tokens = part, .logits = FKV_LOGITS_ALL};
        const float *logits = NULL;
        status = fkv_runner_forward(runner, &row, 1, &logits);
        if (status == FKV_OK && fwrite(logits, (size_t)n_vocab * sizeof *logits, part, out) != part) status = FKV_IO;
    }
    return status;
}

static int run(const char *model_path, const uint32_t *tokens, uint32_t n_tokens, FILE *out, uint32_t n_threads) {
    fkv_model_config model_config = fkv_model_config_default();
    fkv_model *model = NULL;
    model_config.n_threads = n_threads;
    if (fkv_model_load(model_path, &model_config, &model) != FKV_OK) return fail(model_path, fkv_message());
    fkv_runner_config config = fkv_runner_config_default();
    config.max_tokens = n_tokens;
    config.max_step_tokens = CHUNK;
    config.max_logit_rows = CHUNK;
    config.k = config.v = (fkv_codec_config){.bits = 16};
    config.n_threads = n_threads;
    fkv_runner *runner = NULL;
    fkv_status status = fkv_runner_open(model, &config, &runner);
    if (status == FKV_OK) status = write_logits(runner, tokens, n_tokens, fkv_model_about(model)->n_vocab, out);
    int code = status == FKV_OK ? 0 : fail(model_path, fkv_message());
    fkv_runner_close(runner);
    fkv_model_close(model);
    return code;
}

int main(int argc, char **argv) {
    if (argc < 4) return fail("usage", "peer_logits MODEL TOKENS OUT [THREADS]");
    uint32_t n_tokens = 0;
    uint32_t *tokens = read_tokens(argv[2], &n_tokens);
    if (tokens == NULL || n_tokens == 0) {
        free(tokens);
        return fail(argv[2], "cannot read tokens from this file");
    }
    FILE *out = fopen(argv[3], "wb");
    if (out == NULL) {
        free(tokens);
        return fail(argv[3], "cannot open this file for writing");
    }
    int code = run(argv[1], tokens, n_tokens, out, argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 0);
    if (fclose(out) != 0 && code == 0) code = fail(argv[3], "cannot write this file");
    free(tokens);
    return code;
}
