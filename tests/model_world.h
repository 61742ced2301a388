/* Small models of any architecture, made up of random numbers and written as safetensors with a config.json, and what a plain
 * forward pass in double over the same numbers gives: the truth for tests of loading and running.
 *
 * The plain pass is written from the architectures' published definitions, over Hugging Face's names of tensors and without any
 * table: it shares no line with what it checks. Every helper aborts the program on a failure that is not its subject.
 */
#ifndef FKV_MODEL_WORLD_H
#define FKV_MODEL_WORLD_H

#include <flatkv/model.h>

enum { MODEL_WORLD_VOCAB = 256, MODEL_WORLD_TENSORS = 128 };

typedef struct model_spec {
    const char *type; /* model_type of config.json: "llama", "qwen2", "qwen3", "gemma3_text" */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t ffn_dim;
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;  /* gemma3 */
    uint32_t pattern; /* gemma3: every layer of this period is full */
    bool tied;
    uint32_t bound; /* of the plain pass: every layer sees so many tokens (0: all) and the sinks */
    uint32_t n_sinks;
} model_spec;

typedef struct model_tensor {
    char name[96];
    uint32_t n_rows; /* 0: a vector */
    uint32_t n_cols;
    float *numbers;
} model_tensor;

typedef struct model_world {
    model_spec spec;
    uint32_t n_tensors;
    model_tensor tensors[MODEL_WORLD_TENSORS];
    char folder[512];
} model_world;

/* Random numbers for every tensor of the spec; change them before they are written. */
void model_world_make(model_world *w, const model_spec *spec, uint64_t seed);
void model_world_free(model_world *w); /* removes the folder too */

model_tensor *model_world_tensor(model_world *w, const char *name); /* NULL: not there */
void model_world_drop(model_world *w, const char *name);

/* Writes the files into a folder of its own; returns its path. */
const char *model_world_write(model_world *w);

/* Logits of every token, by the plain pass. logits: [n_tokens, MODEL_WORLD_VOCAB] */
void model_world_truth(const model_world *w, const uint32_t *tokens, uint32_t n_tokens, float *logits);

/* Tokens of a sequence through a runner in steps of `chunk`, all logits kept. logits: [n_tokens, n_vocab] or NULL. */
void model_run(fkv_runner *runner, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, uint32_t chunk, uint32_t n_vocab,
               float *logits);

fkv_seq model_seq(fkv_runner *runner, uint32_t max_tokens);

/* Keys and values of so many bits in groups of 32, small pages, logits of every token of a step. */
fkv_runner_config model_runner_config(uint32_t bits, uint32_t max_tokens, uint32_t step_tokens);

fkv_runner *model_runner(const fkv_model *model, fkv_runner_config config);

/* Text of the book as the needle model was trained on it: lines joined, one space, at most one empty line. How many bytes. */
uint32_t model_book(uint8_t *text, uint32_t capacity);

/* n of its bytes, as the needle model's tokens. */
void model_book_tokens(uint32_t from, uint32_t *tokens, uint32_t n);

#endif
