/* Memory that a model needs with the default options. */
#ifndef FKV_CLI_MODEL_COST_H
#define FKV_CLI_MODEL_COST_H

#include <flatkv/flatkv.h>

typedef struct model_cost {
    bool loads;
    fkv_status status; /* FKV_OK, or an error code if the model cannot be loaded */
    char architecture[32];
    uint32_t trained;       /* context length for which the model was trained, in tokens */
    uint32_t context;       /* context length used for the estimate, in tokens: the trained length, but at most 32768 */
    uint64_t total_bytes;   /* size of the weights plus the planned memory */
    uint64_t weights_bytes; /* of total_bytes */
    uint64_t token_bytes;
    char reason[512]; /* error message if the model cannot be loaded */
} model_cost;

/* Computes the memory plan of the model at `path`: a .gguf file, a safetensors folder or a config.json. Does not read the
 * weights. */
model_cost model_cost_of(const char *path);

#endif
