/* Sampling options. Command-line options override the model's recommended settings, which override the defaults. The recommended
 * settings do not apply to plain text, which is continued greedily by default. A single question is also answered greedily if the
 * model has no recommended settings, because greedy answers are reproducible and stay close to the document. */
#ifndef FKV_CLI_SAMPLING_OPTIONS_H
#define FKV_CLI_SAMPLING_OPTIONS_H

#include "model_options.h"

enum { N_SAMPLING_OPTIONS = 11, SAMPLING_BIASES = 256 }; /* N_SAMPLING_OPTIONS includes the heading and the terminator */

typedef enum sampling_use { SAMPLE_TEXT, SAMPLE_ANSWER, SAMPLE_CONVERSATION } sampling_use;

typedef struct sampling_options {
    double temperature; /* this field and the following `double` fields are negative if the option was not given */
    double top_p;
    double min_p;
    double repetition;
    double presence;
    uint32_t top_k; /* UINT32_MAX: not given */
    kit_texts bias; /* "TOKEN=NUMBER" */
    kit_texts stop;
    int reasoning; /* 0: show, 1: hide */
} sampling_options;

sampling_options sampling_options_default(void);
void sampling_options_list(sampling_options *o, kit_option list[N_SAMPLING_OPTIONS]);

/* Fills in *config, which then points to `biases`. biases: [SAMPLING_BIASES]. Returns an exit code. */
int sampling_options_config(const sampling_options *o, const fkv_model *model, sampling_use how, uint64_t seed,
                            fkv_logit_bias *biases, fkv_sampler_config *config);

#endif
