/* Checks weights that a reader accepted. Used by the GGUF and safetensors fuzzers. Aborts with a message if a check fails. */
#ifndef FKV_FUZZ_WEIGHTS_WALK_H
#define FKV_FUZZ_WEIGHTS_WALK_H

#include "../src/model/files/linear_codes.h"
#include "../src/model/files/tensor_rows.h"
#include "../src/model/files/weights_state.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void must(bool good, const char *what) {
    if (good) return;
    (void)fprintf(stderr, "%s: %s\n", what, fkv_message());
    abort();
}

static bool walk_listed(fkv_status status) {
    return status == FKV_OK || status == FKV_FILE_FORMAT || status == FKV_FILE_DAMAGED || status == FKV_UNSUPPORTED;
}

static bool walk_inside(const void *data, size_t n, const uint8_t *bytes, size_t size) {
    const uintptr_t at = (uintptr_t)data;
    const uintptr_t first = (uintptr_t)bytes;
    return at >= first && at - first <= size && n <= size - (at - first);
}

static void walk_tensor(const fkv_tensor *tensor, const uint8_t *bytes, size_t size) {
    uint32_t group = 0;
    must(walk_inside(tensor->data, (size_t)(tensor->n_rows * tensor->row_bytes), bytes, size), "tensor outside its file");
    if (tensor->bits != 0) {
        const size_t scales = (size_t)(tensor->n_rows * tensor->scale_row_bytes);
        const size_t n_groups = tensor->n_cols / tensor->group;
        must(tensor->scale_row_bytes == n_groups * fkv_tensor_format_of(tensor->scale_type)->block_bytes,
             "a row of scales has the wrong size");
        must(walk_inside(tensor->scales, scales, bytes, size), "scales outside their file");
        must(tensor->biases == NULL || walk_inside(tensor->biases, scales, bytes, size), "biases outside their file");
    }
    if (tensor->linear != NULL)
        must(walk_inside(tensor->linear->scales, (size_t)tensor->linear->scale_bytes, bytes, size), "scales outside their file");
    const size_t n = tensor->n_cols;
    float *floats = malloc(3 * n * sizeof *floats);
    uint8_t *codes = malloc(n);
    must(floats != NULL && codes != NULL, "malloc");
    const fkv_matrix_kind kind = fkv_tensor_matrix_kind(tensor, &group);
    for (uint32_t row = 0; row < tensor->n_rows; row++) {
        fkv_tensor_row_floats(tensor, row, floats);
        if (group == 0 && tensor->type > FKV_TENSOR_BF16) (void)fkv_tensor_row_halves(tensor, row, (uint8_t *)floats);
        if (group == 0) continue;
        fkv_tensor_row_codes(tensor, row, codes, floats + n, floats + 2 * n);
        for (size_t i = 0; i < n; i++)
            must(codes[i] >> fkv_panel_layout_of(kind).bits == 0, "a code has more bits than its matrix kind allows");
    }
    free(floats);
    free(codes);
}

static void walk_strings(const fkv_bytes *strings, uint32_t n, const uint8_t *bytes, size_t size) {
    for (uint32_t i = 0; i < n; i++) must(walk_inside(strings[i].data, strings[i].size, bytes, size), "string outside its file");
}

static void walk_numbers(const fkv_hparams *hparams) {
    const float numbers[] = {hparams->norm_eps,       hparams->rope.base,   hparams->local_rope.base, hparams->rope.factor,
                             hparams->softcap,        hparams->query_scale, hparams->final_softcap,   hparams->embedding_scale,
                             hparams->residual_scale, hparams->temperature};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        must(isfinite(numbers[i]) && numbers[i] >= 0, "hyperparameter not finite");
    must(hparams->rope.factor > 0, "RoPE factor not positive");
}

static void walk_vocab(const fkv_vocab_source *vocab, const uint8_t *bytes, size_t size) {
    const uint32_t ids[] = {vocab->bos, vocab->eos, vocab->eot, vocab->unk};
    if (vocab->tokens == NULL) return;
    walk_strings(vocab->tokens, vocab->n_tokens, bytes, size);
    walk_strings(vocab->merges, vocab->n_merges, bytes, size);
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++)
        must(ids[i] == FKV_NO_TOKEN || ids[i] < vocab->n_tokens, "token out of range");
    must(vocab->n_ends <= FKV_MAX_END_TOKENS, "too many end tokens");
}

static void walk_weights(const fkv_weights *weights, const uint8_t *bytes, size_t size) {
    uint8_t id[32];
    for (uint32_t i = 0; i < fkv_weights_n_tensors(weights); i++) {
        const fkv_tensor *tensor = fkv_weights_tensor(weights, i);
        must(fkv_weights_find(weights, tensor->name) == tensor, "a tensor was not found by its name");
        walk_tensor(tensor, bytes, size);
    }
    walk_numbers(fkv_weights_hparams(weights));
    walk_vocab(fkv_weights_vocab(weights), bytes, size);
    must(fkv_weights_id(weights, id) == FKV_OK, "fkv_weights_id");
}

#endif
