/* Small random models of any architecture, for tests that load and run models. A model is written as safetensors files with a
 * config.json, and a reference forward pass computes its logits in double precision from the same weights.
 *
 * The reference follows the published definitions of the architectures, uses Hugging Face tensor names, and shares no code with
 * the implementation under test. Helpers abort the program on unexpected failures.
 */
#ifndef FKV_MODEL_FIXTURE_H
#define FKV_MODEL_FIXTURE_H

#include <flatkv/model.h>

enum { MODEL_FIXTURE_VOCAB = 256, MODEL_FIXTURE_TENSORS = 128 };

typedef struct model_spec {
    const char *type; /* model_type of config.json: "llama", "qwen2", "qwen3", "gemma3_text" */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t ffn_dim;
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;  /* gemma3 only */
    uint32_t pattern; /* gemma3 only: every pattern-th layer has full attention */
    bool tied;
    uint32_t bound; /* used only by the reference pass: number of most recent tokens that each layer sees in addition to the
                       sinks; 0 for no limit */
    uint32_t n_sinks;
} model_spec;

typedef struct model_tensor {
    char name[96];
    uint32_t n_rows; /* number of rows; 0 for a vector */
    uint32_t n_cols;
    float *numbers;
} model_tensor;

typedef struct model_fixture {
    model_spec spec;
    uint32_t n_tensors;
    model_tensor tensors[MODEL_FIXTURE_TENSORS];
    char folder[512];
} model_fixture;

/* Generates random values for every tensor of the spec. A test may modify the values until it calls model_fixture_write(). */
void model_fixture_make(model_fixture *w, const model_spec *spec, uint64_t seed);
void model_fixture_free(model_fixture *w); /* frees the fixture and deletes its folder */

model_tensor *model_fixture_tensor(model_fixture *w, const char *name); /* returns NULL if the tensor does not exist */
void model_fixture_drop(model_fixture *w, const char *name);

/* Writes the model files into a new folder and returns its path. */
const char *model_fixture_write(model_fixture *w);

/* Computes the reference logits of every token. logits: [n_tokens, MODEL_FIXTURE_VOCAB] */
void model_fixture_reference(const model_fixture *w, const uint32_t *tokens, uint32_t n_tokens, float *logits);

/* Runs the tokens of a sequence in steps of `chunk` tokens and stores all logits. logits: [n_tokens, n_vocab], or NULL to discard
 * the logits. */
void model_run(fkv_runner *runner, fkv_seq seq, const uint32_t *tokens, uint32_t n_tokens, uint32_t chunk, uint32_t n_vocab,
               float *logits);

fkv_seq model_seq(fkv_runner *runner, uint32_t max_tokens);

/* Returns a config with small pages, logits for every token of a step, and keys and values with the given bit widths in groups of
 * 32. */
fkv_runner_config model_runner_config(uint32_t bits, uint32_t max_tokens, uint32_t step_tokens);

fkv_runner *model_runner(const fkv_model *model, fkv_runner_config config);

/* Reads the text of the book in the form on which the needle model was trained: lines of a paragraph are joined, and there are no
 * multiple spaces or empty lines in a row. Returns the number of bytes. */
uint32_t model_book(uint8_t *text, uint32_t capacity);

/* Returns n bytes of the book as token IDs of the needle model. */
void model_book_tokens(uint32_t from, uint32_t *tokens, uint32_t n);

#endif
