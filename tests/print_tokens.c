/* Runs the tokenizer of a model, for bench/peers/tokens.py and scripts/check-tokenizers. Called as tokens_of MODEL
 * plain|special|texts|special-texts|ends. MODEL may be a folder with only tokenizer files and no config.json. For "plain" and
 * "special", writes the tokens of the text on standard input as 32-bit integers. For "texts" and "special-texts", writes the
 * texts of all tokens, each preceded by its length. For "ends", writes the end tokens as 32-bit integers. */
#include "../src/model/files/weights_state.h"
#include "../src/text/tokenizer/tokenizer.h"
#include "../src/text/vocab/vocab_folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char *read_all(size_t *n_bytes) {
    size_t room = 1 << 20;
    char *text = malloc(room);
    *n_bytes = 0;
    while (text != NULL) {
        size_t n = fread(text + *n_bytes, 1, room - *n_bytes, stdin);
        if (n == 0) return text;
        *n_bytes += n;
        if (*n_bytes == room) text = realloc(text, room *= 2);
    }
    return NULL;
}

static fkv_status write_tokens(const fkv_tokenizer *tokenizer, unsigned flags) {
    size_t n_bytes = 0;
    size_t n_tokens = 0;
    char *text = read_all(&n_bytes);
    size_t capacity = 4 * n_bytes + 4; /* at most three tokens per byte, and one more after a special token, for a space */
    uint32_t *tokens = malloc(capacity * sizeof *tokens);
    if (text == NULL || tokens == NULL) exit(EXIT_FAILURE);
    fkv_status status = fkv_tokenizer_encode(tokenizer, text, NULL, n_bytes, flags, tokens, capacity, &n_tokens);
    if (status == FKV_OK) (void)fwrite(tokens, sizeof *tokens, n_tokens, stdout);
    free(tokens);
    free(text);
    return status;
}

static void write_texts(const fkv_tokenizer *tokenizer, uint32_t n_tokens, bool special) {
    for (uint32_t token = 0; token < n_tokens; token++) {
        size_t n_bytes = 0;
        const char *text = fkv_tokenizer_text(tokenizer, token, special, &n_bytes);
        uint32_t size = (uint32_t)n_bytes;
        (void)fwrite(&size, sizeof size, 1, stdout);
        (void)fwrite(text, 1, n_bytes, stdout);
    }
}

static fkv_status answer(const fkv_weights *weights, const char *mode) {
    fkv_tokenizer *tokenizer = NULL;
    fkv_status status = fkv_tokenizer_open(fkv_weights_vocab(weights), &tokenizer);
    if (status != FKV_OK) return status;
    uint32_t end[FKV_MAX_END_TOKENS];
    uint32_t n_tokens = fkv_weights_vocab(weights)->n_tokens;
    if (strcmp(mode, "plain") == 0) status = write_tokens(tokenizer, FKV_TOKENIZE_PLAIN);
    if (strcmp(mode, "special") == 0) status = write_tokens(tokenizer, FKV_TOKENIZE_BOS | FKV_TOKENIZE_SPECIAL);
    if (strcmp(mode, "texts") == 0) write_texts(tokenizer, n_tokens, false);
    if (strcmp(mode, "special-texts") == 0) write_texts(tokenizer, n_tokens, true);
    if (strcmp(mode, "ends") == 0) (void)fwrite(end, sizeof end[0], fkv_tokenizer_ends(tokenizer, end), stdout);
    fkv_tokenizer_close(tokenizer);
    return status;
}

static fkv_status open_vocab(const char *path, fkv_weights **weights) {
    char config[4096];
    char json[4096];
    (void)snprintf(config, sizeof config, "%s/config.json", path);
    (void)snprintf(json, sizeof json, "%s/.", path);
    if (access(json, F_OK) != 0 || access(config, F_OK) == 0) return fkv_weights_open(path, weights);
    *weights = fkv_weights_new();
    if (*weights == NULL) exit(EXIT_FAILURE);
    return fkv_vocab_folder_read(fkv_weights_vocab_target(*weights), path);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: tokens_of MODEL plain|special|texts|special-texts|ends\n");
        return EXIT_FAILURE;
    }
    fkv_weights *weights = NULL;
    fkv_status status = open_vocab(argv[1], &weights);
    if (status == FKV_OK) status = answer(weights, argv[2]);
    if (status != FKV_OK) fprintf(stderr, "%s\n", fkv_message());
    fkv_weights_close(weights);
    return status == FKV_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
