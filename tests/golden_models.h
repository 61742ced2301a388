/* Tiny models of every family, with the logits that Hugging Face transformers computes for them (scripts/make-model-goldens). A
 * golden file stores tokens, the logits of some positions, and a recipe for regenerating the weights. Helpers abort the program
 * on unexpected failures.
 */
#ifndef FKV_GOLDEN_MODELS_H
#define FKV_GOLDEN_MODELS_H

#include <flatkv/model.h>

#include <jansson.h>

enum { GOLDEN_MAX_TOKENS = 256, GOLDEN_VOCAB = 256, GOLDEN_MAX_ROWS = 8, GOLDEN_MAX_MODELS = 256, GOLDEN_NAME = 64 };

typedef struct golden_model {
    char name[GOLDEN_NAME];
    json_t *json;
    uint32_t n_tokens;
    uint32_t tokens[GOLDEN_MAX_TOKENS];
    uint32_t max_tokens; /* context length of the runner, in tokens */
    uint32_t n_rows;
    uint32_t rows[GOLDEN_MAX_ROWS];               /* positions whose logits are known */
    float logits[GOLDEN_MAX_ROWS * GOLDEN_VOCAB]; /* [n_rows, GOLDEN_VOCAB] */
    char folder[512];                             /* folder with config.json and safetensors files */
} golden_model;

/* Lists the names of all golden models in the tree, sorted. Returns the number of names. */
uint32_t golden_model_names(char names[GOLDEN_MAX_MODELS][GOLDEN_NAME]);

/* Reads a golden file and writes the model folder. */
void golden_model_open(golden_model *golden, const char *name);
void golden_model_close(golden_model *golden); /* deletes the folder */

/* Opens a golden model and loads it on the CPU. Ends the process if the model cannot be loaded. */
fkv_model *golden_model_load(golden_model *golden, const char *name);

/* Generates the values of one tensor of a golden model. out: [n] */
void golden_model_numbers(const char *model, const char *tensor, float middle, float spread, float *out, size_t n);

/* Computes the embedding of all tokens twice: with all dimensions and with half of them. Returns the larger relative L2 error, or
 * 0 if the golden file has no embedding. */
double golden_model_embedding_distance(const golden_model *golden, const fkv_model *model, uint32_t chunk);

/* Returns the relative L2 error of the logits over the positions stored in the golden file. Runs the tokens in chunks, except for
 * the last n_single tokens, which run one at a time. Pages store 16-bit values. */
double golden_model_distance(const golden_model *golden, const fkv_model *model, uint32_t chunk, uint32_t n_single);

#endif
