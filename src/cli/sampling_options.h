/* How tokens are drawn: the options, over what the model's files say, over what is usual. Text is continued greedily; so is one
 * question answered where the files say nothing, which is the same every time and keeps closest to a document.
 */
#ifndef FKV_CLI_SAMPLING_OPTIONS_H
#define FKV_CLI_SAMPLING_OPTIONS_H

#include "model_options.h"

enum { N_SAMPLING_OPTIONS = 12, SAMPLING_BIASES = 256 };

typedef enum sampling_use { SAMPLE_TEXT, SAMPLE_ANSWER, SAMPLE_TALK } sampling_use;

typedef struct sampling_options {
    double temperature; /* this and the others below: negative where not said */
    double top_p;
    double min_p;
    double repetition;
    double presence;
    double frequency;
    uint32_t top_k; /* UINT32_MAX: not said */
    uint32_t last;
    kit_texts bias; /* "TOKEN=NUMBER" */
    kit_texts stop;
    int reasoning; /* 0 show, 1 hide */
} sampling_options;

sampling_options sampling_options_default(void);
void sampling_options_list(sampling_options *o, kit_option list[N_SAMPLING_OPTIONS]);

/* Returns an exit code, with a message on failure. biases: [SAMPLING_BIASES], which the configuration points to. */
int sampling_options_config(const sampling_options *o, const fkv_model *model, sampling_use how, uint64_t seed,
                            fkv_logit_bias *biases, fkv_sampler_config *config);

#endif
