/* Tiny models of every family and what Hugging Face's transformers computes of them (scripts/make-model-goldens): tokens, some
 * rows of logits, and how to make the weights, which are not stored. Every helper ends the program on a failure that is not its
 * subject.
 */
#ifndef FKV_GOLDEN_MODELS_H
#define FKV_GOLDEN_MODELS_H

#include <flatkv/model.h>

#include <jansson.h>

enum { GOLDEN_MAX_TOKENS = 256, GOLDEN_VOCAB = 256, GOLDEN_MAX_ROWS = 8, GOLDEN_MAX_MODELS = 128, GOLDEN_NAME = 64 };

typedef struct golden_model {
    char name[GOLDEN_NAME];
    json_t *json;
    uint32_t n_tokens;
    uint32_t tokens[GOLDEN_MAX_TOKENS];
    uint32_t max_tokens; /* of the runner */
    uint32_t n_rows;
    uint32_t rows[GOLDEN_MAX_ROWS];               /* whose logits are known */
    float logits[GOLDEN_MAX_ROWS * GOLDEN_VOCAB]; /* [n_rows, GOLDEN_VOCAB] */
    char folder[512];                             /* config.json and safetensors */
} golden_model;

/* Names of all goldens of the tree, sorted; how many. */
uint32_t golden_model_names(char names[GOLDEN_MAX_MODELS][GOLDEN_NAME]);

/* Reads a golden and writes the model's folder. */
void golden_model_open(golden_model *golden, const char *name);
void golden_model_close(golden_model *golden); /* removes the folder */

/* The numbers of a tensor of the golden's model: [n] */
void golden_model_numbers(const char *model, const char *tensor, float middle, float spread, float *out, size_t n);

/* Relative L2 of the logits of the known rows: all tokens in chunks, the last n_single of them one by one. 16-bit pages. */
double golden_model_distance(const golden_model *golden, const fkv_model *model, uint32_t chunk, uint32_t n_single);

#endif
