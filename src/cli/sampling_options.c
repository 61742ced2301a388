/* See sampling_options.h. */
#include "sampling_options.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PENALTY_TOKENS = 64 }; /* number of recent tokens to which the penalties apply */

sampling_options sampling_options_default(void) {
    return (sampling_options){.temperature = -1, .top_p = -1, .min_p = -1, .repetition = -1, .presence = -1, .top_k = UINT32_MAX};
}

void sampling_options_list(sampling_options *o, kit_option list[N_SAMPLING_OPTIONS]) {
    const kit_option options[N_SAMPLING_OPTIONS] = {
        KIT_HEADING("Sampling"),
        {"temperature", 't', OPTION_REAL, &o->temperature, 0, "X",
         "sampling temperature; 0 is greedy. Defaults of -t, --top-k, --top-p, --min-p and --repeat-penalty:\n"
         "the model's recommended settings for chats; otherwise a temperature of 0.7 with -i and 0 without"},
        {"top-k", 0, OPTION_U32, &o->top_k, INT32_MAX, "N", "sample from the N most likely tokens; 0 disables"},
        {"top-p", 0, OPTION_REAL, &o->top_p, 0, "X", "sample from the most likely tokens with total probability X; 1 disables"},
        {"min-p", 0, OPTION_REAL, &o->min_p, 0, "X", "drop tokens less likely than X times the most likely token; 0 disables"},
        {"repeat-penalty", 0, OPTION_REAL, &o->repetition, 0, "X", "make the last 64 tokens less likely; 1 disables"},
        {"presence-penalty", 0, OPTION_REAL, &o->presence, 0, "X",
         "value subtracted from the logits of the last 64 tokens (default 0)"},
        {"logit-bias", 0, OPTION_TEXTS, &o->bias, 0, "TOKEN=X",
         "add X to the logit of a token ID (see flatkv tokenize); -inf bans the token; repeatable"},
        {"stop", 0, OPTION_TEXTS, &o->stop, 0, "TEXT", "end the answer before this text; may be given up to 16 times"},
        {"reasoning", 0, OPTION_CHOICE, &o->reasoning, 0, "show|hide",
         "show the model's reasoning dimmed on a terminal, or hide it (default show);\na pipe receives only the answer"},
        {0}};
    memcpy(list, options, sizeof options);
}

static int parse_logit_bias(const char *text, uint32_t n_vocab, fkv_logit_bias *bias) {
    char *end = NULL;
    errno = 0;
    unsigned long token = strtoul(text, &end, 10);
    bool good = errno == 0 && end != text && *end == '=' && token < n_vocab;
    if (good) {
        const char *number = end + 1;
        *bias = (fkv_logit_bias){.token = (uint32_t)token, .bias = strtof(number, &end)};
        good = end != number && *end == 0;
    }
    if (good) return EXIT_GOOD;
    return kit_fail(EXIT_USAGE, "--logit-bias %s: expected TOKEN=X with a token ID from 0 to %u, such as 50=-1.5 or 50=-inf",
                    text, n_vocab - 1);
}

static void override_real(double given, float *target) {
    if (given >= 0) *target = (float)given;
}

int sampling_options_config(const sampling_options *o, const fkv_model *model, sampling_use how, uint64_t seed,
                            fkv_logit_bias *biases, fkv_sampler_config *config) {
    bool recommended = false;
    fkv_sampler_config c = fkv_model_sampling(model, &recommended);
    if (how == SAMPLE_TEXT || (how == SAMPLE_ANSWER && !recommended)) c = fkv_sampler_config_default();
    override_real(o->temperature, &c.temperature);
    override_real(o->top_p, &c.top_p);
    override_real(o->min_p, &c.min_p);
    override_real(o->repetition, &c.repetition_penalty);
    override_real(o->presence, &c.presence_penalty);
    if (o->top_k != UINT32_MAX) c.top_k = o->top_k;
    c.penalty_tokens = PENALTY_TOKENS;
    c.seed = seed;
    if (o->bias.n > SAMPLING_BIASES)
        return kit_fail(EXIT_USAGE, "--logit-bias may be given at most %d times (got %u)", SAMPLING_BIASES, o->bias.n);
    if (o->stop.n > FKV_MAX_STOPS)
        return kit_fail(EXIT_USAGE, "--stop may be given at most %d times (got %u)", FKV_MAX_STOPS, o->stop.n);
    for (uint32_t i = 0; i < o->bias.n; i++) {
        int code = parse_logit_bias(o->bias.texts[i], fkv_model_about(model)->n_vocab, &biases[i]);
        if (code != EXIT_GOOD) return code;
    }
    c.bias = biases;
    c.n_bias = o->bias.n;
    *config = c;
    return EXIT_GOOD;
}
